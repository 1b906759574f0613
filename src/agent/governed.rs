//! The governor's thread: attributes the allocations of the processes that need it most, each within its budget, all within the node's.
//!
//! Under pressure it sheds load in this order, and counts each step: a target's windows (its budget is its own limit); the number of
//! targets, halved if this thread takes more than its share of a core twice in a row; all targets, while the agent is above its memory limit.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use super::config::{BudgetRule, GovernedConfig};
use super::need::{Candidate, choose};
use super::own::{CpuShare, thread_cpu};
use super::rules::glob;
use super::worker::{Worker, lock};
use crate::governor::share::fair;
use crate::model::attribution::{Attributed, Attributions, Rates};
use crate::model::counters::GovernedSample;
use crate::model::sample::{Identity, ProcessSample};
use crate::model::snapshot::{Published, Snapshot};
use crate::profile::Mode;
use crate::session::shared::LazySession;
use crate::session::tier::windows::{Governed, HeapBytes, Options};
use crate::units::Pid;

/// Interval between two selections of targets.
const CHOOSE_EVERY: Duration = Duration::from_secs(10);
/// Interval until the next selection while there are no targets: a node has its first results within ten seconds of the agent's start.
const CHOOSE_AGAIN: Duration = Duration::from_secs(1);
/// Interval between two profiles of each target that are published: symbolizing their stacks takes some ten milliseconds.
const HAND_OVER_EVERY: Duration = Duration::from_secs(30);
/// Time after which a new target's first profile is published. The next ones follow at intervals that double, up to the above: the first
/// windows give only lower bounds, and estimates should not wait for half a minute.
const HAND_OVER_FIRST: Duration = Duration::from_secs(5);
/// Length of a step: the maximum delay until an order is received.
const STEP: Duration = Duration::from_millis(200);
/// Interval between attempts to load the programs after a failure.
const RETRY: Duration = Duration::from_secs(300);
/// Every target is measured at least this often, in seconds of its budget: one short window per minute.
const FLOOR_RATIO: f64 = 0.02 / 60.0;
/// A further target is added while this thread takes less than this fraction of its share.
const MORE_BELOW: f64 = 0.7;
/// Number of selections for which a target that could not be watched is skipped.
const REFUSED_ROUNDS: u32 = 30;

/// The sample that the thread writes and `/metrics` reads.
pub type SharedSample = Arc<Mutex<GovernedSample>>;

/// Starts the thread. `sites_store`: directory that keeps the sites found in C libraries between runs.
///
/// # Errors
/// If the thread cannot be started.
pub fn start(
    config: GovernedConfig,
    memory_max_bytes: u64,
    sites_store: Option<PathBuf>,
    sources: Sources,
    sample: SharedSample,
) -> std::io::Result<Worker<GovernedConfig>> {
    Worker::start("fragprof-governor", move |orders| Attribution::new(config, memory_max_bytes, sites_store, sources, sample).run(orders))
}

/// What the agent's recordings share.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The programs.
    pub session: Arc<LazySession>,
    /// The newest snapshot.
    pub published: Arc<Published>,
    /// Where the results by stack are published.
    pub board: Arc<Attributions>,
}

struct Attribution {
    config: GovernedConfig,
    memory_max_bytes: u64,
    sites_store: Option<PathBuf>,
    sources: Sources,
    sample: SharedSample,
    engine: Option<Governed>,
    tried: Option<Instant>,
    chosen: HashMap<Identity, Chosen>,
    extents: HashMap<Identity, u64>,
    refused: HashMap<Identity, u32>,
    choose_at: Instant,
    targets_max: usize,
    cpu_share: CpuShare,
    /// Whether this thread was above its share the last time that it was known: once may be the cost of attaching, which does not come again.
    was_above: bool,
}

/// A target, and when its profile is published next.
#[derive(Debug)]
struct Chosen {
    pid: Pid,
    hand_over_at: Instant,
    hand_over_after: Duration,
}

impl Chosen {
    fn new(pid: Pid, now: Instant) -> Self {
        Self { pid, hand_over_at: now + HAND_OVER_FIRST, hand_over_after: HAND_OVER_FIRST }
    }

