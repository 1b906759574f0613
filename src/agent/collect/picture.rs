//! The map of a heap's pages on request: an additional full census, charged to the account for requests.

use std::time::{Duration, Instant};

use thiserror::Error;

use super::super::budget::Work;
use super::super::own::thread_cpu;
use super::super::schedule::close_level;
use super::Collector;
use crate::census::{Level, LiveMemory, MemoryError, Options, Pace, PageMap, take};
use crate::model::sample::Identity;
use crate::process::Process;

/// Why there is no map.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MapRefused {
    /// The account for requests is empty.
    #[error("the budget for maps on request is used up: retry in {retry_s} s (census.budget_percent)")]
    Busy {
        /// Seconds until it has credit again.
        retry_s: u64,
    },
    /// The walk may need too much memory.
    #[error("the heap is too large to be walked within the agent's memory limits (census.walk_memory_mib, census.memory_max_mib)")]
    TooLarge,
    /// The process has ended.
    #[error("the process has ended")]
    Gone,
    /// No allocator of the process has chunks that can be read.
    #[error("no heap of this process can be walked chunk by chunk")]
    NoChunks,
    /// It cannot be read.
    #[error("{0}")]
    Failed(String),
}

impl Collector {
    /// Makes the map of a process's pages; the heap's figures are kept as a full census.
    pub(super) fn picture(&mut self, identity: Identity) -> Result<PageMap, MapRefused> {
        self.counters.maps += 1;
        let drawn = self.draw(identity);
        self.charge(Work::Asked);
        self.counters.maps_refused += u64::from(matches!(drawn, Err(MapRefused::Busy { .. } | MapRefused::TooLarge)));
        drawn
    }

    fn draw(&mut self, identity: Identity) -> Result<PageMap, MapRefused> {
        self.fill();
        let watch = self.watches.get(&identity).ok_or(MapRefused::Gone)?;
        if !self.budget.allows(Work::Asked) {
            return Err(MapRefused::Busy { retry_s: self.budget.wait_s(Work::Asked).ceil() as u64 });
        }
        let extents = watch.sample.heaps.iter().map(|heap| heap.ladder.extent_bytes.saturating_sub(heap.mmapped_bytes));
        let extent = extents.fold(0, u64::saturating_add);
        if close_level(extent, watch.chunks, self.own_rss_bytes, &self.config.census) != Ok(Level::Full) {
            return Err(MapRefused::TooLarge);
        }
        let pace = Pace { duration_max: Duration::from_secs(self.config.census.duration_max_s), ..Pace::default() };
        let options = Options { level: Level::Full, pace, with_not_malloc: true };
        let comm = watch.sample.comm.clone();
        let cpu = thread_cpu();
        let failed =
            |error: MemoryError| if super::look::is_gone(&error) { MapRefused::Gone } else { MapRefused::Failed(error.to_string()) };
        let process = Process::open(identity.process.pid).map_err(|error| failed(error.into()))?;
        if process.id() != identity.process {
            return Err(MapRefused::Gone);
        }
        let memory = LiveMemory::open(process).map_err(failed)?;
        let started = Instant::now();
        let taken = take(&memory, identity.process.pid.0, &comm, options, &mut self.layouts).map_err(failed)?;
        let map = PageMap::new(&memory, &taken);
        tracing::debug!("made a map of process {} in {:?}", identity.process.pid, started.elapsed());
        self.keep(identity, taken.census, thread_cpu().saturating_sub(cpu));
        if map.pieces.is_empty() { Err(MapRefused::NoChunks) } else { Ok(map) }
    }
}
