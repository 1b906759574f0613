//! jemalloc 5.0 to 5.3, shared or static, with or without a symbol prefix: found by its page map.
//!
//! `arena_emap_global` (5.3) or `extents_rtree` (before) is a radix tree from 4 KiB page to extent: `szind << 48 | record | state << 2 | head
//! << 1 | slab`, or in builds for addresses of 57 bits the record and, in a second word, `szind << 5 | state << 2 | head << 1 | slab`. A
//! record (`edata_t`, `extent_t`) begins with e_bits, e_addr and e_size_esn; a slab's has a bitmap of its regions at +64, 1 = free. What
//! thread caches hold is known of 5.3 (`block`), and counts as live before, as in jemalloc's own statistics.

pub mod block;
pub mod cache_bins;
pub mod decay;
pub mod full;
pub mod metadata;
pub mod quick;
pub mod record;
pub mod telling;

use std::collections::{BTreeMap, HashMap};
use std::ops::{ControlFlow, Range};

use self::metadata::Block;
use self::quick::{Place, Quick};
use self::record::{ACTIVE, BITMAP_AT, BITS, CLASSES, Extent, Form, Pages, SIZE_CLASSES, is_slab};
use self::telling::Telling;
use super::account::{ArenaAccount, HeapAccount, Level};
use super::chunks::ChunkTable;
use super::layout_cache::ByBuildId;
use super::memory::{Memory, MemoryError, is_user_address, word_at};
use super::objects::{Data, Objects, joined, range_of, thread_ranges, unbacked_ranges};
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::radix::{self, Entry, PageMapRoot, Roots, Shape};
use super::reader::{HeapReader, HeapWalk, Sight};
use crate::allocator::Allocator;
use crate::heap::residency::page_bytes;
use crate::machine::Machine;
use crate::process::Maps;

/// The page map's forms: for addresses of 48 bits (`RTREE_HEIGHT` 2), of 57 bits (3) in builds made on a machine with five levels of page
/// tables, and of 48 bits in builds with larger pages, as distributions make them for arm64.
const SHAPES: [Shape; 4] = [
    Shape {
        root_words: 1 << 18,
        node_bits: 0,
        leaf_bits: 18,
        entry_words: 1,
        leaf_offset: 0,
        page_bits: 12,
        alignment: 64,
        filled_max: 2048,
        object_bytes_min: 0,
    },
    Shape {
        root_words: 1 << 15,
        node_bits: 15,
        leaf_bits: 15,
        entry_words: 2,
        leaf_offset: 0,
        page_bits: 12,
        alignment: 64,
        filled_max: 16,
        object_bytes_min: 0,
    },
    Shape {
        root_words: 1 << 16,
        node_bits: 0,
        leaf_bits: 16,
        entry_words: 1,
        leaf_offset: 0,
        page_bits: 16,
        alignment: 64,
        filled_max: 2048,
        object_bytes_min: 0,
    },
    Shape {
        root_words: 1 << 17,
        node_bits: 0,
        leaf_bits: 17,
        entry_words: 1,
        leaf_offset: 0,
        page_bits: 14,
        alignment: 64,
        filled_max: 2048,
        object_bytes_min: 0,
    },
];

/// The forms that are searched for: those with larger pages where there may be such builds.
fn shapes(memory: &dyn Memory) -> &'static [Shape] {
    let [small @ .., _, _] = &SHAPES;
    if memory.process().is_some() && Machine::HOST == Machine::X86_64 { small } else { &SHAPES }
}

/// The pages of builds whose page map has a form.
fn pages_of(shape: Shape) -> Pages {
    Pages { bits: shape.page_bits }
}
/// Bits of a leaf's word that hold the record's address: records lie on cache lines.
const POINTER_MASK: u64 = ((1 << 48) - 1) & !63;
/// The number that jemalloc gives to what belongs to no arena, its own memory.
const NO_ARENA: u32 = 4095;

/// What was found before in files.
#[derive(Debug, Default)]
struct LayoutCache {
    /// Page maps of each shape.
    roots: [Roots; SHAPES.len()],
    /// Where an arena's decay times are.
    decay: ByBuildId<decay::Places>,
}

/// Reads jemalloc's heaps.
#[derive(Debug, Default)]
pub struct Reader(LayoutCache);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Jemalloc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        take(sight.memory, sight.maps, sight.objects, &mut self.0, sight.options.level)
    }
}

