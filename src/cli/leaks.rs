//! `fragprof leaks`: blocks in use to which no pointer is seen.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::census::{failed, read_from, reading};
use super::{output, progress};
use crate::capture::registers::ThreadRegisters;
use crate::census::{Memory, Pace, Places};
use crate::error::{ExitStatus, Failed};
use crate::profile::sanitize::terminal;
use crate::profile::{Frame, Metadata, Mode, Profile, ValueKind, Values, pprof};
use crate::retention::leaks::{Group, Leaks};
use crate::retention::looks::{Doubts, LooksError, Plan, look};
use crate::units::{HumanBytes, counted};

/// Name of the outermost frame in profiles.
const ROOT_FRAME: &str = "[no pointer was seen]";

/// Find blocks to which nothing points any more, in a process that goes on running
#[derive(Debug, Args)]
pub struct LeaksArgs {
    /// The process
    #[arg(required_unless_present = "core")]
    pub pid: Option<u32>,
    /// Look at this ELF core file instead
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub core: Option<PathBuf>,
    /// Quick looks after the first one; a core file needs none
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub looks: u32,
    /// Seconds before each quick look
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub interval: f64,
    /// Groups to show [default: 20, with --json 1000]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Show the first bytes of some blocks; contents may be private
    #[arg(long)]
    pub show_content: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a profile (gzipped pprof) with the value unreached_space
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Pause this many milliseconds after each MiB read, for a process whose latency counts
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub pause: u64,
}

/// Groups shown when `--top` is not given.
const TOP_DEFAULT: usize = 20;
/// Longest time between looks: a day.
const INTERVAL_MAX_S: f64 = 86_400.0;

/// Runs the command.
///
/// # Errors
/// If the process or the core cannot be read, has no heap that is understood, or the output cannot be written.
pub fn run(args: &LeaksArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        output::check_writable(path)?;
    }
    let shown = progress::show(reading());
    let leaks = read_from(args.core.as_deref(), args.pid, |memory, pid, comm| of(memory, pid, comm, args))?;
    drop(shown);
    if let Some(path) = &args.output {
        write_profile(&leaks, path)?;
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
    let pace = Pace { pause_per_mib: Duration::from_millis(args.pause), ..Pace::default() };
    let plan = Plan { looks: args.looks, interval: Duration::from_secs_f64(interval), pace };
    let registers = registers_of(memory);
    let read = registers.as_ref().map(|registers| move || registers.read());
    let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
    let seen = look(memory, (pid, comm), plan, read, &mut Places::default()).map_err(|error| match error {
        LooksError::Memory(error) => failed(error),
        other => Failed::new(ExitStatus::Unsupported, other.to_string()),
    })?;
    let mut leaks = Leaks::of(memory, pid, comm, &seen, args.show_content).map_err(failed)?;
    if let (Some(top), true) = (args.top, args.json) {
        leaks.keep(top);
    }
    Ok(leaks)
}

/// What reads the registers of a process's threads, where that is allowed.
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

/// The groups as stacks of two frames: what they are, and that no pointer was seen.
fn write_profile(leaks: &Leaks, path: &Path) -> anyhow::Result<()> {
    let kinds = [ValueKind::UnreachedObjects, ValueKind::UnreachedSpace].into_iter().collect();
    let process = crate::profile::meta::Process { pid: leaks.pid, comm: leaks.comm.clone(), ..Default::default() };
    let mut profile = Profile::new(Metadata {
        tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
        mode: Mode::Looked,
        duration_s: leaks.duration_s,
        kinds,
        processes: vec![process],
        notes: vec![sentence(leaks)],
        limits: vec![LIMITS.to_owned()],
        doubts: doubts(&leaks.doubts),
        ..Metadata::default()
    });
    let mut add = |name: String, below: Option<&str>, blocks: u64, bytes: u64| {
        let frames: Vec<Frame> = std::iter::once(name.as_str()).chain(below).chain([ROOT_FRAME]).map(Frame::named).collect();
        let values = Values::default().with(ValueKind::UnreachedObjects, blocks).with(ValueKind::UnreachedSpace, bytes);
        profile.add(leaks.pid, &frames, None, &values);
    };
    for group in &leaks.groups {
        let name = format!("{}, {} B", group.words(), group.size_bytes);
        if group.held_blocks > 0 {
            add("[held by it]".to_owned(), Some(&name), group.held_blocks, group.held_bytes);
        }
        add(name, None, group.blocks, group.bytes);
    }
    if leaks.more.blocks > 0 {
        add("[other groups]".to_owned(), None, leaks.more.blocks, leaks.more.bytes);
    }
    output::to_file(path, |out| pprof::write(&profile, out))
}

