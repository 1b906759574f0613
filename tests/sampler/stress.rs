//! The sampler under stress: threads, forks, destructors, signals, libraries loaded and unloaded, all with a consumer attached.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::Command;
use std::time::Duration;

use fragprof::sampler::library::Flavour;

use super::consumer::{Consumer, Ledger};
use super::programs::{Allocator, Libraries, compile, sampled};
use crate::support::process::Process;
use crate::support::serial;

/// How long a storm may take on a loaded machine.
const STORM_LIMIT: Duration = Duration::from_secs(240);

/// Runs a program to its end while its probes are read; returns the ledger of its own process and what it printed.
fn run_listened(command: &mut Command, consumer: &mut Consumer, library: &std::path::Path) -> (Ledger, String) {
    // For every process that maps the file: from the first instruction on, and in children.
    consumer.attach(-1, library);
    let mut process = Process::start(command);
    let pid = process.pid();
    let mut ledger = Ledger::default();
    let deadline = std::time::Instant::now() + STORM_LIMIT;
    let mut take = |consumer: &mut Consumer| {
        let records: Vec<_> = consumer.records().into_iter().filter(|record| record.pid == pid).collect();
        ledger.add(&records);
    };
    loop {
        take(consumer);
        // The end of its output is the end of the program.
        if process.out.wait_for(Duration::from_millis(20), |line| line == "ok").is_some() {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "it hangs:\n{}", process.err.all());
        assert!(process.err.wait_for(Duration::ZERO, |_| true).is_none(), "{}", process.err.all());
    }
    assert!(process.wait(STORM_LIMIT).success(), "{}", process.err.all());
    take(consumer);
    consumer.detach();
    (ledger, process.out.all())
}

fn storm(compiler: &str, allocator: Allocator, arguments: &[&str], interval: u64) {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "storm.c", compiler, &[]);
    let mut consumer = Consumer::new();
    let (ledger, out) = run_listened(sampled(&program, &library, allocator, interval).args(arguments), &mut consumer, &library);
    assert_eq!(out, "ok");
    assert!(ledger.made.len() > 100, "{}", ledger.made.len());
    // The program freed all of its blocks; the rest are the libc's own, a few per thread.
    assert_eq!((ledger.collisions, ledger.unknown_frees), (0, 0));
    let left: Vec<_> = ledger.live.values().filter(|block| block.size_bytes < 2016).collect();
    assert!(left.len() < 40, "{} of {} samples were never freed: {left:?}", left.len(), ledger.made.len());
}

#[test]
fn sixty_four_threads_with_forks_and_dlopen_stay_correct_under_glibc() {
    storm("cc", Allocator::Glibc, &["64", "8000"], 4096);
}

#[test]
fn a_storm_in_which_nearly_every_block_is_sampled_stays_correct() {
    storm("cc", Allocator::Glibc, &["6", "6000"], 64);
}

#[test]
fn a_storm_stays_correct_under_jemalloc() {
    storm("cc", Allocator::Jemalloc, &["16", "12000"], 4096);
}

#[test]
fn a_storm_stays_correct_under_musl() {
    storm("musl-gcc", Allocator::Glibc, &["8", "6000"], 4096);
}

#[test]
fn more_live_samples_than_the_set_holds_are_counted_and_reported_as_freed() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "hoard.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let (ledger, out) = run_listened(sampled(&program, &library, Allocator::Glibc, 1).arg("100000"), &mut consumer, &library);
    // hoard.c prints the library's own counts while 100,000 blocks were live, then "ok".
    let count = |name: &str| -> u64 {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name} "))).unwrap_or_else(|| panic!("no {name}: {out}"));
        line.parse().unwrap()
    };
    let overflows = count("overflows");
    assert!((100_000 - 65_535..100_000 - 65_535 + 200).contains(&overflows), "{out}");
    assert_eq!((count("in_front"), count("live_max")), (1, 65_535));
    assert_eq!((ledger.collisions, ledger.unknown_frees), (0, 0));
    assert!(ledger.live.values().filter(|block| block.size_bytes == 40).count() == 0, "a block whose free was not reported");
    assert!(count("resident_kib") < 8 << 10, "{out}");
}

