//! glibc's malloc: detect → locate → walk → account.

pub mod layout;
pub mod lists;
pub mod locate;
pub mod mmapped;
pub mod parse;
mod parts;
pub mod regions;
pub mod sample;
pub mod tcache;
pub mod trim;
pub mod walk;
pub mod walker;

use std::ops::Range;

use self::layout::{Arena, Layout, MallocPar, NEXT_AFTER_BINS, PAR_BYTES};
use self::locate::{LayoutCache, Located, locate, read_arena};
use self::regions::{Regions, regions};
use self::sample::Telling;
use self::trim::TrimPlan;
use self::walker::Walker;
use super::account::{ArenaAccount, HeapAccount, Level, Setting, Sums};
use super::chunks::{ARENA_NONE, ChunkState, ChunkTable};
use super::memory::{Memory, MemoryError};
use super::objects::{anonymous_ranges, joined, unbacked_ranges, without};
use super::pace::Pacer;
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::reader::{HeapReader, HeapWalk, Sight};
use crate::allocator::Allocator;
use crate::heap::occupancy::{Holder, OccupancyBuilder};
use crate::process::{Backing, Maps};

/// Chunks' sizes differ from glibc's account by at most this much at rest: a brk heap that does not begin 16-aligned.
const ACCOUNT_SLACK_BYTES: u64 = 16;

/// Reads glibc's heaps.
#[derive(Debug, Default)]
pub struct Reader(LayoutCache);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Glibc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        take(sight, &mut self.0)
    }
}

