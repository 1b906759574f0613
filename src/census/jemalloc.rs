//! jemalloc 5.2 and 5.3, shared or static, with or without a symbol prefix: found by its page map.
//!
//! `arena_emap_global` (5.3) or `extents_rtree` (5.2) is a radix tree from 4 KiB page to extent: `szind << 48 | record | state << 2 | head <<
//! 1 | slab`. A record (`edata_t`, `extent_t`) begins with e_bits, e_addr and e_size_esn; a slab's has a bitmap of its regions at +64, 1 =
//! free. What thread caches hold counts as live, as in jemalloc's own statistics.

use std::ops::Range;

use super::account::{ArenaAccount, HeapAccount, Level, Sums};
use super::chunks::{ChunkState, ChunkTable};
use super::glibc::HeapWalk;
use super::memory::{Memory, MemoryError, is_user_address, word_at};
use super::objects::{Objects, range_of, unbacked_ranges};
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::radix::{self, Roots, Shape};
use crate::heap::occupancy::{Holder, OccupancyBuilder};
use crate::target::Maps;

const SHAPE: Shape = Shape { root_words: 1 << 18, page_bits: 12, leaf_alignment: 64 };
/// Bytes of a record: cache-line aligned, two lines.
const RECORD_BYTES: usize = 128;
/// A slab's bitmap: at most 512 regions.
const BITMAP_AT: usize = 64;
const BITMAP_WORDS: usize = 8;
/// Low bits of e_size_esn that hold a serial number.
const ESN_MASK: u64 = 4095;
/// Bits of a leaf's word that hold the record's address; records are 128-byte aligned.
const POINTER_MASK: u64 = ((1 << 48) - 1) & !127;
/// Records kept at most: 16 bytes each while they are collected.
const RECORDS_MAX: usize = 1 << 24;

/// Where e_bits keeps what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bits {
    releases: &'static str,
    state: u32,
    state_mask: u64,
    size_class: u32,
    free_regions: u32,
}

/// `EDATA_BITS_*` of 5.3 and `EXTENT_BITS_*` of 5.2.
const BITS: [Bits; 2] = [
    Bits { releases: "5.3", state: 17, state_mask: 7, size_class: 20, free_regions: 28 },
    Bits { releases: "5.2", state: 16, state_mask: 3, size_class: 18, free_regions: 26 },
];

/// An extent.
#[derive(Debug, Clone, Copy)]
struct Extent {
    addr: u64,
    bytes: u64,
    /// Where in its first page a large block begins: jemalloc spreads them over cache sets.
    offset: u64,
    state: u64,
    is_slab: bool,
    region_bytes: u64,
    free_regions: u64,
    arena: u32,
    bitmap: [u64; BITMAP_WORDS],
}

/// Bytes of a size class: 8, then multiples of 16 up to 128, then four a doubling (`sz_index2size`).
fn class_bytes(index: u64) -> Option<u64> {
    match index {
        0 => Some(8),
        1..=8 => Some(16 * index),
        9..=231 => {
            let (group, step) = ((index - 9) / 4, (index - 9) % 4 + 1);
            let base = 128u64.checked_shl(u32::try_from(group).ok()?)?;
            base.checked_add(base / 4 * step)
        }
        _ => None,
    }
}

