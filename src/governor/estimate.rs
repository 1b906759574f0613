//! From windows to rates by stack, with standard errors. Pure.
//!
//! Window i stands for `P` seconds (its cycle), of which `e = length − age` seconds can tell who outlived an age. With `x` the bytes of
//! a stack that did, its rate is estimated by the mean of `y = x / e` weighted by `P`:
//!
//! ```text
//! rate   = Σ P·y / Σ P
//! var    = n/(n−1) · Σ P²·(y − rate)² / (Σ P)²           n = (Σ P)² / Σ P², the effective number of windows
//! chance = Σ P²·Σb²/e² / (Σ P)²                          what var is at least, had each block come by chance alone
//! one    = what one more event would add to the rate
//! stderr = sqrt( max(var, chance + 0.96·one²) ) + 0.98·one
//! ```
//!
//! The terms with `one` are those of the score interval of a count, n + 1.92 ± 1.96·sqrt(n + 0.96), laid around n itself so that it
//! reaches as far up: who saw two blocks may well have missed five. Of many blocks they are nothing. `one` is the larger of the mean
//! block's part, chance / rate, and of what the windows differ by, |Σ P³·(y − rate)³| / Σ P²·(y − rate)² / Σ P: where a burst survives as
//! a whole the event is the burst. Of a stack that was seen to allocate, and of which nothing outlived the age, `one` is a block of its
//! in one of the windows.
//!
//! The window is the unit, so that what happens together (bursts, threads, one request's allocations) is not counted as independent.
//! A window that its quota closed early saw busy moments for a shorter time than quiet ones; no length makes that good. Its class is
//! then left out, for all of the target's windows of that class, and counted: the shorter classes, which no quota closes, tell the rest.
//! Time that was traced in full is known, not estimated, and adds no error.

use std::collections::HashMap;
use std::hash::Hash;

use super::AGES_NS;
use super::observer::{Amount, QUANTITIES, Tally};
use super::schedule::WindowClass;

/// Stacks kept of one target. Beyond it their sums go into one row (`others`).
pub const STACKS_MAX: usize = 1 << 14;
const CLASSES: usize = WindowClass::ALL.len();

/// An estimated rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Allocations a second.
    pub count_per_s: f64,
    /// Its standard error; `None` from a single window, which says nothing of itself.
    pub count_per_s_stderr: Option<f64>,
    /// Bytes a second.
    pub bytes_per_s: f64,
    /// Its standard error, likewise.
    pub bytes_per_s_stderr: Option<f64>,
}

/// What is estimated of a stack.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StackEstimate<K> {
    /// The stack; `None` = those beyond [`STACKS_MAX`].
    pub stack: Option<K>,
    /// Allocated.
    pub allocated: Estimate,
    /// Outlived, by age ([`AGES_NS`]); `None` where no window was long enough.
    pub outlived: [Option<Estimate>; AGES_NS.len()],
}

/// What the mean and the variance of a rate take, of y = x / e for x a count or bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Moments {
    /// Σ P·y
    first: f64,
    /// Σ P²·y
    cross: f64,
    /// Σ P²·y²
    second: f64,
    /// Σ P²·Σb²/e², for b the part of each event
    chance: f64,
}

impl Moments {
    fn add_window(&mut self, period_s: f64, eligible_s: f64, x: f64, squares: f64) {
        let (y, square) = (x / eligible_s, period_s * period_s);
        self.first += period_s * y;
        self.cross += square * y;
        self.second += square * y * y;
        self.chance += square * squares / (eligible_s * eligible_s);
    }

    fn add(&mut self, other: &Self) {
        self.first += other.first;
        self.cross += other.cross;
        self.second += other.second;
        self.chance += other.chance;
    }
}

/// Sums of one quantity of one stack over the windows of a class.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    count: Moments,
    bytes: Moments,
    /// Σ P³·y, Σ P³·y², Σ P³·y³ of the bytes
    cubes: [f64; 3],
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.count.add(&other.count);
        self.bytes.add(&other.bytes);
        for (sum, more) in self.cubes.iter_mut().zip(other.cubes) {
            *sum += more;
        }
    }
}

