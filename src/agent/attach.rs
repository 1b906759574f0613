//! Brings the sampler to running processes that a rule names, one at a time, never if that is not enabled.
//!
//! ```text
//! published samples ─→ choice (rules, age, limit, no emitter) ─→ attach::plan ─→ attach::attach ─→ listener ─→ profiles
//! ```
//!
//! Every attempt is a line in the log, and every call one of the audit. A process is never detached from here: that is its owner's command.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::config::AttachConfig;
use super::worker::{Worker, lock};
use crate::allocator::Allocator;
use crate::attach::{self, AttachRefusal, AttachReport, Settings};
use crate::inject::audit::{By, TARGET};
use crate::model::attribution::Attributions;
use crate::model::counters::AttachSample;
use crate::model::sample::ProcessSample;
use crate::model::snapshot::Published;
use crate::process::{Process, ProcessId};
use crate::sampler::SAMPLES_PER_SECOND_DEFAULT;
use crate::sampler::library::Flavour;
use crate::sanitize::terminal;

/// Time between two rounds.
const STEP: Duration = Duration::from_secs(5);
/// An attempt that was refused for a reason of the moment is repeated in the next round, then after twice the time each, up to the longest.
const RETRY_FIRST: Duration = STEP;
const RETRY_LONGEST: Duration = Duration::from_secs(3600);

/// The sample that the thread writes and `/metrics` reads.
pub type SharedAttach = Arc<Mutex<AttachSample>>;

/// Starts the thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(
    config: AttachConfig,
    published: Arc<Published>,
    board: Arc<Attributions>,
    sample: SharedAttach,
) -> std::io::Result<Worker<AttachConfig>> {
    let attacher = Attacher { config, published, board, sample, known: BTreeMap::new(), emitters: BTreeSet::new() };
    Worker::start("fragprof-attach", move |orders| attacher.run(orders))
}

/// What was done to a process so far.
#[derive(Debug, Clone, Copy)]
struct Known {
    /// When it is examined again; `None` = never.
    next: Option<Instant>,
    /// Its executable files at the last pass, if the sampler is attached.
    files: Option<usize>,
    /// Attempts that were refused since.
    refused: u32,
}

impl Known {
    /// After an attempt.
    fn after(self, done: Result<usize, &AttachRefusal>, now: Instant, again: Duration) -> Self {
        match done {
            Ok(files) => Self { next: Some(now + again), files: Some(files), refused: 0 },
            Err(refusal) if refusal.is_of_the_moment() => {
                let wait = RETRY_FIRST.saturating_mul(1 << self.refused.min(20)).min(RETRY_LONGEST);
                Self { next: Some(now + wait), refused: self.refused + 1, ..self }
            }
            Err(_) => Self { next: None, files: None, ..self },
        }
    }

    fn is_due(self, now: Instant) -> bool {
        self.next.is_some_and(|next| next <= now)
    }
}

struct Attacher {
    config: AttachConfig,
    published: Arc<Published>,
    board: Arc<Attributions>,
    sample: SharedAttach,
    known: BTreeMap<ProcessId, Known>,
    /// Emitters that nobody attached.
    emitters: BTreeSet<ProcessId>,
}

