//! Limits reached on fragprof's own side: descriptors, memory, a read-only file system, refused system calls.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::bpf::TARGETS_MAX;
use fragprof::capture::wire::Record;
use fragprof::capture::{Capture, Config, Error, Sink, Slot, TargetFlags};
use fragprof::units::Pid;
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use tempfile::TempDir;

use super::Churn;
use crate::support::build::tool;
use crate::support::process::{Done, run};
use crate::support::recording::fragprof;
use crate::support::{bpf, serial, skip};

/// A short recording of `pid` by `command`, into a directory of its own.
fn record(mut command: Command, pid: u32) -> (Done, bool) {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.pb.gz");
    let done = run(command.args(["record", "-d", "100ms", "-p", &pid.to_string(), "-o"]).arg(&out));
    let whole = out.exists() && run(fragprof().arg("report").arg(&out)).status.success();
    (done, whole)
}

/// Checks that it worked, or printed the reason and the remedy; it must neither panic nor be killed by a signal.
fn assert_worked_or_said_why(done: &Done, whole: bool, what: &str) {
    assert!(!done.err.contains("panicked"), "{what}:\n{}", done.err);
    match done.status.code() {
        Some(0) => assert!(whole, "{what}: success without a complete profile:\n{}", done.err),
        Some(_) => assert!(done.err.lines().any(|line| line.starts_with("fragprof: ")), "{what}: no reason given:\n{}", done.err),
        None => panic!("{what}: ended with {}:\n{}", done.status, done.err),
    }
}

#[test]
fn too_few_descriptors_are_reported_whatever_their_number() {
    if bpf().is_none() {
        return;
    }
    let Some(prlimit) = tool("prlimit") else { return };
    let mut churn = Churn::start();
    let mut worked = 0;
    for descriptors in [4, 7, 10, 14, 18, 22, 26, 30, 36, 44, 56, 256] {
        let mut command = Command::new(&prlimit);
        command.arg(format!("--nofile={descriptors}:{descriptors}")).arg(env!("CARGO_BIN_EXE_fragprof"));
        let (done, whole) = record(command, churn.pid());
        assert_worked_or_said_why(&done, whole, &format!("{descriptors} descriptors"));
        worked += usize::from(whole);
        churn.assert_alive();
        churn.assert_unprobed();
    }
    assert!(worked > 0, "256 descriptors are enough");
}

#[test]
fn a_memory_limit_is_reached_without_harm_to_the_target() {
    if bpf().is_none() {
        return;
    }
    let Some(prlimit) = tool("prlimit") else { return };
    let mut churn = Churn::start();
    let mut worked = 0;
    for mib in [64, 96, 128, 160, 224, 320, 4096] {
        let mut command = Command::new(&prlimit);
        command.arg(format!("--as={}", mib << 20)).arg("--core=0").arg(env!("CARGO_BIN_EXE_fragprof"));
        let (done, whole) = record(command, churn.pid());
        // A failed allocation aborts, as everywhere in Rust; it must not affect any other process.
        assert!(!done.err.contains("panicked"), "{mib} MiB:\n{}", done.err);
        worked += usize::from(done.status.success() && whole);
        churn.assert_alive();
        churn.assert_unprobed();
    }
    assert!(worked > 0, "4 GiB are enough");
}

/// A memory cgroup of its own, removed when dropped.
struct MemoryGroup {
    folder: PathBuf,
    limit: &'static str,
}

impl MemoryGroup {
    /// In the hierarchy that has the memory controller; skipped if this machine does not allow creating one.
    fn make() -> Option<Self> {
        for (parent, limit) in [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")] {
            let folder = Path::new(parent).join(format!("fragprof-test-{}", std::process::id()));
            if !Path::new(parent).join("cgroup.procs").exists() || std::fs::create_dir(&folder).is_err() {
                continue;
            }
            let group = Self { folder, limit };
            if group.folder.join(limit).exists() {
                return Some(group);
            }
        }
        skip("no memory cgroup can be created here")
    }

    fn limit(&self, mib: u64) {
        std::fs::write(self.folder.join(self.limit), (mib << 20).to_string()).unwrap();
    }

    /// fragprof inside the cgroup.
    fn fragprof(&self) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#]).arg(&self.folder).arg(env!("CARGO_BIN_EXE_fragprof"));
        command
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Charges that remain are moved to the parent by the kernel.
        let _ = std::fs::remove_dir(&self.folder);
    }
}

#[test]
fn a_memory_limit_of_its_container_is_reached_without_harm_to_the_target() {
    if bpf().is_none() {
        return;
    }
    let Some(group) = MemoryGroup::make() else { return };
    let mut churn = Churn::start();
    let mut worked = 0;
    for mib in [4, 12, 24, 40, 64, 96, 1024] {
        group.limit(mib);
        let (done, whole) = record(group.fragprof(), churn.pid());
        // The kernel kills the process that needs more, or refuses it memory; either way no other process is affected.
        assert!(!done.err.contains("panicked"), "{mib} MiB:\n{}", done.err);
        worked += usize::from(done.status.success() && whole);
        churn.assert_alive();
        churn.assert_unprobed();
    }
    assert!(worked > 0, "1 GiB is enough");
}

