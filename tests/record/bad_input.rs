//! Responses to unusable input: a message that names the input and says what to do, and an exit status for scripts.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::{Program, place, target_command};
use crate::support::build::{Link, go_program, program, script, tool};
use crate::support::process::{Done, Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::support::{LIMIT, bpf};

/// Exit statuses of `src/error.rs` as literals, because scripts depend on the numbers.
const FAILURE: i32 = 1;
const USAGE: i32 = 2;
const TARGET: i32 = 3;
const UNSUPPORTED: i32 = 4;

/// Fails unless the command ended with `status`, printed each of `words` (in any case) on standard error, and did not panic.
#[track_caller]
fn assert_refused(done: &Done, status: i32, words: &[&str]) {
    let said = done.err.to_lowercase();
    assert_eq!(done.status.code(), Some(status), "wrong exit status; output:\n{}\n{}", done.out, done.err);
    assert!(!said.contains("panicked"), "it panicked:\n{}", done.err);
    for word in words {
        assert!(said.contains(&word.to_lowercase()), "{word:?} is missing in:\n{}", done.err);
    }
}

/// `fragprof record -p PID`, for one second.
fn record(pid: u32) -> Done {
    record_by(fragprof(), pid)
}

fn record_by(mut command: Command, pid: u32) -> Done {
    let dir = TempDir::new().unwrap();
    // Any user may write there.
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let pid = pid.to_string();
    run(command.args(["record", "-p", &pid, "--duration", "1s", "-o"]).arg(dir.path().join("out.pb.gz")))
}

/// A copy of fragprof that any user may run, whatever the modes of the directories above the build.
fn fragprof_for_anyone(dir: &TempDir) -> PathBuf {
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("fragprof");
    // By another process: a child that some other test starts meanwhile would have the copy open for writing.
    assert!(run(Command::new("cp").arg(env!("CARGO_BIN_EXE_fragprof")).arg(&copy)).status.success());
    copy
}

fn idle_target() -> Target {
    Target::start(&mut target_command(Program::new("realloc_forms"), place::ATTACHED_TO_GLIBC))
}

#[test]
fn an_unused_pid_is_refused() {
    // Above the kernel's limit of pids (2^22), so that it is never used.
    assert_refused(&record(4_194_400), TARGET, &["4194400", "no"]);
}

#[test]
fn a_process_that_has_ended_is_refused() {
    let mut ended = Process::start(&mut Command::new("true"));
    let pid = ended.pid();
    ended.wait(LIMIT);
    assert_refused(&record(pid), TARGET, &[&pid.to_string()]);
}

#[test]
fn a_zombie_is_refused() {
    let zombie = Process::start(&mut Command::new("true"));
    zombie.wait_until_zombie();
    assert_refused(&record(zombie.pid()), TARGET, &[&zombie.pid().to_string(), "zombie"]);
}

#[test]
fn a_kernel_thread_is_refused() {
    // kthreadd is pid 2 where the initial pid namespace is seen.
    if fs::read_to_string("/proc/2/comm").ok().as_deref() != Some("kthreadd\n") {
        return crate::support::skip("no kernel thread is visible here").unwrap_or_default();
    }
    assert_refused(&record(2), TARGET, &["2", "kernel thread"]);
}

#[test]
fn a_program_without_a_c_library_is_refused() {
    if bpf().is_none() || tool("go").is_none() {
        return;
    }
    let go = Process::start_piped(&mut Command::new(go_program()));
    assert!(go.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", go.err);
    assert_refused(&record(go.pid()), TARGET, &[&go.pid().to_string(), "allocator"]);
}

#[test]
fn another_users_process_is_refused_without_permission() {
    let Some(setpriv) = tool("setpriv") else { return };
    let dir = TempDir::new().unwrap();
    let target = idle_target();
    let mut command = Command::new(setpriv);
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--"]);
    command.arg(fragprof_for_anyone(&dir));
    assert_refused(&record_by(command, target.pid()), UNSUPPORTED, &["permi"]);
}

#[test]
fn a_user_without_permission_for_bpf_is_told_which_capability_is_missing() {
    let Some(setpriv) = tool("setpriv") else { return };
    let target = idle_target();
    let mut command = Command::new(setpriv);
    command.args(["--bounding-set=-bpf,-perfmon,-sys_admin", "--inh-caps=-bpf,-perfmon,-sys_admin", "--"]);
    command.arg(env!("CARGO_BIN_EXE_fragprof"));
    assert_refused(&record_by(command, target.pid()), UNSUPPORTED, &["CAP_BPF"]);
}

#[test]
fn a_process_that_ends_during_the_attach_does_not_crash_the_recorder() {
    if bpf().is_none() {
        return;
    }
    for round in 0..12 {
        let mut target = idle_target();
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("out.pb.gz");
        let pid = target.pid().to_string();
        let mut recorder = Process::start(fragprof().args(["record", "-p", &pid, "--duration", "60s", "-o"]).arg(&out));
        // At a different moment of the attach each time: from before it until well into it.
        std::thread::park_timeout(std::time::Duration::from_millis(round * 15));
        target.process.signal(rustix::process::Signal::KILL);
        target.process.wait(LIMIT);
        let status = recorder.wait(LIMIT);
        let said = recorder.err.all();
        // Either something was recorded, and there is a profile, or nothing was, and there is a message.
        match status.code() {
            Some(0) => assert!(out.exists(), "round {round}: success without a profile:\n{said}"),
            Some(TARGET) => assert!(said.contains(&pid), "round {round}: the message does not name the process:\n{said}"),
            other => panic!("round {round}: ended with {other:?}:\n{said}"),
        }
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_command_that_does_not_exist_is_refused_by_name() {
    let done = run(fragprof().args(["record", "--duration", "1s", "-o", "/dev/null", "--", "/no/such/program"]));
    assert_refused(&done, TARGET, &["/no/such/program"]);
}

#[test]
fn a_record_without_a_target_is_a_usage_error() {
    assert_refused(&run(fragprof().arg("record")), USAGE, &["-p"]);
}

#[test]
fn an_invalid_duration_is_a_usage_error() {
    for bad in ["", "0s", "-1s", "10 parsecs", "1e999s", "99999999999999999999s"] {
        let done = run(fragprof().args(["record", "-p", "1", &format!("--duration={bad}"), "-o", "/dev/null"]));
        assert_refused(&done, USAGE, &["duration"]);
    }
}

#[test]
fn a_full_disk_for_the_profile_is_reported() {
    if bpf().is_none() {
        return;
    }
    let target = idle_target();
    let done = run(fragprof().args(["record", "-p", &target.pid().to_string(), "--duration", "1s", "-o", "/dev/full"]));
    assert_refused(&done, FAILURE, &["/dev/full", "no space"]);
}

#[test]
fn an_output_file_in_a_missing_directory_is_reported_before_the_recording() {
    let target = idle_target();
    let pid = target.pid().to_string();
    // If it recorded first and failed to write afterwards, `run` would time out.
    let done = run(fragprof().args(["record", "-p", &pid, "--duration", "300s", "-o", "/no/such/directory/out.pb.gz"]));
    assert!(matches!(done.status.code(), Some(FAILURE | USAGE)), "{}", done.err);
    assert_refused(&done, done.status.code().unwrap(), &["/no/such/directory"]);
}

/// Checks the responses of `report`, `flamegraph`, `export` and `diff` to a file with `content`.
fn assert_every_reader_refuses(content: &[u8], words: &[&str]) {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("bad.pb.gz");
    fs::write(&file, content).unwrap();
    let path = file.to_str().unwrap();
    let out = dir.path().join("out");
    let out = out.to_str().unwrap();
    let readers: [&[&str]; 5] = [
        &["report", path],
        &["report", path, "--json"],
        &["flamegraph", path, "--by", "live", "-o", out],
        &["export", path, "--format", "folded"],
        &["diff", path, path],
    ];
    for args in readers {
        let done = run(fragprof().args(args));
        assert_refused(&done, USAGE, words);
    }
}

#[test]
fn a_missing_profile_is_named_in_the_error() {
    assert_refused(&run(fragprof().args(["report", "/no/such/file.pb.gz"])), USAGE, &["/no/such/file.pb.gz"]);
}

#[test]
fn a_foreign_file_is_refused_as_a_profile() {
    assert_every_reader_refuses(b"#!/bin/sh\necho this is no profile\n", &["bad.pb.gz"]);
    assert_every_reader_refuses(b"", &["bad.pb.gz"]);
}

#[test]
fn a_gzip_of_something_else_is_refused_as_a_profile() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gzip.write_all(&[0xff; 5000]).unwrap();
    assert_every_reader_refuses(&gzip.finish().unwrap(), &["bad.pb.gz"]);
}

#[test]
fn a_truncated_profile_is_refused_at_every_length() {
    if bpf().is_none() {
        return;
    }
    let mut target = idle_target();
    let mut recording = Recording::attach(&[target.pid()]);
    target.go_to("done");
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success());
    let whole = fs::read(recording.file()).unwrap();
    assert!(whole.len() > 100);
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("cut.pb.gz");
    for kept in [1, 2, 10, 18, whole.len() / 4, whole.len() / 2, whole.len() - 9, whole.len() - 1] {
        fs::write(&file, &whole[..kept]).unwrap();
        assert_refused(&run(fragprof().arg("report").arg(&file)), USAGE, &["cut.pb.gz"]);
    }
}

#[test]
fn a_target_is_recorded_where_tracefs_is_absent() {
    let (Some(_bpf), Some(unshare)) = (bpf(), tool("unshare")) else { return };
    let mut target = Target::start(&mut target_command(Program::new("entry_points"), place::ATTACHED_TO_GLIBC));
    let mut command = Command::new(unshare);
    // In a mount namespace of its own, so that other processes keep it.
    let hide = "umount -l /sys/kernel/tracing 2>/dev/null; umount -l /sys/kernel/debug 2>/dev/null; \
                test ! -e /sys/kernel/tracing/events && exec \"$0\" \"$@\"";
    command.args(["--mount", "--propagation", "private", "sh", "-c", hide, env!("CARGO_BIN_EXE_fragprof")]);
    let recording = Recording::attach_by(command, &[target.pid()], &[]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
}

#[test]
fn a_directory_cannot_be_launched() {
    let done = run(fragprof().args(["record", "--duration", "1s", "-o", "/dev/null", "--", "/"]));
    assert_refused(&done, TARGET, &["/"]);
}

#[test]
fn the_sources_of_the_test_programs_exist() {
    for name in ["without_libc.go", "DirectBuffers.java", "holds_memory.py"] {
        assert!(Path::new(&script(name)).is_file(), "{name}");
    }
    assert!(program("realloc_forms", Link::Dynamic).is_file());
}
