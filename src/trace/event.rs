//! The events of a trace.

/// One event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Number of the thread, by first occurrence from 0.
    pub thread: u32,
    /// CLOCK_MONOTONIC nanoseconds, rounded down to [`super::TICK_NS`]; never before the last event's.
    pub time_ns: u64,
    /// What happened.
    pub op: Op,
}

/// What was requested, and by whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    /// Number of the stack, by first occurrence from 0.
    pub stack: u32,
    /// Bytes requested.
    pub size_bytes: u64,
    /// log2 of the requested alignment; 0 = the allocator's own.
    pub alignment_bits: u8,
    /// Whether the block is to be zeros, as from calloc.
    pub is_zeroed: bool,
}

/// How a block was requested, beside its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct How {
    /// log2 of the requested alignment; 0 = the allocator's own.
    pub alignment_bits: u8,
    /// Whether the block is to be zeros, as from calloc.
    pub is_zeroed: bool,
}

/// What happened. Blocks have numbers: that of their allocation, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// A block was allocated; after a [`Op::ReallocFree`] of the thread, by that realloc.
    Alloc(Request),
    /// A block is freed.
    Free {
        /// Its number.
        block: u64,
    },
    /// A block whose allocation is not in the trace is freed.
    FreeUnknown {
        /// Its address.
        addr: u64,
    },
    /// A realloc takes a block: the thread's next allocation is its result.
    ReallocFree {
        /// Its number.
        block: u64,
    },
    /// The same with a block whose allocation is not in the trace.
    ReallocFreeUnknown {
        /// Its address.
        addr: u64,
    },
    /// The thread's realloc failed: its block is still allocated.
    ReallocFail {
        /// Its number.
        block: u64,
    },
    /// The program, not its allocator, mapped private anonymous memory.
    Map {
        /// Start.
        addr: u64,
        /// Bytes.
        bytes: u64,
        /// Whether it may be written.
        is_writable: bool,
    },
    /// It unmapped memory.
    Unmap {
        /// Start.
        addr: u64,
        /// Bytes.
        bytes: u64,
    },
    /// The program, not its allocator, moved the program break.
    Break {
        /// The break after the call.
        end: u64,
    },
    /// Records were lost before this event.
    Lost {
        /// Number of them.
        records: u64,
    },
    /// The thread ended.
    ThreadEnd,
    /// Requests are numbered anew.
    ForgetRequests,
    /// The process replaced its image: no block of before exists any more, and all other threads have ended.
    Exec,
}

impl Op {
    /// The number in the low bits of an event's first byte.
    #[must_use]
    pub fn number(&self) -> u8 {
        match self {
            Self::Alloc(_) => 0,
            Self::Free { .. } | Self::FreeUnknown { .. } => 1,
            Self::ReallocFree { .. } | Self::ReallocFreeUnknown { .. } => 2,
            Self::ReallocFail { .. } => 3,
            Self::Map { .. } => 4,
            Self::Unmap { .. } => 5,
            Self::Break { .. } => 6,
            Self::Lost { .. } => 7,
            Self::ThreadEnd => 8,
            Self::ForgetRequests => 9,
            Self::Exec => 10,
        }
    }
}
