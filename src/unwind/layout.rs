//! Sizes of the tables' blocks, as counts of things in memory (`enum fp_table_layout` of `bpf/unwind_table.h`, where each is described).

use crate::bpf;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = bpf::BLOCK_BYTES as usize;
/// Granules of one index block.
pub const INDEX_GRANULES: usize = bpf::INDEX_GRANULES as usize;
/// Rows of a block.
pub const ROWS_PER_BLOCK: usize = bpf::ROWS_PER_BLOCK as usize;
/// Rules of a block.
pub const RULES_PER_BLOCK: usize = bpf::RULES_PER_BLOCK as usize;
/// Mappings of a block.
pub const MAPPINGS_PER_BLOCK: usize = bpf::MAPPINGS_PER_BLOCK as usize;
/// Executable mappings kept of a process.
pub const MAPPINGS_MAX: usize = bpf::MAPPINGS_MAX as usize;

/// Writes each piece into a block of its own, one after the other; what does not fit is left out.
pub fn put_blocks<'a>(out: &'a mut [u8]) -> impl FnMut(&[u8]) + 'a {
    let mut blocks = out.chunks_exact_mut(BLOCK_BYTES);
    move |piece| {
        if let Some(place) = blocks.next().and_then(|block| block.get_mut(..piece.len())) {
            place.copy_from_slice(piece);
        }
    }
}
