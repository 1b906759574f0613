//! Which causes hold, how sure each is, and the sentence that says so; the first is the verdict. Pure.
//!
//! The malloc heap is judged by itself, and so is what lies outside it: each that holds is a finding. Growth comes first, then trouble in
//! the heap if it is a share of the process that matters, then what lies outside.

use super::estimated;
use super::outside;
use super::trend::{Change, Shape};
use super::verdict::{Confidence, Evidence, Finding, Kind};
use crate::census::Census;
use crate::units::{HumanBytes, HumanDuration, counted};

/// Share of the resident heap that must be free before anything but "healthy" is said, in percent. Allocators keep some 10 % in passing.
const FREE_PERCENT_MIN: u64 = 20;
/// Free bytes below which a heap is healthy whatever its shares: nobody's node dies of them.
const FREE_BYTES_MIN: u64 = 16 << 20;
/// Share of the process's resident bytes from which on trouble in the heap is the verdict though most memory lies outside, in percent.
const TROUBLE_PERCENT_MIN: u64 = 3;
/// Time that a climb must last without slackening before it is called a leak: within it, a cache that fills looks the same.
const LEAK_SECONDS_MIN: f64 = 1800.0;
/// Looks that a leak needs.
const LEAK_LOOKS_MIN: u64 = 8;
/// Time looked at from which on what is steady is so with more than little confidence: loads come and go within minutes.
const LONG_S: f64 = 300.0;
/// Difference of live bytes between two looks that is told.
const GROWN_BYTES_MIN: u64 = 1 << 20;
/// The same as a share of live bytes, in percent.
const GROWN_PERCENT_MIN: u64 = 2;
/// Arenas that hold something, from which on they can be a blow-up.
pub(super) const ARENAS_MIN: usize = 8;

/// What holds of a census with its evidence; at least one finding, the verdict first.
pub(super) fn decide(census: &Census, evidence: &Evidence) -> Vec<Finding> {
    if !census.walk.usable {
        return vec![Finding::unknown("the heap could not be read well enough for a verdict".into())];
    }
    if let Some(unknown) = unread_allocator(census, evidence) {
        return vec![unknown];
    }
    let mut findings: Vec<Finding> = evidence.change.iter().filter_map(|change| growing(evidence, change)).collect();
    let grows = !findings.is_empty();
    let heap = state_of_heap(evidence);
    let outside = elsewhere(census, evidence);
    let is_trouble = !matches!(heap.verdict, Kind::Healthy | Kind::Unknown);
    let matters = heap.bytes.unwrap_or(0).saturating_mul(100) >= evidence.rss_bytes.saturating_mul(TROUBLE_PERCENT_MIN);
    match outside {
        None if grows && !is_trouble => {}
        None => findings.push(heap),
        Some(outside) if is_trouble && matters => findings.extend([heap, outside]),
        Some(outside) if census.heaps.is_empty() => findings.push(outside),
        Some(outside) => findings.extend([outside, heap]),
    }
    findings
}

/// What holds of a heap alone, where nothing is known of what lies outside it.
pub(super) fn of_heap(evidence: &Evidence) -> Vec<Finding> {
    let mut findings: Vec<Finding> = evidence.change.iter().filter_map(|change| live_grows(evidence, change)).collect();
    let heap = state_of_heap(evidence);
    if findings.is_empty() || !matches!(heap.verdict, Kind::Healthy | Kind::Unknown) {
        findings.push(heap);
    }
    findings
}

/// Kinds of mappings that may be the heap of an allocator nobody here understands.
const MAY_BE_A_HEAP: [&str; 2] = ["other_anonymous", "brk_not_malloc"];

