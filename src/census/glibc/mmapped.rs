//! Chunks that malloc mapped one by one, found in the anonymous mappings.
//!
//! A chunk's own size gives its extent. The kernel's mappings do not: it merges neighbours, and madvise, mprotect, mlock and prctl split a
//! chunk into several. So chunks are searched for at the start of writable mappings, and may extend through all adjacent ones that follow.
//!
//! Their size word has the second flag alone. Up to 2.42 size + offset is the mapping's length, since 2.43 16 bytes less; `prev_size` is
//! the offset of the chunk in its mapping (not 0 after memalign), with bit 0 set for huge pages since 2.43.

use std::ops::Range;

use super::super::memory::{Memory, Piece, word_at};
use super::super::objects::range_of;
use super::layout::{FLAGS, IS_MMAPPED};
use crate::heap::residency::page_bytes;

/// Pages without a chunk that end the search of a mapping in the first, quick pass.
const EMPTY_PAGES_MAX: u32 = 4;
/// Bytes of a chunk's header.
const HEADER_BYTES: usize = 16;
/// Pages probed in all: 4 GiB of address space, a second of time.
const PROBES_MAX: u64 = 1 << 18;

/// Alignments tried: up to 1 GiB, a huge page of the largest size.
const ALIGNMENT_BITS_MAX: u32 = 31;

/// A chunk with a mapping of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mmapped {
    /// First address of the mapping.
    pub start: u64,
    /// Bytes of the mapping.
    pub bytes: u64,
    /// Distance of the chunk from the mapping's start.
    pub offset_bytes: u64,
}

impl Mmapped {
    /// Address behind the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    /// The address that malloc returned.
    #[must_use]
    pub fn block(&self) -> u64 {
        self.start.saturating_add(self.offset_bytes).saturating_add(16)
    }
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MmappedChunks {
    /// The chunks by ascending address.
    pub chunks: Vec<Mmapped>,
    /// Whether their number is the one that `mp_` gives.
    pub is_complete: bool,
}

/// Looks for `wanted` chunks that begin in `ranges` (writable anonymous mappings without the heaps) and end in the same of `spans` (all
/// private mappings without a file, whatever their rights, joined where they touch, without the heaps). Both are sorted.
#[must_use]
pub fn find(memory: &dyn Memory, ranges: &[Range<u64>], spans: &[Range<u64>], wanted: u32) -> MmappedChunks {
    if wanted == 0 {
        return MmappedChunks { chunks: Vec::new(), is_complete: true };
    }
    let mut probes = 0;
    let mut best = MmappedChunks::default();
    for places in [Places::FirstPages, Places::PageStarts, Places::Everywhere] {
        let mut chunks = Vec::new();
        for range in ranges {
            let span = range_of(spans, range.start).unwrap_or(range);
            search(memory, range, span, places, &mut probes, &mut chunks);
        }
        let is_complete = chunks.len() == wanted as usize;
        if is_complete || chunks.len().abs_diff(wanted as usize) < best.chunks.len().abs_diff(wanted as usize) {
            best = MmappedChunks { chunks, is_complete };
        }
        if is_complete {
            break;
        }
    }
    best
}

/// Where headers are looked for, until their number is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Places {
    /// In the first pages of each mapping, and from chunk to chunk.
    FirstPages,
    /// At the start of every page that is present, in the form until 2.42 without an offset: chunks behind other memory with which the kernel
    /// has merged them. The other forms look like small objects of CPython.
    PageStarts,
    /// In every page that is present. Data may look like the header of an aligned chunk, and hide those behind it.
    Everywhere,
}

