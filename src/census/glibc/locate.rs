//! Finds glibc's main arena, its ring of arenas and `mp_` by their structure, without symbols; their offsets are cached by build id and
//! verified on each use.

use std::rc::Rc;

use super::super::layout_cache::ByBuildId;
use super::super::memory::{Memory, USER_END, word_at};
use super::super::objects::{Data, ObjectData, ObjectRef, Objects};
use super::layout::{
    Arena, BINS, END_AFTER_BINS, HEAP_BYTES_MAX_DEFAULT, Layout, MallocPar, NEXT_AFTER_BINS, PAR_BYTES, PAR_SHAPES, TOP_BEFORE_BINS,
    is_chunk_address, is_link,
};
use crate::heap::residency::page_bytes;
use crate::process::elf::BuildId;
use crate::process::{Backing, Maps};

/// Most arenas followed: glibc creates at most eight per core by default; 4096 is 512 cores.
const ARENAS_MAX: usize = 4096;
/// Bins that must be empty (their heads refer to themselves) for a candidate to be accepted as `bins` immediately. Other data has none.
const EMPTY_BINS_MIN: usize = 4;
/// With fewer empty ones: bins whose first or last chunk points back at its head. A busy, fragmented arena had fewer than 4 empty.
const CONFIRMED_BINS_MIN: usize = 16;
/// LayoutCache of one object that are confirmed by reading where their bins lead, at most 254 words each. What lies around the bins turns
/// down all but the true one in every program seen; more than a few are a forgery.
const PLACES_READ_MAX: usize = 16;
/// Threads attached to one arena: the kernel has no more (PID_MAX_LIMIT).
const ATTACHED_THREADS_MAX: u64 = 1 << 22;
/// Distances from an arena to its bins that are tried.
const BINS_OFFSETS: std::ops::RangeInclusive<u64> = 16..=512;
/// Heads that are checked first, spread over the array, to reject most candidates early.
const FIRST_LOOKS: [usize; 3] = [BINS - 1, 0, 64];

/// What was found.
#[derive(Debug, Clone)]
pub struct Located {
    /// The object that owns the arena.
    pub object: ObjectData,
    /// Its data, as read when it was searched.
    pub data: Rc<Data>,
    /// The object's build id.
    pub build_id: Option<BuildId>,
    /// What differs between releases.
    pub layout: Layout,
    /// The arenas' addresses; main_arena first.
    pub arenas: Vec<u64>,
    /// `mp_`, if it was found.
    pub par: Option<MallocPar>,
}

/// Offsets of the structures in an object's data, from its mapping's base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    bins: u64,
    par: Option<u64>,
    tcache_key: Option<u64>,
}

/// Offsets found before, shared by all processes of a machine.
#[derive(Debug, Default)]
pub struct LayoutCache {
    by_build_id: ByBuildId<Place>,
}

impl LayoutCache {
    /// Number of objects cached.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_build_id.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_build_id.is_empty()
    }

    /// The word that marks chunks in thread caches, if its offset is known from another process of the same build. It is random, so a word
    /// that could be an address or a small number is not accepted.
    #[must_use]
    pub fn tcache_key(&self, memory: &dyn Memory, located: &Located) -> Option<u64> {
        let place = self.by_build_id.get(located.build_id.as_ref())?;
        memory.word(located.object.base.wrapping_add(place.tcache_key?)).filter(|&key| key >> 47 != 0)
    }

    /// Stores the offset of the word `key`, if it is in the object's data.
    pub fn learn_tcache_key(&mut self, located: &Located, key: u64) {
        let Some(place) = self.by_build_id.get(located.build_id.as_ref()).filter(|place| place.tcache_key.is_none()) else { return };
        let Some(index) = located.data.chunks_exact(8).position(|word| word_at(word, 0) == key) else { return };
        let addr = located.object.range.start + 8 * index as u64;
        let tcache_key = Some(addr.wrapping_sub(located.object.base));
        self.by_build_id.remember(located.build_id.as_ref(), Place { tcache_key, ..place });
    }
}

/// Finds the main arena. `None`: no loaded object has one that is in use (another allocator serves malloc, or none).
#[must_use]
pub fn locate(memory: &dyn Memory, maps: &Maps, objects: &Objects<'_>, layouts: &mut LayoutCache) -> Option<Located> {
    for one in objects.iter() {
        let build_id = one.build_id();
        if let Some(place) = layouts.by_build_id.get(build_id.as_ref())
            && let Some(found) = verify(memory, maps, one, place)
        {
            return Some(found);
        }
        let (object, data) = (one.object(), one.data());
        let Some((bins, layout, arenas)) = search(memory, object.range.start, &data) else { continue };
        let par = find_par(maps, object.range.start, &data, bins.wrapping_sub(layout.bins_offset));
        let from_base = |addr: u64| addr.wrapping_sub(object.base);
        let place = Place { bins: from_base(bins), par: par.map(|par| from_base(par.addr)), tcache_key: None };
        layouts.by_build_id.remember(build_id.as_ref(), place);
        return Some(Located { object: object.clone(), data, build_id, layout, arenas, par });
    }
    None
}

