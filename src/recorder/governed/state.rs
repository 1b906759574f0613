//! What is known of one governed process from its records: the window that is open, its stacks, who made its heap grow and who touched
//! its pages first. Lives behind a lock; the ring's thread writes, the driver opens and closes windows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::capture::Slot;
use crate::capture::wire::{self, Body, Record, VmChange};
use crate::fragmentation::by_stack::BytesByStack;
use crate::fragmentation::growth::{Growth, GrowthSpace};
use crate::governor::WindowObserver;
use crate::governor::retention::{ContentSample, has_words};
use crate::heap::extents::{Extents, Mapping, VmEvent};
use crate::heap::residency::{PAGE_BYTES, page_down};
use crate::ledger::{Event, Ledger, NO_STACK, StackLimits};
use crate::recorder::heap::HeapBytes;
use crate::recorder::watched::vm_event;
use crate::units::{Addr, StackHash, StackId};

/// Blocks of one window of which it is kept what they held when they were handed out, 160 bytes each. Those of them that are freed make
/// room again.
const CONTENT_SAMPLES_MAX: usize = 4096;

/// A window as its records are sorted into it.
pub struct OpenWindow {
    /// What it has seen.
    pub observer: WindowObserver<StackId>,
    /// Records of later times are not of it.
    pub close_ns: u64,
    /// Blocks that were handed out in it, of which some is known to know them by.
    pub samples: HashMap<u64, ContentSample>,
}

impl OpenWindow {
    fn born(&mut self, addr: u64, words: &[u64; wire::WORDS], known: u32) {
        let Some((_, bytes, born_ns)) = self.observer.block(addr).filter(|(_, bytes, _)| has_words(*bytes)) else { return };
        if self.samples.len() < CONTENT_SAMPLES_MAX {
            self.samples.insert(addr, ContentSample { addr, bytes, born_ns, words: *words, known });
        }
    }
}

/// Every large block of a process since probes for them are in.
pub struct LargeState {
    /// The slot of these probes.
    pub slot: Slot,
    /// Since when, CLOCK_MONOTONIC ns.
    pub since_ns: u64,
    /// The blocks. Stacks are named in the process's state.
    pub ledger: Ledger,
}

/// A governed process as its records show it.
pub struct ProcessState {
    /// Whose it is.
    pub slot: Slot,
    /// Names stacks; holds no blocks.
    pub stacks: Ledger,
    /// Every block since the process is traced in full; `None` while it is not.
    pub live: Option<Ledger>,
    /// Every large block, while there are probes for them; `None` while not.
    pub large: Option<LargeState>,
    /// The open window, or the piece of a full trace.
    pub window: Option<OpenWindow>,
    /// The mappings, kept up to date by the records.
    pub extents: Extents,
    /// By whom the heap grew.
    pub growth: GrowthSpace,
    /// Bytes of heap pages by who touched them first, estimated from the sample.
    pub touched: BytesByStack,
    /// First touches recorded.
    pub touches: u64,
    /// Of them, those outside the heap.
    pub touches_elsewhere: u64,
    /// Free bytes of the heap at the last census, plus what it grew by since; `None` = no census can tell.
    pub free_bytes: Option<u64>,
    /// Live bytes of the heap at the last census; `None` = no census can tell.
    pub live_bytes: Option<u64>,
}

impl ProcessState {
    /// A process whose mappings are these.
    pub fn new(slot: Slot, mappings: &[Mapping], heap: HeapBytes, now_ns: u64) -> Self {
        Self {
            slot,
            stacks: Ledger::new(now_ns, StackLimits::default()),
            live: None,
            large: None,
            window: None,
            extents: Extents::new(mappings),
            growth: GrowthSpace::default(),
            touched: BytesByStack::default(),
            touches: 0,
            touches_elsewhere: 0,
            free_bytes: heap.free,
            live_bytes: heap.live,
        }
    }

    /// What a census says of the heap.
    pub fn set_heap(&mut self, heap: HeapBytes) {
        self.free_bytes = heap.free;
        self.live_bytes = heap.live;
    }

    /// Opens a window. `close_ns`: its last moment, `u64::MAX` for a full trace.
    pub fn open(&mut self, open_ns: u64, close_ns: u64) {
        self.window = Some(OpenWindow { observer: WindowObserver::new(open_ns), close_ns, samples: HashMap::new() });
    }

    /// The id of a stack hash; [`NO_STACK`] for none.
    fn stack(&mut self, hash: StackHash) -> StackId {
        self.stacks.stack_id(hash).unwrap_or(NO_STACK)
    }

    /// Takes a record.
    pub fn apply(&mut self, record: &Record<'_>, time_ns: u64) {
        let tid = record.head.tid;
        match record.body {
            Body::Alloc { addr, size, stack } => {
                let id = self.stack(stack);
                if let Some(window) = self.window_at(time_ns) {
                    window.observer.allocated(addr.0, size, id, tid, time_ns);
                }
                if let Some(live) = &mut self.live {
                    live.apply(&Event::Alloc { addr, size_bytes: size, stack, tid, time_ns });
                }
            }
            Body::Free { addr, .. } => {
                if let Some(window) = self.window_at(time_ns) {
                    window.observer.freed(addr.0, tid, time_ns);
                    window.samples.remove(&addr.0);
                }
                if let Some(live) = &mut self.live {
                    live.apply(&Event::Free { addr, stack: StackHash(0), tid, time_ns });
                }
            }
            Body::ReallocFree { addr } => {
                if let Some(window) = self.window_at(time_ns) {
                    window.observer.realloc_freed(addr.0, tid);
                    window.samples.remove(&addr.0);
                }
                if let Some(live) = &mut self.live {
                    live.apply(&Event::ReallocFree { addr, stack: StackHash(0), tid, time_ns });
                }
            }
            Body::ReallocFail { addr } => {
                if let Some(window) = self.window_at(time_ns) {
                    window.observer.realloc_failed(tid);
                }
                if let Some(live) = &mut self.live {
                    live.apply(&Event::ReallocFail { addr, tid });
                }
            }
            Body::Contents { addr, words, known } => {
                if let Some(window) = self.window_at(time_ns) {
                    window.born(addr.0, words, known);
                }
            }
            Body::Stack { hash, frames, end } => self.stacks.apply(&Event::DefineStack { hash, frames, end }),
            Body::Vm { change: VmChange::Touch { addr, touches }, stack, .. } => self.touch(addr, touches, stack),
            Body::Vm { change, stack, .. } => self.changed(change, stack, time_ns),
            _ => {}
        }
    }

