//! One look at everything that is watched, as plain values: the only numbers that the views show. Pure.
//!
//! As JSON it is one object with the keys of `report --json` and `census --json`. What is not known is `null`, never 0.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::profile::json;
use crate::profile::{Counter, Frame, HeapSummary, glue};
use crate::units::StackId;

/// One look at all watched processes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// When it was taken, nanoseconds since the Unix epoch; 0 = not known.
    pub taken_unix_ns: u64,
    /// Seconds since the processes were attached to.
    pub elapsed_s: f64,
    /// The processes, by pid.
    pub processes: Vec<ProcessSample>,
    /// What was lost, by kind, over all processes. Zeros say that the kind is counted.
    #[serde(serialize_with = "counts")]
    pub losses: Vec<Counter>,
}

/// One process. All figures of allocations count from the attach on; what was allocated before is not in them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProcessSample {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// The kernel's name of the process. Any text.
    pub comm: String,
    /// The allocators that are traced.
    pub allocators: Vec<String>,
    /// How it ended, such as `exited with status 0`. `None` = it runs.
    pub end: Option<String>,
    /// What it did and holds in all.
    #[serde(flatten)]
    pub totals: Numbers,
    /// Highest sum of recorded live bytes so far.
    #[serde(flatten)]
    pub peak: Peak,
    /// Where the figures come from, if not from the allocator's functions. Empty = from those.
    pub source: String,
    /// Frees of blocks that are not in the books: allocated before the attach, or their record was lost.
    pub unknown_frees: u64,
    /// Its heap.
    #[serde(flatten)]
    pub heap: Heap,
    /// Whether records of it were lost.
    pub lossy: bool,
    /// Reasons to doubt its figures.
    pub doubts: Vec<String>,
    /// What a reader should know of how it is traced.
    pub notes: Vec<String>,
    /// Stacks that allocated anything.
    pub stacks_with_value: usize,
    /// The stacks that are largest by any [`SortKey`], in no order.
    pub stacks: Vec<StackSample>,
}

/// What the figures of a heap rest on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Nothing: it could not be read.
    #[default]
    None,
    /// The allocator's own account, every chunk.
    Census,
    /// The allocator's own account; live bytes are an estimate.
    SampledCensus,
    /// The mappings: the extent is an upper bound, and what is live is known only since the attach.
    Mappings,
}

/// What was read of a heap, from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeapReading {
    /// What it rests on.
    pub basis: Basis,
    /// The ladder, as far as the basis tells.
    pub ladder: HeapSummary,
    /// Heap pages in swap. `None` = not known.
    pub swapped_bytes: Option<u64>,
    /// Estimate of the live bytes. `None` = not estimated.
    pub live_bytes_est: Option<u64>,
    /// Standard error of the estimate.
    pub live_bytes_stderr: Option<u64>,
    /// `1 − live / resident`, of what the census saw.
    pub fragmentation_ratio: Option<f64>,
    /// `extent / live`, of what the census saw.
    pub extent_ratio: Option<f64>,
}

/// The heap of a process, as far as it can be seen from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Heap {
    /// What it rests on.
    #[serde(rename = "heap_basis")]
    pub basis: Basis,
    /// The ladder. `live_bytes` is `None` where blocks from before the attach are not known; `unknown_bytes` then are those resident
    /// that are free or were allocated before.
    #[serde(flatten)]
    pub ladder: HeapSummary,
    /// Live bytes that no recorded block owns: allocated before the attach, or rounding of chunks. `None` = not known.
    pub unattributed_bytes: Option<u64>,
    /// Estimate of the live bytes. `None` = not estimated.
    pub live_bytes_est: Option<u64>,
    /// Standard error of the estimate.
    pub live_bytes_stderr: Option<u64>,
    /// Heap pages in swap. `None` = not known.
    pub swapped_bytes: Option<u64>,
    /// Memory of the whole process in RAM (the kernel's RSS). `None` = not known.
    pub rss_bytes: Option<u64>,
    /// `1 − live / resident`, 0..=1. `None` = not known.
    pub fragmentation_ratio: Option<f64>,
    /// What [`fragmentation_ratio`](Self::fragmentation_ratio) is at most: as if all that is unknown were free. `None` = not known.
    pub fragmentation_ratio_max: Option<f64>,
    /// `extent / live`. `None` = not known.
    pub extent_ratio: Option<f64>,
    /// What [`extent_ratio`](Self::extent_ratio) is at most. `None` = not known.
    pub extent_ratio_max: Option<f64>,
}

