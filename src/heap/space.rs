//! A process's mappings, from records of calls in the order in which the calls returned, which is not always that in which the kernel
//! carried them out.

use std::ops::Range;

use super::extents::{ExtentChange, Extents, Mapping, VmEvent, pages};
use super::overlaid::Overlaid;

// Linux uapi: asm-generic/mman-common.h, linux/mman.h. The caller chose the address, and existing mappings are replaced.
const MAP_FIXED: u32 = 0x10;
const MREMAP_FIXED: u32 = 2;

/// The mappings of a process.
#[derive(Debug, Clone, Default)]
pub struct AddressSpace {
    /// The mappings, without order.
    pub extents: Extents,
    /// Mappings that were replaced and whose end is still to be recorded.
    overlaid: Overlaid,
}

/// What an event did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Applied {
    /// To the space that a heap may use.
    pub extent: ExtentChange,
    /// Ranges whose mapping ended or moved away: no block that was allocated at these addresses before the event exists.
    pub unmapped: Vec<Range<u64>>,
}

impl AddressSpace {
    /// The mappings at the start of a recording.
    pub fn new(snapshot: &[Mapping]) -> Self {
        Self { extents: Extents::new(snapshot), overlaid: Overlaid::default() }
    }

    /// Applies an event that was recorded at `time_ns` (CLOCK_MONOTONIC).
    pub fn apply(&mut self, event: &VmEvent, time_ns: u64) -> Applied {
        match *event {
            VmEvent::Mmap { addr, len, flags, .. } if flags & MAP_FIXED == 0 => {
                let unmapped = self.chosen(pages(addr, len), time_ns);
                Applied { extent: self.extents.apply(event), unmapped }
            }
            VmEvent::Munmap { addr, len } => self.munmap(pages(addr, len), time_ns),
            VmEvent::Mremap { old_addr, old_len, new_addr, new_len, flags } => {
                let (old, new) = (pages(old_addr, old_len), pages(new_addr, new_len));
                let entered = if flags & MREMAP_FIXED == 0 { outside(&new, &old).to_vec() } else { Vec::new() };
                let mut unmapped: Vec<Range<u64>> = entered.into_iter().flat_map(|part| self.chosen(part, time_ns)).collect();
                let left = outside(&old, &new).into_iter().flat_map(|part| self.overlaid.ended(part, time_ns));
                let (others, ended): (Vec<_>, Vec<_>) = left.partition(|part| part.mapped_anew);
                unmapped.extend(ended.into_iter().map(|part| part.range).filter(|range| !range.is_empty()));
                let others: Vec<Range<u64>> = others.into_iter().map(|part| part.range).collect();
                Applied { extent: self.extents.mremap(&old, &new, &others), unmapped }
            }
            _ => Applied { extent: self.extents.apply(event), unmapped: Vec::new() },
        }
    }

    /// The kernel chose a range: what is known to be mapped there has ended, and the record of that is still to come.
    fn chosen(&mut self, range: Range<u64>, time_ns: u64) -> Vec<Range<u64>> {
        let known = self.extents.mapped_in(range);
        for part in &known {
            self.overlaid.mapped_anew(part.clone(), time_ns);
            self.extents.apply(&munmap(part));
        }
        known
    }

    fn munmap(&mut self, range: Range<u64>, time_ns: u64) -> Applied {
        let mut applied = Applied::default();
        for part in self.overlaid.ended(range, time_ns).into_iter().filter(|part| !part.mapped_anew) {
            let shrunk_bytes = self.extents.apply(&munmap(&part.range)).shrunk_bytes;
            applied.extent.shrunk_bytes += shrunk_bytes;
            applied.unmapped.push(part.range);
        }
        applied
    }
}

fn munmap(range: &Range<u64>) -> VmEvent {
    VmEvent::Munmap { addr: range.start, len: range.end - range.start }
}

