//! The levels below full: extents from the page map's words only, without reading records; at level sampled additionally a fixed number of
//! records, drawn from each size class, for the occupancy of its extents.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use super::record::{ACTIVE, CLASSES};

/// Records read, of all classes: some 6 ms.
const RECORDS_READ: u64 = 2048;
/// Minimum number of records read of each class.
const OF_CLASS_MIN: u64 = 64;
/// Extents in use that are kept, 8 bytes each; beyond that the estimate covers the first ones only, and its error says so.
const EXTENTS_MAX: usize = 1 << 23;

/// The 2 MiB in which a record lies. jemalloc takes records from blocks that belong to one arena, so all records in the same 2 MiB are of
/// one arena.
pub type Place = u64;

/// An extent as the page map describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ActiveExtent {
    record: u64,
    word: u64,
    start: u64,
    end: u64,
}

impl ActiveExtent {
    /// Its size class, if it seems to be in use. In 5.3 the state shows that; 5.2 may still have the former class, which the record shows.
    fn class(&self) -> Option<u64> {
        Some(self.word >> 48).filter(|&class| class < CLASSES && self.word >> 2 & 7 == ACTIVE)
    }
}

/// Extents in use of one size class and kind.
#[derive(Debug, Default)]
struct Stratum {
    records: Vec<u64>,
    bytes: u64,
}

/// What the page map alone shows.
#[derive(Debug, Default)]
pub struct Quick {
    /// The extents by ascending address, each with its record's place, joined where they touch and their places agree.
    pub extents: Vec<(Place, Range<u64>)>,
    /// Extents seen.
    pub count: u64,
    /// A record of each place.
    pub records: BTreeMap<Place, u64>,
    /// By size class, and whether slabs or large blocks.
    strata: BTreeMap<(u64, bool), Stratum>,
    kept: usize,
    left_out_bytes: u64,
    last: Option<ActiveExtent>,
}

/// An estimate with its standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes: f64,
    /// Standard error of it.
    pub stderr_bytes: f64,
    /// Invalid records.
    pub torn: u64,
    /// Records read.
    pub read: u64,
}

impl Quick {
    /// Takes the next entry of the page map, by ascending address.
    pub fn entry(&mut self, page: u64, page_bytes: u64, record: u64, word: u64, keeps_extents: bool) {
        let end = page.saturating_add(page_bytes);
        match &mut self.last {
            // The first and the last page of an extent refer to its record, of a slab all pages do.
            Some(last) if last.record == record => last.end = end,
            _ => {
                self.close(keeps_extents);
                self.last = Some(ActiveExtent { record, word, start: page, end });
            }
        }
    }

    /// Ends the last extent.
    pub fn close(&mut self, keeps_extents: bool) {
        let Some(seen) = self.last.take() else { return };
        self.count += 1;
        let place = seen.record >> 21;
        match self.extents.last_mut() {
            Some((last, range)) if *last == place && range.end == seen.start => range.end = seen.end,
            _ => {
                self.extents.push((place, seen.start..seen.end));
                self.records.entry(place).or_insert(seen.record);
            }
        }
        let Some(class) = seen.class().filter(|_| keeps_extents) else { return };
        let bytes = seen.end - seen.start;
        if self.kept >= EXTENTS_MAX {
            self.left_out_bytes = self.left_out_bytes.saturating_add(bytes);
            return;
        }
        self.kept += 1;
        let stratum = self.strata.entry((class, seen.word & 1 == 1)).or_default();
        stratum.records.push(seen.record);
        stratum.bytes = stratum.bytes.saturating_add(bytes);
    }

