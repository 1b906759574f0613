//! The heap at the end of a recording whose source is an emitter: the allocator's own account joined with the sample by address.
//!
//! The census knows every live chunk. For some of them the sample knows the stack, and how many other chunks each represents. A chunk's
//! figures (its bytes, the free bytes that it pins or blocks) are therefore estimated by stack like any other sum over blocks
//! ([`crate::ledger::Moments`]).
//!
//! A census at the beginning divides the rest in two. A live chunk that did not exist then was allocated since, so the part of those chunks
//! that the sample does not explain is *unattributed*. A chunk that existed then, at the same address with the same size, is either from
//! before, or was allocated since at the address of a freed one. The sample covers the latter, so the part that it does not explain is from
//! *before the attach*. Both differences are unbiased, with the error of the sample. So are those of a part of these chunks: by what holds them,
//! as the graph of pointers shows.

use std::collections::HashMap;
use std::time::Duration;

use crate::census::HeapWalk;
use crate::census::chunks::Block;
use crate::census::live::LiveMemory;
use crate::census::resident::{heap_ranges, pages_of};
use crate::census::{ChunkState, Level, Taken};
use crate::fragmentation::blocked::blocked_space;
use crate::fragmentation::survey::Survey;
use crate::heap::pages::{Owner, Span};
use crate::ledger::{Estimate, Moments, SampledBlock, SampledLedger, Weighing};
use crate::process::Process;
use crate::profile::{BEFORE_ATTACH, Frame, HeapSummary, UNATTRIBUTED};
use crate::session::report::heap::{Before, Heaps, census_of, unusable};
use crate::session::report::unattributed::Grouping;
use crate::units::{Pid, StackId};

/// Numbers of owners in a survey: those of sampled blocks, and two for each group of unsampled chunks.
const NUMBERS: usize = 1 << 20;

/// Maximum number of attempts at a census: a walk may fail in a heap that changes rapidly, or while a program creates its first arena.
const TRIES: u32 = 3;
/// Pause between two attempts.
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
    let taken = census_of(&memory, pid, &comm, Level::Full, Heaps::Malloc).map_err(|error| error.to_string())?;
    match unusable(&taken) {
        Some(reason) => Err(reason),
        None if taken.heaps.is_empty() => Err("no heap was found whose allocator a census can read".to_owned()),
        None => Ok((memory, taken)),
    }
}

/// Sums over some chunks.
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
    /// Free bytes on pages that the chunks pin.
    pub pinned_bytes: Estimate,
    /// Free pages below the highest live chunk of a heap.
    pub blocked_bytes: Estimate,
}

/// State of the heap, with the stacks' shares of it.
#[derive(Debug, Default)]
pub struct SampledPicture {
    /// The totals of the heap, from resident to live bytes.
    pub summary: HeapSummary,
    /// By stack.
    pub by_stack: HashMap<StackId, Shares>,
    /// Memory from before the recording; `None` = not known, then it is part of the unattributed.
    pub before: Option<Shares>,
    /// Memory that neither the sample nor the census at the start explains: allocations that the emitter does not see.
    pub unattributed: Shares,
    /// The last two by what holds the memory, if requested: they are then their sums.
    pub by_owner: Vec<OwnedPart>,
    /// All stacks together.
    pub attributed: Shares,
    /// Sampled blocks that were freed between the end of the recording and the census, or whose free was missed.
    pub gone: u64,
    /// Sampled blocks beyond the limit of one survey.
    pub beyond: u64,
    /// An allocator gives the live bytes, but not the chunks: stacks then have the bytes requested, and pages are not known.
    pub by_sums: bool,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// Memory that no sample explains, with the same holder.
#[derive(Debug)]
pub struct OwnedPart {
    /// Type, owner, root, and the name of the row to which it belongs.
    pub frames: Vec<Frame>,
    /// Its share.
    pub shares: Shares,
}

/// Examines the heap of a process that is still alive. `with_owners`: also what holds memory that no sample explains.
///
/// # Errors
/// Why no census could be joined: the process has ended, no census reads its allocator, or the heap changed too much during each attempt.
pub fn picture(pid: Pid, ledger: &mut SampledLedger, before: &Before, with_owners: bool) -> Result<SampledPicture, String> {
    ledger.settle();
    let (memory, taken) = full_census(pid)?;
    let is_live = |block: &SampledBlock| taken.heaps.iter().any(|walk| walk.chunks.is_live(block.addr.0) == Some(true));
    ledger.prune_doubtful(is_live);
    let mut notes = Vec::new();
    let grouping = if with_owners {
        let unknown = |error| notes.push(format!("the holders of memory without a stack are not known: {error}"));
        Grouping::of(&memory, pid.0, &taken).map_err(unknown).ok()
    } else {
        None
    };
    let groups = grouping.as_ref().map_or(1, Grouping::len);
    let surveyed_max = NUMBERS.saturating_sub(2 * groups);
    let mut blocks: Vec<SampledBlock> = ledger.live_blocks().copied().collect();
    blocks.sort_unstable_by_key(|block| block.addr);
    let beyond = blocks.len().saturating_sub(surveyed_max) as u64;
    blocks.truncate(surveyed_max);

    let before = Some(before).filter(|before| !matches!(before, Before::Unknown));
    let seen = vec![false; blocks.len()];
    let parts = vec![Group::default(); 2 * groups];
    let mut join = Join { blocks: &blocks, before, grouping: grouping.as_ref(), seen, parts, ..Join::default() };
    for walk in &taken.heaps {
        if walk.chunks.is_empty() {
            join.by_sums = true;
            join.new.whole.objects += walk.account.live_allocations.unwrap_or(0);
            join.new.whole.live += walk.account.ladder.live_bytes.unwrap_or(0);
            continue;
        }
        join.walk(&memory, walk).ok_or("the state of its pages could not be read")?;
    }
    if join.by_sums {
        join.add_unseen();
    }
    let by_sums = join.by_sums;
    let mut picture = join.picture(ledger.weighing());
    (picture.beyond, picture.by_sums, picture.notes) = (beyond, by_sums, notes);
    picture.summary = super::heap::summary(&taken);
    Ok(picture)
}

/// The join in progress.
#[derive(Default)]
struct Join<'a> {
    /// Sampled live blocks, by address.
    blocks: &'a [SampledBlock],
    /// The heap before the emitter was heard; `None` = not known.
    before: Option<&'a Before>,
    /// What holds which chunk; `None` = not asked.
    grouping: Option<&'a Grouping>,
    seen: Vec<bool>,
    by_stack: HashMap<StackId, Sums<Moments>>,
    all: Sums<Moments>,
    /// Chunks that may be from before, and chunks allocated since: the totals, and the part that the sample explains.
    old: Group,
    new: Group,
    /// Two for each group of holders: of those that may be from before, and of those allocated since.
    parts: Vec<Group>,
    /// A heap gave only its sums.
    by_sums: bool,
}

