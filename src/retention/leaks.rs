//! The blocks to which no pointer was seen, in groups for people and programs: the roots of chains first, with what each holds.

use std::collections::HashMap;
use std::ops::Range;

use serde::Serialize;

use super::chains::{Head, heads};
use super::contents::{Content, Contents, Kind};
use super::looks::{Doubts, Seen, Times};
use crate::census::all_own_ranges;
use crate::census::memory::{Memory, MemoryError};

/// Groups told; the rest is summed up.
const GROUPS_MAX: usize = 1000;
/// Groups kept while they are counted.
const GROUPS_KEPT_MAX: usize = 1 << 16;
/// Examples of a group.
const EXAMPLES_MAX: usize = 3;

/// What was looked at and what was found. Field names are those of `--json`.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Leaks {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub comm: String,
    /// Looks: the first pass over everything and the quick ones after it.
    pub looks: u32,
    /// Seconds from the first census to the last.
    pub duration_s: f64,
    /// Blocks in use at the first census.
    pub live_blocks: u64,
    /// Bytes that the program may use in them.
    pub live_bytes: u64,
    /// Blocks to which no look saw a pointer, whose contents did not change, and which were in use to the end.
    pub unreached_blocks: u64,
    /// Bytes that the program may use in them.
    pub unreached_bytes: u64,
    /// Of them, blocks that hang on no other: the roots of chains, one block of each cycle, and all that hold nothing.
    pub heads: u64,
    /// Blocks to which the first look alone saw no pointer: what one pass is worth while the program runs.
    pub first_look_blocks: u64,
    /// Bytes of memory that could not be read: a pointer may stand there.
    pub unread_bytes: u64,
    /// Bytes read by all looks.
    pub read_bytes: u64,
    /// Most memory of this program's that the blocks and their pointers took.
    pub table_bytes: u64,
    /// Processor time of this program.
    pub times: Times,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// The heads, by size, type and contents; those that make most unreached bytes first.
    pub groups: Vec<Group>,
    /// Groups left out, and their heads and bytes with what they hold.
    pub more: More,
}

/// What was left out of the groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct More {
    /// Groups.
    pub groups: u64,
    /// Heads.
    pub blocks: u64,
    /// Bytes with what they hold.
    pub bytes: u64,
}

/// Heads that look alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Group {
    /// Bytes that the program may use in each.
    pub size_bytes: u64,
    /// The class by its virtual table.
    #[serde(rename = "type")]
    pub type_name: Option<String>,
    /// What stands in them.
    pub content: Content,
    /// Where the first word leads, if it leads into a program's or library's read-only memory.
    pub first_word: Option<String>,
    /// Heads.
    pub blocks: u64,
    /// Their bytes, without what they hold.
    pub bytes: u64,
    /// Blocks that hang on them.
    pub held_blocks: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Call stack that allocated them, where a recording or an emitter knows it; empty otherwise.
    pub frames: Vec<String>,
    /// Some of them.
    pub examples: Vec<Example>,
}

impl Group {
    /// Bytes of the heads and of what they hold.
    #[must_use]
    pub fn all_bytes(&self) -> u64 {
        self.bytes.saturating_add(self.held_bytes)
    }

    /// What they are, in words.
    #[must_use]
    pub fn words(&self) -> String {
        match (&self.type_name, &self.first_word) {
            (Some(name), _) => name.clone(),
            (None, Some(place)) => format!("begins with a pointer to {place}"),
            (None, None) => self.content.to_string(),
        }
    }
}

/// One block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Example {
    /// Its address, in hexadecimal.
    pub address: String,
    /// Bytes that hang on it.
    pub held_bytes: u64,
    /// Its first bytes in hexadecimal, if contents are shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hex: Option<String>,
    /// Its first bytes as text, if contents are shown; a point for what cannot be printed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl Leaks {
    /// Sorts what was seen into groups. Contents are private: `shows_content` puts the first bytes of examples into the answer.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn of(memory: &dyn Memory, pid: u32, comm: &str, seen: &Seen, shows_content: bool) -> Result<Self, MemoryError> {
        Self::with_stacks(memory, (pid, comm), seen, shows_content, |_| Vec::new())
    }

    /// The same, where something knows the call stacks of blocks: `stack_of` gives the frames of the block at an address, the innermost first.
    ///
    /// # Errors
    /// If the process is gone.
    pub fn with_stacks(
        memory: &dyn Memory,
        (pid, comm): (u32, &str),
        seen: &Seen,
        shows_content: bool,
        stack_of: impl Fn(Range<u64>) -> Vec<String>,
    ) -> Result<Self, MemoryError> {
        let maps = memory.maps()?;
        let heap: Vec<Range<u64>> = all_own_ranges(&seen.taken.heaps);
        let mut contents = Contents::of(memory, &maps, &heap);
        let mut groups = Groups::default();
        let mut found = heads(&seen.candidates);
        // The examples of a group are those that hold most.
        found.sort_by_key(|head| (std::cmp::Reverse(head.held_bytes), head.number));
        for head in &found {
            let Some(one) = seen.candidates.get(head.number) else { continue };
            let first = contents.first_bytes(one.addr, one.bytes);
            let kind = contents.kind(&first);
            groups.add(one.range(), head, (kind, stack_of(one.range())), shows_content.then_some(first.as_slice()));
        }
        let (groups, more) = groups.finish();
        Ok(Self {
            pid,
            comm: comm.to_owned(),
            looks: seen.looks + 1,
            duration_s: seen.duration.as_secs_f64(),
            live_blocks: seen.live_blocks,
            live_bytes: seen.live_bytes,
            unreached_blocks: seen.candidates.len() as u64,
            unreached_bytes: seen.candidates.left().map(|(_, one)| one.bytes).fold(0, u64::saturating_add),
            heads: found.len() as u64,
            first_look_blocks: seen.first_pass_blocks,
            unread_bytes: seen.doubts.unread_bytes.saturating_add(seen.doubts.swapped_bytes),
            read_bytes: seen.read_bytes,
            table_bytes: seen.table_bytes as u64,
            times: seen.times,
            doubts: seen.doubts.clone(),
            groups,
            more,
        })
    }
}

