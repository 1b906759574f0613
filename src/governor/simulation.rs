//! The whole estimator against adversarial programs: schedule, pace, observer and estimator run as usual, on a program of which every
//! allocation is known.

use super::estimate::Bound;
use super::observer::{ThreadTime, WindowObserver, WindowTimes};
use super::pace::{Pace, Tier, WindowCost};
use super::schedule::Schedule;
use super::{AGES_NS, Estimator, HitCosts, Watched};
use crate::random::Random;

/// Ten times the real cost, with programs of a tenth of the rate: the same shares of time with a tenth of the events.
const COSTS: HitCosts = HitCosts { allocation_ns: 20_000.0, free_ns: 10_000.0, spread: 0.1, traps: None, step_ns: 0.0 };

/// A site: at time `t` of the program it allocates `rate(t)` blocks per second, which live for `life_s`.
#[derive(Clone, Copy)]
struct Site {
    /// When blocks are allocated.
    pattern: Pattern,
    bytes: u64,
    /// Mean lifetime; `exponential` or always the same.
    life_s: f64,
    exponential: bool,
    thread: u32,
}

#[derive(Clone, Copy)]
enum Pattern {
    /// So many per second, evenly.
    Steady(f64),
    /// Every `period_s`, `count` blocks within `width_s`.
    Burst { period_s: f64, count: u32, width_s: f64 },
}

impl Site {
    const fn steady(per_s: f64, bytes: u64, life_s: f64) -> Self {
        Self { pattern: Pattern::Steady(per_s), bytes, life_s, exponential: true, thread: 1 }
    }

    /// Times in [from, to) at which it allocates.
    fn times(&self, from_s: f64, to_s: f64) -> Vec<f64> {
        let step = |step_s: f64, offset_s: f64| {
            let first = ((from_s - offset_s) / step_s).ceil() as i64;
            (first..).map(move |i| i as f64 * step_s + offset_s).take_while(move |t| *t < to_s)
        };
        match self.pattern {
            Pattern::Steady(per_s) => step(1.0 / per_s, 0.3 / per_s).collect(),
            Pattern::Burst { period_s, count, width_s } => {
                let starts = step(period_s, 0.0).chain(std::iter::once((from_s / period_s).floor() * period_s).filter(|t| *t < from_s));
                let within = |start: f64| (0..count).map(move |i| start + width_s * f64::from(i) / f64::from(count));
                starts.flat_map(within).filter(|t| (from_s..to_s).contains(t)).collect()
            }
        }
    }

    fn per_s(&self) -> f64 {
        match self.pattern {
            Pattern::Steady(per_s) => per_s,
            Pattern::Burst { period_s, count, .. } => f64::from(count) / period_s,
        }
    }

    /// Share of blocks that outlive an age.
    fn outliving(&self, age_s: f64) -> f64 {
        if self.exponential { (-age_s / self.life_s).exp() } else { f64::from(u8::from(self.life_s >= age_s)) }
    }
}

/// How a window's probes delay the program.
#[derive(Clone, Copy, PartialEq)]
enum Held {
    /// It has a clock of its own and is not delayed.
    No,
    /// It computes all the time, and each hit delays it by so many times its calibrated cost.
    By(f64),
}

/// Something that a thread does: when, with which block, and its site if it is an allocation.
type Event = (u64, usize, Option<usize>, u32);

/// All allocations and frees of a program from one moment of its own time to another.
fn events(sites: &[Site], begin_s: f64, length_s: f64, random: &mut Random) -> Vec<Event> {
    let ns = |t: f64| (t * 1e9) as u64;
    let mut events = Vec::new();
    let mut number = 0;
    for (index, site) in sites.iter().enumerate() {
        for t in site.times(begin_s, begin_s + length_s) {
            let life_s = if site.exponential { -site.life_s * (1.0 - random.unit()).ln() } else { site.life_s };
            events.push((ns(t), number, Some(index), site.thread));
            events.push((ns(t + life_s), number, None, site.thread));
            number += 1;
        }
    }
    events.retain(|event| event.0 < ns(begin_s + length_s));
    events.sort_unstable();
    events
}

