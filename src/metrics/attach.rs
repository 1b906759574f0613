//! The sampler brought to processes by policy.

use super::family::Family;
use crate::model::counters::AttachSample;

/// The families.
#[must_use]
pub fn families(sample: &AttachSample) -> Vec<Family> {
    vec![
        Family::gauge("fragprof_attach_enabled", "1 if the sampler is brought to running processes by policy (attach.enabled).")
            .with(f64::from(u8::from(sample.enabled))),
        Family::gauge("fragprof_attach_processes", "Processes to which the agent has attached the sampler.").with(sample.attached as f64),
        Family::gauge("fragprof_attach_over_limit", "Processes that a rule covers, without the sampler: too many (attach.processes_max).")
            .with(sample.over_limit as f64),
        Family::gauge("fragprof_attach_processes_aside", "Processes that are left alone because it was refused in them.")
            .with(sample.aside as f64),
        Family::counter("fragprof_attach_calls_total", "Calls that processes were made to make.").with(sample.calls as f64),
        Family::counter("fragprof_attach_refused_total", "Attempts that were refused, by reason (docs/attach.md).")
            .with_each("reason", sample.refused.iter().map(|(reason, count)| (*reason, *count as f64))),
        Family::counter("fragprof_attach_stopped_seconds_total", "Time for which one thread of a process was stopped before a call.")
            .with(sample.stopped_s),
        Family::counter("fragprof_attach_interrupted_total", "Calls whose thread's system call returned EINTR because of the stop.")
            .with(sample.interrupted as f64),
    ]
}
