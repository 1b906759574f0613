//! Applies a ring's records to the ledgers of its shard, and notifies the driver of what it must act on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::allocator::functions::{Function, FunctionId};
use crate::capture::wire::{Body, Record, VmChange};
use crate::capture::{BATCH_RECORDS, Sink, Slot};
use crate::ledger::{Event, Ledger, SampledLedger};
use crate::managed;
use crate::managed::cpython::Definition;
use crate::session::tier::exact::Watched;
use crate::session::trace::SharedTrace;
use crate::symbol::NamedFrames;
use crate::trace::How;
use crate::units::{Addr, Pid, StackHash};

/// Events collected before the shard's lock is taken: enough that the ledger can prefetch its table's slots.
const BATCH_EVENTS: usize = 256;
/// Maximum number of parents' live blocks copied for their children, over all processes of a shard: 16 M blocks are 400 MB.
const INHERITED_BLOCKS_MAX: u64 = 16 << 20;

/// Something the driver must act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// A watched process has a child. Unless the child runs in its parent's memory, a copy of the parent's ledger waits in the shard.
    Fork {
        /// The parent's slot.
        slot: Slot,
        /// The child.
        child: Pid,
    },
    /// A watched process replaced its image.
    Exec {
        /// Its slot.
        slot: Slot,
        /// When (CLOCK_MONOTONIC ns).
        time_ns: u64,
    },
    /// A watched process ended.
    Exit {
        /// Its slot.
        slot: Slot,
    },
    /// A watched process mapped a file executable: there may be a new allocator, and there is code to unwind.
    Mapped {
        /// Its slot.
        slot: Slot,
        /// The thread is or was stopped there, and the stop is handled separately.
        held: bool,
        /// When (CLOCK_MONOTONIC ns).
        time_ns: u64,
    },
    /// A traced process is stopped.
    Stands,
    /// A stack walk met code without an unwind table.
    NeedTable {
        /// The slot of the process.
        slot: Slot,
        /// Address in the code.
        pc: Addr,
    },
}

impl Notice {
    /// The slot of the process; `None` if the notice is not tied to one.
    pub fn slot(&self) -> Option<Slot> {
        match *self {
            Self::Fork { slot, .. }
            | Self::Exec { slot, .. }
            | Self::Exit { slot }
            | Self::Mapped { slot, .. }
            | Self::NeedTable { slot, .. } => Some(slot),
            Self::Stands => None,
        }
    }
}

/// A forked child's copy of its parent's ledger.
pub struct Inherited {
    /// Of the traced calls.
    pub ledger: Ledger,
    /// Of the emitter's samples.
    pub sampled: Option<Box<SampledLedger>>,
    /// The names of managed frames in their stacks.
    pub names: Arc<NamedFrames>,
}

/// The processes of one ring.
#[derive(Default)]
pub struct Shard {
    /// By slot.
    pub watched: HashMap<u16, Watched>,
    /// Ledgers of children that the driver has not met yet: copies of their parents' at the fork. `None`: there are too many blocks to
    /// copy, or the child runs in its parent's memory.
    pub inherited: HashMap<Pid, Option<Inherited>>,
    /// Children whose parent's ledger was not copied because it had too many blocks.
    pub inherited_refused: u64,
    /// Whether children are to be watched too.
    pub follow_children: bool,
    /// Records sent before this time (CLOCK_MONOTONIC ns) are in the ledger.
    pub drained_ns: u64,
}

/// A shard that the ring's thread and the driver share.
pub type SharedShard = Arc<Mutex<Shard>>;

/// Takes the lock. A panic of another holder does not invalidate the data.
pub fn lock(shard: &SharedShard) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Applies one ring's records to its shard.
pub struct LedgerSink {
    shard: SharedShard,
    notices: SyncSender<Notice>,
    notices_lost: Arc<AtomicU64>,
    /// Events of `batch_slot`'s process that are not applied yet.
    batch: Vec<Event<'static>>,
    batch_slot: (u16, u16),
    /// Records since the last pause.
    records: usize,
    now_ns: u64,
    inherited_blocks_max: u64,
    trace: Option<SharedTrace>,
}

