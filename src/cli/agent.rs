//! `fragprof agent`: the daemon.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::help::examples;
use super::output;
use crate::agent::Config;
use crate::agent::config::ConfigError;
use crate::agent::push::Destination;
use crate::daemon::AgentError;
use crate::error::{ExitStatus, Failed};

/// Run the agent: the census of every process on this machine, as pages, metrics, JSON and history
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof agent", "Serve pages and metrics at http://127.0.0.1:9746/"),
    ("fragprof agent --config agent.toml --check", "Check a configuration"),
]))]
pub struct AgentArgs {
    /// Configuration file [default: /etc/fragprof/agent.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Check the configuration and exit
    #[arg(long)]
    pub check: bool,
}

/// Runs the daemon until SIGTERM.
///
/// # Errors
/// If the configuration is not usable or the daemon cannot start.
pub fn run(args: &AgentArgs) -> anyhow::Result<()> {
    if args.check {
        Config::load(args.config.as_deref())
            // The push's files too, even if its url is not set yet.
            .and_then(|config| {
                config.token()?;
                config.push.access()?;
                config.symbols.authorities()?;
                Destination::open(&config.push)
            })
            .map_err(AgentError::Config)
            .map_err(|error| failed(&error))?;
        return output::print("the configuration is valid\n");
    }
    let said = |address| {
        // Whoever started it by hand wants the address; a closed standard output is no reason to stop.
        let _ = writeln!(std::io::stdout(), "fragprof agent: http://{address}/metrics");
    };
    Ok(crate::daemon::run(args.config.clone(), said).map_err(|error| failed(&error))?)
}

fn failed(error: &AgentError) -> Failed {
    let status = match error {
        AgentError::Config(ConfigError::Read { .. })
        | AgentError::Listen { .. }
        | AgentError::Socket { .. }
        | AgentError::History(_)
        | AgentError::System { .. }
        | AgentError::ThreadEnded(_) => ExitStatus::Failure,
        AgentError::Config(_) => ExitStatus::Usage,
    };
    Failed::new(status, error.to_string())
}
