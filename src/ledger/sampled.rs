//! The ledger of a sampled process: live bytes and objects by stack, with their errors. Pure.
//!
//! An emitter in the process (see [`crate::sampler`]) reports some allocations, each with the bytes it represents, and the frees of exactly
//! those. So the live part of the sample is known exactly, and the rest is estimated from the weights ([`super::estimate`]).
//!
//! # Memory
//! A sampled live block takes about 80 bytes; the sampler keeps at most 65,535 of them, and more than [`LIVE_MAX`] are refused here.

mod sums;

use std::collections::HashMap;

use sums::{Distances, Shares, Sums};

use super::Histogram;
use super::estimate::{Estimate, Moments, Sample, Weighing, WeighingGuess};
use super::histogram::BUCKETS;
use super::stacks::{StackLimits, Stacks};
use super::unmapped::UnmappedRanges;
use crate::units::{Addr, StackHash, StackId};

/// Maximum number of live sampled blocks: 16 times what fragprof's sampler keeps, some 80 MB.
pub const LIVE_MAX: usize = 1 << 20;
/// The largest weight that is accepted, and the largest sum of live ones: no process has 2^56 bytes of address space.
const WEIGHT_BYTES_MAX: u64 = 1 << 56;

/// A live sampled block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampledBlock {
    /// Start of the block.
    pub addr: Addr,
    /// Its size and the bytes that it represents.
    pub sample: Sample,
    /// The stack that requested it.
    pub stack: StackId,
    /// When, CLOCK_MONOTONIC ns.
    pub birth_ns: u64,
}

/// Counters of inconsistent or missing input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampledStats {
    /// Frees of blocks that are not known: sampled for an earlier listener, or their record was lost.
    pub unknown_frees: u64,
    /// Blocks reported at the address of a live one: the free of that one was missed.
    pub missed_frees: u64,
    /// Blocks removed with their mapping.
    pub unmapped: u64,
    /// Blocks that a census proved free.
    pub pruned: u64,
    /// Records with an impossible address or weight.
    pub implausible: u64,
    /// Blocks refused because [`LIVE_MAX`] are live already: they count as allocated, not as live.
    pub refused: u64,
    /// Records lost: allocations.
    pub lost_allocs: u64,
    /// Records lost: frees.
    pub lost_frees: u64,
    /// Periods without observation.
    pub gaps: u64,
    /// Their total length.
    pub gap_ns: u64,
}

/// One stack's account. Counts of samples are as reported; estimates are of all allocations.
#[derive(Debug, Clone, Copy)]
pub struct SampledStack<'a> {
    /// Dense number within this ledger.
    pub id: StackId,
    /// Frame words, leaf first. Empty if they never arrived.
    pub frames: &'a [u64],
    /// Why the walk ended (`enum fp_unwind_end`).
    pub end: u8,
    /// Sampled allocations.
    pub samples: u64,
    /// Of them, those that are live.
    pub live_samples: u64,
    /// Allocations.
    pub allocations: Estimate,
    /// Bytes requested by them.
    pub allocated_bytes: Estimate,
    /// Live blocks.
    pub live: Estimate,
    /// Live bytes.
    pub live_bytes: Estimate,
    /// Bytes live when the process's live bytes were highest.
    pub peak_bytes: Estimate,
    /// Of the live bytes, those whose free may have been missed.
    pub doubtful_bytes: Estimate,
}

/// Sums of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SampledTotals {
    /// Sampled allocations.
    pub samples: u64,
    /// Of them, those that are live.
    pub live_samples: u64,
    /// Allocations.
    pub allocations: Estimate,
    /// Bytes requested by them.
    pub allocated_bytes: Estimate,
    /// Live blocks.
    pub live: Estimate,
    /// Live bytes.
    pub live_bytes: Estimate,
    /// Highest live bytes.
    pub peak_bytes: Estimate,
}

