//! Objects of Python, recorded block by block, against what the interpreter says of them (`sys.getsizeof`).

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::python::{self, Python};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// The CPythons whose objects can be recorded while they run. Those with profile-guided optimization are refused, as distributions' are.
fn recordable() -> Vec<Python> {
    let mut all = python::all();
    all.retain(|python| !is_refused(python));
    all
}

fn is_refused(python: &Python) -> bool {
    let process = Process::start_piped(Command::new(&python.program).arg(python::source("objects.py")));
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    let directory = tempfile::tempdir().unwrap();
    let mut command = fragprof();
    command.args(["record", "--python-objects", "-d", "10ms", "-p", &process.pid().to_string(), "-o"]).arg(directory.path().join("p"));
    let done = run(&mut command);
    let is_refused = done.err.contains("profile-guided optimization");
    assert_eq!(done.status.success(), !is_refused, "{}: {}", python.version, done.err);
    is_refused
}

/// Live blocks and bytes by Python function.
type Live = BTreeMap<String, (u64, u64)>;

/// What `objects.py` said that it holds.
fn said(out: &str) -> Live {
    let line = |line: &str| {
        let mut words = line.split(' ');
        let (function, count, bytes) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some((function.to_owned(), (count, bytes)))
    };
    out.lines().filter_map(line).collect()
}

fn report(file: &Path) -> Value {
    let report = run(fragprof().arg("report").arg(file).args(["--by", "live", "--json", "--top", "1000000"]));
    assert!(report.status.success(), "{}", report.err);
    serde_json::from_str(&report.out).unwrap()
}

/// The report of a recording of `objects.py`, and what the program said.
fn record(python: &Python) -> (Value, Live) {
    let mut process = Process::start_piped(Command::new(&python.program).arg(python::source("objects.py")));
    let mut input = process.input();
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    let mut recording = Recording::attach_by(fragprof(), &[process.pid()], &["--python-objects"]);
    writeln!(input).unwrap();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "done").is_some(), "{}\n{}", process.out, process.err);
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
    let report = report(&recording.file());
    writeln!(input).unwrap();
    assert!(process.wait(LIMIT).success(), "{}", process.err);
    (report, said(&process.out.all()))
}

/// The same of `objects.py` as a command: fragprof's library passes the calls on.
fn launch(python: &Python) -> (Value, Live) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("objects.pb.gz");
    let mut command = fragprof();
    command.args(["record", "--python-objects", "-o"]).arg(&file).arg("--").arg(&python.program).arg(python::source("objects.py"));
    let mut process = Process::start_piped(&mut command);
    let mut input = process.input();
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    writeln!(input).unwrap();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "done").is_some(), "{}\n{}", process.out, process.err);
    process.signal(rustix::process::Signal::INT);
    assert!(process.wait(LIMIT).success(), "{}", process.err);
    drop(input);
    (report(&file), said(&process.out.to_string()))
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

fn compare(python: &Python, how: &str, (report, said): (Value, Live)) {
    let what = format!("CPython {} ({}), {how}", python.version, python.program.display());
    let recorded = recorded(&report);
    assert_eq!(said.len(), 3, "{what}: {said:?}");
    for (function, live) in &said {
        assert_eq!(recorded.get(function), Some(live), "{what}: {function}");
    }
    // What was freed in the end is not live; 3.14 keeps one small object of it in a list of its own.
    let grown = recorded.get("grown").copied().unwrap_or_default();
    assert!(grown == (0, 0) || python.minor == 14 && grown.0 == 1 && grown.1 <= 64, "{what}: {grown:?}");
    eprintln!("{what}: {said:?}");
}

/// Every live chunk of both heaps of a command has a stack, but for a few of the allocator's own.
fn compare_with_the_heap(python: &Python, report: &Value) {
    let attribution = &report["processes"][0]["attribution"];
    let of = |name: &str| attribution[name].as_u64().unwrap();
    // 8,000 of the program's own, and what the interpreter imports.
    assert!(of("attributed_allocations") > 15_000, "{}: {attribution}", python.version);
    // The tables of the allocator of objects itself, which it allocates while a call of it is open.
    assert!(of("unattributed_allocations") <= 16, "{}: {attribution}", python.version);
}

#[test]
fn objects_of_python_are_blocks_of_their_own_when_asked_for() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let all = recordable();
    for python in all.first().into_iter().chain(all.get(1..).and_then(<[Python]>::last)) {
        compare(python, "running", record(python));
    }
}

/// A command from its first object on, whatever its interpreter was built with.
#[test]
fn objects_of_a_command_are_recorded_from_the_first_to_the_last() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let all = python::all();
    // The distribution's, which is refused while it runs.
    let refused = all.iter().find(|python| is_refused(python));
    for python in refused.into_iter().chain(all.last()) {
        let (report, said) = launch(python);
        compare_with_the_heap(python, &report);
        compare(python, "started", (report, said));
    }
}

#[test]
#[ignore = "as both tests above, with every CPython on the machine: make python-objects"]
fn objects_of_every_python_are_blocks_of_their_own() {
    bpf().unwrap();
    for python in recordable() {
        compare(&python, "running", record(&python));
    }
    for python in python::all() {
        let (report, said) = launch(&python);
        compare_with_the_heap(&python, &report);
        compare(&python, "started", (report, said));
    }
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
