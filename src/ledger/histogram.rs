//! Histograms with power-of-two buckets, for sizes and lifetimes.

/// Buckets of a histogram. Sizes: 39 buckets reach 256 GiB; lifetimes in microseconds: 76 hours. The last bucket is open.
pub const BUCKETS: usize = 40;

/// Counts by power of two: bucket 0 counts zeros, bucket i counts values in `[2^(i-1), 2^i)`, the last bucket everything above.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS] }
    }
}

impl Histogram {
    /// The bucket of a value.
    #[inline]
    pub fn bucket(value: u64) -> usize {
        ((u64::BITS - value.leading_zeros()) as usize).min(BUCKETS - 1)
    }

    /// The smallest value of a bucket.
    pub fn lower_bound(bucket: usize) -> u64 {
        if bucket == 0 { 0 } else { 1 << (bucket.min(BUCKETS - 1) - 1) }
    }

    /// Counts by bucket.
    pub fn counts(&self) -> &[u64; BUCKETS] {
        &self.counts
    }

    /// Number of values counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().fold(0, |sum, &count| sum.saturating_add(count))
    }

    #[inline]
    pub(super) fn add(&mut self, bucket: usize) {
        self.counts[bucket] = self.counts[bucket].saturating_add(1);
    }

    #[inline]
    pub(super) fn take(&mut self, bucket: usize) {
        self.counts[bucket] = self.counts[bucket].saturating_sub(1);
    }
}
