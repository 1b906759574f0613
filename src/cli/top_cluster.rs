//! `fragprof top --prometheus`: the workloads of a cluster.

use std::io::{self, IsTerminal as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::output;
use crate::client::{ClientError, Server};
use crate::error::{ExitStatus, Failed};
use crate::tui::cluster::{self, ClusterView};

/// Shortest time between two queries: recorded series change once a minute.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Rows of a terminal whose size is not known.
const ROWS: usize = 40;
/// How often the stop flag is checked.
const STEP: Duration = Duration::from_millis(50);

/// Asks the server, and prints the table: once, or again and again until `stop`.
///
/// # Errors
/// If the server does not answer as a Prometheus does, or the output cannot be written.
pub fn run(server: &Server, once: bool, json: bool, interval: Duration, stop: &AtomicBool) -> anyhow::Result<()> {
    let is_screen = io::stdout().is_terminal() && !once && !json;
    while !stop.load(Ordering::Relaxed) {
        let view = ask(server).map_err(|error| Failed::new(ExitStatus::Target, format!("{}: {error}", server.address().url())))?;
        let text = if json {
            serde_json::to_string(&view)? + "\n"
        } else if is_screen {
            // Heads, notes and the cursor's own line.
            let rows = crossterm::terminal::size().map_or(ROWS, |(_, rows)| usize::from(rows)).saturating_sub(4);
            format!("\x1b[H\x1b[2J{}", cluster::page(&view, rows))
        } else {
            cluster::page(&view, usize::MAX)
        };
        output::print(&text)?;
        if once {
            break;
        }
        let next = Instant::now() + interval.max(INTERVAL_MIN);
        while Instant::now() < next && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(STEP);
        }
    }
    Ok(())
}

/// Recorded series if there are any, else the agents' own.
fn ask(server: &Server) -> Result<ClusterView, String> {
    let query = |query: &str, recorded| {
        let body = server.get(&cluster::path(query)).map_err(|error| match error {
            // Prometheus explains a refused query in its usual form.
            ClientError::Status { ref message, .. } => cluster::refusal(message.as_bytes()).unwrap_or_else(|| error.to_string()),
            error => error.to_string(),
        })?;
        cluster::read(&body, recorded)
    };
    let recorded = query(cluster::RECORDED, true)?;
    if recorded.workloads.is_empty() { query(&cluster::unrecorded(), false) } else { Ok(recorded) }
}
