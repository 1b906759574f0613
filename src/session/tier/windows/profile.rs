//! Builds a profile from windows and process states.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::capture::{Counters, Read};
use crate::fragmentation::growth::GrowthSpace;
use crate::governor::estimate::{Amounts, STACKS_MAX};
use crate::governor::{AGES_NS, Estimates, Estimator, HitCosts, Quantity, TOLD_AGES, Watched, WindowTimes};
use crate::heap::residency::page_bytes;
use crate::ledger::StackView;
use crate::process::container::Container;
use crate::profile::{
    Counter, Frame, Governed, HeapMoment, KindSet, LargeBlocks, Metadata, Mode, Profile, StandardErrors, UNATTRIBUTED, ValueKind, Values,
    meta,
};
use crate::selective::SEEN_FROM_BYTES;
use crate::session::monotonic_ns;
use crate::session::report::{add_others, losses, lost_by_the_kernel, placeholder, stack_ends, unaccounted_so_far};
use crate::session::tier::windows::state::ProcessState;
use crate::session::tier::windows::target::Target;
use crate::symbol::Symbolizer;
use crate::units::StackId;
use crate::unwind::End;

/// What the driver knows in addition to the ledgers.
pub struct Facts {
    pub started_at: SystemTime,
    pub counters: Counters,
    pub read: Read,
    pub ring_bytes: u32,
    pub notices_lost: u64,
    pub ended_dropped: u64,
    pub costs: HitCosts,
    pub notes: Vec<String>,
    pub now_s: f64,
}

/// Minimum number of effective windows for an age by which survivors may be ranked.
const WINDOWS_FOR_AGE: f64 = 4.0;

/// Kinds of values that windows give.
const KINDS: [ValueKind; 10] = [
    ValueKind::AllocObjects,
    ValueKind::AllocSpace,
    ValueKind::SurvivorObjects,
    ValueKind::SurvivorSpace,
    ValueKind::Survivor10MsSpace,
    ValueKind::Survivor100MsSpace,
    ValueKind::Survivor1SSpace,
    ValueKind::Survivor10SSpace,
    ValueKind::GrowthSpace,
    ValueKind::TouchedSpace,
];

/// Kinds for survivors after their windows, if blocks can be identified later; bytes only once some are confirmed.
const KEPT: [ValueKind; 3] = [ValueKind::SampledObjects, ValueKind::InformativeObjects, ValueKind::SameObjects];

/// Kinds for large blocks, if every one is seen.
const LARGE: [ValueKind; 2] = [ValueKind::LargeObjects, ValueKind::LargeSpace];

/// Kinds from a census joined with the ledger of a full trace.
const JOINED: [ValueKind; 4] = [ValueKind::LiveObjects, ValueKind::LiveSpace, ValueKind::PinnedSpace, ValueKind::BlockedSpace];

/// A stack's values with their errors.
type Row = (Values, StandardErrors);

