//! `fragprof export`: a profile in another format.

use std::path::PathBuf;

use clap::ValueEnum;

use super::by::By;
use super::frames::Frames;
use super::help::examples;
use super::{flamegraph, output, report};
use crate::profile::{folded, json, pprof};

/// Convert a profile to another format
#[derive(Debug, clap::Args)]
#[command(after_help = examples(&[
    ("fragprof export fragprof.pb.gz --format folded", "Folded stacks on standard output"),
    ("fragprof export fragprof.pb.gz --format json -o all.json", "Everything, as JSON"),
]))]
pub struct ExportArgs {
    /// Profile file (gzipped pprof)
    pub file: PathBuf,
    /// Output format
    #[arg(long, value_enum)]
    pub format: Format,
    /// Value for folded and svg, and the order of json [default: the first of live, survivors, allocated that the file has]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Frames to show: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t)]
    pub frames: Frames,
    /// Output file [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Formats to which a profile can be exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Gzipped pprof, for go tool pprof, Pyroscope, Parca, speedscope
    Pprof,
    /// One line per stack, for flame-graph tools
    Folded,
    /// Flame graph
    Svg,
    /// Everything, as one JSON object
    Json,
}

/// Runs the command.
///
/// # Errors
/// If the file is not a heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    let profile = report::load(&args.file)?.with_frames(args.frames.into());
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