impl LedgerSink {
    /// A sink for a shard. Notices that find the channel full are counted in `notices_lost`: the driver then examines everything.
    pub fn new(shard: SharedShard, notices: SyncSender<Notice>, notices_lost: Arc<AtomicU64>, trace: Option<SharedTrace>) -> Self {
        let batch = Vec::with_capacity(BATCH_EVENTS);
        let now_ns = crate::session::monotonic_ns();
        let inherited_blocks_max = INHERITED_BLOCKS_MAX;
        Self { shard, notices, notices_lost, batch, batch_slot: (u16::MAX, 0), records: 0, now_ns, inherited_blocks_max, trace }
    }

    fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let (slot, generation) = self.batch_slot;
        if let Some(watched) = lock(&self.shard).watched.get_mut(&slot)
            && watched.slot.generation as u16 == generation
        {
            watched.apply_batch(&self.batch);
        }
        if let Some(trace) = &self.trace {
            trace.events(self.batch_slot, &self.batch);
        }
        self.batch.clear();
    }

    fn notify(&self, notice: Notice) {
        if let Err(TrySendError::Full(_)) = self.notices.try_send(notice) {
            self.notices_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An allocator event in the ledger's form, or `None` for other records.
    fn event(record: &Record<'_>, time_ns: u64) -> Option<Event<'static>> {
        let tid = record.head.tid;
        Some(match record.body {
            Body::Alloc { addr, size, stack, alignment_bits } => {
                let function = FunctionId(record.head.function).get();
                let is_zeroed = function.is_some_and(Function::zeroes);
                let alignment_bits = alignment_bits.max(function.map_or(0, Function::fixed_alignment_bits));
                Event::Alloc { addr, size_bytes: size, stack, tid, how: How { alignment_bits, is_zeroed }, time_ns }
            }
            Body::Free { addr, stack } => Event::Free { addr, stack, tid, time_ns },
            Body::ReallocFree { addr } => Event::ReallocFree { addr, stack: Default::default(), tid, time_ns },
            Body::ReallocFail { addr } => Event::ReallocFail { addr, tid },
            _ => return None,
        })
    }

    fn other(&mut self, record: &Record<'_>, time_ns: u64) {
        self.flush();
        let slot = record.head.slot;
        let mut shard = lock(&self.shard);
        let Shard { watched, inherited, inherited_refused, follow_children, .. } = &mut *shard;
        let Some(process) = watched.get_mut(&slot).filter(|process| record.head.is_of(process.slot.generation)) else { return };
        // With its generation: another process may have the slot by the time the driver acts.
        let slot = process.slot;
        let notice = match record.body {
            Body::Stack { hash, frames, end } => {
                process.define_stack(hash, frames, end);
                return;
            }
            Body::PythonStack { hash, frames, end } => {
                managed::lock(&process.managed).hold(hash, frames, end);
                return;
            }
            Body::PythonCode { code, lines } => {
                managed::lock(&process.managed).define_code(Definition { code, lines });
                return;
            }
            Body::NeedTable { pc } => Some(Notice::NeedTable { slot, pc }),
            Body::Fork { child, shares_memory } => {
                let child = Pid(child);
                if *follow_children && shares_memory {
                    inherited.insert(child, None);
                } else if *follow_children {
                    let blocks: u64 = inherited.values().flatten().map(|inherited| inherited.ledger.totals().live).sum();
                    if blocks + process.ledger.totals().live <= self.inherited_blocks_max {
                        let sampled = process.sampled.as_ref().map(|sampled| Box::new(sampled.fork()));
                        let names = Arc::clone(managed::lock(&process.managed).names());
                        inherited.insert(child, Some(Inherited { ledger: process.ledger.fork(), sampled, names }));
                    } else {
                        inherited.insert(child, None);
                        *inherited_refused += 1;
                    }
                }
                Some(Notice::Fork { slot, child })
            }
            Body::Exec { .. } => Some(Notice::Exec { slot, time_ns }),
            Body::Exit { .. } => Some(Notice::Exit { slot }),
            Body::Vm { change: VmChange::Mmap { prot, fd, .. }, .. } => {
                (prot & libc::PROT_EXEC as u32 != 0 && fd >= 0).then_some(Notice::Mapped { slot, held: record.head.function != 0, time_ns })
            }
            _ => None,
        };
        process.apply(record, time_ns);
        drop(shard);
        if let Some(trace) = &self.trace {
            let of = (slot.index, slot.generation as u16);
            match record.body {
                Body::Vm { change, stack: StackHash(0), .. } => trace.mapped(of, (record.head.tid, time_ns), change),
                Body::Exec { .. } => trace.exec(of, (record.head.tid, time_ns)),
                Body::Exit { .. } => trace.ended(of, time_ns),
                Body::ThreadExit => trace.thread_end(of, (record.head.tid, time_ns)),
                _ => {}
            }
        }
        if let Some(notice) = notice {
            self.notify(notice);
        }
    }
}

impl Sink for LedgerSink {
    fn record(&mut self, record: &Record<'_>) {
        self.records += 1;
        let time_ns = record.head.time_ns(self.now_ns);
        let Some(event) = Self::event(record, time_ns) else {
            self.other(record, time_ns);
            return;
        };
        let slot = (record.head.slot, record.head.generation_low());
        if slot != self.batch_slot || self.batch.len() == BATCH_EVENTS {
            self.flush();
            self.batch_slot = slot;
        }
        self.batch.push(event);
    }

    fn pause(&mut self) {
        self.flush();
        // A full batch does not show the ring's end; a smaller one reached it, after the last pause.
        if std::mem::take(&mut self.records) < BATCH_RECORDS {
            lock(&self.shard).drained_ns = self.now_ns;
        }
        self.now_ns = crate::session::monotonic_ns();
    }

    fn finish(&mut self) {
        self.flush();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc::sync_channel;

    use super::*;
    use crate::capture::wire::decode;
    use crate::capture::{Counters, Read};
    use crate::ledger::StackLimits;
    use crate::session::report::losses;

    const SLOT: Slot = Slot { index: 7, generation: 1 };

    #[repr(C, align(8))]
    struct Aligned([u8; 40]);

    /// `struct fp_life` of a fork.
    fn fork_of(child: u32) -> Aligned {
        let mut bytes = [0; 40];
        bytes[0] = 8;
        bytes[2..4].copy_from_slice(&SLOT.index.to_le_bytes());
        bytes[8..16].copy_from_slice(&(u64::from(SLOT.generation) << 48).to_le_bytes());
        bytes[20..24].copy_from_slice(&child.to_le_bytes());
        Aligned(bytes)
    }

    /// A parent with three blocks, its sink, and a limit of `blocks_max` blocks in all of its children's ledgers.
    fn parent(blocks_max: u64) -> (SharedShard, LedgerSink) {
        let mut watched = Watched::new(Pid(100), SLOT, Ledger::new(0, StackLimits::default()), &[], None);
        let blocks: Vec<Event<'_>> = (1..=3)
            .map(|block| Event::Alloc {
                addr: Addr(block << 12),
                size_bytes: 10,
                stack: StackHash::default(),
                tid: 1,
                how: Default::default(),
                time_ns: 1,
            })
            .collect();
        watched.apply_batch(&blocks);
        let shard = SharedShard::default();
        lock(&shard).follow_children = true;
        lock(&shard).watched.insert(SLOT.index, watched);
        let sink = LedgerSink::new(Arc::clone(&shard), sync_channel(16).0, Arc::default(), None);
        (shard, LedgerSink { inherited_blocks_max: blocks_max, ..sink })
    }

    #[test]
    fn a_child_whose_parent_has_too_many_blocks_gets_no_ledger_and_is_counted() {
        let (shard, mut sink) = parent(5);
        sink.record(&decode(&fork_of(201).0).unwrap());
        // The first child's ledger takes three of five blocks.
        sink.record(&decode(&fork_of(202).0).unwrap());
        let shard = lock(&shard);
        assert!(matches!(shard.inherited.get(&Pid(201)), Some(Some(_))) && matches!(shard.inherited.get(&Pid(202)), Some(None)));
        let losses = losses(&Counters::from_rows(&[]), Read::default(), 0, 0, shard.inherited_refused);
        let told = losses.iter().find(|loss| loss.name == "children_without_books").unwrap();
        assert_eq!(told.value, 1);
    }
}
