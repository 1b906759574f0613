//! The board where the tiers that know call stacks publish their results, and from which all surfaces read them.
//!
//! A tier (governed windows, an emitter in the process, a recording) publishes one [`Attributed`] per process whenever it has a new one; the
//! census thread includes the newest in the next snapshot, and drops processes that have ended.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use super::sample::{Identity, ProcessSample};
use crate::process::ProcessId;
use crate::process::container::Container;
use crate::process::workload::Workload;
use crate::profile::{Mode, Profile, ValueKind};
use crate::session::report::block_index::BlockIndex;

/// How often a process allocates, with the standard error if it is an estimate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rates {
    /// Allocations per second.
    pub allocations_per_s: f64,
    /// Standard error of it; `None` = counted, not estimated.
    pub allocations_per_s_stderr: Option<f64>,
    /// Bytes requested per second.
    pub allocated_bytes_per_s: f64,
    /// Standard error of it; `None` = counted, not estimated.
    pub allocated_bytes_per_s_stderr: Option<f64>,
    /// Whether they are only lower bounds, because probes delay the process too much.
    pub are_lower_bounds: bool,
}

impl Rates {
    /// The rates of a whole recording.
    #[must_use]
    pub fn of(profile: &Profile) -> Self {
        let totals = profile.totals();
        let are_lower_bounds = profile.total_is_lower_bound(ValueKind::AllocSpace);
        let errors = (profile.meta.mode.estimates() && !are_lower_bounds).then(|| profile.total_errors());
        let a_second = |value: u64| value as f64 / profile.meta.duration_s.max(1e-3);
        let rate = |kind| (a_second(totals.get(kind)), errors.map(|errors| a_second(errors.get(kind))));
        let (allocations_per_s, allocations_per_s_stderr) = rate(ValueKind::AllocObjects);
        let (allocated_bytes_per_s, allocated_bytes_per_s_stderr) = rate(ValueKind::AllocSpace);
        Self { allocations_per_s, allocations_per_s_stderr, allocated_bytes_per_s, allocated_bytes_per_s_stderr, are_lower_bounds }
    }
}

/// The result of one tier for one process.
#[derive(Debug, Clone)]
pub struct Attributed {
    /// Values by stack. Its mode names the tier, its kinds say what was measured, and it has its losses and doubts.
    pub profile: Arc<Profile>,
    /// When it was finished.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
    /// Addresses of blocks and their stacks in the profile, if the tier knows them.
    pub blocks: Option<Arc<BlockIndex>>,
    /// Rates, if the tier measures them.
    pub rates: Option<Rates>,
    /// Estimated share of the target's time that the tier takes; `None` = not known to take any.
    pub slowdown_ratio_est: Option<f64>,
}

/// The newest result of each tier for one process.
#[derive(Debug, Clone, Default)]
pub struct OfProcess(Vec<Arc<Attributed>>);

impl OfProcess {
    /// Live bytes that have a stack, and the tier that knows them: the most exact one.
    #[must_use]
    pub fn live_bytes(&self) -> Option<(u64, Mode)> {
        let one = self.with(ValueKind::InuseSpace)?;
        let profile = &one.profile;
        let known = profile.stacks().iter().filter(|stack| !profile.is_rest(stack));
        Some((known.map(|stack| stack.values.get(ValueKind::InuseSpace)).fold(0, u64::saturating_add), profile.meta.mode))
    }

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

    /// Functions of the stack that allocated the block at these addresses, the innermost first; empty if no tier knows it.
    #[must_use]
    pub fn functions(&self, range: &Range<u64>, most: usize) -> Vec<String> {
        let known = self.0.iter().filter_map(|one| Some(one.blocks.as_ref()?.functions(range, &one.profile, most)));
        known.into_iter().find(|functions| !functions.is_empty()).unwrap_or_default()
    }

    /// Rates of the most exact tier that measures them.
    #[must_use]
    pub fn rates(&self) -> Option<(Rates, Mode)> {
        self.0.iter().find_map(|one| Some((one.rates?, one.profile.meta.mode)))
    }

    /// Whether both have the same results.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.0.len() == other.0.len() && self.0.iter().zip(&other.0).all(|(a, b)| Arc::ptr_eq(a, b))
    }

    fn put(&mut self, one: Arc<Attributed>) {
        let rank = |mode| match mode {
            Mode::Exact => 0,
            Mode::Sampled => 1,
            Mode::Governed => 2,
            Mode::Looked => 3,
            Mode::Imported => 4,
        };
        self.0.retain(|other| other.profile.meta.mode != one.profile.meta.mode);
        self.0.push(one);
        self.0.sort_by_key(|one| rank(one.profile.meta.mode));
    }
}

/// The board. Bounded by the watched processes: [`Attributions::follow`] is called with each scan of the process list.
#[derive(Debug, Default)]
pub struct Attributions {
    board: Mutex<BTreeMap<ProcessId, Entry>>,
    emitting: Mutex<BTreeSet<Identity>>,
    /// Processes that have got an emitter since they were examined.
    new_emitters: Mutex<BTreeSet<ProcessId>>,
}

