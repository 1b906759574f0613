//! The input of a ledger: the events of one process, as plain values, in the order in which they happened.
//!
//! A free is reported at the entry of the allocator's function and an allocation at its return, so the free of an address always comes before its
//! next allocation, whatever the threads do.

use crate::trace::How;
use crate::units::{Addr, StackHash};

/// One event. Times are CLOCK_MONOTONIC nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// A block was allocated.
    Alloc {
        /// Start of the block, never 0.
        addr: Addr,
        /// Bytes requested; 0 is a block like any other.
        size_bytes: u64,
        /// The allocating stack; 0 = no stack could be taken.
        stack: StackHash,
        /// Kernel thread id.
        tid: u32,
        /// Its alignment, and whether it is zeroed: for traces.
        how: How,
        /// When.
        time_ns: u64,
    },
    /// A block is about to be freed.
    Free {
        /// Start of the block.
        addr: Addr,
        /// The freeing stack; 0 = not recorded.
        stack: StackHash,
        /// Kernel thread id.
        tid: u32,
        /// When.
        time_ns: u64,
    },
    /// Like `Free`, by a realloc that may still fail: undone by `ReallocFail` of the same thread, final with the thread's next `Alloc`.
    ReallocFree {
        /// Start of the old block.
        addr: Addr,
        /// The stack that called realloc; 0 = not recorded.
        stack: StackHash,
        /// Kernel thread id.
        tid: u32,
        /// When.
        time_ns: u64,
    },
    /// The realloc failed: the old block stays live.
    ReallocFail {
        /// Start of the old block.
        addr: Addr,
        /// Kernel thread id.
        tid: u32,
    },
    /// The frames behind a stack hash.
    DefineStack {
        /// The hash that allocations and frees name.
        hash: StackHash,
        /// Frame words (flags and address, `fragprof.h`), leaf first.
        frames: &'a [u64],
        /// Why the walk ended (`enum fp_unwind_end`).
        end: u8,
    },
    /// The range `[start, end)` is no longer mapped: no block allocated before can be live in it.
    Unmapped {
        /// First byte.
        start: Addr,
        /// One past the last byte.
        end: Addr,
        /// When.
        time_ns: u64,
    },
    /// Records were lost some time before `time_ns`.
    Loss {
        /// Allocation records.
        alloc: u64,
        /// Free records.
        free: u64,
        /// Records of other kinds.
        other: u64,
        /// When the loss was noticed, or a later time.
        time_ns: u64,
    },
    /// Nothing was observed between two times.
    Gap {
        /// From.
        start_ns: u64,
        /// To.
        end_ns: u64,
    },
}