/// Takes glibc's census. `None` if no main arena is in use.
///
/// # Errors
/// If the process has ended, or the permission to read is missing.
fn take(sight: &Sight<'_>, layouts: &mut LayoutCache) -> Result<Option<HeapWalk>, MemoryError> {
    let &Sight { memory, maps, objects, options, taken } = sight;
    let (level, pacer) = (options.level, Pacer::start(options.pace));
    let Some(mut located) = locate(memory, maps, objects, layouts) else { return Ok(None) };
    let par = located.par;
    let mut layout = located.layout;
    let arenas = read_arenas(memory, &mut layout, &located.arenas, par.as_ref());
    let anonymous = anonymous_ranges(maps);
    let mut regions = regions(memory, &layout, &arenas, par.as_ref(), &anonymous, brk_heap(maps, par.as_ref()));
    let mut pages = PageCache::new(memory);
    let mut account = HeapAccount::new(Allocator::Glibc, String::new());
    account.overhead_bytes = regions.overhead_bytes;
    account.settings = par.as_ref().map(settings).unwrap_or_default();
    let mut quality = WalkQuality::default();
    let mut table = ChunkTable::for_glibc();
    let sample = (level == Level::Sampled).then(|| {
        let tcache_key = tcache_key(memory, &mut located, &mut layout, &arenas, layouts);
        let telling = Telling { tcache_key, fast_sizes: lists::fastbin_sizes(&arenas), heaps: heap_span(&regions), layout };
        sample::estimate(memory, &regions.plans, &telling, pacer.clone())
    });
    // If nearly all windows are without a chunk, the heap consists of large chunks, of which a walk reads little but the headers.
    let is_walked = level == Level::Full || sample.is_some_and(|sample| sample.lost_ratio() > sample::LOST_RATIO_MAX);
    let level = if is_walked { Level::Full } else { level };
    match level {
        Level::Top | Level::Sampled => {
            account.arenas = arena_accounts(&arenas, &regions, &mut pages, &mut account);
            account.ladder.extent_bytes = arenas.iter().map(|arena| arena.system_bytes).fold(0, u64::saturating_add);
            account.top_bytes = arenas.iter().map(|arena| arena.top_bytes).fold(0, u64::saturating_add);
            if let Some(sample) = sample {
                quality = sample.quality;
                add_mmapped(memory, par.as_ref(), (&regions, taken), &mut table, &mut account, &mut quality)?;
                table.sort_regions();
                account.live_bytes_est = Some(sample.live_bytes_est.saturating_add(account.mmapped_bytes));
                account.live_bytes_stderr = Some(sample.live_bytes_stderr);
                account.occupancy_est = sample.occupancy;
            } else if let Some(par) = par {
                account.mmapped_bytes = par.mmapped_bytes;
                account.mmapped_allocations = u64::from(par.mmapped_allocations);
                account.ladder.extent_bytes = account.ladder.extent_bytes.saturating_add(par.mmapped_bytes);
            }
            let extent_bytes = account.ladder.extent_bytes;
            quality.judge(extent_bytes, true);
        }
        Level::Full => {
            let key = tcache_key(memory, &mut located, &mut layout, &arenas, layouts);
            let mut walker = Walker::new(memory, layout, pacer);
            walker.tcache_key = key;
            walker.fast_sizes = lists::fastbin_sizes(&arenas);
            walker.heaps = heap_span(&regions);
            let mut extents = Vec::new();
            // The least that each arena held at the start of the walk, at the end of its regions, and at the end of the walk.
            let mut system_bytes: Vec<u64> = arenas.iter().map(|arena| arena.system_bytes).collect();
            for (plan, extent) in regions.plans.iter().zip(&regions.extents) {
                let first = walker.table.regions().len();
                walker.walk(plan);
                if let (Some(own), Some(arena)) = (system_bytes.get_mut(plan.arena as usize), arenas.get(plan.arena as usize)) {
                    *own = (*own).min(read_system_bytes(memory, &layout, arena));
                }
                if plan.bounds.goes_on_after_top {
                    let pieces = walker.table.regions().get(first..).unwrap_or_default();
                    extents.extend(pieces.iter().filter(|piece| piece.end > piece.start).map(|piece| (plan.arena, piece.start..piece.end)));
                } else {
                    extents.push(extent.clone());
                }
            }
            regions.extents = extents;
            walker.table.sort_regions();
            if walker.tcache_key.is_none() {
                lists::mark_thread_caches(memory, &mut walker, &mut layout, par.map_or(0, |par| par.tcache_count));
            }
            lists::mark_fastbins(memory, &mut walker, &layout, &arenas);
            quality = walker.quality;
            quality.windows = walker.pacer.windows;
            quality.read_bytes = walker.pacer.read_bytes;
            table = walker.table;
            let own = read_arenas(memory, &mut layout, &located.arenas, par.as_ref());
            account.arenas = arena_accounts(&arenas, &regions, &mut pages, &mut account);
            for (least, arena) in system_bytes.iter_mut().zip(&arenas) {
                let now = own.iter().find(|other| other.addr == arena.addr).map_or(0, |other| other.system_bytes);
                *least = (*least).min(now);
            }
            settle_extent(
                &mut account,
                &mut quality,
                &table,
                [&arenas, &own],
                system_bytes.iter().fold(0, |sum, own| sum.saturating_add(*own)),
            );
            add_mmapped(memory, par.as_ref(), (&regions, taken), &mut table, &mut account, &mut quality)?;
            table.sort_regions();
            fill_account(&table, &mut account, &quality);
            let plan = TrimPlan {
                brk_top: regions.brk_top.clone(),
                top_unit_bytes: par.map_or(0, |par| par.thp_bytes),
                huge_mappings: huge_mappings(maps),
            };
            fill_pages(&table, &plan, &regions, &mut pages, &mut account);
            let balanced = account.off_balance_bytes() == Some(0);
            quality.judge(account.ladder.extent_bytes, quality.balanced && balanced);
            if sample.is_some() {
                account.live_bytes_est = account.ladder.live_bytes;
                account.live_bytes_stderr = account.ladder.live_bytes.map(|_| 0);
            }
        }
    }
    if account.ladder.extent_bytes == 0 {
        // Set up, but never used: another allocator serves malloc, or the program has not called it yet.
        return Ok(None);
    }
    account.ladder.unknown_bytes = Some(quality.unknown_bytes);
    account.layout = layout.name();
    Ok(Some(HeapWalk { account, quality, chunks: table, extents: regions.extents }))
}

fn read_arenas(memory: &dyn Memory, layout: &mut Layout, addrs: &[u64], par: Option<&MallocPar>) -> Vec<Arena> {
    let huge = par.map_or(0, |par| par.huge_page_bytes);
    addrs.iter().enumerate().filter_map(|(index, &addr)| read_arena(memory, layout, addr, index == 0, huge)).collect()
}

