//! Detects ended processes without an exit record: the record was lost, or has not been read from its ring yet.

use std::time::{Duration, Instant};

use crate::process::Process;

/// Maximum time from the end of a process until its exit record is read. The process's last records come before that one: dropping a
/// process as soon as it is seen to have ended would lose its records in the ring.
const READ_WITHIN: Duration = Duration::from_secs(2);

/// When a process was first found to have ended.
#[derive(Debug, Default)]
pub struct LostExit(Option<Instant>);

impl LostExit {
    /// Whether the process ended so long ago that its exit record must have been lost.
    pub fn is_overdue(&mut self, process: &Process) -> bool {
        if self.0.is_none() && !process.is_alive() {
            self.0 = Some(Instant::now());
        }
        self.0.is_some_and(|since| since.elapsed() >= READ_WITHIN)
    }
}
