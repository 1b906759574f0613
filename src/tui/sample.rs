//! The sample model: all watched processes at one moment, as plain values, the only numbers that the views show. Pure.
//!
//! As JSON it is one object with the keys of `report --json` and `census --json`. Unknown values are `null`, never 0.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use crate::profile::json;
use crate::profile::{Counter, Frame, HeapSummary, glue};
use crate::units::StackId;

/// A sample of all watched processes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    /// When it was taken, nanoseconds since the Unix epoch; 0 = not known.
    pub taken_unix_ns: u64,
    /// Seconds since attach.
    pub elapsed_s: f64,
    /// The processes, by pid.
    pub processes: Vec<ProcessSample>,
    /// What was lost, by kind, over all processes. A 0 means that the kind is counted.
    #[serde(serialize_with = "counts")]
    pub losses: Vec<Counter>,
}

/// One process. All figures of allocations count from attach on; older blocks are not included.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProcessSample {
    /// Process id in the initial pid namespace.
    pub pid: u32,
    /// The kernel's name of the process. Any text.
    pub comm: String,
    /// The allocators that are traced.
    pub allocators: Vec<String>,
    /// How it ended, such as `exited with status 0`. `None` = it is running.
    pub end: Option<String>,
    /// Its totals.
    #[serde(flatten)]
    pub totals: Numbers,
    /// Highest sum of recorded live bytes so far.
    #[serde(flatten)]
    pub peak: Peak,
    /// The source of the figures. Empty = probes on the allocator's functions.
    pub source: String,
    /// Frees of blocks that are not in the ledger: allocated before attach, or their record was lost.
    pub unknown_frees: u64,
    /// Its heap.
    #[serde(flatten)]
    pub heap: Heap,
    /// Whether records of it were lost.
    pub lossy: bool,
    /// Reasons to doubt its figures.
    pub doubts: Vec<String>,
    /// Notes on how it is traced.
    pub notes: Vec<String>,
    /// Stacks that allocated anything.
    pub stacks_with_value: usize,
    /// The stacks that are largest by any [`SortKey`], in no order.
    pub stacks: Vec<StackSample>,
}

/// The basis of a heap's figures.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Nothing: it could not be read.
    #[default]
    None,
    /// The allocator's metadata, every chunk.
    Census,
    /// The allocator's metadata; live bytes are an estimate.
    SampledCensus,
    /// The mappings: the extent is an upper bound, and live bytes are known only since attach.
    Mappings,
}

/// A heap's figures read from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HeapReading {
    /// Its basis.
    pub basis: Basis,
    /// The ladder, as far as the basis gives it.
    pub ladder: HeapSummary,
    /// Heap pages in swap. `None` = not known.
    pub swapped_bytes: Option<u64>,
    /// Estimate of the live bytes. `None` = not estimated.
    pub live_bytes_est: Option<u64>,
    /// Standard error of the estimate.
    pub live_bytes_stderr: Option<u64>,
    /// `1 − live / resident`, by the census.
    pub fragmentation_ratio: Option<f64>,
    /// `extent / live`, by the census.
    pub extent_ratio: Option<f64>,
}

/// The heap of a process, as far as it is known from outside.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Heap {
    /// What it rests on.
    #[serde(rename = "heap_basis")]
    pub basis: Basis,
    /// The ladder. `live_bytes` is `None` if blocks from before attach are not known; `unknown_bytes` are then the resident bytes that are free
    /// or were allocated before.
    #[serde(flatten)]
    pub ladder: HeapSummary,
    /// Live bytes outside recorded blocks: allocated before attach, or rounding of chunks. `None` = not known.
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
    /// Upper bound of [`fragmentation_ratio`](Self::fragmentation_ratio), as if all unknown bytes were free. `None` = not known.
    pub fragmentation_ratio_max: Option<f64>,
    /// `extent / live`. `None` = not known.
    pub extent_ratio: Option<f64>,
    /// Upper bound of [`extent_ratio`](Self::extent_ratio). `None` = not known.
    pub extent_ratio_max: Option<f64>,
}

