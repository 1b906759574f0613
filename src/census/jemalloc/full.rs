//! Level full: every record, every region. The page map is read by ascending address and its records some thousands at a time, so that only
//! the table of chunks and the list of extents grow with the heap.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::super::account::{ArenaAccount, HeapAccount, Sums, occupancy_of};
use super::super::chunks::{CHUNKS_MAX, ChunkState, ChunkTable};
use super::super::memory::{Memory, is_user_address};
use super::super::objects::{Data, range_of};
use super::super::page_cache::PageCache;
use super::super::quality::WalkQuality;
use super::super::radix::{self, PageMapRoot, Shape};
use super::super::reader::HeapWalk;
use super::block::Held;
use super::metadata::Block;
use super::record::{ACTIVE, Agreement, DIRTY, Extent, Form, MUZZY, Pages, RETAINED, is_region_free};
use super::telling::Telling;
use super::{NO_ARENA, POINTER_MASK, layout, one_word, own_blocks, pages_of, read_record};
use crate::allocator::Allocator;

/// Words of the page map whose records are read together: 1 MiB of records where they lie side by side.
const BATCH_WORDS: usize = 1 << 13;
/// Maximum number of records read: 64 GiB of slabs of one page. Records beyond it count as torn.
const RECORDS_MAX: u64 = 1 << 24;
/// Maximum number of readings of the page map from its start: it is read again if a later record shows that earlier ones were misread.
const READINGS_MAX: usize = 3;
/// Low bits of an address within the 2 MiB to which jemalloc's own blocks are aligned.
const PLACE_MASK: u64 = (2 << 20) - 1;

/// A word of the page map.
#[derive(Debug, Clone, Copy)]
struct Word {
    record: u64,
    page: u64,
    class: u64,
}

/// Properties of the build, which all records together show.
#[derive(Debug, Clone, Copy)]
struct Build {
    pages: Pages,
    agreement: Agreement,
    /// Whether large blocks have a page more than they need: one that begins inside its first page shows it for all.
    is_padded: bool,
}

impl Build {
    /// From some records in use, slabs and large blocks.
    fn guess(memory: &dyn Memory, found: &PageMapRoot, shape: Shape) -> Self {
        let pages = pages_of(shape);
        let records = Telling::of(memory, found, shape).records(memory, pages);
        let mut build = Self { pages, agreement: Agreement::of(&records, pages), is_padded: false };
        build.is_padded = records.iter().filter_map(|(record, _)| build.parse(record)).any(|extent| tells_padding(&extent));
        build
    }

    fn form(&self) -> Form {
        self.agreement.form()
    }

    fn parse(&self, record: &[u8]) -> Option<Extent> {
        Extent::parse(record, self.form(), self.pages)
    }

    fn pad_bytes(&self) -> u64 {
        if self.is_padded { self.pages.bytes() } else { 0 }
    }

    fn reads_as(&self, other: &Self) -> bool {
        self.form() == other.form() && self.is_padded == other.is_padded
    }
}

fn tells_padding(extent: &Extent) -> bool {
    extent.state == ACTIVE && !extent.is_slab && extent.offset_bytes > 0
}

/// Takes the census of every record that the page map leads to. `data`: that of the file with the page map. `held`: what the threads' caches
/// hold, if that is known.
pub fn take(memory: &dyn Memory, found: &PageMapRoot, shape: Shape, mapped: &[Range<u64>], data: &Data, held: Option<&[Held]>) -> HeapWalk {
    let mut build = Build::guess(memory, found, shape);
    let mut readings = 1;
    loop {
        let mut reading = Reading::new(memory, mapped, build, held);
        reading.is_last = readings == READINGS_MAX;
        radix::visit(memory, found.root, shape, |page, entry| reading.word(page, one_word(entry, shape)));
        reading.read_batch();
        if !reading.is_void {
            return reading.finish(found, data.words().map(|(_, word)| word));
        }
        build = reading.build;
        readings += 1;
    }
}

/// What was read so far.
struct Reading<'a> {
    memory: &'a dyn Memory,
    mapped: &'a [Range<u64>],
    pages: PageCache<'a>,
    build: Build,
    /// What threads' caches hold, by ascending address, if it is known; by the records all of that is in use.
    held: Option<&'a [Held]>,
    /// Extents were counted that would now be read differently: the reading must be repeated.
    is_void: bool,
    /// Whether it continues in that case.
    is_last: bool,
    batch: Vec<Word>,
    last_record: u64,
    records: u64,
    torn: u64,
    /// The 2 MiB in which records lie.
    places: BTreeSet<u64>,
    table: ChunkTable,
    /// The arena of the extents in use that are the table's current region, if they are.
    open_region: Option<u32>,
    extents: Vec<(u32, Range<u64>)>,
    arenas: BTreeMap<u32, ArenaAccount>,
    sums: Totals,
}

