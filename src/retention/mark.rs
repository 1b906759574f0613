//! Reachability while memory is read: roots first, then blocks by rising address. Pure.
//!
//! A pointer out of a block that is reached already marks its target at once; one to a target that is reached already says nothing new.
//! Only the others are kept, 4 bytes each and 4 a block, and followed when their block is reached. What is never reached keeps all its
//! pointers to what is never reached: the chains of a leak.

use super::blocks::Bits;

/// Reached blocks and pointers between the others.
#[derive(Debug)]
pub struct Marks {
    reached: Bits,
    /// Where the pointers of each block visited so far begin.
    first: Vec<u32>,
    to: Vec<u32>,
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
            first: Vec::with_capacity(blocks + 1),
            to: Vec::new(),
            stack: Vec::new(),
            pointers_max: pointers_max.min(u32::MAX as usize),
            pointers_dropped: 0,
        }
    }

    /// Something outside of all blocks points at a block.
    #[inline]
    pub fn root(&mut self, to: u32) {
        if self.reached.set(to) {
            self.stack.push(to);
            self.follow();
        }
    }

    /// A block points at a block. Sources come by rising number.
    #[inline]
    pub fn pointer(&mut self, from: u32, to: u32) {
        if from == to || self.reached.get(to) {
            return;
        }
        if self.reached.get(from) {
            self.root(to);
            return;
        }
        let place = self.to.len() as u32;
        while self.first.len() <= from as usize {
            self.first.push(place);
        }
        if self.to.len() >= self.pointers_max {
            self.pointers_dropped += 1;
            self.root(to);
        } else if self.to.len() == self.first.last().map_or(0, |&first| first as usize) || self.to.last() != Some(&to) {
            self.to.push(to);
        }
    }

    fn follow(&mut self) {
        while let Some(block) = self.stack.pop() {
            let Some(&first) = self.first.get(block as usize) else { continue };
            let last = self.first.get(block as usize + 1).map_or(self.to.len(), |&last| last as usize);
            for &to in self.to.get(first as usize..last).unwrap_or_default() {
                if self.reached.set(to) {
                    self.stack.push(to);
                }
            }
        }
    }

    /// Whether something was seen to lead to a block.
    #[inline]
    #[must_use]
    pub fn is_reached(&self, block: u32) -> bool {
        self.reached.get(block)
    }

    /// The kept pointers of a block.
    #[must_use]
    pub fn pointers_of(&self, block: u32) -> &[u32] {
        let Some(&first) = self.first.get(block as usize) else { return &[] };
        let last = self.first.get(block as usize + 1).map_or(self.to.len(), |&last| last as usize);
        self.to.get(first as usize..last).unwrap_or_default()
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.first.capacity() + self.to.capacity() + self.stack.capacity()) * 4 + self.first.capacity() / 8
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    /// Reachability as a textbook has it.
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
            blocks in 1u32..60,
            roots in proptest::collection::vec(any::<prop::sample::Index>(), 0..4),
            pointers in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..120),
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
                    prop_assert!(marks.pointers_of(from).contains(&to));
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
