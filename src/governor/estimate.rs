//! From windows to amounts by stack, with standard errors. Pure.
//!
//! Window i represents P seconds of wall time, its cycle. Of it `e = length − age / speed` seconds can show which blocks outlived an age.
//! With `x` the bytes of a stack that did, scaled for delayed threads, its rate is estimated by the mean of `y = x / (e·u)` weighted by `w
//! = P·u`:
//!
//! ```text
//! rate   = Σ w·y / Σ w
//! var    = n/(n−1) · Σ w²·(y − rate)² / (Σ w)²           n = (Σ w)² / Σ w², the effective number of windows
//! chance = Σ w²·Σb²/(e·u)² / (Σ w)²                      the least that var can be: if each block were independent of the others
//! one    = what one more event would add to the rate
//! spread = sqrt( max(var, chance + 0.96·one²) ) + 0.98·one
//! held   = what one standard error of the hits' cost adds to the rate: by the scale, and for survivors also by the age itself,
//!          |rate at the age before − rate| / ln(age / age before) · the scale's relative error
//! stderr = sqrt( (spread·t(n−1) / 1.96)² + held² )
//! ```
//!
//! There are two measures of time ([`Measure`]). By the process's own running time, u is the CPU time that it would have used in the window
//! without probes ([`Tally::own_s`]), divided by the window's length; the amount is the rate times its own running time over the recording,
//! which is known. That is right however probes change what it does, but the own time of threads that sleep in between is what they ran
//! less the cost of their hits, so the cost's error is in the rate. By the clock, u is 1; such threads then did at least what was seen, and
//! at most `stretch` more. The measure with the smaller error is used, for the whole process.
//!
//! The terms with `one` are those of the score interval of a count, n + 1.92 ± 1.96·sqrt(n + 0.96), centred on n itself with the same upper
//! end: with two blocks seen, five more may have been missed. For many blocks they are negligible. `one` is the larger of the mean block's
//! part, chance / rate, and of the windows' third moment, |Σ w³·(y − rate)³| / Σ w²·(y − rate)² / Σ w: if a burst survives as a whole, the
//! event is the burst. For a stack that allocated, but of which nothing outlived the age, `one` is one of its blocks in one of the windows.
//!
//! The window is the unit, so that correlated events (bursts, threads, one request's allocations) do not count as independent. A window
//! closed early by its quota observed busy moments for a shorter time than quiet ones, which no correction of its length can undo. Its
//! class is then left out, for all of the target's windows of that class, and counted: the shorter classes, which have no quota, give the
//! estimate. Time traced in full is known, not estimated, and adds no error.
//!
//! If more than [`SATURATED_MAX`] of the bytes came from threads that spent more than half of their time in hits, or if there are too few
//! windows, all amounts are lower bounds: the lower end of a one-sided 95 % interval, at the lowest plausible cost of hits, and never less
//! than what was seen.

use std::collections::HashMap;
use std::hash::Hash;

use super::AGES_NS;
use super::observer::{Amount, Plain, QUANTITIES, Tally};
use super::schedule::WindowClass;

/// Stacks kept of one target. Beyond it their sums go into one row (`others`).
pub const STACKS_MAX: usize = 1 << 14;
const CLASSES: usize = WindowClass::ALL.len();

/// Share of the bytes that may come from saturated threads for amounts to be estimates.
pub const SATURATED_MAX: f64 = 0.1;
/// Minimum number of effective windows for estimating an error.
const WINDOWS_MIN: f64 = 1.05;

/// An amount: its estimate with an error, and its lower bound.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Quantity {
    /// Estimated.
    pub value: f64,
    /// Its standard error, such that 1.96 of them make the 95 % interval.
    pub stderr: f64,
    /// Lower bound that holds in 95 of 100 recordings.
    pub least: f64,
}

/// Allocations and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Allocations.
    pub count: Quantity,
    /// Bytes.
    pub bytes: Quantity,
}

/// Allocated, then outlived by age ([`AGES_NS`]); `None` where no window was long enough.
pub type Amounts = [Option<Estimate>; QUANTITIES];

/// The estimate for a stack, over the time watched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StackEstimate<K> {
    /// The stack; `None` = those beyond [`STACKS_MAX`].
    pub stack: Option<K>,
    /// The amounts.
    pub amounts: Amounts,
}

