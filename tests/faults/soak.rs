//! Soak test: an agent and a recorder while targets start and end. Their resource use stays flat, and at the end the recording of a
//! process that ran all the time equals its own ledger.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::Churn;
use crate::agent::daemon::{Daemon, watching};
use crate::support::build::{Link, program};
use crate::support::process::Process;
use crate::support::recording::Recording;
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::support::{LIMIT, bpf, serial};

/// Resource use of a process.
#[derive(Debug, Clone, Copy)]
struct Held {
    resident_kib: u64,
    descriptors: usize,
    /// Of these, BPF programs, maps and links.
    bpf: usize,
    threads: usize,
    mappings: usize,
}

fn held(pid: u32) -> Held {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let number = |key: &str| {
        status.lines().find_map(|line| line.strip_prefix(key)).and_then(|rest| rest.split_ascii_whitespace().next()?.parse().ok())
    };
    let names: Vec<_> =
        std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect();
    Held {
        resident_kib: number("VmRSS:").unwrap(),
        threads: number("Threads:").unwrap() as usize,
        descriptors: names.len(),
        bpf: names.iter().filter(|name| name.to_string_lossy().contains("bpf")).count(),
        mappings: std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count(),
    }
}

/// Limits above the level of the first third: enough for caches that are still filling, not for anything that grows with time.
fn assert_flat(who: &str, early: Held, late: Held) {
    println!("{who}: {early:?}\n{:width$}  {late:?}", "", width = who.len());
    assert!(late.resident_kib < early.resident_kib + early.resident_kib / 4 + 8192, "{who}: memory grew");
    assert!(late.descriptors <= early.descriptors + 16, "{who}: descriptors grew");
    assert!(late.bpf <= early.bpf + 4, "{who}: BPF objects grew");
    assert!(late.threads <= early.threads + 2, "{who}: threads grew");
    assert!(late.mappings <= early.mappings + 64, "{who}: mappings grew");
}

fn soak(span: Duration) {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let daemon = Daemon::start(&watching(&["churn", "realloc_forms*", "speed*"], ""));
    // Recorded from beginning to end, at a rate that leaves the machine to the others: it proceeds between the rounds.
    let mut long_lived = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    let recording = Recording::attach_for(2 * span + LIMIT, long_lived.pid());
    let begun = Instant::now();
    let mut early = None;
    let mut rounds = 0u64;
    let mut truth = long_lived.go_to("round");
    while begun.elapsed() < span {
        // A target that is recorded and ends, one that is killed while it is recorded, one whose recorder is killed.
        let mut churn = Churn::start();
        let mut short = Recording::attach(&[churn.pid()]);
        churn.assert_alive();
        match rounds % 3 {
            0 => {
                churn.stop();
                drop(churn);
                short.stop();
            }
            1 => {
                churn.target.process.signal(Signal::KILL);
                short.wait(LIMIT);
            }
            _ => {
                short.process.signal(Signal::KILL);
                short.wait(LIMIT);
                churn.assert_unprobed();
                churn.assert_alive();
            }
        }
        let storm = Process::start(Command::new("sh").args(["-c", "for i in $(seq 30); do true & done; wait"]));
        drop(storm);
        truth = long_lived.go_to("round");
        rounds += 1;
        if early.is_none() && begun.elapsed() > span / 3 {
            early = Some((held(daemon.process.pid()), held(recording.process.pid())));
        }
    }
    let (agent_early, recorder_early) = early.expect("the run has a first third");
    let (agent_late, recorder_late) = (held(daemon.process.pid()), held(recording.process.pid()));
    assert_eq!(daemon.get("/healthz").status, 200);
    println!("{rounds} rounds in {:?}", begun.elapsed());
    recording.stop().assert_equals(&truth, Since::Attach);
    assert_flat("agent", agent_early, agent_late);
    assert_flat("recorder", recorder_early, recorder_late);
}

#[test]
#[ignore = "ten minutes, or FRAGPROF_SOAK_SECONDS: make soak"]
fn resource_use_stays_flat_and_the_ledger_correct() {
    let seconds = std::env::var("FRAGPROF_SOAK_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(600);
    soak(Duration::from_secs(seconds));
}
