//! The census's figures, each with its goal or compared with something that was measured in the same run: `make bench-census`, or
//! `cargo bench --bench census -- [SECTION…] [--walks N] [--gib N] [--allocator NAME]` with the sections `walk`, `loss`,
//! `rest`, `running`, `round`, `trim`; `--allocator` is for `walk`.
//!
//! Targets are real processes; the reference is the allocator's or the program's own account. Times are CPU time of the one thread,
//! because the machine may be shared.

#![allow(clippy::unwrap_used)]

#[path = "../tests/census/target.rs"]
#[allow(dead_code)]
mod target;

use std::ops::Range;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use fragprof::census::memory::Piece;
use fragprof::census::not_malloc::ResidentMapping;
use fragprof::census::{LayoutCache, Level, LiveMemory, Memory, MemoryError, Options, Pace, Taken, take};
use fragprof::heap::residency::PageRuns;
use fragprof::process::{Maps, Process};
use fragprof::units::Pid;
use rustix::time::{ClockId, clock_gettime};
use serde_json::Value;

use target::{Target, build};

const MIB: f64 = 1_048_576.0;
const GIB: f64 = 1_073_741_824.0;
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

type Section = (&'static str, fn(&Arguments));

struct Arguments {
    sections: Vec<String>,
    walks: usize,
    gib: u64,
    allocator: Option<String>,
}

fn main() {
    let mut arguments = Arguments { sections: Vec::new(), walks: 60, gib: 2, allocator: None };
    let mut rest = std::env::args().skip(1);
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().expect("a value follows");
        match argument.as_str() {
            "--walks" => arguments.walks = value().parse().expect("a number"),
            "--gib" => arguments.gib = value().parse().expect("a number"),
            "--allocator" => arguments.allocator = Some(value()),
            // cargo passes --bench.
            option if option.starts_with('-') => {}
            section => arguments.sections.push(section.to_owned()),
        }
    }
    let sections: [Section; 6] =
        [("walk", walk), ("loss", loss), ("rest", rest_error), ("running", running), ("round", round), ("trim", trim)];
    for (name, section) in sections {
        if arguments.sections.is_empty() || arguments.sections.iter().any(|wanted| wanted == name) {
            section(&arguments);
        }
    }
}

/// Prints a figure with its goal, their ratio, and whether the goal is reached.
fn against(name: &str, measured: f64, goal: f64, unit: &str) {
    let verdict = if measured <= goal { "reached" } else { "MISSED" };
    println!("  {name:<58} {measured:>10.4} {unit:<6} goal {goal} {unit}: {:.2} of it, {verdict}", measured / goal);
}

fn heaps() -> Command {
    Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]))
}

fn options(level: Level) -> Options {
    Options { level, pace: Pace::default(), with_not_malloc: false }
}

fn census(target: &Target, level: Level, layouts: &mut LayoutCache) -> Taken {
    take(&target.memory(), target.pid(), "target", options(level), layouts).unwrap()
}

/// Elapsed time, not that of a processor.
fn elapsed_seconds(work: impl FnOnce()) -> f64 {
    let started = Instant::now();
    work();
    started.elapsed().as_secs_f64()
}

fn seconds(work: impl FnOnce()) -> f64 {
    let started = thread_cpu_seconds();
    work();
    thread_cpu_seconds() - started
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Time that the kernel needs to copy the heap in windows of the same size: the lower limit of every walk.
fn copy_seconds(target: &Target, ranges: &[Range<u64>]) -> f64 {
    let memory = target.memory();
    let mut window = vec![0u8; 256 << 10];
    seconds(|| {
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                let bytes = usize::try_from(range.end - at).unwrap().min(window.len());
                memory.read_pieces(&[Piece { addr: at, bytes }], &mut window[..bytes]);
                at += bytes as u64;
            }
        }
    })
}

fn own_status(key: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
}

