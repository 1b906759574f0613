//! Blocked bytes by block: the whole free pages below the highest block of each heap that shrinks only at its top, as defined in
//! [`crate::fragmentation::blocked`].

use std::collections::HashMap;
use std::ops::Range;

use super::blocks::Blocks;
use crate::census::HeapWalk;
use crate::census::memory::Memory;
use crate::census::resident::{heap_ranges, pages_of};
use crate::fragmentation::blocked::blocked_space;
use crate::heap::occupancy::Holder;
use crate::heap::pages::{Owner, Span};
use crate::units::StackId;

/// Blocked bytes by a block's number; most blocks have none.
#[must_use]
pub fn blocked(memory: &dyn Memory, heaps: &[HeapWalk], blocks: &Blocks) -> HashMap<u32, u64> {
    let mut found = HashMap::new();
    for heap in heaps.iter().filter(|heap| !heap.chunks.is_empty() && !heap.extents.is_empty()) {
        let ranges = heap_ranges(&heap.chunks);
        let Some(states) = pages_of(memory, ranges.iter().map(|range| range.range.clone())) else { continue };
        let pieces: Vec<Range<u64>> = heap.extents.iter().map(|(_, range)| range.clone()).collect();
        let highest = highest(heap, &pieces);
        let spans = heap.chunks.blocks().filter_map(|block| {
            let owner = match block.chunk.state.holder() {
                // Only the highest block of each piece can be charged: it is identified by the piece's number.
                Holder::Live => highest.get(&block.addr).map_or(Owner::Unattributed, |&piece| Owner::Stack(StackId(piece))),
                Holder::Other => Owner::Held,
                _ => return None,
            };
            Some(Span { start: block.chunk.start, bytes: block.chunk.bytes, owner })
        });
        let (charged, _) = blocked_space(&pieces, &ranges, spans, &states);
        for (&addr, &piece) in &highest {
            let bytes = charged.bytes.of(StackId(piece));
            if let Some(hit) = blocks.index.find(addr).filter(|hit| hit.offset == 0 && bytes > 0) {
                *found.entry(hit.block).or_default() += bytes;
            }
        }
    }
    found
}

/// The highest block in use of each piece, by address, with the piece's number. Pieces are sorted and disjoint.
fn highest(heap: &HeapWalk, pieces: &[Range<u64>]) -> HashMap<u64, u32> {
    let mut highest = vec![0u64; pieces.len()];
    for block in heap.chunks.live_blocks() {
        let after = pieces.partition_point(|piece| piece.start <= block.chunk.start);
        let piece = after.checked_sub(1).filter(|&piece| pieces.get(piece).is_some_and(|piece| block.chunk.start < piece.end));
        if let Some(own) = piece.and_then(|piece| highest.get_mut(piece)) {
            *own = (*own).max(block.addr);
        }
    }
    highest.into_iter().zip(0u32..).filter(|&(addr, _)| addr > 0).collect()
}
