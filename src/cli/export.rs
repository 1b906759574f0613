//! `fragprof export`: a profile in another format.

use std::path::PathBuf;

use clap::ValueEnum;

use super::by::By;
use super::{flamegraph, output, report};
use crate::profile::{folded, json, pprof};

/// Write a profile in another format, to standard output unless -o is given
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Profile file (gzipped pprof)
    pub file: PathBuf,
    /// Format to write
    #[arg(long, value_enum)]
    pub format: Format,
    /// Value of folded and svg; order of json [default: live, or what the file has: survivors, else allocated]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Formats that a profile is exported to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Gzipped pprof, for go tool pprof, Pyroscope, Parca, speedscope
    Pprof,
    /// One line a stack, for flame-graph tools
    Folded,
    /// Flame graph
    Svg,
    /// Everything, as one JSON object
    Json,
}

/// Runs the command.
///
/// # Errors
/// If the file is no heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    let profile = report::load(&args.file)?;
    let mut bytes = Vec::new();
    if args.format == Format::Pprof {
        pprof::write(&profile, &mut bytes)?;
    } else {
        let view = By::view(args.by, &[(&profile, &args.file)])?;
        match args.format {
            Format::Folded => folded::write(&profile, view.kind, &mut bytes)?,
            Format::Svg => bytes = flamegraph::drawn(&profile, view)?,
            _ => bytes = json::to_string(&profile, view.kind, None).into_bytes(),
        }
    }
    match &args.output {
        Some(path) => output::to_file(path, |out| out.write_all(&bytes)),
        None => output::to_stdout(|out| out.write_all(&bytes)),
    }
}
