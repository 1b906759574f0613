//! `fragprof explain`: what is wrong with a process's memory, and what would help.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::census::{failed, open};
use super::output;
use crate::census::{Level, Options, Pace, Places, take};
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::verdict::{Change, Verdict, judge};
use crate::profile::sanitize::terminal;
use crate::target::container::{CgroupMemory, Container, Hierarchies, Surroundings};
use crate::units::{HumanBytes, Pid};

/// Says what is wrong with a process's memory, with the evidence, and what would help
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The process.
    pub pid: u32,
    /// Look twice, this many seconds apart, to see whether live bytes grow.
    #[arg(long, value_name = "SECONDS")]
    pub over: Option<u64>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Takes one census, or two, and judges.
///
/// # Errors
/// If the process cannot be read, or the output cannot be written.
pub fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    let memory = open(args.pid)?;
    let comm = memory.process().comm().to_owned();
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: true };
    let mut places = Places::default();
    let started = Instant::now();
    let first = take(&memory, args.pid, &comm, options, &mut places).map_err(failed)?.census;
    let (census, change) = match args.over {
        Some(seconds) => {
            std::thread::sleep(Duration::from_secs(seconds));
            let second = take(&memory, args.pid, &comm, options, &mut places).map_err(failed)?.census;
            let change = Change::between(&first, &second, started.elapsed().as_secs_f64());
            (second, change)
        }
        None => (first, None),
    };
    if !memory.process().is_alive() {
        return Err(Failed::new(ExitStatus::Target, format!("process {} ended while it was looked at", args.pid)).into());
    }
    let verdict = judge(&census, change);
    let surroundings = Surroundings::of(Pid(args.pid), &Hierarchies::find());
    output::to_stdout(|out| match args.json {
        true => write_json(out, &verdict, &surroundings),
        false => write_text(out, &comm, args.pid, &verdict, &surroundings),
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
        "{comm} (pid {pid}): {} (confidence {})\n  {}",
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
    let steps = [
        ("resident", Some(verdict.evidence.rss_bytes)),
        ("not malloc", Some(verdict.evidence.not_malloc_bytes)),
        ("heap extent", Some(ladder.extent_bytes)),
        ("heap resident", Some(ladder.resident_bytes)),
        ("live", ladder.live_bytes),
        ("trimmable", ladder.trimmable_bytes),
        ("pinned", ladder.pinned_bytes),
        ("kept", ladder.kept_bytes),
        ("cached", ladder.cached_bytes),
    ];
    writeln!(out, "\n  evidence")?;
    for (name, bytes) in steps {
        if let Some(bytes) = bytes {
            writeln!(out, "    {name:<16} {:>10}", HumanBytes(bytes))?;
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
    Ok(())
}
