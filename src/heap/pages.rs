//! The contents of each page of a heap: live, held, free and unknown bytes.
//!
//! The input is heap ranges and spans (blocks or chunks), both sorted by address. The heap is laid out as a sequence of segments (a span,
//! or the gap before the next), which are cut at page ends. Memory use is one page's list of spans, whatever the heap's size.

use std::ops::Range;

use super::extents::{Coverage, HeapRange};
use super::residency::PageRuns;
pub use super::residency::page_bytes;
use crate::units::StackId;
pub use crate::units::huge_page_bytes;

/// Parts of segments that are shorter are not worth a look for pages that are not in RAM.
const LOOKED_OVER_BYTES: u64 = 2 << 20;

/// A stretch of heap with an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u64,
    /// Length; a span of 0 bytes is ignored.
    pub bytes: u64,
    /// Its owner.
    pub owner: Owner,
}

/// The owner of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// Live, with a known stack.
    Stack(StackId),
    /// Live, without a known stack.
    Unattributed,
    /// Neither live nor free: the allocator's own structures, or unknown bytes.
    Held,
}

/// Which pages are in RAM. `page` is an address divided by [`page_bytes`], `huge_page` by [`huge_page_bytes`].
pub trait PageStates {
    /// Whether a base page is in RAM.
    fn is_resident(&self, page: u64) -> bool;
    /// Whether a huge page backs the whole of an aligned 2 MiB.
    fn is_huge(&self, huge_page: u64) -> bool;
    /// A page not after the first resident one at or after `page`; `None` if there is none. Lets a walk skip untouched space, of which an
    /// allocator may have terabytes.
    fn next_resident(&self, page: u64) -> Option<u64> {
        Some(page)
    }
}

impl PageStates for PageRuns {
    fn is_resident(&self, page: u64) -> bool {
        self.state_at(page.saturating_mul(page_bytes())).is_resident()
    }

    fn is_huge(&self, huge_page: u64) -> bool {
        let start = huge_page.saturating_mul(huge_page_bytes());
        let whole = start..start.saturating_add(huge_page_bytes());
        self.within(whole.clone()).next().is_some_and(|run| (run.start..run.end) == whole && run.state.huge && run.state.is_resident())
    }

    fn next_resident(&self, page: u64) -> Option<u64> {
        self.next_present(page.saturating_mul(page_bytes())).map(|addr| addr / page_bytes())
    }
}

/// All pages resident, none huge: for a heap whose residency is not known, an upper bound.
#[derive(Debug, Clone, Copy, Default)]
pub struct AllResident;

impl PageStates for AllResident {
    fn is_resident(&self, _: u64) -> bool {
        true
    }
    fn is_huge(&self, _: u64) -> bool {
        false
    }
}

/// A piece of a heap range: a span's part, or a gap between spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Addresses.
    pub range: Range<u64>,
    /// What it is.
    pub kind: SegmentKind,
    /// Whether a span begins here; a span that crosses from one range into the next is one span in two segments.
    pub begins: bool,
}

/// The kind of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// Live bytes, with this stack or without a known one.
    Live(Option<StackId>),
    /// Neither live nor free.
    Held,
    /// A gap in a range whose blocks are all known.
    Free,
    /// A gap in a range that may contain unknown blocks.
    Unknown,
}

/// Inconsistencies of the input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Misfits {
    /// Bytes of spans outside every heap range.
    pub outside_bytes: u64,
    /// Bytes that two spans claim; they count for the first.
    pub overlap_bytes: u64,
}

