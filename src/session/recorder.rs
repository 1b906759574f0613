//! A recording from attach to profile: drives target, probe, capture, ledger and census for `record` and `top`.
//!
//! ```text
//!                     ┌── ring thread: LedgerSink → Shard (ledgers) ──┐
//! Capture ── rings ───┤                    │ notices                  ├──→ views (top), finish → Profile
//!                     └────────────────────┼──────────────────────────┘
//!                              Recorder::step (caller's thread):
//!                 probes new code, children and images; counts losses
//! ```
//!
//! Censuses run on a separate thread (walks/walker.rs): one at the start, whose chunks are `[before attach]` at the end; some near new peaks
//! and after losses; the last one at the end, when recording has stopped.

use std::collections::HashMap;
use std::ffi::OsString;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::attach::tracer::{At, Scope};
use super::attach::{held, launch};
use super::reaper::Reaper;
use super::report;
use super::report::block_index::BlockIndex;
use super::report::heap::Heaps;
use super::report::view::View;
use super::shared::{Session, SharedSession};
use super::sink::{Inherited, LedgerSink, Notice, SharedShard, lock};
use super::target::Target;
use super::throwing::ReturnProbePolicy;
use super::tier::exact::Watched;
use super::walks::walker::{Purpose, Walker};
use super::{Choice, Error, Options, monotonic_ns};
use crate::bpf;
use crate::capture::{self, Counters, Ring, TargetFlags};
use crate::emitter::Finder;
use crate::ledger::{Ledger, StackLimits};
use crate::managed::Managed;
use crate::probe::features::Features;
use crate::probe::plan::Planner;
use crate::process::Process;
use crate::profile::{Counter, Profile};
use crate::sampler::library::{self, Flavour};
use crate::trace::Header;
use crate::units::Pid;

/// Limit of notices waiting for the driver. If a burst of children exceeds it, the excess is counted, and every process is examined again.
pub(in crate::session) const NOTICES_MAX: usize = 4096;
/// How often losses are read and ended processes detected without a notice.
pub(in crate::session) const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time between two looks whether emitters are still attached; each costs some 10 µs a process.
const EMITTERS_EVERY: Duration = Duration::from_secs(2);

/// Maximum number of live blocks in a ledger that is settled for each view: a pass over 64 MiB, about 20 ms.
pub(in crate::session) const SETTLE_BLOCKS_MAX: u64 = 4 << 20;

/// Threads that detach probes of ended processes: in a build some hundred processes end per second.
pub(in crate::session) const DETACHING_THREADS: usize = 16;
/// Maximum time for an image that replaced another to load its libraries.
pub(in crate::session) const STARTING_MAX: Duration = Duration::from_secs(1);
/// The same if it is stopped at its entry point: examining each of its libraries takes some ten milliseconds.
pub(in crate::session) const HELD_START_MAX: Duration = Duration::from_secs(30);

/// A recording in progress. Dropped in this order: the targets detach their probes, the reaper completes that, then the ring is closed, and
/// the programs are unloaded if only this recording used them.
pub struct Recorder {
    pub(in crate::session) targets: HashMap<u16, Target>,
    pub(in crate::session) ended: Vec<Target>,
    pub(in crate::session) vfork_children: HashMap<Pid, held::VforkChild>,
    pub(in crate::session) reaper: Reaper,
    pub(in crate::session) ring: Ring,
    pub(in crate::session) session: SharedSession,
    pub(in crate::session) planner: Planner,
    pub(in crate::session) finder: Finder,
    pub(in crate::session) options: Options,
    pub(in crate::session) shard: SharedShard,
    pub(in crate::session) notices: Receiver<Notice>,
    pub(in crate::session) notice: SyncSender<Notice>,
    pub(in crate::session) notices_lost: Arc<AtomicU64>,
    pub(in crate::session) notices_lost_seen: u64,
    pub(in crate::session) children_ignored: u64,
    pub(in crate::session) unwatched_children: u64,
    pub(in crate::session) followed: Option<launch::Followed>,
    /// A command is started, and has not reached its entry point.
    pub(in crate::session) launches: bool,
    pub(in crate::session) notes: Vec<String>,
    pub(in crate::session) walker: Option<Walker>,
    pub(in crate::session) started: Instant,
    pub(in crate::session) started_at: SystemTime,
    pub(in crate::session) started_ns: u64,
    pub(in crate::session) checked: Instant,
    emitters_checked: Instant,
}

