//! Memory given back by policy, what predictions were worth afterwards, and that nothing else makes the agent act.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::daemon::{Daemon, value, watching};
use crate::support::LIMIT;
use crate::support::build::{install, output_dir, standalone};
use crate::support::process::{Process, run, wait_until};

/// A program of the tests under a name of its own, because rules and workloads are found by it.
fn named(source: &str, name: &str) -> PathBuf {
    let built = standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join(source), &[]);
    let copy = output_dir().join(name);
    install(&built, &copy);
    copy
}

fn start(command: &mut Command) -> Process {
    let process = Process::start_piped(command);
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap_or_else(|| panic!("not ready: {}", process.err));
    process
}

fn json(daemon: &Daemon, path: &str) -> Value {
    let answer = daemon.get(path);
    serde_json::from_str(&answer.body).unwrap_or(Value::Null)
}

fn event(daemon: &Daemon, kind: &str) -> Value {
    let mut found = Value::Null;
    wait_until(&format!("an event of kind {kind}"), || {
        let events = json(daemon, "/api/v1/events");
        found = events["events"].as_array().and_then(|all| all.iter().find(|event| event["kind"] == kind).cloned()).unwrap_or_default();
        !found.is_null()
    });
    found
}

fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The policy for one command, without delays.
fn policy(command: &str, rest: &str) -> String {
    format!(
        "[reclaim]\nenabled = true\nquiet_s = 0\ninterval_s = 3600\ntrimmable_min_mib = 8\ntrimmable_min_percent = 1.0\nmax_stall_ms = 10000\n\
         {rest}\n[[reclaim.rules]]\ncommand = {command:?}"
    )
}

#[test]
fn memory_is_given_back_by_policy_and_stands_beside_the_next_prediction() {
    let program = named("tests/trim/states.c", "reclaimed");
    let targets = [0, 1].map(|_| start(Command::new(&program).args(["other_filter", "48"])));
    let before = targets.each_ref().map(|target| resident_bytes(target.pid()));
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_str().unwrap();
    let history = format!("{}\n[history]\ndirectory = {directory:?}\nsample_interval_s = 1", policy("reclaimed", "calls_per_hour_max = 1"));
    let daemon = Daemon::start(&watching(&["reclaimed"], &history));
    let trim = event(&daemon, "trim");
    // Both have a seccomp filter, which the kernel shows only with CAP_SYS_ADMIN: kept because it is used here.
    let pid = trim["process"]["pid"].as_u64().unwrap() as u32;
    let index = targets.iter().position(|target| target.pid() == pid).unwrap();
    let fell = before[index] - resident_bytes(pid);
    let outcome = &trim["outcome"];
    let (predicted, saved) = (outcome["predicted_bytes"].as_u64().unwrap(), outcome["saved_bytes"].as_u64().unwrap());
    assert!(predicted.abs_diff(saved) <= (predicted / 100).max(256 << 10) && fell.abs_diff(saved) < 2 << 20, "{fell} {trim}");
    let other = &targets[1 - index];
    assert!(before[1 - index].abs_diff(resident_bytes(other.pid())) < 2 << 20, "one call an hour");
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_reclaim_calls_total", "result=\"made\""), Some(1.0), "{text}");
    for line in ["audit: policy [reclaim]: malloc_trim(0) in process", "returned, gave back"] {
        assert!(daemon.process.err.wait_for(LIMIT, |log| log.contains(line)).is_some(), "{line}: {}", daemon.process.err);
    }

    // The other one has the same prediction, and what it was worth stands beside it.
    let records = |page: &Value| page["track_record"].as_array().cloned().unwrap_or_default();
    let page = json(&daemon, &format!("/api/v1/processes/{}/explain", other.pid()));
    let (remedy, record) = (&page["remedies"][0], &records(&page)[0]);
    assert_eq!((&record["action"], record["checked"].as_u64()), (&remedy["action"], Some(1)), "{page}");
    assert_eq!((record["of_workload"].as_bool(), record["predicted_bytes"].as_u64()), (Some(true), Some(predicted)), "{page}");
    let explain = |more: &[&str]| {
        let command = ["explain", &other.pid().to_string(), "--once", "--no-owners", "--history", directory].map(str::to_owned);
        let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(command).args(more));
        assert!(done.status.success(), "{}", done.err);
        done.out
    };
    wait_until("the event is in the file", || !records(&serde_json::from_str(&explain(&["--json"])).unwrap()).is_empty());
    assert!(explain(&[]).contains("checked once on this workload: it saved "), "{}", explain(&[]));

    // A call by hand is kept in the same history, for the same workload.
    let by_hand = ["trim", &other.pid().to_string(), "--yes", "--json", "--max-stall", "10s", "--history", directory].map(str::to_owned);
    let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(by_hand));
    assert!(done.status.success(), "{} {}", done.out, done.err);
    let events = json(&daemon, &format!("/api/v1/events?pid={}", other.pid()));
    assert_eq!(
        (&events["events"][0]["kind"], &events["events"][0]["outcome"]["workload"]),
        (&"trim".into(), &"reclaimed".into()),
        "{events}"
    );
}

