//! The levels below full: extents from the page map's words alone, without a record read; at level sampled a fixed number of slabs' records
//! on top, drawn from each size class, tell how full the slabs are.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use super::super::memory::{Memory, word_at};
use super::record::{LOW_MASK, RECORD_BYTES, class_bytes, large_bytes};

/// Slabs looked at: some 6 ms.
const SLABS_READ: u64 = 2048;
/// Slabs of each class that are looked at at least.
const SLABS_OF_CLASS_MIN: u64 = 16;
/// Large blocks of which it is asked where they begin, which tells whether each has a page more than it needs.
const LARGE_READ: usize = 64;
/// Slabs and large blocks kept, 16 bytes each; beyond that the estimate covers the first ones only, and says so.
const EXTENTS_MAX: usize = 1 << 22;

/// An extent as the page map has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    record: u64,
    class: u64,
    is_slab: bool,
    start: u64,
    end: u64,
}

/// What the page map alone tells.
#[derive(Debug, Default)]
pub struct Quick {
    /// The extents, joined where they touch.
    pub extents: Vec<Range<u64>>,
    /// Extents seen.
    pub count: u64,
    /// Records of extents by rising address of the extent, one of each run of neighbours within 2 MiB.
    pub records: Vec<u64>,
    /// Slabs by class: record.
    slabs: Vec<Vec<u64>>,
    slab_bytes: Vec<u64>,
    /// Large blocks: class and bytes of the extent.
    large: Vec<(u64, u64)>,
    large_records: Vec<u64>,
    kept: usize,
    left_out_bytes: u64,
    last: Option<Seen>,
}

/// An estimate with its standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes: f64,
    /// Standard error of it.
    pub stderr_bytes: f64,
    /// Records that made no sense.
    pub torn: u64,
    /// Records read.
    pub read: u64,
}

impl Quick {
    /// Takes the next entry of the page map, by rising address.
    pub fn entry(&mut self, page: u64, page_bytes: u64, record: u64, word: u64, keeps_extents: bool) {
        let end = page.saturating_add(page_bytes);
        match &mut self.last {
            // The first and the last page of an extent name its record, a slab's all do.
            Some(last) if last.record == record => last.end = end,
            _ => {
                self.close(keeps_extents);
                self.last = Some(Seen { record, class: word >> 48, is_slab: word & 1 == 1, start: page, end });
            }
        }
    }

    /// Ends the last extent.
    pub fn close(&mut self, keeps_extents: bool) {
        let Some(seen) = self.last.take() else { return };
        self.count += 1;
        match self.extents.last_mut() {
            Some(last) if last.end == seen.start => last.end = seen.end,
            _ => self.extents.push(seen.start..seen.end),
        }
        if self.records.last().is_none_or(|last| last >> 21 != seen.record >> 21) {
            self.records.push(seen.record);
        }
        let Some(_) = class_bytes(seen.class).filter(|_| keeps_extents) else { return };
        if self.kept >= EXTENTS_MAX {
            self.left_out_bytes += seen.end - seen.start;
            return;
        }
        self.kept += 1;
        let class = usize::try_from(seen.class).unwrap_or(0);
        if !seen.is_slab {
            self.large.push((seen.class, seen.end - seen.start));
            if self.large_records.len() < LARGE_READ {
                self.large_records.push(seen.record);
            }
            return;
        }
        if self.slabs.len() <= class {
            self.slabs.resize(class + 1, Vec::new());
            self.slab_bytes.resize(class + 1, 0);
        }
        if let (Some(slabs), Some(bytes)) = (self.slabs.get_mut(class), self.slab_bytes.get_mut(class)) {
            slabs.push(seen.record);
            *bytes += seen.end - seen.start;
        }
    }

    /// Live bytes: large blocks exactly, small ones from slabs drawn from each class. `free_of` tells a record's free regions.
    pub fn estimate(&mut self, memory: &dyn Memory, free_of: impl Fn(&[u8; RECORD_BYTES]) -> Option<u64>) -> Estimate {
        let mut estimate = Estimate::default();
        let offsets = self.large_records.iter().filter_map(|&record| Some(word_at(&memory.bytes(record, 16)?, 8) & LOW_MASK));
        let pad_bytes = if offsets.into_iter().any(|offset| offset != 0) { LOW_MASK + 1 } else { 0 };
        for &(class, bytes) in &self.large {
            estimate.live_bytes += large_bytes(class_bytes(class).unwrap_or(0), bytes, pad_bytes) as f64;
        }
        let all: u64 = self.slab_bytes.iter().sum();
        let mut random = Random::seeded();
        let mut variance = 0.0;
        for (class, (slabs, &bytes)) in self.slabs.iter_mut().zip(&self.slab_bytes).enumerate() {
            let count = slabs.len() as u64;
            let Some(region_bytes) = class_bytes(class as u64).filter(|_| count > 0) else { continue };
            let regions = (bytes / count / region_bytes) as f64;
            let share = u64::try_from(u128::from(SLABS_READ) * u128::from(bytes) / u128::from(all.max(1))).unwrap_or(SLABS_READ);
            let wanted = usize::try_from(share.max(SLABS_OF_CLASS_MIN).min(count)).unwrap_or(0);
            random.draw(slabs, wanted);
            let mut used: Vec<f64> = Vec::with_capacity(wanted);
            for &record in slabs.iter().take(wanted) {
                estimate.read += 1;
                let bytes = memory.bytes(record, RECORD_BYTES).and_then(|bytes| <[u8; RECORD_BYTES]>::try_from(bytes).ok());
                match bytes.and_then(|bytes| free_of(&bytes)) {
                    Some(free) => used.push((regions - free as f64).max(0.0)),
                    None => estimate.torn += 1,
                }
            }
            let (mean, squares) = mean_and_variance(&used);
            let scale = count as f64 * region_bytes as f64;
            estimate.live_bytes += mean * scale;
            // Without replacement: a class that was read in full has no error.
            let unread = 1.0 - used.len() as f64 / count as f64;
            variance += scale * scale * squares / (used.len() as f64).max(1.0) * unread.max(0.0);
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

/// xorshift64: which slabs are drawn must not depend on their addresses, no more is asked of it.
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
        // A slab of two pages, a large extent of five of which two are named, a gap, a free one.
        for (page, record, word) in [
            (16, 1 << 21, 3 << 48 | 1),
            (17, 1 << 21, 3 << 48 | 1),
            (18, 2 << 21, 36 << 48),
            (22, 2 << 21, 36 << 48),
            (30, 3 << 21, 232 << 48),
        ] {
            quick.entry(page << 12, 4096, record, word, true);
        }
        quick.close(true);
        assert_eq!(quick.extents, [16 << 12..23 << 12, 30 << 12..31 << 12]);
        assert_eq!((quick.count, quick.large.as_slice()), (3, &[(36, 5 << 12)][..]));
        assert_eq!(quick.slabs.get(3).map(Vec::as_slice), Some(&[1 << 21][..]));
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
