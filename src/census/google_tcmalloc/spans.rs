//! A span's fields, and which of its objects are free. Pure, given the bytes of both.
//!
//! `Span` (tcmalloc/span.h of 2024-03 to 2026-07): {next, prev, embed_count:16, freelist:16, allocated:16, cache_size:4 …, first_page …,
//! num_pages …, then the indices in `cache` (4, 8 or 12 of 16 bits each) or, in the same place, a bitmap with a bit for each free object}. A
//! sampled span has the address of its `SampledAllocation` there. Since 2026-08-11: {…, cache_size:8, …, first_page, is_large:1, sampled:1,
//! is_donated:1, small_num_pages:6 in one word, alloc_time, then `cache`, the bitmap, or num_pages and the address of the `SampledAllocation`
//! of a span that is large or sampled}. Lists are in spans of one page whose objects are smaller than the bitmap allows; an index is a distance
//! in units of 8 bytes. Free objects that do not fit into `cache` are in arrays inside free objects: the first
//! index leads to the next such object, the others are free objects too (tcmalloc/span.cc, "Freelist organization").

use std::ops::Range;

use super::super::memory::{word_at, word16_at};
use super::classes::Class;

/// Bytes of a span's record that are read.
pub const SPAN_BYTES: usize = 64;
/// Bytes of a sampled allocation's record that are read.
pub const SAMPLE_BYTES: usize = 256;
/// Longest span: 8 TiB of pages of 8 KiB.
const PAGES_MAX: u64 = 1 << 30;
/// Bits of the number of pages of a span with small objects (`kMaxNumPageBits`).
const SMALL_PAGES_BITS: u32 = 6;
/// Bits of an address (`kAddressBits`, tcmalloc/internal/config.h).
pub const ADDRESS_BITS: u32 = 48;
/// Place of the indices, the bitmap and the sampled allocation's address.
const STATE_AT: usize = 40;
/// No index (`kListEnd`).
const LIST_END: u16 = u16::MAX;
/// Bytes that an index counts (`kAlignment`).
const INDEX_UNIT: u64 = 8;
/// Words of a sampled allocation after its proxy, in which the proxy's size is.
const PROXY_WORDS: usize = 6;

/// A span's fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Number of its first page.
    pub first_page: u64,
    /// Its pages.
    pub pages: u64,
    /// Of a span without size class that was sampled, the address of its sampled allocation.
    pub sampled: u64,
}

/// Where a span's record has its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpanForm {
    /// From 2024-03 to 2026-07: their number in a word of its own.
    OwnWord,
    /// Since 2026-08-11: a small number beside the first page, a large one in place of the list of free objects.
    BesideFirstPage,
}

impl Span {
    /// The fields in a record; `None` if they cannot be a span's.
    #[must_use]
    pub fn parse(bytes: &[u8], page_bits: u32, form: SpanForm) -> Option<Self> {
        let page_id_bits = ADDRESS_BITS.checked_sub(page_bits)?;
        let small = |word: u64| word & ((1 << SMALL_PAGES_BITS) - 1);
        let (word, state) = (word_at(bytes, 24), word_at(bytes, STATE_AT));
        let first_page = word & ((1 << page_id_bits) - 1);
        let (pages, sampled) = match form {
            // Bit fields behind the number of pages: the time of the allocation since 2026-07, of small spans.
            SpanForm::OwnWord => (Some(word_at(bytes, 32)).filter(|&pages| pages < PAGES_MAX).unwrap_or(small(word_at(bytes, 32))), state),
            SpanForm::BesideFirstPage => match (word >> page_id_bits & 1 == 1, word >> page_id_bits & 2 == 2) {
                (false, false) => (small(word >> (page_id_bits + 3)), 0),
                (_, true) => (state, word_at(bytes, STATE_AT + 8)),
                (true, false) => (state, 0),
            },
        };
        let is_sound = first_page > 0 && (1..PAGES_MAX).contains(&pages) && first_page + pages <= 1 << page_id_bits;
        is_sound.then_some(Self { first_page, pages, sampled })
    }

    /// Its addresses.
    #[must_use]
    pub fn range(&self, page_bits: u32) -> Range<u64> {
        self.first_page << page_bits..(self.first_page + self.pages) << page_bits
    }
}

/// How many objects of a span are not free, as it counts them itself.
#[must_use]
pub fn allocated(record: &[u8]) -> u64 {
    word16_at(record, 20).into()
}

/// How spans of a build hold their free objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeForm {
    /// Indices in a span (`kCacheSize`); a bitmap has as many bytes.
    pub indices: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
}

impl FreeForm {
    /// Numbers of indices that builds have: until 2025-05, until 2026-07, since then.
    pub const INDICES: [u64; 3] = [4, 8, 12];

