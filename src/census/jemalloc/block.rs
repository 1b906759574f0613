//! What the threads' caches of jemalloc 5.3 hold, and whether a single block is in use: by the record of its extent, less these.
//!
//! A block in a cache is still in use by its record. Each thread's data (`tsd_t`, include/jemalloc/internal/tsd.h) have the two parts of its
//! cache: `tcache_slow`, and `tcache_t` {tcache_slow, bins}, of which the second begins with the address of the first. The data of all
//! threads are in one ring (`tsd_link`, {next, previous}), whose first member a word of jemalloc's own data has (`tsd_nominal_tsds`,
//! src/tsd.c). Neither needs a build with statistics. Caches that a program makes itself (`mallctl("tcache.create")`) are not in the ring.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::super::memory::{Memory, is_user_address, word_at};
use super::super::objects::{Data, Objects, range_of, thread_ranges, unbacked_ranges};
use super::super::radix::{self, Shape};
use super::cache_bins::{BIN_BYTES, BINS_MIN, Bin, bin_at};
use super::record::{ACTIVE, Extent, Form, is_region_free};
use super::telling::Telling;
use super::{LayoutCache, POINTER_MASK, find_page_map, one_word, pages_of, read_record};

/// Bytes of a thread's data that are searched; there are about 2,900.
const THREAD_BYTES_MAX: usize = 8 << 10;
/// Words of jemalloc's data that are tried as the ring's head.
const CANDIDATES_MAX: usize = 1 << 14;
/// Threads followed.
const THREADS_MAX: usize = 1 << 14;
/// Bytes of a thread's bins that are read: more than any build has.
const BINS_BYTES_MAX: usize = 128 * BIN_BYTES;
/// Classes for which every cache has a bin (`SC_NBINS`).
const SMALL_CLASSES: u64 = 36;
/// How often the ring is read again if a thread came or went meanwhile.
const READINGS_MAX: usize = 3;

/// Where jemalloc's data lie in one process.
#[derive(Debug, Clone, Copy)]
pub struct Finder {
    root: u64,
    shape: Shape,
    form: Form,
    /// Address of the word with the ring's first member.
    head: u64,
    offsets: Offsets,
}

/// Where in a thread's data the ring's pointers and the cache's bins lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offsets {
    link: u64,
    bins: u64,
}

/// What jemalloc says of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockState {
    /// A number of its extent and its size class: the same as long as the block is in use.
    pub identity: u64,
    /// Whether it is allocated, and in no thread's cache.
    pub is_used: bool,
}

impl Finder {
    /// Searches a process. `None` if it has no jemalloc 5.3, or none of its threads has a cache yet.
    #[must_use]
    pub fn search(memory: &dyn Memory) -> Option<Self> {
        let maps = memory.maps().ok()?;
        let objects = Objects::of(memory, &maps);
        let mapped = unbacked_ranges(&maps);
        let (shape, found) = find_page_map(memory, &maps, &objects, &mapped, &mut LayoutCache::default())?;
        let object = objects.iter().find(|one| one.object() == &found.object)?;
        let Ring { index, offsets, .. } = find_ring(memory, &thread_ranges(&maps), &object.data())?;
        let form = Telling::of(memory, &found, shape).form(memory, pages_of(shape));
        Some(Self { root: found.root, shape, form, head: found.object.range.start + 8 * index as u64, offsets })
    }

    /// Reads the caches of all threads, for questions about blocks at this moment. `None` if threads came and went all the time.
    #[must_use]
    pub fn caches<'a>(&self, memory: &'a dyn Memory) -> Option<Caches<'a>> {
        let bins = (0..READINGS_MAX).find_map(|_| ring(memory, memory.word(self.head)?, self.offsets))?;
        Some(Caches { finder: *self, memory, bins, held: HashMap::new() })
    }
}

/// The ring of the threads' data.
struct Ring {
    /// Which word of jemalloc's data has its first member.
    index: usize,
    offsets: Offsets,
    /// Of each thread, its bins.
    bins: Vec<Vec<u8>>,
}

