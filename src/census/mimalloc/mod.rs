//! mimalloc 2.x and 3.x: found by form, without a symbol; any number of threads, abandoned pages, huge blocks.
//!
//! ```text
//! 2.x: segments (at multiples of 32 MiB) ──┐
//! 3.x: page map ─→ arenas, own mappings ───┴→ pages (blocks of one size) ─→ chunks, account
//! ```
//!
//! Live are the blocks that the program holds: those that another thread freed and that their owner has not taken over yet are free here,
//! though mimalloc still counts them. Not read: builds that encode their lists (`MI_SECURE`, `MI_DEBUG`).

pub mod arenas;
pub mod pages;
pub mod segments;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use self::arenas::Arenas;
use self::pages::StartRule;
use self::segments::{Gap, Identity, Page, PageForm, SEGMENT_BYTES, SEGMENTS_MAX, Segment};
use super::account::{HeapAccount, Level, Sums, occupancy_of};
use super::chunks::{ChunkState, ChunkTable};
use super::memory::{Memory, MemoryError};
use super::objects::{anonymous_ranges, joined, range_of, unbacked_ranges};
use super::pace::Pacer;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{HeapReader, HeapWalk, Sight};
use super::shares::{self, Shared};
use crate::allocator::Allocator;
use crate::units::counted;

/// Places examined for segments.
const PLACES_MAX: usize = 1 << 16;
/// Heaps whose lists of blocks freed by other threads are followed: one for each thread and `mi_heap_new`.
const HEAPS_MAX: usize = 1 << 14;
/// Blocks in all of these lists.
const DELAYED_MAX: usize = 1 << 20;
/// Blocks that other threads freed which are followed where only counts are wanted: some milliseconds.
const FOREIGN_MAX: u64 = 1 << 14;
/// Times that a page is read which contradicts itself: the program was changing it.
const TRIES: usize = 3;

/// Reads mimalloc's heaps.
#[derive(Debug, Default)]
pub struct Reader;

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Mimalloc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        let found = find(sight).or_else(|| {
            let Arenas { form, releases, list, left_out } = arenas::find(sight)?;
            let (name, returns_all) = (releases.name(form), releases.returns_all());
            Some(Found { form, releases: name, rule: StartRule::Fixed, list, returns_all, left_out })
        });
        Ok(found.map(|found| walk(sight, &found)))
    }
}

/// The segments of a process, or what 3.x has instead, by address.
struct Found {
    form: PageForm,
    releases: &'static str,
    rule: StartRule,
    list: Vec<Segment>,
    /// Whether it is known what a collection returns.
    returns_all: bool,
    /// Pages and more that were left out because there were too many.
    left_out: u64,
}

impl Found {
    /// How many there are of each kind of extent.
    fn extents(&self) -> String {
        let all = self.list.len() as u64;
        if self.form.is_in_segments() {
            return counted(all, "segment");
        }
        let alone = self.list.iter().filter(|extent| extent.info_bytes == 0).count() as u64;
        match alone {
            0 => counted(all, "arena"),
            alone => format!("{}, {}", counted(all - alone, "arena"), counted(alone, "large block")),
        }
    }
}

/// Finds the segments: those of the layout and number that most have.
fn find(sight: &Sight<'_>) -> Option<Found> {
    let unbacked = unbacked_ranges(sight.maps);
    let is_mapped = |range: &Range<u64>| range_of(&unbacked, range.start).is_some_and(|own| range.end <= own.end);
    let mut by_identity: BTreeMap<Identity, Vec<Segment>> = BTreeMap::new();
    for addr in places(sight) {
        for (identity, segment) in segments::read(sight.memory, addr, is_mapped) {
            let list = by_identity.entry(identity).or_default();
            if list.len() < SEGMENTS_MAX && list.last().is_none_or(|last| last.range.end <= segment.range.start) {
                list.push(segment);
            }
        }
    }
    let (identity, list) = by_identity.into_iter().max_by_key(|(_, list)| list.len())?;
    let agreeing = |rule: &StartRule| {
        let pages = list.iter().flat_map(|segment| &segment.pages);
        pages.filter(|page| page.block_bytes > 0 && rule.agrees(page) == Some(true)).count()
    };
    let rule = StartRule::ALL.into_iter().rev().max_by_key(agreeing)?;
    let form = identity.form.pages;
    Some(Found { form, releases: form.releases(), rule, list, returns_all: true, left_out: 0 })
}

