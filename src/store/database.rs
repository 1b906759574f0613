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
/// Version of the tables (`user_version`). A file of another version is set aside, not changed.
const VERSION: i64 = 1;
/// How long a reader waits for a writer.
const BUSY: Duration = Duration::from_secs(5);
/// The log beside the database is cut to this length after use.
const LOG_BYTES_MAX: i64 = 4 << 20;
/// What SQLite puts beside the file: its log, and the log's index.
const BESIDE: [&str; 2] = ["-wal", "-shm"];
/// What a damaged file is renamed to; one of before is replaced.
const ASIDE: &str = "history.db.broken";
/// Names, commands and call stacks of all users' processes are nobody else's business, whatever the umask.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

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
    /// Set by an answer that only a damaged file gives, through either connection.
    damaged: Arc<AtomicBool>,
    /// The connection that reads the same file, of the one that writes it.
    reading: Option<Arc<Mutex<Connection>>>,
}

impl Database {
    /// Opens the history in a directory for writing; makes both if they are not there. A file that is no history of this version is
    /// renamed to `history.db.broken` and a new one begun.
    ///
    /// # Errors
    /// If the directory cannot be made or the file not be opened.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let failed = |source| StoreError::Directory { path: directory.to_owned(), source };
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory).map_err(failed)?;
        let path = directory.join(FILE);
        let connection = match Self::connect(&path) {
            Err(StoreError::Sqlite { source, .. }) if is_broken(&source) => {
                tracing::warn!("{} is no history of this version ({source}); it is kept as {ASIDE}", path.display());
                set_aside(&path)?;
                Self::connect(&path)?
            }
            done => done?,
        };
        Ok(Self::of(connection, &path))
    }

    /// As [`open`](Self::open), and a second connection for reading.
    ///
    /// # Errors
    /// If the directory cannot be made or the file not be opened.
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
        // Space of deleted rows goes back step by step. Must be said before the first table.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL").map_err(fail)?;
        connection.pragma_update(None, "journal_mode", "WAL").map_err(fail)?;
        // The log is synced at each checkpoint: a kill loses nothing that was committed, a power cut may lose the last minutes.
        connection.pragma_update(None, "synchronous", "NORMAL").map_err(fail)?;
        connection.pragma_update(None, "journal_size_limit", LOG_BYTES_MAX).map_err(fail)?;
        prepare(&connection).map_err(fail)?;
        Ok(connection)
    }

    /// Whether an answer has told that the file is damaged.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        self.damaged.load(Ordering::Relaxed)
    }

    /// Sets the damaged file aside and begins a new one, for both connections. Returns where the old one is.
    ///
    /// # Errors
    /// If the file cannot be renamed or the new one not be made; it can be tried again.
    pub fn renew(&self) -> Result<PathBuf, StoreError> {
        let reading = self.reading.as_ref().map(|reading| lock(reading));
        let mut writing = self.lock();
        // Both let go of the old file before it is renamed. What answers meanwhile is an empty history.
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

    /// Lets go of the file: the last connection merges the log into it, and removes the log.
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
    /// If SQLite cannot be had.
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

    /// The connection, for as long as nobody else needs it.
    pub fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    /// SQLite's error with the file it is about. One that only a damaged file gives is remembered.
    pub fn fail(&self) -> impl Fn(rusqlite::Error) -> StoreError + use<> {
        let (path, damaged) = (self.path.clone(), Arc::clone(&self.damaged));
        move |source| {
            damaged.fetch_or(is_broken(&source), Ordering::Relaxed);
            StoreError::Sqlite { path: path.clone(), source }
        }
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

fn lock(connection: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect_to_read(path: &Path) -> Result<Connection, StoreError> {
    let fail = |source| StoreError::Sqlite { path: path.to_owned(), source };
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(fail)?;
    connection.busy_timeout(BUSY).map_err(fail)?;
    Ok(connection)
}

/// Makes the tables in a new file; refuses one of another version.
fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    connection.busy_timeout(BUSY)?;
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if version == 0 {
        connection.execute_batch(&tables())?;
    } else if version != VERSION {
        let code = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_NOTADB);
        return Err(rusqlite::Error::SqliteFailure(code, Some(format!("version {version}, not {VERSION}"))));
    }
    Ok(())
}

/// The name of a file beside another one.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes the file if it is not there, and takes others' rights to it and to what lies beside it. SQLite gives what it makes beside a file
/// the file's own mode (`findCreateFileMode`, os_unix.c).
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

/// Renames a damaged file with what lies beside it, so that `sqlite3 history.db.broken .recover` finds all there is. Returns its new name.
fn set_aside(path: &Path) -> Result<PathBuf, StoreError> {
    let aside = path.with_file_name(ASIDE);
    for suffix in BESIDE.into_iter().chain([""]) {
        let (from, to) = (beside(path, suffix), beside(&aside, suffix));
        let moved = match fs::rename(&from, &to) {
            // What an earlier one left there does not belong to this one.
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

/// Not a database, torn beyond use, or without the tables that every history has: the page with their names is damaged.
fn is_broken(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase};
    let lacks = |what: &str| error.to_string().contains(what);
    matches!(error.sqlite_error_code(), Some(DatabaseCorrupt | NotADatabase)) || lacks("no such table") || lacks("no such column")
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
