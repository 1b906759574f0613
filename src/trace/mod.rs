//! Traces: every event of one process in order, in a stream that can be replayed. Pure, apart from the stream itself.
//!
//! ```text
//! file  = magic, version, chunks
//! chunk = kind u8, payload bytes u32, contents bytes u32, CRC-32 of the payload u32, payload (zstd)
//! ```
//!
//! All numbers are little-endian. The kinds are in [`Kind`]: a header, events, an account of the heap, its use of memory over time, the
//! heap from before the recording, names of stacks, and the end. A chunk of an unknown kind is skipped. Each event is complete within its chunk, and a trace that was cut is readable up to its last whole chunk.
//! `docs/trace-format.md` describes the events byte by byte.
//!
//! Events take 2 to 4 bytes before compression: the thread and the time are stored when they differ from the last event's, requests (stack,
//! size, alignment) are numbered when they first occur, and a free names its block by the number of allocations since.

pub mod codec;
pub mod convert;
pub mod event;
pub mod names;
pub mod read;
pub mod seed;
pub mod write;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::heap::ladder::Ladder;

pub use event::{Event, How, Request};
pub use names::{Names, NamesWriter};
pub use read::Reader;
pub use seed::{SEED_CHUNKS, Seed, SeedChunk, SeedRegion};
pub use write::Writer;

/// The first bytes of a trace.
pub const MAGIC: [u8; 7] = *b"FPTRACE";
/// The version of the format, the byte after the magic. Readers refuse others.
pub const VERSION: u8 = 3;
/// Resolution of times, in nanoseconds.
pub const TICK_NS: u64 = 10_000;
/// Contents of a chunk of events, before compression. A little more is possible: an event is not divided.
pub const CHUNK_BYTES: usize = 256 << 10;
/// Of [`Header::lacks`]: the times are made up.
pub const NO_TIMES: &str = "times";
/// Of [`Header::lacks`]: all events are given to one thread.
pub const NO_THREADS: &str = "threads";
/// Largest contents of any chunk that a reader accepts.
pub const CONTENTS_BYTES_MAX: usize = 64 << 20;

/// What a chunk contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// [`Header`] in JSON, the first chunk.
    Header = 1,
    /// Events.
    Events = 2,
    /// [`Account`] in JSON: the heap at a moment.
    Account = 3,
    /// [`Names`] in JSON.
    Names = 4,
    /// [`End`] in JSON, the last chunk.
    End = 5,
    /// [`Usage`] in JSON.
    Usage = 6,
    /// A [`SeedRegion`] or several: the heap from before the recording.
    Seed = 7,
}

impl Kind {
    /// The kind with a number.
    #[must_use]
    pub fn of(number: u8) -> Option<Self> {
        [Self::Header, Self::Events, Self::Account, Self::Names, Self::End, Self::Usage, Self::Seed]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// What was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Header {
    /// The program that wrote the trace, with its version.
    pub tool: String,
    /// The recorded process.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// The machine's instruction set, as in `uname -m`.
    pub machine: String,
    /// CPUs that the process could use: allocators create arenas by their number.
    pub cpus: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Allocators that were recorded, as `name in file`.
    pub allocators: Vec<String>,
    /// Variables of the process's environment that configure allocators; no others are stored.
    pub environment: Vec<(String, String)>,
    /// Start, CLOCK_REALTIME nanoseconds; 0 = not known.
    pub start_unix_ns: u64,
    /// Start on the clock of the events, nanoseconds.
    pub start_ns: u64,
    /// Whether the recording began before the process's first allocation.
    pub is_from_start: bool,
    /// What another tool's file it was converted from; empty if it was recorded.
    pub converted_from: String,
    /// What that file does not tell, such as [`NO_TIMES`].
    pub lacks: Vec<String>,
}

impl Header {
    /// Whether events are those of the threads that made them.
    #[must_use]
    pub fn has_threads(&self) -> bool {
        self.lacks.iter().all(|one| one != NO_THREADS)
    }

    /// Whether the times of the events are those of the program.
    #[must_use]
    pub fn has_times(&self) -> bool {
        self.lacks.iter().all(|one| one != NO_TIMES)
    }
}

/// The heap at a moment, from a census.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Account {
    /// When, on the clock of the events, nanoseconds: the middle of the census.
    pub time_ns: u64,
    /// How long the census took. The process ran on: what changed meanwhile may be half seen.
    pub took_ns: u64,
    /// Its ladder.
    #[serde(flatten)]
    pub heap: Ladder<Option<u64>>,
    /// Its large live blocks, by stack.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub large: Vec<LargeBlocks>,
}

/// Blocks of at least this many bytes need not be touched as a whole.
pub const LARGE_BYTES: u64 = 16 << 10;

/// Live blocks of one stack of at least [`LARGE_BYTES`], and how much of them the program has touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LargeBlocks {
    /// Number of the stack.
    pub stack: u32,
    /// Bytes requested.
    pub bytes: u64,
    /// Of them, resident: on pages that were touched, perhaps by an earlier owner. Pages shared with neighbours count if all others do.
    pub resident_bytes: u64,
}

/// Anonymous memory of the process over time, as the kernel counts it: the heap's, and some that is not the heap's.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Times on the clock of the events in nanoseconds, each with bytes.
    pub samples: Vec<(u64, u64)>,
}

/// What the trace contains altogether.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct End {
    /// From the start to the end of the process or the recording, in nanoseconds; if the trace was cut short, to its last event.
    pub duration_ns: u64,
    /// Events.
    pub events: u64,
    /// Allocations of the last image, with those of reallocs.
    pub allocations: u64,
    /// Its frees, with those of reallocs.
    pub frees: u64,
    /// Records that were lost: the replay has blocks that were freed, or lacks blocks.
    pub lost: u64,
    /// Why the trace ends before the recording; empty if it does not.
    pub cut_short: String,
    /// Whether the process ended during the recording.
    pub has_exited: bool,
    /// Allocators of the last image, as in the header.
    pub allocators: Vec<String>,
    /// Threads and their arenas of the seed, by the addresses that they were given.
    pub arenas: Vec<(u32, u32)>,
    /// Why a recording that began while the process ran has no seed, or only a part of it; empty if it is whole, or not needed.
    pub no_seed: String,
}

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Io(#[from] std::io::Error),
    /// Its first bytes are wrong.
    #[error("it is not a trace; a replay needs every call in its order, which record --trace FILE writes")]
    NotATrace,
    /// It was written by another version.
    #[error("it has version {found} of the format, and this fragprof reads version {VERSION}")]
    Version {
        /// The file's version.
        found: u8,
    },
    /// A chunk is invalid.
    #[error("the chunk at byte {at} is damaged: {reason}")]
    Damaged {
        /// Offset of the chunk in the file.
        at: u64,
        /// What is wrong.
        reason: &'static str,
    },
}
