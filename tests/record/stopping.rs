//! How a recording ends: Ctrl-C, the time limit, and a recorder that is killed.

use std::time::Instant;

use rustix::process::Signal;

use super::{Program, place, target_command};
use crate::support::build::{Link, program};
use crate::support::process::{run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::report::{Report, Since};
use crate::support::{LIMIT, bpf, serial, text};

/// A target that is slower than usual by this factor counts as probed. A probed pair costs a hundred times as much as an unprobed one.
const SLOWER_MAX: f64 = 8.0;

#[test]
fn a_killed_recorder_leaves_the_target_at_full_speed_and_no_probe_behind() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut target_command(Program::new("speed"), place::ATTACHED_TO_GLIBC));
    let before_ns = target.go_to("speed").pair_ns.unwrap();
    let mut recording = Recording::attach(&[target.pid()]);
    let libc = text::libc_of(target.pid()).unwrap();
    assert_eq!(text::is_probed(target.pid(), &libc, "malloc"), Some(true), "the recording probes malloc");
    let during_ns = target.go_to("speed").pair_ns.unwrap();
    assert!(during_ns > before_ns * SLOWER_MAX, "a recorded pair takes {during_ns} ns, an unrecorded {before_ns} ns");

    recording.process.signal(Signal::KILL);
    recording.wait(LIMIT);
    wait_until("the kernel removes the probes from malloc and free", || {
        ["malloc", "free", "calloc", "realloc"].iter().all(|symbol| text::is_probed(target.pid(), &libc, symbol) == Some(false))
    });
    let after_ns = target.go_to("speed").pair_ns.unwrap();
    assert!(after_ns < before_ns * SLOWER_MAX, "a pair takes {after_ns} ns after the recorder was killed, {before_ns} ns before");
    assert!(target.process.is_running());
}

#[test]
fn a_stopped_recording_leaves_no_probe_behind() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut target_command(Program::new("realloc_forms"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach(&[target.pid()]);
    target.go_to("done");
    recording.stop();
    let libc = text::libc_of(target.pid()).unwrap();
    for symbol in ["malloc", "free", "calloc", "realloc", "posix_memalign"] {
        assert_eq!(text::is_probed(target.pid(), &libc, symbol), Some(false), "{symbol}");
    }
}

#[test]
fn ctrl_c_under_a_launched_program_writes_the_profile_so_far() {
    if bpf().is_none() {
        return;
    }
    let mut rendezvous = Rendezvous::new();
    let path = program("realloc_forms", Link::Dynamic);
    let recording = Recording::launch(&rendezvous, &path, &[], &[]);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("done", &recording.process);
    recording.stop().assert_equals(&truth, Since::Launch);
}

#[test]
fn signals_in_quick_succession_are_one_request_and_the_profile_is_written() {
    if bpf().is_none() {
        return;
    }
    let mut rendezvous = Rendezvous::new();
    let path = program("realloc_forms", Link::Dynamic);
    let recording = Recording::launch(&rendezvous, &path, &[], &[]);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("done", &recording.process);
    // As `timeout -s INT` does: the command first, then its process group.
    for signal in [Signal::INT, Signal::INT, Signal::TERM] {
        recording.process.signal(signal);
    }
    recording.finish().assert_equals(&truth, Since::Launch);
}

#[test]
fn a_recording_ends_after_its_duration() {
    if bpf().is_none() {
        return;
    }
    let target = Target::start(&mut target_command(Program::new("realloc_forms"), place::ATTACHED_TO_GLIBC));
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("out.pb.gz");
    let start = Instant::now();
    let done = run(fragprof().args(["record", "-p", &target.pid().to_string(), "--duration", "1s", "-o"]).arg(&file));
    assert!(done.status.success(), "{}", done.err);
    assert!(start.elapsed().as_secs_f64() >= 1.0);
    let report = Report::read(&file);
    // The machine may be loaded, so the upper bound is loose.
    assert!((0.5..20.0).contains(&report.duration_s), "recorded {} s", report.duration_s);
}

#[test]
fn a_second_recording_of_the_same_process_starts_afresh() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut target_command(Program::new("exec_twice"), place::ATTACHED_TO_GLIBC));
    let nothing = Recording::attach(&[target.pid()]).stop();
    assert_eq!(nothing.by_site(target.pid()), std::collections::BTreeMap::new());
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("before_exec");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn two_recorders_of_one_process_are_both_correct() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut target_command(Program::new("realloc_forms"), place::ATTACHED_TO_GLIBC));
    let one = Recording::attach(&[target.pid()]);
    let other = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    one.stop().assert_equals(&truth, Since::Attach);
    other.stop().assert_equals(&truth, Since::Attach);
}
