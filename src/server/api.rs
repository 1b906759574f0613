//! The API: the sample model as JSON, keys in snake_case with the unit last.

use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

use super::ServerState;
use crate::agent::sample::{HeapSample, ProcessSample, TimedCensus};

/// Paths below `/api`.
pub fn routes() -> Router<Arc<ServerState>> {
    Router::new()
        .route("/api/v1/processes", get(processes))
        .route("/api/v1/processes/{pid}", get(process))
        .route("/api/v1/processes/{pid}/heap", get(heap))
}

/// An error as JSON.
pub fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": message }))).into_response()
}

async fn processes(State(state): State<Arc<ServerState>>) -> Response {
    let snapshot = state.published.load();
    let now = Instant::now();
    let list: Vec<Value> = snapshot.processes.iter().map(|one| object(one, now)).collect();
    Json(json!({
        "sequence": snapshot.sequence,
        "age_s": now.saturating_duration_since(snapshot.at).as_secs_f64(),
        "processes_over_limit": snapshot.processes_over_limit,
        "processes": list,
    }))
    .into_response()
}

async fn process(State(state): State<Arc<ServerState>>, Path(pid): Path<String>) -> Response {
    match find(&state, &pid) {
        Ok(found) => Json(object(&found, Instant::now())).into_response(),
        Err(answer) => *answer,
    }
}

async fn heap(State(state): State<Arc<ServerState>>, Path(pid): Path<String>) -> Response {
    let found = match find(&state, &pid) {
        Ok(found) => found,
        Err(answer) => return *answer,
    };
    let Some(taken) = found.best() else {
        let why = found.reason.as_deref().unwrap_or("no census of this process yet");
        return error(StatusCode::NOT_FOUND, why);
    };
    match serde_json::to_vec(&taken.census) {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(failed) => error(StatusCode::INTERNAL_SERVER_ERROR, &failed.to_string()),
    }
}

fn find(state: &ServerState, pid: &str) -> Result<Arc<ProcessSample>, Box<Response>> {
    let Ok(pid) = pid.parse::<u32>() else { return Err(Box::new(error(StatusCode::BAD_REQUEST, "a pid is a number"))) };
    let found = state.published.load().process(pid).map(Arc::clone);
    found
        .ok_or_else(|| Box::new(error(StatusCode::NOT_FOUND, "no process of this pid is watched: it has ended, or the rules leave it out")))
}

fn object(one: &ProcessSample, now: Instant) -> Value {
    let sum = |figure: fn(&HeapSample) -> Option<u64>| one.heaps.iter().map(figure).reduce(|a, b| Some(a?.saturating_add(b?))).flatten();
    let sentence = one.surroundings.sentence(sum(|heap| heap.live_bytes), sum(|heap| heap.trimmable_bytes));
    let censuses: Vec<Value> = [&one.top, &one.full].into_iter().flatten().map(|taken| census(taken, now)).collect();
    json!({
        "pid": one.identity.process.pid,
        "start_ticks": one.identity.process.start_ticks,
        "comm": one.comm,
        "uid": one.uid,
        "state": one.state,
        "reason": one.reason,
        "rss_bytes": one.rss_bytes,
        "container": one.surroundings.container.as_deref(),
        "cgroup_memory": one.surroundings.memory,
        "cgroup_memory_sentence": sentence,
        "heaps": one.heaps,
        "not_malloc": one.best().map(|taken| &taken.census.not_malloc),
        "censuses": censuses,
    })
}

fn census(taken: &TimedCensus, now: Instant) -> Value {
    json!({
        "level": taken.census.level,
        "age_s": taken.age_s(now),
        "at_unix_s": taken.wall.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
        "cpu_ms": taken.cpu.as_secs_f64() * 1e3,
        "walk": taken.census.walk,
    })
}
