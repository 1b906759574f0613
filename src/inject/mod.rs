//! One function call made by a process that is already running, on a thread of its own that waits in a system call.
//!
//! ```text
//! check (status, threads) ─→ stop one thread ─→ check it ─→ write two signal frames ─→ set its registers ─→ detach ─→ wait for the end
//!        none is stopped       65 µs               stack, seccomp       below its stack        the commit          nothing to do
//! ```
//!
//! The call is committed by one write of registers, after which the target needs nothing from outside: this process may be killed at any
//! moment. No code is written and no memory is made executable. The other threads are never stopped, so what they hold they release; the
//! thread that makes the call must not be inside the code that the call enters, which its stack shows. [`frame`] draws the frames, design
//! note 0019 has the reasoning and what else was tried.
//!
//! The mechanism does not know what it calls: [`Call`] says that.

pub mod audit;
mod code;
pub mod frame;
mod image;
pub mod locks;
mod machine;
pub mod memory;
mod parked;
mod refusal;
pub mod seccomp;
mod stack;
mod status;
mod tracer;

use std::time::{Duration, Instant};

pub use code::{address_of, function_vaddr, trampoline};
pub use frame::Argument;
pub use image::Image;
pub use parked::{Parked, Rank, Threads};
pub use refusal::{Refusal, Unfit};
pub use stack::Forbidden;

use self::refusal::Failed;
use self::status::ThreadStatus;
use crate::process::Process;
use crate::process::container::{self, Hierarchies};
use crate::process::handle::read_bounded;
use crate::process::stack::Walker;

/// Threads that are tried before the process is refused.
const TRIED_MAX: usize = 16;
/// Times that the threads are examined, and the pause in between: one that waits for a millisecond at a time has often just moved on.
const EXAMINED_MAX: usize = 10;
const EXAMINED_EVERY: Duration = Duration::from_millis(5);
/// Interval between two checks whether a call has ended.
const POLL: Duration = Duration::from_micros(200);
/// Bytes of `/proc/PID/wchan`, a function's name.
const WAIT_CHANNEL_BYTES_MAX: u64 = 256;

/// What is called, and what it needs.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The image that the addresses are of.
    pub image: &'a Image,
    /// Address of the function.
    pub function: u64,
    /// Its arguments.
    pub arguments: &'a [Argument],
    /// Address of the instructions that return from a signal handler.
    pub trampoline: u64,
    /// Code in which the thread must not be: what holds locks that the call takes.
    pub forbidden: &'a [Forbidden],
    /// System calls that the function makes, by name and number.
    pub system_calls: &'a [(&'static str, libc::c_long)],
}

/// How long each step may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Until a thread stands.
    pub stop: Duration,
    /// Until a thread's wait with a timeout ends by itself.
    pub sleep: Duration,
    /// Until the call is no longer waited for. It is not undone: it ends by itself.
    pub call: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { stop: Duration::from_millis(200), sleep: Duration::from_secs(1), call: Duration::from_secs(60) }
    }
}

/// How a committed call went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It returned, and the thread goes on as before.
    Returned,
    /// It had not returned when it was no longer waited for.
    StillRuns,
    /// It had not begun: the thread did not get to run, or a signal handler left it for elsewhere.
    NotBegun,
    /// The thread or the process ended first.
    Gone,
    /// The process has executed another program since; whether the call had returned is not known.
    Replaced,
}

impl Ending {
    /// In words.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Returned => "returned",
            Self::StillRuns => "still runs",
            Self::NotBegun => "not begun",
            Self::Gone => "the thread ended",
            Self::Replaced => "the process executed another program",
        }
    }
}

/// A call that was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// The thread that made it.
    pub thread: Parked,
    /// The thread's name.
    pub thread_name: String,
    /// Threads of the process.
    pub threads: usize,
    /// Threads that were stopped and left alone before, with the reason.
    pub unfit: Vec<(u32, Unfit)>,
    /// How long the thread stood.
    pub stopped: Duration,
    /// From letting it go until its return was noticed.
    pub took: Duration,
    /// How it ended.
    pub ending: Ending,
    /// Whether the stop made the thread's system call return EINTR.
    pub is_interrupted: bool,
}

