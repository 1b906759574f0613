//! Counters and states of the agent's threads, for metrics.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use serde::Serialize;

use crate::process::ProcessId;
use crate::profile::Counter;
use crate::session::tier::sampled::EmitterTotals;
use crate::session::tier::windows::Status;

/// The governor's state, for metrics.
#[derive(Debug, Clone, Default)]
pub struct GovernedSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Why attribution is not available here.
    pub unavailable: Option<String>,
    /// Cost of a hit in seconds: allocation, free.
    pub hit_cost_s: (f64, f64),
    /// Of each attributed process: its name and its state.
    pub targets: Vec<(String, Status)>,
    /// Processes that could be attributed.
    pub candidates: usize,
    /// CPU time of the governor's thread.
    pub cpu_s: f64,
    /// Times that the number of targets was halved for lack of CPU time.
    pub shed_cpu: u64,
    /// Times that all targets were released for lack of memory.
    pub shed_memory: u64,
    /// Processes that could not be watched.
    pub refused: u64,
    /// Lost records so far, by kind.
    pub losses: Vec<Counter>,
    /// Sums over the targets that were released or ended, so that counters do not fall: windows, closed early, lossy.
    pub past: [u64; 3],
}

/// The listener's state, for metrics.
#[derive(Debug, Clone, Default)]
pub struct ListeningSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Why listening is not available here.
    pub unavailable: Option<String>,
    /// Of each process that is listened to: its name and what was received.
    pub targets: Vec<(String, EmitterTotals)>,
    /// Processes with an emitter that are not listened to because there are too many.
    pub over_limit: usize,
    /// Scans for emitters.
    pub looks: u64,
    /// Processes with an emitter that could not be listened to.
    pub refused: u64,
    /// Censuses joined.
    pub joins: u64,
    /// Censuses that were left out because the heap is too large.
    pub joins_too_large: u64,
    /// CPU time of the listener's thread.
    pub cpu_s: f64,
    /// Of the processes that were released or ended, so that counters do not fall: samples, lost samples, lost frees.
    pub past: [u64; 3],
}

/// The findings in one process.
#[derive(Debug, Clone)]
pub struct LeakFound {
    /// The process.
    pub process: ProcessId,
    /// Its name.
    pub comm: String,
    /// Blocks to which no pointer was seen.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// When the last scan ended.
    pub at: Instant,
}

/// State of the thread that scans for leaks, for metrics.
#[derive(Debug, Clone, Default)]
pub struct LeaksSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// The findings of each scanned process that is still running.
    pub found: Vec<LeakFound>,
    /// Processes scanned so far.
    pub looked: u64,
    /// Processes that could not be scanned.
    pub failed: u64,
    /// Processes whose heap exceeds the limits.
    pub too_large: usize,
    /// CPU time of the thread.
    pub cpu_s: f64,
}

/// State of the thread that gives memory back, for metrics.
#[derive(Debug, Clone, Default)]
pub struct ReclaimSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Whether it is only counted.
    pub dry_run: bool,
    /// Calls made.
    pub calls: u64,
    /// Calls that would have been made in a dry run.
    pub dry_calls: u64,
    /// Calls that were wanted and refused, by the refusal's name.
    pub refused: BTreeMap<&'static str, u64>,
    /// Bytes that the calls were predicted to give back.
    pub predicted_bytes: u64,
    /// Bytes that they gave back.
    pub given_back_bytes: u64,
    /// Bytes that those of a dry run were predicted to give back.
    pub dry_predicted_bytes: u64,
    /// Duration of the calls.
    pub took_s: f64,
    /// Predicted stalls, summed.
    pub predicted_stall_s: f64,
    /// Calls whose thread's system call returned EINTR.
    pub interrupted: u64,
    /// Calls that gave back less than predicted, or took longer.
    pub disappointments: u64,
    /// Processes that are left alone for that reason.
    pub aside: usize,
    /// Calls after which the process took half of the memory again before its next call was due.
    pub in_vain: u64,
}

/// State of the thread that brings the sampler to processes, for metrics.
#[derive(Debug, Clone, Default)]
pub struct AttachSample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Processes to which it is attached now.
    pub attached: usize,
    /// Processes that a rule covers, beyond the limit.
    pub over_limit: usize,
    /// Calls made in processes.
    pub calls: u64,
    /// Processes in which it was refused, by the refusal's name; each attempt counts.
    pub refused: BTreeMap<&'static str, u64>,
    /// Processes that are left alone for that reason.
    pub aside: usize,
    /// How long their threads stood.
    pub stopped_s: f64,
    /// Calls whose thread's system call returned EINTR.
    pub interrupted: u64,
}

/// State of the runtime's plugin that starts containers with the sampler, for metrics.
#[derive(Debug, Clone, Default)]
pub struct DeliverySample {
    /// Whether it is configured.
    pub enabled: bool,
    /// Whether the runtime has accepted it.
    pub is_connected: bool,
    /// Connections that ended or could not be made.
    pub connections_lost: u64,
    /// Containers started with the sampler, by the name of their C library.
    pub delivered: BTreeMap<&'static str, u64>,
    /// Containers that were to have it and started untouched, by the refusal's name.
    pub refused: BTreeMap<&'static str, u64>,
    /// Containers that did not ask.
    pub not_asked: u64,
    /// Messages that were not understood.
    pub not_understood: u64,
    /// Time that the runtime waited for answers.
    pub took_s: f64,
    /// The longest of them.
    pub longest_s: f64,
}

/// Counters of pushes.
#[derive(Debug, Default)]
pub struct PushCounters {
    /// Profiles that the server accepted.
    pub sent: AtomicU64,
    /// Bytes of the accepted requests' bodies.
    pub bytes: AtomicU64,
    /// Profiles without anything new since the last one, which were not sent.
    pub unchanged: AtomicU64,
    /// Stacks summed in a profile's remainder.
    pub remainders: AtomicU64,
    /// Rounds put off because of the limit on bytes a day.
    pub rounds_put_off: AtomicU64,
    /// Requests that failed; the profile is sent again.
    pub failures: AtomicU64,
    /// Profiles dropped because too many were waiting. Their allocations are in the process's next one, unless it has ended.
    pub dropped: AtomicU64,
    /// Profiles that the server rejected (4xx). Their allocations are in the process's next one, unless it has ended.
    pub refused: AtomicU64,
    /// Profiles that are waiting.
    pub waiting: AtomicU64,
}

/// The server's counters.
#[derive(Debug, Clone, Copy, Default)]
pub struct HttpCounters {
    /// Requests answered.
    pub requests: u64,
    /// Of them, refused for lack of a token.
    pub unauthorized: u64,
    /// Of the unauthorized, those answered late because the client was refused too often.
    pub slowed: u64,
    /// Connections closed at once because too many were open.
    pub refused: u64,
    /// Idle connections closed because another one needed the slot.
    pub displaced: u64,
    /// Connections closed because a request did not arrive in time.
    pub late: u64,
}

/// The state of the runtime, for the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct CriStatus {
    /// Whether the last request was answered; `None` before the first, or if names are off.
    pub up: Option<bool>,
    /// Requests that were answered.
    pub answers: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Containers with names.
    pub containers: u64,
    /// Containers and pods in answers that were ignored.
    pub refused: u64,
}
