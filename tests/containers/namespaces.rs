//! Processes in namespaces of their own, without an engine: user, pid and mount namespaces, files that are gone, perf maps by inner pid.

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};

use super::podman::{holder, wait_until_paused};
use crate::support::build::{Link, install, tool};
use crate::support::process::{Process, wait_until};
use crate::support::recording::Recording;
use crate::support::{LIMIT, bpf};

/// `unshare`, which runs a program as its only child in user, pid and mount namespaces of its own, with its own /proc.
fn apart() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]);
    command
}

/// The pid, in the machine's namespace, of the program that `unshare` runs.
fn child_of(unshare: &Process) -> u32 {
    let path = format!("/proc/{0}/task/{0}/children", unshare.pid());
    let mut child = None;
    wait_until("unshare to have its child", || {
        child = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
        child.is_some()
    });
    child.unwrap()
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// Number of the process's voluntary context switches.
fn sleeps(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap().trim().parse().unwrap()
}

#[test]
fn a_program_in_namespaces_of_its_own_whose_file_is_deleted_is_recorded_with_its_names() {
    let Some(_bpf) = bpf() else { return };
    for link in [Link::Dynamic, Link::StaticMusl] {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("holder");
        install(&holder(link), &file);
        let unshare = Process::start(apart().arg(&file));
        let pid = child_of(&unshare);
        wait_until_paused(pid);
        std::fs::remove_file(&file).unwrap();
        let recording = Recording::attach(&[pid]);
        let before = sleeps(pid);
        signal(pid, Signal::USR1);
        wait_until("the program to wake up", || sleeps(pid) > before);
        wait_until_paused(pid);
        let report = recording.stop();
        let site = report.by_site(pid)["site_more"];
        assert_eq!((site.inuse_bytes, site.inuse_allocations), (500_000, 100), "{link:?}");
    }
}

#[test]
fn a_just_in_time_compiled_frame_is_named_from_the_map_in_the_process_s_own_tmp_by_its_inner_pid() {
    let Some(_bpf) = bpf() else { return };
    let Some(node) = tool("node") else { return };
    let script = "const keep = []; function keepBuffers() { for (let i = 0; i < 50; i++) keep.push(Buffer.alloc(40000)); } \
                  process.on('SIGUSR2', () => { keepBuffers(); console.log('DONE'); }); setInterval(() => {}, 1000); console.log('READY');";
    // A /tmp of its own: no other process sees the map.
    let words = "mount -t tmpfs none /tmp && cd /tmp && exec \"$0\" --perf-basic-prof --interpreted-frames-native-stack -e \"$1\"";
    let unshare = Process::start(apart().args(["sh", "-c", words]).arg(node).arg(script));
    assert!(unshare.out.wait_for(LIMIT, |line| line == "READY").is_some(), "{} {}", unshare.out, unshare.err);
    let pid = child_of(&unshare);
    assert!(std::path::Path::new(&format!("/proc/{pid}/root/tmp/perf-1.map")).exists());
    assert!(!std::path::Path::new("/tmp/perf-1.map").exists(), "the machine has a map of that name, so the test would prove nothing");
    let recording = Recording::attach(&[pid]);
    signal(pid, Signal::USR2);
    assert!(unshare.out.wait_for(LIMIT, |line| line == "DONE").is_some(), "{} {}", unshare.out, unshare.err);
    let report = recording.stop();
    let of_buffers = |stack: &&crate::support::report::Stack| {
        stack.frames.iter().any(|frame| frame.function.as_deref().is_some_and(|name| name.contains("keepBuffers")))
    };
    let held: u64 = report.stacks.iter().filter(of_buffers).map(|stack| stack.totals.inuse_bytes).sum();
    assert!(held >= 50 * 40_000, "{held} bytes by keepBuffers");
}
