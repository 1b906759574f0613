//! One window: takes allocations and frees, gives a tally by stack. Pure.
//!
//! Within a window every free is seen, so for each block created at least an age before the window's end it is known whether it outlived
//! that age.
//!
//! Probes delay a process, so a window sees less work than an unwatched process does in that time. Everything is therefore measured by the
//! process's own progress: R, a thread's CPU time, minus h·c, the cost of its hits. A thread that was runnable nearly all the time would
//! have progressed by R without probes and progressed by R − h·c, so its amounts are scaled by R / (R − h·c). For a thread that sleeps in
//! between it is not known whether it only slept less, or did less work: it progressed by R − h·c either way, and in a window of length L
//! it would have done between 1 and L / (L − h·c) times what it did. The former is counted, the difference kept separately. The window's
//! own time is the sum of both kinds, R and R − h·c ([`super::estimate`]).
//!
//! Ages are likewise in the process's own time: the share of wall time spent in probes is left out.
//!
//! If hits take more than half of a thread's time, the error of their cost dominates: its amounts are marked as saturated. Each amount is
//! also computed at the lowest plausible cost of hits, for lower bounds, and with the effect of an error of the cost.

use std::collections::HashMap;
use std::hash::Hash;

use super::AGES_NS;
use super::cost::HitCosts;

/// Share of a thread's time that its hits may take for its amounts to be estimates.
pub const SATURATED: f64 = 0.5;
/// Largest factor by which a delayed thread's amounts are scaled. Beyond it they are lower bounds anyway.
const SCALE_MAX: f64 = 10.0;
/// Standard errors of the cost that a bound allows for: 95 % to one side.
const BOUND_ERRORS: f64 = 1.645;
/// Lower limit of a process's own progress in a window, as a share of what it would have been without probes.
const SPEED_MIN: f64 = 0.01;
/// Most blocks followed per window: a window has far fewer hits (20 s at 50,000 per second are a million).
const BLOCKS_MAX: usize = 4 << 20;
/// Pairs of stack and thread that are distinguished in one window.
const ROWS_MAX: usize = 1 << 18;
/// Quantities: allocated, and outlived for each age.
pub const QUANTITIES: usize = 1 + AGES_NS.len();

/// A count and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Amount {
    /// Allocations.
    pub count: f64,
    /// Bytes requested.
    pub bytes: f64,
    /// Sum of the squares of each one's part of `count`: the least variance of the count, if all are independent.
    pub count_squares: f64,
    /// The same of the bytes.
    pub squares: f64,
    /// As seen, not scaled for delayed threads.
    pub seen: Plain,
    /// At the lowest plausible cost of hits.
    pub least: Plain,
    /// What one standard error of the hits' cost adds.
    pub held: Plain,
    /// The most that threads that sleep in between may have done in addition without probes.
    pub stretch: Plain,
}

/// A count and bytes alone.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Plain {
    /// Allocations.
    pub count: f64,
    /// Bytes.
    pub bytes: f64,
}

impl Plain {
    /// Adds another one, scaled.
    pub fn add_scaled(&mut self, other: Self, factor: f64) {
        self.count += other.count * factor;
        self.bytes += other.bytes * factor;
    }
}

/// The factor by which a thread's amounts are scaled.
#[derive(Debug, Clone, Copy)]
struct Scale {
    factor: f64,
    least: f64,
    held: f64,
    stretch: f64,
    /// Whether hits took more of its time than [`SATURATED`].
    saturated: bool,
}

impl Scale {
    const NONE: Self = Self { factor: 1.0, least: 1.0, held: 0.0, stretch: 0.0, saturated: false };
}

impl Amount {
    /// A block that was seen.
    fn add(&mut self, bytes: f64) {
        self.seen.count += 1.0;
        self.seen.bytes += bytes;
        self.squares += bytes * bytes;
    }

    /// Adds what was seen of a thread, scaled.
    fn add_seen(&mut self, other: Self, scale: Scale) {
        let seen = other.seen;
        self.count += seen.count * scale.factor;
        self.count_squares += seen.count * scale.factor * scale.factor;
        self.bytes += seen.bytes * scale.factor;
        self.squares += other.squares * scale.factor * scale.factor;
        self.seen.add_scaled(seen, 1.0);
        self.least.add_scaled(seen, scale.least);
        self.held.add_scaled(seen, scale.held);
        self.stretch.add_scaled(seen, scale.stretch);
    }

