//! Builds the profile from the ledgers.

pub(in crate::session) mod attribution;
pub mod block_index;
pub mod heap;
mod losses;
mod sampled;
pub(in crate::session) mod sampled_heap;
mod unattributed;
pub mod view;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use losses::corrections;
use losses::unobserved;
pub use losses::{doubts, losses, lost_by_the_kernel, stack_ends, unaccounted_at_the_end, unaccounted_so_far};
use sampled::{JOINED_KINDS, SAMPLED_KINDS, add_sampled_process};

use crate::capture::{Counters, Read};
use crate::fragmentation::growth::GrowthSpace;
use crate::ledger::{Ledger, LedgerStats, NO_STACK, STACKS_BEYOND_LIMIT, StackView};
use crate::process::container::Container;
use crate::profile::{BEFORE_ATTACH, Frame, FrameId, Metadata, Mode, PowerCounts, Profile, ValueKind, Values, meta};
use crate::session::report::block_index::BlockIndex;
use crate::session::report::heap::{Before, HeapPicture};
use crate::session::target::Target;
use crate::session::tier::exact::Watched;
use crate::session::trace::{self, SharedTrace};
use crate::symbol::{AddressSpace, Symbolizer};
use crate::trace::Names;
use crate::units::{HumanBytes, StackId, counted, grouped, were};
use crate::unwind::End;

/// What the recorder knows in addition to the ledgers.
pub(in crate::session) struct Facts {
    pub(in crate::session) start_unix_ns: u64,
    pub(in crate::session) duration: Duration,
    pub(in crate::session) counters: Counters,
    pub(in crate::session) read: Read,
    /// Probe hits for which no record was read.
    pub(in crate::session) unaccounted: u64,
    pub(in crate::session) children_ignored: u64,
    /// Children that could not be watched.
    pub(in crate::session) unwatched_children: u64,
    pub(in crate::session) notices_lost: u64,
    pub(in crate::session) inherited_refused: u64,
    pub(in crate::session) notes: Vec<String>,
    /// Changes of the address space were recorded, so that its growth is known by stack.
    pub(in crate::session) has_growth: bool,
    /// A command was recorded from its start.
    pub(in crate::session) is_from_start: bool,
}

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

/// Frames of stacks in a profile.
pub(in crate::session) type Stacks = HashMap<StackId, Arc<[FrameId]>>;
/// Receives each process with its stacks as soon as it is in the profile.
pub(in crate::session) type Each<'a> = &'a mut dyn FnMut(&Profile, &Target, &Watched, Stacks);

/// Builds the profile of all targets.
pub(in crate::session) fn profile(facts: Facts, targets: &[Target], symbolizer: &mut Symbolizer, each: Each<'_>) -> Profile {
    let (facts_unwatched, is_from_start) = (facts.unwatched_children, facts.is_from_start);
    let mut profile = Profile::new(metadata(&facts));
    let is_sampled = |target: &&Target| target.watched.as_ref().is_some_and(|watched| watched.sampled.is_some());
    let sampled = targets.iter().filter(is_sampled).count();
    if sampled > 0 {
        // If one of the processes is estimated, the sums are estimates.
        profile.meta.mode = Mode::Sampled;
        if sampled == targets.len() {
            let joined = targets.iter().any(|target| target.sampled_heap.as_ref().is_some_and(|heap| !heap.by_sums));
            profile.meta.kinds = SAMPLED_KINDS.into_iter().chain(JOINED_KINDS.into_iter().filter(|_| joined)).collect();
            profile.meta.limits.clear();
        }
    }
    let mut namer = Namer { symbolizer, known: HashMap::new(), ends: HashMap::new() };
    for target in targets {
        let Some(watched) = &target.watched else { continue };
        if let Some(ledger) = &watched.sampled {
            let stacks = add_sampled_process(&mut profile, namer.symbolizer, target, watched, ledger);
            each(&profile, target, watched, stacks);
        } else {
            let stacks = add_process(&mut profile, &mut namer, target, watched);
            each(&profile, target, watched, stacks);
        }
    }
    let stats: Vec<LedgerStats> =
        targets.iter().filter_map(|target| target.watched.as_ref()).map(|watched| watched.ledger.stats()).collect();
    profile.meta.corrections = corrections(&stats);
    profile.meta.losses.extend(unobserved(&stats, facts_unwatched));
    profile.meta.limits.extend(inherited_words(targets));
    profile.meta.limits.extend(guests_words(targets));
    // One process without a census makes the sum over all unknown, unless the process has ended: then it has no live memory.
    let joined = |target: &&Target| target.sampled_heap.is_some() || target.heap.as_ref().is_some_and(|heap| heap.attribution.is_some());
    let gone = |target: &&Target| !joined(target) && !target.process.is_alive();
    let is_known = targets.iter().all(|target| joined(&target) || gone(&target));
    let is_joined = targets.iter().any(|target| joined(&target)) && is_known;
    if is_joined {
        profile.meta.kinds = profile.meta.kinds.with(ValueKind::LiveObjects).with(ValueKind::LiveSpace);
    }
    // What was recorded from its start has no memory from before.
    if is_joined || is_known && is_from_start {
        let ended = targets.iter().filter(gone).count() as u64;
        if ended > 0 {
            let who = if ended == 1 { "1 process".to_owned() } else { format!("{} processes", grouped(ended)) };
            let limit = format!("{who} had ended without a census: blocks not freed by then count as in use (inuse), none as live");
            profile.meta.limits.push(limit);
        }
    } else {
        let limit = "no census was joined at the end: memory allocated before the recording, live or freed since, is not known";
        profile.meta.limits.push(limit.into());
    }
    profile
}

