//! The agent's governed tier: windows on the processes that need them most, shown on every surface, and nothing left when it is turned off
//! or stopped.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::session::tier::windows::cpu_time::of_process_ns;
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

/// The API's answer; `Null` if it refuses.
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

/// Bytes of a tree's nodes by these names, whatever is below them.
fn bytes_of(node: &Value, told: &mut BTreeMap<String, u64>) {
    for child in node["children"].as_array().into_iter().flatten() {
        match child["name"].as_str().filter(|name| name.starts_with("site_")) {
            Some(name) => *told.entry(name.to_owned()).or_default() += child["total"].as_u64().unwrap(),
            None => bytes_of(child, told),
        }
    }
}

#[test]
fn each_large_block_of_a_busy_process_is_in_the_api_by_its_site_and_in_the_metrics() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Process::start_piped(Command::new(built("large")).args(["1", "empty"]));
    let mut input = target.input();
    assert!(target.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", target.err);
    let tier = TIER.replace("budget_percent = 20.0", "budget_percent = 50.0");
    let daemon = Daemon::start(&watching(&["governed-large*"], &tier));
    let of_target = format!("pid=\"{}\"", target.pid());
    let metric = |name: &str| value(&daemon.metrics(), &format!("fragprof_process_large_blocks_{name}"), &of_target);
    wait_until("large blocks to be watched", || metric("watched") == Some(1.0));
    input.write_all(b"work 3000\n").unwrap();
    assert!(target.out.wait_for(LIMIT, |line| line == "done").is_some(), "{}", target.err);
    input.write_all(b"truth\n").unwrap();
    let mut truth = BTreeMap::new();
    for nth in 2.. {
        let line = target.out.nth(nth, LIMIT).unwrap();
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["done"] => break,
            ["small", _] | [_, "0", "0"] => {}
            [site, _, bytes] => drop(truth.insert(site.to_owned(), bytes.parse::<u64>().unwrap())),
            _ => panic!("{line}"),
        }
    }
    assert!(truth.values().sum::<u64>() > 1 << 20, "{truth:?}");
    // A tree leaves out nodes with less than a two-thousandth of it.
    truth.retain(|_, bytes| *bytes > 1 << 16);
    let profile = format!("/api/v1/processes/{}/profile?by=live", target.pid());
    let told = || {
        let mut told = BTreeMap::new();
        bytes_of(&api(&daemon, &profile)["tree"]["root"], &mut told);
        told.retain(|site, _| truth.contains_key(site));
        told
    };
    let deadline = Instant::now() + LIMIT;
    while told() != truth {
        assert!(Instant::now() < deadline, "reported:\n{:#?}\nand the truth is\n{truth:#?}", told());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(metric("live_bytes").is_some_and(|bytes| bytes >= truth.values().sum::<u64>() as f64), "{:?}", metric("live_bytes"));
    assert!(metric("seconds_total").is_some_and(|lost| lost > 0.0));
}

/// What is measured, from the first census of all on (the start also pays for one-time loading and trials), and whether after waiting for
/// attribution.
const MEASURED: [(&str, bool, Duration); 2] =
    [("the first minute", false, Duration::from_secs(60)), ("from then on", true, Duration::from_secs(180))];
/// As many as the configuration's default allows.
const ATTRIBUTED: f64 = 8.0;
const ATTRIBUTED_WITHIN: Duration = Duration::from_secs(180);
const VERDICTS_WITHIN: Duration = Duration::from_secs(300);
const PROCESSES: usize = 100;
/// Memory of processes that start at the end; walking each of them would take the census's budget for minutes.
const LARGE_MIB: [u32; 12] = [32, 40, 50, 64, 64, 80, 100, 100, 128, 160, 200, 250];
const BUSY: usize = 20;

/// CPU time of a process's threads by name, in seconds (sched/stats.rst of the kernel's documentation: the first number of schedstat).
fn of_threads_s(pid: u32) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let ran_ns: f64 = read("schedstat").split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0.0);
        *all.entry(read("comm").trim().to_owned()).or_default() += ran_ns / 1e9;
    }
    all
}

/// Starts and ends processes as on a node with cron jobs, health checks and builds: five short ones per second, each a shell with a pipe,
/// and every other second an interpreter of 20 to 30 MiB, large enough to be watched, that ends after 20 s.
fn churn() -> Process {
    let long = "python3 -c 'import time; d = [bytes(1000) for _ in range(15000)]; time.sleep(20)' &";
    let short = "for i in 1 2 3 4 5; do echo $i | grep -q x; sleep 0.2; done";
    Process::start(Command::new("sh").args(["-c", &format!("while :; do {long} {short}; {short}; done")]))
}

