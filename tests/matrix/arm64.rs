//! Preparations and tests for the guests of `scripts/kernel-matrix.sh arm64` in addition to those of the other modules. Ignored, because
//! they are for an arm64 build.

use std::process::Command;

use crate::census::target::build;
use crate::support::build::{Link, program};
use crate::support::process::run;
use crate::support::recording::fragprof;
use crate::support::rendezvous::Target;

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
}

#[test]
#[ignore = "for arm64: scripts/kernel-matrix.sh arm64"]
fn what_it_lacks_is_refused_by_name() {
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    target.go_to("round");
    let pid = target.pid().to_string();
    for (args, says) in [(&["trim", "--yes", &pid][..], "x86-64"), (&["attach-sampler", "--yes", &pid], "x86-64")] {
        let done = run(fragprof().args(args));
        assert!(!done.status.success(), "{args:?}: {}", done.out);
        assert!(done.err.contains(says), "{args:?}: {}", done.err);
    }
    target.go_to("round");
}
