//! Programs with known problems, each with its correct verdict, and an independent truth: the allocator's own count, the effect of its own
//! trim or purge, the JVM's statistics, the kernel's count.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command};
use std::time::Instant;

use serde_json::Value;
use tempfile::TempDir;

use super::{explain, predicted};
use crate::support::process::{Process, run};
use crate::support::{LIMIT, build};

/// A program and its correct verdict.
pub struct Owner {
    /// What it does.
    pub name: &'static str,
    /// The correct verdict, as fragprof names it.
    pub answer: &'static str,
    /// Starts it; when this returns, it has done its work or is doing it.
    start: fn() -> Running,
    /// Compares fragprof's result with independent statistics: the allocator's own, from before and after the census.
    truth: fn(&mut Running, &Value, Accounts),
}

/// The bytes that malloc itself counted as in use.
type Accounts = Option<Between>;

/// What malloc counted before and after the censuses.
#[derive(Clone, Copy)]
struct Between {
    before: u64,
    after: u64,
    /// Seconds from one count to the other.
    span_s: f64,
}

/// A running program.
pub struct Running {
    process: Process,
    input: Option<ChildStdin>,
    said: usize,
    /// Whether it responds to `account`.
    accounts: bool,
    _files: Option<TempDir>,
}

impl Owner {
    /// Starts the program.
    pub fn start(&self) -> Running {
        (self.start)()
    }

    /// Whether a verdict is correct. From outside a leak cannot be distinguished from a filling cache until it has lasted half an hour, so
    /// `growing` is correct for it.
    pub fn is_right(&self, verdict: &str) -> bool {
        verdict == self.answer || (self.answer == "leak" && verdict == "growing")
    }

    /// Runs `fragprof explain`, and compares the result with the correct verdict and the truth.
    #[track_caller]
    pub fn prove(&self) {
        let mut running = self.start();
        let (before, began) = (running.account(), Instant::now());
        // Owners are determined after the censuses, which would lengthen the time between the two accounts.
        let verdict = explain(&[&running.pid().to_string(), "--over", "3s", "--no-owners"]);
        let after = running.account();
        let accounts = before.zip(after).map(|(before, after)| Between { before, after, span_s: began.elapsed().as_secs_f64() });
        assert!(self.is_right(verdict["verdict"].as_str().unwrap()), "{}: {verdict}", self.name);
        (self.truth)(&mut running, &verdict, accounts);
    }
}

impl Running {
    fn of(mut process: Process, accounts: bool, files: Option<TempDir>) -> Self {
        let input = process.input();
        assert!(process.out.nth(0, LIMIT).is_some(), "no word: {}", process.err);
        Self { process, input: Some(input), said: 1, accounts, _files: files }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends a line and returns the response.
    fn ask(&mut self, line: &str) -> String {
        // In one write: the programs respond to what one read returns.
        self.input.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.said += 1;
        self.process.out.nth(self.said - 1, LIMIT).unwrap_or_else(|| panic!("no answer to {line}: {}", self.process.err))
    }

    fn account(&mut self) -> Option<u64> {
        self.accounts.then(|| self.ask("account").parse().unwrap())
    }

    /// A figure of the process's `smaps_rollup`, in bytes.
    fn rollup(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }

    /// Bytes returned by a call that the process makes on request.
    fn given_back(&mut self, call: &str) -> u64 {
        let before = self.rollup("Anonymous:");
        assert_eq!(self.ask(call), "done");
        before.saturating_sub(self.rollup("Anonymous:"))
    }
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/verdicts").join(name)
}

/// Starts one of `courses.c`.
fn course(arguments: &[&str]) -> Running {
    let program = build::standalone(&source("courses.c"), &["-lpthread"]);
    Running::of(Process::start_piped(Command::new(program).args(arguments)), true, None)
}

/// Starts one of `troubles.c`.
fn trouble(what: &str, environment: &[(&str, &str)]) -> Running {
    let program = build::standalone(&source("troubles.c"), &[]);
    Running::of(Process::start_piped(Command::new(program).arg(what).envs(environment.iter().copied())), false, None)
}

fn java(what: &str) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let made = run(Command::new("javac").arg("-nowarn").arg("-d").arg(directory.path()).arg(source("Sides.java")));
    assert!(made.status.success(), "{}", made.err);
    let mut command = Command::new("java");
    command.args(["-XX:+UseSerialGC", "-Xms64m", "-Xmx192m", "-cp"]).arg(directory.path()).args(["Sides", what]);
    Running::of(Process::start_piped(&mut command), false, Some(directory))
}

/// The live bytes of malloc's heap by fragprof are between malloc's counts before and after.
fn between_accounts(_: &mut Running, verdict: &Value, accounts: Accounts) {
    let evidence = &verdict["evidence"];
    // Where a runtime has a heap of its own, malloc does not count it.
    let of_malloc = evidence["heaps"].as_array().and_then(|heaps| heaps.iter().find(|heap| heap["heap"] == "glibc"));
    let live = of_malloc.unwrap_or(evidence)["live_bytes"].as_u64().unwrap();
    let Between { before, after, .. } = accounts.unwrap();
    // The C library allocates buffers of its streams in between.
    let slack = 64 << 10;
    assert!(live + slack >= before.min(after) && live <= before.max(after) + slack, "{live} is not within {before} and {after}: {verdict}");
}