/// Takes jemalloc's census. `None` if no page map is in use.
///
/// # Errors
/// If the process went away or the right to read is missing.
pub fn take(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    roots: &mut Roots,
    level: Level,
) -> Result<Option<HeapWalk>, MemoryError> {
    let owns = |word: u64, addr: u64| {
        let record = word & POINTER_MASK;
        is_user_address(record)
            && memory.bytes(record, 24).is_some_and(|bytes| {
                let (start, size) = (word_at(&bytes, 8) & !ESN_MASK, word_at(&bytes, 16) & !ESN_MASK);
                size > 0 && size < 1 << 40 && start <= addr && addr - start < size
            })
    };
    let Some(found) = radix::find(memory, maps, objects, SHAPE, roots, owns) else { return Ok(None) };
    // Every word that names a record, with the size class that it claims.
    let mut words: Vec<(u64, u64)> = Vec::new();
    radix::visit(memory, found.root, SHAPE, |_, word| {
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
    let mapped = unbacked_ranges(maps);
    let known = extents.len();
    extents.retain(|extent| range_of(&mapped, extent.addr).is_some_and(|range| extent.addr + extent.bytes <= range.end));
    torn += (known - extents.len()) as u64;
    Ok(Some(account(memory, &format!("jemalloc {}, page map in {}", bits.releases, found.object.name), extents, torn, level)))
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
                    *count += u64::from(word_at(&record, 0) >> bits.size_class & 255 == class && class < 232);
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
        match extent(record, bits) {
            Some(extent) => extents.push(extent),
            None => torn += 1,
        }
    }
    extents.sort_unstable_by_key(|extent| (extent.addr, extent.bytes));
    // Two records of one address: one is old. Extents never overlap.
    let mut end = 0;
    extents.retain(|extent| {
        let keep = extent.addr >= end;
        if keep {
            end = extent.addr.saturating_add(extent.bytes);
        } else {
            torn += 1;
        }
        keep
    });
    (bits, extents, torn)
}

fn extent(record: &[u8; RECORD_BYTES], bits: Bits) -> Option<Extent> {
    let word = word_at(record, 0);
    let state = word >> bits.state & bits.state_mask;
    let mut extent = Extent {
        addr: word_at(record, 8) & !ESN_MASK,
        bytes: word_at(record, 16) & !ESN_MASK,
        offset: word_at(record, 8) & ESN_MASK,
        state,
        is_slab: word >> 12 & 1 == 1,
        region_bytes: class_bytes(word >> bits.size_class & 255).unwrap_or(0),
        free_regions: word >> bits.free_regions & 1023,
        arena: u32::try_from(word & 4095).unwrap_or(0),
        bitmap: [0; BITMAP_WORDS],
    };
    for (index, word) in extent.bitmap.iter_mut().enumerate() {
        *word = word_at(record, BITMAP_AT + 8 * index);
    }
    let end = extent.addr.checked_add(extent.bytes)?;
    let sound = is_user_address(extent.addr) && is_user_address(end) && extent.bytes > 0 && state < 4;
    // Sizes of active extents must fit their class; a record that is changed meanwhile does not.
    let fits = state != ACTIVE
        || (extent.region_bytes > 0
            && extent.region_bytes <= extent.bytes
            && (!extent.is_slab || extent.bytes / extent.region_bytes <= 64 * BITMAP_WORDS as u64));
    (sound && fits).then_some(extent)
}

const ACTIVE: u64 = 0;
const RETAINED: u64 = 3;

fn account(memory: &dyn Memory, layout: &str, extents: Vec<Extent>, torn: u64, level: Level) -> HeapWalk {
    let mut account = HeapAccount { allocator: "jemalloc".into(), layout: layout.into(), ..HeapAccount::default() };
    let mut pages = PageCache::new(memory);
    let mut arenas: std::collections::BTreeMap<u32, ArenaAccount> = std::collections::BTreeMap::new();
    let mut live = (0u64, 0u64);
    let (mut free, mut purgeable, mut free_extents) = (0u64, 0u64, 0u64);
    for extent in &extents {
        let range = extent.addr..extent.addr + extent.bytes;
        let residency = pages.residency(range);
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
        arena.live_bytes += live_bytes;
        arena.live_allocations += live_count;
        arena.free_bytes += free_bytes;
    }
    account.live_bytes = Some(live.0);
    account.live_allocations = Some(live.1);
    account.free_bytes = Some(free);
    account.free_chunks = Some(free_extents);
    account.overhead_bytes = account.extent_bytes.saturating_sub(live.0).saturating_sub(free);
    account.trimmable_bytes = Some(purgeable);
    account.arenas = arenas.into_values().collect();
    let mut chunks = ChunkTable::default();
    if level == Level::Full {
        chunks = table(&extents);
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
    }
    let mut quality = WalkQuality { windows: extents.len() as u64, broken_headers: torn, ..WalkQuality::default() };
    quality.judge(account.extent_bytes, torn.saturating_mul(100) <= extents.len() as u64);
    let ranges = extents.iter().map(|extent| (extent.arena, extent.addr..extent.addr + extent.bytes)).collect();
    HeapWalk { account, quality, chunks, extents: ranges }
}

/// Every region of every slab, every large block, every free extent.
fn table(extents: &[Extent]) -> ChunkTable {
    let mut table = ChunkTable::default();
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
            let offset = extent.offset.min(extent.bytes - extent.region_bytes);
            table.push(offset, ChunkState::Overhead);
            table.push(extent.region_bytes, ChunkState::Live);
            table.push(extent.bytes - extent.region_bytes - offset, ChunkState::Overhead);
        }
    }
    table.sort_regions();
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_classes_are_those_of_the_manual() {
        // From jemalloc(3), "Size classes", 64-bit system with 16-byte quantum.
        let manual = [8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280];
        let own: Vec<u64> = (0..manual.len() as u64).filter_map(class_bytes).collect();
        assert_eq!(own, manual);
        assert_eq!(class_bytes(28), Some(4096));
        assert_eq!(class_bytes(36), Some(16384));
        assert_eq!(class_bytes(232), None);
    }
}
