//! Segments and their pages, found by form.
//!
//! `struct mi_segment_s` (include/mimalloc-types.h of 2.0, include/mimalloc/types.h of 2.1 to 2.4) begins at a multiple of 32 MiB. Its first
//! fields differ from release to release; its last ones are {…, cookie, [abandoned_os_next, abandoned_os_prev], segment_slices,
//! segment_info_slices, kind, slice_entries, thread_id, slices[513]} in all of them. A slice has 64 KiB; `struct mi_page_s` is the entry of
//! its first slice, and has how many slices it is long, so that the entries form a chain from the first slice to the last. Entry 0 is
//! that of the segment's own slices. The chain decides about the layout: its entries have 80 bytes until 2.1.2, 96 since 2.1.4. The
//! cookie is the segment's address XOR a number of the process.

use std::ops::Range;

use super::super::memory::{Memory, Piece, is_user_address, word_at, word16_at, word32_at};
use super::arenas;

/// Alignment of segments, and the bytes of a normal one.
pub const SEGMENT_BYTES: u64 = 32 << 20;
/// Bytes of a slice.
pub const SLICE_BYTES: u64 = 64 << 10;
/// Slices of a normal segment.
const SLICES: u64 = SEGMENT_BYTES / SLICE_BYTES;
/// Where the entries may begin.
const ENTRIES_AT: Range<usize> = 200..400;
/// Bytes read of a segment: its fields and entries.
const HEADER_BYTES: usize = 400 + 513 * 96;
/// Slices of a segment's own data: its entries take one, guard pages of secure builds more.
const INFO_SLICES_MAX: u64 = 8;
/// Slices of a huge segment: 8 TiB.
const SLICES_MAX: u64 = 1 << 27;
/// Segments of a process: 256 GiB.
pub const SEGMENTS_MAX: usize = 8192;

/// How the entries are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PageForm {
    /// Until 2.1.2: 80 bytes, sizes of 32 bits, the start of the blocks follows from their size.
    Early,
    /// Since 2.1.4: 96 bytes.
    Late,
    /// 3.0 to 3.3: 120 bytes, with the address of the first block ([`super::arenas`]).
    Pointer,
    /// Since 3.4: 112 bytes, with the distance of the first block from the entry.
    Offset,
}

/// The layout of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Form {
    /// Distance of the entries from the segment's start.
    entries_at: usize,
    /// Their form.
    pub pages: PageForm,
}

impl PageForm {
    /// Those in segments.
    const IN_SEGMENTS: [Self; 2] = [Self::Late, Self::Early];
    /// Those that a page map leads to.
    pub const MAPPED: [Self; 2] = [Self::Pointer, Self::Offset];

    /// Bytes of an entry.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Early => 80,
            Self::Late => 96,
            Self::Pointer => 120,
            Self::Offset => 112,
        }
    }

    /// Releases with it.
    #[must_use]
    pub fn releases(self) -> &'static str {
        match self {
            Self::Early => "2.x until 2.1.2",
            Self::Late => "2.1.4 or later 2.x",
            Self::Pointer => "3.0 to 3.3",
            Self::Offset => "3.4 or later 3.x",
        }
    }

    /// Whether its pages lie in segments. They are returned to the system as soon as all their pages are free; arenas are kept.
    #[must_use]
    pub fn is_in_segments(self) -> bool {
        Self::IN_SEGMENTS.contains(&self)
    }

    /// Whether `mi_collect(true)` returns free slices of segments that a thread uses, or of arenas; until 2.1.2 only time does
    /// (`mi_heap_collect_ex`, src/heap.c, and `mi_segment_delayed_decommit`, src/segment.c).
    #[must_use]
    pub fn collects(self) -> bool {
        self != Self::Early
    }

    /// Where a heap (`struct mi_heap_s`) has the list of blocks that other threads freed; `None` = all are in the pages' lists.
    #[must_use]
    pub fn delayed_at(self) -> Option<u64> {
        match self {
            // tld, pages_free_direct[129], pages[75].
            Self::Early => Some(8 + 129 * 8 + 75 * 24),
            Self::Late => Some(8),
            Self::Pointer | Self::Offset => None,
        }
    }
}

