//! Which parts of an address space are heap, kept up to date by mapping events.
//!
//! The heap is the brk area and every private anonymous writable area that contains a known block. The kernel does not say who mapped an
//! area, and allocators other than glibc reserve areas that look like any other; the blocks identify them.
//!
//! An area is *observed* if it was mapped, or first made accessible, during the recording: all blocks ever allocated in it were recorded,
//! so bytes that are not live there are free. In any other area they are unknown (they may have been allocated before), and unknown bytes
//! never count as free.

use std::ops::Range;

use super::ranges::RangeMap;
use crate::units::page_bytes;

/// The kind of a mapping, with regard to the heap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// The area that `brk` moves the end of (`[heap]`).
    Brk,
    /// Private anonymous memory: an arena, a large block, an allocator's reserve, a thread stack, a runtime's own heap.
    Anonymous,
    /// Anything else: files, shared memory, stacks, the vdso.
    NotHeap,
}

/// A mapping from a snapshot of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// Addresses.
    pub range: Range<u64>,
    /// What it is.
    pub kind: RegionKind,
    /// Whether it is writable; inaccessible reservations are address space, not extent.
    pub writable: bool,
}

/// A change of the address space that succeeded (`struct fp_vm`). Addresses and lengths in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmEvent {
    /// A new mapping, over whatever was there.
    Mmap {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// `PROT_*`
        prot: u32,
        /// `MAP_*`
        flags: u32,
    },
    /// A range is no longer mapped.
    Munmap {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
    },
    /// A mapping moved or changed its size.
    Mremap {
        /// Old start.
        old_addr: u64,
        /// Old length.
        old_len: u64,
        /// New start.
        new_addr: u64,
        /// New length.
        new_len: u64,
        /// `MREMAP_*`
        flags: u32,
    },
    /// The break is now here.
    Brk {
        /// Break after the call.
        end: u64,
    },
    /// Advice about a range.
    Madvise {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// `MADV_*`
        advice: u32,
    },
    /// A range's protection changed.
    Mprotect {
        /// Start.
        addr: u64,
        /// Length.
        len: u64,
        /// `PROT_*`
        prot: u32,
    },
}

/// The effect of an event on the space that a heap may use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExtentChange {
    /// Writable brk or anonymous bytes added.
    pub grown_bytes: u64,
    /// Such bytes removed.
    pub shrunk_bytes: u64,
    /// Bytes whose pages were released while the mapping stays (`MADV_DONTNEED`, `MADV_FREE`).
    pub purged_bytes: u64,
}

/// A part of the heap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeapRange {
    /// Addresses.
    pub range: Range<u64>,
    /// Brk or anonymous.
    pub kind: RegionKind,
    /// Whether the bytes outside blocks are free or unknown.
    pub coverage: Coverage,
}

/// Whether the bytes of a heap range outside blocks are free or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// All blocks are known: the other bytes are free.
    Complete,
    /// There may be unknown blocks: the other bytes are unknown.
    Partial,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Region {
    kind: RegionKind,
    writable: bool,
    observed: bool,
}

impl Region {
    fn is_extent(self) -> bool {
        self.writable && self.kind != RegionKind::NotHeap
    }
}

// Linux uapi: asm-generic/mman-common.h, mman.h.
const PROT_WRITE: u32 = 0x2;
const MAP_PRIVATE: u32 = 0x02;
const MAP_ANONYMOUS: u32 = 0x20;
const MAP_GROWSDOWN: u32 = 0x100;
const MAP_STACK: u32 = 0x2_0000;
const MADV_DONTNEED: u32 = 4;
const MADV_FREE: u32 = 8;

/// User space ends here at the latest (five-level page tables).
const ADDRESS_SPACE_END: u64 = 1 << 56;
/// Most mappings kept: the kernel's default limit (`vm.max_map_count`) is 65,530, large databases raise it to some hundred thousand.
const REGIONS_MAX: usize = 1 << 20;

/// The mappings of a process.
#[derive(Debug, Clone, Default)]
pub struct Extents {
    regions: RangeMap<Region>,
    /// The break, rounded up to a page, if it is known.
    brk: Option<u64>,
    refused: u64,
    purged_bytes: u64,
}

impl Extents {
    /// The mappings at the start of a recording: none is observed.
    pub fn new(snapshot: &[Mapping]) -> Self {
        let mut new = Self::default();
        for mapping in snapshot {
            let region = Region { kind: mapping.kind, writable: mapping.writable, observed: false };
            new.put(mapping.range.clone(), region);
            if mapping.kind == RegionKind::Brk {
                new.brk = Some(mapping.range.end);
            }
        }
        new
    }