/// The sampled ledger of one process.
#[derive(Clone)]
pub struct SampledLedger {
    /// Counts samples and sums weights; the estimates are made from the moments.
    stacks: Stacks,
    allocated: Vec<Sums>,
    all: Sums,
    live: HashMap<u64, SampledBlock>,
    live_weight_bytes: u64,
    peak_weight_bytes: u64,
    /// Number of the last high of the live weight, from 1 (see [`super`]).
    peak: u64,
    sizes: Shares,
    lifetimes: Shares,
    unmapped: UnmappedRanges,
    /// Blocks allocated at this time or before may have been freed unobserved.
    doubtful_until_ns: Option<u64>,
    latest_ns: u64,
    interval_bytes: Option<u64>,
    distances: Distances,
    guess: WeighingGuess,
    stats: SampledStats,
}

impl SampledLedger {
    /// An empty ledger. `interval_bytes`: the mean distance of the emitter's sample points, if it states one.
    pub fn new(interval_bytes: Option<u64>, limits: StackLimits) -> Self {
        Self {
            stacks: Stacks::new(limits),
            allocated: Vec::new(),
            all: Sums::default(),
            live: HashMap::new(),
            live_weight_bytes: 0,
            peak_weight_bytes: 0,
            peak: 1,
            sizes: Shares::default(),
            lifetimes: Shares::default(),
            unmapped: UnmappedRanges::default(),
            doubtful_until_ns: None,
            latest_ns: 0,
            interval_bytes: interval_bytes.filter(|&bytes| bytes > 0),
            distances: Distances::default(),
            guess: WeighingGuess::default(),
            stats: SampledStats::default(),
        }
    }

    /// The ledger of a child that was forked at this moment: it has a copy of the blocks, and has allocated nothing itself.
    pub fn fork(&self) -> Self {
        let mut child = self.clone();
        child.stacks.restart();
        child.allocated = Vec::new();
        child.all = Sums::default();
        child.peak_weight_bytes = child.live_weight_bytes;
        child.peak = 1;
        child.sizes = Shares::default();
        child.lifetimes = Shares::default();
        child.distances = Distances::default();
        child.stats = SampledStats::default();
        child
    }

    /// Sets the mean distance of sample points that the emitter states.
    pub fn set_interval(&mut self, interval_bytes: Option<u64>) {
        self.interval_bytes = interval_bytes.filter(|&bytes| bytes > 0).or(self.interval_bytes);
    }

    /// A sampled block was allocated.
    pub fn alloc(&mut self, addr: Addr, sample: Sample, stack: StackHash, time_ns: u64) {
        let Sample { size_bytes, weight_bytes, .. } = sample;
        self.latest_ns = self.latest_ns.max(time_ns);
        let plausible = addr.0 != 0
            && weight_bytes > 0
            && size_bytes <= WEIGHT_BYTES_MAX
            && self.live_weight_bytes.checked_add(weight_bytes).is_some_and(|sum| sum <= WEIGHT_BYTES_MAX);
        if !plausible {
            self.stats.implausible += 1;
            return;
        }
        if let Some(old) = self.live.remove(&addr.0) {
            let unmapped = self.unmapped.covers(old.addr.0, old.birth_ns);
            self.correct(&old);
            *(if unmapped { &mut self.stats.unmapped } else { &mut self.stats.missed_frees }) += 1;
        }
        let id = self.stacks.id(stack);
        let index = id.0 as usize;
        if index >= self.allocated.len() {
            self.allocated.resize(index + 1, Sums::default());
        }
        self.allocated[index].add(sample);
        self.all.add(sample);
        self.distances.add(sample);
        if sample.interval_bytes == 0 {
            self.guess.see(size_bytes, weight_bytes);
        }
        let bucket = Histogram::bucket(size_bytes);
        self.sizes.add(bucket, sample);
        self.stacks.alloc(id, weight_bytes, bucket, self.peak);
        let block = SampledBlock { addr, sample, stack: id, birth_ns: time_ns };
        self.live_weight_bytes += weight_bytes;
        if self.live.len() >= LIVE_MAX {
            self.stats.refused += 1;
            self.correct(&block);
            return;
        }
        self.live.insert(addr.0, block);
        if self.live_weight_bytes > self.peak_weight_bytes {
            self.peak_weight_bytes = self.live_weight_bytes;
            self.peak += 1;
        }
    }

