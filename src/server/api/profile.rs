//! Profiles by stack: as a tree for flame graphs, as ranked stacks, and as pprof.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::ServerState;
use super::{Refusal, answer, find, object, query, refuse};
use crate::agent::view::unix_s;
use crate::profile::coverage::Coverage;
use crate::profile::tree::{self, Tree};
use crate::profile::{self, Profile, ValueKind};

/// Smallest share of the whole that a node of the tree has, without the parameter.
const MIN_RATIO: f64 = 0.0005;

/// A profile as a flame graph's tree.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProfileView {
    /// Process id.
    pub pid: u32,
    /// What the values are.
    pub by: String,
    /// `bytes` or `count`.
    pub unit: String,
    /// Tier that measured it: `exact`, `sampled` or `governed`.
    pub mode: String,
    /// Where its values come from, in words.
    pub source: String,
    /// When it was finished, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Time it covers.
    pub duration_s: f64,
    /// Share of the live heap by the last census that a stack owns, in 0..=1; absent where no census could tell.
    pub attributed_ratio: Option<f64>,
    /// What the stacks explain of the live heap, and what may have been missed, in words.
    pub coverage: String,
    /// Sum over all stacks.
    pub total: u64,
    /// Names that the parameter `by` may have here.
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

/// Parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    by: Option<String>,
    format: Option<String>,
    min_ratio: Option<f64>,
    at: Option<f64>,
    seconds: Option<u64>,
    start_ticks: Option<u64>,
}

impl Asked {
    /// The profile in the format asked for.
    ///
    /// # Errors
    /// 400 for parameters out of range, 404 where the profile did not measure it.
    pub fn show(&self, pid: u32, profile: &Profile, at_unix_s: f64) -> Result<Response, Refusal> {
        let kind = query::by(self.by.as_deref())?.best_in(profile.meta.kinds);
        let min_ratio = self.min_ratio.unwrap_or(MIN_RATIO);
        if !(0.0..=1.0).contains(&min_ratio) {
            return Err(refuse(StatusCode::BAD_REQUEST, "min_ratio is a number from 0 to 1"));
        }
        if self.format.as_deref() != Some("pprof") && !profile.meta.kinds.contains(kind) {
            let why = format!("this was not measured; there is: {}", profile.meta.kinds.by_names().join(", "));
            return Err(refuse(StatusCode::NOT_FOUND, &why));
        }
        match self.format.as_deref() {
            None | Some("tree") => Ok(object(&ProfileView::of(pid, profile, at_unix_s, kind, min_ratio))),
            Some("stacks") => Ok(text("application/json", profile::json::to_string(profile, kind, Some(STACKS_MAX)))),
            Some("folded") => Ok(text("text/plain; charset=utf-8", profile::folded::lines(profile, kind).join("\n") + "\n")),
            Some("pprof") => pprof_of(profile),
            Some(_) => Err(refuse(StatusCode::BAD_REQUEST, "format is one of tree, stacks, folded, pprof")),
        }
    }
}

/// Stacks of `format=stacks`.
const STACKS_MAX: usize = 1000;

fn text(kind: &'static str, body: String) -> Response {
    ([(header::CONTENT_TYPE, kind)], body).into_response()
}

fn pprof_of(profile: &Profile) -> Result<Response, Refusal> {
    let mut bytes = Vec::new();
    let written = profile::pprof::write(profile, &mut bytes);
    written.map_err(|failed| refuse(StatusCode::INTERNAL_SERVER_ERROR, &failed.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response())
}

/// `/api/v1/processes/{pid}/profile`
pub async fn profile(
    State(state): State<Arc<ServerState>>,
    Path(pid): Path<String>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Response {
    answer(shown(&state, &pid, asked).await)
}

async fn shown(state: &ServerState, pid: &str, asked: Result<Query<Asked>, QueryRejection>) -> Result<Response, Refusal> {
    let asked = query::checked(asked)?;
    let kind = query::by(asked.by.as_deref())?;
    if let Some(at) = asked.at {
        let now_unix_s = unix_s(SystemTime::now());
        let at_unix_s = query::time(at, now_unix_s)?;
        let (profile, at_unix_s) = super::history::profile_at(state, query::pid(pid)?, asked.start_ticks, kind, at_unix_s).await?;
        return asked.show(query::pid(pid)?, &profile, at_unix_s);
    }
    let found = find(state, pid)?;
    let pid = found.identity.process.pid.0;
    if let Some(seconds) = asked.seconds {
        let profile = super::super::on_demand::record(state, found.identity.process.pid, seconds).await?;
        return asked.show(pid, &profile, unix_s(SystemTime::now()));
    }
    // From the board itself: what was just recorded is there before the next look at the process.
    let attributed = state.attributions.of(found.identity.process);
    let known = attributed.with(kind).or_else(|| attributed.best());
    let known = known.ok_or_else(|| refuse(StatusCode::NOT_FOUND, NO_PROFILE))?;
    asked.show(pid, &known.profile, unix_s(known.wall))
}

const NO_PROFILE: &str = "no stacks of this process are known: no tier that knows stacks watches it (fragprof record -p PID records them)";

/// Parameters of the scraper's path.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scraped {
    pid: Option<String>,
    seconds: Option<u64>,
}

/// `/debug/pprof/heap?pid=`: for scrapers that take Go's paths.
pub async fn pprof(State(state): State<Arc<ServerState>>, asked: Result<Query<Scraped>, QueryRejection>) -> Response {
    answer(scraped(&state, asked).await)
}

async fn scraped(state: &ServerState, asked: Result<Query<Scraped>, QueryRejection>) -> Result<Response, Refusal> {
    let asked = query::checked(asked)?;
    let pid = asked.pid.ok_or_else(|| refuse(StatusCode::BAD_REQUEST, "which process? /debug/pprof/heap?pid=PID"))?;
    let found = find(state, &pid)?;
    if let Some(seconds) = asked.seconds {
        let recorded = super::super::on_demand::record(state, found.identity.process.pid, seconds).await?;
        return pprof_of(&recorded);
    }
    let attributed = state.attributions.of(found.identity.process);
    let known = attributed.best().ok_or_else(|| refuse(StatusCode::NOT_FOUND, NO_PROFILE))?;
    pprof_of(&known.profile)
}
