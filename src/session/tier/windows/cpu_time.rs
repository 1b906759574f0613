//! CPU time of processes and their threads, as the kernel accounts it.

use std::collections::HashMap;
use std::path::Path;

use crate::governor::ThreadTime;
use crate::process::Process;
use crate::process::handle::read_bounded;
use crate::units::Pid;

/// Maximum number of threads whose time is read, at 5 µs each; threads beyond it are assumed to have run all the time.
const THREADS_MAX: usize = 256;
/// Maximum number of threads whose voluntary context switches are also read, at 20 µs each.
const SLEEPERS_MAX: usize = 64;
/// `/proc/PID/task/TID/status` is shorter than a page.
const STATUS_BYTES_MAX: u64 = 4096;
/// The file has three numbers.
const SCHEDSTAT_BYTES_MAX: u64 = 128;

/// Figures of a process's threads so far, by thread id (`/proc/PID/task/TID/schedstat`: ns run, ns waited for a CPU, time slices).
pub fn of_threads(process: &Process) -> HashMap<u32, ThreadTime> {
    let directory = process.directory().join("task");
    let Ok(entries) = std::fs::read_dir(&directory) else { return HashMap::new() };
    let time = |(number, entry): (usize, std::io::Result<std::fs::DirEntry>)| {
        let tid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let bytes = read_bounded(&directory.join(tid.to_string()).join("schedstat"), SCHEDSTAT_BYTES_MAX).ok()?;
        let mut numbers = std::str::from_utf8(&bytes).ok()?.split_ascii_whitespace().map(str::parse::<u64>);
        let (run_ns, wait_ns) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
        let run_s = run_ns as f64 / 1e9;
        let sleeps = (number < SLEEPERS_MAX).then(|| sleeps(&directory.join(tid.to_string()).join("status"))).flatten();
        Some((tid, ThreadTime { run_s, ready_s: run_s + wait_ns as f64 / 1e9, sleeps }))
    };
    entries.take(THREADS_MAX).enumerate().filter_map(time).collect()
}

/// How often a thread gave up its CPU voluntarily.
fn sleeps(status: &Path) -> Option<u64> {
    let bytes = read_bounded(status, STATUS_BYTES_MAX).ok()?;
    let value = std::str::from_utf8(&bytes).ok()?.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    value.trim().parse().ok()
}

/// The difference between two readings; for a thread that is only in the second, its whole figures.
pub fn since(before: &HashMap<u32, ThreadTime>, after: &HashMap<u32, ThreadTime>) -> HashMap<u32, ThreadTime> {
    let difference = |(tid, after): (&u32, &ThreadTime)| {
        let before = before.get(tid).copied().unwrap_or_default();
        let sleeps = after.sleeps.zip(before.sleeps).map(|(after, before)| after.saturating_sub(before));
        (*tid, ThreadTime { run_s: after.run_s - before.run_s, ready_s: after.ready_s - before.ready_s, sleeps })
    };
    after.iter().map(difference).collect()
}

/// CPU time of a process in nanoseconds; `None` if it has ended.
pub fn of_process_ns(pid: Pid) -> Option<u64> {
    // The CPU-time clock of a process (MAKE_PROCESS_CPUCLOCK, include/linux/posix-timers.h): ~pid << 3 | CPUCLOCK_SCHED.
    let clock = (!i32::try_from(pid.0).ok()? << 3) | 2;
    // SAFETY: plain integers, for which zeroes are values.
    let mut time: libc::timespec = unsafe { std::mem::zeroed() };
    // SAFETY: writes into a local.
    let failed = unsafe { libc::clock_gettime(clock, &raw mut time) } != 0;
    (!failed).then(|| (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64))
}
