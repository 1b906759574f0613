//! Gives free pages back to the kernel: a call of the process's own allocator, whose effect and stall are predicted before and measured
//! after.
//!
//! ```text
//! census ─→ plan (which heap, call, bytes, stall; refusals) ─→ inject::make ─→ census ─→ outcome (fact beside prediction)
//! ```
//!
//! What is called is a row of the registry ([`crate::allocator::Release`]); how it is called is [`crate::inject`]'s.

pub mod audit;
mod code;
mod refusal;
pub mod stall;

use std::ops::Range;
use std::time::Duration;

use serde::Serialize;

use self::code::Callable;
pub use self::refusal::{Refused, TrimRefusal};
pub use self::stall::{ArenaStall, Rate, Stall};
use crate::allocator::{Allocator, ReleaseArgument};
use crate::census::not_malloc::shared_bytes;
use crate::census::page_cache::PageCache;
use crate::census::{HeapWalk, LayoutCache, Level, LiveMemory, Memory, Options, Pace, Taken, glibc, page_map, take};
use crate::inject::{self, Argument, Call, Ending, Image, Limits, Made, Refusal};
use crate::process::Process;

/// Longest stall that is accepted unless another one is given.
pub const STALL_MAX: Duration = Duration::from_millis(100);
/// Less than this is nothing: a page or two that any free may have left.
const BYTES_MIN: u64 = 64 << 10;
/// How much longer than predicted a call is waited for, and at least.
const PATIENCE: u32 = 20;
const PATIENCE_MIN: Duration = Duration::from_secs(10);

/// What is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Bytes to be kept at the end of the heap (`malloc_trim`'s argument).
    pub pad_bytes: u64,
    /// Longest predicted stall.
    pub stall_max: Duration,
    /// Pace of the censuses.
    pub pace: Pace,
}

impl Default for Request {
    fn default() -> Self {
        Self { pad_bytes: 0, stall_max: STALL_MAX, pace: Pace::default() }
    }
}

