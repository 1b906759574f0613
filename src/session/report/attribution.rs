//! Attributes each live chunk of a census to a stack: joins the census with the ledger by address. Pure.
//!
//! The census decides what is live, including memory that no probe saw. The ledger says which stack allocated it. A chunk that neither a
//! recorded block nor the census at the start explains is unattributed; it is never distributed over the known stacks. So the sums over the
//! stacks, `[before attach]` and `[unattributed]` equal the census's figures to the byte.

use std::ops::Range;

use crate::census::ChunkState;
use crate::census::HeapWalk;
use crate::census::chunks::{Block as ChunkBlock, ChunkTable};
use crate::census::resident::heap_ranges;
use crate::fragmentation::blocked::blocked_space;
use crate::fragmentation::by_stack::{BEFORE_ATTACH, BytesByStack};
use crate::fragmentation::survey::Survey;
use crate::heap::pages::{Owner, PageStates, Span};
use crate::ledger::{Block, Ledger};
use crate::profile::Attribution;
use crate::units::{Addr, StackId};

/// The heap in the census at the start of the recording.
#[derive(Debug)]
pub struct StartHeap {
    /// Every chunk, one table per allocator.
    pub tables: Vec<ChunkTable>,
}

impl StartHeap {
    /// Whether a chunk of this start and length was live then.
    pub fn had(&self, start: u64, bytes: u64) -> bool {
        let live = |state| matches!(state, ChunkState::Live | ChunkState::Mmapped);
        let same = |chunk: crate::census::chunks::Chunk| chunk.start == start && chunk.bytes == bytes && live(chunk.state);
        self.tables.iter().any(|table| table.find(start).is_some_and(same))
    }

    /// Whether a chunk that begins here was live then. If no recorded block is at this address now, it is the same chunk: the recording
    /// would have seen it freed and allocated again.
    fn was_live(&self, start: u64) -> bool {
        let live = |state| matches!(state, ChunkState::Live | ChunkState::Mmapped);
        self.tables.iter().any(|table| table.find(start).is_some_and(|chunk| chunk.start == start && live(chunk.state)))
    }
}

/// Live chunks, and the bytes that they pin and block, by stack.
#[derive(Debug, Default)]
pub struct Owned {
    /// Bytes of live chunks.
    pub live: BytesByStack,
    /// Number of live chunks, counted like the bytes.
    pub live_chunks: BytesByStack,
    /// Free bytes on pages that also hold live chunks.
    pub pinned: BytesByStack,
    /// The part of the pinned bytes that is on huge pages. A huge page counts as one page of 2 MiB.
    pub pinned_on_huge_pages_bytes: u64,
    /// Free pages below the highest live chunk of each heap that shrinks only at its top.
    pub blocked: BytesByStack,
}

impl Owned {
    /// The three parts of the live bytes.
    pub fn attribution(&self) -> Attribution {
        let known = |of: &BytesByStack| of.iter().fold(0, |sum: u64, (_, value)| sum.saturating_add(value));
        Attribution {
            attributed_bytes: known(&self.live),
            attributed_allocations: known(&self.live_chunks),
            before_attach_bytes: self.live.before_attach_bytes(),
            before_attach_allocations: self.live_chunks.before_attach_bytes(),
            unattributed_bytes: self.live.unattributed_bytes(),
            unattributed_allocations: self.live_chunks.unattributed_bytes(),
        }
    }

    /// Adds the chunks of one heap. `before`: the heap at the start, if it could be read; `states`: which pages of the chunks' regions are
    /// resident.
    pub fn add(&mut self, ledger: &Ledger, walk: &HeapWalk, before: Option<&StartHeap>, states: &impl PageStates) {
        self.add_by(walk, states, |block| owner(ledger, before, block));
    }

    /// Adds the chunks of one heap, each attributed to the stack that `owner` returns.
    pub fn add_by(&mut self, walk: &HeapWalk, states: &impl PageStates, owner: impl Fn(&ChunkBlock) -> Option<StackId>) {
        let chunks = &walk.chunks;
        let ranges = heap_ranges(chunks);
        let spans = || chunks.blocks().filter_map(|block| span(&block, owner(&block)));
        let survey = Survey::new(&ranges, spans(), states);
        self.pinned.add(&survey.pinned.bytes);
        self.pinned_on_huge_pages_bytes = self.pinned_on_huge_pages_bytes.saturating_add(survey.pinned.on_huge_pages.total_bytes());
        // Blocked bytes exist only in heaps that shrink at their top: extents of an arena, not single mapped chunks.
        let heaps: Vec<Range<u64>> = walk.extents.iter().map(|(_, range)| range.clone()).collect();
        let (blocked, _) = blocked_space(&heaps, &ranges, spans(), states);
        self.blocked.add(&blocked.bytes);
        for block in chunks.live_blocks() {
            let owner = owner(&block);
            self.live.charge(owner, block.chunk.bytes);
            self.live_chunks.charge(owner, 1);
        }
    }

    /// Adds a heap whose live bytes the census knows, but not its chunks: recorded blocks count with the bytes requested, the rest is
    /// unattributed.
    pub fn add_sums(&mut self, ledger: &Ledger, live_bytes: u64, live_allocations: u64) {
        let (mut bytes_left, mut chunks_left) = (live_bytes, live_allocations);
        for view in ledger.stacks() {
            let (bytes, chunks) = (view.totals.live_bytes.min(bytes_left), view.totals.live.min(chunks_left));
            self.live.charge(Some(view.id), bytes);
            self.live_chunks.charge(Some(view.id), chunks);
            bytes_left -= bytes;
            chunks_left -= chunks;
        }
        self.live.charge(None, bytes_left);
        self.live_chunks.charge(None, chunks_left);
    }
}

