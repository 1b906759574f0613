//! HotSpot JVMs (JDK 11 to 25): where their code lies, how its frames are walked, and the names of methods.
//!
//! ```text
//! libjvm.so: gHotSpotVMStructs ─→ layout ─→ code (heaps, blobs) ─→ rows and the record of the unwinder (bpf/hotspot.bpf.h)
//!                                    └────→ compiled, method ────→ names of frames
//! ```
//!
//! All of it is read from memory that the process controls and changes while it is read: each read is bounded, and what is inconsistent has no
//! name.

pub mod classes;
mod code;
mod compiled;
mod layout;
mod method;
pub mod native;
pub mod packed;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::code::{Blob, Heap};
use self::compiled::Compiled;
use self::layout::Layout;
use self::method::Method;
use super::memory::ImageMemory;
use crate::bpf::{
    self, FRAME_ADDRESS_MASK, FRAME_BYTECODE_BITS, FRAME_CODE_BITS, FRAME_COMPILE_BITS, FRAME_EXACT, FRAME_GUESSED, FRAME_KIND_BIT,
    FRAME_METHOD_BITS, FrameKind, MappingKind,
};
use crate::census::Memory;
use crate::census::memory::is_user_address;
use crate::census::runtime::hotspot::structs::Library;
use crate::frame::{Frame, FrameFlags, MODULE_JAVA_COMPILED, MODULE_JAVA_INLINED, MODULE_JAVA_INTERPRETED, MODULE_JIT};
use crate::process::file::MappedFile;
use crate::process::{Maps, Process};
use crate::unwind::mappings::CodeMapping;

/// Name of the frame at which a virtual thread's stack ends: its callers lie in the Java heap.
pub const REST_IN_HEAP: &str = "[virtual thread: its callers are in the Java heap]";
/// Name of a frame whose code was removed before it could be named.
pub const UNLOADED: &str = "[unloaded Java code]";

/// Methods and tables of compiled methods that are kept; beyond it all are dropped and read again.
const METHODS_MAX: usize = 64 << 10;
const COMPILED_BYTES_MAX: usize = 32 << 20;

/// Time between two searches for what a JVM makes only when it needs it, doubled after each.
const SEARCH_FIRST: Duration = Duration::from_millis(200);
const SEARCH_LAST: Duration = Duration::from_secs(30);
/// The same once something was seen of what is missing.
const SEARCH_SOON: Duration = Duration::from_secs(2);

/// Why a JVM's frames cannot be walked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It is not HotSpot, or was built without.
    #[error("its libjvm.so does not export the description of its structures (gHotSpotVMStructs): not HotSpot, or a build without it")]
    NoStructures,
    /// JDK 7 or older.
    #[error("its HotSpot is older than JDK 8")]
    TooOld,
    /// A structure has changed.
    #[error("its HotSpot does not describe {owner}::{field}: a version that is not known")]
    Missing {
        /// The structure.
        owner: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A structure has changed.
    #[error("the structures of its HotSpot are not laid out as those of known versions")]
    Unknown,
    /// Its library could not be read.
    #[error("its libjvm.so cannot be read: {0}")]
    Library(String),
    /// It has not begun yet.
    #[error("it is starting")]
    Starting,
}

/// A JVM whose structures are known.
#[derive(Debug)]
pub struct Jvm {
    layout: Layout,
    heaps: Vec<Heap>,
    record: bpf::Hotspot,
    searched: Instant,
    pause: Duration,
    methods: HashMap<(u64, u64), Option<Arc<Method>>>,
    compiled: HashMap<(u64, u32), Option<Arc<Compiled>>>,
    compiled_bytes: usize,
    modules: Modules,
}

/// Modules of frames: one copy of each text.
#[derive(Debug)]
struct Modules {
    compiled: Arc<str>,
    inlined: Arc<str>,
    interpreted: Arc<str>,
    stub: Arc<str>,
    none: Arc<str>,
}

/// The mapping of a JVM's library; `None` = there is none.
pub fn library(maps: &Maps) -> Option<&crate::process::Mapping> {
    maps.executable_files().find(|mapping| mapping.path().is_some_and(|path| path.ends_with("libjvm.so")))
}

/// A JVM whose structures are known, and which may not have made its code cache yet.
#[derive(Debug)]
pub struct Starting {
    layout: Layout,
}

impl Starting {
    /// Reads the description of the JVM whose library a process has mapped.
    ///
    /// # Errors
    /// If its frames cannot be walked, or not yet.
    pub fn read(process: &Process, memory: &ImageMemory, mapping: &crate::process::Mapping) -> Result<Self, Refusal> {
        let file = MappedFile::open(process, mapping).map_err(|error| Refusal::Library(error.to_string()))?;
        let bias = file.elf.load_bias(mapping.start.0, mapping.offset).ok_or(Refusal::NoStructures)?;
        if file.elf.variable_vaddr(b"gHotSpotVMStructs").is_none() {
            return Err(Refusal::NoStructures);
        }
        Self::of(&Library { memory, elf: &file.elf, bias })
    }