/// The estimate for a process, over the time watched.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimates<K> {
    /// By stack, in no order.
    pub stacks: Vec<StackEstimate<K>>,
    /// For all stacks together: correlated errors do not cancel out.
    pub total: Amounts,
    /// Why all amounts are lower bounds; `None` = they are estimates.
    pub bound: Option<Bound>,
}

/// The measure of time of which a window is a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    /// The process's own running time.
    Own = 0,
    /// Time by the clock.
    Clock,
}

const MEASURES: usize = 2;

/// Why amounts are only lower bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Probes took more than half of the running time of the threads that allocate.
    Saturated,
    /// The process ran in no window, or in a single one.
    TooFew,
    /// It ran in windows, but hardly ever allocated in them: bursts outside the windows are unknown.
    Unmet,
}

impl Bound {
    /// In words, as a clause.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Saturated => "probes took more than half of the running time of the threads that allocate",
            Self::TooFew => "the process ran in fewer than two windows",
            Self::Unmet => "it allocated in fewer than four windows",
        }
    }
}

/// A window's weights in each measure, and what turns x into w·y, which is the same in both: P / e.
#[derive(Debug, Clone, Copy)]
struct Weighing {
    weights_s: [f64; MEASURES],
    per_s: f64,
}

/// The sums from which the mean and the variance of a rate follow, of y = x / (e·u) for x a count or bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Moments {
    /// Σ w·y
    first: f64,
    /// Σ w²·y
    cross: [f64; MEASURES],
    /// Σ w²·y²
    second: f64,
    /// Σ w²·Σb²/(e·u)², for b the part of each event
    chance: f64,
}

impl Moments {
    fn add_window(&mut self, weighing: Weighing, x: f64, squares: f64) {
        let weighed = weighing.per_s * x;
        self.first += weighed;
        for (cross, weight_s) in self.cross.iter_mut().zip(weighing.weights_s) {
            *cross += weight_s * weighed;
        }
        self.second += weighed * weighed;
        self.chance += weighing.per_s * weighing.per_s * squares;
    }

    fn add(&mut self, other: &Self) {
        self.first += other.first;
        for (cross, more) in self.cross.iter_mut().zip(other.cross) {
            *cross += more;
        }
        self.second += other.second;
        self.chance += other.chance;
    }
}

/// Sums of one quantity of one stack over the windows of a class.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    count: Moments,
    bytes: Moments,
    /// Σ w³·y, Σ w³·y², Σ w³·y³ of the bytes, in each measure
    cubes: [[f64; 3]; MEASURES],
    /// Σ w·y at the least cost of hits, of what an error of the cost adds, and of what sleeping threads may have done more.
    least: Plain,
    held: Plain,
    stretch: Plain,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.least.add_scaled(other.least, 1.0);
        self.held.add_scaled(other.held, 1.0);
        self.stretch.add_scaled(other.stretch, 1.0);
        self.count.add(&other.count);
        self.bytes.add(&other.bytes);
        for (sum, more) in self.cubes.iter_mut().flatten().zip(other.cubes.into_iter().flatten()) {
            *sum += more;
        }
    }
}

/// The windows of one class that give data on one quantity.
#[derive(Debug, Clone, Copy, Default)]
struct Weights {
    windows: u64,
    /// Σ w
    first: f64,
    /// Σ w²
    second: f64,
    /// Σ w³
    third: f64,
    /// Σ e·u
    eligible_s: f64,
    /// Σ w at the least cost of hits.
    most: f64,
}

impl Weights {
    fn add(&mut self, other: &Self) {
        self.windows += other.windows;
        self.first += other.first;
        self.second += other.second;
        self.third += other.third;
        self.eligible_s += other.eligible_s;
        self.most += other.most;
    }

    fn effective(&self) -> f64 {
        if self.second > 0.0 { self.first * self.first / self.second } else { 0.0 }
    }
}

#[derive(Debug, Clone, Default)]
struct StackSums {
    classes: Vec<(WindowClass, [Sums; QUANTITIES])>,
    /// All that windows saw it allocate.
    allocated: Amount,
    /// All that windows saw.
    seen: [Plain; QUANTITIES],
    /// Of the time traced in full.
    full: [Plain; QUANTITIES],
}

