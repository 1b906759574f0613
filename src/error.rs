//! Exit statuses and the error that carries one to `main`.

use std::fmt;

/// Exit statuses, for scripts. Stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitStatus {
    /// Success.
    Ok = 0,
    /// A failure of no other kind.
    Failure = 1,
    /// The command line or an input file is not valid.
    Usage = 2,
    /// The target does not exist, has ended, or cannot be watched.
    Target = 3,
    /// A permission or kernel feature that the command needs is missing.
    Unsupported = 4,
}

/// An error that determines the exit status. Attach it to an `anyhow` chain as context or root; `main` finds it.
#[derive(Debug)]
pub struct Failed {
    /// Status to exit with.
    pub status: ExitStatus,
    /// What failed, on what, and what to do.
    pub message: String,
}

impl Failed {
    /// A failure with its status and a message that says what failed, on what, and what to do.
    pub fn new(status: ExitStatus, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failed {}
