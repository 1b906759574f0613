//! The text report: a header, and a table of stacks with their callers. Pure.

use std::fmt::Write;
use std::time::{Duration, UNIX_EPOCH};

use super::coverage::Coverage;
use super::diff::{Diff, DiffRow};
use super::kind::ValueKind;
use super::meta::{Attribution, Counter, Governed, HeapMoment, HeapSummary, LargeBlocks, Metadata, Mode, Process};
use super::model::{Profile, Stack};
use super::page::{Layout, Page, StackText, Tone, bytes, percent, percent_floor};
use super::rows::{self, Row};
use super::{glue, hints};
use crate::sanitize;
use crate::units::{HumanBytes, counted, estimated, grouped, half_width};

/// What the report ranks by: the value, the matching count, and their names.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// The kind of value.
    pub kind: ValueKind,
    /// The matching count, if there is one.
    pub count: Option<ValueKind>,
    /// Column head, such as `LIVE`.
    pub head: &'static str,
    /// In a sentence, such as `live bytes`.
    pub words: &'static str,
}

/// Most counters shown of a list: there are about twenty kinds.
const COUNTERS_SHOWN_MAX: usize = 32;
/// Processes shown in the header.
const PROCESSES_SHOWN_MAX: usize = 16;

/// One more column of the table, for its first rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its head.
    pub head: &'static str,
    /// A cell for each row, from the first one on.
    pub cells: Vec<String>,
    /// What it means, in a sentence below the head.
    pub note: String,
}

/// The report of a profile.
pub fn report(profile: &Profile, view: View, layout: Layout) -> String {
    report_with(profile, view, layout, None)
}

/// The report of a profile with one more column.
pub fn report_with(profile: &Profile, view: View, layout: Layout, column: Option<&Column>) -> String {
    let mut page = Page::new(layout);
    header(&mut page, profile);
    ranking(&mut page, profile, view);
    page.line("");
    stacks(&mut page, profile, view, column);
    page.text
}

/// The report of a difference.
pub fn diff(old: &Profile, new: &Profile, diff: &Diff<'_>, view: View, layout: Layout) -> String {
    let mut page = Page::new(layout);
    let signed = |delta: i128| signed(view.kind, delta);
    let total = i128::from(diff.new_total) - i128::from(diff.old_total);
    page.field(view.words, &format!("{} → {} ({})", number(view.kind, diff.old_total), number(view.kind, diff.new_total), signed(total)));
    for (name, profile) in [("old", old), ("new", new)] {
        let meta = &profile.meta;
        page.field(name, &recording(meta));
        if meta.mode.has_events() {
            page.field("", &Coverage::of(profile).words());
        }
        page.sentences("  doubt", &meta.doubts, Tone::Warn);
    }
    if matches!(view.kind, ValueKind::AllocSpace | ValueKind::GrowthSpace) && old.meta.duration_s != new.meta.duration_s {
        page.field("note", "the recordings differ in length: compare rates, not bytes");
    }
    if let Some(doubt) = diff.doubt() {
        page.field("doubt", doubt);
    }
    page.line("");
    if diff.rows.is_empty() {
        page.line("no stack changed");
        return page.text;
    }
    page.head(&format!("{:>11} {:>10} {:>10}  STACK", "CHANGE", "OLD", "NEW"));
    for row in diff.rows.iter().take(layout.top) {
        let prefix = format!("{:>11} {:>10} {:>10}  ", signed(row.delta()), number(view.kind, row.old), number(view.kind, row.new));
        let frames = rows::shown(&row.frames);
        page.stack(
            &prefix,
            &StackText { frames, allocated_by: glue::allocated_by(&row.frames).unwrap_or_default(), ..StackText::default() },
        );
    }
    page.rest(diff.rows.len(), rest_of(&diff.rows, layout.top, signed));
    page.text
}

