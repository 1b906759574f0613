//! Every refusal, by its name, with the target untouched.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::Signal;

use super::{Target, build, refused, source, states, trim};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::fragprof;

/// Asserts that a target is refused by this name, and is as it was.
fn assert_refused(target: &Target, name: &str) {
    let before = target.resident_bytes();
    let report = trim(target.pid(), &["--yes", "--max-stall", "10s"]);
    assert_eq!(refused(&report), name, "{report}");
    assert!(report["given_back_bytes"].is_null() && report["ending"].is_null(), "{report}");
    assert!(report["refused"]["reason"].as_str().unwrap().len() > 10, "{report}");
    target.assert_free();
    assert!(target.resident_bytes().abs_diff(before) < 4 << 20, "{name}: nothing is given back");
}

#[test]
fn what_is_unsafe_is_refused_by_name() {
    for (state, name) in [
        ("strict", "strict_seccomp"),
        ("filter", "seccomp_filter"),
        ("busy", "no_parked_thread"),
        ("small_stack", "small_stack"),
        ("unguarded", "unguarded_stack"),
        ("fibre", "foreign_stack"),
        ("alternate_stack", "foreign_stack"),
        ("in_allocator", "in_allocator"),
        ("interrupted_malloc", "in_allocator"),
        ("deep", "deep_stack"),
        ("sleeps", "sleeps_long"),
        ("setuid", "setuid"),
    ] {
        // The least that a thread may have on arm64 is enough for a call (PTHREAD_STACK_MIN).
        if state == "small_stack" && cfg!(target_arch = "aarch64") {
            continue;
        }
        println!("{state}");
        assert_refused(&Target::in_state(state, 16, 0), name);
    }
}

#[test]
fn a_word_that_an_earlier_call_left_is_no_obstacle() {
    let target = Target::in_state("old_word", 16, 0);
    let report = trim(target.pid(), &["--yes"]);
    assert_eq!((refused(&report), report["ending"].as_str()), ("", Some("returned")), "{report}");
    target.end();
}

#[test]
fn a_filter_that_allows_what_is_needed_is_no_obstacle() {
    let target = Target::in_state("other_filter", 16, 0);
    let report = trim(target.pid(), &["--yes"]);
    assert_eq!((refused(&report), report["ending"].as_str()), ("", Some("returned")), "{report}");
    target.end();
}

#[test]
fn a_process_that_waits_for_a_vfork_child_and_the_child_are_refused() {
    let parent = Target::in_state("vfork", 16, 0);
    assert_refused(&parent, "vfork");
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", parent.pid())).unwrap();
    let child: u32 = children.split_whitespace().next().unwrap().parse().unwrap();
    assert_eq!(refused(&trim(child, &["--yes"])), "shared_memory");
    parent.end();
}

#[test]
fn a_process_that_is_stopped_or_traced_is_refused() {
    let target = Target::in_state("plain", 16, 0);
    target.process.signal(Signal::STOP);
    let state = || std::fs::read_to_string(format!("/proc/{}/stat", target.pid())).unwrap().contains(") T ");
    wait_until("the target is stopped", state);
    let report = trim(target.pid(), &["--yes"]);
    assert_eq!(refused(&report), "stopped", "{report}");
    target.process.signal(Signal::CONT);
    wait_until("the target goes on", || !state());
    let Some(strace) = tool("strace") else { return };
    let mut tracer = Process::start(Command::new(strace).args(["-o", "/dev/null", "-p", &target.pid().to_string()]));
    let traced = || !std::fs::read_to_string(format!("/proc/{}/status", target.pid())).unwrap().contains("TracerPid:\t0");
    wait_until("the target is traced", traced);
    assert_eq!(refused(&trim(target.pid(), &["--yes"])), "traced");
    tracer.signal(Signal::INT);
    tracer.wait(crate::support::LIMIT);
    assert_eq!(refused(&trim(target.pid(), &["--yes"])), "");
    target.end();
}

#[test]
fn a_frozen_process_is_refused() {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    let unified = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).find(|mount| mount[2] == "cgroup2");
    let group = unified.map(|mount| std::path::Path::new(mount[1]).join(format!("fragprof-trim-{}", std::process::id())));
    let Some(group) = group.filter(|group| std::fs::create_dir(group).is_ok()) else {
        return crate::support::skip("no cgroup of version 2 can be made").unwrap_or(());
    };
    let target = Target::in_state("plain", 16, 0);
    let write = |name: &str, text: &str| std::fs::write(group.join(name), text).unwrap();
    write("cgroup.procs", &target.pid().to_string());
    write("cgroup.freeze", "1");
    wait_until("the target is frozen", || std::fs::read_to_string(group.join("cgroup.events")).unwrap().contains("frozen 1"));
    let report = trim(target.pid(), &["--yes"]);
    write("cgroup.freeze", "0");
    assert_eq!(refused(&report), "frozen", "{report}");
    assert_eq!(refused(&trim(target.pid(), &["--yes"])), "");
    target.end();
    let _ = std::fs::remove_dir(&group);
}

