//! The heap's address space as an image: one cell per page or several pages, coloured by their contents.

use std::io::{self, Write};

use super::chunks::{ARENA_NONE, ChunkState};
use super::memory::Memory;
use super::page_cache::PageCache;
use super::take::Taken;
use crate::heap::residency::{page_bytes, page_down, page_up};
use crate::units::HumanBytes;

/// Cells per row.
const COLUMNS: usize = 256;
/// Most cells drawn: larger heaps get more pages per cell.
const CELLS_MAX: u64 = 200_000;
/// Side of a cell in pixels.
const CELL: usize = 4;
/// Most ranges drawn, the largest ones: the image of thousands of scattered blocks would be too large to open.
const RANGES_MAX: usize = 256;
/// Most cells for which each rectangle has a tooltip with its bytes; beyond, only colours are drawn, in a tenth of the file size.
const TITLED_CELLS_MAX: u64 = 16_384;
/// Pixels above the first range: title and legend.
const HEAD: usize = 58;

/// The colour class of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CellColour {
    Live,
    MostlyLive,
    PartlyLive,
    HardlyLive,
    Free,
    Other,
    Absent,
}

/// The legend: every colour that a cell can have.
const LEGEND: [(CellColour, &str, &str); 7] = [
    (CellColour::Live, "#1f7a34", "live, 7/8 and more"),
    (CellColour::MostlyLive, "#5fae57", "half to 7/8 live"),
    (CellColour::PartlyLive, "#a8d38d", "1/8 to half live"),
    (CellColour::HardlyLive, "#d9ecc7", "less live: free part pinned"),
    (CellColour::Free, "#f5a142", "free, resident"),
    (CellColour::Other, "#b8b0d8", "allocator's own, or unknown"),
    (CellColour::Absent, "#e4e4e4", "not resident"),
];

/// The contents of a cell, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    bytes: u64,
    resident: u64,
    live: u64,
    free: u64,
}

impl Cell {
    fn look(&self) -> CellColour {
        if self.resident == 0 {
            return CellColour::Absent;
        }
        match self.live.saturating_mul(8).checked_div(self.bytes.max(1)).unwrap_or(0) {
            _ if self.live == 0 && self.free > 0 => CellColour::Free,
            _ if self.live == 0 => CellColour::Other,
            0 => CellColour::HardlyLive,
            1..=3 => CellColour::PartlyLive,
            4..=6 => CellColour::MostlyLive,
            _ => CellColour::Live,
        }
    }

    fn add(&mut self, other: &Self) {
        self.bytes += other.bytes;
        self.resident += other.resident;
        self.live += other.live;
        self.free += other.free;
    }
}

/// Draws the heaps of a census taken at level full.
///
/// # Errors
/// What `out` reports.
pub fn draw(memory: &dyn Memory, taken: &Taken, out: &mut dyn Write) -> io::Result<()> {
    let (ranges, left_out) = ranges(taken);
    let pages: u64 = ranges.iter().map(|(start, end)| (end - start) / page_bytes()).sum();
    let cell_bytes = pages.div_ceil(CELLS_MAX).max(1).saturating_mul(page_bytes());
    let mut body = String::new();
    let mut y = HEAD;
    let mut cache = PageCache::new(memory);
    for &(start, end) in &ranges {
        let cells = cells(taken, start, end, cell_bytes, &mut cache);
        body.push_str(&format!("<text x='4' y='{}'>{start:#x} – {end:#x}, {}</text>\n", y + 10, HumanBytes(end - start)));
        y += 14;
        if pages.div_ceil(cell_bytes / page_bytes()) > TITLED_CELLS_MAX {
            draw_lines(&mut body, &cells, y);
        } else {
            for (row, line) in cells.chunks(COLUMNS).enumerate() {
                let first = start + (row * COLUMNS) as u64 * cell_bytes;
                draw_row(&mut body, line, first, cell_bytes, y + row * CELL);
            }
        }
        y += cells.len().div_ceil(COLUMNS) * CELL + 8;
    }
    if let Some(text) = left_out {
        body.push_str(&format!("<text x='4' y='{}'>{text}</text>\n", y + 10));
        y += 14;
    }
    let width = COLUMNS * CELL + 8;
    writeln!(
        out,
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{y}' font-family='monospace' font-size='11'>\n\
         <rect width='{width}' height='{y}' fill='#fff'/>\n\
         <text x='4' y='14'>{} (pid {}): the heap by address, one cell = {}</text>",
        escape(&taken.census.comm),
        taken.census.pid,
        HumanBytes(cell_bytes)
    )?;
    write_legend(out)?;
    out.write_all(body.as_bytes())?;
    writeln!(out, "</svg>")
}

/// The pages of all heaps, by address, and a note on those that are not drawn.
fn ranges(taken: &Taken) -> (Vec<(u64, u64)>, Option<String>) {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for heap in &taken.heaps {
        let regions = heap.chunks.regions().iter().filter(|region| region.end > region.start);
        all.extend(regions.map(|region| (page_down(region.start), page_up(region.end))));
    }
    all.sort_unstable();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for (start, end) in all {
        match ranges.last_mut() {
            Some(last) if last.1 >= start => last.1 = last.1.max(end),
            _ => ranges.push((start, end)),
        }
    }
    if ranges.len() <= RANGES_MAX {
        return (ranges, None);
    }
    ranges.sort_by_key(|(start, end)| std::cmp::Reverse(end - start));
    let rest = ranges.split_off(RANGES_MAX);
    ranges.sort_unstable();
    let bytes: u64 = rest.iter().map(|(start, end)| end - start).sum();
    (ranges, Some(format!("and {} smaller ranges, {} in all, not drawn", rest.len(), HumanBytes(bytes))))
}