/// Checks all that can be checked without stopping a thread, and lists the threads.
///
/// # Errors
/// What forbids a call.
pub fn check(process: &Process) -> Result<Threads, Refusal> {
    let status = ThreadStatus::read(process.directory()).ok_or(Refusal::Ended)?;
    if status.is_dead() {
        return Err(Refusal::Ended);
    }
    if status.tracer != 0 {
        return Err(Refusal::Traced { tracer: status.tracer });
    }
    if status.is_stopped() {
        return Err(Refusal::Stopped);
    }
    if status.shadow_stack {
        return Err(Refusal::ShadowStack);
    }
    if status.seccomp == 1 {
        return Err(Refusal::StrictSeccomp);
    }
    if status.is_setuid() {
        return Err(Refusal::Setuid);
    }
    if is_frozen(process) {
        return Err(Refusal::Frozen);
    }
    let examine = || parked::of_process(process, |mask| mask == frame::call_mask()).ok_or_else(tracer::not_permitted);
    let mut threads = examine()?;
    for _ in 1..EXAMINED_MAX {
        if !threads.parked.is_empty() {
            break;
        }
        std::thread::sleep(EXAMINED_EVERY);
        threads = examine()?;
    }
    // The kernel gives the directory of a process that must not be inspected to root (fs/proc/base.c, task_dump_owner).
    let owner = std::fs::metadata(process.directory()).map(|metadata| std::os::unix::fs::MetadataExt::uid(&metadata)).unwrap_or(0);
    if owner != status.users[1] {
        return Err(Refusal::NotDumpable);
    }
    if tracer::shares_memory(process.pid().0, status.parent) {
        return Err(Refusal::SharedMemory { other: status.parent });
    }
    if let Some(tid) = threads.vfork {
        return Err(Refusal::Vfork { tid });
    }
    if let Some(tid) = threads.calling {
        return Err(Refusal::CallInProgress { tid });
    }
    if threads.parked.is_empty() {
        return Err(Refusal::NoThread { threads: threads.count, unfit: Vec::new() });
    }
    Ok(threads)
}

/// Whether its cgroup is frozen. Where the cgroup is out of sight, its threads show it under version 2: they wait in these functions of the
/// kernel (kernel/cgroup/freezer.c, `do_freezer_trap`, which compilers put into its caller in kernel/signal.c), in which nothing else waits
/// that is neither stopped nor traced.
fn is_frozen(process: &Process) -> bool {
    let channel = read_bounded(&process.directory().join("wchan"), WAIT_CHANNEL_BYTES_MAX).unwrap_or_default();
    [&b"do_freezer_trap"[..], b"get_signal"].contains(&channel.as_slice())
        || Hierarchies::find_freezers().is_frozen(&container::read(process.pid()))
}

/// Makes the call in the best thread, and waits for its end.
///
/// # Errors
/// Why it was not made; the process is then as it was.
pub fn make(process: &Process, call: &Call<'_>, limits: &Limits) -> Result<Made, Refusal> {
    let software = machine::software().ok_or(Refusal::SignalFrame { reason: "no xsave area, or one of unknown size" })?;
    let mut examined = 1;
    let (threads, unfit, committed) = loop {
        let threads = check(process)?;
        let mut unfit = Vec::new();
        let committed = each_thread_twice(process, call, limits, &software, &threads, &mut unfit)?;
        let have_moved_on = unfit.iter().all(|(_, reason)| matches!(reason, Unfit::MovedOn));
        if committed.is_some() || !have_moved_on || examined == EXAMINED_MAX {
            break (threads, unfit, committed);
        }
        examined += 1;
        std::thread::sleep(EXAMINED_EVERY);
    };
    let Some((parked, committed)) = committed else { return Err(Refusal::NoThread { threads: threads.count, unfit }) };
    let directory = process.directory().join(format!("task/{}", parked.tid));
    let name = read_bounded(&directory.join("comm"), 64).unwrap_or_default();
    let ending = wait_for_end(process, call.image, &directory, &committed, limits.call);
    Ok(Made {
        thread: parked,
        thread_name: String::from_utf8_lossy(name.trim_ascii_end()).into_owned(),
        threads: threads.count,
        unfit,
        stopped: committed.stopped,
        took: committed.at.elapsed(),
        ending,
        is_interrupted: committed.is_interrupted,
    })
}