/// Runs `sites` for `wall_s`; the estimator, and the seconds of its own time that the windows represent.
fn run(sites: &[Site], wall_s: f64, seed: u64, held: Held) -> (Estimator<usize>, f64) {
    let mut pace = Pace::new(0.01, 1.0, COSTS);
    pace.leave_full();
    let mut schedule = Schedule::new(seed, 0.0);
    let mut random = Random::new(seed ^ 0xdead);
    let mut estimator = Estimator::default();
    let mut now_s = 0.0;
    let mut own_s = 0.0;
    let (costs, factor) = match held {
        Held::No => (HitCosts::FREE, 0.0),
        Held::By(factor) => (COSTS, factor),
    };
    while now_s < wall_s {
        let Some(cycle) = schedule.draw(now_s, &pace.periods()) else { break };
        // The same phase of the same second each run would be no test of the phases.
        let begin_s = cycle.open_s + 1_000.0;
        let begin_ns = (begin_s * 1e9) as u64;
        let length_s = cycle.class.length_s();
        let end_ns = begin_ns + (length_s * 1e9) as u64;
        let mut window = WindowObserver::new(begin_ns);
        let quota = pace.quota(cycle.class);
        let (mut hits, mut close_ns, mut held_ns) = (0u64, end_ns, 0.0);
        let (mut allocations, mut frees) = (0, 0);
        for (own_ns, number, site, thread) in events(sites, begin_s, length_s, &mut random) {
            let time_ns = own_ns + held_ns as u64;
            if hits >= quota || time_ns >= end_ns {
                close_ns = time_ns.min(end_ns);
                break;
            }
            hits += 1;
            if let Some(index) = site {
                allocations += 1;
                held_ns += COSTS.allocation_ns * factor;
                window.allocated(number as u64 * 16, sites[index].bytes, index, thread, time_ns);
            } else {
                frees += 1;
                held_ns += COSTS.free_ns * factor;
                window.freed(number as u64 * 16, thread, time_ns);
            }
        }
        let open_s = (close_ns - begin_ns) as f64 / 1e9;
        let time = ThreadTime { run_s: open_s, ready_s: open_s, sleeps: Some(0) };
        let times = match held {
            Held::No => WindowTimes::default(),
            Held::By(_) => WindowTimes { run_s: Some(open_s), threads: [(1, time)].into() },
        };
        let tally = window.close(close_ns, &costs, &times);
        estimator.window(cycle.class, cycle.period_s, close_ns < end_ns, &tally);
        let went_s = cycle.end_s - now_s;
        pace.elapse(went_s, went_s);
        let lost_s = COSTS.seconds(allocations, frees);
        pace.spent(WindowCost { lost_s, around_s: 0.0, open_s, tier: Tier::Windows });
        own_s += went_s - held_ns / 1e9;
        now_s = cycle.end_s;
    }
    (estimator, own_s)
}

/// Share of runs in which the 95 % interval holds the truth, and the mean of estimate ÷ truth, by site and quantity; only where at
/// least `windows_min` windows give data.
fn coverage(sites: &[Site], wall_s: f64, runs: u64, windows_min: f64) -> Vec<(usize, usize, f64, f64)> {
    coverage_held(sites, wall_s, runs, windows_min, |_| Held::No)
}

/// The same for a program that is delayed as `held_by` says for each run.
fn coverage_held(
    sites: &[Site],
    wall_s: f64,
    runs: u64,
    windows_min: f64,
    held_by: impl Fn(&mut Random) -> Held,
) -> Vec<(usize, usize, f64, f64)> {
    let mut held = vec![[(0u64, 0u64, 0.0f64); 1 + AGES_NS.len()]; sites.len()];
    for seed in 0..runs {
        let mut random = Random::new(seed ^ 0xbeef);
        let (estimator, own_s) = run(sites, wall_s, seed * 7919 + 13, held_by(&mut random));
        let estimates = estimator.estimates(Watched { own_s, clock_s: own_s, ends_in_full: false });
        assert_eq!(estimates.bound, None, "run {seed}");
        for (index, site) in sites.iter().enumerate() {
            let found = estimates.stacks.iter().find(|one| one.stack == Some(index));
            for (quantity, slot) in held[index].iter_mut().enumerate() {
                let windows = estimator.effective_windows(quantity);
                if windows < windows_min {
                    continue;
                }
                let share = quantity.checked_sub(1).map_or(1.0, |age| site.outliving(AGES_NS[age] as f64 / 1e9));
                let truth = site.per_s() * site.bytes as f64 * share;
                // A site with less than a hundredth of the bytes may not be in any window.
                if truth < 0.01 * total(sites, quantity) {
                    continue;
                }
                let one = found.and_then(|one| one.amounts[quantity]).unwrap_or_default().bytes;
                let truth = truth * own_s;
                slot.0 += 1;
                slot.1 += u64::from((one.value - truth).abs() <= 1.96 * one.stderr + truth * 1e-3 + 1e-9);
                slot.2 += if truth > 0.0 { one.value / truth } else { 1.0 };
            }
        }
    }
    let mut rows = Vec::new();
    for (index, site) in held.iter().enumerate() {
        for (quantity, (runs, inside, ratio)) in site.iter().enumerate().filter(|(_, row)| row.0 > 0) {
            rows.push((index, quantity, *inside as f64 / *runs as f64, ratio / *runs as f64));
        }
    }
    rows
}

