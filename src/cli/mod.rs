//! One file a subcommand: argument parsing, then a call.

pub mod by;
pub mod diff;
pub mod export;
pub mod flamegraph;
pub mod output;
pub mod report;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::{ExitStatus, Failed};

/// Finds out who holds a service's memory: live, free but held, trimmable and pinned bytes, by call stack
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Report(report::ReportArgs),
    Flamegraph(flamegraph::FlamegraphArgs),
    Export(export::ExportArgs),
    Diff(diff::DiffArgs),
}

/// Runs the command line and returns its exit status.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Report(args) => report::run(&args),
        Command::Flamegraph(args) => flamegraph::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Diff(args) => diff::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("fragprof: {error:#}");
            let status = error.downcast_ref::<Failed>().map_or(ExitStatus::Failure, |failed| failed.status);
            ExitCode::from(status as u8)
        }
    }
}
