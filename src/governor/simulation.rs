//! The whole estimator against programs that do their worst: schedule, pace, observer and estimator run as they do for real, on a
//! program whose every allocation is known.

use super::estimate::errors_of_95_percent;
use super::observer::WindowObserver;
use super::pace::{Pace, Tier, WindowCost};
use super::random::Random;
use super::schedule::Schedule;
use super::{AGES_NS, Estimator, HitCosts};

/// Ten times the real cost, and programs that do a tenth: the same shares of time at a tenth of the events.
const COSTS: HitCosts = HitCosts { allocation_ns: 20_000.0, free_ns: 10_000.0, spread: 0.1 };

/// What a site does: at time `t` of the program it allocates `rate(t)` blocks a second, which live `life_s`.
#[derive(Clone, Copy)]
struct Site {
    /// When blocks are made.
    pattern: Pattern,
    bytes: u64,
    /// Mean lifetime; `exponential` or always the same.
    life_s: f64,
    exponential: bool,
    thread: u32,
}

#[derive(Clone, Copy)]
enum Pattern {
    /// So many a second, evenly.
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

/// Runs `sites` for `wall_s` at a budget of 1 %; the estimator, and the seconds that the windows stand for.
fn run(sites: &[Site], wall_s: f64, seed: u64) -> (Estimator<usize>, f64) {
    let mut pace = Pace::new(0.01, COSTS);
    pace.leave_full();
    let mut schedule = Schedule::new(seed, 0.0);
    let mut random = Random::new(seed ^ 0xdead);
    let mut estimator = Estimator::default();
    let mut now_s = 0.0;
    let mut windows_s = 0.0;
    while now_s < wall_s {
        let Some(cycle) = schedule.draw(now_s, &pace.periods()) else { break };
        // The same phase of the same second each run would be no test of the phases.
        let begin_s = cycle.open_s + 1_000.0;
        let length_s = cycle.class.length_s();
        let mut events: Vec<(f64, usize)> = Vec::new();
        for (index, site) in sites.iter().enumerate() {
            events.extend(site.times(begin_s, begin_s + length_s).into_iter().map(|t| (t, index)));
        }
        events.sort_by(|a, b| a.0.total_cmp(&b.0));
        let ns = |t: f64| (t * 1e9) as u64;
        let mut window = WindowObserver::new(ns(begin_s));
        let mut frees: Vec<(u64, u64, u32)> = Vec::new();
        let quota = pace.quota(cycle.class);
        let (mut allocations, mut close_s) = (0u64, begin_s + length_s);
        for (number, (t, index)) in events.iter().enumerate() {
            if allocations * 2 >= quota {
                close_s = *t;
                break;
            }
            let site = sites[*index];
            let life_s = if site.exponential { -site.life_s * (1.0 - random.unit()).ln() } else { site.life_s };
            allocations += 1;
            frees.push((ns(t + life_s), number as u64 * 16, site.thread));
            window.allocated(number as u64 * 16, site.bytes, *index, site.thread, ns(*t));
        }
        frees.sort_unstable();
        let frees: Vec<_> = frees.into_iter().take_while(|(t, ..)| *t < ns(close_s)).collect();
        for (t, addr, tid) in &frees {
            window.freed(*addr, *tid, *t);
        }
        let closed_early = close_s < begin_s + length_s;
        // The program of this simulation has a clock of its own and is not held up.
        let tally = window.close(ns(close_s), &HitCosts::FREE, |_| None);
        estimator.window(cycle.class, cycle.period_s, closed_early, &tally);
        pace.elapse(cycle.end_s - now_s);
        let open_s = close_s - begin_s;
        pace.spent(WindowCost { allocations, frees: frees.len() as u64, hits_around: 0, open_s, tier: Tier::Windows });
        windows_s += cycle.end_s - now_s;
        now_s = cycle.end_s;
    }
    (estimator, windows_s)
}

/// Share of runs in which the 95 % interval holds the truth, and the mean of estimate ÷ truth, by site and quantity; only where at
/// least `windows_min` windows tell.
fn coverage(sites: &[Site], wall_s: f64, runs: u64, windows_min: f64) -> Vec<(usize, usize, f64, f64)> {
    let mut held = vec![[(0u64, 0u64, 0.0f64); 1 + AGES_NS.len()]; sites.len()];
    for seed in 0..runs {
        let (estimator, windows_s) = run(sites, wall_s, seed * 7919 + 13);
        let estimates = estimator.estimates(windows_s);
        for (index, site) in sites.iter().enumerate() {
            let found = estimates.iter().find(|one| one.stack == Some(index));
            for (quantity, slot) in held[index].iter_mut().enumerate() {
                let windows = estimator.effective_windows(quantity);
                if windows < windows_min {
                    continue;
                }
                let share = quantity.checked_sub(1).map_or(1.0, |age| site.outliving(AGES_NS[age] as f64 / 1e9));
                let truth = site.per_s() * site.bytes as f64 * share;
                // What makes up less than a hundredth of the bytes may not be in any window.
                if truth < 0.01 * total(sites, quantity) {
                    continue;
                }
                let one = found.map(|one| if quantity == 0 { Some(one.allocated) } else { one.outlived[quantity - 1] });
                let one = one.flatten().unwrap_or_default();
                let half = one.bytes_per_s_stderr.unwrap_or(0.0) * errors_of_95_percent(windows);
                slot.0 += 1;
                slot.1 += u64::from((one.bytes_per_s - truth).abs() <= half + truth * 1e-3 + 1e-9);
                slot.2 += if truth > 0.0 { one.bytes_per_s / truth } else { 1.0 };
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

/// Bytes a second of all sites.
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
fn allocation_in_phase_with_the_windows_does_not_fool_it() {
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
    // 16 threads that all do the same at the same moments: their allocations are anything but independent.
    let pattern = Pattern::Burst { period_s: 0.5, count: 100, width_s: 0.25 };
    let storm = |thread| Site { pattern, thread, exponential: false, ..Site::steady(1.0, 100, 0.15) };
    let sites: Vec<Site> = (0..16).map(storm).collect();
    assert_honest("threads", &coverage(&sites, 300.0, 30, 10.0), 0.15);
}

/// Life on average of which one block in a thousand outlives 100 ms.
const RARE_S: f64 = 0.1 / 6.9;

#[test]
fn intervals_hold_the_truth_where_one_block_in_a_thousand_survives() {
    // Of the first some three blocks in 300 s are seen to outlive 100 ms; the second is its like with fewer; the third survives always.
    let sites =
        [Site::steady(2_000.0, 64, RARE_S), Site::steady(400.0, 512, RARE_S), Site { exponential: false, ..Site::steady(4.0, 100, 5.0) }];
    assert_honest("rare", &coverage(&sites, 300.0, 150, 10.0), 0.25);
}

#[test]
fn intervals_hold_the_truth_where_rare_survivors_come_in_bursts_and_from_many_threads() {
    let pattern = Pattern::Burst { period_s: 0.5, count: 100, width_s: 0.25 };
    let storm = |thread| Site { pattern, thread, ..Site::steady(1.0, 100, RARE_S) };
    let mut sites: Vec<Site> = (0..16).map(storm).collect();
    // Rare by its time: every 2 s a burst that lives.
    let seldom = Pattern::Burst { period_s: 2.0, count: 20, width_s: 0.1 };
    sites.push(Site { pattern: seldom, exponential: false, ..Site::steady(1.0, 100, 0.15) });
    assert_honest("rare bursts", &coverage(&sites, 300.0, 100, 10.0), 0.25);
}