/// A page: slices with blocks of one size, or without any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Address of its entry.
    pub entry: u64,
    /// Address of its first slice.
    pub addr: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes of a block; 0 if the slices have none.
    pub block_bytes: u64,
    /// The first block, if the entry has it.
    pub start: Option<u64>,
    /// Blocks that were handed out at least once, or could be next.
    pub capacity: u64,
    /// Blocks in use, with those that other threads freed.
    pub used: u64,
    /// First blocks of the lists `free` and `local_free`.
    pub free: [u64; 2],
    /// First block of `xthread_free`: freed by other threads.
    pub thread_free: u64,
    /// The heap that owns it; 0 if it is abandoned, or all its blocks are in its own lists.
    pub heap: u64,
    /// What is in slices without blocks.
    pub gap: Gap,
}

/// What is in slices without blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    /// Nothing: they are free.
    Free,
    /// mimalloc's own data.
    Metadata,
    /// A page whose entry was not in order.
    Unknown,
}

impl Page {
    /// Slices without blocks.
    #[must_use]
    pub fn without_blocks(addr: u64, bytes: u64) -> Self {
        let none = [0; 2];
        Self {
            entry: 0,
            addr,
            bytes,
            block_bytes: 0,
            start: None,
            capacity: 0,
            used: 0,
            free: none,
            thread_free: 0,
            heap: 0,
            gap: Gap::Free,
        }
    }

    /// Its slices.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.addr..self.addr.saturating_add(self.bytes)
    }

    /// The same page as its entry is now; `None` if it became another.
    #[must_use]
    pub fn again(&self, memory: &dyn Memory, form: PageForm) -> Option<Self> {
        let entry = memory.bytes(self.entry, form.bytes())?;
        let page = match form.is_in_segments() {
            true => Self::parse(&entry, form, (self.entry, self.addr))?,
            false => arenas::parse_page(&entry, form, self.entry).filter(|page| page.addr == self.addr)?,
        };
        (page.bytes == self.bytes && page.block_bytes == self.block_bytes && page.start == self.start).then_some(page)
    }

    fn parse(entry: &[u8], form: PageForm, (entry_addr, addr): (u64, u64)) -> Option<Self> {
        let slices = u64::from(word32_at(entry, 0));
        if slices == 0 || slices > SLICES_MAX || word32_at(entry, 4) != 0 {
            return None;
        }
        let word = |at: usize| word_at(entry, at);
        let (block_bytes, used, local, thread, heap, start) = match form {
            PageForm::Early => (u64::from(word32_at(entry, 28)), u64::from(word32_at(entry, 24)), word(32), word(40), word(48), None),
            _ => (word(40), u64::from(word16_at(entry, 32)), word(24), word(56), word(64), Some(word(48))),
        };
        let bytes = slices * SLICE_BYTES;
        // A block of 2 GiB and more has the size of its page.
        let block_bytes = if form == PageForm::Early && block_bytes == 2 << 30 { bytes } else { block_bytes };
        let capacity = u64::from(word16_at(entry, 10));
        let start = start.filter(|_| block_bytes > 0);
        let is_sound = block_bytes <= bytes
            && used <= capacity
            && capacity <= u64::from(word16_at(entry, 12))
            && start.is_none_or(|start| (addr..addr.saturating_add(bytes)).contains(&start));
        let page = Self {
            entry: entry_addr,
            addr,
            bytes,
            block_bytes,
            start,
            capacity,
            used,
            free: [word(16), local],
            thread_free: thread & !3,
            heap,
            gap: Gap::Free,
        };
        // What is left in the entry of free slices says nothing.
        (block_bytes == 0 || is_sound).then_some(page)
    }
}

