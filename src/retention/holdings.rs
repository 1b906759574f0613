//! What holds what, from one look: all pointers between blocks, their dominators, and what each block retains, pins and blocks.
//!
//! The program may move pointers meanwhile: a picture, not a proof.

use std::collections::HashMap;
use std::ops::Range;

use super::areas::{Areas, Class};
use super::blocked::blocked;
use super::blocks::{Blocks, Own};
use super::dominators::{Dominators, NONE, dominators};
use super::graph::{FirstReached, Graph, GraphBuilder, Root};
use super::looks::{Clock, Doubts, LooksError};
use super::pass::read_pointers;
use super::pinned::pinned;
use super::reader::Reader;
use crate::census::memory::Memory;
use crate::census::{Pace, Taken, all_own_ranges};

/// Pointers kept for each block on the average, and in any case.
const POINTERS_A_BLOCK: usize = 8;
const POINTERS_MIN: usize = 1 << 20;

/// What blocks are ranked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Bytes in use
    Live,
    /// Free bytes that they keep from going back
    Pinned,
    /// Whole free pages under a heap's highest block, which the allocator would give back if that went
    Blocked,
}

/// Sums over blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Blocks in use.
    pub blocks: u64,
    /// Bytes that the program may use in them.
    pub bytes: u64,
    /// Free bytes that they pin.
    pub pinned: u64,
    /// Bytes of free pages that they block.
    pub blocked: u64,
}

impl Sums {
    /// What blocks are ranked by.
    #[must_use]
    pub fn by(&self, by: By) -> u64 {
        match by {
            By::Live => self.bytes,
            By::Pinned => self.pinned,
            By::Blocked => self.blocked,
        }
    }

    /// Adds others.
    pub fn add(&mut self, other: &Self) {
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.pinned = self.pinned.saturating_add(other.pinned);
        self.blocked = self.blocked.saturating_add(other.blocked);
    }
}

/// What one look found.
#[derive(Debug)]
pub struct Holdings {
    /// The blocks.
    pub blocks: Blocks,
    /// Pointers between them.
    pub graph: Graph,
    /// The first place outside of blocks that points to each, by class.
    pub roots: Vec<Root>,
    /// From where each is reached first.
    pub reached: FirstReached,
    /// The dominator tree.
    pub tree: Dominators,
    /// Ranges of the allocators' memory.
    pub heap: Vec<Range<u64>>,
    /// Whether a language runtime manages memory of its own, whose roots are all alike.
    pub is_managed: bool,
    /// Registers of all threads as the kernel saved them; empty if they were not read.
    pub saved: Vec<u64>,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// Most memory of this program's that blocks and pointers took.
    pub table_bytes: u64,
    /// Processor time of the dominators, seconds.
    pub dominators_s: f64,
    pinned: Vec<u32>,
    blocked: HashMap<u32, u64>,
    /// By block: bytes, pinned bytes and number of what it dominates, itself included.
    retained: Vec<(u64, u64, u32)>,
    retained_blocked: HashMap<u32, u64>,
}

impl Holdings {
    /// Looks at the heaps of a census of level full, with blocks. `registers` reads those of all threads.
    ///
    /// # Errors
    /// If the process cannot be read, went away, or has no heap whose blocks are known.
    pub fn of(
        memory: &dyn Memory,
        pid: u32,
        taken: &Taken,
        pace: Pace,
        registers: Option<&dyn Fn() -> Vec<u64>>,
    ) -> Result<Self, LooksError> {
        let blocks = Blocks::of(&taken.heaps)?;
        if blocks.index.is_empty() {
            return Err(LooksError::no_blocks(pid, &taken.census));
        }
        let mut own = Own::of(memory, &taken.heaps);
        let heap = all_own_ranges(&taken.heaps);
        let mut areas = Areas::of(memory, &heap)?;
        areas.add_unknown(&own.unknown);
        let saved: Vec<u64> = registers.iter().flat_map(|read| read()).collect();
        areas.registers.extend(&saved);
        own.look_at_caches(memory, &areas, pace);
        let mut reader = Reader::new(memory, pace);
        let mut builder = GraphBuilder::of(blocks.index.len(), (blocks.index.len() * POINTERS_A_BLOCK).max(POINTERS_MIN));
        let mut groups: Vec<Range<usize>> = Vec::new();
        let mut last_class = None;
        read_pointers(&mut reader, &areas, &blocks, &own, &mut builder, |builder, area| {
            let class: Option<Class> = areas.roots.get(area).map(|area| area.class);
            let end = builder.roots.len();
            match groups.last_mut() {
                Some(group) if class == last_class => group.end = end,
                _ => groups.push(groups.last().map_or(0, |group| group.end)..end),
            }
            last_class = class;
        });
        let mut doubts =
            Doubts { unknown_bytes: taken.census.walk.unknown_bytes, is_census_usable: taken.census.walk.usable, ..Doubts::default() };
        doubts.add(&reader, &areas);
        doubts.dropped_pointers = builder.pointers_dropped;
        doubts.are_registers_known = registers.is_some() || memory.process().is_none();
        let (graph, roots) = builder.finish();
        groups.push(groups.last().map_or(0, |group| group.end)..roots.len());
        let pinned = pinned(memory, &taken.heaps, &blocks);
        let blocked = blocked(memory, &taken.heaps, &blocks);
        let table_bytes = blocks.bytes() + 2 * graph.bytes() + blocks.index.len() * (28 + 4);
        let mut clock = Clock::start();
        let tree = dominators(&graph, &roots.iter().map(|root| root.block).collect::<Vec<_>>());
        let dominators_s = clock.lap();
        let reached = FirstReached::of(&graph, &roots, &groups);
        let runtimes = &taken.census.runtimes;
        Ok(Self {
            retained: retained(&tree, &blocks, &pinned),
            retained_blocked: retained_blocked(&tree, &blocked),
            is_managed: runtimes.java.is_some() || !runtimes.memory.is_empty(),
            table_bytes: table_bytes as u64,
            blocks,
            graph,
            roots,
            reached,
            tree,
            heap,
            dominators_s,
            saved,
            doubts,
            pinned,
            blocked,
        })
    }

