//! Signals to stop: the first one ends the work in an orderly way, a later one ends the command at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Context as _;
use rustix::time::{ClockId, clock_gettime};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level;

/// Signals within this time count as one request: `timeout -s INT` signals the command and then its whole process group, and the profile
/// must not be lost because of that.
const ONE_REQUEST_MS: u64 = 500;

/// Set by SIGINT, SIGTERM and SIGHUP. Another one half a second later or more ends the command at once, as by default.
///
/// # Errors
/// If the handlers cannot be installed.
pub fn stop_flag() -> anyhow::Result<Arc<AtomicBool>> {
    stop_flag_or_end_of(&Arc::default())
}

/// As [`stop_flag`], but while `waits` is set a signal clears it instead: it ends a wait, and not the command.
///
/// # Errors
/// If the handlers cannot be installed.
pub fn stop_flag_or_end_of(waits: &Arc<AtomicBool>) -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let first_ms = Arc::new(AtomicU64::new(0));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let (stop, first_ms, waits) = (Arc::clone(&stop), Arc::clone(&first_ms), Arc::clone(waits));
        let heard = move || {
            let now_ms = monotonic_ms();
            match first_ms.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if waits.swap(false, Ordering::Relaxed) => {}
                Ok(_) => stop.store(true, Ordering::Relaxed),
                Err(first_ms) if now_ms.saturating_sub(first_ms) < ONE_REQUEST_MS => {}
                Err(_) if waits.swap(false, Ordering::Relaxed) => {}
                // It fails only for signals that have no default.
                Err(_) => drop(low_level::emulate_default_handler(signal)),
            }
        };
        // SAFETY: the handler reads a clock, works on atomics and may end the process: all of it is async-signal-safe
        // (signal-safety(7)); it allocates nothing, locks nothing and does not panic.
        unsafe { low_level::register(signal, heard) }.context("cannot install signal handlers")?;
    }
    Ok(stop)
}

/// Milliseconds of the monotonic clock, never 0.
fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000).max(1)
}
