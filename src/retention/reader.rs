//! Reads ranges of memory in windows of present pages, at the census's pace. Absent pages are never read, so nothing is faulted in.

use std::ops::Range;

use crate::census::memory::{Memory, Piece};
use crate::census::pace::{Pace, Pacer};
use crate::census::page_cache::PageCache;
use crate::heap::residency::page_up;

/// Reads ranges window by window.
pub struct Reader<'a> {
    memory: &'a dyn Memory,
    pages: PageCache<'a>,
    pacer: Pacer,
    buffer: Vec<u8>,
    pieces: Vec<Piece>,
    /// Bytes that were present but could not be read, or were left out when the time limit was reached.
    pub unread_bytes: u64,
    /// Bytes in swap, which are not read either.
    pub swapped_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

impl<'a> Reader<'a> {
    /// A reader at this pace; the clock of its limit starts now.
    #[must_use]
    pub fn new(memory: &'a dyn Memory, pace: Pace) -> Self {
        let pacer = Pacer::start(pace);
        let buffer = vec![0; pacer.window_bytes()];
        Self { memory, pages: PageCache::new(memory), pacer, buffer, pieces: Vec::new(), unread_bytes: 0, swapped_bytes: 0, read_bytes: 0 }
    }

    /// Reads the present pages of a range and passes them on in pieces: the address of the first byte, and the bytes.
    pub fn read(&mut self, range: Range<u64>, mut visit: impl FnMut(u64, &[u8])) {
        let window = self.buffer.len() as u64;
        let mut at = range.start;
        while at < range.end {
            let stop = ((at & !(window - 1)).saturating_add(window)).min(range.end);
            let is_over = self.pacer.is_over();
            self.pieces.clear();
            for run in self.pages.runs_for(at..stop).within(at..page_up(stop)) {
                let (start, end) = (run.start.max(at), run.end.min(stop));
                if start >= end {
                    continue;
                }
                if run.state.swapped {
                    self.swapped_bytes += end - start;
                } else if run.state.present && !run.state.zero {
                    if is_over {
                        self.unread_bytes += end - start;
                    } else {
                        self.pieces.push(Piece { addr: start, bytes: usize::try_from(end - start).unwrap_or(0) });
                    }
                }
            }
            self.take_pieces(&mut visit);
            at = stop;
        }
    }

    fn take_pieces(&mut self, visit: &mut impl FnMut(u64, &[u8])) {
        let mut rest = self.pieces.as_slice();
        while !rest.is_empty() {
            let Some(out) = self.buffer.get_mut(..rest.iter().map(|piece| piece.bytes).sum()) else { return };
            let got = self.memory.read_pieces(rest, out);
            self.pacer.read(got as u64);
            self.read_bytes += got as u64;
            let mut done = 0;
            let mut later = rest.len();
            for (number, piece) in rest.iter().enumerate() {
                let end = (done + piece.bytes).min(got);
                if let Some(bytes) = out.get(done..end).filter(|bytes| !bytes.is_empty()) {
                    visit(piece.addr, bytes);
                }
                if end - done < piece.bytes {
                    // A piece that could not be read to its end was unmapped, or belongs to a device: continue after it.
                    self.unread_bytes += (piece.bytes - (end - done)) as u64;
                    later = number + 1;
                    break;
                }
                done = end;
            }
            rest = rest.get(later..).unwrap_or_default();
        }
    }

    /// Time since the start.
    #[must_use]
    pub fn elapsed(&self) -> std::time::Duration {
        self.pacer.elapsed()
    }
}

/// Words per batch: their look-ups overlap.
const BATCH_WORDS: usize = 512;

/// log2 of a page.
const PAGE_BITS: u32 = 12;
/// Bits of the table of pages for each page in it.
const FILTER_BITS_A_PAGE: u64 = 64;
/// Pages in the table at most: 2 MiB of table.
const FILTERED_PAGES_MAX: u64 = 1 << 18;

/// Words that may be addresses within a span, with their positions.
pub struct Words {
    lowest: u64,
    span: u64,
    /// Bits of the wanted pages, by a hash of the page; empty if all are wanted.
    pages: Vec<u64>,
    /// The words.
    pub words: Vec<u64>,
    /// The address of each word.
    pub slots: Vec<u64>,
}

impl Words {
    /// For addresses in `span`.
    #[must_use]
    pub fn of(span: &Range<u64>) -> Self {
        Self { lowest: span.start, span: span.end - span.start, pages: Vec::new(), words: Vec::new(), slots: Vec::new() }
    }

    /// For addresses in `span` on pages of these ranges. Most others are rejected by a table that fits into the CPU's cache: one in a hundred
    /// passes by mistake. If the ranges have too many pages, all words within the span pass.
    #[must_use]
    pub fn on_pages_of(span: &Range<u64>, ranges: &[(u64, u64)]) -> Self {
        let pages = |&(addr, bytes): &(u64, u64)| addr >> PAGE_BITS..((addr.saturating_add(bytes.max(1)) - 1) >> PAGE_BITS) + 1;
        let count: u64 = ranges.iter().map(pages).map(|pages| pages.end - pages.start).sum();
        let mut words = Self::of(span);
        if count > FILTERED_PAGES_MAX {
            return words;
        }
        let bits = usize::try_from(count * FILTER_BITS_A_PAGE).unwrap_or(0).next_power_of_two().max(1 << 12);
        words.pages = vec![0; bits / 64];
        for page in ranges.iter().flat_map(pages) {
            let bit = words.bit_of(page);
            if let Some(word) = words.pages.get_mut(bit / 64) {
                *word |= 1 << (bit % 64);
            }
        }
        words
    }

