//! Sends profiles to a server: Pyroscope or what takes the same, Parca, or, with the cargo feature `otlp`, a collector of OpenTelemetry.
//! What is new is queued at each interval; the queue is bounded, and a server that fails is left alone for longer and longer.

mod grpc;
#[cfg(feature = "otlp")]
mod otlp;
mod parca;
mod pyroscope;
#[cfg(test)]
mod testing;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::grpc::Grpc;
use super::config::PushProtocol;
use super::sample::ProcessSample;
use super::snapshot::Published;
use super::view::unix_s;
use crate::client::{ClientError, Server};
use crate::profile::{Profile, pprof};

/// Profiles that wait at most; some ten KiB each. The oldest goes first.
const QUEUE_MAX: usize = 256;
/// Bytes that wait at most.
const QUEUE_BYTES_MAX: usize = 32 << 20;
/// First pause after a failure; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// What was sent and what was not.
#[derive(Debug, Default)]
pub struct PushCounters {
    /// Profiles that the server took.
    pub sent: AtomicU64,
    /// Requests that failed; the profile is tried again.
    pub failures: AtomicU64,
    /// Profiles dropped because too many waited.
    pub dropped: AtomicU64,
    /// Profiles the server refused for good (4xx).
    pub refused: AtomicU64,
    /// Profiles that wait.
    pub waiting: AtomicU64,
}

/// One profile on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Parcel {
    path: String,
    body: Vec<u8>,
}

/// What waits, oldest first.
#[derive(Debug, Default)]
struct Queue(VecDeque<Parcel>);

impl Queue {
    /// Adds one; returns how many had to go for it.
    fn add(&mut self, parcel: Parcel) -> u64 {
        self.0.push_back(parcel);
        let mut dropped = 0;
        while self.0.len() > QUEUE_MAX || (self.0.len() > 1 && self.0.iter().map(|one| one.body.len()).sum::<usize>() > QUEUE_BYTES_MAX) {
            self.0.pop_front();
            dropped += 1;
        }
        dropped
    }
}

/// The pause after so many failures in a row.
fn pause(failures: u32) -> Duration {
    PAUSE_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(PAUSE_MAX)
}

/// The labels of a profile: the configured ones, and whose it is.
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

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Sent {
    /// The server has it.
    Taken,
    /// It will not take this one later either.
    Refused(String),
    /// It may take it later.
    Later(String),
}

/// The way to the server.
#[derive(Debug)]
enum Outlet {
    Pyroscope(Server),
    Grpc(Grpc, PushProtocol),
}

impl Outlet {
    /// The request for a profile; `None` if it cannot be written.
    fn parcel(&self, process: &ProcessSample, profile: &Profile, at_unix_s: f64, more: &BTreeMap<String, String>) -> Option<Parcel> {
        let protocol = match self {
            Self::Pyroscope(_) => PushProtocol::Pyroscope,
            Self::Grpc(_, protocol) => *protocol,
        };
        #[cfg(feature = "otlp")]
        if protocol == PushProtocol::Otlp {
            return Some(Parcel { path: otlp::METHOD.into(), body: otlp::request(process, profile, &labels(process, profile, more)) });
        }
        let mut file = Vec::new();
        if let Err(error) = pprof::write(profile, &mut file) {
            tracing::debug!("a profile cannot be written: {error}");
            return None;
        }
        Some(match protocol {
            PushProtocol::Parca => Parcel { path: parca::METHOD.into(), body: parca::request(&labels(process, profile, more), file) },
            _ => Parcel { path: pyroscope::path(process, profile, at_unix_s, more), body: pyroscope::multipart(&file) },
        })
    }

    fn send(&self, parcel: &Parcel) -> Sent {
        match self {
            Self::Grpc(grpc, _) => grpc.send(&parcel.path, &parcel.body),
            Self::Pyroscope(server) => match server.post(&parcel.path, &pyroscope::content_type(), &parcel.body) {
                Ok(_) => Sent::Taken,
                Err(ClientError::Status { status, message }) if (400..500).contains(&status) && status != 429 => {
                    Sent::Refused(format!("{status} {message}"))
                }
                Err(error) => Sent::Later(error.to_string()),
            },
        }
    }
}

/// Where and how often.
#[derive(Debug, Clone)]
pub struct Target {
    /// The server.
    pub server: Server,
    /// What it understands.
    pub protocol: PushProtocol,
    /// Time between two rounds.
    pub interval: Duration,
    /// Labels that every profile gets.
    pub labels: BTreeMap<String, String>,
}

