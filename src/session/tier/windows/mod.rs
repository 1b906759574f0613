//! Watches processes under a budget: opens and closes their windows, collects the results, and builds profiles.
//!
//! ```text
//!            ┌── ring thread: StateSink → ProcessStates ──┐
//! Capture ───┤                                            ├──→ Estimator → Profile
//!            └── driver (step): Target.advance ───────────┘
//!                    ├── detach thread: detaches probes, 90 ms each
//!                    └── sites thread: examines an unknown C library, seconds each
//! ```
//!
//! Between windows a target has no probes except those that only large blocks reach, while they fit the budget ([`large`]). Rare events
//! (growth of the heap, first touches of its pages) come from tracepoints.

mod calibrate;
mod contents;
pub mod cpu_time;
mod large;
mod profile;
mod sink;
mod spent;
mod state;
mod status;
mod target;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use crate::selective::builds::KnownSites;
use crate::session::reaper::Reaper;
pub use large::large_places;
use sink::{Notice, StateSink};
use state::{ProcessState, SharedStates, lock};
pub use status::{LargeStatus, Status};
use target::{Target, Tools};

use crate::bpf;
use crate::capture::{self, Counters, Ring, TargetFlags, Touches};
use crate::governor::HitCosts;
use crate::governor::pace::PERIOD_MIN_S;
use crate::governor::retention::Verdict;
use crate::managed::Managed;
use crate::probe::features::{Attach, Features};
use crate::probe::plan::Planner;
use crate::process::Process;
use crate::profile::{Counter, Profile};
pub use crate::session::report::heap::HeapBytes;
use crate::session::report::heap::{self, Heaps};
use crate::session::report::{losses, unaccounted_so_far};
use crate::session::shared::{Session, SharedSession};
use crate::session::target::START_CHUNKS_MAX;
use crate::session::{Error, monotonic_ns};
use crate::symbol::read_perf_map;
use crate::units::{Pid, StackId};

/// Limit of notices waiting for the driver; those beyond it are counted, and every process is examined again.
const NOTICES_MAX: usize = 4096;
/// Maximum sleep of the driver: the delay until it sees results of other threads.
const NAP_MAX: Duration = Duration::from_millis(100);
/// First touches per recorded one. A process that touches 250,000 pages per second (as fast as memset can) then pays for 4,000 walks per
/// second, under 1 %.
const TOUCH_INTERVAL: u64 = 64;
/// Interval between two measurements of a heap's free bytes.
const FREE_BYTES_EVERY: Duration = Duration::from_secs(5);
/// Time between two looks for a managed runtime that is starting.
const RUNTIMES_EVERY: Duration = Duration::from_millis(200);
/// Maximum share of the driver's time for these measurements.
const FREE_BYTES_SHARE: f64 = 0.01;
/// Minimum interval between two examinations of a process's code: a program that generates code requests tables continuously.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Seconds of the detach thread per window, with a margin.
const OUT_S: f64 = 0.2;
/// Maximum number of ended processes kept for the profile.
const ENDED_MAX: usize = 256;

/// How to watch.
#[derive(Debug, Clone)]
pub struct Options {
    /// Share of its time that each process may lose, 0.01 = 1 %.
    pub budget: f64,
    /// Bytes of the ring buffer; `None` = [`capture::RING_BYTES`].
    pub ring_bytes: Option<u32>,
    /// Attach by this method instead of the best one.
    pub method: Option<Attach>,
    /// Measure the heap's free bytes with this recorder's own censuses now and then, and take a full census at the start and the end. The
    /// agent takes censuses anyway.
    pub own_census: bool,
    /// Kernel memory for unwind tables, bytes.
    pub tables_bytes: u64,
    /// Minimum time that a window of one target represents, in seconds.
    pub period_min_s: f64,
    /// Keep a ledger of large blocks all the time, if the allocator has sites that only they reach and the budget allows it.
    pub large_blocks: bool,
    /// Keep the native frames in whose place Python frames stand.
    pub native_frames: bool,
    /// Maximum number of frames of a stack; `None` = [`crate::bpf::FRAMES_MAX`].
    pub frames_max: Option<u32>,
    /// Directory that keeps the sites found in C libraries between runs; `None` = they are not kept.
    pub sites_store: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            budget: 0.01,
            ring_bytes: None,
            method: None,
            own_census: true,
            tables_bytes: capture::TABLES_BYTES,
            period_min_s: PERIOD_MIN_S,
            large_blocks: true,
            native_frames: false,
            frames_max: None,
            sites_store: None,
        }
    }
}

