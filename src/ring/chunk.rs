//! The cells of a chunk.

use super::memory::{CELL_BYTES, Memory};
use crate::bpf::{self, RingKind};
use crate::units::Addr;

/// Words of a cell.
const CELL_WORDS: usize = CELL_BYTES / 8;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A block was allocated.
    Alloc {
        /// Bytes requested.
        size_bytes: u64,
        /// log2 of the alignment asked for; 0 = none.
        alignment_bits: u8,
        /// It is to be zeros.
        is_zeroed: bool,
    },
    /// A block is about to be freed.
    Free,
    /// The same, by a realloc that may still fail.
    ReallocFree,
    /// The thread's realloc failed.
    ReallocFail,
    /// A child was forked.
    Fork {
        /// Its pid.
        child: u32,
    },
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// The block.
    pub addr: Addr,
    /// Number of its stack; 0 = none.
    pub stack: u32,
    /// Kernel thread id, as the thread says.
    pub tid: u32,
    /// How long ago, ns.
    pub age_ns: u64,
}

/// A cell at which a chunk is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cell {
    /// An event with its ticket.
    Event(u64),
    /// A stack, of so many cells.
    Stack(u32),
    /// Neither: the rest of the chunk has no meaning.
    Malformed,
}

/// What is at a cell, of which `left` follow, itself included.
pub(super) fn cell(memory: &Memory, chunk: u32, at: u32, left: u32) -> Cell {
    let head = memory.word(chunk, at, 0);
    match RingKind::from_wire((head & 0xff) as u32) {
        None => Cell::Malformed,
        Some(RingKind::Stack) => {
            let frames = memory.word(chunk, at, 1) >> 32 & 0xffff;
            let cells = 1 + (frames as u32).div_ceil(CELL_WORDS as u32);
            if frames <= u64::from(bpf::FRAMES_MAX) && cells <= left { Cell::Stack(cells) } else { Cell::Malformed }
        }
        Some(_) => Cell::Event(head >> bpf::RING_TICKET_SHIFT),
    }
}

/// The event at a cell.
pub(super) fn event(memory: &Memory, chunk: u32, at: u32, tid: u32, age: impl Fn(u32) -> u64) -> Option<Event> {
    let address = !memory.word(chunk, at, 1);
    let addr = address & ((1 << bpf::RING_ADDRESS_BITS) - 1);
    let last = memory.word(chunk, at, 3);
    let kind = match RingKind::from_wire((memory.word(chunk, at, 0) & 0xff) as u32)? {
        RingKind::Alloc => Kind::Alloc {
            size_bytes: memory.word(chunk, at, 2),
            alignment_bits: (address >> bpf::RING_ADDRESS_BITS) as u8 & 63,
            is_zeroed: address >> bpf::RING_ZEROED_BIT & 1 != 0,
        },
        RingKind::Free => Kind::Free,
        RingKind::ReallocFree => Kind::ReallocFree,
        RingKind::ReallocFail => Kind::ReallocFail,
        RingKind::Fork => Kind::Fork { child: addr as u32 },
        RingKind::Stack => return None,
    };
    Some(Event { kind, addr: Addr(addr), stack: (last >> 32) as u32, tid, age_ns: age(last as u32) })
}

/// The number, the frames and the end of the stack at a cell.
pub(super) fn stack(memory: &Memory, chunk: u32, at: u32, frames: &mut Vec<u64>) -> (u32, u8) {
    let word = memory.word(chunk, at, 1);
    let len = (word >> 32 & 0xffff).min(u64::from(bpf::FRAMES_MAX)) as usize;
    frames.clear();
    // Frames of other kinds are made by the daemon alone.
    let native = (1 << bpf::FRAME_KIND_BIT) - 1;
    frames.extend((0..len).map(|index| memory.word(chunk, at + 1 + (index / CELL_WORDS) as u32, index % CELL_WORDS) & native));
    (word as u32, (word >> 48) as u8)
}
