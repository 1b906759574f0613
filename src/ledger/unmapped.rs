//! Ranges that were unmapped and whose blocks have not been removed from the ledger yet.
//!
//! Nearly every range that an allocator unmaps is empty: its blocks were freed just before. Searching each for blocks would cost more than
//! all other events together, so ranges are collected and searched in one sweep, before the ledger is read.

use std::ops::Range;

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

    /// Adds a range, replacing earlier ones: a block allocated before the earlier time was also allocated before the later one.
    pub(super) fn add(&mut self, start: u64, end: u64, tick: u64) {
        self.0.insert(start..end, tick);
    }

    /// Whether a block allocated at `birth_tick` was unmapped with a range.
    #[inline]
    pub(super) fn covers(&self, addr: u64, birth_tick: u64) -> bool {
        self.0.get(addr).is_some_and(|(_, tick)| birth_tick < tick)
    }

    /// A filter for a sweep over all blocks.
    pub(super) fn filter(&self) -> Filter {
        let mut filter = Filter { bits: vec![0; FILTER_WORDS] };
        for (range, _) in self.0.iter() {
            filter.add(range);
        }
        filter
    }
}

/// The filter works on addresses in units of 64 KiB, with a bit for each unit, modulo 2^18: 32 KiB, which stays in the cache.
const FILTER_UNIT_SHIFT: u32 = 16;
const FILTER_WORDS: usize = 1 << 12;
const FILTER_UNITS: u64 = FILTER_WORDS as u64 * 64;

/// Rejects nearly every block outside unmapped ranges, at the cost of testing one bit.
pub(super) struct Filter {
    bits: Vec<u64>,
}

impl Filter {
    fn add(&mut self, range: Range<u64>) {
        let (first, last) = (range.start >> FILTER_UNIT_SHIFT, (range.end - 1) >> FILTER_UNIT_SHIFT);
        // A range of 16 GiB and more covers all units.
        for unit in first..=last.min(first + FILTER_UNITS - 1) {
            let (word, bit) = Self::place(unit);
            self.bits[word] |= bit;
        }
    }

    /// Whether an address may lie in a range.
    #[inline]
    pub(super) fn may_cover(&self, addr: u64) -> bool {
        let (word, bit) = Self::place(addr >> FILTER_UNIT_SHIFT);
        self.bits[word] & bit != 0
    }

    #[inline]
    fn place(unit: u64) -> (usize, u64) {
        ((unit / 64) as usize % FILTER_WORDS, 1 << (unit % 64))
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
    }

    #[test]
    fn the_filter_passes_every_address_of_every_range_and_few_others() {
        let mut ranges = UnmappedRanges::default();
        let starts = [0x1000, 0x7f00_0000_f000, 0x5555_0000_0000];
        for start in starts {
            ranges.add(start, start + 0x12000, 1);
        }
        let filter = ranges.filter();
        for start in starts {
            assert!((start..start + 0x12000).step_by(16).all(|addr| filter.may_cover(addr)));
        }
        let others = (0..10_000_u64).filter(|n| filter.may_cover(0x6000_0000_0000 + n * 0x10000)).count();
        assert!(others < 10, "{others}");
        ranges.add(0, u64::MAX, 2);
        assert!(ranges.filter().may_cover(0x1234_5678_9abc));
    }
}
