//! Google's tcmalloc (github.com/google/tcmalloc), not that of gperftools: found by form, without a symbol; pages of 8, 32 and 256 KiB.
//!
//! ```text
//! library's data ─┬→ page map ─→ leaves ─→ spans (objects of one size, or one large object) ─→ chunks, account
//!                 ├→ central free lists: size classes; transfer caches ─┐
//!                 ├→ slabs of the CPUs, or caches of the threads ───────┴→ objects that are free for the program: cached
//! ```
//!
//! The extent is the memory that tcmalloc opened in its regions; what is in no span is free. Of an allocation that tcmalloc sampled, the
//! block that the sampler holds beside it is overhead. Which free pages a release returns is not known: it depends on the statistics of the
//! huge page filler. Not read: builds before 2024-03 and from 2026-07-28 to 2026-08-11 (other spans), with pages of 4 KiB, without transfer
//! caches (`TCMALLOC_INTERNAL_SMALL_BUT_SLOW`), and the transfer caches of single L3 caches, which machines with three and more of them have.

pub mod caches;
pub mod classes;
pub mod page_map;
pub mod spans;

use std::ops::Range;

use self::caches::{Caches, records};
use self::classes::{Class, Classes};
use self::page_map::{Entries, Entry, PageMap, RootsByBuild};
use self::spans::{FreeForm, SAMPLE_BYTES, SPAN_BYTES, allocated};
use super::account::{HeapAccount, Level, Sums, occupancy_of};
use super::chunks::{ChunkState, ChunkTable};
use super::memory::{Memory, MemoryError, Piece};
use super::objects::{anonymous_ranges, joined, range_of, read_present};
use super::pace::Pacer;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{HeapReader, HeapWalk, Sight};
use crate::allocator::Allocator;

/// Times that a span is read which contradicts itself: the program was changing it.
const TRIES: usize = 3;
/// Spans read at once.
const BATCH: usize = 256;
/// Pages whose spans are read at once, before their objects: the sooner these are read, the fewer have changed.
const WINDOW_PAGES: u64 = 128;
/// Spans by which the form of their free objects is told.
const SAMPLED_SPANS: usize = 512;
/// Of 100 of these, those that must agree.
const AGREEING_PERCENT_MIN: usize = 50;
/// Huge pages of tcmalloc: what it opens of its regions begins and ends at one (`kHugePageSize`).
const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Reads the heaps of Google's tcmalloc.
#[derive(Debug, Default)]
pub struct Reader(RootsByBuild);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::GoogleTcmalloc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        Ok(find(sight, &mut self.0).map(|found| walk(sight, &found)))
    }
}

/// The parts of a heap.
struct Found {
    map: PageMap,
    classes: Classes,
    entries: Entries,
    form: FreeForm,
    /// Its address space, by address.
    extents: Vec<Range<u64>>,
    caches: Caches,
}

/// Finds the heap: the page map whose library also has the size classes and the caches, and whose spans have objects of these classes.
fn find(sight: &Sight<'_>, roots: &mut RootsByBuild) -> Option<Found> {
    let anonymous = joined(&anonymous_ranges(sight.maps));
    page_map::find(sight, roots).find_map(|map| {
        let data = sight.objects.iter().find(|one| one.object() == &map.object)?.data();
        let classes = Classes::find(&map.object, &data, map.page_bits)?;
        let mut entries = map.entries(sight.memory);
        let extents = extents(&anonymous, &entries);
        let is_inside = |entry: &Entry| range_of(&extents, entry.start).is_some_and(|extent| entry.end <= extent.end);
        let found = entries.list.len();
        entries.list.retain(is_inside);
        entries.torn += (found - entries.list.len()) as u64;
        let form = form(sight.memory, &entries, &classes, map.page_bytes())?;
        let heap = caches::Heap { memory: sight.memory, data: &data, classes: &classes, entries: &entries };
        let caches = caches::read(heap, |addr| range_of(&anonymous, addr).map(|own| own.end))?;
        Some(Found { map, classes, entries, form, extents, caches })
    })
}

/// The memory that tcmalloc opened: mappings with spans, and whole huge pages within what the page map has leaves for.
fn extents(anonymous: &[Range<u64>], entries: &Entries) -> Vec<Range<u64>> {
    let covered = joined(&entries.covered);
    let is_own = |mapping: &&Range<u64>| {
        let first = entries.list.partition_point(|entry| entry.end <= mapping.start);
        let has_span = entries.list.get(first).is_some_and(|entry| entry.start < mapping.end);
        let is_whole = mapping.start.is_multiple_of(HUGE_PAGE_BYTES) && mapping.end.is_multiple_of(HUGE_PAGE_BYTES);
        has_span || is_whole && range_of(&covered, mapping.start).is_some_and(|own| mapping.end <= own.end)
    };
    anonymous.iter().filter(is_own).cloned().collect()
}