/// Lays out the ranges as segments, by address, without holes within a range.
pub fn segments(ranges: &[HeapRange], spans: impl IntoIterator<Item = Span>, mut visit: impl FnMut(&Segment)) -> Misfits {
    let mut misfits = Misfits::default();
    let mut ranges = ranges.iter();
    let mut current = ranges.next();
    // Everything below is laid out; everything below `claimed` is some span's.
    let mut cursor = current.map_or(0, |range| range.range.start);
    let mut claimed = 0;
    let gap = |range: &HeapRange, from: u64, to: u64, visit: &mut dyn FnMut(&Segment)| {
        if from < to {
            let kind = if range.coverage == Coverage::Complete { SegmentKind::Free } else { SegmentKind::Unknown };
            visit(&Segment { range: from..to, kind, begins: false });
        }
    };
    for span in spans {
        let end = span.start.saturating_add(span.bytes);
        let mut start = span.start.max(claimed);
        misfits.overlap_bytes = misfits.overlap_bytes.saturating_add(start.min(end) - span.start);
        claimed = claimed.max(end);
        let kind = match span.owner {
            Owner::Stack(stack) => SegmentKind::Live(Some(stack)),
            Owner::Unattributed => SegmentKind::Live(None),
            Owner::Held => SegmentKind::Held,
        };
        let mut begins = true;
        while start < end {
            let Some(range) = current else {
                misfits.outside_bytes = misfits.outside_bytes.saturating_add(end - start);
                break;
            };
            if range.range.end <= start {
                gap(range, cursor, range.range.end, &mut visit);
                current = ranges.next();
                cursor = current.map_or(cursor, |next| next.range.start);
                continue;
            }
            let inside = start.max(range.range.start).min(end);
            misfits.outside_bytes = misfits.outside_bytes.saturating_add(inside - start);
            let stop = end.min(range.range.end);
            if inside < stop {
                gap(range, cursor, inside, &mut visit);
                visit(&Segment { range: inside..stop, kind, begins });
                begins = false;
                cursor = stop;
            }
            start = inside.max(stop);
        }
    }
    while let Some(range) = current {
        gap(range, cursor, range.range.end, &mut visit);
        current = ranges.next();
        cursor = current.map_or(cursor, |next| next.range.start);
    }
    misfits
}

/// A page of the heap and its contents, or a run of pages that are not resident. The four kinds of bytes add up to the part of the page
/// that heap ranges cover.
#[derive(Debug, Clone, Copy)]
pub struct PageView<'a> {
    /// First address.
    pub start: u64,
    /// [`page_bytes`], [`huge_page_bytes`], or a run's.
    pub bytes: u64,
    /// Whether it is a huge page.
    pub huge: bool,
    /// Whether it is in RAM.
    pub resident: bool,
    /// Bytes of live spans.
    pub live_bytes: u64,
    /// Bytes that are neither live nor free.
    pub held_bytes: u64,
    /// Bytes that are free for certain.
    pub free_bytes: u64,
    /// Bytes that may be of blocks from before the recording.
    pub unknown_bytes: u64,
    /// The live spans' parts on the page by address, with their stack. Not given for a run.
    pub parts: &'a [(Option<StackId>, u64)],
}

impl PageView<'_> {
    /// Bytes that heap ranges cover.
    pub fn extent_bytes(&self) -> u64 {
        self.live_bytes + self.held_bytes + self.free_bytes + self.unknown_bytes
    }
}

/// Visits each page that a heap range touches, by address. A huge page is one page; long runs of pages that are not in RAM come at
/// once.
pub fn visit_pages(
    ranges: &[HeapRange],
    spans: impl IntoIterator<Item = Span>,
    states: &impl PageStates,
    visit: impl FnMut(&PageView<'_>),
) -> Misfits {
    let mut cutter = Cutter { states, visit, page: 0..0, huge: None, sums: [0; 4], parts: Vec::new() };
    let misfits = segments(ranges, spans, |segment| cutter.add(segment));
    cutter.flush();
    misfits
}

/// Index of a kind's bytes among live, held, free and unknown.
fn sum_of(kind: SegmentKind) -> usize {
    match kind {
        SegmentKind::Live(_) => 0,
        SegmentKind::Held => 1,
        SegmentKind::Free => 2,
        SegmentKind::Unknown => 3,
    }
}

/// Cuts segments at page ends.
struct Cutter<'a, S, F> {
    states: &'a S,
    visit: F,
    /// The page being filled; empty before the first.
    page: Range<u64>,
    /// The last answer about a huge page.
    huge: Option<(u64, bool)>,
    /// Live, held, free, unknown bytes of the page.
    sums: [u64; 4],
    parts: Vec<(Option<StackId>, u64)>,
}