/// Where a segment can begin: the multiples of its alignment in private anonymous memory.
fn places(sight: &Sight<'_>) -> Vec<u64> {
    let mut places = Vec::new();
    for range in joined(&anonymous_ranges(sight.maps)) {
        let Some(first) = range.start.checked_next_multiple_of(SEGMENT_BYTES) else { continue };
        places.extend((first..range.end).step_by(SEGMENT_BYTES as usize).take(PLACES_MAX - places.len().min(PLACES_MAX)));
    }
    places
}

fn walk(sight: &Sight<'_>, found: &Found) -> HeapWalk {
    let layout = format!("mimalloc {}, {}", found.releases, found.extents());
    let mut account = HeapAccount::new(Allocator::Mimalloc, layout);
    let mut pages = PageCache::new(sight.memory);
    let mut extents: Vec<(u32, Range<u64>)> = Vec::with_capacity(found.list.len());
    for segment in &found.list {
        let residency = pages.residency(segment.range.clone());
        account.ladder.extent_bytes += segment.range.end - segment.range.start;
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
        extents.push((0, segment.range.clone()));
    }
    let mut quality = WalkQuality { windows: found.list.len() as u64, ..WalkQuality::default() };
    let mut chunks = ChunkTable::default();
    if sight.options.level == Level::Full {
        let all = shares::walk(Walk::new(sight, found), &found.list);
        account.ladder.trimmable_bytes = found.returns_all.then_some(all.trimmable_bytes);
        (chunks, quality) = all.finish();
        fill(&mut account, &chunks, &mut pages);
        quality.unknown_bytes = account.ladder.unknown_bytes.unwrap_or(0);
    } else if sight.options.level == Level::Sampled {
        let mut all = Walk::new(sight, found);
        let (live, error) = all.by_counts(found);
        (account.live_bytes_est, account.live_bytes_stderr) = (Some(live), Some(error));
        quality = all.finish().1;
    }
    quality.broken_headers += found.left_out;
    quality.judge(account.ladder.extent_bytes, account.off_balance_bytes().unwrap_or(0) == 0);
    HeapWalk { account, quality, chunks, extents }
}

/// The figures that the chunks give.
fn fill(account: &mut HeapAccount, chunks: &ChunkTable, pages: &mut PageCache<'_>) {
    let sums = Sums::of(chunks, &mut []);
    account.ladder.live_bytes = Some(sums.bytes_in(ChunkState::Live));
    account.live_allocations = Some(sums.chunks_in(ChunkState::Live));
    account.free_bytes = Some(sums.bytes_in(ChunkState::Free));
    account.free_chunks = Some(sums.chunks_in(ChunkState::Free));
    account.details.cached_bytes = Some(0);
    account.overhead_bytes = sums.bytes_in(ChunkState::Overhead);
    // What the table of chunks had no room for is unknown too.
    let left_out = account.ladder.extent_bytes.saturating_sub(sums.bytes.iter().sum());
    account.ladder.unknown_bytes = Some(sums.bytes_in(ChunkState::Unknown).saturating_add(left_out));
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
    let occupancy = occupancy_of(chunks, pages);
    account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
    account.details.kept_bytes = Some(occupancy.free_unpinned_bytes.saturating_sub(account.ladder.trimmable_bytes.unwrap_or(0)));
    account.occupancy = Some(occupancy);
}

