//! The verdict on a process's memory, with the numbers it rests on and the remedies. Pure.

use serde::Serialize;

use super::decide::decide;
use super::remedy::remedies;
use super::trend::Shape;
pub use super::trend::{Change, TrendSample, TrendSamples};
use crate::allocator::Release;
use crate::census::{ArenaAccount, Census, HeapAccount, Level, NotMalloc, OccupancyEstimate};
use crate::heap::ladder::{Details, Ladder, fragmentation_ratio};
use crate::units::{HumanBytes, HumanDuration, counted};

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Live bytes have grown for so long, and so evenly, that a cache that fills does not explain it.
    Leak,
    /// Memory grows: a leak, or a cache that fills, or a load that rises.
    Growing,
    /// Most free bytes are on pages that also hold live ones.
    Fragmentation,
    /// The allocator keeps whole free pages that it could return.
    Hoarding,
    /// Most free bytes are in thread caches and fastbins.
    Cache,
    /// Many arenas, each with its own free memory.
    ArenaBlowUp,
    /// Huge pages hold mostly zeros.
    HugePageBloat,
    /// Most of the resident memory is outside malloc.
    NotMalloc,
    /// Little is free, and it does not grow.
    Healthy,
    /// The census does not allow a verdict.
    Unknown,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Leak,
        Self::Growing,
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
            Self::Growing => "growing",
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

/// The confidence in a verdict: how often such verdicts are right on programs whose correct verdict is known (`make verdicts`,
/// docs/verdicts.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// The cause has most of the bytes in question, counted exactly, and samples over some time agree.
    High,
    /// The cause has the largest share, or the observation was too short to show that it lasts.
    Medium,
    /// Little is known: a single sample, or a shape that another cause has too.
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

/// A remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Remedy {
    /// What to do.
    pub action: String,
    /// Resident bytes that it would save; `None` if not known.
    pub predicted_bytes: Option<u64>,
    /// Whether that is only an upper limit: the actual saving is not known.
    pub at_most: bool,
    /// What the prediction is based on.
    pub basis: String,
    /// The allocator's setting that it is, as `fragprof whatif --under` takes it; `None` if it is something else.
    pub setting: Option<String>,
}

/// One cause that holds by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Finding {
    /// What holds.
    pub verdict: Kind,
    /// The confidence in it.
    pub confidence: Confidence,
    /// Bytes in question; `None` if nothing is wrong, or nothing is known.
    pub bytes: Option<u64>,
    /// One sentence.
    pub summary: String,
}

impl Finding {
    pub(super) fn new(verdict: Kind, confidence: Confidence, bytes: Option<u64>, summary: String) -> Self {
        Self { verdict, confidence, bytes, summary }
    }

    pub(super) fn unknown(summary: String) -> Self {
        Self::new(Kind::Unknown, Confidence::Low, None, summary)
    }
}

/// The verdict.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct Verdict {
    /// What is wrong.
    pub verdict: Kind,
    /// The confidence in it.
    pub confidence: Confidence,
    /// One sentence.
    pub summary: String,
    /// All findings, each judged by itself, the verdict's own first.
    pub findings: Vec<Finding>,
    /// The numbers behind it.
    pub evidence: Evidence,
    /// The remedies: those for the verdict's own cause first.
    pub remedies: Vec<Remedy>,
    /// What was not known.
    pub unknowns: Vec<String>,
    /// Where the numbers come from.
    pub sources: Vec<Source>,
}

/// The source of some numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Source {
    /// Which ones.
    pub figures: String,
    /// Their source, in words.
    pub source: String,
}

impl Source {
    /// The source of some figures.
    #[must_use]
    pub fn new(figures: &str, source: impl Into<String>) -> Self {
        Self { figures: figures.to_owned(), source: source.into() }
    }
}

