//! `fragprof diff`: what changed between two profiles.

use std::path::{Path, PathBuf};

use super::by::By;
use super::help::examples;
use super::{output, past, report};
use crate::profile::diff::compare;
use crate::profile::{json, text};

/// Show what changed between two profiles, by stack, or between two times in the agent's history
#[derive(Debug, clap::Args)]
#[command(after_help = examples(&[
    ("fragprof diff before.pb.gz after.pb.gz", "What changed, by stack"),
    ("fragprof diff before.pb.gz after.pb.gz --by pinned", "The same of the pinned bytes"),
    ("fragprof diff --from 2h --to 1h -p PID", "Two times in the agent's history"),
]))]
pub struct DiffArgs {
    /// Older profile file
    #[arg(required_unless_present = "from")]
    pub old: Option<PathBuf>,
    /// Newer profile file
    #[arg(required_unless_present = "from")]
    pub new: Option<PathBuf>,
    /// Compare two times in the agent's history: the earlier one, as an age such as 2h, or as @SECONDS since 1970
    #[arg(long, value_name = "TIME", value_parser = past::parse_time, conflicts_with_all = ["old", "new"], requires = "pid")]
    pub from: Option<f64>,
    /// The later time, in the same form [default: now]
    #[arg(long, value_name = "TIME", value_parser = past::parse_time, requires = "from")]
    pub to: Option<f64>,
    /// The process of the history
    #[arg(short, long, value_name = "PID", requires = "from")]
    pub pid: Option<u32>,
    /// Directory of the agent's history [default: /var/lib/fragprof]
    #[arg(long, value_name = "DIRECTORY", requires = "from")]
    pub history: Option<PathBuf>,
    /// Value to compare [default: live, or what the file has: survivors, else allocated]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Stacks to show [default: 20, with --json all]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Callers to show per stack
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub callers: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// If a file is not a heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &DiffArgs) -> anyhow::Result<()> {
    if let Some((from, pid)) = args.from.zip(args.pid) {
        let to = args.to.map_or_else(|| past::parse_time("now"), Ok).map_err(anyhow::Error::msg)?;
        return past::diff(&past::open(args.history.as_deref())?, pid, from, to, args.by.unwrap_or(By::Live), args.json);
    }
    let nowhere = Path::new("");
    let (old_file, new_file) = (args.old.as_deref().unwrap_or(nowhere), args.new.as_deref().unwrap_or(nowhere));
    let (old, new) = (report::load(old_file)?, report::load(new_file)?);
    let view = By::view(args.by, &[(&old, old_file), (&new, new_file)])?;
    let diff = compare(&old, &new, view.kind);
    if args.json {
        return output::print(&json::diff_to_string(&diff, view.kind, args.top));
    }
    output::print(&text::diff(&old, &new, &diff, view, report::layout(args.top, args.callers)))
}
