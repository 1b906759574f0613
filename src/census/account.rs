//! The figures of a census. Field names are those of `--json` and of the metrics.

use serde::Serialize;

use super::chunks::{Chunk, ChunkState, ChunkTable};
use super::page_cache::PageCache;
use super::pymalloc::PoolAccount;
use super::quality::WalkQuality;
use super::runtime::Runtimes;
use crate::allocator::Allocator;
use crate::heap::ladder::{Details, Ladder, both};
use crate::heap::occupancy::{Occupancy, OccupancyBuilder};

/// How much of the heap to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Extent, tops, mmapped chunks, arenas, resident bytes: about a millisecond.
    Top,
    /// Like top, with shares of live and free bytes estimated from random windows, and their errors: about 20 ms whatever the heap's size, or
    /// per GiB if its blocks are large.
    /// Chunks with mappings of their own are found one by one.
    Sampled,
    /// Every chunk.
    Full,
}

impl Level {
    /// Its name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Top => "top",
            Self::Sampled => "sampled",
            Self::Full => "full",
        }
    }
}

/// One census of one process.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Census {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub comm: String,
    /// The level of the census.
    pub level: Level,
    /// The malloc heaps found.
    pub heaps: Vec<HeapAccount>,
    /// Resident bytes of the whole process.
    pub rss_bytes: u64,
    /// Other resident memory.
    pub not_malloc: Vec<NotMalloc>,
    /// Memory that language runtimes manage outside malloc.
    pub runtimes: Runtimes,
    /// The quality of the figures.
    pub walk: WalkQuality,
    /// Why a heap could not be read: allocators found whose layout was not understood.
    pub layout_unknown: Vec<String>,
}

impl Census {
    /// The ladder of all heaps together; a rung that is unknown for one of them is unknown.
    #[must_use]
    pub fn ladder(&self) -> Ladder {
        let ladders = self.heaps.iter().map(|heap| heap.ladder);
        ladders.reduce(|a, b| a.and(b, both)).unwrap_or(Ladder { unknown_bytes: Some(0), ..Ladder::default() })
    }

    /// What lies beside it.
    #[must_use]
    pub fn details(&self) -> Details {
        self.heaps.iter().map(|heap| heap.details).reduce(Details::and).unwrap_or_default()
    }

    /// A figure of all heaps together; `None` if it is unknown for one of them, or there is none.
    #[must_use]
    pub fn sum(&self, of: impl Fn(&HeapAccount) -> Option<u64>) -> Option<u64> {
        self.heaps.iter().map(of).reduce(both).flatten()
    }
}

/// Resident bytes outside malloc.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct NotMalloc {
    /// Its kind: `thread_stacks`, `main_stack`, `java_heap`, `code_cache`, `program_files` (files with an executable part),
    /// `file_mappings` (all others), `shared_memory`, `other_anonymous`, …
    pub kind: &'static str,
    /// Resident bytes.
    pub resident_bytes: u64,
    /// Number of mappings.
    pub mappings: u64,
}

