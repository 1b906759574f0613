//! What a profile says about itself: how it was taken, of which processes, what was lost, and what is in doubt.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::histogram::PowerCounts;
use super::kind::KindSet;
use crate::units::{HumanBytes, counted};

/// How the values came about; decides what they may claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Every allocation and free of the recording was traced.
    #[default]
    Exact,
    /// Traced in windows that a budget sized; values are estimates.
    Governed,
    /// Sampled by an emitter in the process; values are estimates.
    Sampled,
    /// Looked at from outside, without events: the blocks to which no pointer was seen.
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

    /// Whether allocations were watched, so that some may have been missed.
    pub fn has_events(self) -> bool {
        !matches!(self, Self::Looked | Self::Imported)
    }

    /// Whether the values are estimates, with a standard error each.
    pub fn estimates(self) -> bool {
        matches!(self, Self::Governed | Self::Sampled)
    }
}

/// A named count with words for people, such as one kind of loss.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// Name in snake_case, unit last where it is not a plain count. A key in JSON.
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

/// The ladder of a process's malloc heap at the end of the recording, in bytes. `None` = not known.
///
/// extent ≥ resident ≥ live; free = resident − live = trimmable + pinned, as far as the parts are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HeapSummary {
    /// Address space that the allocator holds.
    pub extent_bytes: Option<u64>,
    /// The part of the extent that is in RAM.
    pub resident_bytes: Option<u64>,
    /// Chunks in use, with their rounding where that is known.
    pub live_bytes: Option<u64>,
    /// Whole free pages: what a trim gives back.
    pub trimmable_bytes: Option<u64>,
    /// Free bytes on pages that also hold a live byte.
    pub pinned_bytes: Option<u64>,
    /// Bytes of which it is not known whether they are live or free, such as what was allocated before the recording.
    pub unknown_bytes: Option<u64>,
}

impl HeapSummary {
    /// `1 − live / resident`, in 0..=1; 0 is perfect. `None` where a part is not known or nothing is resident. Live bytes above
    /// resident ones (untouched or swapped pages) give 0.
    pub fn fragmentation_ratio(&self) -> Option<f64> {
        let (live, resident) = (self.live_bytes?, self.resident_bytes?);
        (resident > 0).then(|| (1.0 - live as f64 / resident as f64).max(0.0))
    }

    /// `extent / live`, ≥ 1 in an intact heap. `None` where a part is not known or nothing is live.
    pub fn extent_ratio(&self) -> Option<f64> {
        let (extent, live) = (self.extent_bytes?, self.live_bytes?);
        (live > 0).then(|| extent as f64 / live as f64)
    }
}

/// Whose the live chunks of a census are. The three parts are disjoint and add up to the census's live bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Attribution {
    /// Bytes of chunks that recorded stacks own, with the allocator's rounding.
    pub attributed_bytes: u64,
    /// Number of them.
    pub attributed_allocations: u64,
    /// Bytes of chunks that were live when the recording began and still are.
    pub before_attach_bytes: u64,
    /// Number of them.
    pub before_attach_allocations: u64,
    /// Bytes of chunks whose owner is not known.
    pub unattributed_bytes: u64,
    /// Number of them.
    pub unattributed_allocations: u64,
}

