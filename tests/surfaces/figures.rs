//! `make bench-surfaces`: the figures of metrics, history and `top`, printed with their goals.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fragprof::census::{Census, Level, NotMalloc, WalkQuality};
use fragprof::heap::ladder::{Details, Ladder};
use fragprof::metrics::AgentCounters;
use fragprof::model::sample::{HeapSample, Identity, ProcessSample, WatchState};
use fragprof::model::snapshot::{Published, Snapshot};
use fragprof::model::view::ProcessView;
use fragprof::process::ProcessId;
use fragprof::profile::{Frame, Profile, ValueKind, Values};
use fragprof::store::Database;
use fragprof::store::thin::size_bytes;
use fragprof::store::write::Writer;
use fragprof::units::Pid;

const DAY_S: i64 = 86400;

/// A process with everything that has series: heaps, censuses, memory outside malloc, a verdict.
fn process(pid: u32, at: u64, now: Instant) -> ProcessSample {
    // Values that differ from one sample to the next, as for a busy process.
    let noise = u64::from(pid).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at.wrapping_mul(0xbf58_476d_1ce4_e5b9)) >> 40;
    let bytes = (200 << 20) + noise;
    let heap = HeapSample {
        allocator: "glibc".into(),
        ladder: Ladder {
            extent_bytes: bytes,
            resident_bytes: bytes - 4096,
            live_bytes: Some(bytes / 2 + noise / 3),
            trimmable_bytes: Some(bytes / 8 + noise),
            pinned_bytes: Some(bytes / 4 + noise),
            unknown_bytes: Some(0),
        },
        details: Details { cached_bytes: Some(noise), kept_bytes: Some(noise / 5), ..Details::default() },
        live_allocations: Some(bytes / 200),
        free_bytes: Some(bytes / 3),
        top_bytes: noise / 2,
        overhead_bytes: Some(100_000),
        mmapped_bytes: noise,
        mmapped_allocations: 3,
        arenas: 8,
        ..HeapSample::default()
    };
    let kinds = ["thread_stacks", "main_stack", "file_mappings", "other_anonymous", "shared_memory"];
    let census = Census {
        pid,
        comm: format!("service-{pid}"),
        level: Level::Full,
        heaps: Vec::new(),
        rss_bytes: bytes,
        not_malloc: kinds.map(|kind| NotMalloc { kind, resident_bytes: noise, mappings: 3 }).to_vec(),
        runtimes: Default::default(),
        walk: WalkQuality { usable: true, balanced: true, ..WalkQuality::default() },
        layout_unknown: Vec::new(),
    };
    let verdict = Arc::new(fragprof::fragmentation::verdict::judge(&census, None));
    let taken = fragprof::model::sample::TimedCensus { at: now, wall: SystemTime::now(), cpu: Duration::ZERO, census };
    let identity = Identity { process: ProcessId { pid: Pid(pid), start_ticks: u64::from(pid) }, stack: 1 };
    ProcessSample {
        state: WatchState::Watched,
        heaps: vec![heap],
        top: Some(Arc::new(taken.clone())),
        full: Some(Arc::new(taken)),
        verdict: Some(verdict),
        ..ProcessSample::new(identity, format!("service-{pid}"), 0, bytes + (8 << 20))
    }
}

fn best_of(rounds: usize, mut work: impl FnMut()) -> Duration {
    (0..rounds)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed()
        })
        .min()
        .unwrap()
}

/// 300 stacks of 20 frames, as in a service's profile.
fn profile() -> Profile {
    let mut profile = Profile::default();
    profile.meta.kinds = [ValueKind::InuseSpace, ValueKind::AllocSpace].into_iter().collect();
    for stack in 0..300u32 {
        let frames: Vec<Frame> = (0..20)
            .map(|depth| Frame::named(format!("service::module_{}::function_{}", depth % 7, (stack * 7 + depth * 13) % 900)))
            .collect();
        let values =
            Values::default().with(ValueKind::InuseSpace, u64::from(stack) * 4096).with(ValueKind::AllocSpace, u64::from(stack) * 99_991);
        profile.add(1, &frames, None, &values);
    }
    profile
}

