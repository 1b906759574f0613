//! Records every call by a library in the processes, preloaded or attached, through memory that they share with the recorder.
//!
//! ```text
//! process ── preload/record.c ──→ ring::Memory ── feed (thread): ring::Reader → LedgerSink ──→ Shard (ledgers)
//!    ↑                                              │ told                                         │
//!    └── admit ── InProcess::step (caller's thread) ┘                    finish → Profile ←────────┘
//! ```
//!
//! Ledgers, trace, censuses and report are those of a recording by probes. No BPF program is loaded, and no process is traced, so it needs no
//! privilege over a command that one may start and read. What only the kernel tells is not known: changes of the address space, by stack.

mod attached;
mod feed;

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::sync::{Arc, atomic::AtomicU64};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::attached::Attached;
use self::feed::{Control, Told};
use crate::bpf::{self, RingOrigin};
use crate::capture::{self, Counters, Slot, TargetLoss};
use crate::ledger::{Ledger, StackLimits};
use crate::machine::open_files;
use crate::managed::Managed;
use crate::probe::features::Features;
use crate::probe::plan::Planner;
use crate::process::{Mapping, Process};
use crate::profile::Profile;
use crate::ring::{Announced, BYTES_DEFAULT, Memory, PATH_VARIABLE};
use crate::sampler::{fit, library};
use crate::session::attach::launch::LaunchError;
use crate::session::recorder::{CHECK_INTERVAL, NOTICES_MAX};
use crate::session::report::heap::Before;
use crate::session::sink::{Inherited, LedgerSink, SharedShard, lock};
use crate::session::target::{Source, Target};
use crate::session::throwing::ReturnProbePolicy;
use crate::session::tier::exact::Watched;
use crate::session::walks::Walking;
use crate::session::walks::walker::Walker;
use crate::session::{Error, Options, monotonic_ns, report};
use crate::symbol::{Snapshots, Symbolizer};
use crate::trace::Header;
use crate::units::{Pid, counted};

/// Longest wait for a started command to announce itself.
const START_MAX: Duration = Duration::from_secs(10);
/// Longest wait for the copy of its parent's ledger, which the parent's record of the fork makes.
const INHERIT_MAX: Duration = Duration::from_secs(1);
/// Copies of ledgers for children that have not announced themselves after this time are dropped: they execute another program.
const UNCLAIMED_MAX: Duration = Duration::from_secs(5);

/// A process that executed a program which does not announce itself within this time is not recorded any more.
const SILENT_MAX: Duration = Duration::from_secs(2);

/// Bytes of the shared memory, and what is recorded into it, `RING_*`.
fn of_memory(options: &Options) -> (u64, u32) {
    let mut flags = 0;
    if !options.no_stacks {
        flags |= bpf::RING_STACKS;
    }
    if options.free_stacks {
        flags |= bpf::RING_FREE_STACKS;
    }
    (options.ring_bytes.map_or(BYTES_DEFAULT, u64::from), flags)
}

/// A child that waits.
struct Waiting {
    announced: Announced,
    since: Instant,
}

/// A recording in progress.
pub struct InProcess {
    options: Options,
    memory: Arc<Memory>,
    control: Arc<Control>,
    told: Receiver<Told>,
    thread: Option<JoinHandle<()>>,
    shard: SharedShard,
    targets: HashMap<u16, Target>,
    ended: Vec<Target>,
    waiting: Vec<Waiting>,
    /// When a copy of a ledger was first seen without its child.
    unclaimed: HashMap<Pid, Instant>,
    next_slot: Slot,
    /// By slot: the program, and another one that the process has since some time.
    programs: HashMap<u16, (PathBuf, Option<(Instant, PathBuf)>)>,
    /// The process to which the library was attached.
    attached: Option<Attached>,
    command: Option<Child>,
    status: Option<ExitStatus>,
    planner: Planner,
    snapshots: Snapshots,
    walker: Option<Walker>,
    notes: Vec<String>,
    unwatched_children: u64,
    children_ignored: u64,
    started: Instant,
    started_at: SystemTime,
    started_ns: u64,
    checked: Instant,
}

