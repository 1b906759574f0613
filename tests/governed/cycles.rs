//! Windows opened and closed again and again; many targets; targets that come and go.

use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::recorder::governed::{Governed, Options};
use fragprof::units::Pid;

use super::Busy;
use super::harm::changed_code_bytes;
use crate::support::process::wait_until;
use crate::support::{bpf, serial};

fn own_rss_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}

fn own_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Opens windows of a busy process until there were so many.
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
        assert!(began.elapsed() < Duration::from_secs(2 * count + 60), "{} windows only: {:?}", windows(&governed), governed.status());
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

#[test]
fn thirty_windows_leave_nothing_behind() {
    if bpf().is_some() {
        let _alone = serial();
        cycles(30);
    }
}

/// The long form: `make soak-windows`.
#[test]
#[ignore = "takes ten minutes"]
fn two_thousand_windows_leave_nothing_behind() {
    if bpf().is_some() {
        let _alone = serial();
        cycles(2000);
    }
}

#[test]
fn sixty_four_targets_and_a_storm_of_short_lived_ones_are_watched_at_once() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // Some 900 pairs a second each.
    let targets: Vec<Busy> = (0..64).map(|_| Busy::start(&["0", "0", "1"])).collect();
    let mut governed = Governed::new(Options { own_census: false, ..Options::default() }).unwrap();
    for target in &targets {
        governed.watch(Pid(target.pid()), 0.1).unwrap();
    }
    let began = Instant::now();
    let mut storm = 0;
    while began.elapsed() < Duration::from_secs(5) {
        governed.step(Duration::from_millis(5));
        let mut short = Command::new("/bin/true").spawn().unwrap();
        // It may have ended before, or have no C library yet.
        storm += u32::from(governed.watch(Pid(short.id()), 0.01).is_ok());
        short.wait().unwrap();
    }
    wait_until("the storm is over", || {
        governed.step(Duration::from_millis(50));
        governed.watched().count() == targets.len()
    });
    let profile = governed.finish();
    let told = profile.meta.governed.iter().filter(|one| one.allocations_seen > 0).count();
    assert!(told >= 64, "{told} of 64 are told of; {storm} of the storm were met");
}
