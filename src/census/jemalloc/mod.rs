//! jemalloc 5.2 and 5.3, shared or static, with or without a symbol prefix: found by its page map.
//!
//! `arena_emap_global` (5.3) or `extents_rtree` (5.2) is a radix tree from 4 KiB page to extent: `szind << 48 | record | state << 2 | head <<
//! 1 | slab`, or in builds for addresses of 57 bits the record and, in a second word, `szind << 5 | state << 2 | head << 1 | slab`. A record
//! (`edata_t`, `extent_t`) begins with e_bits, e_addr and e_size_esn; a slab's has a bitmap of its regions at +64, 1 = free. What thread
//! caches hold counts as live, as in jemalloc's own statistics.

pub mod metadata;
pub mod quick;
pub mod record;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use self::metadata::Block;
use self::quick::{Place, Quick};
use self::record::{ACTIVE, BITS, Bits, CLASSES, DIRTY, Extent, LOW_MASK, RECORD_BYTES, RETAINED};
use super::account::{ArenaAccount, HeapAccount, Level, Sums};
use super::chunks::{ChunkState, ChunkTable};
use super::glibc::HeapWalk;
use super::memory::{Memory, MemoryError, is_user_address, word_at};
use super::objects::{Objects, joined, range_of, unbacked_ranges};
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::radix::{self, Entry, Found, Roots, Shape};
use crate::heap::occupancy::{Holder, OccupancyBuilder};
use crate::heap::residency::PAGE_BYTES;
use crate::target::Maps;

/// The page map's forms: addresses of 48 bits (`RTREE_HEIGHT` 2), and of 57 (3), which a build has that was made on a machine with five
/// levels of page tables.
const SHAPES: [Shape; 2] = [
    Shape { root_words: 1 << 18, node_bits: 0, leaf_bits: 18, entry_words: 1, page_bits: 12, alignment: 64, filled_max: 2048 },
    Shape { root_words: 1 << 15, node_bits: 15, leaf_bits: 15, entry_words: 2, page_bits: 12, alignment: 64, filled_max: 16 },
];
/// Bits of a leaf's word that hold the record's address: records lie on cache lines.
const POINTER_MASK: u64 = ((1 << 48) - 1) & !63;
/// Records kept at most: 16 bytes each while they are collected.
const RECORDS_MAX: usize = 1 << 24;
/// The number that jemalloc gives to what belongs to no arena, its own memory.
const NO_ARENA: u32 = 4095;

/// Where each shape of page map was found.
#[derive(Debug, Default)]
pub struct Places([Roots; SHAPES.len()]);

/// A leaf's entry in the form of one word a page, whatever the build's.
fn one_word(entry: Entry, shape: Shape) -> u64 {
    if shape.entry_words == 1 {
        return entry.first;
    }
    (entry.last >> 5 & 255) << 48 | entry.first & POINTER_MASK | entry.last & 31
}

/// Whether an entry's record covers the address and claims the size class that the entry repeats, in one of the releases' forms.
fn owns(memory: &dyn Memory, word: u64, addr: u64) -> bool {
    let record = word & POINTER_MASK;
    let Some(bytes) = Some(record).filter(|&record| is_user_address(record)).and_then(|record| memory.bytes(record, 24)) else {
        return false;
    };
    let (start, size) = (word_at(&bytes, 8) & !LOW_MASK, word_at(&bytes, 16) & !LOW_MASK);
    let covers = size > 0 && size < 1 << 40 && start <= addr && addr - start < size;
    // An extent that is not in use may still have its former class in the page map.
    covers && BITS.iter().any(|bits| bits.size_class_of(&bytes) == CLASSES || bits.size_class_of(&bytes) == word >> 48)
}