/// Bytes per second of all sites.
fn total(sites: &[Site], quantity: usize) -> f64 {
    let of = |site: &Site| {
        site.per_s() * site.bytes as f64 * quantity.checked_sub(1).map_or(1.0, |age| site.outliving(AGES_NS[age] as f64 / 1e9))
    };
    sites.iter().map(of).sum()
}

/// Every site and quantity covers in at least 90 % of the runs and is right on average to within `tolerance`.
fn assert_honest(name: &str, rows: &[(usize, usize, f64, f64)], tolerance: f64) {
    assert!(!rows.is_empty(), "{name}: nothing was estimated");
    for (site, quantity, inside, ratio) in rows {
        assert!(
            *inside >= 0.90,
            "{name}: site {site}, quantity {quantity}: interval holds the truth in {inside} of the runs (mean ratio {ratio})"
        );
        assert!((ratio - 1.0).abs() <= tolerance, "{name}: site {site}, quantity {quantity}: estimate/truth is {ratio} on average");
    }
}

#[test]
fn steady_sites_with_short_and_long_lives_are_covered() {
    let sites = [Site::steady(4_000.0, 64, 0.0005), Site::steady(400.0, 512, 0.03), Site::steady(50.0, 1024, 5.0)];
    assert_honest("steady", &coverage(&sites, 120.0, 60, 4.0), 0.05);
}

#[test]
fn a_leak_under_a_thousand_times_its_churn_is_found() {
    let leak = Site { life_s: 1e9, exponential: false, ..Site::steady(10.0, 100, 1.0) };
    let sites = [Site::steady(10_000.0, 100, 0.0002), leak];
    // Few of its blocks fall into any window: the mean is right, and the interval wide.
    let rows = coverage(&sites, 600.0, 20, 4.0);
    assert_honest("leak", &rows.into_iter().filter(|row| row.0 == 1).collect::<Vec<_>>(), 0.25);
}

#[test]
fn allocation_in_phase_with_the_windows_is_estimated_without_bias() {
    // Bursts with the very periods of windows and of likely cycles.
    for period_s in [0.02, 0.2, 2.0] {
        let burst = Pattern::Burst { period_s, count: (2_000.0 * period_s) as u32, width_s: period_s / 5.0 };
        let sites = [Site { pattern: burst, ..Site::steady(1.0, 256, 0.05) }, Site::steady(2_000.0, 64, 0.015)];
        assert_honest(&format!("in phase at {period_s} s"), &coverage(&sites, 600.0, 30, 30.0), 0.12);
    }
}

#[test]
fn bursts_are_neither_missed_nor_counted_twice() {
    let burst = Pattern::Burst { period_s: 0.7, count: 2_000, width_s: 0.3 };
    let sites = [Site { pattern: burst, ..Site::steady(1.0, 128, 0.02) }, Site::steady(400.0, 64, 0.015)];
    assert_honest("bursts", &coverage(&sites, 600.0, 30, 20.0), 0.10);
}

#[test]
fn a_storm_of_threads_is_one_window_and_not_many() {
    // 16 threads that all do the same at the same moments: their allocations are not independent at all.
    let pattern = Pattern::Burst { period_s: 0.5, count: 100, width_s: 0.25 };
    let storm = |thread| Site { pattern, thread, exponential: false, ..Site::steady(1.0, 100, 0.15) };
    let sites: Vec<Site> = (0..16).map(storm).collect();
    assert_honest("threads", &coverage(&sites, 300.0, 30, 10.0), 0.15);
}

