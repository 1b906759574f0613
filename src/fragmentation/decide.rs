//! The findings on a process: each cause that holds, with its confidence and a sentence; the first is the verdict. Pure.
//!
//! The malloc heap and the memory outside it are judged separately, and each cause that holds is a finding. Growth comes first, then
//! trouble in the heap if it is a relevant share of the process, then the memory outside.

use super::estimated;
use super::outside;
use super::trend::{Change, Shape};
use super::verdict::{Confidence, Evidence, Finding, Kind};
use crate::census::Census;
use crate::units::{HumanBytes, HumanDuration, counted};

/// Share of the resident heap that must be free for any verdict on free memory, in percent. Allocators usually keep about 10 %.
const FREE_PERCENT_MIN: u64 = 20;
/// Free bytes below which a heap is healthy whatever its shares: too few to matter on any machine.
const FREE_BYTES_MIN: u64 = 16 << 20;
/// Smallest share of the process's resident bytes for which trouble in the heap is the verdict although most memory lies outside it, in
/// percent.
const TROUBLE_PERCENT_MIN: u64 = 3;
/// Time that a climb must last without slackening before it is called a leak: within it, a cache that fills looks the same.
const LEAK_SECONDS_MIN: f64 = 1800.0;
/// Fewest samples for a leak.
const LEAK_LOOKS_MIN: u64 = 8;
/// Shortest observation for which a steady heap has more than low confidence: loads change within minutes.
const LONG_S: f64 = 300.0;
/// Smallest difference of live bytes between two samples that is reported.
const GROWN_BYTES_MIN: u64 = 1 << 20;
/// The same as a share of live bytes, in percent.
const GROWN_PERCENT_MIN: u64 = 2;
/// Fewest arenas in use for an arena blow-up.
pub(super) const ARENAS_MIN: usize = 8;

/// The findings on a census with its evidence: at least one, the verdict first.
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
        // That the heap is healthy is not said of one that grows.
        Some(outside) if census.heaps.is_empty() || grows && !is_trouble => findings.push(outside),
        Some(outside) => findings.extend([outside, heap]),
    }
    findings
}

/// The findings on a heap alone, where the memory outside it is not known.
pub(super) fn of_heap(evidence: &Evidence) -> Vec<Finding> {
    let mut findings: Vec<Finding> = evidence.change.iter().filter_map(|change| live_grows(evidence, change)).collect();
    let heap = state_of_heap(evidence);
    if findings.is_empty() || !matches!(heap.verdict, Kind::Healthy | Kind::Unknown) {
        findings.push(heap);
    }
    findings
}

/// Kinds of mappings that may be the heap of an unknown allocator.
const MAY_BE_A_HEAP: [&str; 2] = ["other_anonymous", "brk_not_malloc"];

/// No verdict if an allocator could not be read: its memory cannot be distinguished from other memory.
fn unread_allocator(census: &Census, evidence: &Evidence) -> Option<Finding> {
    let of =
        |kinds: &[&str]| evidence.not_malloc.iter().filter(|part| kinds.contains(&part.kind)).map(|part| part.resident_bytes).sum::<u64>();
    let may_be_heap = of(&MAY_BE_A_HEAP);
    let certain = evidence.not_malloc_bytes.saturating_sub(may_be_heap);
    if may_be_heap < FREE_BYTES_MIN {
        return None;
    }
    // Most of the memory is certainly not a heap: the verdict stands.
    if certain > may_be_heap.saturating_add(evidence.ladder.resident_bytes) {
        return None;
    }
    let reason = match census.layout_unknown.first() {
        Some(reason) => reason.clone(),
        None if census.heaps.is_empty() => {
            "no readable allocator was found (glibc, jemalloc, musl, tcmalloc of gperftools and of Google, mimalloc): one of the anonymous mappings may be a heap"
                .into()
        }
        None => return None,
    };
    Some(Finding::unknown(format!(
        "{} of {} resident may or may not be heap: {reason}",
        HumanBytes(may_be_heap),
        HumanBytes(evidence.rss_bytes)
    )))
}

/// Growing memory: the heap's live bytes, or else the memory outside it.
fn growing(evidence: &Evidence, change: &Change) -> Option<Finding> {
    live_grows(evidence, change).or_else(|| outside_grows(evidence, change))
}

