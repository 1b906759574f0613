//! One pass and several quick looks: what no look saw a pointer to, did not change, and a last census still has in use.

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
use crate::census::{Census, Level, Options, Pace, Places, Taken, add_blocks, all_own_ranges, take};
use crate::target::Backing;
use crate::units::HumanBytes;

/// Pointers kept for each block on the average; a heap of nothing but pointers has more, and is read with less care.
const POINTERS_A_BLOCK: usize = 4;
/// Pointers kept in any case.
const POINTERS_MIN: usize = 1 << 20;
/// Pointers in memory that was free at the first census, kept for the last one.
const LATER_MAX: usize = 1 << 22;

/// How to look.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Quick looks after the first pass; a core file has none.
    pub looks: u32,
    /// Time before each of them.
    pub interval: Duration,
    /// How fast to read.
    pub pace: Pace,
    /// Memory that index, marks and pointers may take here.
    pub memory_max_bytes: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Self { looks: 5, interval: Duration::from_secs(1), pace: Pace::default(), memory_max_bytes: u64::MAX }
    }
}

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum LooksError {
    /// The process is gone, or may not be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// There are too many blocks.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// Its blocks need more memory here than they may have.
    #[error(
        "its {blocks} blocks need {} of memory here, and the limit is {}: raise it (--memory-max), or look on a machine with more",
        HumanBytes(*needed_bytes),
        HumanBytes(*limit_bytes)
    )]
    TooLarge {
        /// Blocks, free ones included.
        blocks: u64,
        /// What they need, about.
        needed_bytes: u64,
        /// What they may have.
        limit_bytes: u64,
    },
    /// There is no heap whose blocks are known.
    #[error("no malloc heap of process {pid} whose blocks can be told apart: {reason}")]
    NoBlocks {
        /// Process id.
        pid: u32,
        /// What was found instead.
        reason: String,
    },
}

impl LooksError {
    /// A census without blocks.
    pub(super) fn no_blocks(pid: u32, census: &Census) -> Self {
        let reason = match census.layout_unknown.as_slice() {
            [] if census.heaps.is_empty() => "there is none that is understood".to_owned(),
            [] => format!("of {} only sums are known", census.heaps.iter().map(|heap| heap.layout.as_str()).collect::<Vec<_>>().join(", ")),
            reasons => reasons.join("; "),
        };
        Self::NoBlocks { pid, reason }
    }
}

/// What was read, and what was not: reasons to doubt the answer.
#[derive(Debug, Clone, Default, Serialize, schemars::JsonSchema)]
pub struct Doubts {
    /// Bytes that were in memory but could not be read, or not in time.
    pub unread_bytes: u64,
    /// Bytes in swap, which are not read: a pointer may stand there.
    pub swapped_bytes: u64,
    /// Bytes of the heap that the census does not understand; they are read as if they were roots.
    pub unknown_bytes: u64,
    /// Blocks left out because the census saw others in their place.
    pub overlapping_blocks: u64,
    /// Pointers whose targets count as reached for want of room.
    pub dropped_pointers: u64,
    /// Threads that ran when their registers were asked for, at most of all looks: their registers are not known.
    pub running_threads: usize,
    /// Threads, at most of all looks.
    pub threads: usize,
    /// Whether the registers of threads that wait were read; without them a block that only a register holds looks unreached.
    pub are_registers_known: bool,
    /// Whether both censuses are usable.
    pub is_census_usable: bool,
}

