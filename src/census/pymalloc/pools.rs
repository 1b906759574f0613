//! A pool: a header and blocks of one size. Pure.
//!
//! `struct pool_header` is {blocks in use u32, freeblock, nextpool, prevpool, arena's number u32, size class u32, nextoffset u32,
//! maxnextoffset u32} (Objects/obmalloc.c, Include/internal/pycore_obmalloc.h). A block has 16 bytes for each class. Blocks before
//! nextoffset were handed out at least once; of these, the free ones are linked by their first words, from freeblock on.

use super::super::chunks::ChunkState;
use super::super::memory::{word_at, word32_at};

/// Bytes of a pool's header.
pub const HEADER_BYTES: usize = 48;
/// The same, as a length in the process.
const HEADER: u64 = HEADER_BYTES as u64;
/// Bytes by which size classes differ (`ALIGNMENT`).
const CLASS_BYTES: u64 = 16;
/// Size classes: blocks of up to 512 bytes.
const CLASSES: u64 = 32;
/// Blocks of a pool: of 16 bytes in a pool of 16 KiB.
const BLOCKS_MAX: usize = 1024;

/// A pool's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolHeader {
    /// Blocks in use.
    pub used: u64,
    /// The first of the free blocks that were handed out before.
    free: u64,
    /// The number of its arena.
    pub arena: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Blocks that fit.
    pub blocks: u64,
    /// Blocks that were handed out at least once.
    begun: u64,
}

impl PoolHeader {
    /// Parses the header of a pool that had blocks at some time; `None` if it contradicts itself.
    #[must_use]
    pub fn parse(bytes: &[u8], pool_bytes: u64) -> Option<Self> {
        let [used, arena, class, next, last] = [0, 32, 36, 40, 44].map(|at| u64::from(word32_at(bytes, at)));
        if class >= CLASSES || bytes.len() < HEADER_BYTES {
            return None;
        }
        let block_bytes = (class + 1) * CLASS_BYTES;
        let blocks = pool_bytes.checked_sub(HEADER)? / block_bytes;
        let begun = next.checked_sub(HEADER).filter(|bytes| bytes.is_multiple_of(block_bytes))? / block_bytes;
        let is_sound = last + block_bytes == pool_bytes && begun <= blocks && used <= begun;
        is_sound.then(|| Self { used, free: word_at(bytes, 8), arena, block_bytes, blocks, begun })
    }
}

/// Lists the chunks of the pool at `addr` of arena `number` in place of what is in `chunks`, by ascending address, as (bytes, state). `None` if
/// the pool contradicts itself: it is being changed, or could not be read in full.
#[must_use]
pub fn list_chunks(pool: &[u8], addr: u64, number: u64, chunks: &mut Vec<(u64, ChunkState)>) -> Option<()> {
    let pool_bytes = pool.len() as u64;
    chunks.clear();
    // A pool without blocks in use belongs to no class: all of it is free.
    if word32_at(pool, 0) == 0 {
        chunks.push((pool_bytes, ChunkState::Free));
        return Some(());
    }
    let header = PoolHeader::parse(pool, pool_bytes).filter(|header| header.arena == number)?;
    let blocks = usize::try_from(header.blocks).ok().filter(|&blocks| blocks <= BLOCKS_MAX)?;
    let block_bytes = u32::try_from(header.block_bytes).ok()?;
    let first = addr.checked_add(HEADER)?;
    let mut is_free = [false; BLOCKS_MAX];
    let (mut next, mut free) = (header.free, 0);
    while next != 0 {
        // 32 bits: there is one division for each free block of the heap.
        let distance = u32::try_from(next.checked_sub(first)?).ok()?;
        let (index, rest) = (distance / block_bytes, distance % block_bytes);
        let is_begun = rest == 0 && u64::from(index) < header.begun;
        let slot = is_free.get_mut(index as usize).filter(|is_free| is_begun && !**is_free)?;
        *slot = true;
        free += 1;
        next = word_at(pool, HEADER_BYTES + distance as usize);
    }
    if free + header.used != header.begun {
        return None;
    }
    chunks.push((HEADER, ChunkState::Overhead));
    let begun = usize::try_from(header.begun).ok()?;
    chunks.extend(is_free.iter().take(blocks).enumerate().map(|(index, &is_free)| {
        let state = if is_free || index >= begun { ChunkState::Free } else { ChunkState::Live };
        (header.block_bytes, state)
    }));
    let rest = pool_bytes - HEADER - header.blocks * header.block_bytes;
    chunks.extend((rest > 0).then_some((rest, ChunkState::Overhead)));
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    const ADDR: u64 = 0x7f00_0000_4000;

    /// A pool of 4 KiB with blocks of 512 bytes: 7 fit, of which the first `begun` were handed out and those in `free` freed.
    fn pool(begun: u32, free: &[u64]) -> Vec<u8> {
        let mut bytes = vec![0u8; 4096];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &(begun - free.len() as u32).to_le_bytes());
        put(32, &7u32.to_le_bytes());
        put(36, &31u32.to_le_bytes());
        put(40, &(48 + begun * 512).to_le_bytes());
        put(44, &(4096u32 - 512).to_le_bytes());
        let mut link = 8;
        for &index in free {
            put(link, &(ADDR + 48 + index * 512).to_le_bytes());
            link = 48 + index as usize * 512;
        }
        bytes
    }

    fn states(pool: &[u8]) -> Option<String> {
        let mut chunks = vec![(1, ChunkState::Unknown)];
        list_chunks(pool, ADDR, 7, &mut chunks)?;
        assert_eq!(chunks.iter().map(|(bytes, _)| bytes).sum::<u64>(), 4096);
        Some(chunks.iter().map(|(_, state)| format!("{state:?}").chars().next().unwrap()).collect())
    }

    #[test]
    fn blocks_are_free_that_are_linked_or_were_never_handed_out() {
        assert_eq!(states(&pool(5, &[3, 0])).unwrap(), "OFLLFLFFO");
        assert_eq!(states(&pool(7, &[])).unwrap(), "OLLLLLLLO");
        assert_eq!(states(&pool(2, &[1])).unwrap(), "OLFFFFFFO");
        assert_eq!(states(&pool(2, &[1, 0])).unwrap(), "F");
    }

    #[test]
    fn a_pool_that_contradicts_itself_has_no_chunks() {
        assert_eq!(list_chunks(&pool(5, &[3, 0]), ADDR, 8, &mut Vec::new()), None, "another arena");
        let damaged = |at: usize, value: u64| {
            let mut bytes = pool(5, &[3, 0]);
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            states(&bytes)
        };
        assert_eq!(damaged(8, ADDR + 48 + 512 + 16), None, "not a block");
        assert_eq!(damaged(8, ADDR + 48 + 6 * 512), None, "a block that was never handed out");
        assert_eq!(damaged(48, ADDR + 48 + 3 * 512), None, "a ring");
        assert_eq!(damaged(48, ADDR + 48 + 512), None, "more free blocks than there are");
        assert_eq!(damaged(8, 0), None, "fewer");
        assert_eq!(damaged(40, u64::MAX), None, "offsets");
    }
}
