//! The sample model: the agent's data on a process at one moment. Metrics, API, history and pages read only this, through [`super::view`]. All
//! processes together are a [`super::snapshot`].

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::attribution::OfProcess;
use super::view::{Growth, LimitView};
use crate::census::{Census, HeapAccount, Level};
use crate::fragmentation::verdict::Verdict;
use crate::heap::ladder::{Details, Ladder, both};
use crate::process::ProcessId;
use crate::process::container::Surroundings;
use crate::process::workload::Workload;
use crate::process::workload::environment::Named;

/// The identity of a watched process; it changes with exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Pid and start time.
    pub process: ProcessId,
    /// Start of its stack, chosen at random at each exec; 0 if it may not be read.
    pub stack: u64,
}

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WatchState {
    /// Found; no census yet.
    Waiting,
    /// Regular censuses.
    Watched,
    /// No malloc heap that can be read; retried rarely.
    NoHeap,
    /// May not or cannot be read; retried rarely.
    Unreadable,
}

impl WatchState {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Waiting, Self::Watched, Self::NoHeap, Self::Unreadable];

    /// Its name in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Watched => "watched",
            Self::NoHeap => "no_heap",
            Self::Unreadable => "unreadable",
        }
    }
}

/// A census with its time.
#[derive(Debug, Clone)]
pub struct TimedCensus {
    /// When it was finished.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
    /// CPU time it took the agent.
    pub cpu: Duration,
    /// The figures.
    pub census: Census,
}

impl TimedCensus {
    /// Seconds since it was finished.
    #[must_use]
    pub fn age_s(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.at).as_secs_f64()
    }
}

/// One watched process.
#[derive(Debug, Clone)]
pub struct ProcessSample {
    /// Its identity.
    pub identity: Identity,
    /// Its name; any text.
    pub comm: String,
    /// Its user.
    pub uid: u32,
    /// Resident bytes at the last scan of the process list.
    pub rss_bytes: u64,
    /// Its container and memory limit.
    pub surroundings: Surroundings,
    /// What it belongs to.
    pub workload: Arc<Workload>,
    /// Its state.
    pub state: WatchState,
    /// Why it cannot be read.
    pub reason: Option<String>,
    /// The newest census at level top.
    pub top: Option<Arc<TimedCensus>>,
    /// The newest full census, or the newest sampled one if the heap is too large.
    pub full: Option<Arc<TimedCensus>>,
    /// The ladders of its heaps, from both censuses, one per allocator.
    pub heaps: Vec<HeapSample>,
    /// Its verdict, from `full` and `growth`.
    pub verdict: Option<Arc<Verdict>>,
    /// How it changed over its last full censuses.
    pub growth: Option<Growth>,
    /// Results of the tiers that know stacks.
    pub attributed: OfProcess,
}

impl ProcessSample {
    /// A process of which only the identity is known.
    #[must_use]
    pub fn new(identity: Identity, comm: String, uid: u32, rss_bytes: u64) -> Self {
        let surroundings = Surroundings::default();
        Self {
            identity,
            workload: Arc::new(Workload::of(&comm, None, &surroundings.cgroup, None)),
            comm,
            uid,
            rss_bytes,
            surroundings,
            state: WatchState::Waiting,
            reason: None,
            top: None,
            full: None,
            heaps: Vec::new(),
            verdict: None,
            growth: None,
            attributed: OfProcess::default(),
        }
    }

    /// What it belongs to, by its command, its container, and what its environment names.
    #[must_use]
    pub fn found_workload(&self, environment: Option<&Named>) -> Workload {
        let surroundings = &self.surroundings;
        Workload::of(&self.comm, surroundings.container.as_deref(), &surroundings.cgroup, environment)
    }

    /// The texts by which a rule's `workload` may give it: its workload and service, and its container, or its pod if that is not known.
    #[must_use]
    pub fn names_for_rules(&self) -> Vec<String> {
        self.workload.names().into_iter().chain(self.container_name()).collect()
    }

    /// The name of its container, or of its pod if that is not known.
    #[must_use]
    pub fn container_name(&self) -> Option<String> {
        let container = self.surroundings.container.as_ref()?;
        container.name.clone().or_else(|| container.pod.clone())
    }

    /// The steps of all its heaps together; `None` without a heap.
    #[must_use]
    pub fn ladder(&self) -> Option<HeapSample> {
        let (first, others) = self.heaps.split_first()?;
        let mut sum = HeapSample { allocator: ALL.to_owned(), ..first.clone() };
        others.iter().for_each(|heap| sum.add(heap));
        Some(sum)
    }

