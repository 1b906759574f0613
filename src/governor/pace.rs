//! The share of the time for which a target's probes may be attached. Pure.
//!
//! The budget is a share of the target's running time, the CPU time of its threads: one that runs for half of the time may lose half as
//! much. With
//! `lost` the seconds that a target loses per second of an open window and `load` its running time per second, a window of length L costs
//! `lost · L` and must represent at least `lost · L / (budget · load)` seconds. What was spent beyond the budget is a debt that later
//! cycles pay.
//!
//! A target whose full trace fits the budget is traced in full. Every target starts that way, with a quota of some milliseconds: one that
//! allocates little is then known in full from the start, and for any other the quota shows how busy it is. Its windows begin when that is
//! paid.

use super::cost::HitCosts;
use super::schedule::WindowClass;

/// Longest time that a target may lose within one window: a service must not stall, even if its budget holds on average.
pub const STALL_MAX_S: f64 = 0.25;
/// Cost of attaching and detaching probes for the target, in addition to its hits meanwhile: the kernel changes its code under the lock of
/// its address space.
const AROUND_WINDOW_S: f64 = 0.001;
/// Weight of the newest window in the mean share lost.
const NEWEST: f64 = 0.3;
/// Share of the budget that a full trace may need: the margin keeps it from being ended by the first busy second.
const FULL_SHARE: f64 = 0.7;
/// Windows required before a target is traced in full.
const WINDOWS_BEFORE_FULL: u64 = 3;
/// Upper limit of a target's loss per second of a window, in units of its load or of one thread.
const LOST_MAX: f64 = 2.0;
/// Longest period: every target has a window at least once an hour.
const PERIOD_MAX_S: f64 = 3600.0;
/// Shortest period, in lengths of its window. A window that begins late extends beyond its period, and no other can begin there: that
/// time is covered by (length / period)² / 2 less than it should be, which this limits to a fiftieth.
const PERIOD_MIN_LENGTHS: f64 = 5.0;
/// Shortest period of all: attaching and detaching takes a tenth of a second, in which no other window can begin.
pub const PERIOD_MIN_S: f64 = 1.0;
/// Longest time that the first windows of a target wait for its trials to be paid, so that there are also results for one that rarely runs.
const WAIT_MAX_S: f64 = 60.0;
/// Maximum cost of a target's first full trace, in seconds; less for one that hardly runs ([`SAVED_S`]). Any target may have as long a
/// burst while it is traced in full.
const TRIAL_S: f64 = 0.005;
/// Seconds of the budget that are saved at most: a quiet hour does not allow a slow second. A trial takes no more, nor does a burst longer
/// than [`TRIAL_S`].
const SAVED_S: f64 = 60.0;
/// Seconds over which the load is averaged.
const LOAD_OVER_S: f64 = 10.0;
/// Seconds that count as watched with the initial load. A process's CPU clock is too coarse to give its load in the first milliseconds,
/// and a process that is taken for idle would end its first full trace at once.
const LOAD_PRIOR_S: f64 = 1.0;
/// Lowest load for computing periods: a target that never runs costs nothing, and would never have a window. So any target may lose 10 µs
/// per second at a budget of 1 %, the cost of some hits, however little it runs.
const LOAD_MIN: f64 = 1e-3;
/// Seconds of the budget by which a debt doubles the periods.
const STRAIN_S: f64 = 5.0;
/// Share of the budget that may be reserved: some always remains for windows.
const RESERVED_MAX: f64 = 0.9;
/// Budgets below this give no window within [`PERIOD_MAX_S`].
const BUDGET_MIN: f64 = 1e-5;

/// How a target is traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// In windows.
    Windows,
    /// All the time: it allocates so little that this fits the budget.
    Full,
}

/// What a window cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowCost {
    /// Seconds of its running time that the target lost in the window.
    pub lost_s: f64,
    /// Seconds that it lost before and after it to hits, while its probes were attached and detached.
    pub around_s: f64,
    /// Seconds that it was open.
    pub open_s: f64,
    /// How the target was traced: a full trace does not pay for attaching and detaching.
    pub tier: Tier,
}

