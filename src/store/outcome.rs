//! What remedies saved that were applied, beside what was predicted: one row each, written with its event.

use rusqlite::{Connection, OptionalExtension as _, params};

use super::database::StoreError;
use super::read::Reader;
use super::view::{OutcomeView, TrackRecord};
use crate::model::view::ContainerView;

/// Most actions in one answer; a verdict has a handful of remedies.
const ACTIONS_MAX: i64 = 64;

/// What a process's remedies are remembered under: the container's name, or the pod's, or else the command.
#[must_use]
pub fn workload(container: Option<&ContainerView>, comm: &str) -> String {
    let named = container.and_then(|container| container.name.as_deref().or(container.pod.as_deref()));
    named.unwrap_or(comm).to_owned()
}

/// Adds one.
pub(super) fn insert(connection: &Connection, id: u64, outcome: &OutcomeView) -> rusqlite::Result<()> {
    let values = params![
        id as i64,
        outcome.workload,
        outcome.action,
        outcome.at_most,
        i64::try_from(outcome.predicted_bytes).unwrap_or(i64::MAX),
        outcome.saved_bytes
    ];
    connection.execute("INSERT OR REPLACE INTO outcome VALUES (?1, ?2, ?3, ?4, ?5, ?6)", values).map(|_| ())
}

impl Reader {
    /// What predictions were worth, by remedy: those of a workload where it was checked there, else those of all workloads. Empty if the file
    /// is of an agent that did not check any.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn track_records(&self, workload: &str) -> Result<Vec<TrackRecord>, StoreError> {
        self.with(|connection| {
            let has_table = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'outcome'";
            if connection.query_row(has_table, [], |_| Ok(())).optional()?.is_none() {
                return Ok(Vec::new());
            }
            let mut statement = connection.prepare_cached(
                "SELECT action, max(at_most), is_own, count(*), sum(predicted_bytes), sum(saved_bytes),
                     min(saved_bytes * 1.0 / max(predicted_bytes, 1)), max(saved_bytes * 1.0 / max(predicted_bytes, 1))
                 FROM (SELECT *, workload = ?1 AS is_own, max(workload = ?1) OVER (PARTITION BY action) AS has_own FROM outcome)
                 WHERE is_own = has_own GROUP BY action, is_own ORDER BY action LIMIT ?2",
            )?;
            let rows = statement.query_map(params![workload, ACTIONS_MAX], |row| {
                let count = |index: usize| row.get::<_, i64>(index).map(|value| u64::try_from(value).unwrap_or(0));
                Ok(TrackRecord {
                    action: row.get(0)?,
                    at_most: row.get(1)?,
                    of_workload: row.get(2)?,
                    checked: count(3)?,
                    predicted_bytes: count(4)?,
                    saved_bytes: row.get(5)?,
                    saved_ratio_min: row.get(6)?,
                    saved_ratio_max: row.get(7)?,
                })
            })?;
            rows.collect()
        })
    }

    /// The workload of a process that the history knows; `None` if it does not.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn workload_of(&self, pid: u32, start_ticks: u64) -> Result<Option<String>, StoreError> {
        self.with(|connection| {
            let query = "SELECT comm, container FROM process WHERE pid = ?1 AND start_ticks = ?2 ORDER BY id DESC LIMIT 1";
            let found = connection
                .query_row(query, params![pid, start_ticks as i64], |row| Ok((row.get::<_, String>(0)?, row.get::<_, Option<String>>(1)?)));
            Ok(found.optional()?.map(|(comm, container)| {
                let container = container.and_then(|text| serde_json::from_str(&text).ok());
                workload(container.as_ref(), &comm)
            }))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::database::Database;
    use super::super::thin::{Limits, thin};
    use super::super::view::{EventKind, EventView};
    use super::super::write::Writer;
    use super::*;
    use crate::store::tests::process;

    const NOW: u64 = 1_800_000_000;

    fn event(id: u64, workload: &str, action: &str, predicted_bytes: u64, saved_bytes: i64) -> EventView {
        let outcome = OutcomeView {
            workload: workload.into(),
            action: action.into(),
            applied: "malloc_trim(0)".into(),
            predicted_bytes,
            at_most: false,
            saved_bytes,
            basis: String::new(),
        };
        EventView {
            id: (NOW + id) * 1_000_000,
            kind: EventKind::Trim,
            at_unix_s: NOW as f64,
            summary: String::new(),
            evidence: String::new(),
            process: process(7, 1),
            sample_age_s: None,
            profile_by: Vec::new(),
            trim: None,
            outcome: Some(outcome),
        }
    }

    #[test]
    fn predictions_are_judged_by_their_own_workload_where_it_was_checked_and_else_by_all() {
        let mut writer = Writer::new(Database::in_memory().unwrap(), "boot".into());
        let reader = Reader::new(writer.database().clone());
        assert_eq!(reader.track_records("web").unwrap(), []);
        for (id, workload, saved) in [(1, "web", 990), (2, "web", 1000), (3, "db", -200)] {
            writer.event(&event(id, workload, "trim", 1000, saved), None).unwrap();
        }
        let records = reader.track_records("web").unwrap();
        assert_eq!(records.len(), 1);
        let web = &records[0];
        assert_eq!((web.checked, web.of_workload, web.predicted_bytes, web.saved_bytes), (2, true, 2000, 1990));
        assert_eq!((web.saved_ratio_min, web.saved_ratio_max), (0.99, 1.0));
        assert_eq!(web.words(), "checked twice on this workload: it saved 99 to 100 % of what was predicted");
        let other = reader.track_records("cache").unwrap().remove(0);
        assert_eq!((other.checked, other.of_workload, other.saved_ratio_min), (3, false, -0.2));
        assert!(other.words().contains("3 times on other workloads"), "{}", other.words());
    }

    #[test]
    fn they_are_removed_with_their_events() {
        let mut writer = Writer::new(Database::in_memory().unwrap(), "boot".into());
        writer.event(&event(0, "web", "trim", 1, 1), None).unwrap();
        thin(writer.database(), NOW as i64 + 100, Limits { size_bytes_max: u64::MAX, age_s_max: 50 }).unwrap();
        assert_eq!(Reader::new(writer.database().clone()).track_records("web").unwrap(), []);
    }
}
