//! Starts the containers of pods that ask for it with the sampler: a plugin of the container runtime (NRI), off by default.
//!
//! ```text
//! runtime ── CreateContainer ─→ plugin ─→ decide: label or namespace? ── no ─→ untouched, at once
//!                                           └─ yes ─→ rootfs (layers of its snapshot) ─→ program, linker ─→ mount and LD_PRELOAD
//! ```
//!
//! The runtime waits for the answer, so everything is bounded: files are examined by a thread of their own, and after [`DECIDE_WITHIN`] the
//! container starts untouched. If the agent is not there, the runtime does not ask; if it stands still, the runtime gives up on it after its
//! own limit (two seconds by default) and drops it. The agent connects again. Containers that run are never changed.

pub mod decide;
pub mod frame;
pub mod messages;
pub mod plugin;
pub mod rootfs;

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use self::decide::Refusal;
use self::messages::{ConfigureRequest, Container, ContainerAdjustment, CreateContainerRequest, PodSandbox};
use self::plugin::{Handler, PluginError};
use super::config::DeliveryConfig;
use super::cri;
use super::worker::{Worker, lock};
use crate::inject::audit::{By, TARGET};
use crate::model::counters::DeliverySample;
use crate::sampler::image::ImageFit;
use crate::sampler::library::{self, Flavour};
use crate::sampler::root::{Root, RootError};
use crate::sanitize::terminal;

/// Longest time for which a container's start waits: half of the runtime's own limit, after which it drops the plugin.
const DECIDE_WITHIN: Duration = Duration::from_secs(1);
/// Threads that examine files, of containers whose time was up included: a file system that hangs must not collect them.
const EXAMINED_MAX: usize = 4;
/// Pauses between two attempts to connect, doubled up to the longest.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// The sample that the thread writes and `/metrics` reads.
pub type SharedDelivery = Arc<Mutex<DeliverySample>>;

/// The settings of the thread.
#[derive(Debug, Clone, PartialEq)]
pub struct DeliverySettings {
    /// Its own section.
    pub config: DeliveryConfig,
    /// `containers.cri`: the runtime's socket; `None` = the first usual one that exists.
    pub runtime: Option<PathBuf>,
}

/// Starts the thread.
///
/// # Errors
/// If no thread can be started.
pub fn start(settings: DeliverySettings, sample: SharedDelivery) -> io::Result<Worker<DeliverySettings>> {
    Worker::start("fragprof-nri", move |orders| run(settings, &sample, orders))
}

