//! Gives memory back by policy: one process at a time, only those that a rule names, never if that is not enabled.
//!
//! ```text
//! published samples ─→ policy (rules, thresholds, quiet time, intervals) ─→ trim::plan ─→ trim::carry_out ─→ event, log, metrics
//! ```
//!
//! Every call and every refusal of a call that the policy wanted is a line in the log; calls are flight records too. Nothing that is served
//! over HTTP leads here.

pub mod policy;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::policy::{Candidate, Policy, disappointment};
use super::config::ReclaimConfig;
use super::flight;
use super::outcomes::workload;
use super::worker::{Worker, lock};
use crate::allocator::Allocator;
use crate::census::{LayoutCache, LiveMemory, Pace};
use crate::inject::Ending;
use crate::inject::audit::{By, TARGET};
use crate::model::counters::ReclaimSample;
use crate::model::sample::ProcessSample;
use crate::model::snapshot::Published;
use crate::process::handle::read_bounded;
use crate::process::{Process, ProcessId};
use crate::sanitize::terminal;
use crate::store::Keeper;
use crate::store::keeper::Record;
use crate::store::view::{OutcomeView, TrimView};
use crate::trim::audit;
use crate::trim::{self, Rate, Request, TrimRefusal, TrimReport};
use crate::units::{HumanBytes, ShortDuration};

/// Time between two rounds.
const STEP: Duration = Duration::from_secs(5);
/// `memory.pressure` has two lines.
const PRESSURE_BYTES_MAX: u64 = 4 << 10;

/// The sample that the thread writes and `/metrics` reads.
pub type SharedReclaim = Arc<Mutex<ReclaimSample>>;

/// Starts the thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(
    config: ReclaimConfig,
    published: Arc<Published>,
    keeper: Option<Keeper>,
    sample: SharedReclaim,
) -> std::io::Result<Worker<ReclaimConfig>> {
    let (policy, layouts) = (Policy::default(), LayoutCache::of_malloc());
    let trimmer = Trimmer { config, published, keeper, sample, policy, rate: None, layouts, last_id: 0, in_vain: 0 };
    Worker::start("fragprof-reclaim", move |orders| trimmer.run(orders))
}

struct Trimmer {
    config: ReclaimConfig,
    published: Arc<Published>,
    keeper: Option<Keeper>,
    sample: SharedReclaim,
    policy: Policy,
    rate: Option<Rate>,
    layouts: LayoutCache,
    last_id: u64,
    /// Calls in vain under earlier settings.
    in_vain: u64,
}

