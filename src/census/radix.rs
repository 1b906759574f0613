//! Finding a page map (a radix tree from page to the allocator's record) in an object's bss. jemalloc's and tcmalloc's have the same form:
//! 2^17 or 2^18 root words, each pointing at a leaf of 2^18 words. Builds of jemalloc for addresses of 57 bits have nodes between root and
//! leaves, and leaves of two words a page; Google's tcmalloc has an array of its own before the words of a leaf.

use std::cell::OnceCell;
use std::collections::{HashMap, HashSet};
use std::ops::{ControlFlow, Range};

use super::layout_cache::ByBuildId;
use super::memory::{Memory, Piece, is_user_address, word_at};
use super::objects::{Data, ObjectData, Objects, anonymous_ranges, joined, range_of};
use crate::heap::residency::{page_bytes, page_down};
use crate::process::Maps;

/// Pages tried in each stretch of address space that one leaf covers: first a few, then, if no root leads to them, more. Within large extents
/// and free ones, jemalloc has entries for the first and the last page alone.
const PAGES_A_LEAF: [usize; 2] = [12, 1024];
/// Of these, present ones that are enough; with fewer, present pages are searched for.
const SPREAD_MIN: usize = 4;
/// Bytes of address space searched for present pages, some milliseconds per GiB.
const SEARCHED_BYTES_MAX: u64 = 4 << 30;
/// Stretches of address space tried: a process uses a few.
const STRETCHES_MAX: usize = 64;
/// Candidate words examined in one object.
const CANDIDATES_MAX: usize = 1 << 16;
/// Entries read in one object.
const READS_MAX: u64 = 1 << 17;

/// Form of the page map.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Root words.
    pub root_words: u64,
    /// log2 of the words of a node between root and leaves; 0 if the root leads to leaves.
    pub node_bits: u32,
    /// log2 of the pages of a leaf.
    pub leaf_bits: u32,
    /// Words of a page's entry in a leaf, the first of which leads to the record.
    pub entry_words: u64,
    /// Bytes of a leaf before its entries.
    pub leaf_offset: u64,
    /// log2 of the allocator's page.
    pub page_bits: u32,
    /// Alignment of nodes and leaves.
    pub alignment: u64,
    /// Root words in use at most: a root is nearly empty, as one word covers a GiB and more. This alone rejects tables
    /// of pointers.
    pub filled_max: u32,
    /// Bytes of the data that the root lies in, at least: how much else the allocator has there tells a small root from many tables. 0: the
    /// root's own are enough.
    pub object_bytes_min: u64,
}

impl Shape {
    /// log2 of the bytes that one leaf covers.
    #[must_use]
    pub fn leaf_reach_bits(&self) -> u32 {
        self.page_bits + self.leaf_bits
    }

    /// log2 of the bytes that one root word covers.
    #[must_use]
    pub fn root_reach_bits(&self) -> u32 {
        self.leaf_reach_bits() + self.node_bits
    }

    fn leaf_bytes(&self) -> u64 {
        self.leaf_offset + ((8 * self.entry_words) << self.leaf_bits)
    }

    /// Size of the node or leaf that a root word points to.
    fn child_bytes(&self) -> u64 {
        if self.node_bits == 0 { self.leaf_bytes() } else { 8 << self.node_bits }
    }

    /// The location of an address's entry, given the node or leaf that its root word points to.
    fn entry_of(&self, memory: &dyn Memory, child: u64, addr: u64) -> Option<u64> {
        let leaf = if self.node_bits == 0 { child } else { self.leaf_of(memory, child, addr)? };
        Some(self.entry_in(leaf, addr))
    }

    /// The leaf that a node leads to.
    fn leaf_of(&self, memory: &dyn Memory, node: u64, addr: u64) -> Option<u64> {
        memory.word(self.slot_in(node, addr)).filter(|&leaf| is_node(leaf, *self))
    }

    /// The location of an address's leaf in a node.
    fn slot_in(&self, node: u64, addr: u64) -> u64 {
        let slot = addr >> self.leaf_reach_bits() & ((1 << self.node_bits) - 1);
        node.wrapping_add(8 * slot)
    }

    fn entry_in(&self, leaf: u64, addr: u64) -> u64 {
        let slot = addr >> self.page_bits & ((1 << self.leaf_bits) - 1);
        leaf.wrapping_add(self.leaf_offset).wrapping_add(8 * self.entry_words * slot)
    }

