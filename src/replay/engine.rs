//! Makes a trace's calls: from events to the player's ring, with samples and censuses on the way.
//!
//! The trace is read as a stream, and a block's place in the player's table is given to another block when it is free. So the memory of a
//! replay, beside the heap, depends on the number of live blocks at a time, not on the trace's length.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::hash::{BuildHasherDefault, Hasher};
use std::io::Read;
use std::time::Instant;

use super::observe::{Looked, heap_at_start, look};
use super::outcome::{Replay, Sample};
use super::player::{Limits, NoPlayer, Player, Stopped, anonymous_bytes, nothing};
use super::survey::{Survey, pieces};
use crate::bpf::{Play, PlayOp};
use crate::census::LayoutCache;
use crate::trace::event::{Op, Request};
use crate::trace::read::Item;
use crate::trace::{Event, LARGE_BYTES, Reader, TICK_NS, TraceError};

/// Samples of a replay.
const SAMPLES: u64 = 1000;
/// The stack of blocks from before the recording.
const SEED_STACK: u32 = u32::MAX;
/// Threads' pending reallocs and new blocks above the survey's count.
const BLOCKS_SPARE: u64 = 1 << 16;

/// What is replayed, and under what.
#[derive(Debug, Clone, Default)]
pub struct Scenario {
    /// What selects and configures the allocator.
    pub environment: Vec<(OsString, OsString)>,
    /// Which blocks are made.
    pub blocks: Blocks,
    /// Whether the free chunks between the blocks from before the recording are left out: the heap then begins without holes.
    pub without_holes: bool,
    /// Times at which a census is taken, in nanoseconds on the clock of the events, ascending.
    pub census_at_ns: Vec<u64>,
    /// Of the times of censuses, the one at which pinned bytes are charged to the stacks of the blocks that pin them.
    pub by_stack_at_ns: Option<u64>,
    /// Whether the census at that time is kept as a whole.
    pub keeps_census: bool,
}

/// Which blocks of a trace are made.
#[derive(Debug, Clone, Default)]
pub enum Blocks {
    /// All.
    #[default]
    All,
    /// Those of all stacks but these.
    Without(HashSet<u32>),
    /// Those of these stacks.
    Only(HashSet<u32>),
}

impl Blocks {
    fn has(&self, stack: u32) -> bool {
        match self {
            Self::All => true,
            Self::Without(stacks) => !stacks.contains(&stack),
            Self::Only(stacks) => stacks.contains(&stack),
        }
    }
}

/// Why a replay failed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The process cannot be started.
    #[error(transparent)]
    Player(#[from] NoPlayer),
}

/// Why the loop over the events ended.
enum Ended {
    Stopped(Stopped),
    Heap(u64),
    Blocks,
}

impl From<Stopped> for Ended {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

/// Multiplies: keys are small consecutive numbers.
#[derive(Default)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(super) type Table<V> = HashMap<u64, V, BuildHasherDefault<Spread>>;

/// A block that is live in the player.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) at: u32,
    pub(super) stack: u32,
    pub(super) bytes: u64,
}

struct Driver<'a> {
    player: Player,
    scenario: &'a Scenario,
    /// By stack, the share of its large blocks that the recorded program touched.
    touched: HashMap<u32, f64>,
    blocks: Table<Placed>,
    places: Places,
    threads: HashMap<u32, u32>,
    thread_places: Places,
    /// By thread: the block that its realloc took.
    reallocs: HashMap<u32, Placed>,
    /// Blocks from before the recording, by their recorded address.
    seeds: Table<Placed>,
    limits: Limits,
    requested_bytes: u64,
    /// Number of the next allocation in the trace.
    next_block: u64,
    /// Time of the last call that was pushed.
    last_ns: u64,
    out: Replay,
    /// Times of the samples that were pushed.
    sample_times: Vec<u64>,
    censuses: usize,
    next_sample_ns: u64,
    sample_step_ns: u64,
}

/// Numbers that are given out, the last returned first.
struct Places {
    free: Vec<u32>,
    next: u32,
    end: u32,
}

impl Places {
    fn new(first: u32, end: u32) -> Self {
        Self { free: Vec::new(), next: first, end }
    }

    fn take(&mut self) -> Option<u32> {
        if let Some(place) = self.free.pop() {
            return Some(place);
        }
        let place = self.next;
        (place < self.end).then(|| self.next += 1)?;
        Some(place)
    }
}

