//! The stacks of the heap's live, pinned and blocked bytes: census and recording together, compared with what a program knows from its own
//! addresses.

mod target;

pub use target::stop;

use std::time::Duration;

use serde_json::Value;

use self::target::Target;
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// The report's value of a key, over all stacks whose frames contain a function.
fn of_function(report: &Value, function: &str, key: &str) -> u64 {
    let stacks = report["stacks"].as_array().unwrap().iter();
    let with = stacks.filter(|stack| stack["frames"].as_array().unwrap().iter().any(|frame| frame["function"] == function));
    with.map(|stack| stack[key].as_u64().unwrap()).sum()
}

fn sum(report: &Value, key: &str) -> u64 {
    report["stacks"].as_array().unwrap().iter().map(|stack| stack[key].as_u64().unwrap()).sum()
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("{key} is missing: {value}"))
}

#[test]
fn the_stack_that_keeps_every_64th_block_is_first_by_pinned_with_the_bytes_that_its_program_computes() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&[]);
    let recording = Recording::attach(&[target.pid()]);
    let own = target.tell("fill");
    let anonymous_before = target.anonymous_bytes();
    let census = target.census();
    let (report, profile) = target::stop(recording);

    let pinned = of_function(&report, "site_keeper", "pinned_bytes");
    assert_eq!(pinned, number(&own, "pinned_bytes"), "{own}");
    assert_eq!(of_function(&report, "site_keeper", "live_bytes"), number(&own, "kept_chunk_bytes"));
    assert_eq!(of_function(&report, "site_keeper", "live_allocations"), number(&own, "kept"));
    let by_pinned = target::report(&profile, "pinned");
    let first = by_pinned["stacks"][0]["frames"].as_array().unwrap();
    assert!(first.iter().any(|frame| frame["function"] == "site_keeper"), "first by pinned: {first:?}");
    // The large block has more live bytes and pins nothing.
    assert!(of_function(&report, "site_large", "live_bytes") >= 20 << 20);
    assert_eq!(of_function(&report, "site_large", "pinned_bytes"), 0);

    // The sums are the census's, to the byte.
    let process = &report["processes"][0];
    for key in ["live_bytes", "pinned_bytes"] {
        assert_eq!(sum(&report, key), number(process, key), "{key}");
        assert_eq!(number(process, key), number(&census["heaps"][0], key), "{key}: recording and census command");
    }
    assert_eq!(sum(&report, "live_allocations"), number(&census["heaps"][0], "live_allocations"));

    // The blocks from before, less those freed since; libc's own few blocks are also from before.
    let early = number(&target.ready, "early");
    let before = of_function(&report, "[before attach]", "live_allocations");
    assert!((early..early + 8).contains(&before), "{before}");
    assert!(of_function(&report, "[before attach]", "live_bytes") >= early * number(&target.ready, "early_chunk_bytes"));
    assert_eq!(of_function(&report, "[before attach]", "inuse_bytes"), 0, "nothing of it was recorded");

    // Freeing what pins, and trimming, returns what was predicted.
    let predicted = number(process, "trimmable_bytes") + pinned + number(&own, "kept_chunk_bytes");
    target.tell("release");
    target.tell("trim");
    let returned = anonymous_before - target.anonymous_bytes();
    let allowed = (predicted / 100).max(256 << 10);
    assert!(returned.abs_diff(predicted) <= allowed, "predicted {predicted}, returned {returned}");
}

#[test]
fn the_sums_over_the_stacks_are_the_censuss_in_jemalloc_and_tcmalloc_too() {
    if bpf().is_none() {
        return;
    }
    for library in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"] {
        let mut target = Target::start(&[("LD_PRELOAD", &format!("{}/{library}", crate::support::build::LIB_DIR))]);
        let recording = Recording::attach(&[target.pid()]);
        target.tell("fill");
        let (report, _) = target::stop(recording);
        let process = &report["processes"][0];
        assert_eq!(sum(&report, "live_bytes"), number(process, "live_bytes"), "{library}: {process}");
        assert!(of_function(&report, "site_large", "live_bytes") >= 20 << 20, "{library}");
        assert_eq!(sum(&report, "pinned_bytes"), process["pinned_bytes"].as_u64().unwrap_or(0), "{library}");
    }
}

#[test]
fn a_heap_that_was_larger_during_the_recording_has_a_moment_near_its_peak() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&[]);
    let mut command = fragprof();
    command.env("FRAGPROF_LOG", "debug");
    let recording = Recording::attach_by(command, &[target.pid()], &[]);
    // The start's census is of the heap before it grows.
    assert!(recording.process.err.wait_for(LIMIT, |line| line.contains("at its start")).is_some(), "{}", recording.process.err);
    let large = number(&target.tell("fill"), "large_bytes");
    let looked = recording.process.err.wait_for(LIMIT, |line| line.contains("took a census of process"));
    assert!(looked.is_some(), "{}", recording.process.err);
    // That census may have been taken while the heap was still growing. The next one follows a second later, if the peak rose by 5 % since.
    std::thread::sleep(Duration::from_millis(2500));
    target.tell("drop");
    let (report, profile) = target::stop(recording);
    let process = &report["processes"][0];
    let peak = &process["at_peak"];
    let near = large - large / 20;
    assert!(number(peak, "recorded_live_bytes") >= near, "{process}");
    assert!(number(peak, "recorded_live_bytes") <= number(process, "peak_inuse_bytes"), "{process}");
    assert!(number(&peak["heap"], "live_bytes") >= near, "{process}");
    assert!(number(process, "live_bytes") < near, "{process}");
    // The start is included too: the blocks that were live before.
    let early = number(&target.ready, "early") * number(&target.ready, "early_chunk_bytes");
    assert!((early..large).contains(&number(&process["at_start"]["heap"], "live_bytes")), "{process}");
    let text = target::text(&profile);
    assert!(text.contains("at start") && text.contains("at peak"), "{text}");
}

#[test]
fn blocks_whose_free_was_lost_are_removed_and_counted() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&[]);
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--buffer-kib", "4"]);
    let live = number(&target.tell("churn"), "live");
    let (report, profile) = target::stop(recording);
    assert!(number(&report["losses"], "lost_frees") > 0, "{}", report["losses"]);
    let corrections = &report["corrections"];
    assert!(number(corrections, "proven_free") > 0, "{corrections}");
    // Everything except a hundred blocks was freed: freed blocks may only remain where the address is in use again.
    let inuse = of_function(&report, "site_churn", "inuse_allocations");
    assert!(inuse <= live, "{inuse} blocks are reported live, {live} are; {corrections}");
    let text = target::text(&profile);
    assert!(text.contains("corrected") && text.contains("proven free"), "{text}");
}
