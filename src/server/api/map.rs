//! The map of the address space: the contents of each page, or run of pages, of the heaps.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::Deserialize;
use tokio::sync::oneshot;

use super::super::ServerState;
use super::{Refusal, answer, find, object, query, refuse};
use crate::agent::collect::{Command, MapRefused};
use crate::model::map::{Kept, MapView};
use crate::model::sample::{Identity, ProcessSample};
use crate::process::ProcessId;

/// Most cells in one answer: about 300 KiB of JSON.
const CELLS_MAX: u64 = 16_384;
/// Cells without the parameter.
const CELLS_DEFAULT: u64 = 2048;
/// How long a map is reused instead of taking a new census, so that zooming stays within one map.
const KEEP: Duration = Duration::from_secs(60);
/// Most memory for cached maps.
const KEPT_BYTES_MAX: usize = 48 << 20;
/// Longest wait for the census thread: a census may take 30 s.
const WAIT_MAX: Duration = Duration::from_secs(35);

/// The cached maps, the oldest first.
#[derive(Debug, Default)]
pub struct Maps(Mutex<VecDeque<Kept>>);

impl Maps {
    fn young(&self, identity: Identity) -> Option<Kept> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.at.elapsed() < KEEP);
        kept.iter().find(|one| one.identity == identity).cloned()
    }

    /// Drops the map of a process, so that the next request takes a new one.
    pub(in crate::server) fn forget(&self, process: ProcessId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|one| one.identity.process != process);
    }

    fn keep(&self, new: Kept) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.identity != new.identity);
        kept.push_back(new);
        while kept.len() > 1 && kept.iter().map(|one| one.map.table_bytes()).sum::<usize>() > KEPT_BYTES_MAX {
            kept.pop_front();
        }
    }
}

/// Parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    from: Option<String>,
    to: Option<String>,
    cells: Option<u64>,
}

/// `/api/v1/processes/{pid}/map`
pub async fn map(State(state): State<Arc<ServerState>>, Path(pid): Path<String>, asked: Result<Query<Asked>, QueryRejection>) -> Response {
    answer(view(&state, &pid, asked).await.map(|view| object(&view)))
}

async fn view(state: &ServerState, pid: &str, asked: Result<Query<Asked>, QueryRejection>) -> Result<MapView, Refusal> {
    let asked = query::checked(asked)?;
    let range = query::range(asked.from.as_deref(), asked.to.as_deref())?;
    let cells = asked.cells.unwrap_or(CELLS_DEFAULT);
    if !(1..=CELLS_MAX).contains(&cells) {
        return Err(refuse(StatusCode::BAD_REQUEST, "cells must be a number from 1 to 16384"));
    }
    let found = find(state, pid)?;
    let kept = match state.maps.young(found.identity) {
        Some(kept) => kept,
        None => look(state, &found).await?,
    };
    Ok(MapView::of(&kept, &range, usize::try_from(cells).unwrap_or(1)))
}

/// Requests a map from the census thread, which charges its budget for it.
async fn look(state: &ServerState, found: &ProcessSample) -> Result<Kept, Refusal> {
    let (reply, answer) = oneshot::channel();
    let silent = || refuse(StatusCode::SERVICE_UNAVAILABLE, "the census thread does not answer");
    state.commands.send(Command::Map { identity: found.identity, reply }).map_err(|_| silent())?;
    let looked = tokio::time::timeout(WAIT_MAX, answer).await.map_err(|_| silent())?.map_err(|_| silent())?;
    let map = looked.map_err(|refused| {
        let status = match refused {
            MapRefused::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            MapRefused::TooLarge => StatusCode::UNPROCESSABLE_ENTITY,
            MapRefused::Gone | MapRefused::NoChunks | MapRefused::Failed(_) => StatusCode::NOT_FOUND,
        };
        let mut answer = *refuse(status, &refused.to_string());
        if let MapRefused::Busy { retry_s } = refused {
            answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(retry_s));
        }
        Box::new(answer)
    })?;
    let kept = Kept::now(found.identity, map);
    state.maps.keep(kept.clone());
    Ok(kept)
}
