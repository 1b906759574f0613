//! Sizes of the tables' blocks (`enum fp_table_layout` of `bpf/unwind_table.h`, where each is described).

use crate::bpf;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = bpf::BLOCK_BYTES as usize;
/// Granules per index block.
pub const INDEX_GRANULES: usize = bpf::INDEX_GRANULES as usize;
/// Rows per block.
pub const ROWS_PER_BLOCK: usize = bpf::ROWS_PER_BLOCK as usize;
/// Rules per block.
pub const RULES_PER_BLOCK: usize = bpf::RULES_PER_BLOCK as usize;
/// Mappings per block.
pub const MAPPINGS_PER_BLOCK: usize = bpf::MAPPINGS_PER_BLOCK as usize;
/// Maximum number of executable mappings kept per process.
pub const MAPPINGS_MAX: usize = bpf::MAPPINGS_MAX as usize;

/// Writes each piece into a block of its own, one after the other; pieces that do not fit are omitted.
pub fn put_blocks<'a>(out: &'a mut [u8]) -> impl FnMut(&[u8]) + 'a {
    let mut blocks = out.chunks_exact_mut(BLOCK_BYTES);
    move |piece| {
        if let Some(place) = blocks.next().and_then(|block| block.get_mut(..piece.len())) {
            place.copy_from_slice(piece);
        }
    }
}
