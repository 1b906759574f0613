//! The contents of a heap's resident pages: live bytes, free bytes on pages with live ones (pinned), and whole free pages. Pure.

use std::ops::Range;

use serde::Serialize;

use super::residency::{page_bytes, page_down, page_up};

/// The holder of a span of a heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Holder {
    /// The program.
    Live,
    /// A thread's cache or a fastbin.
    Cached,
    /// A bin.
    Free,
    /// The free end of a heap.
    Top,
    /// The allocator's own data, or bytes that are not understood: neither live nor free.
    Other,
}

/// Sums over resident pages, in bytes. Together they are the resident bytes of the spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct Occupancy {
    /// Live bytes on resident pages.
    pub live_resident_bytes: u64,
    /// Free bytes on resident pages that also hold live bytes.
    pub pinned_bytes: u64,
    /// Bytes of caches and fastbins on pages without live bytes.
    pub cached_unpinned_bytes: u64,
    /// Bytes of bins on pages without live bytes.
    pub free_unpinned_bytes: u64,
    /// Bytes of tops on pages without live bytes.
    pub top_unpinned_bytes: u64,
    /// The rest: the allocator's own data and what is not understood.
    pub other_resident_bytes: u64,
}

/// Builds [`Occupancy`] from spans by ascending address, page by page.
pub struct OccupancyBuilder<F> {
    resident_bytes: F,
    sum: Occupancy,
    page: u64,
    on_page: Page,
}

/// Bytes on a page by [`Holder`].
type Page = [u64; 5];

impl<F: FnMut(Range<u64>) -> u64> OccupancyBuilder<F> {
    /// `resident_bytes` is called with ranges of whole pages, by ascending address within a region.
    pub fn new(resident_bytes: F) -> Self {
        Self { resident_bytes, sum: Occupancy::default(), page: 0, on_page: [0; 5] }
    }

    /// Adds a span. Spans must not overlap; a jump to another region is fine.
    #[inline]
    pub fn add(&mut self, span: Range<u64>, holder: Holder) {
        if span.end <= span.start {
            return;
        }
        let page = page_down(span.start);
        if page == page_down(span.end - 1) {
            self.add_partial(page, span.end - span.start, holder);
            return;
        }
        let first_whole = page_up(span.start);
        let last_whole = page_down(span.end);
        if span.start < first_whole {
            self.add_partial(page_down(span.start), first_whole - span.start, holder);
        }
        if first_whole < last_whole {
            self.flush();
            let resident = (self.resident_bytes)(first_whole..last_whole);
            match holder {
                Holder::Live => self.sum.live_resident_bytes += resident,
                Holder::Cached => self.sum.cached_unpinned_bytes += resident,
                Holder::Free => self.sum.free_unpinned_bytes += resident,
                Holder::Top => self.sum.top_unpinned_bytes += resident,
                Holder::Other => self.sum.other_resident_bytes += resident,
            }
        }
        if last_whole < span.end {
            self.add_partial(last_whole, span.end - last_whole, holder);
        }
    }

    #[inline]
    fn add_partial(&mut self, page: u64, bytes: u64, holder: Holder) {
        if page != self.page {
            self.flush();
            self.page = page;
        }
        if let Some(sum) = self.on_page.get_mut(holder as usize) {
            *sum = sum.saturating_add(bytes);
        }
    }

    fn flush(&mut self) {
        let [live, cached, free, top, other] = std::mem::take(&mut self.on_page);
        let covered = live + cached + free + top + other;
        if covered == 0 || (self.resident_bytes)(self.page..self.page.saturating_add(page_bytes())) == 0 {
            return;
        }
        self.sum.live_resident_bytes += live;
        self.sum.other_resident_bytes += other;
        if live > 0 {
            self.sum.pinned_bytes += cached + free + top;
        } else {
            self.sum.cached_unpinned_bytes += cached;
            self.sum.free_unpinned_bytes += free;
            self.sum.top_unpinned_bytes += top;
        }
    }

    /// The sums.
    pub fn finish(mut self) -> Occupancy {
        self.flush();
        self.sum
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HOLDERS: [Holder; 5] = [Holder::Live, Holder::Cached, Holder::Free, Holder::Top, Holder::Other];

    /// Byte by byte, as the definition says.
    fn naive(spans: &[(Range<u64>, Holder)], is_resident: impl Fn(u64) -> bool) -> Occupancy {
        let mut sum = Occupancy::default();
        let end = spans.last().map_or(0, |(span, _)| span.end);
        for page in 0..=end / page_bytes() {
            let mut counts = [0u64; 5];
            for (span, holder) in spans {
                let from = span.start.max(page * page_bytes());
                let to = span.end.min((page + 1) * page_bytes());
                let at = HOLDERS.iter().position(|h| h == holder).unwrap_or(0);
                if let Some(count) = counts.get_mut(at) {
                    *count += to.saturating_sub(from);
                }
            }
            let [live, cached, free, top, other] = counts;
            if !is_resident(page) {
                continue;
            }
            sum.live_resident_bytes += live;
            sum.other_resident_bytes += other;
            if live > 0 {
                sum.pinned_bytes += cached + free + top;
            } else {
                sum.cached_unpinned_bytes += cached;
                sum.free_unpinned_bytes += free;
                sum.top_unpinned_bytes += top;
            }
        }
        sum
    }

    proptest! {
        #[test]
        fn sums_equal_a_count_page_by_page(
            start in 1u64..3000, sizes in proptest::collection::vec((1u64..12_000, 0usize..5), 1..80), resident in any::<u64>()
        ) {
            let mut at = start;
            let mut spans = Vec::new();
            for &(bytes, holder) in &sizes {
                spans.push((at..at + bytes, HOLDERS.get(holder).copied().unwrap_or(Holder::Other)));
                at += bytes;
            }
            let is_resident = |page: u64| resident >> (page % 64) & 1 == 1;
            let mut builder = OccupancyBuilder::new(|range: Range<u64>| {
                (range.start / page_bytes()..range.end / page_bytes()).filter(|&page| is_resident(page)).count() as u64 * page_bytes()
            });
            for (span, holder) in &spans {
                builder.add(span.clone(), *holder);
            }
            prop_assert_eq!(builder.finish(), naive(&spans, is_resident));
        }
    }
}
