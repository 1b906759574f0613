//! Remedies for the findings, with the name of the setting and the bytes it would save. Pure.
//!
//! Remedies depend on the allocator. Counted amounts (a trim, a purge) come first; settings whose effect on this program is not measured
//! follow, with `at_most`: what fewer arenas save depends on where the threads' blocks end up, and is often a tenth of what the arenas hold
//! free.

use super::outside;
use super::trend::Shape;
use super::verdict::{Evidence, Finding, Kind, Remedy};
use crate::allocator::{self, CacheSetting};
use crate::census::{ArenaAccount, Census, HeapAccount};
use crate::units::{HumanBytes, HumanDuration, counted};

/// What a JVM has outside malloc.
const JAVA_HEAP: &str = "java_heap";
/// A trim or purge that would release less is not listed.
const TRIM_BYTES_MIN: u64 = 1 << 20;

/// The remedies for a census: those for the verdict's own cause first, then those for the other findings, then what else would release
/// memory, by amount.
pub(super) fn remedies(findings: &[Finding], census: &Census, evidence: &Evidence) -> Vec<Remedy> {
    let mut all: Vec<Remedy> = findings.iter().flat_map(|finding| against(finding.verdict, census, evidence)).collect();
    if findings.iter().any(|finding| finding.verdict != Kind::Healthy) {
        let mut others: Vec<Remedy> = census.heaps.iter().filter_map(trim).collect();
        others.extend(direct_buffers(census, evidence));
        others.sort_by_key(|remedy| std::cmp::Reverse(remedy.predicted_bytes.unwrap_or(0)));
        all.extend(others);
    }
    let mut list: Vec<Remedy> = Vec::new();
    for remedy in all {
        if !list.iter().any(|other| other.action == remedy.action) {
            list.push(remedy);
        }
    }
    if evidence.not_malloc.iter().any(|part| part.kind == JAVA_HEAP) {
        for row in census.heaps.iter().map(|heap| heap.allocator.row()) {
            let (Some(trim), Some(command)) = (row.trim, row.trim_in_jvm) else { continue };
            list.iter_mut()
                .filter(|remedy| remedy.action == trim.action)
                .for_each(|remedy| remedy.action = format!("{}, or {command}", trim.action));
        }
    }
    list
}

/// The remedies for one cause.
fn against(kind: Kind, census: &Census, evidence: &Evidence) -> Vec<Remedy> {
    let mut heaps: Vec<&HeapAccount> = census.heaps.iter().collect();
    heaps.sort_by_key(|heap| std::cmp::Reverse(heap.ladder.resident_bytes));
    let trims = || heaps.iter().filter_map(|heap| trim(heap));
    match kind {
        Kind::Leak | Kind::Growing => growth(evidence),
        Kind::Fragmentation => vec![pins(&heaps, evidence)],
        Kind::NotMalloc => outside::remedies(census, evidence),
        Kind::HugePageBloat => vec![huge_pages(evidence)],
        Kind::Hoarding => trims().chain(heaps.iter().filter_map(|heap| thresholds(heap))).collect(),
        Kind::Cache => heaps.iter().flat_map(|heap| caches(heap)).chain(trims()).collect(),
        Kind::ArenaBlowUp => {
            let pins = evidence.ladder.pinned_bytes.is_some_and(|pinned| pinned >= evidence.other_arenas_free_bytes / 4);
            trims()
                .chain(pins.then(|| fragmentation(evidence)))
                .chain(heaps.iter().filter_map(|heap| thresholds(heap)))
                .chain(heaps.iter().filter_map(|heap| fewer_arenas(heap, evidence)))
                .collect()
        }
        Kind::Healthy | Kind::Unknown => Vec::new(),
    }
}

fn setting(heap: &HeapAccount, name: &str) -> Option<u64> {
    heap.settings.iter().find(|setting| setting.name == name).map(|setting| setting.value)
}

/// The call that releases whole free pages now; `None` if they are few, or the allocator has no such call.
fn trim(heap: &HeapAccount) -> Option<Remedy> {
    let bytes = heap.ladder.trimmable_bytes.filter(|&bytes| bytes >= TRIM_BYTES_MIN)?;
    let allocator::Remedy { action, basis } = heap.allocator.row().trim?;
    let basis = decay(heap).map_or_else(|| basis.to_owned(), |decay| format!("{basis}: {decay}"));
    Some(Remedy { action: action.into(), predicted_bytes: Some(bytes), at_most: false, basis, setting: None })
}

