//! What is wrong with a process's memory, with the numbers it rests on and what would help. Pure.

use serde::Serialize;

use super::decide::decide;
use super::ladder::Ladder;
use super::remedy::remedies;
use crate::census::{Census, Level, NotMalloc};
use crate::units::HumanBytes;

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
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
    /// Huge pages hold memory that nobody uses.
    HugePageBloat,
    /// Most of the resident memory is not malloc's.
    NotMalloc,
    /// Little is free, and it does not grow.
    Healthy,
    /// The census does not allow a verdict.
    Unknown,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Leak,
        Self::Fragmentation,
        Self::Hoarding,
        Self::Cache,
        Self::ArenaBlowUp,
        Self::HugePageBloat,
        Self::NotMalloc,
        Self::Healthy,
        Self::Unknown,
    ];

    /// Its name in JSON and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Leak => "leak",
            Self::Fragmentation => "fragmentation",
            Self::Hoarding => "hoarding",
            Self::Cache => "cache",
            Self::ArenaBlowUp => "arena_blow_up",
            Self::HugePageBloat => "huge_page_bloat",
            Self::NotMalloc => "not_malloc",
            Self::Healthy => "healthy",
            Self::Unknown => "unknown",
        }
    }
}

/// How sure the verdict is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The cause has most of the bytes in question, exactly counted.
    High,
    /// The cause has the largest share, not most of it.
    Medium,
    /// Little is known.
    Low,
}

impl Confidence {
    /// Its name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Medium => "medium",
            Self::Low => "low",
        }
    }
}

/// What would help.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Remedy {
    /// What to do.
    pub action: String,
    /// Resident bytes that it would save; `None` where that cannot be told.
    pub predicted_bytes: Option<u64>,
    /// Why.
    pub basis: String,
}

/// How a process changed over some time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Change {
    /// Time between the first and the last census, in seconds.
    pub seconds: f64,
    /// Live bytes by then minus before.
    pub live_bytes_delta: i64,
    /// Resident bytes of the process by then minus before.
    pub resident_bytes_delta: i64,
    /// Growth of live bytes a second.
    pub live_bytes_per_s: f64,
    /// Growth of resident bytes a second.
    pub resident_bytes_per_s: f64,
}

impl Change {
    /// From two differences over a time above 0.
    #[must_use]
    pub fn of(seconds: f64, live_bytes_delta: i64, resident_bytes_delta: i64) -> Self {
        let rate = |delta: i64| if seconds > 0.0 { delta as f64 / seconds } else { 0.0 };
        let (live_bytes_per_s, resident_bytes_per_s) = (rate(live_bytes_delta), rate(resident_bytes_delta));
        Self { seconds, live_bytes_delta, resident_bytes_delta, live_bytes_per_s, resident_bytes_per_s }
    }

    /// Growth of live bytes an hour, if it went on so.
    #[must_use]
    pub fn live_bytes_per_hour(&self) -> i64 {
        // `as` saturates.
        (self.live_bytes_per_s * 3600.0) as i64
    }

    /// From one census to a later one; `None` unless both know the live bytes.
    #[must_use]
    pub fn between(before: &Census, after: &Census, seconds: f64) -> Option<Self> {
        let delta = |old: u64, new: u64| i64::try_from(i128::from(new) - i128::from(old)).unwrap_or(0);
        let live = |census: &Census| Ladder::of_all(&census.heaps).live_bytes;
        Some(Self::of(seconds, delta(live(before)?, live(after)?), delta(before.rss_bytes, after.rss_bytes)))
    }
}

/// The verdict.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Verdict {
    /// What is wrong.
    pub verdict: Kind,
    /// How sure that is.
    pub confidence: Confidence,
    /// One sentence.
    pub summary: String,
    /// The numbers behind it.
    pub evidence: Evidence,
    /// What would help: against the verdict's own cause first.
    pub remedies: Vec<Remedy>,
    /// What was not known.
    pub unknowns: Vec<String>,
    /// Where the numbers come from.
    pub sources: Vec<Source>,
}

/// Where some numbers come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Source {
    /// Which ones.
    pub figures: String,
    /// Where from, in words.
    pub source: String,
}

impl Source {
    /// Says where some figures come from.
    #[must_use]
    pub fn new(figures: &str, source: impl Into<String>) -> Self {
        Self { figures: figures.to_owned(), source: source.into() }
    }
}

/// The numbers behind a verdict.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct Evidence {
    /// Resident bytes of the process.
    pub rss_bytes: u64,
    /// Of them, not malloc's.
    pub not_malloc_bytes: u64,
    /// The largest part of those.
    pub not_malloc_largest: Option<&'static str>,
    /// Each part of those.
    pub not_malloc: Vec<NotMalloc>,
    /// The steps of all heaps together.
    #[serde(flatten)]
    pub ladder: Ladder,
    /// `1 − live / resident`.
    pub fragmentation_ratio: Option<f64>,
    /// Arenas that hold something.
    pub arenas: usize,
    /// Of what is in huge pages, pages of 4 KiB that hold only zeros, as far as it was looked at.
    pub huge_zero_bytes_est: Option<u64>,
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
    let sources = sources(census, change);
    Verdict { verdict, confidence, summary, evidence, remedies, unknowns, sources }
}

