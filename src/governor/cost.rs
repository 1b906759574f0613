//! The cost of a probe hit for the watched process, from paired measurements on this machine and from the BPF programs' own clock. Pure.
//!
//! A hit is a trap plus the BPF program that runs at it. The program walks a stack of varying depth, so each program run of a governed
//! process is timed ([`Spent`]). A trap costs the same whatever is probed, unless the kernel single-steps the instruction: that takes several
//! times as long, most on virtual machines, and such hits are counted. Traps are measured on a child that only allocates and frees: the cost
//! of its hits minus the time of the BPF programs.

/// The hits of a process between two moments, and their time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spent {
    /// Hits at functions that allocate, nested calls included.
    pub allocations: u64,
    /// Hits at functions that free.
    pub frees: u64,
    /// Returns that were probed.
    pub returns: u64,
    /// Hits at instructions that the kernel single-steps, from a count modulo 2^32.
    pub stepped: u64,
    /// Nanoseconds that the programs took by their own clock, at entries and returns.
    pub programs_ns: u64,
}

impl Spent {
    /// From an earlier moment of the same counts to this one.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            allocations: self.allocations.saturating_sub(before.allocations),
            frees: self.frees.saturating_sub(before.frees),
            returns: self.returns.saturating_sub(before.returns),
            stepped: self.stepped.wrapping_sub(before.stepped) & u64::from(u32::MAX),
            programs_ns: self.programs_ns.saturating_sub(before.programs_ns),
        }
    }

    /// Hits at entries, of any kind.
    #[must_use]
    pub fn hits(self) -> u64 {
        self.allocations + self.frees
    }
}

impl std::ops::AddAssign for Spent {
    fn add_assign(&mut self, more: Self) {
        self.allocations += more.allocations;
        self.frees += more.frees;
        self.returns += more.returns;
        self.stepped += more.stepped;
        self.programs_ns += more.programs_ns;
    }
}

/// Costs of the traps alone, in nanoseconds of the target's time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Traps {
    /// At an entry.
    pub entry_ns: f64,
    /// At a return.
    pub return_ns: f64,
}

/// Median costs of one probed call, in nanoseconds of the target's time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HitCosts {
    /// An allocation: entry with its stack, return, record.
    pub allocation_ns: f64,
    /// A free: entry, record.
    pub free_ns: f64,
    /// Largest relative distance of the middle half of the rounds from the median: the uncertainty of the costs.
    pub spread: f64,
    /// Of them, the traps alone; `None` if the programs' clock gave no usable times.
    pub traps: Option<Traps>,
    /// What a hit costs more, of whatever kind, if the kernel single-steps the instruction at the site.
    pub step_ns: f64,
}

/// Relative standard error of a cost in addition to the spread of the calibration's rounds: caches that a trap leaves cold, sites that are
/// more expensive than those of the calibration. From the costs measured in eight programs, see docs/design/0007.
const MODEL_ERROR: f64 = 0.1;

impl HitCosts {
    /// Default costs if nothing could be measured: higher than on any machine measured so far, so that the budget holds.
    pub const ASSUMED: Self = Self { allocation_ns: 4_000.0, free_ns: 1_500.0, spread: 1.0, traps: None, step_ns: 20_000.0 };

    /// Hits at no cost, for full traces, in which nothing is scaled.
    pub const FREE: Self = Self { allocation_ns: 0.0, free_ns: 0.0, spread: 0.0, traps: None, step_ns: 0.0 };

    /// From rounds of nanoseconds per pair: without probes, with probes on free, with probes on both. `None` without any round, or if the
    /// probes appear to cost nothing, which is impossible.
    #[must_use]
    pub fn from_rounds(rounds: &[[f64; 3]]) -> Option<Self> {
        let free = quartiles(rounds.iter().map(|[alone, free, _]| free - alone))?;
        let allocation = quartiles(rounds.iter().map(|[_, free, both]| both - free))?;
        if free[1] <= 0.0 || allocation[1] <= 0.0 {
            return None;
        }
        let spread = |q: [f64; 3]| (q[2] - q[1]).max(q[1] - q[0]) / q[1];
        let spread = spread(free).max(spread(allocation));
        Some(Self { allocation_ns: allocation[1], free_ns: free[1], spread, traps: None, step_ns: Self::ASSUMED.step_ns })
    }

