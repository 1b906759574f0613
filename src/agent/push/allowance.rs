//! How many bytes may be sent now, so that those of a day are limited. Pure: times are parameters.
//!
//! A round is allowed while the account is not overdrawn; what it sends is charged afterwards. A node whose rounds are larger than the limit
//! allows has fewer of them, all processes alike.

use std::time::{Duration, Instant};

const DAY: Duration = Duration::from_secs(86_400);
/// The account never holds more than what this time gives: a quiet night must not be made up for at once.
const HELD: Duration = Duration::from_secs(3600);

/// The account.
#[derive(Debug)]
pub(super) struct Allowance {
    bytes_per_day: Option<f64>,
    left_bytes: f64,
    at: Instant,
}

impl Allowance {
    /// A full account.
    pub fn new(bytes_per_day_max: Option<u64>, now: Instant) -> Self {
        let bytes_per_day = bytes_per_day_max.map(|bytes| bytes as f64);
        Self { bytes_per_day, left_bytes: of(bytes_per_day, HELD), at: now }
    }

    /// Whether a round is allowed.
    pub fn permits(&mut self, now: Instant) -> bool {
        let most = of(self.bytes_per_day, HELD);
        self.left_bytes = (self.left_bytes + of(self.bytes_per_day, now.saturating_duration_since(self.at))).min(most);
        self.at = now;
        self.bytes_per_day.is_none() || self.left_bytes > 0.0
    }

    /// Charges bytes that are to be sent.
    pub fn spend(&mut self, bytes: u64) {
        self.left_bytes -= bytes as f64;
    }
}

fn of(bytes_per_day: Option<f64>, time: Duration) -> f64 {
    bytes_per_day.unwrap_or(0.0) * time.as_secs_f64() / DAY.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes sent in these days by rounds of so many bytes, a minute apart.
    fn sent(bytes_per_day_max: Option<u64>, round_bytes: u64, days: u32) -> u64 {
        let start = Instant::now();
        let mut allowance = Allowance::new(bytes_per_day_max, start);
        let mut sent = 0;
        for minute in 0..days * 24 * 60 {
            if allowance.permits(start + Duration::from_secs(u64::from(minute) * 60)) {
                allowance.spend(round_bytes);
                sent += round_bytes;
            }
        }
        sent
    }

    #[test]
    fn a_day_has_at_most_its_bytes_and_what_the_account_held() {
        let limit = 5 << 20;
        for round_bytes in [100, 10_000, 1_000_000] {
            let sent = sent(Some(limit), round_bytes, 10);
            let most = 10 * limit + limit / 24 + round_bytes;
            assert!(sent <= most && sent as f64 >= 0.95 * (10 * limit).min(10 * 1440 * round_bytes) as f64, "{round_bytes}: {sent}");
        }
        assert_eq!(sent(None, 1_000_000, 1), 1440 * 1_000_000);
    }
}
