//! Pinned bytes by block: the free bytes on its pages that its live bytes keep from being returned, as defined in
//! [`crate::fragmentation::pinned`], on pages of 4 KiB.

use super::blocks::Blocks;
use crate::census::HeapWalk;
use crate::census::chunks::{Block, Region};
use crate::census::memory::Memory;
use crate::census::page_cache::PageCache;
use crate::heap::occupancy::Holder;
use crate::heap::residency::{page_bytes, page_down};

/// Live and free bytes of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    live: u64,
    free: u64,
}

/// Pinned bytes by a block's number.
#[must_use]
pub fn pinned(memory: &dyn Memory, heaps: &[HeapWalk], blocks: &Blocks) -> Vec<u32> {
    let mut found = vec![0u32; blocks.index.len()];
    let mut pages = PageCache::new(memory);
    for (heap, region) in regions(heaps) {
        let first = page_down(region.start);
        let list = pages_of(heap, region);
        for block in heap.chunks.blocks_of(region).filter(|block| block.chunk.state.holder() == Holder::Live) {
            let Some(hit) = blocks.index.find(block.addr).filter(|hit| hit.offset == 0) else { continue };
            let mut own = 0;
            on_shared_pages(&block, |addr, bytes| {
                let page = page_at(&list, first, addr);
                if page.is_pinned() && pages.runs_for(addr..addr + page_bytes()).state_at(addr).is_resident() {
                    own += page.free * bytes / page.live;
                }
            });
            if let Some(sum) = found.get_mut(hit.block as usize) {
                *sum = u32::try_from(own).unwrap_or(u32::MAX);
            }
        }
    }
    found
}

/// By group: the pinned bytes of the pages on which no other group's blocks live. They could be given back if only the group's blocks were
/// elsewhere; at most, because an allocator may keep some of them in caches. `group_of` is asked for blocks in use.
#[must_use]
pub fn pinned_alone(
    memory: &dyn Memory,
    heaps: &[HeapWalk],
    blocks: &Blocks,
    groups: usize,
    group_of: impl Fn(u32) -> Option<u32>,
) -> Vec<u64> {
    let mut found = vec![0u64; groups];
    let mut pages = PageCache::new(memory);
    for (heap, region) in regions(heaps) {
        let first = page_down(region.start);
        let list = pages_of(heap, region);
        let mut holders = vec![Holds::Nothing; list.len()];
        for block in heap.chunks.blocks_of(region).filter(|block| block.chunk.state.holder() == Holder::Live) {
            let hit = blocks.index.find(block.addr).filter(|hit| hit.offset == 0);
            let group = hit.and_then(|hit| group_of(hit.block));
            on_shared_pages(&block, |addr, _| {
                if let Some(holds) = place(first, addr).and_then(|place| holders.get_mut(place)) {
                    *holds = holds.and(group);
                }
            });
        }
        for (addr, (page, holds)) in (first..).step_by(page_bytes() as usize).zip(list.iter().zip(&holders)) {
            let Holds::One(group) = *holds else { continue };
            if page.is_pinned()
                && pages.runs_for(addr..addr + page_bytes()).state_at(addr).is_resident()
                && let Some(sum) = found.get_mut(group as usize)
            {
                *sum += page.free;
            }
        }
    }
    found
}

/// Whose blocks live on a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holds {
    Nothing,
    One(u32),
    Several,
}

impl Holds {
    /// With a further block; one without a group counts as another group.
    fn and(self, group: Option<u32>) -> Self {
        match (self, group) {
            (Self::Nothing, Some(group)) => Self::One(group),
            (Self::One(own), Some(group)) if own == group => self,
            _ => Self::Several,
        }
    }
}

impl Page {
    fn is_pinned(&self) -> bool {
        self.live > 0 && self.free > 0
    }
}

fn regions(heaps: &[HeapWalk]) -> impl Iterator<Item = (&HeapWalk, &Region)> {
    heaps.iter().flat_map(|heap| heap.chunks.regions().iter().filter(|region| region.end > region.start).map(move |region| (heap, region)))
}

fn place(first: u64, addr: u64) -> Option<usize> {
    usize::try_from(addr.checked_sub(first)? / page_bytes()).ok()
}

fn page_at(list: &[Page], first: u64, addr: u64) -> Page {
    place(first, addr).and_then(|place| list.get(place)).copied().unwrap_or_default()
}

/// Live and free bytes of a region's pages.
fn pages_of(heap: &HeapWalk, region: &Region) -> Vec<Page> {
    let first = page_down(region.start);
    let mut list = vec![Page::default(); usize::try_from((region.end - first).div_ceil(page_bytes())).unwrap_or(0)];
    for block in heap.chunks.blocks_of(region) {
        on_shared_pages(&block, |addr, bytes| {
            let Some(page) = place(first, addr).and_then(|place| list.get_mut(place)) else { return };
            match block.chunk.state.holder() {
                Holder::Live => page.live += bytes,
                Holder::Other => {}
                _ => page.free += bytes,
            }
        });
    }
    list
}

/// Visits the pages that a chunk may share with its neighbours: its first and its last.
fn on_shared_pages(block: &Block, mut visit: impl FnMut(u64, u64)) {
    let (start, end) = (block.chunk.start, block.chunk.end());
    let (first, last) = (page_down(start), page_down(end.saturating_sub(1)));
    visit(first, end.min(first + page_bytes()) - start);
    if last > first {
        visit(last, end - last);
    }
}
