//! A full scan and several quick ones: they leave the blocks to which no scan saw a pointer, that did not change, and that two more
//! censuses, before and after the last scan, still show in use.
//!
//! A block may be freed after the first census, lie in the allocator's memory during all scans, and be in use again, with the contents it
//! had, when the heap is seen next. The scan between two censuses finds the pointer to it.

use std::ops::Range;
use std::time::{Duration, Instant};

use serde::Serialize;
use thiserror::Error;

use super::areas::Areas;
use super::blocks::{Bits, Blocks, Own, block_at, is_in_block_in_use, is_in_use};
use super::candidates::Candidates;
use super::index::{BlockIndex, IndexError, Place};
use super::limit;
use super::mark::Marks;
use super::pass::{Policy, mark};
use super::reader::{Reader, Words};
use crate::census::chunks::ChunkState;
use crate::census::memory::{Memory, MemoryError};
use crate::census::{Census, LayoutCache, Level, Options, Pace, Taken, add_blocks, all_own_ranges, take};
use crate::process::Backing;
use crate::units::HumanBytes;

/// Most pointers kept per block on average; in a heap with more, the targets of the others count as reached.
const POINTERS_A_BLOCK: usize = 4;
/// Lower limit on the most pointers kept.
const POINTERS_MIN: usize = 1 << 20;
/// Most pointers kept that were in memory which was free at the census before; they are judged by the next one.
const LATER_MAX: usize = 1 << 22;

/// How to scan.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Quick scans after the first one; a core file has none.
    pub looks: u32,
    /// Time before each of them.
    pub interval: Duration,
    /// How fast to read.
    pub pace: Pace,
    /// Most memory that index, marks and pointers may take in fragprof.
    pub memory_max_bytes: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self { looks: 5, interval: Duration::from_secs(1), pace: Pace::default(), memory_max_bytes: u64::MAX }
    }
}

/// Why there is no result.
#[derive(Debug, Error)]
pub enum ScanError {
    /// The process has ended, or may not be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There are too many blocks.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// Its blocks need more memory in fragprof than the limit.
    #[error(
        "its {blocks} blocks need {} of memory in fragprof, and the limit is {}: raise it with --memory-max, or run it on a machine with more memory",
        HumanBytes(*needed_bytes),
        HumanBytes(*limit_bytes)
    )]
    TooLarge {
        /// Blocks, free ones included.
        blocks: u64,
        /// Memory that they need, approximately.
        needed_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// There are more blocks than a graph can hold.
    #[error("it has {blocks} blocks, and the pointers of at most {limit} can be kept")]
    TooMany {
        /// Blocks, free ones included.
        blocks: u64,
        /// The limit.
        limit: u64,
    },
    /// There is no heap whose blocks are known.
    #[error("process {pid} has no malloc heap whose blocks are known: {reason}")]
    NoBlocks {
        /// Process id.
        pid: u32,
        /// What was found instead.
        reason: String,
    },
}

impl ScanError {
    /// A census without blocks.
    pub(super) fn no_blocks(pid: u32, census: &Census) -> Self {
        let reason = match census.layout_unknown.as_slice() {
            [] if census.heaps.is_empty() => "it has no malloc heap that can be read".to_owned(),
            [] => format!(
                "only the sums of {} are known",
                census.heaps.iter().map(|heap| heap.layout.as_str()).collect::<Vec<_>>().join(", ")
            ),
            reasons => reasons.join("; "),
        };
        Self::NoBlocks { pid, reason }
    }
}

