//! One sample of one process as a row: the ladder of all its heaps, without derived figures.

use crate::fragmentation::verdict::Kind;
use crate::model::view::ProcessView;

/// Columns of figures, in the order of [`Row::values`].
pub const COLUMNS: [&str; 17] = [
    "rss_bytes",
    "rss_bytes_max",
    "extent_bytes",
    "resident_bytes",
    "swapped_bytes",
    "live_bytes",
    "cached_bytes",
    "free_bytes",
    "top_bytes",
    "trimmable_bytes",
    "pinned_bytes",
    "kept_bytes",
    "unknown_bytes",
    "mmapped_bytes",
    "arenas",
    "limit_bytes",
    "unreached_bytes",
];

/// A sample.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Seconds since the Unix epoch.
    pub at: i64,
    /// The figures; `None` = not known.
    pub values: [Option<u64>; COLUMNS.len()],
    /// The verdict.
    pub verdict: Option<Kind>,
}

impl Row {
    /// The row of a process.
    #[must_use]
    pub fn of(at: i64, process: &ProcessView) -> Self {
        let heap = process.ladder.as_ref();
        let values = [
            Some(process.rss_bytes),
            Some(process.rss_bytes),
            heap.map(|heap| heap.ladder.extent_bytes),
            heap.map(|heap| heap.ladder.resident_bytes),
            heap.map(|heap| heap.details.swapped_bytes),
            heap.and_then(|heap| heap.live()),
            heap.and_then(|heap| heap.details.cached_bytes),
            heap.and_then(|heap| heap.free_bytes),
            heap.map(|heap| heap.top_bytes),
            heap.and_then(|heap| heap.ladder.trimmable_bytes),
            heap.and_then(|heap| heap.ladder.pinned_bytes),
            heap.and_then(|heap| heap.details.kept_bytes),
            heap.and_then(|heap| heap.ladder.unknown_bytes),
            heap.map(|heap| heap.mmapped_bytes),
            heap.map(|heap| heap.arenas),
            process.memory_limit.as_ref().map(|limit| limit.limit_bytes),
            process.unreached.as_ref().map(|unreached| unreached.bytes),
        ];
        let verdict = process.verdict.as_ref().and_then(|verdict| Kind::ALL.into_iter().find(|kind| kind.name() == verdict.verdict));
        Self { at, values, verdict }
    }

    /// The figure of a column.
    #[must_use]
    pub fn value(&self, column: &str) -> Option<u64> {
        let index = COLUMNS.iter().position(|name| *name == column)?;
        self.values.get(index).copied().flatten()
    }
}

/// A verdict's number in a row: its index in [`Kind::ALL`], which only grows at its end.
#[must_use]
pub fn verdict_number(kind: Kind) -> Option<i64> {
    Kind::ALL.iter().position(|one| *one == kind).and_then(|index| i64::try_from(index).ok())
}

/// The verdict with a number.
#[must_use]
pub fn verdict_of(number: i64) -> Option<Kind> {
    usize::try_from(number).ok().and_then(|index| Kind::ALL.get(index)).copied()
}
