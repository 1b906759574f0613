//! The texts of the views: columns of the list, lines of one process, cells of the address space. Pure.

use crate::model::map::MapView;
use crate::model::sample::HeapSample;
use crate::model::view::{ProcessView, ProcessesView};
use crate::profile::tree::Node;
use crate::sanitize;
use crate::units::HumanBytes;

/// Columns of the list; the name follows.
pub const HEADS: [(&str, usize); 9] = [
    ("PID", 8),
    ("RESIDENT", 10),
    ("EXTENT", 10),
    ("LIVE", 10),
    ("TRIMMABLE", 10),
    ("PINNED", 10),
    ("FRAG", 5),
    ("GROWTH/H", 11),
    ("VERDICT", 15),
];

fn known(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), |bytes| HumanBytes(bytes).to_string())
}

fn signed(bytes: f64) -> String {
    let sign = if bytes < 0.0 { "-" } else { "+" };
    format!("{sign}{}", HumanBytes(bytes.abs() as u64))
}

/// The cells of one process under [`HEADS`].
#[must_use]
pub fn columns(process: &ProcessView) -> [String; HEADS.len()] {
    let heap = process.ladder.as_ref();
    [
        process.pid.to_string(),
        HumanBytes(process.rss_bytes).to_string(),
        known(heap.map(|heap| heap.ladder.extent_bytes)),
        known(heap.and_then(live_resident)),
        known(heap.and_then(|heap| heap.ladder.trimmable_bytes)),
        known(heap.and_then(|heap| heap.ladder.pinned_bytes)),
        process.fragmentation_ratio.map_or_else(|| "?".to_owned(), |ratio| format!("{ratio:.2}")),
        process.growth.map_or_else(|| "?".to_owned(), |growth| signed(growth.live_bytes_per_s * 3600.0)),
        process.verdict.as_ref().map_or_else(|| process.state.name().to_owned(), |verdict| verdict.verdict.clone()),
    ]
}

/// Live bytes as a step below the resident ones: the resident part of them, or, if that is not known, at most the resident bytes.
#[must_use]
pub fn live_resident(heap: &HeapSample) -> Option<u64> {
    heap.live_resident_bytes.or_else(|| Some(heap.live()?.min(heap.ladder.resident_bytes)))
}

/// The ladder in a sentence. Live bytes that were never touched, or are swapped, are given in parentheses: they are on no page.
fn ladder(heap: &HeapSample) -> String {
    let (extent, resident) = (HumanBytes(heap.ladder.extent_bytes), HumanBytes(heap.ladder.resident_bytes));
    let absent = heap.live().zip(live_resident(heap)).map_or(0, |(live, in_memory)| live.saturating_sub(in_memory));
    let absent = if absent == 0 { String::new() } else { format!(" ({} more are not resident)", HumanBytes(absent)) };
    format!(
        "extent {extent} ≥ resident {resident} ≥ live {}{absent}; swapped {}",
        known(live_resident(heap)),
        HumanBytes(heap.details.swapped_bytes)
    )
}

/// The name of a process, with its container.
#[must_use]
pub fn name(process: &ProcessView) -> String {
    let comm = sanitize::terminal(&process.comm).into_owned();
    match &process.container {
        Some(container) => format!("{comm}  {}", sanitize::terminal(&container.title)),
        None => comm,
    }
}

/// Cells right-aligned under their heads, as many as fit into `columns` next to a name of twelve.
#[must_use]
pub fn line(cells: &[String; HEADS.len()], name: &str, columns: usize) -> String {
    let mut text = String::new();
    let mut left = columns.saturating_sub(12);
    for ((_, width), cell) in HEADS.iter().zip(cells) {
        if *width + 1 > left {
            break;
        }
        left -= width + 1;
        text.push_str(&format!("{cell:>width$} "));
    }
    text.push_str(name);
    text.chars().take(columns).collect()
}

/// The line of heads.
#[must_use]
pub fn heads(columns: usize) -> String {
    line(&HEADS.map(|(head, _)| head.to_owned()), "PROCESS", columns)
}

