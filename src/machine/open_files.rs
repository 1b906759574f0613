//! The limit on open files. A recording needs about fifty, and three more per process; shells and init systems often set a soft limit of 1,024
//! and a hard limit of a million.

use std::io;
use std::sync::OnceLock;

/// Enough for a thousand processes.
const WANTED: u64 = 4096;

/// The limit at start.
static AT_START: OnceLock<libc::rlimit> = OnceLock::new();

/// Raises the limit as far as possible, once. Child processes should get the old limit again: see [`restore_in_child`].
pub fn raise() {
    let Ok(at_start) = read() else { return };
    if AT_START.set(at_start).is_err() {
        return;
    }
    let soft = at_start.rlim_max.max(at_start.rlim_cur);
    // Raising the hard limit needs CAP_SYS_RESOURCE.
    let wide = libc::rlimit { rlim_cur: WANTED, rlim_max: WANTED };
    if soft < WANTED && set(&wide).is_ok() {
        return;
    }
    if let Err(error) = set(&libc::rlimit { rlim_cur: soft, rlim_max: at_start.rlim_max }) {
        tracing::debug!("the limit on open files is unchanged: {error}");
    }
}

/// The present limit.
#[must_use]
pub fn allowed() -> Option<u64> {
    read().ok().map(|limit| limit.rlim_cur)
}

/// Restores the limit at start in a child. Safe between fork and exec.
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
