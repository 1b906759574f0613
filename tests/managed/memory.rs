//! The memory of runtimes by part (`explain`), against what the runtimes themselves say in the same run.

use std::io::Write as _;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::java::{self, Java};
use crate::support::process::{Process, run};
use crate::support::recording::fragprof;
use crate::support::{LIMIT, build, serial};

fn explained(pid: u32, more: &[&str]) -> Value {
    let out = run(fragprof().args(["explain", &pid.to_string(), "--json", "--no-owners"]).args(more));
    assert!(out.status.success(), "{}", out.err);
    serde_json::from_str::<Value>(&out.out).unwrap()["runtime"].clone()
}

fn part<'a>(runtime: &'a Value, name: &str) -> &'a Value {
    let parts = runtime["parts"].as_array().unwrap_or_else(|| panic!("no parts: {runtime}"));
    parts.iter().find(|part| part["name"] == name).unwrap_or_else(|| panic!("no {name}: {runtime:#}"))
}

fn bytes(part: &Value, key: &str) -> u64 {
    part[key].as_u64().unwrap_or_else(|| panic!("no {key}: {part}"))
}

/// What Native Memory Tracking says.
struct Tracked(String);

impl Tracked {
    fn of(java: &Java, pid: u32) -> Self {
        let jcmd = java.program.with_file_name("jcmd");
        let out = run(Command::new(jcmd).args([&pid.to_string(), "VM.native_memory", "summary", "scale=B"]));
        assert!(out.status.success(), "{}\n{}", out.out, out.err);
        Self(out.out)
    }

    /// The bytes after a key in the lines of a category, from the one that contains `from` on.
    fn bytes(&self, category: &str, from: &str, key: &str) -> u64 {
        let start = self
            .0
            .lines()
            .position(|line| line.starts_with('-') && line.contains(&format!(" {category} (")))
            .unwrap_or_else(|| panic!("no {category} in {}", self.0));
        let lines: Vec<&str> = self.0.lines().skip(start).collect();
        let end = 1 + lines.iter().skip(1).position(|line| line.starts_with('-')).unwrap_or(lines.len() - 1);
        let text = lines[..end].join("\n");
        let text = &text[text.find(from).unwrap_or_else(|| panic!("no {from} in {text}"))..];
        let text = &text[text.find(key).unwrap_or_else(|| panic!("no {key} in {text}")) + key.len()..];
        text.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    }
}

#[track_caller]
fn assert_near(ours: u64, theirs: u64, within: u64, what: &str) {
    assert!(ours.abs_diff(theirs) <= within, "{what}: {ours} against {theirs}");
}

fn started(java: &Java, options: &[&str]) -> (Process, std::process::ChildStdin, Value, TempDir) {
    let directory = TempDir::new().unwrap();
    java::compile(java, directory.path(), &[java::source("Parts.java")]);
    let file = directory.path().join("mapped");
    std::fs::write(&file, vec![7u8; 4_000_000]).unwrap();
    let mut command = java.command(options);
    command.arg("-XX:NativeMemoryTracking=summary").arg("-cp").arg(directory.path()).arg("Parts").arg(&file);
    let mut process = Process::start_piped(&mut command);
    let input = process.input();
    let line = process.out.wait_for(4 * LIMIT, |line| line.starts_with('{'));
    let pools = serde_json::from_str(&line.unwrap_or_else(|| panic!("{}\n{}", process.out, process.err))).unwrap();
    (process, input, pools, directory)
}

#[test]
fn the_parts_of_a_jvms_memory_have_the_bytes_that_the_jvm_tracks() {
    let _one = serial();
    for java in java::all().into_iter().filter(|java| java.version >= 17) {
        // A heap that is open in part looks like metaspace.
        for (collector, start) in [("-XX:+UseG1GC", "-Xms256m"), ("-XX:+UseG1GC", "-Xms32m"), ("-XX:+UseSerialGC", "-Xms32m")] {
            let (process, _input, pools, _directory) = started(&java, &[collector, start, "-Xmx256m"]);
            // The command makes the JVM load classes and start a thread when it is first used.
            drop(Tracked::of(&java, process.pid()));
            let runtime = explained(process.pid(), &["--once"]);
            let tracked = Tracked::of(&java, process.pid());
            let what = format!("JDK {} {collector} {start}", java.version);
            let of = |name: &str, key: &str| bytes(part(&runtime, name), key);
            for key in ["reserved", "committed"] {
                let ours = format!("{key}_bytes");
                let key = format!("{key}=");
                let pairs = [
                    ("java_heap", tracked.bytes("Java Heap", "", &key), 0),
                    ("class_space", tracked.bytes("Class", "mmap:", &key), 256 << 10),
                    ("metaspace", tracked.bytes("Metaspace", "mmap:", &key), 256 << 10),
                    ("code_cache", tracked.bytes("Code", "mmap:", &key), 256 << 10),
                    ("gc_tables", tracked.bytes("GC", "mmap:", &key), (1 << 20) / 4),
                ];
                for (name, theirs, within) in pairs {
                    assert_near(of(name, &ours), theirs, within, &format!("{what}: {name} {key}"));
                }
            }
            assert_near(
                of("class_archive", "committed_bytes"),
                tracked.bytes("Shared class space", "mmap:", "committed="),
                512 << 10,
                &what,
            );
            // What is tracked as committed is what is resident, and 12 KiB of the guard of each Java thread; a compiler's thread may start or
            // end.
            let threads = tracked.bytes("Thread", "#", "#");
            let stacks = part(&runtime, "thread_stacks");
            assert_near(
                bytes(stacks, "reserved_bytes"),
                tracked.bytes("Thread", "stack:", "reserved="),
                3 << 20,
                &format!("{what}: stacks"),
            );
            assert_near(
                bytes(stacks, "resident_bytes"),
                tracked.bytes("Thread", "stack:", "committed="),
                threads * (16 << 10),
                &format!("{what}: stacks"),
            );
            assert!(bytes(stacks, "count").abs_diff(threads) <= 3, "{what}: {stacks} against {threads} threads");
            for (name, pool) in [("direct_buffers", "direct"), ("mapped_buffers", "mapped")] {
                let (ours, theirs) = (part(&runtime, name), &pools[pool]);
                assert_eq!((&ours["used_bytes"], &ours["count"]), (&theirs["bytes"], &theirs["count"]), "{what}: {name}");
            }
            let direct = of("direct_buffers", "used_bytes");
            assert_near(
                direct,
                tracked.bytes("Other", "malloc=", "malloc="),
                direct / 100 + (64 << 10),
                &format!("{what}: direct buffers"),
            );
            assert!(of("malloc", "used_bytes") > direct, "{what}: {runtime:#}");
        }
    }
}

