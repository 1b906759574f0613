//! The governor's work and costs.

use super::family::Family;
use super::labels::Known;
use crate::model::counters::GovernedSample;
use crate::sanitize;

/// Characters of a reason.
const REASON_CHARS_MAX: usize = 200;

/// The families.
#[must_use]
pub fn families(sample: &GovernedSample, known: &Known<'_>) -> Vec<Family> {
    let each = |mut family: Family, of: fn(&crate::session::tier::windows::Status) -> f64| {
        for (comm, status) in &sample.targets {
            family.add(&known.labels(status.pid, comm).with(&[]), of(status));
        }
        family
    };
    let mut large_live = Family::gauge(
        "fragprof_process_large_blocks_live_bytes",
        "Usable bytes of live blocks above 1 KiB, of those allocated since tracking began. Counted, not estimated. No series while they are not tracked.",
    );
    for (comm, status) in &sample.targets {
        if let Some(bytes) = status.large.live_bytes {
            large_live.add(&known.labels(status.pid, comm).with(&[]), bytes as f64);
        }
    }
    let mut unavailable = Family::gauge(
        "fragprof_governor_unavailable_info",
        "1 with the reason why allocations cannot be attributed here. No series if they can, or before the first attempt.",
    );
    if let Some(reason) = &sample.unavailable {
        let reason: String = sanitize::terminal(reason).chars().take(REASON_CHARS_MAX).collect();
        unavailable.add(&[("reason", &reason)], 1.0);
    }
    let now = |of: fn(&crate::session::tier::windows::Status) -> u64| sample.targets.iter().map(|(_, status)| of(status)).sum::<u64>();
    let total = |index: usize, of| (sample.past[index] + now(of)) as f64;
    vec![
        Family::gauge("fragprof_governor_enabled", "1 if allocations are attributed (governed.enabled).").with(f64::from(u8::from(sample.enabled))),
        Family::gauge("fragprof_governor_unavailable", "1 if allocations cannot be attributed here; the reason is in fragprof_governor_unavailable_info and in the log.")
            .with(f64::from(u8::from(sample.unavailable.is_some()))),
        unavailable,
        Family::gauge("fragprof_governor_candidates", "Processes with a heap whose allocations could be attributed.").with(sample.candidates as f64),
        Family::gauge("fragprof_governor_targets", "Processes attributed now, by tier: in windows, or with every allocation and free.").with_each(
            "tier",
            [false, true].map(|full| {
                let count = sample.targets.iter().filter(|(_, status)| status.full == full).count();
                (if full { "full" } else { "windows" }, count as f64)
            }),
        ),
        Family::gauge("fragprof_governor_hit_cost_seconds", "Cost of a probe hit on this machine, measured at start.")
            .with_each("call", [("allocation", sample.hit_cost_s.0), ("free", sample.hit_cost_s.1)]),
        each(
            Family::gauge("fragprof_process_slowdown_ratio_est", "Estimated share of its running time that a process lost to probes. Stays below its budget once the trials at the start are paid for, but in processes that run for less than a thousandth of the time."),
            |status| status.slowdown_ratio_est,
        ),
        each(Family::gauge("fragprof_process_budget_ratio", "Share of its running time that a process may lose to probes."), |status| status.budget_ratio),
        each(
            Family::counter("fragprof_process_windows_open_seconds_total", "Time that windows on a process were open."),
            |status| status.open_s,
        ),
        each(
            Family::counter("fragprof_process_traced_in_full_seconds_total", "Time that a process was traced in full, because that fit its budget."),
            |status| status.full_s,
        ),
        each(
            Family::counter("fragprof_process_rare_events_total", "Stacks taken for growth of the heap and for first touches of its pages, which are always observed; one in 64 of the touches."),
            |status| status.rare_events as f64,
        ),
        each(
            Family::counter("fragprof_process_rare_event_seconds_total", "Estimated time that a process lost to the stacks of rare events, at the measured cost of an allocation's stack. It counts against its budget."),
            |status| status.rare_events_s,
        ),
        each(
            Family::gauge("fragprof_process_large_blocks_watched", "1 while every block above 1 KiB of a process in windows is tracked, so that live bytes of such blocks are known by stack; 0 if that is not possible or does not fit the budget."),
            |status| f64::from(u8::from(status.large.kept)),
        ),
        large_live,
        each(
            Family::counter("fragprof_process_large_blocks_seconds_total", "Estimated time that a process lost to the probes for blocks above 1 KiB. It counts against its budget."),
            |status| status.large.lost_s,
        ),
        each(
            Family::counter("fragprof_process_large_blocks_left_total", "How often tracking of blocks above 1 KiB of a process was stopped, because they were too frequent or records were lost."),
            |status| status.large.times_left as f64,
        ),
        Family::counter(
            "fragprof_governor_windows_total",
            "Windows, by their end: on time, early because of their quota (a burst), or left out because records were lost.",
        )
        .with_each(
            "end",
            [
                ("time", total(0, |status| status.windows) - total(1, |status| status.windows_closed_early)),
                ("quota", total(1, |status| status.windows_closed_early)),
                ("lossy", total(2, |status| status.windows_lossy)),
            ],
        ),
        Family::counter("fragprof_governor_lost_total", "Lost records of attributed processes, by kind: full ring buffers, hits that the kernel did not deliver.")
            .with_each("kind", sample.losses.iter().map(|loss| (loss.name.as_str(), loss.value as f64))),
        Family::counter("fragprof_governor_cpu_seconds_total", "CPU time of the governor's thread.").with(sample.cpu_s),
        Family::counter("fragprof_governor_refused_total", "Processes that could not be watched.").with(sample.refused as f64),
        Family::counter(
            "fragprof_governor_shed_total",
            "Work skipped, in this order: half of the targets dropped for lack of CPU time (governed.cpu_percent), all dropped for lack of memory (census.memory_max_mib).",
        )
        .with_each("step", [("targets_cpu", sample.shed_cpu as f64), ("targets_memory", sample.shed_memory as f64)]),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::model::sample::{Identity, ProcessSample};
    use crate::model::snapshot::Snapshot;
    use crate::process::ProcessId;
    use crate::process::container::Container;
    use crate::session::tier::windows::{LargeStatus, Status};
    use crate::units::Pid;

    fn text(sample: &GovernedSample, processes: &[Arc<ProcessSample>]) -> String {
        let snapshot = Snapshot { processes: processes.to_vec(), ..Snapshot::empty(Instant::now()) };
        crate::metrics::text(families(sample, &Known::of(&snapshot))).unwrap()
    }

    fn sample(comm: &str) -> GovernedSample {
        let status = Status {
            pid: Pid(7),
            full: false,
            open: false,
            budget_ratio: 0.01,
            slowdown_ratio_est: 0.008,
            open_s: 1.5,
            full_s: 0.0,
            windows: 10,
            windows_closed_early: 2,
            windows_lossy: 0,
            rare_events: 40,
            rare_events_s: 0.0001,
            large: LargeStatus { kept: true, live_bytes: Some(4096), hits: 10, lost_s: 0.25, times_left: 1 },
        };
        GovernedSample { targets: vec![(comm.into(), status)], past: [5, 1, 0], ..GovernedSample::default() }
    }

    #[test]
    fn a_hostile_name_stays_within_its_label_and_a_container_is_named() {
        let hostile = "a\"} 1\nx\u{1b}[2J\u{202e}";
        let said = text(&sample(hostile), &[]);
        assert!(said.lines().all(|line| line.starts_with('#') || line.starts_with("fragprof_")), "{said}");
        assert!(!said.contains('\u{1b}') && !said.contains('\u{202e}'), "{said}");
        let identity = Identity { process: ProcessId { pid: Pid(7), start_ticks: 1 }, stack: 0 };
        let mut process = ProcessSample::new(identity, "a".into(), 0, 1);
        let named = |name: &str| Some(name.to_owned());
        process.surroundings.container =
            Some(Arc::new(Container { namespace: named("n"), pod: named("p"), name: named("c"), ..Container::default() }));
        let said = text(&sample("a"), &[Arc::new(process)]);
        let line = "fragprof_process_budget_ratio{pid=\"7\",comm=\"a\",namespace=\"n\",pod=\"p\",container=\"c\"} 0.01";
        assert!(said.lines().any(|one| one == line), "{said}");
    }

    #[test]
    fn each_attributed_process_has_its_slowdown_beside_its_budget() {
        let sample = sample("a");
        let text = text(&sample, &[]);
        for line in [
            "fragprof_process_slowdown_ratio_est{pid=\"7\",comm=\"a\"} 0.008",
            "fragprof_process_budget_ratio{pid=\"7\",comm=\"a\"} 0.01",
            "fragprof_process_rare_events_total{pid=\"7\",comm=\"a\"} 40",
            "fragprof_process_rare_event_seconds_total{pid=\"7\",comm=\"a\"} 0.0001",
            "fragprof_process_large_blocks_watched{pid=\"7\",comm=\"a\"} 1",
            "fragprof_process_large_blocks_live_bytes{pid=\"7\",comm=\"a\"} 4096",
            "fragprof_process_large_blocks_seconds_total{pid=\"7\",comm=\"a\"} 0.25",
            "fragprof_process_large_blocks_left_total{pid=\"7\",comm=\"a\"} 1",
            "fragprof_governor_windows_total{end=\"time\"} 12",
            "fragprof_governor_windows_total{end=\"quota\"} 3",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}\n{text}");
        }
    }
}