    /// How many of these addresses, of one root word's stretch, have an entry under its node or leaf that `owns` accepts. Counts what is read.
    fn owned(&self, memory: &dyn Memory, child: u64, addrs: &[u64], owns: impl Fn(Entry, u64) -> bool, reads: &mut u64) -> usize {
        if self.node_bits == 0 {
            return self.owned_in(memory, child, addrs, owns, reads);
        }
        let leaf_number = |addr: u64| addr >> self.leaf_reach_bits();
        let page_of_slot = |addr: u64| page_down(self.slot_in(child, addr));
        let mut owned = 0;
        for of_page in addrs.chunk_by(|&one, &other| page_of_slot(one) == page_of_slot(other)) {
            *reads += 1;
            let Some(slots) = of_page.first().and_then(|&addr| self.slots_on(memory, child, page_of_slot(addr))) else { continue };
            // A node has nothing but leaves. Most of the words that are tried lead to something else.
            if slots.values().any(|word| word != 0 && !is_node(word, *self)) {
                return 0;
            }
            for of_leaf in of_page.chunk_by(|&one, &other| leaf_number(one) == leaf_number(other)) {
                let leaf = of_leaf.first().map_or(0, |&addr| slots.at(self.slot_in(child, addr)));
                if leaf != 0 {
                    owned += self.owned_in(memory, leaf, of_leaf, &owns, reads);
                }
            }
        }
        owned
    }

    /// The words of a node that lie on a page; `None` if it is not there.
    fn slots_on(&self, memory: &dyn Memory, node: u64, page: u64) -> Option<Slots> {
        let (first, end) = (page.max(node), (page + page_bytes()).min(node.saturating_add(8 << self.node_bits)));
        let bytes = memory.bytes(first, usize::try_from(end.checked_sub(first)?).ok()?)?;
        Some(Slots { first, bytes })
    }

    /// How many of these addresses, of one leaf's stretch, have an entry that `owns` accepts.
    fn owned_in(&self, memory: &dyn Memory, leaf: u64, addrs: &[u64], owns: impl Fn(Entry, u64) -> bool, reads: &mut u64) -> usize {
        let located: Vec<(u64, u64)> = addrs.iter().map(|&addr| (addr, self.entry_in(leaf, addr))).collect();
        let (Some(first), Some(last)) = (located.iter().map(|one| one.1).min(), located.iter().map(|one| one.1).max()) else { return 0 };
        // They are read together: a program may have thousands of words that look like leading to a leaf.
        *reads += 1;
        let Ok(runs) = memory.page_runs(first..last.saturating_add(8 * self.entry_words)) else { return 0 };
        let present: Vec<(u64, u64)> = located.into_iter().filter(|&(_, at)| runs.state_at(at).present).collect();
        let mut buffer = vec![0; present.len() * self.entry_bytes()];
        let (mut rest, mut owned) = (present.as_slice(), 0);
        while !rest.is_empty() {
            let pieces: Vec<Piece> = rest.iter().map(|&(_, addr)| Piece { addr, bytes: self.entry_bytes() }).collect();
            let read = memory.read_pieces(&pieces, &mut buffer) / self.entry_bytes();
            let entries = buffer.chunks_exact(self.entry_bytes()).take(read).map(Entry::of);
            for (&(addr, _), entry) in rest.iter().zip(entries).filter(|(_, entry)| entry.first != 0) {
                // Its record is read.
                *reads += 1;
                owned += usize::from(owns(entry, addr));
            }
            *reads += 1;
            // The first one that cannot be read any more is left out.
            rest = rest.get(read + 1..).unwrap_or_default();
        }
        owned
    }

    fn entry_bytes(&self) -> usize {
        usize::try_from(8 * self.entry_words).unwrap_or(8)
    }
}

/// Words of a node, from an address on.
struct Slots {
    first: u64,
    bytes: Vec<u8>,
}

impl Slots {
    fn values(&self) -> impl Iterator<Item = u64> {
        self.bytes.chunks_exact(8).map(|word| word_at(word, 0))
    }

    fn at(&self, slot: u64) -> u64 {
        usize::try_from(slot.wrapping_sub(self.first)).map_or(0, |at| word_at(&self.bytes, at))
    }
}

