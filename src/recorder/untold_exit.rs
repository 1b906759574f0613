//! Ends of processes of which no record tells: the record was lost, or its ring is not read so far yet.

use std::time::{Duration, Instant};

use crate::target::Process;

/// Longest time from the end of a process until the record of its exit is read. Its last records come before that one: a process that is
/// dropped at the sight of its end loses what the ring still holds of it.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// When a process was first found to have ended.
#[derive(Debug, Default)]
pub struct UntoldExit(Option<Instant>);

impl UntoldExit {
    /// Whether the process has ended so long ago that the record of it must be lost.
    pub fn is_overdue(&mut self, process: &Process) -> bool {
        if self.0.is_none() && !process.is_alive() {
            self.0 = Some(Instant::now());
        }
        self.0.is_some_and(|since| since.elapsed() >= READ_WITHIN)
    }
}
