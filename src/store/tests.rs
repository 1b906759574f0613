//! What the history keeps, thins and returns.
#![allow(clippy::unwrap_used)]

use super::row::Row;
use super::thin::{Limits, size_bytes, thin};
use super::view::{EventKind, EventView};
use super::write::Writer;
use super::{Database, Reader};
use crate::heap::ladder::Ladder;
use crate::model::sample::{HeapSample, Identity, ProcessSample};
use crate::model::view::{ProcessView, UnreachedView, VerdictView};
use crate::process::ProcessId;
use crate::profile::ValueKind;
use crate::profile::testing::shop;
use crate::units::Pid;

const DAY: i64 = 86400;
const NOW: i64 = 1_800_000_000;

/// A process whose heap has `mib` MiB.
pub(crate) fn process(pid: u32, mib: u64) -> ProcessView {
    let identity = Identity { process: ProcessId { pid: Pid(pid), start_ticks: u64::from(pid) }, stack: 0 };
    let bytes = mib << 20;
    let heap = HeapSample {
        allocator: "glibc".into(),
        ladder: Ladder {
            extent_bytes: bytes,
            resident_bytes: bytes - 4096,
            live_bytes: Some(bytes / 2),
            trimmable_bytes: Some(bytes / 8),
            pinned_bytes: Some(bytes / 4),
            unknown_bytes: None,
        },
        ..HeapSample::default()
    };
    let sample = ProcessSample { heaps: vec![heap], ..ProcessSample::new(identity, format!("p{pid}"), 0, bytes + 12345) };
    let verdict = VerdictView { verdict: "fragmentation".into(), confidence: "high".into(), summary: String::new() };
    ProcessView { verdict: Some(verdict), ..ProcessView::of(&sample, std::time::Instant::now()) }
}

fn writer() -> Writer {
    Writer::new(Database::in_memory().unwrap(), "boot".into())
}

fn unlimited() -> Limits {
    Limits { size_bytes_max: u64::MAX, age_s_max: 365 * DAY }
}

#[test]
fn what_is_written_comes_back_as_columns_over_time() {
    let mut writer = writer();
    for at in 0..10 {
        writer.samples(NOW + at * 30, &[process(7, 100 + at as u64), process(8, 1)]).unwrap();
    }
    let reader = Reader::new(writer.database().clone());
    let found = reader.find(7, None).unwrap().unwrap();
    let view = reader.history(&found, NOW as f64, (NOW + 300) as f64, 300).unwrap();
    assert_eq!(view.at_unix_s.len(), 10);
    assert_eq!(view.figures.ladder.live_bytes[9], Some(109 << 19));
    assert_eq!(view.verdict[0].as_deref(), Some("fragmentation"));
    assert_eq!(view.figures.cached_bytes[0], None);
    // Fewer points: the last sample of each step.
    let view = reader.history(&found, NOW as f64, (NOW + 300) as f64, 3).unwrap();
    assert!(view.at_unix_s.len() <= 4 && view.step_s == 100.0, "{view:?}");
    assert_eq!(*view.at_unix_s.last().unwrap(), (NOW + 270) as f64);
    let past = reader.processes(NOW as f64, (NOW + 300) as f64).unwrap();
    assert_eq!(past.processes.iter().map(|one| one.pid).collect::<Vec<_>>(), [7, 8]);
    let (from, to) = (reader.at(&found, NOW as f64).unwrap().unwrap(), reader.at(&found, 2e9).unwrap().unwrap());
    assert_eq!(from.delta(&to)["live_bytes"], 9 << 19);
    assert_eq!(reader.at(&found, (NOW - 1) as f64).unwrap(), None);
}

