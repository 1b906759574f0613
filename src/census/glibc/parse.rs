//! Chunk headers in a snapshot of memory: one run of the chain, and finding the chain again after it was lost. Pure.

use std::collections::HashMap;

use super::super::memory::word_at;
use super::layout::{CHUNK_BYTES_MIN, FLAGS, IS_MMAPPED, NON_MAIN_ARENA, PREV_INUSE, is_link};

/// Bytes searched for a new boundary at once.
const SYNC_BYTES: u64 = 32 << 10;
/// Chunks in a row, or starting points that agree, for a boundary found by trial to be accepted.
const SYNC_VOTES_MIN: u32 = 8;

/// Sound headers in a row that make a page look like the start of a piece.
const PIECE_CHUNKS_MIN: u32 = 4;

/// A copy of part of a region.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// Address of the first byte.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// The bytes; at least `end` − `start`.
    pub bytes: Vec<u8>,
}

impl Snapshot {
    /// The word at an address; 0 outside.
    #[must_use]
    pub fn word(&self, addr: u64) -> u64 {
        if addr < self.start || addr.saturating_add(8) > self.end {
            return 0;
        }
        usize::try_from(addr - self.start).map_or(0, |at| word_at(&self.bytes, at))
    }
}

impl Snapshot {
    /// A chunk's header and the two words after it, if they are in the snapshot. At the very end of a region there may be a header alone:
    /// with `may_be_last` the words after it are 0 then.
    #[inline]
    fn header(&self, addr: u64, may_be_last: bool) -> Option<[u64; 4]> {
        let from = usize::try_from(addr.checked_sub(self.start)?).ok()?;
        let left = self.end.checked_sub(addr)?;
        if left >= 32 {
            let words = self.bytes.get(from..)?.first_chunk::<32>()?;
            return Some([word_at(words, 0), word_at(words, 8), word_at(words, 16), word_at(words, 24)]);
        }
        (may_be_last && left >= 16).then(|| [self.word(addr), self.word(addr + 8), 0, 0])
    }
}

/// A chunk, a fencepost or top as a header shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Where the chunk begins.
    pub start: u64,
    /// Its size with header.
    pub bytes: u64,
    /// What it is.
    pub kind: Kind,
    /// First user word: a free chunk's forward link, a cached chunk's next.
    pub first_word: u64,
    /// Second user word: a free chunk's backward link, the key of a chunk in a thread's cache.
    pub second_word: u64,
}

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The next header says "in use". Chunks in fastbins and thread caches do too.
    InUse,
    /// The next header says "free".
    Free,
    /// End marker of a piece of the heap.
    Fencepost,
    /// The last chunk, which grows.
    Top,
}

/// What the parser needs to know of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// First address after the region.
    pub end: u64,
    /// Address of top if it lies in this region.
    pub top: Option<u64>,
    /// Whether it belongs to main_arena, whose chunks never carry the non-main flag.
    pub is_main: bool,
    /// Whether top is followed by older pieces of the heap (brk was refused and mappings took its place).
    pub goes_on_after_top: bool,
}

/// How far a run got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parsed {
    /// First address that no record covers.
    pub stop: u64,
    /// The invalid header, if one ended the run.
    pub broken: Option<u64>,
    /// Whether the region's end was reached.
    pub is_done: bool,
}

/// Follows the headers from `start` and collects a record for each chunk whose next header is in the snapshot too.
pub fn parse(snapshot: &Snapshot, start: u64, bounds: &Bounds, records: &mut Vec<Record>) -> Parsed {
    records.clear();
    let mut at = start;
    // Whether the last record waits for the next header, which says if its chunk is free.
    let mut is_open = false;
    let reaches_end = snapshot.end >= bounds.end;
    loop {
        if at >= bounds.end {
            // A heap that ends without fencepost ends with its top.
            if let Some(last) = records.last_mut().filter(|last| is_open && last.kind == Kind::InUse && at == bounds.end && !bounds.is_main)
            {
                last.kind = Kind::Top;
            }
            return Parsed { stop: at, broken: None, is_done: true };
        }
        let Some([prev_size, header, first_word, second_word]) = snapshot.header(at, reaches_end) else {
            return Parsed { stop: without_open(records, is_open, at), broken: None, is_done: false };
        };
        let bytes = header & !FLAGS;
        let previous_in_use = header & PREV_INUSE != 0;
        // Fenceposts: two headers of size 16, or size 0 with PREV_INUSE at the end of a non-main heap (sysmalloc, heap_trim).
        let is_fencepost =
            bytes <= 16 && ((bytes == 16 && header & (IS_MMAPPED | NON_MAIN_ARENA) == 0) || (bytes == 0 && header == 1 && !bounds.is_main));
        let mut sound = is_fencepost || is_sound_header(header, at, bounds);
        if sound && !previous_in_use {
            sound = match records.last_mut().filter(|_| is_open) {
                Some(free) => {
                    let is_free =
                        free.kind == Kind::InUse && prev_size == free.bytes && is_link(free.first_word) && is_link(free.second_word);
                    if is_free {
                        free.kind = Kind::Free;
                    }
                    is_free
                }
                None => at == start,
            };
        }
        if !sound {
            // A fencepost's size is certain, whatever follows it.
            let waits = is_open && records.last().is_some_and(|last| last.kind != Kind::Fencepost);
            return Parsed { stop: without_open(records, waits, at), broken: Some(at), is_done: false };
        }
        if bytes == 0 {
            let rest = (bounds.end - at).min(16);
            records.push(Record { start: at, bytes: rest, kind: Kind::Fencepost, first_word: 0, second_word: 0 });
            return Parsed { stop: at + rest, broken: None, is_done: true };
        }
        is_open = !is_top(header, at, bounds);
        let kind = match (is_open, is_fencepost) {
            (false, _) => Kind::Top,
            (true, true) => Kind::Fencepost,
            (true, false) => Kind::InUse,
        };
        let (first_word, second_word) = if is_open { (first_word, second_word) } else { (0, 0) };
        records.push(Record { start: at, bytes, kind, first_word, second_word });
        at += bytes;
    }
}