/// How the spans hold their free objects; `None` if too few agree.
fn form(memory: &dyn Memory, entries: &Entries, classes: &Classes, page_bytes: u64) -> Option<FreeForm> {
    let with_objects: Vec<&Entry> = entries.list.iter().filter(|entry| entry.class > 0).collect();
    let step = with_objects.len().div_ceil(SAMPLED_SPANS).max(1);
    let sample: Vec<&Entry> = with_objects.into_iter().step_by(step).collect();
    let bytes = records(memory, sample.iter().map(|entry| entry.span), SPAN_BYTES);
    let forms = FreeForm::INDICES.map(|indices| FreeForm { indices, page_bytes });
    let spans = sample.iter().zip(bytes.chunks_exact(SPAN_BYTES)).filter_map(|(entry, record)| {
        let class = classes.get(entry.class)?;
        let is_needed = forms.iter().any(|form| form.needs_objects(record, class));
        let objects = if is_needed { read_present(memory, entry.start..entry.start + page_bytes) } else { Vec::new() };
        Some(forms.map(|form| form.free(record, class, &objects).is_some()))
    });
    let agreeing = spans.fold([0; FreeForm::INDICES.len()], |sums, agrees| {
        let mut sums = sums;
        sums.iter_mut().zip(agrees).for_each(|(sum, agrees)| *sum += usize::from(agrees));
        sums
    });
    let (form, count) = forms.into_iter().zip(agreeing).max_by_key(|(_, count)| *count)?;
    (count > 0 && count * 100 >= sample.len() * AGREEING_PERCENT_MIN).then_some(form)
}

fn walk(sight: &Sight<'_>, found: &Found) -> HeapWalk {
    let layout = format!("google tcmalloc, {} KiB pages, {} spans", found.map.page_bytes() >> 10, found.entries.list.len());
    let mut account = HeapAccount::new(Allocator::GoogleTcmalloc, layout);
    let mut pages = PageCache::new(sight.memory);
    for extent in &found.extents {
        let residency = pages.residency(extent.clone());
        account.ladder.extent_bytes += extent.end - extent.start;
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
    }
    let mut quality = WalkQuality { windows: found.entries.list.len() as u64, ..WalkQuality::default() };
    let mut chunks = ChunkTable::default();
    if sight.options.level == Level::Full {
        let mut all = Walk::new(sight, found);
        found.extents.iter().for_each(|extent| all.add(extent));
        (chunks, quality) = all.finish();
        fill(&mut account, &chunks, &mut pages, found.caches.lost_bytes);
        quality.unknown_bytes = account.ladder.unknown_bytes.unwrap_or(0);
    } else if sight.options.level == Level::Sampled {
        account.live_bytes_est = Some(by_counts(sight.memory, found));
        account.live_bytes_stderr = Some(found.caches.lost_bytes);
    }
    quality.broken_headers += found.entries.left_out;
    quality.broken_lists += found.caches.torn_lists + found.caches.left_out;
    quality.judge(account.ladder.extent_bytes, account.off_balance_bytes().unwrap_or(0) == 0);
    let extents = found.extents.iter().map(|extent| (0, extent.clone())).collect();
    HeapWalk { account, quality, chunks, extents }
}

/// The figures that the chunks give. `lost_bytes`: of those that seem live, what is in caches and could not be told apart.
fn fill(account: &mut HeapAccount, chunks: &ChunkTable, pages: &mut PageCache<'_>, lost_bytes: u64) {
    let sums = Sums::of(chunks, &mut []);
    let live = sums.bytes_in(ChunkState::Live);
    let lost = lost_bytes.min(live);
    account.ladder.live_bytes = Some(live - lost);
    account.live_allocations = Some(sums.chunks_in(ChunkState::Live));
    account.free_bytes = Some(sums.bytes_in(ChunkState::Free));
    account.free_chunks = Some(sums.chunks_in(ChunkState::Free));
    account.details.cached_bytes = Some(sums.bytes_in(ChunkState::Tcache));
    account.overhead_bytes = sums.bytes_in(ChunkState::Overhead);
    // What the table of chunks had no room for is unknown too.
    let left_out = account.ladder.extent_bytes.saturating_sub(sums.bytes.iter().sum());
    account.ladder.unknown_bytes = Some(sums.bytes_in(ChunkState::Unknown).saturating_add(left_out).saturating_add(lost));
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
    let occupancy = occupancy_of(chunks, pages);
    account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
    account.details.kept_bytes = Some(occupancy.free_unpinned_bytes);
    account.occupancy = Some(occupancy);
}

