//! What the census thread does next. Pure: times are seconds since the start.
//!
//! Each process has a time at which its next cheap census (level top) and its next close one (sampled or full) are due. Of those that
//! are due the one that has waited longest goes first, so that under pressure all intervals stretch alike. What is shed, in this order:
//!
//! 1. full censuses are put off when their account is empty: their figures grow old (`census_age_seconds`);
//! 2. heaps whose walk may need too much memory, and all heaps while the agent is above its memory limit, are sampled, not walked;
//! 3. cheap censuses are put off when their account is empty;
//! 4. of more processes than the limit, the smallest are not watched.
//!
//! Whole rounds that were left out are counted.

use super::budget::{Budget, Work};
use super::config::CensusConfig;
use crate::census::Level;

/// Bytes of the chunk table a byte of extent may need: 4 bytes a chunk, and chunks of 64 bytes are small for a whole heap.
const TABLE_BYTES_PER_EXTENT: u64 = 16;

/// When a process is looked at.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Due {
    /// Time of the next cheap census.
    pub top_s: f64,
    /// Time of the next close one; `None`: not before a cheap one has found a heap.
    pub full_s: Option<f64>,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next<K> {
    /// A census of this process.
    Take(K, Work),
    /// Nothing before this time.
    Wait(f64),
}

/// Chooses among the processes.
#[must_use]
pub fn next<K: Copy + Ord>(dues: impl Iterator<Item = (K, Due)>, now_s: f64, budget: &Budget) -> Next<K> {
    let mut first_top: Option<(f64, K)> = None;
    let mut first_full: Option<(f64, K)> = None;
    let earlier = |first: &mut Option<(f64, K)>, due_s: f64, key: K| {
        if first.is_none_or(|(other_s, other)| (due_s, key) < (other_s, other)) {
            *first = Some((due_s, key));
        }
    };
    for (key, due) in dues {
        earlier(&mut first_top, due.top_s, key);
        if let Some(full_s) = due.full_s {
            earlier(&mut first_full, full_s, key);
        }
    }
    let mut wake_s = f64::INFINITY;
    for (first, work) in [(first_top, Work::Cheap), (first_full, Work::Full)] {
        let Some((due_s, key)) = first else { continue };
        if due_s <= now_s && budget.allows(work) {
            return Next::Take(key, work);
        }
        wake_s = wake_s.min(due_s.max(now_s + budget.wait_s(work)));
    }
    Next::Wait(wake_s)
}

/// Whole rounds that were left out when something due at `due_s` is done at `now_s`.
#[must_use]
pub fn rounds_skipped(due_s: f64, now_s: f64, interval_s: f64) -> u64 {
    ((now_s - due_s) / interval_s.max(1e-3)).max(0.0) as u64
}

/// Why a heap is sampled instead of walked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shed {
    /// The walk may need more memory than configured.
    TooLarge,
    /// The agent itself is above its limit.
    OwnMemory,
}

/// The level of a close census of a heap of `extent_bytes`. `chunks` are those that its last full census found.
///
/// # Errors
/// The reason why it is to be sampled instead.
pub fn close_level(extent_bytes: u64, chunks: Option<u64>, own_rss_bytes: u64, config: &CensusConfig) -> Result<Level, Shed> {
    if own_rss_bytes > config.memory_max_mib << 20 {
        return Err(Shed::OwnMemory);
    }
    // What was found, and half as much again for growth, is a better guess than the extent.
    let table_bytes = chunks.map_or(extent_bytes / TABLE_BYTES_PER_EXTENT, |chunks| chunks.saturating_mul(6));
    if table_bytes > config.walk_memory_mib << 20 { Err(Shed::TooLarge) } else { Ok(Level::Full) }
}

