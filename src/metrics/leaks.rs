//! Blocks to which nothing points, and the cost of scanning for them.

use std::time::Instant;

use super::family::Family;
use super::labels::Known;
use crate::model::counters::{LeakFound, LeaksSample};

/// The families.
#[must_use]
pub fn families(sample: &LeaksSample, known: &Known<'_>, now: Instant) -> Vec<Family> {
    let each = |mut family: Family, of: &dyn Fn(&LeakFound) -> f64| {
        for found in &sample.found {
            family.add(&known.labels(found.process.pid, &found.comm).with(&[]), of(found));
        }
        family
    };
    vec![
        Family::gauge("fragprof_leaks_enabled", "1 if processes are scanned for blocks to which nothing points (leaks.enabled).")
            .with(f64::from(u8::from(sample.enabled))),
        Family::counter("fragprof_leaks_looked_total", "Processes scanned for blocks to which nothing points, by result.")
            .with_each("result", [("done", sample.looked as f64), ("failed", sample.failed as f64)]),
        Family::gauge(
            "fragprof_leaks_too_large",
            "Processes that are not scanned for such blocks: their heap exceeds leaks.heap_max_mib, or the scan would need more than leaks.memory_mib.",
        )
        .with(sample.too_large as f64),
        Family::counter("fragprof_leaks_cpu_seconds_total", "CPU time of the thread that scans for such blocks.").with(sample.cpu_s),
        each(
            Family::gauge(
                "fragprof_process_unreached_bytes",
                "Bytes of blocks in use to which no pointer was seen in several scans; programs that hide pointers look the same.",
            ),
            &|found| found.bytes as f64,
        ),
        each(Family::gauge("fragprof_process_unreached_blocks", "The number of these blocks."), &|found| found.blocks as f64),
        each(Family::gauge("fragprof_process_unreached_age_seconds", "Time since the last of these scans."), &|found| {
            now.saturating_duration_since(found.at).as_secs_f64()
        }),
    ]
}