/// The profile of these processes with their states.
pub fn build(facts: &Facts, symbolizer: &mut Symbolizer, rows: &mut [(&Target, &mut ProcessState)]) -> Profile {
    let watched_s = rows.iter().map(|(target, _)| target.watched_s(facts.now_s)).fold(0.0, f64::max);
    let age = rows.iter().map(|(target, state)| age_of(&so_far(target, state))).min().unwrap_or(0);
    let live = !rows.is_empty() && rows.iter().all(|(target, state)| target.full_since_s.is_some() && state.live.is_some());
    let knows_blocks = rows.iter().any(|(target, _)| target.knows_blocks());
    let began_s = rows.iter().map(|(target, _)| target.began_s()).reduce(f64::min).unwrap_or(0.0);
    let started_at = facts.started_at + Duration::from_secs_f64(began_s.max(0.0));
    let mut metadata = metadata(facts, started_at, watched_s, age, live, knows_blocks);
    if live && rows.iter().all(|(target, _)| target.joined.is_some()) {
        metadata.kinds = JOINED.into_iter().fold(metadata.kinds, KindSet::with);
    }
    if !live && rows.iter().any(|(target, _)| confirms(target)) {
        metadata.kinds = metadata.kinds.with(ValueKind::ConfirmedSpace);
        metadata.limits.push(
            "live bytes by stack are those of sampled blocks found unchanged by their contents, a lower bound: the rest of the heap is \
             [unattributed]"
                .to_owned(),
        );
    }
    if rows.iter().any(|(target, state)| tells_of_large(target, state)) {
        metadata.kinds = LARGE.into_iter().fold(metadata.kinds, KindSet::with);
        metadata.limits.push(format!(
            "live bytes of large blocks are usable bytes of blocks of at least {SEEN_FROM_BYTES} bytes, allocated since their probes were \
             attached: up to 31 bytes more than requested, a page more where a block has its own mapping"
        ));
    }
    let mut profile = Profile::new(metadata);
    for (target, state) in rows {
        add_process(&mut profile, symbolizer, facts, target, state, age);
    }
    profile
}

/// The greatest age with enough windows.
fn age_of(estimator: &Estimator<StackId>) -> usize {
    let full_s = estimator.counts().full_s;
    let known = |age: &usize| full_s * 1e9 > 2.0 * AGES_NS[*age] as f64 || estimator.effective_windows(age + 1) >= WINDOWS_FOR_AGE;
    (0..AGES_NS.len()).rev().find(known).unwrap_or(0)
}

fn metadata(facts: &Facts, started_at: SystemTime, watched_s: f64, age: usize, live: bool, knows_blocks: bool) -> Metadata {
    let mut kinds: KindSet = KINDS.into_iter().collect();
    if live {
        kinds = kinds.with(ValueKind::InuseObjects).with(ValueKind::InuseSpace);
    } else if knows_blocks {
        kinds = KEPT.into_iter().fold(kinds, KindSet::with);
    }
    let counters = &facts.counters;
    let unaccounted = unaccounted_so_far(counters, facts.read, facts.ring_bytes);
    let mut losses = losses(counters, facts.read, unaccounted, facts.notices_lost, 0);
    losses.push(Counter::new("processes_dropped", facts.ended_dropped, "processes that had ended and are not in the profile"));
    let mut notes = facts.notes.clone();
    notes.push(format!(
        "a probed allocation costs {:.2} µs here, a free {:.2} µs (within {:.0} %), and {:.1} µs more where the kernel must single-step the \
         probed instruction",
        facts.costs.allocation_ns / 1e3,
        facts.costs.free_ns / 1e3,
        facts.costs.spread * 100.0,
        facts.costs.step_ns / 1e3
    ));
    let mut limits = vec![
        "bytes allocated and survivors are estimated from windows at random times, per second of the process's own running time; ages \
         exclude the time spent in probes"
            .to_owned(),
        "growth counts as avoidable where the heap had as many free bytes in its last census".to_owned(),
    ];
    if live {
        limits.push("live bytes by stack are those allocated since the full trace began".to_owned());
    } else {
        limits.push("whether a survivor still lives after its window is not known: live bytes by stack are not estimated".to_owned());
    }
    if !live && knows_blocks {
        limits
            .push("some survivors are checked again: a flagged stack keeps what it allocates, one without a flag may do so too".to_owned());
    }
    Metadata {
        tool: concat!("fragprof ", env!("CARGO_PKG_VERSION")).into(),
        mode: Mode::Governed,
        start_unix_ns: started_at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
        duration_s: watched_s,
        survivor_age_s: Some(AGES_NS[age] as f64 / 1e9),
        kinds,
        losses,
        stack_ends: stack_ends(counters),
        notes,
        doubts: lost_by_the_kernel(counters, facts.read, unaccounted).into_iter().collect(),
        limits,
        ..Metadata::default()
    }
}

