//! Children of recorded processes: none of them runs before its probes are attached.

use crate::support::build::{Link, plugin, program};
use crate::support::process::wait_until;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Rendezvous;
use crate::support::report::{Report, Since, Stack};
use crate::support::{bpf, serial};

/// Blocks that `exits_at_once` allocates; it frees half of them.
const BRIEF: u64 = 100;

/// The processes of a recording, with the allocations of each in `exits_at_once`.
fn brief(report: &Report) -> Vec<(u32, u64)> {
    let mut pids: Vec<u32> = report.stacks.iter().filter_map(|stack| stack.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    let of = |pid: u32| report.by_site(pid).get("site_brief").map(|site| (pid, site.allocations));
    pids.into_iter().filter_map(of).collect()
}

/// A shell's children: by vfork and exec, from a subshell, and with an allocator that no earlier process had.
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

/// A process's end is noticed before its last records are read.
#[test]
fn blocks_that_children_free_right_before_their_end_are_not_live() {
    if bpf().is_none() {
        return;
    }
    let path = program("frees_at_exit", Link::Dynamic);
    let script = format!("for turn in $(seq 10); do {}; done", path.display());
    let report = Recording::launch(&Rendezvous::new(), "/bin/sh".as_ref(), &["-c", &script], &[]).finish();
    let of_site = |stack: &&Stack| stack.names().contains(&"site_until_exit");
    let (made, live) = report
        .stacks
        .iter()
        .filter(of_site)
        .fold((0, 0), |(made, live), stack| (made + stack.totals.allocations, live + stack.totals.inuse_allocations));
    assert_eq!((made, live), (300_000, 0), "losses: {:?}", report.losses);
}

/// Their blocks belong to their parent, which frees some of them.
#[test]
fn calls_of_vfork_children_in_their_parents_memory_are_recorded() {
    if bpf().is_none() {
        return;
    }
    let path = program("vfork_allocates", Link::Dynamic);
    let mut rendezvous = Rendezvous::new();
    let recording = Recording::launch(&rendezvous, &path, &[], &[]);
    let truth = rendezvous.expect("done", &recording.process);
    rendezvous.go();
    let report = recording.finish();
    assert!(truth.sites.iter().any(|site| site.site == "site_vfork_child" && site.allocations == 120), "{truth:?}");
    report.assert_equals(&truth, Since::Launch);
    let executed = report.stacks.iter().filter(|stack| stack.names().contains(&"site_executed"));
    assert_eq!(executed.map(|stack| stack.totals.allocations).sum::<u64>(), 60);
    assert_eq!(report.nonzero_losses(), Vec::<String>::new());
    let limits = &report.limits;
    assert!(!limits.iter().any(|limit| limit.contains("vfork")), "{limits:?}");
}

/// A debugger traces its children itself, which must still work; the gap must be reported.
#[test]
fn the_child_of_a_tracer_is_left_to_it_and_its_gap_is_among_the_losses() {
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
fn an_allocation_right_after_dlopen_has_a_complete_stack() {
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

/// A shell whose children map code, and that reports when all of them have succeeded.
const MANY_CHILDREN: &str = "echo begun >$1; for turn in $(seq 60); do /bin/true || exit 1; done; echo over >$1";

/// Wherever it is killed, the processes that it has stopped continue.
#[test]
fn a_recorder_that_is_killed_leaves_no_process_stopped() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = tempfile::TempDir::new().unwrap();
    // Python blocks SIGURG, which its children inherit.
    let blocked = format!(
        "import signal, subprocess, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])\n\
         subprocess.run(['/bin/sh', '-c', '{MANY_CHILDREN}', 'sh', sys.argv[1]], check=True)"
    );
    let commands: [&[&str]; 2] = [&["/bin/sh", "-c", MANY_CHILDREN, "sh"], &["python3", "-c", &blocked]];
    for (number, after_ms) in [0, 15, 40, 65, 90, 115].into_iter().enumerate() {
        for (which, command) in commands.iter().enumerate() {
            let end = folder.path().join(format!("{number}.{which}"));
            let mut recorder = fragprof();
            recorder.args(["record", "-o"]).arg(folder.path().join("x.pb.gz")).arg("--").args(*command).arg(&end);
            let mut recorder = recorder.stderr(std::process::Stdio::null()).spawn().unwrap();
            wait_until("the command runs", || std::fs::read(&end).is_ok_and(|text| !text.is_empty()));
            std::thread::sleep(std::time::Duration::from_millis(after_ms));
            recorder.kill().unwrap();
            recorder.wait().unwrap();
            wait_until("the command succeeded", || std::fs::read(&end).is_ok_and(|text| text == b"over\n"));
        }
    }
}

/// A thread that cannot be stopped is reported.
#[test]
fn a_child_that_blocks_the_signal_runs_on_and_its_gap_is_among_the_losses() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // Its C library is already probed because of Python; its allocator is new.
    let jemalloc = program("exits_at_once", Link::Jemalloc);
    let script = "import os, signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])\nos.execv(sys.argv[1], sys.argv[1:])";
    let rendezvous = Rendezvous::new();
    let mut recording = Recording::launch(&rendezvous, "python3".as_ref(), &["-c", script, &jemalloc.display().to_string()], &[]);
    recording.wait(crate::support::LIMIT);
    let losses = Report::read(&recording.file()).nonzero_losses();
    assert!(losses.iter().any(|loss| loss.starts_with("unobserved_ms")), "{losses:?}");
}
