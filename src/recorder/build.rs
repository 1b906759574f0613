//! From the books to the profile.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::heap::HeapPicture;
use super::places::Places;
use super::sampled::SampledPicture;
use super::target::Target;
use super::watched::Watched;
use crate::capture::counters::ENDS;
use crate::capture::{Counters, Read, TargetLoss, wire};
use crate::fragmentation::growth::GrowthSpace;
use crate::ledger::{Estimate, Ledger, LedgerStats, NO_STACK, STACKS_BEYOND_LIMIT, SampledLedger, SampledStack, StackView};
use crate::probe::emitter::Emitter;
use crate::profile::{
    BEFORE_ATTACH, Counter, Frame, FrameId, KindSet, Metadata, Mode, PowerCounts, Profile, StandardErrors, UNATTRIBUTED, ValueKind, Values,
    meta,
};
use crate::symbol::{AddressSpace, Symbolizer};
use crate::target::container::Container;
use crate::units::{HumanBytes, StackId, counted, grouped};
use crate::unwind::End;

/// What the recorder knows beside the books.
pub struct Facts {
    pub start_unix_ns: u64,
    pub duration: Duration,
    pub counters: Counters,
    pub read: Read,
    /// Hits of probes of which no record was read.
    pub unaccounted: u64,
    pub children_ignored: u64,
    pub notices_lost: u64,
    pub inherited_refused: u64,
    pub notes: Vec<String>,
}

/// The programs' counters that are losses.
const LOSSES: [&str; 10] = [
    "lost_allocations",
    "lost_frees",
    "lost_stacks",
    "lost_vm_changes",
    "lost_life_events",
    "no_thread_state",
    "no_walk_state",
    "not_followed_calls",
    "unknown_sites",
    "lost_births",
];

/// Calls under way when the recording ends, whose returns nobody waits for: no more than there were records of others.
const OPEN_CALLS_MAX: u64 = 1024;

/// What exact mode measures.
const KINDS: [ValueKind; 9] = [
    ValueKind::AllocObjects,
    ValueKind::AllocSpace,
    ValueKind::InuseObjects,
    ValueKind::InuseSpace,
    ValueKind::PinnedSpace,
    ValueKind::BlockedSpace,
    ValueKind::GrowthSpace,
    ValueKind::PeakSpace,
    ValueKind::DoubtfulSpace,
];

/// What a sample measures.
const SAMPLED_KINDS: [ValueKind; 6] = [
    ValueKind::AllocObjects,
    ValueKind::AllocSpace,
    ValueKind::InuseObjects,
    ValueKind::InuseSpace,
    ValueKind::PeakSpace,
    ValueKind::DoubtfulSpace,
];

/// What it measures with a census.
const JOINED_KINDS: [ValueKind; 2] = [ValueKind::PinnedSpace, ValueKind::BlockedSpace];