/// `make bench-node`: 100 processes, of which 20 allocate all the time as far as two cores allow, and others that start and end; with
/// default settings, except that the tier is on and that all 100 are watched, although they are small.
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
    let _churn = churn();
    let directory = tempfile::tempdir().unwrap();
    let config = format!(
        "[discovery]\ninclude = ['governed-busy*', 'python3', 'sh', 'grep']\nrss_min_mib = 0\n[governed]\nenabled = true\n[history]\ndirectory = {:?}\n[server]\nlisten = '127.0.0.1:0'\n",
        directory.path()
    );
    let began = Instant::now();
    let daemon = Daemon::start(&config);
    wait_until("every process to have a census", || {
        let view = api(&daemon, "/api/v1/processes");
        view["processes"].as_array().is_some_and(|all| all.iter().filter(|one| one["ladder"]["live_bytes"].is_u64()).count() >= PROCESSES)
    });
    println!("first census of all {PROCESSES} processes after {:.1} s (goal 10 s)", began.elapsed().as_secs_f64());
    // All its threads, by the kernel's account.
    let cpu_s = || of_process_ns(Pid(daemon.process.pid())).unwrap() as f64 / 1e9;
    for (what, attributed_first, measured) in MEASURED {
        if attributed_first {
            // The first attach is a one-time cost, and takes long on a machine with so many runnable processes.
            let waited = Instant::now();
            let attributed = || {
                let text = daemon.metrics();
                let of = |tier: &str| value(&text, "fragprof_governor_targets", tier).unwrap_or(0.0);
                of("windows") + of("full")
            };
            while attributed() < ATTRIBUTED && waited.elapsed() < ATTRIBUTED_WITHIN {
                std::thread::sleep(Duration::from_secs(1));
            }
            println!("{} processes attributed after {:.0} s more", attributed(), waited.elapsed().as_secs_f64());
        }
        let (before_s, threads_before, since) = (cpu_s(), of_threads_s(daemon.process.pid()), Instant::now());
        std::thread::sleep(measured);
        let measured_s = since.elapsed().as_secs_f64();
        let text = daemon.metrics();
        let of = |name: &str, label: &str| value(&text, name, label).unwrap_or_else(|| panic!("{name}: {text}"));
        println!(
            "{what}, {measured_s:.0} s: {:.2} % of a core, {:.1} MiB resident, {} processes attributed, {} cheap rounds skipped",
            100.0 * (cpu_s() - before_s) / measured_s,
            of("fragprof_agent_resident_bytes", "") / f64::from(1 << 20),
            of("fragprof_governor_targets", "windows") + of("fragprof_governor_targets", "full"),
            of("fragprof_agent_shed_total", "top_round"),
        );
        for (name, now_s) in of_threads_s(daemon.process.pid()) {
            let share = (now_s - threads_before.get(&name).unwrap_or(&0.0)) / measured_s;
            println!("  {name:<16} {:5.2} % of a core", 100.0 * share);
        }
    }
    // Now interpreters whose heaps have holes, while all the others continue.
    let large: Vec<Process> = LARGE_MIB
        .iter()
        .map(|mib| {
            let hold = format!("a = [bytes(700 + i % 600) for i in range({mib} * 1000)]; a = a[::3]; print('there', flush=True)");
            let process = Process::start(Command::new("python3").args(["-c", &format!("import time; {hold}; time.sleep(1e6)")]));
            process.out.wait_for(LIMIT, |line| line == "there").unwrap();
            process
        })
        .collect();
    let mut all: Vec<u32> = busy.iter().chain(&idle).chain(&large).map(Process::pid).collect();
    let began = Instant::now();
    while !all.is_empty() && began.elapsed() < VERDICTS_WITHIN {
        std::thread::sleep(Duration::from_millis(500));
        let view = api(&daemon, "/api/v1/processes");
        let judged =
            |pid: u32| view["processes"].as_array().into_iter().flatten().any(|one| one["pid"] == pid && !one["verdict"].is_null());
        all.retain(|&pid| !judged(pid));
    }
    println!(
        "{} of {} processes without a verdict {:.1} s after the last {} began (goal: none after 300 s); {} verdicts took a walk after a sample",
        all.len(),
        PROCESSES + LARGE_MIB.len(),
        began.elapsed().as_secs_f64(),
        LARGE_MIB.len(),
        value(&daemon.metrics(), "fragprof_agent_samples_open_total", "").unwrap_or(0.0)
    );
    println!("goals: 1 % of a core, 64 MiB in addition to the tables");
    let load = run(Command::new("cat").arg("/proc/loadavg")).out;
    println!("load {} with {} busy and {} idle processes", load.trim(), busy.len(), idle.len());
}
