//! Names of pods and containers from the container runtime of this machine, through the socket that the kubelet uses (CRI v1: containerd,
//! CRI-O). No permissions in the cluster are needed.
//!
//! The thread `fragprof-cri` requests names when a container without a name was seen, and once a minute, with growing pauses while that
//! fails. It only requests lists. If the socket is missing, slow or broken, only names are missing: the census thread reads the last list and
//! never waits.

pub mod client;
pub mod messages;
pub mod names;
#[cfg(test)]
mod recorded;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::model::counters::CriStatus;

pub use client::{Client, CriError};
pub use names::Directory;

/// Default sockets of the runtimes: containerd, k3s and RKE2, MicroK8s, CRI-O, Docker by cri-dockerd.
const USUAL: [&str; 5] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
    "/run/cri-dockerd.sock",
];
/// The machine's file system, as seen from a container with the machine's pid namespace.
pub const MACHINE: &str = "/proc/1/root";
/// Time between two requests while no new container is seen: names do not change, but ended containers are dropped.
const REST: Duration = Duration::from_secs(60);
/// Shortest time between two requests.
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// Longest pause after a failed request.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// State shared by the thread and its readers.
#[derive(Debug, Default)]
struct Shared {
    directory: Arc<Directory>,
    status: CriStatus,
}

/// The handle of the thread. When it is dropped the thread ends.
#[derive(Debug)]
pub struct Cri {
    shared: Arc<Mutex<Shared>>,
    wake: SyncSender<()>,
}

impl Cri {
    /// Starts the thread. It uses `socket`, here or on the machine, or the first default socket that exists.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(socket: Option<PathBuf>) -> std::io::Result<Self> {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (wake, woken) = sync_channel(1);
        let theirs = Arc::clone(&shared);
        std::thread::Builder::new().name("fragprof-cri".into()).spawn(move || work(socket.as_deref(), &theirs, &woken))?;
        Ok(Self { shared, wake })
    }

    /// The last list.
    #[must_use]
    pub fn directory(&self) -> Arc<Directory> {
        Arc::clone(&lock(&self.shared).directory)
    }

    /// The state of the runtime.
    #[must_use]
    pub fn status(&self) -> CriStatus {
        lock(&self.shared).status
    }

    /// Notes that a container without a name was seen.
    pub fn want(&self) {
        // Full means that it is noted already; the thread has ended only if it could not start its timers.
        let _ = self.wake.try_send(());
    }
}

fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn work(socket: Option<&Path>, shared: &Mutex<Shared>, woken: &Receiver<()>) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::warn!("container names are not available: cannot start timers: {error}");
            return;
        }
    };
    let mut pause = PAUSE_MIN;
    loop {
        let asked = Instant::now();
        let answer = socket.map(named).or_else(usual).map(|path| runtime.block_on(ask(&path)));
        pause = match &answer {
            Some(Err(_)) | None => (pause * 2).min(PAUSE_MAX),
            Some(Ok(_)) => PAUSE_MIN,
        };
        keep(shared, answer);
        // Neither a new container nor a failing runtime causes continuous requests.
        let rest = REST.max(pause);
        match woken.recv_timeout(rest) {
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) => {
                let left = pause.saturating_sub(asked.elapsed());
                if !left.is_zero() && is_over(woken, left) {
                    return;
                }
            }
        }
    }
}

/// Waits, whatever is noted meanwhile; true if the handle was dropped.
fn is_over(woken: &Receiver<()>, wait: Duration) -> bool {
    let until = Instant::now() + wait;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match woken.recv_timeout(left) {
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => return false,
            Ok(()) => {}
        }
    }
}

async fn ask(path: &Path) -> Result<Directory, CriError> {
    Client::connect(path).await?.directory().await
}

/// A path in the file system of the machine whose pid namespace this is.
fn on_machine(path: &Path) -> PathBuf {
    Path::new(MACHINE).join(path.strip_prefix("/").unwrap_or(path))
}

/// The socket that is used: that of a configuration, here or on the machine, or the first default one that exists.
#[must_use]
pub fn socket(configured: Option<&Path>) -> Option<PathBuf> {
    configured.map(named).or_else(usual)
}

/// A path here if it exists here, otherwise on the machine.
#[must_use]
pub fn here_or_on_machine(path: &Path) -> PathBuf {
    named(path)
}

/// The socket of this path: here, or on the machine. If neither exists, the error is that of the first.
fn named(path: &Path) -> PathBuf {
    [path.to_owned(), on_machine(path)].into_iter().find(|path| path.exists()).unwrap_or_else(|| path.to_owned())
}

/// The first default socket that exists, here or on the machine.
fn usual() -> Option<PathBuf> {
    let here = USUAL.iter().map(PathBuf::from);
    let machine = USUAL.iter().map(|path| on_machine(Path::new(path)));
    here.chain(machine).find(|path| path.exists())
}

fn keep(shared: &Mutex<Shared>, answer: Option<Result<Directory, CriError>>) {
    let mut shared = lock(shared);
    match answer {
        None => shared.status.up = None,
        Some(Ok(directory)) => {
            shared.status.up = Some(true);
            shared.status.answers += 1;
            shared.status.containers = directory.len() as u64;
            shared.status.refused += directory.refused;
            shared.directory = Arc::new(directory);
        }
        Some(Err(error)) => {
            // Once only: an agent without a runtime may run for months.
            match shared.status.up {
                Some(false) => tracing::debug!("container names are not available: {error}"),
                _ => tracing::warn!("container names are not available: {error}"),
            }
            shared.status.up = Some(false);
            shared.status.failures += 1;
        }
    }
}
