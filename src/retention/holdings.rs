//! Retention, from a single scan: all pointers between blocks, their dominators, and what each block retains, pins and blocks.
//!
//! The program may move pointers meanwhile, so some may be missed.

use std::collections::HashMap;
use std::ops::Range;

use super::areas::{Areas, Class};
use super::blocked::blocked;
use super::blocks::{Blocks, Own};
use super::dominators::{Dominators, NONE, dominators};
use super::graph::{BLOCKS_MAX, FirstReached, GraphBuilder, Root};
use super::pass::read_pointers;
use super::pinned::pinned;
use super::reader::Reader;
use super::scans::{Clock, Doubts, ScanError};
use super::trait_objects::TraitObjects;
use crate::census::memory::Memory;
use crate::census::{Pace, Taken, all_own_ranges};

/// Most pointers kept: this many per block on average, but at least the second number.
const POINTERS_A_BLOCK: usize = 8;
const POINTERS_MIN: usize = 1 << 20;

/// The value by which blocks are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Bytes in use
    Live,
    /// Free bytes on pages that they share
    Pinned,
    /// Whole free pages below a heap's highest block, which the allocator would return if it were freed
    Blocked,
}

/// Sums over blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sums {
    /// Blocks in use.
    pub blocks: u64,
    /// Usable bytes of these blocks.
    pub bytes: u64,
    /// Free bytes that they pin.
    pub pinned: u64,
    /// Bytes of free pages that they block.
    pub blocked: u64,
}

impl Sums {
    /// The value by which blocks are ranked.
    #[must_use]
    pub fn by(&self, by: By) -> u64 {
        match by {
            By::Live => self.bytes,
            By::Pinned => self.pinned,
            By::Blocked => self.blocked,
        }
    }

    /// Adds other sums.
    pub fn add(&mut self, other: &Self) {
        self.blocks = self.blocks.saturating_add(other.blocks);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.pinned = self.pinned.saturating_add(other.pinned);
        self.blocked = self.blocked.saturating_add(other.blocked);
    }
}

/// The result of a scan.
#[derive(Debug)]
pub struct Holdings {
    /// The blocks.
    pub blocks: Blocks,
    /// The first slot outside blocks that points to each, by class.
    pub roots: Vec<Root>,
    /// The root from which each is reached first.
    pub reached: FirstReached,
    /// The dominator tree.
    pub tree: Dominators,
    /// Ranges of the allocators' memory.
    pub heap: Vec<Range<u64>>,
    /// Whether a language runtime manages memory of its own, so that everything is reachable from all roots.
    pub is_managed: bool,
    /// Registers of all threads as the kernel saved them; empty if they were not read.
    pub saved: Vec<u64>,
    /// Types of the blocks that Rust's trait objects point to.
    pub trait_objects: TraitObjects,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// Most memory that blocks and pointers took in fragprof.
    pub table_bytes: u64,
    /// CPU time of computing the dominators, in seconds.
    pub dominators_s: f64,
    pinned: Vec<u32>,
    blocked: HashMap<u32, u64>,
    retained: Retained,
    retained_blocked: HashMap<u32, u64>,
}

impl Holdings {
    /// Scans the heaps of a census of level full, with blocks. `registers` reads those of all threads.
    ///
    /// # Errors
    /// If the process cannot be read, has ended, or has no heap whose blocks are known.
    pub fn of(
        memory: &dyn Memory,
        pid: u32,
        taken: &Taken,
        pace: Pace,
        registers: Option<&dyn Fn() -> Vec<u64>>,
    ) -> Result<Self, ScanError> {
        let blocks = Blocks::of(&taken.heaps)?;
        if blocks.index.is_empty() {
            return Err(ScanError::no_blocks(pid, &taken.census));
        }
        let count = blocks.index.len() as u64;
        if count > BLOCKS_MAX {
            return Err(ScanError::TooMany { blocks: count, limit: BLOCKS_MAX });
        }
        let mut own = Own::of(memory, &taken.heaps);
        let heap = all_own_ranges(&taken.heaps);
        let mut areas = Areas::of(memory, &heap)?;
        areas.add_unknown(&own.unknown);
        let saved: Vec<u64> = registers.iter().flat_map(|read| read()).collect();
        areas.registers.extend(&saved);
        own.read_caches(memory, &areas, pace);
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
        let trait_objects = memory.maps().map(|maps| TraitObjects::find(memory, &maps, &areas, &blocks.index, pace)).unwrap_or_default();
        let mut reached = FirstReached::of(&graph, &roots, &groups);
        let chunk_bytes: usize = taken.heaps.iter().map(|heap| heap.chunks.table_bytes()).sum();
        let lasting_bytes = chunk_bytes + blocks.bytes() + roots.capacity() * size_of::<Root>() + trait_objects.bytes();
        let searching_bytes = reached.bytes();
        let mut clock = Clock::start();
        let tree = dominators(graph, &roots.iter().map(|root| root.block).collect::<Vec<_>>());
        let dominators_s = clock.lap();
        reached.find_origins(&roots);
        let pinned = pinned(memory, &taken.heaps, &blocks);
        let blocked = blocked(memory, &taken.heaps, &blocks);
        let retained = Retained::sum(&tree, &blocks, &pinned);
        let summing_bytes = reached.bytes() + tree.bytes() + pinned.capacity() * 4 + retained.bytes();
        let table_bytes = lasting_bytes + (searching_bytes + tree.peak_bytes).max(summing_bytes);
        let runtimes = &taken.census.runtimes;
        Ok(Self {
            retained,
            retained_blocked: retained_blocked(&tree, &blocked),
            is_managed: runtimes.java.is_some() || !runtimes.memory.is_empty(),
            table_bytes: table_bytes as u64,
            blocks,
            roots,
            reached,
            tree,
            heap,
            dominators_s,
            trait_objects,
            saved,
            doubts,
            pinned,
            blocked,
        })
    }

