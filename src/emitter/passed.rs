//! Probe sites that are part of a program (USDT), in the form needed to attach to them.

use std::path::PathBuf;

use crate::emitter::usdt::Argument;
use crate::units::FileOffset;

/// A probe site in a program's own code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedSite {
    /// The `nop`.
    pub offset: FileOffset,
    /// The count of listeners, which the kernel maintains; `None` = the site is always active.
    pub semaphore: Option<FileOffset>,
    /// The arguments; those after the fourth are not used.
    pub arguments: Vec<Argument>,
}

/// The sites of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedFile {
    /// Path by which the kernel finds the file's inode.
    pub path: PathBuf,
    /// Sites that report an allocation: block, bytes, weight, and the interval if they have a fourth argument.
    pub allocs: Vec<PassedSite>,
    /// Sites that report a free: block.
    pub frees: Vec<PassedSite>,
}
