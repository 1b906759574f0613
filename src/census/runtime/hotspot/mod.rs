//! A HotSpot JVM's memory from its own data: its heap's range (`CollectedHeap::_reserved`), its limit (the flag `MaxHeapSize`), and its
//! counters (`perf_data`).
//!
//! Committed memory is determined by the mappings: HotSpot reserves inaccessible memory and makes it accessible when it commits it.

pub mod perf_data;
pub mod structs;

use std::ops::Range;

use serde::Serialize;

use self::perf_data::Counters;
use self::structs::{FlagPlace, Library, Structs};
use super::super::layout_cache::ByBuildId;
use super::super::memory::{Memory, is_user_address, word32_at};
use super::super::not_malloc::JAVA_HEAP_FILE;
use super::super::objects::{range_of, without};
use super::super::page_cache::PageCache;
use super::Kind;
use super::view::View;
use crate::process::file::MappedFile;
use crate::process::{Mapping, Maps};

/// Largest Java heap that is accepted: 16 TiB, ZGC's limit.
const HEAP_BYTES_MAX: u64 = 16 << 40;

/// How far behind the archive of classes the class space begins at most.
const CLASS_SPACE_AFTER: u64 = 16 << 20;
/// A node of metaspace (`Settings::virtual_space_node_default_word_size`), a root chunk, and what is opened at once.
const METASPACE_NODE_BYTES: u64 = 64 << 20;
const METASPACE_ROOT_BYTES: u64 = 4 << 20;
const METASPACE_STEP_BYTES: u64 = 64 << 10;

/// A JVM's memory, from its own data.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct JavaMemory {
    /// The garbage collector: `serial`, `parallel`, `g1`, `z`, `shenandoah` or `epsilon`; absent = not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub collector: Option<&'static str>,
    /// The Java heap.
    pub heap: JavaHeap,
    /// Class metadata, including the compressed class space; absent if the JVM keeps no counters (`-XX:-UsePerfData`) or, with some
    /// collectors, before its first collection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metaspace: Option<Metaspace>,
    /// Memory of classes by its mappings: `class_space` (the compressed class space), `metaspace` (other class metadata, most likely),
    /// `class_archive` (the mapped archive, CDS); what was found.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<ClassMemory>,
}

/// Memory of classes, by its mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct ClassMemory {
    /// `class_space`, `metaspace` or `class_archive`.
    pub name: &'static str,
    /// Bytes reserved.
    pub reserved_bytes: u64,
    /// Of them, committed.
    pub committed_bytes: u64,
    /// Of them, in RAM.
    pub resident_bytes: u64,
}

/// The Java heap, which is outside malloc.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct JavaHeap {
    /// First address of the reservation; absent = not known (ZGC).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// Address space reserved for it, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_bytes: Option<u64>,
    /// Of the reservation, what the JVM has committed, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub committed_bytes: Option<u64>,
    /// Of the reservation, in RAM, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// Of the reservation, in swap, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swapped_bytes: Option<u64>,
    /// Bytes of objects, including garbage, by the JVM's counters: G1 updates them only at collections. Absent if the JVM keeps none, or
    /// before the first collection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Its limit in bytes (`MaxHeapSize`, `-Xmx`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// Origin of the limit: `command_line` (`-Xmx`), `environment`, `config_file`, `max_ram_percentage` (a configured share), or `default`
    /// (the JVM's own choice, a quarter of the container's or machine's memory).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_set_by: Option<&'static str>,
}

/// Metaspace, by the JVM's counters, which it updates at collections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct Metaspace {
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes committed.
    pub committed_bytes: u64,
    /// Bytes reserved.
    pub reserved_bytes: u64,
    /// Of `committed_bytes`, in the compressed class space.
    pub class_space_committed_bytes: u64,
}

/// Where a build of libjvm keeps what is read; distances are from its first address.
#[derive(Debug, Clone, Copy, Default)]
struct Layout {
    collected_heap: Option<u64>,
    reserved_start: Option<u64>,
    reserved_words: Option<u64>,
    max_heap: Option<FlagPlace>,
    max_ram: [Option<FlagPlace>; 2],
    class_space: Option<FlagPlace>,
    compressed_classes: Option<FlagPlace>,
    collectors: [Option<FlagPlace>; COLLECTORS.len()],
}

/// Flags of the collectors, and what they are called here.
const COLLECTORS: [(&str, &str); 6] = [
    ("UseSerialGC", "serial"),
    ("UseParallelGC", "parallel"),
    ("UseG1GC", "g1"),
    ("UseZGC", "z"),
    ("UseShenandoahGC", "shenandoah"),
    ("UseEpsilonGC", "epsilon"),
];

/// Offsets of HotSpot's structures by build id.
#[derive(Debug, Default)]
pub struct LayoutCache {
    by_build_id: ByBuildId<Layout>,
}

