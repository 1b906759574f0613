//! Which blocks of a heap are still pointed to, found from outside: roots and live blocks are scanned for words that are addresses.
//!
//! ```text
//! census ─→ index (address → block) ─┐
//! mappings, threads ─→ areas ────────┴→ pass (mark from roots through blocks) ─→ candidates ─→ quick scans ─→ leaks
//! ```
//!
//! Without probes, and without stopping the process: a running program moves its pointers during the scan, so a single scan is not enough.
//! The candidates that it leaves are checked by several more; a block counts only if no scan saw a pointer to it, its contents did not
//! change, and the censuses around the last scan show it in use.

pub mod areas;
pub mod blocked;
pub mod blocks;
pub mod candidates;
pub mod chains;
pub mod contents;
pub mod describe;
pub mod dominators;
pub mod graph;
pub mod holdings;
pub mod index;
pub mod leaks;
pub mod limit;
pub mod mark;
pub mod names;
pub mod owners;
pub mod pass;
pub mod pinned;
mod prefetch;
pub mod reader;
pub mod scans;
pub mod shares;
pub mod suspects;
pub mod trait_objects;
pub mod wording;

pub use areas::{Areas, Class};
pub use blocks::Blocks;
pub use candidates::Candidates;
pub use index::BlockIndex;
pub use leaks::Leaks;
pub use scans::{Doubts, Plan, ScanError, ScanResult, scan};