impl Recorder {
    /// Loads the programs for this recording alone and starts reading; no process is watched yet.
    ///
    /// # Errors
    /// If BPF is not permitted or the kernel lacks a required feature.
    pub fn new(options: Options) -> Result<Self, Error> {
        let config = capture::Config {
            method: options.method,
            tables_bytes: options.tables_bytes.unwrap_or(capture::TABLES_BYTES),
            windows: false,
            frames_max: options.frames_max.unwrap_or(bpf::FRAMES_MAX),
        };
        Self::over(Session::load(&config)?, options)
    }

    /// A recording that shares loaded programs with others: the `options` that concern loading (method, tables, frames) are ignored.
    ///
    /// # Errors
    /// If no ring is left, or only emitters are accepted and cannot be heard.
    pub fn over(session: SharedSession, options: Options) -> Result<Self, Error> {
        if options.source == Choice::Emitter && !session.capture.hears_emitters() {
            return Err(Error::EmittersUnsupported);
        }
        let emulation = Features::of_host().emulation();
        let planner = Planner::new(emulation).with_python_objects(options.python_objects);
        let finder = Finder::new(emulation);
        let (sender, notices) = sync_channel(NOTICES_MAX);
        let notices_lost = Arc::<AtomicU64>::default();
        let shard = SharedShard::default();
        lock(&shard).follow_children = options.follow_children;
        let sink = LedgerSink::new(Arc::clone(&shard), sender.clone(), Arc::clone(&notices_lost), options.trace.clone());
        let ring = session.capture.open_ring(options.ring_bytes.unwrap_or(capture::RING_BYTES), Box::new(sink))?;
        let walker = if options.censuses { Some(Walker::start().map_err(capture::Error::Thread)?) } else { None };
        let reaper = Reaper::start(DETACHING_THREADS).map_err(capture::Error::Thread)?;
        Ok(Self {
            targets: HashMap::new(),
            ended: Vec::new(),
            vfork_children: HashMap::new(),
            reaper,
            ring,
            session,
            planner,
            finder,
            options,
            shard,
            notices,
            notice: sender,
            notices_lost,
            notices_lost_seen: 0,
            children_ignored: 0,
            unwatched_children: 0,
            followed: None,
            launches: false,
            notes: Vec::new(),
            walker,
            started: Instant::now(),
            started_at: SystemTime::now(),
            started_ns: monotonic_ns(),
            checked: Instant::now(),
            emitters_checked: Instant::now(),
        })
    }

    /// The heaps whose blocks are recorded.
    fn heaps(&self) -> Heaps {
        Heaps::recorded(self.options.python_objects)
    }

    /// Watches a running process from now on.
    ///
    /// # Errors
    /// If it cannot be watched; nothing is left behind then.
    pub fn watch(&mut self, pid: Pid) -> Result<(), Error> {
        let process = Process::open(pid)?;
        let free = crate::session::report::heap::bytes(pid, self.heaps()).free;
        let slot = self.register(process, None, free)?;
        match self.probe(slot) {
            Ok(()) => {
                self.switch_on(slot);
                // The recording begins when its first process is watched, however long the preparation took.
                if self.targets.len() == 1 && self.ended.is_empty() {
                    self.started = Instant::now();
                    self.started_at = SystemTime::now();
                    self.started_ns = monotonic_ns();
                }
                // From now on every new block is recorded: memory that is live now and not recorded later is from before.
                if let (Some(walker), Some(target)) = (&self.walker, self.targets.get(&slot)) {
                    walker.ask(target.walk_target(), Purpose::Start);
                }
                Ok(())
            }
            Err(error) => {
                self.forget(slot);
                Err(error)
            }
        }
    }

