//! One governed process as the driver sees it: where its probes are placed, its pacing, and the results of its windows.

mod full;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use full::{Full, PIECE_S};

use crate::allocator::FreedRule;
use crate::capture::{AttachFile, Attached, Capture, Hits, Ring, Slot, TargetLoss};
use crate::governor::retention::{BlockContents, BlockQuery, ContentSample, OF_WINDOW_MAX, Retention};
use crate::governor::{Cycle, Estimator, HitCosts, Pace, Schedule, ThreadTime, Tier, WindowClass, WindowCost, WindowTimes};
use crate::managed::{self, SharedManaged};
use crate::probe::plan::Planner;
use crate::process::{Maps, Process};
use crate::profile::HeapSummary;
use crate::random::Random;
use crate::selective::builds::KnownSites;
use crate::session::lost_exit::LostExit;
use crate::session::reaper::{Reaper, Ticket};
use crate::session::report::heap::{Before, HeapPicture};
use crate::session::shared::Session;
use crate::session::target::attach_file;
use crate::session::throwing::{ReturnProbePolicy, may_throw, memory_is_limited};
use crate::session::tier::windows::contents::BlockReader;
use crate::session::tier::windows::cpu_time;
use crate::session::tier::windows::large::{Large, Owner};
use crate::session::tier::windows::spent::{inside, run_in_window, spent};
use crate::session::tier::windows::state::{ProcessState, SharedStates, lock};
use crate::session::{Error, monotonic_ns};
use crate::symbol::{AddressSpace, read_perf_map};
use crate::units::{Pid, StackId};

/// How long before a window's end its blocks are read, as a fraction of the window's length, and the maximum. The window must not end
/// before the last of them is read, even if this thread is scheduled late.
const LOOK_AHEAD_PART: u64 = 4;
const LOOK_AHEAD_NS_MAX: u64 = 25_000_000;
/// Minimum age at which a block is read: its owner has written it by then.
const LOOK_AGE_MIN_NS: u64 = 5_000_000;
/// Seconds between two checks of a process whose first full trace has just begun.
const TRIAL_LOOK_S: f64 = 0.002;
/// Seconds between two checks of whether the probes of a closed window are out.
const CLOSING_LOOK_S: f64 = 0.01;
/// Seconds between two accounts of what a process has run and lost, at most: of one that is traced in full, whose trace the kernel may have
/// closed, and of any other.
const FULL_ACCOUNT_S: f64 = 0.02;
const ACCOUNT_S: f64 = 0.1;
/// Seconds until a window that could not be opened is tried again.
const RETRY_S: f64 = 10.0;
/// Minimum age of a process for its running time so far to tell its load.
const LOAD_AGE_MIN_S: f64 = 5.0;
/// Seconds between two checks whether a recording of every call has ended.
const RECORDED_S: f64 = 0.5;

/// A window from its opening to its end.
struct Window {
    cycle: Cycle,
    before: Hits,
    at_open: Hits,
    at_close: Hits,
    loss: TargetLoss,
    open_ns: u64,
    close_ns: u64,
    closed_early: bool,
    /// Blocks of the window that were read just before its end; `None` = not yet.
    looked: Option<Vec<(ContentSample, BlockContents)>>,
    /// Recordings of every call that had begun before this window opened: a new one closes the window.
    recordings: u64,
    /// CPU time of the process at the opening, in nanoseconds, and its threads' figures; once the window is closed, those of the window.
    run_ns: Option<u64>,
    threads: HashMap<u32, ThreadTime>,
    times: WindowTimes,
}

impl Window {
    /// When its blocks are read.
    fn look_ns(&self) -> u64 {
        self.close_ns.saturating_sub((self.close_ns.saturating_sub(self.open_ns) / LOOK_AHEAD_PART).min(LOOK_AHEAD_NS_MAX))
    }
}

enum State {
    /// Until the cycle's window opens.
    Waiting(Cycle),
    Open(Window, Attached),
    /// Detaching the probes, and reading the ring up to that moment.
    Closing(Window, Ticket, Option<u64>),
    Full(Full),
    /// The process has ended, or cannot be probed before this time.
    Idle(f64),
}

/// What the driver works with.
pub struct Tools<'a> {
    pub capture: &'a Capture,
    pub ring: &'a Ring,
    pub states: &'a SharedStates,
    pub reaper: &'a Reaper,
    pub costs: HitCosts,
    /// Seconds since the driver started.
    pub now_s: f64,
}

