//! What the records of one governed process show: the open window, its stacks, which stacks made its heap grow and which first touched its
//! pages. Protected by a lock; the ring's thread writes, the driver opens and closes windows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::capture::Slot;
use crate::capture::wire::{self, Body, Record, VmChange};
use crate::fragmentation::by_stack::BytesByStack;
use crate::fragmentation::growth::{Growth, GrowthSpace};
use crate::governor::WindowObserver;
use crate::governor::retention::{ContentSample, has_words};
use crate::heap::extents::{Mapping, VmEvent};
use crate::heap::residency::{page_bytes, page_down};
use crate::heap::space::AddressSpace;
use crate::ledger::{Event, Ledger, NO_STACK, StackLimits};
use crate::managed::cpython::Definition;
use crate::managed::{self, Managed, SharedManaged};
use crate::session::report::heap::HeapBytes;
use crate::session::tier::exact::vm_event;
use crate::units::{Addr, StackHash, StackId};

/// Maximum number of blocks per window whose contents at allocation are stored, 160 bytes each. A block that is freed releases its entry.
const CONTENT_SAMPLES_MAX: usize = 4096;

/// A window while its records are collected.
pub struct OpenWindow {
    /// The window's observations.
    pub observer: WindowObserver<StackId>,
    /// Records with later times do not belong to it.
    pub close_ns: u64,
    /// Blocks allocated in the window with some known contents by which they can be identified.
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

/// Every large block of a process since its size-selective probes were attached.
pub struct LargeState {
    /// The slot of these probes.
    pub slot: Slot,
    /// When that was, CLOCK_MONOTONIC ns.
    pub since_ns: u64,
    /// The blocks. Their stacks are defined in the process's state.
    pub ledger: Ledger,
}

/// State of a governed process from its records.
pub struct ProcessState {
    /// The process's slot.
    pub slot: Slot,
    /// Defines the stacks; holds no blocks.
    pub stacks: Ledger,
    /// Every block since full tracing began; `None` without a full trace.
    pub live: Option<Ledger>,
    /// Every large block while size-selective probes are attached; `None` otherwise.
    pub large: Option<LargeState>,
    /// The open window, or the piece of a full trace.
    pub window: Option<OpenWindow>,
    /// The mappings, kept up to date by the records.
    pub space: AddressSpace,
    /// The stacks that made the heap grow.
    pub growth: GrowthSpace,
    /// Bytes of heap pages by the stack that touched them first, estimated from the sample.
    pub touched: BytesByStack,
    /// First touches recorded.
    pub touches: u64,
    /// The recorded first touches that were outside the heap.
    pub touches_elsewhere: u64,
    /// Free bytes of the heap at the last census, plus its growth since; `None` = no census could determine them.
    pub free_bytes: Option<u64>,
    /// Live bytes of the heap at the last census; `None` = no census could determine them.
    pub live_bytes: Option<u64>,
    /// Names the frames of its runtimes.
    pub managed: SharedManaged,
}

impl ProcessState {
    /// A process with these mappings.
    pub fn new(slot: Slot, mappings: &[Mapping], heap: HeapBytes, now_ns: u64) -> Self {
        Self {
            slot,
            stacks: Ledger::new(now_ns, StackLimits::default()),
            live: None,
            large: None,
            window: None,
            space: AddressSpace::new(mappings),
            growth: GrowthSpace::default(),
            touched: BytesByStack::default(),
            touches: 0,
            touches_elsewhere: 0,
            free_bytes: heap.free,
            live_bytes: heap.live,
            managed: Managed::shared(Arc::default(), false),
        }
    }

    /// Sets the heap's bytes from a census.
    pub fn set_heap(&mut self, heap: HeapBytes) {
        self.free_bytes = heap.free;
        self.live_bytes = heap.live;
    }

    /// Opens a window. `close_ns`: its end, `u64::MAX` for a full trace.
    pub fn open(&mut self, open_ns: u64, close_ns: u64) {
        self.window = Some(OpenWindow { observer: WindowObserver::new(open_ns), close_ns, samples: HashMap::new() });
    }

    /// The id of a stack hash; [`NO_STACK`] for none.
    fn stack(&mut self, hash: StackHash) -> StackId {
        self.stacks.stack_id(hash).unwrap_or(NO_STACK)
    }

