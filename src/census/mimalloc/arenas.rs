//! mimalloc 3.x: the page map, the pages that it names, and the arenas in which they lie; found by form.
//!
//! ```text
//! page map (a word of the library's data) ─→ parts ─→ struct mi_page_s ─→ its arena, or a mapping of its own
//! ```
//!
//! `_mi_page_map` (src/page-map.c of 3.0.1 to 3.4.3) has a word for each 512 MiB of addresses: the address of a part of 8,192 words, one for
//! each slice of 64 KiB, which is the address of the page's `struct mi_page_s` (include/mimalloc/types.h). The part for the lowest addresses
//! lies right behind the map, by which the map is recognised. The page's `memid` says where its memory is from. Its entry lies at its start
//! until 3.2, in a table of the arena since 3.3. `struct mi_arena_s` begins with {memid, subproc, [arena_idx since 3.2], slice_count,
//! info_slices, …}; each bitmap ends where the next one begins, with a bit for each slice. 3.0.1 leaves freed pages in the map, so whether a
//! slice is free is asked of the arena.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::super::memory::{Memory, Piece, is_user_address, word_at, word16_at, word32_at};
use super::super::objects::{range_of, read_present, unbacked_ranges};
use super::super::reader::Sight;
use super::segments::{Gap, Page, PageForm, SLICE_BYTES, Segment};

/// Bytes of the page map: for addresses of 47 or 48 bits.
const MAP_BYTES: [u64; 2] = [2 << 20, 4 << 20];
/// Words of a part.
const PART_WORDS: u64 = 1 << 13;
/// Words of the data of all objects that are tried as the map.
const CANDIDATES_MAX: usize = 1 << 14;
/// Parts read: 512 GiB of addresses.
const PARTS_MAX: usize = 1024;
/// Pages of a process: 64 GiB of small ones.
const PAGES_MAX: usize = 1 << 20;
/// Arenas of a process: mimalloc has 160.
const ARENAS_MAX: usize = 1024;
/// Slices of all arenas: 256 GiB. Each can be a page or a gap of its own.
const ALL_SLICES_MAX: u64 = 1 << 22;
/// Entries read at once.
const BATCH: usize = 512;
/// Slices of an arena (`MI_BITMAP_MAX_BIT_COUNT`: 512 chunks of 512 bits).
const SLICES_MAX: u64 = 1 << 18;
/// Bits, and bytes, of a chunk of a bitmap.
const CHUNK_BITS: u64 = 512;
const CHUNK_BYTES: u64 = 64;
/// Bytes of a bitmap before its chunks, at most: counters, the map of chunks and their classes.
const BITMAP_HEADER_MAX: u64 = 4096;
/// Bytes of an arena's fields that are read.
const ARENA_BYTES: usize = 128;
/// Bytes of a subprocess (`struct mi_subproc_s`) in which its array of arenas is searched, and its words.
const SUBPROCESS_BYTES: usize = 4096;
/// `MI_MEM_EXTERNAL`, `MI_MEM_OS` to `MI_MEM_OS_REMAP`, `MI_MEM_ARENA`: where memory is from.
const FROM_OUTSIDE: u32 = 1;
const FROM_SYSTEM: std::ops::RangeInclusive<u32> = 4..=6;
const FROM_ARENA: u32 = 7;

/// The heaps of 3.x.
#[derive(Debug)]
pub struct Arenas {
    /// The layout of the pages.
    pub form: PageForm,
    /// Releases with these layouts.
    pub releases: Releases,
    /// An extent for each arena and each page with a mapping of its own, by address.
    pub list: Vec<Segment>,
    /// Parts of the page map, pages and arenas that were left out because there were too many.
    pub left_out: u64,
}

/// Releases, by the layout of arenas and pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Releases {
    /// 3.0.
    Zero,
    /// 3.1.
    One,
    /// 3.2.
    Two,
    /// 3.3 and later.
    Later,
}

impl Releases {
    /// Each with the places of `slice_count` and `slices_free` in an arena.
    const ALL: [(Self, usize, usize); 4] = [(Self::Zero, 32, 64), (Self::One, 32, 80), (Self::Two, 40, 88), (Self::Later, 40, 104)];

    /// Their names.
    #[must_use]
    pub fn name(self, form: PageForm) -> &'static str {
        match (self, form) {
            (Self::Zero, _) => "3.0",
            (Self::One, _) => "3.1",
            (Self::Two, _) => "3.2",
            (Self::Later, PageForm::Pointer) => "3.3",
            (Self::Later, form) => form.releases(),
        }
    }

    /// Whether `mi_collect(true)` returns all free slices. 3.2 returns whole groups of 2 MiB where transparent huge pages are on and its
    /// options do not say otherwise (`_mi_os_minimal_purge_size`, src/os.c), which cannot be known from outside.
    #[must_use]
    pub fn returns_all(self) -> bool {
        self != Self::Two
    }
}

