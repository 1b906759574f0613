//! `fragprof report`: a profile as text or JSON.

use std::path::{Path, PathBuf};

use super::by::By;
use super::frames::Frames;
use super::help::examples;
use super::{output, past, saved};
use crate::error::{ExitStatus, Failed};
use crate::profile::page::Layout;
use crate::profile::text;
use crate::profile::{Profile, json, pprof};

/// Show the call stacks of a profile, ranked by one of its values, or processes from the agent's history
#[derive(Debug, clap::Args)]
#[command(after_help = examples(&[
    ("fragprof report fragprof.pb.gz", "Live bytes by stack"),
    ("fragprof report fragprof.pb.gz --by pinned", "Stacks that keep free memory from being returned"),
    ("fragprof report fragprof.pb.gz --by pinned --trace app.fpt", "The same, with what would be saved without each"),
    ("fragprof report --since 2h", "All processes in the agent's history of two hours"),
    ("fragprof report --since 2h -p PID", "One of them over time"),
]))]
pub struct ReportArgs {
    /// Profile file (gzipped pprof)
    #[arg(required_unless_present = "since")]
    pub file: Option<PathBuf>,
    /// Show the agent's history since this time: an age such as 2h, or @SECONDS since 1970
    #[arg(long, value_name = "TIME", value_parser = past::parse_time, conflicts_with = "file")]
    pub since: Option<f64>,
    /// Show one process of the history over time [default: all processes]
    #[arg(short, long, value_name = "PID", requires = "since")]
    pub pid: Option<u32>,
    /// Directory of the agent's history [default: /var/lib/fragprof]
    #[arg(long, value_name = "DIRECTORY", requires = "since")]
    pub history: Option<PathBuf>,
    /// Value to rank stacks by [default: the first of live, survivors, allocated that the file has]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Frames to show: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t)]
    pub frames: Frames,
    /// Stacks to show [default: 20, with --json all]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Callers to show per stack
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub callers: usize,
    /// With --by pinned: replay this trace of the same recording without the blocks of each of the first stacks, and show what that saves
    #[arg(long, value_name = "TRACE", conflicts_with = "since")]
    pub trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Stacks shown when `--top` is not given.
const TOP_DEFAULT: usize = 20;

/// Runs the command.
///
/// # Errors
/// If the file is not a heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    if let Some(since) = args.since {
        return past::report(&past::open(args.history.as_deref())?, since, args.pid, args.json);
    }
    let file = args.file.as_deref().unwrap_or(Path::new(""));
    let profile = load(file)?.with_frames(args.frames.into());
    let view = By::view(args.by, &[(&profile, file)])?;
    let layout = layout(args.top, args.callers);
    let saved = match &args.trace {
        Some(_) if args.by != Some(By::Pinned) => {
            return Err(Failed::new(ExitStatus::Usage, "--trace shows what pinning stacks cost: it needs --by pinned").into());
        }
        Some(trace) => Some((saved::of(&profile, trace, (layout.top, layout.callers))?, trace)),
        None => None,
    };
    if args.json {
        let without = saved.map(|(saved, _)| serde_json::to_value(saved)).transpose()?;
        return output::print(&json::to_string_with(&profile, view.kind, args.top, without.as_ref()));
    }
    let column = saved.map(|(saved, trace)| saved.column(trace));
    output::print(&text::report_with(&profile, view, layout, column.as_ref()))
}

/// The layout for standard output.
pub(super) fn layout(top: Option<usize>, callers: usize) -> Layout {
    Layout { columns: output::columns(), colour: output::colour(), top: top.unwrap_or(TOP_DEFAULT), callers }
}

/// Reads a profile file.
///
/// # Errors
/// With exit status 2 and the path.
pub fn load(path: &Path) -> anyhow::Result<Profile> {
    Ok(pprof::read_file(path).map_err(|error| Failed::new(ExitStatus::Usage, format!("{}: {error}", path.display())))?)
}
