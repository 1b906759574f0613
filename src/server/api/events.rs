//! Flight records: the last state of processes that were killed, came near their limit, or ended.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;

use super::super::ServerState;
use super::history::ask;
use super::{Refusal, answer, object, profile, query, refuse};
use crate::model::view::unix_s;
use crate::store::keeper::Record;
use crate::store::view::{EventView, EventsView};

/// Events without the parameter.
const LIMIT: u64 = 50;
/// Most events in one answer, of a few KiB each.
const LIMIT_MAX: u64 = 500;
/// Span without parameters: a week.
const DEFAULT_S: f64 = 7.0 * 86400.0;

/// Parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    from: Option<f64>,
    to: Option<f64>,
    limit: Option<u64>,
    pid: Option<u32>,
}

/// `/api/v1/events`
pub async fn events(State(state): State<Arc<ServerState>>, asked: Result<Query<Asked>, QueryRejection>) -> Response {
    answer(list(&state, asked).await.map(|view| object(&view)))
}

async fn list(state: &ServerState, asked: Result<Query<Asked>, QueryRejection>) -> Result<EventsView, Refusal> {
    let asked = query::checked(asked)?;
    let limit = asked.limit.unwrap_or(LIMIT);
    if !(1..=LIMIT_MAX).contains(&limit) {
        return Err(refuse(StatusCode::BAD_REQUEST, "limit must be a number from 1 to 500"));
    }
    let now = unix_s(SystemTime::now());
    // Events that occur during this request are included.
    let to = asked.to.map_or(Ok(now + 1.0), |to| query::time(to, now))?;
    let from = asked.from.map_or(Ok(to - DEFAULT_S), |from| query::time(from, now))?;
    let of = |event: &EventView| asked.pid.is_none_or(|pid| event.process.pid == pid) && (from..=to).contains(&event.at_unix_s);
    // The newest are in memory even if the disk cannot be read.
    let mut view = ask(state, move |reader| reader.events(from, to, LIMIT_MAX, None)).await.unwrap_or_default();
    view.events.retain(of);
    for Record { event, .. } in state.recent().into_iter().filter(|record| of(&record.event)) {
        if !view.events.iter().any(|known| known.id == event.id) {
            view.events.push(event);
        }
    }
    view.events.sort_by_key(|event| std::cmp::Reverse(event.id));
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    view.events_left_out += view.events.len().saturating_sub(limit) as u64;
    view.events.truncate(limit);
    Ok(view)
}

fn id(text: &str) -> Result<u64, Refusal> {
    text.parse().map_err(|_| refuse(StatusCode::BAD_REQUEST, "an event's id must be a number"))
}

fn unknown() -> Refusal {
    refuse(StatusCode::NOT_FOUND, "there is no event with this id")
}

/// `/api/v1/events/{id}`
pub async fn event(State(state): State<Arc<ServerState>>, Path(text): Path<String>) -> Response {
    answer(one(&state, &text).await.map(|event| object(&event)))
}

async fn one(state: &ServerState, text: &str) -> Result<EventView, Refusal> {
    let id = id(text)?;
    if let Some(record) = state.recent().into_iter().find(|record| record.event.id == id) {
        return Ok(record.event);
    }
    ask(state, move |reader| reader.event(id)).await?.ok_or_else(unknown)
}

/// `/api/v1/events/{id}/profile`
pub async fn profile(
    State(state): State<Arc<ServerState>>,
    Path(text): Path<String>,
    asked: Result<Query<profile::Asked>, QueryRejection>,
) -> Response {
    answer(shown(&state, &text, asked).await)
}

async fn shown(state: &ServerState, text: &str, asked: Result<Query<profile::Asked>, QueryRejection>) -> Result<Response, Refusal> {
    let asked = query::checked(asked)?;
    let event = one(state, text).await?;
    let none = || refuse(StatusCode::NOT_FOUND, "there was no profile of the process at the time of this event");
    let recent = state.recent().into_iter().find(|record| record.event.id == event.id).and_then(|record| record.profile);
    if let Some(profile) = recent {
        return asked.show(event.process.pid, &profile, event.at_unix_s);
    }
    let profile = ask(state, move |reader| reader.event_profile(event.id)).await?.ok_or_else(none)?;
    asked.show(event.process.pid, &profile, event.at_unix_s)
}
