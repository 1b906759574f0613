//! How a process's memory changes over several samples. Pure.
//!
//! Live bytes of a service rise and fall with its load. Growth is measured at the floor: the low-water mark of the newer half of the samples
//! minus that of the older half. It is zero for a sawtooth that ends where it began, and positive for a leak. A cache that fills rises like a
//! leak until it is full: the rise alone is [`Shape::Growing`], and only its end ([`Shape::Levelled`]) or its duration distinguishes the two.
//!
//! ```text
//! Growing  ____/‾‾‾   Levelled      /      Refilling: rises within what the heap held before
//!         /          ‾‾‾       ____/       ComesAndGoes: swings by more than its floor rises
//! ```

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::census::{Census, HeapAccount};

/// Fewest samples for a shape: two per half.
pub const LOOKS_MIN: usize = 4;
/// Smallest rise that counts as growth, if hardly anything falls in between.
const CLIMB_BYTES_MIN: u64 = 256 << 10;
/// It must also be this share of the bytes, in thousandths.
const CLIMB_PER_MILLE_MIN: u64 = 1;
/// Smallest rise of the floor that counts as growth where bytes swing.
const RISE_BYTES_MIN: u64 = 1 << 20;
/// It must also be this share of the bytes, in thousandths.
const RISE_PER_MILLE_MIN: u64 = 20;
/// A rise has levelled when the slope of its last part is at most this share of the whole's.
const LEVELLED: f64 = 0.25;
/// A fall counts as one where bytes swing if it is more than one part in so many of the swing.
const FALL_SHARE: u64 = 8;
/// A rise slows down when the slope of its newer half is at most this share of the older half's: caches slow down, leaks do not.
const SLACKENING: f64 = 0.6;
/// Free memory counts as lastingly free if it was free in all samples of this time, in seconds: three full censuses of the agent.
const FREE_FOR_S: f64 = 600.0;
/// Share of a rise of live bytes that must be new resident memory, in percent: otherwise they fill memory that was held before.
const NEW_PERCENT_MIN: u64 = 50;

/// How a number of bytes changes over several samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Shape {
    /// Too few samples.
    #[default]
    Unknown,
    /// The floor does not rise.
    Steady,
    /// They swing, by more than their floor rises.
    ComesAndGoes,
    /// They rise, but only within memory that the process held before.
    Refilling,
    /// The floor rose, then stopped rising.
    Levelled,
    /// The floor rises.
    Growing,
}

impl Shape {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Steady => "steady",
            Self::ComesAndGoes => "comes_and_goes",
            Self::Refilling => "refilling",
            Self::Levelled => "levelled",
            Self::Growing => "growing",
        }
    }
}

/// One sample: the figures of a full census that matter for growth.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TrendSample {
    /// Time, in seconds from any origin.
    pub at_s: f64,
    /// Live bytes of all heaps.
    pub live_bytes: u64,
    /// Resident bytes of the process.
    pub resident_bytes: u64,
    /// Free bytes of the heaps that are resident.
    pub free_bytes: Option<u64>,
    /// Resident bytes outside malloc that the program allocates itself: not files, the kernel's mappings, or kinds with a limit of their own.
    pub outside_bytes: u64,
}

impl TrendSample {
    /// The sample of a census; `None` if the census did not measure live bytes.
    #[must_use]
    pub fn of(census: &Census, at_s: f64) -> Option<Self> {
        // A process without a readable heap has no live bytes, but memory outside it can still grow.
        let live_bytes = if census.heaps.is_empty() { 0 } else { census.sum(|heap| heap.ladder.live_bytes)? };
        let outside = census.not_malloc.iter().filter(|part| super::outside::grows_by_itself(part.kind));
        Some(Self {
            at_s,
            live_bytes,
            resident_bytes: census.rss_bytes,
            free_bytes: census.sum(HeapAccount::free_resident_bytes),
            outside_bytes: outside.map(|part| part.resident_bytes).fold(0, u64::saturating_add),
        })
    }
}

