//! Reading the history: processes of a span, the ladder over time, one moment, profiles and events.

use std::collections::BTreeMap;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, Row as SqlRow, params};

use super::database::{Database, StoreError};
use super::row::{COLUMNS, Row, verdict_of};
use super::view::{EventView, EventsView, Figures, HistoryView, LadderAt, PastProcess, PastProcesses};
use crate::heap::ladder::Ladder;
use crate::profile::{Profile, ValueKind};

/// Most processes in one answer.
const PROCESSES_MAX: usize = 1000;
/// Most profile times and events in one answer.
const MARKS_MAX: i64 = 500;

/// Reads a history.
#[derive(Debug, Clone)]
pub struct Reader(Database);

/// A process in the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredProcess {
    id: i64,
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Its name.
    pub comm: String,
}

impl Reader {
    /// Reads this one.
    #[must_use]
    pub fn new(database: Database) -> Self {
        Self(database)
    }

    pub(super) fn with<T>(&self, ask: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, StoreError> {
        ask(&self.0.lock()).map_err(self.0.fail())
    }

    /// The process with a pid: the last one seen, unless `start_ticks` identifies another.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn find(&self, pid: u32, start_ticks: Option<u64>) -> Result<Option<StoredProcess>, StoreError> {
        self.with(|connection| {
            connection
                .query_row(
                    "SELECT id, pid, start_ticks, comm FROM process WHERE pid = ?1 AND (?2 IS NULL OR start_ticks = ?2)
                     ORDER BY (SELECT max(at) FROM sample WHERE process = id) DESC, id DESC LIMIT 1",
                    params![pid, start_ticks.map(|ticks| ticks as i64)],
                    |row| {
                        Ok(StoredProcess {
                            id: row.get(0)?,
                            pid: row.get(1)?,
                            start_ticks: row.get::<_, i64>(2)? as u64,
                            comm: row.get(3)?,
                        })
                    },
                )
                .optional()
        })
    }

