//! Seccomp filters: lists of the system calls that a process may make. All others fail with ENOSYS, as in an older kernel.

use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_JSET, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, sock_filter};

/// `AUDIT_ARCH_X86_64` or `AUDIT_ARCH_AARCH64` of include/uapi/linux/audit.h: the ELF machine, 64 bits, little-endian.
const AUDIT_ARCH: u32 = (if cfg!(target_arch = "aarch64") { 183 } else { 62 }) | 0x8000_0000 | 0x4000_0000;

/// Offsets in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
const ARGUMENTS_AT: u32 = 16;

/// The kernel's answer to a call that is not allowed.
const REFUSED: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;

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

/// The low half of an argument of the call.
fn argument(nth: u32) -> sock_filter {
    load(ARGUMENTS_AT + 8 * nth)
}

fn end(action: u32) -> sock_filter {
    statement(BPF_RET | BPF_K, action)
}

/// A filter being built. Every rule leaves the call's number loaded for the next one.
#[derive(Debug, Clone)]
pub(crate) struct Rules(Vec<sock_filter>);

impl Rules {
    /// Allows nothing. Calls of another instruction set, which have other numbers, end the process.
    pub(crate) fn new() -> Self {
        // Numbers of the x32 ABI have bit 30 set and are in no list.
        Self(vec![load(ARCHITECTURE_AT), jump(BPF_JEQ, AUDIT_ARCH, 1, 0), end(libc::SECCOMP_RET_KILL_PROCESS), load(NUMBER_AT)])
    }

    /// Allows calls with any arguments.
    pub(crate) fn allow(mut self, numbers: &[c_long]) -> Self {
        for &number in numbers {
            self.0.extend([jump(BPF_JEQ, number as u32, 0, 1), end(libc::SECCOMP_RET_ALLOW)]);
        }
        self
    }

    /// Allows to open files for reading.
    pub(crate) fn allow_open_for_reading(mut self) -> Self {
        self.0.extend([
            jump(BPF_JEQ, libc::SYS_openat as u32, 0, 4),
            argument(2),
            jump(BPF_JSET, OPEN_BEYOND_READING, 0, 1),
            end(REFUSED),
            end(libc::SECCOMP_RET_ALLOW),
        ]);
        self
    }

    /// Allows to read limits, not to set them: the pointer to the new ones must be null.
    pub(crate) fn allow_read_limits(mut self) -> Self {
        self.0.extend([
            jump(BPF_JEQ, libc::SYS_prlimit64 as u32, 0, 6),
            argument(2),
            jump(BPF_JEQ, 0, 0, 3),
            load(ARGUMENTS_AT + 8 * 2 + 4),
            jump(BPF_JEQ, 0, 0, 1),
            end(libc::SECCOMP_RET_ALLOW),
            end(REFUSED),
        ]);
        self
    }

    /// Allows to start threads, not processes. `clone3`, whose flags a filter cannot see, is refused: the C library then uses `clone`.
    pub(crate) fn allow_threads(mut self) -> Self {
        self.0.extend([
            jump(BPF_JEQ, libc::SYS_clone as u32, 0, 4),
            argument(0),
            jump(BPF_JSET, libc::CLONE_THREAD as u32, 0, 1),
            end(libc::SECCOMP_RET_ALLOW),
            end(REFUSED),
        ]);
        self
    }

    /// Allows `prctl` for two purposes: to name mappings, and to ask whether huge pages are disabled.
    pub(crate) fn allow_memory_prctl(mut self) -> Self {
        self.0.extend([
            jump(BPF_JEQ, libc::SYS_prctl as u32, 0, 5),
            argument(0),
            jump(BPF_JEQ, libc::PR_SET_VMA as u32, 1, 0),
            jump(BPF_JEQ, libc::PR_GET_THP_DISABLE as u32, 0, 1),
            end(libc::SECCOMP_RET_ALLOW),
            end(REFUSED),
        ]);
        self
    }

    /// The filter for `PR_SET_SECCOMP`.
    pub(crate) fn build(mut self) -> Vec<sock_filter> {
        self.0.push(end(REFUSED));
        self.0
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! What a filter does with a call.
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Whether the filter allows a call; refused calls must be refused with ENOSYS.
    pub(crate) fn allows(filter: &[sock_filter], number: c_long, arguments: [u64; 6]) -> bool {
        let action = action(filter, AUDIT_ARCH, number as u32, arguments);
        assert!([libc::SECCOMP_RET_ALLOW, REFUSED].contains(&action), "call {number}: action {action:#x}");
        action == libc::SECCOMP_RET_ALLOW
    }

    /// Checks what holds for every filter, and that it allows these calls and no others without conditions: arguments are 0.
    pub(crate) fn assert_allows_only(filter: &[sock_filter], allowed: &[c_long]) {
        for number in 0..1024 {
            assert_eq!(allows(filter, number, [0; 6]), allowed.contains(&number), "call {number}");
            assert!(!allows(filter, number | 1 << 30, [0; 6]), "x32 call {number}");
            // AUDIT_ARCH_I386.
            assert_eq!(action(filter, 0x4000_0003, number as u32, [0; 6]), libc::SECCOMP_RET_KILL_PROCESS);
        }
    }

    /// The filter's action for a call: a model of the kernel's interpreter for the instructions used.
    fn action(filter: &[sock_filter], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut data = number.to_ne_bytes().to_vec();
        data.extend(architecture.to_ne_bytes());
        data.extend(0u64.to_ne_bytes());
        data.extend(arguments.iter().flat_map(|argument| argument.to_ne_bytes()));
        let (mut at, mut accumulator) = (0, 0u32);
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
}

#[cfg(test)]
mod tests {
    use super::testing::{allows, assert_allows_only};
    use super::*;

    #[test]
    fn rules_with_conditions_allow_what_they_say() {
        let filter = Rules::new().allow_open_for_reading().allow_threads().allow_memory_prctl().allow_read_limits().build();
        // With flags for reading, and null for the new limits.
        assert_allows_only(&filter, &[libc::SYS_openat, libc::SYS_prlimit64]);
        for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_CREAT, libc::O_TRUNC, libc::O_TMPFILE] {
            assert!(!allows(&filter, libc::SYS_openat, [0, 0, flags as u64, 0, 0, 0]), "openat with {flags:#o}");
        }
        assert!(allows(&filter, libc::SYS_openat, [0, 0, libc::O_CLOEXEC as u64, 0, 0, 0]));
        assert!(!allows(&filter, libc::SYS_prlimit64, [0, 7, 1, 0, 0, 0]));
        assert!(!allows(&filter, libc::SYS_prlimit64, [0, 7, 1 << 40, 0, 0, 0]));
        assert!(allows(&filter, libc::SYS_clone, [(libc::CLONE_VM | libc::CLONE_THREAD) as u64, 0, 0, 0, 0, 0]));
        assert!(!allows(&filter, libc::SYS_clone, [libc::CLONE_VM as u64, 0, 0, 0, 0, 0]), "a process");
        assert!(allows(&filter, libc::SYS_prctl, [libc::PR_SET_VMA as u64, 0, 0, 0, 0, 0]));
        assert!(!allows(&filter, libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0, 0, 0]));
    }
}