/// Tries the threads, by the words on their stacks and then by their frames, until one makes the call. `None` if none is fit; why not is then
/// in `unfit`.
fn each_thread_twice(
    process: &Process,
    call: &Call<'_>,
    limits: &Limits,
    software: &machine::Software,
    threads: &Threads,
    unfit: &mut Vec<(u32, Unfit)>,
) -> Result<Option<(Parked, tracer::Committed)>, Refusal> {
    let committed = each_thread(process, call, limits, software, threads, None, unfit)?;
    if committed.is_some() || !unfit.iter().any(|(_, reason)| matches!(reason, Unfit::InForbiddenCode { .. })) {
        return Ok(committed);
    }
    // Words that look like return addresses may be left from calls that are over.
    let maps = process.maps().map_err(|_| Refusal::Ended)?;
    let mut walker = Walker::of(process, &maps);
    walker.read_tables();
    unfit.clear();
    each_thread(process, call, limits, software, threads, Some(&mut walker), unfit)
}

/// Tries the threads, the best first, until one makes the call. `None` if none is fit; why not is then in `unfit`.
fn each_thread(
    process: &Process,
    call: &Call<'_>,
    limits: &Limits,
    software: &machine::Software,
    threads: &Threads,
    mut walker: Option<&mut Walker<'_>>,
    unfit: &mut Vec<(u32, Unfit)>,
) -> Result<Option<(Parked, tracer::Committed)>, Refusal> {
    for parked in threads.parked.iter().take(TRIED_MAX) {
        if tracer::has_ended(process) {
            return Err(Refusal::Ended);
        }
        // The thread that traces ends after each attempt: that detaches, whatever state the attempt was in.
        let attempt = std::thread::scope(|scope| {
            let tracer = std::thread::Builder::new().name("fragprof-inject".into());
            let walker = walker.as_deref_mut();
            let attempt = tracer.spawn_scoped(scope, || tracer::attempt(process, parked, call, limits, software, walker));
            attempt.map(|thread| thread.join())
        });
        match attempt {
            Ok(Ok(Ok(committed))) => return Ok(Some((*parked, committed))),
            Ok(Ok(Err(Failed::Unfit(reason)))) => {
                tracing::debug!("thread {}: {reason}", parked.tid);
                unfit.push((parked.tid, reason));
            }
            Ok(Ok(Err(Failed::Refused(refusal)))) => return Err(refusal),
            Ok(Err(_)) => return Err(Refusal::Kernel { what: "the tracing thread", reason: "it panicked".into() }),
            Err(error) => return Err(Refusal::Kernel { what: "cannot start a thread", reason: error.to_string() }),
        }
    }
    Ok(None)
}

/// Waits until the thread has its own mask again. Before the call begins it has it too: the call has begun once the mask was seen, or the
/// canary below its frame is no longer whole.
fn wait_for_end(process: &Process, image: &Image, directory: &std::path::Path, committed: &tracer::Committed, limit: Duration) -> Ending {
    let pid = process.pid().0.cast_signed();
    let deadline = Instant::now() + limit;
    let mut has_begun = false;
    loop {
        // The canary first: a call that has begun by now has the call's mask, or has ended.
        let mut canary = [0; frame::CANARY_BYTES];
        match memory::read(pid, committed.canary, &mut canary) {
            frame::CANARY_BYTES => has_begun |= !frame::is_canary(&canary),
            _ if tracer::has_ended(process) => return Ending::Gone,
            _ if image.check(process) == Err(Refusal::Replaced) => return Ending::Replaced,
            _ => {}
        }
        let Some(status) = ThreadStatus::read(directory).filter(|status| !status.is_dead()) else { return Ending::Gone };
        let is_calling = status.blocked == frame::call_mask();
        has_begun |= is_calling;
        if has_begun && !is_calling {
            return if image.check(process) == Err(Refusal::Replaced) { Ending::Replaced } else { Ending::Returned };
        }
        if Instant::now() >= deadline {
            return if has_begun { Ending::StillRuns } else { Ending::NotBegun };
        }
        std::thread::sleep(POLL);
    }
}
