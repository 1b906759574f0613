//! Shares of live and free bytes from random windows: the same time for a heap of any size, with an error that is stated.

use std::time::{SystemTime, UNIX_EPOCH};

use super::super::memory::Memory;
use super::super::pace::Pacer;
use super::super::quality::WalkQuality;
use super::parse::{Kind, Snapshot, first_boundary, parse};
use super::walk::{RegionPlan, Walker};

/// Windows taken.
const WINDOWS: u64 = 400;
/// Half a window: in the first half a boundary is looked for, the second is classified.
const HALF_BYTES: u64 = 64 << 10;
/// Distance of the points that are classified.
const POINT_BYTES: u64 = 512;
/// Headers in a row that confirm a boundary.
const CONFIRMING_CHUNKS: u32 = 12;

/// The estimate.
#[derive(Debug, Clone, Copy, Default)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes_est: u64,
    /// Standard error, from the spread between windows. Windows without a boundary (long free runs) bias the estimate upwards by up to
    /// their share, which is added.
    pub live_bytes_stderr: u64,
    /// Windows and their failures.
    pub quality: WalkQuality,
}

/// Samples the regions.
#[must_use]
pub fn estimate(memory: &dyn Memory, plans: &[RegionPlan], tcache_key: Option<u64>, pacer: Pacer) -> Estimate {
    let total: u64 = plans.iter().map(|plan| plan.bounds.end - plan.start).fold(0, u64::saturating_add);
    if total == 0 {
        return Estimate::default();
    }
    let mut random = seed();
    let mut walker = Walker::new(memory, super::layout::Layout::with_bins_at(0), pacer);
    let mut snapshot = Snapshot::default();
    let mut records = Vec::new();
    // Points and live points by window, and windows whose chunks were not found.
    let mut windows: Vec<(f64, f64)> = Vec::new();
    let mut lost = 0u64;
    for _ in 0..WINDOWS {
        if walker.pacer.is_over() {
            break;
        }
        random = next(random);
        let Some((plan, middle)) = place(plans, random % total) else { continue };
        let from = middle.saturating_sub(HALF_BYTES).max(plan.start) & !15;
        if !walker.load(&mut snapshot, from, plan.bounds.end) {
            lost += 1;
            continue;
        }
        let start = if from == plan.start { Some(from) } else { first_boundary(&snapshot, from, middle, &plan.bounds, CONFIRMING_CHUNKS) };
        let Some(start) = start else {
            lost += 1;
            continue;
        };
        parse(&snapshot, start, &plan.bounds, &mut records);
        let end = middle.saturating_add(HALF_BYTES);
        let (mut points, mut live) = (0.0, 0.0);
        let mut point = middle.next_multiple_of(POINT_BYTES);
        for record in &records {
            let record_end = record.start.saturating_add(record.bytes);
            while point < record_end.min(end) {
                if point >= record.start {
                    points += 1.0;
                    if record.kind == Kind::InUse && tcache_key.is_none_or(|key| key != record.second_word) {
                        live += 1.0;
                    }
                }
                point += POINT_BYTES;
            }
        }
        windows.push((points, live));
    }
    let points: f64 = windows.iter().map(|w| w.0).sum();
    let live: f64 = windows.iter().map(|w| w.1).sum();
    let share = if points > 0.0 { live / points } else { 0.0 };
    // Ratio estimator over windows as clusters.
    let spread: f64 = windows.iter().map(|(points, live)| (live - share * points).powi(2)).sum();
    let stderr = if points > 0.0 { spread.sqrt() / points } else { 1.0 };
    let lost_share = lost as f64 / (lost as usize + windows.len()).max(1) as f64;
    let quality =
        WalkQuality { windows: windows.len() as u64, broken_headers: lost, read_bytes: walker.pacer.read_bytes, ..WalkQuality::default() };
    Estimate {
        live_bytes_est: (share * total as f64) as u64,
        live_bytes_stderr: ((stderr + lost_share * share) * total as f64) as u64,
        quality,
    }
}

fn place(plans: &[RegionPlan], mut offset: u64) -> Option<(&RegionPlan, u64)> {
    for plan in plans {
        let bytes = plan.bounds.end - plan.start;
        if offset < bytes {
            return Some((plan, plan.start + offset));
        }
        offset -= bytes;
    }
    None
}

fn seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64) | 1
}

/// xorshift64: windows must be spread, not secret.
fn next(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    state
}
