//! musl's mallocng (1.2.1 on), dynamic or static.
//!
//! `struct meta_area` (src/malloc/mallocng/meta.h) is a page: {secret, next, nslots, slots}; `struct meta` is {prev, next, mem, avail_mask,
//! freed_mask, last_idx:5 freeable:1 sizeclass:6 maplen:52}. A group of slots begins 16 bytes after `mem`; it is a mapping of its own
//! (maplen pages), a piece of an object's data that was left over, or a slot of a larger group; its first word leads back to its meta.
//!
//! It is searched for where musl can be: in its own library, or in a program without glibc.

use std::ops::Range;

use super::account::{HeapAccount, Level, Sums, occupancy_of};
use super::chunks::{ChunkState, ChunkTable};
use super::layout_cache::ByBuildId;
use super::memory::{Memory, MemoryError, USER_END, is_user_address, word_at, word32_at};
use super::objects::Objects;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{HeapReader, HeapWalk, Sight};
use crate::allocator::Allocator;

/// Unit of meta areas and of the lengths of mappings, whatever the kernel's pages are (meta.h: `get_meta`, `get_stride`).
const PAGE_BYTES: u64 = 4096;
/// Slots' strides in 16-byte units (`__malloc_size_classes`).
const CLASS_UNITS: [u64; 48] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18, 20, 25, 31, 36, 42, 50, 63, 72, 84, 102, 127, 146, 170, 204, 255, 292, 340, 409, 511, 584,
    682, 818, 1023, 1169, 1364, 1637, 2047, 2340, 2730, 3276, 4095, 4680, 5460, 6552, 8191,
];
/// Before the first slot of a group, and before a block.
const UNIT: u64 = 16;
/// Bytes of a meta, and of a meta_area before its metas.
const META_BYTES: usize = 40;
const AREA_HEADER_BYTES: usize = 24;
/// Metas that fit a page.
const METAS_MAX: u32 = 101;
/// Meta areas followed: 6.6 million groups.
const AREAS_MAX: usize = 1 << 16;
/// How far before the pointer to the first area the search for the secret begins: `struct malloc_context` begins with it.
const SECRET_WORDS_BEFORE: usize = 12;
/// A libc's data is smaller than this.
const DATA_BYTES_MAX: u64 = 16 << 20;
/// Groups of the first meta area that are checked for pointing back to their metas.
const GROUPS_ASKED: usize = 16;
/// Groups in slots of groups in slots: sizes grow by at least two each time.
const DEPTH_MAX: usize = 24;

/// A group of slots.
#[derive(Debug, Clone, Copy)]
struct Group {
    mem: u64,
    end: u64,
    stride: u64,
    slots: u64,
    used: u64,
    is_mapping: bool,
}

/// Reads musl's heaps.
#[derive(Debug, Default)]
pub struct Reader(LayoutCache);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Musl
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        take(sight.memory, sight.objects, &mut self.0, sight.options.level)
    }
}