    /// Takes a record of the probes for large blocks.
    fn apply_large(&mut self, record: &Record<'_>, time_ns: u64) {
        if let Body::Stack { hash, frames, end } = record.body {
            self.stacks.apply(&Event::DefineStack { hash, frames, end });
        }
        // What was sent before these probes went in is of an earlier trial.
        let Some(large) = self.large.as_mut().filter(|large| time_ns >= large.since_ns) else { return };
        let tid = record.head.tid;
        let stack = StackHash(0);
        let event = match record.body {
            Body::Alloc { addr, size, stack } => Event::Alloc { addr, size_bytes: size, stack, tid, time_ns },
            Body::Free { addr, .. } => Event::Free { addr, stack, tid, time_ns },
            Body::ReallocFree { addr } => Event::ReallocFree { addr, stack, tid, time_ns },
            Body::ReallocFail { addr } => Event::ReallocFail { addr, tid },
            _ => return,
        };
        large.ledger.apply(&event);
    }

    fn window_at(&mut self, time_ns: u64) -> Option<&mut OpenWindow> {
        self.window.as_mut().filter(|window| time_ns <= window.close_ns)
    }

    fn touch(&mut self, addr: Addr, touches: u64, stack: StackHash) {
        self.touches += 1;
        let page = page_down(addr.0);
        if self.extents.extent_in(page..page.saturating_add(PAGE_BYTES)) == 0 {
            self.touches_elsewhere += 1;
            return;
        }
        let id = self.stack(stack);
        self.touched.charge(Some(id), touches.saturating_mul(PAGE_BYTES));
    }

    fn changed(&mut self, change: VmChange, stack: StackHash, time_ns: u64) {
        if let VmChange::Munmap { addr, len } = change {
            for live in self.live.iter_mut().chain(self.large.as_mut().map(|large| &mut large.ledger)) {
                live.apply(&Event::Unmapped { start: addr, end: Addr(addr.0.saturating_add(len)), time_ns });
            }
        }
        let Some(event) = vm_event(change) else { return };
        let grown_bytes = self.extents.apply(&event).grown_bytes;
        // A thread's stack is made by pthread_create, not by an allocator; it is told apart by its flag.
        let is_stack = matches!(event, VmEvent::Mmap { flags, .. } if flags & libc::MAP_STACK as u32 != 0);
        if grown_bytes == 0 || stack.0 == 0 || is_stack {
            return;
        }
        // What the allocator wanted is not known here. Free bytes as many as it grew by would have done for certain.
        let growth = Growth { stack: Some(self.stack(stack)), grown_bytes, requested_bytes: grown_bytes, free_bytes: self.free_bytes };
        self.growth.add(&growth);
        self.free_bytes = self.free_bytes.map(|free| free.saturating_add(grown_bytes));
    }
}

/// The states of all governed processes, by slot.
#[derive(Default)]
pub struct ProcessStates {
    /// By slot.
    pub of: HashMap<u16, ProcessState>,
    /// The slots of probes for large blocks, each with that of its process and its own generation. They stay while the process is watched:
    /// a stack is defined once.
    large: HashMap<u16, (u16, u32)>,
    /// Every record sent before this time has been read, CLOCK_MONOTONIC ns.
    pub read_up_to_ns: u64,
}

impl ProcessStates {
    /// From now on records of these probes go into the state of the process that has this slot.
    pub fn begin_large(&mut self, owner: u16, large: LargeState) {
        if let Some(state) = self.of.get_mut(&owner) {
            self.large.insert(large.slot.index, (owner, large.slot.generation));
            state.large = Some(large);
        }
    }

    /// What was known of a process's large blocks.
    pub fn end_large(&mut self, owner: u16) -> Option<LargeState> {
        self.of.get_mut(&owner)?.large.take()
    }

    /// Takes a process's state out.
    pub fn close(&mut self, owner: u16) -> Option<ProcessState> {
        self.large.retain(|_, (of, _)| *of != owner);
        self.of.remove(&owner)
    }

    /// Takes a record; the slot of the process that it is of, `None` if nobody knows it.
    pub fn apply(&mut self, record: &Record<'_>, time_ns: u64) -> Option<u16> {
        let slot = record.head.slot;
        if let Some(state) = self.of.get_mut(&slot) {
            if !record.head.is_of(state.slot.generation) {
                return None;
            }
            state.apply(record, time_ns);
            return Some(slot);
        }
        let (owner, _) = self.large.get(&slot).copied().filter(|(_, generation)| record.head.is_of(*generation))?;
        self.of.get_mut(&owner)?.apply_large(record, time_ns);
        Some(owner)
    }
}

/// ProcessStates that the ring's thread and the driver share.
pub type SharedStates = Arc<Mutex<ProcessStates>>;

/// Takes the lock; a panic of another holder does not make the data worse than it is.
pub fn lock(states: &SharedStates) -> MutexGuard<'_, ProcessStates> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}
