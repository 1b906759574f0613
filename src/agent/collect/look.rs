//! One census of one process: its level, its cost, and its results.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::super::budget::Work;
use super::super::own::{give_back, thread_cpu};
use super::super::schedule::{Due, Shed, close_level, has_moved};
use super::{ARENAS_KEPT_MAX, Collector, GONE_SCAN_S, SHARE_MAX, TRIM_AFTER_CHUNKS, level_index};
use crate::allocator::Allocator;
use crate::census::{Census, LayoutCache, Level, LiveMemory, MemoryError, Options, Pace, take};
use crate::fragmentation::verdict::{Kind, TrendSample, judge};
use crate::model::sample::{HeapSample, Identity, ProcessSample, TimedCensus, WatchState};
use crate::model::view::Growth;
use crate::process::{Process, ProcessError};

/// Windows of the sample for a first verdict: about 4 MiB of reading, a millisecond. Shares are then known to a few percent; if that is not
/// enough for a verdict, the heap is walked.
const FIRST_WINDOWS: u64 = 64;
/// Smallest extent that is sampled for a first verdict: smaller heaps are walked in the same time.
const SAMPLED_BYTES_MIN: u64 = 16 << 20;

impl Collector {
    /// Takes one census.
    pub(super) fn look(&mut self, identity: Identity, work: Work) {
        let now_s = self.now_s();
        let Some(watch) = self.watches.get_mut(&identity) else { return };
        let left_out = watch.leave_out(now_s, &self.config.census);
        match work {
            Work::Cheap => watch.left_out.top = 0,
            Work::Full | Work::First | Work::Asked => watch.left_out.full = 0,
        }
        let sample = Arc::clone(&watch.sample);
        let (chunks, sampled_in_vain) = (watch.chunks, watch.sampled_in_vain);
        left_out.add_to(&mut self.counters);
        let mut level = self.level(&sample, chunks, work);
        let mut sample_windows = Pace::default().sample_windows;
        if work == Work::First && level == Level::Full && !sampled_in_vain && is_settled_by_a_sample(&sample) {
            (level, sample_windows) = (Level::Sampled, FIRST_WINDOWS);
        }
        let comm = sample.comm.as_str();
        let pace = Pace {
            pause_per_mib: Duration::from_micros(self.config.census.pause_per_mib_us),
            duration_max: Duration::from_secs(self.config.census.duration_max_s),
            sample_windows,
            ..Pace::default()
        };
        // Memory outside malloc takes milliseconds to measure: only with the full or sampled census.
        let options = Options { level, pace, with_not_malloc: level != Level::Top };
        let before = thread_cpu();
        let result = census_of(identity, comm, options, &mut self.layouts);
        let cpu = thread_cpu().saturating_sub(before);
        let index = level_index(level);
        if let Some((count, cpu_s)) = self.counters.censuses.get_mut(index).zip(self.counters.census_cpu_s.get_mut(index)) {
            *count += 1;
            *cpu_s += cpu.as_secs_f64();
        }
        match result {
            Ok(census) => self.keep(identity, census, cpu),
            Err(error) if is_gone(&error) => {
                self.counters.gone += 1;
                self.counters.ended += 1;
                self.ended.extend(self.watches.remove(&identity).map(|watch| watch.sample));
                // The next scan of the process list finds out what happened to it.
                self.next_scan_s = self.next_scan_s.min(self.now_s() + GONE_SCAN_S);
            }
            Err(error) => self.refused(identity, &error),
        }
    }

    /// The level for this kind of work.
    fn level(&mut self, sample: &ProcessSample, chunks: Option<u64>, work: Work) -> Level {
        let config = &self.config.census;
        if work == Work::Cheap {
            return Level::Top;
        }
        // Blocks with mappings of their own are not walked.
        let extents = sample.heaps.iter().map(|heap| heap.ladder.extent_bytes.saturating_sub(heap.mmapped_bytes));
        match close_level(extents.fold(0, u64::saturating_add), chunks, self.own_rss_bytes, config) {
            Ok(level) => level,
            Err(shed) => {
                match shed {
                    Shed::TooLarge => self.counters.sampled_too_large += 1,
                    Shed::OwnMemory => self.counters.sampled_memory += 1,
                }
                Level::Sampled
            }
        }
    }