/// What would be done.
#[derive(Debug)]
pub struct Plan {
    /// The allocator.
    pub allocator: Allocator,
    /// The call, as it is written in C.
    pub call: String,
    /// The file with the function.
    pub file: String,
    /// Resident bytes that it gives back.
    pub predicted_bytes: u64,
    /// For how long it takes and holds locks.
    pub stall: Stall,
    /// The thread that would make it, and its system call.
    pub thread: (u32, &'static str),
    /// Resident bytes of the heap.
    pub resident_bytes: u64,
    /// Of them, those that other processes have too, as after a fork: to give them back frees nothing as long as these keep them. `None` if
    /// it could not be read.
    pub shared_bytes: Option<u64>,
    ranges: Vec<Range<u64>>,
    image: Image,
    callable: Callable,
    arguments: Vec<Argument>,
    trampoline: u64,
}

/// What was done.
#[derive(Debug)]
pub struct Outcome {
    /// The call.
    pub made: Made,
    /// Resident bytes of the heap right before the call; `None` if it could not be read.
    pub resident_before_bytes: Option<u64>,
    /// Right after it; `None` if it had not returned, or could not be read.
    pub resident_after_bytes: Option<u64>,
    /// By how much the heap's bytes fell that other processes have too; `None` as for the others.
    pub shared_given_back_bytes: Option<u64>,
}

impl Outcome {
    /// By how much the heap's resident bytes fell.
    #[must_use]
    pub fn given_back_bytes(&self) -> Option<u64> {
        Some(self.resident_before_bytes?.saturating_sub(self.resident_after_bytes?))
    }
}

/// Plans for a process: reads its heap, and checks what can be checked without stopping a thread.
///
/// # Errors
/// What forbids it.
pub fn plan(memory: &LiveMemory, request: &Request, rate: &Rate, layouts: &mut LayoutCache) -> Result<Plan, TrimRefusal> {
    let process = memory.process();
    // The reasons that hold whatever the heap looks like come first: they are the cheapest to find.
    let threads = inject::check(process)?;
    let image = Image::of(process)?;
    let (heap, taken) = heap_of(memory, request.pace, layouts)?;
    let walk = taken.heaps.get(heap).ok_or(TrimRefusal::NoHeap)?;
    let account = &walk.account;
    let maps = process.maps().map_err(|_| Refusal::Ended)?;
    let detection = layouts.detector.detect(process).map_err(|_| Refusal::Ended)?;
    let callable = code::callable(process, &maps, &detection, account.allocator)?;
    let (Some(trimmable), true) = (account.ladder.trimmable_bytes, walk.quality.usable) else { return Err(TrimRefusal::NotPredicted) };
    let kept = if callable.call.arguments.contains(&ReleaseArgument::Kept) { kept_bytes(memory, walk, request.pad_bytes) } else { 0 };
    let predicted_bytes = trimmable.saturating_sub(kept);
    let stall = Stall::predict(account, predicted_bytes, callable.call.hold, rate);
    if predicted_bytes < BYTES_MIN {
        return Err(TrimRefusal::Nothing { bytes: predicted_bytes });
    }
    if stall.longest > request.stall_max {
        return Err(TrimRefusal::StallTooLong { predicted: stall.longest, max: request.stall_max });
    }
    let trampoline = inject::trampoline(process, &maps)?;
    let ranges: Vec<Range<u64>> = walk.extents.iter().map(|(_, range)| range.clone()).collect();
    let thread = threads.parked.first().map_or((0, ""), |thread| (thread.tid, thread.call.name()));
    let arguments = callable.call.arguments.iter().map(|argument| match argument {
        ReleaseArgument::Kept => Argument::Number(request.pad_bytes),
        ReleaseArgument::Number(number) => Argument::Number(*number),
        ReleaseArgument::Text(text) => Argument::Text(text.as_bytes().to_vec()),
    });
    Ok(Plan {
        allocator: account.allocator,
        call: text_of(&callable, request.pad_bytes),
        file: callable.file.clone(),
        predicted_bytes,
        stall,
        thread,
        resident_bytes: account.ladder.resident_bytes,
        shared_bytes: shared(memory, &ranges),
        ranges,
        arguments: arguments.collect(),
        image,
        trampoline,
        callable,
    })
}

/// The call as it is written in C, with the bytes to be kept.
fn text_of(callable: &Callable, pad_bytes: u64) -> String {
    if pad_bytes > 0 && callable.call.arguments == [ReleaseArgument::Kept] {
        return format!("{}({pad_bytes})", callable.call.symbol);
    }
    callable.call.text.to_owned()
}

/// Makes the planned call, and measures what it gave back.
///
/// # Errors
/// Why it was not made.
pub fn carry_out(memory: &LiveMemory, plan: &Plan, request: &Request, layouts: &mut LayoutCache) -> Result<Outcome, TrimRefusal> {
    let call = Call {
        image: &plan.image,
        function: plan.callable.function,
        arguments: &plan.arguments,
        trampoline: plan.trampoline,
        forbidden: &plan.callable.forbidden,
        system_calls: plan.callable.call.system_calls,
    };
    let limits = Limits { call: (plan.stall.call * PATIENCE).max(PATIENCE_MIN), ..Limits::default() };
    let before = resident_bytes(memory, plan.allocator, request.pace, layouts);
    let shared_before = shared(memory, &plan.ranges);
    let made = inject::make(memory.process(), &call, &limits)?;
    if made.ending != Ending::Returned {
        return Ok(Outcome { made, resident_before_bytes: before, resident_after_bytes: None, shared_given_back_bytes: None });
    }
    let after = resident_bytes(memory, plan.allocator, request.pace, layouts);
    let shared_given_back_bytes = shared_before.zip(shared(memory, &plan.ranges)).map(|(before, after)| before.saturating_sub(after));
    Ok(Outcome { made, resident_before_bytes: before, resident_after_bytes: after, shared_given_back_bytes })
}

/// Bytes of a heap that other processes have too.
fn shared(memory: &LiveMemory, ranges: &[Range<u64>]) -> Option<u64> {
    Some(shared_bytes(&memory.resident_mappings().ok()?, ranges))
}

/// A census of level full, and which heap has the most to give back.
fn heap_of(memory: &LiveMemory, pace: Pace, layouts: &mut LayoutCache) -> Result<(usize, Taken), TrimRefusal> {
    let process: &Process = memory.process();
    let options = Options { level: Level::Full, pace, with_not_malloc: false };
    let taken = take(memory, process.pid().0, process.comm(), options, layouts)?;
    let by_bytes = |(_, walk): &(usize, &HeapWalk)| walk.account.ladder.trimmable_bytes.unwrap_or(0);
    match taken.heaps.iter().enumerate().max_by_key(by_bytes).map(|(index, _)| index) {
        Some(index) => Ok((index, taken)),
        // An allocator without a reader, of which at least the name is known.
        None => {
            let detection = layouts.detector.detect(process).map_err(|_| Refusal::Ended)?;
            let serving = detection.modules.iter().find(|module| module.serves_malloc).map(|module| module.found.allocator);
            let reason = serving.and_then(|allocator| match allocator.row().release {
                crate::allocator::Release::NoCall(reason) => Some(TrimRefusal::NoCall { allocator: allocator.name(), reason }),
                crate::allocator::Release::Calls(_) => None,
            });
            Err(reason.unwrap_or(TrimRefusal::NoHeap))
        }
    }
}

/// The resident bytes of an allocator's heaps now: from a census that does not walk them, because what other threads do meanwhile counts too.
fn resident_bytes(memory: &LiveMemory, allocator: Allocator, pace: Pace, layouts: &mut LayoutCache) -> Option<u64> {
    let process: &Process = memory.process();
    let options = Options { level: Level::Top, pace, with_not_malloc: false };
    let taken = take(memory, process.pid().0, process.comm(), options, layouts).ok()?;
    let mut heaps = taken.census.heaps.iter().filter(|heap| heap.allocator == allocator).peekable();
    heaps.peek()?;
    Some(heaps.map(|heap| heap.ladder.resident_bytes).sum())
}

/// Of the end of the brk heap, the resident bytes that stay if `pad_bytes` are kept there.
fn kept_bytes(memory: &dyn Memory, walk: &HeapWalk, pad_bytes: u64) -> u64 {
    let released = walk.account.trimmable_top_bytes.unwrap_or(0);
    if pad_bytes == 0 || released == 0 {
        return 0;
    }
    let (top, unit) = page_map::brk_top(walk);
    let with_pad = top.and_then(|top| glibc::trim::released_top(&top, unit, pad_bytes));
    let still = with_pad.map_or(0, |range| PageCache::new(memory).resident_bytes(range));
    released.saturating_sub(still)
}

/// A trim, or why there was none, as it is reported: what was predicted beside what was seen.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct TrimReport {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// The allocator; `null` if it was refused before that was known.
    pub allocator: Option<&'static str>,
    /// The call.
    pub call: Option<String>,
    /// The file with the function.
    pub library: Option<String>,
    /// Resident bytes that it was predicted to give back.
    pub predicted_bytes: Option<u64>,
    /// By how much the heap's resident bytes fell; `null` if no call was made, or it was not measured.
    pub given_back_bytes: Option<u64>,
    /// Of the heap's resident bytes before, those that other processes have too, as after a fork; `null` if not known.
    pub shared_bytes: Option<u64>,
    /// Of what was given back, at most so much is kept by other processes and freed nothing; `null` if no call was made, or not known.
    pub shared_given_back_bytes: Option<u64>,
    /// Resident bytes of the heap before.
    pub resident_before_bytes: Option<u64>,
    /// Resident bytes of the heap after.
    pub resident_after_bytes: Option<u64>,
    /// Longest time for which a lock was predicted to be held.
    pub predicted_stall_s: Option<f64>,
    /// Predicted duration of the call.
    pub predicted_s: Option<f64>,
    /// Duration of the call.
    pub took_s: Option<f64>,
    /// How long the thread that made it stood before.
    pub stopped_s: Option<f64>,
    /// The thread that made it, or would.
    pub thread: Option<u32>,
    /// The system call in which it waits.
    pub thread_in: Option<&'static str>,
    /// Whether that returned EINTR because of the stop.
    pub interrupted: bool,
    /// How the call ended; `null` if none was made.
    pub ending: Option<Ending>,
    /// Predictions by arena.
    pub arenas: Vec<ArenaStall>,
    /// Why no call was made; `null` if one was, or for a dry run.
    pub refused: Option<Refused>,
    /// Nothing was to be done.
    pub dry_run: bool,
}