/// Takes musl's census. `None` if no mallocng is in use.
///
/// # Errors
/// If the process has ended, or the permission to read is missing.
fn take(memory: &dyn Memory, objects: &Objects<'_>, layouts: &mut LayoutCache, level: Level) -> Result<Option<HeapWalk>, MemoryError> {
    if !can_be_here(objects) {
        return Ok(None);
    }
    let Some((name, secret, first)) = locate(memory, objects, layouts) else { return Ok(None) };
    let (groups, torn) = groups(memory, secret, first);
    let mut account = HeapAccount::new(Allocator::Musl, format!("musl mallocng in {name}"));
    let mut table = ChunkTable::for_musl();
    let mut extents: Vec<Range<u64>> = Vec::new();
    let mut rest = groups.as_slice();
    while let Some((group, later)) = rest.split_first() {
        rest = later;
        // Groups inside this one follow it in the list, sorted by address.
        let inside = rest.partition_point(|other| other.mem < group.end);
        let (nested, later) = rest.split_at(inside);
        rest = later;
        table.begin_region(group.mem, 0);
        emit(group, nested, &mut table, DEPTH_MAX);
        extents.push(group.mem..group.end);
    }
    table.sort_regions();
    let sums = Sums::of(&table, &mut []);
    let mut pages = PageCache::new(memory);
    for extent in &extents {
        let residency = pages.residency(extent.clone());
        account.ladder.extent_bytes += extent.end - extent.start;
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
    }
    account.ladder.live_bytes = Some(sums.bytes_in(ChunkState::Live));
    account.live_allocations = Some(sums.chunks_in(ChunkState::Live));
    account.free_bytes = Some(sums.bytes_in(ChunkState::Free));
    account.free_chunks = Some(sums.chunks_in(ChunkState::Free));
    account.details.cached_bytes = Some(0);
    account.overhead_bytes = sums.bytes_in(ChunkState::Overhead);
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
    if level == Level::Full {
        let occupancy = occupancy_of(&table, &mut pages);
        // mallocng unmaps a group when its last slot is freed and has no call that returns more.
        account.ladder.trimmable_bytes = Some(0);
        account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
        account.details.kept_bytes = Some(occupancy.free_unpinned_bytes);
        account.occupancy = Some(occupancy);
    }
    let used = account.ladder.live_bytes.unwrap_or(0) + account.free_bytes.unwrap_or(0) + account.overhead_bytes;
    let mut quality = WalkQuality { windows: groups.len() as u64, broken_headers: torn, ..WalkQuality::default() };
    quality.judge(account.ladder.extent_bytes, used == account.ladder.extent_bytes && torn.saturating_mul(100) <= groups.len() as u64);
    let extents = extents.into_iter().map(|extent| (0, extent)).collect();
    // Words that look like the secret but lead to no group belong to other code: glibc's loader, for example.
    Ok((account.ladder.extent_bytes > 0).then_some(HeapWalk { account, quality, chunks: table, extents }))
}

/// Where the pointer to the first meta area was found before, as a distance from its object's base, by build id.
#[derive(Debug, Default)]
struct LayoutCache {
    by_build_id: ByBuildId<u64>,
}

/// Finds the secret and the first meta area: a pointer to a page whose first word is a word shortly before the pointer.
fn locate(memory: &dyn Memory, objects: &Objects<'_>, layouts: &mut LayoutCache) -> Option<(String, u64, u64)> {
    objects.iter().filter(|one| one.bytes() <= DATA_BYTES_MAX).find_map(|one| {
        let (object, data) = (one.object(), one.data());
        let area_at = |at: usize| {
            let area = word_at(&data, at);
            if area == 0 || !area.is_multiple_of(PAGE_BYTES) || !is_user_address(area) {
                return None;
            }
            // The secret is random: a small number is not accepted.
            let before = data.get(at.saturating_sub(8 * SECRET_WORDS_BEFORE)..at)?;
            if !before.chunks_exact(8).any(|word| word_at(word, 0) > 1 << 40) {
                return None;
            }
            let header = memory.bytes(area, AREA_HEADER_BYTES)?;
            let (secret, slots) = (word_at(&header, 0), word32_at(&header, 16));
            let is_first =
                secret > 1 << 40 && (1..=METAS_MAX).contains(&slots) && before.chunks_exact(8).any(|word| word_at(word, 0) == secret);
            (is_first && leads_back(memory, area)).then(|| (object.name.clone(), secret, area))
        };
        let build_id = one.build_id();
        let remembered = layouts.by_build_id.get(build_id.as_ref()).map(|distance| object.base.wrapping_add(distance));
        let remembered = remembered.and_then(|addr| usize::try_from(addr.checked_sub(object.range.start)?).ok());
        if let Some(found) = remembered.and_then(area_at) {
            return Some(found);
        }
        data.words().map(|(number, _)| 8 * number).find_map(|at| {
            let found = area_at(at)?;
            layouts.by_build_id.remember(build_id.as_ref(), (object.range.start + at as u64).wrapping_sub(object.base));
            Some(found)
        })
    })
}