    /// Applies a later snapshot, after events may have been missed. Observed mappings that still exist stay observed; new ones without an
    /// event are not.
    pub fn resync(&mut self, snapshot: &[Mapping]) {
        let mut new = Self { refused: self.refused, purged_bytes: self.purged_bytes, ..Self::new(snapshot) };
        for (range, old) in self.regions.iter().filter(|(_, old)| old.observed) {
            new.regions.update(range, |_, region| Region { observed: region.kind == old.kind, ..region });
        }
        new.brk = new.brk.or(self.brk);
        *self = new;
    }

    /// Applies an event.
    pub fn apply(&mut self, event: &VmEvent) -> ExtentChange {
        match *event {
            VmEvent::Mmap { addr, len, prot, flags } => {
                let range = pages(addr, len);
                let anonymous = flags & MAP_ANONYMOUS != 0 && flags & MAP_PRIVATE != 0 && flags & (MAP_STACK | MAP_GROWSDOWN) == 0;
                let kind = if anonymous { RegionKind::Anonymous } else { RegionKind::NotHeap };
                let was = self.extent_in(range.clone());
                self.put(range.clone(), Region { kind, writable: prot & PROT_WRITE != 0, observed: true });
                change(was, self.extent_in(range))
            }
            VmEvent::Munmap { addr, len } => self.remove(pages(addr, len)),
            VmEvent::Mremap { old_addr, old_len, new_addr, new_len, .. } => {
                self.mremap(&pages(old_addr, old_len), &pages(new_addr, new_len), &[])
            }
            VmEvent::Brk { end } => self.brk(page_up(end)),
            VmEvent::Madvise { addr, len, advice } => {
                if advice != MADV_DONTNEED && advice != MADV_FREE {
                    return ExtentChange::default();
                }
                let purged_bytes = self.extent_in(pages(addr, len));
                self.purged_bytes = self.purged_bytes.saturating_add(purged_bytes);
                ExtentChange { purged_bytes, ..ExtentChange::default() }
            }
            VmEvent::Mprotect { addr, len, prot } => {
                let (range, writable) = (pages(addr, len), prot & PROT_WRITE != 0);
                let was = self.extent_in(range.clone());
                // A reservation that becomes accessible: nothing in it was allocated before.
                self.regions.update(range.clone(), |_, region| Region {
                    observed: region.observed || writable && !region.writable,
                    writable,
                    ..region
                });
                change(was, self.extent_in(range))
            }
        }
    }

    /// The heap: the brk area, and the anonymous writable ranges in which at least one of these sorted block addresses lies.
    pub fn heap_ranges(&self, block_starts: impl IntoIterator<Item = u64>) -> Vec<HeapRange> {
        let mut starts = block_starts.into_iter().peekable();
        let mut heap = Vec::new();
        for (range, region) in self.regions.iter().filter(|(_, region)| region.is_extent()) {
            while starts.next_if(|&start| start < range.start).is_some() {}
            let holds = starts.peek().is_some_and(|&start| start < range.end);
            if region.kind == RegionKind::Brk || holds {
                let coverage = if region.observed { Coverage::Complete } else { Coverage::Partial };
                heap.push(HeapRange { range, kind: region.kind, coverage });
            }
        }
        heap
    }

    /// Writable brk and anonymous bytes of a range.
    pub fn extent_in(&self, range: Range<u64>) -> u64 {
        let mut bytes = 0;
        let mut addr = range.start;
        if let Some((first, region)) = self.regions.get(range.start) {
            addr = first.end.min(range.end);
            bytes += if region.is_extent() { addr - range.start } else { 0 };
        }
        for (piece, region) in self.regions.range(addr..range.end) {
            bytes += if region.is_extent() { piece.end.min(range.end) - piece.start } else { 0 };
        }
        bytes
    }