    /// Applies a record that defines a stack, or what one refers to.
    fn define(&mut self, body: &Body<'_>) {
        match *body {
            Body::Stack { hash, frames, end } => {
                let frames = &*managed::named(&self.managed, hash, frames);
                self.stacks.apply(&Event::DefineStack { hash, frames, end });
            }
            Body::PythonStack { hash, frames, end } => managed::lock(&self.managed).hold(hash, frames, end),
            Body::PythonCode { code, lines } => managed::lock(&self.managed).define_code(Definition { code, lines }),
            _ => {}
        }
    }

    /// Applies a record.
    pub fn apply(&mut self, record: &Record<'_>, time_ns: u64) {
        let tid = record.head.tid;
        match record.body {
            Body::Alloc { addr, size, stack, .. } => {
                let id = self.stack(stack);
                if let Some(window) = self.window_at(time_ns) {
                    window.observer.allocated(addr.0, size, id, tid, time_ns);
                }
                if let Some(live) = &mut self.live {
                    live.apply(&Event::Alloc { addr, size_bytes: size, stack, tid, how: Default::default(), time_ns });
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
            Body::Stack { .. } | Body::PythonStack { .. } | Body::PythonCode { .. } => self.define(&record.body),
            Body::Vm { change: VmChange::Touch { addr, touches }, stack, .. } => self.touch(addr, touches, stack),
            Body::Vm { change, stack, .. } => self.changed(change, stack, time_ns),
            _ => {}
        }
    }

    /// Applies a record of the size-selective probes.
    fn apply_large(&mut self, record: &Record<'_>, time_ns: u64) {
        self.define(&record.body);
        // Records sent before these probes were attached belong to an earlier trial.
        let Some(large) = self.large.as_mut().filter(|large| time_ns >= large.since_ns) else { return };
        let tid = record.head.tid;
        let stack = StackHash(0);
        let event = match record.body {
            Body::Alloc { addr, size, stack, .. } => Event::Alloc { addr, size_bytes: size, stack, tid, how: Default::default(), time_ns },
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
        if self.space.extents.extent_in(page..page.saturating_add(page_bytes())) == 0 {
            self.touches_elsewhere += 1;
            return;
        }
        let id = self.stack(stack);
        self.touched.charge(Some(id), touches.saturating_mul(page_bytes()));
    }

    fn changed(&mut self, change: VmChange, stack: StackHash, time_ns: u64) {
        let Some(event) = vm_event(change) else { return };
        let applied = self.space.apply(&event, time_ns);
        for live in self.live.iter_mut().chain(self.large.as_mut().map(|large| &mut large.ledger)) {
            for range in &applied.unmapped {
                live.apply(&Event::Unmapped { start: Addr(range.start), end: Addr(range.end), time_ns });
            }
        }
        let grown_bytes = applied.extent.grown_bytes;
        // A thread's stack is mapped by pthread_create, not by an allocator; MAP_STACK identifies it.
        let is_stack = matches!(event, VmEvent::Mmap { flags, .. } if flags & libc::MAP_STACK as u32 != 0);
        if grown_bytes == 0 || stack.0 == 0 || is_stack {
            return;
        }
        // The size the allocator needed is not known here. As many free bytes as the heap grew by would certainly have been enough.
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
    /// The slots of size-selective probes, each with its process's slot and its own generation. They stay while the process is watched,
    /// because a stack is defined only once.
    large: HashMap<u16, (u16, u32)>,
    /// Every record sent before this time has been read, CLOCK_MONOTONIC ns.
    pub read_up_to_ns: u64,
}

impl ProcessStates {
    /// From now on records of these probes are applied to the state of the process that has the slot `owner`.
    pub fn begin_large(&mut self, owner: u16, large: LargeState) {
        if let Some(state) = self.of.get_mut(&owner) {
            self.large.insert(large.slot.index, (owner, large.slot.generation));
            state.large = Some(large);
        }
    }

    /// Removes and returns what is known of a process's large blocks.
    pub fn end_large(&mut self, owner: u16) -> Option<LargeState> {
        self.of.get_mut(&owner)?.large.take()
    }

    /// Removes and returns a process's state.
    pub fn close(&mut self, owner: u16) -> Option<ProcessState> {
        self.large.retain(|_, (of, _)| *of != owner);
        self.of.remove(&owner)
    }

    /// Applies a record. Returns the slot of its process, or `None` if the slot is unknown.
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

/// The [`ProcessStates`] that the ring's thread and the driver share.
pub type SharedStates = Arc<Mutex<ProcessStates>>;

/// Takes the lock. A panic of another holder does not invalidate the data.
pub fn lock(states: &SharedStates) -> MutexGuard<'_, ProcessStates> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}
