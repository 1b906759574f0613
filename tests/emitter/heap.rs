//! The sample joined with the census by address: pinned bytes by stack, blocks from before the recording, and unattributed ones.

use std::io::Write as _;
use std::process::Command;

use tempfile::TempDir;

use super::programs::{compile, sampled};
use super::report::Estimates;
use crate::support::process::Process;
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// The line that starts with a word, as (name, number) pairs.
fn ledger(process: &Process) -> std::collections::HashMap<String, f64> {
    let line = process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    words.chunks(2).map(|pair| (pair[0].to_owned(), pair[1].parse().unwrap())).collect()
}

#[test]
fn live_blocks_from_before_are_distinguished_from_newer_ones_even_at_the_same_addresses() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    let mut process = Process::start_piped(sampled(&program, 32 << 10).args(["32", "32"]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let recording = Recording::attach(&[process.pid()]);
    let mut input = process.input();
    input.write_all(b"g").unwrap();
    let truth = ledger(&process);
    let report = Estimates::of(recording);

    // Blocks of 240 bytes are chunks of 256.
    let before = report.of_function("live_bytes", "[before attach]");
    let expected = truth["site_before"] / 240.0 * 256.0;
    let arrays = 32.0 * 1024.0 * 1024.0 / 240.0 * 8.0;
    assert!(before.deviation(expected + arrays).abs() < 4.0, "{before:?}, expected {expected} and {arrays} of arrays");
    assert!(before.stderr > 0.0 && before.stderr < 0.15 * expected, "{before:?}");
    for site in ["site_small", "site_large"] {
        let figure = report.of_function("inuse_bytes", site);
        assert!(figure.deviation(truth[site]).abs() < 4.0, "{site}: {figure:?}, {}", truth[site]);
    }
    let rest = report.of_function("live_bytes", "[unattributed]");
    assert!(rest.est < 4.0 * rest.stderr.max(200_000.0), "{rest:?}");
    // All rows together equal the census, up to rounding, and the census equals malloc's account.
    let live = report.0["processes"][0]["live_bytes"].as_f64().unwrap();
    let sum = report.total("live_bytes");
    assert!((live / truth["mallinfo2"] - 1.0).abs() < 0.02, "census {live}, mallinfo2 {}", truth["mallinfo2"]);
    assert!((sum.est - live).abs() < 0.01 * live + 4.0 * sum.stderr, "{sum:?} of {live}");
    // The older live blocks lie between those allocated in the gaps: there is little free memory, and pinned bytes are reported.
    let pinned = report.total("pinned_bytes");
    let census = report.0["processes"][0]["pinned_bytes"].as_f64().unwrap();
    assert!((pinned.est - census).abs() <= 0.05 * census + 4.0 * pinned.stderr + 65536.0, "{pinned:?} of {census}");
}

#[test]
fn the_report_states_the_source_of_its_figures_and_their_error() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    let mut process = Process::start_piped(sampled(&program, 32 << 10).args(["4", "8"]).env("FRAGPROF_SAMPLE_BY_SITE", "0"));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let pid = process.pid().to_string();
    let page = crate::support::process::run(fragprof().args(["doctor", "-p", &pid])).out;
    assert!(page.contains("emitter: otel_memory in libfragprof_sampler.so") && page.contains("one sample per 32768"), "{page}");
    let plain = Process::start(Command::new("sleep").arg("60"));
    let page = crate::support::process::run(fragprof().args(["doctor", "-p", &plain.pid().to_string()])).out;
    assert!(page.contains("emitter: none") && page.contains("2 µs"), "{page}");

    let mut recording = Recording::attach(&[process.pid()]);
    assert!(recording.process.err.wait_for(LIMIT, |line| line.contains("is sampled in the process, otel_memory in")).is_some());
    process.input().write_all(b"g").unwrap();
    ledger(&process);
    recording.process.signal(rustix::process::Signal::INT);
    recording.wait(LIMIT);
    let text = crate::support::process::run(fragprof().arg("report").arg(recording.file())).out;
    for part in
        ["sampled recording", "source     sampled in the process, otel_memory in libfragprof_sampler.so", "one per 32.0 KiB", "±95%", " ±"]
    {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    let report = Estimates::read(&recording.file());
    assert_eq!(report.0["processes"][0]["sample_bytes"], 32 << 10);
    assert!(report.0["totals"].get("inuse_bytes").is_none(), "an estimate under the name of a counted value");
    let pprof = folder.path().join("raw.pb.gz");
    std::fs::copy(recording.file(), &pprof).unwrap();
}
