//! The heap at the end of a recording: the allocator's own account joined with the ledger by address, or, where no census can read the
//! allocator, what the recorded blocks and the mappings alone show.
//!
//! The census decides what is live: it also knows the blocks from before the recording. The ledger says whose it is. A live chunk that
//! no recorded block covers is unattributed; it is never spread over the stacks that are known.

use std::ops::Range;

use crate::census::ChunkState;
use crate::census::glibc::HeapWalk;
use crate::census::live::LiveMemory;
use crate::census::memory::Memory;
use crate::census::{self, Level, Pace, Places};
use crate::fragmentation::blocked::blocked_space;
use crate::fragmentation::by_stack::BytesByStack;
use crate::fragmentation::survey::Survey;
use crate::heap::extents::{Coverage, Extents, HeapRange, RegionKind};
use crate::heap::footprint::Footprint;
use crate::heap::pages::{Owner, Span};
use crate::heap::residency::{PageRuns, page_down, page_up};
use crate::ledger::Ledger;
use crate::profile::HeapSummary;
use crate::target::{Maps, Process};
use crate::units::{Addr, Pid};

/// What the heap looked like, with its pinned and blocked bytes by stack.
#[derive(Debug, Default)]
pub struct HeapPicture {
    /// The ladder.
    pub summary: HeapSummary,
    /// Free bytes on pages that live blocks keep.
    pub pinned: BytesByStack,
    /// Free pages under the highest live chunk of each heap that shrinks only at its top.
    pub blocked: BytesByStack,
    /// Live bytes that no recorded block covers: from before the recording, or of the allocator's and the C library's own.
    pub unattributed_live_bytes: u64,
    /// Chunks of them.
    pub unattributed_live_allocations: u64,
    /// What a reader should know.
    pub notes: Vec<String>,
}

/// Looks at the heap of a process that still lives. `None` if it is gone or may not be read.
pub fn picture(pid: Pid, ledger: &mut Ledger, extents: &mut Extents, footprint: Footprint) -> Option<HeapPicture> {
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    ledger.settle();
    let options = census::Options { level: Level::Full, pace: Pace::default(), with_not_malloc: false };
    let taken = match census::take(&memory, pid.0, &comm, options, &mut Places::default()) {
        Ok(taken) => Some(taken),
        Err(error) => {
            tracing::debug!("census of {pid}: {error}");
            None
        }
    };
    match taken {
        Some(taken) if taken.census.walk.usable && !taken.heaps.is_empty() => from_census(&memory, ledger, &taken),
        taken => {
            let mut picture = from_ledger(&memory, ledger, extents, footprint)?;
            if let Some(reason) = taken.and_then(|taken| taken.census.layout_unknown.first().cloned()) {
                picture.notes.push(reason);
            }
            Some(picture)
        }
    }
}

/// Free bytes of a process's heap now, by a census; `None` where none can tell.
pub fn free_bytes(pid: Pid) -> Option<u64> {
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    let options = census::Options { level: Level::Sampled, pace: Pace::default(), with_not_malloc: false };
    let taken = census::take(&memory, pid.0, &comm, options, &mut Places::default()).ok()?;
    let free = |heap: &census::HeapAccount| heap.live_bytes.or(heap.live_bytes_est).map(|live| heap.extent_bytes.saturating_sub(live));
    taken.census.heaps.iter().filter_map(free).reduce(u64::saturating_add)
}

fn from_census(memory: &LiveMemory, ledger: &Ledger, taken: &census::Taken) -> Option<HeapPicture> {
    let mut picture = HeapPicture::default();
    let sum = |of: fn(&census::HeapAccount) -> Option<u64>| taken.census.heaps.iter().filter_map(of).reduce(u64::saturating_add);
    let summary = HeapSummary {
        extent_bytes: sum(|heap| Some(heap.extent_bytes)),
        resident_bytes: sum(|heap| Some(heap.resident_bytes)),
        live_bytes: sum(|heap| heap.live_bytes),
        trimmable_bytes: sum(|heap| heap.trimmable_bytes),
        pinned_bytes: sum(|heap| heap.pinned_bytes),
        unknown_bytes: sum(|heap| Some(heap.unknown_bytes)),
    };
    picture.summary = summary;
    for walk in &taken.heaps {
        join(memory, ledger, walk, &mut picture)?;
    }
    Some(picture)
}