    /// The same for a library that is there.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn of(library: &Library<'_>) -> Result<Self, Refusal> {
        Ok(Self { layout: Layout::read(library)? })
    }

    /// The JVM, once it has code.
    ///
    /// # Errors
    /// [`Refusal::Starting`] if it has none yet.
    pub fn begin(&self, memory: &dyn Memory) -> Result<Jvm, Refusal> {
        Jvm::with_layout(memory, self.layout.clone())
    }
}

impl Jvm {
    fn with_layout(memory: &dyn Memory, layout: Layout) -> Result<Self, Refusal> {
        let heaps = code::heaps(memory, &layout);
        let word = |address: u64| memory.word(address).filter(|&word| is_user_address(word)).ok_or(Refusal::Starting);
        let first = heaps.first().ok_or(Refusal::Starting)?;
        let mut record = layout.record();
        record.segment_shift = first.shift;
        if heaps.iter().any(|heap| heap.shift != first.shift) {
            return Err(Refusal::Unknown);
        }
        record.code_begin = layout.low_bound.map_or(Ok(first.begin), word)?;
        record.call_stub_return = word(layout.call_stub_return)?;
        let queue = word(layout.interpreter)?;
        let buffer = word(queue.wrapping_add(layout.queue_buffer))?;
        let interpreter = code::blob_of(memory, &layout, &heaps, buffer).ok_or(Refusal::Starting)?;
        (record.interpreter_begin, record.interpreter_end) = (interpreter.begin, interpreter.end);
        let modules = Modules {
            compiled: MODULE_JAVA_COMPILED.into(),
            inlined: MODULE_JAVA_INLINED.into(),
            interpreted: MODULE_JAVA_INTERPRETED.into(),
            stub: MODULE_JIT.into(),
            none: "".into(),
        };
        let mut jvm = Self {
            layout,
            heaps,
            record,
            searched: Instant::now(),
            pause: SEARCH_FIRST,
            methods: HashMap::new(),
            compiled: HashMap::new(),
            compiled_bytes: 0,
            modules,
        };
        jvm.search(memory);
        Ok(jvm)
    }

