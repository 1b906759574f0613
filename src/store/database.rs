//! Opening the history, and its tables.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use thiserror::Error;

use super::row::COLUMNS;

/// Name of the file in the directory.
pub const FILE: &str = "history.db";
/// Version of the tables (`user_version`). A file of another version is set aside, not changed.
const VERSION: i64 = 1;
/// How long a reader waits for a writer.
const BUSY: Duration = Duration::from_secs(5);
/// The log beside the database is cut to this length after use.
const LOG_BYTES_MAX: i64 = 4 << 20;

/// Why the history cannot be read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The directory.
    #[error("cannot make the history's directory {path}: {source} (history.directory)")]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// SQLite's error.
    #[error("the history {path}: {source}")]
    Sqlite {
        /// The file, or `(memory)`.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
    /// A profile that cannot be read back.
    #[error("a profile in the history cannot be read: {0}")]
    Profile(String),
    /// There is no history here.
    #[error("there is no history at {0}: the agent writes one where history.directory says")]
    Missing(PathBuf),
}

impl StoreError {
    /// Whether it is for want of space.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Sqlite { source: rusqlite::Error::SqliteFailure(code, _), .. } if code.code == rusqlite::ErrorCode::DiskFull)
    }
}

/// A connection, and where it leads.
#[derive(Debug, Clone)]
pub struct Database {
    connection: Arc<Mutex<Connection>>,
    path: PathBuf,
}

impl Database {
    /// Opens the history in a directory for writing; makes both if they are not there. A file that is no history of this version is
    /// renamed to `history.db.broken` and a new one begun.
    ///
    /// # Errors
    /// If the directory cannot be made or the file not be opened.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(directory).map_err(|source| StoreError::Directory { path: directory.to_owned(), source })?;
        let path = directory.join(FILE);
        match Self::open_file(&path) {
            Err(StoreError::Sqlite { source, .. }) if is_broken(&source) => {
                tracing::warn!("{} is no history of this version ({source}); it is kept as history.db.broken", path.display());
                let aside = directory.join("history.db.broken");
                fs::rename(&path, &aside).map_err(|source| StoreError::Directory { path: aside.clone(), source })?;
                for rest in ["history.db-wal", "history.db-shm"] {
                    // They are of the file that is set aside; most often they are not there.
                    let _ = fs::remove_file(directory.join(rest));
                }
                Self::open_file(&path)
            }
            done => done,
        }
    }

    fn open_file(path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
        let connection = Connection::open(path).map_err(fail)?;
        // Space of deleted rows goes back step by step. Must be said before the first table.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(fail)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
        // The log is synced at each checkpoint: a kill loses nothing that was committed, a power cut may lose the last minutes.
        connection.pragma_update(None, "synchronous", "NORMAL").map_err(fail)?;
        connection.pragma_update(None, "journal_size_limit", LOG_BYTES_MAX).map_err(fail)?;
        Self::prepare(connection, path)
    }

    /// A history that lives as long as the agent.
    ///
    /// # Errors
    /// If SQLite cannot be had.
    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from("(memory)");
        let connection = Connection::open_in_memory().map_err(|source| StoreError::Sqlite { path: path.clone(), source })?;
        Self::prepare(connection, &path)
    }

    /// Opens the history in a directory for reading; an agent may write it meanwhile.
    ///
    /// # Errors
    /// If there is none, or it cannot be read.
    pub fn open_to_read(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        if !path.exists() {
            return Err(StoreError::Missing(path));
        }
        let fail = |source| StoreError::Sqlite { path: path.clone(), source };
        let connection = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(fail)?;
        connection.busy_timeout(BUSY).map_err(fail)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), path })
    }

    fn prepare(connection: Connection, path: &Path) -> Result<Self, StoreError> {
        let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
        connection.busy_timeout(BUSY).map_err(fail)?;
        let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(fail)?;
        if version == 0 {
            connection.execute_batch(&tables()).map_err(fail)?;
        } else if version != VERSION {
            let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_NOTADB);
            return Err(fail(rusqlite::Error::SqliteFailure(code, Some(format!("version {version}, not {VERSION}")))));
        }
        Ok(Self { connection: Arc::new(Mutex::new(connection)), path: path.to_owned() })
    }

    /// The connection, for as long as nobody else needs it.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// SQLite's error with the file it is about.
    pub fn fail(&self) -> impl Fn(rusqlite::Error) -> StoreError + use<> {
        let path = self.path.clone();
        move |source| StoreError::Sqlite { path: path.clone(), source }
    }

    /// Whether it lies in a file.
    #[must_use]
    pub fn is_on_disk(&self) -> bool {
        self.path.is_absolute() || self.path.exists()
    }

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Not a database, or torn beyond use.
fn is_broken(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    matches!(error, rusqlite::Error::SqliteFailure(code, _) if matches!(code.code, DatabaseCorrupt | NotADatabase))
}

/// One row a process, one a sample, profile and event. Times are whole seconds since the Unix epoch, those of events microseconds.
fn tables() -> String {
    let columns: String = COLUMNS.iter().map(|name| format!("{name} INTEGER, ")).collect();
    format!(
        "BEGIN;
         CREATE TABLE process (id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL,
             comm TEXT NOT NULL, container TEXT, UNIQUE (boot_id, pid, start_ticks));
         CREATE TABLE sample (process INTEGER NOT NULL, at INTEGER NOT NULL, step INTEGER NOT NULL, {columns} verdict INTEGER,
             PRIMARY KEY (process, at)) WITHOUT ROWID;
         CREATE TABLE profile (process INTEGER NOT NULL, at INTEGER NOT NULL, mode TEXT NOT NULL, kinds TEXT NOT NULL, body BLOB NOT NULL,
             PRIMARY KEY (process, at, mode));
         CREATE TABLE event (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL, body TEXT NOT NULL, profile BLOB);
         PRAGMA user_version = {VERSION};
         COMMIT;"
    )
}
