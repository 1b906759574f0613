//! The estimator against the textbook.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::governor::observer::WindowDoubts;

fn tally(length_s: f64, bytes: &[(u32, f64)]) -> Tally<u32> {
    let row = |bytes: f64| {
        let mut row = [Amount::default(); QUANTITIES];
        let seen = Plain { count: 1.0, bytes };
        row[0] = Amount { count: 1.0, bytes, seen, least: seen, ..Amount::default() };
        row
    };
    Tally {
        length_s,
        stacks: bytes.iter().map(|(stack, bytes)| (*stack, row(*bytes))).collect(),
        own_s: length_s,
        own_most_s: length_s,
        run_s: length_s,
        sleepers_hits_s: 0.0,
        cost_error: 0.0,
        speed: 1.0,
        bytes: bytes.iter().map(|(_, bytes)| bytes).sum(),
        saturated_bytes: 0.0,
        allocations: 1,
        frees: 0,
        doubts: WindowDoubts::default(),
    }
}

/// A process that runs all the time.
fn watched(own_s: f64) -> Watched {
    Watched { own_s, clock_s: own_s, ends_in_full: true }
}

fn of(estimator: &Estimator<u32>, stack: u32, own_s: f64) -> Estimate {
    estimator.estimates(watched(own_s)).stacks.into_iter().find(|one| one.stack == Some(stack)).unwrap().amounts[0].unwrap()
}

/// With four windows.
const FEW: f64 = 3.18 / 1.96;

#[test]
fn the_mean_and_its_error_are_those_of_the_textbook() {
    let mut estimator = Estimator::default();
    for bytes in [10.0, 20.0, 30.0] {
        estimator.window(WindowClass::Medium, 5.0, false, &tally(0.2, &[(1, bytes)]));
    }
    estimator.window(WindowClass::Medium, 5.0, false, &tally(0.2, &[]));
    let one = of(&estimator, 1, 20.0);
    // 50, 100, 150, 0 bytes per second: mean 75, standard deviation 64.5, over √4; in 20 s.
    assert!((one.bytes.value - 1_500.0).abs() < 1e-6);
    assert!((one.bytes.stderr - 20.0 * 32.27 * FEW).abs() < 0.5, "{one:?}");
    assert!((one.bytes.least - f64::max(1_500.0 - 20.0 * 32.27 * 2.35, 60.0)).abs() < 0.5, "{one:?}");
}

#[test]
fn a_count_has_the_error_of_bytes_where_each_block_is_one_byte() {
    let mut estimator = Estimator::default();
    for count in [10.0, 20.0, 30.0, 0.0] {
        let mut tally = tally(0.2, &[(1, 0.0)]);
        tally.stacks[0].1[0] = Amount { count, count_squares: count, bytes: count, squares: count, ..Amount::default() };
        estimator.window(WindowClass::Medium, 5.0, false, &tally);
    }
    let one = of(&estimator, 1, 20.0);
    assert_eq!((one.count.value, one.count.stderr), (one.bytes.value, one.bytes.stderr));
    assert!((one.count.value - 1_500.0).abs() < 1e-6 && one.count.stderr > 20.0 * 32.27 * FEW);
}

#[test]
fn what_was_traced_in_full_has_no_error() {
    let mut estimator = Estimator::default();
    estimator.full(&tally(10.0, &[(1, 1000.0)]));
    assert_eq!((of(&estimator, 1, 0.0).bytes.value, of(&estimator, 1, 0.0).bytes.stderr), (1_000.0, 0.0));
    for bytes in [4.0, 8.0, 4.0, 8.0] {
        estimator.window(WindowClass::Short, 5.0, false, &tally(0.02, &[(1, bytes)]));
    }
    // 300 bytes per second over 10 s of windows, 1000 bytes in full.
    let both = of(&estimator, 1, 10.0);
    assert!((both.bytes.value - 4_000.0).abs() < 1e-6, "{both:?}");
    assert!((both.bytes.stderr - 10.0 * 57.7 * FEW).abs() < 1.0, "{both:?}");
}

#[test]
fn a_class_with_a_window_closed_early_is_left_out() {
    let mut estimator = Estimator::default();
    estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &[(1, 2.0)]));
    estimator.window(WindowClass::Long, 200.0, true, &tally(0.3, &[(1, 900.0)]));
    assert!((of(&estimator, 1, 10.0).bytes.value - 1_000.0).abs() < 1e-6);
    assert!((estimator.effective_windows(0) - 1.0).abs() < 1e-9);
}

#[test]
fn a_window_too_short_for_an_age_gives_no_data_on_it() {
    let mut estimator = Estimator::default();
    estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &[(1, 2.0)]));
    let amounts = estimator.estimates(watched(2.0)).stacks[0].amounts;
    let of_age = |age_ns: u64| amounts[1 + AGES_NS.iter().position(|age| *age == age_ns).unwrap()];
    assert!(of_age(10_000_000).is_some() && of_age(100_000_000).is_none());
}

#[test]
fn a_single_window_gives_a_bound_of_what_it_saw() {
    let mut estimator = Estimator::default();
    estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &[(1, 2.0)]));
    let estimates = estimator.estimates(watched(2.0));
    assert_eq!(estimates.bound, Some(Bound::TooFew));
    assert_eq!(estimates.total[0].unwrap().bytes.least, 2.0);
    assert_eq!(Estimator::<u32>::default().estimates(watched(2.0)).bound, Some(Bound::TooFew));
}

