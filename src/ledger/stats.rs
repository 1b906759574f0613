//! Counters of inconsistent or missing input of a ledger.

/// Counters of inconsistent, missing or corrected input. Shown with every figure from the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LedgerStats {
    /// Frees of blocks that the ledger does not know: allocated before the recording, or their allocation was lost. Their sizes are
    /// unknown.
    pub unknown_frees: u64,
    /// Of these, frees after allocation records were lost or not observed: they may be of lost allocations.
    pub unknown_frees_after_loss: u64,
    /// Frees of a block that the same thread had freed just before: an allocator in front of another one forwards each free.
    pub handed_on_frees: u64,
    /// Addresses allocated again without a free in between: the free was missed, and the old block was closed.
    pub missed_frees: u64,
    /// Bytes of these blocks.
    pub missed_free_bytes: u64,
    /// Blocks removed with their mapping, without a free.
    pub unmapped: u64,
    /// Bytes of them.
    pub unmapped_bytes: u64,
    /// Blocks that a census proved free.
    pub pruned: u64,
    /// Bytes of them.
    pub pruned_bytes: u64,
    /// Reallocs that failed: the free was undone.
    pub reallocs_failed: u64,
    /// Failed reallocs whose free was not known, or whose address was in use again.
    pub reallocs_unmatched: u64,
    /// Reallocs that could not be tracked: too many threads. If such a realloc fails, its block is missing.
    pub reallocs_refused: u64,
    /// Allocation events with an impossible address or size.
    pub implausible: u64,
    /// Allocation records lost.
    pub lost_allocs: u64,
    /// Free records lost.
    pub lost_frees: u64,
    /// Other records lost.
    pub lost_other: u64,
    /// Periods without observation.
    pub gaps: u64,
    /// Their total length.
    pub gap_ns: u64,
    /// Stack definitions refused by the limit of stacks; their allocations are under `[stacks beyond the limit]`.
    pub stacks_refused: u64,
    /// Stack definitions whose frames were refused by the limit of frames.
    pub frames_refused: u64,
    /// Stacks that were referred to but whose frames never arrived.
    pub stacks_undefined: u64,
}
