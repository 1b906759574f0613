//! Processes that start and end faster than they can be examined.

use std::process::Command;

use crate::support::LIMIT;
use crate::support::bpf;
use crate::support::build::tool;
use crate::support::process::{Process, run};
use crate::support::recording::fragprof;

fn record_children(script: &str) {
    if bpf().is_none() {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let out = dir.path().join("out.pb.gz");
    let mut recorder =
        Process::start(fragprof().args(["record", "--children", "-d", "60s", "-o"]).arg(&out).args(["--", "sh", "-c", script, script]));
    let status = recorder.wait(LIMIT);
    let said = recorder.err.all();
    assert!(status.success(), "{status}\n{said}");
    assert!(!said.contains("panicked"), "{said}");
    assert_eq!(recorder.out.all().lines().filter(|line| *line == "whole").count(), 1, "the script did not complete:\n{said}");
    assert!(run(fragprof().arg("report").arg(&out)).status.success());
}

#[test]
fn three_hundred_children_at_once_all_succeed() {
    record_children("for i in $(seq 300); do (exec sh -c 'exit 0') & done; wait; echo whole");
}

#[test]
fn a_process_that_executes_two_hundred_programs_in_turn_succeeds() {
    record_children("n=${n:-0}; if [ $n -lt 200 ]; then n=$((n+1)) exec sh -c \"$0\" \"$0\"; fi; echo whole");
}

#[test]
fn an_agent_in_a_fork_storm_stays_within_its_limits() {
    let Some(shell) = tool("sh") else { return };
    let daemon = crate::agent::daemon::Daemon::start(&crate::agent::daemon::watching(&["sh", "true"], ""));
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", daemon.process.pid())).unwrap().count();
    let before = descriptors();
    let mut storm = Command::new(shell);
    storm.args(["-c", "for i in $(seq 1500); do true | true & done; wait"]);
    assert!(run(&mut storm).status.success());
    let text = daemon.metrics();
    assert!(text.contains("fragprof_agent_uptime_seconds"));
    crate::support::process::wait_until("descriptors of ended processes are closed", || descriptors() <= before + 8);
}
