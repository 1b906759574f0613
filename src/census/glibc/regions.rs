//! Which address ranges of a process belong to glibc's arenas, and in which order chunks follow there.

use std::ops::Range;

use super::super::memory::Memory;
use super::super::objects::{joined, range_of};
use super::layout::{Arena, Layout, MallocPar, is_link};
use super::parse::Bounds;
use super::walk::RegionPlan;

/// Free chunks of the main arena that are followed to find the mappings that replaced the brk heap.
const ANCHORS_MAX: usize = 4096;
/// Chunks followed in one bin.
const ANCHORS_PER_BIN_MAX: usize = 64;

/// The regions to walk and what lies before the chunks in them.
#[derive(Debug, Clone, Default)]
pub struct Regions {
    /// The regions; none overlap.
    pub plans: Vec<RegionPlan>,
    /// heap_info, arena structures and lost alignment, in bytes.
    pub overhead_bytes: u64,
    /// The ranges of all heaps for residency, with their arena's index.
    pub extents: Vec<(u32, Range<u64>)>,
    /// The ranges that heaps may grow into: no mmapped chunk lies there.
    pub reserved: Vec<Range<u64>>,
    /// The brk heap's top, if it ends where the heap's mapping ends.
    pub brk_top: Option<Range<u64>>,
}

/// Lays out the regions. `anonymous` are the sorted anonymous mappings, `heap` the brk heap's range if the process has one.
#[must_use]
pub fn regions(
    memory: &dyn Memory,
    layout: &Layout,
    arenas: &[Arena],
    par: Option<&MallocPar>,
    anonymous: &[Range<u64>],
    heap: Option<Range<u64>>,
) -> Regions {
    let mut out = Regions::default();
    let mapped = joined(anonymous);
    for (index, arena) in arenas.iter().enumerate() {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        if arena.is_main {
            main_regions(memory, layout, index, arena, arenas, par, anonymous, heap.as_ref(), &mut out);
        } else {
            heap_regions(layout, index, arena, &mapped, &mut out);
        }
    }
    out
}

impl Regions {
    /// Adds a region unless it overlaps an existing one: two arenas never share memory, so overlap means damage or a forgery.
    fn add(&mut self, extent: Range<u64>, plan: RegionPlan) {
        let overlaps = |other: &Range<u64>| extent.start < other.end && other.start < extent.end;
        if plan.start >= plan.bounds.end || plan.start < extent.start || self.extents.iter().any(|(_, other)| overlaps(other)) {
            return;
        }
        self.overhead_bytes = self.overhead_bytes.saturating_add(plan.start - extent.start);
        self.extents.push((plan.arena, extent));
        self.plans.push(plan);
    }
}

#[allow(clippy::too_many_arguments, reason = "one call, and each argument is a different view of the process")]
fn main_regions(
    memory: &dyn Memory,
    layout: &Layout,
    index: u32,
    arena: &Arena,
    arenas: &[Arena],
    par: Option<&MallocPar>,
    anonymous: &[Range<u64>],
    heap: Option<&Range<u64>>,
    out: &mut Regions,
) {
    if arena.top_bytes == 0 && arena.system_bytes == 0 {
        return;
    }
    let plan = |start: u64, end: u64, top: Option<u64>, goes_on_after_top: bool| RegionPlan {
        start,
        bounds: Bounds { end, top, is_main: true, goes_on_after_top },
        arena: index,
        arena_addr: arena.addr,
    };
    let base = par.map(|par| par.sbrk_base).filter(|&base| base != 0).or(heap.map(|heap| heap.start)).unwrap_or(0);
    let top_end = arena.top.saturating_add(arena.top_bytes);
    if let Some(heap) = heap.filter(|heap| heap.contains(&base)) {
        let start = base.next_multiple_of(16);
        if heap.contains(&arena.top) && top_end <= heap.end {
            out.add(base..top_end, plan(start, top_end, Some(arena.top), false));
            if top_end == heap.end {
                out.brk_top = Some(arena.top..top_end);
            }
        } else {
            out.add(base..heap.end, plan(start, heap.end, None, false));
        }
        out.reserved.push(heap.clone());
    }
    // Where brk was refused (or huge pages are requested) sysmalloc takes mappings of at least 1 MiB. The kernel joins them with their
    // neighbours, each piece ends in fenceposts, and top is in the lowest.
    let walked: u64 = out.extents.iter().filter(|(arena, _)| *arena == index).map(|(_, range)| range.end - range.start).sum();
    if walked == arena.system_bytes {
        return;
    }
    let mut anchors = anchors(memory, layout, arena);
    anchors.push(arena.top);
    for range in anonymous {
        let holds = |addr: &u64| range.contains(addr);
        let is_other_heap = arenas.iter().flat_map(|arena| &arena.heaps).any(|&(start, _)| {
            let reserved = start..start.saturating_add(layout.heap_bytes_max);
            reserved.contains(&range.start)
        });
        if heap.is_some_and(|heap| heap.contains(&range.start)) || is_other_heap || !anchors.iter().any(holds) {
            continue;
        }
        let top = holds(&arena.top).then_some(arena.top);
        out.add(range.clone(), plan(range.start, range.end, top, true));
    }
}

/// Free chunks of the arena, a few from each bin.
fn anchors(memory: &dyn Memory, layout: &Layout, arena: &Arena) -> Vec<u64> {
    let mut found = Vec::new();
    for (bin, &(first, last)) in arena.bins.iter().enumerate() {
        let head = arena.bin_head(layout, bin);
        found.extend([first, last].into_iter().filter(|&chunk| chunk != head && is_link(chunk)));
        let mut chunk = first;
        for _ in 0..ANCHORS_PER_BIN_MAX {
            if chunk == head || !is_link(chunk) || found.len() >= ANCHORS_MAX {
                break;
            }
            found.push(chunk);
            let Some(next) = memory.word(chunk.wrapping_add(16)) else { break };
            chunk = next;
        }
    }
    found
}

/// The heaps of a non-main arena. The first one begins with the arena itself, the last one ends with top.
fn heap_regions(layout: &Layout, index: u32, arena: &Arena, mapped: &[Range<u64>], out: &mut Regions) {
    for &(start, end) in &arena.heaps {
        let holds_arena = (start..end).contains(&arena.addr);
        let first = if holds_arena {
            arena.addr.saturating_add(layout.state_bytes()).checked_next_multiple_of(16).unwrap_or(u64::MAX)
        } else {
            start.saturating_add(layout.heap_info_bytes)
        };
        let top = (start..end).contains(&arena.top).then_some(arena.top);
        let end = if top.is_some() { arena.top.saturating_add(arena.top_bytes) } else { end };
        // A heap lies in one readable mapping; what a forged heap_info claims beyond it is not walked.
        let Some(mapping) = range_of(mapped, start) else { continue };
        let end = end.min(mapping.end);
        let bounds = Bounds { end, top, is_main: false, goes_on_after_top: false };
        out.add(start..end, RegionPlan { start: first, bounds, arena: index, arena_addr: arena.addr });
        out.reserved.push(start..start.saturating_add(layout.heap_bytes_max));
    }
}
