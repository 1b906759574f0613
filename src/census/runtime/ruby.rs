//! Ruby's heap pages (gc.c): aligned pages of 64 KiB (16 KiB before 3.2), whose first word leads to a `heap_page` that malloc holds and
//! that says where in the page the first object begins.

use super::super::memory::{Memory, is_user_address, word_at};
use super::view::View;
use super::{Kind, RuntimeMemory};

/// `HEAP_PAGE_SIZE`, old and new.
const SIZES: [u64; 2] = [16 << 10, 64 << 10];
/// Bytes of the start of a `heap_page` in which `start` lies.
const RECORD_BYTES: usize = 72;
/// Bytes before the first object: the header, rounded up to an object of at most 640 bytes.
const START_BYTES_MAX: u64 = 1024;
/// Pages from which their size is determined.
const PAGES_MIN: usize = 4;

/// Finds the pages.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    if !view.has_file(|name| name.starts_with("ruby") || name.starts_with("libruby")) {
        return None;
    }
    let heads = view.heads::<1>(SIZES[0]);
    let pages: Vec<u64> = heads.iter().filter(|(page, [record])| leads_back(view.memory, *page, *record)).map(|&(page, _)| page).collect();
    let is_large = pages.iter().all(|page| page.is_multiple_of(SIZES[1]));
    if pages.len() < PAGES_MIN {
        return None;
    }
    let bytes = if is_large { SIZES[1] } else { SIZES[0] };
    let mut found = RuntimeMemory::new(Kind::Ruby);
    let ranges = pages.iter().filter_map(|&page| Some(page..page.checked_add(bytes)?)).filter(|range| view.holds(range));
    found.extend(Some((ranges.collect(), None)));
    found.finish()
}

fn leads_back(memory: &dyn Memory, page: u64, record: u64) -> bool {
    if !is_user_address(record) || !record.is_multiple_of(8) {
        return false;
    }
    let Some(bytes) = memory.bytes(record, RECORD_BYTES) else { return false };
    let is_start = |word: u64| word.checked_sub(page).is_some_and(|bytes| bytes > 0 && bytes < START_BYTES_MAX);
    (0..RECORD_BYTES).step_by(8).any(|at| is_start(word_at(&bytes, at)))
}
