//! The profile as one JSON object, as `report --json` and `export --format json` print it.
//!
//! Keys are in snake_case with the unit last. A value that was not measured is `null`, never 0. Stable keys: `duration_s`, `mode`,
//! `totals`, `losses`, `attributed_ratio`, `stacks_complete_ratio`, `stacks` with `frames` leaf first, and in `totals` and each stack those of
//! [`ValueKind::json_key`] for the seven fixed kinds and the peak.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::coverage::Coverage;
use super::diff::Diff;
use super::glue;
use super::kind::{KindSet, StandardErrors, ValueKind, Values};
use super::meta::{Attribution, Counter, Governed, HeapMoment, HeapSummary, Process};
use super::model::{Profile, Stack};
use crate::frame::Frame;

/// The JSON text of a profile, ending in a newline: stacks by descending value of `by`, at most `top` of them. Without `top` all of them,
/// including those for which `by` is 0: what was freed is not live, but was allocated.
pub fn to_string(profile: &Profile, by: ValueKind, top: Option<usize>) -> String {
    to_string_with(profile, by, top, None)
}

/// Like [`to_string`], with what would be saved without the first stacks, under `without`.
pub fn to_string_with(profile: &Profile, by: ValueKind, top: Option<usize>, without: Option<&serde_json::Value>) -> String {
    let mut ranked = profile.ranked(by);
    let with_value = ranked.len();
    match top {
        Some(top) => ranked.truncate(top),
        None => ranked.extend(profile.stacks().iter().filter(|stack| stack.values.get(by) == 0)),
    }
    let meta = &profile.meta;
    let mut totals_kinds = meta.kinds;
    if meta.peak_inuse_bytes().is_some() {
        totals_kinds = totals_kinds.with(ValueKind::PeakSpace);
    }
    let coverage = Coverage::of(profile);
    let report = Report {
        tool: &meta.tool,
        mode: meta.mode.name(),
        start_unix_ns: (meta.start_unix_ns > 0).then_some(meta.start_unix_ns),
        duration_s: meta.duration_s,
        survivor_age_s: meta.survivor_age_s,
        by: by.json_key(),
        totals: Numbers {
            values: profile.totals(),
            errors: meta.mode.estimates().then(|| profile.total_errors()),
            kinds: totals_kinds,
            bounds: profile.total_is_lower_bound(ValueKind::AllocSpace),
        },
        losses: counts(&meta.losses),
        corrections: counts(&meta.corrections),
        attributed_ratio: coverage.attributed_ratio(),
        coverage,
        stacks_complete_ratio: meta.stacks_complete_ratio(),
        stack_ends: counts(&meta.stack_ends),
        doubts: &meta.doubts,
        limits: &meta.limits,
        notes: &meta.notes,
        processes: meta.processes.iter().map(|process| self::process(process, meta.mode.estimates())).collect(),
        governed: &meta.governed,
        stacks_with_value: with_value,
        stacks: ranked.iter().map(|stack| row(profile, stack)).collect(),
        without,
    };
    // Plain numbers, texts and lists: this cannot fail.
    let mut text = serde_json::to_string(&report).unwrap_or_default();
    text.push('\n');
    text
}

/// The JSON text of a difference, ending in a newline: changed stacks, the largest change first, at most `top` of them.
pub fn diff_to_string(diff: &Diff<'_>, by: ValueKind, top: Option<usize>) -> String {
    let rows = diff.rows.iter().take(top.unwrap_or(usize::MAX));
    let report = DiffReport {
        by: by.json_key(),
        old_total: diff.old_total,
        new_total: diff.new_total,
        old_is_lower_bound: diff.lower_bounds[0],
        new_is_lower_bound: diff.lower_bounds[1],
        stacks_changed: diff.rows.len(),
        stacks: rows
            .map(|row| DiffStack { frames: row.frames.iter().map(|f| frame(f)).collect(), old: row.old, new: row.new, delta: row.delta() })
            .collect(),
    };
    let mut text = serde_json::to_string(&report).unwrap_or_default();
    text.push('\n');
    text
}