/// The free pages that an allocator returns after a time, and how long it waits; `None` if not known.
fn decay(heap: &HeapAccount) -> Option<String> {
    let (dirty, muzzy) = (heap.dirty_bytes?, heap.muzzy_bytes?);
    let mut arenas: Vec<u64> = heap.arenas.iter().map(|arena| arena.dirty_bytes.unwrap_or(0).max(arena.muzzy_bytes.unwrap_or(0))).collect();
    arenas.retain(|&bytes| bytes > 0);
    let most = arenas.iter().max().copied().unwrap_or(0);
    Some(format!(
        "{} dirty ({}), {} muzzy ({}), in {}, at most {} in one of them",
        HumanBytes(dirty),
        waits(heap, |arena| (arena.dirty_bytes, arena.dirty_decay_ms)),
        HumanBytes(muzzy),
        waits(heap, |arena| (arena.muzzy_bytes, arena.muzzy_decay_ms)),
        counted(arenas.len() as u64, "arena"),
        HumanBytes(most)
    ))
}

/// How long the arenas that hold pages of a kind keep them; of all arenas if none holds any.
fn waits(heap: &HeapAccount, of: impl Fn(&ArenaAccount) -> (Option<u64>, Option<i64>)) -> String {
    let holding: Vec<_> = heap.arenas.iter().map(&of).filter(|(bytes, _)| bytes.is_some_and(|bytes| bytes > 0)).collect();
    let all: Vec<_> = heap.arenas.iter().map(&of).collect();
    let mut times: Vec<Option<i64>> = if holding.is_empty() { &all } else { &holding }.iter().map(|&(_, ms)| ms).collect();
    times.sort_unstable();
    times.dedup();
    match times[..] {
        [Some(-1)] => "never returned".into(),
        [Some(0)] => "returned at once".into(),
        [Some(ms)] => format!("returned within {}", HumanDuration(ms as f64 / 1e3)),
        [None] | [] => "how long they are kept is not known".into(),
        _ => "kept for a time that differs by arena".into(),
    }
}

/// Remedies for growth: how to find the growing stacks, or, if memory outside malloc grows, advice on its kind.
fn growth(evidence: &Evidence) -> Vec<Remedy> {
    let Some(change) = evidence.change else { return Vec::new() };
    if change.outside_shape == Shape::Growing && change.live_shape != Shape::Growing {
        let parts = evidence.not_malloc.iter().filter(|part| outside::grows_by_itself(part.kind));
        let largest = parts.max_by_key(|part| part.resident_bytes);
        return largest
            .map(|part| Remedy {
                action: outside::advice(part.kind).into(),
                predicted_bytes: None,
                at_most: false,
                basis: format!("{} in {} of {}", HumanBytes(part.resident_bytes), counted(part.mappings, "mapping"), part.kind),
                setting: None,
            })
            .into_iter()
            .collect();
    }
    let grown = HumanBytes(u64::try_from(change.live_bytes_delta).unwrap_or(0));
    vec![Remedy {
        action:
            "find the growing stacks: fragprof record -p PID --mode governed -d 60s, then fragprof report fragprof.pb.gz --by survivors; or \
                 exactly, at a higher cost: fragprof record -p PID -d 60s, then fragprof report fragprof.pb.gz --by live"
                .into(),
        predicted_bytes: None,
        at_most: false,
        basis: format!("{grown} more in {}; only a recording shows the stacks that allocated them", HumanDuration(change.seconds)),
        setting: None,
    }]
}

fn fragmentation(evidence: &Evidence) -> Remedy {
    Remedy {
        action: "find the stacks that pin: fragprof record -p PID, then fragprof report fragprof.pb.gz --by pinned; allocate their \
                 long-lived blocks early or from a pool of their own"
            .into(),
        predicted_bytes: evidence.ladder.pinned_bytes,
        at_most: true,
        basis: "free bytes on pages that also hold live blocks: what would be saved if all of those blocks were elsewhere".into(),
        setting: None,
    }
}

/// Against free bytes on pages with live ones. The objects of a runtime are not recorded: what helps where most of the free bytes are in its
/// heap is in its allocator's row.
fn pins(heaps: &[&HeapAccount], evidence: &Evidence) -> Remedy {
    let most = heaps.iter().max_by_key(|heap| heap.ladder.pinned_bytes.unwrap_or(0));
    let of_runtime = most.and_then(|heap| Some((heap.allocator.row().unpin?, heap.ladder.pinned_bytes?)));
    of_runtime.map_or_else(
        || fragmentation(evidence),
        |(unpin, bytes)| Remedy {
            action: unpin.action.into(),
            predicted_bytes: Some(bytes),
            at_most: true,
            basis: unpin.basis.into(),
            setting: None,
        },
    )
}

fn huge_pages(evidence: &Evidence) -> Remedy {
    Remedy {
        action:
            "keep the heap out of huge pages: GLIBC_TUNABLES=glibc.malloc.hugetlb=0 or MALLOC_CONF=thp:never if the allocator requests them, \
                 no madvise(MADV_HUGEPAGE) in the program, and /sys/kernel/mm/transparent_hugepage/enabled set to madvise"
                .into(),
        predicted_bytes: evidence.huge_zero_bytes_est,
        at_most: true,
        basis: "pages of 4 KiB in the heap's huge pages that hold only zeros, estimated from a sample; those that the program itself \
                zeroed would stay"
            .into(),
        setting: None,
    }
}

