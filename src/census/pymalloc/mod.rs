//! CPython's allocator of objects of up to 512 bytes (3.8 to 3.14): a heap of its own beside that of malloc.
//!
//! ```text
//! arenas (the table, found by form) ─→ pools (header, blocks, free list) ─→ chunks, account
//!                                   └→ sample: pools drawn at random
//! ```
//!
//! Live means in use by the interpreter, as `sys._debugmallocstats()` counts: objects in its own free lists (floats, tuples, frames) are
//! among them. An arena is returned to the system once no block of it is in use, and no call returns less or more: nothing is trimmable.

pub mod arenas;
pub mod pools;
pub mod sample;

use std::ops::Range;

use serde::Serialize;

use self::arenas::{Arena, Arenas, Form, Places};
use super::account::{HeapAccount, Level, Sums, occupancy_of};
use super::chunks::{ChunkState, ChunkTable};
use super::memory::{Memory, MemoryError};
use super::objects::{anonymous_ranges, joined};
use super::pace::Pacer;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{HeapReader, HeapWalk, Sight};
use super::shares::{self, Shared};
use crate::allocator::Allocator;
use crate::units::HumanBytes;

/// Times that a pool is read which contradicts itself: the interpreter was changing it.
const TRIES: usize = 3;

/// Arenas and pools. Free bytes are held back at two levels: by a block in use of their pool, and by a pool in use of their arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct PoolAccount {
    /// Arenas.
    pub arenas: u64,
    /// Of them, those without blocks in use. CPython keeps one at most, and returns the others at once.
    pub free_arenas: u64,
    /// Bytes of an arena.
    pub arena_bytes: u64,
    /// Bytes of a pool.
    pub pool_bytes: u64,
    /// Pools with blocks in use.
    pub used_pools: u64,
    /// Pools without, and those never used.
    pub free_pools: u64,
    /// Bytes of free blocks in pools that also have blocks in use: only blocks of the same size can take their place. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_in_used_pools_bytes: Option<u64>,
    /// Resident bytes of free pools in arenas with blocks in use: they are returned when the last block of the arena is freed. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_pools_resident_bytes: Option<u64>,
    /// Resident bytes of the arenas without blocks in use.
    pub free_arenas_resident_bytes: u64,
}

/// Reads CPython's arenas.
#[derive(Debug, Default)]
pub struct Reader(Places);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Pymalloc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        let writable = joined(&anonymous_ranges(sight.maps));
        let found = arenas::find(sight.memory, sight.objects, &writable, &mut self.0);
        Ok(found.map(|found| walk(sight, &found)))
    }
}

fn walk(sight: &Sight<'_>, arenas: &Arenas) -> HeapWalk {
    let Form { arena_bytes, pool_bytes } = arenas.form;
    let layout = format!("in {}, arenas of {}, pools of {}", arenas.object, HumanBytes(arena_bytes), HumanBytes(pool_bytes));
    let mut account = HeapAccount::new(Allocator::Pymalloc, layout);
    let mut pools = PoolAccount { arenas: arenas.list.len() as u64, arena_bytes, pool_bytes, ..PoolAccount::default() };
    let mut pages = PageCache::new(sight.memory);
    let mut extents: Vec<(u32, Range<u64>)> = Vec::with_capacity(arenas.list.len());
    for arena in &arenas.list {
        let range = arena.range(arenas.form);
        account.ladder.extent_bytes += arena_bytes;
        pools.used_pools += arena.pools - arena.free_pools;
        pools.free_pools += arena.free_pools;
        if arena.is_free() {
            pools.free_arenas += 1;
            pools.free_arenas_resident_bytes += pages.resident_bytes(range.clone());
        }
        extents.push((0, range));
    }
    let ranges: Vec<Range<u64>> = extents.iter().map(|(_, range)| range.clone()).collect();
    for range in joined(&ranges) {
        let residency = pages.residency(range);
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
    }
    // Nothing is returned by a call, and nothing is cached for a thread.
    (account.ladder.trimmable_bytes, account.details.cached_bytes) = (Some(0), Some(0));
    let pacer = Pacer::start(sight.options.pace);
    let (mut quality, mut chunks) = (WalkQuality::default(), ChunkTable::default());
    match sight.options.level {
        Level::Top => {}
        Level::Sampled => {
            let estimate = sample::estimate(sight.memory, arenas, pacer);
            (account.live_bytes_est, account.live_bytes_stderr) = (Some(estimate.live_bytes_est), Some(estimate.live_bytes_stderr));
            account.occupancy_est = Some(estimate.occupancy);
            (quality.windows, quality.broken_headers) = (estimate.pools, estimate.lost);
            quality.read_bytes = estimate.pools * pool_bytes;
        }
        Level::Full => {
            let all = shares::walk(Walk::new(sight.memory, arenas.form, pacer), &arenas.list);
            pools.free_in_used_pools_bytes = Some(all.free_in_used_pools_bytes);
            pools.free_pools_resident_bytes = Some(all.free_pools_resident_bytes);
            (chunks, quality) = all.finish();
            fill(&mut account, &chunks, &mut pages);
            quality.unknown_bytes = account.ladder.unknown_bytes.unwrap_or(0);
        }
    }
    quality.broken_headers += arenas.torn;
    quality.judge(account.ladder.extent_bytes, account.off_balance_bytes().unwrap_or(0) == 0);
    account.pools = Some(pools);
    HeapWalk { account, quality, chunks, extents }
}

