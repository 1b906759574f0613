//! Requests censuses during a recording, and applies their results.

pub(in crate::session) mod moments;
mod seed;
pub(in crate::session) mod walker;

use crate::census::{LiveMemory, Memory};
use crate::process::Process;
use crate::profile::HeapMoment;
use crate::session::report::{attribution, heap};
use crate::session::sink::{SharedShard, lock};
use crate::session::target::Target;
use crate::session::walks::walker::{Purpose, Walked};
use crate::session::{Recorder, monotonic_ns};

/// Maximum number of live blocks of a ledger that is repaired during the recording: the pass blocks the ring's thread for some tenths of a
/// second, which the ring's size allows for. Larger ledgers are repaired at the end.
const REPAIR_BLOCKS_MAX: u64 = 1 << 20;

impl Recorder {
    /// Requests walks of the heaps that are at a new maximum or need proof.
    pub(in crate::session) fn ask_for_walks(&mut self) {
        let Some(walker) = &self.walker else { return };
        let now_ns = monotonic_ns();
        for (slot, target) in &mut self.targets {
            let totals = lock(&self.shard).watched.get(slot).map(|watched| watched.ledger.totals());
            let is_traced = self.options.trace.as_ref().is_some_and(|trace| trace.is_of(target.slot));
            if totals.is_some_and(|totals| target.moments.is_due(now_ns, totals.live_bytes, is_traced)) {
                walker.ask(target.walk_target(), Purpose::During);
            }
        }
    }

    pub(in crate::session) fn take_walks(&mut self) {
        let done: Vec<Walked> = self.walker.as_ref().map_or_else(Vec::new, |walker| walker.done().collect());
        for walked in done {
            self.take_walk(walked);
        }
        if let Some(trace) = &self.options.trace {
            let drained_ns = lock(&self.shard).drained_ns;
            trace.seed(drained_ns);
        }
        for (slot, target) in &mut self.targets {
            if target.moments.proof.is_some() {
                repair(&self.shard, *slot, target);
            }
        }
    }

    pub(in crate::session) fn take_walk(&mut self, walked: Walked) {
        let after_ms = walked.began_ns.saturating_sub(self.started_ns) / 1_000_000;
        let Some(target) = self.targets.values_mut().find(|target| target.walk_target() == walked.whose) else { return };
        match walked.purpose {
            Purpose::Start => {
                if let Some(trace) = self.options.trace.as_ref().filter(|trace| trace.is_of(target.slot)) {
                    match &walked.taken {
                        Some(taken) => {
                            let memory = Process::open(target.process.pid()).ok().and_then(|process| LiveMemory::open(process).ok());
                            trace.found_before(walked.ended_ns, seed::of(taken, memory.as_ref().map(|memory| memory as &dyn Memory)));
                        }
                        None => trace.found_nothing_before("the census of its start was not usable"),
                    }
                }
                target.started_with(walked, after_ms, self.options.start_chunks_max);
            }
            Purpose::During => {
                let heap = walked.taken.as_ref().map(heap::summary);
                if let (Some(trace), Some(heap)) = (self.options.trace.as_ref().filter(|trace| trace.is_of(target.slot)), &heap) {
                    trace.account((walked.began_ns, walked.ended_ns), heap);
                }
                let moment = heap.map(|heap| HeapMoment { after_ms, heap, ..HeapMoment::default() });
                tracing::debug!("took a census of process {} after {after_ms} ms", target.process.pid());
                target.moments.walked(walked.began_ns, walked.ended_ns, moment);
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