impl InProcess {
    /// Creates the memory and starts reading; no process is there yet.
    ///
    /// # Errors
    /// If the system has no memory or no thread.
    pub fn new(options: Options) -> Result<Self, Error> {
        let (bytes, flags) = of_memory(&options);
        Self::reading(options, Memory::create(bytes, flags)?)
    }

    /// Reads this memory.
    fn reading(options: Options, memory: Memory) -> Result<Self, Error> {
        let memory = Arc::new(memory);
        let control = Arc::<Control>::default();
        let shard = SharedShard::default();
        lock(&shard).follow_children = options.follow_children;
        let (sender, told) = channel();
        // What the sink tells is told by the memory's reader too.
        let (notices, _) = sync_channel(NOTICES_MAX);
        let sink = LedgerSink::new(Arc::clone(&shard), notices, Arc::<AtomicU64>::default(), options.trace.clone());
        let thread = {
            let (memory, control) = (Arc::clone(&memory), Arc::clone(&control));
            let read = move || feed::read(&memory, sink, &control, sender);
            std::thread::Builder::new().name("fragprof-memory".into()).spawn(read).map_err(capture::Error::Thread)?
        };
        let walker = if options.censuses { Some(Walker::start().map_err(capture::Error::Thread)?) } else { None };
        Ok(Self {
            options,
            memory,
            control,
            told,
            thread: Some(thread),
            shard,
            targets: HashMap::new(),
            ended: Vec::new(),
            waiting: Vec::new(),
            unclaimed: HashMap::new(),
            next_slot: Slot { index: 0, generation: 1 },
            programs: HashMap::new(),
            attached: None,
            command: None,
            status: None,
            planner: Planner::new(Features::of_host().emulation()),
            snapshots: Snapshots::default(),
            walker,
            notes: Vec::new(),
            unwatched_children: 0,
            children_ignored: 0,
            started: Instant::now(),
            started_at: SystemTime::now(),
            started_ns: monotonic_ns(),
            checked: Instant::now(),
        })
    }

    /// Starts a command with the library, and waits until it has announced itself.
    ///
    /// # Errors
    /// If it cannot be started, or cannot run with the library, or ends without having loaded it.
    pub fn launch(&mut self, command: &[OsString]) -> Result<(), Error> {
        let fit = fit::examine(command)?;
        self.notes.extend(fit.doubts.iter().cloned());
        let path = library::place(fit.flavour.recorder())?;
        let program = command.first().map(|program| program.to_string_lossy().into_owned()).unwrap_or_default();
        let mut start = Command::new(command.first().map_or_else(OsString::new, OsString::clone));
        start.args(command.iter().skip(1));
        start.env("LD_PRELOAD", library::preload(&path, std::env::var_os("LD_PRELOAD").as_deref()));
        start.env(PATH_VARIABLE, self.memory.path());
        // SAFETY: between fork and exec only an async-signal-safe system call is made.
        unsafe { start.pre_exec(open_files::restore_in_child) };
        self.started = Instant::now();
        self.started_at = SystemTime::now();
        self.started_ns = monotonic_ns();
        self.command = Some(start.spawn().map_err(|source| LaunchError::Spawn { program: program.clone(), source })?);
        while self.targets.is_empty() && self.ended.is_empty() {
            self.turn(Duration::from_millis(20));
            if (self.status.is_some() || self.started.elapsed() > START_MAX) && self.targets.is_empty() && self.ended.is_empty() {
                return Err(Error::NotLoaded { program });
            }
        }
        Ok(())
    }

