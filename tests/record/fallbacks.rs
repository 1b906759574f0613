//! The ways of attaching that older kernels have, forced on this one: the same programs must give the same ledgers.

use std::time::{Duration, Instant};

use fragprof::probe::features::Attach;
use fragprof::profile::pprof;
use fragprof::session::{Options, Recorder};
use fragprof::units::Pid;

use super::{Place, Program, place, target_command};
use crate::support::rendezvous::Target;
use crate::support::report::{Report, Since};
use crate::support::{LIMIT, bpf};

fn check(method: Attach, program: Program, place: Place) {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut target_command(program, place));
    let mut recorder = Recorder::new(Options { method: Some(method), probe_throwing: true, ..Options::default() }).unwrap();
    recorder.watch(Pid(target.pid())).unwrap();
    let pid = target.pid();
    // The driver works while the target runs, so another thread controls the target.
    let leader = std::thread::spawn(move || (target.go_to("done"), target));
    let deadline = Instant::now() + LIMIT;
    while !leader.is_finished() {
        recorder.step(Duration::from_millis(20));
        assert!(Instant::now() < deadline, "process {pid} printed no ledger");
    }
    let (truth, _alive_to_the_end) = leader.join().unwrap();
    let profile = recorder.finish().unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("out.pb.gz");
    pprof::write(&profile, &mut std::fs::File::create(&file).unwrap()).unwrap();
    Report::read(&file).assert_equals(&truth, Since::Attach);
}

#[test]
fn uprobe_multi_without_sessions_counts_every_entry_point() {
    check(Attach::Multi, Program::new("entry_points"), place::ATTACHED_TO_GLIBC);
    check(Attach::Multi, Program::new("entry_points"), place::ATTACHED_TO_PRELOADED_TCMALLOC);
    check(Attach::Multi, Program::new("new_delete"), place::ATTACHED_TO_PRELOADED_JEMALLOC);
}

#[test]
fn perf_event_uprobes_count_every_entry_point() {
    check(Attach::PerfEvents, Program::new("entry_points"), place::ATTACHED_TO_GLIBC);
    check(Attach::PerfEvents, Program::new("entry_points"), place::ATTACHED_TO_PRELOADED_TCMALLOC);
    check(Attach::PerfEvents, Program::new("new_delete"), place::ATTACHED_TO_PRELOADED_JEMALLOC);
}

#[test]
fn the_programs_for_old_kernels_count_every_entry_point() {
    check(Attach::ByAddress, Program::new("entry_points"), place::ATTACHED_TO_GLIBC);
    check(Attach::ByAddress, Program::new("entry_points"), place::ATTACHED_TO_PRELOADED_TCMALLOC);
    check(Attach::ByAddress, Program::new("entry_points"), place::ATTACHED_TO_STATIC_MUSL);
    check(Attach::ByAddress, Program::new("new_delete"), place::ATTACHED_TO_PRELOADED_JEMALLOC);
}

#[test]
fn the_programs_for_old_kernels_count_realloc_signal_stacks_and_short_threads() {
    check(Attach::ByAddress, Program::new("realloc_forms"), place::ATTACHED_TO_PRELOADED_MIMALLOC);
    check(Attach::ByAddress, Program::new("signal_stacks"), place::ATTACHED_TO_GLIBC);
    check(Attach::ByAddress, Program::new("short_threads"), place::ATTACHED_TO_GLIBC);
    check(Attach::ByAddress, Program::new("deep_recursion"), place::ATTACHED_TO_GLIBC);
}

#[test]
fn uprobe_multi_without_sessions_counts_realloc_and_signal_stacks() {
    check(Attach::Multi, Program::new("realloc_forms"), place::ATTACHED_TO_PRELOADED_MIMALLOC);
    check(Attach::Multi, Program::new("signal_stacks"), place::ATTACHED_TO_GLIBC);
}
