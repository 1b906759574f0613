//! How long a release takes, and for how long which lock is held: from the pages and ranges to be released and this machine's own rate.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::allocator::Hold;
use crate::census::{ArenaAccount, HeapAccount};
use crate::heap::residency::page_bytes;

/// Pages released to measure the rate, and the ranges they are released in.
const PAGES: usize = 8192;
const RANGES: usize = 2048;
/// Ranges that are timed together: what interrupts one such part is left out.
const PART: usize = 128;
/// A chunk in a fastbin is taken out and merged with its neighbours: some cache misses. An estimate, which matters from millions on.
const FASTBIN_CHUNK: Duration = Duration::from_nanos(100);
/// Bytes of such a chunk, in the middle of what fastbins take.
const FASTBIN_CHUNK_BYTES: u64 = 64;
/// What a call costs that has nothing to release.
const CALL: Duration = Duration::from_micros(50);

/// What it costs on this machine to release pages.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Of a page.
    pub page: Duration,
    /// Of a range, beyond its pages: the system call, and telling other processors.
    pub range: Duration,
}

impl Rate {
    /// Measures it in this process, in about 30 ms. Processors that run a thread of the process have to be told of each range: it is the mean
    /// of what it costs without such a thread and with one that runs all the time.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn measure() -> std::io::Result<Self> {
        let alone = Self::measure_alone()?;
        let is_over = AtomicBool::new(false);
        let beside = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let measured = Self::measure_alone();
            is_over.store(true, Ordering::Relaxed);
            measured
        })?;
        Ok(Self { page: (alone.page + beside.page) / 2, range: (alone.range + beside.range) / 2 })
    }

    fn measure_alone() -> std::io::Result<Self> {
        let bytes = PAGES * page_bytes() as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping of our own at an address of the kernel's choice.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        let start = start.cast::<u8>();
        // The time of a range, of those from page 0 on whose distance is `stride` pages, of `pages` each: the median of parts.
        let range_of = |stride: usize, pages: usize| {
            // SAFETY: the mapping's own bytes; volatile, so that the pages are really touched.
            (0..PAGES).for_each(|page| unsafe { start.add(page * page_bytes() as usize).write_volatile(1) });
            let firsts: Vec<usize> = (0..PAGES).step_by(stride).collect();
            let mut parts: Vec<Duration> = firsts
                .chunks(PART.min(firsts.len() / 8))
                .map(|part| {
                    let begun = Instant::now();
                    for page in part {
                        // SAFETY: pages of that mapping, which hold nothing.
                        unsafe {
                            libc::madvise(
                                start.add(page * page_bytes() as usize).cast(),
                                pages * page_bytes() as usize,
                                libc::MADV_DONTNEED,
                            )
                        };
                    }
                    begun.elapsed() / part.len() as u32
                })
                .collect();
            parts.sort_unstable();
            parts.get(parts.len() / 2).copied().unwrap_or_default()
        };
        // SAFETY: the mapping's own range. Huge pages would be another measurement.
        unsafe { libc::madvise(start.cast(), bytes, libc::MADV_NOHUGEPAGE) };
        const MANY: usize = 128;
        let (one, many) = (range_of(PAGES / RANGES, 1), range_of(MANY, MANY));
        // SAFETY: the mapping made above, which nothing uses any more.
        unsafe { libc::munmap(start.cast(), bytes) };
        let page = many.saturating_sub(one) / (MANY as u32 - 1);
        Ok(Self { page, range: one.saturating_sub(page) })
    }

    /// Of this many resident bytes in this many ranges.
    #[must_use]
    pub fn of(&self, bytes: u64, ranges: u64) -> Duration {
        let times = |one: Duration, count: u64| Duration::from_secs_f64(one.as_secs_f64() * count as f64);
        times(self.page, bytes / page_bytes()) + times(self.range, ranges)
    }
}

/// A prediction for one arena.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct ArenaStall {
    /// Address of its structure, or its number.
    pub address: u64,
    /// Threads attached to it. `None` = not read.
    pub attached_threads: Option<u64>,
    /// Resident bytes that are released of it.
    pub predicted_bytes: u64,
    /// Ranges that they lie in.
    pub ranges: u64,
    /// Seconds for which its lock is held without a break.
    pub predicted_stall_s: f64,
}

