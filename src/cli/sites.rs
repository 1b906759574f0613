//! `fragprof sites`: the size-selective sites of a build of glibc, as a line for the table that fragprof ships.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use super::help::examples;
use super::output;
use crate::selective;

/// Run a build of glibc in a sandbox and print the instructions that only large blocks reach
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof sites /lib/x86_64-linux-gnu/libc.so.6", "The line for this machine's glibc"),
]))]
pub struct SitesArgs {
    /// The build's C library, libc.so.6
    pub library: PathBuf,
    /// Its dynamic loader [default: ld-linux-x86-64.so.2 in the library's directory]
    #[arg(long)]
    pub loader: Option<PathBuf>,
}

/// Prints the line.
///
/// # Errors
/// If the library cannot be read or run, or the output cannot be written.
pub fn run(args: &SitesArgs) -> anyhow::Result<()> {
    let beside = || args.library.parent().map(|folder| folder.join("ld-linux-x86-64.so.2"));
    let loader = args.loader.clone().or_else(beside).context("the library's directory is not known: specify its loader with --loader")?;
    let line = selective::try_anew(&args.library, &loader)?;
    output::to_stdout(|out| writeln!(out, "{line}"))
}
