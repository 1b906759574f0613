//! The agent's output model, as plain values: the API sends it, `/metrics` reads it, the history stores it and `top` draws it. Made from a
//! snapshot; no other part computes figures of its own.
//!
//! Keys are in snake_case, end in the unit, and are those of `census --json` and of the metrics. `null` = not known, which is not 0. Texts of
//! processes are as the kernel reports them: they must be escaped when shown.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::attribution::Rates;
use super::sample::{HeapSample, ProcessSample, TimedCensus, WatchState};
use super::snapshot::Snapshot;
use crate::fragmentation::trend::{Change, Shape};
use crate::fragmentation::verdict::Verdict;
use crate::heap::ladder::{extent_ratio, fragmentation_ratio};
use crate::process::container::{CgroupMemory, Container, ContainerId};
use crate::process::workload::Workload;
use crate::profile::{Mode, ValueKind};

/// All watched processes at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct ProcessesView {
    /// Increases by one with each snapshot of an agent.
    pub sequence: u64,
    /// When the snapshot was made, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Seconds since then.
    pub age_s: f64,
    /// Processes selected by the rules, but beyond the limit on their number.
    pub processes_over_limit: u64,
    /// Why no allocations are attributed to call stacks on this machine, though that is configured; null = they are, or it was not tried yet.
    #[serde(default)]
    pub attribution_unavailable: Option<String>,
    /// The processes, by ascending pid.
    pub processes: Vec<ProcessView>,
}

/// One process at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessView {
    /// Process id in the agent's pid namespace.
    pub pid: u32,
    /// Start time in clock ticks since boot: distinguishes processes with the same pid.
    pub start_ticks: u64,
    /// The kernel's name of it.
    pub comm: String,
    /// Its user.
    pub uid: u32,
    /// The container it runs in; null = none known.
    pub container: Option<ContainerView>,
    /// What it belongs to.
    #[serde(default)]
    pub workload: WorkloadView,
    /// Its state.
    pub state: WatchState,
    /// Why it cannot be read.
    pub reason: Option<String>,
    /// Resident bytes of the process.
    pub rss_bytes: u64,
    /// The ladder of all its heaps together, `allocator` = "all"; null = no heap seen yet.
    pub ladder: Option<HeapSample>,
    /// 1 − resident live / resident of the heaps, 0 is perfect.
    pub fragmentation_ratio: Option<f64>,
    /// extent / live of the heaps.
    pub extent_ratio: Option<f64>,
    /// The ladder of each allocator.
    pub heaps: Vec<HeapSample>,
    /// Resident memory outside malloc, by kind of mapping.
    pub not_malloc: Vec<NotMallocView>,
    /// Its verdict in short; `explain` has all of it.
    pub verdict: Option<VerdictView>,
    /// Its growth; null until enough full censuses were taken.
    pub growth: Option<Growth>,
    /// How often it allocates, if a tier measures it.
    pub rates: Option<RatesView>,
    /// Blocks to which no pointer was seen, if that is configured ([leaks]).
    pub unreached: Option<UnreachedView>,
    /// The memory of its container's cgroup, or of its own outside containers.
    pub cgroup_memory: Option<CgroupMemory>,
    /// The same in a sentence, if there is a container or a limit.
    pub cgroup_memory_sentence: Option<String>,
    /// The memory limit it runs under; null = none.
    pub memory_limit: Option<LimitView>,
    /// Its profiles from the tiers that know stacks.
    pub profiles: Vec<ProfileInfo>,
    /// The newest census of each level: its age and quality.
    pub censuses: Vec<CensusInfo>,
}

/// The container of a process, and the pod it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ContainerView {
    /// The runtime's id of it; null for a process of a pod outside its containers.
    pub id: Option<String>,
    /// The engine that created it.
    pub engine: String,
    /// The pod's uid; null outside pods.
    pub pod_uid: Option<String>,
    /// The pod's namespace; null = not known.
    pub namespace: Option<String>,
    /// The pod's name; null = not known.
    pub pod: Option<String>,
    /// The container's name in the pod; null = not known.
    pub name: Option<String>,
    /// The image as the pod names it; null = not known.
    pub image: Option<String>,
    /// The container in a few words.
    pub title: String,
}