/// How a process changed over some time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct Change {
    /// Time between the values that are compared, in seconds: between the beginnings of the older and the newer half of the samples, or
    /// between the first and the last sample if there are fewer than four.
    pub seconds: f64,
    /// Change of live bytes, new minus old: of the low-water marks of the halves.
    pub live_bytes_delta: i64,
    /// Change of the process's resident bytes, new minus old.
    pub resident_bytes_delta: i64,
    /// Growth of live bytes per second.
    pub live_bytes_per_s: f64,
    /// Growth of resident bytes per second.
    pub resident_bytes_per_s: f64,
    /// Number of samples.
    pub looks: u64,
    /// Time between the first and the last sample, in seconds.
    pub span_s: f64,
    /// How live bytes change.
    pub live_shape: Shape,
    /// Whether the rise of live bytes slows down, as that of a cache that fills does.
    pub live_slackens: bool,
    /// The largest fall of live bytes from a sample to a later one.
    pub live_swing_bytes: u64,
    /// Smallest growth of live bytes that would have been detected, in bytes over the span.
    pub live_unseen_bytes: u64,
    /// Change of the memory outside malloc, without files and kinds with a limit of their own, new minus old.
    pub outside_bytes_delta: i64,
    /// How that changes.
    pub outside_shape: Shape,
    /// Bytes of the heap that were free in every sample of the last ten minutes.
    pub free_floor_bytes: Option<u64>,
}

impl Change {
    /// Growth of live bytes per hour, at the present rate.
    #[must_use]
    pub fn live_bytes_per_hour(&self) -> i64 {
        // `as` saturates.
        (self.live_bytes_per_s * 3600.0) as i64
    }

    /// The change between two samples: a difference without a shape.
    #[must_use]
    pub fn between(before: &TrendSample, after: &TrendSample) -> Self {
        let seconds = (after.at_s - before.at_s).max(0.0);
        let live = difference(before.live_bytes, after.live_bytes);
        let resident = difference(before.resident_bytes, after.resident_bytes);
        Self {
            seconds,
            live_bytes_delta: live,
            resident_bytes_delta: resident,
            live_bytes_per_s: rate(live, seconds),
            resident_bytes_per_s: rate(resident, seconds),
            looks: 2,
            span_s: seconds,
            outside_bytes_delta: difference(before.outside_bytes, after.outside_bytes),
            free_floor_bytes: before.free_bytes.zip(after.free_bytes).map(|(old, new)| old.min(new)),
            ..Self::default()
        }
    }
}

/// The last samples of one process.
#[derive(Debug, Clone)]
pub struct TrendSamples {
    looks: VecDeque<TrendSample>,
    looks_max: usize,
    /// Peak of the process's resident bytes before the first sample; 0 = not known.
    former_peak_bytes: u64,
}

impl TrendSamples {
    /// Keeps at most this many samples.
    #[must_use]
    pub fn new(looks_max: usize) -> Self {
        Self { looks: VecDeque::new(), looks_max: looks_max.max(LOOKS_MIN), former_peak_bytes: 0 }
    }

    /// Sets the peak of the process's resident bytes before the first sample.
    pub fn set_former_peak(&mut self, bytes: u64) {
        self.former_peak_bytes = bytes;
    }

    /// Adds a sample; times must not run backwards.
    pub fn add(&mut self, look: TrendSample) {
        if self.looks.len() == self.looks_max {
            self.looks.pop_front();
        }
        self.looks.push_back(look);
    }

    /// Number of samples kept.
    #[must_use]
    pub fn count(&self) -> usize {
        self.looks.len()
    }

