//! A profile as a flame graph's tree.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::profile::coverage::Coverage;
use crate::profile::tree::{self, Tree};
use crate::profile::{Profile, ValueKind};

/// A profile as a flame graph's tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileView {
    /// Process id.
    pub pid: u32,
    /// The kind of value.
    pub by: String,
    /// `bytes` or `count`.
    pub unit: String,
    /// Tier that measured it: `exact`, `sampled` or `governed`.
    pub mode: String,
    /// The source of its values, in words.
    pub source: String,
    /// When it was finished, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Time it covers.
    pub duration_s: f64,
    /// Share of the live heap, by the last census, that has a stack, in 0..=1; absent without a census.
    pub attributed_ratio: Option<f64>,
    /// The share of the live heap that has a stack, and what may have been missed, in words.
    pub coverage: String,
    /// Sum over all stacks.
    pub total: u64,
    /// Values of the parameter `by` that are available here.
    pub by_measured: Vec<String>,
    /// Records lost and other losses that are not 0, by name.
    pub losses: std::collections::BTreeMap<String, u64>,
    /// Reasons to doubt a value.
    pub doubts: Vec<String>,
    /// What the values do not cover.
    pub limits: Vec<String>,
    /// The tree.
    pub tree: Tree,
}

impl ProfileView {
    /// The tree of a kind.
    #[must_use]
    pub fn of(pid: u32, profile: &Profile, at_unix_s: f64, kind: ValueKind, min_ratio: f64) -> Self {
        let tree = tree::build(profile, kind, min_ratio);
        let meta = &profile.meta;
        let coverage = Coverage::of(profile);
        Self {
            pid,
            by: kind.by().unwrap_or_default().to_owned(),
            unit: kind.unit().to_owned(),
            mode: meta.mode.name().to_owned(),
            source: meta.processes.first().map_or_else(String::new, |process| meta.source_words(process)),
            at_unix_s,
            duration_s: meta.duration_s,
            attributed_ratio: coverage.attributed_ratio(),
            coverage: coverage.words(),
            total: tree.root.total,
            by_measured: meta.kinds.by_names(),
            losses: meta.losses.iter().filter(|loss| loss.value > 0).map(|loss| (loss.name.clone(), loss.value)).collect(),
            doubts: meta.doubts.clone(),
            limits: meta.limits.clone(),
            tree,
        }
    }
}