/// The stack that a live chunk is attributed to.
pub fn owner(ledger: &Ledger, before: Option<&StartHeap>, block: &ChunkBlock) -> Option<StackId> {
    match ledger.outstanding().get(Addr(block.addr)) {
        Some(recorded) => Some(recorded.stack),
        None => before.filter(|before| before.was_live(block.chunk.start)).map(|_| BEFORE_ATTACH),
    }
}

fn span(block: &ChunkBlock, owner: Option<StackId>) -> Option<Span> {
    let owner = match block.chunk.state {
        ChunkState::Live | ChunkState::Mmapped => owner.map_or(Owner::Unattributed, Owner::Stack),
        ChunkState::Unknown => Owner::Held,
        state if state.is_free() => return None,
        _ => Owner::Held,
    };
    Some(Span { start: block.chunk.start, bytes: block.chunk.bytes, owner })
}

/// Whether a walk proves that a recorded block is no longer there: its address is not in use, or the chunk there is too small for it.
/// Blocks outside every walked region were not checked, so nothing is disproved.
pub fn is_disproved(heaps: &[HeapWalk], block: &Block) -> bool {
    let looks = heaps.iter().filter_map(|heap| {
        let live = heap.chunks.is_live(block.addr.0)?;
        let room = heap.chunks.find(block.addr.0).map_or(0, |chunk| chunk.end().saturating_sub(block.addr.0).saturating_add(8));
        Some(live && room >= block.size_bytes)
    });
    let mut looks = looks.peekable();
    looks.peek().is_some() && !looks.any(|live| live)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::{HeapAccount, WalkQuality};
    use crate::heap::pages::AllResident;
    use crate::ledger::{Event, StackLimits};
    use crate::units::StackHash;

    fn walk(chunks: &[(u64, ChunkState)]) -> HeapWalk {
        let mut table = ChunkTable::for_glibc();
        table.begin_region(0x10000, 0);
        for &(bytes, state) in chunks {
            assert!(table.push(bytes, state));
        }
        let end = table.end_of_current();
        let extents = vec![(0, 0x10000..end)];
        HeapWalk { account: HeapAccount::default(), quality: WalkQuality::default(), chunks: table, extents }
    }

    fn recorded(blocks: &[(u64, u64)]) -> Ledger {
        let mut ledger = Ledger::new(0, StackLimits::default());
        for &(addr, size_bytes) in blocks {
            ledger.apply(&Event::Alloc { addr: Addr(addr), size_bytes, stack: StackHash(7), tid: 1, how: Default::default(), time_ns: 5 });
        }
        ledger
    }

    #[test]
    fn every_live_chunk_has_one_owner_and_the_parts_add_up_to_the_whole() {
        use ChunkState::{Free, Live, Top};
        let start = walk(&[(0x100, Live), (0x100, Live), (0x200, Free), (0x1000, Top)]);
        let now = walk(&[(0x100, Live), (0x100, Free), (0x100, Live), (0x100, Live), (0x1000, Top)]);
        // The third chunk is recorded, the fourth is new and was not seen, and the first existed before.
        let ledger = recorded(&[(0x10210, 200)]);
        let mut owned = Owned::default();
        owned.add(&ledger, &now, Some(&StartHeap { tables: vec![start.chunks] }), &AllResident);
        let expected = Attribution {
            attributed_bytes: 0x100,
            attributed_allocations: 1,
            before_attach_bytes: 0x100,
            before_attach_allocations: 1,
            unattributed_bytes: 0x100,
            unattributed_allocations: 1,
        };
        assert_eq!(owned.attribution(), expected);
        // One page: 0x300 live bytes pin 0xd00 free bytes, a third each. No page is entirely free.
        assert_eq!(owned.pinned.total_bytes(), 0x1000 - 0x300);
        assert_eq!(owned.pinned.before_attach_bytes(), 0xd00 / 3);
    }

    #[test]
    fn a_block_is_disproved_by_a_free_chunk_or_by_one_that_is_too_small_for_it() {
        let heaps = [walk(&[(0x100, ChunkState::Live), (0x100, ChunkState::Tcache), (0x20, ChunkState::Live)])];
        let ledger = recorded(&[(0x10010, 0xf8), (0x10110, 8), (0x10210, 0x40), (0x90000, 8)]);
        let gone: Vec<u64> = ledger.outstanding().iter().filter(|block| is_disproved(&heaps, block)).map(|block| block.addr.0).collect();
        let mut gone = gone;
        gone.sort_unstable();
        assert_eq!(gone, [0x10110, 0x10210]);
    }

    #[test]
    fn without_chunks_the_recorded_bytes_are_the_stacks_and_the_rest_is_unattributed() {
        let mut owned = Owned::default();
        owned.add_sums(&recorded(&[(0x10010, 100)]), 1000, 9);
        let attribution = owned.attribution();
        assert_eq!((attribution.attributed_bytes, attribution.unattributed_bytes), (100, 900));
        assert_eq!((attribution.attributed_allocations, attribution.unattributed_allocations), (1, 8));
    }
}
