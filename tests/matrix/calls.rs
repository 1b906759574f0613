//! Calls in a process in a guest, in few rounds: emulation takes a hundred times as long as a CPU. The tests of `crate::trim` and
//! `crate::attach` cover more on the machine itself.

use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::kernels::{report, sum};
use crate::attach::{attaching, detaching, done};
use crate::sampler::programs::Libraries;
use crate::support::build::{Link, program};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::{LIMIT, bpf, serial};
use crate::trim::harmless::{call, churn, counts};
use crate::trim::{kill_at_random, made, trims};

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn a_program_that_checks_itself_survives_calls_and_killed_commands() {
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let target = churn(1, 2_000);
    let trimmed = call(&target, 12);
    let mut attached = 0;
    for _ in 0..6 {
        for arguments in [attaching(target.pid(), &library, 4096), detaching(target.pid())] {
            let report = made(&arguments);
            let why = report["refused"].as_str().unwrap_or("");
            assert!(matches!(why, "" | "in_allocator" | "no_parked_thread" | "not_stopped" | "not_attached"), "{report}");
            attached += u32::from(why.is_empty());
        }
    }
    let killed = kill_at_random(target.pid(), 8, 0x5eed, trims);
    let still = call(&target, 3);
    let counts = counts(target);
    println!("{trimmed} trims, {attached} attached and detached, {killed} commands killed, {still} trims afterwards; {counts}");
    assert!(trimmed >= 4 && attached >= 6 && killed >= 4 && still > 0, "{trimmed}, {attached}, {killed}, {still}");
}

/// With a sample for each byte, so that an estimate is the ledger's own number.
#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn a_running_program_reports_its_own_ledger_once_the_sampler_is_attached() {
    if bpf().is_none() {
        return;
    }
    let libraries = Libraries::new();
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    let attached = done(&attaching(target.pid(), &libraries.path(Flavour::Attached), 1));
    assert!(attached["state"]["words"].as_u64().unwrap() > 0, "{attached}");
    let mut recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("round");
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err);
    let report = report(&recording.file(), "live");
    assert_eq!(report["mode"], "sampled", "{report}");
    for site in &truth.sites {
        assert_eq!(sum(&report, &site.site, "inuse_bytes_est") as u64, site.live_bytes, "{}", site.site);
    }
    done(&detaching(target.pid()));
    target.go_to("round");
}

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn a_running_program_is_recorded_in_the_process_to_the_byte() {
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--in-process"]);
    let truth = target.go_to("round");
    let seen = recording.stop().by_site(target.pid());
    for site in &truth.sites {
        assert_eq!(seen.get(&site.site).map_or(0, |one| one.inuse_bytes), site.live_bytes, "{}", site.site);
    }
    target.go_to("round");
}
