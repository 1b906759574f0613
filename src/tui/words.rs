//! A process's figures as labelled lines. Pure. The live view and the plain text show the same lines.

use std::fmt::Write as _;

use super::sample::{Basis, Numbers, ProcessSample, Sample, StackSample};
use crate::profile::page::{bytes, percent};
use crate::sanitize;
use crate::units::{HumanBytes, estimated, grouped, half_width};

/// The kind of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// A figure.
    Plain,
    /// A reason to doubt figures.
    Warn,
}

/// A labelled line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// Its label, at most [`LABEL_COLUMNS`] − 1 characters; empty = that of the line before.
    pub label: &'static str,
    /// Its text; safe for a terminal.
    pub text: String,
    /// Its kind.
    pub tone: Tone,
}

/// Columns of the labels.
pub const LABEL_COLUMNS: usize = 11;
/// Sentences shown of a list.
const SENTENCES_MAX: usize = 4;

/// The title line: the process, and the time since attach.
pub fn title(sample: &Sample, process: &ProcessSample) -> String {
    let mut text = format!("{} (pid {})", sanitize::terminal(&process.comm), process.pid);
    if !process.allocators.is_empty() {
        let _ = write!(text, ", {}", sanitize::terminal(&process.allocators.join(", ")));
    }
    let _ = write!(text, ", {} since attach", duration(sample.elapsed_s));
    if let Some(end) = &process.end {
        let _ = write!(text, ", {end}");
    }
    text
}

/// The figures of a process.
pub fn figures(sample: &Sample, process: &ProcessSample) -> Vec<Line> {
    let mut lines = vec![
        plain("live", live(process)),
        plain("rate", rates(&process.totals)),
        plain("heap", heap(process)),
        plain("free", free(process)),
        plain("unknown", unknown(process)),
        plain("ratio", ratio(process)),
    ];
    let lost: Vec<String> = sample
        .losses
        .iter()
        .filter(|counter| counter.value > 0)
        .map(|counter| format!("{} {}", counter.name.replace('_', " "), grouped(counter.value)))
        .collect();
    if lost.is_empty() {
        lines.push(plain("losses", if sample.losses.is_empty() { "not counted" } else { "none" }.to_owned()));
    } else {
        lines.push(Line { label: "losses", text: lost.join(", "), tone: Tone::Warn });
    }
    sentences(&mut lines, "doubt", &process.doubts, Tone::Warn);
    if !process.source.is_empty() {
        lines.push(plain("source", sanitize::terminal(&process.source).into_owned()));
    }
    sentences(&mut lines, "note", &process.notes, Tone::Plain);
    lines
}

fn plain(label: &'static str, text: String) -> Line {
    Line { label, text, tone: Tone::Plain }
}

fn sentences(lines: &mut Vec<Line>, label: &'static str, sentences: &[String], tone: Tone) {
    for sentence in sentences.iter().take(SENTENCES_MAX) {
        lines.push(Line { label, text: sanitize::terminal(sentence).into_owned(), tone });
    }
    if sentences.len() > SENTENCES_MAX {
        lines.push(Line { label, text: format!("and {} more", sentences.len() - SENTENCES_MAX), tone });
    }
}

fn live(process: &ProcessSample) -> String {
    let totals = &process.totals;
    let (bytes_error, blocks_error) = totals.errors.map_or((0, 0), |errors| (errors.inuse_bytes, errors.inuse_allocations));
    let how = if process.source.is_empty() { " (every call)" } else { "" };
    let mut text = format!(
        "{} in {} blocks allocated since attach{how}, peak {}",
        estimated(totals.inuse_bytes, bytes_error, |bytes| HumanBytes(bytes).to_string()),
        estimated(totals.inuse_allocations, blocks_error, grouped),
        HumanBytes(process.peak.bytes)
    );
    if totals.doubtful_bytes > 0 {
        let _ = write!(text, ", of which {} in doubt", HumanBytes(totals.doubtful_bytes));
    }
    text
}

