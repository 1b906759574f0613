//! Which blocks of a heap something still points at, found from outside: roots and live blocks are read for words that are addresses.
//!
//! ```text
//! census ─→ index (address → block) ─┐
//! mappings, threads ─→ areas ────────┴→ pass (mark from roots through blocks) ─→ candidates ─→ looks ─→ leaks
//! ```
//!
//! No probe, no stop: a running program moves its pointers while they are read, so one pass says nothing. What it leaves unreached is looked
//! for again several times; a block counts only if no look saw a pointer to it, its contents stayed the same, and a last census still has it
//! in use.

pub mod areas;
pub mod blocked;
pub mod blocks;
pub mod candidates;
pub mod chains;
pub mod contents;
pub mod dominators;
pub mod frames;
pub mod graph;
pub mod holdings;
pub mod index;
pub mod leaks;
pub mod limit;
pub mod looks;
pub mod mark;
pub mod names;
pub mod owners;
pub mod pass;
pub mod pinned;
pub mod reader;
pub mod shares;
pub mod suspects;
pub mod teller;
pub mod told;

pub use areas::{Areas, Class};
pub use blocks::Blocks;
pub use candidates::Candidates;
pub use index::BlockIndex;
pub use leaks::Leaks;
pub use looks::{Doubts, LooksError, Plan, Seen, look};