/// The running thread.
#[derive(Debug)]
pub struct Pusher {
    /// What it counts.
    pub counters: Arc<PushCounters>,
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Pusher {
    /// Starts the thread `fragprof-push`.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(target: Target, published: Arc<Published>) -> std::io::Result<Self> {
        let counters = Arc::new(PushCounters::default());
        let (stop, stopped) = mpsc::channel();
        let outlet = match target.protocol {
            PushProtocol::Pyroscope => Outlet::Pyroscope(target.server.clone()),
            protocol => Outlet::Grpc(Grpc::new(&target.server)?, protocol),
        };
        let mut work = Work {
            target,
            outlet,
            published,
            counters: Arc::clone(&counters),
            queue: Queue::default(),
            sent_at: HashMap::new(),
            failures: 0,
            told: false,
        };
        let thread = std::thread::Builder::new().name("fragprof-push".into()).spawn(move || work.run(&stopped))?;
        Ok(Self { counters, stop, thread })
    }

    /// Asks for the end. What waits is lost.
    pub fn stop(&self) {
        // It has ended already if this fails.
        let _ = self.stop.send(());
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }
}

struct Work {
    target: Target,
    outlet: Outlet,
    published: Arc<Published>,
    counters: Arc<PushCounters>,
    queue: Queue,
    sent_at: HashMap<(crate::target::ProcessId, &'static str), Instant>,
    failures: u32,
    /// The failure was said; it is not said again until it is over.
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

    /// Queues what is new since the last round.
    fn collect(&mut self) {
        let snapshot = self.published.load();
        self.sent_at.retain(|(process, _), _| snapshot.process(process.pid.0).is_some_and(|one| one.identity.process == *process));
        for process in &snapshot.processes {
            for known in process.attributed.all() {
                let key = (process.identity.process, known.profile.meta.mode.name());
                if self.sent_at.get(&key) == Some(&known.at) {
                    continue;
                }
                self.sent_at.insert(key, known.at);
                let Some(parcel) = self.outlet.parcel(process, &known.profile, unix_s(known.wall), &self.target.labels) else { continue };
                let dropped = self.queue.add(parcel);
                self.counters.dropped.fetch_add(dropped, Ordering::Relaxed);
            }
        }
    }

    /// Sends the oldest. `Some` = how long to wait before the next.
    fn send_one(&mut self) -> Option<Duration> {
        let parcel = self.queue.0.front()?;
        match self.outlet.send(parcel) {
            Sent::Taken => {
                self.counters.sent.fetch_add(1, Ordering::Relaxed);
                self.queue.0.pop_front();
                self.failures = 0;
                if std::mem::take(&mut self.told) {
                    tracing::warn!("{} takes profiles again", self.target.server.address());
                }
                Some(Duration::ZERO)
            }
            Sent::Refused(why) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{} refuses a profile: {why}", self.target.server.address());
                self.queue.0.pop_front();
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
    fn the_oldest_goes_when_too_many_wait() {
        let mut queue = Queue::default();
        let parcel = |at: usize| Parcel { path: at.to_string(), body: vec![0; 10] };
        let dropped: u64 = (0..QUEUE_MAX + 3).map(|at| queue.add(parcel(at))).sum();
        assert_eq!((dropped, queue.0.len(), queue.0.front().unwrap().path.as_str()), (3, QUEUE_MAX, "3"));
        assert_eq!(queue.add(Parcel { path: "large".into(), body: vec![0; QUEUE_BYTES_MAX + 1] }), QUEUE_MAX as u64);
    }

    /// A server that answers each connection with the next of these statuses, and hands over what it was sent.
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
            head.starts_with("POST /ingest?name=sh_o_p.memory%7Bcluster%3Da%2Ccomm%3Dsh_o_p%2Cpid%3D42%2Ctier%3Dexact%7D&from="),
            "{head}"
        );
        let start = second.windows(2).position(|window| window == [0x1f, 0x8b]).unwrap();
        let back = pprof::read(&second[start..second.len() - format!("\r\n--{BOUNDARY}--\r\n").len()]).unwrap();
        assert_eq!(back.totals(), shop().totals());
        assert_eq!(pusher.counters.failures.load(Ordering::Relaxed), 1);
        pusher.stop();
    }
}
