//! The clock of the records: CLOCK_MONOTONIC as BPF programs read it.
//!
//! In a time namespace (time_namespaces(7)) a process's own reading is shifted; BPF programs always read the unshifted clock. Times from
//! both are compared throughout, so this module subtracts the shift from its own readings.

use std::sync::OnceLock;

/// `/proc/self/timens_offsets` has two short lines.
const OFFSETS_BYTES_MAX: u64 = 4096;

/// The time on the records' clock, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    static OFFSET_NS: OnceLock<i64> = OnceLock::new();
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let own = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
    own.wrapping_add_signed(OFFSET_NS.get_or_init(own_offset_ns).wrapping_neg())
}

/// By how much this process's CLOCK_MONOTONIC is ahead of the kernel's; 0 where there are no time namespaces (before Linux 5.6).
fn own_offset_ns() -> i64 {
    // The file holds the offsets of the namespace for children, which after an unshare is not the process's own.
    let of = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
    if of("time") != of("time_for_children") {
        return 0;
    }
    let bytes = crate::process::handle::read_bounded(std::path::Path::new("/proc/self/timens_offsets"), OFFSETS_BYTES_MAX);
    offset_ns(&String::from_utf8_lossy(&bytes.unwrap_or_default()))
}

/// The monotonic clock's offset in the file's text, which has lines of the form `CLOCK SECONDS NANOSECONDS`.
fn offset_ns(text: &str) -> i64 {
    let line = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>()).find(|words| words.first() == Some(&"monotonic"));
    let number = |index: usize| line.as_ref()?.get(index)?.parse::<i64>().ok();
    let (seconds, nanoseconds) = (number(1).unwrap_or(0), number(2).unwrap_or(0));
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monotonic_line_is_taken_with_its_sign() {
        assert_eq!(offset_ns("monotonic      100000         5\nboottime          7         0\n"), 100_000_000_000_005);
        assert_eq!(offset_ns("monotonic      -20000         0\n"), -20_000_000_000_000);
        assert_eq!(offset_ns(""), 0);
        assert_eq!(offset_ns("monotonic many\n"), 0);
    }
}
