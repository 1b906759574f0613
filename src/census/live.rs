//! The memory of a running process: process_vm_readv and the page map. Nothing is stopped, nothing injected.
//!
//! Only pages that the page map calls present are read. Reading any other one is a page fault of the process: it brings a swapped page in,
//! fills page tables for memory that was never touched, and waits for ever where the process serves its own faults (userfaultfd).

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::memory::{Memory, MemoryError, Piece};
use super::not_malloc::{ResidentMapping, parse_smaps};
use crate::heap::residency::{PAGE_BYTES, PageRun, PageRuns, PageState, page_down, page_up};
use crate::target::{Maps, Process};

/// Pieces of one process_vm_readv call; the kernel takes at most IOV_MAX = 1024.
const PIECES_MAX: usize = 1024;
/// Runs fetched by one PAGEMAP_SCAN; 12 KiB on the stack's side, enough for 2 MiB of alternating pages.
const SCAN_RUNS: usize = 512;
/// Entries read at once where PAGEMAP_SCAN is missing: 64 KiB for 32 MiB of address space.
const PAGEMAP_ENTRIES: usize = 8192;

/// Address space asked about for one small read: 16 pages, hardly dearer than one.
const LOOK_BYTES: u64 = 64 << 10;
/// Looks remembered.
const LOOKS_KEPT: usize = 256;
/// How long a look may be relied on: a page that was present may be swapped out or given back meanwhile.
const LOOK_AGE_MAX: Duration = Duration::from_millis(20);

/// Bytes of smaps read at most: about 700 a mapping, 262,144 mappings.
const SMAPS_BYTES_MAX: u64 = 192 << 20;

/// `_IOWR('f', 16, struct pm_scan_arg)` (include/uapi/linux/fs.h, since Linux 6.7).
const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610_u32 as libc::Ioctl;
// Page categories of PAGEMAP_SCAN.
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Default, Clone, Copy)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// The memory of a running process. The page map stays bound to the address space it was opened on, so an exec shows as "gone".
#[derive(Debug)]
pub struct LiveMemory {
    process: Process,
    pid: libc::pid_t,
    pagemap: File,
    can_scan: AtomicBool,
    looks: Mutex<Vec<Option<Look>>>,
}

/// What was present in one aligned block of [`LOOK_BYTES`].
#[derive(Debug, Clone)]
struct Look {
    start: u64,
    at: Instant,
    runs: PageRuns,
}