impl Doubts {
    /// Whether all memory was read in which a pointer may stand.
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

/// What the looks left.
#[derive(Debug)]
pub struct Seen {
    /// Blocks to which no pointer was seen.
    pub candidates: Candidates,
    /// The heap as the last census has it.
    pub taken: Taken,
    /// Quick looks that were made.
    pub looks: u32,
    /// From the first census to the last.
    pub duration: Duration,
    /// Blocks that the first pass left unreached.
    pub first_pass_blocks: u64,
    /// Blocks in use at the first census.
    pub live_blocks: u64,
    /// Bytes that the program may use in them.
    pub live_bytes: u64,
    /// Bytes read by all looks together, without the censuses.
    pub read_bytes: u64,
    /// Most memory that index, marks and pointers took.
    pub table_bytes: usize,
    /// Processor time of the parts.
    pub times: Times,
    /// Reasons to doubt.
    pub doubts: Doubts,
}

/// Processor time of this program, by part.
#[derive(Debug, Clone, Copy, Default, Serialize, schemars::JsonSchema)]
pub struct Times {
    /// The first census.
    pub census_s: f64,
    /// Indexing its blocks.
    pub index_s: f64,
    /// Reading all memory and marking.
    pub mark_s: f64,
    /// The dearest quick look.
    pub look_s: f64,
}

/// Looks at the process behind `memory`. `registers` reads the registers of all its threads, where that can be done without a stop.
///
/// # Errors
/// If it cannot be read, went away, or has no heap whose blocks are known.
pub fn look(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    plan: Plan,
    registers: Option<&dyn Fn() -> Vec<u64>>,
    places: &mut Places,
) -> Result<Seen, LooksError> {
    let began = Instant::now();
    let mut times = Times::default();
    let mut clock = Clock::start();
    let options = Options { level: Level::Full, pace: plan.pace, with_not_malloc: false };
    let image = Image::of(memory)?;
    let mut taken = take(memory, pid, comm, options, places)?;
    add_blocks(memory, &mut taken, places)?;
    times.census_s = clock.lap();
    limit::check(&taken, limit::LEAKS_BYTES_A_BLOCK, plan.memory_max_bytes)?;
    let blocks = Blocks::of(&taken.heaps)?;
    if blocks.index.is_empty() {
        return Err(LooksError::no_blocks(pid, &taken.census));
    }
    let mut own = Own::of(memory, &taken.heaps);
    times.index_s = clock.lap();
    let mut doubts = Doubts {
        unknown_bytes: taken.census.walk.unknown_bytes,
        overlapping_blocks: blocks.index.overlapping(),
        is_census_usable: taken.census.walk.usable,
        are_registers_known: registers.is_some() || memory.process().is_none(),
        ..Doubts::default()
    };
    let mut areas = Areas::of(memory, &all_own_ranges(&taken.heaps))?;
    areas.add_unknown(&own.unknown);
    areas.registers.extend(registers.iter().flat_map(|read| read()));
    own.look_at_caches(memory, &areas, plan.pace);
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
    while is_live && looks < plan.looks {
        std::thread::sleep(plan.interval);
        clock.lap();
        candidates.take_out_changed(memory);
        let mut reader = Reader::new(memory, plan.pace);
        let mut areas = Areas::of(memory, &[])?;
        areas.registers.extend(registers.iter().flat_map(|read| read()));
        own.look_at_caches(memory, &areas, plan.pace);
        quick_look(&mut reader, &areas, &taken, &own, &mut candidates, &mut later)?;
        doubts.add(&reader, &areas);
        read_bytes += reader.read_bytes;
        times.look_s = times.look_s.max(clock.lap());
        looks += 1;
    }
    let taken = if is_live {
        let mut last = take(memory, pid, comm, options, places)?;
        add_blocks(memory, &mut last, places)?;
        doubts.is_census_usable &= last.census.walk.usable;
        candidates.take_out_changed(memory);
        last_word(memory, &last, &mut candidates, &later);
        image.check(memory, pid)?;
        last
    } else {
        taken
    };
    Ok(Seen {
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

/// Which program a process runs: an exec maps another file, and puts the main stack elsewhere.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    file: Option<(u64, u64)>,
    stack_end: Option<u64>,
}

impl Image {
    /// That of now.
    ///
    /// # Errors
    /// If the process is gone.
    pub(super) fn of(memory: &dyn Memory) -> Result<Self, MemoryError> {
        let maps = memory.maps()?;
        let stack = maps.mappings.iter().rfind(|one| matches!(&one.backing, Backing::Named(name) if name == "[stack]"));
        Ok(Self { file: maps.mappings.first().map(|one| (one.start.0, one.inode)), stack_end: stack.map(|one| one.end.0) })
    }

    /// Refuses what was seen if it is of two programs.
    ///
    /// # Errors
    /// If the process runs another one now, or is gone.
    pub(super) fn check(&self, memory: &dyn Memory, pid: u32) -> Result<(), MemoryError> {
        if Self::of(memory)? == *self { Ok(()) } else { Err(MemoryError::Gone { pid }) }
    }
}

/// Pointers that stood in memory which was free at the first census: they count if it is in use at the last.
#[derive(Debug, Default)]
struct Later {
    slots: Vec<(u64, u32)>,
    /// There was no room: such pointers count at once.
    is_full: bool,
}

/// Looks through all memory for pointers to candidates from outside of them, and takes those out.
fn quick_look(
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
    let mut places: Vec<Place> = Vec::new();
    let mut reached: Vec<u32> = areas.registers.iter().filter_map(|&word| index.find(word)).map(|hit| number_of(hit.block)).collect();
    let mut words = Words::on_pages_of(&index.span(), &ranges);
    for area in &areas.roots {
        let mut flush = |words: &mut Words| {
            index.find_all(&words.words, &mut places, |number, hit| {
                let slot = words.slots.get(number).copied().unwrap_or(0);
                if found.get(hit.block) || index.find(slot).is_some() || policy.is_list(slot) {
                    return;
                }
                let (bytes, addr) = (index.size(hit.block), words.words.get(number).map_or(0, |word| word - hit.offset));
                let source = block_at(&taken.heaps, slot);
                let is_link = source.is_some_and(|source| {
                    let (within, end) = (slot.saturating_sub(source.addr), source.addr.saturating_add(source.usable_bytes));
                    // A pointer in what was free is judged by the last census.
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

/// Takes out what the last census no longer has in use, and what memory points at that has come into use.
fn last_word(memory: &dyn Memory, last: &Taken, candidates: &mut Candidates, later: &Later) {
    let freed = candidates.left().filter(|(_, one)| !is_in_use(&last.heaps, one.addr, one.bytes)).map(|(number, _)| number);
    let freed: Vec<u32> = freed.collect();
    candidates.take_out(freed);
    let still = later.slots.iter().filter(|(slot, number)| {
        let points = || memory.word(*slot).zip(candidates.get(*number)).is_some_and(|(word, one)| one.range().contains(&word));
        is_in_block_in_use(&last.heaps, *slot) != Some(false) && points()
    });
    let still: Vec<u32> = still.map(|(_, number)| *number).collect();
    candidates.take_out(still);
}

/// Processor time of this program.
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