    /// Adds another amount.
    pub fn add_all(&mut self, other: Self) {
        self.count += other.count;
        self.count_squares += other.count_squares;
        self.bytes += other.bytes;
        self.squares += other.squares;
        self.seen.add_scaled(other.seen, 1.0);
        self.least.add_scaled(other.least, 1.0);
        self.held.add_scaled(other.held, 1.0);
        self.stretch.add_scaled(other.stretch, 1.0);
    }
}

#[derive(Debug, Clone, Copy)]
struct Open<K> {
    stack: K,
    bytes: u64,
    born_ns: u64,
    tid: u32,
}

/// A known lifetime: of a block that was freed in the window, or is live at its end.
#[derive(Debug, Clone, Copy)]
struct Life<K> {
    stack: K,
    bytes: u64,
    tid: u32,
    age_ns: u64,
}

/// A thread's times in a window, from the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ThreadTime {
    /// Seconds that it ran.
    pub run_s: f64,
    /// Seconds that it ran or waited for a processor.
    pub ready_s: f64,
    /// How often it went to sleep by itself; `None` = not known.
    pub sleeps: Option<u64>,
}

impl ThreadTime {
    /// Whether it was runnable for all of a window. The scheduler counts a wait only once it is over, so on a busy machine a thread that
    /// never slept may seem to have been runnable for a part of the time.
    fn is_busy(&self, length_s: f64) -> bool {
        self.sleeps == Some(0) || self.ready_s >= READY_MIN * length_s
    }
}

/// What a process and its threads did in a window.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WindowTimes {
    /// Seconds that the process ran, exactly; `None` = not known.
    pub run_s: Option<f64>,
    /// Its threads, by id.
    pub threads: HashMap<u32, ThreadTime>,
}

/// A thread that was ready for less of a window than this slept in between: probes cost it sleep, not work.
const READY_MIN: f64 = 0.9;

#[derive(Debug, Clone, Copy, Default)]
struct Hits {
    allocations: u64,
    frees: u64,
}

/// What could not be counted correctly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowDoubts {
    /// Blocks or rows beyond the limits.
    pub refused: u64,
    /// Addresses allocated again without an observed free.
    pub reused_unfreed: u64,
}

/// An open window.
#[derive(Debug, Clone)]
pub struct WindowObserver<K> {
    open_ns: u64,
    blocks: HashMap<u64, Open<K>>,
    rows: HashMap<(K, u32), [Amount; QUANTITIES]>,
    threads: HashMap<u32, Hits>,
    /// Of blocks that reached the lowest age by the clock.
    lives: Vec<Life<K>>,
    /// The block that a thread's realloc freed, until it is known to have succeeded.
    reallocs: HashMap<u32, (u64, Open<K>)>,
    doubts: WindowDoubts,
}