fn search(memory: &dyn Memory, range: &Range<u64>, span: &Range<u64>, places: Places, probes: &mut u64, chunks: &mut Vec<Mmapped>) {
    // The last chunk may reach into this mapping, or beyond it.
    let mut at = chunks.last().map_or(range.start, |last| range.start.max(last.end()));
    if at >= range.end {
        return;
    }
    let Ok(runs) = memory.page_runs(at..range.end) else { return };
    let mut empty_pages = 0;
    let mut page = vec![0u8; if places == Places::PageStarts { HEADER_BYTES } else { page_bytes() as usize }];
    while at < range.end && *probes < PROBES_MAX {
        let Some(present) = runs.next_present(at) else { return };
        at = present;
        *probes += 1;
        let piece = Piece { addr: at, bytes: page.len() };
        let is_read = memory.read_pieces(&[piece], &mut page) == page.len();
        let is_plain = |found: &Mmapped| word_at(&page, 0) == 0 && word_at(&page, 8) & !FLAGS == found.bytes;
        let found = if is_read { chunk_in_page(&page, at, span) } else { None };
        let found = found.filter(|found| places != Places::PageStarts || is_plain(found));
        match found {
            Some(found) if chunks.last().is_none_or(|last| last.end() <= found.start) => {
                let chunk = if found.offset_bytes == 0 { aligned_within(memory, found) } else { found };
                at = chunk.end();
                chunks.push(chunk);
                empty_pages = 0;
            }
            _ => {
                empty_pages += 1;
                if places == Places::FirstPages && empty_pages > EMPTY_PAGES_MAX {
                    return;
                }
                at += page_bytes();
            }
        }
    }
}

/// memalign leaves the header of the whole mapping where it was and writes another one in front of the aligned address. Where one of the
/// alignments leads to such a header, that is the chunk.
fn aligned_within(memory: &dyn Memory, whole: Mmapped) -> Mmapped {
    let block = whole.start.saturating_add(16);
    let mut before = 0;
    for bits in 5..ALIGNMENT_BITS_MAX {
        let Some(offset_bytes) = block.checked_next_multiple_of(1 << bits).map(|aligned| aligned - block) else { break };
        if offset_bytes == before || offset_bytes.saturating_add(32) > whole.bytes {
            continue;
        }
        before = offset_bytes;
        let header = whole.start + offset_bytes;
        let mut words = [0u8; 16];
        if memory.read(header, &mut words) != words.len() {
            continue;
        }
        let (prev_size, size) = (word_at(&words, 0) & !1, word_at(&words, 8));
        let rest = whole.bytes - offset_bytes;
        if prev_size == offset_bytes && size & FLAGS == IS_MMAPPED && [rest, rest - 16].contains(&(size & !FLAGS)) {
            return Mmapped { offset_bytes, ..whole };
        }
    }
    whole
}