/// The driver. All attaching happens on the thread that calls it.
pub struct Governed {
    // Dropped in this order: the targets detach their probes, the reaper completes that, then the ring is closed, and the programs are
    // unloaded if only this recording used them.
    targets: BTreeMap<u16, Target>,
    reaper: Reaper,
    /// Held while it is needed: it costs every page fault of the machine a little.
    _touches: Option<Arc<Touches>>,
    ring: Ring,
    session: SharedSession,
    planner: Planner,
    known_sites: KnownSites,
    options: Options,
    costs: HitCosts,
    uncalibrated: Option<String>,
    states: SharedStates,
    notices: Receiver<Notice>,
    notices_lost: Arc<AtomicU64>,
    notices_lost_seen: u64,
    ended: Vec<Target>,
    ended_dropped: u64,
    looked: BTreeMap<u16, Instant>,
    free_looked: Instant,
    runtimes_looked: Instant,
    started: Instant,
    started_at: SystemTime,
    notes: Vec<String>,
}

impl Governed {
    /// Loads the programs for this recording alone, starts reading, and measures the cost of a hit.
    ///
    /// # Errors
    /// If BPF is not permitted or the kernel lacks a required feature.
    pub fn new(options: Options) -> Result<Self, Error> {
        let config = capture::Config {
            method: options.method,
            windows: true,
            tables_bytes: options.tables_bytes,
            frames_max: options.frames_max.unwrap_or(bpf::FRAMES_MAX),
        };
        Self::over(Session::load(&config)?, options)
    }

    /// A recording that shares loaded programs with others. They must have been loaded with windows; the `options` that concern loading
    /// (method, tables) are ignored.
    ///
    /// # Errors
    /// If the programs were loaded without windows, or no ring is left.
    pub fn over(session: SharedSession, options: Options) -> Result<Self, Error> {
        session.check_windows()?;
        let mut notes = Vec::new();
        let touches = session.capture.count_touches();
        if let Err(reason) = &touches {
            notes.push(format!("first touches of pages are not counted: {reason}"));
        }
        let (sender, notices) = sync_channel(NOTICES_MAX);
        let notices_lost = Arc::<AtomicU64>::default();
        let states = SharedStates::default();
        let sink = StateSink::new(Arc::clone(&states), sender, Arc::clone(&notices_lost));
        let ring = session.capture.open_ring(options.ring_bytes.unwrap_or(capture::RING_BYTES), Box::new(sink))?;
        let reaper = Reaper::start(1).map_err(capture::Error::Thread)?;
        let mut planner = Planner::new(Features::of_host().emulation());
        let (costs, uncalibrated) = calibrate::calibrate(&session.capture, &ring, &mut planner);
        if let Some(reason) = &uncalibrated {
            notes.push(format!("the cost of a hit is assumed ({:.1} µs), not measured: {reason}", costs.mean_s() * 1e6));
        }
        tracing::debug!("a hit costs {costs:?}");
        Ok(Self {
            targets: BTreeMap::new(),
            reaper,
            _touches: touches.ok(),
            ring,
            session,
            planner,
            known_sites: KnownSites::new(options.sites_store.clone()),
            options,
            costs,
            uncalibrated,
            states,
            notices,
            notices_lost,
            notices_lost_seen: 0,
            ended: Vec::new(),
            ended_dropped: 0,
            looked: BTreeMap::new(),
            free_looked: Instant::now(),
            runtimes_looked: Instant::now(),
            started: Instant::now(),
            started_at: SystemTime::now(),
            notes,
        })
    }

    /// The cost of a hit.
    #[must_use]
    pub fn costs(&self) -> HitCosts {
        self.costs
    }

    /// Why the cost of a hit is assumed; `None` if it was measured.
    #[must_use]
    pub fn uncalibrated(&self) -> Option<&str> {
        self.uncalibrated.as_deref()
    }

