//! Walks one region of a heap chunk by chunk while the program keeps changing it.
//!
//! Measures for exactness, in this order: (1) the last few chunks of a window are held back and read again with the next one, so that a
//! boundary that vanished (merged into the chunk before) can be replaced by another that still exists; reading the same boundary again
//! never helps. (2) Near the region's end a bad header usually means that top moved: read it again. (3) After a bad header in mid-window,
//! commit the chunks before it and read from there. (4) Go back to the start of an earlier window, discard what was found since, and walk
//! the stretch again. (5) Otherwise find a new boundary by trial, and report the gap as unknown.
//!
//! [`parts`](super::parts) walks a long region with several threads.

use std::collections::VecDeque;

use super::super::memory::{Piece, word_at};
use super::layout::{CHUNK_BYTES_MIN, FLAGS, PREV_INUSE, TOP_BEFORE_BINS};
use super::parse::{Bounds, Kind, Parsed, Record, Snapshot, find_boundary, find_piece, is_sound_header, parse};
use super::parts::{self, Cut};
use super::walker::Walker;
use crate::heap::residency::page_up;

/// Chunks held back at the end of a window.
const HELD_BACK_MAX: usize = 12;
/// Reads at one address before a new boundary is searched for.
const TRIES_MAX: u32 = 3;
/// Windows whose starts are remembered to go back to, the nearest one first. While a walk waits for a processor, a busy heap may replace
/// nearly all boundaries of the last few; one of many still stands.
const GO_BACK_MAX: usize = 24;
/// Maximum number of times a walk goes back: four seconds of reading in a heap without any sound structure.
const WALKED_AGAIN_MAX: u64 = 4096;
/// How near the region's end a bad header must be for top to be read again.
const NEAR_END_BYTES: u64 = 4 << 20;
/// Chunk size from which only headers are read: a hop costs as much as copying 12 KiB.
const HOP_BYTES_MIN: u64 = 16 << 10;

/// Bytes searched for a boundary by a walk ahead: where none is found, chunks are large, and going from header to header is cheaper.
const AHEAD_BYTES: u64 = 64 << 10;

/// A region to walk.
#[derive(Debug, Clone, Copy)]
pub struct RegionPlan {
    /// First address.
    pub start: u64,
    /// Bounds known before the walk.
    pub bounds: Bounds,
    /// Index of the arena.
    pub arena: u32,
    /// Address of the arena's structure.
    pub arena_addr: u64,
}

impl Walker<'_> {
    /// Walks a region into one region of the table, or several if foreign memory lies between its pieces.
    pub fn walk(&mut self, plan: &RegionPlan) {
        self.table.begin_region(plan.start, plan.arena);
        let mut walk = RegionWalk::new(plan);
        let cut = Cut::of(plan, self.pacer.threads());
        if cut.threads == 1 { walk.run(self) } else { parts::walk(walk, self, cut) }
    }
}

/// The state of one region's walk.
pub(super) struct RegionWalk {
    pub(super) plan: RegionPlan,
    pub(super) bounds: Bounds,
    /// The next address without a record.
    pub(super) at: u64,
    /// Where this walk stops: it does not begin another window from there on. The region's end, or that of a part.
    pub(super) stop: u64,
    /// It began at a boundary found by trial, and looks for no other one beyond its stop.
    pub(super) is_ahead: bool,
    /// It ended before its stop, with nothing left to be found.
    is_ended: bool,
    /// Records of the window before that were not committed; the first one begins at `at`.
    held_back: Vec<Record>,
    tries: u32,
    last_broken: u64,
    /// Starts of the last windows, none before the last gap.
    starts: VecDeque<u64>,
    /// The chunks before were large: go from header to header.
    is_hopping: bool,
}

impl RegionWalk {
    /// A walk that has not begun.
    pub(super) fn new(plan: &RegionPlan) -> Self {
        Self {
            bounds: plan.bounds,
            plan: *plan,
            at: plan.start,
            stop: u64::MAX,
            is_ahead: false,
            is_ended: false,
            held_back: Vec::new(),
            tries: 0,
            last_broken: 0,
            starts: VecDeque::with_capacity(GO_BACK_MAX),
            is_hopping: false,
        }
    }

    /// Begins anew at a boundary that was found by trial.
    pub(super) fn begin_at(&mut self, walker: &mut Walker<'_>, found: u64) {
        walker.begin_again(found, self.plan.arena);
        self.go_on_at(found);
    }

    /// Goes on at an address that another walk has reached.
    pub(super) fn go_on_at(&mut self, at: u64) {
        self.at = at;
        self.held_back.clear();
        self.starts.clear();
        self.tries = 0;
        self.is_hopping = false;
    }

