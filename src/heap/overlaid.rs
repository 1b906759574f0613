//! Ranges that are mapped anew before they were seen unmapped.
//!
//! Calls are recorded at their end. A thread's `munmap` may have done its work and not reached its end while another thread is handed
//! the same addresses by `mmap`; the order of the records is then the wrong one, and the old range's end must not be taken for the new
//! one's. It shows: the kernel chooses a place only where nothing is mapped, so a mapping that lies where one is still known proves
//! that the known one is gone, and that the record of its end is on its way.

use std::ops::Range;

use super::ranges::RangeMap;

/// How long the end of a call may be on its way: longer than a thread that was preempted in it waits on a busy machine. A record that was
/// lost never comes, and the range's next end is its own.
const ON_ITS_WAY_NS: u64 = 1_000_000_000;
/// Ranges remembered: more threads than that are not between two instructions of the kernel at once.
const RANGES_MAX: usize = 4096;

/// Such ranges, each with the time at which it was mapped anew (CLOCK_MONOTONIC ns).
#[derive(Debug, Clone, Default)]
pub struct Overlaid(RangeMap<u64>);

/// A part of an unmapped range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The part.
    pub range: Range<u64>,
    /// Blocks in it that were born before this are gone, ns.
    pub before_ns: u64,
    /// Whether another mapping is there now.
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
    fn an_end_that_comes_late_ends_only_what_was_there_before() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        let parts = overlaid.unmapped(0x1000..0x4000, 60);
        assert_eq!(parts, [ended(0x1000..0x2000, 60, false), ended(0x2000..0x3000, 50, true), ended(0x3000..0x4000, 60, false)]);
        assert_eq!(overlaid.unmapped(0x1000..0x4000, 70), [ended(0x1000..0x4000, 70, false)], "the second end is the new mapping's");
    }

    #[test]
    fn an_end_that_never_came_does_not_hide_the_next() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x3000, 50);
        let late_ns = 51 + ON_ITS_WAY_NS;
        assert_eq!(overlaid.unmapped(0x1000..0x4000, late_ns), [ended(0x1000..0x4000, late_ns, false)]);
    }

    #[test]
    fn what_lies_elsewhere_stays_on_its_way() {
        let mut overlaid = Overlaid::default();
        overlaid.mapped_anew(0x2000..0x4000, 50);
        assert_eq!(overlaid.unmapped(0x3000..0x5000, 60), [ended(0x3000..0x4000, 50, true), ended(0x4000..0x5000, 60, false)]);
        assert_eq!(overlaid.unmapped(0x2000..0x3000, 61), [ended(0x2000..0x3000, 50, true)]);
    }
}
