//! Which blocks hold what: dominators over all blocks, with what they retain and pin, their types, and from where they are reached first.
//!
//! One pass over memory that may move meanwhile: a picture, not a proof. What two owners share is retained by neither.

use std::collections::HashMap;
use std::ops::Range;

use serde::Serialize;

use super::areas::{Areas, Class};
use super::blocks::{Blocks, Own};
use super::contents::Contents;
use super::dominators::{Dominators, NONE, dominators};
use super::graph::{FirstReached, Graph, GraphBuilder, Root};
use super::looks::{Doubts, LooksError};
use super::names::Names;
use super::pass::read_pointers;
use super::pinned::pinned;
use super::reader::Reader;
use crate::census::memory::{Memory, Piece, word_at};
use crate::census::page_cache::PageCache;
use crate::census::{Level, Options, Pace, Places, add_blocks, all_own_ranges, take};

/// Pointers kept for each block on the average, and in any case.
const POINTERS_A_BLOCK: usize = 8;
const POINTERS_MIN: usize = 1 << 20;
/// Owners and types told.
const TOLD_MAX: usize = 200;
/// Steps of a path that are told.
const PATH_MAX: usize = 64;
/// Words read with one call.
const BATCH: usize = 1024;

/// What the blocks are ranked by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// Bytes in use
    Live,
    /// Free bytes that they keep from going back
    Pinned,
}

/// What to tell.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Only owners of this type.
    pub type_name: Option<String>,
    /// The way from a root to the block at this address.
    pub path: Option<u64>,
}

/// Who holds what. Field names are those of `--json`.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Owners {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub comm: String,
    /// Bytes in use that the program may use.
    pub live_bytes: u64,
    /// Blocks in use.
    pub live_blocks: u64,
    /// Of the bytes, those to which this one look saw no pointer; `leaks` looks again.
    pub unreached_bytes: u64,
    /// Pinned bytes of all blocks.
    pub pinned_bytes: u64,
    /// Blocks that retain most.
    pub owners: Vec<Owner>,
    /// Types by their bytes.
    pub types: Vec<TypeSum>,
    /// Places by what is reached first from them; empty of interpreters and virtual machines, whose roots are all alike.
    pub roots: Vec<RootSum>,
    /// Why places are not named; empty where they are.
    pub roots_left_out: String,
    /// The way to the block that was asked for, the root first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<Step>,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// Most memory of this program's that blocks and pointers took.
    pub table_bytes: u64,
    /// Seconds that it took.
    pub duration_s: f64,
}

/// A block and what hangs on it alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Owner {
    /// Its address, in hexadecimal.
    pub address: String,
    /// Bytes that the program may use in it.
    pub size_bytes: u64,
    /// The class by its virtual table.
    #[serde(rename = "type")]
    pub type_name: Option<String>,
    /// What it is: its type, or what stands in it.
    pub label: String,
    /// The place from which it is reached first.
    pub reached_first_from: String,
    /// Whether it is held by several blocks or places that have no owner in common.
    pub shared: bool,
    /// Bytes that nothing would lead to without it, its own included.
    pub retained_bytes: u64,
    /// Pinned bytes of these blocks.
    pub retained_pinned_bytes: u64,
    /// Blocks of these bytes.
    pub blocks: u64,
    /// The block that dominates it, in hexadecimal; `None` if none does.
    pub dominator: Option<String>,
}

/// All blocks of a type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct TypeSum {
    /// The class.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Blocks in use.
    pub blocks: u64,
    /// Their bytes, without what they hold.
    pub bytes: u64,
    /// Their pinned bytes.
    pub pinned_bytes: u64,
}

/// What is reached first from a place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct RootSum {
    /// The place.
    pub reached_first_from: String,
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
    /// Pinned bytes.
    pub pinned_bytes: u64,
}

/// One step of a way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Step {
    /// Address of the block; of the root that of the place.
    pub address: String,
    /// Bytes of the block; 0 of the root.
    pub size_bytes: u64,
    /// What it is.
    pub label: String,
}

/// Sums over what a block dominates.
#[derive(Debug, Clone, Copy, Default)]
struct Retained {
    bytes: u64,
    pinned: u64,
    blocks: u64,
}

