//! `fragprof flamegraph`: a profile as an SVG flame graph.

use std::io;
use std::path::PathBuf;

use super::by::By;
use super::frames::Frames;
use super::help::examples;
use super::{output, report};
use crate::error::{ExitStatus, Failed};
use crate::profile::Profile;
use crate::profile::svg::{self, SvgError};
use crate::profile::text::View;

/// Draw a flame graph of a profile as an SVG for the browser
#[derive(Debug, clap::Args)]
#[command(after_help = examples(&[
    ("fragprof flamegraph fragprof.pb.gz", "Write the live bytes by stack to fragprof.svg"),
    ("fragprof flamegraph fragprof.pb.gz --by pinned -o pinned.svg", "The same of the pinned bytes"),
]))]
pub struct FlamegraphArgs {
    /// Profile file (gzipped pprof)
    pub file: PathBuf,
    /// Value shown as width [default: the first of live, survivors, allocated that the file has]
    #[arg(long, value_enum)]
    pub by: Option<By>,
    /// Frames to show: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t)]
    pub frames: Frames,
    /// Output file
    #[arg(short, long, value_name = "FILE", default_value = "fragprof.svg")]
    pub output: PathBuf,
}

/// Runs the command.
///
/// # Errors
/// If the file is not a heap profile or has nothing to draw, or if the SVG cannot be written.
pub fn run(args: &FlamegraphArgs) -> anyhow::Result<()> {
    let profile = report::load(&args.file)?.with_frames(args.frames.into());
    let view = By::view(args.by, &[(&profile, &args.file)])?;
    let svg = drawn(&profile, view)?;
    output::to_file(&args.output, |out| out.write_all(&svg))?;
    output::print(&format!("{} of {} written to {}\n", view.words, args.file.display(), args.output.display()))
}

/// The SVG of a view.
///
/// # Errors
/// If no stack has a value: exit status 2.
pub(super) fn drawn(profile: &Profile, view: View) -> anyhow::Result<Vec<u8>> {
    let processes: Vec<String> =
        profile.meta.processes.iter().take(3).map(|process| format!("{} ({})", process.comm, process.pid)).collect();
    let of = if processes.is_empty() { String::new() } else { format!(" of {}", processes.join(", ")) };
    let more = if profile.meta.processes.len() > 3 { ", …" } else { "" };
    let title = format!("{}{of}{more}", view.words);
    let mut svg = Vec::new();
    match svg::write(profile, view.kind, &title, &mut svg) {
        Ok(()) => Ok(svg),
        Err(SvgError::Nothing(_)) => {
            Err(Failed::new(ExitStatus::Usage, format!("no stack has any {}: nothing to draw", view.words)).into())
        }
        Err(SvgError::Io(error)) => Err(io::Error::into(error)),
    }
}
