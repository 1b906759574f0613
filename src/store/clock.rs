//! The clock for removal by age. Pure.
//!
//! A wall clock can be set wrong, by a user or a bad time server, and then corrected. A jump of a year forward must not remove a year of
//! history: ages follow the wall clock only as far as time has passed, until the new time has been consistent for a day.

use std::time::{Duration, Instant};

/// How far the wall clock may be ahead of elapsed time without being doubted: suspend, leap seconds, corrections.
const AHEAD_MAX_S: i64 = 3600;
/// How long a doubtful time must be consistent to be accepted.
const BELIEVED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// The last accepted reading.
#[derive(Debug, Clone, Copy, Default)]
pub struct AgeClock {
    last: Option<(i64, Instant)>,
}

impl AgeClock {
    /// Continues from the end of the history, read at `at`: even after a start with a wrong clock, nothing is removed by age for a day.
    pub fn since(end_s: Option<i64>, at: Instant) -> Self {
        Self { last: end_s.map(|end_s| (end_s, at)) }
    }

    /// The time from which ages are computed, in seconds since 1970, when the wall clock shows `wall_s`.
    pub fn now(&mut self, wall_s: i64, at: Instant) -> i64 {
        let Some((last_s, last_at)) = self.last else {
            self.last = Some((wall_s, at));
            return wall_s;
        };
        let passed = at.saturating_duration_since(last_at);
        let expected_s = last_s.saturating_add(i64::try_from(passed.as_secs()).unwrap_or(i64::MAX));
        if wall_s > expected_s.saturating_add(AHEAD_MAX_S) && passed < BELIEVED_AFTER {
            return expected_s;
        }
        self.last = Some((wall_s, at));
        wall_s
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const YEAR_S: i64 = 365 * 86400;

    #[test]
    fn a_jump_forward_is_believed_after_a_day_and_no_sooner() {
        let (mut clock, start) = (AgeClock::default(), Instant::now());
        let after = |hours: u64| start + Duration::from_secs(hours * 3600);
        assert_eq!(clock.now(1000, start), 1000);
        assert_eq!(clock.now(1000 + 3600, after(1)), 4600);
        assert_eq!(clock.now(4600 + 3600 + YEAR_S, after(2)), 8200, "an hour has passed, not a year");
        assert_eq!(clock.now(4600 + 7200, after(3)), 11800, "the clock is right again");
        let jumped = clock.now(11800 + YEAR_S, after(4));
        assert_eq!(jumped, 11800 + 3600);
        assert_eq!(clock.now(11800 + YEAR_S + 86400, after(28)), 11800 + YEAR_S + 86400);
    }

    #[test]
    fn after_a_start_the_history_says_how_late_it_is() {
        let start = Instant::now();
        let mut clock = AgeClock::since(Some(1000), start);
        assert_eq!(clock.now(1000 + YEAR_S, start + Duration::from_secs(5)), 1005);
        assert_eq!(AgeClock::since(None, start).now(YEAR_S, start), YEAR_S);
    }

    #[test]
    fn a_jump_back_is_taken_at_once_since_it_removes_nothing() {
        let (mut clock, start) = (AgeClock::default(), Instant::now());
        assert_eq!(clock.now(YEAR_S, start), YEAR_S);
        assert_eq!(clock.now(5, start), 5);
    }
}