/// The heap at a moment of the recording, by a census of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HeapMoment {
    /// When the census began, in milliseconds since the recording did.
    pub after_ms: u64,
    /// Recorded live bytes at that moment, as the ledger had them.
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
    /// Where it ran: `namespace`, `pod`, `container`, as far as they are known. They are labels of its samples. Any text.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub container_labels: BTreeMap<String, String>,
    /// The allocators that were traced, such as `glibc 2.36`.
    pub allocators: Vec<String>,
    /// Whether records of this process were lost: its live bytes are then partly in doubt.
    pub lossy: bool,
    /// Time in which it ran without its probes, in microseconds. `None` = not counted, as under a budget, where that is the rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unobserved_us: Option<u64>,
    /// Highest sum of recorded live bytes. `None` = not measured.
    pub peak_inuse_bytes: Option<u64>,
    /// The heap's ladder at the end. `None` = not measured.
    pub heap: Option<HeapSummary>,
    /// Where the values of its stacks come from, for people, such as `otel_memory in libfragprof_sampler.so`. Empty = the allocator's
    /// functions themselves.
    pub source: String,
    /// Allocations that the estimates rest on. `None` = the values are no estimates.
    pub samples: Option<u64>,
    /// Mean distance of the samples in allocated bytes. `None` = not sampled by bytes, or not known.
    pub sample_bytes: Option<u64>,
    /// The longest mean distance that a sample was drawn with, where the sampler made them rarer than usual for a time. `None` = all have
    /// the same, or it is not known.
    pub longest_sample_bytes: Option<u64>,
    /// Whose the live chunks are at the end. `None` = no census could be joined with the recording.
    pub attribution: Option<Attribution>,
    /// The heap when the recording began; `None` = not measured.
    pub at_start: Option<HeapMoment>,
    /// The heap at the highest recorded live bytes at which a census was taken: near the peak, not at it to the byte.
    pub at_peak: Option<HeapMoment>,
    /// Bytes asked for by each recorded allocation.
    pub sizes: PowerCounts,
    /// Microseconds from each recorded allocation to its free, of those that were freed.
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
    /// Share of its running time that the process might lose.
    pub budget_ratio: f64,
    /// Share that it is estimated to have lost.
    pub slowdown_ratio_est: f64,
    /// Seconds that windows were open.
    pub open_s: f64,
    /// Seconds traced in full.
    pub full_s: f64,
    /// Windows by length.
    pub windows: BTreeMap<String, u64>,
    /// Of them, those that their quota closed early; the lengths they are of are left out of the estimates.
    pub windows_closed_early: u64,
    /// Windows left out because records of them were lost.
    pub windows_lossy: u64,
    /// Share of the bytes in windows that came from threads whose probes took more than half of their time.
    pub saturated_ratio: f64,
    /// Seconds that it ran by itself, probes left out, while it was not traced in full: what windows tell is per second of this.
    pub own_s: f64,
    /// Whether all that is said of what it allocated and what outlived an age are lower bounds, and no estimates.
    pub rates_are_lower_bounds: bool,
    /// Why; empty where they are estimates.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub lower_bounds_because: String,
    /// Standard errors of the sums over its stacks, by kind: what happens to many stacks at once does not cancel out. Empty of lower bounds.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub total_stderr: BTreeMap<String, u64>,
    /// Allocations seen.
    pub allocations_seen: u64,
    /// Windows of equal weight that tell of the survivor age: what a confidence interval's degrees of freedom come from.
    pub effective_windows: f64,
    /// Its large blocks, watched all the time beside the windows. `None` = of an older fragprof.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub large_blocks: Option<LargeBlocks>,
}

/// How the large blocks of a process were watched under a budget: every one from a moment on, or none.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LargeBlocks {
    /// `kept`, `tried` (the first second), `left` (too dear, tried again later) or `none` (not possible here).
    pub state: String,
    /// Why they were left, or not possible; empty otherwise.
    pub reason: String,
    /// Since when every one has been seen, in seconds after the process was first watched. `None` = not now. Older ones are in no value.
    pub since_s: Option<f64>,
    /// Blocks of at least this many bytes are seen.
    pub from_bytes: u64,
    /// Bytes that those which live can hold.
    pub live_bytes: u64,
    /// Their number.
    pub live_allocations: u64,
    /// What that is of the heap's live bytes by its last census. `None` = no census could tell.
    pub of_live_ratio: Option<f64>,
    /// Blocks freed since that were handed out before.
    pub freed_from_before: u64,
    /// Share of its time that the process is estimated to have lost to them; part of its slowdown.
    pub slowdown_ratio_est: f64,
    /// Times that they were tried.
    pub trials: u64,
    /// Times that they were left again.
    pub times_left: u64,
    /// Blocks that were known when they were left, and dropped.
    pub dropped: u64,
}