    /// Adds what a hit of a free costs where its instruction is single-stepped, in nanoseconds for each round, of which the BPF program takes
    /// `alone_ns`. Without any round the step stays as it is assumed. `of_pair`: whether those of the calibration's own allocations and frees
    /// were: the costs already include the step then.
    #[must_use]
    pub fn with_step(mut self, stepped: &[f64], alone_ns: f64, of_pair: [bool; 2]) -> Self {
        let entry_ns = self.traps.map_or(self.free_ns - alone_ns, |traps| traps.entry_ns);
        let step_ns = quartiles(stepped.iter().copied()).map(|[_, median, _]| median - alone_ns - entry_ns);
        if let Some(step_ns) = step_ns.filter(|&ns| ns >= 0.0) {
            self.step_ns = step_ns;
        }
        match (of_pair, &mut self.traps) {
            // Every entry counts as one with a step.
            ([_, true], _) | ([true, _], None) => self.step_ns = 0.0,
            ([true, false], Some(traps)) => traps.return_ns = (traps.return_ns - self.step_ns).max(0.0),
            ([false, false], _) => {}
        }
        self
    }

    /// Adds the times of the calibration's BPF programs: `alone_ns` of one at a free, `pair_ns` of all at an allocation and its free
    /// together. The rest of the costs are the traps.
    #[must_use]
    pub fn with_programs(mut self, alone_ns: f64, pair_ns: f64) -> Self {
        let entry_ns = self.free_ns - alone_ns;
        let return_ns = self.allocation_ns - (pair_ns - alone_ns) - entry_ns;
        // A trap takes at least a tenth of a microsecond; a measurement below that was disturbed.
        self.traps = (entry_ns >= 100.0 && return_ns >= 0.0).then_some(Traps { entry_ns, return_ns });
        self
    }

    /// Seconds actually spent: traps by their number, programs by their clock.
    #[must_use]
    pub fn spent_s(&self, spent: Spent) -> f64 {
        let emulated_s = match self.traps {
            Some(traps) => (spent.hits() as f64 * traps.entry_ns + spent.returns as f64 * traps.return_ns + spent.programs_ns as f64) / 1e9,
            None => self.seconds(spent.allocations, spent.frees),
        };
        emulated_s + self.steps_s(spent)
    }

    /// Seconds that hits cost while their target is switched off.
    #[must_use]
    pub fn passed_over_s(&self, spent: Spent) -> f64 {
        spent.hits() as f64 * self.traps.map_or(self.free_ns, |traps| traps.entry_ns) / 1e9 + self.steps_s(spent)
    }

    fn steps_s(&self, spent: Spent) -> f64 {
        spent.stepped as f64 * self.step_ns / 1e9
    }

    /// The costs such that these hits cost what was really spent.
    #[must_use]
    pub fn of(&self, spent: Spent) -> Self {
        let (calibrated_s, spent_s) = (self.seconds(spent.allocations, spent.frees), self.spent_s(spent));
        if calibrated_s <= 0.0 || spent_s <= 0.0 {
            return *self;
        }
        let factor = spent_s / calibrated_s;
        Self { allocation_ns: self.allocation_ns * factor, free_ns: self.free_ns * factor, ..*self }
    }

    /// Relative standard error of what was spent.
    #[must_use]
    pub fn error(&self) -> f64 {
        // The middle half of a normal distribution reaches 0.67 standard deviations to either side.
        if self.mean_s() > 0.0 { (self.spread / 0.67 / 2.0).hypot(MODEL_ERROR) } else { 0.0 }
    }

    /// Seconds that these hits cost by the calibration.
    #[must_use]
    pub fn seconds(&self, allocations: u64, frees: u64) -> f64 {
        (allocations as f64 * self.allocation_ns + frees as f64 * self.free_ns) / 1e9
    }

