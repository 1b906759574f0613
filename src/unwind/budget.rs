//! Decides which tables stay in memory: those in use stay, the least recently used are evicted first. Pure; [`crate::capture::tables`]
//! carries the decisions out.

use std::collections::BTreeMap;

/// Default memory for tables: 16 M rows, as many as in a whole distribution.
pub const BUDGET_BYTES_DEFAULT: u64 = 64 << 20;

/// A table used within this many ticks (seconds) is in use and not evicted: otherwise two processes that do not fit together would
/// take turns in evicting each other's tables.
const FRESH_TICKS: u32 = 10;

/// Whether a table can be loaded, and what must be removed for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// It fits once these are removed.
    Admitted {
        /// Numbers of the tables to remove, least recently used first.
        evict: Vec<u32>,
    },
    /// It does not fit in addition to the tables in use.
    Refused,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    last_used: u32,
}

/// Accounting of the memory for tables.
#[derive(Debug, Clone)]
pub struct Budget {
    limit_bytes: u64,
    used_bytes: u64,
    entries: BTreeMap<u32, Entry>,
}

impl Budget {
    /// Nothing is in use.
    #[must_use]
    pub fn new(limit_bytes: u64) -> Self {
        Self { limit_bytes, used_bytes: 0, entries: BTreeMap::new() }
    }

    /// Bytes in use.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Bytes that may be used.
    #[must_use]
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Whether a table of this size fits without evicting anything.
    #[must_use]
    pub fn fits(&self, bytes: u64) -> bool {
        self.used_bytes.saturating_add(bytes) <= self.limit_bytes
    }

    /// Numbers of the loaded tables.
    pub fn tables(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.keys().copied()
    }

    /// Stores when a table was last used; a table that is not loaded is ignored.
    pub fn touch(&mut self, table: u32, tick: u32) {
        if let Some(entry) = self.entries.get_mut(&table) {
            entry.last_used = entry.last_used.max(tick);
        }
    }

    /// Adds a table if there is room or can be made, and removes the tables that are evicted for it.
    pub fn admit(&mut self, table: u32, bytes: u64, now: u32) -> Admission {
        let mut candidates: Vec<(u32, u32, u64)> = self
            .entries
            .iter()
            .filter(|(_, entry)| now.saturating_sub(entry.last_used) >= FRESH_TICKS)
            .map(|(&number, entry)| (entry.last_used, number, entry.bytes))
            .collect();
        candidates.sort_unstable();
        let mut evict = Vec::new();
        let mut free = self.limit_bytes.saturating_sub(self.used_bytes);
        for (_, number, freed) in candidates {
            if free >= bytes {
                break;
            }
            free = free.saturating_add(freed);
            evict.push(number);
        }
        if free < bytes {
            return Admission::Refused;
        }
        for &number in &evict {
            self.remove(number);
        }
        self.used_bytes = self.used_bytes.saturating_add(bytes);
        self.entries.insert(table, Entry { bytes, last_used: now });
        Admission::Admitted { evict }
    }

    /// Removes a table.
    pub fn remove(&mut self, table: u32) {
        if let Some(entry) = self.entries.remove(&table) {
            self.used_bytes = self.used_bytes.saturating_sub(entry.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(evict: &[u32]) -> Admission {
        Admission::Admitted { evict: evict.to_vec() }
    }

    #[test]
    fn only_as_many_of_the_least_recently_used_tables_as_needed_are_evicted() {
        let mut budget = Budget::new(100);
        for number in 0..4 {
            assert_eq!(budget.admit(number, 25, number), admitted(&[]));
        }
        budget.touch(0, 50);
        assert_eq!(budget.admit(9, 30, 60), admitted(&[1, 2]));
        assert_eq!(budget.used_bytes(), 80);
        assert_eq!(budget.tables().collect::<Vec<_>>(), [0, 3, 9]);
    }

    #[test]
    fn a_table_in_use_is_never_evicted() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.admit(1, 60, 0), admitted(&[]));
        budget.touch(1, 100);
        assert_eq!(budget.admit(2, 60, 105), Admission::Refused);
        assert_eq!(budget.tables().collect::<Vec<_>>(), [1]);
        assert_eq!(budget.admit(2, 60, 110), admitted(&[1]));
    }

    #[test]
    fn a_table_larger_than_the_budget_is_refused_and_evicts_nothing() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.admit(1, 60, 0), admitted(&[]));
        assert_eq!(budget.admit(2, 101, 1000), Admission::Refused);
        assert_eq!(budget.used_bytes(), 60);
    }

    #[test]
    fn a_removed_table_releases_its_bytes_once() {
        let mut budget = Budget::new(100);
        assert_eq!(budget.admit(1, 60, 0), admitted(&[]));
        budget.remove(1);
        budget.remove(1);
        assert_eq!(budget.used_bytes(), 0);
        assert!(budget.fits(100));
    }
}