impl Heap {
    /// What was read, joined with what was recorded: `inuse_bytes` live since the attach.
    pub fn of(reading: &HeapReading, inuse_bytes: u64, rss_bytes: Option<u64>) -> Self {
        let HeapReading { basis, ladder, swapped_bytes, live_bytes_est, live_bytes_stderr, fragmentation_ratio, extent_ratio } = *reading;
        let live_bytes = ladder.live_bytes.or(live_bytes_est);
        let mut heap = Self {
            basis,
            ladder,
            unattributed_bytes: live_bytes.map(|live| live.saturating_sub(inuse_bytes)),
            live_bytes_est,
            live_bytes_stderr,
            swapped_bytes,
            rss_bytes,
            fragmentation_ratio,
            extent_ratio,
            ..Self::default()
        };
        if live_bytes.is_none() {
            heap.ladder.unknown_bytes = ladder.resident_bytes.map(|resident| resident.saturating_sub(inuse_bytes));
        }
        // Known exactly, a ratio needs no bound; an estimate of live bytes is better than what happens to be recorded.
        if fragmentation_ratio.is_none() {
            let at_least = HeapSummary { live_bytes: Some(live_bytes.unwrap_or(inuse_bytes)), ..ladder };
            heap.fragmentation_ratio_max = at_least.fragmentation_ratio();
            heap.extent_ratio_max = at_least.extent_ratio();
        }
        heap
    }
}

/// The highest live bytes; as JSON under the name that says whether they were counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Peak {
    /// Bytes.
    pub bytes: u64,
    /// Whether they are an estimate.
    pub is_estimate: bool,
}

impl Serialize for Peak {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let name = if self.is_estimate { "peak_inuse_bytes_est" } else { "peak_inuse_bytes" };
        serializer.collect_map([(name, self.bytes)])
    }
}

/// Standard errors of a sample's figures, in their units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Errors {
    /// Of the bytes outstanding.
    pub inuse_bytes: u64,
    /// Of the blocks outstanding.
    pub inuse_allocations: u64,
    /// Of the bytes asked for.
    pub allocated_bytes: u64,
    /// Of the allocations.
    pub allocations: u64,
}

/// What a stack, or a process, did and holds. As JSON, estimates have names of their own, with their standard errors beside them.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Numbers {
    /// Bytes outstanding.
    pub inuse_bytes: u64,
    /// Blocks outstanding.
    pub inuse_allocations: u64,
    /// Bytes asked for since the attach.
    pub allocated_bytes: u64,
    /// Allocations since the attach.
    pub allocations: u64,
    /// Bytes asked for a second since the last sample. `None` = this is the first.
    pub allocated_bytes_per_s: Option<f64>,
    /// Allocations a second since the last sample. `None` = this is the first.
    pub allocations_per_s: Option<f64>,
    /// Of the bytes outstanding, those whose free may have been missed.
    pub doubtful_bytes: u64,
    /// Bytes by which it made the address space grow.
    pub growth_bytes: u64,
    /// `None` = the figures were counted, not estimated.
    pub errors: Option<Errors>,
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        let errors = self.errors.unwrap_or_default();
        let est = if self.errors.is_some() { "_est" } else { "" };
        let counts = [
            ("inuse_bytes", self.inuse_bytes, errors.inuse_bytes),
            ("inuse_allocations", self.inuse_allocations, errors.inuse_allocations),
            ("allocated_bytes", self.allocated_bytes, errors.allocated_bytes),
            ("allocations", self.allocations, errors.allocations),
        ];
        for (name, value, error) in counts {
            map.serialize_entry(&format!("{name}{est}"), &value)?;
            if self.errors.is_some() {
                map.serialize_entry(&format!("{name}_stderr"), &error)?;
            }
        }
        map.serialize_entry(&format!("allocated_bytes_per_s{est}"), &self.allocated_bytes_per_s)?;
        map.serialize_entry(&format!("allocations_per_s{est}"), &self.allocations_per_s)?;
        map.serialize_entry(&format!("doubtful_bytes{est}"), &self.doubtful_bytes)?;
        // Not measured by a sample.
        map.serialize_entry("growth_bytes", &self.errors.is_none().then_some(self.growth_bytes))?;
        map.end()
    }
}

