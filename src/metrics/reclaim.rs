//! Memory given back by policy.

use super::family::Family;
use crate::model::counters::ReclaimSample;

/// The families.
#[must_use]
pub fn families(sample: &ReclaimSample) -> Vec<Family> {
    let refused =
        Family::counter("fragprof_reclaim_refused_total", "Calls that the policy wanted and that were refused, by reason (docs/trim.md).")
            .with_each("reason", sample.refused.iter().map(|(reason, count)| (*reason, *count as f64)));
    let counter = |name, help, value: f64| Family::counter(name, help).with(value);
    let flag = |value: bool| f64::from(u8::from(value));
    vec![
        Family::gauge("fragprof_reclaim_enabled", "1 if memory is given back by policy (reclaim.enabled).").with(flag(sample.enabled)),
        Family::gauge("fragprof_reclaim_dry_run", "1 if that is only counted, not done (reclaim.dry_run).").with(flag(sample.dry_run)),
        Family::counter("fragprof_reclaim_calls_total", "Calls that give memory back: made, or, in a dry run, those that would have been.")
            .with_each("result", [("made", sample.calls as f64), ("dry_run", sample.dry_calls as f64)]),
        refused,
        counter(
            "fragprof_reclaim_predicted_bytes_total",
            "Bytes that the calls made were predicted to give back.",
            sample.predicted_bytes as f64,
        ),
        counter(
            "fragprof_reclaim_given_back_bytes_total",
            "Bytes by which the resident memory of the heaps fell in these calls.",
            sample.given_back_bytes as f64,
        ),
        counter(
            "fragprof_reclaim_dry_run_bytes_total",
            "Bytes that the calls of a dry run were predicted to give back.",
            sample.dry_predicted_bytes as f64,
        ),
        counter("fragprof_reclaim_call_seconds_total", "Duration of the calls.", sample.took_s),
        counter(
            "fragprof_reclaim_predicted_stall_seconds_total",
            "Longest time for which a lock was predicted to be held, summed over the calls.",
            sample.predicted_stall_s,
        ),
        counter(
            "fragprof_reclaim_interrupted_total",
            "Calls whose thread's system call returned EINTR because of the stop.",
            sample.interrupted as f64,
        ),
        counter(
            "fragprof_reclaim_disappointments_total",
            "Calls that gave back less than 80 % of what was predicted, or took more than twice as long: their processes are left alone.",
            sample.disappointments as f64,
        ),
        Family::gauge("fragprof_reclaim_processes_aside", "Processes that are left alone for that reason.").with(sample.aside as f64),
    ]
}