#[derive(Serialize)]
struct DiffReport<'a> {
    by: &'static str,
    old_total: u64,
    new_total: u64,
    old_is_lower_bound: bool,
    new_is_lower_bound: bool,
    stacks_changed: usize,
    stacks: Vec<DiffStack<'a>>,
}

#[derive(Serialize)]
struct DiffStack<'a> {
    frames: Vec<FrameRow<'a>>,
    old: u64,
    new: u64,
    delta: i128,
}

#[derive(Serialize)]
struct Report<'a> {
    tool: &'a str,
    mode: &'static str,
    start_unix_ns: Option<u64>,
    duration_s: f64,
    survivor_age_s: Option<f64>,
    by: &'static str,
    totals: Numbers,
    losses: BTreeMap<&'a str, u64>,
    corrections: BTreeMap<&'a str, u64>,
    /// Share of the live heap, by the census at the end, that has a stack; `null` without a census.
    attributed_ratio: Option<f64>,
    coverage: Coverage,
    stacks_complete_ratio: Option<f64>,
    stack_ends: BTreeMap<&'a str, u64>,
    doubts: &'a [String],
    limits: &'a [String],
    notes: &'a [String],
    processes: Vec<ProcessRow<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    governed: &'a [Governed],
    stacks_with_value: usize,
    stacks: Vec<StackRow<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    without: Option<&'a serde_json::Value>,
}

#[derive(Serialize)]
struct ProcessRow<'a> {
    pid: u32,
    comm: &'a str,
    /// Where it ran: `namespace`, `pod`, `container`; absent outside containers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    container_labels: &'a BTreeMap<String, String>,
    allocators: &'a [String],
    lossy: bool,
    /// Time in which it ran without its probes; `null` if not counted.
    unobserved_us: Option<u64>,
    /// Counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_inuse_bytes: Option<Option<u64>>,
    /// Estimated.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_inuse_bytes_est: Option<Option<u64>>,
    source: Option<&'a str>,
    samples: Option<u64>,
    sample_bytes: Option<u64>,
    longest_sample_bytes: Option<u64>,
    #[serde(flatten)]
    heap: HeapSummary,
    fragmentation_ratio: Option<f64>,
    extent_ratio: Option<f64>,
    attribution: Option<Attribution>,
    at_start: Option<HeapMoment>,
    at_peak: Option<HeapMoment>,
    sizes: Vec<SizeRow>,
    lifetimes: Vec<LifetimeRow>,
}

/// Allocations of at least half of, and less than, a number of bytes.
#[derive(Serialize)]
struct SizeRow {
    below_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    allocations: Option<u64>,
    /// If it is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    allocations_est: Option<u64>,
}

/// Frees of blocks that had lived for at least half of, and less than, a number of microseconds.
#[derive(Serialize)]
struct LifetimeRow {
    below_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    frees: Option<u64>,
    /// Where it is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    frees_est: Option<u64>,
}

#[derive(Serialize)]
struct StackRow<'a> {
    pid: Option<u32>,
    truncated: Option<&'a str>,
    frames: Vec<FrameRow<'a>>,
    /// Number of frames at the leaf that are the allocator's own, such as `malloc`: other outputs omit them.
    allocator_frames: usize,
    /// Set or absent: its absence means nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    retention_flag: Option<bool>,
    /// Of its survivors that were checked again.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_information_ratio: Option<f64>,
    #[serde(flatten)]
    values: Numbers,
}

/// A frame as every JSON output has it.
#[derive(Serialize)]
pub(crate) struct FrameRow<'a> {
    function: &'a str,
    file: Option<&'a str>,
    line: Option<u32>,
    module: Option<&'a str>,
    /// Text, `0x…`: JSON readers lose digits of large numbers.
    address: Option<String>,
    build_id: Option<&'a str>,
    inlined: bool,
    guessed: bool,
    jit: bool,
    /// `native`, `java`.
    runtime: &'static str,
    /// How the runtime runs it: `interpreted`, `compiled`, `inlined`; `null` of native code.
    kind: Option<&'static str>,
}

fn counts(counters: &[Counter]) -> BTreeMap<&str, u64> {
    counters.iter().map(|counter| (counter.name.as_str(), counter.value)).collect()
}

