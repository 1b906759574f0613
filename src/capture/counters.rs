//! The BPF programs' counters: records sent, lost and dropped, with the reasons.

use zerocopy::{FromBytes as _, FromZeros as _};

use crate::bpf::{self, Counter};
use crate::unwind::End;

impl Counter {
    /// Its name in JSON and texts, and a description.
    #[must_use]
    pub fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::LostAlloc => ("lost_allocations", "allocation records lost because the ring buffer was full"),
            Self::LostFree => ("lost_frees", "free records lost because the ring buffer was full"),
            Self::LostStack => ("lost_stacks", "stack definitions lost because the ring buffer was full; sent again with the next use"),
            Self::LostVm => (
                "lost_vm_changes",
                "address-space records lost because the ring buffer was full, or events that the kernel did not deliver",
            ),
            Self::LostLife => {
                ("lost_life_events", "life-cycle records lost because the ring buffer was full, or events that the kernel did not deliver")
            }
            Self::Nested => ("nested_calls", "inner allocator calls covered by an outer one"),
            Self::CallAbandoned => ("abandoned_calls", "allocator calls that never returned (exception, longjmp, cancelled thread)"),
            Self::ReturnUnmatched => ("unmatched_returns", "returns of allocator calls whose entry was not observed"),
            Self::NoThreadState => ("no_thread_state", "events lost because thread state could not be allocated"),
            Self::NoWalkState => ("no_walk_state", "stacks lost because walk state could not be allocated"),
            Self::StaleSlot => ("stale_hits", "probe hits for a process that was no longer watched while its probes were being detached"),
            Self::StackTableFull => ("stack_table_full", "stack definitions that could not be remembered as sent"),
            Self::NotFollowed => {
                ("not_followed_calls", "calls of a throwing operator new for 1 GiB or more, whose return cannot be probed safely")
            }
            Self::AllocFailed => ("failed_calls", "allocator calls that returned failure"),
            Self::Walk => ("walks", "stacks walked, without those reused completely"),
            Self::WalkReused => ("walks_reused", "stacks verified as unchanged and reused completely, all of them complete"),
            Self::WalkTailReused => ("walks_tail_reused", "walks of which some frames were verified as unchanged and reused"),
            Self::Frames => ("frames", "frames found by the unwind tables"),
            Self::ArgumentUnreadable => ("unreadable_arguments", "arguments of a program's own probes whose memory could not be read"),
            Self::Hit => ("hits", "probe hits at entries of functions"),
            Self::HitOff => ("hits_off", "probe hits while recording of the process was switched off"),
            Self::HitNull => ("hits_null", "probe hits without a block, such as free(NULL)"),
            Self::UnknownSite => ("unknown_sites", "probe hits at an unknown site: calls lost"),
            Self::LostContents => {
                ("lost_births", "records of new blocks' contents lost because the ring buffer was full: fewer blocks can be checked again")
            }
            Self::HitSmall => {
                ("hits_small", "hits of probes for large blocks by small ones that the thread cache could not supply or take")
            }
            Self::PythonUnread => (
                "python_unread",
                "stacks whose Python frames could not be read, or not all of them; those of the evaluation loop are shown",
            ),
            Self::StringCut => (
                "strings_cut",
                "copies of strings that are longer than 256 KiB (32 KiB before Linux 5.17) or unreadable: counted as blocks of 0 bytes",
            ),
        }
    }
}

/// Outcomes of a probe hit that do not produce a record of a call.
const ACCOUNTED: [Counter; 12] = [
    Counter::HitOff,
    Counter::HitNull,
    Counter::HitSmall,
    Counter::UnknownSite,
    Counter::StaleSlot,
    Counter::Nested,
    Counter::AllocFailed,
    Counter::CallAbandoned,
    Counter::NotFollowed,
    Counter::NoThreadState,
    Counter::LostAlloc,
    Counter::LostFree,
];

/// A reading of all counters, summed over the CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters(bpf::Counters);

impl Default for Counters {
    fn default() -> Self {
        Self(bpf::Counters::new_zeroed())
    }
}