impl StackSums {
    fn add_window(&mut self, class: WindowClass, weighing: &[Option<Weighing>; QUANTITIES], row: &[Amount; QUANTITIES]) {
        self.allocated.add_all(row[0]);
        for (seen, amount) in self.seen.iter_mut().zip(row) {
            seen.add_scaled(amount.seen, 1.0);
        }
        let place = match self.classes.iter().position(|(of, _)| *of == class) {
            Some(place) => place,
            None => {
                self.classes.push((class, Default::default()));
                self.classes.len() - 1
            }
        };
        for ((sum, amount), weighing) in self.classes[place].1.iter_mut().zip(row).zip(weighing) {
            let Some(weighing) = *weighing else { continue };
            sum.count.add_window(weighing, amount.count, amount.count_squares);
            sum.bytes.add_window(weighing, amount.bytes, amount.squares);
            let weighed = weighing.per_s * amount.bytes;
            for (cubes, weight_s) in sum.cubes.iter_mut().zip(weighing.weights_s) {
                cubes[0] += weight_s * weight_s * weighed;
                cubes[1] += weight_s * weighed * weighed;
                cubes[2] += weighed * weighed * weighed;
            }
            sum.least.add_scaled(amount.least, weighing.per_s);
            sum.held.add_scaled(amount.held, weighing.per_s);
            sum.stretch.add_scaled(amount.stretch, weighing.per_s);
        }
    }
}

/// Counts of windows, for reports and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WindowCounts {
    /// Windows by class.
    pub windows: [u64; CLASSES],
    /// Of them, those that their quota closed early.
    pub closed_early: [u64; CLASSES],
    /// Windows by class in which it allocated.
    pub busy: [u64; CLASSES],
    /// Windows left out because records were lost in them.
    pub lossy: u64,
    /// Seconds that windows were open.
    pub open_s: f64,
    /// Seconds traced in full.
    pub full_s: f64,
    /// Allocations seen.
    pub allocations: u64,
    /// Bytes allocated in windows, scaled for delayed threads.
    pub bytes: f64,
    /// Of them, those of threads whose hits took more than half of their time.
    pub saturated_bytes: f64,
    /// Blocks or rows beyond the observer's limits.
    pub refused: u64,
}

/// Gathers the windows of one target.
#[derive(Debug, Clone)]
pub struct Estimator<K> {
    stacks: HashMap<K, StackSums>,
    others: StackSums,
    total: StackSums,
    stacks_refused: u64,
    weights: [[[Weights; QUANTITIES]; CLASSES]; MEASURES],
    /// Σ e of the time traced in full.
    full_eligible_s: [f64; QUANTITIES],
    counts: WindowCounts,
    sleepers: Sleepers,
}

/// Windows' figures of threads that sleep in between, each a sum of P times a share of the window.
#[derive(Debug, Clone, Copy, Default)]
struct Sleepers {
    hits: f64,
    run: f64,
    /// Of the hits' cost.
    error: f64,
}

impl<K: Copy + Eq + Hash> Default for Estimator<K> {
    fn default() -> Self {
        Self {
            stacks: HashMap::new(),
            others: StackSums::default(),
            total: StackSums::default(),
            stacks_refused: 0,
            weights: Default::default(),
            full_eligible_s: [0.0; QUANTITIES],
            counts: WindowCounts::default(),
            sleepers: Sleepers::default(),
        }
    }
}

/// Windows that must have seen the process allocate: with fewer, neither a mean nor its error is meaningful.
const BUSY_WINDOWS_MIN: u64 = 4;
/// Own running time that need not be covered by windows: a moment between two full traces.
const OWN_MIN_S: f64 = 1e-3;
/// Shortest eligible part of a window, as a share of its length: with less, a short delay would determine the result.
const ELIGIBLE_MIN: f64 = 0.1;