/// The result of a window.
#[derive(Debug, Clone, PartialEq)]
pub struct Tally<K> {
    /// Its actual length in seconds.
    pub length_s: f64,
    /// CPU time that the process would have used in it without probes, in seconds.
    pub own_s: f64,
    /// The same at the least cost that the hits may have had.
    pub own_most_s: f64,
    /// CPU time that it used in it, in seconds.
    pub run_s: f64,
    /// Of that, the cost of the hits of threads that sleep in between.
    pub sleepers_hits_s: f64,
    /// Relative standard error of the hits' cost.
    pub cost_error: f64,
    /// Its own progress in the window, as a share of what that would have been.
    pub speed: f64,
    /// By stack: allocated, then outlived by age ([`AGES_NS`]); scaled for delayed threads.
    pub stacks: Vec<(K, [Amount; QUANTITIES])>,
    /// Bytes allocated, scaled.
    pub bytes: f64,
    /// Of them, those of threads whose hits took more than half of their time ([`SATURATED`]).
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
            lives: Vec::new(),
            reallocs: HashMap::new(),
            doubts: WindowDoubts::default(),
        }
    }

    /// When it opened.
    #[must_use]
    pub fn open_ns(&self) -> u64 {
        self.open_ns
    }

    /// A block that was allocated in the window and is live: its stack, its bytes, its time of allocation.
    #[must_use]
    pub fn block(&self, addr: u64) -> Option<(K, u64, u64)> {
        self.blocks.get(&addr).map(|open| (open.stack, open.bytes, open.born_ns))
    }

    /// A block was allocated.
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

    /// A block is freed.
    pub fn freed(&mut self, addr: u64, tid: u32, time_ns: u64) {
        self.threads.entry(tid).or_default().frees += 1;
        if let Some(block) = self.blocks.remove(&addr) {
            self.outlived(block, time_ns);
        }
    }

    /// A realloc frees a block, unless it fails.
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

    /// A block's lifetime is known up to `time_ns`.
    fn outlived(&mut self, block: Open<K>, time_ns: u64) {
        let age_ns = time_ns.saturating_sub(block.born_ns);
        // No block is older by the process's own time than by the clock.
        if age_ns < AGES_NS[0] {
            return;
        }
        if self.lives.len() >= BLOCKS_MAX {
            self.doubts.refused += 1;
            return;
        }
        self.lives.push(Life { stack: block.stack, bytes: block.bytes, tid: block.tid, age_ns });
    }

    /// The window is over. `costs`: of a hit of this process. `times`: what it and its threads did in it.
    #[must_use]
    pub fn close(mut self, close_ns: u64, costs: &HitCosts, times: &WindowTimes) -> Tally<K> {
        let blocks = std::mem::take(&mut self.blocks);
        let open = blocks.into_values().chain(std::mem::take(&mut self.reallocs).into_values().map(|(_, block)| block));
        for block in open.collect::<Vec<_>>() {
            self.outlived(block, close_ns);
        }
        let length_s = close_ns.saturating_sub(self.open_ns) as f64 / 1e9;
        let mut progress = Progress::new(length_s, costs, times);
        let scales: HashMap<u32, Scale> = self.threads.iter().map(|(tid, hits)| (*tid, progress.thread(*tid, *hits))).collect();
        let speed = progress.speed();
        for life in std::mem::take(&mut self.lives) {
            let age_ns = life.age_ns as f64 * speed;
            if age_ns < AGES_NS[0] as f64 {
                continue;
            }
            let Some(row) = self.row(life.stack, life.tid) else { continue };
            for (amount, _) in row[1..].iter_mut().zip(AGES_NS).filter(|(_, age)| age_ns >= *age as f64) {
                amount.add(life.bytes as f64);
            }
        }
        let mut stacks: HashMap<K, [Amount; QUANTITIES]> = HashMap::new();
        let (mut bytes, mut saturated_bytes) = (0.0, 0.0);
        for ((stack, tid), row) in &self.rows {
            let scale = scales.get(tid).copied().unwrap_or(Scale::NONE);
            let sums = stacks.entry(*stack).or_default();
            for (sum, amount) in sums.iter_mut().zip(row) {
                sum.add_seen(*amount, scale);
            }
            let scaled = row[0].seen.bytes * scale.factor;
            bytes += scaled;
            saturated_bytes += if scale.saturated { scaled } else { 0.0 };
        }
        Tally {
            length_s,
            own_s: progress.own_s(),
            own_most_s: progress.own_most_s(),
            run_s: progress.run_s,
            sleepers_hits_s: progress.sleepers_hits_s,
            cost_error: costs.error(),
            speed,
            stacks: stacks.into_iter().collect(),
            bytes,
            saturated_bytes,
            allocations: self.threads.values().map(|hits| hits.allocations).sum(),
            frees: self.threads.values().map(|hits| hits.frees).sum(),
            doubts: self.doubts,
        }
    }
}

/// A process's progress in a window, summed thread by thread.
struct Progress<'a> {
    length_s: f64,
    costs: &'a HitCosts,
    times: &'a WindowTimes,
    /// The process's running time.
    run_s: f64,
    /// Factor for a thread's time from the scheduler: it is read up to a tick late, the process's is exact.
    exact: f64,
    /// The cost of the hits of all threads, and of those that sleep in between.
    hits_s: f64,
    sleepers_hits_s: f64,
}

impl<'a> Progress<'a> {
    fn new(length_s: f64, costs: &'a HitCosts, times: &'a WindowTimes) -> Self {
        let threads_s: f64 = times.threads.values().map(|time| time.run_s).sum();
        let run_s = times.run_s.unwrap_or(if times.threads.is_empty() { length_s } else { threads_s });
        let exact = if threads_s > 0.0 { run_s / threads_s } else { 1.0 };
        Self { length_s, costs, times, run_s, exact, hits_s: 0.0, sleepers_hits_s: 0.0 }
    }