    /// The parts of a range that are mapped, by address.
    pub fn mapped_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let first = self.regions.get(range.start).map(|(piece, _)| piece).filter(|piece| piece.start < range.start);
        let others = self.regions.range(range.clone()).map(|(piece, _)| piece);
        first.into_iter().chain(others).map(|piece| piece.start.max(range.start)..piece.end.min(range.end)).collect()
    }

    /// Mappings that were not kept because there were too many.
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Bytes purged by advice so far.
    pub fn purged_bytes(&self) -> u64 {
        self.purged_bytes
    }

    fn put(&mut self, range: Range<u64>, region: Region) {
        // Old mappings in the range are removed in any case.
        self.regions.cut(range.clone(), |_, _| {});
        if self.regions.len() < REGIONS_MAX {
            self.regions.insert(range, region);
        } else {
            self.refused += 1;
        }
    }

    fn remove(&mut self, range: Range<u64>) -> ExtentChange {
        let was = self.extent_in(range.clone());
        self.regions.cut(range, |_, _| {});
        change(was, 0)
    }

    fn brk(&mut self, new: u64) -> ExtentChange {
        // The first break seen only gives the start of the area.
        let old = self.brk.replace(new).unwrap_or(new);
        if new <= old {
            return self.remove(new..old);
        }
        self.put(old..new, Region { kind: RegionKind::Brk, writable: true, observed: true });
        ExtentChange { grown_bytes: new - old, ..ExtentChange::default() }
    }

    /// A mapping moved or changed its size. `others`: parts of its old range that other mappings have meanwhile; they stay.
    pub fn mremap(&mut self, old: &Range<u64>, new: &Range<u64>, others: &[Range<u64>]) -> ExtentChange {
        let mut stay = Vec::new();
        for other in others {
            self.regions.update(other.clone(), |piece, region| {
                stay.push((piece, region));
                region
            });
        }
        let was = self.extent_in(old.clone()) + if old.start == new.start { 0 } else { self.extent_in(new.clone()) };
        let mut moved = Vec::new();
        self.regions.cut(old.clone(), |piece, region| moved.push((piece, region)));
        self.regions.cut(new.clone(), |_, _| {});
        // The kernel moves a single mapping; its tail, if it grows, is like its last byte, and has never held a block.
        let mut end = new.start;
        for (piece, region) in &moved {
            let start = new.start.saturating_add(piece.start - old.start);
            let stop = start.saturating_add(piece.end - piece.start).min(new.end);
            self.put(start.min(stop)..stop, *region);
            end = end.max(stop);
        }
        if let Some((_, last)) = moved.last() {
            self.put(end..new.end, Region { observed: true, ..*last });
        }
        for (piece, region) in stay {
            self.put(piece, region);
        }
        change(was, self.extent_in(new.clone()))
    }
}

fn page_up(addr: u64) -> u64 {
    addr.min(ADDRESS_SPACE_END).next_multiple_of(page_bytes())
}

/// The pages of a range, as the kernel rounds them.
pub fn pages(addr: u64, len: u64) -> Range<u64> {
    let start = addr.min(ADDRESS_SPACE_END) / page_bytes() * page_bytes();
    start..page_up(addr.saturating_add(len)).max(start)
}

