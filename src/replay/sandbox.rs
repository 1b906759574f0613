//! What the player's process may do. The allocator that it runs is foreign code: it gets memory, and nothing else.
//!
//! | it cannot | because |
//! |---|---|
//! | change files, reach the network or other processes | no such system call is allowed; it can open files for reading only |
//! | gain or use privileges | `no_new_privs`, and its capabilities are dropped |
//! | start processes | `clone` is allowed for threads only |
//! | take more memory or time than granted | RLIMIT_DATA and RLIMIT_CPU; the parent kills it after a wall-clock limit or without progress |
//! | outlive fragprof | PR_SET_PDEATHSIG, and it is killed when its handle is dropped |
//!
//! All of this is set up before the exec, so that it holds for the constructors of preloaded libraries, and needs no privilege. System calls
//! that are not allowed fail with ENOSYS, as in an older kernel. Design note 0021 has the reasons.

use std::io;

use libc::{c_long, c_ulong, sock_filter, sock_fprog};

use crate::seccomp::Rules;

/// Calls allowed with any arguments.
const ALLOWED: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_mincore,
    // Threads and locks.
    libc::SYS_futex,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_rt_sigprocmask,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Clocks, keys.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_getrandom,
    // Loading, and reading of settings and of the number of CPUs.
    libc::SYS_execve,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    // Messages: only descriptors that it has from fragprof can be written to.
    libc::SYS_write,
    libc::SYS_writev,
];

/// Older calls, which newer instruction sets do not have.
#[cfg(target_arch = "x86_64")]
const ALLOWED_OLD: &[c_long] = &[
    libc::SYS_arch_prctl,
    libc::SYS_access,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_getrlimit,
    libc::SYS_time,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_OLD: &[c_long] = &[libc::SYS_nanosleep];

/// The filter.
fn filter() -> Vec<sock_filter> {
    Rules::new().allow(ALLOWED).allow(ALLOWED_OLD).allow_open_for_reading().allow_threads().allow_memory_prctl().allow_read_limits().build()
}

/// What the parent prepares: between fork and exec the child must not allocate.
pub(super) struct Confinement {
    filter: Vec<sock_filter>,
    data_bytes_max: u64,
    cpu_seconds_max: u64,
}

impl Confinement {
    pub(super) fn new(data_bytes_max: u64, cpu_seconds_max: u64) -> Self {
        Self { filter: filter(), data_bytes_max, cpu_seconds_max }
    }

    /// Confines the calling process, the child of a fork. Makes system calls only.
    pub(super) fn apply(&self) -> io::Result<()> {
        let none = 0 as c_ulong;
        let limits = [
            (libc::RLIMIT_DATA, self.data_bytes_max),
            (libc::RLIMIT_CPU, self.cpu_seconds_max),
            (libc::RLIMIT_CORE, 0),
            (libc::RLIMIT_FSIZE, 0),
            (libc::RLIMIT_MEMLOCK, 0),
        ];
        // SAFETY: plain system calls with locals and memory of `self`; none of them allocates or locks.
        unsafe {
            for (resource, most) in limits {
                let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                check(libc::getrlimit(resource, &raw mut limit).into())?;
                // Never above a limit that is in force already.
                let most = most.min(limit.rlim_max);
                check(libc::setrlimit(resource, &libc::rlimit { rlim_cur: most, rlim_max: most }).into())?;
            }
            // Addresses decide alignments and which pages are merged: two replays must agree.
            check(libc::personality(libc::ADDR_NO_RANDOMIZE as c_ulong).into())?;
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as c_ulong, none, none, none).into())?;
            check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as c_ulong, none, none, none).into())?;
            drop_capabilities()?;
            let program = sock_fprog { len: self.filter.len() as u16, filter: self.filter.as_ptr().cast_mut() };
            check(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER as c_ulong, &raw const program, none, none).into())
        }
    }
}

/// Drops all capabilities, also those that root would gain at the exec.
///
/// # Safety
/// Makes system calls only, with locals.
unsafe fn drop_capabilities() -> io::Result<()> {
    /// `_LINUX_CAPABILITY_VERSION_3` of include/uapi/linux/capability.h; its header and data.
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let none = 0 as c_ulong;
    let mut header = Header { version: 0x2008_0522, pid: 0 };
    let sets = [0u32; 6];
    // SAFETY: the structs match the kernel's headers, and are locals.
    unsafe {
        // Those of root: SECBIT_NOROOT, locked, and the bounding set. Without CAP_SETPCAP there are none to gain.
        libc::prctl(libc::PR_SET_SECUREBITS, 0b11 as c_ulong, none, none, none);
        libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong, none, none, none);
        check(libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()))
    }
}

fn check(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::testing::assert_allows_only;

    #[test]
    fn only_calls_that_an_allocator_needs_are_allowed() {
        assert_allows_only(&filter(), &[ALLOWED, ALLOWED_OLD, &[libc::SYS_openat, libc::SYS_prlimit64]].concat());
    }
}
