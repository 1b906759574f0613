//! A JVM with RocksDB through JNI: its native memory by Java method and C++ function, against RocksDB's own counters.

use std::io::Write as _;
use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use super::java;
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf, serial};

/// Live bytes of the stacks that have a frame of each of these functions.
fn live(report: &Value, functions: &[&str]) -> u64 {
    let stacks = report["stacks"].as_array().unwrap().iter();
    let has = |stack: &Value, wanted: &str| {
        let frames = stack["frames"].as_array().unwrap();
        frames.iter().any(|frame| frame["function"].as_str().is_some_and(|name| name.contains(wanted)))
    };
    stacks.filter(|stack| functions.iter().all(|wanted| has(stack, wanted))).map(|stack| stack["inuse_bytes"].as_u64().unwrap()).sum()
}

/// `make proof-rocksdb` fetches the library.
#[test]
#[ignore = "needs RocksDB's library for Java"]
fn live_bytes_under_rocksdb_are_those_of_its_own_counters() {
    if bpf().is_none() {
        return;
    }
    let jar = PathBuf::from(std::env::var_os("FRAGPROF_ROCKSDB_JAR").expect("FRAGPROF_ROCKSDB_JAR names the library: make proof-rocksdb"));
    let _one = serial();
    for java in java::all() {
        let directory = TempDir::new().unwrap();
        let javac = run(std::process::Command::new("javac")
            .args(["-nowarn", "-Xlint:-options", "--release", java.release(), "-d"])
            .arg(directory.path())
            .arg("-cp")
            .arg(&jar)
            .arg(java::source("Rocks.java")));
        assert!(javac.status.success(), "{}", javac.err);
        let mut command = java.command(["-cp"]);
        command.arg(format!("{}:{}", directory.path().display(), jar.display())).arg("Rocks").arg(directory.path().join("store"));
        let mut process = Process::start_piped(&mut command);
        let mut input = process.input();
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", process.out, process.err);
        let mut recording = Recording::attach(&[process.pid()]);
        writeln!(input).unwrap();
        let counted = process.out.wait_for(6 * LIMIT, |line| line.starts_with('{'));
        let counted: Value = serde_json::from_str(&counted.unwrap_or_else(|| panic!("{}\n{}", process.out, process.err))).unwrap();
        recording.process.signal(rustix::process::Signal::INT);
        assert!(recording.wait(6 * LIMIT).success(), "{}", recording.process.err.all());
        let report = run(fragprof().arg("report").arg(recording.file()).args(["--by", "live", "--json", "--top", "1000000"]));
        let report: Value = serde_json::from_str(&report.out).unwrap();
        // Memtables are filled by put, the block cache by get; each allocation has a function of RocksDB too.
        let memtables = live(&report, &["org.rocksdb.RocksDB.put", "rocksdb::Arena::"]);
        let cache = live(&report, &["org.rocksdb.RocksDB.get", "rocksdb::BlockBasedTable::"]);
        for (what, ours, theirs) in [("memtables", memtables, &counted["memtables"]), ("block cache", cache, &counted["block_cache"])] {
            let theirs = theirs.as_u64().unwrap();
            let ratio = ours as f64 / theirs as f64;
            println!("JDK {}: {what}: {ours} bytes live under RocksDB's methods, {theirs} by its own counter ({ratio:.4})", java.version);
            assert!((0.95..=1.05).contains(&ratio), "JDK {}: {what}: {ours} against {theirs}", java.version);
        }
    }
}