#[test]
fn a_read_only_file_system_is_reported_before_the_recording() {
    if bpf().is_none() {
        return;
    }
    let Some(unshare) = tool("unshare") else { return };
    let mut churn = Churn::start();
    let dir = TempDir::new().unwrap();
    let script = r#"mount -t tmpfs -o ro tmpfs "$1" && exec "$2" record -d 300s -p "$3" -o "$1/out.pb.gz""#;
    let done = run(Command::new(unshare)
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(dir.path())
        .arg(env!("CARGO_BIN_EXE_fragprof"))
        .arg(churn.pid().to_string()));
    assert_ne!(done.status.code(), Some(0));
    assert!(done.err.to_lowercase().contains("read-only"), "{}", done.err);
    churn.assert_alive();
    churn.assert_unprobed();
}

/// Installs, in the child, a seccomp filter that refuses one system call with `errno`.
fn refusing(call: libc::c_long, errno: i32) -> Command {
    let mut command = fragprof();
    let install = move || {
        let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
        let mut filter = [
            statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
            libc::sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt: 0, jf: 1, k: call as u32 },
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32),
            statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        // SAFETY: prctl with the arguments that its manual gives; the program lives until the call returns.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) != 0
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: only system calls between fork and exec.
    unsafe { command.pre_exec(install) };
    command
}

#[test]
fn a_system_call_refused_by_a_sandbox_does_not_crash_it() {
    if bpf().is_none() {
        return;
    }
    let mut churn = Churn::start();
    let calls = [
        ("bpf", libc::SYS_bpf),
        ("perf_event_open", libc::SYS_perf_event_open),
        ("process_vm_readv", libc::SYS_process_vm_readv),
        ("pidfd_open", libc::SYS_pidfd_open),
        ("clone3", libc::SYS_clone3),
        ("statx", libc::SYS_statx),
        ("sched_getaffinity", libc::SYS_sched_getaffinity),
        ("prlimit64", libc::SYS_prlimit64),
    ];
    for (name, call) in calls {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let (done, whole) = record(refusing(call, errno), churn.pid());
            assert_worked_or_said_why(&done, whole, &format!("{name} refused with {errno}"));
            if name == "bpf" {
                assert_ne!(done.status.code(), Some(0));
            }
        }
        churn.assert_alive();
        churn.assert_unprobed();
    }
}

/// The map with the targets of each process.
const SLOTS: &str = "slots_of_tgid";
/// A thread group id that no process has: above the maximum of the kernel (PID_MAX_LIMIT, include/linux/threads.h).
const NO_PROCESS: u32 = 1 << 23;

/// The maps of that name on this machine.
fn slot_maps() -> Vec<u32> {
    MapInfoIter::default().filter(|info| info.name.to_string_lossy() == SLOTS).map(|info| info.id).collect()
}

struct NoSink;

impl Sink for NoSink {
    fn record(&mut self, _: &Record<'_>) {}
    fn pause(&mut self) {}
    fn finish(&mut self) {}
}

#[test]
fn a_slot_goes_back_when_the_kernel_refuses_its_entry() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let before = slot_maps();
    let capture = Capture::load(&Config::default()).unwrap();
    let ring = capture.open_ring(1 << 16, Box::new(NoSink)).unwrap();
    // Other tests may load programs at the same time: only this capture's map has this process.
    let own = Pid(std::process::id());
    let slot = capture.add_target(own, &ring, TargetFlags(0)).unwrap();
    let mut maps = slot_maps().into_iter().filter(|id| !before.contains(id)).filter_map(|id| MapHandle::from_map_id(id).ok());
    let map = maps.find(|map| map.lookup(&own.0.to_ne_bytes(), MapFlags::ANY).ok().flatten().is_some()).unwrap();
    capture.remove_target(own, slot).unwrap();

    // Full: the kernel refuses the entry of a further process.
    let row = vec![0; map.value_size() as usize];
    let fill: Vec<[u8; 4]> = (0..map.max_entries()).map(|nth| (NO_PROCESS + nth).to_ne_bytes()).collect();
    for key in &fill {
        map.update(key, &row, MapFlags::ANY).unwrap();
    }
    for _ in 0..2 * TARGETS_MAX {
        let refused = capture.add_target(own, &ring, TargetFlags(0)).unwrap_err();
        assert!(matches!(refused, Error::Map { map: SLOTS, .. }), "{refused}");
    }
    // With room again, every slot is there.
    for key in &fill {
        map.delete(key).unwrap();
    }
    let slots: Vec<Slot> = (0..TARGETS_MAX).map(|nth| capture.add_target(Pid(NO_PROCESS + nth), &ring, TargetFlags(0)).unwrap()).collect();
    let full = capture.add_target(own, &ring, TargetFlags(0)).unwrap_err();
    assert!(matches!(full, Error::TooManyTargets { .. }), "{full}");
    for (nth, slot) in (0..).zip(slots) {
        capture.remove_target(Pid(NO_PROCESS + nth), slot).unwrap();
    }
}
