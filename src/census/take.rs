//! One census of one process: every allocator found, then the resident memory outside malloc.

use std::cell::RefCell;
use std::ops::Range;
use std::time::Instant;

use super::account::{Census, Level, NotMalloc};
use super::chunks::ARENA_NONE;
use super::huge;
use super::memory::{Memory, MemoryError};
use super::not_malloc::classify;
use super::not_understood;
use super::objects::{Objects, joined};
use super::pace::Pace;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{self, HeapReader, HeapWalk, Sight};
use super::runtime::{self, Claim, Kind, Runtimes};
use super::searched::Searched;
use crate::allocator::Allocator;
use crate::allocator::detect::Detector;
use crate::process::Mapping;

/// Options of a census.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// The level.
    pub level: Level,
    /// The pace.
    pub pace: Pace,
    /// Whether to measure resident memory outside malloc, which takes a read of smaps: a few milliseconds per GiB.
    pub with_not_malloc: bool,
}

/// Cached offsets of allocators' data in their files; keep it for the next process.
#[derive(Debug)]
pub struct LayoutCache {
    /// A reader of each allocator.
    pub readers: Vec<Box<dyn HeapReader>>,
    /// Runtimes' layouts in their files.
    pub runtimes: runtime::LayoutCache,
    /// What the symbols of files showed.
    pub detector: Detector,
    /// What processes were searched for.
    pub searched: Searched,
}

impl LayoutCache {
    /// For malloc's heaps alone: those of runtimes are not read, their memory counts as outside malloc. For those who join a heap with what
    /// was recorded of malloc, or follow the pointers between its blocks.
    #[must_use]
    pub fn of_malloc() -> Self {
        let mut all = Self::default();
        all.readers.retain(|reader| reader.allocator().row().runtime.is_none());
        all
    }
}

impl Default for LayoutCache {
    fn default() -> Self {
        Self {
            readers: reader::all(),
            runtimes: runtime::LayoutCache::default(),
            detector: Detector::default(),
            searched: Searched::default(),
        }
    }
}

/// A census with its chunks.
#[derive(Debug, Clone)]
pub struct Taken {
    /// The figures.
    pub census: Census,
    /// The heaps, in the order of `census.heaps`: at level full with every chunk.
    pub heaps: Vec<HeapWalk>,
}

impl Taken {
    /// Leaves out the heaps of runtimes: there is nothing in them that malloc allocated.
    pub fn keep_malloc(&mut self) {
        self.heaps.retain(|heap| heap.account.allocator.row().runtime.is_none());
        self.census.heaps.retain(|heap| heap.allocator.row().runtime.is_none());
    }
}

/// Takes a census of the process behind `memory`.
///
/// # Errors
/// If the process has ended, or the permission to read is missing.
pub fn take(memory: &dyn Memory, pid: u32, comm: &str, options: Options, layouts: &mut LayoutCache) -> Result<Taken, MemoryError> {
    let started = Instant::now();
    let maps = memory.maps()?;
    let objects = Objects::of(memory, &maps);
    let mut heaps = heaps(&Sight { memory, maps: &maps, objects: &objects, options, taken: &[] }, layouts)?;
    let set_aside = set_aside(&mut heaps);
    if options.level != Level::Top && memory.process().is_some() {
        look_at_huge_pages(memory, &mut heaps);
    }
    let found: Vec<Allocator> = heaps.iter().map(|heap| heap.account.allocator).collect();
    let has_pymalloc = found.contains(&Allocator::Pymalloc);
    // Beside the heap of a runtime there is one of malloc.
    let found: Vec<Allocator> = found.into_iter().filter(|allocator| allocator.row().runtime.is_none()).collect();
    let mut reasons = set_aside;
    reasons.extend(not_understood::reasons(memory, &maps, &objects, &found));
    if options.with_not_malloc
        && let Some(process) = memory.process()
        && let Ok(detection) = layouts.detector.detect(process)
    {
        let modules = detection.modules.iter().map(|module| (module.found.allocator, name_of(&module.mapping)));
        not_understood::add_by_symbols(&mut reasons, modules, &found);
    }
    let (runtimes, claims) = if options.with_not_malloc {
        runtime::look(memory, &maps, &objects, &all_own_ranges(&heaps), &mut layouts.runtimes)
    } else {
        Default::default()
    };
    if has_pymalloc || runtimes.has(Kind::Pymalloc) {
        // CPython 3.13 and later have mimalloc linked in, which serves only builds without the global lock, and those have no pymalloc.
        reasons.retain(|reason| !not_understood::is_mimalloc_of_python(reason));
    }
    finish(memory, (pid, comm), options, started, heaps, (runtimes, claims, reasons))
}