    /// Whether there is something left before an address.
    pub(super) fn is_before(&self, stop: u64) -> bool {
        !self.is_ended && self.at < self.bounds.end.min(stop)
    }

    /// Walks to the end of the region, or to the first boundary from the stop on.
    pub(super) fn run(&mut self, walker: &mut Walker<'_>) {
        let mut snapshot = Snapshot::default();
        let mut records: Vec<Record> = Vec::new();
        while self.is_before(self.stop) {
            if walker.pacer.is_over() || walker.table.len() >= super::super::chunks::CHUNKS_MAX {
                if self.is_ahead {
                    break;
                }
                walker.commit_gap(self.bounds.end - self.at, true);
                self.at = self.bounds.end;
                break;
            }
            if self.is_hopping {
                self.hop(walker);
                continue;
            }
            if !walker.load(&mut snapshot, self.at, self.bounds.end) {
                let goes_on = self.step_over_unreadable(walker);
                self.is_ended |= !goes_on;
                continue;
            }
            let mut parsed = parse(&snapshot, self.at, &self.bounds, &mut records);
            let mut gap: Vec<Record> = Vec::new();
            if let Some(broken) = parsed.broken {
                if self.bounds.end - broken.min(self.bounds.end) < NEAR_END_BYTES && self.refresh_top(walker) {
                    continue;
                }
                walker.quality.broken_headers += 1;
                if let Some(found) = self.try_held_back(&snapshot, broken, &mut records) {
                    walker.quality.replaced_boundaries += 1;
                    (parsed, gap) = found;
                }
            }
            if let Some(broken) = parsed.broken {
                self.recover(walker, &mut snapshot, broken, &gap, &records);
                continue;
            }
            self.tries = 0;
            walker.commit_all(&gap);
            self.at = gap.last().map_or(self.at, |record| record.start + record.bytes);
            if parsed.is_done {
                walker.commit_all(&records);
                self.at = parsed.stop;
                if parsed.stop < self.bounds.end {
                    // A heap ended by its fencepost before the end that its heap_info gives.
                    walker.commit_gap(self.bounds.end - parsed.stop, false);
                }
                self.is_ended = true;
                break;
            }
            if records.is_empty() {
                self.hop(walker);
                continue;
            }
            let committed = self.split(&records, walker.pacer.window_bytes() as u64, parsed.stop);
            let (now, later) = records.split_at(committed);
            if self.starts.len() == GO_BACK_MAX {
                self.starts.pop_front();
            }
            self.starts.push_back(self.at);
            walker.commit_all(now);
            let from = self.at;
            self.at = now.last().map_or(self.at, |record| record.start + record.bytes);
            self.held_back = later.to_vec();
            self.is_hopping = (self.at - from) / now.len().max(1) as u64 >= HOP_BYTES_MIN;
        }
    }

    /// How many of a window's records are committed at once; the rest is read again with the next window.
    fn split(&self, records: &[Record], window_bytes: u64, stop: u64) -> usize {
        let limit = stop.saturating_sub(window_bytes / 8);
        let mut keep = records.len();
        let mut held = 0;
        while keep > 1
            && held < HELD_BACK_MAX
            && records.get(keep - 1).is_some_and(|record| record.start > limit && record.start > self.at + 4096)
        {
            keep -= 1;
            held += 1;
        }
        keep
    }

    /// Another boundary of the window before may still stand: take the first that leads past the broken header. Returns what it led to
    /// and the records of the window before that bridge the way to it.
    fn try_held_back(&self, snapshot: &Snapshot, broken: u64, records: &mut Vec<Record>) -> Option<(Parsed, Vec<Record>)> {
        let mut other = Vec::new();
        for (index, record) in self.held_back.iter().enumerate() {
            let boundary = record.start + record.bytes;
            if boundary >= snapshot.end || boundary <= self.at {
                continue;
            }
            let parsed = parse(snapshot, boundary, &self.bounds, &mut other);
            if parsed.broken.is_none_or(|at| at > broken.saturating_add(4096)) {
                std::mem::swap(records, &mut other);
                let gap =
                    self.held_back.get(..=index).unwrap_or_default().iter().filter(|record| record.start >= self.at).copied().collect();
                return Some((parsed, gap));
            }
        }
        None
    }

