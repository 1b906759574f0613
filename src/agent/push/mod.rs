//! Sends profiles to a server: Pyroscope or a compatible one, Parca, or an OpenTelemetry collector. New profiles are queued at each interval,
//! or more rarely if they have too many bytes a day; the queue is bounded, and after failures the pauses grow.
//!
//! A push covers the time since the last one ([`interval`]), so that a server that adds up what it is sent gets the correct sums. Values
//! that are dropped or rejected return to the process's account, and are in its next push.

mod allowance;
#[cfg(test)]
mod day;
mod destination;
mod grpc;
#[cfg(test)]
mod hour;
mod interval;
#[cfg(feature = "otlp")]
mod otlp;
mod parca;
mod pyroscope;
mod pyroscope_push;
mod queue;
mod remainder;
#[cfg(test)]
mod secured;
mod spool;
#[cfg(test)]
mod testing;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use self::allowance::Allowance;
pub use self::destination::Destination;
use self::grpc::Grpc;
use self::interval::{Account, Interval};
use self::queue::{Parcel, Queue};
use super::config::PushProtocol;
use crate::client::{ClientError, Server};
use crate::model::attribution::Labels;
use crate::model::counters::PushCounters;
use crate::model::sample::ProcessSample;
use crate::model::snapshot::Published;
use crate::process::ProcessId;
use crate::profile::pprof::{self, Part};
use crate::profile::{KindSet, Profile};

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
    all.extend(Labels::of(process).map());
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
    /// By HTTP POST.
    Http(PushProtocol),
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
            Self::Http(protocol) | Self::Grpc(_, protocol) => *protocol,
        };
        let labels = labels(process, profile, more);
        let (has_sums, has_gauges) = (interval.has_any(interval.sums), interval.has_any(interval.gauges));
        if !has_sums && !has_gauges {
            return None;
        }
        #[cfg(feature = "otlp")]
        if matches!(protocol, PushProtocol::Otlp | PushProtocol::OtlpHttp) {
            let path = if protocol == PushProtocol::Otlp { otlp::METHOD } else { otlp::HTTP_PATH };
            return Some((path.into(), otlp::request(process, profile, interval, &labels)));
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
            PushProtocol::PyroscopePush => {
                let kinds: KindSet = interval.sums.iter().chain(interval.gauges.iter()).collect();
                (pyroscope_push::PATH.into(), pyroscope_push::request(&labels, file(kinds, interval.duration_ns)?))
            }
            _ => {
                let kinds: KindSet = interval.sums.iter().chain(interval.gauges.iter()).collect();
                let body = pyroscope::multipart(&file(kinds, interval.duration_ns)?, kinds);
                (pyroscope::path(&process.workload.service_name, interval, &labels), body)
            }
        })
    }

    /// Uses this server from now on, whose access has changed.
    fn switch(&mut self, server: &Server) -> std::io::Result<()> {
        match self {
            Self::Grpc(grpc, _) => grpc.switch(server),
            Self::Http(_) => Ok(()),
        }
    }

    fn send(&mut self, server: &Server, parcel: &Parcel) -> Sent {
        match self {
            Self::Grpc(grpc, _) => grpc.send(&parcel.path, &parcel.body),
            Self::Http(protocol) => Self::post(server, parcel, &content_type(*protocol)),
        }
    }

    fn post(server: &Server, parcel: &Parcel, content_type: &str) -> Sent {
        match server.post(&parcel.path, content_type, &parcel.body) {
            Ok(_) => Sent::Taken,
            Err(error @ ClientError::Status { status: 400..=428 | 430..=499, .. }) => Sent::Refused(error.to_string()),
            Err(error) => Sent::Later(error.to_string()),
        }
    }
}

/// The content type of a request's body, for protocols over HTTP.
fn content_type(protocol: PushProtocol) -> String {
    match protocol {
        PushProtocol::PyroscopePush => pyroscope_push::CONTENT_TYPE.to_owned(),
        #[cfg(feature = "otlp")]
        PushProtocol::OtlpHttp => otlp::CONTENT_TYPE.to_owned(),
        _ => pyroscope::content_type(),
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
    /// Stacks of a push.
    pub stacks_max: usize,
    /// Bytes sent a day, above which rounds become rarer; `None` = no limit.
    pub bytes_per_day_max: Option<u64>,
    /// Where profiles that wait are kept on disk; `None` = only in memory.
    pub spool_directory: Option<PathBuf>,
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
            protocol if protocol.is_grpc() => Outlet::Grpc(Box::new(Grpc::new(target.destination.server())?), protocol),
            protocol => Outlet::Http(protocol),
        };
        let (queue, lost) = Queue::open(target.spool_directory.as_deref(), target.protocol.name());
        counters.dropped.fetch_add(lost, Ordering::Relaxed);
        let mut work = Work {
            allowance: Allowance::new(target.bytes_per_day_max, Instant::now()),
            target,
            outlet,
            published,
            counters: Arc::clone(&counters),
            queue,
            followed: HashMap::new(),
            failures: 0,
            told: false,
        };
        let thread = std::thread::Builder::new().name("fragprof-push".into()).spawn(move || work.run(&stopped))?;
        Ok(Self { counters, stop, thread })
    }

    /// Requests the end. Queued profiles stay on disk, if there is a directory for them.
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
    /// The state of the heap in the last push.
    state: Option<u64>,
}

