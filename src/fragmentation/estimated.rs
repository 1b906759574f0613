//! What a sample of a heap settles by itself, before the heap is walked. Pure.
//!
//! The same bounds as for counted bytes hold, at both ends of an interval of two standard errors. Where the ends disagree, or the largest
//! cause is not clearly the largest, nothing is said: a walk will tell.

use super::decide::{ARENAS_MIN, huge_pages, is_little, where_it_lies};
use super::verdict::{Confidence, Evidence, Finding, Kind};
use crate::census::OccupancyEstimate;
use crate::units::HumanBytes;

/// Standard errors on each side.
const ERRORS: u64 = 2;

/// What the estimate says of the heap at this moment.
pub(super) fn state_of_heap(evidence: &Evidence, estimate: &OccupancyEstimate) -> Finding {
    if let Some(bloat) = huge_pages(evidence) {
        return bloat;
    }
    let resident = evidence.ladder.resident_bytes;
    let (free, error) = (estimate.free_resident_bytes_est, estimate.free_resident_bytes_stderr.saturating_mul(ERRORS));
    let about = format!(
        "of {} resident in the malloc heap, {} ± {} is free, by a sample of it",
        HumanBytes(resident),
        HumanBytes(free),
        HumanBytes(error)
    );
    if is_little(free.saturating_add(error), resident) {
        return Finding::new(Kind::Healthy, Confidence::Low, None, about);
    }
    if is_little(free.saturating_sub(error), resident) {
        return Finding::unknown(format!("{about}: too near the bound for a verdict"));
    }
    if evidence.arenas >= ARENAS_MIN {
        return Finding::unknown(format!("{about}: how much of it each arena holds takes a walk"));
    }
    let cached = estimate.cached_bytes_est.min(free);
    let mut causes =
        [(Kind::Hoarding, estimate.trimmable_bytes_est), (Kind::Fragmentation, estimate.pinned_bytes_est), (Kind::Cache, cached)];
    causes.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    let [(kind, bytes), (_, second), _] = causes;
    // What caches keep is their doing, whatever pages it lies on: from half of the free bytes on, as for counted ones.
    let by_caches = |cached: u64| cached.saturating_mul(2) > free;
    let (kind, bytes) = match (by_caches(cached.saturating_sub(error)), by_caches(cached.saturating_add(error))) {
        (true, _) => (Kind::Cache, cached),
        (false, false) if bytes > second.saturating_add(error) => (kind, bytes),
        _ => return Finding::unknown(format!("{about}: which cause has most of it takes a walk")),
    };
    Finding::new(kind, Confidence::Low, Some(bytes), format!("{about}; {} of that {}", HumanBytes(bytes), where_it_lies(kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn kind(resident: u64, free: u64, error: u64, parts: [u64; 3], arenas: usize) -> Kind {
        let [trimmable, pinned, cached] = parts;
        let estimate = OccupancyEstimate {
            free_resident_bytes_est: free * MIB,
            free_resident_bytes_stderr: error * MIB,
            trimmable_bytes_est: trimmable * MIB,
            pinned_bytes_est: pinned * MIB,
            cached_bytes_est: cached * MIB,
        };
        let mut evidence = Evidence { arenas, ..Evidence::default() };
        evidence.ladder.resident_bytes = resident * MIB;
        state_of_heap(&evidence, &estimate).verdict
    }

    #[test]
    fn a_sample_settles_what_lies_clear_of_the_bounds() {
        assert_eq!(kind(500, 40, 10, [20, 20, 0], 1), Kind::Healthy);
        assert_eq!(kind(500, 300, 20, [250, 50, 0], 1), Kind::Hoarding);
        assert_eq!(kind(500, 300, 20, [50, 250, 0], 1), Kind::Fragmentation);
        assert_eq!(kind(500, 300, 20, [50, 250, 230], 1), Kind::Cache);
    }

    #[test]
    fn what_its_error_leaves_open_is_unknown() {
        assert_eq!(kind(500, 90, 10, [80, 10, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 110, 10, [80, 10, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 300, 20, [160, 140, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 300, 20, [200, 100, 160], 1), Kind::Unknown);
        // By arenas a sample does not tell.
        assert_eq!(kind(500, 300, 20, [250, 50, 0], 8), Kind::Unknown);
        assert_eq!(kind(500, 40, 10, [20, 20, 0], 8), Kind::Healthy);
    }
}
