//! The listener's thread: finds processes that contain an emitter, listens to them continuously, and publishes live bytes by stack.
//!
//! Processes of any size are examined: a process that will grow has its emitter from its start.
//!
//! Its cost is limited in three parts: searching for emitters, building profiles, and joining censuses with them each have a third of
//! `listening.cpu_percent`, and become less frequent if they need more. Nothing is loaded before the first emitter is found.

use std::collections::{BTreeSet, HashMap};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::config::ListeningConfig;
use super::governed::Sources;
use super::own::thread_cpu;
use super::worker::{Worker, lock};
use crate::emitter::Finder;
use crate::ledger::{Estimate, SampledTotals};
use crate::model::attribution::{Attributed, Rates};
use crate::model::counters::ListeningSample;
use crate::model::sample::{Identity, ProcessSample};
use crate::model::snapshot::Snapshot;
use crate::probe::features::Features;
use crate::process::{Process, ProcessId};
use crate::session::tier::sampled::EmitterTotals;
use crate::session::{Choice, Options, Recorder};

/// Length of a step: the maximum delay until an order is received.
const STEP: Duration = Duration::from_millis(200);
/// Interval between two rounds that examine the processes that are due.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Maximum CPU time of one round: the remaining processes are examined in the next one, so that a process that has just started never waits
/// for a whole node to be examined.
const LOOKS_MAX: Duration = Duration::from_millis(10);
/// A process is examined when it is found, and again after these times, because libraries may be loaded later. The last interval repeats.
const LOOKS_AFTER: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];
/// Interval between attempts to load the programs after a failure.
const RETRY: Duration = Duration::from_secs(300);
/// Maximum number of live chunks of a heap that is joined with its sample: a walk keeps 4 bytes of each, and those of the start are kept. A
/// larger heap has live bytes by stack, without pinned bytes and `[before attach]`.
const JOIN_CHUNKS_MAX: u64 = 4 << 20;
/// The same if no census has counted the chunks yet: bytes of extent.
const JOIN_EXTENT_MAX: u64 = 512 << 20;

/// The sample that the thread writes and `/metrics` reads.
pub type SharedListening = Arc<Mutex<ListeningSample>>;

/// Starts the thread.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(config: ListeningConfig, sources: Sources, sample: SharedListening) -> std::io::Result<Worker<ListeningConfig>> {
    Worker::start("fragprof-listen", move |orders| Listener::new(config, sources, sample).run(orders))
}

/// When work is due that may take a share of CPU time.
#[derive(Debug, Clone, Copy)]
struct Paced {
    due: Instant,
}

impl Paced {
    /// Sets the next time: `interval` from now, or later if the time spent requires it to keep the share.
    fn done(&mut self, spent: Duration, share: f64, interval: Duration) {
        let pause = Duration::try_from_secs_f64(spent.as_secs_f64() / share.max(1e-6)).unwrap_or(interval);
        self.due = Instant::now() + interval.max(pause);
    }

    fn is_due(&self) -> bool {
        Instant::now() >= self.due
    }
}

/// What is cached of an examined process.
#[derive(Debug, Clone, Copy)]
struct Looked {
    next: Instant,
    times: usize,
    has_emitter: bool,
}

/// A process that is listened to.
#[derive(Debug)]
struct Listened {
    identity: Identity,
    before: SampledTotals,
    at: Instant,
    joined: Option<Instant>,
}

struct Listener {
    config: ListeningConfig,
    sources: Sources,
    sample: SharedListening,
    finder: Finder,
    recorder: Option<Recorder>,
    tried: Option<Instant>,
    looked: HashMap<Identity, Looked>,
    listened: Vec<Listened>,
    looks: Paced,
    profiles: Paced,
    joins: Paced,
}

impl Listener {
    fn new(config: ListeningConfig, sources: Sources, sample: SharedListening) -> Self {
        lock(&sample).enabled = config.enabled;
        let now = Paced { due: Instant::now() };
        Self {
            config,
            sources,
            sample,
            finder: Finder::new(Features::of_host().emulation()),
            recorder: None,
            tried: None,
            looked: HashMap::new(),
            listened: Vec::new(),
            looks: now,
            profiles: now,
            joins: now,
        }
    }

