//! The census thread: finds processes, takes censuses as scheduled, and publishes the results.

mod heartbeat;
mod kills;
mod look;
mod picture;
mod records;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use super::budget::{Budget, Work};
use super::config::Config;
use super::containers::Containers;
use super::discovery::{Scan, Scanner};
use super::flight::Flight;
use super::outcomes::{Outcomes, settings_of};
use super::own::{give_back, own_rss_bytes, thread_cpu};
use super::rules::Rules;
use super::schedule::{Next, next};
use crate::census::{LayoutCache, Level, PageMap};
use crate::model::attribution::{Attributions, Labels};
use crate::model::sample::{Identity, ProcessSample, WatchState};
use crate::model::seen::Candidate;
use crate::model::snapshot::{AgentCounters, Published, Snapshot};
use crate::process::handle::read_bounded;
use crate::store::Keeper;
use crate::units::{HumanDuration, Pid};
use kills::Kills;
use watch::Watch;

pub use heartbeat::Heartbeat;
pub use picture::MapRefused;

/// Full censuses kept of a process for its growth (48 bytes each): an hour at the default interval.
const LOOKS_KEPT_MAX: usize = 12;
/// Longest sleep, so that the heartbeat continues.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Time between two snapshots while there is work: the longest delay of figures by publishing.
const PUBLISH_EVERY: Duration = Duration::from_millis(500);
/// Arenas kept of a census (80 bytes each): glibc creates eight per core by default, so enough for 64 cores. The others are still included
/// in the heap's sums.
const ARENAS_KEPT_MAX: usize = 512;
/// Size of a table of chunks after which freed memory is returned to the system: the agent must not hoard what one large heap needed.
const TRIM_AFTER_CHUNKS: u64 = 1 << 20;
/// Time between two returns of freed memory to the system, in seconds: a minute's unwind tables, profiles and censuses leave some 10 MiB.
const GIVE_BACK_INTERVAL_S: f64 = 60.0;
/// Most of the budget that scanning `/proc`, or repeated censuses of one process, may take; above it they become rarer.
const SHARE_MAX: f64 = 0.25;
/// CPU time of a cheap census beyond which it is charged to the account of full ones, as far as that has credit: a process that takes a
/// long search must not delay the others.
const CHEAP_S: f64 = 0.02;
/// A process that starts while the agent runs, and is too small for a flight record of its end, gets its first full census after this many
/// rounds of cheap ones: most have ended by then, and full censuses of them would take budget from those that stay.
const SETTLE_ROUNDS: f64 = 2.0;
/// After a process was found to have ended, the process list is scanned within this time, in seconds.
const GONE_SCAN_S: f64 = 1.0;
/// Bytes read of `/etc/passwd`.
const SMALL_FILE_BYTES_MAX: u64 = 4 << 20;

/// Commands to the census thread.
#[derive(Debug)]
pub enum Command {
    /// Continue with this configuration.
    Reload(Box<Config>),
    /// Count a configuration that was invalid.
    ReloadFailed,
    /// Make a map of a process's pages.
    Map {
        /// The process.
        identity: Identity,
        /// Receives the answer; may be closed already.
        reply: tokio::sync::oneshot::Sender<Result<PageMap, MapRefused>>,
    },
    /// End.
    Stop,
}

/// The census thread's state.
#[derive(Debug)]
pub struct Collector {
    config: Config,
    rules: Rules,
    scanner: Scanner,
    published: Arc<Published>,
    heartbeat: Arc<Heartbeat>,
    attributions: Arc<Attributions>,
    keeper: Option<Keeper>,
    flight: Flight,
    outcomes: Outcomes,
    kills: Kills,
    /// Processes found to have ended since the last scan of the process list.
    ended: Vec<Arc<ProcessSample>>,
    watches: BTreeMap<Identity, Watch>,
    small: Arc<[Candidate]>,
    layouts: LayoutCache,
    containers: Containers,
    budget: Budget,
    counters: AgentCounters,
    started: Instant,
    filled_at: Instant,
    published_at: Option<Instant>,
    cpu: Duration,
    next_scan_s: f64,
    next_give_back_s: f64,
    processes_on_machine: usize,
    processes_over_limit: usize,
    own_rss_bytes: u64,
    first_round_done: bool,
    sequence: u64,
}