/// The growth rate agrees with malloc's counts.
fn as_fast_as_the_account(running: &mut Running, verdict: &Value, accounts: Accounts) {
    between_accounts(running, verdict, accounts);
    let change = &verdict["evidence"]["change"];
    let counted = accounts.unwrap();
    let grown = (counted.after - counted.before) as f64;
    let (span_s, told) = (change["span_s"].as_f64().unwrap(), change["live_bytes_per_s"].as_f64().unwrap());
    // What grew between the censuses grew between the counts too. On a busy machine these are further apart, so that each rate has its own time.
    let rate = grown / counted.span_s;
    assert!(
        told * span_s <= grown * 1.1 && told >= rate / 2.0,
        "{told} bytes per second in {span_s} s, counted {grown} in {}: {verdict}",
        counted.span_s
    );
}

fn trim_comes_true(running: &mut Running, verdict: &Value, _: Accounts) {
    gives_back(predicted(verdict, "malloc_trim"), running.given_back("trim"), verdict);
}

fn purge_comes_true(running: &mut Running, verdict: &Value, _: Accounts) {
    let told = verdict["remedies"].to_string();
    assert!(!told.contains("malloc_trim") && verdict["remedies"][0]["action"].as_str().unwrap().contains("decay"), "{verdict}");
    gives_back(predicted(verdict, "purge"), running.given_back("purge"), verdict);
}

#[track_caller]
fn gives_back(predicted: u64, returned: u64, verdict: &Value) {
    assert!(predicted > 16 << 20, "{verdict}");
    assert!(returned.abs_diff(predicted) <= (predicted / 100).max(256 << 10), "predicted {predicted}, returned {returned}: {verdict}");
}

fn trim_does_not_help(running: &mut Running, verdict: &Value, _: Accounts) {
    let pinned = verdict["evidence"]["pinned_bytes"].as_u64().unwrap();
    assert!(pinned > 16 << 20 && running.given_back("trim") < pinned / 20, "{verdict}");
}

/// Fewer arenas save at most the predicted bytes, and a trim exactly the predicted ones.
fn arenas_hold_it(running: &mut Running, verdict: &Value, _: Accounts) {
    assert!(verdict["remedies"][0]["action"].as_str().unwrap().contains("malloc_trim"), "{verdict}");
    let fewer = trouble("arenas", &[("MALLOC_ARENA_MAX", "2")]);
    let saved = running.rollup("Anonymous:").saturating_sub(fewer.rollup("Anonymous:"));
    let limit = predicted(verdict, "MALLOC_ARENA_MAX");
    assert!(saved <= limit + limit / 20, "at most {limit}, saved {saved}: {verdict}");
    trim_comes_true(running, verdict, None);
}

/// The growing part outside malloc agrees with the kernel's count of anonymous memory without the heap.
fn outside(running: &mut Running, verdict: &Value, accounts: Accounts) {
    assert!(verdict["summary"].as_str().unwrap().contains("outside malloc"), "{verdict}");
    let parts = verdict["evidence"]["not_malloc"].as_array().unwrap();
    let told: u64 = parts.iter().filter(|part| part["kind"] != "program_files").map(|part| part["resident_bytes"].as_u64().unwrap()).sum();
    let besides = running.rollup("Anonymous:") - accounts.unwrap().after;
    // It has grown since.
    assert!(told <= besides && told >= besides / 2, "{told} of {besides}: {verdict}");
}

/// The zeros in the huge pages are the part of the block that was never written.
fn zeros_in_huge_pages(running: &mut Running, verdict: &Value, _: Accounts) {
    let huge = running.rollup("AnonHugePages:");
    let zero = verdict["evidence"]["huge_zero_bytes_est"].as_u64().unwrap();
    assert!(zero <= huge && zero >= huge * 9 / 10, "{zero} of {huge}: {verdict}");
}

fn jcmd(running: &Running, command: &str) -> String {
    let done = run(Command::new("jcmd").args([&running.pid().to_string(), command]));
    assert!(done.status.success(), "{}\n{}", done.out, done.err);
    done.out
}

