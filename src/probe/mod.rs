//! Where to probe: placement by disassembly, entry points of each allocator, and what this kernel can attach.
//!
//! ```text
//! functions (entry points, call shapes) ─┐
//! allocator::detect (allocators found) ─────┼→ plan (sites to attach, per file)
//! placement (which instruction) ─────────┘        cookie (what a site tells the program)
//! features (how to attach) ── decides ──→ capture
//! ```

pub mod branches;
pub mod cookie;
pub mod copies;
pub mod features;
pub mod flow;
pub mod forward;
pub mod placement;
pub mod placement_arm64;
pub mod plan;

pub use cookie::Cookie;
pub use features::Features;
pub use placement::{Emulation, Placement, place};
pub use plan::{FilePlan, Plan, Planner, SitePlan, plan};