#[test]
#[ignore = "make bench-surfaces"]
fn figures_of_the_surfaces() {
    let now = Instant::now();
    let processes: Vec<_> = (1..=200).map(|pid| Arc::new(process(pid, 0, now))).collect();
    let snapshot = Snapshot { processes, metrics_processes_max: 200, ..Snapshot::empty(now) };
    let mut text = String::new();
    let spent = best_of(10, || {
        text = fragprof::metrics::exposition(&snapshot, &AgentCounters::default(), now).unwrap();
    });
    println!(
        "/metrics, 200 processes: {:.1} ms (goal 50), {:.2} MiB (goal 2), {} series",
        spent.as_secs_f64() * 1e3,
        text.len() as f64 / f64::from(1 << 20),
        text.lines().filter(|line| !line.starts_with('#')).count()
    );
    assert!(spent <= Duration::from_millis(50) && text.len() <= 2 << 20);

    // A day of 50 processes at the default settings, by a simulated clock.
    let settings = fragprof::agent::config::HistoryConfig::default();
    let (sample_s, profile_s) = (settings.sample_interval_s as usize, settings.profile_interval_s as i64);
    let place = tempfile::tempdir().unwrap();
    let database = Database::open(place.path()).unwrap();
    let mut writer = Writer::new(database.clone(), "boot".into());
    let start = 1_800_000_000;
    let profile = profile();
    let started = Instant::now();
    for at in (0..DAY_S).step_by(sample_s) {
        let views: Vec<ProcessView> = (1..=50).map(|pid| ProcessView::of(&process(pid, at as u64, now), now)).collect();
        writer.samples(start + at, &views).unwrap();
        if at % profile_s == 0 {
            views.iter().for_each(|view| writer.profile(start + at, view, &profile).unwrap());
        }
    }
    let size = size_bytes(&database.lock()).unwrap();
    println!(
        "history, 50 processes, a day: {:.1} MiB (goal 50 MB), written in {:.1} s",
        size as f64 / f64::from(1 << 20),
        started.elapsed().as_secs_f64()
    );
    assert!(size <= 50_000_000);
    let reader = fragprof::store::Reader::new(database);
    let found = reader.find(7, None).unwrap().unwrap();
    let spent = best_of(5, || assert!(reader.history(&found, start as f64, (start + DAY_S) as f64, 300).unwrap().at_unix_s.len() >= 280));
    println!("history of one process, 24 h in 300 points: {:.1} ms", spent.as_secs_f64() * 1e3);

    let published = Published::new(now);
    published.store(snapshot);
    let view = fragprof::model::view::ProcessesView::of(&published.load(), now);
    let spent = best_of(10, || assert!(serde_json::to_vec(&view).unwrap().len() > 1000));
    println!(
        "/api/v1/processes, 200 processes: {:.1} ms, {:.2} MiB",
        spent.as_secs_f64() * 1e3,
        serde_json::to_vec(&view).unwrap().len() as f64 / f64::from(1 << 20)
    );

    let sample = fragprof::tui::node::Sample { view, ..fragprof::tui::node::Sample::default() };
    let mut terminal = ratatui::Terminal::new(ratatui::backend::TestBackend::new(200, 60)).unwrap();
    let mut state = fragprof::tui::node::state::State::default();
    let spent = best_of(20, || {
        terminal.draw(|frame| fragprof::tui::node::draw::draw(frame, Some(&sample), &mut state, "agent", true)).unwrap();
    });
    println!("top, a frame of 200 processes: {:.2} ms (goal 10)", spent.as_secs_f64() * 1e3);
    assert!(spent <= Duration::from_millis(10));
}
