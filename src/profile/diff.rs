//! The difference of two profiles, stack by stack.
//!
//! Stacks are matched by the names of the functions that are shown: addresses, lines and process ids differ between runs, and which of the
//! allocator's functions was called does not matter.

use std::collections::HashMap;
use std::sync::Arc;

use super::kind::ValueKind;
use super::model::{Profile, Stack};
use super::rows;
use crate::frame::Frame;

/// One stack in both profiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiffRow<'a> {
    /// Frames, leaf first, from the newer profile if it has the stack.
    pub frames: Vec<&'a Frame>,
    /// Value in the older profile.
    pub old: u64,
    /// Value in the newer profile.
    pub new: u64,
}

impl DiffRow<'_> {
    /// The change; negative if the stack shrank.
    pub fn delta(&self) -> i128 {
        i128::from(self.new) - i128::from(self.old)
    }
}

/// The difference of two profiles by one kind.
#[derive(Debug)]
pub struct Diff<'a> {
    /// Stacks that changed, the largest change first.
    pub rows: Vec<DiffRow<'a>>,
    /// Sum over all stacks of the older profile.
    pub old_total: u64,
    /// Sum over all stacks of the newer profile.
    pub new_total: u64,
    /// Whether the values (older, newer) are only lower bounds, so that the change is not known.
    pub lower_bounds: [bool; 2],
}

impl Diff<'_> {
    /// What a change means if a side is only a lower bound; `None` if neither is.
    pub fn doubt(&self) -> Option<&'static str> {
        match self.lower_bounds {
            [false, false] => None,
            [true, false] => Some("the old values are lower bounds: increases may not be real, and decreases may be larger"),
            [false, true] => Some("the new values are lower bounds: increases may be larger, and decreases may not be real"),
            [true, true] => Some("both values are lower bounds: the changes are not known"),
        }
    }
}

/// Compares two profiles.
pub fn compare<'a>(old: &'a Profile, new: &'a Profile, kind: ValueKind) -> Diff<'a> {
    let mut rows: HashMap<Vec<Arc<str>>, DiffRow<'a>> = HashMap::new();
    let (mut old_total, mut new_total) = (0u64, 0u64);
    for (profile, is_new) in [(new, true), (old, false)] {
        for stack in profile.stacks().iter().filter(|stack| stack.values.get(kind) > 0) {
            let value = stack.values.get(kind);
            let row =
                rows.entry(names(profile, stack)).or_insert_with(|| DiffRow { frames: profile.frames_of(stack).collect(), old: 0, new: 0 });
            let (side, total) = if is_new { (&mut row.new, &mut new_total) } else { (&mut row.old, &mut old_total) };
            *side = side.saturating_add(value);
            *total = total.saturating_add(value);
        }
    }
    let mut rows: Vec<(Vec<Arc<str>>, DiffRow<'a>)> = rows.into_iter().filter(|(_, row)| row.delta() != 0).collect();
    rows.sort_by(|(a_names, a), (b_names, b)| b.delta().abs().cmp(&a.delta().abs()).then_with(|| a_names.cmp(b_names)));
    let lower_bounds = [old, new].map(|profile| profile.total_is_lower_bound(kind));
    Diff { rows: rows.into_iter().map(|(_, row)| row).collect(), old_total, new_total, lower_bounds }
}

fn names(profile: &Profile, stack: &Stack) -> Vec<Arc<str>> {
    let frames: Vec<&Frame> = profile.frames_of(stack).collect();
    rows::shown(&frames).iter().map(|frame| frame.function.clone()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::profile::Values;
    use crate::profile::testing::frame;

    fn profile(pid: u32, base: u64, rows: &[(&[&str], u64)]) -> Profile {
        let mut profile = Profile::default();
        for (names, value) in rows {
            let frames: Vec<Frame> = names.iter().map(|&n| Frame { address: base, line: pid, ..frame(n, 1) }).collect();
            profile.add(pid, &frames, None, &Values::default().with(ValueKind::InuseSpace, *value));
        }
        profile
    }

    #[test]
    fn a_change_against_a_lower_bound_is_doubted() {
        let exact = profile(1, 0, &[(&["a"], 100)]);
        let mut bound = profile(2, 0, &[(&["a"], 50)]);
        bound.meta.governed.push(crate::profile::Governed { pid: 2, rates_are_lower_bounds: true, ..Default::default() });
        assert_eq!(compare(&exact, &bound, ValueKind::InuseSpace).doubt(), None, "only rates are lower bounds");
        assert!(
            compare(&exact, &bound, ValueKind::AllocSpace)
                .doubt()
                .is_some_and(|doubt| doubt.starts_with("the new values are lower bounds"))
        );
        assert!(compare(&bound, &bound, ValueKind::AllocSpace).doubt().is_some_and(|doubt| doubt.contains("not known")));
    }

    #[test]
    fn stacks_of_two_runs_are_matched_by_name_and_the_largest_change_comes_first() {
        let old = profile(1, 0x1000, &[(&["a", "main"], 100), (&["b", "main"], 50), (&["gone", "main"], 7), (&["same"], 3)]);
        let new = profile(2, 0x9000, &[(&["b", "main"], 900), (&["a", "main"], 40), (&["same"], 3)]);
        let diff = compare(&old, &new, ValueKind::InuseSpace);
        let rows: Vec<(String, i128)> = diff.rows.iter().map(|row| (row.frames[0].function.to_string(), row.delta())).collect();
        assert_eq!(rows, [("b".to_owned(), 850), ("a".to_owned(), -60), ("gone".to_owned(), -7)]);
        assert_eq!((diff.old_total, diff.new_total), (160, 943));
    }

    proptest! {
        #[test]
        fn the_changes_add_up_to_the_change_of_the_totals(
            old in prop::collection::vec(("[ab]{1,2}", 0u64..1000), 0..12),
            new in prop::collection::vec(("[ab]{1,2}", 0u64..1000), 0..12),
        ) {
            let of = |rows: &[(String, u64)]| {
                let mut profile = Profile::default();
                for (name, value) in rows {
                    profile.add(1, &[frame(name, 1)], None, &Values::default().with(ValueKind::InuseSpace, *value));
                }
                profile
            };
            let (a, b) = (of(&old), of(&new));
            let diff = compare(&a, &b, ValueKind::InuseSpace);
            let sum: i128 = diff.rows.iter().map(DiffRow::delta).sum();
            let total = |rows: &[(String, u64)]| rows.iter().map(|(_, v)| i128::from(*v)).sum::<i128>();
            prop_assert_eq!(sum, total(&new) - total(&old));
        }
    }
}