/// One of several heaps of a process, for example Python's objects beside malloc's blocks.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, schemars::JsonSchema)]
pub struct HeapPart {
    /// The allocator, with the runtime whose objects it holds: `glibc`, `python (pymalloc)`.
    pub heap: String,
    /// Resident bytes.
    pub resident_bytes: u64,
    /// Bytes in use.
    pub live_bytes: Option<u64>,
    /// Free bytes that are resident.
    pub free_resident_bytes: Option<u64>,
    /// Of the bytes in use, blocks with mappings of their own.
    pub mmapped_bytes: u64,
}

/// The numbers behind a verdict.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct Evidence {
    /// Resident bytes of the process.
    pub rss_bytes: u64,
    /// Of them, outside malloc.
    pub not_malloc_bytes: u64,
    /// The largest part of those.
    pub not_malloc_largest: Option<&'static str>,
    /// Each part of those.
    pub not_malloc: Vec<NotMalloc>,
    /// The rungs of all heaps together.
    #[serde(flatten)]
    pub ladder: Ladder,
    /// What lies beside them.
    #[serde(flatten)]
    pub details: Details,
    /// Each heap, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub heaps: Vec<HeapPart>,
    /// In use and resident.
    pub live_resident_bytes: Option<u64>,
    /// Free bytes that are resident.
    pub free_resident_bytes: Option<u64>,
    /// Occupancy of the heaps' resident pages, estimated from a sample, if they were not walked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub occupancy_est: Option<OccupancyEstimate>,
    /// `1 − live / resident`.
    pub fragmentation_ratio: Option<f64>,
    /// Arenas in use.
    pub arenas: usize,
    /// Bytes of 4 KiB pages within huge pages that hold only zeros, as far as they were examined.
    pub huge_zero_bytes_est: Option<u64>,
    /// Free bytes of all arenas but the main one, without those that the allocator will return by itself.
    pub other_arenas_free_bytes: u64,
    /// Of them, those of the one arena with most.
    pub other_arena_free_bytes_max: u64,
    /// Change over time, if it was observed.
    pub change: Option<Change>,
}

impl Evidence {
    /// What its rungs are of, in words.
    pub(super) fn heap(&self) -> &'static str {
        if self.heaps.is_empty() { "the malloc heap" } else { "the heaps" }
    }
}

/// Judges a census of level full, or a sample if that is enough, with the growth over earlier samples, if there were any.
#[must_use]
pub fn judge(census: &Census, change: Option<Change>) -> Verdict {
    let evidence = evidence(census, change);
    let mut unknowns = census.layout_unknown.clone();
    match census.level {
        Level::Full => {}
        _ if evidence.occupancy_est.is_some() => {
            unknowns.push("exact live and free bytes: the heap was not walked, so they are estimates".into())
        }
        Level::Top | Level::Sampled => unknowns.push("live and free bytes: the heap was not walked".into()),
    }
    if !census.walk.usable {
        unknowns.push(format!("{} of the heap, which could not be read or understood", HumanBytes(census.walk.unknown_bytes)));
    }
    unknowns.extend(unknown_growth(change.as_ref()));
    let swapped = evidence.details.swapped_bytes;
    if swapped > 0 {
        unknowns.push(format!("{} of the heap, which is in swap and was not read", HumanBytes(swapped)));
    }
    let findings = decide(census, &evidence);
    let remedies = remedies(&findings, census, &evidence);
    if remedies.is_empty() && findings.iter().any(|finding| finding.verdict == Kind::Hoarding) {
        let why = census.heaps.iter().filter_map(|heap| match heap.allocator.row().release {
            Release::NoCall(why) => Some(format!("what would help: {why}")),
            Release::Calls(_) => None,
        });
        unknowns.extend(why);
    }
    let sources = sources(census, change);
    Verdict::of(findings, evidence, remedies, unknowns, sources)
}

