//! V8's pages (src/heap/memory-chunk*.h): aligned to 256 KiB. Up to V8 11 a page begins with {size, flags, …, area_start, area_end, …},
//! later with {flags, metadata}, and the metadata, which malloc holds, has size, area_end and area_start.

use std::ops::Range;

use super::super::memory::{is_user_address, word_at};
use super::view::View;
use super::{Kind, RuntimeMemory};

/// Alignment of pages, and the size of those that do not hold a single large object.
const PAGE_BYTES: u64 = 256 << 10;
/// Bytes before the first object: the header, rounded up.
const HEADER_BYTES_MAX: u64 = 64 << 10;
/// Largest page: a large object.
const LARGE_BYTES_MAX: u64 = 16 << 30;
/// Words of the metadata that are examined.
const METADATA_WORDS: usize = 24;

/// Finds the pages.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    let hosts = ["node", "electron", "chrome", "deno", "v8", "workerd"];
    if !view.has_file(|name| hosts.iter().any(|host| name.contains(host))) {
        return None;
    }
    let mut found = RuntimeMemory::new(Kind::V8);
    let mut end = 0;
    for (page, head) in view.heads::<8>(PAGE_BYTES) {
        // The inside of a large object.
        if page < end {
            continue;
        }
        let [size, metadata, words @ ..] = head;
        let size = sound_size(page, size, &words).or_else(|| by_metadata(view, page, metadata));
        let range = size.and_then(|size| Some(page..page.checked_add(size)?));
        if let Some(range) = range.filter(|range| view.reserves(range)) {
            end = range.end;
            found.extend(Some((vec![range], None)));
        }
    }
    found.finish()
}

/// The size of a page whose words say where its objects begin and end, one after the other.
fn sound_size(page: u64, size: u64, words: &[u64]) -> Option<u64> {
    let is_size = size.is_multiple_of(4096) && (PAGE_BYTES / 2..=LARGE_BYTES_MAX).contains(&size);
    let says = |pair: &[u64]| matches!(pair, &[start, end] if is_area(page, size, start..end));
    (is_size && words.windows(2).any(says)).then_some(size)
}

fn is_area(page: u64, size: u64, area: Range<u64>) -> bool {
    let starts = area.start.checked_sub(page).is_some_and(|bytes| bytes > 0 && bytes < HEADER_BYTES_MAX);
    starts && area.start < area.end && area.end.checked_sub(page).is_some_and(|bytes| bytes <= size)
}

fn by_metadata(view: &View<'_>, page: u64, metadata: u64) -> Option<u64> {
    if !is_user_address(metadata) || !metadata.is_multiple_of(8) || (page..page.saturating_add(PAGE_BYTES)).contains(&metadata) {
        return None;
    }
    let bytes = view.memory.bytes(metadata, 8 * METADATA_WORDS)?;
    let words: Vec<u64> = (0..METADATA_WORDS).map(|word| word_at(&bytes, 8 * word)).collect();
    let is_size = |size: u64| size.is_multiple_of(4096) && (PAGE_BYTES / 2..=LARGE_BYTES_MAX).contains(&size);
    // {…, size, area_end, heap, area_start, …}.
    words.windows(4).find_map(|four| match four {
        &[size, end, _, start] if is_size(size) && is_area(page, size, start..end) => Some(size),
        _ => None,
    })
}
