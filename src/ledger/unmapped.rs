//! Ranges that were unmapped and whose blocks have not been taken out of the books yet.
//!
//! Nearly every range that an allocator unmaps is empty: its blocks were freed just before. Looking for blocks in each would cost
//! more than all other events together, so ranges are gathered and looked for in one sweep, before anybody reads the ledger.

use crate::heap::ranges::RangeMap;

/// Ranges gathered before a sweep is forced: 65,536 × about 60 bytes = 4 MiB.
const RANGES_MAX: usize = 1 << 16;

/// Disjoint ranges, each with the last tick at which it was unmapped.
#[derive(Debug, Clone, Default)]
pub(super) struct UnmappedRanges(RangeMap<u64>);

impl UnmappedRanges {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.0.len() >= RANGES_MAX
    }

    /// Adds a range, over those that were there: a block born before the earlier time was also born before the later.
    pub(super) fn add(&mut self, start: u64, end: u64, tick: u64) {
        self.0.insert(start..end, tick);
    }

    /// Whether a block that was born at `birth_tick` went with a range.
    #[inline]
    pub(super) fn covers(&self, addr: u64, birth_tick: u64) -> bool {
        self.0.get(addr).is_some_and(|(_, tick)| birth_tick < tick)
    }

    /// First and last address of all ranges together.
    pub(super) fn bounds(&self) -> (u64, u64) {
        let first = self.0.iter().next().map_or(0, |(range, _)| range.start);
        let last = self.0.iter().next_back().map_or(0, |(range, _)| range.end);
        (first, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_counts_is_the_last_at_which_an_address_was_unmapped() {
        let mut ranges = UnmappedRanges::default();
        ranges.add(100, 200, 10);
        ranges.add(140, 160, 20);
        assert!(ranges.covers(100, 9));
        assert!(!ranges.covers(139, 10));
        assert!(ranges.covers(140, 19));
        assert!(!ranges.covers(160, 10));
        assert!(!ranges.covers(200, 0));
        assert_eq!(ranges.bounds(), (100, 200));
    }
}
