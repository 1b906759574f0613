//! The mirror of `bpf/unwind_table.h`: sizes of the blocks and how each part is packed. Little-endian, as x86-64 and arm64 are.

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 256;
/// Log2 of the text covered by one index entry.
pub const GRANULE_SHIFT: u32 = 12;
/// Granules of one index block.
pub const INDEX_GRANULES: usize = 63;
/// Rows of a block.
pub const ROWS_PER_BLOCK: usize = 64;
/// Rules of a block.
pub const RULES_PER_BLOCK: usize = 32;
/// Mappings of a block.
pub const MAPPINGS_PER_BLOCK: usize = 8;
/// Executable mappings kept of a process.
pub const MAPPINGS_MAX: usize = 8192;
/// Files with a table at a time: the size of the outer map, `tables`.
pub const FILES_MAX: u32 = 8192;

/// Offset of `last_used` in `struct fp_table_header`.
pub const HEADER_LAST_USED: usize = 20;

/// Writes a `u16` at an offset; nothing if it would not fit.
pub fn put_u16(bytes: &mut [u8], offset: usize, value: u16) {
    put(bytes, offset, &value.to_le_bytes());
}

/// Writes a `u32` at an offset; nothing if it would not fit.
pub fn put_u32(bytes: &mut [u8], offset: usize, value: u32) {
    put(bytes, offset, &value.to_le_bytes());
}

/// Writes a `u64` at an offset; nothing if it would not fit.
pub fn put_u64(bytes: &mut [u8], offset: usize, value: u64) {
    put(bytes, offset, &value.to_le_bytes());
}

fn put(bytes: &mut [u8], offset: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(offset..).and_then(|rest| rest.get_mut(..value.len())) {
        place.copy_from_slice(value);
    }
}

/// `enum fp_mapping_kind`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MappingKind {
    /// A file (or the vdso) that has a table, or will have.
    File = 1,
    /// Generated code: frame pointers.
    Jit = 2,
    /// A file without unwind information, or whose table was refused.
    NoCfi = 3,
}