/// Fewest pinned bytes for which it is worth knowing what holds them.
pub const PINNED_BYTES_MIN: u64 = 1 << 20;
/// If at least one in this many bytes of the heap is pinned, that is worth knowing whatever the verdict.
const PINNED_SHARE_MIN: u64 = 5;

impl Verdict {
    /// Whether so much is pinned that it is worth knowing by what.
    #[must_use]
    pub fn has_pinned_bytes(&self) -> bool {
        let ladder = &self.evidence.ladder;
        let pinned = ladder.pinned_bytes.unwrap_or(0);
        let is_finding = self.findings.iter().any(|finding| finding.verdict == Kind::Fragmentation);
        pinned >= PINNED_BYTES_MIN && (is_finding || pinned >= ladder.resident_bytes / PINNED_SHARE_MIN)
    }

    /// The verdict made of some findings, of which the first gives its kind.
    pub(super) fn of(
        findings: Vec<Finding>,
        evidence: Evidence,
        remedies: Vec<Remedy>,
        unknowns: Vec<String>,
        sources: Vec<Source>,
    ) -> Self {
        let first = findings.first().cloned().unwrap_or_else(|| Finding::unknown("nothing is known about the heap".into()));
        Self {
            verdict: first.verdict,
            confidence: first.confidence,
            summary: first.summary,
            findings,
            evidence,
            remedies,
            unknowns,
            sources,
        }
    }
}

/// What the samples, by their number and shape, leave unknown about growth.
fn unknown_growth(change: Option<&Change>) -> Option<String> {
    let Some(change) = change else { return Some("whether live bytes grow: there is only one sample".into()) };
    let over = HumanDuration(change.span_s);
    let text = match change.live_shape {
        Shape::Unknown => format!("whether live bytes grow: there are only {}", counted(change.looks, "sample")),
        Shape::Growing => format!(
            "whether this is a leak, a cache that fills or a load that rises: over {over} they look the same; sample for longer (--over 1h), or record the stacks"
        ),
        Shape::Refilling => "whether live bytes will rise above what the process held before".into(),
        Shape::Steady | Shape::ComesAndGoes | Shape::Levelled => {
            let an_hour = change.live_unseen_bytes as f64 / change.span_s.max(1e-3) * 3600.0;
            format!(
                "growth of live bytes below {} in {over} ({} per hour): it would not have been detected",
                HumanBytes(change.live_unseen_bytes),
                HumanBytes(an_hour as u64)
            )
        }
    };
    Some(text)
}

fn sources(census: &Census, change: Option<Change>) -> Vec<Source> {
    let closely = match census.level {
        Level::Full => "every chunk",
        Level::Sampled => "a sample of the heap: live and free bytes are estimates with standard errors",
        Level::Top => "sums only",
    };
    let allocators: Vec<String> = census.heaps.iter().map(|heap| heap.allocator.title()).collect();
    let mut sources = Vec::new();
    if !allocators.is_empty() {
        let census = format!("census of the allocator's own metadata ({}), {closely}", allocators.join(", "));
        sources.push(Source::new("heap, in use, trimmable, pinned", census));
    }
    sources.push(Source::new("resident, not malloc", "the kernel's statistics of the mappings (smaps)"));
    if change.is_some() {
        sources.push(Source::new("change", "low-water marks of such censuses: the newer half compared with the older half"));
    }
    sources
}