    /// The bit of a page: the upper bits of a product with 2^64 divided by the golden ratio (Knuth, 6.4).
    #[inline]
    fn bit_of(&self, page: u64) -> usize {
        let bits = (self.pages.len() as u64 * 64).trailing_zeros();
        (page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
    }

    /// Takes the words of the bytes at `addr` that are at multiples of 8; `step` 1 takes those at every byte, as in machine code. `full` is
    /// called with each batch, which it must clear.
    #[inline]
    pub fn take(&mut self, addr: u64, bytes: &[u8], step: u64, mut full: impl FnMut(&mut Self)) {
        let skip = if step == 1 { 0 } else { (addr.wrapping_neg() & 7) as usize };
        let bytes = bytes.get(skip..).unwrap_or_default();
        let mut slot = addr + skip as u64;
        if step == 1 {
            for word in bytes.windows(8) {
                self.word(slot, word);
                slot += 1;
                if self.words.len() >= BATCH_WORDS {
                    full(self);
                }
            }
            return;
        }
        for group in bytes.chunks(8 * 64) {
            for word in group.chunks_exact(8) {
                self.word(slot, word);
                slot += 8;
            }
            if self.words.len() >= BATCH_WORDS {
                full(self);
            }
        }
    }

    #[inline]
    fn word(&mut self, slot: u64, bytes: &[u8]) {
        let word = bytes.try_into().map_or(0, u64::from_le_bytes);
        if word.wrapping_sub(self.lowest) < self.span && self.is_wanted(word) {
            self.words.push(word);
            self.slots.push(slot);
        }
    }

    #[inline]
    fn is_wanted(&self, word: u64) -> bool {
        if self.pages.is_empty() {
            return true;
        }
        let bit = self.bit_of(word >> PAGE_BITS);
        self.pages.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// Empties the batch.
    pub fn clear(&mut self) {
        self.words.clear();
        self.slots.clear();
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;
    use crate::census::Fixture;

    const BASE: u64 = 0x7f00_0000_0000;

    #[test]
    fn what_is_present_of_a_range_is_visited_once_and_in_order() {
        let mut memory = Fixture::default();
        for page in [0u64, 1, 5, 200, 201] {
            memory.write_word(BASE + page * 4096 + 8, page + 1);
        }
        let mut reader = Reader::new(&memory, Pace { window_bytes: 16 << 10, ..Pace::default() });
        let (mut seen, mut last) = (Vec::new(), 0);
        reader.read(BASE + 8..BASE + 201 * 4096 + 16, |addr, bytes| {
            assert!(addr >= last);
            last = addr + bytes.len() as u64;
            let mut words = Words::of(&(1..1000));
            words.take(addr, bytes, 8, |_| {});
            seen.extend(words.slots.iter().zip(&words.words).map(|(&slot, &word)| (slot - BASE, word)));
        });
        assert_eq!(seen, [(8, 1), (4096 + 8, 2), (5 * 4096 + 8, 6), (200 * 4096 + 8, 201), (201 * 4096 + 8, 202)]);
        assert_eq!((reader.unread_bytes, reader.read_bytes), (0, 4 * 4096 - 8 + 16));
    }

    #[test]
    fn with_a_table_of_pages_all_words_that_lie_on_them_pass_and_hardly_another() {
        let ranges: Vec<(u64, u64)> = (0..500u64).map(|number| (BASE + number * 0x10_1010, 5000)).collect();
        let mut words = Words::on_pages_of(&(BASE..BASE + (1 << 30)), &ranges);
        let mut take = |word: u64| {
            words.take(0, &word.to_le_bytes(), 8, |_| {});
            let passed = !words.words.is_empty();
            words.clear();
            passed
        };
        assert!(ranges.iter().all(|&(addr, bytes)| take(addr) && take(addr + bytes - 1)));
        let others = (0..10_000u64).filter(|number| take(BASE + number * 0x18_0000 % (1 << 30) + 0x8_8000));
        assert!(others.count() < 800);
    }

    #[test]
    fn words_are_taken_at_multiples_of_8_or_at_every_byte() {
        let mut bytes = vec![0u8; 40];
        bytes[13..21].copy_from_slice(&0x1234u64.to_le_bytes());
        let of = |addr: u64, step: u64| {
            let mut words = Words::of(&(0x1000..0x2000));
            words.take(addr, &bytes, step, |_| {});
            words.slots.iter().zip(&words.words).map(|(&slot, &word)| (slot, word)).collect::<Vec<_>>()
        };
        assert_eq!(of(0x5000, 8), []);
        assert_eq!(of(0x5003, 8), [(0x5010, 0x1234)]);
        assert_eq!(of(0x5000, 1), [(0x500d, 0x1234)]);
    }
}