/// Whose each chunk of a heap is, and what that costs.
fn join(memory: &LiveMemory, ledger: &Ledger, walk: &HeapWalk, picture: &mut HeapPicture) -> Option<()> {
    let chunks = &walk.chunks;
    let owner_of = |block: u64| ledger.outstanding().get(Addr(block)).map(|block| block.stack);
    let ranges: Vec<HeapRange> = chunks
        .regions()
        .iter()
        .map(|region| HeapRange { range: region.start..region.end, kind: RegionKind::Anonymous, coverage: Coverage::Complete })
        .collect();
    let spans = || {
        chunks.blocks().filter_map(|block| {
            let owner = match block.chunk.state {
                ChunkState::Live | ChunkState::Mmapped => owner_of(block.addr).map_or(Owner::Unattributed, Owner::Stack),
                ChunkState::Unknown => Owner::Held,
                state if state.is_free() => return None,
                _ => Owner::Held,
            };
            Some(Span { start: block.chunk.start, bytes: block.chunk.bytes, owner })
        })
    };
    let states = pages_of(memory, ranges.iter().map(|range| range.range.clone()))?;
    let survey = Survey::new(&ranges, spans(), &states);
    // What of the chunks' pages is pinned by known stacks is the survey's; the allocator's own account may count a little less, where
    // its own structures lie on the page.
    add(&mut picture.pinned, &survey.pinned.bytes);
    // Only heaps that shrink at their top can be blocked: an arena's pieces, not single mapped chunks.
    let heaps: Vec<Range<u64>> = walk.extents.iter().map(|(_, range)| range.clone()).collect();
    let (blocked, _) = blocked_space(&heaps, &ranges, spans(), &states);
    add(&mut picture.blocked, &blocked.bytes);
    for block in chunks.live_blocks().filter(|block| owner_of(block.addr).is_none()) {
        picture.unattributed_live_bytes += block.chunk.bytes;
        picture.unattributed_live_allocations += 1;
    }
    Some(())
}

fn from_ledger(memory: &LiveMemory, ledger: &Ledger, extents: &mut Extents, footprint: Footprint) -> Option<HeapPicture> {
    extents.resync(&mappings_of(&memory.maps().ok()?));
    let blocks = ledger.sorted_blocks(|_| true);
    let ranges = extents.heap_ranges(blocks.iter().map(|block| block.addr.0));
    let states = pages_of(memory, ranges.iter().map(|range| range.range.clone()))?;
    let survey = Survey::new(&ranges, blocks.iter().map(|block| footprint.span(&block)), &states);
    let sums = survey.sums;
    let summary = HeapSummary {
        extent_bytes: Some(sums.extent_bytes),
        resident_bytes: Some(sums.resident_bytes),
        live_bytes: Some(sums.live_bytes),
        trimmable_bytes: (sums.resident_unknown_bytes == 0).then_some(sums.trimmable_bytes),
        pinned_bytes: Some(sums.pinned_bytes),
        unknown_bytes: Some(sums.resident_unknown_bytes),
    };
    let note = "the heap's figures rest on the recorded blocks and the mappings alone: no census reads this allocator".to_owned();
    Some(HeapPicture { summary, pinned: survey.pinned.bytes, notes: vec![note], ..HeapPicture::default() })
}

fn add(sum: &mut BytesByStack, more: &BytesByStack) {
    for (stack, bytes) in more.iter() {
        sum.charge(Some(stack), bytes);
    }
    sum.charge(None, more.unattributed_bytes());
}

/// The mappings as [`Extents`] takes them.
pub fn mappings_of(maps: &Maps) -> Vec<crate::heap::extents::Mapping> {
    use crate::target::Backing;
    maps.mappings
        .iter()
        .map(|mapping| crate::heap::extents::Mapping {
            range: mapping.start.0..mapping.end.0,
            kind: match &mapping.backing {
                Backing::Named(name) if name == "[heap]" => RegionKind::Brk,
                Backing::Anonymous if !mapping.permissions.shared => RegionKind::Anonymous,
                Backing::Named(name) if name.starts_with("[anon:") && !mapping.permissions.shared => RegionKind::Anonymous,
                _ => RegionKind::NotHeap,
            },
            writable: mapping.permissions.write,
        })
        .collect()
}

/// The states of the pages that some ranges, sorted by address, touch.
fn pages_of(memory: &LiveMemory, ranges: impl Iterator<Item = Range<u64>>) -> Option<PageRuns> {
    let mut whole: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let range = page_down(range.start)..page_up(range.end);
        match whole.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => whole.push(range),
        }
    }
    let mut states = PageRuns::default();
    for range in whole {
        for run in memory.page_runs(range).ok()?.runs() {
            states.push(*run);
        }
    }
    Some(states)
}
