//! The thread that scans for blocks to which nothing points: rarely, one process at a time, within a share of a core. Off by default: a scan
//! reads all memory that a process can write.
//!
//! Its findings are published on the board as a profile of its own tier: pages, API, history and flight records read them from there.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::config::LeaksConfig;
use super::own::thread_cpu;
use super::worker::{Worker, lock};
use crate::capture::registers::ThreadRegisters;
use crate::census::live::LiveMemory;
use crate::census::{LayoutCache, Pace};
use crate::fragmentation::verdict::Kind;
use crate::model::attribution::{Attributed, Attributions};
use crate::model::counters::{LeakFound, LeaksSample};
use crate::model::sample::ProcessSample;
use crate::model::snapshot::Published;
use crate::process::{Process, ProcessId};
use crate::retention::scans::{Plan, scan};
use crate::retention::{Leaks, wording};

/// Longest delay of a command while no scan is running.
const STEP: Duration = Duration::from_secs(1);
/// Memory per block during a scan: the chunk of the census, the index, the marks and the pointers kept.
const BLOCK_BYTES: u64 = 32;

/// The sample that the thread writes and `/metrics` reads.
pub type SharedLeaks = Arc<Mutex<LeaksSample>>;

/// Starts the thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(
    config: LeaksConfig,
    published: Arc<Published>,
    board: Arc<Attributions>,
    sample: SharedLeaks,
) -> std::io::Result<Worker<LeaksConfig>> {
    let due = Instant::now();
    let looker = Looker { config, published, board, sample, looked: BTreeMap::new(), due, layouts: LayoutCache::of_malloc() };
    Worker::start("fragprof-leaks", move |orders| looker.run(orders))
}

struct Looker {
    config: LeaksConfig,
    published: Arc<Published>,
    board: Arc<Attributions>,
    sample: SharedLeaks,
    /// When each process was last scanned.
    looked: BTreeMap<ProcessId, Instant>,
    /// When the CPU share allows the next scan.
    due: Instant,
    layouts: LayoutCache,
}

impl Looker {
    fn run(mut self, orders: &Receiver<LeaksConfig>) {
        loop {
            match orders.recv_timeout(STEP) {
                Ok(config) => self.config = config,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.step();
        }
    }

    fn step(&mut self) {
        let snapshot = self.published.load();
        let lives = |process: ProcessId| snapshot.processes.iter().any(|one| one.identity.process == process);
        self.looked.retain(|process, _| lives(*process));
        {
            let mut sample = lock(&self.sample);
            sample.enabled = self.config.enabled;
            sample.found.retain(|found| lives(found.process));
            sample.too_large = snapshot.processes.iter().filter(|one| live_blocks(one) > 0 && self.is_too_large(one)).count();
        }
        if !self.config.enabled || Instant::now() < self.due {
            return;
        }
        let interval = Duration::from_secs(self.config.interval_s);
        let is_due = |one: &&Arc<ProcessSample>| self.looked.get(&one.identity.process).is_none_or(|at| at.elapsed() >= interval);
        let candidates = snapshot.processes.iter().filter(|one| live_blocks(one) > 0 && !self.is_too_large(one)).filter(is_due);
        // Growing processes first, then those never scanned, then the largest.
        let rank = |one: &&Arc<ProcessSample>| (grows(one), !self.looked.contains_key(&one.identity.process), live_blocks(one));
        let Some(one) = candidates.max_by_key(rank).cloned() else { return };
        drop(snapshot);
        self.look_at(&one);
    }

    fn is_too_large(&self, one: &ProcessSample) -> bool {
        live_blocks(one).saturating_mul(BLOCK_BYTES) > self.config.memory_mib << 20
            || one.ladder().is_some_and(|heap| heap.ladder.resident_bytes > self.config.heap_max_mib << 20)
    }

    fn look_at(&mut self, one: &ProcessSample) {
        let process = one.identity.process;
        let began = thread_cpu();
        let found = self.found(one);
        let spent = thread_cpu().saturating_sub(began);
        let share = self.config.cpu_percent / 100.0;
        let pause = Duration::try_from_secs_f64(spent.as_secs_f64() / share.max(1e-6)).unwrap_or(Duration::MAX);
        self.due = Instant::now().checked_add(pause).unwrap_or_else(|| Instant::now() + Duration::from_secs(86_400));
        self.looked.insert(process, Instant::now());
        let mut sample = lock(&self.sample);
        sample.cpu_s += spent.as_secs_f64();
        match found {
            Ok(leaks) => {
                sample.looked += 1;
                sample.found.retain(|other| other.process != process);
                sample.found.push(LeakFound {
                    process,
                    comm: one.comm.clone(),
                    blocks: leaks.unreached_blocks,
                    bytes: leaks.unreached_bytes,
                    at: Instant::now(),
                });
                drop(sample);
                let profile = Arc::new(wording::profile(&leaks));
                let attributed = Attributed {
                    profile,
                    at: Instant::now(),
                    wall: SystemTime::now(),
                    blocks: None,
                    rates: None,
                    slowdown_ratio_est: None,
                };
                self.board.publish(process, attributed);
            }
            Err(error) => {
                sample.failed += 1;
                tracing::debug!("process {}: {error}", process.pid);
            }
        }
    }

    fn found(&mut self, one: &ProcessSample) -> Result<Leaks, Box<dyn std::error::Error>> {
        let pid = one.identity.process.pid;
        let memory = LiveMemory::open(Process::open(pid)?)?;
        let registers = ThreadRegisters::of(pid).ok();
        let read = registers.as_ref().map(|registers| move || registers.read());
        let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
        let pace = Pace { pause_per_mib: Duration::from_micros(self.config.pause_per_mib_us), ..Pace::default() };
        let plan = Plan {
            looks: self.config.looks,
            interval: Duration::from_secs(self.config.look_interval_s),
            pace,
            memory_max_bytes: self.config.memory_mib << 20,
        };
        let seen = scan(&memory, (pid.0, &one.comm), plan, read, &mut self.layouts)?;
        if !memory.process().is_alive() || memory.process().id() != one.identity.process {
            return Err("it ended, or its pid belongs to another process now".into());
        }
        // A recording or an emitter may know who allocated some of the blocks.
        let known = self.board.of(one.identity.process);
        Ok(Leaks::with_stacks(&memory, (pid.0, &one.comm), &seen, false, |range| known.functions(&range, wording::FRAMES_MAX))?)
    }
}

/// Blocks in use by the last census that counted them; 0 = not known.
fn live_blocks(one: &ProcessSample) -> u64 {
    one.heaps.iter().filter_map(|heap| heap.live_allocations).fold(0, u64::saturating_add)
}

fn grows(one: &ProcessSample) -> bool {
    one.verdict.as_ref().is_some_and(|verdict| verdict.findings.iter().any(|finding| matches!(finding.verdict, Kind::Leak | Kind::Growing)))
}
