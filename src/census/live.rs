//! The memory of a running process: process_vm_readv and the page map, without stopping or injecting anything.
//!
//! Only pages that are present in the page map are read. Reading any other page would cause a page fault: it would bring in a swapped page,
//! fill page tables for untouched memory, and block forever if the process handles its own faults (userfaultfd).

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::kernel_pages::KernelPages;
use super::memory::{Memory, MemoryError, Piece};
use super::not_malloc::{ResidentMapping, parse_smaps};
use super::threads::{self, ThreadState};
use crate::heap::residency::{PageRuns, page_down};
use crate::process::{Maps, Process};

/// Pieces of one process_vm_readv call; the kernel takes at most IOV_MAX = 1024.
const PIECES_MAX: usize = 1024;
/// Address space queried for one small read: 16 pages, hardly more expensive than one.
const LOOK_BYTES: u64 = 64 << 10;
/// Most query results cached.
const LOOKS_KEPT: usize = 256;
/// How long a result is used: a page that was present may be swapped out or released meanwhile.
const LOOK_AGE_MAX: Duration = Duration::from_millis(20);

/// Bytes of smaps read at most: about 700 a mapping, 262,144 mappings.
const SMAPS_BYTES_MAX: u64 = 192 << 20;

/// The memory of a running process. The page map stays bound to the address space it was opened on, so after an exec it is no longer
/// readable.
#[derive(Debug)]
pub struct LiveMemory {
    process: Process,
    pid: libc::pid_t,
    pages: KernelPages,
    looks: Mutex<Vec<Option<PresentRuns>>>,
}

/// What was present in one aligned block of [`LOOK_BYTES`].
#[derive(Debug, Clone)]
struct PresentRuns {
    start: u64,
    at: Instant,
    runs: PageRuns,
}

impl LiveMemory {
    /// Opens the process's page map.
    ///
    /// # Errors
    /// If the permission is missing, or the process has ended.
    pub fn open(process: Process) -> Result<Self, MemoryError> {
        let pid = process.pid().0;
        let pages = KernelPages::open(process.directory()).map_err(|source| refused("the page map", pid, source))?;
        let raw = libc::pid_t::try_from(pid).map_err(|_| MemoryError::Gone { pid })?;
        Ok(Self { process, pid: raw, pages, looks: Mutex::new(vec![None; LOOKS_KEPT]) })
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// How many of `bytes` bytes from `addr` on lie on present pages.
    fn present_bytes(&self, addr: u64, bytes: u64) -> u64 {
        let end = addr.saturating_add(bytes);
        if page_down(addr).saturating_add(LOOK_BYTES) < end {
            return self.page_runs(addr..end).map_or(0, |runs| runs.present_from(addr).saturating_sub(addr).min(bytes));
        }
        let mut at = addr;
        while at < end {
            let start = at & !(LOOK_BYTES - 1);
            let present_until = self.look(start, at).unwrap_or(at).min(end);
            if present_until <= at {
                break;
            }
            at = present_until;
        }
        at - addr
    }

    /// Where the present pages from `at` on end, in the block that begins at `start`; `at` itself if its page is not present.
    fn look(&self, start: u64, at: u64) -> Option<u64> {
        let slot = usize::try_from(start / LOOK_BYTES).ok()? % LOOKS_KEPT;
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = looks.get_mut(slot)?;
        if let Some(look) = kept.as_ref().filter(|look| look.start == start && look.at.elapsed() < LOOK_AGE_MAX) {
            let until = look.runs.present_from(at);
            // A page that was not present then may be present now.
            if until > at {
                return Some(until);
            }
        }
        let runs = self.page_runs(start..start.saturating_add(LOOK_BYTES)).ok()?;
        let until = runs.present_from(at);
        *kept = Some(PresentRuns { start, at: Instant::now(), runs });
        Some(until)
    }
}

fn refused(what: &'static str, pid: u32, source: io::Error) -> MemoryError {
    match source.raw_os_error() {
        Some(libc::ESRCH | libc::ENOENT) => MemoryError::Gone { pid },
        _ => MemoryError::Refused { what, pid, source },
    }
}

impl Memory for LiveMemory {
    fn process(&self) -> Option<&Process> {
        Some(&self.process)
    }

    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        let bytes = usize::try_from(self.present_bytes(addr, out.len() as u64)).unwrap_or(0).min(out.len());
        out.get_mut(..bytes).filter(|part| !part.is_empty()).map_or(0, |part| self.read_pieces(&[Piece { addr, bytes }], part))
    }

    fn read_pieces(&self, pieces: &[Piece], out: &mut [u8]) -> usize {
        let mut done = 0usize;
        for group in pieces.chunks(PIECES_MAX) {
            let wanted: usize = group.iter().map(|piece| piece.bytes).fold(0, usize::saturating_add);
            let Some(part) = out.get_mut(done..done.saturating_add(wanted)) else { return done };
            let local = libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
            let remote: Vec<libc::iovec> =
                group.iter().map(|piece| libc::iovec { iov_base: piece.addr as *mut libc::c_void, iov_len: piece.bytes }).collect();
            // SAFETY: the local vector covers `part` and nothing else; the remote one is only read by the kernel, which checks it.
            let got = unsafe { libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
            let got = usize::try_from(got).unwrap_or(0);
            done += got;
            if got < wanted {
                return done;
            }
        }
        done
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        let maps = self.process.maps()?;
        if maps.mappings.is_empty() {
            return Err(MemoryError::Gone { pid: self.process.pid().0 });
        }
        Ok(maps)
    }

    fn threads(&self) -> Vec<ThreadState> {
        threads::of_process(self.process.directory())
    }

    fn resident_mappings(&self) -> Result<Vec<ResidentMapping>, MemoryError> {
        let file = File::open(self.process.directory().join("smaps"));
        let mut bytes = Vec::new();
        let read = file.and_then(|file| file.take(SMAPS_BYTES_MAX).read_to_end(&mut bytes));
        read.map_err(|source| refused("smaps", self.process.pid().0, source))?;
        Ok(parse_smaps(&bytes))
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        self.pages.runs(&range).map_err(|source| refused("the page map", self.process.pid().0, source))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::Pid;

    #[test]
    fn a_read_ends_where_the_present_pages_end_and_touches_nothing_else() {
        let memory = LiveMemory::open(Process::open(Pid(std::process::id())).unwrap()).unwrap();
        // SAFETY: a fresh private mapping that only this test uses.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), 16 * 4096, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        assert_ne!(base, libc::MAP_FAILED);
        for page in [1usize, 2, 7] {
            // SAFETY: inside the mapping.
            unsafe { base.cast::<u8>().add(page * 4096).write_volatile(1) };
        }
        let start = base as u64;
        let pages = || {
            let runs = memory.page_runs(start..start + 16 * 4096).unwrap();
            runs.runs().iter().map(|run| (run.start - start, run.end - start)).collect::<Vec<_>>()
        };
        assert_eq!(pages(), [(0x1000, 0x3000), (0x7000, 0x8000)]);
        assert_eq!(memory.read(start + 4096, &mut [0u8; 64]), 64);
        assert_eq!(memory.read(start + 8000, &mut [0u8; 8192]), 0x3000 - 8000);
        assert_eq!(memory.read(start + 8000, &mut vec![0u8; 1 << 20]), 0x3000 - 8000);
        assert_eq!(memory.read(start + 0x5000, &mut [0u8; 8]), 0);
        assert_eq!(pages(), [(0x1000, 0x3000), (0x7000, 0x8000)]);
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(base, 16 * 4096) };
    }
}
