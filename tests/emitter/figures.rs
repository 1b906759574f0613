//! What listening costs: a sample with its stack and record, its free, and whole programs in steady state. Measurements, for a quiet
//! machine:
//!
//! ```text
//! make bench-sampler
//! ```

use std::io::Write as _;
use std::process::{ChildStdin, Command};
use std::time::Duration;

use fragprof::recorder::governed::process_cpu_ns;
use fragprof::recorder::{Choice, Options, Recorder};
use fragprof::target::Process as Target;
use fragprof::units::Pid;
use tempfile::TempDir;

use super::programs::{compile, sampled};
use super::workloads::{Workload, workloads};
use crate::support::LIMIT;
use crate::support::process::Process;

/// Rounds, each with every variant: what the machine does meanwhile meets all of them.
const ROUNDS: usize = 5;
/// Rounds of a whole program.
const PROGRAM_ROUNDS: usize = 21;
/// A unit that takes less processor time is repeated until it has this much: short ones scatter more.
const UNIT_S: f64 = 0.4;
/// Units of work before the first that counts.
const WARM_UP: usize = 3;

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
            let mut process = Process::start_piped(sampled(&program, 1024).arg("100000"));
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
            into.push((words[0], words[1], words[2] / 1e6));
            drop(recorder.map(Recorder::finish));
            drop(input);
        }
    }
    let of = |runs: &[(f64, f64, f64)], part: fn(&(f64, f64, f64)) -> f64| least(&runs.iter().map(part).collect::<Vec<_>>());
    let share = of(&heard, |run| run.2);
    let (allocs, frees) = (of(&heard, |run| run.0) - of(&bare, |run| run.0), of(&heard, |run| run.1) - of(&bare, |run| run.1));
    println!("a sample, 20 frames, over the bare allocation: {:.2} µs (goal 6)", allocs / share / 1000.0);
    println!("the free of a sampled block, over the bare free: {:.2} µs (goal 1.5)", frees / share / 1000.0);
}

/// A program that works on demand.
struct Running {
    process: Process,
    input: ChildStdin,
    load: Box<dyn super::workloads::Load>,
    /// How often the work is done for one unit.
    times: usize,
}

impl Running {
    fn start(workload: &Workload, prefix: &[String], env: &[(&str, String)]) -> Self {
        let mut command = workload.command(prefix);
        command.envs(env.iter().map(|(name, value)| (*name, value)));
        let mut process = Process::start_piped(&mut command);
        let input = process.input();
        let mut running = Self { process, input, load: workload.load(), times: 1 };
        running.load.begin(&running.process);
        let last = (0..WARM_UP).map(|_| running.unit()).last().unwrap_or(UNIT_S);
        running.times = (UNIT_S / last.max(0.001)).ceil().clamp(1.0, 20.0) as usize;
        running
    }

