//! The files that are not in the cache: which are queued, which no server has, and the thread that fetches them one after the other.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::cache::Cache;
use super::counters::{Counters, count};
use super::fetch::{self, Answer, DebugServer};
use super::{Lookup, Patience};
use crate::process::elf::BuildId;
use crate::symbol::Separate;

/// How long it is remembered that no server has a file.
const NOT_KNOWN_FOR: Duration = Duration::from_secs(600);
/// Most build ids whose state is remembered, about 100 bytes each. Files that are mapped on a node have some hundred.
const IDS_MAX: usize = 8192;
/// Most files that wait to be fetched; further ones are asked for by a later naming.
const QUEUE_MAX: usize = 256;
/// Time between two checks of whether somebody still waits.
const WAIT_STEP: Duration = Duration::from_millis(50);

/// What the symbolizers and the thread share.
#[derive(Debug)]
pub(super) struct Shared {
    pub cache: Cache,
    pub counters: Counters,
    state: Mutex<State>,
    /// Something was queued, fetched, or given up.
    changed: Condvar,
    patience: Option<Patience>,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<BuildId, FileState>,
    queue: VecDeque<BuildId>,
    /// Taken by the thread when it starts.
    servers: Option<Vec<DebugServer>>,
    waited: Duration,
    is_closed: bool,
}

/// What is known of a file that is not in the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FileState {
    /// Queued, or being fetched.
    Queued,
    /// Not asked for before this.
    NotUntil(Instant),
}

impl Shared {
    pub fn new(servers: Vec<DebugServer>, cache: Cache, patience: Option<Patience>) -> Self {
        Self {
            cache,
            counters: Counters::default(),
            state: Mutex::new(State { servers: Some(servers), ..State::default() }),
            changed: Condvar::new(),
            patience,
        }
    }

    /// Has a file fetched that is not in the cache, or says since when it is known that no server has it.
    pub fn fetched(shared: &Arc<Self>, wanted: &Separate) -> Lookup {
        match Self::queue(shared, &wanted.build_id) {
            FileState::NotUntil(at) => Lookup::NotUntil(at),
            FileState::Queued => shared.wait(wanted),
        }
    }

    /// Limits the time for each file, before the thread has started.
    #[cfg(test)]
    pub fn limit_time(&self, time_max: Duration) {
        self.lock().servers.iter_mut().flatten().for_each(|server| server.time_max = time_max);
    }

    /// Ends the thread, after the file that it is fetching.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state of a file that is not in the cache. It is queued if nothing is known of it.
    fn queue(shared: &Arc<Self>, build_id: &BuildId) -> FileState {
        let now = Instant::now();
        let mut state = shared.lock();
        match state.files.get(build_id) {
            Some(&FileState::NotUntil(at)) if at <= now => {}
            Some(&known) => return known,
            None => {}
        }
        if state.files.len() >= IDS_MAX {
            state.files.retain(|_, file| !matches!(file, FileState::NotUntil(at) if *at <= now));
        }
        if state.queue.len() >= QUEUE_MAX || state.files.len() >= IDS_MAX {
            count(&shared.counters.put_off);
            return FileState::NotUntil(now);
        }
        if let Some(servers) = state.servers.take()
            && let Err(error) = start(Arc::clone(shared), servers)
        {
            tracing::error!("cannot start the thread that fetches debug information: {error}");
            state.is_closed = true;
        }
        if state.is_closed {
            return FileState::NotUntil(now + NOT_KNOWN_FOR);
        }
        state.files.insert(build_id.clone(), FileState::Queued);
        state.queue.push_back(build_id.clone());
        count(&shared.counters.waiting);
        shared.changed.notify_all();
        FileState::Queued
    }

    /// Waits for a queued file as long as the command's patience lasts.
    fn wait(&self, wanted: &Separate) -> Lookup {
        let Some(patience) = &self.patience else { return Lookup::NotYet };
        let mut state = self.lock();
        if state.waited >= patience.time_max {
            return Lookup::NotYet;
        }
        (patience.say)(&format!("fetching debug information of {} (build id {})", wanted.of, wanted.build_id));
        let began = Instant::now();
        patience.waits.store(true, Ordering::Relaxed);
        while state.files.get(&wanted.build_id) == Some(&FileState::Queued) && state.waited + began.elapsed() < patience.time_max {
            if !patience.waits.load(Ordering::Relaxed) {
                (patience.say)("not waiting any longer: further files without symbols have no names");
                state.waited = patience.time_max;
                return Lookup::NotYet;
            }
            state = self.changed.wait_timeout(state, WAIT_STEP).unwrap_or_else(PoisonError::into_inner).0;
        }
        patience.waits.store(false, Ordering::Relaxed);
        state.waited += began.elapsed();
        if state.waited >= patience.time_max {
            (patience.say)(&format!("not waiting longer than {} s: further files have no names", patience.time_max.as_secs()));
        }
        match state.files.get(&wanted.build_id) {
            Some(FileState::Queued) => Lookup::NotYet,
            Some(&FileState::NotUntil(at)) => Lookup::NotUntil(at),
            None => {
                drop(state);
                self.cache.find(&wanted.build_id).map_or(Lookup::NotYet, Lookup::Found)
            }
        }
    }

    /// Fetches what is queued, one file after the other, until it is closed.
    fn fetch_all(&self, mut servers: Vec<DebugServer>) {
        loop {
            let mut state = self.lock();
            let build_id = loop {
                if state.is_closed {
                    return;
                }
                match state.queue.pop_front() {
                    Some(build_id) => break build_id,
                    None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(state);
            let file = self.fetch(&build_id, &mut servers);
            let mut state = self.lock();
            match file {
                Some(missing) => drop(state.files.insert(build_id, missing)),
                None => drop(state.files.remove(&build_id)),
            }
            self.counters.waiting.fetch_sub(1, Ordering::Relaxed);
            self.changed.notify_all();
        }
    }

    /// Asks the servers in their order. `None` = the file is in the cache.
    fn fetch(&self, build_id: &BuildId, servers: &mut [DebugServer]) -> Option<FileState> {
        let counters = &self.counters;
        let mut again = NOT_KNOWN_FOR;
        for server in servers {
            if server.rests(Instant::now()) {
                again = fetch::REST;
                continue;
            }
            count(&counters.requests);
            let asked = server.ask(build_id, &self.cache);
            counters.bytes.fetch_add(asked.bytes, Ordering::Relaxed);
            let refused = |why: &str| tracing::warn!("no debug information of build id {build_id} from {}: {why}", server.url());
            match asked.answer {
                Answer::Fetched => {
                    count(&counters.fetched);
                    tracing::info!("fetched debug information of build id {build_id} from {}, {} bytes", server.url(), asked.bytes);
                    return None;
                }
                Answer::NotKnown => count(&counters.not_known),
                Answer::Wrong(why) => {
                    count(&counters.wrong);
                    refused(&format!("the answer is not that file: {why}"));
                }
                Answer::TooLarge(why) => {
                    count(&counters.too_large);
                    refused(&why);
                }
                Answer::Failed(why) => {
                    count(&counters.failed);
                    again = fetch::REST;
                    refused(&why);
                }
            }
        }
        Some(FileState::NotUntil(Instant::now() + again))
    }
}

fn start(shared: Arc<Shared>, servers: Vec<DebugServer>) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("fragprof-debuginfod".into());
    thread.spawn(move || shared.fetch_all(servers)).map(drop)
}