impl Numbers {
    /// Fills in the rates from what was counted `seconds` ago.
    #[must_use]
    pub fn with_rates(self, before: Counted, seconds: f64) -> Self {
        let rate = |now: u64, before: u64| (seconds > 0.0).then(|| now.saturating_sub(before) as f64 / seconds);
        Self {
            allocated_bytes_per_s: rate(self.allocated_bytes, before.allocated_bytes),
            allocations_per_s: rate(self.allocations, before.allocations),
            ..self
        }
    }

    /// Whether there is nothing in it.
    pub fn is_zero(&self) -> bool {
        self.allocations == 0 && self.inuse_allocations == 0 && self.growth_bytes == 0
    }
}

/// The running counts that rates are made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Allocations so far.
    pub allocations: u64,
    /// Bytes asked for so far.
    pub allocated_bytes: u64,
}

/// A stack's identity while its process is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackKey {
    /// How many images the process had before this one.
    pub image: u64,
    /// The stack's number in the image's ledger.
    pub id: StackId,
}

/// One stack.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StackSample {
    /// Who it is.
    #[serde(skip)]
    pub key: StackKey,
    /// What it did and holds.
    #[serde(flatten)]
    pub numbers: Numbers,
    /// Its frames.
    #[serde(flatten)]
    pub named: Named,
}

/// A stack's frames with what is said of them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Named {
    /// Frames, leaf first. Empty if they are not named yet.
    #[serde(serialize_with = "frames")]
    pub frames: Arc<[Frame]>,
    /// Index of the frame that asked for the memory: the first outside the allocator.
    #[serde(skip)]
    pub title: usize,
    /// Why the walk ended before the thread's entry. `None` = it did not.
    pub truncated: Option<&'static str>,
}

impl Named {
    /// A stack of these frames, leaf first.
    pub fn new(frames: Vec<Frame>, truncated: Option<&'static str>) -> Self {
        Self { title: glue::leading_frames(frames.iter()), frames: frames.into(), truncated }
    }

    /// A stack whose frames are not named yet.
    pub fn not_yet() -> Self {
        Self { frames: Arc::new([]), title: 0, truncated: None }
    }

    /// The frame that asked for the memory. `None` = not named yet.
    pub fn title(&self) -> Option<&Frame> {
        self.frames.get(self.title)
    }

    /// Its callers, nearest first.
    pub fn callers(&self) -> &[Frame] {
        self.frames.get(self.title + 1..).unwrap_or_default()
    }
}

/// What stacks are ranked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortKey {
    /// Bytes outstanding.
    #[default]
    Live,
    /// Blocks outstanding.
    Count,
    /// Bytes asked for a second.
    BytesPerSecond,
    /// Allocations a second.
    AllocationsPerSecond,
    /// Bytes by which the address space grew.
    Growth,
}

impl SortKey {
    /// Every key, in the order in which they take turns.
    pub const ALL: [Self; 5] = [Self::Live, Self::Count, Self::BytesPerSecond, Self::AllocationsPerSecond, Self::Growth];

