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
    /// Threads that read at once, where the reader of an allocator can use several; 1 with a pause.
    pub threads: usize,
}

/// Threads of a command that somebody waits for: with more, the memory of the target is the limit.
const COMMAND_THREADS_MAX: usize = 2;

impl Pace {
    /// The pace of a command that somebody waits for, with its option of a pause in milliseconds.
    #[must_use]
    pub fn of_command(pause_ms: u64) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(COMMAND_THREADS_MAX);
        Self { pause_per_mib: Duration::from_millis(pause_ms), threads, ..Self::default() }
    }
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            window_bytes: 256 << 10,
            pause_per_mib: Duration::ZERO,
            duration_max: Duration::from_secs(60),
            sample_windows: 400,
            threads: 1,
        }
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

    /// Threads that may read at once.
    #[must_use]
    pub fn threads(&self) -> usize {
        if self.pace.pause_per_mib.is_zero() { self.pace.threads.max(1) } else { 1 }
    }

    /// The same limits for another thread, which counts for itself.
    #[must_use]
    pub fn of_thread(&self) -> Self {
        Self { since_pause_bytes: 0, windows: 0, read_bytes: 0, ..self.clone() }
    }

    /// Adds what another thread read.
    pub fn add(&mut self, other: &Self) {
        self.windows += other.windows;
        self.read_bytes = self.read_bytes.saturating_add(other.read_bytes);
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
