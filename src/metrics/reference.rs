//! Keeps `docs/metrics.md` and the exposition in step.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::labels::Known;
use super::{AgentCounters, exposition};
use crate::census::{Census, Level, NotMalloc, WalkQuality};
use crate::fragmentation::verdict::judge;
use crate::heap::ladder::{Details, Ladder};
use crate::model::attribution::{Attributed, Attributions, Rates};
use crate::model::counters::GovernedSample;
use crate::model::counters::ListeningSample;
use crate::model::counters::PushCounters;
use crate::model::counters::{AttachSample, DeliverySample, LeakFound, LeaksSample, ReclaimSample};
use crate::model::sample::{HeapSample, Identity, ProcessSample, TimedCensus};
use crate::model::snapshot::Snapshot;
use crate::model::view::Growth;
use crate::process::ProcessId;
use crate::process::container::{CgroupMemory, Container};
use crate::profile::ValueKind;
use crate::profile::testing::shop;
use crate::session::tier::sampled::EmitterTotals;
use crate::session::tier::windows::LargeStatus;
use crate::units::Pid;

/// A process with all figures known, so that each family has a sample.
fn known(now: Instant, pid: u32, are_lower_bounds: bool) -> ProcessSample {
    let process = ProcessId { pid: Pid(pid), start_ticks: 1 };
    let some = Some(1 << 20);
    let heap = HeapSample {
        allocator: "glibc".into(),
        ladder: Ladder {
            resident_bytes: 1 << 20,
            live_bytes: some,
            trimmable_bytes: some,
            pinned_bytes: some,
            unknown_bytes: some,
            ..Ladder::default()
        },
        details: Details { cached_bytes: some, kept_bytes: some, ..Details::default() },
        live_bytes_est: some,
        live_bytes_stderr: some,
        live_allocations: some,
        free_bytes: some,
        overhead_bytes: some,
        ..HeapSample::default()
    };
    let census = Census {
        pid,
        comm: "x".into(),
        level: Level::Full,
        heaps: Vec::new(),
        rss_bytes: 1,
        not_malloc: vec![NotMalloc { kind: "thread_stacks", resident_bytes: 1, mappings: 1 }],
        runtimes: Default::default(),
        walk: WalkQuality::default(),
        layout_unknown: Vec::new(),
    };
    let board = Attributions::default();
    let rates =
        Rates { allocations_per_s_stderr: Some(1.0), allocated_bytes_per_s_stderr: Some(1.0), are_lower_bounds, ..Rates::default() };
    let mut profile = shop();
    profile.meta.kinds = profile.meta.kinds.with(ValueKind::SameObjects);
    let attributed = Attributed {
        profile: Arc::new(profile),
        at: now,
        wall: SystemTime::now(),
        blocks: None,
        rates: Some(rates),
        slowdown_ratio_est: Some(0.01),
    };
    board.publish(process, attributed);
    let verdict = Some(Arc::new(judge(&census, None)));
    let full = Some(Arc::new(TimedCensus { at: now, wall: SystemTime::now(), cpu: Duration::ZERO, census }));
    let mut sample = ProcessSample::new(Identity { process, stack: 0 }, "x".into(), 0, 1);
    sample.heaps = vec![heap];
    (sample.full, sample.verdict, sample.attributed) = (full, verdict, board.of(process));
    sample.growth = Some(Growth { resident_bytes_per_s: 1.0, ..Growth::default() });
    sample.surroundings.memory = Some(CgroupMemory { limit_bytes: some, ..CgroupMemory::default() });
    let names = |name: &str| Some(name.to_owned());
    sample.surroundings.container =
        Some(Arc::new(Container { namespace: names("n"), pod: names("p"), name: names("c"), image: names("i:1"), ..Container::default() }));
    sample.workload = Arc::new(sample.found_workload(None));
    sample
}