/// The windows of one class that tell of one quantity.
#[derive(Debug, Clone, Copy, Default)]
struct Weights {
    windows: u64,
    /// Σ P
    first: f64,
    /// Σ P²
    second: f64,
    /// Σ P³
    third: f64,
    /// Σ e
    eligible_s: f64,
}

impl Weights {
    fn add(&mut self, other: &Self) {
        self.windows += other.windows;
        self.first += other.first;
        self.second += other.second;
        self.third += other.third;
        self.eligible_s += other.eligible_s;
    }

    fn effective(&self) -> f64 {
        if self.second > 0.0 { self.first * self.first / self.second } else { 0.0 }
    }
}

#[derive(Debug, Clone, Default)]
struct StackSums {
    classes: Vec<(WindowClass, [Sums; QUANTITIES])>,
    /// All that windows saw it allocate, unscaled.
    seen: Amount,
    /// Of the time traced in full.
    full: [Amount; QUANTITIES],
}

/// Counts of windows, for people and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct WindowCounts {
    /// Windows by class.
    pub windows: [u64; CLASSES],
    /// Of them, those that their quota closed early.
    pub closed_early: [u64; CLASSES],
    /// Windows left out because records were lost in them.
    pub lossy: u64,
    /// Seconds that windows were open.
    pub open_s: f64,
    /// Seconds traced in full.
    pub full_s: f64,
    /// Allocations seen.
    pub allocations: u64,
    /// Bytes seen, unscaled.
    pub seen_bytes: f64,
    /// Of them, bytes of threads that stood still under the probes: their rates are lower bounds.
    pub saturated_bytes: f64,
    /// Blocks or rows beyond the observer's limits.
    pub refused: u64,
}

/// Gathers the windows of one target.
#[derive(Debug, Clone)]
pub struct Estimator<K> {
    stacks: HashMap<K, StackSums>,
    others: StackSums,
    stacks_refused: u64,
    weights: [[Weights; QUANTITIES]; CLASSES],
    /// Σ e of the time traced in full.
    full_eligible_s: [f64; QUANTITIES],
    counts: WindowCounts,
}

impl<K: Copy + Eq + Hash> Default for Estimator<K> {
    fn default() -> Self {
        Self {
            stacks: HashMap::new(),
            others: StackSums::default(),
            stacks_refused: 0,
            weights: Default::default(),
            full_eligible_s: [0.0; QUANTITIES],
            counts: WindowCounts::default(),
        }
    }
}

/// Shortest eligible part of a window, of its length: with less, a moment's delay would decide.
const ELIGIBLE_MIN: f64 = 0.1;

fn eligible_s(length_s: f64, quantity: usize) -> Option<f64> {
    let age_s = quantity.checked_sub(1).and_then(|age| AGES_NS.get(age)).map_or(0.0, |age| *age as f64 / 1e9);
    let eligible_s = length_s - age_s;
    (eligible_s > 0.0 && eligible_s >= ELIGIBLE_MIN * length_s).then_some(eligible_s)
}

impl<K: Copy + Eq + Hash> Estimator<K> {
    /// A window that stands for `period_s`.
    pub fn window(&mut self, class: WindowClass, period_s: f64, closed_early: bool, tally: &Tally<K>) {
        self.count(tally);
        self.counts.windows[class as usize] += 1;
        self.counts.closed_early[class as usize] += u64::from(closed_early);
        self.counts.open_s += tally.length_s;
        let eligible: [Option<f64>; QUANTITIES] = std::array::from_fn(|quantity| eligible_s(tally.length_s, quantity));
        for (weights, eligible_s) in self.weights[class as usize].iter_mut().zip(eligible) {
            let Some(eligible_s) = eligible_s else { continue };
            weights.windows += 1;
            weights.first += period_s;
            weights.second += period_s * period_s;
            weights.third += period_s * period_s * period_s;
            weights.eligible_s += eligible_s;
        }
        for (stack, row) in &tally.stacks {
            let Some(sums) = self.stack(*stack) else { continue };
            sums.seen.add_scaled(row[0], 1.0);
            let place = match sums.classes.iter().position(|(of, _)| *of == class) {
                Some(place) => place,
                None => {
                    sums.classes.push((class, Default::default()));
                    sums.classes.len() - 1
                }
            };
            for ((sum, amount), eligible_s) in sums.classes[place].1.iter_mut().zip(row).zip(eligible) {
                let Some(eligible_s) = eligible_s else { continue };
                sum.count.add_window(period_s, eligible_s, amount.count, amount.count_squares);
                sum.bytes.add_window(period_s, eligible_s, amount.bytes, amount.squares);
                let (y, cube) = (amount.bytes / eligible_s, period_s * period_s * period_s);
                for (power, sum) in (1..).zip(&mut sum.cubes) {
                    *sum += cube * y.powi(power);
                }
            }
        }
    }