/// Builds the profile of all targets; with `places`, also tells where the blocks of those recorded exactly lay.
pub fn profile(facts: Facts, targets: &[Target], mut places: Option<&mut Vec<Places>>) -> Profile {
    let mut profile = Profile::new(metadata(&facts));
    let is_sampled = |target: &&Target| target.books.as_ref().is_some_and(|books| books.sampled.is_some());
    let sampled = targets.iter().filter(is_sampled).count();
    if sampled > 0 {
        // With one estimate among them the sums are estimates.
        profile.meta.mode = Mode::Sampled;
        if sampled == targets.len() {
            let joined = targets.iter().any(|target| target.sampled_heap.as_ref().is_some_and(|heap| !heap.by_sums));
            profile.meta.kinds = SAMPLED_KINDS.into_iter().chain(JOINED_KINDS.into_iter().filter(|_| joined)).collect();
            profile.meta.limits.clear();
        }
    }
    let mut namer = Namer { symbolizer: Symbolizer::new(), known: HashMap::new(), ends: HashMap::new() };
    for target in targets {
        let Some(books) = &target.books else { continue };
        if let Some(ledger) = &books.sampled {
            add_sampled_process(&mut profile, &mut namer.symbolizer, target, books, ledger);
        } else {
            let stacks = add_process(&mut profile, &mut namer, target, books);
            if let Some(places) = &mut places {
                places.push(Places::of(target.process.pid().0, &books.ledger, &stacks));
            }
        }
    }
    let stats: Vec<LedgerStats> = targets.iter().filter_map(|target| target.books.as_ref()).map(|books| books.ledger.stats()).collect();
    profile.meta.corrections = corrections(&stats);
    // One process without a census leaves the sum of all unknown, unless it has ended: then nothing of it lives.
    let joined = |target: &&Target| target.sampled_heap.is_some() || target.heap.as_ref().is_some_and(|heap| heap.attribution.is_some());
    let gone = |target: &&Target| !joined(target) && !target.process.is_alive();
    if targets.iter().any(|target| joined(&target)) && targets.iter().all(|target| joined(&target) || gone(&target)) {
        profile.meta.kinds = profile.meta.kinds.with(ValueKind::LiveObjects).with(ValueKind::LiveSpace);
        let ended = targets.iter().filter(gone).count() as u64;
        if ended > 0 {
            let who = if ended == 1 { "1 process".to_owned() } else { format!("{} processes", grouped(ended)) };
            let limit = format!("{who} had ended without a census: what was held then is in use (inuse), nothing of it is live");
            profile.meta.limits.push(limit);
        }
    } else {
        let limit = "no census was joined at the end: of blocks allocated before the recording it is unknown what they hold, and whether they are free";
        profile.meta.limits.push(limit.into());
    }
    profile
}

/// What was put right in the books, by kind.
fn corrections(stats: &[LedgerStats]) -> Vec<Counter> {
    let sum = |of: fn(&LedgerStats) -> u64| stats.iter().map(of).fold(0, u64::saturating_add);
    vec![
        Counter::new("proven_free", sum(|s| s.pruned), "blocks that a census proved free: the record of their free was lost"),
        Counter::new("proven_free_bytes", sum(|s| s.pruned_bytes), "bytes of them"),
        Counter::new("handed_out_again", sum(|s| s.missed_frees), "blocks whose address was handed out again without a free between"),
        Counter::new("handed_out_again_bytes", sum(|s| s.missed_free_bytes), "bytes of them"),
        Counter::new("unmapped", sum(|s| s.unmapped), "blocks that went with their mapping"),
        Counter::new("unmapped_bytes", sum(|s| s.unmapped_bytes), "bytes of them"),
    ]
}

/// Hits that the kernel lost by the end of a recording, when all records have been read.
pub fn unaccounted_at_the_end(counters: &Counters, read: Read) -> u64 {
    counters.unaccounted_hits(read.calls, read.calls.min(OPEN_CALLS_MAX))
}

/// Hits that the kernel lost so far, while as many records as a ring holds may wait to be read.
pub fn unaccounted_so_far(counters: &Counters, read: Read, ring_bytes: u32) -> u64 {
    counters.unaccounted_hits(read.calls, u64::from(ring_bytes) / wire::FREE_BYTES)
}

/// What was lost, by kind; zeros say that the kind is counted. `unaccounted`: hits that the kernel lost.
pub fn losses(counters: &Counters, read: Read, unaccounted: u64, notices_lost: u64, inherited_refused: u64) -> Vec<Counter> {
    let mut losses: Vec<Counter> = LOSSES
        .iter()
        .filter_map(|name| counters.iter().find(|(n, ..)| n == name))
        .map(|(name, text, value)| Counter::new(name, value, text))
        .collect();
    losses.push(Counter::new(
        "unaccounted_hits",
        unaccounted,
        "probe hits of which neither a record nor a reason came: the kernel lost them",
    ));
    losses.push(Counter::new("malformed_records", read.malformed, "records that could not be read"));
    losses.push(Counter::new(
        "lost_notices",
        notices_lost,
        "notices of new code or children that came too fast; every process was looked at anew",
    ));
    losses.push(Counter::new(
        "children_without_books",
        inherited_refused,
        "children whose parent had too many blocks to copy its books: what they inherited is unattributed",
    ));
    losses
}