/// Seconds of a window that give data on a quantity. `speed`: own progress per second of the clock; ages are in own progress.
fn eligible_s(length_s: f64, quantity: usize, speed: f64) -> Option<f64> {
    let age_s = quantity.checked_sub(1).and_then(|age| AGES_NS.get(age)).map_or(0.0, |age| *age as f64 / 1e9);
    let eligible_s = length_s - age_s / speed.max(1e-6);
    (eligible_s > 0.0 && eligible_s >= ELIGIBLE_MIN * length_s).then_some(eligible_s)
}

impl<K: Copy + Eq + Hash> Estimator<K> {
    /// A window that stands for `period_s`.
    pub fn window(&mut self, class: WindowClass, period_s: f64, closed_early: bool, tally: &Tally<K>) {
        self.count(tally);
        self.counts.windows[class as usize] += 1;
        self.counts.closed_early[class as usize] += u64::from(closed_early);
        self.counts.busy[class as usize] += u64::from(tally.allocations > 0);
        self.counts.open_s += tally.length_s;
        self.counts.bytes += tally.bytes;
        self.counts.saturated_bytes += tally.saturated_bytes;
        let length_s = tally.length_s.max(1e-9);
        let shares = [(tally.own_s / length_s, tally.own_most_s / length_s), (1.0, 1.0)];
        self.sleepers.hits += period_s * tally.sleepers_hits_s / length_s;
        self.sleepers.run += period_s * tally.run_s / length_s;
        self.sleepers.error = self.sleepers.error.max(tally.cost_error);
        let eligible: [Option<f64>; QUANTITIES] = std::array::from_fn(|quantity| eligible_s(tally.length_s, quantity, tally.speed));
        for (weights, (share, most)) in self.weights.iter_mut().zip(shares) {
            let weight_s = period_s * share;
            for (weights, eligible_s) in weights[class as usize].iter_mut().zip(eligible) {
                let Some(eligible_s) = eligible_s else { continue };
                // A window in which the process never ran gives no data on its own time.
                weights.windows += u64::from(share > 0.0);
                weights.first += weight_s;
                weights.second += weight_s * weight_s;
                weights.third += weight_s * weight_s * weight_s;
                weights.eligible_s += eligible_s * share;
                weights.most += period_s * most;
            }
        }
        let weights_s = shares.map(|(share, _)| period_s * share);
        let weighing = eligible.map(|eligible_s| eligible_s.map(|eligible_s| Weighing { weights_s, per_s: period_s / eligible_s }));
        let mut total = [Amount::default(); QUANTITIES];
        for (stack, row) in &tally.stacks {
            for (sum, amount) in total.iter_mut().zip(row) {
                sum.add_all(*amount);
            }
            self.stack(*stack).add_window(class, &weighing, row);
        }
        self.total.add_window(class, &weighing, &total);
    }

    /// A piece of time that was traced in full.
    pub fn full(&mut self, tally: &Tally<K>) {
        self.count(tally);
        self.counts.full_s += tally.length_s;
        for (sum, quantity) in self.full_eligible_s.iter_mut().zip(0..) {
            *sum += eligible_s(tally.length_s, quantity, 1.0).unwrap_or(0.0);
        }
        for (stack, row) in &tally.stacks {
            for (quantity, amount) in row.iter().enumerate() {
                self.stack(*stack).full[quantity].add_scaled(amount.seen, 1.0);
                self.total.full[quantity].add_scaled(amount.seen, 1.0);
            }
        }
    }

    /// A window that is left out because records of it were lost.
    pub fn lossy(&mut self) {
        self.counts.lossy += 1;
    }

    fn count(&mut self, tally: &Tally<K>) {
        self.counts.allocations += tally.allocations;
        self.counts.refused += tally.doubts.refused;
    }

    fn stack(&mut self, stack: K) -> &mut StackSums {
        if self.stacks.len() >= STACKS_MAX && !self.stacks.contains_key(&stack) {
            self.stacks_refused += 1;
            return &mut self.others;
        }
        self.stacks.entry(stack).or_default()
    }

    /// What was counted.
    #[must_use]
    pub fn counts(&self) -> &WindowCounts {
        &self.counts
    }

    /// Rows that went into `others`.
    #[must_use]
    pub fn stacks_refused(&self) -> u64 {
        self.stacks_refused
    }