struct Work {
    target: Target,
    allowance: Allowance,
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
                if self.allowance.permits(Instant::now()) {
                    self.collect();
                } else {
                    self.counters.rounds_put_off.fetch_add(1, Ordering::Relaxed);
                }
                next = Instant::now() + self.target.interval;
            }
            let wait = self.send_one().unwrap_or_else(|| next.saturating_duration_since(Instant::now()));
            self.counters.waiting.store(self.queue.len() as u64, Ordering::Relaxed);
            match stopped.recv_timeout(wait) {
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
                    self.queue.keep();
                    return;
                }
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
                let followed = match self.followed.entry(source) {
                    Entry::Occupied(followed) if followed.get().at == known.at => continue,
                    Entry::Occupied(followed) => followed.into_mut(),
                    Entry::Vacant(place) => place.insert(Followed { at: known.at, seen: now, account: Account::default(), state: None }),
                };
                followed.at = known.at;
                let end_unix_ns = end_unix_ns(&known.profile, known.wall);
                let (interval, receipt) = followed.account.next(&known.profile, end_unix_ns);
                let state = Some(interval.state());
                if !interval.has_any(interval.sums) && state == followed.state {
                    self.counters.unchanged.fetch_add(1, Ordering::Relaxed);
                    followed.account.give_back(&receipt);
                    continue;
                }
                let (reduced, summed) = remainder::largest(&known.profile, interval, self.target.stacks_max);
                let profile = reduced.profile.as_ref().unwrap_or(&known.profile);
                let request = self.outlet.request(process, profile, &reduced.interval, &self.target.labels);
                let Some((path, body)) = request else {
                    followed.account.give_back(&receipt);
                    continue;
                };
                followed.state = state;
                self.counters.remainders.fetch_add(summed, Ordering::Relaxed);
                self.allowance.spend(body.len() as u64);
                let dropped = self.queue.add(Parcel { path, body, source: Some(source), receipt, file: None });
                self.counters.dropped.fetch_add(dropped.len() as u64, Ordering::Relaxed);
                for parcel in &dropped {
                    self.give_back(parcel);
                }
            }
        }
        if self.failures > 0 {
            self.queue.keep();
        }
    }

    /// Values that will not arrive are included in the next push of their process.
    fn give_back(&mut self, parcel: &Parcel) {
        if let Some(followed) = parcel.source.and_then(|source| self.followed.get_mut(&source)) {
            followed.account.give_back(&parcel.receipt);
            // The server has not seen the state of the heap either.
            followed.state = None;
        }
    }

    /// Sends the oldest profile. `Some` = how long to wait before the next.
    fn send_one(&mut self) -> Option<Duration> {
        let parcel = self.queue.front()?;
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
                self.counters.bytes.fetch_add(parcel.body.len() as u64, Ordering::Relaxed);
                self.queue.pop();
                self.failures = 0;
                if std::mem::take(&mut self.told) {
                    tracing::warn!("{} accepts profiles again", self.target.destination.server().address());
                }
                Some(Duration::ZERO)
            }
            Sent::Refused(why) => {
                self.counters.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("{} rejected a profile: {why}", self.target.destination.server().address());
                if let Some(parcel) = self.queue.pop() {
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
                self.queue.keep();
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
                "POST /ingest?name=sh_o_p%7Bcluster%3Da%2Ccomm%3Dsh_o_p%2Cpid%3D42%2Ctier%3Dexact%2Cworkload%3Dsh_o_p%2Cworkload_kind%3Dcommand%7D&from=1795257600&until=1795257610&spyName="
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

    #[test]
    fn a_profile_outlives_a_restart_of_the_agent_while_the_server_is_away() {
        let place = tempfile::tempdir().unwrap();
        let away = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = |url: String| crate::agent::config::PushConfig {
            url: Some(url),
            spool_directory: Some(place.path().join("push")),
            ..crate::agent::config::PushConfig::default()
        };
        let published = Arc::new(Published::new(Instant::now()));
        testing::publish(&published, shop(), testing::END_UNIX_NS);
        let hour = Duration::from_secs(3600);
        let first = testing::start_with(&config(format!("http://{away}")), hour, published);
        let wait = |done: &dyn Fn() -> bool| {
            let deadline = Instant::now() + Duration::from_secs(20);
            while !done() {
                assert!(Instant::now() < deadline);
                std::thread::park_timeout(Duration::from_millis(5));
            }
        };
        wait(&|| first.counters.failures.load(Ordering::Relaxed) > 0);
        first.stop();
        wait(&|| first.is_finished());
        // The next run knows nothing of the process.
        let (url, requests) = server(&[200]);
        let second = testing::start_with(&config(url), hour, Arc::new(Published::new(Instant::now())));
        let request = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(String::from_utf8_lossy(&request).contains("POST /ingest?name=sh_o_p%7B"));
        wait(&|| second.counters.sent.load(Ordering::Relaxed) == 1);
        second.stop();
        assert_eq!(std::fs::read_dir(place.path().join("push")).unwrap().count(), 0);
    }
}
