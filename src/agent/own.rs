//! The agent's own processor time and memory.

use std::time::Duration;

use crate::heap::residency::PAGE_BYTES;
use crate::target::process::read_bounded;

/// Bytes read of `/proc/self/statm`.
const STATM_BYTES_MAX: u64 = 256;

/// Processor time of the calling thread.
pub fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Resident bytes of this process: the second number of `/proc/self/statm`, in pages.
pub fn own_rss_bytes() -> Option<u64> {
    let bytes = read_bounded("/proc/self/statm".as_ref(), STATM_BYTES_MAX).ok()?;
    let pages: u64 = std::str::from_utf8(&bytes).ok()?.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages.saturating_mul(PAGE_BYTES))
}

/// Hands freed memory back to the system.
pub fn give_back() {
    // SAFETY: glibc's own function, which locks what it touches.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
