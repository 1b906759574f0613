//! The ladder of a heap, the one type of the census, the model, profiles, the history and every surface. Pure.
//!
//! ```text
//! extent                address space that the allocator holds
//! ├─ swapped            in swap
//! └─ resident           in RAM, of it `huge` in huge pages
//!    ├─ live, resident  blocks in use
//!    ├─ trimmable       whole free pages that a trim or a purge would release now
//!    ├─ pinned          free bytes on pages that also hold live bytes
//!    ├─ kept            whole free pages that a trim leaves
//!    └─ the rest        the allocator's own data, and what is unknown
//! ```
//!
//! All are bytes. extent ≥ resident + swapped. Live bytes may exceed the resident ones: some were never touched, or are in swap. Free bytes in
//! thread caches and fastbins (`cached`) are trimmable, pinned or kept too. Unknown bytes were neither understood nor read: the error of all
//! other rungs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The rungs that every source of a heap's figures has. `K` is the type of those that a census always knows, `T` of the others: for a census
/// `u64` and `Option<u64>`, where there may have been no census `Option<u64>` for both, over time a column for both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Ladder<K = u64, T = Option<u64>> {
    /// Address space that the allocator holds.
    pub extent_bytes: K,
    /// The part of the extent in RAM.
    pub resident_bytes: K,
    /// Chunks in use with their rounding, resident or not, including those with mappings of their own.
    pub live_bytes: T,
    /// What `malloc_trim(0)`, or a purge, would release now.
    pub trimmable_bytes: T,
    /// Free bytes on resident pages that also hold live bytes.
    pub pinned_bytes: T,
    /// Neither understood nor read; in a profile without a census, bytes that may be live or free.
    pub unknown_bytes: T,
}

/// What a census knows beside the rungs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Details {
    /// The part of the extent in swap.
    pub swapped_bytes: u64,
    /// The part of the extent in RAM in huge pages.
    pub huge_bytes: u64,
    /// Freed chunks in thread caches and fastbins.
    pub cached_bytes: Option<u64>,
    /// Resident whole pages of free bytes that a trim does not release: thread caches, tops of other arenas, partial pages.
    pub kept_bytes: Option<u64>,
}

/// The sum of two figures; unknown if either is.
#[must_use]
pub fn both(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    Some(a?.saturating_add(b?))
}

/// The sum of two figures as far as they are known.
#[must_use]
pub fn known(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    both(a, b).or(a).or(b)
}

/// `1 − used / resident`, in 0..=1: 0 is perfect. `None` if nothing is resident; 0 if more is used than is resident, as with untouched or
/// swapped pages.
#[must_use]
pub fn fragmentation_ratio(used_bytes: u64, resident_bytes: u64) -> Option<f64> {
    (resident_bytes > 0).then(|| (1.0 - used_bytes as f64 / resident_bytes as f64).max(0.0))
}

/// `extent / used`: 1 is perfect. `None` if nothing is used. After a trim the extent stays while resident bytes fall, so neither ratio can be
/// read alone.
#[must_use]
pub fn extent_ratio(extent_bytes: u64, used_bytes: u64) -> Option<f64> {
    (used_bytes > 0).then(|| extent_bytes as f64 / used_bytes as f64)
}

impl<K, T> Ladder<K, T> {
    /// The same with the two rungs that a census always knows in another type.
    pub fn map<L>(self, of: impl Fn(K) -> L) -> Ladder<L, T> {
        let Self { extent_bytes, resident_bytes, live_bytes, trimmable_bytes, pinned_bytes, unknown_bytes } = self;
        let (extent_bytes, resident_bytes) = (of(extent_bytes), of(resident_bytes));
        Ladder { extent_bytes, resident_bytes, live_bytes, trimmable_bytes, pinned_bytes, unknown_bytes }
    }
}

impl Ladder {
    /// The ladder of two heaps together. `add` decides about rungs that only one of them knows: [`both`] or [`known`].
    #[must_use]
    pub fn and(self, other: Self, add: fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            extent_bytes: self.extent_bytes.saturating_add(other.extent_bytes),
            resident_bytes: self.resident_bytes.saturating_add(other.resident_bytes),
            live_bytes: add(self.live_bytes, other.live_bytes),
            trimmable_bytes: add(self.trimmable_bytes, other.trimmable_bytes),
            pinned_bytes: add(self.pinned_bytes, other.pinned_bytes),
            unknown_bytes: add(self.unknown_bytes, other.unknown_bytes),
        }
    }

    /// Bytes that are used, of which `live_resident_bytes` is the exact figure if it is known. Unknown bytes count as used, which makes the
    /// fragmentation a lower bound. `None` if live bytes are not known.
    #[must_use]
    pub fn used_bytes(&self, live_resident_bytes: Option<u64>) -> Option<u64> {
        let unknown = self.unknown_bytes.unwrap_or(0).min(self.resident_bytes);
        Some(live_resident_bytes.or(self.live_bytes)?.saturating_add(unknown))
    }
}