    fn run(mut self, orders: &Receiver<ListeningConfig>) {
        loop {
            let wait = if self.listened.is_empty() { STEP } else { Duration::ZERO };
            match orders.recv_timeout(wait) {
                Ok(config) => self.reload(config),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if !self.config.enabled {
                continue;
            }
            if self.looks.is_due() {
                let spent = self.look();
                self.looks.done(spent, self.share(), LOOK_EVERY);
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.step(STEP);
                for gone in recorder.forget_ended() {
                    let mut sample = lock(&self.sample);
                    // The last reported figures: its ledger no longer exists.
                    let heard = sample.targets.iter().find(|(_, heard)| heard.process == gone).map(|(_, heard)| heard.clone());
                    if let Some(heard) = heard {
                        add_past(&mut sample, &heard);
                    }
                    drop(sample);
                    self.listened.retain(|one| one.identity.process != gone);
                }
            }
            if self.profiles.is_due() {
                let spent = self.hand_over();
                self.profiles.done(spent, self.share(), Duration::from_secs(self.config.profile_interval_s));
            }
            self.tell();
        }
    }

    /// The share of CPU time that each of the three kinds of work may take.
    fn share(&self) -> f64 {
        self.config.cpu_percent / 100.0 / 3.0
    }

    fn reload(&mut self, config: ListeningConfig) {
        lock(&self.sample).enabled = config.enabled;
        if !config.enabled {
            for one in std::mem::take(&mut self.listened) {
                self.stop_watching(one.identity.process);
            }
            self.looked.clear();
            self.sources.board.set_emitting(BTreeSet::new());
            self.recorder = None;
        }
        // A new order permits a new attempt.
        self.tried = None;
        self.config = config;
    }

    /// Examines the processes that are due, and listens to those with an emitter. Returns the time it took.
    fn look(&mut self) -> Duration {
        let began = thread_cpu();
        let snapshot = self.sources.published.load();
        let found = ProcessSizes::of(&snapshot);
        let new_emitters = self.sources.board.take_new_emitters();
        self.looked.retain(|identity, _| found.0.contains_key(identity) && !new_emitters.contains(&identity.process));
        for gone in self.listened.extract_if(.., |one| !found.0.contains_key(&one.identity)).collect::<Vec<_>>() {
            self.stop_watching(gone.identity.process);
        }
        let due = found.0.iter().filter(|(identity, _)| self.is_due(**identity)).map(|(identity, size)| (*identity, *size));
        let mut due: Vec<(Identity, Size)> = due.collect();
        // Processes never examined before come first, the youngest first, because for those every moment counts. Then the largest.
        let order = |(identity, size): &(Identity, Size)| {
            let is_new = !self.looked.contains_key(identity);
            std::cmp::Reverse((is_new, if is_new { identity.process.start_ticks } else { 0 }, size.rss_bytes))
        };
        due.sort_by_cached_key(order);
        for (identity, size) in due {
            if thread_cpu().saturating_sub(began) >= LOOKS_MAX {
                break;
            }
            if self.listened.iter().any(|listened| listened.identity == identity) {
                continue;
            }
            let has_emitter = self.has_emitter(identity.process);
            let looked = self.looked.entry(identity).or_insert(Looked { next: Instant::now(), times: 0, has_emitter });
            looked.next = Instant::now() + LOOKS_AFTER[looked.times.min(LOOKS_AFTER.len() - 1)];
            looked.times += 1;
            looked.has_emitter = has_emitter;
            if has_emitter && self.listened.len() < self.config.targets_max {
                self.heed(identity, size.is_joinable);
            }
        }
        self.sources.board.set_emitting(self.listened.iter().map(|one| one.identity).collect::<BTreeSet<_>>());
        let heard = |identity: &Identity| self.listened.iter().any(|one| one.identity == *identity);
        let over_limit = self.looked.iter().filter(|(identity, looked)| looked.has_emitter && !heard(identity)).count();
        lock(&self.sample).over_limit = over_limit;
        thread_cpu().saturating_sub(began)
    }

    fn is_due(&self, identity: Identity) -> bool {
        self.looked.get(&identity).is_none_or(|looked| Instant::now() >= looked.next)
    }

    fn has_emitter(&mut self, process: ProcessId) -> bool {
        lock(&self.sample).looks += 1;
        let Ok(opened) = Process::open(process.pid) else { return false };
        self.finder.find(&opened).is_ok_and(|found| found.emitters.iter().any(crate::emitter::Emitter::hears))
    }

    fn heed(&mut self, identity: Identity, joinable: bool) {
        let process = identity.process;
        let Some(recorder) = self.recorder() else { return };
        match recorder.listen(process.pid, joinable) {
            Ok(()) => {
                self.listened.push(Listened { identity, before: SampledTotals::default(), at: Instant::now(), joined: None });
                // All views show soon that this process has an emitter.
                self.profiles.due = self.profiles.due.min(Instant::now() + LOOK_EVERY);
            }
            Err(error) => {
                tracing::warn!("process {} is not listened to: {error}", process.pid);
                lock(&self.sample).refused += 1;
            }
        }
    }

    /// Loads the programs once there is a process to listen to.
    fn recorder(&mut self) -> Option<&mut Recorder> {
        if self.recorder.is_none() && self.tried.is_none_or(|at| at.elapsed() >= RETRY) {
            self.tried = Some(Instant::now());
            let options = Options {
                source: Choice::Emitter,
                censuses: true,
                ring_bytes: Some(self.config.ring_mib << 20),
                start_chunks_max: usize::try_from(JOIN_CHUNKS_MAX).ok(),
                ..Options::default()
            };
            match self.sources.session.get().and_then(|session| Recorder::over(session, options)) {
                Ok(recorder) => {
                    lock(&self.sample).unavailable = None;
                    self.recorder = Some(recorder);
                }
                Err(error) => {
                    tracing::warn!("cannot listen to emitters: {error}");
                    lock(&self.sample).unavailable = Some(error.to_string());
                }
            }
        }
        self.recorder.as_mut()
    }

    fn stop_watching(&mut self, process: ProcessId) {
        let Some(recorder) = &mut self.recorder else { return };
        if let Some(heard) = recorder.heard().into_iter().find(|heard| heard.process == process) {
            add_past(&mut lock(&self.sample), &heard);
        }
        recorder.unwatch(process);
    }

    /// Publishes the results of each target on the board from which everything is shown. Returns the time it took, without censuses.
    fn hand_over(&mut self) -> Duration {
        let began = thread_cpu();
        let mut joining = Duration::ZERO;
        let share = self.share();
        let snapshot = self.sources.published.load();
        let Some(recorder) = &mut self.recorder else { return Duration::ZERO };
        let heard = recorder.heard();
        for one in &mut self.listened {
            let process = one.identity.process;
            let Some(heard) = heard.iter().find(|heard| heard.process == process) else { continue };
            let stale = one.joined.is_none_or(|at| at.elapsed() >= Duration::from_secs(self.config.census_interval_s));
            let mut join = stale && self.joins.is_due();
            if join && snapshot.process(process.pid.0).is_some_and(|sample| !is_joinable(sample)) {
                one.joined = Some(Instant::now());
                lock(&self.sample).joins_too_large += 1;
                join = false;
            }
            let before = thread_cpu();
            let Some((profile, blocks)) = recorder.profile_of(process, join) else { continue };
            if join {
                one.joined = Some(Instant::now());
                let spent = thread_cpu().saturating_sub(before);
                joining += spent;
                self.joins.done(spent, share, Duration::ZERO);
                lock(&self.sample).joins += 1;
            }
            let rates = rates(&one.before, &heard.totals, one.at.elapsed());
            (one.before, one.at) = (heard.totals, Instant::now());
            let attributed = Attributed {
                profile: Arc::new(profile),
                at: Instant::now(),
                wall: SystemTime::now(),
                blocks: Some(Arc::new(blocks)),
                rates: Some(rates),
                slowdown_ratio_est: None,
            };
            self.sources.board.publish(process, attributed);
        }
        thread_cpu().saturating_sub(began).saturating_sub(joining)
    }

    fn tell(&self) {
        let snapshot = self.sources.published.load();
        let small = |process: ProcessId| snapshot.small.iter().find(|one| one.identity.process == process).map(|one| one.comm.clone());
        let name =
            |process: ProcessId| snapshot.process(process.pid.0).map(|one| one.comm.clone()).or_else(|| small(process)).unwrap_or_default();
        let heard = self.recorder.as_ref().map(Recorder::heard).unwrap_or_default();
        let mut sample = lock(&self.sample);
        // Targets that have ended since the last update are added to the past.
        let gone: Vec<EmitterTotals> = sample
            .targets
            .iter()
            .filter(|(_, old)| !heard.iter().any(|new| new.process == old.process))
            .map(|(_, old)| old.clone())
            .collect();
        gone.iter().for_each(|old| add_past(&mut sample, old));
        sample.targets = heard.into_iter().map(|heard| (name(heard.process), heard)).collect();
        sample.cpu_s = thread_cpu().as_secs_f64();
    }
}

fn add_past(sample: &mut ListeningSample, heard: &EmitterTotals) {
    let sums = [heard.totals.samples, heard.loss.allocations, heard.loss.frees];
    sample.past.iter_mut().zip(sums).for_each(|(past, sum)| *past = past.saturating_add(sum));
    sample.targets.retain(|(_, other)| other.process != heard.process);
}

/// What is known of a process before it is examined.
#[derive(Debug, Clone, Copy)]
struct Size {
    rss_bytes: u64,
    is_joinable: bool,
}

/// The processes of a snapshot, both watched and small ones.
struct ProcessSizes(HashMap<Identity, Size>);

impl ProcessSizes {
    fn of(snapshot: &Snapshot) -> Self {
        let watched = snapshot.processes.iter().map(|one| (one.identity, Size { rss_bytes: one.rss_bytes, is_joinable: is_joinable(one) }));
        let small = snapshot.small.iter().map(|one| (one.identity, Size { rss_bytes: one.rss_bytes, is_joinable: true }));
        Self(small.chain(watched).collect())
    }
}

/// Whether a full walk of its heap fits into the memory that the agent has for one.
fn is_joinable(one: &ProcessSample) -> bool {
    let chunks = one.heaps.iter().filter_map(|heap| heap.live_allocations).reduce(u64::saturating_add);
    let extent = one.heaps.iter().map(|heap| heap.ladder.extent_bytes).fold(0, u64::saturating_add);
    chunks.map_or(extent <= JOIN_EXTENT_MAX, |chunks| chunks <= JOIN_CHUNKS_MAX)
}

/// Rates between two sums.
fn rates(before: &SampledTotals, now: &SampledTotals, time: Duration) -> Rates {
    let seconds = time.as_secs_f64().max(1e-3);
    // The samples of this interval are independent of earlier ones.
    let since = |now: Estimate, before: Estimate| {
        let variance = (now.variance - before.variance).max(0.0);
        ((now.value - before.value).max(0.0) / seconds, Some(variance.sqrt() / seconds))
    };
    let (allocations_per_s, allocations_per_s_stderr) = since(now.allocations, before.allocations);
    let (allocated_bytes_per_s, allocated_bytes_per_s_stderr) = since(now.allocated_bytes, before.allocated_bytes);
    Rates { allocations_per_s, allocations_per_s_stderr, allocated_bytes_per_s, allocated_bytes_per_s_stderr, are_lower_bounds: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_of_the_time_between_two_profiles_with_the_error_of_its_samples() {
        let at = |value: f64, variance: f64| SampledTotals { allocated_bytes: Estimate { value, variance }, ..SampledTotals::default() };
        let rates = rates(&at(1000.0, 400.0), &at(3000.0, 2000.0), Duration::from_secs(10));
        assert_eq!(rates.allocated_bytes_per_s, 200.0);
        assert_eq!(rates.allocated_bytes_per_s_stderr, Some(4.0));
    }

    #[test]
    fn work_that_takes_more_than_its_share_becomes_rarer() {
        let mut paced = Paced { due: Instant::now() };
        paced.done(Duration::from_millis(100), 0.01, Duration::from_secs(2));
        let left = paced.due.saturating_duration_since(Instant::now());
        assert!(left > Duration::from_secs(9) && left <= Duration::from_secs(10), "{left:?}");
        paced.done(Duration::from_millis(1), 0.01, Duration::from_secs(2));
        assert!(paced.due.saturating_duration_since(Instant::now()) <= Duration::from_secs(2) && !paced.is_due());
    }
}