#[test]
fn profiles_and_events_come_back_whole() {
    let mut writer = writer();
    writer.profile(NOW, &process(7, 1), &shop()).unwrap();
    let event = EventView {
        id: (NOW as u64) * 1_000_000,
        kind: EventKind::OomKill,
        at_unix_s: NOW as f64,
        summary: "gone".into(),
        evidence: "counted".into(),
        process: process(7, 1),
        sample_age_s: Some(1.5),
        profile_by: vec!["live".into()],
        trim: None,
        outcome: None,
    };
    writer.event(&event, Some(&shop())).unwrap();
    let reader = Reader::new(writer.database().clone());
    let found = reader.find(7, None).unwrap().unwrap();
    let (profile, at) = reader.profile_at(&found, ValueKind::PinnedSpace, (NOW + 5) as f64).unwrap().unwrap();
    assert_eq!((profile.totals(), at), (shop().totals(), NOW as f64));
    assert!(reader.profile_at(&found, ValueKind::SurvivorSpace, (NOW + 5) as f64).unwrap().is_none());
    let events = reader.events(0.0, (NOW + 1) as f64, 10, None).unwrap();
    assert_eq!((events.events, events.events_left_out), (vec![event.clone()], 0));
    assert_eq!(reader.events(0.0, (NOW + 1) as f64, 10, Some((8, 8))).unwrap().events, []);
    assert_eq!(reader.event_profile(event.id).unwrap().unwrap().totals(), shop().totals());
}

#[test]
fn old_samples_are_thinned_to_their_steps_and_peaks_stay() {
    let mut writer = writer();
    let start = NOW - 2 * DAY;
    for at in (start..NOW).step_by(60) {
        // One peak, which is not the last of its step.
        let mib = if at == start + 120 { 900 } else { 100 };
        writer.samples(at, &[process(7, mib)]).unwrap();
    }
    let thinned = thin(writer.database(), NOW, unlimited()).unwrap();
    assert!(thinned.merged > 1000 && thinned.aged == 0 && thinned.dropped == 0, "{thinned:?}");
    let reader = Reader::new(writer.database().clone());
    let found = reader.find(7, None).unwrap().unwrap();
    let view = reader.history(&found, start as f64, NOW as f64, 2000).unwrap();
    // A day of one in five minutes; all of it is covered, and so is the last day in full.
    let old = view.at_unix_s.iter().filter(|at| **at < (NOW - DAY) as f64).count();
    assert!((280..=296).contains(&old), "{old}");
    assert!(view.at_unix_s[0] < (start + 300) as f64);
    assert_eq!(view.rss_bytes_max.iter().flatten().max(), Some(&((900 << 20) + 12345)));
    assert_eq!(thin(writer.database(), NOW, unlimited()).unwrap().merged, 0, "thinning again changes nothing");
}

#[test]
fn the_size_limit_thins_before_it_drops_and_the_age_limit_holds() {
    let mut writer = writer();
    let processes: Vec<ProcessView> = (1..=20).map(|pid| process(pid, 64)).collect();
    for at in (NOW - 4 * DAY..NOW).step_by(600) {
        writer.samples(at, &processes).unwrap();
    }
    let before = size_bytes(&writer.database().lock()).unwrap();
    let limits = Limits { size_bytes_max: before / 4, age_s_max: 3 * DAY };
    let thinned = thin(writer.database(), NOW, limits).unwrap();
    assert!(thinned.aged > 0 && thinned.merged > 0 && thinned.dropped == 0, "{thinned:?}");
    assert!(size_bytes(&writer.database().lock()).unwrap() <= limits.size_bytes_max);
    let reader = Reader::new(writer.database().clone());
    let found = reader.find(7, None).unwrap().unwrap();
    let view = reader.history(&found, (NOW - 5 * DAY) as f64, NOW as f64, 2000).unwrap();
    assert!(view.at_unix_s[0] >= (NOW - 3 * DAY) as f64 && view.at_unix_s[0] < (NOW - 3 * DAY + 7200) as f64, "thinned, not cut off");
    let gaps = view.at_unix_s.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    assert!(gaps <= 7200.0, "{gaps}");
    // So small that thinning cannot do it: what is oldest goes, and that is counted.
    let tiny = thin(writer.database(), NOW, Limits { size_bytes_max: before / 20, age_s_max: 3 * DAY }).unwrap();
    assert!(tiny.dropped > 0, "{tiny:?}");
}