#[test]
fn the_class_space_is_no_metaspace_where_it_is_not_found_or_off() {
    let _one = serial();
    for java in java::all() {
        let (process, _input, _, _directory) = started(&java, &["-Xshare:off", "-Xmx256m"]);
        let runtime = explained(process.pid(), &["--once"]);
        let is_said = runtime["parts"].as_array().unwrap().iter().any(|part| part["name"] == "metaspace" || part["name"] == "class_space");
        assert!(!is_said, "JDK {}: {runtime:#}", java.version);
        if java.version < 17 {
            continue;
        }
        let (process, _input, _, _directory) = started(&java, &["-XX:-UseCompressedClassPointers", "-Xmx256m"]);
        drop(Tracked::of(&java, process.pid()));
        let runtime = explained(process.pid(), &["--once"]);
        let tracked = Tracked::of(&java, process.pid());
        for key in ["reserved", "committed"] {
            let theirs = tracked.bytes("Metaspace", "mmap:", &format!("{key}="));
            let ours = bytes(part(&runtime, "metaspace"), &format!("{key}_bytes"));
            assert_near(ours, theirs, 256 << 10, &format!("JDK {}: metaspace {key}", java.version));
        }
    }
}

#[test]
fn explain_names_the_part_of_a_jvm_that_grew() {
    let _one = serial();
    let Some(java) = java::all().into_iter().next_back() else { return };
    let (process, mut input, _pools, _directory) = started(&java, &["-Xmx64m", "-XX:MaxDirectMemorySize=1g"]);
    writeln!(input).unwrap();
    // Long against the time between a census and the JVM's counters on a busy machine.
    let runtime = explained(process.pid(), &["--over", "6s"]);
    assert_eq!(runtime["grew_most"], "direct_buffers", "{runtime:#}");
    let grown = part(&runtime, "direct_buffers")["delta_bytes"].as_i64().unwrap();
    assert!((10 << 20..400 << 20).contains(&grown), "{grown}");
}

#[test]
fn a_pythons_memory_is_told_by_part_and_the_part_that_grew_is_named() {
    let Some(python) = build::tool("python3") else { return };
    let _one = serial();
    let grow = |what: &str| {
        let script = format!(
            "import sys, time\nkept = [bytearray(1000000) for _ in range(20)]\nsys._debugmallocstats()\nprint('ready', flush=True)\n\
             while True:\n    kept.append({what})\n    time.sleep(0.01)"
        );
        let process = Process::start(Command::new(&python).args(["-c", &script]));
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", process.err);
        (explained(process.pid(), &["--over", "2s"]), process.err.to_string())
    };
    let (runtime, said) = grow("[float(i) for i in range(2000)]");
    assert_eq!((&runtime["runtime"], &runtime["grew_most"]), (&"python".into(), &"pymalloc".into()), "{runtime:#}");
    // The interpreter's count, from before it grew.
    let arenas: u64 = said
        .lines()
        .find_map(|line| line.trim().strip_prefix("# arenas allocated current"))
        .unwrap()
        .trim_start_matches([' ', '='])
        .trim()
        .parse()
        .unwrap();
    let grown = bytes(part(&runtime, "pymalloc"), "count");
    assert!(grown >= arenas, "{grown} against {arenas}: {runtime:#}");
    assert!(bytes(part(&runtime, "mmapped"), "used_bytes") >= 20_000_000, "{runtime:#}");
    let (runtime, _) = grow("bytearray(1000000)");
    assert_eq!(runtime["grew_most"], "mmapped", "{runtime:#}");
}
