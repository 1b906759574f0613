//! The daemon's life: start, signals, reload, watchdog, stop. Runs on the main thread.

use std::io::{self, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use thiserror::Error;

use super::collect::{Collector, Command, Heartbeat, start};
use super::config::{Config, ConfigError};
use super::governed::GovernorThread;
use super::notify::Notifier;
use super::privileges;
use super::sample::Published;
use crate::server::{Server, ServerState, Serves};

/// Time given to requests under way and to the census thread at the end.
const STOP_WITHIN: Duration = Duration::from_secs(2);
/// Time between two looks at the heartbeat without a watchdog.
const IDLE: Duration = Duration::from_secs(30);

/// Why the daemon cannot start.
#[derive(Debug, Error)]
pub enum AgentError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The address.
    #[error("cannot listen on {listen}: {source}; is another agent running? (server.listen)")]
    Listen {
        /// The address.
        listen: std::net::SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A fault of the program: its message is on standard error.
    #[error("the {0} thread ended by itself; please report this with the message above")]
    ThreadEnded(&'static str),
    /// Threads, signals.
    #[error("cannot {what}: {source}")]
    System {
        /// What could not be had.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl Fn(io::Error) -> AgentError {
    move |source| AgentError::System { what, source }
}

/// Runs until SIGTERM or SIGINT. `said` is called once with the address that is listened on.
///
/// # Errors
/// If the daemon cannot start; once it runs, it does not fail.
pub fn run(path: Option<PathBuf>, said: impl FnOnce(std::net::SocketAddr)) -> Result<(), AgentError> {
    let config = Config::load(path.as_deref())?;
    let token = config.token()?;
    let notifier = Notifier::from_environment().map_err(system("reach the service manager"))?;
    let signals = Signals::listen().map_err(system("listen for signals"))?;
    limit_arenas();

    let listen = config.server.listen;
    let bind = |listen| TcpListener::bind(listen).map_err(|source| AgentError::Listen { listen, source });
    let listener = bind(listen)?;
    let metrics_listener = config.server.metrics_listen.map(bind).transpose()?;
    privileges::reduce();
    let started = Instant::now();
    let published = Arc::new(Published::new(started));
    let heartbeat = Arc::new(Heartbeat::new(started));
    let address = listener.local_addr().map_err(system("learn the address"))?;
    let state = Arc::new(ServerState::new(address, Arc::clone(&published), Arc::clone(&heartbeat), token));
    let connections_max = config.server.connections_max;
    let serve = |listener, what| Server::start(listener, Arc::clone(&state), connections_max, what).map_err(system("serve"));
    let server = serve(listener, Serves::Everything)?;
    let metrics_server = metrics_listener.map(|listener| serve(listener, Serves::MetricsAndHealth)).transpose()?;
    said(address);

    let (commands, orders) = mpsc::channel();
    let governor =
        GovernorThread::start(config.governed.clone(), config.census.memory_max_mib << 20, Arc::clone(&published), state.governed())
            .map_err(system("start the governor's thread"))?;
    let collector = Collector::new(config, Arc::clone(&published), Arc::clone(&heartbeat));
    let census = start(collector, orders).map_err(system("start the census thread"))?;
    notifier.send("READY=1\nSTATUS=watching");

    let every = notifier.watchdog().map_or(IDLE, |watchdog| watchdog / 3);
    loop {
        signals.wait(every);
        if signals.stop.load(Ordering::Relaxed) {
            break;
        }
        if signals.reload.swap(false, Ordering::Relaxed) {
            reload(path.as_deref(), &state, &commands, &governor, &notifier);
        }
        if census.is_finished() {
            return Err(AgentError::ThreadEnded("census"));
        }
        if governor.is_finished() {
            return Err(AgentError::ThreadEnded("governor"));
        }
        if server.is_finished() || metrics_server.as_ref().is_some_and(Server::is_finished) {
            return Err(AgentError::ThreadEnded("HTTP"));
        }
        if heartbeat.is_alive() {
            notifier.send("WATCHDOG=1");
        } else {
            tracing::error!("the census thread has been silent for {:?}", heartbeat.age());
        }
    }
    notifier.send("STOPPING=1");
    // The thread has nothing to save: if it is in the middle of a long walk, the process ends without it.
    let _ = commands.send(Command::Stop);
    governor.stop(STOP_WITHIN);
    server.stop(STOP_WITHIN);
    if let Some(server) = metrics_server {
        server.stop(STOP_WITHIN);
    }
    let deadline = Instant::now() + STOP_WITHIN;
    while !census.is_finished() && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(10));
    }
    Ok(())
}

/// Reads the configuration again. One that cannot be used changes nothing.
fn reload(path: Option<&Path>, state: &ServerState, commands: &mpsc::Sender<Command>, governor: &GovernorThread, notifier: &Notifier) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now_us = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
    notifier.send(&format!("RELOADING=1\nMONOTONIC_USEC={now_us}"));
    let usable = |config: Config| {
        let token = config.token()?;
        // The address stays until a restart, whatever the new configuration says.
        match token {
            None if !state.listen().ip().is_loopback() => Err(ConfigError::NoToken { listen: state.listen() }),
            token => Ok((config, token)),
        }
    };
    let loaded = Config::load(path).and_then(usable);
    let order = match loaded {
        Ok((config, token)) => {
            state.set_token(token);
            governor.reload(config.governed.clone());
            Command::Reload(Box::new(config))
        }
        Err(error) => {
            tracing::error!("the configuration stays as it was: {error}");
            Command::ReloadFailed
        }
    };
    // The thread is gone only when the watchdog will say so.
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
            // A second one ends the process at once.
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
        // An interrupted wait is as good as a finished one: the flags say what happened.
        let _ = poll(&mut [PollFd::new(&self.woken, PollFlags::IN)], timeout.as_ref());
        let mut drained = [0; 64];
        while (&self.woken).read(&mut drained).is_ok_and(|bytes| bytes > 0) {}
    }
}

/// Two arenas suffice for three threads; more would only hold free memory.
fn limit_arenas() {
    // SAFETY: glibc's own function, called before other threads allocate.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}