/// The list as plain text, by descending resident bytes.
#[must_use]
pub fn page(view: &ProcessesView) -> String {
    let mut processes: Vec<&ProcessView> = view.processes.iter().collect();
    processes.sort_by_key(|one| (std::cmp::Reverse(one.rss_bytes), one.pid));
    let rows = processes.iter().map(|one| line(&columns(one), &name(one), usize::MAX));
    std::iter::once(heads(usize::MAX)).chain(rows).map(|line| line + "\n").collect()
}

/// The figures of one process, each a label and a text.
#[must_use]
pub fn figures(process: &ProcessView) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(heap) = &process.ladder {
        lines.push(("heap", ladder(heap)));
        lines.push((
            "free",
            format!(
                "trimmable {}, pinned {}, kept {}; cached {}, in bins {}, tops {}",
                known(heap.ladder.trimmable_bytes),
                known(heap.ladder.pinned_bytes),
                known(heap.details.kept_bytes),
                known(heap.details.cached_bytes),
                known(heap.free_bytes),
                HumanBytes(heap.top_bytes)
            ),
        ));
        let largest = HumanBytes(heap.arena_extent_bytes_max);
        lines.push((
            "arenas",
            format!(
                "{}, the largest {largest}; {} in {} mapped blocks",
                heap.arenas,
                HumanBytes(heap.mmapped_bytes),
                heap.mmapped_allocations
            ),
        ));
    }
    if let Some(reason) = &process.reason {
        lines.push(("unread", sanitize::terminal(reason).into_owned()));
    }
    if let Some(verdict) = &process.verdict {
        lines.push(("verdict", format!("{} ({} confidence): {}", verdict.verdict, verdict.confidence, verdict.summary)));
    }
    if let Some(growth) = &process.growth {
        let hour = |rate: f64| signed(rate * 3600.0);
        lines.push((
            "growth",
            format!(
                "live {}/h, resident {}/h, over {} censuses",
                hour(growth.live_bytes_per_s),
                hour(growth.resident_bytes_per_s),
                growth.censuses
            ),
        ));
    }
    if let Some(sentence) = &process.cgroup_memory_sentence {
        let ahead = process.memory_limit.as_ref().and_then(|limit| limit.seconds_to_limit_est);
        let left = ahead.map_or(String::new(), |seconds| format!("; full in about {} min", (seconds / 60.0) as u64));
        lines.push(("limit", format!("{sentence}{left}")));
    }
    if let Some(rates) = &process.rates {
        lines.push((
            "rate",
            match (rates.allocations_per_s.or(rates.allocations_per_s_min), rates.allocated_bytes_per_s.or(rates.allocated_bytes_per_s_min))
            {
                (Some(calls), Some(bytes)) => {
                    let least = if rates.allocations_per_s.is_none() { "≥" } else { "" };
                    format!("{least}{calls:.0} allocations/s, {least}{}/s ({})", HumanBytes(bytes as u64), rates.mode)
                }
                _ => "not known".to_owned(),
            },
        ));
    }
    let mut kinds: Vec<_> = process.not_malloc.iter().collect();
    kinds.sort_by_key(|one| std::cmp::Reverse(one.resident_bytes));
    if !kinds.is_empty() {
        let list: Vec<String> =
            kinds.iter().take(4).map(|one| format!("{} {}", sanitize::terminal(&one.kind), HumanBytes(one.resident_bytes))).collect();
        lines.push(("besides", list.join(", ")));
    }
    for census in &process.censuses {
        let usable = if census.usable { "" } else { ", not usable for verdicts" };
        lines.push(("census", format!("{} {:.0} s old, took {:.0} ms{usable}", census.level, census.age_s, census.duration_ms)));
    }
    lines
}

/// The contents of a cell of the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cell {
    /// Not resident.
    Absent,
    /// Free pages that a trim releases.
    Trimmable,
    /// Mostly free, pinned by few live bytes, or kept.
    Pinned,
    /// Live and free mixed.
    Mixed,
    /// Mostly live.
    Live,
}

