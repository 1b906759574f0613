//! Dominators: the block that every path to a block leads through. Pure. Semi-NCA (Georgiadis, "Linear-Time Algorithms for Dominators and
//! Related Problems", 2005, 2.3), without recursion.

use super::blocks::Bits;
use super::graph::Graph;

/// No block.
pub const NONE: u32 = u32::MAX;

/// The dominator tree of the blocks that roots lead to.
#[derive(Debug, Clone, Default)]
pub struct Dominators {
    /// By block: the block that dominates it next, the root (the number of blocks), or [`NONE`] where no root leads to.
    pub of: Vec<u32>,
    /// Blocks in the order of a depth-first search: dominators before what they dominate. The root is the first.
    pub order: Vec<u32>,
    /// Most memory that the computation took at a time, in addition to the graph's at its start.
    pub peak_bytes: usize,
}

impl Dominators {
    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.of.capacity() + self.order.capacity()) * 4
    }
}

/// Dominators of a graph whose roots are these blocks.
#[must_use]
pub fn dominators(graph: Graph, roots: &[u32]) -> Dominators {
    let root = graph.len() as u32;
    let graph_bytes = graph.bytes();
    let (number, order, parent) = search(&graph, roots, root);
    let count = order.len();
    let at = |list: &[u32], place: u32| list.get(place as usize).copied().unwrap_or(0);
    let mut is_root = Bits::of(count);
    for &block in roots.iter().filter(|&&block| block < root) {
        is_root.set(at(&number, block));
    }
    // From here on blocks are called by their places in the search, so that the pointers are read in the order in which they lie.
    let reverse = graph.into_reversed(&number, count);
    let (ordered_bytes, number_bytes) = ((order.capacity() + parent.capacity()) * 4, number.capacity() * 4);
    drop(number);
    let peak_bytes = ordered_bytes + reverse.bytes() + number_bytes.max((3 * 4 * count + is_root.bytes()).saturating_sub(graph_bytes));
    let mut semi = vec![0; count];
    // The least semidominator on the way up, as far as the way has been followed.
    let mut least = vec![0; count];
    let mut ancestor = parent.clone();
    let mut path: Vec<u32> = Vec::new();
    for place in (1..count as u32).rev() {
        let mut own = if is_root.get(place) { 0 } else { at(&parent, place) };
        for &from in reverse.of(place) {
            let candidate = if from <= place {
                from
            } else {
                compress(from, place, &mut ancestor, &mut least, &mut path);
                at(&least, from)
            };
            own = own.min(candidate);
        }
        if let (Some(semi), Some(least)) = (semi.get_mut(place as usize), least.get_mut(place as usize)) {
            (*semi, *least) = (own, own);
        }
    }
    drop((least, ancestor, reverse));
    let mut dominator = parent;
    for place in 1..count {
        let mut up = dominator.get(place).copied().unwrap_or(0);
        let limit = semi.get(place).copied().unwrap_or(0);
        while up > limit {
            up = at(&dominator, up);
        }
        if let Some(own) = dominator.get_mut(place) {
            *own = up;
        }
    }
    drop(semi);
    // Places become blocks again.
    let mut of = vec![NONE; root as usize];
    for (place, &block) in order.iter().enumerate().skip(1) {
        let up = dominator.get(place).map_or(root, |&up| at(&order, up));
        if let Some(own) = of.get_mut(block as usize) {
            *own = up;
        }
    }
    Dominators { of, order, peak_bytes }
}

/// Depth first from the root: each block's place in the search, the blocks in that order, and each one's parent by place.
fn search(graph: &Graph, roots: &[u32], root: u32) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut number = vec![NONE; graph.len() + 1];
    let (mut order, mut parent) = (Vec::with_capacity(graph.len() + 1), Vec::with_capacity(graph.len() + 1));
    order.push(root);
    parent.push(0u32);
    if let Some(own) = number.last_mut() {
        *own = 0;
    }
    let mut stack: Vec<(u32, u32)> = Vec::new();
    let mut roots = roots.iter();
    loop {
        let (block, from) = match stack.last_mut() {
            Some((block, next)) => {
                let Some(&to) = graph.of(*block).get(*next as usize) else {
                    stack.pop();
                    continue;
                };
                *next += 1;
                (to, number.get(*block as usize).copied().unwrap_or(0))
            }
            None => match roots.next() {
                Some(&start) => (start, 0),
                None => return (number, order, parent),
            },
        };
        if let Some(own) = number.get_mut(block as usize).filter(|own| **own == NONE) {
            *own = order.len() as u32;
            order.push(block);
            parent.push(from);
            stack.push((block, 0));
        }
    }
}

/// Path compression: afterwards `least` of `from` is that of its whole way up, to the first one that is not behind `last`.
fn compress(from: u32, last: u32, ancestor: &mut [u32], least: &mut [u32], path: &mut Vec<u32>) {
    let at = |list: &[u32], place: u32| list.get(place as usize).copied().unwrap_or(0);
    let mut up = from;
    path.clear();
    loop {
        let above = at(ancestor, up);
        if above <= last {
            break;
        }
        path.push(up);
        up = above;
    }
    // The last one's ancestor and least are those of all below it.
    let (top, mut best) = (at(ancestor, up), at(least, up));
    while let Some(own) = path.pop() {
        if let (Some(least), Some(ancestor)) = (least.get_mut(own as usize), ancestor.get_mut(own as usize)) {
            best = best.min(*least);
            (*least, *ancestor) = (best, top);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What roots reach without going through a block.
    fn reached_without(pointers: &[Vec<u32>], roots: &[u32], without: Option<u32>) -> Vec<bool> {
        let (mut seen, mut work) = (vec![false; pointers.len()], roots.to_vec());
        while let Some(block) = work.pop() {
            if Some(block) != without && !std::mem::replace(&mut seen[block as usize], true) {
                work.extend(&pointers[block as usize]);
            }
        }
        seen
    }

    proptest! {
        #[test]
        fn a_block_is_dominated_by_those_without_which_it_is_not_reached(
            pointers in proptest::collection::vec(proptest::collection::vec(0u32..25, 0..4), 25),
            roots in proptest::collection::vec(0u32..25, 0..4),
        ) {
            let found = dominators(Graph::of_lists(&pointers), &roots);
            let reached = reached_without(&pointers, &roots, None);
            for block in 0..25u32 {
                prop_assert_eq!(found.of[block as usize] != NONE, reached[block as usize]);
                if !reached[block as usize] {
                    continue;
                }
                let mut chain = std::collections::BTreeSet::new();
                let mut up = found.of[block as usize];
                while up != 25 {
                    chain.insert(up);
                    up = found.of[up as usize];
                }
                let expected: std::collections::BTreeSet<u32> =
                    (0..25).filter(|&other| other != block && !reached_without(&pointers, &roots, Some(other))[block as usize] && reached[other as usize]).collect();
                prop_assert_eq!(chain, expected);
            }
        }
    }
}
