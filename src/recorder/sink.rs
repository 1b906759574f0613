//! From a ring's records to the ledgers of its shard, and notices of what needs the driver.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::watched::Watched;
use crate::capture::wire::{Body, Record, VmChange};
use crate::capture::{BATCH_RECORDS, Sink, Slot};
use crate::ledger::{Event, Ledger, SampledLedger};
use crate::units::{Addr, Pid};

/// Events gathered before the shard's lock is taken; long enough that the ledger can fetch its table's slots ahead.
const BATCH_EVENTS: usize = 256;
/// Live blocks of parents that are copied for their children at most, over all of a shard: 16 M blocks are 400 MB.
const INHERITED_BLOCKS_MAX: u64 = 16 << 20;

/// Something the driver must act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// A watched process has a child. `ledger`: a copy of its parent's books waits in the shard.
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
    },
    /// A stack went through code without a table.
    NeedTable {
        /// The slot of the process.
        slot: Slot,
        /// Address in the code.
        pc: Addr,
    },
}

impl Notice {
    /// Whose it is.
    pub fn slot(&self) -> Slot {
        match *self {
            Self::Fork { slot, .. } | Self::Exec { slot } | Self::Exit { slot } | Self::Mapped { slot } | Self::NeedTable { slot, .. } => {
                slot
            }
        }
    }
}

/// A forked child's copy of its parent's books.
pub struct Inherited {
    /// Of what was traced.
    pub ledger: Ledger,
    /// Of what an emitter told.
    pub sampled: Option<Box<SampledLedger>>,
}

/// The processes of one ring.
#[derive(Default)]
pub struct Shard {
    /// By slot.
    pub watched: HashMap<u16, Watched>,
    /// Books of children that the driver has not met yet: their parent's at the moment of the fork.
    pub inherited: HashMap<Pid, Inherited>,
    /// Children whose parent's books were not copied because there were too many blocks.
    pub inherited_refused: u64,
    /// Whether children are to be watched too.
    pub follow_children: bool,
    /// What was sent before this time (CLOCK_MONOTONIC ns) is in the books.
    pub drained_ns: u64,
}

/// A shard that the ring's thread and the driver share.
pub type SharedShard = Arc<Mutex<Shard>>;

/// Takes the lock; a panic of another holder does not make the data worse than it is.
pub fn lock(shard: &SharedShard) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Feeds one ring's records into its shard.
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
}

impl LedgerSink {
    /// A sink for a shard. Notices that find the channel full are counted in `notices_lost`: the driver then looks at everything.
    pub fn new(shard: SharedShard, notices: SyncSender<Notice>, notices_lost: Arc<AtomicU64>) -> Self {
        let batch = Vec::with_capacity(BATCH_EVENTS);
        Self { shard, notices, notices_lost, batch, batch_slot: (u16::MAX, 0), records: 0, now_ns: crate::recorder::monotonic_ns() }
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
        self.batch.clear();
    }

    fn notify(&self, notice: Notice) {
        if let Err(TrySendError::Full(_)) = self.notices.try_send(notice) {
            self.notices_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// An allocator event as the ledger takes it, or `None` for other records.
    fn event(record: &Record<'_>, time_ns: u64) -> Option<Event<'static>> {
        let tid = record.head.tid;
        Some(match record.body {
            Body::Alloc { addr, size, stack } => {
                Event::Alloc { addr, size_bytes: size, stack, tid, time_ns, function: record.head.function }
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
        // With its generation: the row may be another's by the time the driver acts.
        let slot = process.slot;
        let notice = match record.body {
            Body::Stack { hash, frames, end } => {
                process.define_stack(hash, frames, end);
                return;
            }
            Body::NeedTable { pc } => Some(Notice::NeedTable { slot, pc }),
            Body::Fork { child } => {
                let child = Pid(child);
                if *follow_children {
                    let blocks: u64 = inherited.values().map(|inherited| inherited.ledger.totals().live).sum();
                    if blocks + process.ledger.totals().live <= INHERITED_BLOCKS_MAX {
                        let sampled = process.sampled.as_ref().map(|sampled| Box::new(sampled.fork()));
                        inherited.insert(child, Inherited { ledger: process.ledger.fork(), sampled });
                    } else {
                        *inherited_refused += 1;
                    }
                }
                Some(Notice::Fork { slot, child })
            }
            Body::Exec { .. } => Some(Notice::Exec { slot }),
            Body::Exit { .. } => Some(Notice::Exit { slot }),
            Body::Vm { change: VmChange::Mmap { prot, fd, .. }, .. } => {
                (prot & libc::PROT_EXEC as u32 != 0 && fd >= 0).then_some(Notice::Mapped { slot })
            }
            _ => None,
        };
        process.apply(record, time_ns);
        drop(shard);
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
        // A full batch says nothing of the ring's end; a smaller one reached it, after the last pause.
        if std::mem::take(&mut self.records) < BATCH_RECORDS {
            lock(&self.shard).drained_ns = self.now_ns;
        }
        self.now_ns = crate::recorder::monotonic_ns();
    }

    fn finish(&mut self) {
        self.flush();
    }
}