/// The figures that the chunks give.
fn fill(account: &mut HeapAccount, chunks: &ChunkTable, pages: &mut PageCache<'_>) {
    let sums = Sums::of(chunks, &mut []);
    account.ladder.live_bytes = Some(sums.bytes_in(ChunkState::Live));
    account.live_allocations = Some(sums.chunks_in(ChunkState::Live));
    account.free_bytes = Some(sums.bytes_in(ChunkState::Free));
    account.free_chunks = Some(sums.chunks_in(ChunkState::Free));
    account.overhead_bytes = sums.bytes_in(ChunkState::Overhead);
    // What the table of chunks had no room for is unknown too.
    let left_out = account.ladder.extent_bytes.saturating_sub(sums.bytes.iter().sum());
    account.ladder.unknown_bytes = Some(sums.bytes_in(ChunkState::Unknown).saturating_add(left_out));
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
    let occupancy = occupancy_of(chunks, pages);
    account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
    account.details.kept_bytes = Some(occupancy.free_unpinned_bytes);
    account.occupancy = Some(occupancy);
}

/// How a pool was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    /// Its chunks are known.
    Sound,
    /// Its header is not in memory.
    Absent,
    /// It contradicts itself.
    Broken,
}

/// Reads pools, several at once where they follow each other.
struct PoolReader<'a> {
    pages: PageCache<'a>,
    pool_bytes: u64,
    /// What was copied last, and from where.
    window: Vec<u8>,
    held: Range<u64>,
    /// Of a pool that is read again, alone.
    again: Vec<u8>,
    /// The chunks of the last pool, as (bytes, state).
    chunks: Vec<(u64, ChunkState)>,
}

impl<'a> PoolReader<'a> {
    fn new(pages: PageCache<'a>, pool_bytes: u64, window_bytes: usize) -> Self {
        let pool = usize::try_from(pool_bytes).unwrap_or(1);
        let window = vec![0; (window_bytes / pool).max(1) * pool];
        Self { pages, pool_bytes, window, held: 0..0, again: vec![0; pool], chunks: Vec::new() }
    }

    /// Reads the pool at `addr` of arena `number`; those behind it, up to `until`, will be read next. Pages that were never touched, or are in
    /// swap, are zeros here: where blocks were in use, the pool contradicts itself.
    fn read(&mut self, addr: u64, number: u64, until: u64) -> Read {
        let pool = addr..addr.saturating_add(self.pool_bytes);
        if !self.pages.runs_for(pool.clone()).state_at(addr).present {
            return Read::Absent;
        }
        if addr < self.held.start || pool.end > self.held.end {
            let bytes = usize::try_from(until.max(pool.end) - addr).unwrap_or(usize::MAX).min(self.window.len());
            let Some(window) = self.window.get_mut(..bytes) else { return Read::Broken };
            self.pages.copy(addr, window);
            self.held = addr..addr.saturating_add(bytes as u64);
        }
        let at = usize::try_from(addr - self.held.start).unwrap_or(usize::MAX);
        let bytes = self.window.get(at..).and_then(|rest| rest.get(..self.again.len()));
        if bytes.is_some_and(|bytes| pools::list_chunks(bytes, addr, number, &mut self.chunks).is_some()) {
            return Read::Sound;
        }
        for _ in 1..TRIES {
            self.pages.forget();
            if !self.pages.runs_for(pool.clone()).state_at(addr).present {
                return Read::Absent;
            }
            self.pages.copy(addr, &mut self.again);
            if pools::list_chunks(&self.again, addr, number, &mut self.chunks).is_some() {
                return Read::Sound;
            }
        }
        Read::Broken
    }
}

