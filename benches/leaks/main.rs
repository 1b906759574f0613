//! What `fragprof leaks` costs, each figure with its goal: look-ups, CPU time per GiB, memory per block, and the target's loss.
//!
//! `make bench-leaks`; with `BLOCKS=40000000` a heap of 10 GiB.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fragprof::census::{LayoutCache, LiveMemory, Pace};
use fragprof::process::Process;
use fragprof::retention::BlockIndex;
use fragprof::retention::holdings::Holdings;
use fragprof::retention::owners::census;
use fragprof::retention::scans::{Plan, scan};
use fragprof::units::Pid;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Blocks of the index whose look-ups are timed.
const INDEXED: u64 = 6_000_000;
/// Look-ups timed.
const LOOKUPS: usize = 20_000_000;
/// Bytes of a block, with its header 256.
const BLOCK_BYTES: u64 = 240;
const GIB: f64 = (1u64 << 30) as f64;

fn main() {
    let blocks: u64 = std::env::var("BLOCKS").ok().and_then(|text| text.parse().ok()).unwrap_or(4_000_000);
    lookups();
    passes(blocks);
    loss();
}

/// A random number each time (Marsaglia's xorshift).
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn lookups() {
    let mut state = 88_172_645_463_325_252;
    let mut at = 0x5500_0000_0010u64;
    let mut blocks = Vec::new();
    for _ in 0..INDEXED {
        let bytes = 32 + random(&mut state) % 28 * 16;
        blocks.push((at, bytes - 8));
        at += bytes;
    }
    let span = at - 0x5500_0000_0010;
    let words: Vec<u64> = (0..LOOKUPS).map(|_| 0x5500_0000_0010 + random(&mut state) % span).collect();
    let index = BlockIndex::of(&blocks).unwrap();
    let timed = |work: &mut dyn FnMut() -> u64| {
        let began = Instant::now();
        let found = work();
        (LOOKUPS as f64 / began.elapsed().as_secs_f64() / 1e6, found)
    };
    let (batched, found) = timed(&mut || {
        let (mut found, mut layouts) = (0u64, Vec::new());
        words.chunks(512).for_each(|words| index.find_all(words, &mut layouts, |_, hit| found += u64::from(hit.block)));
        found
    });
    let (single, same) = timed(&mut || words.iter().filter_map(|&word| index.find(word)).map(|hit| u64::from(hit.block)).sum());
    let (sorted, also) = timed(&mut || {
        let one = |word: u64| {
            let place = blocks.partition_point(|block| block.0 <= word).checked_sub(1)?;
            (word - blocks[place].0 < blocks[place].1).then_some(place as u64)
        };
        words.iter().filter_map(|&word| one(word)).sum()
    });
    assert_eq!((found, found), (same, also));
    println!(
        "look-ups, {INDEXED} blocks: {batched:.1} M/s in batches (goal 28), {single:.1} one by one; a sorted array {sorted:.1}: {:.1} x",
        batched / sorted
    );
    println!("index: {:.2} bytes per block", index.bytes() as f64 / INDEXED as f64);
}

/// A child that ends with its owner.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn build(source: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(Path::new(source).file_stem().unwrap());
    let built =
        Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&program).arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source)).status();
    assert!(built.unwrap().success());
    program
}

fn start(mut command: Command) -> Running {
    let mut child = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(child.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    child
}

fn passes(blocks: u64) {
    let mut command = Command::new(build("benches/leaks/blocks.c"));
    command.args([blocks.to_string(), BLOCK_BYTES.to_string()]);
    let target = start(command);
    let memory = LiveMemory::open(Process::open(Pid(target.0.id())).unwrap()).unwrap();
    let plan = Plan { looks: 2, interval: Duration::from_millis(100), ..Plan::default() };
    let began = Instant::now();
    let seen = scan(&memory, (target.0.id(), "blocks"), plan, None, &mut LayoutCache::default()).unwrap();
    let gib = seen.live_bytes as f64 / GIB;
    println!(
        "{} blocks, {gib:.2} GiB live: found {} of {} dropped in {:.1} s",
        seen.live_blocks,
        seen.candidates.len(),
        blocks / 1000,
        began.elapsed().as_secs_f64()
    );
    println!(
        "mark and scan: {:.2} s per GiB (goal 1.0); index {:.2}, census {:.2}",
        seen.times.mark_s / gib,
        seen.times.index_s / gib,
        seen.times.census_s / gib
    );
    println!("each quick scan: {:.2} s per GiB (goal 0.35)", seen.times.look_s / gib);
    println!("memory: {:.1} bytes per block (goal 24)", seen.table_bytes as f64 / seen.live_blocks as f64);
    let live_blocks = seen.live_blocks as f64;
    drop(seen);
    owners(&memory, target.0.id(), live_blocks);
}

fn owners(memory: &LiveMemory, pid: u32, live_blocks: f64) {
    let taken = census(memory, (pid, "blocks"), Pace::default()).unwrap();
    let began = Instant::now();
    let found = Holdings::of(memory, pid, &taken, Pace::default(), None).unwrap();
    println!(
        "owners: dominators {:.2} µs per block (goal 0.5), {:.1} s with reading and pinned bytes; {:.1} bytes per block (goal 48)",
        found.dominators_s * 1e6 / live_blocks,
        began.elapsed().as_secs_f64(),
        found.table_bytes as f64 / live_blocks
    );
}

/// Binds the calling thread, and the processes that it starts, to one CPU.
fn bind(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).unwrap();
}

/// Operations of a busy program on one CPU with and without a reader on another, alternating.
fn loss() {
    bind(0);
    let mut command = Command::new(build("tests/leaks/truth.c"));
    command.args(["/dev/null", "1", "0"]);
    let mut target = start(command);
    let pid = target.0.id();
    let mut input = target.0.stdin.take().unwrap();
    let mut output = BufReader::new(target.0.stdout.take().unwrap());
    let mut operations = || {
        writeln!(input, "ops").unwrap();
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    let mut second = || {
        let (before, began) = (operations(), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        (operations() - before) as f64 / began.elapsed().as_secs_f64()
    };
    let (mut alone, mut beside): (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        alone.push(second());
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bind(1);
                let memory = LiveMemory::open(Process::open(Pid(pid)).unwrap()).unwrap();
                let plan = Plan { looks: 40, interval: Duration::ZERO, ..Plan::default() };
                drop(scan(&memory, (pid, "truth"), plan, None, &mut LayoutCache::default()));
                done.store(true, Ordering::Relaxed);
            });
            while !done.load(Ordering::Relaxed) {
                beside.push(second());
            }
        });
        // Only a part of the last second was read.
        beside.pop();
        alone.push(second());
    }
    let mean = |rates: &[f64]| rates.iter().sum::<f64>() / rates.len() as f64;
    let worst = |rates: &[f64]| rates.iter().copied().fold(f64::INFINITY, f64::min);
    println!(
        "a busy target does {:.3} of its operations while it is read, {:.3} in the worst of {} seconds (goal 0.95); left alone, {:.3} in the worst of {}",
        mean(&beside) / mean(&alone),
        worst(&beside) / mean(&alone),
        beside.len(),
        worst(&alone) / mean(&alone),
        alone.len()
    );
}
