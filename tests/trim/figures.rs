//! The figures of docs/trim.md: given back against predicted, the stall of each arena, the stop of the one thread.

use std::io::Write as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{Target, build, refused, spawn, states, trim};
use crate::support::LIMIT;
use crate::support::build::{LIB_DIR, tool};
use crate::support::process::Process;
use crate::support::serial;

/// Smallest of the largest values: the n-th of a hundred.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted.get((sorted.len() * percent / 100).min(sorted.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// An allocator preloaded; what time alone would purge is put off.
fn with(command: &mut Command, library: Option<&str>) {
    if let Some(library) = library {
        command.env("LD_PRELOAD", format!("{LIB_DIR}/{library}")).env("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1");
    }
}

const ALLOCATORS: [(&str, Option<&str>); 3] =
    [("glibc", None), ("jemalloc", Some("libjemalloc.so.2")), ("tcmalloc", Some("libtcmalloc_minimal.so.4"))];

/// Predicted and given back, of calls that were made.
pub(super) fn pair(report: &Value) -> Option<(f64, f64)> {
    (report["ending"] == "returned").then_some(())?;
    Some((report["predicted_bytes"].as_f64()?, report["given_back_bytes"].as_f64()?))
}

/// Prints how far what was given back is from what was predicted; returns the share of calls within `ratio` or 256 KiB.
fn tell(name: &str, pairs: &[(f64, f64)], ratio: f64, longest: &str) -> f64 {
    let off = |&(predicted, given): &(f64, f64)| (given - predicted).abs();
    let within = pairs.iter().filter(|pair| off(pair) <= (pair.0 * ratio).max(256.0 * 1024.0)).count() as f64 / pairs.len().max(1) as f64;
    let ratios = sorted(pairs.iter().map(|pair| off(pair) / pair.0).collect());
    let predicted = sorted(pairs.iter().map(|pair| pair.0 / f64::from(1 << 20)).collect());
    println!(
        "| {name} | {} | {:.1} MiB | {:.3} % | {:.3} % | {:.0} % | {longest} |",
        pairs.len(),
        percentile(&predicted, 50),
        percentile(&ratios, 50) * 100.0,
        ratios.last().copied().unwrap_or(f64::NAN) * 100.0,
        within * 100.0
    );
    within
}

fn at_rest() -> f64 {
    let mut worst: f64 = 1.0;
    for (name, library) in ALLOCATORS {
        for threads in ["0", "3"] {
            let pairs: Vec<(f64, f64)> = (0..5)
                .filter_map(|_| {
                    let mut command = Command::new(states());
                    command.args(["plain", "96", threads]);
                    with(&mut command, library);
                    let target = Target::start(&mut command);
                    pair(&trim(target.pid(), &["--yes", "--max-stall", "10s"]))
                })
                .collect();
            worst = worst.min(tell(&format!("{name}, at rest, {threads} more threads"), &pairs, 0.01, "–"));
        }
    }
    worst
}

/// A program that allocates all the time, whose peak is over.
fn after_a_peak() -> f64 {
    let mut worst: f64 = 1.0;
    for (name, library) in ALLOCATORS {
        let pairs: Vec<(f64, f64)> = (0..10)
            .filter_map(|_| {
                let mut command = Command::new(build("churn.c", "churn", &["-pthread", "-lm"]));
                command.args(["3", "0", "200", "", "96"]);
                with(&mut command, library);
                let target = Target::start(&mut command);
                std::thread::sleep(Duration::from_millis(500));
                pair(&trim(target.pid(), &["--yes", "--max-stall", "10s"]))
            })
            .collect();
        worst = worst.min(tell(&format!("{name}, under load, after a peak"), &pairs, 0.05, "–"));
    }
    worst
}

/// A program that allocates all the time, and of whose heap little is free for long; the longest of its mallocs is its own measurement.
fn under_load() -> f64 {
    let mut worst: f64 = 1.0;
    for (name, library) in ALLOCATORS {
        let mut command = Command::new(build("churn.c", "churn", &["-pthread", "-lm"]));
        command.args(["3", "0", "200"]);
        with(&mut command, library);
        let target = Target::start(&mut command);
        std::thread::sleep(Duration::from_secs(1));
        let pairs: Vec<(f64, f64)> = (0..30).filter_map(|_| pair(&trim(target.pid(), &["--yes", "--max-stall", "10s"]))).collect();
        let counts: Value = serde_json::from_str(&target.end()).unwrap_or_default();
        let longest = format!("{:.1} ms", counts["longest_malloc_s"].as_f64().unwrap_or(f64::NAN) * 1e3);
        worst = worst.min(tell(&format!("{name}, under load"), &pairs, 0.05, &longest));
    }
    worst
}

/// Commands and answers of the program with an arena for each thread.
struct Stalls {
    process: Process,
    input: std::process::ChildStdin,
    said: usize,
}

impl Stalls {
    fn start(threads: u32, mib: u32) -> Self {
        let program = build("stalls.c", "stalls", &["-pthread"]);
        let mut process = Process::start_piped(Command::new(program).args([threads.to_string(), mib.to_string()]));
        let input = process.input();
        let mut stalls = Self { process, input, said: 0 };
        stalls.next();
        stalls
    }

    fn next(&mut self) -> String {
        let line = self.process.out.nth(self.said, LIMIT).expect("an answer");
        self.said += 1;
        line
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.next()
    }
}

