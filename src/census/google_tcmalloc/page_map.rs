//! The page map, by which every span is found.
//!
//! `PageMap2` (tcmalloc/pagemap.h of 2024-03 to 2026-07) has a root of 2^(48 − page bits − 15) words in the library's bss, each the address of
//! a leaf for 2^15 pages: {`sizeclass`: a byte or two for each page, `span_and_sizeclass`: a word for each page, `hugepage`: …}. The word is
//! the address of the page's `Span`; since 2025-02 its upper 16 bits are the size class again. The class of a page is set while its span
//! holds small objects, and cleared before the span is deleted. The word of a span's first page is cleared with the span, those of its other
//! pages may be old: a span is one if the word of its first page leads to it.

use std::ops::Range;

use super::super::memory::{Memory, is_user_address, word_at, word16_at};
use super::super::objects::{ObjectData, read_present};
use super::super::radix::{self, Roots, Shape, read_records};
use super::super::reader::Sight;
use super::spans::{SPAN_BYTES, Span};

/// log2 of the pages of a leaf (`kLeafBits`).
const LEAF_BITS: u32 = 15;
/// log2 of the page's bytes that builds have (`TCMALLOC_INTERNAL_8K_PAGES` and others, tcmalloc/common.h), and the bytes of a size class in a
/// leaf (`CompactSizeClass`): two in builds with more than 256 classes.
const BUILDS: [(u32, u32); 6] = [(13, 1), (15, 1), (18, 1), (13, 2), (15, 2), (18, 2)];
/// Bits of an address (`kAddressBits`, tcmalloc/internal/config.h).
const ADDRESS_BITS: u32 = 48;
/// Leaves read: 1 TiB of pages of 8 KiB.
const LEAVES_MAX: usize = 4096;
/// Spans of a process: 32 GiB of single pages of 8 KiB, at 32 bytes each here.
const SPANS_MAX: usize = 1 << 22;

/// Roots found before, for each of the builds.
pub type RootsByBuild = [Roots; BUILDS.len()];

/// The page map of a process.
#[derive(Debug, Clone)]
pub struct PageMap {
    /// log2 of the page's bytes.
    pub page_bits: u32,
    /// The object with the root.
    pub object: ObjectData,
    root: u64,
    class_bytes: u64,
}

/// A span, by its entry in the page map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Its first address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Address of its `Span`.
    pub span: u64,
    /// The size class of its objects; 0 if it is one object, large or sampled.
    pub class: u16,
}

/// What the page map leads to.
#[derive(Debug, Default)]
pub struct Entries {
    /// The spans by address, without overlaps.
    pub list: Vec<Entry>,
    /// The addresses that its leaves stand for, by address.
    pub covered: Vec<Range<u64>>,
    /// Spans and leaves left out because there were too many.
    pub left_out: u64,
    /// Spans that overlap others: they were deleted or made meanwhile.
    pub torn: u64,
}

impl Entries {
    /// The span that an address is in.
    #[must_use]
    pub fn of(&self, addr: u64) -> Option<&Entry> {
        let after = self.list.partition_point(|entry| entry.start <= addr);
        self.list.get(after.checked_sub(1)?).filter(|entry| addr < entry.end)
    }

    fn without_overlaps(mut self) -> Self {
        self.list.sort_unstable_by_key(|entry| entry.start);
        let (before, mut end) = (self.list.len(), 0);
        self.list.retain(|entry| {
            let follows = entry.start >= end;
            end = if follows { entry.end } else { end };
            follows
        });
        self.torn += (before - self.list.len()) as u64;
        self
    }
}

fn shape((page_bits, class_bytes): (u32, u32)) -> Shape {
    Shape {
        root_words: 1 << (ADDRESS_BITS - page_bits - LEAF_BITS),
        node_bits: 0,
        leaf_bits: LEAF_BITS,
        entry_words: 1,
        leaf_offset: u64::from(class_bytes) << LEAF_BITS,
        page_bits,
        alignment: 8,
        filled_max: 2048,
    }
}

/// The address in a word of the page map; `None` if it has none.
fn span_in(word: u64) -> Option<u64> {
    let addr = word & ((1 << ADDRESS_BITS) - 1);
    (is_user_address(addr) && addr.is_multiple_of(8)).then_some(addr)
}

/// Finds the page maps of each build that fits, the likeliest first: there may be false ones, of other allocators.
pub fn find<'a>(sight: &'a Sight<'_>, roots: &'a mut RootsByBuild) -> impl Iterator<Item = PageMap> + 'a {
    BUILDS.into_iter().zip(roots).filter_map(|(build, roots)| {
        let (page_bits, class_bytes) = build;
        let owns = |entry: radix::Entry, addr: u64| {
            let span = span_in(entry.first).and_then(|span| Span::parse(&sight.memory.bytes(span, SPAN_BYTES)?, page_bits));
            span.is_some_and(|span| span.range(page_bits).contains(&addr))
        };
        let found = radix::find(sight.memory, sight.maps, sight.objects, shape(build), roots, owns)?;
        Some(PageMap { page_bits, object: found.object, root: found.root, class_bytes: u64::from(class_bytes) })
    })
}

