//! Rows of processes whose own emitter is the source: estimates with their errors.

use std::collections::HashMap;
use std::sync::Arc;

use crate::emitter::Emitter;
use crate::ledger::{Estimate, SampledLedger, SampledStack};
use crate::process::container::Container;
use crate::profile::{BEFORE_ATTACH, Frame, FrameId, PowerCounts, Profile, StandardErrors, UNATTRIBUTED, ValueKind, Values, meta};
use crate::session::report::losses::doubts;
use crate::session::report::placeholder;
use crate::session::report::sampled_heap::{SampledPicture, Shares};
use crate::session::target::Target;
use crate::session::tier::exact::Watched;
use crate::symbol::Symbolizer;
use crate::units::{HumanBytes, StackId, counted, estimated, were};
use crate::unwind::End;

/// The kinds of values that a sample gives.
pub const SAMPLED_KINDS: [ValueKind; 6] = [
    ValueKind::AllocObjects,
    ValueKind::AllocSpace,
    ValueKind::InuseObjects,
    ValueKind::InuseSpace,
    ValueKind::PeakSpace,
    ValueKind::DoubtfulSpace,
];

/// The additional kinds when a census is joined.
pub const JOINED_KINDS: [ValueKind; 2] = [ValueKind::PinnedSpace, ValueKind::BlockedSpace];

/// Adds a process whose own emitter is the source.
///
/// Returns the frames of its stacks, by which the blocks of its sample can be found.
pub fn add_sampled_process(
    profile: &mut Profile,
    symbolizer: &mut Symbolizer,
    target: &Target,
    watched: &Watched,
    ledger: &SampledLedger,
) -> HashMap<StackId, Arc<[FrameId]>> {
    let pid = target.process.pid().0;
    let totals = ledger.totals();
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        container_labels: target.process.container().map(Container::label_map).unwrap_or_default(),
        allocators: target.allocators.clone(),
        lossy: ledger.is_lossy(),
        unobserved_us: Some(watched.past_sampled.iter().chain([ledger]).map(|ledger| ledger.stats().gap_ns).sum::<u64>() / 1000),
        peak_inuse_bytes: Some(totals.peak_bytes.rounded()),
        heap: target.sampled_heap.as_ref().map(|heap| heap.summary),
        source: target.source_words(),
        samples: Some(totals.samples),
        sample_bytes: ledger.interval_bytes(),
        longest_sample_bytes: ledger.longest_interval_bytes(),
        sizes: PowerCounts::new(&ledger.sizes()),
        lifetimes_us: PowerCounts::new(&ledger.lifetimes()),
        ..meta::Process::default()
    });
    profile.meta.notes.extend(target.every_note().map(|note| format!("process {pid}: {note}")));
    profile.meta.doubts.extend(doubts(target.loss(), watched).into_iter().map(|doubt| format!("process {pid}: {doubt}")));
    for past in &watched.past_sampled {
        add_sampled(profile, symbolizer, target, past, |row, view| {
            row.set(ValueKind::AllocObjects, view.allocations);
            row.set(ValueKind::AllocSpace, view.allocated_bytes);
        });
    }
    let heap = target.sampled_heap.as_ref();
    let frames = add_sampled(profile, symbolizer, target, ledger, |row, view| {
        row.set(ValueKind::AllocObjects, view.allocations);
        row.set(ValueKind::AllocSpace, view.allocated_bytes);
        row.set(ValueKind::InuseObjects, view.live);
        row.set(ValueKind::InuseSpace, view.live_bytes);
        row.set(ValueKind::PeakSpace, view.peak_bytes);
        row.set(ValueKind::DoubtfulSpace, view.doubtful_bytes);
        if let Some(shares) = heap.and_then(|heap| heap.by_stack.get(&view.id)) {
            row.set(ValueKind::LiveObjects, shares.chunks);
            row.set(ValueKind::LiveSpace, shares.chunk_bytes);
            row.set(ValueKind::PinnedSpace, shares.pinned_bytes);
            row.set(ValueKind::BlockedSpace, shares.blocked_bytes);
        }
    });
    if let Some(heap) = heap {
        add_rests(profile, pid, heap, totals.live_bytes);
    }
    frames
}