impl TrimReport {
    /// Of a process about which nothing is known yet.
    #[must_use]
    pub fn of(process: &Process) -> Self {
        Self { pid: process.pid().0, comm: process.comm().to_owned(), ..Self::default() }
    }

    /// Adds what was planned.
    pub fn add_plan(&mut self, plan: &Plan) {
        self.allocator = Some(plan.allocator.name());
        self.call = Some(plan.call.clone());
        self.library = Some(plan.file.clone());
        self.predicted_bytes = Some(plan.predicted_bytes);
        self.resident_before_bytes = Some(plan.resident_bytes);
        self.shared_bytes = plan.shared_bytes;
        self.predicted_stall_s = Some(plan.stall.longest.as_secs_f64());
        self.predicted_s = Some(plan.stall.call.as_secs_f64());
        (self.thread, self.thread_in) = (Some(plan.thread.0), Some(plan.thread.1));
        self.arenas = plan.stall.arenas.clone();
    }

    /// Adds what was done.
    pub fn add_outcome(&mut self, outcome: &Outcome) {
        let made = &outcome.made;
        (self.thread, self.thread_in) = (Some(made.thread.tid), Some(made.thread.call.name()));
        self.given_back_bytes = outcome.given_back_bytes();
        (self.resident_before_bytes, self.resident_after_bytes) = (outcome.resident_before_bytes, outcome.resident_after_bytes);
        self.shared_given_back_bytes = self.given_back_bytes.zip(outcome.shared_given_back_bytes).map(|(all, shared)| shared.min(all));
        self.took_s = Some(made.took.as_secs_f64());
        self.stopped_s = Some(made.stopped.as_secs_f64());
        self.interrupted = made.is_interrupted;
        self.ending = Some(made.ending);
    }

    /// Adds why nothing was done.
    pub fn add_refusal(&mut self, refusal: &TrimRefusal) {
        self.refused = Some(refusal.into());
    }
}
