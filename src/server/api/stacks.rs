//! The stacks of the blocks in a range of addresses, from the newest exact recording on request.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::ServerState;
use super::{Refusal, answer, find, object, query, refuse};
use crate::model::view::unix_s;
use crate::process::ProcessId;
use crate::profile::Profile;
use crate::profile::glue::leading_frames;
use crate::sanitize;
use crate::session::report::block_index::BlockIndex;

/// Recordings whose blocks are kept: at most about 24 MiB each.
const RECORDINGS_MAX: usize = 2;
/// Most stacks in one answer.
const TOP_MAX: usize = 200;
/// Stacks without the parameter.
const TOP_DEFAULT: usize = 10;

/// The stacks with blocks in a range of addresses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RangeView {
    /// Process id.
    pub pid: u32,
    /// End of the recording, seconds since the Unix epoch: the blocks are those that were live then.
    pub at_unix_s: f64,
    /// Length of the recording: blocks allocated before it are not included.
    pub duration_s: f64,
    /// First address, in hexadecimal with 0x.
    pub from: String,
    /// First address after the range, in hexadecimal with 0x.
    pub to: String,
    /// Requested bytes within the range, of recorded blocks.
    pub live_bytes: u64,
    /// Number of these blocks.
    pub live_allocations: u64,
    /// Their stacks, those with the most bytes first.
    pub stacks: Vec<RangeStack>,
    /// Number of stacks left out.
    pub stacks_left_out: u64,
    /// Blocks of the whole process whose addresses were not kept, because there were too many.
    pub allocations_left_out: u64,
}

/// One stack's share of a range.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RangeStack {
    /// Functions, leaf first.
    pub frames: Vec<String>,
    /// Index in `frames` of the first function outside the allocator and library allocation code: the title of the stack.
    pub title: u64,
    /// Bytes of its blocks in the range.
    pub live_bytes: u64,
    /// Its blocks in the range.
    pub live_allocations: u64,
}

/// A recording with the addresses of its blocks.
#[derive(Debug)]
pub struct Recorded {
    /// The process.
    pub process: ProcessId,
    /// The profile.
    pub profile: Arc<Profile>,
    /// The blocks.
    pub places: BlockIndex,
    /// When it ended.
    pub at: Instant,
    /// The same by the wall clock.
    pub wall: SystemTime,
}

/// The recordings kept, the oldest first.
#[derive(Debug, Default)]
pub struct RecordedBlocks(Mutex<VecDeque<Arc<Recorded>>>);

impl RecordedBlocks {
    /// Keeps one, replacing the process's previous one.
    pub fn keep(&self, new: Recorded) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.retain(|one| one.process != new.process);
        kept.push_back(Arc::new(new));
        while kept.len() > RECORDINGS_MAX {
            kept.pop_front();
        }
    }

    fn of(&self, process: ProcessId) -> Option<Arc<Recorded>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().find(|one| one.process == process).cloned()
    }
}

/// Parameters.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Asked {
    from: Option<String>,
    to: Option<String>,
    top: Option<u64>,
}

/// `/api/v1/processes/{pid}/stacks`
pub async fn stacks(
    State(state): State<Arc<ServerState>>,
    Path(pid): Path<String>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Response {
    answer(view(&state, &pid, asked).map(|view| object(&view)))
}

fn view(state: &ServerState, pid: &str, asked: Result<Query<Asked>, QueryRejection>) -> Result<RangeView, Refusal> {
    let asked = query::checked(asked)?;
    let range = query::range(asked.from.as_deref(), asked.to.as_deref())?;
    let top = usize::try_from(asked.top.unwrap_or(TOP_DEFAULT as u64)).unwrap_or(usize::MAX);
    if !(1..=TOP_MAX).contains(&top) {
        return Err(refuse(StatusCode::BAD_REQUEST, "top must be a number from 1 to 200"));
    }
    let found = find(state, pid)?;
    let none = "there is no exact recording of this process, which is needed to know the stack of a block (profile?seconds=)";
    let recorded = state.recorded.of(found.identity.process).ok_or_else(|| refuse(StatusCode::NOT_FOUND, none))?;
    let shares = recorded.places.within(&range);
    let sum = |value: fn(&crate::session::report::block_index::Share) -> u64| shares.iter().map(value).fold(0, u64::saturating_add);
    let name = |id: &crate::profile::FrameId| sanitize::terminal(&recorded.profile.frame(*id).function).into_owned();
    let stack = |share: &crate::session::report::block_index::Share| RangeStack {
        frames: share.frames.iter().map(name).collect(),
        title: leading_frames(share.frames.iter().map(|id| recorded.profile.frame(*id))) as u64,
        live_bytes: share.live_bytes,
        live_allocations: share.live_allocations,
    };
    Ok(RangeView {
        pid: found.identity.process.pid.0,
        at_unix_s: unix_s(recorded.wall),
        duration_s: recorded.profile.meta.duration_s,
        from: format!("{:#x}", range.start),
        to: format!("{:#x}", range.end),
        live_bytes: sum(|share| share.live_bytes),
        live_allocations: sum(|share| share.live_allocations),
        stacks: shares.iter().take(top).map(stack).collect(),
        stacks_left_out: shares.len().saturating_sub(top) as u64,
        allocations_left_out: recorded.places.left_out,
    })
}