impl ContainerView {
    fn of(container: &Container) -> Self {
        Self {
            id: container.id.as_ref().map(|id: &ContainerId| id.as_str().to_owned()),
            engine: container.engine.name().to_owned(),
            pod_uid: container.pod_uid.clone(),
            namespace: container.namespace.clone(),
            pod: container.pod.clone(),
            name: container.name.clone(),
            image: container.image.clone(),
            title: container.title(),
        }
    }
}

/// What a process belongs to: the same for all replicas of a workload on all nodes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct WorkloadView {
    /// Its namespace in the cluster; null outside pods, or if it is not known.
    pub namespace: Option<String>,
    /// `deployment`, `rollout`, `statefulset`, `daemonset`, `cronjob`, `job`, `staticpod`, `pod`, `container`, `systemd` or `command`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// The service: by the pod's labels, the image, the unit, or the command.
    pub service_name: String,
    /// The service's version; null = not known.
    pub service_version: Option<String>,
}

impl WorkloadView {
    fn of(workload: &Workload) -> Self {
        Self {
            namespace: workload.namespace.clone(),
            kind: workload.kind.name().to_owned(),
            name: workload.name.clone(),
            service_name: workload.service_name.clone(),
            service_version: workload.service_version.clone(),
        }
    }
}

/// Blocks in use to which no pointer was seen in several scans. Programs that hide pointers look the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UnreachedView {
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the last scan ended, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// The finding in a sentence.
    pub summary: String,
    /// Reasons to doubt.
    pub doubts: Vec<String>,
}

/// Resident bytes outside malloc.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NotMallocView {
    /// Its kind: `thread_stacks`, `java_heap`, `file_mappings`, …
    pub kind: String,
    /// Resident bytes; shared pages count in each process.
    pub resident_bytes: u64,
    /// Number of mappings.
    pub mappings: u64,
}

/// A verdict in short.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VerdictView {
    /// `leak`, `growing`, `fragmentation`, `hoarding`, `cache`, `arena_blow_up`, `huge_page_bloat`, `not_malloc`, `healthy` or `unknown`.
    pub verdict: String,
    /// `high`, `medium` or `low`.
    pub confidence: String,
    /// One sentence with the numbers.
    pub summary: String,
}

impl VerdictView {
    /// The short form of a verdict.
    #[must_use]
    pub fn of(verdict: &Verdict) -> Self {
        Self {
            verdict: verdict.verdict.name().to_owned(),
            confidence: verdict.confidence.name().to_owned(),
            summary: verdict.summary.clone(),
        }
    }
}

/// The growth of a process over the last full censuses.
///
/// The low-water marks of the newer and the older half are compared, so that temporary allocations are not growth.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Growth {
    /// Time between the middles of the two halves.
    pub seconds: f64,
    /// Number of full censuses it is based on.
    pub censuses: u64,
    /// Change of the live bytes' low-water mark; negative = it shrinks.
    pub live_bytes_delta: i64,
    /// Change of the resident bytes' low-water mark.
    pub resident_bytes_delta: i64,
    /// The change of live bytes per second.
    pub live_bytes_per_s: f64,
    /// The change of resident bytes per second.
    pub resident_bytes_per_s: f64,
    /// The shape of live bytes: `steady`, `comes_and_goes`, `refilling` (rising within what the process held before), `levelled` (rose, then
    /// stopped) or `growing`.
    #[serde(default)]
    pub live_shape: Shape,
    /// The shape of the memory outside malloc, without files and kinds with a limit of their own.
    #[serde(default)]
    pub outside_shape: Shape,
}

impl Growth {
    /// From the samples; `None` while there are too few.
    #[must_use]
    pub fn of(change: &Change) -> Option<Self> {
        (change.live_shape != Shape::Unknown).then_some(Self {
            seconds: change.seconds,
            censuses: change.looks,
            live_bytes_delta: change.live_bytes_delta,
            resident_bytes_delta: change.resident_bytes_delta,
            live_bytes_per_s: change.live_bytes_per_s,
            resident_bytes_per_s: change.resident_bytes_per_s,
            live_shape: change.live_shape,
            outside_shape: change.outside_shape,
        })
    }
}