/// No verdict where an allocator was not understood: what is its own and what is not cannot be told apart.
fn unread_allocator(census: &Census, evidence: &Evidence) -> Option<Finding> {
    let of =
        |kinds: &[&str]| evidence.not_malloc.iter().filter(|part| kinds.contains(&part.kind)).map(|part| part.resident_bytes).sum::<u64>();
    let may_be_heap = of(&MAY_BE_A_HEAP);
    let certain = evidence.not_malloc_bytes.saturating_sub(may_be_heap);
    if may_be_heap < FREE_BYTES_MIN {
        return None;
    }
    // What is certainly no heap is the larger part all the same: the verdict stands.
    if certain > may_be_heap.saturating_add(evidence.ladder.resident_bytes) {
        return None;
    }
    let reason = match census.layout_unknown.first() {
        Some(reason) => reason.clone(),
        None if census.heaps.is_empty() => {
            "no allocator that can be read was found (glibc, jemalloc, musl, gperftools tcmalloc): a heap may be among the anonymous mappings".into()
        }
        None => return None,
    };
    Some(Finding::unknown(format!(
        "{} of {} resident may be heap or not: {reason}",
        HumanBytes(may_be_heap),
        HumanBytes(evidence.rss_bytes)
    )))
}

/// Memory that grows: the heap's live bytes, or else what lies outside.
fn growing(evidence: &Evidence, change: &Change) -> Option<Finding> {
    live_grows(evidence, change).or_else(|| outside_grows(evidence, change))
}

/// Live bytes that grow. From their size alone a cache that fills and a leak are the same until the one is full, so a climb is a leak only
/// once it has lasted; two looks make neither.
fn live_grows(evidence: &Evidence, change: &Change) -> Option<Finding> {
    let grown = u64::try_from(change.live_bytes_delta).unwrap_or(0);
    let over = HumanDuration(change.seconds);
    match change.live_shape {
        Shape::Growing => {
            let lasting = change.span_s >= LEAK_SECONDS_MIN && change.looks >= LEAK_LOOKS_MIN && !change.live_slackens;
            let rate = HumanBytes(change.live_bytes_per_s.max(0.0) as u64);
            let text = format!(
                "the low-water mark of live bytes rose by {} in {over}, {rate} a second, over {}",
                HumanBytes(grown),
                counted(change.looks, "look")
            );
            Some(if lasting {
                let text = format!("{text}, and has not slackened for {}: a cache that fills would have", HumanDuration(change.span_s));
                Finding::new(Kind::Leak, Confidence::Medium, Some(grown), text)
            } else {
                let why = if change.live_slackens { ", more slowly of late, as a cache that fills does" } else { "" };
                let confidence = if change.span_s >= LONG_S { Confidence::Medium } else { Confidence::Low };
                Finding::new(Kind::Growing, confidence, Some(grown), format!("{text}{why}"))
            })
        }
        Shape::Unknown if is_much(grown, evidence.ladder.live_bytes.unwrap_or(0)) => {
            let text = format!("live bytes were {} more after {over}: {} only", HumanBytes(grown), counted(change.looks, "look"));
            Some(Finding::new(Kind::Growing, Confidence::Low, Some(grown), text))
        }
        _ => None,
    }
}

/// Whether a difference between two looks is worth telling.
fn is_much(grown: u64, live: u64) -> bool {
    grown >= GROWN_BYTES_MIN && grown.saturating_mul(100) >= live.saturating_mul(GROWN_PERCENT_MIN)
}

/// Memory outside malloc that grows, other than what has a limit of its own.
fn outside_grows(evidence: &Evidence, change: &Change) -> Option<Finding> {
    if change.outside_shape != Shape::Growing {
        return None;
    }
    let grown = u64::try_from(change.outside_bytes_delta).unwrap_or(0);
    let largest = evidence.not_malloc.iter().filter(|part| outside::grows_by_itself(part.kind)).max_by_key(|part| part.resident_bytes)?;
    let confidence = if change.span_s >= LONG_S { Confidence::Medium } else { Confidence::Low };
    let text = format!(
        "memory outside malloc rose by {} in {} over {}; the largest part of it is {} with {}",
        HumanBytes(grown),
        HumanDuration(change.seconds),
        counted(change.looks, "look"),
        largest.kind,
        HumanBytes(largest.resident_bytes)
    );
    Some(Finding::new(Kind::Growing, confidence, Some(grown), text))
}

