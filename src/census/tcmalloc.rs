//! gperftools' tcmalloc 2.x: found by its page map, counted by spans.
//!
//! `PageMap2` is a radix tree from 8 KiB page to `Span`: {start page, length, next, prev, objects, refcount:16 sizeclass:8 location:2 …}.
//! A span of small objects counts those in use, including those in caches; pinned bytes are not known. [`blocks`] lists the objects:
//! those on the span's own list are free (`Span::objects`, linked by their first words), all others may be in use or in a cache.

use std::ops::Range;

use super::account::HeapAccount;
use super::chunks::{ChunkState, ChunkTable};
use super::memory::{Memory, MemoryError, USER_END, is_user_address, word_at, word32_at};
use super::objects::{Objects, joined, range_of, unbacked_ranges};
use super::page_cache::PageCache;
use super::quality::WalkQuality;
use super::radix::{self, Roots, Shape};
use super::reader::{HeapReader, HeapWalk, Sight};
use crate::allocator::Allocator;
use crate::heap::residency::whole_pages;
use crate::process::Maps;

const SHAPE: Shape = Shape {
    root_words: 1 << 17,
    node_bits: 0,
    leaf_bits: 18,
    entry_words: 1,
    leaf_offset: 0,
    page_bits: 13,
    alignment: 8,
    filled_max: 2048,
    object_bytes_min: 0,
};
const PAGE_BYTES: u64 = 1 << SHAPE.page_bits;
const SPAN_BYTES: usize = 48;
/// Maximum length of a span: 128 GiB.
const SPAN_PAGES_MAX: u64 = 1 << 24;
/// Size classes of a build: `kClassSizesMax`.
const CLASSES_MAX: usize = 128;
/// Spans kept at most: 16 bytes each while they are collected.
const SPANS_MAX: usize = 1 << 24;

/// Where a span is.
const IN_USE: u32 = 0;
const ON_NORMAL_FREELIST: u32 = 1;

/// Reads tcmalloc's heaps.
#[derive(Debug, Default)]
pub struct Reader(Roots);

impl HeapReader for Reader {
    fn allocator(&self) -> Allocator {
        Allocator::Tcmalloc
    }

    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        take(sight.memory, sight.maps, sight.objects, &mut self.0, false)
    }

    fn read_blocks(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        take(sight.memory, sight.maps, sight.objects, &mut self.0, true)
    }
}

/// Takes tcmalloc's census, with every object as a chunk or without. `None` if no page map is in use.
fn take(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    roots: &mut Roots,
    keeps_chunks: bool,
) -> Result<Option<HeapWalk>, MemoryError> {
    let owns = |entry: radix::Entry, addr: u64| {
        let word = entry.first;
        let page = addr >> SHAPE.page_bits;
        word.is_multiple_of(8)
            && is_user_address(word)
            && memory.bytes(word, 16).is_some_and(|bytes| {
                let (start, length) = (word_at(&bytes, 0), word_at(&bytes, 8));
                length > 0 && length < SPAN_PAGES_MAX && start <= page && page - start < length
            })
    };
    let Some(found) = radix::find(memory, maps, objects, SHAPE, roots, owns) else { return Ok(None) };
    let data = objects.iter().find(|one| one.object() == &found.object).map(|one| one.data()).unwrap_or_default();
    let Some(classes) = class_table(&data) else { return Ok(None) };
    let mut spans: Vec<(u64, u64)> = Vec::new();
    radix::visit(memory, found.root, SHAPE, |addr, entry| {
        let span = entry.first;
        if span % 8 == 0 && is_user_address(span) && spans.len() < SPANS_MAX {
            spans.push((span, addr));
        }
    });
    // A span counts once, and only if its first page's entry points to it: other entries may be old.
    spans.sort_unstable();
    let mapped = unbacked_ranges(maps);
    let layout = format!("gperftools tcmalloc, page map in {}, {} size classes", found.object.name, classes.len() - 1);
    let mut account = HeapAccount::new(Allocator::Tcmalloc, layout);
    let mut addrs: Vec<u64> = spans.iter().map(|&(span, _)| span).collect();
    addrs.dedup();
    let mut extents: Vec<Range<u64>> = Vec::new();
    let (mut torn, mut trimmable, mut free, mut free_spans) = (0u64, 0u64, 0u64, 0u64);
    let (mut live, mut live_count) = (0u64, 0u64);
    let mut pages = PageCache::new(memory);
    let mut chunks = ChunkTable::default();
    let mut mapping = 0..0;
    let mut rest = spans.as_slice();
    radix::read_records(memory, &addrs, SPAN_BYTES, |addr, bytes| {
        // Both go by ascending address.
        let entries = rest.split_off(..rest.iter().take_while(|&&(span, _)| span <= addr).count()).unwrap_or_default();
        let Some(bytes) = bytes else {
            torn += 1;
            return;
        };
        let (start, length, bits) = (word_at(bytes, 0), word_at(bytes, 8), word32_at(bytes, 40));
        if length == 0 || length >= SPAN_PAGES_MAX || start >= USER_END >> SHAPE.page_bits {
            return;
        }
        let range = start << SHAPE.page_bits..(start + length) << SHAPE.page_bits;
        if !entries.contains(&(addr, range.start)) {
            return;
        }
        if !mapping.contains(&range.start) {
            mapping = range_of(&mapped, range.start).cloned().unwrap_or_default();
        }
        if mapping.is_empty() || range.end > mapping.end {
            torn += 1;
            return;
        }
        let (count, class, location) = (u64::from(bits & 0xffff), (bits >> 16 & 0xff) as usize, bits >> 24 & 3);
        let size = length * PAGE_BYTES;
        let own = match (location, class) {
            (IN_USE, 0) => (size, 1),
            (IN_USE, class) => match classes.get(class) {
                Some(&object) if count.saturating_mul(object) <= size => (count * object, count),
                _ => {
                    torn += 1;
                    (0, 0)
                }
            },
            _ => (0, 0),
        };
        if keeps_chunks {
            let object = if location == IN_USE { classes.get(class).copied() } else { None };
            add_chunks(memory, &range, object.filter(|_| class > 0), (location == IN_USE, own.1), word_at(bytes, 32), &mut chunks);
        }
        account.ladder.extent_bytes += size;
        (live, live_count) = (live + own.0, live_count + own.1);
        free += size - own.0;
        if location != IN_USE {
            free_spans += 1;
        }
        if location == ON_NORMAL_FREELIST {
            // TCMalloc_SystemRelease (system-alloc.cc) gives back the kernel's pages that lie within the span.
            trimmable += pages.resident_bytes(whole_pages(range.clone()));
        }
        match extents.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            Some(last) if last.start == range.end => last.start = range.start,
            _ => extents.push(range),
        }
    });
    extents.sort_unstable_by_key(|range| range.start);
    let extents = joined(&extents);
    for range in &extents {
        let residency = pages.residency(range.clone());
        account.ladder.resident_bytes += residency.resident_bytes;
        account.details.swapped_bytes += residency.swapped_bytes;
        account.details.huge_bytes += residency.huge_bytes;
    }
    (account.ladder.live_bytes, account.live_allocations) = (Some(live), Some(live_count));
    account.free_bytes = Some(free);
    account.free_chunks = Some(free_spans);
    account.ladder.trimmable_bytes = Some(trimmable);
    let mut quality = WalkQuality { windows: addrs.len() as u64, broken_headers: torn, ..WalkQuality::default() };
    quality.judge(account.ladder.extent_bytes, torn.saturating_mul(100) <= addrs.len() as u64);
    chunks.sort_regions();
    // A page map that leads to no span is not one.
    Ok((account.ladder.extent_bytes > 0).then_some(HeapWalk {
        account,
        quality,
        chunks,
        extents: extents.into_iter().map(|range| (0, range)).collect(),
    }))
}

