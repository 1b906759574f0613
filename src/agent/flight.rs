//! The flight recorder: keeps a process's last state when the kernel kills it for lack of memory, when its limit is nearly reached, and when it
//! ends.
//!
//! Kills are detected by the counters of the process's memory cgroup (`oom_kill`), or of the machine if it had no limit. These count processes
//! without naming them: of several that ended between two scans, the largest are assumed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use super::containers::Containers;
use crate::model::sample::ProcessSample;
use crate::model::view::{LimitView, ProcessView, unix_s};
use crate::process::handle::read_bounded;
use crate::store::keeper::{Record, event_id};
use crate::store::view::{EventKind, EventView, OutcomeView, TrimView};
use crate::units::HumanBytes;

/// Share of the limit, in percent, above which it counts as nearly reached.
pub const NEAR_PERCENT: u64 = 95;
/// Share, in percent, below which the next approach is recorded again.
const CALM_PERCENT: u64 = 85;
/// Most cgroups whose approach is kept; a node has some hundred.
const CGROUPS_MAX: usize = 4096;

/// `/proc/vmstat` has about 5 KiB.
const VMSTAT_BYTES_MAX: u64 = 64 << 10;

/// The recorder's state.
#[derive(Debug, Default)]
pub struct Flight {
    /// Cgroups near their limit that were recorded.
    near: BTreeSet<String>,
    /// Kills on the machine at the last scan.
    machine_kills: Option<u64>,
    last_id: u64,
}

impl Flight {
    /// Records the processes that ended between two scans, the largest first. Exits of processes with fewer than `exit_rss_min_bytes` are left
    /// out; their number is the second part of the result.
    pub fn ended(&mut self, mut ended: Vec<Arc<ProcessSample>>, containers: &Containers, exit_rss_min_bytes: u64) -> (Vec<Record>, u64) {
        let machine_kills = oom_kills_on_machine();
        let mut machine_left = machine_kills.zip(self.machine_kills).map_or(0, |(now, before)| now.saturating_sub(before));
        self.machine_kills = machine_kills.or(self.machine_kills);
        ended.sort_by_key(|one| std::cmp::Reverse(one.rss_bytes));
        let mut left: BTreeMap<String, Option<u64>> = BTreeMap::new();
        let mut records = Vec::new();
        let mut passed_over = 0;
        for one in ended {
            let evidence = killed(&one, containers, &mut left, &mut machine_left);
            let (kind, evidence) = match evidence {
                Some(evidence) => (EventKind::OomKill, evidence),
                None if one.rss_bytes < exit_rss_min_bytes || one.best().is_none() => {
                    passed_over += 1;
                    continue;
                }
                None => (EventKind::Exit, "it is no longer in the process list".to_owned()),
            };
            records.push(self.record(kind, &one, evidence));
        }
        (records, passed_over)
    }

    /// Records cgroups that came near their limits, with the largest watched process of each.
    pub fn near_limits(&mut self, processes: &[Arc<ProcessSample>]) -> Vec<Record> {
        let mut largest: BTreeMap<String, (&Arc<ProcessSample>, LimitView, usize)> = BTreeMap::new();
        for one in processes {
            let Some(limit) = one.limit_view() else { continue };
            let entry = largest.entry(place(one)).or_insert_with(|| (one, limit.clone(), 0));
            entry.2 += 1;
            if one.rss_bytes > entry.0.rss_bytes {
                (entry.0, entry.1) = (one, limit);
            }
        }
        self.near.retain(|place| largest.get(place).is_some_and(|(_, limit, _)| is_above(limit, CALM_PERCENT)));
        let mut records = Vec::new();
        for (place, (one, limit, processes)) in largest {
            if !is_above(&limit, NEAR_PERCENT) || self.near.contains(&place) || self.near.len() >= CGROUPS_MAX {
                continue;
            }
            let evidence = format!(
                "{} of the limit of {} of cgroup {place} are used, without inactive page cache; this is the largest of {processes} watched processes in it",
                HumanBytes(limit.used_bytes),
                HumanBytes(limit.limit_bytes)
            );
            self.near.insert(place);
            records.push(self.record(EventKind::MemoryLimit, one, evidence));
        }
        records
    }

    /// Records a process that runs with an advised setting and was compared with the one before.
    pub fn compared(&mut self, one: &ProcessSample, outcome: OutcomeView) -> Record {
        let evidence = format!(
            "{} saved {}{} ({}{} predicted): {}",
            outcome.applied,
            if outcome.saved_bytes < 0 { "−" } else { "" },
            HumanBytes(outcome.saved_bytes.unsigned_abs()),
            if outcome.at_most { "at most " } else { "" },
            HumanBytes(outcome.predicted_bytes),
            outcome.basis
        );
        let mut record = self.record(EventKind::Setting, one, evidence);
        record.event.outcome = Some(outcome);
        record
    }

