//! Sizes and lifetimes of a recording's blocks, counted by power of two, as a profile keeps and shows them. Pure.

use serde::{Deserialize, Serialize};

use crate::units::{HumanBytes, counted};

/// Counts by power of two: the first counts zeros, number i those in `[2^(i-1), 2^i)`; the recorder's last one (39) has no upper end. Zeros
/// at the end are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PowerCounts(Vec<u64>);

/// Bars of text by height; the lowest is for anything above 0.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Most buckets shown and searched, whatever a file contains: 2^63 is the highest power in 64 bits.
const BUCKETS_MAX: usize = 64;

impl PowerCounts {
    /// From counts; zeros at the end are left out.
    pub fn new(counts: &[u64]) -> Self {
        let used = counts.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
        Self(counts.iter().copied().take(used.min(BUCKETS_MAX)).collect())
    }

    /// The counts with the smallest number that is too large for each.
    pub fn below(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.0.iter().take(BUCKETS_MAX).enumerate().map(|(bucket, &count)| (1 << bucket, count))
    }

    /// The sum of the counts.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, &count| sum.saturating_add(count))
    }

    /// The smallest power of two below which at least `percent` of the counted values lie; 0 if nothing was counted.
    fn quantile(&self, percent: u64) -> u64 {
        let wanted = u128::from(self.total()) * u128::from(percent);
        let mut sum = 0u128;
        let enough = self.below().find(|&(_, count)| {
            sum += u128::from(count) * 100;
            sum >= wanted
        });
        enough.map_or(0, |(below, _)| below)
    }

    /// A bar for each power of two from the first to the last with a count, and the two ends: `(from, bars, below)`.
    fn bars(&self) -> Option<(u64, String, u64)> {
        let first = self.0.iter().position(|&count| count > 0)?;
        let counts = self.0.get(first..)?;
        let most = counts.iter().copied().max().unwrap_or(1).max(1);
        let height = |count: u64| usize::try_from(u128::from(count) * (BARS.len() as u128 - 1) / u128::from(most)).unwrap_or(0);
        let bar = |&count: &u64| if count == 0 { ' ' } else { BARS.get(height(count)).copied().unwrap_or('█') };
        let from = if first == 0 { 0 } else { 1 << (first - 1).min(BUCKETS_MAX - 1) };
        Some((from, counts.iter().map(bar).collect(), 1 << (self.0.len() - 1).min(BUCKETS_MAX - 1)))
    }

    /// One line of sizes in bytes.
    pub fn sizes(&self) -> Option<String> {
        self.line("allocation", |bytes| HumanBytes(bytes).to_string())
    }

    /// One line of lifetimes in microseconds. `recorded_us` is the length of the recording, which limits them, whatever the power of two.
    pub fn lifetimes(&self, recorded_us: u64) -> Option<String> {
        self.line("free", |us| time(us.min(recorded_us)))
    }

    fn line(&self, noun: &str, show: impl Fn(u64) -> String) -> Option<String> {
        let (from, bars, below) = self.bars()?;
        let (half, most) = (show(self.quantile(50)), show(self.quantile(99)));
        Some(format!("{} {bars} {}: half below {half}, 99% below {most}, of {}", show(from), show(below), counted(self.total(), noun)))
    }
}

/// Microseconds in the unit that fits.
fn time(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        1_000_000..120_000_000 => format!("{:.1} s", us as f64 / 1e6),
        _ => format!("{:.0} min", us as f64 / 60e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(values: &[(usize, u64)]) -> PowerCounts {
        let mut counts = [0; 40];
        for &(bucket, count) in values {
            counts[bucket] = count;
        }
        PowerCounts::new(&counts)
    }

    #[test]
    fn a_line_has_its_ends_its_shape_and_its_quantiles() {
        // 32 to 63 bytes, 64 to 127, and 4 to 8 KiB.
        let sizes = counts(&[(6, 1_000), (7, 500), (13, 20)]);
        assert_eq!(sizes.sizes().as_deref(), Some("32 B █▄     ▁ 8.00 KiB: half below 64 B, 99% below 8.00 KiB, of 1,520 allocations"));
        let lifetimes = counts(&[(0, 3), (21, 1)]);
        assert_eq!(
            lifetimes.lifetimes(10_000_000).as_deref(),
            Some("0 µs █                    ▃ 2.1 s: half below 1 µs, 99% below 2.1 s, of 4 frees")
        );
        assert_eq!(
            lifetimes.lifetimes(1_200_000).as_deref(),
            Some("0 µs █                    ▃ 1.2 s: half below 1 µs, 99% below 1.2 s, of 4 frees"),
            "no block lives longer than the recording"
        );
    }

    #[test]
    fn nothing_counted_has_no_line() {
        assert_eq!(PowerCounts::default().sizes(), None);
        assert_eq!(counts(&[]).lifetimes(1), None);
    }

    #[test]
    fn a_file_with_too_many_counts_is_shown_as_far_as_numbers_go() {
        let absurd = PowerCounts(vec![u64::MAX; 200]);
        assert!(absurd.sizes().is_some());
        assert_eq!(absurd.below().count(), 64);
    }
}
