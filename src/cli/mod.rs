//! The command line: one file per subcommand, with its arguments and a call of what does the work.

pub mod agent;
mod attach_sampler;
mod audit;
pub mod bench;
mod bench_governed;
pub mod by;
pub mod census;
pub mod cpu_swap;
mod debug_information;
pub mod diff;
pub mod doctor;
pub mod explain;
mod explain_trace;
pub mod export;
pub mod flamegraph;
mod frames;
pub mod generate;
mod help;
pub mod leaks;
mod log;
pub mod output;
pub mod owners;
pub mod past;
mod progress;
pub mod reachability;
mod record;
mod record_inside;
mod replaying;
pub mod report;
pub mod run;
mod runtime_parts;
mod sampler;
mod saved;
pub mod sites;
mod stop;
pub mod top;
mod top_cluster;
pub mod trace;
pub mod trim;
mod values;
pub mod whatif;
mod whatif_json;
mod whatif_page;
mod whatif_text;

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

use self::output::say;
use crate::error::{ExitStatus, Failed};
use crate::sanitize;

/// Show where the memory of running processes is: live, free but held, trimmable and pinned bytes, by call stack
#[derive(Debug, Parser)]
#[command(version, after_help = help::examples(&[
    ("sudo fragprof census PID", "Where the heap's bytes are"),
    ("sudo fragprof explain PID", "What is wrong with them, and what would help"),
    ("sudo fragprof record -p PID -d 30s", "Record every allocation and free, with stacks"),
    ("fragprof report fragprof.pb.gz --by pinned", "Stacks that keep free memory from being returned"),
    ("fragprof top", "All processes, live"),
]))]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Census(census::CensusArgs),
    Explain(explain::ExplainArgs),
    Leaks(leaks::LeaksArgs),
    Owners(owners::OwnersArgs),
    Trim(trim::TrimArgs),
    Top(top::TopArgs),
    Record(record::RecordArgs),
    Run(run::RunArgs),
    Sampler(sampler::SamplerArgs),
    AttachSampler(attach_sampler::AttachSamplerArgs),
    Report(report::ReportArgs),
    Flamegraph(flamegraph::FlamegraphArgs),
    Export(export::ExportArgs),
    Diff(diff::DiffArgs),
    Whatif(whatif::WhatifArgs),
    Trace(trace::TraceArgs),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    Agent(agent::AgentArgs),
    Completions(generate::CompletionsArgs),
    Man(generate::ManArgs),
    Schema(generate::SchemaArgs),
    Sites(sites::SitesArgs),
}

/// Runs the command line and returns its exit status.
pub fn main() -> ExitCode {
    logging();
    let matches = help::with_developer_commands_apart(Cli::command()).get_matches();
    let command = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()).command;
    let done = match command {
        Command::Census(args) => census::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Leaks(args) => leaks::run(&args),
        Command::Owners(args) => owners::run(&args),
        Command::Trim(args) => trim::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Record(args) => record::run(&args),
        Command::Run(args) => run::run(&args),
        Command::Sampler(args) => sampler::run(&args),
        Command::AttachSampler(args) => attach_sampler::run(&args),
        Command::Report(args) => report::run(&args),
        Command::Flamegraph(args) => flamegraph::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Diff(args) => diff::run(&args),
        Command::Whatif(args) => whatif::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Agent(args) => agent::run(&args),
        Command::Completions(args) => generate::completions(&args),
        Command::Man(args) => generate::man(&args),
        Command::Schema(args) => generate::schema(&args),
        Command::Sites(args) => sites::run(&args),
        Command::Doctor(args) => output::unless_closed(doctor::run(&args, &crate::capture::features(), &mut std::io::stdout().lock())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say!("fragprof: {}", sanitize::lines(&sentence(&error)));
            if let Some(passed) = error.downcast_ref::<record::Passed>() {
                return ExitCode::from(passed.code);
            }
            let status = error.downcast_ref::<Failed>().map_or(ExitStatus::Failure, |failed| failed.status);
            ExitCode::from(status as u8)
        }
    }
}

/// An error with its causes, without those that it names itself.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Log lines go to standard error: warnings by default, more with `FRAGPROF_LOG=debug`. In colours on a terminal, unless `NO_COLOR` is set
/// (no-color.org); never into files and journals.
fn logging() {
    let colour = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let filter = tracing_subscriber::EnvFilter::try_from_env("FRAGPROF_LOG").unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // Lines that account for an action are no warnings, but are never left out.
    let filter = match crate::inject::audit::TARGET_SHOWN.parse() {
        Ok(always) => filter.add_directive(always),
        Err(_) => filter,
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(colour)
        .with_writer(log::LogWriter)
        .without_time()
        .with_target(false)
        .init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("cannot read {path}: {source}")]
    struct Unreadable {
        path: &'static str,
        source: std::io::Error,
    }

    #[test]
    fn a_cause_that_an_error_names_itself_is_not_named_again() {
        let unreadable = || Unreadable { path: "/a", source: std::io::Error::other("is gone") };
        assert_eq!(sentence(&unreadable().into()), "cannot read /a: is gone");
        assert_eq!(sentence(&anyhow::Error::from(unreadable()).context("no sites")), "no sites: cannot read /a: is gone");
        assert_eq!(sentence(&anyhow::Error::from(std::io::Error::other("is gone")).context("no sites")), "no sites: is gone");
    }
}
