//! What listening costs: a sample with its stack and record, its free, and whole programs. Measurements, for a quiet machine:
//!
//! ```text
//! make bench-sampler
//! ```

use std::io::Write as _;
use std::process::Command;
use std::time::Instant;

use fragprof::recorder::{Options, Recorder};
use fragprof::units::Pid;
use tempfile::TempDir;

use super::programs::{Environment, compile, sampled};
use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::{Process, run};

/// Rounds, each with every variant: what the machine does meanwhile meets all of them.
const ROUNDS: usize = 5;

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn a_sample_and_its_free() {
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "samples.c", "samples", &["-O2"]);
    let (mut bare, mut heard) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        for (listen, into) in [(false, &mut bare), (true, &mut heard)] {
            // Every allocation is a sample.
            let mut process = Process::start_piped(sampled(&program, 1).arg("100000"));
            let mut input = process.input();
            process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
            let recorder = listen.then(|| {
                let mut recorder = Recorder::new(Options::default()).unwrap();
                recorder.watch(Pid(process.pid())).unwrap();
                recorder
            });
            input.write_all(b"g").unwrap();
            let line = process.out.wait_for(LIMIT, |line| line.starts_with("ns")).unwrap();
            let words: Vec<f64> = line.split_whitespace().skip(1).map(|word| word.parse().unwrap()).collect();
            into.push((words[0], words[1]));
            drop(recorder.map(Recorder::finish));
            drop(input);
        }
    }
    let of = |runs: &[(f64, f64)], part: fn(&(f64, f64)) -> f64| least(&runs.iter().map(part).collect::<Vec<_>>());
    let (allocs, frees) = (of(&heard, |run| run.0) - of(&bare, |run| run.0), of(&heard, |run| run.1) - of(&bare, |run| run.1));
    println!("a sample, 20 frames, over the bare allocation: {:.2} µs (goal 6)", allocs / 1000.0);
    println!("the free of a sampled block, over the bare free: {:.2} µs (goal 1.5)", frees / 1000.0);
}

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn whole_programs() {
    let folder = TempDir::new().unwrap();
    let python = "import json\nfor i in range(60):\n  x=[{'k%d'%j:[j]*5} for j in range(4000)]; json.loads(json.dumps(x))";
    let sql = "create table t(a integer primary key,b text); with recursive n(i) as (select 1 union all select i+1 from n where i<400000) \
               insert into t select i,hex(zeroblob(i%60)) from n; create index x on t(b); select count(*),sum(length(b)) from t;";
    let perl = "my %h; for my $r (1..12) { for my $i (1..60000) { $h{$i} = \"v\" x ($i % 90) } %h = () }";
    let programs: [(&str, Vec<&str>, Environment<'_>); 3] = [
        ("python3", vec!["-c", python], &[("PYTHONMALLOC", "malloc")]),
        ("sqlite3", vec![":memory:", sql], &[]),
        ("perl", vec!["-e", perl], &[]),
    ];
    for (name, arguments, env) in programs {
        let Some(program) = tool(name) else { continue };
        // What is found by that name may be a script that starts others before it.
        let program = if name == "python3" {
            run(Command::new(&program).args(["-c", "import sys; print(sys.executable)"])).out.trim().into()
        } else {
            program
        };
        let fragprof = env!("CARGO_BIN_EXE_fragprof");
        let (mut bare, mut quiet, mut heard, mut heaptrack) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            bare.push(cpu_of(&mut timed(&[], &program, &arguments, env)));
            quiet.push(cpu_of(&mut timed(&[fragprof, "run", "--"], &program, &arguments, env)));
            heard.push(cpu_while_heard(&program, &arguments, env));
            if tool("heaptrack").is_some() {
                let out = folder.path().join("ht").display().to_string();
                heaptrack.push(cpu_of(&mut timed(&["heaptrack", "-o", &out, "--"], &program, &arguments, env)));
            }
        }
        // User and system time, start included; of heaptrack also what it does with what it is told.
        let over = |with: &[f64]| 100.0 * (least(with) / least(&bare) - 1.0);
        println!(
            "{name:<8} bare {:.3} s of CPU time; nobody listens {:+.1} %; listened to {:+.1} %; heaptrack {:+.1} %",
            least(&bare),
            over(&quiet),
            over(&heard),
            over(&heaptrack),
        );
    }
}

/// CPU seconds that the shell's `times` gives for its children.
fn cpu_of(command: &mut Command) -> f64 {
    let done = run(command);
    let line = done.err.lines().rev().find(|line| line.starts_with("cpu ")).unwrap_or_else(|| panic!("{}", done.err)).to_owned();
    line.split_whitespace().skip(1).map(|word| word.parse::<f64>().unwrap()).sum()
}

/// A command that says its own CPU time on standard error: bash's `TIMEFORMAT`.
fn timed(prefix: &[&str], program: &std::path::Path, arguments: &[&str], env: Environment<'_>) -> Command {
    let mut command = Command::new("bash");
    command.args(["-c", "TIMEFORMAT='cpu %3U %3S'; time \"$@\" > /dev/null", "bash"]).args(prefix).arg(program).args(arguments);
    command.envs(env.iter().copied());
    command
}

/// The program's CPU time under `fragprof run`, with a recorder that attaches as soon as it is there.
fn cpu_while_heard(program: &std::path::Path, arguments: &[&str], env: Environment<'_>) -> f64 {
    let fragprof = env!("CARGO_BIN_EXE_fragprof");
    let mut command = timed(&[fragprof, "run", "--"], program, arguments, env);
    let shell = Process::start(&mut command);
    let mut recorder = Recorder::new(Options { follow_children: true, ..Options::default() }).unwrap();
    let children = || std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.pid())).unwrap_or_default();
    let deadline = Instant::now() + LIMIT;
    let mut watched = false;
    while !watched && Instant::now() < deadline {
        let child = children().split_whitespace().find_map(|word| word.parse().ok());
        watched = child.is_some_and(|pid| recorder.watch(Pid(pid)).is_ok());
    }
    while recorder.step(std::time::Duration::from_millis(20)) {}
    drop(recorder.finish());
    let line = shell.err.wait_for(LIMIT, |line| line.starts_with("cpu ")).unwrap();
    line.split_whitespace().skip(1).map(|word| word.parse::<f64>().unwrap()).sum()
}