    /// Major version of its JDK.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.layout.major
    }

    /// The heaps of its code cache, as the unwinder's mappings. Their record is the process's ([`Self::record`]).
    pub fn mappings(&self) -> impl Iterator<Item = CodeMapping> + '_ {
        self.heaps.iter().map(|heap| CodeMapping {
            begin: heap.begin,
            end: heap.end,
            bias: heap.segments,
            file: 0,
            kind: MappingKind::Hotspot,
        })
    }

    /// What the unwinder needs to walk its frames.
    #[must_use]
    pub fn record(&self) -> bpf::Hotspot {
        self.record
    }

    /// Whether something is missing that the JVM makes only when it needs it, and it is time to search for it.
    #[must_use]
    pub fn is_search_due(&self) -> bool {
        let has_methods = self.record.name_nmethod != 0 && self.record.name_native != 0;
        let has_threads = !self.may_have_virtual_threads() || self.record.barrier_frame_bytes != 0;
        !(has_methods && has_threads) && self.searched.elapsed() >= self.pause
    }

    fn may_have_virtual_threads(&self) -> bool {
        self.layout.major >= 19
    }

    /// Searches the code cache for the names of blobs of methods, and for the stubs and the method at which virtual threads begin. Returns
    /// whether something was found.
    pub fn search(&mut self, memory: &dyn Memory) -> bool {
        (self.searched, self.pause) = (Instant::now(), (self.pause * 2).min(SEARCH_LAST));
        let before = (self.record.name_nmethod, self.record.name_native, self.record.barrier_begin, self.record.barrier_frame_bytes);
        let mut names: HashMap<u64, String> = HashMap::new();
        let mut natives: Vec<Blob> = Vec::new();
        for heap in &self.heaps {
            let (record, wants_natives) = (&mut self.record, self.layout.major >= 19);
            code::for_each(memory, &self.layout, heap, |blob| {
                let name = names.entry(blob.name).or_insert_with(|| code::text_at(memory, blob.name).unwrap_or_default());
                match name.as_str() {
                    "nmethod" => record.name_nmethod = blob.name,
                    "native nmethod" => {
                        record.name_native = blob.name;
                        natives.push(*blob);
                    }
                    name if name.contains("ontinuation") => (record.barrier_begin, record.barrier_end) = (blob.begin, blob.end),
                    _ => {}
                }
                wants_natives || record.name_nmethod == 0 || record.name_native == 0
            });
        }
        if self.may_have_virtual_threads() && self.record.barrier_frame_bytes == 0 {
            let entry = self.entry_of_continuations(memory, &natives);
            self.record.barrier_frame_bytes = entry.map_or(0, |blob| blob.frame_words.saturating_mul(8));
        }
        before != (self.record.name_nmethod, self.record.name_native, self.record.barrier_begin, self.record.barrier_frame_bytes)
    }

    /// The wrapper `Continuation.enterSpecial`: by the address to which it is returned, which the JVM exports since JDK 22, or by its name.
    fn entry_of_continuations(&mut self, memory: &dyn Memory, natives: &[Blob]) -> Option<Blob> {
        let address = self.layout.continuation_return.and_then(|address| memory.word(address)).filter(|&address| address != 0);
        if let Some(blob) = address.and_then(|address| code::blob_of(memory, &self.layout, &self.heaps, address)) {
            return Some(blob);
        }
        natives.iter().copied().find(|blob| {
            let method = memory.word(blob.address.wrapping_add(self.layout.method_of_code));
            let name = method.and_then(|method| self.method(memory, method)).map(|method| Arc::clone(&method.function));
            name.is_some_and(|name| &*name == "jdk.internal.vm.Continuation.enterSpecial")
        })
    }

    /// Whether the names of a frame word may change while the word stays, and by what it is recognised: an interpreted frame's method may have
    /// been unloaded, and another one put in its place.
    #[must_use]
    pub fn identity(&self, memory: &dyn Memory, word: u64) -> u64 {
        if is_interpreted(word) { method::const_of(memory, &self.layout, method_of(word)).unwrap_or(0) } else { 0 }
    }

    /// The frames of a frame word: methods that the compiler inlined, innermost first, then the method itself. Never empty.
    pub fn frames(&mut self, memory: &dyn Memory, word: u64) -> Vec<Frame> {
        match kind_of(word) {
            Some(FrameKind::JavaInterpreted | FrameKind::JavaInterpretedHigh) => vec![self.interpreted(memory, word)],
            Some(FrameKind::JavaCompiled) => {
                let distance = word & ((1 << FRAME_CODE_BITS) - 1);
                let id = (word >> FRAME_CODE_BITS) as u32 & ((1 << FRAME_COMPILE_BITS) - 1);
                let pc = self.record.code_begin.wrapping_add(distance);
                self.compiled(memory, pc, Some(id), word)
            }
            _ => self.stub(memory, word),
        }
    }

    fn method(&mut self, memory: &dyn Memory, address: u64) -> Option<Arc<Method>> {
        let unchanging = method::const_of(memory, &self.layout, address)?;
        if self.methods.len() >= METHODS_MAX {
            self.methods.clear();
        }
        let read = || Method::read(memory, &self.layout, unchanging).map(Arc::new);
        self.methods.entry((address, unchanging)).or_insert_with(read).clone()
    }

    fn interpreted(&mut self, memory: &dyn Memory, word: u64) -> Frame {
        let module = Arc::clone(&self.modules.interpreted);
        let Some(method) = self.method(memory, method_of(word)) else { return self.unnamed(UNLOADED, module, word) };
        let index = method.index_of((word & ((1 << FRAME_BYTECODE_BITS) - 1)) as u16);
        self.of_method(&method, index, module, false)
    }

    /// A frame of a method. Its address is the bytecode's index.
    fn of_method(&self, method: &Method, index: Option<u16>, module: Arc<str>, guessed: bool) -> Frame {
        Frame {
            function: Arc::clone(&method.function),
            file: Arc::clone(&method.file),
            line: index.map_or(0, |index| packed::line_at(&method.lines, index)),
            module,
            build_id: Arc::clone(&self.modules.none),
            address: index.map_or(0, u64::from),
            flags: FrameFlags { guessed, ..FrameFlags::default() },
        }
    }

    fn unnamed(&self, function: &str, module: Arc<str>, word: u64) -> Frame {
        let flags = FrameFlags { guessed: flags_of(word) & FRAME_GUESSED != 0, ..FrameFlags::default() };
        Frame { module, build_id: Arc::clone(&self.modules.none), flags, ..Frame::named(function) }
    }

    /// A compiled frame, or one of a native wrapper; `id`: low bits of the compilation's number, if known.
    fn compiled(&mut self, memory: &dyn Memory, pc: u64, id: Option<u32>, word: u64) -> Vec<Frame> {
        let guessed = flags_of(word) & FRAME_GUESSED != 0;
        let outer = Arc::clone(&self.modules.compiled);
        let tables = code::blob_of(memory, &self.layout, &self.heaps, pc).and_then(|blob| self.tables(memory, &blob));
        let is_same = |tables: &Arc<Compiled>| id.is_none_or(|id| tables.compile_id & ((1 << FRAME_COMPILE_BITS) - 1) == id);
        let Some(tables) = tables.filter(is_same) else { return vec![self.unnamed(UNLOADED, outer, word)] };
        let scopes = tables.scopes(&self.layout, pc, flags_of(word) & FRAME_EXACT != 0);
        let mut frames = Vec::with_capacity(scopes.len().max(1));
        let last = scopes.len().saturating_sub(1);
        for (place, scope) in scopes.iter().enumerate() {
            let module = if place < last { Arc::clone(&self.modules.inlined) } else { Arc::clone(&outer) };
            frames.push(match self.method(memory, scope.method) {
                Some(method) => self.of_method(&method, scope.index, module, guessed),
                None => self.unnamed(UNLOADED, module, word),
            });
        }
        if frames.is_empty() {
            // A native method's wrapper has no bytecode.
            frames.push(match self.method(memory, tables.method) {
                Some(method) => self.of_method(&method, None, outer, guessed),
                None => self.unnamed(UNLOADED, outer, word),
            });
        }
        frames
    }

    /// Whether a blob is a compiled method or a native one's wrapper.
    fn is_method(&self, memory: &dyn Memory, blob: &Blob) -> bool {
        let is_known = |name: u64| name != 0 && blob.name == name;
        is_known(self.record.name_nmethod)
            || is_known(self.record.name_native)
            || code::text_at(memory, blob.name).is_some_and(|name| matches!(name.as_str(), "nmethod" | "native nmethod"))
    }

    fn tables(&mut self, memory: &dyn Memory, blob: &Blob) -> Option<Arc<Compiled>> {
        if !self.is_method(memory, blob) {
            return None;
        }
        let id = code::word32(memory, blob.address.wrapping_add(self.layout.compile_id))?;
        if let Some(known) = self.compiled.get(&(blob.address, id)) {
            return known.clone();
        }
        if self.compiled.len() >= METHODS_MAX || self.compiled_bytes >= COMPILED_BYTES_MAX {
            self.compiled.clear();
            self.compiled_bytes = 0;
        }
        let read = Compiled::read(memory, &self.layout, blob).map(Arc::new);
        self.compiled_bytes += read.as_ref().map_or(0, |tables| tables.bytes());
        self.compiled.insert((blob.address, id), read.clone());
        read
    }

    /// Code that the JVM generated for itself; or a method, if names of blobs were not known yet when the stack was walked.
    fn stub(&mut self, memory: &dyn Memory, word: u64) -> Vec<Frame> {
        let pc = word & FRAME_ADDRESS_MASK;
        let blob = code::blob_of(memory, &self.layout, &self.heaps, pc);
        if blob.is_some_and(|blob| self.is_method(memory, &blob)) {
            return self.compiled(memory, pc, None, word);
        }
        if (self.record.barrier_begin..self.record.barrier_end).contains(&pc) && self.record.barrier_frame_bytes == 0 {
            // Virtual threads have begun to run: what the walk needs to go on exists now.
            self.pause = self.pause.min(SEARCH_SOON);
        }
        let name = match blob {
            Some(_) if (self.record.barrier_begin..self.record.barrier_end).contains(&pc) => REST_IN_HEAP.to_owned(),
            Some(_) if pc == self.record.call_stub_return => "[call from the JVM]".to_owned(),
            Some(blob) => code::text_at(memory, blob.name).map_or_else(|| UNLOADED.to_owned(), |name| format!("[{name}]")),
            None => UNLOADED.to_owned(),
        };
        let frame = self.unnamed(&name, Arc::clone(&self.modules.stub), word);
        vec![Frame { flags: FrameFlags { jit: true, ..frame.flags }, ..frame }]
    }
}

/// The kind of a frame word.
fn kind_of(word: u64) -> Option<FrameKind> {
    FrameKind::from_wire((word >> FRAME_KIND_BIT) as u32)
}

fn is_interpreted(word: u64) -> bool {
    matches!(kind_of(word), Some(FrameKind::JavaInterpreted | FrameKind::JavaInterpretedHigh))
}

/// The flags of a frame word; an interpreted frame's has none.
fn flags_of(word: u64) -> u64 {
    if is_interpreted(word) { 0 } else { word }
}

/// The `Method` of an interpreted frame's word.
fn method_of(word: u64) -> u64 {
    (word >> FRAME_BYTECODE_BITS & ((1 << FRAME_METHOD_BITS) - 1)) << 3
}