impl Attacher {
    fn run(mut self, orders: &Receiver<AttachConfig>) {
        loop {
            self.step(Instant::now());
            match orders.recv_timeout(STEP) {
                Ok(config) => {
                    self.config = config;
                    // What was refused gets another chance with other settings.
                    self.known.retain(|_, known| known.files.is_some());
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn step(&mut self, now: Instant) {
        let snapshot = self.published.load();
        let lives = |process: &ProcessId| snapshot.processes.iter().any(|one| one.identity.process == *process);
        self.known.retain(|process, _| lives(process));
        self.emitters.retain(lives);
        let emitting = self.board.emitting();
        for one in snapshot.processes.iter().filter(|one| emitting.contains(&one.identity)) {
            if self.config.enabled && self.is_covered(one) {
                self.find_attached(one.identity.process, now);
            }
        }
        let attached = self.known.values().filter(|known| known.files.is_some()).count();
        let has_room = attached < self.config.processes_max;
        let mut over_limit = 0;
        let mut chosen = None;
        for one in snapshot.processes.iter().filter(|_| self.config.enabled) {
            let process = one.identity.process;
            let known = self.known.get(&process).copied();
            let is_new = known.is_none_or(|known| known.files.is_none());
            if !self.is_covered(one) || (is_new && emitting.contains(&one.identity)) || known.is_some_and(|known| !known.is_due(now)) {
                continue;
            }
            if is_new && !has_room {
                over_limit += 1;
            } else if is_new && process.age() < Duration::from_secs(self.config.after_s) {
                // It is examined again in the next round.
            } else if chosen.is_none() {
                chosen = Some(Arc::clone(one));
            }
        }
        drop(snapshot);
        if let Some(one) = chosen {
            self.attach(&one, now);
        }
        let mut sample = lock(&self.sample);
        (sample.enabled, sample.over_limit) = (self.config.enabled, over_limit);
        sample.attached = self.known.values().filter(|known| known.files.is_some()).count();
        sample.aside = self.known.values().filter(|known| known.next.is_none()).count();
    }

    /// An emitter that an agent before this one attached is this one's from now on, and gets another pass.
    fn find_attached(&mut self, process: ProcessId, now: Instant) {
        if self.known.contains_key(&process) || self.emitters.contains(&process) {
            return;
        }
        let opened = Process::open(process.pid).ok().filter(|opened| opened.id() == process);
        let state = opened.and_then(|opened| attach::state(&opened, Flavour::Attached));
        if state.is_some_and(|state| state.words > 0) {
            self.known.insert(process, Known { next: Some(now), files: Some(0), refused: 0 });
        } else {
            self.emitters.insert(process);
        }
    }

    fn is_covered(&self, one: &ProcessSample) -> bool {
        let cgroups: Vec<&str> = one.surroundings.cgroup.as_ref().paths().collect();
        let workloads = one.names_for_rules();
        self.config.rules.iter().any(|rule| rule.covers(&one.comm, &cgroups, &workloads))
    }

    fn attach(&mut self, one: &ProcessSample, now: Instant) {
        let process = one.identity.process;
        let known = self.known.get(&process).copied().unwrap_or(Known { next: Some(now), files: None, refused: 0 });
        let again = Duration::from_secs(self.config.again_s);
        let Some(opened) = Process::open(process.pid).ok().filter(|opened| opened.id() == process) else { return };
        let files = opened.maps().map_or(0, |maps| maps.executable_files().count());
        let is_detached = || attach::state(&opened, Flavour::Attached).is_some_and(|state| state.words == 0);
        if known.files == Some(files) && !is_detached() {
            // Nothing was loaded since.
            self.known.insert(process, Known { next: Some(now + again), ..known });
            return;
        }
        let mut report = AttachReport::of(&opened);
        let done = self.carry_out(&opened, &mut report);
        let name = terminal(&one.comm);
        {
            let mut sample = lock(&self.sample);
            sample.calls += report.calls.len() as u64;
            sample.stopped_s += report.calls.iter().map(|call| call.stopped_s).sum::<f64>();
            sample.interrupted += report.calls.iter().filter(|call| call.interrupted).count() as u64;
            if let Err(refusal) = &done {
                *sample.refused.entry(refusal.name()).or_default() += 1;
            }
        }
        match &done {
            Ok(()) => {
                let words = report.state.map_or(0, |state| state.words);
                tracing::info!("the sampler is attached to {name} (pid {}): {words} words lead to it", process.pid);
                if let Some(allocator) = report.unseen {
                    tracing::warn!("{name} (pid {}): {}", process.pid, attach::unseen_text(allocator));
                }
                self.board.add_emitter(process);
            }
            Err(refusal) => tracing::info!("the sampler is not attached to {name} (pid {}): {refusal}", process.pid),
        }
        // The library is one of the files from now on.
        let files = opened.maps().map_or(files, |maps| maps.executable_files().count());
        self.known.insert(process, known.after(done.as_ref().map(|()| files), now, again));
    }

    fn carry_out(&self, process: &Process, report: &mut AttachReport) -> Result<(), AttachRefusal> {
        let plan = attach::plan(process, Flavour::Attached)?;
        report.unseen = plan.unseen().map(Allocator::name);
        if plan.state(process).is_some_and(|state| state.words == 0 && state.detached > 0) {
            return Err(AttachRefusal::DetachedByOwner);
        }
        let path = attach::place(process, Flavour::Attached, self.config.library.as_deref())?;
        tracing::info!(target: TARGET, "{}", report.audit_line(By::Policy("attach"), "attach-sampler", "begins"));
        let settings = Settings { sample_bytes: self.config.sample_bytes, samples_per_second: SAMPLES_PER_SECOND_DEFAULT, by_site: true };
        let done = attach::attach(process, plan, &path, &settings, report);
        let result = done.as_ref().map_or_else(AttachRefusal::name, |()| "done");
        tracing::info!(target: TARGET, "{}", report.audit_line(By::Policy("attach"), "attach-sampler", result));
        done
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_refusal_of_the_moment_is_repeated_less_and_less_often_and_another_is_final() {
        let now = Instant::now();
        let again = Duration::from_secs(600);
        let mut known = Known { next: Some(now), files: None, refused: 0 };
        let busy = AttachRefusal::Call(crate::inject::Refusal::Stopped);
        let waits: Vec<u64> = (0..12)
            .map(|_| {
                known = known.after(Err(&busy), now, again);
                known.next.unwrap().duration_since(now).as_secs()
            })
            .collect();
        assert_eq!(waits, [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600]);
        let known = known.after(Ok(7), now, again);
        assert!(!known.is_due(now + Duration::from_secs(599)) && known.is_due(now + again));
        assert!(!known.after(Err(&AttachRefusal::Musl), now, again).is_due(now + again * 100));
    }
}