/// The chunk whose header lies in the page at `addr`, and which lies in `span`.
fn chunk_in_page(page: &[u8], addr: u64, span: &Range<u64>) -> Option<Mmapped> {
    (0..page.len()).step_by(16).find_map(|at| {
        let header = word_at(page, at + 8);
        if header & FLAGS != IS_MMAPPED {
            return None;
        }
        let chunk = addr + at as u64;
        let offset_bytes = word_at(page, at) & !1;
        let start = chunk.checked_sub(offset_bytes)?;
        let used = (header & !FLAGS).checked_add(offset_bytes)?;
        let within_page = page_bytes() - 1;
        let bytes = if used & within_page == 0 {
            used
        } else if used.checked_add(16)? & within_page == 0 {
            used + 16
        } else {
            return None;
        };
        let fits = start & within_page == 0 && start >= span.start && start.checked_add(bytes).is_some_and(|end| end <= span.end);
        (fits && bytes >= page_bytes() && offset_bytes < bytes && (offset_bytes == 0) == (at == 0 && start == addr)).then_some(Mmapped {
            start,
            bytes,
            offset_bytes,
        })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn page_with(at: usize, prev_size: u64, header: u64) -> Vec<u8> {
        let mut page = vec![0u8; 4096];
        page[at..at + 8].copy_from_slice(&prev_size.to_le_bytes());
        page[at + 8..at + 16].copy_from_slice(&header.to_le_bytes());
        page
    }

    /// The mappings of a numpy array: the page of the header, then the block with another setting; and the upper neighbour.
    #[test]
    fn chunks_extend_through_split_mappings_and_begin_inside_merged_ones() {
        const MAPS: &[u8] = b"7f0000000000-7f0000001000 rw-p 00000000 00:00 0\n7f0000001000-7f0000011000 rw-p 00000000 00:00 0\n\
            7f0000011000-7f0000012000 rw-p 00000000 00:00 0\n7f0000012000-7f0000014000 r--p 00000000 00:00 0\n\
            7f0000014000-7f0000034000 rw-p 00000000 00:00 0\n7f0000040000-7f0000050000 rw-p 00000000 00:00 0\n";
        let maps = crate::process::Maps::parse(MAPS);
        let mut memory = crate::census::Fixture::with_maps(maps.clone());
        let chunks = [(0x7f00_0000_0000, 0x11000), (0x7f00_0001_1000, 0x10000), (0x7f00_0002_1000, 0x13000)];
        for (start, bytes) in chunks {
            memory.write_word(start + 8, bytes | 2);
        }
        // Its size would extend across a gap in the address space.
        memory.write_word(0x7f00_0004_0008, 0x11000 | 2);
        let ranges = super::super::super::objects::anonymous_ranges(&maps);
        let spans = super::super::super::objects::unbacked_ranges(&maps);
        let found = find(&memory, &ranges, &spans, 3);
        assert_eq!(found.chunks.iter().map(|one| (one.start, one.bytes)).collect::<Vec<_>>(), chunks);
        assert!(found.is_complete);
    }

    /// CPython's arenas lie between such chunks, in one mapping with them.
    #[test]
    fn a_chunk_is_found_behind_data_that_looks_like_an_aligned_one() {
        let maps = crate::process::Maps::parse(b"7f0000000000-7f0000100000 rw-p 00000000 00:00 0\n");
        let mut memory = crate::census::Fixture::with_maps(maps.clone());
        for page in 0..0x80 {
            memory.write_word(0x7f00_0000_0000 + page * page_bytes() + 0x200, 1);
        }
        // In the tenth page: offset and size of a chunk that would reach over the next one.
        memory.write_word(0x7f00_0000_a010, 0x10);
        memory.write_word(0x7f00_0000_a018, 0x6fff0 | 2);
        // In the sixteenth: as one of 2.43 with its flag.
        memory.write_word(0x7f00_0001_0000, 1);
        memory.write_word(0x7f00_0001_0008, 0x11ff0 | 2);
        memory.write_word(0x7f00_0004_0008, 0x21000 | 2);
        let ranges = super::super::super::objects::anonymous_ranges(&maps);
        let found = find(&memory, &ranges, &ranges, 1);
        assert_eq!(found.chunks, [Mmapped { start: 0x7f00_0004_0000, bytes: 0x21000, offset_bytes: 0 }]);
        assert!(found.is_complete);
    }

    #[test]
    fn both_size_rules_and_an_offset_are_understood() {
        let range = 0x10000..0x40000;
        let found = |page: &[u8]| chunk_in_page(page, 0x10000, &range);
        assert_eq!(found(&page_with(0, 0, 0x21000 | 2)), Some(Mmapped { start: 0x10000, bytes: 0x21000, offset_bytes: 0 }));
        assert_eq!(found(&page_with(0, 0, 0x20ff0 | 2)), Some(Mmapped { start: 0x10000, bytes: 0x21000, offset_bytes: 0 }));
        assert_eq!(found(&page_with(0x30, 0x30, 0x20fd0 | 2)), Some(Mmapped { start: 0x10000, bytes: 0x21000, offset_bytes: 0x30 }));
    }

    #[test]
    fn a_chunk_that_leaves_its_mapping_or_has_other_flags_is_rejected() {
        let range = 0x10000..0x20000;
        assert_eq!(chunk_in_page(&page_with(0, 0, 0x21000 | 2), 0x10000, &range), None);
        assert_eq!(chunk_in_page(&page_with(0, 0, 0x1000 | 3), 0x10000, &range), None);
        assert_eq!(chunk_in_page(&page_with(0, 0, !7 | 2), 0x10000, &range), None);
        assert_eq!(chunk_in_page(&page_with(0x40, !1, 0x1000 | 2), 0x10000, &range), None);
    }
}