/// Most of the memory is not the heap's; `None` if it is. Every process has code mapped, which is nothing to explain.
fn elsewhere(census: &Census, evidence: &Evidence) -> Option<Finding> {
    let parts = || evidence.not_malloc.iter().filter(|part| outside::counts(part.kind));
    let bytes = parts().map(|part| part.resident_bytes).fold(0, u64::saturating_add);
    if bytes <= evidence.ladder.resident_bytes || bytes < FREE_BYTES_MIN {
        return None;
    }
    let largest = parts().max_by_key(|part| part.resident_bytes)?;
    let sure = bytes >= 2 * evidence.ladder.resident_bytes;
    let confidence = if sure && evidence.change.is_some() { Confidence::High } else { Confidence::Medium };
    let java = outside::java_heap(census).map_or_else(String::new, |java| format!("; {java}"));
    let text = format!(
        "{} of {} resident is not malloc's; the largest part is {} with {}{java}",
        HumanBytes(bytes),
        HumanBytes(evidence.rss_bytes),
        largest.kind,
        HumanBytes(largest.resident_bytes)
    );
    Some(Finding::new(Kind::NotMalloc, confidence, Some(bytes), text))
}

/// What the heap's own figures say of the moment.
fn state_of_heap(evidence: &Evidence) -> Finding {
    let ladder = &evidence.ladder;
    let (Some(live), Some(free)) = (ladder.live_bytes, ladder.free_resident_bytes) else {
        if let Some(estimate) = evidence.occupancy_est {
            return estimated::state_of_heap(evidence, &estimate);
        }
        return Finding::unknown("what is live and what is free was not looked at".into());
    };
    if let Some(bloat) = huge_pages(evidence) {
        return bloat;
    }
    let is_little = |free: u64| is_little(free, ladder.resident_bytes);
    let lasting = evidence.change.and_then(|change| change.free_floor_bytes).map_or(free, |floor| floor.min(free));
    if is_little(lasting) {
        return healthy(evidence, live, free, lasting, !is_little(free));
    }
    let trimmable = ladder.trimmable_bytes.unwrap_or(0);
    let pinned = ladder.pinned_bytes.unwrap_or(0);
    let cached = ladder.cached_bytes.unwrap_or(0).min(free);
    let arenas = spread_over_arenas(evidence).min(free);
    let (kind, bytes) = [(Kind::Hoarding, trimmable), (Kind::Fragmentation, pinned), (Kind::Cache, cached)]
        .into_iter()
        .max_by_key(|&(_, bytes)| bytes)
        .unwrap_or((Kind::Healthy, 0));
    // What caches keep is their doing, though a trim would give whole pages of it back.
    let (kind, bytes) = if cached.saturating_mul(2) > free { (Kind::Cache, cached) } else { (kind, bytes) };
    // Free memory that is spread over many arenas comes from their number, whatever its form.
    let (kind, bytes) = if arenas.saturating_mul(4) >= free.saturating_mul(3) { (Kind::ArenaBlowUp, arenas) } else { (kind, bytes) };
    // Memory that is free at one look may be so in passing.
    let has_most = bytes.saturating_mul(2) >= free;
    let is_still = evidence.change.is_some_and(|change| matches!(change.live_shape, Shape::Steady | Shape::Levelled));
    let confidence = if has_most && is_still { Confidence::High } else { Confidence::Medium };
    let what = match kind {
        Kind::ArenaBlowUp => format!("is spread over {}", counted(evidence.arenas as u64, "arena")),
        kind => where_it_lies(kind).to_owned(),
    };
    let text = format!(
        "{} of {} resident in the malloc heap is free; {} of that {what}",
        HumanBytes(free),
        HumanBytes(ladder.resident_bytes),
        HumanBytes(bytes)
    );
    Finding::new(kind, confidence, Some(bytes), text)
}

/// Where free bytes lie that make this verdict.
pub(super) fn where_it_lies(kind: Kind) -> &'static str {
    match kind {
        Kind::Hoarding => "lies in whole free pages that the allocator keeps",
        Kind::Fragmentation => "lies on pages that also hold live blocks",
        Kind::Cache => "is kept by thread caches and fastbins",
        _ => "is free",
    }
}