    /// Processor time of one unit of work, user and system.
    fn unit(&mut self) -> f64 {
        let pid = Pid(self.process.pid());
        let before = process_cpu_ns(pid).unwrap();
        for _ in 0..self.times {
            self.load.work(&self.process, &mut self.input);
        }
        (process_cpu_ns(pid).unwrap() - before) as f64 / 1e9
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The interval that holds the median in 95 of 100 cases, whatever the distribution: between order statistics (a binomial count of ½).
fn interval_of_median(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let count = values.len() as f64;
    let low = ((count - 1.96 * count.sqrt()) / 2.0).floor().max(0.0) as usize;
    (values[low], values[values.len() - 1 - low])
}

/// Ratios of adjacent units, as percents over.
fn over(with: &[f64], without: &[f64]) -> Vec<f64> {
    with.iter().zip(without).map(|(with, without)| 100.0 * (with / without - 1.0)).collect()
}

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn whole_programs_in_steady_state() {
    let fragprof = env!("CARGO_BIN_EXE_fragprof").to_owned();
    println!(
        "processor time a unit of work; the same process listened to and not, in turn; median of {PROGRAM_ROUNDS} pairs (its 95 % interval)"
    );
    let mut recorder = Recorder::new(Options { source: Choice::Emitter, ..Options::default() }).unwrap();
    for workload in workloads() {
        let mut bare = Running::start(&workload, &[], &[]);
        let mut own = Running::start(&workload, &[fragprof.clone(), "run".into(), "--".into()], &[]);
        let mut heaptrack = heaptrack_library()
            .filter(|_| workload.is_compared_with_heaptrack())
            .map(|library| Running::start(&workload, &[], &[("LD_PRELOAD", library), ("DUMP_HEAPTRACK_OUTPUT", "/dev/null".into())]));
        let pid = Pid(own.process.pid());
        let id = Target::open(pid).unwrap().id();
        let (mut alone, mut quiet, mut heard, mut traced, mut start) = (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut samples, mut pairs, mut heard_s) = (0, 0.0, 0.0);
        for round in 0..PROGRAM_ROUNDS {
            alone.push(bare.unit());
            // One order, then the other.
            for listen in if round % 2 == 0 { [false, true] } else { [true, false] } {
                if listen {
                    let before = process_cpu_ns(pid).unwrap();
                    recorder.listen(pid, false).unwrap();
                    start.push((process_cpu_ns(pid).unwrap() - before) as f64 / 1e6);
                    // Its tables are there when the code that is walked is.
                    let first = own.unit();
                    recorder.step(Duration::from_millis(100));
                    start.push((first * 1e3).max(0.0));
                    let told = |recorder: &Recorder| {
                        let totals = recorder.heard().first().map(|heard| heard.totals).unwrap_or_default();
                        (totals.samples, totals.allocations.value)
                    };
                    let before = told(&recorder);
                    heard.push(own.unit());
                    recorder.step(Duration::from_millis(20));
                    let after = told(&recorder);
                    samples += after.0 - before.0;
                    pairs += after.1 - before.1;
                    heard_s += heard.last().unwrap();
                    recorder.unwatch(id);
                } else {
                    own.unit();
                    quiet.push(own.unit());
                }
            }
            traced.extend(heaptrack.as_mut().map(Running::unit));
        }
        let own_over = over(&heard, &quiet);
        let (low, high) = interval_of_median(own_over.clone());
        // What the difference comes to for each allocation with its free, samples included.
        let pair_ns = median(own_over.clone()) / 100.0 * heard_s / pairs * 1e9;
        println!(
            "{:<22} {:>6.3} s a unit; listened to {:>+6.2} % ({low:+.2} to {high:+.2}; goal 1), {:>5.0} samples and about {:>9.0} pairs a CPU-second, {pair_ns:+.0} ns a pair; nobody listens {:>+6.2} % over \
             a process without it; heaptrack {}",
            workload.name,
            median(quiet.clone()),
            median(own_over),
            samples as f64 / heard_s,
            pairs / heard_s,
            100.0 * (median(quiet) / median(alone.clone()) - 1.0),
            if traced.is_empty() {
                "is not installed".to_owned()
            } else {
                format!("{:+.0} %", 100.0 * (median(traced) / median(alone) - 1.0))
            },
        );
    }
}

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn a_programs_start() {
    let run = |prefix: &[&str]| {
        let cpu = |_: usize| {
            let mut command = Command::new("bash");
            command.args(["-c", "TIMEFORMAT='%3U %3S'; time \"$@\"", "bash"]).args(prefix).arg("/bin/true");
            let done = crate::support::process::run(&mut command);
            done.err.split_whitespace().map(|word| word.parse::<f64>().unwrap()).sum::<f64>() * 1e3
        };
        median((0..PROGRAM_ROUNDS).map(cpu).collect())
    };
    let fragprof = env!("CARGO_BIN_EXE_fragprof");
    println!(
        "a program's start: {:.0} ms of processor time more, once (true under `fragprof run`)",
        run(&[fragprof, "run", "--"]) - run(&[])
    );
}

fn heaptrack_library() -> Option<String> {
    let places = ["/usr/lib/heaptrack/libheaptrack_preload.so", "/usr/lib/x86_64-linux-gnu/heaptrack/libheaptrack_preload.so"];
    places.into_iter().find(|path| std::path::Path::new(path).exists()).map(str::to_owned)
}
