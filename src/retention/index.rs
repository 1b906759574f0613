//! Index from an address to the block that contains it: start bits with ranks, in cells over segments of 1 MiB. Pure.
//!
//! ```text
//! address ─ segment table ─→ cell { 64 start bits, blocks before, last start before } ─→ number of the block ─→ its size
//! ```
//!
//! A look-up reads one cell and one size, two cache misses at most; [`BlockIndex::find_all`] overlaps those of many addresses. A block costs
//! 2 bytes (24 more from 64 KiB on), and the cells cost 1.6 % of the address space that contains blocks (3.2 % if blocks begin at odd multiples of 8). Segments
//! entirely inside one block have no cells.

use std::ops::Range;

use thiserror::Error;

use super::prefetch::prefetch;

/// log2 of a segment's bytes.
const SEGMENT_BITS: u32 = 20;
const SEGMENT_BYTES: u64 = 1 << SEGMENT_BITS;
/// Starts in one cell.
const CELL_BITS: u64 = 64;
/// Blocks of this size or more may cover whole segments.
const COVERING_BYTES: u64 = 2 * SEGMENT_BYTES;
/// Marks a size that is in the list of large blocks: this one, and larger ones.
const LARGE: u16 = u16::MAX;
/// Marks entries of the segment table that refer to a large block.
const COVERED: u32 = 1 << 31;
/// No segment.
const EMPTY: u32 = 0;
/// Segments between the lowest and the highest block at most: the lower half of the address space.
const TABLE_MAX: u64 = 1 << (47 - SEGMENT_BITS);

/// Why blocks cannot be indexed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexError {
    /// Starts are kept in 32 bits.
    #[error("the heap's blocks span more than {} GiB of address space, which is more than the index can hold", limit_bytes >> 30)]
    TooLarge {
        /// Address space that fits.
        limit_bytes: u64,
    },
    /// No user address.
    #[error("some blocks are outside the user address space")]
    Address,
}

/// A block's number, by ascending address from 0, and a distance from its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hit {
    /// Number of the block.
    pub block: u32,
    /// Distance of the address from the block's start, in bytes.
    pub offset: u64,
}

/// Start bits of 64 granules.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    starts: u64,
    /// Blocks that start before the cell.
    before: u32,
    /// Where the last of them starts, in granules of all segments.
    last: u32,
}

/// A block whose size does not fit the table of sizes.
#[derive(Debug, Clone, Copy)]
struct LargeBlock {
    number: u32,
    addr: u64,
    bytes: u64,
}

/// Blocks by address.
#[derive(Debug, Clone, Default)]
pub struct BlockIndex {
    /// First segment of the table.
    base: u64,
    table: Vec<u32>,
    cells: Vec<Cell>,
    /// Address of each numbered segment.
    segments: Vec<u64>,
    sizes: Vec<u16>,
    large: Vec<LargeBlock>,
    granule_bits: u32,
    span: Range<u64>,
    /// Blocks left out because they overlap the one before, or begin in the same granule.
    overlapping: u64,
}

/// Builds an index from blocks in the order of their addresses.
#[derive(Debug)]
pub struct IndexBuilder {
    index: BlockIndex,
    last_start: u32,
}

impl IndexBuilder {
    /// For about `blocks` blocks within `span` that begin at multiples of 16 (`is_dense`: of 8).
    ///
    /// # Errors
    /// If `span` is not within the user address space.
    pub fn new(span: Range<u64>, blocks: usize, is_dense: bool) -> Result<Self, IndexError> {
        let base = span.start >> SEGMENT_BITS;
        let segments = (span.end.saturating_sub(1) >> SEGMENT_BITS).checked_sub(base).map_or(0, |last| last + 1);
        if segments > TABLE_MAX {
            return Err(IndexError::Address);
        }
        let index = BlockIndex {
            base,
            // Zeroed by the kernel when touched: 4 KiB per GiB of heap.
            table: vec![EMPTY; usize::try_from(segments).unwrap_or(0)],
            cells: Vec::new(),
            segments: vec![0],
            sizes: Vec::with_capacity(blocks),
            large: Vec::new(),
            granule_bits: if is_dense { 3 } else { 4 },
            span: span.start..span.start,
            overlapping: 0,
        };
        let cells = index.cells_of_segment();
        Ok(Self { index: BlockIndex { cells: vec![Cell::default(); cells], ..index }, last_start: 0 })
    }