/// Verifies cached offsets against this process.
fn verify(memory: &dyn Memory, maps: &Maps, one: ObjectRef<'_, '_>, place: Place) -> Option<Located> {
    let object = one.object();
    let bins = object.base.wrapping_add(place.bins);
    let before = TOP_BEFORE_BINS as usize;
    let bytes = memory.bytes(bins.checked_sub(TOP_BEFORE_BINS)?, before + END_AFTER_BINS as usize)?;
    match look_at_bins(bins, &bytes, before) {
        BinsCheck::Bins => {}
        BinsCheck::Perhaps { empty } if are_bins_confirmed(memory, bins, &bytes, before, empty) => {}
        BinsCheck::Perhaps { .. } | BinsCheck::Other => return None,
    }
    let (layout, arenas) = close_ring(memory, bins, word_at(&bytes, before + NEXT_AFTER_BINS as usize))?;
    let par = place.par.and_then(|distance| {
        let addr = object.base.wrapping_add(distance);
        let bytes = memory.bytes(addr, PAR_BYTES)?;
        (0..PAR_SHAPES.len()).find_map(|shape| MallocPar::parse(shape, addr, &bytes, |base| is_heap_start(maps, base)))
    });
    if par.is_none() && place.par.is_some() {
        return None;
    }
    Some(Located { object: object.clone(), data: one.data(), build_id: one.build_id(), layout, arenas, par })
}

/// Searches an object's data. All but a handful of candidates are rejected with data that was read already.
fn search(memory: &dyn Memory, start: u64, data: &[u8]) -> Option<(u64, Layout, Vec<u64>)> {
    let last = data.len().checked_sub(END_AFTER_BINS as usize)?;
    let mut places_read = 0;
    for at in (TOP_BEFORE_BINS as usize..=last).step_by(8) {
        let bins = start + at as u64;
        match look_at_bins(bins, data, at) {
            BinsCheck::Bins => {}
            BinsCheck::Perhaps { empty } if places_read < PLACES_READ_MAX => {
                places_read += 1;
                if !are_bins_confirmed(memory, bins, data, at, empty) {
                    continue;
                }
            }
            BinsCheck::Perhaps { .. } | BinsCheck::Other => continue,
        }
        if let Some((layout, arenas)) = close_ring(memory, bins, word_at(data, at + NEXT_AFTER_BINS as usize)) {
            return Some((bins, layout, arenas));
        }
    }
    None
}

#[derive(PartialEq, Eq)]
enum Head {
    Empty,
    Linked,
    Wrong,
}

/// The state of the pair of list heads number `bin`.
fn head(bins: u64, data: &[u8], at: usize, bin: usize) -> Head {
    let own = bins.wrapping_add(16 * bin as u64).wrapping_sub(16);
    let (first, last) = (word_at(data, at + 16 * bin), word_at(data, at + 16 * bin + 8));
    if first == own && last == own {
        Head::Empty
    } else if is_link(first) && is_link(last) {
        Head::Linked
    } else {
        Head::Wrong
    }
}

/// What candidate bins may be, as far as the data already read shows.
enum BinsCheck {
    /// Enough empty bins refer to themselves.
    Bins,
    /// Everything fits, but few bins are empty: the chunks of the others must be read, to see whether they point back.
    Perhaps {
        /// The empty ones.
        empty: usize,
    },
    /// Something else.
    Other,
}

/// Checks `data[at..]`, at address `bins`, as an arena's bins, with the fields before and after them.
fn look_at_bins(bins: u64, data: &[u8], at: usize) -> BinsCheck {
    if FIRST_LOOKS.iter().any(|&bin| head(bins, data, at, bin) == Head::Wrong) || !has_arena_around(data, at) {
        return BinsCheck::Other;
    }
    let mut empty = 0;
    for bin in 0..BINS {
        match head(bins, data, at, bin) {
            Head::Empty => empty += 1,
            Head::Linked => {}
            Head::Wrong => return BinsCheck::Other,
        }
    }
    // An arena with chunks has got memory from the system; a table of pointers is usually followed by zeros.
    let system_bytes = word_at(data, at + NEXT_AFTER_BINS as usize + 24);
    match empty {
        EMPTY_BINS_MIN.. => BinsCheck::Bins,
        _ if system_bytes >= page_bytes() => BinsCheck::Perhaps { empty },
        _ => BinsCheck::Other,
    }
}