/// How often a process allocates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RatesView {
    /// Tier that measured it: `exact`, `sampled` or `governed`.
    pub mode: String,
    /// Allocations per second; null = only a lower bound is known.
    pub allocations_per_s: Option<f64>,
    /// Standard error; null = counted, not estimated.
    pub allocations_per_s_stderr: Option<f64>,
    /// Lower bound of the allocations per second; null if an estimate or count is known.
    pub allocations_per_s_min: Option<f64>,
    /// Bytes requested per second; null = only a lower bound is known.
    pub allocated_bytes_per_s: Option<f64>,
    /// Standard error; null = counted, not estimated.
    pub allocated_bytes_per_s_stderr: Option<f64>,
    /// Lower bound of the bytes requested per second; null if an estimate or count is known.
    pub allocated_bytes_per_s_min: Option<f64>,
}

impl RatesView {
    fn of(rates: &Rates, mode: Mode) -> Self {
        let is = |value, bound: bool| (rates.are_lower_bounds == bound).then_some(value);
        Self {
            mode: mode.name().to_owned(),
            allocations_per_s: is(rates.allocations_per_s, false),
            allocations_per_s_stderr: rates.allocations_per_s_stderr,
            allocations_per_s_min: is(rates.allocations_per_s, true),
            allocated_bytes_per_s: is(rates.allocated_bytes_per_s, false),
            allocated_bytes_per_s_stderr: rates.allocated_bytes_per_s_stderr,
            allocated_bytes_per_s_min: is(rates.allocated_bytes_per_s, true),
        }
    }
}

/// A process's memory limit: the lowest of its cgroup's and its ancestors'.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LimitView {
    /// The limit.
    pub limit_bytes: u64,
    /// Memory charged to the cgroup, without inactive page cache.
    pub used_bytes: u64,
    /// used / limit.
    pub used_ratio: f64,
    /// Seconds until the limit is reached if resident bytes continue to grow at this rate; null = they do not grow, or it is not known.
    pub seconds_to_limit_est: Option<f64>,
    /// Processes of the cgroup that the kernel killed for lack of memory since it was created.
    pub oom_kills: u64,
}

/// An available profile.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileInfo {
    /// Tier: `exact`, `sampled` or `governed`.
    pub mode: String,
    /// The source of its values, in words.
    pub source: String,
    /// When it was finished, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// The values it measured: values of the parameter `by`.
    pub by: Vec<String>,
    /// Time it covers.
    pub duration_s: f64,
    /// Estimated share of the target's time that the tier takes.
    pub slowdown_ratio_est: Option<f64>,
    /// Stacks flagged as keeping what they allocate; `None` if survivors are not checked again. The absence of a flag means nothing.
    pub retention_flags: Option<u64>,
}

/// The age and quality of a census.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CensusInfo {
    /// `top`, `sampled` or `full`.
    pub level: String,
    /// When it was finished, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Seconds since then.
    pub age_s: f64,
    /// CPU time it took the agent.
    pub cpu_ms: f64,
    /// Wall time it took, pauses included.
    pub duration_ms: f64,
    /// Whether it is usable for verdicts.
    pub usable: bool,
    /// Bytes not understood or not read.
    pub unknown_bytes: u64,
    /// Bytes of the target's memory read.
    pub read_bytes: u64,
}