impl Trimmer {
    fn run(mut self, orders: &Receiver<ReclaimConfig>) {
        loop {
            self.step();
            match orders.recv_timeout(STEP) {
                Ok(config) => {
                    self.config = config;
                    // What was put aside gets another chance with other settings.
                    self.in_vain += self.policy.in_vain();
                    self.policy = Policy::default();
                }
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    fn step(&mut self) {
        {
            let mut sample = lock(&self.sample);
            (sample.enabled, sample.dry_run, sample.aside) = (self.config.enabled, self.config.dry_run, self.policy.aside());
            sample.in_vain = self.in_vain + self.policy.in_vain();
        }
        if !self.config.enabled {
            return;
        }
        let snapshot = self.published.load();
        let machine = machine_pressure();
        let candidates = snapshot.processes.iter().filter_map(|one| Some((one.identity.process, candidate(one, machine)?)));
        let Some(process) = self.policy.choose(&self.config, Instant::now(), candidates) else { return };
        let Some(one) = snapshot.processes.iter().find(|one| one.identity.process == process).cloned() else { return };
        drop(snapshot);
        self.give_back(process, &one);
    }

    fn give_back(&mut self, process: ProcessId, one: &ProcessSample) {
        let opened = Process::open(process.pid).ok().filter(|opened| opened.id() == process);
        let Some(memory) = opened.and_then(|opened| LiveMemory::open(opened).ok()) else {
            return self.policy.tried(process, Instant::now(), false);
        };
        let mut report = TrimReport::of(memory.process());
        report.dry_run = self.config.dry_run;
        let done = self.carry_out(&memory, &mut report);
        self.policy.tried(process, Instant::now(), done.is_ok());
        let name = terminal(&one.comm);
        if let Err(refusal) = &done {
            report.add_refusal(refusal);
        }
        if !self.config.dry_run && report.call.is_some() {
            tracing::info!(target: TARGET, "{}", audit::after(By::Policy("reclaim"), &report));
        }
        if let Err(refusal) = &done {
            *lock(&self.sample).refused.entry(refusal.name()).or_default() += 1;
            tracing::info!("trim of {name} (pid {}) refused: {refusal}", process.pid);
            return;
        }
        if let (Some(given_back), Some(heap)) = (report.given_back_bytes, one.ladder()) {
            self.policy.gave_back(process, heap.ladder.resident_bytes, given_back);
        }
        let why_aside = self.count(&report);
        let evidence = evidence(&report, why_aside.as_deref());
        tracing::info!("trim of {name} (pid {}): {evidence}", process.pid);
        if let Some(why) = why_aside {
            tracing::warn!("{name} (pid {}) is not trimmed again: {why}", process.pid);
            self.policy.put_aside(process);
        }
        if let Some(keeper) = &self.keeper {
            keeper.record(record(one, &report, evidence, &mut self.last_id));
        }
    }

    fn carry_out(&mut self, memory: &LiveMemory, report: &mut TrimReport) -> Result<(), TrimRefusal> {
        let pace = Pace { pause_per_mib: Duration::from_micros(self.config.pause_per_mib_us), ..Pace::default() };
        let request = Request { stall_max: Duration::from_millis(self.config.max_stall_ms), pace, ..Request::default() };
        let rate = match self.rate {
            Some(rate) => rate,
            None => Rate::measure().map_err(|_| TrimRefusal::NotPredicted)?,
        };
        self.rate = Some(rate);
        let plan = trim::plan(memory, &request, &rate, &mut self.layouts)?;
        report.add_plan(&plan);
        if !self.config.dry_run {
            tracing::info!(target: TARGET, "{}", audit::before(By::Policy("reclaim"), report));
            report.add_outcome(&trim::carry_out(memory, &plan, &request, &mut self.layouts)?);
        }
        Ok(())
    }

    /// Counts a call, or one that would have been made. Returns why the process is left alone from now on.
    fn count(&self, report: &TrimReport) -> Option<String> {
        let predicted = report.predicted_bytes.unwrap_or(0);
        let mut sample = lock(&self.sample);
        if report.dry_run {
            sample.dry_calls += 1;
            sample.dry_predicted_bytes += predicted;
            return None;
        }
        sample.calls += 1;
        sample.predicted_bytes += predicted;
        sample.given_back_bytes += report.given_back_bytes.unwrap_or(0);
        sample.took_s += report.took_s.unwrap_or(0.0);
        sample.predicted_stall_s += report.predicted_stall_s.unwrap_or(0.0);
        sample.interrupted += u64::from(report.interrupted);
        let time = |seconds: Option<f64>| Duration::try_from_secs_f64(seconds.unwrap_or(0.0)).unwrap_or(Duration::MAX);
        let why = match report.ending {
            Some(Ending::Returned) => disappointment(predicted, report.given_back_bytes, time(report.predicted_s), time(report.took_s)),
            _ => Some("the call was not seen to return".to_owned()),
        };
        sample.disappointments += u64::from(why.is_some());
        why
    }
}

/// What the policy needs of a process; `None` if no census has told what a trim would give back.
fn candidate(one: &ProcessSample, machine_percent: f64) -> Option<Candidate<'_>> {
    let heap = one.ladder()?;
    let cgroup = one.surroundings.cgroup.as_ref();
    Some(Candidate {
        comm: &one.comm,
        cgroups: cgroup.paths().collect(),
        workloads: one.names_for_rules(),
        trimmable_bytes: heap.ladder.trimmable_bytes?,
        resident_bytes: heap.ladder.resident_bytes,
        limit_ratio: one.limit_view().map(|limit| limit.used_ratio),
        pressure_percent: cgroup.unified.as_deref().and_then(cgroup_pressure).unwrap_or(machine_percent),
    })
}

fn machine_pressure() -> f64 {
    pressure(Path::new("/proc/pressure/memory")).unwrap_or(0.0)
}

fn cgroup_pressure(path: &str) -> Option<f64> {
    // A path from outside this namespace is not looked up.
    let is_plain = !path.split('/').any(|part| part == "..");
    is_plain.then(|| pressure(&PathBuf::from(format!("/sys/fs/cgroup{path}/memory.pressure")))).flatten()
}

/// The ten-second average of `some` (Documentation/accounting/psi.rst).
fn pressure(path: &Path) -> Option<f64> {
    let text = read_bounded(path, PRESSURE_BYTES_MAX).ok()?;
    parse_pressure(&String::from_utf8_lossy(&text))
}

fn parse_pressure(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split_ascii_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

/// The flight record of a call.
#[must_use]
pub fn record(one: &ProcessSample, report: &TrimReport, evidence: String, last_id: &mut u64) -> Record {
    flight::trimmed(one, evidence, view(report), outcome(one, report), last_id)
}

/// What was done, in words.
#[must_use]
pub fn evidence(report: &TrimReport, why_aside: Option<&str>) -> String {
    let bytes = |bytes: Option<u64>| bytes.map_or("an unknown number of bytes".to_owned(), |bytes| HumanBytes(bytes).to_string());
    let time = |seconds: Option<f64>| seconds.map_or("?".to_owned(), |seconds| ShortDuration(seconds).to_string());
    let call = report.call.as_deref().unwrap_or("?");
    if report.dry_run {
        let (bytes, stall) = (bytes(report.predicted_bytes), time(report.predicted_stall_s));
        return format!("{call} would have given back {bytes}, with threads waiting for up to {stall} (reclaim.dry_run)");
    }
    let mut text = format!(
        "{call} gave back {} (predicted {}) in {} (predicted {}); threads that allocate waited for up to {} by prediction",
        bytes(report.given_back_bytes),
        bytes(report.predicted_bytes),
        time(report.took_s),
        time(report.predicted_s),
        time(report.predicted_stall_s)
    );
    if let Some(why) = why_aside {
        text.push_str(&format!("; it is not trimmed again, because {why}"));
    }
    text
}

/// What the call saved beside what `explain` predicts of it; `None` if that is not known.
fn outcome(one: &ProcessSample, report: &TrimReport) -> Option<OutcomeView> {
    let allocator = Allocator::known().find(|allocator| Some(allocator.name()) == report.allocator)?;
    Some(OutcomeView {
        workload: workload(one),
        action: allocator.row().trim?.action.to_owned(),
        applied: report.call.clone()?,
        predicted_bytes: report.predicted_bytes?,
        at_most: false,
        saved_bytes: i64::try_from(report.given_back_bytes?).unwrap_or(i64::MAX),
        basis: "resident bytes of the heap right before the call and right after it".to_owned(),
    })
}

fn view(report: &TrimReport) -> TrimView {
    TrimView {
        call: report.call.clone().unwrap_or_default(),
        dry_run: report.dry_run,
        predicted_bytes: report.predicted_bytes.unwrap_or(0),
        given_back_bytes: report.given_back_bytes,
        predicted_stall_s: report.predicted_stall_s.unwrap_or(0.0),
        predicted_s: report.predicted_s.unwrap_or(0.0),
        took_s: report.took_s,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_the_ten_second_average_of_some() {
        let text = "some avg10=12.34 avg60=0.50 avg300=0.10 total=123\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=4\n";
        assert_eq!(parse_pressure(text), Some(12.34));
        assert_eq!(parse_pressure("full avg10=1.00\n"), None);
        assert_eq!(cgroup_pressure("/../../etc"), None);
    }

    #[test]
    fn an_event_says_what_was_predicted_and_what_happened() {
        let mut report = TrimReport { call: Some("malloc_trim(0)".into()), predicted_bytes: Some(100 << 20), ..TrimReport::default() };
        report.given_back_bytes = Some(99 << 20);
        (report.took_s, report.predicted_s, report.predicted_stall_s) = (Some(0.02), Some(0.03), Some(0.01));
        let text = evidence(&report, None);
        assert!(text.contains("gave back 99.0 MiB (predicted 100 MiB) in 20 ms (predicted 30 ms)"), "{text}");
        report.dry_run = true;
        assert!(evidence(&report, None).contains("would have given back 100 MiB"));
    }
}