/// `threads`: where threads' data can be.
fn find_ring(memory: &dyn Memory, threads: &[Range<u64>], data: &Data) -> Option<Ring> {
    let bytes_of = |word: u64| range_of(threads, word).filter(|_| word.is_multiple_of(8)).map(|range| range.end - range.start);
    // Threads' data lie in small mappings: a program may have any number of words that lead into the heap.
    let mut candidates: Vec<(u64, u64, usize)> = data.words().filter_map(|(index, word)| Some((bytes_of(word)?, word, index))).collect();
    candidates.sort_unstable();
    candidates.dedup_by_key(|&mut (_, word, _)| word);
    candidates.into_iter().take(CANDIDATES_MAX).find_map(|(_, word, index)| {
        let offsets = offsets_of(memory, word)?;
        let bins = (0..READINGS_MAX).find_map(|_| ring(memory, word, offsets))?;
        Some(Ring { index, offsets, bins })
    })
}

/// A block in a thread's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Held {
    /// Its address.
    pub addr: u64,
    /// Its size class.
    pub class: u64,
}

/// What the caches of all threads hold, by ascending address. `None` if there is no thread with a cache of 5.3, if threads came and went all
/// the time, or if one's cache could not be read. `threads`: where threads' data can be. `data`: that of the file with the page map.
#[must_use]
pub fn held_by_threads(memory: &dyn Memory, threads: &[Range<u64>], data: &Data) -> Option<Vec<Held>> {
    let Ring { bins, .. } = find_ring(memory, threads, data)?;
    let mut held = Vec::new();
    for bins in &bins {
        held.extend(held_by(memory, bins)?);
    }
    held.sort_unstable();
    held.dedup_by_key(|held| held.addr);
    Some(held)
}

/// What one thread's bins hold; `None` if they cannot be read. Their stacks follow one another: where they do not, there are no more bins.
fn held_by(memory: &dyn Memory, bins: &[u8]) -> Option<Vec<Held>> {
    let mut held = Vec::new();
    let mut end = None;
    for (class, at) in (0..).zip((0..=bins.len().saturating_sub(BIN_BYTES)).step_by(BIN_BYTES)) {
        let follows = |bin: &Bin| end.is_none_or(|before| before == bin.full);
        let Some(bin) = bin_at(bins, at).filter(follows) else {
            // A thread without a cache has none; any other has those of the small classes.
            return (class == 0 || class >= SMALL_CLASSES).then_some(held);
        };
        end = Some(bin.empty);
        let stack = memory.bytes(bin.head, usize::try_from(bin.empty - bin.head).ok()?)?;
        held.extend(stack.chunks_exact(8).map(|word| Held { addr: word_at(word, 0), class }));
    }
    Some(held)
}

/// The threads' caches.
pub struct Caches<'a> {
    finder: Finder,
    memory: &'a dyn Memory,
    /// Of each thread, its bins.
    bins: Vec<Vec<u8>>,
    /// What all threads' bins of a size class hold; `None` = they could not be read.
    held: HashMap<u64, Option<HashSet<u64>>>,
}

impl Caches<'_> {
    /// The state of the block at an address. `None` if no block can begin there, or what was read is not consistent.
    pub fn state(&mut self, addr: u64) -> Option<BlockState> {
        let (memory, shape) = (self.memory, self.finder.shape);
        let word = one_word(radix::lookup(memory, self.finder.root, shape, addr)?, shape);
        let record = Some(word & POINTER_MASK).filter(|&record| is_user_address(record))?;
        let (form, pages) = (self.finder.form, pages_of(shape));
        let record = read_record(memory, record, pages)?;
        let extent = Extent::parse(&record, form, pages).filter(|extent| (extent.addr..extent.end()).contains(&addr))?;
        if extent.state != ACTIVE {
            return Some(BlockState { identity: extent.addr, is_used: false });
        }
        let is_allocated = if extent.is_slab {
            let distance = addr - extent.addr;
            !is_region_free(&record, distance.is_multiple_of(extent.region_bytes).then(|| distance / extent.region_bytes)?)
        } else {
            (addr == extent.addr + extent.offset_bytes).then_some(true)?
        };
        let is_used = is_allocated && !self.held(form.bits.size_class_of(&record))?.contains(&addr);
        Some(BlockState { identity: extent.addr ^ extent.region_bytes, is_used })
    }

    /// What the caches hold of a size class.
    fn held(&mut self, class: u64) -> Option<&HashSet<u64>> {
        let (memory, bins) = (self.memory, &self.bins);
        self.held.entry(class).or_insert_with(|| held_of(memory, bins, class)).as_ref()
    }
}

