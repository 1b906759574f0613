//! What is wrong with a process's memory, with the numbers it rests on and what would help. Pure.

use serde::Serialize;

use super::ladder::Ladder;
use crate::census::{Census, HeapAccount, Level};
use crate::units::HumanBytes;

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

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Live bytes grow.
    Leak,
    /// Free bytes lie between live ones on the same pages.
    Fragmentation,
    /// The allocator keeps whole free pages that it could give back.
    Hoarding,
    /// Thread caches and fastbins keep what was freed.
    Cache,
    /// Many arenas, each with its own free memory.
    ArenaBlowUp,
    /// Huge pages hold mostly free memory.
    HugePageBloat,
    /// Most of the resident memory is not malloc's.
    NotMalloc,
    /// Little is free, and it does not grow.
    Healthy,
    /// The census does not allow a verdict.
    Unknown,
}

/// How sure the verdict is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The cause has most of the bytes in question, exactly counted.
    High,
    /// The cause has the largest share, not most of it.
    Medium,
    /// Little is known.
    Low,
}

/// What would help.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Remedy {
    /// What to do.
    pub action: String,
    /// Resident bytes that it would save; `None` where that cannot be told.
    pub predicted_bytes: Option<u64>,
    /// Why.
    pub basis: String,
}

/// How a process changed over some time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// Time between the first and the last census, in seconds.
    pub seconds: f64,
    /// Live bytes by then minus before.
    pub live_bytes_delta: i64,
    /// Resident bytes of the process by then minus before.
    pub resident_bytes_delta: i64,
}

impl Change {
    /// From one census to a later one; `None` unless both know the live bytes.
    #[must_use]
    pub fn between(before: &Census, after: &Census, seconds: f64) -> Option<Self> {
        let delta = |old: u64, new: u64| i64::try_from(i128::from(new) - i128::from(old)).unwrap_or(0);
        let live = |census: &Census| Ladder::of_all(&census.heaps).live_bytes;
        Some(Self {
            seconds,
            live_bytes_delta: delta(live(before)?, live(after)?),
            resident_bytes_delta: delta(before.rss_bytes, after.rss_bytes),
        })
    }
}

/// The verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// What is wrong.
    pub verdict: Kind,
    /// How sure that is.
    pub confidence: Confidence,
    /// One sentence.
    pub summary: String,
    /// The numbers behind it.
    pub evidence: Evidence,
    /// What would help, most first.
    pub remedies: Vec<Remedy>,
    /// What was not known.
    pub unknowns: Vec<String>,
}

/// The numbers behind a verdict.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Evidence {
    /// Resident bytes of the process.
    pub rss_bytes: u64,
    /// Of them, not malloc's.
    pub not_malloc_bytes: u64,
    /// The largest part of those.
    pub not_malloc_largest: Option<&'static str>,
    /// The steps of all heaps together.
    #[serde(flatten)]
    pub ladder: Ladder,
    /// `1 − live / resident`.
    pub fragmentation_ratio: Option<f64>,
    /// Arenas that hold something.
    pub arenas: usize,
    /// Free bytes of all arenas but the main one.
    pub other_arenas_free_bytes: u64,
    /// Change over time, if it was observed.
    pub change: Option<Change>,
}

/// Judges a census, taken at level full, with its history if there is one.
#[must_use]
pub fn judge(census: &Census, change: Option<Change>) -> Verdict {
    let evidence = evidence(census, change);
    let mut unknowns = census.layout_unknown.clone();
    if census.level != Level::Full {
        unknowns.push("the heap was not walked: live and free bytes are not known".into());
    }
    if !census.walk.usable {
        unknowns.push(format!("{} of the heap could not be understood or read", HumanBytes(census.walk.unknown_bytes)));
    }
    if change.is_none() {
        unknowns.push("one look only: whether live bytes grow is not known".into());
    }
    let swapped = evidence.ladder.swapped_bytes;
    if swapped > 0 {
        unknowns.push(format!("{} of the heap is in swap and was not read", HumanBytes(swapped)));
    }
    let (verdict, confidence, summary) = decide(census, &evidence);
    let remedies = remedies(verdict, census, &evidence);
    Verdict { verdict, confidence, summary, evidence, remedies, unknowns }
}

