//! The blocks of a census as the nodes of a graph. Free chunks are included: they may have been allocated since, and are followed if
//! something points to them, but never counted.

use std::ops::Range;

use super::areas::{Area, Areas, Class};
use super::index::{BlockIndex, IndexBuilder, IndexError};
use super::reader::Reader;
use crate::census::HeapWalk;
use crate::census::chunks::{ARENA_NONE, Block, ChunkState, Region};
use crate::census::glibc::tcache;
use crate::census::jemalloc::cache_bins;
use crate::census::memory::Memory;
use crate::census::pace::Pace;

/// Bytes of an arena's structure up to the last word that may point to a free chunk (malloc/malloc.c, `struct malloc_state`, `binmap`).
const ARENA_LISTS_BYTES: u64 = 2160;

/// Largest root area searched for thread caches: stacks have 8 MiB.
const CACHE_AREA_BYTES_MAX: u64 = 16 << 20;

/// A bit per block.
#[derive(Debug, Clone, Default)]
pub struct Bits(Vec<u64>);

impl Bits {
    /// Bits of `blocks` blocks, all 0.
    #[must_use]
    pub fn of(blocks: usize) -> Self {
        Self(vec![0; blocks.div_ceil(64)])
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len() * 8
    }

    /// Whether a block's bit is set.
    #[inline]
    #[must_use]
    pub fn get(&self, block: u32) -> bool {
        self.0.get(block as usize / 64).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// The blocks whose bits are set.
    pub fn ones(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        (0..self.0.len() as u32 * 64).filter(|&block| self.get(block))
    }

    /// Sets a block's bit; whether it was 0.
    #[inline]
    pub fn set(&mut self, block: u32) -> bool {
        let Some(word) = self.0.get_mut(block as usize / 64) else { return false };
        let was = *word;
        *word |= 1 << (block % 64);
        was != *word
    }
}

/// The blocks of all heaps.
#[derive(Debug, Clone)]
pub struct Blocks {
    /// By address.
    pub index: BlockIndex,
    /// Those in use.
    pub live: Bits,
    /// Number of blocks in use.
    pub live_blocks: u64,
    /// Usable bytes of these blocks.
    pub live_bytes: u64,
}

/// The parts of the allocators' memory that hold no pointers of the program, and the parts that are not understood.
#[derive(Debug, Clone, Default)]
pub struct Own {
    /// Lists of free chunks: threads' caches and arenas' bins. Sorted and disjoint.
    pub lists: Vec<Range<u64>>,
    /// Chunks that the census could not read.
    pub unknown: Vec<Range<u64>>,
    /// Stale words in thread caches, left from blocks that were allocated again, as of the last scan. Sorted and disjoint.
    pub old: Vec<Range<u64>>,
    /// Whether there may be such caches.
    has_caches: bool,
    /// Regions in which a chunk's header is the last word of the block before it. Sorted and disjoint.
    pub borrowing: Vec<Range<u64>>,
}

impl Own {
    /// Of a census of level full.
    #[must_use]
    pub fn of(memory: &dyn Memory, heaps: &[HeapWalk]) -> Self {
        let mut own = Self::default();
        for heap in heaps {
            let table = &heap.chunks;
            let unknown = table.iter().filter(|(_, chunk)| chunk.state == ChunkState::Unknown);
            own.unknown.extend(unknown.map(|(_, chunk)| chunk.start..chunk.end()));
            own.has_caches |= table.is_plain();
            if table.borrows() {
                own.lists.extend(tcache::find(memory, table).iter().map(|cache| cache.addr..cache.chunk.end()));
                own.lists.extend(heap.account.arenas.iter().map(|arena| arena.address..arena.address.saturating_add(ARENA_LISTS_BYTES)));
                let regions = table.regions().iter().filter(|region| region.arena != ARENA_NONE);
                own.borrowing.extend(regions.map(|region| region.start..region.end));
            }
        }
        own.lists.sort_by_key(|range| range.start);
        own.borrowing.sort_by_key(|range| range.start);
        own
    }
}

impl Own {
    /// Reads the thread caches again: their stale words change all the time.
    pub fn read_caches(&mut self, memory: &dyn Memory, areas: &Areas, pace: Pace) {
        self.old.clear();
        if !self.has_caches {
            return;
        }
        let mut reader = Reader::new(memory, pace);
        // They are in thread-local storage: next to stacks, in small mappings, or behind the data of a library mapped next to it.
        let may_hold = |area: &&Area| area.class != Class::Shared && area.range.end - area.range.start <= CACHE_AREA_BYTES_MAX;
        for area in areas.roots.iter().filter(may_hold) {
            reader.read(area.range.clone(), |addr, bytes| self.old.extend(cache_bins::stale(addr, bytes)));
        }
        self.old.sort_by_key(|range| range.start);
    }
}

/// Whether a chunk can hold data of the program.
fn is_node(block: &Block) -> bool {
    !matches!(block.chunk.state, ChunkState::Overhead | ChunkState::Unknown)
}

/// Whether a block is in use.
fn is_live(block: &Block) -> bool {
    matches!(block.chunk.state, ChunkState::Live | ChunkState::Mmapped)
}

impl Blocks {
    /// Indexes the chunks of a census of level full.
    ///
    /// # Errors
    /// If they span more address space than an index can hold.
    pub fn of(heaps: &[HeapWalk]) -> Result<Self, IndexError> {
        let mut regions: Vec<(&HeapWalk, &Region)> =
            heaps.iter().flat_map(|heap| heap.chunks.regions().iter().map(move |region| (heap, region))).collect();
        regions.sort_by_key(|(_, region)| region.start);
        let end = regions.iter().map(|(_, region)| region.end).max().unwrap_or(0);
        let span = regions.first().map_or(end, |(_, region)| region.start)..end.saturating_add(8);
        let chunks = heaps.iter().map(|heap| heap.chunks.len()).sum();
        let blocks = || regions.iter().flat_map(|(heap, region)| heap.chunks.blocks_of(region)).filter(is_node);
        let is_dense = blocks().any(|block| block.addr % 16 != 0);
        let mut builder = IndexBuilder::new(span, chunks, is_dense)?;
        let mut found = Self { index: BlockIndex::default(), live: Bits::of(chunks), live_blocks: 0, live_bytes: 0 };
        for block in blocks() {
            let number = builder.len();
            builder.push(block.addr, block.usable_bytes)?;
            if is_live(&block) && builder.len() > number {
                found.live.set(number as u32);
                found.live_blocks += 1;
                found.live_bytes = found.live_bytes.saturating_add(block.usable_bytes);
            }
        }
        found.index = builder.finish();
        Ok(found)
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.index.bytes() + self.live.bytes()
    }
}

/// Whether a census has a block in use exactly here.
#[must_use]
pub fn is_in_use(heaps: &[HeapWalk], addr: u64, bytes: u64) -> bool {
    let found = block_at(heaps, addr);
    found.is_some_and(|block| is_live(&block) && block.addr == addr && block.usable_bytes == bytes)
}

/// The chunk of a census that contains an address, as a block.
#[must_use]
pub fn block_at(heaps: &[HeapWalk], addr: u64) -> Option<Block> {
    // In glibc a block begins after its header, and its last word is in the next chunk.
    let of = |heap: &HeapWalk| {
        let own = heap.chunks.block_at(addr)?;
        let before = || heap.chunks.block_at(own.chunk.start.checked_sub(1)?);
        if addr < own.addr {
            before().filter(|block| block.addr.saturating_add(block.usable_bytes) > addr).or(Some(own))
        } else {
            Some(own)
        }
    };
    heaps.iter().find_map(of)
}

/// Whether `addr` is in a block that is in use in a census; `None` if it is in no chunk.
#[must_use]
pub fn is_in_block_in_use(heaps: &[HeapWalk], addr: u64) -> Option<bool> {
    block_at(heaps, addr).filter(is_node).map(|block| is_live(&block))
}
