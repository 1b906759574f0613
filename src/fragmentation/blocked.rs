//! `blocked_space`: the stacks whose blocks keep the end of a heap from being lowered.
//!
//! glibc returns memory by itself only from the top of each heap (`systrim`, `heap_trim`). The highest live chunk of a heap is charged
//! with the whole free pages below it, down to the next live chunk, which would be the next to block.

use std::ops::Range;

use super::by_stack::BytesByStack;
use crate::heap::extents::HeapRange;
use crate::heap::pages::{Misfits, PageStates, SegmentKind, Span, huge_page_bytes, segments};
use crate::heap::residency::page_bytes;
use crate::units::StackId;

/// Blocked bytes by stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockedSpace {
    /// Resident bytes of the blocked pages.
    pub bytes: BytesByStack,
    /// Heaps whose highest live chunk blocks at least a page.
    pub heaps: u64,
    /// Heaps for which the blocked bytes are not known: bytes below the highest known block may belong to blocks from before the
    /// recording, or it may not be the highest.
    pub unknown_heaps: u64,
}

/// Blocked space of heaps that shrink only at their top. `heaps` are the address ranges of each (sorted, disjoint), `ranges` the coverage
/// of their parts, `spans` their blocks or chunks; all by address.
pub fn blocked_space(
    heaps: &[Range<u64>],
    ranges: &[HeapRange],
    spans: impl IntoIterator<Item = Span>,
    states: &impl PageStates,
) -> (BlockedSpace, Misfits) {
    let mut blocked = BlockedSpace::default();
    let mut heaps = heaps.iter();
    let mut heap = heaps.next();
    let mut tail = Tail::default();
    let misfits = segments(ranges, spans, |segment| {
        while heap.is_some_and(|heap| heap.end <= segment.range.start) {
            tail.close(states, &mut blocked);
            heap = heaps.next();
        }
        if heap.is_none_or(|heap| segment.range.start < heap.start) {
            return;
        }
        match segment.kind {
            SegmentKind::Live(stack) => tail.live(stack, segment.begins),
            SegmentKind::Free => tail.free(segment.range.clone()),
            SegmentKind::Held => {}
            SegmentKind::Unknown => tail.unknown_above = true,
        }
    });
    if heap.is_some() {
        tail.close(states, &mut blocked);
    }
    (blocked, misfits)
}

/// The upper part of the current heap: its highest live chunk so far, and what lies below and above it.
#[derive(Default)]
struct Tail {
    /// The highest live chunk's stack; `None` before the first live chunk.
    highest: Option<Option<StackId>>,
    /// Free ranges between it and the next live chunk below.
    under: Vec<Range<u64>>,
    unknown_under: bool,
    /// The same since its end.
    above: Vec<Range<u64>>,
    unknown_above: bool,
}

impl Tail {
    fn live(&mut self, stack: Option<StackId>, begins: bool) {
        if !begins {
            return;
        }
        self.highest = Some(stack);
        self.under.clear();
        std::mem::swap(&mut self.under, &mut self.above);
        self.unknown_under = std::mem::take(&mut self.unknown_above);
    }

    fn free(&mut self, range: Range<u64>) {
        match self.above.last_mut() {
            // Two adjacent ranges of one heap: a page may span both.
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.above.push(range),
        }
    }

    fn close(&mut self, states: &impl PageStates, blocked: &mut BlockedSpace) {
        let tail = std::mem::take(self);
        if tail.unknown_under || tail.unknown_above {
            blocked.unknown_heaps += 1;
            return;
        }
        let Some(stack) = tail.highest else { return };
        let pages: u64 = tail.under.iter().map(|range| resident_pages(range, states)).sum();
        if pages > 0 {
            blocked.heaps += 1;
            blocked.bytes.charge(stack, pages * page_bytes());
        }
    }
}

/// Whole pages of a range that are in RAM.
fn resident_pages(range: &Range<u64>, states: &impl PageStates) -> u64 {
    let end = range.end / page_bytes();
    let mut page = range.start.div_ceil(page_bytes());
    let mut resident = 0;
    while let Some(next) = states.next_resident(page).map(|next| next.max(page)).filter(|&next| next < end) {
        resident += u64::from(states.is_resident(next) || states.is_huge(next / (huge_page_bytes() / page_bytes())));
        page = next + 1;
    }
    resident
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::extents::{Coverage, RegionKind};
    use crate::heap::pages::{AllResident, Owner};

    fn range(range: Range<u64>, coverage: Coverage) -> HeapRange {
        HeapRange { range, kind: RegionKind::Brk, coverage }
    }

    fn live(start: u64, bytes: u64, id: u32) -> Span {
        Span { start, bytes, owner: Owner::Stack(StackId(id)) }
    }

    #[test]
    fn the_highest_live_chunk_is_charged_down_to_the_next() {
        let ranges = [range(0x10000..0x30000, Coverage::Complete)];
        let spans = [live(0x10000, 0x100, 1), live(0x18800, 0x100, 2), live(0x20800, 0x20, 3)];
        let (blocked, _) = blocked_space(std::slice::from_ref(&(0x10000..0x30000)), &ranges, spans, &AllResident);
        // From 0x19000 to 0x20000: seven pages. What lies above the chunk is the top, which is returned by itself.
        assert_eq!(blocked.bytes.of(StackId(3)), 7 * 4096);
        assert_eq!(blocked.bytes.total_bytes(), 7 * 4096);
    }

    #[test]
    fn a_lone_chunk_is_charged_down_to_the_heaps_start_but_not_for_the_allocators_own_pages() {
        let ranges = [range(0x10000..0x20000, Coverage::Complete), range(0x40000..0x50000, Coverage::Complete)];
        let header = Span { start: 0x11800, bytes: 0x20, owner: Owner::Held };
        let spans = [header, live(0x14000, 0x20, 1)];
        let (blocked, _) = blocked_space(&[0x10000..0x20000, 0x40000..0x50000], &ranges, spans, &AllResident);
        assert_eq!(blocked.bytes.of(StackId(1)), 3 * 4096);
        assert_eq!((blocked.heaps, blocked.unknown_heaps), (1, 0));
    }

    #[test]
    fn blocked_bytes_are_unknown_where_older_blocks_may_lie_below_the_highest_known_one() {
        let ranges = [range(0x10000..0x18000, Coverage::Partial), range(0x18000..0x20000, Coverage::Complete)];
        let heaps = std::slice::from_ref(&(0x10000..0x20000));
        let (blocked, _) = blocked_space(heaps, &ranges, [live(0x1c000, 16, 1)], &AllResident);
        assert_eq!((blocked.bytes.total_bytes(), blocked.unknown_heaps), (0, 1));
        let (blocked, _) = blocked_space(heaps, &ranges, [live(0x18000, 16, 2), live(0x1c000, 16, 1)], &AllResident);
        assert_eq!((blocked.bytes.of(StackId(1)), blocked.unknown_heaps), (3 * 4096, 0));
    }
}
