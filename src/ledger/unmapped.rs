//! Ranges that were unmapped and whose blocks have not been taken out of the books yet.
//!
//! Nearly every range that an allocator unmaps is empty: its blocks were freed just before. Looking for blocks in each would cost
//! more than all other events together, so ranges are gathered and looked for in one sweep, before anybody reads the ledger.

use std::collections::BTreeMap;

/// Ranges gathered before a sweep is forced: 65,536 × about 60 bytes = 4 MiB.
const RANGES_MAX: usize = 1 << 16;

/// Disjoint ranges, each with the last time at which it was unmapped.
#[derive(Debug, Clone, Default)]
pub(super) struct UnmappedRanges {
    /// start → (end, tick).
    ranges: BTreeMap<u64, (u64, u64)>,
}

impl UnmappedRanges {
    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.ranges.len() >= RANGES_MAX
    }

    pub(super) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Adds a range, over those that were there: a block born before the earlier time was also born before the later.
    pub(super) fn add(&mut self, start: u64, end: u64, tick: u64) {
        if start >= end {
            return;
        }
        if let Some((&left, &(left_end, left_tick))) = self.ranges.range(..start).next_back()
            && left_end > start
        {
            self.ranges.insert(left, (start, left_tick));
            if left_end > end {
                self.ranges.insert(end, (left_end, left_tick));
            }
        }
        while let Some((&inner, &(inner_end, inner_tick))) = self.ranges.range(start..end).next() {
            self.ranges.remove(&inner);
            if inner_end > end {
                self.ranges.insert(end, (inner_end, inner_tick));
            }
        }
        self.ranges.insert(start, (end, tick));
    }

    /// Whether a block that was born at `birth_tick` went with a range.
    #[inline]
    pub(super) fn covers(&self, addr: u64, birth_tick: u64) -> bool {
        self.ranges.range(..=addr).next_back().is_some_and(|(_, &(end, tick))| addr < end && birth_tick < tick)
    }

    /// First and last address of all ranges together.
    pub(super) fn bounds(&self) -> (u64, u64) {
        let first = self.ranges.first_key_value().map_or(0, |(&start, _)| start);
        let last = self.ranges.last_key_value().map_or(0, |(_, &(end, _))| end);
        (first, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_range_replaces_the_part_of_an_earlier_one_that_it_covers() {
        let mut ranges = UnmappedRanges::default();
        ranges.add(100, 200, 10);
        ranges.add(140, 160, 20);
        assert!(ranges.covers(100, 9));
        assert!(!ranges.covers(139, 10));
        assert!(ranges.covers(140, 19));
        assert!(ranges.covers(159, 10));
        assert!(!ranges.covers(160, 10));
        assert!(ranges.covers(199, 9));
        assert!(!ranges.covers(200, 0));
        ranges.add(50, 300, 30);
        assert!(ranges.covers(199, 29));
        assert_eq!(ranges.bounds(), (50, 300));
    }
}
