//! `fragprof attach-sampler`: the sampler's library brought to a process that runs, and taken away.

use std::io::{self, IsTerminal as _, Write};
use std::path::PathBuf;

use clap::Args;

use super::audit;
use super::census::open;
use super::help::examples;
use super::output::{self, say};
use crate::allocator::Allocator;
use crate::attach::{self, AttachRefusal, AttachReport, Settings};
use crate::error::{ExitStatus, Failed};
use crate::process::Process;
use crate::sampler::library::Flavour;
use crate::sampler::{SAMPLE_BYTES_DEFAULT, SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN, SAMPLES_PER_SECOND_DEFAULT, SAMPLES_PER_SECOND_MAX};
use crate::sanitize::terminal;
use crate::units::{ShortDuration, counted};

/// Bring the in-process sampler to a process that runs, or take it away (experimental)
///
/// The process loads the sampler's library itself, by a call of dlopen on a thread that waits in a system call, and the library swaps the
/// words through which the program and its libraries call the allocator (the GOT), each by one compare-and-swap. From then on `fragprof
/// record`, `top` and the agent know the stacks of what is allocated, as with `fragprof run`. --detach gives every word back what it held;
/// the library stays loaded and does nothing. Where a call would be unsafe, or nothing would be seen, nothing is done and the reason is
/// printed; the exit status is then 3. Running it again covers libraries that were loaded since.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof attach-sampler PID --dry-run", "Whether it is possible, and what would be done"),
    ("sudo fragprof attach-sampler PID", "Show that, ask, and do it"),
    ("sudo fragprof record --pid PID", "Record it then: stacks of what is allocated from now on"),
    ("sudo fragprof attach-sampler --detach PID", "Take it away"),
]))]
pub struct AttachSamplerArgs {
    /// Process id
    pub pid: u32,
    /// Give the process its own words back
    #[arg(long)]
    pub detach: bool,
    /// Only show what would be done
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
    /// Do not ask
    #[arg(long)]
    pub yes: bool,
    /// Mean distance between samples, in allocated bytes
    #[arg(long, value_name = "BYTES", default_value_t = SAMPLE_BYTES_DEFAULT, conflicts_with = "detach",
        value_parser = clap::value_parser!(u64).range(SAMPLE_BYTES_MIN..=SAMPLE_BYTES_MAX))]
    pub sample_bytes: u64,
    /// Samples per second, on a CPU or in a thread, above which the distance grows; 0 = no limit
    #[arg(long, value_name = "N", default_value_t = SAMPLES_PER_SECOND_DEFAULT, conflicts_with = "detach",
        value_parser = clap::value_parser!(u64).range(..=SAMPLES_PER_SECOND_MAX))]
    pub samples_per_second: u64,
    /// The library's path in the process's own root directory, for containers (see fragprof run --install)
    #[arg(long, value_name = "FILE", conflicts_with = "detach")]
    pub library: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// If the process cannot be read, a call is refused, or the output cannot be written.
pub fn run(args: &AttachSamplerArgs) -> anyhow::Result<()> {
    let asks = !args.yes && !args.dry_run;
    if asks && (args.json || !io::stdin().is_terminal()) {
        return Err(Failed::new(ExitStatus::Usage, "nobody to ask: give --yes to do it, or --dry-run to see what would be done").into());
    }
    let memory = open(args.pid)?;
    let process = memory.process();
    let mut report = AttachReport { dry_run: args.dry_run, ..AttachReport::of(process) };
    let done = carry_out(process, args, asks, &mut report);
    if let Err(refusal) = &done {
        report.refused = Some(refusal.name());
        report.reason = Some(refusal.to_string());
    }
    if !report.calls.is_empty() {
        audit::write(&line(args, &report, report.refused.unwrap_or("done")));
    }
    if args.json {
        output::to_stdout(|out| {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            writeln!(out)
        })?;
    }
    let what = if args.detach { "detached from" } else { "attached to" };
    done.map_err(|refusal| {
        let text = format!("the sampler is not {what} process {} ({}): {refusal}", args.pid, terminal(&report.comm));
        Failed::new(ExitStatus::Target, text).into()
    })
}

