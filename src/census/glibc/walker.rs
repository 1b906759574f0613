//! The state shared by the walks of all regions of a heap: windows of memory, the table of chunks, counters.

use super::super::chunks::{ChunkState, ChunkTable};
use super::super::memory::{Memory, Piece};
use super::super::pace::Pacer;
use super::super::page_cache::PageCache;
use super::super::quality::WalkQuality;
use super::layout::{FASTBIN_CHUNK_BYTES_MAX, Layout, is_chunk_address};
use super::parse::{Kind, Record, Snapshot};
use crate::heap::residency::page_down;

/// Address space searched for the next present page at once.
const RESIDENCY_BYTES: u64 = 16 << 20;
/// Candidates for fastbins remembered: 32 MiB. Longer lists are followed by reading.
const FAST_CANDIDATES_MAX: usize = 1 << 21;

/// A chunk in use that may be a fastbin's member: the address that its first word means.
#[derive(Debug, Clone, Copy)]
pub struct FastCandidate {
    /// The chunk.
    pub start: u64,
    /// Where its link leads; 0 ends the list.
    pub next: u64,
}

/// What all regions' walks share.
pub struct Walker<'a> {
    pub(super) memory: &'a dyn Memory,
    pub(super) layout: Layout,
    /// The word that marks chunks in thread caches, if it was found beforehand.
    pub tcache_key: Option<u64>,
    /// Sizes of chunks that non-empty fastbins hold.
    pub fast_sizes: Vec<u64>,
    /// Where heaps lie: words that point elsewhere are not links.
    pub heaps: std::ops::Range<u64>,
    /// Speed and time limit.
    pub pacer: Pacer,
    /// The chunks found.
    pub table: ChunkTable,
    /// Counters.
    pub quality: WalkQuality,
    /// Possible members of fastbins, by ascending address within each region.
    pub fast_candidates: Vec<FastCandidate>,
    /// Whether candidates were refused for lack of room.
    pub fast_candidates_refused: u64,
    pub(super) pages: PageCache<'a>,
    window_bytes: usize,
}

impl<'a> Walker<'a> {
    /// A walker with an empty table.
    #[must_use]
    pub fn new(memory: &'a dyn Memory, layout: Layout, pacer: Pacer) -> Self {
        Self {
            memory,
            layout,
            tcache_key: None,
            fast_sizes: Vec::new(),
            heaps: 0..u64::MAX,
            table: ChunkTable::for_glibc(),
            quality: WalkQuality::default(),
            fast_candidates: Vec::new(),
            fast_candidates_refused: 0,
            pages: PageCache::new(memory),
            window_bytes: pacer.window_bytes(),
            pacer,
        }
    }

    /// A walker for another thread, with a table of its own.
    #[must_use]
    pub(super) fn of_thread(&self) -> Self {
        Self {
            tcache_key: self.tcache_key,
            fast_sizes: self.fast_sizes.clone(),
            heaps: self.heaps.clone(),
            ..Self::new(self.memory, self.layout, self.pacer.of_thread())
        }
    }

    /// Forgets what was found, and begins a region.
    pub(super) fn begin_again(&mut self, start: u64, arena: u32) {
        self.table = ChunkTable::for_glibc();
        self.table.begin_region(start, arena);
        self.quality = WalkQuality::default();
        self.fast_candidates.clear();
        self.fast_candidates_refused = 0;
    }

    /// Adds what another walker found in a region from the chunk at `from` on, where the current region ends. `false` if no chunk begins
    /// there.
    pub(super) fn take_over(&mut self, other: &Walker<'_>, from: u64) -> bool {
        if !self.table.append_from(&other.table, from) {
            return false;
        }
        self.quality.add(&other.quality);
        let candidates = other.fast_candidates.iter().filter(|candidate| candidate.start >= from);
        let room = FAST_CANDIDATES_MAX - self.fast_candidates.len().min(FAST_CANDIDATES_MAX);
        self.fast_candidates_refused += other.fast_candidates_refused + (candidates.clone().count().saturating_sub(room)) as u64;
        self.fast_candidates.extend(candidates.take(room));
        true
    }

    /// A reader of windows at random addresses.
    #[must_use]
    pub(super) fn for_samples(memory: &'a dyn Memory, pacer: Pacer) -> Self {
        Self { pages: PageCache::without_foresight(memory), ..Self::new(memory, Layout::with_bins_at(0), pacer) }
    }

    /// Sets the size of the next windows, whole pages.
    pub(super) fn set_window_bytes(&mut self, bytes: usize) {
        self.window_bytes = bytes.min(self.pacer.window_bytes());
    }

