//! Disjoint address ranges, each with a value.
//!
//! A small type over `BTreeMap` instead of a crate: ranges are overwritten and cut, adjacent ones are not merged (two adjacent mappings are two
//! mappings), and a cut must report what it removed.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint half-open ranges, sorted by address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeMap<V> {
    /// start → (end, value)
    ranges: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RangeMap<V> {
    fn default() -> Self {
        Self { ranges: BTreeMap::new() }
    }
}

impl<V: Copy> RangeMap<V> {
    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.ranges.len()
    }

    /// Whether there is no range.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The range that holds an address.
    #[inline]
    pub fn get(&self, addr: u64) -> Option<(Range<u64>, V)> {
        let (&start, &(end, value)) = self.ranges.range(..=addr).next_back()?;
        (addr < end).then_some((start..end, value))
    }

    /// All ranges by address.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (Range<u64>, V)> + '_ {
        self.ranges.iter().map(|(&start, &(end, value))| (start..end, value))
    }

    /// The ranges that start in a range, by address.
    pub fn range(&self, range: Range<u64>) -> impl DoubleEndedIterator<Item = (Range<u64>, V)> + '_ {
        let starts = range.start..range.end.max(range.start);
        self.ranges.range(starts).map(|(&start, &(end, value))| (start..end, value))
    }

    /// Sets a range, over whatever was there. An empty range changes nothing.
    pub fn insert(&mut self, range: Range<u64>, value: V) {
        if range.is_empty() {
            return;
        }
        self.cut(range.clone(), |_, _| {});
        self.ranges.insert(range.start, (range.end, value));
    }

    /// Removes a range, giving each piece that was there to `taken`, by address.
    pub fn cut(&mut self, range: Range<u64>, mut taken: impl FnMut(Range<u64>, V)) {
        if range.is_empty() {
            return;
        }
        let mut next =
            self.ranges.range(..range.start).next_back().map(|(&start, _)| start).filter(|start| self.ranges[start].0 > range.start);
        loop {
            let Some(start) = next.take().or_else(|| self.ranges.range(range.clone()).next().map(|(&start, _)| start)) else { return };
            let Some((end, value)) = self.ranges.remove(&start) else { return };
            if start < range.start {
                self.ranges.insert(start, (range.start, value));
            }
            if end > range.end {
                self.ranges.insert(range.end, (end, value));
            }
            taken(start.max(range.start)..end.min(range.end), value);
        }
    }

    /// Changes the value of a range, cutting ranges at its ends. Gaps stay gaps.
    pub fn update(&mut self, range: Range<u64>, mut change: impl FnMut(Range<u64>, V) -> V) {
        let mut pieces = Vec::new();
        self.cut(range, |piece, value| pieces.push((piece, value)));
        for (piece, value) in pieces {
            let value = change(piece.clone(), value);
            self.ranges.insert(piece.start, (piece.end, value));
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u64, u64, u8),
        Cut(u64, u64),
        Update(u64, u64),
    }

    fn any_op() -> impl Strategy<Value = Op> {
        let ends = (0..64_u64, 0..24_u64).prop_map(|(start, len)| (start, start + len));
        prop_oneof![
            3 => (ends.clone(), 0..200_u8).prop_map(|((start, end), value)| Op::Insert(start, end, value)),
            2 => ends.clone().prop_map(|(start, end)| Op::Cut(start, end)),
            1 => ends.prop_map(|(start, end)| Op::Update(start, end)),
        ]
    }

    proptest! {
        #[test]
        fn ranges_hold_at_each_address_what_an_array_of_addresses_holds(ops in prop::collection::vec(any_op(), 1..60)) {
            let mut ranges = RangeMap::default();
            let mut array = [None; 100];
            for op in ops {
                match op {
                    Op::Insert(start, end, value) => {
                        ranges.insert(start..end, value);
                        array[start as usize..end as usize].fill(Some(value));
                    }
                    Op::Cut(start, end) => {
                        let mut taken = 0;
                        ranges.cut(start..end, |piece, _| taken += piece.end - piece.start);
                        let cells = &mut array[start as usize..end as usize];
                        prop_assert_eq!(taken as usize, cells.iter().flatten().count());
                        cells.fill(None);
                    }
                    Op::Update(start, end) => {
                        ranges.update(start..end, |_, value| value + 1);
                        array[start as usize..end as usize].iter_mut().flatten().for_each(|value| *value += 1);
                    }
                }
                for (addr, &truth) in array.iter().enumerate() {
                    prop_assert_eq!(ranges.get(addr as u64).map(|(_, value)| value), truth);
                }
                prop_assert!(ranges.iter().all(|(range, _)| !range.is_empty()));
            }
        }
    }
}