/// Takes the last record off again if it waits for the next header; returns the first address that no record covers.
fn without_open(records: &mut Vec<Record>, is_open: bool, at: u64) -> u64 {
    records.pop_if(|_| is_open).map_or(at, |record| record.start)
}

/// Whether a header at `at` is one of an ordinary chunk that ends inside the region.
#[inline]
#[must_use]
pub fn is_sound_header(header: u64, at: u64, bounds: &Bounds) -> bool {
    let bytes = header & !FLAGS;
    bytes & 15 == 0
        && bytes >= CHUNK_BYTES_MIN
        && header & IS_MMAPPED == 0
        && at.checked_add(bytes).is_some_and(|end| end <= bounds.end)
        && (!bounds.is_main || header & NON_MAIN_ARENA == 0)
}

/// Top is recognised by where it ends, not by its address, which moves while the target runs.
#[inline]
fn is_top(header: u64, at: u64, bounds: &Bounds) -> bool {
    let bytes = header & !FLAGS;
    let Some(top) = bounds.top else { return false };
    if header & PREV_INUSE == 0 || bytes < CHUNK_BYTES_MIN {
        return false;
    }
    if bounds.goes_on_after_top { at == top && (at + bytes) & 4095 == 0 } else { at + bytes == bounds.end }
}

/// Finds a boundary at or after `from`. Chains that start at wrong addresses soon run into true boundaries: from every multiple of 16 bytes
/// in the next 32 KiB the chain is followed to the snapshot's end; the end that most chains reach is true, and the first start that leads
/// there is the answer.
#[must_use]
pub fn find_boundary(snapshot: &Snapshot, from: u64, bounds: &Bounds) -> Option<u64> {
    struct Votes {
        count: u32,
        first: u64,
        longest: u32,
    }
    let mut votes: HashMap<u64, Votes> = HashMap::new();
    let last = from.saturating_add(SYNC_BYTES).min(snapshot.end.saturating_sub(64));
    let mut place = from.checked_next_multiple_of(16)?;
    while place < last {
        if let Some((end, length)) = follow(snapshot, place, bounds)
            && length >= 3
        {
            let entry = votes.entry(end).or_insert(Votes { count: 0, first: place, longest: 0 });
            entry.count += 1;
            entry.longest = entry.longest.max(length);
        }
        place += 16;
    }
    let best = votes.into_values().max_by_key(|votes| (votes.longest.min(SYNC_VOTES_MIN), votes.count))?;
    (best.longest >= SYNC_VOTES_MIN || best.count >= SYNC_VOTES_MIN).then_some(best.first)
}

/// Follows headers to the end of the snapshot or the region: where that leads and over how many chunks; `None` if a header is unsound.
fn follow(snapshot: &Snapshot, from: u64, bounds: &Bounds) -> Option<(u64, u32)> {
    let (mut at, mut length, mut before) = (from, 0u32, 0u64);
    while at + 16 <= snapshot.end && at < bounds.end {
        if bounds.top == Some(at) {
            return Some((bounds.end, length + SYNC_VOTES_MIN));
        }
        let header = snapshot.word(at + 8);
        if !is_sound_header(header, at, bounds) || (length > 0 && header & PREV_INUSE == 0 && snapshot.word(at) != before) {
            return None;
        }
        before = header & !FLAGS;
        at += before;
        length += 1;
    }
    Some((at, length))
}

/// The start of a piece of the heap in the next 32 KiB: pieces are mappings, so they begin on a page, with a chunk whose predecessor counts
/// as in use.
#[must_use]
pub fn find_piece(snapshot: &Snapshot, from: u64, bounds: &Bounds) -> Option<u64> {
    let mut place = from.checked_next_multiple_of(4096)?;
    let last = from.saturating_add(SYNC_BYTES).min(snapshot.end.saturating_sub(64));
    while place < last {
        let header = snapshot.word(place + 8);
        if header & PREV_INUSE != 0 && follow(snapshot, place, bounds).is_some_and(|(_, length)| length >= PIECE_CHUNKS_MIN) {
            return Some(place);
        }
        place += 4096;
    }
    None
}

/// A boundary between `from` and `by` that `chunks` sound headers in a row confirm. For samples, where there is no time for a vote.
#[must_use]
pub fn first_boundary(snapshot: &Snapshot, from: u64, by: u64, bounds: &Bounds, chunks: u32) -> Option<u64> {
    let mut place = from.checked_next_multiple_of(16)?;
    while place <= by && place + 64 < snapshot.end {
        if follow(snapshot, place, bounds).is_some_and(|(_, length)| length >= chunks) {
            return Some(place);
        }
        place += 16;
    }
    None
}