/// Takes jemalloc's census. `None` if no page map is in use.
///
/// # Errors
/// If the process went away or the right to read is missing.
pub fn take(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    places: &mut Places,
    level: Level,
) -> Result<Option<HeapWalk>, MemoryError> {
    let mut places = SHAPES.iter().zip(&mut places.0);
    let found = places.find_map(|(&shape, roots)| {
        let owns = |entry, addr| owns(memory, one_word(entry, shape), addr);
        Some((shape, radix::find(memory, maps, objects, shape, roots, owns)?))
    });
    let Some((shape, found)) = found else { return Ok(None) };
    let mapped = unbacked_ranges(maps);
    let data = objects.iter().find(|one| one.object() == &found.object).map(|one| one.data()).unwrap_or_default();
    let walk = match level {
        Level::Full => full(memory, &found, shape, &mapped, &data),
        Level::Top | Level::Sampled => quick(memory, &found, shape, &mapped, &data, level),
    };
    // What leads to no extent is no page map.
    Ok(Some(walk).filter(|walk| walk.extents.iter().any(|&(arena, _)| arena != NO_ARENA)))
}

/// Every record, every region.
fn full(memory: &dyn Memory, found: &Found, shape: Shape, mapped: &[Range<u64>], data: &[u8]) -> HeapWalk {
    // Every word that names a record, with the size class that it claims.
    let mut words: Vec<(u64, u64)> = Vec::new();
    radix::visit(memory, found.root, shape, |_, entry| {
        let word = one_word(entry, shape);
        let record = word & POINTER_MASK;
        let is_new = words.last().is_none_or(|&(last, _)| last != record);
        if is_new && is_user_address(record) && words.len() < RECORDS_MAX {
            words.push((record, word >> 48));
        }
    });
    words.sort_unstable();
    words.dedup_by_key(|(record, _)| *record);
    let (bits, mut extents, mut torn) = read_extents(memory, &words);
    // Extents lie in mappings; anything else is a record that was torn or forged.
    let known = extents.len();
    extents.retain(|extent| range_of(mapped, extent.addr).is_some_and(|range| extent.end() <= range.end));
    torn += (known - extents.len()) as u64;
    let starts = extents.iter().map(|extent| extent.addr..extent.end()).collect::<Vec<_>>();
    let blocks = own_blocks(memory, mapped, data, words.iter().map(|&(record, _)| record), &joined(&starts));
    account(memory, &layout(bits, found), extents, &blocks, torn)
}