    /// The mean cost of a hit, half of them frees, in seconds.
    #[must_use]
    pub fn mean_s(&self) -> f64 {
        (self.allocation_ns + self.free_ns) / 2e9
    }
}

fn quartiles(values: impl Iterator<Item = f64>) -> Option<[f64; 3]> {
    let mut sorted: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted.get(((sorted.len().checked_sub(1)?) as f64 * share).round() as usize).copied();
    Some([at(0.25)?, at(0.5)?, at(0.75)?])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn costs_are_the_median_of_the_rounds_and_one_outlier_does_not_matter() {
        let rounds =
            [[10.0, 1010.0, 3010.0], [12.0, 1012.0, 3112.0], [9.0, 999_000.0, 999_001.0], [10.0, 1000.0, 2990.0], [10.0, 1020.0, 3030.0]];
        let costs = HitCosts::from_rounds(&rounds).unwrap();
        assert!((990.0..1020.0).contains(&costs.free_ns), "{costs:?}");
        assert!((1900.0..2110.0).contains(&costs.allocation_ns), "{costs:?}");
        assert!((costs.seconds(1_000_000, 1_000_000) - 3.0).abs() < 0.1);
    }

    #[test]
    fn single_stepped_hits_cost_their_steps_also_while_the_target_is_off() {
        let costs = HitCosts::from_rounds(&[[10.0, 810.0, 2210.0]]).unwrap().with_programs(200.0, 800.0).with_step(
            &[9_000.0, 10_800.0, 30_000.0],
            200.0,
            [false; 2],
        );
        assert_eq!(costs.traps, Some(Traps { entry_ns: 600.0, return_ns: 200.0 }));
        assert!((costs.step_ns - 10_000.0).abs() < 1e-6, "{costs:?}");
        let spent = Spent { allocations: 1000, frees: 1000, returns: 1000, stepped: 1000, programs_ns: 800_000 };
        let emulated = Spent { stepped: 0, ..spent };
        for seconds in [HitCosts::spent_s as fn(&HitCosts, Spent) -> f64, HitCosts::passed_over_s] {
            assert!((seconds(&costs, spent) - seconds(&costs, emulated) - 0.01).abs() < 1e-9);
        }
        assert!((costs.of(spent).seconds(1000, 1000) - costs.spent_s(spent)).abs() < 1e-9);
        // A measurement that shows nothing is not one.
        assert_eq!(costs.with_step(&[], 200.0, [false; 2]), costs);
        // The count of steps begins again at 0.
        let before = Spent { stepped: u64::from(u32::MAX), ..Spent::default() };
        assert_eq!(Spent { stepped: 4, ..Spent::default() }.since(before).stepped, 5);
    }

    #[test]
    fn a_step_that_the_calibration_has_in_its_own_pair_counts_once() {
        let of = |pair: [f64; 3], of_pair| {
            let costs = HitCosts::from_rounds(&[pair]).unwrap().with_programs(200.0, 800.0).with_step(&[10_800.0], 200.0, of_pair);
            let [allocations, frees] = of_pair.map(u64::from);
            let spent = Spent { allocations: 1, frees: 1, returns: 1, stepped: allocations + frees, programs_ns: 800 };
            costs.spent_s(spent) * 1e9
        };
        assert!((of([10.0, 810.0, 2210.0], [false, false]) - 2200.0).abs() < 1.0);
        assert!((of([10.0, 810.0, 12_210.0], [true, false]) - 12_200.0).abs() < 1.0);
        assert!((of([10.0, 10_810.0, 22_210.0], [true, true]) - 22_200.0).abs() < 1.0);
    }

    #[test]
    fn probes_that_seem_to_cost_nothing_are_not_accepted() {
        assert_eq!(HitCosts::from_rounds(&[[10.0, 9.0, 9.0]]), None);
        assert_eq!(HitCosts::from_rounds(&[]), None);
    }
}
