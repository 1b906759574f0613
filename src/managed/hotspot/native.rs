//! The native memory of a JVM, by part, from outside: from the JVM's description of its own structures, its flags, its mappings and its
//! counters. Nothing runs in the process.
//!
//! The names of the parts follow those of Native Memory Tracking (`jcmd PID VM.native_memory`), with which they agree where it is on.

use std::ops::Range;

use super::Refusal;
use super::classes::{self, Class};
use super::layout::{self, AddressArray, CodeHeaps, address_at};
use crate::census::page_cache::PageCache;
use crate::census::runtime::hotspot::structs::{FlagPlace, Library, Structs};
use crate::census::runtime::hotspot::{ClassMemory, JavaMemory};
use crate::census::{Census, Memory, ThreadState};
use crate::managed::account::{self, Account, Part};
use crate::managed::memory::ImageMemory;
use crate::process::file::MappedFile;
use crate::process::{Backing, Maps, Process};

/// Structures that are described, beside those of classes.
const WANTED: [&str; 13] = [
    "CodeCache",
    "CodeHeap",
    "CompressedOops",
    "GenericGrowableArray",
    "GrowableArray<int>",
    "GrowableArrayBase",
    "JavaThread",
    "Thread",
    "Threads",
    "ThreadsList",
    "ThreadsSMRSupport",
    "VirtualSpace",
    "Abstract_VM_Version",
];

/// Heaps of a code cache: HotSpot has three.
const CODE_HEAPS_MAX: u32 = 8;
/// Threads of a JVM that are read.
const THREADS_MAX: u32 = 1 << 16;
/// Largest reservation that is believed: a stack, and a code heap with its map.
const RESERVATION_BYTES_MAX: u64 = 4 << 30;
/// Largest total of buffers that is believed: 16 TiB.
const BUFFERS_BYTES_MAX: u64 = 16 << 40;

/// The JDK's class that counts direct buffers, the one that counts mapped ones (before JDK 14 by another name), and that of the counters.
const CLASSES: [&str; 4] = [
    "java/nio/Bits",
    "sun/nio/ch/FileChannelImpl$DefaultUnmapper",
    "sun/nio/ch/FileChannelImpl$Unmapper",
    "java/util/concurrent/atomic/AtomicLong",
];

/// Where a build of HotSpot keeps what is read here. Absent = it does not describe that.
#[derive(Debug)]
struct Layout {
    major: u32,
    code_heaps: Option<CodeHeaps>,
    code_spaces: Option<[u64; 2]>,
    space: Option<[u64; 4]>,
    threads: Option<Threads>,
    stack: Option<[u64; 2]>,
    mark_stack: Option<FlagPlace>,
    classes: Option<classes::Layout>,
}

/// Where the addresses of the Java threads are found.
#[derive(Debug, Clone, Copy)]
enum Threads {
    /// All of them.
    All(AddressArray),
    /// A variable with the address of the first, and the field with that of the next (JDK 8).
    Chain { variable: u64, next: u64 },
}

impl Threads {
    fn read(structs: &Structs<'_>) -> Option<Self> {
        if let Some(variable) = structs.address("Threads", "_thread_list") {
            return Some(Self::Chain { variable, next: structs.offset("JavaThread", "_next")? });
        }
        Some(Self::All(AddressArray {
            variable: structs.address("ThreadsSMRSupport", "_java_thread_list")?,
            length: structs.offset("ThreadsList", "_length")?,
            data: structs.offset("ThreadsList", "_threads")?,
        }))
    }

    /// The threads' addresses, at most [`THREADS_MAX`]. `None` if the variable cannot be read.
    fn addresses(self, memory: &dyn Memory) -> Option<Vec<u64>> {
        match self {
            Self::All(array) => Some(array.read(memory, THREADS_MAX)?.into_iter().flatten().collect()),
            Self::Chain { variable, next } => {
                let first = address_at(memory, variable)?;
                let chain = std::iter::successors(Some(first), |thread| address_at(memory, thread.wrapping_add(next)));
                Some(chain.take(THREADS_MAX as usize).collect())
            }
        }
    }
}

/// A JVM whose native memory is read, now and again.
#[derive(Debug)]
pub struct Native {
    memory: ImageMemory,
    reader: Reader,
}

