//! The Go runtime's heap (runtime/mheap.go, malloc.go): arenas of 64 MiB. `mheap.arenas` is a table of 2^22 words, one for each 64 MiB of
//! the address space, which leads to the arena's own data; a word of the program's data leads to the table. Stacks of goroutines lie in the
//! arenas too.

use std::ops::Range;

use super::super::layout_cache::ByBuildId;
use super::super::memory::{is_user_address, word_at};
use super::super::not_understood::is_go;
use super::super::objects::{joined, range_of, without};
use super::view::View;
use super::{Kind, RuntimeMemory};
use crate::heap::residency::page_bytes;

/// `heapArenaBytes` on 64-bit Linux.
const ARENA_BYTES: u64 = 64 << 20;
/// Bytes of the table.
const TABLE_BYTES: u64 = 8 << 22;
/// `arenaBaseOffset` on amd64.
const BASE: u64 = 0xffff_8000_0000_0000;
/// Arenas of a process: 1 TiB.
const ARENAS_MAX: usize = 1 << 14;

/// Where the word that leads to the table was found.
#[derive(Debug, Default)]
pub struct LayoutCache {
    by_build_id: ByBuildId<u64>,
}

/// Finds the arenas.
#[must_use]
pub fn find(view: &View<'_>, layouts: &mut LayoutCache) -> Option<RuntimeMemory> {
    if !is_go(view.memory, view.objects, view.maps) {
        return None;
    }
    view.objects.iter().find_map(|one| {
        let (object, build_id) = (one.object(), one.build_id());
        let known = layouts.by_build_id.get(build_id.as_ref()).map(|distance| object.base.wrapping_add(distance));
        if let Some(found) = known.and_then(|addr| arenas(view, view.memory.word(addr)?)) {
            return Some(found);
        }
        let data = one.data();
        let may_lead =
            |word: u64| word.is_multiple_of(page_bytes()) && is_user_address(word) && view.holds(&(word..word.saturating_add(TABLE_BYTES)));
        let (number, found) =
            data.words().filter(|&(_, word)| may_lead(word)).find_map(|(number, word)| Some((number, arenas(view, word)?)))?;
        layouts.by_build_id.remember(build_id.as_ref(), (object.range.start + 8 * number as u64).wrapping_sub(object.base));
        Some(found)
    })
}

/// The arenas that a table names; `None` if it is not a table of arenas, as a word shows that does not fit the mappings.
fn arenas(view: &View<'_>, table: u64) -> Option<RuntimeMemory> {
    let range = table..table.checked_add(TABLE_BYTES)?;
    if !view.holds(&range) {
        return None;
    }
    let mut ranges = Vec::new();
    for run in view.memory.page_runs(range.clone()).ok()?.within(range).filter(|run| run.state.present) {
        // A table has a page for each 32 GiB that are in use.
        let bytes = view.memory.bytes(run.start, usize::try_from(run.end - run.start).ok()?)?;
        for (number, word) in bytes.chunks_exact(8).enumerate().filter(|(_, word)| word_at(word, 0) != 0) {
            let index = (run.start - table) / 8 + number as u64;
            let arena = BASE.wrapping_add(index.checked_mul(ARENA_BYTES)?);
            let leads = range_of(&view.anonymous, word_at(word, 0)).is_some();
            if !leads || !is_user_address(arena) || ranges.len() >= ARENAS_MAX || range_of(&view.unbacked, arena).is_none() {
                return None;
            }
            ranges.extend(open_parts(view, &(arena..arena + ARENA_BYTES)));
        }
    }
    let mut found = RuntimeMemory::new(Kind::Go);
    found.extend(Some((ranges, None)));
    found.finish()
}

/// The parts of an arena that the runtime has opened for use.
fn open_parts(view: &View<'_>, arena: &Range<u64>) -> Vec<Range<u64>> {
    let first = view.anonymous.partition_point(|range| range.end <= arena.start);
    let open = view.anonymous.get(first..).unwrap_or_default().iter().take_while(|range| range.start < arena.end);
    open.map(|range| range.start.max(arena.start)..range.end.min(arena.end)).collect()
}

/// The anonymous memory of a program except thread stacks, of which a Go program without C library has none.
#[must_use]
pub fn rest(view: &View<'_>) -> Vec<Range<u64>> {
    let data: Vec<Range<u64>> = view.objects.iter().map(|one| one.object().range.clone()).collect();
    without(&view.anonymous, &joined(&data))
}
