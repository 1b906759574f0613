//! The sampler brought to running processes by policy.

use std::path::Path;
use std::process::Command;

use super::daemon::{Daemon, value, watching};
use crate::support::build::{install, output_dir, standalone};
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, bpf};
use crate::trim::made;

/// A service under a name of its own, because rules go by it: its heap turns over every few seconds.
fn service(name: &str) -> Process {
    let built = standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/turns_over.c"), &[]);
    let copy = output_dir().join(name);
    install(&built, &copy);
    let process = Process::start_piped(&mut Command::new(copy));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap_or_else(|| panic!("not ready: {}", process.err));
    process
}

fn maps(process: &Process) -> String {
    std::fs::read_to_string(format!("/proc/{}/maps", process.pid())).unwrap()
}

#[test]
fn a_process_that_a_rule_names_gets_the_sampler_and_its_heap_gets_stacks() {
    if bpf().is_none() {
        return;
    }
    let (chosen, other) = (service("attach-me"), service("leave-me"));
    let config = "[listening]\nprofile_interval_s = 2\n[attach]\nenabled = true\nafter_s = 0\nsample_bytes = 16384\n[[attach.rules]]\ncommand = \
                  \"attach-*\"\n";
    let daemon = Daemon::start(&watching(&["attach-me", "leave-me"], config));
    wait_until("the sampler is attached", || maps(&chosen).contains("libfragprof_attached.so"));
    let ratio = |process: &Process, text: &str| {
        let pid = format!("pid=\"{}\"", process.pid());
        let line = text.lines().find(|line| line.starts_with("fragprof_attributed_ratio{") && line.contains(&pid))?;
        line.split_whitespace().last()?.parse::<f64>().ok()
    };
    // All of its blocks were allocated anew within some seconds.
    wait_until("nearly all of its live heap has stacks", || ratio(&chosen, &daemon.metrics()).is_some_and(|ratio| ratio > 0.85));
    let text = daemon.metrics();
    assert!(!maps(&other).contains("libfragprof_"), "no rule names it");
    assert_eq!(value(&text, "fragprof_attach_processes", ""), Some(1.0), "{text}");
    assert_eq!(value(&text, "fragprof_attach_calls_total", ""), Some(2.0));
    drop(daemon);
    // Another agent finds it attached; and leaves it alone once its owner has detached it.
    let daemon = Daemon::start(&watching(&["attach-me", "leave-me"], &config.replace("after_s = 0", "after_s = 0\nagain_s = 10")));
    let attached = |text: &str| value(text, "fragprof_attach_processes", "");
    wait_until("the next agent knows that it is attached", || attached(&daemon.metrics()) == Some(1.0));
    let detached = made(&["attach-sampler", "--detach", &chosen.pid().to_string()].map(str::to_owned));
    assert!(detached["refused"].is_null(), "{detached}");
    let refused = |text: &str| value(text, "fragprof_attach_refused_total", "reason=\"detached_by_owner\"");
    wait_until("it sees that the owner detached it", || refused(&daemon.metrics()) == Some(1.0));
    assert_eq!(attached(&daemon.metrics()), Some(0.0));
    drop(daemon);
    for mut process in [chosen, other] {
        drop(process.input());
        assert!(process.wait(LIMIT).success(), "{}", process.err);
    }
}