/// The brk heap: from the first to the last mapping of that name (madvise splits it); in a core file, which has no names, the anonymous
/// mapping in which `sbrk_base` lies.
fn brk_heap(maps: &Maps, par: Option<&MallocPar>) -> Option<Range<u64>> {
    let mut named = maps.mappings.iter().filter(|mapping| matches!(&mapping.backing, Backing::Named(name) if name == "[heap]"));
    if let Some(first) = named.next() {
        return Some(first.start.0..named.next_back().unwrap_or(first).end.0);
    }
    let base = par.map(|par| par.sbrk_base).filter(|&base| base != 0)?;
    let anonymous = joined(&anonymous_ranges(maps));
    super::objects::range_of(&anonymous, base).map(|range| range.start.min(base)..range.end)
}

fn heap_span(regions: &Regions) -> Range<u64> {
    let start = regions.extents.iter().map(|(_, range)| range.start).min().unwrap_or(0);
    start..regions.extents.iter().map(|(_, range)| range.end).max().unwrap_or(0)
}

fn huge_mappings(maps: &Maps) -> Vec<Range<u64>> {
    let is_huge = |mapping: &&crate::process::Mapping| mapping.path().is_some_and(|path| path.starts_with("/anon_hugepage"));
    maps.mappings.iter().filter(is_huge).map(|mapping| mapping.start.0..mapping.end.0).collect()
}

/// The key of cached chunks: known from another process of the same build, or read from the caches that lie at the start of heaps (up to
/// 2.42 the first chunk is the first thread's cache) and found to be a word of libc's own data. Without that check a walk under load once
/// took a pattern in the program's data for the key.
fn tcache_key(memory: &dyn Memory, located: &mut Located, layout: &mut Layout, arenas: &[Arena], layouts: &mut LayoutCache) -> Option<u64> {
    let count_max = located.par.map_or(0, |par| par.tcache_count);
    let first_chunks: Vec<u64> = arenas
        .iter()
        .map(|arena| match located.par.filter(|_| arena.is_main) {
            Some(par) => par.sbrk_base.next_multiple_of(16),
            None => arena.addr.saturating_add(layout.state_bytes()).next_multiple_of(16),
        })
        .filter(|&chunk| chunk != 0)
        .collect();
    let mut found = None;
    for chunk in first_chunks {
        let Some(size) = memory.word(chunk.wrapping_add(8)) else { continue };
        let Some(cache) = tcache::read(memory, layout, chunk.wrapping_add(16), size & !layout::FLAGS, count_max) else { continue };
        if found.is_none() && cache.key != 0 && located.data.chunks_exact(8).any(|word| super::memory::word_at(word, 0) == cache.key) {
            found = Some(cache.key);
        }
    }
    if layout.safe_linking.is_none() {
        layout.safe_linking = lists::learn_links_from_fastbins(memory, arenas);
    }
    match found {
        Some(key) => {
            layouts.learn_tcache_key(located, key);
            Some(key)
        }
        None => layouts.tcache_key(memory, located),
    }
}

fn settings(par: &MallocPar) -> Vec<Setting> {
    vec![
        Setting { name: "M_TRIM_THRESHOLD", value: par.trim_threshold_bytes },
        Setting { name: "M_TOP_PAD", value: par.top_pad_bytes },
        Setting { name: "M_MMAP_THRESHOLD", value: par.mmap_threshold_bytes },
        Setting { name: "dynamic_threshold_off", value: u64::from(par.is_threshold_fixed) },
        Setting { name: "M_ARENA_MAX", value: par.arena_max },
        Setting { name: "tcache_count", value: par.tcache_count },
        Setting { name: "thp_pagesize", value: par.thp_bytes },
        Setting { name: "hugetlb_pagesize", value: par.huge_page_bytes },
    ]
}

