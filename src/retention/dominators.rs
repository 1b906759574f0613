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
    /// Most memory that the graph and the computation took at a time.
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
    let Search { number, count, stack_bytes } = search(&graph, roots, root);
    let number_bytes = number.capacity() * 4;
    let at = |list: &[u32], place: u32| list.get(place as usize).copied().unwrap_or(0);
    let mut is_root = Bits::of(count);
    for &block in roots.iter().filter(|&&block| block < root) {
        is_root.set(at(&number, block));
    }
    // From here on blocks are called by their places in the search, so that the pointers are read in the order in which they lie.
    let (pointers, turning_bytes) = graph.into_predecessors(&number, count);
    let mut order = vec![root; count];
    for (block, &place) in number.iter().enumerate() {
        if let Some(own) = order.get_mut(place as usize) {
            *own = block as u32;
        }
    }
    drop(number);
    let computing_bytes = pointers.bytes() + (order.capacity() + 4 * count) * 4;
    let peak_bytes = is_root.bytes() + (graph_bytes + number_bytes + stack_bytes).max(turning_bytes + number_bytes).max(computing_bytes);
    // The parent in a depth-first search is the last one that precedes a block among those that point to it: an earlier one that was
    // searched to its end would have reached the block itself. Where nothing precedes, it is the root.
    let mut parent = vec![0; count];
    for (place, from) in pointers.backwards() {
        if let Some(parent) = parent.get_mut(place as usize) {
            *parent = from.filter(|&from| from < place).max().unwrap_or(0);
        }
    }
    let mut semi = vec![0; count];
    // The least semidominator on the way up, as far as the way has been followed.
    let mut least = vec![0; count];
    let mut ancestor = parent.clone();
    let mut path: Vec<u32> = Vec::new();
    // What nothing points to is a root, whose semidominator is 0.
    for (place, pointing) in pointers.backwards() {
        let mut own = if is_root.get(place) { 0 } else { NONE };
        for from in pointing {
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
    drop((least, ancestor, pointers));
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

/// The order of a depth-first search.
struct Search {
    /// Each block's place, [`NONE`] where no root leads to; the root's, 0, is the last entry.
    number: Vec<u32>,
    /// Number of places.
    count: usize,
    /// Most memory that the stack took.
    stack_bytes: usize,
}

/// Depth first from the root.
fn search(graph: &Graph, roots: &[u32], root: u32) -> Search {
    let mut number = vec![NONE; graph.len() + 1];
    if let Some(own) = number.get_mut(root as usize) {
        *own = 0;
    }
    let mut count = 1;
    let mut stack: Vec<(u32, u32)> = Vec::new();
    let mut roots = roots.iter();
    loop {
        let block = match stack.last_mut() {
            Some((block, next)) => {
                let Some(&to) = graph.of(*block).get(*next as usize) else {
                    stack.pop();
                    continue;
                };
                *next += 1;
                to
            }
            None => match roots.next() {
                Some(&start) => start,
                None => return Search { number, count: count as usize, stack_bytes: stack.capacity() * 8 },
            },
        };
        if let Some(own) = number.get_mut(block as usize).filter(|own| **own == NONE) {
            *own = count;
            count += 1;
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