/// Looks at the process behind `memory` once.
///
/// # Errors
/// If it cannot be read, went away, or has no heap whose blocks are known.
pub fn survey(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    pace: Pace,
    by: By,
    wanted: &Wanted,
    registers: Option<&dyn Fn() -> Vec<u64>>,
) -> Result<Owners, LooksError> {
    let began = std::time::Instant::now();
    let mut places = Places::default();
    let options = Options { level: Level::Full, pace, with_not_malloc: true };
    let mut taken = take(memory, pid, comm, options, &mut places)?;
    add_blocks(memory, &mut taken, &mut places)?;
    let blocks = Blocks::of(&taken.heaps)?;
    if blocks.index.is_empty() {
        return Err(LooksError::no_blocks(pid, &taken.census));
    }
    let mut own = Own::of(memory, &taken.heaps);
    let heap = all_own_ranges(&taken.heaps);
    let mut areas = Areas::of(memory, &heap)?;
    areas.add_unknown(&own.unknown);
    areas.registers.extend(registers.iter().flat_map(|read| read()));
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
    let table_bytes = blocks.bytes() + 2 * graph.bytes() + blocks.index.len() * (28 + 4);
    let tree = dominators(&graph, &roots.iter().map(|root| root.block).collect::<Vec<_>>());
    let reached = FirstReached::of(&graph, &roots, &groups);
    let maps = memory.maps()?;
    let stacks = memory.threads().into_iter().filter_map(|thread| Some((thread.stack_pointer?, thread.comm))).collect();
    let runtimes = &taken.census.runtimes;
    let is_managed = runtimes.java.is_some() || !runtimes.memory.is_empty();
    let mut teller = Teller {
        blocks: &blocks,
        graph: &graph,
        roots: &roots,
        reached: &reached,
        tree: &tree,
        pinned: &pinned,
        retained: retained(&tree, &blocks, &pinned),
        contents: Contents::of(memory, &maps, &heap),
        names: Names::of(memory.process(), &maps, stacks),
        names_roots: !is_managed,
    };
    let path = wanted.path.and_then(|addr| blocks.index.find(addr)).map(|hit| teller.path(hit.block)).unwrap_or_default();
    let firsts = first_words(memory, &blocks);
    Ok(Owners {
        pid,
        comm: comm.to_owned(),
        live_bytes: blocks.live_bytes,
        live_blocks: blocks.live_blocks,
        unreached_bytes: teller.unreached_bytes(),
        pinned_bytes: pinned.iter().map(|&bytes| u64::from(bytes)).sum(),
        owners: teller.owners(by, wanted.type_name.as_deref(), &firsts),
        types: teller.types(by, &firsts),
        roots: if is_managed { Vec::new() } else { teller.root_sums(by) },
        roots_left_out: if is_managed {
            "a language runtime manages memory of its own, whose roots are all alike".to_owned()
        } else {
            String::new()
        },
        path,
        doubts,
        table_bytes: table_bytes as u64,
        duration_s: began.elapsed().as_secs_f64(),
    })
}

/// What each block dominates, itself included.
fn retained(tree: &Dominators, blocks: &Blocks, pinned: &[u32]) -> Vec<Retained> {
    let own = |block: u32| {
        let is_live = blocks.live.get(block);
        let bytes = if is_live { blocks.index.size(block) } else { 0 };
        let pinned = pinned.get(block as usize).copied().unwrap_or(0);
        Retained { bytes, pinned: u64::from(pinned), blocks: u64::from(is_live) }
    };
    let mut sums: Vec<Retained> = (0..blocks.index.len() as u32).map(own).collect();
    // Backwards, so that a block's sum is whole when it is added to its dominator's.
    for &block in tree.order.iter().skip(1).rev() {
        let up = tree.of.get(block as usize).copied().unwrap_or(NONE);
        let Some(sum) = sums.get(block as usize).copied() else { continue };
        if let Some(above) = sums.get_mut(up as usize) {
            above.bytes = above.bytes.saturating_add(sum.bytes);
            above.pinned = above.pinned.saturating_add(sum.pinned);
            above.blocks += sum.blocks;
        }
    }
    sums
}

