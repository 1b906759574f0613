//! One file a subcommand: argument parsing, then a call.

pub mod doctor;

use std::process::ExitCode;

/// Runs the command line and returns its exit status.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
