//! The system calls that a scratch process may make: those that a dynamic loader needs to load a C library, and malloc to get memory. All
//! others are refused: the kernel returns ENOSYS, as an older kernel would, and the library works without them.
//!
//! `execve` is included because it starts the loader itself; the tracer ends the process at a second one (see `tracer`).

use libc::{c_long, sock_filter};

use crate::seccomp::Rules;

/// Calls allowed with any arguments. The process has only descriptors of files that it opens, in a root with three files.
const ALLOWED: [c_long; 23] = [
    // Memory.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    // Loading.
    libc::SYS_execve,
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_stat,
    libc::SYS_newfstatat,
    libc::SYS_access,
    libc::SYS_getcwd,
    libc::SYS_uname,
    // The first thread's state.
    libc::SYS_arch_prctl,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    // Keys of the caches; the number of CPUs, which limits the number of arenas.
    libc::SYS_getrandom,
    libc::SYS_sched_getaffinity,
    // The end.
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// The filter.
pub(super) fn filter() -> Vec<sock_filter> {
    Rules::new().allow(&ALLOWED).allow_open_for_reading().allow_read_limits().build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seccomp::testing::assert_allows_only;

    #[test]
    fn only_calls_that_load_a_library_and_get_memory_are_allowed() {
        assert_allows_only(&filter(), &[&ALLOWED[..], &[libc::SYS_openat, libc::SYS_prlimit64]].concat());
    }
}