/// Whether the extent changed by so much that a full census should come early.
#[must_use]
pub fn has_moved(extent_bytes: u64, at_full_bytes: u64, percent: u64) -> bool {
    let change = u128::from(extent_bytes.abs_diff(at_full_bytes)) * 100;
    change > 0 && change >= u128::from(at_full_bytes) * u128::from(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(top_s: f64, full_s: f64) -> Due {
        Due { top_s, full_s: Some(full_s) }
    }

    #[test]
    fn the_one_that_has_waited_longest_goes_first() {
        let budget = Budget::new(0.01, 1.0);
        let dues = [(1, due(9.0, 50.0)), (2, due(7.0, 50.0)), (3, due(8.0, 1.0))];
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Take(2, Work::Cheap));
        let later = dues.map(|(key, due)| (key, Due { top_s: 20.0, ..due }));
        assert_eq!(next(later.into_iter(), 10.0, &budget), Next::Take(3, Work::Full));
    }

    #[test]
    fn full_censuses_are_shed_before_cheap_ones() {
        let mut budget = Budget::new(0.01, 1.0);
        budget.spend(Work::Full, 2.0);
        let dues = [(1, due(5.0, 5.0))];
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Take(1, Work::Cheap));
        let dues = [(1, due(11.0, 5.0))];
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Wait(11.0));
        budget.spend(Work::Cheap, 2.0);
        let Next::Wait(until_s) = next([(1, due(5.0, 5.0))].into_iter(), 10.0, &budget) else { panic!("nothing may be taken") };
        // 1.5 s of debt at half of 1 %.
        assert!((309.0..311.0).contains(&until_s), "{until_s}");
    }

    #[test]
    fn without_processes_there_is_nothing_to_wait_for() {
        assert_eq!(next(std::iter::empty::<(u32, Due)>(), 10.0, &Budget::new(0.01, 1.0)), Next::Wait(f64::INFINITY));
    }

    #[test]
    fn every_process_is_reached_however_small_the_budget() {
        let mut budget = Budget::new(0.001, 0.0);
        let mut dues = vec![due(0.0, 0.0); 50];
        let mut taken = [[0u32; 2]; 50];
        let mut now_s = 0.0;
        while now_s < 20_000.0 {
            let before_s = now_s;
            match next(dues.iter().copied().enumerate(), now_s, &budget) {
                Next::Take(key, work) => {
                    budget.spend(work, if work == Work::Cheap { 0.002 } else { 0.05 });
                    taken[key][usize::from(work == Work::Full)] += 1;
                    if work == Work::Cheap { dues[key].top_s = now_s + 15.0 } else { dues[key].full_s = Some(now_s + 300.0) }
                }
                Next::Wait(until_s) => now_s = until_s.max(now_s + 0.01),
            }
            budget.fill(now_s - before_s);
        }
        let tops: Vec<u32> = taken.iter().map(|one| one[0]).collect();
        let fulls: Vec<u32> = taken.iter().map(|one| one[1]).collect();
        for counts in [tops, fulls] {
            let (least, most) = (counts.iter().min().copied().unwrap_or(0), counts.iter().max().copied().unwrap_or(0));
            assert!(least >= 3 && most - least <= 1, "{counts:?}");
        }
    }

    #[test]
    fn left_out_rounds_are_whole_intervals() {
        assert_eq!(rounds_skipped(10.0, 24.9, 15.0), 0);
        assert_eq!(rounds_skipped(10.0, 40.0, 15.0), 2);
        assert_eq!(rounds_skipped(10.0, 5.0, 15.0), 0);
    }

    #[test]
    fn a_heap_too_large_for_the_table_is_sampled() {
        let config = CensusConfig::default();
        assert_eq!(close_level(1 << 30, None, 0, &config), Ok(Level::Full));
        assert_eq!(close_level(2 << 30, None, 0, &config), Err(Shed::TooLarge));
        // 4 GiB of 1 KiB chunks are known to fit.
        assert_eq!(close_level(4 << 30, Some(4 << 20), 0, &config), Ok(Level::Full));
        assert_eq!(close_level(1 << 30, Some(1 << 30), 0, &config), Err(Shed::TooLarge));
        assert_eq!(close_level(1 << 20, None, 257 << 20, &config), Err(Shed::OwnMemory));
    }

    #[test]
    fn a_moved_extent_is_noticed_in_both_directions() {
        assert!(has_moved(120, 100, 20) && has_moved(80, 100, 20) && has_moved(1, 0, 20));
        assert!(!has_moved(119, 100, 20) && !has_moved(0, 0, 20));
        assert!(!has_moved(u64::MAX, u64::MAX, 20));
    }
}