/// What was not read: reasons to doubt the result.
#[derive(Debug, Clone, Default, Serialize, schemars::JsonSchema)]
pub struct Doubts {
    /// Bytes that were in RAM but could not be read, or not in time.
    pub unread_bytes: u64,
    /// Bytes in swap, which are not read: there may be pointers in them.
    pub swapped_bytes: u64,
    /// Bytes of the heap that the census does not understand; they are scanned as roots.
    pub unknown_bytes: u64,
    /// Blocks left out because they overlap others in the census.
    pub overlapping_blocks: u64,
    /// Pointers that were not kept for lack of space; their targets count as reached.
    pub dropped_pointers: u64,
    /// Threads that were running when their registers were read, the most of any scan: their registers are not known.
    pub running_threads: usize,
    /// Threads, the most of any scan.
    pub threads: usize,
    /// Whether the registers of waiting threads were read; without them a block that only a register holds looks unreached.
    pub are_registers_known: bool,
    /// Free lists of the last census that changed while they were read: some free blocks may count as blocks in use.
    pub broken_lists: u64,
    /// Whether all censuses are usable.
    pub is_census_usable: bool,
}

impl Doubts {
    /// Whether all memory that may contain pointers was read.
    #[must_use]
    pub fn is_all_read(&self) -> bool {
        self.unread_bytes == 0 && self.swapped_bytes == 0
    }

    pub(super) fn add(&mut self, reader: &Reader<'_>, areas: &Areas) {
        self.unread_bytes = self.unread_bytes.max(reader.unread_bytes);
        self.swapped_bytes = self.swapped_bytes.max(reader.swapped_bytes);
        self.threads = self.threads.max(areas.threads);
        self.running_threads = self.running_threads.max(areas.running_threads);
    }
}

/// The result of all scans.
#[derive(Debug)]
pub struct ScanResult {
    /// Blocks to which no pointer was seen.
    pub candidates: Candidates,
    /// The heap in the last census.
    pub taken: Taken,
    /// Quick scans made.
    pub looks: u32,
    /// From the first census to the last.
    pub duration: Duration,
    /// Blocks that the first scan left unreached.
    pub first_pass_blocks: u64,
    /// Blocks in use at the first census.
    pub live_blocks: u64,
    /// Usable bytes of these blocks.
    pub live_bytes: u64,
    /// Bytes read by all scans together, without the censuses.
    pub read_bytes: u64,
    /// Most memory that index, marks and pointers took.
    pub table_bytes: usize,
    /// CPU time of the parts.
    pub times: Times,
    /// Reasons to doubt.
    pub doubts: Doubts,
}

/// CPU time of fragprof, by part.
#[derive(Debug, Clone, Copy, Default, Serialize, schemars::JsonSchema)]
pub struct Times {
    /// The first census.
    pub census_s: f64,
    /// Indexing its blocks.
    pub index_s: f64,
    /// Reading all memory and marking.
    pub mark_s: f64,
    /// The slowest quick scan.
    pub look_s: f64,
}

