//! Findings that a sample of a heap allows before the heap is walked in full. Pure.
//!
//! The bounds are the same as for counted bytes, applied at both ends of the 95 % interval. If the ends disagree, or the
//! largest cause is not clearly the largest, the result is unknown until a full walk.

use super::decide::{ARENAS_MIN, huge_pages, is_little, where_it_lies};
use super::verdict::{Confidence, Evidence, Finding, Kind};
use crate::census::OccupancyEstimate;
use crate::units::{HumanBytes, half_width};

/// The finding that the estimate allows on the heap's present state.
pub(super) fn state_of_heap(evidence: &Evidence, estimate: &OccupancyEstimate) -> Finding {
    if let Some(bloat) = huge_pages(evidence) {
        return bloat;
    }
    let resident = evidence.ladder.resident_bytes;
    let (free, error) = (estimate.free_resident_bytes_est, half_width(estimate.free_resident_bytes_stderr));
    let about = format!(
        "of {} resident in {}, {} ±{} is free, estimated from a sample",
        HumanBytes(resident),
        evidence.heap(),
        HumanBytes(free),
        HumanBytes(error)
    );
    if is_little(free.saturating_add(error), resident) {
        return Finding::new(Kind::Healthy, Confidence::Low, None, about);
    }
    if is_little(free.saturating_sub(error), resident) {
        return Finding::unknown(format!("{about}: too close to the bound for a verdict"));
    }
    if evidence.arenas >= ARENAS_MIN {
        return Finding::unknown(format!("{about}: only a full walk shows how much of it each arena holds"));
    }
    let cached = estimate.cached_bytes_est.min(free);
    let mut causes =
        [(Kind::Hoarding, estimate.trimmable_bytes_est), (Kind::Fragmentation, estimate.pinned_bytes_est), (Kind::Cache, cached)];
    causes.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    let [(kind, bytes), (_, second), _] = causes;
    // Cached bytes are attributed to the caches, whatever pages they are on, if they are half of the free bytes or more, as for counted bytes.
    let by_caches = |cached: u64| cached.saturating_mul(2) > free;
    let (kind, bytes) = match (by_caches(cached.saturating_sub(error)), by_caches(cached.saturating_add(error))) {
        (true, _) => (Kind::Cache, cached),
        (false, false) if bytes > second.saturating_add(error) => (kind, bytes),
        _ => return Finding::unknown(format!("{about}: only a full walk shows which cause has most of it")),
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
    fn a_sample_gives_a_verdict_where_it_is_clear_of_the_bounds() {
        assert_eq!(kind(500, 40, 10, [20, 20, 0], 1), Kind::Healthy);
        assert_eq!(kind(500, 300, 20, [250, 50, 0], 1), Kind::Hoarding);
        assert_eq!(kind(500, 300, 20, [50, 250, 0], 1), Kind::Fragmentation);
        assert_eq!(kind(500, 300, 20, [50, 250, 230], 1), Kind::Cache);
    }

    #[test]
    fn a_sample_too_close_to_a_bound_gives_no_verdict() {
        assert_eq!(kind(500, 90, 10, [80, 10, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 110, 10, [80, 10, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 300, 20, [160, 140, 0], 1), Kind::Unknown);
        assert_eq!(kind(500, 300, 20, [200, 100, 160], 1), Kind::Unknown);
        // A sample does not measure arenas.
        assert_eq!(kind(500, 300, 20, [250, 50, 0], 8), Kind::Unknown);
        assert_eq!(kind(500, 40, 10, [20, 20, 0], 8), Kind::Healthy);
    }
}