impl LiveMemory {
    /// Opens the process's page map.
    ///
    /// # Errors
    /// If the right to look is missing or the process has ended.
    pub fn open(process: Process) -> Result<Self, MemoryError> {
        let pid = process.pid().0;
        let pagemap = File::open(process.directory().join("pagemap")).map_err(|source| refused("the page map", pid, source))?;
        let raw = libc::pid_t::try_from(pid).map_err(|_| MemoryError::Gone { pid })?;
        Ok(Self { process, pid: raw, pagemap, can_scan: AtomicBool::new(true), looks: Mutex::new(vec![None; LOOKS_KEPT]) })
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
            // What was not there may have come since.
            if until > at {
                return Some(until);
            }
        }
        let runs = self.page_runs(start..start.saturating_add(LOOK_BYTES)).ok()?;
        let until = runs.present_from(at);
        *kept = Some(Look { start, at: Instant::now(), runs });
        Some(until)
    }

    fn scan(&self, range: &Range<u64>) -> io::Result<PageRuns> {
        let mut runs = PageRuns::default();
        let mut at = range.start;
        let mut found = [ScanRegion::default(); SCAN_RUNS];
        while at < range.end {
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: at,
                end: range.end,
                vec: found.as_mut_ptr() as u64,
                vec_len: SCAN_RUNS as u64,
                category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED | PAGE_IS_PFNZERO | PAGE_IS_HUGE,
                ..ScanArg::default()
            };
            // SAFETY: the argument and the array it names outlive the call, and `vec_len` is the array's length.
            let filled = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &mut arg) };
            let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error())?;
            for region in found.iter().take(filled) {
                let has = |category| region.categories & category != 0;
                let state = PageState {
                    present: has(PAGE_IS_PRESENT),
                    swapped: has(PAGE_IS_SWAPPED),
                    zero: has(PAGE_IS_PFNZERO),
                    huge: has(PAGE_IS_HUGE),
                };
                runs.push(PageRun { start: region.start, end: region.end, state });
            }
            if arg.walk_end <= at {
                break;
            }
            at = arg.walk_end;
        }
        Ok(runs)
    }

    /// One word a page: bit 63 present, 62 swapped (Documentation/admin-guide/mm/pagemap.rst). The page of zeros and huge pages cannot
    /// be told apart here.
    fn read_pagemap(&self, range: &Range<u64>) -> io::Result<PageRuns> {
        let mut runs = PageRuns::default();
        let mut entries = vec![0u8; PAGEMAP_ENTRIES * 8];
        let mut at = range.start;
        while at < range.end {
            let pages = usize::try_from((range.end - at) / PAGE_BYTES).unwrap_or(usize::MAX).clamp(1, PAGEMAP_ENTRIES);
            let Some(part) = entries.get_mut(..pages * 8) else { break };
            let got = self.pagemap.read_at(part, at / PAGE_BYTES * 8)? / 8;
            if got == 0 {
                break;
            }
            for entry in part.chunks_exact(8).take(got) {
                let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
                let state = PageState { present: entry >> 63 & 1 == 1, swapped: entry >> 62 & 1 == 1, ..PageState::default() };
                if state.present || state.swapped {
                    runs.push(PageRun { start: at, end: at + PAGE_BYTES, state });
                }
                at += PAGE_BYTES;
            }
        }
        Ok(runs)
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

    fn resident_mappings(&self) -> Result<Vec<ResidentMapping>, MemoryError> {
        let file = File::open(self.process.directory().join("smaps"));
        let mut bytes = Vec::new();
        let read = file.and_then(|file| file.take(SMAPS_BYTES_MAX).read_to_end(&mut bytes));
        read.map_err(|source| refused("smaps", self.process.pid().0, source))?;
        Ok(parse_smaps(&bytes))
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        let range = page_down(range.start)..page_up(range.end);
        let pid = self.process.pid().0;
        if self.can_scan.load(Ordering::Relaxed) {
            match self.scan(&range) {
                Ok(runs) => return Ok(runs),
                // Kernels before 6.7, and seccomp profiles that do not know the request.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL | libc::EPERM)) => {
                    self.can_scan.store(false, Ordering::Relaxed);
                }
                Err(source) => return Err(refused("the page map", pid, source)),
            }
        }
        self.read_pagemap(&range).map_err(|source| refused("the page map", pid, source))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::Pid;

    #[test]
    fn both_ways_to_ask_for_residency_agree_on_own_pages() {
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
        let range = start..start + 16 * 4096;
        let scanned = memory.page_runs(range.clone()).unwrap();
        let read = memory.read_pagemap(&range).unwrap();
        let pages = |runs: &PageRuns| runs.runs().iter().map(|r| (r.start - start, r.end - start)).collect::<Vec<_>>();
        assert_eq!(pages(&read), [(0x1000, 0x3000), (0x7000, 0x8000)]);
        assert_eq!(pages(&scanned), pages(&read));
        assert_eq!(memory.read(start + 4096, &mut [0u8; 64]), 64);
        // A read ends where the present pages end, and touches nothing else.
        assert_eq!(memory.read(start + 8000, &mut [0u8; 8192]), 0x3000 - 8000);
        assert_eq!(memory.read(start + 8000, &mut vec![0u8; 1 << 20]), 0x3000 - 8000);
        assert_eq!(memory.read(start + 0x5000, &mut [0u8; 8]), 0);
        assert_eq!(pages(&memory.read_pagemap(&range).unwrap()), pages(&read));
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(base, 16 * 4096) };
    }
}