    /// Adds the next block. One that begins before the end of the last, or not at a multiple, is left out and counted, as are
    /// empty ones.
    ///
    /// # Errors
    /// If there are more than fit.
    pub fn push(&mut self, addr: u64, bytes: u64) -> Result<(), IndexError> {
        let index = &mut self.index;
        let Some(end) =
            addr.checked_add(bytes).filter(|_| bytes > 0 && addr >= index.span.end && addr & ((1 << index.granule_bits) - 1) == 0)
        else {
            index.overlapping += 1;
            return Ok(());
        };
        let too_large = IndexError::TooLarge { limit_bytes: u64::from(u32::MAX) << index.granule_bits };
        let number = u32::try_from(index.sizes.len()).map_err(|_| too_large.clone())?;
        let size = u16::try_from(bytes).unwrap_or(LARGE);
        let is_covering = bytes >= COVERING_BYTES;
        let (first, last) = (addr >> SEGMENT_BITS, (end - 1) >> SEGMENT_BITS);
        let segment = Self::segment(index, first, number, self.last_start).ok_or_else(|| too_large.clone())?;
        let granule = (addr & (SEGMENT_BYTES - 1)) >> index.granule_bits;
        let cell = segment as usize * index.cells_of_segment() + (granule / CELL_BITS) as usize;
        let bit = 1u64 << (granule % CELL_BITS);
        let Some(cell) = index.cells.get_mut(cell) else { return Err(IndexError::Address) };
        if cell.starts & bit != 0 {
            index.overlapping += 1;
            return Ok(());
        }
        cell.starts |= bit;
        self.last_start = (segment << (SEGMENT_BITS - index.granule_bits)) + granule as u32;
        index.sizes.push(size);
        let place = index.large.len() as u32;
        if size == LARGE {
            index.large.push(LargeBlock { number, addr, bytes });
        }
        if is_covering {
            for covered in first + 1..last {
                if let Some(entry) = index.table.get_mut((covered - index.base) as usize) {
                    *entry = COVERED | place;
                }
            }
        }
        // The segments between the first and the last of a large block have no cells.
        for segment in if is_covering { last.max(first + 1)..last + 1 } else { first + 1..last + 1 } {
            Self::segment(index, segment, number + 1, self.last_start).ok_or_else(|| too_large.clone())?;
        }
        index.span.end = end;
        Ok(())
    }

    /// Blocks added so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.index.sizes.len()
    }

    /// Whether there is none yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.index.sizes.is_empty()
    }

    /// The number of a segment, which is created if needed; `None` if there are too many.
    fn segment(index: &mut BlockIndex, segment: u64, before: u32, last: u32) -> Option<u32> {
        let cells = index.cells_of_segment();
        let entry = index.table.get_mut(usize::try_from(segment.checked_sub(index.base)?).ok()?)?;
        if *entry != EMPTY {
            return Some(*entry);
        }
        let number = u32::try_from(index.segments.len()).ok().filter(|&number| number < 1 << (32 - (SEGMENT_BITS - index.granule_bits)))?;
        *entry = number;
        index.segments.push(segment << SEGMENT_BITS);
        index.cells.resize(index.cells.len() + cells, Cell { starts: 0, before, last });
        Some(number)
    }

    /// The index.
    #[must_use]
    pub fn finish(self) -> BlockIndex {
        let mut index = self.index;
        let per_segment = index.cells_of_segment();
        let cell_bytes_bits = 6 + index.granule_bits;
        let (mut before, mut last) = (0u32, 0u32);
        for (place, cell) in index.cells.iter_mut().enumerate().skip(per_segment) {
            (cell.before, cell.last) = (before, last);
            if cell.starts != 0 {
                before += cell.starts.count_ones();
                last = (place as u32) * CELL_BITS as u32 + 63 - cell.starts.leading_zeros();
            }
        }
        debug_assert_eq!(before as usize, index.sizes.len());
        debug_assert_eq!(per_segment as u64, SEGMENT_BYTES >> cell_bytes_bits);
        index.sizes.shrink_to_fit();
        index.cells.shrink_to_fit();
        index
    }
}

impl BlockIndex {
    /// An index of blocks in a slice, for tests and small sets.
    ///
    /// # Errors
    /// As [`IndexBuilder::push`].
    pub fn of(blocks: &[(u64, u64)]) -> Result<Self, IndexError> {
        let span = blocks.first().map_or(0, |first| first.0)..blocks.last().map_or(0, |last| last.0.saturating_add(last.1));
        let mut builder = IndexBuilder::new(span, blocks.len(), blocks.iter().any(|block| block.0 % 16 != 0))?;
        for &(addr, bytes) in blocks {
            builder.push(addr, bytes)?;
        }
        Ok(builder.finish())
    }

    fn cells_of_segment(&self) -> usize {
        (SEGMENT_BYTES >> (6 + self.granule_bits)) as usize
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }

    /// From the first block's start to the last one's end.
    #[must_use]
    pub fn span(&self) -> Range<u64> {
        self.span.clone()
    }

    /// Blocks that were left out because they overlap others.
    #[must_use]
    pub fn overlapping(&self) -> u64 {
        self.overlapping
    }

