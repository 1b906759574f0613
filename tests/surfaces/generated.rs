//! Files generated from the program's own definitions.

use std::process::Command;

use serde_json::Value;

use crate::support::process::run;

fn fragprof(args: &[&str]) -> String {
    let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(args));
    assert!(done.status.success(), "{}", done.err);
    done.out
}

#[test]
fn bash_accepts_the_completions() {
    let script = fragprof(&["completions", "bash"]);
    let done = run(Command::new("bash").args(["-n", "-c", &script]));
    assert!(done.status.success() && script.contains("flamegraph"), "{}", done.err);
}

#[test]
fn every_command_has_a_man_page() {
    let place = tempfile::tempdir().unwrap();
    fragprof(&["man", place.path().to_str().unwrap()]);
    for name in ["fragprof", "fragprof-record", "fragprof-top", "fragprof-agent"] {
        let page = std::fs::read_to_string(place.path().join(format!("{name}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{page}");
    }
}

#[test]
fn the_schemas_are_json_and_have_the_printed_keys() {
    let all: Value = serde_json::from_str(&fragprof(&["schema"])).unwrap();
    assert!(all["$defs"]["ProcessView"]["properties"]["rss_bytes"].is_object());
    let census: Value = serde_json::from_str(&fragprof(&["schema", "Census"])).unwrap();
    for key in ["pid", "comm", "level", "heaps", "rss_bytes", "not_malloc", "walk"] {
        assert!(census["properties"][key].is_object(), "{key}");
    }
    assert!(!fragprof(&["schema", "Census"]).contains("#/components/"));
}
