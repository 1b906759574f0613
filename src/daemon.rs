//! The daemon's life cycle: start, signals, reload, watchdog, stop. Runs on the main thread.

use std::io::{self, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use thiserror::Error;

use crate::agent::collect::{Collector, Command, Heartbeat, start};
use crate::agent::config::{
    AttachConfig, Config, ConfigError, CriSocket, GovernedConfig, LeaksConfig, ListeningConfig, ReclaimConfig, SymbolsConfig,
};
use crate::agent::delivery::DeliverySettings;
use crate::agent::notify::Notifier;
use crate::agent::push::{Destination, Pusher, Target};
use crate::agent::worker::Worker;
use crate::agent::{attach, delivery, governed, leaks, listening, privileges, reclaim, socket};
use crate::model::attribution::Attributions;
use crate::model::snapshot::Published;
use crate::server::listener::Bound;
use crate::server::{Server, ServerState, Serves, Sources};
use crate::session::shared::LazySession;
use crate::store::database::{Database, StoreError};
use crate::store::keeper::{Keeper, Settings};
use crate::store::read::Reader;
use crate::store::thin::Limits;
use crate::store::write::Writer;
use crate::symbol::debuginfod::{self, Debuginfod, SetupError};

/// Maximum wait for requests in progress and for the census thread at the end.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// A boot id has 36 characters.
const BOOT_ID_BYTES_MAX: u64 = 64;
/// Interval between two checks of the heartbeat without a watchdog.
const IDLE: Duration = Duration::from_secs(30);

/// Why the daemon cannot start.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The configuration is not valid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address cannot be used.
    #[error("cannot listen on {listen}: {source}; is another agent running? (server.listen)")]
    Listen {
        /// The address.
        listen: std::net::SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// The unix socket cannot be used.
    #[error("cannot listen on {path}: {source}; is another agent running, and does its directory exist? (server.socket)")]
    Socket {
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The history cannot be created, not even in memory.
    #[error(transparent)]
    History(StoreError),
    /// A bug in the program: its message is on standard error.
    #[error("the {0} thread ended by itself; please report this with the message above")]
    ThreadEnded(&'static str),
    /// A thread or a signal handler cannot be set up.
    #[error("cannot {what}: {source}")]
    System {
        /// The step that failed.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> AgentError {
    move |source| AgentError::System { what, source }
}

/// Runs until SIGTERM or SIGINT. `said` is called once with the address that the server listens on.
///
/// # Errors
/// If the daemon cannot start; once it runs, it does not fail.
pub fn run(path: Option<PathBuf>, said: impl FnOnce(std::net::SocketAddr)) -> Result<(), AgentError> {
    let config = Config::load(path.as_deref())?;
    let token = config.token()?;
    let notifier = Notifier::from_environment().map_err(system("reach the service manager"))?;
    let signals = Signals::listen().map_err(system("listen for signals"))?;
    limit_free_memory();

    let listen = config.server.listen;
    let bind = |listen| TcpListener::bind(listen).map_err(|source| AgentError::Listen { listen, source });
    let listener = bind(listen)?;
    let metrics_listener = config.server.metrics_listen.map(bind).transpose()?;
    let socket_path = config.server.socket(std::env::var("RUNTIME_DIRECTORY").ok().as_deref());
    let socket = socket_path.map(|path| socket::bind(&path).map_err(|source| AgentError::Socket { path, source })).transpose()?;
    privileges::reduce(config.attach.enabled || (config.reclaim.enabled && !config.reclaim.dry_run));
    let started = Instant::now();
    let published = Arc::new(Published::new(started));
    let heartbeat = Arc::new(Heartbeat::new(started));
    let attributions = Arc::new(Attributions::default());
    let address = listener.local_addr().map_err(system("learn the address"))?;
    let (keeper, store, reader) = history(&config, &published)?;
    let (commands, orders) = mpsc::channel();
    let tables_mib = config.governed.tables_mib.max(config.listening.tables_mib);
    let session = Arc::new(LazySession::new(u64::from(tables_mib) << 20));
    let recordings =
        governed::Sources { session: Arc::clone(&session), published: Arc::clone(&published), board: Arc::clone(&attributions) };
    let sources = Sources {
        published: Arc::clone(&published),
        heartbeat: Arc::clone(&heartbeat),
        attributions: Arc::clone(&attributions),
        session,
        commands: commands.clone(),
        keeper: Some(keeper.clone()),
        reader: Some(reader),
    };
    let state = Arc::new(ServerState::new(address, sources, token));
    allow_recordings(&state, &config);
    // Before the first recording names anything.
    look_for_debug_information(&config.symbols, &state)?;
    let connections_max = config.server.connections_max;
    let serve = |listener, what| Server::start(listener, Arc::clone(&state), connections_max, what).map_err(system("serve"));
    let mut servers = vec![serve(Bound::Tcp(listener), Serves::Everything)?];
    if let Some(listener) = metrics_listener {
        servers.push(serve(Bound::Tcp(listener), Serves::MetricsAndHealth)?);
    }
    let _socket_file = match socket {
        Some((listener, file)) => {
            servers.push(serve(Bound::Unix(listener), Serves::EverythingToFriends)?);
            Some(file)
        }
        None => None,
    };
    said(address);

    let workers = Workers::start(&config, recordings, &keeper, &state)?;
    let pusher = pusher(&config, &published)?;
    if let Some(pusher) = &pusher {
        state.set_push(Arc::clone(&pusher.counters));
    }
    let collector = Collector::new(config, published, heartbeat.clone(), attributions).with_keeper(keeper.clone());
    let census = start(collector, orders).map_err(system("start the census thread"))?;
    notifier.send("READY=1\nSTATUS=watching");

    let every = notifier.watchdog().map_or(IDLE, |watchdog| watchdog / 3);
    loop {
        signals.wait(every);
        if signals.stop.load(Ordering::Relaxed) {
            break;
        }
        if signals.reload.swap(false, Ordering::Relaxed) {
            reload(path.as_deref(), &state, &commands, &workers, &notifier);
        }
        if census.is_finished() {
            return Err(AgentError::ThreadEnded("census"));
        }
        if let Some(ended) = workers.ended() {
            return Err(AgentError::ThreadEnded(ended));
        }
        if servers.iter().any(Server::is_finished) {
            return Err(AgentError::ThreadEnded("HTTP"));
        }
        if heartbeat.is_alive() {
            notifier.send("WATCHDOG=1");
        } else {
            tracing::error!("the census thread has been silent for {:?}", heartbeat.age());
        }
    }
    notifier.send("STOPPING=1");
    // The thread has nothing to save: if it is in a long walk, the process ends without waiting for it.
    let _ = commands.send(Command::Stop);
    workers.stop();
    if let Some(pusher) = &pusher {
        pusher.stop();
    }
    for server in servers {
        server.stop(STOP_WITHIN);
    }
    // Last: it closes the history for its readers, and merges its log.
    keeper.stop();
    let deadline = Instant::now() + STOP_WITHIN;
    while !(census.is_finished() && store.is_finished() && pusher.as_ref().is_none_or(Pusher::is_finished)) && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    Ok(())
}

/// Starts sending profiles if a server is configured.
fn pusher(config: &Config, published: &Arc<Published>) -> Result<Option<Pusher>, AgentError> {
    let Some(destination) = Destination::open(&config.push)? else { return Ok(None) };
    let target = Target {
        destination,
        protocol: config.push.protocol,
        interval: Duration::from_secs(config.push.interval_s),
        stacks_max: config.push.stacks_max,
        bytes_per_day_max: (config.push.mib_per_day_max > 0).then_some(config.push.mib_per_day_max << 20),
        spool_directory: config.push.spool(std::env::var("STATE_DIRECTORY").ok().as_deref()),
        labels: config.push.labels.clone(),
    };
    Pusher::start(target, Arc::clone(published)).map(Some).map_err(system("start the thread that sends profiles"))
}

/// Lets the recordings look for debug information if there are servers of it.
fn look_for_debug_information(config: &SymbolsConfig, state: &ServerState) -> Result<(), ConfigError> {
    let variable = |name| std::env::var(name).ok();
    let (urls, notes) = config.urls(variable(debuginfod::URLS_VARIABLE).as_deref());
    notes.iter().for_each(|note| tracing::warn!("{note}"));
    if urls.is_empty() {
        return Ok(());
    }
    let settings = debuginfod::Settings {
        urls,
        authorities: config.authorities()?,
        cache_directory: config.cache(variable("STATE_DIRECTORY").as_deref()),
        cache_bytes_max: config.cache_mib_max << 20,
        open_bytes_max: config.open_mib_max << 20,
        patience: None,
    };
    match Debuginfod::new(settings) {
        Ok(debuginfod) => {
            let debuginfod = Arc::new(debuginfod);
            state.set_debuginfod(Arc::clone(&debuginfod));
            debuginfod::install(debuginfod);
        }
        Err(SetupError::Server(error)) if config.debuginfod_urls.is_some() => {
            return Err(ConfigError::Setting { key: "symbols.debuginfod_urls", reason: error.to_string() });
        }
        // It is worth less than the agent.
        Err(error) => tracing::warn!("{error}; files without symbols have no names until the next start"),
    }
    Ok(())
}

fn allow_recordings(state: &ServerState, config: &Config) {
    state.allow_recordings(if config.profile.on_demand { config.profile.seconds_max } else { 0 });
}

/// Starts the history: on disk if there is a location for it, otherwise in memory.
fn history(config: &Config, published: &Arc<Published>) -> Result<(Keeper, JoinHandle<()>, Reader), AgentError> {
    let place = config.history.place(std::env::var("STATE_DIRECTORY").ok().as_deref());
    let on_disk = place.map(|directory| Database::open_both(&directory)).transpose();
    let opened = on_disk.unwrap_or_else(|error: StoreError| {
        tracing::warn!("{error}; history is kept in memory until the next start");
        None
    });
    let (write, read, size_max_mib) = match opened {
        Some((write, read)) => (write, read, config.history.size_max_mib),
        None => {
            let memory = Database::in_memory().map_err(AgentError::History)?;
            (memory.clone(), memory, config.history.memory_max_mib)
        }
    };
    let boot_id = crate::process::handle::read_bounded(Path::new("/proc/sys/kernel/random/boot_id"), BOOT_ID_BYTES_MAX).unwrap_or_default();
    let writer = Writer::new(write, String::from_utf8_lossy(&boot_id).trim().to_owned());
    let settings = Settings {
        sample_interval: Duration::from_secs(config.history.sample_interval_s),
        profile_interval: Duration::from_secs(config.history.profile_interval_s),
        limits: Limits {
            size_bytes_max: size_max_mib << 20,
            age_s_max: i64::try_from(config.history.age_max_days).unwrap_or(i64::MAX).saturating_mul(86400),
        },
    };
    let (keeper, thread) = Keeper::start(writer, Arc::clone(published), settings).map_err(system("start the history's thread"))?;
    Ok((keeper, thread, Reader::new(read)))
}

/// The threads beside the census, each with its own part of the configuration.
struct Workers {
    governor: Worker<GovernedConfig>,
    listener: Worker<ListeningConfig>,
    looker: Worker<LeaksConfig>,
    reclaimer: Worker<ReclaimConfig>,
    attacher: Worker<AttachConfig>,
    deliverer: Worker<DeliverySettings>,
}

impl Workers {
    fn start(config: &Config, recordings: governed::Sources, keeper: &Keeper, state: &ServerState) -> Result<Self, AgentError> {
        let (published, board) = (|| Arc::clone(&recordings.published), || Arc::clone(&recordings.board));
        let governor = governed::start(
            config.governed.clone(),
            config.census.memory_max_mib << 20,
            config.history.place(std::env::var("STATE_DIRECTORY").ok().as_deref()),
            recordings.clone(),
            state.governed(),
        );
        Ok(Self {
            governor: governor.map_err(system("start the governor's thread"))?,
            listener: listening::start(config.listening.clone(), recordings.clone(), state.listening())
                .map_err(system("start the listener's thread"))?,
            looker: leaks::start(config.leaks.clone(), published(), board(), state.leaks())
                .map_err(system("start the thread that scans for leaks"))?,
            reclaimer: reclaim::start(config.reclaim.clone(), published(), Some(keeper.clone()), state.reclaim())
                .map_err(system("start the thread that gives memory back"))?,
            attacher: attach::start(config.attach.clone(), published(), board(), state.attach())
                .map_err(system("start the thread that attaches the sampler"))?,
            deliverer: delivery::start(delivery_settings(config), state.delivery()).map_err(system("start the runtime's plugin"))?,
        })
    }

    fn reload(&self, config: &Config) {
        self.governor.reload(config.governed.clone());
        self.listener.reload(config.listening.clone());
        self.looker.reload(config.leaks.clone());
        self.reclaimer.reload(config.reclaim.clone());
        self.attacher.reload(config.attach.clone());
        self.deliverer.reload(delivery_settings(config));
    }

    /// One that has ended by itself.
    fn ended(&self) -> Option<&'static str> {
        let all = [
            ("governor", self.governor.is_finished()),
            ("listener", self.listener.is_finished()),
            ("leaks", self.looker.is_finished()),
            ("reclaim", self.reclaimer.is_finished()),
            ("attach", self.attacher.is_finished()),
            ("delivery", self.deliverer.is_finished()),
        ];
        all.into_iter().find_map(|(name, is_finished)| is_finished.then_some(name))
    }

    fn stop(self) {
        self.governor.stop(STOP_WITHIN);
        self.listener.stop(STOP_WITHIN);
        // An examination in progress has nothing to detach, nor has a call: the process ends without waiting for them.
        self.looker.stop(Duration::ZERO);
        self.reclaimer.stop(Duration::ZERO);
        self.attacher.stop(Duration::ZERO);
        self.deliverer.stop(STOP_WITHIN);
    }
}

fn delivery_settings(config: &Config) -> DeliverySettings {
    let runtime = match &config.containers.cri {
        CriSocket::Path(path) => Some(path.clone()),
        _ => None,
    };
    DeliverySettings { config: config.delivery.clone(), runtime }
}

/// Reads the configuration again. An invalid one changes nothing.
fn reload(path: Option<&Path>, state: &ServerState, commands: &mpsc::Sender<Command>, workers: &Workers, notifier: &Notifier) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_us = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    notifier.send(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}"));
    let usable = |config: Config| {
        let token = config.token()?;
        // The address stays the same until a restart, whatever the new configuration says.
        match token {
            None if !state.listen().ip().is_loopback() => Err(ConfigError::NoToken { listen: state.listen() }),
            token => Ok((config, token)),
        }
    };
    let loaded = Config::load(path).and_then(usable);
    let order = match loaded {
        Ok((config, token)) => {
            state.set_token(token);
            workers.reload(&config);
            allow_recordings(state, &config);
            Command::Reload(Box::new(config))
        }
        Err(error) => {
            tracing::error!("the configuration is unchanged: {error}");
            Command::ReloadFailed
        }
    };
    // If the thread has ended, the watchdog reports it.
    let _ = commands.send(order);
    notifier.send("READY=1");
}

/// Signals as flags, and a pipe that wakes the main thread.
struct Signals {
    stop: Arc<AtomicBool>,
    reload: Arc<AtomicBool>,
    woken: UnixStream,
}

impl Signals {
    fn listen() -> io::Result<Self> {
        let (woken, waker) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let reload = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // A second signal ends the process immediately.
            signal_hook::flag::register_conditional_default(signal, Arc::clone(&stop))?;
            signal_hook::flag::register(signal, Arc::clone(&stop))?;
        }
        signal_hook::flag::register(SIGHUP, Arc::clone(&reload))?;
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            signal_hook::low_level::pipe::register(signal, waker.try_clone()?)?;
        }
        Ok(Self { stop, reload, woken })
    }

    fn wait(&self, most: Duration) {
        let timeout = most.try_into().ok();
        // An interrupted wait is equivalent to a completed one: the flags show what happened.
        let _ = poll(&mut [PollFd::new(&self.woken, PollFlags::IN)], timeout.as_ref());
        let mut drained = [0; 64];
        while (&self.woken).read(&mut drained).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// Blocks of as many bytes are mapped, and as many free bytes at the end of a heap are returned. Left to itself, glibc raises the first to the
/// size of a large block that was freed, and the second to twice that (malloc/malloc.c, `__libc_free`).
#[cfg(target_env = "gnu")]
const LARGE_BYTES: libc::c_int = 1 << 20;

/// Few arenas, and limits of what they keep.
fn limit_free_memory() {
    // SAFETY: glibc's own function, called before other threads allocate.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, LARGE_BYTES);
    }
}