/// A heap that is walked: its allocator's name, bytes of its blocks, seconds per GiB that a walk may take, and the program that makes it.
type Walked = (&'static str, u64, f64, Command);

fn walked() -> Vec<Walked> {
    let preloaded = |library: &Path| {
        let mut command = heaps();
        command.env("LD_PRELOAD", library);
        command
    };
    let packaged = |library: &str| preloaded(&Path::new(LIBRARIES).join(library));
    let mut all = vec![
        ("glibc", 240, 0.25, heaps()),
        ("glibc", 70_000, 0.05, heaps()),
        ("jemalloc", 240, 0.25, packaged("libjemalloc.so.2")),
        ("tcmalloc", 240, 0.25, packaged("libtcmalloc_minimal.so.4")),
        ("mimalloc", 240, 0.25, packaged("libmimalloc.so.2")),
        ("pymalloc", 240, 0.25, python()),
    ];
    // No distribution has it: `make google-tcmalloc-test` builds it.
    let built = std::env::var_os("FRAGPROF_TEST_GOOGLE_TCMALLOC");
    let files = built.iter().flat_map(std::env::split_paths);
    all.extend(
        files.filter(|file| file.extension().is_some_and(|end| end == "so")).map(|file| ("google_tcmalloc", 240, 0.25, preloaded(&file))),
    );
    all
}

/// An interpreter that takes the same command, with objects as blocks.
fn python() -> Command {
    const WORK: &str = "import sys\n\
        for line in sys.stdin:\n\
        \x20   _, size, mib = line.split()\n\
        \x20   size = int(size)\n\
        \x20   kept = [bytes(size - sys.getsizeof(b'')) for _ in range((int(mib) << 20) // size)]\n\
        \x20   del kept[::4]\n\
        \x20   print('{}', flush=True)\n";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", WORK]);
    command
}

/// Time and memory of the three levels on heaps of small and of large chunks, of each allocator.
fn walk(arguments: &Arguments) {
    let is_wanted = |name: &str| arguments.allocator.as_deref().is_none_or(|wanted| wanted == name);
    for (allocator, size, goal_s_gib, mut command) in walked().into_iter().filter(|one| is_wanted(one.0)) {
        let mut target = Target::start(&mut command);
        target.tell(&format!("fill {size} {}", arguments.gib << 10));
        let mut layouts = LayoutCache::default();
        // Warm: the first one also searches for the layouts.
        let first_ms = 1e3 * seconds(|| drop(census(&target, Level::Top, &mut layouts)));
        let (mut walks, mut copies, mut tops, mut samples) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut alone, mut together) = (Vec::new(), Vec::new());
        let (mut gib, mut chunks, mut sample_error, mut table_bytes) = (0.0, 0.0, Vec::new(), 0);
        for _ in 0..5 {
            let mut taken = None;
            walks.push(seconds(|| taken = Some(census(&target, Level::Full, &mut layouts))));
            let taken = taken.unwrap();
            let nth = taken.census.heaps.iter().position(|heap| heap.allocator.name() == allocator).unwrap();
            let (heap, own) = (&taken.census.heaps[nth], &taken.heaps[nth]);
            assert!(taken.census.walk.usable);
            gib = heap.ladder.extent_bytes as f64 / GIB;
            chunks = own.chunks.len() as f64;
            table_bytes = own.chunks.table_bytes();
            for (threads, elapsed) in [(1, &mut alone), (2, &mut together)] {
                let options = Options { pace: Pace { threads, ..Pace::default() }, ..options(Level::Full) };
                let memory = target.memory();
                elapsed.push(elapsed_seconds(|| drop(take(&memory, target.pid(), "target", options, &mut layouts).unwrap())));
            }
            let ranges: Vec<Range<u64>> = own.extents.iter().map(|(_, range)| range.clone()).collect();
            copies.push(copy_seconds(&target, &ranges));
            tops.push(1e3 * seconds(|| drop(census(&target, Level::Top, &mut layouts))));
            let mut sampled = None;
            samples.push(1e3 * seconds(|| sampled = Some(census(&target, Level::Sampled, &mut layouts))));
            let sampled = sampled.unwrap();
            if let (Some(estimate), Some(live)) = (sampled.census.heaps[nth].live_bytes_est, heap.ladder.live_bytes) {
                sample_error.push((estimate as f64 - live as f64).abs() / live as f64);
            }
        }
        println!("walk: {allocator}, {gib:.2} GiB in {:.2} M chunks from blocks of {size} bytes", chunks / 1e6);
        let walk_s = median(walks);
        against("full walk", walk_s / gib, goal_s_gib, "s/GiB");
        println!("  {:<58} {:>10.2} x", "  against the kernel's copy of the same bytes", walk_s / median(copies));
        let (alone, together) = (median(alone), median(together));
        println!("  {:<58} {:>10.4} s/GiB", "  elapsed, with one thread", alone / gib);
        println!("  {:<58} {:>10.4} s/GiB, {:.2} of that", "  elapsed, with two threads", together / gib, together / alone);
        // tcmalloc's walk counts by spans.
        if chunks > 0.0 {
            println!("  {:<58} {:>10.1} ns", "  per chunk", walk_s * 1e9 / chunks);
        }
        against("level top", median(tops), 1.0, "ms");
        println!("  {:<58} {first_ms:>10.1} ms", "  the first one, which searches for the layouts");
        against("level sampled", median(samples), 20.0, "ms");
        if !sample_error.is_empty() {
            let mean = sample_error.iter().sum::<f64>() / sample_error.len() as f64;
            println!("  {:<58} {:>10.2} %", "  its error, mean", 100.0 * mean);
        }
        // Memory, in a process that has done nothing else with it: the high-water mark is reset before the walk.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let before = own_status("VmRSS");
        let taken = census(&target, Level::Full, &mut layouts);
        let grown = own_status("VmHWM") - before;
        println!("  {:<58} {:>10.1} MiB", "memory of the walk, in addition to before", grown / MIB);
        against(
            "  and everything the walk's table needs",
            (table_bytes as f64 + grown.max(0.0) - grown.min(table_bytes as f64)) / MIB,
            64.0 + 8.0 * chunks / MIB,
            "MiB",
        );
        // The table and what was read of it grow with the heap; the rest is needed for a heap of any size.
        let scale = 10.0 / gib;
        against("  that for 10 GiB, in proportion", grown.max(0.0) * scale / MIB, 64.0 + 8.0 * chunks * scale / MIB, "MiB");
        drop(taken);
    }
}

