//! Preparations and tests for the guests of `scripts/kernel-matrix.sh arm64` in addition to those of the other modules: ignored, because
//! they are for an arm64 build. On x86-64, whether what is compiled by C compilers for arm64 can be.

use std::path::Path;
use std::process::Command;

use super::{PROGRAMS, languages, places};
use crate::census::target::build;
use crate::managed::{java, python};
use crate::support::build::{Link, program};
use crate::support::process::run;
use crate::trim;

/// Run under user emulation with compilers for arm64, which the guest does not have: its tests then find their programs compiled.
#[test]
#[ignore = "for arm64: scripts/kernel-matrix.sh arm64"]
fn its_programs_are_compiled() {
    let dynamic = [
        "bad_alloc",
        "cancelled",
        "cross_thread",
        "deep_recursion",
        "entry_points",
        "exec_twice",
        "failures",
        "first_touches",
        "fork_threads",
        "limited",
        "nested",
        "new_delete",
        "realloc_forms",
        "rounds",
        "short_threads",
        "signal_stacks",
    ];
    let each = dynamic.map(|name| (name, Link::Dynamic)).into_iter().chain([
        ("entry_points", Link::StaticGlibc),
        ("entry_points", Link::StaticMusl),
        ("short_threads", Link::StaticMusl),
    ]);
    for (name, link) in each {
        program(name, link);
    }
    for (source, compiler, flags) in [
        ("heaps.c", "cc", &["-lpthread", "-ldl"][..]),
        ("heaps.c", "musl-gcc", &["-static", "-lpthread"]),
        ("heaps.c", "musl-gcc", &["-static"]),
        ("heaps.c", "musl-gcc", &["-lpthread"]),
        ("mimalloc.c", "cc", &["-lpthread", "-ldl"]),
    ] {
        build(source, compiler, flags);
    }
    trim::states();
    trim::harmless::program();
    java::shapes(java::all().last().expect("a JDK is installed"));
    java::library("agent.c");
    python::library();
}

/// The same for the matrix of allocators, with the C libraries that its programs are linked with.
#[test]
#[ignore = "for arm64: scripts/allocator-matrix.sh arm64"]
fn the_programs_of_all_allocators_are_compiled() {
    for place in places::all() {
        for program in PROGRAMS {
            place.build(program);
        }
    }
    languages::all();
}

/// BPF programs, preload libraries and player: the build script makes them for the architecture that cargo names.
#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "it builds for the other architecture")]
fn its_embedded_objects_are_built_with_the_cross_compiler() {
    let own = std::env::current_exe().unwrap();
    let builds = own.parent().and_then(Path::parent).unwrap().join("build");
    let scripts = std::fs::read_dir(&builds).unwrap().map(|entry| entry.unwrap().path()).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("fragprof-")) && path.join("build-script-build").exists()
    });
    let newest = scripts.map(|path| path.join("build-script-build")).max_by_key(|script| script.metadata().unwrap().modified().unwrap());
    let (script, out) = (newest.unwrap_or_else(|| panic!("no build script in {}", builds.display())), tempfile::tempdir().unwrap());
    let target = [("CARGO_CFG_TARGET_ARCH", "aarch64"), ("TARGET", "aarch64-unknown-linux-gnu"), ("HOST", "x86_64-unknown-linux-gnu")];
    let done = run(Command::new(script)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .envs(target)
        .env("OUT_DIR", out.path())
        .envs([("OPT_LEVEL", "1"), ("DEBUG", "false")]));
    assert!(done.status.success(), "{}", done.err);
    for name in ["fragprof_sampler", "fragprof_recorder_jemalloc", "fragprof_attached", "fragprof_attached_recorder"] {
        let library = std::fs::read(out.path().join(format!("lib{name}.so"))).unwrap();
        // e_machine is EM_AARCH64.
        assert_eq!((&library[..4], &library[18..20]), (&b"\x7fELF"[..], &[183, 0][..]), "{name}");
    }
    assert!(out.path().join("fragprof.bpf.o").exists() && out.path().join("player").exists());
}