/// Finds the heaps of 3.x.
#[must_use]
pub fn find(sight: &Sight<'_>) -> Option<Arenas> {
    let (entries, mut left_out) = entries(sight.memory, find_map(sight)?);
    let sound = |form| pages(sight.memory, &entries, form).take(BATCH).filter(|(_, page)| page.is_some()).count();
    let form = PageForm::MAPPED.into_iter().max_by_key(|&form| sound(form))?;
    let mut alone = Vec::new();
    let mut by_arena: BTreeMap<u64, Vec<Page>> = BTreeMap::new();
    let mut add = |page: Page, home: Home| match home {
        Home::Arena(arena) if by_arena.len() < ARENAS_MAX || by_arena.contains_key(&arena) => {
            by_arena.entry(arena).or_default().push(page);
        }
        Home::Arena(_) => left_out += 1,
        Home::Own => alone.push(page),
    };
    let mut broken = Vec::new();
    for (entry, read) in pages(sight.memory, &entries, form) {
        match read {
            Some((page, home)) => add(page, home),
            None => broken.push(entry),
        }
    }
    // Those that the program was changing are in order now.
    let mut broken_slices = BTreeSet::new();
    for ((_, slice), read) in pages(sight.memory, &broken, form) {
        match read {
            Some((page, home)) => add(page, home),
            None => _ = broken_slices.insert(slice),
        }
    }
    let unbacked = unbacked_ranges(sight.maps);
    let is_mapped = |range: &Range<u64>| range_of(&unbacked, range.start).is_some_and(|own| range.end <= own.end);
    let mut arenas = arenas(sight.memory, by_arena.keys().copied().collect(), is_mapped);
    let (found, mut end, mut slices) = (arenas.len(), 0, 0);
    arenas.retain(|arena| {
        let fits = arena.start >= end && slices + arena.slices <= ALL_SLICES_MAX;
        (end, slices) = if fits { (arena.range().end, slices + arena.slices) } else { (end, slices) };
        fits
    });
    left_out += (found - arenas.len()) as u64;
    let releases = arenas.first().map_or(Releases::Later, |arena| arena.releases);
    if releases == Releases::Zero {
        broken_slices.clear();
    }
    let of_arena = |arena: &Arena| arena.segment(by_arena.remove(&arena.start).unwrap_or_default(), &broken_slices);
    let mut all: Vec<Segment> = arenas.iter().map(of_arena).collect();
    let in_arena = |slice: &u64| arenas.iter().any(|arena| arena.range().contains(slice));
    left_out += broken_slices.iter().filter(|&slice| range_of(&unbacked, *slice).is_some() && !in_arena(slice)).count() as u64;
    // Those of an arena that was not understood are there at least.
    let alone = alone.into_iter().chain(by_arena.into_values().flatten()).filter(|page| is_mapped(&page.range()));
    all.extend(alone.map(|page| Segment { range: page.range(), info_bytes: 0, is_abandoned: false, pages: vec![page] }));
    all.sort_by_key(|segment| segment.range.start);
    // A page that was freed while it was read, and whose place has another.
    end = 0;
    all.retain(|segment| {
        let follows = segment.range.start >= end;
        end = if follows { segment.range.end } else { end };
        follows
    });
    (!all.is_empty()).then_some(Arenas { form, releases, list: all, left_out })
}

/// Address and bytes of the page map.
fn find_map(sight: &Sight<'_>) -> Option<Range<u64>> {
    let unbacked = unbacked_ranges(sight.maps);
    let mut tried = BTreeSet::new();
    for object in sight.objects.iter() {
        let data = object.data();
        let aligned = data.words().map(|(_, word)| word).filter(|word| word.is_multiple_of(4096) && is_user_address(*word));
        for word in aligned {
            let Some(own) = range_of(&unbacked, word) else { continue };
            if tried.len() >= CANDIDATES_MAX || !tried.insert(word) {
                continue;
            }
            let first = sight.memory.word(word).unwrap_or(0);
            if let Some(bytes) = MAP_BYTES.into_iter().find(|&bytes| word + bytes == first && first < own.end) {
                return Some(word..word + bytes);
            }
        }
    }
    None
}