/// One row; neighbours that look the same are one rectangle.
fn draw_row(body: &mut String, line: &[Cell], first: u64, cell_bytes: u64, y: usize) {
    let mut at = 0;
    for run in line.chunk_by(|left, right| left.look() == right.look()) {
        let Some(look) = run.first().map(Cell::look) else { continue };
        let mut sum = Cell::default();
        run.iter().for_each(|cell| sum.add(cell));
        let colour = LEGEND.iter().find(|(other, ..)| *other == look).map_or("#000", |(_, colour, _)| colour);
        body.push_str(&format!(
            "<rect x='{}' y='{y}' width='{}' height='{CELL}' fill='{colour}'><title>{:#x}, {}: live {}, free {}, resident {}</title></rect>\n",
            4 + at * CELL,
            run.len() * CELL,
            first + at as u64 * cell_bytes,
            HumanBytes(sum.bytes),
            HumanBytes(sum.live),
            HumanBytes(sum.free),
            HumanBytes(sum.resident)
        ));
        at += run.len();
    }
}

/// A whole range, one path of thick lines for each colour.
fn draw_lines(body: &mut String, cells: &[Cell], y: usize) {
    for (look, colour, _) in LEGEND {
        let mut path = String::new();
        for (row, line) in cells.chunks(COLUMNS).enumerate() {
            let mut at = 0;
            for run in line.chunk_by(|left, right| left.look() == right.look()) {
                if run.first().is_some_and(|cell| cell.look() == look) {
                    path.push_str(&format!("M{} {}h{}", 4 + at * CELL, y + row * CELL + CELL / 2, run.len() * CELL));
                }
                at += run.len();
            }
        }
        if !path.is_empty() {
            body.push_str(&format!("<path stroke='{colour}' stroke-width='{CELL}' d='{path}'/>\n"));
        }
    }
}

/// The colours with their meaning, four to a line.
fn write_legend(out: &mut dyn Write) -> io::Result<()> {
    for (index, (_, colour, meaning)) in LEGEND.iter().enumerate() {
        let (x, y) = (4 + index % 4 * 256, 22 + index / 4 * 16);
        writeln!(out, "<rect x='{x}' y='{y}' width='10' height='10' fill='{colour}' stroke='#888' stroke-width='0.5'/>")?;
        writeln!(out, "<text x='{}' y='{}'>{meaning}</text>", x + 16, y + 9)?;
    }
    Ok(())
}

fn cells(taken: &Taken, start: u64, end: u64, cell_bytes: u64, cache: &mut PageCache<'_>) -> Vec<Cell> {
    let count = usize::try_from((end - start).div_ceil(cell_bytes)).unwrap_or(0);
    let mut cells = vec![Cell::default(); count];
    for heap in &taken.heaps {
        let regions = heap.chunks.regions();
        let first = regions.partition_point(|region| region.end <= start);
        for region in regions.get(first..).unwrap_or_default().iter().take_while(|region| region.start < end) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(resident: u64, live: u64, free: u64) -> Cell {
        Cell { bytes: 4096, resident, live, free }
    }

    #[test]
    fn every_look_that_a_cell_can_have_is_in_the_legend_once() {
        for cell in [
            cell(0, 4096, 0),
            cell(4096, 0, 0),
            cell(4096, 0, 1),
            cell(4096, 1, 1),
            cell(4096, 600, 1),
            cell(4096, 2048, 1),
            cell(4096, 4096, 0),
        ] {
            assert_eq!(LEGEND.iter().filter(|(look, ..)| *look == cell.look()).count(), 1, "{cell:?}");
        }
    }

    #[test]
    fn a_large_heap_is_drawn_with_one_path_for_each_colour() {
        let mut body = String::new();
        let row = vec![cell(4096, 4096, 0); COLUMNS];
        draw_lines(&mut body, &[row, vec![cell(4096, 0, 1), cell(4096, 4096, 0)]].concat(), 10);
        assert_eq!(
            body,
            "<path stroke='#1f7a34' stroke-width='4' d='M4 12h1024M8 16h4'/>\n<path stroke='#f5a142' stroke-width='4' d='M4 16h4'/>\n"
        );
    }

    #[test]
    fn neighbours_that_look_the_same_are_one_rectangle_with_their_sums() {
        let mut body = String::new();
        draw_row(&mut body, &[cell(4096, 4096, 0), cell(4096, 4000, 96), cell(0, 0, 0)], 0x10000, 4096, 7);
        assert_eq!(body.matches("<rect").count(), 2);
        assert!(body.contains("width='8'") && body.contains("0x10000, 8.00 KiB: live 7.91 KiB, free 96 B, resident 8.00 KiB"), "{body}");
        assert!(body.contains("x='12' y='7' width='4'"), "{body}");
    }
}