    /// Whether spans of a class have a bitmap (`UseBitmapForSize`).
    #[must_use]
    pub fn has_bitmap(self, class: &Class) -> bool {
        class.bytes >= self.page_bytes / (16 * self.indices)
    }

    /// Whether the free objects of a span cannot be told from its record alone.
    #[must_use]
    pub fn needs_objects(self, record: &[u8], class: &Class) -> bool {
        !self.has_bitmap(class) && word16_at(record, 18) != LIST_END
    }

    /// Which objects of a span are free, by their order. `objects`: its memory, if [`needs_objects`](Self::needs_objects). `None` if the span
    /// contradicts itself: it is being changed, or this is not its form.
    #[must_use]
    pub fn free(self, record: &[u8], class: &Class, objects: &[u8]) -> Option<Vec<bool>> {
        let mut free = vec![false; usize::try_from(class.objects).ok()?];
        if class.objects == 1 {
            // The central free list hands such spans out and takes them back whole, and does not count in them.
            return Some(free);
        }
        let count =
            if self.has_bitmap(class) { self.by_bitmap(record, &mut free)? } else { self.by_list(record, class, objects, &mut free)? };
        (count + allocated(record) == class.objects).then_some(free)
    }

    fn by_bitmap(self, record: &[u8], free: &mut [bool]) -> Option<u64> {
        let mut count = 0;
        for bit in 0..16 * self.indices as usize {
            if word_at(record, STATE_AT + bit / 64 * 8) >> (bit % 64) & 1 == 1 {
                *free.get_mut(bit)? = true;
                count += 1;
            }
        }
        Some(count)
    }

    fn by_list(self, record: &[u8], class: &Class, objects: &[u8], free: &mut [bool]) -> Option<u64> {
        let mut count = 0;
        let mut mark = |index: u16| -> Option<usize> {
            let at = u64::from(index) * INDEX_UNIT;
            let slot =
                free.get_mut(usize::try_from(at / class.bytes).ok()?).filter(|is_free| at.is_multiple_of(class.bytes) && !**is_free)?;
            *slot = true;
            count += 1;
            usize::try_from(at).ok()
        };
        // Four bits, or eight of which four are used.
        let cached = usize::from(record.get(22)? & 0xf);
        if cached as u64 > self.indices {
            return None;
        }
        for place in 0..cached {
            mark(word16_at(record, STATE_AT + 2 * place))?;
        }
        let (mut host, mut embedded) = (word16_at(record, 18), usize::from(word16_at(record, 16)));
        let embedded_max = usize::try_from(class.bytes / 2).ok()?.checked_sub(1)?;
        while host != LIST_END {
            let at = mark(host)?;
            if embedded > embedded_max {
                return None;
            }
            for place in 1..=embedded {
                mark(word16_at(objects, at + 2 * place))?;
            }
            (host, embedded) = (word16_at(objects, at), embedded_max);
        }
        Some(count)
    }
}