fn rest_of(rows: &[DiffRow<'_>], top: usize, signed: impl Fn(i128) -> String) -> String {
    signed(rows.iter().skip(top).map(DiffRow::delta).sum())
}

fn signed(kind: ValueKind, delta: i128) -> String {
    let size = u64::try_from(delta.unsigned_abs()).unwrap_or(u64::MAX);
    let sign = match delta {
        0 => "",
        1.. => "+",
        _ => "−",
    };
    format!("{sign}{}", number(kind, size))
}

fn number(kind: ValueKind, value: u64) -> String {
    if kind.unit() == "bytes" { HumanBytes(value).to_string() } else { grouped(value) }
}

/// Most flagged stacks shown, and frames of each, leaf first.
const FLAGGED_SHOWN_MAX: usize = 10;
const FLAGGED_FRAMES: usize = 4;

/// A lower bound.
fn at_least(kind: ValueKind, value: u64) -> String {
    format!("≥{}", number(kind, value))
}

/// An age from which blocks are survivors.
fn age(age_s: f64) -> String {
    if age_s < 0.1 { format!("{} ms", (age_s * 1e4).round() / 10.0) } else { format!("{age_s} s") }
}

fn allocations(count: u64) -> &'static str {
    if count == 1 { "allocation" } else { "allocations" }
}

/// The half-width of an estimate's 95 % interval, from its standard error; its upper end where it reaches down to 0.
pub(crate) fn interval(kind: ValueKind, value: u64, error: u64) -> String {
    match half_width(error) {
        half if half < value || half == 0 => format!("±{}", number(kind, half)),
        half => format!("≤{}", number(kind, value.saturating_add(half))),
    }
}

fn ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "not known".to_owned(), |value| format!("{value:.2}"))
}

/// One line on how a profile was taken.
fn recording(meta: &Metadata) -> String {
    let mut text = match meta.mode {
        Mode::Looked => "scans from outside".to_owned(),
        Mode::Imported => "a profile of another tool".to_owned(),
        mode => format!("{} recording", mode.name()),
    };
    if meta.duration_s > 0.0 {
        let _ = write!(text, " of {:.1} s", meta.duration_s);
    }
    if meta.start_unix_ns > 0 {
        let _ = write!(text, ", started {}", utc(meta.start_unix_ns));
    }
    if !meta.tool.is_empty() {
        let _ = write!(text, ", by {}", sanitize::terminal(&meta.tool));
    }
    text
}

/// Date and time in UTC, to the second (days to civil date: the proleptic Gregorian calendar in eras of 400 years).
fn utc(unix_ns: u64) -> String {
    let since = UNIX_EPOCH + Duration::from_nanos(unix_ns);
    let seconds = since.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // Years from March, so that the leap day is the last day of a year; day 0 is 0000-03-01.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year_of_era + era * 400 + next_year;
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", time / 3600, time / 60 % 60, time % 60)
}

fn header(page: &mut Page, profile: &Profile) {
    let meta = &profile.meta;
    page.field("recording", &recording(meta));
    if meta.mode.has_events() {
        page.field("coverage", &Coverage::of(profile).words());
    }
    for process in meta.processes.iter().take(PROCESSES_SHOWN_MAX) {
        self::process(page, process, profile.meta.duration_s);
    }
    if meta.processes.len() > PROCESSES_SHOWN_MAX {
        page.field("", &format!("and {} more processes", meta.processes.len() - PROCESSES_SHOWN_MAX));
    }
    let (totals, errors) = (profile.totals(), profile.total_errors());
    let with_error = |kind| match profile.total_is_lower_bound(kind) {
        true => at_least(kind, totals.get(kind)),
        false => estimated(totals.get(kind), errors.get(kind), |value| number(kind, value)),
    };
    let has = |kind| meta.kinds.contains(kind);
    if has(ValueKind::InuseSpace) {
        page.field(live_name(meta), &live(profile, &with_error));
    }
    for governed in meta.governed.iter().take(PROCESSES_SHOWN_MAX) {
        page.field("watched", &self::governed(governed));
        if let Some(text) = governed.large_blocks.as_ref().and_then(large_blocks) {
            page.field("", &text);
        }
    }
    if let Some(age_s) = meta.survivor_age_s.filter(|_| has(ValueKind::SurvivorSpace)) {
        let text = format!("{} outlived {}", with_error(ValueKind::SurvivorSpace), age(age_s));
        page.field("survivors", &text);
    }
    if has(ValueKind::SampledObjects) {
        kept(page, profile);
    }
    if has(ValueKind::AllocSpace) {
        let mut text = with_error(ValueKind::AllocSpace);
        if has(ValueKind::AllocObjects) {
            let _ = write!(text, " in {} {}", with_error(ValueKind::AllocObjects), allocations(totals.get(ValueKind::AllocObjects)));
        }
        if meta.duration_s > 0.0 {
            let rate = (totals.get(ValueKind::AllocSpace) as f64 / meta.duration_s) as u64;
            let least = if profile.total_is_lower_bound(ValueKind::AllocSpace) { "≥" } else { "" };
            let _ = write!(text, " ({least}{}/s)", HumanBytes(rate));
        }
        page.field("allocated", &text);
    }
    if let Some(complete) = meta.stacks_complete_ratio() {
        let mut text = format!("{}% complete", percent_floor(complete));
        let early: Vec<Counter> = meta.stack_ends.iter().filter(|c| c.name != super::meta::COMPLETE && c.value > 0).cloned().collect();
        if !early.is_empty() {
            let _ = write!(text, "; ended early: {}", counters(&early));
        }
        page.field("stacks", &text);
    }
    let lost: Vec<Counter> = meta.losses.iter().filter(|c| c.value > 0).cloned().collect();
    if !lost.is_empty() {
        page.toned("losses", &counters(&lost), Tone::Warn);
    } else if meta.mode.has_events() {
        page.field("losses", if meta.losses.is_empty() { "not counted" } else { "none" });
    }
    let corrected: Vec<Counter> = meta.corrections.iter().filter(|c| c.value > 0).cloned().collect();
    if !corrected.is_empty() {
        page.field("corrected", &counters(&corrected));
    }
    page.sentences("doubt", &meta.doubts, Tone::Warn);
    page.sentences("limit", &meta.limits, Tone::Plain);
    page.sentences("note", &meta.notes, Tone::Plain);
}