fn change(was: u64, is: u64) -> ExtentChange {
    ExtentChange { grown_bytes: is.saturating_sub(was), shrunk_bytes: was.saturating_sub(is), purged_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x7f00_0000_0000;
    const RW: u32 = 3;
    const PRIVATE_ANONYMOUS: u32 = MAP_PRIVATE | MAP_ANONYMOUS;

    fn mmap(addr: u64, len: u64, prot: u32) -> VmEvent {
        VmEvent::Mmap { addr, len, prot, flags: PRIVATE_ANONYMOUS }
    }

    fn snapshot() -> Vec<Mapping> {
        vec![
            Mapping { range: 0x1000..0x3000, kind: RegionKind::NotHeap, writable: true },
            Mapping { range: 0x10000..0x20000, kind: RegionKind::Brk, writable: true },
            Mapping { range: BASE..BASE + 0x4000, kind: RegionKind::Anonymous, writable: true },
        ]
    }

    #[test]
    fn mappings_in_a_range_are_returned_as_pieces_cut_at_its_ends() {
        let mut extents = Extents::default();
        for at in [0, 0x3000] {
            extents.apply(&mmap(BASE + at, 0x2000, RW));
        }
        let (begin, end) = (BASE + 0x1000, BASE + 0x4000);
        assert_eq!(extents.mapped_in(begin..end), [begin..BASE + 0x2000, BASE + 0x3000..end]);
        assert!(extents.mapped_in(BASE + 0x2000..BASE + 0x3000).is_empty());
    }

    #[test]
    fn heap_is_the_brk_area_and_the_anonymous_areas_that_hold_blocks() {
        let mut extents = Extents::new(&snapshot());
        extents.apply(&mmap(BASE + 0x10000, 0x2000, RW));
        let heap = extents.heap_ranges([0x1800, BASE + 0x10010]);
        assert_eq!(
            heap,
            [
                HeapRange { range: 0x10000..0x20000, kind: RegionKind::Brk, coverage: Coverage::Partial },
                HeapRange { range: BASE + 0x10000..BASE + 0x12000, kind: RegionKind::Anonymous, coverage: Coverage::Complete },
            ]
        );
    }

    #[test]
    fn the_brk_area_is_known_from_where_the_recording_saw_it_grow() {
        let mut extents = Extents::new(&snapshot());
        let change = extents.apply(&VmEvent::Brk { end: 0x24000 });
        assert_eq!(change.grown_bytes, 0x4000);
        let heap = extents.heap_ranges([]);
        assert_eq!(heap.len(), 2);
        assert_eq!((heap[0].coverage, heap[1].coverage), (Coverage::Partial, Coverage::Complete));
        assert_eq!(heap[1].range, 0x20000..0x24000);
        let change = extents.apply(&VmEvent::Brk { end: 0x18000 });
        assert_eq!(change.shrunk_bytes, 0xc000);
        assert_eq!(extents.heap_ranges([])[0].range, 0x10000..0x18000);
    }

    #[test]
    fn without_a_heap_the_first_break_gives_its_start() {
        let mut extents = Extents::new(&[]);
        assert_eq!(extents.apply(&VmEvent::Brk { end: 0x50000 }), ExtentChange::default());
        assert_eq!(extents.apply(&VmEvent::Brk { end: 0x71000 }).grown_bytes, 0x21000);
        assert_eq!(extents.heap_ranges([])[0].range, 0x50000..0x71000);
    }

    #[test]
    fn a_reserve_counts_from_the_moment_it_can_be_written() {
        let mut extents = Extents::new(&[]);
        assert_eq!(extents.apply(&mmap(BASE, 64 << 20, 0)), ExtentChange::default());
        let change = extents.apply(&VmEvent::Mprotect { addr: BASE, len: 0x21000, prot: RW });
        assert_eq!(change.grown_bytes, 0x21000);
        assert_eq!(extents.extent_in(0..u64::MAX), 0x21000);
        let change = extents.apply(&VmEvent::Mprotect { addr: BASE + 0x11000, len: 0x10000, prot: 0 });
        assert_eq!(change.shrunk_bytes, 0x10000);
    }

    #[test]
    fn a_moved_block_keeps_what_is_known_and_its_new_tail_is_observed() {
        let mut extents = Extents::new(&snapshot());
        let change =
            extents.apply(&VmEvent::Mremap { old_addr: BASE, old_len: 0x4000, new_addr: BASE + 0x100000, new_len: 0x6000, flags: 1 });
        assert_eq!(change, ExtentChange { grown_bytes: 0x2000, ..ExtentChange::default() });
        assert_eq!(extents.extent_in(BASE..BASE + 0x4000), 0);
        let heap = extents.heap_ranges([BASE + 0x100010, BASE + 0x104000]);
        assert_eq!(heap[1].range, BASE + 0x100000..BASE + 0x104000);
        assert_eq!(heap[1].coverage, Coverage::Partial);
        assert_eq!(heap[2].coverage, Coverage::Complete);
    }

    #[test]
    fn thread_stacks_and_shared_memory_are_not_heap() {
        let mut extents = Extents::new(&[]);
        extents.apply(&VmEvent::Mmap { addr: BASE, len: 0x10000, prot: RW, flags: PRIVATE_ANONYMOUS | MAP_STACK });
        extents.apply(&VmEvent::Mmap { addr: BASE + 0x20000, len: 0x10000, prot: RW, flags: MAP_ANONYMOUS | 1 });
        assert_eq!(extents.heap_ranges([BASE + 16, BASE + 0x20010]), []);
    }

    #[test]
    fn a_snapshot_after_a_loss_adds_missed_mappings_as_not_observed() {
        let mut extents = Extents::new(&snapshot());
        extents.apply(&mmap(BASE + 0x10000, 0x1000, RW));
        let mut later = snapshot();
        later.push(Mapping { range: BASE + 0x10000..BASE + 0x12000, kind: RegionKind::Anonymous, writable: true });
        extents.resync(&later);
        let heap = extents.heap_ranges([BASE + 0x10000, BASE + 0x11000]);
        assert_eq!(heap[1].coverage, Coverage::Complete);
        assert_eq!(heap[2].coverage, Coverage::Partial);
    }

    #[test]
    fn invalid_events_neither_panic_nor_are_kept() {
        let mut extents = Extents::new(&snapshot());
        for event in [
            VmEvent::Munmap { addr: u64::MAX, len: u64::MAX },
            VmEvent::Mremap { old_addr: u64::MAX - 1, old_len: u64::MAX, new_addr: u64::MAX, new_len: 1, flags: 1 },
            VmEvent::Mremap { old_addr: BASE, old_len: 0x4000, new_addr: u64::MAX - 5, new_len: u64::MAX, flags: 1 },
            VmEvent::Brk { end: u64::MAX },
            VmEvent::Brk { end: 0 },
            VmEvent::Mprotect { addr: 1, len: u64::MAX, prot: 0 },
            VmEvent::Madvise { addr: u64::MAX, len: 2, advice: MADV_FREE },
        ] {
            extents.apply(&event);
        }
        assert_eq!(extents.extent_in(0..u64::MAX), 0);
    }
}
