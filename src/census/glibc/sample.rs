//! Shares of live and free bytes from random windows: the same time for heaps of any size, with a stated error.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use super::super::account::OccupancyEstimate;
use super::super::memory::Memory;
use super::super::pace::Pacer;
use super::super::quality::WalkQuality;
use super::layout::{FASTBIN_CHUNK_BYTES_MAX, Layout, is_chunk_address};
use super::parse::{Kind, Record, Snapshot, first_boundary, parse};
use super::walk::RegionPlan;
use super::walker::Walker;
use crate::heap::occupancy::{Holder, OccupancyBuilder};
use crate::heap::residency::{page_down, page_up, whole_pages};

/// Bytes of a window that are classified: from its middle on.
const HALF_BYTES: u64 = 64 << 10;
/// How far before the middle the search for a boundary begins: the shorter distance is enough for small chunks, and saves nearly half of
/// the reading.
const LEADS_BYTES: [u64; 2] = [8 << 10, 64 << 10];
/// Headers in a row that confirm a boundary.
const CONFIRMING_CHUNKS: u32 = 12;

/// Share of windows without chunks above which the estimate is useless. The heap then has so few small chunks that a walk is cheap.
pub const LOST_RATIO_MAX: f64 = 0.9;
/// Windows without chunks, and none with, after which no more are read: were a tenth of the heap in small chunks, one would have been found
/// with a probability of 98 %.
const LOST_IN_A_ROW_MAX: u64 = 40;

/// The estimate.
#[derive(Debug, Clone, Copy, Default)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes_est: u64,
    /// Standard error, from the spread between windows. Windows without a boundary hold large chunks or long free runs, which may all be
    /// live or all be free: what that could change is added.
    pub live_bytes_stderr: u64,
    /// Contents of the resident pages; `None` if members of fastbins cannot be distinguished from chunks in use one by one.
    pub occupancy: Option<OccupancyEstimate>,
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

/// What distinguishes cached chunks from those in use, one by one.
#[derive(Debug, Clone)]
pub struct Telling {
    /// The word that marks chunks in thread caches.
    pub tcache_key: Option<u64>,
    /// Sizes for which some arena has a fastbin in use.
    pub fast_sizes: Vec<u64>,
    /// The range in which the links of fastbins point.
    pub heaps: Range<u64>,
    /// How they are stored.
    pub layout: Layout,
}

impl Telling {
    /// Whether members of fastbins can be recognised. Only in a member does a protected link decode to an address in the heap; a plain link
    /// looks like any pointer of the program.
    fn tells_fastbins(&self) -> bool {
        self.fast_sizes.is_empty() || self.layout.safe_linking == Some(true)
    }

    fn holder(&self, record: &Record) -> Holder {
        match record.kind {
            Kind::InUse if self.tcache_key == Some(record.second_word) || self.is_fast(record) => Holder::Cached,
            Kind::InUse => Holder::Live,
            Kind::Free => Holder::Free,
            Kind::Fencepost => Holder::Other,
            Kind::Top => Holder::Top,
        }
    }

    fn is_fast(&self, record: &Record) -> bool {
        if record.bytes > FASTBIN_CHUNK_BYTES_MAX || self.layout.safe_linking != Some(true) || !self.fast_sizes.contains(&record.bytes) {
            return false;
        }
        let next = self.layout.reveal(record.start.saturating_add(16), record.first_word);
        is_chunk_address(next) && self.heaps.contains(&next)
    }
}

/// Bytes of one window: classified and live ones of them, then of its whole pages.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    seen: f64,
    live: f64,
    paged: f64,
    free: f64,
    trimmable: f64,
    pinned: f64,
    cached: f64,
}

/// Samples the regions.
#[must_use]
pub fn estimate(memory: &dyn Memory, plans: &[RegionPlan], telling: &Telling, pacer: Pacer) -> Estimate {
    let total: u64 = plans.iter().map(|plan| plan.bounds.end - plan.start).fold(0, u64::saturating_add);
    if total == 0 {
        return Estimate::default();
    }
    let mut random = seed();
    let mut walker = Walker::for_samples(memory, pacer);
    let mut snapshot = Snapshot::default();
    let mut records = Vec::new();
    let mut windows: Vec<Window> = Vec::new();
    // Windows whose chunks were not found.
    let mut lost = 0u64;
    let mut is_sparse = false;
    for _ in 0..walker.pacer.sample_windows() {
        if walker.pacer.is_over() || windows.is_empty() && lost >= LOST_IN_A_ROW_MAX {
            break;
        }
        random = next(random);
        let Some((plan, middle)) = place(plans, random % total) else { continue };
        // Where the window before had few chunks, the shorter distance is not tried.
        let mut leads = LEADS_BYTES.into_iter().skip(usize::from(is_sparse));
        let Some(start) = leads.find_map(|lead| boundary(&mut walker, &mut snapshot, plan, middle, lead)) else {
            lost += 1;
            is_sparse = true;
            continue;
        };
        let parsed = parse(&snapshot, start, &plan.bounds, &mut records);
        is_sparse = parsed.stop.saturating_sub(start) / LEADS_BYTES[0] > records.len() as u64 / u64::from(CONFIRMING_CHUNKS);
        windows.push(window(&mut walker, &records, middle..middle.saturating_add(HALF_BYTES), telling));
    }
    let lost_share = lost as f64 / (lost as usize + windows.len()).max(1) as f64;
    let (live, live_stderr) = share(&windows, lost_share, |window| (window.seen, window.live));
    let (free, free_stderr) = share(&windows, lost_share, |window| (window.paged, window.free));
    let paged: f64 = windows.iter().map(|window| window.paged).sum();
    let of_total = |share: f64| (share * total as f64) as u64;
    let part = |of: fn(&Window) -> f64| of_total(windows.iter().map(of).sum::<f64>() / paged.max(1.0));
    let occupancy = OccupancyEstimate {
        free_resident_bytes_est: of_total(free),
        free_resident_bytes_stderr: of_total(free_stderr),
        trimmable_bytes_est: part(|window| window.trimmable),
        pinned_bytes_est: part(|window| window.pinned),
        cached_bytes_est: part(|window| window.cached),
    };
    let quality =
        WalkQuality { windows: windows.len() as u64, broken_headers: lost, read_bytes: walker.pacer.read_bytes, ..WalkQuality::default() };
    Estimate {
        live_bytes_est: of_total(live),
        live_bytes_stderr: of_total(live_stderr),
        occupancy: telling.tells_fastbins().then_some(occupancy),
        quality,
    }
}

