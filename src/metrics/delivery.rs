//! Containers started with the sampler.

use super::family::Family;
use crate::model::counters::DeliverySample;

/// The families.
#[must_use]
pub fn families(sample: &DeliverySample) -> Vec<Family> {
    let flag = |value: bool| f64::from(u8::from(value));
    vec![
        Family::gauge("fragprof_delivery_enabled", "1 if containers that ask for it are started with the sampler (delivery.enabled).")
            .with(flag(sample.enabled)),
        Family::gauge("fragprof_delivery_connected", "1 if the container runtime has accepted the agent as its plugin (NRI).")
            .with(flag(sample.is_connected)),
        Family::counter("fragprof_delivery_connections_lost_total", "Connections to the runtime that ended or could not be made.")
            .with(sample.connections_lost as f64),
        Family::counter("fragprof_delivery_containers_total", "Containers started with the sampler, by the C library of their program.")
            .with_each("libc", sample.delivered.iter().map(|(libc, count)| (*libc, *count as f64))),
        Family::counter(
            "fragprof_delivery_refused_total",
            "Containers that asked for the sampler and were started untouched, by reason (docs/sampler.md).",
        )
        .with_each("reason", sample.refused.iter().map(|(reason, count)| (*reason, *count as f64))),
        Family::counter("fragprof_delivery_not_asked_total", "Containers that did not ask for it, and were started untouched.")
            .with(sample.not_asked as f64),
        Family::counter("fragprof_delivery_not_understood_total", "Messages of the runtime that were not understood.")
            .with(sample.not_understood as f64),
        Family::counter(
            "fragprof_delivery_seconds_total",
            "Time for which the runtime waited for answers about containers that asked for it.",
        )
        .with(sample.took_s),
        Family::gauge(
            "fragprof_delivery_longest_seconds",
            "Longest time for which the runtime waited for an answer; the limit is one second.",
        )
        .with(sample.longest_s),
    ]
}