#[derive(Default, Clone, Copy)]
struct Group {
    whole: Sums<u64>,
    sampled: Sums<Moments>,
}

impl Join<'_> {
    /// The owner number of a live chunk in the survey: that of its sampled block, or one of the numbers after them for unsampled chunks.
    fn number(&self, block: &Block) -> usize {
        let unsampled = || self.blocks.len() + self.part(block);
        self.blocks.binary_search_by_key(&block.addr, |sampled| sampled.addr.0).unwrap_or_else(|_| unsampled())
    }

    /// The part to which a chunk belongs.
    fn part(&self, block: &Block) -> usize {
        2 * self.grouping.map_or(0, |grouping| grouping.group_of(block)) + usize::from(!self.is_old(block))
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
        // Blocked bytes exist only in heaps that shrink at their top: extents of an arena, not single mapped chunks.
        let heaps: Vec<std::ops::Range<u64>> = walk.extents.iter().map(|(_, range)| range.clone()).collect();
        let blocked = blocked_space(&heaps, &ranges, spans(), &states).0.bytes;

        for (number, part) in self.parts.iter_mut().enumerate() {
            let sum = if number % 2 == 0 { &mut self.old } else { &mut self.new };
            let owner = StackId((self.blocks.len() + number) as u32);
            for group in [part, sum] {
                group.whole.pinned += pinned.of(owner);
                group.whole.blocked += blocked.of(owner);
            }
        }
        for block in walk.chunks.live_blocks() {
            let (bytes, number, part) = (block.chunk.bytes, self.number(&block), self.part(&block));
            let sum = if part % 2 == 0 { &mut self.old } else { &mut self.new };
            let Some(part) = self.parts.get_mut(part) else { continue };
            for group in [&mut *part, &mut *sum] {
                group.whole.objects += 1;
                group.whole.live += bytes;
            }
            let Some(sampled) = self.blocks.get(number) else { continue };
            let (pinned, blocked) = (pinned.of(StackId(number as u32)), blocked.of(StackId(number as u32)));
            for group in [&mut *part, &mut *sum] {
                group.whole.pinned += pinned;
                group.whole.blocked += blocked;
            }
            if let Some(seen) = self.seen.get_mut(number) {
                *seen = true;
            }
            let of_stack = self.by_stack.entry(sampled.stack).or_default();
            for sums in [&mut part.sampled, &mut sum.sampled, &mut self.all, of_stack] {
                sums.objects.add(1.0, sampled.sample);
                sums.live.add(bytes as f64, sampled.sample);
                sums.pinned.add(pinned as f64, sampled.sample);
                sums.blocked.add(blocked as f64, sampled.sample);
            }
        }
        Some(())
    }

    /// A sampled block that is in no heap with known chunks is in one that gave only its sums.
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
        let part = |(number, group): (usize, &Group)| {
            let row = if number % 2 == 0 { BEFORE_ATTACH } else { UNATTRIBUTED };
            Some(OwnedPart { frames: self.grouping?.frames(number / 2, row), shares: rest(group) })
        };
        let has_any = |(_, group): &(usize, &Group)| group.whole.objects > 0;
        SampledPicture {
            by_owner: self.parts.iter().enumerate().filter(has_any).filter_map(part).collect(),
            by_stack: self.by_stack.iter().map(|(&stack, sums)| (stack, shares(sums))).collect(),
            before: self.before.map(|_| rest(&self.old)),
            unattributed: rest(&self.new),
            attributed: shares(&self.all),
            gone: self.seen.iter().filter(|seen| !**seen).count() as u64,
            ..SampledPicture::default()
        }
    }
}