    /// Windows that give data on an age (0 = on allocations, from 1 on [`AGES_NS`]), as a number of windows of equal weight, from which
    /// the degrees of freedom follow.
    #[must_use]
    pub fn effective_windows(&self, quantity: usize) -> f64 {
        self.weights(self.measure(), quantity.min(QUANTITIES - 1)).effective()
    }

    /// Share of the bytes in windows that came from threads whose hits took more than half of their time.
    #[must_use]
    pub fn saturated_ratio(&self) -> f64 {
        if self.counts.bytes > 0.0 { self.counts.saturated_bytes / self.counts.bytes } else { 0.0 }
    }

    fn weights(&self, measure: Measure, quantity: usize) -> Weights {
        let mut sum = Weights::default();
        for class in self.usable() {
            sum.add(&self.weights[measure as usize][class as usize][quantity]);
        }
        sum
    }

    /// The measure with the smaller error.
    fn measure(&self) -> Measure {
        let Sleepers { hits, run, error } = self.sleepers;
        if hits <= 0.0 {
            return Measure::Own;
        }
        let sums = self.sums(&self.total, 0);
        let by_own = error * hits / (run - hits).max(1e-3 * run);
        let by_clock = stretch_error(sums.stretch.bytes) / sums.bytes.first.max(1e-9);
        if by_clock < by_own { Measure::Clock } else { Measure::Own }
    }

    fn sums(&self, stack: &StackSums, quantity: usize) -> Sums {
        let mut sums = Sums::default();
        for (_, of) in stack.classes.iter().filter(|(class, _)| self.counts.closed_early[*class as usize] == 0) {
            sums.add(&of[quantity]);
        }
        sums
    }