#[test]
fn a_window_counts_by_what_the_process_ran_in_it() {
    let mut estimator = Estimator::default();
    // It runs 5 ms of every second window, and allocates 100 bytes in each ms of its own.
    for own_s in [0.02, 0.005, 0.02, 0.005, 0.0] {
        let mut tally = tally(0.02, &[(1, own_s * 1e5)]);
        (tally.own_s, tally.own_most_s) = (own_s, own_s);
        estimator.window(WindowClass::Short, 2.0, false, &tally);
    }
    let one = of(&estimator, 1, 60.0);
    assert!((one.bytes.value - 60.0 * 1e5).abs() < 1e-3 && one.bytes.stderr < 0.3 * one.bytes.value, "{one:?}");
}

#[test]
fn sleeping_threads_are_measured_by_the_time_with_the_smaller_error() {
    // In windows of 20 ms the process ran 3 ms, of which hits took 2: its own time is known poorly, by the clock it did at most a ninth
    // more. If it ran 16 ms, of which hits took 5, it may have done a third more by the clock, and its own time is known to a twentieth.
    let by_clock = 60.0 * 100.0 / 0.02 * (1.0 + 1.0 / 18.0);
    for (run_s, hits_s, value) in [(0.003, 0.002, by_clock), (0.016, 0.005, 6.0 * 100.0 / 0.011)] {
        let mut estimator = Estimator::default();
        for _ in 0..50 {
            let mut tally = tally(0.02, &[(1, 100.0)]);
            (tally.run_s, tally.sleepers_hits_s, tally.cost_error) = (run_s, hits_s, 0.1);
            (tally.own_s, tally.own_most_s) = (run_s - hits_s, run_s - 0.8 * hits_s);
            tally.stacks[0].1[0].stretch.bytes = 100.0 * (0.02 / (0.02 - hits_s) - 1.0);
            estimator.window(WindowClass::Short, 2.0, false, &tally);
        }
        let total = estimator.estimates(Watched { own_s: 6.0, clock_s: 60.0, ends_in_full: false }).total[0].unwrap().bytes;
        assert!((total.value / value - 1.0).abs() < 1e-6, "{hits_s}: {total:?} for {value}");
        assert!(total.stderr < 0.1 * total.value && total.stderr > 0.0, "{total:?}");
    }
}

#[test]
fn where_probes_took_most_of_the_time_all_rates_are_lower_bounds_at_the_least_cost() {
    let mut estimator = Estimator::default();
    for _ in 0..100 {
        let mut tally = tally(0.02, &[(1, 300.0)]);
        tally.saturated_bytes = 300.0;
        let row = &mut tally.stacks[0].1[0];
        (row.seen.bytes, row.least.bytes, row.held.bytes) = (100.0, 200.0, 50.0);
        estimator.window(WindowClass::Short, 2.0, false, &tally);
    }
    let estimates = estimator.estimates(watched(10.0));
    let total = estimates.total[0].unwrap().bytes;
    assert_eq!(estimates.bound, Some(Bound::Saturated));
    assert!((total.value - 150_000.0).abs() < 1e-3 && total.stderr >= 25_000.0, "{total:?}");
    assert!(total.least <= 100_000.0 && total.least > 95_000.0, "{total:?}");
}

#[test]
fn for_bursts_that_windows_missed_only_the_observed_amounts_are_reported() {
    let mut estimator = Estimator::default();
    for window in 0..40 {
        let mut tally = tally(0.2, &[]);
        tally.allocations = u64::from(window < 3);
        estimator.window(WindowClass::Medium, 5.0, false, &tally);
    }
    assert_eq!(estimator.estimates(watched(200.0)).bound, Some(Bound::Unmet));
    estimator.window(WindowClass::Medium, 5.0, false, &tally(0.2, &[(1, 100.0)]));
    assert_eq!(estimator.estimates(watched(200.0)).bound, None);
}

/// Its full trace was cut short, and it ended before a window opened: its running time until then was not read, or not completely.
#[test]
fn a_process_that_ended_before_its_first_window_has_only_a_lower_bound() {
    let estimator = Estimator::<u32>::default();
    let ended = |ends_in_full| estimator.estimates(Watched { own_s: 0.0, clock_s: 0.5, ends_in_full }).bound;
    assert_eq!(ended(false), Some(Bound::TooFew));
    assert_eq!(ended(true), None);
}

#[test]
fn stacks_beyond_the_limit_go_into_one_row() {
    let mut estimator = Estimator::default();
    let many: Vec<(u32, f64)> = (0..STACKS_MAX as u32 + 10).map(|stack| (stack, 1.0)).collect();
    estimator.window(WindowClass::Short, 2.0, false, &tally(0.02, &many));
    let rest = estimator.estimates(watched(2.0)).stacks.into_iter().find(|one| one.stack.is_none()).unwrap();
    assert!((rest.amounts[0].unwrap().bytes.value - 2.0 * 10.0 / 0.02).abs() < 1e-6);
    assert_eq!(estimator.stacks_refused(), 10);
}
