//! The heap's address space page by page: the contents of each resident page. The sums over all pages are those of the census.

use std::ops::Range;

use super::chunks::{ARENA_NONE, ChunkState};
use super::glibc::trim::{self, TrimPlan};
use super::memory::Memory;
use super::objects::range_of;
use super::page_cache::PageCache;
use super::reader::HeapWalk;
use super::take::Taken;
use crate::allocator::{Allocator, ChunkRule};
use crate::heap::residency::{page_bytes, page_down, page_up, whole_pages};

/// Pages of one map: 8 GiB of heap, 24 MiB of table. What lies beyond is counted as left out.
const PAGES_MAX: u64 = 1 << 21;

/// Bytes by holder on one page. Zero unless the page is resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Page {
    live: u16,
    free: u16,
    other: u16,
    is_resident: bool,
    is_trimmable: bool,
}

/// The pages of one piece of a heap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// First address, at a page's boundary.
    pub start: u64,
    /// The allocator.
    pub allocator: Allocator,
    /// Index of the arena in the census's list; `None` for blocks with mappings of their own.
    pub arena: Option<u32>,
    pages: Vec<Page>,
}

impl Piece {
    /// Addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.pages.len() as u64 * page_bytes())
    }
}

/// The contents of a cell of one or more pages, in bytes of resident pages. resident = live + pinned + trimmable + kept + other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cell {
    /// In use.
    pub live_bytes: u64,
    /// Free, on pages that also hold live bytes.
    pub pinned_bytes: u64,
    /// Whole free pages that a trim or a purge releases.
    pub trimmable_bytes: u64,
    /// Free bytes of pages without live bytes that a trim leaves.
    pub kept_bytes: u64,
    /// The allocator's own data and what is not understood.
    pub other_bytes: u64,
    /// Resident.
    pub resident_bytes: u64,
}

impl Cell {
    fn add(&mut self, page: Page) {
        if !page.is_resident {
            return;
        }
        let (live, free) = (u64::from(page.live), u64::from(page.free));
        self.resident_bytes += page_bytes();
        self.live_bytes += live;
        if page.is_trimmable {
            self.trimmable_bytes += page_bytes();
            return;
        }
        if live > 0 {
            self.pinned_bytes += free;
        } else {
            self.kept_bytes += free;
        }
        self.other_bytes += page_bytes().saturating_sub(live + free);
    }

    /// Adds another cell.
    pub fn sum(&mut self, other: &Self) {
        self.live_bytes += other.live_bytes;
        self.pinned_bytes += other.pinned_bytes;
        self.trimmable_bytes += other.trimmable_bytes;
        self.kept_bytes += other.kept_bytes;
        self.other_bytes += other.other_bytes;
        self.resident_bytes += other.resident_bytes;
    }
}

/// A part of a piece: its piece, the address of its first cell, and its cells.
pub type Part<'a> = (&'a Piece, u64, Vec<Cell>);

/// The pages of all heaps of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PageMap {
    /// The pieces by ascending address.
    pub pieces: Vec<Piece>,
    /// Pages left out because there are too many.
    pub pages_dropped: u64,
}

impl PageMap {
    /// The map of a census of level full.
    #[must_use]
    pub fn new(memory: &dyn Memory, taken: &Taken) -> Self {
        let mut map = Self::default();
        let mut left = PAGES_MAX;
        for heap in &taken.heaps {
            map.add_heap(heap, &mut left);
        }
        map.pieces.sort_by_key(|piece| piece.start);
        let mut cache = PageCache::new(memory);
        for piece in &mut map.pieces {
            let range = piece.range();
            for (index, page) in piece.pages.iter_mut().enumerate() {
                let start = range.start + index as u64 * page_bytes();
                page.is_resident = cache.resident_bytes(start..start + page_bytes()) > 0;
            }
        }
        map
    }

