//! The history's output model: columns of equal length, one entry per point in time. `null` = not known at that time.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::heap::ladder::Ladder;
use crate::model::view::{ContainerView, ProcessView, WorkloadView};

/// A process in the history, running or not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PastProcess {
    /// Process id; pids are reused, so a process is identified by pid and `start_ticks`.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Its name.
    pub comm: String,
    /// Its container.
    pub container: Option<ContainerView>,
    /// What it belongs to; null = not recorded, by an older version.
    #[serde(default)]
    pub workload: Option<WorkloadView>,
    /// First sample within the requested span, seconds since the Unix epoch.
    pub first_unix_s: f64,
    /// Last sample within the requested span.
    pub last_unix_s: f64,
    /// Whether it is watched now.
    pub is_running: bool,
}

/// The processes in the history within a span.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct PastProcesses {
    /// Start of the span, seconds since the Unix epoch.
    pub from_unix_s: f64,
    /// Its end.
    pub to_unix_s: f64,
    /// The processes, the last one seen first.
    pub processes: Vec<PastProcess>,
    /// Number of processes left out because there are too many.
    pub processes_dropped: u64,
}

/// The stored figures of a process: one of each (`Option<u64>`), or a column of each.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs)] // The names are those of the ladder.
pub struct Figures<T> {
    pub rss_bytes: T,
    #[serde(flatten)]
    pub ladder: Ladder<T, T>,
    pub swapped_bytes: T,
    pub cached_bytes: T,
    pub free_bytes: T,
    pub top_bytes: T,
    pub kept_bytes: T,
    pub mmapped_bytes: T,
    pub arenas: T,
}

/// The ladder of one process over time. A point is the last sample of its step. Live bytes are counted, or estimated if the heap was sampled.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs)] // The names are those of the ladder.
pub struct HistoryView {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Its name.
    pub comm: String,
    /// Start of the span, seconds since the Unix epoch.
    pub from_unix_s: f64,
    /// Its end.
    pub to_unix_s: f64,
    /// Shortest time between two points; samples within a step are one point.
    pub step_s: f64,
    /// Times of the points, ascending, seconds since the Unix epoch. All columns below have this length.
    pub at_unix_s: Vec<f64>,
    /// The figures.
    #[serde(flatten)]
    pub figures: Figures<Vec<Option<u64>>>,
    /// The largest of the samples of a point.
    pub rss_bytes_max: Vec<Option<u64>>,
    /// The process's memory limit.
    pub limit_bytes: Vec<Option<u64>>,
    /// Bytes of blocks to which no pointer was seen at the last scan, if that is configured ([leaks]).
    pub unreached_bytes: Vec<Option<u64>>,
    /// The verdict's name.
    pub verdict: Vec<Option<String>>,
    /// Times of stored profiles by stack: values for `at` of `profile`, and for `diff`.
    pub profiles_unix_s: Vec<f64>,
    /// Events of the process within the span.
    pub events: Vec<EventView>,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The kernel killed the process for lack of memory.
    OomKill,
    /// Its memory limit is nearly reached.
    MemoryLimit,
    /// It ended.
    Exit,
    /// It was made to give free memory back, or would have been in a dry run.
    Trim,
    /// It runs with a setting that was advised for an earlier process of the same workload, and was compared with that.
    Setting,
}

impl EventKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::OomKill, Self::MemoryLimit, Self::Exit, Self::Trim, Self::Setting];

    /// Its name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::OomKill => "oom_kill",
            Self::MemoryLimit => "memory_limit",
            Self::Exit => "exit",
            Self::Trim => "trim",
            Self::Setting => "setting",
        }
    }
}

/// A flight record: a process's last state at an event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventView {
    /// Increases with each event.
    pub id: u64,
    /// What happened.
    pub kind: EventKind,
    /// When it was noticed, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// One sentence: the event, the memory, the verdict.
    pub summary: String,
    /// How it is known, and how certain it is.
    pub evidence: String,
    /// The last complete sample of the process: its ladder, verdict, limit.
    pub process: ProcessView,
    /// Age of the newest census in it when the event was noticed, in seconds.
    pub sample_age_s: Option<f64>,
    /// Values of `by` that its profile has; empty = there was no profile.
    pub profile_by: Vec<String>,
    /// Of a trim: fact beside prediction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trim: Option<TrimView>,
    /// Of a remedy that was applied: what it saved beside what was predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<OutcomeView>,
}