/// What no look can tell.
const LIMITS: &str = "Programs that hide pointers (XORed, compressed, tagged in the upper 16 bits) look the same. A block that is still \
                      pointed to, but never used again, is not among them.";

/// What was found, in one sentence.
pub(super) fn sentence(leaks: &Leaks) -> String {
    let looks = counted(u64::from(leaks.looks), "look");
    if leaks.unreached_blocks == 0 {
        return format!("To each of the {} blocks in use a pointer was seen ({looks}, {:.1} s).", leaks.live_blocks, leaks.duration_s);
    }
    let unchanged = if leaks.looks > 1 { ", and their contents did not change" } else { "" };
    format!(
        "No pointer to {} ({}) of {} ({}) in use was seen in {looks} over {:.1} s{unchanged}.",
        counted(leaks.unreached_blocks, "block"),
        HumanBytes(leaks.unreached_bytes),
        leaks.live_blocks,
        HumanBytes(leaks.live_bytes),
        leaks.duration_s
    )
}

/// Reasons to doubt, each as one sentence.
pub(super) fn doubts(seen: &Doubts) -> Vec<String> {
    let mut told = Vec::new();
    let mut tell = |holds: bool, text: String| told.extend(holds.then_some(text));
    tell(seen.swapped_bytes > 0, format!("{} are in swap and were not read: pointers may stand there", HumanBytes(seen.swapped_bytes)));
    tell(seen.unread_bytes > 0, format!("{} could not be read: pointers may stand there", HumanBytes(seen.unread_bytes)));
    tell(!seen.is_census_usable, "the census of the heap is not usable: blocks may be missing or wrong".to_owned());
    tell(
        seen.unknown_bytes > 0,
        format!(
            "{} of the heap are not understood; they were read as roots, and their blocks are not told",
            HumanBytes(seen.unknown_bytes)
        ),
    );
    tell(
        seen.dropped_pointers > 0,
        format!("{} were not kept for want of room: what they lead to counts as reached", counted(seen.dropped_pointers, "pointer")),
    );
    tell(
        !seen.are_registers_known,
        "registers were not read, but for arguments of system calls (this takes CAP_BPF and CAP_PERFMON): a block that only a register \
         holds looks the same"
            .to_owned(),
    );
    tell(
        seen.running_threads > 0,
        format!(
            "{} of {} ran during a look: their registers are not known, and their stacks were read whole",
            seen.running_threads,
            counted(seen.threads as u64, "thread")
        ),
    );
    told
}

fn write_text(out: &mut dyn Write, leaks: &Leaks, args: &LeaksArgs) -> io::Result<()> {
    writeln!(out, "{} (pid {})", terminal(&leaks.comm), leaks.pid)?;
    writeln!(out, "  {}", sentence(leaks))?;
    if leaks.unreached_blocks > 0 {
        writeln!(out, "  {LIMITS}")?;
        writeln!(out, "\n  {:>11} {:>9} {:>9} {:>11} {:>9}  what stands in them", "unreached", "blocks", "size", "they hold", "blocks")?;
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
        "\n  read: any address inside a block counts, at multiples of 8; roots are data of programs and libraries, stacks, thread-local \
         storage,\n  registers, other private and shared memory. {} read.",
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
    for example in group.examples.iter().filter(|example| example.hex.is_some()) {
        let (hex, text) = (example.hex.as_deref().unwrap_or(""), example.text.as_deref().unwrap_or(""));
        writeln!(out, "  {:>53} {hex} {}", example.address, terminal(text))?;
    }
    Ok(())
}
