//! Prometheus exposition of the sample model.
//!
//! [`heaps`] has the ladder of each process, [`workloads`] that of each workload, [`own`] the agent itself. Every family's HELP says what it is and what its error is; series end
//! with their process, because each exposition is made from the newest snapshot only.

pub mod attach;
pub mod debuginfod;
pub mod delivery;
pub mod family;
pub mod governed;
pub mod heaps;
pub mod labels;
pub mod leaks;
pub mod listening;
pub mod own;
pub mod reclaim;
#[cfg(test)]
mod reference;
pub mod workloads;

use std::time::Instant;

use prometheus::TextEncoder;

use crate::model::counters::HttpCounters;
use crate::model::counters::PushCounters;
use crate::model::snapshot::Snapshot;
use crate::store::KeeperCounters;
use crate::symbol::debuginfod::Counted;

/// Content-Type of the exposition (Prometheus text format 0.0.4).
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Counters outside the sample model.
#[derive(Debug, Clone, Copy, Default)]
pub struct AgentCounters<'a> {
    /// The server's counters.
    pub http: HttpCounters,
    /// The history's counters.
    pub keeper: KeeperCounters,
    /// Counters of profiles pushed to a server.
    pub push: Option<&'a PushCounters>,
    /// Counters of fetched debug information, if servers are configured.
    pub debuginfod: Option<Counted>,
}

/// The whole exposition.
///
/// # Errors
/// If the encoder refuses a family, which would be a bug in this module.
pub fn exposition(snapshot: &Snapshot, agent: &AgentCounters<'_>, now: Instant) -> Result<String, prometheus::Error> {
    let (mut families, in_other) = heaps::families(snapshot, now);
    families.extend(workloads::families(snapshot));
    families.extend(own::families(snapshot, &agent.http, in_other, now));
    families.extend(own::history(snapshot, &agent.keeper));
    families.extend(agent.push.map(own::push).into_iter().flatten());
    families.extend(agent.debuginfod.as_ref().map(debuginfod::families).into_iter().flatten());
    text(families)
}

/// The text of some families.
///
/// # Errors
/// See [`exposition`].
pub fn text(families: Vec<family::Family>) -> Result<String, prometheus::Error> {
    let families: Vec<_> = families.into_iter().filter_map(family::Family::into_proto).collect();
    TextEncoder::new().encode_to_string(&families)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;
    use crate::heap::ladder::Ladder;
    use crate::model::sample::{HeapSample, Identity, ProcessSample, WatchState};
    use crate::process::ProcessId;
    use crate::units::Pid;

    fn process(pid: u32, comm: &str, rss_bytes: u64) -> Arc<ProcessSample> {
        let heap = HeapSample {
            allocator: "glibc".into(),
            ladder: Ladder { extent_bytes: rss_bytes, live_bytes: Some(rss_bytes / 2), ..Ladder::default() },
            ..HeapSample::default()
        };
        let identity = Identity { process: ProcessId { pid: Pid(pid), start_ticks: 1 }, stack: 1 };
        Arc::new(ProcessSample { state: WatchState::Watched, heaps: vec![heap], ..ProcessSample::new(identity, comm.into(), 0, rss_bytes) })
    }

    fn text(processes: Vec<Arc<ProcessSample>>, metrics_processes_max: usize) -> String {
        let now = Instant::now();
        let snapshot = Snapshot { processes, metrics_processes_max, ..Snapshot::empty(now) };
        exposition(&snapshot, &AgentCounters::default(), now).unwrap()
    }

    #[test]
    fn a_step_that_is_not_known_has_no_series() {
        let text = text(vec![process(7, "a", 100)], 10);
        assert!(text.contains("fragprof_heap_live_bytes{pid=\"7\",comm=\"a\",allocator=\"glibc\"} 50\n"), "{text}");
        assert!(!text.contains("fragprof_heap_trimmable_bytes"));
    }

    #[test]
    fn the_largest_have_series_and_the_rest_is_summed_and_counted() {
        let text = text((1..=5).map(|pid| process(pid, "a", u64::from(pid) * 100)).collect(), 2);
        let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("fragprof_heap_extent_bytes{")).collect();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("pid=\"5\"") && lines[1].contains("pid=\"4\""));
        assert_eq!(lines[2], "fragprof_heap_extent_bytes{pid=\"other\",comm=\"other\",allocator=\"glibc\"} 600");
        assert!(text.contains("fragprof_agent_processes_in_other 3\n"));
    }

    #[test]
    fn a_hostile_name_stays_within_its_label() {
        let text = text(vec![process(7, "a\"} 1\nx{\\\u{1b}[2J\r\u{202e}", 100)], 10);
        assert!(text.lines().all(|line| line.starts_with('#') || line.starts_with("fragprof_")), "{text}");
        assert!(!text.contains('\u{1b}') && !text.contains('\r') && !text.contains('\u{202e}'));
        assert!(text.contains(r#"comm="a\"} 1\\u{a}x{\\\\u{1b}[2J\\u{d}\\u{202e}""#), "{text}");
    }
}
