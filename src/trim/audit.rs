//! The lines that account for each call: who has it made, in which process, and what came of it.

use super::TrimReport;
use crate::inject::audit::By;
use crate::sanitize::terminal;
use crate::units::{HumanBytes, ShortDuration};

/// The line before a call: it stays if nothing else does.
#[must_use]
pub fn before(by: By, report: &TrimReport) -> String {
    let stall = ShortDuration(report.predicted_stall_s.unwrap_or(0.0));
    let bytes = HumanBytes(report.predicted_bytes.unwrap_or(0));
    format!("audit: {by}: {}, to give back {bytes}; threads may wait for {stall}", of(report))
}

/// The line after it.
#[must_use]
pub fn after(by: By, report: &TrimReport) -> String {
    let result = match (&report.refused, report.ending) {
        (Some(refused), _) => format!("not made: {}", refused.name),
        (None, Some(ending)) => {
            let gave = report.given_back_bytes.map_or("an unknown number of bytes".to_owned(), |bytes| HumanBytes(bytes).to_string());
            format!("{}, gave back {gave} in {}", ending.words(), ShortDuration(report.took_s.unwrap_or(0.0)))
        }
        (None, None) => "not made".to_owned(),
    };
    format!("audit: {by}: {}: {result}", of(report))
}

fn of(report: &TrimReport) -> String {
    let call = report.call.as_deref().unwrap_or("no call");
    format!("{call} in process {} ({}) by its thread {}", report.pid, terminal(&report.comm), report.thread.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inject::Ending;

    #[test]
    fn a_line_says_who_what_where_and_the_result() {
        let mut report =
            TrimReport { pid: 42, comm: "a\nb".into(), call: Some("malloc_trim(0)".into()), thread: Some(43), ..TrimReport::default() };
        report.predicted_bytes = Some(10 << 20);
        let user = By::User { uid: 0, login: Some(1000) };
        let line = before(user, &report);
        assert!(line.starts_with("audit: uid 0, logged in as 1000: malloc_trim(0) in process 42 ("), "{line}");
        assert!(!line.contains('\n') && line.contains("10.0 MiB") && line.contains("thread 43"), "{line}");
        (report.ending, report.given_back_bytes) = (Some(Ending::Returned), Some(9 << 20));
        assert!(
            after(By::Policy("reclaim"), &report).contains("policy [reclaim]")
                && after(By::Policy("reclaim"), &report).contains("gave back 9.00 MiB")
        );
    }
}
