//! Objects of Python, recorded block by block, against what the interpreter says of them (`sys.getsizeof`).

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;

use serde_json::Value;

use super::python::{self, Python};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// The CPythons whose objects can be recorded. Those with profile-guided optimization are refused, as distributions' are.
fn recordable() -> Vec<Python> {
    let mut all = python::all();
    all.retain(|python| {
        let process = Process::start_piped(Command::new(&python.program).arg(python::source("objects.py")));
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        let directory = tempfile::tempdir().unwrap();
        let mut command = fragprof();
        command.args(["record", "--python-objects", "-d", "10ms", "-p", &process.pid().to_string(), "-o"]).arg(directory.path().join("p"));
        let done = run(&mut command);
        let is_refused = done.err.contains("profile-guided optimization");
        assert_eq!(done.status.success(), !is_refused, "{}: {}", python.version, done.err);
        !is_refused
    });
    all
}

/// Live blocks and bytes by Python function.
type Live = BTreeMap<String, (u64, u64)>;

/// The report of a recording of `objects.py`, and what the program said.
fn record(python: &Python, options: &[&str]) -> (Value, Live) {
    let mut process = Process::start_piped(Command::new(&python.program).arg(python::source("objects.py")));
    let mut input = process.input();
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    let recording = Recording::attach_by(fragprof(), &[process.pid()], options);
    writeln!(input).unwrap();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "done").is_some(), "{}\n{}", process.out, process.err);
    let file = recording.file();
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
    let report = run(fragprof().arg("report").arg(&file).args(["--by", "live", "--json", "--top", "1000000"]));
    assert!(report.status.success(), "{}", report.err);
    writeln!(input).unwrap();
    assert!(process.wait(LIMIT).success(), "{}", process.err);
    let out = process.out.all();
    let said = out.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (function, count, bytes) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((function.to_owned(), (count, bytes)))
    });
    (serde_json::from_str(&report.out).unwrap(), said.collect())
}

/// What was recorded by the innermost Python function.
fn recorded(report: &Value) -> Live {
    let mut live = Live::new();
    for stack in report["stacks"].as_array().unwrap() {
        let python = stack["frames"].as_array().unwrap().iter().find(|frame| frame["runtime"] == "python");
        let Some(function) = python.and_then(|frame| frame["function"].as_str()) else { continue };
        let sum = live.entry(function.to_owned()).or_default();
        *sum = (sum.0 + stack["inuse_allocations"].as_u64().unwrap_or(0), sum.1 + stack["inuse_bytes"].as_u64().unwrap_or(0));
    }
    live
}

fn compare(python: &Python) {
    let what = format!("CPython {} ({})", python.version, python.program.display());
    let (report, said) = record(python, &["--python-objects"]);
    let recorded = recorded(&report);
    assert_eq!(said.len(), 3, "{what}: {said:?}");
    for (function, live) in &said {
        assert_eq!(recorded.get(function), Some(live), "{what}: {function}");
    }
    // What was freed in the end is not live.
    assert_eq!(recorded.get("grown").copied().unwrap_or_default(), (0, 0), "{what}");
    eprintln!("{what}: {said:?}");
}

#[test]
fn objects_of_python_are_blocks_of_their_own_when_asked_for() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let all = recordable();
    all.first().into_iter().chain(all.get(1..).and_then(<[Python]>::last)).for_each(compare);
}

#[test]
#[ignore = "as objects_of_python_are_blocks_of_their_own_when_asked_for, with every CPython on the machine: make python-objects"]
fn objects_of_every_python_are_blocks_of_their_own() {
    bpf().unwrap();
    recordable().iter().for_each(compare);
}

/// A command from its first object on: every live chunk of both heaps has a stack, but for a few of the allocator's own.
#[test]
fn the_heap_of_objects_is_attributed_to_the_last_block() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let directory = tempfile::tempdir().unwrap();
    let (file, program) = (directory.path().join("objects.pb.gz"), python::source("objects.py"));
    let mut command = fragprof();
    let Some(python) = recordable().pop() else { return };
    command.args(["record", "--python-objects", "-o"]).arg(&file).arg("--").arg(&python.program).arg(program);
    let mut process = Process::start_piped(&mut command);
    let mut input = process.input();
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    writeln!(input).unwrap();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "done").is_some(), "{}\n{}", process.out, process.err);
    process.signal(rustix::process::Signal::INT);
    assert!(process.wait(LIMIT).success(), "{}", process.err);
    drop(input);
    let report = run(fragprof().arg("report").arg(&file).args(["--json", "--top", "1"]));
    let report: Value = serde_json::from_str(&report.out).unwrap();
    let attribution = &report["processes"][0]["attribution"];
    let of = |name: &str| attribution[name].as_u64().unwrap();
    eprintln!("{attribution}");
    assert!(of("attributed_allocations") > 20_000, "{attribution}");
    // The tables of the allocator of objects itself, which it allocates while a call of it is open.
    assert!(of("unattributed_allocations") <= 16, "{attribution}");
}

#[test]
fn a_recording_without_python_says_so() {
    if bpf().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("none.pb.gz");
    let done = run(fragprof().args(["record", "--python-objects", "-o"]).arg(&file).args(["--", "true"]));
    assert!(done.err.contains("no object of Python is recorded"), "{}", done.err);
    let done = run(fragprof().args(["record", "--python-objects", "--mode", "governed", "-o"]).arg(&file).args(["--", "true"]));
    assert!(done.err.contains("needs every call"), "{}", done.err);
}
