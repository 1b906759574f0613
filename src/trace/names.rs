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
    /// By frame, how far before it in this list the frame is that called it; 0 = none is known. Nearly all are 1, which hardly takes space.
    callers: Vec<u32>,
    /// By frame, the index of its function.
    frames: Vec<u32>,
    /// By stack number, its innermost frame plus one; 0 = it has no names. Stacks beyond the list have none either.
    #[serde(with = "differences")]
    stacks: Vec<u32>,
}

/// Numbers as the differences between them: small ones, if stacks that were met one after the other have frames that were.
mod differences {
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[allow(clippy::ptr_arg)] // serde's signature
    pub fn serialize<S: Serializer>(numbers: &Vec<u32>, serializer: S) -> Result<S::Ok, S::Error> {
        let before = std::iter::once(0).chain(numbers.iter().copied());
        serializer.collect_seq(numbers.iter().zip(before).map(|(&number, before)| i64::from(number) - i64::from(before)))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
        let mut number = 0u32;
        let differences = Vec::<i64>::deserialize(deserializer)?;
        let add = |difference: i64| {
            number = u32::try_from(i64::from(number).saturating_add(difference)).unwrap_or(0);
            number
        };
        Ok(differences.into_iter().map(add).collect())
    }
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
            let distance = *self.callers.get(frame as usize)?;
            at = if distance == 0 { 0 } else { at.saturating_sub(distance) };
            self.frames.get(frame as usize).copied()
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
            let Names { callers, frames, .. } = &mut self.names;
            *self.numbers.entry((caller, function)).or_insert_with(|| {
                frames.push(function);
                let number = frames.len() as u32;
                callers.push(if caller == 0 { 0 } else { number - caller });
                number
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
    #![allow(clippy::unwrap_used)]

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
        let json = serde_json::to_string(&names).unwrap();
        assert_eq!(serde_json::from_str::<Names>(&json).unwrap(), names, "{json}");
    }

    #[test]
    fn a_damaged_tree_ends() {
        let names = Names { callers: vec![7, 1, 0], frames: vec![0, 1], stacks: vec![1, 2, 3, 77], ..Names::default() };
        assert_eq!((0..5).map(|stack| names.indices_of(stack).count()).collect::<Vec<_>>(), [1, 2, 0, 0, 0]);
        let long = Names { callers: vec![1; 5000], frames: vec![0; 5000], stacks: vec![5000], ..Names::default() };
        assert_eq!(long.indices_of(0).count(), FRAMES_MAX);
        for (text, stacks) in [("[5,-9,3]", [5, 0, 3]), ("[4294967295,9223372036854775807,1]", [u32::MAX, 0, 1])] {
            let json = format!("{{\"stacks\":{text}}}");
            assert_eq!(serde_json::from_str::<Names>(&json).unwrap().stacks, stacks);
        }
    }
}
