//! Which verdict the evidence gives, how sure it is, and the sentence that says so. Pure.

use super::verdict::{Confidence, Evidence, Kind};
use crate::census::Census;
use crate::units::{HumanBytes, counted};

/// Share of the resident heap that must be free before anything but "healthy" is said, in percent. Allocators keep some 10 % in passing.
const FREE_PERCENT_MIN: u64 = 20;
/// Free bytes below which a heap is healthy whatever its shares: nobody's node dies of them.
const FREE_BYTES_MIN: u64 = 16 << 20;
/// Growth of live bytes over the observed time that makes a leak, in percent of live.
const LEAK_PERCENT_MIN: u64 = 2;
/// Growth of live bytes below which no leak is said.
const LEAK_BYTES_MIN: u64 = 1 << 20;
/// Arenas that hold something, from which on they can be a blow-up.
const ARENAS_MIN: usize = 8;

/// The verdict on a census with its evidence.
pub(super) fn decide(census: &Census, evidence: &Evidence) -> (Kind, Confidence, String) {
    if !census.walk.usable {
        return (Kind::Unknown, Confidence::Low, "the heap could not be read well enough for a verdict".into());
    }
    if let Some(unknown) = unread_allocator(census, evidence) {
        return unknown;
    }
    // Every small process has more code mapped than heap: that is nothing to explain.
    if evidence.not_malloc_bytes > evidence.ladder.resident_bytes && evidence.not_malloc_bytes >= FREE_BYTES_MIN {
        return elsewhere(evidence);
    }
    of_heap(evidence)
}

/// Kinds of mappings that may be the heap of an allocator nobody here understands.
const MAY_BE_A_HEAP: [&str; 2] = ["other_anonymous", "brk_not_malloc"];

/// No verdict where an allocator was not understood: what is its own and what is not cannot be told apart.
fn unread_allocator(census: &Census, evidence: &Evidence) -> Option<(Kind, Confidence, String)> {
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
    let text = format!("{} of {} resident may be heap or not: {reason}", HumanBytes(may_be_heap), HumanBytes(evidence.rss_bytes));
    Some((Kind::Unknown, Confidence::Low, text))
}

/// Most of the memory is not the heap's.
fn elsewhere(evidence: &Evidence) -> (Kind, Confidence, String) {
    let largest = evidence.not_malloc_largest.unwrap_or("other_anonymous");
    let bytes = evidence.not_malloc.iter().find(|part| part.kind == largest).map_or(0, |part| part.resident_bytes);
    let confidence = if evidence.not_malloc_bytes >= 2 * evidence.ladder.resident_bytes { Confidence::High } else { Confidence::Medium };
    let text = format!(
        "{} of {} resident is not malloc's; the largest part is {largest} with {}",
        HumanBytes(evidence.not_malloc_bytes),
        HumanBytes(evidence.rss_bytes),
        HumanBytes(bytes)
    );
    (Kind::NotMalloc, confidence, text)
}