fn arena_accounts(arenas: &[Arena], regions: &Regions, pages: &mut PageCache<'_>, account: &mut HeapAccount) -> Vec<ArenaAccount> {
    let mut accounts: Vec<ArenaAccount> = arenas
        .iter()
        .map(|arena| ArenaAccount { address: arena.addr, attached_threads: Some(arena.attached_threads), ..ArenaAccount::default() })
        .collect();
    for (index, range) in &regions.extents {
        let residency = pages.residency(range.clone());
        account.ladder.resident_bytes = account.ladder.resident_bytes.saturating_add(residency.resident_bytes);
        account.details.swapped_bytes = account.details.swapped_bytes.saturating_add(residency.swapped_bytes);
        account.details.huge_bytes = account.details.huge_bytes.saturating_add(residency.huge_bytes);
        if let Some(arena) = accounts.get_mut(*index as usize) {
            arena.pieces += 1;
            arena.extent_bytes = arena.extent_bytes.saturating_add(range.end - range.start);
            arena.resident_bytes = arena.resident_bytes.saturating_add(residency.resident_bytes);
        }
    }
    accounts
}

/// The bytes that an arena has obtained from the system so far.
fn read_system_bytes(memory: &dyn Memory, layout: &Layout, arena: &Arena) -> u64 {
    let place = arena.addr.wrapping_add(layout.bins_offset).wrapping_add(NEXT_AFTER_BINS + 24);
    memory.word(place).unwrap_or(arena.system_bytes)
}

/// Compares the bytes walked with glibc's own `system_mem`, before, while the regions' ends were walked, and after. Bytes missing from
/// the least of these (`least_bytes`, summed over the arenas) are unknown; if more was walked than the heap's own change explains, the
/// census is wrong.
fn settle_extent(account: &mut HeapAccount, quality: &mut WalkQuality, table: &ChunkTable, arenas: [&Vec<Arena>; 2], least_bytes: u64) {
    let walked: u64 = table.regions().iter().map(|region| region.end - region.start).fold(account.overhead_bytes, u64::saturating_add);
    let [before, after] = arenas.map(|list| list.iter().map(|arena| arena.system_bytes).fold(0, u64::saturating_add));
    let missing = least_bytes.saturating_sub(walked);
    quality.unknown_bytes = quality.unknown_bytes.saturating_add(missing);
    account.ladder.extent_bytes = walked.saturating_add(missing);
    // In a running process the heap may have grown and shrunk again between the two reads.
    let moved = before.abs_diff(after).max(if quality.broken_headers > 0 { walked / 64 } else { 0 });
    quality.balanced = walked <= before.max(after).saturating_add(ACCOUNT_SLACK_BYTES).saturating_add(moved);
}

/// Adds the chunks that were mapped one by one. `mp_` gives their number and bytes; the list is complete when it agrees.
fn add_mmapped(
    memory: &dyn Memory,
    par: Option<&MallocPar>,
    (regions, others): (&Regions, &[Range<u64>]),
    table: &mut ChunkTable,
    account: &mut HeapAccount,
    quality: &mut WalkQuality,
) -> Result<(), MemoryError> {
    let Some(par) = par else { return Ok(()) };
    // The mappings may have changed a lot since the walk began.
    let maps = memory.maps()?;
    let now = memory.bytes(par.addr, PAR_BYTES).and_then(|bytes| MallocPar::parse(par.shape, par.addr, &bytes, |_| true)).unwrap_or(*par);
    let extents = regions.extents.iter().map(|(_, extent)| extent);
    let mut taken: Vec<Range<u64>> = regions.reserved.iter().chain(extents).chain(others).cloned().collect();
    taken.sort_by_key(|range| range.start);
    let taken = joined(&taken);
    let free = without(&anonymous_ranges(&maps), &taken);
    let found = mmapped::find(memory, &free, &without(&unbacked_ranges(&maps), &taken), now.mmapped_allocations);
    let mut pages = PageCache::new(memory);
    let mut listed = 0u64;
    for chunk in &found.chunks {
        table.begin_region(chunk.start, ARENA_NONE);
        if chunk.offset_bytes > 0 {
            table.push(chunk.offset_bytes, ChunkState::Overhead);
        }
        table.push(chunk.bytes - chunk.offset_bytes, ChunkState::Mmapped);
        listed = listed.saturating_add(chunk.bytes);
        let residency = pages.residency(chunk.start..chunk.start.saturating_add(chunk.bytes));
        account.ladder.resident_bytes = account.ladder.resident_bytes.saturating_add(residency.resident_bytes);
        account.details.swapped_bytes = account.details.swapped_bytes.saturating_add(residency.swapped_bytes);
        account.details.huge_bytes = account.details.huge_bytes.saturating_add(residency.huge_bytes);
    }
    // The list is exact when its number is right. glibc 2.43 adds 16 bytes too many at each mremap, so the number decides, not the bytes.
    account.mmapped_allocations = u64::from(now.mmapped_allocations);
    account.mmapped_bytes = if found.is_complete { listed } else { now.mmapped_bytes };
    account.ladder.extent_bytes = account.ladder.extent_bytes.saturating_add(account.mmapped_bytes);
    if !found.is_complete {
        quality.broken_lists += 1;
    }
    Ok(())
}

