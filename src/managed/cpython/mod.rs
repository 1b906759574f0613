//! CPython (3.8 to 3.14): whether a process runs it, how the unwinder reads the frames of its threads, and their names.
//!
//! ```text
//! libpython or the program: _PyRuntime, version ─→ layout ─→ the unwinder's record (bpf/cpython.bpf.h)
//! PYTHON_CODE records ─→ code (name, file, table of lines) ──┐
//! PYTHON_STACK record, then STACK ─→ merge ──────────────────┴→ frames in place of the evaluation loop's
//! ```
//!
//! All of it comes from memory that the process controls: each read is bounded, and what is inconsistent has no name.

mod code;
pub mod layout;
pub mod lines;
mod merge;
mod parts;

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use self::code::Code;
pub use self::code::Definition;
use self::layout::{Layout, RUNTIME_BYTES_MAX, Version};
use crate::bpf::{self, PYTHON_UNREADABLE, PythonEnd};
use crate::census::Memory;
use crate::census::memory::word_at;
use crate::frame::{Frame, FrameFlags, MODULE_PYTHON};
use crate::process::elf::Elf;
use crate::process::file::MappedFile;
use crate::process::functions::Functions;
use crate::process::{Mapping, Maps, Process};
use crate::symbol::NamedFrames;
use crate::units::StackHash;

/// Name of a function whose code object could not be read.
pub const UNREADABLE: &str = "[Python code that cannot be read]";
/// Name of the frame that stands for Python frames that could not be read.
pub const FRAMES_UNREADABLE: &str = "[Python frames that cannot be read]";

/// Code objects that are kept, and bytes of them; further ones have no name.
const CODES_MAX: usize = 128 << 10;
const CODE_BYTES_MAX: usize = 64 << 20;
/// Stacks whose Python frames have come and whose native frames have not: they follow immediately, so that more are an error.
const HELD_MAX: usize = 1024;
/// Libraries and programs that may contain CPython have this in their names, apart from the process's own program.
const NAME: &str = "python";

/// Why the Python frames of a process are not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Too old, too new, or no release.
    #[error("its CPython is {0}")]
    Unknown(String),
    /// Built without the global lock.
    #[error("its CPython {0} is a free-threaded build")]
    FreeThreaded(Version),
    /// `_Py_DebugOffsets` contradict the version.
    #[error("its CPython describes itself in a way that is not known")]
    Description,
    /// The evaluation loop has no symbol.
    #[error("its CPython has no symbol _PyEval_EvalFrameDefault")]
    NoLoop,
    /// The file or the memory cannot be read.
    #[error("its CPython cannot be read: {0}")]
    Unreadable(String),
}

/// A file with a CPython.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    runtime: u64,
    loop_begin: u64,
    loop_end: u64,
    cold: Option<Range<u64>>,
    version: Option<u64>,
    minor: u8,
}

/// What a file with a CPython says of it; `None` if it has none.
fn found_in(elf: &Elf<File>) -> Option<Found> {
    let mut found = Found { runtime: 0, loop_begin: 0, loop_end: 0, cold: None, version: elf.variable_vaddr(b"Py_Version"), minor: 0 };
    let is_python = |found: &Found| found.runtime != 0 || found.loop_begin != 0;
    found.runtime = elf.variable_vaddr(b"_PyRuntime").unwrap_or(0);
    elf.for_each_function(|function| match function.name {
        b"_PyEval_EvalFrameDefault" => {
            (found.loop_begin, found.loop_end) = (function.vaddr, function.vaddr.saturating_add(function.size));
        }
        b"_PyEval_EvalFrameDefault.cold" => found.cold = Some(function.vaddr..function.vaddr.saturating_add(function.size)),
        // Functions that a version has added, as far as it does not export its number (Py_Version, 3.11).
        b"Py_NewRef" => found.minor = found.minor.max(10),
        b"PyFrame_GetCode" => found.minor = found.minor.max(9),
        b"PyCode_NewWithPosOnlyArgs" => found.minor = found.minor.max(8),
        b"PyEval_EvalFrameEx" => found.minor = found.minor.max(7),
        _ => {}
    });
    is_python(&found).then_some(found)
}