fn add_process(profile: &mut Profile, symbolizer: &mut Symbolizer, facts: &Facts, target: &Target, state: &mut ProcessState, age: usize) {
    let pid = target.pid().0;
    let estimator = so_far(target, state).into_owned();
    let counts = *estimator.counts();
    let watched_s = target.watched_s(facts.now_s);
    let clock_s = (watched_s - counts.full_s).max(0.0);
    let estimates = estimator.estimates(Watched { own_s: target.own_s, clock_s, ends_in_full: target.full_since_s.is_some() });
    profile.meta.processes.push(meta::Process {
        pid,
        comm: target.process.comm().to_owned(),
        container_labels: target.process.container().map(Container::label_map).unwrap_or_default(),
        allocators: target.allocators.clone(),
        lossy: counts.lossy > 0,
        heap: target.heap_at_end,
        attribution: target.joined.as_ref().and_then(|heap| heap.attribution),
        at_start: target.heap_at_start.map(|heap| HeapMoment { heap, ..HeapMoment::default() }),
        ..meta::Process::default()
    });
    profile.meta.governed.push(Governed {
        pid,
        tier: tier(target).to_owned(),
        budget_ratio: target.pace.budget(),
        slowdown_ratio_est: target.pace.slowdown_est(),
        run_s: target.pace.run_s(),
        open_s: counts.open_s,
        full_s: counts.full_s,
        windows: target.windows().map(|(class, count)| (class.name().to_owned(), count)).collect(),
        windows_closed_early: counts.closed_early.iter().sum(),
        windows_lossy: counts.lossy,
        saturated_ratio: estimator.saturated_ratio(),
        own_s: target.own_s,
        rates_are_lower_bounds: estimates.bound.is_some(),
        lower_bounds_because: estimates.bound.map(|bound| bound.words().to_owned()).unwrap_or_default(),
        total_stderr: total_errors(&estimates, age),
        allocations_seen: counts.allocations,
        effective_windows: estimator.effective_windows(age + 1),
        large_blocks: Some(large_blocks(target, state)),
    });
    if let Some(doubt) = nothing_seen(pid, &estimator, target.own_s) {
        profile.meta.doubts.push(doubt);
    }
    for note in target.every_note() {
        profile.meta.notes.push(format!("process {pid}: {note}"));
    }
    let refused = counts.refused + estimator.stacks_refused();
    if refused > 0 {
        profile
            .meta
            .doubts
            .push(format!("process {pid}: {refused} rows beyond the limits ({STACKS_MAX} stacks) are summed in one row or omitted"));
    }
    if target.retention.refused() > 0 {
        let refused = target.retention.refused();
        profile
            .meta
            .notes
            .push(format!("process {pid}: {refused} survivors are not blocks of its allocator as it is known, and are not checked again"));
    }
    if target.misses_records() {
        profile.meta.notes.push(format!(
            "process {pid}: its survivors are not checked again, because jemalloc's data were not found: that needs jemalloc 5.3, and a \
             thread that has a cache"
        ));
    }
    if target.looks_failed > 0 {
        let failed = target.looks_failed;
        profile
            .meta
            .notes
            .push(format!("process {pid}: the blocks of {failed} windows could not be read: its threads come and go too quickly"));
    }
    if target.looks_late > 0 {
        let late = target.looks_late;
        profile.meta.notes.push(format!("process {pid}: {late} windows ended before their blocks could be read: this machine is busy"));
    }
    if target.knows_blocks() && target.full_since_s.is_none() && state.live_bytes.is_none() {
        profile
            .meta
            .notes
            .push(format!("process {pid}: no census could determine the heap's live bytes, so the unconfirmed part is not known"));
    }
    if state.growth.unknown_bytes > 0 {
        profile
            .meta
            .notes
            .push(format!("process {pid}: the heap grew by {} bytes while its free bytes were not known", state.growth.unknown_bytes));
    }
    let mut rows = rows(target, state, &estimates, age);
    for view in state.stacks.stacks() {
        if let Some(row) = rows.remove(&view.id) {
            add_stack(profile, symbolizer, target, pid, &view, &row);
        }
    }
    for (_, (values, errors)) in rows {
        profile.add_estimate(pid, &[Frame::named(UNATTRIBUTED)], None, &values, &errors);
    }
    if let Some(heap) = &target.joined {
        add_others(profile, pid, heap, &GrowthSpace::default());
    }
}

