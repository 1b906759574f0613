//! glibc's per-thread caches: their structures, the chunks on their lists, and the word that marks those chunks.
//!
//! `struct tcache_perthread_struct` (malloc/malloc.c) is itself a chunk of its thread's arena: up to 2.42 `u16 counts[64]`, `ptr[64]`;
//! since 2.43 `u16 num_slots[76]`, `ptr[76]`, where the counts are of the free slots, not of those in use. A cached chunk's second word is
//! a key: the address of the structure (2.29–2.33), or a random word of libc's data (since 2.34).

use super::super::chunks::{Block, ChunkState, ChunkTable};
use super::super::memory::{Memory, word_at, word16_at};
use super::layout::{FLAGS, Layout, is_chunk_address};

/// Sizes of the chunk that holds the structure; 16 bytes more if the rest of a split was too small to stand alone.
const CHUNK_SIZES: [(u64, usize); 4] = [(0x290, 64), (0x2a0, 64), (0x300, 76), (0x310, 76)];
/// Chunks of one list that are followed at most: the tunable glibc.malloc.tcache_count is a 16-bit number.
const LIST_MAX: u64 = 65535;
/// Lists of sizes up to 1040 bytes; those above (2.42 on) hold ranges of sizes.
const EXACT_LISTS: usize = 64;

/// Chunks of the right size that are tried: 64 Ki threads, or a program that likes that size.
pub const CANDIDATES_MAX: usize = 1 << 16;

/// Whether a chunk of this size can hold a thread's cache.
#[must_use]
pub fn is_cache_size(chunk_bytes: u64) -> bool {
    CHUNK_SIZES.iter().any(|&(bytes, _)| bytes == chunk_bytes)
}

/// The blocks of a table that are threads' caches with chunks in them: their heads lead to cached chunks, and their counts agree. They are
/// in use, but not the program's.
#[must_use]
pub fn find(memory: &dyn Memory, table: &ChunkTable) -> Vec<Block> {
    let sized = table.live_blocks().filter(|block| is_cache_size(block.chunk.bytes)).take(CANDIDATES_MAX);
    sized.filter(|block| is_cache(memory, table, block)).collect()
}

fn is_cache(memory: &dyn Memory, table: &ChunkTable, block: &Block) -> bool {
    let Some(&(_, lists)) = CHUNK_SIZES.iter().find(|&&(bytes, _)| bytes == block.chunk.bytes) else { return false };
    let Some(bytes) = memory.bytes(block.addr, lists * 10) else { return false };
    let (mut heads, mut cached) = (0, 0);
    for list in 0..lists {
        let (count, head) = (word16_at(&bytes, 2 * list), word_at(&bytes, lists * 2 + 8 * list));
        // Since 2.43 the counts are of the free slots.
        if lists <= EXACT_LISTS && (count == 0) != (head == 0) || head != 0 && !is_chunk_address(head) {
            return false;
        }
        if head != 0 {
            heads += 1;
            let chunk = table.find(head.wrapping_sub(16)).filter(|chunk| chunk.start == head.wrapping_sub(16));
            cached += usize::from(chunk.is_some_and(|chunk| chunk.state == ChunkState::Tcache));
        }
    }
    // While the program runs some of them have been allocated again.
    heads > 0 && cached * 2 >= heads
}

/// A thread's cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ThreadCache {
    /// Address of the structure.
    pub addr: u64,
    /// Chunks on its lists: start and size.
    pub chunks: Vec<(u64, u64)>,
    /// The key of the chunks; 0 if there are none.
    pub key: u64,
    /// Lists with an invalid end.
    pub broken_lists: u64,
}

/// Reads the cache at the user address `addr` of a chunk of `chunk_bytes`. `count_max` is the configured number of chunks per size, 0 if it
/// is not known. `None` if it is not one.
#[must_use]
pub fn read(memory: &dyn Memory, layout: &mut Layout, addr: u64, chunk_bytes: u64, count_max: u64) -> Option<ThreadCache> {
    let &(_, lists) = CHUNK_SIZES.iter().find(|&&(bytes, _)| bytes == chunk_bytes)?;
    let bytes = memory.bytes(addr, lists * 10)?;
    let counts_places_left = lists > 64;
    let limit = match count_max {
        0 if counts_places_left => 16,
        0 => 7,
        limit => limit.min(LIST_MAX),
    };
    let mut heads = Vec::with_capacity(lists);
    for list in 0..lists {
        let head = word_at(&bytes, lists * 2 + 8 * list);
        let count = u64::from(word16_at(&bytes, 2 * list));
        let used = if counts_places_left { limit.checked_sub(count)? } else { count };
        if used > limit || (head == 0) != (used == 0) || (head != 0 && !is_chunk_address(head)) {
            return None;
        }
        heads.push((head, used));
    }
    let mut cache = ThreadCache { addr, ..ThreadCache::default() };
    for (list, &(head, used)) in heads.iter().enumerate() {
        follow(memory, layout, list, head, used, &mut cache);
    }
    (cache.broken_lists * 2 <= cache.chunks.len().max(1) as u64).then_some(cache)
}

fn follow(memory: &dyn Memory, layout: &mut Layout, list: usize, head: u64, used: u64, cache: &mut ThreadCache) {
    let mut block = head;
    for taken in 0..used {
        // Size word, then the two user words: next and key.
        let Some(bytes) = block.checked_sub(8).and_then(|addr| memory.bytes(addr, 24)) else {
            cache.broken_lists += 1;
            return;
        };
        let size = word_at(&bytes, 0) & !FLAGS;
        if list < EXACT_LISTS && size != 32 + 16 * list as u64 {
            cache.broken_lists += 1;
            return;
        }
        cache.chunks.push((block - 16, size));
        if cache.key == 0 {
            cache.key = word_at(&bytes, 16);
        }
        let stored = word_at(&bytes, 8);
        if taken + 1 == used {
            layout.learn_links(block, stored);
            return;
        }
        if layout.safe_linking.is_none() {
            // Only one of the two readings is an aligned address near this one.
            let near = |addr: u64| is_chunk_address(addr) && (addr ^ block) >> 30 == 0;
            layout.safe_linking = match (near(stored ^ (block >> 12)), near(stored)) {
                (true, false) => Some(true),
                (false, true) => Some(false),
                _ => None,
            };
        }
        block = layout.reveal(block, stored);
        if !is_chunk_address(block) {
            cache.broken_lists += 1;
            return;
        }
    }
}
