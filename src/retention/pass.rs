//! The full scan: every word of roots and blocks that is the address of a block.
//!
//! Any address inside a block counts, not only its first: for strings with headers in front, interpreters' objects and intrusive lists there
//! is no other. Words are at multiples of 8. One exception: in glibc the header of a free chunk is the last word of the block before it, so
//! the links of free chunks look like pointers to that block. They are in arenas, in free chunks (anywhere, as chunks are merged) and, after
//! those were allocated again, in a block's first words.

use std::ops::Range;

use super::areas::Areas;
use super::blocks::{Blocks, Own};
use super::index::{Hit, Place};
use super::mark::Marks;
use super::reader::{Reader, Words};
use crate::census::objects::range_of;

/// Links of a free chunk, counted in bytes from the block's start: fd, bk, fd_nextsize, bk_nextsize.
const LINKS_BYTES: u64 = 32;
/// Bytes of the last word.
const WORD_BYTES: u64 = 8;

/// How pointers are distinguished from words that only look like pointers.
pub struct Policy<'a> {
    own: &'a Own,
}

impl<'a> Policy<'a> {
    /// For these allocators.
    #[must_use]
    pub fn of(own: &'a Own) -> Self {
        Self { own }
    }

    /// Whether a slot belongs to an allocator's list.
    #[inline]
    #[must_use]
    pub fn is_list(&self, slot: u64) -> bool {
        range_of(&self.own.lists, slot).is_some() || !self.own.old.is_empty() && range_of(&self.own.old, slot).is_some()
    }

    /// Whether a word in a block, `within` bytes from its start and `left` from its end, is a free chunk's link rather than a pointer to the
    /// last word of a block of `bytes` bytes at `addr`. In a free chunk, links of the chunks it was merged from can be anywhere.
    #[inline]
    #[must_use]
    pub fn is_link(&self, (within, left): (u64, u64), is_free: bool, offset: u64, bytes: u64, addr: u64) -> bool {
        offset + WORD_BYTES == bytes
            && (within < LINKS_BYTES || is_free)
            // A list whose links are its members' last words is the program's own.
            && left != WORD_BYTES
            && range_of(&self.own.borrowing, addr).is_some()
    }
}

/// Receives what a scan finds: first roots, then pointers in ascending order of their source.
pub trait Sink {
    /// A slot outside all blocks points to a block; 0 stands for a register.
    fn root(&mut self, slot: u64, to: u32);

    /// A block points to another.
    fn pointer(&mut self, from: u32, to: u32);

    /// Whether further pointers to a block do not matter.
    fn is_known(&self, to: u32) -> bool;
}

impl Sink for Marks {
    #[inline]
    fn root(&mut self, _: u64, to: u32) {
        Self::root(self, to);
    }

    #[inline]
    fn pointer(&mut self, from: u32, to: u32) {
        Self::pointer(self, from, to);
    }

    #[inline]
    fn is_known(&self, to: u32) -> bool {
        self.is_reached(to)
    }
}