    /// Memory that the index takes, as far as it has been touched.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.cells.capacity() * size_of::<Cell>() + self.sizes.capacity() * 2 + self.segments.len() * 12 + self.large.len() * 24
    }

    /// The block that contains `addr`.
    #[inline]
    #[must_use]
    pub fn find(&self, addr: u64) -> Option<Hit> {
        self.check(addr, self.place(addr))
    }

    /// Looks up many addresses: `found` gets the position of each one that is in a block, in their order. The cache misses of a few hundred
    /// addresses overlap, which makes it several times faster than one by one.
    #[inline]
    pub fn find_all(&self, words: &[u64], places: &mut Vec<Place>, mut found: impl FnMut(usize, Hit)) {
        places.clear();
        places.extend(words.iter().map(|&word| {
            let place = self.cell_of(word);
            prefetch(&self.cells, (place.at / CELL_BITS as u32) as usize);
            place
        }));
        for place in places.iter_mut() {
            *place = self.block_of(*place);
            prefetch(&self.sizes, place.number as usize);
        }
        for (number, (&word, place)) in words.iter().zip(places.iter()).enumerate() {
            if let Some(hit) = self.check(word, *place) {
                found(number, hit);
            }
        }
    }

    /// Which block could hold `addr`.
    #[inline]
    fn place(&self, addr: u64) -> Place {
        self.block_of(self.cell_of(addr))
    }

    /// The place of the cell for an address, or the large block that covers its segment.
    #[inline]
    fn cell_of(&self, addr: u64) -> Place {
        let Some(&entry) = self.table.get((addr >> SEGMENT_BITS).wrapping_sub(self.base) as usize) else { return Place::NONE };
        if entry & COVERED != 0 {
            let number = self.large.get((entry & !COVERED) as usize).map_or(u32::MAX, |large| large.number);
            return Place { number, ..Place::NONE };
        }
        let at = (entry << (SEGMENT_BITS - self.granule_bits)) + ((addr & (SEGMENT_BYTES - 1)) >> self.granule_bits) as u32;
        Place { at, is_open: true, ..Place::NONE }
    }

    /// Reads the cell, if there is one to read.
    #[inline]
    fn block_of(&self, place: Place) -> Place {
        let Place { at, is_open: true, .. } = place else { return place };
        // Segment 0 has empty cells, for addresses in no segment.
        let Some(cell) = self.cells.get((at / CELL_BITS as u32) as usize) else { return Place::NONE };
        let upto = cell.starts & (u64::MAX >> (63 - at % CELL_BITS as u32));
        let start = if upto == 0 { cell.last } else { (at & !63) + 63 - upto.leading_zeros() };
        Place { number: (cell.before + upto.count_ones()).wrapping_sub(1), start, at, is_open: false }
    }

    #[inline]
    fn check(&self, addr: u64, place: Place) -> Option<Hit> {
        let size = self.sizes.get(place.number as usize).copied()?;
        if size == LARGE {
            let large = self.large_block(place.number)?;
            let offset = addr.wrapping_sub(large.addr);
            return (offset < large.bytes).then_some(Hit { block: place.number, offset });
        }
        let granules = u64::from(place.at.wrapping_sub(place.start));
        let offset = (granules << self.granule_bits) | (addr & ((1 << self.granule_bits) - 1));
        // Blocks begin at granules, so the low bits of the address belong to the distance.
        (offset < u64::from(size)).then_some(Hit { block: place.number, offset })
    }

    fn large_block(&self, number: u32) -> Option<&LargeBlock> {
        let place = self.large.binary_search_by_key(&number, |large| large.number).ok()?;
        self.large.get(place)
    }

    /// Bytes of a block; 0 if there is none of this number.
    #[inline]
    #[must_use]
    pub fn size(&self, block: u32) -> u64 {
        match self.sizes.get(block as usize) {
            Some(&LARGE) => self.large_block(block).map_or(0, |large| large.bytes),
            Some(&bytes) => u64::from(bytes),
            None => 0,
        }
    }

    /// The start of a block, found by its rank.
    #[must_use]
    pub fn address(&self, block: u32) -> Option<u64> {
        if block as usize >= self.sizes.len() {
            return None;
        }
        let after = self.cells.partition_point(|cell| cell.before <= block);
        // Of several cells with the same rank, the last one has the start.
        let place = after.checked_sub(1)?;
        let cell = self.cells.get(place)?;
        let mut starts = cell.starts;
        for _ in cell.before..block {
            starts &= starts.wrapping_sub(1);
        }
        self.address_at(place, starts.trailing_zeros())
    }

    fn address_at(&self, cell: usize, bit: u32) -> Option<u64> {
        let cells = self.cells_of_segment();
        let segment = self.segments.get(cell / cells)?;
        Some(segment + ((((cell % cells) as u64) * CELL_BITS + u64::from(bit)) << self.granule_bits))
    }

    /// All blocks by ascending address: number, address and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64, u64)> + '_ {
        let mut number = 0u32;
        self.cells.iter().enumerate().flat_map(move |(place, cell)| {
            let mut starts = cell.starts;
            let first = number;
            number += starts.count_ones();
            (first..number).filter_map(move |block| {
                let bit = starts.trailing_zeros();
                starts &= starts.wrapping_sub(1);
                Some((block, self.address_at(place, bit)?, self.size(block)))
            })
        })
    }
}

