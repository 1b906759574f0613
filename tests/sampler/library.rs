//! The library file: it can be loaded anywhere, and programs do not notice it.

use std::collections::BTreeSet;
use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::programs::{Allocator, Libraries, compile, sampled};
use crate::support::process::run;

fn readelf(libraries: &Libraries, flavour: Flavour, flags: &[&str]) -> String {
    let done = run(Command::new("readelf").args(flags).arg(libraries.path(flavour)));
    assert!(done.status.success(), "{}", done.err);
    done.out
}

#[test]
fn the_library_needs_no_other_library_and_no_specific_libc_version() {
    let libraries = Libraries::new();
    for flavour in Flavour::ALL {
        let dynamic = readelf(&libraries, flavour, &["--wide", "--dynamic"]);
        assert!(!dynamic.contains("(NEEDED)"), "{dynamic}");
        let versions = readelf(&libraries, flavour, &["--wide", "--version-info"]);
        assert!(versions.contains("No version information"), "{versions}");
        // Its undefined symbols are weak, so that a libc without them is no error.
        let symbols = readelf(&libraries, flavour, &["--wide", "--dyn-syms"]);
        let undefined: BTreeSet<_> = symbols.lines().filter(|line| line.contains(" UND ") && !line.contains(" 0: ")).collect();
        assert!(undefined.iter().all(|line| line.contains(" WEAK ")), "{undefined:#?}");
    }
}

#[test]
fn the_library_has_no_executable_stack_no_text_relocation_and_keeps_control_flow_protection() {
    let libraries = Libraries::new();
    for flavour in Flavour::ALL {
        let segments = readelf(&libraries, flavour, &["--wide", "--segments", "--dynamic", "--notes"]);
        assert!(segments.lines().any(|line| line.contains("GNU_STACK") && line.contains(" RW ")), "{segments}");
        assert!(!segments.contains("TEXTREL"), "{segments}");
        assert!(segments.contains("IBT, SHSTK"), "{segments}");
    }
}

#[test]
fn the_notes_have_the_two_specified_probes_with_semaphores() {
    let libraries = Libraries::new();
    for flavour in Flavour::ALL {
        let notes = readelf(&libraries, flavour, &["--wide", "--notes"]);
        let after =
            |name: &str| notes.split(&format!("Name: {name}\n")).nth(1).unwrap_or_else(|| panic!("no probe {name}: {notes}")).to_owned();
        assert_eq!(notes.matches("Provider: otel_memory").count(), 2, "{notes}");
        for (probe, arguments) in [("alloc", "8@%rdi 8@%rsi 8@%rdx 8@%rcx"), ("free", "8@%rdi")] {
            let note = after(probe);
            let line = |nth: usize| note.lines().nth(nth).unwrap();
            assert!(line(1).ends_with(&format!("Arguments: {arguments}")), "{note}");
            assert!(!line(0).contains("Semaphore: 0x0000000000000000"), "{note}");
        }
    }
}

#[test]
fn only_the_second_build_has_jemallocs_symbols() {
    let libraries = Libraries::new();
    assert!(!readelf(&libraries, Flavour::Standard, &["--wide", "--dyn-syms"]).contains("allocx"));
    assert!(readelf(&libraries, Flavour::Jemalloc, &["--wide", "--dyn-syms"]).contains(" sdallocx"));
}

#[test]
fn the_library_and_its_tables_take_less_than_8_mib() {
    let libraries = Libraries::new();
    let text = readelf(&libraries, Flavour::Standard, &["--wide", "--segments"]);
    let bytes: u64 = text
        .lines()
        .filter(|line| line.trim_start().starts_with("LOAD"))
        .map(|line| u64::from_str_radix(line.split_whitespace().nth(5).unwrap().trim_start_matches("0x"), 16).unwrap())
        .sum();
    assert!(bytes < 8 << 20, "{bytes}");
}

/// `transparent.c` prints everything that a program can observe of its allocator: errno, alignment, usable sizes, failures, weak symbols.
#[test]
fn a_program_behaves_the_same_with_and_without_the_sampler() {
    let libraries = Libraries::new();
    for allocator in [Allocator::Glibc, Allocator::Jemalloc, Allocator::Tcmalloc, Allocator::Mimalloc] {
        let program = compile(libraries.folder(), "transparent.c", "cc", &[]);
        let mut plain = Command::new(&program);
        if let Some(library) = allocator.library() {
            plain.env("LD_PRELOAD", library);
        }
        let flavour = if allocator == Allocator::Jemalloc { Flavour::Jemalloc } else { Flavour::Standard };
        let (without, with) = (run(&mut plain), run(&mut sampled(&program, &libraries.path(flavour), allocator, 512 << 10)));
        assert!(without.status.success(), "{allocator:?}: {}", without.err);
        assert_eq!((with.status, with.out, with.err), (without.status, without.out, without.err), "{allocator:?}");
    }
}

#[test]
fn a_musl_program_behaves_the_same_with_and_without_the_sampler() {
    let libraries = Libraries::new();
    let program = compile(libraries.folder(), "transparent.c", "musl-gcc", &[]);
    let without = run(&mut Command::new(&program));
    let with = run(&mut sampled(&program, &libraries.path(Flavour::Standard), Allocator::Glibc, 512 << 10));
    assert!(without.status.success(), "{}", without.err);
    assert_eq!((with.status, with.out, with.err), (without.status, without.out, without.err));
}

#[test]
fn the_sampler_makes_no_system_calls_under_strict_seccomp() {
    let libraries = Libraries::new();
    let program = compile(libraries.folder(), "strict.c", "cc", &[]);
    let done = run(&mut sampled(&program, &libraries.path(Flavour::Standard), Allocator::Glibc, 1));
    assert!(done.status.success(), "{:?}: {}", done.status, done.err);
}