    /// A block that may have been sampled is about to be freed.
    pub fn free(&mut self, addr: Addr, time_ns: u64) {
        self.latest_ns = self.latest_ns.max(time_ns);
        let Some(block) = self.live.remove(&addr.0) else {
            self.stats.unknown_frees += 1;
            return;
        };
        let bucket = Histogram::bucket(time_ns.saturating_sub(block.birth_ns) / 1000);
        self.stacks.free(block.stack, block.sample.weight_bytes, bucket, self.peak);
        self.lifetimes.add(bucket, block.sample);
        self.live_weight_bytes -= block.sample.weight_bytes;
    }

    /// The frames behind a stack hash.
    pub fn define_stack(&mut self, hash: StackHash, frames: &[u64], end: u8) {
        self.stacks.define(hash, frames, end);
    }

    /// The range is no longer mapped: no block allocated before is live in it.
    pub fn unmap(&mut self, start: Addr, end: Addr, time_ns: u64) {
        self.latest_ns = self.latest_ns.max(time_ns);
        if start.0 < end.0 {
            self.unmapped.add(start.0, end.0, time_ns);
        }
        if self.unmapped.is_full() {
            self.settle();
        }
    }

    /// Records were lost.
    pub fn loss(&mut self, allocs: u64, frees: u64, time_ns: u64) {
        self.stats.lost_allocs = self.stats.lost_allocs.saturating_add(allocs);
        self.stats.lost_frees = self.stats.lost_frees.saturating_add(frees);
        if frees > 0 {
            self.doubtful_until_ns = Some(self.latest_ns.max(time_ns));
        }
    }

    /// Nothing was observed for a while.
    pub fn gap(&mut self, start_ns: u64, end_ns: u64) {
        self.stats.gaps += 1;
        self.stats.gap_ns = self.stats.gap_ns.saturating_add(end_ns.saturating_sub(start_ns));
        self.doubtful_until_ns = Some(self.latest_ns.max(end_ns));
    }

    /// Removes the blocks of ranges that were unmapped.
    pub fn settle(&mut self) {
        if self.unmapped.is_empty() {
            return;
        }
        let unmapped = std::mem::take(&mut self.unmapped);
        let gone: Vec<SampledBlock> = self.live.values().filter(|b| unmapped.covers(b.addr.0, b.birth_ns)).copied().collect();
        self.stats.unmapped += gone.len() as u64;
        self.take_out(&gone);
    }

    /// Removes doubtful blocks that a census proves free: those for which the test returns false.
    pub fn prune_doubtful(&mut self, mut is_live: impl FnMut(&SampledBlock) -> bool) {
        let dead: Vec<SampledBlock> = self.live.values().filter(|block| self.is_doubtful(block) && !is_live(block)).copied().collect();
        self.stats.pruned += dead.len() as u64;
        self.take_out(&dead);
    }

    fn take_out(&mut self, blocks: &[SampledBlock]) {
        for block in blocks {
            self.live.remove(&block.addr.0);
            self.correct(block);
        }
    }

    fn correct(&mut self, block: &SampledBlock) {
        self.stacks.correct(block.stack, block.sample.weight_bytes, self.peak);
        self.live_weight_bytes -= block.sample.weight_bytes;
    }

    fn is_doubtful(&self, block: &SampledBlock) -> bool {
        self.doubtful_until_ns.is_some_and(|until| block.birth_ns <= until)
    }

    /// The emitter's weighting where samples do not state it: as it states at its start, or as its weights show.
    pub fn weighing(&self) -> Weighing {
        if self.distances.changed() {
            return Weighing::Changing;
        }
        self.interval_bytes.map_or_else(|| self.guess.weighing(), |interval_bytes| Weighing::Points { interval_bytes })
    }

    /// The mean distance of sample points, where it is known: from the samples, or as the emitter states it before there are any.
    pub fn interval_bytes(&self) -> Option<u64> {
        self.distances.mean_bytes().or(match self.weighing() {
            Weighing::Points { interval_bytes } => Some(interval_bytes),
            Weighing::Inverse | Weighing::Changing => None,
        })
    }

    /// The longest mean distance that a sample was drawn with, if not all were drawn with the same.
    pub fn longest_interval_bytes(&self) -> Option<u64> {
        self.distances.changed().then_some(self.distances.longest_bytes)
    }