/// A JVM's figures, and the ranges that are known to be its own.
pub type JavaAccount = (JavaMemory, Vec<(Kind, Vec<Range<u64>>)>);

/// Reads what the JVM in a process says. `None` if there is none, or its library's tables could not be read.
pub fn look(view: &View<'_>, layouts: &mut LayoutCache) -> Option<JavaAccount> {
    let (memory, maps) = (view.memory, view.maps);
    let object = view.objects.iter().find(|one| one.object().name == "libjvm.so")?;
    let build_id = object.build_id();
    let layout = layouts.by_build_id.get(build_id.as_ref()).or_else(|| {
        let layout = layout(memory, maps)?;
        layouts.by_build_id.remember(build_id.as_ref(), layout);
        Some(layout)
    })?;
    let process = Jvm { memory, base: object.object().base, layout };
    let counters = counters(memory, maps);
    let mut heap = JavaHeap { max_bytes: process.flag(layout.max_heap), ..JavaHeap::default() };
    heap.max_set_by = heap.max_bytes.and_then(|_| process.limit_origin());
    // Some collectors count at their first collection only.
    heap.used_bytes = counters.as_ref().and_then(Counters::heap_used_bytes).filter(|&bytes| bytes > 0);
    if let Some(range) = process.heap_range() {
        let residency = PageCache::new(memory).residency(range.clone());
        heap.address = Some(range.start);
        heap.reserved_bytes = Some(range.end - range.start);
        heap.committed_bytes = Some(committed_bytes(maps, &range));
        heap.resident_bytes = Some(residency.resident_bytes);
        heap.swapped_bytes = Some(residency.swapped_bytes);
    }
    if heap.address.is_none() {
        add_heap_file(&mut heap, view);
    }
    let metaspace = counters.as_ref().and_then(|counters| {
        Some(Metaspace {
            used_bytes: counters.get("sun.gc.metaspace.used")?,
            committed_bytes: counters.get("sun.gc.metaspace.capacity").filter(|&bytes| bytes > 0)?,
            reserved_bytes: counters.get("sun.gc.metaspace.maxCapacity")?,
            class_space_committed_bytes: counters.get("sun.gc.compressedclassspace.capacity").unwrap_or(0),
        })
    });
    let is_told = heap != JavaHeap::default() || metaspace.is_some();
    if !is_told {
        return None;
    }
    let mut claims: Vec<(Kind, Vec<Range<u64>>)> = Vec::new();
    claims.extend(process.heap_range().map(|range| (Kind::JavaHeap, vec![range])));
    let archive = class_archive(view, process.heap_range());
    let space = process.flag(layout.class_space).map(|bytes| class_space(view, &archive, bytes)).unwrap_or_default();
    let mut taken: Vec<Range<u64>> = space.iter().cloned().chain(process.heap_range()).collect();
    taken.sort_by_key(|range| range.start);
    // The class space has the shape of metaspace too: where there is one that was not found, nothing is said.
    let is_class_space_known = !space.is_empty() || process.is_off(layout.compressed_classes);
    let nodes = if is_class_space_known { metaspace_nodes(view, &taken) } else { Vec::new() };
    let classes = [("class_space", &space), ("metaspace", &nodes), ("class_archive", &archive)];
    let classes = classes.into_iter().filter(|(_, ranges)| !ranges.is_empty()).map(|(name, ranges)| ClassMemory::of(name, ranges, view));
    let classes = classes.collect();
    claims.push((Kind::JavaMetaspace, nodes));
    claims.push((Kind::JavaClasses, space));
    Some((JavaMemory { collector: process.collector(), heap, metaspace, classes }, claims))
}

/// ZGC's heap is a file in memory, of which each part is mapped once or, before JDK 21, three times: what of it is mapped, and in memory.
fn add_heap_file(heap: &mut JavaHeap, view: &View<'_>) {
    let is_heap = |one: &&Mapping| one.path().is_some_and(|path| path.to_string_lossy().starts_with(JAVA_HEAP_FILE));
    let mut parts: Vec<(u64, Range<u64>)> =
        view.maps.mappings.iter().filter(is_heap).map(|one| (one.offset.0, one.start.0..one.end.0)).collect();
    parts.sort_by_key(|(offset, _)| *offset);
    let (mut pages, mut known_until) = (PageCache::without_foresight(view.memory), 0u64);
    for (offset, range) in parts {
        let again = known_until.saturating_sub(offset).min(range.end - range.start);
        let once = range.start + again..range.end;
        known_until = known_until.max(offset.saturating_add(range.end - range.start));
        let residency = pages.residency(once.clone());
        add(&mut heap.committed_bytes, once.end - once.start);
        add(&mut heap.resident_bytes, residency.resident_bytes);
        add(&mut heap.swapped_bytes, residency.swapped_bytes);
    }
}