/// The proxy of a sampled allocation: a block that the sampler holds in place of the sampled one, so that statistics of spans stay the same
/// (`StackTrace::proxy`, tcmalloc/internal/logging.h). It is followed by its size. `size_at`: the bytes of the block that begins at an address.
#[must_use]
pub fn proxy(record: &[u8], size_at: impl Fn(u64) -> Option<u64>) -> Option<u64> {
    let words: Vec<u64> = record.chunks_exact(8).map(|word| word_at(word, 0)).collect();
    let mut windows = words.windows(PROXY_WORDS);
    windows.find_map(|window| {
        let (block, rest) = window.split_first()?;
        let bytes = size_at(*block)?;
        rest.contains(&bytes).then_some(*block)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    const FORM: FreeForm = FreeForm { indices: 8, page_bytes: 8192 };
    const LARGE: Class = Class { bytes: 1024, objects: 8, pages: 1 };
    const SMALL: Class = Class { bytes: 16, objects: 512, pages: 1 };

    fn record(allocated: u16, freelist: u16, embedded: u16, cache: &[u16]) -> Vec<u8> {
        let mut record = vec![0u8; SPAN_BYTES];
        for (at, value) in [(16, embedded), (18, freelist), (20, allocated), (22, cache.len() as u16)] {
            record[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        for (place, index) in cache.iter().enumerate() {
            record[STATE_AT + 2 * place..STATE_AT + 2 * place + 2].copy_from_slice(&index.to_le_bytes());
        }
        record
    }

    fn indices(free: &[bool]) -> Vec<usize> {
        (0..free.len()).filter(|&index| free[index]).collect()
    }

    #[test]
    fn pages_are_in_a_word_of_their_own_or_beside_the_first_page() {
        let span = |words: [u64; 4], page_bits, form| {
            let mut record = vec![0u8; SPAN_BYTES];
            record[24..56].copy_from_slice(&words.map(u64::to_le_bytes).concat());
            Span::parse(&record, page_bits, form).map(|span| (span.first_page, span.pages, span.sampled))
        };
        let (own, beside) = (SpanForm::OwnWord, SpanForm::BesideFirstPage);
        assert_eq!(span([0x1234, 3, 0, 0], 13, own), Some((0x1234, 3, 0)));
        assert_eq!(span([0x1234, 3 | 99 << 40, 0, 0], 13, own), Some((0x1234, 3, 0)), "with the time of the allocation");
        for page_bits in [13, 15, 18] {
            let flags = |bits: u64| 0x1234 | bits << (48 - page_bits);
            assert_eq!(span([flags(5 << 3), 99, 7, 8], page_bits, beside), Some((0x1234, 5, 0)), "a list in its state");
            assert_eq!(span([flags(1 | 4), 0, 500, 8], page_bits, beside), Some((0x1234, 500, 0)), "large, donated");
            assert_eq!(span([flags(2 | 5 << 3), 0, 1, 0x7000], page_bits, beside), Some((0x1234, 1, 0x7000)), "sampled");
            assert_eq!(span([flags(0), 1, 1, 1], page_bits, beside), None);
            assert_eq!(span([flags(1), 1, 1 << 40, 1], page_bits, beside), None);
        }
    }

    #[test]
    fn a_bitmap_names_the_free_objects() {
        let mut with_bitmap = record(6, LIST_END, 0, &[]);
        with_bitmap[STATE_AT] = 0b1000_0010;
        assert_eq!(indices(&FORM.free(&with_bitmap, &LARGE, &[]).unwrap()), [1, 7]);
        assert_eq!(FORM.free(&record(6, LIST_END, 0, &[]), &LARGE, &[]), None, "none is free, but two should be");
        with_bitmap[STATE_AT + 1] = 1;
        assert_eq!(FORM.free(&with_bitmap, &LARGE, &[]), None, "an object that is none");
    }

    #[test]
    fn the_only_object_of_a_span_is_in_use() {
        let only = Class { bytes: 8192, objects: 1, pages: 1 };
        assert_eq!(FORM.free(&record(0, 0, 0, &[]), &only, &[]), Some(vec![false]));
    }

    #[test]
    fn indices_in_the_span_and_in_free_objects_name_the_free_objects() {
        let mut objects = vec![0u8; 8192];
        // The first host is object 20, with objects 30 and 31 in it; the next is object 40, full with seven.
        for (at, index) in [(320, 80u16), (322, 60), (324, 62), (640, LIST_END)] {
            objects[at..at + 2].copy_from_slice(&index.to_le_bytes());
        }
        for place in 1..8u16 {
            let at = 640 + 2 * usize::from(place);
            objects[at..at + 2].copy_from_slice(&(200 + 2 * place).to_le_bytes());
        }
        let record = record(512 - 13, 40, 2, &[0, 6]);
        assert!(FORM.needs_objects(&record, &SMALL));
        let free = FORM.free(&record, &SMALL, &objects).unwrap();
        assert_eq!(indices(&free), [0, 3, 20, 30, 31, 40, 101, 102, 103, 104, 105, 106, 107]);
    }

    #[test]
    fn a_list_that_contradicts_itself_has_no_free_objects() {
        let objects = vec![0u8; 8192];
        assert_eq!(FORM.free(&record(511, LIST_END, 0, &[1]), &SMALL, &objects), None, "between two objects");
        assert_eq!(FORM.free(&record(510, LIST_END, 0, &[2, 2]), &SMALL, &objects), None, "free twice");
        assert_eq!(FORM.free(&record(511, 0, 0, &[]), &SMALL, &objects), None, "a ring");
        assert_eq!(FORM.free(&record(512, 0, 9, &[]), &SMALL, &objects), None, "more indices than fit into an object");
        assert_eq!(FORM.free(&record(512, 2000, 0, &[]), &SMALL, &objects), None, "beyond the span");
    }

    #[test]
    fn a_proxy_is_followed_by_its_size() {
        let mut record = vec![0u8; SAMPLE_BYTES];
        for (at, word) in [(24, 0x5000u64), (40, 0x7000), (48, 100), (64, 112)] {
            record[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        assert_eq!(proxy(&record, |addr| [0x5000, 0x7000].contains(&addr).then_some(112)), Some(0x5000));
        assert_eq!(proxy(&record, |addr| (addr == 0x7000).then_some(112)), Some(0x7000));
        assert_eq!(proxy(&record, |addr| (addr == 0x7000).then_some(128)), None);
    }
}
