//! All pointers between blocks, and the roots that point to them. Pure.

use std::collections::VecDeque;

use super::blocks::Bits;
use super::pass::Sink;

/// No block or root.
const NONE: u32 = u32::MAX;

/// The pointers of each block, in consecutive lists.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    first: Vec<u32>,
    to: Vec<u32>,
}

impl Graph {
    /// A graph of these pointers.
    #[must_use]
    pub fn of_lists(pointers: &[Vec<u32>]) -> Self {
        let mut graph = Self { first: vec![0], to: Vec::new() };
        for list in pointers {
            graph.to.extend_from_slice(list);
            graph.first.push(graph.to.len() as u32);
        }
        graph
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first.len().saturating_sub(1)
    }

    /// Whether there is no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The blocks to which a block points.
    #[inline]
    #[must_use]
    pub fn of(&self, block: u32) -> &[u32] {
        let at = |place: usize| self.first.get(place).map_or(0, |&first| first as usize);
        self.to.get(at(block as usize)..at(block as usize + 1)).unwrap_or_default()
    }

    /// The pointers by their targets, all as places in an order of `count` places. `places` has the place of each block, `u32::MAX` for one
    /// that is not in the order; its pointers are left out.
    #[must_use]
    pub fn into_reversed(mut self, places: &[u32], count: usize) -> Self {
        let place_of = |block: u32| places.get(block as usize).copied().unwrap_or(NONE);
        self.to.iter_mut().for_each(|to| *to = place_of(*to));
        // Counted two places behind the target, so that the entry behind it is where its next pointer goes, and in the end where the next
        // target's begin.
        let mut first = vec![0u32; count + 2];
        let is_in_order = |block: &u32| place_of(*block) != NONE;
        for block in (0..self.len() as u32).filter(is_in_order) {
            for &to in self.of(block) {
                if let Some(count) = first.get_mut(to as usize + 2) {
                    *count += 1;
                }
            }
        }
        let mut sum = 0;
        for count in &mut first {
            sum += *count;
            *count = sum;
        }
        let mut from = vec![0u32; sum as usize];
        for block in (0..self.len() as u32).filter(is_in_order) {
            for &to in self.of(block) {
                let Some(next) = first.get_mut(to as usize + 1) else { continue };
                if let Some(slot) = from.get_mut(*next as usize) {
                    *slot = place_of(block);
                }
                *next += 1;
            }
        }
        first.truncate(count + 1);
        Self { first, to: from }
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.first.capacity() + self.to.capacity()) * 4
    }
}

/// A slot outside all blocks that points to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Root {
    /// Address of the slot; 0 for a register.
    pub slot: u64,
    /// The block.
    pub block: u32,
}

/// Builds a graph during a scan.
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    blocks: usize,
    pointers_max: usize,
    rooted: Bits,
    /// The first root of each block, in the order of the classes.
    pub roots: Vec<Root>,
    /// Pointers left out because there were too many.
    pub pointers_dropped: u64,
}

impl GraphBuilder {
    /// For `blocks` blocks and at most `pointers_max` pointers.
    #[must_use]
    pub fn of(blocks: usize, pointers_max: usize) -> Self {
        Self {
            graph: Graph { first: Vec::with_capacity(blocks + 1), to: Vec::new() },
            blocks,
            pointers_max: pointers_max.min(u32::MAX as usize),
            rooted: Bits::of(blocks),
            roots: Vec::new(),
            pointers_dropped: 0,
        }
    }

    /// The graph, and the first root of each block.
    #[must_use]
    pub fn finish(mut self) -> (Graph, Vec<Root>) {
        self.graph.first.resize(self.blocks + 1, self.graph.to.len() as u32);
        self.graph.to.shrink_to_fit();
        (self.graph, self.roots)
    }
}

impl Sink for GraphBuilder {
    fn root(&mut self, slot: u64, to: u32) {
        if self.rooted.set(to) {
            self.roots.push(Root { slot, block: to });
        }
    }