/// A walk over all pools.
struct Walk<'a> {
    form: Form,
    memory: &'a dyn Memory,
    pacer: Pacer,
    reader: PoolReader<'a>,
    chunks: ChunkTable,
    quality: WalkQuality,
    free_in_used_pools_bytes: u64,
    free_pools_resident_bytes: u64,
}

impl Shared<Arena> for Walk<'_> {
    fn threads(&self) -> usize {
        self.pacer.threads()
    }

    fn of_thread(&self) -> Self {
        Self::new(self.memory, self.form, self.pacer.of_thread())
    }

    /// Adds an arena: alignment, pools that were used at some time, pools never used, alignment.
    fn add(&mut self, arena: &Arena) {
        let Form { pool_bytes, .. } = self.form;
        let (range, first) = (arena.range(self.form), arena.first_pool(self.form));
        self.chunks.begin_region(range.start, 0);
        self.chunks.push(first - range.start, ChunkState::Overhead);
        let mut at = first;
        while at < arena.pool_address {
            self.pool(at, arena);
            at += pool_bytes;
        }
        let end = first + arena.pools * pool_bytes;
        self.chunks.push(end.saturating_sub(at), ChunkState::Free);
        self.chunks.push(range.end.saturating_sub(end), ChunkState::Overhead);
        if !arena.is_free() {
            self.free_pools_resident_bytes += self.reader.pages.resident_bytes(at..end);
        }
    }

    fn take_over(&mut self, other: &Self) {
        self.chunks.append_regions(&other.chunks);
        self.quality.add(&other.quality);
        self.pacer.add(&other.pacer);
        self.free_in_used_pools_bytes += other.free_in_used_pools_bytes;
        self.free_pools_resident_bytes += other.free_pools_resident_bytes;
    }
}

impl<'a> Walk<'a> {
    fn new(memory: &'a dyn Memory, form: Form, pacer: Pacer) -> Self {
        let reader = PoolReader::new(PageCache::new(memory), form.pool_bytes, pacer.window_bytes());
        Self {
            form,
            memory,
            pacer,
            reader,
            chunks: ChunkTable::default(),
            quality: WalkQuality::default(),
            free_in_used_pools_bytes: 0,
            free_pools_resident_bytes: 0,
        }
    }

    fn pool(&mut self, addr: u64, arena: &Arena) {
        let Form { pool_bytes, .. } = self.form;
        if self.pacer.is_over() {
            self.quality.unread_bytes += pool_bytes;
            self.chunks.push(pool_bytes, ChunkState::Unknown);
            return;
        }
        self.pacer.read(pool_bytes);
        match self.reader.read(addr, arena.number, arena.pool_address) {
            Read::Sound => {}
            failed => {
                match failed {
                    Read::Absent => self.quality.unread_bytes += pool_bytes,
                    _ => self.quality.broken_headers += 1,
                }
                self.chunks.push(pool_bytes, ChunkState::Unknown);
                return;
            }
        }
        let PoolReader { chunks, pages, .. } = &mut self.reader;
        if let [(_, ChunkState::Free)] = chunks[..] {
            if !arena.is_free() {
                self.free_pools_resident_bytes += pages.resident_bytes(addr..addr + pool_bytes);
            }
        } else {
            let free = chunks.iter().filter(|(_, state)| *state == ChunkState::Free);
            self.free_in_used_pools_bytes += free.map(|(bytes, _)| bytes).sum::<u64>();
        }
        self.chunks.append(chunks, |&chunk| chunk);
    }

    fn finish(mut self) -> (ChunkTable, WalkQuality) {
        self.chunks.sort_regions();
        (self.quality.windows, self.quality.read_bytes) = (self.pacer.windows, self.pacer.read_bytes);
        (self.chunks, self.quality)
    }
}