/// Whether musl can be the C library: it is mapped, or no glibc is.
fn can_be_here(objects: &Objects<'_>) -> bool {
    let any = |is: fn(&str) -> bool| objects.iter().any(|one| is(&one.object().name));
    any(is_musls) || !any(|name| name.starts_with("libc.so.6") || name.starts_with("libc-2."))
}

/// Whether a file's name is that of musl's library, which is its loader too.
fn is_musls(name: &str) -> bool {
    name.starts_with("ld-musl-") || name.starts_with("libc.musl-") || name == "libc.so"
}

/// Whether the groups of the first meta area point back to their metas: most of those that can be read, and one at least. A page that only
/// looks like a meta area has no such groups.
fn leads_back(memory: &dyn Memory, area: u64) -> bool {
    let Some(page) = memory.bytes(area, PAGE_BYTES as usize) else { return false };
    let metas = page.get(AREA_HEADER_BYTES..).unwrap_or_default().chunks_exact(META_BYTES).enumerate();
    let in_use = metas.filter(|(_, meta)| matches!(group(meta), Ok(Some(_)))).take(GROUPS_ASKED);
    let (mut back, mut elsewhere) = (0, 0);
    for (number, meta) in in_use {
        let own = area + (AREA_HEADER_BYTES + number * META_BYTES) as u64;
        match memory.word(word_at(meta, 16)) {
            Some(word) if word == own => back += 1,
            Some(_) => elsewhere += 1,
            None => {}
        }
    }
    back > elsewhere
}

/// All groups in use, sorted by address, larger ones first; and the number of invalid metas.
fn groups(memory: &dyn Memory, secret: u64, first: u64) -> (Vec<Group>, u64) {
    let (mut groups, mut torn) = (Vec::new(), 0);
    let mut area = first;
    for _ in 0..AREAS_MAX {
        if area == 0 || !area.is_multiple_of(PAGE_BYTES) {
            break;
        }
        let Some(page) = memory.bytes(area, PAGE_BYTES as usize).filter(|page| word_at(page, 0) == secret) else {
            torn += 1;
            break;
        };
        for meta in page.get(AREA_HEADER_BYTES..).unwrap_or_default().chunks_exact(META_BYTES).take(word32_at(&page, 16) as usize) {
            match group(meta) {
                Ok(Some(group)) => groups.push(group),
                Ok(None) => {}
                Err(()) => torn += 1,
            }
        }
        area = word_at(&page, 8);
    }
    groups.sort_unstable_by_key(|group| (group.mem, std::cmp::Reverse(group.end)));
    groups.dedup_by_key(|group| group.mem);
    (groups, torn)
}

/// `Ok(None)`: a meta that is not in use.
fn group(meta: &[u8]) -> Result<Option<Group>, ()> {
    let (mem, avail, freed, bits) = (word_at(meta, 16), word32_at(meta, 24), word32_at(meta, 28), word_at(meta, 32));
    if mem == 0 {
        return Ok(None);
    }
    let (last, class, pages) = (bits & 31, bits >> 6 & 63, bits >> 12);
    let stride = match CLASS_UNITS.get(usize::try_from(class).unwrap_or(usize::MAX)) {
        Some(units) => units * UNIT,
        None if pages > 0 && last == 0 => pages.checked_mul(PAGE_BYTES).ok_or(())?.checked_sub(UNIT).ok_or(())?,
        None => return Err(()),
    };
    // A single slot in a mapping of its own has all of it.
    let stride = if pages > 0 && last == 0 { pages.checked_mul(PAGE_BYTES).ok_or(())? - UNIT } else { stride };
    let slots = last + 1;
    let size = if pages > 0 { pages.checked_mul(PAGE_BYTES).ok_or(())? } else { UNIT + stride * slots };
    let end = mem.checked_add(size).filter(|&end| end < USER_END).ok_or(())?;
    if mem % UNIT != 0 || !is_user_address(mem) || UNIT + stride * slots > size {
        return Err(());
    }
    let all = (2u64 << last) - 1;
    let used = all & !u64::from(avail) & !u64::from(freed);
    Ok(Some(Group { mem, end, stride, slots, used, is_mapping: pages > 0 }))
}

