//! The stacks of a profile as rows of a table: without the allocator's frames and the thread's start, and with stacks that would look the
//! same merged. Pure.

use std::collections::{BTreeSet, HashMap};

use super::kind::{StandardErrors, ValueKind, Values};
use super::model::{Profile, Stack};
use super::{glue, page};
use crate::frame::Frame;

/// One row of a table: the stacks of a process whose shown frames read the same.
#[derive(Debug, Clone)]
pub struct Row<'a> {
    /// Process id, 0 = not known.
    pub pid: u32,
    /// The shown frames of the largest of its stacks, the function that allocated the memory first.
    pub frames: Vec<&'a Frame>,
    /// The allocator's functions that were called, in the order of their names.
    pub allocated_by: BTreeSet<&'a str>,
    /// Why the walk ended before the thread's entry; `None` = it did not, or this is not known.
    pub truncated: Option<&'a str>,
    /// Number of different paths to the last frame that is shown: more than 1 if the stacks differ only above it.
    pub ways: usize,
    /// Sums over its stacks.
    pub values: Values,
    /// The sums' standard errors.
    pub errors: StandardErrors,
    /// Whether it is not a stack but a remainder ([`Profile::is_rest`]).
    pub is_rest: bool,
    /// Its stacks.
    pub stacks: Vec<&'a Stack>,
}

/// The visible parts of a frame: function, location and whether it is a guess.
type VisibleFrame<'a> = (&'a str, String, bool);

/// The key by which stacks are merged: the visible parts of each shown frame, and how the walk ended.
#[derive(PartialEq, Eq, Hash)]
struct VisibleStack<'a> {
    pid: u32,
    shown: Vec<VisibleFrame<'a>>,
    truncated: Option<&'a str>,
}

/// The frames of a stack that are shown: without allocation code at the leaf and the start of the thread at the root.
pub fn shown<'f, 'a>(frames: &'f [&'a Frame]) -> &'f [&'a Frame] {
    let frames = &frames[glue::leading_frames(frames.iter().copied())..];
    &frames[..frames.len() - glue::startup_frames(frames.iter().copied())]
}

/// The visible parts of at most `most` frames.
fn visible<'a>(frames: &[&'a Frame], most: usize) -> Vec<VisibleFrame<'a>> {
    frames.iter().take(most).map(|frame| (&*frame.function, page::place(frame), frame.flags.guessed)).collect()
}

/// The rows with a value of a kind, in the order of their [rank](Values::rank), equal ones in the order of their frames' names. A row shows
/// its title and at most `callers` callers.
pub fn ranked(profile: &Profile, kind: ValueKind, callers: usize) -> Vec<Row<'_>> {
    of(profile, profile.ranked(kind), kind, callers)
}

/// Like [`ranked`], for some of the stacks.
pub fn of<'a>(profile: &'a Profile, stacks: Vec<&'a Stack>, kind: ValueKind, callers: usize) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> = Vec::new();
    let mut indices: HashMap<VisibleStack<'_>, usize> = HashMap::new();
    let mut rests: Vec<BTreeSet<Vec<VisibleFrame<'_>>>> = Vec::new();
    for stack in stacks {
        let frames: Vec<&Frame> = profile.frames_of(stack).collect();
        let seen = shown(&frames);
        let truncated = stack.truncated.as_deref();
        let look = VisibleStack { pid: stack.pid, shown: visible(seen, callers.saturating_add(1)), truncated };
        let next = rows.len();
        let index = *indices.entry(look).or_insert(next);
        if index == next {
            rows.push(new_row(profile, stack, seen.to_vec()));
            rests.push(BTreeSet::new());
        }
        let Some((row, above)) = rows.get_mut(index).zip(rests.get_mut(index)) else { continue };
        row.stacks.push(stack);
        row.values.add(&stack.values);
        row.errors.add(&stack.errors);
        row.allocated_by.extend(glue::allocated_by(&frames));
        above.insert(visible(seen.get(callers.saturating_add(1)..).unwrap_or_default(), usize::MAX));
        row.ways = above.len();
    }
    // The sort is stable: equal rows stay in the order of the ranking.
    rows.sort_by_key(|row| std::cmp::Reverse(row.values.rank(kind)));
    rows
}