/// The target's own counters, read without its help.
struct Counters {
    addrs: Vec<u64>,
}

impl Counters {
    fn of(started: &Value) -> Self {
        Self { addrs: started["counters"].as_array().unwrap().iter().map(|addr| addr.as_u64().unwrap()).collect() }
    }

    /// Live bytes and operations, summed over the threads.
    fn read(&self, memory: &dyn Memory) -> (f64, f64) {
        let mut sum = (0.0, 0.0);
        for &addr in &self.addrs {
            sum.0 += memory.word(addr).unwrap() as f64;
            sum.1 += memory.word(addr + 8).unwrap() as f64;
        }
        sum
    }
}

/// CPU time of all threads of a process, in seconds.
fn cpu_seconds(pid: u32) -> f64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
        text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
    };
    tasks.filter_map(Result::ok).map(of).sum()
}

/// A target's loss while it is walked: operations per second of its own CPU time, slices with consecutive walks against slices without, in
/// pairs; and the loss at one walk per minute that follows.
fn loss(arguments: &Arguments) {
    let mut target = Target::start(&mut Command::new(build("busy.c", "cc", &["-lpthread"])));
    let counters = Counters::of(&target.tell("start"));
    let memory = target.memory();
    let mut layouts = LayoutCache::default();
    let mut slice = |is_walked: bool| {
        let (ops, cpu, started) = (counters.read(&memory).1, cpu_seconds(target.pid()), Instant::now());
        let mut walks = 0u32;
        let mut walking = Duration::ZERO;
        while started.elapsed() < Duration::from_secs(1) {
            if is_walked {
                let walk = Instant::now();
                drop(census(&target, Level::Full, &mut layouts));
                walking += walk.elapsed();
                walks += 1;
            } else {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let rate = (counters.read(&memory).1 - ops) / (cpu_seconds(target.pid()) - cpu);
        (rate, walking.as_secs_f64() / f64::from(walks.max(1)), walking.as_secs_f64() / started.elapsed().as_secs_f64())
    };
    let (mut losses, mut noise, mut walk_s, mut duties) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..(arguments.walks / 5).max(6) {
        let (before, walked, after) = (slice(false), slice(true), slice(false));
        losses.push(1.0 - walked.0 / ((before.0 + after.0) / 2.0));
        noise.push((1.0 - after.0 / before.0).abs());
        walk_s.push(walked.1);
        duties.push(walked.2);
    }
    let (lost, duty) = (median(losses), median(duties));
    println!("loss: a target at full speed on {} cores, {:.2} of the time under a walk", rustix_cores(), duty);
    println!("  {:<58} {:>10.2} %", "loss of operations per CPU second, consecutive walks", 100.0 * lost);
    println!("  {:<58} {:>10.2} %", "  between two slices without walks (noise)", 100.0 * median(noise));
    against("loss at one full walk per minute", 100.0 * lost.max(0.0) / duty.max(0.01) * median(walk_s) / 60.0, 0.5, "%");
}

fn rustix_cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// At rest: the census against the allocator's own account.
fn rest_error(_: &Arguments) {
    println!("rest: live bytes and blocks against the allocator's own account");
    for (allocator, library) in [("glibc", ""), ("jemalloc", "libjemalloc.so.2"), ("tcmalloc", "libtcmalloc_minimal.so.4"), ("musl", "")] {
        for scenario in ["mix", "holes16", "tail", "large"] {
            let mut command = match allocator {
                "musl" => Command::new(build("heaps.c", "musl-gcc", &["-static", "-lpthread"])),
                _ => heaps(),
            };
            if !library.is_empty() {
                command.env("LD_PRELOAD", format!("{LIBRARIES}/{library}"));
            }
            let mut target = Target::start(&mut command);
            let own = target.tell(scenario);
            let taken = census(&target, Level::Full, &mut LayoutCache::default());
            let Some(heap) = taken.census.heaps.iter().find(|heap| heap.allocator.name() == allocator) else {
                println!("  {allocator} {scenario}: no heap found");
                continue;
            };
            let number = |key: &str| own[key].as_f64().unwrap_or(0.0);
            let live = heap.ladder.live_bytes.unwrap() as f64;
            let error = match allocator {
                "glibc" => {
                    let tcache = (heap.details.cached_bytes.unwrap() - heap.fastbin_bytes.unwrap()) as f64;
                    live + tcache + heap.overhead_bytes as f64 - number("uordblks") - number("hblkhd")
                }
                "jemalloc" => live - number("allocated"),
                "tcmalloc" => {
                    let caches = number("thread_cache_free_bytes") + number("transfer_cache_free_bytes");
                    live - number("current_allocated_bytes") - caches
                }
                // musl has no statistics: the program's own list of blocks.
                _ => heap.live_allocations.unwrap() as f64 - number("live"),
            };
            let unit = if allocator == "musl" { "blocks more than the program's own" } else { "bytes" };
            println!(
                "  {allocator:<9} {scenario:<8} error {error:>8} {unit}, of {live} live bytes; unknown {}",
                heap.ladder.unknown_bytes.unwrap()
            );
        }
    }
}

/// A process's memory that samples the target's counters at each window, so that the truth is the mean over the walk.
struct Sampling<'a> {
    memory: LiveMemory,
    counters: &'a Counters,
    seen: Mutex<Vec<f64>>,
}

impl Sampling<'_> {
    fn sample(&self) {
        let live = self.counters.read(&self.memory).0;
        self.seen.lock().unwrap().push(live);
    }
}