fn rates(totals: &Numbers) -> String {
    match (totals.allocations_per_s, totals.allocated_bytes_per_s) {
        (Some(allocations), Some(bytes)) => format!("{} allocations/s, {}/s", grouped(allocations as u64), HumanBytes(bytes as u64)),
        _ => "not known yet".to_owned(),
    }
}

fn heap(process: &ProcessSample) -> String {
    let heap = &process.heap;
    let ladder = &heap.ladder;
    let most = if heap.basis == Basis::Mappings { "at most " } else { "" };
    let mut text = format!("extent {most}{}, resident {}", bytes(ladder.extent_bytes), bytes(ladder.resident_bytes));
    if let Some(live) = ladder.live_bytes {
        let _ = write!(text, ", live {}", HumanBytes(live));
    } else if let Some(estimate) = heap.live_bytes_est {
        let _ = write!(text, ", live about {}", HumanBytes(estimate));
        if let Some(error) = heap.live_bytes_stderr {
            let _ = write!(text, " ±{}", HumanBytes(half_width(error)));
        }
    }
    if let Some(swapped) = heap.swapped_bytes.filter(|swapped| *swapped > 0) {
        let _ = write!(text, ", swapped {}", HumanBytes(swapped));
    }
    let _ = write!(text, "; process RSS {}", bytes(heap.rss_bytes));
    text.push_str(match heap.basis {
        Basis::None => "",
        Basis::Census => " (by census)",
        Basis::SampledCensus => " (by a sampled census)",
        Basis::Mappings => " (by its mappings)",
    });
    text
}

fn free(process: &ProcessSample) -> String {
    let ladder = &process.heap.ladder;
    match (ladder.trimmable_bytes, ladder.pinned_bytes) {
        (None, None) => "not known".to_owned(),
        (trimmable, pinned) => format!("trimmable {}, pinned {}", bytes(trimmable), bytes(pinned)),
    }
}

fn unknown(process: &ProcessSample) -> String {
    let heap = &process.heap;
    let mut text = match (heap.unattributed_bytes, heap.ladder.unknown_bytes) {
        (Some(unattributed), unknown) => {
            let mut text = format!("{} live without a stack: allocated before attach, or rounding of chunks", HumanBytes(unattributed));
            if let Some(unknown) = unknown.filter(|unknown| *unknown > 0) {
                let _ = write!(text, "; {} not understood", HumanBytes(unknown));
            }
            text
        }
        (None, Some(0)) => "nothing".to_owned(),
        (None, Some(unknown)) => format!("{} resident: free, or allocated before attach", HumanBytes(unknown)),
        (None, None) => "all: the heap could not be read".to_owned(),
    };
    if process.unknown_frees > 0 {
        let _ = write!(text, "; {} older blocks freed since", grouped(process.unknown_frees));
    }
    text
}

fn ratio(process: &ProcessSample) -> String {
    let heap = &process.heap;
    let shown = |exact: Option<f64>, most: Option<f64>| match (exact, most) {
        (Some(exact), _) => format!("{exact:.2}"),
        (None, Some(most)) => format!("at most {most:.2}"),
        (None, None) => "not known".to_owned(),
    };
    format!(
        "fragmentation {} (1 − resident live / resident), extent / live {}",
        shown(heap.fragmentation_ratio, heap.fragmentation_ratio_max),
        shown(heap.extent_ratio, heap.extent_ratio_max)
    )
}

fn duration(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole / 60 % 60),
    }
}

/// Column heads of the stacks' numbers; the title follows.
pub const STACK_HEADS: [(&str, usize); 6] = [("LIVE", 10), ("%", 6), ("BLOCKS", 9), ("BYTES/S", 10), ("ALLOCS/S", 9), ("GROWTH", 10)];

