//! The heap's address space as a picture: one cell a page or more, coloured by what holds it.

use std::io::{self, Write};

use super::chunks::{ARENA_NONE, ChunkState};
use super::memory::Memory;
use super::page_cache::PageCache;
use super::take::Taken;
use crate::heap::residency::{PAGE_BYTES, page_down, page_up};
use crate::units::HumanBytes;

/// Cells a row.
const COLUMNS: u64 = 256;
/// Cells drawn at most: larger heaps get more pages a cell.
const CELLS_MAX: u64 = 200_000;
/// Side of a cell in pixels.
const CELL: u64 = 4;

/// What a cell holds, in bytes of resident pages.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    bytes: u64,
    resident: u64,
    live: u64,
    free: u64,
}

/// Draws the heaps of a census taken at level full.
///
/// # Errors
/// What `out` reports.
pub fn draw(memory: &dyn Memory, taken: &Taken, out: &mut dyn Write) -> io::Result<()> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for heap in &taken.heaps {
        for region in heap.chunks.regions().iter().filter(|region| region.end > region.start) {
            let (start, end) = (page_down(region.start), page_up(region.end));
            match ranges.last_mut() {
                Some(last) if last.1 >= start => last.1 = last.1.max(end),
                _ => ranges.push((start, end)),
            }
        }
    }
    ranges.sort_unstable();
    let pages: u64 = ranges.iter().map(|(start, end)| (end - start) / PAGE_BYTES).sum();
    let cell_bytes = pages.div_ceil(CELLS_MAX).max(1).saturating_mul(PAGE_BYTES);
    let mut body = String::new();
    let mut y = 40;
    let mut cache = PageCache::new(memory);
    for &(start, end) in &ranges {
        let cells = cells(taken, start, end, cell_bytes, &mut cache);
        body.push_str(&format!("<text x='4' y='{}'>{start:#x} – {end:#x}, {}</text>\n", y + 10, HumanBytes(end - start)));
        y += 14;
        for (index, cell) in cells.iter().enumerate() {
            let (column, row) = (index as u64 % COLUMNS, index as u64 / COLUMNS);
            let title = if cells.len() < 4096 { title(start + index as u64 * cell_bytes, cell) } else { String::new() };
            body.push_str(&format!(
                "<rect x='{}' y='{}' width='{CELL}' height='{CELL}' fill='{}'>{title}</rect>\n",
                4 + column * CELL,
                y + row * CELL,
                colour(cell)
            ));
        }
        y += (cells.len() as u64).div_ceil(COLUMNS) * CELL + 8;
    }
    let width = COLUMNS * CELL + 8;
    writeln!(
        out,
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{y}' font-family='monospace' font-size='11'>\n\
         <rect width='{width}' height='{y}' fill='#fff'/>\n\
         <text x='4' y='14'>{} (pid {}): one cell = {}; dark green live, pale green partly live (free part pinned), orange free and resident, \
         grey not resident</text>",
        escape(&taken.census.comm),
        taken.census.pid,
        HumanBytes(cell_bytes)
    )?;
    out.write_all(body.as_bytes())?;
    writeln!(out, "</svg>")
}

fn cells(taken: &Taken, start: u64, end: u64, cell_bytes: u64, cache: &mut PageCache<'_>) -> Vec<Cell> {
    let count = usize::try_from((end - start).div_ceil(cell_bytes)).unwrap_or(0);
    let mut cells = vec![Cell::default(); count];
    for heap in &taken.heaps {
        for region in heap.chunks.regions().iter().filter(|region| region.start < end && region.end > start) {
            for chunk in heap.chunks.chunks_of(region) {
                let is_live = matches!(chunk.state, ChunkState::Live | ChunkState::Mmapped) || region.arena == ARENA_NONE;
                let mut at = chunk.start.max(start);
                let chunk_end = chunk.end().min(end);
                while at < chunk_end {
                    let index = (at - start) / cell_bytes;
                    let stop = (start + (index + 1) * cell_bytes).min(chunk_end);
                    if let Some(cell) = usize::try_from(index).ok().and_then(|index| cells.get_mut(index)) {
                        if is_live {
                            cell.live += stop - at;
                        } else if chunk.state.is_free() {
                            cell.free += stop - at;
                        }
                    }
                    at = stop;
                }
            }
        }
    }
    for (index, cell) in cells.iter_mut().enumerate() {
        let from = start + index as u64 * cell_bytes;
        let to = (from + cell_bytes).min(end);
        cell.bytes = to - from;
        cell.resident = cache.resident_bytes(from..to);
    }
    cells
}

fn colour(cell: &Cell) -> &'static str {
    if cell.resident == 0 {
        return "#e4e4e4";
    }
    match cell.live.saturating_mul(8).checked_div(cell.bytes.max(1)).unwrap_or(0) {
        _ if cell.live == 0 && cell.free > 0 => "#f5a142",
        _ if cell.live == 0 => "#b8b0d8",
        0 => "#d9ecc7",
        1..=3 => "#a8d38d",
        4..=6 => "#5fae57",
        _ => "#1f7a34",
    }
}

fn title(addr: u64, cell: &Cell) -> String {
    format!(
        "<title>{addr:#x}: live {}, free {}, resident {}</title>",
        HumanBytes(cell.live),
        HumanBytes(cell.free),
        HumanBytes(cell.resident)
    )
}

fn escape(text: &str) -> String {
    text.chars()
        .filter(|c| !c.is_control())
        .map(|c| match c {
            '<' => "&lt;".into(),
            '>' => "&gt;".into(),
            '&' => "&amp;".into(),
            c => c.to_string(),
        })
        .collect()
}