    fn add_heap(&mut self, heap: &HeapWalk, left: &mut u64) {
        let first = self.pieces.len();
        let mut extents: Vec<Range<u64>> = heap.extents.iter().map(|(_, extent)| extent.clone()).collect();
        extents.sort_unstable_by_key(|extent| extent.start);
        for region in heap.chunks.regions().iter().filter(|region| region.end > region.start) {
            let extent = range_of(&extents, region.start);
            let start = page_down(extent.map_or(region.start, |extent| extent.start));
            let end = page_up(region.end);
            let arena = (region.arena != ARENA_NONE).then_some(region.arena);
            let touches = |last: &Piece| last.range().end >= start && last.start <= start && last.arena == arena;
            if !self.pieces.get(first..).and_then(<[Piece]>::last).is_some_and(touches) {
                self.pieces.push(Piece { start, allocator: heap.account.allocator, arena, pages: Vec::new() });
            }
            let Some(piece) = self.pieces.last_mut() else { continue };
            let wanted = (end - piece.start) / page_bytes();
            let more = wanted.saturating_sub(piece.pages.len() as u64);
            let given = more.min(*left);
            *left -= given;
            self.pages_dropped += more - given;
            piece.pages.resize(piece.pages.len() + usize::try_from(given).unwrap_or(0), Page::default());
            for chunk in heap.chunks.chunks_of(region) {
                fill(piece, chunk.start..chunk.end(), |page, bytes| match chunk.state {
                    ChunkState::Live | ChunkState::Mmapped => page.live = page.live.saturating_add(bytes),
                    ChunkState::Overhead | ChunkState::Unknown => page.other = page.other.saturating_add(bytes),
                    _ => page.free = page.free.saturating_add(bytes),
                });
            }
        }
        let Some(pieces) = self.pieces.get_mut(first..) else { return };
        give_back(heap, |range| {
            for piece in pieces.iter_mut().filter(|piece| piece.start < range.end && piece.range().end > range.start) {
                fill(piece, range.clone(), |page, bytes| page.is_trimmable |= u64::from(bytes) == page_bytes());
            }
        });
    }

    /// The cells of the part of each piece that lies in `range`, at most about `cells_max` in all, and how many bytes a cell has: a power
    /// of two of pages.
    #[must_use]
    pub fn cells(&self, range: &Range<u64>, cells_max: usize) -> (u64, Vec<Part<'_>>) {
        let parts: Vec<(&Piece, Range<usize>)> = self
            .pieces
            .iter()
            .filter_map(|piece| {
                let index = |addr: u64| usize::try_from(addr.saturating_sub(piece.start) / page_bytes()).unwrap_or(usize::MAX);
                let part =
                    index(range.start).min(piece.pages.len())..index(range.end.saturating_add(page_bytes() - 1)).min(piece.pages.len());
                (!part.is_empty()).then_some((piece, part))
            })
            .collect();
        let pages: usize = parts.iter().map(|(_, part)| part.len()).sum();
        let pages_a_cell = pages.div_ceil(cells_max.max(1)).max(1).next_power_of_two();
        let cells = parts.into_iter().map(|(piece, part)| {
            let start = piece.start + part.start as u64 * page_bytes();
            let pages = piece.pages.get(part).unwrap_or_default();
            let cells = pages.chunks(pages_a_cell).map(|pages| {
                let mut cell = Cell::default();
                pages.iter().for_each(|&page| cell.add(page));
                cell
            });
            (piece, start, cells.collect())
        });
        let cells = cells.collect();
        (pages_a_cell as u64 * page_bytes(), cells)
    }

    /// Memory that the map takes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.pages.len() * size_of::<Page>() + size_of::<Piece>()).sum()
    }
}

/// Visits the pages of a span with the bytes that it has on each.
fn fill(piece: &mut Piece, span: Range<u64>, mut visit: impl FnMut(&mut Page, u16)) {
    let mut at = span.start.max(piece.start);
    while at < span.end {
        let stop = (page_down(at) + page_bytes()).min(span.end);
        let index = usize::try_from((at - piece.start) / page_bytes()).unwrap_or(usize::MAX);
        let Some(page) = piece.pages.get_mut(index) else { return };
        visit(page, u16::try_from(stop - at).unwrap_or(u16::MAX));
        at = stop;
    }
}

/// The top of the main arena of a heap with headers, and the granularity in which its end is released.
#[must_use]
pub fn brk_top(heap: &HeapWalk) -> (Option<Range<u64>>, u64) {
    let main = heap.chunks.regions().iter().filter(|region| region.arena == 0);
    let top = main.flat_map(|region| heap.chunks.chunks_of(region)).filter(|chunk| chunk.state == ChunkState::Top).last();
    let huge = heap.account.settings.iter().find(|setting| setting.name == "thp_pagesize").map_or(0, |setting| setting.value);
    (top.map(|top| top.start..top.end()), page_bytes().max(huge))
}

/// The ranges that a trim or a purge returns. The rule of `malloc_trim` needs the brk heap's top: the end of the main arena, which is the
/// first. Elsewhere whole free pages are used instead.
fn give_back(heap: &HeapWalk, mut visit: impl FnMut(Range<u64>)) {
    if heap.account.allocator.row().chunks == ChunkRule::Header {
        let (brk_top, top_unit_bytes) = brk_top(heap);
        let plan = TrimPlan { brk_top, top_unit_bytes, huge_mappings: Vec::new() };
        trim::visit(&heap.chunks, &plan, |range, _, _| visit(range));
        return;
    }
    for region in heap.chunks.regions() {
        for chunk in heap.chunks.chunks_of(region).filter(|chunk| chunk.state == ChunkState::Free) {
            let whole = whole_pages(chunk.start..chunk.end());
            if !whole.is_empty() {
                visit(whole);
            }
        }
    }
}
