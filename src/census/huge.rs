//! The unused part of a heap's huge pages: 4 KiB pages within them that hold only zeros, estimated from a sample.
//!
//! If the kernel backs a heap with huge pages, the first byte written makes 2 MiB resident. The parts never written are zero, and would not
//! be resident with small pages. Pages that the program zeroed look the same, and cannot be distinguished from outside.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use super::memory::{Memory, Piece};
use crate::heap::residency::page_bytes;

/// Pages read: a standard error of at most 1.6 % of the huge pages, in some 2 ms.
const PAGES_READ: u64 = 1000;

/// Bytes of 4 KiB pages that hold only zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Zeros {
    /// The estimate.
    pub bytes_est: u64,
    /// Its standard error.
    pub bytes_stderr: u64,
}

/// Estimates the bytes of zeros in the huge pages of the ranges. `None` if there are no huge pages, or none could be read.
#[must_use]
pub fn zeros(memory: &dyn Memory, ranges: &[Range<u64>]) -> Option<Zeros> {
    let mut huge: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        let runs = memory.page_runs(range.clone()).ok()?;
        huge.extend(runs.within(range.clone()).filter(|run| run.state.huge && run.state.is_resident()).map(|run| run.start..run.end));
    }
    let pages: u64 = huge.iter().map(|range| (range.end - range.start) / page_bytes()).sum();
    if pages == 0 {
        return None;
    }
    let count = pages.min(PAGES_READ);
    let phase = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::from(since.subsec_nanos()));
    let mut page = vec![0u8; usize::try_from(page_bytes()).unwrap_or(4096)];
    let (mut read, mut zero) = (0u64, 0u64);
    for index in 0..count {
        // Evenly spread, from a random start: one page of each stretch.
        let place = u128::from(pages) * u128::from(index) / u128::from(count) + u128::from(phase) % u128::from((pages / count).max(1));
        let Some(addr) = nth_page(&huge, u64::try_from(place).unwrap_or(0)) else { continue };
        let bytes = page.len();
        if memory.read_pieces(&[Piece { addr, bytes }], &mut page) == bytes {
            read += 1;
            zero += u64::from(page.iter().all(|&byte| byte == 0));
        }
    }
    estimate(pages * page_bytes(), read, zero)
}

fn estimate(huge_bytes: u64, read: u64, zero: u64) -> Option<Zeros> {
    if read == 0 {
        return None;
    }
    let share = zero as f64 / read as f64;
    // If few pages were read, and all or none of them are zero, the error is not 0: one more page might be different.
    let spread = (share * (1.0 - share) / read as f64).sqrt().max(1.0 / read as f64);
    Some(Zeros { bytes_est: (share * huge_bytes as f64) as u64, bytes_stderr: (spread * huge_bytes as f64) as u64 })
}

/// Address of the n-th page of the ranges.
fn nth_page(ranges: &[Range<u64>], mut number: u64) -> Option<u64> {
    for range in ranges {
        let pages = (range.end - range.start) / page_bytes();
        if number < pages {
            return Some(range.start + number * page_bytes());
        }
        number -= pages;
    }
    None
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_through_the_ranges() {
        let ranges = [0x1000..0x3000, 0x8000..0x9000];
        let pages: Vec<_> = (0..4).map(|number| nth_page(&ranges, number)).collect();
        assert_eq!(pages, [Some(0x1000), Some(0x2000), Some(0x8000), None]);
    }

    #[test]
    fn an_estimate_states_an_error_even_if_all_pages_agree() {
        let all = estimate(1000, 10, 10);
        assert_eq!(all, Some(Zeros { bytes_est: 1000, bytes_stderr: 100 }));
        assert_eq!(estimate(1000, 100, 50).map(|zeros| zeros.bytes_stderr), Some(50));
        assert_eq!(estimate(1000, 0, 0), None);
    }
}