/// A walk over pages.
struct Walk<'a> {
    memory: &'a dyn Memory,
    form: PageForm,
    rule: StartRule,
    /// Blocks in the lists of heaps, by address.
    delayed: Vec<u64>,
    pacer: Pacer,
    pages: PageCache<'a>,
    chunks: ChunkTable,
    quality: WalkQuality,
    trimmable_bytes: u64,
    /// Contents of the page that is being read.
    bytes: Vec<u8>,
}

impl Shared<Segment> for Walk<'_> {
    fn threads(&self) -> usize {
        self.pacer.threads()
    }

    fn of_thread(&self) -> Self {
        Self {
            delayed: self.delayed.clone(),
            pacer: self.pacer.of_thread(),
            pages: PageCache::new(self.memory),
            chunks: ChunkTable::for_mimalloc(),
            quality: WalkQuality::default(),
            trimmable_bytes: 0,
            bytes: Vec::new(),
            ..*self
        }
    }

    fn take_over(&mut self, other: &Self) {
        self.chunks.append_regions(&other.chunks);
        self.quality.add(&other.quality);
        self.pacer.add(&other.pacer);
        self.trimmable_bytes += other.trimmable_bytes;
    }

    fn add(&mut self, segment: &Segment) {
        self.chunks.begin_region(segment.range.start, 0);
        self.chunks.push(segment.info_bytes, ChunkState::Overhead);
        let (mut is_free, mut free_resident_bytes) = (self.form.is_in_segments(), 0);
        for page in &segment.pages {
            match self.page(page) {
                true => free_resident_bytes += self.pages.resident_bytes(page.range()),
                false => is_free = false,
            }
        }
        if is_free {
            self.trimmable_bytes += self.pages.resident_bytes(segment.range.clone());
        } else if self.form.collects() || segment.is_abandoned {
            self.trimmable_bytes += free_resident_bytes;
        }
        // A last slice that is not used.
        self.chunks.push(segment.range.end.saturating_sub(self.chunks.end_of_current()), ChunkState::Overhead);
    }
}

impl<'a> Walk<'a> {
    fn new(sight: &Sight<'a>, found: &Found) -> Self {
        let mut walk = Self {
            memory: sight.memory,
            form: found.form,
            rule: found.rule,
            delayed: Vec::new(),
            pacer: Pacer::start(sight.options.pace),
            pages: PageCache::new(sight.memory),
            chunks: ChunkTable::for_mimalloc(),
            quality: WalkQuality::default(),
            trimmable_bytes: 0,
            bytes: Vec::new(),
        };
        walk.follow_heaps(found);
        walk
    }

    /// Follows the lists of blocks that other threads freed while their pages were full.
    fn follow_heaps(&mut self, found: &Found) {
        let Some(delayed_at) = found.form.delayed_at() else { return };
        let in_use = || found.list.iter().flat_map(|segment| &segment.pages).filter(|page| page.block_bytes > 0);
        let heaps: BTreeSet<u64> = in_use().map(|page| page.heap).filter(|&heap| heap != 0).take(HEAPS_MAX).collect();
        let is_block = |block: u64| {
            let at = found.list.partition_point(|segment| segment.range.start <= block);
            let segment = at.checked_sub(1).and_then(|at| found.list.get(at)).filter(|segment| segment.range.contains(&block));
            segment.is_some_and(|segment| {
                let after = segment.pages.partition_point(|page| page.addr <= block);
                let page = after.checked_sub(1).and_then(|at| segment.pages.get(at)).filter(|page| page.block_bytes > 0);
                page.is_some_and(|page| block.checked_sub(found.rule.start(page)).is_some_and(|at| at % page.block_bytes == 0))
            })
        };
        for heap in heaps {
            let (from, mut next) = (self.delayed.len(), self.memory.word(heap.wrapping_add(delayed_at)).unwrap_or(0));
            while next != 0 {
                if !is_block(next) || self.delayed.len() >= DELAYED_MAX {
                    // Another layout, or the list is being taken over.
                    self.quality.broken_lists += 1;
                    self.delayed.truncate(from);
                    break;
                }
                self.delayed.push(next);
                next = self.memory.word(next).unwrap_or(0);
            }
        }
        self.delayed.sort_unstable();
        self.delayed.dedup();
    }