/// A governed process.
pub struct Target {
    pub process: Process,
    /// Detects its end if the exit record was lost.
    pub lost_exit: LostExit,
    pub slot: Slot,
    files: Vec<AttachFile>,
    /// Whether exceptions may pass its probed returns, and the number of functions that throw.
    return_probes: ReturnProbePolicy,
    throwing: usize,
    pub allocators: Vec<String>,
    pub space: AddressSpace,
    /// Its managed runtimes, shared with the thread that names stacks.
    managed: SharedManaged,
    pub pace: Pace,
    schedule: Schedule,
    pub estimator: Estimator<StackId>,
    /// Survivors of its windows, which are checked again later.
    pub retention: Retention<StackId>,
    /// Reads its blocks again; `None` if freed blocks of its allocator cannot be told, or it has several allocators.
    blocks: Option<BlockReader>,
    /// Windows whose blocks could not be read because jemalloc's threads came and went.
    pub looks_failed: u64,
    /// Windows whose blocks could not be read before they ended.
    pub looks_late: u64,
    random: Random,
    state: State,
    began_s: f64,
    ended_s: Option<f64>,
    elapsed_s: f64,
    /// CPU time of the process at the last reading, in nanoseconds.
    run_ns: Option<u64>,
    /// CPU seconds of its own while it was not fully traced: the time that windows represent.
    pub own_s: f64,
    lost_seen_s: f64,
    /// Hits when its last full trace ended, and the time of that: some arrive until its probes are detached.
    tail: Option<(Hits, f64)>,
    /// Full traces that were ended again.
    pub full_left: u64,
    /// Since when it has been fully traced without a gap, in seconds after it was first watched.
    pub full_since_s: Option<f64>,
    pub notes: Vec<String>,
    /// Its process state, once the process has ended.
    pub last_state: Option<ProcessState>,
    /// Stacks taken at heap growth and first touches.
    pub rare_events: u64,
    /// Seconds that these cost.
    pub rare_events_s: f64,
    /// The probes for large blocks.
    pub large: Large,
    /// Its heap when it was first watched and at the end, if this program takes its own censuses.
    pub heap_at_start: Option<HeapSummary>,
    pub heap_at_end: Option<HeapSummary>,
    /// The chunks that existed at the start; `None` = not known.
    pub before: Option<Before>,
    /// The heap at the end joined with the ledger of a full trace; `None` without a full trace, or if no census could read the heap.
    pub joined: Option<HeapPicture>,
}

impl Target {
    pub fn new(process: Process, slot: Slot, budget: f64, tools: &Tools<'_>, large_blocks: bool, managed: SharedManaged) -> Self {
        let (costs, now_s, chooses_returns) = (tools.costs, tools.now_s, tools.capture.chooses_returns());
        let mut space = AddressSpace::new(process.pid().0, Vec::new());
        space.set_named(Arc::clone(managed::lock(&managed).names()));
        let pace = Pace::new(budget, load_so_far(&process), costs);
        // Window positions must differ between processes and between runs.
        let seed = monotonic_ns() ^ (u64::from(process.pid().0) << 32) ^ u64::from(slot.generation);
        Self {
            process,
            lost_exit: LostExit::default(),
            slot,
            files: Vec::new(),
            return_probes: ReturnProbePolicy { limited: false, chooses_returns, accepted: false },
            throwing: 0,
            allocators: Vec::new(),
            space,
            managed,
            large: Large::new(pace.allowed(), costs, large_blocks),
            pace,
            schedule: Schedule::new(seed, now_s),
            estimator: Estimator::default(),
            retention: Retention::default(),
            blocks: None,
            looks_failed: 0,
            looks_late: 0,
            random: Random::new(!seed),
            state: State::Idle(now_s),
            began_s: now_s,
            ended_s: None,
            elapsed_s: now_s,
            run_ns: None,
            own_s: 0.0,
            lost_seen_s: 0.0,
            tail: None,
            full_left: 0,
            full_since_s: None,
            notes: Vec::new(),
            last_state: None,
            rare_events: 0,
            rare_events_s: 0.0,
            heap_at_start: None,
            heap_at_end: None,
            before: None,
            joined: None,
        }
    }

    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// Examines the code: the sites that a window has to probe, and what is needed to walk and symbolize stacks.
    pub fn look(&mut self, session: &Session, planner: &mut Planner, known: &mut KnownSites) -> Result<(), Error> {
        let capture = &session.capture;
        let maps = self.process.maps()?;
        session.snapshots().update(&mut self.space, &self.process, &maps);
        self.sync_tables(capture, &maps);
        let plan = planner.plan(&self.process)?;
        self.look_at_limits(capture);
        self.files = plan.files.iter().map(|file| attach_file(file, |site| self.return_probes.allows(site))).collect();
        self.throwing = plan.files.iter().flat_map(|file| &file.sites).filter(|site| may_throw(site)).count();
        self.allocators.clear();
        for file in &plan.files {
            let name = file.allocator.name().to_owned();
            if !self.allocators.contains(&name) {
                self.allocators.push(name);
            }
        }
        self.blocks = FreedRule::of(plan.files.iter().map(|file| file.allocator)).map(BlockReader::new);
        self.say_what_is_passed_over();
        self.large.look(&self.process, &plan, known);
        Ok(())
    }

