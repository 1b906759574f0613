//! What listening costs: a sample with its stack and record, its free, and whole programs in steady state. Measurements, for a quiet
//! machine:
//!
//! ```text
//! make bench-sampler
//! ```

use std::io::Write as _;
use std::process::{ChildStdin, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fragprof::cli::cpu_swap::CpuSwap;
use fragprof::process::Process as Target;
use fragprof::session::tier::windows::cpu_time::of_process_ns;
use fragprof::session::{Choice, Options, Recorder};
use fragprof::units::Pid;
use tempfile::TempDir;

use super::programs::{compile, sampled};
use super::workloads::{Workload, workloads};
use crate::support::LIMIT;
use crate::support::process::Process;

/// Rounds, each with every variant, so that disturbances of the machine affect all of them.
const ROUNDS: usize = 5;
/// Pairs of periods of a whole program: in each pair one process is listened to, then the other.
const SPELLS: usize = 12;
/// A period has about so many units of work, and at least so many seconds.
const UNITS_IN_A_SPELL: f64 = 10.0;
const SPELL_S_MIN: f64 = 1.5;
/// Number of measurements of a program's start.
const STARTS: usize = 21;
/// Units of work before the first that is measured.
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
    /// CPU time of a unit, once it is warm.
    unit_s: f64,
}

impl Running {
    fn start(workload: &Workload, prefix: &[String], env: &[(&str, String)]) -> Self {
        let mut command = workload.command(prefix);
        command.envs(env.iter().map(|(name, value)| (*name, value)));
        let mut process = Process::start_piped(&mut command);
        let input = process.input();
        let mut running = Self { process, input, load: workload.load(), unit_s: 0.0 };
        running.load.begin(&running.process);
        running.unit_s = (0..WARM_UP).map(|_| running.unit().cpu_s).last().unwrap_or_default();
        running
    }

    fn pid(&self) -> Pid {
        Pid(self.process.pid())
    }

    /// One unit of work.
    fn unit(&mut self) -> Unit {
        let (began, before) = (Instant::now(), of_process_ns(self.pid()).unwrap());
        self.load.work(&self.process, &mut self.input);
        Unit { began, ended: Instant::now(), cpu_s: (of_process_ns(self.pid()).unwrap() - before) as f64 / 1e9 }
    }

    /// Works until it is stopped.
    fn work(&mut self, stop: &AtomicBool) -> Vec<Unit> {
        std::iter::from_fn(|| (!stop.load(Ordering::Relaxed)).then(|| self.unit())).collect()
    }
}

/// One unit of work.
#[derive(Clone, Copy)]
struct Unit {
    began: Instant,
    ended: Instant,
    /// CPU time, user and system.
    cpu_s: f64,
}

/// A period in which two programs run side by side.
type Spell = std::ops::Range<Instant>;

/// Mean CPU time of the units that lie in a period.
fn unit_in(units: &[Unit], spell: &Spell) -> f64 {
    let inside: Vec<f64> =
        units.iter().filter(|unit| unit.began >= spell.start && unit.ended <= spell.end).map(|unit| unit.cpu_s).collect();
    assert!(!inside.is_empty(), "no unit of work is as short as a period");
    inside.iter().sum::<f64>() / inside.len() as f64
}

/// Runs two programs side by side during `during`; returns what each did.
fn beside<T>(one: &mut Running, other: &mut Running, during: impl FnOnce() -> T) -> (Vec<Unit>, Vec<Unit>, T) {
    let stop = AtomicBool::new(false);
    let _places = CpuSwap::start([one.pid(), other.pid()]).unwrap();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| one.work(&stop));
        let other = scope.spawn(|| other.work(&stop));
        let done = during();
        stop.store(true, Ordering::Relaxed);
        (one.join().unwrap(), other.join().unwrap(), done)
    })
}