    /// Starts a command and watches it from its first instruction, through every exec of its process; its children too, if the options say
    /// so.
    ///
    /// # Errors
    /// If it cannot be started, or has nothing to probe by the time it reaches its entry point.
    pub fn launch(&mut self, command: &[OsString]) -> Result<(), Error> {
        let preload = if self.options.python_objects { Some(library::place(Flavour::PythonObjects)?) } else { None };
        let preload = preload.map(|path| library::preload_beside(&path, std::env::var_os("LD_PRELOAD").as_deref()));
        let followed = launch::launch(command, preload, Scope { children: self.options.follow_children }, self.wake())?;
        let pid = followed.pid();
        self.launches = true;
        let mut probed = Ok(());
        loop {
            let look = match followed.looks().recv_timeout(STARTING_MAX) {
                Ok(look) => look,
                // Constructors may take long; if the entry point could not be probed, reaching it is not reported.
                Err(RecvTimeoutError::Timeout) if self.targets.values().any(|target| target.entry.is_some()) => continue,
                Err(_) => break,
            };
            let (is_command, at) = (Some(look.pid) == pid, look.at);
            let looked = self.look(look);
            // Before the entry point the C library may not be loaded yet: nothing to probe is not an error.
            if is_command {
                probed = looked;
            }
            if is_command && at == At::Entry {
                break;
            }
        }
        self.launches = false;
        self.followed = Some(followed);
        probed
    }

    /// The processes that are sampled by their own emitter, as sentences.
    pub fn source_words(&self) -> Vec<String> {
        let sampled = self.targets.values().filter(|target| target.source == crate::session::target::Source::Emitter);
        sampled.map(|target| format!("process {} is {}", target.process.pid(), target.source_words())).collect()
    }

    /// How the launched command ended, once it has.
    pub fn command_status(&self) -> Option<ExitStatus> {
        self.followed.as_ref().and_then(launch::Followed::status)
    }

    /// Does what is due for up to `wait`: probes new code, children and images, reads losses. Returns whether any watched process is left.
    pub fn step(&mut self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        while !self.targets.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            self.look_at_the_held();
            match self.notices.recv_timeout(left.min(CHECK_INTERVAL)) {
                Ok(notice) => self.act(notice),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if self.checked.elapsed() >= CHECK_INTERVAL {
                self.check();
            }
            self.walking().take();
            if Instant::now() >= deadline {
                break;
            }
        }
        !self.targets.is_empty()
    }

    /// Removes the blocks of unmapped ranges from the ledgers, for a live view. Large ledgers wait until their list of ranges is full.
    pub fn settle(&self) {
        for watched in lock(&self.shard).watched.values_mut() {
            if watched.ledger.totals().live <= SETTLE_BLOCKS_MAX {
                watched.ledger.settle();
            }
        }
    }

