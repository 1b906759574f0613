//! The history as three tables for SQL: samples of the ladder, values of stacks, events. Their columns are the documented schema
//! (`docs/sql.md`, checked by a test).

use std::io::{self, Write};

use rusqlite::{Connection, Row as SqlRow, params};

use super::database::StoreError;
use super::read::{Reader, has_workloads, profile_of, row_of};
use super::row::{COLUMNS, Row};
use super::view::EventView;
use crate::model::view::{ContainerView, WorkloadView};
use crate::parquet::{Column, Type, Value, Writer};
use crate::profile::folded;

const fn text(name: &'static str, meaning: &'static str) -> Column {
    Column { name, of: Type::Text, meaning }
}

const fn integer(name: &'static str, meaning: &'static str) -> Column {
    Column { name, of: Type::Integer, meaning }
}

/// The columns with which each table begins: what the row is about.
const ABOUT: [Column; 13] = [
    text("node", "Host name of the node."),
    Column { name: "measured_at", of: Type::Timestamp, meaning: "When it was measured or noticed, UTC." },
    integer("pid", "Process id."),
    integer("start_ticks", "Start of the process in clock ticks since boot: with the pid it identifies the process."),
    text("comm", "Command name."),
    text("namespace", "Namespace of the pod; null outside pods."),
    text("pod", "Pod."),
    text("container", "Container."),
    text("image", "Image of the container."),
    text("workload_kind", "Kind of the workload: deployment, statefulset, systemd, command, …; null in rows of older agents."),
    text("workload", "Name of the workload."),
    text("service_name", "Service."),
    text("service_version", "Version of the service; null if it is not known."),
];

/// The columns of the table of stacks after those.
const OF_STACK: [Column; 6] = [
    text("mode", "Tier that measured it: exact, governed (estimated), sampled, emitter."),
    text("kind", "Kind of value, such as inuse_space; profile-format.md lists them."),
    text("unit", "bytes or count."),
    text("stack", "Functions, the outermost first, separated by semicolons; without the allocator's own frames."),
    text("function", "The innermost of these functions."),
    integer("value", "The value, in its unit. Kinds alloc_* are of the profile's duration, the others of its end."),
];

/// The columns of the table of events after those.
const OF_EVENT: [Column; 8] = [
    integer("uid", "User of the process."),
    integer("id", "Increases with each event."),
    text("kind", "oom_kill, memory_limit, exit, trim or setting."),
    text("summary", "One sentence: the event, the memory, the verdict."),
    text("evidence", "How it is known, and how certain it is."),
    integer("rss_bytes", "Resident bytes of the process in its last sample."),
    text("verdict", "Its last verdict."),
    text("body", "The whole event as JSON, as /api/v1/events has it."),
];

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Samples of the ladder.
    Ladder,
    /// Values of stacks.
    Stacks,
    /// Events.
    Events,
}

impl Table {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Ladder, Self::Stacks, Self::Events];

    /// Its name, which is that of its file without `.parquet`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ladder => "ladder",
            Self::Stacks => "stacks",
            Self::Events => "events",
        }
    }

    /// Its columns.
    #[must_use]
    pub fn columns(self) -> Vec<Column> {
        let own = match self {
            Self::Ladder => {
                let figures = COLUMNS.map(|name| integer(name, meaning(name)));
                figures.into_iter().chain([text("verdict", "What is wrong with the heap, if anything.")]).collect()
            }
            Self::Stacks => OF_STACK.to_vec(),
            Self::Events => OF_EVENT.to_vec(),
        };
        ABOUT.into_iter().chain(own).collect()
    }
}

/// What a figure of the ladder is.
fn meaning(column: &str) -> &'static str {
    match column {
        "rss_bytes" => "Resident bytes of the process.",
        "rss_bytes_max" => "The largest of the samples that the row stands for: older rows stand for more.",
        "extent_bytes" => "Address space that the allocators hold.",
        "resident_bytes" => "Part of the extent that is in RAM.",
        "swapped_bytes" => "Part of the extent that is in swap.",
        "live_bytes" => "Bytes of blocks in use, counted, or estimated in sampled heaps.",
        "cached_bytes" => "Free bytes in caches of threads.",
        "free_bytes" => "Free bytes.",
        "top_bytes" => "Free bytes at the end of arenas.",
        "trimmable_bytes" => "Bytes that a trim would give back: a prediction.",
        "pinned_bytes" => "Free bytes on resident pages that also have live bytes.",
        "kept_bytes" => "Free bytes below the allocator's thresholds, which it keeps.",
        "unknown_bytes" => "Bytes that could not be told apart.",
        "mmapped_bytes" => "Bytes of blocks with a mapping of their own.",
        "arenas" => "Arenas.",
        "limit_bytes" => "Memory limit of the process's cgroup.",
        "unreached_bytes" => "Bytes of blocks to which no pointer was seen ([leaks]).",
        _ => "",
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Rows.
    pub rows: u64,
    /// Profiles or events of the history that are damaged, and left out.
    pub damaged: u64,
}

