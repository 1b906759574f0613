//! The blocks to which no pointer was seen, in groups: the heads of chains, with what each holds.

use std::collections::HashMap;
use std::ops::Range;

use serde::Serialize;

use super::chains::{Head, heads};
use super::contents::{Content, Contents, Kind};
use super::scans::{Doubts, ScanResult, Times};
use crate::census::all_own_ranges;
use crate::census::memory::{Memory, MemoryError};

/// Most groups reported; the rest is summed.
const GROUPS_MAX: usize = 1000;
/// Most groups while counting.
const GROUPS_KEPT_MAX: usize = 1 << 16;
/// Most examples per group.
const EXAMPLES_MAX: usize = 3;

/// What was scanned and what was found. Field names are those of `--json`.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Leaks {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub comm: String,
    /// Scans: the first, full one and the quick ones after it.
    pub looks: u32,
    /// Seconds from the first census to the last.
    pub duration_s: f64,
    /// Blocks in use at the first census.
    pub live_blocks: u64,
    /// Usable bytes of these blocks.
    pub live_bytes: u64,
    /// Blocks to which no scan saw a pointer, whose contents did not change, and which were in use to the end.
    pub unreached_blocks: u64,
    /// Usable bytes of these blocks.
    pub unreached_bytes: u64,
    /// Of them, blocks that no other unreached block holds: the heads of chains, one block of each cycle, and all single blocks.
    pub heads: u64,
    /// Blocks to which the first scan saw no pointer: what a single scan would have reported.
    pub first_look_blocks: u64,
    /// Bytes of memory that could not be read: there may be pointers in them.
    pub unread_bytes: u64,
    /// Bytes read by all scans.
    pub read_bytes: u64,
    /// Most memory that the blocks and their pointers took in fragprof.
    pub table_bytes: u64,
    /// CPU time of fragprof.
    pub times: Times,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// The heads, by size, type and contents; those with the most unreached bytes first.
    pub groups: Vec<Group>,
    /// Groups left out, with their heads, and their bytes including what they hold.
    pub more: More,
}

/// Sums of the groups that were left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct More {
    /// Groups.
    pub groups: u64,
    /// Heads.
    pub blocks: u64,
    /// Bytes, including what they hold.
    pub bytes: u64,
}

/// Heads of equal size, type and contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Group {
    /// Usable bytes of each.
    pub size_bytes: u64,
    /// The class by its virtual table.
    #[serde(rename = "type")]
    pub type_name: Option<String>,
    /// The kind of their contents.
    pub content: Content,
    /// Target of the first word, if it points into read-only memory of a program or library.
    pub first_word: Option<String>,
    /// Heads.
    pub blocks: u64,
    /// Their bytes, without what they hold.
    pub bytes: u64,
    /// Blocks that they hold.
    pub held_blocks: u64,
    /// Their bytes.
    pub held_bytes: u64,
    /// Call stack that allocated them, if a recording or an emitter knows it; otherwise empty.
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

    /// A description of them.
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
    /// Bytes that it holds.
    pub held_bytes: u64,
    /// Its first bytes in hexadecimal, if contents are shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hex: Option<String>,
    /// Its first bytes as text, if contents are shown, with a dot for each unprintable byte.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

impl Leaks {
    /// Groups the unreached blocks. Contents are private: only with `shows_content` does the result have the first bytes of examples.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn of(memory: &dyn Memory, pid: u32, comm: &str, seen: &ScanResult, shows_content: bool) -> Result<Self, MemoryError> {
        Self::with_stacks(memory, (pid, comm), seen, shows_content, |_| Vec::new())
    }

    /// The same with call stacks: `stack_of` gives the frames of the block at an address, the innermost first.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn with_stacks(
        memory: &dyn Memory,
        (pid, comm): (u32, &str),
        seen: &ScanResult,
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
    /// Keeps the first groups and sums the others.
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
    fn similar_heads_are_one_group_and_the_largest_comes_first() {
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
