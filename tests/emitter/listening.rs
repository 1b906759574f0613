//! The ways in which fragprof attaches to an emitter: at launch, through exec, in forked children, live.

use std::io::Write as _;

use tempfile::TempDir;

use super::programs::{compile, sampled};
use super::report::Estimates;
use crate::support::process::Process;
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf};

#[test]
fn a_command_started_with_the_sampler_is_recorded_from_its_first_allocation() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    let mut command = fragprof();
    command.args(["record", "-d", "60s", "-o"]).arg(folder.path().join("out.pb.gz")).arg("--");
    // Every allocation is sampled: the estimates are exact.
    command.arg(env!("CARGO_BIN_EXE_fragprof")).args(["run", "--sample-bytes", "1", "--"]).arg(&program).args(["1", "1"]);
    let mut recording = Process::start_piped(&mut command);
    let mut input = recording.input();
    recording.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    input.write_all(b"g").unwrap();
    let line = recording.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
    recording.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.err.all());
    let words: Vec<&str> = line.split_whitespace().collect();
    let report = Estimates::read(&folder.path().join("out.pb.gz"));
    assert_eq!(report.0["mode"], "sampled", "{}", report.said());
    for pair in words[1..7].chunks(2) {
        assert_eq!(report.of_function("inuse_bytes", pair[0]).est, pair[1].parse::<f64>().unwrap(), "{}\n{}", pair[0], report.said());
    }
    drop(input);
}

#[test]
fn a_governed_recording_of_a_process_with_an_emitter_records_its_samples() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    let mut process = Process::start_piped(sampled(&program, 4096).args(["1", "4"]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let recording = Recording::attach_by(fragprof(), &[process.pid()], &["--mode", "governed"]);
    let mut input = process.input();
    input.write_all(b"g").unwrap();
    process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
    let report = Estimates::of(recording);
    assert_eq!(report.0["mode"], "sampled");
    assert!(report.of_function("inuse_bytes", "site_small").est > 0.0, "{}", report.said());
    drop(input);
}

#[test]
fn children_of_a_sampled_program_run_unharmed_while_it_is_listened_to() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    for options in [&[][..], &["--children"][..]] {
        let mut process = Process::start_piped(sampled(&program, 4096).args(["1", "4"]));
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
        let recording = Recording::attach_by(fragprof(), &[process.pid()], options);
        let mut input = process.input();
        input.write_all(b"fffg").unwrap();
        let line = process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
        assert_eq!(process.out.to_string().matches("child 0").count(), 3, "{}", process.out);
        let truth: f64 = line.split_whitespace().nth(4).unwrap().parse().unwrap();
        let report = Estimates::of(recording);
        let small = report.0["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == process.pid());
        let small: f64 = small
            .filter(|stack| stack["frames"].to_string().contains("site_small"))
            .map(|stack| stack["inuse_bytes_est"].as_f64().unwrap())
            .sum();
        let stderr = (4096.0 * truth).sqrt();
        assert!((small - truth).abs() < 4.0 * stderr, "{small} of {truth}");
        drop(input);
    }
}

#[test]
fn top_shows_the_estimates_of_an_emitter_under_names_of_their_own() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages", &["-O2"]);
    let mut process = Process::start_piped(sampled(&program, 4096).args(["1", "4"]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let mut top = Process::start(fragprof().args(["top", "--json", "-p", &process.pid().to_string()]));
    top.out.wait_for(LIMIT, |line| line.contains("\"source\":\"sampled in the process")).unwrap();
    process.input().write_all(b"g").unwrap();
    let line = top.out.wait_for(LIMIT, |line| line.contains("site_small")).unwrap();
    let sample: serde_json::Value = serde_json::from_str(&line).unwrap();
    let process = &sample["processes"][0];
    assert!(process["inuse_bytes_est"].as_f64().unwrap() > 0.0 && process["inuse_bytes_stderr"].as_f64().unwrap() > 0.0);
    assert!(process.get("inuse_bytes").is_none() && process.get("peak_inuse_bytes").is_none());
    top.signal(rustix::process::Signal::INT);
    top.wait(LIMIT);
}