    /// After a broken header: commit what came before it and read again from there; after a few tries search for a new boundary.
    fn recover(&mut self, walker: &mut Walker<'_>, snapshot: &mut Snapshot, broken: u64, gap: &[Record], records: &[Record]) {
        // A page that was touched after its state was queried reads as zeros.
        walker.pages.forget();
        if self.tries < TRIES_MAX {
            self.tries += 1;
            // The two chunks before the broken header may be wrong themselves.
            let sound = records.len().saturating_sub(2);
            if sound > 0 {
                walker.commit_all(gap);
                walker.commit_all(records.get(..sound).unwrap_or_default());
                if let Some(next) = records.get(sound) {
                    self.at = next.start;
                }
                self.held_back = records.get(sound..).unwrap_or_default().to_vec();
                if self.last_broken != broken {
                    self.tries = 1;
                }
                self.last_broken = broken;
            }
            return;
        }
        self.tries = 0;
        self.held_back.clear();
        if self.go_back(walker) {
            return;
        }
        walker.commit_all(gap);
        walker.commit_all(records);
        self.at = gap.iter().chain(records).next_back().map_or(self.at, |record| record.start + record.bytes);
        self.resynchronise(walker, snapshot, broken.max(self.at) + 16, false);
    }

    /// Goes back to the start of an earlier window, one further each time until the walk makes progress; `false` if there is none.
    fn go_back(&mut self, walker: &mut Walker<'_>) -> bool {
        let Some(start) = self.starts.pop_back().filter(|_| walker.quality.walked_again < WALKED_AGAIN_MAX) else { return false };
        walker.quality.walked_again += 1;
        self.at = walker.take_back(start);
        true
    }

    /// Searches for a boundary from `from` on, window by window. `is_unread`: because pages cannot be read, not because the heap is
    /// unsound.
    fn resynchronise(&mut self, walker: &mut Walker<'_>, snapshot: &mut Snapshot, from: u64, is_unread: bool) {
        walker.quality.resynchronised += 1;
        self.starts.clear();
        let found = self.search(walker, snapshot, from);
        if self.is_ahead {
            // What led here may have been wrong from its start on. The walk that arrives here from the part before knows more.
            self.is_ended = found.is_none();
            if let Some(found) = found {
                self.begin_at(walker, found);
            }
            return;
        }
        let top = self.bounds.top.filter(|&top| self.at < top && top < self.bounds.end);
        let end = found.or(top).unwrap_or(self.bounds.end).min(self.bounds.end).max(self.at);
        if self.bounds.goes_on_after_top {
            // The kernel joined the heap's mappings with others that lie between them: what follows is a region of its own.
            self.at = found.unwrap_or(self.bounds.end);
            walker.table.begin_region(self.at, self.plan.arena);
            return;
        }
        walker.commit_gap(end - self.at, is_unread || (found.is_none() && top.is_none()));
        self.at = end;
    }

    /// The first boundary from `from` on that can be found by trial.
    pub(super) fn search(&self, walker: &mut Walker<'_>, snapshot: &mut Snapshot, from: u64) -> Option<u64> {
        let mut from = from;
        let (mut end, mut read_end) = (self.bounds.end, self.bounds.end);
        if self.is_ahead {
            end = end.min(self.stop).min(from.saturating_add(AHEAD_BYTES));
            read_end = read_end.min(end.saturating_add(AHEAD_BYTES));
        }
        while from < end && !walker.pacer.is_over() {
            if from + 64 >= snapshot.end || from < snapshot.start {
                if snapshot.end >= self.bounds.end && from >= snapshot.start {
                    break;
                }
                // Never-touched and swapped pages hold no boundary that could be read.
                from = walker.next_present(from, end)?;
                if !walker.load(snapshot, from, read_end) {
                    from = page_up(from + 1);
                    continue;
                }
            }
            let piece = if self.bounds.goes_on_after_top { find_piece(snapshot, from, &self.bounds) } else { None };
            if let Some(found) = piece.or_else(|| find_boundary(snapshot, from, &self.bounds)) {
                return Some(found);
            }
            let searched = from.saturating_add(32 << 10);
            from = if searched + 64 < snapshot.end { searched } else { (snapshot.end & !15).max(from + 16) };
        }
        None
    }

    /// The page at `at` cannot be read: top may have moved, or the pages are swapped out or gone. `false` ends the region.
    fn step_over_unreadable(&mut self, walker: &mut Walker<'_>) -> bool {
        if self.tries < TRIES_MAX {
            self.tries += 1;
            walker.pages.forget();
            self.refresh_top(walker);
            return self.at < self.bounds.end;
        }
        self.tries = 0;
        self.held_back.clear();
        if self.is_heap_gone(walker) {
            return false;
        }
        let mut snapshot = Snapshot::default();
        let from = page_up(self.at + 1);
        self.resynchronise(walker, &mut snapshot, from, true);
        self.at < self.bounds.end
    }

