//! Names crafted to do harm where they are displayed: in terminals, SVG, JSON, folded stacks, metrics and pprof.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use crate::support::bpf;
use crate::support::build::{Link, install, program};
use crate::support::process::run;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;

/// The program, started by a path that is hostile too.
fn start(dir: &tempfile::TempDir) -> Target {
    let path = dir.path().join("a\u{1b}[31m\"><svg onload=x>;\u{202e}b");
    install(&program("hostile_names", Link::Dynamic), &path);
    Target::start(&mut Command::new(path))
}

/// Checks that a text has no terminal control sequences and nothing that reorders a line.
fn assert_harmless(what: &str, text: &str) {
    let bad = |c: char| (c.is_control() && c != '\n' && c != '\t') || ('\u{202a}'..='\u{202e}').contains(&c);
    if let Some(at) = text.find(bad) {
        let from = text[..at].rfind('\n').map_or(0, |line| line + 1);
        panic!("{what} lets a control character through: {:?}", text[from..].lines().next());
    }
}

#[test]
fn hostile_names_do_no_harm_on_any_surface() {
    if bpf().is_none() {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let mut target = start(&dir);
    let pid = target.pid().to_string();
    let recording = Recording::attach(&[target.pid()]);
    target.go_to("done");
    let report = recording.stop();
    // Data holds the name unchanged; only the surfaces that display it escape it.
    assert!(report.stacks.iter().any(|stack| stack.names().iter().any(|name| name.contains("evil"))), "the hostile frame is missing");

    let out: PathBuf = dir.path().join("profile");
    let said = run(fragprof().args(["record", "-p", &pid, "-d", "200ms", "-o"]).arg(&out));
    assert_harmless("record", &said.err);
    for command in [&["census", &pid][..], &["explain", &pid], &["doctor", "-p", &pid]] {
        let done = run(fragprof().args(command));
        assert!(done.status.success(), "{command:?}: {}", done.err);
        assert_harmless(command[0], &done.out);
        assert_harmless(command[0], &done.err);
    }
    for command in ["census", "explain", "doctor"] {
        let args: &[&str] = if command == "doctor" { &["doctor", "--json", "-p", &pid] } else { &[command, "--json", &pid] };
        let json = run(fragprof().args(args)).out;
        serde_json::from_str::<Value>(&json).unwrap_or_else(|error| panic!("{command}: {error}: {json}"));
    }
}

#[test]
fn hostile_names_in_a_profile_do_no_harm_where_it_is_read() {
    if bpf().is_none() {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let mut target = start(&dir);
    let recorder = Recording::attach(&[target.pid()]);
    target.go_to("done");
    let file = recorder.file();
    recorder.process.signal(rustix::process::Signal::INT);
    let mut recorder = recorder;
    assert!(recorder.wait(crate::support::LIMIT).success());
    let text = run(fragprof().arg("report").arg(&file));
    assert!(text.out.contains("evil"), "{}", text.out);
    assert_harmless("report", &text.out);
    let diff = run(fragprof().arg("diff").args([&file, &file]));
    assert_harmless("diff", &diff.out);

    let folded = run(fragprof().arg("export").arg(&file).args(["--format", "folded"]));
    assert_harmless("folded", &folded.out);
    for line in folded.out.lines() {
        assert!(line.rsplit_once(' ').is_some_and(|(_, value)| value.parse::<i64>().is_ok()), "a name has broken a line: {line:?}");
    }

    let svg = dir.path().join("out.svg");
    let drawn = run(fragprof().arg("flamegraph").arg(&file).args(["--by", "live", "-o"]).arg(&svg));
    assert!(drawn.status.success(), "{}", drawn.err);
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.contains("&lt;script&gt;alert(1)"), "the hostile frame is missing from the SVG");
    assert!(!svg.contains("<script>alert(1)") && !svg.contains("<svg onload"), "a name has become markup");
    assert_harmless("flamegraph", &svg.replace('\r', ""));
}
