//! How much watching a process may cost, when its probes are attached, and what may be concluded from what was seen then. Pure: times,
//! costs and events are parameters; `recorder` and `agent` act.
//!
//! ```text
//! cost of a hit ─┐
//! hits seen ─────┼─→ pace ─→ schedule ─→ (attach, detach probes) ─→ observer ─→ estimate
//! budget ← share ┘           one window per cycle, at a random time      one window's tally   rates, survivors, standard errors
//! ```
//!
//! The basic rule: the position of a window is chosen in advance, uniformly within a cycle whose length is fixed by then. So each window
//! represents its cycle, whatever the program does, and sums over windows are unbiased.
//! docs/design/0007 has the equations.

pub mod cost;
pub mod estimate;
pub mod large;
pub mod observer;
pub mod pace;
pub mod retention;
pub mod schedule;
pub mod share;
#[cfg(test)]
mod simulation;

pub use cost::{HitCosts, Spent};
pub use estimate::{Estimates, Estimator, Quantity, StackEstimate, Watched};
pub use large::{LargePace, Left};
pub use observer::{Tally, ThreadTime, WindowObserver, WindowTimes};
pub use pace::{Pace, Tier, WindowCost};
pub use retention::Retention;
pub use schedule::{Cycle, Schedule, WindowClass};

/// Ages at which survival is known, in nanoseconds of the process's own time. The lowest are for processes that probes delay so much that
/// they get no further in a window.
pub const AGES_NS: [u64; 8] = [300_000, 1_000_000, 3_000_000, 10_000_000, 50_000_000, 100_000_000, 1_000_000_000, 10_000_000_000];
/// Those that have values of their own: 10 ms, 100 ms, 1 s, 10 s. Survivors may be ranked by any of the ages.
pub const TOLD_AGES: [usize; 4] = [3, 5, 6, 7];
