//! The probe sites of each glibc build seen so far, and the thread that finds them for unknown builds.
//!
//! Sites that are shipped or in the store are read at once. Any other build is run in a sandbox, which takes seconds. The driver has
//! windows to close meanwhile, so this happens on a separate thread, and targets that wait for the build query it again when it is done.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;

use crate::probe::plan::FilePlan;
use crate::process::Process;
use crate::process::file::{FileIdentity, MappedFile};
use crate::process::maps::Mapping;
use crate::selective::{LargeSites, NoSites};

/// Limit of remembered builds; beyond it all are forgotten.
const BUILDS_MAX: usize = 256;
/// Limit of builds that wait to be run. Builds beyond it are requested again when one of these is done.
const WAITING_MAX: usize = 8;
/// Maximum number of attempts for a build whose file could not be opened when its turn came, because the process it was found in had ended.
const TRIES_MAX: u32 = 3;

/// The sites of a build, or the reason why it has none.
type FoundSites = Result<LargeSites, String>;

/// State of a build.
#[derive(Debug, Clone)]
enum Build {
    Known(FoundSites),
    /// It is being run, or waits for that; the number counts the earlier attempts that failed.
    Sought(u32),
    /// The last attempt failed; the number counts the failed attempts.
    Missed(u32),
}

/// All known builds. Dropping it waits for the run in progress.
#[derive(Debug)]
pub struct KnownSites {
    store: Option<PathBuf>,
    builds: HashMap<FileIdentity, Build>,
    finder: Option<Finder>,
}

impl KnownSites {
    /// Starts with the shipped sites and those that the directory `store` keeps between runs.
    pub fn new(store: Option<PathBuf>) -> Self {
        Self { store, builds: HashMap::new(), finder: None }
    }

    /// The sites of a file that a process has mapped; `None` while they are being found.
    pub fn of(&mut self, process: &Process, file: &FilePlan) -> Option<FoundSites> {
        let tries = match self.builds.get(&file.identity) {
            Some(Build::Known(found)) => return Some(found.clone()),
            Some(Build::Sought(_)) => return None,
            Some(Build::Missed(tries)) => *tries,
            None => 0,
        };
        let build = match super::find(&file.attach_path, None, self.store.as_deref()) {
            Err(NoSites::NoLoader { .. }) => self.seek(process, file, tries),
            found => Build::Known(found.map_err(|error| error.to_string())),
        };
        let found = match &build {
            Build::Known(found) => Some(found.clone()),
            Build::Sought(_) | Build::Missed(_) => None,
        };
        if self.builds.len() >= BUILDS_MAX {
            self.builds.clear();
        }
        self.builds.insert(file.identity.clone(), build);
        found
    }

    /// Requests the sites from the thread, which is started on first use.
    fn seek(&mut self, process: &Process, file: &FilePlan, tries: u32) -> Build {
        let none = |reason: String| Build::Known(Err(reason));
        let Some(loader) = loader_of(process) else {
            return none("its build of glibc is not known, and cannot be examined because its dynamic loader was not found".to_owned());
        };
        if self.finder.is_none() {
            match Finder::start(self.store.clone()) {
                Ok(finder) => self.finder = Some(finder),
                Err(error) => {
                    return none(format!("its build of glibc is not known, and no thread could be started to examine it: {error}"));
                }
            }
        }
        let wanted = Box::new(Wanted { identity: file.identity.clone(), libc: file.attach_path.clone(), loader });
        match self.finder.as_ref().and_then(|finder| finder.wanted.as_ref()).map(|queue| queue.try_send(wanted)) {
            Some(Ok(())) => Build::Sought(tries),
            Some(Err(TrySendError::Full(_))) => Build::Missed(tries),
            Some(Err(TrySendError::Disconnected(_))) | None => {
                none("its build of glibc is not known, and the thread that examines such builds has ended".to_owned())
            }
        }
    }

    /// Takes the results found since the last call. Returns whether there were any: then the targets that wait must ask again.
    pub fn take_found(&mut self) -> bool {
        let Some(finder) = &self.finder else { return false };
        let mut is_new = false;
        for (identity, found) in finder.found.try_iter() {
            is_new = true;
            let tries = match self.builds.get(&identity) {
                Some(Build::Sought(tries)) => tries + 1,
                _ => 1,
            };
            let build = match found {
                Err(NoSites::Open { .. }) if tries < TRIES_MAX => Build::Missed(tries),
                found => Build::Known(found.map_err(|error| error.to_string())),
            };
            self.builds.insert(identity, build);
        }
        is_new
    }
}

/// The sites of a file that a process has mapped. Unknown sites are found synchronously, which may take seconds. The store is only read.
///
/// # Errors
/// The reason, as a sentence.
pub fn find_now(process: &Process, file: &FilePlan, store: Option<&Path>) -> FoundSites {
    let found = match super::find(&file.attach_path, None, store) {
        Err(NoSites::NoLoader { .. }) => super::find(&file.attach_path, loader_of(process).as_deref(), None),
        found => found,
    };
    found.map_err(|error| error.to_string())
}

/// The dynamic loader of a process, by a path that is reachable from here.
fn loader_of(process: &Process) -> Option<PathBuf> {
    let maps = process.maps().ok()?;
    let is_loader = |mapping: &&Mapping| {
        let name = mapping.path().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| name.starts_with("ld-linux") || name.starts_with("ld-2."))
    };
    let mapping = maps.executable_files().find(is_loader)?;
    Some(MappedFile::open(process, mapping).ok()?.attach_path)
}

/// A build whose sites are to be found.
#[derive(Debug)]
struct Wanted {
    identity: FileIdentity,
    libc: PathBuf,
    loader: PathBuf,
}

/// The thread that finds sites.
#[derive(Debug)]
struct Finder {
    wanted: Option<SyncSender<Box<Wanted>>>,
    found: Receiver<(FileIdentity, Result<LargeSites, NoSites>)>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Finder {
    fn start(store: Option<PathBuf>) -> std::io::Result<Self> {
        let (wanted, queue) = sync_channel::<Box<Wanted>>(WAITING_MAX);
        let (sender, found) = channel();
        let is_over = Arc::<AtomicBool>::default();
        let is_over_there = Arc::clone(&is_over);
        let thread = std::thread::Builder::new().name("fragprof-sites".into()).spawn(move || {
            for wanted in queue {
                if is_over_there.load(Ordering::Relaxed) {
                    break;
                }
                let sites = super::find(&wanted.libc, Some(&wanted.loader), store.as_deref());
                if sender.send((wanted.identity, sites)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { wanted: Some(wanted), found, is_over, thread: Some(thread) })
    }
}

impl Drop for Finder {
    /// Waits for the run in progress, so that its scratch process and directory are gone.
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.wanted = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that finds sites of large blocks panicked");
        }
    }
}