    /// The memory limit, with the time until it is reached at the observed growth. The limit applies to the whole cgroup: others in it may grow
    /// too.
    #[must_use]
    pub fn limit_view(&self) -> Option<LimitView> {
        let memory = self.surroundings.memory?;
        let limit_bytes = memory.limit_bytes?;
        let rate = self.growth.map(|growth| growth.resident_bytes_per_s).filter(|&rate| rate > 0.0);
        let left = limit_bytes.saturating_sub(memory.working_set_bytes) as f64;
        Some(LimitView {
            limit_bytes,
            used_bytes: memory.working_set_bytes,
            used_ratio: memory.working_set_bytes as f64 / limit_bytes.max(1) as f64,
            seconds_to_limit_est: rate.map(|rate| left / rate),
            oom_kills: memory.oom_kills,
        })
    }

    /// The most detailed census: full or sampled, else top.
    #[must_use]
    pub fn best(&self) -> Option<&Arc<TimedCensus>> {
        self.full.as_ref().or(self.top.as_ref())
    }

    /// The newest census.
    #[must_use]
    pub fn newest(&self) -> Option<&Arc<TimedCensus>> {
        [&self.top, &self.full].into_iter().flatten().max_by_key(|taken| taken.at)
    }

    /// Sets `heaps` from `top` and `full`.
    pub fn join(&mut self) {
        self.heaps = join(self.top.as_deref(), self.full.as_deref());
    }
}

/// The allocator's name of the sum over all allocators.
pub const ALL: &str = "all";

/// The ladder of one allocator's heap in one process, in bytes. `None` = not known at the level of the census.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[allow(missing_docs)] // The names are those of the census.
pub struct HeapSample {
    pub allocator: String,
    #[serde(flatten)]
    pub ladder: Ladder,
    #[serde(flatten)]
    pub details: Details,
    pub live_bytes_est: Option<u64>,
    pub live_bytes_stderr: Option<u64>,
    pub live_resident_bytes: Option<u64>,
    pub live_allocations: Option<u64>,
    pub free_bytes: Option<u64>,
    pub top_bytes: u64,
    pub overhead_bytes: Option<u64>,
    pub mmapped_bytes: u64,
    pub mmapped_allocations: u64,
    pub arenas: u64,
    pub arena_extent_bytes_max: u64,
}

impl HeapSample {
    /// The steps of one heap at one moment.
    #[must_use]
    pub fn of(heap: &HeapAccount, level: Level) -> Self {
        let full = level == Level::Full;
        Self {
            allocator: heap.allocator.name().to_owned(),
            ladder: Ladder { unknown_bytes: heap.ladder.unknown_bytes.filter(|_| full), ..heap.ladder },
            details: heap.details,
            live_bytes_est: heap.live_bytes_est,
            live_bytes_stderr: heap.live_bytes_stderr,
            live_resident_bytes: heap.live_resident_bytes(),
            live_allocations: heap.live_allocations,
            free_bytes: heap.free_bytes,
            top_bytes: heap.top_bytes,
            overhead_bytes: full.then_some(heap.overhead_bytes),
            mmapped_bytes: heap.mmapped_bytes,
            mmapped_allocations: heap.mmapped_allocations,
            arenas: heap.arenas.len() as u64,
            arena_extent_bytes_max: heap.arenas.iter().map(|arena| arena.extent_bytes).max().unwrap_or(0),
        }
    }

    /// Live bytes: counted, or estimated if the heap was sampled.
    #[must_use]
    pub fn live(&self) -> Option<u64> {
        self.ladder.live_bytes.or(self.live_bytes_est)
    }

    /// Fits the steps of an older full census into newer extents and residency: the heap may have shrunk since. If they exceed these by more than
    /// a quarter, they are dropped until the next full census, which such a change brings forward.
    fn fit(&mut self) {
        let exceeds = |bytes: u64, room: u64| bytes > room.saturating_add(room / 4);
        if self.live().is_some_and(|live| exceeds(live, self.ladder.extent_bytes)) {
            (self.ladder.live_bytes, self.live_bytes_est, self.live_bytes_stderr, self.live_allocations) = (None, None, None, None);
        }
        let live = self.live();
        let Ladder { extent_bytes, resident_bytes, live_bytes, trimmable_bytes, pinned_bytes, .. } = &mut self.ladder;
        let (live_resident_bytes, kept_bytes) = (&mut self.live_resident_bytes, &mut self.details.kept_bytes);
        let inside = [&mut *live_resident_bytes, trimmable_bytes, pinned_bytes, kept_bytes];
        if live.is_none() || exceeds(inside.iter().filter_map(|bytes| **bytes).fold(0, u64::saturating_add), *resident_bytes) {
            inside.into_iter().for_each(|bytes| *bytes = None);
        }
        *live_bytes = live_bytes.map(|live| live.min(*extent_bytes));
        self.live_bytes_est = self.live_bytes_est.map(|live| live.min(*extent_bytes));
        *live_resident_bytes = live_resident_bytes.map(|live| live.min(*resident_bytes));
    }

