//! Processes: the list, one of them, its census, its verdict; and the agent itself.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::{ServerState, lock};
use super::history::ask;
use super::{answer, find, object, refuse};
use crate::fragmentation::recorded::against_pinning;
use crate::fragmentation::verdict::{Source, Verdict};
use crate::model::view::{ProcessView, ProcessesView, unix_s};
use crate::store::outcome::workload;
use crate::store::view::TrackRecord;

/// The agent, and what it can answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AgentView {
    /// Its version.
    pub version: String,
    /// Number of the newest snapshot.
    pub sequence: u64,
    /// When that was made, seconds since the Unix epoch.
    pub at_unix_s: f64,
    /// Seconds since the agent started.
    pub uptime_s: f64,
    /// Whether every process found at start has had its first census.
    pub is_ready: bool,
    /// Processes on the machine, without kernel threads and zombies.
    pub processes_on_machine: u64,
    /// Watched processes.
    pub processes_watched: u64,
    /// Processes selected by the rules, but beyond the limit on their number.
    pub processes_over_limit: u64,
    /// Share of one core that the census may use.
    pub budget_ratio: f64,
    /// The agent's own resident bytes.
    pub own_rss_bytes: u64,
    /// Whether `history`, `diff` and past profiles are available.
    pub has_history: bool,
    /// Longest recording that `profile?seconds=` allows, in seconds; null = not allowed here.
    pub profile_seconds_max: Option<u64>,
}

/// `/api/v1/agent`
pub async fn agent(State(state): State<Arc<ServerState>>) -> Response {
    let snapshot = state.published.load();
    object(&AgentView {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        sequence: snapshot.sequence,
        at_unix_s: unix_s(snapshot.wall),
        uptime_s: snapshot.started.elapsed().as_secs_f64(),
        is_ready: snapshot.first_round_done,
        processes_on_machine: snapshot.processes_on_machine as u64,
        processes_watched: snapshot.processes.len() as u64,
        processes_over_limit: snapshot.processes_over_limit as u64,
        budget_ratio: snapshot.budget_ratio,
        own_rss_bytes: snapshot.own_rss_bytes,
        has_history: state.has_history(),
        profile_seconds_max: state.profile_seconds_max(),
    })
}

/// `/api/v1/processes`
pub async fn processes(State(state): State<Arc<ServerState>>) -> Response {
    let governed = state.governed();
    let attribution_unavailable = lock(&governed).unavailable.clone();
    object(&ProcessesView { attribution_unavailable, ..ProcessesView::of(&state.published.load(), Instant::now()) })
}

/// `/api/v1/processes/{pid}`
pub async fn process(State(state): State<Arc<ServerState>>, Path(pid): Path<String>) -> Response {
    answer(find(&state, &pid).map(|found| object(&ProcessView::of(&found, Instant::now()))))
}

/// `/api/v1/processes/{pid}/heap`: the newest full or sampled census, the object of `fragprof census --json`.
pub async fn heap(State(state): State<Arc<ServerState>>, Path(pid): Path<String>) -> Response {
    answer(find(&state, &pid).and_then(|found| {
        let why = found.reason.as_deref().unwrap_or("no census of this process yet");
        let taken = found.best().ok_or_else(|| refuse(StatusCode::NOT_FOUND, why))?;
        Ok(object(&taken.census))
    }))
}

/// A verdict, and what earlier predictions of its remedies were worth.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ExplainView {
    /// The verdict.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Of each remedy that was applied and checked, by its `action`: in this workload, or else in others of the node.
    pub track_record: Vec<TrackRecord>,
}

/// `/api/v1/processes/{pid}/explain`: the object of `fragprof explain --json`.
pub async fn explain(State(state): State<Arc<ServerState>>, Path(pid): Path<String>) -> Response {
    let judged = find(&state, &pid).and_then(|found| {
        let why = found.reason.as_deref().unwrap_or("no full census of this process yet");
        let verdict = found.verdict.as_ref().ok_or_else(|| refuse(StatusCode::NOT_FOUND, why))?;
        let mut verdict = Verdict::clone(verdict);
        for known in found.attributed.all() {
            let meta = &known.profile.meta;
            let words = meta.processes.first().map(|process| meta.source_words(process));
            verdict.sources.extend(words.map(|words| Source::new("stacks", words)));
        }
        if let Some(known) = found.attributed.best().filter(|_| verdict.has_pinned_bytes()) {
            verdict.remedies.extend(against_pinning(&known.profile, found.identity.process.pid.0));
        }
        let view = ProcessView::of(&found, Instant::now());
        Ok((verdict, workload(view.container.as_ref(), &view.comm)))
    });
    let (verdict, workload) = match judged {
        Ok(judged) => judged,
        Err(refusal) => return *refusal,
    };
    // The verdict does not need the history.
    let track_record = ask(&state, move |reader| reader.track_records(&workload)).await.unwrap_or_default();
    let named = |record: &TrackRecord| verdict.remedies.iter().any(|remedy| remedy.action == record.action);
    let track_record = track_record.into_iter().filter(named).collect();
    object(&ExplainView { verdict, track_record })
}