/// A JVM allocates direct buffers with malloc, which gives large ones mappings of their own.
fn direct_buffers(census: &Census, evidence: &Evidence) -> Option<Remedy> {
    let is_java = evidence.not_malloc.iter().any(|part| part.kind == JAVA_HEAP);
    let mmapped: u64 = census.heaps.iter().map(|heap| heap.mmapped_bytes).fold(0, u64::saturating_add);
    let count: u64 = census.heaps.iter().map(|heap| heap.mmapped_allocations).sum();
    let is_large = mmapped.saturating_mul(100) >= evidence.rss_bytes.saturating_mul(outside::PART_PERCENT_MIN);
    (is_java && is_large && mmapped > 0).then(|| Remedy {
        action: outside::advice("direct_buffers").into(),
        predicted_bytes: Some(mmapped),
        at_most: true,
        basis: format!(
            "{} in mappings of their own, which in a JVM are mostly direct buffers: what releasing all of them would save",
            counted(count, "block")
        ),
        setting: None,
    })
}

/// What is added to the basis of a setting whose effect nothing has shown.
const ASSUMED: &str = "an upper bound by assumption, until a replay backs it: fragprof record --trace FILE, then fragprof explain FILE";

/// A setting of an allocator, as `fragprof whatif --under` takes it.
fn under(heap: &HeapAccount, settings: &str) -> Option<String> {
    heap.allocator.row().choice.as_ref().map(|_| format!("{}:{settings}", heap.allocator.name()))
}

/// Fewer arenas, which share free memory better. They save at most what the arenas hold free; how much of it is not known.
fn fewer_arenas(heap: &HeapAccount, evidence: &Evidence) -> Option<Remedy> {
    let allocator::ArenaLimit { action, setting } = heap.allocator.row().fewer_arenas?;
    Some(Remedy {
        action: action.into(),
        predicted_bytes: Some(evidence.other_arenas_free_bytes),
        at_most: true,
        basis: format!(
            "free resident bytes of all of the {} but the main one; how much of it fewer arenas would still need is not known, and threads would contend for their locks; {ASSUMED}",
            counted(evidence.arenas as u64, "arena")
        ),
        setting: under(heap, setting),
    })
}

/// glibc's dynamic thresholds, once they have risen so far that the end of the heap is kept.
fn thresholds(heap: &HeapAccount) -> Option<Remedy> {
    let (trim, mmap) = (setting(heap, "M_TRIM_THRESHOLD")?, setting(heap, "M_MMAP_THRESHOLD")?);
    let is_dynamic = setting(heap, "dynamic_threshold_off") == Some(0);
    let tops = heap.occupancy.map(|occupancy| occupancy.top_unpinned_bytes);
    let is_little = tops.is_some_and(|bytes| bytes < TRIM_BYTES_MIN);
    // A freed mapping of up to 32 MiB raises the mmap threshold to its size and the trim threshold to twice that.
    (is_dynamic && mmap > 128 << 10 && !is_little).then(|| Remedy {
        action: "set GLIBC_TUNABLES=glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072".into(),
        predicted_bytes: tops,
        at_most: true,
        basis: format!(
            "glibc has raised the mmap threshold to {} and the trim threshold to {}: smaller blocks stay in the heap, and as much free memory at the end of each arena, which a trim leaves; {ASSUMED}",
            HumanBytes(mmap),
            HumanBytes(trim)
        ),
        setting: under(heap, "mmap_threshold=131072,trim_threshold=131072"),
    })
}

/// Freed chunks in caches: thread caches and fastbins have a setting each.
fn caches(heap: &HeapAccount) -> Vec<Remedy> {
    let Some(settings) = heap.allocator.row().caches else { return Vec::new() };
    let fast = heap.fastbin_bytes.unwrap_or(0);
    let thread = heap.details.cached_bytes.unwrap_or(0).saturating_sub(fast);
    let mut parts: Vec<(u64, CacheSetting)> =
        settings.arena.map(|arena| (fast, arena)).into_iter().chain([(thread, settings.thread)]).collect();
    parts.sort_by_key(|&(bytes, _)| std::cmp::Reverse(bytes));
    let remedy = |(bytes, of): (u64, CacheSetting)| Remedy {
        action: of.remedy.action.into(),
        predicted_bytes: Some(bytes),
        at_most: true,
        basis: format!("{}; {ASSUMED}", of.remedy.basis),
        setting: under(heap, of.setting),
    };
    parts.into_iter().filter(|&(bytes, _)| bytes >= TRIM_BYTES_MIN).map(remedy).collect()
}