    /// The growth over the samples; `None` with fewer than two.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        let (first, last) = (self.looks.front()?, self.looks.back()?);
        if self.looks.len() < 2 {
            return None;
        }
        if self.looks.len() < LOOKS_MIN {
            return Some(Change { looks: self.looks.len() as u64, ..Change::between(first, last) });
        }
        let times: Vec<f64> = self.looks.iter().map(|look| look.at_s).collect();
        // A value that only rises is lowest at the beginning of each half.
        let newer = times.get(older_looks(&times)).copied().unwrap_or(last.at_s);
        let seconds = (newer - first.at_s).max(1e-3);
        let live = Course::of(self.looks.iter().map(|look| (look.at_s, look.live_bytes)));
        let resident = Course::of(self.looks.iter().map(|look| (look.at_s, look.resident_bytes)));
        let outside = Course::of(self.looks.iter().map(|look| (look.at_s, look.outside_bytes)));
        let mut live_shape = live.shape();
        if live_shape == Shape::Growing && self.refills(&live, &resident) {
            live_shape = Shape::Refilling;
        }
        Some(Change {
            seconds,
            live_bytes_delta: live.rise,
            resident_bytes_delta: resident.rise,
            live_bytes_per_s: rate(live.rise, seconds),
            resident_bytes_per_s: rate(resident.rise, seconds),
            looks: self.looks.len() as u64,
            span_s: last.at_s - first.at_s,
            live_shape,
            live_slackens: live.slackens(),
            live_swing_bytes: live.swing,
            live_unseen_bytes: live.least(),
            outside_bytes_delta: outside.rise,
            outside_shape: outside.shape(),
            free_floor_bytes: self.free_floor(last.at_s),
        })
    }

    /// Whether live bytes rise into memory that the process held before: free memory of its heap, or memory it had returned to the kernel.
    fn refills(&self, live: &Course, resident: &Course) -> bool {
        let (Some(first), Some(last)) = (self.looks.front(), self.looks.back()) else { return false };
        let grown = live.gain();
        let is_new = resident.gain().saturating_mul(100) >= grown.saturating_mul(NEW_PERCENT_MIN);
        let had_room = first.free_bytes.is_some_and(|free| free >= grown);
        // The peak is the process's: it tells of malloc's heap only where that is most of it. A JVM's is its Java heap's.
        let heap = last.live_bytes.saturating_add(last.free_bytes.unwrap_or(0));
        let is_most = heap.saturating_mul(2) >= last.resident_bytes;
        (had_room && !is_new) || (is_most && last.resident_bytes.saturating_add(CLIMB_BYTES_MIN) < self.former_peak_bytes)
    }

    fn free_floor(&self, now_s: f64) -> Option<u64> {
        let recent = self.looks.iter().filter(|look| now_s - look.at_s <= FREE_FOR_S);
        recent.map(|look| look.free_bytes).try_fold(u64::MAX, |least, free| Some(least.min(free?)))
    }
}

/// How many of the samples lie in the older half of their time: by time and not by number, because samples are not evenly spaced.
fn older_looks(times: &[f64]) -> usize {
    let (first, last) = (times.first().copied().unwrap_or_default(), times.last().copied().unwrap_or_default());
    times.partition_point(|&at_s| at_s < f64::midpoint(first, last)).clamp(1, times.len().saturating_sub(1).max(1))
}

fn difference(old: u64, new: u64) -> i64 {
    i64::try_from(i128::from(new) - i128::from(old)).unwrap_or(if new > old { i64::MAX } else { i64::MIN })
}

fn rate(delta: i64, seconds: f64) -> f64 {
    if seconds > 0.0 { delta as f64 / seconds } else { 0.0 }
}

/// One figure over the samples.
struct Course {
    points: Vec<(f64, u64)>,
    /// Rise of the floor, from the older half to the newer.
    rise: i64,
    /// The largest fall from a point to a later one.
    swing: u64,
}

impl Course {
    /// At least [`LOOKS_MIN`] points.
    fn of(points: impl Iterator<Item = (f64, u64)>) -> Self {
        let points: Vec<(f64, u64)> = points.collect();
        let times: Vec<f64> = points.iter().map(|&(at_s, _)| at_s).collect();
        let older = older_looks(&times);
        let floor = |points: &mut dyn Iterator<Item = &(f64, u64)>| points.map(|&(_, bytes)| bytes).min().unwrap_or(0);
        let rise = difference(floor(&mut points.iter().take(older)), floor(&mut points.iter().skip(older)));
        let (mut swing, mut high) = (0, 0);
        for &(_, bytes) in &points {
            high = high.max(bytes);
            swing = swing.max(high - bytes);
        }
        Self { points, rise, swing }
    }

