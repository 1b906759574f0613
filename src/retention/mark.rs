//! Reachability, computed during the scan: roots first, then blocks by ascending address. Pure.
//!
//! A pointer from a block that is already reached marks its target at once; one to a target that is already reached is dropped. Only the
//! others are kept, and followed when their block is reached: 4 bytes each, and half a byte per block to find them. Unreached blocks keep
//! all their pointers to other unreached blocks: the chains of a leak.

use super::blocks::Bits;
use super::prefetch::prefetch;

/// Marks the last pointer of a block.
const LAST: u32 = 1 << 31;
/// Blocks between two recorded positions in the list; the blocks between are skipped over.
const ANCHOR_EVERY: u32 = 16;
/// Blocks whose pointers are asked for before the first one's are read.
const AHEAD: usize = 32;
/// Pointers per piece of the list: 256 KiB, so that growing copies nothing.
const PIECE: usize = 1 << 16;

/// Pointers of blocks, in the order of their sources.
#[derive(Debug, Default)]
struct Pointers {
    pieces: Vec<Vec<u32>>,
    len: usize,
    /// Where the pointers of every 16th block begin.
    anchors: Vec<u32>,
    /// Blocks that have any.
    has: Bits,
}

impl Pointers {
    fn push(&mut self, from: u32, to: u32) {
        while self.anchors.len() <= (from / ANCHOR_EVERY) as usize {
            self.anchors.push(self.len as u32);
        }
        if !self.has.set(from)
            && let Some(last) = self.pieces.last_mut().and_then(|piece| piece.last_mut())
        {
            // The same target twice in a row is stored once.
            if *last == to | LAST {
                return;
            }
            *last &= !LAST;
        }
        if self.len.is_multiple_of(PIECE) {
            self.pieces.push(Vec::with_capacity(PIECE));
        }
        if let Some(piece) = self.pieces.last_mut() {
            piece.push(to | LAST);
            self.len += 1;
        }
    }

    #[inline]
    fn get(&self, place: usize) -> Option<u32> {
        self.pieces.get(place / PIECE)?.get(place % PIECE).copied()
    }

    /// Asks for the pointers of a block.
    #[inline]
    fn prefetch(&self, block: u32) {
        if let Some(&anchor) = self.anchors.get((block / ANCHOR_EVERY) as usize)
            && let Some(piece) = self.pieces.get(anchor as usize / PIECE)
        {
            prefetch(piece, anchor as usize % PIECE);
        }
    }

    fn of(&self, block: u32) -> impl Iterator<Item = u32> + '_ {
        let group = block / ANCHOR_EVERY;
        let mut place = self.anchors.get(group as usize).map_or(usize::MAX, |&anchor| anchor as usize);
        let mut is_over = place == usize::MAX || !self.has.get(block);
        if !is_over {
            for _ in (group * ANCHOR_EVERY..block).filter(|&before| self.has.get(before)) {
                while self.get(place).is_some_and(|entry| entry & LAST == 0) {
                    place += 1;
                }
                place += 1;
            }
        }
        std::iter::from_fn(move || {
            let entry = self.get(place).filter(|_| !is_over)?;
            is_over = entry & LAST != 0;
            place += 1;
            Some(entry & !LAST)
        })
    }
}

/// Reached blocks and pointers between the others.
#[derive(Debug)]
pub struct Marks {
    reached: Bits,
    pointers: Pointers,
    stack: Vec<u32>,
    pointers_max: usize,
    /// Pointers that were not kept because there were too many: their targets count as reached.
    pub pointers_dropped: u64,
}

impl Marks {
    /// For `blocks` blocks and at most `pointers_max` pointers kept.
    #[must_use]
    pub fn of(blocks: usize, pointers_max: usize) -> Self {
        Self {
            reached: Bits::of(blocks),
            pointers: Pointers { has: Bits::of(blocks), ..Pointers::default() },
            stack: Vec::new(),
            pointers_max: pointers_max.min(u32::MAX as usize),
            pointers_dropped: 0,
        }
    }

