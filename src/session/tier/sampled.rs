//! A recorder that runs indefinitely: processes come and go, and a profile of each can be requested at any time. It is only for processes
//! whose own emitter is the source, because their ledgers hold a bounded sample.

use std::time::{Duration, Instant, UNIX_EPOCH};

use crate::capture::TargetLoss;
use crate::ledger::{SampledStats, SampledTotals};
use crate::process::{Process, ProcessId};
use crate::profile::Profile;
use crate::session::report::block_index::BlockIndex;
use crate::session::report::{self, sampled_heap};
use crate::session::sink::lock;
use crate::session::target::Source;
use crate::session::target::Target;
use crate::session::tier::exact::Watched;
use crate::session::walks::walker::Purpose;
use crate::session::{Error, Recorder};
use crate::units::Pid;

/// What an emitter has reported so far, for counters.
#[derive(Debug, Clone, PartialEq)]
pub struct EmitterTotals {
    /// The process.
    pub process: ProcessId,
    /// The emitter.
    pub source: String,
    /// Mean distance of the samples in allocated bytes; `None` = not known.
    pub sample_bytes: Option<u64>,
    /// The sums over all stacks.
    pub totals: SampledTotals,
    /// Corrections and events that could not be applied.
    pub stats: SampledStats,
    /// Records lost because the ring was full.
    pub loss: TargetLoss,
    /// When listening began.
    pub since: Instant,
}

impl Recorder {
    /// As [`watch`](Self::watch), for a process that has an emitter. `with_start`: takes a census to distinguish memory from before the
    /// start.
    ///
    /// # Errors
    /// If the process cannot be watched, or has no emitter that can be heard.
    pub fn listen(&mut self, pid: Pid, with_start: bool) -> Result<(), Error> {
        let process = Process::open(pid)?;
        let slot = self.register(process, None, None)?;
        if let Err(error) = self.probe(slot) {
            self.forget(slot);
            return Err(error);
        }
        self.switch_on(slot);
        if let (Some(walker), Some(target)) = (&self.walker, self.targets.get(&slot).filter(|_| with_start)) {
            walker.ask(target.walk_target(), Purpose::Start);
        }
        Ok(())
    }

    /// Detaches from a process and forgets it.
    pub fn unwatch(&mut self, process: ProcessId) {
        let slot = self.targets.iter().find(|(_, target)| target.process.id() == process).map(|(slot, _)| *slot);
        if let Some(slot) = slot {
            self.forget(slot);
        }
    }

    /// Forgets the processes that have ended or whose image no longer has an emitter, and their intermediate data. Returns them.
    pub fn forget_ended(&mut self) -> Vec<ProcessId> {
        let mut gone: Vec<ProcessId> = self.ended.drain(..).map(|target| target.process.id()).collect();
        let deaf = |target: &Target| target.starting.is_none() && target.source != Source::Emitter;
        for slot in self.targets.iter().filter(|(_, target)| deaf(target)).map(|(slot, _)| *slot).collect::<Vec<_>>() {
            gone.extend(self.targets.get(&slot).map(|target| target.process.id()));
            self.forget(slot);
        }
        for note in self.notes.drain(..) {
            tracing::debug!("{note}");
        }
        gone
    }

    /// What each emitter has reported so far.
    pub fn heard(&self) -> Vec<EmitterTotals> {
        let heard = self.targets.iter().filter_map(|(slot, target)| {
            let shard = lock(&self.shard);
            let ledger = shard.watched.get(slot)?.sampled.as_ref()?;
            Some(EmitterTotals {
                process: target.process.id(),
                source: target.source_words(),
                sample_bytes: ledger.interval_bytes(),
                totals: ledger.totals(),
                stats: ledger.stats(),
                loss: target.loss(),
                since: target.since,
            })
        });
        heard.collect()
    }

    /// A process's current profile, with the blocks of its sample; listening continues. `join`: with a full census of its heap, which is kept for later profiles. `None`:
    /// the process is not listened to.
    pub fn profile_of(&mut self, process: ProcessId, join: bool) -> Option<(Profile, BlockIndex)> {
        let slot = self.targets.iter().find(|(_, target)| target.process.id() == process).map(|(slot, _)| *slot)?;
        let target = self.targets.get_mut(&slot)?;
        target.look_at_the_end(&self.session);
        // The ring's thread waits for the copy only, not for symbolization.
        let mut watched = {
            let mut shard = lock(&self.shard);
            let watched = shard.watched.get_mut(&slot)?;
            if let Some(ledger) = &mut watched.sampled {
                ledger.settle();
            }
            watched.copy_of_sample()?
        };
        if join && let Some(ledger) = &mut watched.sampled {
            match sampled_heap::picture(target.process.pid(), ledger, &target.before, false) {
                Ok(picture) => target.sampled_heap = Some(picture),
                Err(reason) => target.note(format!("no census was joined: {reason}")),
            }
            target.joined = Instant::now();
        }
        let duration = target.since.elapsed();
        let start_unix_ns = self.started_at.checked_add(self.started.elapsed().saturating_sub(duration)).unwrap_or(self.started_at);
        let (counters, read) = (self.session.capture.counters(&self.ring).unwrap_or_default(), self.ring.read());
        let facts = report::Facts {
            start_unix_ns: start_unix_ns.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
            duration,
            counters,
            read,
            unaccounted: report::unaccounted_so_far(&counters, read, self.ring.bytes()),
            children_ignored: 0,
            unwatched_children: 0,
            notices_lost: 0,
            inherited_refused: 0,
            notes: age_note(target.sampled_heap.is_some(), target.joined.elapsed()),
            has_growth: true,
            is_from_start: false,
        };
        target.watched = Some(watched);
        let mut blocks = BlockIndex::default();
        let mut each = |_: &Profile, target: &Target, watched: &Watched, stacks: report::Stacks| {
            blocks = BlockIndex::of(target.process.pid().0, watched, &stacks);
        };
        let targets = std::slice::from_ref(&*target);
        let profile = self.session.name(|symbolizer| report::profile(facts, targets, symbolizer, &mut each));
        target.watched = None;
        Some((profile, blocks))
    }
}

/// A note on the age of the census that a profile was joined with.
fn age_note(joined: bool, age: Duration) -> Vec<String> {
    let is_old = joined && age >= Duration::from_secs(1);
    is_old.then(|| format!("live chunks, pinned and blocked bytes are from the census {} s earlier", age.as_secs())).into_iter().collect()
}