    /// Fills the snapshot from the page of `from` on. Pages that are not present read as zeros and are never touched. `false` if the
    /// page of `from` cannot be read: not present, swapped out, gone.
    pub(super) fn load(&mut self, snapshot: &mut Snapshot, from: u64, end: u64) -> bool {
        let start = page_down(from);
        let window = self.window_bytes;
        let stop = start.saturating_add(window as u64).min(end.next_multiple_of(16));
        let length = usize::try_from(stop.saturating_sub(start)).unwrap_or(0).min(window);
        let runs = self.pages.runs_for(start..stop);
        let present: Vec<Piece> = runs
            .within(start..stop)
            .filter(|run| run.state.present)
            .map(|run| Piece { addr: run.start, bytes: usize::try_from(run.end - run.start).unwrap_or(0) })
            .collect();
        let swapped_at = runs.within(start..stop).find(|run| run.state.swapped).map(|run| run.start);
        snapshot.start = start;
        snapshot.end = start;
        if present.first().is_none_or(|piece| piece.addr > from) {
            return false;
        }
        if snapshot.bytes.len() < length {
            snapshot.bytes.resize(length, 0);
        }
        let Some(bytes) = snapshot.bytes.get_mut(..length) else { return false };
        let mut end = stop;
        if let [only] = present.as_slice()
            && only.addr == start
            && only.bytes == length
        {
            end = start + self.memory.read_pieces(&present, bytes) as u64;
        } else {
            bytes.fill(0);
            let wanted: usize = present.iter().map(|piece| piece.bytes).sum();
            let mut packed = vec![0u8; wanted];
            let got = self.memory.read_pieces(&present, &mut packed);
            let mut done = 0;
            for piece in &present {
                let Ok(to) = usize::try_from(piece.addr - start) else { break };
                if let (Some(from), Some(to)) = (packed.get(done..done + piece.bytes), bytes.get_mut(to..to + piece.bytes)) {
                    to.copy_from_slice(from);
                }
                done += piece.bytes;
                if done > got {
                    // What could not be read ends the snapshot: zeros there would look like a broken heap.
                    end = end.min(piece.addr);
                    break;
                }
            }
        }
        // A swapped page has content that is not read: the snapshot ends before it.
        snapshot.end = swapped_at.map_or(end, |addr| end.min(addr));
        self.pacer.read(length as u64);
        snapshot.end >= from.saturating_add(16).max(start + 32)
    }

    /// The next address at or after `from` that can be read, within the region.
    pub(super) fn next_present(&mut self, from: u64, end: u64) -> Option<u64> {
        let mut at = from;
        while at < end {
            let stop = at.saturating_add(RESIDENCY_BYTES).min(end);
            if let Some(found) = self.pages.runs_for(at..stop).next_present(at) {
                return (found < end).then_some(found);
            }
            at = self.pages.known_until().max(stop);
            if self.pacer.is_over() {
                return None;
            }
        }
        None
    }

    pub(super) fn commit(&mut self, record: &Record) {
        self.commit_all(std::slice::from_ref(record));
    }

    /// Adds the chunks of records that follow one another.
    pub(super) fn commit_all(&mut self, records: &[Record]) {
        let key = self.tcache_key;
        self.table.append(records, |record| {
            let state = match record.kind {
                Kind::InUse if key == Some(record.second_word) => ChunkState::Tcache,
                Kind::InUse => ChunkState::Live,
                Kind::Free => ChunkState::Free,
                Kind::Fencepost => ChunkState::Overhead,
                Kind::Top => ChunkState::Top,
            };
            (record.bytes, state)
        });
        if !self.fast_sizes.is_empty() {
            records.iter().for_each(|record| self.keep_if_fast(record));
        }
    }

    /// Remembers a chunk that may be a fastbin's member.
    fn keep_if_fast(&mut self, record: &Record) {
        if record.kind == Kind::InUse && record.bytes <= FASTBIN_CHUNK_BYTES_MAX && self.fast_sizes.contains(&record.bytes) {
            let next = self.layout.reveal(record.start.saturating_add(16), record.first_word);
            if next == 0 || (is_chunk_address(next) && self.heaps.contains(&next)) {
                if self.fast_candidates.len() < FAST_CANDIDATES_MAX {
                    self.fast_candidates.push(FastCandidate { start: record.start, next });
                } else {
                    self.fast_candidates_refused += 1;
                }
            }
        }
    }

    /// Takes back what was found from `addr` on in the current region; returns where it ends now.
    pub(super) fn take_back(&mut self, addr: u64) -> u64 {
        let before = self.table.end_of_current();
        let end = self.table.take_back(addr);
        while self.fast_candidates.pop_if(|last| (end..before).contains(&last.start)).is_some() {}
        end
    }

    pub(super) fn commit_gap(&mut self, bytes: u64, is_unread: bool) {
        if bytes == 0 {
            return;
        }
        self.quality.unknown_bytes = self.quality.unknown_bytes.saturating_add(bytes);
        if is_unread {
            self.quality.unread_bytes = self.quality.unread_bytes.saturating_add(bytes);
        }
        self.table.push(bytes, ChunkState::Unknown);
    }
}
