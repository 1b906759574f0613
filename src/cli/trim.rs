//! `fragprof trim`: give free memory back to the kernel by a call of the process's own allocator.

use std::io::{self, IsTerminal as _, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::census::open;
use super::help::examples;
use super::output::{self, say};
use super::reachability::{HeldBy, Reachability};
use super::record::parse_duration;
use super::{audit, past};
use crate::agent::reclaim;
use crate::census::{LayoutCache, Level, LiveMemory, Options, Pace, take};
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::verdict::judge;
use crate::inject::Ending;
use crate::model::sample::{Identity, ProcessSample};
use crate::process::Process;
use crate::process::container::{Hierarchies, Surroundings};
use crate::sanitize::terminal;
use crate::store::write::Writer;
use crate::store::{Database, Reader, StoreError};
use crate::trim::audit::{after, before};
use crate::trim::{self, Plan, Rate, Request, TrimRefusal, TrimReport};
use crate::units::{HumanBytes, ShortDuration, counted};

/// Arenas shown.
const ARENAS_SHOWN: usize = 8;

/// Give a process's free heap memory back to the kernel, after predicting how much and for how long threads wait
///
/// The process makes the call itself, on a thread that waits in a system call: malloc_trim for glibc, a purge of all arenas for jemalloc,
/// MallocExtension_ReleaseFreeMemory for tcmalloc. It is prepared in the thread's stack and committed by one write of registers, so that it
/// does not matter if this command is killed. Without --yes, and on a terminal, it asks first. Where the call would be unsafe, or would hold
/// a lock for longer than --max-stall, nothing is done and the reason is printed; the exit status is then 3.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof trim PID --dry-run", "What it would give back, and for how long threads would wait"),
    ("sudo fragprof trim PID", "Show that, ask, and do it"),
    ("sudo fragprof trim PID --yes --json", "Do it from a script"),
    ("sudo fragprof trim PID --max-stall 2s", "Accept that threads that allocate wait for up to two seconds"),
]))]
pub struct TrimArgs {
    /// Process id
    pub pid: u32,
    /// Only show what would be done
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Refuse if threads that allocate would wait for longer than this
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "100ms")]
    pub max_stall: Duration,
    /// Bytes to keep at the end of the heap (glibc)
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub pad: u64,
    /// Directory of the agent's history, in which the call is kept [default: /var/lib/fragprof, if there is a history]
    #[arg(long, value_name = "DIRECTORY")]
    pub history: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Pause for this many milliseconds after each MiB read, for latency-sensitive processes
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub pause: u64,
}

/// Runs the command.
///
/// # Errors
/// If the process cannot be read, the call is refused, or the output cannot be written.
pub fn run(args: &TrimArgs) -> anyhow::Result<()> {
    let asks = !args.yes && !args.dry_run;
    if asks && (args.json || !io::stdin().is_terminal()) {
        return Err(Failed::new(ExitStatus::Usage, "nobody to ask: give --yes to do it, or --dry-run to see what would be done").into());
    }
    let memory = open(args.pid)?;
    let mut report = TrimReport::of(memory.process());
    report.dry_run = args.dry_run;
    let done = carry_out(&memory, args, asks, &mut report);
    if let Err(refusal) = &done {
        report.add_refusal(refusal);
    }
    if report.call.is_some() && (report.ending.is_some() || report.refused.is_some()) {
        audit::write(&after(audit::user(), &report));
    }
    if report.ending.is_some() {
        keep(&memory, args, &report);
    }
    let pinned_by = pinned_by(&memory, args, &report);
    if args.json {
        output::to_stdout(|out| {
            serde_json::to_writer_pretty(&mut *out, &Page { report: &report, pinned_by: pinned_by.as_ref() })?;
            writeln!(out)
        })?;
    } else if let Some(held) = &pinned_by {
        print(|out| {
            writeln!(out, "{} of free bytes are pinned: they lie on pages that also hold blocks in use", HumanBytes(held.bytes))?;
            held.write(out)
        });
    }
    match done {
        Ok(()) => Ok(()),
        Err(refusal) => {
            let text = format!("no memory of process {} ({}) is given back: {refusal}", args.pid, report.comm);
            Err(Failed::new(ExitStatus::Target, text).into())
        }
    }
}