    /// How the command ended, once it has.
    pub fn command_status(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Time since the recording began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Does what is due for up to `wait`. Returns whether any recorded process is left.
    pub fn step(&mut self, wait: Duration) -> bool {
        let deadline = Instant::now() + wait;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.turn(left.min(CHECK_INTERVAL / 4));
            let is_any = !self.targets.is_empty() || !self.waiting.is_empty();
            if !is_any || Instant::now() >= deadline {
                return is_any;
            }
        }
    }

    fn turn(&mut self, wait: Duration) {
        // A child that waits is looked at again soon.
        let wait = if self.waiting.is_empty() { wait } else { wait.min(Duration::from_millis(1)) };
        match self.told.recv_timeout(wait) {
            Ok(told) => self.act(told),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
        while let Ok(told) = self.told.try_recv() {
            self.act(told);
        }
        for waiting in std::mem::take(&mut self.waiting) {
            self.meet(waiting);
        }
        self.look();
        if self.status.is_none() {
            self.status = self.command.as_mut().and_then(|command| command.try_wait().ok().flatten());
        }
        if self.checked.elapsed() >= CHECK_INTERVAL {
            self.check();
        }
        self.walking().take();
    }

    fn act(&mut self, told: Told) {
        match told {
            Told::Announced(announced) => self.waiting.push(Waiting { announced, since: Instant::now() }),
            Told::Over { slot, loss, is_replaced } => {
                self.add_losses(&[(slot, loss)]);
                if !is_replaced {
                    self.retire(slot);
                }
            }
        }
    }

    /// Admits a process image.
    fn meet(&mut self, waiting: Waiting) {
        let announced = waiting.announced;
        if !self.options.follow_children && matches!(announced.origin, RingOrigin::Fork | RingOrigin::UnknownFork) {
            self.leave_alone(&announced);
            self.children_ignored += 1;
            return;
        }
        // An attached process may be in another pid namespace, and say another number.
        let attached = self.attached.as_ref().filter(|_| announced.origin == RingOrigin::Attached);
        let pid = attached.map_or(Pid(announced.pid), |attached| attached.process.pid());
        let process = match self.open(pid) {
            Ok(process) => process,
            Err(reason) => {
                self.leave_alone(&announced);
                self.unwatched_children += 1;
                self.notes.push(format!("process {pid} could not be watched: {reason}"));
                return;
            }
        };
        let known = self.targets.values().find(|target| target.process.pid() == pid).map(|target| target.slot);
        let slot = match known {
            Some(slot) => {
                if let Some(target) = self.targets.get_mut(&slot.index) {
                    target.exec();
                    target.source = Source::InProcess;
                    target.starting = None;
                }
                slot
            }
            None => {
                let inherited = match self.inherit(&waiting) {
                    Ok(inherited) => inherited,
                    Err(waiting) => {
                        self.waiting.push(waiting);
                        return;
                    }
                };
                self.register(process, announced, inherited)
            }
        };
        if let Some(program) = self.targets.get(&slot.index).and_then(|target| program_of(&target.process)) {
            self.programs.insert(slot.index, (program, None));
        }
        let same_tids = self.targets.get(&slot.index).is_none_or(|target| target.process.inner_pid() == target.process.pid());
        self.snapshot(slot.index);
        let is_traced = self.options.trace.is_some();
        if is_traced {
            self.name_allocators(slot.index);
        }
        if let (Some(trace), Some(target)) = (&self.options.trace, self.targets.get(&slot.index)) {
            let is_from_start = announced.origin != RingOrigin::Attached;
            let header = Header { allocators: target.allocator_files.clone(), is_from_start, ..Header::default() };
            trace.begin(&target.process, slot, monotonic_ns(), header);
        }
        self.control.admit(&announced, slot, same_tids);
        self.memory.admit(announced.entry);
        // Examining its files takes longer; it does not wait for that.
        if !is_traced {
            self.name_allocators(slot.index);
        }
    }

    /// The process image goes on, and nobody takes what it writes.
    fn leave_alone(&mut self, announced: &Announced) {
        let slot = self.take_slot();
        self.control.admit(announced, slot, false);
        self.memory.admit(announced.entry);
    }

    /// The process with a number that it gave itself: in another pid namespace it is another process's here.
    fn open(&self, pid: Pid) -> Result<Process, String> {
        let process = Process::open(pid).map_err(|error| error.to_string())?;
        let maps = process.maps().map_err(|error| error.to_string())?;
        let inode = self.memory.inode();
        let is_ours =
            |mapping: &Mapping| mapping.inode == inode && mapping.path().is_some_and(|path| path.starts_with("/memfd:fragprof-ring"));
        if maps.mappings.iter().any(is_ours) { Ok(process) } else { Err("its number is another process's here".to_owned()) }
    }

    /// The copy of its parent's ledger for a child of fork; the child itself if the copy is not there yet.
    fn inherit(&mut self, waiting: &Waiting) -> Result<Option<Inherited>, Waiting> {
        let pid = Pid(waiting.announced.pid);
        let found = lock(&self.shard).inherited.remove(&pid);
        self.unclaimed.remove(&pid);
        match (waiting.announced.origin, found) {
            (RingOrigin::Fork, Some(inherited)) => Ok(inherited),
            (RingOrigin::Fork, None) if waiting.since.elapsed() < INHERIT_MAX && self.options.follow_children => {
                Err(Waiting { announced: waiting.announced, since: waiting.since })
            }
            (RingOrigin::Fork | RingOrigin::UnknownFork, _) => {
                lock(&self.shard).inherited_refused += 1;
                Ok(None)
            }
            (RingOrigin::Image | RingOrigin::Attached, _) => Ok(None),
        }
    }

    fn take_slot(&mut self) -> Slot {
        let slot = self.next_slot;
        let next = slot.index.wrapping_add(1);
        self.next_slot = Slot { index: next, generation: slot.generation + u32::from(next == 0) };
        slot
    }

    fn register(&mut self, process: Process, announced: Announced, inherited: Option<Inherited>) -> Slot {
        let slot = self.take_slot();
        let has_none = inherited.is_none();
        let nothing = || Inherited { ledger: Ledger::new(monotonic_ns(), StackLimits::default()), sampled: None, names: Arc::default() };
        let Inherited { ledger, names, .. } = inherited.unwrap_or_else(nothing);
        let managed = Managed::shared(names, true);
        let mappings = process.maps().map(|maps| report::heap::mappings_of(&maps)).unwrap_or_default();
        let mut watched = Watched::new(process.pid(), slot, ledger, &mappings, Some(0));
        watched.managed = Arc::clone(&managed);
        lock(&self.shard).watched.insert(slot.index, watched);
        let return_probes = ReturnProbePolicy { limited: false, chooses_returns: true, accepted: true };
        let mut target = Target::new(process, slot, return_probes, managed);
        target.source = Source::InProcess;
        // A child without its parent's ledger has memory from before.
        if !(has_none && announced.origin != RingOrigin::Image) {
            target.before = Before::Nothing;
        }
        self.targets.insert(slot.index, target);
        slot
    }

    /// Looks at the code of a process.
    fn snapshot(&mut self, slot: u16) {
        let Some(target) = self.targets.get_mut(&slot) else { return };
        match target.process.maps() {
            Ok(maps) => self.snapshots.update(&mut target.space, &target.process, &maps),
            Err(error) => tracing::debug!("{error}"),
        }
    }

    /// Finds which allocators a process has, for the report and the trace.
    fn name_allocators(&mut self, slot: u16) {
        let Some(target) = self.targets.get_mut(&slot) else { return };
        match self.planner.plan(&target.process) {
            Ok(mut plan) => {
                let behind = plan.files.iter().position(|file| !file.allocator.row().gives_way).unwrap_or(0);
                for (number, file) in plan.files.iter_mut().enumerate() {
                    file.serves_malloc = number == behind;
                }
                target.name_allocators(&plan.files);
            }
            Err(error) => tracing::debug!("{error}"),
        }
    }

    /// Answers processes that found code which was not mapped before.
    fn look(&mut self) {
        for slot in self.targets.values().map(|target| target.slot).collect::<Vec<_>>() {
            let Some(entry) = self.control.entry_of(slot) else { continue };
            let wanted = self.memory.look_wanted(entry);
            if !self.memory.has_looked(entry, wanted) {
                self.snapshot(slot.index);
                self.memory.looked(entry, wanted);
                self.name_allocators(slot.index);
            }
        }
    }

    fn check(&mut self) {
        self.checked = Instant::now();
        if let Some(trace) = &self.options.trace {
            trace.sample();
        }
        self.add_losses(&self.control.losses());
        for slot in self.targets.values().map(|target| target.slot).collect::<Vec<_>>() {
            self.check_process(slot);
        }
        for target in self.targets.values_mut() {
            if self.control.entry_of(target.slot).and_then(|entry| self.memory.is_in_front(entry)) == Some(false) {
                target.note("calls of malloc do not reach the recorder: another malloc, or another recorder, precedes it".into());
            }
        }
        self.drop_unclaimed();
        self.walking().ask();
    }

    /// Notices that a process has ended, or has executed a program without the library.
    fn check_process(&mut self, slot: Slot) {
        let Some(target) = self.targets.get_mut(&slot.index) else { return };
        let is_alive = target.process.is_alive();
        let is_recorded = self.control.entry_of(slot).is_some();
        if !is_alive && is_recorded {
            self.control.ended(slot);
        } else if !is_alive {
            self.retire(slot);
        } else if let (Some((program, other)), Some(now)) = (self.programs.get_mut(&slot.index), program_of(&target.process)) {
            if *program == now {
                *other = None;
            } else if other.get_or_insert_with(|| (Instant::now(), now)).0.elapsed() >= SILENT_MAX && is_recorded {
                if let Some((_, now)) = other.take() {
                    not_recorded_since(target, &now);
                    self.unwatched_children += 1;
                    *program = now;
                }
                self.control.replaced(slot);
            }
        }
    }

    /// Drops copies of ledgers whose children executed another program, or ended, before they allocated anything.
    fn drop_unclaimed(&mut self) {
        let mut shard = lock(&self.shard);
        self.unclaimed.retain(|pid, _| shard.inherited.contains_key(pid));
        for pid in shard.inherited.keys() {
            self.unclaimed.entry(*pid).or_insert_with(Instant::now);
        }
        shard.inherited.retain(|pid, _| self.unclaimed.get(pid).is_none_or(|since| since.elapsed() < UNCLAIMED_MAX));
    }

    fn add_losses(&mut self, losses: &[(Slot, TargetLoss)]) {
        for (slot, loss) in losses {
            let Some(target) = self.targets.get_mut(&slot.index).filter(|target| target.slot == *slot) else { continue };
            let Some((alloc, free, other)) = target.losses_since(*loss) else { continue };
            if let Some(watched) = lock(&self.shard).watched.get_mut(&slot.index) {
                watched.loss(alloc, free, other, monotonic_ns());
            }
            if let Some(trace) = &self.options.trace {
                trace.lost(*slot, alloc + free + other);
            }
        }
    }

    fn retire(&mut self, slot: Slot) {
        let Some(mut target) = self.targets.remove(&slot.index) else { return };
        if let Some((_, Some((_, now)))) = self.programs.remove(&slot.index) {
            not_recorded_since(&mut target, &now);
            self.unwatched_children += 1;
        }
        target.watched = lock(&self.shard).watched.remove(&slot.index);
        self.ended.push(target);
    }

    fn walking(&mut self) -> Walking<'_> {
        Walking {
            walker: self.walker.as_ref(),
            shard: &self.shard,
            targets: &mut self.targets,
            trace: self.options.trace.as_ref(),
            started_ns: self.started_ns,
            start_chunks_max: self.options.start_chunks_max,
        }
    }

