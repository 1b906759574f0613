//! Where the tiers that know call stacks leave what they know, and where everything that is shown takes it from.
//!
//! A tier (governed windows, an emitter in the process, a recording) publishes one [`Attributed`] a process whenever it has a new one; the
//! census thread puts the newest into the next snapshot, and forgets processes that have ended.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use crate::profile::{Mode, Profile, ValueKind};
use crate::target::ProcessId;

/// How often a process allocates, with the standard error where it is an estimate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rates {
    /// Allocations a second.
    pub allocations_per_s: f64,
    /// Standard error of it; `None` = counted, not estimated.
    pub allocations_per_s_stderr: Option<f64>,
    /// Bytes asked for a second.
    pub allocated_bytes_per_s: f64,
    /// Standard error of it; `None` = counted, not estimated.
    pub allocated_bytes_per_s_stderr: Option<f64>,
}

/// What one tier says of one process.
#[derive(Debug, Clone)]
pub struct Attributed {
    /// Values by stack. Its mode names the tier, its kinds say what was measured, its losses and doubts travel with it.
    pub profile: Arc<Profile>,
    /// When it was finished.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
    /// Rates, where the tier measures them.
    pub rates: Option<Rates>,
    /// Estimated share of the target's time that the tier takes; `None` = nothing that is known of.
    pub slowdown_ratio_est: Option<f64>,
}

/// What the tiers say of one process, the newest of each.
#[derive(Debug, Clone, Default)]
pub struct OfProcess(Vec<Arc<Attributed>>);

impl OfProcess {
    /// All of them, the most exact tier first.
    pub fn all(&self) -> impl Iterator<Item = &Arc<Attributed>> {
        self.0.iter()
    }

    /// The most exact one that measured a kind of value.
    #[must_use]
    pub fn with(&self, kind: ValueKind) -> Option<&Arc<Attributed>> {
        self.0.iter().find(|one| one.profile.meta.kinds.contains(kind))
    }

    /// The most exact one.
    #[must_use]
    pub fn best(&self) -> Option<&Arc<Attributed>> {
        self.0.first()
    }

    /// Rates of the most exact tier that measures them.
    #[must_use]
    pub fn rates(&self) -> Option<(Rates, Mode)> {
        self.0.iter().find_map(|one| Some((one.rates?, one.profile.meta.mode)))
    }

    /// Whether nothing is newer in one than in the other.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    fn put(&mut self, one: Arc<Attributed>) {
        let rank = |mode| match mode {
            Mode::Exact => 0,
            Mode::Sampled => 1,
            Mode::Governed => 2,
            Mode::Imported => 3,
        };
        self.0.retain(|other| other.profile.meta.mode != one.profile.meta.mode);
        self.0.push(one);
        self.0.sort_by_key(|one| rank(one.profile.meta.mode));
    }
}

/// The board. Bounded by what is watched: [`Attributions::keep_only`] is called with each look at the list of processes.
#[derive(Debug, Default)]
pub struct Attributions(Mutex<BTreeMap<ProcessId, OfProcess>>);

impl Attributions {
    fn board(&self) -> MutexGuard<'_, BTreeMap<ProcessId, OfProcess>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces what the tier said of the process before.
    pub fn publish(&self, process: ProcessId, attributed: Attributed) {
        self.board().entry(process).or_default().put(Arc::new(attributed));
    }

    /// What is known of a process.
    #[must_use]
    pub fn of(&self, process: ProcessId) -> OfProcess {
        self.board().get(&process).cloned().unwrap_or_default()
    }

    /// Forgets all processes that `is_watched` does not know.
    pub fn keep_only(&self, is_watched: impl Fn(ProcessId) -> bool) {
        self.board().retain(|&process, _| is_watched(process));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::KindSet;
    use crate::units::Pid;

    fn of(mode: Mode, kinds: &[ValueKind]) -> Attributed {
        let mut profile = Profile::default();
        profile.meta.mode = mode;
        profile.meta.kinds = kinds.iter().copied().collect::<KindSet>();
        Attributed { profile: Arc::new(profile), at: Instant::now(), wall: SystemTime::now(), rates: None, slowdown_ratio_est: None }
    }

    #[test]
    fn the_most_exact_tier_that_measured_a_kind_is_shown_and_the_ended_are_forgotten() {
        let board = Attributions::default();
        let process = ProcessId { pid: Pid(7), start_ticks: 1 };
        board.publish(process, of(Mode::Governed, &[ValueKind::AllocSpace, ValueKind::SurvivorSpace]));
        board.publish(process, of(Mode::Sampled, &[ValueKind::InuseSpace, ValueKind::AllocSpace]));
        board.publish(process, of(Mode::Sampled, &[ValueKind::InuseSpace, ValueKind::AllocSpace]));
        let known = board.of(process);
        assert_eq!(known.all().count(), 2);
        let mode = |kind| known.with(kind).map(|one| one.profile.meta.mode);
        assert_eq!(mode(ValueKind::AllocSpace), Some(Mode::Sampled));
        assert_eq!(mode(ValueKind::SurvivorSpace), Some(Mode::Governed));
        assert_eq!(mode(ValueKind::PinnedSpace), None);
        board.keep_only(|_| false);
        assert!(board.of(process).best().is_none());
    }
}
