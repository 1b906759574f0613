//! What the census thread does next. Pure: times are seconds since the start.
//!
//! Each process has a time at which its next cheap census (level top) and its next close one (sampled or full) are due. Of those that are
//! due, the one that has waited longest goes first, so that under pressure all intervals stretch alike. A process without a verdict comes
//! before those that have one, the largest first, and may use either account; one without activity since its last census comes last.
//!
//! What is shed, in this order:
//!
//! 1. full censuses are put off when their account is empty: their figures become older (`census_age_seconds`);
//! 2. heaps whose walk may need too much memory, and all heaps while the agent is above its memory limit, are sampled, not walked;
//! 3. cheap censuses are put off when their account is empty;
//! 4. of more processes than the limit, the smallest are not watched.
//!
//! Skipped rounds are counted.

use super::budget::{Budget, Work};
use super::config::CensusConfig;
use crate::census::Level;

/// Bytes of the chunk table per byte of extent: 4 bytes per chunk, and an average of 64 bytes per chunk is low for a whole heap.
const TABLE_BYTES_PER_EXTENT: u64 = 16;

/// When a process's censuses are due.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Due {
    /// Time of the next cheap census.
    pub top_s: f64,
    /// Time of the next close one; `None`: not before a cheap one has found a heap.
    pub full_s: Option<f64>,
    /// Resident bytes of a process that has no verdict yet, 0 if a sample gave none; `None` = it has one.
    pub unjudged_bytes: Option<u64>,
    /// Whether its close census gives way to those of others, because it has had no activity since the last one.
    pub gives_way: bool,
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
    let mut first_quiet: Option<(f64, K)> = None;
    // Without a verdict: the largest of those that are due, and the time of the next one that is not.
    let mut unjudged: Option<(u64, std::cmp::Reverse<K>, f64)> = None;
    let mut unjudged_later_s = f64::INFINITY;
    let earlier = |first: &mut Option<(f64, K)>, due_s: f64, key: K| {
        if first.is_none_or(|(other_s, other)| (due_s, key) < (other_s, other)) {
            *first = Some((due_s, key));
        }
    };
    for (key, due) in dues {
        earlier(&mut first_top, due.top_s, key);
        match (due.full_s, due.unjudged_bytes) {
            (Some(full_s), Some(bytes)) if full_s <= now_s => {
                let one = (bytes, std::cmp::Reverse(key), full_s);
                if unjudged.is_none_or(|other| (other.0, other.1) < (one.0, one.1)) {
                    unjudged = Some(one);
                }
            }
            (Some(full_s), Some(_)) => unjudged_later_s = unjudged_later_s.min(full_s),
            (Some(full_s), None) => earlier(if due.gives_way { &mut first_quiet } else { &mut first_full }, full_s, key),
            (None, _) => {}
        }
    }
    let mut wake_s = unjudged_later_s;
    if let Some((_, std::cmp::Reverse(key), due_s)) = unjudged {
        // From the cheap ones' account it is taken in its turn: on a node where processes start all the time the others get censuses too.
        let in_turn = first_top.is_none_or(|(top_s, _)| due_s <= top_s);
        if budget.allows(Work::Full) || (in_turn && budget.allows(Work::Cheap)) {
            return Next::Take(key, Work::First);
        }
        wake_s = wake_s.min(now_s + budget.wait_s(Work::Full));
        if in_turn {
            wake_s = wake_s.min(now_s + budget.wait_s(Work::Cheap));
        }
    }
    for (first, work) in [(first_top, Work::Cheap), (first_full, Work::Full), (first_quiet, Work::Full)] {
        let Some((due_s, key)) = first else { continue };
        if due_s <= now_s && budget.allows(work) {
            return Next::Take(key, work);
        }
        wake_s = wake_s.min(due_s.max(now_s + budget.wait_s(work)));
    }
    Next::Wait(wake_s)
}

/// Rounds skipped when something due at `due_s` is done at `now_s`.
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
    // The last count plus half for growth is a better estimate than one from the extent.
    let table_bytes = chunks.map_or(extent_bytes / TABLE_BYTES_PER_EXTENT, |chunks| chunks.saturating_mul(6));
    if table_bytes > config.walk_memory_mib << 20 { Err(Shed::TooLarge) } else { Ok(Level::Full) }
}