/// A leaf's entry for a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The word that leads to the record.
    pub first: u64,
    /// The last word; the same as the first if there is only one.
    pub last: u64,
}

impl Entry {
    fn of(bytes: &[u8]) -> Self {
        Self { first: word_at(bytes, 0), last: word_at(bytes, bytes.len().saturating_sub(8)) }
    }
}

/// A page map that was found.
#[derive(Debug, Clone)]
pub struct PageMapRoot {
    /// Address of the root.
    pub root: u64,
    /// The object in whose bss it lies.
    pub object: ObjectData,
}

/// Roots found before, as distances from their object's base, by build id.
#[derive(Debug, Default)]
pub struct Roots {
    by_build_id: ByBuildId<u64>,
}

/// Records that a remembered root must lead to before it is accepted.
const VERIFIED_MIN: usize = 2;

/// Searches for the root. `owns` says whether a leaf's entry is of a record that covers the page of an address.
#[must_use]
pub fn find(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    shape: Shape,
    roots: &mut Roots,
    owns: impl Fn(Entry, u64) -> bool,
) -> Option<PageMapRoot> {
    let anonymous = anonymous_ranges(maps);
    let mapped = joined(&anonymous);
    let samples = PAGES_A_LEAF.map(|_| OnceCell::new());
    let bytes_min = shape.object_bytes_min.max(shape.root_words * 8);
    for one in objects.iter().filter(|one| one.bytes() >= bytes_min) {
        let object = one.object();
        let remembered = roots.by_build_id.get(one.build_id().as_ref()).map(|distance| object.base.wrapping_add(distance));
        let data = OnceCell::new();
        for (samples, pages_a_leaf) in samples.iter().zip(PAGES_A_LEAF) {
            let samples = samples.get_or_init(|| samples_of(memory, &anonymous, shape, pages_a_leaf));
            if let Some(root) = remembered.filter(|&root| is_root(memory, root, samples, shape, &owns)) {
                return Some(PageMapRoot { root, object: object.clone() });
            }
            let data = data.get_or_init(|| one.data());
            let votes = votes(memory, &mapped, object, data, shape, samples, &owns);
            if let Some((&root, _)) = votes.iter().max_by_key(|&(_, &count)| count).filter(|&(_, &count)| count > 0) {
                roots.by_build_id.remember(one.build_id().as_ref(), root.wrapping_sub(object.base));
                return Some(PageMapRoot { root, object: object.clone() });
            }
            if votes.is_empty() {
                // No word of its data can be one of a root.
                break;
            }
        }
    }
    None
}

/// Of each root that the words of an object's data may belong to, how many samples lie in extents that it leads to.
fn votes(
    memory: &dyn Memory,
    mapped: &[Range<u64>],
    object: &ObjectData,
    data: &Data,
    shape: Shape,
    samples: &[(u64, Vec<u64>)],
    owns: impl Fn(Entry, u64) -> bool,
) -> HashMap<u64, u32> {
    let mut votes: HashMap<u64, u32> = HashMap::new();
    let number_of = |addr: u64| usize::try_from((addr - object.range.start) / 8).unwrap_or(usize::MAX);
    // The roots in which this word would be the entry for a stretch of addresses, with the samples of the stretch.
    let roots_at = |index: usize| {
        let place = object.range.start + 8 * index as u64;
        samples.iter().filter_map(move |(stretch, addrs)| Some((place.checked_sub(8 * stretch)?, addrs))).filter(|&(root, _)| {
            let end = root + shape.root_words * 8;
            let is_inside = root >= object.range.start && end <= object.range.end;
            is_inside && !data.has_more_filled(number_of(root)..number_of(end), shape.filled_max as usize)
        })
    };
    let pointers = data.words().filter(|&(index, word)| {
        let is_inside = || range_of(mapped, word).is_some_and(|range| word + shape.child_bytes() <= range.end);
        is_node(word, shape) && is_inside() && roots_at(index).next().is_some()
    });
    let mut reads = 0u64;
    for (index, child) in pointers.take(CANDIDATES_MAX) {
        for (root, addrs) in roots_at(index) {
            let owned = shape.owned(memory, child, addrs, &owns, &mut reads);
            *votes.entry(root).or_default() += u32::try_from(owned).unwrap_or(u32::MAX);
        }
        if reads > READS_MAX {
            break;
        }
    }
    votes
}

