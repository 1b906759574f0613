//! A process's executable mappings as the blocks that the unwinder reads.

use zerocopy::IntoBytes as _;

use super::elf::Segment;
use super::layout::{BLOCK_BYTES, MAPPINGS_MAX, MAPPINGS_PER_BLOCK, put_blocks};
use crate::bpf::{self, MappingKind};
use crate::units::page_bytes;

/// One executable mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeMapping {
    /// First address.
    pub begin: u64,
    /// First address after it.
    pub end: u64,
    /// Subtracted from an address gives the file's own address.
    pub bias: u64,
    /// Number of the file's table; not used without one.
    pub file: u32,
    /// Its kind.
    pub kind: MappingKind,
}

/// Code of managed runtimes, and what the unwinder needs to walk its frames.
#[derive(Debug, Clone, Default)]
pub struct ManagedCode {
    /// Where the code is: sorted, disjoint.
    pub mappings: Vec<CodeMapping>,
    /// Of a HotSpot JVM, to which the mappings of kind [`MappingKind::Hotspot`] belong.
    pub hotspot: Option<bpf::Hotspot>,
    /// Of a CPython.
    pub python: Option<bpf::Python>,
}

impl ManagedCode {
    /// Puts the code in place of other mappings at its addresses, which are those that the kernel shows of it.
    pub fn replace_in(&self, mappings: &mut Vec<CodeMapping>) {
        for own in &self.mappings {
            let rest = mappings.drain(..).flat_map(|other| {
                let below = CodeMapping { end: other.end.min(own.begin), ..other };
                let above = CodeMapping { begin: other.begin.max(own.end), ..other };
                [below, above].into_iter().filter(|part| part.begin < part.end)
            });
            *mappings = rest.collect();
        }
        mappings.extend(&self.mappings);
    }
}

/// The difference between addresses in memory and in the file, for a mapping of file offset `offset` at `begin`; `None` if there is no
/// executable segment there.
#[must_use]
pub fn bias_of(segments: &[Segment], begin: u64, offset: u64) -> Option<u64> {
    let segment = segments.iter().find(|segment| {
        // Segments are mapped from the start of their first page.
        let first = segment.offset & !(page_bytes() - 1);
        segment.executable && first <= offset && offset < segment.offset.saturating_add(segment.file_bytes)
    })?;
    // The file's address of the byte at `offset`; both differences may be negative.
    let address = segment.address.wrapping_add(offset.wrapping_sub(segment.offset));
    Some(begin.wrapping_sub(address))
}

/// The blocks of a process's mapping table, and the number of mappings that were omitted.
#[must_use]
pub fn to_blocks(mappings: &[CodeMapping], hotspot: Option<&bpf::Hotspot>, python: Option<&bpf::Python>) -> (Vec<u8>, usize) {
    let mut sorted = mappings.to_vec();
    sorted.sort_by_key(|mapping| mapping.begin);
    sorted.dedup_by_key(|mapping| mapping.begin);
    let left_out = sorted.len().saturating_sub(MAPPINGS_MAX);
    sorted.truncate(MAPPINGS_MAX);

    let blocks = 1 + sorted.len().div_ceil(MAPPINGS_PER_BLOCK);
    for mapping in sorted.iter_mut().filter(|mapping| mapping.kind == MappingKind::Hotspot) {
        mapping.file = u32::try_from(blocks).unwrap_or(u32::MAX);
    }
    let of_python = blocks + usize::from(hotspot.is_some());
    let mut bytes = vec![0; (of_python + usize::from(python.is_some())) * BLOCK_BYTES];
    let mut put = put_blocks(&mut bytes);
    let header = bpf::MappingsHeader {
        mappings: u32::try_from(sorted.len()).unwrap_or(0),
        python: python.map_or(0, |_| u32::try_from(of_python).unwrap_or(0)),
        asked: 0,
    };
    put(header.as_bytes());
    for mappings in sorted.chunks(MAPPINGS_PER_BLOCK) {
        // The search uses `begin` only: unused entries are above every address.
        let unused = bpf::Mapping { begin: u64::MAX, end: u64::MAX, bias: 0, file: 0, kind: MappingKind::NoCfi as u32 };
        let mut block = [unused; MAPPINGS_PER_BLOCK];
        for (place, &CodeMapping { begin, end, bias, file, kind }) in block.iter_mut().zip(mappings) {
            *place = bpf::Mapping { begin, end, bias, file, kind: kind as u32 };
        }
        put(block.as_bytes());
    }
    if let Some(hotspot) = hotspot {
        put(hotspot.as_bytes());
    }
    if let Some(python) = python {
        put(python.as_bytes());
    }
    drop(put);
    (bytes, left_out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn mapping(begin: u64) -> CodeMapping {
        CodeMapping { begin, end: begin + 0x1000, bias: begin - 0x40, file: 7, kind: MappingKind::File }
    }

    #[test]
    fn mappings_are_sorted_and_unused_entries_are_above_every_address() {
        let (bytes, left_out) = to_blocks(&[mapping(0x9000), mapping(0x3000), mapping(0x5000)], None, None);
        assert_eq!((bytes.len(), left_out), (2 * BLOCK_BYTES, 0));
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 3);
        let begins: Vec<u64> = (0..8).map(|i| word(BLOCK_BYTES + 32 * i)).collect();
        assert_eq!(begins, [0x3000, 0x5000, 0x9000, u64::MAX, u64::MAX, u64::MAX, u64::MAX, u64::MAX]);
        assert_eq!((word(BLOCK_BYTES + 8), word(BLOCK_BYTES + 16), word(BLOCK_BYTES + 24)), (0x4000, 0x2fc0, 1 << 32 | 7));
    }

    #[test]
    fn a_runtimes_code_takes_the_place_of_what_the_kernel_shows_there() {
        let own = CodeMapping { begin: 0x4000, end: 0x6000, bias: 1, file: 0, kind: MappingKind::Hotspot };
        let jit = |begin, end| CodeMapping { begin, end, bias: 0, file: 0, kind: MappingKind::Jit };
        let mut mappings = vec![jit(0x1000, 0x2000), jit(0x3000, 0x4800), jit(0x5000, 0x5800), jit(0x5900, 0x7000)];
        ManagedCode { mappings: vec![own], hotspot: None, python: None }.replace_in(&mut mappings);
        mappings.sort_by_key(|mapping| mapping.begin);
        assert_eq!(mappings, [jit(0x1000, 0x2000), jit(0x3000, 0x4000), own, jit(0x6000, 0x7000)]);
    }

    #[test]
    fn mappings_beyond_the_limit_are_omitted_and_counted() {
        let many: Vec<CodeMapping> = (0..MAPPINGS_MAX as u64 + 5).map(|i| mapping(0x10_0000 + i * 0x2000)).collect();
        assert_eq!(to_blocks(&many, None, None).1, 5);
    }

    #[test]
    fn the_bias_is_that_of_the_executable_segment_even_where_another_shares_its_first_page() {
        // lld's layout: the text begins in the middle of the last page of the previous segment.
        let before = Segment { offset: 0, address: 0, file_bytes: 0x163fc, executable: false };
        let text = Segment { offset: 0x16400, address: 0x17400, file_bytes: 0x46000, executable: true };
        assert_eq!(bias_of(&[before, text], 0x5555_0001_7000, 0x16000), Some(0x5555_0000_0000));
        assert_eq!(bias_of(&[before], 0x5555_0001_7000, 0x16000), None);
    }
}