/// What bins of a class hold. Classes above the caches' have none.
fn held_of(memory: &dyn Memory, threads: &[Vec<u8>], class: u64) -> Option<HashSet<u64>> {
    let mut held = HashSet::new();
    let at = usize::try_from(class).ok()?.checked_mul(BIN_BYTES)?;
    for bins in threads.iter().filter(|bins| bins.len() >= at + BIN_BYTES) {
        // A thread without a cache, or a class for which it has no bin.
        if word_at(bins, at) == 0 {
            continue;
        }
        let Some(bin) = bin_at(bins, at) else {
            // Behind the last bin there is something else.
            if class < SMALL_CLASSES {
                return None;
            }
            continue;
        };
        let bytes = usize::try_from(bin.empty - bin.head).ok()?;
        held.extend(memory.bytes(bin.head, bytes)?.chunks_exact(8).map(|word| word_at(word, 0)));
    }
    Some(held)
}

/// Where the two fields lie in the data of the thread at this address; `None` if it is not that of a thread with a cache.
fn offsets_of(memory: &dyn Memory, thread: u64) -> Option<Offsets> {
    let mut bytes = vec![0u8; THREAD_BYTES_MAX];
    let read = memory.read(thread, &mut bytes);
    let bytes = bytes.get(..read)?;
    let places = || (0..read.saturating_sub(BIN_BYTES * BINS_MIN)).step_by(8);
    // The address of its other part, which lies before it, and then bins whose stacks follow one another.
    let is_cache = |&at: &usize| {
        let slow = word_at(bytes, at).wrapping_sub(thread);
        let mut bins = (0..BINS_MIN).map(|number| bin_at(bytes, at + 8 + BIN_BYTES * number));
        let mut end = None;
        slow < at as u64
            && slow.is_multiple_of(8)
            && bins.all(|bin| bin.is_some_and(|bin| end.replace(bin.empty).is_none_or(|before| before == bin.full)))
    };
    let cache = places().find(is_cache)?;
    let is_link = |&at: &usize| {
        let [next, previous] = [word_at(bytes, at), word_at(bytes, at + 8)];
        let points_here = |neighbour: u64, field: u64| memory.word(neighbour.wrapping_add(at as u64 + field)) == Some(thread);
        is_user_address(next) && is_user_address(previous) && points_here(next, 8) && points_here(previous, 0)
    };
    let link = places().take_while(|&at| at < cache).find(is_link)?;
    Some(Offsets { link: link as u64, bins: cache as u64 + 8 })
}