    /// Adds another heap; a step that is unknown for either is unknown.
    pub fn add(&mut self, other: &Self) {
        // Errors of independent samples add up by their squares.
        let errors = |a: Option<u64>, b: Option<u64>| Some((a? as f64).hypot(b? as f64) as u64);
        self.ladder = self.ladder.and(other.ladder, both);
        self.details = self.details.and(other.details);
        self.live_bytes_est = both(self.live_bytes_est, other.live_bytes_est);
        self.live_bytes_stderr = errors(self.live_bytes_stderr, other.live_bytes_stderr);
        self.live_resident_bytes = both(self.live_resident_bytes, other.live_resident_bytes);
        self.live_allocations = both(self.live_allocations, other.live_allocations);
        self.free_bytes = both(self.free_bytes, other.free_bytes);
        self.top_bytes = self.top_bytes.saturating_add(other.top_bytes);
        self.overhead_bytes = both(self.overhead_bytes, other.overhead_bytes);
        self.mmapped_bytes = self.mmapped_bytes.saturating_add(other.mmapped_bytes);
        self.mmapped_allocations = self.mmapped_allocations.saturating_add(other.mmapped_allocations);
        self.arenas = self.arenas.saturating_add(other.arenas);
        self.arena_extent_bytes_max = self.arena_extent_bytes_max.max(other.arena_extent_bytes_max);
    }

    /// Resident bytes of blocks with mappings of their own, outside the arenas. Not known at level top.
    fn mmapped_resident_bytes(census: &Census, allocator: &str) -> u64 {
        let of_heap = |heap: &HeapAccount| {
            let arenas = heap.arenas.iter().map(|arena| arena.resident_bytes).fold(0, u64::saturating_add);
            heap.ladder.resident_bytes.saturating_sub(arenas).min(heap.mmapped_bytes)
        };
        census.heaps.iter().filter(|heap| heap.allocator.name() == allocator).map(of_heap).fold(0, u64::saturating_add)
    }
}

/// The heaps of a census, one per allocator.
fn heaps_of(census: &Census) -> Vec<HeapSample> {
    let mut heaps: Vec<HeapSample> = Vec::new();
    for heap in &census.heaps {
        let one = HeapSample::of(heap, census.level);
        match heaps.iter_mut().find(|other| other.allocator == one.allocator) {
            Some(sum) => sum.add(&one),
            None => heaps.push(one),
        }
    }
    heaps
}

