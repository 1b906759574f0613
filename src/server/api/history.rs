//! The history: the ladder over time, past processes, and what changed between two times.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;

use super::super::ServerState;
use super::query::Span;
use super::{Refusal, answer, object, query, refuse};
use crate::model::view::unix_s;
use crate::profile::glue::leading_frames;
use crate::profile::{Profile, ValueKind, diff as compare};
use crate::sanitize;
use crate::store::StoreError;
use crate::store::read::{Reader, StoredProcess};
use crate::store::view::{DiffView, HistoryView, PastProcesses, StackDiff, StacksDiff};

/// Span without parameters.
const DEFAULT_S: f64 = 3600.0;
/// Points without the parameter.
const POINTS: u64 = 300;
/// Most stacks of a difference.
const STACKS_MAX: usize = 200;

/// Queries the history on a thread that may wait for the disk.
///
/// # Errors
/// 503 if it cannot be read.
pub async fn ask<T: Send + 'static>(
    state: &ServerState,
    question: impl FnOnce(&Reader) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, Refusal> {
    let reader = state.reader.clone().ok_or_else(|| refuse(StatusCode::NOT_FOUND, "this agent does not keep a history"))?;
    let unreadable = |why: String| refuse(StatusCode::SERVICE_UNAVAILABLE, &why);
    let asked = tokio::task::spawn_blocking(move || question(&reader)).await.map_err(|error| unreadable(error.to_string()))?;
    asked.map_err(|error| unreadable(error.to_string()))
}

fn now_unix_s() -> f64 {
    unix_s(SystemTime::now())
}

fn unknown() -> Refusal {
    refuse(StatusCode::NOT_FOUND, "the history has no process with this pid")
}

async fn known(state: &ServerState, pid: u32, start_ticks: Option<u64>) -> Result<StoredProcess, Refusal> {
    // For a running process this is its own past, not that of an earlier process with the same pid.
    let running = state.published.load().process(pid).map(|one| one.identity.process.start_ticks);
    let found = ask(state, move |reader| match reader.find(pid, start_ticks.or(running))? {
        None if start_ticks.is_none() => reader.find(pid, None),
        found => Ok(found),
    });
    found.await?.ok_or_else(unknown)
}

/// `/api/v1/processes/{pid}/history`
pub async fn history(
    State(state): State<Arc<ServerState>>,
    Path(pid): Path<String>,
    span: Result<Query<Span>, QueryRejection>,
) -> Response {
    answer(of_process(&state, &pid, span).await.map(|view| object(&view)))
}

async fn of_process(state: &ServerState, pid: &str, span: Result<Query<Span>, QueryRejection>) -> Result<HistoryView, Refusal> {
    let span = query::checked(span)?;
    let (from, to) = span.bounds(now_unix_s(), DEFAULT_S)?;
    let points = span.points(POINTS)?;
    let found = known(state, query::pid(pid)?, span.start_ticks()).await?;
    ask(state, move |reader| reader.history(&found, from, to, points)).await
}

/// `/api/v1/history`
pub async fn processes(State(state): State<Arc<ServerState>>, span: Result<Query<Span>, QueryRejection>) -> Response {
    answer(of_all(&state, span).await.map(|view| object(&view)))
}

async fn of_all(state: &ServerState, span: Result<Query<Span>, QueryRejection>) -> Result<PastProcesses, Refusal> {
    let (from, to) = query::checked(span)?.bounds(now_unix_s(), DEFAULT_S)?;
    let mut past = ask(state, move |reader| reader.processes(from, to)).await?;
    let snapshot = state.published.load();
    for one in &mut past.processes {
        one.is_running = snapshot.process(one.pid).is_some_and(|found| found.identity.process.start_ticks == one.start_ticks);
    }
    Ok(past)
}

/// Parameters of a difference.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Between {
    from: Option<f64>,
    to: Option<f64>,
    by: Option<String>,
    start_ticks: Option<u64>,
}

/// `/api/v1/processes/{pid}/diff`
pub async fn diff(
    State(state): State<Arc<ServerState>>,
    Path(pid): Path<String>,
    asked: Result<Query<Between>, QueryRejection>,
) -> Response {
    answer(changed(&state, &pid, asked).await.map(|view| object(&view)))
}

async fn changed(state: &ServerState, pid: &str, asked: Result<Query<Between>, QueryRejection>) -> Result<DiffView, Refusal> {
    let asked = query::checked(asked)?;
    let kind = query::by(asked.by.as_deref())?;
    let now = now_unix_s();
    let to = asked.to.map_or(Ok(now), |to| query::time(to, now))?;
    let from = asked.from.map_or(Ok(to - DEFAULT_S), |from| query::time(from, now))?;
    if from > to {
        return Err(refuse(StatusCode::BAD_REQUEST, "from must not be after to"));
    }
    let found = known(state, query::pid(pid)?, asked.start_ticks).await?;
    let view = ask(state, move |reader| difference(reader, &found, from, to, kind)).await?;
    view.ok_or_else(|| refuse(StatusCode::NOT_FOUND, "the history has no sample of this process at or before one of the two times"))
}

/// The difference of a process between two times; for times before its first sample, the first one is used.
///
/// # Errors
/// What the history reports.
pub fn difference(reader: &Reader, found: &StoredProcess, from: f64, to: f64, kind: ValueKind) -> Result<Option<DiffView>, StoreError> {
    let earlier = match reader.at(found, from)? {
        Some(earlier) => Some(earlier),
        None => reader.first(found)?,
    };
    let Some((earlier, later)) = earlier.zip(reader.at(found, to)?) else { return Ok(None) };
    let profiles = reader.profile_at(found, kind, from)?.zip(reader.profile_at(found, kind, to)?);
    let stacks = profiles.filter(|(old, new)| old.1 < new.1).map(|(old, new)| stacks_diff(&old, &new, kind));
    let delta_bytes = earlier.delta(&later);
    Ok(Some(DiffView { pid: found.pid, start_ticks: found.start_ticks, from: earlier, to: later, delta_bytes, stacks }))
}

fn stacks_diff(old: &(Profile, f64), new: &(Profile, f64), kind: ValueKind) -> StacksDiff {
    let diff = compare::compare(&old.0, &new.0, kind);
    let rows = diff.rows.iter().take(STACKS_MAX).map(|row| StackDiff {
        frames: row.frames.iter().map(|frame| sanitize::terminal(&frame.function).into_owned()).collect(),
        title: leading_frames(row.frames.iter().copied()) as u64,
        old: row.old,
        new: row.new,
        delta: i64::try_from(row.delta()).unwrap_or(if row.delta() > 0 { i64::MAX } else { i64::MIN }),
    });
    StacksDiff {
        by: kind.by().unwrap_or_default().to_owned(),
        from_unix_s: old.1,
        to_unix_s: new.1,
        old_total: diff.old_total,
        new_total: diff.new_total,
        stacks_changed: diff.rows.len() as u64,
        stacks: rows.collect(),
    }
}

/// The profile of a process at or before a time.
///
/// # Errors
/// 404 if there is none.
pub async fn profile_at(
    state: &ServerState,
    pid: u32,
    start_ticks: Option<u64>,
    kind: ValueKind,
    at_unix_s: f64,
) -> Result<(Profile, f64), Refusal> {
    let found = known(state, pid, start_ticks).await?;
    let profile = ask(state, move |reader| reader.profile_at(&found, kind, at_unix_s)).await?;
    profile
        .ok_or_else(|| refuse(StatusCode::NOT_FOUND, "the history has no profile of this process with this value, at or before this time"))
}
