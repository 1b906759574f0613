//! How much of the time a target's probes may be in. Pure.
//!
//! With `lost` the share of a window that the target lost to its probes (hits × cost of a hit, at most 1: a target cannot lose more
//! than the time that probes are in), a window of length L costs `lost · L` and may stand for no less than `lost · L / budget`. What was
//! spent beyond the budget is a debt that later cycles pay.
//!
//! A target whose whole trace fits the budget is traced in full. Every target begins so, with a quota that costs no more than one short
//! window: one that allocates little is then known in full from its first moment, and of another the quota tells how busy it is. Its
//! windows begin when that is paid, or some seconds later.

use super::cost::HitCosts;
use super::schedule::WindowClass;

/// Longest time that a target may lose within one window: a budget kept on average is no excuse for a service that stands still.
pub const STALL_MAX_S: f64 = 0.25;
/// What taking probes in and out costs the target beside its hits meanwhile: the kernel changes its code under the lock of its address
/// space.
const AROUND_WINDOW_S: f64 = 0.001;
/// Weight of the newest window in the mean share lost.
const NEWEST: f64 = 0.3;
/// Of the budget, what a full trace may need: it may not be left again at the first busy second.
const FULL_SHARE: f64 = 0.7;
/// Windows to see before a target is traced in full.
const WINDOWS_BEFORE_FULL: u64 = 3;
/// Above this share lost, hits times cost is no longer trusted: such a target stands still while its probes are in.
const SATURATED: f64 = 0.5;
/// Longest period: something is learnt of every target once in an hour.
const PERIOD_MAX_S: f64 = 3600.0;
/// Shortest period, in lengths of its window. A window that begins late reaches beyond its period, and no other can begin there: that
/// time is covered by (length / period)² / 2 less than it should be, which this keeps at a fiftieth.
const PERIOD_MIN_LENGTHS: f64 = 5.0;
/// Shortest period at all: going in and out takes a tenth of a second, in which no other window can begin.
pub const PERIOD_MIN_S: f64 = 1.0;
/// Longest time that the first windows of a target wait for its trials to be paid, for a short recording has to learn something; the cycles
/// pay the rest.
const WAIT_MAX_S: f64 = 3.0;
/// Seconds of the budget by which a debt doubles the periods.
const STRAIN_S: f64 = 15.0;
/// Of the budget, what may be reserved: windows are never without any.
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
    /// Allocations that hit a probe in the window.
    pub allocations: u64,
    /// Frees likewise.
    pub frees: u64,
    /// Hits before and after it, while its probes went in and out.
    pub hits_around: u64,
    /// Seconds that it was open.
    pub open_s: f64,
    /// How the target was traced: a full trace does not pay for going in and out.
    pub tier: Tier,
}

impl WindowCost {
    /// Share of the window that the target lost, at most 1.
    #[must_use]
    pub fn share(&self, costs: &HitCosts) -> f64 {
        let by_hits_s = costs.seconds(self.allocations, self.frees);
        if by_hits_s >= SATURATED * self.open_s { 1.0 } else { by_hits_s / self.open_s }
    }

    /// Seconds that it lost before and after the window.
    #[must_use]
    pub fn around_s(&self, costs: &HitCosts) -> f64 {
        let fixed_s = if self.tier == Tier::Windows { AROUND_WINDOW_S } else { 0.0 };
        self.hits_around as f64 * costs.mean_s() + fixed_s
    }
}

/// One target's pace.
#[derive(Debug, Clone)]
pub struct Pace {
    budget: f64,
    costs: HitCosts,
    /// Mean share of a window that was lost; `None` before the first.
    lost: Option<f64>,
    /// Mean seconds lost before and after a window.
    around_s: f64,
    windows: u64,
    /// Seconds lost in all.
    lost_s: f64,
    /// Seconds that the target was watched, probes in or out.
    watched_s: f64,
    /// Spent beyond the budget, seconds; negative = saved, which is not carried far.
    debt_s: f64,
    tier: Tier,
    period_min_s: f64,
    /// Share of the time that something else takes of the budget.
    reserved: f64,
}

impl Pace {
    /// A target about which nothing is known. `budget`: share of its time that it may lose, 0.01 = 1 %.
    #[must_use]
    pub fn new(budget: f64, costs: HitCosts) -> Self {
        Self {
            budget: budget.clamp(BUDGET_MIN, 1.0),
            costs,
            lost: None,
            around_s: AROUND_WINDOW_S,
            windows: 0,
            lost_s: 0.0,
            watched_s: 0.0,
            debt_s: 0.0,
            tier: Tier::Full,
            period_min_s: PERIOD_MIN_S,
            reserved: 0.0,
        }
    }