/// Sums over extents, in bytes unless they count.
#[derive(Debug, Default)]
struct Totals {
    extent: u64,
    resident: u64,
    swapped: u64,
    huge: u64,
    live: u64,
    live_count: u64,
    cached: u64,
    free: u64,
    free_extents: u64,
    largest_free: u64,
    purgeable: u64,
    taken_for_resident: u64,
    unread: u64,
}

impl<'a> Reading<'a> {
    fn new(memory: &'a dyn Memory, mapped: &'a [Range<u64>], build: Build, held: Option<&'a [Held]>) -> Self {
        Self {
            memory,
            mapped,
            held,
            pages: PageCache::new(memory),
            build,
            is_void: false,
            is_last: false,
            batch: Vec::with_capacity(BATCH_WORDS),
            last_record: 0,
            records: 0,
            torn: 0,
            places: BTreeSet::new(),
            table: ChunkTable::default(),
            open_region: None,
            extents: Vec::new(),
            arenas: BTreeMap::new(),
            sums: Totals::default(),
        }
    }

    /// Takes the next word of the page map, by ascending address.
    fn word(&mut self, page: u64, word: u64) {
        let record = word & POINTER_MASK;
        // All pages of a slab refer to its record, of a large block the first and the last one.
        if record == self.last_record || self.is_void || !is_user_address(record) {
            return;
        }
        if record & !PLACE_MASK != self.last_record & !PLACE_MASK {
            self.places.insert(record & !PLACE_MASK);
        }
        self.last_record = record;
        self.records += 1;
        if self.records > RECORDS_MAX {
            self.torn += 1;
            return;
        }
        self.batch.push(Word { record, page, class: word >> 48 });
        if self.batch.len() >= BATCH_WORDS {
            self.read_batch();
        }
    }

    /// Reads the records of the words that have come together, and counts their extents.
    fn read_batch(&mut self) {
        let mut words = std::mem::take(&mut self.batch);
        words.sort_unstable_by_key(|word| (word.record, word.page));
        words.dedup_by_key(|word| word.record);
        let addrs: Vec<u64> = words.iter().map(|word| word.record).collect();
        let mut build = self.build;
        let record_bytes = build.pages.record_bytes();
        // The records one after another, and the pages that refer to them.
        let (mut raw, mut pages): (Vec<u8>, Vec<u64>) = (Vec::with_capacity(words.len() * record_bytes), Vec::with_capacity(words.len()));
        let mut in_order = words.iter();
        radix::read_records(self.memory, &addrs, record_bytes, |addr, bytes| {
            let Some(word) = in_order.next() else { return };
            match bytes.map(Cow::Borrowed).or_else(|| read_record(self.memory, addr, build.pages).map(Cow::Owned)) {
                Some(record) => {
                    build.agreement.add(&record, word.class, build.pages);
                    raw.extend_from_slice(&record);
                    pages.push(word.page);
                }
                None => self.torn += 1,
            }
        });
        let mut extents: Vec<(Extent, &[u8])> = Vec::with_capacity(pages.len());
        for (page, record) in pages.iter().zip(raw.chunks_exact(record_bytes)) {
            // A record that does not cover the page that refers to it has been reused for another extent.
            match build.parse(record).filter(|extent| (extent.addr..extent.end()).contains(page)) {
                Some(extent) => extents.push((extent, record)),
                None => self.torn += 1,
            }
        }
        build.is_padded |= extents.iter().any(|(extent, _)| tells_padding(extent));
        self.is_void |= !self.is_last && !self.extents.is_empty() && !build.reads_as(&self.build);
        self.build = build;
        if !self.is_void {
            extents.sort_unstable_by_key(|(extent, _)| (extent.addr, extent.bytes));
            extents.iter_mut().for_each(|(extent, record)| self.count(extent, record));
        }
        words.clear();
        self.batch = words;
    }