    /// A thread that was hit.
    fn thread(&mut self, tid: u32, hits: Hits) -> Scale {
        let cost_s = self.costs.seconds(hits.allocations, hits.frees);
        if cost_s <= 0.0 {
            return Scale::NONE;
        }
        self.hits_s += cost_s;
        // A thread of which nothing is known is assumed to have run all the time, as far as that is possible.
        let only = self.length_s.min(self.run_s);
        let unknown = ThreadTime { run_s: only, ready_s: self.length_s, sleeps: None };
        let alone = self.times.threads.len() <= 1;
        let time = match self.times.threads.get(&tid) {
            Some(time) if alone => ThreadTime { run_s: self.run_s, ready_s: time.ready_s - time.run_s + self.run_s, ..*time },
            Some(time) => ThreadTime { run_s: (time.run_s * self.exact).min(self.length_s), ..*time },
            None => unknown,
        };
        let scaled = |share: f64| if share >= 1.0 - 1.0 / SCALE_MAX { SCALE_MAX } else { 1.0 / (1.0 - share) };
        if !time.is_busy(self.length_s) {
            self.sleepers_hits_s += cost_s;
            let share = cost_s / self.length_s;
            return Scale { saturated: share > SATURATED, stretch: scaled(share) - 1.0, ..Scale::NONE };
        }
        let share = cost_s / time.run_s.max(1e-9);
        let at = |errors: f64| scaled((share * (1.0 + errors * self.costs.error())).max(0.0));
        let factor = at(0.0);
        Scale { factor, least: at(-BOUND_ERRORS), held: at(1.0) - factor, stretch: 0.0, saturated: share > SATURATED }
    }

    fn own_s(&self) -> f64 {
        (self.run_s - self.sleepers_hits_s).max(SPEED_MIN * self.run_s)
    }

    fn own_most_s(&self) -> f64 {
        let least_s = self.sleepers_hits_s * (1.0 - BOUND_ERRORS * self.costs.error()).max(0.0);
        (self.run_s - least_s).max(self.own_s())
    }

