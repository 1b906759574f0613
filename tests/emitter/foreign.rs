//! A foreign emitter: systemtap's sys/sdt.h, arguments wherever the compiler puts them, under both names of the contract.

use std::io::Write as _;
use std::path::Path;
use std::process::{ChildStdin, Command};
use std::time::{Duration, Instant};

use fragprof::probe::features::Attach;
use fragprof::profile::pprof;
use fragprof::session::{Options, Recorder};
use fragprof::units::Pid;
use rustix::process::Signal;
use tempfile::TempDir;

use super::programs::compile;
use super::report::Estimates;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf};

/// A running `foreign.c`.
struct Foreign {
    process: Process,
    input: ChildStdin,
    said: usize,
}

impl Foreign {
    fn start(program: &Path) -> Self {
        let mut process = Process::start_piped(&mut Command::new(program));
        let input = process.input();
        Self { process, input, said: 0 }
    }

    /// The next line that answers a command.
    fn ask(&mut self, command: &[u8]) -> String {
        self.input.write_all(command).unwrap();
        let nth = self.said;
        self.said += 1;
        let mut line = String::new();
        wait_until("the program answers", || {
            let said = self.process.out.to_string();
            let answer = said.lines().nth(nth).map(str::to_owned);
            line = answer.unwrap_or_default();
            !line.is_empty()
        });
        line
    }

    /// (site, live weight, allocated weight).
    fn ledger(&mut self) -> Vec<(String, f64, f64)> {
        let line = self.ask(b"g");
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        words.chunks(3).map(|site| (site[0].to_owned(), site[1].parse().unwrap(), site[2].parse().unwrap())).collect()
    }

    fn semaphores(&mut self) -> String {
        self.ask(b"s")
    }
}

fn check(report: &Estimates, ledger: &[(String, f64, f64)]) {
    assert_eq!(report.0["mode"], "sampled");
    for (site, live, allocated) in ledger {
        assert_eq!(report.of_function("inuse_bytes", site).est, *live, "{site}: live");
        assert_eq!(report.of_function("allocated_bytes", site).est, *allocated, "{site}: allocated");
    }
}

fn provider_of(name: &str) -> String {
    format!("-DPROVIDER={name}")
}

#[test]
fn an_emitter_made_with_sys_sdt_is_found_under_both_names_however_it_was_compiled() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    for (provider, level) in [("otel_memory", "-O2"), ("ddheap", "-O0"), ("ddheap", "-O2"), ("otel_memory", "-O0")] {
        let program = compile(folder.path(), "foreign.c", &format!("{provider}{level}"), &[&provider_of(provider), level]);
        let mut foreign = Foreign::start(&program);
        let recording = Recording::attach(&[foreign.process.pid()]);
        let ledger = foreign.ledger();
        let report = Estimates::of(recording);
        check(&report, &ledger);
        let source = report.0["processes"][0]["source"].as_str().unwrap();
        assert!(source.contains(&format!("{provider} in {provider}{level}")), "{source}");
        // It states no interval, and its weights have no common divisor.
        assert_eq!(report.0["processes"][0]["sample_bytes"], serde_json::Value::Null);
        assert_eq!(report.0["processes"][0]["samples"], 300);
    }
}

#[test]
fn every_way_of_attaching_receives_the_same_samples() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "foreign.c", "foreign", &[&provider_of("otel_memory"), "-O2"]);
    for method in [Attach::Session, Attach::Multi, Attach::PerfEvents] {
        let mut foreign = Foreign::start(&program);
        let mut recorder = Recorder::new(Options { method: Some(method), ..Options::default() }).unwrap();
        recorder.watch(Pid(foreign.process.pid())).unwrap();
        // The kernel counts each site: four of alloc, one of free.
        assert_eq!(foreign.semaphores(), "semaphores 4 1", "{method}");
        let ledger = foreign.ledger();
        // Stacks are walked by tables that are loaded while the recording runs.
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            recorder.step(Duration::from_millis(20));
        }
        let file = folder.path().join("out.pb.gz");
        pprof::write(&recorder.finish().unwrap(), &mut std::fs::File::create(&file).unwrap()).unwrap();
        check(&Estimates::read(&file), &ledger);
        assert_eq!(foreign.semaphores(), "semaphores 0 0", "{method}");
    }
}

#[test]
fn a_listener_that_is_killed_leaves_the_semaphores_at_zero_and_other_processes_never_see_it() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "foreign.c", "foreign", &[&provider_of("otel_memory"), "-O2"]);
    let (mut watched, mut other) = (Foreign::start(&program), Foreign::start(&program));
    assert_eq!(watched.semaphores(), "semaphores 0 0");
    let mut recording = Recording::attach(&[watched.process.pid()]);
    assert_eq!(watched.semaphores(), "semaphores 4 1");
    assert_eq!(other.semaphores(), "semaphores 0 0");
    // A second listener shares the first one's probes, and keeps them when that one is killed.
    let second = Recording::attach(&[watched.process.pid()]);
    assert_eq!(watched.semaphores(), "semaphores 4 1");
    recording.process.signal(Signal::KILL);
    recording.wait(LIMIT);
    assert_eq!(watched.semaphores(), "semaphores 4 1");
    let ledger = watched.ledger();
    check(&Estimates::of(second), &ledger);
    assert_eq!(watched.semaphores(), "semaphores 0 0");
    let mut last = Recording::attach(&[watched.process.pid()]);
    assert_eq!(watched.semaphores(), "semaphores 4 1");
    last.process.signal(Signal::KILL);
    last.wait(LIMIT);
    wait_until("the kernel removes the killed listener's probes", || watched.semaphores() == "semaphores 0 0");
    watched.ledger();
    assert!(watched.process.is_running() && other.process.is_running());
}

#[test]
fn every_call_can_be_traced_instead_and_sampled_mode_needs_an_emitter() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "foreign.c", "foreign", &[&provider_of("otel_memory"), "-O2"]);
    let mut foreign = Foreign::start(&program);
    let recording = Recording::attach_by(fragprof(), &[foreign.process.pid()], &["--mode", "exact"]);
    assert_eq!(foreign.semaphores(), "semaphores 0 0");
    foreign.ledger();
    let report = Estimates::of(recording);
    assert_eq!(report.0["mode"], "exact");
    let sleeper = Process::start(Command::new("sleep").arg("60"));
    let out = folder.path().join("none.pb.gz");
    let done = run(fragprof().args(["record", "--mode", "sampled", "-d", "1s", "-p", &sleeper.pid().to_string(), "-o"]).arg(&out));
    assert_eq!(done.status.code(), Some(3), "{}", done.err);
    assert!(done.err.contains("has no emitter") && done.err.contains("fragprof run"), "{}", done.err);
}

#[test]
fn unsupported_probe_arguments_are_named_and_every_call_is_traced() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "symbolic.c", "symbolic", &["-O2", "-no-pie", "-fno-pie"]);
    let mut foreign = Foreign::start(&program);
    let pid = foreign.process.pid().to_string();
    let page = run(fragprof().args(["doctor", "-p", &pid])).out;
    assert!(page.contains("emitter refused") && page.contains("the_weight"), "{page}");
    let recording = Recording::attach(&[foreign.process.pid()]);
    foreign.ask(b"g");
    let report = Estimates::of(recording);
    assert_eq!(report.0["mode"], "exact");
    assert!(report.said().contains("argument 3 is not supported"), "{}", report.said());
}