/// Live bytes by the counts of all spans, without those in caches.
fn by_counts(memory: &dyn Memory, found: &Found) -> u64 {
    let (mut live, mut proxies) = (0u64, 0u64);
    for batch in found.entries.list.chunks(BATCH) {
        let bytes = records(memory, batch.iter().map(|entry| entry.span), SPAN_BYTES);
        for (entry, record) in batch.iter().zip(bytes.chunks_exact(SPAN_BYTES)) {
            let objects = found.classes.get(entry.class).map(|class| match class.objects {
                1 => (1, class.bytes),
                objects => (allocated(record).min(objects), class.bytes),
            });
            let (count, bytes) = objects.unwrap_or((1, entry.end - entry.start));
            live = live.saturating_add(count.saturating_mul(bytes));
            proxies += proxy(memory, found, entry, record).map_or(0, |(_, bytes)| bytes);
        }
    }
    let size = |object: &u64| size_at(found, *object).unwrap_or(0);
    live.saturating_sub(found.caches.objects.iter().map(size).sum()).saturating_sub(proxies)
}

/// The bytes of the object of a size class that begins at an address.
fn size_at(found: &Found, addr: u64) -> Option<u64> {
    let entry = found.entries.of(addr)?;
    let class = found.classes.get(entry.class)?;
    let at = addr - entry.start;
    (at.is_multiple_of(class.bytes) && at / class.bytes < class.objects).then_some(class.bytes)
}

/// The proxy of a sampled span and its bytes.
fn proxy(memory: &dyn Memory, found: &Found, entry: &Entry, record: &[u8]) -> Option<(u64, u64)> {
    let sampled = found.map.span(record).filter(|_| entry.class == 0)?.sampled;
    if sampled == 0 {
        return None;
    }
    let proxy = spans::proxy(&memory.bytes(sampled, SAMPLE_BYTES)?, |addr| size_at(found, addr))?;
    Some((proxy, size_at(found, proxy)?))
}

/// A walk over all spans.
struct Walk<'a> {
    memory: &'a dyn Memory,
    found: &'a Found,
    /// Blocks that the sampler holds, by address.
    proxies: Vec<u64>,
    pacer: Pacer,
    pages: PageCache<'a>,
    chunks: ChunkTable,
    quality: WalkQuality,
}

impl<'a> Walk<'a> {
    fn new(sight: &Sight<'a>, found: &'a Found) -> Self {
        let mut walk = Self {
            memory: sight.memory,
            found,
            proxies: Vec::new(),
            pacer: Pacer::start(sight.options.pace),
            pages: PageCache::new(sight.memory),
            chunks: ChunkTable::default(),
            quality: WalkQuality { broken_headers: found.entries.torn, ..WalkQuality::default() },
        };
        let alone: Vec<&Entry> = found.entries.list.iter().filter(|entry| entry.class == 0).collect();
        for batch in alone.chunks(BATCH) {
            let bytes = records(walk.memory, batch.iter().map(|entry| entry.span), SPAN_BYTES);
            let proxies =
                batch.iter().zip(bytes.chunks_exact(SPAN_BYTES)).filter_map(|(entry, record)| proxy(walk.memory, found, entry, record));
            walk.proxies.extend(proxies.map(|(proxy, _)| proxy));
        }
        walk.proxies.sort_unstable();
        walk
    }

    /// Adds a stretch of address space with its spans.
    fn add(&mut self, extent: &Range<u64>) {
        self.chunks.begin_region(extent.start, 0);
        let window = WINDOW_PAGES * self.found.map.page_bytes();
        while self.chunks.end_of_current() < extent.end {
            let start = self.chunks.end_of_current();
            if self.pacer.is_over() {
                self.quality.unread_bytes += extent.end - start;
                self.chunks.push(extent.end - start, ChunkState::Unknown);
                return;
            }
            match self.found.map.without_leaf(self.memory, start) {
                Some(end) => self.free(end.min(extent.end)),
                None => self.window(start..start.saturating_add(window).min(extent.end), extent.end),
            }
            // The table of chunks is full.
            if self.chunks.end_of_current() <= start {
                return;
            }
        }
    }

