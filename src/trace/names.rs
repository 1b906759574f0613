//! Frames of a trace's stacks, as a tree whose roots are the outermost frames: stacks share the callers that they have in common. An
//! interpreter has stacks of a hundred frames by the ten thousands, which differ in the innermost ones.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// Frames of a stack at most.
const FRAMES_MAX: usize = 1024;
/// The name of a function that the trace does not have.
const UNKNOWN: &str = "?";

/// Names of the functions, and which of them each stack has.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Names {
    /// Names of functions.
    pub functions: Vec<String>,
    /// Frames: the number of the frame that called it plus one, 0 = none is known, and its function. A caller comes before what it calls.
    frames: Vec<(u32, u32)>,
    /// By stack number, its innermost frame plus one; 0 = it has no names. Stacks beyond the list have none either.
    stacks: Vec<u32>,
}

impl Names {
    /// Number of stacks in the list.
    #[must_use]
    pub fn stacks(&self) -> u32 {
        u32::try_from(self.stacks.len()).unwrap_or(u32::MAX)
    }

    /// The functions of a stack as indices, the innermost first; the first 1,024. Nothing if it has no names.
    pub fn indices_of(&self, stack: u32) -> impl Iterator<Item = u32> + '_ {
        let mut at = self.stacks.get(stack as usize).copied().unwrap_or(0);
        let frames = std::iter::from_fn(move || {
            let frame = at.checked_sub(1)?;
            let &(caller, function) = self.frames.get(frame as usize)?;
            // A damaged trace may go round in circles.
            at = if caller <= frame { caller } else { 0 };
            Some(function)
        });
        frames.take(FRAMES_MAX)
    }

    /// Their names; `?` for one that the trace does not have.
    pub fn functions_of(&self, stack: u32) -> impl Iterator<Item = &str> + '_ {
        self.indices_of(stack).map(|function| self.functions.get(function as usize).map_or(UNKNOWN, String::as_str))
    }
}

/// Collects the names of stacks.
#[derive(Debug, Default)]
pub struct NamesWriter {
    names: Names,
    numbers: HashMap<(u32, u32), u32>,
}

impl NamesWriter {
    /// Adds a function, and returns its index.
    pub fn function(&mut self, name: String) -> u32 {
        self.names.functions.push(name);
        self.names.functions.len() as u32 - 1
    }

    /// Adds the next stack: its functions, the innermost first.
    pub fn stack(&mut self, functions: &[u32]) {
        let innermost = functions.iter().rev().fold(0, |caller, &function| {
            let Names { frames, .. } = &mut self.names;
            *self.numbers.entry((caller, function)).or_insert_with(|| {
                frames.push((caller, function));
                frames.len() as u32
            })
        });
        self.names.stacks.push(innermost);
    }

    /// All of them.
    #[must_use]
    pub fn finish(self) -> Names {
        self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_share_their_callers_and_have_the_functions_that_were_added() {
        let mut writer = NamesWriter::default();
        let [load, main, serve] = ["load", "main", "serve"].map(|name| writer.function(name.to_owned()));
        let stacks = [vec![load, main], vec![load, serve, main], vec![], vec![serve, main], vec![load, load, main], vec![9]];
        stacks.iter().for_each(|functions| writer.stack(functions));
        let names = writer.finish();
        for (stack, functions) in stacks.iter().enumerate() {
            assert_eq!(&names.indices_of(stack as u32).collect::<Vec<_>>(), functions);
        }
        assert_eq!(names.frames.len(), 6);
        assert_eq!(names.functions_of(1).collect::<Vec<_>>(), ["load", "serve", "main"]);
        assert_eq!(names.functions_of(5).collect::<Vec<_>>(), ["?"]);
        assert_eq!((names.stacks(), names.indices_of(6).count()), (6, 0));
    }

    #[test]
    fn a_damaged_tree_ends() {
        let names = Names { frames: vec![(2, 0), (1, 1), (9, 2)], stacks: vec![1, 2, 3, 77], ..Names::default() };
        assert_eq!((0..5).map(|stack| names.indices_of(stack).count()).collect::<Vec<_>>(), [1, 2, 1, 0, 0]);
        let long = Names { frames: (0..5000).map(|frame| (frame, 0)).collect(), stacks: vec![5000], ..Names::default() };
        assert_eq!(long.indices_of(0).count(), FRAMES_MAX);
    }
}
