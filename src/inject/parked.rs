//! Threads that wait in a system call, by how little an interruption changes for them. Pure but for [`of_process`] and what it asks.
//!
//! A stop ends the system call for a moment. The kernel restarts most calls as they were; the frames of an injected call restart them by
//! hand, because `rt_sigreturn` clears the state from which the kernel would. What cannot be restarted by hand is a wait with a relative
//! timeout, which would begin anew: such a wait is left to end first.

use std::time::Duration;

use rustix::net::sockopt;

use super::status::ThreadStatus;
use crate::process::Process;
use crate::process::handle::{Stat, read_bounded};

/// Threads examined of a process.
pub const THREADS_MAX: usize = 65_536;
/// Waits that each thread is taken to have made beside its own: a thread that has just begun has not yet shown that it rarely waits, and may be
/// one that soon ends.
const WAITS_BEFORE: f64 = 10.0;
/// The resolution of ages: a clock tick.
const AGE_MIN: Duration = Duration::from_millis(10);
/// Bytes of `/proc/PID/task/TID/syscall`: ten numbers.
const LINE_BYTES_MAX: u64 = 512;

/// Commands of futex(2) without their flags (include/uapi/linux/futex.h).
const FUTEX_COMMAND: u64 = 0x7f;
const FUTEX_WAIT: u64 = 0;
const FUTEX_WAIT_BITSET: u64 = 9;
/// `CLONE_VFORK` (include/uapi/linux/sched.h).
const CLONE_VFORK: u64 = 0x4000;

/// How well an interruption of a system call is borne, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Rank {
    /// A futex wait without a timeout: it is entered again.
    WaitsForEver,
    /// A futex wait until a moment: it is entered again with the same moment.
    WaitsUntil,
    /// A call that the kernel restarts after a signal whose handler asks for it, and after a stop.
    Restarts,
    /// A wait with a relative timeout: it is left to end.
    WaitsFor,
    /// It returns EINTR after any stop; also a read of a socket with a receive timeout.
    Interrupted,
}

/// A system call as a thread waits in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SystemCall {
    /// Its number.
    pub number: i64,
    /// Its arguments.
    pub arguments: [u64; 6],
}

impl SystemCall {
    /// How well an interruption is borne; `None` for calls that are not interrupted.
    #[must_use]
    pub fn rank(&self) -> Option<Rank> {
        let [_, second, third, fourth, ..] = self.arguments;
        match self.number {
            libc::SYS_futex => match (second & FUTEX_COMMAND, fourth) {
                (FUTEX_WAIT | FUTEX_WAIT_BITSET, 0) => Some(Rank::WaitsForEver),
                (FUTEX_WAIT_BITSET, _) => Some(Rank::WaitsUntil),
                (FUTEX_WAIT, _) => Some(Rank::WaitsFor),
                _ => None,
            },
            // Absolute, or for ever.
            libc::SYS_clock_nanosleep if second & libc::TIMER_ABSTIME as u64 != 0 => Some(Rank::Restarts),
            libc::SYS_clock_nanosleep | libc::SYS_nanosleep => Some(Rank::WaitsFor),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll if (third as i32) < 0 => Some(Rank::Restarts),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => Some(Rank::WaitsFor),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select | libc::SYS_pause => Some(Rank::Restarts),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => Some(Rank::Interrupted),
            // The kernel writes the remaining time of pselect6 and ppoll back, so a restart waits for the rest.
            libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_wait4
            | libc::SYS_waitid
            | libc::SYS_pselect6
            | libc::SYS_ppoll
            | libc::SYS_rt_sigsuspend => Some(Rank::Restarts),
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 | libc::SYS_rt_sigtimedwait => {
                let _ = third;
                Some(Rank::Interrupted)
            }
            _ => None,
        }
    }

    /// The descriptor that it waits for, of the calls that a receive timeout of a socket ends (`SO_RCVTIMEO`; net/core/sock.c,
    /// `sock_intr_errno`: with one they return EINTR after any stop).
    #[must_use]
    pub fn receives_from(&self) -> Option<i32> {
        let receives = [libc::SYS_read, libc::SYS_readv, libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_accept, libc::SYS_accept4];
        receives.contains(&self.number).then_some(self.arguments[0] as i32)
    }