/// One heap. extent = live + cached + free + top + overhead + unknown. `None` (null) means that the level or the allocator does not give the
/// figure.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct HeapAccount {
    /// The allocator.
    #[schemars(with = "String")]
    pub allocator: Allocator,
    /// The layout that was found.
    pub layout: String,
    /// Its rungs.
    #[serde(flatten)]
    pub ladder: Ladder,
    /// What lies beside them.
    #[serde(flatten)]
    pub details: Details,
    /// The allocator's own figure of resident bytes, if it has one (jemalloc's `stats.resident`): it includes pages that were allocated but never
    /// touched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocator_resident_bytes: Option<u64>,
    /// Of `huge_bytes`, 4 KiB pages that hold only zeros, estimated from a sample: never written, or zeroed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_zero_bytes_est: Option<u64>,
    /// Standard error of the estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_zero_bytes_stderr: Option<u64>,
    /// Number of chunks in use, including mmapped ones.
    pub live_allocations: Option<u64>,
    /// Estimate of `live_bytes` from a sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_bytes_est: Option<u64>,
    /// Standard error of the estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live_bytes_stderr: Option<u64>,
    /// Of the cached chunks, those in fastbins.
    pub fastbin_bytes: Option<u64>,
    /// Freed chunks in bins.
    pub free_bytes: Option<u64>,
    /// Number of chunks in bins.
    pub free_chunks: Option<u64>,
    /// Free memory at the top of heaps.
    pub top_bytes: u64,
    /// The allocator's own data.
    pub overhead_bytes: u64,
    /// Address space of free extents whose pages are not returned yet (jemalloc's `stats.arenas.N.pdirty` in bytes): a purge, or time, releases
    /// the resident part. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// Address space of free extents whose pages the kernel may take when it needs them (`MADV_FREE`, jemalloc's `pmuzzy` in bytes); until
    /// then they count as resident. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muzzy_bytes: Option<u64>,
    /// Address space that the allocator keeps without memory behind it (jemalloc's `stats.retained`). Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retained_bytes: Option<u64>,
    /// Milliseconds after which dirty pages are returned, if equal for all arenas: 0 = at once, −1 = never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_decay_ms: Option<i64>,
    /// Milliseconds after which muzzy pages are returned, if equal for all arenas: 0 = at once, −1 = never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muzzy_decay_ms: Option<i64>,
    /// Of `trimmable_bytes`, those at the end of the brk heap (glibc, level full).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trimmable_top_bytes: Option<u64>,
    /// The largest run of free bytes.
    pub largest_free_bytes: Option<u64>,
    /// Chunks with mappings of their own: bytes.
    pub mmapped_bytes: u64,
    /// Chunks with mappings of their own: number.
    pub mmapped_allocations: u64,
    /// The arenas.
    pub arenas: Vec<ArenaAccount>,
    /// Chunks by size, powers of two.
    pub size_classes: Vec<SizeClass>,
    /// Arenas and pools of CPython's objects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pools: Option<PoolAccount>,
    /// Occupancy of the resident pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy: Option<Occupancy>,
    /// The same, estimated from a sample (glibc at level sampled).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy_est: Option<OccupancyEstimate>,
    /// Settings read from the allocator that remedies refer to.
    pub settings: Vec<Setting>,
}

impl HeapAccount {
    /// A heap of which nothing was read yet, and nothing was left unread.
    #[must_use]
    pub fn new(allocator: Allocator, layout: String) -> Self {
        let ladder = Ladder { unknown_bytes: Some(0), ..Ladder::default() };
        Self { allocator, layout, ladder, ..Self::default() }
    }

    /// By how many bytes extent differs from live + cached + free + top + overhead + unknown; `None` if live or free bytes are not known.
    #[must_use]
    pub fn off_balance_bytes(&self) -> Option<i128> {
        let Ladder { extent_bytes, live_bytes, unknown_bytes, .. } = self.ladder;
        let cached_bytes = self.details.cached_bytes.unwrap_or(0);
        let parts = [live_bytes?, cached_bytes, self.free_bytes?, self.top_bytes, self.overhead_bytes, unknown_bytes.unwrap_or(0)];
        Some(i128::from(extent_bytes) - parts.into_iter().map(i128::from).sum::<i128>())
    }

    /// Live bytes on resident pages.
    #[must_use]
    pub fn live_resident_bytes(&self) -> Option<u64> {
        self.occupancy.map(|occupancy| occupancy.live_resident_bytes)
    }

    /// Free bytes on resident pages.
    #[must_use]
    pub fn free_resident_bytes(&self) -> Option<u64> {
        [self.ladder.trimmable_bytes, self.ladder.pinned_bytes, self.details.kept_bytes].into_iter().sum()
    }
}

/// Occupancy of a heap's resident pages, estimated from random windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct OccupancyEstimate {
    /// Estimate of the free bytes on resident pages: of caches, bins and tops.
    pub free_resident_bytes_est: u64,
    /// Standard error of that estimate.
    pub free_resident_bytes_stderr: u64,
    /// Of the free bytes, those of bins and tops on pages without live bytes.
    pub trimmable_bytes_est: u64,
    /// Of the free bytes, those on pages that also hold live bytes.
    pub pinned_bytes_est: u64,
    /// Of the free bytes, those of thread caches and fastbins.
    pub cached_bytes_est: u64,
}

