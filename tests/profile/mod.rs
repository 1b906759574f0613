//! `report`, `flamegraph`, `export` and `diff` as a user runs them: output, exit statuses and messages.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fragprof::profile::{Frame, HeapSummary, Metadata, Mode, Process, Profile, ValueKind, Values, pprof};

fn fragprof(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    command.args(args).env_remove("NO_COLOR").env("TERM", "xterm");
    command
}

fn run(args: &[&str]) -> Output {
    fragprof(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A recording in which `leak` holds `leaked_bytes` and `work` allocated and freed.
fn recording(dir: &Path, name: &str, leaked_bytes: u64) -> String {
    let kinds = [ValueKind::AllocObjects, ValueKind::AllocSpace, ValueKind::InuseObjects, ValueKind::InuseSpace];
    let mut profile = Profile::new(Metadata {
        tool: "fragprof test".into(),
        mode: Mode::Exact,
        duration_s: 2.0,
        kinds: kinds.into_iter().collect(),
        processes: vec![Process { pid: 77, comm: "shopd\u{1b}[2J".into(), ..Process::default() }],
        ..Metadata::default()
    });
    let main = Frame { file: "shop.c".into(), line: 9, module: "/opt/shop".into(), address: 0x1234, ..Frame::named("main") };
    let stacks = [("leak", 3, leaked_bytes, leaked_bytes), ("work", 10, 5000, 0)];
    for (function, count, allocated, live) in stacks {
        let values = Values::default()
            .with(ValueKind::AllocObjects, count)
            .with(ValueKind::AllocSpace, allocated)
            .with(ValueKind::InuseObjects, count.min(live))
            .with(ValueKind::InuseSpace, live);
        profile.add(77, &[Frame::named("malloc"), Frame::named(function), main.clone()], None, &values);
    }
    let path = dir.join(name);
    pprof::write(&profile, std::fs::File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_report_ranks_stacks_and_shows_no_escape_sequence_in_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let file = recording(dir.path(), "a.pb.gz", 4096);
    let output = run(&["report", &file]);
    assert!(output.status.success());
    let shown = text(&output.stdout);
    assert!(!shown.contains('\x1b'), "{shown}");
    assert!(shown.contains("shopd\\u{1b}[2J (pid 77)"), "{shown}");
    assert!(shown.contains("4.00 KiB 100.0%         3  leak  (malloc)\n"), "{shown}");
    assert!(!shown.contains("work"), "it holds no live bytes: {shown}");
    let by_allocated = text(&run(&["report", &file, "--by", "allocated", "--top", "1"]).stdout);
    assert!(by_allocated.contains("  work  (malloc)\n") && by_allocated.contains("1 more stacks with 4.00 KiB"), "{by_allocated}");
}

/// Standard output of a command on a terminal of 70 columns.
fn on_a_terminal(command: &str, environment: &str) -> String {
    let script = format!("stty cols 70; {environment} {command}");
    let output = Command::new("script").args(["-qec", &script, "/dev/null"]).env("TERM", "xterm").env_remove("NO_COLOR").output().unwrap();
    text(&output.stdout)
}

#[test]
fn a_terminal_gets_colours_within_its_width_unless_no_color_is_set() {
    let dir = tempfile::tempdir().unwrap();
    let command = format!("{} report {}", env!("CARGO_BIN_EXE_fragprof"), recording(dir.path(), "a.pb.gz", 4096));
    assert!(on_a_terminal(&command, "").contains("\x1b[1m"));
    for environment in ["NO_COLOR=1", "TERM=dumb"] {
        let plain = on_a_terminal(&command, environment);
        assert!(plain.contains("leak") && !plain.contains('\x1b'), "{plain}");
        assert!(plain.lines().all(|line| line.trim_end().chars().count() <= 70), "{plain}");
    }
}

#[test]
fn json_has_the_stable_keys() {
    let dir = tempfile::tempdir().unwrap();
    let file = recording(dir.path(), "a.pb.gz", 4096);
    let report: serde_json::Value = serde_json::from_slice(&run(&["report", &file, "--json"]).stdout).unwrap();
    assert_eq!(report["duration_s"], 2.0);
    assert_eq!(report["mode"], "exact");
    assert_eq!(report["totals"]["inuse_bytes"], 4096);
    assert_eq!(report["totals"]["allocated_bytes"], 9096);
    assert_eq!(report["totals"]["allocations"], 13);
    for key in ["inuse_allocations", "peak_inuse_bytes", "pinned_bytes", "blocked_bytes", "growth_bytes"] {
        assert!(report["totals"].get(key).is_some() && report["stacks"][0].get(key).is_some(), "{key}");
    }
    assert!(report["losses"].is_object() && report.get("stacks_complete_ratio").is_some());
    let frames = report["stacks"][0]["frames"].as_array().unwrap();
    assert_eq!(frames.len(), 3);
    assert_eq!((&frames[0]["function"], &report["stacks"][0]["allocator_frames"]), (&"malloc".into(), &1.into()));
    let main: Vec<_> = ["function", "file", "line", "module", "address"].iter().map(|key| frames[2][key].clone()).collect();
    assert_eq!(serde_json::json!(main), serde_json::json!(["main", "shop.c", 9, "/opt/shop", "0x1234"]));
}

fn fails_with(args: &[&str], status: i32, message: &str) {
    let output = run(args);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
    assert!(error.contains(message), "{args:?}: {error}");
    assert!(!error.contains("panicked"), "{error}");
}

#[test]
fn bad_input_gives_status_2_and_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let file = recording(dir.path(), "a.pb.gz", 4096);
    let whole = std::fs::read(&file).unwrap();
    let made = |name: &str, bytes: &[u8]| {
        let path: PathBuf = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    fails_with(&["report", &made("cut.pb.gz", &whole[..whole.len() / 2])], 2, "damaged or cut short");
    fails_with(&["report", &made("empty.pb.gz", b"")], 2, "the file is empty");
    fails_with(&["report", &made("text", b"hello, this is text")], 2, "not a valid pprof profile");
    fails_with(&["flamegraph", &made("perf.data", b"PERFILE2........")], 2, "a perf.data file");
    fails_with(&["report", "/nonexistent/a.pb.gz"], 2, "No such file");
    fails_with(&["report", dir.path().to_str().unwrap()], 2, "directory");
    fails_with(&["report", &file, "--by", "pinned"], 2, "there are no pinned bytes in it");
    fails_with(&["report", &file, "--by", "nonsense"], 2, "nonsense");
    fails_with(&["diff", &file, &made("cut2.pb.gz", &whole[..20])], 2, "cut2.pb.gz");
    fails_with(&["export", &file, "--format", "xml"], 2, "xml");
    fails_with(&["flamegraph", &recording(dir.path(), "none.pb.gz", 0), "--by", "live"], 2, "no stack has any live bytes");
}

#[test]
fn a_full_disk_is_an_error_and_a_closed_pipe_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = recording(dir.path(), "a.pb.gz", 4096);
    fails_with(&["flamegraph", &file, "-o", "/dev/full"], 1, "cannot write /dev/full: No space left on device");
    let nowhere = dir.path().join("no folder/out.json").display().to_string();
    fails_with(&["export", &file, "--format", "json", "-o", &nowhere], 1, &format!("cannot write {nowhere}"));
    let full = fragprof(&["report", &file]).stdout(std::fs::File::options().write(true).open("/dev/full").unwrap()).status().unwrap();
    assert_eq!(full.code(), Some(1));
    let mut child = fragprof(&["export", &file, "--format", "svg"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut first = [0u8; 1];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    assert!(child.wait().unwrap().success(), "the reader went away");
}

#[test]
fn each_export_format_holds_the_same_stacks() {
    let dir = tempfile::tempdir().unwrap();
    let file = recording(dir.path(), "a.pb.gz", 4096);
    assert_eq!(text(&run(&["export", &file, "--format", "folded"]).stdout), "main;leak 4096\n");
    let svg = text(&run(&["export", &file, "--format", "svg"]).stdout);
    assert!(svg.contains("leak (4,096 bytes, 100.00%)"), "{svg}");
    let json: serde_json::Value = serde_json::from_slice(&run(&["export", &file, "--format", "json", "--by", "allocated"]).stdout).unwrap();
    assert_eq!(json["stacks"].as_array().unwrap().len(), 2);
    let again = dir.path().join("again.pb.gz");
    let written = run(&["export", &file, "--format", "pprof", "-o", again.to_str().unwrap()]);
    assert!(written.status.success());
    let reports: Vec<Vec<u8>> = [&file, again.to_str().unwrap()].iter().map(|f| run(&["report", f, "--json"]).stdout).collect();
    assert_eq!(reports[0], reports[1]);
}

#[test]
fn a_difference_names_the_stack_that_grew() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (recording(dir.path(), "old.pb.gz", 4096), recording(dir.path(), "new.pb.gz", 12288));
    let shown = text(&run(&["diff", &old, &new]).stdout);
    assert!(shown.contains("live bytes 4.00 KiB → 12.0 KiB (+8.00 KiB)"), "{shown}");
    assert!(shown.contains("  +8.00 KiB   4.00 KiB   12.0 KiB  leak  (malloc)"), "{shown}");
    let json: serde_json::Value = serde_json::from_slice(&run(&["diff", &new, &old, "--json"]).stdout).unwrap();
    assert_eq!(json["stacks"][0]["delta"], -8192);
    assert!(text(&run(&["diff", &old, &old]).stdout).contains("no stack changed"));
}

/// A recording in windows: `cache` holds large blocks if `live` counts these, and `work` has survivors; the rest of the heap is
/// unattributed.
fn windows(dir: &Path, name: &str, live: ValueKind) -> String {
    let kinds = [ValueKind::AllocSpace, ValueKind::SurvivorSpace, live];
    let mut profile = Profile::new(Metadata {
        mode: Mode::Governed,
        duration_s: 10.0,
        survivor_age_s: Some(1.0),
        kinds: kinds.into_iter().collect(),
        processes: vec![Process {
            pid: 77,
            comm: "shopd".into(),
            heap: Some(HeapSummary { live_bytes: Some(10_000), ..HeapSummary::default() }),
            ..Process::default()
        }],
        ..Metadata::default()
    });
    let values = |allocated, survived, held| {
        Values::default().with(ValueKind::AllocSpace, allocated).with(ValueKind::SurvivorSpace, survived).with(live, held)
    };
    let held = if live == ValueKind::LargeSpace { 2_500 } else { 0 };
    profile.add(77, &[Frame::named("malloc"), Frame::named("cache"), Frame::named("main")], None, &values(9_000, 0, held));
    profile.add(77, &[Frame::named("malloc"), Frame::named("work"), Frame::named("main")], None, &values(8_000, 500, 0));
    profile.add(77, &[], None, &values(0, 0, 10_000 - held));
    let path = dir.join(name);
    pprof::write(&profile, std::fs::File::create(&path).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_recording_in_windows_is_shown_by_the_values_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let (large, other) =
        (windows(dir.path(), "large.pb.gz", ValueKind::LargeSpace), windows(dir.path(), "other.pb.gz", ValueKind::ConfirmedSpace));
    let shown = text(&run(&["report", &large]).stdout);
    assert!(shown.contains("coverage   25% of the live heap has a stack"), "{shown}");
    assert!(shown.contains("  25.0%") && shown.contains("  75.0%") && shown.contains("[unattributed]"), "of the heap: {shown}");
    let shown = text(&run(&["report", &other]).stdout);
    assert!(shown.contains("ranked by  surviving bytes, 500 B in all; also --by allocated, live"), "{shown}");
    let json: serde_json::Value = serde_json::from_slice(&run(&["report", &large, "--json"]).stdout).unwrap();
    assert_eq!((&json["attributed_ratio"], &json["by"]), (&0.25.into(), &"large_bytes".into()));
    let svg = dir.path().join("x.svg").display().to_string();
    assert!(run(&["flamegraph", &other, "-o", &svg]).status.success());
    // One has large blocks, the other confirmed bytes: survivors are the first kind that both have.
    let shown = text(&run(&["diff", &large, &other]).stdout);
    assert!(shown.starts_with("surviving bytes"), "{shown}");
    fails_with(&["diff", &large, &other, "--by", "live"], 2, "live (live bytes of blocks above 1 KiB)");
    fails_with(&["report", &other, "--by", "pinned"], 2, "there are no pinned bytes in it");
}