/// Lists the blocks of the heaps whose census has only sums, as far as their allocators' data shows them.
///
/// # Errors
/// If the process has ended, or the permission to read is missing.
pub fn add_blocks(memory: &dyn Memory, taken: &mut Taken, layouts: &mut LayoutCache) -> Result<(), MemoryError> {
    if taken.heaps.iter().all(|heap| !heap.chunks.is_empty()) {
        return Ok(());
    }
    let maps = memory.maps()?;
    let objects = Objects::of(memory, &maps);
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: false };
    let sight = Sight { memory, maps: &maps, objects: &objects, options, taken: &[] };
    for heap in taken.heaps.iter_mut().filter(|heap| heap.chunks.is_empty()) {
        let of_heap = layouts.readers.iter_mut().find(|reader| reader.allocator() == heap.account.allocator);
        if let Some(walk) = of_heap.map(|reader| reader.read_blocks(&sight)).transpose()?.flatten() {
            (heap.chunks, heap.extents) = (walk.chunks, walk.extents);
        }
    }
    Ok(())
}

/// Removes heaps whose parts do not add up if there is a larger one whose parts do, and returns a message for each: a misread heap is no
/// reason to doubt the others.
fn set_aside(heaps: &mut Vec<HeapWalk>) -> Vec<String> {
    let sound = heaps.iter().filter(|heap| heap.quality.balanced).map(|heap| heap.account.ladder.extent_bytes).max().unwrap_or(0);
    let is_aside = |heap: &HeapWalk| !heap.quality.balanced && heap.account.ladder.extent_bytes < sound;
    let told = heaps.iter().filter(|heap| is_aside(heap)).map(|heap| {
        format!("a heap that looks like {}'s ({}) is not consistent: it is left out", heap.account.allocator.name(), heap.account.layout)
    });
    let told = told.collect();
    heaps.retain(|heap| !is_aside(heap));
    told
}

/// The heaps of the allocators that the process is searched for; of all, where those leave it without one.
fn heaps(sight: &Sight<'_>, layouts: &mut LayoutCache) -> Result<Vec<HeapWalk>, MemoryError> {
    let all = reader::allocators();
    let Some(process) = sight.memory.process().map(crate::process::Process::id) else {
        return read(&all, sight, layouts).map(|(_, heaps)| heaps);
    };
    let (program, now) = (layouts.searched.program(sight.maps), Instant::now());
    let wanted = layouts.searched.wanted(process, program, now);
    if wanted != all {
        let (found, heaps) = read(&wanted, sight, layouts)?;
        if !found.is_empty() {
            layouts.searched.met(process, program, now);
            return Ok(heaps);
        }
    }
    let (found, heaps) = read(&all, sight, layouts)?;
    layouts.searched.learn(process, program, &found, now);
    Ok(heaps)
}

/// The heaps of these allocators, with the allocators that have one, in the readers' order. A runtime's heap is read first: what it has taken
/// need not be searched for blocks of malloc.
fn read(allocators: &[Allocator], sight: &Sight<'_>, layouts: &mut LayoutCache) -> Result<(Vec<Allocator>, Vec<HeapWalk>), MemoryError> {
    let of_malloc = |reader: &dyn HeapReader| reader.allocator().row().runtime.is_none();
    let mut walks: Vec<Option<HeapWalk>> = layouts.readers.iter().map(|_| None).collect();
    for is_of_malloc in [false, true] {
        let taken = all_own_ranges(walks.iter().flatten());
        for (reader, walk) in layouts.readers.iter_mut().zip(&mut walks) {
            if of_malloc(reader.as_ref()) == is_of_malloc && allocators.contains(&reader.allocator()) {
                *walk = reader.read(&Sight { taken: &taken, ..*sight })?;
            }
        }
    }
    let found = layouts.readers.iter().zip(&walks).filter(|(_, walk)| walk.is_some()).map(|(reader, _)| reader.allocator()).collect();
    Ok((found, walks.into_iter().flatten().collect()))
}

/// The file that is mapped, without directories.
fn name_of(mapping: &Mapping) -> String {
    mapping.file_name()
}

