//! HTTP: metrics, health and the API, on a thread of its own.
//!
//! | path | answer | token |
//! |---|---|---|
//! | `/`, `/pages/…` | the pages | yes |
//! | `/metrics` | Prometheus exposition; on loopback only under a local name | no |
//! | `/healthz` | 200 while the census thread is alive, else 503 | no |
//! | `/readyz` | 200 once every process found at start has had its first census, else 503 | no |
//! | `/api/v1/…` | the sample model, maps, profiles, history, events: see `docs/api/openapi.json` | yes |
//! | `/debug/pprof/heap?pid=` | a process's profile for scrapers | yes |
//!
//! Handlers read the newest snapshot and the history. Only two cause work on a process: `map` requests a full census within the census's
//! budget, and `profile?seconds=` records, if the configuration allows it.

pub mod api;
pub mod auth;
mod connections;
pub mod listener;
pub mod on_demand;
pub mod openapi;
pub mod pages;
mod throttle;

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::oneshot;

use self::api::map::Maps;
use self::api::stacks::RecordedBlocks;
use self::listener::{Bound, Limited, Peer};
use self::throttle::Throttle;
use crate::agent::attach::SharedAttach;
use crate::agent::collect::{Command, Heartbeat};
use crate::agent::delivery::SharedDelivery;
use crate::agent::governed::SharedSample;
use crate::agent::leaks::SharedLeaks;
use crate::agent::listening::SharedListening;
use crate::agent::reclaim::SharedReclaim;
use crate::agent::worker::lock;
use crate::metrics;
use crate::model::attribution::Attributions;
use crate::model::counters::HttpCounters;
use crate::model::counters::PushCounters;
use crate::model::snapshot::Published;
use crate::session::shared::LazySession;
use crate::store::keeper::Record;
use crate::store::{Keeper, KeeperCounters, Reader};
use crate::symbol::debuginfod::Debuginfod;

/// What handlers share.
#[derive(Debug)]
pub struct ServerState {
    listen: SocketAddr,
    published: Arc<Published>,
    heartbeat: Arc<Heartbeat>,
    governed: SharedSample,
    listening: SharedListening,
    leaks: SharedLeaks,
    reclaim: SharedReclaim,
    attach: SharedAttach,
    delivery: SharedDelivery,
    attributions: Arc<Attributions>,
    session: Arc<LazySession>,
    commands: mpsc::Sender<Command>,
    keeper: Option<Keeper>,
    reader: Option<Reader>,
    maps: Maps,
    /// The blocks of the newest recordings on request.
    recorded: RecordedBlocks,
    /// Held while a recording on request runs.
    recording: tokio::sync::Mutex<()>,
    profile_seconds_max: AtomicU64,
    push: OnceLock<Arc<PushCounters>>,
    debuginfod: OnceLock<Arc<Debuginfod>>,
    token: RwLock<Option<String>>,
    requests: AtomicU64,
    unauthorized: AtomicU64,
    throttle: Mutex<Throttle>,
    slowed: AtomicU64,
    refused: AtomicU64,
    displaced: AtomicU64,
    late: AtomicU64,
}

/// What the server reads, and where it sends commands.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The newest snapshot.
    pub published: Arc<Published>,
    /// Shows whether the census thread is alive.
    pub heartbeat: Arc<Heartbeat>,
    /// Where recordings on request are put.
    pub attributions: Arc<Attributions>,
    /// The BPF programs for recordings on request.
    pub session: Arc<LazySession>,
    /// Commands to the census thread.
    pub commands: mpsc::Sender<Command>,
    /// The history's newest events and counters.
    pub keeper: Option<Keeper>,
    /// The history.
    pub reader: Option<Reader>,
}

