//! A watched process with its schedule.

use std::sync::Arc;

use super::super::config::CensusConfig;
use super::super::schedule::{Due, rounds_skipped};
use super::LOOKS_KEPT_MAX;
use crate::census::Level;
use crate::fragmentation::verdict::Looks;
use crate::model::sample::ProcessSample;
use crate::model::seen::Activity;
use crate::model::snapshot::AgentCounters;

/// Rounds of close censuses for which a process that does nothing gives way to others.
const GIVES_WAY_ROUNDS: f64 = 3.0;

/// A watched process.
#[derive(Debug)]
pub(super) struct Watch {
    pub sample: Arc<ProcessSample>,
    pub due: Due,
    /// Chunks found by the last full census.
    pub chunks: Option<u64>,
    /// The last full censuses, in short.
    pub looks: Looks,
    /// What it had done at the last look at the list of processes.
    pub activity: Activity,
    /// Whether a sample of its heap left the verdict open, so that it has to be walked.
    pub sampled_in_vain: bool,
    /// When it was met, in seconds since the agent's start.
    pub met_s: f64,
    /// When its first close census may be taken.
    pub settled_s: f64,
    /// When it was last looked at.
    pub looked_s: f64,
    /// What it had done by then, as far as the list of processes told.
    looked: Option<Activity>,
    /// Whole rounds of what is due that are counted as left out already, of cheap and of close censuses.
    pub left_out: LeftOut,
}

/// Whole rounds that were left out.
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
    /// A process that was just met.
    pub fn new(sample: ProcessSample, activity: Activity, now_s: f64, settled_s: f64) -> Self {
        Self {
            sample: Arc::new(sample),
            due: Due { top_s: now_s, full_s: None, unjudged_bytes: None, gives_way: false },
            chunks: None,
            looks: Looks::new(LOOKS_KEPT_MAX),
            activity,
            sampled_in_vain: false,
            met_s: now_s,
            settled_s,
            looked_s: now_s,
            looked: None,
            left_out: LeftOut::default(),
        }
    }

    /// When it is due, with what decides its place among others.
    pub fn due_at(&self, now_s: f64, config: &CensusConfig) -> Due {
        let sample = &self.sample;
        let is_walked = sample.full.as_ref().is_some_and(|full| full.census.level == Level::Full);
        let waits_s = self.due.full_s.map_or(0.0, |full_s| now_s - full_s);
        Due {
            // What a sample left open takes a walk: after all that a sample may settle.
            unjudged_bytes: sample.verdict.is_none().then_some(if self.sampled_in_vain { 0 } else { sample.rss_bytes }),
            gives_way: is_walked && self.is_quiet() && waits_s < GIVES_WAY_ROUNDS * config.full_interval_s as f64,
            ..self.due
        }
    }

    /// Notes that it was looked at.
    pub fn note_look(&mut self, now_s: f64) {
        (self.looked, self.looked_s) = (Some(self.activity), now_s);
    }

    /// Whether it did nothing that the list of processes shows since it was last looked at.
    pub fn is_quiet(&self) -> bool {
        self.looked == Some(self.activity)
    }

    /// Counts the whole rounds that were left out until now and are not counted yet.
    pub fn leave_out(&mut self, now_s: f64, config: &CensusConfig) -> LeftOut {
        let top = rounds_skipped(self.due.top_s, now_s, config.top_interval_s as f64);
        let full = self.due.full_s.map_or(0, |due_s| rounds_skipped(due_s, now_s, config.full_interval_s as f64));
        let before = std::mem::replace(&mut self.left_out, LeftOut { top, full });
        LeftOut { top: top.saturating_sub(before.top), full: full.saturating_sub(before.full) }
    }

    /// Seconds until a process is looked at again that showed no heap, or could not be read: one that has just begun soon has one.
    pub fn retry_s(&self, now_s: f64, config: &CensusConfig) -> f64 {
        (now_s - self.met_s).max(config.top_interval_s as f64).min(config.full_interval_s as f64)
    }
}