/// The name of the recorded live bytes: next to those of a census they differ, because they are without rounding and without older blocks.
fn live_name(meta: &Metadata) -> &'static str {
    if meta.processes.iter().any(|process| process.heap.is_some()) { "recorded" } else { "live" }
}

/// Recorded bytes that are still live.
fn live(profile: &Profile, with_error: &impl Fn(ValueKind) -> String) -> String {
    let (meta, totals) = (&profile.meta, profile.totals());
    let mut text = with_error(ValueKind::InuseSpace);
    if live_name(meta) != "live" {
        text.push_str(" live");
    }
    if meta.kinds.contains(ValueKind::InuseObjects) {
        let _ = write!(text, " in {} {}", with_error(ValueKind::InuseObjects), allocations(totals.get(ValueKind::InuseObjects)));
    }
    text.push_str(", as requested");
    if let Some(peak) = meta.peak_inuse_bytes() {
        let since = if meta.mode.estimates() { " since attach" } else { "" };
        let _ = write!(text, "; peak{since} {}", HumanBytes(peak));
    }
    let doubtful = totals.get(ValueKind::DoubtfulSpace);
    if doubtful > 0 {
        let _ = write!(text, "; {} of the live bytes are in doubt", HumanBytes(doubtful));
    }
    text
}

/// Results of checking survivors again after their windows: the stacks that keep what they allocate.
fn kept(page: &mut Page, profile: &Profile) {
    let totals = profile.totals();
    let Some(nothing_known) = totals.no_information_ratio() else {
        page.field("kept", "no survivor of a window was checked again yet: survivors are reported once they are 20 s old");
        return;
    };
    let flagged: Vec<&Stack> = profile.ranked(ValueKind::SampledObjects).into_iter().filter(|stack| stack.values.is_flagged()).collect();
    let rows = rows::of(profile, flagged.clone(), ValueKind::SampledObjects, FLAGGED_FRAMES - 1);
    page.field(
        "kept",
        &format!(
            "{} flagged as keeping what they allocate (no flag means nothing); of {} checked again {} were the same, {:.0}% gave no information",
            counted(flagged.len() as u64, "stack"),
            counted(totals.get(ValueKind::SampledObjects), "survivor"),
            grouped(totals.get(ValueKind::SameObjects)),
            nothing_known * 100.0
        ),
    );
    for row in rows.iter().take(FLAGGED_SHOWN_MAX) {
        let names: Vec<&str> = row.frames.iter().map(|frame| &*frame.function).take(FLAGGED_FRAMES).collect();
        let values = &row.values;
        page.field(
            "",
            &format!(
                "{}: {} of {} the same, {} confirmed live",
                sanitize::terminal(&names.join(" < ")),
                grouped(values.get(ValueKind::SameObjects)),
                grouped(values.get(ValueKind::InformativeObjects)),
                HumanBytes(values.get(ValueKind::ConfirmedSpace)),
            ),
        );
    }
    if rows.len() > FLAGGED_SHOWN_MAX {
        page.field("", &format!("and {} more", rows.len() - FLAGGED_SHOWN_MAX));
    }
}