    /// Whether anything was lost.
    pub fn is_lossy(&self) -> bool {
        self.stats.lost_allocs | self.stats.lost_frees | self.stats.gaps | self.stats.refused != 0
    }

    /// What was wrong or missing.
    pub fn stats(&self) -> SampledStats {
        self.stats
    }

    /// Stacks that arrived after the limit was reached, and stacks that were referred to but never arrived.
    pub fn stacks_missing(&self) -> (u64, u64) {
        (self.stacks.stacks_refused, self.stacks.undefined())
    }

    /// Estimated frees by the lifetime of the block in microseconds.
    pub fn lifetimes(&self) -> [u64; BUCKETS] {
        self.lifetimes.rounded()
    }

    /// Estimated allocations by the bytes requested.
    pub fn sizes(&self) -> [u64; BUCKETS] {
        self.sizes.rounded()
    }

    /// The live sampled blocks, in no order. Call [`settle`](Self::settle) before.
    pub fn live_blocks(&self) -> impl Iterator<Item = &SampledBlock> {
        self.live.values()
    }

    /// Sums of the process.
    pub fn totals(&self) -> SampledTotals {
        let weighing = self.weighing();
        let mut live = Sums::default();
        self.live.values().for_each(|block| live.add(block.sample));
        SampledTotals {
            samples: self.all.bytes.samples,
            live_samples: live.bytes.samples,
            allocations: self.all.objects.estimate_count(weighing),
            allocated_bytes: self.all.bytes.estimate(weighing),
            live: live.objects.estimate_count(weighing),
            live_bytes: live.bytes.estimate(weighing),
            peak_bytes: in_proportion(self.peak_weight_bytes, self.all.bytes.estimate(weighing)),
        }
    }

    /// A stack's frame words and why its walk ended.
    pub fn stack_words(&self, id: StackId) -> (&[u64], u8) {
        (self.stacks.frames(id), self.stacks.end(id))
    }

    /// Every stack that was referred to, by id. Call [`settle`](Self::settle) before.
    pub fn stacks(&self) -> Vec<SampledStack<'_>> {
        let weighing = self.weighing();
        let count = self.stacks.len() as usize;
        let (mut live, mut doubtful) = (vec![Sums::default(); count], vec![Moments::default(); count]);
        for block in self.live.values() {
            if let (Some(live), Some(doubt)) = (live.get_mut(block.stack.0 as usize), doubtful.get_mut(block.stack.0 as usize)) {
                live.add(block.sample);
                if self.is_doubtful(block) {
                    doubt.add(block.sample.size_bytes as f64, block.sample);
                }
            }
        }
        (live.iter().zip(&doubtful).enumerate())
            .map(|(index, (live, doubtful))| {
                let id = StackId(index as u32);
                let allocated = self.allocated.get(index).copied().unwrap_or_default();
                let allocated_bytes = allocated.bytes.estimate(weighing);
                let at_peak = self.stacks.totals(id, self.peak).at_peak_bytes;
                // A forked child's blocks may be of stacks with which it has not allocated itself.
                let reference = if allocated_bytes.value > 0.0 { allocated_bytes } else { live.bytes.estimate(weighing) };
                SampledStack {
                    id,
                    frames: self.stacks.frames(id),
                    end: self.stacks.end(id),
                    samples: allocated.bytes.samples,
                    live_samples: live.bytes.samples,
                    allocations: allocated.objects.estimate_count(weighing),
                    allocated_bytes,
                    live: live.objects.estimate_count(weighing),
                    live_bytes: live.bytes.estimate(weighing),
                    peak_bytes: in_proportion(at_peak, reference),
                    doubtful_bytes: doubtful.estimate(weighing),
                }
            })
            .collect()
    }
}

/// The estimate of a part whose weight is known: its variance per byte is taken as that of a whole.
fn in_proportion(weight_bytes: u64, whole: Estimate) -> Estimate {
    let value = weight_bytes as f64;
    let variance = if whole.value > 0.0 { value * whole.variance / whole.value } else { 0.0 };
    Estimate { value, variance }
}

#[cfg(test)]
mod tests;
