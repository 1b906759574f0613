//! The system calls that a scratch process may make: those that a dynamic loader needs to load a C library, and malloc to get memory. All
//! others are refused: the kernel returns ENOSYS, as an older kernel would, and the library works without them.
//!
//! `execve` is included because it starts the loader itself; the tracer ends the process at a second one (see `tracer`).

use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter};

/// `AUDIT_ARCH_X86_64` of include/uapi/linux/audit.h: EM_X86_64, 64 bits, little-endian.
const AUDIT_ARCH_X86_64: u32 = 62 | 0x8000_0000 | 0x4000_0000;

/// Offsets in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

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

/// Flags of `openat` that permit more than reading: write, create, truncate, unnamed files.
const OPEN_BEYOND_READING: u32 = (libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY) as u32;

fn statement(code: u32, k: u32) -> sock_filter {
    sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

fn jump(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (BPF_JMP | code | BPF_K) as u16, jt, jf, k }
}

fn load(offset: u32) -> sock_filter {
    statement(BPF_LD | BPF_W | BPF_ABS, offset)
}

/// The filter.
pub(super) fn filter() -> Vec<sock_filter> {
    let end = |action: u32| statement(BPF_RET | BPF_K, action);
    let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    let argument = |nth: u32| ARGUMENTS_AT + 8 * nth;
    let mut filter = vec![
        load(ARCHITECTURE_AT),
        jump(BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0),
        // 32-bit calls have different numbers.
        end(libc::SECCOMP_RET_KILL_PROCESS),
        // Numbers of the x32 ABI have bit 30 set and are not in the list.
        load(NUMBER_AT),
    ];
    for number in ALLOWED {
        filter.extend([jump(BPF_JEQ, number as u32, 0, 1), end(libc::SECCOMP_RET_ALLOW)]);
    }
    filter.extend([
        jump(BPF_JEQ, libc::SYS_openat as u32, 0, 4),
        load(argument(2)),
        jump(BPF_JSET, OPEN_BEYOND_READING, 0, 1),
        end(refused),
        end(libc::SECCOMP_RET_ALLOW),
        // Limits may be read but not set: the pointer to the new ones must be null.
        jump(BPF_JEQ, libc::SYS_prlimit64 as u32, 0, 6),
        load(argument(2)),
        jump(BPF_JEQ, 0, 0, 3),
        load(argument(2) + 4),
        jump(BPF_JEQ, 0, 0, 1),
        end(libc::SECCOMP_RET_ALLOW),
        end(refused),
        end(refused),
    ]);
    filter
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// The filter's action for a call: a model of the kernel's interpreter for the instructions used.
    fn action(architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = number.to_ne_bytes().to_vec();
        data.extend(architecture.to_ne_bytes());
        data.extend(0u64.to_ne_bytes());
        data.extend(arguments.iter().flat_map(|argument| argument.to_ne_bytes()));
        let (filter, mut at, mut accumulator) = (filter(), 0, 0u32);
        loop {
            let instruction = filter[at];
            at += 1;
            let skip = |taken: bool| usize::from(if taken { instruction.jt } else { instruction.jf });
            match u32::from(instruction.code) {
                code if code == BPF_LD | BPF_W | BPF_ABS => {
                    let from = instruction.k as usize;
                    accumulator = u32::from_ne_bytes(data[from..from + 4].try_into().unwrap());
                }
                code if code == BPF_JMP | BPF_JEQ | BPF_K => at += skip(accumulator == instruction.k),
                code if code == BPF_JMP | BPF_JSET | BPF_K => at += skip(accumulator & instruction.k != 0),
                code if code == BPF_RET | BPF_K => return instruction.k,
                code => panic!("instruction {code:#x}"),
            }
        }
    }

    fn call(number: c_long, arguments: [u64; 6]) -> u32 {
        action(AUDIT_ARCH_X86_64, number as u32, arguments)
    }

    #[test]
    fn only_calls_that_load_a_library_and_get_memory_are_allowed() {
        let refused = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        for number in 0..1024 {
            let expected = match number {
                _ if ALLOWED.contains(&number) => libc::SECCOMP_RET_ALLOW,
                // With null for the new limits, and with flags for reading.
                libc::SYS_prlimit64 | libc::SYS_openat => libc::SECCOMP_RET_ALLOW,
                _ => refused,
            };
            assert_eq!(call(number, [0; 6]), expected, "call {number}");
            assert_eq!(call(number | 1 << 30, [0; 6]), refused, "x32 call {number}");
            // AUDIT_ARCH_I386.
            assert_eq!(action(0x4000_0003, number as u32, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
        }
        for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_TRUNC, libc::O_TMPFILE] {
            assert_eq!(call(libc::SYS_openat, [0, 0, flags as u64, 0, 0, 0]), refused, "openat with {flags:#o}");
        }
        assert_eq!(call(libc::SYS_openat, [0, 0, libc::O_CLOEXEC as u64, 0, 0, 0]), libc::SECCOMP_RET_ALLOW);
        assert_eq!(call(libc::SYS_prlimit64, [0, 7, 1, 0, 0, 0]), refused);
        assert_eq!(call(libc::SYS_prlimit64, [0, 7, 1 << 40, 0, 0, 0]), refused);
    }
}