/// Replays a trace that was surveyed.
///
/// # Errors
/// If the trace cannot be read, or no process started. What the allocator does is not an error: see [`Replay::stopped`].
pub fn replay(
    input: impl Read,
    survey: &Survey,
    scenario: &Scenario,
    limits: Limits,
    layouts: &mut LayoutCache,
) -> Result<Replay, ReplayError> {
    let began = Instant::now();
    let blocks_max = u32::try_from(survey.blocks_max + BLOCKS_SPARE).unwrap_or(u32::MAX);
    // Threads of arenas whose own threads are not in the trace are needed at the beginning only.
    let arenas = survey.seed.regions.iter().filter_map(|region| region.arena).collect::<HashSet<u32>>().len() as u64;
    let threads_max = u32::try_from(survey.threads_max + arenas + 1).unwrap_or(u32::MAX);
    let player = Player::start(&scenario.environment, blocks_max, threads_max, limits)?;
    let sample_step_ns = (survey.duration_ns() / SAMPLES).max(TICK_NS);
    let mut driver = Driver {
        player,
        scenario,
        touched: survey.touched(),
        blocks: Table::default(),
        places: Places::new(0, blocks_max),
        threads: HashMap::new(),
        // The player's own thread is the first that calls.
        thread_places: Places::new(0, threads_max),
        reallocs: HashMap::new(),
        seeds: Table::default(),
        limits,
        requested_bytes: 0,
        next_block: 0,
        last_ns: survey.began_ns,
        out: Replay::default(),
        sample_times: Vec::new(),
        censuses: 0,
        next_sample_ns: survey.began_ns.saturating_add(sample_step_ns),
        sample_step_ns,
    };
    let done = driver.play(input, survey, layouts)?;
    let mut out = driver.collect();
    out.stopped = match done {
        Ok(()) => None,
        Err(Ended::Heap(bytes)) => Some(format!(
            "the recorded blocks take more than the limit of {} MiB (--memory-limit, by default three quarters of what is available)",
            bytes >> 20
        )),
        Err(Ended::Blocks) => Some("the trace has more live blocks at a time than its survey found".to_owned()),
        Err(Ended::Stopped(stopped)) => {
            let words = driver.player.last_words().map(|words| format!(": {words}")).unwrap_or_default();
            Some(format!("{stopped}{words}"))
        }
    };
    out.took = began.elapsed();
    Ok(out)
}

