//! Python frames over the life of a recording: start, children, windows, filters, doctor, interpreters that cannot be read.

use std::io::Write as _;
use std::path::Path;
use std::process::{ChildStdin, Command};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::python::{self, Python};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf};

/// A running program that allocates.
struct Load {
    process: Process,
    input: ChildStdin,
}

impl Load {
    fn start(python: &Python, arguments: &[&str]) -> Self {
        let mut process = Process::start_piped(Command::new(&python.program).arg(python::source("load.py")).args(arguments));
        let input = process.input();
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        Self { process, input }
    }

    fn stop(mut self) {
        writeln!(self.input).unwrap();
        assert!(self.process.wait(LIMIT).success(), "{}", self.process.err);
    }
}

fn report(file: &Path, more: &[&str]) -> Value {
    let done = run(fragprof().arg("report").arg(file).args(["--by", "allocated", "--json", "--top", "100000"]).args(more));
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

/// The functions, with lines, that stand between the allocation and the module.
fn expected(python: &Python) -> [String; 4] {
    let name = |function: &str| if python.minor >= 11 { format!("Shop.{function}") } else { function.to_owned() };
    [name("allocate"), name("outer"), "work".into(), "main".into()]
}

/// Asserts that stacks go from an allocation through the Python functions to the program's start, without the evaluation loop.
fn assert_named(python: &Python, report: &Value, functions: &[String]) {
    let what = &python.version;
    let mut lines = Vec::new();
    for stack in report["stacks"].as_array().unwrap() {
        let frames = stack["frames"].as_array().unwrap();
        let of_python: Vec<&Value> = frames.iter().filter(|frame| frame["runtime"] == "python").collect();
        if of_python.first().is_none_or(|frame| frame["function"] != functions[0].as_str()) {
            continue;
        }
        let names: Vec<&str> = of_python.iter().map(|frame| frame["function"].as_str().unwrap()).collect();
        let mut all: Vec<&str> = functions.iter().map(String::as_str).collect();
        all.push("<module>");
        assert_eq!(names, all, "{what}: {stack:#}");
        assert!(frames.iter().all(|frame| frame["function"] != "_PyEval_EvalFrameDefault"), "{what}: {stack:#}");
        assert!(of_python.iter().all(|frame| frame["file"].as_str().is_some_and(|file| file.ends_with("load.py"))), "{what}: {stack:#}");
        assert!(stack["truncated"].is_null(), "{what}: {stack:#}");
        lines.push(of_python[0]["line"].as_u64().unwrap());
    }
    assert!(lines.contains(&12) && lines.contains(&13), "{what}: {lines:?}\n{:#?}", stacks(report));
    assert!(lines.iter().all(|line| (11..=14).contains(line)), "{what}: {lines:?}");
}

#[test]
fn a_program_that_is_started_by_a_recording_is_named_from_its_imports_on() {
    if bpf().is_none() {
        return;
    }
    for python in python::all() {
        let directory = TempDir::new().unwrap();
        let out = directory.path().join("out.pb.gz");
        let mut command = fragprof();
        command.args(["record", "--duration", "60s", "-o"]).arg(&out).arg("--").arg(&python.program).arg(python::source("load.py"));
        let mut process = Process::start_piped(&mut command);
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        let mut input = process.input();
        std::thread::sleep(Duration::from_secs(1));
        writeln!(input).unwrap();
        assert!(process.wait(LIMIT).success(), "{}", process.err);
        let report = report(&out, &[]);
        assert_named(&python, &report, &expected(&python));
        let imports = |stack: &&Vec<String>| stack.iter().any(|function| function == "_find_and_load");
        let all = stacks(&report);
        assert!(all.iter().filter(imports).count() > 10, "{}: {all:#?}", python.version);
        let unnamed = |function: &&String| function.starts_with("[Python ");
        assert_eq!(all.iter().flatten().find(unnamed), None, "{}", python.version);
    }
}

#[test]
fn forked_children_are_named() {
    if bpf().is_none() {
        return;
    }
    for python in python::all() {
        let load = Load::start(&python, &["fork"]);
        let recording = Recording::attach_by(fragprof(), &[load.process.pid()], &["--children"]);
        let file = recording.file();
        load.stop();
        let mut recording = recording;
        assert!(recording.wait(LIMIT).success());
        let report = report(&file, &[]);
        let [allocate, outer, work, main] = expected(&python);
        assert_named(&python, &report, &[allocate, outer, work, "serve".into(), main]);
    }
}

#[test]
fn filters_show_one_side_and_keep_every_byte() {
    if bpf().is_none() {
        return;
    }
    let python = python::one();
    let load = Load::start(&python, &[]);
    let recording = Recording::attach(&[load.process.pid()]);
    std::thread::sleep(Duration::from_secs(1));
    let file = recording.file();
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success());
    let all = report(&file, &[]);
    assert_named(&python, &all, &expected(&python));
    let managed = report(&file, &["--frames", "managed"]);
    let native = report(&file, &["--frames", "native"]);
    for side in [&managed, &native] {
        assert_eq!(side["totals"]["allocated_bytes"], all["totals"]["allocated_bytes"]);
    }
    assert!(stacks(&managed).iter().flatten().any(|function| function == "work"));
    assert!(stacks(&managed).iter().flatten().all(|function| !function.starts_with("Py")));
    assert!(stacks(&native).iter().flatten().all(|function| function != "work"));
    let svg = file.with_extension("svg");
    let drawn = run(fragprof().arg("flamegraph").arg(&file).args(["--by", "allocated", "-o"]).arg(&svg));
    assert!(drawn.status.success(), "{}", drawn.err);
    assert!(std::fs::read_to_string(svg).unwrap().contains("rgb(110,160,230)"));
    load.stop();
}

