//! The agent scans for blocks without pointers if configured, and every surface shows the findings.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use super::command::Waiting;
use super::target::build;
use crate::agent::daemon::{Daemon, value, watching};
use crate::emitter::programs::sampled;
use crate::support::process::wait_until;

#[test]
fn the_agent_reports_blocks_without_pointers_in_metrics_api_profile_and_history() {
    let target = Waiting::start(Command::new(build("g++", "types.cpp", &["-s"], "told")));
    let pid = target.pid();
    let off = Daemon::start(&watching(&["leaks-told"], ""));
    let on = "[leaks]\nenabled = true\nlooks = 2\nlook_interval_s = 1\ncpu_percent = 100.0\n[history]\nsample_interval_s = 1\nprofile_interval_s = 1";
    let daemon = Daemon::start(&watching(&["leaks-told"], on));
    let label = format!("pid=\"{pid}\"");
    let text = daemon.metrics_with("fragprof_process_unreached_bytes", &label);
    assert_eq!(value(&text, "fragprof_leaks_enabled", ""), Some(1.0));
    assert_eq!(value(&text, "fragprof_leaks_looked_total", "result=\"done\""), Some(1.0));
    let told = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["leaks", &pid, "--json", "--looks", "2"]).output().unwrap();
    let told: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!(value(&text, "fragprof_process_unreached_bytes", &label), told["unreached_bytes"].as_f64());
    assert_eq!(value(&text, "fragprof_process_unreached_blocks", &label), told["unreached_blocks"].as_f64());

    let json = |path: &str| serde_json::from_str::<Value>(&daemon.get(path).body).unwrap_or_default();
    let path = format!("/api/v1/processes/{pid}");
    wait_until("the process's view has it", || json(&path)["unreached"]["bytes"] == told["unreached_bytes"]);
    assert!(json(&path)["unreached"]["summary"].as_str().unwrap().starts_with("No pointer to "), "{}", json(&path)["unreached"]);
    let profile = json(&format!("{path}/profile?by=unreached&format=stacks"));
    assert!(profile["stacks"].to_string().contains("cache::ImageEntry"), "{profile:#}");
    // Nothing is scanned if it is not configured.
    let text = off.metrics();
    assert_eq!(value(&text, "fragprof_leaks_enabled", ""), Some(0.0));
    assert_eq!(value(&text, "fragprof_leaks_looked_total", "result=\"done\""), Some(0.0));
}

/// The emitter in the process reports every allocation; the agent listened when they were made.
#[test]
fn the_agent_names_the_stack_of_blocks_without_pointers_where_it_listened() {
    let mut target = Waiting::start(sampled(&build("cc", "lost_on_request.c", &["-g"], "lost-on-request"), 1));
    let pid = target.pid();
    let listening = "[listening]\nprofile_interval_s = 1\ncpu_percent = 100.0\n";
    let names = ["lost-on-request", "leaks-lost-on-r"];
    let daemon = Daemon::start(&watching(&names, listening));
    wait_until("the agent listens", || value(&daemon.metrics(), "fragprof_listener_targets", "") == Some(1.0));
    target.0.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    let mut line = String::new();
    BufReader::new(target.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "dropped");
    let label = format!("pid=\"{pid}\"");
    let samples = || value(&daemon.metrics(), "fragprof_listener_samples_total", "");
    wait_until("all samples have come", || samples().is_some_and(|samples| samples >= 300.0));
    let leaks = "[leaks]\nenabled = true\nlooks = 2\nlook_interval_s = 1\ncpu_percent = 100.0\n";
    daemon.configure(&watching(&names, &format!("{listening}{leaks}")));
    daemon.process.signal(Signal::HUP);
    let text = daemon.metrics_with("fragprof_process_unreached_bytes", &label);
    assert!(value(&text, "fragprof_process_unreached_bytes", &label).unwrap() >= 300.0 * 5000.0);
    let profile: Value =
        serde_json::from_str(&daemon.get(&format!("/api/v1/processes/{pid}/profile?by=unreached&format=stacks")).body).unwrap();
    let stacks = profile["stacks"].to_string();
    assert!(["imported_record", "forget_records", "main"].iter().all(|function| stacks.contains(function)), "{profile:#}");
}
