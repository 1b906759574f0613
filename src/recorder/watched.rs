//! What is known of one watched process from its records alone: its ledger, and those of the images it had before an exec.
//!
//! Lives behind its shard's lock; the ring's thread writes, the driver and the live view look.

use std::collections::HashMap;

use crate::capture::Slot;
use crate::capture::wire::{Body, Record, VmChange};
use crate::ledger::{Event, Ledger, StackLimits};
use crate::units::Pid;

/// A process as its records show it.
pub struct Watched {
    /// Whose it is.
    pub pid: Pid,
    /// Slot of the process; records of the slot's former owners are told apart by the generation.
    pub slot: Slot,
    /// The ledger of the current image.
    pub ledger: Ledger,
    /// Ledgers of the images before each exec; their memory is gone, their totals count.
    pub past: Vec<Ledger>,
    /// Images whose ledger was dropped because there were more than [`PAST_MAX`].
    pub past_dropped: u64,
    /// When the process ended (CLOCK_MONOTONIC ns) and its wait status.
    pub exited: Option<(u64, u32)>,
    /// Changes of the address space seen.
    pub vm_changes: u64,
    /// Bytes by which each stack made the address space grow (brk, mmap) from inside an allocator call.
    pub growth_bytes: HashMap<u64, u64>,
    /// The program break as last seen; 0 = not yet.
    brk: u64,
}

/// Image ledgers kept of a process that execs again and again; older ones are dropped and counted.
const PAST_MAX: usize = 16;
/// Stacks of heap growth kept of a process. Growth is rare; more stacks than this are a fault of the unwinding, not of the program.
const GROWTH_STACKS_MAX: usize = 64 << 10;

impl Watched {
    /// A process that is watched from now (CLOCK_MONOTONIC ns) on, with the ledger it begins with: empty, or its parent's.
    pub fn new(pid: Pid, slot: Slot, ledger: Ledger) -> Self {
        Self { pid, slot, ledger, past: Vec::new(), past_dropped: 0, exited: None, vm_changes: 0, growth_bytes: HashMap::new(), brk: 0 }
    }

    /// Takes a record that is not an allocator event (those go to the ledger in batches).
    pub fn apply(&mut self, record: &Record<'_>, time_ns: u64) {
        match record.body {
            Body::Exec { .. } => self.exec(time_ns),
            Body::Exit { code } => self.exited = Some((time_ns, code)),
            Body::Vm { change, stack } => self.vm(change, stack.0, time_ns),
            _ => {}
        }
    }

    fn exec(&mut self, time_ns: u64) {
        let before = std::mem::replace(&mut self.ledger, Ledger::new(time_ns, StackLimits::default()));
        if before.totals().allocations > 0 {
            if self.past.len() == PAST_MAX {
                self.past.remove(0);
                self.past_dropped += 1;
            }
            self.past.push(before);
        }
        self.growth_bytes.clear();
        self.brk = 0;
    }

    fn vm(&mut self, change: VmChange, stack: u64, time_ns: u64) {
        self.vm_changes += 1;
        match change {
            VmChange::Mmap { len, .. } => self.grow(stack, len),
            VmChange::Munmap { addr, len } => {
                self.ledger.apply(&Event::Unmapped { start: addr, end: crate::units::Addr(addr.0.saturating_add(len)), time_ns });
            }
            VmChange::Brk { end } => {
                if self.brk != 0 && end.0 > self.brk {
                    self.grow(stack, end.0 - self.brk);
                }
                self.brk = end.0;
            }
            VmChange::Mremap { old_len, new_len, .. } => self.grow(stack, new_len.saturating_sub(old_len)),
            VmChange::Madvise { .. } | VmChange::Mprotect { .. } => {}
        }
    }

    fn grow(&mut self, stack: u64, bytes: u64) {
        if stack == 0 || bytes == 0 || (self.growth_bytes.len() >= GROWTH_STACKS_MAX && !self.growth_bytes.contains_key(&stack)) {
            return;
        }
        let grown = self.growth_bytes.entry(stack).or_default();
        *grown = grown.saturating_add(bytes);
    }
}
