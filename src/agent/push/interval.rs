//! Determines the part of a growing profile that belongs to one push. Pure.
//!
//! A profile counts from the moment when the process was first watched. A server adds up what it is sent, so each push contains what was
//! allocated since the last one, together with the state of the heap at its end (see [`ValueKind::adds_up_over_time`]).
//!
//! The sent values are kept by stack. Estimates may fall, and a stack's name may change when a better one is found, but servers accept no
//! negative values. So the total sent is never more than the profile's own total: if some stacks fell, the increases of the others are
//! reduced in proportion, and catch up later.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::profile::{KindSet, Profile, Stack, ValueKind, Values};

/// Profiles whose starts differ by at most this many seconds are one continued profile: the start is calculated from two clocks.
const SAME_START_S: f64 = 1.0;

/// The values of one push.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Interval {
    /// The kinds that add up over time: for the interval alone.
    pub sums: KindSet,
    /// The other kinds: at the end of the interval.
    pub gauges: KindSet,
    /// The values of each stack, in the order of [`Profile::stacks`].
    pub rows: Vec<Values>,
    /// Its end, nanoseconds since the Unix epoch.
    pub end_unix_ns: u64,
    /// Its length in nanoseconds.
    pub duration_ns: u64,
}

impl Interval {
    /// Its start, nanoseconds since the Unix epoch.
    pub fn start_unix_ns(&self) -> u64 {
        self.end_unix_ns.saturating_sub(self.duration_ns)
    }

    /// The state of the heap at its end, as a number that differs if the state does.
    pub fn state(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for row in &self.rows {
            self.gauges.iter().for_each(|kind| row.get(kind).hash(&mut hasher));
        }
        hasher.finish()
    }

    /// Whether any stack has a non-zero value of one of these kinds.
    pub fn has_any(&self, kinds: KindSet) -> bool {
        self.rows.iter().any(|row| kinds.iter().any(|kind| row.get(kind) > 0))
    }
}

/// What an interval took from the account, so that it can be returned.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Receipt {
    start_unix_ns: u64,
    from_s: f64,
    taken: Vec<(ValueKind, u64, u64)>,
}

impl Receipt {
    /// Its size in memory.
    pub fn bytes(&self) -> usize {
        self.taken.len() * size_of::<(ValueKind, u64, u64)>()
    }
}

/// The values sent of one kind.
#[derive(Debug, Default)]
struct Sent {
    by_stack: HashMap<u64, u64>,
    total: u64,
}

/// The values sent of a growing profile.
#[derive(Debug, Default)]
pub(super) struct Account {
    start_unix_ns: u64,
    /// Length of the profile at the last update.
    duration_s: f64,
    /// Where the next interval begins, in seconds of the profile.
    from_s: f64,
    sent: BTreeMap<ValueKind, Sent>,
}

impl Account {
    /// The interval from the last push to this profile, which was completed at `end_unix_ns`.
    pub fn next(&mut self, profile: &Profile, end_unix_ns: u64) -> (Interval, Receipt) {
        let meta = &profile.meta;
        let is_another = (meta.start_unix_ns.abs_diff(self.start_unix_ns) as f64 / 1e9) > SAME_START_S || meta.duration_s < self.duration_s;
        if is_another {
            *self = Self { start_unix_ns: meta.start_unix_ns, ..Self::default() };
        }
        self.duration_s = meta.duration_s;
        let (sums, gauges): (Vec<ValueKind>, Vec<ValueKind>) = meta.kinds.iter().partition(|kind| kind.adds_up_over_time());
        let keys = keys(profile);
        let mut rows: Vec<Values> = profile.stacks().iter().map(|stack| only(&gauges, stack)).collect();
        let mut receipt = Receipt { start_unix_ns: self.start_unix_ns, from_s: self.from_s, taken: Vec::new() };
        for &kind in &sums {
            let values: Vec<u64> = profile.stacks().iter().map(|stack| stack.values.get(kind)).collect();
            let increases = self.sent.entry(kind).or_default().take(&keys, &values);
            for ((row, &key), increase) in rows.iter_mut().zip(&keys).zip(increases).filter(|(_, increase)| *increase > 0) {
                row.set(kind, increase);
                receipt.taken.push((kind, key, increase));
            }
        }
        let duration_s = meta.duration_s - self.from_s;
        self.from_s = meta.duration_s;
        let set = |kinds: Vec<ValueKind>| kinds.into_iter().collect::<KindSet>();
        // At least a nanosecond: some servers take a length of 0 for a point in time. `as` saturates, and converts NaN to 0.
        let duration_ns = ((duration_s * 1e9) as u64).max(1);
        (Interval { sums: set(sums), gauges: set(gauges), rows, end_unix_ns, duration_ns }, receipt)
    }

