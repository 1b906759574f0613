//! What a hit costs the watched process on this machine, from paired measurements. Pure.

/// Middle costs of one probed call, in nanoseconds of the target's time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HitCosts {
    /// An allocation: entry with its stack, return, record.
    pub allocation_ns: f64,
    /// A free: entry, record.
    pub free_ns: f64,
    /// Largest relative distance of the middle half of the rounds from the middle: how far the costs may be trusted.
    pub spread: f64,
}

impl HitCosts {
    /// What is taken where nothing could be measured: dearer than any machine the project has seen in emulation, so that the budget
    /// holds. DESIGN section 2 has 2.9 µs a pair.
    pub const ASSUMED: Self = Self { allocation_ns: 4_000.0, free_ns: 1_500.0, spread: 1.0 };

    /// Hits that cost nothing: where all was seen, nothing is to be scaled.
    pub const FREE: Self = Self { allocation_ns: 0.0, free_ns: 0.0, spread: 0.0 };

    /// From rounds of nanoseconds a pair: alone, with probes on free, with probes on both. `None` without a single round, or if the
    /// probes cost nothing, which cannot be.
    #[must_use]
    pub fn from_rounds(rounds: &[[f64; 3]]) -> Option<Self> {
        let free = quartiles(rounds.iter().map(|[alone, free, _]| free - alone))?;
        let allocation = quartiles(rounds.iter().map(|[_, free, both]| both - free))?;
        if free[1] <= 0.0 || allocation[1] <= 0.0 {
            return None;
        }
        let spread = |q: [f64; 3]| (q[2] - q[1]).max(q[1] - q[0]) / q[1];
        Some(Self { allocation_ns: allocation[1], free_ns: free[1], spread: spread(free).max(spread(allocation)) })
    }

    /// Seconds that these hits cost.
    #[must_use]
    pub fn seconds(&self, allocations: u64, frees: u64) -> f64 {
        (allocations as f64 * self.allocation_ns + frees as f64 * self.free_ns) / 1e9
    }

    /// The mean cost of a hit, half of them frees, in seconds.
    #[must_use]
    pub fn mean_s(&self) -> f64 {
        (self.allocation_ns + self.free_ns) / 2e9
    }
}

fn quartiles(values: impl Iterator<Item = f64>) -> Option<[f64; 3]> {
    let mut sorted: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted.get(((sorted.len().checked_sub(1)?) as f64 * share).round() as usize).copied();
    Some([at(0.25)?, at(0.5)?, at(0.75)?])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn costs_are_the_middle_of_the_rounds_and_one_wild_round_does_not_matter() {
        let rounds =
            [[10.0, 1010.0, 3010.0], [12.0, 1012.0, 3112.0], [9.0, 999_000.0, 999_001.0], [10.0, 1000.0, 2990.0], [10.0, 1020.0, 3030.0]];
        let costs = HitCosts::from_rounds(&rounds).unwrap();
        assert!((990.0..1020.0).contains(&costs.free_ns), "{costs:?}");
        assert!((1900.0..2110.0).contains(&costs.allocation_ns), "{costs:?}");
        assert!((costs.seconds(1_000_000, 1_000_000) - 3.0).abs() < 0.1);
    }

    #[test]
    fn probes_that_seem_to_cost_nothing_are_not_believed() {
        assert_eq!(HitCosts::from_rounds(&[[10.0, 9.0, 9.0]]), None);
        assert_eq!(HitCosts::from_rounds(&[]), None);
    }
}