    /// Live bytes by the counts of all pages, without their blocks, and by how much they may be too high: blocks in lists of other threads
    /// that were not followed.
    fn by_counts(&mut self, found: &Found) -> (u64, u64) {
        let (mut live, mut error, mut left) = (0u64, 0u64, FOREIGN_MAX);
        for page in found.list.iter().flat_map(|segment| &segment.pages).filter(|page| page.block_bytes > 0) {
            let mut free = self.delayed_in(page).len() as u64;
            let mut next = page.thread_free;
            while next != 0 && left > 0 && free < page.used {
                (left, free) = (left - 1, free + 1);
                next = self.memory.word(next).unwrap_or(0);
            }
            let in_use = page.used.saturating_sub(free).saturating_mul(page.block_bytes);
            live = live.saturating_add(in_use);
            error = error.saturating_add(if next == 0 { 0 } else { in_use });
        }
        (live, error)
    }

    /// The blocks of a page in the lists of heaps.
    fn delayed_in(&self, page: &Page) -> &[u64] {
        let from = self.delayed.partition_point(|&block| block < page.addr);
        let to = self.delayed.partition_point(|&block| block < page.addr.saturating_add(page.bytes));
        self.delayed.get(from..to).unwrap_or_default()
    }

    /// Adds a page; returns whether no block of it is in use.
    fn page(&mut self, page: &Page) -> bool {
        let state = match page.gap {
            Gap::Free => None,
            Gap::Metadata => Some(ChunkState::Overhead),
            Gap::Unknown => Some(ChunkState::Unknown),
        };
        if let Some(state) = state {
            self.chunks.push(page.bytes, state);
            return false;
        }
        // Its entry was read when all were found. Of a busy heap, pages that were full then would be counted so, and the others as they are
        // now, on average fuller.
        let page = &if page.block_bytes > 0 { page.again(self.memory, self.form).unwrap_or(*page) } else { *page };
        let mut is_free = page.block_bytes == 0 || page.used == 0;
        if is_free {
            self.chunks.push(page.bytes, ChunkState::Free);
        } else {
            match self.read(page) {
                Some(chunks) => {
                    is_free = chunks.iter().all(|(_, state)| *state != ChunkState::Live);
                    self.chunks.append(&chunks, |&chunk| chunk);
                }
                None => {
                    self.chunks.push(page.bytes, ChunkState::Unknown);
                }
            }
        }
        is_free
    }

    /// Reads a page's blocks, and its entry again where the two contradict each other. `None` if they always do.
    fn read(&mut self, page: &Page) -> Option<Vec<(u64, ChunkState)>> {
        if self.pacer.is_over() {
            self.quality.unread_bytes += page.bytes;
            return None;
        }
        let start = self.rule.start(page);
        let delayed = self.delayed_in(page).to_vec();
        let mut page = *page;
        for _ in 0..TRIES {
            let has_lists = page.free.iter().any(|&block| block != 0) || page.thread_free != 0;
            let wanted = page.capacity.saturating_mul(page.block_bytes).min(page.bytes);
            let length = if has_lists { usize::try_from(wanted).ok()? } else { 0 };
            if self.bytes.len() < length {
                self.bytes.resize(length, 0);
            }
            let bytes = self.bytes.get_mut(..length)?;
            self.pages.copy(start, bytes);
            self.pacer.read(length as u64);
            if let Some(chunks) = pages::chunks(&page, start, bytes, &delayed) {
                return Some(chunks);
            }
            self.pages.forget();
            page = page.again(self.memory, self.form)?;
        }
        self.quality.broken_headers += 1;
        None
    }

    fn finish(mut self) -> (ChunkTable, WalkQuality) {
        self.chunks.sort_regions();
        (self.quality.windows, self.quality.read_bytes) = (self.pacer.windows, self.pacer.read_bytes);
        (self.chunks, self.quality)
    }
}
