//! What the blocks of a stack cost: the heap without them, and with them in an allocator of their own. Pure.
//!
//! Pinned bytes are charged to the blocks on a page, and that is not what would be gained without them: their neighbours may pin the same
//! pages. Only a replay without the blocks tells.

use std::collections::{HashMap, HashSet};

use serde::Serialize;

use super::forecast::Figures;
use crate::trace::Names;

/// Functions of a stack that are shown.
const FRAMES_SHOWN: usize = 4;
/// Stacks that are tried by default.
pub const STACKS: usize = 3;

/// A group of stacks, and what they cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cause {
    /// The text by which they were chosen, or the innermost functions.
    pub stack: String,
    /// Number of stacks.
    pub stacks: usize,
    /// Pinned bytes charged to them near the end; `None` if the allocator's chunks are not known.
    pub pinned_bytes: Option<u64>,
    /// Saved if their blocks were not made.
    pub without: Option<Saved>,
    /// Saved if they were in an arena of their own.
    pub pool: Option<Saved>,
}

/// Resident bytes saved; negative if it costs memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Saved {
    /// Of the peak.
    pub peak_bytes: i64,
    /// On average.
    pub mean_bytes: i64,
    /// At the end.
    pub end_bytes: i64,
}

impl Saved {
    /// What one replay takes less than another.
    #[must_use]
    pub fn between(today: Figures, then: Figures) -> Self {
        let less = |a: u64, b: u64| i64::try_from(a).unwrap_or(i64::MAX).saturating_sub(i64::try_from(b).unwrap_or(i64::MAX));
        Self {
            peak_bytes: less(today.peak_bytes, then.peak_bytes),
            mean_bytes: less(today.mean_bytes, then.mean_bytes),
            end_bytes: less(today.end_bytes, then.end_bytes),
        }
    }
}

/// The stacks with a function whose name contains a text.
#[must_use]
pub fn matching(names: &Names, text: &str) -> HashSet<u32> {
    let matches: Vec<bool> = names.functions.iter().map(|function| function.contains(text)).collect();
    let has = |&stack: &u32| names.indices_of(stack).any(|function| matches.get(function as usize).copied().unwrap_or(false));
    (0..names.stacks()).filter(has).collect()
}

/// The groups of stacks that pin the most: stacks with the same innermost functions are one group.
#[must_use]
pub fn top(names: &Names, pinned: &[(u32, u64)]) -> Vec<(String, HashSet<u32>)> {
    let mut groups: HashMap<String, (u64, HashSet<u32>)> = HashMap::new();
    for &(stack, bytes) in pinned {
        let Some(words) = words(names, stack) else { continue };
        let group = groups.entry(words).or_default();
        group.0 = group.0.saturating_add(bytes);
        group.1.insert(stack);
    }
    let mut groups: Vec<(String, (u64, HashSet<u32>))> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.0.cmp(&a.1.0).then_with(|| a.0.cmp(&b.0)));
    // All stacks of these functions, also those that pin nothing.
    let all = |text: &String| (0..names.stacks()).filter(|&stack| words(names, stack).as_ref() == Some(text)).collect::<HashSet<u32>>();
    groups.into_iter().take(STACKS).map(|(text, _)| (text.clone(), all(&text))).collect()
}

/// The innermost functions of a stack; `None` if it has no names.
fn words(names: &Names, stack: u32) -> Option<String> {
    let functions: Vec<&str> = names.functions_of(stack).take(FRAMES_SHOWN).collect();
    (!functions.is_empty()).then(|| functions.join(" ← "))
}

/// The pinned bytes of a group.
#[must_use]
pub fn pinned_bytes(pinned: &[(u32, u64)], stacks: &HashSet<u32>) -> Option<u64> {
    let of_group = pinned.iter().filter(|(stack, _)| stacks.contains(stack)).map(|one| one.1);
    (!pinned.is_empty()).then(|| of_group.fold(0, u64::saturating_add))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::NamesWriter;

    fn names() -> Names {
        let mut names = NamesWriter::default();
        let [malloc, load, main, serve] = ["malloc", "load", "main", "serve"].map(|name| names.function(name.to_owned()));
        // Stack 3 has no names.
        for stack in [&[malloc, load, main][..], &[malloc, serve, main], &[malloc, load, main], &[], &[9]] {
            names.stack(stack);
        }
        names.finish()
    }

    #[test]
    fn stacks_are_chosen_by_a_part_of_a_functions_name() {
        assert_eq!(matching(&names(), "oad"), HashSet::from([0, 2]));
        assert_eq!(matching(&names(), "mai"), HashSet::from([0, 1, 2]));
        assert!(matching(&names(), "nothing").is_empty());
    }

    #[test]
    fn the_top_are_groups_of_the_same_innermost_functions() {
        let pinned = [(1, 60), (0, 40), (2, 30), (3, 1000)];
        let top = top(&names(), &pinned);
        assert_eq!(top.len(), 2);
        assert_eq!(top.first(), Some(&("malloc ← load ← main".to_owned(), HashSet::from([0, 2]))));
        assert_eq!(pinned_bytes(&pinned, &HashSet::from([0, 2])), Some(70));
        assert_eq!(pinned_bytes(&[], &HashSet::new()), None);
    }

    #[test]
    fn what_takes_more_saves_less_than_nothing() {
        let figures = |bytes| Figures { peak_bytes: bytes, mean_bytes: bytes, end_bytes: bytes };
        assert_eq!(Saved::between(figures(10), figures(15)).mean_bytes, -5);
        assert_eq!(Saved::between(figures(15), figures(10)).end_bytes, 5);
    }
}
