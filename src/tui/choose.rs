//! Which stacks a sample carries: the largest by each sort key. Pure.

use super::sample::{Numbers, SortKey};

/// Stacks kept by each sort key. More than a screen shows, so that filters find something; with five keys a sample has at most 1,000 stacks of
/// a few KiB each.
pub const STACKS_PER_KEY: usize = 200;

/// The indices, in ascending order, of the rows that are among the `per_key` largest by any key. Rows without a value for a key do not count
/// for it.
pub fn largest(rows: &[Numbers], per_key: usize) -> Vec<usize> {
    let mut chosen = Vec::new();
    for key in SortKey::ALL {
        let mut candidates: Vec<(u64, usize)> =
            rows.iter().enumerate().map(|(index, row)| (key.of(row), index)).filter(|(value, _)| *value > 0).collect();
        if candidates.len() > per_key && per_key > 0 {
            candidates.select_nth_unstable_by(per_key - 1, |a, b| b.cmp(a));
        }
        chosen.extend(candidates.into_iter().take(per_key).map(|(_, index)| index));
    }
    chosen.sort_unstable();
    chosen.dedup();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_largest_rows_and_rows_of_several_keys_come_once() {
        let live = |inuse_bytes| Numbers { inuse_bytes, inuse_allocations: 1, ..Numbers::default() };
        let rate = |rate| Numbers { allocations_per_s: Some(rate), ..Numbers::default() };
        let rows = [live(5), live(50), rate(7.0), live(40), rate(9.0), Numbers { growth_bytes: 1, ..live(1) }, Numbers::default()];
        assert_eq!(largest(&rows, 1), [1, 4, 5]);
        assert_eq!(largest(&rows, 2), [1, 2, 3, 4, 5]);
        assert_eq!(largest(&rows, 100), [0, 1, 2, 3, 4, 5]);
        assert_eq!(largest(&[], 2), [0usize; 0]);
    }
}