impl<S: PageStates, F: FnMut(&PageView<'_>)> Cutter<'_, S, F> {
    fn add(&mut self, segment: &Segment) {
        let Range { mut start, end } = segment.range;
        while start < end {
            if start >= self.page.end {
                self.flush();
                let untouched = self.untouched(start, end);
                if untouched > start {
                    self.pass_over(start..untouched, segment.kind);
                    start = untouched;
                    continue;
                }
                self.page = self.page_of(start);
            }
            let stop = end.min(self.page.end);
            let bytes = stop - start;
            if let SegmentKind::Live(stack) = segment.kind {
                self.parts.push((stack, bytes));
            }
            self.sums[sum_of(segment.kind)] += bytes;
            start = stop;
        }
    }

    /// The end of the whole non-resident pages from `start` on, if looking it up is worth it.
    fn untouched(&self, start: u64, end: u64) -> u64 {
        if !start.is_multiple_of(page_bytes()) || end - start < LOOKED_OVER_BYTES {
            return start;
        }
        let whole = end / page_bytes();
        self.states.next_resident(start / page_bytes()).map_or(whole, |next| next.min(whole)).saturating_mul(page_bytes())
    }

    fn pass_over(&mut self, run: Range<u64>, kind: SegmentKind) {
        let bytes = run.end - run.start;
        let mut sums = [0; 4];
        sums[sum_of(kind)] = bytes;
        let [live_bytes, held_bytes, free_bytes, unknown_bytes] = sums;
        let start = run.start;
        (self.visit)(&PageView {
            start,
            bytes,
            huge: false,
            resident: false,
            live_bytes,
            held_bytes,
            free_bytes,
            unknown_bytes,
            parts: &[],
        });
        self.page = run.end..run.end;
    }

    fn page_of(&mut self, addr: u64) -> Range<u64> {
        let huge_page = addr / huge_page_bytes();
        let huge = match self.huge {
            Some((known, huge)) if known == huge_page => huge,
            _ => self.states.is_huge(huge_page),
        };
        self.huge = Some((huge_page, huge));
        let bytes = if huge { huge_page_bytes() } else { page_bytes() };
        let start = addr / bytes * bytes;
        start..start.saturating_add(bytes)
    }

    fn flush(&mut self) {
        let [live_bytes, held_bytes, free_bytes, unknown_bytes] = std::mem::take(&mut self.sums);
        if live_bytes | held_bytes | free_bytes | unknown_bytes == 0 {
            return;
        }
        let (start, bytes) = (self.page.start, self.page.end - self.page.start);
        let huge = bytes == huge_page_bytes();
        let resident = huge || self.states.is_resident(start / page_bytes());
        (self.visit)(&PageView { start, bytes, huge, resident, live_bytes, held_bytes, free_bytes, unknown_bytes, parts: &self.parts });
        self.parts.clear();
    }
}

/// The sums of a heap, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSums {
    /// Address space of the heap ranges.
    pub extent_bytes: u64,
    /// Of it, in RAM.
    pub resident_bytes: u64,
    /// Live bytes.
    pub live_bytes: u64,
    /// Live bytes in RAM.
    pub resident_live_bytes: u64,
    /// In RAM, neither live nor free.
    pub resident_held_bytes: u64,
    /// In RAM, possibly of blocks from before the recording.
    pub resident_unknown_bytes: u64,
    /// Certainly free, in RAM: trimmable, pinned, and those on pages with held or unknown bytes but no live ones.
    pub resident_free_bytes: u64,
    /// Of it, on pages that are free from end to end.
    pub trimmable_bytes: u64,
    /// Of it, on pages with a live byte.
    pub pinned_bytes: u64,
}

