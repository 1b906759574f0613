//! Exact recordings on request, one at a time, where the configuration allows them.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::http::StatusCode;

use super::ServerState;
use super::api::stacks::Recorded;
use super::api::{Refusal, refuse};
use crate::model::attribution::{Attributed, Rates};
use crate::process::{Process, ProcessId};
use crate::profile::Profile;
use crate::session::report::block_index::BlockIndex;
use crate::session::shared::LazySession;
use crate::session::{Options, Recorder};
use crate::units::Pid;

/// Interval between two checks of the time while a recording runs.
const STEP: Duration = Duration::from_millis(50);

/// Records a process for so many seconds; what is found is what the tier `exact` says of it from then on.
///
/// # Errors
/// 403 where it is not allowed, 400 for too long a time, 409 while another one runs, 422 where the process cannot be recorded.
pub async fn record(state: &ServerState, pid: Pid, seconds: u64) -> Result<Arc<Profile>, Refusal> {
    let most = state.profile_seconds_max().ok_or_else(|| {
        refuse(
            StatusCode::FORBIDDEN,
            "recordings on request are not allowed here: they cost the target (profile.on_demand = true allows them)",
        )
    })?;
    if !(1..=most).contains(&seconds) {
        return Err(refuse(StatusCode::BAD_REQUEST, &format!("seconds is a number from 1 to {most} (profile.seconds_max)")));
    }
    let busy = |_| refuse(StatusCode::CONFLICT, "another recording is running");
    let _alone = state.recording.try_lock().map_err(busy)?;
    let session = Arc::clone(&state.session);
    let recorded = tokio::task::spawn_blocking(move || run(&session, pid, Duration::from_secs(seconds))).await;
    let (process, profile, places) = recorded
        .map_err(|_| refuse(StatusCode::INTERNAL_SERVER_ERROR, "the recording failed"))?
        .map_err(|why| refuse(StatusCode::UNPROCESSABLE_ENTITY, &why))?;
    let rates = Rates::of(&profile);
    let attributed = Attributed {
        profile: Arc::new(profile),
        at: Instant::now(),
        wall: SystemTime::now(),
        blocks: None,
        rates: Some(rates),
        slowdown_ratio_est: None,
    };
    let published = state.attributions.publish(process, attributed);
    let profile = Arc::clone(&published.profile);
    // The picture from before does not show what was allocated meanwhile.
    state.maps.forget(process);
    state.recorded.keep(Recorded { process, profile: Arc::clone(&profile), places, at: published.at, wall: published.wall });
    Ok(profile)
}

fn run(session: &LazySession, pid: Pid, time: Duration) -> Result<(ProcessId, Profile, BlockIndex), String> {
    let process = Process::open(pid).map_err(|error| error.to_string())?.id();
    let session = session.get_for_every_call().map_err(|error| error.to_string())?;
    let mut recorder = Recorder::over(session, Options::default()).map_err(|error| error.to_string())?;
    recorder.watch(pid).map_err(|error| error.to_string())?;
    let deadline = Instant::now() + time;
    while Instant::now() < deadline && recorder.step(STEP.min(deadline.saturating_duration_since(Instant::now()))) {}
    let (profile, mut places) = recorder.finish_with_blocks().map_err(|error| error.to_string())?;
    Ok((process, profile, places.pop().unwrap_or_default()))
}
