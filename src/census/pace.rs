//! The pace and the time limit of a walk.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes read by all walks of this process, for progress lines.
static READ_BYTES: AtomicU64 = AtomicU64::new(0);

/// Bytes that all walks of this process have read so far.
#[must_use]
pub fn read_bytes() -> u64 {
    READ_BYTES.load(Ordering::Relaxed)
}

/// A walk's limits.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Bytes read at once. The target's mmap lock is held for reading meanwhile; above 256 KiB mmap-heavy targets lose twice as much.
    pub window_bytes: usize,
    /// Pause after each MiB read, for latency-sensitive targets. A slow walk drifts more, but stays correct.
    pub pause_per_mib: Duration,
    /// Time limit; the rest counts as unread.
    pub duration_max: Duration,
    /// Windows of 64 KiB that a sample takes: their error falls with the root of their number.
    pub sample_windows: u64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { window_bytes: 256 << 10, pause_per_mib: Duration::ZERO, duration_max: Duration::from_secs(60), sample_windows: 400 }
    }
}

/// Counts what was read, sleeps and watches the clock.
#[derive(Debug, Clone)]
pub struct Pacer {
    pace: Pace,
    started: Instant,
    since_pause_bytes: u64,
    /// Windows read.
    pub windows: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

impl Pacer {
    /// Starts the clock.
    #[must_use]
    pub fn start(pace: Pace) -> Self {
        Self { pace, started: Instant::now(), since_pause_bytes: 0, windows: 0, read_bytes: 0 }
    }

    /// The window's size in bytes: at least 16 KiB, at most 1 MiB, whole pages.
    #[must_use]
    pub fn window_bytes(&self) -> usize {
        self.pace.window_bytes.clamp(16 << 10, 1 << 20) & !4095
    }

    /// Windows that a sample takes.
    #[must_use]
    pub fn sample_windows(&self) -> u64 {
        self.pace.sample_windows
    }

    /// Notes a read and pauses if it is time to.
    pub fn read(&mut self, bytes: u64) {
        self.windows += 1;
        self.read_bytes = self.read_bytes.saturating_add(bytes);
        READ_BYTES.fetch_add(bytes, Ordering::Relaxed);
        if self.pace.pause_per_mib.is_zero() {
            return;
        }
        self.since_pause_bytes = self.since_pause_bytes.saturating_add(bytes);
        if self.since_pause_bytes >= 1 << 20 {
            self.since_pause_bytes = 0;
            std::thread::sleep(self.pace.pause_per_mib);
        }
    }

    /// Whether the time is up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.started.elapsed() >= self.pace.duration_max
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}