/// An export that failed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The history.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The output.
    #[error(transparent)]
    Output(#[from] io::Error),
}

/// A process's names, as a row has them.
#[derive(Debug, Default)]
struct About {
    pid: u32,
    start_ticks: u64,
    comm: String,
    container: Option<ContainerView>,
    workload: Option<WorkloadView>,
}

impl About {
    /// From columns of a query: pid, start_ticks, comm, container, workload.
    fn read(row: &SqlRow<'_>) -> rusqlite::Result<Self> {
        let (container, workload): (Option<String>, Option<String>) = (row.get(3)?, row.get(4)?);
        Ok(Self {
            pid: row.get(0)?,
            start_ticks: row.get::<_, i64>(1)? as u64,
            comm: row.get(2)?,
            container: container.and_then(|text| serde_json::from_str(&text).ok()),
            workload: workload.and_then(|text| serde_json::from_str(&text).ok()),
        })
    }

    fn values<'a>(&'a self, node: &'a str, at_us: i64) -> Vec<Value<'a>> {
        let container = self.container.as_ref();
        let workload = self.workload.as_ref().filter(|workload| !workload.name.is_empty());
        vec![
            Value::Text(node),
            Value::Integer(at_us),
            Value::from(Some(u64::from(self.pid))),
            Value::from(Some(self.start_ticks)),
            Value::Text(&self.comm),
            Value::from(workload.and_then(|one| one.namespace.as_deref()).or(container.and_then(|one| one.namespace.as_deref()))),
            Value::from(container.and_then(|one| one.pod.as_deref())),
            Value::from(container.and_then(|one| one.name.as_deref())),
            Value::from(container.and_then(|one| one.image.as_deref())),
            Value::from(workload.map(|one| one.kind.as_str())),
            Value::from(workload.map(|one| one.name.as_str())),
            Value::from(workload.map(|one| one.service_name.as_str())),
            Value::from(workload.and_then(|one| one.service_version.as_deref())),
        ]
    }
}

/// Microseconds of a second of the history.
fn micros(at_s: i64) -> i64 {
    at_s.saturating_mul(1_000_000)
}

/// Writes a table as a Parquet file: the rows of a span of seconds since the Unix epoch, of the node with this name. Rows are read and written
/// one after the other; memory is bounded by a row group and a profile.
///
/// # Errors
/// What SQLite or the writer reports.
pub fn write(reader: &Reader, table: Table, span: (f64, f64), node: &str, out: &mut dyn Write) -> Result<Written, ExportError> {
    let columns = table.columns();
    let mut writer = Writer::new(out, &columns)?;
    let mut damaged = 0;
    // The writer's error ends a query from inside it.
    let mut failed = None;
    let done = reader.with(|connection| {
        let mut put = |values: &[Value<'_>]| -> rusqlite::Result<()> {
            writer.row(values).map_err(|error| {
                failed = Some(error);
                rusqlite::Error::ExecuteReturnedResults
            })
        };
        match table {
            Table::Ladder => ladder(connection, span, node, &mut put),
            Table::Stacks => stacks(connection, span, node, &mut put, &mut damaged),
            Table::Events => events(connection, span, node, &mut put, &mut damaged),
        }
    });
    if let Some(error) = failed {
        return Err(error.into());
    }
    done?;
    Ok(Written { rows: writer.finish()?, damaged })
}

type Put<'a> = dyn FnMut(&[Value<'_>]) -> rusqlite::Result<()> + 'a;

/// The process's columns in a query.
fn about(connection: &Connection) -> &'static str {
    if has_workloads(connection) { "pid, start_ticks, comm, container, workload" } else { "pid, start_ticks, comm, container, NULL" }
}

fn ladder(connection: &Connection, (from, to): (f64, f64), node: &str, put: &mut Put<'_>) -> rusqlite::Result<()> {
    let mut processes = connection.prepare(&format!("SELECT {}, id FROM process ORDER BY id", about(connection)))?;
    let mut samples = connection.prepare(&format!(
        "SELECT at, {}, verdict FROM sample WHERE process = ?1 AND at BETWEEN ?2 AND ?3 ORDER BY at",
        COLUMNS.join(", ")
    ))?;
    let mut processes = processes.query([])?;
    while let Some(process) = processes.next()? {
        let (of, id) = (About::read(process)?, process.get::<_, i64>(5)?);
        let mut rows = samples.query(params![id, from.floor() as i64, to.ceil() as i64])?;
        while let Some(row) = rows.next()? {
            let row: Row = row_of(row)?;
            let mut values = of.values(node, micros(row.at));
            values.extend(row.values.iter().map(|value| Value::from(*value)));
            values.push(Value::from(row.verdict.map(|kind| kind.name())));
            put(&values)?;
        }
    }
    Ok(())
}