/// The excess over a budget from which its reason is given.
const OVER_BUDGET: f64 = 1.05;

/// How a process was watched under a budget.
pub fn governed(governed: &Governed) -> String {
    let windows: Vec<String> =
        governed.windows.iter().filter(|(_, count)| **count > 0).map(|(length, count)| format!("{count} of {length}")).collect();
    let mut text = format!("pid {}: {}", governed.pid, sanitize::terminal(&governed.tier));
    if governed.full_s > 0.0 {
        let _ = write!(text, ", in full for {:.1} s", governed.full_s);
    }
    if !windows.is_empty() {
        let _ = write!(text, ", windows {} (open {:.2} s)", sanitize::terminal(&windows.join(", ")), governed.open_s);
    }
    let _ = write!(text, "; estimated slowdown {:.2}%, budget {:.2}%", governed.slowdown_ratio_est * 100.0, governed.budget_ratio * 100.0);
    if governed.slowdown_ratio_est > governed.budget_ratio * OVER_BUDGET && governed.run_s > 0.0 {
        let ms = |seconds: f64| format!("{:.1} ms", seconds * 1e3);
        let _ = write!(
            text,
            ": {} of the {} that it ran, more than the budget: trials at the start and bursts are paid for later, and any process may lose \
             some microseconds a second",
            ms(governed.slowdown_ratio_est * governed.run_s),
            ms(governed.run_s)
        );
    }
    if governed.windows_closed_early > 0 {
        let _ = write!(text, "; {} closed early by bursts, windows of their length left out", governed.windows_closed_early);
    }
    if governed.windows_lossy > 0 {
        let _ = write!(text, "; {} left out because of lost records", governed.windows_lossy);
    }
    if governed.rates_are_lower_bounds {
        let _ = write!(text, "; allocations are lower bounds (≥): {}", sanitize::terminal(&governed.lower_bounds_because));
    }
    text
}

/// How the large blocks of a process were tracked; `None` if there is nothing to report: tracking was off, or everything was traced.
pub fn large_blocks(large: &LargeBlocks) -> Option<String> {
    let who = format!("blocks of {} bytes or more", grouped(large.from_bytes));
    if let Some(since_s) = large.since_s {
        let mut text = format!(
            "{who}: all tracked since {since_s:.1} s; {} live in {}",
            HumanBytes(large.live_bytes),
            counted(large.live_allocations, "block")
        );
        if let Some(ratio) = large.of_live_ratio {
            let _ = write!(text, ", {:.0}% of the heap's live bytes by its last census", ratio * 100.0);
        }
        let _ = write!(text, "; {} older ones freed since", grouped(large.freed_from_before));
        let _ = write!(text, "; estimated slowdown {:.2}%", large.slowdown_ratio_est * 100.0);
        return Some(text);
    }
    let tried = if large.trials > 0 { format!(", tried {}", times(large.trials)) } else { String::new() };
    (!large.reason.is_empty()).then(|| format!("{who}: not tracked{tried}: {}", sanitize::terminal(&large.reason)))
}

fn times(count: u64) -> String {
    if count == 1 { "once".to_owned() } else { format!("{} times", grouped(count)) }
}

fn counters(counters: &[Counter]) -> String {
    let mut parts: Vec<String> = counters
        .iter()
        .take(COUNTERS_SHOWN_MAX)
        .map(|c| {
            let name = sanitize::terminal(&c.name).replace('_', " ");
            if c.description.is_empty() {
                format!("{name} {}", grouped(c.value))
            } else {
                format!("{name} {} ({})", grouped(c.value), sanitize::terminal(&c.description))
            }
        })
        .collect();
    if counters.len() > COUNTERS_SHOWN_MAX {
        parts.push(format!("{} more kinds", counters.len() - COUNTERS_SHOWN_MAX));
    }
    parts.join(", ")
}