fn evidence(census: &Census, change: Option<Change>) -> Evidence {
    let ladder = Ladder::of_all(&census.heaps);
    let arenas = census.heaps.iter().flat_map(|heap| &heap.arenas).filter(|arena| arena.extent_bytes > 0);
    let others = census.heaps.iter().flat_map(|heap| heap.arenas.iter().skip(1));
    let other_arenas_free_bytes =
        others.map(|arena| (arena.free_bytes + arena.cached_bytes + arena.top_bytes).min(arena.resident_bytes)).sum();
    Evidence {
        rss_bytes: census.rss_bytes,
        not_malloc_bytes: census.not_malloc.iter().map(|one| one.resident_bytes).sum(),
        not_malloc_largest: census.not_malloc.iter().max_by_key(|one| one.resident_bytes).map(|one| one.kind),
        ladder,
        fragmentation_ratio: ladder.fragmentation_ratio(),
        arenas: arenas.count(),
        other_arenas_free_bytes,
        change,
    }
}

fn decide(census: &Census, evidence: &Evidence) -> (Kind, Confidence, String) {
    let ladder = &evidence.ladder;
    if !census.walk.usable {
        return (Kind::Unknown, Confidence::Low, "the heap could not be read well enough for a verdict".into());
    }
    if evidence.not_malloc_bytes > ladder.resident_bytes {
        let largest = evidence.not_malloc_largest.unwrap_or("other_anonymous");
        let confidence = if evidence.not_malloc_bytes >= 2 * ladder.resident_bytes { Confidence::High } else { Confidence::Medium };
        let text = format!(
            "{} of {} resident is not malloc's; the largest part is {largest}",
            HumanBytes(evidence.not_malloc_bytes),
            HumanBytes(evidence.rss_bytes)
        );
        return (Kind::NotMalloc, confidence, text);
    }
    let (Some(live), Some(free)) = (ladder.live_bytes, ladder.free_resident_bytes) else {
        return (Kind::Unknown, Confidence::Low, "what is live and what is free was not looked at".into());
    };
    if let Some(change) = &evidence.change {
        let grown = u64::try_from(change.live_bytes_delta).unwrap_or(0);
        if grown >= LEAK_BYTES_MIN && grown.saturating_mul(100) >= live.saturating_mul(LEAK_PERCENT_MIN) {
            let text = format!("live bytes grew by {} in {:.0} s", HumanBytes(grown), change.seconds);
            return (Kind::Leak, Confidence::Medium, text);
        }
    }
    if free < FREE_BYTES_MIN || free.saturating_mul(100) < ladder.resident_bytes.saturating_mul(FREE_PERCENT_MIN) {
        let text = format!(
            "{} of {} resident in the heap is live; {} is free",
            HumanBytes(live),
            HumanBytes(ladder.resident_bytes),
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
    // Free memory that is spread over many arenas comes from their number, whatever its form.
    let (kind, bytes) = if arenas.saturating_mul(4) >= free.saturating_mul(3) { (Kind::ArenaBlowUp, arenas) } else { (kind, bytes) };
    let huge = ladder.huge_bytes.saturating_mul(2) > ladder.resident_bytes && kind != Kind::Hoarding && kind != Kind::ArenaBlowUp;
    let (kind, bytes) = if huge { (Kind::HugePageBloat, free.min(ladder.huge_bytes)) } else { (kind, bytes) };
    let confidence = if bytes.saturating_mul(2) >= free { Confidence::High } else { Confidence::Medium };
    let what = match kind {
        Kind::Hoarding => "lies in whole free pages that the allocator keeps",
        Kind::Fragmentation => "lies on pages that also hold live blocks",
        Kind::Cache => "is kept by thread caches and fastbins",
        Kind::ArenaBlowUp => "is spread over many arenas",
        Kind::HugePageBloat => "lies in huge pages",
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

fn setting(heap: &HeapAccount, name: &str) -> Option<u64> {
    heap.settings.iter().find(|setting| setting.name == name).map(|setting| setting.value)
}

fn remedies(kind: Kind, census: &Census, evidence: &Evidence) -> Vec<Remedy> {
    let mut list = Vec::new();
    for heap in &census.heaps {
        match heap.allocator.as_str() {
            "glibc" => glibc_remedies(kind, heap, evidence, &mut list),
            "jemalloc" => jemalloc_remedies(kind, heap, &mut list),
            "tcmalloc" if heap.trimmable_bytes.unwrap_or(0) > 0 => list.push(Remedy {
                action: "call MallocExtension_ReleaseFreeMemory(), or set TCMALLOC_RELEASE_RATE=10".into(),
                predicted_bytes: heap.trimmable_bytes,
                basis: "resident spans in the page heap's free lists".into(),
            }),
            _ => {}
        }
    }
    match kind {
        Kind::Leak => list.push(Remedy {
            action: "record the growing stacks: fragprof record -p PID --duration 60s, then fragprof report --by survivors".into(),
            predicted_bytes: None,
            basis: "live bytes grow; only a recording tells whose they are".into(),
        }),
        Kind::Fragmentation => list.push(Remedy {
            action: "find the stacks that pin: fragprof record -p PID, then fragprof report --by pinned; allocate their long-lived blocks \
                     early or from a pool of their own"
                .into(),
            predicted_bytes: evidence.ladder.pinned_bytes,
            basis: "free bytes on pages that also hold live blocks, an upper limit of what moving those blocks would free".into(),
        }),
        Kind::NotMalloc => list.extend(not_malloc_remedy(census)),
        _ => {}
    }
    list.sort_by_key(|remedy| std::cmp::Reverse(remedy.predicted_bytes.unwrap_or(0)));
    list
}

fn glibc_remedies(kind: Kind, heap: &HeapAccount, evidence: &Evidence, list: &mut Vec<Remedy>) {
    let trimmable = heap.trimmable_bytes.unwrap_or(0);
    if kind != Kind::Healthy && trimmable > 0 {
        list.push(Remedy {
            action: "call malloc_trim(0) now and then, or once after load peaks".into(),
            predicted_bytes: Some(trimmable),
            basis: "resident whole pages inside free chunks, and the end of the brk heap".into(),
        });
    }
    if kind == Kind::Hoarding
        && let (Some(trim), Some(mmap)) = (setting(heap, "M_TRIM_THRESHOLD"), setting(heap, "M_MMAP_THRESHOLD"))
    {
        let is_dynamic = setting(heap, "dynamic_threshold_off") == Some(0);
        // A freed mapping of up to 32 MiB raises the mmap threshold to its size and the trim threshold to twice that.
        if is_dynamic && mmap > 128 << 10 {
            list.push(Remedy {
                action: "set GLIBC_TUNABLES=glibc.malloc.mmap_threshold=131072:glibc.malloc.trim_threshold=131072".into(),
                predicted_bytes: heap.occupancy.map(|occupancy| occupancy.top_unpinned_bytes),
                basis: format!(
                    "the thresholds adapted themselves to {} and {}: blocks below stay in the heap, and its end is only lowered above",
                    HumanBytes(mmap),
                    HumanBytes(trim)
                ),
            });
        }
    }
    if kind == Kind::ArenaBlowUp {
        list.push(Remedy {
            action: "set MALLOC_ARENA_MAX=2 (or GLIBC_TUNABLES=glibc.malloc.arena_max=2) and restart".into(),
            predicted_bytes: Some(evidence.other_arenas_free_bytes),
            basis: format!("free resident bytes of {} arenas; fewer arenas share them, at the price of lock contention", evidence.arenas),
        });
    }
    if kind == Kind::Cache {
        list.push(Remedy {
            action: "set GLIBC_TUNABLES=glibc.malloc.tcache_count=2".into(),
            predicted_bytes: heap.cached_bytes.zip(heap.fastbin_bytes).map(|(cached, fast)| cached.saturating_sub(fast)),
            basis: "freed chunks in thread caches".into(),
        });
    }
    if kind == Kind::HugePageBloat {
        list.push(Remedy {
            action: "set GLIBC_TUNABLES=glibc.malloc.hugetlb=0, and transparent_hugepage to madvise".into(),
            predicted_bytes: heap.trimmable_bytes,
            basis: format!("{} of the heap is in huge pages", HumanBytes(heap.huge_bytes)),
        });
    }
}

fn jemalloc_remedies(kind: Kind, heap: &HeapAccount, list: &mut Vec<Remedy>) {
    let trimmable = heap.trimmable_bytes.unwrap_or(0);
    if kind != Kind::Healthy && trimmable > 0 {
        list.push(Remedy {
            action: "set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0, or call mallctl(\"arena.4096.purge\")"
                .into(),
            predicted_bytes: Some(trimmable),
            basis: "resident dirty and muzzy extents".into(),
        });
    }
    if kind == Kind::ArenaBlowUp {
        list.push(Remedy {
            action: "set MALLOC_CONF=narenas:4".into(),
            predicted_bytes: None,
            basis: "one arena for each four cores or so".into(),
        });
    }
}

fn not_malloc_remedy(census: &Census) -> Option<Remedy> {
    let largest = census.not_malloc.iter().max_by_key(|one| one.resident_bytes)?;
    let action = match largest.kind {
        "java_heap" => "set -Xmx, or -XX:MaxRAMPercentage; look into the Java heap with a heap dump",
        "code_cache" => "limit the code cache: -XX:ReservedCodeCacheSize (JVM), --max-old-space-size has no effect on it",
        "thread_stacks" => "use fewer threads or smaller stacks: ulimit -s, pthread_attr_setstacksize, -Xss",
        "file_mappings" => "mapped files: the kernel drops clean pages by itself under pressure",
        "shared_memory" => "shared memory counts in every process that maps it: look at its size once",
        _ => "anonymous mappings outside malloc: direct buffers, allocators of one's own, language runtimes",
    };
    Some(Remedy {
        action: action.into(),
        predicted_bytes: None,
        basis: format!("{} in {}", HumanBytes(largest.resident_bytes), largest.kind),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::{ArenaAccount, NotMalloc, WalkQuality};
    use crate::heap::occupancy::Occupancy;

    const MIB: u64 = 1 << 20;

    fn census(live: u64, trimmable: u64, pinned: u64, kept: u64) -> Census {
        let heap = HeapAccount {
            allocator: "glibc".into(),
            extent_bytes: (live + trimmable + pinned + kept) * MIB,
            resident_bytes: (live + trimmable + pinned + kept) * MIB,
            live_bytes: Some(live * MIB),
            cached_bytes: Some(0),
            fastbin_bytes: Some(0),
            trimmable_bytes: Some(trimmable * MIB),
            pinned_bytes: Some(pinned * MIB),
            kept_bytes: Some(kept * MIB),
            occupancy: Some(Occupancy { live_resident_bytes: live * MIB, ..Occupancy::default() }),
            ..HeapAccount::default()
        };
        Census {
            pid: 1,
            comm: "x".into(),
            level: Level::Full,
            rss_bytes: heap.resident_bytes,
            heaps: vec![heap],
            not_malloc: Vec::new(),
            walk: WalkQuality { usable: true, balanced: true, ..WalkQuality::default() },
            layout_unknown: Vec::new(),
        }
    }

    fn kind(census: &Census) -> Kind {
        judge(census, None).verdict
    }

    #[test]
    fn the_dominant_part_of_the_free_bytes_names_the_verdict() {
        assert_eq!(kind(&census(500, 20, 20, 5)), Kind::Healthy);
        assert_eq!(kind(&census(100, 300, 50, 5)), Kind::Hoarding);
        assert_eq!(kind(&census(100, 20, 300, 5)), Kind::Fragmentation);
        let mut cached = census(100, 20, 20, 100);
        cached.heaps[0].cached_bytes = Some(90 * MIB);
        assert_eq!(kind(&cached), Kind::Cache);
    }

    #[test]
    fn a_trim_is_predicted_with_the_bytes_it_would_give_back() {
        let verdict = judge(&census(100, 300, 50, 5), None);
        assert_eq!(verdict.remedies.first().map(|remedy| remedy.predicted_bytes), Some(Some(300 * MIB)));
        assert_eq!(verdict.confidence, Confidence::High);
    }

    #[test]
    fn growing_live_bytes_are_a_leak() {
        let (before, after) = (census(100, 0, 0, 0), census(140, 0, 0, 0));
        let change = Change::between(&before, &after, 60.0);
        assert_eq!(judge(&after, change).verdict, Kind::Leak);
        let change = Change::between(&after, &before, 60.0);
        assert_eq!(judge(&before, change).verdict, Kind::Healthy);
    }

    #[test]
    fn free_memory_spread_over_many_arenas_is_an_arena_blow_up() {
        let mut many = census(100, 20, 100, 200);
        let arena = ArenaAccount { extent_bytes: 30 * MIB, resident_bytes: 30 * MIB, free_bytes: 25 * MIB, ..ArenaAccount::default() };
        many.heaps[0].arenas = vec![arena; 14];
        let verdict = judge(&many, None);
        assert_eq!(verdict.verdict, Kind::ArenaBlowUp);
        assert!(verdict.remedies.iter().any(|remedy| remedy.action.contains("MALLOC_ARENA_MAX")));
    }

    #[test]
    fn memory_that_is_not_mallocs_is_named() {
        let mut java = census(100, 10, 10, 5);
        java.rss_bytes += 900 * MIB;
        java.not_malloc = vec![NotMalloc { kind: "java_heap", resident_bytes: 900 * MIB, mappings: 1 }];
        let verdict = judge(&java, None);
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::NotMalloc, Confidence::High));
        assert!(verdict.summary.contains("java_heap"));
    }

    #[test]
    fn a_census_with_too_much_unknown_gives_no_verdict() {
        let mut bad = census(100, 300, 50, 5);
        bad.walk.usable = false;
        assert_eq!(kind(&bad), Kind::Unknown);
    }
}