/// The report, with what pins the free bytes that no call gives back.
#[derive(Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    report: &'a TrimReport,
    /// If most free bytes are pinned, and nothing was done yet: the blocks that pin them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned_by: Option<&'a HeldBy>,
}

/// What pins the free bytes, where there is less to give back than is pinned. Reads the whole heap, so only where nothing is done to it.
fn pinned_by(memory: &LiveMemory, args: &TrimArgs, report: &TrimReport) -> Option<HeldBy> {
    let has_nothing = report.refused.as_ref().is_some_and(|refused| refused.name == "nothing");
    if !has_nothing && !args.dry_run {
        return None;
    }
    let options = Options { level: Level::Full, pace: Pace::of_command(0), with_not_malloc: false };
    let census = take(memory, args.pid, &report.comm, options, &mut LayoutCache::of_malloc()).ok()?.census;
    let verdict = judge(&census, None);
    let is_more = verdict.evidence.ladder.pinned_bytes > report.predicted_bytes;
    let blocks = census.heaps.iter().filter_map(|heap| heap.live_allocations).fold(0, u64::saturating_add);
    let wanted = is_more && verdict.has_pinned_bytes();
    wanted.then(|| Reachability::of(memory, (args.pid, &report.comm), &verdict, blocks, true).held_by).flatten()
}

fn carry_out(memory: &LiveMemory, args: &TrimArgs, asks: bool, report: &mut TrimReport) -> Result<(), TrimRefusal> {
    let pace = Pace::of_command(args.pause);
    let request = Request { pad_bytes: args.pad, stall_max: args.max_stall, pace };
    let mut layouts = LayoutCache::of_malloc();
    let rate = Rate::measure().map_err(|error| crate::inject::Refusal::Kernel { what: "cannot measure", reason: error.to_string() })?;
    let mut plan = trim::plan(memory, &request, &rate, &mut layouts)?;
    report.add_plan(&plan);
    if !args.json {
        print(|out| write_plan(out, report, &plan));
    }
    if args.dry_run {
        return Ok(());
    }
    if asks {
        if !output::confirmed("Make the call?") {
            say!("nothing was done");
            return Ok(());
        }
        // Time has passed: what was read may be old.
        plan = trim::plan(memory, &request, &rate, &mut layouts)?;
        report.add_plan(&plan);
    }
    audit::write(&before(audit::user(), report));
    let outcome = trim::carry_out(memory, &plan, &request, &mut layouts)?;
    report.add_outcome(&outcome);
    if !args.json {
        print(|out| write_outcome(out, report));
    }
    Ok(())
}

/// Keeps the call in the agent's history, with what it saved beside what was predicted. That it cannot be kept does not matter to the process.
fn keep(memory: &LiveMemory, args: &TrimArgs, report: &TrimReport) {
    let directory = args.history.clone().unwrap_or_else(|| PathBuf::from(past::DEFAULT_DIRECTORY));
    match write_record(memory.process(), &directory, report) {
        Err(StoreError::Missing(_)) if args.history.is_none() => {}
        Err(error) => tracing::warn!("the call is not kept in the history: {error}"),
        Ok(()) => {}
    }
}

fn write_record(process: &Process, directory: &Path, report: &TrimReport) -> Result<(), StoreError> {
    let id = process.id();
    let database = Database::open_to_append(directory)?;
    let uid = std::fs::metadata(process.directory()).map_or(0, |metadata| metadata.uid());
    let sample = ProcessSample {
        surroundings: Surroundings::of(id.pid, &Hierarchies::find()),
        ..ProcessSample::new(Identity { process: id, stack: 0 }, process.comm().to_owned(), uid, report.resident_after_bytes.unwrap_or(0))
    };
    let mut record = reclaim::record(&sample, report, reclaim::evidence(report, None), &mut 0);
    // The names of containers are the agent's knowledge.
    let known = Reader::new(database.clone()).workload_of(id.pid.0, id.start_ticks)?;
    if let (Some(outcome), Some(workload)) = (&mut record.event.outcome, known) {
        outcome.workload = workload;
    }
    Writer::new(database, String::new()).event(&record.event, None)
}