    /// A root points to a block.
    #[inline]
    pub fn root(&mut self, to: u32) {
        if self.reached.set(to) {
            self.stack.push(to);
            self.follow();
        }
    }

    /// A block points to a block. Sources come in ascending order.
    #[inline]
    pub fn pointer(&mut self, from: u32, to: u32) {
        if from == to || self.reached.get(to) {
            return;
        }
        if self.reached.get(from) {
            self.root(to);
        } else if self.pointers.len >= self.pointers_max {
            self.pointers_dropped += 1;
            self.root(to);
        } else {
            self.pointers.push(from, to);
        }
    }

    /// Follows the pointers of the blocks on the stack, some blocks at a time, whose cache misses overlap.
    fn follow(&mut self) {
        let mut batch = [0; AHEAD];
        while !self.stack.is_empty() {
            let rest = self.stack.len().saturating_sub(AHEAD);
            let taken = batch.iter_mut().zip(self.stack.drain(rest..)).map(|(place, block)| *place = block).count();
            let batch = batch.get(..taken).unwrap_or_default();
            batch.iter().for_each(|&block| self.pointers.prefetch(block));
            for to in batch.iter().flat_map(|&block| self.pointers.of(block)) {
                if self.reached.set(to) {
                    self.stack.push(to);
                }
            }
        }
    }

    /// Whether a block was reached.
    #[inline]
    #[must_use]
    pub fn is_reached(&self, block: u32) -> bool {
        self.reached.get(block)
    }

    /// The kept pointers of a block.
    pub fn pointers_of(&self, block: u32) -> impl Iterator<Item = u32> + '_ {
        self.pointers.of(block)
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let lists = self.pointers.pieces.len() * PIECE + self.pointers.anchors.capacity() + self.stack.capacity();
        lists * 4 + self.reached.bytes() + self.pointers.has.bytes()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// Textbook reachability.
    fn naive(blocks: usize, roots: &[u32], pointers: &[(u32, u32)]) -> Vec<bool> {
        let mut reached = vec![false; blocks];
        let mut work = roots.to_vec();
        while let Some(block) = work.pop() {
            if !std::mem::replace(&mut reached[block as usize], true) {
                work.extend(pointers.iter().filter(|(from, _)| *from == block).map(|(_, to)| *to));
            }
        }
        reached
    }

    proptest! {
        #[test]
        fn what_is_reached_is_what_a_plain_search_reaches_and_the_rest_keeps_its_pointers(
            blocks in 1u32..90,
            roots in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
            pointers in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..160),
        ) {
            let number = |index: prop::sample::Index| index.index(blocks as usize) as u32;
            let roots: Vec<u32> = roots.into_iter().map(number).collect();
            let mut pointers: Vec<(u32, u32)> = pointers.into_iter().map(|(from, to)| (number(from), number(to))).collect();
            pointers.sort_by_key(|pointer| pointer.0);
            let mut marks = Marks::of(blocks as usize, usize::MAX);
            roots.iter().for_each(|&root| marks.root(root));
            pointers.iter().for_each(|&(from, to)| marks.pointer(from, to));
            let expected = naive(blocks as usize, &roots, &pointers);
            let found: Vec<bool> = (0..blocks).map(|block| marks.is_reached(block)).collect();
            prop_assert_eq!(&found, &expected);
            for &(from, to) in pointers.iter().filter(|(from, to)| from != to) {
                if !expected[from as usize] && !expected[to as usize] {
                    prop_assert!(marks.pointers_of(from).any(|one| one == to));
                }
            }
        }

        #[test]
        fn without_room_for_pointers_more_is_reached_never_less(
            pointers in proptest::collection::vec((0u32..40, 0u32..40), 0..120), room in 0usize..30
        ) {
            let mut pointers = pointers;
            pointers.sort_by_key(|pointer| pointer.0);
            let mut marks = Marks::of(40, room);
            marks.root(0);
            pointers.iter().for_each(|&(from, to)| marks.pointer(from, to));
            let expected = naive(40, &[0], &pointers);
            prop_assert!((0..40).all(|block| marks.is_reached(block) || !expected[block as usize]));
        }
    }
}