/// Reads the roots of the areas, registers last, then the blocks. `after_area` is called with the number of each area that was read.
pub fn read_pointers<S: Sink>(
    reader: &mut Reader<'_>,
    areas: &Areas,
    blocks: &Blocks,
    own: &Own,
    sink: &mut S,
    mut after_area: impl FnMut(&S, usize),
) {
    let index = &blocks.index;
    let policy = Policy::of(own);
    let mut words = Words::of(&index.span());
    let mut places: Vec<Place> = Vec::new();
    for (number, area) in areas.roots.iter().enumerate() {
        let mut flush = |words: &mut Words| {
            index.find_all(&words.words, &mut places, |number, hit| {
                if let Some(&slot) = words.slots.get(number).filter(|&&slot| !policy.is_list(slot)) {
                    sink.root(slot, hit.block);
                }
            });
            words.clear();
        };
        reader.read(area.range.clone(), |addr, bytes| words.take(addr, bytes, area.step, &mut flush));
        flush(&mut words);
        after_area(sink, number);
    }
    for hit in areas.registers.iter().filter_map(|&word| index.find(word)) {
        sink.root(0, hit.block);
    }
    let mut hits: Vec<(usize, Hit)> = Vec::new();
    for range in &areas.heap {
        let mut source = Source::default();
        let mut flush = |words: &mut Words| {
            hits.clear();
            index.find_all(&words.words, &mut places, |number, hit| hits.push((number, hit)));
            for &(number, hit) in &hits {
                let slot = words.slots.get(number).copied().unwrap_or(0);
                let Some((from, within, left)) = source.of(blocks, slot) else { continue };
                let is_link = || {
                    let bytes = index.size(hit.block);
                    let word = words.words.get(number).copied().unwrap_or(0);
                    policy.is_link((within, left), !blocks.live.get(from), hit.offset, bytes, word - hit.offset)
                };
                if from != hit.block && !sink.is_known(hit.block) && !is_link() && !policy.is_list(slot) {
                    sink.pointer(from, hit.block);
                }
            }
            words.clear();
        };
        reader.read(range.clone(), |addr, bytes| words.take(addr, bytes, 8, &mut flush));
        flush(&mut words);
    }
}

/// Scans everything and marks the blocks that are reached.
pub fn mark(reader: &mut Reader<'_>, areas: &Areas, blocks: &Blocks, own: &Own, marks: &mut Marks) {
    read_pointers(reader, areas, blocks, own, marks, |_, _| {});
}

/// The block that contained the last slot: the next one is mostly in it too.
#[derive(Default)]
struct Source {
    range: Range<u64>,
    block: u32,
}