impl OccupancyEstimate {
    /// Of two heaps together: variances of independent samples add up.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            free_resident_bytes_est: self.free_resident_bytes_est.saturating_add(other.free_resident_bytes_est),
            free_resident_bytes_stderr: (self.free_resident_bytes_stderr as f64).hypot(other.free_resident_bytes_stderr as f64) as u64,
            trimmable_bytes_est: self.trimmable_bytes_est.saturating_add(other.trimmable_bytes_est),
            pinned_bytes_est: self.pinned_bytes_est.saturating_add(other.pinned_bytes_est),
            cached_bytes_est: self.cached_bytes_est.saturating_add(other.cached_bytes_est),
        }
    }
}

/// A setting of the allocator in the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Setting {
    /// Its name in the allocator's documentation.
    pub name: &'static str,
    /// Its value.
    pub value: u64,
}

/// One arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct ArenaAccount {
    /// Address of its structure.
    pub address: u64,
    /// Threads attached to it. `None` = not read.
    pub attached_threads: Option<u64>,
    /// Pieces of address space it holds.
    pub pieces: u64,
    /// Its address space.
    pub extent_bytes: u64,
    /// Of it, in RAM.
    pub resident_bytes: u64,
    /// Its chunks. Level full.
    #[serde(flatten)]
    pub chunks: Option<ArenaChunks>,
    /// Of `free_bytes`, extents whose pages are not returned yet (jemalloc, level full).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_bytes: Option<u64>,
    /// Of `free_bytes`, extents whose pages the kernel may take (jemalloc, level full).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muzzy_bytes: Option<u64>,
    /// Of `free_bytes`, extents without memory behind them (jemalloc, level full).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retained_bytes: Option<u64>,
    /// Resident bytes that a trim or a purge would release of it. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trimmable_bytes: Option<u64>,
    /// Number of ranges that it would release, resident or not, with a system call each. Level full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trimmable_ranges: Option<u64>,
    /// Milliseconds after which this arena returns dirty pages: 0 = at once, −1 = never (jemalloc).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dirty_decay_ms: Option<i64>,
    /// Milliseconds after which this arena returns muzzy pages: 0 = at once, −1 = never (jemalloc).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub muzzy_decay_ms: Option<i64>,
}

/// The chunks of one arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct ArenaChunks {
    /// Chunks in use.
    pub live_bytes: u64,
    /// Number of chunks in use.
    pub live_allocations: u64,
    /// Thread caches and fastbins.
    pub cached_bytes: u64,
    /// Bins.
    pub free_bytes: u64,
    /// Free ends.
    pub top_bytes: u64,
}

impl ArenaChunks {
    /// Bytes of chunks that are not in use.
    #[must_use]
    pub fn unused_bytes(&self) -> u64 {
        self.free_bytes.saturating_add(self.cached_bytes).saturating_add(self.top_bytes)
    }
}

/// Chunks of sizes up to a power of two (and above the one before).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct SizeClass {
    /// Largest chunk of the class.
    pub chunk_bytes_max: u64,
    /// Live bytes.
    pub live_bytes: u64,
    /// Live chunks.
    pub live_allocations: u64,
    /// Free bytes, including cached ones, without tops.
    pub free_bytes: u64,
    /// Free chunks.
    pub free_chunks: u64,
}

/// Occupancy of the chunks' resident pages. Needs sorted regions.
#[must_use]
pub fn occupancy_of(table: &ChunkTable, pages: &mut PageCache<'_>) -> Occupancy {
    pages.forget();
    let mut builder = OccupancyBuilder::new(|range| pages.resident_bytes(range));
    table.iter().for_each(|(_, chunk)| builder.add(chunk.start..chunk.end(), chunk.state.holder()));
    builder.finish()
}

/// Classes of sizes, by powers of two.
const SIZES: usize = 64;
/// States of a chunk.
const STATES: usize = 8;

/// Bytes and number of chunks by size and state: one place to add to for each chunk.
#[derive(Debug, Clone)]
struct Tally([[(u64, u64); STATES]; SIZES]);

impl Default for Tally {
    fn default() -> Self {
        Self([[(0, 0); STATES]; SIZES])
    }
}

impl Tally {
    #[inline]
    fn add(&mut self, chunk: &Chunk) {
        let bits = (64 - chunk.bytes.saturating_sub(1).leading_zeros()) as usize;
        if let Some((bytes, chunks)) = self.0.get_mut(bits.min(SIZES - 1)).and_then(|states| states.get_mut(chunk.state as usize)) {
            *bytes = bytes.saturating_add(chunk.bytes);
            *chunks += 1;
        }
    }

