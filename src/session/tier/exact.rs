//! What the records of one watched process show: its ledger, those of its images before an exec, its extents, and the stacks that made them
//! grow.
//!
//! Protected by its shard's lock; the ring's thread writes, the driver and the live view read.

use std::ops::Range;
use std::sync::Arc;

use crate::capture::Slot;
use crate::capture::wire::{Body, Record, VmChange};
use crate::fragmentation::growth::{Growth, GrowthSpace};
use crate::heap::extents::{Mapping, VmEvent};
use crate::heap::space::AddressSpace;
use crate::ledger::{Event, Ledger, Sample, SampledLedger, StackLimits};
use crate::managed::{self, Managed, SharedManaged};
use crate::units::{Addr, Pid, StackHash, StackId};

/// Maximum number of ledgers of former images that are kept for a process that execs repeatedly; older ones are dropped and counted.
const PAST_MAX: usize = 16;
/// The most that an allocator adds to a block without its own mapping: glibc's header and rounding, jemalloc's smallest classes. The
/// rounding of larger classes only makes the free bytes fewer than assumed at the next growth; the error in the growth is not larger.
const BLOCK_OVERHEAD_BYTES: u64 = 32;

/// State of a process from its records.
pub struct Watched {
    /// The process.
    pub pid: Pid,
    /// Slot of the process; the generation distinguishes records of the slot's former owners.
    pub slot: Slot,
    /// The ledger of the current image.
    pub ledger: Ledger,
    /// What the process's own emitter reported, if that is the source; `ledger` is empty then.
    pub sampled: Option<Box<SampledLedger>>,
    /// What emitters of the images before each exec reported.
    pub past_sampled: Vec<SampledLedger>,
    /// Ledgers of the images before each exec; their memory no longer exists, but their totals count.
    pub past: Vec<Ledger>,
    /// Images whose ledger was dropped because there were more than [`PAST_MAX`].
    pub past_dropped: u64,
    /// When the process ended (CLOCK_MONOTONIC ns) and its wait status.
    pub exited: Option<(u64, u32)>,
    /// Children that ran in its memory until their exec (vfork).
    pub guests: u64,
    /// Number of address space changes seen.
    pub vm_changes: u64,
    /// The mappings, kept up to date by the changes.
    pub space: AddressSpace,
    /// The calls by which the heap grew, and how much of that while enough free bytes existed.
    pub growth: GrowthSpace,
    /// Free bytes of the heap when the recording began; `None` if no census could determine them.
    free_at_start: Option<u64>,
    /// Bytes by which allocator calls have extended the address space since then.
    grown_bytes: u64,
    /// Names the frames of its runtimes.
    pub managed: SharedManaged,
}

impl Watched {
    /// A process that is watched from now (CLOCK_MONOTONIC ns) on, with its initial ledger (empty, or its parent's), its mappings, and the
    /// free bytes of its heap (`None` = not known).
    pub fn new(pid: Pid, slot: Slot, ledger: Ledger, mappings: &[Mapping], free_at_start: Option<u64>) -> Self {
        Self {
            pid,
            slot,
            ledger,
            sampled: None,
            past_sampled: Vec::new(),
            past: Vec::new(),
            past_dropped: 0,
            exited: None,
            guests: 0,
            vm_changes: 0,
            space: AddressSpace::new(mappings),
            growth: GrowthSpace::default(),
            free_at_start,
            grown_bytes: 0,
            managed: Managed::shared(Arc::default(), false),
        }
    }

    /// A copy of what its emitters reported, without the rest. `None`: no emitter is its source.
    pub fn copy_of_sample(&self) -> Option<Self> {
        let sampled = self.sampled.clone()?;
        let copy = Self::new(self.pid, self.slot, Ledger::new(0, StackLimits::default()), &[], None);
        Some(Self { sampled: Some(sampled), past_sampled: self.past_sampled.clone(), past_dropped: self.past_dropped, ..copy })
    }

    /// Applies a record that is not an allocator event (those go to the ledger in batches).
    pub fn apply(&mut self, record: &Record<'_>, time_ns: u64) {
        match record.body {
            Body::Exec { .. } => self.exec(time_ns),
            Body::Sample { addr, size, weight, interval, stack } => {
                let sample = Sample::new(size, weight, interval);
                self.sampled.get_or_insert_with(new_sampled).alloc(addr, sample, stack, time_ns);
            }
            Body::Fork { shares_memory, .. } => self.guests += u64::from(shares_memory),
            Body::Exit { code } => self.exited = Some((time_ns, code)),
            Body::Vm { change, stack, request } => self.vm(change, stack, request, time_ns),
            _ => {}
        }
    }

    /// A stack's frame words and why its walk ended, from the active ledger.
    pub fn stack_words(&self, id: StackId) -> (&[u64], u8) {
        match &self.sampled {
            Some(sampled) => sampled.stack_words(id),
            None => {
                let view = self.ledger.stack(id);
                (view.frames, view.end)
            }
        }
    }

    /// From now on the process's own emitter is the source, with this mean sample distance if it reports one; with `None`, the allocator's
    /// functions are.
    pub fn set_emitter(&mut self, emitter: Option<Option<u64>>) {
        match (emitter, &mut self.sampled) {
            (Some(interval_bytes), Some(sampled)) => sampled.set_interval(interval_bytes),
            (Some(interval_bytes), none) => {
                *none = Some(Box::new(SampledLedger::new(interval_bytes, StackLimits::default())));
            }
            (None, _) => self.put_sampled_aside(),
        }
    }