impl Memory for Sampling<'_> {
    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        self.memory.read(addr, out)
    }

    fn read_pieces(&self, pieces: &[Piece], out: &mut [u8]) -> usize {
        if out.len() > 4096 {
            self.sample();
        }
        self.memory.read_pieces(pieces, out)
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        self.memory.maps()
    }

    fn resident_mappings(&self) -> Result<Vec<ResidentMapping>, MemoryError> {
        self.memory.resident_mappings()
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        self.memory.page_runs(range)
    }
}

/// A target at full speed with blocks that are never freed among the others.
fn running(arguments: &Arguments) {
    let mut target = Target::start(&mut Command::new(build("busy.c", "cc", &["-lpthread"])));
    let started = target.tell("start");
    let pinned: Vec<u64> = started["pinned"].as_array().unwrap().iter().map(|addr| addr.as_u64().unwrap()).collect();
    let counters = Counters::of(&started);
    let memory = Sampling { memory: target.memory(), counters: &counters, seen: Mutex::new(Vec::new()) };
    let mut layouts = LayoutCache::default();
    let (mut errors, mut moved, mut rates) = (Vec::new(), Vec::new(), Vec::new());
    let (mut missed, mut unseen, mut unknown, mut extent, mut unusable, mut broken, mut lost) = (0usize, 0usize, 0u64, 0u64, 0, 0u64, 0u64);
    let mut worst_unknown = 0.0f64;
    for _ in 0..arguments.walks {
        memory.seen.lock().unwrap().clear();
        let (ops, begun) = (counters.read(&memory).1, Instant::now());
        let taken = take(&memory, target.pid(), "busy", options(Level::Full), &mut layouts).unwrap();
        rates.push((counters.read(&memory).1 - ops) / begun.elapsed().as_secs_f64());
        let seen = memory.seen.lock().unwrap().clone();
        let truth = seen.iter().sum::<f64>() / seen.len() as f64;
        let heap = &taken.census.heaps[0];
        errors.push((heap.ladder.live_bytes.unwrap() as f64 - truth) / truth);
        let (low, high) = seen.iter().fold((f64::MAX, 0.0f64), |(low, high), &live| (low.min(live), high.max(live)));
        moved.push((high - low) / truth);
        let table = &taken.heaps[0].chunks;
        missed += pinned.iter().filter(|&&addr| table.is_live(addr) == Some(false)).count();
        unseen += pinned.iter().filter(|&&addr| table.is_live(addr).is_none()).count();
        unknown += heap.ladder.unknown_bytes.unwrap();
        extent += heap.ladder.extent_bytes;
        worst_unknown = worst_unknown.max(heap.ladder.unknown_bytes.unwrap() as f64 / heap.ladder.extent_bytes as f64);
        unusable += usize::from(!taken.census.walk.usable);
        broken += taken.census.walk.broken_headers;
        lost += taken.census.walk.resynchronised;
        if !taken.census.walk.usable {
            println!("  unusable: {:?}", taken.census.walk);
        }
    }
    let walks = arguments.walks as f64;
    println!(
        "running: {} walks, target at {:.2} M operations/s, extent {:.0} MiB, its live bytes moved by {:.2} % during a walk",
        arguments.walks,
        median(rates) / 1e6,
        extent as f64 / walks / MIB,
        100.0 * moved.iter().sum::<f64>() / walks
    );
    against("error of live bytes, mean", 100.0 * (errors.iter().sum::<f64>() / walks).abs(), 0.5, "%");
    against("  worst", 100.0 * errors.iter().fold(0.0f64, |worst, error| worst.max(error.abs())), 3.0, "%");
    println!(
        "  {:<58} {missed:>10} of {} checked, goal 0; {unseen} in unknown bytes",
        "never-freed blocks reported as freed",
        pinned.len() * arguments.walks
    );
    against("unknown bytes", 100.0 * unknown as f64 / extent as f64, 0.01, "%");
    println!("  {:<58} {:>10.4} %", "  worst", 100.0 * worst_unknown);
    println!("  {:<58} {unusable:>10} of {}", "walks that are marked unusable", arguments.walks);
    println!(
        "  {:<58} {:>10.2} and {:.2} per walk",
        "broken headers, boundaries found by trial",
        broken as f64 / walks,
        lost as f64 / walks
    );
}