impl Collector {
    /// A collector without any results yet.
    #[must_use]
    pub fn new(config: Config, published: Arc<Published>, heartbeat: Arc<Heartbeat>, attributions: Arc<Attributions>) -> Self {
        let now = Instant::now();
        let containers = Containers::start(config.containers.cri.clone());
        let budget = Budget::new(config.census.budget_ratio(), config.census.start_credit_ms as f64 / 1e3);
        let rules = rules_of(&config);
        Self {
            config,
            rules,
            scanner: Scanner::default(),
            published,
            heartbeat,
            attributions,
            keeper: None,
            flight: Flight::default(),
            outcomes: Outcomes::default(),
            kills: Kills::default(),
            ended: Vec::new(),
            watches: BTreeMap::new(),
            small: Arc::default(),
            layouts: LayoutCache::default(),
            containers,
            budget,
            counters: AgentCounters::default(),
            started: now,
            filled_at: now,
            published_at: None,
            cpu: Duration::ZERO,
            next_scan_s: 0.0,
            next_give_back_s: GIVE_BACK_INTERVAL_S,
            processes_on_machine: 0,
            processes_over_limit: 0,
            own_rss_bytes: 0,
            first_round_done: false,
            sequence: 0,
        }
    }

    /// With a history for flight records.
    #[must_use]
    pub fn with_keeper(mut self, keeper: Keeper) -> Self {
        self.keeper = Some(keeper);
        self
    }

