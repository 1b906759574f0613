//! Outstanding allocations of a process, by address and by stack. Pure.
//!
//! A [`Ledger`] takes the [`Event`]s of one process in order and knows at each moment which blocks are outstanding, which stacks allocated
//! them, what each stack held at the process's high-water mark, and how long blocks live. It never guesses: losses are counted in
//! [`LedgerStats`], and after a loss every block whose free may have been missed is *doubtful*, by stack.
//!
//! ```text
//! Event ──▶ Ledger ──┬─▶ Outstanding   address → size, stack, time      (outstanding.rs)
//!                    ├─▶ Stacks        hash → id, frames, totals, peak  (stacks.rs)
//!                    ├─▶ Histogram     sizes and lifetimes              (histogram.rs)
//!                    └─▶ LedgerStats   what was wrong or missing        (stats.rs)
//! Ledger ──▶ totals, stacks, ranges, sorted blocks                       (view.rs)
//!
//! SampledLedger ──▶ the same of a sample, as estimates with their error  (sampled.rs, estimate.rs)
//! ```
//!
//! # Memory
//! | what | bytes |
//! |---|---|
//! | a live block, stack id included | 16 / load: 21–29 while the heap grows, at most 32 after it shrank |
//! | a live block of 16 MiB and more, or at an odd address | about 50 |
//! | a stack | 64 (hot) + 72 (cold) + about 20 (hash map) + 8 per frame; 640 for histograms of the first 32,768 |
//! | a process | about 13 KiB, and 17 KiB of table from its first block on |
//!
//! So 10 M live blocks are 210–320 MB; a table of the usual form (a hash map from address to a 24-byte value) takes 350–700 MB.
//!
//! # Time
//! Times of allocation are kept in ticks of 256 ns since the ledger's origin, 40 bits. When the clock reaches 2^40 ticks (3.3 days), the
//! origin moves forward by half of that, and older times become "at least 1.6 days ago": lifetimes beyond that fall into too low a bucket,
//! shorter ones never do. A lifetime is known to ± 256 ns; the buckets begin at 1 µs.
//!
//! # Peak by stack
//! Each new high of the live bytes gets a number. Before a stack's live bytes change for the first time after a high, they are saved
//! with its number; a stack whose saved number is not the last high's has not changed since. So the share of each stack in the
//! high-water mark is exact and costs one comparison per event.

mod estimate;
mod event;
mod histogram;
mod outstanding;
mod sampled;
mod stacks;
mod stats;
#[cfg(test)]
mod tests;
mod unmapped;
mod view;

use std::collections::HashMap;

pub use estimate::{Estimate, Moments, Sample, Weighing};
pub use event::Event;
pub use histogram::{BUCKETS, Histogram};
pub use outstanding::{Block, Outstanding, SortedBlocks};
pub use sampled::{LIVE_MAX, SampledBlock, SampledLedger, SampledStack, SampledStats, SampledTotals};
use stacks::Stacks;
pub use stacks::{NO_STACK, STACKS_BEYOND_LIMIT, StackHistograms, StackLimits, StackTotals};
pub use stats::LedgerStats;
use unmapped::UnmappedRanges;
pub use view::{LedgerTotals, RangeLive, StackView};

use crate::units::{Addr, StackHash, StackId};

/// A tick is 2^8 ns.
const TICK_SHIFT: u32 = 8;
/// Ticks that a birth can hold.
const TICKS_MAX: u64 = 1 << outstanding::BIRTH_BITS;
/// User space ends at 2^56 with five-level page tables (x86-64 `TASK_SIZE_MAX`). A block beyond is a decoding error.
const ADDRESS_SPACE_END: u64 = 1 << 56;
/// Maximum number of reallocs in progress, one per thread. Linux's default `kernel.threads-max` on a large host is a few hundred thousand,
/// but no process has more than 65,536 threads inside realloc at once; entries of ended threads may remain, though.
const REALLOCS_MAX: usize = 1 << 16;
/// Distance of the prefetch in a batch, in events: about the time of one cache miss.
const PREFETCH_AHEAD: usize = 8;

/// A realloc whose outcome is not known yet.
#[derive(Debug, Clone, Copy)]
struct OpenRealloc {
    addr: Addr,
    /// What was freed; `None` if the block was not known.
    freed: Option<Freed>,
}

