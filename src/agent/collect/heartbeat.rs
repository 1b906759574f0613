//! The census thread's heartbeat.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A census may take 30 s ([`crate::agent::config::Config::check`]); a thread that is silent for longer hangs.
const SILENCE_MAX: Duration = Duration::from_secs(45);

/// Milliseconds from the start to the census thread's last beat.
#[derive(Debug)]
pub struct Heartbeat {
    started: Instant,
    at_ms: AtomicU64,
}

impl Heartbeat {
    /// Beats now.
    #[must_use]
    pub fn new(started: Instant) -> Self {
        Self { started, at_ms: AtomicU64::new(0) }
    }

    pub(super) fn beat(&self) {
        self.at_ms.store(u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Whether the thread is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.age() < SILENCE_MAX
    }

    /// Time since the last beat.
    #[must_use]
    pub fn age(&self) -> Duration {
        self.started.elapsed().saturating_sub(Duration::from_millis(self.at_ms.load(Ordering::Relaxed)))
    }
}