/// Adds a span's objects, or the span if it has none. `first` leads to the first of those on its own list.
fn add_chunks(
    memory: &dyn Memory,
    span: &Range<u64>,
    object: Option<u64>,
    (is_used, used): (bool, u64),
    first: u64,
    chunks: &mut ChunkTable,
) {
    chunks.begin_region(span.start, 0);
    let bytes = span.end - span.start;
    let Some(object) = object.filter(|&object| object > 0) else {
        chunks.push(bytes, if is_used { ChunkState::Live } else { ChunkState::Free });
        return;
    };
    let count = bytes / object;
    let mut free = vec![false; usize::try_from(count).unwrap_or(0)];
    let mut next = first;
    for _ in used..count {
        let place = next.checked_sub(span.start).filter(|distance| distance % object == 0).map(|distance| distance / object);
        let Some(is_free) = place.and_then(|place| free.get_mut(usize::try_from(place).ok()?)).filter(|is_free| !**is_free) else { break };
        *is_free = true;
        next = memory.word(next).unwrap_or(0);
    }
    for is_free in free {
        chunks.push(object, if is_free { ChunkState::Free } else { ChunkState::Live });
    }
    chunks.push(bytes - count * object, ChunkState::Overhead);
}

/// The objects' sizes by class: a rising table of 32-bit words that begins 0, 8, 16, 32, 48, 64.
fn class_table(data: &[u8]) -> Option<Vec<u64>> {
    let starts = [8u32, 16, 32, 48, 64];
    let at = (4..data.len()).step_by(4).find(|&at| starts.iter().enumerate().all(|(i, &size)| word32_at(data, at + 4 * i) == size))?;
    let mut classes = vec![0u64];
    for index in 0..CLASSES_MAX {
        let size = u64::from(word32_at(data, at + 4 * index));
        if classes.last().is_some_and(|&last| size <= last) {
            break;
        }
        classes.push(size);
    }
    Some(classes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_class_sizes_is_found_and_ends_where_it_stops_rising() {
        let mut data = vec![0u8; 16];
        for size in [8u32, 16, 32, 48, 64, 80, 96, 112, 0, 5] {
            data.extend(size.to_le_bytes());
        }
        data.extend([0; 64]);
        assert_eq!(class_table(&data), Some(vec![0, 8, 16, 32, 48, 64, 80, 96, 112]));
        assert_eq!(class_table(&[0; 64]), None);
    }
}
