//! What the agent's threads count and tell of themselves, for metrics.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use serde::Serialize;

use crate::profile::Counter;
use crate::recorder::Heard;
use crate::recorder::governed::Status;
use crate::target::ProcessId;

/// What the governor does, for metrics.
#[derive(Debug, Clone, Default)]
pub struct GovernedSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Why nothing can be attributed here.
    pub unavailable: Option<String>,
    /// Cost of a hit in seconds: allocation, free.
    pub hit_cost_s: (f64, f64),
    /// Of each attributed process: its name and how it is watched.
    pub targets: Vec<(String, Status)>,
    /// Processes that could be attributed.
    pub candidates: usize,
    /// Processor time of the governor's thread.
    pub cpu_s: f64,
    /// Times that the number of targets was halved for want of processor time.
    pub shed_cpu: u64,
    /// Times that all targets were let go for want of memory.
    pub shed_memory: u64,
    /// Processes that could not be watched.
    pub refused: u64,
    /// What was lost of the records so far, by kind.
    pub losses: Vec<Counter>,
    /// Sums over the targets that were let go or ended, so that counters do not fall: windows, closed early, lossy.
    pub past: [u64; 3],
}

/// What the listener does, for metrics.
#[derive(Debug, Clone, Default)]
pub struct ListeningSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Why nothing can be heard here.
    pub unavailable: Option<String>,
    /// Of each process that is listened to: its name and what it told.
    pub targets: Vec<(String, Heard)>,
    /// Processes with an emitter that are not listened to because there are too many.
    pub over_limit: usize,
    /// Looks for emitters.
    pub looks: u64,
    /// Processes with an emitter that could not be listened to.
    pub refused: u64,
    /// Censuses joined.
    pub joins: u64,
    /// Censuses that were left out because the heap is too large.
    pub joins_too_large: u64,
    /// Processor time of the listener's thread.
    pub cpu_s: f64,
    /// Of the processes that were let go or ended, so that counters do not fall: samples, lost samples, lost frees.
    pub past: [u64; 3],
}

/// What was found in one process.
#[derive(Debug, Clone)]
pub struct LeakFound {
    /// Who it is.
    pub process: ProcessId,
    /// Its name.
    pub comm: String,
    /// Blocks to which no pointer was seen.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the last look ended.
    pub at: Instant,
}

/// What the thread does, for metrics.
#[derive(Debug, Clone, Default)]
pub struct LeaksSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// What was found, of each process that was looked at and lives.
    pub found: Vec<LeakFound>,
    /// Processes looked at so far.
    pub looked: u64,
    /// Processes that could not be looked at.
    pub failed: u64,
    /// Processes whose heap is larger than what is looked at.
    pub too_large: usize,
    /// Processor time of the thread.
    pub cpu_s: f64,
}

/// What was sent and what was not.
#[derive(Debug, Default)]
pub struct PushCounters {
    /// Profiles that the server took.
    pub sent: AtomicU64,
    /// Requests that failed; the profile is tried again.
    pub failures: AtomicU64,
    /// Profiles dropped because too many waited. Their allocations are in the process's next one, unless it has ended.
    pub dropped: AtomicU64,
    /// Profiles the server refused for good (4xx). Their allocations are in the process's next one, unless it has ended.
    pub refused: AtomicU64,
    /// Profiles that wait.
    pub waiting: AtomicU64,
}

/// What the server counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct HttpCounters {
    /// Requests answered.
    pub requests: u64,
    /// Of them, turned away for want of a token.
    pub unauthorized: u64,
    /// Of the unauthorized, those whose answer was held back because the client was wrong too often.
    pub slowed: u64,
    /// Connections closed at once because too many were open.
    pub refused: u64,
    /// Connections that did nothing and were closed because another one needed the place.
    pub displaced: u64,
    /// Connections closed because a request did not arrive in time.
    pub late: u64,
}

/// What is known of the runtime. Small, for the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CriStatus {
    /// Whether the last question was answered; `None` before the first, or if nobody is asked.
    pub up: Option<bool>,
    /// Questions that were answered.
    pub answers: u64,
    /// Questions that were not.
    pub failures: u64,
    /// Containers with names.
    pub containers: u64,
    /// Containers and pods in answers that were not taken.
    pub refused: u64,
}