impl Heap {
    /// Joins the figures read with the recording: `inuse_bytes` are live since attach.
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
        // An exact ratio needs no bound; an estimate of live bytes is better than the recorded part of them.
        if fragmentation_ratio.is_none() {
            let at_least = HeapSummary { live_bytes: Some(live_bytes.unwrap_or(inuse_bytes)), ..ladder };
            heap.fragmentation_ratio_max = at_least.fragmentation_ratio();
            heap.extent_ratio_max = at_least.extent_ratio();
        }
        heap
    }
}

/// The highest live bytes; its JSON key says whether they were counted or estimated.
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
    /// Of the bytes requested.
    pub allocated_bytes: u64,
    /// Of the allocations.
    pub allocations: u64,
}

/// The figures of a stack, or of a process. As JSON, estimates have names of their own, and standard errors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Numbers {
    /// Bytes outstanding.
    pub inuse_bytes: u64,
    /// Blocks outstanding.
    pub inuse_allocations: u64,
    /// Bytes requested since attach.
    pub allocated_bytes: u64,
    /// Allocations since attach.
    pub allocations: u64,
    /// Bytes requested per second since the last sample. `None` = this is the first.
    pub allocated_bytes_per_s: Option<f64>,
    /// Allocations per second since the last sample. `None` = this is the first.
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
    /// Fills in the rates from the counts of `seconds` ago.
    #[must_use]
    pub fn with_rates(self, before: Counted, seconds: f64) -> Self {
        let rate = |now: u64, before: u64| (seconds > 0.0).then(|| now.saturating_sub(before) as f64 / seconds);
        Self {
            allocated_bytes_per_s: rate(self.allocated_bytes, before.allocated_bytes),
            allocations_per_s: rate(self.allocations, before.allocations),
            ..self
        }
    }

    /// Whether all of it is 0.
    pub fn is_zero(&self) -> bool {
        self.allocations == 0 && self.inuse_allocations == 0 && self.growth_bytes == 0
    }
}

/// The running counts for rates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// Allocations so far.
    pub allocations: u64,
    /// Bytes requested so far.
    pub allocated_bytes: u64,
}

/// A stack's identity while its process is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackKey {
    /// Number of images the process had before this one.
    pub image: u64,
    /// The stack's number in the image's ledger.
    pub id: StackId,
}

/// One stack.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StackSample {
    /// Its identity.
    #[serde(skip)]
    pub key: StackKey,
    /// Its figures.
    #[serde(flatten)]
    pub numbers: Numbers,
    /// Its frames.
    #[serde(flatten)]
    pub named: Named,
}

/// A stack's named frames.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Named {
    /// Frames, leaf first. Empty if they are not named yet.
    #[serde(serialize_with = "frames")]
    pub frames: Arc<[Frame]>,
    /// Index of the frame that allocated the memory: the first outside the allocator.
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

    /// The frame that allocated the memory. `None` = not named yet.
    pub fn title(&self) -> Option<&Frame> {
        self.frames.get(self.title)
    }

    /// Its callers, nearest first.
    pub fn callers(&self) -> &[Frame] {
        self.frames.get(self.title + 1..).unwrap_or_default()
    }
}

/// The value by which stacks are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SortKey {
    /// Bytes outstanding.
    #[default]
    Live,
    /// Blocks outstanding.
    Count,
    /// Bytes requested per second.
    BytesPerSecond,
    /// Allocations per second.
    AllocationsPerSecond,
    /// Bytes by which the address space grew.
    Growth,
}

impl SortKey {
    /// Every key, in the order of key `s`.
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

    /// The value. Rates are whole numbers here: below one per second the order does not matter.
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

/// Sorts the table: largest first, equal ones by live bytes, then by age, so that rows do not swap needlessly.
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
    fn without_a_census_blocks_from_before_attach_are_unknown_and_never_free() {
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
    fn with_a_census_live_bytes_outside_recorded_blocks_are_unattributed() {
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
    fn rates_are_the_counts_since_the_last_sample_divided_by_the_time() {
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