/// A remedy that was applied: what it saved beside what `explain` had predicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OutcomeView {
    /// The container's name, or the pod's, or else the command's.
    pub workload: String,
    /// The remedy, in the words of `explain`.
    pub action: String,
    /// What was seen: the call, or the settings that changed.
    pub applied: String,
    /// Resident bytes that it was predicted to save.
    pub predicted_bytes: u64,
    /// Whether that was only an upper limit.
    pub at_most: bool,
    /// Resident bytes of the heap that it saved; negative = there are more than before.
    pub saved_bytes: i64,
    /// What was compared.
    pub basis: String,
}

impl OutcomeView {
    /// What was saved, as a share of what was predicted.
    #[must_use]
    pub fn saved_ratio(&self) -> f64 {
        self.saved_bytes as f64 / self.predicted_bytes.max(1) as f64
    }
}

/// What predictions of one remedy were worth, from the times it was applied and checked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TrackRecord {
    /// The remedy, in the words of `explain`.
    pub action: String,
    /// Whether its predictions are upper limits.
    pub at_most: bool,
    /// Whether the figures are of this workload alone; otherwise it was never checked there, and they are of all workloads of the node.
    pub of_workload: bool,
    /// How often it was checked.
    pub checked: u64,
    /// Sum of the predictions.
    pub predicted_bytes: u64,
    /// Sum of what was saved.
    pub saved_bytes: i64,
    /// The smallest share of its prediction that one saved; negative = more memory than before.
    pub saved_ratio_min: f64,
    /// The largest such share.
    pub saved_ratio_max: f64,
}

impl TrackRecord {
    /// In words, for a line below the remedy.
    #[must_use]
    pub fn words(&self) -> String {
        let whose = if self.of_workload { "this workload" } else { "other workloads of this node" };
        let percent = |ratio: f64| format!("{:.0}", ratio * 100.0);
        let (low, high) = (percent(self.saved_ratio_min), percent(self.saved_ratio_max));
        let shares = if low == high { low } else { format!("{low} to {high}") };
        let of = if self.at_most { "the upper limit" } else { "what was predicted" };
        format!("checked {} on {whose}: it saved {shares} % of {of}", times(self.checked))
    }
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        _ => format!("{count} times"),
    }
}

/// Memory given back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TrimView {
    /// The call.
    pub call: String,
    /// It was only planned.
    pub dry_run: bool,
    /// Bytes that it was predicted to give back.
    pub predicted_bytes: u64,
    /// Bytes by which the heap's resident memory fell; `null` in a dry run, or if that is not known.
    pub given_back_bytes: Option<u64>,
    /// Longest time for which a lock was predicted to be held.
    pub predicted_stall_s: f64,
    /// Predicted duration of the call.
    pub predicted_s: f64,
    /// Its duration; `null` in a dry run.
    pub took_s: Option<f64>,
}

/// Events, the newest first.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
pub struct EventsView {
    /// The events.
    pub events: Vec<EventView>,
    /// Number of events within the span that are not in the list, because of `limit`.
    pub events_left_out: u64,
}

/// One side of a difference. Live bytes are counted, or estimated if the heap was sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs)] // The names are those of the ladder.
pub struct LadderAt {
    /// When the sample was taken, seconds since the Unix epoch: the last one at or before the requested time.
    pub at_unix_s: f64,
    #[serde(flatten)]
    pub figures: Figures<Option<u64>>,
    pub verdict: Option<String>,
}

/// What changed between two times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DiffView {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// The earlier sample.
    pub from: LadderAt,
    /// The later sample.
    pub to: LadderAt,
    /// `to` minus `from` by key; steps unknown on either side are left out.
    pub delta_bytes: std::collections::BTreeMap<String, i64>,
    /// The difference by stack; null = there are no two profiles that measured `by`.
    pub stacks: Option<StacksDiff>,
}

/// The difference of two profiles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StacksDiff {
    /// Parameter `by`.
    pub by: String,
    /// When the earlier profile was taken.
    pub from_unix_s: f64,
    /// When the later profile was taken.
    pub to_unix_s: f64,
    /// Sum over all stacks of the earlier profile.
    pub old_total: u64,
    /// Sum over all stacks of the later profile.
    pub new_total: u64,
    /// Number of stacks that changed; `stacks` may have fewer.
    pub stacks_changed: u64,
    /// The largest changes first.
    pub stacks: Vec<StackDiff>,
}

/// One stack that changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StackDiff {
    /// Functions, leaf first, escaped for display.
    pub frames: Vec<String>,
    /// Index in `frames` of the first function outside the allocator and library allocation code: the title of the stack.
    pub title: u64,
    /// Value in the earlier profile.
    pub old: u64,
    /// Value in the later profile.
    pub new: u64,
    /// new − old.
    pub delta: i64,
}
