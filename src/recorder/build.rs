//! From the books to the profile.

use std::time::Duration;

use super::heap::HeapPicture;
use super::target::Target;
use super::watched::Watched;
use crate::capture::counters::ENDS;
use crate::capture::{Counters, TargetLoss};
use crate::fragmentation::growth::GrowthSpace;
use crate::ledger::{Ledger, NO_STACK, STACKS_BEYOND_LIMIT, StackView};
use crate::profile::{Counter, Frame, KindSet, Metadata, Mode, Profile, ValueKind, Values, meta};
use crate::symbol::{AddressSpace, Symbolizer};
use crate::units::{HumanBytes, StackId};
use crate::unwind::End;

/// What the recorder knows beside the books.
pub struct Facts {
    pub start_unix_ns: u64,
    pub duration: Duration,
    pub counters: Counters,
    pub malformed: u64,
    pub children_ignored: u64,
    pub notices_lost: u64,
    pub notes: Vec<String>,
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

/// Builds the profile of all targets.
pub fn profile(facts: Facts, targets: &[Target]) -> Profile {
    let mut profile = Profile::new(metadata(&facts));
    let mut symbolizer = Symbolizer::new();
    for target in targets {
        if let Some(books) = &target.books {
            add_process(&mut profile, &mut symbolizer, target, books);
        }
    }
    profile
}

/// What was lost, by kind; zeros say that the kind is counted.
pub fn losses(counters: &Counters, malformed: u64, notices_lost: u64) -> Vec<Counter> {
    let mut losses: Vec<Counter> =
        ["lost_allocations", "lost_frees", "lost_stacks", "lost_vm_changes", "lost_life_events", "no_thread_state", "no_walk_state"]
            .iter()
            .filter_map(|name| counters.iter().find(|(n, ..)| n == name))
            .map(|(name, text, value)| Counter::new(name, value, text))
            .collect();
    losses.push(Counter::new("malformed_records", malformed, "records that could not be read"));
    losses.push(Counter::new(
        "lost_notices",
        notices_lost,
        "notices of new code or children that came too fast; every process was looked at anew",
    ));
    losses
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
        notes.push(format!("{} child processes were not watched (--children watches them)", facts.children_ignored));
    }
    Metadata {
        tool: concat!("fragprof ", env!("CARGO_PKG_VERSION")).into(),
        mode: Mode::Exact,
        start_unix_ns: facts.start_unix_ns,
        duration_s: facts.duration.as_secs_f64(),
        kinds: KindSet::from_iter(KINDS),
        losses: losses(counters, facts.malformed, facts.notices_lost),
        stack_ends,
        notes,
        limits: vec!["blocks allocated before the recording are not in it: what they hold is unknown, not free".into()],
        ..Metadata::default()
    }
}

fn add_process(profile: &mut Profile, symbolizer: &mut Symbolizer, target: &Target, books: &Watched) {
    let pid = target.process.pid().0;
    let heap = target.heap.as_ref();
    let totals = books.ledger.totals();
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        allocators: target.allocators.clone(),
        lossy: books.ledger.is_lossy(),
        peak_inuse_bytes: Some(totals.peak_bytes),
        heap: target.heap.as_ref().map(|heap| heap.summary),
        ..meta::Process::default()
    });
    for note in &target.notes {
        profile.meta.notes.push(format!("process {pid}: {note}"));
    }
    profile.meta.doubts.extend(doubts(target.loss(), books).into_iter().map(|doubt| format!("process {pid}: {doubt}")));
    let unknown_frees = books.ledger.stats().unknown_frees;
    if unknown_frees > 0 {
        profile.meta.notes.push(format!("process {pid}: {unknown_frees} blocks allocated before the recording were freed in it"));
    }
    // Of an image before an exec only what it did counts: its memory is gone.
    for past in &books.past {
        add_ledger(profile, symbolizer, &target.space, pid, past, |view| {
            Values::default()
                .with(ValueKind::AllocObjects, view.totals.allocations)
                .with(ValueKind::AllocSpace, view.totals.allocated_bytes)
        });
    }
    add_ledger(profile, symbolizer, &target.space, pid, &books.ledger, |view| {
        let t = &view.totals;
        Values::default()
            .with(ValueKind::AllocObjects, t.allocations)
            .with(ValueKind::AllocSpace, t.allocated_bytes)
            .with(ValueKind::InuseObjects, t.live)
            .with(ValueKind::InuseSpace, t.live_bytes)
            .with(ValueKind::PeakSpace, t.at_peak_bytes)
            .with(ValueKind::DoubtfulSpace, t.doubtful_bytes)
            .with(ValueKind::PinnedSpace, heap.map_or(0, |heap| heap.pinned.of(view.id)))
            .with(ValueKind::BlockedSpace, heap.map_or(0, |heap| heap.blocked.of(view.id)))
            .with(ValueKind::GrowthSpace, books.growth.bytes.of(view.id))
    });
    if let Some(heap) = heap {
        add_unattributed(profile, pid, heap, &books.growth);
    }
}