/// Joins the newest cheap census and the newest full one. The steps inside a heap (live, cached, free, trimmable, pinned, …) are from the full
/// one. Those that both have (extent, resident, swapped, top, arenas) are from the newer one; the pages of blocks with mappings of their own,
/// which the cheap one does not read, are carried over from the full one.
fn join(top: Option<&TimedCensus>, full: Option<&TimedCensus>) -> Vec<HeapSample> {
    let (Some(top), Some(full)) = (top, full) else {
        return top.or(full).map(|taken| heaps_of(&taken.census)).unwrap_or_default();
    };
    let mut heaps = heaps_of(&full.census);
    if full.at >= top.at {
        return heaps;
    }
    for fresh in heaps_of(&top.census) {
        let Some(heap) = heaps.iter_mut().find(|heap| heap.allocator == fresh.allocator) else {
            heaps.push(fresh);
            continue;
        };
        let carried = if full.census.level != Level::Top {
            HeapSample::mmapped_resident_bytes(&full.census, &fresh.allocator).min(fresh.mmapped_bytes)
        } else {
            0
        };
        heap.ladder.extent_bytes = fresh.ladder.extent_bytes;
        heap.ladder.resident_bytes = fresh.ladder.resident_bytes.saturating_add(carried);
        heap.details.swapped_bytes = fresh.details.swapped_bytes;
        heap.details.huge_bytes = fresh.details.huge_bytes;
        heap.top_bytes = fresh.top_bytes;
        heap.mmapped_bytes = fresh.mmapped_bytes;
        heap.mmapped_allocations = fresh.mmapped_allocations;
        heap.arenas = fresh.arenas;
        heap.arena_extent_bytes_max = fresh.arena_extent_bytes_max;
        heap.fit();
    }
    heaps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::Allocator;
    use crate::census::{ArenaAccount, WalkQuality};

    fn taken(level: Level, age_s: u64, heap: HeapAccount, now: Instant) -> TimedCensus {
        let census = Census {
            pid: 1,
            comm: "x".into(),
            level,
            heaps: vec![heap],
            rss_bytes: 0,
            not_malloc: Vec::new(),
            runtimes: Default::default(),
            walk: WalkQuality::default(),
            layout_unknown: Vec::new(),
        };
        let at = now.checked_sub(Duration::from_secs(age_s)).unwrap_or(now);
        TimedCensus { at, wall: SystemTime::UNIX_EPOCH, cpu: Duration::ZERO, census }
    }

    fn heap(extent_bytes: u64, resident_bytes: u64, live_bytes: Option<u64>) -> HeapAccount {
        let arenas = vec![ArenaAccount { resident_bytes: 700, ..ArenaAccount::default() }];
        let mmapped_bytes = 400;
        HeapAccount {
            allocator: Allocator::Glibc,
            ladder: Ladder { extent_bytes, resident_bytes, live_bytes, unknown_bytes: Some(0), ..Ladder::default() },
            mmapped_bytes,
            arenas,
            ..HeapAccount::default()
        }
    }

    #[test]
    fn extents_are_of_the_newer_census_and_live_bytes_of_the_full_one() {
        let now = Instant::now();
        let full = taken(Level::Full, 60, heap(2000, 1000, Some(800)), now);
        let top = taken(Level::Top, 1, heap(2500, 900, None), now);
        let joined = join(Some(&top), Some(&full));
        // 300 resident bytes of mmapped blocks were known at the full census.
        assert_eq!((joined[0].ladder.extent_bytes, joined[0].ladder.resident_bytes, joined[0].ladder.live_bytes), (2500, 1200, Some(800)));
        let older = taken(Level::Top, 90, heap(2500, 900, None), now);
        let joined = join(Some(&older), Some(&full));
        assert_eq!((joined[0].ladder.extent_bytes, joined[0].ladder.resident_bytes), (2000, 1000));
        let only = join(Some(&top), None);
        assert_eq!((only[0].ladder.extent_bytes, only[0].ladder.live_bytes), (2500, None));
    }

    #[test]
    fn what_was_inside_a_heap_that_has_shrunk_since_is_fitted_or_forgotten() {
        let now = Instant::now();
        let joined = |extent_bytes: u64, resident_bytes: u64| {
            let mut full = HeapAccount { mmapped_bytes: 0, ..heap(2000, 1000, Some(800)) };
            (full.ladder.trimmable_bytes, full.ladder.pinned_bytes) = (Some(100), Some(50));
            let top = HeapAccount { mmapped_bytes: 0, ..heap(extent_bytes, resident_bytes, None) };
            join(Some(&taken(Level::Top, 1, top, now)), Some(&taken(Level::Full, 60, full, now))).remove(0)
        };
        let inside = |heap: &HeapSample| (heap.ladder.live_bytes, heap.ladder.trimmable_bytes, heap.ladder.pinned_bytes);
        assert_eq!(inside(&joined(2500, 1200)), (Some(800), Some(100), Some(50)));
        assert_eq!(inside(&joined(700, 700)), (Some(700), Some(100), Some(50)), "live is never more than there is");
        assert_eq!(inside(&joined(600, 500)), (None, None, None));
        assert_eq!(
            inside(&joined(900, 100)),
            (Some(800), None, None),
            "live bytes need not be resident, free ones that can be trimmed are"
        );
    }

    #[test]
    fn heaps_of_one_allocator_are_summed_and_an_unknown_step_stays_unknown() {
        let mut one = HeapSample::of(&heap(2000, 1000, Some(800)), Level::Full);
        one.add(&HeapSample::of(&heap(1000, 500, None), Level::Top));
        assert_eq!((one.ladder.extent_bytes, one.ladder.live_bytes, one.ladder.unknown_bytes, one.arenas), (3000, None, None, 2));
    }
}
