//! `fragprof explain`: what is wrong with a process's memory, and what would help.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::census::{failed, open, reading};
use super::record::parse_duration;
use super::{output, progress, report};
use crate::census::{Level, Options, Pace, Places, take};
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::recorded;
use crate::fragmentation::verdict::{Change, Source, Verdict, judge};
use crate::probe::emitter::Finder;
use crate::probe::features::Features;
use crate::profile::sanitize::terminal;
use crate::target::Process;
use crate::target::container::{CgroupMemory, Container, Hierarchies, Surroundings};
use crate::units::{HumanBytes, Pid, counted};

/// Parts of what is not malloc's that are listed from so many bytes on.
const PART_BYTES_MIN: u64 = 1 << 20;

/// Say what is wrong with a process's memory, with the evidence, and what would help
///
/// Of a process it takes a census of everything resident, and with --over two of them. Of a profile it judges the heap at the end of the
/// recording, its growth since the start, and names the stacks.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Process id, or profile file (gzipped pprof)
    #[arg(value_name = "PID|FILE")]
    pub what: PathBuf,
    /// Look twice, this long apart (such as 30s), to see whether live bytes grow
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub over: Option<Duration>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Judges a process or a profile.
///
/// # Errors
/// If the process or the file cannot be read, or the output cannot be written.
pub fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    match args.what.to_str().and_then(|text| text.parse().ok()) {
        Some(pid) => of_process(args, pid),
        None => of_profile(args),
    }
}

fn of_profile(args: &ExplainArgs) -> anyhow::Result<()> {
    let usage = |text: String| Failed::new(ExitStatus::Usage, text);
    let file = args.what.display();
    if args.over.is_some() {
        return Err(usage(format!("--over needs a process: {file} is a file, whose recording has its own start and end")).into());
    }
    let profile = report::load(&args.what)?;
    let (process, verdict) = recorded::judge(&profile).ok_or_else(|| usage(format!("{file} does not say of which process it is")))?;
    print(args, &process.comm, process.pid, &verdict, &Surroundings::default())
}

/// Takes one census, or two, and judges.
fn of_process(args: &ExplainArgs, pid: u32) -> anyhow::Result<()> {
    let memory = open(pid)?;
    let comm = memory.process().comm().to_owned();
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: true };
    let mut places = Places::default();
    let shown = progress::show(reading());
    let started = Instant::now();
    let first = take(&memory, pid, &comm, options, &mut places).map_err(failed)?.census;
    let (census, change) = match args.over {
        Some(time) => {
            tracing::debug!("first look at process {pid} done, the next in {:.1} s", time.as_secs_f64());
            std::thread::sleep(time);
            let second = take(&memory, pid, &comm, options, &mut places).map_err(failed)?.census;
            let change = Change::between(&first, &second, started.elapsed().as_secs_f64());
            (second, change)
        }
        None => (first, None),
    };
    drop(shown);
    if !memory.process().is_alive() {
        return Err(Failed::new(ExitStatus::Target, format!("process {pid} ended while it was looked at")).into());
    }
    let surroundings = Surroundings::of(Pid(pid), &Hierarchies::find());
    let mut verdict = judge(&census, change);
    verdict.sources.push(Source::new("stacks", stacks_of(memory.process())));
    print(args, &comm, pid, &verdict, &surroundings)
}

/// Where live bytes by stack would come from, of a process that is only looked at.
fn stacks_of(process: &Process) -> String {
    let found = Finder::new(Features::of_host().emulation()).find(process).unwrap_or_default();
    let emitter = found.emitters.iter().find(|emitter| emitter.hears());
    emitter.map_or_else(
        || "none: a census knows no stacks, and the process has no emitter; fragprof record traces every call".to_owned(),
        |emitter| {
            let every = emitter.stats.map_or_else(String::new, |stats| format!(", one sample in {}", stats.distance()));
            format!("none here: a census knows no stacks; the agent and fragprof record have them from {}{every}", emitter.describe())
        },
    )
}

