//! Java frames over the life of a JVM and of a recording: start, attach, windows, filters, virtual threads, JVMs that cannot be walked.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::java::{self, Java};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf};

/// A running program that allocates.
struct Load {
    process: Process,
    input: ChildStdin,
    _directory: TempDir,
}

fn compiled(java: &Java) -> TempDir {
    let directory = TempDir::new().unwrap();
    java::compile(java, directory.path(), &[java::source("Load.java")]);
    directory
}

impl Load {
    fn start(java: &Java, arguments: &[&str]) -> Self {
        let directory = compiled(java);
        let mut command = java.command(["-Xmx64m", "-cp"]);
        let mut process = Process::start_piped(command.arg(directory.path()).arg("Load").args(arguments));
        let input = process.input();
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        Self { process, input, _directory: directory }
    }

    fn stop(mut self) {
        writeln!(self.input).unwrap();
        assert!(self.process.wait(LIMIT).success(), "{}", self.process.err);
    }
}

fn report(file: &Path, more: &[&str]) -> Value {
    let done = run(fragprof().arg("report").arg(file).args(["--by", "allocated", "--json"]).args(more));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

/// The functions of each stack, leaf first.
fn stacks(report: &Value) -> Vec<Vec<String>> {
    let functions = |stack: &Value| {
        let frames = stack["frames"].as_array().unwrap();
        frames.iter().map(|frame| frame["function"].as_str().unwrap().to_owned()).collect()
    };
    report["stacks"].as_array().unwrap().iter().map(functions).collect()
}

/// Asserts that stacks go from the allocation through the Java methods to the thread's start.
fn assert_named(report: &Value) {
    let all = stacks(report);
    let whole = |stack: &&Vec<String>| {
        let at = |name: &str| stack.iter().position(|function| function.contains(name));
        at("deflateInit2_").is_some_and(|native| {
            let order =
                [Some(native), at("java.util.zip.Deflater.init"), at("Load.allocate"), at("Load.outer"), at("Load.work"), at("Load.main")];
            order.iter().all(Option::is_some) && order.is_sorted()
        })
    };
    assert!(all.iter().any(|stack| whole(&stack)), "{all:#?}");
    let (mut frames, mut with_line) = (0, 0);
    for stack in report["stacks"].as_array().unwrap() {
        // Windows estimate them.
        let allocations = stack["allocations"].as_u64().unwrap_or(1);
        for frame in stack["frames"].as_array().unwrap().iter().filter(|frame| frame["function"] == "Load.allocate") {
            frames += allocations;
            // `new Deflater()` or one of the calls below it. Runtime stubs that a compiler calls without a bytecode have no line.
            with_line += if frame["file"] == "Load.java" && frame["line"].as_u64().is_some_and(|line| (11..=15).contains(&line)) {
                allocations
            } else {
                0
            };
        }
    }
    assert!(frames > 0 && with_line * 1000 >= frames * 999, "{with_line} of {frames}");
}

#[test]
fn a_jvm_that_is_started_by_a_recording_is_named_as_soon_as_it_has_code() {
    if bpf().is_none() {
        return;
    }
    for java in java::all() {
        let directory = compiled(&java);
        let out = directory.path().join("out.pb.gz");
        let mut command = fragprof();
        command.args(["record", "--duration", "4s", "-o"]).arg(&out).arg("--").arg(&java.program);
        let mut process = Process::start_piped(command.args(["-Xmx64m", "-cp"]).arg(directory.path()).arg("Load"));
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        let mut input = process.input();
        std::thread::sleep(Duration::from_secs(2));
        writeln!(input).unwrap();
        assert!(process.wait(LIMIT).success(), "{}", process.err);
        assert_named(&report(&out, &[]));
    }
}

#[test]
fn filters_show_one_side_and_keep_every_byte() {
    if bpf().is_none() {
        return;
    }
    let Some(java) = java::all().into_iter().next_back() else { return };
    let load = Load::start(&java, &[]);
    let recording = Recording::attach(&[load.process.pid()]);
    std::thread::sleep(Duration::from_secs(2));
    let file = recording.file();
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success());
    let all = report(&file, &[]);
    assert_named(&all);
    let managed = report(&file, &["--frames", "managed"]);
    let native = report(&file, &["--frames", "native"]);
    for side in [&managed, &native] {
        assert_eq!(side["totals"]["allocated_bytes"], all["totals"]["allocated_bytes"]);
    }
    assert!(stacks(&managed).iter().flatten().any(|function| function == "Load.work"));
    assert!(stacks(&managed).iter().flatten().all(|function| function != "deflateInit2_"));
    assert!(stacks(&native).iter().flatten().all(|function| !function.starts_with("Load.")));
    let svg = file.with_extension("svg");
    let drawn = run(fragprof().arg("flamegraph").arg(&file).args(["--by", "allocated", "-o"]).arg(&svg));
    assert!(drawn.status.success(), "{}", drawn.err);
    let svg = std::fs::read_to_string(svg).unwrap();
    let colours = ["rgb(90,200,100)", "rgb(190,210,110)", "rgb(100,205,190)"];
    assert!(colours.iter().any(|colour| svg.contains(colour)), "no managed frame has its colour");
    load.stop();
}