#[test]
fn another_preloaded_library_before_or_after_it_does_not_matter() {
    let libraries = Libraries::new();
    let sampler = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "storm.c", "cc", &[]);
    let other = compile(libraries.folder(), "other_preload.c", "cc", &["-shared", "-fPIC", "-ldl"]);
    for order in [[&sampler, &other], [&other, &sampler]] {
        let preload = order.map(|path| path.display().to_string()).join(":");
        let done = crate::support::process::run(Command::new(&program).args(["4", "3000"]).env("LD_PRELOAD", preload));
        assert_eq!((done.status.success(), done.out.trim(), done.err.trim()), (true, "ok", ""), "{order:?}");
    }
}

#[test]
fn a_forked_child_is_not_reported_and_stops_counting_when_the_listener_detaches() {
    if crate::support::bpf().is_none() {
        return;
    }
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "forked.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let mut target = Process::start_piped(&mut sampled(&program, &library, Allocator::Glibc, 1));
    consumer.attach(target.pid() as i32, &library);
    let mut input = target.input();
    input.write_all(b"g").unwrap();
    assert!(target.out.wait_for(crate::support::LIMIT, |line| line.starts_with("child counts")).is_some(), "{}", target.err.all());
    let pids: BTreeSet<u32> = consumer.records().iter().map(|record| record.pid).collect();
    assert_eq!(pids.into_iter().collect::<Vec<_>>(), [target.pid()]);
    consumer.detach();
    input.write_all(b"g").unwrap();
    assert!(target.wait(crate::support::LIMIT).success(), "{}", target.err.all());
    assert!(target.out.all().ends_with("child then counts 0"), "{}", target.out.all());
}

/// Sets the probes' semaphores as a listener's attach does, without a probe: the library does all its work, and no trap is taken.
pub fn count_as_listener(pid: u32) {
    use std::os::unix::fs::FileExt as _;
    let process = fragprof::process::Process::open(fragprof::units::Pid(pid)).unwrap();
    let found = fragprof::emitter::Finder::new(Default::default()).find(&process).unwrap();
    let [emitter] = found.emitters.as_slice() else { panic!("{found:?}") };
    let maps = process.maps().unwrap();
    let memory = std::fs::OpenOptions::new().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let name = emitter.display_path.file_name().unwrap();
    // Frees first, as every listener does.
    for site in emitter.sites.frees.iter().chain(&emitter.sites.allocs) {
        let offset = site.semaphore.unwrap();
        let mut of_file = maps.mappings.iter().rev().filter(|m| m.path().and_then(|path| path.file_name()) == Some(name));
        // The writable mapping comes last.
        let address = of_file.find_map(|mapping| mapping.address_of(offset)).unwrap();
        memory.write_all_at(&1u16.to_ne_bytes(), address.0).unwrap();
    }
}

/// Makes this many pairs, two of three of them sampled, and checks that no more memory is used at the end than after half of them.
fn leaves_nothing(pairs: u64) {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "week.c", "cc", &[]);
    let mut process = Process::start_piped(sampled(&program, &library, Allocator::Glibc, 512).arg(pairs.to_string()));
    let mut input = process.input();
    process.out.wait_for(crate::support::LIMIT, |line| line == "ready").unwrap();
    count_as_listener(process.pid());
    input.write_all(b"g").unwrap();
    assert!(process.wait(Duration::from_secs(1200)).success(), "{}", process.err.all());
    let said = process.out.all();
    let parts: Vec<[u64; 4]> = (said.lines().filter_map(|line| line.strip_prefix("left ")))
        .map(|line| line.split(' ').map(|word| word.parse().unwrap()).collect::<Vec<_>>().try_into().unwrap())
        .collect();
    let (half, last) = (parts[4], parts[9]);
    println!("{} samples: {} KiB resident after half of them, {} KiB at the end", last[1], half[0], last[0]);
    assert!(last[1] > pairs / 2, "{said}");
    assert!(last[0] <= half[0] + 64, "it grows: {said}");
    // Live blocks are sampled and not freed yet; nothing is lost.
    assert!(last[1] - last[2] <= 70 && last[3] == 0, "{said}");
}

#[test]
fn two_hundred_thousand_samples_leave_nothing_behind() {
    leaves_nothing(300_000);
}

#[test]
#[ignore = "some minutes: make stress-sampler"]
fn a_weeks_worth_of_samples_leaves_nothing_behind() {
    // A program that allocates 100 MB a second for a week has as many samples at the usual interval.
    leaves_nothing(190_000_000);
}
