//! The memory of a running process: its page map, process_vm_readv and `/proc/PID/mem`, without stopping or injecting anything.
//!
//! process_vm_readv pins pages, and the kernel copies a page of a process that it shares with a forked child, or its parent, before it pins
//! it (mm/gup.c, `gup_must_unshare`, since Linux 5.19): a census would take as much memory as it reads, in the memory cgroup of the process.
//! Reads of `/proc/PID/mem` pin nothing, but copy one page at a time. So process_vm_readv is used for long reads alone, of pages that the
//! page map shows to be mapped once. A process that forks between the two may lose the sharing of that one read.
//!
//! Only pages that are present in the page map are read. Reading any other page would cause a page fault: it would bring in a swapped page,
//! fill page tables for untouched memory, and block forever if the process handles its own faults (userfaultfd).

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::kernel_pages::KernelPages;
use super::memory::{Memory, MemoryError, Piece};
use super::not_malloc::{ResidentMapping, parse_smaps};
use super::threads::{self, ThreadState};
use crate::heap::residency::{PageRuns, page_down, page_up};
use crate::process::{Maps, Process};

/// Bytes from which a read is long: it is worth to look whether its pages are shared.
const LONG_BYTES: usize = 32 << 10;
/// Bytes that near pieces are read in at once.
const NEAR_BYTES: u64 = 64 << 10;
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
    memory: File,
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
    /// Opens the process's page map and memory.
    ///
    /// # Errors
    /// If the permission is missing, or the process has ended.
    pub fn open(process: Process) -> Result<Self, MemoryError> {
        let pid = process.pid().0;
        let pages = KernelPages::open(process.directory()).map_err(|source| refused("the page map", pid, source))?;
        let memory = File::open(process.directory().join("mem")).map_err(|source| refused("the memory", pid, source))?;
        let raw = libc::pid_t::try_from(pid).map_err(|_| MemoryError::Gone { pid })?;
        Ok(Self { process, pid: raw, pages, memory, looks: Mutex::new(vec![None; LOOKS_KEPT]) })
    }

    /// The process.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Reads from an address on; how many bytes.
    fn read_piece(&self, addr: u64, out: &mut [u8]) -> usize {
        let is_long = out.len() >= LONG_BYTES;
        if is_long && self.pages.are_mapped_once(&(addr..addr.saturating_add(out.len() as u64))) {
            let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
            let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: out.len() };
            // SAFETY: the local vector covers `out` and nothing else; the remote one is only read by the kernel, which checks it.
            let got = unsafe { libc::process_vm_readv(self.pid, &raw const local, 1, &raw const remote, 1, 0) };
            return usize::try_from(got).unwrap_or(0);
        }
        let mut done = 0;
        while let Some(part) = out.get_mut(done..).filter(|part| !part.is_empty()) {
            match self.memory.read_at(part, addr.saturating_add(done as u64)) {
                Ok(got @ 1..) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => break,
            }
        }
        done
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

/// Copies the pieces out of the memory from the first one's address on; how many bytes, up to the first that is not in it.
fn copy_pieces(pieces: &[Piece], memory: &[u8], out: &mut [u8]) -> usize {
    let Some(start) = pieces.first().map(|first| first.addr) else { return 0 };
    let mut done = 0;
    for piece in pieces {
        let at = usize::try_from(piece.addr - start).unwrap_or(usize::MAX);
        let from = memory.get(at..at.saturating_add(piece.bytes).min(memory.len())).unwrap_or_default();
        if let Some(to) = out.get_mut(done..done + from.len()) {
            to.copy_from_slice(from);
        }
        done += from.len();
        if from.len() < piece.bytes {
            break;
        }
    }
    done
}