    /// Watches a process from now on. `budget`: the share of its time that it may lose.
    ///
    /// # Errors
    /// If it cannot be watched; nothing is left behind then.
    pub fn watch(&mut self, pid: Pid, budget: f64) -> Result<(), Error> {
        let process = Process::open(pid)?;
        let heap = if self.options.own_census { heap::bytes(pid, Heaps::Malloc) } else { HeapBytes::default() };
        let flags = bpf::TARGET_VM | bpf::TARGET_STACKS | bpf::TARGET_GOVERNED | bpf::TARGET_GROWTH;
        let slot = self.session.capture.add_target(pid, &self.ring, TargetFlags(flags))?;
        let mappings = process.maps().map(|maps| heap::mappings_of(&maps)).unwrap_or_default();
        let managed = Managed::shared(Arc::default(), self.options.native_frames);
        let mut state = ProcessState::new(slot, &mappings, heap, monotonic_ns());
        state.managed = Arc::clone(&managed);
        lock(&self.states).of.insert(slot.index, state);
        let mut target = Target::new(process, slot, budget, &self.tools(), self.options.large_blocks, managed);
        if let Err(error) = target.look(&self.session, &mut self.planner, &mut self.known_sites) {
            self.forget(target);
            return Err(error);
        }
        if self.options.own_census {
            (target.heap_at_start, target.before) = heap::at_start(pid, START_CHUNKS_MAX).unzip();
        }
        self.session.capture.touch_interval(slot, TOUCH_INTERVAL);
        self.targets.insert(slot.index, target);
        self.share_the_reaper();
        Ok(())
    }

    /// Detaching one window's probes takes a tenth of a second, one window after the other: with many targets, each has fewer windows.
    fn share_the_reaper(&mut self) {
        let period_s = self.options.period_min_s.max(OUT_S * self.targets.len().saturating_sub(1) as f64);
        for target in self.targets.values_mut() {
            target.pace.set_period_min(period_s);
        }
    }

    /// Waits until the unwind tables of the watched processes are loaded, at most this long: stacks of an earlier window would be
    /// truncated.
    pub fn wait_for_tables(&self, most: Duration) {
        let _ = self.session.capture.tables().wait_until_loaded(most);
    }

    /// The recording's time begins now.
    pub fn begin(&mut self) {
        self.started_at = SystemTime::now();
    }

    /// Detaches a process's probes and forgets it.
    pub fn unwatch(&mut self, pid: Pid) {
        let slot = self.targets.iter().find(|(_, target)| target.pid() == pid).map(|(slot, _)| *slot);
        if let Some(mut target) = slot.and_then(|slot| self.targets.remove(&slot)) {
            target.stop(&self.tools(), false);
            self.forget(target);
        }
    }

    /// Changes the budget of a process.
    pub fn set_budget(&mut self, pid: Pid, budget: f64) {
        for target in self.targets.values_mut().filter(|target| target.pid() == pid) {
            target.set_budget(budget);
        }
    }

    /// Sets the heap's bytes from a census, for callers that take censuses.
    pub fn set_heap(&self, pid: Pid, heap: HeapBytes) {
        let slot = self.targets.iter().find(|(_, target)| target.pid() == pid).map(|(slot, _)| *slot);
        if let Some(slot) = slot
            && let Some(state) = lock(&self.states).of.get_mut(&slot)
        {
            state.set_heap(heap);
        }
    }

    /// The sampled survivors of a process's windows in their last known state, for comparison with a ground truth. Checks all that may
    /// still live first.
    #[must_use]
    pub fn verdicts(&mut self, pid: Pid) -> Vec<Verdict<StackId>> {
        let Some(target) = self.targets.values_mut().find(|target| target.pid() == pid) else { return Vec::new() };
        target.look_again(true);
        target.retention.verdicts().collect()
    }