/// Measured over predicted, for each arena of each call: the thread that owns it measures its longest malloc.
fn stalls() -> Vec<f64> {
    let mut factors = Vec::new();
    let mut longest = 0.0f64;
    for (threads, mib) in [(1, 200), (3, 100)] {
        let mut target = Stalls::start(threads, mib);
        for _ in 0..6 {
            target.ask("fill");
            let report = trim(target.process.pid(), &["--yes", "--max-stall", "10s"]);
            assert_eq!(refused(&report), "", "{report}");
            let waits: Value = serde_json::from_str(&target.ask("print")).unwrap();
            for arena in report["arenas"].as_array().unwrap() {
                let wait = waits.as_array().unwrap().iter().find(|wait| wait["address"] == arena["address"]);
                let predicted = arena["predicted_stall_s"].as_f64().unwrap();
                // Below some milliseconds a thread's own turn on a processor is what it waits for.
                if let Some(wait) = wait.filter(|_| predicted > 0.005) {
                    let measured = wait["longest_s"].as_f64().unwrap();
                    longest = longest.max(measured);
                    factors.push(measured / predicted);
                }
            }
        }
    }
    let factors = sorted(factors);
    let within = factors.iter().filter(|factor| (0.5..=2.0).contains(*factor)).count();
    println!(
        "\n| arenas | measured / predicted, smallest | median | largest | within a factor of 2 | longest malloc |\n|---|---|---|---|---|---|"
    );
    println!(
        "| {} | {:.2} | {:.2} | {:.2} | {within} | {:.0} ms |",
        factors.len(),
        percentile(&factors, 0),
        percentile(&factors, 50),
        percentile(&factors, 100),
        longest * 1e3
    );
    factors
}

/// How long the one thread stood, in seconds, on a quiet machine and beside programs that take every processor.
fn stops(name: &str, burners: usize) -> f64 {
    let mut burning: Vec<Child> = (0..burners).map(|_| spawn(Command::new("sh").args(["-c", "while :; do :; done"]))).collect();
    let target = Target::start(Command::new(build("churn.c", "churn", &["-pthread", "-lm"])).args(["1", "0", "200"]));
    let reports = (0..200).map(|_| trim(target.pid(), &["--yes", "--max-stall", "10s"]));
    let stops = sorted(reports.filter_map(|report| report["stopped_s"].as_f64()).map(|stopped| stopped * 1e3).collect());
    target.end();
    burning.iter_mut().for_each(|child| {
        let _ = child.kill();
        let _ = child.wait();
    });
    println!(
        "| {name} | {} | {:.3} ms | {:.3} ms | {:.3} ms |",
        stops.len(),
        percentile(&stops, 50),
        percentile(&stops, 99),
        stops.last().copied().unwrap_or(f64::NAN)
    );
    percentile(&stops, 99)
}

#[test]
#[ignore = "takes minutes: make bench-trim"]
fn figures_of_trims() {
    let _alone = serial();
    println!(
        "\n| heap | calls | predicted, median | off by, median | off by, most | within the goal | longest malloc of another thread |\n|---|---|---|---|---|---|---|"
    );
    let (rest, peak, load) = (at_rest(), after_a_peak(), under_load());
    let factors = stalls();
    println!("\n| machine | calls | stop, median | p99 | longest |\n|---|---|---|---|---|");
    let processors = std::thread::available_parallelism().map_or(2, usize::from);
    stops("quiet", 0);
    let busy = stops("busy", processors * 2);
    println!(
        "\ngoals: 1 % or 256 KiB at rest ({:.0} % of calls), 5 % under load after a peak ({:.0} %; always {:.0} %), p99 of the stop at most 5 ms busy ({busy:.2})",
        rest * 100.0,
        peak * 100.0,
        load * 100.0
    );
    assert!(rest >= 1.0, "at rest");
    assert!(!factors.is_empty());
}

/// How often the program that checks itself lives through a trim, each time a new one, and how long the tool was at it.
fn lives_through(timer: &str, trim: impl Fn(u32)) -> (u32, f64) {
    let mut lived = 0;
    let mut took = Vec::new();
    for _ in 0..12 {
        let mut target = Target::start(Command::new(build("churn.c", "churn", &["-pthread", "-lm"])).args(["2", timer, "200"]));
        std::thread::sleep(Duration::from_secs(1));
        let begun = Instant::now();
        trim(target.pid());
        took.push(begun.elapsed().as_secs_f64());
        std::thread::sleep(Duration::from_millis(500));
        if target.process.is_running() {
            drop(target.process.input());
            let deadline = Instant::now() + Duration::from_secs(20);
            while target.process.is_running() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
            lived += u32::from(!target.process.is_running() && target.process.wait(LIMIT).success());
        }
    }
    (lived, percentile(&sorted(took), 50))
}

#[test]
#[ignore = "takes minutes: make bench-trim"]
fn figures_of_trims_by_a_debugger() {
    let _alone = serial();
    let Some(gdb) = tool("gdb") else { return };
    let by_debugger = |pid: u32| {
        let mut command = Command::new("timeout");
        command.arg("30").arg(&gdb).args(["-p", &pid.to_string(), "-batch", "-ex", "call (int)malloc_trim(0)"]);
        spawn(&mut command).wait().unwrap();
    };
    let by_command = |pid: u32| {
        trim(pid, &["--yes", "--max-stall", "10s"]);
    };
    println!("\n| program | tool | tries | went on correctly | time of the tool, median |\n|---|---|---|---|---|");
    for (timer, name) in [("1", "with a timer of 1 ms"), ("0", "without a timer")] {
        let (lived, took) = lives_through(timer, by_debugger);
        println!("| {name} | gdb | 12 | {lived} | {took:.2} s |");
        let (lived, took) = lives_through(timer, by_command);
        println!("| {name} | fragprof trim | 12 | {lived} | {took:.2} s |");
        assert_eq!(lived, 12, "{name}");
    }
}