impl Driver<'_> {
    /// All events of the last image, with samples and censuses.
    fn play(&mut self, input: impl Read, survey: &Survey, layouts: &mut LayoutCache) -> Result<Result<(), Ended>, ReplayError> {
        if let Err(stopped) = self.look_at_start() {
            return Ok(Err(stopped.into()));
        }
        if let Err(ended) = self.plant(survey) {
            return Ok(Err(ended));
        }
        let mut reader = Reader::new(input)?;
        let mut images = 0;
        while let Some(item) = reader.next_item()? {
            let Item::Event(event) = item else { continue };
            if images < survey.images {
                images += u64::from(event.op == Op::Exec);
            } else if let Err(ended) = self.until(event.time_ns, layouts).map_err(Ended::from).and_then(|()| self.event(&event)) {
                return Ok(Err(ended));
            }
            self.next_block += u64::from(matches!(event.op, Op::Alloc(_)));
        }
        let last = self.until(survey.ended_ns.saturating_add(1), layouts).and_then(|()| self.player.pause(drop));
        Ok(last.map_err(Ended::from))
    }

    /// Anonymous memory before the first call: what belongs to the process, and what the allocator took when it was loaded.
    fn look_at_start(&mut self) -> Result<(), Stopped> {
        self.out.other_bytes = self.player.pause(|pid| {
            let all = anonymous_bytes(pid).unwrap_or(0);
            all.saturating_sub(heap_at_start(pid).unwrap_or(0))
        })?;
        Ok(())
    }

    /// Takes the samples and censuses that are due before a time.
    fn until(&mut self, time_ns: u64, layouts: &mut LayoutCache) -> Result<(), Stopped> {
        loop {
            let census = self.scenario.census_at_ns.get(self.censuses).copied().unwrap_or(u64::MAX);
            let due = census.min(self.next_sample_ns);
            if due >= time_ns {
                return Ok(());
            }
            let ticks = self.ticks(due);
            if due == self.next_sample_ns {
                if self.player.push_sample(ticks)?.is_some() {
                    self.sample_times.push(due);
                }
                self.next_sample_ns = self.next_sample_ns.saturating_add(self.sample_step_ns);
            }
            if due == census {
                self.censuses += 1;
                let by_stack = self.scenario.by_stack_at_ns == Some(due);
                let wanted = by_stack.then(|| (self.player.blocks_at(), &self.blocks));
                let looked = self.player.pause(|pid| look(pid, due, layouts, wanted))?;
                if let Some(Looked { moment, pinned, census }) = looked {
                    self.out.moments.push(moment);
                    self.out.pinned.extend(pinned);
                    if by_stack && self.scenario.keeps_census {
                        self.out.census = census;
                    }
                }
            }
        }
    }

    /// Ticks from the last call to a time.
    fn ticks(&mut self, time_ns: u64) -> u32 {
        let ticks = time_ns.saturating_sub(self.last_ns) / TICK_NS;
        self.last_ns = self.last_ns.saturating_add(ticks * TICK_NS);
        u32::try_from(ticks).unwrap_or(u32::MAX)
    }

    fn thread(&mut self, number: u32) -> u32 {
        if let Some(&place) = self.threads.get(&number) {
            return place;
        }
        // Beyond the limit the player's own thread calls.
        let place = self.thread_places.take().unwrap_or(0);
        self.threads.insert(number, place);
        place
    }

    fn event(&mut self, event: &Event) -> Result<(), Ended> {
        let thread = self.thread(event.thread);
        // A realloc whose result does not follow has freed its block: realloc(block, 0).
        if !matches!(event.op, Op::Alloc(_) | Op::ReallocFail { .. } | Op::FreeUnknown { .. })
            && !self.reallocs.is_empty()
            && let Some(taken) = self.reallocs.remove(&event.thread)
        {
            self.free(event.time_ns, thread, taken)?;
        }
        match event.op {
            Op::Alloc(request) => self.alloc(event, thread, request)?,
            Op::Free { block } => {
                if let Some(placed) = self.blocks.remove(&block) {
                    self.free(event.time_ns, thread, placed)?;
                }
            }
            Op::FreeUnknown { addr } => {
                if let Some(placed) = self.seeds.remove(&addr) {
                    self.free(event.time_ns, thread, placed)?;
                }
            }
            Op::ReallocFreeUnknown { addr } => {
                if let Some(placed) = self.seeds.remove(&addr) {
                    self.reallocs.insert(event.thread, placed);
                }
            }
            Op::ReallocFree { block } => {
                if let Some(placed) = self.blocks.remove(&block) {
                    self.reallocs.insert(event.thread, placed);
                }
            }
            Op::ReallocFail { block } => {
                if let Some(placed) = self.reallocs.remove(&event.thread) {
                    self.blocks.insert(block, placed);
                }
            }
            Op::ThreadEnd => {
                let ticks = self.ticks(event.time_ns);
                self.player.push(Play { ticks, thread, ..nothing(PlayOp::ThreadEnd) })?;
                self.threads.remove(&event.thread);
                // The first thread's place is the player's own thread.
                if thread != 0 {
                    self.thread_places.free.push(thread);
                }
            }
            // The program's own mappings are not the heap's.
            _ => {}
        }
        Ok(())
    }

    fn alloc(&mut self, event: &Event, thread: u32, request: Request) -> Result<(), Ended> {
        let taken = if self.reallocs.is_empty() { None } else { self.reallocs.remove(&event.thread) };
        if !self.scenario.blocks.has(request.stack) {
            // A block that changes its stack by a realloc leaves.
            return taken.map_or(Ok(()), |taken| self.free(event.time_ns, thread, taken));
        }
        let bytes = request.size_bytes;
        let old_bytes = taken.map_or(0, |taken| taken.bytes);
        self.requested_bytes = self.requested_bytes.saturating_sub(old_bytes).saturating_add(bytes);
        if self.requested_bytes > self.limits.heap_bytes_max {
            return Err(Ended::Heap(self.limits.heap_bytes_max));
        }
        let place = match taken {
            Some(taken) => taken.at,
            None => self.places.take().ok_or(Ended::Blocks)?,
        };
        self.blocks.insert(self.next_block, Placed { at: place, stack: request.stack, bytes });
        let op = match taken {
            Some(_) => PlayOp::Realloc,
            None if request.is_zeroed => PlayOp::Zeroed,
            None => PlayOp::Alloc,
        };
        let touch_to = touched_bytes(bytes, self.touched.get(&request.stack).copied());
        let ticks = self.ticks(event.time_ns);
        let alignment_bits = request.alignment_bits;
        self.player.push(Play { bytes, touch_from: old_bytes, touch_to, block: place, thread, ticks, alignment_bits, ..nothing(op) })?;
        Ok(())
    }

    fn free(&mut self, time_ns: u64, thread: u32, placed: Placed) -> Result<(), Ended> {
        let ticks = self.ticks(time_ns);
        self.requested_bytes = self.requested_bytes.saturating_sub(placed.bytes);
        self.places.free.push(placed.at);
        self.player.push(Play { ticks, block: placed.at, thread, ..nothing(PlayOp::Free) })?;
        Ok(())
    }

    /// Makes the blocks from before the recording, by address, each on a thread of its arena, and the free chunks between them.
    fn plant(&mut self, survey: &Survey) -> Result<(), Ended> {
        if survey.seed.regions.is_empty() || !self.scenario.blocks.has(SEED_STACK) {
            return Ok(());
        }
        let of_arena: HashMap<u32, u32> =
            survey.end.iter().flat_map(|end| &end.arenas).rev().map(|&(thread, arena)| (arena, thread)).collect();
        // The player's own thread is the first that gets a place, and has the first arena.
        let mut threads: HashMap<u32, u32> = HashMap::new();
        let mut passing = Vec::new();
        let arenas = std::iter::once(0).chain(survey.seed.regions.iter().filter_map(|region| region.arena));
        for arena in arenas {
            if threads.contains_key(&arena) {
                continue;
            }
            let place = match of_arena.get(&arena) {
                Some(&recorded) => self.thread(recorded),
                None => {
                    let place = self.thread_places.take().unwrap_or(0);
                    passing.extend((place != 0).then_some(place));
                    place
                }
            };
            threads.insert(arena, place);
        }
        let mut holes = Vec::new();
        for region in &survey.seed.regions {
            let thread = region.arena.and_then(|arena| threads.get(&arena)).copied().unwrap_or(0);
            for chunk in region.chunks.iter().filter(|chunk| chunk.free.is_none() || !self.scenario.without_holes) {
                let mut touch_bytes = chunk.free.unwrap_or(chunk.usable_bytes);
                for bytes in pieces(chunk) {
                    let touch_to = touch_bytes.min(bytes);
                    touch_bytes -= touch_to;
                    let at = self.places.take().ok_or(Ended::Blocks)?;
                    let placed = Placed { at, stack: SEED_STACK, bytes };
                    self.requested_bytes = self.requested_bytes.saturating_add(bytes);
                    if self.requested_bytes > self.limits.heap_bytes_max {
                        return Err(Ended::Heap(self.limits.heap_bytes_max));
                    }
                    self.player.push(Play { bytes, touch_to, block: at, thread, ..nothing(PlayOp::Alloc) })?;
                    match chunk.free {
                        Some(_) => holes.push((thread, placed)),
                        None => {
                            self.seeds.insert(chunk.addr, placed);
                        }
                    }
                }
            }
        }
        for (thread, hole) in holes {
            self.free(self.last_ns, thread, hole)?;
        }
        for thread in passing {
            self.player.push(Play { thread, ..nothing(PlayOp::ThreadEnd) })?;
            self.thread_places.free.push(thread);
        }
        Ok(())
    }

    fn collect(&mut self) -> Replay {
        let mut out = std::mem::take(&mut self.out);
        out.samples = self
            .sample_times
            .iter()
            .enumerate()
            .map(|(index, &time_ns)| Sample { time_ns, bytes: self.player.sample_bytes(index as u32) })
            // Those that were pushed and never taken are zero.
            .filter(|sample| sample.bytes > 0)
            .collect();
        out.counts = self.player.counts();
        out.requested_bytes = self.requested_bytes;
        out
    }
}

/// How many bytes of a block the program writes to. `share`: of large blocks of its stack, if it is known.
fn touched_bytes(bytes: u64, share: Option<f64>) -> u64 {
    match share {
        Some(share) if bytes >= LARGE_BYTES => (bytes as f64 * share.clamp(0.0, 1.0)) as u64,
        _ => bytes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_blocks_of_stacks_with_a_known_share_are_touched_in_part() {
        assert_eq!(touched_bytes(100, Some(0.5)), 100);
        assert_eq!(touched_bytes(1 << 20, Some(0.5)), 1 << 19);
        assert_eq!(touched_bytes(1 << 20, None), 1 << 20);
        assert_eq!(touched_bytes(u64::MAX, Some(f64::NAN)), 0);
    }

    #[test]
    fn a_place_is_given_out_again_and_never_beyond_the_end() {
        let mut places = Places::new(1, 3);
        assert_eq!((places.take(), places.take(), places.take()), (Some(1), Some(2), None));
        places.free.push(1);
        assert_eq!(places.take(), Some(1));
    }
}
