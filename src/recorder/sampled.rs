//! The heap at the end of a recording whose source is an emitter: the allocator's own account joined with the sample by address.
//!
//! The census knows every live chunk, and the sample knows of some of them whose they are and how many others each stands for. What a
//! chunk has (its bytes, the free bytes that it pins or blocks) is so estimated by stack as any other sum over blocks
//! ([`crate::ledger::Moments`]).
//!
//! What is left is split in two by a census at the beginning. A live chunk that was not there then was made since, so what the sample
//! does not explain of those chunks is *unattributed*. One that was there, at the same address with the same size, is from before, or
//! was made since at the address of one that was freed; of the latter the sample tells, so what it does not explain is from *before the
//! attach*. Both differences are unbiased, with the error of the sample.

use std::collections::HashMap;
use std::time::Duration;

use super::heap::{Before, census_of, unusable};
use crate::census::HeapWalk;
use crate::census::chunks::Block;
use crate::census::live::LiveMemory;
use crate::census::resident::{heap_ranges, pages_of};
use crate::census::{ChunkState, HeapAccount, Level, Taken};
use crate::fragmentation::blocked::blocked_space;
use crate::fragmentation::survey::Survey;
use crate::heap::pages::{Owner, Span};
use crate::ledger::{Estimate, Moments, SampledBlock, SampledLedger, Weighing};
use crate::profile::HeapSummary;
use crate::target::Process;
use crate::units::{Pid, StackId};

/// Sampled blocks that can be told apart in one survey: its owners are numbers of 20 bits, and two are for the unsampled.
const SURVEYED_MAX: usize = (1 << 20) - 2;

/// Censuses tried at most: one that meets a heap in full swing, or a program that makes its first arena, may lose its way.
const TRIES: u32 = 3;
/// Between them.
const PAUSE: Duration = Duration::from_millis(100);

/// A usable census, or why there is none.
fn full_census(pid: Pid) -> Result<(LiveMemory, Taken), String> {
    let mut taken = usable_census(pid);
    for _ in 1..TRIES {
        if taken.is_ok() {
            break;
        }
        std::thread::sleep(PAUSE);
        taken = usable_census(pid);
    }
    taken
}

fn usable_census(pid: Pid) -> Result<(LiveMemory, Taken), String> {
    let process = Process::open(pid).map_err(|error| error.to_string())?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).map_err(|error| error.to_string())?;
    let taken = census_of(&memory, pid, &comm, Level::Full).map_err(|error| error.to_string())?;
    match unusable(&taken) {
        Some(reason) => Err(reason),
        None if taken.heaps.is_empty() => Err("no heap was found whose allocator a census can read".to_owned()),
        None => Ok((memory, taken)),
    }
}

/// What some chunks hold and keep.
#[derive(Debug, Clone, Copy, Default)]
struct Sums<T> {
    objects: T,
    live: T,
    pinned: T,
    blocked: T,
}

/// The same as estimates.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shares {
    /// Live chunks.
    pub chunks: Estimate,
    /// Live bytes with the allocator's rounding.
    pub chunk_bytes: Estimate,
    /// Free bytes on pages that they keep.
    pub pinned_bytes: Estimate,
    /// Free pages under the highest of a heap.
    pub blocked_bytes: Estimate,
}

/// What the heap looked like, with what stacks hold and keep of it.
#[derive(Debug, Default)]
pub struct SampledPicture {
    /// The ladder.
    pub summary: HeapSummary,
    /// By stack.
    pub by_stack: HashMap<StackId, Shares>,
    /// What was there before; `None` = it is not known, and is part of the unattributed.
    pub before: Option<Shares>,
    /// What neither the sample nor the past explains: allocations that the emitter does not hear of.
    pub unattributed: Shares,
    /// All stacks together.
    pub attributed: Shares,
    /// Sampled blocks that were freed between the end of the recording and the census, or whose free was missed.
    pub gone: u64,
    /// Sampled blocks beyond what one survey takes.
    pub beyond: u64,
    /// An allocator tells how much lives, not which chunks: stacks have their bytes as asked for, and nothing is known of pages.
    pub by_sums: bool,
}