/// Hits from which their mean cost is taken for that of the next ones.
const HITS_TOLD_MIN: u64 = 100;
/// The least that a hit is taken to cost, seconds.
const HIT_MIN_S: f64 = 1e-7;

/// One target's pace.
#[derive(Debug, Clone)]
pub struct Pace {
    budget: f64,
    /// Mean cost of a hit, seconds: by the calibration, and then of the hits that were met.
    hit_s: f64,
    /// Mean seconds lost in a second of an open window; `None` before the first.
    lost: Option<f64>,
    /// Mean seconds lost before and after a window.
    around_s: f64,
    windows: u64,
    /// Seconds lost in all.
    lost_s: f64,
    /// Seconds that the target was watched, with or without probes, and that it ran meanwhile.
    watched_s: f64,
    run_s: f64,
    /// Recent running time per second; above one if several threads run.
    load: f64,
    /// Spent beyond the budget, seconds; negative = saved, which expires.
    debt_s: f64,
    tier: Tier,
    period_min_s: f64,
    /// Seconds per second of the budget that other probes take.
    reserved: f64,
}

impl Pace {
    /// A target about whose allocations nothing is known. `budget`: share of its running time that it may lose, 0.01 = 1 %. `load`: its
    /// running time per second so far, 1 if it has just started: a process that hardly runs may not lose what a busy one may.
    #[must_use]
    pub fn new(budget: f64, load: f64, costs: HitCosts) -> Self {
        Self {
            budget: budget.clamp(BUDGET_MIN, 1.0),
            hit_s: costs.mean_s(),
            lost: None,
            around_s: AROUND_WINDOW_S,
            windows: 0,
            lost_s: 0.0,
            watched_s: 0.0,
            run_s: 0.0,
            load: load.max(0.0),
            debt_s: 0.0,
            tier: Tier::Full,
            period_min_s: PERIOD_MIN_S,
            reserved: 0.0,
        }
    }

    /// Seconds per second that the target loses to other probes from now on (their cost is added by [`also_lost`](Self::also_lost)):
    /// windows get the rest of the budget.
    pub fn set_reserved(&mut self, per_s: f64) {
        self.reserved = per_s.clamp(0.0, self.allowed() * RESERVED_MAX);
    }

    /// Seconds per second that the target may lose, at its present load.
    #[must_use]
    pub fn allowed(&self) -> f64 {
        self.budget * self.load.max(LOAD_MIN)
    }

    /// The shortest period from now on: with many targets each gets fewer windows, because their probes are attached one after the other.
    pub fn set_period_min(&mut self, seconds: f64) {
        self.period_min_s = seconds.max(0.0);
    }

    /// Another budget from now on.
    pub fn set_budget(&mut self, budget: f64) {
        self.budget = budget.clamp(BUDGET_MIN, 1.0);
    }

    /// The budget.
    #[must_use]
    pub fn budget(&self) -> f64 {
        self.budget
    }

    /// How the target is to be traced now.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Estimated share of its running time that the target lost so far.
    #[must_use]
    pub fn slowdown_est(&self) -> f64 {
        self.share_of_run(self.lost_s)
    }

    /// Seconds that the target lost as a share of its running time.
    #[must_use]
    pub fn share_of_run(&self, lost_s: f64) -> f64 {
        if self.run_s > 0.0 { (lost_s / self.run_s).min(1.0) } else { 0.0 }
    }

