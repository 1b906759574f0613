//! Unusual targets: thousands of mappings and threads, stopped, traced and uninterruptible processes, reused pids, replaced libraries,
//! sandboxes.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::process::Process as TargetProcess;
use fragprof::units::Pid;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::build::{LIB_DIR, Link, program};
use crate::support::process::{run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::report::Since;
use crate::support::{LIMIT, bpf, serial};

fn assert_exact(command: &mut Command) {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(command);
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_target_with_twenty_thousand_mappings_is_recorded_to_the_byte() {
    assert_exact(Command::new(program("many_mappings", Link::Dynamic)).arg("20000"));
}

#[test]
fn a_target_with_a_thousand_threads_is_recorded_to_the_byte() {
    let _alone = serial();
    assert_exact(Command::new(program("many_threads", Link::Dynamic)).arg("1000"));
}

#[test]
#[ignore = "needs room for ten thousand threads: make faults"]
fn a_target_with_ten_thousand_threads_is_recorded_to_the_byte() {
    let _alone = serial();
    assert_exact(Command::new(program("many_threads", Link::Dynamic)).arg("10000"));
}

#[test]
fn a_target_in_a_sandbox_that_kills_is_recorded_unharmed() {
    assert_exact(&mut Command::new(program("sandboxed", Link::Dynamic)));
}

#[test]
fn a_stopped_target_is_attached_to_and_counted_when_it_is_resumed() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut Command::new(program("realloc_forms", Link::Dynamic)));
    target.process.signal(Signal::STOP);
    let census = run(fragprof().args(["census", &target.pid().to_string(), "--json"]));
    assert!(census.status.success(), "{}", census.err);
    let recording = Recording::attach(&[target.pid()]);
    target.process.signal(Signal::CONT);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

/// The letter of `State:` in `/proc/PID/status`.
fn state(pid: u32) -> char {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("State:")).unwrap().trim().chars().next().unwrap()
}

#[test]
fn an_uninterruptible_target_is_attached_to_and_counted_when_it_continues() {
    if bpf().is_none() {
        return;
    }
    let mut rendezvous = Rendezvous::new();
    let mut command = Command::new(program("vfork_parent", Link::Dynamic));
    let process = crate::support::process::Process::start(command.env("TRUTH_SOCKET", rendezvous.path()));
    rendezvous.expect("ready", &process);
    wait_until("the parent waits for its child", || state(process.pid()) == 'D');
    let census = run(fragprof().args(["census", &process.pid().to_string(), "--json"]));
    assert!(census.status.success(), "{}", census.err);
    let recording = Recording::attach(&[process.pid()]);
    assert_eq!(state(process.pid()), 'D');
    rendezvous.go();
    let truth = rendezvous.expect("done", &process);
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_target_under_a_debugger_is_recorded_when_it_is_resumed() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut Command::new(program("realloc_forms", Link::Dynamic)));
    let pid = target.pid() as libc::pid_t;
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: ptrace of a child of this process, from the thread that also detaches from it.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, none) }, 0);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, none, none) }, 0);
    wait_until("the debugger's stop", || state(target.pid()) == 't');
    let recording = Recording::attach(&[target.pid()]);
    // SAFETY: as above. The stop has to be waited for before a detach is allowed.
    let detached = unsafe {
        let mut status = 0;
        libc::waitpid(pid, &mut status, libc::__WALL);
        libc::ptrace(libc::PTRACE_DETACH, pid, none, none)
    };
    assert_eq!(detached, 0);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_library_that_was_replaced_on_disk_is_probed_as_it_is_mapped() {
    if bpf().is_none() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let library = dir.path().join("libjemalloc.so.2");
    std::fs::copy(Path::new(LIB_DIR).join("libjemalloc.so.2"), &library).unwrap();
    let mut target = Target::start(Command::new(program("realloc_forms", Link::Dynamic)).env("LD_PRELOAD", &library));
    // As in an upgrade, another file gets the name; its offsets differ from those of the mapped one.
    let other = dir.path().join("new");
    std::fs::copy(Path::new(LIB_DIR).join("libmimalloc.so.2"), &other).unwrap();
    std::fs::rename(&other, &library).unwrap();
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

/// Starts a process with this pid, which must be free, and returns a descriptor of it.
fn start_with_pid(pid: u32) -> std::io::Result<OwnedFd> {
    let wanted = [pid as libc::pid_t];
    let mut fd: i32 = -1;
    // SAFETY: all zero is a valid clone_args.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = libc::CLONE_PIDFD as u64;
    args.pidfd = &raw mut fd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    args.set_tid = wanted.as_ptr() as u64;
    args.set_tid_size = 1;
    // SAFETY: without CLONE_VM it forks; the child makes only system calls.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match child {
        -1 => Err(std::io::Error::last_os_error()),
        // SAFETY: system calls only; the child waits to be killed.
        0 => unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        },
        // SAFETY: the kernel has just made this descriptor for us.
        _ => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

#[test]
fn a_process_that_takes_over_a_pid_is_not_the_one_that_was_recorded() {
    if bpf().is_none() {
        return;
    }
    let mut target = Target::start(&mut Command::new(program("realloc_forms", Link::Dynamic)));
    let pid = target.pid();
    let seen = TargetProcess::open(Pid(pid)).unwrap();
    let mut recording = Recording::attach(&[pid]);
    // The recorder is stopped so that it does not notice the end before the pid has another owner.
    recording.process.signal(Signal::STOP);
    target.process.signal(Signal::KILL);
    target.process.wait(LIMIT);
    let Ok(successor) = start_with_pid(pid) else {
        println!("skipped: pids cannot be chosen here");
        recording.process.signal(Signal::CONT);
        return;
    };
    assert!(!seen.is_alive(), "the successor was taken for the process that was opened");
    recording.process.signal(Signal::CONT);
    // Its only target has ended, so it ends too, with the results so far.
    let begun = Instant::now();
    let status = recording.wait(LIMIT);
    assert!(status.success(), "{status}: {}", recording.process.err);
    assert!(begun.elapsed() < Duration::from_secs(30));
    // SAFETY: the descriptor is owned here; this kills and reaps the successor.
    unsafe {
        libc::syscall(libc::SYS_pidfd_send_signal, successor.as_raw_fd(), libc::SIGKILL, 0, 0);
        libc::waitpid(pid as libc::pid_t, std::ptr::null_mut(), 0);
    }
}
