//! Thread caches of jemalloc 5.3: their bins, and which words of these are left over from blocks that were allocated again. Pure.
//!
//! `cache_bin_t` (include/jemalloc/internal/cache_bin.h) is {stack_head, nrequests, low_water:16, full:16, empty:16}, the last three the
//! low bits of addresses in the thread's one block of stacks. The stacks grow down and follow one another: where a bin's is empty, the next
//! one's is full. Blocks that the cache holds are between `stack_head` and empty; words below `stack_head` are stale.

use std::ops::Range;

use super::super::memory::{is_user_address, word_at};

/// Bytes of a bin.
pub(super) const BIN_BYTES: usize = 24;
/// Bins in a row that make a cache: there are 36 for small blocks.
pub(super) const BINS_MIN: usize = 12;
/// Bins of a cache at most (`TCACHE_NBINS_MAX` is below 80).
const BINS_MAX: usize = 256;

/// A bin's stack: what is held lies between `head` and `empty`.
pub(super) struct Bin {
    pub full: u64,
    pub head: u64,
    pub empty: u64,
}

/// The bin at a byte; `None` if there is none.
pub(super) fn bin_at(bytes: &[u8], at: usize) -> Option<Bin> {
    let (head, bits) = (word_at(bytes, at), word_at(bytes, at + 16));
    if !head.is_multiple_of(8) || !is_user_address(head) || bits & 7 != 0 || bits == 0 {
        return None;
    }
    let low = |shift: u32| bits >> shift & 0xffff;
    let (below, above) = (head.wrapping_sub(low(16)) & 0xffff, low(32).wrapping_sub(head) & 0xffff);
    let is_sound = below % 8 == 0 && above % 8 == 0 && below + above < 1 << 15;
    is_sound.then_some(Bin { full: head.checked_sub(below)?, head, empty: head + above })
}

/// The stale words in the stacks of the caches in these bytes, which lie at `addr`.
#[must_use]
pub fn stale(addr: u64, bytes: &[u8]) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut at = (addr.wrapping_neg() & 7) as usize;
    while at + BIN_BYTES * BINS_MIN <= bytes.len() {
        let mut bins: Vec<Bin> = Vec::new();
        while let Some(bin) =
            bin_at(bytes, at + BIN_BYTES * bins.len()).filter(|_| bins.len() < BINS_MAX && at + BIN_BYTES * (bins.len() + 1) <= bytes.len())
        {
            if bins.last().is_some_and(|last| last.empty != bin.full) {
                break;
            }
            bins.push(bin);
        }
        if bins.len() < BINS_MIN {
            at += 8;
            continue;
        }
        at += BIN_BYTES * bins.len();
        found.extend(bins.iter().map(|bin| bin.full..bin.head).filter(|old| !old.is_empty()));
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bins whose stacks of `room` words hold `cached`, from `start` on.
    fn bins(start: u64, stacks: &[(u64, u64)]) -> Vec<u8> {
        let mut at = start;
        let mut bytes = Vec::new();
        for &(room, cached) in stacks {
            let empty = at + 8 * room;
            let bits = (at & 0xffff) << 16 | (empty & 0xffff) << 32 | empty & 0xffff;
            for word in [empty - 8 * cached, 77, bits] {
                bytes.extend(word.to_le_bytes());
            }
            at = empty;
        }
        bytes
    }

    #[test]
    fn words_below_the_heads_of_a_caches_stacks_are_stale() {
        let start = 0x7f00_0001_fff0;
        let stacks = [(8u64, 3u64); 20];
        let mut bytes = vec![0u8; 40];
        bytes.extend(bins(start, &stacks));
        bytes.extend([0xff; 64]);
        let expected: Vec<Range<u64>> = (0..20).map(|number| start + 64 * number..start + 64 * number + 40).collect();
        assert_eq!(stale(0x7f11_0000_0000, &bytes), expected);
        // Too few to be a cache.
        assert_eq!(stale(0x7f11_0000_0000, &bins(start, &stacks[..8])), []);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), addr in any::<u64>()) {
            let _ = stale(addr, &bytes);
        }
    }
}
