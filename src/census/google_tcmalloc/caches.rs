//! Objects that are free for the program and in use for their spans: those in the slabs of the CPUs, in the caches of threads, and in the
//! transfer caches.
//!
//! A process has slabs where it could register restartable sequences itself, otherwise caches of threads (with glibc 2.35 and later, unless
//! `GLIBC_TUNABLES=glibc.pthread.rseq=0`).
//!
//! Slabs (tcmalloc/internal/percpu_tcmalloc.h since 2024-03): a word of the library's data is their address, with log2 of a slab's bytes in
//! the lowest byte. A CPU's slab has a header for each size class, {current, end}: 16 bits each, in words from its start; behind the headers
//! lie the classes' objects, each class behind a word that is its own address with the lowest bit set. The objects of a class reach from that
//! word to `current`, as `Pop` sees it.
//!
//! Caches of threads (`ThreadCache`, tcmalloc/thread_cache.h): a list for each size class {first object, length, low-water mark, maximum,
//! overages}, linked by the objects' first words, then {size, maximum, thread, flag, next, prev}.

use std::collections::{BTreeSet, HashMap};

use super::super::memory::{Memory, Piece, is_user_address, word_at, word16_at, word32_at};
use super::super::objects::{Data, read_present};
use super::classes::Classes;
use super::page_map::Entries;

/// log2 of a slab's bytes (`kInitialBasePerCpuShift` to `kMaxBasePerCpuShift`, and one more for NUMA nodes and for wide slabs).
const SHIFTS: std::ops::RangeInclusive<u64> = 12..=20;
/// CPUs: what Linux has at most, and slabs that are no longer used.
const CPUS_MAX: u64 = 1 << 14;
/// Words of the data that are tried as those of slabs, and as addresses of a thread's cache. The rest is counted.
const SLABS_TRIED_MAX: usize = 1024;
const CACHES_TRIED_MAX: usize = 1 << 16;
/// Caches of threads.
const CACHES_MAX: usize = 1 << 16;
/// Longest list of a thread's cache that is believed (`kMaxDynamicFreeListLength` is 8192).
const LENGTH_MAX: u32 = 1 << 15;
/// Objects in all caches: a quarter of a second's reading.
const OBJECTS_MAX: usize = 1 << 21;
/// Read at a time.
const READ_BYTES: u64 = 4096;
/// Bytes of a list's record.
const LIST_BYTES: usize = 24;
/// Times that a list is followed whose length does not fit: the thread was changing it.
const TRIES: usize = 3;

/// The objects in the caches of a process.
#[derive(Debug, Default)]
pub struct Caches {
    /// Their addresses, in order.
    pub objects: Vec<u64>,
    /// Bytes in lists that were changing while they were followed, or beyond the limit: it is not known which blocks they are.
    pub lost_bytes: u64,
    /// Such lists.
    pub torn_lists: u64,
    /// Slabs and caches of threads.
    pub count: u64,
    /// Words that may lead to further ones, and caches, left out because there were too many: objects in them seem live.
    pub left_out: u64,
}

/// What the caches belong to.
#[derive(Clone, Copy)]
pub struct Heap<'a> {
    /// The process's memory.
    pub memory: &'a dyn Memory,
    /// The library's data.
    pub data: &'a Data,
    /// The size classes.
    pub classes: &'a Classes,
    /// The spans.
    pub entries: &'a Entries,
}

/// Reads all caches. `is_mapped`: whether an address is in anonymous memory, and how far that goes. `None` if they are not understood.
#[must_use]
pub fn read(heap: Heap<'_>, end_of: impl Fn(u64) -> Option<u64>) -> Option<Caches> {
    let mut caches = Caches::default();
    heap.slabs(&mut caches, &end_of);
    heap.threads(&mut caches, &end_of);
    for cache in heap.classes.transfer_caches(heap.memory, |addr| end_of(addr).is_some())? {
        let bytes = heap.memory.bytes(cache.slots, usize::try_from(8 * cache.used).ok()?).unwrap_or_default();
        let objects: Vec<u64> = bytes.chunks_exact(8).map(|word| word_at(word, 0)).collect();
        caches.add(&heap, cache.class, &objects, cache.used);
    }
    caches.objects.sort_unstable();
    caches.objects.dedup();
    // Every process that allocated has one.
    (caches.count > 0).then_some(caches)
}