    /// A piece of time that was traced in full.
    pub fn full(&mut self, tally: &Tally<K>) {
        self.count(tally);
        self.counts.full_s += tally.length_s;
        for (sum, quantity) in self.full_eligible_s.iter_mut().zip(0..) {
            *sum += eligible_s(tally.length_s, quantity).unwrap_or(0.0);
        }
        for (stack, row) in &tally.stacks {
            let Some(sums) = self.stack(*stack) else { continue };
            for (sum, amount) in sums.full.iter_mut().zip(row) {
                sum.add_scaled(*amount, 1.0);
            }
        }
    }

    /// A window that is left out because records of it were lost.
    pub fn lossy(&mut self) {
        self.counts.lossy += 1;
    }

    fn count(&mut self, tally: &Tally<K>) {
        self.counts.allocations += tally.allocations;
        self.counts.seen_bytes += tally.seen_bytes;
        self.counts.saturated_bytes += tally.saturated_bytes;
        self.counts.refused += tally.doubts.refused;
    }

    fn stack(&mut self, stack: K) -> Option<&mut StackSums> {
        if self.stacks.len() >= STACKS_MAX && !self.stacks.contains_key(&stack) {
            self.stacks_refused += 1;
            return Some(&mut self.others);
        }
        Some(self.stacks.entry(stack).or_default())
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

    /// Windows that tell of an age (0 = of allocations, from 1 on [`AGES_NS`]), counted as so many of equal weight: what degrees of
    /// freedom come from.
    #[must_use]
    pub fn effective_windows(&self, quantity: usize) -> f64 {
        let mut sum = Weights::default();
        for class in self.usable() {
            sum.add(&self.weights[class as usize][quantity.min(QUANTITIES - 1)]);
        }
        sum.effective()
    }

    /// Classes of which no window was closed early.
    fn usable(&self) -> impl Iterator<Item = WindowClass> + '_ {
        WindowClass::ALL.into_iter().filter(|class| self.counts.closed_early[*class as usize] == 0)
    }

    /// The estimates, in no order. `windows_s`: seconds that the windows stand for, the time that was not traced in full.
    #[must_use]
    pub fn estimates(&self, windows_s: f64) -> Vec<StackEstimate<K>> {
        let named = self.stacks.iter().map(|(stack, sums)| (Some(*stack), sums));
        let others = (self.stacks_refused > 0).then_some((None, &self.others));
        named
            .chain(others)
            .filter_map(|(stack, sums)| {
                let of = |quantity| self.estimate(sums, quantity, windows_s);
                Some(StackEstimate { stack, allocated: of(0)?, outlived: std::array::from_fn(|age| of(age + 1)) })
            })
            .collect()
    }

    fn estimate(&self, stack: &StackSums, quantity: usize, windows_s: f64) -> Option<Estimate> {
        let mut weights = Weights::default();
        let mut sums = Sums::default();
        for class in self.usable() {
            weights.add(&self.weights[class as usize][quantity]);
            if let Some((_, of)) = stack.classes.iter().find(|(named, _)| *named == class) {
                sums.add(&of[quantity]);
            }
        }
        let windows = (weights.windows > 0).then(|| {
            // One window that stands for nearly all of the time is as good as alone.
            let errors = (weights.effective() > 1.05).then(|| standard_errors(&sums, &weights, stack.seen));
            Estimate {
                count_per_s: sums.count.first / weights.first,
                count_per_s_stderr: errors.map(|errors| errors.count),
                bytes_per_s: sums.bytes.first / weights.first,
                bytes_per_s_stderr: errors.map(|errors| errors.bytes),
            }
        });
        let full_s = self.full_eligible_s[quantity];
        let full = (full_s > 0.0).then(|| Estimate {
            count_per_s: stack.full[quantity].count / full_s,
            count_per_s_stderr: Some(0.0),
            bytes_per_s: stack.full[quantity].bytes / full_s,
            bytes_per_s_stderr: Some(0.0),
        });
        match (windows, full) {
            (Some(windows), Some(full)) => Some(mean(windows, windows_s, full, self.counts.full_s)),
            (one, other) => one.or(other),
        }
    }
}

