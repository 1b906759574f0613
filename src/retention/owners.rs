//! Which blocks hold what: dominators of all blocks, with what they retain and pin, their types, and the roots that reach them first.
//!
//! A single scan of memory that may change meanwhile, so some pointers may be missed. What two owners share is retained by neither.

use std::collections::HashMap;

use serde::Serialize;

use super::describe::{Describer, first_words};
pub use super::holdings::By;
use super::holdings::{Holdings, Sums};
use super::limit;
use super::pinned::pinned_alone;
use super::scans::{Doubts, Image, ScanError};
use super::shares::{self, Share, Shares};
use crate::census::memory::Memory;
use crate::census::{LayoutCache, Level, Options, Pace, Taken, add_blocks, take};
use crate::units::grouped;

/// Most owners and types reported.
const TOLD_MAX: usize = 200;
/// Most steps of a path reported.
const PATH_MAX: usize = 64;

/// What to report.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Only owners of this type.
    pub type_name: Option<String>,
    /// The path from a root to the block at this address.
    pub path: Option<u64>,
    /// All blocks in groups.
    pub with_shares: bool,
    /// Most memory that the scan may take in fragprof; `None` = no limit.
    pub memory_max_bytes: Option<u64>,
}

/// What holds what. Field names are those of `--json`.
#[derive(Debug, Clone, Serialize, schemars::JsonSchema)]
pub struct Owners {
    /// Process id.
    pub pid: u32,
    /// Name of the process.
    pub comm: String,
    /// Usable bytes of the blocks in use.
    pub live_bytes: u64,
    /// Blocks in use.
    pub live_blocks: u64,
    /// Of the bytes, those to which this single scan saw no pointer; `leaks` scans several times.
    pub unreached_bytes: u64,
    /// Pinned bytes of all blocks.
    pub pinned_bytes: u64,
    /// Blocked bytes of all blocks.
    pub blocked_bytes: u64,
    /// The block in which most of the retained bytes come together; `None` if there are none.
    pub main_owner: Option<Owner>,
    /// Blocks that retain most.
    pub owners: Vec<Owner>,
    /// Types by their bytes.
    pub types: Vec<TypeSum>,
    /// Roots by what is reached first from them; empty for interpreters and virtual machines, where everything is reachable from all roots.
    pub roots: Vec<RootSum>,
    /// Why roots are not named; empty if they are.
    pub roots_left_out: String,
    /// The path to the requested block, the root first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<Step>,
    /// All blocks in groups by root, owner and type, if requested.
    #[serde(skip)]
    pub shares: Vec<Share>,
    /// Reasons to doubt.
    pub doubts: Doubts,
    /// Most memory that blocks and pointers took in fragprof.
    pub table_bytes: u64,
    /// Duration in seconds.
    pub duration_s: f64,
}

/// A block and what it retains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Owner {
    /// Its address, in hexadecimal.
    pub address: String,
    /// Its usable bytes.
    pub size_bytes: u64,
    /// The class by its virtual table.
    #[serde(rename = "type")]
    pub type_name: Option<String>,
    /// Its type, or the kind of its contents.
    pub label: String,
    /// The root from which it is reached first.
    pub reached_first_from: String,
    /// Its role in the program, from debug information: `the storage of the_shop.catalog_.bestsellers_ (main in shopd)`.
    pub role: Option<String>,
    /// Whether it is held by several blocks or roots without a common owner.
    pub shared: bool,
    /// Bytes reachable only through it, its own included.
    pub retained_bytes: u64,
    /// Pinned bytes of these blocks.
    pub retained_pinned_bytes: u64,
    /// Blocked bytes of these blocks.
    pub retained_blocked_bytes: u64,
    /// Number of these blocks.
    pub blocks: u64,
    /// Its immediate dominator's address, in hexadecimal; `None` if it has none.
    pub dominator: Option<String>,
}

impl Owner {
    /// A description: `one block of 65,544 B (pointers), reached first from NAME`.
    #[must_use]
    pub fn words(&self) -> String {
        if let Some(role) = &self.role {
            return format!("one block of {} B ({}): {role}", grouped(self.size_bytes), self.label);
        }
        let from =
            if self.reached_first_from.is_empty() { String::new() } else { format!(", reached first from {}", self.reached_first_from) };
        format!("one block of {} B ({}){from}", grouped(self.size_bytes), self.label)
    }
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
    /// Their blocked bytes.
    pub blocked_bytes: u64,
}

/// What is reached first from a root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct RootSum {
    /// The root.
    pub reached_first_from: String,
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
    /// Pinned bytes.
    pub pinned_bytes: u64,
    /// Blocked bytes.
    pub blocked_bytes: u64,
}

/// One step of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Step {
    /// Address of the block or root.
    pub address: String,
    /// Bytes of the block; 0 for the root.
    pub size_bytes: u64,
    /// Its description.
    pub label: String,
}

