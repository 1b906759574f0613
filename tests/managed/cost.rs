//! What a managed frame costs in the kernel: the run time of the programs that `fragprof record` loads, as the kernel counts it, at stacks of
//! different depths.

use std::io::Write as _;
use std::process::Command;

use tempfile::TempDir;

use super::java;
use crate::support::process::Process;
use crate::support::recording::Recording;
use crate::support::{LIMIT, bpf, build, serial};

/// The kernel counts programs' run times as long as it lives.
struct Counting(#[allow(dead_code)] std::os::fd::OwnedFd);

impl Counting {
    fn start() -> Self {
        // SAFETY: a system call wrapper without preconditions.
        let stats = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
        assert!(stats >= 0);
        // SAFETY: the descriptor was just returned and nobody else has it.
        Self(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(stats) })
    }
}

/// Nanoseconds that the programs at allocations have run, whoever loaded them: the test runs alone.
fn programs_ns() -> u64 {
    let names = ["alloc_session", "alloc_entry_multi", "alloc_return_multi", "alloc_entry", "alloc_return"];
    // The kernel keeps the first 15 bytes of a name.
    let is_wanted = |info: &libbpf_rs::query::ProgramInfo| {
        let name = info.name.to_string_lossy();
        !name.is_empty() && names.iter().any(|wanted| wanted.starts_with(&*name))
    };
    libbpf_rs::query::ProgInfoIter::default().filter(is_wanted).map(|info| info.run_time_ns).sum()
}

/// A program that allocates so many times for each line of its input.
struct Program {
    process: Process,
    input: std::process::ChildStdin,
    _recording: Recording,
    done: usize,
}

impl Program {
    fn start(command: &mut Command) -> Self {
        let mut process = Process::start_piped(command);
        let input = process.input();
        assert!(process.out.wait_for(4 * LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        let recording = Recording::attach(&[process.pid()]);
        Self { process, input, _recording: recording, done: 0 }
    }

    /// Nanoseconds of the programs for each of its allocations.
    fn ns(&mut self, line: &str, rounds: u64) -> f64 {
        let before = programs_ns();
        writeln!(self.input, "{line}").unwrap();
        self.done += 1;
        let said = self.process.out.nth(self.done, 4 * LIMIT);
        assert!(said.is_some_and(|line| line.starts_with("done")), "{}\n{}", self.process.out, self.process.err);
        (programs_ns() - before) as f64 / rounds as f64
    }

    /// The least of some measurements: what else the machine does only adds.
    fn least(&mut self, line: &str, rounds: u64) -> f64 {
        (0..5).map(|_| self.ns(line, rounds)).fold(f64::INFINITY, f64::min)
    }
}

const ROUNDS: u64 = 40_000;

#[test]
#[ignore = "a measurement"]
fn cost_of_managed_frames() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    let _counting = Counting::start();
    for java in java::all() {
        let directory = TempDir::new().unwrap();
        java::compile(&java, directory.path(), &[java::source("Deep.java")]);
        let library = java::library("block.c");
        let mut command = java.command(["-XX:CompileCommand=quiet", "-XX:CompileCommand=dontinline,Deep::*"]);
        command.arg(format!("-Dblock={}", library.display())).arg("-cp").arg(directory.path()).arg("Deep");
        let mut program = Program::start(&mut command);
        let mut of = |depth: u32, same: u32| program.least(&format!("{depth} {ROUNDS} {same}"), ROUNDS);
        // The difference of two depths: what each allocation costs beside its frames is the same.
        let (near, far) = (of(20, 0), of(100, 0));
        let (again_near, again_far) = (of(16, 1), of(100, 1));
        println!(
            "JDK {}: {:.0} ns for each compiled frame that the last walk did not have (goal 280), {:.0} ns repeated; a repeated stack of 20 compiled frames {:.2} µs (goal 1.2)",
            java.version,
            (far - near) / 80.0,
            (again_far - again_near) / 84.0,
            again_near / 1000.0
        );
    }
    if let Some(python) = build::tool("python3") {
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/managed/python/deep.py");
        let mut program = Program::start(Command::new(python).arg(script));
        let mut of = |depth: u32| program.least(&format!("{depth} {ROUNDS}"), ROUNDS);
        let costs = [10, 40, 110, 160].map(&mut of);
        let slope = |from: usize, to: usize, frames: f64| (costs[to] - costs[from]) / frames;
        println!(
            "Python: {:.0} ns for each frame up to 40, {:.0} up to 110, {:.0} up to 160 (goal 120)",
            slope(0, 1, 30.0),
            slope(0, 2, 100.0),
            slope(0, 3, 150.0)
        );
    }
}