/// The mapping of a file with a CPython.
fn mapping_of<'a>(process: &Process, maps: &'a Maps) -> Option<(&'a Mapping, MappedFile, Found)> {
    let program = std::fs::read_link(process.directory().join("exe")).ok();
    let may_be = |mapping: &&Mapping| {
        mapping.path().is_some_and(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().contains(NAME)) || Some(path) == program.as_deref()
        })
    };
    let mut seen: Vec<&std::path::Path> = Vec::new();
    maps.executable_files().filter(may_be).find_map(|mapping| {
        let path = mapping.path()?;
        if seen.contains(&path) {
            return None;
        }
        seen.push(path);
        let file = MappedFile::open(process, mapping).ok()?;
        let found = found_in(&file.elf)?;
        Some((mapping, file, found))
    })
}

/// Whether a process runs a CPython.
#[must_use]
pub fn is_in(process: &Process, maps: &Maps) -> bool {
    mapping_of(process, maps).is_some()
}

/// A CPython whose frames are read.
#[derive(Debug)]
pub struct Python {
    version: Version,
    layout: Layout,
    codes: HashMap<u64, Code>,
    code_bytes: usize,
    held: HashMap<u64, Held>,
    module: Arc<str>,
    none: Arc<str>,
}

/// Python frames of a stack whose native frames follow.
#[derive(Debug)]
struct Held {
    frames: Vec<bpf::PythonFrame>,
    end: u8,
}

impl Python {
    /// Looks for a CPython in a process's mappings. `None` if there is none.
    pub fn find(
        process: &Process,
        maps: &Maps,
        memory: impl FnOnce() -> Result<super::ImageMemory, Refusal>,
    ) -> Option<Result<(Self, super::ImageMemory), Refusal>> {
        let (mapping, file, found) = mapping_of(process, maps)?;
        Some(Self::open(mapping, &file, &found, memory))
    }

    fn open(
        mapping: &Mapping,
        file: &MappedFile,
        found: &Found,
        memory: impl FnOnce() -> Result<super::ImageMemory, Refusal>,
    ) -> Result<(Self, super::ImageMemory), Refusal> {
        let unreadable = |what: &str| Refusal::Unreadable(what.to_owned());
        let bias = file.elf.load_bias(mapping.start.0, mapping.offset).ok_or_else(|| unreadable("it has no program header"))?;
        // From the file: its data may not be mapped yet, and these are never written.
        let version = match found.version {
            Some(vaddr) => Version::of_hex(word_at(&file.elf.bytes_at(vaddr, 8), 0))?,
            None => Version { minor: found.minor, micro: None },
        };
        if found.runtime == 0 {
            return Err(Refusal::Unknown("older than 3.7".to_owned()));
        }
        if found.loop_begin >= found.loop_end {
            return Err(Refusal::NoLoop);
        }
        let here = |vaddr: u64| bias.wrapping_add(vaddr);
        let mut layout = Layout::of(version, &file.elf.bytes_at(found.runtime, RUNTIME_BYTES_MAX))?;
        layout.record.interpreters = here(found.runtime).wrapping_add(layout.interpreters);
        (layout.record.eval_begin, layout.record.eval_end) = (here(found.loop_begin), here(found.loop_end));
        let of_loop = found.loop_begin..found.loop_end;
        if let Some(cold) = found.cold.clone().or_else(|| parts::elsewhere(&file.elf, of_loop, &Functions::of(&file.elf))) {
            (layout.record.cold_begin, layout.record.cold_end) = (here(cold.start), here(cold.end));
        }
        tracing::debug!(
            %version,
            "CPython's evaluation loop is at {:#x}..{:#x}, and at {:#x}..{:#x}",
            layout.record.eval_begin,
            layout.record.eval_end,
            layout.record.cold_begin,
            layout.record.cold_end
        );
        Ok((Self::with_layout(version, layout), memory()?))
    }

