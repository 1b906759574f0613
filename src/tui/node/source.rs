//! Samples from an agent: a thread that asks again and again, and goes on when the agent is away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::Sample;
use crate::agent::view::ProcessesView;
use crate::client::{ClientError, Server};

/// Cells of the map asked for: more than a screen has.
const CELLS: u32 = 4096;
/// Time between two questions for map and stacks: the agent looks at the whole heap for a map.
const MAP_EVERY: Duration = Duration::from_secs(15);
/// How often the thread looks whether it is to end, or another process is open.
const STEP: Duration = Duration::from_millis(50);

/// What is asked for besides the list.
#[derive(Debug, Default)]
pub struct Wanted {
    /// Pid of the process that is open; 0 = none.
    pub pid: AtomicU32,
    /// To end.
    pub done: AtomicBool,
}

fn ask<T: DeserializeOwned>(server: &Server, path: &str) -> Result<T, String> {
    let body = server.get(path).map_err(|error| match error {
        ClientError::Status { message, .. } => {
            let object: Option<serde_json::Value> = serde_json::from_str(&message).ok();
            object.and_then(|object| Some(object.get("error")?.as_str()?.to_owned())).unwrap_or(message)
        }
        error => error.to_string(),
    })?;
    serde_json::from_slice(&body).map_err(|error| format!("{} is no agent of this version: {error}", server.address()))
}

/// The agent's processes now.
///
/// # Errors
/// What went wrong, in words.
pub fn once(server: &Server) -> Result<ProcessesView, String> {
    ask(server, "/api/v1/processes")
}

/// Starts the thread.
///
/// # Errors
/// If the system gives no thread.
pub fn start(server: Server, interval: Duration, wanted: Arc<Wanted>) -> std::io::Result<Receiver<Sample>> {
    let (sender, samples) = sync_channel(1);
    std::thread::Builder::new().name("fragprof-top".into()).spawn(move || run(&server, interval, &wanted, &sender))?;
    Ok(samples)
}

fn run(server: &Server, interval: Duration, wanted: &Wanted, sender: &SyncSender<Sample>) {
    let mut sample = Sample::default();
    let mut looked: Option<(u32, Instant)> = None;
    let mut due = Instant::now();
    while !wanted.done.load(Ordering::Relaxed) {
        let pid = wanted.pid.load(Ordering::Relaxed);
        let is_new = pid != looked.map_or(0, |(pid, _)| pid);
        if Instant::now() < due && !is_new {
            std::thread::sleep(STEP);
            continue;
        }
        due = Instant::now() + interval;
        match once(server) {
            Ok(view) => {
                sample.view = view;
                sample.error = None;
            }
            Err(error) => sample.error = Some(error),
        }
        if pid == 0 {
            (sample.map, sample.map_error, sample.profile) = (None, None, None);
            looked = None;
        } else if is_new || looked.is_some_and(|(_, at)| at.elapsed() >= MAP_EVERY) {
            let path = format!("/api/v1/processes/{pid}");
            let map = ask(server, &format!("{path}/map?cells={CELLS}"));
            (sample.map, sample.map_error) = match map {
                Ok(map) => (Some(map), None),
                Err(error) => (None, Some(error)),
            };
            sample.profile = ask(server, &format!("{path}/profile?by=live&min_ratio=0.01")).ok();
            looked = Some((pid, Instant::now()));
        }
        // A view that is late misses this one; a view that is gone has set `done`.
        let _ = sender.try_send(sample.clone());
    }
}