    /// Whether it waits for a child that runs in this memory.
    #[must_use]
    pub fn is_vfork(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if self.number == libc::SYS_vfork {
            return true;
        }
        // What clone3 was asked for is in memory; a thread stays in it only for vfork.
        self.number == libc::SYS_clone3 || (self.number == libc::SYS_clone && self.arguments[0] & CLONE_VFORK != 0)
    }

    /// Its name, for those that have a rank.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.number {
            libc::SYS_futex => "futex",
            libc::SYS_clock_nanosleep => "clock_nanosleep",
            libc::SYS_nanosleep => "nanosleep",
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => "poll",
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => "select",
            #[cfg(target_arch = "x86_64")]
            libc::SYS_pause => "pause",
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => "epoll_wait",
            libc::SYS_read => "read",
            libc::SYS_readv => "readv",
            libc::SYS_recvfrom => "recvfrom",
            libc::SYS_recvmsg => "recvmsg",
            libc::SYS_accept => "accept",
            libc::SYS_accept4 => "accept4",
            libc::SYS_wait4 => "wait4",
            libc::SYS_waitid => "waitid",
            libc::SYS_pselect6 => "pselect6",
            libc::SYS_ppoll => "ppoll",
            libc::SYS_rt_sigsuspend => "rt_sigsuspend",
            libc::SYS_epoll_pwait => "epoll_pwait",
            libc::SYS_epoll_pwait2 => "epoll_pwait2",
            libc::SYS_rt_sigtimedwait => "rt_sigtimedwait",
            _ => "?",
        }
    }
}

/// Parses `/proc/PID/task/TID/syscall`: `NUMBER ARGUMENT×6 SP PC`, all but the number in hexadecimal. `None` for a thread that runs, or
/// waits outside a system call.
#[must_use]
pub fn parse(line: &[u8]) -> Option<SystemCall> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let number: i64 = words.next()?.parse().ok().filter(|&number| number >= 0)?;
    let numbers: Vec<u64> = words.map_while(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect();
    let [arguments @ .., _stack_pointer, _program_counter] = numbers.as_slice() else { return None };
    Some(SystemCall { number, arguments: arguments.try_into().ok()? })
}

/// A thread that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parked {
    /// Its id.
    pub tid: u32,
    /// In which call.
    pub call: SystemCall,
    /// How well it bears an interruption.
    pub rank: Rank,
    /// How often it has waited so far.
    pub waits: u64,
    /// How long it has run.
    pub age: Duration,
}

impl Parked {
    /// Waits a second: a thread that rarely waits anew will not go on before it is stopped.
    fn waits_per_second(&self) -> f64 {
        (self.waits as f64 + WAITS_BEFORE) / self.age.max(AGE_MIN).as_secs_f64()
    }
}

/// What the threads of a process are in, none of which is stopped for it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Threads {
    /// Number of threads.
    pub count: usize,
    /// Those that wait and may be interrupted, the best first.
    pub parked: Vec<Parked>,
    /// One that waits for a vfork child.
    pub vfork: Option<u32>,
    /// One in which an injected call runs.
    pub calling: Option<u32>,
}

impl Threads {
    /// Sorts: by rank, and within one the thread that waits anew the least often.
    fn sort(&mut self) {
        let patience = |one: &Parked, other: &Parked| one.waits_per_second().total_cmp(&other.waits_per_second());
        self.parked.sort_by(|one, other| one.rank.cmp(&other.rank).then(patience(one, other)).then(one.tid.cmp(&other.tid)));
    }
}

/// Whether a descriptor of a process is a socket with a receive timeout, or one that cannot be asked.
fn has_receive_timeout(process: &Process, file: i32) -> bool {
    let link = std::fs::read_link(process.directory().join("fd").join(file.to_string()));
    if !link.is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"socket:")) {
        return false;
    }
    let copy = process.pidfd().and_then(|pidfd| rustix::process::pidfd_getfd(pidfd, file, rustix::process::PidfdGetfdFlags::empty()).ok());
    copy.and_then(|socket| sockopt::socket_timeout(socket, sockopt::Timeout::Recv).ok()).is_none_or(|timeout| timeout.is_some())
}

