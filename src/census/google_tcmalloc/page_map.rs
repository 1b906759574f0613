//! The page map, by which every span is found.
//!
//! `PageMap2` (tcmalloc/pagemap.h of 2024-03 to 2026-08-11) has a root of 2^(48 − page bits − 15) words in the library's bss, each the address
//! of a leaf for 2^15 pages. `PageMap3`, since then, has nodes between them: leaves and nodes have a third of the page number's bits each,
//! rounded up, and the root the rest. A leaf is {`sizeclass`: a byte or two for each page, `span_and_sizeclass`: a word for each page, `hugepage`: …}. The word is
//! the address of the page's `Span`; since 2025-02 its upper 16 bits are the size class again. The class of a page is set while its span
//! holds small objects, and cleared before the span is deleted. The word of a span's first page is cleared with the span, those of its other
//! pages may be old: a span is one if the word of its first page leads to it.

use std::ops::Range;

use super::super::memory::{Memory, is_user_address, word_at, word16_at};
use super::super::objects::{ObjectData, read_present};
use super::super::radix::{self, Roots, Shape, read_records};
use super::super::reader::Sight;
use super::spans::{ADDRESS_BITS, SPAN_BYTES, Span, SpanForm};

/// Forms that builds have, the likeliest first.
const BUILDS: [Build; 12] = [
    Build::new(13, 1, Levels::Two),
    Build::new(15, 1, Levels::Two),
    Build::new(18, 1, Levels::Two),
    Build::new(13, 1, Levels::Three),
    Build::new(15, 1, Levels::Three),
    Build::new(18, 1, Levels::Three),
    Build::new(13, 2, Levels::Two),
    Build::new(15, 2, Levels::Two),
    Build::new(18, 2, Levels::Two),
    Build::new(13, 2, Levels::Three),
    Build::new(15, 2, Levels::Three),
    Build::new(18, 2, Levels::Three),
];
/// Leaves and nodes read: 1 TiB of pages of 8 KiB in leaves of 2^12.
const LEAVES_MAX: usize = 1 << 15;
const NODES_MAX: usize = 64;
/// Bytes of the library's data in releases with three levels, at least: their page allocators alone have more.
const OBJECT_BYTES_MIN: u64 = 1 << 20;
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
    build: Build,
}

/// Form of a page map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Build {
    /// log2 of the page's bytes (`TCMALLOC_INTERNAL_8K_PAGES` and others, tcmalloc/common.h).
    page_bits: u32,
    /// Bytes of a size class in a leaf (`CompactSizeClass`): two in builds with more than 256 classes.
    class_bytes: u32,
    levels: Levels,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Levels {
    /// `PageMap2`.
    Two,
    /// `PageMap3`.
    Three,
}

impl Build {
    const fn new(page_bits: u32, class_bytes: u32, levels: Levels) -> Self {
        Self { page_bits, class_bytes, levels }
    }

    const fn shape(self) -> Shape {
        let page_id_bits = ADDRESS_BITS - self.page_bits;
        let (node_bits, leaf_bits, filled_max, object_bytes_min) = match self.levels {
            Levels::Two => (0, 15, 2048, 0),
            // A node stands for 128 GiB and more.
            Levels::Three => (page_id_bits.div_ceil(3), page_id_bits.div_ceil(3), NODES_MAX as u32, OBJECT_BYTES_MIN),
        };
        Shape {
            root_words: 1 << (page_id_bits - node_bits - leaf_bits),
            node_bits,
            leaf_bits,
            entry_words: 1,
            leaf_offset: (self.class_bytes as u64) << leaf_bits,
            page_bits: self.page_bits,
            alignment: 8,
            filled_max,
            object_bytes_min,
        }
    }

    /// Words of the tables that lead to the leaves, and how many of what they lead to is read.
    fn tables(self) -> impl Iterator<Item = (u64, usize)> {
        let shape = self.shape();
        let nodes = (shape.node_bits > 0).then_some((shape.root_words, NODES_MAX));
        let last = if shape.node_bits > 0 { 1 << shape.node_bits } else { shape.root_words };
        nodes.into_iter().chain([(last, LEAVES_MAX)])
    }

    fn span(self, record: &[u8]) -> Option<Span> {
        Span::parse(record, self.page_bits, self.spans())
    }

    /// The form of spans in releases with such a page map.
    const fn spans(self) -> SpanForm {
        match self.levels {
            Levels::Two => SpanForm::OwnWord,
            Levels::Three => SpanForm::BesideFirstPage,
        }
    }
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

/// The address in a word of the page map; `None` if it has none.
fn span_in(word: u64) -> Option<u64> {
    let addr = word & ((1 << ADDRESS_BITS) - 1);
    (is_user_address(addr) && addr.is_multiple_of(8)).then_some(addr)
}

/// The numbers and addresses of the nodes or leaves that a table leads to. `index`: the table's own number among those of its level.
fn children(memory: &dyn Memory, index: u64, table: u64, words: u64) -> Vec<(u64, u64)> {
    let bytes = read_present(memory, table..table.saturating_add(8 * words));
    let numbered = (index * words..).zip(bytes.chunks_exact(8).map(|word| word_at(word, 0)));
    numbered.filter(|(_, child)| is_user_address(*child)).collect()
}

/// Finds the page maps of each build that fits, the likeliest first: there may be false ones, of other allocators.
pub fn find<'a>(sight: &'a Sight<'_>, roots: &'a mut RootsByBuild) -> impl Iterator<Item = PageMap> + 'a {
    BUILDS.into_iter().zip(roots).filter_map(|(build, roots)| {
        let owns = |entry: radix::Entry, addr: u64| {
            let span = span_in(entry.first).and_then(|span| build.span(&sight.memory.bytes(span, SPAN_BYTES)?));
            span.is_some_and(|span| span.range(build.page_bits).contains(&addr))
        };
        let found = radix::find(sight.memory, sight.maps, sight.objects, build.shape(), roots, owns)?;
        Some(PageMap { page_bits: build.page_bits, object: found.object, root: found.root, build })
    })
}

