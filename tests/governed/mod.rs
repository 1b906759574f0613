//! `record --mode governed`: estimates from windows, compared with programs whose sites are known; targets stay unharmed.

mod cost;
mod cycles;
mod estimates;
pub mod harm;
mod large;
mod retention;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::LIMIT;
use crate::support::build::output_dir;
use crate::support::process::{Process, run};
use crate::support::recording::fragprof;

/// Builds a program of this directory.
pub fn built(name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/governed").join(format!("{name}.c"));
    output(&format!("governed-{name}"), |fresh| {
        let done = run(Command::new("cc").args(["-O1", "-g", "-fno-builtin", "-o"]).arg(fresh).arg(&source));
        assert!(done.status.success(), "{}", done.err);
    })
}

/// A complete file, even if other tests build or run it at this moment.
fn output(name: &str, build: impl FnOnce(&Path)) -> PathBuf {
    let built = output_dir().join(name);
    let fresh = built.with_extension(std::process::id().to_string());
    build(&fresh);
    std::fs::rename(&fresh, &built).unwrap();
    built
}

/// `busy` with its counter.
pub struct Busy {
    pub process: Process,
    counter: PathBuf,
}

impl Busy {
    pub fn start(args: &[&str]) -> Self {
        let process = Process::start(Command::new(built("busy")).args(args));
        let counter = process.out.wait_for(LIMIT, |line| line.starts_with("/proc/")).unwrap().into();
        Self { process, counter }
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn pairs(&self) -> u64 {
        let bytes = std::fs::read(&self.counter).unwrap();
        u64::from_ne_bytes(bytes[..8].try_into().unwrap())
    }

    /// Pairs per second of its own CPU time, over a short part of it.
    fn pairs_per_s(&self) -> f64 {
        let (pairs, cpu_s) = (self.pairs(), self.cpu_s());
        self.compute(0.5);
        (self.pairs() - pairs) as f64 / (self.cpu_s() - cpu_s)
    }

    /// Waits until it has run for this long from now on.
    fn compute(&self, seconds: f64) {
        let (cpu_s, began) = (self.cpu_s(), Instant::now());
        while self.cpu_s() - cpu_s < seconds {
            assert!(began.elapsed() < LIMIT * 2, "it gets no CPU time");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn cpu_s(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid())).unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
    }
}

/// A governed recording of a process.
struct Governed {
    process: Process,
    dir: tempfile::TempDir,
}

impl Governed {
    fn attach(pid: u32, budget: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = fragprof();
        command.args(["record", "--mode", "governed", "--budget", budget, "--duration", "300s", "-p", &pid.to_string(), "-o"]);
        let process = Process::start(command.arg(dir.path().join("out.pb.gz")));
        let said = process.err.wait_for(LIMIT, |line| line.contains("recording under a budget"));
        assert!(said.is_some(), "it does not record:\n{}", process.err);
        Self { process, dir }
    }

    /// Ends it and returns its report ranked by survivors.
    fn report(self) -> Value {
        self.report_and_text().0
    }

    /// The same, and the report as text.
    fn report_and_text(mut self) -> (Value, String) {
        self.process.signal(Signal::INT);
        let status = self.process.wait(LIMIT);
        assert!(status.success(), "{}", self.process.err);
        let report = |args: &[&str]| {
            let done = run(fragprof().arg("report").arg(self.dir.path().join("out.pb.gz")).args(["--by", "survivors"]).args(args));
            assert!(done.status.success(), "{}", done.err);
            done.out
        };
        (serde_json::from_str(&report(&["--json"])).unwrap(), report(&[]))
    }
}

/// The site of a stack: its innermost function whose name marks it as one.
fn site(stack: &Value) -> Option<&str> {
    let mut names = stack["frames"].as_array()?.iter().filter_map(|frame| frame["function"].as_str());
    names.find(|name| name.starts_with("site_"))
}

/// Sum of a key over the stacks of a site.
fn sum(report: &Value, of: &str, key: &str) -> f64 {
    let stacks = report["stacks"].as_array().unwrap().iter().filter(|stack| site(stack) == Some(of));
    stacks.filter_map(|stack| stack[key].as_f64()).sum()
}