fn fill_account(table: &ChunkTable, account: &mut HeapAccount, quality: &WalkQuality) {
    let sums = Sums::of(table, &mut account.arenas);
    // The padding in front of aligned mmapped chunks was pushed as overhead; it is part of the mapping and so of mmapped_bytes.
    let padding: u64 = table
        .regions()
        .iter()
        .filter(|region| region.arena == ARENA_NONE)
        .flat_map(|region| table.chunks_of(region))
        .filter(|chunk| chunk.state == ChunkState::Overhead)
        .map(|chunk| chunk.bytes)
        .sum();
    account.ladder.live_bytes = Some(sums.bytes_in(ChunkState::Live) + account.mmapped_bytes);
    account.live_allocations = Some(sums.chunks_in(ChunkState::Live) + account.mmapped_allocations);
    account.fastbin_bytes = Some(sums.bytes_in(ChunkState::Fastbin));
    account.details.cached_bytes = Some(sums.bytes_in(ChunkState::Tcache) + sums.bytes_in(ChunkState::Fastbin));
    account.free_bytes = Some(sums.bytes_in(ChunkState::Free));
    account.free_chunks = Some(sums.chunks_in(ChunkState::Free));
    account.top_bytes = sums.bytes_in(ChunkState::Top);
    account.overhead_bytes += sums.bytes_in(ChunkState::Overhead) - padding;
    account.ladder.unknown_bytes = Some(quality.unknown_bytes);
    account.largest_free_bytes = Some(sums.largest_free_bytes);
    account.size_classes = sums.size_classes;
}

fn fill_pages(table: &ChunkTable, plan: &TrimPlan, regions: &Regions, pages: &mut PageCache<'_>, account: &mut HeapAccount) {
    pages.forget();
    let trim = trim::predict(table, plan, pages);
    pages.forget();
    let mut builder = OccupancyBuilder::new(|range: Range<u64>| pages.resident_bytes(range));
    for region in table.regions() {
        // heap_info and arena lie before the first chunk of a heap.
        if let Some((_, extent)) = regions.extents.iter().find(|(_, extent)| extent.contains(&region.start)) {
            builder.add(extent.start..region.start, Holder::Other);
        }
        table.chunks_of(region).for_each(|chunk| builder.add(chunk.start..chunk.end(), chunk.state.holder()));
    }
    let occupancy = builder.finish();
    let whole = occupancy.cached_unpinned_bytes + occupancy.free_unpinned_bytes + occupancy.top_unpinned_bytes;
    account.ladder.trimmable_bytes = Some(trim.bytes());
    account.ladder.pinned_bytes = Some(occupancy.pinned_bytes);
    account.details.kept_bytes = Some(whole.saturating_sub(trim.bytes()));
    account.trimmable_top_bytes = Some(trim.top_bytes);
    for (index, arena) in account.arenas.iter_mut().enumerate() {
        let released = u32::try_from(index).ok().and_then(|index| trim.arenas.get(&index)).copied().unwrap_or_default();
        (arena.trimmable_bytes, arena.trimmable_ranges) = (Some(released.bytes), Some(released.runs));
    }
    account.occupancy = Some(occupancy);
}
