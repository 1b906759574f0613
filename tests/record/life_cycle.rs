//! Changes of a process while it is recorded: fork, exec, dlopen, dlclose, exit, and being killed.

use std::process::Command;

use rustix::process::Signal;

use super::{Program, check, place, target_command};
use crate::support::build::{self, LIB_DIR, Link, plugin, program};
use crate::support::process::wait_until;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::report::Since;
use crate::support::{LIMIT, bpf, serial, text};

#[test]
fn a_child_forked_while_threads_allocate_changes_nothing_in_glibc() {
    let _alone = serial();
    check(Program { runs: 2, ..Program::new("fork_threads") }, place::ATTACHED_TO_GLIBC);
}

#[test]
fn a_child_forked_while_threads_allocate_changes_nothing_in_jemalloc() {
    let _alone = serial();
    check(Program::new("fork_threads"), place::ATTACHED_TO_PRELOADED_JEMALLOC);
}

#[test]
fn a_child_forked_while_threads_allocate_changes_nothing_in_a_launched_program() {
    let _alone = serial();
    check(Program::new("fork_threads"), place::LAUNCHED_WITH_GLIBC);
}

/// A child's ledger starts as a copy of its parent's: neither may affect the other.
#[test]
fn children_that_are_recorded_too_leave_their_parents_ledger_as_it_is() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut target_command(Program::new("fork_threads"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--children"]);
    let truth = target.go_to("done");
    let report = recording.stop();
    report.assert_equals(&truth, Since::Attach);
    let children = report.stacks.iter().filter(|stack| stack.pid.is_some_and(|pid| pid != truth.pid));
    assert!(children.count() > 0, "no stack of a child");
    assert_eq!(report.nonzero_losses(), Vec::<String>::new(), "a child was not observed for a time");
}

/// The heap from before the exec no longer exists: none of its blocks may be reported as live.
#[test]
fn blocks_from_before_an_exec_are_not_live_after_it() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut target_command(Program::new("exec_twice"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach(&[target.pid()]);
    let first = target.go_to("before_exec");
    assert!(first.live().1 > 0);
    target.go_to("second_ready");
    target.go_to("done");
    let pid = target.pid();
    let sites = recording.stop().by_site(pid);
    let live = sites.get("site_first").map_or(0, |site| site.inuse_allocations);
    assert_eq!(live, 0, "blocks of an image that no longer exists");
}

/// Most services are started by a shell that executes the program.
#[test]
fn a_program_executed_by_a_launched_shell_is_recorded_from_its_start() {
    if bpf().is_none() {
        return;
    }
    let mut rendezvous = Rendezvous::new();
    let path = program("realloc_forms", Link::Dynamic);
    let script = format!("exec {}", path.display());
    let recording = Recording::launch(&rendezvous, "/bin/sh".as_ref(), &["-c", &script], &[]);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("done", &recording.process);
    rendezvous.go();
    recording.finish().assert_equals(&truth, Since::Launch);
}

/// Space in the static TLS block for the plugin's jemalloc, whose variables use the initial-exec model.
pub(crate) const TLS_ROOM: (&str, &str) = ("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384");

fn plugin_target(library: &std::path::Path, closes: bool, preload: Option<&str>) -> Target {
    let mut command = Command::new(program("dlopen_plugin", Link::Dynamic));
    command.arg(library).arg(if closes { "close" } else { "keep" }).env(TLS_ROOM.0, TLS_ROOM.1);
    if let Some(preload) = preload {
        command.env("LD_PRELOAD", format!("{LIB_DIR}/{preload}"));
    }
    Target::start(&mut command)
}

#[test]
fn a_library_opened_later_is_recorded_through_the_shared_allocator() {
    if bpf().is_none() {
        return;
    }
    let library = plugin(false);
    for preload in [None, Some("libjemalloc.so.2"), Some("libtcmalloc_minimal.so.4"), Some("libmimalloc.so.2")] {
        let mut target = plugin_target(&library, false, preload);
        let recording = Recording::attach(&[target.pid()]);
        target.go_to("opened");
        let truth = target.go_to("done");
        recording.stop().assert_equals(&truth, Since::Attach);
    }
}

#[test]
fn a_library_opened_later_with_an_allocator_of_its_own_is_probed_and_counted() {
    if bpf().is_none() {
        return;
    }
    let library = plugin(true);
    let mut target = plugin_target(&library, false, None);
    let recording = Recording::attach(&[target.pid()]);
    target.go_to("opened");
    for symbol in ["malloc", "calloc", "realloc", "free"] {
        let what = format!("{symbol} of the opened library is probed; fragprof said:\n{}", recording.process.err);
        wait_until(&what, || text::is_probed(target.pid(), &library, symbol) == Some(true));
    }
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_target_that_unmaps_its_second_allocator_stays_recorded() {
    if bpf().is_none() {
        return;
    }
    let library = plugin(true);
    let mut target = plugin_target(&library, true, None);
    let recording = Recording::attach(&[target.pid()]);
    target.go_to("opened");
    for symbol in ["malloc", "calloc", "realloc", "free"] {
        let what = format!("{symbol} of the opened library is probed; fragprof said:\n{}", recording.process.err);
        wait_until(&what, || text::is_probed(target.pid(), &library, symbol) == Some(true));
    }
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

/// A process of hundreds of mapped files is recorded as exactly as a small one.
#[test]
fn a_target_with_two_hundred_libraries_is_recorded_to_the_byte() {
    if bpf().is_none() {
        return;
    }
    let library = plugin(false);
    let dir = tempfile::TempDir::new().unwrap();
    for number in 0..200 {
        std::fs::copy(&library, dir.path().join(format!("libplugin{number}.so"))).unwrap();
    }
    let mut command = Command::new(program("many_libraries", Link::Dynamic));
    let mut target = Target::start(command.arg(dir.path()));
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_target_killed_during_the_recording_leaves_a_complete_profile() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut target_command(Program::new("killed"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("spinning");
    target.process.signal(Signal::KILL);
    target.process.wait(LIMIT);
    // The recording ends with its only target.
    recording.finish().assert_equals(&truth, Since::Attach);
}

#[test]
fn two_targets_in_one_recording_are_both_counted() {
    if bpf().is_none() {
        return;
    }
    let mut first = Target::start(&mut target_command(Program::new("over_aligned"), place::ATTACHED_TO_GLIBC));
    let mut second = Target::start(&mut target_command(Program::new("setuid_drop"), place::ATTACHED_TO_PRELOADED_JEMALLOC));
    let recording = Recording::attach(&[first.pid(), second.pid()]);
    let truths = [first.go_to("done"), second.go_to("done")];
    let report = recording.stop();
    for truth in &truths {
        report.assert_equals(truth, Since::Attach);
    }
}

#[test]
fn a_launched_program_that_ends_at_once_is_recorded_completely() {
    if bpf().is_none() {
        return;
    }
    let rendezvous = Rendezvous::new();
    let path = build::program("exits_at_once", Link::Dynamic);
    let report = Recording::launch(&rendezvous, &path, &[], &[]).finish();
    let pid = report.stacks.iter().find_map(|stack| stack.pid).unwrap_or_default();
    let site = report.by_site(pid)["site_brief"];
    // Blocks 50, 52, … 148 live, 51, 53, … 149 are freed.
    assert_eq!((site.inuse_allocations, site.inuse_bytes), (50, (50..150).step_by(2).sum()));
    assert_eq!((site.allocations, site.allocated_bytes), (100, (50..150).sum()));
}

#[test]
fn a_launched_programs_exit_status_is_passed_on_once_its_profile_is_written() {
    if bpf().is_none() {
        return;
    }
    let rendezvous = Rendezvous::new();
    let mut recording = Recording::launch(&rendezvous, "/bin/sh".as_ref(), &["-c", "exit 7"], &[]);
    let status = recording.wait(LIMIT);
    let said = format!("{}\n{}", recording.process.out.all(), recording.process.err.all());
    assert_eq!(status.code(), Some(7), "{said}");
    assert!(said.contains("ended with exit status: 7"), "{said}");
    assert!(recording.file().is_file(), "{said}");
}