fn new_row<'a>(profile: &'a Profile, stack: &'a Stack, frames: Vec<&'a Frame>) -> Row<'a> {
    Row {
        pid: stack.pid,
        frames,
        allocated_by: BTreeSet::new(),
        truncated: stack.truncated.as_deref(),
        ways: 0,
        values: Values::default(),
        errors: StandardErrors::default(),
        is_rest: profile.is_rest(stack),
        stacks: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::testing::frame;

    fn profile(stacks: &[(&[&str], u64, u64)]) -> Profile {
        let mut profile = Profile::default();
        for (names, address, bytes) in stacks {
            let frames: Vec<Frame> = names.iter().map(|name| Frame { address: *address, ..frame(name, 1) }).collect();
            let errors = StandardErrors::default().with(ValueKind::InuseSpace, 3);
            profile.add_estimate(7, &frames, None, &Values::default().with(ValueKind::InuseSpace, *bytes), &errors);
        }
        profile
    }

    fn names(rows: &[Row<'_>]) -> Vec<(String, u64, usize)> {
        let row = |row: &Row<'_>| {
            let names: Vec<&str> = row.frames.iter().map(|frame| &*frame.function).collect();
            (names.join(" < "), row.values.get(ValueKind::InuseSpace), row.ways)
        };
        rows.iter().map(row).collect()
    }

    #[test]
    fn by_survivors_stacks_known_to_keep_their_blocks_come_first() {
        let mut profile = Profile::default();
        let mut add = |name: &str, bytes: u64, same: u64| {
            let counts = [(ValueKind::SampledObjects, 40), (ValueKind::InformativeObjects, 30), (ValueKind::SameObjects, same)];
            let values = counts.iter().fold(Values::default(), |values, &(kind, count)| values.with(kind, count));
            let values = values.with(ValueKind::SurvivorSpace, bytes).with(ValueKind::InuseSpace, bytes);
            profile.add_estimate(7, &[frame(name, 1)], None, &values, &StandardErrors::default());
        };
        add("cache", 1 << 30, 2);
        add("leak", 1 << 20, 30);
        let order = |kind| ranked(&profile, kind, 4).iter().map(|row| row.frames[0].function.to_string()).collect::<Vec<_>>();
        assert_eq!(order(ValueKind::SurvivorSpace), ["leak", "cache"]);
        assert_eq!(order(ValueKind::InuseSpace), ["cache", "leak"]);
    }

    #[test]
    fn stacks_that_differ_in_addresses_or_in_the_allocators_function_alone_are_one_row() {
        let profile = profile(&[
            (&["malloc", "grow", "main"], 1, 10),
            (&["malloc", "grow", "main"], 2, 20),
            (&["calloc", "grow", "main"], 3, 5),
            (&["malloc", "load", "main"], 1, 30),
        ]);
        let rows = ranked(&profile, ValueKind::InuseSpace, 12);
        assert_eq!(names(&rows), [("grow < main".to_owned(), 35, 1), ("load < main".to_owned(), 30, 1)]);
        assert_eq!(rows[0].allocated_by, BTreeSet::from(["calloc", "malloc"]));
        assert_eq!(rows[0].errors.get(ValueKind::InuseSpace), 5, "variances add up, and each sum is rounded: 3 and 3, then 3");
        let all: u64 = profile.stacks().iter().map(|stack| stack.values.get(ValueKind::InuseSpace)).sum();
        assert_eq!(rows.iter().map(|row| row.values.get(ValueKind::InuseSpace)).sum::<u64>(), all);
    }

    #[test]
    fn stacks_that_differ_only_above_what_is_shown_are_one_row_which_says_so() {
        let profile = profile(&[
            (&["malloc", "grow", "push", "left", "main"], 1, 10),
            (&["malloc", "grow", "push", "right", "main"], 1, 20),
            (&["malloc", "grow", "push", "right", "main"], 2, 20),
        ]);
        assert_eq!(ranked(&profile, ValueKind::InuseSpace, 2).len(), 2, "the difference is shown");
        let rows = ranked(&profile, ValueKind::InuseSpace, 1);
        assert_eq!((rows.len(), rows[0].ways, rows[0].values.get(ValueKind::InuseSpace)), (1, 2, 50));
    }

    #[test]
    fn processes_and_cut_walks_stay_apart() {
        let mut profile = profile(&[(&["malloc", "grow"], 1, 10)]);
        let values = Values::default().with(ValueKind::InuseSpace, 10);
        profile.add(8, &[frame("malloc", 1), frame("grow", 1)], None, &values);
        profile.add(7, &[frame("malloc", 1), frame("grow", 1)], Some("no table"), &values);
        assert_eq!(ranked(&profile, ValueKind::InuseSpace, 12).len(), 3);
    }
}