    /// Live bytes, from records drawn from each class and kind. `live_of` returns the live bytes by the record at an address; `None` if it is
    /// invalid.
    pub fn estimate(&mut self, live_of: impl Fn(u64) -> Option<u64>) -> Estimate {
        let mut estimate = Estimate::default();
        let all = self.strata.values().map(|stratum| stratum.bytes).fold(0, u64::saturating_add).max(1);
        let mut random = Random::seeded();
        let mut variance = 0.0;
        for stratum in self.strata.values_mut() {
            let count = stratum.records.len() as u64;
            let share = u128::from(RECORDS_READ) * u128::from(stratum.bytes) / u128::from(all);
            let wanted = usize::try_from(u64::try_from(share).unwrap_or(RECORDS_READ).max(OF_CLASS_MIN).min(count)).unwrap_or(0);
            random.draw(&mut stratum.records, wanted);
            let mut live: Vec<f64> = Vec::with_capacity(wanted);
            for &record in stratum.records.iter().take(wanted) {
                estimate.read += 1;
                match live_of(record) {
                    Some(bytes) => live.push(bytes as f64),
                    None => estimate.torn += 1,
                }
            }
            let (mean, squares) = mean_and_variance(&live);
            let count = count as f64;
            estimate.live_bytes += mean * count;
            // Without replacement: a class that was read in full has no error.
            let unread = 1.0 - live.len() as f64 / count.max(1.0);
            // Records that all agree do not prove that the others do.
            let read = (live.len() as f64).max(1.0);
            let least = stratum.bytes as f64 / count.max(1.0) / read;
            variance += count * count * squares.max(least * least) / read * unread.max(0.0);
        }
        // What was left out may be wholly live or wholly free.
        estimate.stderr_bytes = variance.sqrt() + self.left_out_bytes as f64;
        estimate
    }
}

fn mean_and_variance(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    if values.is_empty() {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / count;
    let squares = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>();
    (mean, squares / (count - 1.0).max(1.0))
}

/// xorshift64: the only requirement is that which slabs are drawn does not depend on their addresses.
struct Random(u64);

impl Random {
    fn seeded() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.subsec_nanos());
        Self(u64::from(now) << 20 | 0x9e37_79b9)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Moves `count` of the values, drawn at random, to the front.
    fn draw(&mut self, values: &mut [u64], count: usize) {
        for index in 0..count.min(values.len()) {
            let left = (values.len() - index) as u64;
            let other = index + usize::try_from(self.next() % left).unwrap_or(0);
            values.swap(index, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_name_the_same_record_are_one_extent_and_neighbours_are_joined() {
        let mut quick = Quick::default();
        // A slab of two pages, a large extent of five of which two are named, a gap, a free one of another arena.
        let (first, second, third) = (1 << 21, (1 << 21) + 128, 2 << 21);
        for (page, record, word) in
            [(16, first, 3 << 48 | 1), (17, first, 3 << 48 | 1), (18, second, 36 << 48), (22, second, 36 << 48), (30, third, 232 << 48)]
        {
            quick.entry(page << 12, 4096, record, word, true);
        }
        quick.close(true);
        assert_eq!(quick.extents, [(1, 16 << 12..23 << 12), (2, 30 << 12..31 << 12)]);
        let strata: Vec<_> = quick.strata.iter().map(|(&key, stratum)| (key, stratum.records.len(), stratum.bytes)).collect();
        assert_eq!((quick.count, strata.as_slice()), (3, &[((3, true), 1, 2 << 12), ((36, false), 1, 5 << 12)][..]));
    }

    #[test]
    fn every_value_is_drawn_as_often_as_any_other() {
        let mut random = Random(88_172_645_463_325_252);
        let mut drawn = [0u32; 10];
        for _ in 0..10_000 {
            let mut values: Vec<u64> = (0..10).collect();
            random.draw(&mut values, 3);
            for &value in values.iter().take(3) {
                if let Some(count) = drawn.get_mut(value as usize) {
                    *count += 1;
                }
            }
        }
        // 3,000 each, with a standard deviation of 46.
        assert!(drawn.iter().all(|count| count.abs_diff(3000) < 250), "{drawn:?}");
    }
}