    /// Brings the unwinder's tables up to date.
    fn sync_tables(&mut self, capture: &Capture, maps: &Maps) {
        let (code, notes) = managed::refresh(&self.managed, &self.process, maps, capture.tables().walks_managed());
        if let Err(error) = capture.tables().sync_managed(&self.process, self.pid().0, maps, &code) {
            self.note(format!("no unwind tables: {error}"));
        }
        notes.into_iter().for_each(|note| self.note(note));
    }

    /// Looks again for a managed runtime that was starting, or had not everything yet.
    pub fn look_for_runtimes(&mut self, session: &Session) {
        if managed::lock(&self.managed).is_unfinished()
            && let Ok(maps) = self.process.maps()
        {
            self.sync_tables(&session.capture, &maps);
        }
    }

    /// Checks whether its memory is limited by now: from then on an exception of operator new must be able to pass.
    fn look_at_limits(&mut self, capture: &Capture) {
        let limited = memory_is_limited(&self.process);
        if limited != self.return_probes.limited {
            self.return_probes.limited = limited;
            capture.limit(self.slot, limited);
            self.say_what_is_passed_over();
        }
    }

    fn say_what_is_passed_over(&mut self) {
        if let Some(sentence) = self.return_probes.sentence(self.throwing, &self.allocators.join(", ")) {
            self.note(sentence);
        }
    }

    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Its notes, with those on what was managed in it.
    pub fn every_note(&self) -> impl Iterator<Item = String> {
        let joined = self.joined.iter().flat_map(|heap| &heap.notes);
        self.notes.iter().chain(joined).cloned().chain(managed::lock(&self.managed).nothing_of_python())
    }

    /// Seconds that it has been watched.
    pub fn watched_s(&self, now_s: f64) -> f64 {
        self.ended_s.unwrap_or(now_s) - self.began_s
    }

    /// When watching began, in seconds of the driver's clock.
    pub fn began_s(&self) -> f64 {
        self.began_s
    }

    /// Whether it is fully traced now.
    pub fn is_full(&self) -> bool {
        matches!(self.state, State::Full(_))
    }