/// The first word of every block in use; 0 where it is not present.
fn first_words(memory: &dyn Memory, blocks: &Blocks) -> Vec<u64> {
    let mut words = vec![0u64; blocks.index.len()];
    let mut pages = PageCache::new(memory);
    let mut numbers: Vec<u32> = Vec::with_capacity(BATCH);
    let mut pieces: Vec<Piece> = Vec::with_capacity(BATCH);
    let mut buffer = vec![0u8; 8 * BATCH];
    let mut read = |numbers: &mut Vec<u32>, pieces: &mut Vec<Piece>| {
        let got = memory.read_pieces(pieces, &mut buffer);
        for (place, &number) in numbers.iter().enumerate().take(got / 8) {
            if let Some(word) = words.get_mut(number as usize) {
                *word = word_at(&buffer, 8 * place);
            }
        }
        numbers.clear();
        pieces.clear();
    };
    for (number, addr, bytes) in blocks.index.iter().filter(|&(number, _, bytes)| bytes >= 8 && blocks.live.get(number)) {
        if bytes >= 8 && pages.runs_for(addr..addr + 8).present_from(addr) >= addr + 8 {
            numbers.push(number);
            pieces.push(Piece { addr, bytes: 8 });
            if pieces.len() == BATCH {
                read(&mut numbers, &mut pieces);
            }
        }
    }
    read(&mut numbers, &mut pieces);
    words
}

/// Puts numbers into words.
struct Teller<'a> {
    blocks: &'a Blocks,
    graph: &'a Graph,
    roots: &'a [Root],
    reached: &'a FirstReached,
    tree: &'a Dominators,
    pinned: &'a [u32],
    retained: Vec<Retained>,
    contents: Contents<'a>,
    names: Names<'a>,
    names_roots: bool,
}

