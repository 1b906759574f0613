//! How the rate of calls went over a recording: whether a whole cycle of the load, with its quiet part, is in it. Pure.

use crate::trace::TICK_NS;

/// Slices in memory at most. When there are more, pairs are joined.
const SLICES_MAX: usize = 256;
/// Parts of the recording that are compared.
const PARTS: usize = 32;
/// Parts of one level in a row that count: shorter ones are noise.
const PARTS_MIN: usize = 2;

/// Calls over time, in slices of one length.
#[derive(Debug, Clone)]
pub struct Load {
    began_ns: u64,
    slice_ns: u64,
    events: Vec<u64>,
}

impl Default for Load {
    fn default() -> Self {
        Self::from(0)
    }
}

impl Load {
    /// Nothing yet, from this time on.
    #[must_use]
    pub fn from(began_ns: u64) -> Self {
        Self { began_ns, slice_ns: TICK_NS, events: Vec::new() }
    }

    /// Counts an event; times do not run backwards.
    pub fn add(&mut self, time_ns: u64) {
        let since_ns = time_ns.saturating_sub(self.began_ns);
        while since_ns / self.slice_ns >= SLICES_MAX as u64 {
            self.events = self.events.chunks(2).map(|pair| pair.iter().sum()).collect();
            self.slice_ns = self.slice_ns.saturating_mul(2);
        }
        let slice = (since_ns / self.slice_ns) as usize;
        if self.events.len() <= slice {
            self.events.resize(slice + 1, 0);
        }
        if let Some(events) = self.events.get_mut(slice) {
            *events += 1;
        }
    }

    /// Events of equal parts of the time up to the end.
    fn parts(&self, ended_ns: u64) -> Vec<u64> {
        let slices = (ended_ns.saturating_sub(self.began_ns) / self.slice_ns).saturating_add(1) as u128;
        let mut parts = vec![0; PARTS];
        for (slice, events) in self.events.iter().enumerate() {
            let part = (slice as u128 * PARTS as u128 / slices) as usize;
            if let Some(sum) = parts.get_mut(part) {
                *sum += events;
            }
        }
        parts
    }

    /// How often the load changed between busy and quiet: two changes are a whole cycle. A load that is never below half of its usual top is
    /// busy all the time.
    #[must_use]
    pub fn changes(&self, ended_ns: u64) -> usize {
        let parts = self.parts(ended_ns);
        let mut sorted = parts.clone();
        sorted.sort_unstable();
        // Without the outermost two on each side: a start that loads everything, or a pause, is no load.
        let (Some(&low), Some(&high)) = (sorted.get(PARTS_MIN), sorted.get(PARTS - 1 - PARTS_MIN)) else { return 0 };
        if low > high / 2 {
            return 0;
        }
        let is_busy: Vec<bool> = parts.iter().map(|&events| events > low.midpoint(high)).collect();
        let runs: Vec<bool> = is_busy.chunk_by(|a, b| a == b).filter(|run| run.len() >= PARTS_MIN).map(|run| run[0]).collect();
        runs.chunk_by(|a, b| a == b).count().saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load of so many events in each of equal times.
    fn load(events: &[u64]) -> (Load, u64) {
        let (mut load, part_ns) = (Load::from(1_000), 40_000_000);
        for (part, &count) in events.iter().enumerate() {
            for event in 0..count {
                load.add(1_000 + part as u64 * part_ns + event * part_ns / count);
            }
        }
        (load, 1_000 + events.len() as u64 * part_ns)
    }

    fn changes(events: &[u64]) -> usize {
        let (load, ended_ns) = load(events);
        load.changes(ended_ns)
    }

    #[test]
    fn a_load_that_falls_and_rises_again_has_a_whole_cycle() {
        assert_eq!(changes(&[100, 100, 10, 10, 100, 100]), 2);
        assert_eq!(changes(&[10, 10, 100, 100, 10, 10]), 2);
        assert_eq!(changes(&[100, 10, 100, 10, 100]), 4);
        // Half of one.
        assert_eq!(changes(&[100, 100, 100, 10, 10, 10]), 1);
    }

    #[test]
    fn a_steady_load_a_single_burst_and_no_load_have_none() {
        assert_eq!(changes(&[100; 40]), 0);
        assert_eq!(changes(&[70, 100, 80, 90, 70, 100, 85]), 0);
        let mut burst = vec![50; 64];
        burst[30] = 5000;
        assert_eq!(changes(&burst), 0);
        assert_eq!(Load::default().changes(0), 0);
    }

    #[test]
    fn times_of_any_distance_take_bounded_memory() {
        let mut load = Load::from(0);
        for time_ns in [0, 5, 1 << 20, 1 << 40, u64::MAX / 2, u64::MAX] {
            load.add(time_ns);
        }
        assert!(load.events.len() <= SLICES_MAX);
        assert_eq!(load.events.iter().sum::<u64>(), 6);
        assert!(load.changes(u64::MAX) <= PARTS);
        assert_eq!(Load::from(9).changes(0), 0);
    }
}
