//! The picture of the address space: what each page, or run of pages, of the heaps is full of.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::super::ServerState;
use super::{Refusal, answer, find, object, query, refuse};
use crate::agent::collect::{Command, MapRefused};
use crate::agent::sample::{Identity, ProcessSample};
use crate::agent::view::unix_s;
use crate::census::PageMap;
use crate::census::page_map::Cell;
use crate::heap::residency::PAGE_BYTES;
use crate::target::ProcessId;

/// Cells of one answer at most: about 300 KiB of JSON.
const CELLS_MAX: u64 = 16_384;
/// Cells without the parameter.
const CELLS_DEFAULT: u64 = 2048;
/// How long a map is shown again instead of looking anew, so that zooming stays on one picture.
const KEEP: Duration = Duration::from_secs(60);
/// Memory for maps that are kept.
const KEPT_BYTES_MAX: usize = 48 << 20;
/// Longest wait for the census thread: a census may take 30 s.
const WAIT_MAX: Duration = Duration::from_secs(35);

/// A heap's pages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MapView {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// When the pages were looked at, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of a cell: a power of two of pages, as small as `cells` allows.
    pub cell_bytes: u64,
    /// What the numbers of a cell are, in their order. resident = live + pinned + trimmable + kept + other; all of resident pages.
    pub columns: Vec<String>,
    /// The pieces of the heaps by rising address, as far as they lie in the range asked for.
    pub pieces: Vec<PieceView>,
    /// Sums over the range asked for, in the order of `columns`.
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
    /// The cells by rising address.
    pub cells: Vec<[u64; 6]>,
}

/// Order of a cell's numbers.
const COLUMNS: [&str; 6] = ["live_bytes", "pinned_bytes", "trimmable_bytes", "kept_bytes", "other_bytes", "resident_bytes"];

fn row(cell: &Cell) -> [u64; 6] {
    [cell.live_bytes, cell.pinned_bytes, cell.trimmable_bytes, cell.kept_bytes, cell.other_bytes, cell.resident_bytes]
}

impl MapView {
    /// The part of a map that lies in a range.
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
            page_bytes: PAGE_BYTES,
            cell_bytes,
            columns: COLUMNS.map(str::to_owned).to_vec(),
            pieces,
            totals: row(&totals),
            pages_dropped: kept.map.pages_dropped,
        }
    }
}

/// A map that is kept for a while.
#[derive(Debug, Clone)]
pub struct Kept {
    identity: Identity,
    at: Instant,
    wall: SystemTime,
    map: Arc<PageMap>,
}

impl Kept {
    /// A map that was made just now.
    #[must_use]
    pub fn now(identity: Identity, map: PageMap) -> Self {
        Self { identity, at: Instant::now(), wall: SystemTime::now(), map: Arc::new(map) }
    }
}

/// The maps that are kept, the oldest first.
#[derive(Debug, Default)]
pub struct Maps(Mutex<VecDeque<Kept>>);

impl Maps {
    fn young(&self, identity: Identity) -> Option<Kept> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.at.elapsed() < KEEP);
        kept.iter().find(|one| one.identity == identity).cloned()
    }

    /// Forgets the map of a process, so that the next one is a new one.
    pub(in crate::server) fn forget(&self, process: ProcessId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|one| one.identity.process != process);
    }

    fn keep(&self, new: Kept) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.identity != new.identity);
        kept.push_back(new);
        while kept.len() > 1 && kept.iter().map(|one| one.map.table_bytes()).sum::<usize>() > KEPT_BYTES_MAX {
            kept.pop_front();
        }
    }
}

/// Parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    from: Option<String>,
    to: Option<String>,
    cells: Option<u64>,
}

/// `/api/v1/processes/{pid}/map`
pub async fn map(State(state): State<Arc<ServerState>>, Path(pid): Path<String>, asked: Result<Query<Asked>, QueryRejection>) -> Response {
    answer(view(&state, &pid, asked).await.map(|view| object(&view)))
}

async fn view(state: &ServerState, pid: &str, asked: Result<Query<Asked>, QueryRejection>) -> Result<MapView, Refusal> {
    let asked = query::checked(asked)?;
    let range = query::range(asked.from.as_deref(), asked.to.as_deref())?;
    let cells = asked.cells.unwrap_or(CELLS_DEFAULT);
    if !(1..=CELLS_MAX).contains(&cells) {
        return Err(refuse(StatusCode::BAD_REQUEST, "cells is a number from 1 to 16384"));
    }
    let found = find(state, pid)?;
    let kept = match state.maps.young(found.identity) {
        Some(kept) => kept,
        None => look(state, &found).await?,
    };
    Ok(MapView::of(&kept, &range, usize::try_from(cells).unwrap_or(1)))
}

/// Asks the census thread, which charges its budget for it.
async fn look(state: &ServerState, found: &ProcessSample) -> Result<Kept, Refusal> {
    let (reply, answer) = oneshot::channel();
    let silent = || refuse(StatusCode::SERVICE_UNAVAILABLE, "the census thread does not answer");
    state.commands.send(Command::Map { identity: found.identity, reply }).map_err(|_| silent())?;
    let looked = tokio::time::timeout(WAIT_MAX, answer).await.map_err(|_| silent())?.map_err(|_| silent())?;
    let map = looked.map_err(|refused| {
        let status = match refused {
            MapRefused::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            MapRefused::TooLarge => StatusCode::UNPROCESSABLE_ENTITY,
            MapRefused::Gone | MapRefused::NoChunks | MapRefused::Failed(_) => StatusCode::NOT_FOUND,
        };
        let mut answer = *refuse(status, &refused.to_string());
        if let MapRefused::Busy { retry_s } = refused {
            answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_s));
        }
        Box::new(answer)
    })?;
    let kept = Kept::now(found.identity, map);
    state.maps.keep(kept.clone());
    Ok(kept)
}