/// Standard errors of the rates from windows.
#[derive(Clone, Copy)]
struct Errors {
    count: f64,
    bytes: f64,
}

/// The module's first lines have them. A burst is told by the bytes; it is as large a part of the count.
fn standard_errors(sums: &Sums, weights: &Weights, seen: Amount) -> Errors {
    let rate = sums.bytes.first / weights.first;
    let squares = squares_around(&sums.bytes, weights);
    let cubes = sums.cubes[2] - 3.0 * rate * sums.cubes[1] + 3.0 * rate * rate * sums.cubes[0] - rate * rate * rate * weights.third;
    let burst = if squares > 0.0 { cubes.abs() / squares } else { 0.0 };
    let of_bytes = if sums.bytes.first > 0.0 { burst / sums.bytes.first } else { 0.0 };
    Errors {
        count: stderr(&sums.count, weights, (seen.count, seen.count_squares), of_bytes * sums.count.first),
        bytes: stderr(&sums.bytes, weights, (seen.bytes, seen.squares), burst),
    }
}

/// Σ P²·(y − rate)²
fn squares_around(sums: &Moments, weights: &Weights) -> f64 {
    let rate = sums.first / weights.first;
    (sums.second - 2.0 * rate * sums.cross + rate * rate * weights.second).max(0.0)
}

/// `seen`: what all windows saw allocated, and its squares. `burst`: P·y of the event that windows differ by.
fn stderr(sums: &Moments, weights: &Weights, seen: (f64, f64), burst: f64) -> f64 {
    let n = weights.effective();
    let block = if sums.first > 0.0 {
        sums.chance / sums.first
    } else if seen.0 > 0.0 && weights.eligible_s > 0.0 {
        // Of its own size, in a window as long as the mean one.
        seen.1 / seen.0 * weights.first / weights.eligible_s
    } else {
        0.0
    };
    let one = block.max(burst);
    ((n / (n - 1.0) * squares_around(sums, weights)).max(sums.chance + 0.96 * one * one).sqrt() + 0.98 * one) / weights.first
}

fn mean(a: Estimate, a_s: f64, b: Estimate, b_s: f64) -> Estimate {
    let share = if a_s + b_s > 0.0 { a_s / (a_s + b_s) } else { 0.0 };
    let mix = |a: f64, b: f64| a * share + b * (1.0 - share);
    Estimate {
        count_per_s: mix(a.count_per_s, b.count_per_s),
        count_per_s_stderr: a.count_per_s_stderr.map(|stderr| stderr * share),
        bytes_per_s: mix(a.bytes_per_s, b.bytes_per_s),
        bytes_per_s_stderr: a.bytes_per_s_stderr.map(|stderr| stderr * share),
    }
}

