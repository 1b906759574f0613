//! A page's blocks: which are in use, by its lists of free blocks. Pure, given the bytes of the page.
//!
//! `used` counts the blocks that are neither in `free` nor in `local_free`; those in `xthread_free` and in the owning heap's
//! `thread_delayed_free` were freed by other threads and are counted until the owner takes them over (`_mi_page_free_collect`,
//! `_mi_heap_delayed_free_all` in src/page.c).

use super::super::chunks::ChunkState;
use super::super::memory::word_at;
use super::segments::Page;

/// Blocks of a page: its capacity has 16 bits.
const BLOCKS_MAX: u64 = 1 << 16;

/// Where blocks begin in a page, until 2.1.2 (`_mi_segment_page_start_from_slice`, src/segment.c).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartRule {
    /// 2.0.9: 384 bytes for blocks of up to 1 KiB.
    Fixed,
    /// 2.1.2: three blocks up to 64 bytes, one up to 512.
    Blocks,
}

impl StartRule {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Fixed, Self::Blocks];

    fn offset(self, block_bytes: u64) -> u64 {
        match (self, block_bytes) {
            (Self::Fixed, 8..=1024) => 384,
            (Self::Blocks, 8..=64) => 3 * block_bytes,
            (Self::Blocks, 65..=512) => block_bytes,
            _ => 0,
        }
    }

    /// The first block of a page.
    #[must_use]
    pub fn start(self, page: &Page) -> u64 {
        page.start.unwrap_or_else(|| page.addr + self.offset(page.block_bytes))
    }

    /// Whether the first free block of a page is one by this rule; `None` if the page has no such block.
    #[must_use]
    pub fn agrees(self, page: &Page) -> Option<bool> {
        let first = page.free.into_iter().find(|&block| block != 0)?;
        let distance = first.checked_sub(self.start(page));
        Some(page.block_bytes > 0 && distance.is_some_and(|distance| distance % page.block_bytes == 0))
    }
}

/// The chunks of a page by address, as (bytes, state). `bytes` is the page's memory from its first block on, up to its capacity;
/// `delayed`: blocks of this page that other threads freed into the heap's list. `None` if the page contradicts itself: it is being changed.
#[must_use]
pub fn chunks(page: &Page, start: u64, bytes: &[u8], delayed: &[u64]) -> Option<Vec<(u64, ChunkState)>> {
    let size = page.block_bytes;
    let before = start.checked_sub(page.addr).filter(|before| *before < page.bytes)?;
    let room = page.bytes - before;
    if size == 0 || page.capacity > BLOCKS_MAX || page.capacity.checked_mul(size)? > room {
        return None;
    }
    let mut is_free = vec![false; usize::try_from(page.capacity).ok()?];
    let mut mark = |block: u64| -> Option<usize> {
        let distance = block.checked_sub(start).filter(|distance| distance % size == 0)?;
        let slot = is_free.get_mut(usize::try_from(distance / size).ok()?).filter(|is_free| !**is_free)?;
        *slot = true;
        usize::try_from(distance).ok()
    };
    let mut follow = |first: u64| -> Option<u64> {
        let (mut next, mut count) = (first, 0);
        while next != 0 {
            let at = mark(next)?;
            count += 1;
            next = word_at(bytes, at);
        }
        Some(count)
    };
    let own = follow(page.free[0])? + follow(page.free[1])?;
    let foreign = follow(page.thread_free)?;
    if own + page.used != page.capacity || foreign > page.used {
        return None;
    }
    for &block in delayed {
        mark(block)?;
    }
    let mut chunks = Vec::with_capacity(is_free.len() + 2);
    chunks.push((before, ChunkState::Overhead));
    chunks.extend(is_free.iter().map(|&is_free| (size, if is_free { ChunkState::Free } else { ChunkState::Live })));
    // Blocks that were never handed out; less than a block at the end is lost.
    let rest = room - page.capacity * size;
    chunks.push((rest / size * size, ChunkState::Free));
    chunks.push((rest % size, ChunkState::Overhead));
    chunks.retain(|(bytes, _)| *bytes > 0);
    Some(chunks)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    const ADDR: u64 = 0x7f00_0001_0000;

    fn page() -> Page {
        let block = |index: u64| ADDR + 384 + index * 10_000;
        let [free, local, thread_free] = [block(1), block(2), block(4)];
        Page { capacity: 6, used: 4, free: [free, local], thread_free, ..Page::of(ADDR, 65_536, 10_000, Some(ADDR + 384)) }
    }

    fn states(page: &Page, bytes: &[u8], delayed: &[u64]) -> Option<String> {
        let chunks = chunks(page, ADDR + 384, bytes, delayed)?;
        assert_eq!(chunks.iter().map(|(bytes, _)| bytes).sum::<u64>(), 65_536);
        Some(chunks.iter().map(|(_, state)| format!("{state:?}").chars().next().unwrap()).collect())
    }

    #[test]
    fn blocks_in_any_list_are_free() {
        let bytes = vec![0u8; 60_000];
        assert_eq!(states(&page(), &bytes, &[]).unwrap(), "OLFFLFLO");
        assert_eq!(states(&page(), &bytes, &[ADDR + 384]).unwrap(), "OFFFLFLO");
    }

    #[test]
    fn a_page_that_contradicts_itself_has_no_chunks() {
        let mut bytes = vec![0u8; 60_000];
        assert_eq!(states(&Page { used: 5, ..page() }, &bytes, &[]), None);
        assert_eq!(states(&Page { capacity: 7, ..page() }, &bytes, &[]), None);
        assert_eq!(states(&Page { free: [ADDR + 385, 0], ..page() }, &bytes, &[]), None);
        assert_eq!(states(&page(), &bytes, &[ADDR + 384 + 10_000]), None, "freed twice");
        bytes[10_000..10_008].copy_from_slice(&(ADDR + 384 + 10_000).to_le_bytes());
        assert_eq!(states(&page(), &bytes, &[]), None, "a ring");
    }

    #[test]
    fn the_start_of_the_blocks_follows_from_their_size() {
        let page = |block_bytes: u64| Page { block_bytes, start: None, ..page() };
        let starts = |rule: StartRule| [16, 64, 80, 512, 1024, 2048].map(|bytes| rule.start(&page(bytes)) - ADDR);
        assert_eq!(starts(StartRule::Fixed), [384, 384, 384, 384, 384, 0]);
        assert_eq!(starts(StartRule::Blocks), [48, 192, 80, 512, 0, 0]);
    }
}
