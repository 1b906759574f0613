//! Cost of the sampler: nanoseconds per malloc/free pair, compared with the bare allocator in the same run, and with heaptrack. This test
//! only measures, and is of little use on a loaded machine:
//!
//! ```text
//! cargo test --release --test integration sampler::figures -- --ignored --nocapture --test-threads 1
//! ```

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::consumer::Consumer;
use super::programs::{Allocator, Libraries, compile};
use crate::support::LIMIT;
use crate::support::process::{Process, run};
use crate::trim::made;

/// Rounds of all variants in turn, so that other load on the machine affects all of them.
const ROUNDS: usize = 7;
/// Pairs per round.
const PAIRS: &str = "2000000";

/// The minimum of the rounds: disturbances only make a run longer.
fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// One run of `pairs.c`: nanoseconds per pair.
fn pair_ns(command: &mut Command) -> f64 {
    let done = run(command);
    assert!(done.status.success(), "{}", done.err);
    done.out.lines().last().unwrap().parse().unwrap()
}

fn plain(program: &Path, allocator: Allocator, what: &str) -> Command {
    let mut command = Command::new(program);
    command.args([what, PAIRS]);
    if let Some(library) = allocator.library() {
        command.env("LD_PRELOAD", library);
    }
    command
}

fn sampled(program: &Path, library: &Path, allocator: Allocator, what: &str) -> Command {
    let mut command = plain(program, allocator, what);
    command.env("LD_PRELOAD", allocator.preload(library));
    command
}

/// The same with the library attached before it begins.
fn attached_pair_ns(program: &Path, library: &Path, allocator: Allocator, what: &str) -> f64 {
    let mut process = Process::start_piped(plain(program, allocator, what).arg("waits"));
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", process.err);
    let (pid, library) = (process.pid().to_string(), library.to_str().unwrap().to_owned());
    let report = made(&["attach-sampler".to_owned(), pid, "--library".to_owned(), library]);
    assert!(report["refused"].is_null(), "{report}");
    process.input().write_all(b"g").unwrap();
    assert!(process.wait(LIMIT).success(), "{}", process.err);
    process.out.all().lines().last().unwrap().parse().unwrap()
}

#[test]
#[ignore = "a measurement, for a quiet machine"]
fn a_pair_of_malloc_and_free() {
    let libraries = Libraries::new();
    let listened = Libraries::new();
    let (library, heard) = (libraries.path(Flavour::Standard), listened.path(Flavour::Standard));
    let program = compile(libraries.folder(), "pairs.cpp", "g++", &[]);
    let mut consumer = Consumer::new();
    consumer.attach(-1, &heard);
    let (attached, heard_attached) = (libraries.path(Flavour::Attached), listened.path(Flavour::Attached));
    consumer.attach(-1, &heard_attached);
    println!(
        "{:<10} {:<8} {:>8} {:>18} {:>18} {:>18} {:>18}",
        "allocator", "pair", "bare", "no listener", "listener, 512 KiB", "attached", "attached, listener"
    );
    for allocator in [Allocator::Glibc, Allocator::Jemalloc, Allocator::Tcmalloc, Allocator::Mimalloc] {
        for what in ["malloc", "new", "several"] {
            let [mut bare, mut quiet, mut loud, mut quiet_attached, mut loud_attached] = [const { Vec::new() }; 5];
            for _ in 0..ROUNDS {
                bare.push(pair_ns(&mut plain(&program, allocator, what)));
                quiet.push(pair_ns(&mut sampled(&program, &library, allocator, what)));
                loud.push(pair_ns(&mut sampled(&program, &heard, allocator, what)));
                quiet_attached.push(attached_pair_ns(&program, &attached, allocator, what));
                loud_attached.push(attached_pair_ns(&program, &heard_attached, allocator, what));
                consumer.records();
            }
            let bare = least(&bare);
            let with = [quiet, loud, quiet_attached, loud_attached].map(|values| least(&values));
            let columns = with.map(|ns| format!("{ns:>5.2} ns {:>+6.2} ns", ns - bare));
            println!("{:<10} {what:<8} {bare:>5.2} ns {}", format!("{allocator:?}").to_lowercase(), columns.join(" "));
        }
    }
    heaptrack(&program);
}

/// heaptrack's preload library, with its output discarded, for comparison.
fn heaptrack(program: &Path) {
    let Some(library) = ["/usr/lib/heaptrack/libheaptrack_preload.so", "/usr/lib/x86_64-linux-gnu/heaptrack/libheaptrack_preload.so"]
        .into_iter()
        .find(|path| Path::new(path).exists())
    else {
        println!("heaptrack is not installed");
        return;
    };
    let (mut bare, mut with) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let fewer = |command: &mut Command| pair_ns(command.args(["malloc", "400000"]));
        bare.push(fewer(&mut Command::new(program)));
        with.push(fewer(Command::new(program).env("LD_PRELOAD", library).env("DUMP_HEAPTRACK_OUTPUT", "/dev/null")));
    }
    let (bare, with) = (least(&bare), least(&with));
    println!("{:<10} {:<8} {bare:>5.2} ns {with:>5.2} ns {:>+6.2} ns", "heaptrack", "malloc", with - bare);
}