/// One process on the board.
#[derive(Debug, Default)]
struct Entry {
    labels: Labels,
    known: OfProcess,
}

/// The labels of a process's container and workload.
#[derive(Debug, Clone, Default)]
pub struct Labels {
    container: Option<Arc<Container>>,
    workload: Option<Arc<Workload>>,
}

impl Labels {
    /// Of a process.
    #[must_use]
    pub fn of(process: &ProcessSample) -> Self {
        Self { container: process.surroundings.container.clone(), workload: Some(Arc::clone(&process.workload)) }
    }

    /// All of them: `namespace`, `pod`, `container`, `workload_kind`, `workload`, `service_name`, `service_version`, as far as known.
    #[must_use]
    pub fn map(&self) -> BTreeMap<String, String> {
        let workload = self.workload.iter().flat_map(|workload| workload.labels());
        let container = self.container.iter().flat_map(|container| container.labels());
        workload.chain(container).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}

impl Attributions {
    fn board(&self) -> MutexGuard<'_, BTreeMap<ProcessId, Entry>> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the processes that are listened to.
    pub fn set_emitting(&self, emitting: BTreeSet<Identity>) {
        *self.emitting.lock().unwrap_or_else(PoisonError::into_inner) = emitting;
    }

    /// Notes that a process has got an emitter, which is to be listened to soon.
    pub fn add_emitter(&self, process: ProcessId) {
        self.new_emitters.lock().unwrap_or_else(PoisonError::into_inner).insert(process);
    }

    /// The processes noted since the last call.
    #[must_use]
    pub fn take_new_emitters(&self) -> BTreeSet<ProcessId> {
        std::mem::take(&mut *self.new_emitters.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The processes that are listened to: they are watched whatever their size.
    #[must_use]
    pub fn emitting(&self) -> BTreeSet<Identity> {
        self.emitting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces the tier's previous result for the process, and returns it as published: a profile that is not shared yet gets the names of the
    /// container and the workload as labels.
    pub fn publish(&self, process: ProcessId, mut attributed: Attributed) -> Arc<Attributed> {
        let mut board = self.board();
        let entry = board.entry(process).or_default();
        if let (Some(_), Some(profile)) = (&entry.labels.workload, Arc::get_mut(&mut attributed.profile)) {
            for one in profile.meta.processes.iter_mut().filter(|one| one.pid == process.pid.0) {
                one.container_labels = entry.labels.map();
            }
        }
        let attributed = Arc::new(attributed);
        entry.known.put(Arc::clone(&attributed));
        attributed
    }

    /// The results for a process.
    #[must_use]
    pub fn of(&self, process: ProcessId) -> OfProcess {
        self.board().get(&process).map(|entry| entry.known.clone()).unwrap_or_default()
    }

    /// Drops all processes but the watched ones, and updates their labels.
    pub fn follow(&self, watched: impl Iterator<Item = (ProcessId, Labels)>) {
        let mut board = self.board();
        let mut before = std::mem::take(&mut *board);
        board.extend(watched.map(|(process, labels)| {
            let known = before.remove(&process).unwrap_or_default().known;
            (process, Entry { labels, known })
        }));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::{KindSet, meta};
    use crate::units::Pid;

    fn of(mode: Mode, kinds: &[ValueKind]) -> Attributed {
        let mut profile = Profile::default();
        profile.meta.mode = mode;
        profile.meta.kinds = kinds.iter().copied().collect::<KindSet>();
        Attributed {
            profile: Arc::new(profile),
            at: Instant::now(),
            wall: SystemTime::now(),
            blocks: None,
            rates: None,
            slowdown_ratio_est: None,
        }
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
        board.follow(std::iter::empty());
        assert!(board.of(process).best().is_none());
    }

    #[test]
    fn a_profile_is_labelled_with_the_names_of_its_container_and_workload() {
        let board = Attributions::default();
        let process = ProcessId { pid: Pid(7), start_ticks: 1 };
        let container =
            Container { namespace: Some("shop".into()), pod: Some("web-1".into()), name: Some("nginx".into()), ..Container::default() };
        let mut sample = ProcessSample::new(Identity { process, stack: 0 }, "nginx".into(), 0, 0);
        sample.surroundings.container = Some(Arc::new(container));
        sample.workload = Arc::new(sample.found_workload(None));
        board.follow([(process, Labels::of(&sample))].into_iter());
        let mut profile = Profile::default();
        profile.meta.processes.push(meta::Process { pid: 7, ..meta::Process::default() });
        let published = board.publish(process, Attributed { profile: Arc::new(profile), ..of(Mode::Exact, &[]) });
        let labels: Vec<_> = published.profile.meta.processes[0].container_labels.values().map(String::as_str).collect();
        assert_eq!(labels, ["nginx", "shop", "web-1", "nginx", "nginx", "container"]);
    }
}
