//! `fragprof diff`: what changed between two profiles.

use std::path::PathBuf;

use super::by::By;
use super::{output, report};
use crate::profile::diff::compare;
use crate::profile::{json, text};

/// Show what changed between two profiles, stack by stack
#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    /// Older profile file
    pub old: PathBuf,
    /// Newer profile file
    pub new: PathBuf,
    /// Value to compare
    #[arg(long, value_enum, default_value_t = By::Live)]
    pub by: By,
    /// Stacks to show [default: 20, with --json all]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Callers to show of each stack
    #[arg(long, value_name = "N", default_value_t = 12)]
    pub callers: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
///
/// # Errors
/// If a file is no heap profile or does not have the value, or if the output cannot be written.
pub fn run(args: &DiffArgs) -> anyhow::Result<()> {
    let (old, new) = (report::load(&args.old)?, report::load(&args.new)?);
    let view = args.by.measured_in(&[(&old, &args.old), (&new, &args.new)])?;
    let diff = compare(&old, &new, view.kind);
    if args.json {
        return output::print(&json::diff_to_string(&diff, view.kind, args.top));
    }
    output::print(&text::diff(&old, &new, &diff, view, report::layout(args.top, args.callers)))
}