    /// Whether its probes are attached.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Open(..) | State::Full(_))
    }

    /// Whether survivors of its windows can be checked again.
    pub fn knows_blocks(&self) -> bool {
        self.blocks.as_ref().is_some_and(BlockReader::can_read)
    }

    /// Whether survivors would be checked again, had the allocator's own data been found.
    pub fn misses_records(&self) -> bool {
        self.blocks.as_ref().is_some_and(BlockReader::has_failed)
    }

    /// When it is next to be advanced, in seconds of the driver's clock: something is due, or what it lost is to be accounted for.
    pub fn due_s(&self, now_s: f64) -> f64 {
        let account_s = if self.is_full() { FULL_ACCOUNT_S } else { ACCOUNT_S };
        let due_s = match &self.state {
            State::Waiting(cycle) => cycle.open_s,
            State::Open(window, _) => {
                let next_ns = if window.looked.is_none() { window.look_ns() } else { window.close_ns };
                now_s + next_ns.saturating_sub(monotonic_ns()) as f64 / 1e9
            }
            State::Closing(..) => self.elapsed_s + CLOSING_LOOK_S,
            // The first milliseconds show how busy it is, and each further one costs time.
            State::Full(full) if self.pace.is_unknown() => self.elapsed_s.max(full.since_s) + TRIAL_LOOK_S,
            State::Full(full) => full.piece_s + PIECE_S,
            State::Idle(until_s) => *until_s,
        };
        due_s.min(self.elapsed_s + account_s)
    }

    /// Does what is due.
    pub fn advance(&mut self, tools: &Tools<'_>) {
        self.elapse(tools);
        self.look_again(false);
        if tools.capture.is_recorded(self.pid()) {
            self.make_way(tools);
        }
        match std::mem::replace(&mut self.state, State::Idle(f64::INFINITY)) {
            State::Waiting(cycle) if tools.now_s >= cycle.open_s => self.open(tools, cycle),
            State::Open(window, attached) => self.while_open(tools, window, attached),
            State::Closing(window, ticket, out_ns) => self.while_closing(tools, window, ticket, out_ns),
            State::Full(full) => self.while_full(tools, full),
            State::Idle(until_s) if tools.now_s >= until_s => self.next(tools),
            state => self.state = state,
        }
        self.advance_large(tools);
    }

    /// All calls of the process are being recorded: detaches the probes and delays windows until that ends. An open window is discarded,
    /// because it was closed at an unknown moment.
    fn make_way(&mut self, tools: &Tools<'_>) {
        self.note_recorded();
        match std::mem::replace(&mut self.state, State::Idle(tools.now_s + RECORDED_S)) {
            State::Open(window, attached) => self.make_way_with(tools, attached, window.before),
            State::Full(full) => self.make_way_with(tools, full.attached, full.hits),
            // It was closed before, and its records are still being read.
            closing @ State::Closing(..) => self.state = closing,
            State::Waiting(_) | State::Idle(_) => {}
        }
    }

    fn note_recorded(&mut self) {
        self.note(
            "while every call of the process was recorded, no window was open, and one that was open before was discarded: the estimates \
             are from the time before and after"
                .to_owned(),
        );
    }

    /// Detaches probes that were attached for a window or a full trace, and discards the results. `before`: the hits that are accounted
    /// for.
    fn make_way_with(&mut self, tools: &Tools<'_>, attached: Attached, before: Hits) {
        self.note_recorded();
        if let Some(state) = lock(tools.states).of.get_mut(&self.slot.index) {
            (state.window, state.live) = (None, None);
        }
        self.full_left += u64::from(self.full_since_s.take().is_some());
        drop(tools.reaper.take_out(attached));
        self.schedule.restart(tools.now_s + RECORDED_S);
        self.tail = Some((before, tools.now_s));
        self.state = State::Idle(tools.now_s + RECORDED_S);
    }

    /// Attaches, detaches or accounts for the size-selective probes.
    pub fn advance_large(&mut self, tools: &Tools<'_>) {
        let whose = Owner { pid: self.pid(), slot: self.slot, began_s: self.began_s, load: self.pace.load() };
        // Large blocks have a share of the loss that the process may have of its running time, so the less it runs, the less it may lose.
        self.large.set_budget(self.pace.allowed());
        let lost_s = self.large.advance(tools, &whose, self.is_full());
        self.pace.also_lost(lost_s);
        self.pace.set_reserved(self.large.reserved());
    }

    /// Changes the budget from now on.
    pub fn set_budget(&mut self, budget: f64) {
        self.pace.set_budget(budget);
    }

    fn elapse(&mut self, tools: &Tools<'_>) {
        // CPU time just before a process's end cannot be read.
        let run_ns = cpu_time::of_process_ns(self.pid()).or(self.run_ns);
        let before_ns = self.run_ns.or(run_ns).unwrap_or(0);
        let run_s = run_ns.unwrap_or(before_ns).saturating_sub(before_ns) as f64 / 1e9;
        self.run_ns = run_ns;
        self.pace.elapse(tools.now_s - self.elapsed_s, run_s);
        self.elapsed_s = tools.now_s;
        // A full trace that the kernel has closed ends before the driver notices.
        if !self.is_full() || tools.capture.hits(self.slot).closed_ns.is_some() {
            self.own_s = (self.own_s + run_s - (self.pace.lost_s() - self.lost_seen_s)).max(0.0);
        }
        self.lost_seen_s = self.pace.lost_s();
        let counted = lock(tools.states).of.get(&self.slot.index).map_or(0, |state| state.growth.growths + state.touches);
        // A walk at a system call or a page fault costs about as much as one at an allocation.
        let cost_s = counted.saturating_sub(self.rare_events) as f64 * tools.costs.allocation_ns / 1e9;
        self.pace.also_lost(cost_s);
        self.rare_events_s += cost_s;
        self.rare_events = counted;
    }

    /// Draws the next cycle, or begins a full trace.
    fn next(&mut self, tools: &Tools<'_>) {
        if self.files.iter().all(|file| file.sites.is_empty()) {
            self.state = State::Idle(tools.now_s + RETRY_S);
            return;
        }
        self.lose_tail(tools);
        if self.pace.tier() == Tier::Full {
            self.begin_full(tools);
            return;
        }
        let wait_s = self.pace.wait_s();
        if wait_s > 0.0 {
            self.schedule.restart(tools.now_s + wait_s);
        }
        tracing::debug!(
            "process {}: load {:.3}, lost {:.4} s, debt {:.4} s; waits {wait_s:.1} s, then {:?}",
            self.pid(),
            self.pace.load(),
            self.pace.lost_s(),
            self.pace.debt_s(),
            self.pace.periods()
        );
        self.state = match self.schedule.draw(tools.now_s, &self.pace.periods()) {
            Some(cycle) => State::Waiting(cycle),
            None => State::Idle(tools.now_s + RETRY_S),
        };
    }

    /// Accounts for the hits while the last full trace's probes were being detached.
    fn lose_tail(&mut self, tools: &Tools<'_>) {
        if let Some((before, since_s)) = self.tail.take() {
            self.pace.also_lost(self.cost_since(tools, before).min((tools.now_s - since_s) * self.pace.load()));
        }
    }

    /// Accounts for the hits since the last look at them, of probes that are about to be detached. A window whose results will count has them
    /// in its own account.
    fn lose_rest(&mut self, tools: &Tools<'_>, keep: bool) {
        self.lose_tail(tools);
        let before = match &self.state {
            State::Open(window, _) => window.before,
            State::Closing(window, ..) if !keep => window.before,
            State::Full(full) => full.hits,
            State::Closing(..) | State::Waiting(_) | State::Idle(_) => return,
        };
        self.pace.also_lost(self.cost_since(tools, before));
    }

    /// Seconds that the process lost to the hits since `before`.
    fn cost_since(&self, tools: &Tools<'_>, before: Hits) -> f64 {
        tools.costs.spent_s(spent(tools.capture.hits(self.slot)).since(spent(before)))
    }

    fn attach(&mut self, tools: &Tools<'_>) -> Option<Attached> {
        self.look_at_limits(tools.capture);
        match tools.capture.attach_window(self.pid(), self.slot, &self.files) {
            Ok(attached) => Some(attached),
            Err(error) => {
                tracing::debug!("{error}");
                self.note(format!("a window could not be opened: {error}"));
                self.state = State::Idle(tools.now_s + RETRY_S);
                None
            }
        }
    }

    fn open(&mut self, tools: &Tools<'_>, cycle: Cycle) {
        let before = tools.capture.hits(self.slot);
        let loss = tools.capture.loss(self.slot);
        let recordings = tools.capture.recordings_begun(self.pid());
        let Some(attached) = self.attach(tools) else { return };
        let at_open = tools.capture.hits(self.slot);
        let open_ns = monotonic_ns();
        let close_ns = open_ns + (cycle.class.length_s() * 1e9) as u64;
        if let Some(state) = lock(tools.states).of.get_mut(&self.slot.index) {
            state.open(open_ns, close_ns);
        }
        tools.capture.contents(self.slot, self.blocks.is_some());
        if !tools.capture.open(self.pid(), self.slot, self.pace.quota(cycle.class), close_ns) {
            self.make_way_with(tools, attached, before);
            return;
        }
        let window = Window {
            cycle,
            before,
            at_open,
            at_close: at_open,
            loss,
            open_ns,
            close_ns,
            closed_early: false,
            looked: self.blocks.is_none().then(Vec::new),
            recordings,
            threads: cpu_time::of_threads(&self.process),
            run_ns: cpu_time::of_process_ns(self.pid()),
            times: WindowTimes::default(),
        };
        self.state = State::Open(window, attached);
    }

    fn while_open(&mut self, tools: &Tools<'_>, mut window: Window, attached: Attached) {
        let hits = tools.capture.hits(self.slot);
        if hits.closed_ns.is_none() && window.looked.is_none() && monotonic_ns() >= window.look_ns() {
            window.looked = Some(self.look_first(tools, window.close_ns));
        }
        if hits.closed_ns.is_none() && monotonic_ns() < window.close_ns {
            self.state = State::Open(window, attached);
            return;
        }
        window.at_close = tools.capture.hits(self.slot);
        tools.capture.switch(self.slot, false);
        let run_ns = cpu_time::of_process_ns(self.pid());
        let noticed_s = (monotonic_ns() - window.open_ns) as f64 / 1e9;
        let since = cpu_time::since(&window.threads, &cpu_time::of_threads(&self.process));
        if let Some(closed_ns) = hits.closed_ns.filter(|closed_ns| *closed_ns < window.close_ns) {
            window.close_ns = closed_ns.max(window.open_ns + 1);
            window.closed_early = true;
        }
        // The end of a window is noticed slightly late, and on a busy machine very late.
        let share = (window.close_ns - window.open_ns) as f64 / 1e9 / noticed_s.max(1e-6);
        let ran_s = run_ns.zip(window.run_ns).map(|(now_ns, open_ns)| now_ns.saturating_sub(open_ns) as f64 / 1e9);
        let run_s = ran_s.map(|ran_s| run_in_window(tools.costs, ran_s, share, window.at_open, window.at_close));
        let of_run = run_s.zip(ran_s).map_or(share, |(run_s, ran_s)| if ran_s > 0.0 { run_s / ran_s } else { share });
        let threads =
            since.into_iter().map(|(tid, time)| (tid, ThreadTime { run_s: time.run_s * of_run, ready_s: time.ready_s * share, ..time }));
        window.times = WindowTimes { run_s, threads: threads.collect() };
        if let Some(open) = lock(tools.states).of.get_mut(&self.slot.index).and_then(|state| state.window.as_mut()) {
            open.close_ns = window.close_ns;
        }
        self.state = State::Closing(window, tools.reaper.take_out(attached), None);
    }

    fn while_closing(&mut self, tools: &Tools<'_>, window: Window, ticket: Ticket, out_ns: Option<u64>) {
        let out_ns = out_ns.or_else(|| ticket.is_out().then(monotonic_ns));
        let read = out_ns.is_some_and(|out_ns| lock(tools.states).read_up_to_ns > out_ns);
        if read {
            self.finish_window(tools, &window);
            self.next(tools);
        } else {
            self.state = State::Closing(window, ticket, out_ns);
        }
    }

    /// Reads some of the window's live blocks; none if the window has ended meanwhile, because then an address may hold another block.
    fn look_first(&mut self, tools: &Tools<'_>, close_ns: u64) -> Vec<(ContentSample, BlockContents)> {
        let now_ns = monotonic_ns();
        let mut samples: Vec<ContentSample> = match lock(tools.states).of.get(&self.slot.index).and_then(|state| state.window.as_ref()) {
            Some(open) => open.samples.values().filter(|one| now_ns.saturating_sub(one.born_ns) >= LOOK_AGE_MIN_NS).copied().collect(),
            None => return Vec::new(),
        };
        // In random order, so that any part of them is a sample.
        for at in 0..samples.len().min(OF_WINDOW_MAX) {
            let other = at + self.random.bits() as usize % (samples.len() - at);
            samples.swap(at, other);
        }
        samples.truncate(OF_WINDOW_MAX);
        let place = |one: &ContentSample| BlockQuery { addr: one.addr, bytes: one.bytes, wanted: one.known };
        let Some(reader) = self.blocks.as_mut().filter(|_| !samples.is_empty()) else { return Vec::new() };
        let mut blocks = reader.begin(&self.process);
        self.looks_failed += u64::from(blocks.is_unsettled);
        let looked = samples.into_iter().filter_map(|one| Some((one, blocks.look(&place(&one))?))).collect();
        if monotonic_ns() >= close_ns {
            self.looks_late += 1;
            return Vec::new();
        }
        looked
    }

    /// Checks sampled survivors that are due, or all that may still live. Those of an ended process keep their state.
    pub fn look_again(&mut self, all: bool) {
        let now_ns = monotonic_ns();
        if self.retention.is_due(now_ns, all)
            && self.process.is_alive()
            && let Some(reader) = &mut self.blocks
        {
            let mut blocks = reader.begin(&self.process);
            self.retention.look(now_ns, all, |place| blocks.look(place));
        }
    }

    fn finish_window(&mut self, tools: &Tools<'_>, window: &Window) {
        let after = tools.capture.hits(self.slot);
        let inside = inside(window.at_open, window.at_close);
        let around = spent(after).since(spent(window.before)).since(inside);
        let open_s = (window.close_ns - window.open_ns) as f64 / 1e9;
        let spent_s = tools.costs.spent_s(inside);
        // Not more than the time that the process ran.
        let lost_s = spent_s.min(window.times.run_s.unwrap_or(f64::INFINITY));
        self.pace.learn(inside.hits(), spent_s);
        self.pace.spent(WindowCost { lost_s, around_s: tools.costs.passed_over_s(around), open_s, tier: Tier::Windows });
        let observed = lock(tools.states).of.get_mut(&self.slot.index).and_then(|state| state.window.take());
        // A recording of every call that began meanwhile may have closed the window, even if that recording has ended.
        let Some(observed) = observed.filter(|_| tools.capture.recordings_begun(self.pid()) == window.recordings) else { return };
        if is_lossy(tools.capture.loss(self.slot), window.loss) {
            self.estimator.lossy();
            return;
        }
        // Only blocks that were not freed before the window's end: later frees are not observed.
        for (sample, look) in window.looked.iter().flatten() {
            if let Some((stack, _, born_ns)) = observed.observer.block(sample.addr)
                && born_ns == sample.born_ns
            {
                self.retention.admit(stack, sample, look, window.close_ns);
            }
        }
        let tally = observed.observer.close(window.close_ns, &tools.costs.of(inside), &window.times);
        self.estimator.window(window.cycle.class, window.cycle.period_s, window.closed_early, &tally);
    }

    /// Detaches all probes: at the end, at an exec, or when the process ends. An open window is discarded; the results of a full trace
    /// count if `keep` is set.
    pub fn stop(&mut self, tools: &Tools<'_>, keep: bool) {
        tools.capture.switch(self.slot, false);
        let large = self.large.stop(tools, self.slot);
        self.lose_rest(tools, keep);
        self.pace.also_lost(large.lost_s);
        self.elapse(tools);
        if large.is_whole && keep {
            self.wait_until_read(tools);
        }
        match std::mem::replace(&mut self.state, State::Idle(f64::INFINITY)) {
            State::Open(_, attached) => drop(tools.reaper.take_out(attached)),
            State::Full(full) => {
                drop(tools.reaper.take_out(full.attached));
                let whole =
                    !is_lossy(tools.capture.loss(self.slot), full.loss) && tools.capture.recordings_begun(self.pid()) == full.recordings;
                if keep && whole {
                    self.wait_until_read(tools);
                    self.end_piece(tools, monotonic_ns(), None);
                } else {
                    self.full_since_s = None;
                }
            }
            State::Closing(window, ticket, _) if keep => {
                let deadline = Instant::now() + std::time::Duration::from_secs(1);
                while !ticket.is_out() && Instant::now() < deadline {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                self.wait_until_read(tools);
                self.finish_window(tools, &window);
            }
            _ => {}
        }
        if let Some(state) = lock(tools.states).of.get_mut(&self.slot.index) {
            state.window = None;
        }
    }

    fn wait_until_read(&self, tools: &Tools<'_>) {
        let until_ns = monotonic_ns();
        let deadline = Instant::now() + std::time::Duration::from_secs(2);
        while lock(tools.states).read_up_to_ns < until_ns && Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    /// The process has ended.
    pub fn ended(&mut self, now_s: f64, state: Option<ProcessState>) {
        self.ended_s = Some(now_s);
        read_perf_map(&mut self.space, &self.process);
        self.last_state = state;
    }

    /// The number of windows in each class.
    pub fn windows(&self) -> impl Iterator<Item = (WindowClass, u64)> + '_ {
        WindowClass::ALL.into_iter().map(|class| (class, self.estimator.counts().windows[class as usize]))
    }
}

/// The running time of a process per second since it started: 1 for one that has just started, of which nothing is known.
fn load_so_far(process: &Process) -> f64 {
    let age_s = process.id().age().as_secs_f64();
    match cpu_time::of_process_ns(process.pid()) {
        Some(run_ns) if age_s >= LOAD_AGE_MIN_S => run_ns as f64 / 1e9 / age_s,
        _ => 1.0,
    }
}

/// Whether allocation or free records were lost since.
pub fn is_lossy(now: TargetLoss, before: TargetLoss) -> bool {
    (now.allocations, now.frees) != (before.allocations, before.frees)
}