/// Minimum running time after which a process without any observed allocation is a reason to doubt the probes.
const BUSY_S: f64 = 1.0;

/// A warning if a process ran and nothing was observed: that is a fault, or at least no result.
fn nothing_seen(pid: u32, estimator: &Estimator<StackId>, own_s: f64) -> Option<String> {
    let counts = estimator.counts();
    if counts.allocations > 0 || own_s < BUSY_S {
        return None;
    }
    let windows: u64 = counts.windows.iter().sum();
    let lossy = if counts.lossy > 0 { format!(", and {} were discarded because records were lost", counts.lossy) } else { String::new() };
    Some(format!(
        "process {pid}: its allocations are not known: it ran for {own_s:.1} s, and no allocation was observed in {windows} windows of \
         {:.2} s in total{lossy}; record for longer, or with a larger --budget",
        counts.open_s
    ))
}

/// The errors of the sums over its stacks, by the name of the kind; none for lower bounds.
fn total_errors(estimates: &Estimates<StackId>, age: usize) -> BTreeMap<String, u64> {
    let (_, errors) = values_of(&estimates.total, estimates.bound.is_some(), age);
    let rates = ValueKind::ALL.into_iter().filter(|kind| kind.is_rate() && estimates.bound.is_none());
    rates.map(|kind| (kind.name().to_owned(), errors.get(kind))).collect()
}

fn tier(target: &Target) -> &'static str {
    match (target.full_since_s.is_some(), target.full_left > 0, target.windows().any(|(_, count)| count > 0)) {
        (true, _, false) => "in full",
        (true, _, true) => "in windows, now in full",
        (false, true, _) => "in full, then in windows",
        (false, false, _) => "in windows",
    }
}

fn add_stack(profile: &mut Profile, symbolizer: &mut Symbolizer, target: &Target, pid: u32, view: &StackView<'_>, (values, errors): &Row) {
    if view.frames.is_empty() {
        profile.add_estimate(pid, &[Frame::named(placeholder(view.id))], None, values, errors);
        return;
    }
    let frames = symbolizer.stack(&target.space, view.frames);
    let end = End::from_wire(view.end).filter(|end| *end != End::Complete);
    profile.add_estimate(pid, &frames, end.map(End::description), values, errors);
}

