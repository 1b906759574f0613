//! A watched process with its schedule.

use std::sync::Arc;

use super::super::config::{CensusConfig, DiscoveryConfig};
use super::super::rules::renamed;
use super::super::schedule::{Due, rounds_skipped};
use super::LOOKS_KEPT_MAX;
use crate::census::Level;
use crate::fragmentation::verdict::TrendSamples;
use crate::model::sample::ProcessSample;
use crate::model::seen::Activity;
use crate::model::snapshot::AgentCounters;
use crate::process::workload::environment::{self, Named};

/// Rounds of full censuses for which an idle process gives way to others.
const GIVES_WAY_ROUNDS: f64 = 3.0;

/// A watched process.
#[derive(Debug)]
pub(super) struct Watch {
    pub sample: Arc<ProcessSample>,
    pub due: Due,
    /// Chunks found by the last full census.
    pub chunks: Option<u64>,
    /// Samples of the last full censuses.
    pub looks: TrendSamples,
    /// Its activity at the last scan of the process list.
    pub activity: Activity,
    /// Whether a sample of its heap gave no verdict, so that it must be walked.
    pub sampled_in_vain: bool,
    /// When it was found, in seconds since the agent's start.
    pub met_s: f64,
    /// Earliest time of its first full or sampled census.
    pub settled_s: f64,
    /// Time of its last census.
    pub looked_s: f64,
    /// What its environment names, if that was read.
    environment: Option<Named>,
    /// Its activity by then, from the process list.
    looked: Option<Activity>,
    /// Skipped rounds that are counted already, of cheap and of full censuses.
    pub left_out: LeftOut,
}

/// Skipped rounds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LeftOut {
    pub top: u64,
    pub full: u64,
}

impl LeftOut {
    pub fn add_to(self, counters: &mut AgentCounters) {
        counters.top_rounds_skipped += self.top;
        counters.full_rounds_skipped += self.full;
    }
}

impl Watch {
    /// A newly found process.
    pub fn new(sample: ProcessSample, activity: Activity, now_s: f64, settled_s: f64) -> Self {
        Self {
            sample: Arc::new(sample),
            due: Due { top_s: now_s, full_s: None, unjudged_bytes: None, gives_way: false },
            chunks: None,
            looks: TrendSamples::new(LOOKS_KEPT_MAX),
            activity,
            sampled_in_vain: false,
            met_s: now_s,
            settled_s,
            looked_s: now_s,
            environment: None,
            looked: None,
            left_out: LeftOut::default(),
        }
    }

    /// Names what it belongs to. Its environment is read once, if it may be read.
    pub fn name_workload(&mut self, config: &DiscoveryConfig) {
        let process = self.sample.identity.process;
        self.environment = match (config.read_environment, self.environment.take()) {
            (false, _) => None,
            (true, Some(named)) => Some(named),
            (true, None) => Some(environment::of_process(process.pid)),
        };
        let found = self.sample.found_workload(self.environment.as_ref());
        let named = renamed(&config.workloads, &self.sample, found);
        if named != *self.sample.workload {
            Arc::make_mut(&mut self.sample).workload = Arc::new(named);
        }
    }

    /// When it is due, and its priority.
    pub fn due_at(&self, now_s: f64, config: &CensusConfig) -> Due {
        let sample = &self.sample;
        let is_walked = sample.full.as_ref().is_some_and(|full| full.census.level == Level::Full);
        let waits_s = self.due.full_s.map_or(0.0, |full_s| now_s - full_s);
        Due {
            // A heap whose sample gave no verdict needs a walk: after all those for which a sample may be enough.
            unjudged_bytes: sample.verdict.is_none().then_some(if self.sampled_in_vain { 0 } else { sample.rss_bytes }),
            gives_way: is_walked && self.is_quiet() && waits_s < GIVES_WAY_ROUNDS * config.full_interval_s as f64,
            ..self.due
        }
    }

    /// Notes that a census was taken.
    pub fn note_look(&mut self, now_s: f64) {
        (self.looked, self.looked_s) = (Some(self.activity), now_s);
    }

    /// Whether the process list shows no activity since its last census.
    pub fn is_quiet(&self) -> bool {
        self.looked == Some(self.activity)
    }

    /// Counts the rounds skipped until now that are not counted yet.
    pub fn leave_out(&mut self, now_s: f64, config: &CensusConfig) -> LeftOut {
        let top = rounds_skipped(self.due.top_s, now_s, config.top_interval_s as f64);
        let full = self.due.full_s.map_or(0, |due_s| rounds_skipped(due_s, now_s, config.full_interval_s as f64));
        let before = std::mem::replace(&mut self.left_out, LeftOut { top, full });
        LeftOut { top: top.saturating_sub(before.top), full: full.saturating_sub(before.full) }
    }

    /// Seconds until the next census of a process that had no heap, or could not be read: one that has just started soon has one.
    pub fn retry_s(&self, now_s: f64, config: &CensusConfig) -> f64 {
        (now_s - self.met_s).max(config.top_interval_s as f64).min(config.full_interval_s as f64)
    }
}
