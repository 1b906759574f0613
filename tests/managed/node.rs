//! What is said of Node.js, whose functions are named by its perf map only.

use std::process::Command;

use serde_json::Value;

use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, build, serial};

const SCRIPT: &str = "const kept = []; function keepBuffers() { kept.push(Buffer.alloc(40000)); if (kept.length % 20 == 0) console.log('MORE'); } \
                      setInterval(keepBuffers, 5);";

/// What doctor says of a node with such options, and the notes and functions of a recording of it.
fn said(options: &[&str], environment: &str) -> Option<(String, Vec<String>, bool)> {
    let node = build::tool("node")?;
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(node);
    // V8 soon inlines so small a function into its caller, sooner the slower the program is: it has no frame of its own then.
    command.args(options).args(["--no-turbo-inlining", "-e", SCRIPT]).current_dir(directory.path()).env("NODE_OPTIONS", environment);
    let process = Process::start(&mut command);
    assert!(process.out.wait_for(LIMIT, |line| line == "MORE").is_some(), "{} {}", process.out, process.err);
    let doctor = run(fragprof().args(["doctor", "-p", &process.pid().to_string()]));
    let mut recording = Recording::attach(&[process.pid()]);
    let lines = process.out.to_string().lines().count();
    assert!(process.out.nth(lines + 5, LIMIT).is_some(), "{} {}", process.out, process.err);
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
    let report = run(fragprof().arg("report").arg(recording.file()).args(["--json", "--top", "10000"]));
    let report: Value = serde_json::from_str(&report.out).unwrap();
    let notes = report["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap().to_owned()).collect();
    let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", process.pid()));
    Some((doctor.out, notes, report["stacks"].to_string().contains("keepBuffers")))
}

/// V8 makes its code executable after the recording has begun, and the process and its perf map's directory are gone at the end.
#[test]
fn functions_of_a_node_that_is_launched_and_ends_are_named() {
    const BUFFERS: u64 = 800;
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    let Some(node) = build::tool("node") else { return };
    let script = format!(
        "const kept = []; function keepBuffers() {{ kept.push(Buffer.alloc(40000)); }} \
         const timer = setInterval(() => {{ keepBuffers(); if (kept.length == {BUFFERS}) clearInterval(timer); }}, 5);"
    );
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("node.pb.gz");
    let mut command = fragprof();
    // V8 also writes a log to its directory.
    command.args(["record", "-o"]).arg(&file).arg("--").arg(node).current_dir(directory.path());
    let done = run(command.args(["--perf-basic-prof", "--interpreted-frames-native-stack", "--no-turbo-inlining", "-e", &script]));
    assert!(done.status.success(), "{}", done.err);
    let report = run(fragprof().arg("report").arg(&file).args(["--by", "allocated", "--json", "--top", "100000"]));
    let report: Value = serde_json::from_str(&report.out).unwrap();
    let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", report["processes"][0]["pid"]));
    let stacks = report["stacks"].as_array().unwrap().iter();
    let of_function = stacks.filter(|stack| stack["frames"].to_string().contains("keepBuffers"));
    let large = of_function.filter(|stack| stack["allocated_bytes"].as_u64() >= Some(40_000));
    let bytes: u64 = large.map(|stack| stack["allocated_bytes"].as_u64().unwrap()).sum();
    // Code is known a second after it was first met.
    assert!(bytes > BUFFERS * 40_000 / 2, "{bytes} bytes are named: {}", report["notes"]);
    assert!(bytes < BUFFERS * 41_000, "{bytes}");
}

#[test]
fn doctor_and_the_profile_say_what_node_must_be_started_with_and_that_it_then_has_names() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    const ADVICE: &str =
        "JavaScript functions are not named: node writes no perf map; start it with --perf-basic-prof --interpreted-frames-native-stack";
    let Some((doctor, notes, is_named)) = said(&[], "") else { return };
    assert!(doctor.contains(ADVICE), "{doctor}");
    assert!(notes.iter().any(|note| note.contains(ADVICE)), "{notes:?}");
    assert!(!is_named);
    // As the advice says, on the command line and in the environment.
    let options = ["--perf-basic-prof", "--interpreted-frames-native-stack"];
    for (options, environment) in [(&options[..], String::new()), (&[], options.join(" "))] {
        let Some((doctor, notes, is_named)) = said(options, &environment) else { return };
        assert!(doctor.contains("JavaScript functions are named by node's perf map"), "{doctor}");
        assert!(!notes.iter().any(|note| note.contains("JavaScript")), "{notes:?}");
        assert!(is_named);
    }
}
