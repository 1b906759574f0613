//! `fragprof run`: starts a program with the in-process sampler.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use clap::{ArgGroup, Args};

use super::help::examples;
use super::output::say;
use crate::error::{ExitStatus, Failed};
use crate::sampler::fit::{self, Unfit};
use crate::sampler::{
    SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN, SAMPLE_BYTES_VARIABLE, SAMPLES_PER_SECOND_MAX, SAMPLES_PER_SECOND_VARIABLE, library,
};

/// Start a program with the in-process sampler
///
/// The sampler is a library that the dynamic linker preloads (LD_PRELOAD). It samples the program's allocations in proportion to their
/// bytes, and reports the samples and their frees through the probes otel_memory:alloc and otel_memory:free, to which `fragprof record`,
/// `agent` and other profilers attach. Until one does, a malloc/free pair costs about a nanosecond more. The program replaces the fragprof
/// process: pid, signals and exit status are the program's own. Its children inherit the sampler.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("what").required(true).args(["install", "command"])))]
#[command(after_help = examples(&[
    ("fragprof run -- CMD ARGS", "Start a command with the sampler"),
    ("fragprof run --sample-bytes 65536 -- CMD ARGS", "Sample more densely"),
    ("fragprof run --install /usr/lib/fragprof", "Write the libraries, for a container image"),
]))]
pub struct RunArgs {
    /// Mean distance between samples, in allocated bytes [default: FRAGPROF_SAMPLE_BYTES, or 524288]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(SAMPLE_BYTES_MIN..=SAMPLE_BYTES_MAX))]
    pub sample_bytes: Option<u64>,
    /// Samples per second, on a CPU or in a thread, above which the distance grows; 0 = no limit [default: FRAGPROF_SAMPLES_PER_SECOND,
    /// or 250]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=SAMPLES_PER_SECOND_MAX))]
    pub samples_per_second: Option<u64>,
    /// Write the sampler's libraries into this directory and exit, for container images and for LD_PRELOAD by hand
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["sample_bytes", "samples_per_second"])]
    pub install: Option<PathBuf>,
    /// Command to start, after --
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Starts the program in place of this one.
///
/// # Errors
/// If the program cannot run with the sampler, or the library cannot be written anywhere, or the program cannot be started.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    if let Some(folder) = &args.install {
        for path in library::install(folder)? {
            println!("{}", path.display());
        }
        return Ok(());
    }
    let fit = fit::examine(&args.command).map_err(|unfit| match unfit {
        Unfit::Damaged { .. } | Unfit::Read { .. } => anyhow::Error::from(unfit),
        _ => Failed::new(ExitStatus::Target, unfit.to_string()).into(),
    })?;
    for doubt in &fit.doubts {
        say!("fragprof: {doubt}");
    }
    let path = library::place(fit.flavour)?;
    let mut command = Command::new(args.command.first().context("no command is given")?);
    command.args(args.command.iter().skip(1)).env("LD_PRELOAD", library::preload(&path, std::env::var_os("LD_PRELOAD").as_deref()));
    if let Some(bytes) = args.sample_bytes {
        command.env(SAMPLE_BYTES_VARIABLE, bytes.to_string());
    }
    if let Some(samples) = args.samples_per_second {
        command.env(SAMPLES_PER_SECOND_VARIABLE, samples.to_string());
    }
    let error = command.exec();
    Err(Failed::new(ExitStatus::Target, format!("cannot run {}: {error}", args.command[0].to_string_lossy())).into())
}