    pub(super) fn keep(&mut self, identity: Identity, mut census: Census, cpu: Duration) {
        self.counters.read_bytes = self.counters.read_bytes.saturating_add(census.walk.read_bytes);
        self.counters.unusable += u64::from(!census.walk.usable);
        for heap in &mut census.heaps {
            if heap.arenas.len() > ARENAS_KEPT_MAX {
                self.counters.arenas_dropped += (heap.arenas.len() - ARENAS_KEPT_MAX) as u64;
                heap.arenas.sort_by_key(|arena| std::cmp::Reverse(arena.extent_bytes));
                heap.arenas.truncate(ARENAS_KEPT_MAX);
            }
        }
        let now_s = self.now_s();
        let config = &self.config.census;
        let (mut top_interval_s, full_interval_s) = (config.top_interval_s as f64, config.full_interval_s as f64);
        let dear_s = cpu.as_secs_f64() / (config.budget_ratio() * SHARE_MAX);
        if census.level == Level::Top && dear_s > top_interval_s {
            self.counters.top_stretched += 1;
            top_interval_s = dear_s;
        }
        let Some(watch) = self.watches.get_mut(&identity) else { return };
        let retry_s = watch.retry_s(now_s, config);
        watch.note_look(now_s);
        let sample = Arc::make_mut(&mut watch.sample);
        sample.surroundings = self.containers.of(identity.process.pid);
        let level = census.level;
        let has_heap = !census.heaps.is_empty();
        sample.state = if has_heap { WatchState::Watched } else { WatchState::NoHeap };
        sample.reason = (!census.layout_unknown.is_empty()).then(|| census.layout_unknown.join("; "));
        if level == Level::Top {
            census.rss_bytes = sample.rss_bytes;
        } else {
            sample.rss_bytes = census.rss_bytes;
        }
        if level == Level::Full {
            let classes = census.heaps.iter().flat_map(|heap| &heap.size_classes);
            let chunks = classes.map(|class| class.live_allocations.saturating_add(class.free_chunks)).fold(0, u64::saturating_add);
            watch.chunks = Some(chunks);
            if chunks > TRIM_AFTER_CHUNKS {
                give_back();
            }
        }
        let taken = Arc::new(TimedCensus { at: Instant::now(), wall: SystemTime::now(), cpu, census });
        // A process without a heap has nothing for a cheap census; the full one is repeated, in case it gets a heap.
        watch.due.top_s = if has_heap { now_s + top_interval_s } else { f64::INFINITY };
        if level == Level::Top {
            let moved =
                sample.full.as_ref().is_some_and(|full| has_moved(extent(&taken.census), extent(&full.census), config.full_growth_percent));
            sample.top = Some(taken);
            match &mut watch.due.full_s {
                None => watch.due.full_s = Some(now_s.max(watch.settled_s)),
                // Not more often than ten times the usual.
                Some(due_s) if moved => *due_s = due_s.min(now_s.max(*due_s - full_interval_s * 0.9)),
                Some(_) => {}
            }
        } else {
            if let Some(look) = TrendSample::of(&taken.census, now_s).filter(|_| taken.census.walk.usable) {
                watch.looks.add(look);
            }
            let change = watch.looks.change();
            sample.growth = change.as_ref().filter(|_| has_heap).and_then(Growth::of);
            let verdict = judge(&taken.census, change);
            // A first sample without a verdict is followed by a walk; one with a verdict is too, in its turn.
            let is_first_sample = level == Level::Sampled && sample.verdict.is_none() && !watch.sampled_in_vain;
            if is_first_sample && verdict.verdict == Kind::Unknown {
                watch.sampled_in_vain = true;
                self.counters.samples_open += 1;
            } else {
                sample.verdict = Some(Arc::new(verdict));
            }
            sample.full = Some(taken);
            let interval_s = if is_first_sample {
                0.0
            } else if has_heap {
                full_interval_s
            } else {
                retry_s
            };
            watch.due.full_s = Some(now_s + interval_s);
        }
        sample.join();
        watch.name_workload(&self.config.discovery);
    }

    fn refused(&mut self, identity: Identity, error: &MemoryError) {
        self.counters.refused += 1;
        let now_s = self.now_s();
        let Some(watch) = self.watches.get_mut(&identity) else { return };
        let retry_s = now_s + watch.retry_s(now_s, &self.config.census);
        tracing::debug!("no census of process {}: {error}", identity.process.pid);
        let sample = Arc::make_mut(&mut watch.sample);
        sample.state = WatchState::Unreadable;
        sample.reason = Some(error.to_string());
        watch.due = Due { top_s: retry_s, full_s: None, ..watch.due };
    }
}

/// Whether a sample of this process's heap may be enough for a first verdict, and is cheaper than a walk.
fn is_settled_by_a_sample(sample: &ProcessSample) -> bool {
    let walked = sample.heaps.iter().map(|heap| heap.ladder.extent_bytes.saturating_sub(heap.mmapped_bytes));
    let is_sampled = |heap: &HeapSample| Allocator::of_name(&heap.allocator).is_some_and(|allocator| allocator.row().is_sampled);
    sample.heaps.iter().all(is_sampled) && walked.fold(0, u64::saturating_add) >= SAMPLED_BYTES_MIN
}

fn census_of(identity: Identity, comm: &str, options: Options, layouts: &mut LayoutCache) -> Result<Census, MemoryError> {
    let pid = identity.process.pid;
    let process = Process::open(pid)?;
    if process.id() != identity.process {
        return Err(MemoryError::Gone { pid: pid.0 });
    }
    let memory = LiveMemory::open(process)?;
    take(&memory, pid.0, comm, options, layouts).map(|taken| taken.census)
}

pub(super) fn is_gone(error: &MemoryError) -> bool {
    use ProcessError::{Gone, NotFound, Zombie};
    matches!(error, MemoryError::Gone { .. } | MemoryError::Target(Gone { .. } | NotFound { .. } | Zombie { .. }))
}

fn extent(census: &Census) -> u64 {
    census.heaps.iter().map(|heap| HeapSample::of(heap, census.level).ladder.extent_bytes).fold(0, u64::saturating_add)
}