impl Caches {
    /// Adds those of a class's objects that are objects of it; `expected` is how many there should be.
    fn add(&mut self, heap: &Heap<'_>, class: u16, objects: &[u64], expected: u64) {
        let room = OBJECTS_MAX.saturating_sub(self.objects.len());
        let before = self.objects.len();
        self.objects.extend(objects.iter().filter(|&&object| heap.is_object(object, class)).take(room));
        let lost = expected.saturating_sub((self.objects.len() - before) as u64);
        if lost > 0 {
            self.torn_lists += 1;
            self.lost_bytes = self.lost_bytes.saturating_add(lost.saturating_mul(heap.classes.get(class).map_or(0, |class| class.bytes)));
        }
    }
}

impl Heap<'_> {
    /// Whether an object of a class begins at an address.
    fn is_object(&self, addr: u64, class: u16) -> bool {
        let Some(entry) = self.entries.of(addr).filter(|entry| entry.class == class) else { return false };
        self.classes.get(class).is_some_and(|class| {
            let at = addr - entry.start;
            at.is_multiple_of(class.bytes) && at / class.bytes < class.objects
        })
    }

    /// The slabs of all CPUs.
    fn slabs(&self, caches: &mut Caches, end_of: &impl Fn(u64) -> Option<u64>) {
        let words: BTreeSet<u64> = self.data.words().map(|(_, word)| word).filter(|word| SHIFTS.contains(&(word & 0xfff))).collect();
        let slabs = words.into_iter().filter_map(|word| {
            let (start, bytes) = (word & !0xfff, 1u64 << (word & 0xff));
            let end = end_of(start)?.min(start.checked_add(bytes * CPUS_MAX)?);
            Some((start, bytes, end))
        });
        for (start, bytes, end) in limited(slabs, SLABS_TRIED_MAX, &mut caches.left_out) {
            let Ok(runs) = self.memory.page_runs(start..end) else { continue };
            let starts: BTreeSet<u64> = runs
                .within(start..end)
                .filter(|run| run.state.present)
                .flat_map(|run| {
                    let first = start + (run.start - start).next_multiple_of(bytes);
                    (first..run.end).step_by(bytes as usize)
                })
                .take(CPUS_MAX as usize)
                .filter(|slab| slab + bytes <= end)
                .collect();
            starts.into_iter().for_each(|slab| self.slab(slab, bytes, caches));
        }
    }

    /// The objects in a CPU's slab, if it is one.
    fn slab(&self, start: u64, bytes: u64, caches: &mut Caches) {
        // The first mark is behind the headers.
        let first = start + (4 * self.classes.list.len() as u64).next_multiple_of(8);
        if self.memory.word(first) != Some(first | 1) {
            return;
        }
        let slab = read_present(self.memory, start..start + bytes);
        let words = slab.len() / 8;
        let headers = (1u16..).zip(self.classes.list.iter().skip(1)).filter(|(_, class)| class.bytes > 0).filter_map(|(number, _)| {
            let at = 4 * usize::from(number);
            let (current, end) = (word16_at(&slab, at), word16_at(&slab, at + 2));
            (current > 0).then_some((number, usize::from(current), current <= end && usize::from(end) <= words))
        });
        let headers: Vec<(u16, usize, bool)> = headers.collect();
        let torn = headers.iter().filter(|(.., is_sound)| !is_sound).count();
        if 2 * torn > headers.len() {
            // A place within a slab of another size, which has marks too.
            return;
        }
        caches.count += 1;
        caches.torn_lists += torn as u64;
        for (number, current, _) in headers.into_iter().filter(|(.., is_sound)| *is_sound) {
            let places = (0..current).rev().map(|place| word_at(&slab, 8 * place));
            let objects: Vec<u64> = places.take_while(|word| word & 1 == 0).collect();
            caches.add(self, number, &objects, objects.len() as u64);
        }
    }

    /// The caches of all threads.
    fn threads(&self, caches: &mut Caches, end_of: &impl Fn(u64) -> Option<u64>) {
        let words: BTreeSet<u64> = self.data.words().map(|(_, word)| word).filter(|word| word.is_multiple_of(8)).collect();
        // They lie in tcmalloc's own memory, which is in no span.
        let may_be = |addr: &u64| end_of(*addr).is_some() && self.entries.of(*addr).is_none();
        let mut waiting = limited(words.into_iter().filter(may_be), CACHES_TRIED_MAX, &mut caches.left_out);
        // Most words lead elsewhere: class 0 has no objects, so the second list tells.
        let second = records(self.memory, waiting.iter().map(|addr| addr.saturating_add(LIST_BYTES as u64)), LIST_BYTES);
        let mut second = second.chunks_exact(LIST_BYTES);
        waiting.retain(|_| second.next().is_some_and(is_list));
        let mut known = BTreeSet::new();
        while let Some(addr) = waiting.pop() {
            if known.contains(&addr) {
                continue;
            }
            let Some((record, neighbours)) = self.thread(addr) else { continue };
            if known.len() >= CACHES_MAX {
                caches.left_out += 1;
                continue;
            }
            known.insert(addr);
            caches.count += 1;
            waiting.extend(neighbours.into_iter().filter(may_be));
            for class in 1..self.classes.list.len() {
                let Ok(number) = u16::try_from(class) else { return };
                if word32_at(&record, LIST_BYTES * class + 8) > 0 && self.classes.get(number).is_some() {
                    self.list(addr + (LIST_BYTES * class) as u64, number, caches);
                }
            }
        }
    }

    /// A thread's cache and its neighbours in the list of all, if there is one at this address.
    fn thread(&self, addr: u64) -> Option<(Vec<u8>, [u64; 2])> {
        let lists = LIST_BYTES * self.classes.list.len();
        let record = self.memory.bytes(addr, lists + 48)?;
        // The first word of a deleted cache leads to the next one; class 0 has no objects.
        let is_sound = record.get(LIST_BYTES..lists)?.chunks_exact(LIST_BYTES).all(is_list);
        is_sound.then(|| {
            let neighbours = [word_at(&record, lists + 32), word_at(&record, lists + 40)];
            (record, neighbours)
        })
    }

    /// Follows a list.
    fn list(&self, addr: u64, class: u16, caches: &mut Caches) {
        let (mut longest, mut expected) = (Vec::new(), 0);
        for _ in 0..TRIES {
            let Some(head) = self.memory.bytes(addr, 16) else { break };
            let (mut next, length) = (word_at(&head, 0), word32_at(&head, 8).min(LENGTH_MAX) as usize);
            let mut objects = Vec::with_capacity(length);
            // Objects of a list often lie side by side.
            let mut parts = HashMap::new();
            while objects.len() < length && self.is_object(next, class) {
                objects.push(next);
                let (part, at) = (next & !(READ_BYTES - 1), (next % READ_BYTES) as usize);
                let part = parts.entry(part).or_insert_with(|| self.memory.bytes(part, READ_BYTES as usize).unwrap_or_default());
                next = word_at(part, at);
            }
            expected = length as u64;
            if objects.len() >= longest.len() {
                longest = objects;
            }
            if longest.len() as u64 >= expected {
                break;
            }
        }
        caches.add(self, class, &longest, expected);
    }
}

