//! What if: a trace's calls made again, in a process of their own, under another allocator or other settings, and measured.
//!
//! ```text
//! trace ──→ survey ──→ scenario ──→ engine ──ring──→ player (a confined process; the allocator in question)
//!           room,        setting,      │ samples, censuses          ▲
//!           accounts     blocks        ▼                            └── sandbox
//!                                   Replay ──→ forecast: calibration, figures, brackets, the best ──→ curves (SVG)
//!                                          ──→ causes: what the blocks of a stack cost
//!                             load ─────────→ enough: whether the trace is long enough
//! ```
//!
//! The heap of the player is that of the recorded calls alone. Order, threads, sizes, alignments and times are the recorded ones; that every
//! block is written to as a whole is assumed. docs/whatif.md says what cannot be predicted, design note 0021 why it is done this way.

pub mod causes;
pub mod curves;
pub mod engine;
pub mod enough;
pub mod forecast;
pub mod load;
mod observe;
pub mod outcome;
pub mod player;
mod sandbox;
pub mod setting;
pub mod survey;

pub use engine::{Blocks, ReplayError, Scenario, replay};
pub use enough::Enough;
pub use forecast::{Calibration, Figures, Prediction};
pub use outcome::{Moment, Replay, Sample};
pub use player::Limits;
pub use setting::Setting;
pub use survey::Survey;
