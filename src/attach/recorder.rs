//! The library that records every call: the process makes the memory that it shares with the recording, which finds it among the process's
//! descriptors.

use std::fs::File;
use std::os::fd::OwnedFd;

use super::state::PassRefused;
use super::{AttachRefusal, AttachReport, Plan, call_library, load, swapped};
use crate::inject::Argument;
use crate::process::Process;

/// System calls of the library's own functions, and of its work in the process's threads afterwards.
pub(super) const CALLS: [(&str, libc::c_long); 14] = [
    ("getpid", libc::SYS_getpid),
    ("gettid", libc::SYS_gettid),
    ("mprotect", libc::SYS_mprotect),
    ("futex", libc::SYS_futex),
    ("memfd_create", libc::SYS_memfd_create),
    ("mmap", libc::SYS_mmap),
    ("munmap", libc::SYS_munmap),
    ("madvise", libc::SYS_madvise),
    ("openat", libc::SYS_openat),
    ("read", libc::SYS_read),
    ("close", libc::SYS_close),
    ("fstat", libc::SYS_fstat),
    ("rt_sigprocmask", libc::SYS_rt_sigprocmask),
    ("clock_gettime", libc::SYS_clock_gettime),
];

/// Loads the library, if it is not there, and has it make the memory, which is empty.
///
/// # Errors
/// Why not. What was done until then is in the report.
pub fn prepare_recorder(
    process: &Process,
    plan: Plan,
    path: &std::path::Path,
    report: &mut AttachReport,
) -> Result<(Plan, OwnedFd), AttachRefusal> {
    report.was_loaded = plan.mapped.is_some();
    let plan = match plan.mapped {
        Some(_) => plan,
        None => load(process, plan, path, report)?,
    };
    let state = call_library(process, &plan, "fragprof_prepare", &[], report)?;
    if state.refused == Some(PassRefused::HasReader) {
        return Err(AttachRefusal::HasReader);
    }
    let number = state.memory_file.ok_or(AttachRefusal::NoMemory)?;
    let path = process.directory().join("fd").join(number.to_string());
    // The process may have closed it, and opened another one with its number.
    let is_ours = std::fs::read_link(&path).is_ok_and(|target| target.as_os_str().as_encoded_bytes().starts_with(b"/memfd:fragprof-ring"));
    if !is_ours {
        return Err(AttachRefusal::NoMemory);
    }
    let file = File::options().read(true).write(true).open(&path).map_err(|_| AttachRefusal::NoMemory)?;
    Ok((plan, file.into()))
}

/// Has the process map the memory, and swap the words. Returns once the reader has admitted the process, which must happen on another thread.
///
/// # Errors
/// Why not.
pub fn begin_recording(process: &Process, plan: &Plan, report: &mut AttachReport) -> Result<(), AttachRefusal> {
    swapped(call_library(process, plan, "fragprof_attach", &[1, 0, 0].map(Argument::Number), report)?)
}