    /// Adds some pages by what the page map has for them now: spans come and go during a walk. The last span may go beyond them, up to `limit`.
    fn window(&mut self, pages: Range<u64>, limit: u64) {
        let map = &self.found.map;
        if let Some(other) = map.span_at(self.memory, pages.start).filter(|other| other.start < pages.start) {
            // It was made after what lies before was read.
            self.quality.broken_headers += 1;
            self.chunks.push(other.end.min(limit) - pages.start, ChunkState::Unknown);
            return;
        }
        let entries = map.entries_in(self.memory, pages.clone()).list;
        let bytes = records(self.memory, entries.iter().map(|entry| entry.span), SPAN_BYTES);
        for (entry, record) in entries.iter().zip(bytes.chunks_exact(SPAN_BYTES)) {
            self.free(entry.start);
            if entry.end > limit || !self.span(entry, record) {
                self.quality.broken_headers += 1;
                self.chunks.push(entry.end.min(limit) - entry.start, ChunkState::Unknown);
            }
        }
        self.free(pages.end);
    }

    /// Adds what is in no span: free, unless spans were left out.
    fn free(&mut self, until: u64) {
        let state = if self.found.entries.left_out == 0 { ChunkState::Free } else { ChunkState::Unknown };
        self.chunks.push(until.saturating_sub(self.chunks.end_of_current()), state);
    }

    /// Adds a span. `false` if it is not there any more, or contradicts itself each time that it is read.
    fn span(&mut self, entry: &Entry, record: &[u8]) -> bool {
        let found = self.found;
        let bytes = entry.end - entry.start;
        if entry.class == 0 {
            let is_there = self.is_span(entry, record);
            if is_there {
                self.chunks.push(bytes, ChunkState::Live);
            }
            return is_there;
        }
        let class = found.classes.get(entry.class).filter(|class| class.pages << found.map.page_bits == bytes);
        let Some((class, free)) = class.and_then(|class| Some((class, self.read(entry, class, record)?))) else { return false };
        let starts = (entry.start..).step_by(class.bytes as usize);
        let objects: Vec<ChunkState> = starts.zip(&free).map(|(object, &is_free)| self.state(object, is_free)).collect();
        self.chunks.append(&objects, |&state| (class.bytes, state));
        self.chunks.push(bytes.saturating_sub(class.objects * class.bytes), ChunkState::Overhead);
        true
    }

    /// Whether a record is that of a span.
    fn is_span(&self, entry: &Entry, record: &[u8]) -> bool {
        let page_bits = self.found.map.page_bits;
        self.found.map.span(record).is_some_and(|span| span.range(page_bits) == (entry.start..entry.end))
    }

    fn state(&self, object: u64, is_free: bool) -> ChunkState {
        match is_free {
            true => ChunkState::Free,
            false if self.found.caches.objects.binary_search(&object).is_ok() => ChunkState::Tcache,
            false if self.proxies.binary_search(&object).is_ok() => ChunkState::Overhead,
            false => ChunkState::Live,
        }
    }

    /// Which objects of a span are free. It is read again where it contradicts itself; `None` if it always does, or is another span.
    fn read(&mut self, entry: &Entry, class: &Class, record: &[u8]) -> Option<Vec<bool>> {
        let mut record = record.to_vec();
        for attempt in 0..TRIES {
            if attempt > 0 {
                record = self.memory.bytes(entry.span, SPAN_BYTES)?;
            }
            if !self.is_span(entry, &record) {
                return None;
            }
            let objects = match self.found.form.needs_objects(&record, class) {
                true if attempt == 0 => self.objects(entry.start..entry.end),
                // With pages that were first touched since.
                true => read_present(self.memory, entry.start..entry.end),
                false => Vec::new(),
            };
            if let Some(free) = self.found.form.free(&record, class, &objects) {
                return Some(free);
            }
        }
        None
    }

    /// The present memory of a span; zeros for the rest.
    fn objects(&mut self, range: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0u8; (range.end - range.start) as usize];
        let runs = self.pages.runs_for(range.clone());
        for run in runs.within(range.clone()).filter(|run| run.state.present) {
            let (from, to) = ((run.start - range.start) as usize, (run.end - range.start) as usize);
            let Some(part) = bytes.get_mut(from..to) else { continue };
            let length = part.len();
            self.memory.read_pieces(&[Piece { addr: run.start, bytes: length }], part);
        }
        self.pacer.read(bytes.len() as u64);
        bytes
    }

    fn finish(mut self) -> (ChunkTable, WalkQuality) {
        self.chunks.sort_regions();
        (self.quality.windows, self.quality.read_bytes) = (self.pacer.windows, self.pacer.read_bytes);
        (self.chunks, self.quality)
    }
}