fn process(process: &Process, estimates: bool) -> ProcessRow<'_> {
    let heap = process.heap.unwrap_or_default();
    // A process that has no emitter was traced call by call, whatever the others are.
    let is_estimate = process.samples.is_some();
    let counted = |count| if is_estimate { (None, Some(count)) } else { (Some(count), None) };
    ProcessRow {
        pid: process.pid,
        comm: &process.comm,
        container_labels: &process.container_labels,
        allocators: &process.allocators,
        lossy: process.lossy,
        unobserved_us: process.unobserved_us,
        peak_inuse_bytes: (!estimates).then_some(process.peak_inuse_bytes),
        peak_inuse_bytes_est: estimates.then_some(process.peak_inuse_bytes),
        source: (!process.source.is_empty()).then_some(&process.source),
        samples: process.samples,
        sample_bytes: process.sample_bytes,
        longest_sample_bytes: process.longest_sample_bytes,
        heap,
        fragmentation_ratio: heap.fragmentation_ratio(),
        extent_ratio: heap.extent_ratio(),
        attribution: process.attribution,
        at_start: process.at_start,
        at_peak: process.at_peak,
        sizes: (process.sizes.below())
            .map(|(below_bytes, count)| {
                let (allocations, allocations_est) = counted(count);
                SizeRow { below_bytes, allocations, allocations_est }
            })
            .collect(),
        lifetimes: (process.lifetimes_us.below())
            .map(|(below_us, count)| {
                let (frees, frees_est) = counted(count);
                LifetimeRow { below_us, frees, frees_est }
            })
            .collect(),
    }
}

fn row<'a>(profile: &'a Profile, stack: &'a Stack) -> StackRow<'a> {
    StackRow {
        pid: (stack.pid != 0).then_some(stack.pid),
        truncated: stack.truncated.as_deref(),
        frames: profile.frames_of(stack).map(frame).collect(),
        allocator_frames: glue::allocator_frames(profile.frames_of(stack)),
        retention_flag: stack.values.is_flagged().then_some(true),
        no_information_ratio: stack.values.no_information_ratio(),
        values: Numbers {
            values: stack.values,
            errors: profile.meta.mode.estimates().then_some(stack.errors),
            kinds: profile.meta.kinds,
            bounds: profile.is_lower_bound(stack.pid, ValueKind::AllocSpace),
        },
    }
}

/// A frame's row; unknown fields are `null`.
pub(crate) fn frame(frame: &Frame) -> FrameRow<'_> {
    fn known(text: &str) -> Option<&str> {
        (!text.is_empty()).then_some(text)
    }
    FrameRow {
        function: &frame.function,
        file: known(&frame.file),
        line: (frame.line != 0).then_some(frame.line),
        module: known(&frame.module),
        address: (frame.address != 0).then(|| format!("{:#x}", frame.address)),
        build_id: known(&frame.build_id),
        inlined: frame.flags.inlined,
        guessed: frame.flags.guessed,
        jit: frame.flags.jit,
        runtime: frame.kind().runtime(),
        kind: frame.kind().name(),
    }
}