/// The state of a look-up.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    number: u32,
    start: u32,
    at: u32,
    /// The cell is still to be read.
    is_open: bool,
}

impl Place {
    const NONE: Self = Self { number: u32::MAX, start: 0, at: 0, is_open: false };
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0x7f00_0000_0000;

    fn naive(blocks: &[(u64, u64)], addr: u64) -> Option<Hit> {
        let place = blocks.iter().position(|&(start, bytes)| (start..start + bytes).contains(&addr))?;
        Some(Hit { block: place as u32, offset: addr - blocks[place].0 })
    }

    fn assert_finds(blocks: &[(u64, u64)], addrs: impl Iterator<Item = u64>) {
        let index = BlockIndex::of(blocks).unwrap();
        assert_eq!(index.overlapping(), 0);
        let addrs: Vec<u64> = addrs.collect();
        let expected: Vec<Option<Hit>> = addrs.iter().map(|&addr| naive(blocks, addr)).collect();
        assert_eq!(addrs.iter().map(|&addr| index.find(addr)).collect::<Vec<_>>(), expected);
        let mut together = vec![None; addrs.len()];
        index.find_all(&addrs, &mut Vec::new(), |number, hit| together[number] = Some(hit));
        assert_eq!(together, expected);
        assert_eq!(index.iter().map(|(_, addr, bytes)| (addr, bytes)).collect::<Vec<_>>(), blocks);
        assert!(blocks.iter().enumerate().all(|(number, &(addr, _))| index.address(number as u32) == Some(addr)));
        assert_eq!(index.address(blocks.len() as u32), None);
    }

    fn edges(blocks: &[(u64, u64)]) -> impl Iterator<Item = u64> + '_ {
        let of =
            |&(addr, bytes): &(u64, u64)| [addr - 1, addr, addr + 1, addr + bytes / 2, addr + bytes - 1, addr + bytes, addr + bytes + 15];
        blocks.iter().flat_map(of).chain([0, 1, 4096, u64::MAX, 1 << 47])
    }

    #[test]
    fn blocks_far_apart_and_ones_that_cover_whole_segments_are_found() {
        let blocks = [
            (0x5500_0000_0010, 24),
            (BASE + 16, 40),
            (BASE + (1 << 20) - 32, 64),
            (BASE + (3 << 20) + 48, 40 << 20),
            (BASE + (60 << 20), 3 << 20),
        ];
        assert_finds(&blocks, edges(&blocks));
    }

    #[test]
    fn sizes_around_the_largest_of_the_table_are_exact() {
        let blocks: Vec<(u64, u64)> = (65533..65538).zip(1u64..).map(|(bytes, place)| (BASE + (place << 17), bytes)).collect();
        assert_finds(&blocks, edges(&blocks));
    }

    #[test]
    fn a_block_that_overlaps_the_one_before_is_left_out_and_counted() {
        let index = BlockIndex::of(&[(BASE, 64), (BASE + 32, 64), (BASE + 64, 8), (BASE + 128, 0)]).unwrap();
        assert_eq!((index.len(), index.overlapping()), (2, 2));
        assert_eq!(index.find(BASE + 70), Some(Hit { block: 1, offset: 6 }));
    }

    #[test]
    fn more_address_space_than_fits_is_refused_with_what_would_fit() {
        let mut builder = IndexBuilder::new(1 << 21..1 << 46, 0, false).unwrap();
        let refused = (1..=1u64 << 17).find_map(|number| builder.push(number << 21, 16).err());
        assert_eq!(refused, Some(IndexError::TooLarge { limit_bytes: 0xf_ffff_fff0 }));
    }

    proptest! {
        #[test]
        fn every_address_is_found_as_a_plain_list_finds_it(
            parts in proptest::collection::vec((0u64..5000, 1u64..4000, any::<bool>()), 1..300), is_dense in any::<bool>()
        ) {
            let unit = if is_dense { 8 } else { 16 };
            let mut at = BASE;
            let mut blocks = Vec::new();
            for (gap, units, is_huge) in parts {
                let bytes = if is_huge && units > 3900 { units << 12 } else { units * unit - unit / 2 };
                at += gap * unit;
                blocks.push((at, bytes));
                at = (at + bytes).next_multiple_of(unit);
            }
            assert_finds(&blocks, edges(&blocks));
        }
    }
}