    fn first(&self) -> (f64, u64) {
        self.points.first().copied().unwrap_or_default()
    }

    fn last(&self) -> (f64, u64) {
        self.points.last().copied().unwrap_or_default()
    }

    /// By how much the last sample is above the first.
    fn gain(&self) -> u64 {
        self.last().1.saturating_sub(self.first().1)
    }

    /// The smallest rise of the floor that counts: a share of the bytes, and more than chance gives where bytes swing. If n samples per half
    /// meet a swing at random moments, the lowest one is off by 1/(n + 1) of the swing on average, with a standard deviation of about as much.
    /// Samples that follow a slow swing are no such n: each of the half's f falls is met once, off by what the bytes rise between two
    /// samples at most, and the lowest of them by 1/(f + 1) of that.
    fn least(&self) -> u64 {
        let (_, last) = self.last();
        let share = |per_mille: u64| last / 1000 * per_mille;
        if self.swing < CLIMB_BYTES_MIN.max(share(CLIMB_PER_MILLE_MIN)) / 4 {
            return CLIMB_BYTES_MIN.max(share(CLIMB_PER_MILLE_MIN));
        }
        let chance = self.swing.saturating_mul(3) / (self.points.len() as u64 / 2 + 1);
        let (missed, falls) = self.missed_floor();
        RISE_BYTES_MIN.max(share(RISE_PER_MILLE_MIN)).max(chance).max(missed.saturating_mul(3) / (falls + 1))
    }

    /// By how much a fall of the newer half may have gone below the samples around it: its steepest rise over its longest time between two
    /// samples, the swing at most; and how many falls that half has.
    fn missed_floor(&self) -> (u64, u64) {
        let times: Vec<f64> = self.points.iter().map(|&(at_s, _)| at_s).collect();
        let newer = self.points.get(older_looks(&times)..).unwrap_or_default();
        let pairs = || newer.iter().zip(newer.iter().skip(1));
        let pause = pairs().map(|(a, b)| b.0 - a.0).fold(0.0, f64::max);
        let steepest = pairs().map(|(a, b)| Self::slope(*a, *b)).fold(0.0, f64::max);
        let falls = pairs().filter(|(a, b)| a.1.saturating_sub(b.1) > self.swing / FALL_SHARE).count();
        // `as` saturates.
        (((pause * steepest) as u64).min(self.swing), falls as u64)
    }

    fn shape(&self) -> Shape {
        let rises = u64::try_from(self.rise).is_ok_and(|rise| rise >= self.least());
        match rises {
            false if self.swing >= RISE_BYTES_MIN.max(self.last().1 / 1000 * RISE_PER_MILLE_MIN) => Shape::ComesAndGoes,
            false => Shape::Steady,
            true if self.has_levelled() => Shape::Levelled,
            true => Shape::Growing,
        }
    }

    /// Slope between two points.
    fn slope(from: (f64, u64), to: (f64, u64)) -> f64 {
        difference(from.1, to.1) as f64 / (to.0 - from.0).max(1e-9)
    }

    /// Whether the last part, of at least two intervals, is much flatter than the whole, and near its maximum: the fall of a sawtooth does
    /// not count.
    fn has_levelled(&self) -> bool {
        let (first, last) = (self.first(), self.last());
        let steps = (self.points.len() / 6).max(2);
        let Some(&since) = self.points.get(self.points.len().saturating_sub(steps + 1)) else { return false };
        let high = self.points.iter().map(|&(_, bytes)| bytes).max().unwrap_or(0);
        let at_its_height = high - last.1 <= high / 50;
        let lately = self.points.iter().rev().take(steps).map(|&(_, bytes)| bytes).max().unwrap_or(0);
        at_its_height && Self::slope(since, (last.0, lately)) < LEVELLED * Self::slope(first, last)
    }

