//! The pages in a real browser, compared with the API; the dashboards with a real Prometheus.

mod bench;
mod browser;
mod dashboards;
mod fleet;
mod hostile;
pub mod pictures;
mod prometheus;
mod screenshots;
mod views;

use std::path::PathBuf;

use serde_json::Value;

use crate::agent::daemon::Daemon;
use crate::support::process::wait_until;

/// The address of a page of this agent.
fn page(daemon: &Daemon, fragment: &str) -> String {
    format!("http://{}/{fragment}", daemon.address)
}

/// The API's response.
fn api(daemon: &Daemon, path: &str) -> Value {
    let answer = daemon.get(path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

/// Waits for a full census of each process and returns the API's list.
fn fully_measured(daemon: &Daemon, processes: usize) -> Value {
    let mut list = Value::Null;
    wait_until("a full census of each process", || {
        list = api(daemon, "/api/v1/processes");
        let all = list["processes"].as_array().unwrap();
        let full = |one: &&Value| one["heaps"].as_array().unwrap().iter().any(|heap| heap["pinned_bytes"].is_u64());
        all.iter().filter(full).count() == processes
    });
    list
}

/// Where screenshots are saved for inspection.
fn pictures() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("pages")
}
