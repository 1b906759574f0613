//! Allocator metadata read from outside: how much of a heap is live, cached, free, trimmable and pinned, without probes and without stopping the
//! process.
//!
//! ```text
//! memory (live | core_file | fixture) ──→ detect → locate → walk ──→ account (+ chunks, for the join with the ledger)
//!                                          glibc, jemalloc, musl, tcmalloc, google_tcmalloc, mimalloc, pymalloc
//! ```
//!
//! Layouts are found by structure, never by version. What is not understood is reported as unknown, never guessed; each result states its
//! quality.

pub mod account;
pub mod chunks;
pub mod core_file;
pub mod fixture;
pub mod glibc;
pub mod google_tcmalloc;
pub mod huge;
pub mod jemalloc;
pub mod kernel_pages;
pub mod layout_cache;
pub mod live;
pub mod map;
pub mod memory;
pub mod mimalloc;
pub mod musl;
pub mod not_malloc;
pub mod not_understood;
pub mod objects;
pub mod pace;
pub mod page_cache;
pub mod page_map;
pub mod pymalloc;
pub mod quality;
pub mod radix;
pub mod reader;
pub mod resident;
pub mod runtime;
pub mod searched;
mod shares;
pub mod take;
pub mod tcmalloc;
pub mod threads;

pub use account::{ArenaAccount, ArenaChunks, Census, HeapAccount, Level, NotMalloc, OccupancyEstimate, SizeClass};
pub use chunks::{Block, Chunk, ChunkState, ChunkTable};
pub use core_file::CoreFile;
pub use fixture::Fixture;
pub use live::LiveMemory;
pub use memory::{Memory, MemoryError};
pub use pace::Pace;
pub use page_map::PageMap;
pub use quality::WalkQuality;
pub use reader::HeapWalk;
pub use runtime::Runtimes;
pub use take::{LayoutCache, Options, Taken, add_blocks, all_own_ranges, take};
pub use threads::ThreadState;
