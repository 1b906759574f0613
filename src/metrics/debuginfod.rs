//! Debug information fetched for files without symbols.

use super::family::Family;
use crate::symbol::debuginfod::Counted;

/// The families; none if no server is configured.
#[must_use]
pub fn families(counted: &Counted) -> Vec<Family> {
    let counter = |name, help, value: u64| Family::counter(name, help).with(value as f64);
    vec![
        counter(
            "fragprof_debuginfod_lookups_total",
            "Look-ups of the debug information of files without symbols: one for each file and profile that needs it.",
            counted.asked,
        ),
        counter("fragprof_debuginfod_cache_hits_total", "Of these, answered from the cache.", counted.cached),
        counter(
            "fragprof_debuginfod_put_off_total",
            "Of these, put off to a later profile, because 256 files were waiting already, or the open ones had symbols.open_mib_max.",
            counted.put_off,
        ),
        Family::counter(
            "fragprof_debuginfod_answers_total",
            "Requests to debuginfod servers by result: fetched; not_known (404, not asked again for 10 min); wrong (not an ELF file with symbols and \
             the build id that was asked for); too_large (256 MiB, the size of the cache, or symbols.open_mib_max); failed (no answer, or one that could not be stored: \
             asked again after 1 min).",
        )
        .with_each(
            "result",
            [
                ("fetched", counted.fetched as f64),
                ("not_known", counted.not_known as f64),
                ("wrong", counted.wrong as f64),
                ("too_large", counted.too_large as f64),
                ("failed", counted.failed as f64),
            ],
        ),
        counter(
            "fragprof_debuginfod_received_bytes_total",
            "Bytes of files received from debuginfod servers, including those that were not used.",
            counted.bytes,
        ),
        Family::gauge("fragprof_debuginfod_waiting", "Files that wait to be fetched, or are being fetched.").with(counted.waiting as f64),
        Family::gauge("fragprof_debuginfod_cache_bytes", "Bytes of fetched files in the cache; symbols.cache_mib_max limits them.")
            .with(counted.cache_bytes as f64),
        counter(
            "fragprof_debuginfod_evicted_total",
            "Files removed from the cache to stay within its limit, the least recently used first.",
            counted.evicted,
        ),
    ]
}
