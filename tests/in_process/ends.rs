//! Whoever is killed harms nobody else; what does not fit is counted.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::{losses, record, report, started};
use crate::support::LIMIT;
use crate::support::build::standalone;
use crate::support::process::{Process, run, wait_until};

/// Compiles the program of these tests.
fn writer() -> std::path::PathBuf {
    standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/in_process/writer.c"), &["-pthread"])
}

/// The pid of the recorded program, which it writes into a file.
fn pid_of(file: &Path) -> u32 {
    wait_until("the program says its number", || std::fs::read_to_string(file).is_ok_and(|text| text.ends_with('\n')));
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

fn count(report: &Value, key: &str) -> u64 {
    report["totals"][key].as_u64().unwrap()
}

#[test]
fn a_program_goes_on_when_its_reader_is_killed() {
    let directory = TempDir::new().unwrap();
    let (file, done) = (directory.path().join("pid"), directory.path().join("done"));
    let recorder = started(
        &["--buffer-kib", "256"],
        &writer(),
        &["until", file.to_str().unwrap(), directory.path().join("stop").to_str().unwrap(), done.to_str().unwrap()],
        &directory.path().join("out"),
    );
    let pid = pid_of(&file);
    recorder.signal(Signal::KILL);
    // It fills what is left of the memory, and goes on.
    std::thread::sleep(Duration::from_millis(300));
    assert!(Path::new(&format!("/proc/{pid}")).exists(), "the program ended with its reader");
    std::fs::write(directory.path().join("stop"), "").unwrap();
    wait_until("the program ends by itself", || done.exists());
}

#[test]
fn what_a_killed_program_wrote_is_read() {
    let directory = TempDir::new().unwrap();
    let (file, out) = (directory.path().join("pid"), directory.path().join("out"));
    let mut recorder: Process = started(&[], &writer(), &["kill", file.to_str().unwrap(), "100000"], &out);
    recorder.wait(LIMIT);
    let report = report(&out);
    // All were written before it killed itself.
    let site = report["stacks"].as_array().unwrap().iter().find(|stack| stack["frames"].to_string().contains("site_kept")).unwrap();
    assert_eq!((site["inuse_allocations"].as_u64(), site["allocations"].as_u64()), (Some(100_000), Some(100_000)));
    assert!(losses(&report).is_empty(), "{:?}", losses(&report));
}

#[test]
fn what_finds_no_room_is_counted_and_the_ledger_is_doubtful() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out");
    let mut recorder = started(&["--buffer-kib", "128"], &writer(), &["storm", "2000000"], &out);
    assert!(recorder.wait(LIMIT).success());
    let report = report(&out);
    let lost = losses(&report);
    let of = |name: &str| lost.get(name).and_then(Value::as_u64).unwrap_or(0);
    assert!(of("lost_allocations") > 0 && of("lost_frees") > 0, "{lost:?}");
    // Each call is either recorded or counted: four threads with 2,000,000 pairs each.
    let recorded = count(&report, "allocations");
    assert!(recorded + of("lost_allocations") >= 8_000_000 && recorded + of("lost_allocations") < 8_001_000, "{recorded} {lost:?}");
    assert!(report["doubts"].to_string().contains("were lost"), "{}", report["doubts"]);
    assert_eq!(report["processes"][0]["lossy"], true);
}

#[test]
fn a_forked_child_has_its_parents_blocks_and_a_ledger_of_its_own() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out");
    let mut recorder = started(&[], &writer(), &["fork"], &out);
    assert!(recorder.wait(LIMIT).success());
    let done = run(super::fragprof().arg("report").arg(&out).arg("--json"));
    let report: Value = serde_json::from_str(&done.out).unwrap();
    let mut live: Vec<(u64, u64)> = Vec::new();
    let stacks = report["stacks"].as_array().unwrap();
    for stack in stacks.iter().filter(|stack| stack["frames"].to_string().contains("site_kept")) {
        live.push((stack["inuse_allocations"].as_u64().unwrap(), stack["allocations"].as_u64().unwrap()));
    }
    live.sort_unstable();
    // The parent keeps 10 of 10; the child frees 3 of these, and makes 2.
    assert_eq!(live.iter().map(|of| of.0).sum::<u64>(), 10 + 7 + 2, "{live:?}");
    assert_eq!(live.iter().map(|of| of.1).sum::<u64>(), 12, "{live:?}");
    assert!(losses(&report).is_empty(), "{:?}", losses(&report));
}

#[test]
fn a_program_that_is_executed_without_the_library_counts_as_not_watched() {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out.pb.gz");
    // Seen by the way while it runs, and after a time.
    for seconds in ["1.5", "4"] {
        let done = run(record().arg("-o").arg(&out).args(["--", "env", "-u", "LD_PRELOAD", "sleep", seconds]));
        assert!(done.status.success(), "{}", done.err);
        let report = report(&out);
        assert_eq!(report["losses"]["unwatched_children"], 1, "{report}");
        let notes = report["notes"].to_string();
        assert_eq!(notes.matches("sleep, which does not load the recorder's library: not recorded since").count(), 1, "{notes}");
    }
}