fn print(args: &ExplainArgs, comm: &str, pid: u32, verdict: &Verdict, surroundings: &Surroundings) -> anyhow::Result<()> {
    output::to_stdout(|out| match args.json {
        true => write_json(out, verdict, surroundings),
        false => write_text(out, comm, pid, verdict, surroundings),
    })
}

/// The verdict, and the surroundings beside it.
#[derive(Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    verdict: &'a Verdict,
    container: Option<&'a Container>,
    cgroup_memory: Option<&'a CgroupMemory>,
}

fn write_json(out: &mut dyn Write, verdict: &Verdict, surroundings: &Surroundings) -> io::Result<()> {
    let page = Page { verdict, container: surroundings.container.as_deref(), cgroup_memory: surroundings.memory.as_ref() };
    serde_json::to_writer_pretty(&mut *out, &page)?;
    writeln!(out)
}

fn write_text(out: &mut dyn Write, comm: &str, pid: u32, verdict: &Verdict, surroundings: &Surroundings) -> io::Result<()> {
    let name = serde_json::to_value(verdict.verdict)?;
    let confidence = serde_json::to_value(verdict.confidence)?;
    writeln!(
        out,
        "{} (pid {pid}): {} (confidence {})\n  {}",
        terminal(comm),
        name.as_str().unwrap_or_default(),
        confidence.as_str().unwrap_or_default(),
        verdict.summary
    )?;
    let ladder = &verdict.evidence.ladder;
    if let Some(container) = &surroundings.container {
        writeln!(out, "  in {}", terminal(&container.title()))?;
    }
    if let Some(sentence) = surroundings.sentence(ladder.live_bytes, ladder.trimmable_bytes) {
        writeln!(out, "  {sentence}")?;
    }
    let evidence = &verdict.evidence;
    let known = |bytes: u64| (bytes > 0).then_some(bytes);
    let steps = [
        ("resident", known(evidence.rss_bytes)),
        ("not malloc", known(evidence.not_malloc_bytes)),
        ("heap extent", Some(ladder.extent_bytes)),
        ("heap resident", Some(ladder.resident_bytes)),
        ("in use", ladder.live_bytes),
        ("in use, resident", ladder.live_resident_bytes),
        ("trimmable", ladder.trimmable_bytes),
        ("pinned", ladder.pinned_bytes),
        ("kept", ladder.kept_bytes),
        ("cached", ladder.cached_bytes),
        ("in huge pages", known(ladder.huge_bytes)),
    ];
    writeln!(out, "\n  evidence")?;
    for (name, bytes) in steps {
        if let Some(bytes) = bytes {
            writeln!(out, "    {name:<18} {:>10}", HumanBytes(bytes))?;
        }
    }
    for part in evidence.not_malloc.iter().filter(|part| part.resident_bytes >= PART_BYTES_MIN) {
        writeln!(out, "      {:<16} {:>10} in {}", part.kind, HumanBytes(part.resident_bytes), counted(part.mappings, "mapping"))?;
    }
    if let Some(change) = &evidence.change {
        let sign = |delta: i64| if delta < 0 { "−" } else { "+" };
        for (name, delta) in [("live, change", change.live_bytes_delta), ("resident, change", change.resident_bytes_delta)] {
            writeln!(
                out,
                "    {name:<18} {:>10} in {:.0} s",
                format!("{}{}", sign(delta), HumanBytes(delta.unsigned_abs())),
                change.seconds
            )?;
        }
    }
    if !verdict.remedies.is_empty() {
        writeln!(out, "\n  what would help")?;
    }
    for remedy in &verdict.remedies {
        let bytes = remedy.predicted_bytes.map_or(String::from("?"), |bytes| HumanBytes(bytes).to_string());
        writeln!(out, "    {bytes:>10}  {}\n                ({})", remedy.action, remedy.basis)?;
    }
    for unknown in &verdict.unknowns {
        writeln!(out, "  not known: {unknown}")?;
    }
    writeln!(out, "\n  where the numbers come from")?;
    for source in &verdict.sources {
        writeln!(out, "    {}: {}", terminal(&source.figures), terminal(&source.source))?;
    }
    Ok(())
}
