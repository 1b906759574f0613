//! Shares of live and free bytes from random windows: the same time for a heap of any size, with an error that is stated.

use std::time::{SystemTime, UNIX_EPOCH};

use super::super::memory::Memory;
use super::super::pace::Pacer;
use super::super::quality::WalkQuality;
use super::parse::{Kind, Snapshot, first_boundary, parse};
use super::walk::RegionPlan;
use super::walker::Walker;
use crate::heap::residency::{page_down, page_up};

/// Windows taken.
const WINDOWS: u64 = 400;
/// What is classified of a window, from its middle on.
const HALF_BYTES: u64 = 64 << 10;
/// How far before the middle a boundary is looked for: the short way is enough for small chunks, and spares nearly half of the reading.
const LEADS_BYTES: [u64; 2] = [8 << 10, 64 << 10];
/// Headers in a row that confirm a boundary.
const CONFIRMING_CHUNKS: u32 = 12;

/// Share of windows without chunks above which the estimate is worth nothing. What is left for small chunks is then so little that a walk
/// stays cheap.
pub const LOST_RATIO_MAX: f64 = 0.9;

/// The estimate.
#[derive(Debug, Clone, Copy, Default)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes_est: u64,
    /// Standard error, from the spread between windows. Windows without a boundary hold large chunks or long free runs, which may all be
    /// live or all be free: what that could change is added.
    pub live_bytes_stderr: u64,
    /// Windows and their failures.
    pub quality: WalkQuality,
}

impl Estimate {
    /// Share of the windows in which no chunks were found, in 0..=1; 1 if there was no window.
    #[must_use]
    pub fn lost_ratio(&self) -> f64 {
        let lost = self.quality.broken_headers as f64;
        let all = lost + self.quality.windows as f64;
        if all > 0.0 { lost / all } else { 1.0 }
    }
}

/// Samples the regions.
#[must_use]
pub fn estimate(memory: &dyn Memory, plans: &[RegionPlan], tcache_key: Option<u64>, pacer: Pacer) -> Estimate {
    let total: u64 = plans.iter().map(|plan| plan.bounds.end - plan.start).fold(0, u64::saturating_add);
    if total == 0 {
        return Estimate::default();
    }
    let mut random = seed();
    let mut walker = Walker::for_samples(memory, pacer);
    let mut snapshot = Snapshot::default();
    let mut records = Vec::new();
    // Bytes classified and live ones of them by window, and windows whose chunks were not found.
    let mut windows: Vec<(f64, f64)> = Vec::new();
    let mut lost = 0u64;
    for _ in 0..WINDOWS {
        if walker.pacer.is_over() {
            break;
        }
        random = next(random);
        let Some((plan, middle)) = place(plans, random % total) else { continue };
        let Some(start) = LEADS_BYTES.into_iter().find_map(|lead| boundary(&mut walker, &mut snapshot, plan, middle, lead)) else {
            lost += 1;
            continue;
        };
        parse(&snapshot, start, &plan.bounds, &mut records);
        let end = middle.saturating_add(HALF_BYTES);
        // To the byte: points at equal distances would meet the same chunks of a regular pattern again and again.
        let (mut seen, mut live) = (0.0, 0.0);
        for record in &records {
            let record_end = record.start.saturating_add(record.bytes);
            let bytes = record_end.min(end).saturating_sub(record.start.max(middle)) as f64;
            seen += bytes;
            if record.kind == Kind::InUse && tcache_key.is_none_or(|key| key != record.second_word) {
                live += bytes;
            }
        }
        windows.push((seen, live));
    }
    let seen: f64 = windows.iter().map(|w| w.0).sum();
    let live: f64 = windows.iter().map(|w| w.1).sum();
    let share = if seen > 0.0 { live / seen } else { 0.0 };
    // Ratio estimator over windows as clusters.
    let spread: f64 = windows.iter().map(|(seen, live)| (live - share * seen).powi(2)).sum();
    let stderr = if seen > 0.0 { spread.sqrt() / seen } else { 1.0 };
    let lost_share = lost as f64 / (lost as usize + windows.len()).max(1) as f64;
    let quality =
        WalkQuality { windows: windows.len() as u64, broken_headers: lost, read_bytes: walker.pacer.read_bytes, ..WalkQuality::default() };
    Estimate {
        live_bytes_est: (share * total as f64) as u64,
        live_bytes_stderr: ((stderr + lost_share * share.max(1.0 - share)) * total as f64) as u64,
        quality,
    }
}

/// Reads the window and finds a boundary before its middle, or the region's own start.
fn boundary(walker: &mut Walker<'_>, snapshot: &mut Snapshot, plan: &RegionPlan, middle: u64, lead_bytes: u64) -> Option<u64> {
    let from = middle.saturating_sub(lead_bytes).max(plan.start) & !15;
    let window = page_up(middle.saturating_add(HALF_BYTES)).saturating_sub(page_down(from));
    walker.set_window_bytes(usize::try_from(window).unwrap_or(usize::MAX));
    if !walker.load(snapshot, from, plan.bounds.end) {
        return None;
    }
    if from == plan.start { Some(from) } else { first_boundary(snapshot, from, middle, &plan.bounds, CONFIRMING_CHUNKS) }
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
