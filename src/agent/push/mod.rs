//! Sends profiles to a server: Pyroscope or a compatible one, Parca, or, with the cargo feature `otlp`, an OpenTelemetry collector. New
//! profiles are queued at each interval; the queue is bounded, and after failures the pauses grow.
//!
//! A push covers the time since the last one ([`interval`]), so that a server that adds up what it is sent gets the correct sums. Values
//! that are dropped or rejected return to the process's account, and are in its next push.

mod destination;
mod grpc;
#[cfg(test)]
mod hour;
mod interval;
#[cfg(feature = "otlp")]
mod otlp;
mod parca;
mod pyroscope;
#[cfg(test)]
mod secured;
#[cfg(test)]
mod testing;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub use self::destination::Destination;
use self::grpc::Grpc;
use self::interval::{Account, Interval, Receipt};
use super::config::PushProtocol;
use crate::client::{ClientError, Server};
use crate::model::counters::PushCounters;
use crate::model::sample::ProcessSample;
use crate::model::snapshot::Published;
use crate::process::ProcessId;
use crate::profile::pprof::{self, Part};
use crate::profile::{KindSet, Profile};

/// Maximum number of queued profiles; about ten KiB each. The oldest is dropped first.
const QUEUE_MAX: usize = 256;
/// Maximum size of queued profiles, in bytes.
const QUEUE_BYTES_MAX: usize = 32 << 20;
/// First pause after a failure; it doubles with each further failure.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Maximum pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Maximum number of processes and profile modes whose account is kept after the process has disappeared, and for how long.
const FOLLOWED_MAX: usize = 512;
const FORGET_AFTER: Duration = Duration::from_secs(900);
/// If a profile's end differs by more than this from the time of its publication, the clock was set since its start: symbolizing its stacks
/// takes only a second or two.
const CLOCK_SET_NS: u64 = 10_000_000_000;

