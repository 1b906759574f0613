//! `fragprof explain`: what is wrong with a process's memory, and what would help.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use clap::Args;

use super::census::{failed, open};
use super::output;
use crate::census::{Level, Options, Pace, Places, take};
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::verdict::{Change, Verdict, judge};
use crate::units::HumanBytes;

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
    output::to_stdout(|out| if args.json { write_json(out, &verdict) } else { write_text(out, &comm, args.pid, &verdict) })
}

fn write_json(out: &mut dyn Write, verdict: &Verdict) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, verdict)?;
    writeln!(out)
}

fn write_text(out: &mut dyn Write, comm: &str, pid: u32, verdict: &Verdict) -> io::Result<()> {
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