/// Sums the heaps' quality, measures the resident memory outside malloc, and makes sure that the process is still the same.
fn finish(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    options: Options,
    started: Instant,
    heaps: Vec<HeapWalk>,
    (runtimes, claims, layout_unknown): (Runtimes, Vec<Claim>, Vec<String>),
) -> Result<Taken, MemoryError> {
    let mut walk = WalkQuality { balanced: true, ..WalkQuality::default() };
    for heap in &heaps {
        walk.windows += heap.quality.windows;
        walk.read_bytes += heap.quality.read_bytes;
        walk.broken_headers += heap.quality.broken_headers;
        walk.replaced_boundaries += heap.quality.replaced_boundaries;
        walk.resynchronised += heap.quality.resynchronised;
        walk.walked_again += heap.quality.walked_again;
        walk.unknown_bytes += heap.quality.unknown_bytes;
        walk.unread_bytes += heap.quality.unread_bytes;
        walk.broken_lists += heap.quality.broken_lists;
        walk.balanced &= heap.quality.balanced;
    }
    walk.judge(heaps.iter().map(|heap| heap.account.ladder.extent_bytes).sum(), walk.balanced);
    let (rss_bytes, not_malloc) = if options.with_not_malloc { besides(memory, &heaps, &claims)? } else { (0, Vec::new()) };
    // The process must still be there, and the same: otherwise half of the figures are another's.
    memory.maps()?;
    walk.duration_ms = started.elapsed().as_secs_f64() * 1e3;
    let census = Census {
        pid,
        comm: comm.to_owned(),
        level: options.level,
        heaps: heaps.iter().map(|heap| heap.account.clone()).collect(),
        rss_bytes,
        not_malloc,
        runtimes,
        walk,
        layout_unknown,
    };
    Ok(Taken { census, heaps })
}

/// Estimates the zeros in the heaps' huge pages.
fn look_at_huge_pages(memory: &dyn Memory, heaps: &mut [HeapWalk]) {
    for heap in heaps.iter_mut().filter(|heap| heap.account.details.huge_bytes > 0) {
        let mut own = Vec::new();
        own_ranges(heap, &mut own);
        own.sort_by_key(|range| range.start);
        let zeros = huge::zeros(memory, &joined(&own));
        heap.account.huge_zero_bytes_est = zeros.map(|zeros| zeros.bytes_est);
        heap.account.huge_zero_bytes_stderr = zeros.map(|zeros| zeros.bytes_stderr);
    }
}

/// Adds a heap's extents and its blocks with mappings of their own.
fn own_ranges(heap: &HeapWalk, own: &mut Vec<Range<u64>>) {
    own.extend(heap.extents.iter().map(|(_, extent)| extent.clone()));
    let mapped = heap.chunks.regions().iter().filter(|region| region.arena == ARENA_NONE);
    own.extend(mapped.map(|region| region.start..region.end));
}

/// The ranges of all heaps, sorted and disjoint.
#[must_use]
pub fn all_own_ranges<'a>(heaps: impl IntoIterator<Item = &'a HeapWalk>) -> Vec<Range<u64>> {
    let mut own: Vec<Range<u64>> = Vec::new();
    heaps.into_iter().for_each(|heap| own_ranges(heap, &mut own));
    own.sort_by_key(|range| range.start);
    joined(&own)
}

/// Resident bytes of the process, and of what is not malloc's. Blocks with mappings of their own are not known at level top, where they
/// count as other anonymous memory.
fn besides(memory: &dyn Memory, heaps: &[HeapWalk], claims: &[Claim]) -> Result<(u64, Vec<NotMalloc>), MemoryError> {
    let mappings = memory.resident_mappings()?;
    let pages = RefCell::new(PageCache::new(memory));
    let resident = |range: Range<u64>| pages.borrow_mut().resident_bytes(range);
    let rss_bytes = mappings.iter().map(|one| one.resident_bytes).fold(0, u64::saturating_add);
    Ok((rss_bytes, classify(&mappings, &all_own_ranges(heaps), claims, resident)))
}

#[cfg(test)]
mod tests {
    use super::super::account::HeapAccount;
    use super::super::chunks::ChunkTable;
    use super::*;
    use crate::heap::ladder::Ladder;

    fn heap(allocator: Allocator, extent_bytes: u64, balanced: bool) -> HeapWalk {
        let account = HeapAccount { allocator, ladder: Ladder { extent_bytes, ..Ladder::default() }, ..HeapAccount::default() };
        let quality = WalkQuality { balanced, ..WalkQuality::default() };
        HeapWalk { account, quality, chunks: ChunkTable::default(), extents: Vec::new() }
    }

    #[test]
    fn an_inconsistent_heap_is_left_out_only_if_there_is_a_larger_consistent_one() {
        let left = |mut heaps: Vec<HeapWalk>| {
            let told = set_aside(&mut heaps);
            (heaps.iter().map(|heap| heap.account.allocator.name()).collect::<Vec<_>>().join(" "), told.len())
        };
        assert_eq!(left(vec![heap(Allocator::Glibc, 100, true), heap(Allocator::Musl, 10, false)]), ("glibc".to_owned(), 1));
        assert_eq!(left(vec![heap(Allocator::Glibc, 100, true), heap(Allocator::Jemalloc, 1000, false)]), ("glibc jemalloc".to_owned(), 0));
        assert_eq!(left(vec![heap(Allocator::Glibc, 100, false)]), ("glibc".to_owned(), 0));
    }
}