    /// Share of its time that the target loses to other probes from now on (their cost is told by [`also_lost`](Self::also_lost)): windows
    /// get what is left of the budget.
    pub fn set_reserved(&mut self, share: f64) {
        self.reserved = share.clamp(0.0, self.budget * RESERVED_MAX);
    }

    /// The shortest period from now on: of many targets each gets fewer windows, because they go in and out one after the other.
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

    /// Estimated share of its time that the target lost so far.
    #[must_use]
    pub fn slowdown_est(&self) -> f64 {
        if self.watched_s > 0.0 { self.lost_s / self.watched_s } else { 0.0 }
    }

    /// Mean share of an open window that is lost; `None` before the first.
    #[must_use]
    pub fn lost_in_window(&self) -> Option<f64> {
        self.lost
    }

    /// Seconds lost in all, estimated.
    #[must_use]
    pub fn lost_s(&self) -> f64 {
        self.lost_s
    }

    /// Time goes by.
    pub fn elapse(&mut self, seconds: f64) {
        self.watched_s += seconds;
        // What was not spent for a minute is gone: a quiet hour is no licence for a slow second.
        self.debt_s = (self.debt_s - self.budget * seconds).max(-60.0 * self.budget);
    }

    /// A window was closed, or a piece of a full trace is over.
    pub fn spent(&mut self, cost: WindowCost) {
        let (share, around_s) = (cost.share(&self.costs), cost.around_s(&self.costs));
        let lost_s = share * cost.open_s + around_s;
        self.lost_s += lost_s;
        self.debt_s += lost_s;
        if cost.tier == Tier::Windows {
            self.around_s += NEWEST * (around_s - self.around_s);
        }
        self.lost = Some(self.lost.map_or(share, |mean| mean + NEWEST * (share - mean)));
        self.windows += 1;
        self.choose_tier(share);
    }

    fn choose_tier(&mut self, newest: f64) {
        let Some(mean) = self.lost else { return };
        self.tier = match self.tier {
            Tier::Windows if self.windows >= WINDOWS_BEFORE_FULL && mean.max(newest) <= FULL_SHARE * self.budget => Tier::Full,
            Tier::Full if mean > self.budget => Tier::Windows,
            tier => tier,
        };
    }

    /// A full trace spent its quota, or lost records: windows from now on.
    pub fn leave_full(&mut self) {
        self.tier = Tier::Windows;
        // Seen again only after some windows.
        self.windows = 0;
    }

    /// Seconds lost to something else than probes of the allocator: stacks of growth, of first touches.
    pub fn also_lost(&mut self, seconds: f64) {
        self.lost_s += seconds;
        self.debt_s += seconds;
    }

    /// Seconds until the first window may be drawn, so that what the trials at the start cost is paid by then.
    #[must_use]
    pub fn wait_s(&self) -> f64 {
        if self.windows > 0 { 0.0 } else { (self.debt_s / self.budget).clamp(0.0, WAIT_MAX_S) }
    }

    /// Hits after which a window closes early. Short windows cannot cost more than their own time.
    #[must_use]
    pub fn quota(&self, class: WindowClass) -> u64 {
        let hits = |seconds: f64| (seconds / self.costs.mean_s()) as u64;
        match class {
            // Far above what a machine of this kind can do in that time.
            WindowClass::Short | WindowClass::Medium => u64::from(u32::MAX),
            WindowClass::Long | WindowClass::Longest => hits(STALL_MAX_S),
        }
    }

    /// Hits that a full trace may have in the next second. A known quiet target may have a burst; of an unknown one as many as a short
    /// window may cost.
    #[must_use]
    pub fn full_quota(&self) -> u64 {
        let burst_s = if self.lost.is_some() { STALL_MAX_S } else { WindowClass::Short.length_s() };
        ((self.budget + burst_s) / self.costs.mean_s()) as u64
    }