fn evidence(census: &Census, change: Option<Change>) -> Evidence {
    let ladder = census.ladder();
    let live_resident_bytes = census.sum(HeapAccount::live_resident_bytes);
    let arenas = census.heaps.iter().flat_map(|heap| &heap.arenas).filter(|arena| arena.extent_bytes > 0);
    let of_arenas: Vec<(u64, u64)> = census.heaps.iter().map(other_arenas_free).collect();
    Evidence {
        rss_bytes: census.rss_bytes,
        not_malloc_bytes: census.not_malloc.iter().map(|one| one.resident_bytes).sum(),
        not_malloc_largest: census.not_malloc.iter().max_by_key(|one| one.resident_bytes).map(|one| one.kind),
        not_malloc: census.not_malloc.clone(),
        ladder,
        details: census.details(),
        heaps: if census.heaps.len() > 1 { census.heaps.iter().map(part).collect() } else { Vec::new() },
        live_resident_bytes,
        free_resident_bytes: census.sum(HeapAccount::free_resident_bytes),
        occupancy_est: occupancy_est(census),
        fragmentation_ratio: ladder.used_bytes(live_resident_bytes).and_then(|used| fragmentation_ratio(used, ladder.resident_bytes)),
        arenas: arenas.count(),
        huge_zero_bytes_est: census.heaps.iter().filter_map(|heap| heap.huge_zero_bytes_est).reduce(u64::saturating_add),
        other_arenas_free_bytes: of_arenas.iter().map(|&(sum, _)| sum).fold(0, u64::saturating_add),
        other_arena_free_bytes_max: of_arenas.iter().map(|&(_, most)| most).max().unwrap_or(0),
        change,
    }
}

fn part(heap: &HeapAccount) -> HeapPart {
    HeapPart {
        heap: heap.allocator.title(),
        resident_bytes: heap.ladder.resident_bytes,
        live_bytes: heap.ladder.live_bytes.or(heap.live_bytes_est),
        free_resident_bytes: heap.free_resident_bytes().or(heap.occupancy_est.map(|estimate| estimate.free_resident_bytes_est)),
        mmapped_bytes: heap.mmapped_bytes,
    }
}

/// The estimates of all heaps together; `None` if one of them has none, or all were walked.
fn occupancy_est(census: &Census) -> Option<OccupancyEstimate> {
    let mut estimates = census.heaps.iter().map(|heap| heap.occupancy_est);
    let first = estimates.next()??;
    estimates.try_fold(first, |sum, one| Some(sum.and(one?)))
}