/// Whether the extent changed so much that a full census should come early.
#[must_use]
pub fn has_moved(extent_bytes: u64, at_full_bytes: u64, percent: u64) -> bool {
    let change = u128::from(extent_bytes.abs_diff(at_full_bytes)) * 100;
    change > 0 && change >= u128::from(at_full_bytes) * u128::from(percent)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn due(top_s: f64, full_s: f64) -> Due {
        Due { top_s, full_s: Some(full_s), unjudged_bytes: None, gives_way: false }
    }

    #[test]
    fn processes_without_a_verdict_go_first_by_size_and_in_turn_from_either_account() {
        let mut budget = Budget::new(0.01, 1.0);
        let unjudged = |full_s: f64, bytes| Due { unjudged_bytes: Some(bytes), ..due(20.0, full_s) };
        let dues = [(1, due(5.0, 1.0)), (2, unjudged(6.0, 100)), (3, unjudged(8.0, 200)), (4, unjudged(30.0, 900))];
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Take(3, Work::First));
        // Without credit for close ones it waits for the cheap one that has waited longer.
        budget.spend(Work::Full, 2.0);
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Take(1, Work::Cheap));
        let dues = [(1, due(9.0, 1.0)), (3, unjudged(8.0, 200))];
        assert_eq!(next(dues.into_iter(), 10.0, &budget), Next::Take(3, Work::First));
        budget.spend(Work::Cheap, 2.0);
        assert!(matches!(next(dues.into_iter(), 10.0, &budget), Next::Wait(until_s) if until_s > 300.0));
        // One that is not due yet is waited for.
        let dues = [(4, Due { top_s: 50.0, ..unjudged(30.0, 900) })];
        assert_eq!(next(dues.into_iter(), 10.0, &Budget::new(0.01, 1.0)), Next::Wait(30.0));
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
    fn an_idle_process_yields_to_others_and_is_taken_when_none_is_due() {
        let budget = Budget::new(0.01, 1.0);
        let quiet = Due { gives_way: true, ..due(20.0, 5.0) };
        assert_eq!(next([(1, quiet), (2, due(20.0, 9.0))].into_iter(), 10.0, &budget), Next::Take(2, Work::Full));
        assert_eq!(next([(1, quiet), (2, due(20.0, 11.0))].into_iter(), 10.0, &budget), Next::Take(1, Work::Full));
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

    /// A hundred processes with the default settings, each with the cost measured for programs of a hundred MiB, while another one starts
    /// every two seconds and soon ends: all hundred have a verdict within five minutes, and no more is spent than the budget allows.
    #[test]
    fn a_hundred_processes_have_a_verdict_within_five_minutes_while_others_come_and_go() {
        let (rate, credit_s, cost_max_s) = (0.005, 1.0, 0.03);
        let mut budget = Budget::new(rate, credit_s);
        let mut dues: std::collections::BTreeMap<usize, Due> = (0..100).map(|key| (key, due(0.0, f64::INFINITY))).collect();
        dues.values_mut().for_each(|due| (due.full_s, due.unjudged_bytes) = (None, Some(100 << 20)));
        let (mut now_s, mut spent_s, mut begun) = (0.0, 0.0, 0usize);
        while now_s < 300.0 {
            let before_s = now_s;
            if now_s >= 2.0 * begun as f64 {
                dues.insert(1000 + begun, Due { full_s: None, unjudged_bytes: Some(20 << 20), ..due(now_s, 0.0) });
                // It ends after 20 s.
                dues.remove(&(990 + begun));
                begun += 1;
            }
            let taken = next(dues.iter().map(|(&key, &due)| (key, due)), now_s, &budget);
            if let Next::Take(key, work) = taken {
                let one = dues.get_mut(&key).unwrap();
                let cost_s = match work {
                    Work::Cheap => 0.002,
                    Work::First => 0.01,
                    Work::Full | Work::Asked => cost_max_s,
                };
                budget.spend(work, cost_s);
                spent_s += cost_s;
                now_s += cost_s;
                if work == Work::Cheap {
                    one.top_s = now_s + 15.0;
                    one.full_s = one.full_s.or(Some(now_s + if key < 100 { 0.0 } else { 30.0 }));
                } else {
                    (one.full_s, one.unjudged_bytes) = (Some(if work == Work::First { now_s } else { now_s + 300.0 }), None);
                }
            } else {
                now_s += 0.1;
            }
            budget.fill(now_s - before_s);
            // Each of the two accounts may be overdrawn by one census.
            assert!(spent_s <= credit_s + rate * now_s + 2.0 * cost_max_s, "{spent_s} s after {now_s} s");
        }
        let without = dues.iter().filter(|(key, due)| **key < 100 && due.unjudged_bytes.is_some()).count();
        assert_eq!(without, 0, "processes without a verdict");
    }

    #[test]
    fn skipped_rounds_are_whole_intervals() {
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
    fn a_changed_extent_is_noticed_in_both_directions() {
        assert!(has_moved(120, 100, 20) && has_moved(80, 100, 20) && has_moved(1, 0, 20));
        assert!(!has_moved(119, 100, 20) && !has_moved(0, 0, 20));
        assert!(!has_moved(u64::MAX, u64::MAX, 20));
    }
}
