//! Ranges that are mapped again before their unmapping was recorded.
//!
//! Calls are recorded when they return. A thread's `munmap` may have done its work without having returned when another thread gets the
//! same addresses from `mmap`; the records are then in the wrong order, and the end of the old mapping must not be mistaken for that of the
//! new one. This can be detected: the kernel only chooses unmapped addresses, so a mapping that overlaps a known one proves that the known
//! one was removed, and that its record is still to come. A range can change hands several times before the first record arrives.

use std::ops::Range;

use super::ranges::RangeMap;

/// How long the return of a call may be delayed: longer than a thread waits on a busy machine or for its next CPU quota. If the record was lost, the
/// range's next end is its own.
const ON_ITS_WAY_NS: u64 = 10_000_000_000;
/// Most ranges kept: no more threads than that are in this state at once.
const RANGES_MAX: usize = 4096;

/// Records of ends that are still to come for a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pending {
    records: u32,
    /// When the range was mapped again last, CLOCK_MONOTONIC ns.
    latest_ns: u64,
}

impl Pending {
    fn is_stale(self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.latest_ns) > ON_ITS_WAY_NS
    }
}

/// Ranges whose end is still to be recorded, although they are mapped again.
#[derive(Debug, Clone, Default)]
pub struct Overlaid(RangeMap<Pending>);

/// A part of a range whose end was recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The part.
    pub range: Range<u64>,
    /// Whether it had been mapped again before: what lies there now is another mapping.
    pub mapped_anew: bool,
}

impl Overlaid {
    /// The kernel chose a range for a mapping at `time_ns`, although `known` lies in it.
    pub fn mapped_anew(&mut self, known: Range<u64>, time_ns: u64) {
        if self.0.len() >= RANGES_MAX {
            return;
        }
        let mut before = Vec::new();
        self.0.cut(known.clone(), |piece, pending| before.push((piece, pending)));
        self.0.insert(known, Pending { records: 1, latest_ns: time_ns });
        for (piece, pending) in before.into_iter().filter(|(_, pending)| !pending.is_stale(time_ns)) {
            self.0.insert(piece, Pending { records: pending.records.saturating_add(1), latest_ns: time_ns });
        }
    }

    /// `range` was seen to end at `time_ns`: its parts, by address.
    pub fn ended(&mut self, range: Range<u64>, time_ns: u64) -> Vec<Ended> {
        let last = |range| Ended { range, mapped_anew: false };
        if self.0.is_empty() {
            return vec![last(range)];
        }
        let mut parts = Vec::new();
        let mut still = Vec::new();
        let mut from = range.start;
        self.0.cut(range.clone(), |piece, pending| {
            if pending.is_stale(time_ns) {
                return;
            }
            if from < piece.start {
                parts.push(last(from..piece.start));
            }
            from = piece.end;
            if pending.records > 1 {
                still.push((piece.clone(), Pending { records: pending.records - 1, ..pending }));
            }
            parts.push(Ended { range: piece, mapped_anew: true });
        });
        for (piece, pending) in still {
            self.0.insert(piece, pending);
        }
        if from < range.end {
            parts.push(last(from..range.end));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(range: Range<u64>) -> Ended {
        Ended { range, mapped_anew: false }
    }

    fn late(range: Range<u64>) -> Ended {
        Ended { range, mapped_anew: true }
    }

    #[test]
    fn a_late_end_is_not_that_of_the_new_mapping() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        assert_eq!(overlaid.ended(0x1000..0x4000, 60), [last(0x1000..0x2000), late(0x2000..0x3000), last(0x3000..0x4000)]);
        assert_eq!(overlaid.ended(0x1000..0x4000, 70), [last(0x1000..0x4000)], "the second end is the new mapping's");
    }

    #[test]
    fn each_mapping_that_was_mapped_over_has_an_end_to_come() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x4000, 50);
        overlaid.mapped_anew(0x3000..0x5000, 55);
        assert_eq!(overlaid.ended(0x2000..0x4000, 60), [late(0x2000..0x3000), late(0x3000..0x4000)]);
        assert_eq!(overlaid.ended(0x2000..0x5000, 61), [last(0x2000..0x3000), late(0x3000..0x4000), late(0x4000..0x5000)]);
        assert_eq!(overlaid.ended(0x2000..0x5000, 62), [last(0x2000..0x5000)]);
    }

    #[test]
    fn a_lost_end_does_not_hide_the_next() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        assert_eq!(overlaid.ended(0x1000..0x4000, 51 + ON_ITS_WAY_NS), [last(0x1000..0x4000)]);
    }

    #[test]
    fn other_ranges_stay_pending() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x4000, 50);
        assert_eq!(overlaid.ended(0x3000..0x5000, 60), [late(0x3000..0x4000), last(0x4000..0x5000)]);
        assert_eq!(overlaid.ended(0x2000..0x3000, 61), [late(0x2000..0x3000)]);
    }
}
