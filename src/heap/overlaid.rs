//! Ranges that are mapped again before their unmapping was recorded.
//!
//! Calls are recorded when they return. A thread's `munmap` may have done its work without having returned when another thread gets the
//! same addresses from `mmap`; the records are then in the wrong order, and the end of the old mapping must not be mistaken for that of the
//! new one. This can be detected: the kernel only chooses unmapped addresses, so a mapping that overlaps a known one proves that the known
//! one was removed, and that its record is still to come.

use std::ops::Range;

use super::ranges::RangeMap;

/// How long the return of a call may be delayed: longer than a preempted thread waits on a busy machine. If the record was lost, the
/// range's next end is its own.
const ON_ITS_WAY_NS: u64 = 1_000_000_000;
/// Most ranges kept: no more threads than that are in this state at once.
const RANGES_MAX: usize = 4096;

/// Such ranges, each with the time at which it was mapped again (CLOCK_MONOTONIC ns).
#[derive(Debug, Clone, Default)]
pub struct Overlaid(RangeMap<u64>);

/// A part of an unmapped range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The part.
    pub range: Range<u64>,
    /// Blocks in it that were allocated before this time, in ns, no longer exist.
    pub before_ns: u64,
    /// Whether the range is mapped again.
    pub mapped_anew: bool,
}

impl Overlaid {
    /// The kernel chose `range` for a mapping at `time_ns`, although `known` lies in it.
    pub fn mapped_anew(&mut self, known: Range<u64>, time_ns: u64) {
        if self.0.len() < RANGES_MAX {
            self.0.insert(known, time_ns);
        }
    }

    /// `range` was seen unmapped at `time_ns`: its parts, by address.
    pub fn unmapped(&mut self, range: Range<u64>, time_ns: u64) -> Vec<Ended> {
        let whole = |range| Ended { range, before_ns: time_ns, mapped_anew: false };
        if self.0.is_empty() {
            return vec![whole(range)];
        }
        let mut parts = Vec::new();
        let mut from = range.start;
        self.0.cut(range.clone(), |piece, anew_ns| {
            if time_ns.saturating_sub(anew_ns) > ON_ITS_WAY_NS {
                return;
            }
            if from < piece.start {
                parts.push(whole(from..piece.start));
            }
            from = piece.end;
            parts.push(Ended { range: piece, before_ns: anew_ns, mapped_anew: true });
        });
        if from < range.end {
            parts.push(whole(from..range.end));
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(range: Range<u64>, before_ns: u64, mapped_anew: bool) -> Ended {
        Ended { range, before_ns, mapped_anew }
    }

    #[test]
    fn a_late_end_ends_only_earlier_blocks() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        let parts = overlaid.unmapped(0x1000..0x4000, 60);
        assert_eq!(parts, [ended(0x1000..0x2000, 60, false), ended(0x2000..0x3000, 50, true), ended(0x3000..0x4000, 60, false)]);
        assert_eq!(overlaid.unmapped(0x1000..0x4000, 70), [ended(0x1000..0x4000, 70, false)], "the second end is the new mapping's");
    }

    #[test]
    fn a_lost_end_does_not_hide_the_next() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        let late_ns = 51 + ON_ITS_WAY_NS;
        assert_eq!(overlaid.unmapped(0x1000..0x4000, late_ns), [ended(0x1000..0x4000, late_ns, false)]);
    }

    #[test]
    fn other_ranges_stay_pending() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x4000, 50);
        assert_eq!(overlaid.unmapped(0x3000..0x5000, 60), [ended(0x3000..0x4000, 50, true), ended(0x4000..0x5000, 60, false)]);
        assert_eq!(overlaid.unmapped(0x2000..0x3000, 61), [ended(0x2000..0x3000, 50, true)]);
    }
}
