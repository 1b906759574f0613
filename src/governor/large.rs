//! Whether the probes for large blocks stay in a target. Pure.
//!
//! They see every block that the allocator's thread cache does not serve, from the moment they are attached, and the result is only valid
//! if none is missed: they are attached all the time or not at all. So they are tried for a second; kept for as long as their cost fits a
//! part of the target's budget; removed when it does not, together with all results; and tried again later, each time after twice the wait.
//!
//! Programs have busy seconds: unspent budget is saved for them, up to half a minute's worth.

use super::cost::HitCosts;

/// Maximum share of the target's budget for these probes: the rest is for windows, which alone give data on small blocks.
pub const SHARE: f64 = 2.0 / 3.0;
/// Length of the periods in which they are accounted for, and of a trial, in seconds.
pub const PIECE_S: f64 = 1.0;
/// What a trial may cost beyond its share, in seconds: as much as a short window, and no more than the share of so long a time, which is
/// less in a target that hardly runs.
const TRIAL_S: f64 = 0.02;
const TRIAL_OVER_S: f64 = 10.0;
/// Seconds of the share that may be saved.
const SAVED_S: f64 = 30.0;
/// Longest time that the target may lose to a burst within one period, in seconds (see [`super::pace::STALL_MAX_S`]).
const BURST_MAX_S: f64 = super::pace::STALL_MAX_S;
/// Wait before the first new trial, and the longest, in seconds.
const RETRY_MIN_S: f64 = 30.0;
const RETRY_MAX_S: f64 = 3600.0;
/// Once they have been kept for so long, the wait before the next trial starts from its minimum again.
const HELD_S: f64 = 120.0;
/// Weight of the newest period in the mean.
const NEWEST: f64 = 0.3;

/// Why the probes were removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Large blocks are too frequent: they cost more than their part of the budget.
    OverShare,
    /// A burst spent its quota, and the kernel switched them off.
    Burst,
    /// Records were lost.
    Lossy,
    /// More blocks are live than can be tracked.
    TooMany,
    /// The target is traced in full, which includes large blocks.
    Full,
}

impl Left {
    /// In words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::OverShare => "large blocks are so frequent that tracking them costs more than their part of the budget",
            Self::Burst => "a burst of large blocks spent one second's allowance",
            Self::Lossy => "records were lost",
            Self::TooMany => "more large blocks are live than can be tracked",
            Self::Full => "the process is traced in full, which includes large blocks",
        }
    }
}

/// One target's account of these probes.
#[derive(Debug, Clone)]
pub struct LargePace {
    budget: f64,
    costs: HitCosts,
    /// Seconds that may be lost in the next period beyond the share.
    allowance_s: f64,
    /// Mean share of the time that they cost; `None` before the trial is over.
    mean: Option<f64>,
    /// How long they have been kept since the last trial.
    held_s: f64,
    retry_s: f64,
}

impl LargePace {
    /// A target about which nothing is known. `budget`: seconds per second that it may lose to all of its probes.
    #[must_use]
    pub fn new(budget: f64, costs: HitCosts) -> Self {
        Self { budget, costs, allowance_s: 0.0, mean: None, held_s: 0.0, retry_s: RETRY_MIN_S }
    }

    /// Another budget from now on.
    pub fn set_budget(&mut self, budget: f64) {
        self.budget = budget;
    }

    fn share(&self) -> f64 {
        self.budget * SHARE
    }

    fn saved_max_s(&self) -> f64 {
        SAVED_S * self.share()
    }

    /// Share of the target's time that they take, which windows do not get; 0 while they are removed or being tried.
    #[must_use]
    pub fn reserved(&self) -> f64 {
        self.mean.map_or(0.0, |mean| mean.min(self.share()))
    }

