//! The test programs alone, without a recording: their ledgers are the ground truth of all other tests, so they are checked against
//! valgrind, which counts the same blocks by other means.

use std::collections::BTreeMap;
use std::process::Command;

use crate::support::build::{self, LIB_DIR, Link};
use crate::support::process::run;
use crate::support::truth::Truth;
use crate::support::{serial, skip};

/// The last line of a program that runs without a test's rendezvous.
fn final_ledger(command: &mut Command) -> Truth {
    let done = run(command);
    assert!(done.status.success(), "{command:?} ended with {}:\n{}", done.status, done.err);
    let line = done.out.lines().last().unwrap_or_else(|| panic!("{command:?} printed nothing"));
    Truth::parse(line).unwrap_or_else(|e| panic!("{e}: {line}"))
}

/// Live bytes and blocks by site, from `valgrind --leak-check=full --show-leak-kinds=all`, in the same run as the line of `ledger`.
fn by_valgrind(text: &str) -> BTreeMap<String, (u64, u64)> {
    let mut sites: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut record: Option<(u64, u64)> = None;
    for line in text.lines() {
        // `==7== 1,234 bytes in 5 blocks are still reachable in loss record 3 of 9`, then one line per frame, leaf first.
        let line = line.trim_start_matches(|c: char| c == '=' || c.is_ascii_digit()).trim();
        if let (true, Some((bytes, rest))) = (line.contains("in loss record"), line.split_once(" bytes in ")) {
            let number = |s: &str| s.split(' ').next().unwrap().replace(',', "").parse().unwrap();
            record = Some((number(bytes), number(rest)));
        } else if let (Some((bytes, blocks)), Some((_, frame))) = (record, line.split_once(": ")) {
            let function = frame.split(['(', ' ']).next().unwrap();
            if function.starts_with("site_") || function.starts_with("early_") {
                let sum = sites.entry(function.to_owned()).or_default();
                *sum = (sum.0 + bytes, sum.1 + blocks);
                record = None;
            }
        }
    }
    sites
}

fn check_against_valgrind(name: &str, link: Link) {
    let Some(valgrind) = build::tool("valgrind") else { return };
    let mut command = Command::new(valgrind);
    command.args(["--leak-check=full", "--show-leak-kinds=all", "--num-callers=30", "--run-libc-freeres=no"]);
    command.arg(build::program(name, link)).arg("without-pvalloc");
    let done = run(&mut command);
    assert!(done.status.success(), "valgrind ended with {}:\n{}", done.status, done.err);
    let truth = Truth::parse(done.out.lines().last().unwrap_or_default()).unwrap();
    let mut seen = by_valgrind(&done.err);
    for site in truth.sites.iter().filter(|site| site.live_count > 0) {
        let got = seen.remove(&site.site).unwrap_or_default();
        assert_eq!(got, (site.live_bytes, site.live_count), "valgrind and the ledger of {name} differ at {}", site.site);
    }
    assert!(seen.is_empty(), "valgrind found sites that the ledger of {name} lacks: {seen:?}");
}

#[test]
fn the_ledger_of_the_c_entry_points_equals_valgrinds() {
    check_against_valgrind("entry_points", Link::Dynamic);
}

#[test]
fn the_ledger_of_operator_new_equals_valgrinds() {
    check_against_valgrind("new_delete", Link::Dynamic);
}

#[test]
fn the_ledger_of_realloc_equals_valgrinds() {
    check_against_valgrind("realloc_forms", Link::Dynamic);
}

#[test]
fn the_ledger_of_nested_calls_equals_valgrinds() {
    check_against_valgrind("nested", Link::Dynamic);
}

#[test]
fn the_ledger_of_threads_equals_valgrinds() {
    let _alone = serial();
    check_against_valgrind("short_threads", Link::Dynamic);
}

#[test]
fn every_program_runs_with_every_allocator() {
    const EVERYWHERE: &[&str] = &[
        "cancelled",
        "deep_recursion",
        "entry_points",
        "exec_twice",
        "failures",
        "fork_threads",
        "nested",
        "new_delete",
        "over_aligned",
        "realloc_forms",
        "replaced_new",
        "short_threads",
        "signal_stacks",
    ];
    let _alone = serial();
    for name in EVERYWHERE {
        for library in ["", "libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
            let mut command = Command::new(build::program(name, Link::Dynamic));
            if !library.is_empty() {
                command.env("LD_PRELOAD", format!("{LIB_DIR}/{library}"));
            }
            let truth = final_ledger(&mut command);
            assert_eq!(truth.phase, "done", "{name} with {library}");
            assert!(truth.live().1 > 0 && truth.sites.iter().any(|s| s.allocations > s.live_count), "{name}: {truth:?}");
        }
    }
}

#[test]
fn every_way_of_linking_an_allocator_gives_a_program_that_runs() {
    let links =
        [Link::Jemalloc, Link::Tcmalloc, Link::Mimalloc, Link::StaticGlibc, Link::StaticMusl, Link::StaticJemalloc, Link::TcmallocInside];
    for link in links {
        let truth = final_ledger(&mut Command::new(build::program("entry_points", link)));
        assert!(truth.live().1 > 0, "{link:?}");
    }
}

#[test]
fn a_skip_is_a_failure_where_ci_is_true() {
    // Which of the two cases can be tested depends on the environment of this run.
    let skipped = std::panic::catch_unwind(|| skip::<()>("a test of skipping"));
    assert_eq!(skipped.is_err(), std::env::var("CI").as_deref() == Ok("true"));
}
