//! The census thread's budget of CPU time. Pure: times are parameters.
//!
//! Two accounts, one for the frequent cheap censuses and one for the rare full ones, are each filled at half the rate; when one is full,
//! the rest goes to the other, so nothing is lost while both kinds have work, and neither starves the other. Work may start while its
//! account is above zero and may overdraw it; the debt is paid before the next work of that kind.
//!
//! Requests of users have a third account, so that they are neither refused because of the rounds nor paid for by them.

/// Most seconds of filling that an account holds, so that an idle hour does not become a burst.
const HELD_S: f64 = 30.0;
/// Requests of users may take this many times the rate, in addition to it: 2 % of a core by default.
const ASKED_TIMES: f64 = 4.0;
/// Seconds of filling that the account for requests holds from the start: 1.2 s of CPU time by default, enough for maps of several GiB.
const ASKED_HELD_S: f64 = 60.0;

/// What CPU time is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Finding processes, publishing, and censuses at level top.
    Cheap,
    /// Sampled and full censuses.
    Full,
    /// The full or sampled census of a process without a verdict: paid by the account of full ones, then by the other.
    First,
    /// A request of a user.
    Asked,
}

/// Three accounts, in seconds of CPU time.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    rate: f64,
    cheap_s: f64,
    full_s: f64,
    asked_s: f64,
}

impl Budget {
    /// `rate` is the share of one core, 1 = all of it; `credit_s` seconds of CPU time are available at once, half for each kind of the
    /// rounds' work. The account for requests starts full.
    #[must_use]
    pub fn new(rate: f64, credit_s: f64) -> Self {
        Self { rate, cheap_s: credit_s / 2.0, full_s: credit_s / 2.0, asked_s: rate * ASKED_TIMES * ASKED_HELD_S }
    }

    /// Changes the rate; accounts stay as they are.
    pub fn set_rate(&mut self, rate: f64) {
        self.rate = rate;
    }

    /// Fills the accounts for `elapsed_s` seconds of wall time.
    pub fn fill(&mut self, elapsed_s: f64) {
        let most = self.rate * HELD_S / 2.0;
        let brought = self.rate * elapsed_s.max(0.0);
        let room = |account: f64| (most - account).max(0.0);
        let cheap = (brought / 2.0).max(brought - room(self.full_s)).min(room(self.cheap_s));
        let full = (brought - cheap).min(room(self.full_s));
        self.cheap_s += cheap;
        self.full_s += full;
        let asked_rate = self.rate * ASKED_TIMES;
        self.asked_s = (self.asked_s + asked_rate * elapsed_s.max(0.0)).min(asked_rate * ASKED_HELD_S);
    }

    /// Charges used time.
    pub fn spend(&mut self, work: Work, cpu_s: f64) {
        let cpu_s = cpu_s.max(0.0);
        match work {
            Work::Cheap => self.cheap_s -= cpu_s,
            Work::Full => self.full_s -= cpu_s,
            // What one account cannot pay, the other does; only the one that allowed the work is overdrawn.
            Work::First if self.full_s <= 0.0 => self.cheap_s -= cpu_s,
            Work::First => {
                let from_full = cpu_s.min(self.full_s.max(0.0));
                let from_cheap = (cpu_s - from_full).min(self.cheap_s.max(0.0));
                self.cheap_s -= from_cheap;
                self.full_s -= cpu_s - from_cheap;
            }
            Work::Asked => self.asked_s -= cpu_s,
        }
    }

    /// Charges a piece of cheap work: the part above `cheap_max_s` to the account of full ones, as far as that has credit, so that one long
    /// search does not delay all other processes; but no further, because many of them would overspend.
    pub fn spend_cheap(&mut self, cpu_s: f64, cheap_max_s: f64) {
        let lent_s = (cpu_s - cheap_max_s).clamp(0.0, self.full_s.max(0.0));
        self.full_s -= lent_s;
        self.spend(Work::Cheap, cpu_s - lent_s);
    }

    /// An account, and its rate.
    fn account(&self, work: Work) -> (f64, f64) {
        match work {
            Work::Cheap => (self.cheap_s, self.rate / 2.0),
            Work::Full => (self.full_s, self.rate / 2.0),
            Work::First => (self.cheap_s.max(self.full_s), self.rate / 2.0),
            Work::Asked => (self.asked_s, self.rate * ASKED_TIMES),
        }
    }

    /// Whether work of this kind may start.
    #[must_use]
    pub fn allows(&self, work: Work) -> bool {
        self.wait_s(work) == 0.0
    }