    /// Whether the trial is over.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.mean.is_some()
    }

    /// Hits that the next period may have.
    #[must_use]
    pub fn quota(&self) -> u64 {
        let beyond_s = match self.mean {
            None => TRIAL_S.min(self.share() * TRIAL_OVER_S),
            Some(_) => self.allowance_s.clamp(0.0, BURST_MAX_S),
        };
        ((self.share() * PIECE_S + beyond_s) / self.costs.mean_s()) as u64
    }

    /// A period of `open_s` is over that cost the target `cost_s`. Returns why they are to be removed, or `None` to keep them.
    pub fn piece(&mut self, cost_s: f64, open_s: f64) -> Option<Left> {
        let share = cost_s / open_s.max(1e-3);
        match self.mean {
            None if share > self.share() => return Some(Left::OverShare),
            None => {
                self.mean = Some(share);
                self.allowance_s = self.saved_max_s() / 2.0;
            }
            Some(mean) => {
                self.mean = Some(mean + NEWEST * (share - mean));
                self.held_s += open_s;
                self.allowance_s = (self.allowance_s + self.share() * open_s - cost_s).min(self.saved_max_s());
            }
        }
        (self.allowance_s < 0.0).then_some(Left::OverShare)
    }

    /// They were removed; seconds until they may be tried again.
    pub fn left(&mut self, why: Left) -> f64 {
        let held = self.held_s >= HELD_S;
        (self.mean, self.held_s, self.allowance_s) = (None, 0.0, 0.0);
        // They were not too expensive: they may be attached again as soon as the full trace is over.
        if why == Left::Full {
            return 0.0;
        }
        let wait_s = if held { RETRY_MIN_S } else { self.retry_s };
        self.retry_s = (2.0 * wait_s).min(RETRY_MAX_S);
        wait_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: HitCosts = HitCosts { allocation_ns: 2_000.0, free_ns: 1_000.0, spread: 0.1, traps: None, step_ns: 0.0 };
    const BUDGET: f64 = 0.01;

    /// A target with so many large pairs in each second; after how many seconds they were removed, and why.
    fn run(pace: &mut LargePace, pairs: impl Fn(u64) -> u64, seconds: u64) -> (f64, Option<(u64, Left)>) {
        let mut lost_s = 0.0;
        for second in 0..seconds {
            let (pairs, quota) = (pairs(second), pace.quota());
            if 2 * pairs > quota {
                lost_s += quota as f64 * COSTS.mean_s();
                return (lost_s, Some((second, Left::Burst)));
            }
            lost_s += COSTS.seconds(pairs, pairs);
            if let Some(left) = pace.piece(COSTS.seconds(pairs, pairs), 1.0) {
                return (lost_s, Some((second, left)));
            }
        }
        (lost_s, None)
    }

    #[test]
    fn probes_that_fit_their_part_of_the_budget_are_kept_and_their_share_is_reserved() {
        let mut pace = LargePace::new(BUDGET, COSTS);
        // 2,000 pairs are 6 ms of 6.7.
        assert_eq!(run(&mut pace, |_| 2_000, 1_000).1, None);
        assert!(pace.is_kept() && (pace.reserved() - 0.006).abs() < 1e-6, "{pace:?}");
    }

    #[test]
    fn probes_that_do_not_fit_are_removed_after_the_trial_at_a_bounded_cost() {
        for pairs in [2_500, 10_000, 1_000_000] {
            let mut pace = LargePace::new(BUDGET, COSTS);
            let (lost_s, left) = run(&mut pace, |_| pairs, 1_000);
            assert_eq!(left.map(|(second, _)| second), Some(0), "{pairs}");
            assert!(lost_s <= TRIAL_S + BUDGET, "{pairs}: {lost_s}");
            assert!(!pace.is_kept() && pace.reserved() == 0.0);
        }
    }

    /// A target that runs for a fiftieth of the time, in which a usual trial would be a minute's budget.
    #[test]
    fn a_trial_of_a_target_that_hardly_runs_costs_it_no_more_than_ten_seconds_share() {
        let mut pace = LargePace::new(BUDGET / 50.0, COSTS);
        let (lost_s, left) = run(&mut pace, |_| 1_000_000, 1);
        assert!(left.is_some() && lost_s <= BUDGET / 50.0 * (TRIAL_OVER_S + 1.0), "{lost_s}");
    }

    #[test]
    fn an_occasional_busy_second_is_paid_from_the_savings() {
        let mut pace = LargePace::new(BUDGET, COSTS);
        let (lost_s, left) = run(&mut pace, |second| if second % 60 == 59 { 25_000 } else { 500 }, 3_600);
        assert_eq!(left, None);
        assert!(lost_s / 3_600.0 < BUDGET * SHARE);
    }

    #[test]
    fn probes_above_their_share_are_removed_once_the_savings_are_spent() {
        let mut pace = LargePace::new(BUDGET, COSTS);
        let (lost_s, left) = run(&mut pace, |second| if second < 100 { 500 } else { 5_000 }, 1_000);
        // With the savings nearly spent, the next second is a burst.
        let (second, why) = left.unwrap_or((0, Left::Full));
        assert!((110..160).contains(&second) && matches!(why, Left::OverShare | Left::Burst), "{second} {why:?}");
        assert!(lost_s <= BUDGET * SHARE * (second as f64 + SAVED_S), "{lost_s}");
    }

    #[test]
    fn trials_become_rarer_until_one_succeeds() {
        let mut pace = LargePace::new(BUDGET, COSTS);
        let waits: Vec<f64> = (0..9).map(|_| pace.left(Left::Burst)).collect();
        assert_eq!(waits, [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]);
        assert_eq!(run(&mut pace, |_| 1_000, 300).1, None);
        assert_eq!(pace.left(Left::OverShare), 30.0, "it was kept for minutes");
        assert_eq!(pace.left(Left::Full), 0.0);
    }
}