    /// The processes watched now.
    pub fn watched(&self) -> impl Iterator<Item = Pid> + '_ {
        self.targets.values().map(Target::pid)
    }

    /// How each process is being watched.
    #[must_use]
    pub fn status(&self) -> Vec<Status> {
        let states = lock(&self.states);
        self.targets.iter().map(|(slot, target)| Status::of(target, states.of.get(slot), &self.session.capture)).collect()
    }

    /// Opens, closes and accounts for what is due, for up to `wait`. Returns whether any watched process is left.
    pub fn step(&mut self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        loop {
            self.advance();
            let now = Instant::now();
            if now >= deadline || self.targets.is_empty() {
                return !self.targets.is_empty();
            }
            let now_s = self.now_s();
            let due_s = self.targets.values().map(|target| target.due_s(now_s)).fold(f64::INFINITY, f64::min);
            let nap = Duration::try_from_secs_f64((due_s - now_s).max(0.0005)).unwrap_or(NAP_MAX).min(NAP_MAX).min(deadline - now);
            match self.notices.recv_timeout(nap) {
                Ok(notice) => self.act(notice),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return !self.targets.is_empty(),
            }
        }
    }

    fn advance(&mut self) {
        let mut targets = std::mem::take(&mut self.targets);
        for target in targets.values_mut() {
            let tools = self.tools();
            if tools.now_s >= target.due_s(tools.now_s) {
                target.advance(&tools);
            }
        }
        self.targets = targets;
        let lost = self.notices_lost.load(Ordering::Relaxed);
        if lost != self.notices_lost_seen {
            self.notices_lost_seen = lost;
            self.looked.clear();
            for slot in self.targets.keys().copied().collect::<Vec<_>>() {
                self.look(slot);
            }
            self.retire_the_dead();
        }
        if self.runtimes_looked.elapsed() >= RUNTIMES_EVERY {
            self.runtimes_looked = Instant::now();
            for target in self.targets.values_mut() {
                target.look_for_runtimes(&self.session);
            }
        }
        if self.free_looked.elapsed() >= FREE_BYTES_EVERY {
            self.look_at_free_bytes();
            self.retire_the_dead();
        }
        if self.known_sites.take_found() {
            let waiting = self.targets.iter().filter(|(_, target)| target.large.waits_for_sites()).map(|(slot, _)| *slot);
            for slot in waiting.collect::<Vec<_>>() {
                self.looked.remove(&slot);
                self.look(slot);
            }
        }
    }

    fn look_at_free_bytes(&mut self) {
        let began = Instant::now();
        if self.options.own_census {
            for (slot, target) in &self.targets {
                let heap = heap::bytes(target.pid(), Heaps::Malloc);
                if let Some(state) = lock(&self.states).of.get_mut(slot) {
                    state.set_heap(heap);
                }
            }
        }
        // Large heaps are measured less often.
        self.free_looked = Instant::now() + began.elapsed().mul_f64(1.0 / FREE_BYTES_SHARE).saturating_sub(FREE_BYTES_EVERY);
    }

    /// Retires processes whose exit record was lost.
    fn retire_the_dead(&mut self) {
        let overdue = |(slot, target): (&u16, &mut Target)| target.lost_exit.is_overdue(&target.process).then_some(*slot);
        for slot in self.targets.iter_mut().filter_map(overdue).collect::<Vec<_>>() {
            self.retire(slot);
        }
    }

    fn act(&mut self, notice: Notice) {
        match notice {
            Notice::Exec(slot) => self.new_image(slot),
            Notice::Exit(slot) => self.retire(slot),
            Notice::NewCode(slot) => self.look(slot),
        }
    }

    fn look(&mut self, slot: u16) {
        if self.looked.get(&slot).is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked.insert(slot, Instant::now());
        if let Some(target) = self.targets.get_mut(&slot)
            && let Err(error) = target.look(&self.session, &mut self.planner, &mut self.known_sites)
        {
            tracing::debug!("new code: {error}");
        }
    }

    /// The process runs another program: the estimates are for the old one.
    fn new_image(&mut self, slot: u16) {
        let Some(pid) = self.targets.get(&slot).map(Target::pid) else { return };
        let budget = self.targets.get(&slot).map_or(self.options.budget, |target| target.pace.budget());
        self.retire(slot);
        if let Err(error) = self.watch(pid, budget) {
            self.notes.push(format!("process {pid} after an exec: {error}"));
        }
    }

    fn retire(&mut self, slot: u16) {
        let Some(mut target) = self.targets.remove(&slot) else { return };
        target.stop(&self.tools(), true);
        let state = self.forget_kernel_side(&mut target);
        target.ended(self.now_s(), state);
        self.ended.push(target);
        if self.ended.len() > ENDED_MAX {
            self.ended.remove(0);
            self.ended_dropped += 1;
        }
    }

    fn forget(&mut self, mut target: Target) {
        drop(self.forget_kernel_side(&mut target));
    }

    fn forget_kernel_side(&mut self, target: &mut Target) -> Option<ProcessState> {
        self.looked.remove(&target.slot.index);
        self.share_the_reaper();
        if let Err(error) = self.session.capture.remove_target(target.pid(), target.slot) {
            tracing::warn!("{error}");
        }
        target.large.forget(&self.session.capture, target.process.pid());
        lock(&self.states).close(target.slot.index)
    }

    fn tools(&self) -> Tools<'_> {
        Tools {
            capture: &self.session.capture,
            ring: &self.ring,
            states: &self.states,
            reaper: &self.reaper,
            costs: self.costs,
            now_s: self.now_s(),
        }
    }

    fn now_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// The programs' counters.
    ///
    /// # Errors
    /// If the kernel refuses to read its map.
    pub fn counters(&self) -> Result<Counters, Error> {
        Ok(self.session.capture.counters(&self.ring)?)
    }

    /// What was lost so far, by kind. Empty if the kernel refuses to read its counters.
    #[must_use]
    pub fn losses(&self) -> Vec<Counter> {
        // The counters first: a record that is counted and not read yet may still be in the ring.
        let Ok(counters) = self.session.capture.counters(&self.ring) else { return Vec::new() };
        let read = self.ring.read();
        let unaccounted = unaccounted_so_far(&counters, read, self.ring.bytes());
        losses(&counters, read, unaccounted, self.notices_lost.load(Ordering::Relaxed), 0)
    }

    /// A profile from what is known so far of these processes; without `pids`, of all that are or were watched. Windows continue.
    #[must_use]
    pub fn profile(&mut self, pids: Option<&[Pid]>) -> Profile {
        let wanted = |target: &Target| pids.is_none_or(|pids| pids.contains(&target.pid()));
        let mut targets = std::mem::take(&mut self.targets);
        for target in targets.values_mut().filter(|target| wanted(target)) {
            // A burst may have closed the probes since the last step.
            target.advance_large(&self.tools());
            target.look_again(true);
            if let Ok(maps) = target.process.maps() {
                self.session.snapshots().update(&mut target.space, &target.process, &maps);
            }
            read_perf_map(&mut target.space, &target.process);
        }
        self.targets = targets;
        let now_s = self.now_s();
        let facts = profile::Facts {
            started_at: self.started_at,
            // The counters first: a record that is counted and not read yet may still be in the ring.
            counters: self.session.capture.counters(&self.ring).unwrap_or_default(),
            read: self.ring.read(),
            ring_bytes: self.ring.bytes(),
            notices_lost: self.notices_lost.load(Ordering::Relaxed),
            ended_dropped: self.ended_dropped,
            costs: self.costs,
            notes: self.notes.clone(),
            now_s,
        };
        let mut states = lock(&self.states);
        let mut rows: Vec<(&Target, &mut ProcessState)> = Vec::new();
        let mut by_slot: BTreeMap<u16, &mut ProcessState> = states.of.iter_mut().map(|(slot, state)| (*slot, state)).collect();
        for (slot, target) in self.targets.iter_mut().filter(|(_, target)| wanted(target)) {
            if let Some(state) = by_slot.remove(slot) {
                rows.push((target, state));
            }
        }
        let mut ended_states: Vec<(usize, ProcessState)> = Vec::new();
        for (index, target) in self.ended.iter_mut().enumerate() {
            if wanted(target)
                && let Some(state) = target.last_state.take()
            {
                ended_states.push((index, state));
            }
        }
        for (index, state) in &mut ended_states {
            rows.push((&self.ended[*index], state));
        }
        let profile = self.session.name(|symbolizer| profile::build(&facts, symbolizer, &mut rows));
        drop(rows);
        for (index, state) in ended_states {
            self.ended[index].last_state = Some(state);
        }
        profile
    }

    /// Ends all windows and makes the profile.
    #[must_use]
    pub fn finish(mut self) -> Profile {
        let slots: Vec<u16> = self.targets.keys().copied().collect();
        for slot in slots {
            if let Some(mut target) = self.targets.remove(&slot) {
                target.stop(&self.tools(), true);
                if self.options.own_census {
                    target.look_at_the_heap(lock(&self.states).of.get_mut(&slot));
                }
                self.targets.insert(slot, target);
            }
        }
        self.profile(None)
    }
}

impl Drop for Governed {
    /// Other recordings may keep using the programs: removes all traces of this recording from them.
    fn drop(&mut self) {
        for (_, mut target) in std::mem::take(&mut self.targets) {
            target.stop(&self.tools(), false);
            self.forget(target);
        }
    }
}
