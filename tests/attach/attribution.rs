//! Real programs to which the sampler was attached while they ran: what they allocated since, against a recording of every call in the same
//! run; and the share of their live heaps that has a stack, in each way to get one. The second is a measurement:
//!
//! ```text
//! make bench-attribution
//! ```

use std::process::{ChildStdin, Command};
use std::time::{Duration, Instant};

use super::{attaching, detaching, done};
use crate::agent::daemon::{Daemon, watching};
use crate::emitter::report::{Estimates, Figure};
use crate::emitter::strata::{SAMPLE_BYTES, Service};
use crate::emitter::workloads::{Load, Workload, workloads};
use crate::sampler::programs::Libraries;
use crate::support::process::Process;
use crate::support::recording::{Recording, fragprof};
use crate::trim::programs::number;
use fragprof::sampler::library::Flavour;

const PROGRAMS: [&str; 4] = ["redis", "python", "java", "postgres"];

fn record(pid: u32, mode: &str) -> Recording {
    Recording::attach_by(fragprof(), &[pid], &["--mode", mode])
}

/// Both begin at the same moment, while the program is idle.
#[test]
fn what_real_programs_allocate_after_attaching_is_estimated_as_every_call_is_counted() {
    for name in PROGRAMS {
        let libraries = Libraries::new();
        let Some(mut service) = Service::start(name, false) else { continue };
        let pid = service.process.pid();
        service.work();
        done(&attaching(pid, &libraries.path(Flavour::Attached), SAMPLE_BYTES));
        let (every_call, sampled) = (record(pid, "exact"), record(pid, "sampled"));
        for _ in 0..3 {
            service.work();
        }
        let (sampled, every_call) = (Estimates::of(sampled), Estimates::of(every_call));
        let told = sampled.of_process("inuse_bytes", pid);
        let stacks = every_call.0["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == pid);
        let is_rest = |name: &str| ["[before attach]", "[unattributed]"].contains(&name);
        let counted: f64 = stacks
            .filter(|stack| !stack["frames"][0]["function"].as_str().is_some_and(is_rest))
            .map(|stack| stack["inuse_bytes"].as_f64().unwrap_or(0.0))
            .sum();
        println!("{name}: {:.2} ± {:.2} MB told, {:.2} counted", told.est / 1e6, told.stderr / 1e6, counted / 1e6);
        assert!(counted > 500_000.0, "{name}: {counted}");
        // Four standard errors, and what the two recordings do not begin and end at together.
        assert!((told.est - counted).abs() < 4.0 * told.stderr + 0.02 * counted, "{name}: {told:?}, {counted}");
        done(&detaching(pid));
        service.work();
    }
}

/// A service that works on demand.
enum Running {
    OnDemand(Service),
    Mariadb {
        process: Process,
        load: Box<dyn Load>,
        input: ChildStdin,
        _folder: Workload,
    },
    /// fragprof's own agent, a Rust service: it watches all processes, and is asked for its metrics and its processes.
    Agent(Daemon),
}

impl Running {
    fn start(name: &str, sampler: bool) -> Option<Self> {
        let bytes = SAMPLE_BYTES.to_string();
        let program = env!("CARGO_BIN_EXE_fragprof");
        let run = [program, "run", "--sample-bytes", bytes.as_str(), "--"].map(str::to_owned);
        let prefix = if sampler { &run[..] } else { &[] };
        match name {
            "mariadb" => {
                let workload = workloads().into_iter().find(|workload| workload.name == name)?;
                let mut process = Process::start_piped(&mut workload.command(prefix));
                let (input, mut load) = (process.input(), workload.load());
                load.begin(&process);
                Some(Self::Mariadb { process, load, input, _folder: workload })
            }
            "fragprof agent" => Some(Self::Agent(Daemon::start_with(&watching(&["*"], ""), |folder, command| {
                if sampler {
                    *command = Command::new(program);
                    command.args(&prefix[1..]).args([program, "agent", "--config"]).arg(folder.join("agent.toml"));
                }
            }))),
            _ => Service::start(name, sampler).map(Self::OnDemand),
        }
    }

    fn pid(&self) -> u32 {
        match self {
            Self::OnDemand(service) => service.process.pid(),
            Self::Mariadb { process, .. } => process.pid(),
            Self::Agent(daemon) => daemon.process.pid(),
        }
    }

    fn work(&mut self) {
        match self {
            Self::OnDemand(service) => service.work(),
            Self::Mariadb { process, load, input, .. } => load.work(process, input),
            Self::Agent(daemon) => {
                for _ in 0..10 {
                    daemon.get("/metrics");
                    daemon.get("/api/v1/processes");
                }
            }
        }
    }
}

/// Shares of the live heap, by the census at the end, in percent: what has a stack; and the same of what was allocated since the start,
/// with its standard error.
fn shares(name: &str, way: &str, libraries: &Libraries, time: Duration) -> Option<(f64, f64, f64)> {
    let mut service = Running::start(name, way == "preloaded")?;
    let pid = service.pid();
    // A heap from before.
    for _ in 0..3 {
        service.work();
    }
    if way == "attached" {
        done(&attaching(pid, &libraries.path(Flavour::Attached), SAMPLE_BYTES));
    }
    let recording = record(pid, if way == "windows" { "governed" } else { "sampled" });
    let begun = Instant::now();
    while begun.elapsed() < time {
        service.work();
        // A service that is not always busy; some of them keep a part of each unit for ever.
        std::thread::sleep(Duration::from_millis(500));
    }
    let report = Estimates::of(recording);
    let Figure { est: known, stderr } = report.of_process("inuse_bytes", pid);
    let live = report.0["processes"].as_array().unwrap().iter().find(|process| process["pid"] == pid)?["live_bytes"].as_f64()?;
    let stacks = report.0["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == pid);
    let of_rest = |name: &str| {
        let rests = stacks.clone().filter(|stack| stack["frames"][0]["function"] == name);
        rests.filter_map(|stack| stack["live_bytes_est"].as_f64()).sum::<f64>()
    };
    let since = known + of_rest("[unattributed]");
    let of = |bytes: f64, whole: f64| if whole > 0.0 { bytes * 100.0 / whole } else { 0.0 };
    Some((of(known, live), of(known, since), of(stderr, since)))
}

#[test]
#[ignore = "a measurement: make bench-attribution"]
fn share_of_the_live_heap_that_has_a_stack() {
    let libraries = Libraries::new();
    let time = Duration::from_secs(u64::from(number("FRAGPROF_ATTRIBUTION_SECONDS", 300)));
    println!(
        "share of the live heap with a stack, {} s after the start of watching; in brackets, of what is not from before\n",
        time.as_secs()
    );
    println!("| program | windows, 1 % | attached | preloaded |\n|---|---|---|---|");
    let only = std::env::var("FRAGPROF_ATTRIBUTION_PROGRAMS").ok();
    let chosen = |name: &&str| only.as_ref().is_none_or(|only| only.split(',').any(|one| one == *name));
    for name in PROGRAMS.into_iter().chain(["mariadb", "fragprof agent"]).filter(chosen) {
        // Three instances of a program at the same time, which work half of it at most.
        let shares = std::thread::scope(|scope| {
            let ways = ["windows", "attached", "preloaded"].map(|way| {
                let libraries = &libraries;
                scope.spawn(move || shares(name, way, libraries, time))
            });
            ways.map(|way| way.join().unwrap())
        });
        let text = shares
            .map(|shares| shares.map_or_else(|| "–".to_owned(), |(live, since, error)| format!("{live:.0} % ({since:.0} ± {error:.0} %)")));
        println!("| {name} | {} |", text.join(" | "));
    }
}