/// The figures of a window from its records.
fn window(walker: &mut Walker<'_>, records: &[Record], range: Range<u64>, telling: &Telling) -> Window {
    let mut sum = Window::default();
    // Pages that the records cover whole.
    let known_until = records.last().map_or(range.start, |last| last.start.saturating_add(last.bytes).min(range.end));
    let pages = whole_pages(range.start..known_until);
    let mut builder = OccupancyBuilder::new(|range: Range<u64>| walker.pages.resident_bytes(range));
    let within = |record: &Record, range: &Range<u64>| {
        let end = record.start.saturating_add(record.bytes).min(range.end);
        record.start.max(range.start)..end.max(record.start.max(range.start))
    };
    for record in records {
        let holder = telling.holder(record);
        // Cut to the byte: points at equal distances would hit the same chunks of a regular pattern again and again.
        let part = within(record, &range);
        let bytes = (part.end - part.start) as f64;
        sum.seen += bytes;
        if record.kind == Kind::InUse && holder == Holder::Live {
            sum.live += bytes;
        }
        let part = within(record, &pages);
        if holder == Holder::Cached {
            sum.cached += (part.end - part.start) as f64;
        }
        builder.add(part, holder);
    }
    let occupancy = builder.finish();
    sum.paged = pages.end.saturating_sub(pages.start) as f64;
    sum.pinned = occupancy.pinned_bytes as f64;
    sum.trimmable = occupancy.free_unpinned_bytes.saturating_add(occupancy.top_unpinned_bytes) as f64;
    sum.free = sum.pinned + sum.trimmable + occupancy.cached_unpinned_bytes as f64;
    sum
}

/// The ratio of the two values over all windows, with its standard error: a ratio estimator with windows as clusters. What the lost windows
/// could change is added.
fn share(windows: &[Window], lost_share: f64, of: impl Fn(&Window) -> (f64, f64)) -> (f64, f64) {
    let (all, part) = windows.iter().map(&of).fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    if all <= 0.0 {
        return (0.0, 1.0);
    }
    let share = part / all;
    let spread: f64 = windows.iter().map(&of).map(|(all, part)| (part - share * all).powi(2)).sum();
    (share, spread.sqrt() / all + lost_share * share.max(1.0 - share))
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

#[cfg(test)]
mod tests {
    use super::super::parse::Bounds;
    use super::*;
    use crate::census::{Fixture, Pace};

    const START: u64 = 0x1000_0000;
    const BYTES: u64 = 4 << 20;

    /// Of a heap in which `memory` has chunks that are all in use.
    fn estimate_of(memory: &Fixture, bytes: u64) -> Estimate {
        let bounds = Bounds { end: START + bytes, top: None, is_main: false, goes_on_after_top: false };
        let plan = RegionPlan { start: START, bounds, arena: 0, arena_addr: 0 };
        let telling = Telling { tcache_key: None, fast_sizes: Vec::new(), heaps: START..START + bytes, layout: Layout::with_bins_at(0) };
        estimate(memory, &[plan], &telling, Pacer::start(Pace::default()))
    }

    #[test]
    fn windows_of_small_and_of_middling_chunks_are_found() {
        for chunk_bytes in [256, 4096] {
            let mut memory = Fixture::default();
            memory.write(START, &vec![0xff; BYTES as usize]);
            for at in (START..START + BYTES).step_by(chunk_bytes as usize) {
                memory.write_word(at + 8, chunk_bytes | 1);
            }
            let estimate = estimate_of(&memory, BYTES);
            assert!(estimate.lost_ratio() < 0.1, "{chunk_bytes}: {estimate:?}");
            assert!(estimate.live_bytes_est.abs_diff(BYTES) < BYTES / 50, "{chunk_bytes}: {estimate:?}");
        }
    }

    #[test]
    fn a_heap_in_which_no_window_shows_chunks_is_left_after_few() {
        // So large that none of them is where the heap begins, from where each is found.
        let estimate = estimate_of(&Fixture::default(), 1 << 40);
        assert_eq!((estimate.quality.broken_headers, estimate.quality.windows), (LOST_IN_A_ROW_MAX, 0), "{estimate:?}");
        assert!(estimate.lost_ratio() > LOST_RATIO_MAX, "{estimate:?}");
    }
}