/// A segment; of 3.x an arena, or a mapping with one page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Its address space.
    pub range: Range<u64>,
    /// Bytes of its own data.
    pub info_bytes: u64,
    /// Whether its thread has ended.
    pub is_abandoned: bool,
    /// Its pages and free slices by address, without its own data.
    pub pages: Vec<Page>,
}

/// A segment's header, as far as it decides about the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// The layout.
    pub form: Form,
    /// What the cookie is XORed with.
    pub key: u64,
}

/// Reads the segment at an address in every layout that fits; usually one. `is_mapped`: whether a range can be its.
#[must_use]
pub fn read(memory: &dyn Memory, addr: u64, is_mapped: impl Fn(&Range<u64>) -> bool) -> Vec<(Identity, Segment)> {
    // Most of what lies at such addresses is no segment, which its first bytes show.
    let fields = present(memory, addr, ENTRIES_AT.end);
    let places: Vec<usize> = ENTRIES_AT.step_by(8).filter(|&entries_at| Fields::parse(&fields, entries_at).is_some()).collect();
    if places.is_empty() {
        return Vec::new();
    }
    let bytes = present(memory, addr, HEADER_BYTES);
    let forms = places.into_iter().flat_map(|entries_at| PageForm::IN_SEGMENTS.map(|pages| Form { entries_at, pages }));
    forms.filter_map(|form| parse(&bytes, addr, form).filter(|(_, segment)| is_mapped(&segment.range))).collect()
}

/// The last fields before the entries.
struct Fields {
    slices: u64,
    info: u64,
    entries: u64,
    thread: u64,
}

impl Fields {
    fn parse(bytes: &[u8], entries_at: usize) -> Option<Self> {
        let field = |before: usize| word_at(bytes, entries_at - 8 * before);
        let [slices, info, kind, entries, thread] = [field(5), field(4), field(3) & 0xffff_ffff, field(2), field(1)];
        let is_normal = kind == 0 && slices == SLICES;
        let is_huge = kind == 1 && (1..=SLICES_MAX).contains(&slices);
        let is_sound = (is_normal || is_huge)
            && entries <= SLICES
            && entries + 1 >= slices.min(SLICES)
            && (1..=INFO_SLICES_MAX).contains(&info)
            && info < slices;
        is_sound.then_some(Self { slices, info, entries, thread })
    }
}

/// Reads what is present; the rest is zeros.
fn present(memory: &dyn Memory, addr: u64, bytes: usize) -> Vec<u8> {
    let mut out = vec![0u8; bytes];
    let range = addr..addr.saturating_add(bytes as u64);
    let Ok(runs) = memory.page_runs(range.clone()) else { return out };
    for run in runs.within(range).filter(|run| run.state.present) {
        let (from, to) = ((run.start - addr) as usize, (run.end - addr) as usize);
        if let Some(part) = out.get_mut(from..to) {
            let bytes = part.len();
            memory.read_pieces(&[Piece { addr: run.start, bytes }], part);
        }
    }
    out
}

fn parse(bytes: &[u8], addr: u64, form: Form) -> Option<(Identity, Segment)> {
    let Fields { slices, info, entries, thread } = Fields::parse(bytes, form.entries_at)?;
    let entry_of = |slice: u64| {
        let place = form.entries_at + usize::try_from(slice).ok()? * form.pages.bytes();
        bytes.get(place..place + form.pages.bytes())
    };
    // The segment's own slices are an entry like a page.
    if entry_of(0).is_none_or(|own| u64::from(word32_at(own, 0)) != info || word32_at(own, 4) != 0) {
        return None;
    }
    let mut pages = Vec::new();
    let mut at = info;
    while at < entries {
        let entry_addr = addr + form.entries_at as u64 + at * form.pages.bytes() as u64;
        let page = Page::parse(entry_of(at)?, form.pages, (entry_addr, addr.checked_add(at * SLICE_BYTES)?))?;
        at += page.bytes / SLICE_BYTES;
        pages.push(page);
    }
    if at != slices && at != entries {
        return None;
    }
    let field = |before: usize| word_at(bytes, form.entries_at - 8 * before);
    // Two links between cookie and sizes since 2.1.8.
    let (plain, behind_links) = (field(6) ^ addr, field(8) ^ addr);
    let is_link = |word: u64| word == 0 || (is_user_address(word) && word.is_multiple_of(SEGMENT_BYTES));
    let key = if is_link(field(6)) && is_link(field(7)) && field(8) != 0 { behind_links } else { plain };
    let range = addr..addr.checked_add(slices * SLICE_BYTES)?;
    let segment = Segment { range, info_bytes: info * SLICE_BYTES, is_abandoned: thread == 0, pages };
    Some((Identity { form, key }, segment))
}