/// Whether a remembered root is valid in this process: enough of the samples lie in extents that it leads to.
fn is_root(memory: &dyn Memory, root: u64, samples: &[(u64, Vec<u64>)], shape: Shape, owns: impl Fn(Entry, u64) -> bool) -> bool {
    let mut found = 0usize;
    for (stretch, addrs) in samples.iter().filter(|&&(stretch, _)| stretch < shape.root_words) {
        let Some(child) = memory.word(root.wrapping_add(8 * stretch)).filter(|&child| is_node(child, shape)) else { continue };
        found += shape.owned(memory, child, addrs, &owns, &mut 0);
        if found >= VERIFIED_MIN {
            return true;
        }
    }
    false
}

fn is_node(word: u64, shape: Shape) -> bool {
    word != 0 && word.is_multiple_of(shape.alignment) && is_user_address(word)
}

/// Addresses of present pages, spread over each stretch.
fn samples_of(memory: &dyn Memory, anonymous: &[Range<u64>], shape: Shape, pages_a_leaf: usize) -> Vec<(u64, Vec<u64>)> {
    let parts = |range: &Range<u64>| {
        let (start, end, reach_bits) = (range.start, range.end, shape.root_reach_bits());
        let stretches = (start >> reach_bits..=(end - 1) >> reach_bits).take(STRETCHES_MAX);
        stretches.map(move |stretch| (stretch, start.max(stretch << reach_bits)..end.min((stretch + 1) << reach_bits)))
    };
    let largest = largest_stretches(anonymous.iter().flat_map(parts));
    let mut by_stretch: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut searched_bytes = 0;
    for range in anonymous {
        for (stretch, part) in parts(range).filter(|(stretch, _)| largest.contains(stretch)) {
            let is_sparse = pages_a_leaf == PAGES_A_LEAF[0];
            let mut pages = if is_sparse { spread_over(memory, part.clone(), pages_a_leaf) } else { Vec::new() };
            let bytes = part.end - part.start;
            // A small heap uses little of what is mapped for it.
            if pages.len() < SPREAD_MIN && searched_bytes + bytes <= SEARCHED_BYTES_MAX {
                searched_bytes += bytes;
                pages = among_present(memory, part, pages_a_leaf);
            }
            by_stretch.entry(stretch).or_default().extend(pages);
        }
    }
    // The larger part of a stretch has the better samples: a few of each mapping.
    let mut list: Vec<(u64, Vec<u64>)> = by_stretch.into_iter().collect();
    for (_, addrs) in &mut list {
        // An allocator's page may be larger than the kernel's: one entry.
        addrs.dedup_by_key(|addr| *addr >> shape.page_bits);
        let step = addrs.len().div_ceil(4 * pages_a_leaf).max(1);
        *addrs = addrs.iter().copied().step_by(step).collect();
    }
    list.sort_unstable_by_key(|(stretch, _)| *stretch);
    list
}

/// The stretches with the most mapped memory: V8 lays its pages of 256 KiB all over the address space, an allocator its heap in a few.
fn largest_stretches(parts: impl Iterator<Item = (u64, Range<u64>)>) -> HashSet<u64> {
    let mut bytes: HashMap<u64, u64> = HashMap::new();
    for (stretch, part) in parts {
        *bytes.entry(stretch).or_default() += part.end.saturating_sub(part.start);
    }
    let mut stretches: Vec<(u64, u64)> = bytes.into_iter().map(|(stretch, bytes)| (bytes, stretch)).collect();
    stretches.sort_unstable_by(|one, other| other.cmp(one));
    stretches.into_iter().take(STRETCHES_MAX).map(|(_, stretch)| stretch).collect()
}

/// The present ones of some pages at equal distances.
fn spread_over(memory: &dyn Memory, range: Range<u64>, pages_a_leaf: usize) -> Vec<u64> {
    let step = ((range.end - range.start) / page_bytes() / pages_a_leaf as u64).max(1) * page_bytes();
    let spread = range.step_by(usize::try_from(step).unwrap_or(usize::MAX)).take(pages_a_leaf);
    spread.filter(|&addr| memory.page_runs(addr..addr + page_bytes()).is_ok_and(|runs| runs.state_at(addr).present)).collect()
}