/// Growing live bytes. By size alone a cache that fills and a leak look the same until the cache is full, so growth is a leak only once it
/// has lasted; two samples show neither.
fn live_grows(evidence: &Evidence, change: &Change) -> Option<Finding> {
    let grown = u64::try_from(change.live_bytes_delta).unwrap_or(0);
    let over = HumanDuration(change.seconds);
    match change.live_shape {
        Shape::Growing => {
            let lasting = change.span_s >= LEAK_SECONDS_MIN && change.looks >= LEAK_LOOKS_MIN && !change.live_slackens;
            let rate = HumanBytes(change.live_bytes_per_s.max(0.0) as u64);
            let text = format!(
                "the low-water mark of live bytes rose by {} in {over}, {rate} per second, over {}",
                HumanBytes(grown),
                counted(change.looks, "sample")
            );
            Some(if lasting {
                let text =
                    format!("{text}, and has not slowed down for {}, as a cache that fills would have", HumanDuration(change.span_s));
                Finding::new(Kind::Leak, Confidence::Medium, Some(grown), text)
            } else {
                let why = if change.live_slackens { ", and is slowing down, as a cache that fills does" } else { "" };
                let confidence = if change.span_s >= LONG_S { Confidence::Medium } else { Confidence::Low };
                Finding::new(Kind::Growing, confidence, Some(grown), format!("{text}{why}"))
            })
        }
        Shape::Unknown if is_much(grown, evidence.ladder.live_bytes.unwrap_or(0)) => {
            let text =
                format!("live bytes rose by {} in {over}, but there are only {}", HumanBytes(grown), counted(change.looks, "sample"));
            Some(Finding::new(Kind::Growing, Confidence::Low, Some(grown), text))
        }
        _ => None,
    }
}

/// Whether a difference between two samples is large enough to report.
fn is_much(grown: u64, live: u64) -> bool {
    grown >= GROWN_BYTES_MIN && grown.saturating_mul(100) >= live.saturating_mul(GROWN_PERCENT_MIN)
}

/// Growing memory outside malloc, other than kinds with a limit of their own.
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
        counted(change.looks, "sample"),
        largest.kind,
        HumanBytes(largest.resident_bytes)
    );
    Some(Finding::new(Kind::Growing, confidence, Some(grown), text))
}

/// Most of the memory is outside the heap; `None` if it is not. Mapped code, which every process has, is not counted.
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
        "{} of {} resident is outside malloc, mapped programs and libraries not counted; the largest part is {} with {}{java}",
        HumanBytes(bytes),
        HumanBytes(evidence.rss_bytes),
        largest.kind,
        HumanBytes(largest.resident_bytes)
    );
    Some(Finding::new(Kind::NotMalloc, confidence, Some(bytes), text))
}

/// The finding on the heap's present state.
fn state_of_heap(evidence: &Evidence) -> Finding {
    let ladder = &evidence.ladder;
    let (Some(live), Some(free)) = (ladder.live_bytes, evidence.free_resident_bytes) else {
        if let Some(estimate) = evidence.occupancy_est {
            return estimated::state_of_heap(evidence, &estimate);
        }
        return without_residency(evidence);
    };
    if let Some(bloat) = huge_pages(evidence) {
        return bloat;
    }
    let is_little = |free: u64| is_little(free, ladder.resident_bytes);
    let lasting = evidence.change.and_then(|change| change.free_floor_bytes).map_or(free, |floor| floor.min(free));
    if is_little(lasting) {
        return healthy(evidence, live, free, lasting, !is_little(free));
    }
    let pinned = ladder.pinned_bytes.unwrap_or(0);
    let cached = evidence.details.cached_bytes.unwrap_or(0).min(free);
    // Whole free pages, whether or not a trim gives them back; those of caches are attributed to these.
    let kept = evidence.details.kept_bytes.unwrap_or(0).saturating_sub(cached);
    let whole = ladder.trimmable_bytes.unwrap_or(0).saturating_add(kept);
    let arenas = spread_over_arenas(evidence).min(free);
    let (kind, bytes) = [(Kind::Hoarding, whole), (Kind::Fragmentation, pinned), (Kind::Cache, cached)]
        .into_iter()
        .max_by_key(|&(_, bytes)| bytes)
        .unwrap_or((Kind::Healthy, 0));
    // Cached bytes are attributed to the caches, even if a trim would release whole pages of them.
    let (kind, bytes) = if cached.saturating_mul(2) > free { (Kind::Cache, cached) } else { (kind, bytes) };
    // Free memory that is spread over many arenas is attributed to their number, whatever its kind.
    let (kind, bytes) = if arenas.saturating_mul(4) >= free.saturating_mul(3) { (Kind::ArenaBlowUp, arenas) } else { (kind, bytes) };
    // Memory that is free in one sample may be free only temporarily.
    let has_most = bytes.saturating_mul(2) >= free;
    let is_still = evidence.change.is_some_and(|change| matches!(change.live_shape, Shape::Steady | Shape::Levelled));
    // What fewer arenas would need is not in a census: only a run with fewer shows whether their number is the cause.
    let is_shown = has_most && is_still && kind != Kind::ArenaBlowUp;
    let confidence = if is_shown { Confidence::High } else { Confidence::Medium };
    let what = match kind {
        Kind::ArenaBlowUp => {
            format!("is spread over the {} beside the main one", counted((evidence.arenas as u64).saturating_sub(1), "arena"))
        }
        kind => where_it_lies(kind).to_owned(),
    };
    let text = format!(
        "{} of {} resident in {} is free; {} of that {what}",
        HumanBytes(free),
        HumanBytes(ladder.resident_bytes),
        evidence.heap(),
        HumanBytes(bytes)
    );
    Finding::new(kind, confidence, Some(bytes), text)
}

