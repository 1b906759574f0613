//! Looks at the player while it stands still: its heap by a census, and which stacks' blocks pin pages.

use std::collections::HashMap;

use super::engine::{Placed, Table};
use super::outcome::Moment;
use super::player::anonymous_bytes;
use crate::census::memory::word_at;
use crate::census::resident::{heap_ranges, pages_of};
use crate::census::{self, Census, LayoutCache, Level, LiveMemory, Memory as _, Pace, Taken};
use crate::fragmentation::pinned::PinnedSpace;
use crate::heap::ladder::both;
use crate::heap::pages::{Owner, Span, visit_pages};
use crate::process::{Backing, Process};
use crate::units::{Pid, StackId};

/// What a look showed.
pub(super) struct Looked {
    pub(super) moment: Moment,
    /// Pinned bytes by stack, the most first.
    pub(super) pinned: Vec<(u32, u64)>,
    /// The census, if it is usable.
    pub(super) census: Option<Census>,
}

/// Takes a census of the player, which stands still, and charges pinned bytes to stacks if the table of blocks is given. `None` if its memory
/// cannot be read at all.
pub(super) fn look(pid: u32, time_ns: u64, layouts: &mut LayoutCache, wanted: Option<(u64, &Table<Placed>)>) -> Option<Looked> {
    let anonymous_bytes = anonymous_bytes(pid)?;
    let memory = LiveMemory::open(Process::open(Pid(pid)).ok()?).ok()?;
    let options = census::Options { level: Level::Full, pace: Pace::default(), with_not_malloc: false };
    let taken = census::take(&memory, pid, "player", options, layouts).ok();
    let usable = taken.filter(|taken| taken.census.walk.usable && taken.census.layout_unknown.is_empty());
    let ladder = usable.as_ref().and_then(|taken| {
        let ladders = taken.census.heaps.iter().map(|heap| heap.ladder);
        ladders.reduce(|sum, ladder| sum.and(ladder, both))
    });
    let pinned = usable.as_ref().zip(wanted).and_then(|(taken, (table_at, blocks))| by_stack(&memory, taken, table_at, blocks));
    let moment = Moment { time_ns, ladder, anonymous_bytes };
    Some(Looked { moment, pinned: pinned.unwrap_or_default(), census: usable.map(|taken| taken.census) })
}

/// Pinned bytes by stack, the most first.
fn by_stack(memory: &LiveMemory, taken: &Taken, table_at: u64, blocks: &Table<Placed>) -> Option<Vec<(u32, u64)>> {
    let places = blocks.values().map(|placed| placed.at).max().map_or(0, |last| last as usize + 1);
    let mut table = vec![0; places * 8];
    let read = memory.read(table_at, &mut table);
    let stacks: HashMap<u64, u32> =
        blocks.values().map(|placed| (word_at(table.get(..read).unwrap_or_default(), placed.at as usize * 8), placed.stack)).collect();
    let mut pinned = PinnedSpace::default();
    for walk in taken.heaps.iter().filter(|walk| !walk.chunks.is_empty()) {
        let ranges = heap_ranges(&walk.chunks);
        let states = pages_of(memory, ranges.iter().map(|range| range.range.clone()))?;
        let owner = |addr: u64| stacks.get(&addr).map_or(Owner::Unattributed, |&stack| Owner::Stack(StackId(stack)));
        let spans =
            walk.chunks.live_blocks().map(|block| Span { start: block.chunk.start, bytes: block.chunk.bytes, owner: owner(block.addr) });
        visit_pages(&ranges, spans, &states, |page| pinned.add(page));
    }
    let mut all: Vec<(u32, u64)> = pinned.bytes.iter().map(|(stack, bytes)| (stack.0, bytes)).filter(|one| one.1 > 0).collect();
    all.sort_unstable_by_key(|&(stack, bytes)| (std::cmp::Reverse(bytes), stack));
    Some(all)
}

/// Zeroed data of a library from this size on is an allocator's tables: the player has no other library but libc, whose is smaller.
const TABLES_BYTES: u64 = 1 << 20;

/// Resident bytes that the allocator took while it was loaded: anonymous memory that is neither a stack nor the end of a file's data, unless
/// that is an allocator's tables.
pub(super) fn heap_at_start(pid: u32) -> Option<u64> {
    let memory = LiveMemory::open(Process::open(Pid(pid)).ok()?).ok()?;
    let mappings = memory.resident_mappings().ok()?;
    let mut file_end = None;
    let mut bytes = 0;
    for one in &mappings {
        let is_file = matches!(one.mapping.backing, Backing::File { .. });
        let follows_file = one.mapping.backing == Backing::Anonymous && file_end == Some(one.mapping.start);
        let is_bss = follows_file && one.mapping.end.0 - one.mapping.start.0 < TABLES_BYTES;
        let is_named = matches!(&one.mapping.backing, Backing::Named(name) if name.starts_with("[stack") || name.starts_with("[v"));
        if !is_file && !is_bss && !is_named {
            bytes += one.resident_bytes;
        }
        file_end = is_file.then_some(one.mapping.end);
    }
    Some(bytes)
}