/// A leaf's entry in the form of one word per page, whatever the build's form.
fn one_word(entry: Entry, shape: Shape) -> u64 {
    if shape.entry_words == 1 {
        return entry.first;
    }
    (entry.last >> 5 & 255) << 48 | entry.first & POINTER_MASK | entry.last & 31
}

/// Searches for the page map, in each of its forms.
fn find_page_map(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    mapped: &[Range<u64>],
    layouts: &mut LayoutCache,
) -> Option<(Shape, PageMapRoot)> {
    shapes(memory).iter().zip(&mut layouts.roots).find_map(|(&shape, roots)| {
        let owns = |entry, addr| owns(memory, mapped, one_word(entry, shape), addr, pages_of(shape));
        let found = radix::find(memory, maps, objects, shape, roots, owns)?;
        leads_to_extents(memory, mapped, found.root, shape).then_some((shape, found))
    })
}

/// Records of a page map that are looked at before it is followed.
const JUDGED_RECORDS: u32 = 128;

/// Whether most of the first records under a root are of extents. The search accepts a root to which one sample leads, which words of other
/// things may do too.
fn leads_to_extents(memory: &dyn Memory, mapped: &[Range<u64>], root: u64, shape: Shape) -> bool {
    let (mut judged, mut owned, mut last) = (0, 0, 0);
    let _ = radix::try_visit(memory, root, shape, |page, entry| {
        let word = one_word(entry, shape);
        let record = word & POINTER_MASK;
        if record != last && is_user_address(record) {
            last = record;
            judged += 1;
            owned += u32::from(owns(memory, mapped, word, page, pages_of(shape)));
        }
        if judged < JUDGED_RECORDS { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    2 * owned > judged
}

/// Whether an entry's record is of an extent that covers the address, lies in one mapping, and has the size class that the entry repeats, in
/// one of the releases' forms.
fn owns(memory: &dyn Memory, mapped: &[Range<u64>], word: u64, addr: u64, pages: Pages) -> bool {
    let record = word & POINTER_MASK;
    let Some(bytes) = Some(record).filter(|&record| is_user_address(record)).and_then(|record| memory.bytes(record, 24)) else {
        return false;
    };
    let (start, size) = (word_at(&bytes, 8) & !pages.low_mask(), word_at(&bytes, 16) & !pages.low_mask());
    let covers = size > 0 && start <= addr && addr - start < size && range_of(mapped, start).is_some_and(|range| size <= range.end - start);
    // An extent that is not in use may still have its former class in the page map.
    covers && BITS.iter().any(|bits| bits.size_class_of(&bytes) >= CLASSES || bits.size_class_of(&bytes) == word >> 48)
}

/// Reads a record. Until 5.2 one may lie on two pages, of which the second was never touched if it never was one of a slab: only slabs have
/// bits for regions.
fn read_record(memory: &dyn Memory, addr: u64, pages: Pages) -> Option<Vec<u8>> {
    let mut record = vec![0u8; pages.record_bytes()];
    let read = memory.read(addr, &mut record);
    (read == record.len() || read >= BITMAP_AT && !is_slab(&record)).then_some(record)
}

/// Takes jemalloc's census. `None` if no page map is in use.
///
/// # Errors
/// If the process has ended, or the permission to read is missing.
fn take(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    layouts: &mut LayoutCache,
    level: Level,
) -> Result<Option<HeapWalk>, MemoryError> {
    let mapped = unbacked_ranges(maps);
    let Some((shape, found)) = find_page_map(memory, maps, objects, &mapped, layouts) else { return Ok(None) };
    let owner = objects.iter().find(|one| one.object() == &found.object);
    let data = owner.map(|one| one.data()).unwrap_or_default();
    let held = (level != Level::Top).then(|| block::held_by_threads(memory, &thread_ranges(maps), &data)).flatten();
    let mut walk = match level {
        Level::Full => full::take(memory, &found, shape, &mapped, &data, held.as_deref()),
        Level::Top | Level::Sampled => quick(memory, &found, shape, &mapped, &data, level, held),
    };
    let build_id = owner.and_then(|one| one.build_id());
    let mut places = layouts.decay.get(build_id.as_ref());
    add_decay(memory, &mut walk, &found, &mut places);
    if let Some(places) = places {
        layouts.decay.remember(build_id.as_ref(), places);
    }
    // A page map that leads to no extent is not one.
    Ok(Some(walk).filter(|walk| walk.extents.iter().any(|&(arena, _)| arena != NO_ARENA)))
}

/// The page map's words alone, and at level sampled some slabs. `held`: what the threads' caches hold, if that is known.
fn quick(
    memory: &dyn Memory,
    found: &PageMapRoot,
    shape: Shape,
    mapped: &[Range<u64>],
    data: &Data,
    level: Level,
    held: Option<Vec<block::Held>>,
) -> HeapWalk {
    let mut seen = Quick::default();
    let pages = pages_of(shape);
    let is_sampled = level == Level::Sampled;
    let mut telling = Telling::default();
    let mut mapping = 0..0;
    radix::visit(memory, found.root, shape, |page, entry| {
        let word = one_word(entry, shape);
        let record = word & POINTER_MASK;
        if !mapping.contains(&page) {
            mapping = range_of(mapped, page).cloned().unwrap_or_default();
        }
        if !is_user_address(record) || mapping.is_empty() {
            return;
        }
        telling.word(word);
        seen.entry(page, pages.bytes(), record, word, is_sampled);
    });
    seen.close(is_sampled);
    let form = telling.form(memory, pages);
    let mut account = HeapAccount::new(Allocator::Jemalloc, layout(form, pages, found));
    let mut quality = WalkQuality { windows: seen.count, ..WalkQuality::default() };
    if is_sampled {
        let estimate = seen.estimate(|record| Extent::parse(&read_record(memory, record, pages)?, form, pages).map(live_of));
        let cached = |held: Vec<block::Held>| held.iter().filter_map(|one| form.classes.bytes(one.class)).sum();
        account.details.cached_bytes = held.map(cached);
        account.live_bytes_est = Some((estimate.live_bytes as u64).saturating_sub(account.details.cached_bytes.unwrap_or(0)));
        account.live_bytes_stderr = Some(estimate.stderr_bytes as u64);
        quality.broken_headers = estimate.torn;
        quality.windows = estimate.read;
    }
    let plain: Vec<Range<u64>> = seen.extents.iter().map(|(_, range)| range.clone()).collect();
    let pointers = data.words().map(|(_, word)| word).chain(seen.records.values().copied());
    let blocks = own_blocks(memory, mapped, pointers, &joined(&plain));
    account.overhead_bytes = blocks.iter().map(|block| block.bytes).sum();
    let arena_of = |record: u64| u32::try_from(memory.word(record).unwrap_or(0) & u64::from(NO_ARENA)).unwrap_or(NO_ARENA);
    let arenas: HashMap<Place, u32> = seen.records.iter().map(|(&place, &record)| (place, arena_of(record))).collect();
    let mut extents: Vec<(u32, Range<u64>)> =
        seen.extents.into_iter().map(|(place, range)| (arenas.get(&place).copied().unwrap_or(0), range)).collect();
    extents.extend(blocks.iter().map(|block| (NO_ARENA, block.range())));
    extents.sort_unstable_by_key(|(_, range)| range.start);
    let mut present = PageCache::new(memory);
    let mut by_arena: BTreeMap<u32, ArenaAccount> = BTreeMap::new();
    for (arena, range) in &extents {
        let bytes = range.end - range.start;
        let residency = present.residency(range.clone());
        account.ladder.extent_bytes = account.ladder.extent_bytes.saturating_add(bytes);
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
        if *arena != NO_ARENA {
            let own = by_arena.entry(*arena).or_insert_with(|| ArenaAccount { address: u64::from(*arena), ..ArenaAccount::default() });
            own.pieces += 1;
            own.extent_bytes = own.extent_bytes.saturating_add(bytes);
            own.resident_bytes = own.resident_bytes.saturating_add(residency.resident_bytes);
        }
    }
    account.arenas = by_arena.into_values().collect();
    quality.judge(account.ladder.extent_bytes, true);
    HeapWalk { account, quality, chunks: ChunkTable::default(), extents }
}

/// Adds the arenas' decay times. `places`: as far as they are known.
fn add_decay(memory: &dyn Memory, walk: &mut HeapWalk, found: &PageMapRoot, places: &mut Option<decay::Places>) {
    let object = found.object.base..found.object.range.end;
    let own: Vec<Range<u64>> = walk.extents.iter().filter(|(arena, _)| *arena == NO_ARENA).map(|(_, range)| range.clone()).collect();
    let times = decay::find(memory, &own, &object, places);
    let account = &mut walk.account;
    for arena in &mut account.arenas {
        let own = u32::try_from(arena.address).ok().and_then(|number| times.get(&number));
        arena.dirty_decay_ms = own.map(|own| own.dirty_ms);
        arena.muzzy_decay_ms = own.map(|own| own.muzzy_ms);
    }
    let agreed = |time: fn(&ArenaAccount) -> Option<i64>| {
        let first = account.arenas.first().and_then(time)?;
        account.arenas.iter().all(|arena| time(arena) == Some(first)).then_some(first)
    };
    (account.dirty_decay_ms, account.muzzy_decay_ms) = (agreed(|arena| arena.dirty_decay_ms), agreed(|arena| arena.muzzy_decay_ms));
}

/// Live bytes of an extent; whether a large block has a page more than it needs is seen from where it begins.
fn live_of(mut extent: Extent) -> u64 {
    if extent.state != ACTIVE {
        return 0;
    }
    if extent.is_slab {
        let regions = extent.bytes / extent.region_bytes;
        return regions.saturating_sub(extent.free_regions) * extent.region_bytes;
    }
    extent.settle_large(if extent.offset_bytes > 0 { extent.pages.bytes() } else { 0 });
    extent.region_bytes
}

fn layout(form: Form, pages: Pages, found: &PageMapRoot) -> String {
    let larger = if pages.bytes() == page_bytes() { String::new() } else { format!(" with pages of {} KiB", pages.bytes() >> 10) };
    let [default, ..] = SIZE_CLASSES;
    let quantum = form.classes.quantum_bytes;
    let closer = if form.classes == default { String::new() } else { format!(" with size classes {quantum} bytes apart") };
    format!("jemalloc {}{larger}{closer}, page map in {}", form.bits.releases, found.object.name)
}

/// The blocks of jemalloc's own memory; none overlaps an extent.
fn own_blocks(memory: &dyn Memory, mapped: &[Range<u64>], pointers: impl Iterator<Item = u64>, extents: &[Range<u64>]) -> Vec<Block> {
    let mut blocks = metadata::find(memory, mapped, pointers);
    blocks.retain(|block| {
        let next = extents.partition_point(|range| range.end <= block.addr);
        extents.get(next).is_none_or(|range| range.start >= block.range().end)
    });
    blocks
}

#[cfg(test)]
mod tests {
    use super::super::Fixture;
    use super::*;

    #[test]
    fn a_record_that_ends_on_a_page_that_was_never_touched_is_read_unless_it_is_of_a_slab() {
        const RECORD: u64 = 0x7f00_0000_1fc0;
        const SLAB: u64 = 1 << 12;
        let pages = Pages { bits: 12 };
        let of = |bits: u64, touched: bool| {
            let mut memory = Fixture::default();
            memory.write_word(RECORD, bits);
            memory.write_word(RECORD + 8, 0x7f10_0000_0000);
            if touched {
                memory.write_word(RECORD + 64, 5);
            }
            read_record(&memory, RECORD, pages)
        };
        let words = |record: Vec<u8>| [0, 8, 64].map(|at| word_at(&record, at));
        assert_eq!(of(2, false).map(words), Some([2, 0x7f10_0000_0000, 0]));
        assert_eq!(of(SLAB, true).map(words), Some([SLAB, 0x7f10_0000_0000, 5]));
        assert_eq!(of(SLAB, false), None);
    }

    #[test]
    fn words_that_look_like_a_page_map_for_one_page_are_none() {
        const ROOT: u64 = 0x5000_0000;
        const LEAF: u64 = 0x7f00_0000_0000;
        const RECORDS: u64 = 0x7f00_0100_0000;
        let maps = Maps::parse(b"7f0000000000-7f0002000000 rw-p 00000000 00:00 0\n");
        let [shape, ..] = SHAPES;
        let slot = |page: u64| page >> shape.page_bits & ((1 << shape.leaf_bits) - 1);
        let mapped = unbacked_ranges(&maps);
        // Pages of the mapping, each with a record of its own, of which the first ones are extents.
        let is_page_map = |extents: u64| {
            let mut memory = Fixture::with_maps(maps.clone());
            memory.write_word(ROOT + 8 * (LEAF >> shape.root_reach_bits()), LEAF);
            for number in 0..200 {
                let (page, record) = (LEAF + 0x40_0000 + (number << 12), RECORDS + 128 * number);
                memory.write_word(LEAF + 8 * slot(page), 3 << 48 | record);
                let extent = if number < extents { [3 << 20, page, 4096] } else { [3 << 20, 0x7e00_0000_0000, 1 << 42] };
                extent.iter().enumerate().for_each(|(at, &word)| memory.write_word(record + 8 * at as u64, word));
            }
            leads_to_extents(&memory, &mapped, ROOT, shape)
        };
        assert_eq!([1, 60, 70, 200].map(is_page_map), [false, false, true, true]);
    }
}
