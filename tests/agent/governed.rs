//! The agent's governed tier: windows on the processes in most need, told everywhere, and nothing left when it is turned off or stopped.

use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::recorder::governed::process_cpu_ns;
use fragprof::units::Pid;
use rustix::process::Signal;
use serde_json::Value;

use super::daemon::{Daemon, value, watching};
use crate::governed::harm::changed_code_bytes;
use crate::governed::{Busy, built};
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, bpf, serial};

const TIER: &str = "[governed]\nenabled = true\nbudget_percent = 20.0\nnode_budget_percent = 100.0\ncpu_percent = 100.0";

fn governed(rest: &str) -> String {
    watching(&["governed-busy*"], rest)
}

/// What the API says; `Null` where it refuses.
fn api(daemon: &Daemon, path: &str) -> Value {
    serde_json::from_str(&daemon.get(path).body).unwrap_or_default()
}

/// Names of a tree's functions below the root, those with the most first at each level.
fn path_of_most(node: &Value) -> Vec<String> {
    let mut names = Vec::new();
    let mut at = node;
    while let Some(next) = at["children"].as_array().and_then(|all| all.iter().max_by_key(|one| one["total"].as_u64())) {
        names.push(next["name"].as_str().unwrap_or_default().to_owned());
        at = next;
    }
    names
}

#[test]
fn the_leaking_stack_is_first_of_the_survivors_and_no_probe_stays_when_the_tier_is_turned_off_or_the_agent_stopped() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let target = Busy::start(&["40", "1000"]);
    let mut daemon = Daemon::start(&governed(TIER));
    let profile = format!("/api/v1/processes/{}/profile?by=survivors", target.pid());
    wait_until("the leak to be first of the survivors", || {
        path_of_most(&api(&daemon, &profile)["tree"]["root"]).iter().any(|name| name == "site_leak")
    });
    assert_eq!(api(&daemon, &profile)["mode"], "governed");
    let of_target = format!("pid=\"{}\"", target.pid());
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_governor_enabled", ""), Some(1.0));
    let slowdown = value(&text, "fragprof_process_slowdown_ratio_est", &of_target);
    assert!(slowdown.is_some_and(|ratio| ratio > 0.0 && ratio < 0.4), "{slowdown:?}: {text}");

    daemon.configure(&governed(""));
    daemon.process.signal(Signal::HUP);
    wait_until("the tier to be off", || value(&daemon.metrics(), "fragprof_governor_enabled", "") == Some(0.0));
    wait_until("the probes to be out", || changed_code_bytes(target.pid()) == 0);

    daemon.configure(&governed(TIER));
    daemon.process.signal(Signal::HUP);
    wait_until("a window to be open again", || changed_code_bytes(target.pid()) > 0);
    daemon.process.signal(Signal::TERM);
    assert!(daemon.process.wait(LIMIT).success());
    assert_eq!(changed_code_bytes(target.pid()), 0);
}

/// Time that is measured, after the start.
const MEASURED: Duration = Duration::from_secs(60);
const PROCESSES: usize = 100;
const BUSY: usize = 20;

/// `make bench-node`: 100 processes, of which 20 allocate all the time as far as two cores let them, everything at its defaults but the tier,
/// which is on.
#[test]
#[ignore = "a benchmark: make bench-node"]
fn figures_of_a_node_with_a_hundred_processes() {
    bpf().unwrap();
    let _alone = serial();
    let program = built("busy");
    let start = |args: &[&str]| {
        let process = Process::start(Command::new(&program).args(args));
        process.out.wait_for(LIMIT, |line| line.starts_with("/proc/")).unwrap();
        process
    };
    // Pairs as fast as they go for a while, then a millisecond's sleep; the others allocate a little and sleep nearly all the time.
    let busy: Vec<Process> = (0..BUSY).map(|_| start(&["100", "1000", "20000"])).collect();
    let idle: Vec<Process> = (BUSY..PROCESSES).map(|_| start(&["0", "0", "1"])).collect();
    let directory = tempfile::tempdir().unwrap();
    let config = format!(
        "[discovery]\ninclude = ['governed-busy*']\nrss_min_mib = 0\n[governed]\nenabled = true\n[history]\ndirectory = {:?}\n[server]\nlisten = '127.0.0.1:0'\n",
        directory.path()
    );
    let began = Instant::now();
    let daemon = Daemon::start(&config);
    wait_until("every process to have a picture", || {
        let view = api(&daemon, "/api/v1/processes");
        view["processes"].as_array().is_some_and(|all| all.iter().filter(|one| one["ladder"]["live_bytes"].is_u64()).count() >= PROCESSES)
    });
    println!("first complete picture of {PROCESSES} processes after {:.1} s (goal 10 s)", began.elapsed().as_secs_f64());
    // All its threads, by the kernel's account.
    let cpu_s = || process_cpu_ns(Pid(daemon.process.pid())).unwrap() as f64 / 1e9;
    let (before_s, since) = (cpu_s(), Instant::now());
    std::thread::sleep(MEASURED);
    let share = (cpu_s() - before_s) / since.elapsed().as_secs_f64();
    let text = daemon.metrics();
    let of = |name: &str, label: &str| value(&text, name, label).unwrap_or_else(|| panic!("{name}: {text}"));
    println!(
        "agent: {:.2} % of a core (goal 1 %), {:.1} MiB resident (goal 64 MiB beside the tables), over {:.0} s; {} processes attributed",
        100.0 * share,
        of("fragprof_agent_resident_bytes", "") / f64::from(1 << 20),
        since.elapsed().as_secs_f64(),
        of("fragprof_governor_targets", "windows") + of("fragprof_governor_targets", "full"),
    );
    let load = run(Command::new("cat").arg("/proc/loadavg")).out;
    println!("load {} with {} busy and {} idle processes", load.trim(), busy.len(), idle.len());
}
