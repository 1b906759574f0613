//! Java stacks of native allocations against those that JVMTI says at the same place: methods and bytecode indices.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::java::{self, Java};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// Bytes of the blocks at one stack, and how many there were.
type Stacks = BTreeMap<Vec<String>, BTreeMap<u64, u64>>;

/// A class's name without the address that hidden classes have, as in fragprof's frames.
fn plain(signature: &str) -> String {
    let name = signature.strip_prefix('L').and_then(|name| name.strip_suffix(';')).unwrap_or(signature);
    let end = ["+0x", "/0x", ".0x"].iter().find_map(|mark| name.find(mark)).unwrap_or(name.len());
    let name = &name[..end];
    // Until JDK 14 they have a number.
    let numbered = name.rsplit_once(['.', '/']).filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
    numbered.map_or(name, |(name, _)| name).replace('/', ".")
}

/// The agent's lines.
fn said(path: &Path) -> Stacks {
    let mut stacks = Stacks::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let (size, frames) = line.split_once('\t').unwrap();
        let frame = |frame: &str| {
            let (method, index) = frame.rsplit_once('@').unwrap();
            let (class, name) = method.rsplit_once(";.").unwrap();
            format!("{}.{name}@{}", plain(&format!("{class};")), index.parse::<i64>().unwrap().max(0))
        };
        let frames = frames.split_terminator(';').collect::<Vec<_>>();
        // The class's own semicolon separates too.
        let frames: Vec<String> = frames.chunks(2).map(|parts| frame(&format!("{};{}", parts[0], parts[1]))).collect();
        *stacks.entry(frames).or_default().entry(size.parse().unwrap()).or_default() += 1;
    }
    stacks
}

/// Allocations and bytes by Java frames.
type Sums = BTreeMap<Vec<String>, (u64, u64)>;

/// What was recorded of the agent's blocks. And of all stacks with Java frames, how many allocations were made, and at complete stacks.
fn recorded(report: &Value) -> (Sums, (u64, u64)) {
    let (mut stacks, mut completeness) = (Sums::new(), (0, 0));
    for stack in report["stacks"].as_array().unwrap() {
        let frames = stack["frames"].as_array().unwrap();
        let java = frames.iter().filter(|frame| frame["runtime"] == "java");
        let frame = |frame: &Value| {
            let index = frame["address"].as_str().map_or(0, |text| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap());
            format!("{}@{index}", frame["function"].as_str().unwrap())
        };
        let names: Vec<String> = java.map(frame).collect();
        let allocations = stack["allocations"].as_u64().unwrap();
        if !names.is_empty() {
            completeness.0 += allocations;
            completeness.1 += if stack["truncated"].is_null() { allocations } else { 0 };
        }
        if frames.iter().any(|frame| frame["function"] == "truth_block") {
            let sum = stacks.entry(names).or_default();
            sum.0 += allocations;
            sum.1 += stack["allocated_bytes"].as_u64().unwrap();
        }
    }
    (stacks, completeness)
}

/// In emulation it takes seconds to make the unwind table of libjvm.so, which the first walk that needs it asks for: here that of a block for
/// the list of threads that the JVM prints.
fn have_tables_made(process: &Process) {
    if cfg!(target_arch = "aarch64") {
        process.signal(rustix::process::Signal::QUIT);
        std::thread::sleep(Duration::from_secs(20));
    }
}

/// Runs the program with options and compares every stack, recorded with options too. `warm`: rounds before it is recorded, `rounds`: those
/// that are. Returns how many stacks there were.
pub fn compare(java: &Java, options: &[&str], recorder: &[&str], warm: u32, rounds: u32) -> u64 {
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let classes = java::shapes(java);
    let agent = java::library("agent.c");
    let truth = dir.join("truth");
    let what = format!("JDK {} {}", java.version, options.join(" "));

    let mut command = java.command(options);
    command.arg(format!("-agentpath:{}={}", agent.display(), truth.display())).arg(format!("-Dprobe={}", agent.display()));
    command.arg(format!("-Dwarm={warm}")).arg(format!("-Drounds={rounds}")).arg("-cp").arg(classes).arg("Shapes");
    let mut process = Process::start_piped(&mut command);
    let mut input = process.input();
    let ready = process.out.wait_for(4 * LIMIT, |line| line == "ready");
    assert!(ready.is_some(), "{what}: {}\n{}", process.out, process.err);
    let recording = Recording::attach_by(fragprof(), &[process.pid()], recorder);
    have_tables_made(&process);
    writeln!(input).unwrap();
    let done = process.out.wait_for(4 * LIMIT, |line| line == "done");
    assert!(done.is_some(), "{what}: {}\n{}", process.out, process.err);
    let file = recording.file();
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success(), "{what}: {}", recording.process.err.all());
    let report = run(fragprof().arg("report").arg(&file).args(["--by", "allocated", "--json", "--top", "1000000"]));
    assert!(report.status.success(), "{what}: {}", report.err);
    let report: Value = serde_json::from_str(&report.out).unwrap();
    drop(input);

    let (said, (recorded, completeness)) = (said(&truth), recorded(&report));
    let mut wrong = Vec::new();
    let mut stacks = 0;
    for (frames, sizes) in &said {
        let expected = (sizes.values().sum::<u64>(), sizes.iter().map(|(size, count)| size * count).sum::<u64>());
        stacks += expected.0;
        if recorded.get(frames) != Some(&expected) {
            wrong.push(format!("JVMTI {expected:?}, recorded {:?}: {frames:#?}", recorded.get(frames)));
        }
    }
    let invented: Vec<_> = recorded.keys().filter(|frames| !said.contains_key(*frames)).collect();
    let share = completeness.1 as f64 / completeness.0 as f64;
    eprintln!(
        "{what}: {stacks} stacks in {} places, {} wrong, {} invented, complete {share:.5} of {}",
        said.len(),
        wrong.len(),
        invented.len(),
        completeness.0
    );
    assert!(
        wrong.is_empty() && invented.is_empty(),
        "{what}: {} of {} wrong, first:\n{}\nrecorded and not said: {:#?}",
        wrong.len(),
        said.len(),
        wrong[0],
        invented.first()
    );
    assert!(share >= 0.999, "{what}: {completeness:?}");
    stacks
}

#[test]
fn java_stacks_are_those_that_jvmti_says_in_method_and_bytecode_index() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all() {
        let mut modes: Vec<(&[&str], u32)> = vec![
            (&["-Xint"], 20),
            (&["-XX:TieredStopAtLevel=1"], 2000),
            (&["-XX:-TieredCompilation"], 12_000),
            (&[], 3000),
            (&["-Xcomp"], 20),
        ];
        if java.version > 8 {
            modes.push((&["-XX:-SegmentedCodeCache"], 1000));
        }
        if java.version >= 17 && java.has("-XX:+UseZGC") {
            modes.push((&["-XX:+UseZGC"], 1000));
        }
        for (options, warm) in modes {
            let stacks = compare(&java, options, &[], warm, 40);
            assert!(stacks >= 1000, "{stacks}");
        }
    }
}

#[test]
fn java_stacks_of_hundreds_of_frames_are_whole_where_they_are_allowed() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all().into_iter().rev().take(1) {
        for options in [&["-Ddeep=500"][..], &["-Ddeep=500", "-Xint"]] {
            assert!(compare(&java, options, &["--max-frames", "896"], 300, 40) >= 1000);
        }
    }
}