/// The bins of each thread in the ring that begins with this one; `None` if it does not close.
fn ring(memory: &dyn Memory, first: u64, offsets: Offsets) -> Option<Vec<Vec<u8>>> {
    let mut threads = Vec::new();
    let mut thread = first;
    while threads.len() < THREADS_MAX {
        let mut bins = vec![0u8; BINS_BYTES_MAX];
        let read = memory.read(thread.checked_add(offsets.bins)?, &mut bins);
        bins.truncate(read);
        threads.push(bins);
        let next = memory.word(thread.checked_add(offsets.link)?)?;
        // Every member points back at the one before it.
        if memory.word(next.checked_add(offsets.link)?.checked_add(8)?)? != thread {
            return None;
        }
        thread = next;
        if thread == first {
            return Some(threads);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::census::Fixture;
    use crate::process::Maps;

    const HEAP: u64 = 0x7f10_0000_0000;
    const LINK: u64 = 0x180;
    const CACHE: u64 = 0x400;
    const CLASS: usize = 5;

    fn thread(number: u64) -> u64 {
        HEAP + 0x10_0000 * (number + 1)
    }

    /// Threads in a ring, each with a cache that holds these blocks of [`CLASS`].
    fn threads(memory: &mut Fixture, held: &[&[u64]]) {
        let count = held.len() as u64;
        for (number, blocks) in (0..count).zip(held) {
            let own = thread(number);
            memory.write_word(own + LINK, thread((number + 1) % count));
            memory.write_word(own + LINK + 8, thread((number + count - 1) % count));
            memory.write_word(own + CACHE, own + 0x200);
            let mut stack = own + 0x8_0000;
            for class in 0..40 {
                let (full, empty) = (stack, stack + 64);
                let head = if class == CLASS { empty - 8 * blocks.len() as u64 } else { empty };
                let bits = empty & 0xffff | (full & 0xffff) << 16 | (empty & 0xffff) << 32;
                for (field, word) in [head, 1, bits].into_iter().enumerate() {
                    memory.write_word(own + CACHE + 8 + (BIN_BYTES * class + 8 * field) as u64, word);
                }
                if class == CLASS {
                    blocks.iter().zip(0..).for_each(|(&block, at)| memory.write_word(head + 8 * at, block));
                }
                stack = empty;
            }
        }
    }

    fn fixture() -> Fixture {
        Fixture::with_maps(Maps::parse(b"7f1000000000-7f1001000000 rw-p 00000000 00:00 0\n"))
    }

    #[test]
    fn what_the_caches_of_all_threads_hold_is_found_through_their_ring() {
        let mut memory = fixture();
        threads(&mut memory, &[&[0x111, 0x222], &[], &[0x333]]);
        let offsets = offsets_of(&memory, thread(1)).unwrap();
        assert_eq!(offsets, Offsets { link: LINK, bins: CACHE + 8 });
        let bins = ring(&memory, thread(1), offsets).unwrap();
        assert_eq!(held_of(&memory, &bins, CLASS as u64).unwrap(), HashSet::from([0x111, 0x222, 0x333]));
        assert_eq!(held_of(&memory, &bins, 4).unwrap(), HashSet::new());
        assert_eq!(held_of(&memory, &bins, 60).unwrap(), HashSet::new());
        assert!(offsets_of(&memory, thread(1) + 8).is_none(), "not the start of a thread's data");
        let held: Vec<(u64, u64)> =
            bins.iter().flat_map(|bins| held_by(&memory, bins).unwrap()).map(|held| (held.addr, held.class)).collect();
        let class = CLASS as u64;
        assert_eq!(held, [(0x333, class), (0x111, class), (0x222, class)], "from the second thread of the ring on");
    }

    /// On a kernel with large pages the first thread's data lie in the dynamic linker's data, a mapping of its file.
    #[test]
    fn a_thread_whose_data_lie_in_a_mapped_file_is_found() {
        let maps =
            Maps::parse(b"7f1000000000-7f1001000000 rw-p 00000000 08:01 7 /lib/ld.so\n7f2000000000-7f2000001000 rw-p 00000000 00:00 0\n");
        let mut memory = Fixture::with_maps(maps);
        threads(&mut memory, &[&[0x111, 0x222]]);
        memory.write_word(0x7f20_0000_0018, thread(0));
        let data = Data::read(&memory, 0x7f20_0000_0000..0x7f20_0000_1000);
        let held = held_by_threads(&memory, &thread_ranges(&memory.maps().unwrap()), &data).unwrap();
        assert_eq!(held.iter().map(|one| one.addr).collect::<Vec<_>>(), [0x111, 0x222]);
    }

    #[test]
    fn a_ring_that_does_not_close_and_a_torn_bin_give_no_answer() {
        let mut memory = fixture();
        threads(&mut memory, &[&[], &[]]);
        let offsets = offsets_of(&memory, thread(0)).unwrap();
        memory.write_word(thread(1) + CACHE + 8 + (BIN_BYTES * CLASS) as u64, 77);
        let bins = ring(&memory, thread(0), offsets).unwrap();
        assert!(held_of(&memory, &bins, CLASS as u64).is_none());
        assert!(bins.iter().any(|bins| held_by(&memory, bins).is_none()), "nor what the thread holds");
        memory.write_word(thread(1) + LINK, thread(1));
        assert!(ring(&memory, thread(0), offsets).is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..5000), at in 0..64u64) {
            let mut memory = fixture();
            threads(&mut memory, &[&[1], &[2]]);
            memory.write(thread(0) + 8 * at, &bytes);
            if let Some(offsets) = offsets_of(&memory, thread(0)) {
                let bins = ring(&memory, thread(0), offsets).unwrap_or_default();
                let _ = (held_of(&memory, &bins, CLASS as u64), bins.iter().filter_map(|bins| held_by(&memory, bins)).count());
            }
        }
    }
}
