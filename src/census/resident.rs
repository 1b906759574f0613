//! The chunks of a walk as heap ranges, and which of their pages are resident.

use std::ops::Range;

use super::chunks::ChunkTable;
use super::memory::Memory;
use crate::heap::extents::{Coverage, HeapRange, RegionKind};
use crate::heap::residency::{PageRuns, page_down, page_up};

/// The regions of a chunk table as heap ranges: all of their bytes are known.
#[must_use]
pub fn heap_ranges(chunks: &ChunkTable) -> Vec<HeapRange> {
    let range = |range| HeapRange { range, kind: RegionKind::Anonymous, coverage: Coverage::Complete };
    chunks.regions().iter().map(|region| range(region.start..region.end)).collect()
}

/// The states of the pages that some ranges, sorted by address, touch; `None` if the process has ended or may not be read.
#[must_use]
pub fn pages_of(memory: &dyn Memory, ranges: impl Iterator<Item = Range<u64>>) -> Option<PageRuns> {
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