    /// Whether the heap of a non-main arena was released meanwhile: the rest of the region then no longer belongs to it.
    fn is_heap_gone(&self, walker: &Walker<'_>) -> bool {
        let heap = self.plan.start & !(walker.layout.heap_bytes_max - 1);
        !self.bounds.is_main && walker.memory.word(heap) != Some(self.plan.arena_addr)
    }

    /// Chunks larger than a window, or a run of large ones: from header to header without what lies between.
    fn hop(&mut self, walker: &mut Walker<'_>) {
        self.is_hopping = false;
        let Some(mut here) = self.read_header(walker, self.at) else { return self.force_progress(walker, 0) };
        loop {
            let bytes = here[1] & !FLAGS;
            let next = self.at.saturating_add(bytes);
            // The last chunk, or a header that changed: the ordinary walk handles it, from a fresh window.
            if !is_sound_header(here[1], self.at, &self.bounds)
                || next.saturating_add(16) > self.bounds.end
                || self.bounds.top == Some(self.at)
            {
                return self.force_progress(walker, bytes);
            }
            let Some(there) = self.read_header(walker, next) else { return self.force_progress(walker, bytes) };
            let kind = if there[1] & PREV_INUSE != 0 { Kind::InUse } else { Kind::Free };
            if kind == Kind::Free && there[0] != bytes {
                return self.force_progress(walker, bytes);
            }
            walker.commit(&Record { start: self.at, bytes, kind, first_word: here[2], second_word: here[3] });
            self.at = next;
            self.tries = 0;
            self.held_back.clear();
            here = there;
            if here[1] & !FLAGS < HOP_BYTES_MIN || self.at >= self.stop || walker.pacer.is_over() {
                return;
            }
        }
    }

    /// A header and the two words after it, if the page is present.
    fn read_header(&self, walker: &mut Walker<'_>, addr: u64) -> Option<[u64; 4]> {
        let mut raw = [0u8; 32];
        let wanted = usize::try_from(self.bounds.end.checked_sub(addr)?).unwrap_or(32).min(32);
        let end = addr + wanted as u64;
        if wanted < 16 || !walker.pages.runs_for(addr..end).within(addr..end).all(|run| run.state.present) {
            return None;
        }
        let got = raw.get_mut(..wanted).map_or(0, |part| walker.memory.read_pieces(&[Piece { addr, bytes: wanted }], part));
        walker.pacer.read(32);
        (got >= 16).then(|| [word_at(&raw, 0), word_at(&raw, 8), word_at(&raw, 16), word_at(&raw, 24)])
    }

    /// A hop that could not be made: try again with fresh data, and after a few tries give the chunk up as unknown.
    fn force_progress(&mut self, walker: &mut Walker<'_>, bytes: u64) {
        walker.pages.forget();
        // Without a size there is nothing to step over: the next window shows what happened.
        if self.refresh_top(walker) || bytes < CHUNK_BYTES_MIN {
            return;
        }
        self.tries += 1;
        if self.tries <= TRIES_MAX {
            return;
        }
        self.tries = 0;
        if self.is_ahead {
            self.is_ended = true;
            return;
        }
        walker.quality.broken_headers += 1;
        let skip = bytes.min(self.bounds.end.saturating_sub(self.at));
        walker.commit_gap(skip, true);
        self.at += skip;
        self.held_back.clear();
    }

    /// Reads where top is now; the region's end follows it. Whether anything changed.
    fn refresh_top(&mut self, walker: &mut Walker<'_>) -> bool {
        if self.bounds.goes_on_after_top {
            return false;
        }
        let old_top = self.bounds.top;
        if old_top.is_none() && self.bounds.is_main {
            return false;
        }
        let place = self.plan.arena_addr.wrapping_add(walker.layout.bins_offset).wrapping_sub(TOP_BEFORE_BINS);
        let Some(top) = walker.memory.word(place) else { return false };
        let Some(bytes) = walker.memory.word(top.wrapping_add(8)).map(|size| size & !FLAGS) else { return false };
        let Some(end) = top.checked_add(bytes) else { return false };
        // Top is in another heap, or invalid: the region stays as it is.
        let near = self.bounds.end.saturating_add(1 << 30);
        if top < self.plan.start || end & 4095 != 0 || end > near || end.saturating_add(1 << 30) < self.bounds.end {
            return false;
        }
        // An older heap of the arena has top again once the newer ones are returned.
        let is_same_heap = (top ^ self.plan.start) < walker.layout.heap_bytes_max;
        if old_top.is_none() && !is_same_heap {
            return false;
        }
        let changed = old_top != Some(top) || end != self.bounds.end;
        self.bounds.top = Some(top);
        self.bounds.end = end;
        if changed {
            walker.pages.forget();
        }
        changed
    }
}
