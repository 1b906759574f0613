//! Decides when to take a census of a heap during its recording, and keeps the results. Pure: the clock is an argument.
//!
//! A census is due when the recorded live bytes reach a new maximum, or when records were lost since the last one; never more often than
//! the pause below allows, so that walking takes a small share of the time. A peak between two censuses is missed: the moment that is kept
//! says how much was live when it was taken.

use crate::profile::HeapMoment;
use crate::session::walks::walker::Walked;

/// A new maximum exceeds the last one measured by this much, in percent and in bytes: steady growth then causes some tens of censuses, not
/// thousands.
const HIGHER_PERCENT: u64 = 5;
/// See [`HIGHER_PERCENT`].
const HIGHER_BYTES: u64 = 1 << 20;
/// Minimum time between two censuses.
const PAUSE_NS: u64 = 1_000_000_000;
/// The same for a trace.
const PAUSE_ALWAYS_NS: u64 = 200_000_000;
/// See [`REST_FACTOR`]; for a trace, whose program is slowed by much more than by a walk on another CPU.
const REST_ALWAYS_FACTOR: u64 = 4;
/// A census is followed by at least so many times its own duration without one: at most 5 % of the time is spent walking.
const REST_FACTOR: u64 = 19;

/// The censuses of one process's heap.
#[derive(Debug, Default)]
pub struct Moments {
    /// The heap when the recording began.
    pub at_start: Option<HeapMoment>,
    /// The heap at the highest recorded live bytes that a census saw.
    pub at_peak: Option<HeapMoment>,
    /// A walk whose proof waits until all records from before its end are in the ledger.
    pub proof: Option<Walked>,
    /// Recorded live bytes when the walk in progress was requested.
    asked_at_bytes: Option<u64>,
    not_before_ns: u64,
    not_before_always_ns: u64,
    not_before_quiet_ns: u64,
    /// Recorded live bytes at the last question whether a walk is due.
    seen_bytes: u64,
    has_new_losses: bool,
}

impl Moments {
    /// Records were lost: the next census serves as proof.
    pub fn lost(&mut self) {
        self.has_new_losses = true;
    }

    /// Whether to walk now, given the ledger's live bytes. If so, the walk counts as requested. A peak between two censuses is gone, and
    /// what remains of it is still the highest that can be measured. `always`: also without a new peak, for a trace, which has the heap
    /// over time; a heap that did not change since the last question is walked soon, because its census is the one a replay is best compared
    /// with and slows nobody.
    pub fn is_due(&mut self, now_ns: u64, live_bytes: u64, always: bool) -> bool {
        let is_quiet = std::mem::replace(&mut self.seen_bytes, live_bytes) == live_bytes;
        let not_before_ns = match (always, is_quiet) {
            (true, true) => self.not_before_quiet_ns,
            (true, false) => self.not_before_always_ns,
            (false, _) => self.not_before_ns,
        };
        if self.asked_at_bytes.is_some() || now_ns < not_before_ns {
            return false;
        }
        let looked_at = self.at_peak.map_or(0, |moment| moment.recorded_live_bytes);
        let higher = looked_at.saturating_add((looked_at / 100 * HIGHER_PERCENT).max(HIGHER_BYTES));
        if live_bytes < higher && !self.has_new_losses && !always {
            return false;
        }
        self.has_new_losses = false;
        self.asked_at_bytes = Some(live_bytes);
        true
    }

    /// A walk is done. `moment` is its result without the recorded bytes; `None` if it was not usable.
    pub fn walked(&mut self, began_ns: u64, ended_ns: u64, moment: Option<HeapMoment>) {
        let recorded_live_bytes = self.asked_at_bytes.take().unwrap_or(0);
        let took_ns = ended_ns.saturating_sub(began_ns);
        self.not_before_ns = ended_ns.saturating_add(PAUSE_NS.max(took_ns.saturating_mul(REST_FACTOR)));
        self.not_before_always_ns = ended_ns.saturating_add(PAUSE_ALWAYS_NS.max(took_ns.saturating_mul(REST_ALWAYS_FACTOR)));
        self.not_before_quiet_ns = ended_ns.saturating_add(PAUSE_ALWAYS_NS);
        if let Some(moment) = moment {
            self.at_height(HeapMoment { recorded_live_bytes, ..moment });
        }
    }

    /// A moment that becomes the peak unless an earlier one was higher.
    pub fn at_height(&mut self, moment: HeapMoment) {
        if self.at_peak.is_none_or(|best| best.recorded_live_bytes <= moment.recorded_live_bytes) {
            self.at_peak = Some(moment);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const S: u64 = 1_000_000_000;

    #[test]
    fn a_census_is_due_at_each_new_maximum_and_not_while_one_is_in_progress_or_too_soon() {
        let mut moments = Moments::default();
        assert!(!moments.is_due(0, MIB / 2, false), "too little to be worth a census");
        assert!(moments.is_due(0, 100 * MIB, false));
        assert!(!moments.is_due(0, 200 * MIB, false), "one is in progress");
        moments.walked(0, S / 10, Some(HeapMoment { after_ms: 7, ..HeapMoment::default() }));
        assert!(!moments.is_due(S, 200 * MIB, false), "too soon: a walk of 0.1 s is followed by 1.9 s without one");
        assert!(!moments.is_due(2 * S, 104 * MIB, false), "hardly higher");
        assert!(moments.is_due(2 * S, 106 * MIB, false));
        assert_eq!(moments.at_peak.map(|moment| (moment.after_ms, moment.recorded_live_bytes)), Some((7, 100 * MIB)));
    }

    #[test]
    fn a_traced_heap_that_is_quiet_is_walked_soon_after_a_long_walk() {
        let mut moments = Moments::default();
        assert!(moments.is_due(0, MIB, true));
        moments.walked(0, 2 * S, None);
        assert!(!moments.is_due(2 * S + S / 2, 2 * MIB, true), "a walk of 2 s is followed by 8 s without one while the program works");
        assert!(moments.is_due(2 * S + S / 2 + 1, 2 * MIB, true));
        assert!(!moments.is_due(3 * S, 2 * MIB, false), "one is in progress");
    }

    #[test]
    fn the_highest_moment_is_kept_whatever_comes_later() {
        let mut moments = Moments::default();
        for live in [10, 30, 20] {
            moments.at_height(HeapMoment { recorded_live_bytes: live, ..HeapMoment::default() });
        }
        assert_eq!(moments.at_peak.map(|moment| moment.recorded_live_bytes), Some(30));
    }

    #[test]
    fn losses_make_one_census_due_at_any_height() {
        let mut moments = Moments::default();
        moments.lost();
        assert!(moments.is_due(0, 5, false));
        moments.walked(0, 1, None);
        assert!(!moments.is_due(10 * S, 5, false));
    }
}