impl Cell {
    /// Its character, distinguishable without colours.
    #[must_use]
    pub fn sign(self) -> char {
        match self {
            Self::Absent => '·',
            Self::Trimmable => '░',
            Self::Pinned => '▒',
            Self::Mixed => '▓',
            Self::Live => '█',
        }
    }

    /// Classifies a row of a map's numbers: live, pinned, trimmable, kept, other, resident bytes.
    #[must_use]
    pub fn of(row: [u64; 6]) -> Self {
        let [live, _, trimmable, _, _, resident] = row;
        let share = |bytes: u64| bytes as f64 / resident.max(1) as f64;
        if resident == 0 {
            Self::Absent
        } else if share(trimmable) >= 0.5 {
            Self::Trimmable
        } else if share(live) >= 0.75 {
            Self::Live
        } else if share(live) >= 0.25 {
            Self::Mixed
        } else {
            Self::Pinned
        }
    }
}

/// The cells of a map in order.
#[must_use]
pub fn strip(map: &MapView) -> Vec<Cell> {
    map.pieces.iter().flat_map(|piece| piece.cells.iter().map(|row| Cell::of(*row))).collect()
}

/// The heaviest paths of a tree, by depth: value, share of the whole, name.
#[must_use]
pub fn stacks(root: &Node, lines_max: usize) -> Vec<String> {
    let mut lines = Vec::new();
    push(root, root.total, 0, lines_max, &mut lines);
    lines
}

fn push(node: &Node, all: u64, depth: usize, lines_max: usize, lines: &mut Vec<String>) {
    for child in &node.children {
        // Smaller ones would only fill the screen.
        if lines.len() >= lines_max || child.total.saturating_mul(50) < all {
            return;
        }
        let percent = 100.0 * child.total as f64 / all.max(1) as f64;
        lines.push(format!("{:>10} {percent:>5.1}%  {}{}", HumanBytes(child.total).to_string(), "  ".repeat(depth.min(20)), child.name));
        push(child, all, depth + 1, lines_max, lines);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::heap::ladder::Ladder;

    #[test]
    fn cells_are_classified_by_their_contents() {
        let cell = |live, pinned, trimmable, kept| Cell::of([live, pinned, trimmable, kept, 0, live + pinned + trimmable + kept]);
        let cells = [cell(0, 0, 0, 0), cell(0, 0, 4096, 0), cell(100, 3996, 0, 0), cell(2048, 2048, 0, 0), cell(4096, 0, 0, 0)];
        assert_eq!(cells.map(Cell::sign), ['·', '░', '▒', '▓', '█']);
        assert_eq!(cell(0, 0, 0, 4096), Cell::Pinned);
    }

    #[test]
    fn live_never_exceeds_resident_and_the_rest_is_shown() {
        let heap = |live_resident_bytes| HeapSample {
            ladder: Ladder { extent_bytes: 100 << 20, resident_bytes: 30 << 20, live_bytes: Some(90 << 20), ..Ladder::default() },
            live_resident_bytes,
            ..HeapSample::default()
        };
        let text = ladder(&heap(Some(20 << 20)));
        assert_eq!(text, "extent 100 MiB ≥ resident 30.0 MiB ≥ live 20.0 MiB (70.0 MiB more are not resident); swapped 0 B");
        assert!(ladder(&heap(None)).contains("resident 30.0 MiB ≥ live 30.0 MiB (60.0 MiB more"), "{}", ladder(&heap(None)));
    }

    #[test]
    fn a_narrow_screen_loses_columns_but_not_the_name() {
        let cells = HEADS.map(|(head, _)| head.to_owned());
        assert!(line(&cells, "redis", 40).ends_with("redis") && line(&cells, "redis", 40).contains("RESIDENT"));
        assert!(!line(&cells, "redis", 40).contains("VERDICT"));
    }
}