/// Half the width of a 95 % interval, in standard errors, from `windows` windows of equal weight: the 97.5 % point of Student's t with that less one
/// degrees of freedom (tables of any statistics book).
#[must_use]
pub fn errors_of_95_percent(windows: f64) -> f64 {
    const POINTS: [(u64, f64); 14] = [
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
    ];
    POINTS.iter().rev().find(|(from, _)| windows >= *from as f64).map_or(12.71, |(_, errors)| *errors)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::governor::observer::WindowDoubts;

    fn tally(length_s: f64, bytes: &[(u32, f64)]) -> Tally<u32> {
        let row = |bytes: f64| {
            let mut row = [Amount::default(); QUANTITIES];
            row[0] = Amount { count: 1.0, bytes, ..Amount::default() };
            row
        };
        Tally {
            length_s,
            stacks: bytes.iter().map(|(stack, bytes)| (*stack, row(*bytes))).collect(),
            seen_bytes: 0.0,
            saturated_bytes: 0.0,
            allocations: 1,
            frees: 0,
            doubts: WindowDoubts::default(),
        }
    }

    fn of(estimator: &Estimator<u32>, stack: u32, windows_s: f64) -> Estimate {
        estimator.estimates(windows_s).into_iter().find(|one| one.stack == Some(stack)).unwrap().allocated
    }

    #[test]
    fn the_mean_and_its_error_are_those_of_the_textbook() {
        let mut estimator = Estimator::default();
        for bytes in [10.0, 20.0, 30.0] {
            estimator.window(WindowClass::Medium, 5.0, false, &tally(0.2, &[(1, bytes)]));
        }
        estimator.window(WindowClass::Medium, 5.0, false, &tally(0.2, &[]));
        let one = of(&estimator, 1, 20.0);
        // 50, 100, 150, 0 bytes a second: mean 75, standard deviation 64.5, over √4.
        assert!((one.bytes_per_s - 75.0).abs() < 1e-9);
        assert!((one.bytes_per_s_stderr.unwrap() - 32.27).abs() < 0.01, "{one:?}");
    }

    #[test]
    fn a_count_has_the_error_of_bytes_where_each_block_is_one_byte() {
        let mut estimator = Estimator::default();
        for count in [10.0, 20.0, 30.0, 0.0] {
            let mut tally = tally(0.2, &[(1, 0.0)]);
            tally.stacks[0].1[0] = Amount { count, count_squares: count, bytes: count, squares: count };
            estimator.window(WindowClass::Medium, 5.0, false, &tally);
        }
        let one = of(&estimator, 1, 20.0);
        assert_eq!((one.count_per_s, one.count_per_s_stderr), (one.bytes_per_s, one.bytes_per_s_stderr));
        assert!((one.count_per_s - 75.0).abs() < 1e-9 && one.count_per_s_stderr.unwrap() > 32.27);
    }

    #[test]
    fn what_was_traced_in_full_has_no_error() {
        let mut estimator = Estimator::default();
        estimator.full(&tally(10.0, &[(1, 1000.0)]));
        assert_eq!(of(&estimator, 1, 0.0).bytes_per_s_stderr, Some(0.0));
        estimator.window(WindowClass::Short, 5.0, false, &tally(0.02, &[(1, 4.0)]));
        estimator.window(WindowClass::Short, 5.0, false, &tally(0.02, &[(1, 8.0)]));
        // 300 bytes a second over 10 s of windows, 100 over 10 s in full.
        let both = of(&estimator, 1, 10.0);
        assert!((both.bytes_per_s - 200.0).abs() < 1e-9, "{both:?}");
        assert!((both.bytes_per_s_stderr.unwrap() - 50.0).abs() < 1e-9, "{both:?}");
    }

    #[test]
    fn a_class_with_a_window_closed_early_is_left_out() {
        let mut estimator = Estimator::default();
        estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &[(1, 2.0)]));
        estimator.window(WindowClass::Long, 200.0, true, &tally(0.3, &[(1, 900.0)]));
        assert!((of(&estimator, 1, 10.0).bytes_per_s - 100.0).abs() < 1e-9);
        assert!((estimator.effective_windows(0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_window_too_short_for_an_age_says_nothing_of_it() {
        let mut estimator = Estimator::default();
        estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &[(1, 2.0)]));
        let one = estimator.estimates(2.0)[0];
        assert!(one.outlived[0].is_some() && one.outlived[1].is_none());
        assert_eq!(one.allocated.bytes_per_s_stderr, None);
    }

    #[test]
    fn stacks_beyond_the_limit_go_into_one_row() {
        let mut estimator = Estimator::default();
        let many: Vec<(u32, f64)> = (0..STACKS_MAX as u32 + 10).map(|stack| (stack, 1.0)).collect();
        estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &many));
        let rest = estimator.estimates(2.0).into_iter().find(|one| one.stack.is_none()).unwrap();
        assert!((rest.allocated.bytes_per_s - 10.0 / 0.02).abs() < 1e-6);
        assert_eq!(estimator.stacks_refused(), 10);
    }
}