    /// The classes of windows that the target can bear, each with its period.
    #[must_use]
    pub fn periods(&self) -> Vec<(WindowClass, f64)> {
        // Nothing known: as if it stood still.
        let lost = self.lost.unwrap_or(1.0).max(1e-6);
        // A debt is paid back over the next cycles, not all in one.
        let strain = 1.0 + (self.debt_s / (STRAIN_S * self.budget)).clamp(0.0, 10.0);
        let bearable = |class: &WindowClass| match class {
            WindowClass::Short => true,
            _ if self.lost.is_none() => false,
            _ => lost * class.length_s() <= STALL_MAX_S,
        };
        let period = |class: WindowClass| {
            let cost_s = lost * class.length_s() + self.around_s;
            (
                class,
                (cost_s / (self.budget - self.reserved) * strain)
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

    const COSTS: HitCosts = HitCosts { allocation_ns: 2_000.0, free_ns: 1_000.0, spread: 0.1 };

    /// Runs a target that does `pairs_per_s` of its own time for `wall_s`; the share of time lost.
    fn run(budget: f64, pairs_per_s: f64, wall_s: f64) -> (f64, Pace) {
        let mut pace = Pace::new(budget, COSTS);
        let mut schedule = Schedule::new(5, 0.0);
        let (mut now_s, mut lost_s) = (0.0, 0.0);
        let pair_s = COSTS.mean_s() * 2.0;
        while now_s < wall_s {
            let cycle = schedule.draw(now_s, &pace.periods()).unwrap();
            let mut length_s = if pace.tier() == Tier::Full { 1.0 } else { cycle.class.length_s() };
            let mut pairs = length_s / (1.0 / pairs_per_s + pair_s);
            let quota = pace.full_quota() as f64 / 2.0;
            let burst = pace.tier() == Tier::Full && pairs > quota;
            if burst {
                (pairs, length_s) = (quota, length_s * quota / pairs);
            }
            lost_s += pairs * pair_s;
            let end_s = if pace.tier() == Tier::Full { now_s + 1.0 } else { cycle.end_s };
            pace.elapse(end_s - now_s);
            pace.spent(WindowCost { allocations: pairs as u64, frees: pairs as u64, hits_around: 0, open_s: length_s, tier: pace.tier() });
            if burst {
                pace.leave_full();
            }
            now_s = end_s;
            if pace.tier() == Tier::Full {
                schedule.restart(now_s);
            }
        }
        (lost_s / now_s, pace)
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
    fn the_first_windows_wait_until_the_trials_are_paid() {
        let mut pace = Pace::new(0.01, COSTS);
        pace.spent(WindowCost { allocations: 9_000, frees: 9_000, hits_around: 0, open_s: 0.03, tier: Tier::Full });
        pace.leave_full();
        pace.also_lost(0.05);
        assert!((WAIT_MAX_S..=WAIT_MAX_S).contains(&pace.wait_s()), "{}", pace.wait_s());
        pace.elapse(6.0);
        assert!((1.9..2.1).contains(&pace.wait_s()), "{}", pace.wait_s());
        pace.elapse(3.0);
        assert!(pace.wait_s() <= 0.0);
        pace.spent(WindowCost { allocations: 9_000, frees: 9_000, hits_around: 0, open_s: 0.2, tier: Tier::Windows });
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
        // 1,000 pairs a second cost 0.3 %, 3,000 cost 0.9 %.
        for pairs_per_s in [1_000.0, 3_000.0] {
            let (lost, pace) = run(0.01, pairs_per_s, 300.0);
            assert_eq!(pace.tier(), Tier::Full);
            assert!(lost < 0.01, "{lost}");
        }
        assert_eq!(run(0.01, 1e5, 300.0).1.tier(), Tier::Windows);
    }

    #[test]
    fn a_full_trace_is_left_when_it_gets_busy() {
        let mut pace = run(0.01, 1_000.0, 300.0).1;
        assert_eq!(pace.tier(), Tier::Full);
        pace.spent(WindowCost { allocations: 50_000, frees: 50_000, hits_around: 0, open_s: 1.0, tier: Tier::Full });
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
    fn long_windows_are_only_for_those_who_bear_them() {
        let mut pace = Pace::new(0.01, COSTS);
        assert_eq!(pace.periods().len(), 1, "nothing is known: {:?}", pace.periods());
        pace.spent(WindowCost { allocations: 6_000, frees: 6_000, hits_around: 0, open_s: 0.02, tier: Tier::Windows });
        let classes: Vec<_> = pace.periods().iter().map(|(class, _)| *class).collect();
        assert_eq!(classes, [WindowClass::Short, WindowClass::Medium]);
        for _ in 0..30 {
            pace.spent(WindowCost { allocations: 100, frees: 100, hits_around: 0, open_s: 0.2, tier: Tier::Windows });
        }
        assert!(pace.periods().iter().any(|(class, _)| *class == WindowClass::Longest), "{:?}", pace.periods());
    }
}