/// What the heap's own figures say.
pub(super) fn of_heap(evidence: &Evidence) -> (Kind, Confidence, String) {
    let ladder = &evidence.ladder;
    let (Some(live), Some(free)) = (ladder.live_bytes, ladder.free_resident_bytes) else {
        return (Kind::Unknown, Confidence::Low, "what is live and what is free was not looked at".into());
    };
    if let Some(change) = &evidence.change {
        let grown = u64::try_from(change.live_bytes_delta).unwrap_or(0);
        if grown >= LEAK_BYTES_MIN && grown.saturating_mul(100) >= live.saturating_mul(LEAK_PERCENT_MIN) {
            let per_hour = HumanBytes(change.live_bytes_per_hour().max(0).unsigned_abs());
            let text = format!("live bytes grew by {} in {:.0} s, {per_hour} an hour at that rate", HumanBytes(grown), change.seconds);
            return (Kind::Leak, Confidence::Medium, text);
        }
    }
    if let Some(bloat) = huge_pages(evidence) {
        return bloat;
    }
    if free < FREE_BYTES_MIN || free.saturating_mul(100) < ladder.resident_bytes.saturating_mul(FREE_PERCENT_MIN) {
        let text = format!(
            "of {} resident in the heap, {} is in use and {} is free",
            HumanBytes(ladder.resident_bytes),
            HumanBytes(ladder.live_resident_bytes.unwrap_or(live.min(ladder.resident_bytes))),
            HumanBytes(free)
        );
        return (Kind::Healthy, Confidence::High, text);
    }
    let trimmable = ladder.trimmable_bytes.unwrap_or(0);
    let pinned = ladder.pinned_bytes.unwrap_or(0);
    let cached = ladder.cached_bytes.unwrap_or(0).min(free);
    let arenas = if evidence.arenas >= ARENAS_MIN { evidence.other_arenas_free_bytes.min(free) } else { 0 };
    let (kind, bytes) = [(Kind::Hoarding, trimmable), (Kind::Fragmentation, pinned), (Kind::Cache, cached)]
        .into_iter()
        .max_by_key(|&(_, bytes)| bytes)
        .unwrap_or((Kind::Healthy, 0));
    // What caches keep is their doing, though a trim would give whole pages of it back.
    let (kind, bytes) = if cached.saturating_mul(2) > free { (Kind::Cache, cached) } else { (kind, bytes) };
    // Free memory that is spread over many arenas comes from their number, whatever its form.
    let (kind, bytes) = if arenas.saturating_mul(4) >= free.saturating_mul(3) { (Kind::ArenaBlowUp, arenas) } else { (kind, bytes) };
    let confidence = if bytes.saturating_mul(2) >= free { Confidence::High } else { Confidence::Medium };
    let what = match kind {
        Kind::Hoarding => "lies in whole free pages that the allocator keeps",
        Kind::Fragmentation => "lies on pages that also hold live blocks",
        Kind::Cache => "is kept by thread caches and fastbins",
        Kind::ArenaBlowUp => return (kind, confidence, arenas_text(evidence, free, bytes)),
        _ => "is free",
    };
    let text = format!(
        "{} of {} resident in the heap is free; {} of that {what}",
        HumanBytes(free),
        HumanBytes(ladder.resident_bytes),
        HumanBytes(bytes)
    );
    (kind, confidence, text)
}

/// Memory that is resident only because its pages are huge; `None` unless that is much, and more than any other cause has. What is free can
/// be zero too: a trim splits huge pages, so the other causes come first.
fn huge_pages(evidence: &Evidence) -> Option<(Kind, Confidence, String)> {
    let ladder = &evidence.ladder;
    let zero = evidence.huge_zero_bytes_est?.min(ladder.huge_bytes);
    let others = [ladder.trimmable_bytes, ladder.pinned_bytes, ladder.cached_bytes].into_iter().flatten().max().unwrap_or(0);
    let is_much = zero >= FREE_BYTES_MIN && zero.saturating_mul(100) >= ladder.resident_bytes.saturating_mul(FREE_PERCENT_MIN);
    if !is_much || zero < others {
        return None;
    }
    let confidence = if zero.saturating_mul(2) >= ladder.resident_bytes { Confidence::High } else { Confidence::Medium };
    let text = format!(
        "of {} resident in the heap, {} is in huge pages, and {} of that holds only zeros",
        HumanBytes(ladder.resident_bytes),
        HumanBytes(ladder.huge_bytes),
        HumanBytes(zero)
    );
    Some((Kind::HugePageBloat, confidence, text))
}

fn arenas_text(evidence: &Evidence, free: u64, bytes: u64) -> String {
    format!(
        "{} of {} resident in the heap is free; {} of that is spread over {}",
        HumanBytes(free),
        HumanBytes(evidence.ladder.resident_bytes),
        HumanBytes(bytes),
        counted(evidence.arenas as u64, "arena")
    )
}