#[test]
fn windows_name_java_frames() {
    if bpf().is_none() {
        return;
    }
    let Some(java) = java::all().into_iter().next_back() else { return };
    let load = Load::start(&java, &[]);
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out.pb.gz");
    let pid = load.process.pid().to_string();
    let done = Process::start(
        fragprof().args(["record", "--mode", "governed", "--budget", "5%", "--duration", "20s", "-p", &pid, "-o"]).arg(&out),
    )
    .wait(2 * LIMIT);
    assert!(done.success());
    assert_named(&report(&out, &[]));
    load.stop();
}

#[test]
fn a_virtual_threads_stack_says_where_its_callers_are() {
    if bpf().is_none() {
        return;
    }
    for java in java::all().into_iter().filter(|java| java.version >= 21) {
        let load = Load::start(&java, &["virtual"]);
        // The JVM makes what its virtual threads need with the first of them.
        std::thread::sleep(Duration::from_secs(1));
        let recording = Recording::attach(&[load.process.pid()]);
        std::thread::sleep(Duration::from_secs(3));
        let file = recording.file();
        recording.process.signal(rustix::process::Signal::INT);
        let mut recording = recording;
        assert!(recording.wait(LIMIT).success());
        let report = report(&file, &[]);
        let all = stacks(&report);
        let in_heap = |function: &String| function == fragprof::managed::hotspot::REST_IN_HEAP;
        let cut: Vec<&Vec<String>> = all.iter().filter(|stack| stack.iter().any(in_heap)).collect();
        assert!(!cut.is_empty(), "JDK {}: {all:#?}", java.version);
        for stack in cut {
            let at = stack.iter().position(in_heap).unwrap();
            let carrier = stack.iter().position(|function| function == "jdk.internal.vm.Continuation.run");
            assert!(stack[..at].iter().any(|function| function == "Load.parks"), "{stack:#?}");
            assert!(carrier.is_some_and(|carrier| carrier > at), "JDK {}: {stack:#?}", java.version);
        }
        let of_load = report["stacks"].as_array().unwrap().iter().filter(|stack| stack.to_string().contains("Load."));
        // Where the callees that park are compiled one by one, they are more frames than a walk takes.
        let is_whole = |stack: &Value| stack["truncated"].is_null() || stack["truncated"] == "more frames than the limit";
        assert!(of_load.clone().all(is_whole), "{:#?}", of_load.collect::<Vec<_>>());
        load.stop();
    }
}

#[test]
fn a_jvm_that_does_not_describe_itself_is_refused_by_name() {
    if bpf().is_none() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let compile = |source: &str, name: &str, more: &[&str]| -> PathBuf {
        let (file, out) = (dir.join(format!("{name}.c")), dir.join(name));
        std::fs::write(&file, source).unwrap();
        let done = run(Command::new("cc").arg("-O1").arg(&file).args(more).arg("-o").arg(&out));
        assert!(done.status.success(), "{}", done.err);
        out
    };
    let library = compile("int vm(void) { return 7; }", "libjvm.so", &["-shared", "-fPIC"]);
    let program = compile(
        "#include <dlfcn.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
         int main(int n, char **a) { (void)n; if (!dlopen(a[1], RTLD_NOW)) return 1; puts(\"ready\"); fflush(stdout);\n\
         for (int i = 0; i < 500; i++) { free(malloc(100)); usleep(30000); } return 0; }",
        "other",
        &[],
    );
    let mut process = Process::start(Command::new(program).arg(&library));
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some());
    let doctor = run(fragprof().args(["doctor", "-p", &process.pid().to_string()]));
    assert!(doctor.out.contains("Java frames are not named") && doctor.out.contains("gHotSpotVMStructs"), "{}", doctor.out);
    let recording = Recording::attach(&[process.pid()]);
    let file = recording.file();
    recording.finish();
    let _ = file;
    process.wait(LIMIT);
}

#[test]
fn doctor_says_that_java_frames_will_be_named() {
    if bpf().is_none() {
        return;
    }
    for java in java::all() {
        let load = Load::start(&java, &[]);
        let doctor = run(fragprof().args(["doctor", "-p", &load.process.pid().to_string()]));
        let expected = format!("Java frames are named by method, file and line (HotSpot of JDK {})", java.version);
        assert!(doctor.out.contains(&expected), "{}", doctor.out);
        load.stop();
    }
}
