//! The state of a node's processes, as every surface reads it: metrics, history, API, pages, pushes, the live view.
//!
//! ```text
//! sample (one process) ─┐
//! attribution (stacks) ─┼→ snapshot (the node, immutable) ─→ view (as shown)
//! counters (the agent) ─┘
//! ```

pub mod attribution;
pub mod counters;
pub mod map;
pub mod profile;
pub mod sample;
pub mod seen;
pub mod snapshot;
pub mod view;

pub use sample::ProcessSample;
pub use snapshot::{Published, Snapshot};
