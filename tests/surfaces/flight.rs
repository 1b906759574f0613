//! Flight records: what used the memory is known after the process has ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::api::json;
use crate::agent::daemon::{Daemon, value, watching};
use crate::support::LIMIT;
use crate::support::build::output_dir;
use crate::support::process::{Process, run, wait_until};

fn grow(name: &str) -> PathBuf {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/surfaces/grow.c");
    let program = output_dir().join(name);
    let done = run(Command::new("cc").args(["-O1", "-fno-builtin", source, "-o"]).arg(&program));
    assert!(done.status.success(), "{}", done.err);
    program
}

/// A memory cgroup for a test, of the available version; removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(limit_bytes: u64) -> Self {
        let one = Path::new("/sys/fs/cgroup/memory");
        let mount = if one.join("cgroup.procs").exists() { one } else { Path::new("/sys/fs/cgroup") };
        let own = mount.join(format!("fragprof-test-{}", std::process::id()));
        // In version 2 the root must enable the controller; in version 1 there is no such file.
        let _ = fs::write(mount.join("cgroup.subtree_control"), "+memory");
        fs::create_dir(&own).unwrap();
        let limit = if own.join("memory.limit_in_bytes").exists() { "memory.limit_in_bytes" } else { "memory.max" };
        fs::write(own.join(limit), limit_bytes.to_string()).unwrap();
        Self(own)
    }

    fn start(&self, program: &Path, mib: u64) -> Process {
        let script = format!("echo $$ > {}/cgroup.procs; exec {} {mib}", self.0.display(), program.display());
        let process = Process::start_piped(Command::new("sh").args(["-c", &script]));
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
        process
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn event(daemon: &Daemon, kind: &str, pid: u32) -> Value {
    let mut found = Value::Null;
    wait_until(&format!("a flight record of kind {kind}"), || {
        let events = json(daemon, &format!("/api/v1/events?pid={pid}"));
        found = events["events"].as_array().unwrap().iter().find(|event| event["kind"] == kind).cloned().unwrap_or_default();
        !found.is_null()
    });
    found
}

#[test]
fn a_process_killed_for_lack_of_memory_leaves_its_ladder_and_verdict() {
    let cgroup = Cgroup::new(64 << 20);
    let program = grow("surfaces-oom");
    let mut target = cgroup.start(&program, 62);
    let daemon = Daemon::start(&watching(&["surfaces-oom"], ""));
    let pid = target.pid();
    daemon.metrics_with("fragprof_heap_live_bytes", &format!("pid=\"{pid}\""));
    let near = event(&daemon, "memory_limit", pid);
    assert!(near["evidence"].as_str().unwrap().contains("fragprof-test-"), "{near}");
    assert!(near["process"]["memory_limit"]["used_ratio"].as_f64().unwrap() >= 0.95, "{near}");
    // Allocates more until the kernel kills it.
    use std::io::Write as _;
    target.input().write_all(b"go\n").unwrap();
    let status = target.wait(LIMIT);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    let killed = event(&daemon, "oom_kill", pid);
    let ladder = &killed["process"]["ladder"];
    assert!(ladder["live_bytes"].as_u64().unwrap() > 50 << 20, "{killed}");
    assert!(killed["process"]["verdict"]["verdict"].is_string(), "{killed}");
    assert!(killed["summary"].as_str().unwrap().contains("was killed for lack of memory"), "{killed}");
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_flight_records_total", "kind=\"oom_kill\""), Some(1.0));
    assert!(!text.contains(&format!("pid=\"{pid}\"")), "its series end");
    assert!(
        daemon.process.err.wait_for(LIMIT, |line| line.contains("flight record") && line.contains("killed for lack of memory")).is_some()
    );
    // Also by its id.
    let id = killed["id"].as_u64().unwrap();
    assert_eq!(json(&daemon, &format!("/api/v1/events/{id}"))["process"]["pid"].as_u64(), Some(u64::from(pid)));
}

#[test]
fn an_exit_is_recorded_if_it_was_large_enough_and_counted_if_not() {
    let program = grow("surfaces-exit");
    let mut large = Process::start_piped(Command::new(&program).arg("80"));
    let mut small = Process::start_piped(Command::new(&program).arg("2"));
    for target in [&large, &small] {
        target.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    }
    let daemon = Daemon::start(&watching(&["surfaces-exit"], ""));
    for target in [&large, &small] {
        daemon.metrics_with("fragprof_heap_live_bytes", &format!("pid=\"{}\"", target.pid()));
    }
    for target in [&mut large, &mut small] {
        drop(target.input());
        assert!(target.wait(LIMIT).success());
    }
    let exit = event(&daemon, "exit", large.pid());
    assert!(exit["process"]["ladder"]["live_bytes"].as_u64().unwrap() > 70 << 20, "{exit}");
    wait_until("the small one is counted", || value(&daemon.metrics(), "fragprof_flight_exits_passed_over_total", "") == Some(1.0));
    assert_eq!(json(&daemon, &format!("/api/v1/events?pid={}", small.pid()))["events"].as_array().unwrap().len(), 0);
}