impl Native {
    /// Reads the description of the JVM in a process; `None` if there is no libjvm.
    ///
    /// # Errors
    /// If it does not describe itself.
    pub fn open(process: Process) -> Option<Result<Self, Refusal>> {
        let maps = process.maps().ok()?;
        let mapping = super::library(&maps)?;
        let read = || {
            let unreadable = |error: &dyn std::fmt::Display| Refusal::Library(error.to_string());
            let file = MappedFile::open(&process, mapping).map_err(|error| unreadable(&error))?;
            let bias = file.elf.load_bias(mapping.start.0, mapping.offset).ok_or(Refusal::NoStructures)?;
            let memory = ImageMemory::open(process, &maps).map_err(|error| unreadable(&error))?;
            let reader = Reader::of(&Library { memory: &memory, elf: &file.elf, bias })?;
            Ok(Self { memory, reader })
        };
        Some(read())
    }

    /// The parts of its memory now. `census` is of the same moment, with the memory outside malloc.
    pub fn look(&mut self, census: &Census, threads: &[ThreadState]) -> Option<Account> {
        let maps = self.memory.maps().ok()?;
        let mut parts = census.runtimes.java.as_ref().map(of_classes).unwrap_or_default();
        parts.extend(self.reader.parts(&self.memory, &maps, threads));
        let java = census.runtimes.java.as_ref();
        parts.extend(java.and_then(|java| self.reader.gc_tables(&self.memory, java)));
        // What lies within malloc follows it.
        let (within, mut own): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|part| part.within.is_some());
        own.extend(account::malloc(census));
        own.extend(within);
        Some(Account { runtime: "java", parts: own, not_known: vec![NOT_KNOWN], ..Account::default() })
    }
}

/// What HotSpot does not describe.
const NOT_KNOWN: &str = "what of malloc is the collector's, the compilers', or for symbols: HotSpot describes no counters of them; fragprof record \
                         names their stacks, and jcmd PID VM.native_memory counts them if -XX:NativeMemoryTracking is on";

/// The Java heap and the memory of classes, as a census has them.
fn of_classes(java: &JavaMemory) -> Vec<Part> {
    let heap = Part {
        name: "java_heap",
        reserved_bytes: java.heap.reserved_bytes,
        committed_bytes: java.heap.committed_bytes,
        resident_bytes: java.heap.resident_bytes,
        used_bytes: java.heap.used_bytes,
        source: "CollectedHeap::_reserved and the mappings; in use: the JVM's counters, at its last collection",
        ..Part::default()
    };
    let of_class = |part: &ClassMemory| Part {
        name: part.name,
        reserved_bytes: Some(part.reserved_bytes),
        committed_bytes: Some(part.committed_bytes),
        resident_bytes: Some(part.resident_bytes),
        used_bytes: java.metaspace.filter(|_| part.name == "metaspace").map(|one| one.used_bytes),
        source: match part.name {
            "class_space" => "its size (CompressedClassSpaceSize), its place behind the archive, and the mappings",
            "class_archive" => "the mappings of the archive of classes (CDS)",
            _ => "the shape of its reservations; in use: with the class space, by the JVM's counters, at its last collection",
        },
        ..Part::default()
    };
    std::iter::once(heap).chain(java.classes.iter().map(of_class)).collect()
}

/// Reads a JVM's memory by its description of itself.
#[derive(Debug)]
pub struct Reader {
    base: u64,
    layout: Layout,
    known: [Option<Class>; CLASSES.len()],
}

fn resident_bytes(memory: &dyn Memory, ranges: impl Iterator<Item = Range<u64>>) -> u64 {
    let mut pages = PageCache::without_foresight(memory);
    ranges.map(|range| pages.resident_bytes(range)).fold(0, u64::saturating_add)
}

impl Reader {
    /// A reader for the JVM of a library that is there.
    ///
    /// # Errors
    /// If it does not describe itself.
    pub fn of(library: &Library<'_>) -> Result<Self, Refusal> {
        Ok(Self { base: library.bias, layout: Layout::read(library)?, known: [None; CLASSES.len()] })
    }

