//! The API: the sample model as JSON, keys in snake_case ending in the unit. `docs/api/openapi.json`, generated from these types, describes it.

pub mod events;
pub mod history;
pub mod map;
pub mod processes;
pub mod profile;
pub mod query;
pub mod stacks;

use std::sync::Arc;

use axum::http::{StatusCode, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde::Serialize;
use serde_json::json;

use super::ServerState;
use super::openapi;
use crate::model::sample::ProcessSample;

/// A refusal, ready to send. Boxed, because a response is large.
pub type Refusal = Box<Response>;

/// Paths that need the token.
pub fn routes() -> Router<Arc<ServerState>> {
    let without_parameters = Router::new()
        .route("/api/v1/openapi.json", get(openapi::document))
        .route("/api/v1/agent", get(processes::agent))
        .route("/api/v1/processes", get(processes::processes))
        .route("/api/v1/processes/{pid}", get(processes::process))
        .route("/api/v1/processes/{pid}/heap", get(processes::heap))
        .route("/api/v1/processes/{pid}/explain", get(processes::explain))
        .route("/api/v1/events/{id}", get(events::event))
        .layer(from_fn(query::none));
    Router::new()
        .route("/api/v1/processes/{pid}/map", get(map::map))
        .route("/api/v1/processes/{pid}/profile", get(profile::profile))
        .route("/api/v1/processes/{pid}/stacks", get(stacks::stacks))
        .route("/api/v1/processes/{pid}/history", get(history::history))
        .route("/api/v1/processes/{pid}/diff", get(history::diff))
        .route("/api/v1/history", get(history::processes))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/events/{id}/profile", get(events::profile))
        .route("/debug/pprof/heap", get(profile::pprof))
        .merge(without_parameters)
}

/// An error as JSON.
pub fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": message }))).into_response()
}

/// A refusal.
pub fn refuse(status: StatusCode, message: &str) -> Refusal {
    Box::new(error(status, message))
}

/// A value as JSON.
fn object(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(failed) => error(StatusCode::INTERNAL_SERVER_ERROR, &failed.to_string()),
    }
}

/// The answer of a handler that may refuse.
fn answer(done: Result<Response, Refusal>) -> Response {
    done.unwrap_or_else(|refusal| *refusal)
}

/// The watched process for a pid in a path.
fn find(state: &ServerState, pid: &str) -> Result<Arc<ProcessSample>, Refusal> {
    let pid = query::pid(pid)?;
    let found = state.published.load().process(pid).map(Arc::clone);
    found.ok_or_else(|| refuse(StatusCode::NOT_FOUND, "no process with this pid is watched: it has ended, or the rules exclude it"))
}