    /// Whether the newer half rises much more slowly than the older one.
    fn slackens(&self) -> bool {
        let (first, last) = (self.first(), self.last());
        let middle = self.points.get(self.points.len() / 2).copied().unwrap_or_default();
        Self::slope(middle, last) < SLACKENING * Self::slope(first, middle)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MIB: u64 = 1 << 20;

    fn looks(live: impl IntoIterator<Item = u64>) -> TrendSamples {
        let mut looks = TrendSamples::new(12);
        for (index, bytes) in live.into_iter().enumerate() {
            looks.add(TrendSample {
                at_s: index as f64 * 10.0,
                live_bytes: bytes * MIB,
                resident_bytes: bytes * 2 * MIB,
                ..TrendSample::default()
            });
        }
        looks
    }

    fn change(live: impl IntoIterator<Item = u64>) -> Change {
        looks(live).change().unwrap()
    }

    fn shape(live: impl IntoIterator<Item = u64>) -> Shape {
        change(live).live_shape
    }

    /// Censuses vary in cost, so the samples are not evenly spaced.
    #[test]
    fn a_steady_rise_has_its_rate_whatever_the_times_of_the_samples() {
        let crowded = (0..10).map(|index| f64::from(index) * 0.05);
        let sparse = (0..6).map(|index| 0.6 + f64::from(index) * 0.4);
        let mut looks = TrendSamples::new(64);
        for at_s in crowded.chain(sparse) {
            let live_bytes = 32 * MIB + (at_s * 4.0 * MIB as f64) as u64;
            looks.add(TrendSample { at_s, live_bytes, resident_bytes: live_bytes, ..TrendSample::default() });
        }
        let change = looks.change().unwrap();
        assert_eq!(change.live_shape, Shape::Growing);
        assert!((change.live_bytes_per_s / MIB as f64 - 4.0).abs() < 0.01, "{change:?}");
    }

    #[test]
    fn a_steady_rise_is_growth_at_its_rate() {
        let change = change([100, 200, 300, 400, 500, 600]);
        let mib = MIB as i64;
        assert_eq!((change.live_bytes_delta, change.resident_bytes_delta, change.seconds), (300 * mib, 600 * mib, 30.0));
        assert_eq!((change.live_bytes_per_s, change.looks, change.span_s), (10.0 * MIB as f64, 6, 50.0));
        assert_eq!((change.live_shape, change.live_slackens), (Shape::Growing, false));
    }

    #[test]
    fn a_sawtooth_does_not_grow_and_a_shrinking_heap_grows_by_less_than_nothing() {
        assert_eq!(change([100, 900, 100, 900, 100, 900]).live_bytes_delta, 0);
        assert_eq!(shape([100, 900, 100, 900, 100, 900]), Shape::ComesAndGoes);
        assert_eq!(change([900, 900, 100, 100]).live_bytes_delta, -800 * MIB as i64);
        // Samples that meet a sawtooth at random moments have a different low-water mark in each half.
        assert_eq!(shape([30, 80, 55, 10, 95, 40, 70, 25, 90, 60, 35, 99]), Shape::ComesAndGoes);
        // A floor that rises by more than that under the swing is growth.
        assert_eq!(shape([0, 50, 10, 60, 20, 70, 100, 150, 110, 160, 120, 170]), Shape::Growing);
    }

    /// A busy machine delays samples: the falls of the newer half are met late.
    #[test]
    fn a_sawtooth_whose_falls_are_met_late_does_not_grow() {
        let mut looks = TrendSamples::new(48);
        let often = (0..16).map(|index| f64::from(index) * 0.1);
        for at_s in often.chain([1.7, 1.9, 2.33, 2.5, 2.7, 2.9, 3.35]) {
            let live_bytes = 20 * MIB + (at_s.fract() * 60.0 * MIB as f64) as u64;
            looks.add(TrendSample { at_s, live_bytes, resident_bytes: live_bytes, ..TrendSample::default() });
        }
        let change = looks.change().unwrap();
        assert!(change.live_bytes_delta > 18 * MIB as i64, "{change:?}");
        assert_eq!(change.live_shape, Shape::ComesAndGoes);
    }

    #[test]
    fn a_cache_that_fills_grows_until_it_is_full_and_then_no_more() {
        assert_eq!(shape([10, 20, 30, 40, 50, 60, 70, 80]), Shape::Growing);
        assert_eq!(shape([10, 20, 30, 40, 50, 60, 60, 60]), Shape::Levelled);
        assert_eq!(shape([10, 20, 30, 30, 30, 30, 30, 30]), Shape::Levelled);
        assert_eq!(shape([30, 30, 30, 30, 30, 30, 30, 30]), Shape::Steady);
        // Misses become rarer as it fills.
        assert!(change([10, 40, 60, 73, 82, 88, 92, 95]).live_slackens);
        assert!(!change([10, 20, 30, 40, 50, 60, 70, 80]).live_slackens);
    }

    #[test]
    fn a_slow_rise_without_falls_is_seen_and_the_same_rise_under_swings_is_not() {
        let climb = |index: u64| 100 * MIB + index * 64 * 1024;
        let mut slow = TrendSamples::new(12);
        let mut swinging = TrendSamples::new(12);
        for index in 0..12 {
            let look = |live_bytes| TrendSample { at_s: index as f64, live_bytes, resident_bytes: live_bytes, ..TrendSample::default() };
            slow.add(look(climb(index)));
            swinging.add(look(climb(index) + index % 2 * 8 * MIB));
        }
        assert_eq!(slow.change().unwrap().live_shape, Shape::Growing);
        let swinging = swinging.change().unwrap();
        assert_eq!(swinging.live_shape, Shape::ComesAndGoes);
        assert!(swinging.live_unseen_bytes >= 3 * MIB, "{swinging:?}");
    }

    #[test]
    fn live_bytes_that_rise_into_free_memory_refill_it() {
        let mut refilling = TrendSamples::new(12);
        for index in 0..6 {
            let live_bytes = 100 * MIB + index * 10 * MIB;
            refilling.add(TrendSample {
                at_s: index as f64,
                live_bytes,
                resident_bytes: 300 * MIB,
                free_bytes: Some(300 * MIB - live_bytes),
                ..TrendSample::default()
            });
        }
        let change = refilling.change().unwrap();
        assert_eq!((change.live_shape, change.free_floor_bytes), (Shape::Refilling, Some(150 * MIB)));
        // Memory returned to the kernel shows in the process's former size.
        let mut sawtooth = looks([10, 20, 30, 40, 50]);
        sawtooth.set_former_peak(400 * MIB);
        assert_eq!(sawtooth.change().unwrap().live_shape, Shape::Refilling);
        sawtooth.set_former_peak(90 * MIB);
        assert_eq!(sawtooth.change().unwrap().live_shape, Shape::Growing);
    }

    #[test]
    fn a_former_peak_of_memory_outside_malloc_does_not_hide_a_leak() {
        let mut jvm = TrendSamples::new(12);
        for index in 0..6 {
            let live_bytes = 40 * MIB + index * 10 * MIB;
            jvm.add(TrendSample { at_s: index as f64, live_bytes, resident_bytes: 300 * MIB + live_bytes, ..TrendSample::default() });
        }
        jvm.set_former_peak(700 * MIB);
        assert_eq!(jvm.change().unwrap().live_shape, Shape::Growing);
    }

    #[test]
    fn memory_outside_malloc_has_a_shape_of_its_own() {
        let mut looks = TrendSamples::new(12);
        for index in 0..6 {
            looks.add(TrendSample { at_s: index as f64, live_bytes: MIB, outside_bytes: index * 30 * MIB, ..TrendSample::default() });
        }
        let change = looks.change().unwrap();
        assert_eq!((change.live_shape, change.outside_shape), (Shape::Steady, Shape::Growing));
        assert_eq!(change.outside_bytes_delta, 90 * MIB as i64);
    }

    #[test]
    fn too_few_samples_have_no_shape_and_old_ones_are_dropped() {
        assert!(looks([1]).change().is_none());
        let few = change([1, 2, 30]);
        assert_eq!((few.live_shape, few.looks, few.live_bytes_delta), (Shape::Unknown, 3, 29 * MIB as i64));
        let long = std::iter::repeat_n(0, 50).chain(std::iter::repeat_n(7, 12));
        assert_eq!((change(long).live_bytes_delta, looks(0..50).count()), (0, 12));
    }
}
