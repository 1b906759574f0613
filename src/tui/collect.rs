//! From a running recording to samples: copies the ledgers' figures, names the largest stacks, reads the heap.
//!
//! A ledger is locked twice per process and sample, each time only to copy: first the totals of all stacks (about ten nanoseconds per stack),
//! then the frames of the few that are new to the view. Blocks are never iterated over.

use std::collections::HashMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::choose;
use super::heap::{self, HeapReader};
use super::sample::{Counted, Errors, Heap, Named, Numbers, Peak, ProcessSample, Sample, StackKey, StackSample};
use crate::ledger::{LedgerTotals, SampledLedger};
use crate::process::ProcessId;
use crate::profile::{Frame, FrameFilter};
use crate::session::Recorder;
use crate::session::report::placeholder;
use crate::session::report::view::View;
use crate::session::tier::exact::Watched;
use crate::symbol::{AddressSpace, Symbolizer, debuginfod};
use crate::units::StackId;
use crate::unwind::End;

/// Named stacks kept per process, of a few KiB each. Beyond it all are dropped and the shown ones named again, from the symbolizer's cache.
const NAMES_MAX: usize = 8192;

/// Takes samples of a recording.
pub struct Collector {
    recorder: Recorder,
    namer: Namer,
    seen: HashMap<ProcessId, ProcessState>,
    naming_max: Duration,
    /// Debug files that had been fetched when stacks were last named anew.
    fetched: u64,
}

/// State of a process between two samples.
#[derive(Default)]
struct ProcessState {
    at: Option<Instant>,
    image: u64,
    totals: Counted,
    /// By stack id, of `image`.
    stacks: Vec<Counted>,
    names: HashMap<StackKey, Named>,
    heap: HeapReader,
    /// The last sample of a process that has ended.
    ended: Option<ProcessSample>,
}

/// A copy of a ledger's figures.
struct Figures {
    at: Instant,
    image: u64,
    ledger: LedgerTotals,
    past: Counted,
    unknown_frees: u64,
    growth_bytes: u64,
    lossy: bool,
    exited: Option<u32>,
    doubts: Vec<String>,
    stacks: Vec<Numbers>,
    /// Standard errors of the sums, for estimates.
    errors: Option<Errors>,
}

impl Figures {
    fn copy(look: &View<'_>, watched: &Watched) -> Self {
        if let Some(sampled) = &watched.sampled {
            return Self::copy_sampled(look, watched, sampled);
        }
        let growth = &watched.growth.bytes;
        let numbers = |view: crate::ledger::StackView<'_>| Numbers {
            inuse_bytes: view.totals.live_bytes,
            inuse_allocations: view.totals.live,
            allocated_bytes: view.totals.allocated_bytes,
            allocations: view.totals.allocations,
            doubtful_bytes: view.totals.doubtful_bytes,
            growth_bytes: growth.of(view.id),
            ..Numbers::default()
        };
        let past = watched.past.iter().map(|ledger| ledger.totals()).fold(Counted::default(), |sum, past| Counted {
            allocations: sum.allocations + past.allocations,
            allocated_bytes: sum.allocated_bytes + past.allocated_bytes,
        });
        Self {
            at: Instant::now(),
            image: watched.past.len() as u64 + watched.past_dropped,
            ledger: watched.ledger.totals(),
            past,
            unknown_frees: watched.ledger.stats().unknown_frees,
            growth_bytes: growth.total_bytes(),
            lossy: watched.ledger.is_lossy(),
            exited: watched.exited.map(|(_, status)| status),
            doubts: look.doubts(watched),
            stacks: watched.ledger.stacks().map(numbers).collect(),
            errors: None,
        }
    }

    /// The estimates of a process that has an emitter, in the fields that have counts for others.
    fn copy_sampled(look: &View<'_>, watched: &Watched, sampled: &SampledLedger) -> Self {
        let numbers = |view: crate::ledger::SampledStack<'_>| Numbers {
            inuse_bytes: view.live_bytes.rounded(),
            inuse_allocations: view.live.rounded(),
            allocated_bytes: view.allocated_bytes.rounded(),
            allocations: view.allocations.rounded(),
            doubtful_bytes: view.doubtful_bytes.rounded(),
            errors: Some(Errors {
                inuse_bytes: view.live_bytes.rounded_error(),
                inuse_allocations: view.live.rounded_error(),
                allocated_bytes: view.allocated_bytes.rounded_error(),
                allocations: view.allocations.rounded_error(),
            }),
            ..Numbers::default()
        };
        let totals = sampled.totals();
        let past = watched.past_sampled.iter().map(SampledLedger::totals).fold(Counted::default(), |sum, past| Counted {
            allocations: sum.allocations.saturating_add(past.allocations.rounded()),
            allocated_bytes: sum.allocated_bytes.saturating_add(past.allocated_bytes.rounded()),
        });
        let ledger = LedgerTotals {
            allocations: totals.allocations.rounded(),
            allocated_bytes: totals.allocated_bytes.rounded(),
            live: totals.live.rounded(),
            live_bytes: totals.live_bytes.rounded(),
            peak_bytes: totals.peak_bytes.rounded(),
            ..LedgerTotals::default()
        };
        Self {
            at: Instant::now(),
            image: watched.past_sampled.len() as u64 + watched.past_dropped,
            ledger,
            past,
            unknown_frees: sampled.stats().unknown_frees,
            growth_bytes: 0,
            lossy: sampled.is_lossy(),
            exited: watched.exited.map(|(_, status)| status),
            doubts: look.doubts(watched),
            stacks: sampled.stacks().into_iter().map(numbers).collect(),
            errors: Some(Errors {
                inuse_bytes: totals.live_bytes.rounded_error(),
                inuse_allocations: totals.live.rounded_error(),
                allocated_bytes: totals.allocated_bytes.rounded_error(),
                allocations: totals.allocations.rounded_error(),
            }),
        }
    }

    fn totals(&self) -> Numbers {
        Numbers {
            inuse_bytes: self.ledger.live_bytes,
            inuse_allocations: self.ledger.live,
            allocated_bytes: self.past.allocated_bytes.saturating_add(self.ledger.allocated_bytes),
            allocations: self.past.allocations.saturating_add(self.ledger.allocations),
            doubtful_bytes: self.ledger.doubtful_bytes,
            growth_bytes: self.growth_bytes,
            errors: self.errors,
            ..Numbers::default()
        }
    }
}

