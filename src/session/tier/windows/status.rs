//! How each process is being watched, for metrics.

use crate::capture::Capture;
use crate::session::tier::windows::state::{LargeState, ProcessState};
use crate::session::tier::windows::target::Target;
use crate::units::Pid;

/// How one process is being watched, for metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The process.
    pub pid: Pid,
    /// Whether it is fully traced.
    pub full: bool,
    /// Whether its probes are attached now.
    pub open: bool,
    /// The share of its time that it may lose.
    pub budget_ratio: f64,
    /// Share that it is estimated to have lost.
    pub slowdown_ratio_est: f64,
    /// Seconds that windows were open.
    pub open_s: f64,
    /// Seconds of full tracing.
    pub full_s: f64,
    /// Number of windows, of any length.
    pub windows: u64,
    /// The windows that their quota closed early.
    pub windows_closed_early: u64,
    /// The windows discarded because records were lost.
    pub windows_lossy: u64,
    /// Stacks taken at growth of the heap and at first touches of pages, which are always watched.
    pub rare_events: u64,
    /// Seconds that it is estimated to have lost to them; they count against its budget.
    pub rare_events_s: f64,
    /// Status of its large blocks.
    pub large: LargeStatus,
}

/// How the large blocks of a process are being watched, for metrics.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LargeStatus {
    /// Whether every one is seen.
    pub kept: bool,
    /// Usable bytes of the live blocks among those allocated since the probes were attached; `None` = not known.
    pub live_bytes: Option<u64>,
    /// Hits of their probes.
    pub hits: u64,
    /// Seconds that the process is estimated to have lost to them; they count against its budget.
    pub lost_s: f64,
    /// How often the probes were detached again for their cost or for losses.
    pub times_left: u64,
}

impl Status {
    pub(super) fn of(target: &Target, state: Option<&ProcessState>, capture: &Capture) -> Self {
        let large = &target.large;
        let counts = target.estimator.counts();
        Self {
            pid: target.pid(),
            full: target.is_full(),
            open: target.is_open(),
            budget_ratio: target.pace.budget(),
            slowdown_ratio_est: target.pace.slowdown_est(),
            open_s: counts.open_s,
            full_s: counts.full_s,
            windows: counts.windows.iter().sum(),
            windows_closed_early: counts.closed_early.iter().sum(),
            windows_lossy: counts.lossy,
            rare_events: target.rare_events,
            rare_events_s: target.rare_events_s,
            large: LargeStatus {
                kept: large.is_in() && large.tells(),
                live_bytes: state.and_then(|state| state.large.as_ref()).filter(|_| large.tells()).map(LargeState::live_bytes),
                hits: large.hits(capture),
                lost_s: large.lost_s,
                times_left: large.times_left,
            },
        }
    }
}
