//! Addresses of the blocks of a recording, and which stacks allocated them: answers queries for a range of addresses. Pure.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::ledger::{Ledger, SampledLedger};
use crate::profile::{FrameId, Profile};
use crate::session::report::Stacks;
use crate::session::tier::exact::Watched;
use crate::units::StackId;

/// Maximum number of blocks that are kept, 24 bytes each; further ones are counted.
const BLOCKS_MAX: usize = 1 << 20;

/// A block: its address, and the index of its stack.
#[derive(Debug, Clone, Copy)]
struct Placed {
    start: u64,
    bytes: u64,
    stack: u32,
}

/// What one stack holds in a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Its frames in the recording's profile, leaf first.
    pub frames: Arc<[FrameId]>,
    /// Bytes of its blocks that lie in the range.
    pub live_bytes: u64,
    /// Blocks that lie in it, completely or in part.
    pub live_allocations: u64,
}

/// The blocks of one process by ascending address.
#[derive(Debug, Default)]
pub struct BlockIndex {
    /// The process.
    pub pid: u32,
    /// Blocks beyond the limit, whose addresses are not known.
    pub left_out: u64,
    blocks: Vec<Placed>,
    stacks: Vec<Arc<[FrameId]>>,
}

impl BlockIndex {
    /// The live blocks of a process: all that were recorded, or those of its emitter's sample. `frames` are those of each stack.
    pub(in crate::session) fn of(pid: u32, watched: &Watched, frames: &Stacks) -> Self {
        match &watched.sampled {
            Some(sample) => Self::of_sample(pid, sample, frames),
            None => Self::of_ledger(pid, &watched.ledger, frames),
        }
    }

    fn of_ledger(pid: u32, ledger: &Ledger, frames: &Stacks) -> Self {
        let mut index = Self { pid, ..Self::default() };
        let mut indices: HashMap<StackId, u32> = HashMap::new();
        for block in ledger.outstanding().iter() {
            index.push(&mut indices, (block.addr.0, block.size_bytes), block.stack, frames);
        }
        index.blocks.sort_unstable_by_key(|block| block.start);
        index
    }

    fn of_sample(pid: u32, ledger: &SampledLedger, frames: &Stacks) -> Self {
        let mut index = Self { pid, ..Self::default() };
        let mut indices: HashMap<StackId, u32> = HashMap::new();
        for block in ledger.live_blocks() {
            index.push(&mut indices, (block.addr.0, block.sample.size_bytes), block.stack, frames);
        }
        index.blocks.sort_unstable_by_key(|block| block.start);
        index
    }

    fn push(&mut self, indices: &mut HashMap<StackId, u32>, (start, bytes): (u64, u64), stack: StackId, frames: &Stacks) {
        let Some(frames) = frames.get(&stack) else { return };
        if self.blocks.len() >= BLOCKS_MAX {
            self.left_out += 1;
            return;
        }
        let stack = *indices.entry(stack).or_insert_with(|| {
            self.stacks.push(Arc::clone(frames));
            // Stack ids fit 20 bits.
            u32::try_from(self.stacks.len() - 1).unwrap_or(u32::MAX)
        });
        self.blocks.push(Placed { start, bytes, stack });
    }

    /// Functions of the stack with most bytes in a range, the innermost first, at most `most`; empty if no block in it is known. `profile` is
    /// the one that the index was made with.
    #[must_use]
    pub fn functions(&self, range: &Range<u64>, profile: &Profile, most: usize) -> Vec<String> {
        let shares = self.within(range);
        let frames = shares.first().map(|share| share.frames.iter().take(most)).into_iter().flatten();
        frames.map(|frame| profile.frame(*frame).function.to_string()).collect()
    }

    /// The stacks whose blocks lie in a range, sorted by bytes, largest first.
    #[must_use]
    pub fn within(&self, range: &Range<u64>) -> Vec<Share> {
        // Blocks do not overlap: of those that begin before the range, only the last can extend into it.
        let first = self.blocks.partition_point(|block| block.start < range.start).saturating_sub(1);
        let mut shares: HashMap<u32, (u64, u64)> = HashMap::new();
        for block in self.blocks.get(first..).unwrap_or_default() {
            if block.start >= range.end {
                break;
            }
            let end = block.start.saturating_add(block.bytes).min(range.end);
            let bytes = end.saturating_sub(block.start.max(range.start));
            if bytes > 0 {
                let (sum, count) = shares.entry(block.stack).or_default();
                *sum = sum.saturating_add(bytes);
                *count += 1;
            }
        }
        let share = |(stack, (live_bytes, live_allocations)): (u32, (u64, u64))| {
            let frames = Arc::clone(self.stacks.get(stack as usize)?);
            Some((stack, Share { frames, live_bytes, live_allocations }))
        };
        let mut all: Vec<(u32, Share)> = shares.into_iter().filter_map(share).collect();
        all.sort_by(|(a, left), (b, right)| right.live_bytes.cmp(&left.live_bytes).then(a.cmp(b)));
        all.into_iter().map(|(_, share)| share).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::ledger::{Event, StackLimits};
    use crate::profile::{Frame, Profile};
    use crate::units::{Addr, StackHash};

    /// Blocks of these lengths with gaps between them, each allocated by one of three stacks.
    fn ledger(blocks: &[(u64, u64, u64)]) -> (Ledger, Vec<(Range<u64>, u64)>) {
        let mut ledger = Ledger::new(0, StackLimits::default());
        let (mut at, mut model) = (0x1000u64, Vec::new());
        for &(gap, bytes, stack) in blocks {
            at += gap;
            ledger.apply(&Event::Alloc {
                addr: Addr(at),
                size_bytes: bytes,
                stack: StackHash(stack + 1),
                tid: 1,
                how: Default::default(),
                time_ns: 5,
            });
            model.push((at..at + bytes, stack));
            at += bytes;
        }
        (ledger, model)
    }

    proptest! {
        #[test]
        fn the_shares_of_a_range_equal_a_scan_of_every_block(
            blocks in proptest::collection::vec((16u64..200, 1u64..500, 0u64..3), 0..60),
            from in 0u64..0x9000, length in 0u64..0x4000,
        ) {
            let (ledger, model) = ledger(&blocks);
            let mut profile = Profile::default();
            let frames: HashMap<StackId, Arc<[FrameId]>> = ledger
                .outstanding()
                .iter()
                .map(|block| (block.stack, Arc::from([profile.intern(&Frame::named(format!("{:?}", block.stack)))])))
                .collect();
            let places = BlockIndex::of_ledger(7, &ledger, &frames);
            let range = from..from + length;
            let mut expected: HashMap<u64, (u64, u64)> = HashMap::new();
            for (block, stack) in &model {
                let bytes = block.end.min(range.end).saturating_sub(block.start.max(range.start));
                if bytes > 0 {
                    let (sum, count) = expected.entry(*stack).or_default();
                    *sum += bytes;
                    *count += 1;
                }
            }
            let mut expected: Vec<(u64, u64)> = expected.into_values().collect();
            let found = places.within(&range);
            prop_assert!(found.is_sorted_by(|a, b| a.live_bytes >= b.live_bytes));
            let mut found: Vec<(u64, u64)> = found.iter().map(|share| (share.live_bytes, share.live_allocations)).collect();
            expected.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
