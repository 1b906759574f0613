//! One walk over a heap: sums by range, and pinned bytes by stack.

use super::pinned::PinnedSpace;
use crate::allocator::footprint::Footprint;
use crate::heap::extents::{Coverage, Extents, HeapRange};
use crate::heap::ladder::Ladder;
use crate::heap::pages::{Misfits, PageStates, PageSums, Span, visit_pages};
use crate::ledger::Ledger;

/// What a walk over all pages of a heap found.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// The ranges, by address, each with its sums. A huge page that spans ranges counts in the one where it begins.
    pub ranges: Vec<(HeapRange, PageSums)>,
    /// The sums of all ranges.
    pub sums: PageSums,
    /// Pinned bytes by stack.
    pub pinned: PinnedSpace,
    /// Inconsistencies between ranges, spans and pages.
    pub misfits: Misfits,
}

impl Survey {
    /// Walks a heap. Ranges and spans are sorted by address.
    pub fn new(ranges: &[HeapRange], spans: impl IntoIterator<Item = Span>, states: &impl PageStates) -> Self {
        let mut survey = Self { ranges: ranges.iter().map(|range| (range.clone(), PageSums::default())).collect(), ..Self::default() };
        let mut index = 0;
        survey.misfits = visit_pages(ranges, spans, states, |page| {
            while survey.ranges.get(index).is_some_and(|(range, _)| range.range.end <= page.start) {
                index += 1;
            }
            if let Some((_, sums)) = survey.ranges.get_mut(index) {
                sums.add(page);
            }
            survey.sums.add(page);
            survey.pinned.add(page);
        });
        survey
    }

    /// Surveys a heap as a ledger knows it. `states` is called once, for the page states of the heap's ranges.
    ///
    /// If records were lost, no gap between blocks is known to be free: all of them count as unknown.
    pub fn of_ledger<S: PageStates>(
        ledger: &mut Ledger,
        extents: &Extents,
        footprint: Footprint,
        states: impl FnOnce(&[HeapRange]) -> S,
    ) -> Self {
        ledger.settle();
        let blocks = ledger.sorted_blocks(|_| true);
        let footprint = footprint.seen_in(blocks.iter());
        let mut ranges = extents.heap_ranges(blocks.iter().map(|block| block.addr.0));
        if ledger.is_lossy() {
            ranges.iter_mut().for_each(|range| range.coverage = Coverage::Partial);
        }
        let states = states(&ranges);
        Self::new(&ranges, blocks.iter().map(|block| footprint.span(&block)), &states)
    }

    /// The heap's ladder. Bytes that may be live or free leave open what a trim would release.
    pub fn ladder(&self) -> Ladder {
        let sums = &self.sums;
        Ladder {
            extent_bytes: sums.extent_bytes,
            resident_bytes: sums.resident_bytes,
            live_bytes: Some(sums.live_bytes),
            trimmable_bytes: (sums.resident_unknown_bytes == 0).then_some(sums.trimmable_bytes),
            pinned_bytes: Some(sums.pinned_bytes),
            unknown_bytes: Some(sums.resident_unknown_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::extents::{RegionKind, VmEvent};
    use crate::heap::pages::{AllResident, Owner};
    use crate::ledger::{Event, StackLimits};
    use crate::units::{Addr, StackHash, StackId};

    #[test]
    fn each_range_has_its_own_sums_and_together_they_are_the_heaps() {
        let range = |range, coverage| HeapRange { range, kind: RegionKind::Anonymous, coverage };
        let ranges = [
            range(0x1000..0x3000, Coverage::Complete),
            range(0x3000..0x4000, Coverage::Partial),
            range(0x9000..0xa000, Coverage::Complete),
        ];
        let live = |start, bytes| Span { start, bytes, owner: Owner::Stack(StackId(2)) };
        let survey = Survey::new(&ranges, [live(0x2ff0, 0x20), live(0x9000, 0x1000)], &AllResident);
        let by_range: Vec<_> = survey
            .ranges
            .iter()
            .map(|(_, sums)| (sums.live_bytes, sums.trimmable_bytes, sums.pinned_bytes, sums.resident_unknown_bytes))
            .collect();
        assert_eq!(by_range, [(0x10, 0x1000, 0xff0, 0), (0x10, 0, 0, 0xff0), (0x1000, 0, 0, 0)]);
        assert_eq!(survey.sums.live_bytes, 0x1020);
        assert_eq!(survey.pinned.bytes.of(StackId(2)), 0xff0);
        let ladder = survey.ladder();
        assert_eq!((ladder.used_bytes(None), ladder.trimmable_bytes), (Some(0x1020 + 0xff0), None));
    }

    #[test]
    fn free_space_of_a_ledger_is_pinned_until_something_was_lost_and_unknown_from_then_on() {
        let mut ledger = Ledger::new(0, StackLimits::default());
        let mut extents = Extents::new(&[]);
        extents.apply(&VmEvent::Brk { end: 0x10000 });
        extents.apply(&VmEvent::Brk { end: 0x12000 });
        ledger.apply(&Event::Alloc {
            addr: Addr(0x10010),
            size_bytes: 24,
            stack: StackHash(5),
            tid: 1,
            how: Default::default(),
            time_ns: 0,
        });
        let survey = Survey::of_ledger(&mut ledger, &extents, Footprint::Glibc, |_| AllResident);
        // The chunk is 32 bytes; the rest of its page is pinned, the next page is free.
        assert_eq!((survey.pinned.bytes.of(StackId(2)), survey.sums.trimmable_bytes), (4096 - 32, 4096));
        ledger.apply(&Event::Loss { alloc: 1, free: 0, other: 0, time_ns: 1 });
        let survey = Survey::of_ledger(&mut ledger, &extents, Footprint::Glibc, |_| AllResident);
        assert_eq!((survey.pinned.bytes.total_bytes(), survey.sums.resident_unknown_bytes), (0, 8192 - 32));
    }
}
