//! Every chunk of a heap in a table of about four bytes per chunk: state, address and size, in walking order within each region.
//!
//! Chunks of a region are contiguous, so only sizes are kept; every 64th address is kept too, so that an address is found in at most 64
//! steps. A 10 GiB heap of 64-byte chunks (168 million) takes 0.7 GiB, one of 256-byte chunks 180 MiB.

mod fill;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::heap::occupancy::Holder;

/// The state of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ChunkState {
    /// In use by the program.
    Live = 0,
    /// Freed, kept by a thread's cache.
    Tcache = 1,
    /// Freed, kept in a fastbin.
    Fastbin = 2,
    /// Freed, in a bin.
    Free = 3,
    /// The free end of a heap.
    Top = 4,
    /// The allocator's own: fenceposts.
    Overhead = 5,
    /// Could not be understood or read.
    Unknown = 6,
    /// In use by the program, with a mapping of its own.
    Mmapped = 7,
}

impl ChunkState {
    #[inline]
    fn from_bits(bits: u32) -> Self {
        match bits & 7 {
            0 => Self::Live,
            1 => Self::Tcache,
            2 => Self::Fastbin,
            3 => Self::Free,
            4 => Self::Top,
            5 => Self::Overhead,
            6 => Self::Unknown,
            _ => Self::Mmapped,
        }
    }

    /// The holder of its bytes.
    #[must_use]
    pub fn holder(self) -> Holder {
        match self {
            Self::Live | Self::Mmapped => Holder::Live,
            Self::Tcache | Self::Fastbin => Holder::Cached,
            Self::Free => Holder::Free,
            Self::Top => Holder::Top,
            Self::Overhead | Self::Unknown => Holder::Other,
        }
    }

    /// Whether its bytes are free.
    #[must_use]
    pub fn is_free(self) -> bool {
        matches!(self, Self::Tcache | Self::Fastbin | Self::Free | Self::Top)
    }
}

/// One chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Start of the chunk.
    pub start: u64,
    /// Bytes of the chunk with its header.
    pub bytes: u64,
    /// Its state.
    pub state: ChunkState,
}

impl Chunk {
    /// First address after it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }
}

/// A chunk as the program sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// The address that the allocator returned.
    pub addr: u64,
    /// Bytes that the program may use there.
    pub usable_bytes: u64,
    /// Address and size with header.
    pub chunk: Chunk,
    /// Index of the arena; [`ARENA_NONE`] for a chunk with a mapping of its own.
    pub arena: u32,
}

/// The arena of chunks that belong to none.
pub const ARENA_NONE: u32 = u32::MAX;

/// A gapless sequence of chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// First address after its last chunk.
    pub end: u64,
    /// Index of the arena it belongs to, in the census's list.
    pub arena: u32,
    entries: Range<usize>,
}

/// Sizes are multiples of 8, so 29 bits hold up to 4 GiB; the largest value means "in the side table".
const SIZE_BITS_ESCAPE: u32 = (1 << 29) - 1;
/// Smallest difference of two chunks' sizes.
const SIZE_UNIT: u64 = 8;
/// Entries between two kept addresses.
const ANCHOR_EVERY: usize = 64;
/// Entries of one block of the table: 256 KiB, so that growing never copies the whole table.
const BLOCK_ENTRIES: usize = 1 << 16;
/// Most chunks kept: 1 GiB of table, a 16 GiB heap of 64-byte chunks. Chunks beyond count as unread.
pub const CHUNKS_MAX: usize = 1 << 28;

/// The chunks of a heap.
#[derive(Debug, Clone, Default)]
pub struct ChunkTable {
    blocks: Vec<Vec<u32>>,
    len: usize,
    anchors: Vec<u64>,
    huge: BTreeMap<usize, u64>,
    regions: Vec<Region>,
    header_bytes: u64,
    borrowed_bytes: u64,
    /// Whether blocks may begin anywhere in their chunk.
    has_loose_starts: bool,
}

impl ChunkTable {
    /// A table for glibc: the program's block begins 16 bytes into its chunk and borrows the first word of the next one.
    #[must_use]
    pub fn for_glibc() -> Self {
        Self { header_bytes: 16, borrowed_bytes: 8, ..Self::default() }
    }

    /// A table for musl, which places blocks at varying offsets within their slots.
    #[must_use]
    pub fn for_musl() -> Self {
        Self { has_loose_starts: true, ..Self::default() }
    }