fn add(sum: &mut Option<u64>, bytes: u64) {
    *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
}

impl ClassMemory {
    fn of(name: &'static str, ranges: &[Range<u64>], view: &View<'_>) -> Self {
        let mut pages = PageCache::without_foresight(view.memory);
        let mut sum = Self { name, ..Self::default() };
        for range in ranges {
            sum.reserved_bytes += range.end - range.start;
            sum.committed_bytes += committed_bytes(view.maps, range);
            sum.resident_bytes += pages.resident_bytes(range.clone());
        }
        sum
    }
}

/// The mappings of the archive of classes outside the Java heap, which contains the archived objects.
fn class_archive(view: &View<'_>, heap: Option<Range<u64>>) -> Vec<Range<u64>> {
    let is_archive = |one: &&Mapping| one.path().is_some_and(|path| path.extension().is_some_and(|end| end == "jsa"));
    let is_outside = |range: &Range<u64>| heap.as_ref().is_none_or(|heap| range.end <= heap.start || range.start >= heap.end);
    view.maps.mappings.iter().filter(is_archive).map(|one| one.start.0..one.end.0).filter(is_outside).collect()
}

/// The compressed class space: the one reservation of its size that HotSpot places right behind the archive of classes, or where it begins
/// at a multiple of its alignment. It is opened from its start.
fn class_space(view: &View<'_>, archive: &[Range<u64>], bytes: u64) -> Vec<Range<u64>> {
    let Some(archive_end) = archive.iter().map(|one| one.end).max() else { return Vec::new() };
    // The reservation begins at most 16 MiB behind the archive.
    let near = archive_end..archive_end.saturating_add(CLASS_SPACE_AFTER);
    let begins = view.maps.mappings.iter().find(|one| near.contains(&one.start.0) && one.permissions.write && one.path().is_none());
    let range = begins.and_then(|one| Some(one.start.0..one.start.0.checked_add(bytes)?));
    range.filter(|range| view.reserves(range)).into_iter().collect()
}

/// Nodes of metaspace outside of the class space (JDK 16 on): reservations of 64 MiB, aligned to 4 MiB, opened from the start of each 4 MiB
/// on in steps of 64 KiB, and never executable. They are recognised by their shape alone, outside of what is known to be other memory of the
/// JVM (`taken`, sorted): a Java heap that is open in part has that shape, and code with what lies before it. Where other memory without a
/// file lies right beside one, the kernel joins the two on that side.
fn metaspace_nodes(view: &View<'_>, taken: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut nodes: Vec<Range<u64>> = Vec::new();
    for range in without(&view.unbacked, taken) {
        let inside: Vec<&Mapping> = view.maps.mappings.iter().filter(|one| range.contains(&one.start.0)).collect();
        let by_end = |one: &&Mapping| one.end.0.checked_sub(METASPACE_NODE_BYTES);
        let mut starts: Vec<u64> = inside.iter().map(|one| one.start.0).chain(inside.iter().filter_map(by_end)).collect();
        starts.sort_unstable();
        starts.dedup();
        for start in starts {
            let node = start..start.saturating_add(METASPACE_NODE_BYTES);
            let is_apart = nodes.last().is_none_or(|last| last.end <= node.start);
            if is_apart && node.start >= range.start && node.end <= range.end && is_metaspace_node(view, &inside, &node) {
                nodes.push(node);
            }
        }
    }
    nodes
}

fn is_metaspace_node(view: &View<'_>, mappings: &[&Mapping], node: &Range<u64>) -> bool {
    if !node.start.is_multiple_of(METASPACE_ROOT_BYTES) || range_of(&view.anonymous, node.start).is_none() {
        return false;
    }
    let (mut is_closed, mut is_joined) = (false, false);
    for one in mappings.iter().filter(|one| one.end.0 > node.start && one.start.0 < node.end) {
        let part = one.start.0.max(node.start)..one.end.0.min(node.end);
        let is_in_steps = part.start.is_multiple_of(METASPACE_STEP_BYTES) && part.end.is_multiple_of(METASPACE_STEP_BYTES);
        if !is_in_steps || one.permissions.execute {
            return false;
        }
        is_closed |= !one.permissions.write;
        is_joined |= part != (one.start.0..one.end.0);
    }
    // Any large block that is wholly open has such a part.
    is_closed || !is_joined
}

/// A libjvm in a process, with its build's layout.
struct Jvm<'a> {
    memory: &'a dyn Memory,
    base: u64,
    layout: Layout,
}

