//! `fragprof export`: a profile in another format, or the agent's history as tables.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use clap::ValueEnum;

use super::by::By;
use super::frames::Frames;
use super::help::examples;
use super::{flamegraph, output, past, report};
use crate::error::{ExitStatus, Failed};
use crate::model::view::unix_s;
use crate::profile::{folded, json, pprof};
use crate::store::export::{self, ExportError, Table};

/// Convert a profile to another format, or write the agent's history as tables for SQL
#[derive(Debug, clap::Args)]
#[command(after_help = examples(&[
    ("fragprof export fragprof.pb.gz --format folded", "Folded stacks on standard output"),
    ("fragprof export fragprof.pb.gz --format json -o all.json", "Everything, as JSON"),
    ("fragprof export --history --format parquet --since 7d -o week", "The agent's history of a week: ladder, stacks and events"),
]))]
pub struct ExportArgs {
    /// Profile file (gzipped pprof)
    #[arg(required_unless_present = "history")]
    pub file: Option<PathBuf>,
    /// The agent's history, in this directory, with --format parquet [default: /var/lib/fragprof]
    #[arg(long, value_name = "DIRECTORY", num_args = 0..=1, default_missing_value = past::DEFAULT_DIRECTORY, conflicts_with_all = ["file", "by"])]
    pub history: Option<PathBuf>,
    /// Start of the history that is written: an age such as 12h or 7d, or @SECONDS since 1970
    #[arg(long, value_name = "TIME", value_parser = past::parse_time, default_value = "7d", requires = "history")]
    pub since: f64,
    /// Output format
    #[arg(long, value_enum)]
    pub format: Format,
    /// Value for folded and svg, and the order of json [default: the first of live, survivors, allocated that the file has]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Frames to show: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t)]
    pub frames: Frames,
    /// Output file [default: standard output]; with --history the directory of the files, which is created [default: fragprof-history]
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
    /// Tables for SQL, of the history
    Parquet,
}

/// Runs the command.
///
/// # Errors
/// If the file is not a heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &ExportArgs) -> anyhow::Result<()> {
    let Some(file) = &args.file else { return history(args) };
    if args.format == Format::Parquet {
        return Err(Failed::new(ExitStatus::Usage, "parquet is the format of --history; a profile has pprof, folded, svg and json").into());
    }
    let profile = report::load(file)?.with_frames(args.frames.into());
    let mut bytes = Vec::new();
    if args.format == Format::Pprof {
        pprof::write(&profile, &mut bytes)?;
    } else {
        let view = By::view(args.by, &[(&profile, file)])?;
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

/// Where the tables go if no directory is given.
const TABLES: &str = "fragprof-history";

/// Writes the history's tables.
fn history(args: &ExportArgs) -> anyhow::Result<()> {
    if args.format != Format::Parquet {
        return Err(Failed::new(ExitStatus::Usage, "--history is written with --format parquet").into());
    }
    let reader = past::open(args.history.as_deref())?;
    let directory = args.output.as_deref().unwrap_or(Path::new(TABLES));
    std::fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let span = (args.since, unix_s(SystemTime::now()));
    let name = rustix::system::uname();
    let node = name.nodename().to_string_lossy();
    for table in Table::ALL {
        let path = directory.join(format!("{}.parquet", table.name()));
        let (mut written, mut of_store) = (None, None);
        let done = output::to_file(&path, |out| match export::write(&reader, table, span, &node, out) {
            Ok(done) => {
                written = Some(done);
                Ok(())
            }
            Err(ExportError::Output(error)) => Err(error),
            Err(ExportError::Store(error)) => {
                let text = error.to_string();
                of_store = Some(error);
                Err(io::Error::other(text))
            }
        });
        if let Some(error) = of_store {
            return Err(error.into());
        }
        done?;
        let written = written.unwrap_or_default();
        let damaged = if written.damaged > 0 { format!(", {} damaged ones left out", written.damaged) } else { String::new() };
        output::print(&format!("{}: {} rows{damaged}\n", path.display(), written.rows))?;
    }
    Ok(())
}