/// Reads the threads of a process; `None` if its calls may not be read.
#[must_use]
pub fn of_process(process: &Process, is_call_mask: impl Fn(u64) -> bool) -> Option<Threads> {
    let mut threads = Threads::default();
    let mut is_refused = true;
    for entry in std::fs::read_dir(process.directory().join("task")).ok()?.flatten().take(THREADS_MAX) {
        let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        threads.count += 1;
        let line = match read_bounded(&entry.path().join("syscall"), LINE_BYTES_MAX) {
            Ok(line) => line,
            // A thread may have ended.
            Err(error) => {
                is_refused &= matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM));
                continue;
            }
        };
        is_refused = false;
        let status = ThreadStatus::read(&entry.path());
        if status.as_ref().is_some_and(|status| is_call_mask(status.blocked)) {
            threads.calling = Some(tid);
        }
        let Some(call) = parse(&line) else { continue };
        if call.is_vfork() {
            threads.vfork = Some(tid);
        }
        let Some(mut rank) = call.rank() else { continue };
        if call.receives_from().is_some_and(|file| has_receive_timeout(process, file)) {
            rank = Rank::Interrupted;
        }
        if let (Some(status), Some(stat)) = (status, Stat::read(&entry.path())) {
            threads.parked.push(Parked { tid, call, rank, waits: status.waits, age: stat.age() });
        }
    }
    threads.sort();
    (!is_refused || threads.count == 0).then_some(threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(number: i64, arguments: [u64; 6]) -> SystemCall {
        SystemCall { number, arguments }
    }

    #[test]
    fn a_line_is_a_call_unless_the_thread_runs_or_is_outside_one() {
        let waiting = b"202 0x7f01 0x80 0x0 0x0 0x0 0xffffffff 0x7ffc10 0x7f99\n";
        assert_eq!(parse(waiting), Some(call(202, [0x7f01, 0x80, 0, 0, 0, 0xffff_ffff])));
        for other in
            [&b"running\n"[..], b"-1 0x7ffc20 0x7f98\n", b"202 0x1 0x2\n", b"", b"202 \xff", b"7 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0 0x0"]
        {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn waits_rank_by_what_a_restart_changes() {
        let rank = |number, arguments| call(number, arguments).rank();
        assert_eq!(rank(libc::SYS_futex, [1, 0x80, 0, 0, 0, 0]), Some(Rank::WaitsForEver));
        assert_eq!(rank(libc::SYS_futex, [1, 0x189, 0, 0, 0, 0]), Some(Rank::WaitsForEver));
        assert_eq!(rank(libc::SYS_futex, [1, 0x189, 0, 0x7f00, 0, 0]), Some(Rank::WaitsUntil));
        assert_eq!(rank(libc::SYS_futex, [1, 0x80, 0, 0x7f00, 0, 0]), Some(Rank::WaitsFor));
        assert_eq!(rank(libc::SYS_futex, [1, 0x81, 0, 0, 0, 0]), None, "a wake");
        assert_eq!(rank(libc::SYS_futex, [1, 0x86, 0, 0, 0, 0]), None, "a lock with priority inheritance");
        assert_eq!(rank(libc::SYS_clock_nanosleep, [1, 1, 0, 0, 0, 0]), Some(Rank::Restarts));
        assert_eq!(rank(libc::SYS_clock_nanosleep, [1, 0, 0, 0, 0, 0]), Some(Rank::WaitsFor));
        assert_eq!(rank(libc::SYS_poll, [0, 1, 0xffff_ffff, 0, 0, 0]), Some(Rank::Restarts));
        assert_eq!(rank(libc::SYS_poll, [0, 1, 20, 0, 0, 0]), Some(Rank::WaitsFor));
        assert_eq!(rank(libc::SYS_epoll_wait, [3; 6]), Some(Rank::Interrupted));
        assert_eq!(rank(libc::SYS_madvise, [0; 6]), None);
        assert_eq!(rank(libc::SYS_read, [0; 6]), Some(Rank::Restarts));
    }

    #[test]
    fn the_best_thread_is_the_one_that_waits_the_most_patiently() {
        let minute = Duration::from_secs(60);
        let parked = |tid, rank, waits, age| Parked { tid, call: SystemCall::default(), rank, waits, age };
        let mut threads = Threads {
            parked: vec![
                parked(1, Rank::Interrupted, 0, minute),
                parked(2, Rank::WaitsForEver, 900, minute),
                parked(3, Rank::WaitsForEver, 2, minute),
                parked(4, Rank::WaitsFor, 0, minute),
                // One that has just begun, and may soon end.
                parked(5, Rank::WaitsForEver, 1, Duration::ZERO),
            ],
            ..Threads::default()
        };
        threads.sort();
        assert_eq!(threads.parked.iter().map(|thread| thread.tid).collect::<Vec<_>>(), [3, 2, 5, 4, 1]);
    }
}