/// Names stacks, as far as they are shown.
struct Namer {
    symbolizer: Symbolizer,
    frames: FrameFilter,
}

impl Namer {
    fn stack(&mut self, space: &AddressSpace, words: &[u64]) -> Vec<Frame> {
        self.frames.of_stack(self.symbolizer.stack(space, words))
    }
}

impl Collector {
    /// A collector for a recording, of which these frames are shown. Naming new stacks takes at most `naming_max` per sample; later samples name the rest.
    pub fn new(recorder: Recorder, naming_max: Duration, frames: FrameFilter) -> Self {
        Self { recorder, namer: Namer { symbolizer: Symbolizer::new(), frames }, seen: HashMap::new(), naming_max, fetched: 0 }
    }

    /// Drives the recording for up to `wait`. Returns whether any process is left.
    pub fn step(&mut self, wait: Duration) -> bool {
        self.recorder.step(wait)
    }

    /// The present state of everything.
    pub fn sample(&mut self) -> Sample {
        self.recorder.settle();
        self.name_anew();
        let Self { recorder, namer, seen, naming_max, .. } = self;
        let name_until = Instant::now().checked_add(*naming_max);
        let mut processes = Vec::new();
        for look in recorder.views() {
            let seen = seen.entry(look.process().id()).or_default();
            if let Some(ended) = &seen.ended {
                processes.push(ended.clone());
                continue;
            }
            let Some(process) = seen.sample(&look, namer, name_until) else { continue };
            if look.has_ended() && process.stacks.iter().all(|stack| stack.named.title().is_some()) {
                seen.ended = Some(process.clone());
            }
            processes.push(process);
        }
        let taken_unix_ns = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
        Sample { taken_unix_ns, elapsed_s: recorder.elapsed().as_secs_f64(), processes, losses: recorder.losses() }
    }
}

impl Collector {
    /// Drops names if debug information was fetched meanwhile, of which they may be without.
    fn name_anew(&mut self) {
        let fetched = debuginfod::installed().map_or(0, |debuginfod| debuginfod.counted().fetched);
        if fetched != self.fetched {
            self.fetched = fetched;
            self.namer.symbolizer.close_files();
            self.seen.values_mut().for_each(|seen| seen.names.clear());
        }
    }
}

