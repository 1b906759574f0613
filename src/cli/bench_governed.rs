//! `fragprof bench --governed`: what a budget, and the census alone, cost a target, compared with a copy of it that is not watched.
//!
//! Two copies do the same work at the same time ([`super::cpu_swap`]); one of them is watched. The work is that of a program that ends by
//! itself, or of two processes that are already running while a load runs. The result is the watched one's additional CPU time as a share
//! of its running time, as a budget is defined. Each round watches one of them, then the other.

use std::ffi::OsString;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use super::bench::{Copy, Holds, median};
use super::cpu_swap::CpuSwap;
use super::record::failed;
use crate::census::{self, LayoutCache, Level, LiveMemory, Pace};
use crate::process::Process;
use crate::session::tier::windows::cpu_time::of_process_ns;
use crate::session::tier::windows::{Governed, Options};
use crate::units::Pid;

/// The budget that is measured.
const BUDGET: f64 = 0.01;
/// How a copy is watched.
const WAYS: [&str; 2] = ["budget 1 %", "census alone"];
/// Time between two cheap censuses and between two full ones: three times as often as the agent takes them.
const TOP_EVERY: Duration = Duration::from_secs(5);
const FULL_EVERY: Duration = Duration::from_secs(100);

/// Measures and prints. `pids`: none, or two that do the same work while the command runs.
///
/// # Errors
/// If BPF is not permitted here or the command cannot be run.
pub fn run(command: &[OsString], pids: &[u32], rounds: u32) -> anyhow::Result<()> {
    let pids = match *pids {
        [] => None,
        [one, other] => Some([Pid(one), Pid(other)]),
        _ => bail!("give --pid twice: two processes that do the same work while the command runs"),
    };
    let mut engine = Governed::new(Options { budget: BUDGET, own_census: false, ..Options::default() }).map_err(failed)?;
    let costs = engine.costs();
    let mut lost: [Vec<f64>; 2] = Default::default();
    let (mut windows, mut estimated, mut work_s) = (0, 0.0, 0.0);
    for round in 1..=rounds {
        for (way, lost) in lost.iter_mut().enumerate() {
            let mut both = 0.0;
            for watched in [0, 1] {
                let times = measure(command, pids, watched, |pid| {
                    if way == 1 {
                        return Ok(Box::new(Counting::new(pid)));
                    }
                    engine.watch(pid, BUDGET).map_err(failed)?;
                    Ok(Box::new(Governing { engine: &mut engine, pid, seen: (0, 0.0), windows: &mut windows, lost: &mut estimated }))
                })?;
                both += times.lost() / 2.0;
                work_s += times.other_s / f64::from(4 * rounds);
            }
            lost.push(both);
            println!("  round {round} of {rounds}, {}: {:+.2} %", WAYS[way], both * 100.0);
        }
    }
    println!(
        "a hit costs {:.2} µs (malloc) and {:.2} µs (free); {work_s:.1} s of work next to a watched copy, {rounds} rounds, each watching one and then the other",
        costs.allocation_ns / 1e3,
        costs.free_ns / 1e3
    );
    for (name, lost) in WAYS.iter().zip(&lost) {
        let of = |fold: fn(f64, f64) -> f64, from: f64| lost.iter().copied().fold(from, fold) * 100.0;
        println!(
            "  {name:<14} {:>+6.2} % of its time, median; mean {:+.2} % (rounds from {:+.2} to {:+.2} %)",
            median(lost.clone()) * 100.0,
            lost.iter().sum::<f64>() / lost.len() as f64 * 100.0,
            of(f64::min, f64::INFINITY),
            of(f64::max, f64::NEG_INFINITY)
        );
    }
    println!("  {windows} windows; the governor's own estimate of the slowdown: {:.2} %", estimated / f64::from(2 * rounds) * 100.0);
    Ok(())
}

/// CPU time for the same work, in seconds.
struct Times {
    watched_s: f64,
    other_s: f64,
}

impl Times {
    fn lost(&self) -> f64 {
        (self.watched_s - self.other_s) / self.watched_s
    }
}

