//! PHP's own allocator (Zend/zend_alloc.c, PHP 7.0 on): chunks of 2 MiB, each of which begins with {heap, next, prev}, and huge blocks.
//!
//! The heap's structure lies in its first chunk: …, size, peak, free lists, real_size, real_peak, limit, …, huge_list, main_chunk,
//! cached_chunks, chunks_count, …. The chunks form a ring whose length is chunks_count, and all pieces add up to real_size.

use std::ops::Range;

use super::super::memory::{is_user_address, word_at};
use super::view::View;
use super::{Kind, RuntimeMemory};

/// `ZEND_MM_CHUNK_SIZE`, which is also chunks' alignment.
const CHUNK_BYTES: u64 = 2 << 20;
/// Bytes of the heap's structure that are examined.
const HEAP_BYTES: usize = 512;
/// Words between `size` and `real_size`: peak and the free lists (ZEND_MM_BINS); PHP 8.4 has one more.
const WORDS_TO_REAL_SIZE: [usize; 2] = [32, 33];
/// Chunks and huge blocks followed.
const PIECES_MAX: u64 = 1 << 16;

/// Finds the heaps; a build for threads has several.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    if !view.has_file(|name| name.contains("php")) {
        return None;
    }
    let mut heaps: Vec<u64> = Vec::new();
    for (chunk, [heap, next, prev]) in view.heads::<3>(CHUNK_BYTES) {
        // The first chunk of a heap holds the heap.
        let is_first = heap > chunk && heap - chunk < 4096;
        if is_first && [next, prev].iter().all(|&other| other.is_multiple_of(CHUNK_BYTES) && is_user_address(other)) {
            heaps.push(chunk);
        }
    }
    let mut found = RuntimeMemory::new(Kind::Zend);
    for first in heaps {
        found.extend(heap(view, first));
    }
    found.finish()
}

/// The pieces of the heap in this chunk, and what it says is used.
fn heap(view: &View<'_>, first: u64) -> Option<(Vec<Range<u64>>, Option<u64>)> {
    let memory = view.memory;
    let at = memory.word(first)?;
    let bytes = memory.bytes(at, HEAP_BYTES)?;
    let word = |index: usize| word_at(&bytes, 8 * index);
    // main_chunk, which can only be found by its position relative to the other words; the ring confirms it.
    let main_chunk = (WORDS_TO_REAL_SIZE[0] + 5..HEAP_BYTES / 8 - 2).find(|&index| word(index) == first)?;
    let (huge_list, cached) = (word(main_chunk - 1), word(main_chunk + 1));
    let counts = [0, 4].map(|half| u64::from(super::super::memory::word32_at(&bytes, 8 * (main_chunk + 2) + half)));
    let mut pieces = Vec::new();
    let mut chunk = first;
    loop {
        let range = chunk..chunk.checked_add(CHUNK_BYTES)?;
        let head = memory.bytes(chunk, 24)?;
        if word_at(&head, 0) != at || !view.holds(&range) || pieces.len() as u64 >= counts[0].min(PIECES_MAX) {
            return None;
        }
        pieces.push(range);
        chunk = word_at(&head, 8);
        if chunk == first {
            break;
        }
    }
    if pieces.len() as u64 != counts[0] {
        return None;
    }
    pieces.extend(list(view, cached, |head, chunk| (chunk..chunk.saturating_add(CHUNK_BYTES), word_at(head, 8))));
    // {block, size, next}.
    pieces
        .extend(list(view, huge_list, |head, _| (word_at(head, 0)..word_at(head, 0).saturating_add(word_at(head, 8)), word_at(head, 16))));
    let all: u64 = pieces.iter().map(|piece| piece.end - piece.start).fold(0, u64::saturating_add);
    let real_size = (WORDS_TO_REAL_SIZE[0]..main_chunk).find(|&index| word(index) == all && word(index + 1) >= all);
    let used = WORDS_TO_REAL_SIZE.iter().find_map(|&words| {
        let size = real_size?.checked_sub(words)?;
        let (used, peak) = (word(size), word(size + 1));
        (used > 0 && used <= peak && used <= all && peak <= word(real_size? + 1)).then_some(used)
    });
    Some((pieces, used))
}

/// A list's pieces, up to one that does not lie in anonymous memory.
fn list(view: &View<'_>, first: u64, read: impl Fn(&[u8], u64) -> (Range<u64>, u64)) -> Vec<Range<u64>> {
    let mut pieces = Vec::new();
    let mut at = first;
    while is_user_address(at) && (pieces.len() as u64) < PIECES_MAX {
        let Some(head) = view.memory.bytes(at, 24) else { break };
        let (range, next) = read(&head, at);
        if !view.holds(&range) {
            break;
        }
        pieces.push(range);
        at = next;
    }
    pieces
}
