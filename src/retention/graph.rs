//! All pointers between blocks, and the roots that point to them. Pure.

use std::collections::VecDeque;

use super::blocks::Bits;
use super::pass::Sink;

/// No block or root.
const NONE: u32 = u32::MAX;
/// Marks an end of a list of pointers.
const MARK: u32 = 1 << 31;
/// Most blocks of a graph: the highest bit of their numbers is [`MARK`].
pub const BLOCKS_MAX: u64 = MARK as u64 - 2;

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

    /// The pointers by their targets, all as places in an order of `count` places, and the memory that turning them took. `places` has the
    /// place of each block, `u32::MAX` for one that is not in the order; its pointers are left out.
    #[must_use]
    pub fn into_predecessors(self, places: &[u32], count: usize) -> (Predecessors, usize) {
        let Self { first, mut to } = self;
        let place_of = |block: usize| places.get(block).copied().unwrap_or(NONE);
        // A mark on the last pointer of each list replaces the table of their beginnings.
        let mut has_pointers = Bits::of(first.len());
        for (block, bounds) in first.windows(2).enumerate() {
            if let [begin, end] = *bounds
                && begin < end
                && let Some(last) = to.get_mut(end as usize - 1)
            {
                has_pointers.set(block as u32);
                *last |= MARK;
            }
        }
        drop(first);
        // Counted two places behind the target, so that the entry behind it is where its next pointer goes, and in the end where the next
        // target's begin.
        let mut first = vec![0u32; count + 2];
        let mut blocks = has_pointers.ones();
        let mut block = blocks.next();
        for word in &mut to {
            let target = place_of((*word & !MARK) as usize);
            if block.is_some_and(|block| place_of(block as usize) != NONE)
                && let Some(count) = first.get_mut((target as usize).saturating_add(2))
            {
                *count += 1;
            }
            if *word & MARK != 0 {
                block = blocks.next();
            }
            *word = target & !MARK | *word & MARK;
        }
        let mut sum = 0;
        for count in &mut first {
            sum += *count;
            *count = sum;
        }
        let mut from = vec![0u32; sum as usize];
        let mut blocks = has_pointers.ones();
        let mut place = blocks.next().map_or(NONE, |block| place_of(block as usize));
        for word in &to {
            if place != NONE
                && let Some(next) = first.get_mut((*word & !MARK) as usize + 1)
            {
                if let Some(slot) = from.get_mut(*next as usize) {
                    *slot = place;
                }
                *next += 1;
            }
            if *word & MARK != 0 {
                place = blocks.next().map_or(NONE, |block| place_of(block as usize));
            }
        }
        let turning_bytes = (to.capacity() + first.capacity() + from.capacity()) * 4 + has_pointers.bytes();
        drop(to);
        let mut pointed_to = Bits::of(count);
        for (place, bounds) in first.windows(2).take(count).enumerate() {
            if let [begin, end] = *bounds
                && begin < end
                && let Some(slot) = from.get_mut(begin as usize)
            {
                pointed_to.set(place as u32);
                *slot |= MARK;
            }
        }
        (Predecessors { from, pointed_to }, turning_bytes)
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.first.capacity() + self.to.capacity()) * 4
    }
}

/// The places that point to each place, in consecutive lists in the order of the places.
#[derive(Debug, Clone, Default)]
pub struct Predecessors {
    /// Places; the first one of each list has [`MARK`].
    from: Vec<u32>,
    /// Places that something points to.
    pointed_to: Bits,
}

impl Predecessors {
    /// The lists from the last place's to the first one's, each with its place. Places that nothing points to are left out.
    pub fn backwards(&self) -> impl Iterator<Item = (u32, impl Iterator<Item = u32> + '_)> + '_ {
        let mut end = self.from.len();
        self.pointed_to.ones().rev().map(move |place| {
            let before = self.from.get(..end).unwrap_or_default();
            end = before.iter().rposition(|from| from & MARK != 0).unwrap_or(0);
            (place, before.get(end..).unwrap_or_default().iter().map(|from| from & !MARK))
        })
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.from.capacity() * 4 + self.pointed_to.bytes()
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
    /// By block: the index of the root; empty until [`Self::find_origins`].
    origin: Vec<u32>,
    /// By block: the block before it on the path; itself if a root points to it.
    before: Vec<u32>,
}

impl FirstReached {
    /// Searches from groups of roots: a block belongs to the first group that reaches it.
    #[must_use]
    pub fn of(graph: &Graph, roots: &[Root], groups: &[std::ops::Range<usize>]) -> Self {
        let mut found = Self { origin: Vec::new(), before: vec![NONE; graph.len()] };
        let mut queue: VecDeque<u32> = VecDeque::new();
        for group in groups {
            for root in roots.get(group.clone()).unwrap_or_default() {
                if found.enter(root.block, root.block) {
                    queue.push_back(root.block);
                }
            }
            while let Some(block) = queue.pop_front() {
                for &to in graph.of(block) {
                    if found.enter(to, block) {
                        queue.push_back(to);
                    }
                }
            }
        }
        found
    }

    /// Finds the root of each block, at the end of its path: apart from the search, so that its memory is not needed beside the graph's.
    pub fn find_origins(&mut self, roots: &[Root]) {
        self.origin = vec![NONE; self.before.len()];
        for (index, root) in roots.iter().enumerate() {
            if self.before.get(root.block as usize) == Some(&root.block)
                && let Some(own) = self.origin.get_mut(root.block as usize)
            {
                *own = index as u32;
            }
        }
        let mut path = Vec::new();
        for block in 0..self.before.len() as u32 {
            let mut at = block;
            while self.origin(at).is_none()
                && let Some(&before) = self.before.get(at as usize)
                && before != NONE
                && before != at
            {
                path.push(at);
                at = before;
            }
            let origin = self.origin.get(at as usize).copied().unwrap_or(NONE);
            for own in path.drain(..) {
                if let Some(own) = self.origin.get_mut(own as usize) {
                    *own = origin;
                }
            }
        }
    }

    /// Notes from where a block is reached, unless it was before.
    fn enter(&mut self, block: u32, before: u32) -> bool {
        match self.before.get_mut(block as usize) {
            Some(own) if *own == NONE => {
                *own = before;
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
        let mut found = FirstReached::of(&graph, &roots, &[0..2, 2..3]);
        found.find_origins(&roots);
        let origins: Vec<_> = (0..6).map(|block| found.origin(block)).collect();
        assert_eq!(origins, [Some(0), Some(0), Some(0), Some(1), Some(1), Some(2)]);
        assert_eq!(found.path(3), [4, 3]);
        assert_eq!(found.path(2), [0, 1, 2]);
        // Block 5 is in no order.
        let (turned, _) = graph.into_predecessors(&[0, 1, 2, 3, 4, NONE], 5);
        let lists: Vec<(u32, Vec<u32>)> = turned.backwards().map(|(place, from)| (place, from.collect())).collect();
        assert_eq!(lists, [(3, vec![2, 4]), (2, vec![1]), (1, vec![0])]);
    }
}
