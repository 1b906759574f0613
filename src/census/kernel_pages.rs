//! Queries the kernel for the pages of a process that are present, swapped, zero, or huge.
//!
//! It uses the cheapest of three ways that this kernel allows. PAGEMAP_SCAN (Linux 6.7) reports pages by category; a reported page costs
//! four times as much as a skipped one, and in a heap nearly all pages are in the same category, plainly present. So for long ranges the
//! *other* pages are requested, and those between them are present if they are mapped, which PROCMAP_QUERY (Linux 6.11) shows. Without that
//! all pages are requested, and without PAGEMAP_SCAN their entries of `/proc/PID/pagemap` are read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::heap::residency::{PageRun, PageRuns, PageState, page_bytes, page_down, page_up};

/// Regions fetched by one PAGEMAP_SCAN: 12 KiB on the stack, enough for 2 MiB of alternating pages.
const SCAN_REGIONS: usize = 512;
/// Address space of one PAGEMAP_SCAN: the kernel holds the process's mmap lock for reading meanwhile, here for 0.2 ms at most.
const SCAN_BYTES: u64 = 64 << 20;
/// Smallest range for which the pages that are not plainly present are requested: there it saves more than the query of the mappings costs.
const DIFFERENCE_BYTES_MIN: u64 = 1 << 20;
/// Entries of the page map read at once: 64 KiB for 32 MiB of address space.
const ENTRIES: usize = 8192;

/// `_IOWR('f', 16, struct pm_scan_arg)` (include/uapi/linux/fs.h, since Linux 6.7).
const PAGEMAP_SCAN: libc::Ioctl = 0xC060_6610_u32 as libc::Ioctl;
/// `_IOWR('f', 17, struct procmap_query)` (include/uapi/linux/fs.h, since Linux 6.11).
const PROCMAP_QUERY: libc::Ioctl = 0xC068_6611_u32 as libc::Ioctl;
// Page categories of PAGEMAP_SCAN.
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const PFNZERO: u64 = 1 << 5;
const HUGE: u64 = 1 << 6;
// Flags of PROCMAP_QUERY.
const VMA_WRITABLE: u64 = 1 << 1;
const VMA_SHARED: u64 = 1 << 3;
const COVERING_OR_NEXT_VMA: u64 = 1 << 4;

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

/// `struct procmap_query`.
#[repr(C)]
#[derive(Default)]
struct MappingQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

impl MappingQuery {
    /// Whether it is private writable memory without a file. In other mappings the scan may skip pages for other reasons (device pages, for
    /// example), so only here unreported pages are present.
    fn is_plain(&self) -> bool {
        self.inode == 0 && self.vma_flags & VMA_WRITABLE != 0 && self.vma_flags & VMA_SHARED == 0
    }
}

/// Which pages a scan reports.
#[derive(Clone, Copy)]
enum Wanted {
    /// Those that are present or swapped.
    There,
    /// Those that are not plainly present: missing, swapped, of zeros, or huge.
    Odd,
}

/// A process's page map. It stays bound to the address space it was opened on.
#[derive(Debug)]
pub struct KernelPages {
    pagemap: File,
    /// `None` once the kernel has refused PROCMAP_QUERY or the file.
    maps: Option<File>,
    can_scan: AtomicBool,
    can_query: AtomicBool,
}