/// Whether so many free bytes of a heap are no trouble.
pub(super) fn is_little(free: u64, resident: u64) -> bool {
    free < FREE_BYTES_MIN || free.saturating_mul(100) < resident.saturating_mul(FREE_PERCENT_MIN)
}

/// Free bytes that lie in many arenas but the main one; 0 where there are few, or one of them has most.
fn spread_over_arenas(evidence: &Evidence) -> u64 {
    let all = evidence.other_arenas_free_bytes;
    let is_spread = evidence.arenas >= ARENAS_MIN && evidence.other_arena_free_bytes_max.saturating_mul(2) <= all;
    if is_spread { all } else { 0 }
}

/// Little is free, or only in passing. How sure that is depends on how long was looked: a leak has little free memory too.
fn healthy(evidence: &Evidence, live: u64, free: u64, lasting: u64, passes: bool) -> Finding {
    let ladder = &evidence.ladder;
    let mut text = format!(
        "of {} resident in the malloc heap, {} is in use and {} is free",
        HumanBytes(ladder.resident_bytes),
        HumanBytes(ladder.live_resident_bytes.unwrap_or(live.min(ladder.resident_bytes))),
        HumanBytes(free)
    );
    let confidence = match &evidence.change {
        None => Confidence::Low,
        Some(change) => {
            let over = HumanDuration(change.span_s);
            match change.live_shape {
                Shape::Unknown => {}
                Shape::Steady | Shape::Growing => text.push_str(&format!("; live bytes did not grow in {over}")),
                Shape::ComesAndGoes => text.push_str(&format!(
                    "; live bytes come and go by {} in {over}, and what they come back to does not rise",
                    HumanBytes(change.live_swing_bytes)
                )),
                Shape::Refilling => {
                    text.push_str(&format!("; live bytes rise, within what the process held before, over {over}"));
                }
                Shape::Levelled => text.push_str(&format!("; live bytes rose within {over}, and then no more")),
            }
            match change.live_shape {
                Shape::Unknown | Shape::Growing | Shape::Refilling => Confidence::Low,
                Shape::Steady if change.span_s >= LONG_S => Confidence::High,
                Shape::Steady | Shape::ComesAndGoes | Shape::Levelled => Confidence::Medium,
            }
        }
    };
    if passes {
        text.push_str(&format!("; as little as {} was free meanwhile", HumanBytes(lasting)));
    }
    Finding::new(Kind::Healthy, confidence, None, text)
}

/// Memory that is resident only because its pages are huge; `None` unless that is much, and more than any other cause has. What is free can
/// be zero too: a trim splits huge pages, so the other causes come first.
pub(super) fn huge_pages(evidence: &Evidence) -> Option<Finding> {
    let ladder = &evidence.ladder;
    let zero = evidence.huge_zero_bytes_est?.min(ladder.huge_bytes);
    let counted = [ladder.trimmable_bytes, ladder.pinned_bytes, ladder.cached_bytes];
    let estimated = evidence.occupancy_est.map(|est| est.trimmable_bytes_est.max(est.pinned_bytes_est).max(est.cached_bytes_est));
    let others = counted.into_iter().chain([estimated]).flatten().max().unwrap_or(0);
    let is_much = zero >= FREE_BYTES_MIN && zero.saturating_mul(100) >= ladder.resident_bytes.saturating_mul(FREE_PERCENT_MIN);
    if !is_much || zero < others {
        return None;
    }
    let confidence = if zero.saturating_mul(2) >= ladder.resident_bytes { Confidence::High } else { Confidence::Medium };
    let text = format!(
        "of {} resident in the malloc heap, {} is in huge pages, and {} of that holds only zeros",
        HumanBytes(ladder.resident_bytes),
        HumanBytes(ladder.huge_bytes),
        HumanBytes(zero)
    );
    Some(Finding::new(Kind::HugePageBloat, confidence, Some(zero), text))
}