    /// The parts that the JVM's own structures describe.
    pub fn parts(&mut self, memory: &dyn Memory, maps: &Maps, threads: &[ThreadState]) -> Vec<Part> {
        let parts = [self.code_cache(memory), self.stacks(memory, maps, threads)];
        parts.into_iter().flatten().chain(self.buffers(memory)).collect()
    }

    /// The heaps of the code cache, with their maps of segments.
    fn code_cache(&self, memory: &dyn Memory) -> Option<Part> {
        let heaps = Some(self.layout.code_heaps?.addresses(memory, CODE_HEAPS_MAX)).filter(|heaps| !heaps.is_empty())?;
        let [low, high, low_end, high_end] = self.layout.space?;
        let (mut reserved, mut committed, mut ranges) = (0u64, 0u64, Vec::new());
        for heap in &heaps {
            for space in self.layout.code_spaces? {
                let at = |field: u64| address_at(memory, heap.wrapping_add(space).wrapping_add(field));
                let range = |from: u64, to: u64| {
                    let range = at(from)?..at(to)?;
                    (range.start <= range.end && range.end - range.start <= RESERVATION_BYTES_MAX).then_some(range)
                };
                let (all, open) = (range(low, high)?, range(low_end, high_end)?);
                reserved = reserved.saturating_add(all.end - all.start);
                committed = committed.saturating_add(open.end - open.start);
                ranges.push(open);
            }
        }
        Some(Part {
            name: "code_cache",
            reserved_bytes: Some(reserved),
            committed_bytes: Some(committed),
            resident_bytes: Some(resident_bytes(memory, ranges.into_iter())),
            count: Some(heaps.len() as u64),
            source: "CodeHeap::_memory and _segmap",
            ..Part::default()
        })
    }

    /// The stacks of Java threads by the JVM's list, and of the JVM's other threads by their stack pointers.
    fn stacks(&self, memory: &dyn Memory, maps: &Maps, threads: &[ThreadState]) -> Option<Part> {
        let [base, bytes] = self.layout.stack?;
        let mut stacks: Vec<Range<u64>> = Vec::new();
        for thread in self.layout.threads?.addresses(memory)? {
            let stack = || {
                let end = address_at(memory, thread.wrapping_add(base))?;
                let bytes = memory.word(thread.wrapping_add(bytes)).filter(|&bytes| bytes <= RESERVATION_BYTES_MAX)?;
                Some(end.checked_sub(bytes)?..end)
            };
            // A thread that is being made or ends.
            stacks.extend(stack());
        }
        for sp in threads.iter().filter_map(|thread| thread.stack_pointer) {
            if stacks.iter().any(|stack| stack.contains(&sp)) {
                continue;
            }
            let own = maps.mappings.iter().find(|one| (one.start.0..one.end.0).contains(&sp));
            // The launcher's own thread has the process's stack, which is named and not the JVM's.
            stacks.extend(own.filter(|one| matches!(one.backing, Backing::Anonymous)).map(|one| one.start.0..one.end.0));
        }
        Some(Part {
            name: "thread_stacks",
            reserved_bytes: Some(stacks.iter().map(|stack| stack.end - stack.start).fold(0, u64::saturating_add)),
            resident_bytes: Some(resident_bytes(memory, stacks.iter().cloned())),
            count: Some(stacks.len() as u64),
            source: "JavaThread::_stack_base and _stack_size; other threads: the mappings in which their stack pointers are",
            ..Part::default()
        })
    }

    /// What a collector maps beside the heap: its size follows from the heap's. Not described by HotSpot, so it is computed.
    fn gc_tables(&self, memory: &dyn Memory, java: &JavaMemory) -> Option<Part> {
        let (reserved, committed) = (java.heap.reserved_bytes?, java.heap.committed_bytes?);
        // A byte of a card table and of a table of offsets is for 512 bytes of the heap, a bit of a bitmap for 8. Until JDK 19 G1 had a second
        // bitmap and counted the cards that are refined.
        const CARD_BYTES: u64 = 512;
        const BITMAP_BYTES: u64 = 64;
        let (cards, bitmaps, more) = match java.collector? {
            "serial" => (2, 0, 0),
            "g1" => {
                // Entries of a word; mapped from the start.
                let entries = self.flag(memory, self.layout.mark_stack).unwrap_or(0);
                let twice = self.layout.major < 20;
                (if twice { 3 } else { 2 }, if twice { 2 } else { 1 }, 8 * entries)
            }
            _ => return None,
        };
        let of = |heap: u64| cards * (heap / CARD_BYTES) + bitmaps * (heap / BITMAP_BYTES) + more;
        Some(Part {
            name: "gc_tables",
            reserved_bytes: Some(of(reserved)),
            committed_bytes: Some(of(committed)),
            source: "computed from the heap's size: card and offset tables, mark bitmaps and the mark stack of this collector",
            ..Part::default()
        })
    }

