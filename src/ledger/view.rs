//! Read access to a ledger: totals, stacks, ranges, blocks.

use super::{Block, Ledger, LedgerStats, Outstanding, SortedBlocks, StackHistograms, StackTotals};
use crate::units::{Addr, StackHash, StackId};

/// Sums of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerTotals {
    /// Allocations since the ledger began.
    pub allocations: u64,
    /// Bytes requested by them.
    pub allocated_bytes: u64,
    /// Frees of known blocks.
    pub frees: u64,
    /// Bytes of them.
    pub freed_bytes: u64,
    /// Blocks outstanding.
    pub live: u64,
    /// Bytes outstanding.
    pub live_bytes: u64,
    /// Highest live bytes so far.
    pub peak_bytes: u64,
    /// Blocks outstanding at that moment.
    pub peak_live: u64,
    /// When that was, CLOCK_MONOTONIC ns; 0 = no allocation yet.
    pub peak_time_ns: u64,
    /// Of the live blocks, those whose free may have been missed.
    pub doubtful: u64,
    /// Bytes of them.
    pub doubtful_bytes: u64,
}

/// One stack's account.
#[derive(Debug, Clone, Copy)]
pub struct StackView<'a> {
    /// Dense number within this ledger.
    pub id: StackId,
    /// The BPF programs' hash; 0 for [`NO_STACK`] and [`STACKS_BEYOND_LIMIT`].
    pub hash: StackHash,
    /// Frame words, leaf first. Empty if they never arrived.
    pub frames: &'a [u64],
    /// Why the walk ended (`enum fp_unwind_end`).
    pub end: u8,
    /// Its account.
    pub totals: StackTotals,
}

/// Blocks and bytes of an address range.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RangeLive {
    /// Blocks that start in the range.
    pub live: u64,
    /// Bytes of them that lie in the range, and of blocks that extend into it from below.
    pub live_bytes: u64,
}

impl Ledger {
    /// Sums of the process. Blocks in ranges that were unmapped since the last [`settle`](Self::settle) are still counted.
    pub fn totals(&self) -> LedgerTotals {
        self.totals
    }

    /// What was wrong, missing or corrected.
    pub fn stats(&self) -> LedgerStats {
        LedgerStats {
            stacks_refused: self.stacks.stacks_refused,
            frames_refused: self.stacks.frames_refused,
            stacks_undefined: self.stacks.undefined(),
            ..self.stats
        }
    }

    /// Whether anything that the ledger should hold was lost: live figures by stack are then bounded by what is doubtful, and may lack
    /// allocations.
    pub fn is_lossy(&self) -> bool {
        let LedgerStats { lost_allocs, lost_frees, gaps, .. } = self.stats;
        lost_allocs | lost_frees | gaps != 0
    }

    /// Every stack that was referred to, by id.
    pub fn stacks(&self) -> impl Iterator<Item = StackView<'_>> {
        (0..self.stacks.len()).map(|id| self.stack(StackId(id)))
    }

    /// One stack's account; all zeros for an id that was not assigned.
    pub fn stack(&self, id: StackId) -> StackView<'_> {
        StackView {
            id,
            hash: self.stacks.hash(id),
            frames: self.stacks.frames(id),
            end: self.stacks.end(id),
            totals: self.stacks.totals(id, self.peak),
        }
    }

    /// Number of stack ids assigned; ids are below it.
    pub fn stacks_len(&self) -> u32 {
        self.stacks.len()
    }

    /// Sizes and lifetimes of all blocks.
    pub fn histograms(&self) -> &StackHistograms {
        &self.histograms
    }

    /// Sizes and lifetimes of one stack's blocks; `None` beyond the limit of stacks with histograms.
    pub fn stack_histograms(&self, id: StackId) -> Option<&StackHistograms> {
        self.stacks.histograms(id)
    }

    /// The outstanding blocks. Call [`settle`](Self::settle) before.
    pub fn outstanding(&self) -> &Outstanding {
        &self.outstanding
    }

    /// Bytes of the table of blocks, slack included.
    pub fn table_bytes(&self) -> u64 {
        self.outstanding.memory_bytes()
    }

    /// Whether the free of a block may have been missed.
    #[inline]
    pub fn is_doubtful(&self, block: &Block) -> bool {
        self.doubtful_until.is_some_and(|tick| block.birth_tick <= tick)
    }

    /// When a block was allocated, CLOCK_MONOTONIC ns, to 256 ns; times more than 1.6 days ago may be given as later than they were.
    pub fn birth_ns(&self, block: &Block) -> u64 {
        self.time_ns(block.birth_tick)
    }

    /// Live blocks and bytes of a range, in one sweep over all blocks. For several ranges use [`live_by_range`](Self::live_by_range).
    pub fn live_in_range(&self, start: Addr, end: Addr) -> RangeLive {
        self.live_by_range(&[(start, end)])[0]
    }

    /// Live blocks and bytes of disjoint ranges sorted by address, in one sweep over all blocks. A block that crosses from one range
    /// into another is counted where it starts, its bytes where they lie.
    pub fn live_by_range(&self, ranges: &[(Addr, Addr)]) -> Vec<RangeLive> {
        let mut live = vec![RangeLive::default(); ranges.len()];
        for block in self.outstanding.iter() {
            let (first, last) = (block.addr.0, block.addr.0.saturating_add(block.size_bytes));
            // The first range that ends after the block's start.
            let mut index = ranges.partition_point(|&(_, end)| end.0 <= first);
            while let Some(&(start, end)) = ranges.get(index) {
                // A block of 0 bytes starts somewhere, too.
                let starts_here = (start.0..end.0).contains(&first);
                if start.0 >= last && !starts_here {
                    break;
                }
                live[index].live += u64::from(starts_here);
                live[index].live_bytes += last.min(end.0).saturating_sub(first.max(start.0));
                index += 1;
            }
        }
        live
    }

    /// The live blocks that the test accepts, sorted by address: a copy of 16 bytes per block. Call [`settle`](Self::settle) before.
    pub fn sorted_blocks(&self, keep: impl FnMut(&Block) -> bool) -> SortedBlocks {
        self.outstanding.sorted(keep)
    }
}
