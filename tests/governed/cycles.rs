//! Windows opened and closed repeatedly; many targets; targets that start and end.

use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::session::tier::windows::{Governed, Options};
use fragprof::units::Pid;

use super::harm::changed_code_bytes;
use super::{Busy, built};
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, bpf, serial};

fn own_rss_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

fn own_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Opens this many windows of a busy process.
fn cycles(count: u64) {
    let mut target = Busy::start(&["20", "1000"]);
    let options = Options { ring_bytes: Some(8 << 20), own_census: false, period_min_s: 0.02, ..Options::default() };
    let mut governed = Governed::new(options).unwrap();
    governed.watch(Pid(target.pid()), 0.05).unwrap();
    governed.wait_for_tables(Duration::from_secs(10));
    let windows = |governed: &Governed| governed.status().iter().map(|one| one.windows).sum::<u64>();
    let mut settled = None;
    let began = Instant::now();
    while windows(&governed) < count {
        assert!(began.elapsed() < Duration::from_secs(2 * count + 60), "only {} windows: {:?}", windows(&governed), governed.status());
        governed.step(Duration::from_millis(50));
        if settled.is_none() && windows(&governed) >= count / 4 {
            settled = Some((own_rss_kib(), own_descriptors()));
        }
    }
    let (rss_kib, descriptors) = settled.unwrap();
    assert!(own_rss_kib() < rss_kib + 8 * 1024, "{rss_kib} KiB after a quarter, {} at the end", own_rss_kib());
    assert!(own_descriptors() <= descriptors + 8, "{descriptors} descriptors after a quarter, {} at the end", own_descriptors());
    println!("{count} windows in {:.1} s, {} KiB more", began.elapsed().as_secs_f64(), own_rss_kib().saturating_sub(rss_kib));
    drop(governed.finish());
    wait_until("no probe is left", || changed_code_bytes(target.pid()) == 0);
    assert!(target.process.is_running());
    assert!(target.pairs_per_s() > 10_000.0);
}

/// How many windows [`in_a_process_of_their_own`] opens.
const COUNT: &str = "CYCLES_OF_WINDOWS";

/// Runs it in a separate process, because this one's memory includes that of other tests.
fn alone(count: u64) {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "governed::cycles::in_a_process_of_their_own", "--ignored", "--nocapture"]);
    let done = command.env(COUNT, count.to_string()).output().unwrap();
    let said = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).join("\n");
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
    println!("{said}");
}

#[test]
#[ignore = "started by the other tests"]
fn in_a_process_of_their_own() {
    if let Ok(count) = std::env::var(COUNT) {
        cycles(count.parse().unwrap());
    }
}

#[test]
fn thirty_windows_leave_nothing_behind() {
    alone(30);
}

/// The long form: `make soak-windows`.
#[test]
#[ignore = "takes an hour"]
fn two_thousand_windows_leave_nothing_behind() {
    alone(2000);
}

#[test]
fn sixty_four_targets_and_a_storm_of_five_hundred_short_lived_processes_a_second_are_watched_at_once() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // Some 900 pairs per second each.
    let targets: Vec<Busy> = (0..64).map(|_| Busy::start(&["0", "0", "1"])).collect();
    let mut governed = Governed::new(Options { own_census: false, ..Options::default() }).unwrap();
    for target in &targets {
        governed.watch(Pid(target.pid()), 0.1).unwrap();
    }
    const STORM: usize = 2500;
    let mut storm = Process::start_piped(Command::new(built("forks")).args([&STORM.to_string(), "500"]));
    storm.input().write_all(b"\n").unwrap();
    let began = Instant::now();
    let (mut seen, mut met) = (0, 0);
    let ended = loop {
        governed.step(Duration::from_millis(5));
        if let Some(line) = storm.out.to_string().lines().find(|line| line.starts_with("ended")) {
            break line.to_owned();
        }
        // Watches as many as time permits, the newest each time; most have ended before they can be watched.
        let lines = storm.out.to_string().lines().count();
        if lines > seen {
            seen = lines;
            let newest = storm.out.to_string().lines().last().and_then(|line| line.parse().ok());
            met += u32::from(newest.is_some_and(|pid| governed.watch(Pid(pid), 0.01).is_ok()));
        }
        assert!(began.elapsed() < LIMIT * 2, "{seen} of the storm after {:?}", began.elapsed());
    };
    println!("a storm: {ended}; {met} of them were watched");
    assert!(ended.starts_with(&format!("ended {STORM} ")), "{ended}");
    wait_until("the storm is over", || {
        governed.step(Duration::from_millis(50));
        governed.watched().count() == targets.len()
    });
    let profile = governed.finish();
    let reported = profile.meta.governed.iter().filter(|one| one.allocations_seen > 0).count();
    assert!(reported >= 64, "{reported} of 64 are reported; {met} of the storm were watched");
}

#[test]
fn a_busy_target_that_forks_two_hundred_children_under_windows_and_its_children_succeed() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Process::start_piped(Command::new(built("forks")).args(["200", "50"]));
    let options = Options { own_census: false, period_min_s: 0.02, ..Options::default() };
    let mut governed = Governed::new(options).unwrap();
    governed.watch(Pid(target.pid()), 0.2).unwrap();
    governed.wait_for_tables(Duration::from_secs(10));
    target.input().write_all(b"\n").unwrap();
    let began = Instant::now();
    while !target.out.to_string().lines().any(|line| line.starts_with("ended 200 ")) {
        governed.step(Duration::from_millis(50));
        assert!(target.is_running() && began.elapsed() < LIMIT * 2, "{:?}\n{}{}", governed.status(), target.out, target.err);
    }
    let windows: u64 = governed.status().iter().map(|one| one.windows).sum();
    assert!(windows >= 3, "{windows} windows: {:?}", governed.status());
    drop(governed.finish());
    wait_until("no probe is left", || changed_code_bytes(target.pid()) == 0);
    assert!(target.is_running());
}