impl ServerState {
    /// Without a `token` everything is open, but only to loopback.
    #[must_use]
    pub fn new(listen: SocketAddr, sources: Sources, token: Option<String>) -> Self {
        let zero = || AtomicU64::new(0);
        let Sources { published, heartbeat, attributions, session, commands, keeper, reader } = sources;
        Self {
            listen,
            published,
            heartbeat,
            governed: SharedSample::default(),
            listening: SharedListening::default(),
            leaks: SharedLeaks::default(),
            reclaim: SharedReclaim::default(),
            attach: SharedAttach::default(),
            delivery: SharedDelivery::default(),
            attributions,
            session,
            commands,
            keeper,
            reader,
            maps: Maps::default(),
            recorded: RecordedBlocks::default(),
            recording: tokio::sync::Mutex::new(()),
            profile_seconds_max: zero(),
            push: OnceLock::new(),
            debuginfod: OnceLock::new(),
            token: RwLock::new(token),
            requests: zero(),
            unauthorized: zero(),
            throttle: Mutex::default(),
            slowed: zero(),
            refused: zero(),
            displaced: zero(),
            late: zero(),
        }
    }

    /// Adds the counters of pushed profiles to the metrics. Only the first call counts.
    pub fn set_push(&self, counters: Arc<PushCounters>) {
        // An agent has one pusher.
        let _ = self.push.set(counters);
    }

    /// Adds the counters of fetched debug information to the metrics. Only the first call counts.
    pub fn set_debuginfod(&self, debuginfod: Arc<Debuginfod>) {
        // An agent has one.
        drop(self.debuginfod.set(debuginfod));
    }

    /// Allows recordings on request of at most `seconds_max`; 0 = none.
    pub fn allow_recordings(&self, seconds_max: u64) {
        self.profile_seconds_max.store(seconds_max, Ordering::Relaxed);
    }

    fn profile_seconds_max(&self) -> Option<u64> {
        Some(self.profile_seconds_max.load(Ordering::Relaxed)).filter(|&seconds| seconds > 0)
    }

    fn has_history(&self) -> bool {
        self.reader.is_some()
    }

    fn recent(&self) -> Vec<Record> {
        self.keeper.as_ref().map(Keeper::recent).unwrap_or_default()
    }

    fn keeper_counters(&self) -> KeeperCounters {
        self.keeper.as_ref().map(Keeper::counters).unwrap_or_default()
    }

    /// The address that is listened on.
    #[must_use]
    pub fn listen(&self) -> SocketAddr {
        self.listen
    }

    /// The governor thread's sample, for the metrics.
    #[must_use]
    pub fn governed(&self) -> SharedSample {
        Arc::clone(&self.governed)
    }

    /// The listener thread's sample, for the metrics.
    #[must_use]
    pub fn listening(&self) -> SharedListening {
        Arc::clone(&self.listening)
    }

    /// The leak-scanning thread's sample, for the metrics.
    #[must_use]
    pub fn leaks(&self) -> SharedLeaks {
        Arc::clone(&self.leaks)
    }

    /// The sample of the thread that gives memory back, for the metrics.
    #[must_use]
    pub fn reclaim(&self) -> SharedReclaim {
        Arc::clone(&self.reclaim)
    }

    /// The sample that the thread writes that brings the sampler to processes.
    #[must_use]
    pub fn attach(&self) -> SharedAttach {
        Arc::clone(&self.attach)
    }

    /// The sample of the runtime's plugin, for the metrics.
    #[must_use]
    pub fn delivery(&self) -> SharedDelivery {
        Arc::clone(&self.delivery)
    }

    /// Replaces the token.
    pub fn set_token(&self, token: Option<String>) {
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = token;
    }

    fn counters(&self) -> HttpCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        HttpCounters {
            requests: read(&self.requests),
            unauthorized: read(&self.unauthorized),
            slowed: read(&self.slowed),
            refused: read(&self.refused),
            displaced: read(&self.displaced),
            late: read(&self.late),
        }
    }
}

/// The paths that a listener serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    /// All paths.
    Everything,
    /// `/metrics`, `/healthz` and `/readyz`, which need no token.
    MetricsAndHealth,
    /// All paths, without a token, to those who may open the socket.
    EverythingToFriends,
}