/// Whether the words around the bins can be the rest of an arena: top and the last remainder before them; next, next_free, the number of
/// threads and the bytes from the system after them. Long tables of pointers, which look like linked bins (redis keeps 10,000 shared
/// integers, OpenSSL its relocated constants), have pointers there too.
fn has_arena_around(data: &[u8], at: usize) -> bool {
    let (Some(before), after) = (at.checked_sub(TOP_BEFORE_BINS as usize), at + NEXT_AFTER_BINS as usize) else { return false };
    if data.len() < at + END_AFTER_BINS as usize {
        return false;
    }
    let is_link_or_none = |at: usize| matches!(word_at(data, at), 0) || is_link(word_at(data, at));
    is_link(word_at(data, before))
        && is_link_or_none(before + 8)
        && is_link(word_at(data, after))
        && is_link_or_none(after + 8)
        && word_at(data, after + 16) <= ATTACHED_THREADS_MAX
        && word_at(data, after + 24) < USER_END
        && word_at(data, after + 32) < USER_END
}

/// Whether enough bins are empty or confirmed: bk of the first chunk and fd of the last one point to the bin's head.
fn are_bins_confirmed(memory: &dyn Memory, bins: u64, data: &[u8], at: usize, empty: usize) -> bool {
    let mut confirmed = empty;
    for bin in 0..BINS {
        let own = bins.wrapping_add(16 * bin as u64).wrapping_sub(16);
        let (first, last) = (word_at(data, at + 16 * bin), word_at(data, at + 16 * bin + 8));
        if first != own && (memory.word(first.wrapping_add(24)) == Some(own) || memory.word(last.wrapping_add(16)) == Some(own)) {
            confirmed += 1;
        }
        if confirmed >= CONFIRMED_BINS_MIN {
            return true;
        }
    }
    false
}

/// Follows `next` from arena to arena until the ring closes, which gives the distance of an arena's start from its bins.
fn close_ring(memory: &dyn Memory, bins: u64, next: u64) -> Option<(Layout, Vec<u64>)> {
    // A ring of one: the arena's own address.
    if let Some(distance) = bins.checked_sub(next).filter(|distance| BINS_OFFSETS.contains(distance) && distance % 8 == 0) {
        return Some((Layout::with_bins_at(distance), vec![next]));
    }
    BINS_OFFSETS.step_by(8).find_map(|distance| follow_ring(memory, bins.checked_sub(distance)?, distance, next))
}

fn follow_ring(memory: &dyn Memory, main: u64, distance: u64, first: u64) -> Option<(Layout, Vec<u64>)> {
    let mut arenas = vec![main];
    let mut arena = first;
    while arenas.len() <= ARENAS_MAX {
        if arena == main {
            let mut layout = Layout::with_bins_at(distance);
            // A non-main arena lies right behind the heap_info of its first heap, which is aligned to far more than a page.
            layout.heap_info_bytes = arenas.get(1).map_or(0, |arena| arena & 4095);
            return Some((layout, arenas));
        }
        if !is_chunk_address(arena) || !memory.word(arena.wrapping_add(distance)).is_some_and(is_link) {
            return None;
        }
        arenas.push(arena);
        arena = memory.word(arena.wrapping_add(distance).wrapping_add(NEXT_AFTER_BINS))?;
    }
    None
}

/// Looks for `mp_` in the object's data: where compilers for x86-64 align it, then also where those for arm64 may have put it.
fn find_par(maps: &Maps, start: u64, data: &[u8], main_arena: u64) -> Option<MallocPar> {
    [32, 8].into_iter().find_map(|alignment| find_aligned_par(maps, start, data, main_arena, alignment))
}

/// It lies some 2.3 KiB before main_arena; where two layouts fit, one with a brk heap wins, then the nearer one.
fn find_aligned_par(maps: &Maps, start: u64, data: &[u8], main_arena: u64, alignment: usize) -> Option<MallocPar> {
    let first = usize::try_from(start.next_multiple_of(alignment as u64) - start).unwrap_or(0);
    let mut best: Option<MallocPar> = None;
    for at in (first..data.len().saturating_sub(PAR_BYTES)).step_by(alignment) {
        let Some(bytes) = data.get(at..at + PAR_BYTES) else { break };
        // A cheap check first: arena_test is a small number that is never 0.
        if !(1..=64).contains(&word_at(bytes, 24)) {
            continue;
        }
        let addr = start + at as u64;
        let rank = |par: &MallocPar| (par.sbrk_base == 0, par.addr.abs_diff(main_arena));
        for shape in 0..PAR_SHAPES.len() {
            if let Some(par) = MallocPar::parse(shape, addr, bytes, |base| is_heap_start(maps, base))
                && best.as_ref().is_none_or(|old| rank(&par) < rank(old))
            {
                best = Some(par);
            }
        }
    }
    best
}