    /// Stops reading: processes that go on record nothing more.
    fn stop(&mut self) {
        if let Some(note) = self.attached.take().and_then(|attached| attached.take_away()) {
            self.notes.push(note);
        }
        self.memory.close();
        self.control.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the reader of the shared memory panicked: what it had not read is lost");
        }
        self.memory.discard();
    }

    /// Ends the recording and builds the profile.
    ///
    /// # Errors
    /// None at present.
    pub fn finish(mut self) -> Result<Profile, Error> {
        for target in self.targets.values_mut() {
            if let Ok(maps) = target.process.maps() {
                self.snapshots.update(&mut target.space, &target.process, &maps);
            }
        }
        let duration = self.started.elapsed();
        let losses = self.control.losses();
        self.stop();
        self.add_losses(&losses);
        while let Ok(told) = self.told.try_recv() {
            if let Told::Over { .. } = told {
                self.act(told);
            }
        }
        for walked in self.walker.take().map_or_else(Vec::new, Walker::finish) {
            self.walking().take_one(walked);
        }
        for (slot, target) in &mut self.targets {
            target.watched = lock(&self.shard).watched.remove(slot);
            target.look_at_the_heap(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX), self.options.owners);
        }
        let mut all: Vec<Target> = self.targets.drain().map(|(_, target)| target).collect();
        all.append(&mut self.ended);
        all.sort_by_key(|target| target.process.pid());
        let facts = self.facts(duration, &all);
        let trace = self.options.trace.take();
        let mut symbolizer = Symbolizer::default();
        Ok(report::traced_profile(facts, &all, &mut symbolizer, trace.as_ref(), None))
    }

    fn facts(&mut self, duration: Duration, all: &[Target]) -> report::Facts {
        let mut counters = Counters::default();
        let [stacks, others, early, failed] = self.control.sums();
        let sum = |of: fn(&TargetLoss) -> u64| all.iter().map(|target| of(&target.loss())).fold(0, u64::saturating_add);
        counters.add(bpf::Counter::LostAlloc, sum(|loss| loss.allocations));
        counters.add(bpf::Counter::LostFree, sum(|loss| loss.frees));
        counters.add(bpf::Counter::LostStack, stacks);
        counters.add(bpf::Counter::LostLife, others);
        counters.add(bpf::Counter::AllocFailed, failed);
        for (end, count) in self.control.ends() {
            counters.add_end(end, count);
        }
        let mut notes = std::mem::take(&mut self.notes);
        if early > 0 {
            notes.push(format!("{} were made before the recorder was ready, by constructors of libraries", counted(early, "call")));
        }
        let refused = self.memory.refused();
        if refused > 0 {
            let of = bpf::RING_PROCESSES;
            notes.push(format!("{refused} process images were not recorded: {of} at a time are"));
        }
        report::Facts {
            start_unix_ns: self.started_at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
            duration,
            counters,
            read: self.control.read(),
            unaccounted: 0,
            children_ignored: self.children_ignored,
            unwatched_children: self.unwatched_children + u64::from(refused),
            notices_lost: 0,
            inherited_refused: lock(&self.shard).inherited_refused,
            notes,
            has_growth: false,
            is_from_start: self.command.is_some(),
        }
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Says of a process that it executed a program that is not recorded.
fn not_recorded_since(target: &mut Target, program: &Path) {
    target.note(format!("it executed {}, which does not load the recorder's library: not recorded since", program.display()));
}

/// The program that a process executes.
fn program_of(process: &Process) -> Option<PathBuf> {
    std::fs::read_link(process.directory().join("exe")).ok()
}