/// Free resident bytes of a heap's arenas but the main one, without those that the allocator will return by itself: the sum, and the arena
/// with most. Of an arena alone it is not known how many of its free bytes are resident, so the sum is at most what is free in the heap.
fn other_arenas_free(heap: &HeapAccount) -> (u64, u64) {
    let of = |arena: &ArenaAccount| arena.chunks.map_or(0, |chunks| chunks.unused_bytes().min(arena.resident_bytes));
    let free = || heap.arenas.iter().skip(1).map(of);
    let decaying = if heap.allocator.row().decays { heap.ladder.trimmable_bytes.unwrap_or(0) } else { 0 };
    let most = heap.free_resident_bytes().unwrap_or(u64::MAX);
    let sum = free().fold(0, u64::saturating_add).saturating_sub(decaying).min(most);
    (sum, free().max().unwrap_or(0).min(sum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::Allocator;
    use crate::census::runtime::hotspot::{JavaHeap, JavaMemory};
    use crate::census::{ArenaChunks, WalkQuality};
    use crate::heap::occupancy::Occupancy;

    const MIB: u64 = 1 << 20;

    fn census(live: u64, trimmable: u64, pinned: u64, kept: u64) -> Census {
        let heap = HeapAccount {
            allocator: Allocator::Glibc,
            ladder: Ladder {
                extent_bytes: (live + trimmable + pinned + kept) * MIB,
                resident_bytes: (live + trimmable + pinned + kept) * MIB,
                live_bytes: Some(live * MIB),
                trimmable_bytes: Some(trimmable * MIB),
                pinned_bytes: Some(pinned * MIB),
                unknown_bytes: Some(0),
            },
            details: Details { cached_bytes: Some(0), kept_bytes: Some(kept * MIB), ..Details::default() },
            fastbin_bytes: Some(0),
            occupancy: Some(Occupancy { live_resident_bytes: live * MIB, ..Occupancy::default() }),
            ..HeapAccount::default()
        };
        Census {
            pid: 1,
            comm: "x".into(),
            level: Level::Full,
            rss_bytes: heap.ladder.resident_bytes,
            heaps: vec![heap],
            not_malloc: Vec::new(),
            runtimes: Default::default(),
            walk: WalkQuality { usable: true, balanced: true, ..WalkQuality::default() },
            layout_unknown: Vec::new(),
        }
    }

    /// The change over samples with these live bytes, a step apart.
    fn course(step_s: f64, live: impl IntoIterator<Item = u64>, free: u64) -> Option<Change> {
        let mut looks = TrendSamples::new(48);
        for (index, live) in live.into_iter().enumerate() {
            let (live_bytes, free_bytes) = (live * MIB, Some(free * MIB));
            looks.add(TrendSample {
                at_s: index as f64 * step_s,
                live_bytes,
                resident_bytes: (live + free) * MIB,
                free_bytes,
                outside_bytes: 0,
            });
        }
        looks.change()
    }

    fn kind(census: &Census) -> Kind {
        judge(census, None).verdict
    }

    #[test]
    fn the_dominant_part_of_the_free_bytes_names_the_verdict() {
        assert_eq!(kind(&census(500, 20, 20, 5)), Kind::Healthy);
        assert_eq!(kind(&census(100, 300, 50, 5)), Kind::Hoarding);
        assert_eq!(kind(&census(100, 20, 300, 5)), Kind::Fragmentation);
        // Whole free pages that no trim gives back, as mimalloc's and musl's.
        let kept = judge(&census(380, 0, 53, 632), None);
        assert_eq!((kept.verdict, kept.findings[0].bytes), (Kind::Hoarding, Some(632 * MIB)));
        let mut cached = census(100, 20, 20, 100);
        cached.heaps[0].details.cached_bytes = Some(90 * MIB);
        assert_eq!(kind(&cached), Kind::Cache);
    }

    #[test]
    fn a_trim_is_predicted_with_the_bytes_it_would_release() {
        let hoarding = census(100, 300, 50, 5);
        let verdict = judge(&hoarding, course(1.0, [100; 6], 350));
        assert_eq!(verdict.remedies.first().map(|remedy| (remedy.predicted_bytes, remedy.at_most)), Some((Some(300 * MIB), false)));
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::Hoarding, Confidence::High));
        // In one sample it may be free only temporarily.
        assert_eq!(judge(&hoarding, None).confidence, Confidence::Medium);
    }

    #[test]
    fn huge_pages_full_of_zeros_are_bloat_unless_another_cause_has_more() {
        let mut huge = census(300, 0, 0, 0);
        huge.heaps[0].details.huge_bytes = 290 * MIB;
        assert_eq!(kind(&huge), Kind::Healthy);
        huge.heaps[0].huge_zero_bytes_est = Some(200 * MIB);
        let verdict = judge(&huge, None);
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::HugePageBloat, Confidence::High));
        assert!(verdict.remedies[0].action.contains("transparent_hugepage"), "{:?}", verdict.remedies);
        assert_eq!(verdict.remedies[0].predicted_bytes, Some(200 * MIB));
        let mut hoarding = census(50, 250, 0, 0);
        hoarding.heaps[0].details.huge_bytes = 290 * MIB;
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
    fn a_rise_is_growing_and_a_leak_only_once_it_has_lasted() {
        let climb = || (0..12).map(|index| 100 + index * 10);
        let after = census(210, 0, 0, 0);
        let brief = judge(&after, course(0.5, climb(), 0));
        assert_eq!((brief.verdict, brief.confidence), (Kind::Growing, Confidence::Low));
        assert!(brief.unknowns.iter().any(|unknown| unknown.contains("a cache that fills")), "{:?}", brief.unknowns);
        assert!(brief.remedies[0].action.contains("growing stacks"), "{:?}", brief.remedies);
        let longer = judge(&after, course(60.0, climb(), 0));
        assert_eq!((longer.verdict, longer.confidence), (Kind::Growing, Confidence::Medium));
        assert_eq!(judge(&after, course(300.0, climb(), 0)).verdict, Kind::Leak);
        // A cache that fills slows down as misses become rarer, and is healthy once it is full.
        let filling = [100, 130, 150, 165, 177, 186, 193, 198, 202, 205, 207, 210];
        assert_eq!(judge(&after, course(300.0, filling, 0)).verdict, Kind::Growing);
        let full = [100, 120, 140, 160, 180, 200, 210, 210, 210, 210, 210, 210];
        assert_eq!(judge(&after, course(300.0, full, 0)).verdict, Kind::Healthy);
        let shrinking = judge(&after, course(300.0, climb().collect::<Vec<_>>().into_iter().rev(), 0));
        assert_eq!(shrinking.verdict, Kind::Healthy);
    }

    #[test]
    fn confidence_in_health_rises_with_the_time_observed() {
        let healthy = census(200, 5, 5, 0);
        let confidence = |change| judge(&healthy, change).confidence;
        assert_eq!(confidence(None), Confidence::Low);
        assert_eq!(confidence(course(0.5, [200; 12], 10)), Confidence::Medium);
        assert_eq!(confidence(course(300.0, [200; 12], 10)), Confidence::High);
        let unknowns = judge(&healthy, course(0.5, [200; 12], 10)).unknowns;
        assert!(unknowns.iter().any(|unknown| unknown.contains("would not have been detected")), "{unknowns:?}");
    }

    #[test]
    fn free_memory_of_a_sawtooth_is_no_trouble() {
        // At its trough.
        let trough = census(50, 200, 0, 0);
        assert_eq!(kind(&trough), Kind::Hoarding);
        let mut looks = TrendSamples::new(12);
        for (index, live) in [50, 150, 245, 50, 150, 245, 50, 150, 245, 50].into_iter().enumerate() {
            let (live_bytes, free_bytes) = (live * MIB, Some((250 - live) * MIB));
            looks.add(TrendSample { at_s: index as f64, live_bytes, resident_bytes: 250 * MIB, free_bytes, outside_bytes: 0 });
        }
        let verdict = judge(&trough, looks.change());
        assert_eq!(verdict.verdict, Kind::Healthy, "{}", verdict.summary);
        assert!(verdict.summary.contains("swing by 195 MiB"), "{}", verdict.summary);
    }

    #[test]
    fn the_malloc_heap_of_a_jvm_is_judged_separately_and_both_findings_are_reported() {
        let mut java = census(99, 68, 10, 0);
        java.rss_bytes += 1000 * MIB;
        java.not_malloc = vec![NotMalloc { kind: "java_heap", resident_bytes: 1000 * MIB, mappings: 1 }];
        let verdict = judge(&java, None);
        let said: Vec<Kind> = verdict.findings.iter().map(|finding| finding.verdict).collect();
        assert_eq!((verdict.verdict, said), (Kind::Hoarding, vec![Kind::Hoarding, Kind::NotMalloc]));
        assert_eq!(verdict.remedies[0].predicted_bytes, Some(68 * MIB), "{:?}", verdict.remedies);
        // Its own heap against its own limit, which is set.
        let heap = JavaHeap {
            resident_bytes: Some(1000 * MIB),
            max_bytes: Some(2000 * MIB),
            max_set_by: Some("command_line"),
            ..JavaHeap::default()
        };
        java.runtimes.java = Some(JavaMemory { collector: Some("g1"), heap, metaspace: None, classes: Vec::new() });
        let verdict = judge(&java, None);
        assert!(verdict.findings[1].summary.contains("50 % of its limit of 1.95 GiB"), "{}", verdict.findings[1].summary);
        assert!(verdict.remedies.iter().any(|remedy| remedy.action.contains("limit is set")), "{:?}", verdict.remedies);
        assert!(verdict.remedies.iter().all(|remedy| !remedy.action.starts_with("set -Xmx")), "{:?}", verdict.remedies);
        // A small share of the process comes second, but has its remedy too.
        java.not_malloc[0].resident_bytes = 10_000 * MIB;
        java.rss_bytes += 9000 * MIB;
        let verdict = judge(&java, None);
        let said: Vec<Kind> = verdict.findings.iter().map(|finding| finding.verdict).collect();
        assert_eq!((verdict.verdict, said), (Kind::NotMalloc, vec![Kind::NotMalloc, Kind::Hoarding]));
        assert!(verdict.remedies.iter().any(|remedy| remedy.action.contains("malloc_trim")), "{:?}", verdict.remedies);
    }

    #[test]
    fn programs_and_libraries_make_no_verdict_and_growing_mappings_do() {
        let mut idle = census(1, 0, 0, 0);
        idle.rss_bytes += 60 * MIB;
        idle.not_malloc = vec![NotMalloc { kind: "program_files", resident_bytes: 60 * MIB, mappings: 40 }];
        assert_eq!(kind(&idle), Kind::Healthy);
        let mut looks = TrendSamples::new(12);
        for index in 0..8 {
            looks.add(TrendSample { at_s: index as f64, live_bytes: MIB, outside_bytes: index * 20 * MIB, ..TrendSample::default() });
        }
        idle.not_malloc.push(NotMalloc { kind: "other_anonymous", resident_bytes: 140 * MIB, mappings: 7 });
        let verdict = judge(&idle, looks.change());
        let said: Vec<Kind> = verdict.findings.iter().map(|finding| finding.verdict).collect();
        assert_eq!((verdict.verdict, &said[..2]), (Kind::Growing, &[Kind::Growing, Kind::NotMalloc][..]));
        assert!(verdict.summary.contains("outside malloc"), "{}", verdict.summary);
    }

    /// An arena's chunks with so many MiB free.
    fn free(mib: u64) -> Option<ArenaChunks> {
        Some(ArenaChunks { free_bytes: mib * MIB, ..ArenaChunks::default() })
    }

    #[test]
    fn what_jemalloc_keeps_dirty_is_hoarding_whatever_the_number_of_arenas() {
        let mut many = census(5, 185, 0, 0);
        let arena = ArenaAccount { extent_bytes: 13 * MIB, resident_bytes: 13 * MIB, chunks: free(12), ..ArenaAccount::default() };
        many.heaps[0].arenas = vec![arena; 16];
        assert_eq!(kind(&many), Kind::ArenaBlowUp);
        many.heaps[0].allocator = Allocator::Jemalloc;
        let heap = &mut many.heaps[0];
        (heap.dirty_bytes, heap.muzzy_bytes) = (Some(185 * MIB), Some(0));
        for arena in &mut heap.arenas {
            (arena.dirty_bytes, arena.dirty_decay_ms, arena.muzzy_decay_ms) = (Some(12 * MIB), Some(-1), Some(0));
        }
        // An arena that holds nothing does not matter, whatever its decay time.
        heap.arenas.push(ArenaAccount { dirty_decay_ms: Some(0), muzzy_decay_ms: Some(0), ..ArenaAccount::default() });
        let verdict = judge(&many, None);
        assert_eq!(verdict.verdict, Kind::Hoarding);
        assert!(verdict.remedies[0].action.contains("dirty_decay_ms"), "{:?}", verdict.remedies);
        let basis = &verdict.remedies[0].basis;
        assert!(basis.contains("185 MiB dirty (never returned), 0 B muzzy (returned at once), in 16 arenas"), "{basis}");
        assert!(verdict.remedies.iter().all(|remedy| !remedy.action.contains("malloc_trim")), "{:?}", verdict.remedies);
    }

    #[test]
    fn free_memory_spread_over_many_arenas_is_an_arena_blow_up() {
        let mut many = census(100, 20, 100, 200);
        let arena = ArenaAccount { extent_bytes: 30 * MIB, resident_bytes: 30 * MIB, chunks: free(25), ..ArenaAccount::default() };
        many.heaps[0].arenas = vec![arena; 14];
        let verdict = judge(&many, None);
        assert_eq!(verdict.verdict, Kind::ArenaBlowUp);
        // What a trim releases is counted; what fewer arenas save is not known.
        assert!(verdict.remedies[0].action.contains("malloc_trim") && !verdict.remedies[0].at_most, "{:?}", verdict.remedies);
        let arenas = verdict.remedies.iter().find(|remedy| remedy.action.contains("MALLOC_ARENA_MAX"));
        assert!(arenas.is_some_and(|remedy| remedy.at_most), "{:?}", verdict.remedies);
        many.heaps[0].ladder.trimmable_bytes = Some(0);
        assert!(judge(&many, None).remedies[0].action.contains("--by pinned"));
        // Free bytes of a single arena are not due to the number of arenas.
        let mut one = census(75, 72, 0, 0);
        one.heaps[0].arenas = vec![ArenaAccount { extent_bytes: MIB, resident_bytes: MIB, ..ArenaAccount::default() }; 14];
        one.heaps[0].arenas[3] = ArenaAccount { extent_bytes: 147 * MIB, resident_bytes: 147 * MIB, chunks: free(72), ..arena };
        assert_eq!(kind(&one), Kind::Hoarding);
    }

    #[test]
    fn memory_that_is_not_mallocs_is_named() {
        let mut java = census(100, 10, 10, 5);
        java.rss_bytes += 900 * MIB;
        java.not_malloc = vec![NotMalloc { kind: "java_heap", resident_bytes: 900 * MIB, mappings: 1 }];
        let verdict = judge(&java, course(1.0, [100; 6], 20));
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
    fn an_allocator_that_cannot_be_read_gives_no_verdict_but_a_reason() {
        let mut unread = census(0, 0, 0, 0);
        unread.heaps.clear();
        unread.rss_bytes = 900 * MIB;
        unread.not_malloc = vec![
            NotMalloc { kind: "other_anonymous", resident_bytes: 800 * MIB, mappings: 3 },
            NotMalloc { kind: "file_mappings", resident_bytes: 100 * MIB, mappings: 9 },
        ];
        let verdict = judge(&unread, None);
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::Unknown, Confidence::Low));
        assert!(verdict.summary.contains("no readable allocator was found"), "{}", verdict.summary);
        unread.layout_unknown = vec!["mimalloc is not supported".into()];
        assert!(judge(&unread, None).summary.ends_with("mimalloc is not supported"));
        // Memory that is certainly not a heap decides if it is the larger part.
        unread.not_malloc[1].resident_bytes = 2000 * MIB;
        assert_eq!(kind(&unread), Kind::NotMalloc);
    }

    #[test]
    fn the_verdicts_own_remedy_comes_first_whatever_others_would_save() {
        let verdict = judge(&census(100, 290, 300, 5), None);
        assert_eq!(verdict.verdict, Kind::Fragmentation);
        assert!(verdict.remedies[0].action.contains("--by pinned"), "{:?}", verdict.remedies);
        assert!(verdict.remedies[1].action.contains("malloc_trim"));
        let grows = judge(&census(140, 300, 0, 0), course(60.0, [100, 140], 300));
        assert!(grows.remedies[0].action.contains("growing stacks"), "{:?}", grows.remedies);
        assert!(grows.remedies[1].action.contains("malloc_trim"), "{:?}", grows.remedies);
        assert_eq!(grows.evidence.change.map(|change| change.live_bytes_per_hour()), Some(40 * 60 * MIB as i64));
    }

    #[test]
    fn fastbins_and_thread_caches_have_a_setting_each_the_larger_first() {
        let mut cached = census(100, 20, 20, 100);
        cached.heaps[0].details.cached_bytes = Some(90 * MIB);
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
