//! The sampled ledger against small cases by hand and a naive model.
#![allow(clippy::unwrap_used)]
use proptest::prelude::*;

use super::*;

const T: u64 = 1 << 20;

fn ledger() -> SampledLedger {
    SampledLedger::new(Some(T), StackLimits::default())
}

fn stack(ledger: &SampledLedger, hash_order: usize) -> SampledStack<'_> {
    // Ids 0 and 1 are reserved.
    ledger.stacks()[2 + hash_order]
}

#[test]
fn live_bytes_by_stack_are_the_sum_of_weights_with_its_poisson_error() {
    let mut ledger = ledger();
    ledger.define_stack(StackHash(7), &[1, 2], 1);
    for i in 0..100 {
        ledger.alloc(Addr(0x1000 + i * 64), Sample::new(64, T, 0), StackHash(7), i);
    }
    for i in 0..36 {
        ledger.free(Addr(0x1000 + i * 64), 1_000_000 + i);
    }
    let view = stack(&ledger, 0);
    assert_eq!((view.samples, view.live_samples), (100, 64));
    assert_eq!(view.live_bytes.rounded(), 64 * T);
    assert_eq!(view.live_bytes.rounded_error(), 8 * T, "√(T · Σ weight)");
    assert_eq!(view.allocated_bytes.rounded(), 100 * T);
    assert_eq!(view.allocated_bytes.rounded_error(), 10 * T);
    assert_eq!(view.live.rounded(), 64 * T / 64);
    assert_eq!(view.peak_bytes.rounded(), 100 * T);
    assert_eq!(view.peak_bytes.rounded_error(), 10 * T);
    assert_eq!(view.frames, [1, 2]);
    // Each represents T / 64 blocks; they lived for a millisecond.
    assert_eq!(ledger.lifetimes().iter().sum::<u64>(), 36 * T / 64);
    assert_eq!(ledger.lifetimes()[Histogram::bucket(999)], 36 * T / 64);
    assert_eq!(ledger.sizes()[Histogram::bucket(64)], 100 * T / 64);
}

#[test]
fn each_sample_has_the_error_of_the_interval_with_which_it_was_drawn() {
    let mut ledger = ledger();
    assert_eq!((ledger.interval_bytes(), ledger.longest_interval_bytes()), (Some(T), None), "as the emitter states");
    for i in 0..16 {
        ledger.alloc(Addr(0x1000 + i * 64), Sample::new(64, T, T), StackHash(7), i);
    }
    assert_eq!((ledger.interval_bytes(), ledger.longest_interval_bytes()), (Some(T), None));
    for i in 16..20 {
        ledger.alloc(Addr(0x1000 + i * 64), Sample::new(64, 4 * T, 4 * T), StackHash(7), i);
    }
    let view = stack(&ledger, 0);
    assert_eq!(view.live_bytes.rounded(), 32 * T);
    // 16 · T · T + 4 · 4 T · 4 T, and the widening for few samples of the longer kind: U = (16 + 4 · 4 · 16) / 80 T = 3.4 T.
    let half = 3.4 * 0.98;
    let error = |variance: f64| ((half + (variance + half * half).sqrt()) * T as f64).ceil() as u64;
    assert!(view.live_bytes.rounded_error().abs_diff(error(80.0)) <= 1);
    // Blocks are counted in units of T over a block's size.
    assert!(view.live.rounded_error().abs_diff(error(80.0) / 64) <= 1);
    assert_eq!((ledger.interval_bytes(), ledger.longest_interval_bytes()), (Some((1.6 * T as f64).round() as u64), Some(4 * T)));
    // A block of several points is one sample of them.
    ledger.alloc(Addr(0x9000), Sample::new(5 * T, 8 * T, 4 * T), StackHash(8), 30);
    assert_eq!(stack(&ledger, 1).samples, 1);
    assert_eq!(ledger.interval_bytes(), Some((40.0 * T as f64 / 22.0).round() as u64));
}

#[test]
fn an_interval_of_which_the_weight_is_no_multiple_is_ignored() {
    assert_eq!(Sample::new(64, 3 * T, 2 * T).interval_bytes, 0);
    assert_eq!(Sample::new(64, 4 * T, 2 * T).interval_bytes, 2 * T);
}