/// What a profile says about itself. Travels as one JSON object in a comment of the pprof file, so new fields need a default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Metadata {
    /// Program and version that recorded, such as `fragprof 0.1.0`.
    pub tool: String,
    /// How the values came about.
    pub mode: Mode,
    /// Start of the recording, nanoseconds since the Unix epoch; 0 = not known.
    pub start_unix_ns: u64,
    /// Length of the recording in seconds; 0 = a moment.
    pub duration_s: f64,
    /// Age in seconds from which an allocation counts as a survivor. `None` = survivors were not measured.
    pub survivor_age_s: Option<f64>,
    /// The kinds that were measured.
    pub kinds: KindSet,
    /// How the processes of a governed recording were watched.
    pub governed: Vec<Governed>,
    /// The recorded processes.
    pub processes: Vec<Process>,
    /// What was lost, by kind. Zeros may be left in: they say that the kind is counted.
    pub losses: Vec<Counter>,
    /// What was put right in the books, by kind, such as blocks that a census proved free.
    pub corrections: Vec<Counter>,
    /// How many stack walks ended for which reason; the reason named [`COMPLETE`] is the good one.
    pub stack_ends: Vec<Counter>,
    /// What the recording did that a reader should know, such as `a library was loaded and probed after 3 s`.
    pub notes: Vec<String>,
    /// What the values do not cover, such as `allocations made before the recording are not in the live bytes`.
    pub limits: Vec<String>,
    /// Reasons to doubt a value, such as `123 frees were lost: live bytes are an upper bound`.
    pub doubts: Vec<String>,
}

/// Names of losses that are no lost events but time without probes, and processes: spells, their time in milliseconds, and children.
pub const UNOBSERVED_SPELLS: &str = "unobserved_spells";
/// See [`UNOBSERVED_SPELLS`].
pub const UNOBSERVED_MS: &str = "unobserved_ms";
/// See [`UNOBSERVED_SPELLS`].
pub const UNWATCHED_CHILDREN: &str = "unwatched_children";

/// Name of the stack-end reason of a walk that reached the thread's entry.
pub const COMPLETE: &str = "complete";

impl Process {
    /// How many allocated bytes a sample is drawn from, in words. `None` = not sampled by bytes, or not known.
    pub fn sample_distance(&self) -> Option<String> {
        let mean = HumanBytes(self.sample_bytes?);
        Some(match self.longest_sample_bytes {
            Some(longest) => format!("{mean} on average (up to {} where they came too often)", HumanBytes(longest)),
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

    /// Where a process's values by stack come from, in words.
    pub fn source_words(&self, process: &Process) -> String {
        match self.mode {
            Mode::Looked => "looks at its memory from outside".to_owned(),
            Mode::Imported => "a profile of another tool".to_owned(),
            Mode::Governed => "governed: windows under a budget, or every call where that fits it; estimates with their errors".to_owned(),
            Mode::Exact | Mode::Sampled if process.source.is_empty() => {
                "exact: every allocation and free, by probes on the allocator's functions".to_owned()
            }
            Mode::Exact | Mode::Sampled => {
                let every = process.sample_distance().map_or_else(String::new, |distance| format!(", one sample in {distance}"));
                let samples = process.samples.map_or_else(String::new, |samples| format!(", {}", counted(samples, "sample")));
                format!("{}{every}{samples}; estimates with their errors", process.source)
            }
        }
    }

    /// The process of a pid.
    pub fn process(&self, pid: u32) -> Option<&Process> {
        self.processes.iter().find(|p| p.pid == pid)
    }
}
