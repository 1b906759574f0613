//! The limit on samples: the rule by itself, against programs that do their worst, and that nothing of it reaches the program.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::programs::{Allocator, Libraries, compile, sampled};
use super::stress::count_as_listener;
use crate::support::LIMIT;
use crate::support::process::{Process, run};

/// `LIMIT_SAMPLES_PER_SECOND` of preload/limit.h.
const PER_SECOND: f64 = 250.0;

/// What `spells.c` says, by name.
fn simulated() -> BTreeMap<String, Vec<f64>> {
    let libraries = Libraries::new();
    let preload = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/src/sampler/preload");
    let program = compile(libraries.folder(), "spells.c", "cc", &[preload, "-lm"]);
    let done = run(&mut Command::new(&program));
    assert!(done.status.success(), "{}", done.err);
    let line = |line: &str| {
        let mut words = line.split_whitespace().map(str::to_owned);
        (words.next().unwrap(), words.map(|word| word.parse().unwrap()).collect())
    };
    done.out.lines().map(line).collect()
}

#[test]
fn no_spell_of_any_program_has_more_samples_than_the_limit_and_a_few_bursts() {
    let said = simulated();
    for name in ["steady", "slow", "short_bursts", "long_bursts", "adversary", "hundred_threads", "moved"] {
        let [_, _, over, allowed, _] = said[name][..] else { panic!("{said:?}") };
        assert!(over <= allowed, "{name}: {over} over the limit, {allowed} allowed");
    }
    // And it is used: what allocates without end is sampled at the limit, not below.
    for name in ["steady", "hundred_threads", "moved"] {
        let [samples, milliseconds, ..] = said[name][..] else { panic!("{said:?}") };
        assert!(samples > 0.98 * PER_SECOND * milliseconds / 1000.0, "{name}: {samples} in {milliseconds} ms");
    }
}

#[test]
fn a_program_below_the_limit_keeps_its_interval() {
    let said = simulated();
    let [samples, milliseconds, _, _, doublings] = said["slow"][..] else { panic!("{said:?}") };
    // A tenth of a byte a nanosecond: 191 samples per second, with the scatter of a Poisson count.
    let expected = 190.7 * milliseconds / 1000.0;
    assert!((samples - expected).abs() < 5.0 * expected.sqrt() && doublings == 0.0, "{samples} of {expected}");
}

#[test]
fn a_clock_that_jumps_lengthens_the_interval_for_a_moment_at_most() {
    let said = simulated();
    // Back by a year: as after a burst, and no worse; the debt is paid off in some seconds.
    assert_eq!((&said["back"][..], &said["ahead"][..], &said["most"][..]), (&[20.0][..], &[0.0][..], &[20.0][..]));
}

/// In seccomp's strict mode a system call kills, and so does reading the time stamp counter: the clock needs neither.
#[test]
fn a_seccomp_that_kills_on_every_call_but_exit_does_not_notice_the_clock() {
    let libraries = Libraries::new();
    for compiler in ["cc", "musl-gcc"] {
        let program = compile(libraries.folder(), "strict.c", compiler, &[]);
        let mut command = sampled(&program, &libraries.path(Flavour::Standard), Allocator::Glibc, 64);
        let mut process = Process::start_piped(command.arg("wait").env("FRAGPROF_SAMPLES_PER_SECOND", "2000"));
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
        count_as_listener(process.pid());
        process.input().write_all(b"g").unwrap();
        let status = process.wait(LIMIT);
        // It exits with 4 if no interval was lengthened.
        assert!(status.success(), "{compiler}: {status:?}: {}", process.err.all());
    }
}
