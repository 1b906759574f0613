//! The agent's collector inside `top`, for a machine without an agent: the census of all processes, under a budget of its own.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::oneshot::error::TryRecvError;

use crate::agent::collect::{Collector, Command, Heartbeat, start};
use crate::agent::config::Config;
use crate::model::attribution::Attributions;
use crate::model::map::{Kept, MapView};
use crate::model::snapshot::{Published, Snapshot};
use crate::model::view::ProcessesView;

/// Share of one core in percent: more than the agent's 1 %, because `top` runs only while a user watches.
const BUDGET_PERCENT: f64 = 10.0;
/// Seconds between two cheap and two full censuses of a process.
const TOP_INTERVAL_S: u64 = 2;
const FULL_INTERVAL_S: u64 = 30;
/// Longest wait for the first census of every process, and then for a full one.
const ROUND_MAX: Duration = Duration::from_secs(60);
const SETTLE_MAX: Duration = Duration::from_secs(10);
/// Longest wait for a map: the walk of a large heap.
const MAP_MAX: Duration = Duration::from_secs(35);
/// How often a condition is checked.
const STEP: Duration = Duration::from_millis(20);

/// A running collector. It ends when dropped.
#[derive(Debug)]
pub struct Embedded {
    published: Arc<Published>,
    commands: Sender<Command>,
}

impl Embedded {
    /// Starts the census thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start() -> std::io::Result<Self> {
        let mut config = Config::default();
        config.discovery.scan_interval_s = TOP_INTERVAL_S;
        config.census.budget_percent = BUDGET_PERCENT;
        config.census.top_interval_s = TOP_INTERVAL_S;
        config.census.full_interval_s = FULL_INTERVAL_S;
        let now = Instant::now();
        let published = Arc::new(Published::new(now));
        let collector = Collector::new(config, Arc::clone(&published), Arc::new(Heartbeat::new(now)), Arc::<Attributions>::default());
        let (commands, orders): (_, mpsc::Receiver<Command>) = channel();
        start(collector, orders)?;
        Ok(Self { published, commands })
    }

    /// The newest sample of all processes.
    #[must_use]
    pub fn view(&self) -> ProcessesView {
        ProcessesView::of(&self.published.load(), Instant::now())
    }

    /// Waits until every process has had a census, and at most ten seconds more until each has had a full one; what is not known by then is
    /// shown as not known.
    pub fn settle(&self) {
        let looked_closely = |snapshot: &Snapshot| snapshot.processes.iter().all(|one| one.heaps.is_empty() || one.full.is_some());
        let wait = |most: Duration, is_done: &dyn Fn(&Snapshot) -> bool| {
            let deadline = Instant::now() + most;
            while !is_done(&self.published.load()) && Instant::now() < deadline {
                std::thread::sleep(STEP);
            }
        };
        wait(ROUND_MAX, &|snapshot| snapshot.first_round_done);
        wait(SETTLE_MAX, &looked_closely);
    }

    /// The address space of a process.
    ///
    /// # Errors
    /// Why there is none, as text.
    pub fn map(&self, pid: u32, cells: usize) -> Result<MapView, String> {
        let silent = || "the census thread does not answer".to_owned();
        let identity = self.published.load().process(pid).map(|one| one.identity).ok_or("the process has ended")?;
        let (reply, mut answer) = tokio::sync::oneshot::channel();
        self.commands.send(Command::Map { identity, reply }).map_err(|_| silent())?;
        let deadline = Instant::now() + MAP_MAX;
        loop {
            match answer.try_recv() {
                Ok(map) => {
                    let map = map.map_err(|refused| refused.to_string())?;
                    return Ok(MapView::of(&Kept::now(identity, map), &(0..u64::MAX), cells));
                }
                Err(TryRecvError::Empty) if Instant::now() < deadline => std::thread::sleep(STEP),
                Err(_) => return Err(silent()),
            }
        }
    }
}