/// A free that may be undone.
#[derive(Debug, Clone, Copy)]
struct Freed {
    block: Block,
    lifetime_bucket: usize,
    /// Who freed it, if recorded.
    by: Option<StackId>,
}

/// The block that each thread freed last: an allocator in front of another one forwards the same free, and both are probed.
#[derive(Debug, Clone)]
struct LatestFrees(Box<[(u32, Addr); LATEST_FREES]>);

/// Threads whose last free is remembered, by the low bits of their ids. If two share an entry, a forwarded free only counts as unknown.
const LATEST_FREES: usize = 256;

impl Default for LatestFrees {
    fn default() -> Self {
        Self(Box::new([(0, Addr(0)); LATEST_FREES]))
    }
}

impl LatestFrees {
    fn note(&mut self, tid: u32, addr: Addr) {
        self.0[tid as usize % LATEST_FREES] = (tid, addr);
    }

    fn is(&self, tid: u32, addr: Addr) -> bool {
        self.0[tid as usize % LATEST_FREES] == (tid, addr)
    }
}

/// The ledger of one process. See the module's documentation.
#[derive(Clone)]
pub struct Ledger {
    /// Tick 0, CLOCK_MONOTONIC ns.
    origin_ns: u64,
    outstanding: Outstanding,
    stacks: Stacks,
    reallocs: HashMap<u32, OpenRealloc>,
    latest_frees: LatestFrees,
    unmapped: UnmappedRanges,
    totals: LedgerTotals,
    /// Number of the last high of the live bytes, from 1.
    peak: u64,
    /// Blocks allocated at this tick or before may have been freed unobserved.
    doubtful_until: Option<u64>,
    /// The latest tick of any event.
    latest_tick: u64,
    histograms: StackHistograms,
    stats: LedgerStats,
}

impl Ledger {
    /// An empty ledger that begins at a time (CLOCK_MONOTONIC ns). Earlier events are taken as of that time.
    pub fn new(start_ns: u64, limits: StackLimits) -> Self {
        Self {
            origin_ns: start_ns,
            outstanding: Outstanding::default(),
            stacks: Stacks::new(limits),
            reallocs: HashMap::new(),
            latest_frees: LatestFrees::default(),
            unmapped: UnmappedRanges::default(),
            totals: LedgerTotals::default(),
            peak: 1,
            doubtful_until: None,
            latest_tick: 0,
            histograms: StackHistograms::default(),
            stats: LedgerStats::default(),
        }
    }

    /// The ledger of a child that was forked at this moment: its heap is a copy of the parent's. Blocks and stacks are the parent's,
    /// counts and peak begin again (with what is live as `inherited`), doubt is inherited.
    pub fn fork(&self) -> Self {
        let mut child = self.clone();
        child.stacks.restart();
        // The forking thread is the only one that exists in the child, and it is not in realloc.
        child.reallocs.clear();
        child.latest_frees = LatestFrees::default();
        let live = (self.totals.live, self.totals.live_bytes);
        child.totals = LedgerTotals {
            live: live.0,
            live_bytes: live.1,
            peak_live: live.0,
            peak_bytes: live.1,
            peak_time_ns: self.time_ns(self.latest_tick),
            doubtful: self.totals.doubtful,
            doubtful_bytes: self.totals.doubtful_bytes,
            ..LedgerTotals::default()
        };
        child.peak = 1;
        child.histograms = StackHistograms::default();
        child.stats = LedgerStats::default();
        child
    }

