//! The metadata of a profile: how and of which processes it was taken, what was lost, and what is in doubt.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::histogram::PowerCounts;
use super::kind::KindSet;
use crate::heap::ladder::Ladder;
use crate::units::{HumanBytes, counted};

/// How the values were obtained, which determines how they are named and shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Every allocation and free of the recording was traced.
    #[default]
    Exact,
    /// Traced in windows under a budget; values are estimates.
    Governed,
    /// Sampled by an emitter in the process; values are estimates.
    Sampled,
    /// Scanned from outside, without events: by `leaks` and `owners`.
    Looked,
    /// Read from a file that another tool wrote.
    Imported,
}

impl Mode {
    /// The mode's name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Governed => "governed",
            Self::Sampled => "sampled",
            Self::Looked => "looked",
            Self::Imported => "imported",
        }
    }

    /// Whether allocations were observed, so that some may have been missed.
    pub fn has_events(self) -> bool {
        !matches!(self, Self::Looked | Self::Imported)
    }

    /// Whether the values are estimates, each with a standard error.
    pub fn estimates(self) -> bool {
        matches!(self, Self::Governed | Self::Sampled)
    }
}

/// A named count with a description, such as one kind of loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Name in snake_case, ending in the unit unless it is a plain count. A key in JSON.
    pub name: String,
    /// The count.
    pub value: u64,
    /// What it counts and what that means for the values, as one phrase.
    pub description: String,
}

impl Counter {
    /// A counter from its three parts.
    pub fn new(name: impl Into<String>, value: u64, description: impl Into<String>) -> Self {
        Self { name: name.into(), value, description: description.into() }
    }
}

/// The ladder of a process's malloc heap in a profile. `None` = not known.
pub type HeapSummary = Ladder<Option<u64>>;

/// The live chunks of a census by owner. The three parts are disjoint and add up to the census's live bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Attribution {
    /// Bytes of chunks with a recorded stack, with the allocator's rounding.
    pub attributed_bytes: u64,
    /// Number of them.
    pub attributed_allocations: u64,
    /// Bytes of chunks that were live when the recording began and still are.
    pub before_attach_bytes: u64,
    /// Number of them.
    pub before_attach_allocations: u64,
    /// Bytes of chunks without a known stack.
    pub unattributed_bytes: u64,
    /// Number of them.
    pub unattributed_allocations: u64,
}

/// The heap at a moment of the recording, by a census.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HeapMoment {
    /// Start of the census, in milliseconds since the start of the recording.
    pub after_ms: u64,
    /// Recorded live bytes at that moment, by the ledger.
    pub recorded_live_bytes: u64,
    /// The ladder.
    pub heap: HeapSummary,
}

/// One process of a profile.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Process {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// The kernel's name of the process, at the end of the recording. Any text.
    pub comm: String,
    /// Where it ran and what it belongs to: `namespace`, `pod`, `container`, and from an agent `workload_kind`, `workload`, `service_name`,
    /// `service_version`, as far as known. They are labels of its samples. Any text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub container_labels: BTreeMap<String, String>,
    /// The allocators that were traced, such as `glibc 2.36`.
    pub allocators: Vec<String>,
    /// Whether records of this process were lost, which puts some of its live bytes in doubt.
    pub lossy: bool,
    /// Time in which it ran without its probes, in microseconds. `None` = not counted, as under a budget, where it usually has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unobserved_us: Option<u64>,
    /// Highest sum of recorded live bytes. `None` = not measured.
    pub peak_inuse_bytes: Option<u64>,
    /// The heap's ladder at the end. `None` = not measured.
    pub heap: Option<HeapSummary>,
    /// Source of its stacks' values, as text, such as `otel_memory in libfragprof_sampler.so`. Empty = probes on the allocator's functions.
    pub source: String,
    /// Number of sampled allocations behind the estimates. `None` = the values are not estimates.
    pub samples: Option<u64>,
    /// Mean distance of the samples in allocated bytes. `None` = not sampled by bytes, or not known.
    pub sample_bytes: Option<u64>,
    /// The longest mean distance of any sample, if the sampler lengthened it for a time. `None` = it was constant, or is not known.
    pub longest_sample_bytes: Option<u64>,
    /// The live chunks at the end by owner. `None` = no census could be joined with the recording.
    pub attribution: Option<Attribution>,
    /// The heap when the recording began; `None` = not measured.
    pub at_start: Option<HeapMoment>,
    /// The heap at the highest recorded live bytes at which a census was taken: near the peak, not exactly at it.
    pub at_peak: Option<HeapMoment>,
    /// Bytes requested by each recorded allocation.
    pub sizes: PowerCounts,
    /// Microseconds from allocation to free, of the recorded allocations that were freed.
    pub lifetimes_us: PowerCounts,
}