fn process(page: &mut Page, process: &Process, recorded_s: f64) {
    let recorded_us = if recorded_s > 0.0 { (recorded_s * 1e6) as u64 } else { u64::MAX };
    let mut text = if process.comm.is_empty() { "process".to_owned() } else { sanitize::terminal(&process.comm).into_owned() };
    let _ = write!(text, " (pid {})", process.pid);
    if !process.allocators.is_empty() {
        let _ = write!(text, ", {}", sanitize::terminal(&process.allocators.join(", ")));
    }
    if process.lossy {
        text.push_str(", records lost");
    }
    page.field("process", &text);
    if !process.container_labels.is_empty() {
        let labels: Vec<String> = process.container_labels.iter().map(|(name, value)| format!("{name} {value}")).collect();
        page.field("container", &sanitize::terminal(&labels.join(", ")));
    }
    if !process.source.is_empty() {
        let mut text = sanitize::terminal(&process.source).into_owned();
        if let Some(samples) = process.samples {
            let _ = write!(text, ", {} samples", grouped(samples));
        }
        if let Some(distance) = process.sample_distance() {
            let _ = write!(text, ", one per {distance}");
        }
        page.field("source", &text);
    }
    if let Some(heap) = &process.heap {
        ladder(page, heap);
    }
    if let Some(of) = &process.attribution {
        page.field("owned", &owned(of));
    }
    for (name, moment) in [("at start", &process.at_start), ("at peak", &process.at_peak)] {
        if let Some(moment) = moment {
            page.field(name, &at(moment, process.peak_inuse_bytes));
        }
    }
    for (name, line) in [("sizes", process.sizes.sizes()), ("lifetimes", process.lifetimes_us.lifetimes(recorded_us))] {
        if let Some(line) = line {
            let about = if process.samples.is_some() { " (estimated)" } else { "" };
            page.field(name, &format!("{line}{about}"));
        }
    }
}

/// The live chunks by owner.
fn owned(of: &Attribution) -> String {
    let mut text = format!("{} in {} by recorded stacks", HumanBytes(of.attributed_bytes), counted(of.attributed_allocations, "block"));
    for (bytes, chunks, whose) in [
        (of.before_attach_bytes, of.before_attach_allocations, "from before the recording"),
        (of.unattributed_bytes, of.unattributed_allocations, "unattributed"),
    ] {
        if bytes > 0 {
            let _ = write!(text, ", {} in {} {whose}", HumanBytes(bytes), counted(chunks, "block"));
        }
    }
    text
}

/// A moment of the recording.
fn at(moment: &HeapMoment, peak_bytes: Option<u64>) -> String {
    let heap = &moment.heap;
    let mut text = format!("after {:.1} s: ", moment.after_ms as f64 / 1e3);
    if moment.recorded_live_bytes > 0 {
        let _ = write!(text, "{} recorded as live", HumanBytes(moment.recorded_live_bytes));
        let recorded = HumanBytes(moment.recorded_live_bytes).to_string();
        if let Some(peak) = peak_bytes.map(|peak| HumanBytes(peak).to_string()).filter(|peak| *peak != recorded) {
            let _ = write!(text, " (the peak was {peak})");
        }
        text.push_str("; ");
    }
    let _ = write!(text, "heap resident {}, live {}", bytes(heap.resident_bytes), bytes(heap.live_bytes));
    if let Some(trimmable) = heap.trimmable_bytes {
        let _ = write!(text, ", trimmable {}", HumanBytes(trimmable));
    }
    text
}

fn ladder(page: &mut Page, heap: &HeapSummary) {
    page.field(
        "heap",
        &format!(
            "extent {}, resident {}, live {}; fragmentation ratio {}, extent ratio {}",
            bytes(heap.extent_bytes),
            bytes(heap.resident_bytes),
            bytes(heap.live_bytes),
            ratio(heap.fragmentation_ratio()),
            ratio(heap.extent_ratio()),
        ),
    );
    if heap.trimmable_bytes.is_some() || heap.pinned_bytes.is_some() || heap.unknown_bytes.is_some_and(|unknown| unknown > 0) {
        let mut text = format!("trimmable {}, pinned {}", bytes(heap.trimmable_bytes), bytes(heap.pinned_bytes));
        if let Some(unknown) = heap.unknown_bytes.filter(|&unknown| unknown > 0) {
            let _ = write!(text, "; {} may be live or free", HumanBytes(unknown));
        }
        page.field("free", &text);
    }
}

/// The value of the table below, and the other values of the profile.
fn ranking(page: &mut Page, profile: &Profile, view: View) {
    let total = profile.stacks().iter().fold(0u64, |sum, stack| sum.saturating_add(stack.values.get(view.kind)));
    let mut text = format!("{}, {} in all", view.words, number(view.kind, total));
    let shown = view.kind.by();
    let others: Vec<String> = profile.meta.kinds.by_names().into_iter().filter(|name| Some(name.as_str()) != shown).collect();
    if !others.is_empty() {
        let _ = write!(text, "; also --by {}", others.join(", "));
    }
    page.field("ranked by", &text);
}

