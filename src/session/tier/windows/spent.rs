//! What the probes of a window, or of a piece of a full trace, cost the process, from the kernel's counts of their hits.

use crate::capture::Hits;
use crate::governor::{HitCosts, Spent};

/// Minimum number of hits from which their number shows how far a process got.
const HITS_TELL_MIN: u64 = 100;

/// The probes' work so far, as the cost model takes it.
pub fn spent(hits: Hits) -> Spent {
    Spent {
        allocations: hits.allocations,
        frees: hits.frees,
        returns: hits.returns,
        stepped: u64::from(hits.stepped),
        programs_ns: hits.programs_ns,
    }
}

/// The time that a process ran in a window, derived from the time that it ran until the end of the window was noticed. Hits continue until
/// then, at the cost of a trap alone, and are a better measure of its progress than the clock: it may not have had a CPU all the time.
pub fn run_in_window(costs: HitCosts, ran_s: f64, share: f64, at_open: Hits, at_close: Hits) -> f64 {
    let (all, inside) = (spent(at_close).since(spent(at_open)), inside(at_open, at_close));
    let after = all.since(inside);
    if after.hits() == 0 || all.hits() < HITS_TELL_MIN {
        return ran_s * share;
    }
    let inside_s = costs.spent_s(inside).min(ran_s);
    let own_s = (ran_s - inside_s - costs.passed_over_s(after)).max(0.0);
    inside_s + own_s * inside.hits() as f64 / all.hits() as f64
}

/// The probes' work from a window's opening to its end, without the hits between its end and the moment that was noticed.
pub fn inside(at_open: Hits, at_close: Hits) -> Spent {
    let all = spent(at_close).since(spent(at_open));
    let on = at_close.off_at.map_or(all.hits(), |off_at| off_at.saturating_sub(at_open.allocations + at_open.frees)).min(all.hits());
    let of_on = |count: u64| (u128::from(count) * u128::from(on) / u128::from(all.hits().max(1))) as u64;
    let frees = of_on(all.frees);
    Spent { allocations: on - frees, frees, stepped: of_on(all.stepped), ..all }
}