/// A prediction for a heap.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Stall {
    /// By arena, the longest first; empty where the allocator has none.
    pub arenas: Vec<ArenaStall>,
    /// The longest time for which a lock is held.
    pub longest: Duration,
    /// Of the whole call.
    pub call: Duration,
}

impl Stall {
    /// Predicts for a heap of which `bytes` are released.
    #[must_use]
    pub fn predict(heap: &HeapAccount, bytes: u64, hold: Hold, rate: &Rate) -> Self {
        let fastbins = FASTBIN_CHUNK.mul_f64(heap.fastbin_bytes.unwrap_or(0) as f64 / FASTBIN_CHUNK_BYTES as f64);
        let of_arena = |arena: &ArenaAccount| {
            let (bytes, ranges) = (arena.trimmable_bytes.unwrap_or(0), arena.trimmable_ranges.unwrap_or(0));
            // Cached bytes of an arena are thread caches and fastbins: what it has of the heap's fastbins is not known apart.
            (rate.of(bytes, ranges), bytes, ranges)
        };
        let mut arenas: Vec<ArenaStall> = heap
            .arenas
            .iter()
            .map(|arena| {
                let (whole, bytes, ranges) = of_arena(arena);
                let held = match hold {
                    Hold::Arena => whole,
                    Hold::Range => rate.of(bytes / ranges.max(1), 1),
                };
                ArenaStall {
                    address: arena.address,
                    attached_threads: arena.attached_threads,
                    predicted_bytes: bytes,
                    ranges,
                    predicted_stall_s: held.as_secs_f64(),
                }
            })
            .filter(|arena| arena.ranges > 0)
            .collect();
        arenas.sort_by(|a, b| b.predicted_stall_s.total_cmp(&a.predicted_stall_s));
        let by_arena: Duration = heap.arenas.iter().map(|arena| of_arena(arena).0).sum();
        // Without arenas, each free chunk is a range.
        let call = if arenas.is_empty() { rate.of(bytes, heap.free_chunks.unwrap_or(0)) } else { by_arena };
        let largest = rate.of(heap.largest_free_bytes.unwrap_or(bytes).min(bytes), 1);
        let longest = match (arenas.first(), hold) {
            (Some(arena), Hold::Arena) => Duration::from_secs_f64(arena.predicted_stall_s) + fastbins,
            (None, Hold::Arena) => call,
            (_, Hold::Range) => largest,
        };
        Self { arenas, longest, call: CALL + call + fastbins }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const RATE: Rate = Rate { page: Duration::from_nanos(100), range: Duration::from_nanos(1000) };

    fn arena(address: u64, bytes: u64, ranges: u64) -> ArenaAccount {
        ArenaAccount { address, trimmable_bytes: Some(bytes), trimmable_ranges: Some(ranges), ..ArenaAccount::default() }
    }

    #[test]
    fn each_arena_is_held_for_its_own_share() {
        let heap =
            HeapAccount { arenas: vec![arena(1, 4096 * 100, 10), arena(2, 4096 * 1000, 100), arena(3, 0, 0)], ..HeapAccount::default() };
        let stall = Stall::predict(&heap, 4096 * 1100, Hold::Arena, &RATE);
        assert_eq!(stall.longest, Duration::from_micros(200));
        assert_eq!(stall.call, Duration::from_micros(50 + 20 + 200));
        assert_eq!(stall.arenas.iter().map(|arena| arena.address).collect::<Vec<_>>(), [2, 1]);
    }

    #[test]
    fn a_lock_that_is_let_go_between_ranges_is_held_for_the_largest() {
        let heap = HeapAccount { arenas: vec![arena(1, 4096 * 1000, 10)], largest_free_bytes: Some(4096 * 500), ..HeapAccount::default() };
        let stall = Stall::predict(&heap, 4096 * 1000, Hold::Range, &RATE);
        assert_eq!(stall.longest, Duration::from_micros(51));
        assert_eq!(stall.call, Duration::from_micros(50 + 110));
    }

    #[test]
    fn this_machine_releases_a_page_in_less_than_a_tenth_of_a_millisecond() {
        let rate = Rate::measure().unwrap();
        assert!(rate.page > Duration::ZERO && rate.page < Duration::from_micros(100), "{rate:?}");
        assert!(rate.range < Duration::from_millis(1), "{rate:?}");
    }
}