impl KernelPages {
    /// Opens the page map of a process, given its directory in `/proc`.
    ///
    /// # Errors
    /// If the permission is missing, or the process has ended.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let pagemap = File::open(directory.join("pagemap"))?;
        let maps = File::open(directory.join("maps")).ok();
        Ok(Self { pagemap, can_query: AtomicBool::new(maps.is_some()), maps, can_scan: AtomicBool::new(true) })
    }

    /// The pages of `range` that are present or swapped.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn runs(&self, range: &Range<u64>) -> io::Result<PageRuns> {
        let range = page_down(range.start)..page_up(range.end);
        let is_long = range.end.saturating_sub(range.start) >= DIFFERENCE_BYTES_MIN;
        if is_long
            && let Some(maps) = &self.maps
            && self.can_scan.load(Ordering::Relaxed)
            && self.can_query.load(Ordering::Relaxed)
        {
            match self.by_difference(maps, &range) {
                Err(error) if is_beyond(&error) => return self.by_reading(&range),
                Err(error) if may_be_refused(&error) => self.can_query.store(false, Ordering::Relaxed),
                answer => return answer,
            }
        }
        if self.can_scan.load(Ordering::Relaxed) {
            match self.by_scan(&range) {
                Err(error) if is_beyond(&error) => return self.by_reading(&range),
                Err(error) if may_be_refused(&error) => self.can_scan.store(false, Ordering::Relaxed),
                answer => return answer,
            }
        }
        self.by_reading(&range)
    }

    /// Whether the page map shows each page of a range to be mapped once, or to be of a file: bits 56 and 61
    /// (Documentation/admin-guide/mm/pagemap.rst). The zero page is neither.
    #[must_use]
    pub fn are_mapped_once(&self, range: &Range<u64>) -> bool {
        const ONCE_OR_FILE: u64 = 1 << 56 | 1 << 61;
        let range = page_down(range.start)..page_up(range.end);
        let mut entries = [0u8; 8 * 512];
        let mut at = range.start;
        while at < range.end {
            let pages = usize::try_from((range.end - at) / page_bytes()).unwrap_or(usize::MAX).min(entries.len() / 8);
            let Some(part) = entries.get_mut(..8 * pages) else { return false };
            let is_read = self.pagemap.read_at(part, at / page_bytes() * 8).is_ok_and(|got| got == part.len());
            let is_once = |entry: &[u8]| entry.try_into().is_ok_and(|entry| u64::from_le_bytes(entry) & ONCE_OR_FILE != 0);
            if !is_read || !part.chunks_exact(8).all(is_once) {
                return false;
            }
            at += page_bytes() * pages as u64;
        }
        true
    }

    /// What is mapped, without the pages that are not plainly present.
    fn by_difference(&self, maps: &File, range: &Range<u64>) -> io::Result<PageRuns> {
        let mut odd: Vec<PageRun> = Vec::new();
        self.scan(range, Wanted::Odd, |run| odd.push(run))?;
        let mut runs = PageRuns::default();
        let mut odd = odd.into_iter().peekable();
        let mut at = range.start;
        // After the scan: pages that were unmapped before the query are not taken for present.
        while at < range.end {
            let Some(mapping) = mapping_from(maps, at)? else { break };
            let (start, end) = (mapping.vma_start.max(at), mapping.vma_end.min(range.end));
            if start >= end {
                break;
            }
            if mapping.is_plain() {
                at = start;
                while let Some(run) = odd.peek().copied().filter(|run| run.start < end) {
                    let piece = PageRun { start: run.start.max(at), end: run.end.min(end), ..run };
                    runs.push(plainly_present(at, piece.start));
                    if run.state.present || run.state.swapped {
                        runs.push(piece);
                    }
                    at = at.max(piece.end);
                    // A run continues over the next mapping's pages if they are of the same kind.
                    if run.end > end {
                        break;
                    }
                    odd.next();
                }
                runs.push(plainly_present(at, end));
            } else {
                self.scan(&(start..end), Wanted::There, |run| runs.push(run))?;
            }
            at = end;
        }
        Ok(runs)
    }

    fn by_scan(&self, range: &Range<u64>) -> io::Result<PageRuns> {
        let mut runs = PageRuns::default();
        self.scan(range, Wanted::There, |run| runs.push(run))?;
        Ok(runs)
    }

    fn scan(&self, range: &Range<u64>, wanted: Wanted, mut found: impl FnMut(PageRun)) -> io::Result<()> {
        let mut at = range.start;
        let mut regions = [ScanRegion::default(); SCAN_REGIONS];
        let (category_inverted, category_anyof_mask) = match wanted {
            Wanted::There => (0, PRESENT | SWAPPED),
            Wanted::Odd => (PRESENT, PRESENT | PFNZERO | HUGE),
        };
        while at < range.end {
            let end = range.end.min(at.saturating_add(SCAN_BYTES));
            let mut arg = ScanArg {
                size: size_of::<ScanArg>() as u64,
                start: at,
                end,
                vec: regions.as_mut_ptr() as u64,
                vec_len: SCAN_REGIONS as u64,
                category_inverted,
                category_anyof_mask,
                return_mask: PRESENT | SWAPPED | PFNZERO | HUGE,
                ..ScanArg::default()
            };
            // SAFETY: the argument and the array it names outlive the call, and `vec_len` is the array's length.
            let filled = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error())?;
            for region in regions.iter().take(filled) {
                let has = |category| region.categories & category != 0;
                let state = PageState { present: has(PRESENT), swapped: has(SWAPPED), zero: has(PFNZERO), huge: has(HUGE) };
                found(PageRun { start: region.start, end: region.end, state });
            }
            if arg.walk_end <= at {
                break;
            }
            at = arg.walk_end;
        }
        Ok(())
    }

    /// One word per page: bit 63 present, 62 swapped (Documentation/admin-guide/mm/pagemap.rst). The zero page and huge pages cannot be
    /// distinguished here.
    fn by_reading(&self, range: &Range<u64>) -> io::Result<PageRuns> {
        let mut runs = PageRuns::default();
        let pages = usize::try_from((range.end - range.start) / page_bytes()).unwrap_or(usize::MAX);
        let mut entries = vec![0u8; pages.clamp(1, ENTRIES) * 8];
        let mut at = range.start;
        while at < range.end {
            let pages = usize::try_from((range.end - at) / page_bytes()).unwrap_or(usize::MAX).clamp(1, ENTRIES);
            let Some(part) = entries.get_mut(..pages * 8) else { break };
            let got = self.pagemap.read_at(part, at / page_bytes() * 8)? / 8;
            if got == 0 {
                break;
            }
            for entry in part.chunks_exact(8).take(got) {
                let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
                let state = PageState { present: entry >> 63 & 1 == 1, swapped: entry >> 62 & 1 == 1, ..PageState::default() };
                if state.present || state.swapped {
                    runs.push(PageRun { start: at, end: at + page_bytes(), state });
                }
                at += page_bytes();
            }
        }
        Ok(runs)
    }
}

