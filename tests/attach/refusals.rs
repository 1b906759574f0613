//! Every refusal of its own, by name, with the process untouched; those of any injected call are the trim's.

use std::os::unix::fs::FileExt as _;
use std::process::Command;

use fragprof::sampler::library::Flavour;
use serde_json::Value;

use super::{attaching, detaching, done, settled};
use crate::sampler::programs::Libraries;
use crate::support::build::{Link, program, tool};
use crate::support::process::run;
use crate::support::recording::fragprof;
use crate::support::rendezvous;
use crate::trim::{Target, build, made};

#[track_caller]
fn assert_refused(pid: u32, library: &std::path::Path, name: &str) {
    let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let before = maps();
    let arguments = attaching(pid, library, 4096);
    let report: Value = if name == "no_parked_thread" { made(&arguments) } else { settled(&arguments) };
    assert_eq!(report["refused"], name, "{report}");
    assert!(report["reason"].as_str().unwrap().len() > 10 && report["calls"].as_array().unwrap().is_empty(), "{report}");
    assert_eq!(maps(), before);
    crate::trim::assert_free(pid);
}

#[test]
fn what_is_unsafe_is_refused_by_name() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    for (state, name) in [
        ("strict", "strict_seccomp"),
        ("busy", "no_parked_thread"),
        ("small_stack", "small_stack"),
        ("fibre", "foreign_stack"),
        ("in_allocator", "in_allocator"),
        ("interrupted_malloc", "in_allocator"),
        ("setuid", "setuid"),
    ] {
        println!("{state}");
        assert_refused(Target::in_state(state, 16, 0).pid(), &library, name);
    }
}

/// Rust programs have their allocator so: malloc is the C library's, and called by C code alone.
#[test]
fn an_allocator_that_is_linked_in_beside_malloc_is_named() {
    let libraries = Libraries::new();
    let target = rendezvous::Target::start(&mut Command::new(program("snmalloc_api", Link::Dynamic)));
    let report = done(&attaching(target.pid(), &libraries.path(Flavour::Attached), 4096));
    assert_eq!((&report["allocator"], &report["unseen"]), (&"glibc".into(), &"snmalloc".into()), "{report}");
    // The library in the process is none of its allocators.
    let census = run(fragprof().args(["census", "--json", &target.pid().to_string()]));
    assert!(census.out.contains("snmalloc is linked into snmalloc_api"), "{}", census.out);
    assert!(!census.out.contains("libfragprof"), "{}", census.out);
    done(&detaching(target.pid()));
}

#[test]
fn a_program_in_which_nothing_could_be_seen_is_refused() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let fixed = build("states.c", "attach-static", &["-pthread", "-static"]);
    assert_refused(Target::start(Command::new(fixed).args(["plain", "16"])).pid(), &library, "own_malloc");
    let inside = rendezvous::Target::start(&mut Command::new(program("nested", Link::TcmallocInside)));
    assert_refused(inside.pid(), &library, "own_malloc");
    if let Some(compiler) = tool("musl-gcc") {
        let out = crate::support::build::output_dir().join("attach-musl");
        let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trim/musl.c");
        assert!(Command::new(compiler).args(["-O1", "-w", "-o"]).arg(&out).arg(source).status().unwrap().success());
        assert_refused(Target::start(&mut Command::new(out)).pid(), &library, "musl");
    }
    let checked = build("states.c", "attach-asan", &["-pthread", "-fsanitize=address"]);
    let mut command = Command::new(checked);
    assert_refused(Target::start(command.args(["plain", "16"]).env("ASAN_OPTIONS", "detect_leaks=0")).pid(), &library, "sanitizer");
}

#[test]
fn a_process_that_has_the_sampler_already_or_another_allocator_in_front_is_refused() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let states = crate::trim::states();
    let front = build("front.c", "attach-front", &["-shared", "-fPIC"]);
    for (preload, name) in [(libraries.path(Flavour::Standard), "preloaded"), (front, "allocator_in_front")] {
        let target = Target::start(Command::new(&states).args(["plain", "16"]).env("LD_PRELOAD", preload));
        assert_refused(target.pid(), &library, name);
        target.end();
    }
}

#[test]
fn a_library_that_is_not_where_the_process_would_find_it_is_refused() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let target = Target::in_state("plain", 16, 0);
    assert_refused(target.pid(), &libraries.folder().join("no-such-file.so"), "not_in_its_root");
    assert_refused(target.pid(), &libraries.path(Flavour::Standard), "not_in_its_root");
    let Some(unshare) = tool("unshare") else { return };
    // Another file system where the library lies.
    let hide = format!("mount -t tmpfs none {} && exec {} plain 16", libraries.folder().display(), crate::trim::states().display());
    let hidden = Target::start(Command::new(unshare).args(["--mount", "sh", "-c", &hide]));
    assert_refused(hidden.pid(), &library, "not_in_its_root");
    done(&attaching(target.pid(), &library, 4096));
    target.end();
}

/// The library is there, but its dynamic linker cannot map it.
#[test]
fn a_library_that_cannot_be_loaded_leaves_the_process_as_it_was() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let Some(unshare) = tool("unshare") else { return };
    let folder = libraries.folder().display().to_string();
    let no_exec = format!(
        "mount --bind {folder} {folder} && mount -o remount,bind,noexec {folder} && exec {} plain 16",
        crate::trim::states().display()
    );
    let target = Target::start(Command::new(unshare).args(["--mount", "sh", "-c", &no_exec]));
    let report = settled(&attaching(target.pid(), &library, 4096));
    assert_eq!(report["refused"], "not_loaded", "{report}");
    target.assert_free();
    target.end();
}

#[test]
fn detaching_where_nothing_is_attached_is_refused() {
    let libraries = Libraries::new();
    let target = Target::in_state("plain", 16, 0);
    assert_eq!(settled(&detaching(target.pid()))["refused"], "not_attached");
    done(&attaching(target.pid(), &libraries.path(Flavour::Attached), 4096));
    done(&detaching(target.pid()));
    assert_eq!(settled(&detaching(target.pid()))["refused"], "not_attached");
    target.end();
}

/// A call that has not ended: the library says which process is in it, and does nothing meanwhile.
#[test]
fn a_call_still_under_way_is_not_taken_for_one_that_found_nothing() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let target = Target::in_state("plain", 16, 0);
    let pid = target.pid();
    done(&attaching(pid, &library, 4096));
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let first = maps.lines().find(|line| line.contains("libfragprof_attached.so")).unwrap();
    let base = u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap();
    let elf = fragprof::process::elf::Elf::parse(std::fs::File::open(&library).unwrap()).unwrap();
    // The ninth word of its state (preload/attach.h).
    let runs = base + elf.variable_vaddr(b"fragprof_attached").unwrap() + 64;
    let memory = std::fs::File::options().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    let set = |value: u64| memory.write_all_at(&value.to_le_bytes(), runs).unwrap();
    set(u64::from(pid));
    for arguments in [attaching(pid, &library, 4096), detaching(pid)] {
        assert_eq!(settled(&arguments)["refused"], "call_under_way");
    }
    // Of a parent, in whose call it was forked: that does not go on in the child.
    set(u64::from(pid) + 1);
    done(&detaching(pid));
    target.end();
}