    fn handed_over(&mut self, now: Instant) {
        self.hand_over_at = now + self.hand_over_after;
        self.hand_over_after = (self.hand_over_after * 2).min(HAND_OVER_EVERY);
    }
}

impl Attribution {
    fn new(config: GovernedConfig, memory_max_bytes: u64, sites_store: Option<PathBuf>, sources: Sources, sample: SharedSample) -> Self {
        let targets_max = config.targets_max;
        lock(&sample).enabled = config.enabled;
        Self {
            config,
            memory_max_bytes,
            sites_store,
            sources,
            sample,
            engine: None,
            tried: None,
            chosen: HashMap::new(),
            extents: HashMap::new(),
            refused: HashMap::new(),
            choose_at: Instant::now(),
            targets_max,
            cpu_share: CpuShare::default(),
            was_above: false,
        }
    }

    fn run(mut self, orders: &Receiver<GovernedConfig>) {
        loop {
            let wait = if self.engine.as_ref().is_some_and(|engine| engine.watched().next().is_some()) { Duration::ZERO } else { STEP };
            match orders.recv_timeout(wait) {
                Ok(config) => self.reload(config),
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if !self.config.enabled {
                continue;
            }
            if Instant::now() >= self.choose_at {
                self.choose();
                self.choose_at = Instant::now() + if self.chosen.is_empty() { CHOOSE_AGAIN } else { CHOOSE_EVERY };
            }
            if let Some(engine) = &mut self.engine {
                engine.step(STEP);
            }
            self.hand_over();
            self.tell();
        }
    }

    fn reload(&mut self, config: GovernedConfig) {
        if !config.enabled {
            self.let_all_go();
            self.engine = None;
        }
        self.targets_max = config.targets_max;
        self.config = config;
        // A new order permits a new attempt.
        self.tried = None;
        self.choose_at = Instant::now();
        lock(&self.sample).enabled = self.config.enabled;
    }

    /// Loads the programs once there is a process to watch.
    fn engine(&mut self) -> Option<&mut Governed> {
        if self.engine.is_none() && self.tried.is_none_or(|at| at.elapsed() >= RETRY) {
            self.tried = Some(Instant::now());
            let options = Options {
                budget: self.config.budget_ratio(),
                ring_bytes: Some(self.config.ring_mib << 20),
                own_census: false,
                large_blocks: self.config.large_blocks,
                sites_store: self.sites_store.clone(),
                ..Options::default()
            };
            match self.sources.session.get().and_then(|session| Governed::over(session, options)) {
                Ok(engine) => {
                    // Loading is a one-time cost that does not depend on the number of targets.
                    self.cpu_share.begin_anew();
                    let costs = engine.costs();
                    let mut sample = lock(&self.sample);
                    sample.hit_cost_s = (costs.allocation_ns / 1e9, costs.free_ns / 1e9);
                    sample.unavailable = None;
                    drop(sample);
                    self.engine = Some(engine);
                }
                Err(error) => {
                    let reason = error.to_string();
                    let before = lock(&self.sample).unavailable.replace(reason.clone());
                    // Once only: an agent without the permissions may run for months.
                    if before.as_ref() == Some(&reason) {
                        tracing::debug!("allocations still cannot be attributed to stacks: {reason}");
                    } else {
                        tracing::warn!("allocations are not attributed to stacks, only the census works: {reason} ([governed])");
                    }
                }
            }
        }
        self.engine.as_mut()
    }

    fn choose(&mut self) {
        let snapshot = self.sources.published.load();
        self.shed(&snapshot);
        let candidates = self.candidates(&snapshot);
        lock(&self.sample).candidates = candidates.len();
        let wanted = choose(candidates, self.targets_max);
        if wanted.is_empty() && self.engine.is_none() {
            return;
        }
        let budget = self.config.budget_ratio();
        let gone: Vec<Identity> = self.chosen.keys().filter(|identity| !wanted.contains(identity)).copied().collect();
        for identity in gone {
            self.stop_watching(identity);
        }
        let new: Vec<Identity> = wanted.iter().filter(|identity| !self.chosen.contains_key(identity)).copied().collect();
        for identity in new {
            let Some(engine) = self.engine() else { return };
            let pid = identity.process.pid;
            match engine.watch(pid, budget) {
                Ok(()) => {
                    self.chosen.insert(identity, Chosen::new(pid, Instant::now()));
                }
                Err(error) => {
                    tracing::debug!("process {pid} is not attributed: {error}");
                    lock(&self.sample).refused += 1;
                    self.refused.insert(identity, REFUSED_ROUNDS);
                }
            }
        }
        self.share(&snapshot);
    }

    /// The processes that may be attributed: those with a heap that a census can read.
    fn candidates(&mut self, snapshot: &Snapshot) -> Vec<Candidate> {
        let extent = |one: &ProcessSample| one.heaps.iter().map(|heap| heap.ladder.extent_bytes).fold(0, u64::saturating_add);
        self.refused.retain(|_, rounds| {
            *rounds = rounds.saturating_sub(1);
            *rounds > 0
        });
        // A process with its own emitter gives more information at a lower cost.
        let tells = |one: &ProcessSample| one.attributed.all().any(|known| known.profile.meta.mode == Mode::Sampled);
        let usable = |one: &&Arc<ProcessSample>| !one.heaps.is_empty() && !self.refused.contains_key(&one.identity) && !tells(one);
        let candidates = snapshot.processes.iter().filter(usable).map(|one| Candidate {
            identity: one.identity,
            grown_bytes: self.extents.get(&one.identity).map_or(0, |before| extent(one).saturating_sub(*before)),
            free_bytes: heap_bytes(one).free.unwrap_or(0),
            rss_bytes: one.rss_bytes,
            chosen: self.chosen.contains_key(&one.identity),
        });
        let candidates = candidates.collect();
        self.extents = snapshot.processes.iter().map(|one| (one.identity, extent(one))).collect();
        candidates
    }

    /// Sets budgets according to the rules and the node's limit, and the heaps' free bytes for the accounts of growth.
    fn share(&mut self, snapshot: &Snapshot) {
        let Some(engine) = &mut self.engine else { return };
        let of = |identity: &Identity| snapshot.processes.iter().find(|one| one.identity == *identity);
        let targets: Vec<(Identity, Pid)> = self.chosen.iter().map(|(identity, chosen)| (*identity, chosen.pid)).collect();
        let wanted: Vec<f64> =
            targets.iter().map(|(identity, _)| of(identity).map_or(self.config.budget_ratio(), |one| self.config.budget_of(one))).collect();
        for ((identity, pid), budget) in targets.iter().zip(fair(self.config.node_budget_ratio(), FLOOR_RATIO, &wanted)) {
            engine.set_budget(*pid, budget);
            engine.set_heap(*pid, of(identity).map(|one| heap_bytes(one)).unwrap_or_default());
        }
    }

    fn shed(&mut self, snapshot: &Snapshot) {
        if snapshot.own_rss_bytes > self.memory_max_bytes {
            if !self.chosen.is_empty() {
                lock(&self.sample).shed_memory += 1;
                self.let_all_go();
            }
            self.targets_max = 0;
            return;
        }
        let (share, most) = (self.cpu_share.look(Instant::now(), thread_cpu()), self.config.cpu_percent / 100.0);
        let fewer = (self.chosen.len() / 2).max(1);
        if share.is_some_and(|share| share > most) && fewer < self.targets_max {
            self.cpu_share.begin_anew();
            if std::mem::replace(&mut self.was_above, true) {
                lock(&self.sample).shed_cpu += 1;
                (self.targets_max, self.was_above) = (fewer, false);
            }
            return;
        }
        self.was_above &= share.is_none();
        if self.targets_max < self.config.targets_max && share.is_some_and(|share| share < MORE_BELOW * most) {
            self.targets_max += 1;
        }
    }

    fn stop_watching(&mut self, identity: Identity) {
        let Some(Chosen { pid, .. }) = self.chosen.remove(&identity) else { return };
        let Some(engine) = &mut self.engine else { return };
        if let Some(status) = engine.status().into_iter().find(|status| status.pid == pid) {
            let mut sample = lock(&self.sample);
            for (sum, value) in sample.past.iter_mut().zip([status.windows, status.windows_closed_early, status.windows_lossy]) {
                *sum += value;
            }
        }
        engine.unwatch(pid);
    }

    fn let_all_go(&mut self) {
        for identity in self.chosen.keys().copied().collect::<Vec<_>>() {
            self.stop_watching(identity);
        }
    }

    /// Publishes the results of each target whose turn it is on the board from which everything is shown.
    fn hand_over(&mut self) {
        let Some(engine) = &mut self.engine else { return };
        let now = Instant::now();
        let mut due = self.chosen.iter_mut().filter(|(_, chosen)| chosen.hand_over_at <= now).peekable();
        if due.peek().is_none() {
            return;
        }
        let status = engine.status();
        for (identity, chosen) in due {
            chosen.handed_over(now);
            let pid = chosen.pid;
            let profile = engine.profile(Some(&[pid]));
            // Its windows have not seen anything yet.
            if profile.stacks().is_empty() {
                continue;
            }
            let rates = Rates::of(&profile);
            let attributed = Attributed {
                profile: Arc::new(profile),
                at: Instant::now(),
                wall: SystemTime::now(),
                blocks: None,
                rates: Some(rates),
                slowdown_ratio_est: status.iter().find(|status| status.pid == pid).map(|status| status.slowdown_ratio_est),
            };
            self.sources.board.publish(identity.process, attributed);
        }
    }

    fn tell(&self) {
        let Some(engine) = &self.engine else { return };
        let snapshot = self.sources.published.load();
        let name = |pid: Pid| snapshot.process(pid.0).map_or_else(String::new, |one| one.comm.clone());
        let targets = engine.status().into_iter().map(|status| (name(status.pid), status)).collect();
        let losses = engine.losses();
        let mut sample = lock(&self.sample);
        sample.targets = targets;
        sample.losses = losses;
        sample.cpu_s = thread_cpu().as_secs_f64();
    }
}

/// Free and live bytes of its heaps, if a census has determined them.
fn heap_bytes(one: &ProcessSample) -> HeapBytes {
    let free = one.heaps.iter().filter_map(|heap| Some(heap.ladder.extent_bytes.saturating_sub(heap.ladder.live_bytes?)));
    let live = one.heaps.iter().filter_map(|heap| heap.ladder.live_bytes);
    HeapBytes { free: free.reduce(u64::saturating_add), live: live.reduce(u64::saturating_add) }
}

impl GovernedConfig {
    /// Budget of a process: that of the first rule that matches, otherwise the default.
    fn budget_of(&self, one: &ProcessSample) -> f64 {
        let fits = |rule: &&BudgetRule| {
            rule.command.as_ref().is_none_or(|pattern| glob(pattern, &one.comm))
                && rule.workload.as_ref().is_none_or(|pattern| one.names_for_rules().iter().any(|name| glob(pattern, name)))
        };
        self.overrides.iter().find(fits).map_or(self.budget_ratio(), |rule| rule.budget_percent / 100.0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::process::ProcessId;
    use crate::process::workload::{Kind, Workload};

    #[test]
    fn a_budget_is_given_by_command_or_workload() {
        let process = ProcessId { pid: Pid(7), start_ticks: 1 };
        let mut one = ProcessSample::new(Identity { process, stack: 0 }, "nginx".into(), 0, 0);
        one.workload =
            Arc::new(Workload { namespace: Some("shop".into()), kind: Kind::Deployment, name: "web".into(), ..(*one.workload).clone() });
        let rule = |command: Option<&str>, workload: Option<&str>, budget_percent| BudgetRule {
            command: command.map(str::to_owned),
            workload: workload.map(str::to_owned),
            budget_percent,
        };
        let overrides = vec![rule(Some("ngin?"), Some("other"), 5.0), rule(None, Some("shop/*"), 0.5), rule(Some("nginx"), None, 3.0)];
        let config = GovernedConfig { overrides, ..GovernedConfig::default() };
        assert_eq!(config.budget_of(&one), 0.005);
        let plain = ProcessSample::new(one.identity, "nginx".into(), 0, 0);
        assert_eq!(config.budget_of(&plain), 0.03);
    }
}
