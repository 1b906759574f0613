//! Recordings of programs on Google's tcmalloc, preloaded and linked into them. `make google-tcmalloc-test` builds it, and names the library and
//! the archive in `FRAGPROF_TEST_GOOGLE_TCMALLOC`; without the variable there is nothing to test here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::allocator::Allocator;
use fragprof::allocator::in_file::identify;
use fragprof::process::elf::Elf;

use crate::support::bpf;
use crate::support::build::{Link, program, standalone};
use crate::support::recording::Recording;
use crate::support::rendezvous::Target;
use crate::support::report::Since;

fn files(end: &str) -> Vec<PathBuf> {
    let all = std::env::var_os("FRAGPROF_TEST_GOOGLE_TCMALLOC");
    let all: Vec<PathBuf> =
        all.iter().flat_map(std::env::split_paths).filter(|path| path.extension().is_some_and(|own| own == end)).collect();
    if all.is_empty() {
        eprintln!("not tested: FRAGPROF_TEST_GOOGLE_TCMALLOC names no .{end} (make google-tcmalloc-test builds one)");
    }
    all
}

fn check(command: &mut Command) {
    let mut target = Target::start(command);
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn every_function_of_googles_tcmalloc_is_counted_once() {
    if bpf().is_none() {
        return;
    }
    for library in files("so") {
        for name in ["entry_points", "new_delete", "realloc_forms", "nested", "failures", "google_tcmalloc_api"] {
            println!("{name} on {}", library.display());
            check(Command::new(program(name, Link::Dynamic)).env("LD_PRELOAD", &library));
        }
    }
}

#[test]
fn a_program_with_googles_tcmalloc_linked_in_is_recorded() {
    if bpf().is_none() {
        return;
    }
    for archive in files("a") {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testprogs/entry_points.c");
        let archive = archive.display().to_string();
        let flags = ["-DTRUTH_STATIC", "-Wl,--whole-archive", &archive, "-Wl,--no-whole-archive", "-lstdc++", "-lm", "-no-pie"];
        check(&mut Command::new(standalone(&source, &flags)));
    }
}

/// Each function is one entry point, whatever its names, and all are Google's: `sdallocx` is jemalloc's in other files.
#[test]
fn the_functions_of_googles_tcmalloc_are_its_own() {
    for library in files("so") {
        let found = identify(&Elf::parse(std::fs::File::open(&library).unwrap()).unwrap());
        assert_eq!((found.allocator, found.exports_malloc), (Allocator::GoogleTcmalloc, true));
        let mut by_symbol = BTreeMap::new();
        for function in &found.functions {
            assert_eq!(function.allocator, Allocator::GoogleTcmalloc, "{function:?}");
            by_symbol.extend(function.symbols.iter().map(|symbol| (symbol.as_str(), function.vaddr)));
        }
        for (one, other) in [
            ("malloc", "TCMallocInternalMalloc"),
            ("_Znwm", "TCMallocInternalNew"),
            ("_ZdaPvm", "TCMallocInternalDeleteSized"),
            ("sdallocx", "TCMallocInternalSdallocx"),
        ] {
            assert!(by_symbol.contains_key(one) && by_symbol.get(one) == by_symbol.get(other), "{one} and {other}: {by_symbol:x?}");
        }
        for symbol in ["_Znwm12__hot_cold_t", "__size_returning_new", "reallocarray", "free_aligned_sized", "pvalloc"] {
            assert!(by_symbol.contains_key(symbol), "{symbol}: {by_symbol:x?}");
        }
    }
}