/// Looks at the heap of a process that still lives.
///
/// # Errors
/// Why no census could be joined: the process is gone, no census reads its allocator, or the heap changed too much under each try.
pub fn picture(pid: Pid, ledger: &mut SampledLedger, before: &Before) -> Result<SampledPicture, String> {
    ledger.settle();
    let (memory, taken) = full_census(pid)?;
    let is_live = |block: &SampledBlock| taken.heaps.iter().any(|walk| walk.chunks.is_live(block.addr.0) == Some(true));
    ledger.prune_doubtful(is_live);
    let mut blocks: Vec<SampledBlock> = ledger.live_blocks().copied().collect();
    blocks.sort_unstable_by_key(|block| block.addr);
    let beyond = blocks.len().saturating_sub(SURVEYED_MAX) as u64;
    blocks.truncate(SURVEYED_MAX);

    let before = Some(before).filter(|before| !matches!(before, Before::Unknown));
    let mut join = Join { blocks: &blocks, before, seen: vec![false; blocks.len()], ..Join::default() };
    for walk in &taken.heaps {
        if walk.chunks.is_empty() {
            join.by_sums = true;
            join.new.whole.objects += walk.account.live_allocations.unwrap_or(0);
            join.new.whole.live += walk.account.live_bytes.unwrap_or(0);
            continue;
        }
        join.walk(&memory, walk).ok_or("its pages could not be looked at")?;
    }
    if join.by_sums {
        join.add_unseen();
    }
    let by_sums = join.by_sums;
    let mut picture = join.picture(ledger.weighing());
    (picture.beyond, picture.by_sums) = (beyond, by_sums);
    let sum = |of: fn(&HeapAccount) -> Option<u64>| taken.census.heaps.iter().filter_map(of).reduce(u64::saturating_add);
    picture.summary = HeapSummary {
        extent_bytes: sum(|heap| Some(heap.extent_bytes)),
        resident_bytes: sum(|heap| Some(heap.resident_bytes)),
        live_bytes: sum(|heap| heap.live_bytes),
        trimmable_bytes: sum(|heap| heap.trimmable_bytes),
        pinned_bytes: sum(|heap| heap.pinned_bytes),
        unknown_bytes: sum(|heap| Some(heap.unknown_bytes)),
    };
    Ok(picture)
}

/// The join under way.
#[derive(Default)]
struct Join<'a> {
    /// Sampled and live, by address.
    blocks: &'a [SampledBlock],
    /// What was there when the emitter was heard already; `None` = it is not known.
    before: Option<&'a Before>,
    seen: Vec<bool>,
    by_stack: HashMap<StackId, Sums<Moments>>,
    all: Sums<Moments>,
    /// Chunks that may be from before, and chunks that were made since: all of them, and what the sample says of them.
    old: Group,
    new: Group,
    /// A heap gave its sums alone.
    by_sums: bool,
}

#[derive(Default, Clone, Copy)]
struct Group {
    whole: Sums<u64>,
    sampled: Sums<Moments>,
}