    /// A table for mimalloc, which aligns a block within a larger one.
    #[must_use]
    pub fn for_mimalloc() -> Self {
        Self::for_musl()
    }

    /// A block of `usable_bytes` as the program sees it.
    fn block_of(&self, chunk: Chunk, arena: u32) -> Block {
        let borrowed = if chunk.state == ChunkState::Mmapped { 0 } else { self.borrowed_bytes };
        Block {
            addr: chunk.start.saturating_add(self.header_bytes),
            usable_bytes: chunk.bytes.saturating_sub(self.header_bytes).saturating_add(borrowed),
            chunk,
            arena,
        }
    }

    /// All blocks by ascending address, whatever their state. Needs sorted regions.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.iter().map(|(arena, chunk)| self.block_of(chunk, arena))
    }

    /// The blocks in use by ascending address, for the join with the ledger. Needs sorted regions.
    pub fn live_blocks(&self) -> impl Iterator<Item = Block> + '_ {
        self.blocks().filter(|block| matches!(block.chunk.state, ChunkState::Live | ChunkState::Mmapped))
    }

    /// The blocks of a region by ascending address, whatever their state.
    pub fn blocks_of<'a>(&'a self, region: &Region) -> impl Iterator<Item = Block> + use<'a> {
        let arena = region.arena;
        self.chunks_of(region).map(move |chunk| self.block_of(chunk, arena))
    }

    /// The block whose chunk contains `addr`, whatever its state. Needs sorted regions.
    #[must_use]
    pub fn block_at(&self, addr: u64) -> Option<Block> {
        self.find(addr).map(|chunk| self.block_of(chunk, ARENA_NONE))
    }

    /// Whether blocks have no headers, only size classes, and begin at the start of their slots.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.header_bytes == 0 && !self.has_loose_starts && !self.is_empty()
    }

    /// Whether a block's last word belongs to the next chunk's header while that is free.
    #[must_use]
    pub fn borrows(&self) -> bool {
        self.borrowed_bytes > 0
    }

    /// Number of chunks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The regions; by address once [`ChunkTable::sort_regions`] was called.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Puts the regions in the order of their addresses, as [`ChunkTable::find`] needs it.
    pub fn sort_regions(&mut self) {
        self.regions.sort_by_key(|region| region.start);
    }

    fn entry(&self, index: usize) -> u32 {
        self.blocks.get(index / BLOCK_ENTRIES).and_then(|block| block.get(index % BLOCK_ENTRIES)).copied().unwrap_or(0)
    }

    #[inline]
    fn bytes_of(&self, index: usize, entry: u32) -> u64 {
        match entry >> 3 {
            SIZE_BITS_ESCAPE => self.huge.get(&index).copied().unwrap_or(0),
            units => u64::from(units) * SIZE_UNIT,
        }
    }

    /// The chunks of a region by ascending address. Where all are visited, `for_each` is faster than a loop.
    pub fn chunks_of<'a>(&'a self, region: &Region) -> impl Iterator<Item = Chunk> + use<'a> {
        let (mut start, mut index) = (region.start, region.entries.start);
        self.entries(region.entries.clone()).map(move |entry| {
            let chunk = Chunk { start, bytes: self.bytes_of(index, entry), state: ChunkState::from_bits(entry) };
            index += 1;
            start = chunk.end();
            chunk
        })
    }

    /// The entries of some indices, block by block.
    fn entries(&self, range: Range<usize>) -> impl Iterator<Item = u32> + use<'_> {
        let (first, last) = (range.start / BLOCK_ENTRIES, range.end.div_ceil(BLOCK_ENTRIES));
        let blocks = self.blocks.get(first..last).unwrap_or_default().iter().enumerate();
        blocks.flat_map(move |(number, block)| {
            let base = (first + number) * BLOCK_ENTRIES;
            let part = range.start.saturating_sub(base)..range.end.saturating_sub(base).min(block.len());
            block.get(part).unwrap_or_default().iter().copied()
        })
    }

    /// All chunks, region by region, with their arena's index. By ascending address once the regions are sorted.
    pub fn iter(&self) -> impl Iterator<Item = (u32, Chunk)> + '_ {
        self.regions.iter().flat_map(|region| self.chunks_of(region).map(move |chunk| (region.arena, chunk)))
    }

    fn locate(&self, addr: u64) -> Option<(usize, Chunk)> {
        let after = self.regions.partition_point(|region| region.start <= addr);
        let region = self.regions.get(after.checked_sub(1)?).filter(|region| addr < region.end)?;
        let (mut index, mut start) = (region.entries.start, region.start);
        // Kept addresses of this region: those of the entries that are multiples of ANCHOR_EVERY.
        let first_anchor = region.entries.start.div_ceil(ANCHOR_EVERY);
        let anchors = self.anchors.get(first_anchor..region.entries.end.div_ceil(ANCHOR_EVERY)).unwrap_or_default();
        if let Some(last) = anchors.partition_point(|&anchor| anchor <= addr).checked_sub(1) {
            index = (first_anchor + last) * ANCHOR_EVERY;
            start = anchors.get(last).copied().unwrap_or(start);
        }
        while index < region.entries.end {
            let entry = self.entry(index);
            let bytes = self.bytes_of(index, entry);
            if addr < start.saturating_add(bytes) {
                return Some((index, Chunk { start, bytes, state: ChunkState::from_bits(entry) }));
            }
            start = start.saturating_add(bytes);
            index += 1;
        }
        None
    }

    /// The chunk that contains `addr`. Needs sorted regions.
    #[must_use]
    pub fn find(&self, addr: u64) -> Option<Chunk> {
        self.locate(addr).map(|(_, chunk)| chunk)
    }

    /// Changes the state of the chunk that begins at `start` if `accept` agrees; returns the old chunk if it was changed.
    pub fn restate(&mut self, start: u64, state: ChunkState, accept: impl Fn(&Chunk) -> bool) -> Option<Chunk> {
        let (index, chunk) = self.locate(start).filter(|(_, chunk)| chunk.start == start && accept(chunk))?;
        let entry = self.blocks.get_mut(index / BLOCK_ENTRIES)?.get_mut(index % BLOCK_ENTRIES)?;
        *entry = *entry & !7 | state as u32;
        Some(chunk)
    }

    /// Whether a block at this address (as malloc returned it) is in use. `Some(false)` proves that it was freed; `Some(true)` only says
    /// that some allocation is there now; `None` if the walk did not cover it.
    #[must_use]
    pub fn is_live(&self, block: u64) -> Option<bool> {
        let start = block.checked_sub(self.header_bytes)?;
        let chunk = self.find(start)?;
        match chunk.state {
            ChunkState::Unknown => None,
            ChunkState::Live | ChunkState::Mmapped => Some(chunk.start == start || self.has_loose_starts),
            _ => Some(false),
        }
    }

    /// Bytes that the table takes.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        self.blocks.iter().map(|block| block.capacity() * 4).sum::<usize>() + self.anchors.capacity() * 8 + self.huge.len() * 32
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_chunk_larger_than_four_gib_keeps_its_size() {
        let mut table = ChunkTable::default();
        table.begin_region(0x1000, 0);
        assert!(table.push(20 << 30, ChunkState::Free));
        assert!(table.push(48, ChunkState::Live));
        assert_eq!(table.find(0x1000).unwrap().bytes, 20 << 30);
        assert_eq!(table.find(0x1000 + (20 << 30)).unwrap().bytes, 48);
    }

    proptest! {
        #[test]
        fn every_address_is_found_as_a_plain_list_finds_it(
            regions in proptest::collection::vec(proptest::collection::vec((1u64..40, 0u32..8), 0..200), 1..5)
        ) {
            let mut table = ChunkTable::default();
            let mut naive = Vec::new();
            // Regions are pushed from the highest to the lowest address, as old heaps of an arena may lie anywhere.
            for (number, sizes) in regions.iter().enumerate() {
                let mut at = 0x10_0000 * (10 - number as u64);
                table.begin_region(at, number as u32);
                for &(units, state) in sizes {
                    let state = ChunkState::from_bits(state);
                    table.push(units * 16, state);
                    naive.push(Chunk { start: at, bytes: units * 16, state });
                    at += units * 16;
                }
            }
            table.sort_regions();
            naive.sort_by_key(|chunk| chunk.start);
            prop_assert_eq!(table.iter().map(|(_, chunk)| chunk).collect::<Vec<_>>(), naive.clone());
            for chunk in &naive {
                prop_assert_eq!(table.find(chunk.start), Some(*chunk));
                prop_assert_eq!(table.find(chunk.end() - 1), Some(*chunk));
            }
            prop_assert_eq!(table.find(0), None);
        }
    }
}