/// Takes the census that a survey of owners needs.
///
/// # Errors
/// If the process cannot be read, or has ended.
pub fn census(memory: &dyn Memory, (pid, comm): (u32, &str), pace: Pace) -> Result<Taken, ScanError> {
    let mut layouts = LayoutCache::of_malloc();
    let options = Options { level: Level::Full, pace, with_not_malloc: true };
    let mut taken = take(memory, pid, comm, options, &mut layouts)?;
    add_blocks(memory, &mut taken, &mut layouts)?;
    Ok(taken)
}

/// Scans the process behind `memory` once.
///
/// # Errors
/// If it cannot be read, has ended, or has no heap whose blocks are known.
pub fn survey(
    memory: &dyn Memory,
    (pid, comm): (u32, &str),
    pace: Pace,
    by: By,
    wanted: &Wanted,
    registers: Option<&dyn Fn() -> Vec<u64>>,
) -> Result<Owners, ScanError> {
    let began = std::time::Instant::now();
    let image = Image::of(memory)?;
    let taken = census(memory, (pid, comm), pace)?;
    limit::check(&taken, limit::OWNERS_BYTES_A_BLOCK, wanted.memory_max_bytes.unwrap_or(u64::MAX))?;
    let holdings = Holdings::of(memory, pid, &taken, pace, registers)?;
    image.check(memory, pid)?;
    let maps = memory.maps()?;
    let mut describer = Describer::of(memory, &maps, &holdings)?;
    let path = wanted.path.and_then(|addr| holdings.blocks.index.find(addr)).map(|hit| path(&mut describer, hit.block)).unwrap_or_default();
    let firsts = first_words(memory, &holdings);
    let total = holdings.total();
    Ok(Owners {
        pid,
        comm: comm.to_owned(),
        live_bytes: total.bytes,
        live_blocks: total.blocks,
        unreached_bytes: unreached_bytes(&holdings),
        pinned_bytes: total.pinned,
        blocked_bytes: total.blocked,
        main_owner: main_owner(&mut describer, by),
        owners: owners(&mut describer, by, wanted.type_name.as_deref(), &firsts),
        types: types(&mut describer, by, &firsts),
        roots: if holdings.is_managed { Vec::new() } else { root_sums(&mut describer, by) },
        roots_left_out: if holdings.is_managed {
            "a language runtime manages memory of its own, in which everything is reachable from all roots".to_owned()
        } else {
            String::new()
        },
        path,
        shares: if wanted.with_shares { shares_of(memory, &taken, &mut describer, by, &firsts) } else { Vec::new() },
        doubts: holdings.doubts.clone(),
        table_bytes: holdings.table_bytes,
        duration_s: began.elapsed().as_secs_f64(),
    })
}

/// All blocks in groups; ranked by pinned bytes, with what each group pins alone.
fn shares_of(memory: &dyn Memory, taken: &Taken, describer: &mut Describer<'_>, by: By, firsts: &[u64]) -> Vec<Share> {
    let mut shares = Shares::of(describer, by, firsts);
    if by == By::Pinned {
        let blocks = &describer.holdings.blocks;
        let alone = pinned_alone(memory, &taken.heaps, blocks, shares.groups.len(), |block| shares.group_of(block));
        shares.groups.iter_mut().zip(alone).for_each(|(share, bytes)| share.pinned_alone_bytes = bytes);
    }
    shares.groups
}

fn unreached_bytes(holdings: &Holdings) -> u64 {
    let left = (0..holdings.len()).filter(|&block| !holdings.is_reached(block));
    left.map(|block| holdings.alone(block).bytes).fold(0, u64::saturating_add)
}

/// The block that owns most of the ranked bytes, counting the blocks that have no nearer owner.
fn main_owner(describer: &mut Describer<'_>, by: By) -> Option<Owner> {
    let holdings = describer.holdings;
    let nearest = shares::owners(holdings, by);
    let mut sums: HashMap<u32, u64> = HashMap::new();
    for block in 0..holdings.len() {
        if let Some(owner) = nearest.get(block) {
            *sums.entry(owner).or_default() += holdings.alone(block).by(by);
        }
    }
    let (block, _) = sums.into_iter().max_by_key(|&(block, sum)| (sum, std::cmp::Reverse(block)))?;
    Some(told(describer, block, false))
}

fn told(describer: &mut Describer<'_>, block: u32, shared: bool) -> Owner {
    let (type_name, label) = describer.label(block);
    let sum = describer.holdings.with_all(block);
    Owner {
        address: format!("{:#x}", describer.holdings.address(block)),
        size_bytes: describer.holdings.blocks.index.size(block),
        type_name,
        label,
        reached_first_from: describer.root_name(block),
        role: describer.role(block),
        shared,
        retained_bytes: sum.bytes,
        retained_pinned_bytes: sum.pinned,
        retained_blocked_bytes: sum.blocked,
        blocks: sum.blocks,
        dominator: describer.holdings.dominator(block).map(|up| format!("{:#x}", describer.holdings.address(up))),
    }
}

