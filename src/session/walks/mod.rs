//! Requests censuses during a recording, and applies their results.

pub(in crate::session) mod large;
pub(in crate::session) mod moments;
mod seed;
pub(in crate::session) mod walker;

use std::collections::HashMap;

use crate::census::{LiveMemory, Memory};
use crate::process::Process;
use crate::profile::HeapMoment;
use crate::session::report::{attribution, heap};
use crate::session::sink::{SharedShard, lock};
use crate::session::target::Target;
use crate::session::trace::SharedTrace;
use crate::session::walks::walker::{Purpose, Walked, Walker};
use crate::session::{Recorder, monotonic_ns};

/// Maximum number of live blocks of a ledger that is repaired during the recording: the pass blocks the ring's thread for some tenths of a
/// second, which the ring's size allows for. Larger ledgers are repaired at the end.
const REPAIR_BLOCKS_MAX: u64 = 1 << 20;

/// What requests and results of walks concern.
pub(in crate::session) struct Walking<'a> {
    pub(in crate::session) walker: Option<&'a Walker>,
    pub(in crate::session) shard: &'a SharedShard,
    pub(in crate::session) targets: &'a mut HashMap<u16, Target>,
    pub(in crate::session) trace: Option<&'a SharedTrace>,
    pub(in crate::session) started_ns: u64,
    pub(in crate::session) start_chunks_max: Option<usize>,
}

impl Recorder {
    pub(in crate::session) fn walking(&mut self) -> Walking<'_> {
        Walking {
            walker: self.walker.as_ref(),
            shard: &self.shard,
            targets: &mut self.targets,
            trace: self.options.trace.as_ref(),
            started_ns: self.started_ns,
            start_chunks_max: self.options.start_chunks_max,
        }
    }
}

impl Walking<'_> {
    /// Requests walks of the heaps that are at a new maximum or need proof.
    pub(in crate::session) fn ask(&mut self) {
        let Some(walker) = self.walker else { return };
        let now_ns = monotonic_ns();
        for (slot, target) in &mut *self.targets {
            let totals = lock(self.shard).watched.get(slot).map(|watched| watched.ledger.totals());
            let is_traced = self.trace.is_some_and(|trace| trace.is_of(target.slot));
            if totals.is_some_and(|totals| target.moments.is_due(now_ns, totals.live_bytes, is_traced)) {
                walker.ask(target.walk_target(), Purpose::During);
            }
        }
    }

    /// Takes the walks that are done.
    pub(in crate::session) fn take(&mut self) {
        let done: Vec<Walked> = self.walker.map_or_else(Vec::new, |walker| walker.done().collect());
        for walked in done {
            self.take_one(walked);
        }
        if let Some(trace) = self.trace {
            let drained_ns = lock(self.shard).drained_ns;
            trace.seed(drained_ns);
        }
        for (slot, target) in &mut *self.targets {
            if target.moments.proof.is_some() {
                repair(self.shard, *slot, target);
            }
        }
    }

    pub(in crate::session) fn take_one(&mut self, walked: Walked) {
        let after_ms = walked.began_ns.saturating_sub(self.started_ns) / 1_000_000;
        let Some(target) = self.targets.values_mut().find(|target| target.walk_target() == walked.whose) else { return };
        let trace = self.trace.filter(|trace| trace.is_of(target.slot));
        match walked.purpose {
            Purpose::Start => {
                if let Some(trace) = trace {
                    match &walked.taken {
                        Some(taken) => {
                            let memory = Process::open(target.process.pid()).ok().and_then(|process| LiveMemory::open(process).ok());
                            trace.found_before(walked.ended_ns, seed::of(taken, memory.as_ref().map(|memory| memory as &dyn Memory)));
                        }
                        None => trace.found_nothing_before("the census of its start was not usable"),
                    }
                }
                target.started_with(walked, after_ms, self.start_chunks_max);
            }
            Purpose::During => {
                let heap = walked.taken.as_ref().map(heap::summary);
                if let (Some(trace), Some(heap), Some(taken)) = (trace, &heap, &walked.taken) {
                    let large = large::touched(taken, target.process.pid(), |addr| {
                        lock(self.shard).watched.get(&target.slot.index)?.ledger.live_block(addr)
                    });
                    trace.account((walked.began_ns, walked.ended_ns), heap, &large);
                }
                let moment = heap.map(|heap| HeapMoment { after_ms, heap, ..HeapMoment::default() });
                tracing::debug!("took a census of process {} after {after_ms} ms", target.process.pid());
                target.moments.walked(walked.began_ns, walked.ended_ns, moment);
                if !walked.managed_beside.is_empty() {
                    target.managed_beside.clone_from(&walked.managed_beside);
                }
                target.moments.proof = Some(walked);
            }
        }
    }
}

/// Removes blocks that a walk proved free from the ledgers, once the records from before its end have been applied: a free whose record is
/// still in the ring was not lost.
fn repair(shard: &SharedShard, slot: u16, target: &mut Target) {
    let mut shard = lock(shard);
    let drained_ns = shard.drained_ns;
    let Some(watched) = shard.watched.get_mut(&slot) else { return };
    let totals = watched.ledger.totals();
    if totals.doubtful == 0 || totals.live > REPAIR_BLOCKS_MAX {
        target.moments.proof = None;
        return;
    }
    let Some(walked) = target.moments.proof.take_if(|walked| walked.ended_ns < drained_ns) else { return };
    let Some(taken) = walked.taken else { return };
    watched.ledger.settle();
    let (blocks, bytes) = watched.ledger.prune_older(walked.began_ns, |block| !attribution::is_disproved(&taken.heaps, block));
    tracing::debug!("process {}: {blocks} blocks ({bytes} bytes) were freed without a record", target.process.pid());
}