    /// Classes of which no window was closed early.
    fn usable(&self) -> impl Iterator<Item = WindowClass> + '_ {
        WindowClass::ALL.into_iter().filter(|class| self.counts.closed_early[*class as usize] == 0)
    }

    /// The estimates. `time`: of the process while it was not traced in full; the windows' rates are multiplied by it.
    #[must_use]
    pub fn estimates(&self, time: Watched) -> Estimates<K> {
        let measure = self.measure();
        let weights: [Weights; QUANTITIES] = std::array::from_fn(|quantity| self.weights(measure, quantity));
        let of = |sums: &StackSums| std::array::from_fn(|quantity| self.estimate(sums, &weights[quantity], measure, quantity, time));
        let named = self.stacks.iter().map(|(stack, sums)| (Some(*stack), sums));
        let others = (self.stacks_refused > 0).then_some((None, &self.others));
        let stacks = named.chain(others).map(|(stack, sums)| StackEstimate { stack, amounts: of(sums) }).collect();
        Estimates { stacks, total: of(&self.total), bound: self.bound(time) }
    }

    /// Why all amounts are lower bounds; `None` = they are estimates.
    #[must_use]
    pub fn bound(&self, time: Watched) -> Option<Bound> {
        // The last running time of a process that has ended may not have been read.
        if time.ends_in_full && time.own_s <= OWN_MIN_S {
            None
        } else if self.weights(self.measure(), 0).effective() < WINDOWS_MIN {
            Some(Bound::TooFew)
        } else if self.usable().map(|class| self.counts.busy[class as usize]).sum::<u64>() < BUSY_WINDOWS_MIN {
            Some(Bound::Unmet)
        } else {
            (self.saturated_ratio() > SATURATED_MAX).then_some(Bound::Saturated)
        }
    }

    fn estimate(&self, stack: &StackSums, weights: &Weights, measure: Measure, quantity: usize, time: Watched) -> Option<Estimate> {
        let full_s = self.full_eligible_s[quantity];
        if weights.windows == 0 && full_s <= 0.0 && quantity > 0 {
            return None;
        }
        // The part of the full time that gives data on an age represents all of it.
        let full = if full_s > 0.0 { self.counts.full_s / full_s } else { 1.0 };
        let full = Plain { count: stack.full[quantity].count * full, bytes: stack.full[quantity].bytes * full };
        let seen = stack.seen[quantity];
        if weights.first <= 0.0 || time.own_s <= 0.0 {
            let known = |seen: f64, full: f64| Quantity { value: seen + full, stderr: seen, least: seen + full };
            return Some(Estimate { count: known(seen.count, full.count), bytes: known(seen.bytes, full.bytes) });
        }
        let sums = self.sums(stack, quantity);
        // One window that represents nearly all of the time counts as a single one.
        let errors = (weights.effective() >= WINDOWS_MIN).then(|| standard_errors(&sums, weights, measure, stack.allocated));
        let of = |first: f64, error: Option<f64>, held: f64, stretch: f64, least: f64| {
            // By own time nothing is added for threads that sleep; their running time has the error of the cost of their hits.
            let (stretch, held) = match measure {
                Measure::Own => (0.0, held.hypot(first * self.own_time_error())),
                Measure::Clock => (stretch, held),
            };
            Parts { first: first + stretch / 2.0, error, held: held.hypot(stretch_error(stretch)), least }
        };
        let time_s = match measure {
            Measure::Own => time.own_s,
            Measure::Clock => time.clock_s,
        };
        let aged = self.age_error(stack, &sums, weights, measure, quantity);
        let (count_held, bytes_held) = (sums.held.count.hypot(aged.count), sums.held.bytes.hypot(aged.bytes));
        let count = of(sums.count.first, errors.map(|errors| errors.count), count_held, sums.stretch.count, sums.least.count);
        let bytes = of(sums.bytes.first, errors.map(|errors| errors.bytes), bytes_held, sums.stretch.bytes, sums.least.bytes);
        Some(Estimate {
            count: count.quantity(weights, time_s, seen.count, full.count),
            bytes: bytes.quantity(weights, time_s, seen.bytes, full.bytes),
        })
    }

    /// What an error of the hits' cost adds to Σ w·y of an age, because ages are in the thread's own time, which depends on the cost. The
    /// secant to the age before is at least as steep as the curve where survival flattens out, as it does for mixed lifetimes.
    fn age_error(&self, stack: &StackSums, sums: &Sums, weights: &Weights, measure: Measure, quantity: usize) -> Plain {
        let Some(before) = quantity.checked_sub(1) else { return Plain::default() };
        let (all, earlier, earlier_weights) = (self.sums(stack, 0), self.sums(stack, before), self.weights(measure, before));
        if earlier_weights.first <= 0.0 || weights.first <= 0.0 {
            return Plain::default();
        }
        let step = before.checked_sub(1).map_or(1.0, |earlier_age| (AGES_NS[before] as f64 / AGES_NS[earlier_age] as f64).ln());
        let error = |earlier: f64, now: f64, held: f64, all: f64| {
            let relative = if all > 0.0 { held / all } else { 0.0 };
            (earlier / earlier_weights.first - now / weights.first).abs() / step * relative * weights.first
        };
        Plain {
            count: error(earlier.count.first, sums.count.first, all.held.count, all.count.first),
            bytes: error(earlier.bytes.first, sums.bytes.first, all.held.bytes, all.bytes.first),
        }
    }

    /// Relative standard error of the process's own time in windows.
    fn own_time_error(&self) -> f64 {
        let Sleepers { hits, run, error } = self.sleepers;
        if hits > 0.0 { error * hits / (run - hits).max(1e-3 * run) } else { 0.0 }
    }
}

/// Time of a process while it was not traced in full.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Watched {
    /// Seconds of its own running time.
    pub own_s: f64,
    /// Seconds by the clock.
    pub clock_s: f64,
    /// Whether it is traced in full now, or was at its end.
    pub ends_in_full: bool,
}

/// The standard error of a value anywhere between 0 and `most`, of which `most` / 2 is reported: 1.96 of them reach both ends.
fn stretch_error(most: f64) -> f64 {
    most / 2.0 / 1.96
}

/// What an amount is made of: sums of w·y, and the standard error of the rate.
struct Parts {
    first: f64,
    error: Option<f64>,
    held: f64,
    least: f64,
}

