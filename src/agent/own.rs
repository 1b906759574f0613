//! The agent's own CPU time and memory.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::process::Statm;

/// CPU time of the calling thread.
pub fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Resident bytes of this process.
pub fn own_rss_bytes() -> Option<u64> {
    Statm::of("/proc/self".as_ref()).map(|statm| statm.resident_bytes)
}

/// Longest and shortest time over which a thread's share of a core is measured.
const SHARE_OVER: Duration = Duration::from_secs(60);
const SHARE_OVER_LEAST: Duration = Duration::from_secs(30);

/// A thread's share of a core in the last minute. Pure: times are parameters.
#[derive(Debug, Default)]
pub struct CpuShare {
    looks: VecDeque<(Instant, Duration)>,
}

impl CpuShare {
    /// Adds the thread's CPU time so far, and returns its share of a core, once half a minute is known.
    pub fn look(&mut self, at: Instant, cpu: Duration) -> Option<f64> {
        self.looks.push_back((at, cpu));
        // The newest reading that is old enough stays, so that nearly the whole minute is covered.
        while self.looks.get(1).is_some_and(|(second, _)| at.saturating_duration_since(*second) >= SHARE_OVER) {
            self.looks.pop_front();
        }
        let (since, before) = self.looks.front()?;
        let over = at.saturating_duration_since(*since);
        (over >= SHARE_OVER_LEAST).then(|| cpu.saturating_sub(*before).as_secs_f64() / over.as_secs_f64())
    }

    /// Drops all readings: past use says nothing about future use.
    pub fn begin_anew(&mut self) {
        self.looks.clear();
    }
}

/// Returns freed memory to the system.
pub fn give_back() {
    // SAFETY: glibc's own function, which locks what it touches.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_covers_the_last_minute_and_at_least_half_a_minute() {
        let (began, mut share) = (Instant::now(), CpuShare::default());
        let mut look = |second: u64, cpu_ms: u64| share.look(began + Duration::from_secs(second), Duration::from_millis(cpu_ms));
        assert_eq!((look(0, 900), look(10, 900), look(20, 1000)), (None, None, None), "too short");
        assert_eq!(look(40, 1300), Some(0.01));
        assert_eq!(look(50, 1400), Some(0.01));
        // From the reading at 50 s on.
        assert_eq!(look(110, 1400), Some(0.0));
        share.begin_anew();
        assert_eq!(share.look(began + Duration::from_secs(200), Duration::from_secs(2)), None);
    }
}