/// How one process was watched under a budget.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Governed {
    /// Process id.
    pub pid: u32,
    /// `windows`, `full` (every allocation and free since `full_since_s`), or `full, then windows`.
    pub tier: String,
    /// Share of its running time that the process may lose.
    pub budget_ratio: f64,
    /// Estimated share that it has lost.
    pub slowdown_ratio_est: f64,
    /// Seconds that it ran while it was watched, of which these are shares. 0 = written by an older fragprof.
    pub run_s: f64,
    /// Seconds that windows were open.
    pub open_s: f64,
    /// Seconds traced in full.
    pub full_s: f64,
    /// Windows by length.
    pub windows: BTreeMap<String, u64>,
    /// Of them, those that reached their quota and closed early; windows of their length are left out of the estimates.
    pub windows_closed_early: u64,
    /// Windows left out because records of them were lost.
    pub windows_lossy: u64,
    /// Share of the bytes in windows that came from threads which spent more than half of their time in probes.
    pub saturated_ratio: f64,
    /// Seconds of its own running time, without probes, while it was not traced in full: rates from windows are per second of this.
    pub own_s: f64,
    /// Whether its allocation and survivor values are lower bounds instead of estimates.
    pub rates_are_lower_bounds: bool,
    /// The reason; empty if they are estimates.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub lower_bounds_because: String,
    /// Standard errors of the sums over its stacks, by kind: errors that affect many stacks at once do not cancel out. Empty for lower bounds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub total_stderr: BTreeMap<String, u64>,
    /// Allocations seen.
    pub allocations_seen: u64,
    /// Effective number of windows of equal weight that measure the survivor age, for the degrees of freedom of a confidence interval.
    pub effective_windows: f64,
    /// Its large blocks, tracked all the time in addition to the windows. `None` = written by an older fragprof.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub large_blocks: Option<LargeBlocks>,
}

/// How the large blocks of a process were tracked under a budget: every one from some time on, or none.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LargeBlocks {
    /// `kept`, `tried` (the first second), `left` (too expensive, tried again later) or `none` (not possible here).
    pub state: String,
    /// Why tracking stopped, or is not possible; empty otherwise.
    pub reason: String,
    /// Time since which every one has been seen, in seconds after the process was first watched. `None` = not at present. Values do not
    /// include older blocks.
    pub since_s: Option<f64>,
    /// Smallest size tracked, in bytes.
    pub from_bytes: u64,
    /// Usable bytes of those that are live.
    pub live_bytes: u64,
    /// Their number.
    pub live_allocations: u64,
    /// Their share of the heap's live bytes by its last census. `None` = there was no census.
    pub of_live_ratio: Option<f64>,
    /// Blocks freed since then that were allocated before.
    pub freed_from_before: u64,
    /// Estimated share of its running time that the process lost to this tracking; part of its slowdown.
    pub slowdown_ratio_est: f64,
    /// How often tracking was tried.
    pub trials: u64,
    /// How often it was stopped again.
    pub times_left: u64,
    /// Tracked blocks that were dropped when it stopped.
    pub dropped: u64,
}

