//! Which pages of a range are in memory: runs of pages of one state, and sums over them. Pure; `census::live` asks the kernel.

use std::ops::Range;

pub use crate::units::page_bytes;

/// Rounds up to a page boundary; saturates at the last page of the address space.
#[must_use]
pub fn page_up(addr: u64) -> u64 {
    addr.checked_add(page_bytes() - 1).map_or(!(page_bytes() - 1), page_down)
}

/// Rounds down to a page boundary.
#[must_use]
pub fn page_down(addr: u64) -> u64 {
    addr & !(page_bytes() - 1)
}

/// The whole pages of a range; empty if it has none, and begins then at the page after its start.
#[must_use]
pub fn whole_pages(range: Range<u64>) -> Range<u64> {
    let start = page_up(range.start);
    start..page_down(range.end).max(start)
}

/// The kernel's state of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageState {
    /// In memory.
    pub present: bool,
    /// In swap.
    pub swapped: bool,
    /// The shared page of zeros: present, but costs nothing.
    pub zero: bool,
    /// Part of a huge page mapping.
    pub huge: bool,
}

impl PageState {
    /// Whether the page costs memory: present and not the page of zeros.
    #[must_use]
    pub fn is_resident(self) -> bool {
        self.present && !self.zero
    }
}

/// A run of pages of one state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// First address, page-aligned.
    pub start: u64,
    /// First address after it, page-aligned.
    pub end: u64,
    /// State of every page of it.
    pub state: PageState,
}

/// The pages of a range that are present or swapped, as runs by ascending address. Pages between runs were never touched, or were released.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PageRuns {
    runs: Vec<PageRun>,
}

impl PageRuns {
    /// Appends a run; merges it with the last one if they are adjacent and equal. Runs that are empty, or not after the last one, are ignored.
    pub fn push(&mut self, run: PageRun) {
        if run.end <= run.start {
            return;
        }
        match self.runs.last_mut() {
            Some(last) if last.end == run.start && last.state == run.state => last.end = run.end,
            Some(last) if last.end > run.start => {}
            _ => self.runs.push(run),
        }
    }

    /// The runs by ascending address.
    #[must_use]
    pub fn runs(&self) -> &[PageRun] {
        &self.runs
    }

    /// The parts of runs that lie in `range`; none if its end is not after its start.
    pub fn within(&self, range: Range<u64>) -> impl Iterator<Item = PageRun> + '_ {
        let range = range.start..if range.is_empty() { 0 } else { range.end };
        let first = self.runs.partition_point(|run| run.end <= range.start);
        self.runs.get(first..).unwrap_or_default().iter().take_while(move |run| run.start < range.end).map(move |run| PageRun {
            start: run.start.max(range.start),
            end: run.end.min(range.end),
            state: run.state,
        })
    }

    /// Bytes of `range` whose pages satisfy `accept`.
    #[must_use]
    pub fn bytes_where(&self, range: Range<u64>, accept: impl Fn(PageState) -> bool) -> u64 {
        self.within(range).filter(|run| accept(run.state)).map(|run| run.end - run.start).sum()
    }

    /// Bytes of `range` that cost memory.
    #[must_use]
    pub fn resident_bytes(&self, range: Range<u64>) -> u64 {
        self.bytes_where(range, PageState::is_resident)
    }

    /// The state of the page at `addr`; all false if not known.
    #[must_use]
    pub fn state_at(&self, addr: u64) -> PageState {
        self.within(addr..addr.saturating_add(1)).next().map(|run| run.state).unwrap_or_default()
    }

    /// End of the present pages from `addr` on; `addr` itself if its page is not present.
    #[must_use]
    pub fn present_from(&self, addr: u64) -> u64 {
        let first = self.runs.partition_point(|run| run.end <= addr);
        let mut at = addr;
        for run in self.runs.get(first..).unwrap_or_default() {
            if run.start > at || !run.state.present {
                break;
            }
            at = run.end;
        }
        at
    }

    /// The first address at or after `addr` whose page is present.
    #[must_use]
    pub fn next_present(&self, addr: u64) -> Option<u64> {
        let first = self.runs.partition_point(|run| run.end <= addr);
        self.runs.get(first..)?.iter().find(|run| run.state.present).map(|run| run.start.max(addr))
    }
}