impl Jvm<'_> {
    fn at(&self, distance: u64) -> u64 {
        self.base.wrapping_add(distance)
    }

    fn flag(&self, place: Option<FlagPlace>) -> Option<u64> {
        self.memory.word(self.at(place?.value)).filter(|&value| value > 0 && value <= HEAP_BYTES_MAX)
    }

    /// Whether a flag is known to be off.
    fn is_off(&self, place: Option<FlagPlace>) -> bool {
        place.and_then(|place| self.memory.bytes(self.at(place.value), 1)).is_some_and(|byte| byte.first() == Some(&0))
    }

    /// The low four bits of a flag's word, `JVMFlagOrigin`.
    fn origin(&self, place: Option<FlagPlace>) -> Option<u32> {
        self.memory.bytes(self.at(place?.origin), 4).map(|bytes| word32_at(&bytes, 0) & 15)
    }

    fn limit_origin(&self) -> Option<&'static str> {
        const BY_DEFAULT: u32 = 0;
        const BY_ERGONOMICS: u32 = 5;
        Some(match self.origin(self.layout.max_heap)? {
            1 => "command_line",
            2 => "environment",
            3 => "config_file",
            BY_DEFAULT | BY_ERGONOMICS => {
                let chosen = self.layout.max_ram.iter().any(|&place| self.origin(place).is_some_and(|origin| (1..=3).contains(&origin)));
                if chosen { "max_ram_percentage" } else { "default" }
            }
            _ => return None,
        })
    }

    fn collector(&self) -> Option<&'static str> {
        let is_on = |place: &Option<FlagPlace>| {
            place.and_then(|place| self.memory.bytes(self.at(place.value), 1)).is_some_and(|byte| byte.first() == Some(&1))
        };
        self.layout.collectors.iter().zip(COLLECTORS).find(|(place, _)| is_on(place)).map(|(_, (_, name))| name)
    }

    /// The reservation of the Java heap.
    fn heap_range(&self) -> Option<Range<u64>> {
        let heap = self.memory.word(self.at(self.layout.collected_heap?)).filter(|&heap| is_user_address(heap))?;
        let start = self.memory.word(heap.wrapping_add(self.layout.reserved_start?)).filter(|&start| is_user_address(start))?;
        let bytes = self.memory.word(heap.wrapping_add(self.layout.reserved_words?))?.checked_mul(8)?;
        let end = start.checked_add(bytes).filter(|&end| is_user_address(end))?;
        (bytes > 0 && bytes <= HEAP_BYTES_MAX).then_some(start..end)
    }
}

/// Reads the library's own description of itself.
fn layout(memory: &dyn Memory, maps: &Maps) -> Option<Layout> {
    let process = memory.process()?;
    let mapping = maps.executable_files().find(|mapping| mapping.path().is_some_and(|path| path.ends_with("libjvm.so")))?;
    let file = MappedFile::open(process, mapping).ok()?;
    let bias = file.elf.load_bias(mapping.start.0, mapping.offset)?;
    let library = Library { memory, elf: &file.elf, bias };
    let structs = Structs::read(&library, &["Universe", "CollectedHeap", "MemRegion", "JVMFlag", "Flag"])?;
    let reserved = structs.offset("CollectedHeap", "_reserved");
    let inside = |field: &str| Some(reserved? + structs.offset("MemRegion", field)?);
    let [max_heap, percentage, fraction, class_space, compressed_classes] =
        structs.flags(["MaxHeapSize", "MaxRAMPercentage", "MaxRAMFraction", "CompressedClassSpaceSize", "UseCompressedClassPointers"]);
    Some(Layout {
        collected_heap: structs.distance("Universe", "_collectedHeap"),
        reserved_start: inside("_start"),
        reserved_words: inside("_word_size"),
        max_heap,
        max_ram: [percentage, fraction],
        class_space,
        compressed_classes,
        collectors: structs.flags(COLLECTORS.map(|(flag, _)| flag)),
    })
}

/// Bytes of a reservation that can be written to.
fn committed_bytes(maps: &Maps, range: &Range<u64>) -> u64 {
    let open = maps.mappings.iter().filter(|mapping| mapping.permissions.write);
    open.map(|mapping| mapping.end.0.min(range.end).saturating_sub(mapping.start.0.max(range.start))).sum()
}

/// The JVM's counters, from its mapping of their file.
fn counters(memory: &dyn Memory, maps: &Maps) -> Option<Counters> {
    let is_counters = |mapping: &&Mapping| {
        let folder = mapping.path().and_then(|path| path.parent()?.file_name()?.to_str());
        folder.is_some_and(|folder| folder.starts_with("hsperfdata_")) && mapping.permissions.write
    };
    let mapping = maps.mappings.iter().find(is_counters)?;
    let bytes = usize::try_from(mapping.len()).unwrap_or(0).min(perf_data::BYTES_MAX);
    let mut read = vec![0u8; bytes];
    let got = memory.read(mapping.start.0, &mut read);
    Counters::parse(read.get(..got)?)
}
