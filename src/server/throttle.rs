//! Rate limit for requests without a valid token. Pure.
//!
//! A client may be refused several times in a row: a browser requests every part of a page before the user has typed the token. Beyond that
//! its answers are delayed, so that guessing tokens is slow and costs the agent nothing. Requests with the right token are never delayed.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Refused requests of a client that are answered at once.
const BURST: f64 = 20.0;
/// Refused requests of a client per second that are answered at once beyond that.
const A_SECOND: f64 = 1.0;
/// How long an answer is delayed.
pub(super) const DELAY: Duration = Duration::from_secs(1);
/// Clients that are counted separately; all others count as one.
const CLIENTS_MAX: usize = 1024;
/// Time between two lines in the log.
const SAY_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Bucket {
    fn now(self, now: Instant) -> f64 {
        (self.left + now.saturating_duration_since(self.at).as_secs_f64() * A_SECOND).min(BURST)
    }
}

/// How to answer a refused request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Verdict {
    /// Whether its answer is delayed.
    pub is_slowed: bool,
    /// Number of refused requests since the last log line, if it is time for the next one.
    pub say: Option<u64>,
}

/// Refused requests of all clients.
#[derive(Debug, Default)]
pub(super) struct Throttle {
    clients: HashMap<Option<IpAddr>, Bucket>,
    unsaid: u64,
    said: Option<Instant>,
}

impl Throttle {
    /// Counts a request that had no token or a wrong one.
    pub fn wrong(&mut self, client: Option<IpAddr>, now: Instant) -> Verdict {
        if self.clients.len() >= CLIENTS_MAX && !self.clients.contains_key(&client) {
            self.clients.retain(|_, bucket| bucket.now(now) < BURST);
        }
        let is_full = self.clients.len() >= CLIENTS_MAX && !self.clients.contains_key(&client);
        let bucket = self.clients.entry(if is_full { None } else { client }).or_insert(Bucket { left: BURST, at: now });
        let left = bucket.now(now);
        let is_slowed = left < 1.0;
        *bucket = Bucket { left: if is_slowed { left } else { left - 1.0 }, at: now };
        self.unsaid += 1;
        let is_time = self.said.is_none_or(|said| now.saturating_duration_since(said) >= SAY_EVERY);
        let say = is_time.then(|| std::mem::take(&mut self.unsaid));
        if is_time {
            self.said = Some(now);
        }
        Verdict { is_slowed, say }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_tries_tokens_is_slowed_and_named_once_a_minute_and_others_are_not() {
        let start = Instant::now();
        let mut throttle = Throttle::default();
        let (hostile, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        let (mut at_once, mut said) = (0, Vec::new());
        // 8,000 per second for two minutes.
        for at in 0..120 * 8000u64 {
            let verdict = throttle.wrong(hostile, start + Duration::from_micros(at * 125));
            at_once += u64::from(!verdict.is_slowed);
            said.extend(verdict.say);
        }
        assert_eq!(said, [1, 480_000]);
        assert!((139..=140).contains(&at_once), "{at_once}");
        assert!(!throttle.wrong(other, start + Duration::from_secs(120)).is_slowed);
    }

    #[test]
    fn the_number_of_clients_is_bounded() {
        let start = Instant::now();
        let mut throttle = Throttle::default();
        for at in 0..100_000u32 {
            throttle.wrong(Some(IpAddr::from(at.to_be_bytes())), start);
        }
        assert!(throttle.clients.len() <= CLIENTS_MAX + 1);
        assert!(throttle.wrong(Some(IpAddr::from([255, 0, 0, 1])), start).is_slowed);
        assert!(!throttle.wrong(Some(IpAddr::from([255, 0, 0, 1])), start + Duration::from_secs(60)).is_slowed);
    }
}