impl ProcessState {
    fn sample(&mut self, look: &View<'_>, namer: &mut Namer, name_until: Option<Instant>) -> Option<ProcessSample> {
        let mut figures = look.watched(|watched| Figures::copy(look, watched))?;
        self.rate(&mut figures);
        let chosen = choose::largest(&figures.stacks, choose::STACKS_PER_KEY);
        let keys: Vec<StackKey> =
            chosen.iter().filter_map(|&index| Some(StackKey { image: figures.image, id: StackId(u32::try_from(index).ok()?) })).collect();
        let placeholders = self.name(look, &keys, &figures.stacks, namer, name_until);
        let stacks = keys.iter().zip(&chosen).filter_map(|(&key, &index)| {
            let named = self.names.get(&key).or_else(|| placeholders.get(&key)).cloned().unwrap_or_else(Named::not_yet);
            Some(StackSample { key, numbers: *figures.stacks.get(index)?, named })
        });
        let stacks = stacks.collect();

        let reading = self.heap.read(look.process()).unwrap_or_default();
        let totals = self.totals(&figures);
        let process = look.process();
        Some(ProcessSample {
            pid: process.pid().0,
            comm: process.comm().to_owned(),
            allocators: look.allocators().to_vec(),
            end: look.has_ended().then(|| end_words(figures.exited)),
            totals,
            peak: Peak { bytes: figures.ledger.peak_bytes, is_estimate: figures.errors.is_some() },
            source: look.source(),
            unknown_frees: figures.unknown_frees,
            heap: Heap::of(&reading, totals.inuse_bytes, heap::rss_bytes(process)),
            lossy: figures.lossy,
            doubts: figures.doubts,
            notes: look.notes().to_vec(),
            stacks_with_value: figures.stacks.iter().filter(|stack| !stack.is_zero()).count(),
            stacks,
        })
    }

    /// Fills in the stacks' rates, and drops the state of an earlier image.
    fn rate(&mut self, figures: &mut Figures) {
        if figures.image != self.image {
            self.image = figures.image;
            self.stacks.clear();
            self.names.clear();
        }
        let Some(seconds) = self.seconds(figures) else { return };
        let before = self.stacks.iter().copied().chain(std::iter::repeat(Counted::default()));
        for (stack, before) in figures.stacks.iter_mut().zip(before) {
            *stack = stack.with_rates(before, seconds);
        }
    }

    fn totals(&mut self, figures: &Figures) -> Numbers {
        let totals = figures.totals();
        let rated = self.seconds(figures).map_or(totals, |seconds| totals.with_rates(self.totals, seconds));
        self.at = Some(figures.at);
        self.totals = counted(&totals);
        self.stacks.clear();
        self.stacks.extend(figures.stacks.iter().map(counted));
        rated
    }

    fn seconds(&self, figures: &Figures) -> Option<f64> {
        self.at.map(|at| figures.at.saturating_duration_since(at).as_secs_f64())
    }

    /// Names the stacks that are not named yet, those that hold most first, until the time is up.
    /// Returns placeholders for those without frames.
    fn name(
        &mut self,
        look: &View<'_>,
        keys: &[StackKey],
        stacks: &[Numbers],
        namer: &mut Namer,
        until: Option<Instant>,
    ) -> HashMap<StackKey, Named> {
        let mut placeholders = HashMap::new();
        if self.names.len() > NAMES_MAX {
            self.names.clear();
        }
        let held = |key: &StackKey| stacks.get(key.id.0 as usize).map_or(0, |numbers| numbers.inuse_bytes);
        let mut new: Vec<StackKey> = keys.iter().filter(|key| !self.names.contains_key(key)).copied().collect();
        new.sort_by_key(|key| std::cmp::Reverse(held(key)));
        let words = look.watched(|watched| {
            let words = |key: &StackKey| {
                let (frames, end) = watched.stack_words(key.id);
                (*key, frames.to_vec(), end)
            };
            new.iter().map(words).collect::<Vec<_>>()
        });
        for (key, words, end) in words.unwrap_or_default() {
            if until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            if words.is_empty() {
                // Not stored: its frames may not have arrived yet.
                placeholders.insert(key, Named::new(vec![Frame::named(placeholder(key.id))], None));
                continue;
            }
            let end = End::from_wire(end).filter(|end| *end != End::Complete).map(End::description);
            self.names.insert(key, Named::new(namer.stack(look.space(), &words), end));
        }
        placeholders
    }
}

fn counted(numbers: &Numbers) -> Counted {
    Counted { allocations: numbers.allocations, allocated_bytes: numbers.allocated_bytes }
}

/// A wait status (`wait(2)`) in words.
fn end_words(status: Option<u32>) -> String {
    let Some(status) = status.map(u32::cast_signed) else { return "ended".to_owned() };
    if libc::WIFSIGNALED(status) {
        format!("killed by signal {}", libc::WTERMSIG(status))
    } else {
        format!("exited with status {}", libc::WEXITSTATUS(status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_process_is_worded_by_its_wait_status() {
        assert_eq!(end_words(None), "ended");
        assert_eq!(end_words(Some(0)), "exited with status 0");
        assert_eq!(end_words(Some(3 << 8)), "exited with status 3");
        assert_eq!(end_words(Some(9)), "killed by signal 9");
    }
}