#[test]
fn windows_name_python_frames() {
    if bpf().is_none() {
        return;
    }
    let python = python::one();
    let load = Load::start(&python, &[]);
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out.pb.gz");
    let pid = load.process.pid().to_string();
    let done =
        Process::start(fragprof().args(["record", "--mode", "governed", "--duration", "20s", "-p", &pid, "-o"]).arg(&out)).wait(2 * LIMIT);
    assert!(done.success());
    assert_named(&python, &report(&out, &[]), &expected(&python));
    load.stop();
}

#[test]
fn doctor_says_whether_python_frames_will_be_named() {
    if bpf().is_none() {
        return;
    }
    for python in python::all() {
        let load = Load::start(&python, &[]);
        let doctor = run(fragprof().args(["doctor", "-p", &load.process.pid().to_string()]));
        // Before 3.11 the micro version is not in the file.
        let version = if python.minor >= 11 { python.version.clone() } else { format!("3.{}", python.minor) };
        let expected = format!("Python frames are named by function, file and line (CPython {version})");
        assert!(doctor.out.contains(&expected), "{}", doctor.out);
        load.stop();
    }
}

#[test]
fn an_interpreter_that_is_not_known_is_refused_by_name() {
    if bpf().is_none() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let (file, program) = (dir.join("other.c"), dir.join("python3.99"));
    let text = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
         const unsigned long Py_Version = 0x036300f0; char _PyRuntime[4096] = {1};\n\
         void *_PyEval_EvalFrameDefault(void) { return malloc(100); }\n\
         int main(void) { puts(\"ready\"); fflush(stdout);\n\
         for (int i = 0; i < 500; i++) { free(_PyEval_EvalFrameDefault()); usleep(30000); } return 0; }";
    std::fs::write(&file, text).unwrap();
    let done = run(Command::new("cc").args(["-O1", "-rdynamic"]).arg(&file).arg("-o").arg(&program));
    assert!(done.status.success(), "{}", done.err);
    let process = Process::start(&mut Command::new(program));
    assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some());
    let doctor = run(fragprof().args(["doctor", "-p", &process.pid().to_string()]));
    assert!(doctor.out.contains("Python frames are not named: its CPython is 3.99.0, which is newer than 3.14"), "{}", doctor.out);
    process.signal(rustix::process::Signal::KILL);
}

#[test]
fn a_limit_cuts_the_outer_frames_of_python_and_a_higher_one_changes_nothing() {
    if bpf().is_none() {
        return;
    }
    // Their calls take no frames of the native stack.
    for python in python::all().into_iter().filter(|python| python.minor >= 11) {
        for (limit, expected) in [("40", 40), ("128", 151), ("896", 151)] {
            let mut process = Process::start_piped(Command::new(&python.program).arg(python::source("deep.py")));
            let mut input = process.input();
            assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
            let mut recording = Recording::attach_by(fragprof(), &[process.pid()], &["--max-frames", limit]);
            writeln!(input, "150 30").unwrap();
            assert!(process.out.wait_for(LIMIT, |line| line == "done").is_some(), "{}\n{}", process.out, process.err);
            recording.process.signal(rustix::process::Signal::INT);
            assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
            let calls = |stack: &Vec<String>| stack.iter().filter(|function| *function == "down").count();
            let all = stacks(&report(&recording.file(), &[]));
            let stack = all.iter().find(|stack| calls(stack) == expected);
            let stack = stack.unwrap_or_else(|| panic!("{} {limit}: {:?}", python.version, all.iter().map(calls).collect::<Vec<_>>()));
            let is_cut = stack.iter().any(|function| function == "[Python frames beyond the limit]");
            assert_eq!((is_cut, stack.iter().any(|function| function == "<module>")), (expected == 40, expected != 40), "{stack:#?}");
        }
    }
}

#[test]
fn a_recording_in_which_no_python_code_allocates_says_so() {
    if bpf().is_none() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let (source, library) = (dir.join("alone.c"), dir.join("alone.so"));
    let text = "#include <pthread.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n\
         static void *work(void *_) { for (;;) { free(malloc(100)); usleep(5000); } return _; }\n\
         void run(void) { pthread_t thread; pthread_create(&thread, NULL, work, NULL);\n\
         puts(\"ready\"); fflush(stdout); pthread_join(thread, NULL); }";
    std::fs::write(&source, text).unwrap();
    let done = run(Command::new("cc").args(["-O1", "-fno-builtin", "-shared", "-fPIC", "-pthread"]).arg(&source).arg("-o").arg(&library));
    assert!(done.status.success(), "{}", done.err);
    let notes = |pid: u32, mode: &[&str]| {
        let out = dir.join("out.pb.gz");
        let command = fragprof().args(["record", "-p", &pid.to_string()]).args(mode).arg("-o").arg(&out).status();
        assert!(command.unwrap().success());
        report(&out, &[])["notes"].to_string()
    };
    let python = python::one();
    let code = format!("import ctypes; ctypes.CDLL({:?}).run()", library.display());
    let alone = Process::start(Command::new(&python.program).args(["-c", &code]));
    assert!(alone.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", alone.err);
    let load = Load::start(&python, &[]);
    for mode in [&["--duration", "2s"][..], &["--duration", "6s", "--mode", "governed"]] {
        let (of_alone, of_load) = (notes(alone.pid(), mode), notes(load.process.pid(), mode));
        assert!(of_alone.contains("no Python frame is in 1 call stack, although it runs CPython 3."), "{mode:?}: {of_alone}");
        assert!(!of_load.contains("no Python frame"), "{mode:?}: {of_load}");
    }
    alone.signal(rustix::process::Signal::KILL);
    load.stop();
}
