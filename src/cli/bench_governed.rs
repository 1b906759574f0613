//! `fragprof bench --governed`: what a target loses under a budget, and under the census alone, against itself undisturbed.
//!
//! The work is that of a program that ends by itself, or of a process that is already there while a load runs. What is compared is the
//! target's CPU time for the same work, each way in turn, round after round.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::bench::{Holds, cpu_seconds, median};
use super::record::failed;
use crate::census::{self, Level, LiveMemory, Pace, Places};
use crate::recorder::governed::{Governed, Options, process_cpu_ns};
use crate::target::Process;
use crate::units::Pid;

/// The budget that the figures are for.
const BUDGET: f64 = 0.01;
/// Time between two cheap censuses and between two full ones: those of the agent, three times as often.
const TOP_EVERY: Duration = Duration::from_secs(5);
const FULL_EVERY: Duration = Duration::from_secs(100);

/// Measures and prints.
///
/// # Errors
/// If BPF is not permitted here or the command cannot be run.
pub fn run(command: &[OsString], pid: Option<u32>, rounds: u32) -> anyhow::Result<()> {
    let mut engine = Governed::new(Options { budget: BUDGET, own_census: false, ..Options::default() }).map_err(failed)?;
    let costs = engine.costs();
    let mut samples: [Vec<f64>; 3] = Default::default();
    let (mut windows, mut lost) = (0, 0.0);
    for round in 0..rounds as usize {
        for turn in 0..3 {
            // Each way has each place in the order.
            let way = (round + turn) % 3;
            let seconds = match way {
                0 => measure(command, pid, |_| Ok(Box::new(())))?,
                1 => measure(command, pid, |pid| {
                    engine.watch(pid, BUDGET).map_err(failed)?;
                    Ok(Box::new(Governing { engine: &mut engine, pid, windows: &mut windows, lost: &mut lost }))
                })?,
                _ => measure(command, pid, |pid| Ok(Box::new(Counting::new(pid))))?,
            };
            samples[way].push(seconds);
        }
    }
    let ratios = |way: usize| samples[0].iter().zip(&samples[way]).map(|(alone, seconds)| seconds / alone - 1.0).collect::<Vec<f64>>();
    let (governed, census) = (ratios(1), ratios(2));
    let alone = median(samples[0].clone());
    println!(
        "a hit costs {:.2} µs (malloc) and {:.2} µs (free); CPU time of the same work, medians of {rounds} rounds",
        costs.allocation_ns / 1e3,
        costs.free_ns / 1e3
    );
    println!("  {:<34} {alone:>8.3} s", "alone");
    for (name, way, ratios) in [("budget 1 %", 1, &governed), ("census alone", 2, &census)] {
        let seconds = median(samples[way].clone());
        println!(
            "  {name:<34} {seconds:>8.3} s   {:>+6.2} %   (median of the rounds' own ratios {:>+6.2} %, quartiles {:+.2} to {:+.2} %)",
            (seconds / alone - 1.0) * 100.0,
            median(ratios.clone()) * 100.0,
            quartile(ratios, 1) * 100.0,
            quartile(ratios, 3) * 100.0
        );
    }
    println!("  {windows} windows; the governor's own estimate of what was lost: {:.2} %", lost / f64::from(rounds) * 100.0);
    Ok(())
}

fn quartile(values: &[f64], which: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get((sorted.len().saturating_sub(1)) * which / 4).copied().unwrap_or(f64::NAN)
}

fn measure<'a>(
    command: &[OsString],
    pid: Option<u32>,
    hold: impl FnOnce(Pid) -> anyhow::Result<Box<dyn Holds + 'a>>,
) -> anyhow::Result<f64> {
    let Some(pid) = pid.map(Pid) else { return cpu_seconds(command, hold) };
    let cpu_s = || process_cpu_ns(pid).map(|ns| ns as f64 / 1e9).with_context(|| format!("process {pid} is gone"));
    let mut held = hold(pid)?;
    let before_s = cpu_s()?;
    let mut load = Command::new(&command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot run {}", command[0].to_string_lossy()))?;
    while load.try_wait()?.is_none() {
        held.step();
    }
    Ok(cpu_s()? - before_s)
}

struct Governing<'a> {
    engine: &'a mut Governed,
    pid: Pid,
    windows: &'a mut u64,
    lost: &'a mut f64,
}

impl Holds for Governing<'_> {
    fn step(&mut self) {
        if !self.engine.step(Duration::from_millis(20)) {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Governing<'_> {
    fn drop(&mut self) {
        for status in self.engine.status() {
            *self.windows += status.windows;
            *self.lost += status.slowdown_ratio_est;
        }
        self.engine.unwatch(self.pid);
    }
}

struct Counting {
    pid: Pid,
    places: Places,
    top: Instant,
    full: Option<Instant>,
}

impl Counting {
    fn new(pid: Pid) -> Self {
        Self { pid, places: Places::default(), top: Instant::now(), full: None }
    }

    fn count(&mut self, level: Level) {
        let Ok(memory) = Process::open(self.pid).map_err(Into::into).and_then(LiveMemory::open) else { return };
        let options = census::Options { level, pace: Pace::default(), with_not_malloc: false };
        // One that fails costs the target nothing.
        let _ = census::take(&memory, self.pid.0, "", options, &mut self.places);
    }
}

impl Holds for Counting {
    fn step(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
        if self.top.elapsed() >= TOP_EVERY {
            self.top = Instant::now();
            self.count(Level::Top);
        }
        if self.full.is_none_or(|at| at.elapsed() >= FULL_EVERY) {
            self.full = Some(Instant::now());
            self.count(Level::Full);
        }
    }
}
