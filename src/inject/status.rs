//! The lines of `/proc/PID/status` and `/proc/PID/task/TID/status` that decide about a call. Pure but for [`ThreadStatus::read`].

use std::path::Path;

use crate::process::handle::read_bounded;

/// Bytes of a status file: about 1.5 KiB, more with many CPUs and groups.
const STATUS_BYTES_MAX: u64 = 64 << 10;

/// The state of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ThreadStatus {
    /// `R`, `S`, `D`, `T`, `t`, `Z`, …
    pub state: u8,
    /// Its tracer; 0 = none.
    pub tracer: u32,
    /// 0 = none, 1 = strict, 2 = filters.
    pub seccomp: u8,
    /// Blocked signals: bit n − 1 for signal n.
    pub blocked: u64,
    /// Shadow stacks are on.
    pub shadow_stack: bool,
    /// Real, effective, saved user.
    pub users: [u32; 3],
    /// Real, effective, saved group.
    pub groups: [u32; 3],
    /// Parent process.
    pub parent: u32,
    /// Voluntary context switches.
    pub waits: u64,
}

impl ThreadStatus {
    /// Reads the one below a `/proc` directory of a process or a thread; `None` if there is none any more.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        Self::parse(&read_bounded(&directory.join("status"), STATUS_BYTES_MAX).ok()?)
    }

    /// Parses the file; `None` without the lines that every kernel has.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        let mut status = Self::default();
        let mut has_mask = false;
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            match name {
                "State" => status.state = value.bytes().next().unwrap_or(0),
                "TracerPid" => status.tracer = value.parse().unwrap_or(0),
                "PPid" => status.parent = value.parse().unwrap_or(0),
                "Seccomp" => status.seccomp = value.parse().unwrap_or(0),
                "Uid" => status.users = three(value),
                "Gid" => status.groups = three(value),
                "SigBlk" => {
                    status.blocked = u64::from_str_radix(value, 16).ok()?;
                    has_mask = true;
                }
                // Documentation/arch/x86/shstk.rst.
                "x86_Thread_features" => status.shadow_stack = value.split_ascii_whitespace().any(|feature| feature == "shstk"),
                "voluntary_ctxt_switches" => status.waits = value.parse().unwrap_or(0),
                _ => {}
            }
        }
        has_mask.then_some(status)
    }

    /// Whether a signal or a tracer has stopped it.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, b'T' | b't')
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }

    /// Whether it runs with other rights than those of its user.
    #[must_use]
    pub fn is_setuid(&self) -> bool {
        let differ = |ids: [u32; 3]| ids[0] != ids[1] || ids[1] != ids[2];
        differ(self.users) || differ(self.groups)
    }
}

fn three(value: &str) -> [u32; 3] {
    let mut numbers = value.split_ascii_whitespace().map(|word| word.parse().unwrap_or(0));
    [(); 3].map(|()| numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_lines_are_read_and_a_file_without_a_mask_is_none() {
        let text = "Name:\tS: 1\nState:\tS (sleeping)\nPPid:\t7\nTracerPid:\t12\nUid:\t1\t2\t3\t4\nGid:\t5\t5\t5\t5\nSigBlk:\tfffffffe3bfa3a00\nSeccomp:\t2\n\
                    x86_Thread_features:\tshstk wrss\nvoluntary_ctxt_switches:\t150\n";
        let status = ThreadStatus::parse(text.as_bytes()).unwrap();
        assert_eq!((status.state, status.tracer, status.seccomp, status.parent), (b'S', 12, 2, 7));
        assert_eq!((status.blocked, status.shadow_stack, status.waits), (0xffff_fffe_3bfa_3a00, true, 150));
        assert_eq!((status.users, status.is_setuid()), ([1, 2, 3], true));
        assert_eq!(ThreadStatus::parse(b"State:\tS\n"), None);
        assert_eq!(ThreadStatus::parse(b"SigBlk:\tzz\n"), None);
    }

    #[test]
    fn a_thread_of_this_process_is_neither_stopped_nor_traced() {
        let own = ThreadStatus::read(Path::new("/proc/self")).unwrap();
        assert!(!own.is_stopped() && !own.is_dead() && !own.is_setuid() && own.parent > 0);
    }
}