/// Whether a list's record is one of a thread's cache.
fn is_list(list: &[u8]) -> bool {
    let (first, length, longest) = (word_at(list, 0), word32_at(list, 8), word32_at(list, 16));
    (first == 0 || is_user_address(first) && first.is_multiple_of(8)) && length <= LENGTH_MAX && (1..=LENGTH_MAX).contains(&longest)
}

/// The first `max` of them; the rest is counted.
fn limited<T>(mut all: impl Iterator<Item = T>, max: usize, left_out: &mut u64) -> Vec<T> {
    let first = all.by_ref().take(max).collect();
    *left_out += all.count() as u64;
    first
}

/// Records of the same size at many addresses; zeros for what cannot be read.
#[must_use]
pub fn records(memory: &dyn Memory, addrs: impl Iterator<Item = u64>, bytes: usize) -> Vec<u8> {
    let pieces: Vec<Piece> = addrs.map(|addr| Piece { addr, bytes }).collect();
    let mut out = vec![0u8; pieces.len() * bytes];
    let read = memory.read_pieces(&pieces, &mut out);
    // A record that is not there any more ends a reading: the rest is read one by one.
    for (piece, part) in pieces.iter().zip(out.chunks_exact_mut(bytes)).skip(read / bytes) {
        memory.read(piece.addr, part);
    }
    out
}