fn measure<'a>(
    command: &[OsString],
    pids: Option<[Pid; 2]>,
    watched: usize,
    hold: impl FnOnce(Pid) -> anyhow::Result<Box<dyn Holds + 'a>>,
) -> anyhow::Result<Times> {
    match pids {
        Some(pids) => of_processes(pids, watched, command, hold),
        None => of_copies(command, watched, hold),
    }
}

/// Two copies of a command, from the moment their C library is mapped until they end.
fn of_copies<'a>(
    command: &[OsString],
    watched: usize,
    hold: impl FnOnce(Pid) -> anyhow::Result<Box<dyn Holds + 'a>>,
) -> anyhow::Result<Times> {
    let mut copies = [Copy::start(command)?, Copy::start(command)?];
    for copy in &mut copies {
        copy.wait_until_probable()?;
    }
    let mut beside = Some(CpuSwap::start([copies[0].pid, copies[1].pid])?);
    let mut held = hold(copies[watched].pid)?;
    while copies.iter().any(|copy| copy.used_s.is_none()) {
        held.step();
        for copy in &mut copies {
            if copy.used_s.is_none() && copy.try_wait()? {
                // From here on its pid may belong to another process.
                beside = None;
            }
        }
    }
    drop(beside);
    let used_s = |which: usize| copies[which].used_s.unwrap_or(f64::NAN);
    Ok(Times { watched_s: used_s(watched), other_s: used_s(1 - watched) })
}

/// Two processes, while a load runs.
fn of_processes<'a>(
    pids: [Pid; 2],
    watched: usize,
    load: &[OsString],
    hold: impl FnOnce(Pid) -> anyhow::Result<Box<dyn Holds + 'a>>,
) -> anyhow::Result<Times> {
    let cpu_s = |pid: Pid| of_process_ns(pid).map(|ns| ns as f64 / 1e9).with_context(|| format!("process {pid} has ended"));
    let mut held = hold(pids[watched])?;
    let _beside = CpuSwap::start(pids)?;
    let before_s = [cpu_s(pids[0])?, cpu_s(pids[1])?];
    let mut load = spawn(load)?;
    while load.try_wait()?.is_none() {
        held.step();
    }
    let used_s = |which: usize| Ok::<f64, anyhow::Error>(cpu_s(pids[which])? - before_s[which]);
    Ok(Times { watched_s: used_s(watched)?, other_s: used_s(1 - watched)? })
}

fn spawn(command: &[OsString]) -> anyhow::Result<Child> {
    let mut words = Command::new(&command[0]);
    words.args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null());
    words.spawn().with_context(|| format!("cannot run {}", command[0].to_string_lossy()))
}

struct Governing<'a> {
    engine: &'a mut Governed,
    pid: Pid,
    /// Windows and the estimated loss at the last check: a process that has ended has no status.
    seen: (u64, f64),
    windows: &'a mut u64,
    lost: &'a mut f64,
}

impl Holds for Governing<'_> {
    fn step(&mut self) {
        if !self.engine.step(Duration::from_millis(20)) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Some(status) = self.engine.status().first() {
            self.seen = (status.windows, status.slowdown_ratio_est);
        }
    }
}

impl Drop for Governing<'_> {
    fn drop(&mut self) {
        *self.windows += self.seen.0;
        *self.lost += self.seen.1;
        self.engine.unwatch(self.pid);
    }
}

struct Counting {
    pid: Pid,
    layouts: LayoutCache,
    top: Instant,
    full: Option<Instant>,
}

impl Counting {
    fn new(pid: Pid) -> Self {
        Self { pid, layouts: LayoutCache::of_malloc(), top: Instant::now(), full: None }
    }

    fn count(&mut self, level: Level) {
        let Ok(memory) = Process::open(self.pid).map_err(Into::into).and_then(LiveMemory::open) else { return };
        let options = census::Options { level, pace: Pace::default(), with_not_malloc: false };
        // A failed census costs the target nothing.
        let _ = census::take(&memory, self.pid.0, "", options, &mut self.layouts);
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