    /// The processes with samples in a span of seconds since the Unix epoch, the one seen last first.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn processes(&self, from: f64, to: f64) -> Result<PastProcesses, StoreError> {
        let mut processes = self.with(|connection| {
            let workload = if has_workloads(connection) { "workload" } else { "NULL" };
            let mut statement = connection.prepare_cached(&format!(
                "SELECT pid, start_ticks, comm, container, first, last, {workload} FROM (SELECT process.*,
                     (SELECT min(at) FROM sample WHERE process = process.id AND at BETWEEN ?1 AND ?2) AS first,
                     (SELECT max(at) FROM sample WHERE process = process.id AND at BETWEEN ?1 AND ?2) AS last FROM process)
                 WHERE last IS NOT NULL ORDER BY last DESC, pid",
            ))?;
            let rows = statement.query_map(params![from.floor() as i64, to.ceil() as i64], |row| {
                let (container, workload): (Option<String>, Option<String>) = (row.get(3)?, row.get(6)?);
                Ok(PastProcess {
                    pid: row.get(0)?,
                    start_ticks: row.get::<_, i64>(1)? as u64,
                    comm: row.get(2)?,
                    container: container.and_then(|text| serde_json::from_str(&text).ok()),
                    workload: workload.and_then(|text| serde_json::from_str(&text).ok()),
                    first_unix_s: row.get::<_, i64>(4)? as f64,
                    last_unix_s: row.get::<_, i64>(5)? as f64,
                    is_running: false,
                })
            })?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        })?;
        let processes_dropped = processes.len().saturating_sub(PROCESSES_MAX) as u64;
        processes.truncate(PROCESSES_MAX);
        Ok(PastProcesses { from_unix_s: from, to_unix_s: to, processes, processes_dropped })
    }

    /// The ladder of a process over a span, in at most `points` points.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn history(&self, found: &StoredProcess, from: f64, to: f64, points: u64) -> Result<HistoryView, StoreError> {
        let step = (((to - from) / points.max(1) as f64).ceil() as i64).max(1);
        let (first, last) = (from.floor() as i64, to.ceil() as i64);
        let rows = self.with(|connection| {
            // Within a group, SQLite takes the other columns from the row that has the maximum.
            let mut statement = connection.prepare_cached(&format!(
                "SELECT max(at), {}, verdict FROM sample WHERE process = ?1 AND at BETWEEN ?2 AND ?3 GROUP BY at / ?4 ORDER BY 1",
                COLUMNS.join(", ")
            ))?;
            let rows = statement.query_map(params![found.id, first, last, step], row_of)?;
            let mut rows = rows.collect::<rusqlite::Result<Vec<Row>>>()?;
            let mut peaks = connection.prepare_cached(
                "SELECT max(rss_bytes_max) FROM sample WHERE process = ?1 AND at BETWEEN ?2 AND ?3 GROUP BY at / ?4 ORDER BY at / ?4",
            )?;
            let peaks = peaks.query_map(params![found.id, first, last, step], |row| row.get::<_, Option<i64>>(0))?;
            for (row, peak) in rows.iter_mut().zip(peaks) {
                if let Some(place) = row.values.get_mut(1) {
                    *place = peak?.map(|peak| peak as u64);
                }
            }
            Ok(rows)
        })?;
        let mut view = HistoryView {
            pid: found.pid,
            start_ticks: found.start_ticks,
            comm: found.comm.clone(),
            from_unix_s: from,
            to_unix_s: to,
            step_s: step as f64,
            ..HistoryView::default()
        };
        fill(&mut view, &rows);
        view.profiles_unix_s = self.with(|connection| {
            let mut statement = connection
                .prepare_cached("SELECT DISTINCT at FROM profile WHERE process = ?1 AND at BETWEEN ?2 AND ?3 ORDER BY at DESC LIMIT ?4")?;
            let times = statement.query_map(params![found.id, first, last, MARKS_MAX], |row| row.get::<_, i64>(0))?;
            let mut times = times.map(|at| at.map(|at| at as f64)).collect::<rusqlite::Result<Vec<f64>>>()?;
            times.reverse();
            Ok(times)
        })?;
        view.events = self.events(from, to, MARKS_MAX as u64, Some((found.pid, found.start_ticks)))?.events;
        Ok(view)
    }

    /// The last sample of a process at or before a time.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn at(&self, found: &StoredProcess, at: f64) -> Result<Option<LadderAt>, StoreError> {
        let row = self.with(|connection| {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT at, {}, verdict FROM sample WHERE process = ?1 AND at <= ?2 ORDER BY at DESC LIMIT 1",
                COLUMNS.join(", ")
            ))?;
            statement.query_row(params![found.id, at.ceil() as i64], row_of).optional()
        })?;
        Ok(row.map(|row| ladder_at(&row)))
    }

    /// The first sample of a process.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn first(&self, found: &StoredProcess) -> Result<Option<LadderAt>, StoreError> {
        let at: Option<i64> =
            self.with(|connection| connection.query_row("SELECT min(at) FROM sample WHERE process = ?1", [found.id], |row| row.get(0)))?;
        at.map_or(Ok(None), |at| self.at(found, at as f64))
    }

    /// The last profile of a process at or before a time that measured a kind, and its time.
    ///
    /// # Errors
    /// What SQLite reports, or a profile that cannot be read.
    pub fn profile_at(&self, found: &StoredProcess, kind: ValueKind, at: f64) -> Result<Option<(Profile, f64)>, StoreError> {
        let body = self.with(|connection| {
            connection
                .query_row(
                    "SELECT body, at FROM profile WHERE process = ?1 AND at <= ?2 AND instr(',' || kinds || ',', ',' || ?3 || ',') > 0
                     ORDER BY at DESC, mode LIMIT 1",
                    params![found.id, at.ceil() as i64, kind.name()],
                    |row| Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, i64>(1)?)),
                )
                .optional()
        })?;
        body.map(|(body, at)| Ok((profile_of(&body)?, at as f64))).transpose()
    }

    /// Events of a span, the newest first, of all processes or of one.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn events(&self, from: f64, to: f64, limit: u64, of: Option<(u32, u64)>) -> Result<EventsView, StoreError> {
        let micros = |seconds: f64| (seconds * 1e6) as i64;
        self.with(|connection| {
            let (pid, ticks) = of.map_or((None, None), |(pid, ticks)| (Some(pid), Some(ticks as i64)));
            let within = "FROM event WHERE id BETWEEN ?1 AND ?2 AND (?3 IS NULL OR pid = ?3) AND (?4 IS NULL OR start_ticks = ?4)";
            let bounds = params![micros(from), micros(to), pid, ticks];
            let all: i64 = connection.query_row(&format!("SELECT count(*) {within}"), bounds, |row| row.get(0))?;
            let mut statement = connection.prepare_cached(&format!("SELECT body {within} ORDER BY id DESC LIMIT ?5"))?;
            let limit = i64::try_from(limit).unwrap_or(i64::MAX);
            let rows = statement.query_map(params![micros(from), micros(to), pid, ticks, limit], |row| row.get::<_, String>(0))?;
            let mut events: Vec<EventView> = Vec::new();
            for body in rows {
                events.extend(serde_json::from_str(&body?).ok());
            }
            let events_left_out = u64::try_from(all).unwrap_or(0).saturating_sub(events.len() as u64);
            Ok(EventsView { events, events_left_out })
        })
    }

    /// One event.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn event(&self, id: u64) -> Result<Option<EventView>, StoreError> {
        let body: Option<String> =
            self.with(|connection| connection.query_row("SELECT body FROM event WHERE id = ?1", [id as i64], |row| row.get(0)).optional())?;
        Ok(body.and_then(|body| serde_json::from_str(&body).ok()))
    }

    /// The profile of an event.
    ///
    /// # Errors
    /// What SQLite reports, or a profile that cannot be read.
    pub fn event_profile(&self, id: u64) -> Result<Option<Profile>, StoreError> {
        let body: Option<Option<Vec<u8>>> = self
            .with(|connection| connection.query_row("SELECT profile FROM event WHERE id = ?1", [id as i64], |row| row.get(0)).optional())?;
        body.flatten().map(|body| profile_of(&body)).transpose()
    }

    /// Bytes in use.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn size_bytes(&self) -> Result<u64, StoreError> {
        self.with(super::thin::size_bytes)
    }
}

