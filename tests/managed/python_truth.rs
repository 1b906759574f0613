//! Python stacks of native allocations against those that the interpreter says at the same place (sys._getframe): function, file and line of
//! every frame.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use fragprof::bpf::PYTHON_FRAMES_MAX;
use serde_json::Value;
use tempfile::TempDir;

use super::python::{self, Python};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// Allocations and bytes, by Python frames, innermost first: function, file and line.
type Sums = BTreeMap<Vec<String>, (u64, u64)>;

/// A frame as the interpreter says it: function, file and line.
type Said = (String, String, Value);

fn text(function: &str, file: &str, line: &Value) -> String {
    format!("{function} {file}:{}", line.as_u64().unwrap_or(0))
}

/// What the interpreter said.
fn said(path: &Path) -> Sums {
    let mut sums = Sums::new();
    let said: Vec<(u64, Vec<Said>)> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for (size, frames) in said {
        let mut stack: Vec<String> = frames.iter().map(|(function, file, line)| text(function, file, line)).collect();
        if stack.len() > PYTHON_FRAMES_MAX as usize {
            stack.truncate(PYTHON_FRAMES_MAX as usize);
            stack.push("[Python frames beyond the limit] :0".to_owned());
        }
        let sum = sums.entry(stack).or_default();
        *sum = (sum.0 + 1, sum.1 + size);
    }
    sums
}

/// What was recorded of the blocks; and how many allocations have the evaluation loop on their stack, and how many of these Python frames.
fn recorded(report: &Value) -> (Sums, (u64, u64)) {
    let (mut sums, mut named) = (Sums::new(), (0, 0));
    for stack in report["stacks"].as_array().unwrap() {
        let frames = stack["frames"].as_array().unwrap();
        let function = |frame: &Value| frame["function"].as_str().unwrap().to_owned();
        let python = frames.iter().filter(|frame| frame["runtime"] == "python");
        let python: Vec<String> =
            python.map(|frame| text(&function(frame), frame["file"].as_str().unwrap_or(""), &frame["line"])).collect();
        let (allocations, bytes) = (stack["allocations"].as_u64().unwrap(), stack["allocated_bytes"].as_u64().unwrap());
        let has_loop = frames.iter().any(|frame| frame["function"] == "_PyEval_EvalFrameDefault");
        named.0 += if has_loop { allocations } else { 0 };
        named.1 += if python.is_empty() { 0 } else { allocations };
        if frames.iter().any(|frame| frame["function"] == "truth_block") {
            let sum = sums.entry(python).or_default();
            *sum = (sum.0 + allocations, sum.1 + bytes);
        }
    }
    (sums, named)
}

/// Runs the program so many rounds and compares every stack. Returns how many there were.
pub fn compare(python: &Python, options: &[&str], rounds: u32) -> u64 {
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let library = python::library();
    let truth = dir.join("truth");
    let what = format!("CPython {} ({}) {}", python.version, python.program.display(), options.join(" "));
    let mut command = Command::new(&python.program);
    command.args(options).arg(python::source("shapes.py")).arg(&library).arg(&truth).arg(rounds.to_string());
    let mut process = Process::start_piped(&mut command);
    let mut input = process.input();
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{what}: {}\n{}", process.out, process.err);
    let recording = Recording::attach(&[process.pid()]);
    writeln!(input).unwrap();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "done").is_some(), "{what}: {}\n{}", process.out, process.err);
    let file = recording.file();
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success(), "{what}: {}", recording.process.err.all());
    let report = run(fragprof().arg("report").arg(&file).args(["--by", "allocated", "--json", "--top", "1000000"]));
    assert!(report.status.success(), "{what}: {}", report.err);
    let report: Value = serde_json::from_str(&report.out).unwrap();
    writeln!(input).unwrap();
    assert!(process.wait(LIMIT).success(), "{what}: {}", process.err);

    let (said, (recorded, named)) = (said(&truth), recorded(&report));
    let wrong: Vec<String> = said
        .iter()
        .filter(|&(frames, sum)| recorded.get(frames) != Some(sum))
        .map(|(frames, sum)| format!("said {sum:?}, recorded {:?}: {frames:#?}", recorded.get(frames)))
        .collect();
    let invented: Vec<_> = recorded.iter().filter(|(frames, _)| !said.contains_key(*frames)).collect();
    let stacks = said.values().map(|sum| sum.0).sum();
    eprintln!(
        "{what}: {stacks} stacks in {} places, {} wrong, {} invented; {} allocations named, {} with calls of the loop that are not",
        said.len(),
        wrong.len(),
        invented.len(),
        named.1,
        named.0
    );
    assert!(
        wrong.is_empty() && invented.is_empty(),
        "{what}: {} of {} wrong, first:\n{}\nrecorded and not said: {:#?}",
        wrong.len(),
        said.len(),
        wrong.first().map_or("", String::as_str),
        invented.first()
    );
    stacks
}

#[test]
fn python_stacks_are_those_that_the_interpreter_says_in_function_file_and_line() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for python in python::all() {
        for options in [&[][..], &["-O", "-X", "dev"]] {
            let stacks = compare(&python, options, 30);
            assert!(stacks >= 6000, "{stacks}");
        }
    }
}