/// How much more a unit costs one program than the other, in percent, in one period side by side.
fn over_in_a_spell(one: &mut Running, other: &mut Running, length: Duration) -> f64 {
    let (one, other, spell) = beside(one, other, || {
        let began = Instant::now();
        std::thread::sleep(length);
        began..Instant::now()
    });
    100.0 * (unit_in(&one, &spell) / unit_in(&other, &spell) - 1.0)
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

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn whole_programs_in_steady_state() {
    let fragprof = env!("CARGO_BIN_EXE_fragprof").to_owned();
    println!(
        "CPU time per unit of work, of two processes side by side of which one is listened to, then the other; median of {SPELLS} such \
        pairs of periods (its 95 % interval)"
    );
    let mut recorder = Recorder::new(Options { source: Choice::Emitter, ..Options::default() }).unwrap();
    for workload in workloads() {
        let sampled = [fragprof.clone(), "run".into(), "--".into()];
        let (mut one, mut other) = (Running::start(&workload, &sampled, &[]), Running::start(&workload, &sampled, &[]));
        let spell_s = (UNITS_IN_A_SPELL * one.unit_s.max(other.unit_s)).max(SPELL_S_MIN);
        let mut bare = Running::start(&workload, &[], &[]);
        let long = Duration::from_secs_f64(spell_s * 4.0);
        // All of them have just started: a heap changes while it works.
        let quiet = over_in_a_spell(&mut one, &mut bare, long);
        let ids = [one.pid(), other.pid()].map(|pid| (pid, Target::open(pid).unwrap().id()));
        let (mut samples, mut pairs) = (0, 0.0);
        let (ones, others, spells) = beside(&mut one, &mut other, || {
            let mut spell = |which: usize| {
                recorder.listen(ids[which].0, false).unwrap();
                // The unwind tables of the walked code must be loaded.
                recorder.step(Duration::from_secs_f64(spell_s / UNITS_IN_A_SPELL + 0.2));
                let told = |recorder: &Recorder| {
                    let totals = recorder.heard().first().map(|heard| heard.totals).unwrap_or_default();
                    (totals.samples, totals.allocations.value)
                };
                let (began, before) = (Instant::now(), told(&recorder));
                recorder.step(Duration::from_secs_f64(spell_s));
                let (ended, after) = (Instant::now(), told(&recorder));
                samples += after.0 - before.0;
                pairs += after.1 - before.1;
                recorder.unwatch(ids[which].1);
                began..ended
            };
            (0..SPELLS).map(|_| [spell(0), spell(1)]).collect::<Vec<_>>()
        });
        // As each of them is listened to once, other differences between them cancel out.
        let over = spells.iter().map(|[first, second]| {
            let ratio = |spell: &Spell| unit_in(&ones, spell) / unit_in(&others, spell);
            100.0 * ((ratio(first) / ratio(second)).sqrt() - 1.0)
        });
        let over: Vec<f64> = over.collect();
        let heard_s: f64 = spells.iter().flatten().map(|spell| (spell.end - spell.start).as_secs_f64()).sum();
        let heard_cpu_s: f64 = (spells.iter())
            .map(|[first, second]| {
                let inside = |units: &[Unit], spell: &Spell| {
                    units.iter().filter(|unit| unit.began >= spell.start && unit.ended <= spell.end).map(|unit| unit.cpu_s).sum::<f64>()
                };
                inside(&ones, first) + inside(&others, second)
            })
            .sum();
        drop((one, other));
        let heaptrack = heaptrack_library().filter(|_| workload.is_compared_with_heaptrack()).map(|library| {
            let mut traced = Running::start(&workload, &[], &[("LD_PRELOAD", library), ("DUMP_HEAPTRACK_OUTPUT", "/dev/null".into())]);
            over_in_a_spell(&mut traced, &mut bare, long)
        });
        let (low, high) = interval_of_median(over.clone());
        println!(
            "{:<22} {:>6.3} s per unit; listened to {:>+6.2} % ({low:+.2} to {high:+.2}; goal 1), {:>5.0} samples per second and about \
             {:>8.0} pairs per CPU-second, {:+.1} ns per pair; without a listener {quiet:>+6.2} % over a process without the sampler; heaptrack {}",
            workload.name,
            bare.unit_s,
            median(over.clone()),
            samples as f64 / heard_s,
            pairs / heard_cpu_s,
            // The difference per allocation with its free, including samples.
            median(over) / 100.0 * heard_cpu_s / pairs * 1e9,
            heaptrack.map_or_else(|| "was not compared".to_owned(), |over| format!("{over:+.0} %")),
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
        median((0..STARTS).map(cpu).collect())
    };
    let fragprof = env!("CARGO_BIN_EXE_fragprof");
    println!("a program's start: {:.0} ms more CPU time, once (true under `fragprof run`)", run(&[fragprof, "run", "--"]) - run(&[]));
}

fn heaptrack_library() -> Option<String> {
    let places = ["/usr/lib/heaptrack/libheaptrack_preload.so", "/usr/lib/x86_64-linux-gnu/heaptrack/libheaptrack_preload.so"];
    places.into_iter().find(|path| std::path::Path::new(path).exists()).map(str::to_owned)
}