impl PageSums {
    /// Adds a page.
    pub fn add(&mut self, page: &PageView<'_>) {
        self.extent_bytes += page.extent_bytes();
        self.live_bytes += page.live_bytes;
        if !page.resident {
            return;
        }
        self.resident_bytes += page.extent_bytes();
        self.resident_live_bytes += page.live_bytes;
        self.resident_held_bytes += page.held_bytes;
        self.resident_unknown_bytes += page.unknown_bytes;
        self.resident_free_bytes += page.free_bytes;
        if page.live_bytes > 0 {
            self.pinned_bytes += page.free_bytes;
        } else if page.free_bytes == page.bytes {
            self.trimmable_bytes += page.free_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::extents::RegionKind;
    use super::super::residency::{PageRun, PageState};
    use super::*;

    fn range(range: Range<u64>, coverage: Coverage) -> HeapRange {
        HeapRange { range, kind: RegionKind::Anonymous, coverage }
    }

    fn live(start: u64, bytes: u64) -> Span {
        Span { start, bytes, owner: Owner::Stack(StackId(7)) }
    }

    struct Only(u64);
    impl PageStates for Only {
        fn is_resident(&self, page: u64) -> bool {
            page == self.0
        }
        fn is_huge(&self, _: u64) -> bool {
            false
        }
    }

    fn sums_of(ranges: &[HeapRange], spans: &[Span], states: &impl PageStates) -> (PageSums, Misfits) {
        let mut sums = PageSums::default();
        let misfits = visit_pages(ranges, spans.iter().copied(), states, |page| sums.add(page));
        (sums, misfits)
    }

    #[test]
    fn a_huge_page_is_one_that_backs_the_whole_of_its_two_mebibytes() {
        let huge = PageState { present: true, huge: true, ..PageState::default() };
        let mut runs = PageRuns::default();
        runs.push(PageRun { start: huge_page_bytes(), end: 2 * huge_page_bytes() + 4096, state: huge });
        runs.push(PageRun { start: 5 * huge_page_bytes(), end: 6 * huge_page_bytes(), state: PageState { huge: false, ..huge } });
        assert_eq!((0..7).filter(|&page| runs.is_huge(page)).collect::<Vec<_>>(), [1]);
        let first = huge_page_bytes() / page_bytes();
        assert_eq!(
            [first - 1, first, 2 * first, 2 * first + 1, 5 * first].map(|page| runs.is_resident(page)),
            [false, true, true, false, true]
        );
    }

    #[test]
    fn a_block_across_pages_counts_on_each_with_its_bytes_there() {
        let mut seen = Vec::new();
        visit_pages(&[range(0x1000..0x4000, Coverage::Complete)], [live(0x1f00, 0x1200)], &AllResident, |page| {
            seen.push((page.start, page.live_bytes, page.free_bytes));
        });
        assert_eq!(seen, [(0x1000, 0x100, 0xf00), (0x2000, 0x1000, 0), (0x3000, 0x100, 0xf00)]);
    }

    #[test]
    fn bytes_that_may_be_older_than_the_recording_are_unknown_and_never_free() {
        let (sums, _) = sums_of(&[range(0x1000..0x3000, Coverage::Partial)], &[live(0x1000, 0x800)], &AllResident);
        assert_eq!(sums.resident_unknown_bytes, 0x1800);
        assert_eq!((sums.resident_free_bytes, sums.pinned_bytes, sums.trimmable_bytes), (0, 0, 0));
    }

    #[test]
    fn only_pages_in_ram_count_as_trimmable_or_pinned() {
        let (sums, _) = sums_of(&[range(0x1000..0x4000, Coverage::Complete)], &[live(0x1000, 1)], &Only(2));
        assert_eq!((sums.resident_bytes, sums.trimmable_bytes, sums.pinned_bytes), (0x1000, 0x1000, 0));
        assert_eq!((sums.live_bytes, sums.resident_live_bytes), (1, 0));
    }

    #[test]
    fn bytes_outside_the_heap_and_bytes_claimed_twice_are_counted_separately() {
        let spans = [live(0x800, 0x900), live(0x1000, 0x200), live(0x1ff0, 0x20), live(0x9000, 5)];
        let (sums, misfits) = sums_of(&[range(0x1000..0x2000, Coverage::Complete)], &spans, &AllResident);
        assert_eq!(misfits, Misfits { outside_bytes: 0x800 + 0x10 + 5, overlap_bytes: 0x100 });
        assert_eq!(sums.live_bytes, 0x200 + 0x10);
    }

    #[test]
    fn a_block_over_two_touching_ranges_is_one_span() {
        let ranges = [range(0x1000..0x2000, Coverage::Partial), range(0x2000..0x3000, Coverage::Complete)];
        let mut begins = 0;
        let mut live_bytes = 0;
        segments(&ranges, [live(0x1ff0, 0x20)], |segment| {
            begins += u32::from(segment.begins);
            live_bytes += if matches!(segment.kind, SegmentKind::Live(_)) { segment.range.end - segment.range.start } else { 0 };
        });
        assert_eq!((begins, live_bytes), (1, 0x20));
    }

    #[test]
    fn a_terabyte_that_was_never_touched_is_skipped_at_once() {
        const TIB: u64 = 1 << 40;
        let state = PageState { present: true, ..PageState::default() };
        let mut runs = PageRuns::default();
        runs.push(PageRun { start: TIB, end: TIB + 0x2000, state });
        runs.push(PageRun { start: TIB + TIB / 2, end: TIB + TIB / 2 + 0x3000, state });
        let mut visits = 0;
        let mut sums = PageSums::default();
        visit_pages(&[range(TIB..2 * TIB, Coverage::Complete)], [live(TIB, 0x10), live(TIB + TIB / 4, TIB / 8)], &runs, |page| {
            visits += 1;
            sums.add(page);
        });
        assert!(visits < 20, "{visits}");
        assert_eq!((sums.extent_bytes, sums.resident_bytes), (TIB, 0x5000));
        assert_eq!((sums.live_bytes, sums.resident_live_bytes), (TIB / 8 + 0x10, 0x10));
        assert_eq!((sums.pinned_bytes, sums.trimmable_bytes), (0x1000 - 0x10, 0x4000));
    }
}