    /// Applies events in order. Faster than one at a time: the table's slots are prefetched.
    pub fn apply_batch(&mut self, events: &[Event<'_>]) {
        for (index, event) in events.iter().enumerate() {
            if let Some(Event::Alloc { addr, .. } | Event::Free { addr, .. } | Event::ReallocFree { addr, .. }) =
                events.get(index + PREFETCH_AHEAD)
            {
                self.outstanding.prefetch(*addr);
            }
            self.apply(event);
        }
    }

    /// Applies one event.
    #[inline]
    pub fn apply(&mut self, event: &Event<'_>) {
        match *event {
            Event::Alloc { addr, size_bytes, stack, tid, time_ns, .. } => {
                self.alloc(addr, size_bytes, stack, tid, time_ns);
            }
            Event::Free { addr, stack, tid, time_ns } => {
                self.free(addr, stack, Some(tid), time_ns);
            }
            Event::ReallocFree { addr, stack, tid, time_ns } => self.realloc_free(addr, stack, tid, time_ns),
            Event::ReallocFail { addr, tid } => self.realloc_fail(addr, tid),
            Event::DefineStack { hash, frames, end } => self.stacks.define(hash, frames, end),
            Event::Unmapped { start, end, time_ns } => self.unmap(start, end, time_ns),
            Event::Loss { alloc, free, other, time_ns } => self.loss(alloc, free, other, time_ns),
            Event::Gap { start_ns, end_ns } => self.gap(start_ns, end_ns),
        }
    }

    /// The id of a stack, assigned now if it is new; `None` for hash 0.
    pub fn stack_id(&mut self, hash: StackHash) -> Option<StackId> {
        (hash.0 != 0).then(|| self.stacks.id(hash))
    }

    /// The id of a stack that an event named; `None` for others.
    #[must_use]
    pub fn known_stack(&self, hash: StackHash) -> Option<StackId> {
        self.stacks.known(hash)
    }

    /// Requested bytes and stack of the live block that starts at an address.
    #[must_use]
    pub fn live_block(&self, addr: Addr) -> Option<(u64, StackHash)> {
        let block = self.outstanding.get(addr)?;
        Some((block.size_bytes, self.stacks.hash_of(block.stack)?))
    }

    /// Removes the blocks of ranges that were unmapped.
    pub fn settle(&mut self) {
        if self.unmapped.is_empty() {
            return;
        }
        let unmapped = std::mem::take(&mut self.unmapped);
        let filter = unmapped.filter();
        let gone = |block: &Block| filter.may_cover(block.addr.0) && unmapped.covers(block.addr.0, block.birth_tick);
        // Nearly always there is nothing to remove, and checking is cheaper than sweeping the table.
        if self.outstanding.iter().any(|block| gone(&block)) {
            let (blocks, bytes) = self.correct_where(gone);
            self.stats.unmapped += blocks;
            self.stats.unmapped_bytes += bytes;
        }
    }

    /// Removes the blocks that are proven free, for instance by a census: those for which the test returns false. Counted as corrections.
    /// Returns their number and bytes. Call [`settle`](Self::settle) before.
    pub fn prune(&mut self, mut is_live: impl FnMut(&Block) -> bool) -> (u64, u64) {
        let (blocks, bytes) = self.correct_where(|block| !is_live(block));
        self.stats.pruned += blocks;
        self.stats.pruned_bytes += bytes;
        (blocks, bytes)
    }

    /// As [`prune`](Self::prune), but only for blocks allocated before a time (CLOCK_MONOTONIC ns), to which the proof applies.
    pub fn prune_older(&mut self, before_ns: u64, mut is_live: impl FnMut(&Block) -> bool) -> (u64, u64) {
        let before_tick = before_ns.saturating_sub(self.origin_ns) >> TICK_SHIFT;
        self.prune(|block| block.birth_tick >= before_tick || is_live(block))
    }

    fn correct_where(&mut self, mut gone: impl FnMut(&Block) -> bool) -> (u64, u64) {
        let mut outstanding = std::mem::take(&mut self.outstanding);
        let (mut blocks, mut bytes) = (0, 0);
        outstanding.retain(|block| {
            if !gone(block) {
                return true;
            }
            self.correct(block);
            blocks += 1;
            bytes += block.size_bytes;
            false
        });
        self.outstanding = outstanding;
        (blocks, bytes)
    }

    #[inline]
    fn tick(&mut self, time_ns: u64) -> u64 {
        let mut tick = time_ns.saturating_sub(self.origin_ns) >> TICK_SHIFT;
        if tick >= TICKS_MAX {
            self.rebase(tick);
            tick = time_ns.saturating_sub(self.origin_ns) >> TICK_SHIFT;
        }
        self.latest_tick = self.latest_tick.max(tick);
        tick
    }

    /// Moves the origin forward so that a tick falls into the upper half of a birth's range.
    #[cold]
    fn rebase(&mut self, tick: u64) {
        self.settle();
        let half = TICKS_MAX / 2;
        let ticks = (tick / half - 1) * half;
        self.origin_ns = self.origin_ns.saturating_add(ticks << TICK_SHIFT);
        self.latest_tick = self.latest_tick.saturating_sub(ticks);
        // Births before the new origin become 0 if they are doubtful and 1 if not, so that they can still be distinguished.
        let until = self.doubtful_until;
        let birth = |old: u64| {
            let earliest = u64::from(until.is_some_and(|until| old > until));
            old.saturating_sub(ticks).max(earliest)
        };
        self.outstanding.rebase(birth);
        for open in self.reallocs.values_mut() {
            if let Some(freed) = &mut open.freed {
                freed.block.birth_tick = birth(freed.block.birth_tick);
            }
        }
        self.doubtful_until = until.map(|until| until.saturating_sub(ticks));
    }

    fn time_ns(&self, tick: u64) -> u64 {
        self.origin_ns.saturating_add(tick << TICK_SHIFT)
    }

    #[inline]
    fn alloc(&mut self, addr: Addr, size_bytes: u64, stack: StackHash, tid: u32, time_ns: u64) {
        if !self.reallocs.is_empty() {
            self.reallocs.remove(&tid);
        }
        let plausible = addr.0 != 0
            && addr.0.checked_add(size_bytes).is_some_and(|end| end <= ADDRESS_SPACE_END)
            && self.totals.live_bytes.checked_add(size_bytes).is_some();
        if !plausible {
            self.stats.implausible += 1;
            return;
        }
        let birth_tick = self.tick(time_ns);
        let block = Block { addr, size_bytes, stack: self.stacks.id(stack), birth_tick };
        if let Some(old) = self.outstanding.insert(&block) {
            self.displace(&old);
        }
        let size_bucket = Histogram::bucket(size_bytes);
        self.stacks.alloc(block.stack, size_bytes, size_bucket, self.peak);
        self.histograms.sizes.add(size_bucket);
        self.totals.allocations += 1;
        self.totals.allocated_bytes = self.totals.allocated_bytes.saturating_add(size_bytes);
        self.enter(&block, time_ns);
    }

    /// A block whose address was allocated again.
    #[cold]
    fn displace(&mut self, old: &Block) {
        self.correct(old);
        if self.unmapped.covers(old.addr.0, old.birth_tick) {
            self.stats.unmapped += 1;
            self.stats.unmapped_bytes += old.size_bytes;
        } else {
            self.stats.missed_frees += 1;
            self.stats.missed_free_bytes += old.size_bytes;
        }
    }

    /// Accounts for a block that is removed without a free event. The caller removes it from the table.
    fn correct(&mut self, block: &Block) {
        self.stacks.correct(block.stack, block.size_bytes, self.peak);
        self.leave(block);
    }

    /// Updates the process's sums for a block that becomes live.
    #[inline]
    fn enter(&mut self, block: &Block, time_ns: u64) {
        let totals = &mut self.totals;
        totals.live += 1;
        totals.live_bytes += block.size_bytes;
        if totals.live_bytes > totals.peak_bytes {
            (totals.peak_bytes, totals.peak_live, totals.peak_time_ns) = (totals.live_bytes, totals.live, time_ns);
            self.peak += 1;
        }
        if self.is_doubtful(block) {
            self.doubt(block, true);
        }
    }

    /// Updates the process's sums for a block that is no longer live.
    #[inline]
    fn leave(&mut self, block: &Block) {
        self.totals.live -= 1;
        self.totals.live_bytes -= block.size_bytes;
        if self.is_doubtful(block) {
            self.doubt(block, false);
        }
    }

    #[cold]
    fn doubt(&mut self, block: &Block, comes: bool) {
        self.stacks.doubt(block.stack, block.size_bytes, comes);
        if comes {
            self.totals.doubtful += 1;
            self.totals.doubtful_bytes += block.size_bytes;
        } else {
            self.totals.doubtful -= 1;
            self.totals.doubtful_bytes -= block.size_bytes;
        }
    }

    #[inline]
    /// `tid`: the thread, if the free is a call of its own, which a realloc of the thread may have made to free its old block.
    fn free(&mut self, addr: Addr, stack: StackHash, tid: Option<u32>, time_ns: u64) -> Option<Freed> {
        let tick = self.tick(time_ns);
        let Some(block) = self.outstanding.remove(addr) else {
            if tid.and_then(|tid| self.reallocs.get(&tid)).is_some_and(|open| open.addr == addr) {
                return None;
            }
            if tid.is_some_and(|tid| self.latest_frees.is(tid, addr)) {
                self.stats.handed_on_frees += 1;
                return None;
            }
            self.stats.unknown_frees += 1;
            self.stats.unknown_frees_after_loss += u64::from(self.is_lossy());
            return None;
        };
        if let Some(tid) = tid {
            self.latest_frees.note(tid, addr);
        }
        let lifetime_us = (tick.saturating_sub(block.birth_tick) << TICK_SHIFT) / 1000;
        let bucket = Histogram::bucket(lifetime_us);
        self.stacks.free(block.stack, block.size_bytes, bucket, self.peak);
        self.histograms.lifetimes.add(bucket);
        self.totals.frees += 1;
        self.totals.freed_bytes = self.totals.freed_bytes.saturating_add(block.size_bytes);
        self.leave(&block);
        let by = (stack.0 != 0).then(|| self.stacks.id(stack));
        if let Some(by) = by {
            self.stacks.freed_here(by, block.size_bytes);
        }
        Some(Freed { block, lifetime_bucket: bucket, by })
    }

    fn realloc_free(&mut self, addr: Addr, stack: StackHash, tid: u32, time_ns: u64) {
        let freed = self.free(addr, stack, None, time_ns);
        if self.reallocs.len() < REALLOCS_MAX || self.reallocs.contains_key(&tid) {
            self.reallocs.insert(tid, OpenRealloc { addr, freed });
        } else {
            self.stats.reallocs_refused += 1;
        }
    }

    fn realloc_fail(&mut self, addr: Addr, tid: u32) {
        let open = self.reallocs.remove(&tid).filter(|open| open.addr == addr);
        let fits =
            |freed: &Freed| self.outstanding.get(addr).is_none() && self.totals.live_bytes.checked_add(freed.block.size_bytes).is_some();
        let Some(Freed { block, lifetime_bucket, by }) = open.and_then(|open| open.freed).filter(fits) else {
            self.stats.reallocs_unmatched += 1;
            return;
        };
        self.outstanding.insert(&block);
        self.stacks.unfree(block.stack, block.size_bytes, lifetime_bucket, self.peak);
        if let Some(by) = by {
            self.stacks.unfreed_here(by, block.size_bytes);
        }
        self.histograms.lifetimes.take(lifetime_bucket);
        self.totals.frees -= 1;
        self.totals.freed_bytes = self.totals.freed_bytes.saturating_sub(block.size_bytes);
        self.enter(&block, self.time_ns(self.latest_tick));
        self.stats.reallocs_failed += 1;
    }

    fn unmap(&mut self, start: Addr, end: Addr, time_ns: u64) {
        let tick = self.tick(time_ns);
        self.unmapped.add(start.0, end.0, tick);
        if self.unmapped.is_full() {
            self.settle();
        }
    }

    fn loss(&mut self, alloc: u64, free: u64, other: u64, time_ns: u64) {
        let stats = &mut self.stats;
        stats.lost_allocs = stats.lost_allocs.saturating_add(alloc);
        stats.lost_frees = stats.lost_frees.saturating_add(free);
        stats.lost_other = stats.lost_other.saturating_add(other);
        // A lost allocation is missing from the ledger, but it cannot make a freed block look alive.
        if free > 0 {
            self.doubt_all(time_ns);
        }
    }

    fn gap(&mut self, start_ns: u64, end_ns: u64) {
        self.stats.gaps += 1;
        self.stats.gap_ns = self.stats.gap_ns.saturating_add(end_ns.saturating_sub(start_ns));
        self.doubt_all(end_ns);
    }

    /// Marks every block as doubtful that is live, or that turns out to have been allocated before.
    fn doubt_all(&mut self, time_ns: u64) {
        let tick = self.tick(time_ns);
        self.doubtful_until = Some(self.latest_tick.max(tick));
        self.stacks.doubt_all();
        self.totals.doubtful = self.totals.live;
        self.totals.doubtful_bytes = self.totals.live_bytes;
    }
}