/// Some of the present pages of a range, at equal distances among them.
fn among_present(memory: &dyn Memory, range: Range<u64>, pages_a_leaf: usize) -> Vec<u64> {
    let Ok(runs) = memory.page_runs(range.clone()) else { return Vec::new() };
    let present = || runs.within(range.clone()).filter(|run| run.state.present);
    let pages: u64 = present().map(|run| (run.end - run.start) / page_bytes()).sum();
    let step = usize::try_from(pages.div_ceil(pages_a_leaf as u64).max(1)).unwrap_or(usize::MAX);
    present().flat_map(|run| (run.start..run.end).step_by(page_bytes() as usize)).step_by(step).collect()
}

/// The entry of an address's page; `None` if there is none.
pub fn lookup(memory: &dyn Memory, root: u64, shape: Shape, addr: u64) -> Option<Entry> {
    let slot = Some(addr >> shape.root_reach_bits()).filter(|&slot| slot < shape.root_words)?;
    let child = memory.word(root.checked_add(8 * slot)?).filter(|&child| is_node(child, shape))?;
    let bytes = memory.bytes(shape.entry_of(memory, child, addr)?, shape.entry_bytes())?;
    Some(Entry::of(&bytes)).filter(|entry| entry.first != 0)
}

/// Visits the entries of all leaves that are not 0, by ascending address, with the address of the page that each stands for.
pub fn visit(memory: &dyn Memory, root: u64, shape: Shape, mut visit: impl FnMut(u64, Entry)) {
    let _ = try_visit(memory, root, shape, |page, entry| {
        visit(page, entry);
        ControlFlow::Continue(())
    });
}