/// The running server.
#[derive(Debug)]
pub struct Server {
    thread: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Server {
    /// Starts the thread `fragprof-http` on a bound socket, so that an address in use is the caller's error.
    ///
    /// # Errors
    /// If no thread, timer or poll descriptor can be created.
    pub fn start(bound: Bound, state: Arc<ServerState>, connections_max: usize, serves: Serves) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let is_loopback = match &bound {
            Bound::Tcp(listener) => listener.local_addr()?.ip().is_loopback(),
            Bound::Unix(_) => false,
        };
        let listener = {
            let _inside = runtime.enter();
            Limited::new(bound, connections_max, Arc::clone(&state))?
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let router = router(state, serves, is_loopback);
        let serve = move || {
            let until = async {
                // A message or a dropped sender both mean the end.
                let _ = stopped.await;
            };
            let service = router.into_make_service_with_connect_info::<Peer>();
            let served = runtime.block_on(axum::serve(listener, service).with_graceful_shutdown(until).into_future());
            if let Err(error) = served {
                tracing::error!("the HTTP server ended: {error}");
            }
        };
        let thread = std::thread::Builder::new().name("fragprof-http".into()).spawn(serve)?;
        Ok(Self { thread, stop })
    }

    /// Whether the thread has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Lets running requests finish, for at most `within`.
    pub fn stop(self, within: Duration) {
        // If this fails, it has ended already.
        let _ = self.stop.send(());
        let deadline = Instant::now() + within;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

/// `is_loopback`: only this machine can connect, but so can any page open in its browsers.
fn router(state: Arc<ServerState>, serves: Serves, is_loopback: bool) -> Router {
    let all = || api::routes().merge(pages::routes());
    let guarded = match serves {
        Serves::Everything => all().layer(from_fn_with_state(Arc::clone(&state), auth::check)),
        Serves::EverythingToFriends => all(),
        Serves::MetricsAndHealth => Router::new(),
    };
    let metrics = Router::new().route("/metrics", get(metrics_page));
    let metrics = if is_loopback { metrics.layer(from_fn_with_state(Arc::clone(&state), auth::check_metrics)) } else { metrics };
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .merge(metrics)
        .merge(guarded)
        .fallback(auth::not_found)
        .layer(from_fn(auth::keep_reserve))
        .layer(from_fn_with_state(Arc::clone(&state), auth::count))
        .with_state(state)
}

async fn metrics_page(State(state): State<Arc<ServerState>>) -> Response {
    let snapshot = state.published.load();
    let known = metrics::labels::Known::of(&snapshot);
    let mut tiers = metrics::governed::families(&lock(&state.governed), &known);
    tiers.extend(metrics::listening::families(&lock(&state.listening), &known));
    tiers.extend(metrics::leaks::families(&lock(&state.leaks), &known, Instant::now()));
    tiers.extend(metrics::reclaim::families(&lock(&state.reclaim)));
    tiers.extend(metrics::attach::families(&lock(&state.attach)));
    tiers.extend(metrics::delivery::families(&lock(&state.delivery)));
    let own = metrics::AgentCounters {
        http: state.counters(),
        keeper: state.keeper_counters(),
        push: state.push.get().map(Arc::as_ref),
        debuginfod: state.debuginfod.get().map(|debuginfod| debuginfod.counted()),
    };
    if snapshot.metrics_processes_max == 0 {
        tiers = tiers.into_iter().map(metrics::family::Family::without_processes).collect();
    }
    let text = metrics::exposition(&snapshot, &own, Instant::now()).and_then(|text| Ok(text + &metrics::text(tiers)?));
    match text {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn healthz(State(state): State<Arc<ServerState>>) -> Response {
    if state.heartbeat.is_alive() {
        "ok\n".into_response()
    } else {
        let silent_s = state.heartbeat.age().as_secs();
        (StatusCode::SERVICE_UNAVAILABLE, format!("the census thread has been silent for {silent_s} s\n")).into_response()
    }
}

async fn readyz(State(state): State<Arc<ServerState>>) -> Response {
    if state.published.load().first_round_done {
        "ok\n".into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the first round of censuses is not finished\n").into_response()
    }
}