fn thread_cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// One round at level top over 300 processes, as the agent does it.
fn round(_: &Arguments) {
    const PROCESSES: usize = 300;
    let mut targets: Vec<Target> = Vec::new();
    for number in 0..PROCESSES {
        let mut command = match number % 3 {
            0 => Command::new("cat"),
            1 => Command::new("bash"),
            _ => heaps(),
        };
        targets.push(Target::start(&mut command));
    }
    for target in targets.iter_mut().skip(2).step_by(3) {
        target.tell("fastbins");
    }
    let mut layouts = LayoutCache::default();
    let mut rounds = Vec::new();
    let mut heaps_found = 0;
    for _ in 0..5 {
        let before = thread_cpu_seconds();
        heaps_found = 0;
        for target in &targets {
            let memory = LiveMemory::open(Process::open(Pid(target.pid())).unwrap()).unwrap();
            let taken = take(&memory, target.pid(), "x", options(Level::Top), &mut layouts).unwrap();
            heaps_found += taken.census.heaps.len();
        }
        rounds.push(thread_cpu_seconds() - before);
    }
    println!("round: {PROCESSES} processes (cat, bash, a test heap), {heaps_found} heaps");
    against("CPU time of the first round", rounds[0], 1.0, "s");
    against("  of the later ones", median(rounds.split_off(1)), 1.0, "s");
}

/// What `malloc_trim(0)` returns against what was predicted.
fn trim(_: &Arguments) {
    println!("trim: predicted against what the kernel counts, each hole pattern");
    for environment in [None, Some("glibc.malloc.hugetlb=1"), Some("glibc.malloc.tcache_count=200:glibc.malloc.mxfast=160")] {
        for scenario in ["mix", "holes2", "holes4", "holes16", "holes64", "holes500", "tail", "fastbins", "large"] {
            let mut command = heaps();
            command.envs(environment.map(|tunables| ("GLIBC_TUNABLES", tunables)));
            let mut target = Target::start(&mut command);
            target.tell(scenario);
            let predicted =
                census(&target, Level::Full, &mut LayoutCache::default()).census.heaps[0].ladder.trimmable_bytes.unwrap() as f64;
            let before = target.anonymous_bytes() as f64;
            target.tell("trim");
            let fact = before - target.anonymous_bytes() as f64;
            let off = (predicted - fact).abs();
            let allowed = (fact / 100.0).max(262_144.0);
            println!(
                "  {:<10} {:<52} predicted {:>9.2} MiB, returned {:>9.2} MiB: error {:.2} of the allowed one",
                scenario,
                environment.unwrap_or("no tunables"),
                predicted / MIB,
                fact / MIB,
                off / allowed
            );
        }
    }
}
