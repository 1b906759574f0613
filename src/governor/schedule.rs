//! When the windows of one target are open. Pure: seconds of a monotonic clock.
//!
//! Time is divided into cycles. For each a class of window is drawn, which sets the length of the cycle; then the window's start is drawn
//! uniformly in [0, period). All of that is decided before the cycle begins, from the past alone. A window that starts late extends
//! beyond its period; the next cycle then begins at its end.

use crate::random::Random;

/// A class of windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum WindowClass {
    /// 20 ms.
    Short = 0,
    /// 200 ms.
    Medium,
    /// 2 s.
    Long,
    /// 20 s.
    Longest,
}

impl WindowClass {
    /// All, by ascending length.
    pub const ALL: [Self; 4] = [Self::Short, Self::Medium, Self::Long, Self::Longest];

    /// Length in seconds.
    #[must_use]
    pub fn length_s(self) -> f64 {
        match self {
            Self::Short => 0.02,
            Self::Medium => 0.2,
            Self::Long => 2.0,
            Self::Longest => 20.0,
        }
    }

    /// Its name in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Short => "20ms",
            Self::Medium => "200ms",
            Self::Long => "2s",
            Self::Longest => "20s",
        }
    }
}

/// One cycle: the position of its window and the time that it represents.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cycle {
    /// The window's class.
    pub class: WindowClass,
    /// Seconds that the window represents.
    pub period_s: f64,
    /// When it opens.
    pub open_s: f64,
    /// When it closes, unless its quota is spent before.
    pub close_s: f64,
    /// When the next cycle begins.
    pub end_s: f64,
}

/// Draws the cycles of one target.
#[derive(Debug, Clone)]
pub struct Schedule {
    random: Random,
    next_s: f64,
}

impl Schedule {
    /// The first cycle begins at `start_s`.
    #[must_use]
    pub fn new(seed: u64, start_s: f64) -> Self {
        Self { random: Random::new(seed), next_s: start_s }
    }

    /// Draws the next cycle. `periods`: the classes allowed, each with the period that its window must stand for to stay within its
    /// budget. Each class gets the same share of time: it is drawn the less often the longer its period. `None` without a class.
    pub fn draw(&mut self, now_s: f64, periods: &[(WindowClass, f64)]) -> Option<Cycle> {
        let rates: f64 = periods.iter().map(|(_, period_s)| 1.0 / period_s.max(1e-3)).sum();
        let mut place = self.random.unit() * rates;
        let mut chosen = *periods.last()?;
        for &(class, period_s) in periods {
            place -= 1.0 / period_s.max(1e-3);
            if place <= 0.0 {
                chosen = (class, period_s);
                break;
            }
        }
        let (class, period_s) = (chosen.0, chosen.1.max(chosen.0.length_s()));
        // A daemon that was late continues from now.
        let begin_s = self.next_s.max(now_s);
        let open_s = begin_s + self.random.unit() * period_s;
        let close_s = open_s + class.length_s();
        let end_s = close_s.max(begin_s + period_s);
        self.next_s = end_s;
        Some(Cycle { class, period_s, open_s, close_s, end_s })
    }

    /// Discards what was drawn: the next cycle begins at `now_s`.
    pub fn restart(&mut self, now_s: f64) {
        self.next_s = now_s;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_moment_is_as_likely_in_a_window_as_any_other() {
        // Phases of a program whose own period is that of the cycles.
        let mut schedule = Schedule::new(7, 0.0);
        let mut phases = [0u32; 20];
        let periods = [(WindowClass::Medium, 2.0)];
        for _ in 0..40_000 {
            let cycle = schedule.draw(0.0, &periods).unwrap();
            assert!(cycle.open_s >= 0.0 && cycle.end_s >= cycle.close_s);
            phases[((cycle.open_s % 2.0) * 10.0) as usize] += 1;
        }
        assert!(phases.iter().all(|count| (1_800..2_200).contains(count)), "{phases:?}");
    }

    #[test]
    fn classes_get_equal_shares_of_the_time() {
        let mut schedule = Schedule::new(3, 0.0);
        let periods = [(WindowClass::Short, 2.0), (WindowClass::Medium, 20.0)];
        let mut time_s = [0.0; 2];
        for _ in 0..50_000 {
            let cycle = schedule.draw(0.0, &periods).unwrap();
            time_s[cycle.class as usize] += cycle.period_s;
        }
        let ratio = time_s[0] / time_s[1];
        assert!((0.95..1.05).contains(&ratio), "{ratio}");
    }

    #[test]
    fn windows_do_not_overlap() {
        let mut schedule = Schedule::new(11, 5.0);
        let mut closed_s = 0.0;
        for _ in 0..1000 {
            let cycle = schedule.draw(0.0, &[(WindowClass::Short, 0.03), (WindowClass::Medium, 0.25)]).unwrap();
            assert!(cycle.open_s >= closed_s);
            closed_s = cycle.close_s;
        }
    }
}