/// [`visit`] until it is told to break.
pub fn try_visit(memory: &dyn Memory, root: u64, shape: Shape, mut visit: impl FnMut(u64, Entry) -> ControlFlow<()>) -> ControlFlow<()> {
    /// Nodes and leaves visited: 4 TiB of jemalloc's pages.
    const NODES_MAX: usize = 4096;
    /// Read at once.
    const WINDOW_BYTES: usize = 64 << 10;
    let mut window = vec![0u8; WINDOW_BYTES];
    let mut children = |at: u64, words: u64| -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let _ = entries_of(memory, at..at.saturating_add(words * 8), 8, &mut window, |index, entry| {
            found.extend(is_node(entry.first, shape).then_some((index, entry.first)));
            if found.len() < NODES_MAX { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        found
    };
    let mut leaves: Vec<(u64, u64)> = Vec::new();
    for (index, child) in children(root, shape.root_words) {
        if shape.node_bits == 0 {
            leaves.push((index << shape.root_reach_bits(), child));
        } else {
            let below = children(child, 1 << shape.node_bits).into_iter();
            let first = index << shape.root_reach_bits();
            leaves.extend(below.map(|(slot, leaf)| (first + (slot << shape.leaf_reach_bits()), leaf)));
        }
        leaves.truncate(NODES_MAX);
    }
    for (first, leaf) in leaves {
        let entries = leaf.saturating_add(shape.leaf_offset)..leaf.saturating_add(shape.leaf_bytes());
        entries_of(memory, entries, shape.entry_bytes(), &mut window, |slot, entry| visit(first + (slot << shape.page_bits), entry))?;
    }
    ControlFlow::Continue(())
}

/// Visits the entries of a table that are not 0, with their numbers. It may have 2 MiB, most of which was never touched: only what is present
/// is read, a window at a time.
fn entries_of(
    memory: &dyn Memory,
    table: Range<u64>,
    entry_bytes: usize,
    window: &mut [u8],
    mut visit: impl FnMut(u64, Entry) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let Ok(runs) = memory.page_runs(table.clone()) else { return ControlFlow::Continue(()) };
    for run in runs.within(table.clone()).filter(|run| run.state.present) {
        let mut at = run.start;
        while at < run.end {
            let bytes = usize::try_from(run.end - at).unwrap_or(usize::MAX).min(window.len());
            let Some(part) = window.get_mut(..bytes).filter(|part| !part.is_empty()) else { break };
            let read = memory.read_pieces(&[Piece { addr: at, bytes }], part);
            let numbers = (at - table.start) / entry_bytes as u64..;
            for (number, entry) in numbers.zip(part.get(..read).unwrap_or_default().chunks_exact(entry_bytes).map(Entry::of)) {
                if entry.first != 0 {
                    visit(number, entry)?;
                }
            }
            at += bytes as u64;
        }
    }
    ControlFlow::Continue(())
}

/// Records at many addresses, read in windows where they lie close together. `None` stands for one that could not be read.
pub fn read_records(memory: &dyn Memory, addrs: &[u64], bytes: usize, mut record: impl FnMut(u64, Option<&[u8]>)) {
    /// Records further apart are read separately.
    const WINDOW_BYTES: u64 = 256 << 10;
    let mut rest = addrs;
    while let Some(&first) = rest.first() {
        let count = rest.partition_point(|&addr| addr < first.saturating_add(WINDOW_BYTES)).max(1);
        let (group, later) = rest.split_at(count);
        let last = group.last().copied().unwrap_or(first);
        let length = usize::try_from(last - first).unwrap_or(0).saturating_add(bytes);
        let window = memory.bytes(first, length);
        for &addr in group {
            let at = usize::try_from(addr - first).unwrap_or(usize::MAX);
            match &window {
                Some(window) => record(addr, at.checked_add(bytes).and_then(|end| window.get(at..end))),
                None => record(addr, memory.bytes(addr, bytes).as_deref()),
            }
        }
        rest = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::fixture::Fixture;

    const SHAPE: Shape = Shape {
        root_words: 1 << 18,
        node_bits: 0,
        leaf_bits: 18,
        entry_words: 1,
        leaf_offset: 0,
        page_bits: 12,
        alignment: 64,
        filled_max: 2048,
        object_bytes_min: 0,
    };

    #[test]
    fn a_word_that_leads_to_anything_but_a_node_of_leaves_has_no_entries() {
        let maps = Maps::parse(b"10000000-12000000 rw-p 00000000 00:00 0\n");
        let mut fixture = Fixture::with_maps(maps);
        let shape = Shape { node_bits: 12, leaf_bits: 12, page_bits: 13, ..SHAPE };
        let (node, leaf, addr) = (0x1000_0000, 0x1010_0000, 0x1180_0000);
        fixture.write_word(shape.slot_in(node, addr), leaf);
        fixture.write_word(shape.entry_in(leaf, addr), 7);
        let owned = |fixture: &Fixture| {
            let mut reads = 0;
            (shape.owned(fixture, node, &[addr, addr + (1 << 13)], |entry, of| (entry.first, of) == (7, addr), &mut reads), reads)
        };
        // The page of the node, the page map of the leaf, the entries, and one record.
        assert_eq!(owned(&fixture), (1, 4));
        // Another word on that page, which would lead to a leaf of other addresses.
        fixture.write_word(page_down(shape.slot_in(node, addr)), 9);
        assert_eq!(owned(&fixture), (0, 1));
    }

    #[test]
    fn a_heap_of_which_few_pages_have_entries_is_tried_at_each_page() {
        let maps = Maps::parse(b"10000000-12000000 rw-p 00000000 00:00 0\n");
        let mut fixture = Fixture::with_maps(maps.clone());
        // 512 pages in a row: of 12 pages at equal distances one or two are among them.
        for page in 0..512 {
            fixture.write_word(0x1040_0000 + page * page_bytes(), 1);
        }
        let ranges = anonymous_ranges(&maps);
        let tried =
            |pages_a_leaf| samples_of(&fixture, &ranges, SHAPE, pages_a_leaf).into_iter().map(|(_, pages)| pages.len()).sum::<usize>();
        assert_eq!(PAGES_A_LEAF.map(tried), [12, 512]);
    }

    #[test]
    fn a_heap_behind_many_small_mappings_far_apart_is_among_the_samples() {
        let mut text: String =
            (1..=200u64).map(|number| format!("{:x}-{:x} rw-p 00000000 00:00 0\n", number << 36, (number << 36) + (1 << 18))).collect();
        text.push_str("7f0000000000-7f0000800000 rw-p 00000000 00:00 0\n");
        let maps = Maps::parse(text.as_bytes());
        let mut fixture = Fixture::with_maps(maps.clone());
        (0..64).for_each(|page| fixture.write_word(0x7f00_0000_0000 + page * page_bytes(), 1));
        let samples = samples_of(&fixture, &anonymous_ranges(&maps), SHAPE, 12);
        assert!(
            samples.len() <= STRETCHES_MAX && samples.iter().any(|(stretch, pages)| stretch << 30 == 0x7f00_0000_0000 && !pages.is_empty())
        );
    }
}