/// The page map's words alone, and at level sampled some slabs.
fn quick(memory: &dyn Memory, found: &Found, shape: Shape, mapped: &[Range<u64>], data: &[u8], level: Level) -> HeapWalk {
    let mut seen = Quick::default();
    let is_sampled = level == Level::Sampled;
    // Records that tell which release's bits they have.
    let mut telling: Vec<(u64, u64)> = Vec::new();
    radix::visit(memory, found.root, shape, |page, entry| {
        let word = one_word(entry, shape);
        let record = word & POINTER_MASK;
        if !is_user_address(record) || range_of(mapped, page).is_none() {
            return;
        }
        if telling.len() < TELLING_RECORDS && word >> 48 < CLASSES && telling.last().is_none_or(|&(last, _)| last != record) {
            telling.push((record, word >> 48));
        }
        seen.entry(page, PAGE_BYTES, record, word, is_sampled);
    });
    seen.close(is_sampled);
    telling.sort_unstable();
    let (bits, _, _) = read_extents(memory, &telling);
    let mut account = HeapAccount { allocator: "jemalloc".into(), layout: layout(bits, found), ..HeapAccount::default() };
    let mut quality = WalkQuality { windows: seen.count, ..WalkQuality::default() };
    if is_sampled {
        let estimate = seen.estimate(memory, |record| Extent::parse(record, bits).map(live_of));
        account.live_bytes_est = Some(estimate.live_bytes as u64);
        account.live_bytes_stderr = Some(estimate.stderr_bytes as u64);
        quality.broken_headers = estimate.torn;
        quality.windows = estimate.read;
    }
    let plain: Vec<Range<u64>> = seen.extents.iter().map(|(_, range)| range.clone()).collect();
    let blocks = own_blocks(memory, mapped, data, seen.records.values().copied(), &joined(&plain));
    account.overhead_bytes = blocks.iter().map(|block| block.bytes).sum();
    let arena_of = |record: u64| u32::try_from(memory.word(record).unwrap_or(0) & u64::from(NO_ARENA)).unwrap_or(NO_ARENA);
    let arenas: HashMap<Place, u32> = seen.records.iter().map(|(&place, &record)| (place, arena_of(record))).collect();
    let mut extents: Vec<(u32, Range<u64>)> =
        seen.extents.into_iter().map(|(place, range)| (arenas.get(&place).copied().unwrap_or(0), range)).collect();
    extents.extend(blocks.iter().map(|block| (NO_ARENA, block.range())));
    extents.sort_unstable_by_key(|(_, range)| range.start);
    let mut pages = PageCache::new(memory);
    let mut by_arena: BTreeMap<u32, ArenaAccount> = BTreeMap::new();
    for (arena, range) in &extents {
        let bytes = range.end - range.start;
        let residency = pages.residency(range.clone());
        account.extent_bytes = account.extent_bytes.saturating_add(bytes);
        account.resident_bytes += residency.resident_bytes;
        account.swapped_bytes += residency.swapped_bytes;
        account.huge_bytes += residency.huge_bytes;
        if *arena != NO_ARENA {
            let own = by_arena.entry(*arena).or_insert_with(|| ArenaAccount { address: u64::from(*arena), ..ArenaAccount::default() });
            own.pieces += 1;
            own.extent_bytes = own.extent_bytes.saturating_add(bytes);
            own.resident_bytes = own.resident_bytes.saturating_add(residency.resident_bytes);
        }
    }
    account.arenas = by_arena.into_values().collect();
    quality.judge(account.extent_bytes, true);
    HeapWalk { account, quality, chunks: ChunkTable::default(), extents }
}

/// Live bytes of an extent; whether a large block has a page more than it needs is told by where it begins.
fn live_of(mut extent: Extent) -> u64 {
    if extent.state != ACTIVE {
        return 0;
    }
    if extent.is_slab {
        let regions = extent.bytes / extent.region_bytes;
        return regions.saturating_sub(extent.free_regions) * extent.region_bytes;
    }
    extent.settle_large(if extent.offset_bytes > 0 { PAGE_BYTES } else { 0 });
    extent.region_bytes
}

/// Records of extents in use from which the release's form is told.
const TELLING_RECORDS: usize = 64;

fn layout(bits: Bits, found: &Found) -> String {
    format!("jemalloc {}, page map in {}", bits.releases, found.object.name)
}

/// The blocks of jemalloc's own memory; none overlaps an extent.
fn own_blocks(
    memory: &dyn Memory,
    mapped: &[Range<u64>],
    data: &[u8],
    records: impl Iterator<Item = u64>,
    extents: &[Range<u64>],
) -> Vec<Block> {
    let mut blocks = metadata::find(memory, mapped, data, records);
    blocks.retain(|block| {
        let next = extents.partition_point(|range| range.end <= block.addr);
        extents.get(next).is_none_or(|range| range.start >= block.range().end)
    });
    blocks
}

