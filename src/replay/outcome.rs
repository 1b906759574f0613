//! What a replay measured: memory over time, censuses, figures of the player. Pure.

use std::time::Duration;

use super::player::Counts;
use crate::census::Census;
use crate::heap::ladder::Ladder;

/// A sample of the process's anonymous memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// When, on the clock of the events, nanoseconds.
    pub time_ns: u64,
    /// Anonymous memory in bytes.
    pub bytes: u64,
}

/// The heap at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// When, on the clock of the events, nanoseconds.
    pub time_ns: u64,
    /// Its ladder by the census; `None` if the allocator's data cannot be read.
    pub ladder: Option<Ladder>,
    /// The process's anonymous memory at that time.
    pub anonymous_bytes: u64,
}

/// What a replay measured.
#[derive(Debug, Clone, Default)]
pub struct Replay {
    /// Samples by time, of anonymous memory.
    pub samples: Vec<Sample>,
    /// Censuses by time.
    pub moments: Vec<Moment>,
    /// Anonymous memory that is not the heap's.
    pub other_bytes: u64,
    /// The player's figures.
    pub counts: Counts,
    /// Bytes requested by the live blocks at the end.
    pub requested_bytes: u64,
    /// Wall-clock time of the replay.
    pub took: Duration,
    /// Pinned bytes by stack, the most first, if that was requested and the allocator's chunks are known.
    pub pinned: Vec<(u32, u64)>,
    /// The census at the time of the look at the stacks, if it was requested and is usable.
    pub census: Option<Census>,
    /// Why it ended early.
    pub stopped: Option<String>,
}

impl Replay {
    /// Resident bytes of the heap over time: the anonymous memory without what was not the heap's at the start. It includes the allocator's
    /// own data.
    #[must_use]
    pub fn resident(&self) -> Vec<Sample> {
        let heap = |sample: &Sample| Sample { time_ns: sample.time_ns, bytes: sample.bytes.saturating_sub(self.other_bytes) };
        self.samples.iter().map(heap).collect()
    }

    /// The same as the censuses count it, some of which know an allocator's extents and not its own data.
    #[must_use]
    pub fn resident_by_census(&self) -> Vec<Sample> {
        let others: Vec<Sample> = self
            .moments
            .iter()
            .filter_map(|moment| {
                let bytes = moment.anonymous_bytes.saturating_sub(moment.ladder?.resident_bytes);
                Some(Sample { time_ns: moment.time_ns, bytes })
            })
            .collect();
        if others.is_empty() {
            return self.resident();
        }
        let other = |time_ns| interpolated(&others, time_ns);
        let heap = |sample: &Sample| Sample { time_ns: sample.time_ns, bytes: sample.bytes.saturating_sub(other(sample.time_ns)) };
        self.samples.iter().map(heap).collect()
    }
}

/// The value at a time between samples; before the first and after the last, theirs. 0 if there are none.
#[must_use]
pub fn interpolated(samples: &[Sample], time_ns: u64) -> u64 {
    let after = samples.partition_point(|sample| sample.time_ns < time_ns);
    match (after.checked_sub(1).and_then(|before| samples.get(before)), samples.get(after)) {
        (Some(before), Some(after)) => {
            let span = (after.time_ns - before.time_ns).max(1) as f64;
            let share = (time_ns - before.time_ns) as f64 / span;
            (before.bytes as f64 + (after.bytes as f64 - before.bytes as f64) * share) as u64
        }
        (Some(one), None) | (None, Some(one)) => one.bytes,
        (None, None) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_between_samples_are_interpolated_and_those_outside_are_the_nearest() {
        let samples = [Sample { time_ns: 10, bytes: 100 }, Sample { time_ns: 20, bytes: 200 }];
        let at = |time_ns| interpolated(&samples, time_ns);
        assert_eq!((at(0), at(10), at(15), at(20), at(99)), (100, 100, 150, 200, 200));
        assert_eq!(interpolated(&[], 5), 0);
    }

    #[test]
    fn the_heap_is_the_anonymous_memory_without_what_a_census_leaves() {
        let ladder = Ladder { resident_bytes: 70, ..Ladder::default() };
        let moments = vec![Moment { time_ns: 5, ladder: Some(ladder), anonymous_bytes: 100 }];
        let samples = vec![Sample { time_ns: 1, bytes: 90 }];
        let by_census = Replay { samples, moments, other_bytes: 10, ..Replay::default() };
        assert_eq!(by_census.resident_by_census(), [Sample { time_ns: 1, bytes: 60 }]);
        let without = Replay { moments: Vec::new(), ..by_census };
        assert_eq!(without.resident_by_census(), [Sample { time_ns: 1, bytes: 80 }]);
        assert_eq!(without.resident(), [Sample { time_ns: 1, bytes: 80 }]);
    }
}