/// What no recorded stack owns, as a row of its own. Its live bytes are in the note, not in the row: the rows' live bytes are what was
/// recorded, to the byte.
fn add_unattributed(profile: &mut Profile, pid: u32, heap: &HeapPicture, growth: &GrowthSpace) {
    let values = Values::default()
        .with(ValueKind::PinnedSpace, heap.pinned.unattributed_bytes())
        .with(ValueKind::BlockedSpace, heap.blocked.unattributed_bytes())
        .with(ValueKind::GrowthSpace, growth.bytes.unattributed_bytes());
    if !values.is_zero() {
        profile.add(pid, &[], None, &values);
    }
    if heap.unattributed_live_bytes > 0 {
        profile.meta.notes.push(format!(
            "process {pid}: {} in {} live chunks belong to no recorded stack: allocated before the recording, or the C library's own",
            HumanBytes(heap.unattributed_live_bytes),
            heap.unattributed_live_allocations
        ));
    }
    for note in &heap.notes {
        profile.meta.notes.push(format!("process {pid}: {note}"));
    }
}

fn add_ledger(
    profile: &mut Profile,
    symbolizer: &mut Symbolizer,
    space: &AddressSpace,
    pid: u32,
    ledger: &Ledger,
    values: impl Fn(&StackView<'_>) -> Values,
) {
    for view in ledger.stacks() {
        let values = values(&view);
        if values.is_zero() {
            continue;
        }
        let end = End::from_wire(view.end);
        if view.frames.is_empty() {
            profile.add(pid, &[Frame::named(stand_in(view.id))], None, &values);
            continue;
        }
        let frames = symbolizer.stack(space, view.frames);
        profile.add(pid, &frames, end.filter(|end| *end != End::Complete).map(End::description), &values);
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
            "{} allocation and {} free records were lost: {} live blocks ({} bytes) are doubtful, and some live ones may be missing",
            loss.allocations, loss.frees, totals.doubtful, totals.doubtful_bytes
        ),
    );
    doubt(stats.gaps, format!("it was not observed for {:.3} s in {} spells", stats.gap_ns as f64 / 1e9, stats.gaps));
    doubt(loss.abandoned, format!("{} allocator calls never returned: whether they allocated is unknown", loss.abandoned));
    doubt(
        stats.missed_frees,
        format!(
            "{} blocks ({} bytes) were freed unseen: their addresses were handed out again",
            stats.missed_frees, stats.missed_free_bytes
        ),
    );
    doubt(stats.stacks_refused, format!("{} stacks beyond the limit are summed in one row", stats.stacks_refused));
    doubt(stats.stacks_undefined, format!("{} stacks were lost: their allocations are in one row", stats.stacks_undefined));
    doubt(books.past_dropped, format!("{} images before earlier execs are not in the profile", books.past_dropped));
    doubts
}

/// `NoMapping` → `no_mapping`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}