fn stacks(page: &mut Page, profile: &Profile, view: View, column: Option<&Column>) {
    let rows = rows::ranked(profile, view.kind, page.layout.callers);
    let value = |row: &Row<'_>| row.values.get(view.kind);
    let total = rows.iter().fold(0u64, |sum, row| sum.saturating_add(value(row)));
    if rows.is_empty() {
        page.line(&format!("no stack has any {}{}", view.words, hints::nothing(view.kind)));
        return;
    }
    let count = view.count.filter(|&count| profile.meta.kinds.contains(count));
    let count_head = if count.is_some() { format!(" {:>9}", "COUNT") } else { String::new() };
    // Estimates have one more column: the half-width of their 95 % interval, or its upper end.
    let estimates = profile.meta.mode.estimates() && !view.kind.is_seen();
    let error_head = if estimates { format!(" {:>11}", "±95%") } else { String::new() };
    let more_head = column.map_or_else(String::new, |column| format!(" {:>11}", column.head));
    page.head(&format!("{:>10}{error_head} {:>6}{count_head}{more_head}  STACK", view.head, "%"));
    if let Some(column) = column {
        page.faint(&column.note);
    }
    let several = profile.meta.processes.len() > 1;
    let is_bound = |row: &Row<'_>| profile.is_lower_bound(row.pid, view.kind);
    if rows.iter().any(is_bound) {
        let mixed = !rows.iter().all(is_bound);
        let text = "rows with ≥ are lower bounds, without an error";
        page.faint(&if mixed { format!("{text}: compared with estimates they may rank too low") } else { text.to_owned() });
    }
    let is_kept = |row: &Row<'_>| row.values.rank(view.kind).0;
    if rows.iter().any(is_kept) {
        page.faint("stacks known to keep what they allocate come first, marked `kept`");
    }
    for (index, row) in rows.iter().take(page.layout.top).enumerate() {
        let more = column.map_or_else(String::new, |column| format!(" {:>11}", column.cells.get(index).map_or("–", String::as_str)));
        let count = count.map(|count| format!(" {:>9}", count_of(row, count))).unwrap_or_default();
        let error = if is_bound(row) { String::new() } else { interval(view.kind, value(row), row.errors.get(view.kind)) };
        let error = if estimates { format!(" {error:>11}") } else { String::new() };
        let text = if is_bound(row) { at_least(view.kind, value(row)) } else { number(view.kind, value(row)) };
        let prefix = format!("{text:>10}{error} {:>6}{count}{more}  ", percent(value(row), total));
        let allocated_by = allocated_by(row) + if is_kept(row) { "; kept" } else { "" };
        page.stack(&prefix, &text_of(row, allocated_by.trim_start_matches("; "), several));
    }
    let rest = rows.iter().skip(page.layout.top).map(value).fold(0u64, u64::saturating_add);
    page.rest(rows.len(), format!("{} ({})", number(view.kind, rest), percent(rest, total)));
    let names: Vec<&str> = rows
        .iter()
        .take(page.layout.top)
        .filter_map(|row| if row.is_rest { row.frames.last() } else { row.frames.first() })
        .map(|frame| &*frame.function)
        .collect();
    for hint in hints::of_rows(&names, view.kind).into_iter().chain(hints::unnamed_code(profile, &rows)) {
        page.faint(&hint);
    }
}

/// The number of blocks of a row; of a remainder it may not be known.
fn count_of(row: &Row<'_>, count: ValueKind) -> String {
    match row.values.get(count) {
        0 if row.is_rest => "?".to_owned(),
        count => grouped(count),
    }
}

fn allocated_by(row: &Row<'_>) -> String {
    row.allocated_by.iter().copied().collect::<Vec<_>>().join(", ")
}