    /// Adds an interval that was not observed to the active ledger.
    pub fn gap(&mut self, start_ns: u64, end_ns: u64) {
        match &mut self.sampled {
            Some(sampled) => sampled.gap(start_ns, end_ns),
            None => self.ledger.apply(&Event::Gap { start_ns, end_ns }),
        }
    }

    /// Records were lost.
    pub fn loss(&mut self, alloc: u64, free: u64, other: u64, time_ns: u64) {
        match &mut self.sampled {
            Some(sampled) => sampled.loss(alloc, free, time_ns),
            None => self.ledger.apply(&Event::Loss { alloc, free, other, time_ns }),
        }
    }

    /// Defines a stack's frames.
    pub fn define_stack(&mut self, hash: StackHash, frames: &[u64], end: u8) {
        let frames = &*managed::named(&self.managed, hash, frames);
        match &mut self.sampled {
            Some(sampled) => sampled.define_stack(hash, frames, end),
            None => self.ledger.apply(&Event::DefineStack { hash, frames, end }),
        }
    }

    /// Applies allocator events, in order. For a process with an emitter these are only the frees of sampled blocks.
    pub fn apply_batch(&mut self, events: &[Event<'static>]) {
        let Some(sampled) = &mut self.sampled else {
            self.ledger.apply_batch(events);
            return;
        };
        for event in events {
            if let Event::Free { addr, time_ns, .. } = *event {
                sampled.free(addr, time_ns);
            }
        }
    }

    fn put_sampled_aside(&mut self) {
        let Some(before) = self.sampled.take().filter(|sampled| sampled.totals().samples > 0) else { return };
        if self.past_sampled.len() == PAST_MAX {
            self.past_sampled.remove(0);
            self.past_dropped += 1;
        }
        self.past_sampled.push(*before);
    }

    /// An exec without a record has discarded the memory inherited at the fork.
    pub fn inherits_nothing(&mut self, time_ns: u64) {
        self.ledger = Ledger::new(time_ns, StackLimits::default());
        self.sampled = None;
    }

    fn exec(&mut self, time_ns: u64) {
        if self.sampled.is_some() {
            self.put_sampled_aside();
            // A preloaded library is in the new image too, and is already listened to.
            self.sampled = Some(new_sampled());
        }
        let before = std::mem::replace(&mut self.ledger, Ledger::new(time_ns, StackLimits::default()));
        if before.totals().allocations > 0 {
            if self.past.len() == PAST_MAX {
                self.past.remove(0);
                self.past_dropped += 1;
            }
            self.past.push(before);
        }
        self.space = AddressSpace::default();
        self.growth = GrowthSpace::default();
        self.free_at_start = Some(0);
        self.grown_bytes = 0;
    }

    fn vm(&mut self, change: VmChange, stack: StackHash, request: u64, time_ns: u64) {
        self.vm_changes += 1;
        let Some(event) = vm_event(change) else { return };
        let applied = self.space.apply(&event, time_ns);
        for range in applied.unmapped {
            self.unmap(&range, time_ns);
        }
        let grown = applied.extent.grown_bytes;
        if stack.0 == 0 || grown == 0 {
            return;
        }
        let growth =
            Growth { stack: self.ledger.stack_id(stack), grown_bytes: grown, requested_bytes: request, free_bytes: self.free_at_least() };
        self.growth.add(&growth);
        self.grown_bytes = self.grown_bytes.saturating_add(grown);
    }

    fn unmap(&mut self, range: &Range<u64>, time_ns: u64) {
        let (start, end) = (Addr(range.start), Addr(range.end));
        match &mut self.sampled {
            Some(sampled) => sampled.unmap(start, end, time_ns),
            None => self.ledger.apply(&Event::Unmapped { start, end, time_ns }),
        }
    }

    /// A lower bound of the heap's free bytes: the initial free bytes and the growth, minus the bytes allocated since with the largest
    /// overhead that the allocator may have added. Frees of blocks from before the recording only increase it.
    fn free_at_least(&self) -> Option<u64> {
        let totals = self.ledger.totals();
        let taken = totals.live_bytes.saturating_add(totals.live.saturating_mul(BLOCK_OVERHEAD_BYTES));
        self.free_at_start.map(|free| free.saturating_add(self.grown_bytes).saturating_sub(taken))
    }
}

/// The change in the form that extents take; `None` = the address space did not change.
pub(in crate::session) fn vm_event(change: VmChange) -> Option<VmEvent> {
    Some(match change {
        VmChange::Mmap { addr, len, prot, flags, .. } => VmEvent::Mmap { addr: addr.0, len, prot, flags },
        VmChange::Munmap { addr, len } => VmEvent::Munmap { addr: addr.0, len },
        VmChange::Mremap { old, old_len, new, new_len, flags } => {
            VmEvent::Mremap { old_addr: old.0, old_len, new_addr: new.0, new_len, flags }
        }
        VmChange::Brk { end } => VmEvent::Brk { end: end.0 },
        VmChange::Madvise { addr, len, advice } => VmEvent::Madvise { addr: addr.0, len, advice },
        VmChange::Mprotect { addr, len, prot } => VmEvent::Mprotect { addr: addr.0, len, prot },
        VmChange::Touch { .. } => return None,
    })
}

fn new_sampled() -> Box<SampledLedger> {
    Box::new(SampledLedger::new(None, StackLimits::default()))
}
