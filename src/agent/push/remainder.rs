//! Bounds the stacks of a push: those with the largest shares of any kind of value stay, the rest is summed in one row. Pure.

use crate::frame::Frame;
use crate::profile::{Profile, Values};

use super::interval::Interval;

/// The row that sums the stacks left out.
pub(super) const REMAINDER: &str = "[remainder]";

/// A profile with few enough stacks, and its interval.
#[derive(Debug)]
pub(super) struct Reduced {
    /// `None` = the profile itself.
    pub profile: Option<Profile>,
    /// The values of its stacks.
    pub interval: Interval,
}

/// Keeps at most `stacks_max` stacks with values, and the rows that are no stacks (`[unattributed]` and the like). The second part of the result is
/// the number of stacks that were summed.
pub(super) fn largest(profile: &Profile, interval: Interval, stacks_max: usize) -> (Reduced, u64) {
    let kinds: Vec<_> = interval.sums.iter().chain(interval.gauges.iter()).collect();
    let totals: Vec<f64> = kinds.iter().map(|&kind| interval.rows.iter().map(|row| row.get(kind) as f64).sum::<f64>().max(1.0)).collect();
    let share = |row: &Values| kinds.iter().zip(&totals).map(|(&kind, total)| row.get(kind) as f64 / total).fold(0.0, f64::max);
    let mut order: Vec<(usize, f64)> = profile
        .stacks()
        .iter()
        .zip(&interval.rows)
        .enumerate()
        .filter(|(_, (stack, _))| !profile.is_rest(stack))
        .map(|(index, (_, row))| (index, share(row)))
        .filter(|(_, share)| *share > 0.0)
        .collect();
    if order.len() <= stacks_max {
        return (Reduced { profile: None, interval }, 0);
    }
    // Stable: of equal ones the first stay.
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut is_left_out = vec![false; profile.stacks().len()];
    for (index, _) in order.iter().skip(stacks_max) {
        is_left_out[*index] = true;
    }
    let mut reduced = Profile::new(profile.meta.clone());
    let mut rows = Vec::with_capacity(stacks_max + 1);
    let mut rest = Values::default();
    let mut pid = 0;
    for ((stack, row), is_left_out) in profile.stacks().iter().zip(&interval.rows).zip(is_left_out) {
        if is_left_out {
            kinds.iter().for_each(|&kind| rest.set(kind, rest.get(kind).saturating_add(row.get(kind))));
            pid = stack.pid;
            continue;
        }
        let frames: Vec<Frame> = profile.frames_of(stack).cloned().collect();
        reduced.add_estimate(stack.pid, &frames, stack.truncated.as_deref(), &stack.values, &stack.errors);
        rows.push(*row);
    }
    reduced.add(pid, &[Frame::named(REMAINDER)], None, &rest);
    rows.push(rest);
    let summed = (order.len() - stacks_max) as u64;
    (Reduced { profile: Some(reduced), interval: Interval { rows, ..interval } }, summed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::testing::frame;
    use crate::profile::{Metadata, UNATTRIBUTED, ValueKind};

    fn wide(stacks: u64) -> (Profile, Interval) {
        let kinds = [ValueKind::AllocSpace, ValueKind::InuseSpace];
        let mut profile = Profile::new(Metadata { kinds: kinds.into_iter().collect(), ..Metadata::default() });
        let values = |bytes, live| Values::default().with(ValueKind::AllocSpace, bytes).with(ValueKind::InuseSpace, live);
        for number in 1..=stacks {
            // The first allocates little, and most of what is live.
            let live = if number == 1 { 1_000_000 } else { 1 };
            profile.add(7, &[frame(&format!("f{number}"), 1)], None, &values(number, live));
        }
        profile.add(7, &[Frame::named(UNATTRIBUTED)], None, &values(0, 3));
        let rows = profile.stacks().iter().map(|stack| stack.values).collect();
        let set = |kind| std::iter::once(kind).collect();
        let interval =
            Interval { sums: set(ValueKind::AllocSpace), gauges: set(ValueKind::InuseSpace), rows, end_unix_ns: 1, duration_ns: 1 };
        (profile, interval)
    }

    #[test]
    fn the_sums_stay_and_the_largest_of_each_kind_are_kept() {
        let (profile, interval) = wide(1000);
        let before = interval.clone();
        let (reduced, summed) = largest(&profile, interval, 10);
        let kept = reduced.profile.unwrap();
        assert_eq!((summed, kept.stacks().len(), reduced.interval.rows.len()), (990, 12, 12));
        let names: Vec<String> = kept.stacks().iter().map(|stack| kept.frames_of(stack).next().unwrap().function.to_string()).collect();
        assert!(names.contains(&"f1".to_owned()) && names.contains(&"f1000".to_owned()), "{names:?}");
        assert!(names.contains(&UNATTRIBUTED.to_owned()) && names.last().unwrap() == REMAINDER, "{names:?}");
        for kind in [ValueKind::AllocSpace, ValueKind::InuseSpace] {
            let sum = |rows: &[Values]| rows.iter().map(|row| row.get(kind)).sum::<u64>();
            assert_eq!(sum(&reduced.interval.rows), sum(&before.rows));
        }
    }

    #[test]
    fn a_small_profile_is_left_as_it_is() {
        let (profile, interval) = wide(10);
        let (reduced, summed) = largest(&profile, interval.clone(), 10);
        assert!(reduced.profile.is_none() && summed == 0 && reduced.interval == interval);
    }
}