/// What must be said where the kernel does not do with hits what it should.
pub fn lost_by_the_kernel(counters: &Counters, read: Read, unaccounted: u64) -> Option<String> {
    let lost = unaccounted.saturating_add(counters.get("unknown_sites"));
    let hits = counters.get("hits");
    (lost > 0).then(|| match read.calls {
        0 => format!(
            "{} were hit and not one record came: the recording is empty because this kernel lost them, not because nothing was allocated; \
             `fragprof doctor` tells what it can do",
            counted(hits, "probe")
        ),
        _ => format!("of {} the kernel lost {}: what they allocated and freed is missing", counted(hits, "probe hit"), grouped(lost)),
    })
}

fn metadata(facts: &Facts) -> Metadata {
    let counters = &facts.counters;
    let stack_ends = (1..ENDS as u8)
        .filter_map(|reason| Some((End::from_wire(reason)?, counters.ends(reason))))
        .filter(|(_, value)| *value > 0)
        .map(|(end, value)| Counter::new(snake_case(&format!("{end:?}")), value, end.description()))
        .collect();
    let mut notes = facts.notes.clone();
    if facts.children_ignored > 0 {
        let children = facts.children_ignored;
        let what = if children == 1 { "1 child process was".to_owned() } else { format!("{} child processes were", grouped(children)) };
        notes.push(format!("{what} not watched (--children watches them)"));
    }
    let unaccounted = facts.unaccounted;
    Metadata {
        tool: concat!("fragprof ", env!("CARGO_PKG_VERSION")).into(),
        mode: Mode::Exact,
        start_unix_ns: facts.start_unix_ns,
        duration_s: facts.duration.as_secs_f64(),
        kinds: KindSet::from_iter(KINDS),
        losses: losses(counters, facts.read, unaccounted, facts.notices_lost, facts.inherited_refused),
        stack_ends,
        notes,
        doubts: lost_by_the_kernel(counters, facts.read, unaccounted).into_iter().collect(),
        ..Metadata::default()
    }
}

/// Adds a process; returns the frames of its stacks.
fn add_process(profile: &mut Profile, namer: &mut Namer, target: &Target, books: &Watched) -> HashMap<StackId, Arc<[FrameId]>> {
    let pid = target.process.pid().0;
    let heap = target.heap.as_ref();
    let totals = books.ledger.totals();
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        container_labels: target.process.container().map(Container::label_map).unwrap_or_default(),
        allocators: target.allocators.clone(),
        lossy: books.ledger.is_lossy(),
        peak_inuse_bytes: Some(totals.peak_bytes),
        heap: heap.map(|heap| heap.summary),
        attribution: heap.and_then(|heap| heap.attribution),
        at_start: target.moments.at_start,
        at_peak: target.moments.at_peak,
        sizes: PowerCounts::new(books.ledger.histograms().sizes.counts()),
        lifetimes_us: PowerCounts::new(books.ledger.histograms().lifetimes.counts()),
        ..meta::Process::default()
    });
    for note in target.notes.iter().chain(heap.map_or(&[][..], |heap| &heap.notes)) {
        profile.meta.notes.push(format!("process {pid}: {note}"));
    }
    profile.meta.doubts.extend(doubts(target.loss(), books).into_iter().map(|doubt| format!("process {pid}: {doubt}")));
    let unknown_frees = books.ledger.stats().unknown_frees;
    if unknown_frees > 0 {
        profile
            .meta
            .notes
            .push(format!("process {pid}: allocated before the recording and freed in it: {}", counted(unknown_frees, "block")));
    }
    namer.begin_process();
    // Of an image before an exec only what it did counts: its memory is gone.
    for past in &books.past {
        add_ledger(profile, namer, &target.space, pid, past, |view| {
            Values::default()
                .with(ValueKind::AllocObjects, view.totals.allocations)
                .with(ValueKind::AllocSpace, view.totals.allocated_bytes)
        });
    }
    let owned = heap.map(|heap| &heap.owned);
    let stacks = add_ledger(profile, namer, &target.space, pid, &books.ledger, |view| {
        let t = &view.totals;
        let values = Values::default()
            .with(ValueKind::AllocObjects, t.allocations)
            .with(ValueKind::AllocSpace, t.allocated_bytes)
            .with(ValueKind::InuseObjects, t.live)
            .with(ValueKind::InuseSpace, t.live_bytes)
            .with(ValueKind::PeakSpace, t.at_peak_bytes)
            .with(ValueKind::DoubtfulSpace, t.doubtful_bytes)
            .with(ValueKind::GrowthSpace, books.growth.bytes.of(view.id));
        let Some(owned) = owned else { return values };
        values
            .with(ValueKind::PinnedSpace, owned.pinned.of(view.id))
            .with(ValueKind::BlockedSpace, owned.blocked.of(view.id))
            .with(ValueKind::LiveObjects, owned.live_chunks.of(view.id))
            .with(ValueKind::LiveSpace, owned.live.of(view.id))
    });
    if let Some(heap) = heap {
        add_others(profile, pid, heap, &books.growth);
    }
    stacks
}