/// The JVM trims its malloc heap itself, and prints the result: `RSS+Swap: 354M->281M (-74236K)`.
fn jvm_trims_it(running: &mut Running, verdict: &Value, _: Accounts) {
    let kinds: Vec<&str> = verdict["findings"].as_array().unwrap().iter().map(|finding| finding["verdict"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["hoarding", "not_malloc"], "{verdict}");
    let said = jcmd(running, "System.trim_native_heap");
    let returned =
        said.split("(-").nth(1).and_then(|rest| rest.split('K').next()?.parse::<u64>().ok()).unwrap_or_else(|| panic!("{said}")) << 10;
    let predicted = predicted(verdict, "malloc_trim");
    // The JVM continues meanwhile, and allocates for the command itself.
    assert!(returned.abs_diff(predicted) <= predicted / 20, "predicted {predicted}, returned {returned}");
}

/// The JVM's own statistics: `total 174784K, used 171470K` of each generation.
fn jvm_heap_is_full(running: &mut Running, verdict: &Value, _: Accounts) {
    let said = jcmd(running, "GC.heap_info");
    let generations = said.lines().filter(|line| line.contains("generation"));
    let used: u64 =
        generations.map(|line| line.split("used ").nth(1).unwrap().split('K').next().unwrap().parse::<u64>().unwrap() << 10).sum();
    let parts = verdict["evidence"]["not_malloc"].as_array().unwrap();
    let heap = parts.iter().find(|part| part["kind"] == "java_heap").unwrap()["resident_bytes"].as_u64().unwrap();
    assert!(used > 160 << 20 && heap >= used && heap <= 192 << 20, "{heap} resident, {used} used: {verdict}");
}

/// There is no independent figure; only the verdict is checked.
fn content(_: &mut Running, _: &Value, _: Accounts) {}

const JEMALLOC_KEEPS: &str = "dirty_decay_ms:-1,muzzy_decay_ms:-1,narenas:16";

/// The programs.
pub const OWNERS: &[Owner] = &[
    Owner { name: "a leak in C", answer: "leak", start: || course(&["leak", "4"]), truth: as_fast_as_the_account },
    Owner { name: "a slow leak in C", answer: "leak", start: || course(&["slow", "0.25"]), truth: as_fast_as_the_account },
    Owner {
        name: "a Python list that is never emptied",
        answer: "leak",
        start: || Running::of(Process::start_piped(Command::new("python3").arg(source("keeps.py"))), true, None),
        truth: as_fast_as_the_account,
    },
    Owner { name: "an LRU cache that fills", answer: "growing", start: || course(&["lru", "0.5"]), truth: as_fast_as_the_account },
    Owner {
        name: "an LRU cache that is full",
        answer: "healthy",
        start: || {
            let mut running = course(&["lru", "200"]);
            let full = 40_000 * 1008;
            while running.account().unwrap() < full {}
            running
        },
        truth: between_accounts,
    },
    Owner { name: "a load that comes and goes", answer: "healthy", start: || course(&["sawtooth", "60"]), truth: content },
    Owner { name: "tables that are filled and flushed", answer: "healthy", start: || course(&["memtable", "60"]), truth: content },
    Owner { name: "survivors on every page", answer: "fragmentation", start: || trouble("fragment", &[]), truth: trim_does_not_help },
    Owner { name: "free pages after a peak", answer: "hoarding", start: || trouble("hoard", &[]), truth: trim_comes_true },
    Owner {
        name: "free memory of many threads",
        answer: "arena_blow_up",
        start: || trouble("arenas", &[("GLIBC_TUNABLES", "glibc.malloc.arena_max=64:glibc.malloc.trim_threshold=1073741824")]),
        truth: arenas_hold_it,
    },
    Owner {
        name: "jemalloc that keeps dirty pages",
        answer: "hoarding",
        start: || {
            let library = format!("{}/libjemalloc.so.2", build::LIB_DIR);
            trouble("arenas", &[("LD_PRELOAD", &library), ("MALLOC_CONF", JEMALLOC_KEEPS)])
        },
        truth: purge_comes_true,
    },
    Owner { name: "a large block in huge pages", answer: "huge_page_bloat", start: || course(&["bloat"]), truth: zeros_in_huge_pages },
    Owner { name: "a JVM with free pages in malloc's heap", answer: "hoarding", start: || java("native"), truth: jvm_trims_it },
    Owner { name: "a JVM with a full Java heap", answer: "not_malloc", start: || java("full"), truth: jvm_heap_is_full },
    Owner { name: "mappings of the program's own that grow", answer: "growing", start: || course(&["mappings", "8"]), truth: outside },
    Owner { name: "more and more threads", answer: "growing", start: || course(&["stacks", "8"]), truth: outside },
    Owner {
        name: "an idle Redis",
        answer: "healthy",
        start: || {
            let directory = tempfile::tempdir().unwrap();
            let mut command = Command::new("redis-server");
            command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(directory.path().join("socket"));
            let process = Process::start_piped(&mut command);
            assert!(process.out.wait_for(LIMIT, |line| line.contains("now ready to accept")).is_some(), "{}", process.out);
            Running { process, input: None, said: 0, accounts: false, _files: Some(directory) }
        },
        truth: content,
    },
    Owner { name: "a heap in use", answer: "healthy", start: || trouble("healthy", &[]), truth: content },
];

/// The program of that name.
pub fn owner(name: &str) -> &'static Owner {
    OWNERS.iter().find(|owner| owner.name == name).unwrap_or_else(|| panic!("no program {name}"))
}