impl Teller<'_> {
    fn sum(&self, block: u32) -> Retained {
        self.retained.get(block as usize).copied().unwrap_or_default()
    }

    fn address(&self, block: u32) -> u64 {
        self.blocks.index.address(block).unwrap_or(0)
    }

    fn label(&mut self, block: u32) -> (Option<String>, String) {
        let first = self.contents.first_bytes(self.address(block), self.blocks.index.size(block));
        let kind = self.contents.kind(&first);
        let label = match (&kind.type_name, &kind.first_word) {
            (Some(name), _) => name.clone(),
            (None, Some(place)) => format!("begins with a pointer to {place}"),
            (None, None) => kind.content.to_string(),
        };
        (kind.type_name, label)
    }

    fn root_name(&mut self, block: u32) -> String {
        let slot = self.reached.origin(block).and_then(|origin| self.roots.get(origin)).map(|root| root.slot);
        match slot {
            Some(slot) if self.names_roots => self.names.of_place(slot),
            Some(_) => String::new(),
            None => "nowhere".to_owned(),
        }
    }

    fn unreached_bytes(&self) -> u64 {
        let is_left = |block: &u32| self.blocks.live.get(*block) && self.tree.of.get(*block as usize) == Some(&NONE);
        (0..self.graph.len() as u32).filter(is_left).map(|block| self.blocks.index.size(block)).fold(0, u64::saturating_add)
    }

    fn owners(&mut self, by: By, type_name: Option<&str>, firsts: &[u64]) -> Vec<Owner> {
        let value = |sum: Retained| if by == By::Live { sum.bytes } else { sum.pinned };
        let mut ranked: Vec<u32> =
            (0..self.graph.len() as u32).filter(|&block| self.blocks.live.get(block) && value(self.sum(block)) > 0).collect();
        if let Some(wanted) = type_name {
            ranked.retain(|&block| {
                let word = firsts.get(block as usize).copied().unwrap_or(0);
                word != 0 && self.contents.type_name(word).is_some_and(|name| name == wanted)
            });
        }
        ranked.sort_by_key(|&block| (std::cmp::Reverse(value(self.sum(block))), block));
        ranked.truncate(TOLD_MAX);
        let rooted: std::collections::HashSet<u32> = self.roots.iter().map(|root| root.block).collect();
        let root = self.graph.len() as u32;
        let mut told = Vec::new();
        for block in ranked {
            let (type_name, label) = self.label(block);
            let up = self.tree.of.get(block as usize).copied().unwrap_or(NONE);
            let sum = self.sum(block);
            told.push(Owner {
                address: format!("{:#x}", self.address(block)),
                size_bytes: self.blocks.index.size(block),
                type_name,
                label,
                reached_first_from: self.root_name(block),
                shared: up == root && !rooted.contains(&block),
                retained_bytes: sum.bytes,
                retained_pinned_bytes: sum.pinned,
                blocks: sum.blocks,
                dominator: (up < root).then(|| format!("{:#x}", self.address(up))),
            });
        }
        told
    }

    fn types(&mut self, by: By, firsts: &[u64]) -> Vec<TypeSum> {
        let mut sums: HashMap<String, TypeSum> = HashMap::new();
        for (block, &word) in (0u32..).zip(firsts).filter(|(_, word)| **word != 0) {
            let Some(name) = self.contents.type_name(word) else { continue };
            let sum = sums.entry(name).or_insert_with_key(|name| TypeSum { type_name: name.clone(), blocks: 0, bytes: 0, pinned_bytes: 0 });
            sum.blocks += 1;
            sum.bytes += self.blocks.index.size(block);
            sum.pinned_bytes += u64::from(self.pinned.get(block as usize).copied().unwrap_or(0));
        }
        let mut list: Vec<TypeSum> = sums.into_values().collect();
        let value = |sum: &TypeSum| if by == By::Live { sum.bytes } else { sum.pinned_bytes };
        list.sort_by(|a, b| value(b).cmp(&value(a)).then_with(|| a.type_name.cmp(&b.type_name)));
        list.truncate(TOLD_MAX);
        list
    }

    fn root_sums(&mut self, by: By) -> Vec<RootSum> {
        let mut by_root: HashMap<usize, Retained> = HashMap::new();
        for block in (0..self.graph.len() as u32).filter(|&block| self.blocks.live.get(block)) {
            let Some(origin) = self.reached.origin(block) else { continue };
            let sum = by_root.entry(origin).or_default();
            sum.blocks += 1;
            sum.bytes += self.blocks.index.size(block);
            sum.pinned += u64::from(self.pinned.get(block as usize).copied().unwrap_or(0));
        }
        let mut named: HashMap<String, RootSum> = HashMap::new();
        for (origin, sum) in by_root {
            let name = self.roots.get(origin).map_or_else(String::new, |root| self.names.of_place(root.slot));
            let all = named.entry(name).or_insert_with_key(|name| RootSum {
                reached_first_from: name.clone(),
                blocks: 0,
                bytes: 0,
                pinned_bytes: 0,
            });
            all.blocks += sum.blocks;
            all.bytes += sum.bytes;
            all.pinned_bytes += sum.pinned;
        }
        let mut list: Vec<RootSum> = named.into_values().collect();
        let value = |sum: &RootSum| if by == By::Live { sum.bytes } else { sum.pinned_bytes };
        list.sort_by(|a, b| value(b).cmp(&value(a)).then_with(|| a.reached_first_from.cmp(&b.reached_first_from)));
        list.truncate(TOLD_MAX);
        list
    }

    /// The way by which a block is reached first; of a long one its ends.
    fn path(&mut self, block: u32) -> Vec<Step> {
        let Some(root) = self.reached.origin(block).and_then(|origin| self.roots.get(origin)).copied() else { return Vec::new() };
        let name = self.names.of_place(root.slot);
        let mut steps = vec![Step { address: format!("{:#x}", root.slot), size_bytes: 0, label: name }];
        let way = self.reached.path(block);
        let left_out = way.len().saturating_sub(PATH_MAX);
        for (place, &block) in way.iter().enumerate() {
            if left_out > 0 && place == PATH_MAX / 2 {
                steps.push(Step { address: String::new(), size_bytes: 0, label: format!("{left_out} more blocks") });
            }
            if left_out > 0 && (PATH_MAX / 2..PATH_MAX / 2 + left_out).contains(&place) {
                continue;
            }
            let label = self.label(block).1;
            steps.push(Step { address: format!("{:#x}", self.address(block)), size_bytes: self.blocks.index.size(block), label });
        }
        steps
    }
}