/// Seconds since the Unix epoch.
#[must_use]
pub fn unix_s(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

impl ProcessesView {
    /// Everything of a snapshot.
    #[must_use]
    pub fn of(snapshot: &Snapshot, now: Instant) -> Self {
        Self {
            sequence: snapshot.sequence,
            at_unix_s: unix_s(snapshot.wall),
            age_s: now.saturating_duration_since(snapshot.at).as_secs_f64(),
            processes_over_limit: snapshot.processes_over_limit as u64,
            attribution_unavailable: None,
            processes: snapshot.processes.iter().map(|one| ProcessView::of(one, now)).collect(),
        }
    }
}

impl ProcessView {
    /// One process of a snapshot.
    #[must_use]
    pub fn of(one: &ProcessSample, now: Instant) -> Self {
        let ladder = one.ladder();
        let live = ladder.as_ref().and_then(HeapSample::live);
        let rungs = ladder.as_ref().map(|heap| heap.ladder).zip(live);
        Self {
            pid: one.identity.process.pid.0,
            start_ticks: one.identity.process.start_ticks,
            comm: one.comm.clone(),
            uid: one.uid,
            container: one.surroundings.container.as_deref().map(ContainerView::of),
            workload: WorkloadView::of(&one.workload),
            state: one.state,
            reason: one.reason.clone(),
            rss_bytes: one.rss_bytes,
            fragmentation_ratio: rungs.and_then(|(rungs, live)| fragmentation_ratio(live, rungs.resident_bytes)),
            extent_ratio: rungs.and_then(|(rungs, live)| extent_ratio(rungs.extent_bytes, live)),
            heaps: one.heaps.clone(),
            not_malloc: one.best().map(|taken| taken.census.not_malloc.iter().map(NotMallocView::of).collect()).unwrap_or_default(),
            verdict: one.verdict.as_deref().map(VerdictView::of),
            growth: one.growth,
            rates: one.attributed.rates().map(|(rates, mode)| RatesView::of(&rates, mode)),
            unreached: one.attributed.with(ValueKind::UnreachedSpace).map(|known| UnreachedView::of(known)),
            cgroup_memory: one.surroundings.memory,
            cgroup_memory_sentence: one.surroundings.sentence(live, rungs.and_then(|(rungs, _)| rungs.trimmable_bytes)),
            memory_limit: one.limit_view(),
            profiles: one.attributed.all().map(|known| ProfileInfo::of(known)).collect(),
            censuses: [&one.top, &one.full].into_iter().flatten().map(|taken| CensusInfo::of(taken, now)).collect(),
            ladder,
        }
    }
}

impl UnreachedView {
    fn of(known: &super::attribution::Attributed) -> Self {
        let totals = known.profile.totals();
        Self {
            blocks: totals.get(ValueKind::UnreachedObjects),
            bytes: totals.get(ValueKind::UnreachedSpace),
            at_unix_s: unix_s(known.wall),
            summary: known.profile.meta.notes.first().cloned().unwrap_or_default(),
            doubts: known.profile.meta.doubts.clone(),
        }
    }
}

impl NotMallocView {
    fn of(one: &crate::census::NotMalloc) -> Self {
        Self { kind: one.kind.to_owned(), resident_bytes: one.resident_bytes, mappings: one.mappings }
    }
}

impl ProfileInfo {
    fn of(one: &super::attribution::Attributed) -> Self {
        let meta = &one.profile.meta;
        Self {
            mode: meta.mode.name().to_owned(),
            source: meta.processes.first().map_or_else(String::new, |process| meta.source_words(process)),
            at_unix_s: unix_s(one.wall),
            by: meta.kinds.by_names(),
            duration_s: meta.duration_s,
            slowdown_ratio_est: one.slowdown_ratio_est,
            retention_flags: (meta.kinds.contains(ValueKind::SameObjects))
                .then(|| one.profile.stacks().iter().filter(|stack| stack.values.is_flagged()).count() as u64),
        }
    }
}

impl CensusInfo {
    fn of(taken: &TimedCensus, now: Instant) -> Self {
        Self {
            level: taken.census.level.name().to_owned(),
            at_unix_s: unix_s(taken.wall),
            age_s: taken.age_s(now),
            cpu_ms: taken.cpu.as_secs_f64() * 1e3,
            duration_ms: taken.census.walk.duration_ms,
            usable: taken.census.walk.usable,
            unknown_bytes: taken.census.walk.unknown_bytes,
            read_bytes: taken.census.walk.read_bytes,
        }
    }
}