    fn speed(&self) -> f64 {
        let own_s = self.own_s();
        if own_s > 0.0 { ((self.run_s - self.hits_s) / own_s).clamp(SPEED_MIN, 1.0) } else { 1.0 }
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
    fn survival_is_only_known_of_blocks_allocated_early_enough() {
        let mut window = WindowObserver::new(0);
        window.allocated(0x10, 100, 1, 7, 0); // freed at 5 ms
        window.allocated(0x20, 200, 1, 7, MS); // freed at 15 ms: outlived 10 ms
        window.allocated(0x30, 400, 1, 7, 2 * MS); // never freed, 18 ms old at the end
        window.allocated(0x40, 800, 1, 7, 15 * MS); // never freed, 5 ms old: not known
        window.freed(0x10, 7, 5 * MS);
        window.freed(0x20, 8, 15 * MS);
        let row = of(&window.close(20 * MS, &FREE_OF_COST, &WindowTimes::default()), 1);
        assert_eq!((row[0].count, row[0].bytes), (4.0, 1500.0));
        let of_age = |age_ns: u64| row[1 + AGES_NS.iter().position(|age| *age == age_ns).unwrap()];
        let ten = of_age(10 * MS);
        assert_eq!((ten.count, ten.bytes, ten.squares), (2.0, 600.0, 200_000.0));
        assert_eq!(of_age(100 * MS), Amount::default());
    }

    #[test]
    fn an_address_used_again_is_another_block() {
        let mut window = WindowObserver::new(0);
        for i in 0..100u64 {
            window.allocated(0x10, 8, 1, 7, i * MS);
            window.freed(0x10, 7, i * MS + 1);
        }
        let row = of(&window.close(200 * MS, &FREE_OF_COST, &WindowTimes::default()), 1);
        assert!(row[0].count == 100.0 && row[1..].iter().all(|row| row.count == 0.0), "{row:?}");
    }

    #[test]
    fn a_realloc_that_fails_leaves_its_block_alive() {
        let mut window = WindowObserver::new(0);
        window.allocated(0x10, 8, 1, 7, 0);
        window.realloc_freed(0x10, 7);
        window.realloc_failed(7);
        assert_eq!(of(&window.close(20 * MS, &FREE_OF_COST, &WindowTimes::default()), 1)[1].count, 1.0);
    }

    const COSTS: HitCosts = HitCosts { allocation_ns: 1_000.0, free_ns: 0.0, spread: 0.0, traps: None, step_ns: 0.0 };

    fn times(run_s: f64, threads: &[(u32, f64, f64)]) -> WindowTimes {
        let threads =
            threads.iter().map(|(tid, run_s, ready_s)| (*tid, ThreadTime { run_s: *run_s, ready_s: *ready_s, sleeps: None })).collect();
        WindowTimes { run_s: Some(run_s), threads }
    }

    #[test]
    fn delayed_threads_are_scaled_and_saturated_ones_are_marked() {
        let mut window = WindowObserver::new(0);
        for i in 0..4_000u64 {
            window.allocated(i * 16, 1, 1, 1, 0); // four tenths of 10 ms
        }
        for i in 0..7_500u64 {
            window.allocated((1 << 32) + i * 16, 1, 2, 2, 0); // three quarters
        }
        let tally = window.close(10 * MS, &COSTS, &times(0.02, &[(1, 0.01, 0.01), (2, 0.01, 0.01)]));
        let (one, two) = (of(&tally, 1)[0], of(&tally, 2)[0]);
        assert!((one.count - 4_000.0 / 0.6).abs() < 1.0 && (two.count - 30_000.0).abs() < 1.0, "{one:?} {two:?}");
        assert_eq!((one.seen.count, two.seen.count), (4_000.0, 7_500.0));
        // The cost may be a tenth more, or 0.1645 less.
        assert!((one.held.count - (4_000.0 / 0.56 - 4_000.0 / 0.6)).abs() < 1.0, "{one:?}");
        assert!((one.least.count - 4_000.0 / (1.0 - 0.4 * 0.8355)).abs() < 1.0, "{one:?}");
        assert!((tally.saturated_bytes / tally.bytes - 30_000.0 / (30_000.0 + 4_000.0 / 0.6)).abs() < 1e-3);
        assert!((tally.own_s - 0.02).abs() < 1e-9 && (tally.speed - 8.5 / 20.0).abs() < 1e-6, "{tally:?}");
    }

    #[test]
    fn a_thread_that_sleeps_in_between_is_not_scaled_and_made_full_progress() {
        let mut window = WindowObserver::new(0);
        for i in 0..2_000u64 {
            window.allocated(i * 16, 1, 1, 1, 0);
        }
        // Two fifths of its running time was hits, and it slept for a third of the time.
        let tally = window.close(10 * MS, &COSTS, &times(0.005, &[(1, 0.005, 0.0066)]));
        let amount = of(&tally, 1)[0];
        // If it starts again as soon as its work is done, it would have done a quarter more.
        assert!(amount.count == 2_000.0 && (amount.stretch.count - 500.0).abs() < 1e-6, "{amount:?}");
        assert!((tally.own_s - 0.003).abs() < 1e-9 && (tally.speed - 1.0).abs() < 1e-9, "{tally:?}");
    }

    #[test]
    fn a_thread_that_never_slept_was_delayed_however_long_it_waited() {
        let mut window = WindowObserver::new(0);
        for i in 0..1_000u64 {
            window.allocated(i * 16, 1, 1, 1, 0);
        }
        let mut times = times(0.002, &[(1, 0.002, 0.002)]);
        times.threads.entry(1).and_modify(|time| time.sleeps = Some(0));
        assert!((of(&window.close(10 * MS, &COSTS, &times), 1)[0].count - 2_000.0).abs() < 1e-6);
    }

    #[test]
    fn ages_leave_out_the_time_spent_in_probes() {
        let mut window = WindowObserver::new(0);
        for i in 0..50_000u64 {
            window.allocated((1 << 32) + i * 16, 1, 2, 1, 99 * MS);
        }
        window.allocated(0x10, 100, 1, 1, 0); // 15 ms by the clock
        window.allocated(0x20, 200, 1, 1, 0); // 25
        window.freed(0x10, 1, 15 * MS);
        window.freed(0x20, 1, 25 * MS);
        // Half of the time was hits.
        let tally = window.close(100 * MS, &COSTS, &times(0.1, &[(1, 0.1, 0.1)]));
        let row = of(&tally, 1);
        let of_age = |age_ns: u64| row[1 + AGES_NS.iter().position(|age| *age == age_ns).unwrap()].seen.bytes;
        assert_eq!((of_age(3 * MS), of_age(10 * MS)), (300.0, 200.0));
    }
}
