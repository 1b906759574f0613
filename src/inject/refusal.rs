//! Why a call is not made. Everything is checked before the register write that commits the call, so a refused target is as it was.

use std::path::PathBuf;

use thiserror::Error;

use crate::sanitize::terminal;

/// Why no call is made in a process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// The kernel refused to trace it.
    #[error("no right to trace it{hint}: only its owner, or CAP_SYS_PTRACE in its user namespace, may make it call a function")]
    NotPermitted {
        /// The setting of Yama, if that may be the reason.
        hint: String,
    },
    /// Another tracer has it.
    #[error("pid {tracer} traces it already (a debugger, strace, CRIU)")]
    Traced {
        /// The tracer.
        tracer: u32,
    },
    /// Stopped by a signal.
    #[error("it is stopped: resume it first (kill -CONT)")]
    Stopped,
    /// Its cgroup is frozen.
    #[error("its cgroup is frozen: the call would run when it is thawed")]
    Frozen,
    /// `SECCOMP_MODE_STRICT`.
    #[error("it runs under strict seccomp, which kills it at the system calls that the call needs")]
    StrictSeccomp,
    /// A filter forbids a system call.
    #[error("its seccomp filter does not allow {call}, which the call needs")]
    SeccompFilter {
        /// The system call.
        call: &'static str,
    },
    /// The filter cannot be read.
    #[error("its seccomp filters cannot be read ({reason}), so it is not known whether they allow the call: needs CAP_SYS_ADMIN")]
    SeccompUnreadable {
        /// The kernel's answer.
        reason: String,
    },
    /// A thread waits for its vfork child.
    #[error("thread {tid} waits for a child that runs in this memory (vfork)")]
    Vfork {
        /// The thread.
        tid: u32,
    },
    /// It runs in another process's memory.
    #[error("it runs in the memory of pid {other} (vfork, or a clone that shares memory)")]
    SharedMemory {
        /// The other process.
        other: u32,
    },
    /// User shadow stacks.
    #[error("shadow stacks are in use: the return from the call would be refused")]
    ShadowStack,
    /// A set-user-ID or set-group-ID program.
    #[error(
        "it runs with the rights of another user than the one that started it (setuid), and no call is made in such a process; recordings by \
         probes and the census need none"
    )]
    Setuid,
    /// `PR_SET_DUMPABLE` is 0.
    #[error("it asked not to be inspected (PR_SET_DUMPABLE), or changed its user since it started")]
    NotDumpable,
    /// An earlier call has not ended.
    #[error("an earlier call still runs in thread {tid}")]
    CallInProgress {
        /// The thread.
        tid: u32,
    },
    /// The function is missing.
    #[error("it has no function {function} (musl, or a stripped static program?)")]
    FunctionMissing {
        /// The function.
        function: String,
    },
    /// The trampoline is missing.
    #[error("none of its libraries has the instructions that return from a signal handler")]
    TrampolineMissing,
    /// A file that must be read cannot be.
    #[error("cannot read {}: {reason}", terminal(&path.display().to_string()))]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// No thread is at a safe place.
    #[error("{}", of_threads(*threads, unfit))]
    NoThread {
        /// Threads that the process has.
        threads: usize,
        /// Those that waited in a system call, and why they were left alone.
        unfit: Vec<(u32, Unfit)>,
    },
    /// This machine's signal frames are not as expected.
    #[error("this kernel's signal frames are not of the known form: {reason}")]
    SignalFrame {
        /// What is different.
        reason: &'static str,
    },
    /// It ended.
    #[error("it ended meanwhile")]
    Ended,
    /// An execve came between.
    #[error("it has executed another program since it was examined: try again")]
    Replaced,
    /// A request of the kernel that cannot fail did.
    #[error("{what}: {reason}")]
    Kernel {
        /// The request.
        what: &'static str,
        /// The kernel's answer.
        reason: String,
    },
}

impl Refusal {
    /// Its name in JSON, metrics and events.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotPermitted { .. } => "not_permitted",
            Self::Traced { .. } => "traced",
            Self::Stopped => "stopped",
            Self::Frozen => "frozen",
            Self::StrictSeccomp => "strict_seccomp",
            Self::SeccompFilter { .. } => "seccomp_filter",
            Self::SeccompUnreadable { .. } => "seccomp_unreadable",
            Self::Vfork { .. } => "vfork",
            Self::SharedMemory { .. } => "shared_memory",
            Self::ShadowStack => "shadow_stack",
            Self::Setuid => "setuid",
            Self::NotDumpable => "not_dumpable",
            Self::CallInProgress { .. } => "call_in_progress",
            Self::FunctionMissing { .. } => "function_missing",
            Self::TrampolineMissing => "trampoline_missing",
            Self::File { .. } => "file",
            Self::NoThread { unfit, .. } => most_frequent(unfit).map_or("no_parked_thread", Unfit::name),
            Self::SignalFrame { .. } => "signal_frame",
            Self::Ended => "ended",
            Self::Replaced => "replaced",
            Self::Kernel { .. } => "kernel",
        }
    }
}