/// The finding on a heap of which it is not known how much of its free memory is resident, as of gperftools' tcmalloc. What a trim would give
/// back is resident, and so is what live bytes leave of the resident ones: lower bounds.
fn without_residency(evidence: &Evidence) -> Finding {
    let ladder = &evidence.ladder;
    let Some(live) = ladder.live_bytes else {
        return Finding::unknown("live and free bytes were not measured".into());
    };
    let free = ladder.resident_bytes.saturating_sub(live).saturating_sub(ladder.unknown_bytes.unwrap_or(0));
    let given_back = ladder.trimmable_bytes.unwrap_or(0);
    let beside_live = free.saturating_sub(given_back);
    if beside_live > given_back && !is_little(free, ladder.resident_bytes) {
        let text = format!(
            "at least {} of {} resident in {} is free; a trim would give back {} of that, and the rest lies beside live blocks",
            HumanBytes(free),
            HumanBytes(ladder.resident_bytes),
            evidence.heap(),
            HumanBytes(given_back)
        );
        return Finding::new(Kind::Fragmentation, Confidence::Medium, Some(beside_live), text);
    }
    let Some(trimmable) = ladder.trimmable_bytes.filter(|&bytes| !is_little(bytes, ladder.resident_bytes)) else {
        return Finding::unknown("how much of the free memory is resident was not measured".into());
    };
    let text = format!(
        "{} of {} resident in {} {}; how much of its other free memory is resident was not measured",
        HumanBytes(trimmable),
        HumanBytes(ladder.resident_bytes),
        evidence.heap(),
        where_it_lies(Kind::Hoarding)
    );
    Finding::new(Kind::Hoarding, Confidence::Medium, Some(trimmable), text)
}

/// Where the free bytes behind this verdict are.
pub(super) fn where_it_lies(kind: Kind) -> &'static str {
    match kind {
        Kind::Hoarding => "is in whole free pages that the allocator keeps",
        Kind::Fragmentation => "is on pages that also hold live blocks",
        Kind::Cache => "is in thread caches and fastbins",
        _ => "is free",
    }
}

/// Whether so few free bytes of a heap are no trouble.
pub(super) fn is_little(free: u64, resident: u64) -> bool {
    free < FREE_BYTES_MIN || free.saturating_mul(100) < resident.saturating_mul(FREE_PERCENT_MIN)
}

/// Free bytes in arenas other than the main one; 0 if there are few arenas, or one of them has most.
fn spread_over_arenas(evidence: &Evidence) -> u64 {
    let all = evidence.other_arenas_free_bytes;
    let is_spread = evidence.arenas >= ARENAS_MIN && evidence.other_arena_free_bytes_max.saturating_mul(2) <= all;
    if is_spread { all } else { 0 }
}