/// Whether processes have their workloads: a history that no agent of this version has written yet has none.
pub(super) fn has_workloads(connection: &Connection) -> bool {
    connection.prepare_cached("SELECT workload FROM process LIMIT 0").is_ok()
}

pub(super) fn profile_of(body: &[u8]) -> Result<Profile, StoreError> {
    crate::profile::pprof::read(body).map_err(|error| StoreError::Profile(error.to_string()))
}

/// A row of `at`, the columns, the verdict.
pub(super) fn row_of(row: &SqlRow<'_>) -> rusqlite::Result<Row> {
    let mut values = [None; COLUMNS.len()];
    for (index, value) in values.iter_mut().enumerate() {
        *value = match row.get::<_, Value>(index + 1)? {
            Value::Integer(number) => u64::try_from(number).ok(),
            _ => None,
        };
    }
    let verdict: Option<i64> = row.get(COLUMNS.len() + 1)?;
    Ok(Row { at: row.get(0)?, values, verdict: verdict.and_then(verdict_of) })
}

/// The stored figures; `of` gives the value of a column.
fn figures<T>(of: impl Fn(&str) -> T) -> Figures<T> {
    Figures {
        rss_bytes: of("rss_bytes"),
        ladder: Ladder {
            extent_bytes: of("extent_bytes"),
            resident_bytes: of("resident_bytes"),
            live_bytes: of("live_bytes"),
            trimmable_bytes: of("trimmable_bytes"),
            pinned_bytes: of("pinned_bytes"),
            unknown_bytes: of("unknown_bytes"),
        },
        swapped_bytes: of("swapped_bytes"),
        cached_bytes: of("cached_bytes"),
        free_bytes: of("free_bytes"),
        top_bytes: of("top_bytes"),
        kept_bytes: of("kept_bytes"),
        mmapped_bytes: of("mmapped_bytes"),
        arenas: of("arenas"),
    }
}

fn fill(view: &mut HistoryView, rows: &[Row]) {
    let column = |name: &str| rows.iter().map(|row| row.value(name)).collect::<Vec<_>>();
    view.at_unix_s = rows.iter().map(|row| row.at as f64).collect();
    view.figures = figures(column);
    view.rss_bytes_max = column("rss_bytes_max");
    view.limit_bytes = column("limit_bytes");
    view.unreached_bytes = column("unreached_bytes");
    view.verdict = rows.iter().map(|row| row.verdict.map(|kind| kind.name().to_owned())).collect();
}

fn ladder_at(row: &Row) -> LadderAt {
    let verdict = row.verdict.map(|kind| kind.name().to_owned());
    LadderAt { at_unix_s: row.at as f64, figures: figures(|column| row.value(column)), verdict }
}

impl LadderAt {
    /// What changed to a later one, by key; a figure that either does not know is left out.
    #[must_use]
    pub fn delta(&self, to: &Self) -> BTreeMap<String, i64> {
        // The figures are numbers or null, which always serialise.
        let keys = |at: &Self| serde_json::to_value(&at.figures).unwrap_or_default();
        let (from, to) = (keys(self), keys(to));
        let delta = |from: u64, to: u64| i64::try_from(i128::from(to) - i128::from(from)).unwrap_or(i64::MAX);
        let bytes = from.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_bytes"));
        bytes.filter_map(|(key, from)| Some((key.clone(), delta(from.as_u64()?, to.get(key)?.as_u64()?)))).collect()
    }
}
