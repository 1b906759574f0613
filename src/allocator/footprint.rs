//! How much of the heap a block takes: the bytes requested, plus the allocator's header and rounding.
//!
//! The ledger has the requested sizes. What an allocator adds is not free, so the pages' free bytes are right only if a block's whole chunk
//! counts as live (live = requested + rounding).

use crate::heap::pages::{Owner, Span};
use crate::heap::residency::page_bytes;
use crate::ledger::Block;

/// The rule of an allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Footprint {
    /// Unknown: a block counts with its requested bytes, and rounding counts as free.
    #[default]
    Requested,
    /// glibc on 64-bit machines (`malloc/malloc.c`, `request2size`): a chunk has an 8-byte size word before the block, is a multiple of
    /// 16 and at least 32 bytes. A chunk of its own mapping starts 16 bytes before the block, at a page, and is whole pages.
    Glibc,
    /// jemalloc: multiples of its quantum, then four size classes a doubling (`include/jemalloc/internal/sz.h`, `sz_s2u_compute`).
    Jemalloc {
        /// Bytes between the smallest classes: 16 by default.
        quantum_bytes: u64,
    },
}

/// Smallest block that glibc gives a mapping of its own, until larger ones have been freed (`DEFAULT_MMAP_THRESHOLD_MIN`).
const GLIBC_MMAP_THRESHOLD: u64 = 128 << 10;

impl Footprint {
    /// The rule with what these blocks show of the build. A jemalloc with a quantum of 8 (`--with-lg-quantum=3`, as redis brings it along)
    /// has blocks of more than 8 bytes at odd multiples of 8, one with the default never has.
    #[must_use]
    pub fn seen_in(self, mut blocks: impl Iterator<Item = Block>) -> Self {
        match self {
            Self::Jemalloc { .. } if blocks.any(|block| block.addr.0 % 16 == 8 && block.size_bytes > 8) => {
                Self::Jemalloc { quantum_bytes: 8 }
            }
            other => other,
        }
    }

    /// The heap bytes of a block, as a live span of its stack.
    pub fn span(self, block: &Block) -> Span {
        let addr = block.addr.0;
        let (start, end) = match self {
            Self::Requested => (addr, addr.saturating_add(block.size_bytes)),
            Self::Glibc if addr % page_bytes() == 16 && block.size_bytes >= GLIBC_MMAP_THRESHOLD => {
                let end = addr.saturating_add(block.size_bytes);
                (addr - 16, end.checked_next_multiple_of(page_bytes()).unwrap_or(end))
            }
            Self::Glibc => (addr.saturating_sub(8), addr.saturating_sub(8).saturating_add(glibc_chunk(block.size_bytes))),
            Self::Jemalloc { quantum_bytes } => (addr, addr.saturating_add(jemalloc_class(block.size_bytes, quantum_bytes))),
        };
        Span { start, bytes: end - start, owner: Owner::Stack(block.stack) }
    }
}

/// Bytes of a heap chunk for a request.
fn glibc_chunk(size_bytes: u64) -> u64 {
    (size_bytes.saturating_add(8 + 15) & !15).max(32)
}

/// The size class of a request.
fn jemalloc_class(size_bytes: u64, quantum_bytes: u64) -> u64 {
    if size_bytes <= 8 {
        return 8;
    }
    let step = (1 << ((size_bytes - 1).ilog2() - 2)).max(quantum_bytes);
    size_bytes.checked_next_multiple_of(step).unwrap_or(size_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::{Addr, StackId};

    #[test]
    #[cfg(all(target_env = "gnu", target_pointer_width = "64"))]
    fn the_chunk_of_a_request_is_that_of_glibc_itself() {
        for size_bytes in (0..3000).chain([65_535, 100_000, 131_000]) {
            // SAFETY: a block of its own, measured and freed here.
            let (addr, usable) = unsafe {
                let block = libc::malloc(size_bytes);
                let usable = libc::malloc_usable_size(block);
                libc::free(block);
                (block as u64, usable as u64)
            };
            let block = Block { addr: Addr(addr), size_bytes: size_bytes as u64, stack: StackId(0), birth_tick: 0 };
            let span = Footprint::Glibc.span(&block);
            // A reused chunk may be up to 16 bytes larger, if the remainder was too small for a chunk.
            let chunk = usable + 8;
            assert!(chunk == span.bytes || chunk == span.bytes + 16, "{size_bytes}: {chunk} and {}", span.bytes);
            assert_eq!(span.start, addr - 8);
        }
    }

    #[test]
    fn a_block_with_a_mapping_of_its_own_takes_whole_pages() {
        let block = Block { addr: Addr(0x7f00_0000_0010), size_bytes: 200_000, stack: StackId(0), birth_tick: 0 };
        let span = Footprint::Glibc.span(&block);
        assert_eq!((span.start, span.bytes), (0x7f00_0000_0000, 49 * 4096));
    }

    #[test]
    fn jemallocs_classes_are_those_of_its_manual() {
        // jemalloc(3), table "Size classes".
        let classes = [
            8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560,
            3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 20480,
        ];
        for size_bytes in 1..=20480_u64 {
            let class = classes.iter().copied().find(|&class| class >= size_bytes);
            assert_eq!(Some(jemalloc_class(size_bytes, 16)), class, "{size_bytes}");
        }
        // `MEMORY MALLOC-STATS` of a redis with its own jemalloc.
        let classes = [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192];
        for size_bytes in 1..=192_u64 {
            let class = classes.iter().copied().find(|&class| class >= size_bytes);
            assert_eq!(Some(jemalloc_class(size_bytes, 8)), class, "{size_bytes}");
        }
        let block = |addr, size_bytes| Block { addr: Addr(addr), size_bytes, stack: StackId(0), birth_tick: 0 };
        let seen = |blocks: &[Block]| Footprint::Jemalloc { quantum_bytes: 16 }.seen_in(blocks.iter().copied());
        assert_eq!(seen(&[block(0x7f00_0000_0008, 8), block(0x7f00_0000_0040, 24)]), Footprint::Jemalloc { quantum_bytes: 16 });
        assert_eq!(seen(&[block(0x7f00_0000_0000, 24), block(0x7f00_0000_0018, 20)]), Footprint::Jemalloc { quantum_bytes: 8 });
    }
}