/// Whether an error means that the range reaches beyond the addresses of user space (fs/proc/task_mmu.c, `pagemap_scan_get_args`), as a
/// word that only looks like an address does.
fn is_beyond(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// Whether an error may mean that the request is not known (older kernels) or not allowed (seccomp profiles): then another way is taken,
/// and the process's end shows there.
fn may_be_refused(error: &io::Error) -> bool {
    error.raw_os_error() != Some(libc::ESRCH)
}

/// A run of pages that are present and nothing else; empty, and so ignored, unless `start` is before `end`.
fn plainly_present(start: u64, end: u64) -> PageRun {
    PageRun { start, end, state: PageState { present: true, ..PageState::default() } }
}

/// The mapping that covers `addr`, or the next one; `None` behind the last.
fn mapping_from(maps: &File, addr: u64) -> io::Result<Option<MappingQuery>> {
    let mut query = MappingQuery {
        size: size_of::<MappingQuery>() as u64,
        query_flags: COVERING_OR_NEXT_VMA,
        query_addr: addr,
        ..MappingQuery::default()
    };
    // SAFETY: the argument outlives the call; it names no buffers.
    if unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) } == 0 {
        return Ok(Some(query));
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MIB: usize = 1 << 20;
    const BYTES: usize = 16 * MIB;
    const RIGHTS: i32 = libc::PROT_READ | libc::PROT_WRITE;

    /// Memory of every kind, in adjacent mappings.
    struct Patchwork(*mut u8);

    impl Patchwork {
        fn new() -> Self {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a fresh private mapping that only this test uses; what is done below stays inside it.
            unsafe {
                let base = libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_NONE, flags, -1, 0);
                assert_ne!(base, libc::MAP_FAILED);
                let whole = Self(base.cast());
                // MiB 0 to 2: small pages, some of them touched, one only read.
                whole.protect(0, 2, RIGHTS);
                libc::madvise(base, 2 * MIB, libc::MADV_NOHUGEPAGE);
                [0, 1, 2, 7, 200, 300, 301].iter().for_each(|page| whole.touch(page * 4096));
                std::hint::black_box(base.cast::<u8>().add(40 * 4096).read_volatile());
                // MiB 2: every second page. MiB 3: nothing mapped. MiB 4: touched, then without rights.
                whole.protect(2, 3, RIGHTS);
                (0..128).for_each(|page| whole.touch(2 * MIB + 2 * page * 4096));
                libc::munmap(base.add(3 * MIB), MIB);
                whole.protect(4, 5, RIGHTS);
                whole.touch(4 * MIB + 5 * 4096);
                whole.protect(4, 5, libc::PROT_NONE);
                // MiB 5: shared, of no file. MiB 6 to 12: huge pages, where the kernel gives them. The rest: never touched.
                let shared = libc::mmap(base.add(5 * MIB), MIB, RIGHTS, libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED, -1, 0);
                assert_ne!(shared, libc::MAP_FAILED);
                whole.touch(5 * MIB + 9 * 4096);
                whole.protect(6, 16, RIGHTS);
                libc::madvise(base.add(6 * MIB), 6 * MIB, libc::MADV_HUGEPAGE);
                (0..6).for_each(|mib| whole.touch((6 + mib) * MIB));
                whole
            }
        }

        /// Sets the rights of some of its MiB.
        unsafe fn protect(&self, from: usize, to: usize, rights: i32) {
            // SAFETY: inside the mapping.
            assert_eq!(unsafe { libc::mprotect(self.0.add(from * MIB).cast(), (to - from) * MIB, rights) }, 0);
        }

        fn touch(&self, at: usize) {
            // SAFETY: inside the mapping, where it is writable.
            unsafe { self.0.add(at).write_volatile(1) };
        }

        fn range(&self) -> Range<u64> {
            self.0 as u64..self.0 as u64 + BYTES as u64
        }
    }

    impl Drop for Patchwork {
        fn drop(&mut self) {
            // SAFETY: the mapping made above; the hole in it is none of ours any more, so it is left alone.
            unsafe {
                libc::munmap(self.0.cast(), 3 * MIB);
                libc::munmap(self.0.add(4 * MIB).cast(), BYTES - 4 * MIB);
            }
        }
    }

    fn own_pages() -> KernelPages {
        KernelPages::open(Path::new("/proc/self")).unwrap()
    }

    /// What is present, as far as every kernel shows it; without the MiB that is not mapped, in which other threads may map something.
    fn present(runs: &PageRuns, range: &Range<u64>) -> Vec<(u64, u64)> {
        let hole = range.start + 3 * MIB as u64..range.start + 4 * MIB as u64;
        let mut plain = PageRuns::default();
        for run in runs.runs().iter().filter(|run| run.end <= hole.start || run.start >= hole.end) {
            plain.push(PageRun { state: PageState { zero: false, huge: false, ..run.state }, ..*run });
        }
        plain.runs().iter().map(|run| (run.start - range.start, run.end - range.start)).collect()
    }

    #[test]
    fn three_ways_to_ask_for_pages_agree_on_memory_of_every_kind() {
        let patchwork = Patchwork::new();
        let (pages, range) = (own_pages(), patchwork.range());
        let read = pages.by_reading(&range).unwrap();
        assert!(present(&read, &range).len() > 128, "{read:?}");
        // Kernels before 6.7 have the first way alone, before 6.11 not the third.
        let Ok(scanned) = pages.by_scan(&range) else { return };
        assert_eq!(present(&scanned, &range), present(&read, &range));
        let zero = range.start + 40 * 4096;
        assert!(scanned.state_at(zero).zero);
        let Ok(difference) = pages.by_difference(pages.maps.as_ref().unwrap(), &range) else { return };
        assert_eq!(present(&difference, &range), present(&scanned, &range));
        for run in scanned.runs() {
            assert_eq!(difference.state_at(run.start), run.state);
        }
        // Ranges that begin and end inside mappings.
        for (from, to) in [(0x1000, 0x2000), (0, 0x3000), (0x2f_f000, 0x40_1000), (0x45_0000, 0x90_3000)] {
            let part = range.start + from..range.start + to;
            let (left, right) = (pages.by_scan(&part).unwrap(), pages.by_difference(pages.maps.as_ref().unwrap(), &part).unwrap());
            assert_eq!(present(&left, &range), present(&right, &range), "{from:#x} to {to:#x}");
        }
    }

    /// Lets this thread's requests of a kind fail, as a container's seccomp profile would.
    fn refuse(requests: &[libc::Ioctl], with: i32) {
        let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
        let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
        let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        // struct seccomp_data: the system call's number at 0, its second argument at 24.
        let mut filter =
            vec![step(load, 0, 0, 0), step(equal, 0, 2 * requests.len() as u8 + 1, libc::SYS_ioctl as u32), step(load, 0, 0, 24)];
        for &request in requests {
            filter.push(step(equal, 0, 1, request as u32));
            filter.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ERRNO | with as u32));
        }
        filter.push(step(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW));
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: numbers, and a program that outlives the call; both change this thread alone.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
        }
    }

    #[test]
    fn where_a_sandbox_refuses_the_requests_the_page_map_is_read() {
        for (requests, errno) in
            [(&[PROCMAP_QUERY][..], libc::EPERM), (&[PAGEMAP_SCAN], libc::ENOSYS), (&[PAGEMAP_SCAN, PROCMAP_QUERY], libc::EACCES)]
        {
            let patchwork = Patchwork::new();
            let (expected, range) = (own_pages().by_reading(&patchwork.range()).unwrap(), patchwork.range());
            let (told, pages) = std::thread::scope(|scope| {
                let asked = scope.spawn(|| {
                    refuse(requests, errno);
                    let pages = own_pages();
                    (pages.runs(&range).unwrap(), pages)
                });
                asked.join().unwrap()
            });
            assert_eq!(present(&told, &range), present(&expected, &range));
            // The refusal is remembered, so that no request fails twice.
            assert!(!pages.can_query.load(Ordering::Relaxed), "{requests:?}");
            assert!(!(requests.contains(&PAGEMAP_SCAN) && pages.can_scan.load(Ordering::Relaxed)), "{requests:?}");
        }
    }

    #[test]
    fn an_address_beyond_user_space_changes_no_way_of_asking() {
        let patchwork = Patchwork::new();
        let (pages, range) = (own_pages(), patchwork.range());
        let expected = present(&pages.runs(&range).unwrap(), &range);
        let ways = [pages.can_query.load(Ordering::Relaxed), pages.can_scan.load(Ordering::Relaxed)];
        for beyond in [1 << 47, 1 << 56, u64::MAX - (8 << 20)] {
            for bytes in [4 * page_bytes(), 2 * DIFFERENCE_BYTES_MIN] {
                let runs = pages.runs(&(page_down(beyond)..page_down(beyond) + bytes)).unwrap();
                assert!(runs.runs().is_empty(), "{beyond:#x} {runs:?}");
            }
        }
        assert_eq!([pages.can_query.load(Ordering::Relaxed), pages.can_scan.load(Ordering::Relaxed)], ways);
        assert_eq!(present(&pages.runs(&range).unwrap(), &range), expected);
    }

    #[test]
    fn pages_that_are_missing_on_both_sides_of_a_mappings_end_are_present_on_neither() {
        // SAFETY: a fresh private mapping that only this test uses; advice that changes what a fork copies splits it in two.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), BYTES, RIGHTS, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            assert_eq!(libc::madvise(base.byte_add(BYTES / 2), BYTES / 2, libc::MADV_DONTFORK), 0);
            base
        };
        let pages = KernelPages::open(Path::new("/proc/self")).unwrap();
        let start = base as u64;
        let runs = pages.runs(&(start..start + BYTES as u64)).unwrap();
        // SAFETY: what was mapped above.
        unsafe { libc::munmap(base, BYTES) };
        assert_eq!(runs.runs().len(), 0);
    }
}
