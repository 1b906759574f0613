//! What one request of the scratch process was, and which instructions it passed.

use super::{Holds, SEEN_FROM_BYTES};

/// The functions whose sites are looked for.
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

/// How often a request has to pass the sites of its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Passes {
    /// A block beyond the thread cache.
    Once,
    /// A small block: it depends on what the cache has.
    AtMostOnce,
    /// A small block that came from the cache or went there; a request that failed; free of no block.
    Never,
}

impl Passes {
    /// Of a block of so many bytes asked for, or of none.
    pub(super) fn of(bytes: u64, block: u64) -> Self {
        match (block, bytes) {
            (0, _) => Self::Never,
            (_, SEEN_FROM_BYTES..) => Self::Once,
            _ => Self::AtMostOnce,
        }
    }
}

/// The general registers at an instruction of interest, by DWARF number.
#[derive(Debug, Clone)]
pub(super) struct Visit {
    /// Virtual address in the file.
    pub vaddr: u64,
    /// Their values.
    pub registers: [u64; 16],
    /// Bit n = register n holds the address of a block that was live before the request; bit 16 + n = that of such a block's chunk.
    pub live: u32,
}

/// Bytes from a chunk's address to its block's (glibc's `chunk2mem`).
const CHUNK_HEADER_BYTES: u64 = 16;

impl Visit {
    /// The block that a register tells of; `None` if it tells of none.
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

    /// Notes which registers tell of blocks that `is_live` knows.
    pub(super) fn note_live(&mut self, is_live: impl Fn(u64) -> bool) {
        for register in 0..16 {
            for holds in [Holds::Block, Holds::Chunk] {
                let bit = u32::from(register) + if holds == Holds::Chunk { 16 } else { 0 };
                self.live |= u32::from(self.block(register, holds).is_some_and(&is_live)) << bit;
            }
        }
    }
}

/// A request that was made.
#[derive(Debug, Clone)]
pub(super) struct Done {
    /// Of which function.
    pub function: Function,
    /// The block handed out or taken back; 0 = none.
    pub block: u64,
    /// The truth.
    pub passes: Passes,
    /// The candidates that it passed, in order.
    pub visits: Vec<Visit>,
}