#[test]
fn programs_without_the_function_are_refused() {
    let stripped = build("states.c", "stripped", &["-pthread", "-static", "-s"]);
    let target = Target::start(Command::new(stripped).args(["plain", "16"]));
    let report = trim(target.pid(), &["--yes"]);
    assert!(matches!(refused(&report), "function_missing" | "no_heap"), "{report}");
    target.assert_free();
}

#[test]
fn a_program_on_musl_is_refused() {
    let Some(compiler) = tool("musl-gcc") else { return };
    let out = crate::support::build::output_dir().join("freed-musl");
    let built = Command::new(compiler).args(["-O1", "-w", "-o"]).arg(&out).arg(source("musl.c")).status();
    assert!(built.unwrap().success());
    assert_refused(&Target::start(&mut Command::new(out)), "no_call");
}

#[test]
fn an_unknown_allocator_in_front_of_the_c_librarys_is_refused() {
    let front = build("front.c", "front", &["-shared", "-fPIC"]);
    let target = Target::start(Command::new(states()).args(["plain", "16"]).env("LD_PRELOAD", front));
    assert_refused(&target, "allocator_in_front");
}

#[test]
fn a_stall_above_the_limit_and_nothing_to_give_back_are_refused() {
    let target = Target::in_state("plain", 64, 0);
    let report = trim(target.pid(), &["--yes", "--max-stall", "1ms"]);
    assert_eq!(refused(&report), "stall_too_long", "{report}");
    assert!(trim(target.pid(), &["--yes", "--max-stall", "10s"])["given_back_bytes"].as_u64().unwrap() > 32 << 20);
    assert_eq!(refused(&trim(target.pid(), &["--yes"])), "nothing");
}

#[test]
fn another_user_without_the_capability_is_refused_and_the_owner_is_not() {
    let target = Target::in_state("plain", 16, 0);
    let done = run(fragprof().args(["trim", &target.pid().to_string(), "--yes", "--json"]).uid(65534).gid(65534));
    assert!(!done.status.success() && done.err.contains("no permission"), "{} {}", done.out, done.err);
    target.assert_free();
    // Yama may forbid tracing to owners, too.
    let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if matches!(yama.trim(), "" | "0") {
        let own = Target::start(Command::new(states()).args(["plain", "16"]).uid(65534).gid(65534));
        let done = run(fragprof().args(["trim", &own.pid().to_string(), "--yes", "--json"]).uid(65534).gid(65534));
        assert!(done.status.success() && done.out.contains("\"ending\": \"returned\""), "{} {}", done.out, done.err);
        own.end();
    }
}

#[test]
fn a_call_by_hand_leaves_lines_in_the_system_log_before_and_after() {
    // A system log of the test's own, in a mount namespace, for there may be none here.
    let (Some(unshare), Some(python)) = (tool("unshare"), tool("python3")) else { return };
    let target = Target::in_state("plain", 16, 0);
    let script = "import os, socket, subprocess, sys\n\
                  subprocess.check_call(['mount', '-t', 'tmpfs', 'none', '/dev'])\n\
                  log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); log.bind('/dev/log'); log.settimeout(20)\n\
                  subprocess.run(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, check=True)\n\
                  for _ in range(2): print(log.recv(4096).decode())\n";
    let mut command = Command::new(unshare);
    command.args(["--mount", "--propagation", "private"]).arg(python).args(["-c", script]).arg(fragprof().get_program());
    let done = run(command.args(["trim", &target.pid().to_string(), "--yes", "--json"]));
    if !done.status.success() && done.err.contains("mount") {
        return crate::support::skip("nothing can be mounted here").unwrap_or(());
    }
    let lines: Vec<&str> = done.out.lines().collect();
    let what = format!("malloc_trim(0) in process {}", target.pid());
    assert_eq!(lines.len(), 2, "{} {}", done.out, done.err);
    assert!(
        lines.iter().all(|line| line.starts_with("<85>fragprof[") && line.contains("audit: uid 0") && line.contains(&what)),
        "{lines:?}"
    );
    assert!(lines[0].contains("to give back") && lines[1].contains("returned, gave back"), "{lines:?}");
    target.end();
}

#[test]
fn a_process_that_has_ended_is_refused() {
    let mut target = Target::in_state("plain", 1, 0);
    drop(target.process.input());
    target.process.wait(crate::support::LIMIT);
    let done = run(fragprof().args(["trim", &target.pid().to_string(), "--yes"]));
    assert_eq!(done.status.code(), Some(3), "{}", done.err);
}
