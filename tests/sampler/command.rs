//! `fragprof run`: programs that it starts, and programs that it refuses, with the reason.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use fragprof::sampler::library::Flavour;

use super::programs::{Libraries, compile};
use crate::census::others::prefixed;
use crate::support::build::{LIB_DIR, Link, program};
use crate::support::process::{Done, run};
use crate::support::recording::fragprof;

fn run_with(arguments: &[&str], env: &[(&str, &str)]) -> Done {
    run(fragprof().arg("run").args(arguments).envs(env.iter().copied()))
}

fn refused(arguments: &[&str]) -> String {
    let done = run_with(arguments, &[]);
    assert_eq!(done.status.code(), Some(3), "{}\n{}", done.out, done.err);
    done.err
}

#[test]
fn the_program_replaces_fragprof_and_keeps_its_output_and_status() {
    let done = run_with(&["--", "sh", "-c", "echo out; echo err >&2; exit 42"], &[]);
    assert_eq!((done.out.trim(), done.err.trim(), done.status.code()), ("out", "err", Some(42)));
}

#[test]
fn the_library_comes_first_and_the_settings_are_passed_on() {
    let jemalloc = format!("{LIB_DIR}/libjemalloc.so.2");
    let done = run_with(
        &[
            "--sample-bytes",
            "65536",
            "--samples-per-second",
            "500",
            "--",
            "sh",
            "-c",
            "echo $LD_PRELOAD; echo $FRAGPROF_SAMPLE_BYTES $FRAGPROF_SAMPLES_PER_SECOND",
        ],
        &[("LD_PRELOAD", &jemalloc)],
    );
    let lines: Vec<&str> = done.out.lines().collect();
    let (first, rest) = lines[0].split_once(':').unwrap();
    assert!(first.ends_with("/libfragprof_sampler_jemalloc.so"), "{first}");
    assert_eq!((rest, lines[1]), (jemalloc.as_str(), "65536 500"));
}

#[test]
fn a_program_without_jemalloc_gets_the_build_without_its_symbols() {
    let done = run_with(&["--", "cat", "/proc/self/maps"], &[]);
    assert!(done.out.contains("/libfragprof_sampler.so"), "{}", done.out);
    assert!(!done.out.contains("sampler_jemalloc"), "{}", done.out);
}

#[test]
fn a_script_is_checked_by_its_interpreter() {
    let libraries = Libraries::new();
    let script = libraries.folder().join("script");
    fs::write(&script, "#!/usr/bin/env sh\ncat /proc/self/maps\n").unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let done = run_with(&["--", script.to_str().unwrap()], &[]);
    assert!(done.out.contains("/libfragprof_sampler.so"), "{}\n{}", done.out, done.err);
}

#[test]
fn a_musl_program_is_started_with_the_same_library() {
    let libraries = Libraries::new();
    let program = compile(libraries.folder(), "transparent.c", "musl-gcc", &[]);
    let done = run_with(&["--", program.to_str().unwrap()], &[]);
    assert!(done.status.success() && done.err.is_empty(), "{}", done.err);
}

#[test]
fn a_static_program_is_refused() {
    let program = program("speed", Link::StaticMusl);
    let said = refused(&["--", program.to_str().unwrap()]);
    assert!(said.contains("is statically linked: nothing can be preloaded"), "{said}");
}

#[test]
fn a_program_with_its_own_malloc_is_refused() {
    let program = program("speed", Link::TcmallocInside);
    let said = refused(&["--", program.to_str().unwrap()]);
    assert!(said.contains("has malloc linked in"), "{said}");
}

/// As Rust programs do: its calls do not go through the dynamic linker.
#[test]
fn an_allocator_that_a_program_has_under_other_names_is_named() {
    let libraries = Libraries::new();
    let program = prefixed(libraries.folder(), &[]);
    let done = run_with(&["--", program.to_str().unwrap()], &[]);
    assert!(done.status.success() && done.err.contains("it has an allocator linked in (jemalloc)"), "{}", done.err);
}

#[test]
fn a_program_with_a_sanitizer_is_refused() {
    let libraries = Libraries::new();
    for flag in [&["-fsanitize=address"][..], &["-fsanitize=address", "-static-libasan"]] {
        let program = compile(libraries.folder(), "strict.c", "cc", flag);
        let said = refused(&["--", program.to_str().unwrap()]);
        assert!(said.contains("is built with a sanitizer"), "{said}");
    }
}

#[test]
fn a_program_that_gains_privileges_is_refused() {
    let libraries = Libraries::new();
    let copy = libraries.folder().join("privileged");
    fs::copy("/bin/true", &copy).unwrap();
    if std::os::unix::fs::chown(&copy, Some(65534), Some(65534)).is_err() {
        println!("skipped: needs root");
        return;
    }
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
    let said = refused(&["--", copy.to_str().unwrap()]);
    assert!(said.contains("gains privileges when it starts (set-user-ID)"), "{said}");
}

#[test]
fn a_missing_program_is_named_in_the_error() {
    assert!(refused(&["--", "/no/such/program"]).contains("/no/such/program"));
}

#[test]
fn an_interval_out_of_range_is_a_usage_error() {
    for bad in ["0", "-1", "x", "2000000000000"] {
        assert_eq!(run_with(&["--sample-bytes", bad, "--", "true"], &[]).status.code(), Some(2), "{bad}");
    }
}

#[test]
fn install_writes_the_libraries() {
    let libraries = Libraries::new();
    let folder = libraries.folder().join("a/b");
    let done = run_with(&["--install", folder.to_str().unwrap()], &[]);
    let written: Vec<&Path> = done.out.lines().map(Path::new).collect();
    let file = |flavour: Flavour| folder.join(flavour.file_name());
    // What can be preloaded, and what can be attached by its path in a container: for samples, and for every call.
    assert_eq!(written, [Flavour::Standard, Flavour::Jemalloc, Flavour::Attached, Flavour::AttachedRecorder].map(file), "{}", done.err);
    assert!(written.iter().all(|path| path.is_file()));
}