    /// Whether the cost of its probes is not known yet.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        self.lost.is_none()
    }

    /// Recent running time of the target per second.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.load
    }

    /// Seconds that were lost beyond the budget; negative = saved.
    #[must_use]
    pub fn debt_s(&self) -> f64 {
        self.debt_s
    }

    /// Seconds that the target ran while it was watched.
    #[must_use]
    pub fn run_s(&self) -> f64 {
        self.run_s
    }

    /// Seconds lost in all, estimated.
    #[must_use]
    pub fn lost_s(&self) -> f64 {
        self.lost_s
    }

    /// Notes that `seconds` have passed by the clock, in which the target ran for `run_s`.
    pub fn elapse(&mut self, seconds: f64, run_s: f64) {
        if seconds <= 0.0 {
            return;
        }
        self.watched_s += seconds;
        self.run_s += run_s;
        let weight = (seconds / (LOAD_PRIOR_S + self.watched_s).min(LOAD_OVER_S)).min(1.0);
        self.load += weight * (run_s / seconds - self.load);
        self.debt_s = (self.debt_s - self.budget * run_s).max(-SAVED_S * self.allowed());
    }

    /// Learns what a hit of this target costs. Those of another one's, or the calibration's, are a guess: stacks have other depths, and some
    /// functions have no instruction that the kernel emulates.
    pub fn learn(&mut self, hits: u64, spent_s: f64) {
        if hits >= HITS_TOLD_MIN {
            self.hit_s = spent_s / hits as f64;
        }
    }

    /// A window was closed, or a period of a full trace is over.
    pub fn spent(&mut self, cost: WindowCost) {
        // A thread loses at most the time that passes; more threads than run on average may be hit.
        let per_s = (cost.lost_s / cost.open_s.max(1e-6)).min(LOST_MAX * self.load.max(1.0));
        let fixed_s = if cost.tier == Tier::Windows { AROUND_WINDOW_S * self.load.min(1.0) } else { 0.0 };
        let around_s = cost.around_s + fixed_s;
        self.lost_s += cost.lost_s + around_s;
        self.debt_s += cost.lost_s + around_s;
        if cost.tier == Tier::Windows {
            self.around_s += NEWEST * (around_s - self.around_s);
        }
        self.lost = Some(self.lost.map_or(per_s, |mean| mean + NEWEST * (per_s - mean)));
        self.windows += 1;
        self.choose_tier(per_s);
    }

    fn choose_tier(&mut self, newest: f64) {
        let Some(mean) = self.lost else { return };
        self.tier = match self.tier {
            Tier::Windows if self.windows >= WINDOWS_BEFORE_FULL && mean.max(newest) <= FULL_SHARE * self.allowed() => Tier::Full,
            Tier::Full if mean > self.allowed() => Tier::Windows,
            tier => tier,
        };
    }

    /// A full trace spent its quota, or lost records: windows from now on.
    pub fn leave_full(&mut self) {
        self.tier = Tier::Windows;
        // Traced in full again only after some windows.
        self.windows = 0;
    }

    /// Seconds lost to other things than probes of the allocator: stacks of growth, of first touches.
    pub fn also_lost(&mut self, seconds: f64) {
        self.lost_s += seconds;
        self.debt_s += seconds;
    }

    /// Seconds until the first window may be drawn, so that the cost of the trials at the start is paid by then.
    #[must_use]
    pub fn wait_s(&self) -> f64 {
        if self.windows > 0 { 0.0 } else { (self.debt_s / self.allowed()).clamp(0.0, WAIT_MAX_S) }
    }

    /// Hits after which a window closes early. Short windows cannot cost more than their own time.
    #[must_use]
    pub fn quota(&self, class: WindowClass) -> u64 {
        match class {
            // Far more than any machine can do in that time.
            WindowClass::Short | WindowClass::Medium => u64::from(u32::MAX),
            WindowClass::Long | WindowClass::Longest => self.hits_in(STALL_MAX_S),
        }
    }

    /// Hits that a full trace may have in the next second. A target known to be quiet may have a burst; an unknown one as many hits as a
    /// trial may cost. Neither may cost more than what a minute's budget pays, but for the short bursts of a quiet one.
    #[must_use]
    pub fn full_quota(&self) -> u64 {
        let minute_s = SAVED_S * self.allowed();
        let burst_s = if self.lost.is_some() { minute_s.clamp(TRIAL_S, STALL_MAX_S) } else { minute_s.min(TRIAL_S) };
        self.hits_in(self.allowed() + burst_s).max(1)
    }

    /// Hits that cost this much.
    fn hits_in(&self, seconds: f64) -> u64 {
        (seconds / self.hit_s.max(HIT_MIN_S)) as u64
    }

    /// The classes of windows that the target's budget allows, each with its period.
    #[must_use]
    pub fn periods(&self) -> Vec<(WindowClass, f64)> {
        // Not known yet: as if the probes took all of its threads' time.
        let lost = self.lost.unwrap_or(self.load.max(LOAD_MIN)).max(1e-9);
        // A debt is paid back over the next cycles, not all in one.
        let strain = 1.0 + (self.debt_s / (STRAIN_S * self.allowed())).clamp(0.0, 10.0);
        let bearable = |class: &WindowClass| match class {
            WindowClass::Short => true,
            _ if self.lost.is_none() => false,
            _ => lost * class.length_s() <= STALL_MAX_S,
        };
        let period = |class: WindowClass| {
            let cost_s = lost * class.length_s() + self.around_s;
            (
                class,
                (cost_s / (self.allowed() - self.reserved).max(self.allowed() * (1.0 - RESERVED_MAX)) * strain)
                    .clamp(self.period_min_s.max(PERIOD_MIN_LENGTHS * class.length_s()).min(PERIOD_MAX_S), PERIOD_MAX_S),
            )
        };
        WindowClass::ALL.into_iter().filter(bearable).map(period).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::governor::schedule::Schedule;

    const COSTS: HitCosts = HitCosts { allocation_ns: 2_000.0, free_ns: 1_000.0, spread: 0.1, traps: None, step_ns: 0.0 };

    #[test]
    fn a_target_whose_hits_cost_ten_times_as_much_may_have_a_tenth_of_them() {
        let mut pace = Pace::new(0.05, 1.0, COSTS);
        let [full, long] = [pace.full_quota(), pace.quota(WindowClass::Long)];
        // Too few to tell.
        pace.learn(10, 1.0);
        assert_eq!([pace.full_quota(), pace.quota(WindowClass::Long)], [full, long]);
        pace.learn(10_000, 10_000.0 * 10.0 * COSTS.mean_s());
        for (now, before) in [(pace.full_quota(), full), (pace.quota(WindowClass::Long), long)] {
            assert!(now.abs_diff(before / 10) <= 1, "{now} after {before}");
        }
    }

    /// Runs a target that does `pairs_per_s` of its own time for `wall_s`; the share of its running time lost.
    fn run(budget: f64, pairs_per_s: f64, wall_s: f64) -> (f64, Pace) {
        run_busy(budget, pairs_per_s, wall_s, 1.0)
    }

    /// A target that runs for a share of the time, in which it does so many pairs per second.
    fn run_busy(budget: f64, pairs_per_s: f64, wall_s: f64, busy: f64) -> (f64, Pace) {
        let mut pace = Pace::new(budget, 1.0, COSTS);
        let mut schedule = Schedule::new(5, 0.0);
        let (mut now_s, mut lost_s, mut run_all_s) = (0.0, 0.0, 0.0);
        let pair_s = COSTS.mean_s() * 2.0;
        while now_s < wall_s {
            let cycle = schedule.draw(now_s, &pace.periods()).unwrap();
            let mut length_s = if pace.tier() == Tier::Full { 1.0 } else { cycle.class.length_s() };
            let mut pairs = length_s * busy / (1.0 / pairs_per_s + pair_s * busy);
            let quota = pace.full_quota() as f64 / 2.0;
            let burst = pace.tier() == Tier::Full && pairs > quota;
            if burst {
                (pairs, length_s) = (quota, length_s * quota / pairs);
            }
            lost_s += pairs * pair_s;
            let end_s = if pace.tier() == Tier::Full { now_s + 1.0 } else { cycle.end_s };
            let lost_here_s = pairs * pair_s;
            // It computes for a share of the time, whatever its probes take.
            let run_s = (end_s - now_s - lost_here_s) * busy + lost_here_s;
            run_all_s += run_s;
            pace.elapse(end_s - now_s, run_s);
            pace.spent(WindowCost { lost_s: lost_here_s, around_s: 0.0, open_s: length_s, tier: pace.tier() });
            if burst {
                pace.leave_full();
            }
            now_s = end_s;
            if pace.tier() == Tier::Full {
                schedule.restart(now_s);
            }
        }
        (lost_s / run_all_s, pace)
    }

    #[test]
    fn the_budget_holds_at_every_rate() {
        for pairs_per_s in [1e2, 1e3, 1e4, 1e5, 1e6, 1e8] {
            for budget in [0.001, 0.01, 0.05] {
                let (lost, pace) = run(budget, pairs_per_s, 3_000.0);
                assert!(lost <= budget * 1.05, "{pairs_per_s} pairs/s at {budget}: lost {lost}");
                assert!(pace.slowdown_est() >= lost * 0.9, "{lost} {pace:?}");
            }
        }
    }

    #[test]
    fn the_budget_is_of_the_time_that_it_runs() {
        for busy in [0.02, 0.1, 0.44] {
            for pairs_per_s in [1e3, 1e5, 1e7] {
                let (lost, pace) = run_busy(0.01, pairs_per_s, 6_000.0, busy);
                assert!(lost <= 0.0105, "{pairs_per_s} pairs/s for {busy} of the time: lost {lost}");
                assert!(lost >= 0.003 || pairs_per_s < 1e5, "{pairs_per_s} pairs/s for {busy}: lost only {lost}");
                assert!((pace.slowdown_est() / lost - 1.0).abs() < 0.1, "{lost} {pace:?}");
            }
        }
    }

    #[test]
    fn a_target_that_hardly_runs_loses_no_more_than_a_minutes_budget_to_its_trial() {
        let quota_s = |load: f64| Pace::new(0.01, load, COSTS).full_quota() as f64 * COSTS.mean_s();
        assert!((quota_s(0.002) - 61.0 * 0.01 * 0.002).abs() < 1e-5, "{}", quota_s(0.002));
        assert!((quota_s(1.0) - 0.01 - TRIAL_S).abs() < 1e-5, "{}", quota_s(1.0));
        // It wakes up five times a second for as long as the two hundred pairs take that it does then.
        let mut pace = Pace::new(0.01, 0.002, COSTS);
        let (mut lost_s, mut now_s, mut schedule) = (0.0, 0.0, Schedule::new(5, 0.0));
        let trial_s = pace.full_quota() as f64 * COSTS.mean_s();
        pace.elapse(0.2, 0.0004);
        pace.spent(WindowCost { lost_s: trial_s, around_s: 0.0, open_s: 0.2, tier: Tier::Full });
        pace.leave_full();
        lost_s += trial_s;
        schedule.restart(pace.wait_s());
        while now_s < 600.0 {
            let cycle = schedule.draw(now_s, &pace.periods()).unwrap();
            let bursts = ((cycle.open_s + cycle.class.length_s()) * 5.0).floor() - (cycle.open_s * 5.0).floor();
            let lost_here_s = bursts * COSTS.seconds(200, 200);
            pace.elapse(cycle.end_s - now_s, 0.002 * (cycle.end_s - now_s) + lost_here_s);
            pace.spent(WindowCost { lost_s: lost_here_s, around_s: 0.0, open_s: cycle.class.length_s(), tier: Tier::Windows });
            lost_s += lost_here_s;
            now_s = cycle.end_s;
        }
        assert!(lost_s / (0.002 * now_s) <= 0.02, "{lost_s} s of {now_s} s: {pace:?}");
    }

    #[test]
    fn the_first_windows_wait_until_the_trials_are_paid() {
        let mut pace = Pace::new(0.01, 1.0, COSTS);
        pace.elapse(0.03, 0.03);
        pace.spent(WindowCost { lost_s: 0.027, around_s: 0.0, open_s: 0.03, tier: Tier::Full });
        pace.leave_full();
        pace.also_lost(0.05);
        pace.elapse(5.0, 5.0);
        assert!((2.6..2.8).contains(&pace.wait_s()), "{}", pace.wait_s());
        pace.elapse(3.0, 3.0);
        assert!(pace.wait_s() <= 0.0);
        pace.spent(WindowCost { lost_s: 0.027, around_s: 0.0, open_s: 0.2, tier: Tier::Windows });
        assert!(pace.wait_s() <= 0.0, "debts of windows are paid by the cycles");
    }

    #[test]
    fn a_busy_target_is_not_starved_of_its_budget() {
        for pairs_per_s in [1e5, 1e6, 1e8] {
            let (lost, _) = run(0.01, pairs_per_s, 5_000.0);
            assert!(lost >= 0.005, "{pairs_per_s} pairs/s: lost only {lost}");
        }
    }

    #[test]
    fn a_process_that_allocates_little_is_traced_in_full() {
        // 1,000 pairs per second cost 0.3 %, 3,000 cost 0.9 %.
        for pairs_per_s in [1_000.0, 3_000.0] {
            let (lost, pace) = run(0.01, pairs_per_s, 300.0);
            assert_eq!(pace.tier(), Tier::Full);
            assert!(lost < 0.01, "{lost}");
        }
        assert_eq!(run(0.01, 1e5, 300.0).1.tier(), Tier::Windows);
    }

    #[test]
    fn a_full_trace_ends_when_the_target_gets_busy() {
        let mut pace = run(0.01, 1_000.0, 300.0).1;
        assert_eq!(pace.tier(), Tier::Full);
        pace.spent(WindowCost { lost_s: 0.15, around_s: 0.0, open_s: 1.0, tier: Tier::Full });
        assert_eq!(pace.tier(), Tier::Windows);
    }

    #[test]
    fn windows_get_what_other_probes_leave_of_the_budget() {
        let mut pace = run(0.01, 1e6, 3_000.0).1;
        let before = pace.periods();
        pace.set_reserved(0.005);
        for ((_, before_s), (_, after_s)) in before.iter().zip(pace.periods()).filter(|((_, before_s), _)| *before_s > PERIOD_MIN_S) {
            assert!((after_s / before_s - 2.0).abs() < 1e-6, "{before_s} {after_s}");
        }
        pace.set_reserved(1.0);
        assert!(pace.periods().iter().all(|(_, period_s)| period_s.is_finite() && *period_s > 0.0));
    }

    #[test]
    fn a_trial_of_a_moment_does_not_keep_windows_away() {
        let mut pace = Pace::new(0.05, 1.0, COSTS);
        pace.elapse(1.0, 1.0);
        pace.spent(WindowCost { lost_s: 0.05, around_s: 0.0, open_s: 1e-6, tier: Tier::Full });
        pace.leave_full();
        assert!(pace.periods()[0].1 < 10.0 && pace.wait_s() < 5.0, "{:?}", pace.periods());
    }

    #[test]
    fn long_windows_are_only_used_where_the_budget_allows_them() {
        let mut pace = Pace::new(0.01, 1.0, COSTS);
        assert_eq!(pace.periods().len(), 1, "nothing is known: {:?}", pace.periods());
        pace.spent(WindowCost { lost_s: 0.018, around_s: 0.0, open_s: 0.02, tier: Tier::Windows });
        let classes: Vec<_> = pace.periods().iter().map(|(class, _)| *class).collect();
        assert_eq!(classes, [WindowClass::Short, WindowClass::Medium]);
        for _ in 0..30 {
            pace.spent(WindowCost { lost_s: 0.0003, around_s: 0.0, open_s: 0.2, tier: Tier::Windows });
        }
        assert!(pace.periods().iter().any(|(class, _)| *class == WindowClass::Longest), "{:?}", pace.periods());
    }
}