    fn pointer(&mut self, from: u32, to: u32) {
        let Graph { first, to: list } = &mut self.graph;
        while first.len() <= from as usize {
            first.push(list.len() as u32);
        }
        let is_again = first.last().is_some_and(|&first| list.len() > first as usize) && list.last() == Some(&to);
        if list.len() >= self.pointers_max {
            self.pointers_dropped += 1;
        } else if !is_again {
            list.push(to);
        }
    }

    fn is_known(&self, _: u32) -> bool {
        false
    }
}

/// The root and the block from which each block is reached first: breadth first, roots in their order.
#[derive(Debug, Clone, Default)]
pub struct FirstReached {
    /// By block: the index of the root.
    origin: Vec<u32>,
    /// By block: the block before it on the path; itself if a root points to it.
    before: Vec<u32>,
}

impl FirstReached {
    /// Searches from groups of roots: a block belongs to the first group that reaches it.
    #[must_use]
    pub fn of(graph: &Graph, roots: &[Root], groups: &[std::ops::Range<usize>]) -> Self {
        let mut found = Self { origin: vec![NONE; graph.len()], before: vec![NONE; graph.len()] };
        let mut queue: VecDeque<u32> = VecDeque::new();
        for group in groups {
            for (index, root) in (group.start..).zip(roots.get(group.clone()).unwrap_or_default()) {
                if found.enter(root.block, root.block, index as u32) {
                    queue.push_back(root.block);
                }
            }
            while let Some(block) = queue.pop_front() {
                let origin = found.origin.get(block as usize).copied().unwrap_or(NONE);
                for &to in graph.of(block) {
                    if found.enter(to, block, origin) {
                        queue.push_back(to);
                    }
                }
            }
        }
        found
    }

    fn enter(&mut self, block: u32, before: u32, origin: u32) -> bool {
        match (self.origin.get_mut(block as usize), self.before.get_mut(block as usize)) {
            (Some(own), Some(way)) if *own == NONE => {
                (*own, *way) = (origin, before);
                true
            }
            _ => false,
        }
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.origin.capacity() + self.before.capacity()) * 4
    }

    /// The root that reaches a block first, as an index.
    #[must_use]
    pub fn origin(&self, block: u32) -> Option<usize> {
        self.origin.get(block as usize).filter(|&&origin| origin != NONE).map(|&origin| origin as usize)
    }

    /// The blocks from the one that a root points to down to this one.
    #[must_use]
    pub fn path(&self, block: u32) -> Vec<u32> {
        let mut path = vec![block];
        while let Some(&before) = path.last().and_then(|&last| self.before.get(last as usize)) {
            if before == NONE || path.last() == Some(&before) || path.len() > self.before.len() {
                break;
            }
            path.push(before);
        }
        path.reverse();
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_reached_first_by_the_nearest_root_of_the_first_group_that_reaches_it() {
        // 0 → 1 → 2 → 3; 4 → 3; 5 → 4
        let graph = Graph::of_lists(&[vec![1], vec![2], vec![3], vec![], vec![3], vec![4]]);
        let roots = [(10, 0), (20, 4), (30, 5)].map(|(slot, block)| Root { slot, block });
        let found = FirstReached::of(&graph, &roots, &[0..2, 2..3]);
        let origins: Vec<_> = (0..6).map(|block| found.origin(block)).collect();
        assert_eq!(origins, [Some(0), Some(0), Some(0), Some(1), Some(1), Some(2)]);
        assert_eq!(found.path(3), [4, 3]);
        assert_eq!(found.path(2), [0, 1, 2]);
        let reversed = graph.clone().into_reversed(&[0, 1, 2, 3, 4, 5], 6);
        assert_eq!((reversed.of(3), reversed.of(0)), (&[2u32, 4][..], &[][..]));
    }
}