/// Mean lifetime with which one block in a thousand outlives 100 ms.
const RARE_S: f64 = 0.1 / 6.9;

#[test]
fn intervals_hold_the_truth_where_one_block_in_a_thousand_survives() {
    // Some three blocks of the first in 300 s are seen to outlive 100 ms; the second is like it with fewer; the third always survives.
    let sites =
        [Site::steady(2_000.0, 64, RARE_S), Site::steady(400.0, 512, RARE_S), Site { exponential: false, ..Site::steady(4.0, 100, 5.0) }];
    assert_honest("rare", &coverage(&sites, 300.0, 150, 10.0), 0.25);
}

#[test]
fn intervals_hold_the_truth_where_rare_survivors_come_in_bursts_and_from_many_threads() {
    let pattern = Pattern::Burst { period_s: 0.5, count: 100, width_s: 0.25 };
    let storm = |thread| Site { pattern, thread, ..Site::steady(1.0, 100, RARE_S) };
    let mut sites: Vec<Site> = (0..16).map(storm).collect();
    // Rare in time: every 2 s a burst that survives.
    let seldom = Pattern::Burst { period_s: 2.0, count: 20, width_s: 0.1 };
    sites.push(Site { pattern: seldom, exponential: false, ..Site::steady(1.0, 100, 0.15) });
    assert_honest("rare bursts", &coverage(&sites, 300.0, 100, 10.0), 0.25);
}

/// Normal with mean 1 and this standard deviation, by the sum of twelve uniform ones.
fn about_one(random: &mut Random, deviation: f64) -> f64 {
    1.0 + deviation * ((0..12).map(|_| random.unit()).sum::<f64>() - 6.0)
}

/// A program that computes, whose probes take nearly half of a window's time.
fn computing() -> [Site; 4] {
    let sudden = Pattern::Burst { period_s: 0.9, count: 3_000, width_s: 0.3 };
    [
        Site::steady(12_000.0, 64, 0.0002),
        Site::steady(2_000.0, 256, 0.03),
        Site { pattern: sudden, ..Site::steady(1.0, 512, 0.001) },
        Site { exponential: false, ..Site::steady(100.0, 1_000, 1e9) },
    ]
}

#[test]
fn intervals_hold_the_truth_of_a_program_that_probes_delay() {
    // The cost of a hit is known with a standard error of COSTS.error().
    let rows = coverage_held(&computing(), 300.0, 100, 10.0, |random| Held::By(about_one(random, COSTS.error())));
    assert_honest("delayed", &rows, 0.15);
}

#[test]
fn bounds_hold_for_a_program_that_probes_delay_most_of_the_time() {
    // Thirty hits take a millisecond; it would make ten times as many.
    let leak = Site { exponential: false, ..Site::steady(300.0, 100, 1e9) };
    let sites = [Site::steady(300_000.0, 64, 0.0002), Site::steady(3_000.0, 512, 0.03), leak];
    let (mut held, mut all, mut ranked) = (0u32, 0u32, 0u32);
    for seed in 0..40 {
        let mut random = Random::new(seed ^ 0xbeef);
        let (estimator, own_s) = run(&sites, 60.0, seed * 7919 + 13, Held::By(about_one(&mut random, COSTS.error())));
        let estimates = estimator.estimates(Watched { own_s, clock_s: own_s, ends_in_full: false });
        let Some(bound) = estimates.bound else { panic!("run {seed} says that it has estimates") };
        assert!(bound == Bound::Saturated || estimator.effective_windows(0) < 2.0);
        for one in &estimates.stacks {
            let (Some(site), Some(allocated)) = (one.stack.map(|index| sites[index]), one.amounts[0]) else { continue };
            let least = allocated.bytes.least;
            all += 1;
            held += u32::from(least <= site.per_s() * site.bytes as f64 * own_s);
        }
        // Of the churn nothing outlives 1 ms, of the other everything.
        let outlived = |site: usize| {
            let found = estimates.stacks.iter().find(|one| one.stack == Some(site));
            found.and_then(|one| one.amounts[2]).map_or(0.0, |one| one.bytes.value)
        };
        ranked += u32::from(outlived(0) < outlived(1));
    }
    assert!(held * 100 >= all * 95, "{held} of {all} bounds hold");
    assert!(ranked >= 36, "{ranked} of 40");
}
