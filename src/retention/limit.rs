//! The memory that a scan needs in fragprof, and its limit: a heap that needs more is refused before anything is built.

use super::scans::ScanError;
use crate::census::Taken;
use crate::process::handle::read_bounded;

/// Bytes per block of `leaks`: index, marks and the pointers of unreached blocks.
pub const LEAKS_BYTES_A_BLOCK: u64 = 24;
/// Bytes per block of `owners`: index, pointers or their reverse, dominators, sums, first words and names; with two pointers per block 68 were
/// measured.
pub const OWNERS_BYTES_A_BLOCK: u64 = 80;
/// The index has a bit for each 16 bytes of the heap, and ranks.
const SPAN_SHARE: u64 = 60;
/// `/proc/meminfo` has about 1.5 KiB.
const MEMINFO_BYTES_MAX: u64 = 64 << 10;

/// Half of the machine's available memory; no limit if that is not known.
#[must_use]
pub fn default_bytes() -> u64 {
    let text = read_bounded(std::path::Path::new("/proc/meminfo"), MEMINFO_BYTES_MAX).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let available = text.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    available.map_or(u64::MAX, |kib| kib.saturating_mul(1024) / 2)
}

/// Refuses a heap whose blocks need more than the limit.
///
/// # Errors
/// If it needs more; the error states how much.
pub fn check(taken: &Taken, bytes_a_block: u64, limit_bytes: u64) -> Result<(), ScanError> {
    let blocks: u64 = taken.heaps.iter().map(|heap| heap.chunks.len() as u64).sum();
    let span: u64 = taken.census.heaps.iter().map(|heap| heap.ladder.extent_bytes).fold(0, u64::saturating_add);
    let needed_bytes = blocks.saturating_mul(bytes_a_block).saturating_add(span / SPAN_SHARE);
    if needed_bytes > limit_bytes { Err(ScanError::TooLarge { blocks, needed_bytes, limit_bytes }) } else { Ok(()) }
}