impl Counters {
    /// Sums the per-CPU rows as read from the kernel. Bytes beyond the known counters are ignored.
    pub fn from_rows(rows: &[Vec<u8>]) -> Self {
        let mut sum = Self::default();
        for (row, _) in rows.iter().filter_map(|row| bpf::Counters::read_from_prefix(row).ok()) {
            sum.each_with(&Self(row), u64::wrapping_add);
        }
        sum
    }

    /// Combines each count with that of another reading.
    fn each_with(&mut self, other: &Self, join: impl Fn(u64, u64) -> u64) {
        let own = self.0.value.iter_mut().chain(&mut self.0.ends);
        for (own, other) in own.zip(other.0.value.iter().chain(&other.0.ends)) {
            *own = join(*own, *other);
        }
    }

    /// Adds events that the programs cannot count themselves.
    pub fn add(&mut self, counter: Counter, more: u64) {
        let value = &mut self.0.value[counter as usize];
        *value = value.saturating_add(more);
    }

    /// Adds walks that ended for this reason.
    pub fn add_end(&mut self, reason: End, more: u64) {
        let value = &mut self.0.ends[reason as usize];
        *value = value.saturating_add(more);
    }

    /// One counter.
    #[must_use]
    pub fn get(&self, counter: Counter) -> u64 {
        self.0.value[counter as usize]
    }

    /// Stacks that ended for this reason. Reused walks are complete without being counted individually.
    #[must_use]
    pub fn ends(&self, reason: End) -> u64 {
        let reused = if reason == End::Complete { self.get(Counter::WalkReused) } else { 0 };
        self.0.ends[reason as usize].wrapping_add(reused)
    }

    /// Each counter with its value.
    pub fn iter(&self) -> impl Iterator<Item = (Counter, u64)> + '_ {
        Counter::ALL.iter().map(|&counter| (counter, self.get(counter)))
    }

    /// Probe hits that neither became one of `calls` records nor appear in another count: the kernel lost them. Up to `in_flight` hits may
    /// not have been processed yet.
    pub fn unaccounted_hits(&self, calls: u64, in_flight: u64) -> u64 {
        let accounted = ACCOUNTED.iter().map(|&counter| self.get(counter)).fold(calls, u64::saturating_add);
        let missing = self.get(Counter::Hit).saturating_sub(accounted);
        if missing > in_flight { missing } else { 0 }
    }

    /// The counts since an earlier reading.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut more = *self;
        more.each_with(earlier, u64::wrapping_sub);
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_all_cpus_are_summed_by_counter() {
        let words = (size_of::<bpf::Counters>() / 8) as u64;
        let row = |first: u64| (0..words).flat_map(|i| (first + i).to_ne_bytes()).collect::<Vec<u8>>();
        let counters = Counters::from_rows(&[row(0), row(100)]);
        assert_eq!(counters.get(Counter::LostAlloc), 100);
        assert_eq!(counters.get(Counter::LostFree), 102);
        assert_eq!(counters.ends(End::FrameLimit), 2 * (Counter::ALL.len() as u64 + End::FrameLimit as u64) + 100);
    }

    #[test]
    fn each_counter_has_a_name_of_its_own() {
        let names: std::collections::HashSet<_> = Counter::ALL.iter().map(|counter| counter.words().0).collect();
        assert_eq!(names.len(), Counter::ALL.len());
    }

    #[test]
    fn events_that_the_kernel_did_not_deliver_are_added() {
        let mut counters = Counters::default();
        counters.add(Counter::LostVm, 3);
        counters.add(Counter::LostVm, 4);
        assert_eq!((counters.get(Counter::LostVm), counters.get(Counter::LostLife)), (7, 0));
    }

    #[test]
    fn a_hit_without_a_record_or_a_reason_is_unaccounted_for() {
        let mut counters = Counters::default();
        counters.add(Counter::Hit, 100);
        counters.add(Counter::Nested, 30);
        counters.add(Counter::HitNull, 10);
        assert_eq!(counters.unaccounted_hits(60, 0), 0);
        assert_eq!(counters.unaccounted_hits(50, 0), 10);
        assert_eq!(counters.unaccounted_hits(50, 10), 0, "in flight");
        assert_eq!(counters.unaccounted_hits(500, 0), 0);
    }
}