/// A process and the mode of its profile, which is the label `tier`.
type Source = (ProcessId, &'static str);

/// One profile to be sent.
#[derive(Debug, Clone, PartialEq)]
struct Parcel {
    path: String,
    body: Vec<u8>,
    source: Source,
    /// What it took from its account.
    receipt: Receipt,
}

impl Parcel {
    fn bytes(&self) -> usize {
        self.body.len() + self.receipt.bytes()
    }
}

/// The queued profiles, oldest first.
#[derive(Debug, Default)]
struct Queue(VecDeque<Parcel>);

impl Queue {
    /// Adds one; returns those that were dropped for it.
    fn add(&mut self, parcel: Parcel) -> Vec<Parcel> {
        self.0.push_back(parcel);
        let mut dropped = Vec::new();
        while self.0.len() > QUEUE_MAX || (self.0.len() > 1 && self.0.iter().map(Parcel::bytes).sum::<usize>() > QUEUE_BYTES_MAX) {
            dropped.extend(self.0.pop_front());
        }
        dropped
    }
}

/// The pause after this many consecutive failures.
fn pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

/// The labels of a profile: the configured ones, and those of its process.
fn labels(process: &ProcessSample, profile: &Profile, more: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut all = more.clone();
    all.insert("pid".into(), process.identity.process.pid.to_string());
    all.insert("comm".into(), process.comm.clone());
    all.insert("tier".into(), profile.meta.mode.name().into());
    if let Some(container) = &process.surroundings.container {
        all.extend(container.label_map());
    }
    all
}

/// The end of a profile, nanoseconds since the Unix epoch: its start plus its length, so that intervals are contiguous; if the clock was
/// set since its start, the time of its publication.
fn end_unix_ns(profile: &Profile, handed_over: SystemTime) -> u64 {
    let handed_over = handed_over.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
    // `as` saturates, and converts NaN to 0.
    let end = profile.meta.start_unix_ns.saturating_add((profile.meta.duration_s * 1e9) as u64);
    if end.abs_diff(handed_over) <= CLOCK_SET_NS { end } else { handed_over }
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Sent {
    /// The server has accepted it.
    Taken,
    /// The server rejected it permanently.
    Refused(String),
    /// The server may accept it later.
    Later(String),
}

/// The client of a protocol.
#[derive(Debug)]
enum Outlet {
    Pyroscope,
    Grpc(Box<Grpc>, PushProtocol),
}

impl Outlet {
    /// The method or path of a request for an interval, and its body; `None` if it is empty or cannot be encoded.
    fn request(
        &self,
        process: &ProcessSample,
        profile: &Profile,
        interval: &Interval,
        more: &BTreeMap<String, String>,
    ) -> Option<(String, Vec<u8>)> {
        let protocol = match self {
            Self::Pyroscope => PushProtocol::Pyroscope,
            Self::Grpc(_, protocol) => *protocol,
        };
        let labels = labels(process, profile, more);
        let (has_sums, has_gauges) = (interval.has_any(interval.sums), interval.has_any(interval.gauges));
        if !has_sums && !has_gauges {
            return None;
        }
        #[cfg(feature = "otlp")]
        if protocol == PushProtocol::Otlp {
            return Some((otlp::METHOD.into(), otlp::request(process, profile, interval, &labels)));
        }
        let file = |kinds, duration_ns| {
            let mut file = Vec::new();
            let part = Part { kinds, rows: &interval.rows, time_unix_ns: interval.end_unix_ns, duration_ns };
            match pprof::write_part(profile, &part, &mut file) {
                Ok(()) => Some(file),
                Err(error) => {
                    tracing::debug!("a profile cannot be written: {error}");
                    None
                }
            }
        };
        Some(match protocol {
            PushProtocol::Parca => {
                let sums = if has_sums { Some(file(interval.sums, interval.duration_ns)?) } else { None };
                let gauges = if has_gauges { Some(file(interval.gauges, 0)?) } else { None };
                (parca::METHOD.into(), parca::request(&labels, sums.into_iter().chain(gauges)))
            }
            _ => {
                let kinds: KindSet = interval.sums.iter().chain(interval.gauges.iter()).collect();
                let body = pyroscope::multipart(&file(kinds, interval.duration_ns)?, kinds);
                (pyroscope::path(&process.comm, interval, &labels), body)
            }
        })
    }

    /// Uses this server from now on, whose access has changed.
    fn switch(&mut self, server: &Server) -> std::io::Result<()> {
        match self {
            Self::Grpc(grpc, _) => grpc.switch(server),
            Self::Pyroscope => Ok(()),
        }
    }

    fn send(&mut self, server: &Server, parcel: &Parcel) -> Sent {
        match self {
            Self::Grpc(grpc, _) => grpc.send(&parcel.path, &parcel.body),
            Self::Pyroscope => match server.post(&parcel.path, &pyroscope::content_type(), &parcel.body) {
                Ok(_) => Sent::Taken,
                Err(error @ ClientError::Status { status: 400..=428 | 430..=499, .. }) => Sent::Refused(error.to_string()),
                Err(error) => Sent::Later(error.to_string()),
            },
        }
    }
}

/// Where and how often profiles are sent.
#[derive(Debug, Clone)]
pub struct Target {
    /// The server.
    pub destination: Destination,
    /// The protocol of the server.
    pub protocol: PushProtocol,
    /// Interval between two rounds.
    pub interval: Duration,
    /// Labels that every profile gets.
    pub labels: BTreeMap<String, String>,
}

/// The running thread.
#[derive(Debug)]
pub struct Pusher {
    /// Its counters.
    pub counters: Arc<PushCounters>,
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Pusher {
    /// Starts the thread `fragprof-push`.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(target: Target, published: Arc<Published>) -> std::io::Result<Self> {
        let counters = Arc::new(PushCounters::default());
        let (stop, stopped) = mpsc::channel();
        let outlet = match target.protocol {
            PushProtocol::Pyroscope => Outlet::Pyroscope,
            protocol => Outlet::Grpc(Box::new(Grpc::new(target.destination.server())?), protocol),
        };
        let mut work = Work {
            target,
            outlet,
            published,
            counters: Arc::clone(&counters),
            queue: Queue::default(),
            followed: HashMap::new(),
            failures: 0,
            told: false,
        };
        let thread = std::thread::Builder::new().name("fragprof-push".into()).spawn(move || work.run(&stopped))?;
        Ok(Self { counters, stop, thread })
    }

    /// Requests the end. Queued profiles are lost.
    pub fn stop(&self) {
        // If this fails, it has already ended.
        let _ = self.stop.send(());
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

/// The values sent of a process's profile.
struct Followed {
    /// The time of the profile that was queued last.
    at: Instant,
    /// When the process was last in the snapshot.
    seen: Instant,
    account: Account,
}

struct Work {
    target: Target,
    outlet: Outlet,
    published: Arc<Published>,
    counters: Arc<PushCounters>,
    queue: Queue,
    followed: HashMap<Source, Followed>,
    failures: u32,
    /// The failure was logged; it is not logged again until it is over.
    told: bool,
}

impl Work {
    fn run(&mut self, stopped: &mpsc::Receiver<()>) {
        let mut next = Instant::now();
        loop {
            if Instant::now() >= next {
                self.collect();
                next = Instant::now() + self.target.interval;
            }
            let wait = self.send_one().unwrap_or_else(|| next.saturating_duration_since(Instant::now()));
            self.counters.waiting.store(self.queue.0.len() as u64, Ordering::Relaxed);
            match stopped.recv_timeout(wait) {
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Queues the profiles that are new since the last round.
    fn collect(&mut self) {
        let snapshot = self.published.load();
        let now = Instant::now();
        let are_many = self.followed.len() > FOLLOWED_MAX;
        self.followed.retain(|(process, _), followed| {
            let is_there = snapshot.process(process.pid.0).is_some_and(|one| one.identity.process == *process);
            if is_there {
                followed.seen = now;
            }
            // A process that disappears briefly continues with its account: values must not be sent twice.
            is_there || (!are_many && now.saturating_duration_since(followed.seen) < FORGET_AFTER)
        });
        for process in &snapshot.processes {
            for known in process.attributed.all() {
                let source = (process.identity.process, known.profile.meta.mode.name());
                let account = match self.followed.entry(source) {
                    Entry::Occupied(followed) if followed.get().at == known.at => continue,
                    Entry::Occupied(followed) => {
                        let followed = followed.into_mut();
                        followed.at = known.at;
                        &mut followed.account
                    }
                    Entry::Vacant(place) => &mut place.insert(Followed { at: known.at, seen: now, account: Account::default() }).account,
                };
                let end_unix_ns = end_unix_ns(&known.profile, known.wall);
                let (interval, receipt) = account.next(&known.profile, end_unix_ns);
                let request = self.outlet.request(process, &known.profile, &interval, &self.target.labels);
                let Some((path, body)) = request else {
                    account.give_back(&receipt);
                    continue;
                };
                let dropped = self.queue.add(Parcel { path, body, source, receipt });
                self.counters.dropped.fetch_add(dropped.len() as u64, Ordering::Relaxed);
                for parcel in &dropped {
                    self.give_back(parcel);
                }
            }
        }
    }

    /// Values that will not arrive are included in the next push of their process.
    fn give_back(&mut self, parcel: &Parcel) {
        if let Some(followed) = self.followed.get_mut(&parcel.source) {
            followed.account.give_back(&parcel.receipt);
        }
    }

    /// Sends the oldest profile. `Some` = how long to wait before the next.
    fn send_one(&mut self) -> Option<Duration> {
        let parcel = self.queue.0.front()?;
        let destination = &mut self.target.destination;
        let renewed = destination
            .renew()
            .map_err(|error| error.to_string())
            .and_then(|is_new| if is_new { self.outlet.switch(destination.server()).map_err(|error| error.to_string()) } else { Ok(()) });
        let sent = match renewed {
            Ok(()) => self.outlet.send(destination.server(), parcel),
            Err(why) => Sent::Later(why),
        };
        match sent {
            Sent::Taken => {
                self.counters.sent.fetch_add(1, Ordering::Relaxed);
                self.queue.0.pop_front();
                self.failures = 0;
                if std::mem::take(&mut self.told) {
                    tracing::warn!("{} accepts profiles again", self.target.destination.server().address());
                }
                Some(Duration::ZERO)
            }
            Sent::Refused(why) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{} rejected a profile: {why}", self.target.destination.server().address());
                if let Some(parcel) = self.queue.0.pop_front() {
                    self.give_back(&parcel);
                }
                Some(Duration::ZERO)
            }
            Sent::Later(why) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                self.failures = self.failures.saturating_add(1);
                if !std::mem::replace(&mut self.told, true) {
                    tracing::warn!("profiles wait: {why}");
                }
                Some(pause(self.failures))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::pyroscope::BOUNDARY;
    use super::*;
    use crate::profile::testing::shop;

    #[test]
    fn pauses_double_up_to_a_limit() {
        assert_eq!([1, 2, 3, 40].map(pause), [Duration::from_secs(1), Duration::from_secs(2), Duration::from_secs(4), PAUSE_MAX]);
    }

    #[test]
    fn the_oldest_profile_is_dropped_when_too_many_wait() {
        let mut queue = Queue::default();
        let source = (ProcessId { pid: crate::units::Pid(1), start_ticks: 1 }, "exact");
        let parcel = |path: String, bytes| Parcel { path, body: vec![0; bytes], source, receipt: Receipt::default() };
        let dropped: usize = (0..QUEUE_MAX + 3).map(|at| queue.add(parcel(at.to_string(), 10)).len()).sum();
        assert_eq!((dropped, queue.0.len(), queue.0.front().unwrap().path.as_str()), (3, QUEUE_MAX, "3"));
        assert_eq!(queue.add(parcel("large".into(), QUEUE_BYTES_MAX + 1)).len(), QUEUE_MAX);
    }

    /// A server that answers each connection with the next of these statuses, and passes on what it received.
    fn server(statuses: &'static [u16]) -> (String, mpsc::Receiver<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (sender, requests) = mpsc::channel();
        std::thread::spawn(move || {
            for status in statuses {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = Vec::new();
                let mut piece = [0; 4096];
                while !request.ends_with(format!("--{BOUNDARY}--\r\n").as_bytes()) {
                    let got = stream.read(&mut piece).unwrap();
                    request.extend_from_slice(&piece[..got]);
                }
                stream.write_all(format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n").as_bytes()).unwrap();
                sender.send(request).unwrap();
            }
        });
        (url, requests)
    }

    #[test]
    fn a_profile_arrives_whole_with_its_labels_after_the_server_failed_once() {
        let (url, requests) = server(&[503, 200]);
        let pusher = testing::pusher(&url, PushProtocol::Pyroscope);
        let first = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        let second = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(first, second);
        let head = String::from_utf8_lossy(&second[..400]).into_owned();
        assert!(
            head.starts_with(
                "POST /ingest?name=sh_o_p%7Bcluster%3Da%2Ccomm%3Dsh_o_p%2Cpid%3D42%2Ctier%3Dexact%7D&from=1795257600&until=1795257610&spyName="
            ),
            "{head}"
        );
        let start = second.windows(2).position(|window| window == [0x1f, 0x8b]).unwrap();
        let back = testing::pprof(&second[start..second.len() - format!("\r\n--{BOUNDARY}--\r\n").len()]);
        assert_eq!((back.time_nanos, back.duration_nanos), (testing::END_UNIX_NS, 10_250_000_000));
        let wanted: Vec<_> = shop().meta.kinds.iter().map(|kind| (kind.name().to_owned(), testing::sum(&shop(), kind))).collect();
        assert_eq!(testing::totals(&back), wanted);
        assert_eq!(pusher.counters.failures.load(Ordering::Relaxed), 1);
        pusher.stop();
    }
}
