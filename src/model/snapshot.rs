//! All data of the agent at one moment.
//!
//! A [`Snapshot`] is immutable and shared; the census thread publishes a new one, readers keep theirs as long as they need it.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use serde::Serialize;

use super::counters::CriStatus;
use super::sample::ProcessSample;
use super::seen::Candidate;
use crate::process::workload::Workload;

/// The agent's counters since its start.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct AgentCounters {
    /// The container runtime.
    pub cri: CriStatus,
    /// Scans of the process list.
    pub scans: u64,
    /// Failed scans.
    pub scan_errors: u64,
    /// Censuses by level: top, sampled, full.
    pub censuses: [u64; 3],
    /// CPU time of censuses by level, in seconds.
    pub census_cpu_s: [f64; 3],
    /// Bytes of target memory read.
    pub read_bytes: u64,
    /// Censuses that failed because the process had ended.
    pub gone: u64,
    /// Censuses that failed otherwise.
    pub refused: u64,
    /// Censuses that are not usable for verdicts.
    pub unusable: u64,
    /// Skipped full rounds of a process, for lack of budget.
    pub full_rounds_skipped: u64,
    /// Skipped cheap rounds of a process, for lack of budget.
    pub top_rounds_skipped: u64,
    /// Cheap censuses put off beyond their interval, because they take too large a share of the budget for one process.
    pub top_stretched: u64,
    /// Skipped cheap censuses of processes without activity since their last one.
    pub top_quiet: u64,
    /// Samples of a heap that gave no verdict, so that it was walked.
    pub samples_open: u64,
    /// Heaps sampled instead of walked, because the walk may need too much memory.
    pub sampled_too_large: u64,
    /// Heaps sampled instead of walked, because the agent itself was above its memory limit.
    pub sampled_memory: u64,
    /// Arenas left out of stored censuses.
    pub arenas_dropped: u64,
    /// CPU time of the census thread, in seconds.
    pub thread_cpu_s: f64,
    /// Watched processes that ended, or ran another program.
    pub ended: u64,
    /// Flight records by kind, in the order of [`crate::store::view::EventKind::ALL`].
    pub flight_records: [u64; 5],
    /// Exits of watched processes that were too small for a flight record.
    pub exits_passed_over: u64,
    /// Requested maps of an address space.
    pub maps: u64,
    /// Of them, refused for lack of budget or memory.
    pub maps_refused: u64,
    /// Configuration reloads.
    pub reloads: u64,
    /// Reloads with an invalid configuration.
    pub reload_errors: u64,
}

/// The state at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Increases by one with each snapshot.
    pub sequence: u64,
    /// When it was made.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
    /// When the agent started.
    pub started: Instant,
    /// Watched processes, by ascending pid.
    pub processes: Vec<Arc<ProcessSample>>,
    /// Processes too small to be watched, at the last scan of the process list.
    pub small: Arc<[Candidate]>,
    /// Processes on the machine, without kernel threads and zombies.
    pub processes_on_machine: usize,
    /// Processes selected by the rules, but beyond the limit on their number.
    pub processes_over_limit: usize,
    /// Whether each process found at start has had its first census.
    pub first_round_done: bool,
    /// The agent's own resident bytes.
    pub own_rss_bytes: u64,
    /// Configured share of one core, 1 = all of it.
    pub budget_ratio: f64,
    /// Configured limit of the agent's own resident bytes, above which it samples instead of walking.
    pub memory_max_bytes: u64,
    /// Processes with series of their own in `/metrics`; 0 = no series by process at all.
    pub metrics_processes_max: usize,
    /// Series of all workloads together in `/metrics`.
    pub metrics_workload_series_max: usize,
    /// Processes that the kernel killed for lack of memory since the agent's start, by workload, for those with a kill within an hour or with
    /// processes.
    pub workload_kills: Arc<BTreeMap<Arc<Workload>, u64>>,
    /// Counters.
    pub counters: AgentCounters,
}

impl Snapshot {
    /// The state before the first scan.
    #[must_use]
    pub fn empty(now: Instant) -> Self {
        Self {
            sequence: 0,
            at: now,
            wall: SystemTime::now(),
            started: now,
            processes: Vec::new(),
            small: Arc::default(),
            processes_on_machine: 0,
            processes_over_limit: 0,
            first_round_done: false,
            own_rss_bytes: 0,
            budget_ratio: 0.0,
            memory_max_bytes: 0,
            metrics_processes_max: 0,
            metrics_workload_series_max: 0,
            workload_kills: Arc::default(),
            counters: AgentCounters::default(),
        }
    }

    /// A watched process.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<&Arc<ProcessSample>> {
        let index = self.processes.binary_search_by_key(&pid, |one| one.identity.process.pid.0).ok()?;
        self.processes.get(index)
    }
}

/// Holds the newest snapshot.
#[derive(Debug)]
pub struct Published(RwLock<Arc<Snapshot>>);

impl Published {
    /// Starts with an empty one.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self(RwLock::new(Arc::new(Snapshot::empty(now))))
    }

    /// The newest snapshot.
    #[must_use]
    pub fn load(&self) -> Arc<Snapshot> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces it.
    pub fn store(&self, snapshot: Snapshot) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(snapshot);
    }
}