/// Why a thread is left alone.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Unfit {
    /// It is in an uninterruptible wait, or did not get to run.
    #[error("it did not stop in time (an uninterruptible wait?)")]
    NotStopped,
    /// The timeout of its wait did not pass.
    #[error("it sleeps for longer than is waited for, and stopping its sleep for good would show in its result")]
    SleepsLong,
    /// It is not in a system call any more, or in another one.
    #[error("it is no longer in a system call that can be interrupted")]
    MovedOn,
    /// A signal, or a stop, was under way.
    #[error("a signal was being delivered to it")]
    Signalled,
    /// It is inside the code that must not be interrupted.
    #[error("it is inside {what}, or may be")]
    InForbiddenCode {
        /// The code.
        what: String,
    },
    /// The stack pointer is not in the thread's stack.
    #[error("its stack pointer is outside its own stack (a fibre, a coroutine, an alternate signal stack)")]
    ForeignStack,
    /// The end of the stack is unknown.
    #[error("its stack has no guard page, so its end is not known")]
    Unguarded,
    /// Too little stack is left.
    #[error("its stack has too little room left")]
    SmallStack,
    /// Too much stack to examine.
    #[error("its stack is too deep to be examined")]
    DeepStack,
    /// The stack cannot be read or written.
    #[error("its stack cannot be read or written")]
    StackUnreadable,
    /// 32-bit code.
    #[error("it runs 32-bit code")]
    NotLongMode,
    /// AMX.
    #[error("it has AMX state, which is not saved in its frame")]
    Amx,
    /// ZA, of arm64's SME.
    #[error("it has state in ZA (SME), which is not saved in its frame")]
    Za,
}

impl Unfit {
    /// Its name in JSON, metrics and events.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotStopped => "not_stopped",
            Self::SleepsLong => "sleeps_long",
            Self::MovedOn => "no_parked_thread",
            Self::Signalled => "signalled",
            Self::InForbiddenCode { .. } => "in_allocator",
            Self::ForeignStack => "foreign_stack",
            Self::Unguarded => "unguarded_stack",
            Self::SmallStack => "small_stack",
            Self::DeepStack => "deep_stack",
            Self::StackUnreadable => "stack_unreadable",
            Self::NotLongMode => "not_64_bit",
            Self::Amx => "amx",
            Self::Za => "za",
        }
    }
}

/// How an attempt in one thread ends without a call.
#[derive(Debug)]
pub(super) enum Failed {
    /// The thread is left alone: another one may do.
    Unfit(Unfit),
    /// The whole process is refused.
    Refused(Refusal),
}

impl From<Unfit> for Failed {
    fn from(unfit: Unfit) -> Self {
        Self::Unfit(unfit)
    }
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

/// The first reason of those that most threads have.
fn most_frequent(unfit: &[(u32, Unfit)]) -> Option<&Unfit> {
    let count = |of: &Unfit| unfit.iter().filter(|(_, other)| other.name() == of.name()).count();
    // `max_by_key` gives the last of equals: the first thread is the best one.
    unfit.iter().rev().map(|(_, reason)| reason).max_by_key(|reason| count(reason))
}

fn of_threads(threads: usize, unfit: &[(u32, Unfit)]) -> String {
    match unfit {
        [] => format!("none of its {threads} threads waits in a system call that may be interrupted; try again when it is less busy"),
        [(tid, reason)] => format!("thread {tid}: {reason}"),
        [(tid, reason), rest @ ..] => format!("thread {tid}: {reason}; {} more that wait are no better", rest.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_were_tried_name_the_refusal() {
        let no_thread = |unfit| Refusal::NoThread { threads: 3, unfit };
        assert_eq!(no_thread(vec![]).name(), "no_parked_thread");
        assert_eq!(no_thread(vec![(1, Unfit::Amx), (2, Unfit::SmallStack), (3, Unfit::SmallStack)]).name(), "small_stack");
        assert_eq!(no_thread(vec![(1, Unfit::Amx), (2, Unfit::SmallStack)]).name(), "amx");
        assert!(no_thread(vec![(7, Unfit::Amx)]).to_string().starts_with("thread 7: "));
    }
}