/// The families of the tiers that know stacks, each with a process.
fn tiers(now: Instant, known: &Known<'_>) -> String {
    let status = crate::session::tier::windows::Status {
        pid: Pid(1),
        full: false,
        open: false,
        budget_ratio: 0.01,
        slowdown_ratio_est: 0.0,
        open_s: 0.0,
        full_s: 0.0,
        windows: 0,
        windows_closed_early: 0,
        windows_lossy: 0,
        rare_events: 0,
        rare_events_s: 0.0,
        large: LargeStatus { live_bytes: Some(0), ..LargeStatus::default() },
    };
    let heard = EmitterTotals {
        process: ProcessId { pid: Pid(1), start_ticks: 1 },
        source: String::new(),
        sample_bytes: Some(1),
        totals: Default::default(),
        stats: Default::default(),
        loss: Default::default(),
        since: now,
    };
    let mut families = super::governed::families(
        &GovernedSample { targets: vec![("x".into(), status)], unavailable: Some("x".into()), ..GovernedSample::default() },
        known,
    );
    families
        .extend(super::listening::families(&ListeningSample { targets: vec![("x".into(), heard)], ..ListeningSample::default() }, known));
    let found = LeakFound { process: ProcessId { pid: Pid(1), start_ticks: 1 }, comm: "x".into(), blocks: 1, bytes: 1, at: now };
    families.extend(super::leaks::families(&LeaksSample { found: vec![found], ..LeaksSample::default() }, known, now));
    let refused = [("nothing", 1)].into_iter().collect();
    families.extend(super::reclaim::families(&ReclaimSample { refused, ..ReclaimSample::default() }));
    let refused = [("own_malloc", 1)].into_iter().collect();
    families.extend(super::attach::families(&AttachSample { refused, ..AttachSample::default() }));
    let (refused, delivered) = (BTreeMap::from([("static", 1)]), BTreeMap::from([("glibc", 1)]));
    families.extend(super::delivery::families(&DeliverySample { refused, delivered, ..DeliverySample::default() }));
    super::text(families).unwrap()
}

fn table() -> String {
    let now = Instant::now();
    let snapshot = Snapshot {
        processes: vec![Arc::new(known(now, 1, false)), Arc::new(known(now, 2, true))],
        metrics_processes_max: 2,
        metrics_workload_series_max: 300,
        workload_kills: Arc::new([(known(now, 1, false).workload, 1)].into()),
        ..Snapshot::empty(now)
    };
    let counters = PushCounters::default();
    let text = exposition(
        &snapshot,
        &AgentCounters { push: Some(&counters), debuginfod: Some(Default::default()), ..AgentCounters::default() },
        now,
    )
    .unwrap()
        + &tiers(now, &Known::of(&snapshot));
    let mut rows: BTreeMap<&str, (&str, &str, String)> = BTreeMap::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            rows.entry(name).or_default().0 = help;
        } else if let Some((name, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            rows.entry(name).or_default().1 = kind;
        } else if let Some((name, labels)) = line.split_once('{') {
            let names = labels.split("\",").filter_map(|label| label.split_once('=')).map(|(name, _)| name);
            rows.entry(name).or_default().2 = names.collect::<Vec<_>>().join(", ");
        }
    }
    let mut table = String::from("| metric | type | labels | what it is |\n|---|---|---|---|\n");
    for (name, (help, kind, labels)) in rows {
        let _ = writeln!(table, "| `{name}` | {kind} | {labels} | {} |", help.replace('|', "\\|"));
    }
    table
}

/// `FRAGPROF_BLESS=1 cargo test --lib reference` regenerates the table.
#[test]
fn the_reference_in_docs_lists_every_metric_with_its_help() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let (head, _) = text.split_once("| metric |").unwrap_or((&text, ""));
    let whole = format!("{head}{}", table());
    if std::env::var_os("FRAGPROF_BLESS").is_some() {
        std::fs::write(path, &whole).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), whole, "regenerate it: FRAGPROF_BLESS=1 cargo test --lib reference");
}
