//! The map of a heap's pages, as shown.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sample::Identity;
use super::view::unix_s;
use crate::census::PageMap;
use crate::census::page_map::Cell;
use crate::heap::residency::page_bytes;

/// A map of the heaps' pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MapView {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// When the census was taken, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of a cell: a power of two of pages, as small as `cells` allows.
    pub cell_bytes: u64,
    /// Names of a cell's numbers, in their order. resident = live + pinned + trimmable + kept + other; all are bytes of resident pages.
    pub columns: Vec<String>,
    /// The pieces of the heaps by ascending address, within the requested range.
    pub pieces: Vec<PieceView>,
    /// Sums over the requested range, in the order of `columns`.
    pub totals: [u64; 6],
    /// Pages left out because the heap is too large.
    pub pages_dropped: u64,
}

/// A piece of a heap: a run of pages of one arena, or a block with a mapping of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PieceView {
    /// First address of the first cell, in hexadecimal with 0x.
    pub start: String,
    /// First address after the piece, in hexadecimal with 0x.
    pub end: String,
    /// The allocator's name.
    pub allocator: String,
    /// Index of the arena in the census; null = blocks with mappings of their own.
    pub arena: Option<u32>,
    /// The cells by ascending address.
    pub cells: Vec<[u64; 6]>,
}

/// Order of a cell's numbers.
const COLUMNS: [&str; 6] = ["live_bytes", "pinned_bytes", "trimmable_bytes", "kept_bytes", "other_bytes", "resident_bytes"];

fn row(cell: &Cell) -> [u64; 6] {
    [cell.live_bytes, cell.pinned_bytes, cell.trimmable_bytes, cell.kept_bytes, cell.other_bytes, cell.resident_bytes]
}

impl MapView {
    /// The part of a map within a range.
    #[must_use]
    pub fn of(kept: &Kept, range: &Range<u64>, cells_max: usize) -> Self {
        let (cell_bytes, parts) = kept.map.cells(range, cells_max);
        let mut totals = Cell::default();
        let pieces = parts.into_iter().map(|(piece, start, cells)| {
            cells.iter().for_each(|cell| totals.sum(cell));
            let end = piece.range().end.min(start.saturating_add(cell_bytes.saturating_mul(cells.len() as u64)));
            PieceView {
                start: format!("{start:#x}"),
                end: format!("{end:#x}"),
                allocator: piece.allocator.name().to_owned(),
                arena: piece.arena,
                cells: cells.iter().map(row).collect(),
            }
        });
        let pieces = pieces.collect();
        Self {
            pid: kept.identity.process.pid.0,
            start_ticks: kept.identity.process.start_ticks,
            at_unix_s: unix_s(kept.wall),
            page_bytes: page_bytes(),
            cell_bytes,
            columns: COLUMNS.map(str::to_owned).to_vec(),
            pieces,
            totals: row(&totals),
            pages_dropped: kept.map.pages_dropped,
        }
    }
}

/// A cached map.
#[derive(Debug, Clone)]
pub struct Kept {
    /// Whose it is.
    pub identity: Identity,
    /// When it was made.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
    /// The map.
    pub map: Arc<PageMap>,
}

impl Kept {
    /// A map made just now.
    #[must_use]
    pub fn now(identity: Identity, map: PageMap) -> Self {
        Self { identity, at: Instant::now(), wall: SystemTime::now(), map: Arc::new(map) }
    }
}