    fn flag(&self, memory: &dyn Memory, place: Option<FlagPlace>) -> Option<u64> {
        memory.word(self.base.wrapping_add(place?.value)).filter(|&value| value <= RESERVATION_BYTES_MAX)
    }

    /// Direct and mapped buffers, by the counters of the JDK's own classes.
    fn buffers(&mut self, memory: &dyn Memory) -> Vec<Part> {
        let Some(layout) = &self.layout.classes else { return Vec::new() };
        // A class is loaded when it is first used.
        if self.known.iter().take(2).any(Option::is_none) {
            self.known = layout.find(memory, CLASSES);
        }
        let [bits, unmapper, older, counter] = self.known;
        let total = |bytes: u64| (bytes <= BUFFERS_BYTES_MAX).then_some(bytes);
        let mut parts = Vec::new();
        let value_at = counter.and_then(|class| layout.offset_of(memory, class, "value"));
        let counted = |field: &str| {
            let object = layout.static_object(memory, bits?, field)?;
            memory.word(object.wrapping_add(u64::from(value_at?))).and_then(total)
        };
        if let Some(bytes) = counted("RESERVED_MEMORY") {
            parts.push(Part {
                name: "direct_buffers",
                used_bytes: Some(bytes),
                count: counted("COUNT"),
                within: Some("malloc"),
                source: "java.nio.Bits.RESERVED_MEMORY and COUNT, in the Java heap",
                ..Part::default()
            });
        }
        let mapped = |field: &str| {
            let bytes = layout.static_bytes(memory, unmapper.or(older)?, field)?;
            total(u64::from_le_bytes(bytes))
        };
        if let Some(bytes) = mapped("totalSize") {
            let count = unmapper.or(older).and_then(|class| layout.static_bytes(memory, class, "count"));
            parts.push(Part {
                name: "mapped_buffers",
                used_bytes: Some(bytes),
                count: count.map(|count| u64::from(u32::from_le_bytes(count))),
                source: "FileChannelImpl's totalSize and count, in the Java heap",
                ..Part::default()
            });
        }
        parts
    }
}

impl Layout {
    fn read(library: &Library<'_>) -> Result<Self, Refusal> {
        let wanted: Vec<&str> = WANTED.into_iter().chain(classes::WANTED).collect();
        let structs = Structs::read(library, &wanted).ok_or(Refusal::NoStructures)?;
        let offset = |owner: &str, field: &str| structs.offset(owner, field);
        let major = layout::version(&structs, library.memory).unwrap_or(0);
        let [narrow, mark_stack] = structs.flags(["UseCompressedOops", "MarkStackSize"]);
        let thread = |field: &str| offset("JavaThread", field).or_else(|| offset("Thread", field));
        Ok(Self {
            major,
            code_heaps: CodeHeaps::read(&structs).ok(),
            code_spaces: all([offset("CodeHeap", "_memory"), offset("CodeHeap", "_segmap")]),
            space: all(["_low_boundary", "_high_boundary", "_low", "_high"].map(|field| offset("VirtualSpace", field))),
            threads: Threads::read(&structs),
            stack: all(["_stack_base", "_stack_size"].map(thread)),
            mark_stack,
            classes: classes::Layout::read(&structs, major, narrow, library.bias),
        })
    }
}

/// All of them, or none.
fn all<const N: usize>(numbers: [Option<u64>; N]) -> Option<[u64; N]> {
    let mut found = [0; N];
    for (place, number) in found.iter_mut().zip(numbers) {
        *place = number?;
    }
    Some(found)
}
