//! Takes censuses during a recording, one after the other on a separate thread, so that neither the driver nor the rings wait for a walk.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::census::live::LiveMemory;
use crate::census::{Level, Taken};
use crate::process::Process;
use crate::session::monotonic_ns;
use crate::session::report::heap::{self, Heaps};
use crate::units::Pid;

/// Maximum number of walks at a start, until one is usable: a walk may fail in a heap that changes rapidly.
const START_TRIES: u32 = 3;
/// Pause between two attempts.
const START_PAUSE: Duration = Duration::from_millis(100);

/// The purpose of a census.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Determine the heap before the recording.
    Start,
    /// Measure the heap near its highest recorded live bytes, and prove blocks free if records were lost.
    During,
}

/// The heap to walk. The image distinguishes the programs that a process runs one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WalkTarget {
    /// Its process.
    pub pid: Pid,
    /// Number of images that the process had before.
    pub image: u32,
    /// Which of its heaps.
    pub heaps: Heaps,
}

/// A walk that was requested.
#[derive(Debug, Clone, Copy)]
struct Request {
    whose: WalkTarget,
    purpose: Purpose,
}

/// A walk that is done.
#[derive(Debug)]
pub struct Walked {
    /// The heap that was walked.
    pub whose: WalkTarget,
    /// Its purpose.
    pub purpose: Purpose,
    /// When it began, CLOCK_MONOTONIC ns.
    pub began_ns: u64,
    /// When it ended, CLOCK_MONOTONIC ns.
    pub ended_ns: u64,
    /// The census, if it is usable.
    pub taken: Option<Taken>,
    /// What runtimes manage beside malloc ([`heap::managed_beside`]), now and then; not at a start, when there is nothing yet.
    pub managed_beside: Vec<String>,
}

/// Time between two looks at the memory that a process's runtimes manage: it is not in what a walk is known to cost.
const MANAGED_EVERY: Duration = Duration::from_secs(2);

/// The walking thread.
pub struct Walker {
    requests: Option<Sender<Request>>,
    walked: Receiver<Walked>,
    only_starts: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Walker {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn start() -> std::io::Result<Self> {
        let (requests, asked) = channel::<Request>();
        let (done, walked) = channel();
        let only_starts = Arc::<AtomicBool>::default();
        let hurry = Arc::clone(&only_starts);
        let work = move || {
            let mut managed_at: HashMap<Pid, Instant> = HashMap::new();
            for request in asked {
                if request.purpose == Purpose::During && hurry.load(Ordering::Relaxed) {
                    continue;
                }
                let wants_managed =
                    request.purpose == Purpose::During && managed_at.get(&request.whose.pid).is_none_or(|at| at.elapsed() >= MANAGED_EVERY);
                if wants_managed {
                    managed_at.retain(|_, at| at.elapsed() < MANAGED_EVERY);
                    managed_at.insert(request.whose.pid, Instant::now());
                }
                if done.send(walk(request, wants_managed)).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("fragprof-census".into()).spawn(work)?;
        Ok(Self { requests: Some(requests), walked, only_starts, thread: Some(thread) })
    }

    /// Requests a walk. The driver makes sure that each process has at most one of each kind in progress.
    pub fn ask(&self, whose: WalkTarget, purpose: Purpose) {
        if let Some(requests) = &self.requests
            && requests.send(Request { whose, purpose }).is_err()
        {
            tracing::warn!("the census thread has ended: no walk of process {}", whose.pid);
        }
    }

    /// The walks that are done.
    pub fn done(&self) -> impl Iterator<Item = Walked> + '_ {
        self.walked.try_iter()
    }

    /// Ends the thread: requested walks at a start are still made, others that have not begun are not.
    pub fn finish(mut self) -> Vec<Walked> {
        self.only_starts.store(true, Ordering::Relaxed);
        self.requests = None;
        let walked = self.walked.iter().collect();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the census thread panicked");
        }
        walked
    }
}

fn walk(request: Request, wants_managed: bool) -> Walked {
    let mut began_ns = monotonic_ns();
    let mut taken = census_of(request.whose);
    // A later walk serves equally well: memory that is live then and never recorded is from before.
    for _ in 1..START_TRIES {
        if taken.is_some() || request.purpose != Purpose::Start {
            break;
        }
        std::thread::sleep(START_PAUSE);
        began_ns = monotonic_ns();
        taken = census_of(request.whose);
    }
    let ended_ns = monotonic_ns();
    let managed_beside = if wants_managed { heap::managed_beside(request.whose.pid, request.whose.heaps) } else { Vec::new() };
    Walked { whose: request.whose, purpose: request.purpose, began_ns, ended_ns, taken, managed_beside }
}

/// A usable census of a process at level full.
fn census_of(whose: WalkTarget) -> Option<Taken> {
    let pid = whose.pid;
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    let taken = heap::census_of(&memory, pid, &comm, Level::Full, whose.heaps);
    let taken = taken.inspect_err(|error| tracing::debug!("census of {pid}: {error}")).ok()?;
    (taken.census.walk.usable && !taken.heaps.is_empty()).then_some(taken)
}
