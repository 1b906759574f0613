//! What one window saw: allocations and frees in, a tally by stack out. Pure.
//!
//! Inside a window every free is seen, so whether a block outlived an age is known of each block that was born at least that long
//! before the window's end. Ages are those of the wall clock: while probes are in, a thread that allocates much gets less of its own
//! work done in that time.
//!
//! A thread that was held up makes fewer allocations in the window than it would have, if it had work all the time: one that sleeps
//! between its work only sleeps less. Of the time that a busy thread ran, its hits took their cost and the rest is its own, so what it
//! allocated is scaled by time / own time, up to [`DILATION_MAX`]; beyond that the cost is not known well enough, and the sums are lower
//! bounds, counted as such.

use std::collections::HashMap;
use std::hash::Hash;

use super::AGES_NS;
use super::cost::HitCosts;

/// Largest factor by which a held-up thread's allocations are scaled: at 5, four fifths of its time were hits, and an error of a tenth
/// in the cost of a hit is one of two fifths in the factor.
pub const DILATION_MAX: f64 = 5.0;
/// Blocks of a window that are followed: a window's hits are far fewer (20 s at 50,000 a second are a million).
const BLOCKS_MAX: usize = 4 << 20;
/// Pairs of stack and thread that are told apart in one window.
const ROWS_MAX: usize = 1 << 18;
/// Quantities: allocated, and outlived for each age.
pub const QUANTITIES: usize = 1 + AGES_NS.len();

/// A count and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Amount {
    /// Allocations.
    pub count: f64,
    /// Bytes asked for.
    pub bytes: f64,
    /// Sum of the squares of each one's part of `count`: what the count's variance would be at least, did each come by chance alone.
    pub count_squares: f64,
    /// The same of the bytes.
    pub squares: f64,
}

impl Amount {
    fn add(&mut self, bytes: f64) {
        self.count += 1.0;
        self.count_squares += 1.0;
        self.bytes += bytes;
        self.squares += bytes * bytes;
    }

    /// Adds another amount, scaled.
    pub fn add_scaled(&mut self, other: Self, factor: f64) {
        self.count += other.count * factor;
        self.count_squares += other.count_squares * factor * factor;
        self.bytes += other.bytes * factor;
        self.squares += other.squares * factor * factor;
    }
}

#[derive(Debug, Clone, Copy)]
struct Open<K> {
    stack: K,
    bytes: u64,
    born_ns: u64,
    tid: u32,
}

/// What a thread did in a window, as the scheduler says.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ThreadTime {
    /// Seconds that it ran.
    pub run_s: f64,
    /// Seconds that it ran or waited for a processor.
    pub ready_s: f64,
}

/// A thread that was ready for less of a window than this slept in between: probes cost it sleep, not work.
const READY_MIN: f64 = 0.9;

#[derive(Debug, Clone, Copy, Default)]
struct Hits {
    allocations: u64,
    frees: u64,
}

/// What was not counted as it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowDoubts {
    /// Blocks or rows beyond the limits.
    pub refused: u64,
    /// Addresses handed out again without a free that was seen.
    pub reused_unfreed: u64,
}

/// An open window.
#[derive(Debug, Clone)]
pub struct WindowObserver<K> {
    open_ns: u64,
    blocks: HashMap<u64, Open<K>>,
    rows: HashMap<(K, u32), [Amount; QUANTITIES]>,
    threads: HashMap<u32, Hits>,
    /// What a thread's realloc gave up, until it is known to have succeeded.
    reallocs: HashMap<u32, (u64, Open<K>)>,
    doubts: WindowDoubts,
}

/// What a window saw.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally<K> {
    /// Its length in seconds, as it really was.
    pub length_s: f64,
    /// By stack: allocated, then outlived by age ([`AGES_NS`]); scaled for held-up threads.
    pub stacks: Vec<(K, [Amount; QUANTITIES])>,
    /// Bytes seen, unscaled.
    pub seen_bytes: f64,
    /// Of them, those of threads held up beyond [`DILATION_MAX`]: their sums are lower bounds.
    pub saturated_bytes: f64,
    /// Allocations seen.
    pub allocations: u64,
    /// Frees seen.
    pub frees: u64,
    /// What was not counted.
    pub doubts: WindowDoubts,
}

impl<K: Copy + Eq + Hash> WindowObserver<K> {
    /// A window that opens now (CLOCK_MONOTONIC ns).
    #[must_use]
    pub fn new(open_ns: u64) -> Self {
        Self {
            open_ns,
            blocks: HashMap::new(),
            rows: HashMap::new(),
            threads: HashMap::new(),
            reallocs: HashMap::new(),
            doubts: WindowDoubts::default(),
        }
    }

