//! How often stated intervals are true: live bytes by site against the program's own account, over many recordings; and a leak among
//! churn.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use fragprof::profile::{Profile, ValueKind};
use fragprof::session::{Options, Recorder};
use fragprof::units::Pid;
use tempfile::TempDir;

use super::programs::{compile, limited, sampled};
use crate::support::process::Process;
use crate::support::{LIMIT, bpf, serial};

/// Estimate and standard error by the innermost function whose name starts with `site_`.
fn live_by_site(profile: &Profile) -> BTreeMap<String, (f64, f64)> {
    let mut sites: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    for stack in profile.stacks() {
        let Some(site) = profile.frames_of(stack).map(|frame| frame.function.to_string()).find(|name| name.starts_with("site_")) else {
            continue;
        };
        let sum = sites.entry(site).or_default();
        sum.0 += stack.values.get(ValueKind::InuseSpace) as f64;
        sum.1 = sum.1.hypot(stack.errors.get(ValueKind::InuseSpace) as f64);
    }
    sites
}

/// Records a program with a known heap so many times, and passes each profile to `look`; of all sites with 2 % of the heap or more, how
/// often the 95 % interval held, by site.
fn coverage(runs: u32, source: &str, command: impl Fn(&Path) -> Command, look: impl Fn(&Profile)) -> BTreeMap<String, (u32, u32)> {
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), source, "sites", &["-O2"]);
    let mut held: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    for run in 0..runs {
        let mut process = Process::start_piped(command(&program).arg(run.to_string()));
        let mut input = process.input();
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
        let mut recorder = Recorder::new(Options::default()).unwrap();
        recorder.watch(Pid(process.pid())).unwrap();
        input.write_all(b"g").unwrap();
        let line = process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
        let profile = recorder.finish().unwrap();
        look(&profile);
        let told = live_by_site(&profile);
        let changed = profile.meta.processes.iter().any(|process| process.longest_sample_bytes.is_some());
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let truth: Vec<(&str, f64)> = words.chunks(2).map(|pair| (pair[0], pair[1].parse().unwrap())).collect();
        let heap: f64 = truth.iter().map(|(_, bytes)| bytes).sum();
        for (site, bytes) in truth.into_iter().filter(|(_, bytes)| *bytes >= 0.02 * heap) {
            let (est, stderr) = told.get(site).copied().unwrap_or_default();
            // The score interval of a Poisson count; where the distance of samples changed, the error allows for few samples by itself.
            let unit = if est > 0.0 && !changed { stderr * stderr / est } else { 0.0 };
            let (middle, half) = (est + unit * 1.92, 1.96 * (stderr * stderr + unit * unit * 0.96).sqrt());
            let count = held.entry(site.to_owned()).or_default();
            count.0 += u32::from((bytes - middle).abs() <= half);
            count.1 += 1;
        }
        drop(input);
    }
    held
}

/// Asserts that at least as many lie inside as expected from a true rate of 95 %, less `deviations` standard deviations.
fn check(held: &BTreeMap<String, (u32, u32)>, sites_min: usize, deviations: f64) {
    let (inside, all) = held.values().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    println!("{held:?}: {inside} of {all}");
    assert!(held.len() >= sites_min, "{held:?}");
    let needed = 0.95 * f64::from(all) - deviations * (0.95 * 0.05 * f64::from(all)).sqrt();
    assert!(f64::from(inside) >= needed, "{inside} of {all} within their 95 % interval: {held:?}");
}

fn print(held: &BTreeMap<String, (u32, u32)>) {
    for (site, (inside, all)) in held {
        println!("{site:<18} {inside} of {all}");
    }
}

#[test]
fn every_site_of_two_percent_lies_within_its_stated_interval() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // Of 48, ten are outside by chance once in 5,000 times; with errors stated half as large as they are, sixteen would be.
    check(&coverage(8, "steady.c", |program| sampled(program, 32 << 10), |_| {}), 6, 5.0);
}

/// The interval of `uneven.c` changes all the time, for each thread by itself.
fn uneven(runs: u32) -> BTreeMap<String, (u32, u32)> {
    let told = |profile: &Profile| {
        let [process] = &profile.meta.processes[..] else { panic!("{:?}", profile.meta.processes) };
        let (mean, longest) = (process.sample_bytes.unwrap(), process.longest_sample_bytes.expect("the interval grew"));
        assert!(4 << 10 < mean && mean < longest, "{mean} {longest}");
        let words = profile.meta.source_words(process);
        assert!(words.contains("on average (up to "), "{words}");
    };
    coverage(runs, "uneven.c", |program| limited(program, 4 << 10, 20_000), told)
}

#[test]
fn sites_of_threads_whose_intervals_grow_apart_lie_within_their_stated_intervals() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    check(&uneven(8), 5, 5.0);
}

#[test]
#[ignore = "a hundred recordings: make coverage-sampled"]
fn every_site_of_two_percent_lies_within_its_stated_interval_a_hundred_times() {
    let _alone = serial();
    let held = coverage(100, "steady.c", |program| sampled(program, 32 << 10), |_| {});
    print(&held);
    let held_uneven = uneven(100);
    print(&held_uneven);
    check(&held, 6, 2.0);
    check(&held_uneven, 5, 2.0);
}

#[test]
fn a_leak_of_a_thousandth_of_the_allocation_rate_is_soon_the_first_by_live() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "leak.c", "leak", &["-O2"]);
    // Two minutes at 500 MB/s, compressed: as many bytes, as fast as the machine allocates them.
    let mut process = Process::start_piped(sampled(&program, 512 << 10).args(["20000", "0.001"]));
    let mut input = process.input();
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let mut recorder = Recorder::new(Options::default()).unwrap();
    recorder.watch(Pid(process.pid())).unwrap();
    input.write_all(b"g").unwrap();
    process.out.wait_for(LIMIT, |line| line.starts_with("leaked")).unwrap();
    let profile = recorder.finish().unwrap();
    let ranked = profile.ranked(ValueKind::InuseSpace);
    let attributed = ranked.iter().map(|stack| profile.frames_of(stack).next().unwrap().function.to_string());
    let first = attributed.into_iter().find(|name| !name.starts_with('[')).unwrap();
    assert_eq!(first, "site_leak");
    drop(input);
}
