//! One request of the scratch process, and the instructions that it reached.

use crate::selective::{Holds, SEEN_FROM_BYTES};

/// The functions whose sites are searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Function {
    Malloc,
    Calloc,
    Free,
}

impl Function {
    pub(super) const ALL: [Self; 3] = [Self::Malloc, Self::Calloc, Self::Free];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Malloc => "malloc",
            Self::Calloc => "calloc",
            Self::Free => "free",
        }
    }
}

/// How often a request must reach the sites of its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Passes {
    /// A block beyond the thread cache.
    Once,
    /// A small block: depends on the cache's contents.
    AtMostOnce,
    /// A small block that was taken from the cache or put into it; a request that failed; a free of no block.
    Never,
}

impl Passes {
    /// The rule for a block for which so many bytes were requested, or for none.
    pub(super) fn of(bytes: u64, block: u64) -> Self {
        match (block, bytes) {
            (0, _) => Self::Never,
            (_, SEEN_FROM_BYTES..) => Self::Once,
            _ => Self::AtMostOnce,
        }
    }
}

/// The general-purpose registers at an instruction of interest, by DWARF number.
#[derive(Debug, Clone)]
pub(super) struct Visit {
    /// Virtual address in the file.
    pub vaddr: u64,
    /// Their values.
    pub registers: [u64; 16],
    /// Bit n = register n holds the address of a block that was live before the request; bit 16 + n = that of such a block's chunk.
    pub live: u32,
}

/// Distance from a chunk's address to its block's (glibc's `chunk2mem`), in bytes.
const CHUNK_HEADER_BYTES: u64 = 16;

impl Visit {
    /// The block that a register refers to; `None` if it refers to none.
    pub(super) fn block(&self, register: u8, holds: Holds) -> Option<u64> {
        let value = self.registers.get(usize::from(register)).copied().filter(|&value| value != 0)?;
        match holds {
            Holds::Block => Some(value),
            Holds::Chunk => Some(value.wrapping_add(CHUNK_HEADER_BYTES)),
        }
    }

    /// Whether that block was live before the request.
    pub(super) fn tells_of_live(&self, register: u8, holds: Holds) -> bool {
        let bit = u32::from(register) + if holds == Holds::Chunk { 16 } else { 0 };
        self.live >> bit & 1 == 1
    }

    /// Records which registers refer to blocks for which `is_live` is true.
    pub(super) fn note_live(&mut self, is_live: impl Fn(u64) -> bool) {
        for register in 0..16 {
            for holds in [Holds::Block, Holds::Chunk] {
                let bit = u32::from(register) + if holds == Holds::Chunk { 16 } else { 0 };
                self.live |= u32::from(self.block(register, holds).is_some_and(&is_live)) << bit;
            }
        }
    }
}

/// A completed request.
#[derive(Debug, Clone)]
pub(super) struct Done {
    /// Its function.
    pub function: Function,
    /// The block allocated or freed; 0 = none.
    pub block: u64,
    /// The expected number of passes.
    pub passes: Passes,
    /// The candidates that it reached, in order.
    pub visits: Vec<Visit>,
}
