//! InnoDB's buffer pool (storage/innobase/include/buf0buf.h): pieces that begin with the descriptions of their pages, side by side, of
//! which each holds the address of its page; the pages follow. A piece is a chunk of 128 MiB by default, or since MariaDB 10.11.12 an
//! extent of 8 MiB.

use std::ops::Range;

use super::super::memory::{Memory, word_at};
use super::view::View;
use super::{Kind, RuntimeMemory};

/// Bytes at the start of a piece that are searched for the first descriptions.
const LOOKED_BYTES: usize = 4096;
/// Sizes of a description, in words.
const STRIDE_WORDS: Range<usize> = 8..64;
/// Words of the first description that are searched for its page's address.
const FIRST_WORDS: usize = 48;
/// Descriptions that have to agree.
const AGREE: usize = 8;
/// `innodb_page_size`.
const PAGE_SIZES: [u64; 5] = [16 << 10, 4 << 10, 8 << 10, 32 << 10, 64 << 10];
/// Alignment of an extent (`innodb_buffer_pool_extent_size`). The kernel merges a pool with a log buffer that was mapped before it, so that a
/// pool need not begin where a mapping does.
const EXTENT_BYTES: u64 = 8 << 20;
/// Pieces of a process, and places that are searched for one: 512 GiB of extents.
const PIECES_MAX: usize = 1 << 16;

/// Finds the pieces.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    if !view.has_file(|name| name.starts_with("mariadbd") || name.starts_with("mysqld")) {
        return None;
    }
    let mut found = RuntimeMemory::new(Kind::InnoDb);
    let (mut end, mut tries) = (0, 0);
    for mapping in view.mappings() {
        let mut at = mapping.start.max(end);
        while at < mapping.end && tries < PIECES_MAX {
            tries += 1;
            match piece(view.memory, at).filter(|piece| view.holds(piece)) {
                Some(piece) => {
                    (at, end) = (piece.end, piece.end);
                    found.extend(Some((vec![piece], None)));
                }
                None => at = (at + 1).next_multiple_of(EXTENT_BYTES),
            }
        }
    }
    found.finish()
}

/// The piece that begins at an address.
fn piece(memory: &dyn Memory, start: u64) -> Option<Range<u64>> {
    let bytes = memory.bytes(start, LOOKED_BYTES)?;
    let word = |index: usize| word_at(&bytes, 8 * index);
    for first in 0..FIRST_WORDS {
        let page = word(first);
        let lead = page.checked_sub(start).filter(|&lead| lead > 0 && lead < 1 << 30).unwrap_or(0);
        let Some(size) = PAGE_SIZES.iter().copied().find(|size| lead > 0 && page.is_multiple_of(*size)) else { continue };
        let agrees = |stride: usize| (1..AGREE).all(|number| word(first + number * stride) == page + number as u64 * size);
        let Some(stride) = STRIDE_WORDS.into_iter().find(|&stride| agrees(stride)) else { continue };
        // As many descriptions as fit before the pages, less what the rounding up to a page leaves.
        let stride = 8 * stride as u64;
        let most = lead / stride;
        let is_last = |count: &u64| memory.word(start + 8 * first as u64 + (count - 1) * stride) == Some(page + (count - 1) * size);
        let count = (AGREE as u64..=most).rev().take(1 + usize::try_from(size / stride).unwrap_or(0)).find(is_last)?;
        return Some(start..page.checked_add(count.checked_mul(size)?)?);
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::super::fixture::Fixture;
    use super::super::super::objects::Objects;
    use super::*;
    use crate::process::Maps;

    const MIB: u64 = 1 << 20;

    /// MariaDB 10.11.19: the kernel merges two log buffers of 16 MiB and the pool, at whose end an address space of 8 TiB is reserved.
    #[test]
    fn a_pool_is_found_behind_a_buffer_that_the_kernel_merged_with_it() {
        const START: u64 = 0x7000_0000_0000;
        let maps = Maps::parse(
            b"550000000000-550000001000 r-xp 00000000 08:01 5 /usr/sbin/mariadbd\n\
              700000000000-700003000000 rw-p 00000000 00:00 0\n\
              700003000000-780000000000 ---p 00000000 00:00 0\n",
        );
        let mut fixture = Fixture::with_maps(maps.clone());
        // Descriptions of 160 bytes, whose third word is the address of a page of 16 KiB.
        let pool = START + 32 * MIB;
        let page = pool + (80 << 10);
        let count = (80 << 10) / 160;
        for number in 0..count {
            fixture.write_word(pool + 160 * number + 16, page + (number << 14));
        }
        let objects = Objects::of(&fixture, &maps);
        let found = find(&View::of(&fixture, &maps, &objects, &[])).unwrap();
        assert_eq!(found.ranges, vec![pool..page + (count << 14)]);
    }
}