/// What no recorded stack owns, as rows of their own. Their live bytes are the census's alone: no recording knows what was asked for.
fn add_others(profile: &mut Profile, pid: u32, heap: &HeapPicture, growth: &GrowthSpace) {
    let owned = &heap.owned;
    let before = Values::default()
        .with(ValueKind::LiveObjects, owned.live_chunks.before_attach_bytes())
        .with(ValueKind::LiveSpace, owned.live.before_attach_bytes())
        .with(ValueKind::PinnedSpace, owned.pinned.before_attach_bytes())
        .with(ValueKind::BlockedSpace, owned.blocked.before_attach_bytes());
    let unknown = Values::default()
        .with(ValueKind::LiveObjects, owned.live_chunks.unattributed_bytes())
        .with(ValueKind::LiveSpace, owned.live.unattributed_bytes())
        .with(ValueKind::PinnedSpace, owned.pinned.unattributed_bytes())
        .with(ValueKind::BlockedSpace, owned.blocked.unattributed_bytes())
        .with(ValueKind::GrowthSpace, growth.bytes.unattributed_bytes());
    if !before.is_zero() {
        profile.add(pid, &[Frame::named(BEFORE_ATTACH)], None, &before);
    }
    if !unknown.is_zero() {
        profile.add(pid, &[], None, &unknown);
    }
}

fn add_ledger(
    profile: &mut Profile,
    namer: &mut Namer,
    space: &AddressSpace,
    pid: u32,
    ledger: &Ledger,
    values: impl Fn(&StackView<'_>) -> Values,
) -> HashMap<StackId, Arc<[FrameId]>> {
    let mut stacks = HashMap::new();
    for view in ledger.stacks() {
        let values = values(&view);
        if values.is_zero() {
            continue;
        }
        let (frames, truncated) = if view.frames.is_empty() {
            (Arc::from([profile.intern(&Frame::named(stand_in(view.id)))]), None)
        } else {
            (namer.stack(profile, space, view.frames), namer.end(view.end))
        };
        stacks.insert(view.id, Arc::clone(&frames));
        profile.add_ids(pid, frames, truncated, &values);
    }
    stacks
}

/// Names frames, each address of a process once: stacks of one program share nearly all of their frames.
struct Namer {
    symbolizer: Symbolizer,
    /// By frame word, of one process: at most as many as its ledger keeps frames of, 12 bytes each and the ids.
    known: HashMap<u64, Box<[FrameId]>>,
    /// Words for the ends of cut walks.
    ends: HashMap<u8, Option<Arc<str>>>,
}

impl Namer {
    /// Addresses mean something else in the next process.
    fn begin_process(&mut self) {
        self.known.clear();
    }

    fn stack(&mut self, profile: &mut Profile, space: &AddressSpace, words: &[u64]) -> Arc<[FrameId]> {
        let mut ids = Vec::with_capacity(words.len() + words.len() / 2);
        for &word in words {
            let known = self.known.entry(word).or_insert_with(|| {
                let frames = self.symbolizer.frames(space, word);
                frames.iter().map(|frame| profile.intern(frame)).collect()
            });
            ids.extend_from_slice(known);
        }
        ids.into()
    }

    /// Why a walk ended early; `None` if it did not.
    fn end(&mut self, end: u8) -> Option<Arc<str>> {
        let words = || End::from_wire(end).filter(|end| *end != End::Complete).map(|end| Arc::from(end.description()));
        self.ends.entry(end).or_insert_with(words).clone()
    }
}

/// The name under which allocations go whose stack has no frames.
pub fn stand_in(id: StackId) -> &'static str {
    match id {
        NO_STACK => "[no stack]",
        STACKS_BEYOND_LIMIT => "[stacks beyond the limit]",
        _ => "[stack lost]",
    }
}

