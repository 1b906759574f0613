//! Probe sites that programs bring along (USDT), as they are attached to.

use std::path::PathBuf;

use crate::target::usdt::Argument;
use crate::units::FileOffset;

/// A probe site that a program passes by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedSite {
    /// The `nop`.
    pub offset: FileOffset,
    /// The count of listeners, which the kernel keeps; `None` = the site is passed always.
    pub semaphore: Option<FileOffset>,
    /// Where the arguments are; behind the fourth they are not looked at.
    pub arguments: Vec<Argument>,
}

/// The sites of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedFile {
    /// Path by which the kernel finds the file's inode.
    pub path: PathBuf,
    /// Sites that tell of an allocation: block, bytes, weight, and if they have a fourth argument, the interval.
    pub allocs: Vec<PassedSite>,
    /// Sites that tell of a free: block.
    pub frees: Vec<PassedSite>,
}