/// The values of each stack, `StackId::MAX` for those beyond the limits.
fn rows(target: &Target, state: &mut ProcessState, estimates: &Estimates<StackId>, age: usize) -> HashMap<StackId, Row> {
    let mut rows: HashMap<StackId, Row> = HashMap::new();
    let is_bound = estimates.bound.is_some();
    let mut sum = Values::default();
    for one in &estimates.stacks {
        let (values, errors) = values_of(&one.amounts, is_bound, age);
        sum.add(&values);
        let row = rows.entry(one.stack.unwrap_or(StackId(u32::MAX))).or_default();
        row.0.add(&values);
        row.1.add(&errors);
    }
    if is_bound {
        // The lower bound of the total is tighter than the sum of the stacks' bounds.
        let (total, _) = values_of(&estimates.total, true, age);
        let rest = rows.entry(StackId(u32::MAX)).or_default();
        for kind in ValueKind::ALL.into_iter().filter(|kind| kind.is_rate()) {
            rest.0.set(kind, rest.0.get(kind).saturating_add(total.get(kind).saturating_sub(sum.get(kind))));
        }
    }
    for (stack, bytes) in state.growth.bytes.iter() {
        rows.entry(stack).or_default().0.add(&Values::default().with(ValueKind::GrowthSpace, bytes));
    }
    for (stack, bytes) in state.touched.iter() {
        // Each recorded touch represents the interval: their number has a Poisson distribution.
        let unit = crate::session::tier::windows::TOUCH_INTERVAL * page_bytes();
        let error = (bytes as f64 * unit as f64).sqrt().round() as u64;
        let row = rows.entry(stack).or_default();
        row.0.add(&Values::default().with(ValueKind::TouchedSpace, bytes));
        row.1.add(&StandardErrors::default().with(ValueKind::TouchedSpace, error));
    }
    if target.full_since_s.is_some()
        && let Some(live) = &mut state.live
    {
        live.settle();
        for view in live.stacks() {
            let id = state.stacks.stack_id(view.hash).unwrap_or(crate::ledger::NO_STACK);
            let mut values =
                Values::default().with(ValueKind::InuseObjects, view.totals.live).with(ValueKind::InuseSpace, view.totals.live_bytes);
            if let Some(owned) = target.joined.as_ref().map(|heap| &heap.owned) {
                values.set(ValueKind::LiveObjects, owned.live_chunks.of(view.id));
                values.set(ValueKind::LiveSpace, owned.live.of(view.id));
                values.set(ValueKind::PinnedSpace, owned.pinned.of(view.id));
                values.set(ValueKind::BlockedSpace, owned.blocked.of(view.id));
            }
            rows.entry(id).or_default().0.add(&values);
        }
    }
    if tells_of_large(target, state) {
        add_large(&mut rows, target, state);
    }
    if tells_of_kept(target) {
        add_kept(&mut rows, target, state);
    }
    rows.retain(|_, (values, _)| !values.is_zero());
    rows
}

/// Whether all of its large blocks since some moment are known.
fn tells_of_large(target: &Target, state: &ProcessState) -> bool {
    target.large.tells() && state.large.is_some()
}

/// How its large blocks were watched.
fn large_blocks(target: &Target, state: &mut ProcessState) -> LargeBlocks {
    let large = &target.large;
    let (tracing, reason) = match target.full_since_s {
        // A full trace covers large blocks too.
        Some(_) => ("none", String::new()),
        None => large.words(),
    };
    let mut told = LargeBlocks {
        state: tracing.to_owned(),
        reason,
        from_bytes: SEEN_FROM_BYTES,
        slowdown_ratio_est: target.pace.share_of_run(large.lost_s),
        trials: large.trials,
        times_left: large.times_left,
        dropped: large.dropped,
        ..LargeBlocks::default()
    };
    let heap_bytes = heap_bytes(target, state);
    if tells_of_large(target, state)
        && let Some(known) = &mut state.large
    {
        known.ledger.settle();
        let totals = known.ledger.totals();
        told.since_s = Some(large.since_s);
        (told.live_bytes, told.live_allocations) = (totals.live_bytes, totals.live);
        told.freed_from_before = known.ledger.stats().unknown_frees;
        // A census counts one word more per block for the chunk header, which is negligible for large blocks.
        told.of_live_ratio = heap_bytes.filter(|&live| live > 0).map(|live| (totals.live_bytes as f64 / live as f64).min(1.0));
    }
    told
}

/// Adds the live large blocks by allocating stack.
fn add_large(rows: &mut HashMap<StackId, Row>, target: &Target, state: &mut ProcessState) {
    let heap_bytes = heap_bytes(target, state);
    let Some(known) = &mut state.large else { return };
    known.ledger.settle();
    for view in known.ledger.stacks() {
        let id = state.stacks.stack_id(view.hash).unwrap_or(crate::ledger::NO_STACK);
        let values = Values::default().with(ValueKind::LargeObjects, view.totals.live).with(ValueKind::LargeSpace, view.totals.live_bytes);
        rows.entry(id).or_default().0.add(&values);
    }
    let rest_bytes = heap_bytes.map_or(0, |heap_bytes| heap_bytes.saturating_sub(known.ledger.totals().live_bytes));
    rows.entry(StackId(u32::MAX)).or_default().0.add(&Values::default().with(ValueKind::LargeSpace, rest_bytes));
}

