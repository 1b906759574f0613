//! A process's memory behind one trait: a live process, a core file or a recorded fixture.
//!
//! Readers of allocators use only this. All data that comes through it is untrusted: any word may have any value, and may change between
//! two reads.

use std::ops::Range;

use thiserror::Error;

use super::not_malloc::ResidentMapping;
use super::threads::ThreadState;
use crate::heap::residency::PageRuns;
use crate::process::{Maps, Process};

/// Why memory, mappings or residency could not be read.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The process ended, or another program took its place.
    #[error("process {pid} has ended, or runs another program now")]
    Gone {
        /// Its process id.
        pid: u32,
    },
    /// The kernel refused.
    #[error(
        "cannot read {what} of process {pid}: {source}; this needs root or CAP_SYS_PTRACE, or the same user and kernel.yama.ptrace_scope=0"
    )]
    Refused {
        /// What was to be read.
        what: &'static str,
        /// Its process id.
        pid: u32,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// A core file that cannot be used.
    #[error("cannot use core file {path}: {reason}")]
    Core {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The target's mappings cannot be read.
    #[error(transparent)]
    Target(#[from] crate::process::ProcessError),
}

/// A piece of memory to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First address.
    pub addr: u64,
    /// Bytes to read.
    pub bytes: usize,
}

/// Memory of one process, which may be running. Several threads may read it at once.
pub trait Memory: Sync {
    /// Reads from `addr` on into `out` and returns how many bytes were read; fewer than asked at the first address that cannot be read
    /// without a page fault of the process.
    fn read(&self, addr: u64, out: &mut [u8]) -> usize;

    /// Reads the pieces one after another into `out` and returns how many bytes were read; stops at the first address that cannot be
    /// read, and never writes past `out`. The caller has just seen in [`Memory::page_runs`] that the pieces are present.
    fn read_pieces(&self, pieces: &[Piece], out: &mut [u8]) -> usize {
        let mut done = 0usize;
        for piece in pieces {
            let Some(part) = out.get_mut(done..done.saturating_add(piece.bytes)) else { return done };
            let got = self.read(piece.addr, part);
            done += got;
            if got < piece.bytes {
                return done;
            }
        }
        done
    }

    /// The mappings at this moment.
    ///
    /// # Errors
    /// If the process has ended, or the permission is missing.
    fn maps(&self) -> Result<Maps, MemoryError>;

    /// The live process behind it, if it is one.
    fn process(&self) -> Option<&Process> {
        None
    }

    /// Its threads; empty where nothing is known of them.
    fn threads(&self) -> Vec<ThreadState> {
        Vec::new()
    }

    /// The mappings with their resident bytes; empty where that is not known (core files).
    ///
    /// # Errors
    /// If the process has ended, or the permission is missing.
    fn resident_mappings(&self) -> Result<Vec<ResidentMapping>, MemoryError> {
        Ok(Vec::new())
    }

    /// The pages of `range` that are present or swapped.
    ///
    /// # Errors
    /// If the process has ended, or the permission is missing.
    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError>;
}

impl<'a> dyn Memory + 'a {
    /// The little-endian word at `addr`.
    #[must_use]
    pub fn word(&self, addr: u64) -> Option<u64> {
        let mut bytes = [0u8; 8];
        (self.read(addr, &mut bytes) == 8).then(|| u64::from_le_bytes(bytes))
    }

    /// `bytes` bytes from `addr`; `None` unless all of them can be read. Callers bound `bytes`.
    #[must_use]
    pub fn bytes(&self, addr: u64, bytes: usize) -> Option<Vec<u8>> {
        let mut out = vec![0u8; bytes];
        (self.read(addr, &mut out) == bytes).then_some(out)
    }
}

/// The little-endian word at byte `at`; 0 past the end. Readers check lengths before they trust a value, so 0 is as good as any.
#[must_use]
pub fn word_at(bytes: &[u8], at: usize) -> u64 {
    at.checked_add(8).and_then(|end| bytes.get(at..end)).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The little-endian 32-bit word at byte `at`; 0 past the end.
#[must_use]
pub fn word32_at(bytes: &[u8], at: usize) -> u32 {
    at.checked_add(4).and_then(|end| bytes.get(at..end)).and_then(|word| word.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// The little-endian 16-bit word at byte `at`; 0 past the end.
#[must_use]
pub fn word16_at(bytes: &[u8], at: usize) -> u16 {
    at.checked_add(2).and_then(|end| bytes.get(at..end)).and_then(|word| word.try_into().ok()).map_or(0, u16::from_le_bytes)
}

/// First address that no process has, on any machine: arm64's end here with 48 bits, x86-64's with 47. Only a process that asks for it gets
/// higher ones (52 and 57 bits).
pub const USER_END: u64 = 1 << 48;

/// Whether a word can be an address in the lower half of the address space: not in the first page, below [`USER_END`].
#[must_use]
pub fn is_user_address(word: u64) -> bool {
    (0x1000..USER_END).contains(&word)
}