impl PageMap {
    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        1 << self.page_bits
    }

    /// The span in a record.
    #[must_use]
    pub fn span(&self, record: &[u8]) -> Option<Span> {
        self.build.span(record)
    }

    /// Reads all spans.
    #[must_use]
    pub fn entries(&self, memory: &dyn Memory) -> Entries {
        let shape = self.build.shape();
        let mut found = Entries::default();
        let mut leaves = vec![(0, self.root)];
        for (words, most) in self.build.tables() {
            let all: Vec<(u64, u64)> = leaves.iter().flat_map(|&(index, table)| children(memory, index, table, words)).collect();
            found.left_out += all.len().saturating_sub(most) as u64;
            leaves = all.into_iter().take(most).collect();
        }
        for (index, leaf) in leaves {
            self.add_leaf(memory, index, leaf, 0..1 << shape.leaf_bits, &mut found);
        }
        found.without_overlaps()
    }

    /// Reads the spans that begin in a range of pages.
    #[must_use]
    pub fn entries_in(&self, memory: &dyn Memory, range: Range<u64>) -> Entries {
        let mut found = Entries::default();
        let leaf_bits = self.build.shape().leaf_bits;
        let (first, end) = (range.start >> self.page_bits, range.end >> self.page_bits);
        for index in first >> leaf_bits..end.div_ceil(1 << leaf_bits) {
            let of_leaf = |page: u64| page.saturating_sub(index << leaf_bits).min(1 << leaf_bits);
            if let Some(leaf) = self.leaf(memory, index) {
                self.add_leaf(memory, index, leaf, of_leaf(first)..of_leaf(end), &mut found);
            }
        }
        found.without_overlaps()
    }

    /// The span that has a page.
    #[must_use]
    pub fn span_at(&self, memory: &dyn Memory, addr: u64) -> Option<Range<u64>> {
        let shape = self.build.shape();
        let word_of = |page: u64| span_in(radix::lookup(memory, self.root, shape, page << self.page_bits)?.first);
        let span = word_of(addr >> self.page_bits)?;
        let fields = self.span(&memory.bytes(span, SPAN_BYTES)?)?;
        let range = fields.range(self.page_bits);
        // The word of the page may be old, that of the span's first page is not.
        (range.contains(&addr) && word_of(fields.first_page) == Some(span)).then_some(range)
    }

    /// If an address has no leaf, and so no span, the end of the addresses that the leaf would stand for.
    #[must_use]
    pub fn without_leaf(&self, memory: &dyn Memory, addr: u64) -> Option<u64> {
        let reach_bits = self.build.shape().leaf_reach_bits();
        let index = addr >> reach_bits;
        self.leaf(memory, index).is_none().then_some((index + 1) << reach_bits)
    }

    fn leaf(&self, memory: &dyn Memory, index: u64) -> Option<u64> {
        let shape = self.build.shape();
        let child = |table: u64, slot: u64| memory.word(table.checked_add(8 * slot)?).filter(|&child| is_user_address(child));
        let slot = index >> shape.node_bits;
        let first = (slot < shape.root_words).then(|| child(self.root, slot))??;
        if shape.node_bits == 0 { Some(first) } else { child(first, index & ((1 << shape.node_bits) - 1)) }
    }

    /// Adds the spans that begin at these pages of a leaf.
    fn add_leaf(&self, memory: &dyn Memory, index: u64, leaf: u64, slots: Range<u64>, found: &mut Entries) {
        let leaf_bits = self.build.shape().leaf_bits;
        let (pages, class_bytes) = (1u64 << leaf_bits, u64::from(self.build.class_bytes));
        if leaf.checked_add(pages * (class_bytes + 8)).is_none() || slots.is_empty() {
            return;
        }
        let first_page = index << leaf_bits;
        found.covered.push(first_page << self.page_bits..(first_page + pages) << self.page_bits);
        let part = |offset: u64, bytes: u64| read_present(memory, leaf + offset + bytes * slots.start..leaf + offset + bytes * slots.end);
        let (classes, words) = (part(0, class_bytes), part(pages * class_bytes, 8));
        let mut addrs: Vec<u64> = words.chunks_exact(8).filter_map(|word| span_in(word_at(word, 0))).collect();
        addrs.sort_unstable();
        addrs.dedup();
        read_records(memory, &addrs, SPAN_BYTES, |addr, bytes| {
            let Some(span) = bytes.and_then(|bytes| self.span(bytes)) else { return };
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
