//! One file a subcommand: argument parsing, then a call.

use std::process::ExitCode;

/// Runs the command line and returns its exit status.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}
