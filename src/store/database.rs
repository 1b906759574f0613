//! Opening the history, and its tables.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use thiserror::Error;

use super::row::COLUMNS;

/// Name of the file in the directory.
pub const FILE: &str = "history.db";
/// Version of the tables (`user_version`). A file of an earlier version is changed; one of any other version is renamed.
const VERSION: i64 = 3;
/// Remedies that were applied, one row per event that has one ([`super::outcome`]). Added to files that lack it: older agents ignore it.
const OUTCOMES: &str = "CREATE TABLE IF NOT EXISTS outcome (id INTEGER PRIMARY KEY, workload TEXT NOT NULL, action TEXT NOT NULL,
             at_most INTEGER NOT NULL, predicted_bytes INTEGER NOT NULL, saved_bytes INTEGER NOT NULL);";
/// What makes a file of version 1 one of version 2, and so on.
const UPGRADES: [&str; VERSION as usize - 1] = [
    "BEGIN; ALTER TABLE sample ADD COLUMN unreached_bytes INTEGER; PRAGMA user_version = 2; COMMIT;",
    "BEGIN; ALTER TABLE process ADD COLUMN workload TEXT; PRAGMA user_version = 3; COMMIT;",
];
/// How long a reader waits for a writer.
const BUSY: Duration = Duration::from_secs(5);
/// The write-ahead log is truncated to this length after use.
const LOG_BYTES_MAX: i64 = 4 << 20;
/// SQLite's files next to the database: its log, and the log's index.
const BESIDE: [&str; 2] = ["-wal", "-shm"];
/// New name of a damaged file; an older one is replaced.
const ASIDE: &str = "history.db.broken";
/// Private whatever the umask: the history has names, commands and call stacks of all users' processes.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Why the history cannot be read or written.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The directory.
    #[error("cannot create the history's directory {path}: {source} (history.directory)")]
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
    #[error("there is no history at {0}: the agent writes it to history.directory")]
    Missing(PathBuf),
}

impl StoreError {
    /// Whether the cause is lack of space.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Sqlite { source: rusqlite::Error::SqliteFailure(code, _), .. } if code.code == rusqlite::ErrorCode::DiskFull)
    }
}

/// A connection, and the path of its file.
#[derive(Debug, Clone)]
pub struct Database {
    connection: Arc<Mutex<Connection>>,
    path: PathBuf,
    /// Set by an error that only a damaged file causes, on either connection.
    damaged: Arc<AtomicBool>,
    /// The reading connection to the same file, if this is the writing one.
    reading: Option<Arc<Mutex<Connection>>>,
}

impl Database {
    /// Opens the history in a directory for writing; creates both if needed. A file that is not a history of this version is renamed to
    /// `history.db.broken` and replaced by a new one.
    ///
    /// # Errors
    /// If the directory cannot be created, or the file cannot be opened.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Directory { path: directory.to_owned(), source };
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory).map_err(failed)?;
        let path = directory.join(FILE);
        let connection = match Self::connect(&path) {
            Err(StoreError::Sqlite { source, .. }) if is_broken(&source) => {
                tracing::warn!("{} is not a history of this version ({source}); it is kept as {ASIDE}", path.display());
                set_aside(&path)?;
                Self::connect(&path)?
            }
            done => done?,
        };
        Ok(Self::of(connection, &path))
    }

    /// Like [`open`](Self::open), with a second connection for reading.
    ///
    /// # Errors
    /// If the directory cannot be created, or the file cannot be opened.
    pub fn open_both(directory: &Path) -> Result<(Self, Self), StoreError> {
        let mut write = Self::open(directory)?;
        let read = Self { damaged: Arc::clone(&write.damaged), ..Self::open_to_read(directory)? };
        write.reading = Some(Arc::clone(&read.connection));
        Ok((write, read))
    }

    fn of(connection: Connection, path: &Path) -> Self {
        Self { connection: Arc::new(Mutex::new(connection)), path: path.to_owned(), damaged: Arc::default(), reading: None }
    }

    fn connect(path: &Path) -> Result<Connection, StoreError> {
        make_private(path).map_err(|source| StoreError::Directory { path: path.to_owned(), source })?;
        let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
        let connection = Connection::open(path).map_err(fail)?;
        // Space of deleted rows is returned incrementally. Must be set before the first table is created.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(fail)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
        // The log is synced at each checkpoint: a kill loses nothing that was committed, a power cut may lose the last minutes.
        connection.pragma_update(None, "synchronous", "NORMAL").map_err(fail)?;
        connection.pragma_update(None, "journal_size_limit", LOG_BYTES_MAX).map_err(fail)?;
        prepare(&connection).map_err(fail)?;
        Ok(connection)
    }

    /// Whether an error has shown that the file is damaged.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Renames the damaged file and starts a new one, for both connections. Returns the old one's new path.
    ///
    /// # Errors
    /// If the file cannot be renamed, or the new one cannot be created; it can be retried.
    pub fn renew(&self) -> Result<PathBuf, StoreError> {
        let reading = self.reading.as_ref().map(|reading| lock(reading));
        let mut writing = self.lock();
        // Both connections close the old file before it is renamed. Meanwhile they use an empty history.
        let empty = || Connection::open_in_memory().map_err(self.fail());
        *writing = empty()?;
        let mut reading = reading;
        if let Some(reading) = &mut reading {
            **reading = empty()?;
        }
        let aside = set_aside(&self.path)?;
        *writing = Self::connect(&self.path)?;
        if let Some(reading) = &mut reading {
            **reading = connect_to_read(&self.path)?;
        }
        self.damaged.store(false, Ordering::Relaxed);
        Ok(aside)
    }

    /// Closes the file: the last connection merges the log into it, and removes the log.
    pub fn close(&self) {
        if !self.is_on_disk() {
            return;
        }
        for connection in self.reading.iter().chain([&self.connection]) {
            if let Ok(empty) = Connection::open_in_memory() {
                *lock(connection) = empty;
            }
        }
    }

    /// A history that lives as long as the agent.
    ///
    /// # Errors
    /// If SQLite cannot be initialised.
    pub fn in_memory() -> Result<Self, StoreError> {
        let path = PathBuf::from("(memory)");
        let fail = |source| StoreError::Sqlite { path: path.clone(), source };
        let connection = Connection::open_in_memory().map_err(fail)?;
        prepare(&connection).map_err(fail)?;
        Ok(Self::of(connection, &path))
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
        Ok(Self::of(connect_to_read(&path)?, &path))
    }

    /// Opens the history in a directory for adding an event beside the agent. Neither creates nor changes nor renames a file.
    ///
    /// # Errors
    /// If there is none, it is of another version, or it cannot be written.
    pub fn open_to_append(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(FILE);
        if !path.exists() {
            return Err(StoreError::Missing(path));
        }
        let fail = |source| StoreError::Sqlite { path: path.clone(), source };
        let connection = Connection::open_with_flags(&path, OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(fail)?;
        connection.busy_timeout(BUSY).map_err(fail)?;
        let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(fail)?;
        if version != VERSION {
            return Err(fail(other_version(version)));
        }
        connection.execute_batch(OUTCOMES).map_err(fail)?;
        Ok(Self::of(connection, &path))
    }

    /// Locks the connection.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    /// SQLite's error with the path of its file. Notes errors that only a damaged file causes.
    pub fn fail(&self) -> impl Fn(rusqlite::Error) -> StoreError + use<> {
        let (path, damaged) = (self.path.clone(), Arc::clone(&self.damaged));
        move |source| {
            damaged.fetch_or(is_broken(&source), Ordering::Relaxed);
            StoreError::Sqlite { path: path.clone(), source }
        }
    }

    /// Whether it is in a file.
    #[must_use]
    pub fn is_on_disk(&self) -> bool {
        self.path.is_absolute() || self.path.exists()
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect_to_read(path: &Path) -> Result<Connection, StoreError> {
    let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(fail)?;
    connection.busy_timeout(BUSY).map_err(fail)?;
    Ok(connection)
}

/// Creates the tables in a new file, or adds what an earlier version lacks; refuses a file of another version.
fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(BUSY)?;
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if version == 0 {
        connection.execute_batch(&tables())?;
    } else if (1..=VERSION).contains(&version) {
        let done = usize::try_from(version - 1).unwrap_or(UPGRADES.len());
        UPGRADES.iter().skip(done).try_for_each(|upgrade| connection.execute_batch(upgrade))?;
    } else {
        return Err(other_version(version));
    }
    connection.execute_batch(OUTCOMES)
}

fn other_version(version: i64) -> rusqlite::Error {
    let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_NOTADB);
    rusqlite::Error::SqliteFailure(code, Some(format!("version {version}, not {VERSION}")))
}

