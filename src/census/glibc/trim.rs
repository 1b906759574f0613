//! What `malloc_trim(0)` would release now (malloc/malloc.c: mtrim, systrim).
//!
//! It merges the fastbins' chunks into their free neighbours, releases the whole pages of every free chunk after its header, and lowers the end
//! of the brk heap. It never shrinks the tops of other arenas and never empties thread caches.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::chunks::{ChunkState, ChunkTable};
use super::super::page_cache::PageCache;
use crate::heap::residency::{page_bytes, page_up};

/// `sizeof (struct malloc_chunk)`: a free chunk's header and links stay.
const CHUNK_STRUCT_BYTES: u64 = 0x30;
/// MINSIZE, and the byte more that systrim keeps.
const TOP_KEPT_BYTES: u64 = 33;

/// What the prediction needs of the heap besides its chunks.
#[derive(Debug, Clone, Default)]
pub struct TrimPlan {
    /// The brk heap's top chunk, if it ends at the break.
    pub brk_top: Option<Range<u64>>,
    /// Granularity of releasing the end of the brk heap: a page, or a huge page.
    pub top_unit_bytes: u64,
    /// Mappings of huge pages, of which nothing is released.
    pub huge_mappings: Vec<Range<u64>>,
}

/// The prediction.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trim {
    /// Resident bytes of whole pages inside free chunks.
    pub inside_bytes: u64,
    /// Resident bytes at the end of the brk heap.
    pub top_bytes: u64,
    /// By arena.
    pub arenas: BTreeMap<u32, ArenaTrim>,
}

/// What is released of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArenaTrim {
    /// Resident bytes.
    pub bytes: u64,
    /// Ranges released, resident or not: a system call each.
    pub runs: u64,
}

impl Trim {
    /// All bytes that would be released.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inside_bytes.saturating_add(self.top_bytes)
    }
}

/// Location of bytes that would be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Inside free chunks.
    Inside,
    /// At the end of the brk heap.
    Top,
}

/// Predicts for a walked heap.
#[must_use]
pub fn predict(table: &ChunkTable, plan: &TrimPlan, pages: &mut PageCache<'_>) -> Trim {
    let mut trim = Trim::default();
    visit(table, plan, |range, place, arena| {
        let bytes = pages.resident_bytes(range);
        let of_arena = trim.arenas.entry(arena).or_default();
        of_arena.bytes += bytes;
        of_arena.runs += 1;
        match place {
            Place::Inside => trim.inside_bytes += bytes,
            Place::Top => trim.top_bytes += bytes,
        }
    });
    trim
}

/// Visits the ranges of whole pages that would be released, resident or not, with their arena.
pub fn visit(table: &ChunkTable, plan: &TrimPlan, mut give: impl FnMut(Range<u64>, Place, u32)) {
    for region in table.regions() {
        let arena = region.arena;
        let mut run: Option<Range<u64>> = None;
        table.chunks_of(region).for_each(|chunk| match chunk.state {
            ChunkState::Free | ChunkState::Fastbin => match &mut run {
                Some(run) => run.end = chunk.end(),
                None => run = Some(chunk.start..chunk.end()),
            },
            // Free chunks before top merge into it.
            ChunkState::Top => {
                let top = run.take().map_or(chunk.start, |run| run.start)..chunk.end();
                if let Some(range) = of_top(&top, plan) {
                    give(range, Place::Top, arena);
                }
            }
            _ => {
                if let Some(range) = run.take().and_then(|run| inside(&run, plan)) {
                    give(range, Place::Inside, arena);
                }
            }
        });
        if let Some(range) = run.and_then(|run| inside(&run, plan)) {
            give(range, Place::Inside, arena);
        }
    }
}

fn inside(run: &Range<u64>, plan: &TrimPlan) -> Option<Range<u64>> {
    let start = page_up(run.start.saturating_add(CHUNK_STRUCT_BYTES));
    let bytes = run.end.saturating_sub(start) & !(page_bytes() - 1);
    let stays = bytes == 0 || plan.huge_mappings.iter().any(|mapping| mapping.contains(&start));
    (!stays).then(|| start..start + bytes)
}

fn of_top(top: &Range<u64>, plan: &TrimPlan) -> Option<Range<u64>> {
    if plan.brk_top.as_ref().is_none_or(|brk| brk.end != top.end) {
        return None;
    }
    released_top(top, plan.top_unit_bytes, 0)
}

/// What is released at the end of the brk heap with this top, where `pad_bytes` of it are kept (malloc.c, systrim).
#[must_use]
pub fn released_top(top: &Range<u64>, unit_bytes: u64, pad_bytes: u64) -> Option<Range<u64>> {
    let unit = unit_bytes.max(page_bytes());
    let extra = (top.end - top.start).saturating_sub(TOP_KEPT_BYTES).saturating_sub(pad_bytes) / unit * unit;
    (extra > 0).then(|| top.end - extra..top.end)
}