impl Parts {
    fn quantity(&self, weights: &Weights, time_s: f64, seen: f64, full: f64) -> Quantity {
        let n = weights.effective();
        let value = self.first / weights.first * time_s;
        // With a single window the error is not known: it is taken to be as large as the value itself.
        let spread = self.error.map_or(value, |error| error * time_s);
        let few = if self.error.is_some() { errors_of_95_percent(n) / errors_of_95_percent(f64::INFINITY) } else { 1.0 };
        let stderr = (spread * few).hypot(self.held / weights.first * time_s);
        let relative = if value > 0.0 { spread / value } else { 0.0 };
        let sure = (1.0 - errors_to_one_side(n) * relative).max(0.0);
        let least = if self.error.is_some() { self.least / weights.most.max(weights.first) * time_s * sure } else { 0.0 };
        Quantity { value: value + full, stderr, least: least.max(seen) + full }
    }
}

/// Standard errors of the rates from windows.
#[derive(Clone, Copy)]
struct Errors {
    count: f64,
    bytes: f64,
}

/// As at the start of the module. A burst is determined from the bytes; it is as large a part of the count.
fn standard_errors(sums: &Sums, weights: &Weights, measure: Measure, seen: Amount) -> Errors {
    let rate = sums.bytes.first / weights.first;
    let squares = squares_around(&sums.bytes, weights, measure);
    let [first, second, third] = sums.cubes[measure as usize];
    let cubes = third - 3.0 * rate * second + 3.0 * rate * rate * first - rate * rate * rate * weights.third;
    let burst = if squares > 0.0 { cubes.abs() / squares } else { 0.0 };
    let of_bytes = if sums.bytes.first > 0.0 { burst / sums.bytes.first } else { 0.0 };
    Errors {
        count: stderr(&sums.count, weights, measure, (seen.count, seen.count_squares), of_bytes * sums.count.first),
        bytes: stderr(&sums.bytes, weights, measure, (seen.bytes, seen.squares), burst),
    }
}

/// Σ w²·(y − rate)²
fn squares_around(sums: &Moments, weights: &Weights, measure: Measure) -> f64 {
    let rate = sums.first / weights.first;
    (sums.second - 2.0 * rate * sums.cross[measure as usize] + rate * rate * weights.second).max(0.0)
}

/// `seen`: what all windows saw allocated, and its squares. `burst`: w·y of the event that windows differ by.
fn stderr(sums: &Moments, weights: &Weights, measure: Measure, seen: (f64, f64), burst: f64) -> f64 {
    let n = weights.effective();
    let block = if sums.first > 0.0 {
        sums.chance / sums.first
    } else if seen.0 > 0.0 && weights.eligible_s > 0.0 {
        // A block of its own mean size, in a window of the mean length.
        seen.1 / seen.0 * weights.first / weights.eligible_s
    } else {
        0.0
    };
    let one = block.max(burst);
    ((n / (n - 1.0) * squares_around(sums, weights, measure)).max(sums.chance + 0.96 * one * one).sqrt() + 0.98 * one) / weights.first
}

/// Half the width of a 95 % interval, in standard errors, from `windows` windows of equal weight: the 97.5 % point of Student's t with that
/// less one degrees of freedom (tables of any statistics book).
#[must_use]
pub fn errors_of_95_percent(windows: f64) -> f64 {
    const POINTS: [(u64, f64); 15] = [
        (2, 12.71),
        (3, 4.30),
        (4, 3.18),
        (5, 2.78),
        (6, 2.57),
        (7, 2.45),
        (8, 2.36),
        (9, 2.31),
        (10, 2.26),
        (15, 2.14),
        (20, 2.09),
        (30, 2.05),
        (60, 2.00),
        (120, 1.98),
        (1000, 1.96),
    ];
    POINTS.iter().rev().find(|(from, _)| windows >= *from as f64).map_or(12.71, |(_, errors)| *errors)
}

/// The same to one side: the 95 % point.
#[must_use]
fn errors_to_one_side(windows: f64) -> f64 {
    const POINTS: [(u64, f64); 14] = [
        (2, 6.31),
        (3, 2.92),
        (4, 2.35),
        (5, 2.13),
        (6, 2.02),
        (7, 1.94),
        (8, 1.89),
        (9, 1.86),
        (10, 1.83),
        (15, 1.76),
        (20, 1.73),
        (30, 1.70),
        (60, 1.67),
        (120, 1.66),
    ];
    POINTS.iter().rev().find(|(from, _)| windows >= *from as f64).map_or(6.31, |(_, errors)| *errors)
}

#[cfg(test)]
mod tests;
