//! `fragprof leaks`: blocks in use to which no pointer was seen.

use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;

use super::census::{failed, open, read_from, reading};
use super::debug_information;
use super::help::examples;
use super::record::parse_duration;
use super::{output, progress};
use crate::capture::registers::ThreadRegisters;
use crate::census::{LayoutCache, Memory, Pace};
use crate::error::{ExitStatus, Failed};
use crate::profile::{Profile, pprof};
use crate::retention::leaks::{Group, Leaks};
use crate::retention::limit;
use crate::retention::scans::{Plan, ScanError, ScanResult, scan};
use crate::retention::wording::{self, LIMITS, doubts, sentence};
use crate::sanitize::terminal;
use crate::session::{self, Recorder};
use crate::units::{HumanBytes, Pid, counted};

/// Find blocks to which nothing points any more, while the process keeps running
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof leaks PID", "Six scans, a second apart"),
    ("sudo fragprof leaks PID --record 30s", "With call stacks of blocks allocated from now on"),
    ("sudo fragprof leaks PID -o leaks.pb.gz", "Write a profile, for report and flamegraph"),
]))]
pub struct LeaksArgs {
    /// Process id
    #[arg(required_unless_present = "core")]
    pub pid: Option<u32>,
    /// Read this ELF core file instead of a process
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub core: Option<PathBuf>,
    /// Number of quick scans after the first, full one; a core file is scanned once
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub looks: u32,
    /// Seconds between scans
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub interval: f64,
    /// Trace every call for this time before the scans, and during them, so that blocks allocated from then on have call stacks; costs the
    /// process about 2 µs per allocation meanwhile
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "core")]
    pub record: Option<Duration>,
    /// Groups to show [default: 20, with --json 1000]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Show the first bytes of some blocks, which may be private data
    #[arg(long)]
    pub show_content: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a profile (gzipped pprof) with the value unreached_space
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Most memory that the scan itself may use, in MiB; a heap that needs more is refused [default: half of the available memory]
    #[arg(long, value_name = "MIB")]
    pub memory_max: Option<u64>,
    /// Pause for this many milliseconds after each MiB read, for latency-sensitive processes
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub pause: u64,
}

/// Frames shown of a group.
const FRAMES_SHOWN: usize = 6;
/// Interval at which the recording's periodic work is done.
const RECORD_STEP: Duration = Duration::from_millis(50);
/// Groups shown when `--top` is not given.
const TOP_DEFAULT: usize = 20;
/// Longest time between scans: a day.
const INTERVAL_MAX_S: f64 = 86_400.0;

/// Runs the command.
///
/// # Errors
/// If the process or the core cannot be read or has no heap that can be read, or the output cannot be written.
pub fn run(args: &LeaksArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        output::check_writable(path)?;
    }
    let shown = progress::show(reading());
    let leaks = read_from(args.core.as_deref(), args.pid, |memory, pid, comm| of(memory, pid, comm, args))?;
    drop(shown);
    if let Some(path) = &args.output {
        let profile = wording::profile(&leaks);
        output::to_file(path, |out| pprof::write(&profile, out))?;
    }
    output::to_stdout(|out| {
        if args.json {
            serde_json::to_writer_pretty(&mut *out, &leaks)?;
            return writeln!(out);
        }
        write_text(out, &leaks, args)
    })
}

fn of(memory: &dyn Memory, pid: u32, comm: &str, args: &LeaksArgs) -> anyhow::Result<Leaks> {
    let interval = if args.interval.is_finite() { args.interval.clamp(0.0, INTERVAL_MAX_S) } else { 1.0 };
    let pace = Pace::of_command(args.pause);
    let memory_max_bytes = memory_max(args.memory_max);
    let plan = Plan { looks: args.looks, interval: Duration::from_secs_f64(interval), pace, memory_max_bytes };
    let mut leaks = match args.record {
        None => {
            let seen = seen_of(memory, (pid, comm), plan).map_err(refused)?;
            Leaks::of(memory, pid, comm, &seen, args.show_content).map_err(failed)?
        }
        Some(time) => {
            let (seen, stacks) = recorded(pid, comm, plan, time)?;
            Leaks::with_stacks(memory, (pid, comm), &seen, args.show_content, |range| stacks.of(&range)).map_err(failed)?
        }
    };
    if let (Some(top), true) = (args.top, args.json) {
        leaks.keep(top);
    }
    Ok(leaks)
}

fn refused(error: ScanError) -> Failed {
    match error {
        ScanError::Memory(error) => failed(error),
        other => Failed::new(ExitStatus::Unsupported, other.to_string()),
    }
}

fn seen_of(memory: &dyn Memory, who: (u32, &str), plan: Plan) -> Result<ScanResult, ScanError> {
    let registers = registers_of(memory);
    let read = registers.as_ref().map(|registers| move || registers.read());
    let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
    scan(memory, who, plan, read, &mut LayoutCache::of_malloc())
}

/// The call stacks of a recording's blocks.
struct Stacks {
    profile: Profile,
    blocks: Option<session::report::block_index::BlockIndex>,
}