/// The profile of all targets; also ends the trace, and collects the blocks of each process that was recorded exactly.
pub(in crate::session) fn traced_profile(
    facts: Facts,
    all: &[Target],
    symbolizer: &mut Symbolizer,
    trace: Option<&SharedTrace>,
    mut blocks: Option<&mut Vec<BlockIndex>>,
) -> Profile {
    let (mut names, mut traced, mut allocators) = (Names::default(), None, Vec::new());
    let mut each = |profile: &Profile, target: &Target, watched: &Watched, stacks: Stacks| {
        if let Some(trace) = trace.filter(|trace| trace.is_of(target.slot)) {
            names = trace.names(profile, watched, &stacks);
            traced = Some(target.process.pid().0);
            allocators.clone_from(&target.allocator_files);
        }
        if let Some(blocks) = &mut blocks {
            blocks.push(BlockIndex::of(target.process.pid().0, watched, &stacks));
        }
    };
    let mut profile = self::profile(facts, all, symbolizer, &mut each);
    if let Some(trace) = trace {
        let process = profile.meta.processes.iter().find(|process| Some(process.pid) == traced);
        let done = trace.finish(process.and_then(|process| process.heap.as_ref()), &names, &allocators);
        profile.meta.notes.push(trace::words(traced, done));
    }
    profile
}

fn metadata(facts: &Facts) -> Metadata {
    let counters = &facts.counters;
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
        is_from_start: facts.is_from_start,
        kinds: KINDS.into_iter().filter(|kind| facts.has_growth || *kind != ValueKind::GrowthSpace).collect(),
        losses: losses(counters, facts.read, unaccounted, facts.notices_lost, facts.inherited_refused),
        stack_ends: stack_ends(counters),
        notes,
        doubts: lost_by_the_kernel(counters, facts.read, unaccounted).into_iter().collect(),
        ..Metadata::default()
    }
}

/// Adds a process; returns the frames of its stacks.
fn add_process(profile: &mut Profile, namer: &mut Namer<'_>, target: &Target, watched: &Watched) -> Stacks {
    let pid = target.process.pid().0;
    let heap = target.heap.as_ref();
    let totals = watched.ledger.totals();
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        container_labels: target.process.container().map(Container::label_map).unwrap_or_default(),
        allocators: target.allocators.clone(),
        source: target.source_words(),
        lossy: watched.ledger.is_lossy(),
        unobserved_us: Some(watched.past.iter().chain([&watched.ledger]).map(|ledger| ledger.stats().gap_ns).sum::<u64>() / 1000),
        peak_inuse_bytes: Some(totals.peak_bytes),
        heap: heap.map(|heap| heap.summary),
        attribution: heap.and_then(|heap| heap.attribution),
        at_start: target.moments.at_start,
        at_peak: target.moments.at_peak,
        sizes: PowerCounts::new(watched.ledger.histograms().sizes.counts()),
        lifetimes_us: PowerCounts::new(watched.ledger.histograms().lifetimes.counts()),
        ..meta::Process::default()
    });
    for note in target.every_note().chain(heap.into_iter().flat_map(|heap| heap.notes.iter().cloned())) {
        profile.meta.notes.push(format!("process {pid}: {note}"));
    }
    profile.meta.doubts.extend(doubts(target.loss(), watched).into_iter().map(|doubt| format!("process {pid}: {doubt}")));
    let unknown_frees = watched.ledger.stats().unknown_frees;
    if unknown_frees > 0 {
        profile.meta.notes.push(format!("process {pid}: {}", unknown_frees_words(unknown_frees, &target.before)));
    }
    // A process that keeps running frees blocks between the last record and the census, so the two sums differ.
    let of_stacks = heap.and_then(|heap| heap.attribution).map(|of| of.attributed_allocations);
    let freed_after = of_stacks.map_or(0, |of_stacks| totals.live.saturating_sub(of_stacks));
    if freed_after > 0 {
        let (blocks, were) = (counted(freed_after, "recorded block"), were(freed_after));
        profile
            .meta
            .notes
            .push(format!("process {pid}: {blocks} {were} no longer live when the census was taken, after the end of the recording"));
    }
    namer.begin_process();
    // An image before an exec contributes only its allocations: its memory no longer exists.
    for past in &watched.past {
        add_ledger(profile, namer, &target.space, pid, past, |view| {
            Values::default()
                .with(ValueKind::AllocObjects, view.totals.allocations)
                .with(ValueKind::AllocSpace, view.totals.allocated_bytes)
        });
    }
    let owned = heap.map(|heap| &heap.owned);
    let stacks = add_ledger(profile, namer, &target.space, pid, &watched.ledger, |view| {
        let t = &view.totals;
        let values = Values::default()
            .with(ValueKind::AllocObjects, t.allocations)
            .with(ValueKind::AllocSpace, t.allocated_bytes)
            .with(ValueKind::InuseObjects, t.live)
            .with(ValueKind::InuseSpace, t.live_bytes)
            .with(ValueKind::PeakSpace, t.at_peak_bytes)
            .with(ValueKind::DoubtfulSpace, t.doubtful_bytes)
            .with(ValueKind::GrowthSpace, watched.growth.bytes.of(view.id));
        let Some(owned) = owned else { return values };
        values
            .with(ValueKind::PinnedSpace, owned.pinned.of(view.id))
            .with(ValueKind::BlockedSpace, owned.blocked.of(view.id))
            .with(ValueKind::LiveObjects, owned.live_chunks.of(view.id))
            .with(ValueKind::LiveSpace, owned.live.of(view.id))
    });
    if let Some(heap) = heap {
        add_others(profile, pid, heap, &watched.growth);
    }
    stacks
}