/// Adds the heap memory that the sample does not explain as separate rows, and their sum together with the stacks.
fn add_rests(profile: &mut Profile, pid: u32, heap: &SampledPicture, live_bytes: Estimate) {
    let mut add = |shares: &Shares, frames: &[Frame]| {
        let mut row = Row::default();
        row.set(ValueKind::LiveObjects, shares.chunks);
        row.set(ValueKind::LiveSpace, shares.chunk_bytes);
        row.set(ValueKind::PinnedSpace, shares.pinned_bytes);
        row.set(ValueKind::BlockedSpace, shares.blocked_bytes);
        row.add_to(profile, pid, frames, None);
    };
    if heap.by_owner.is_empty() {
        let rows = [(BEFORE_ATTACH, heap.before), (UNATTRIBUTED, Some(heap.unattributed))];
        for (name, shares) in rows {
            if let Some(shares) = shares {
                add(&shares, &[Frame::named(name)]);
            }
        }
    }
    for part in &heap.by_owner {
        add(&part.shares, &part.frames);
    }
    profile.meta.notes.extend(heap.notes.iter().map(|note| format!("process {pid}: {note}")));
    let (notes, limits) = (&mut profile.meta.notes, &mut profile.meta.limits);
    let shown = |estimate: &Estimate| estimated(estimate.rounded(), estimate.rounded_error(), |bytes| HumanBytes(bytes).to_string());
    let rounding = heap.attributed.chunk_bytes.value - live_bytes.value;
    let before = heap.before.map_or_else(String::new, |before| format!("from before the attach {}, ", shown(&before.chunk_bytes)));
    notes.push(format!(
        "process {pid}: live by the census {} = by stack {}, the allocator's rounding of it {}, {before}unattributed {}",
        HumanBytes(heap.summary.live_bytes.unwrap_or(0)),
        shown(&live_bytes),
        HumanBytes(rounding.max(0.0) as u64),
        shown(&heap.unattributed.chunk_bytes),
    ));
    if heap.gone > 0 {
        notes.push(format!(
            "process {pid}: {} {} no longer live when the census was taken, after the end of the recording",
            counted(heap.gone, "sampled block"),
            were(heap.gone)
        ));
    }
    if heap.before.is_none() {
        limits.push(format!(
            "process {pid}: memory allocated before the recording is part of [unattributed], because no census was taken at the start"
        ));
    }
    if heap.by_sums {
        limits.push(format!(
            "process {pid}: its allocator's single chunks are not known: stacks have their live bytes as requested, live memory from \
             before the recording is part of [unattributed], and pinned and blocked bytes are not known"
        ));
    }
    if heap.beyond > 0 {
        limits.push(format!("process {pid}: {} sampled blocks were beyond the limit and were not joined with the census", heap.beyond));
    }
}

/// A row of estimates under construction.
#[derive(Default)]
struct Row {
    values: Values,
    errors: StandardErrors,
}

impl Row {
    fn set(&mut self, kind: ValueKind, estimate: Estimate) {
        self.values.set(kind, estimate.rounded());
        self.errors.set(kind, estimate.rounded_error());
    }

    fn add_to(&self, profile: &mut Profile, pid: u32, frames: &[Frame], truncated: Option<&str>) {
        if !(self.values.is_zero() && self.errors.is_zero()) {
            profile.add_estimate(pid, frames, truncated, &self.values, &self.errors);
        }
    }
}

fn add_sampled(
    profile: &mut Profile,
    symbolizer: &mut Symbolizer,
    target: &Target,
    ledger: &SampledLedger,
    fill: impl Fn(&mut Row, &SampledStack<'_>),
) -> HashMap<StackId, Arc<[FrameId]>> {
    let pid = target.process.pid().0;
    let mut frames_of = HashMap::new();
    for view in ledger.stacks() {
        let mut row = Row::default();
        fill(&mut row, &view);
        if view.frames.is_empty() {
            row.add_to(profile, pid, &[Frame::named(placeholder(view.id))], None);
            continue;
        }
        let frames = symbolizer.stack(&target.space, view.frames);
        let end = End::from_wire(view.end).filter(|end| *end != End::Complete).map(End::description);
        let frames = without_emitter(&frames, target);
        row.add_to(profile, pid, frames, end);
        frames_of.insert(view.id, frames.iter().map(|frame| profile.intern(frame)).collect());
    }
    frames_of
}

/// The frames without fragprof's own sampler at the leaf, which is the same in every stack. The contents of another emitter's file are not
/// known: it may be the program or an allocator.
fn without_emitter<'a>(frames: &'a [Frame], target: &Target) -> &'a [Frame] {
    let is_emitters = |frame: &Frame| {
        let own = |emitter: &&Emitter| emitter.stats.is_some();
        target.emitters.iter().filter(own).any(|emitter| emitter.display_path == std::path::Path::new(&*frame.module))
    };
    let own = frames.iter().take_while(|frame| is_emitters(frame)).count();
    if own < frames.len() { &frames[own..] } else { frames }
}