/// Pushes a group's slots; slots that hold groups are opened.
fn emit(group: &Group, nested: &[Group], table: &mut ChunkTable, depth: usize) {
    table.push(UNIT, ChunkState::Overhead);
    let mut nested = nested;
    for slot in 0..group.slots {
        let start = group.mem + UNIT + slot * group.stride;
        let end = start + group.stride;
        let inside = nested.partition_point(|other| other.mem < end);
        let (here, later) = nested.split_at(inside);
        nested = later;
        let is_used = group.used >> slot & 1 == 1;
        match here.split_first().filter(|(inner, _)| is_used && depth > 0 && inner.mem >= start && inner.end <= end && !inner.is_mapping) {
            Some((inner, deeper)) => {
                table.push(inner.mem - start, ChunkState::Overhead);
                let deeper_end = deeper.partition_point(|other| other.mem < inner.end);
                emit(inner, deeper.get(..deeper_end).unwrap_or_default(), table, depth - 1);
                table.push(end - inner.end, ChunkState::Overhead);
            }
            None => {
                table.push(group.stride, if is_used { ChunkState::Live } else { ChunkState::Free });
            }
        }
    }
    table.push(group.end - (group.mem + UNIT + group.slots * group.stride), ChunkState::Overhead);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::Fixture;
    use crate::process::Maps;

    const SECRET: u64 = 0x1234_5678_9abc_def0;
    const DATA: u64 = 0x7f00_0000_1000;
    const AREA: u64 = 0x7f00_0001_0000;
    const GROUP: u64 = 0x7f00_0002_0000;

    /// A library's data with the secret and the first meta area; one group of 30 slots of 16 bytes, whose first word is `back`.
    fn taken(library: &str, back: u64) -> Option<HeapWalk> {
        let maps = format!(
            "7f0000000000-7f0000001000 r--p 00000000 08:01 5 {library}\n7f0000001000-7f0000002000 rw-p 00001000 08:01 5 {library}\n\
             7f0000010000-7f0000030000 rw-p 00000000 00:00 0\n"
        );
        let maps = Maps::parse(maps.as_bytes());
        let mut memory = Fixture::with_maps(maps.clone());
        memory.write_word(DATA + 64, SECRET);
        memory.write_word(DATA + 96, AREA);
        let meta = AREA + AREA_HEADER_BYTES as u64;
        for (addr, word) in [(AREA, SECRET), (AREA + 16, 1), (meta + 16, GROUP), (meta + 32, 29), (GROUP, back)] {
            memory.write_word(addr, word);
        }
        take(&memory, &Objects::of(&memory, &maps), &mut LayoutCache::default(), Level::Full).ok().flatten()
    }

    #[test]
    fn a_meta_area_is_musls_if_its_groups_lead_back_and_musl_can_be_there() {
        let back = AREA + AREA_HEADER_BYTES as u64;
        let live = |walk: Option<HeapWalk>| walk.and_then(|walk| walk.account.ladder.live_bytes);
        assert_eq!(live(taken("/lib/ld-musl-x86_64.so.1", back)), Some(480));
        assert_eq!(live(taken("/usr/bin/static", back)), Some(480));
        // Looks like a meta area, but nothing points back: words of a program's own tables.
        assert_eq!(live(taken("/usr/bin/static", back + 40)), None);
        assert_eq!(live(taken("/usr/lib/libc.so.6", back)), None);
    }
}