    /// Returns values that did not reach the server: the next interval contains them, and extends back to them.
    pub fn give_back(&mut self, receipt: &Receipt) {
        if receipt.start_unix_ns != self.start_unix_ns {
            return;
        }
        self.from_s = self.from_s.min(receipt.from_s);
        for (kind, key, value) in &receipt.taken {
            let Some(sent) = self.sent.get_mut(kind) else { continue };
            sent.total = sent.total.saturating_sub(*value);
            if let Some(of_stack) = sent.by_stack.get_mut(key) {
                *of_stack = of_stack.saturating_sub(*value);
            }
        }
    }
}

impl Sent {
    /// The increase of each stack over what was sent of it, limited in sum to the increase of the total over all that was sent.
    fn take(&mut self, keys: &[u64], values: &[u64]) -> Vec<u64> {
        let total = values.iter().fold(0u64, |sum, value| sum.saturating_add(*value));
        let due = total.saturating_sub(self.total);
        let sent = |key: &u64| self.by_stack.get(key).copied().unwrap_or(0);
        let above: Vec<u64> = keys.iter().zip(values).map(|(key, value)| value.saturating_sub(sent(key))).collect();
        let all_above: u128 = above.iter().map(|&value| u128::from(value)).sum();
        let share = |upto: u128| upto.saturating_mul(u128::from(due)).checked_div(all_above).unwrap_or(0);
        let mut before = 0;
        let mut increases = Vec::with_capacity(keys.len());
        for (key, value) in keys.iter().zip(above) {
            // Cumulative, so that rounding errors cancel: the sum is exactly what is due.
            let after = before + u128::from(value);
            let increase = u64::try_from(share(after).saturating_sub(share(before))).unwrap_or(u64::MAX);
            before = after;
            if increase > 0 {
                *self.by_stack.entry(*key).or_default() += increase;
            }
            increases.push(increase);
        }
        self.total = self.total.saturating_add(due);
        // For stacks that no longer exist only the total matters.
        if self.by_stack.len() > 2 * keys.len() {
            let present: HashSet<&u64> = keys.iter().collect();
            self.by_stack.retain(|key, _| present.contains(key));
        }
        increases
    }
}

fn only(kinds: &[ValueKind], stack: &Stack) -> Values {
    kinds.iter().fold(Values::default(), |row, &kind| row.with(kind, stack.values.get(kind)))
}