#[test]
fn an_advised_setting_is_compared_with_its_prediction_after_a_restart() {
    let program = named("tests/verdicts/troubles.c", "restarted");
    let with = |arenas: &str| {
        let tunables = format!("glibc.malloc.arena_max={arenas}:glibc.malloc.trim_threshold=1073741824");
        start(Command::new(&program).arg("arenas").env("GLIBC_TUNABLES", tunables))
    };
    let daemon = Daemon::start(&watching(&["restarted"], ""));
    let old = with("64");
    let path = format!("/api/v1/processes/{}/explain", old.pid());
    let mut page = Value::Null;
    let advised = |page: &Value| {
        let remedies = page["remedies"].as_array().cloned().unwrap_or_default();
        remedies.into_iter().find(|remedy| remedy["action"].as_str().unwrap().contains("MALLOC_ARENA_MAX"))
    };
    wait_until("the verdict", || {
        page = json(&daemon, &path);
        advised(&page).is_some()
    });
    let predicted = advised(&page).unwrap()["predicted_bytes"].as_u64().unwrap();
    let held = resident_bytes(old.pid());
    drop(old);
    // One with the same settings is not compared; it ends before the next one starts.
    let same = with("64");
    daemon.metrics_with("fragprof_heap_live_bytes", &format!("pid=\"{}\"", same.pid()));
    drop(same);
    let new = with("2");
    let outcome = event(&daemon, "setting")["outcome"].clone();
    let saved = outcome["saved_bytes"].as_i64().unwrap();
    let by_kernel = held as i64 - resident_bytes(new.pid()) as i64;
    assert!((saved - by_kernel).abs() < 4 << 20, "{by_kernel} by the kernel: {outcome}");
    assert!(outcome["applied"].as_str().unwrap().contains("arena_max=2") && outcome["at_most"] == true, "{outcome}");
    assert!(saved > 0 && saved as u64 <= predicted * 11 / 10, "{predicted} at most: {outcome}");
    wait_until("it is counted", || value(&daemon.metrics(), "fragprof_flight_records_total", "kind=\"setting\"") == Some(1.0));
}

#[test]
fn no_request_makes_the_agent_act_and_a_dry_run_only_counts() {
    let program = named("tests/trim/states.c", "untouched");
    let target = start(Command::new(&program).args(["plain", "32"]));
    let before = resident_bytes(target.pid());
    let daemon = Daemon::start(&watching(&["untouched"], &policy("untouched", "dry_run = true")));
    wait_until("a call that would have been made", || {
        value(&daemon.metrics(), "fragprof_reclaim_calls_total", "result=\"dry_run\"").is_some_and(|calls| calls >= 1.0)
    });
    let pid = target.pid();
    let paths = json(&daemon, "/api/v1/openapi.json")["paths"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let made_up = ["/api/v1/processes/{pid}/trim", "/api/v1/processes/{pid}/reclaim", "/api/v1/trim", "/api/v1/reclaim"];
    for path in paths.iter().map(String::as_str).chain(made_up) {
        let path = path.replace("{pid}", &pid.to_string()).replace("{id}", "1");
        for method in ["POST", "PUT", "PATCH", "DELETE"] {
            let answer =
                daemon.ask(&format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"));
            assert!(matches!(answer.status, 404 | 405), "{method} {path}: {} {}", answer.status, answer.body);
        }
    }
    for path in made_up {
        assert_eq!(daemon.get(&path.replace("{pid}", &pid.to_string())).status, 404, "{path}");
    }
    assert!(before.abs_diff(resident_bytes(pid)) < 1 << 20, "nothing was given back");
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_reclaim_calls_total", "result=\"made\"").unwrap_or(0.0), 0.0, "{text}");
    assert!(!daemon.process.err.to_string().contains("audit:"), "a dry run is no action");
}
