//! The open connections of a listener, and which of them is closed when a new one needs a slot. Pure.
//!
//! No client is refused while an idle one holds a slot. A new connection replaces one that waits for its next request, has not sent its
//! request yet, or does not read its answer, the longest such one first. Only when all slots hold requests that are being answered is a new
//! connection refused; a few reserved slots then still answer health probes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Slots beyond the limit, in which only health is answered: a probe takes a millisecond.
const RESERVE: usize = 8;
/// How long a client may hold a slot without reading its answer, when others need the slot.
const STUCK_MAX: Duration = Duration::from_secs(5);
/// The last data written may still be on its way to the client for this long.
const IDLE_AFTER: Duration = Duration::from_secs(1);

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// It was refused for its token, and its answer is being delayed.
    Slowed,
    /// It has its answer, and has sent nothing since.
    Idle,
    /// It has not sent its complete request head.
    Receiving,
    /// It does not read its answer.
    Stuck,
    /// Its request is being answered.
    Answering,
}

impl Phase {
    /// How long it may be in this phase before it can be closed for another one; `None` = no limit.
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

/// An assigned slot.
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
    /// Most slots of one remote client: half of all, so that it cannot lock out the others.
    client_max: usize,
}

impl<C> Connections<C> {
    /// At most `places_max` at once, plus the reserve.
    pub fn new(places_max: usize) -> Self {
        Self { open: BTreeMap::new(), next_id: 0, places_max, client_max: places_max.div_ceil(2) }
    }

    /// A slot for a client, if there is one. `client`: its address, `None` on a unix socket.
    pub fn place(&mut self, client: Option<IpAddr>, close: C, now: Instant) -> Option<Place> {
        // All local clients share one address; a port-forward may have any client behind it.
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

    /// The best connection to close, of those that may be closed.
    fn victim(&self, now: Instant, which: impl Fn(&Open<C>) -> bool) -> Option<u64> {
        let may_go = |one: &Open<C>| one.phase.patience().is_some_and(|patience| now.saturating_duration_since(one.since) >= patience);
        let candidates = self.open.iter().filter(|(_, one)| which(one) && may_go(one));
        candidates.min_by_key(|(id, one)| (one.phase, one.since, **id)).map(|(id, _)| *id)
    }

    /// Sets the state of a connection. One that was closed is no longer in the table.
    pub fn set_phase(&mut self, id: u64, phase: Phase, now: Instant) {
        if let Some(one) = self.open.get_mut(&id)
            && one.phase != phase
        {
            one.phase = phase;
            one.since = now;
        }
    }

    /// Notes that a connection read some of its answer.
    pub fn progressed(&mut self, id: u64, now: Instant) {
        if let Some(one) = self.open.get_mut(&id) {
            one.phase = Phase::Idle;
            one.since = now;
        }
    }

    /// Frees the slot.
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
            assert!(!place.reserved && place.displaces == (at >= 32), "one client has at most half of the slots");
            let probe = open.place(address(2), (), now).unwrap();
            assert!(!probe.reserved && !probe.displaces);
            open.remove(probe.id);
        }
    }

    #[test]
    fn idle_clients_are_closed_first_and_those_being_answered_stay() {
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
        assert!(open.place(address(8), (), now).unwrap().reserved, "a client that reads slowly has five seconds");
        assert!(!open.place(address(7), (), start + Duration::from_secs(5)).unwrap().reserved);
    }

    #[test]
    fn the_reserve_is_for_probes_when_all_slots_are_busy() {
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
        // The reserve has its own turnover.
        let place = open.place(None, (), start).unwrap();
        assert!(place.reserved && place.displaces);
        open.remove(0);
        assert!(!open.place(None, (), start).unwrap().reserved);
    }
}
