//! Profiles by stack: as a tree for flame graphs, as ranked stacks, and as pprof.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::super::ServerState;
use super::{Refusal, answer, find, object, query, refuse};
use crate::model::profile::ProfileView;
use crate::model::view::unix_s;
use crate::profile::{self, Profile};

/// Default of the smallest share of the whole for a node of the tree.
const MIN_RATIO: f64 = 0.0005;

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
    /// The profile in the requested format.
    ///
    /// # Errors
    /// 400 for parameters out of range, 404 if the profile did not measure the value.
    pub fn show(&self, pid: u32, profile: &Profile, at_unix_s: f64) -> Result<Response, Refusal> {
        let kind = query::by(self.by.as_deref())?.best_in(profile.meta.kinds);
        let min_ratio = self.min_ratio.unwrap_or(MIN_RATIO);
        if !(0.0..=1.0).contains(&min_ratio) {
            return Err(refuse(StatusCode::BAD_REQUEST, "min_ratio must be a number from 0 to 1"));
        }
        if self.format.as_deref() != Some("pprof") && !profile.meta.kinds.contains(kind) {
            let why = format!("this value was not measured; available: {}", profile.meta.kinds.by_names().join(", "));
            return Err(refuse(StatusCode::NOT_FOUND, &why));
        }
        match self.format.as_deref() {
            None | Some("tree") => Ok(object(&ProfileView::of(pid, profile, at_unix_s, kind, min_ratio))),
            Some("stacks") => Ok(text("application/json", profile::json::to_string(profile, kind, Some(STACKS_MAX)))),
            Some("folded") => Ok(text("text/plain; charset=utf-8", profile::folded::lines(profile, kind).join("\n") + "\n")),
            Some("pprof") => pprof_of(profile),
            Some(_) => Err(refuse(StatusCode::BAD_REQUEST, "format must be one of tree, stacks, folded, pprof")),
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
    // Read from the board itself: a new recording is there before the process's next sample.
    let attributed = state.attributions.of(found.identity.process);
    let known = attributed.with(kind).or_else(|| attributed.best());
    let known = known.ok_or_else(|| refuse(StatusCode::NOT_FOUND, NO_PROFILE))?;
    asked.show(pid, &known.profile, unix_s(known.wall))
}

const NO_PROFILE: &str = "this process has no profile: no tier that knows stacks watches it (record it with fragprof record -p PID)";

/// Parameters of the scraper's path.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Scraped {
    pid: Option<String>,
    seconds: Option<u64>,
}

/// `/debug/pprof/heap?pid=`: for scrapers that use Go's paths.
pub async fn pprof(State(state): State<Arc<ServerState>>, asked: Result<Query<Scraped>, QueryRejection>) -> Response {
    answer(scraped(&state, asked).await)
}

async fn scraped(state: &ServerState, asked: Result<Query<Scraped>, QueryRejection>) -> Result<Response, Refusal> {
    let asked = query::checked(asked)?;
    let pid = asked.pid.ok_or_else(|| refuse(StatusCode::BAD_REQUEST, "a pid is required: /debug/pprof/heap?pid=PID"))?;
    let found = find(state, &pid)?;
    if let Some(seconds) = asked.seconds {
        let recorded = super::super::on_demand::record(state, found.identity.process.pid, seconds).await?;
        return pprof_of(&recorded);
    }
    let attributed = state.attributions.of(found.identity.process);
    let known = attributed.best().ok_or_else(|| refuse(StatusCode::NOT_FOUND, NO_PROFILE))?;
    pprof_of(&known.profile)
}
