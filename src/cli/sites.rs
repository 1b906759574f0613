//! `fragprof sites`: the size-selective sites of a build of glibc, as a line of the table that is shipped.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use super::output;
use crate::probe::large;

/// Run a build of glibc in a sandbox and print the places in it that only large blocks pass
#[derive(Debug, Args)]
pub struct SitesArgs {
    /// The C library, libc.so.6 of the build
    pub library: PathBuf,
    /// Its dynamic loader; ld-linux-x86-64.so.2 beside the library if not given
    #[arg(long)]
    pub loader: Option<PathBuf>,
}

/// Prints the line.
///
/// # Errors
/// If the library cannot be read or run, or the output cannot be written.
pub fn run(args: &SitesArgs) -> anyhow::Result<()> {
    let beside = || args.library.parent().map(|folder| folder.join("ld-linux-x86-64.so.2"));
    let loader =
        args.loader.clone().or_else(beside).context("the library has no folder in which its loader could be: name it with --loader")?;
    let line = large::try_anew(&args.library, &loader)?;
    output::to_stdout(|out| writeln!(out, "{line}"))
}