/// The parts of a range before and after another; either may be empty.
fn outside(range: &Range<u64>, other: &Range<u64>) -> [Range<u64>; 2] {
    let before = range.start..range.end.min(other.start).max(range.start);
    let after = range.start.max(other.end).min(range.end).max(before.end)..range.end;
    [before, after]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::units::page_bytes;

    const PAGES: usize = 24;
    const THREADS: usize = 4;
    const BASE: u64 = 0x7f00_0000_0000;

    /// Threads that map, move and unmap: each call has its effect at once, and is recorded when the thread takes its next step.
    #[derive(Default)]
    struct Model {
        /// The thread that has each page.
        truth: [Option<usize>; PAGES],
        /// Mappings of each thread whose call has returned, in pages; the block at their start, if it was not freed.
        own: [Vec<(Range<usize>, bool)>; THREADS],
        open: [Option<Call>; THREADS],
        time_ns: u64,
        space: AddressSpace,
        /// Blocks by address, with the time of their allocation.
        blocks: BTreeMap<u64, u64>,
    }

    /// A call that the kernel has carried out.
    struct Call {
        event: VmEvent,
        /// The mapping that the thread gets.
        gets: Option<Range<usize>>,
    }

    fn address(page: usize) -> u64 {
        BASE + page as u64 * page_bytes()
    }

    fn bytes(range: &Range<usize>) -> u64 {
        range.len() as u64 * page_bytes()
    }

    impl Model {
        fn step(&mut self, thread: usize, kind: u8, number: usize, pages: usize) {
            self.time_ns += 10;
            if let Some(call) = self.open[thread].take() {
                return self.returns(thread, call);
            }
            self.open[thread] = match kind {
                0..=3 => self.mmap(thread, number, pages),
                _ if self.own[thread].is_empty() => None,
                4 => self.mremap(thread, number, pages),
                5 => self.munmap_tail(thread, number),
                _ => self.munmap(thread, number, kind == 6),
            };
        }

        fn free_run(&self, number: usize, pages: usize) -> Option<Range<usize>> {
            let starts: Vec<usize> = (0..=PAGES - pages).filter(|&at| self.truth[at..at + pages].iter().all(Option::is_none)).collect();
            let at = *starts.get(number.checked_rem(starts.len())?)?;
            Some(at..at + pages)
        }

        fn mmap(&mut self, thread: usize, number: usize, pages: usize) -> Option<Call> {
            let range = self.free_run(number, pages)?;
            self.truth[range.clone()].fill(Some(thread));
            let event = VmEvent::Mmap { addr: address(range.start), len: bytes(&range), prot: 3, flags: 0x22 };
            Some(Call { event, gets: Some(range) })
        }

        fn take(&mut self, thread: usize, number: usize) -> (Range<usize>, bool) {
            let count = self.own[thread].len();
            self.own[thread].swap_remove(number % count)
        }

        fn munmap(&mut self, thread: usize, number: usize, frees: bool) -> Option<Call> {
            let (range, _) = self.take(thread, number);
            if frees {
                self.blocks.remove(&address(range.start));
            }
            self.truth[range.clone()].fill(None);
            Some(Call { event: VmEvent::Munmap { addr: address(range.start), len: bytes(&range) }, gets: None })
        }

        /// What an allocator does to align a block.
        fn munmap_tail(&mut self, thread: usize, number: usize) -> Option<Call> {
            let (range, block) = self.take(thread, number);
            let tail = range.start + range.len().div_ceil(2)..range.end;
            self.own[thread].push((range.start..tail.start, block));
            if tail.is_empty() {
                return None;
            }
            self.truth[tail.clone()].fill(None);
            Some(Call { event: VmEvent::Munmap { addr: address(tail.start), len: bytes(&tail) }, gets: None })
        }

        fn mremap(&mut self, thread: usize, number: usize, pages: usize) -> Option<Call> {
            let (old, _) = self.take(thread, number);
            self.blocks.remove(&address(old.start));
            self.truth[old.clone()].fill(None);
            let in_place = old.start + pages <= PAGES && self.truth[old.start..old.start + pages].iter().all(Option::is_none);
            let new = if in_place { Some(old.start..old.start + pages) } else { self.free_run(number, pages) };
            // Without room the call fails, and is not recorded.
            let Some(new) = new else {
                self.truth[old.clone()].fill(Some(thread));
                self.own[thread].push((old, false));
                return None;
            };
            self.truth[new.clone()].fill(Some(thread));
            let event = VmEvent::Mremap {
                old_addr: address(old.start),
                old_len: bytes(&old),
                new_addr: address(new.start),
                new_len: bytes(&new),
                flags: 1,
            };
            Some(Call { event, gets: Some(new) })
        }

        fn returns(&mut self, thread: usize, call: Call) {
            let applied = self.space.apply(&call.event, self.time_ns);
            for range in applied.unmapped {
                self.blocks.retain(|addr, birth_ns| !(range.contains(addr) && *birth_ns < self.time_ns));
            }
            if let Some(range) = call.gets {
                self.blocks.insert(address(range.start), self.time_ns);
                self.own[thread].push((range, true));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn calls_that_return_late_neither_end_nor_hide_a_mapping(
            steps in prop::collection::vec((0..THREADS, 0..8_u8, 0..100_usize, 1..8_usize), 1..120)
        ) {
            let mut model = Model::default();
            for (thread, kind, number, pages) in steps {
                model.step(thread, kind, number, pages);
            }
            for thread in 0..THREADS {
                model.time_ns += 10;
                if let Some(call) = model.open[thread].take() {
                    model.returns(thread, call);
                }
            }
            for (page, owner) in model.truth.iter().enumerate() {
                let known = model.space.extents.extent_in(address(page)..address(page + 1));
                prop_assert_eq!(known > 0, owner.is_some(), "page {}", page);
            }
            let live: Vec<u64> = model.own.iter().flatten().filter(|(_, block)| *block).map(|(range, _)| address(range.start)).collect();
            for addr in &live {
                prop_assert!(model.blocks.contains_key(addr), "the block at page {} is gone", (addr - BASE) / page_bytes());
            }
            prop_assert_eq!(model.blocks.len(), live.len());
        }
    }
}