    /// All processes that are watched now, or were until they ended, for a live view; ordered by pid.
    pub fn views(&self) -> Vec<View<'_>> {
        let mut targets: Vec<&Target> = self.targets.values().chain(&self.ended).collect();
        targets.sort_by_key(|target| target.process.id());
        targets.into_iter().map(|target| View::new(target, &self.shard)).collect()
    }

    /// What was lost so far, by kind. Empty if the kernel refuses to read its counters.
    pub fn losses(&self) -> Vec<Counter> {
        // The counters first: a record that is counted and not read yet may still be in the ring.
        let counters = self.session.capture.counters(&self.ring).unwrap_or_default();
        let read = self.ring.read();
        let unaccounted = crate::session::report::unaccounted_so_far(&counters, read, self.ring.bytes());
        crate::session::report::losses(&counters, read, unaccounted, self.notices_lost.load(Ordering::Relaxed), self.inherited_refused())
    }

    pub(in crate::session) fn inherited_refused(&self) -> u64 {
        lock(&self.shard).inherited_refused
    }

    /// The programs' counters.
    ///
    /// # Errors
    /// If the kernel refuses to read its map.
    pub fn counters(&self) -> Result<Counters, Error> {
        Ok(self.session.capture.counters(&self.ring)?)
    }

    /// Time since the recording began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Ends the recording: stops the probes, drains the rings, detaches, and builds the profile.
    pub fn finish(self) -> Result<Profile, Error> {
        self.finish_with(None)
    }

    /// As [`finish`](Self::finish), and also returns the addresses of the blocks of each process that was recorded exactly.
    ///
    /// # Errors
    /// If the kernel refuses to read its counters.
    pub fn finish_with_blocks(self) -> Result<(Profile, Vec<BlockIndex>), Error> {
        let mut blocks = Vec::new();
        let profile = self.finish_with(Some(&mut blocks))?;
        Ok((profile, blocks))
    }

    pub(in crate::session) fn finish_with(mut self, blocks: Option<&mut Vec<BlockIndex>>) -> Result<Profile, Error> {
        // Stopped processes continue.
        self.followed = None;
        for target in self.targets.values_mut() {
            target.look_at_the_end(&self.session);
        }
        for target in self.targets.values() {
            self.session.capture.switch(target.slot, false);
        }
        let duration = self.started.elapsed();
        let read = self.ring.stop();
        self.check_losses();
        self.look_for_detaching();
        for walked in self.walker.take().map_or_else(Vec::new, Walker::finish) {
            self.walking().take_one(walked);
        }
        for (slot, target) in &mut self.targets {
            target.watched = lock(&self.shard).watched.remove(slot);
            target.look_at_the_heap(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX), self.options.owners);
        }
        let counters = self.session.capture.counters(&self.ring)?;
        let start_unix_ns = self.started_at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
        self.vfork_children.clear();
        let mut all: Vec<Target> = self.targets.drain().map(|(_, target)| target).collect();
        for target in &mut all {
            target.detach();
            self.remove(target);
        }
        all.append(&mut self.ended);
        all.sort_by_key(|target| target.process.pid());
        let unaccounted = crate::session::report::unaccounted_at_the_end(&counters, read);
        let facts = crate::session::report::Facts {
            start_unix_ns,
            duration,
            counters,
            read,
            unaccounted,
            children_ignored: self.children_ignored,
            unwatched_children: self.unwatched_children,
            notices_lost: self.notices_lost.load(Ordering::Relaxed),
            inherited_refused: self.inherited_refused(),
            notes: std::mem::take(&mut self.notes),
            has_growth: true,
            is_from_start: self.followed.is_some(),
        };
        let trace = self.options.trace.take();
        Ok(self.session.name(|symbolizer| report::traced_profile(facts, &all, symbolizer, trace.as_ref(), blocks)))
    }

    /// Frees a target's slot after its probes are detached.
    pub(in crate::session) fn remove(&self, target: &Target) {
        if let Err(error) = self.session.capture.remove_target(target.process.pid(), target.slot) {
            tracing::warn!("{error}");
        }
    }

    /// Assigns a process a slot and a ledger. `free_at_start`: free bytes of its heap, if known.
    pub(in crate::session) fn register(
        &mut self,
        process: Process,
        inherited: Option<Inherited>,
        free_at_start: Option<u64>,
    ) -> Result<u16, Error> {
        let pid = process.pid();
        let mut flags = bpf::TARGET_VM;
        if !self.options.no_stacks {
            flags |= bpf::TARGET_STACKS;
        }
        if self.options.free_stacks {
            flags |= bpf::TARGET_FREE_STACKS;
        }
        let slot = self.session.capture.add_target(pid, &self.ring, TargetFlags(flags))?;
        let return_probes = ReturnProbePolicy {
            limited: false,
            chooses_returns: self.session.capture.chooses_returns(),
            accepted: self.options.probe_throwing,
        };
        let nothing = || Inherited { ledger: Ledger::new(monotonic_ns(), StackLimits::default()), sampled: None, names: Arc::default() };
        let Inherited { ledger, sampled, names } = inherited.unwrap_or_else(nothing);
        let managed = Managed::shared(names, self.options.native_frames);
        let mappings = process.maps().map(|maps| crate::session::report::heap::mappings_of(&maps)).unwrap_or_default();
        let mut watched = Watched::new(pid, slot, ledger, &mappings, free_at_start);
        watched.sampled = sampled;
        watched.managed = Arc::clone(&managed);
        lock(&self.shard).watched.insert(slot.index, watched);
        let mut target = Target::new(process, slot, return_probes, managed);
        target.heaps = self.heaps();
        self.targets.insert(slot.index, target);
        Ok(slot.index)
    }

    /// Examines the process's code as it is now: probes new files, detaches from files that are no longer mapped.
    pub(in crate::session) fn probe(&mut self, slot: u16) -> Result<(), Error> {
        let Some(target) = self.targets.get_mut(&slot) else { return Ok(()) };
        target.choose_source(&mut self.finder, self.options.source, self.session.capture.hears_emitters())?;
        // The ledger must be of the right kind before the first record arrives.
        if let Some(watched) = lock(&self.shard).watched.get_mut(&slot) {
            watched.set_emitter(target.emitter_interval());
        }
        target.probe(&self.session, &mut self.planner)
    }

    pub(in crate::session) fn switch_on(&mut self, slot: u16) {
        if let Some(target) = self.targets.get(&slot) {
            if let Some(trace) = &self.options.trace {
                let allocators = target.allocator_files.clone();
                let header = Header { allocators, is_from_start: self.launches, ..Header::default() };
                trace.begin(&target.process, target.slot, monotonic_ns(), header);
            }
            self.session.capture.switch(target.slot, true);
        }
    }

    /// Drops a target that was never watched.
    pub(in crate::session) fn forget(&mut self, slot: u16) {
        if let Some(mut target) = self.targets.remove(&slot) {
            lock(&self.shard).watched.remove(&slot);
            self.vfork_children_lose(slot);
            target.detach();
            self.remove(&target);
        }
    }

    pub(in crate::session) fn check(&mut self) {
        self.checked = Instant::now();
        if let Some(trace) = &self.options.trace {
            trace.sample();
        }
        self.check_losses();
        if self.emitters_checked.elapsed() >= EMITTERS_EVERY {
            self.look_for_detaching();
        }
        for target in self.targets.values_mut() {
            target.look_at_limits(&self.session.capture);
            target.look_for_runtimes(&self.session);
        }
        let lost = self.notices_lost.load(Ordering::Relaxed);
        if lost != self.notices_lost_seen {
            self.notices_lost_seen = lost;
            for slot in self.targets.keys().copied().collect::<Vec<_>>() {
                self.new_code(slot, monotonic_ns());
            }
        }
        self.walking().ask();
        // An image that is not stopped at its entry point has started by now; so has one that blocks the signal that would stop it.
        let started = |target: &Target| {
            let most = if target.entry.is_some() { HELD_START_MAX } else { STARTING_MAX };
            target.starting.is_some_and(|since| since.elapsed() >= most)
        };
        for slot in self.targets.iter().filter(|(_, target)| started(target)).map(|(slot, _)| *slot).collect::<Vec<_>>() {
            if let Some(target) = self.targets.get_mut(&slot) {
                target.starting = None;
            }
            self.new_code(slot, monotonic_ns());
        }
        let overdue = |(slot, target): (&u16, &mut Target)| target.lost_exit.is_overdue(&target.process).then_some(*slot);
        for slot in self.targets.iter_mut().filter_map(overdue).collect::<Vec<_>>() {
            self.retire(slot);
        }
        self.check_vfork_children();
    }

    /// Looks whether emitters were detached from their processes: until they are attached again, blocks are freed without a record.
    fn look_for_detaching(&mut self) {
        let checked_ns = monotonic_ns().saturating_sub(u64::try_from(self.emitters_checked.elapsed().as_nanos()).unwrap_or(0));
        self.emitters_checked = Instant::now();
        let silent = |(slot, target): (&u16, &mut Target)| Some((*slot, target.look_for_detaching(checked_ns)?));
        for (slot, since_ns) in self.targets.iter_mut().filter_map(silent).collect::<Vec<_>>() {
            self.gap(slot, since_ns);
        }
    }

    /// Tells the ledgers how many of their records were lost since the last check.
    pub(in crate::session) fn check_losses(&mut self) {
        for (slot, target) in &mut self.targets {
            let Some((alloc, free, other)) = target.new_losses(&self.session.capture) else { continue };
            if let Some(watched) = lock(&self.shard).watched.get_mut(slot) {
                watched.loss(alloc, free, other, monotonic_ns());
            }
            if let Some(trace) = &self.options.trace {
                trace.lost(target.slot, alloc + free + other);
            }
        }
    }
}

impl Drop for Recorder {
    /// Other recordings may keep using the programs: removes all traces of this recording from them.
    fn drop(&mut self) {
        // Stopped processes continue.
        self.followed = None;
        for slot in self.targets.keys().copied().collect::<Vec<_>>() {
            self.forget(slot);
        }
    }
}