/// Reads the records; which release's bits they have is told by the size classes that the page map repeats.
fn read_extents(memory: &dyn Memory, words: &[(u64, u64)]) -> (Bits, Vec<Extent>, u64) {
    let addrs: Vec<u64> = words.iter().map(|&(addr, _)| addr).collect();
    let mut agreeing = [0u64; BITS.len()];
    let mut raw: Vec<[u8; RECORD_BYTES]> = Vec::with_capacity(words.len());
    let mut torn = 0;
    let mut index = 0;
    radix::read_records(memory, &addrs, RECORD_BYTES, |_, bytes| {
        let class = words.get(index).map_or(0, |&(_, class)| class);
        index += 1;
        match bytes.and_then(|bytes| <[u8; RECORD_BYTES]>::try_from(bytes).ok()) {
            Some(record) => {
                for (count, bits) in agreeing.iter_mut().zip(BITS) {
                    *count += u64::from(bits.size_class_of(&record) == class && class < CLASSES);
                }
                raw.push(record);
            }
            None => torn += 1,
        }
    });
    let best = agreeing.iter().enumerate().max_by_key(|&(_, &count)| count).map_or(0, |(index, _)| index);
    let bits = BITS.get(if agreeing.first() == agreeing.get(best) { 0 } else { best }).copied().unwrap_or(BITS[0]);
    let mut extents: Vec<Extent> = Vec::with_capacity(raw.len());
    for record in &raw {
        match Extent::parse(record, bits) {
            Some(extent) => extents.push(extent),
            None => torn += 1,
        }
    }
    // A large block that begins inside its first page has a page more than it needs, and then all have.
    let is_padded = extents.iter().any(|extent| extent.state == ACTIVE && !extent.is_slab && extent.offset_bytes > 0);
    extents.iter_mut().for_each(|extent| extent.settle_large(if is_padded { PAGE_BYTES } else { 0 }));
    extents.sort_unstable_by_key(|extent| (extent.addr, extent.bytes));
    // Two records of one address: one is old. Extents never overlap.
    let mut end = 0;
    extents.retain(|extent| {
        let keep = extent.addr >= end;
        if keep {
            end = extent.end();
        } else {
            torn += 1;
        }
        keep
    });
    (bits, extents, torn)
}