    /// Number of blocks, free chunks that may have been handed out since among them.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.graph.len() as u32
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.graph.is_empty()
    }

    /// A block's address; 0 if there is no such block.
    #[must_use]
    pub fn address(&self, block: u32) -> u64 {
        self.blocks.index.address(block).unwrap_or(0)
    }

    /// What a block is by itself.
    #[must_use]
    pub fn alone(&self, block: u32) -> Sums {
        let is_live = self.blocks.live.get(block);
        Sums {
            blocks: u64::from(is_live),
            bytes: if is_live { self.blocks.index.size(block) } else { 0 },
            pinned: self.pinned.get(block as usize).map_or(0, |&bytes| u64::from(bytes)),
            blocked: self.blocked.get(&block).copied().unwrap_or(0),
        }
    }

    /// What goes with a block.
    #[must_use]
    pub fn with_all(&self, block: u32) -> Sums {
        let (bytes, pinned, blocks) = self.retained.get(block as usize).copied().unwrap_or_default();
        Sums { blocks: u64::from(blocks), bytes, pinned, blocked: self.retained_blocked.get(&block).copied().unwrap_or(0) }
    }

    /// The block that dominates a block next; `None` if none does.
    #[must_use]
    pub fn dominator(&self, block: u32) -> Option<u32> {
        self.tree.of.get(block as usize).copied().filter(|&up| up < self.len())
    }

    /// Whether the look saw a way to a block.
    #[must_use]
    pub fn is_reached(&self, block: u32) -> bool {
        self.tree.of.get(block as usize).is_some_and(|&up| up != NONE)
    }

    /// The place from which a block is reached first; 0 for a register.
    #[must_use]
    pub fn origin(&self, block: u32) -> Option<u64> {
        self.reached.origin(block).and_then(|origin| self.roots.get(origin)).map(|root| root.slot)
    }

    /// All blocks in use.
    #[must_use]
    pub fn total(&self) -> Sums {
        Sums {
            blocks: self.blocks.live_blocks,
            bytes: self.blocks.live_bytes,
            pinned: self.pinned.iter().map(|&bytes| u64::from(bytes)).sum(),
            blocked: self.blocked.values().sum(),
        }
    }
}

/// What each block dominates, itself included.
fn retained(tree: &Dominators, blocks: &Blocks, pinned: &[u32]) -> Vec<(u64, u64, u32)> {
    let own = |block: u32| {
        let is_live = blocks.live.get(block);
        let bytes = if is_live { blocks.index.size(block) } else { 0 };
        let pinned = pinned.get(block as usize).copied().unwrap_or(0);
        (bytes, u64::from(pinned), u32::from(is_live))
    };
    let mut sums: Vec<(u64, u64, u32)> = (0..blocks.index.len() as u32).map(own).collect();
    // Backwards, so that a block's sum is whole when it is added to its dominator's.
    for &block in tree.order.iter().skip(1).rev() {
        let up = tree.of.get(block as usize).copied().unwrap_or(NONE);
        let Some(sum) = sums.get(block as usize).copied() else { continue };
        if let Some(above) = sums.get_mut(up as usize) {
            *above = (above.0.saturating_add(sum.0), above.1.saturating_add(sum.1), above.2.saturating_add(sum.2));
        }
    }
    sums
}

/// The same of blocked bytes, which few blocks have.
fn retained_blocked(tree: &Dominators, blocked: &HashMap<u32, u64>) -> HashMap<u32, u64> {
    let mut sums: HashMap<u32, u64> = HashMap::new();
    for (&block, &bytes) in blocked {
        let mut at = block;
        while (at as usize) < tree.of.len() {
            *sums.entry(at).or_default() += bytes;
            at = tree.of.get(at as usize).copied().unwrap_or(NONE);
        }
    }
    sums
}
