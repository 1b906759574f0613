//! The open connections of a listener, and which of them has to go when another one needs its place. Pure.
//!
//! Nobody is turned away while a place is held by a client that does nothing with it. A new connection takes the place of one that waits
//! for its next request, that has not sent its request yet, or that does not take its answer, the longest such one first. Only when all
//! places are held by requests that are being answered is there none, and then some are left that answer health probes alone.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Places beyond the limit, in which only health is answered: a probe is over in a millisecond.
const RESERVE: usize = 8;
/// How long a client may hold a place without taking its answer, when others want the place.
const STUCK_MAX: Duration = Duration::from_secs(5);
/// What was written last may still be on its way to the client for so long.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// What a connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// It asked without the right token, and its answer is held back.
    Slowed,
    /// It has its answer, and has asked for nothing since.
    Idle,
    /// It has not sent the whole head of its request.
    Receiving,
    /// It does not take its answer.
    Stuck,
    /// Its request is being answered.
    Answering,
}

impl Phase {
    /// How long it may be in this phase before it may be closed for another one; `None` = as long as it wants.
    fn patience(self) -> Option<Duration> {
        match self {
            Self::Slowed | Self::Receiving => Some(Duration::ZERO),
            Self::Idle => Some(IDLE_AFTER),
            Self::Stuck => Some(STUCK_MAX),
            Self::Answering => None,
        }
    }
}

#[derive(Debug)]
struct Open<C> {
    client: Option<IpAddr>,
    phase: Phase,
    since: Instant,
    reserved: bool,
    /// Dropped to close the connection.
    _close: C,
}

/// A place that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    /// Number of the connection.
    pub id: u64,
    /// Whether only health is answered.
    pub reserved: bool,
    /// Whether another connection was closed for it.
    pub displaces: bool,
}

/// The open connections. Dropping a `C` closes its connection.
#[derive(Debug)]
pub(super) struct Connections<C> {
    open: BTreeMap<u64, Open<C>>,
    next_id: u64,
    places_max: usize,
    /// Of one client beyond this machine: half of all, so that one alone cannot keep the others out.
    client_max: usize,
}

impl<C> Connections<C> {
    /// At most so many at once, and the reserve.
    pub fn new(places_max: usize) -> Self {
        Self { open: BTreeMap::new(), next_id: 0, places_max, client_max: places_max.div_ceil(2) }
    }

    /// A place for a client, where there is one. `client`: its address, `None` for those of a unix socket.
    pub fn place(&mut self, client: Option<IpAddr>, close: C, now: Instant) -> Option<Place> {
        // All of this machine have one address; behind it may be anybody who uses a port-forward.
        let limited = client.filter(|address| !address.is_loopback());
        let of_client = limited.map_or(0, |_| self.open.values().filter(|one| one.client == client).count());
        let ordinary = self.open.values().filter(|one| !one.reserved).count();
        let (reserved, victim) = if of_client >= self.client_max && limited.is_some() {
            let victim = self.victim(now, |one| one.client == client)?;
            (self.open.get(&victim).is_some_and(|one| one.reserved), Some(victim))
        } else if ordinary < self.places_max {
            (false, None)
        } else if let Some(victim) = self.victim(now, |one| !one.reserved) {
            (false, Some(victim))
        } else if self.open.len() - ordinary < RESERVE {
            (true, None)
        } else {
            (true, Some(self.victim(now, |one| one.reserved)?))
        };
        if let Some(victim) = victim {
            self.open.remove(&victim);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.open.insert(id, Open { client, phase: Phase::Receiving, since: now, reserved, _close: close });
        Some(Place { id, reserved, displaces: victim.is_some() })
    }

    /// The one that can be closed best, of those that may be.
    fn victim(&self, now: Instant, which: impl Fn(&Open<C>) -> bool) -> Option<u64> {
        let may_go = |one: &Open<C>| one.phase.patience().is_some_and(|patience| now.saturating_duration_since(one.since) >= patience);
        let candidates = self.open.iter().filter(|(_, one)| which(one) && may_go(one));
        candidates.min_by_key(|(id, one)| (one.phase, one.since, **id)).map(|(id, _)| *id)
    }

    /// Says what a connection does from now on. One that was closed is not in the table any more.
    pub fn set_phase(&mut self, id: u64, phase: Phase, now: Instant) {
        if let Some(one) = self.open.get_mut(&id)
            && one.phase != phase
        {
            one.phase = phase;
            one.since = now;
        }
    }

    /// Says that a connection took something of its answer.
    pub fn progressed(&mut self, id: u64, now: Instant) {
        if let Some(one) = self.open.get_mut(&id) {
            one.phase = Phase::Idle;
            one.since = now;
        }
    }

    /// Frees the place.
    pub fn remove(&mut self, id: u64) {
        self.open.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    #[test]
    fn a_flood_of_half_sent_requests_never_keeps_a_probe_out() {
        let start = Instant::now();
        let mut open = Connections::new(64);
        for at in 0..10_000u64 {
            let now = start + Duration::from_micros(at * 125);
            let place = open.place(address(1), (), now).unwrap();
            assert!(!place.reserved && place.displaces == (at >= 32), "half of the places are one client's at most");
            let probe = open.place(address(2), (), now).unwrap();
            assert!(!probe.reserved && !probe.displaces);
            open.remove(probe.id);
        }
    }

    #[test]
    fn who_does_nothing_goes_first_and_who_is_answered_stays() {
        let start = Instant::now();
        let mut open = Connections::new(4);
        let ids: Vec<u64> = (1..5).map(|last| open.place(address(last), (), start).unwrap().id).collect();
        let phases = [Phase::Answering, Phase::Stuck, Phase::Receiving, Phase::Idle];
        for (id, phase) in ids.iter().zip(phases) {
            open.set_phase(*id, phase, start);
        }
        let mut left = || {
            let later = start + Duration::from_secs(10);
            let place = open.place(address(9), (), later).unwrap();
            open.set_phase(place.id, Phase::Answering, later);
            (place.reserved, ids.iter().filter(|id| open.open.contains_key(id)).count())
        };
        // Idle, then what is not sent; by then the client has as many as one may have.
        assert_eq!((left(), left()), ((false, 3), (false, 2)));
        assert!(open.place(address(9), (), start + Duration::from_secs(10)).is_none());
        assert!(open.open.contains_key(&ids[0]) && open.open.contains_key(&ids[1]));
        let now = start + Duration::from_secs(4);
        assert!(open.place(address(8), (), now).unwrap().reserved, "five seconds are given to whoever takes its answer slowly");
        assert!(!open.place(address(7), (), start + Duration::from_secs(5)).unwrap().reserved);
    }

    #[test]
    fn what_is_left_when_all_are_answered_is_for_probes() {
        let start = Instant::now();
        let mut open = Connections::new(2);
        for _ in 0..2 {
            let place = open.place(None, (), start).unwrap();
            open.set_phase(place.id, Phase::Answering, start);
        }
        for _ in 0..RESERVE {
            let place = open.place(None, (), start).unwrap();
            assert!(place.reserved && !place.displaces);
        }
        // The reserve has its own turn-over.
        let place = open.place(None, (), start).unwrap();
        assert!(place.reserved && place.displaces);
        open.remove(0);
        assert!(!open.place(None, (), start).unwrap().reserved);
    }
}