/// What a reader must know before believing a number of this process.
pub fn doubts(loss: TargetLoss, books: &Watched) -> Vec<String> {
    if let Some(sampled) = &books.sampled {
        return sampled_doubts(loss, books, sampled);
    }
    let stats = books.ledger.stats();
    let totals = books.ledger.totals();
    let mut doubts = Vec::new();
    let mut doubt = |count: u64, text: String| {
        if count > 0 {
            doubts.push(text);
        }
    };
    doubt(
        loss.allocations + loss.frees,
        format!(
            "{} and {} were lost: {} ({}) may be free already, and some live ones may be missing",
            counted(loss.allocations, "allocation record"),
            counted(loss.frees, "free record"),
            counted(totals.doubtful, "live block"),
            HumanBytes(totals.doubtful_bytes)
        ),
    );
    doubt(stats.gaps, format!("it was not observed for {:.3} s in {}", stats.gap_ns as f64 / 1e9, counted(stats.gaps, "spell")));
    doubt(loss.abandoned, format!("{} never returned: whether they allocated is unknown", counted(loss.abandoned, "allocator call")));
    doubt(
        stats.missed_frees,
        format!(
            "{} ({}) had been freed unseen: the addresses were handed out again",
            counted(stats.missed_frees, "block"),
            HumanBytes(stats.missed_free_bytes)
        ),
    );
    doubt(
        stats.pruned,
        format!("{} ({}) had been freed unseen: a census found them free", counted(stats.pruned, "block"), HumanBytes(stats.pruned_bytes)),
    );
    doubt(stats.stacks_refused, format!("{} beyond the limit are summed in one row", counted(stats.stacks_refused, "stack")));
    doubt(stats.stacks_undefined, format!("{} were lost: their allocations are in one row", counted(stats.stacks_undefined, "stack")));
    doubt(books.past_dropped, format!("{} before earlier execs are not in the profile", counted(books.past_dropped, "image")));
    doubts
}

/// A process whose own emitter is the source.
fn add_sampled_process(profile: &mut Profile, symbolizer: &mut Symbolizer, target: &Target, books: &Watched, ledger: &SampledLedger) {
    let pid = target.process.pid().0;
    let totals = ledger.totals();
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        container_labels: target.process.container().map(Container::label_map).unwrap_or_default(),
        allocators: target.allocators.clone(),
        lossy: ledger.is_lossy(),
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
    profile.meta.notes.extend(target.notes.iter().map(|note| format!("process {pid}: {note}")));
    profile.meta.doubts.extend(doubts(target.loss(), books).into_iter().map(|doubt| format!("process {pid}: {doubt}")));
    for past in &books.past_sampled {
        add_sampled(profile, symbolizer, target, past, |row, view| {
            row.set(ValueKind::AllocObjects, view.allocations);
            row.set(ValueKind::AllocSpace, view.allocated_bytes);
        });
    }
    let heap = target.sampled_heap.as_ref();
    add_sampled(profile, symbolizer, target, ledger, |row, view| {
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
}

/// What the sample does not explain of a heap, as rows of its own, and the sum that they make with the stacks.
fn add_rests(profile: &mut Profile, pid: u32, heap: &SampledPicture, live_bytes: Estimate) {
    let rows = [(BEFORE_ATTACH, heap.before), (UNATTRIBUTED, Some(heap.unattributed))];
    for (name, shares) in rows.into_iter().filter_map(|(name, shares)| Some((name, shares?))) {
        let mut row = Row::default();
        row.set(ValueKind::LiveObjects, shares.chunks);
        row.set(ValueKind::LiveSpace, shares.chunk_bytes);
        row.set(ValueKind::PinnedSpace, shares.pinned_bytes);
        row.set(ValueKind::BlockedSpace, shares.blocked_bytes);
        row.add_to(profile, pid, &[Frame::named(name)], None);
    }
    let (notes, limits) = (&mut profile.meta.notes, &mut profile.meta.limits);
    let shown =
        |estimate: &Estimate| format!("{} ±{}", HumanBytes(estimate.rounded()), HumanBytes((1.96 * estimate.standard_error()) as u64));
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
            "process {pid}: {} sampled blocks were gone when the census was taken, after the end of the recording",
            heap.gone
        ));
    }
    if heap.before.is_none() {
        limits.push(format!(
            "process {pid}: what was allocated before the recording is part of the unattributed: it was not counted at its start"
        ));
    }
    if heap.by_sums {
        limits.push(format!(
            "process {pid}: its allocator's chunks are not told one by one: stacks have their live bytes as asked for, what lives from before \
             the recording is part of the unattributed, and pinned and blocked bytes are not known"
        ));
    }
    if heap.beyond > 0 {
        limits.push(format!("process {pid}: {} sampled blocks were too many to join with the census", heap.beyond));
    }
}

