//! `pinned_space`: the stacks whose blocks keep free bytes from being returned, page by page.
//!
//! On every resident page with live bytes L > 0 and free bytes F > 0, each live block is charged F × (its bytes on the page) / L. A
//! huge page is one page of 2 MiB: one live byte on it keeps all of it. The share of live bytes without a known stack is charged to
//! `[unattributed]` and never spread over the others.
//!
//! Integer bytes, none lost: the charges of a page are the steps of `floor(F × bytes so far / L)`, which ends at F.

use super::by_stack::BytesByStack;
use crate::heap::pages::PageView;

/// Pinned bytes by stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PinnedSpace {
    /// On all pages.
    pub bytes: BytesByStack,
    /// Of these, on huge pages.
    pub on_huge_pages: BytesByStack,
    /// Pages with live and free bytes.
    pub pages: u64,
}

impl PinnedSpace {
    /// Charges a page's free bytes to the blocks that are live on it.
    pub fn add(&mut self, page: &PageView<'_>) {
        let (live, free) = (page.live_bytes, page.free_bytes);
        if !page.resident || live == 0 || free == 0 {
            return;
        }
        self.pages += 1;
        let (mut so_far, mut charged) = (0_u64, 0);
        for &(stack, bytes) in page.parts {
            so_far += bytes;
            // Both are at most a page, 2^21: the product fits 64 bits.
            let until = free * so_far / live;
            self.bytes.charge(stack, until - charged);
            if page.huge {
                self.on_huge_pages.charge(stack, until - charged);
            }
            charged = until;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::heap::extents::{Coverage, HeapRange, RegionKind};
    use crate::heap::pages::{Owner, PageStates, PageSums, Span, huge_page_bytes, visit_pages};
    use crate::units::StackId;

    /// Resident pages by a bit pattern; of the two possible huge pages, the second is one.
    struct Pattern(u64);
    impl PageStates for Pattern {
        fn is_resident(&self, page: u64) -> bool {
            self.0 >> (page % 61) & 1 == 1
        }
        fn is_huge(&self, huge_page: u64) -> bool {
            huge_page == 1
        }
        fn next_resident(&self, page: u64) -> Option<u64> {
            (page..page + 61).find(|&page| self.is_resident(page) || self.is_huge(page / 512))
        }
    }

    fn heap() -> [HeapRange; 3] {
        let range = |range, coverage| HeapRange { range, kind: RegionKind::Anonymous, coverage };
        [
            range(huge_page_bytes() - 16 * 4096..huge_page_bytes(), Coverage::Complete),
            range(huge_page_bytes()..2 * huge_page_bytes() - 4096, Coverage::Complete),
            range(3 * huge_page_bytes()..3 * huge_page_bytes() + 16 * 4096, Coverage::Partial),
        ]
    }

    fn any_spans() -> impl Strategy<Value = Vec<Span>> {
        let owner =
            prop_oneof![5 => (0..4_u32).prop_map(|id| Owner::Stack(StackId(id))), 1 => Just(Owner::Unattributed), 1 => Just(Owner::Held)];
        let near =
            prop_oneof![3 => huge_page_bytes() - 16 * 4096..huge_page_bytes() + 8 * 4096, 1 => huge_page_bytes()..4 * huge_page_bytes()];
        prop::collection::vec((near, 0..9000_u64, owner), 0..60).prop_map(|spans| {
            let mut spans: Vec<Span> = spans.into_iter().map(|(start, bytes, owner)| Span { start, bytes, owner }).collect();
            spans.sort_by_key(|span| span.start);
            for index in 1..spans.len() {
                // Blocks do not overlap.
                let room = spans[index].start - spans[index - 1].start;
                spans[index - 1].bytes = spans[index - 1].bytes.min(room);
            }
            spans
        })
    }

    proptest! {
        #[test]
        fn charges_are_within_a_byte_of_the_definition_and_their_sum_is_exact(spans in any_spans(), pattern in any::<u64>()) {
            let states = Pattern(pattern);
            let (mut pinned, mut sums) = (PinnedSpace::default(), PageSums::default());
            visit_pages(&heap(), spans.iter().copied(), &states, |page| { pinned.add(page); sums.add(page) });

            // The definition, byte by byte over whole pages, in floating point.
            let mut exact: BTreeMap<Option<StackId>, f64> = BTreeMap::new();
            let (mut total, mut parts, mut resident) = (0, 0_u32, 0);
            let mut page_start = huge_page_bytes() - 16 * 4096;
            while page_start < 4 * huge_page_bytes() {
                let huge = page_start / huge_page_bytes() == 1;
                let end = page_start + if huge { huge_page_bytes() } else { 4096 };
                let on = |start: u64, stop: u64| stop.min(end).saturating_sub(start.max(page_start));
                let (mut covered, mut free) = (0, 0);
                for range in heap() {
                    let bytes = on(range.range.start, range.range.end);
                    covered += bytes;
                    let used: u64 = spans.iter().map(|span| {
                        let (start, stop) = (span.start.max(range.range.start), (span.start + span.bytes).min(range.range.end));
                        if start < stop { on(start, stop) } else { 0 }
                    }).sum();
                    free += if range.coverage == Coverage::Complete { bytes - used } else { 0 };
                }
                let on_heap = |span: &Span| heap().iter().map(|range| {
                    let (start, stop) = (span.start.max(range.range.start), (span.start + span.bytes).min(range.range.end));
                    if start < stop { on(start, stop) } else { 0 }
                }).sum::<u64>();
                let live: u64 = spans.iter().filter(|span| span.owner != Owner::Held).map(on_heap).sum();
                if huge || states.is_resident(page_start / 4096) {
                    resident += covered;
                    if live > 0 && free > 0 {
                        total += free;
                        for span in &spans {
                            let stack = match span.owner { Owner::Stack(stack) => Some(stack), Owner::Unattributed => None, Owner::Held => continue };
                            *exact.entry(stack).or_default() += free as f64 * on_heap(span) as f64 / live as f64;
                            parts += u32::from(on_heap(span) > 0);
                        }
                    }
                }
                page_start = end;
            }
            prop_assert_eq!(pinned.bytes.total_bytes(), total);
            prop_assert_eq!(sums.pinned_bytes, total);
            prop_assert_eq!(sums.resident_bytes, resident);
            let sum: u64 = pinned.bytes.iter().map(|(_, bytes)| bytes).sum();
            prop_assert_eq!(sum + pinned.bytes.unattributed_bytes(), total);
            for (stack, share) in exact {
                let charged = stack.map_or(pinned.bytes.unattributed_bytes(), |stack| pinned.bytes.of(stack));
                prop_assert!((charged as f64 - share).abs() <= f64::from(parts), "{stack:?}: {charged} and {share}");
            }
        }
    }

    #[test]
    fn one_byte_on_a_huge_page_pins_all_of_it() {
        let heap =
            [HeapRange { range: huge_page_bytes()..2 * huge_page_bytes(), kind: RegionKind::Anonymous, coverage: Coverage::Complete }];
        let span = Span { start: huge_page_bytes() + 5000, bytes: 1, owner: Owner::Stack(StackId(3)) };
        let mut pinned = PinnedSpace::default();
        visit_pages(&heap, [span], &Pattern(0), |page| pinned.add(page));
        assert_eq!(pinned.bytes.of(StackId(3)), huge_page_bytes() - 1);
        assert_eq!(pinned.on_huge_pages, pinned.bytes);
    }
}
