//! Samples from an agent, or from a collector inside `top`: a thread that polls repeatedly, and continues while the agent is away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::Sample;
use super::embedded::Embedded;
use crate::client::{ClientError, Server};
use crate::model::map::MapView;
use crate::model::profile::ProfileView;
use crate::model::view::ProcessesView;

/// Cells requested for the map: more than a screen has.
const CELLS: usize = 4096;
/// Time between two requests for map and stacks: a map takes a walk of the whole heap.
const MAP_EVERY: Duration = Duration::from_secs(15);
/// How often the thread checks whether to end, and whether another process is open.
const STEP: Duration = Duration::from_millis(50);

/// What to request in addition to the list.
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
    serde_json::from_slice(&body).map_err(|error| format!("{} is not an agent of this version: {error}", server.address().url()))
}

/// The source of samples.
#[derive(Debug)]
pub enum Feed {
    /// An agent.
    Agent(Server),
    /// A collector inside `top`.
    Embedded(Embedded),
}

impl Feed {
    /// Its name, for a title.
    #[must_use]
    pub fn title(&self) -> String {
        match self {
            Self::Agent(server) => server.address().url(),
            Self::Embedded(_) => "this machine".to_owned(),
        }
    }

    /// The processes now.
    ///
    /// # Errors
    /// What went wrong, as text.
    pub fn processes(&self) -> Result<ProcessesView, String> {
        match self {
            Self::Agent(server) => ask(server, "/api/v1/processes"),
            Self::Embedded(embedded) => Ok(embedded.view()),
        }
    }

    fn map(&self, pid: u32) -> Result<MapView, String> {
        match self {
            Self::Agent(server) => ask(server, &format!("/api/v1/processes/{pid}/map?cells={CELLS}")),
            Self::Embedded(embedded) => embedded.map(pid, CELLS),
        }
    }

    /// Stacks; a census knows none.
    fn profile(&self, pid: u32) -> Option<ProfileView> {
        match self {
            Self::Agent(server) => ask(server, &format!("/api/v1/processes/{pid}/profile?by=live&min_ratio=0.01")).ok(),
            Self::Embedded(_) => None,
        }
    }
}

/// Starts the thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(feed: Feed, interval: Duration, wanted: Arc<Wanted>) -> std::io::Result<Receiver<Sample>> {
    let (sender, samples) = sync_channel(1);
    std::thread::Builder::new().name("fragprof-top".into()).spawn(move || run(&feed, interval, &wanted, &sender))?;
    Ok(samples)
}

fn run(feed: &Feed, interval: Duration, wanted: &Wanted, sender: &SyncSender<Sample>) {
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
        match feed.processes() {
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
            (sample.map, sample.map_error) = match feed.map(pid) {
                Ok(map) => (Some(map), None),
                Err(error) => (None, Some(error)),
            };
            sample.profile = feed.profile(pid);
            looked = Some((pid, Instant::now()));
        }
        // A late view misses this sample; a closed view has set `done`.
        let _ = sender.try_send(sample.clone());
    }
}