    fn add_to(&self, sums: &mut Sums, classes: &mut [SizeClass; SIZES]) {
        for (states, class) in self.0.iter().zip(classes) {
            for (state, &(bytes, chunks)) in states.iter().enumerate() {
                if let (Some(sum), Some(count)) = (sums.bytes.get_mut(state), sums.chunks.get_mut(state)) {
                    *sum = sum.saturating_add(bytes);
                    *count += chunks;
                }
            }
            let of = |wanted: &[ChunkState]| sum_of(states, wanted);
            let (live, free) =
                (of(&[ChunkState::Live, ChunkState::Mmapped]), of(&[ChunkState::Tcache, ChunkState::Fastbin, ChunkState::Free]));
            class.live_bytes = class.live_bytes.saturating_add(live.0);
            class.live_allocations += live.1;
            class.free_bytes = class.free_bytes.saturating_add(free.0);
            class.free_chunks += free.1;
        }
    }

    fn add_to_arena(&self, arena: &mut ArenaChunks) {
        for states in &self.0 {
            let of = |wanted: &[ChunkState]| sum_of(states, wanted);
            let live = of(&[ChunkState::Live]);
            arena.live_bytes = arena.live_bytes.saturating_add(live.0);
            arena.live_allocations += live.1;
            arena.cached_bytes = arena.cached_bytes.saturating_add(of(&[ChunkState::Tcache, ChunkState::Fastbin]).0);
            arena.free_bytes = arena.free_bytes.saturating_add(of(&[ChunkState::Free]).0);
            arena.top_bytes = arena.top_bytes.saturating_add(of(&[ChunkState::Top]).0);
        }
    }
}

/// Bytes and chunks in some states.
fn sum_of(states: &[(u64, u64); STATES], wanted: &[ChunkState]) -> (u64, u64) {
    let own = wanted.iter().filter_map(|&state| states.get(state as usize));
    own.fold((0, 0), |(bytes, chunks), &(more, count)| (bytes.saturating_add(more), chunks + count))
}

/// Sums over a chunk table.
#[derive(Debug, Clone, Default)]
pub struct Sums {
    /// Bytes by [`ChunkState`].
    pub bytes: [u64; 8],
    /// Chunks by [`ChunkState`].
    pub chunks: [u64; 8],
    /// The largest run of neighbouring free bytes.
    pub largest_free_bytes: u64,
    /// By size.
    pub size_classes: Vec<SizeClass>,
}

impl Sums {
    /// Adds up a table; per-arena figures go to `arenas`.
    #[must_use]
    pub fn of(table: &ChunkTable, arenas: &mut [ArenaAccount]) -> Self {
        let mut sums = Self::default();
        // One tally per arena, and one for chunks without an arena.
        let mut tallies: Vec<Option<Box<Tally>>> = vec![None; arenas.len() + 1];
        for region in table.regions() {
            let arena = (region.arena as usize).min(arenas.len());
            let Some(tally) = tallies.get_mut(arena) else { continue };
            let tally = tally.get_or_insert_default();
            let mut free_run = 0u64;
            table.chunks_of(region).for_each(|chunk| {
                tally.add(&chunk);
                free_run = if chunk.state.is_free() { free_run.saturating_add(chunk.bytes) } else { 0 };
                sums.largest_free_bytes = sums.largest_free_bytes.max(free_run);
            });
        }
        let mut classes = [SizeClass::default(); SIZES];
        for (index, tally) in tallies.iter().enumerate() {
            let Some(tally) = tally else { continue };
            tally.add_to(&mut sums, &mut classes);
            if let Some(arena) = arenas.get_mut(index) {
                tally.add_to_arena(arena.chunks.get_or_insert_default());
            }
        }
        let used = classes.iter().enumerate().filter(|(_, class)| class.live_allocations + class.free_chunks > 0);
        sums.size_classes = used.map(|(bits, class)| SizeClass { chunk_bytes_max: 1 << bits, ..*class }).collect();
        sums
    }

    /// Bytes in one state.
    #[must_use]
    pub fn bytes_in(&self, state: ChunkState) -> u64 {
        self.bytes.get(state as usize).copied().unwrap_or(0)
    }

    /// Chunks in one state.
    #[must_use]
    pub fn chunks_in(&self, state: ChunkState) -> u64 {
        self.chunks.get(state as usize).copied().unwrap_or(0)
    }
}