/// The metadata of a profile, written as one JSON object in a comment of the pprof file, so new fields need a default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Program and version that recorded, such as `fragprof 0.1.0`.
    pub tool: String,
    /// How the values were obtained.
    pub mode: Mode,
    /// Start of the recording, nanoseconds since the Unix epoch; 0 = not known.
    pub start_unix_ns: u64,
    /// Length of the recording in seconds; 0 = a moment.
    pub duration_s: f64,
    /// Whether a command was recorded from its start, so that it has no memory from before.
    pub is_from_start: bool,
    /// Age in seconds from which an allocation counts as a survivor. `None` = survivors were not measured.
    pub survivor_age_s: Option<f64>,
    /// The kinds that were measured.
    pub kinds: KindSet,
    /// How the processes of a governed recording were watched.
    pub governed: Vec<Governed>,
    /// The recorded processes.
    pub processes: Vec<Process>,
    /// What was lost, by kind. A 0 means that the kind is counted and nothing was lost.
    pub losses: Vec<Counter>,
    /// What was corrected in the ledger, by kind, such as blocks that a census proved free.
    pub corrections: Vec<Counter>,
    /// Number of stack walks by the reason why they ended; [`COMPLETE`] are those that reached the thread's entry.
    pub stack_ends: Vec<Counter>,
    /// Events of the recording that matter to a reader, such as `a library was loaded and probed after 3 s`.
    pub notes: Vec<String>,
    /// What the values do not cover, such as `allocations made before the recording are not in the live bytes`.
    pub limits: Vec<String>,
    /// Reasons to doubt a value, such as `123 frees were lost: live bytes are an upper bound`.
    pub doubts: Vec<String>,
}

/// Names of losses that are not lost events: spells without probes, their time in milliseconds, and children that were not watched.
pub const UNOBSERVED_SPELLS: &str = "unobserved_spells";
/// See [`UNOBSERVED_SPELLS`].
pub const UNOBSERVED_MS: &str = "unobserved_ms";
/// See [`UNOBSERVED_SPELLS`].
pub const UNWATCHED_CHILDREN: &str = "unwatched_children";

/// Name of the stack-end reason of a walk that reached the thread's entry.
pub const COMPLETE: &str = "complete";

impl Process {
    /// The mean distance between samples, in words. `None` = not sampled by bytes, or not known.
    pub fn sample_distance(&self) -> Option<String> {
        let mean = HumanBytes(self.sample_bytes?);
        Some(match self.longest_sample_bytes {
            Some(longest) => format!("{mean} on average (up to {})", HumanBytes(longest)),
            None => mean.to_string(),
        })
    }
}

impl Metadata {
    /// Share of the walks that reached the thread's entry, in 0..=1. `None` when no walk was counted.
    pub fn stacks_complete_ratio(&self) -> Option<f64> {
        let total: u128 = self.stack_ends.iter().map(|c| u128::from(c.value)).sum();
        let complete: u128 = self.stack_ends.iter().filter(|c| c.name == COMPLETE).map(|c| u128::from(c.value)).sum();
        (total > 0).then(|| complete as f64 / total as f64)
    }

    /// Highest sum of recorded live bytes over the processes. Of several processes it is the sum of their peaks, which need not have
    /// been at the same moment. `None` when none was measured.
    pub fn peak_inuse_bytes(&self) -> Option<u64> {
        self.processes.iter().filter_map(|p| p.peak_inuse_bytes).reduce(u64::saturating_add)
    }

    /// The source of a process's values by stack, in words.
    pub fn source_words(&self, process: &Process) -> String {
        match self.mode {
            Mode::Looked => "scans of its memory from outside".to_owned(),
            Mode::Imported => "a profile of another tool".to_owned(),
            Mode::Governed => {
                "governed: windows under a budget, or every call if that fits the budget; estimates with standard errors".to_owned()
            }
            Mode::Exact | Mode::Sampled if process.source.is_empty() => {
                "exact: every allocation and free, by probes on the allocator's functions".to_owned()
            }
            Mode::Exact => format!("exact: {}", process.source.trim_start_matches("in_process: ")),
            Mode::Sampled => {
                let every = process.sample_distance().map_or_else(String::new, |distance| format!(", one sample per {distance}"));
                let samples = process.samples.map_or_else(String::new, |samples| format!(", {}", counted(samples, "sample")));
                format!("{}{every}{samples}; estimates with standard errors", process.source)
            }
        }
    }

    /// The process of a pid.
    pub fn process(&self, pid: u32) -> Option<&Process> {
        self.processes.iter().find(|p| p.pid == pid)
    }
}