#[test]
fn a_file_that_is_no_history_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("history.db"), "x".repeat(5000)).unwrap();
    let mut writer = Writer::new(Database::open(dir.path()).unwrap(), "boot".into());
    writer.samples(NOW, &[process(7, 1)]).unwrap();
    assert!(dir.path().join("history.db.broken").exists());
    let reader = Reader::new(Database::open_to_read(dir.path()).unwrap());
    assert!(reader.find(7, None).unwrap().is_some());
    assert!(Database::open_to_read(&dir.path().join("nothing")).unwrap_err().to_string().contains("there is no history"));
}

#[test]
fn a_history_of_the_first_version_is_kept_and_gets_what_it_lacks() {
    let dir = tempfile::tempdir().unwrap();
    drop(Database::open(dir.path()).unwrap());
    // As it was: without the columns of the second and the third version.
    let connection = rusqlite::Connection::open(dir.path().join("history.db")).unwrap();
    connection
        .execute_batch("ALTER TABLE sample DROP COLUMN unreached_bytes; ALTER TABLE process DROP COLUMN workload; PRAGMA user_version = 1;")
        .unwrap();
    let old = "INSERT INTO process (boot_id, pid, start_ticks, comm) VALUES ('boot', 7, 7, 'p7');
               INSERT INTO sample (process, at, step, rss_bytes, verdict) VALUES (1, 1800000000, 0, 5000, 1);";
    connection.execute_batch(old).unwrap();
    drop(connection);
    let mut writer = Writer::new(Database::open(dir.path()).unwrap(), "boot".into());
    let unreached = UnreachedView { blocks: 2, bytes: 96, at_unix_s: 0.0, summary: String::new(), doubts: Vec::new() };
    writer.samples(NOW + 30, &[ProcessView { unreached: Some(unreached), ..process(7, 1) }]).unwrap();
    let reader = Reader::new(Database::open_to_read(dir.path()).unwrap());
    let view = reader.history(&reader.find(7, None).unwrap().unwrap(), NOW as f64, (NOW + 60) as f64, 300).unwrap();
    assert_eq!((view.figures.rss_bytes[0], view.unreached_bytes), (Some(5000), vec![None, Some(96)]));
    assert_eq!(view.verdict[1].as_deref(), Some("fragmentation"));
    let past = reader.processes(NOW as f64, (NOW + 60) as f64).unwrap();
    assert_eq!(past.processes[0].workload.as_ref().map(|workload| workload.name.as_str()), Some("p7"));
    assert!(!dir.path().join("history.db.broken").exists());
}

#[test]
fn a_row_has_every_column_of_the_table() {
    let row = Row::of(NOW, &process(7, 4));
    assert_eq!(row.value("rss_bytes"), row.value("rss_bytes_max"));
    assert_eq!((row.value("pinned_bytes"), row.value("nonsense")), (Some(1 << 20), None));
}

#[test]
fn a_few_rows_of_a_time_to_come_do_not_say_where_the_samples_end() {
    let mut writer = writer();
    assert_eq!(super::thin::end_of_samples(&writer.database().lock()).unwrap(), None);
    for at in 0..100 {
        writer.samples(NOW + at * 30, &[process(7, 1)]).unwrap();
    }
    for at in 0..5 {
        writer.samples(NOW + 365 * DAY + at, &[process(7, 1)]).unwrap();
    }
    let end = super::thin::end_of_samples(&writer.database().lock()).unwrap().unwrap();
    assert!((NOW + 85 * 30..NOW + 100 * 30).contains(&end), "{}", end - NOW);
}