/// Live bytes of its heap in the newest census; `None` if no census could determine them.
fn heap_bytes(target: &Target, state: &ProcessState) -> Option<u64> {
    target.heap_at_end.and_then(|heap| heap.live_bytes).or(state.live_bytes)
}

/// Whether it has rows of survivors after their windows.
fn tells_of_kept(target: &Target) -> bool {
    target.full_since_s.is_none() && target.knows_blocks()
}

/// Whether any bytes are confirmed live.
fn confirms(target: &Target) -> bool {
    tells_of_kept(target) && target.retention.by_stack(monotonic_ns()).into_iter().any(|(_, kept)| kept.confirmed_bytes > 0)
}

/// Adds the bytes confirmed live, and the rest of the heap.
fn add_kept(rows: &mut HashMap<StackId, Row>, target: &Target, state: &ProcessState) {
    let mut confirmed_bytes = 0u64;
    for (stack, kept) in target.retention.by_stack(monotonic_ns()) {
        let values = Values::default()
            .with(ValueKind::SampledObjects, kept.sampled)
            .with(ValueKind::InformativeObjects, kept.informative)
            .with(ValueKind::SameObjects, kept.same)
            .with(ValueKind::ConfirmedSpace, kept.confirmed_bytes);
        rows.entry(stack).or_default().0.add(&values);
        confirmed_bytes = confirmed_bytes.saturating_add(kept.confirmed_bytes);
    }
    if confirmed_bytes == 0 {
        return;
    }
    let rest_bytes = heap_bytes(target, state).map_or(0, |live_bytes| live_bytes.saturating_sub(confirmed_bytes));
    rows.entry(StackId(u32::MAX)).or_default().0.add(&Values::default().with(ValueKind::ConfirmedSpace, rest_bytes));
}

/// The estimator, including what a full trace in progress has seen since its last piece.
fn so_far<'a>(target: &'a Target, state: &ProcessState) -> Cow<'a, Estimator<StackId>> {
    let Some(window) = state.window.as_ref().filter(|_| target.is_full()) else { return Cow::Borrowed(&target.estimator) };
    let mut estimator = target.estimator.clone();
    estimator.full(&window.observer.clone().close(monotonic_ns(), &HitCosts::FREE, &WindowTimes::default()));
    Cow::Owned(estimator)
}

/// A stack's values: estimates with their errors, or lower bounds.
fn values_of(amounts: &Amounts, is_bound: bool, age: usize) -> Row {
    // `as` saturates, and takes NaN to 0.
    let whole = |amount: f64| amount.round() as u64;
    let mut row = Row::default();
    let mut set = |kind, quantity: &Quantity| {
        row.0.set(kind, if is_bound { quantity.least.floor() as u64 } else { whole(quantity.value) });
        row.1.set(kind, if is_bound { 0 } else { whole(quantity.stderr) });
    };
    if let Some(allocated) = &amounts[0] {
        set(ValueKind::AllocObjects, &allocated.count);
        set(ValueKind::AllocSpace, &allocated.bytes);
    }
    for (kind, age) in ValueKind::OUTLIVED.into_iter().zip(TOLD_AGES) {
        if let Some(outlived) = &amounts[1 + age] {
            set(kind, &outlived.bytes);
        }
    }
    if let Some(outlived) = &amounts[1 + age] {
        set(ValueKind::SurvivorObjects, &outlived.count);
        set(ValueKind::SurvivorSpace, &outlived.bytes);
    }
    row
}