fn sources(census: &Census, change: Option<Change>) -> Vec<Source> {
    let closely = match census.level {
        Level::Full => "every chunk",
        Level::Sampled => "a sample of the heap's windows: live and free bytes are estimates with their errors",
        Level::Top => "its sums alone",
    };
    let allocators: Vec<&str> = census.heaps.iter().map(|heap| heap.allocator.as_str()).collect();
    let mut sources = Vec::new();
    if !allocators.is_empty() {
        let census = format!("census of the allocator's own metadata ({}), {closely}", allocators.join(", "));
        sources.push(Source::new("heap, in use, trimmable, pinned", census));
    }
    sources.push(Source::new("resident, not malloc", "the kernel's account of the mappings (smaps)"));
    if change.is_some() {
        sources.push(Source::new("change", "the difference of such censuses"));
    }
    sources
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
        not_malloc: census.not_malloc.clone(),
        ladder,
        fragmentation_ratio: ladder.fragmentation_ratio(),
        arenas: arenas.count(),
        huge_zero_bytes_est: census.heaps.iter().filter_map(|heap| heap.huge_zero_bytes_est).reduce(u64::saturating_add),
        other_arenas_free_bytes,
        change,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::{ArenaAccount, HeapAccount, WalkQuality};
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
    fn huge_pages_full_of_zeros_are_bloat_unless_another_cause_has_more() {
        let mut huge = census(300, 0, 0, 0);
        huge.heaps[0].huge_bytes = 290 * MIB;
        assert_eq!(kind(&huge), Kind::Healthy);
        huge.heaps[0].huge_zero_bytes_est = Some(200 * MIB);
        let verdict = judge(&huge, None);
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::HugePageBloat, Confidence::High));
        assert!(verdict.remedies[0].action.contains("transparent_hugepage"), "{:?}", verdict.remedies);
        assert_eq!(verdict.remedies[0].predicted_bytes, Some(200 * MIB));
        let mut hoarding = census(50, 250, 0, 0);
        hoarding.heaps[0].huge_bytes = 290 * MIB;
        hoarding.heaps[0].huge_zero_bytes_est = Some(200 * MIB);
        assert_eq!(kind(&hoarding), Kind::Hoarding);
    }

    #[test]
    fn blocks_with_mappings_of_their_own_in_a_jvm_are_named_as_what_they_mostly_are() {
        let mut java = census(300, 0, 0, 0);
        java.heaps[0].mmapped_bytes = 200 * MIB;
        java.not_malloc = vec![NotMalloc { kind: "java_heap", resident_bytes: 900 * MIB, mappings: 1 }];
        java.rss_bytes += 900 * MIB;
        let remedies = judge(&java, None).remedies;
        let direct = remedies.iter().find(|remedy| remedy.action.contains("MaxDirectMemorySize"));
        assert_eq!(direct.and_then(|remedy| remedy.predicted_bytes), Some(200 * MIB), "{remedies:?}");
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

    #[test]
    fn an_allocator_that_is_not_understood_gives_no_verdict_but_its_reason() {
        let mut unread = census(0, 0, 0, 0);
        unread.heaps.clear();
        unread.rss_bytes = 900 * MIB;
        unread.not_malloc = vec![
            NotMalloc { kind: "other_anonymous", resident_bytes: 800 * MIB, mappings: 3 },
            NotMalloc { kind: "file_mappings", resident_bytes: 100 * MIB, mappings: 9 },
        ];
        let verdict = judge(&unread, None);
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::Unknown, Confidence::Low));
        assert!(verdict.summary.contains("no allocator that can be read was found"), "{}", verdict.summary);
        unread.layout_unknown = vec!["mimalloc is not supported".into()];
        assert!(judge(&unread, None).summary.ends_with("mimalloc is not supported"));
        // What is certainly no heap decides where it is the larger part.
        unread.not_malloc[1].resident_bytes = 2000 * MIB;
        assert_eq!(kind(&unread), Kind::NotMalloc);
    }

    #[test]
    fn the_verdicts_own_remedy_comes_first_whatever_others_would_save() {
        let verdict = judge(&census(100, 290, 300, 5), None);
        assert_eq!(verdict.verdict, Kind::Fragmentation);
        assert!(verdict.remedies[0].action.contains("--by pinned"), "{:?}", verdict.remedies);
        assert!(verdict.remedies[1].action.contains("malloc_trim"));
        let (before, after) = (census(100, 300, 0, 0), census(140, 300, 0, 0));
        let leak = judge(&after, Change::between(&before, &after, 60.0));
        assert!(leak.remedies[0].action.contains("growing stacks"), "{:?}", leak.remedies);
        assert_eq!(leak.evidence.change.map(|change| change.live_bytes_per_hour()), Some(40 * 60 * MIB as i64));
    }

    #[test]
    fn fastbins_and_thread_caches_have_a_setting_each_the_larger_first() {
        let mut cached = census(100, 20, 20, 100);
        cached.heaps[0].cached_bytes = Some(90 * MIB);
        cached.heaps[0].fastbin_bytes = Some(80 * MIB);
        let remedies = judge(&cached, None).remedies;
        assert!(remedies[0].action.contains("mxfast=0") && remedies[0].predicted_bytes == Some(80 * MIB), "{remedies:?}");
        assert!(remedies[1].action.contains("tcache_count") && remedies[1].predicted_bytes == Some(10 * MIB), "{remedies:?}");
    }

    #[test]
    fn each_large_part_outside_malloc_has_its_advice() {
        let mut java = census(10, 0, 0, 0);
        java.rss_bytes = 1010 * MIB;
        let part = |kind, mib: u64| NotMalloc { kind, resident_bytes: mib * MIB, mappings: 1 };
        java.not_malloc = vec![part("java_heap", 600), part("thread_stacks", 300), part("code_cache", 50)];
        let actions: Vec<String> = judge(&java, None).remedies.into_iter().map(|remedy| remedy.action).collect();
        assert!(actions.len() == 2 && actions[0].contains("-Xmx") && actions[1].contains("stacks"), "{actions:?}");
    }
}