    /// Number of blocks, including free chunks that may have been allocated since.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.tree.of.len() as u32
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tree.of.is_empty()
    }

    /// A block's address; 0 if there is no such block.
    #[must_use]
    pub fn address(&self, block: u32) -> u64 {
        self.blocks.index.address(block).unwrap_or(0)
    }

    /// The sums of a block by itself.
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

    /// The sums of everything that a block dominates, itself included.
    #[must_use]
    pub fn with_all(&self, block: u32) -> Sums {
        let (bytes, pinned, blocks) = self.retained.of(block);
        Sums { blocks, bytes, pinned, blocked: self.retained_blocked.get(&block).copied().unwrap_or(0) }
    }

    /// The immediate dominator of a block; `None` if it has none.
    #[must_use]
    pub fn dominator(&self, block: u32) -> Option<u32> {
        self.tree.of.get(block as usize).copied().filter(|&up| up < self.len())
    }

    /// Whether the scan reached a block.
    #[must_use]
    pub fn is_reached(&self, block: u32) -> bool {
        self.tree.of.get(block as usize).is_some_and(|&up| up != NONE)
    }

    /// The address of the root from which a block is reached first; 0 for a register.
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

/// By block: the sums of what it dominates, itself included.
#[derive(Debug, Default)]
struct Retained {
    bytes: Column,
    pinned: Column,
    blocks: Vec<u32>,
}

impl Retained {
    fn sum(tree: &Dominators, blocks: &Blocks, pinned: &[u32]) -> Self {
        let count = blocks.index.len();
        let mut sums = Self { bytes: Column::of(count), pinned: Column::of(count), blocks: vec![0; count] };
        for block in (0..count as u32).filter(|&block| blocks.live.get(block)) {
            sums.add(block, (blocks.index.size(block), pinned.get(block as usize).copied().map_or(0, u64::from), 1));
        }
        // Backwards, so that a block's sum is complete when it is added to its dominator's.
        for &block in tree.order.iter().skip(1).rev() {
            let up = tree.of.get(block as usize).copied().unwrap_or(NONE);
            sums.add(up, sums.of(block));
        }
        sums
    }

    /// Bytes, pinned bytes and number.
    fn of(&self, block: u32) -> (u64, u64, u64) {
        (self.bytes.get(block), self.pinned.get(block), self.blocks.get(block as usize).copied().map_or(0, u64::from))
    }

    fn add(&mut self, block: u32, (bytes, pinned, blocks): (u64, u64, u64)) {
        self.bytes.add(block, bytes);
        self.pinned.add(block, pinned);
        if let Some(own) = self.blocks.get_mut(block as usize) {
            *own = own.saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX));
        }
    }

    fn bytes(&self) -> usize {
        self.bytes.low.capacity() * 2 * 5 + self.blocks.capacity() * 4
    }
}

/// Numbers below 2^40, saturating, in five bytes each: a terabyte is more than a heap that can be indexed has.
#[derive(Debug, Default)]
struct Column {
    low: Vec<u32>,
    high: Vec<u8>,
}

impl Column {
    fn of(count: usize) -> Self {
        Self { low: vec![0; count], high: vec![0; count] }
    }

    fn get(&self, place: u32) -> u64 {
        let high = self.high.get(place as usize).copied().map_or(0, u64::from);
        self.low.get(place as usize).map_or(0, |&low| u64::from(low) | high << 32)
    }

    fn add(&mut self, place: u32, more: u64) {
        let sum = self.get(place).saturating_add(more).min((1 << 40) - 1);
        if let (Some(low), Some(high)) = (self.low.get_mut(place as usize), self.high.get_mut(place as usize)) {
            (*low, *high) = (sum as u32, (sum >> 32) as u8);
        }
    }
}

/// The same for blocked bytes, which few blocks have.
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