impl Leaks {
    /// Keeps the first groups and sums up the others.
    pub fn keep(&mut self, top: usize) {
        sum_up(&mut self.groups, top, &mut self.more);
    }
}

fn sum_up(groups: &mut Vec<Group>, top: usize, more: &mut More) {
    for group in groups.drain(top.min(groups.len())..) {
        more.groups += 1;
        more.blocks += group.blocks;
        more.bytes = more.bytes.saturating_add(group.all_bytes());
    }
}

/// Groups while they are counted.
#[derive(Default)]
struct Groups {
    places: HashMap<(u64, Kind, Vec<String>), usize>,
    list: Vec<Group>,
    more: More,
}

impl Groups {
    fn add(&mut self, range: Range<u64>, head: &Head, (kind, frames): (Kind, Vec<String>), shown: Option<&[u8]>) {
        let (addr, bytes) = (range.start, range.end - range.start);
        let next = self.list.len();
        let key = (bytes, kind, frames);
        let place = match self.places.get(&key) {
            Some(&place) => place,
            None if next >= GROUPS_KEPT_MAX => {
                self.more.blocks += 1;
                self.more.bytes = self.more.bytes.saturating_add(bytes).saturating_add(head.held_bytes);
                return;
            }
            None => {
                self.list.push(Group {
                    size_bytes: bytes,
                    type_name: key.1.type_name.clone(),
                    content: key.1.content,
                    first_word: key.1.first_word.clone(),
                    blocks: 0,
                    bytes: 0,
                    held_blocks: 0,
                    held_bytes: 0,
                    frames: key.2.clone(),
                    examples: Vec::new(),
                });
                self.places.insert(key, next);
                next
            }
        };
        let Some(group) = self.list.get_mut(place) else { return };
        group.blocks += 1;
        group.bytes = group.bytes.saturating_add(bytes);
        group.held_blocks += head.held_blocks;
        group.held_bytes = group.held_bytes.saturating_add(head.held_bytes);
        if group.examples.len() < EXAMPLES_MAX {
            let hex = shown.map(|bytes| bytes.iter().map(|byte| format!("{byte:02x}")).collect());
            let printed = |&byte: &u8| if byte.is_ascii_graphic() || byte == b' ' { char::from(byte) } else { '.' };
            let text = shown.map(|bytes| bytes.iter().map(printed).collect());
            group.examples.push(Example { address: format!("{addr:#x}"), held_bytes: head.held_bytes, hex, text });
        }
    }

    fn finish(mut self) -> (Vec<Group>, More) {
        let key = |group: &Group| (std::cmp::Reverse(group.all_bytes()), group.size_bytes, group.content, group.words());
        self.list.sort_by_cached_key(key);
        sum_up(&mut self.list, GROUPS_MAX, &mut self.more);
        (self.list, self.more)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(name: &str) -> Kind {
        Kind { content: Content::StaticPointer, type_name: Some(name.into()), first_word: None }
    }

    #[test]
    fn heads_that_look_alike_are_one_group_and_what_holds_most_comes_first() {
        let mut groups = Groups::default();
        let head = |number, held_bytes| Head { number, held_blocks: held_bytes / 10, held_bytes };
        groups.add(0x10..0x10 + 24, &head(0, 0), (kind("A"), Vec::new()), None);
        groups.add(0x40..0x40 + 24, &head(1, 0), (kind("A"), Vec::new()), None);
        groups.add(0x80..0x80 + 24, &head(2, 900), (kind("B"), Vec::new()), Some(b"ab\0\x1b"));
        groups.add(0xc0..0xc0 + 40, &head(3, 0), (kind("A"), Vec::new()), None);
        let (groups, more) = groups.finish();
        let told: Vec<(String, u64, u64, u64)> =
            groups.iter().map(|group| (group.words(), group.size_bytes, group.blocks, group.held_bytes)).collect();
        assert_eq!(told, [("B".to_owned(), 24, 1, 900), ("A".into(), 24, 2, 0), ("A".into(), 40, 1, 0)]);
        let example = groups.first().and_then(|group| group.examples.first()).cloned();
        let shown = example.map(|one| (one.address, one.hex, one.text));
        assert_eq!(shown, Some(("0x80".into(), Some("6162001b".into()), Some("ab..".into()))));
        assert_eq!(more, More::default());
    }
}