    /// Counts the next extent, with its record.
    fn count(&mut self, extent: &mut Extent, record: &[u8]) {
        let last = self.extents.last().map(|(_, range)| range.clone()).unwrap_or_default();
        let range = extent.addr..extent.end();
        if last == range {
            return;
        }
        // Extents lie in mappings, and two never overlap: anything else is a torn, stale or forged record.
        let is_inside = range_of(self.mapped, extent.addr).is_some_and(|mapping| extent.end() <= mapping.end);
        if extent.addr < last.end || !is_inside {
            self.torn += 1;
            return;
        }
        extent.settle_large(self.build.pad_bytes());
        self.extents.push((extent.arena, range.clone()));
        let residency = self.pages.residency(range);
        let sums = &mut self.sums;
        sums.extent = sums.extent.saturating_add(extent.bytes);
        sums.resident += residency.resident_bytes;
        sums.swapped += residency.swapped_bytes;
        sums.huge += residency.huge_bytes;
        let arena = self.arenas.entry(extent.arena).or_insert_with(|| new_arena(extent.arena));
        arena.pieces += 1;
        arena.extent_bytes += extent.bytes;
        arena.resident_bytes += residency.resident_bytes;
        if (self.table.len() as u64).saturating_add(extent.pages.regions_max() + 3) > CHUNKS_MAX as u64 {
            sums.unread = sums.unread.saturating_add(extent.bytes);
            return;
        }
        let (used, free_bytes) = match (extent.state, extent.is_slab) {
            (ACTIVE, true) => {
                let regions = extent.bytes / extent.region_bytes;
                let used = regions.saturating_sub(extent.free_regions);
                (used, (regions - used) * extent.region_bytes)
            }
            (ACTIVE, false) => (1, 0),
            _ => (0, extent.bytes),
        };
        let held = held_in(self.held.unwrap_or_default(), extent, record);
        let live_count = used.saturating_sub(held.len() as u64);
        let (live_bytes, cached_bytes) = (live_count * extent.region_bytes, (used - live_count) * extent.region_bytes);
        sums.live += live_bytes;
        sums.live_count += live_count;
        sums.cached += cached_bytes;
        sums.free += free_bytes;
        sums.free_extents += u64::from(extent.state != ACTIVE);
        // Retained extents have been returned already; pages of them that are still resident do not count.
        if extent.state != ACTIVE && extent.state != RETAINED {
            sums.purgeable += residency.resident_bytes;
            add(&mut arena.trimmable_bytes, residency.resident_bytes);
            add(&mut arena.trimmable_ranges, 1);
        }
        if extent.state <= DIRTY {
            sums.taken_for_resident = sums.taken_for_resident.saturating_add(extent.bytes);
        }
        let chunks = arena.chunks.get_or_insert_default();
        chunks.live_bytes += live_bytes;
        chunks.live_allocations += live_count;
        chunks.cached_bytes += cached_bytes;
        chunks.free_bytes += free_bytes;
        match extent.state {
            DIRTY => add(&mut arena.dirty_bytes, extent.bytes),
            MUZZY => add(&mut arena.muzzy_bytes, extent.bytes),
            RETAINED => add(&mut arena.retained_bytes, extent.bytes),
            _ => {}
        }
        self.add_chunks(extent, record, &held);
    }

    /// Adds an extent's regions, its large block or its free bytes to the table. Neighbours in use by one arena are one region of it.
    /// `held`: the regions that are in threads' caches, in ascending order.
    fn add_chunks(&mut self, extent: &Extent, record: &[u8], held: &[u64]) {
        let state_in_use = |region: u64| if held.binary_search(&region).is_ok() { ChunkState::Tcache } else { ChunkState::Live };
        let owner = Some(extent.arena).filter(|_| extent.state == ACTIVE);
        if owner.is_none() || owner != self.open_region || self.table.end_of_current() != extent.addr {
            self.table.begin_region(extent.addr, extent.arena);
        }
        self.open_region = owner;
        if extent.state != ACTIVE {
            self.table.push(extent.bytes, ChunkState::Free);
            self.sums.largest_free = self.sums.largest_free.max(extent.bytes);
        } else if extent.is_slab {
            let regions = extent.bytes / extent.region_bytes;
            let mut free_run = 0;
            for index in 0..regions {
                let is_free = is_region_free(record, index);
                self.table.push(extent.region_bytes, if is_free { ChunkState::Free } else { state_in_use(index) });
                free_run = if is_free { free_run + extent.region_bytes } else { 0 };
                self.sums.largest_free = self.sums.largest_free.max(free_run);
            }
            self.table.push(extent.bytes - regions * extent.region_bytes, ChunkState::Overhead);
        } else {
            let offset = extent.offset_bytes.min(extent.bytes - extent.region_bytes);
            self.table.push(offset, ChunkState::Overhead);
            self.table.push(extent.region_bytes, state_in_use(0));
            self.table.push(extent.bytes - extent.region_bytes - offset, ChunkState::Overhead);
        }
    }

    /// Adds jemalloc's own blocks: the allocated part and the rest are a chunk each.
    fn add_block(&mut self, block: &Block) {
        let residency = self.pages.residency(block.range());
        let sums = &mut self.sums;
        sums.extent = sums.extent.saturating_add(block.bytes);
        sums.resident += residency.resident_bytes;
        sums.swapped += residency.swapped_bytes;
        sums.huge += residency.huge_bytes;
        sums.taken_for_resident = sums.taken_for_resident.saturating_add(block.used_bytes.next_multiple_of(self.build.pages.bytes()));
        self.table.begin_region(block.addr, NO_ARENA);
        self.table.push(block.used_bytes, ChunkState::Overhead);
        self.table.push(block.bytes - block.used_bytes, ChunkState::Overhead);
    }

