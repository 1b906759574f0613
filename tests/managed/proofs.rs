//! Java programs of the kinds that grow natively: many threads with direct buffers and Deflaters, classes that are unloaded or replaced, calls
//! without JNI.

use std::io::Write as _;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::java::{self, Java};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// Records a program between its lines `ready` and the next one. Returns that line and the report.
fn recorded(mut command: Command) -> (String, Value) {
    let mut process = Process::start_piped(&mut command);
    let mut input = process.input();
    assert!(process.out.wait_for(4 * LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
    let mut recording = Recording::attach(&[process.pid()]);
    writeln!(input).unwrap();
    let said = process.out.nth(1, 4 * LIMIT).unwrap_or_else(|| panic!("{}\n{}", process.out, process.err));
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(4 * LIMIT).success(), "{}", recording.process.err.all());
    let report = run(fragprof().arg("report").arg(recording.file()).args(["--by", "allocated", "--json", "--top", "1000000"]));
    (said, serde_json::from_str(&report.out).unwrap())
}

/// The stacks with frames of all these functions, in this order from the leaf.
fn through<'a>(report: &'a Value, functions: &'a [&str]) -> impl Iterator<Item = &'a Value> {
    report["stacks"].as_array().unwrap().iter().filter(|stack| {
        let mut frames = stack["frames"].as_array().unwrap().iter().map(|frame| frame["function"].as_str().unwrap_or_default());
        functions.iter().all(|wanted| frames.any(|name| name.contains(wanted)))
    })
}

fn sum<'a>(stacks: impl Iterator<Item = &'a Value>, key: &str) -> u64 {
    stacks.map(|stack| stack[key].as_u64().unwrap()).sum()
}

fn command(java: &Java, directory: &TempDir, main: &str) -> Command {
    let mut command = java.command(["-Xmx128m", "-cp"]);
    command.arg(directory.path()).arg(main);
    command
}

#[test]
fn direct_buffers_of_many_threads_and_unloaded_classes_are_named_and_no_byte_is_missing() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all() {
        let directory = TempDir::new().unwrap();
        java::compile(&java, directory.path(), &[java::source("Threads.java")]);
        let (said, report) = recorded(command(&java, &directory, "Threads"));
        let counted: Value = serde_json::from_str(&said).unwrap();
        // Blocks of buffers that the collector has found unused are freed by then or not: the JDK counts those that are not. The first call of
        // the method makes some small blocks of the VM's own.
        let live = sum(through(&report, &["Unsafe.allocateMemory", "java.nio.DirectByteBuffer.<init>", "Threads.keep"]), "inuse_bytes");
        let counted = counted["bytes"].as_u64().unwrap();
        assert!((counted..counted + 1024).contains(&live), "JDK {}: {live} of {counted} bytes", java.version);
        // 24 threads with 40 Deflaters each, and 30 classes with 20.
        let deflaters = |by: &[&str]| sum(through(&report, by), "allocations");
        let kept = deflaters(&["deflateInit2_", "java.util.zip.Deflater.init", "Threads.keep"]);
        let unloaded = deflaters(&["deflateInit2_", "java.util.zip.Deflater.init", "Threads$Unloaded.run", "Threads.unload"]);
        assert!(kept > 0 && kept % (24 * 40) == 0, "JDK {}: {kept}", java.version);
        // A class that the collector unloads before its names have been read, on a busy machine, has none; its calls are there all the same.
        let nameless = deflaters(&["deflateInit2_", "java.util.zip.Deflater.init", "[unloaded Java code]", "Threads.unload"]);
        assert_eq!((unloaded + nameless) * 24 * 40, kept * 30 * 20, "JDK {}: {report:#}", java.version);
        assert!(unloaded > nameless, "JDK {}: {unloaded} calls of classes with names, {nameless} without", java.version);
    }
}

#[test]
fn calls_without_jni_are_named_in_both_directions() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all().into_iter().filter(|java| java.version >= 22) {
        let directory = TempDir::new().unwrap();
        let javac = java.program.with_file_name("javac");
        let made = run(Command::new(javac).arg("-d").arg(directory.path()).arg(java::source("Ffm.java")));
        assert!(made.status.success(), "{}", made.err);
        let mut started = java.command(["--enable-native-access=ALL-UNNAMED", "-cp"]);
        started.arg(directory.path()).arg("Ffm");
        let (_, report) = recorded(started);
        let down = sum(through(&report, &["Ffm.block", "Ffm.down", "Ffm.main"]), "allocated_bytes");
        let up = sum(through(&report, &["Ffm.block", "Ffm.compare", "qsort", "Ffm.up", "Ffm.main"]), "allocated_bytes");
        assert_eq!((down, up), (500 * 33_333, 500 * 44_444), "JDK {}", java.version);
    }
}

/// The line of a source at which it allocates.
fn allocating_line(source: &std::path::Path) -> u64 {
    let text = std::fs::read_to_string(source).unwrap();
    1 + text.lines().position(|line| line.contains("new Deflater")).unwrap() as u64
}

#[test]
fn a_method_that_was_replaced_while_it_ran_has_its_own_lines_and_its_successor_others() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all() {
        let (directory, replaced) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let (old, new) = (java::source("Body.java"), java::source("replaced/Body.java"));
        java::compile(&java, directory.path(), &[java::source("Redefine.java"), old.clone()]);
        java::compile(&java, replaced.path(), std::slice::from_ref(&new));
        let (manifest, agent) = (directory.path().join("manifest"), directory.path().join("agent.jar"));
        std::fs::write(&manifest, "Premain-Class: Redefine\nCan-Redefine-Classes: true\n").unwrap();
        let made = run(Command::new("jar").arg("cfm").args([&agent, &manifest]).arg("-C").arg(directory.path()).arg("Redefine.class"));
        assert!(made.status.success(), "{}", made.err);
        let mut started = java.command(["-Xmx128m"]);
        started.arg(format!("-javaagent:{}", agent.display())).arg("-cp").arg(directory.path()).arg("Redefine");
        started.arg(replaced.path().join("Body.class"));
        let (_, report) = recorded(started);
        let at = |source: &std::path::Path| {
            let line = allocating_line(source);
            let is_there = |stack: &&Value| {
                let mut frames = stack["frames"].as_array().unwrap().iter();
                frames.any(|frame| frame["function"] == "Body.run" && frame["file"] == "Body.java" && frame["line"] == line)
            };
            sum(through(&report, &["deflateInit2_", "Body.run", "Redefine.main"]).filter(is_there), "allocations")
        };
        let (before, after) = (at(&old), at(&new));
        assert!(before > 0 && before % 1000 == 0, "JDK {}: {before}", java.version);
        assert_eq!(before * 700, after * 1000, "JDK {}: {report:#}", java.version);
    }
}
