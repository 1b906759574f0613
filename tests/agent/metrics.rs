//! The exposition for real processes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::daemon::{Daemon, value, watching};
use crate::support::LIMIT;
use crate::support::build::{output_dir, tool};
use crate::support::process::{Process, run, wait_until};

/// Compiles the program once per run, under a name of its own so that tests do not see each other's processes.
pub fn fragments(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/fragments.c");
    let program = output_dir().join(name);
    let done = run(Command::new("cc").args(["-O1", "-fno-builtin", "-o"]).arg(&program).arg(&source));
    assert!(done.status.success(), "{}", done.err);
    program
}

/// Starts the program and waits until its heap is made.
pub fn fragmented(program: &Path, args: &[&str]) -> Process {
    let process = Process::start(Command::new(program).args(args));
    process.out.wait_for(LIMIT, |line| line == "ready").expect("the program says when it is ready");
    process
}

/// `fragprof census --json` for a process.
fn census(pid: u32) -> Value {
    let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["census", &pid.to_string(), "--json"]));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

#[test]
fn the_ladder_of_a_resting_process_is_the_one_that_the_census_prints() {
    let target = fragmented(&fragments("fragments-rest"), &["16"]);
    let daemon = Daemon::start(&watching(&["fragments-rest"], ""));
    let label = format!("pid=\"{}\",comm=\"fragments-rest\",allocator=\"glibc\"", target.pid());
    let text = daemon.metrics_with("fragprof_heap_live_bytes", &label);
    let truth = census(target.pid());
    let heap = &truth["heaps"][0];
    let steps = [
        "extent_bytes",
        "resident_bytes",
        "swapped_bytes",
        "live_bytes",
        "live_allocations",
        "cached_bytes",
        "free_bytes",
        "top_bytes",
        "overhead_bytes",
        "trimmable_bytes",
        "pinned_bytes",
        "kept_bytes",
        "unknown_bytes",
        "mmapped_bytes",
    ];
    for step in steps {
        let expected = heap[step].as_f64().unwrap_or_else(|| panic!("{step}: {heap}"));
        assert_eq!(value(&text, &format!("fragprof_heap_{step}"), &label), Some(expected), "{step}\n{text}");
    }
    assert!(heap["pinned_bytes"].as_u64().unwrap() > 10 << 20, "{heap}");
    let by_pid = format!("pid=\"{}\"", target.pid());
    assert_eq!(value(&text, "fragprof_census_usable", &by_pid), Some(1.0));
    for kind in truth["not_malloc"].as_array().unwrap() {
        let name = kind["kind"].as_str().unwrap();
        let shown =
            value(&text, "fragprof_process_not_malloc_resident_bytes", &format!("{by_pid},comm=\"fragments-rest\",kind=\"{name}\""));
        assert_eq!(shown, kind["resident_bytes"].as_f64(), "{name}");
    }
    // The API gives the same census, and later cheap censuses do not change the steps.
    let api: Value = serde_json::from_str(&daemon.get(&format!("/api/v1/processes/{}/heap", target.pid())).body).unwrap();
    for key in ["pid", "comm", "level", "heaps", "rss_bytes", "not_malloc"] {
        assert_eq!(api[key], truth[key], "{key}");
    }
    let text = daemon.metrics_with("fragprof_agent_censuses_total", "level=\"sampled\"");
    assert!(value(&text, "fragprof_agent_cpu_seconds_total", "").unwrap() > 0.0);
}

#[test]
fn the_exposition_passes_promtool() {
    let Some(promtool) = tool("promtool") else { return };
    let program = fragments("fragments-prom");
    let targets: Vec<Process> = ["4", "16", "64"].iter().map(|keep| fragmented(&program, &[keep])).collect();
    let daemon = Daemon::start(&watching(&["fragments-prom"], "[metrics]\nprocesses_max = 2"));
    let mut text = daemon.metrics_with("fragprof_heap_live_bytes", "pid=\"other\"");
    // Until all of them have had a full census.
    wait_until("full censuses of all", || {
        text = daemon.metrics();
        text.matches("level=\"full\"} ").count() >= targets.len()
    });
    let mut check = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    check.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let done = check.wait_with_output().unwrap();
    let said = [done.stdout, done.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(done.status.success() && said.trim().is_empty(), "{said}\n{text}");
    assert_eq!(value(&text, "fragprof_agent_processes_in_other", ""), Some(1.0));
}

#[test]
fn series_end_with_their_process() {
    let mut target = fragmented(&fragments("fragments-end"), &["16"]);
    let daemon = Daemon::start(&watching(&["fragments-end"], ""));
    let label = format!("pid=\"{}\"", target.pid());
    daemon.metrics_with("fragprof_heap_live_bytes", &label);
    target.signal(rustix::process::Signal::KILL);
    target.wait(LIMIT);
    wait_until("the end of the series", || !daemon.metrics().contains(&label));
    assert_eq!(daemon.get(&format!("/api/v1/processes/{}", target.pid())).status, 404);
}

#[test]
fn a_hostile_name_breaks_neither_the_exposition_nor_the_json() {
    let name = "a\"}\n\u{1b}[2J\\x 1\r";
    let target = fragmented(&fragments("fragments-evil"), &["16", name]);
    let daemon = Daemon::start(&watching(&["a\"*"], ""));
    let text = daemon.metrics_with("fragprof_heap_live_bytes", &format!("pid=\"{}\"", target.pid()));
    assert!(text.lines().all(|line| line.starts_with("# ") || line.starts_with("fragprof_")), "{text}");
    assert!(text.bytes().all(|byte| byte == b'\n' || !byte.is_ascii_control()), "{text:?}");
    let one: Value = serde_json::from_str(&daemon.get(&format!("/api/v1/processes/{}", target.pid())).body).unwrap();
    assert_eq!(one["comm"].as_str(), Some(name));
}