fn account(memory: &dyn Memory, layout: &str, extents: Vec<Extent>, blocks: &[Block], torn: u64) -> HeapWalk {
    let mut account = HeapAccount { allocator: "jemalloc".into(), layout: layout.into(), ..HeapAccount::default() };
    let mut pages = PageCache::new(memory);
    let mut arenas: BTreeMap<u32, ArenaAccount> = BTreeMap::new();
    let mut live = (0u64, 0u64);
    let (mut free, mut purgeable, mut free_extents, mut taken_for_resident) = (0u64, 0u64, 0u64, 0u64);
    for extent in &extents {
        let residency = pages.residency(extent.addr..extent.end());
        account.extent_bytes = account.extent_bytes.saturating_add(extent.bytes);
        account.resident_bytes += residency.resident_bytes;
        account.swapped_bytes += residency.swapped_bytes;
        account.huge_bytes += residency.huge_bytes;
        let arena =
            arenas.entry(extent.arena).or_insert_with(|| ArenaAccount { address: u64::from(extent.arena), ..ArenaAccount::default() });
        arena.pieces += 1;
        arena.extent_bytes += extent.bytes;
        arena.resident_bytes += residency.resident_bytes;
        let (live_bytes, live_count, free_bytes) = match (extent.state, extent.is_slab) {
            (ACTIVE, true) => {
                let regions = extent.bytes / extent.region_bytes;
                let used = regions.saturating_sub(extent.free_regions);
                (used * extent.region_bytes, used, (regions - used) * extent.region_bytes)
            }
            (ACTIVE, false) => (extent.region_bytes, 1, 0),
            _ => (0, 0, extent.bytes),
        };
        live = (live.0 + live_bytes, live.1 + live_count);
        free += free_bytes;
        free_extents += u64::from(extent.state != ACTIVE);
        // Retained extents have been given back already; what is still resident of them is an accident.
        if extent.state != ACTIVE && extent.state != RETAINED {
            purgeable += residency.resident_bytes;
        }
        if extent.state <= DIRTY {
            taken_for_resident = taken_for_resident.saturating_add(extent.bytes);
        }
        arena.live_bytes += live_bytes;
        arena.live_allocations += live_count;
        arena.free_bytes += free_bytes;
    }
    for block in blocks {
        let residency = pages.residency(block.range());
        account.extent_bytes = account.extent_bytes.saturating_add(block.bytes);
        account.resident_bytes += residency.resident_bytes;
        account.swapped_bytes += residency.swapped_bytes;
        account.huge_bytes += residency.huge_bytes;
        taken_for_resident = taken_for_resident.saturating_add(block.used_bytes.next_multiple_of(PAGE_BYTES));
    }
    account.allocator_resident_bytes = Some(taken_for_resident);
    account.live_bytes = Some(live.0);
    account.live_allocations = Some(live.1);
    account.free_bytes = Some(free);
    account.free_chunks = Some(free_extents);
    account.overhead_bytes = account.extent_bytes.saturating_sub(live.0).saturating_sub(free);
    account.trimmable_bytes = Some(purgeable);
    account.arenas = arenas.into_values().collect();
    let chunks = table(&extents, blocks);
    let mut unused: Vec<ArenaAccount> = Vec::new();
    let sums = Sums::of(&chunks, &mut unused);
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
    pages.forget();
    let mut builder = OccupancyBuilder::new(|range: Range<u64>| pages.resident_bytes(range));
    for (_, chunk) in chunks.iter() {
        let holder = match chunk.state {
            ChunkState::Live => Holder::Live,
            ChunkState::Free => Holder::Free,
            _ => Holder::Other,
        };
        builder.add(chunk.start..chunk.end(), holder);
    }
    let occupancy = builder.finish();
    account.pinned_bytes = Some(occupancy.pinned_bytes);
    account.kept_bytes = Some(occupancy.free_unpinned_bytes.saturating_sub(purgeable));
    account.occupancy = Some(occupancy);
    let mut quality = WalkQuality { windows: extents.len() as u64, broken_headers: torn, ..WalkQuality::default() };
    quality.judge(account.extent_bytes, torn.saturating_mul(100) <= extents.len() as u64);
    let mut ranges: Vec<(u32, Range<u64>)> = extents.iter().map(|extent| (extent.arena, extent.addr..extent.end())).collect();
    ranges.extend(blocks.iter().map(|block| (NO_ARENA, block.range())));
    ranges.sort_unstable_by_key(|(_, range)| range.start);
    HeapWalk { account, quality, chunks, extents: ranges }
}

/// Every region of every slab, every large block, every free extent; of jemalloc's own blocks what was handed out and the rest.
fn table(extents: &[Extent], blocks: &[Block]) -> ChunkTable {
    let mut table = ChunkTable::default();
    for block in blocks {
        table.begin_region(block.addr, NO_ARENA);
        table.push(block.used_bytes, ChunkState::Overhead);
        table.push(block.bytes - block.used_bytes, ChunkState::Overhead);
    }
    for extent in extents {
        table.begin_region(extent.addr, extent.arena);
        if extent.state != ACTIVE {
            table.push(extent.bytes, ChunkState::Free);
        } else if extent.is_slab {
            let regions = extent.bytes / extent.region_bytes;
            for index in 0..regions {
                let word = usize::try_from(index / 64).ok().and_then(|word| extent.bitmap.get(word)).copied().unwrap_or(0);
                table.push(extent.region_bytes, if word >> (index % 64) & 1 == 1 { ChunkState::Free } else { ChunkState::Live });
            }
            table.push(extent.bytes - regions * extent.region_bytes, ChunkState::Overhead);
        } else {
            let offset = extent.offset_bytes.min(extent.bytes - extent.region_bytes);
            table.push(offset, ChunkState::Overhead);
            table.push(extent.region_bytes, ChunkState::Live);
            table.push(extent.bytes - extent.region_bytes - offset, ChunkState::Overhead);
        }
    }
    table.sort_regions();
    table
}
