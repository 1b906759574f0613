//! Calls in a process in a guest, in few rounds: emulation takes a hundred times as long as a CPU. The tests of `crate::trim` and
//! `crate::attach` cover more on the machine itself.

use crate::attach::{attaching, detaching};
use crate::sampler::programs::Libraries;
use crate::support::serial;
use crate::trim::harmless::{call, churn, counts};
use crate::trim::{kill_at_random, made, trims};

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn a_program_that_checks_itself_survives_calls_and_killed_commands() {
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(fragprof::sampler::library::Flavour::Attached);
    let target = churn(1, 20_000);
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
    assert!(trimmed >= 6 && attached >= 6 && killed >= 4 && still > 0, "{trimmed}, {attached}, {killed}, {still}");
}