#[test]
fn frees_of_blocks_sampled_for_an_earlier_listener_change_nothing() {
    let mut ledger = ledger();
    ledger.alloc(Addr(0x1000), Sample::new(64, T, 0), StackHash(7), 1);
    ledger.free(Addr(0x2000), 2);
    assert_eq!(ledger.totals().live_samples, 1);
    assert_eq!(ledger.stats().unknown_frees, 1);
    assert!(!ledger.is_lossy());
}

#[test]
fn a_block_whose_free_was_lost_is_doubtful_until_a_census_or_a_reuse_of_its_address() {
    let mut ledger = ledger();
    for addr in [0x1000, 0x2000, 0x3000] {
        ledger.alloc(Addr(addr), Sample::new(64, T, 0), StackHash(7), 10);
    }
    ledger.loss(0, 1, 20);
    ledger.alloc(Addr(0x4000), Sample::new(64, T, 0), StackHash(7), 30);
    assert_eq!(stack(&ledger, 0).doubtful_bytes.rounded(), 3 * T);
    ledger.alloc(Addr(0x1000), Sample::new(64, T, 0), StackHash(7), 31);
    assert_eq!(ledger.stats().missed_frees, 1);
    ledger.prune_doubtful(|block| block.addr != Addr(0x2000));
    assert_eq!((ledger.stats().pruned, ledger.totals().live_samples), (1, 3));
    assert_eq!(stack(&ledger, 0).doubtful_bytes.rounded(), T);
}

#[test]
fn blocks_are_removed_with_their_mapping_but_not_later_ones() {
    let mut ledger = ledger();
    ledger.alloc(Addr(0x1000), Sample::new(64, T, 0), StackHash(7), 10);
    ledger.alloc(Addr(0x9000), Sample::new(64, T, 0), StackHash(7), 10);
    ledger.unmap(Addr(0x1000), Addr(0x3000), 20);
    ledger.alloc(Addr(0x2000), Sample::new(64, T, 0), StackHash(7), 30);
    ledger.settle();
    assert_eq!((ledger.totals().live_samples, ledger.stats().unmapped), (2, 1));
}

#[test]
fn a_child_has_its_parents_blocks_and_its_own_account() {
    let mut parent = ledger();
    parent.alloc(Addr(0x1000), Sample::new(64, T, 0), StackHash(7), 10);
    let mut child = parent.fork();
    child.free(Addr(0x1000), 20);
    child.alloc(Addr(0x2000), Sample::new(64, 2 * T, 0), StackHash(7), 30);
    assert_eq!(parent.totals().live_bytes.rounded(), T);
    assert_eq!((child.totals().live_bytes.rounded(), child.totals().allocated_bytes.rounded()), (2 * T, 2 * T));
}

#[test]
fn impossible_weights_are_refused_and_counted() {
    let mut ledger = ledger();
    for (addr, size, weight) in [(0, 1, 1), (8, 1, 0), (8, 1, u64::MAX), (8, u64::MAX, 1)] {
        ledger.alloc(Addr(addr), Sample::new(size, weight, 0), StackHash(7), 1);
    }
    assert_eq!((ledger.stats().implausible, ledger.totals().samples), (4, 0));
}

proptest! {
    /// Against a model that keeps a list and adds up again each time.
    #[test]
    fn live_weights_are_those_of_a_naive_model(ops in proptest::collection::vec((any::<bool>(), 0u64..40, 1u64..9, 1u64..5), 1..300)) {
        let mut ledger = ledger();
        let mut model: HashMap<u64, (u64, u64)> = HashMap::new();
        let mut peak = 0;
        for (time, &(is_free, addr, points, hash)) in ops.iter().enumerate() {
            let addr = 0x1000 + addr * 16;
            if is_free {
                ledger.free(Addr(addr), time as u64);
                model.remove(&addr);
            } else {
                ledger.alloc(Addr(addr), Sample::new(16, points * T, 0), StackHash(hash), time as u64);
                model.insert(addr, (points * T, hash));
            }
            peak = peak.max(model.values().map(|(weight, _)| weight).sum());
        }
        let totals = ledger.totals();
        prop_assert_eq!(totals.live_bytes.rounded(), model.values().map(|(weight, _)| weight).sum::<u64>());
        prop_assert_eq!(totals.peak_bytes.rounded(), peak);
        let by_stack: u64 = ledger.stacks().iter().map(|stack| stack.live_bytes.rounded()).sum();
        prop_assert_eq!(by_stack, totals.live_bytes.rounded());
        let at_peak: u64 = ledger.stacks().iter().map(|stack| stack.peak_bytes.rounded()).sum();
        prop_assert_eq!(at_peak, peak);
    }
}
