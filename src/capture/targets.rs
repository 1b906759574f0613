//! The target table, mapped into memory: rows that the programs read while the daemon writes them.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use libbpf_rs::Map;

use super::{Error, Hits, Result, Slot, TargetLoss};
use crate::bpf::{TARGET_CONTENTS, TARGET_GOVERNED, TARGET_HELD, TARGET_LIMITED, TARGET_ON, TARGETS_MAX, Target};
use crate::units::Pid;

/// Bytes of the mapping: the values of an array map are contiguous.
const TABLE_BYTES: usize = TARGETS_MAX as usize * size_of::<Target>();

/// The mapping of the BPF array `targets`.
#[derive(Debug)]
pub struct TargetTable {
    rows: NonNull<Target>,
}

// SAFETY: the rows are atomics in shared memory; the pointer is neither moved nor freed before drop.
unsafe impl Send for TargetTable {}
// SAFETY: as above.
unsafe impl Sync for TargetTable {}

impl TargetTable {
    /// Maps the table.
    pub fn map(map: &Map<'_>) -> Result<Self> {
        let map_error = |source: std::io::Error| Error::Map { map: "targets", source: source.into() };
        // SAFETY: a fresh shared mapping of a map created with BPF_F_MMAPABLE and at least TABLE_BYTES of values; the kernel checks both.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), TABLE_BYTES, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, map.as_fd().as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(map_error(std::io::Error::last_os_error()));
        }
        let rows = NonNull::new(address.cast()).ok_or_else(|| map_error(std::io::Error::other("mapped at address 0")))?;
        Ok(Self { rows })
    }

    fn row(&self, slot: Slot) -> &Target {
        let index = usize::from(slot.index).min(TARGETS_MAX as usize - 1);
        // SAFETY: the mapping holds TARGETS_MAX rows of atomics, valid for every bit pattern, and lives as long as self.
        unsafe { self.rows.add(index).as_ref() }
    }

    /// Assigns the row to a process, switched off. The tgid is stored last: only then is the row in use.
    pub fn own(&self, slot: Slot, pid: Pid, shard: u32, flags: u32) {
        let row = self.row(slot);
        row.generation.store(slot.generation, Ordering::Relaxed);
        row.shard.store(shard, Ordering::Relaxed);
        row.flags.store(flags & !TARGET_ON, Ordering::Relaxed);
        row.mm_id.store(u64::from(pid.0), Ordering::Relaxed);
        let spent = [&row.hits, &row.hits_free, &row.returns, &row.programs_ns];
        let governed = [&row.touch_interval, &row.quota_end, &row.closed_ns, &row.deadline_ns].into_iter().chain(spent);
        row.hits_stepped.store(0, Ordering::Relaxed);
        for count in [&row.lost_alloc, &row.lost_free, &row.lost_other, &row.abandoned].into_iter().chain(governed) {
            count.store(0, Ordering::Relaxed);
        }
        row.tgid.store(pid.0, Ordering::Release);
    }

    /// Frees the row.
    pub fn disown(&self, slot: Slot) {
        self.row(slot).tgid.store(0, Ordering::Release);
    }

    /// Frees the row and resets its generation, as if it had never been used.
    pub fn never_owned(&self, slot: Slot) {
        self.disown(slot);
        self.row(slot).generation.store(0, Ordering::Relaxed);
    }

    /// Sets or clears `TARGET_ON`.
    pub fn switch(&self, slot: Slot, on: bool) {
        self.flag(slot, TARGET_ON, on);
    }

    /// Whether the process is watched in windows.
    pub fn is_governed(&self, slot: Slot) -> bool {
        self.row(slot).flags.load(Ordering::Acquire) & TARGET_GOVERNED != 0
    }

    /// Sets or clears `TARGET_CONTENTS`.
    pub fn contents(&self, slot: Slot, on: bool) {
        self.flag(slot, TARGET_CONTENTS, on);
    }

    /// Sets or clears `TARGET_LIMITED`.
    pub fn limit(&self, slot: Slot, limited: bool) {
        self.flag(slot, TARGET_LIMITED, limited);
    }

    /// Sets or clears `TARGET_HELD`.
    pub fn hold(&self, slot: Slot, held: bool) {
        self.flag(slot, TARGET_HELD, held);
    }

    fn flag(&self, slot: Slot, flag: u32, on: bool) {
        let flags = &self.row(slot).flags;
        if on {
            flags.fetch_or(flag, Ordering::AcqRel);
        } else {
            flags.fetch_and(!flag, Ordering::AcqRel);
        }
    }

    /// Allows the target this many more hits, up to a time, and switches it on.
    pub fn open(&self, slot: Slot, quota: u64, deadline_ns: u64) {
        let row = self.row(slot);
        row.deadline_ns.store(deadline_ns, Ordering::Relaxed);
        row.closed_ns.store(0, Ordering::Relaxed);
        row.quota_end.store(row.hits.load(Ordering::Relaxed).saturating_add(quota), Ordering::Release);
        self.switch(slot, true);
    }

    /// Allows the target this many more hits from now on, without other changes: a target that was switched off meanwhile stays off.
    pub fn extend(&self, slot: Slot, quota: u64) {
        let row = self.row(slot);
        row.quota_end.store(row.hits.load(Ordering::Relaxed).saturating_add(quota), Ordering::Release);
    }

    /// Tells the programs that size-selective probes are being attached again.
    pub fn begin_epoch(&self, slot: Slot, epoch: u32) {
        self.row(slot).epoch.store(epoch, Ordering::Release);
    }

    /// Sets how many first touches a recorded one represents; 0 = none are recorded.
    pub fn touch_interval(&self, slot: Slot, interval: u64) {
        self.row(slot).touch_interval.store(interval, Ordering::Relaxed);
    }

    /// Probe hits so far.
    pub fn hits(&self, slot: Slot) -> Hits {
        let row = self.row(slot);
        let (all, frees) = (row.hits.load(Ordering::Acquire), row.hits_free.load(Ordering::Acquire));
        let closed_ns = row.closed_ns.load(Ordering::Acquire);
        let (is_on, quota_end) = (row.flags.load(Ordering::Acquire) & TARGET_ON != 0, row.quota_end.load(Ordering::Acquire));
        Hits {
            allocations: all.saturating_sub(frees),
            frees,
            stepped: row.hits_stepped.load(Ordering::Relaxed),
            returns: row.returns.load(Ordering::Relaxed),
            programs_ns: row.programs_ns.load(Ordering::Relaxed),
            off_at: (!is_on && quota_end <= all).then_some(quota_end),
            closed_ns: (closed_ns != 0).then_some(closed_ns),
        }
    }

    /// The counts of a row; zero if it has another owner by now.
    pub fn loss(&self, slot: Slot) -> TargetLoss {
        let row = self.row(slot);
        if row.generation.load(Ordering::Acquire) != slot.generation {
            return TargetLoss::default();
        }
        TargetLoss {
            allocations: row.lost_alloc.load(Ordering::Relaxed),
            frees: row.lost_free.load(Ordering::Relaxed),
            others: row.lost_other.load(Ordering::Relaxed),
            abandoned: row.abandoned.load(Ordering::Relaxed),
        }
    }
}

impl Drop for TargetTable {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `map` mapped; no reference outlives self.
        unsafe { libc::munmap(self.rows.as_ptr().cast(), TABLE_BYTES) };
    }
}