    /// Works until it gets the command to stop, or the channel of commands is closed.
    pub fn run(mut self, commands: &Receiver<Command>) {
        self.cpu = thread_cpu();
        loop {
            let wait = self.step();
            self.heartbeat.beat();
            match commands.recv_timeout(wait) {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(Command::Reload(config)) => self.reload(*config),
                Ok(Command::ReloadFailed) => self.counters.reload_errors += 1,
                Ok(Command::Map { identity, reply }) => {
                    let drawn = self.picture(identity);
                    // The requester may have given up.
                    let _ = reply.send(drawn);
                    self.publish();
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Does one piece of work; returns how long to sleep after it.
    fn step(&mut self) -> Duration {
        self.fill();
        let now_s = self.now_s();
        if now_s >= self.next_scan_s {
            self.scan();
            self.charge(Work::Cheap);
            return Duration::ZERO;
        }
        let config = &self.config.census;
        let dues = self.watches.iter().map(|(&identity, watch)| (identity, watch.due_at(now_s, config)));
        match next(dues, now_s, &self.budget) {
            Next::Take(identity, Work::Cheap) if self.is_spared(identity, now_s) => Duration::ZERO,
            Next::Take(identity, work) => {
                self.look(identity, work);
                self.charge(work);
                if self.published_at.is_none_or(|at| at.elapsed() >= PUBLISH_EVERY) {
                    self.publish();
                }
                Duration::ZERO
            }
            Next::Wait(until_s) => {
                self.publish();
                self.charge(Work::Cheap);
                let wait_s = until_s.min(self.next_scan_s) - self.now_s();
                Duration::try_from_secs_f64(wait_s).unwrap_or(SLEEP_MAX).clamp(Duration::from_millis(1), SLEEP_MAX)
            }
        }
    }

    fn now_s(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Whether a cheap census of this process would show nothing new, because it did nothing since the last one. If so, puts it off.
    fn is_spared(&mut self, identity: Identity, now_s: f64) -> bool {
        let config = &self.config.census;
        let Some(watch) = self.watches.get_mut(&identity) else { return true };
        let is_spared = watch.is_quiet() && now_s - watch.looked_s < config.full_interval_s as f64;
        if is_spared {
            watch.due.top_s = now_s + config.top_interval_s as f64;
            self.counters.top_quiet += 1;
        }
        is_spared
    }

    /// Charges the CPU time since the last charge.
    fn charge(&mut self, work: Work) {
        let cpu = thread_cpu();
        let used_s = cpu.saturating_sub(self.cpu).as_secs_f64();
        self.cpu = cpu;
        self.counters.thread_cpu_s += used_s;
        match work {
            Work::Cheap => self.budget.spend_cheap(used_s, CHEAP_S),
            Work::Full | Work::First | Work::Asked => self.budget.spend(work, used_s),
        }
    }

    fn fill(&mut self) {
        let now = Instant::now();
        self.budget.fill(now.saturating_duration_since(self.filled_at).as_secs_f64());
        self.filled_at = now;
    }

    fn reload(&mut self, config: Config) {
        self.rules = rules_of(&config);
        self.budget.set_rate(config.census.budget_ratio());
        self.containers.reload(config.containers.cri.clone());
        self.config = config;
        self.counters.reloads += 1;
        let now_s = self.now_s();
        let (top_s, full_s) = (now_s + self.config.census.top_interval_s as f64, now_s + self.config.census.full_interval_s as f64);
        for watch in self.watches.values_mut() {
            if watch.due.top_s.is_finite() {
                watch.due.top_s = watch.due.top_s.min(top_s);
            }
            watch.due.full_s = watch.due.full_s.map(|due_s| due_s.min(full_s));
        }
        self.next_scan_s = 0.0;
    }

    /// Scans the process list: new processes are due at once, those that ended are dropped.
    fn scan(&mut self) {
        let before = thread_cpu();
        self.counters.scans += 1;
        self.scanner.whatever_size = self.attributions.emitting();
        match self.scanner.scan(&self.rules, self.config.discovery.processes_max, Pid(std::process::id())) {
            Ok(found) => self.follow(found),
            Err(error) => {
                self.counters.scan_errors += 1;
                tracing::warn!("cannot scan /proc: {error}");
            }
        }
        let cost_s = thread_cpu().saturating_sub(before).as_secs_f64();
        let interval_s = self.config.discovery.scan_interval_s as f64;
        self.next_scan_s = self.now_s() + interval_s.max(cost_s / (self.config.census.budget_ratio() * SHARE_MAX));
        // Not part of what a scan costs: it must not make scans rarer.
        if self.now_s() >= self.next_give_back_s {
            give_back();
            self.next_give_back_s = self.now_s() + GIVE_BACK_INTERVAL_S;
        }
        self.own_rss_bytes = own_rss_bytes().unwrap_or(self.own_rss_bytes);
    }

    fn follow(&mut self, found: Scan) {
        self.processes_on_machine = found.processes;
        self.processes_over_limit = found.over_limit;
        self.small = found.small.into();
        let now_s = self.now_s();
        let mut before = std::mem::take(&mut self.watches);
        self.containers.refresh();
        for seen in found.seen {
            let Candidate { identity, comm, uid, rss_bytes, activity } = seen;
            let watch = match before.remove(&identity) {
                Some(mut watch) => {
                    let sample = Arc::make_mut(&mut watch.sample);
                    sample.comm = comm;
                    sample.uid = uid;
                    sample.rss_bytes = rss_bytes;
                    self.containers.name(&mut sample.surroundings);
                    watch.activity = activity;
                    watch
                }
                None => {
                    self.outcomes.started(identity, settings_of(identity.process.pid));
                    let sample = ProcessSample {
                        surroundings: self.containers.of_new(identity.process.pid),
                        ..ProcessSample::new(identity, comm, uid, rss_bytes)
                    };
                    let is_first = self.counters.scans <= 1 || rss_bytes >= self.config.flight.exit_rss_min_mib << 20;
                    let settled_s = if is_first { now_s } else { now_s + SETTLE_ROUNDS * self.config.census.top_interval_s as f64 };
                    Watch::new(sample, activity, now_s, settled_s)
                }
            };
            let mut watch = watch;
            watch.name_workload(&self.config.discovery);
            self.watches.insert(identity, watch);
        }
        self.counters.ended += before.len() as u64;
        let watched = self.watches.iter();
        self.attributions.follow(watched.map(|(identity, watch)| (identity.process, Labels::of(&watch.sample))));
        self.tell_of_ended(before.into_values().map(|watch| watch.sample).collect());
        self.check_outcomes();
        self.look_at_limits();
    }

    /// Says of processes without a census that the budget is used up, while it is.
    fn tell_why_waiting(&mut self) {
        let wait_s = self.budget.wait_s(Work::Cheap);
        let reason = (wait_s >= 1.0).then(|| {
            let percent = self.config.census.budget_ratio() * 100.0;
            format!("its first census waits: the agent has used up its {percent} % of a processor for {}", HumanDuration(wait_s))
        });
        for watch in self.watches.values_mut().filter(|watch| watch.sample.state == WatchState::Waiting) {
            if watch.sample.reason != reason {
                Arc::make_mut(&mut watch.sample).reason.clone_from(&reason);
            }
        }
    }

    fn publish(&mut self) {
        let now_s = self.now_s();
        for (identity, watch) in &mut self.watches {
            // Rounds that wait for a large debt to be paid are skipped now, not when their turn comes.
            watch.leave_out(now_s, &self.config.census).add_to(&mut self.counters);
            let known = self.attributions.of(identity.process);
            if !known.is_same(&watch.sample.attributed) {
                Arc::make_mut(&mut watch.sample).attributed = known;
            }
        }
        self.tell_why_waiting();
        let processes: Vec<Arc<ProcessSample>> = self.watches.values().map(|watch| Arc::clone(&watch.sample)).collect();
        let waiting = processes.iter().any(|one| one.state == WatchState::Waiting);
        self.first_round_done |= self.counters.scans > 0 && !waiting;
        self.sequence += 1;
        self.counters.cri = self.containers.status();
        self.published.store(Snapshot {
            sequence: self.sequence,
            at: Instant::now(),
            wall: SystemTime::now(),
            started: self.started,
            processes,
            small: Arc::clone(&self.small),
            processes_on_machine: self.processes_on_machine,
            processes_over_limit: self.processes_over_limit,
            first_round_done: self.first_round_done,
            own_rss_bytes: self.own_rss_bytes,
            budget_ratio: self.config.census.budget_ratio(),
            memory_max_bytes: self.config.census.memory_max_mib << 20,
            metrics_processes_max: self.config.metrics.series_of_processes(),
            metrics_workload_series_max: self.config.metrics.workload_series_max,
            workload_kills: self.kills.shown(now_s, self.watches.values().map(|watch| &watch.sample.workload)),
            counters: self.counters,
        });
        self.published_at = Some(Instant::now());
    }
}

fn rules_of(config: &Config) -> Rules {
    let passwd = read_bounded("/etc/passwd".as_ref(), SMALL_FILE_BYTES_MAX).unwrap_or_default();
    let rules = Rules::new(&config.discovery, &String::from_utf8_lossy(&passwd));
    for name in &rules.unknown_users {
        tracing::warn!("discovery: there is no user {name:?} on this machine: the name matches no process");
    }
    rules
}

/// The index of a level in [`AgentCounters::censuses`].
#[must_use]
pub fn level_index(level: Level) -> usize {
    match level {
        Level::Top => 0,
        Level::Sampled => 1,
        Level::Full => 2,
    }
}

/// Starts the census thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(collector: Collector, commands: Receiver<Command>) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("fragprof-census".into()).spawn(move || collector.run(&commands))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;
    use crate::process::testing::Cat;

    fn collector(config: Config) -> (Collector, Arc<Published>) {
        let now = Instant::now();
        let published = Arc::new(Published::new(now));
        (Collector::new(config, Arc::clone(&published), Arc::new(Heartbeat::new(now)), Arc::default()), published)
    }

    fn cats_only() -> Config {
        let mut config = Config::default();
        config.discovery.rss_min_mib = 0;
        config.discovery.include = vec!["cat".into()];
        config.census.budget_percent = 100.0;
        config
    }

    fn settle(collector: &mut Collector) {
        while collector.step().is_zero() {}
    }

    #[test]
    fn a_process_gets_a_full_census_and_is_dropped_when_it_ends() {
        let (mut collector, published) = collector(cats_only());
        let mut cat = Cat::start(Path::new("/bin/cat"), None);
        settle(&mut collector);
        let snapshot = published.load();
        assert!(snapshot.first_round_done);
        let sample = snapshot.process(cat.pid().0).unwrap();
        assert_eq!(sample.state, WatchState::Watched);
        assert_eq!(sample.heaps[0].allocator, "glibc");
        assert_eq!(sample.best().unwrap().census.level, Level::Full);
        cat.end();
        collector.next_scan_s = 0.0;
        settle(&mut collector);
        assert!(published.load().process(cat.pid().0).is_none());
        assert!(collector.counters.ended >= 1);
    }

    #[test]
    fn without_budget_no_census_is_taken_and_the_wait_is_bounded() {
        let mut config = cats_only();
        config.census.budget_percent = 0.01;
        config.census.start_credit_ms = 0;
        let (mut collector, published) = collector(config);
        let cat = Cat::start(Path::new("/bin/cat"), None);
        // The scan of /proc comes first and overdraws the account.
        settle(&mut collector);
        let wait = collector.step();
        assert!(wait > Duration::ZERO && wait <= SLEEP_MAX);
        let snapshot = published.load();
        assert_eq!(snapshot.process(cat.pid().0).unwrap().state, WatchState::Waiting);
        assert!(!snapshot.first_round_done);
    }

    #[test]
    fn rounds_skipped_while_a_debt_is_paid_are_counted_once() {
        let mut config = cats_only();
        config.census.budget_percent = 0.01;
        config.census.start_credit_ms = 0;
        let (mut collector, published) = collector(config);
        let cat = Cat::start(Path::new("/bin/cat"), None);
        settle(&mut collector);
        let interval_s = collector.config.census.top_interval_s as f64;
        let watch = collector.watches.values_mut().find(|watch| watch.sample.identity.process.pid == cat.pid()).unwrap();
        watch.due.top_s -= 3.5 * interval_s;
        for _ in 0..2 {
            collector.publish();
            assert_eq!(published.load().counters.top_rounds_skipped, 3);
        }
    }

    #[test]
    fn a_reload_changes_what_is_watched() {
        let (mut collector, published) = collector(cats_only());
        let cat = Cat::start(Path::new("/bin/cat"), None);
        settle(&mut collector);
        assert!(published.load().process(cat.pid().0).is_some());
        let mut config = cats_only();
        config.discovery.exclude = vec!["c?t".into()];
        collector.reload(config);
        settle(&mut collector);
        let left: BTreeSet<_> = published.load().processes.iter().map(|one| one.comm.clone()).collect();
        assert!(!left.contains("cat"), "{left:?}");
    }
}
