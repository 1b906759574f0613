//! Writing samples, profiles and events. Each call is one transaction: all or nothing.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, Transaction, params, params_from_iter};

use super::database::{Database, StoreError};
use super::outcome;
use super::row::{COLUMNS, Row, verdict_number};
use super::view::EventView;
use crate::model::view::{ProcessView, WorkloadView};
use crate::profile::Profile;

/// Step of a new row, in seconds: 0 until it is thinned.
const STEP_FRESH: i64 = 0;
/// Most processes whose row number is cached; beyond it all are looked up again.
const KNOWN_MAX: usize = 20_000;

/// A process's row: its number, and the names that it has.
#[derive(Debug, Clone)]
struct Known {
    id: i64,
    comm: String,
    workload: WorkloadView,
}

/// Rows written in a transaction, by pid and start time.
type Fresh = Vec<((u32, u64), Known)>;

/// Writes to a history.
#[derive(Debug)]
pub struct Writer {
    database: Database,
    boot_id: String,
    known: HashMap<(u32, u64), Known>,
}

impl Writer {
    /// For the boot with this id.
    #[must_use]
    pub fn new(database: Database, boot_id: String) -> Self {
        Self { database, boot_id, known: HashMap::new() }
    }

    /// The history.
    #[must_use]
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// Adds a sample of each process at one time. Returns the rows written.
    ///
    /// # Errors
    /// What SQLite reports; nothing was written then.
    pub fn samples(&mut self, at: i64, processes: &[ProcessView]) -> Result<u64, StoreError> {
        let fail = self.database.fail();
        let database = self.database.clone();
        let mut connection = database.lock();
        let transaction = connection.transaction().map_err(&fail)?;
        let mut rows = 0;
        let mut fresh = Vec::new();
        for process in processes {
            let id = self.process(&transaction, process, &mut fresh).map_err(&fail)?;
            insert(&transaction, id, &Row::of(at, process)).map_err(&fail)?;
            rows += 1;
        }
        transaction.commit().map_err(&fail)?;
        self.remember(fresh);
        Ok(rows)
    }

    /// Adds a profile of a process.
    ///
    /// # Errors
    /// What SQLite reports; nothing was written then.
    pub fn profile(&mut self, at: i64, process: &ProcessView, profile: &Profile) -> Result<(), StoreError> {
        let fail = self.database.fail();
        let body = body_of(profile)?;
        let database = self.database.clone();
        let mut connection = database.lock();
        let transaction = connection.transaction().map_err(&fail)?;
        let mut fresh = Vec::new();
        let id = self.process(&transaction, process, &mut fresh).map_err(&fail)?;
        let kinds: Vec<&str> = profile.meta.kinds.iter().map(|kind| kind.name()).collect();
        let values = params![id, at, profile.meta.mode.name(), kinds.join(","), body];
        transaction.execute("INSERT OR REPLACE INTO profile VALUES (?1, ?2, ?3, ?4, ?5)", values).map_err(&fail)?;
        transaction.commit().map_err(&fail)?;
        self.remember(fresh);
        Ok(())
    }

    /// Adds an event with its profile.
    ///
    /// # Errors
    /// What SQLite reports; nothing was written then.
    pub fn event(&mut self, event: &EventView, profile: Option<&Profile>) -> Result<(), StoreError> {
        let body = serde_json::to_string(event).map_err(|error| StoreError::Profile(error.to_string()))?;
        let profile = profile.map(body_of).transpose()?;
        let values = params![event.id as i64, event.process.pid, event.process.start_ticks as i64, body, profile];
        let fail = self.database.fail();
        let mut connection = self.database.lock();
        let transaction = connection.transaction().map_err(&fail)?;
        transaction.execute("INSERT OR REPLACE INTO event VALUES (?1, ?2, ?3, ?4, ?5)", values).map_err(&fail)?;
        if let Some(outcome) = &event.outcome {
            outcome::insert(&transaction, event.id, outcome).map_err(&fail)?;
        }
        transaction.commit().map_err(&fail)
    }

    /// The row number of a process; new ones are added, and names that changed.
    fn process(&self, transaction: &Transaction<'_>, process: &ProcessView, fresh: &mut Fresh) -> rusqlite::Result<i64> {
        let key = (process.pid, process.start_ticks);
        // A container's names become known, or change, only together with its workload's.
        if let Some(known) = self.known.get(&key).filter(|known| known.comm == process.comm && known.workload == process.workload) {
            return Ok(known.id);
        }
        let container = process.container.as_ref().and_then(|container| serde_json::to_string(container).ok());
        let workload = serde_json::to_string(&process.workload).ok();
        let id: i64 = transaction.query_row(
            "INSERT INTO process (boot_id, pid, start_ticks, comm, container, workload) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
             ON CONFLICT (boot_id, pid, start_ticks) DO UPDATE SET comm = ?4, container = ?5, workload = ?6 RETURNING id",
            params![self.boot_id, process.pid, process.start_ticks as i64, process.comm, container, workload],
            |row| row.get(0),
        )?;
        fresh.push((key, Known { id, comm: process.comm.clone(), workload: process.workload.clone() }));
        Ok(id)
    }

    /// Only after the commit: a row that was rolled back has no number.
    fn remember(&mut self, fresh: Fresh) {
        if self.known.len() + fresh.len() > KNOWN_MAX {
            self.known.clear();
        }
        self.known.extend(fresh);
    }

    /// Drops cached row numbers, after processes were removed.
    pub fn forget(&mut self) {
        self.known.clear();
    }
}

fn body_of(profile: &Profile) -> Result<Vec<u8>, StoreError> {
    let mut body = Vec::new();
    crate::profile::pprof::write(profile, &mut body).map_err(|error| StoreError::Profile(error.to_string()))?;
    Ok(body)
}

fn insert(transaction: &Transaction<'_>, process: i64, row: &Row) -> rusqlite::Result<()> {
    let places: Vec<String> = (1..=COLUMNS.len() + 4).map(|place| format!("?{place}")).collect();
    // By name: a file that has been of an older version has its columns in another order.
    let (columns, places) = (COLUMNS.join(", "), places.join(", "));
    let text = format!("INSERT OR REPLACE INTO sample (process, at, step, {columns}, verdict) VALUES ({places})");
    let mut statement = transaction.prepare_cached(&text)?;
    let signed = |value: Option<u64>| value.map(|value| i64::try_from(value).unwrap_or(i64::MAX));
    let head = [Some(process), Some(row.at), Some(STEP_FRESH)];
    let values = head.into_iter().chain(row.values.into_iter().map(signed)).chain([row.verdict.and_then(verdict_number)]);
    statement.execute(params_from_iter(values))?;
    Ok(())
}

/// Newest time that was written; 0 in an empty history.
///
/// # Errors
/// What SQLite reports.
pub fn newest(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("SELECT max(at) FROM sample", [], |row| row.get(0)).optional().map(|at| at.flatten().unwrap_or(0))
}
