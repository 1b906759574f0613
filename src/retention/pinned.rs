//! Pinned bytes by block: the free bytes on its pages that its live bytes keep from being returned, as defined in
//! [`crate::fragmentation::pinned`], on pages of 4 KiB.

use super::blocks::Blocks;
use crate::census::HeapWalk;
use crate::census::chunks::Block;
use crate::census::memory::Memory;
use crate::census::page_cache::PageCache;
use crate::heap::occupancy::Holder;
use crate::heap::residency::{PAGE_BYTES, page_down};

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
    for heap in heaps {
        for region in heap.chunks.regions().iter().filter(|region| region.end > region.start) {
            let first = page_down(region.start);
            let mut list = vec![Page::default(); usize::try_from((region.end - first).div_ceil(PAGE_BYTES)).unwrap_or(0)];
            for block in heap.chunks.blocks_of(region) {
                on_shared_pages(&block, |page, bytes| {
                    let Some(page) = usize::try_from((page - first) / PAGE_BYTES).ok().and_then(|place| list.get_mut(place)) else {
                        return;
                    };
                    match block.chunk.state.holder() {
                        Holder::Live => page.live += bytes,
                        Holder::Other => {}
                        _ => page.free += bytes,
                    }
                });
            }
            for block in heap.chunks.blocks_of(region).filter(|block| block.chunk.state.holder() == Holder::Live) {
                let Some(hit) = blocks.index.find(block.addr).filter(|hit| hit.offset == 0) else { continue };
                let mut own = 0;
                on_shared_pages(&block, |addr, bytes| {
                    let page =
                        usize::try_from((addr - first) / PAGE_BYTES).ok().and_then(|place| list.get(place)).copied().unwrap_or_default();
                    if page.live > 0 && page.free > 0 && pages.runs_for(addr..addr + PAGE_BYTES).state_at(addr).is_resident() {
                        own += page.free * bytes / page.live;
                    }
                });
                if let Some(sum) = found.get_mut(hit.block as usize) {
                    *sum = u32::try_from(own).unwrap_or(u32::MAX);
                }
            }
        }
    }
    found
}

/// Visits the pages that a chunk may share with its neighbours: its first and its last.
fn on_shared_pages(block: &Block, mut visit: impl FnMut(u64, u64)) {
    let (start, end) = (block.chunk.start, block.chunk.end());
    let (first, last) = (page_down(start), page_down(end.saturating_sub(1)));
    visit(first, end.min(first + PAGE_BYTES) - start);
    if last > first {
        visit(last, end - last);
    }
}