/// The entries of all pages in the map, each with the first slice that leads to it, by address; and how much was left out.
fn entries(memory: &dyn Memory, map: Range<u64>) -> (Vec<(u64, u64)>, u64) {
    let mut entries: Vec<(u64, u64)> = Vec::new();
    let mut parts: Vec<(u64, u64)> = words(&read_present(memory, map)).filter(|(_, part)| is_user_address(*part)).collect();
    let mut left_out = parts.len().saturating_sub(PARTS_MAX) as u64;
    parts.truncate(PARTS_MAX);
    for (index, part) in parts {
        let Some(end) = part.checked_add(PART_WORDS * 8) else { continue };
        for (slot, entry) in words(&read_present(memory, part..end)) {
            let slice = (index * PART_WORDS + slot) * SLICE_BYTES;
            // The first part begins with a page that stands for no address.
            if slice == 0 || !is_user_address(entry) || entries.last().is_some_and(|last| last.0 == entry) {
                continue;
            }
            match entries.len() < PAGES_MAX {
                true => entries.push((entry, slice)),
                false => left_out += 1,
            }
        }
    }
    (entries, left_out)
}

/// The words that are not 0, with their numbers.
fn words(bytes: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    (0u64..).zip(bytes.chunks_exact(8).map(|word| word_at(word, 0))).filter(|(_, word)| *word != 0)
}

/// Where a page's memory is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Home {
    /// The arena at this address.
    Arena(u64),
    /// A mapping of its own.
    Own,
}

/// These entries, each with its page and the origin of its memory if it is in order. They are read in batches, as they are asked for.
fn pages<'a>(
    memory: &'a dyn Memory,
    entries: &'a [(u64, u64)],
    form: PageForm,
) -> impl Iterator<Item = ((u64, u64), Option<(Page, Home)>)> + 'a {
    entries.chunks(BATCH).flat_map(move |batch| {
        let pieces: Vec<Piece> = batch.iter().map(|&(addr, _)| Piece { addr, bytes: form.bytes() }).collect();
        let mut bytes = vec![0u8; batch.len() * form.bytes()];
        let read = memory.read_pieces(&pieces, &mut bytes);
        // An entry that is not there any more ends a reading: the rest is read one by one.
        for (piece, part) in pieces.iter().zip(bytes.chunks_exact_mut(form.bytes())).skip(read / form.bytes()) {
            memory.read(piece.addr, part);
        }
        let parsed = batch
            .iter()
            .zip(bytes.chunks_exact(form.bytes()))
            .map(|(&(addr, slice), entry)| ((addr, slice), parse(entry, form, addr).filter(|(page, _)| page.range().contains(&slice))));
        parsed.collect::<Vec<_>>()
    })
}

/// The page of an entry as it is now.
#[must_use]
pub fn parse_page(entry: &[u8], form: PageForm, entry_addr: u64) -> Option<Page> {
    parse(entry, form, entry_addr).map(|(page, _)| page)
}

fn parse(entry: &[u8], form: PageForm, entry_addr: u64) -> Option<(Page, Home)> {
    let word = |at: usize| word_at(entry, at);
    let (start, memid) = match form {
        PageForm::Offset => (entry_addr.checked_add(u64::from(word32_at(entry, 48)) * 8)?, 88),
        _ => (word(48), 96),
    };
    let (addr, bytes, home) = match word32_at(entry, memid + 16) {
        FROM_ARENA => {
            let (arena, slice, slices) = (word(memid), word32_at(entry, memid + 8), word32_at(entry, memid + 12));
            (arena.checked_add(u64::from(slice) * SLICE_BYTES)?, u64::from(slices) * SLICE_BYTES, Home::Arena(arena))
        }
        kind if kind == FROM_OUTSIDE || FROM_SYSTEM.contains(&kind) => (word(memid), word(memid + 8), Home::Own),
        _ => return None,
    };
    let [used, capacity, reserved] = [16, 18, 20].map(|at| u64::from(word16_at(entry, at)));
    let block_bytes = word(40);
    let page = Page {
        entry: entry_addr,
        addr,
        bytes,
        block_bytes,
        start: Some(start),
        capacity,
        used,
        free: [word(8), word(24)],
        thread_free: word(32) & !3,
        heap: 0,
        gap: Gap::Free,
    };
    let end = addr.checked_add(bytes)?;
    let is_sound = is_user_address(addr)
        && end > addr
        && used <= capacity
        && capacity <= reserved
        && block_bytes > 0
        && (addr..end).contains(&start)
        && reserved.checked_mul(block_bytes).and_then(|all| start.checked_add(all)).is_some_and(|last| last <= end)
        && page.free.iter().chain([&page.thread_free]).all(|&block| block == 0 || (start..end).contains(&block));
    is_sound.then_some((page, home))
}

/// An arena.
struct Arena {
    start: u64,
    releases: Releases,
    slices: u64,
    info_slices: u64,
    /// The subprocess it belongs to.
    subprocess: u64,
    /// A bit for each slice: whether it is free.
    free: Vec<u8>,
}