/// Bytes of a range by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Residency {
    /// In memory, without the page of zeros.
    pub resident_bytes: u64,
    /// In swap.
    pub swapped_bytes: u64,
    /// In memory as part of a huge page.
    pub huge_bytes: u64,
}

impl Residency {
    /// Adds the runs within `range`.
    pub fn add(&mut self, runs: &PageRuns, range: Range<u64>) {
        for run in runs.within(range) {
            let bytes = run.end - run.start;
            if run.state.is_resident() {
                self.resident_bytes = self.resident_bytes.saturating_add(bytes);
                if run.state.huge {
                    self.huge_bytes = self.huge_bytes.saturating_add(bytes);
                }
            } else if run.state.swapped {
                self.swapped_bytes = self.swapped_bytes.saturating_add(bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESENT: PageState = PageState { present: true, swapped: false, zero: false, huge: false };
    const ZERO: PageState = PageState { present: true, swapped: false, zero: true, huge: false };
    const SWAPPED: PageState = PageState { present: false, swapped: true, zero: false, huge: false };

    fn runs(list: &[(u64, u64, PageState)]) -> PageRuns {
        let mut runs = PageRuns::default();
        for &(start, end, state) in list {
            runs.push(PageRun { start, end, state });
        }
        runs
    }

    #[test]
    fn touching_runs_of_one_state_are_joined() {
        let runs = runs(&[(0x1000, 0x2000, PRESENT), (0x2000, 0x4000, PRESENT), (0x4000, 0x5000, ZERO)]);
        assert_eq!(runs.runs().len(), 2);
        assert_eq!(runs.runs().first().map(|r| r.end), Some(0x4000));
    }

    #[test]
    fn the_page_of_zeros_and_swapped_pages_are_not_resident() {
        let runs = runs(&[(0x1000, 0x3000, PRESENT), (0x3000, 0x4000, ZERO), (0x8000, 0xa000, SWAPPED)]);
        assert_eq!(runs.resident_bytes(0..0x10000), 0x2000);
        assert_eq!(runs.resident_bytes(0x2800..0x10000), 0x800);
        let mut sum = Residency::default();
        sum.add(&runs, 0x2000..0x9000);
        assert_eq!(sum, Residency { resident_bytes: 0x1000, swapped_bytes: 0x1000, huge_bytes: 0 });
    }

    #[test]
    fn the_next_present_page_is_found_across_gaps_and_swapped_pages() {
        let runs = runs(&[(0x1000, 0x2000, PRESENT), (0x4000, 0x5000, SWAPPED), (0x6000, 0x7000, PRESENT)]);
        assert_eq!(runs.next_present(0x1800), Some(0x1800));
        assert_eq!(runs.next_present(0x2000), Some(0x6000));
        assert_eq!(runs.next_present(0x7000), None);
        assert_eq!(runs.present_from(0x1800), 0x2000);
        assert_eq!(runs.present_from(0x4000), 0x4000);
        assert_eq!(runs.present_from(0x2000), 0x2000);
        assert!(runs.state_at(0x4fff).swapped);
        assert_eq!(runs.state_at(0x5000), PageState::default());
    }

    /// A chunk within a page has no whole page, however large pages are.
    #[test]
    fn a_range_within_a_page_has_no_whole_page_and_no_resident_bytes() {
        let page = page_bytes();
        let runs = runs(&[(0, 16 * page, PRESENT)]);
        assert_eq!(whole_pages(page / 2..4 * page - 1), page..3 * page);
        let own = whole_pages(2 * page + 100..2 * page + 200);
        assert_eq!((own.clone(), runs.resident_bytes(own)), (3 * page..3 * page, 0));
        let (start, end) = (3 * page, 2 * page);
        assert_eq!(runs.resident_bytes(start..end), 0);
    }

    #[test]
    fn rounding_to_pages_does_not_overflow() {
        assert_eq!(page_up(1), 4096);
        assert_eq!(page_up(4096), 4096);
        assert_eq!(page_up(u64::MAX), !4095);
        assert_eq!(page_down(4097), 4096);
    }
}