/// A key for each stack that is the same in the next profile.
fn keys(profile: &Profile) -> Vec<u64> {
    let hash = |value: &dyn Fn(&mut DefaultHasher)| {
        let mut hasher = DefaultHasher::new();
        value(&mut hasher);
        hasher.finish()
    };
    let frames: Vec<u64> = profile.frames().iter().map(|frame| hash(&|hasher| frame.hash(hasher))).collect();
    let key = |stack: &Stack| {
        hash(&|hasher| {
            (stack.pid, &stack.truncated).hash(hasher);
            stack.frames.iter().for_each(|frame| frames[frame.index()].hash(hasher));
        })
    };
    profile.stacks().iter().map(key).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::Metadata;
    use crate::profile::testing::frame;

    const KINDS: [ValueKind; 4] = [ValueKind::AllocObjects, ValueKind::AllocSpace, ValueKind::InuseSpace, ValueKind::PinnedSpace];

    /// A profile of this length: for each stack the bytes allocated so far, and the live bytes.
    fn profile(start_s: u64, duration_s: f64, rows: &[(&str, u64, u64)]) -> Profile {
        let start_unix_ns = start_s * 1_000_000_000;
        let mut profile = Profile::new(Metadata { start_unix_ns, duration_s, kinds: KINDS.into_iter().collect(), ..Metadata::default() });
        for &(name, allocated, live) in rows {
            let values = Values::default().with(ValueKind::AllocSpace, allocated).with(ValueKind::InuseSpace, live);
            profile.add(7, &[frame(name, 1)], None, &values);
        }
        profile
    }

    fn values(interval: &Interval, kind: ValueKind) -> Vec<u64> {
        interval.rows.iter().map(|row| row.get(kind)).collect()
    }

    #[test]
    fn each_interval_has_its_own_allocations_and_the_heap_at_its_end() {
        let mut account = Account::default();
        let (first, _) = account.next(&profile(1000, 60.0, &[("a", 100, 10), ("b", 50, 50)]), 1_060_000_000_000);
        assert_eq!((values(&first, ValueKind::AllocSpace), values(&first, ValueKind::InuseSpace)), (vec![100, 50], vec![10, 50]));
        assert_eq!((first.start_unix_ns(), first.duration_ns), (1_000_000_000_000, 60_000_000_000));
        let (second, _) = account.next(&profile(1000, 90.0, &[("b", 50, 40), ("a", 130, 5), ("c", 7, 7)]), 1_090_000_000_000);
        assert_eq!((values(&second, ValueKind::AllocSpace), values(&second, ValueKind::InuseSpace)), (vec![0, 30, 7], vec![40, 5, 7]));
        assert_eq!((second.start_unix_ns(), second.duration_ns), (1_060_000_000_000, 30_000_000_000));
        assert_eq!(second.sums.iter().map(ValueKind::name).collect::<Vec<_>>(), ["alloc_objects", "alloc_space"]);
        assert_eq!(second.gauges.iter().map(ValueKind::name).collect::<Vec<_>>(), ["inuse_space", "pinned_space"]);
    }

    #[test]
    fn a_recording_that_begins_anew_is_sent_from_its_own_start() {
        let mut account = Account::default();
        account.next(&profile(1000, 60.0, &[("a", 100, 10)]), 1_060_000_000_000);
        let (again, _) = account.next(&profile(2000, 5.0, &[("a", 30, 10)]), 2_005_000_000_000);
        assert_eq!((values(&again, ValueKind::AllocSpace), again.start_unix_ns()), (vec![30], 2_000_000_000_000));
        // The same start by the clock, but a shorter profile: released and watched again.
        let (third, _) = account.next(&profile(2000, 2.0, &[("a", 20, 10)]), 2_500_000_000_000);
        assert_eq!((values(&third, ValueKind::AllocSpace), third.duration_ns), (vec![20], 2_000_000_000));
    }

    #[test]
    fn what_did_not_arrive_is_in_the_next_interval() {
        let mut account = Account::default();
        account.next(&profile(0, 10.0, &[("a", 100, 0)]), 10);
        let (_, lost) = account.next(&profile(0, 20.0, &[("a", 150, 0), ("b", 5, 0)]), 20);
        account.next(&profile(0, 30.0, &[("a", 160, 0), ("b", 6, 0)]), 30);
        account.give_back(&lost);
        let (after, receipt) = account.next(&profile(0, 40.0, &[("a", 170, 0), ("b", 6, 0)]), 40);
        assert_eq!((values(&after, ValueKind::AllocSpace), after.duration_ns), (vec![60, 5], 30_000_000_000));
        // Values of a recording that has ended cannot be sent again.
        account.next(&profile(100, 1.0, &[("a", 3, 0)]), 50);
        account.give_back(&receipt);
        let (none, _) = account.next(&profile(100, 2.0, &[("a", 3, 0)]), 60);
        assert_eq!(values(&none, ValueKind::AllocSpace), [0]);
    }

    proptest! {
        #[test]
        fn whatever_estimates_do_the_intervals_add_up_to_the_highest_total(
            looks in prop::collection::vec(prop::collection::vec((0usize..6, 0u64..1 << 40), 0..8), 1..12),
        ) {
            let mut account = Account::default();
            let (mut sent, mut highest) = (0u128, 0u128);
            for (at, rows) in looks.iter().enumerate() {
                let names = ["a", "b", "c", "d", "e", "f"];
                let rows: Vec<(&str, u64, u64)> = rows.iter().map(|&(name, value)| (names[name], value, value)).collect();
                let profile = profile(0, at as f64, &rows);
                let (interval, _) = account.next(&profile, at as u64);
                sent += values(&interval, ValueKind::AllocSpace).iter().map(|&value| u128::from(value)).sum::<u128>();
                highest = highest.max(rows.iter().map(|row| u128::from(row.1)).sum());
                prop_assert_eq!(sent, highest);
                for (row, stack) in interval.rows.iter().zip(profile.stacks()) {
                    prop_assert!(row.get(ValueKind::AllocSpace) <= stack.values.get(ValueKind::AllocSpace));
                    prop_assert_eq!(row.get(ValueKind::InuseSpace), stack.values.get(ValueKind::InuseSpace));
                }
            }
        }
    }
}
