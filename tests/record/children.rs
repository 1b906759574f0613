//! Children of what is recorded: none of them runs before its probes are in.

use super::{Program, place, target_command};
use crate::support::build::{Link, plugin, program};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::report::{Report, Since};
use crate::support::{bpf, serial};

/// Blocks that `exits_at_once` makes, half of which it frees.
const BRIEF: u64 = 100;

/// The processes of a recording with what each made in `exits_at_once`.
fn brief(report: &Report) -> Vec<(u32, u64)> {
    let mut pids: Vec<u32> = report.stacks.iter().filter_map(|stack| stack.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let of = |pid: u32| report.by_site(pid).get("site_brief").map(|site| (pid, site.allocations));
    pids.into_iter().filter_map(of).collect()
}

/// A shell's children: by vfork and exec, from a subshell, and with an allocator that nothing before them had.
#[test]
fn short_children_of_a_launched_shell_are_recorded_from_their_first_allocation() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let (dynamic, fixed) = (program("exits_at_once", Link::Dynamic), program("exits_at_once", Link::StaticMusl));
    let jemalloc = program("exits_at_once", Link::Jemalloc);
    let (dynamic, fixed, jemalloc) = (dynamic.display(), fixed.display(), jemalloc.display());
    let script = format!("{dynamic}; {dynamic}; ({dynamic}; exec {fixed}) ; {jemalloc} & wait; {fixed}");
    let rendezvous = Rendezvous::new();
    let report = Recording::launch(&rendezvous, "/bin/sh".as_ref(), &["-c", &script], &[]).finish();
    let made: Vec<u64> = brief(&report).into_iter().map(|(_, made)| made).collect();
    assert_eq!(made, [BRIEF; 6], "losses: {:?}", report.losses);
    assert_eq!(report.nonzero_losses(), Vec::<String>::new());
}

/// A child that goes on in its parent's program has its parent's probes from its first instruction on.
#[test]
fn children_of_a_process_that_runs_already_are_recorded_from_their_birth() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut target_command(Program::new("fork_threads"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--children"]);
    let truth = target.go_to("done");
    let report = recording.stop();
    report.assert_equals(&truth, Since::Attach);
    assert_eq!(report.nonzero_losses(), Vec::<String>::new(), "a spell of a child was not observed");
}

/// A debugger traces its children itself: it must be able to, and what was missed must be told.
#[test]
fn the_child_of_a_program_that_traces_is_left_to_it_and_its_gap_is_among_the_losses() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let dynamic = program("exits_at_once", Link::Dynamic);
    let arguments = ["-batch", "-nx", "-ex", "run", &dynamic.display().to_string()].map(str::to_owned);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rendezvous = Rendezvous::new();
    let mut recording = Recording::launch(&rendezvous, "gdb".as_ref(), &arguments, &[]);
    recording.wait(crate::support::LIMIT);
    let said = recording.process.out.all();
    assert!(said.contains("exited normally"), "{said}");
    let losses = Report::read(&recording.file()).nonzero_losses();
    assert!(losses.iter().any(|loss| loss.starts_with("unobserved_ms")), "{losses:?}");
}

/// The library's constructor allocates before the call of dlopen returns.
#[test]
fn an_allocation_right_after_a_library_was_opened_has_a_whole_stack() {
    if bpf().is_none() {
        return;
    }
    let library = plugin(false);
    let mut rendezvous = Rendezvous::new();
    let path = program("dlopen_plugin", Link::Dynamic);
    let recording = Recording::launch(&rendezvous, &path, &[&library.display().to_string(), "keep"], &[]);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    rendezvous.expect("opened", &recording.process);
    rendezvous.go();
    rendezvous.expect("done", &recording.process);
    rendezvous.go();
    let report = recording.finish();
    let early = report.stacks.iter().filter(|stack| stack.names().contains(&"early_plugin"));
    let (whole, cut): (Vec<_>, Vec<_>) = early.partition(|stack| stack.names().contains(&"main"));
    assert_eq!(cut.len(), 0, "a stack ends before main: {:?}", cut.first().map(|stack| stack.names()));
    assert_eq!(whole.iter().map(|stack| stack.totals.allocations).sum::<u64>(), 64);
}
