//! The live view of all processes, and of one of them with its address space, from an agent or from a collector inside `top`.
//!
//! ```text
//! agent ───────┐
//!              ├─ source (thread fragprof-top) ─→ Sample ─┬─ draw(sample, state) ─→ terminal
//! embedded ────┘                                          └─ cells::page ─→ plain text
//! ```
//!
//! A [`Sample`] is the agent's model: only shares of the figures shown are computed here.

pub mod cells;
pub mod draw;
pub mod embedded;
pub mod live;
pub mod source;
pub mod state;

use crate::model::map::MapView;
use crate::model::profile::ProfileView;
use crate::model::view::ProcessesView;

/// The agent's newest answer.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// Its processes.
    pub view: ProcessesView,
    /// The address space of the process that is open.
    pub map: Option<MapView>,
    /// Why there is no map.
    pub map_error: Option<String>,
    /// The stacks of the process that is open.
    pub profile: Option<ProfileView>,
    /// Why the agent does not answer; the figures are then old.
    pub error: Option<String>,
}