impl PageMap {
    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        1 << self.page_bits
    }

    /// Reads all spans.
    #[must_use]
    pub fn entries(&self, memory: &dyn Memory) -> Entries {
        let root_bytes = 8 << (ADDRESS_BITS - self.page_bits - LEAF_BITS);
        let root = read_present(memory, self.root..self.root.saturating_add(root_bytes));
        let leaves: Vec<(u64, u64)> =
            (0u64..).zip(root.chunks_exact(8).map(|word| word_at(word, 0))).filter(|(_, leaf)| is_user_address(*leaf)).collect();
        let mut found = Entries { left_out: leaves.len().saturating_sub(LEAVES_MAX) as u64, ..Entries::default() };
        for (index, leaf) in leaves.into_iter().take(LEAVES_MAX) {
            self.add_leaf(memory, index, leaf, 0..1 << LEAF_BITS, &mut found);
        }
        found.without_overlaps()
    }

    /// Reads the spans that begin in a range of pages.
    #[must_use]
    pub fn entries_in(&self, memory: &dyn Memory, range: Range<u64>) -> Entries {
        let mut found = Entries::default();
        let (first, end) = (range.start >> self.page_bits, range.end >> self.page_bits);
        for index in first >> LEAF_BITS..end.div_ceil(1 << LEAF_BITS) {
            let of_leaf = |page: u64| page.saturating_sub(index << LEAF_BITS).min(1 << LEAF_BITS);
            if let Some(leaf) = self.leaf(memory, index) {
                self.add_leaf(memory, index, leaf, of_leaf(first)..of_leaf(end), &mut found);
            }
        }
        found.without_overlaps()
    }

    /// The span that has a page.
    #[must_use]
    pub fn span_at(&self, memory: &dyn Memory, addr: u64) -> Option<Range<u64>> {
        let word_of = |page: u64| {
            let words = self.leaf(memory, page >> LEAF_BITS)?.checked_add(self.class_bytes << LEAF_BITS)?;
            span_in(memory.word(words.checked_add(8 * (page & ((1 << LEAF_BITS) - 1)))?)?)
        };
        let span = word_of(addr >> self.page_bits)?;
        let fields = Span::parse(&memory.bytes(span, SPAN_BYTES)?, self.page_bits)?;
        let range = fields.range(self.page_bits);
        // The word of the page may be old, that of the span's first page is not.
        (range.contains(&addr) && word_of(fields.first_page) == Some(span)).then_some(range)
    }

    /// If an address has no leaf, and so no span, the end of the addresses that the leaf would stand for.
    #[must_use]
    pub fn without_leaf(&self, memory: &dyn Memory, addr: u64) -> Option<u64> {
        let index = addr >> (self.page_bits + LEAF_BITS);
        self.leaf(memory, index).is_none().then_some((index + 1) << (self.page_bits + LEAF_BITS))
    }

    fn leaf(&self, memory: &dyn Memory, index: u64) -> Option<u64> {
        memory.word(self.root.checked_add(8 * index)?).filter(|&leaf| is_user_address(leaf))
    }

    /// Adds the spans that begin at these pages of a leaf.
    fn add_leaf(&self, memory: &dyn Memory, index: u64, leaf: u64, slots: Range<u64>, found: &mut Entries) {
        let (pages, class_bytes) = (1u64 << LEAF_BITS, self.class_bytes);
        if leaf.checked_add(pages * (class_bytes + 8)).is_none() || slots.is_empty() {
            return;
        }
        let first_page = index << LEAF_BITS;
        found.covered.push(first_page << self.page_bits..(first_page + pages) << self.page_bits);
        let part = |offset: u64, bytes: u64| read_present(memory, leaf + offset + bytes * slots.start..leaf + offset + bytes * slots.end);
        let (classes, words) = (part(0, class_bytes), part(pages * class_bytes, 8));
        let mut addrs: Vec<u64> = words.chunks_exact(8).filter_map(|word| span_in(word_at(word, 0))).collect();
        addrs.sort_unstable();
        addrs.dedup();
        read_records(memory, &addrs, SPAN_BYTES, |addr, bytes| {
            let Some(span) = bytes.and_then(|bytes| Span::parse(bytes, self.page_bits)) else { return };
            let Some(slot) = span.first_page.checked_sub(first_page).filter(|slot| slots.contains(slot)) else { return };
            let slot = (slot - slots.start) as usize;
            if span_in(word_at(&words, 8 * slot)) != Some(addr) {
                return;
            }
            if found.list.len() >= SPANS_MAX {
                found.left_out += 1;
                return;
            }
            let class = match class_bytes {
                1 => classes.get(slot).copied().unwrap_or(0).into(),
                _ => word16_at(&classes, 2 * slot),
            };
            let Range { start, end } = span.range(self.page_bits);
            found.list.push(Entry { start, end, span: addr, class });
        });
    }
}