/// How many of the first pieces lie so near that they can be read at once, and where their memory ends: each begins on the page on which
/// another one ends, or on the next, so that no page is read that has no piece.
fn near(pieces: &[Piece]) -> (usize, u64) {
    let end_of = |piece: &Piece| piece.addr.saturating_add(piece.bytes as u64);
    let Some((first, others)) = pieces.split_first() else { return (0, 0) };
    let (mut count, mut end) = (1, end_of(first));
    for piece in others {
        let is_near = piece.addr >= first.addr && page_down(piece.addr) <= page_up(end);
        if !is_near || end_of(piece).saturating_sub(first.addr) > NEAR_BYTES {
            break;
        }
        (count, end) = (count + 1, end.max(end_of(piece)));
    }
    (count, end)
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
        let (mut rest, mut done) = (pieces, 0usize);
        let mut bytes = Vec::new();
        while let Some(first) = rest.first() {
            let (count, end) = near(rest);
            let (group, others) = rest.split_at(count);
            let wanted: usize = group.iter().map(|piece| piece.bytes).fold(0, usize::saturating_add);
            let Some(part) = out.get_mut(done..done.saturating_add(wanted)) else { return done };
            let got = if let [piece] = group {
                self.read_piece(piece.addr, part)
            } else {
                bytes.resize(usize::try_from(end - first.addr).unwrap_or(0), 0);
                let read = self.read_piece(first.addr, &mut bytes);
                copy_pieces(group, bytes.get(..read).unwrap_or_default(), part)
            };
            done += got;
            if got < wanted {
                return done;
            }
            rest = others;
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

    #[test]
    fn pieces_near_each_other_are_read_at_once_without_another_page() {
        let piece = |addr, bytes| Piece { addr, bytes };
        assert_eq!(near(&[piece(0x1000, 16), piece(0x1800, 16), piece(0x2ff8, 8), piece(0x4000, 8)]), (3, 0x3000));
        assert_eq!(near(&[piece(0x1000, 16), piece(0x0ff0, 16)]), (1, 0x1010));
        assert_eq!(near(&[piece(0x1000, 16), piece(0x1ff8, 1 << 17)]), (1, 0x1010));
        assert_eq!(near(&[]), (0, 0));
        let memory: Vec<u8> = (0..64).collect();
        let mut out = [0; 12];
        let pieces = [piece(0x1000, 4), piece(0x1010, 4), piece(0x100c, 4)];
        assert_eq!(copy_pieces(&pieces, &memory, &mut out), 12);
        assert_eq!(out, [0, 1, 2, 3, 16, 17, 18, 19, 12, 13, 14, 15]);
        assert_eq!(copy_pieces(&pieces, &memory[..18], &mut out), 6);
    }

    /// A forked child, which is killed at the end.
    struct Child(libc::pid_t);

    impl Drop for Child {
        fn drop(&mut self) {
            // SAFETY: the child of this test.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn pages_shared_with_a_forked_child_stay_shared() {
        const BYTES: usize = 32 << 20;
        let memory = vec![7u8; BYTES];
        // SAFETY: the child makes one system call, again and again, until it is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no arguments.
                unsafe { libc::pause() };
            }
        }
        let _child = Child(child);
        let shared_bytes = || {
            let text = std::fs::read_to_string(format!("/proc/{child}/smaps_rollup")).unwrap();
            let line = text.lines().find(|line| line.starts_with("Shared_Dirty:")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
        };
        let process = LiveMemory::open(Process::open(Pid(child.cast_unsigned())).unwrap()).unwrap();
        let before = shared_bytes();
        let start = memory.as_ptr() as u64;
        // At once, in pages, and in words that lie near each other.
        let mut out = vec![0u8; BYTES];
        assert_eq!(process.read(start, &mut out), BYTES);
        assert_eq!(out, memory);
        let words: Vec<Piece> = (0..BYTES as u64 / 512).map(|index| Piece { addr: start + 512 * index, bytes: 8 }).collect();
        assert_eq!(process.read_pieces(&words, &mut out), 8 * words.len());
        let after = shared_bytes();
        assert!(before > BYTES as u64 / 2, "{before} shared");
        // Other tests of this process write to their memory meanwhile.
        assert!(before.saturating_sub(after) < BYTES as u64 / 8, "{before} bytes were shared, {after} are");
    }
}