impl Join<'_> {
    /// The number under which a live chunk is surveyed: that of its sampled block, or one behind them for each group of the others.
    fn number(&self, block: &Block) -> usize {
        let unsampled = || self.blocks.len() + usize::from(!self.is_old(block));
        self.blocks.binary_search_by_key(&block.addr, |sampled| sampled.addr.0).unwrap_or_else(|_| unsampled())
    }

    fn is_old(&self, block: &Block) -> bool {
        match self.before {
            Some(Before::Heap(start)) => start.had(block.chunk.start, block.chunk.bytes),
            _ => false,
        }
    }

    fn walk(&mut self, memory: &LiveMemory, walk: &HeapWalk) -> Option<()> {
        let ranges = heap_ranges(&walk.chunks);
        let states = pages_of(memory, ranges.iter().map(|range| range.range.clone()))?;
        let spans = || {
            walk.chunks.blocks().filter_map(|block| {
                let owner = match block.chunk.state {
                    ChunkState::Live | ChunkState::Mmapped => Owner::Stack(StackId(self.number(&block) as u32)),
                    state if state.is_free() => return None,
                    _ => Owner::Held,
                };
                Some(Span { start: block.chunk.start, bytes: block.chunk.bytes, owner })
            })
        };
        let pinned = Survey::new(&ranges, spans(), &states).pinned.bytes;
        // Only heaps that shrink at their top can be blocked: an arena's pieces, not single mapped chunks.
        let heaps: Vec<std::ops::Range<u64>> = walk.extents.iter().map(|(_, range)| range.clone()).collect();
        let blocked = blocked_space(&heaps, &ranges, spans(), &states).0.bytes;

        for (group, number) in [(&mut self.old, self.blocks.len()), (&mut self.new, self.blocks.len() + 1)] {
            group.whole.pinned += pinned.of(StackId(number as u32));
            group.whole.blocked += blocked.of(StackId(number as u32));
        }
        for block in walk.chunks.live_blocks() {
            let (bytes, number) = (block.chunk.bytes, self.number(&block));
            let is_old = self.is_old(&block);
            let group = if is_old { &mut self.old } else { &mut self.new };
            group.whole.objects += 1;
            group.whole.live += bytes;
            let Some(sampled) = self.blocks.get(number) else { continue };
            let (pinned, blocked) = (pinned.of(StackId(number as u32)), blocked.of(StackId(number as u32)));
            group.whole.pinned += pinned;
            group.whole.blocked += blocked;
            if let Some(seen) = self.seen.get_mut(number) {
                *seen = true;
            }
            for sums in [&mut group.sampled, &mut self.all, self.by_stack.entry(sampled.stack).or_default()] {
                sums.objects.add(1.0, sampled.sample);
                sums.live.add(bytes as f64, sampled.sample);
                sums.pinned.add(pinned as f64, sampled.sample);
                sums.blocked.add(blocked as f64, sampled.sample);
            }
        }
        Some(())
    }

    /// What was sampled and is in no heap whose chunks are known is in one that gave its sums alone.
    fn add_unseen(&mut self) {
        for (block, seen) in self.blocks.iter().zip(&mut self.seen).filter(|(_, seen)| !**seen) {
            *seen = true;
            for sums in [&mut self.new.sampled, &mut self.all, self.by_stack.entry(block.stack).or_default()] {
                sums.objects.add(1.0, block.sample);
                sums.live.add(block.sample.size_bytes as f64, block.sample);
            }
        }
    }

    fn picture(self, weighing: Weighing) -> SampledPicture {
        let shares = |sums: &Sums<Moments>| Shares {
            chunks: sums.objects.estimate(weighing),
            chunk_bytes: sums.live.estimate(weighing),
            pinned_bytes: sums.pinned.estimate(weighing),
            blocked_bytes: sums.blocked.estimate(weighing),
        };
        let rest = |group: &Group| {
            let sampled = shares(&group.sampled);
            Shares {
                chunks: sampled.chunks.rest_of(group.whole.objects),
                chunk_bytes: sampled.chunk_bytes.rest_of(group.whole.live),
                pinned_bytes: sampled.pinned_bytes.rest_of(group.whole.pinned),
                blocked_bytes: sampled.blocked_bytes.rest_of(group.whole.blocked),
            }
        };
        SampledPicture {
            by_stack: self.by_stack.iter().map(|(&stack, sums)| (stack, shares(sums))).collect(),
            before: self.before.map(|_| rest(&self.old)),
            unattributed: rest(&self.new),
            attributed: shares(&self.all),
            gone: self.seen.iter().filter(|seen| !**seen).count() as u64,
            ..SampledPicture::default()
        }
    }
}