/// What a reader must know before believing an estimate of this process.
fn sampled_doubts(loss: TargetLoss, books: &Watched, ledger: &SampledLedger) -> Vec<String> {
    let stats = ledger.stats();
    let mut doubts = Vec::new();
    let mut doubt = |count: u64, text: String| {
        if count > 0 {
            doubts.push(text);
        }
    };
    doubt(
        loss.allocations + loss.frees,
        format!(
            "{} samples and {} of their frees were lost: live bytes by stack are off by what they stood for",
            loss.allocations, loss.frees
        ),
    );
    doubt(stats.gaps, format!("it was not observed for {:.3} s in {} spells", stats.gap_ns as f64 / 1e9, stats.gaps));
    doubt(stats.missed_frees, format!("{} sampled blocks were freed unseen: their addresses were handed out again", stats.missed_frees));
    doubt(
        stats.pruned,
        format!("{} sampled blocks of which a free may have been lost were not live by the census: taken out", stats.pruned),
    );
    doubt(stats.implausible, format!("{} samples with an impossible address or weight were refused", stats.implausible));
    doubt(stats.refused, format!("{} samples beyond {} that live are not in the live bytes", stats.refused, crate::ledger::LIVE_MAX));
    let (refused, undefined) = ledger.stacks_missing();
    doubt(refused, format!("{refused} stacks beyond the limit are summed in one row"));
    doubt(undefined, format!("{undefined} stacks were lost: their allocations are in one row"));
    doubt(books.past_dropped, format!("{} images before earlier execs are not in the profile", books.past_dropped));
    doubts
}

/// A row of estimates under way.
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
) {
    let pid = target.process.pid().0;
    for view in ledger.stacks() {
        let mut row = Row::default();
        fill(&mut row, &view);
        if view.frames.is_empty() {
            row.add_to(profile, pid, &[Frame::named(stand_in(view.id))], None);
            continue;
        }
        let frames = symbolizer.stack(&target.space, view.frames);
        let end = End::from_wire(view.end).filter(|end| *end != End::Complete).map(End::description);
        row.add_to(profile, pid, without_emitter(&frames, target), end);
    }
}

/// The frames without those of fragprof's own sampler at the leaf, which are the same in every stack. What another emitter's file is made
/// of, its program's code or an allocator's, is not known.
fn without_emitter<'a>(frames: &'a [Frame], target: &Target) -> &'a [Frame] {
    let is_emitters = |frame: &Frame| {
        let own = |emitter: &&Emitter| emitter.stats.is_some();
        target.emitters.iter().filter(own).any(|emitter| emitter.display_path == std::path::Path::new(&*frame.module))
    };
    let own = frames.iter().take_while(|frame| is_emitters(frame)).count();
    if own < frames.len() { &frames[own..] } else { frames }
}

/// `NoMapping` → `no_mapping`.
pub fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}