/// The numbers of a stack, in the columns of [`STACK_HEADS`]; `total_bytes` is the process's live bytes.
pub fn stack_columns(stack: &StackSample, total_bytes: u64) -> [String; 6] {
    let numbers = &stack.numbers;
    let rate = |rate: Option<f64>, shown: fn(u64) -> String| rate.map_or_else(|| "–".to_owned(), |rate| shown(rate as u64));
    [
        HumanBytes(numbers.inuse_bytes).to_string(),
        percent(numbers.inuse_bytes, total_bytes),
        grouped(numbers.inuse_allocations),
        rate(numbers.allocated_bytes_per_s, |bytes| HumanBytes(bytes).to_string()),
        rate(numbers.allocations_per_s, grouped),
        // A sample does not measure it.
        if numbers.errors.is_some() { "–".to_owned() } else { HumanBytes(numbers.growth_bytes).to_string() },
    ]
}

/// Columns of the table of processes; the name follows.
pub const PROCESS_HEADS: [(&str, usize); 7] =
    [("PID", 8), ("LIVE", 10), ("ALLOCS/S", 9), ("BYTES/S", 10), ("EXTENT", 10), ("RESIDENT", 10), ("FRAG", 7)];

/// The figures of a process in the columns of [`PROCESS_HEADS`].
pub fn process_columns(process: &ProcessSample) -> [String; 7] {
    let rate = |rate: Option<f64>, shown: fn(u64) -> String| rate.map_or_else(|| "–".to_owned(), |rate| shown(rate as u64));
    let heap = &process.heap;
    let known = |value: Option<u64>| value.map_or_else(|| "?".to_owned(), |value| HumanBytes(value).to_string());
    [
        process.pid.to_string(),
        HumanBytes(process.totals.inuse_bytes).to_string(),
        rate(process.totals.allocations_per_s, grouped),
        rate(process.totals.allocated_bytes_per_s, |bytes| HumanBytes(bytes).to_string()),
        known(heap.ladder.extent_bytes),
        known(heap.ladder.resident_bytes),
        match (heap.fragmentation_ratio, heap.fragmentation_ratio_max) {
            (Some(ratio), _) => format!("{ratio:.2}"),
            (None, Some(most)) => format!("≤ {most:.2}"),
            (None, None) => "?".to_owned(),
        },
    ]
}

/// Cells right-aligned under their heads, with a space after each.
pub fn aligned<'a>(heads: &[(&str, usize)], cells: impl IntoIterator<Item = &'a str>) -> String {
    let mut text = String::new();
    for ((_, columns), cell) in heads.iter().zip(cells) {
        let _ = write!(text, "{cell:>columns$} ");
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tui::testing;

    fn text_of(process: &ProcessSample, sample: &Sample, label: &str) -> String {
        figures(sample, process).iter().filter(|line| line.label == label).map(|line| line.text.clone()).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn what_is_not_known_is_said_and_not_shown_as_zero() {
        let mut sample = testing::shop();
        let mut process = sample.processes.remove(0);
        process.heap = Default::default();
        process.totals.allocations_per_s = None;
        assert_eq!(text_of(&process, &sample, "heap"), "extent not known, resident not known; process RSS not known");
        assert_eq!(text_of(&process, &sample, "rate"), "not known yet");
        assert_eq!(text_of(&process, &sample, "ratio"), "fragmentation not known (1 − resident live / resident), extent / live not known");
    }

    #[test]
    fn losses_and_doubts_are_warnings() {
        let sample = testing::shop();
        let lines = figures(&sample, &sample.processes[1]);
        let warned: Vec<&str> = lines.iter().filter(|line| line.tone == Tone::Warn).map(|line| line.text.as_str()).collect();
        assert_eq!(warned, ["lost frees 12", "12 free records were lost"]);
    }

    #[test]
    fn a_long_list_of_doubts_is_cut_and_counted() {
        let mut sample = testing::shop();
        sample.processes[0].doubts = (0..7).map(|i| format!("doubt {i}")).collect();
        let text = text_of(&sample.processes[0], &sample, "doubt");
        assert_eq!(text.lines().count(), 5);
        assert!(text.ends_with("and 3 more"));
    }

    #[test]
    fn times_are_short() {
        assert_eq!([duration(0.4), duration(59.9), duration(61.0), duration(7260.0)], ["0 s", "59 s", "1 min 1 s", "2 h 1 min"]);
    }
}