fn owners(describer: &mut Describer<'_>, by: By, type_name: Option<&str>, firsts: &[u64]) -> Vec<Owner> {
    let holdings = describer.holdings;
    let value = |block: u32| holdings.with_all(block).by(by);
    let mut ranked: Vec<u32> = (0..holdings.len()).filter(|&block| holdings.blocks.live.get(block) && value(block) > 0).collect();
    if let Some(wanted) = type_name {
        ranked.retain(|&block| {
            type_of(describer, block, firsts.get(block as usize).copied().unwrap_or(0)).is_some_and(|name| name == wanted)
        });
    }
    ranked.sort_by_key(|&block| (std::cmp::Reverse(value(block)), block));
    ranked.truncate(TOLD_MAX);
    let rooted: std::collections::HashSet<u32> = holdings.roots.iter().map(|root| root.block).collect();
    let is_shared = |block: u32| holdings.is_reached(block) && holdings.dominator(block).is_none() && !rooted.contains(&block);
    ranked.into_iter().map(|block| told(describer, block, is_shared(block))).collect()
}

/// The type of a block with this first word, which is 0 where it is not present: by its virtual table, or by a pointer's.
fn type_of(describer: &mut Describer<'_>, block: u32, word: u64) -> Option<String> {
    let by_first_word = if word == 0 { None } else { describer.contents.type_name(word) };
    by_first_word.or_else(|| describer.holdings.trait_objects.type_of(block).map(str::to_owned))
}

fn types(describer: &mut Describer<'_>, by: By, firsts: &[u64]) -> Vec<TypeSum> {
    let mut sums: HashMap<String, Sums> = HashMap::new();
    for (block, &word) in (0u32..).zip(firsts).filter(|&(block, _)| describer.holdings.blocks.live.get(block)) {
        if let Some(name) = type_of(describer, block, word) {
            sums.entry(name).or_default().add(&describer.holdings.alone(block));
        }
    }
    let mut list: Vec<(String, Sums)> = sums.into_iter().collect();
    list.sort_by(|a, b| b.1.by(by).cmp(&a.1.by(by)).then_with(|| a.0.cmp(&b.0)));
    list.truncate(TOLD_MAX);
    let told = |(type_name, sum): (String, Sums)| TypeSum {
        type_name,
        blocks: sum.blocks,
        bytes: sum.bytes,
        pinned_bytes: sum.pinned,
        blocked_bytes: sum.blocked,
    };
    list.into_iter().map(told).collect()
}

fn root_sums(describer: &mut Describer<'_>, by: By) -> Vec<RootSum> {
    let holdings = describer.holdings;
    // With a block of each, by which the root is named.
    let mut by_root: HashMap<u64, (u32, Sums)> = HashMap::new();
    for block in (0..holdings.len()).filter(|&block| holdings.blocks.live.get(block)) {
        if let Some(slot) = holdings.origin(block) {
            by_root.entry(slot).or_insert((block, Sums::default())).1.add(&holdings.alone(block));
        }
    }
    let mut named: HashMap<String, Sums> = HashMap::new();
    for (block, sum) in by_root.into_values() {
        named.entry(describer.root_name(block)).or_default().add(&sum);
    }
    let mut list: Vec<(String, Sums)> = named.into_iter().collect();
    list.sort_by(|a, b| b.1.by(by).cmp(&a.1.by(by)).then_with(|| a.0.cmp(&b.0)));
    list.truncate(TOLD_MAX);
    let told = |(reached_first_from, sum): (String, Sums)| RootSum {
        reached_first_from,
        blocks: sum.blocks,
        bytes: sum.bytes,
        pinned_bytes: sum.pinned,
        blocked_bytes: sum.blocked,
    };
    list.into_iter().map(told).collect()
}

/// The path by which a block is reached first; the middle of a long one is left out.
fn path(describer: &mut Describer<'_>, block: u32) -> Vec<Step> {
    let holdings = describer.holdings;
    let Some(slot) = holdings.origin(block) else { return Vec::new() };
    let mut steps = vec![Step { address: format!("{slot:#x}"), size_bytes: 0, label: describer.place_name(block) }];
    let way = holdings.reached.path(block);
    let left_out = way.len().saturating_sub(PATH_MAX);
    for (place, &block) in way.iter().enumerate() {
        if left_out > 0 && place == PATH_MAX / 2 {
            steps.push(Step { address: String::new(), size_bytes: 0, label: format!("{left_out} more blocks") });
        }
        if left_out > 0 && (PATH_MAX / 2..PATH_MAX / 2 + left_out).contains(&place) {
            continue;
        }
        let label = describer.label(block).1;
        steps.push(Step { address: format!("{:#x}", holdings.address(block)), size_bytes: holdings.blocks.index.size(block), label });
    }
    steps
}
