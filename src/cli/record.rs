//! `fragprof record`: traces allocations and frees of processes, all of them or as many as a budget allows, and writes a profile.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{ArgGroup, Args, ValueEnum};

use super::debug_information;
use super::frames::Frames;
use super::help::examples;
use super::output::{self, say};
use super::progress::{self, Progress, Said};
use super::stop::stop_flag_or_end_of;
use crate::allocator::Allocator;
use crate::bpf::FRAMES_DEEP_MAX;
use crate::capture;
use crate::emitter::{Emitter, Finder};
use crate::error::{ExitStatus, Failed};
use crate::machine::open_files;
use crate::probe::features::Features;
use crate::probe::plan::{PlanError, Planner};
use crate::process::{Process, ProcessError};
use crate::profile::{Profile, ValueKind, meta, pprof};
use crate::sanitize::terminal;
use crate::session::tier::windows::{Governed, Options as GovernedOptions};
use crate::session::trace::{SharedTrace, Trace};
use crate::session::{self, Choice, Options, Recorder};
use crate::units::{HumanBytes, Pid, counted};

/// Trace allocations and frees with their call stacks, and write a profile
///
/// By default every allocation and free is traced, at about 2 µs per malloc/free pair while the recording runs. If the process has an
/// emitter (`fragprof run`, or a library with otel_memory or ddheap probes), its samples are recorded instead, at a few nanoseconds per
/// call. In governed mode the target is slowed by no more than its budget: a process that allocates little is traced in full, any other in
/// windows at random times. If every given process has an emitter, governed mode records the samples too: they cost less, and give live
/// bytes. Read the profile with `fragprof report`.
///
/// If a command was started and failed, its exit status is passed on once the profile is written (not in governed mode).
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["pid", "command"])))]
#[command(after_help = examples(&[
    ("sudo fragprof record -p PID -d 30s", "Record a process for 30 seconds"),
    ("sudo fragprof record -o run.pb.gz -- CMD ARGS", "Record a command from its first allocation"),
    ("sudo fragprof record -p PID -d 2m --mode governed", "Record at a cost of at most 1 %"),
    ("fragprof record --in-process -- CMD ARGS", "Record every call of a command from inside, without root"),
    ("sudo fragprof record --in-process -p PID -d 30s", "The same of a process that runs (experimental)"),
]))]
pub struct RecordArgs {
    /// Process to record; can be given several times
    #[arg(short, long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// Length of the recording, such as 500ms, 10s or 2m [default: until Ctrl-C or the end of the processes]
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration)]
    pub duration: Option<Duration>,
    /// How to record [default: sampled if the process has an emitter, else exact]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Share of its running time that a process may lose in governed mode, such as 1% or 0.5%
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "1%")]
    pub budget: f64,
    /// In governed mode, do not track blocks above 1 KiB outside the windows
    #[arg(long, hide_short_help = true)]
    pub no_large_blocks: bool,
    /// Output file
    #[arg(short, long, value_name = "FILE", default_value = "fragprof.pb.gz")]
    pub output: PathBuf,
    /// Record by a library in the processes, instead of probes: every call with its stack, at a tenth of the price. It is preloaded into a
    /// command and its children, without root; a process that runs is made to load it, as by attach-sampler (experimental)
    #[arg(long, conflicts_with_all = ["mode", "probe_throwing", "native", "max_frames"])]
    pub in_process: bool,
    /// With --in-process and --pid: the library's path in the process's own root directory, for containers
    #[arg(long, value_name = "FILE", requires_all = ["in_process", "pid"], hide_short_help = true)]
    pub library: Option<PathBuf>,
    /// Record child processes too (always on for a command)
    #[arg(long)]
    pub children: bool,
    /// Frames to keep: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t, hide_short_help = true)]
    pub frames: Frames,
    /// Keep the frames of CPython's evaluation loop too, in whose place Python frames stand
    #[arg(long, hide_short_help = true)]
    pub native: bool,
    /// Frames of a stack to keep, counted from the allocator; deeper stacks are cut and say so [default: 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(FRAMES_DEEP_MAX)), hide_short_help = true)]
    pub max_frames: Option<u32>,
    /// At the end, scan the heap and split the rows [before attach] and [unattributed] by root, owner and type; takes about two seconds of
    /// CPU time per GiB
    #[arg(long)]
    pub owners: bool,
    /// Also write every event of the first recorded process into this file (docs/trace-format.md), in about two bytes per event
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Size in MiB at which the trace ends
    #[arg(long, value_name = "MIB", default_value_t = 4096, requires = "trace", hide_short_help = true)]
    pub trace_max: u64,
    /// Record the stacks of frees too
    #[arg(long)]
    pub free_stacks: bool,
    /// Record the objects of Python too, which its own allocator takes from arenas: each is a block of its own, at about 2 µs, which slows
    /// Python down several times. Running interpreters with profile-guided optimization cannot be recorded like that; a command can: a library
    /// is preloaded into it (LD_PRELOAD) that passes the interpreter's calls on
    #[arg(long, conflicts_with = "in_process")]
    pub python_objects: bool,
    /// On kernels before 6.13, also record operator new of jemalloc, tcmalloc and mimalloc: a std::bad_alloc thrown through it then ends
    /// the process instead of being caught
    #[arg(long, hide_short_help = true)]
    pub probe_throwing: bool,
    /// Size of the buffer between the kernel and fragprof, in KiB; a power of two
    #[arg(long, value_name = "KIB", value_parser = clap::value_parser!(u32).range(4..=(1 << 20)), hide_short_help = true)]
    pub buffer_kib: Option<u32>,
    /// Command to start and record, after --
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// How to record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Every allocation and free
    Exact,
    /// Samples from the process's own emitter (otel_memory or ddheap probes, as with `fragprof run`): live bytes by stack for a few
    /// nanoseconds per call
    Sampled,
    /// As much as the budget allows, in windows at random times; or the emitters' samples, if all processes have an emitter
    Governed,
}

