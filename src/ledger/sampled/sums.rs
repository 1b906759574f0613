//! Sums of a sampled ledger: moments of blocks, distances of sample points, histograms by weight.

use super::super::estimate::{Moments, Sample};
use super::super::histogram::BUCKETS;

/// Bytes and objects of one set of blocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sums {
    pub bytes: Moments,
    pub objects: Moments,
}

impl Sums {
    pub fn add(&mut self, sample: Sample) {
        self.bytes.add(sample.size_bytes as f64, sample);
        self.objects.add(1.0, sample);
    }
}

/// Distances of sample points as the samples themselves state them.
#[derive(Debug, Clone, Copy, Default)]
pub struct Distances {
    /// Bytes that the samples represent.
    weight_bytes: f64,
    /// Sample points in them.
    points: f64,
    /// The longest mean distance that one was drawn with.
    pub longest_bytes: u64,
}

impl Distances {
    pub fn add(&mut self, sample: Sample) {
        if sample.interval_bytes != 0 {
            self.weight_bytes += sample.weight_bytes as f64;
            self.points += sample.weight_bytes as f64 / sample.interval_bytes as f64;
            self.longest_bytes = self.longest_bytes.max(sample.interval_bytes);
        }
    }

    /// Whether not all were drawn with the same.
    pub fn changed(&self) -> bool {
        self.mean_bytes().is_some_and(|mean| mean != self.longest_bytes)
    }

    /// Allocated bytes per point. `None` = no sample stated it.
    pub fn mean_bytes(&self) -> Option<u64> {
        (self.points > 0.0).then(|| (self.weight_bytes / self.points).round() as u64)
    }
}

/// Estimated numbers of blocks by power of two: a sampled block represents weight / size of them.
#[derive(Debug, Clone, Copy)]
pub struct Shares([f64; BUCKETS]);

impl Default for Shares {
    fn default() -> Self {
        Self([0.0; BUCKETS])
    }
}

impl Shares {
    pub fn add(&mut self, bucket: usize, sample: Sample) {
        if let Some(sum) = self.0.get_mut(bucket) {
            *sum += sample.weight_bytes as f64 / sample.size_bytes.max(1) as f64;
        }
    }

    pub fn rounded(&self) -> [u64; BUCKETS] {
        self.0.map(|sum| sum.round() as u64)
    }
}
