//! How a process changes over its last full censuses. Pure.
//!
//! Live bytes of a service go up and down with its load. What matters is the floor: the low-water mark of the newer half of the looks
//! against that of the older half. A sawtooth that ends where it began has none; a leak has.

use std::collections::VecDeque;

use super::view::Growth;

/// Looks kept of a process (24 bytes each): an hour at the default interval of full censuses.
const LOOKS_MAX: usize = 12;
/// Looks before anything is said: two a half.
const LOOKS_MIN: usize = 4;

/// One full census, in short.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Look {
    at_s: f64,
    live_bytes: u64,
    resident_bytes: u64,
}

/// The last looks at one process.
#[derive(Debug, Clone, Default)]
pub struct Looks(VecDeque<Look>);

impl Looks {
    /// Adds one at a time in seconds, which must not run backwards.
    pub fn add(&mut self, at_s: f64, live_bytes: u64, resident_bytes: u64) {
        if self.0.len() == LOOKS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Look { at_s, live_bytes, resident_bytes });
    }

    /// The change of the floor; `None` while there are too few looks.
    #[must_use]
    pub fn growth(&self) -> Option<Growth> {
        if self.0.len() < LOOKS_MIN {
            return None;
        }
        let half = self.0.len() / 2;
        let older: Vec<Look> = self.0.iter().take(half).copied().collect();
        let newer: Vec<Look> = self.0.iter().skip(self.0.len() - half).copied().collect();
        let floor = |looks: &[Look], of: fn(&Look) -> u64| looks.iter().map(of).min().unwrap_or(0);
        let middle = |looks: &[Look]| looks.iter().map(|look| look.at_s).sum::<f64>() / looks.len() as f64;
        let delta = |of| {
            let (old, new) = (floor(&older, of), floor(&newer, of));
            i64::try_from(i128::from(new) - i128::from(old)).unwrap_or(i64::MAX)
        };
        let seconds = (middle(&newer) - middle(&older)).max(1e-3);
        let (live_bytes_delta, resident_bytes_delta) = (delta(|look| look.live_bytes), delta(|look| look.resident_bytes));
        Some(Growth {
            seconds,
            censuses: self.0.len() as u64,
            live_bytes_delta,
            resident_bytes_delta,
            live_bytes_per_s: live_bytes_delta as f64 / seconds,
            resident_bytes_per_s: resident_bytes_delta as f64 / seconds,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn growth(live: &[u64]) -> Option<Growth> {
        let mut looks = Looks::default();
        for (index, &bytes) in live.iter().enumerate() {
            looks.add(index as f64 * 10.0, bytes, bytes * 2);
        }
        looks.growth()
    }

    #[test]
    fn a_steady_climb_is_growth_at_its_rate() {
        let growth = growth(&[100, 200, 300, 400, 500, 600]).unwrap();
        assert_eq!((growth.live_bytes_delta, growth.resident_bytes_delta, growth.seconds), (300, 600, 30.0));
        assert_eq!((growth.live_bytes_per_s, growth.censuses), (10.0, 6));
    }

    #[test]
    fn a_sawtooth_does_not_grow_and_a_shrinking_heap_grows_by_less_than_nothing() {
        assert_eq!(growth(&[100, 900, 100, 900, 100, 900]).unwrap().live_bytes_delta, 0);
        assert_eq!(growth(&[900, 900, 100, 100]).unwrap().live_bytes_delta, -800);
    }

    #[test]
    fn too_few_looks_say_nothing_and_old_ones_are_forgotten() {
        assert!(growth(&[1, 2, 3]).is_none());
        let long: Vec<u64> = std::iter::repeat_n(0, 50).chain(std::iter::repeat_n(7, LOOKS_MAX)).collect();
        assert_eq!(growth(&long).unwrap().live_bytes_delta, 0);
    }
}
