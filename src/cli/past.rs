//! `report --since` and `diff --from --to`: processes in the agent's history.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::by::By;
use super::output;
use crate::error::{ExitStatus, Failed};
use crate::model::view::unix_s;
use crate::sanitize;
use crate::server::api::history::difference;
use crate::store::view::{DiffView, EventView, HistoryView, PastProcess};
use crate::store::{Database, Reader, StoreError};
use crate::units::HumanBytes;

/// The agent's default history directory (`StateDirectory=` of the systemd unit).
pub const DEFAULT_DIRECTORY: &str = "/var/lib/fragprof";
/// Points of a history that is printed as text.
const POINTS: u64 = 12;
/// Points of a history as JSON.
const JSON_POINTS: u64 = 300;
/// Events shown.
const EVENTS: u64 = 20;
/// Processes shown.
const PROCESSES: usize = 30;

/// Opens the agent's history for reading.
///
/// # Errors
/// Status 2 if there is none.
pub fn open(directory: Option<&Path>) -> anyhow::Result<Reader> {
    let directory = directory.map_or_else(|| PathBuf::from(DEFAULT_DIRECTORY), Path::to_path_buf);
    let opened = Database::open_to_read(&directory).map_err(|error| match &error {
        StoreError::Missing(_) => Failed::new(ExitStatus::Usage, format!("{error}; give its directory with --history DIRECTORY")),
        _ => Failed::new(ExitStatus::Failure, error.to_string()),
    });
    Ok(Reader::new(opened?))
}

/// The same, or `None` if no directory is given and there is no history in the default one, or it may not be read.
///
/// # Errors
/// If the given directory has none.
pub fn open_if_any(directory: Option<&Path>) -> anyhow::Result<Option<Reader>> {
    match open(directory) {
        Ok(reader) => Ok(Some(reader)),
        Err(error) if directory.is_some() => Err(error),
        Err(error) => {
            tracing::debug!("{error:#}");
            Ok(None)
        }
    }
}

/// A time before now, or `@SECONDS` since the Unix epoch.
///
/// # Errors
/// If the text is not such a time.
pub fn parse_time(text: &str) -> Result<f64, String> {
    let now = unix_s(SystemTime::now());
    match text.strip_prefix('@') {
        Some(seconds) => {
            seconds.parse().ok().filter(|at: &f64| at.is_finite()).ok_or_else(|| "@ must be followed by seconds since 1970".to_owned())
        }
        None if text == "now" => Ok(now),
        None => super::record::parse_duration(text).map(|before: Duration| now - before.as_secs_f64()),
    }
}

/// Prints the history from `since` to now: all processes, or one over time.
///
/// # Errors
/// If the history cannot be read or has nothing of the process.
pub fn report(reader: &Reader, since: f64, pid: Option<u32>, json: bool) -> anyhow::Result<()> {
    let now = unix_s(SystemTime::now());
    let Some(pid) = pid else {
        let past = reader.processes(since, now)?;
        let events = reader.events(since, now, EVENTS, None)?;
        if json {
            return output::print(&(serde_json::to_string(&serde_json::json!({ "processes": past, "events": events }))? + "\n"));
        }
        let mut text =
            format!("{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} PROCESS\n", "PID", "RESIDENT", "LIVE", "TRIMMABLE", "PINNED", "Δ RESIDENT");
        for one in past.processes.iter().take(PROCESSES) {
            text.push_str(&row(reader, one)?);
        }
        let more = past.processes.len().saturating_sub(PROCESSES) as u64 + past.processes_dropped;
        if more > 0 {
            let _ = writeln!(text, "{more} more");
        }
        push_events(&mut text, &events.events, now);
        return output::print(&text);
    };
    let found = reader.find(pid, None)?.ok_or_else(|| unknown(pid))?;
    let view = reader.history(&found, since, now, if json { JSON_POINTS } else { POINTS })?;
    if json {
        return output::print(&(serde_json::to_string(&view)? + "\n"));
    }
    output::print(&page(&view, now))
}

fn unknown(pid: u32) -> Failed {
    Failed::new(ExitStatus::Target, format!("process {pid} is not in the history"))
}