/// The values under their keys: the fixed ones always, the others if measured. Estimates have keys of their own, each with its standard
/// error.
struct Numbers {
    values: Values,
    /// Standard errors of estimates; `None` if the values were counted.
    errors: Option<StandardErrors>,
    kinds: KindSet,
    /// Whether rates are lower bounds, which have keys of their own and no error.
    bounds: bool,
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for kind in ValueKind::ALL {
            let measured = self.kinds.contains(kind);
            if measured || kind.index() < ValueKind::ALWAYS_WRITTEN || kind == ValueKind::PeakSpace {
                let value = measured.then(|| self.values.get(kind));
                match &self.errors {
                    _ if self.bounds && kind.is_rate() => map.serialize_entry(&kind.json_key_min(), &value)?,
                    None => map.serialize_entry(kind.json_key(), &value)?,
                    Some(_) if kind.is_seen() => map.serialize_entry(kind.json_key(), &value)?,
                    Some(errors) => {
                        map.serialize_entry(&kind.json_key_est(), &value)?;
                        map.serialize_entry(&kind.json_key_stderr(), &measured.then(|| errors.get(kind)))?;
                    }
                }
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::testing::shop;

    #[test]
    fn the_report_object_has_its_fixed_keys_and_values() {
        let json: serde_json::Value = serde_json::from_str(&to_string(&shop(), ValueKind::PinnedSpace, Some(1))).unwrap();
        insta::assert_json_snapshot!(json);
    }

    #[test]
    fn estimates_have_names_of_their_own_and_a_standard_error() {
        let mut profile = shop();
        profile.meta.mode = crate::profile::Mode::Sampled;
        profile.meta.processes[0].samples = Some(17);
        let row = (Values::default().with(ValueKind::InuseSpace, 1 << 30), StandardErrors::default().with(ValueKind::InuseSpace, 3000));
        profile.add_estimate(4242, &[crate::profile::Frame::named("f")], None, &row.0, &row.1);
        profile.add_estimate(
            4242,
            &[crate::profile::Frame::named("f")],
            None,
            &Values::default(),
            &StandardErrors::default().with(ValueKind::InuseSpace, 4000),
        );
        let json: serde_json::Value = serde_json::from_str(&to_string(&profile, ValueKind::InuseSpace, Some(1))).unwrap();
        assert_eq!(json["mode"], "sampled");
        let stack = &json["stacks"][0];
        assert_eq!((&stack["inuse_bytes_est"], &stack["inuse_bytes_stderr"]), (&(1u64 << 30).into(), &5000.into()));
        assert_eq!(json["totals"]["inuse_bytes_stderr"], 5000);
        assert_eq!(json["processes"][0]["samples"], 17);
        for raw in ["inuse_bytes", "allocations", "pinned_bytes", "peak_inuse_bytes"] {
            assert!(stack.get(raw).is_none() && json["totals"].get(raw).is_none(), "{raw} is a name for counted values");
        }
    }

    #[test]
    fn lower_bounds_have_names_of_their_own_and_no_error() {
        let mut profile = shop();
        profile.meta.mode = crate::profile::Mode::Governed;
        profile.meta.kinds = profile.meta.kinds.with(ValueKind::Survivor10MsSpace);
        profile.meta.governed = vec![Governed { pid: 4242, rates_are_lower_bounds: true, ..Governed::default() }];
        let json: serde_json::Value = serde_json::from_str(&to_string(&profile, ValueKind::AllocSpace, None)).unwrap();
        for object in [&json["totals"], &json["stacks"][0]] {
            for key in ["allocated_bytes", "allocations", "survivor_10ms_bytes"] {
                assert!(object[format!("{key}_min")].is_u64(), "{key} {object}");
                assert!(object.get(format!("{key}_est")).is_none() && object.get(format!("{key}_stderr")).is_none(), "{key}");
            }
            assert!(object.get("inuse_bytes_est").is_some(), "values other than rates keep their names");
        }
        assert_eq!(json["governed"][0]["rates_are_lower_bounds"], true);
    }

    #[test]
    fn what_was_not_measured_is_null_and_not_zero() {
        let mut profile = shop();
        profile.meta.kinds = KindSet::EMPTY.with(ValueKind::InuseSpace);
        profile.meta.processes.clear();
        let json: serde_json::Value = serde_json::from_str(&to_string(&profile, ValueKind::InuseSpace, None)).unwrap();
        for key in
            ["allocations", "allocated_bytes", "inuse_allocations", "pinned_bytes", "blocked_bytes", "growth_bytes", "peak_inuse_bytes"]
        {
            assert_eq!(json["totals"][key], serde_json::Value::Null, "{key}");
            assert!(json["totals"].as_object().unwrap().contains_key(key), "{key}");
            assert_eq!(json["stacks"][0][key], serde_json::Value::Null, "{key}");
        }
        assert_eq!(json["totals"]["inuse_bytes"], (15 << 20) + (400 << 10) + 100);
        assert_eq!(json["stacks_with_value"], 3);
        assert_eq!(json["stacks"].as_array().unwrap().len(), 4, "the one without live bytes comes last");
    }
}