impl Stacks {
    /// The frames of the block at these addresses, the innermost first; empty if it was not recorded.
    fn of(&self, range: &Range<u64>) -> Vec<String> {
        self.blocks.as_ref().map(|blocks| blocks.functions(range, &self.profile, wording::FRAMES_MAX)).unwrap_or_default()
    }
}

/// Records a process, scans it during the recording, and ends both.
fn recorded(pid: u32, comm: &str, plan: Plan, time: Duration) -> anyhow::Result<(ScanResult, Stacks)> {
    let cannot = |error: session::Error| Failed::new(ExitStatus::Unsupported, format!("cannot record process {pid}: {error}"));
    let options = session::Options { source: session::Choice::Functions, ..session::Options::default() };
    debug_information::look(Some(Arc::default()));
    let mut recorder = Recorder::new(options).map_err(cannot)?;
    recorder.watch(Pid(pid)).map_err(cannot)?;
    while recorder.elapsed() < time && recorder.step(RECORD_STEP) {}
    let seen = std::thread::scope(|scope| {
        let looks = std::thread::Builder::new().name("fragprof-looks".to_owned());
        let looks = looks.spawn_scoped(scope, || {
            let memory = open(pid).map_err(|error| error.to_string())?;
            seen_of(&memory, (pid, comm), plan).map_err(|error| error.to_string())
        })?;
        while !looks.is_finished() && recorder.step(RECORD_STEP) {}
        Ok::<_, std::io::Error>(looks.join().unwrap_or_else(|_| Err("the scanning thread panicked: this is a bug in fragprof".to_owned())))
    })?;
    let seen = seen.map_err(|text| Failed::new(ExitStatus::Target, text))?;
    let (profile, blocks) = recorder.finish_with_blocks().map_err(cannot)?;
    debug_information::conclude();
    Ok((seen, Stacks { profile, blocks: blocks.into_iter().find(|blocks| blocks.pid == pid) }))
}

/// The memory limit that was given, or the default.
pub(super) fn memory_max(mib: Option<u64>) -> u64 {
    mib.map_or_else(limit::default_bytes, |mib| mib.saturating_mul(1 << 20))
}

/// A reader for the registers of a process's threads, if permitted.
pub(super) fn registers_of(memory: &dyn Memory) -> Option<ThreadRegisters> {
    let process = memory.process()?;
    match ThreadRegisters::of(process.pid()) {
        Ok(registers) => Some(registers),
        Err(error) => {
            tracing::info!("registers are not read: {error}");
            None
        }
    }
}

fn write_text(out: &mut dyn Write, leaks: &Leaks, args: &LeaksArgs) -> io::Result<()> {
    writeln!(out, "{} (pid {})", terminal(&leaks.comm), leaks.pid)?;
    writeln!(out, "  {}", sentence(leaks))?;
    if leaks.unreached_blocks > 0 {
        writeln!(out, "  {LIMITS}")?;
        writeln!(out, "\n  {:>11} {:>9} {:>9} {:>11} {:>9}  contents", "unreached", "blocks", "size", "they hold", "blocks")?;
        let top = args.top.unwrap_or(TOP_DEFAULT);
        for group in leaks.groups.iter().take(top) {
            write_group(out, group)?;
        }
        let rest: Vec<&Group> = leaks.groups.iter().skip(top).collect();
        let bytes = rest.iter().map(|group| group.all_bytes()).sum::<u64>().saturating_add(leaks.more.bytes);
        let groups = rest.len() as u64 + leaks.more.groups;
        if bytes > 0 {
            writeln!(out, "  {:>11} in {} more (--top)", HumanBytes(bytes).to_string(), counted(groups, "group"))?;
        }
    }
    writeln!(
        out,
        "\n  scanned: {}. Any address inside a block counts as a pointer, at multiples of 8; roots are the data of programs and libraries,\n  \
         stacks, thread-local storage, registers, other private and shared memory.",
        HumanBytes(leaks.read_bytes)
    )?;
    for doubt in doubts(&leaks.doubts) {
        writeln!(out, "  doubt: {doubt}")?;
    }
    Ok(())
}

fn write_group(out: &mut dyn Write, group: &Group) -> io::Result<()> {
    let held = if group.held_blocks > 0 { HumanBytes(group.held_bytes).to_string() } else { String::new() };
    let held_blocks = if group.held_blocks > 0 { group.held_blocks.to_string() } else { String::new() };
    writeln!(
        out,
        "  {:>11} {:>9} {:>9} {held:>11} {held_blocks:>9}  {}",
        HumanBytes(group.bytes).to_string(),
        group.blocks,
        format!("{} B", group.size_bytes),
        terminal(&group.words())
    )?;
    for frame in group.frames.iter().take(FRAMES_SHOWN) {
        writeln!(out, "  {:>53}  ← {}", "", terminal(frame))?;
    }
    for example in group.examples.iter().filter(|example| example.hex.is_some()) {
        let (hex, text) = (example.hex.as_deref().unwrap_or(""), example.text.as_deref().unwrap_or(""));
        writeln!(out, "  {:>53} {hex} {}", example.address, terminal(text))?;
    }
    Ok(())
}
