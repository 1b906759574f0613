//! Which of the unreached blocks hold which: the leaked roots of chains and cycles. Pure.

use super::blocks::Bits;
use super::candidates::Candidates;

/// A block that is not reachable from any other unreached block; of a cycle, one of its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Its number among the candidates.
    pub number: u32,
    /// Blocks reachable from it, without itself. A block reachable from several heads counts once, with the first.
    pub held_blocks: u64,
    /// Their bytes.
    pub held_bytes: u64,
}

/// The heads, by the order in which they were found.
#[must_use]
pub fn heads(candidates: &Candidates) -> Vec<Head> {
    let count = candidates.left().map(|(number, _)| number as usize + 1).max().unwrap_or(0);
    let mut left = Bits::of(count);
    candidates.left().for_each(|(number, _)| {
        left.set(number);
    });
    // In the reverse of the order in which a depth-first search finishes, the first block of what is left is in a component that nothing
    // else leads to (Kosaraju).
    let mut finished: Vec<u32> = Vec::with_capacity(candidates.len());
    let mut seen = Bits::of(count);
    let mut stack: Vec<(u32, u32)> = Vec::new();
    for (root, _) in candidates.left() {
        if !seen.set(root) {
            continue;
        }
        stack.push((root, 0));
        while let Some(top) = stack.last_mut() {
            let (block, next) = *top;
            match candidates.pointers_of(block).get(next as usize) {
                Some(&to) => {
                    top.1 += 1;
                    if left.get(to) && seen.set(to) {
                        stack.push((to, 0));
                    }
                }
                None => {
                    finished.push(block);
                    stack.pop();
                }
            }
        }
    }
    let mut held = Bits::of(count);
    let mut found = Vec::new();
    let mut work: Vec<u32> = Vec::new();
    for &number in finished.iter().rev() {
        if !held.set(number) {
            continue;
        }
        let mut head = Head { number, held_blocks: 0, held_bytes: 0 };
        work.push(number);
        while let Some(block) = work.pop() {
            for &to in candidates.pointers_of(block) {
                if left.get(to) && held.set(to) {
                    head.held_blocks += 1;
                    head.held_bytes = head.held_bytes.saturating_add(candidates.get(to).map_or(0, |one| one.bytes));
                    work.push(to);
                }
            }
        }
        found.push(head);
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_chain_and_a_cycle_have_one_head_each_and_what_two_share_counts_once() {
        // 0 → 1 → 2; 3 ⇄ 4 → 5; 6 → 5; 7
        let found = heads(&Candidates::for_test(&[&[1], &[2], &[], &[4], &[3, 5], &[], &[5], &[]]));
        let mut sums: Vec<(u32, u64)> = found.iter().map(|head| (head.number, head.held_blocks)).collect();
        sums.sort_unstable();
        let numbers: Vec<u32> = sums.iter().map(|sum| sum.0).collect();
        assert!(numbers == [0, 3, 6, 7] || numbers == [0, 4, 6, 7], "{sums:?}");
        assert_eq!(sums.iter().map(|sum| sum.1).sum::<u64>() + 4, 8);
        assert_eq!((sums.first().map(|sum| sum.1), sums.last().map(|sum| sum.1)), (Some(2), Some(0)));
    }

    proptest! {
        #[test]
        fn every_block_is_a_head_or_held_by_one_and_no_head_hangs_on_another(
            pointers in proptest::collection::vec(proptest::collection::vec(0u32..30, 0..3), 30)
        ) {
            let slices: Vec<&[u32]> = pointers.iter().map(Vec::as_slice).collect();
            let found = heads(&Candidates::for_test(&slices));
            prop_assert_eq!(found.iter().map(|head| head.held_blocks + 1).sum::<u64>(), 30);
            let reaches = |from: u32, to: u32| {
                let (mut seen, mut work) = (vec![false; 30], vec![from]);
                while let Some(block) = work.pop() {
                    if !std::mem::replace(&mut seen[block as usize], true) {
                        work.extend(&pointers[block as usize]);
                    }
                }
                seen[to as usize]
            };
            for one in &found {
                for other in &found {
                    prop_assert!(one == other || !reaches(one.number, other.number));
                }
            }
        }
    }
}