/// Scans the process behind `memory`. `registers` reads the registers of all its threads, if that is possible without stopping it.
///
/// # Errors
/// If it cannot be read, has ended, or has no heap whose blocks are known.
pub fn scan(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    plan: Plan,
    registers: Option<&dyn Fn() -> Vec<u64>>,
    layouts: &mut LayoutCache,
) -> Result<ScanResult, ScanError> {
    let began = Instant::now();
    let mut times = Times::default();
    let mut clock = Clock::start();
    let options = Options { level: Level::Full, pace: plan.pace, with_not_malloc: false };
    let image = Image::of(memory)?;
    let mut doubts = Doubts { is_census_usable: true, ..Doubts::default() };
    let mut taken = census(memory, (pid, comm), options, layouts, &mut doubts)?;
    times.census_s = clock.lap();
    limit::check(&taken, limit::LEAKS_BYTES_A_BLOCK, plan.memory_max_bytes)?;
    let blocks = Blocks::of(&taken.heaps)?;
    if blocks.index.is_empty() {
        return Err(ScanError::no_blocks(pid, &taken.census));
    }
    let mut own = Own::of(memory, &taken.heaps);
    times.index_s = clock.lap();
    doubts.unknown_bytes = taken.census.walk.unknown_bytes;
    doubts.overlapping_blocks = blocks.index.overlapping();
    doubts.are_registers_known = registers.is_some() || memory.process().is_none();
    let mut areas = Areas::of(memory, &all_own_ranges(&taken.heaps))?;
    areas.add_unknown(&own.unknown);
    areas.registers.extend(registers.iter().flat_map(|read| read()));
    own.read_caches(memory, &areas, plan.pace);
    let mut marks = Marks::of(blocks.index.len(), (blocks.index.len() * POINTERS_A_BLOCK).max(POINTERS_MIN));
    let mut reader = Reader::new(memory, plan.pace);
    mark(&mut reader, &areas, &blocks, &own, &mut marks);
    doubts.add(&reader, &areas);
    doubts.dropped_pointers = marks.pointers_dropped;
    let mut candidates = Candidates::of(&blocks, &marks);
    times.mark_s = clock.lap();
    let (live_blocks, live_bytes) = (blocks.live_blocks, blocks.live_bytes);
    let first_pass_blocks = candidates.len() as u64;
    let table_bytes = blocks.bytes() + marks.bytes() + taken.heaps.iter().map(|heap| heap.chunks.table_bytes()).sum::<usize>();
    let mut read_bytes = reader.read_bytes;
    drop((blocks, marks, areas, reader));

    let is_live = memory.process().is_some();
    candidates.remember(memory);
    let (mut looks, mut later) = (0, Later::default());
    while is_live && looks < plan.looks && !candidates.is_empty() {
        std::thread::sleep(plan.interval);
        clock.lap();
        candidates.take_out_changed(memory);
        if looks + 1 == plan.looks {
            taken = census(memory, (pid, comm), options, layouts, &mut doubts)?;
            own = Own::of(memory, &taken.heaps);
            take_out_freed(memory, &taken, &mut candidates, &later);
            clock.lap();
        }
        let mut reader = Reader::new(memory, plan.pace);
        let mut areas = Areas::of(memory, &[])?;
        areas.registers.extend(registers.iter().flat_map(|read| read()));
        own.read_caches(memory, &areas, plan.pace);
        quick_scan(&mut reader, &areas, &taken, &own, &mut candidates, &mut later)?;
        doubts.add(&reader, &areas);
        read_bytes += reader.read_bytes;
        times.look_s = times.look_s.max(clock.lap());
        looks += 1;
    }
    if is_live {
        taken = census(memory, (pid, comm), options, layouts, &mut doubts)?;
        candidates.take_out_changed(memory);
        take_out_freed(memory, &taken, &mut candidates, &later);
        image.check(memory, pid)?;
    }
    Ok(ScanResult {
        candidates,
        taken,
        looks,
        duration: began.elapsed(),
        first_pass_blocks,
        live_blocks,
        live_bytes,
        read_bytes,
        table_bytes,
        times,
        doubts,
    })
}

/// The heap as it is now, with its blocks.
fn census(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    options: Options,
    layouts: &mut LayoutCache,
    doubts: &mut Doubts,
) -> Result<Taken, MemoryError> {
    let mut taken = take(memory, pid, comm, options, layouts)?;
    taken.keep_malloc();
    add_blocks(memory, &mut taken, layouts)?;
    doubts.is_census_usable &= taken.census.walk.usable;
    doubts.broken_lists = taken.census.walk.broken_lists;
    Ok(taken)
}

/// Identifies the program that a process runs: an exec maps another file, and moves the main stack.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    file: Option<(u64, u64)>,
    stack_end: Option<u64>,
}

impl Image {
    /// The present one.
    ///
    /// # Errors
    /// If the process has ended.
    pub(super) fn of(memory: &dyn Memory) -> Result<Self, MemoryError> {
        let maps = memory.maps()?;
        let stack = maps.mappings.iter().rfind(|one| matches!(&one.backing, Backing::Named(name) if name == "[stack]"));
        Ok(Self { file: maps.mappings.first().map(|one| (one.start.0, one.inode)), stack_end: stack.map(|one| one.end.0) })
    }

    /// Refuses a result that covers two programs.
    ///
    /// # Errors
    /// If the process runs another program now, or has ended.
    pub(super) fn check(&self, memory: &dyn Memory, pid: u32) -> Result<(), MemoryError> {
        if Self::of(memory)? == *self { Ok(()) } else { Err(MemoryError::Gone { pid }) }
    }
}

