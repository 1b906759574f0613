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
    let (mut number, mut order, parent) = search(&graph, roots, root);
    let reverse = graph.reversed();
    let searched_bytes = (number.capacity() + order.capacity() + parent.capacity()) * 4;
    let both_bytes = searched_bytes + reverse.bytes();
    let graph_bytes = graph.bytes();
    drop(graph);
    let mut is_root = Bits::of(root as usize);
    for &block in roots.iter().filter(|&&block| block < root) {
        is_root.set(block);
    }
    let count = order.len();
    let peak_bytes = both_bytes.max((searched_bytes + reverse.bytes() + 3 * 4 * count + is_root.bytes()).saturating_sub(graph_bytes));
    let mut semi: Vec<u32> = (0..count as u32).collect();
    let mut label = semi.clone();
    let mut ancestor = vec![NONE; count];
    let mut path: Vec<u32> = Vec::new();
    let at = |list: &[u32], place: u32| list.get(place as usize).copied().unwrap_or(0);
    for place in (1..count as u32).rev() {
        let block = at(&order, place);
        let mut least = at(&parent, place);
        if is_root.get(block) {
            least = 0;
        }
        for &from in reverse.of(block) {
            let from = at(&number, from);
            if from == NONE {
                continue;
            }
            let candidate = if from <= place {
                from
            } else {
                compress(from, &mut ancestor, &mut label, &semi, &mut path);
                at(&semi, at(&label, from))
            };
            least = least.min(candidate);
        }
        if let (Some(semi), Some(ancestor)) = (semi.get_mut(place as usize), ancestor.get_mut(place as usize)) {
            (*semi, *ancestor) = (least, at(&parent, place));
        }
    }
    drop((label, ancestor, reverse));
    let mut dominator = parent;
    for place in 1..count {
        let mut up = dominator.get(place).copied().unwrap_or(0);
        while up > semi.get(place).copied().unwrap_or(0) {
            up = at(&dominator, up);
        }
        if let Some(own) = dominator.get_mut(place) {
            *own = up;
        }
    }
    // Numbers become blocks again, in place.
    number.fill(NONE);
    number.truncate(root as usize);
    for (place, &block) in order.iter().enumerate().skip(1) {
        let up = dominator.get(place).map_or(root, |&up| at(&order, up));
        if let Some(own) = number.get_mut(block as usize) {
            *own = up;
        }
    }
    order.shrink_to_fit();
    Dominators { of: number, order, peak_bytes }
}

/// Depth first from the root: each block's place in the search, the blocks in that order, and each one's parent by place.
fn search(graph: &Graph, roots: &[u32], root: u32) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut number = vec![NONE; graph.len() + 1];
    let (mut order, mut parent) = (vec![root], vec![0u32]);
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

/// Path compression: afterwards the label of `place` is the one with the least semidominator on its way up.
fn compress(place: u32, ancestor: &mut [u32], label: &mut [u32], semi: &[u32], path: &mut Vec<u32>) {
    let at = |list: &[u32], place: u32| list.get(place as usize).copied().unwrap_or(NONE);
    let mut up = place;
    path.clear();
    while at(ancestor, up) != NONE && at(ancestor, at(ancestor, up)) != NONE {
        path.push(up);
        up = at(ancestor, up);
    }
    while let Some(own) = path.pop() {
        let above = at(ancestor, own);
        let (best, mine) = (at(label, above), at(label, own));
        if at(semi, best) < at(semi, mine)
            && let Some(label) = label.get_mut(own as usize)
        {
            *label = best;
        }
        let further = at(ancestor, above);
        if let Some(ancestor) = ancestor.get_mut(own as usize) {
            *ancestor = further;
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