impl Source {
    /// The block of a slot, with the slot's distance from its start and its end.
    #[inline]
    fn of(&mut self, blocks: &Blocks, slot: u64) -> Option<(u32, u64, u64)> {
        if !self.range.contains(&slot) {
            let hit = blocks.index.find(slot)?;
            let start = slot - hit.offset;
            (self.block, self.range) = (hit.block, start..start + blocks.index.size(hit.block));
        }
        Some((self.block, slot - self.range.start, self.range.end - slot))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::super::areas::{Area, Class};
    use super::super::candidates::Candidates;
    use super::*;
    use crate::census::HeapWalk;
    use crate::census::account::HeapAccount;
    use crate::census::quality::WalkQuality;
    use crate::census::{Block, ChunkState, ChunkTable, Fixture, Pace};

    const HEAP: u64 = 0x55d0_0000_0000;
    const ROOTS: u64 = 0x7f00_0000_0000;

    /// A glibc heap of chunks of these sizes and states, one after the other.
    fn heap(chunks: &[(u64, ChunkState)]) -> HeapWalk {
        let mut table = ChunkTable::for_glibc();
        table.begin_region(HEAP, 0);
        chunks.iter().for_each(|&(bytes, state)| {
            table.push(bytes, state);
        });
        let end = table.end_of_current();
        HeapWalk { account: HeapAccount::default(), quality: WalkQuality::default(), chunks: table, extents: vec![(0, HEAP..end)] }
    }

    /// Addresses of the remaining candidates.
    fn unreached(memory: &Fixture, walk: HeapWalk, registers: &[u64]) -> Vec<u64> {
        let heaps = vec![walk];
        let (blocks, own) = (Blocks::of(&heaps).unwrap(), Own::of(memory, &heaps));
        let mut areas = Areas { heap: vec![heaps[0].extents[0].1.clone()], registers: registers.to_vec(), ..Areas::default() };
        areas.roots.push(Area { range: ROOTS..ROOTS + 0x10000, class: Class::Globals, step: 8 });
        areas.add_unknown(&own.unknown);
        let mut marks = Marks::of(blocks.index.len(), usize::MAX);
        mark(&mut Reader::new(memory, Pace::default()), &areas, &blocks, &own, &mut marks);
        Candidates::of(&blocks, &marks).left().map(|(_, one)| one.addr).collect()
    }

    fn block(number: u64, bytes: u64) -> u64 {
        HEAP + number * bytes + 16
    }

    #[test]
    fn pointers_anywhere_into_a_block_count_and_links_of_free_chunks_do_not() {
        let walk = || heap(&[(64, ChunkState::Live); 12]);
        let mut memory = Fixture::default();
        let at = |number| block(number, 64);
        memory.write_word(ROOTS + 8, at(0) + 33);
        // The chunk after block 2 begins in its last word: a stale link is in the first words of block 0, the program's in its later ones.
        memory.write_word(at(0) + 8, at(2) + 48);
        memory.write_word(at(0) + 40, at(3) + 48);
        // A list whose links are the last words of its members.
        memory.write_word(at(3) + 48, at(4) + 48);
        memory.write_word(at(5), at(6));
        assert_eq!(unreached(&memory, walk(), &[at(7) + 1]), [1, 2, 5, 6, 8, 9, 10, 11].map(at));
    }

    #[test]
    fn a_free_chunk_is_followed_and_never_counted_and_unknown_memory_is_a_root() {
        let states = [ChunkState::Live, ChunkState::Free, ChunkState::Tcache, ChunkState::Unknown, ChunkState::Live, ChunkState::Live];
        let walk = heap(&states.map(|state| (64, state)));
        let mut memory = Fixture::default();
        let at = |number| block(number, 64);
        memory.write_word(ROOTS, at(1));
        memory.write_word(at(1) + 16, at(0));
        memory.write_word(at(3) + 8, at(4));
        // A link that was left when free chunks were merged.
        memory.write_word(at(1) + 40, at(5) + 48);
        memory.write_word(at(2), at(5));
        assert_eq!(unreached(&memory, walk, &[]), [at(5)]);
    }

    proptest! {
        #[test]
        fn what_is_left_of_any_heap_is_what_a_simple_search_leaves(
            sizes in proptest::collection::vec((2u64..300, any::<bool>()), 1..60),
            words in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..120),
            roots in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..6),
        ) {
            let states = |is_live| if is_live { ChunkState::Live } else { ChunkState::Free };
            let walk = heap(&sizes.iter().map(|&(units, is_live)| (units * 16, states(is_live))).collect::<Vec<_>>());
            let blocks: Vec<Block> = walk.chunks.blocks().collect();
            let mut memory = Fixture::default();
            memory.write(HEAP, &vec![0; (sizes.iter().map(|size| size.0).sum::<u64>() * 16) as usize]);
            let pick = |index: prop::sample::Index| &blocks[index.index(blocks.len())];
            // Words but the last one of a block, and addresses but that of its last word, of which other tests are.
            let place = |of: &Block, within: prop::sample::Index| of.addr + within.index(of.usable_bytes as usize / 8 - 1) as u64 * 8;
            for (from, to, within) in words {
                let (from, to) = (pick(from), pick(to));
                memory.write_word(place(from, within), place(to, within));
            }
            let word = |addr: u64| { let mut bytes = [0; 8]; crate::census::Memory::read(&memory, addr, &mut bytes); u64::from_le_bytes(bytes) };
            let mut work: Vec<u64> = Vec::new();
            let mut all = memory.clone();
            for (number, (to, within)) in roots.into_iter().enumerate() {
                let addr = place(pick(to), within);
                all.write_word(ROOTS + 8 * number as u64, addr);
                work.push(addr);
            }
            let mut reached = std::collections::BTreeSet::new();
            while let Some(addr) = work.pop() {
                let Some(found) = blocks.iter().find(|block| (block.addr..block.addr + block.usable_bytes).contains(&addr)) else { continue };
                if reached.insert(found.addr) {
                    work.extend((0..found.usable_bytes / 8).map(|number| word(found.addr + 8 * number)));
                }
            }
            let live = blocks.iter().filter(|block| block.chunk.state == ChunkState::Live);
            let expected: Vec<u64> = live.map(|block| block.addr).filter(|addr| !reached.contains(addr)).collect();
            prop_assert_eq!(unreached(&all, walk, &[]), expected);
        }
    }
}
