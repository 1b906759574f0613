//! Exit statuses and the error that carries one to `main`.

use std::fmt;

/// What a command's end means to a script. Stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitStatus {
    /// The command did what was asked.
    Ok = 0,
    /// Something failed that none of the others names.
    Failure = 1,
    /// The command line or an input file is not valid.
    Usage = 2,
    /// The target is not there, has ended, or is of a kind that cannot be watched.
    Target = 3,
    /// The permission or the kernel feature that the command needs is missing.
    Unsupported = 4,
}

/// An error whose kind decides the exit status. Attach it to an `anyhow` chain as context or root; `main` looks for it.
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
