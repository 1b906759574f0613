//! How many files this process may have open. A recording takes about fifty, and three more for each process; shells and init systems often
//! allow 1,024 at first and a million on request.

use std::io;
use std::sync::OnceLock;

/// Enough for a thousand processes.
const WANTED: u64 = 4096;

/// The limit with which this process was started.
static AT_START: OnceLock<libc::rlimit> = OnceLock::new();

/// Allows as many as may be allowed, once. What is started from here should have the old limit again: see [`restore_in_child`].
pub fn raise() {
    let Ok(at_start) = read() else { return };
    if AT_START.set(at_start).is_err() {
        return;
    }
    let soft = at_start.rlim_max.max(at_start.rlim_cur);
    // Above the hard limit only with CAP_SYS_RESOURCE.
    let wide = libc::rlimit { rlim_cur: WANTED, rlim_max: WANTED };
    if soft < WANTED && set(&wide).is_ok() {
        return;
    }
    if let Err(error) = set(&libc::rlimit { rlim_cur: soft, rlim_max: at_start.rlim_max }) {
        tracing::debug!("the limit of open files stays: {error}");
    }
}

/// Files that may be open now.
#[must_use]
pub fn allowed() -> Option<u64> {
    read().ok().map(|limit| limit.rlim_cur)
}

/// Gives a child the limit with which this process was started. May be called between fork and exec.
///
/// # Errors
/// The system's.
pub fn restore_in_child() -> io::Result<()> {
    AT_START.get().map_or(Ok(()), set)
}

fn read() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes into a local.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    if result == 0 { Ok(limit) } else { Err(io::Error::last_os_error()) }
}

fn set(limit: &libc::rlimit) -> io::Result<()> {
    // SAFETY: reads a struct that outlives the call.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
