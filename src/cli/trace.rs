//! `fragprof trace`: work on trace files.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::help::examples;
use super::output;
use crate::allocator::Allocator;
use crate::error::{ExitStatus, Failed};
use crate::sanitize::terminal;
use crate::trace::convert::{Converted, Options, convert};
use crate::units::{HumanBytes, counted};

/// Work on trace files
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Convert(ConvertArgs),
}

/// Convert another tool's file into a trace, for whatif and explain
///
/// Reads data files of heaptrack (raw or interpreted), the records of glibc's malloc tracer, workloads of its simulator (trace_run), and
/// the text of mtrace(3), also compressed with gzip or zstd. None of them has all that a trace has: what is missing is printed, and noted
/// in the trace.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("fragprof trace convert heaptrack.app.4242.zst -o app.fpt", "A data file of heaptrack"),
    ("fragprof whatif app.fpt", "Replay it under other allocators"),
]))]
pub struct ConvertArgs {
    /// The other tool's file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Trace to write
    #[arg(short, long, value_name = "TRACE")]
    output: PathBuf,
    /// Most MiB of the trace: it ends there
    #[arg(long, value_name = "MIB", default_value_t = 4096)]
    trace_max: u64,
}

/// Runs the command.
///
/// # Errors
/// If the file cannot be read or is not known, or the trace cannot be written.
pub fn run(args: &TraceArgs) -> anyhow::Result<()> {
    let What::Convert(args) = &args.what;
    let input = File::open(&args.file).map_err(|error| invalid(&args.file, &error.to_string()))?;
    let options = Options {
        bytes_max: args.trace_max.saturating_mul(1 << 20),
        allocator_of: |library| Allocator::of_library(library).map(Allocator::name),
    };
    let mut done = None;
    output::to_file(&args.output, |out| {
        let converted = convert(input, BufWriter::new(out), &options);
        // A file that is not understood must not leave an empty trace.
        let failed = converted.as_ref().err().map(|_| std::io::Error::other("nothing was written"));
        done = Some(converted);
        failed.map_or(Ok(()), Err)
    })
    .or_else(|error| if matches!(done, Some(Err(_))) { Ok(()) } else { Err(error) })?;
    match done {
        Some(Ok(converted)) => output::print(&summary(&args.output, &converted)),
        Some(Err(error)) => Err(invalid(&args.file, &error.to_string()).into()),
        None => Ok(()),
    }
}

fn invalid(path: &Path, reason: &str) -> Failed {
    Failed::new(ExitStatus::Usage, format!("cannot convert {}: {reason}", path.display()))
}

fn summary(path: &Path, converted: &Converted) -> String {
    let Converted { from, lacks, end, bytes, skipped } = converted;
    let mut text = format!(
        "{}: {} in {}, from {from}\nnot told by it: {}\n",
        terminal(&path.display().to_string()),
        counted(end.events, "event"),
        HumanBytes(*bytes),
        lacks.join("; ")
    );
    if *skipped > 0 {
        text.push_str(&format!("not understood, and left out: {}\n", counted(*skipped, "record")));
    }
    if !end.cut_short.is_empty() {
        text.push_str(&format!("the trace ends early: {}\n", end.cut_short));
    }
    text
}
