//! Owners of blocks from before a recording: rows of a recording divided into parts, and the sentence of `explain`.

use std::process::Command;

use serde_json::Value;

use super::command::Waiting;
use super::target::build;

fn fragprof(args: &[&str]) -> std::process::Output {
    let output = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// The rows of a report by pinned bytes, with the names of their frames, and the report.
fn pinned_rows(file: &str) -> (Vec<(Vec<String>, u64, u64)>, Value) {
    let report: Value = serde_json::from_slice(&fragprof(&["report", file, "--by", "pinned", "--json"]).stdout).unwrap();
    let names =
        |row: &Value| row["frames"].as_array().unwrap().iter().map(|frame| frame["function"].as_str().unwrap().to_owned()).collect();
    let number = |row: &Value, key: &str| row[key].as_u64().unwrap_or(0);
    let rows = report["stacks"].as_array().unwrap().iter();
    let rows = rows.map(|row| (names(row), number(row, "pinned_bytes"), number(row, "live_bytes"))).collect();
    (rows, report)
}

#[test]
fn blocks_from_before_a_recording_are_split_by_owner_and_type_and_the_parts_add_up() {
    let target = Waiting::start(Command::new(build("cc", "owners.c", &[], "owners")));
    let directory = tempfile::tempdir().unwrap();
    let [plain, parts] = ["plain", "parts"].map(|name| directory.path().join(name).to_str().unwrap().to_owned());
    fragprof(&["record", "-p", &target.pid(), "-d", "300ms", "--mode", "exact", "-o", &plain]);
    fragprof(&["record", "-p", &target.pid(), "-d", "300ms", "--mode", "exact", "--owners", "-o", &parts]);
    let ((whole, _), (rows, report)) = (pinned_rows(&plain), pinned_rows(&parts));
    let sum = |rows: &[(Vec<String>, u64, u64)]| {
        let old = rows.iter().filter(|row| row.0.last().is_some_and(|name| name == "[before attach]"));
        old.fold((0, 0), |sum, row| (sum.0 + row.1, sum.1 + row.2))
    };
    // The program waits: nothing changes between the two.
    assert_eq!(sum(&rows), sum(&whole));
    assert!(sum(&rows).0 > 1 << 20, "{rows:?}");
    assert_eq!(report["coverage"]["before_attach_bytes"], sum(&rows).1);
    let (names, pinned, _) = &rows[0];
    assert_eq!(names[0], "begins with a number, 104 B");
    assert!(names[1].starts_with("one block of 65,544 B"), "{names:?}");
    assert!(names[2].starts_with("the_catalogue"), "{names:?}");
    assert!(pinned * 10 > sum(&rows).0 * 9, "{rows:?}");
}

/// The same of a process that has the sampler: what no sample explains is from before, to the byte, as nothing was allocated since.
#[test]
fn blocks_from_before_a_sampler_are_split_by_owner_and_type() {
    if crate::support::bpf().is_none() {
        return;
    }
    let target = Waiting::start(Command::new(build("cc", "owners.c", &[], "owners")));
    let directory = tempfile::tempdir().unwrap();
    let libraries = crate::sampler::programs::Libraries::new();
    let library = libraries.path(fragprof::sampler::library::Flavour::Attached);
    crate::attach::done(&crate::attach::attaching(target.pid().parse().unwrap(), &library, 4096));
    let rows = |more: &[&str]| {
        let path = directory.path().join("one").to_str().unwrap().to_owned();
        let arguments = ["record", "-p", &target.pid(), "-d", "300ms", "--mode", "sampled", "-o", &path];
        fragprof(&[&arguments, more].concat());
        let report: Value = serde_json::from_slice(&fragprof(&["report", &path, "--by", "pinned", "--json"]).stdout).unwrap();
        let figure = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
        let of = |row: &Value| {
            let names: Vec<String> =
                row["frames"].as_array().unwrap().iter().map(|frame| frame["function"].as_str().unwrap().to_owned()).collect();
            (names, figure(row, "pinned_bytes_est"), figure(row, "live_bytes_est"))
        };
        report["stacks"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    let (whole, parts) = (rows(&[]), rows(&["--owners"]));
    let sum = |rows: &[(Vec<String>, f64, f64)]| {
        let old = rows.iter().filter(|row| row.0.last().is_some_and(|name| name == "[before attach]"));
        old.fold((0.0, 0.0), |sum, row| (sum.0 + row.1, sum.1 + row.2))
    };
    assert_eq!(sum(&parts), sum(&whole), "{parts:?} {whole:?}");
    assert!(sum(&parts).0 > 1e6, "{parts:?}");
    assert_eq!(parts[0].0[0], "begins with a number, 104 B");
    assert!(parts[0].0[2].starts_with("the_catalogue"), "{:?}", parts[0]);
}

#[test]
fn explain_says_which_block_holds_the_pinned_bytes() {
    let target = Waiting::start(Command::new(build("cc", "owners.c", &[], "owners")));
    let found: Value = serde_json::from_slice(&fragprof(&["explain", &target.pid(), "--once", "--json"]).stdout).unwrap();
    let summary = found["held_by"]["summary"].as_str().unwrap_or_else(|| panic!("{found:#}"));
    assert!(summary.contains("% of the pinned bytes are held by one block of 65,544 B"), "{summary}");
    let percent: u64 = summary.split(' ').next().unwrap().parse().unwrap();
    assert!((90..=100).contains(&percent), "{summary}");
    let without = fragprof(&["explain", &target.pid(), "--once", "--no-owners"]);
    assert!(!String::from_utf8_lossy(&without.stdout).contains("are held by"));
}

/// A heap that shrinks at its top, with one block left at its top.
#[test]
fn the_block_that_keeps_a_heap_up_is_named_with_what_it_blocks() {
    let target = Waiting::start(Command::new(build("cc", "blocks.c", &[], "blocks")));
    let output = fragprof(&["owners", &target.pid(), "--by", "blocked", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let first = &found["owners"][0];
    // 1,000 free blocks of 4,000 bytes are below it.
    assert!((3_900_000..=4_100_000).contains(&first["retained_blocked_bytes"].as_u64().unwrap()), "{found:#}");
    assert_eq!((first["size_bytes"].as_u64(), first["reached_first_from"].as_str()), (Some(104), Some("the_top (leaks-blocks)")));
    let profile = tempfile::NamedTempFile::new().unwrap();
    let path = profile.path().to_str().unwrap();
    fragprof(&["owners", &target.pid(), "-o", path]);
    let report: Value = serde_json::from_slice(&fragprof(&["report", path, "--by", "live", "--json"]).stdout).unwrap();
    assert_eq!(report["totals"]["blocked_bytes"], found["blocked_bytes"], "{report:#}");
    assert_eq!(report["totals"]["live_bytes"], found["live_bytes"], "{report:#}");
}