/// Pointers in memory that was free at the census before: they count if it is in use at the next.
#[derive(Debug, Default)]
struct Later {
    slots: Vec<(u64, u32)>,
    /// No space was left: such pointers count at once.
    is_full: bool,
}

/// Scans all memory for pointers to candidates from outside them, and removes these candidates.
fn quick_scan(
    reader: &mut Reader<'_>,
    areas: &Areas,
    taken: &Taken,
    own: &Own,
    candidates: &mut Candidates,
    later: &mut Later,
) -> Result<(), IndexError> {
    let left: Vec<(u32, Range<u64>)> = candidates.left().map(|(number, one)| (number, one.range())).collect();
    let ranges: Vec<(u64, u64)> = left.iter().map(|(_, range)| (range.start, range.end - range.start)).collect();
    let index = BlockIndex::of(&ranges)?;
    let number_of = |block: u32| left.get(block as usize).map_or(u32::MAX, |(number, _)| *number);
    let policy = Policy::of(own);
    let mut found = Bits::of(ranges.len());
    let mut layouts: Vec<Place> = Vec::new();
    let mut reached: Vec<u32> = areas.registers.iter().filter_map(|&word| index.find(word)).map(|hit| number_of(hit.block)).collect();
    let mut words = Words::on_pages_of(&index.span(), &ranges);
    for area in &areas.roots {
        let mut flush = |words: &mut Words| {
            index.find_all(&words.words, &mut layouts, |number, hit| {
                let slot = words.slots.get(number).copied().unwrap_or(0);
                if found.get(hit.block) || index.find(slot).is_some() || policy.is_list(slot) {
                    return;
                }
                let (bytes, addr) = (index.size(hit.block), words.words.get(number).map_or(0, |word| word - hit.offset));
                let source = block_at(&taken.heaps, slot);
                let is_link = source.is_some_and(|source| {
                    let (within, end) = (slot.saturating_sub(source.addr), source.addr.saturating_add(source.usable_bytes));
                    // A pointer in memory that was free is judged by the next census.
                    policy.is_link((within, end.saturating_sub(slot)), false, hit.offset, bytes, addr)
                });
                match source.map(|source| source.chunk.state) {
                    _ if is_link => {}
                    Some(ChunkState::Overhead) => {}
                    Some(state) if state.is_free() && !later.is_full => {
                        later.slots.push((slot, number_of(hit.block)));
                        later.is_full = later.slots.len() >= LATER_MAX;
                    }
                    _ => {
                        found.set(hit.block);
                        reached.push(number_of(hit.block));
                    }
                }
            });
            words.clear();
        };
        reader.read(area.range.clone(), |addr, bytes| words.take(addr, bytes, area.step, &mut flush));
        flush(&mut words);
    }
    candidates.take_out(reached);
    Ok(())
}

/// Removes blocks that a new census does not show in use, and those to which memory that came into use points.
fn take_out_freed(memory: &dyn Memory, taken: &Taken, candidates: &mut Candidates, later: &Later) {
    let freed = candidates.left().filter(|(_, one)| !is_in_use(&taken.heaps, one.addr, one.bytes)).map(|(number, _)| number);
    let freed: Vec<u32> = freed.collect();
    candidates.take_out(freed);
    let still = later.slots.iter().filter(|(slot, number)| {
        let points = || memory.word(*slot).zip(candidates.get(*number)).is_some_and(|(word, one)| one.range().contains(&word));
        is_in_block_in_use(&taken.heaps, *slot) != Some(false) && points()
    });
    let still: Vec<u32> = still.map(|(_, number)| *number).collect();
    candidates.take_out(still);
}

/// CPU time of fragprof.
pub(super) struct Clock(Duration);

impl Clock {
    pub(super) fn start() -> Self {
        Self(Self::now())
    }

    fn now() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    /// Seconds since the last lap.
    pub(super) fn lap(&mut self) -> f64 {
        let now = Self::now();
        let lap = now.saturating_sub(self.0);
        self.0 = now;
        lap.as_secs_f64()
    }
}
