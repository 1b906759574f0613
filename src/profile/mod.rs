//! The profile model, its encoders (pprof, folded, SVG, JSON) and the difference of two profiles.
//!
//! A recording fills a [`Profile`]; `report`, `flamegraph`, `export` and `diff` read it back from a pprof file. Nothing here reads the
//! clock, the terminal or another process.
//!
//! ```text
//! recorder → Profile → pprof::write → file → pprof::read → Profile → text, folded, SVG, JSON, diff
//! ```

pub mod coverage;
pub mod diff;
pub mod folded;
pub mod frames;
pub mod glue;
mod hints;
pub mod histogram;
pub mod json;
pub mod kind;
pub mod meta;
pub mod model;
pub mod page;
pub mod pprof;
pub mod rows;
pub mod svg;
#[cfg(test)]
pub(crate) mod testing;
pub mod text;
pub mod tree;

pub use crate::frame::{Frame, FrameFlags};
pub use frames::FrameFilter;
pub use histogram::PowerCounts;
pub use kind::{KindSet, StandardErrors, ValueKind, Values};
pub use meta::{Attribution, Counter, Governed, HeapMoment, HeapSummary, LargeBlocks, Metadata, Mode, Process};
pub use model::{BEFORE_ATTACH, FrameId, Profile, Stack, UNATTRIBUTED};
