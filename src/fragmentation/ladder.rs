//! The ladder of a heap: extent ≥ resident ≥ live, and the free part by kind. Pure.

use serde::Serialize;

use super::ratio::Ratios;
use crate::census::HeapAccount;

/// Steps of a heap, in bytes. resident = live_resident + trimmable + pinned + kept + other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct Ladder {
    /// Address space held.
    pub extent_bytes: u64,
    /// In RAM.
    pub resident_bytes: u64,
    /// In swap.
    pub swapped_bytes: u64,
    /// In RAM, in huge pages.
    pub huge_bytes: u64,
    /// In use, resident or not; `None` if the census did not measure it.
    pub live_bytes: Option<u64>,
    /// In use and resident.
    pub live_resident_bytes: Option<u64>,
    /// Free bytes that are resident.
    pub free_resident_bytes: Option<u64>,
    /// What a trim or a purge would release now.
    pub trimmable_bytes: Option<u64>,
    /// Free bytes on pages that also hold live bytes.
    pub pinned_bytes: Option<u64>,
    /// Whole free pages that a trim leaves.
    pub kept_bytes: Option<u64>,
    /// Free bytes in thread caches and fastbins.
    pub cached_bytes: Option<u64>,
    /// Neither understood nor read.
    pub unknown_bytes: u64,
}

impl Ladder {
    /// The ladder of one heap.
    #[must_use]
    pub fn of(heap: &HeapAccount) -> Self {
        let free_resident = [heap.trimmable_bytes, heap.pinned_bytes, heap.kept_bytes];
        Self {
            extent_bytes: heap.extent_bytes,
            resident_bytes: heap.resident_bytes,
            swapped_bytes: heap.swapped_bytes,
            huge_bytes: heap.huge_bytes,
            live_bytes: heap.live_bytes,
            live_resident_bytes: heap.occupancy.map(|occupancy| occupancy.live_resident_bytes),
            free_resident_bytes: free_resident.iter().copied().sum(),
            trimmable_bytes: heap.trimmable_bytes,
            pinned_bytes: heap.pinned_bytes,
            kept_bytes: heap.kept_bytes,
            cached_bytes: heap.cached_bytes,
            unknown_bytes: heap.unknown_bytes,
        }
    }

    /// The ladder of all heaps of a process together; a step that is unknown for one of them is unknown.
    #[must_use]
    pub fn of_all(heaps: &[HeapAccount]) -> Self {
        let mut heaps = heaps.iter().map(Self::of);
        let Some(first) = heaps.next() else { return Self::default() };
        let add = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        heaps.fold(first, |sum, one| Self {
            extent_bytes: sum.extent_bytes.saturating_add(one.extent_bytes),
            resident_bytes: sum.resident_bytes.saturating_add(one.resident_bytes),
            swapped_bytes: sum.swapped_bytes.saturating_add(one.swapped_bytes),
            huge_bytes: sum.huge_bytes.saturating_add(one.huge_bytes),
            live_bytes: add(sum.live_bytes, one.live_bytes),
            live_resident_bytes: add(sum.live_resident_bytes, one.live_resident_bytes),
            free_resident_bytes: add(sum.free_resident_bytes, one.free_resident_bytes),
            trimmable_bytes: add(sum.trimmable_bytes, one.trimmable_bytes),
            pinned_bytes: add(sum.pinned_bytes, one.pinned_bytes),
            kept_bytes: add(sum.kept_bytes, one.kept_bytes),
            cached_bytes: add(sum.cached_bytes, one.cached_bytes),
            unknown_bytes: sum.unknown_bytes.saturating_add(one.unknown_bytes),
        })
    }

    /// `1 − live / resident`, 0 is perfect; `None` if live is not known or nothing is resident.
    #[must_use]
    pub fn fragmentation_ratio(&self) -> Option<f64> {
        self.ratios()?.fragmentation_ratio()
    }

    /// `extent / live`; `None` if live is not known or 0.
    #[must_use]
    pub fn extent_ratio(&self) -> Option<f64> {
        self.ratios()?.extent_ratio()
    }

    fn ratios(&self) -> Option<Ratios> {
        Some(Ratios {
            live_bytes: self.live_resident_bytes.or(self.live_bytes)?,
            resident_bytes: self.resident_bytes,
            extent_bytes: self.extent_bytes,
            unknown_bytes: self.unknown_bytes.min(self.resident_bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_several_heaps_are_summed_and_an_unknown_step_stays_unknown() {
        let heap = HeapAccount {
            extent_bytes: 1000,
            resident_bytes: 800,
            live_bytes: Some(200),
            trimmable_bytes: Some(300),
            pinned_bytes: Some(200),
            kept_bytes: Some(100),
            ..HeapAccount::default()
        };
        let one = Ladder::of(&heap);
        assert_eq!(one.free_resident_bytes, Some(600));
        assert_eq!(one.fragmentation_ratio(), Some(0.75));
        assert_eq!(one.extent_ratio(), Some(5.0));
        let both = Ladder::of_all(&[heap.clone(), heap.clone()]);
        assert_eq!((both.resident_bytes, both.free_resident_bytes), (1600, Some(1200)));
        let partly = Ladder::of_all(&[heap, HeapAccount { resident_bytes: 50, ..HeapAccount::default() }]);
        assert_eq!((partly.resident_bytes, partly.live_bytes, partly.fragmentation_ratio()), (850, None, None));
    }
}