/// Prints to standard output. That it is closed does not matter: what is done to the process goes on.
fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    if let Err(error) = output::to_stdout(write) {
        tracing::debug!("{error:#}");
    }
}

fn seconds(value: Option<f64>) -> String {
    value.map_or_else(|| "?".to_owned(), |value| ShortDuration(value).to_string())
}

/// Less shared memory is not mentioned.
const SHARED_BYTES_MIN: u64 = 1 << 20;

fn write_plan(out: &mut dyn Write, report: &TrimReport, plan: &Plan) -> io::Result<()> {
    writeln!(out, "{} (pid {}): {} in {}", terminal(&report.comm), report.pid, plan.call, terminal(&plan.file))?;
    let resident = HumanBytes(plan.resident_bytes);
    writeln!(out, "  gives back    {} of {resident} resident", HumanBytes(plan.predicted_bytes))?;
    if let Some(shared) = plan.shared_bytes.filter(|&bytes| bytes >= SHARED_BYTES_MIN) {
        let shared = HumanBytes(shared);
        writeln!(out, "  shared        {shared} of the heap with other processes (forked), which keep what this one gives back of it")?;
    }
    writeln!(out, "  threads wait  up to {}; the call takes {}", seconds(report.predicted_stall_s), seconds(report.predicted_s))?;
    writeln!(out, "  made by       thread {} of the process, which waits in {}", plan.thread.0, plan.thread.1)?;
    if plan.stall.arenas.len() > 1 {
        writeln!(out, "\n  {:<18} {:>7} {:>12} {:>9} {:>10}", "arena", "threads", "gives back", "ranges", "lock held")?;
        for arena in plan.stall.arenas.iter().take(ARENAS_SHOWN) {
            writeln!(
                out,
                "  {:<18} {:>7} {:>12} {:>9} {:>10}",
                format!("{:#x}", arena.address),
                arena.attached_threads.map_or_else(|| "?".to_owned(), |threads| threads.to_string()),
                HumanBytes(arena.predicted_bytes).to_string(),
                arena.ranges,
                ShortDuration(arena.predicted_stall_s).to_string()
            )?;
        }
        if plan.stall.arenas.len() > ARENAS_SHOWN {
            writeln!(out, "  and {} more", counted((plan.stall.arenas.len() - ARENAS_SHOWN) as u64, "arena"))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn write_outcome(out: &mut dyn Write, report: &TrimReport) -> io::Result<()> {
    match (report.ending, report.given_back_bytes) {
        (Some(Ending::Returned), Some(bytes)) => {
            let predicted = HumanBytes(report.predicted_bytes.unwrap_or(0));
            writeln!(out, "gave back {} (predicted {predicted}) in {}", HumanBytes(bytes), seconds(report.took_s))?;
            if let Some(shared) = report.shared_given_back_bytes.filter(|&bytes| bytes >= SHARED_BYTES_MIN) {
                writeln!(out, "up to {} of it freed nothing: other processes (forked) still have it", HumanBytes(shared))?;
            }
        }
        (Some(Ending::Returned), None) => {
            writeln!(out, "the call returned after {}; the heap could not be read again", seconds(report.took_s))?
        }
        (Some(Ending::StillRuns), _) => {
            writeln!(out, "the call still runs after {}: it cannot be undone and ends by itself", seconds(report.took_s))?;
        }
        (Some(Ending::NotBegun), _) => {
            writeln!(
                out,
                "the call had not begun after {}: thread {} did not get to run",
                seconds(report.took_s),
                report.thread.unwrap_or(0)
            )?;
        }
        (Some(Ending::Replaced), _) => {
            writeln!(out, "the process executed another program meanwhile; whether the call had returned is not known")?;
        }
        (Some(Ending::Gone), _) => writeln!(out, "the process, or the thread that made the call, ended meanwhile")?,
        (None, _) => {}
    }
    writeln!(out, "thread {} stood for {}", report.thread.unwrap_or(0), seconds(report.stopped_s))?;
    if report.interrupted {
        writeln!(out, "its {} returned EINTR", report.thread_in.unwrap_or("system call"))?;
    }
    Ok(())
}