    /// In a sentence.
    pub fn words(self) -> &'static str {
        match self {
            Self::Live => "live bytes",
            Self::Count => "live blocks",
            Self::BytesPerSecond => "bytes/s",
            Self::AllocationsPerSecond => "allocations/s",
            Self::Growth => "growth",
        }
    }

    /// The next key in turn.
    #[must_use]
    pub fn next(self) -> Self {
        let at = Self::ALL.iter().position(|&key| key == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// The value ranked by. Rates are whole numbers here: below one a second the order does not matter.
    pub fn of(self, numbers: &Numbers) -> u64 {
        match self {
            Self::Live => numbers.inuse_bytes,
            Self::Count => numbers.inuse_allocations,
            Self::BytesPerSecond => numbers.allocated_bytes_per_s.unwrap_or(0.0) as u64,
            Self::AllocationsPerSecond => numbers.allocations_per_s.unwrap_or(0.0) as u64,
            Self::Growth => numbers.growth_bytes,
        }
    }
}

/// The order of the table: largest first, equal ones by what they hold, then by age, so that rows do not swap places for nothing.
pub fn rank(stacks: &mut [&StackSample], by: SortKey) {
    stacks.sort_by(|a, b| {
        let largest = by.of(&b.numbers).cmp(&by.of(&a.numbers));
        largest.then(b.numbers.inuse_bytes.cmp(&a.numbers.inuse_bytes)).then(a.key.cmp(&b.key))
    });
}

fn counts<S: Serializer>(counters: &[Counter], serializer: S) -> Result<S::Ok, S::Error> {
    counters.iter().map(|counter| (counter.name.as_str(), counter.value)).collect::<BTreeMap<_, _>>().serialize(serializer)
}

fn frames<S: Serializer>(frames: &Arc<[Frame]>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(frames.iter().map(json::frame))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tui::testing;

    fn mappings(extent_bytes: u64, resident_bytes: u64) -> HeapReading {
        let ladder = HeapSummary { extent_bytes: Some(extent_bytes), resident_bytes: Some(resident_bytes), ..HeapSummary::default() };
        HeapReading { basis: Basis::Mappings, ladder, ..HeapReading::default() }
    }

    #[test]
    fn without_a_census_what_was_allocated_before_the_attach_is_unknown_and_never_free() {
        let heap = Heap::of(&mappings(400, 300), 75, None);
        assert_eq!((heap.ladder.live_bytes, heap.unattributed_bytes), (None, None));
        assert_eq!(heap.ladder.unknown_bytes, Some(225));
        assert_eq!((heap.fragmentation_ratio, heap.fragmentation_ratio_max), (None, Some(0.75)));
        assert_eq!((heap.extent_ratio, heap.extent_ratio_max), (None, Some(400.0 / 75.0)));
    }

    #[test]
    fn more_recorded_than_resident_leaves_nothing_unknown() {
        let heap = Heap::of(&mappings(400, 50), 75, None);
        assert_eq!((heap.ladder.unknown_bytes, heap.fragmentation_ratio_max), (Some(0), Some(0.0)));
    }

    #[test]
    fn with_a_census_what_no_recorded_block_owns_is_unattributed() {
        let mut reading = mappings(400, 300);
        reading.ladder.live_bytes = Some(200);
        reading.ladder.unknown_bytes = Some(1);
        reading.fragmentation_ratio = Some(0.3);
        let heap = Heap::of(&reading, 75, None);
        assert_eq!((heap.unattributed_bytes, heap.ladder.unknown_bytes), (Some(125), Some(1)));
        assert_eq!((heap.fragmentation_ratio, heap.fragmentation_ratio_max), (Some(0.3), None));
    }

    #[test]
    fn an_estimate_is_never_given_as_the_figure() {
        let reading = HeapReading { live_bytes_est: Some(240), live_bytes_stderr: Some(9), ..mappings(400, 300) };
        let heap = Heap::of(&reading, 75, None);
        assert_eq!((heap.ladder.live_bytes, heap.live_bytes_est, heap.unattributed_bytes), (None, Some(240), Some(165)));
        assert_eq!((heap.ladder.unknown_bytes, heap.fragmentation_ratio), (None, None));
    }

    #[test]
    fn rates_are_what_was_counted_since_the_last_sample_by_its_time() {
        let now = Numbers { allocations: 30, allocated_bytes: 700, ..Numbers::default() };
        let rated = now.with_rates(Counted { allocations: 10, allocated_bytes: 500 }, 2.0);
        assert_eq!((rated.allocations_per_s, rated.allocated_bytes_per_s), (Some(10.0), Some(100.0)));
        assert_eq!(now.with_rates(Counted::default(), 0.0).allocations_per_s, None);
        // A new image counts from 0.
        let restarted = now.with_rates(Counted { allocations: 100, allocated_bytes: 100 }, 1.0);
        assert_eq!(restarted.allocations_per_s, Some(0.0));
    }

    #[test]
    fn the_sample_object_has_snake_case_keys_with_the_unit_last() {
        let mut sample = testing::shop();
        sample.processes.truncate(1);
        sample.processes[0].stacks.truncate(1);
        insta::assert_json_snapshot!(serde_json::to_value(&sample).unwrap());
    }
}
