//! The limit on samples: the rule itself, for worst-case programs, and that programs do not notice it.

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

/// The output of `spells.c`, by name.
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
fn no_interval_of_any_program_has_more_samples_than_the_limit_and_a_few_bursts() {
    let said = simulated();
    for name in ["steady", "slow", "short_bursts", "long_bursts", "adversary", "hundred_threads", "moved"] {
        let [_, _, over, allowed, _] = said[name][..] else { panic!("{said:?}") };
        assert!(over <= allowed, "{name}: {over} over the limit, {allowed} allowed");
    }
    // The limit is used in full: programs that allocate continuously are sampled at the limit, not below it.
    for name in ["steady", "hundred_threads", "moved"] {
        let [samples, milliseconds, ..] = said[name][..] else { panic!("{said:?}") };
        assert!(samples > 0.98 * PER_SECOND * milliseconds / 1000.0, "{name}: {samples} in {milliseconds} ms");
    }
}

#[test]
fn a_program_below_the_limit_keeps_its_sampling_interval() {
    let said = simulated();
    let [samples, milliseconds, _, _, doublings] = said["slow"][..] else { panic!("{said:?}") };
    // A tenth of a byte per nanosecond gives 191 samples per second, with the variance of a Poisson distribution.
    let expected = 190.7 * milliseconds / 1000.0;
    assert!((samples - expected).abs() < 5.0 * expected.sqrt() && doublings == 0.0, "{samples} of {expected}");
}

#[test]
fn a_clock_that_jumps_lengthens_the_sampling_interval_only_briefly() {
    let said = simulated();
    // A clock set back by a year has the effect of a burst, not more; the debt is paid off within seconds.
    assert_eq!((&said["back"][..], &said["ahead"][..], &said["most"][..]), (&[20.0][..], &[0.0][..], &[20.0][..]));
}

/// In seccomp's strict mode a system call kills the process, and so does reading the time stamp counter: the clock needs neither.
#[test]
fn the_clock_makes_no_system_calls_under_strict_seccomp() {
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
