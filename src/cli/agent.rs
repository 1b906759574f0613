//! `fragprof agent`: the daemon.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;

use super::output;
use crate::agent::Config;
use crate::agent::config::ConfigError;
use crate::daemon::AgentError;
use crate::error::{ExitStatus, Failed};

/// Watch the processes of this machine and serve what it finds: /metrics, health, API
#[derive(Debug, Args)]
pub struct AgentArgs {
    /// Configuration; without it /etc/fragprof/agent.toml, if it is there
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only say whether the configuration is usable
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
            .and_then(|config| config.token().and(config.push_token()))
            .map_err(AgentError::Config)
            .map_err(|error| failed(&error))?;
        return output::print("the configuration is usable\n");
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