fn run(mut settings: DeliverySettings, sample: &SharedDelivery, orders: &Receiver<DeliverySettings>) {
    let examined = Arc::new(AtomicUsize::new(0));
    let mut pause = PAUSE_MIN;
    let mut was_told = false;
    loop {
        {
            let mut sample = lock(sample);
            (sample.enabled, sample.is_connected) = (settings.config.enabled, false);
        }
        let wait = if settings.config.enabled {
            let mut deliverer = Deliverer::new(&settings, sample, orders, &examined);
            let done = plugin::serve(&cri::here_or_on_machine(&settings.config.socket), &mut deliverer);
            let (next, has_ended, was_connected) = (deliverer.next, deliverer.has_ended, deliverer.was_connected);
            if has_ended {
                return;
            }
            lock(sample).is_connected = false;
            if let Some(next) = next {
                (settings, pause, was_told) = (next, PAUSE_MIN, false);
                continue;
            }
            if let Err(error) = done {
                lock(sample).connections_lost += 1;
                tell(&error, was_told && !was_connected);
                was_told = true;
            }
            pause = if was_connected { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
            pause
        } else {
            Duration::MAX
        };
        // A disabled one waits for other settings.
        let received =
            if wait == Duration::MAX { orders.recv().map_err(|_| RecvTimeoutError::Disconnected) } else { orders.recv_timeout(wait) };
        match received {
            Ok(next) => (settings, pause, was_told) = (next, PAUSE_MIN, false),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Once loudly: a runtime without NRI may run for months.
fn tell(error: &PluginError, again: bool) {
    if again {
        tracing::debug!("containers start without the sampler: {error}");
    } else {
        tracing::warn!("containers start without the sampler: {error}; the connection is tried again");
    }
}

struct Deliverer<'a> {
    settings: &'a DeliverySettings,
    sample: &'a SharedDelivery,
    orders: &'a Receiver<DeliverySettings>,
    examined: &'a Arc<AtomicUsize>,
    next: Option<DeliverySettings>,
    has_ended: bool,
    was_connected: bool,
}

impl Handler for Deliverer<'_> {
    fn connected(&mut self, runtime: &ConfigureRequest) {
        self.was_connected = true;
        lock(self.sample).is_connected = true;
        tracing::info!("connected to {} {}", terminal(&runtime.runtime_name), terminal(&runtime.runtime_version));
        if runtime.request_timeout_ms > 0 && u128::from(runtime.request_timeout_ms.unsigned_abs()) <= DECIDE_WITHIN.as_millis() {
            tracing::warn!(
                "the runtime waits for plugins for {} ms only, and drops one that takes longer: plugin_request_timeout should be 2s",
                runtime.request_timeout_ms
            );
        }
    }

    fn create(&mut self, request: &CreateContainerRequest) -> Option<ContainerAdjustment> {
        let (pod, container) = (request.pod.as_ref()?, request.container.as_ref()?);
        let started = Instant::now();
        let config = &self.settings.config;
        let decided = match decide::is_wanted(pod, &config.label, &config.namespaces) {
            Ok(false) => {
                lock(self.sample).not_asked += 1;
                return None;
            }
            Ok(true) => self.examine(container, started + DECIDE_WITHIN),
            Err(refusal) => Err(refusal),
        };
        self.count(pod, container, &decided, started.elapsed());
        let fit = decided.ok()?;
        Some(decide::adjustment(container, &fit, &config.directory, config.sample_bytes))
    }

    fn not_understood(&mut self, method: &str) {
        lock(self.sample).not_understood += 1;
        tracing::debug!("not understood: {}", terminal(method));
    }

    fn goes_on(&mut self) -> bool {
        match self.orders.try_recv() {
            // A change elsewhere in the configuration is no reason to be away for a moment.
            Ok(next) => self.next = (next != *self.settings).then_some(next),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => self.has_ended = true,
        }
        !self.has_ended && self.next.is_none()
    }
}

impl<'a> Deliverer<'a> {
    fn new(
        settings: &'a DeliverySettings,
        sample: &'a SharedDelivery,
        orders: &'a Receiver<DeliverySettings>,
        examined: &'a Arc<AtomicUsize>,
    ) -> Self {
        Self { settings, sample, orders, examined, next: None, has_ended: false, was_connected: false }
    }

    /// Examines the container's files on a thread of its own, until the deadline.
    fn examine(&self, container: &Container, deadline: Instant) -> Result<ImageFit, Refusal> {
        let now = self.examined.load(Ordering::Acquire);
        if now >= EXAMINED_MAX {
            return Err(Refusal::Busy(now));
        }
        let guard = Counted::new(self.examined);
        let (container, settings) = (container.clone(), self.settings.clone());
        let (answers, answer) = channel();
        let work = move || {
            let _guard = guard;
            // Nobody listens any more if it took too long.
            let _ = answers.send(examine(&container, &settings));
        };
        std::thread::Builder::new()
            .name("fragprof-image".into())
            .spawn(work)
            .map_err(|error| Refusal::Root(format!("no thread can be started: {error}")))?;
        match answer.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(decided) => decided,
            Err(RecvTimeoutError::Timeout) => Err(Refusal::TooSlow(DECIDE_WITHIN.as_millis())),
            Err(RecvTimeoutError::Disconnected) => Err(Refusal::Root("the examination failed".to_owned())),
        }
    }

    fn count(&self, pod: &PodSandbox, container: &Container, decided: &Result<ImageFit, Refusal>, took: Duration) {
        let mut sample = lock(self.sample);
        sample.took_s += took.as_secs_f64();
        sample.longest_s = sample.longest_s.max(took.as_secs_f64());
        let by = By::Policy("delivery");
        let name = format!("{} of {}/{}", container.name, pod.namespace, pod.name);
        let name = terminal(&name);
        match decided {
            Ok(fit) => {
                *sample.delivered.entry(fit.libc.name()).or_default() += 1;
                let doubts = fit.doubts.join("; ");
                let program = fit.program.display().to_string();
                let (program, file, libc) = (terminal(&program), fit.flavour.file_name(), fit.libc.name());
                tracing::info!(target: TARGET, "container {name} starts with {file}: {program} ({libc}) ({by}){}{doubts}", if doubts.is_empty() { "" } else { ": " });
            }
            Err(refusal) => {
                *sample.refused.entry(refusal.name()).or_default() += 1;
                let reason = refusal.to_string();
                tracing::info!(target: TARGET, "container {name} starts untouched ({}): {} ({by})", refusal.name(), terminal(&reason));
            }
        }
    }
}

fn examine(container: &Container, settings: &DeliverySettings) -> Result<ImageFit, Refusal> {
    let rootfs = rootfs::find(settings.runtime.as_deref(), &settings.config.snapshotter, &container.id)?;
    let fit = decide::examine(container, &rootfs.root)?;
    // Written again if it is gone, or of another version.
    place(&settings.config.directory, fit.flavour, &Root::directory(cri::MACHINE), rootfs.is_here)?;
    Ok(fit)
}

/// Writes the library into the node's directory. It must be the machine's, not one of the agent's own container: the runtime would not find
/// what it is to mount, and not start the container. Where the machine's first process may not be asked, an agent that `is_on_machine` by
/// its other paths is believed to be.
fn place(directory: &Path, flavour: Flavour, machine: &Root, is_on_machine: bool) -> Result<(), Refusal> {
    let path = library::place_at(directory, flavour).map_err(|error| Refusal::Library(error.to_string()))?;
    let own = std::fs::metadata(&path).map_err(|error| Refusal::Library(error.to_string()))?;
    match machine.find(&path) {
        Ok(found) if (found.metadata.dev(), found.metadata.ino()) == (own.dev(), own.ino()) => Ok(()),
        Ok(_) => Err(Refusal::Library("the node has another directory of this path: mount it into the agent's container".to_owned())),
        Err(RootError::Io { source, .. }) if is_on_machine && source.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        Err(error) => {
            Err(Refusal::Library(format!("the node does not have it ({error}): mount it into the agent's container by the same path")))
        }
    }
}

/// One of the threads that are counted.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_container_starts_untouched_after_a_second_whatever_hangs() {
        let directory = tempfile::tempdir().unwrap();
        let runtime = directory.path().join("containerd.sock");
        // It takes connections, and never answers.
        let _listener = UnixListener::bind(&runtime).unwrap();
        let config = DeliveryConfig { directory: directory.path().join("library"), ..DeliveryConfig::default() };
        let label = (config.label.clone(), "true".to_owned());
        let settings = DeliverySettings { config, runtime: Some(runtime) };
        let (sample, (_orders, receiver)) = (SharedDelivery::default(), channel());
        let examined = Arc::new(AtomicUsize::new(0));
        let mut deliverer = Deliverer::new(&settings, &sample, &receiver, &examined);
        let pod = PodSandbox { labels: [label].into(), ..PodSandbox::default() };
        let request = CreateContainerRequest { pod: Some(pod), container: Some(Container::default()) };
        let started = Instant::now();
        assert!(deliverer.create(&request).is_none());
        let took = started.elapsed();
        assert!(took < DECIDE_WITHIN * 2, "{took:?}");
        assert_eq!(lock(&sample).refused.get("too_slow"), Some(&1));
        // Those that still hang are not joined by more and more.
        examined.store(EXAMINED_MAX, Ordering::Release);
        assert!(deliverer.create(&request).is_none());
        assert_eq!(lock(&sample).refused.get("busy"), Some(&1));
        assert!(deliverer.create(&CreateContainerRequest { pod: Some(PodSandbox::default()), ..request }).is_none());
        assert_eq!(lock(&sample).not_asked, 1);
    }

    #[test]
    fn a_directory_that_the_node_does_not_have_is_refused() {
        let (node, pod) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let directory = pod.path().join("library");
        let inside = node.path().join(directory.strip_prefix("/").unwrap());
        let place = |machine: &Root| place(&directory, Flavour::Standard, machine, true);
        assert_eq!(place(&Root::directory(node.path())).unwrap_err().name(), "library");
        // The same path, but not the same directory.
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::copy(directory.join(Flavour::Standard.file_name()), inside.join(Flavour::Standard.file_name())).unwrap();
        assert_eq!(place(&Root::directory(node.path())).unwrap_err().name(), "library");
        place(&Root::directory("/")).unwrap();
    }

    #[test]
    fn other_settings_elsewhere_do_not_end_the_connection() {
        let settings = DeliverySettings { config: DeliveryConfig::default(), runtime: None };
        let (sample, (orders, receiver)) = (SharedDelivery::default(), channel());
        let examined = Arc::new(AtomicUsize::new(0));
        let mut deliverer = Deliverer::new(&settings, &sample, &receiver, &examined);
        orders.send(settings.clone()).unwrap();
        assert!(deliverer.goes_on());
        orders.send(DeliverySettings { runtime: Some("/x".into()), ..settings.clone() }).unwrap();
        assert!(!deliverer.goes_on());
        drop(orders);
        deliverer.next = None;
        assert!(!deliverer.goes_on() && deliverer.has_ended);
    }
}