/// A static program takes its thread-local data from brk before malloc does; libraries with caches of their own have some of it.
const STATIC_TLS_BYTES_MAX: u64 = 1 << 20;

/// Whether a brk heap can begin at `addr`: at most [`STATIC_TLS_BYTES_MAX`] into the first `[heap]` mapping. Core files
/// have no such names: there it is any anonymous one.
fn is_heap_start(maps: &Maps, addr: u64) -> bool {
    if addr == 0 {
        return false;
    }
    let is_heap = |backing: &Backing| matches!(backing, Backing::Named(name) if name == "[heap]");
    if let Some(heap) = maps.mappings.iter().find(|mapping| is_heap(&mapping.backing)) {
        return (heap.start.0..heap.start.0.saturating_add(STATIC_TLS_BYTES_MAX)).contains(&addr);
    }
    maps.mappings
        .iter()
        .any(|mapping| mapping.permissions.write && mapping.path().is_none() && (mapping.start.0..mapping.start.0 + 4096).contains(&addr))
}

/// Reads an arena and, for a non-main one, its chain of heaps.
#[must_use]
pub fn read_arena(memory: &dyn Memory, layout: &mut Layout, addr: u64, is_main: bool, huge_page_bytes: u64) -> Option<Arena> {
    let bytes = memory.bytes(addr, usize::try_from(layout.state_bytes()).ok()?)?;
    let mut arena = Arena::parse(layout, addr, is_main, &bytes);
    if arena.top != arena.bin_head(layout, 0) {
        arena.top_bytes = memory.word(arena.top.wrapping_add(8)).map_or(0, |size| size & !super::layout::FLAGS);
    }
    if !is_main {
        arena.heaps = read_heaps(memory, layout, &arena, huge_page_bytes);
    }
    Some(arena)
}

/// Heaps of one arena that are followed: 64 MiB each, so 4 TiB.
const HEAPS_MAX: usize = 65536;
/// Sizes that HEAP_MAX_SIZE can have: 64 MiB, or four huge pages (glibc.malloc.hugetlb=2), or what a distribution built.
const HEAP_SIZES: [u64; 9] = [64 << 20, 8 << 20, 1 << 20, 2 << 20, 4 << 30, 128 << 20, 32 << 20, 16 << 20, 4 << 20];

/// `heap_info` is {ar_ptr, prev, size, mprotect_size, …} at the start of each heap, which is aligned to the largest size of a heap: found
/// from top by trying the sizes until one leads to a heap_info of this arena.
fn read_heaps(memory: &dyn Memory, layout: &mut Layout, arena: &Arena, huge_page_bytes: u64) -> Vec<(u64, u64)> {
    let info = |heap: u64| -> Option<(u64, u64)> {
        let bytes = memory.bytes(heap, 32)?;
        let prev = word_at(&bytes, 8);
        (word_at(&bytes, 0) == arena.addr && (prev == 0 || is_chunk_address(prev))).then(|| (prev, word_at(&bytes, 16)))
    };
    // The size that huge pages would give comes first: among smaller heaps, one may happen to be aligned to the usual 64 MiB as well.
    let sizes = [huge_page_bytes.saturating_mul(4), layout.heap_bytes_max].into_iter().chain(HEAP_SIZES);
    let mut heap = 0;
    for size in sizes.filter(|size| size.is_power_of_two()) {
        let candidate = arena.top & !(size - 1);
        if info(candidate).is_some_and(|(_, bytes)| bytes <= size) {
            layout.heap_bytes_max = size;
            heap = candidate;
            break;
        }
    }
    let mut heaps = Vec::new();
    while heap != 0 && heaps.len() < HEAPS_MAX {
        let Some((prev, bytes)) = info(heap) else { break };
        if bytes > layout.heap_bytes_max.max(HEAP_BYTES_MAX_DEFAULT) || heaps.iter().rev().take(8).any(|&(start, _)| start == heap) {
            break;
        }
        heaps.push((heap, heap.saturating_add(bytes)));
        heap = prev;
    }
    heaps.reverse();
    heaps
}