#[cfg(test)]
impl Page {
    /// A page for tests of its blocks.
    pub fn of(addr: u64, bytes: u64, block_bytes: u64, start: Option<u64>) -> Self {
        Self { block_bytes, start, ..Self::without_blocks(addr, bytes) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    const ADDR: u64 = 0x7f00_0000_0000;

    /// A header with the segment's own slice, a page of one slice with blocks of 64 bytes, and free slices.
    fn header(form: Form, links: bool) -> Vec<u8> {
        let mut bytes = vec![0u8; HEADER_BYTES];
        let mut put = |at: usize, value: u64, width: usize| bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        let at = form.entries_at;
        for (before, value) in [(5, 512), (4, 1), (3, 0), (2, 512), (1, 77), (if links { 8 } else { 6 }, ADDR ^ 0x1234_5678_9abc_def1)] {
            put(at - 8 * before, value, 8);
        }
        for (index, slices) in [(0, 1), (1, 1), (2, 510)] {
            put(at + index * form.pages.bytes(), slices, 4);
        }
        let page = at + form.pages.bytes();
        put(page + 10, 100, 2);
        put(page + 12, 1000, 2);
        put(page + 16, ADDR + 0x1_0000 + 192, 8);
        match form.pages {
            PageForm::Early => {
                put(page + 24, 60, 4);
                put(page + 28, 64, 4);
            }
            _ => {
                put(page + 32, 60, 2);
                put(page + 40, 64, 8);
                put(page + 48, ADDR + 0x1_0000 + 192, 8);
            }
        }
        bytes
    }

    #[test]
    fn each_layout_is_recognised_by_its_chain_of_pages_and_by_no_other() {
        for form in [Form { entries_at: 264, pages: PageForm::Early }, Form { entries_at: 304, pages: PageForm::Late }] {
            let bytes = header(form, form.pages == PageForm::Late);
            let forms = ENTRIES_AT.step_by(8).flat_map(|entries_at| PageForm::IN_SEGMENTS.map(|pages| Form { entries_at, pages }));
            let found: Vec<_> = forms.filter_map(|form| parse(&bytes, ADDR, form)).collect();
            let (identity, segment) = found[0].clone();
            assert_eq!((found.len(), identity), (1, Identity { form, key: 0x1234_5678_9abc_def1 }));
            assert_eq!((segment.info_bytes, segment.pages.len()), (SLICE_BYTES, 2));
            let page = segment.pages[0];
            assert_eq!((page.block_bytes, page.used, page.capacity, page.bytes), (64, 60, 100, SLICE_BYTES));
            assert_eq!((segment.pages[1].block_bytes, segment.pages[1].bytes), (0, 510 * SLICE_BYTES));
        }
    }

    #[test]
    fn a_chain_that_does_not_end_at_the_last_slice_is_none() {
        let form = Form { entries_at: 264, pages: PageForm::Early };
        let mut bytes = header(form, false);
        bytes[264 + 160..264 + 164].copy_from_slice(&509u32.to_le_bytes());
        assert_eq!(parse(&bytes, ADDR, form), None);
        assert_eq!(parse(&vec![0; HEADER_BYTES], ADDR, form), None);
        assert_eq!(parse(&vec![0xff; HEADER_BYTES], ADDR, form), None);
    }
}