    /// One with this layout.
    #[must_use]
    pub fn with_layout(version: Version, layout: Layout) -> Self {
        Self { version, layout, codes: HashMap::new(), code_bytes: 0, held: HashMap::new(), module: MODULE_PYTHON.into(), none: "".into() }
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// What the unwinder needs.
    #[must_use]
    pub fn record(&self) -> bpf::Python {
        self.layout.record
    }

    /// A code object was seen for the first time, or another one is where it was.
    pub fn define(&mut self, memory: &dyn Memory, definition: Definition<'_>) {
        let address = definition.code.code;
        if definition.code.lines_at > 0 {
            if let Some(code) = self.codes.get_mut(&address) {
                self.code_bytes -= code.bytes();
                code.extend(memory, &self.layout, definition);
                self.code_bytes += code.bytes();
            }
            return;
        }
        if let Some(before) = self.codes.remove(&address) {
            self.code_bytes -= before.bytes();
        }
        if self.codes.len() >= CODES_MAX || self.code_bytes >= CODE_BYTES_MAX {
            return;
        }
        let code = Code::read(memory, &self.layout, definition);
        self.code_bytes += code.bytes();
        self.codes.insert(address, code);
    }

    /// The Python frames of a stack that is defined next.
    pub fn hold(&mut self, hash: StackHash, frames: &[bpf::PythonFrame], end: u8) {
        if self.held.len() >= HELD_MAX {
            self.held.clear();
        }
        self.held.insert(hash.0, Held { frames: frames.to_vec(), end });
    }

    /// The words of a stack with Python frames, if it has some. `keeps_loop`: with the evaluation loop's own frames too.
    pub fn stack(&mut self, names: &NamedFrames, hash: StackHash, words: &[u64], keeps_loop: bool) -> Option<Vec<u64>> {
        let held = self.held.remove(&hash.0)?;
        let rest = match PythonEnd::from_wire(u32::from(held.end)) {
            Some(PythonEnd::Limit) => Some("[Python frames beyond the limit]".to_owned()),
            Some(PythonEnd::Unreadable) => Some(FRAMES_UNREADABLE.to_owned()),
            _ => None,
        };
        let rest = rest.map(|name| names.add(vec![self.frame(name.into(), Arc::clone(&self.none), 0, 0)]));
        let bpf::Python { eval_begin, eval_end, cold_begin, cold_end, .. } = self.layout.record;
        let (main, cold) = (eval_begin..eval_end, cold_begin..cold_end);
        let is_loop = |address: u64| main.contains(&address) || cold.contains(&address);
        Some(merge::merged(words, &held.frames, keeps_loop, is_loop, |frame| self.name(names, frame), rest))
    }

    fn frame(&self, function: Arc<str>, file: Arc<str>, line: u32, instruction: i32) -> Frame {
        Frame {
            function,
            file,
            line,
            module: Arc::clone(&self.module),
            build_id: Arc::clone(&self.none),
            address: u64::try_from(instruction).unwrap_or(0),
            flags: FrameFlags::default(),
        }
    }

    /// The word of a frame's name.
    fn name(&mut self, names: &NamedFrames, frame: &bpf::PythonFrame) -> u64 {
        let code = match u32::from(frame.flags) & PYTHON_UNREADABLE {
            0 => self.codes.get(&frame.code),
            _ => None,
        };
        if let Some(&word) = code.and_then(|code| code.words.get(&frame.instruction)) {
            return word;
        }
        let Some(code) = code.filter(|code| !code.function.is_empty()) else {
            return names.add(vec![self.frame(UNREADABLE.into(), Arc::clone(&self.none), 0, 0)]);
        };
        let line = code.line(frame.instruction);
        let word = names.add(vec![self.frame(Arc::clone(&code.function), Arc::clone(&code.file), line, frame.instruction)]);
        if let Some(code) = self.codes.get_mut(&frame.code) {
            code.words.insert(frame.instruction, word);
        }
        word
    }
}