/// The name of a file next to another one.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Creates the file if needed, and removes others' permissions on it and on the files next to it. SQLite creates those with the file's own mode
/// (`findCreateFileMode`, os_unix.c).
fn make_private(path: &Path) -> io::Result<()> {
    File::options().write(true).create(true).truncate(false).mode(FILE_MODE).open(path)?;
    for file in BESIDE.map(|suffix| beside(path, suffix)).into_iter().chain([path.to_owned()]) {
        match fs::set_permissions(&file, Permissions::from_mode(FILE_MODE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Renames a damaged file and the files next to it, so that `sqlite3 history.db.broken .recover` finds all of it. Returns its new name.
fn set_aside(path: &Path) -> Result<PathBuf, StoreError> {
    let aside = path.with_file_name(ASIDE);
    for suffix in BESIDE.into_iter().chain([""]) {
        let (from, to) = (beside(path, suffix), beside(&aside, suffix));
        let moved = match fs::rename(&from, &to) {
            // Files left from an earlier damaged history do not belong to this one.
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::remove_file(&to),
            moved => moved,
        };
        match moved {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(StoreError::Directory { path: to, source: error }),
            _ => {}
        }
    }
    Ok(aside)
}

/// Not a database, damaged beyond use, or without the tables that every history has, because the page with their names is damaged.
fn is_broken(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    let lacks = |what: &str| error.to_string().contains(what);
    matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase)) || lacks("no such table") || lacks("no such column")
}

/// One row per process, sample, profile and event. Times are whole seconds since the Unix epoch, those of events microseconds.
fn tables() -> String {
    let columns: String = COLUMNS.iter().map(|name| format!("{name} INTEGER, ")).collect();
    format!(
        "BEGIN;
         CREATE TABLE process (id INTEGER PRIMARY KEY, boot_id TEXT NOT NULL, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL,
             comm TEXT NOT NULL, container TEXT, workload TEXT, UNIQUE (boot_id, pid, start_ticks));
         CREATE TABLE sample (process INTEGER NOT NULL, at INTEGER NOT NULL, step INTEGER NOT NULL, {columns} verdict INTEGER,
             PRIMARY KEY (process, at)) WITHOUT ROWID;
         CREATE TABLE profile (process INTEGER NOT NULL, at INTEGER NOT NULL, mode TEXT NOT NULL, kinds TEXT NOT NULL, body BLOB NOT NULL,
             PRIMARY KEY (process, at, mode));
         CREATE TABLE event (id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, start_ticks INTEGER NOT NULL, body TEXT NOT NULL, profile BLOB);
         PRAGMA user_version = {VERSION};
         COMMIT;"
    )
}
