//! jemalloc's own memory: the blocks from which it takes arenas, records, thread caches and the page map's leaves (`base_block_t`).
//!
//! A block begins with {size, next block, record of what is left of it}; the record's address and size (+8 and +16 in it, as in every
//! record) always add up to the block's end. Blocks are aligned to 2 MiB. A chain's head lies in the first block of its arena
//! (`base_t.blocks`), so a block that was found leads to all others of its arena.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::super::memory::{Memory, is_user_address, word_at};
use super::super::objects::range_of;

/// `HUGEPAGE`, the alignment and unit of blocks.
const BLOCK_ALIGNMENT: u64 = 2 << 20;
/// A block's size, next, and the first three words of its record.
const HEADER_BYTES: usize = 40;
/// Bytes of a block's start in which its arena's `base_t` may lie: the header, and 232 heaps of up to 16 bytes before the fields sought.
const BASE_BYTES: usize = 8 << 10;
/// Blocks followed: 128 GiB of metadata.
const BLOCKS_MAX: usize = 1 << 16;
/// Candidates examined; an allocator's data has fewer pointers into different 2 MiB.
const CANDIDATES_MAX: usize = 1 << 17;
/// Largest block that is accepted.
const BLOCK_BYTES_MAX: u64 = 1 << 36;

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// First address.
    pub addr: u64,
    /// Its size.
    pub bytes: u64,
    /// From its start, what was allocated.
    pub used_bytes: u64,
}

impl Block {
    /// Its addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.addr..self.addr + self.bytes
    }

    fn parse(addr: u64, header: &[u8]) -> Option<(Self, u64)> {
        let (bytes, next) = (word_at(header, 0), word_at(header, 8));
        let (rest, rest_bytes) = (word_at(header, 24), word_at(header, 32));
        let end = addr.checked_add(bytes)?;
        let used_bytes = rest.checked_sub(addr).filter(|&used| used > 0)?;
        let sound = bytes > 0
            && bytes.is_multiple_of(BLOCK_ALIGNMENT)
            && bytes <= BLOCK_BYTES_MAX
            && next.is_multiple_of(BLOCK_ALIGNMENT)
            && rest.checked_add(rest_bytes) == Some(end);
        sound.then_some((Self { addr, bytes, used_bytes }, next))
    }
}

/// Finds the blocks by what points into them: words of the allocator's data, and records. `mapped` are the process's mappings without a
/// file, joined.
#[must_use]
pub fn find(memory: &dyn Memory, mapped: &[Range<u64>], pointers: impl Iterator<Item = u64>) -> Vec<Block> {
    let mut last = 0;
    // A program's own tables may have hundreds of thousands of pointers into a few hundred of these.
    let mut starts: BTreeSet<u64> = BTreeSet::new();
    for pointer in pointers.filter(|&word| is_user_address(word)) {
        let start = pointer & !(BLOCK_ALIGNMENT - 1);
        if start != last && starts.len() < CANDIDATES_MAX && range_of(mapped, start).is_some() {
            starts.insert(start);
        }
        last = start;
    }
    let mut candidates: Vec<u64> = starts.into_iter().collect();
    let mut blocks: BTreeMap<u64, Option<Block>> = BTreeMap::new();
    while let Some(addr) = candidates.pop() {
        if blocks.len() >= BLOCKS_MAX || blocks.contains_key(&addr) {
            continue;
        }
        let inside = |block: &Block| range_of(mapped, addr).is_some_and(|range| block.range().end <= range.end);
        let header = memory.bytes(addr, HEADER_BYTES).and_then(|header| Block::parse(addr, &header));
        let found = header.filter(|(block, _)| inside(block));
        blocks.insert(addr, found.map(|(block, _)| block));
        let Some((_, next)) = found else { continue };
        if next != 0 {
            candidates.push(next);
        }
        let mut base = vec![0u8; BASE_BYTES];
        let read = memory.read(addr, &mut base);
        let words = base.get(..read).unwrap_or_default().chunks_exact(8).map(|word| word_at(word, 0));
        candidates.extend(words.filter(|&word| {
            word != 0 && word.is_multiple_of(BLOCK_ALIGNMENT) && is_user_address(word) && range_of(mapped, word).is_some()
        }));
    }
    disjoint(blocks.into_values().flatten())
}

/// The first of any blocks that overlap, which may be forged.
fn disjoint(blocks: impl Iterator<Item = Block>) -> Vec<Block> {
    let mut end = 0;
    blocks
        .filter(|block| {
            let keep = block.addr >= end;
            end = end.max(if keep { block.range().end } else { 0 });
            keep
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::census::Fixture;
    use crate::process::Maps;

    const FIRST: u64 = 0x7f00_0000_0000;
    const MIB: u64 = 1 << 20;

    fn fixture() -> (Fixture, Vec<Range<u64>>) {
        let maps = Maps::parse(b"7f0000000000-7f0001000000 rw-p 00000000 00:00 0\n");
        let ranges = maps.mappings.iter().map(|one| one.start.0..one.end.0).collect();
        (Fixture::with_maps(maps), ranges)
    }

    fn block(memory: &mut Fixture, addr: u64, bytes: u64, next: u64, used: u64) {
        for (at, word) in [(0, bytes), (8, next), (16, 0xfff), (24, addr + used), (32, bytes - used)] {
            memory.write_word(addr + at, word);
        }
    }

    #[test]
    fn a_pointer_into_the_first_block_leads_to_the_whole_chain() {
        let (mut memory, mapped) = fixture();
        block(&mut memory, FIRST, 2 * MIB, 0, 2 * MIB - 64);
        block(&mut memory, FIRST + 4 * MIB, 4 * MIB, FIRST, 4096);
        // base_t.blocks, in the first block.
        memory.write_word(FIRST + 0x180, FIRST + 4 * MIB);
        let found = find(&memory, &mapped, std::iter::once(FIRST + 0x1000));
        let blocks: Vec<_> = found.iter().map(|one| (one.addr, one.bytes, one.used_bytes)).collect();
        assert_eq!(blocks, [(FIRST, 2 * MIB, 2 * MIB - 64), (FIRST + 4 * MIB, 4 * MIB, 4096)]);
    }

    #[test]
    fn inconsistent_cyclic_and_overlapping_blocks_are_refused() {
        let (mut memory, mapped) = fixture();
        block(&mut memory, FIRST, 4 * MIB, FIRST + 4 * MIB, 64);
        block(&mut memory, FIRST + 2 * MIB, 2 * MIB, FIRST, 64);
        block(&mut memory, FIRST + 4 * MIB, 2 * MIB, FIRST, 64);
        memory.write_word(FIRST + 4 * MIB + 24, 7);
        memory.write_word(FIRST + 0x100, FIRST + 2 * MIB);
        // Larger than its mapping.
        block(&mut memory, FIRST + 14 * MIB, 4 * MIB, 0, 64);
        let pointers = [FIRST, FIRST + 14 * MIB];
        let found = find(&memory, &mapped, pointers.into_iter());
        assert_eq!(found.iter().map(|one| one.addr).collect::<Vec<_>>(), [FIRST]);
    }
}
