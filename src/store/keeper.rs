//! The thread that writes the history: stores samples from the newest snapshot and events, thins, and counts failures.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use super::clock::AgeClock;
use super::database::StoreError;
use super::thin::{Limits, end_of_samples, size_bytes, thin};
use super::view::EventView;
use super::write::Writer;
use crate::model::snapshot::{Published, Snapshot};
use crate::model::view::{ProcessView, unix_s};
use crate::process::ProcessId;
use crate::profile::Profile;

/// Most events waiting for the disk; further ones are counted, and are in the log but not in the history.
const EVENTS_WAITING: usize = 64;
/// Events kept in memory, so that they are available even if the disk is full: a few KiB each, and a profile.
const EVENTS_RECENT: usize = 64;
/// Time between two rounds of thinning, unless the size requires one earlier.
const THIN_EVERY: Duration = Duration::from_secs(600);

/// Settings of the history.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Time between two samples of a process.
    pub sample_interval: Duration,
    /// Time between two profiles of a process and tier.
    pub profile_interval: Duration,
    /// Age and size.
    pub limits: Limits,
}

/// The keeper's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeeperCounters {
    /// Samples written, one per process and time.
    pub samples: u64,
    /// Profiles written.
    pub profiles: u64,
    /// Events written.
    pub events: u64,
    /// Events that were not written to disk: too many at once, or a failure.
    pub events_lost: u64,
    /// Failed writes, for lack of space or other reasons.
    pub write_errors: u64,
    /// Samples that a later one of the same step replaced.
    pub merged: u64,
    /// Rows beyond the age limit.
    pub aged: u64,
    /// Rows removed for lack of space.
    pub dropped: u64,
    /// Bytes in use.
    pub size_bytes: u64,
    /// The limit of them.
    pub size_bytes_max: u64,
    /// Damaged files that were renamed and replaced by a new history.
    pub set_aside: u64,
    /// Whether the last write failed.
    pub is_failing: bool,
    /// Whether history outlives the agent.
    pub is_on_disk: bool,
}

/// An event with its profile.
#[derive(Debug, Clone)]
pub struct Record {
    /// What happened.
    pub event: EventView,
    /// The last complete profile.
    pub profile: Option<Arc<Profile>>,
}

enum Message {
    Record(Box<Record>),
    Stop,
}

#[derive(Debug, Default)]
struct Shared {
    counters: Mutex<KeeperCounters>,
    recent: Mutex<VecDeque<Record>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle on the thread.
#[derive(Debug, Clone)]
pub struct Keeper {
    messages: SyncSender<Message>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if matches!(self, Self::Stop) { "Stop" } else { "Record" })
    }
}

impl Keeper {
    /// Starts the thread `fragprof-store`.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(writer: Writer, published: Arc<Published>, settings: Settings) -> io::Result<(Self, JoinHandle<()>)> {
        let (messages, inbox) = sync_channel(EVENTS_WAITING);
        let shared = Arc::new(Shared::default());
        lock(&shared.counters).size_bytes_max = settings.limits.size_bytes_max;
        lock(&shared.counters).is_on_disk = writer.database().is_on_disk();
        let keeper = Self { messages, shared: Arc::clone(&shared) };
        // Without an answer nothing is known of before.
        let ages = AgeClock::since(end_of_samples(&writer.database().lock()).unwrap_or(None), Instant::now());
        let work = Work { writer, published, settings, shared, sequence: None, profiles_at: HashMap::new(), thinned_at: None, ages };
        let thread = std::thread::Builder::new().name("fragprof-store".into()).spawn(move || work.run(&inbox))?;
        Ok((keeper, thread))
    }

    /// Stores an event. It is available at once, and written soon.
    pub fn record(&self, record: Record) {
        let mut recent = lock(&self.shared.recent);
        if recent.len() == EVENTS_RECENT {
            recent.pop_front();
        }
        recent.push_back(record.clone());
        drop(recent);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.messages.try_send(Message::Record(Box::new(record))) {
            lock(&self.shared.counters).events_lost += 1;
        }
    }

    /// The newest events, which may not be on disk.
    #[must_use]
    pub fn recent(&self) -> Vec<Record> {
        lock(&self.shared.recent).iter().cloned().collect()
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> KeeperCounters {
        *lock(&self.shared.counters)
    }

    /// Requests a last sample and the end of the thread.
    pub fn stop(&self) {
        // A full queue is emptied soon; if it is closed, the thread has ended.
        let _ = self.messages.send(Message::Stop);
    }
}

struct Work {
    writer: Writer,
    published: Arc<Published>,
    settings: Settings,
    shared: Arc<Shared>,
    sequence: Option<u64>,
    profiles_at: HashMap<(ProcessId, &'static str), Instant>,
    thinned_at: Option<Instant>,
    ages: AgeClock,
}

impl Work {
    fn run(mut self, inbox: &Receiver<Message>) {
        let mut due = Instant::now() + self.settings.sample_interval;
        loop {
            match inbox.recv_timeout(due.saturating_duration_since(Instant::now())) {
                Ok(Message::Record(record)) => self.record(&record),
                Err(RecvTimeoutError::Timeout) => {
                    self.sample();
                    due = Instant::now() + self.settings.sample_interval;
                }
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    self.sample();
                    self.writer.database().close();
                    return;
                }
            }
        }
    }

