//! What a call in a process needs to know of the machine: signal frames, the return from them, and how a stopped thread's system call goes on.
//!
//! One file per architecture, with the same names in each.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod software;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// Not a mode of sigaltstack(2): the kernel then leaves the alternate stack as it is (kernel/signal.c, restore_altstack).
const STACK_FLAGS_INVALID: u32 = 0x1_2345;

/// How the system call in which a thread was stopped goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pending {
    /// It begins again.
    Restarts,
    /// It begins again with the rest of its timeout, which the kernel keeps. On arm64 that looks like any other restart.
    #[cfg_attr(target_arch = "aarch64", expect(dead_code, reason = "not to be told apart there"))]
    RestartsForRest,
    /// In a way that is not known.
    Unknown,
    /// It returns.
    Returned {
        /// With EINTR.
        is_interrupted: bool,
    },
}