fn carry_out(process: &Process, args: &AttachSamplerArgs, asks: bool, report: &mut AttachReport) -> Result<(), AttachRefusal> {
    let flavour = flavour(process, args.detach);
    // Before anything that a call would need.
    if args.detach && attach::state(process, flavour).is_none_or(|state| state.words == 0) {
        return Err(AttachRefusal::NotAttached);
    }
    let plan = attach::plan(process, flavour)?;
    report.allocator = Some(plan.allocator().name());
    report.unseen = plan.unseen().map(Allocator::name);
    report.state = plan.state(process);
    report.was_loaded = report.state.is_some();
    let path = if args.detach || report.was_loaded { None } else { Some(attach::place(process, flavour, args.library.as_deref())?) };
    report.library.clone_from(&path);
    if !args.json {
        print(|out| write_plan(out, report, args.detach));
    }
    if args.dry_run {
        return Ok(());
    }
    if asks && !output::confirmed("Do it?") {
        say!("nothing was done");
        return Ok(());
    }
    audit::write(&line(args, report, "begins"));
    // While it was asked, time has passed.
    let plan = if asks { attach::plan(process, flavour)? } else { plan };
    let done = if args.detach {
        attach::detach(process, &plan, report)
    } else {
        let settings = Settings { sample_bytes: args.sample_bytes, samples_per_second: args.samples_per_second, by_site: true };
        attach::attach(process, plan, &path.unwrap_or_default(), &settings, report)
    };
    if !args.json {
        print(|out| write_calls(out, report, args.detach && done.is_ok()));
    }
    done
}

/// The sampler's library; or, to be taken away, a recorder's whose recording was killed.
fn flavour(process: &Process, detaches: bool) -> Flavour {
    let is_attached = |flavour: &Flavour| attach::state(process, *flavour).is_some_and(|state| state.words != 0);
    attach::ATTACHED.into_iter().filter(|_| detaches).find(is_attached).unwrap_or(Flavour::Attached)
}

/// What is written to the system's log.
fn line(args: &AttachSamplerArgs, report: &AttachReport, result: &str) -> String {
    report.audit_line(audit::user(), if args.detach { "detach-sampler" } else { "attach-sampler" }, result)
}

/// Prints to standard output. That it is closed does not matter: what is done to the process goes on.
fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) {
    if let Err(error) = output::to_stdout(write) {
        tracing::debug!("{error:#}");
    }
}

fn write_plan(out: &mut dyn Write, report: &AttachReport, is_detach: bool) -> io::Result<()> {
    let allocator = report.allocator.unwrap_or("unknown");
    writeln!(out, "{} (pid {}): {allocator} serves malloc", terminal(&report.comm), report.pid)?;
    if let Some(unseen) = report.unseen.filter(|_| !is_detach) {
        writeln!(out, "  {}", attach::unseen_text(unseen))?;
    }
    match (&report.library, report.state) {
        (_, Some(state)) if is_detach => writeln!(out, "  puts back  {} of the process, with one call", words(state.words)),
        (_, Some(state)) => {
            writeln!(out, "  looks for words that lead to the allocator again, with one call; {} lead to the library", state.words)
        }
        (Some(path), None) => {
            writeln!(out, "  loads      {}", terminal(&path.display().to_string()))?;
            writeln!(out, "  then swaps the words through which it calls the allocator; both are calls on a thread that waits")
        }
        (None, None) => Ok(()),
    }
}

fn write_calls(out: &mut dyn Write, report: &AttachReport, is_detached: bool) -> io::Result<()> {
    for call in &report.calls {
        let (stopped, took) = (ShortDuration(call.stopped_s), ShortDuration(call.took_s));
        let eintr = if call.interrupted { "; its system call returned EINTR" } else { "" };
        writeln!(out, "  {:<16} by thread {} (in {}): stood {stopped}, took {took}{eintr}", call.function, call.thread, call.thread_in)?;
    }
    let Some(state) = report.state.filter(|_| !report.calls.is_empty()) else { return Ok(()) };
    if is_detached {
        return writeln!(out, "{} put back; the library stays loaded and does nothing", words(state.put_back));
    }
    writeln!(out, "{} lead to the library ({} of them not looked up before)", words(state.words), state.lazy)?;
    for (count, what) in [(state.foreign, "leading to other functions of these names"), (state.failed, "that could not be written")] {
        if count > 0 {
            writeln!(out, "{} {what} left alone: of calls through them only what they pass on is seen", words(count))?;
        }
    }
    writeln!(out, "blocks from before now have no stack; detach with fragprof attach-sampler --detach {}", report.pid)
}

fn words(count: u64) -> String {
    counted(count, "word")
}
