//! The blocks to name as owners: those in which the retained bytes come together. Pure.
//!
//! A few blocks at the top of the dominator tree retain everything, and many at the bottom retain little; neither is useful. Descending from
//! the top, a block is skipped as long as a few blocks below it, of other sizes, retain nearly all that it does: a structure that points to a
//! table is skipped, and the table is named. A block is never skipped for one of its own size: that is the next element of its list or tree.

use std::collections::HashMap;

use super::dominators::{Dominators, NONE};

/// Blocks that retain less than one in this many of all bytes are not named.
const SHARE_MIN: u64 = 200;
/// A block is skipped for at most this many blocks below it.
const BRANCHES_MAX: usize = 8;
/// They must retain at least this percentage of what it does.
const PERCENT_MIN: u64 = 80;

/// By block: the nearest one above it, or itself, that is named; [`NONE`] if there is none.
#[derive(Debug, Clone, Default)]
pub struct NearestOwner(Vec<u32>);

impl NearestOwner {
    /// The owners of all blocks. `value` is what a block retains, `size` its bytes, `total` the value of all blocks.
    #[must_use]
    pub fn of(tree: &Dominators, value: impl Fn(u32) -> u64, size: impl Fn(u32) -> u64, total: u64) -> Self {
        let least = (total / SHARE_MIN).max(1);
        let mut below: HashMap<u32, Vec<u32>> = HashMap::new();
        for &block in tree.order.iter().skip(1).filter(|&&block| value(block) >= least) {
            below.entry(tree.of.get(block as usize).copied().unwrap_or(NONE)).or_default().push(block);
        }
        let mut owners = vec![NONE; tree.of.len()];
        let mut work = below.remove(&(tree.of.len() as u32)).unwrap_or_default();
        while let Some(block) = work.pop() {
            if let Some(own) = owners.get_mut(block as usize) {
                *own = block;
            }
            let branches: Vec<u32> = below.remove(&block).unwrap_or_default().into_iter().filter(|&one| size(one) != size(block)).collect();
            let held = branches.iter().map(|&one| value(one)).fold(0, u64::saturating_add);
            if branches.len() <= BRANCHES_MAX && u128::from(held) * 100 >= u128::from(value(block)) * u128::from(PERCENT_MIN) {
                work.extend(branches);
            }
        }
        // Dominators come before what they dominate.
        for &block in tree.order.iter().skip(1) {
            let up = tree.of.get(block as usize).and_then(|&up| owners.get(up as usize)).copied().unwrap_or(NONE);
            if let Some(own) = owners.get_mut(block as usize).filter(|own| **own == NONE) {
                *own = up;
            }
        }
        Self(owners)
    }

    /// The owner of a block.
    #[must_use]
    pub fn get(&self, block: u32) -> Option<u32> {
        self.0.get(block as usize).copied().filter(|&owner| owner != NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::super::dominators::dominators;
    use super::super::graph::Graph;
    use super::*;

    /// The owners of blocks with these sizes, each of which holds those of its list.
    fn owners(sizes: &[u64], pointers: &[Vec<u32>], roots: &[u32]) -> Vec<Option<u32>> {
        let tree = dominators(Graph::of_lists(pointers), roots);
        let mut values = sizes.to_vec();
        for &block in tree.order.iter().skip(1).rev() {
            let up = tree.of[block as usize] as usize;
            let value = values[block as usize];
            if let Some(above) = values.get_mut(up) {
                *above += value;
            }
        }
        let found = NearestOwner::of(&tree, |block| values[block as usize], |block| sizes[block as usize], sizes.iter().sum());
        (0..sizes.len() as u32).map(|block| found.get(block)).collect()
    }

    #[test]
    fn a_structure_that_points_to_a_table_is_skipped_and_the_table_owns_its_entries() {
        // 0: the structure, 1: its table, 2..102: entries.
        let sizes: Vec<u64> = [64, 800].into_iter().chain([100; 100]).collect();
        let mut pointers = vec![vec![1], (2..102).collect::<Vec<u32>>()];
        pointers.extend((2..102).map(|_| Vec::new()));
        let owners = owners(&sizes, &pointers, &[0]);
        assert_eq!((owners[0], owners[1], owners[50]), (Some(0), Some(1), Some(1)));
    }

    #[test]
    fn the_first_member_of_a_list_owns_the_whole_list() {
        let pointers: Vec<Vec<u32>> = (0..100u32).map(|block| if block < 99 { vec![block + 1] } else { vec![] }).collect();
        assert!(owners(&[48; 100], &pointers, &[0]).iter().all(|&owner| owner == Some(0)));
    }

    #[test]
    fn what_two_blocks_share_has_no_owner_unless_it_is_large_itself() {
        // 0 and 1 both point to 2 and to 3..303.
        let sizes: Vec<u64> = [100, 100, 5000].into_iter().chain([10; 300]).collect();
        let shared: Vec<u32> = (2..303).collect();
        let mut pointers = vec![shared.clone(), shared];
        pointers.extend((2..303).map(|_| Vec::new()));
        let owners = owners(&sizes, &pointers, &[0, 1]);
        assert_eq!((owners[0], owners[2], owners[10]), (Some(0), Some(2), None));
    }
}