fn row(reader: &Reader, one: &PastProcess) -> anyhow::Result<String> {
    let found = reader.find(one.pid, Some(one.start_ticks))?.ok_or_else(|| unknown(one.pid))?;
    let (first, last) = (reader.at(&found, one.first_unix_s)?, reader.at(&found, one.last_unix_s)?);
    let Some((first, last)) = first.zip(last) else { return Ok(String::new()) };
    let delta = first.delta(&last).get("rss_bytes").copied().unwrap_or(0);
    Ok(format!(
        "{:>8} {:>10} {:>10} {:>10} {:>10} {:>10} {}{}\n",
        one.pid,
        shown(last.figures.rss_bytes),
        shown(last.figures.ladder.live_bytes),
        shown(last.figures.ladder.trimmable_bytes),
        shown(last.figures.ladder.pinned_bytes),
        signed(delta),
        sanitize::terminal(&one.comm),
        last.verdict.map(|verdict| format!("  {verdict}")).unwrap_or_default()
    ))
}

fn shown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), |bytes| HumanBytes(bytes).to_string())
}

fn signed(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "+" };
    format!("{sign}{}", HumanBytes(bytes.unsigned_abs()))
}

fn ago(at: f64, now: f64) -> String {
    let seconds = (now - at).max(0.0) as u64;
    match seconds {
        0..120 => format!("{seconds} s ago"),
        120..7200 => format!("{} min ago", seconds / 60),
        7200..172_800 => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / 86400),
    }
}

fn page(view: &HistoryView, now: f64) -> String {
    let mut text = format!("{} (pid {})\n\n", sanitize::terminal(&view.comm), view.pid);
    let _ = writeln!(
        text,
        "{:>12} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  VERDICT",
        "WHEN", "RESIDENT", "EXTENT", "HEAP RES.", "LIVE", "TRIMMABLE", "PINNED"
    );
    for (index, at) in view.at_unix_s.iter().enumerate() {
        let cell = |column: &[Option<u64>]| shown(column.get(index).copied().flatten());
        let verdict = view.verdict.get(index).cloned().flatten().unwrap_or_default();
        let _ = writeln!(
            text,
            "{:>12} {:>10} {:>10} {:>10} {:>10} {:>10} {:>10}  {verdict}",
            ago(*at, now),
            cell(&view.figures.rss_bytes),
            cell(&view.figures.ladder.extent_bytes),
            cell(&view.figures.ladder.resident_bytes),
            cell(&view.figures.ladder.live_bytes),
            cell(&view.figures.ladder.trimmable_bytes),
            cell(&view.figures.ladder.pinned_bytes)
        );
    }
    push_events(&mut text, &view.events, now);
    text
}

fn push_events(text: &mut String, events: &[EventView], now: f64) {
    for event in events {
        let _ = writeln!(
            text,
            "\n{} {}: {}\n             ({})",
            ago(event.at_unix_s, now),
            event.kind.name(),
            event.summary,
            sanitize::terminal(&event.evidence)
        );
    }
}

/// Prints what changed in a process between two times.
///
/// # Errors
/// If the history has no samples of it.
pub fn diff(reader: &Reader, pid: u32, from: f64, to: f64, by: By, json: bool) -> anyhow::Result<()> {
    let found = reader.find(pid, None)?.ok_or_else(|| unknown(pid))?;
    let changed = difference(reader, &found, from, to, by.kind())?;
    let changed =
        changed.ok_or_else(|| Failed::new(ExitStatus::Target, format!("the history has no sample of process {pid} from these times")))?;
    if json {
        return output::print(&(serde_json::to_string(&changed)? + "\n"));
    }
    output::print(&changes(&changed, &found.comm))
}

fn changes(view: &DiffView, comm: &str) -> String {
    let now = unix_s(SystemTime::now());
    let (from, to) = (ago(view.from.at_unix_s, now), ago(view.to.at_unix_s, now));
    let mut text = format!("{} (pid {}): {from} compared with {to}\n\n", sanitize::terminal(comm), view.pid);
    for (key, delta) in &view.delta_bytes {
        let _ = writeln!(text, "{:>12}  {}", signed(*delta), key.trim_end_matches("_bytes"));
    }
    let Some(stacks) = &view.stacks else {
        text.push_str("\nno stacks: the history does not have two profiles of this process that measured this value\n");
        return text;
    };
    text.push('\n');
    for row in stacks.stacks.iter().take(20) {
        let _ = writeln!(text, "{:>12}  {}", signed(row.delta), row.frames.join(" ← "));
    }
    text
}