    /// Seconds of wall time until work of this kind may start; 0 = now.
    #[must_use]
    pub fn wait_s(&self, work: Work) -> f64 {
        let (account, rate) = self.account(work);
        if account > 0.0 { 0.0 } else { -account / rate.max(1e-6) + 1e-3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_a_long_time_spending_equals_the_rate() {
        let mut budget = Budget::new(0.01, 0.0);
        let mut spent = [0.0, 0.0];
        for _ in 0..100_000 {
            budget.fill(0.1);
            for (index, (work, cost)) in [(Work::Cheap, 0.002), (Work::Full, 0.3)].into_iter().enumerate() {
                while budget.allows(work) {
                    budget.spend(work, cost);
                    spent[index] += cost;
                }
            }
        }
        // 10,000 seconds at 1 % are 100 seconds.
        let total = spent[0] + spent[1];
        assert!((99.0..101.0).contains(&total), "{spent:?}");
        assert!((48.0..52.0).contains(&spent[0]), "{spent:?}");
    }

    #[test]
    fn one_kind_gets_what_the_other_does_not_need() {
        for idle in [Work::Cheap, Work::Full] {
            let busy = if idle == Work::Cheap { Work::Full } else { Work::Cheap };
            let mut budget = Budget::new(0.01, 0.0);
            let mut spent = 0.0;
            for _ in 0..100_000 {
                budget.fill(0.1);
                while budget.allows(busy) {
                    budget.spend(busy, 0.01);
                    spent += 0.01;
                }
            }
            assert!((98.0..101.0).contains(&spent), "{spent}");
        }
    }

    #[test]
    fn a_debt_delays_only_work_of_its_own_kind() {
        let mut budget = Budget::new(0.02, 0.2);
        budget.spend(Work::Full, 1.1);
        assert!(!budget.allows(Work::Full) && budget.allows(Work::Cheap));
        let wait_s = budget.wait_s(Work::Full);
        assert!((99.0..101.0).contains(&wait_s), "{wait_s}");
    }

    #[test]
    fn a_first_round_of_long_searches_stays_within_its_credit() {
        let (rate, credit_s, piece_s) = (0.005, 1.0, 0.04);
        let mut budget = Budget::new(rate, credit_s);
        let mut spent_s = 0.0;
        for second in 1..=300 {
            budget.fill(1.0);
            while budget.allows(Work::Cheap) {
                budget.spend_cheap(piece_s, 0.02);
                spent_s += piece_s;
            }
            let most_s = credit_s + rate * f64::from(second) + piece_s;
            assert!(spent_s <= most_s + 1e-9, "{spent_s} s after {second} s, {most_s} s were available");
        }
        // The full censuses' account has no debt, and nearly all of the credit has been used.
        assert!(budget.wait_s(Work::Full) < 1.0 && spent_s > 2.3, "{budget:?} {spent_s}");
    }

    #[test]
    fn requests_have_their_own_account_with_its_own_limit() {
        let mut budget = Budget::new(0.005, 1.0);
        budget.spend(Work::Cheap, 10.0);
        budget.spend(Work::Full, 10.0);
        let (mut spent_s, mut refused) = (0.0, 0);
        for _ in 0..600 {
            budget.fill(1.0);
            if budget.allows(Work::Asked) {
                budget.spend(Work::Asked, 0.2);
                spent_s += 0.2;
            } else {
                refused += 1;
            }
        }
        assert!(!budget.allows(Work::Cheap) && !budget.allows(Work::Full), "the rounds pay for themselves");
        // 1.2 s at once, 2 % of ten minutes, and one request that overdraws the account.
        assert!((12.0..=1.2 + 12.0 + 0.2).contains(&spent_s) && refused > 0, "{spent_s} {refused}");
    }

    #[test]
    fn first_verdicts_use_both_accounts_and_overdraw_only_one() {
        let mut budget = Budget::new(0.01, 1.0);
        budget.spend(Work::First, 0.8);
        assert!(!budget.allows(Work::Full) && budget.allows(Work::Cheap) && budget.allows(Work::First));
        budget.spend(Work::First, 0.5);
        assert!(!budget.allows(Work::Cheap) && !budget.allows(Work::First));
        assert!((budget.cheap_s + budget.full_s + 0.3).abs() < 1e-9, "{budget:?}");
        // An account in debt is not charged further.
        let debt_s = budget.full_s;
        budget.cheap_s = 0.001;
        budget.spend(Work::First, 0.01);
        assert!((budget.full_s - debt_s).abs() < 1e-9 && budget.cheap_s < 0.0, "{budget:?}");
    }

    #[test]
    fn idle_time_does_not_become_a_burst() {
        let mut budget = Budget::new(0.01, 0.0);
        budget.fill(3600.0);
        budget.fill(3600.0);
        assert!(budget.cheap_s + budget.full_s <= 0.3 + 1e-9);
    }
}
