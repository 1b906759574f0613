//! Sends profiles to a Pyroscope server (`POST /ingest`, multipart with the pprof file in the field `profile`), or to anything that takes
//! the same. What is new is queued at each interval; the queue is bounded, and a server that fails is left alone for longer and longer.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::sample::{ProcessSample, Published};
use super::view::unix_s;
use crate::client::Server;
use crate::profile::{Profile, pprof};

/// Profiles that wait at most; some ten KiB each. The oldest goes first.
const QUEUE_MAX: usize = 256;
/// Bytes that wait at most.
const QUEUE_BYTES_MAX: usize = 32 << 20;
/// First pause after a failure; it doubles with each further one.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// Parts the fields of a request; no pprof file begins a line with it, because it is gzipped and longer than chance.
const BOUNDARY: &str = "fragprof-6b1f0c7e9a2d4835";

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

/// The query of an ingestion: the name with its labels in braces.
fn path(process: &ProcessSample, profile: &Profile, at_unix_s: f64, labels: &BTreeMap<String, String>) -> String {
    let mut all: BTreeMap<String, String> = labels.clone();
    all.insert("pid".into(), process.identity.process.pid.to_string());
    all.insert("comm".into(), process.comm.clone());
    all.insert("tier".into(), profile.meta.mode.name().into());
    if let Some(container) = &process.surroundings.container {
        all.extend(container.label_map());
    }
    // Braces, commas and equals signs part labels: none may stand in a value.
    let clean = |text: &str| -> String {
        text.chars().map(|c| if c.is_control() || matches!(c, '{' | '}' | ',' | '=' | '"') { '_' } else { c }).collect()
    };
    let list: Vec<String> = all.iter().map(|(name, value)| format!("{name}={}", clean(value))).collect();
    let name = format!("{}.memory{{{}}}", clean(&process.comm), list.join(","));
    let until = at_unix_s;
    let from = until - profile.meta.duration_s.max(1.0);
    format!("/ingest?name={}&from={}&until={}&format=pprof&spyName=fragprof", percent(&name), from as u64, until as u64)
}

/// Percent-encoding of RFC 3986 for a query's value.
fn percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

fn multipart(profile: &[u8]) -> Vec<u8> {
    let mut body = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"profile\"; filename=\"profile.pprof\"\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    .into_bytes();
    body.extend_from_slice(profile);
    body.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    body
}

/// Where and how often.
#[derive(Debug, Clone)]
pub struct Target {
    /// The server.
    pub server: Server,
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
        let mut work = Work {
            target,
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
                let mut file = Vec::new();
                if let Err(error) = pprof::write(&known.profile, &mut file) {
                    tracing::debug!("a profile cannot be written: {error}");
                    continue;
                }
                let path = path(process, &known.profile, unix_s(known.wall), &self.target.labels);
                let dropped = self.queue.add(Parcel { path, body: multipart(&file) });
                self.counters.dropped.fetch_add(dropped, Ordering::Relaxed);
            }
        }
    }

    /// Sends the oldest. `Some` = how long to wait before the next.
    fn send_one(&mut self) -> Option<Duration> {
        let parcel = self.queue.0.front()?;
        let kind = format!("multipart/form-data; boundary={BOUNDARY}");
        match self.target.server.post(&parcel.path, &kind, &parcel.body) {
            Ok(_) => {
                self.counters.sent.fetch_add(1, Ordering::Relaxed);
                self.queue.0.pop_front();
                self.failures = 0;
                if std::mem::take(&mut self.told) {
                    tracing::warn!("{} takes profiles again", self.target.server.address());
                }
                Some(Duration::ZERO)
            }
            // It will not take this one later either; 429 it may.
            Err(crate::client::ClientError::Status { status, message }) if (400..500).contains(&status) && status != 429 => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{} refuses a profile: {status} {message}", self.target.server.address());
                self.queue.0.pop_front();
                Some(Duration::ZERO)
            }
            Err(error) => {
                self.counters.failures.fetch_add(1, Ordering::Relaxed);
                self.failures = self.failures.saturating_add(1);
                if !std::mem::replace(&mut self.told, true) {
                    tracing::warn!("profiles wait: {error}");
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
    use std::time::SystemTime;

    use super::*;
    use crate::agent::attribution::{Attributed, Attributions};
    use crate::agent::sample::{Identity, Snapshot};
    use crate::profile::testing::shop;
    use crate::target::ProcessId;
    use crate::units::Pid;

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
        let now = Instant::now();
        let process = ProcessId { pid: Pid(42), start_ticks: 1 };
        let board = Attributions::default();
        let attributed = Attributed { profile: Arc::new(shop()), at: now, wall: SystemTime::now(), rates: None, slowdown_ratio_est: None };
        board.publish(process, attributed);
        let sample =
            ProcessSample { attributed: board.of(process), ..ProcessSample::new(Identity { process, stack: 0 }, "sh{o}p".into(), 0, 1) };
        let published = Arc::new(Published::new(now));
        published.store(Snapshot { processes: vec![Arc::new(sample)], ..Snapshot::empty(now) });
        let target = Target {
            server: Server::parse(&url).unwrap(),
            interval: Duration::from_secs(3600),
            labels: BTreeMap::from([("cluster".into(), "a".into())]),
        };
        let pusher = Pusher::start(target, published).unwrap();
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
