//! The programs' counters: what was sent, lost, dropped and why. The order is that of `enum fp_counter` in `bpf/fragprof.h`.

use crate::unwind::End;

/// Name and description of each counter before the per-reason unwind ends, in wire order.
pub const DESCRIPTIONS: [(&str, &str); 25] = [
    ("lost_allocations", "allocation records lost because the ring buffer was full"),
    ("lost_frees", "free records lost because the ring buffer was full"),
    ("lost_stacks", "stack definitions lost because the ring buffer was full; sent again with the next use"),
    ("lost_vm_changes", "address-space records lost because the ring buffer was full, or events that the kernel did not pass on"),
    ("lost_life_events", "life-cycle records lost because the ring buffer was full, or events that the kernel did not pass on"),
    ("nested_calls", "inner allocator calls covered by an outer one"),
    ("abandoned_calls", "allocator calls that never returned (exception, longjmp, cancelled thread)"),
    ("unmatched_returns", "returns of allocator calls whose entry was not seen"),
    ("no_thread_state", "events lost because thread state could not be allocated"),
    ("no_walk_state", "stacks lost because walk state could not be allocated"),
    ("stale_hits", "probe hits for a process that was let go of while its probes went out"),
    ("stack_table_full", "stack definitions that could not be remembered as sent"),
    ("not_followed_calls", "calls of a throwing operator new too large (1 GiB) to probe their return safely"),
    ("failed_calls", "allocator calls that returned failure"),
    ("walks", "stacks walked, but for those reused whole"),
    ("walks_reused", "stacks proven unchanged and reused whole, all of them complete"),
    ("walks_tail_reused", "walks of which some frames were proven unchanged and reused"),
    ("frames", "frames found by the unwind tables"),
    ("unreadable_arguments", "arguments of a program's own probes whose memory could not be read"),
    ("hits", "probe hits at entries of functions"),
    ("hits_off", "probe hits while the process was switched off"),
    ("hits_null", "probe hits that hand over no block, as free(NULL) does"),
    ("unknown_sites", "probe hits whose place is not known: calls lost"),
    ("lost_births", "records of what new blocks held lost because the ring buffer was full: fewer blocks can be known again"),
    ("hits_small", "hits of probes for large blocks by a small one, which the thread cache had no room or no block for"),
];

/// What may become of a probe's hit instead of a record.
const ACCOUNTED: [&str; 12] = [
    "hits_off",
    "hits_null",
    "hits_small",
    "unknown_sites",
    "stale_hits",
    "nested_calls",
    "failed_calls",
    "abandoned_calls",
    "not_followed_calls",
    "no_thread_state",
    "lost_allocations",
    "lost_frees",
];

/// `FP_END_MAX`: the reasons for a walk's end, counted behind [`DESCRIPTIONS`].
pub const ENDS: usize = 13;
/// `FP_CNT_MAX`.
pub const COUNTERS: usize = DESCRIPTIONS.len() + ENDS;

/// A reading of all counters, summed over the CPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    values: [u64; COUNTERS],
}

impl Default for Counters {
    fn default() -> Self {
        Self { values: [0; COUNTERS] }
    }
}

impl Counters {
    /// Sums the per-CPU rows as the kernel hands them out. Bytes beyond the known counters are ignored.
    pub fn from_rows(rows: &[Vec<u8>]) -> Self {
        let mut values = [0u64; COUNTERS];
        for row in rows {
            for (value, bytes) in values.iter_mut().zip(row.as_chunks::<8>().0) {
                *value = value.wrapping_add(u64::from_ne_bytes(*bytes));
            }
        }
        Self { values }
    }

    /// Adds what the programs cannot count themselves. Nothing happens to a name that is not there.
    pub fn add(&mut self, name: &str, more: u64) {
        if let Some(at) = DESCRIPTIONS.iter().position(|(n, _)| *n == name) {
            self.values[at] = self.values[at].saturating_add(more);
        }
    }

    /// A counter by its name in [`DESCRIPTIONS`]; 0 for a name that is not there.
    pub fn get(&self, name: &str) -> u64 {
        DESCRIPTIONS.iter().position(|(n, _)| *n == name).map_or(0, |i| self.values[i])
    }

    /// Stacks that ended for this reason (`enum fp_unwind_end`). Those reused whole are complete without being counted so one by one.
    pub fn ends(&self, reason: u8) -> u64 {
        let reused = if reason == End::Complete as u8 { self.get("walks_reused") } else { 0 };
        self.values.get(DESCRIPTIONS.len() + usize::from(reason)).copied().unwrap_or(0).wrapping_add(reused)
    }

    /// Name, description and value of each counter.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + '_ {
        DESCRIPTIONS.iter().zip(self.values).map(|((name, text), value)| (*name, *text, value))
    }

    /// Probe hits that neither became one of `calls` records nor are in another count: the kernel lost them. Up to `in_flight` hits may
    /// still be on their way.
    pub fn unaccounted_hits(&self, calls: u64, in_flight: u64) -> u64 {
        let accounted = ACCOUNTED.iter().map(|name| self.get(name)).fold(calls, u64::saturating_add);
        let missing = self.get("hits").saturating_sub(accounted);
        if missing > in_flight { missing } else { 0 }
    }

    /// What was counted since an earlier reading.
    pub fn since(&self, earlier: &Self) -> Self {
        let mut values = self.values;
        for (value, before) in values.iter_mut().zip(earlier.values) {
            *value = value.wrapping_sub(before);
        }
        Self { values }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_all_cpus_are_summed_by_name() {
        let row = |first: u64| (0..COUNTERS as u64).flat_map(|i| (first + i).to_ne_bytes()).collect::<Vec<u8>>();
        let counters = Counters::from_rows(&[row(0), row(100)]);
        assert_eq!(counters.get("lost_allocations"), 100);
        assert_eq!(counters.get("lost_frees"), 102);
        assert_eq!(counters.ends(0), 2 * DESCRIPTIONS.len() as u64 + 100);
        assert_eq!(counters.get("no such"), 0);
    }

    #[test]
    fn what_the_kernel_did_not_pass_on_is_added() {
        let mut counters = Counters::default();
        counters.add("lost_vm_changes", 3);
        counters.add("lost_vm_changes", 4);
        counters.add("no such", 5);
        assert_eq!((counters.get("lost_vm_changes"), counters.get("lost_life_events")), (7, 0));
    }

    #[test]
    fn a_hit_without_a_record_or_a_reason_is_unaccounted_for() {
        let mut counters = Counters::default();
        let mut set = |name, value| counters.values[DESCRIPTIONS.iter().position(|(n, _)| *n == name).expect(name)] = value;
        set("hits", 100);
        set("nested_calls", 30);
        set("hits_null", 10);
        assert_eq!(counters.unaccounted_hits(60, 0), 0);
        assert_eq!(counters.unaccounted_hits(50, 0), 10);
        assert_eq!(counters.unaccounted_hits(50, 10), 0, "on their way");
        assert_eq!(counters.unaccounted_hits(500, 0), 0);
    }
}
