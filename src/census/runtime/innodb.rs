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
/// Pieces of a process: 512 GiB of extents.
const PIECES_MAX: usize = 1 << 16;

/// Finds the pieces.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    if !view.has_file(|name| name.starts_with("mariadbd") || name.starts_with("mysqld")) {
        return None;
    }
    let mut found = RuntimeMemory::new(Kind::InnoDb);
    let mut end = 0;
    for mapping in view.mappings() {
        let mut at = mapping.start.max(end);
        while at < mapping.end && found.ranges.len() < PIECES_MAX {
            let Some(piece) = piece(view.memory, at).filter(|piece| view.holds(piece)) else { break };
            end = piece.end;
            at = piece.end;
            found.extend(Some((vec![piece], None)));
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