/// Arenas at these addresses, and the others of their subprocesses, by address.
fn arenas(memory: &dyn Memory, known: Vec<u64>, is_mapped: impl Fn(&Range<u64>) -> bool) -> Vec<Arena> {
    let read = |start: u64| Arena::read(memory, start).filter(|arena| is_mapped(&arena.range()));
    let mut all: BTreeMap<u64, Arena> = known.into_iter().filter_map(|start| Some((start, read(start)?))).collect();
    let subprocesses: BTreeMap<u64, u64> = all.values().map(|arena| (arena.subprocess, arena.start)).collect();
    for (subprocess, start) in subprocesses {
        // Around the arena that is known there are the others.
        let bytes = memory.bytes(subprocess, SUBPROCESS_BYTES).unwrap_or_default();
        let words: Vec<u64> = bytes.chunks_exact(8).map(|word| word_at(word, 0)).collect();
        let Some(at) = words.iter().position(|&word| word == start) else { continue };
        let (before, after) = words.split_at(at);
        let mut add = |word: u64| {
            if !all.contains_key(&word) {
                all.extend(read(word).filter(|arena| arena.subprocess == subprocess).map(|arena| (word, arena)));
            }
            all.contains_key(&word)
        };
        before.iter().rev().take_while(|word| add(**word)).for_each(drop);
        after.iter().take_while(|word| add(**word)).for_each(drop);
    }
    all.into_values().take(ARENAS_MAX).collect()
}

impl Arena {
    fn range(&self) -> Range<u64> {
        self.start..self.start.saturating_add(self.slices * SLICE_BYTES)
    }

    fn read(memory: &dyn Memory, start: u64) -> Option<Self> {
        if !is_user_address(start) || !start.is_multiple_of(SLICE_BYTES) {
            return None;
        }
        let fields = memory.bytes(start, ARENA_BYTES)?;
        let word = |at: usize| word_at(&fields, at);
        Releases::ALL.into_iter().find_map(|(releases, count_at, free_at)| {
            let (slices, info_slices, bitmap, next) = (word(count_at), word(count_at + 8), word(free_at), word(free_at + 8));
            let is_sized = (1..=SLICES_MAX).contains(&slices) && (1..slices).contains(&info_slices);
            let info = start..start.checked_add(info_slices.min(SLICES_MAX) * SLICE_BYTES)?;
            let bytes = slices.min(SLICES_MAX).div_ceil(CHUNK_BITS) * CHUNK_BYTES;
            let header = next.checked_sub(bitmap)?.checked_sub(bytes)?;
            let is_bitmap = info.contains(&bitmap) && info.contains(&next) && (CHUNK_BYTES..=BITMAP_HEADER_MAX).contains(&header);
            if !is_sized || !is_bitmap {
                return None;
            }
            let free = memory.bytes(bitmap + header, usize::try_from(bytes).ok()?)?;
            Some(Self { start, releases, slices, info_slices, subprocess: word(24), free })
        })
    }

    fn is_free(&self, slice: u64) -> bool {
        usize::try_from(slice / 8).ok().and_then(|at| self.free.get(at)).is_some_and(|byte| byte >> (slice % 8) & 1 == 1)
    }

    /// The arena with its pages, and between them what is free, what mimalloc has for itself, and the pages, beginning at one of the slices
    /// `broken`, whose entries were not in order.
    fn segment(&self, mut pages: Vec<Page>, broken: &BTreeSet<u64>) -> Segment {
        pages.sort_by_key(|page| page.addr);
        let range = self.range();
        let mut all = Vec::with_capacity(2 * pages.len());
        let mut slice = self.info_slices;
        for page in pages {
            let first = page.addr.saturating_sub(self.start) / SLICE_BYTES;
            // Not of a page that is no more.
            if first >= slice && page.range().end <= range.end && !self.is_free(first) {
                self.fill(&mut all, slice..first, broken);
                slice = first + page.bytes / SLICE_BYTES;
                all.push(page);
            }
        }
        self.fill(&mut all, slice..self.slices, broken);
        Segment { range, info_bytes: self.info_slices * SLICE_BYTES, is_abandoned: false, pages: all }
    }

    fn fill(&self, all: &mut Vec<Page>, slices: Range<u64>, broken: &BTreeSet<u64>) {
        let mut at = slices.start;
        while at < slices.end {
            let is_free = self.is_free(at);
            let end = (at..slices.end).find(|&other| self.is_free(other) != is_free).unwrap_or(slices.end);
            let [from, to] = [at, end].map(|slice| self.start + slice * SLICE_BYTES);
            // Where the entry does not tell how long the page is, it may be as long as all that is in use.
            let known = if is_free { to } else { broken.range(from..to).next().copied().unwrap_or(to) };
            let parts = [(from..known, if is_free { Gap::Free } else { Gap::Metadata }), (known..to, Gap::Unknown)];
            let parts = parts.into_iter().filter(|(part, _)| !part.is_empty());
            all.extend(parts.map(|(part, gap)| Page { gap, ..Page::without_blocks(part.start, part.end - part.start) }));
            at = end;
        }
    }
}
