//! The census under the C libraries and jemallocs of other Debian suites, unpacked next to the tests and run through their own loader.
//! `make census-suites`; needs the network, so it is not part of `make test`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::glibc::{check_command, check_trim_of};
use super::others::assert_equal_to_jemallocs_account;
use super::target::Target;
use crate::matrix::places::{C_LIBRARY, suite};

/// The suites with their glibc: 2.31, 2.36, 2.41, and the newest.
const SUITES: [&str; 4] = ["bullseye", "bookworm", "trixie", "sid"];
/// Every pattern of holes that the program makes.
const SCENARIOS: [&str; 9] = ["mix", "holes2", "holes4", "holes16", "holes64", "holes500", "tail", "fastbins", "large"];

/// The unpacked packages of a suite.
fn root(name: &str) -> PathBuf {
    let packages: Vec<&str> = C_LIBRARY.into_iter().chain(["libjemalloc2", "libstdc++6"]).collect();
    suite(name, &packages)
}

/// The program, linked against the oldest library, so that the same file runs under all.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(built)
}

fn built() -> PathBuf {
    let root = root("bullseye");
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("heaps-oldest");
    // Renamed only once it is complete: another run may be about to start it.
    let unfinished = program.with_extension(std::process::id().to_string());
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-w", "-no-pie", "-o"]).arg(&unfinished).arg(format!("--sysroot={}", root.display()));
    compiler.arg(format!("-B{}", libraries.display())).arg("-L").arg(&libraries).arg("-L").arg(root.join("lib/x86_64-linux-gnu"));
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census/heaps.c")).args(["-lpthread", "-ldl"]);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    std::fs::rename(&unfinished, &program).unwrap();
    program
}

/// The program under a suite's loader and libraries, with a library before its allocator or none.
fn under(root: &Path, program: &Path, preload: Option<&str>) -> Command {
    let directories = [root.join("lib/x86_64-linux-gnu"), root.join("usr/lib/x86_64-linux-gnu")];
    let mut command = Command::new(directories[0].join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(format!("{}:{}", directories[0].display(), directories[1].display()));
    if let Some(library) = preload {
        command.arg("--preload").arg(directories[1].join(library));
    }
    command.arg(program);
    command
}

#[test]
#[ignore = "downloads packages of other suites: make census-suites"]
fn every_hole_pattern_of_every_glibc_is_counted_to_the_byte_and_its_trim_predicted() {
    let program = program();
    for name in SUITES {
        let root = root(name);
        for tunables in [None, Some("glibc.malloc.hugetlb=1")] {
            for scenario in SCENARIOS {
                let mut command = under(&root, program, None);
                command.envs(tunables.map(|value| ("GLIBC_TUNABLES", value)));
                let what = format!("{name} {scenario} {tunables:?}");
                check_trim_of(&mut command, scenario, &what);
                println!("{what}: to the byte, trim as predicted");
            }
        }
    }
}

#[test]
#[ignore = "downloads packages of other suites: make census-suites"]
fn every_tunable_of_every_glibc_leaves_the_count_exact() {
    let program = program();
    for name in SUITES {
        let root = root(name);
        for tunables in [
            "glibc.malloc.mmap_threshold=65536",
            "glibc.malloc.tcache_count=200:glibc.malloc.mxfast=160",
            "glibc.malloc.tcache_count=0",
            "glibc.malloc.arena_max=2:glibc.malloc.tcache_max=600",
            "glibc.malloc.tcache_max=4194304",
        ] {
            let mut command = under(&root, program, None);
            let what = format!("{name} mix {tunables}");
            drop(check_command(command.env("GLIBC_TUNABLES", tunables), "mix", &what));
            println!("{what}: to the byte");
        }
    }
}

#[test]
#[ignore = "downloads packages of other suites: make census-suites"]
fn jemalloc_of_every_suite_is_counted_as_it_counts_itself() {
    let program = program();
    for name in SUITES {
        let root = root(name);
        for scenario in ["mix", "holes16", "tail", "large"] {
            let mut target = Target::start_on_small_pages(&mut under(&root, program, Some("libjemalloc.so.2")));
            assert_equal_to_jemallocs_account(&mut target, scenario, name);
            let layout = target.census(fragprof::census::Level::Top).census.heaps[0].layout.clone();
            println!("{name} {scenario}: {layout}: to the byte");
        }
    }
}