fn stacks(connection: &Connection, (from, to): (f64, f64), node: &str, put: &mut Put<'_>, damaged: &mut u64) -> rusqlite::Result<()> {
    let mut profiles = connection.prepare(&format!(
        "SELECT {}, at, mode, body FROM profile JOIN process ON process.id = profile.process WHERE at BETWEEN ?1 AND ?2 ORDER BY at, process, mode",
        about(connection)
    ))?;
    let mut profiles = profiles.query(params![from.floor() as i64, to.ceil() as i64])?;
    while let Some(row) = profiles.next()? {
        let (of, at, mode): (About, i64, String) = (About::read(row)?, row.get(5)?, row.get(6)?);
        let Ok(profile) = profile_of(&row.get::<_, Vec<u8>>(7)?) else {
            *damaged += 1;
            continue;
        };
        for kind in profile.meta.kinds.iter() {
            for (stack, value) in folded::sums(&profile, kind) {
                let mut values = of.values(node, micros(at));
                let function = stack.rsplit(';').next().unwrap_or_default();
                values.extend([mode.as_str(), kind.name(), kind.unit(), stack.as_str(), function].map(Value::Text));
                values.push(Value::from(Some(value)));
                put(&values)?;
            }
        }
    }
    Ok(())
}

fn events(connection: &Connection, (from, to): (f64, f64), node: &str, put: &mut Put<'_>, damaged: &mut u64) -> rusqlite::Result<()> {
    let mut events = connection.prepare("SELECT body FROM event WHERE id BETWEEN ?1 AND ?2 ORDER BY id")?;
    let mut events = events.query(params![(from * 1e6) as i64, (to * 1e6) as i64])?;
    while let Some(row) = events.next()? {
        let body: String = row.get(0)?;
        let Ok(event) = serde_json::from_str::<EventView>(&body) else {
            *damaged += 1;
            continue;
        };
        let of = About {
            pid: event.process.pid,
            start_ticks: event.process.start_ticks,
            comm: event.process.comm.clone(),
            container: event.process.container.clone(),
            workload: Some(event.process.workload.clone()),
        };
        let mut values = of.values(node, (event.at_unix_s * 1e6) as i64);
        values.push(Value::from(Some(u64::from(event.process.uid))));
        values.push(Value::from(Some(event.id)));
        values.extend([event.kind.name(), &event.summary, &event.evidence].map(Value::Text));
        values.push(Value::from(Some(event.process.rss_bytes)));
        values.push(Value::from(event.process.verdict.as_ref().map(|verdict| verdict.verdict.as_str())));
        values.push(Value::Text(&body));
        put(&values)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_documentation_has_every_column() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/sql.md");
        let documented = std::fs::read_to_string(path).unwrap();
        let row = |column: &Column| {
            let of = match column.of {
                Type::Integer => "BIGINT",
                Type::Timestamp => "TIMESTAMPTZ",
                Type::Text => "VARCHAR",
            };
            format!("| `{}` | {of} | {} |\n", column.name, column.meaning)
        };
        let mut wanted =
            format!("### Columns of all tables\n\n| column | type | |\n|---|---|---|\n{}", ABOUT.iter().map(row).collect::<String>());
        for table in Table::ALL {
            let own: String = table.columns().iter().skip(ABOUT.len()).map(row).collect();
            wanted += &format!("\n### `{}.parquet`\n\n| column | type | |\n|---|---|---|\n{own}", table.name());
        }
        if std::env::var_os("FRAGPROF_BLESS").is_some() {
            let (before, _) = documented.split_once("### Columns of all tables").unwrap();
            std::fs::write(path, before.to_owned() + &wanted).unwrap();
            return;
        }
        assert!(documented.ends_with(&wanted), "FRAGPROF_BLESS=1 cargo test --lib every_column writes docs/sql.md");
    }

    /// A history of one process with a workload: two samples, a profile, an event.
    fn tables(directory: &std::path::Path) {
        use super::super::tests::process;
        use super::super::view::EventKind;
        use super::super::{Database, write::Writer};
        let now = 1_800_000_000;
        let mut one = process(7, 100);
        one.workload =
            WorkloadView { kind: "deployment".into(), name: "web".into(), service_name: "it's \"web\"".into(), ..WorkloadView::default() };
        let mut writer = Writer::new(Database::in_memory().unwrap(), "boot".into());
        writer.samples(now, std::slice::from_ref(&one)).unwrap();
        writer.samples(now + 60, std::slice::from_ref(&one)).unwrap();
        writer.profile(now, &one, &crate::profile::testing::shop()).unwrap();
        let event = EventView {
            id: now as u64 * 1_000_000,
            kind: EventKind::OomKill,
            at_unix_s: now as f64,
            summary: "gone".into(),
            evidence: "counted".into(),
            process: one,
            sample_age_s: None,
            profile_by: Vec::new(),
            trim: None,
            outcome: None,
        };
        writer.event(&event, None).unwrap();
        let reader = Reader::new(writer.database().clone());
        for (table, rows) in [(Table::Ladder, 2..=2), (Table::Stacks, 5..=100), (Table::Events, 1..=1)] {
            let mut file = std::fs::File::create(directory.join(format!("{}.parquet", table.name()))).unwrap();
            let written = write(&reader, table, (0.0, 2e9), "n1", &mut file).unwrap();
            assert!(rows.contains(&written.rows) && written.damaged == 0, "{table:?}: {written:?}");
        }
        let mut nothing = Vec::new();
        assert_eq!(write(&reader, Table::Ladder, (0.0, 1.0), "n1", &mut nothing).unwrap(), Written::default());
        assert!(nothing.starts_with(b"PAR1") && nothing.ends_with(b"PAR1"));
    }

    #[test]
    fn each_table_has_the_rows_of_its_span() {
        tables(tempfile::tempdir().unwrap().path());
    }

    #[test]
    fn an_output_that_fails_ends_the_export_with_its_error() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let reader = Reader::new(super::super::Database::in_memory().unwrap());
        let error = write(&reader, Table::Events, (0.0, 1.0), "n", &mut Full).unwrap_err();
        assert!(matches!(error, ExportError::Output(_)), "{error}");
    }

    /// DuckDB reads what was written, and runs every query of the documentation.
    #[test]
    #[ignore = "needs a Python with DuckDB: make test-sql"]
    fn duckdb_reads_the_tables_and_runs_the_documented_queries() {
        let place = tempfile::tempdir().unwrap();
        let week = place.path().join("week");
        std::fs::create_dir(&week).unwrap();
        tables(&week);
        let documented = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/sql.md")).unwrap();
        let queries: Vec<&str> = documented.split("```sql\n").skip(1).filter_map(|part| part.split("```").next()).collect();
        assert!(queries.len() >= 5);
        let script = "import duckdb, json, sys\n\
            rows = [duckdb.sql(query).fetchall() for query in json.load(sys.stdin)]\n\
            print(json.dumps(rows, default=str))";
        let checks = [
            "SELECT count(*), sum(resident_bytes), min(epoch(measured_at)), min(service_name), count(cached_bytes), min(verdict), typeof(min(measured_at)) FROM 'week/ladder.parquet'",
            "SELECT kind, sum(value) FROM 'week/stacks.parquet' GROUP BY ALL ORDER BY kind",
            "SELECT json_extract_string(min(body), '$.summary'), min(uid) FROM 'week/events.parquet'",
        ];
        let python = std::env::var_os("FRAGPROF_DUCKDB").unwrap_or("python3".into());
        let mut child = std::process::Command::new(python)
            .args(["-c", script])
            .current_dir(place.path())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let all: Vec<&str> = checks.iter().chain(&queries).copied().collect();
        serde_json::to_writer(child.stdin.take().unwrap(), &all).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).unwrap();
        let resident = 2 * ((100_u64 << 20) - 4096);
        let first = serde_json::json!([[2, resident, 1_800_000_000.0, "it's \"web\"", 0, "fragmentation", "TIMESTAMP WITH TIME ZONE"]]);
        // DuckDB's sums are of 128 bits, which arrive as numbers.
        assert_eq!(rows[0], first);
        let shop = crate::profile::testing::shop();
        let sum = |kind| shop.stacks().iter().map(|stack| stack.values.get(kind)).sum::<u64>();
        for pair in rows[1].as_array().unwrap() {
            let kind = crate::profile::ValueKind::ALL.into_iter().find(|kind| pair[0] == kind.name()).unwrap();
            assert_eq!(pair[1].as_u64(), Some(sum(kind)), "{pair}");
        }
        assert_eq!(rows[2], serde_json::json!([["gone", 0]]));
        let results = rows.iter().skip(checks.len()).filter_map(serde_json::Value::as_array);
        assert!(results.filter(|rows| !rows.is_empty()).count() >= 3, "{rows:?}");
    }
}