/// Why more may be live than was allocated: a child's heap starts as a copy of its parent's.
fn inherited_words(targets: &[Target]) -> Option<String> {
    let ledgers = targets.iter().filter_map(|target| target.watched.as_ref()).map(|watched| &watched.ledger);
    let inherited = ledgers.flat_map(|ledger| ledger.stacks().map(|view| (view.totals.inherited, view.totals.inherited_bytes)));
    let (blocks, bytes) = inherited.fold((0u64, 0u64), |sum, of| (sum.0.saturating_add(of.0), sum.1.saturating_add(of.1)));
    (blocks > 0).then(|| {
        format!(
            "children started with copies of their parents' heaps, {} in {}: allocated once, by the parent; live in each child that kept \
             them",
            HumanBytes(bytes),
            counted(blocks, "block")
        )
    })
}

/// Calls of vfork children that were not observed.
fn guests_words(targets: &[Target]) -> Option<String> {
    let unseen = |target: &Target| target.watched.as_ref().map_or(0, |watched| watched.guests).saturating_sub(target.vfork_children_seen);
    let guests: u64 = targets.iter().map(unseen).sum();
    let (children, their) = (if guests == 1 { "child" } else { "children" }, if guests == 1 { "its" } else { "their" });
    (guests > 0).then(|| {
        format!(
            "{} {children} of vfork ran in the parent's memory until {their} exec: allocations there were not observed",
            grouped(guests)
        )
    })
}

/// How to read frees of unknown blocks.
fn unknown_frees_words(frees: u64, before: &Before) -> String {
    match before {
        Before::Nothing => format!(
            "{} of blocks that no recorded call allocated: the C library empties a thread's cache this way, an allocator on top of another \
             frees its internal blocks, and a child of vfork may have allocated them in its parent",
            counted(frees, "free")
        ),
        Before::Heap(_) | Before::Unknown => {
            format!("allocated before the recording and freed in it: {}", counted(frees, "block"))
        }
    }
}

/// Adds memory that no recorded stack owns, as separate rows. Their live bytes come from the census alone: no recording knows the bytes
/// requested.
pub fn add_others(profile: &mut Profile, pid: u32, heap: &HeapPicture, growth: &GrowthSpace) {
    let owned = &heap.owned;
    if let Some(parts) = &heap.rest {
        for (frames, values) in parts {
            profile.add(pid, frames, None, values);
        }
        let grown = Values::default().with(ValueKind::GrowthSpace, growth.bytes.unattributed_bytes());
        if !grown.is_zero() {
            profile.add(pid, &[], None, &grown);
        }
        return;
    }
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
    namer: &mut Namer<'_>,
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
            (Arc::from([profile.intern(&Frame::named(placeholder(view.id)))]), None)
        } else {
            (namer.stack(profile, space, view.frames), namer.end(view.end))
        };
        stacks.insert(view.id, Arc::clone(&frames));
        profile.add_ids(pid, frames, truncated, &values);
    }
    stacks
}

/// Symbolizes frames, each address of a process once: the stacks of one program share nearly all of their frames.
struct Namer<'a> {
    symbolizer: &'a mut Symbolizer,
    /// Names by frame word, for one process: at most as many entries as its ledger stores frames, 12 bytes each plus the ids.
    known: HashMap<u64, Box<[FrameId]>>,
    /// Descriptions of why walks ended early.
    ends: HashMap<u8, Option<Arc<str>>>,
}

impl Namer<'_> {
    /// The next process has another address space, so cached names do not apply.
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

/// The name of a stack id that has no frames.
pub fn placeholder(id: StackId) -> &'static str {
    match id {
        NO_STACK => "[no stack]",
        STACKS_BEYOND_LIMIT => "[stacks beyond the limit]",
        _ => "[stack lost]",
    }
}