    /// When it opened.
    #[must_use]
    pub fn open_ns(&self) -> u64 {
        self.open_ns
    }

    /// A block that was handed out in the window and lives: its stack, its bytes, when it was born.
    #[must_use]
    pub fn block(&self, addr: u64) -> Option<(K, u64, u64)> {
        self.blocks.get(&addr).map(|open| (open.stack, open.bytes, open.born_ns))
    }

    /// A block was handed out.
    pub fn allocated(&mut self, addr: u64, bytes: u64, stack: K, tid: u32, time_ns: u64) {
        self.threads.entry(tid).or_default().allocations += 1;
        self.reallocs.remove(&tid);
        // A call that began before the window opened may return in it: its free would be seen as well.
        if let Some(row) = self.row(stack, tid) {
            row[0].add(bytes as f64);
        } else {
            self.doubts.refused += 1;
            return;
        }
        if self.blocks.len() >= BLOCKS_MAX {
            self.doubts.refused += 1;
            return;
        }
        let open = Open { stack, bytes, born_ns: time_ns.max(self.open_ns), tid };
        if let Some(before) = self.blocks.insert(addr, open) {
            self.doubts.reused_unfreed += 1;
            self.outlived(before, time_ns);
        }
    }

    /// A block is taken back.
    pub fn freed(&mut self, addr: u64, tid: u32, time_ns: u64) {
        self.threads.entry(tid).or_default().frees += 1;
        if let Some(block) = self.blocks.remove(&addr) {
            self.outlived(block, time_ns);
        }
    }

    /// A realloc gives a block up, unless it fails.
    pub fn realloc_freed(&mut self, addr: u64, tid: u32) {
        if let Some(block) = self.blocks.remove(&addr) {
            self.reallocs.insert(tid, (addr, block));
        }
    }

    /// The thread's realloc failed.
    pub fn realloc_failed(&mut self, tid: u32) {
        if let Some((addr, block)) = self.reallocs.remove(&tid) {
            self.blocks.insert(addr, block);
        }
    }

    fn row(&mut self, stack: K, tid: u32) -> Option<&mut [Amount; QUANTITIES]> {
        if self.rows.len() >= ROWS_MAX && !self.rows.contains_key(&(stack, tid)) {
            return None;
        }
        Some(self.rows.entry((stack, tid)).or_default())
    }

    /// A block's life is known up to `time_ns`.
    fn outlived(&mut self, block: Open<K>, time_ns: u64) {
        let age_ns = time_ns.saturating_sub(block.born_ns);
        if age_ns < AGES_NS[0] {
            return;
        }
        if let Some(row) = self.row(block.stack, block.tid) {
            for (amount, _) in row[1..].iter_mut().zip(AGES_NS).filter(|(_, age)| age_ns >= *age) {
                amount.add(block.bytes as f64);
            }
        }
    }