    fn record(&mut self, record: &Record) {
        let written = self.write(|writer| writer.event(&record.event, record.profile.as_deref())).is_some();
        let mut counters = lock(&self.shared.counters);
        counters.events += u64::from(written);
        counters.events_lost += u64::from(!written);
    }

    fn sample(&mut self) {
        let snapshot = self.published.load();
        if self.sequence == Some(snapshot.sequence) {
            return;
        }
        self.sequence = Some(snapshot.sequence);
        let now = unix_s(snapshot.wall) as i64;
        let processes: Vec<ProcessView> =
            snapshot.processes.iter().filter(|one| one.best().is_some()).map(|one| ProcessView::of(one, snapshot.at)).collect();
        if let Some(rows) = self.write(|writer| writer.samples(now, &processes)) {
            lock(&self.shared.counters).samples += rows;
        }
        self.profiles(&snapshot, now, &processes);
        let now = self.ages.now(now, Instant::now());
        self.thin(now);
    }

    fn profiles(&mut self, snapshot: &Snapshot, now: i64, views: &[ProcessView]) {
        self.profiles_at.retain(|(process, _), _| snapshot.process(process.pid.0).is_some_and(|one| one.identity.process == *process));
        for one in &snapshot.processes {
            let process = one.identity.process;
            let Some(view) = views.iter().find(|view| view.pid == process.pid.0) else { continue };
            for known in one.attributed.all() {
                let key = (process, known.profile.meta.mode.name());
                let is_due =
                    self.profiles_at.get(&key).is_none_or(|at| known.at.saturating_duration_since(*at) >= self.settings.profile_interval);
                if !is_due {
                    continue;
                }
                if self.write(|writer| writer.profile(now, view, &known.profile)).is_some() {
                    self.profiles_at.insert(key, known.at);
                    lock(&self.shared.counters).profiles += 1;
                }
            }
        }
    }

    fn thin(&mut self, now: i64) {
        let database = self.writer.database().clone();
        // That the size can be read does not mean that the file can be written.
        let size = size_bytes(&database.lock()).map_err(database.fail());
        // A reader may find damage that a writer does not meet.
        if self.renew() {
            return;
        }
        let Ok(size) = size else { return };
        lock(&self.shared.counters).size_bytes = size;
        let is_due = self.thinned_at.is_none_or(|at| at.elapsed() >= THIN_EVERY);
        if !is_due && size <= self.settings.limits.size_bytes_max {
            return;
        }
        self.thinned_at = Some(Instant::now());
        let done = thin(&database, now, self.settings.limits);
        if done.is_err() {
            // Thinning may need space itself. Failed writes of samples are counted separately.
            lock(&self.shared.counters).write_errors += 1;
        }
        if let Ok(thinned) = done {
            if thinned.aged + thinned.dropped > 0 {
                self.writer.forget();
            }
            let mut counters = lock(&self.shared.counters);
            counters.merged += thinned.merged;
            counters.aged += thinned.aged;
            counters.dropped += thinned.dropped;
        }
    }

    /// Writes, and again into a new file if the old one proves to be damaged.
    fn write<T>(&mut self, write: impl Fn(&mut Writer) -> Result<T, StoreError>) -> Option<T> {
        let mut done = write(&mut self.writer);
        if done.is_err() && self.renew() {
            done = write(&mut self.writer);
        }
        self.counted(done)
    }

    /// Starts a new history if the file is damaged; returns whether it did.
    fn renew(&mut self) -> bool {
        if !self.writer.database().is_damaged() {
            return false;
        }
        match self.writer.database().renew() {
            Ok(aside) => {
                tracing::warn!("the history is damaged: it is kept as {}, and a new one was started", aside.display());
                lock(&self.shared.counters).set_aside += 1;
                self.writer.forget();
                self.profiles_at.clear();
                true
            }
            Err(error) => {
                self.counted::<()>(Err(error));
                false
            }
        }
    }

    /// Counts an error; logs it once until writing works again.
    fn counted<T>(&self, done: Result<T, StoreError>) -> Option<T> {
        let mut counters = lock(&self.shared.counters);
        match done {
            Ok(value) => {
                if std::mem::take(&mut counters.is_failing) {
                    tracing::warn!("writing the history works again");
                }
                Some(value)
            }
            Err(error) => {
                counters.write_errors += 1;
                if !std::mem::replace(&mut counters.is_failing, true) {
                    tracing::warn!("{error}; committed data is kept, and writing is retried");
                }
                None
            }
        }
    }
}

/// The id of an event: microseconds since the Unix epoch, so that ids of different runs do not collide.
#[must_use]
pub fn event_id(at: SystemTime, before: u64) -> u64 {
    let micros = at.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
    micros.max(before.saturating_add(1))
}
