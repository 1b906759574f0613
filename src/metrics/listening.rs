//! Samples from processes' emitters, and the cost of listening to them.

use super::family::Family;
use super::labels::Known;
use crate::model::counters::ListeningSample;
use crate::session::tier::sampled::EmitterTotals;

/// The families.
#[must_use]
pub fn families(sample: &ListeningSample, known: &Known<'_>) -> Vec<Family> {
    let each = |mut family: Family, of: fn(&EmitterTotals) -> Option<f64>| {
        for (comm, heard) in &sample.targets {
            if let Some(value) = of(heard) {
                family.add(&known.labels(heard.process.pid, comm).with(&[]), value);
            }
        }
        family
    };
    let total = |index: usize, of: fn(&EmitterTotals) -> u64| {
        (sample.past[index] + sample.targets.iter().map(|(_, heard)| of(heard)).sum::<u64>()) as f64
    };
    vec![
        Family::gauge("fragprof_listener_enabled", "1 if the agent listens to emitters in processes (listening.enabled).")
            .with(f64::from(u8::from(sample.enabled))),
        Family::gauge(
            "fragprof_listener_unavailable",
            "1 if there are emitters, but the agent cannot listen to them here; the reason is in the log.",
        )
        .with(f64::from(u8::from(sample.unavailable.is_some()))),
        Family::gauge("fragprof_listener_targets", "Processes that the agent listens to now.").with(sample.targets.len() as f64),
        Family::gauge(
            "fragprof_listener_over_limit",
            "Processes with an emitter that the agent does not listen to: too many (listening.targets_max), or attaching failed.",
        )
        .with(sample.over_limit as f64),
        Family::counter("fragprof_listener_looks_total", "Searches of a process for emitters.").with(sample.looks as f64),
        Family::counter("fragprof_listener_refused_total", "Processes with an emitter to which the agent could not attach.")
            .with(sample.refused as f64),
        Family::counter("fragprof_listener_samples_total", "Samples received from all processes.")
            .with(total(0, |heard| heard.totals.samples)),
        Family::counter("fragprof_listener_lost_total", "Samples and frees of samples lost because the ring buffer was full.")
            .with_each("kind", [("sample", total(1, |heard| heard.loss.allocations)), ("free", total(2, |heard| heard.loss.frees))]),
        Family::counter(
            "fragprof_listener_censuses_total",
            "Censuses for joining with profiles: taken, or left out because the heap has too many chunks.",
        )
        .with_each("result", [("taken", sample.joins as f64), ("too_large", sample.joins_too_large as f64)]),
        Family::counter("fragprof_listener_cpu_seconds_total", "CPU time of the listener's thread.").with(sample.cpu_s),
        each(Family::counter("fragprof_process_samples_total", "Samples received from a process."), |heard| {
            Some(heard.totals.samples as f64)
        }),
        each(
            Family::counter(
                "fragprof_process_samples_lost_total",
                "Lost samples of a process, and lost frees of samples: its live bytes by stack are off by the bytes that they represent.",
            ),
            |heard| Some((heard.loss.allocations + heard.loss.frees) as f64),
        ),
        each(
            Family::gauge("fragprof_process_sample_interval_bytes", "Mean distance between a process's samples, in allocated bytes."),
            |heard| heard.sample_bytes.map(|bytes| bytes as f64),
        ),
        each(
            Family::gauge(
                "fragprof_process_sampled_live_bytes_est",
                "Live bytes allocated since the agent began to listen, estimated from the samples.",
            ),
            |heard| Some(heard.totals.live_bytes.value),
        ),
        each(
            Family::gauge("fragprof_process_sampled_live_bytes_stderr", "Standard error of fragprof_process_sampled_live_bytes_est."),
            |heard| Some(heard.totals.live_bytes.standard_error()),
        ),
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
    use crate::units::Pid;

    const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_ticks: 1 };

    fn text(comm: &str, processes: Vec<Arc<ProcessSample>>) -> String {
        let now = Instant::now();
        let heard = EmitterTotals {
            process: PROCESS,
            source: String::new(),
            sample_bytes: Some(4096),
            totals: Default::default(),
            stats: Default::default(),
            loss: Default::default(),
            since: now,
        };
        let snapshot = Snapshot { processes, ..Snapshot::empty(now) };
        let sample = ListeningSample { targets: vec![(comm.into(), heard)], ..ListeningSample::default() };
        crate::metrics::text(families(&sample, &Known::of(&snapshot))).unwrap()
    }

    #[test]
    fn a_hostile_name_stays_within_its_label_and_a_container_is_named() {
        let said = text("a\"} 1\nx\u{1b}[2J\u{202e}", Vec::new());
        assert!(said.lines().all(|line| line.starts_with('#') || line.starts_with("fragprof_")), "{said}");
        assert!(!said.contains('\u{1b}') && !said.contains('\u{202e}'), "{said}");
        let mut process = ProcessSample::new(Identity { process: PROCESS, stack: 0 }, "a".into(), 0, 1);
        let named = |name: &str| Some(name.to_owned());
        process.surroundings.container =
            Some(Arc::new(Container { namespace: named("n"), pod: named("p"), name: named("c"), ..Container::default() }));
        let said = text("a", vec![Arc::new(process)]);
        let line = "fragprof_process_sample_interval_bytes{pid=\"7\",comm=\"a\",namespace=\"n\",pod=\"p\",container=\"c\"} 4096";
        assert!(said.lines().any(|one| one == line), "{said}");
    }
}
