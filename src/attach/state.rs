//! The library in a process, and what it says of itself. `struct fragprof_attached` (src/sampler/preload/attach.h).

use serde::Serialize;

use crate::inject::{self, function_vaddr, memory};
use crate::process::Process;
use crate::process::file::MappedFile;
use crate::process::maps::{Mapping, Maps};
use crate::sampler::library::Flavour;

/// Its first word.
const MAGIC: u32 = 0x3141_5046;
/// Its size in the first version.
const BYTES: usize = 80;
/// Its size with what the recorder says.
const BYTES_RECORDER: usize = 96;

/// What the library has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct State {
    /// Words that lead to the library.
    pub words: u64,
    /// Of them, those that the dynamic linker had not looked up yet.
    pub lazy: u64,
    /// Words that lead to another allocator, and were left alone.
    pub foreign: u64,
    /// Words that could not be written.
    pub failed: u64,
    /// Words that the last detaching put back.
    pub put_back: u64,
    /// Passes over all objects.
    pub passes: u64,
    /// Times it was detached.
    pub detached: u64,
    /// The process, while a pass runs; otherwise 0.
    pub runs: u64,
    /// Whether it found no malloc.
    pub without_malloc: bool,
    /// The descriptor of the memory that the process made for a recorder, while it is open.
    #[serde(skip)]
    pub memory_file: Option<u32>,
    /// Why the last pass of a recorder did nothing.
    #[serde(skip)]
    pub refused: Option<PassRefused>,
}

/// `enum attached_refusal` (src/sampler/preload/attach.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassRefused {
    /// Another recorder reads.
    HasReader,
    /// The memory cannot be mapped, or its reader did not answer.
    NoMemory,
    /// The C library keeps a thread's number in a place that is not known.
    UnknownThreads,
}

/// The library in a process.
#[derive(Debug)]
pub struct Mapped {
    mapping: Mapping,
    file: MappedFile,
}

impl Mapped {
    /// Finds it; also one of another version, or whose file was replaced.
    #[must_use]
    pub fn find(process: &Process, maps: &Maps, flavour: Flavour) -> Option<Self> {
        let name = flavour.file_name();
        let is_named = |mapping: &&Mapping| {
            let file = mapping.path().and_then(|path| path.file_name());
            file.is_some_and(|file| file.to_string_lossy().split(' ').next() == Some(name))
        };
        let mapping = maps.executable_files().find(is_named)?;
        let file = MappedFile::open(process, mapping).ok()?;
        file.elf.variable_vaddr(b"fragprof_attached")?;
        Some(Self { mapping: mapping.clone(), file })
    }

    /// The address of one of its functions.
    #[must_use]
    pub fn function(&self, maps: &Maps, name: &str) -> Option<u64> {
        inject::address_of(maps, &self.mapping, &self.file, function_vaddr(&self.file, name.as_bytes())?)
    }

    /// What it has done so far.
    #[must_use]
    pub fn state(&self, process: &Process) -> Option<State> {
        let vaddr = self.file.elf.variable_vaddr(b"fragprof_attached")?;
        let address = self.file.elf.load_bias(self.mapping.start.0, self.mapping.offset)?.wrapping_add(vaddr);
        let mut bytes = [0; BYTES_RECORDER];
        // The first version ends before what the recorder says.
        let read = memory::read(process.pid().0.cast_signed(), address, &mut bytes);
        (read >= BYTES).then(|| parse(&bytes))?
    }
}

fn parse(bytes: &[u8; BYTES_RECORDER]) -> Option<State> {
    let word = |at: usize| bytes.get(8 * at..8 * at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    // The magic is in the low half, the size in the high half.
    if word(0) as u32 != MAGIC || (word(0) >> 32) < BYTES as u64 {
        return None;
    }
    let of_recorder = |at: usize| if (word(0) >> 32) < BYTES_RECORDER as u64 { 0 } else { word(at) };
    Some(State {
        words: word(1),
        lazy: word(2),
        foreign: word(3),
        failed: word(4),
        put_back: word(5),
        passes: word(6),
        detached: word(7),
        runs: word(8),
        without_malloc: word(9) != 0,
        memory_file: of_recorder(10).checked_sub(1).and_then(|file| u32::try_from(file).ok()),
        refused: match of_recorder(11) {
            0 => None,
            1 => Some(PassRefused::HasReader),
            3 => Some(PassRefused::UnknownThreads),
            _ => Some(PassRefused::NoMemory),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_kind_or_an_older_one_is_not_read() {
        let mut bytes = [0; BYTES_RECORDER];
        assert_eq!(parse(&bytes), None);
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&(BYTES as u32 - 8).to_le_bytes());
        assert_eq!(parse(&bytes), None);
        // A newer one has more.
        bytes[4..8].copy_from_slice(&(BYTES as u32 + 8).to_le_bytes());
        bytes[8] = 7;
        bytes[72] = 1;
        // What follows the first version's is not read of it.
        bytes[80] = 5;
        assert_eq!(parse(&bytes), Some(State { words: 7, without_malloc: true, ..State::default() }));
        bytes[4..8].copy_from_slice(&(BYTES_RECORDER as u32).to_le_bytes());
        bytes[88] = 1;
        let expected =
            State { words: 7, without_malloc: true, memory_file: Some(4), refused: Some(PassRefused::HasReader), ..State::default() };
        assert_eq!(parse(&bytes), Some(expected));
    }
}