impl Ladder<Option<u64>> {
    /// Resident bytes that are free: what live and unknown bytes leave, but no less than what is trimmable and pinned, because live bytes
    /// need not have been touched. `None` if live or resident bytes are not known.
    #[must_use]
    pub fn free_resident_bytes(&self) -> Option<u64> {
        let used = self.live_bytes?.saturating_add(self.unknown_bytes.unwrap_or(0));
        let left = self.resident_bytes?.saturating_sub(used);
        let free = known(self.trimmable_bytes, self.pinned_bytes).unwrap_or(0);
        Some(left.max(free).min(self.resident_bytes?))
    }

    /// [`fragmentation_ratio`] of what is not free; `None` if a rung is not known.
    #[must_use]
    pub fn fragmentation_ratio(&self) -> Option<f64> {
        let resident = self.resident_bytes?;
        fragmentation_ratio(resident - self.free_resident_bytes()?, resident)
    }

    /// [`extent_ratio`] of the live bytes; `None` if a rung is not known.
    #[must_use]
    pub fn extent_ratio(&self) -> Option<f64> {
        extent_ratio(self.extent_bytes?, self.live_bytes?)
    }
}

impl Details {
    /// Those of two heaps together; a figure that is unknown for either is unknown.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            swapped_bytes: self.swapped_bytes.saturating_add(other.swapped_bytes),
            huge_bytes: self.huge_bytes.saturating_add(other.huge_bytes),
            cached_bytes: both(self.cached_bytes, other.cached_bytes),
            kept_bytes: both(self.kept_bytes, other.kept_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAP: Ladder = Ladder {
        extent_bytes: 1000,
        resident_bytes: 800,
        live_bytes: Some(200),
        trimmable_bytes: Some(300),
        pinned_bytes: None,
        unknown_bytes: Some(0),
    };

    #[test]
    fn rungs_of_several_heaps_are_summed_and_an_unknown_rung_stays_unknown_or_is_left_out() {
        let other = Ladder { live_bytes: None, pinned_bytes: Some(7), ..HEAP };
        let rungs = |sum: Ladder| (sum.resident_bytes, sum.live_bytes, sum.trimmable_bytes, sum.pinned_bytes, sum.unknown_bytes);
        assert_eq!(rungs(HEAP.and(other, both)), (1600, None, Some(600), None, Some(0)));
        assert_eq!(rungs(HEAP.and(other, known)), (1600, Some(200), Some(600), Some(7), Some(0)));
    }

    #[test]
    fn ratios_follow_their_definitions_and_are_absent_where_undefined() {
        assert_eq!((fragmentation_ratio(25, 100), extent_ratio(200, 25)), (Some(0.75), Some(8.0)));
        assert_eq!(fragmentation_ratio(101, 100), Some(0.0));
        assert_eq!((fragmentation_ratio(0, 0), extent_ratio(0, 0)), (None, None));
        let written = HEAP.map(Some);
        assert_eq!((written.fragmentation_ratio(), written.extent_ratio()), (Some(0.75), Some(5.0)));
        assert_eq!(Ladder { resident_bytes: None, ..written }.fragmentation_ratio(), None);
        // More is live than resident: some of it was never touched.
        let untouched = Ladder { live_bytes: Some(900), ..written };
        assert_eq!((untouched.free_resident_bytes(), untouched.fragmentation_ratio()), (Some(300), Some(0.375)));
        let pinned = Ladder { pinned_bytes: Some(20), ..untouched };
        assert_eq!((pinned.free_resident_bytes(), pinned.fragmentation_ratio()), (Some(320), Some(0.4)));
    }

    #[test]
    fn unknown_bytes_count_as_used_and_live_bytes_only_where_they_are_resident() {
        let partly_known = Ladder { unknown_bytes: Some(900), ..HEAP };
        assert_eq!((HEAP.used_bytes(None), HEAP.used_bytes(Some(150)), partly_known.used_bytes(None)), (Some(200), Some(150), Some(1000)));
        assert_eq!(Ladder { live_bytes: None, ..HEAP }.used_bytes(None), None);
    }
}