    fn finish(mut self, found: &PageMapRoot, words: impl Iterator<Item = u64>) -> HeapWalk {
        let known = self.extents.len() as u64;
        let plain: Vec<Range<u64>> = joined_ranges(&self.extents);
        let blocks = own_blocks(self.memory, self.mapped, words.chain(self.places.iter().copied()), &plain);
        blocks.iter().for_each(|block| self.add_block(block));
        self.extents.extend(blocks.iter().map(|block| (NO_ARENA, block.range())));
        self.extents.sort_unstable_by_key(|(_, range)| range.start);
        self.table.sort_regions();
        let Self { sums, table, mut pages, extents, arenas, torn, build, held, .. } = self;
        let mut account = HeapAccount::new(Allocator::Jemalloc, layout(build.form(), build.pages, found));
        account.ladder.extent_bytes = sums.extent;
        account.ladder.resident_bytes = sums.resident;
        account.details.swapped_bytes = sums.swapped;
        account.details.huge_bytes = sums.huge;
        account.allocator_resident_bytes = Some(sums.taken_for_resident);
        account.ladder.live_bytes = Some(sums.live);
        account.live_allocations = Some(sums.live_count);
        account.free_bytes = Some(sums.free);
        account.free_chunks = Some(sums.free_extents);
        account.ladder.unknown_bytes = Some(sums.unread);
        account.details.cached_bytes = held.map(|_| sums.cached);
        let understood = [sums.live, sums.cached, sums.free, sums.unread];
        account.overhead_bytes = understood.into_iter().fold(sums.extent, u64::saturating_sub);
        account.ladder.trimmable_bytes = Some(sums.purgeable);
        account.arenas = arenas.into_values().collect();
        let total = |bytes: fn(&ArenaAccount) -> Option<u64>| Some(account.arenas.iter().filter_map(bytes).fold(0, u64::saturating_add));
        account.dirty_bytes = total(|arena| arena.dirty_bytes);
        account.muzzy_bytes = total(|arena| arena.muzzy_bytes);
        account.retained_bytes = total(|arena| arena.retained_bytes);
        account.largest_free_bytes = Some(sums.largest_free);
        account.size_classes = Sums::of(&table, &mut []).size_classes;
        let occupancy = occupancy_of(&table, &mut pages);
        account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
        let whole = occupancy.free_unpinned_bytes + occupancy.cached_unpinned_bytes;
        account.details.kept_bytes = Some(whole.saturating_sub(sums.purgeable));
        account.occupancy = Some(occupancy);
        let mut quality = WalkQuality {
            windows: known,
            broken_headers: torn,
            unknown_bytes: sums.unread,
            unread_bytes: sums.unread,
            ..WalkQuality::default()
        };
        quality.judge(account.ladder.extent_bytes, torn.saturating_mul(100) <= known);
        HeapWalk { account, quality, chunks: table, extents }
    }
}

/// The regions of an extent in use that threads' caches hold, in ascending order.
fn held_in(held: &[Held], extent: &Extent, record: &[u8]) -> Vec<u64> {
    if extent.state != ACTIVE {
        return Vec::new();
    }
    let from = held.partition_point(|one| one.addr < extent.addr);
    let inside = held.iter().skip(from).take_while(|one| one.addr < extent.end()).map(|one| one.addr - extent.addr);
    if !extent.is_slab {
        return inside.filter(|&distance| distance == extent.offset_bytes).map(|_| 0).take(1).collect();
    }
    let regions = extent.bytes / extent.region_bytes;
    let region = |distance: u64| distance.is_multiple_of(extent.region_bytes).then(|| distance / extent.region_bytes);
    inside.filter_map(region).filter(|&region| region < regions && !is_region_free(record, region)).collect()
}

/// An empty arena.
fn new_arena(number: u32) -> ArenaAccount {
    let none = Some(0);
    ArenaAccount {
        address: u64::from(number),
        dirty_bytes: none,
        muzzy_bytes: none,
        retained_bytes: none,
        trimmable_bytes: none,
        trimmable_ranges: none,
        ..ArenaAccount::default()
    }
}

fn add(sum: &mut Option<u64>, bytes: u64) {
    *sum = Some(sum.unwrap_or(0).saturating_add(bytes));
}

/// The extents' ranges, joined where they touch.
fn joined_ranges(extents: &[(u32, Range<u64>)]) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for (_, range) in extents {
        match out.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => out.push(range.clone()),
        }
    }
    out
}
