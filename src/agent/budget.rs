//! The census thread's allowance of processor time. Pure: time comes in as numbers.
//!
//! Two accounts, one for the frequent cheap censuses and one for the rare full ones, are filled at half the rate each; what one cannot
//! hold flows to the other, so nothing is lost while both kinds have work, and neither starves the other. Work may start while its
//! account is above zero and may overdraw it; the debt is paid before the next work of that kind.

/// Seconds of filling that an account holds at most, so that an idle hour does not become a burst.
const HELD_S: f64 = 30.0;

/// What processor time is spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Finding processes, publishing, and censuses at level top.
    Cheap,
    /// Sampled and full censuses.
    Full,
}

/// Two accounts, in seconds of processor time.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    rate: f64,
    cheap_s: f64,
    full_s: f64,
}

impl Budget {
    /// `rate` is the share of one core, 1 = all of it; `credit_s` seconds of processor time are there at once, half for each kind.
    #[must_use]
    pub fn new(rate: f64, credit_s: f64) -> Self {
        Self { rate, cheap_s: credit_s / 2.0, full_s: credit_s / 2.0 }
    }

    /// Changes the rate; accounts stay as they are.
    pub fn set_rate(&mut self, rate: f64) {
        self.rate = rate;
    }

    /// Adds what `elapsed_s` seconds of wall time bring.
    pub fn fill(&mut self, elapsed_s: f64) {
        let most = self.rate * HELD_S / 2.0;
        let brought = self.rate * elapsed_s.max(0.0);
        let room = |account: f64| (most - account).max(0.0);
        let cheap = (brought / 2.0).max(brought - room(self.full_s)).min(room(self.cheap_s));
        let full = (brought - cheap).min(room(self.full_s));
        self.cheap_s += cheap;
        self.full_s += full;
    }

    /// Takes what was used.
    pub fn spend(&mut self, work: Work, cpu_s: f64) {
        match work {
            Work::Cheap => self.cheap_s -= cpu_s.max(0.0),
            Work::Full => self.full_s -= cpu_s.max(0.0),
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
        let account = if work == Work::Cheap { self.cheap_s } else { self.full_s };
        if account > 0.0 { 0.0 } else { -account / (self.rate / 2.0).max(1e-6) + 1e-3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_over_a_long_time_is_the_rate() {
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
    fn what_one_kind_does_not_need_the_other_gets() {
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
    fn a_debt_is_paid_before_more_of_its_kind_while_the_other_goes_on() {
        let mut budget = Budget::new(0.02, 0.2);
        budget.spend(Work::Full, 1.1);
        assert!(!budget.allows(Work::Full) && budget.allows(Work::Cheap));
        let wait_s = budget.wait_s(Work::Full);
        assert!((99.0..101.0).contains(&wait_s), "{wait_s}");
    }

    #[test]
    fn idle_time_does_not_become_a_burst() {
        let mut budget = Budget::new(0.01, 0.0);
        budget.fill(3600.0);
        budget.fill(3600.0);
        assert!(budget.cheap_s + budget.full_s <= 0.3 + 1e-9);
    }
}