fn text_of<'a>(row: &'a Row<'_>, allocated_by: &'a str, several: bool) -> StackText<'a> {
    StackText { frames: &row.frames, allocated_by, truncated: row.truncated, pid: if several { row.pid } else { 0 }, ways: row.ways }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::Frame;
    use crate::profile::diff::compare;
    use crate::profile::testing::shop;

    const LIVE: View = View { kind: ValueKind::InuseSpace, count: Some(ValueKind::InuseObjects), head: "LIVE", words: "live bytes" };
    const PLAIN: Layout = Layout { columns: Some(100), colour: false, top: 20, callers: 10 };

    #[test]
    fn the_report_shows_header_losses_doubts_and_stacks() {
        insta::assert_snapshot!(report(&shop(), LIVE, PLAIN));
    }

    #[test]
    fn a_narrow_terminal_gets_shorter_lines() {
        let text = report(&shop(), LIVE, Layout { columns: Some(60), ..PLAIN });
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        insta::assert_snapshot!(text);
    }

    #[test]
    fn the_rest_is_summed_up() {
        let text = report(&shop(), LIVE, Layout { top: 1, callers: 1, ..PLAIN });
        assert!(text.contains("2 more stacks with 400 KiB (2.5%): show more with --top"), "{text}");
        assert!(text.contains("  … 1 more\n"), "{text}");
    }

    #[test]
    fn colours_only_when_asked_and_no_escape_of_the_target_ever() {
        assert!(!report(&shop(), LIVE, PLAIN).contains('\x1b'));
        let coloured = report(&shop(), LIVE, Layout { colour: true, ..PLAIN });
        assert!(coloured.contains("\x1b[1m"));
        assert!(!coloured.contains("\x1b[31m"), "the function name's own escape sequence");
    }

    #[test]
    fn a_difference_shows_what_changed() {
        let old = shop();
        let mut new = shop();
        let frames: Vec<Frame> = old.frames_of(&old.stacks()[0]).cloned().collect();
        new.add(4242, &frames, None, &crate::profile::Values::default().with(ValueKind::InuseSpace, 5 << 20));
        insta::assert_snapshot!(diff(&old, &new, &compare(&old, &new, ValueKind::InuseSpace), LIVE, PLAIN));
    }

    // Expected dates by `date -u -d @N`.
    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_399_000_000_000), "2000-02-28 23:59:59 UTC");
        assert_eq!(utc(951_782_400_000_000_000), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_795_257_600_000_000_000), "2026-11-21 10:40:00 UTC");
        assert_eq!(utc(4_107_542_400_000_000_000), "2100-03-01 00:00:00 UTC");
    }

    #[test]
    fn large_blocks_are_reported_with_their_start_or_the_reason_why_not() {
        let kept = LargeBlocks {
            state: "kept".into(),
            since_s: Some(1.25),
            from_bytes: 1033,
            live_bytes: 3 << 20,
            live_allocations: 1200,
            of_live_ratio: Some(0.84),
            freed_from_before: 7,
            slowdown_ratio_est: 0.0031,
            ..LargeBlocks::default()
        };
        let text = large_blocks(&kept).unwrap_or_default();
        for part in
            ["1,033 bytes", "all tracked since 1.2 s", "3.00 MiB live in 1,200 blocks", "84% of the heap's live", "7 older ones", "0.31%"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        let left = LargeBlocks { state: "left".into(), reason: "a burst\x1b".into(), trials: 3, ..LargeBlocks::default() };
        let text = large_blocks(&left).unwrap_or_default();
        assert!(text.contains("tried 3 times: a burst") && !text.contains('\x1b'), "{text}");
        assert_eq!(large_blocks(&LargeBlocks::default()), None, "nothing to report");
    }

    #[test]
    fn a_slowdown_above_the_budget_is_given_in_seconds_with_its_reason() {
        let over = Governed { pid: 7, budget_ratio: 0.01, slowdown_ratio_est: 0.04, run_s: 0.11, ..Governed::default() };
        let text = governed(&over);
        assert!(text.contains("slowdown 4.00%, budget 1.00%: 4.4 ms of the 110.0 ms that it ran, more than the budget"), "{text}");
        let within = governed(&Governed { slowdown_ratio_est: 0.0101, ..over });
        assert!(within.ends_with("budget 1.00%"), "{within}");
    }

    proptest! {
        #[test]
        fn no_line_is_wider_than_the_terminal(columns in 60usize..140, name in "\\PC{0,200}") {
            let mut profile = shop();
            profile.add(4242, &[Frame::named(name)], None, &crate::profile::Values::default().with(ValueKind::InuseSpace, 5));
            let text = report(&profile, LIVE, Layout { columns: Some(columns), ..PLAIN });
            for line in text.lines() {
                prop_assert!(line.chars().count() <= columns, "{}", line);
            }
        }
    }
}
