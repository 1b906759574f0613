//! How a node's cap is shared among targets. Pure.

/// Shares of `cap`, one per target's `wanted`, in its unit. Every target first gets `floor` (or what it wants, if that is less), so that
/// each is observed; the rest is shared by max-min fairness: no target gets more than it wants, and none could get more without one that
/// has less losing. A cap too small for the floors is shared equally.
#[must_use]
pub fn fair(cap: f64, floor: f64, wanted: &[f64]) -> Vec<f64> {
    let wanted: Vec<f64> = wanted.iter().map(|want| if want.is_finite() { want.max(0.0) } else { 0.0 }).collect();
    let floors: f64 = wanted.iter().map(|want| want.min(floor)).sum();
    if floors >= cap {
        let scale = if floors > 0.0 { cap.max(0.0) / floors } else { 0.0 };
        return wanted.iter().map(|want| want.min(floor) * scale).collect();
    }
    // The level up to which everyone is filled lies between two of the sorted demands.
    let mut sorted = wanted.clone();
    sorted.sort_by(f64::total_cmp);
    let mut left = cap;
    let mut level = f64::INFINITY;
    for (index, want) in sorted.iter().enumerate() {
        let each = left / (sorted.len() - index) as f64;
        if *want > each {
            level = each;
            break;
        }
        left -= want;
    }
    wanted.iter().map(|want| want.min(level)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_demands_are_met_and_the_others_share_equally() {
        assert_eq!(fair(10.0, 0.1, &[1.0, 8.0, 9.0]), [1.0, 4.5, 4.5]);
        assert_eq!(fair(100.0, 0.1, &[1.0, 8.0, 9.0]), [1.0, 8.0, 9.0]);
    }

    #[test]
    fn the_cap_is_never_exceeded_and_no_target_starves() {
        for count in 1..100usize {
            let wanted: Vec<f64> = (0..count).map(|i| 0.01 * (1 + i % 7) as f64).collect();
            let shares = fair(0.05, 0.0003, &wanted);
            assert!(shares.iter().sum::<f64>() <= 0.05 + 1e-12);
            assert!(shares.iter().all(|share| *share > 0.0), "{shares:?}");
        }
    }

    #[test]
    fn a_cap_below_the_floors_is_shared_equally() {
        assert_eq!(fair(1.0, 1.0, &[5.0, 5.0]), [0.5, 0.5]);
        assert_eq!(fair(0.0, 0.0, &[1.0]), [0.0]);
    }
}