/// Parses `1%` or `0.01` as a share.
fn parse_share(text: &str) -> Result<f64, String> {
    let (digits, unit) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 0.01));
    let value: f64 = digits.trim().parse().map_err(|_| format!("{text} is not a percentage such as 1%"))?;
    let share = value * unit;
    if (0.0001..=1.0).contains(&share) { Ok(share) } else { Err(format!("{text} is not between 0.01% and 100%")) }
}

/// Parses `10s`, `1.5m`, `500ms`, `1h`; a bare number is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_s = match &text[digits.len()..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        unit => return Err(format!("unknown unit {unit}: use ms, s, m, h or d")),
    };
    let value: f64 = digits.parse().map_err(|_| format!("{text} is not a time such as 10s"))?;
    let seconds = value * unit_s;
    if !(0.001..=1e7).contains(&seconds) {
        return Err(format!("{text} is not between 1ms and 2777h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Records.
///
/// # Errors
/// If a process cannot be watched or the profile not written.
pub fn run(args: &RecordArgs) -> anyhow::Result<()> {
    // Before anything is attached, because a recording that cannot be written would be lost.
    output::check_writable(&args.output)?;
    let waits = Arc::default();
    let stop = stop_flag_or_end_of(&waits)?;
    debug_information::look(Some(waits));
    for note in stopped(args) {
        say!("fragprof: {note}");
    }
    if args.python_objects && !matches!(args.mode, None | Some(Mode::Exact)) {
        let text = "--python-objects needs every call: it cannot be used with --mode sampled or governed";
        return Err(Failed::new(ExitStatus::Usage, text.to_owned()).into());
    }
    if args.trace.is_some() && !matches!(args.mode, None | Some(Mode::Exact)) {
        let text = "--trace needs every call: it cannot be used with --mode sampled or governed";
        return Err(Failed::new(ExitStatus::Usage, text.to_owned()).into());
    }
    if args.in_process {
        return super::record_inside::run(args, &stop);
    }
    if args.mode != Some(Mode::Governed) {
        return record(args, &stop);
    }
    if args.children || args.free_stacks || args.probe_throwing || args.owners {
        return Err(Failed::new(
            ExitStatus::Usage,
            "--children, --free-stacks, --probe-throwing and --owners cannot be used in governed mode".to_owned(),
        )
        .into());
    }
    let with: Vec<u32> = args.pid.iter().copied().filter(|&pid| has_emitter(Pid(pid))).collect();
    if !with.is_empty() && with.len() == args.pid.len() {
        say!("fragprof: no budget is needed: every process has an emitter, whose samples cost less and give live bytes");
        return record(args, &stop);
    }
    for pid in with {
        say!("fragprof: process {pid} has an emitter, whose samples cost less and give live bytes; record it by itself to use it");
    }
    governed(args, &stop)
}

/// Whether a process has an emitter. A process that cannot be read is reported when it is watched.
fn has_emitter(pid: Pid) -> bool {
    let found = Process::open(pid).ok().and_then(|process| Finder::new(Features::of_host().emulation()).find(&process).ok());
    found.is_some_and(|found| found.emitters.iter().any(Emitter::hears))
}

/// Fails if objects of Python were asked for and those of a process cannot be recorded.
fn check_objects(args: &RecordArgs) -> anyhow::Result<()> {
    let mut planner = Planner::new(Features::of_host().emulation()).with_python_objects(true);
    for &pid in &args.pid {
        // A process that cannot be watched is reported when it is to be.
        let Some(plan) = Process::open(Pid(pid)).ok().and_then(|process| planner.plan(&process).ok()) else { continue };
        if !plan.has_objects() {
            let reason = if plan.notes.is_empty() { NO_OBJECTS.to_owned() } else { plan.notes.join("; ") };
            return Err(Failed::new(ExitStatus::Target, format!("process {pid}: {reason}")).into());
        }
    }
    Ok(())
}

/// Why there is no object of Python.
const NO_OBJECTS: &str = "no object of Python is recorded: there is no object allocator of CPython 3.8 or later whose calls can be probed";

/// Creates the trace's file before anything is attached.
pub(super) fn create_trace(path: &Path, mib_max: u64) -> anyhow::Result<SharedTrace> {
    let file = std::fs::File::create(path)
        .map_err(|error| Failed::new(ExitStatus::Usage, format!("cannot write the trace {}: {error}", path.display())))?;
    Ok(Arc::new(Trace::new(file, mib_max.saturating_mul(1 << 20))))
}

impl RecordArgs {
    /// Whether the evaluation loop's frames are kept: native frames alone are not complete without.
    fn keeps_native(&self) -> bool {
        self.native || self.frames == Frames::Native
    }
}

/// Records an emitter's samples, or every call.
fn record(args: &RecordArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    if args.python_objects {
        check_objects(args)?;
    }
    let trace = args.trace.as_deref().map(|path| create_trace(path, args.trace_max)).transpose()?;
    let options = Options {
        trace,
        follow_children: args.children || !args.command.is_empty(),
        free_stacks: args.free_stacks,
        probe_throwing: args.probe_throwing,
        python_objects: args.python_objects,
        ring_bytes: args.buffer_kib.map(|kib| kib << 10),
        censuses: true,
        owners: args.owners,
        native_frames: args.keeps_native(),
        frames_max: args.max_frames,
        source: match args.mode {
            None if args.trace.is_some() || args.python_objects => Choice::Functions,
            None => Choice::Best,
            Some(Mode::Exact) => Choice::Functions,
            Some(Mode::Sampled | Mode::Governed) => Choice::Emitter,
        },
        ..Options::default()
    };
    let waiting = progress::show(|| Said { what: "preparing: BPF programs, unwind tables, probes".into(), share: None });
    let mut recorder = Recorder::new(options).map_err(failed)?;
    start(args, &mut recorder)?;
    drop(waiting);

    let who = if args.command.is_empty() {
        format!("{} process{}", args.pid.len(), if args.pid.len() == 1 { "" } else { "es" })
    } else {
        args.command[0].to_string_lossy().into_owned()
    };
    let until = args.duration.map_or_else(|| "until Ctrl-C or its end".to_owned(), |d| format!("for {:.1} s", d.as_secs_f64()));
    say!("fragprof: recording {who} {until}");
    for words in recorder.source_words() {
        say!("fragprof: {words}");
    }
    // A started command has the terminal to itself.
    let shown = args.command.is_empty().then(|| recording(args.duration));
    while !stop.load(Ordering::Relaxed) {
        let left = args.duration.map_or(Duration::MAX, |d| d.saturating_sub(recorder.elapsed()));
        if left.is_zero() || !recorder.step(left.min(Duration::from_millis(100))) {
            break;
        }
    }
    drop(shown);
    let ended = recorder.command_status();
    let shown = progress::show(|| Said { what: "finishing: last census, function names".into(), share: None });
    let mut profile = recorder.finish().map_err(failed)?;
    drop(shown);
    profile.meta.notes.extend(stopped(args));
    let has_objects = |process: &meta::Process| process.allocators.iter().any(|name| name == Allocator::Pymalloc.name());
    if args.python_objects && !profile.meta.processes.iter().any(has_objects) {
        let has_reason = |note: &String| note.contains("no object of Python");
        if !profile.meta.notes.iter().any(has_reason) {
            profile.meta.notes.push(NO_OBJECTS.into());
        }
        profile.meta.notes.iter().filter(|note| has_reason(note)).for_each(|note| say!("fragprof: {note}"));
    }
    conclude(profile, args, &who, ended)
}

/// Writes the profile and says what is in it; passes on how the command failed.
pub(super) fn conclude(profile: Profile, args: &RecordArgs, who: &str, ended: Option<std::process::ExitStatus>) -> anyhow::Result<()> {
    debug_information::conclude();
    let profile = profile.with_frames(args.frames.into());
    write(&profile, &args.output)?;
    say!("{}", summary(&profile, args));
    match ended.filter(|status| !status.success()) {
        Some(status) => Err(Passed { text: format!("{who} ended with {status}"), code: shell_code(status) }.into()),
        None => Ok(()),
    }
}

/// Shows the progress of the recording.
fn recording(duration: Option<Duration>) -> Progress {
    let began = Instant::now();
    progress::show(move || {
        let share = duration.map(|duration| began.elapsed().as_secs_f64() / duration.as_secs_f64());
        Said { what: "recording".into(), share }
    })
}

/// The status of a command that failed by itself: it is passed on, as `time` and `perf record` do.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct Passed {
    text: String,
    /// The command's exit status, or 128 plus the signal number, as in a shell.
    pub code: u8,
}

fn shell_code(status: std::process::ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
}

/// Longest wait for a started command to have an allocator.
const ALLOCATOR_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait for unwind tables before the first window.
const TABLES_WITHIN: Duration = Duration::from_secs(5);

fn governed(args: &RecordArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    let options = GovernedOptions {
        budget: args.budget,
        ring_bytes: args.buffer_kib.map(|kib| kib << 10),
        large_blocks: !args.no_large_blocks,
        native_frames: args.keeps_native(),
        frames_max: args.max_frames,
        ..GovernedOptions::default()
    };
    let mut governed = Governed::new(options).map_err(failed)?;
    let mut command = None;
    if args.command.is_empty() {
        args.pid.iter().try_for_each(|pid| governed.watch(Pid(*pid), args.budget)).map_err(failed)?;
    } else {
        let mut start = std::process::Command::new(&args.command[0]);
        // SAFETY: between fork and exec only an async-signal-safe system call is made.
        unsafe { start.pre_exec(open_files::restore_in_child) };
        let child = start
            .args(&args.command[1..])
            .spawn()
            .map_err(|error| Failed::new(ExitStatus::Target, format!("cannot run {}: {error}", args.command[0].to_string_lossy())))?;
        let pid = Pid(child.id());
        command = Some(child);
        let deadline = Instant::now() + ALLOCATOR_WITHIN;
        // Its C library is mapped a moment after its start.
        while let Err(error) = governed.watch(pid, args.budget) {
            let ended = command.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None)));
            if ended || Instant::now() > deadline {
                return Err(failed(error));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let waiting = progress::show(|| Said { what: "reading unwind tables".into(), share: None });
    governed.wait_for_tables(TABLES_WITHIN);
    drop(waiting);
    governed.begin();
    let began = Instant::now();
    // The first probes are attached before the message says that it records.
    governed.step(Duration::ZERO);
    say!(
        "fragprof: recording under a budget of {}% {}",
        args.budget * 100.0,
        args.duration.map_or_else(|| "until Ctrl-C or the end of the processes".to_owned(), |d| format!("for {:.1} s", d.as_secs_f64()))
    );
    let shown = args.command.is_empty().then(|| recording(args.duration));
    while !stop.load(Ordering::Relaxed) {
        let left = args.duration.map_or(Duration::MAX, |d| d.saturating_sub(began.elapsed()));
        if left.is_zero() || !governed.step(left.min(Duration::from_millis(100))) {
            break;
        }
        if let Some(child) = &mut command {
            // Reaps the child, so that its end is noticed.
            let _ = child.try_wait();
        }
    }
    drop(shown);
    let mut profile = governed.finish();
    debug_information::conclude();
    profile.meta.notes.extend(stopped(args));
    let profile = profile.with_frames(args.frames.into());
    write(&profile, &args.output)?;
    say!("{}", governed_summary(&profile, args));
    Ok(())
}

fn governed_summary(profile: &Profile, args: &RecordArgs) -> String {
    let file = args.output.display();
    let mut text = String::new();
    for governed in &profile.meta.governed {
        text.push_str(&format!("fragprof: {}\n", crate::profile::text::governed(governed)));
        if let Some(large) = governed.large_blocks.as_ref().and_then(crate::profile::text::large_blocks) {
            text.push_str(&format!("fragprof: {large}\n"));
        }
    }
    for doubt in &profile.meta.doubts {
        text.push_str(&format!("fragprof: doubt: {doubt}\n"));
    }
    text.push_str(&format!("fragprof: wrote {file}; read it with: fragprof report {file}"));
    text
}

fn start(args: &RecordArgs, recorder: &mut Recorder) -> anyhow::Result<()> {
    if !args.command.is_empty() {
        return recorder.launch(&args.command).map_err(failed);
    }
    args.pid.iter().try_for_each(|pid| recorder.watch(Pid(*pid))).map_err(failed)?;
    if args.children { recorder.hold_children().map_err(failed) } else { Ok(()) }
}

/// The processes that are stopped: without a note, they would look as if they allocated nothing.
fn stopped(args: &RecordArgs) -> Vec<String> {
    let stands = |pid: &&u32| Process::open(Pid(**pid)).is_ok_and(|process| process.is_stopped());
    let says = |pid: &u32| {
        format!("process {pid} is stopped, by a signal or a debugger: it allocates nothing until it is resumed (`kill -CONT {pid}`)")
    };
    args.pid.iter().filter(stands).map(says).collect()
}

/// Writes the profile; if that fails, to another directory, because a recording cannot be repeated.
fn write(profile: &Profile, path: &Path) -> anyhow::Result<()> {
    let Err(error) = output::to_file(path, |out| pprof::write(profile, out)) else { return Ok(()) };
    let refused = error.context(format!("cannot write the profile to {}", path.display()));
    match keep(profile, path, &[std::env::temp_dir(), "/var/tmp".into(), "/dev/shm".into()]) {
        Some(kept) => Err(refused.context(format!("the recording is kept in {}: move it to a disk with enough space", kept.display()))),
        None => Err(refused.context("the recording is lost: there is no space for it there or in the directories for temporary files")),
    }
}

/// Writes the profile into the first directory where that succeeds.
fn keep(profile: &Profile, path: &Path, directories: &[PathBuf]) -> Option<PathBuf> {
    let mut name = OsString::from(format!("fragprof-{}-", std::process::id()));
    name.push(path.file_name().unwrap_or_default());
    let places = directories.iter().map(|directory| directory.join(&name));
    places.into_iter().find(|place| output::to_file(place, |out| pprof::write(profile, out)).is_ok())
}

fn summary(profile: &Profile, args: &RecordArgs) -> String {
    let totals = profile.totals();
    let file = args.output.display();
    let about = if profile.meta.mode.estimates() { "about " } else { "" };
    let mut text = format!(
        "fragprof: {:.1} s: {about}{} of {}, {} live in {}\n",
        profile.meta.duration_s,
        counted(totals.get(ValueKind::AllocObjects), "allocation"),
        HumanBytes(totals.get(ValueKind::AllocSpace)),
        HumanBytes(totals.get(ValueKind::InuseSpace)),
        counted(totals.get(ValueKind::InuseObjects), "block"),
    );
    for doubt in &profile.meta.doubts {
        text.push_str(&format!("fragprof: doubt: {}\n", terminal(doubt)));
    }
    text.push_str(&format!("fragprof: wrote {file}; read it with: fragprof report {file}"));
    text
}

/// A recorder's error with its exit status.
pub fn failed(error: session::Error) -> anyhow::Error {
    let status = match &error {
        session::Error::Capture(capture::Error::Load { .. }) | session::Error::EmittersUnsupported | session::Error::NoWindows { .. } => {
            ExitStatus::Unsupported
        }
        session::Error::Target(ProcessError::Denied { .. }) | session::Error::Plan(PlanError::Target(ProcessError::Denied { .. })) => {
            ExitStatus::Unsupported
        }
        session::Error::Target(_)
        | session::Error::Plan(_)
        | session::Error::Unfit(_)
        | session::Error::NotLoaded { .. }
        | session::Error::Attach(_)
        | session::Error::Launch(_)
        | session::Error::NoEmitter { .. }
        | session::Error::Capture(capture::Error::Attach { .. }) => ExitStatus::Target,
        session::Error::Capture(_) | session::Error::Library(_) | session::Error::Memory(_) => ExitStatus::Failure,
    };
    Failed::new(status, error.to_string()).into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_profile_that_cannot_be_written_is_kept_in_the_first_writable_directory() {
        let room = tempfile::tempdir().unwrap();
        let places = ["/proc/no-such-place".into(), room.path().to_path_buf()];
        let kept = keep(&Profile::default(), Path::new("/full/out.pb.gz"), &places).unwrap();
        assert!(kept.starts_with(room.path()) && kept.to_string_lossy().ends_with("-out.pb.gz"), "{}", kept.display());
        assert!(pprof::read(std::fs::File::open(&kept).unwrap()).is_ok());
        assert_eq!(keep(&Profile::default(), Path::new("out.pb.gz"), &places[..1]), None);
    }

    #[test]
    fn times_are_read_with_their_unit_and_nonsense_is_refused() {
        assert_eq!(parse_duration("10s").unwrap(), Duration::from_secs(10));
        assert_eq!(parse_duration("1.5m").unwrap(), Duration::from_secs(90));
        assert_eq!(parse_duration("250ms").unwrap(), Duration::from_millis(250));
        assert_eq!(parse_duration("3").unwrap(), Duration::from_secs(3));
        for bad in ["", "s", "-1s", "0s", "10y", "nan", "inf", "1e300h", "1ös"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }
}