    fn record(&mut self, kind: EventKind, one: &ProcessSample, evidence: String) -> Record {
        record(kind, one, evidence, &mut self.last_id)
    }
}

/// A record of memory that was given back.
pub(super) fn trimmed(one: &ProcessSample, evidence: String, trim: TrimView, outcome: Option<OutcomeView>, last_id: &mut u64) -> Record {
    let mut record = record(EventKind::Trim, one, evidence, last_id);
    (record.event.trim, record.event.outcome) = (Some(trim), outcome);
    record
}

fn record(kind: EventKind, one: &ProcessSample, evidence: String, last_id: &mut u64) -> Record {
    let wall = SystemTime::now();
    *last_id = event_id(wall, *last_id);
    let now = Instant::now();
    let process = ProcessView::of(one, now);
    let best = one.attributed.best();
    let profile_by = best.map(|known| known.profile.meta.kinds.by_names());
    let event = EventView {
        id: *last_id,
        kind,
        at_unix_s: unix_s(wall),
        summary: summary(kind, &process),
        evidence,
        sample_age_s: one.newest().map(|taken| taken.age_s(now)),
        process,
        profile_by: profile_by.unwrap_or_default(),
        trim: None,
        outcome: None,
    };
    Record { event, profile: best.map(|known| Arc::clone(&known.profile)) }
}

fn is_above(limit: &LimitView, percent: u64) -> bool {
    u128::from(limit.used_bytes) * 100 >= u128::from(limit.limit_bytes) * u128::from(percent)
}

/// The cgroup whose memory counts for a process: that of version 1's memory controller if there is one.
fn place(one: &ProcessSample) -> String {
    let cgroup = &one.surroundings.cgroup;
    cgroup.memory.as_ref().or(cgroup.unified.as_ref()).cloned().unwrap_or_default()
}

/// OOM kills on the whole machine since boot (`oom_kill` of `/proc/vmstat`).
fn oom_kills_on_machine() -> Option<u64> {
    let text = read_bounded(Path::new("/proc/vmstat"), VMSTAT_BYTES_MAX).ok()?;
    String::from_utf8_lossy(&text).lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// Whether a process that ended was killed for lack of memory, and how that is known.
fn killed(
    one: &ProcessSample,
    containers: &Containers,
    left: &mut BTreeMap<String, Option<u64>>,
    machine_left: &mut u64,
) -> Option<String> {
    let Some(memory) = &one.surroundings.memory else {
        let rose = *machine_left > 0;
        *machine_left = machine_left.saturating_sub(1);
        return rose.then(|| "the machine's count of OOM kills rose; this was the largest process without a cgroup that ended".to_owned());
    };
    let place = place(one);
    let kills = left.entry(place.clone()).or_insert_with(|| {
        let now = containers.memory(&one.surroundings.cgroup)?;
        Some(now.oom_kills.saturating_sub(memory.oom_kills))
    });
    match kills {
        Some(0) => None,
        Some(kills) => {
            *kills -= 1;
            *machine_left = machine_left.saturating_sub(1);
            Some(format!("the count of OOM kills of cgroup {place} rose"))
        }
        // The cgroup was removed with its container.
        None if *machine_left > 0 && one.limit_view().is_some_and(|limit| is_above(&limit, CALM_PERCENT)) => {
            *machine_left -= 1;
            Some(format!("the machine's count of OOM kills rose, and cgroup {place}, which was near its limit, was removed"))
        }
        None => None,
    }
}

fn summary(kind: EventKind, process: &ProcessView) -> String {
    let what = match kind {
        EventKind::OomKill => "was killed for lack of memory",
        EventKind::MemoryLimit => "is near its memory limit",
        EventKind::Exit => "ended",
        EventKind::Trim => "was to give memory back",
        EventKind::Setting => "runs with a setting that was advised",
    };
    let name = crate::sanitize::terminal(&process.comm);
    let mut text = format!("{name} (pid {}) {what}: {} resident", process.pid, HumanBytes(process.rss_bytes));
    if let Some(heap) = &process.ladder {
        let known = |bytes: Option<u64>| bytes.map_or("not known".to_owned(), |bytes| HumanBytes(bytes).to_string());
        text.push_str(&format!(
            "; heap: extent {}, resident {}, live {}, trimmable {}, pinned {}",
            HumanBytes(heap.ladder.extent_bytes),
            HumanBytes(heap.ladder.resident_bytes),
            known(heap.live()),
            known(heap.ladder.trimmable_bytes),
            known(heap.ladder.pinned_bytes)
        ));
    }
    if let Some(verdict) = &process.verdict {
        text.push_str(&format!("; verdict: {}, {}", verdict.verdict, verdict.summary));
    }
    text
}
