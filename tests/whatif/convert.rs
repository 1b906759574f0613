//! Files of other tools, converted into traces and replayed.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::truth::Measured;
use super::{figure, fragprof, of, report};
use crate::support::build::{Link, program, tool};

fn convert(file: &Path, trace: &Path) -> Output {
    fragprof().args(["trace", "convert"]).arg(file).arg("-o").arg(trace).output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Records a program with heaptrack; returns its data file.
fn heaptrack(directory: &TempDir, options: &[&str], command: &[&str]) -> std::path::PathBuf {
    let name = format!("data{}", options.concat());
    let mut heaptrack = Command::new("heaptrack");
    let done = heaptrack.args(options).arg("-o").arg(directory.path().join(&name)).args(command).output().unwrap();
    assert!(done.status.success(), "{}", text(&done));
    let files = std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path());
    // heaptrack appends its compression.
    let of_run = |path: &std::path::PathBuf| {
        let file = path.file_name().unwrap().to_str().unwrap();
        file.strip_prefix(&name).is_some_and(|rest| rest.starts_with('.'))
    };
    files.into_iter().find(of_run).expect("heaptrack writes a file")
}

#[test]
fn a_program_recorded_by_heaptrack_is_replayed_as_it_really_runs() {
    if tool("heaptrack").is_none() {
        return;
    }
    let pins = program("whatif_pins", Link::Dynamic);
    let pins = pins.to_str().unwrap();
    for (options, exact) in [(&["--raw"][..], true), (&[], false)] {
        let directory = TempDir::new().unwrap();
        let file = heaptrack(&directory, options, &[pins]);
        let trace = directory.path().join("trace.fpt");
        let done = convert(&file, &trace);
        assert!(done.status.success(), "{}", text(&done));
        assert!(text(&done).contains("threads") && text(&done).contains("of one stack and size") != exact, "{}", text(&done));
        let mut more = vec!["--under", "jemalloc", "--under", "tcmalloc"];
        // A raw file has no names of functions.
        more.extend(if exact { &[][..] } else { &["--without", "take_note"] });
        let report = report(&trace, &more);
        assert!(report["notes"].to_string().contains("converted from") && report["calibration"]["resident_error_ratio"].is_null());
        let under = |library: Option<&str>| {
            let mut command = Command::new(pins);
            if let Some(library) = library {
                command.env("LD_PRELOAD", library);
            }
            Measured::of(&mut command)
        };
        for (setting, library) in
            [("today (glibc)", None), ("jemalloc", Some("libjemalloc.so.2")), ("tcmalloc", Some("libtcmalloc_minimal.so.4"))]
        {
            let predicted = of(&report, setting);
            if let Some(reason) = predicted["failed"].as_str() {
                println!("{setting}: {reason}");
                continue;
            }
            let truth = under(library);
            let error = |name: &str, truth: u64| (figure(predicted, name) / truth as f64 - 1.0) * 100.0;
            let (peak, end) = (error("peak_bytes", truth.peak_bytes), error("end_bytes", truth.end_bytes));
            println!("{options:?} {setting}: peak {peak:+.1} %, end {end:+.1} % of {truth:?}");
            assert!(peak.abs() < 10.0 && end.abs() < 10.0, "{options:?} {setting}: peak {peak:+.1} %, end {end:+.1} %");
        }
        if !exact {
            assert!(figure(&report["causes"][0]["without"], "end_bytes") > 20e6, "{}", report["causes"]);
        }
    }
}

#[test]
fn the_text_of_mtrace_and_records_of_the_tracer_are_converted_and_others_refused() {
    let directory = TempDir::new().unwrap();
    let path = |name: &str| directory.path().join(name);
    // The C library's own mtrace, of a program that calls it.
    let (source, built) = (path("traced.c"), path("traced"));
    let code = "#include <mcheck.h>\n#include <stdlib.h>\nint main(void) { void *all[500]; int i; mtrace(); \
                for (i = 0; i < 500; i++) all[i] = malloc(100 + i); for (i = 0; i < 500; i += 2) free(all[i]); \
                all[1] = realloc(all[1], 9000); return 0; }";
    std::fs::write(&source, code).unwrap();
    assert!(Command::new("cc").args(["-g", "-w", "-o"]).arg(&built).arg(&source).status().unwrap().success());
    let log = path("mtrace.txt");
    let preload = "libc_malloc_debug.so.0";
    assert!(Command::new(&built).env("MALLOC_TRACE", &log).env("LD_PRELOAD", preload).status().unwrap().success());
    if std::fs::metadata(&log).is_ok_and(|meta| meta.len() > 0) {
        let done = convert(&log, &path("mtrace.fpt"));
        assert!(done.status.success() && text(&done).contains("heap from before"), "{}", text(&done));
        let report = report(&path("mtrace.fpt"), &["--under", "glibc:tcache_count=0"]);
        assert_eq!(report["trace"]["allocations"], 501);
        assert_eq!(report["enough"]["is_enough"], false);
    } else {
        println!("the C library has no mtrace here");
    }
    std::fs::write(path("other"), "not a trace of anything").unwrap();
    let refused = convert(&path("other"), &path("other.fpt"));
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused).contains("neither a data file of heaptrack") && !path("other.fpt").exists(), "{}", text(&refused));
}