    /// The window is over. `time_of`: what a thread did in it; a thread of which that is not known is taken to have run all the time.
    #[must_use]
    pub fn close(mut self, close_ns: u64, costs: &HitCosts, time_of: impl Fn(u32) -> Option<ThreadTime>) -> Tally<K> {
        let blocks = std::mem::take(&mut self.blocks);
        let open = blocks.into_values().chain(std::mem::take(&mut self.reallocs).into_values().map(|(_, block)| block));
        for block in open.collect::<Vec<_>>() {
            self.outlived(block, close_ns);
        }
        let length_s = close_ns.saturating_sub(self.open_ns) as f64 / 1e9;
        let dilation = |tid: u32| {
            let hits = self.threads.get(&tid).copied().unwrap_or_default();
            let time = time_of(tid).unwrap_or(ThreadTime { run_s: length_s, ready_s: length_s });
            if time.ready_s < READY_MIN * length_s {
                return (1.0, false);
            }
            let held_up = costs.seconds(hits.allocations, hits.frees) / length_s.min(time.run_s).max(1e-9);
            if held_up >= 1.0 - 1.0 / DILATION_MAX { (DILATION_MAX, true) } else { (1.0 / (1.0 - held_up), false) }
        };
        let mut stacks: HashMap<K, [Amount; QUANTITIES]> = HashMap::new();
        let (mut seen_bytes, mut saturated_bytes) = (0.0, 0.0);
        for ((stack, tid), row) in &self.rows {
            let (factor, saturated) = dilation(*tid);
            seen_bytes += row[0].bytes;
            if saturated {
                saturated_bytes += row[0].bytes;
            }
            let sums = stacks.entry(*stack).or_default();
            for (sum, amount) in sums.iter_mut().zip(row) {
                sum.add_scaled(*amount, factor);
            }
        }
        Tally {
            length_s,
            stacks: stacks.into_iter().collect(),
            seen_bytes,
            saturated_bytes,
            allocations: self.threads.values().map(|hits| hits.allocations).sum(),
            frees: self.threads.values().map(|hits| hits.frees).sum(),
            doubts: self.doubts,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const FREE_OF_COST: HitCosts = HitCosts::FREE;
    const MS: u64 = 1_000_000;

    fn of(tally: &Tally<u32>, stack: u32) -> [Amount; QUANTITIES] {
        tally.stacks.iter().find(|(key, _)| *key == stack).map(|(_, row)| *row).unwrap_or_default()
    }

    #[test]
    fn who_outlived_an_age_is_told_only_of_those_born_early_enough() {
        let mut window = WindowObserver::new(0);
        window.allocated(0x10, 100, 1, 7, 0); // freed at 5 ms
        window.allocated(0x20, 200, 1, 7, MS); // freed at 15 ms: outlived 10 ms
        window.allocated(0x30, 400, 1, 7, 2 * MS); // never freed, 18 ms old at the end
        window.allocated(0x40, 800, 1, 7, 15 * MS); // never freed, 5 ms old: nobody knows
        window.freed(0x10, 7, 5 * MS);
        window.freed(0x20, 8, 15 * MS);
        let row = of(&window.close(20 * MS, &FREE_OF_COST, |_| None), 1);
        assert_eq!((row[0].count, row[0].bytes), (4.0, 1500.0));
        assert_eq!((row[1].count, row[1].bytes, row[1].squares), (2.0, 600.0, 200_000.0));
        assert_eq!(row[2], Amount::default());
    }

    #[test]
    fn an_address_used_again_is_another_block() {
        let mut window = WindowObserver::new(0);
        for i in 0..100u64 {
            window.allocated(0x10, 8, 1, 7, i * MS);
            window.freed(0x10, 7, i * MS + 1);
        }
        let row = of(&window.close(200 * MS, &FREE_OF_COST, |_| None), 1);
        assert_eq!((row[0].count, row[1].count, row[2].count), (100.0, 0.0, 0.0));
    }

    #[test]
    fn a_realloc_that_fails_leaves_its_block_alive() {
        let mut window = WindowObserver::new(0);
        window.allocated(0x10, 8, 1, 7, 0);
        window.realloc_freed(0x10, 7);
        window.realloc_failed(7);
        assert_eq!(of(&window.close(20 * MS, &FREE_OF_COST, |_| None), 1)[1].count, 1.0);
    }

    #[test]
    fn a_thread_that_was_held_up_is_scaled_and_one_that_stood_still_is_a_lower_bound() {
        let costs = HitCosts { allocation_ns: 1_000.0, free_ns: 0.0, spread: 0.0 };
        let mut window = WindowObserver::new(0);
        for i in 0..5_000u64 {
            window.allocated(i * 16, 1, 1, 1, 0); // half of 10 ms
        }
        for i in 0..9_900u64 {
            window.allocated((1 << 32) + i * 16, 1, 2, 2, 0); // 99 %
        }
        let tally = window.close(10 * MS, &costs, |_| None);
        assert!((of(&tally, 1)[0].count - 10_000.0).abs() < 1.0);
        assert!((of(&tally, 2)[0].count - 9_900.0 * DILATION_MAX).abs() < 1.0);
        assert_eq!((tally.seen_bytes, tally.saturated_bytes), (14_900.0, 9_900.0));
    }

    #[test]
    fn a_thread_that_sleeps_between_its_work_is_not_scaled() {
        let costs = HitCosts { allocation_ns: 1_000.0, free_ns: 0.0, spread: 0.0 };
        let mut window = WindowObserver::new(0);
        for i in 0..5_000u64 {
            window.allocated(i * 16, 1, 1, 1, 0);
        }
        // Nearly all that it ran was hits, but it slept for a third of the time.
        let time = ThreadTime { run_s: 0.0055, ready_s: 0.0066 };
        assert_eq!(of(&window.close(10 * MS, &costs, |_| Some(time)), 1)[0].count, 5_000.0);
    }
}