/// Little is free, or only temporarily. The confidence depends on the time observed: a leak has little free memory too.
fn healthy(evidence: &Evidence, live: u64, free: u64, lasting: u64, passes: bool) -> Finding {
    let ladder = &evidence.ladder;
    let mut text = format!(
        "of {} resident in {}, {} is in use and {} is free",
        HumanBytes(ladder.resident_bytes),
        evidence.heap(),
        HumanBytes(evidence.live_resident_bytes.unwrap_or(live.min(ladder.resident_bytes.saturating_sub(free)))),
        HumanBytes(free)
    );
    let confidence = match &evidence.change {
        None => Confidence::Low,
        Some(change) => {
            let over = HumanDuration(change.span_s);
            match change.live_shape {
                Shape::Unknown | Shape::Growing => {}
                Shape::Steady => text.push_str(&format!("; live bytes did not grow in {over}")),
                Shape::ComesAndGoes => text.push_str(&format!(
                    "; live bytes swing by {} in {over}, and their low-water mark does not rise",
                    HumanBytes(change.live_swing_bytes)
                )),
                Shape::Refilling => {
                    text.push_str(&format!("; live bytes rose over {over}, but only within memory that the process held before"));
                }
                Shape::Levelled => text.push_str(&format!("; live bytes rose, then stopped rising, within {over}")),
            }
            match change.live_shape {
                Shape::Unknown | Shape::Growing | Shape::Refilling => Confidence::Low,
                Shape::Steady if change.span_s >= LONG_S => Confidence::High,
                Shape::Steady | Shape::ComesAndGoes | Shape::Levelled => Confidence::Medium,
            }
        }
    };
    if passes {
        text.push_str(&format!("; at the lowest only {} was free", HumanBytes(lasting)));
    }
    Finding::new(Kind::Healthy, confidence, None, text)
}

/// Memory that is resident only because its pages are huge; `None` unless that is much, and more than any other cause has. Free bytes can
/// be zero too, and a trim splits huge pages, so the other causes come first.
pub(super) fn huge_pages(evidence: &Evidence) -> Option<Finding> {
    let ladder = &evidence.ladder;
    let zero = evidence.huge_zero_bytes_est?.min(evidence.details.huge_bytes);
    let counted = [ladder.trimmable_bytes, ladder.pinned_bytes, evidence.details.cached_bytes];
    let estimated = evidence.occupancy_est.map(|est| est.trimmable_bytes_est.max(est.pinned_bytes_est).max(est.cached_bytes_est));
    let others = counted.into_iter().chain([estimated]).flatten().max().unwrap_or(0);
    let is_much = zero >= FREE_BYTES_MIN && zero.saturating_mul(100) >= ladder.resident_bytes.saturating_mul(FREE_PERCENT_MIN);
    if !is_much || zero < others {
        return None;
    }
    let confidence = if zero.saturating_mul(2) >= ladder.resident_bytes { Confidence::High } else { Confidence::Medium };
    let text = format!(
        "of {} resident in {}, {} is in huge pages, and {} of that holds only zeros",
        HumanBytes(ladder.resident_bytes),
        evidence.heap(),
        HumanBytes(evidence.details.huge_bytes),
        HumanBytes(zero)
    );
    Some(Finding::new(Kind::HugePageBloat, confidence, Some(zero), text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heap_whose_free_bytes_may_be_returned_has_a_verdict_by_what_a_trim_gives_back() {
        const MIB: u64 = 1 << 20;
        let of = |live: Option<u64>, trimmable: u64| {
            let mut evidence = Evidence::default();
            evidence.ladder.resident_bytes = 146 * MIB;
            evidence.ladder.live_bytes = live;
            evidence.ladder.trimmable_bytes = Some(trimmable * MIB);
            let finding = state_of_heap(&evidence);
            (finding.verdict, finding.bytes, finding.summary)
        };
        let (kind, bytes, text) = of(Some(78 * MIB), 60);
        assert_eq!((kind, bytes), (Kind::Hoarding, Some(60 * MIB)), "{text}");
        assert!(text.ends_with("how much of its other free memory is resident was not measured"), "{text}");
        let (kind, bytes, text) = of(Some(78 * MIB), 1);
        assert_eq!((kind, bytes), (Kind::Fragmentation, Some(67 * MIB)), "{text}");
        assert!(text.starts_with("at least 68.0 MiB of 146 MiB"), "{text}");
        // All of it could be in use.
        let (kind, _, text) = of(Some(200 * MIB), 1);
        assert_eq!((kind, text.as_str()), (Kind::Unknown, "how much of the free memory is resident was not measured"));
        assert_eq!(of(None, 60).0, Kind::Unknown);
    }
}
