//! Applies the ring's records to the states of governed processes, and notifies the driver of what it must act on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};

use crate::capture::Sink;
use crate::capture::wire::{Body, Record, VmChange};
use crate::session::monotonic_ns;
use crate::session::tier::windows::state::{SharedStates, lock};

/// Something the driver must act on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// The process of this slot has another image.
    Exec(u16),
    /// It ended.
    Exit(u16),
    /// It has code without unwind tables, or mapped new code.
    NewCode(u16),
}

/// Applies one ring's records to the states.
pub struct StateSink {
    states: SharedStates,
    notices: SyncSender<Notice>,
    notices_lost: Arc<AtomicU64>,
    /// The reading of the clock from which records' times are completed.
    now_ns: u64,
    /// When the current batch began: it contains all records sent before, unless it was cut short.
    batch_began_ns: u64,
    records: usize,
}

/// A batch of this many records may have been cut short (`BATCH_RECORDS` of the reader).
const BATCH_MAY_BE_CUT: usize = 16 << 10;

impl StateSink {
    /// A sink for these states.
    pub fn new(states: SharedStates, notices: SyncSender<Notice>, notices_lost: Arc<AtomicU64>) -> Self {
        let now_ns = monotonic_ns();
        Self { states, notices, notices_lost, now_ns, batch_began_ns: now_ns, records: 0 }
    }
}

impl Sink for StateSink {
    fn record(&mut self, record: &Record<'_>) {
        self.records += 1;
        let time_ns = record.head.time_ns(self.now_ns);
        let Some(slot) = lock(&self.states).apply(record, time_ns) else { return };
        let notice = match record.body {
            Body::NeedTable { .. } => Notice::NewCode(slot),
            Body::Exec { .. } => Notice::Exec(slot),
            Body::Exit { .. } => Notice::Exit(slot),
            Body::Vm { change: VmChange::Mmap { prot, fd, .. }, .. } if prot & libc::PROT_EXEC as u32 != 0 && fd >= 0 => {
                Notice::NewCode(slot)
            }
            _ => return,
        };
        if let Err(TrySendError::Full(_)) = self.notices.try_send(notice) {
            self.notices_lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn pause(&mut self) {
        if self.records < BATCH_MAY_BE_CUT {
            lock(&self.states).read_up_to_ns = self.batch_began_ns;
        }
        self.records = 0;
        self.now_ns = monotonic_ns();
        self.batch_began_ns = self.now_ns;
    }

    fn finish(&mut self) {
        lock(&self.states).read_up_to_ns = u64::MAX;
    }
}
