//! Reports on the unwinder's tables.

use std::path::PathBuf;

use crate::unwind::rows::Counts;

/// The reason given for a table that does not fit.
const NO_ROOM: &str = "the table does not fit into the budget in addition to those in use";

/// State of a file's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableState {
    /// In the kernel.
    Loaded,
    /// Waiting for conversion.
    Pending,
    /// Was in the kernel; is loaded again when a walk requests it.
    Evicted,
    /// Does not fit into the budget; retried when a process that maps the file is examined and there is room.
    NoRoom,
    /// There is no table, for this reason.
    Refused(String),
}

impl TableState {
    /// Why there is no table; `None` = there is one, or there may be later.
    #[must_use]
    pub fn refusal(&self) -> Option<&str> {
        match self {
            Self::NoRoom => Some(NO_ROOM),
            Self::Refused(reason) => Some(reason),
            Self::Loaded | Self::Pending | Self::Evicted => None,
        }
    }
}

/// A file and its table, for `doctor`.
#[derive(Debug, Clone)]
pub struct FileStatus {
    /// Path in the process through which the file was found.
    pub path: PathBuf,
    /// State of its table.
    pub state: TableState,
    /// Rows of the table, 0 without one.
    pub rows: usize,
    /// Bytes of the table, or the bytes it would need if it does not fit.
    pub bytes: u64,
    /// Counts of the conversion, including what it refused.
    pub counts: Counts,
    /// Address spaces that map it.
    pub users: usize,
}

/// The sum over all files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Files known.
    pub files: usize,
    /// Files whose table is in the kernel.
    pub loaded: usize,
    /// Files that wait for conversion.
    pub pending: usize,
    /// Bytes of all tables in the kernel.
    pub bytes: u64,
    /// Maximum number of these bytes.
    pub budget_bytes: u64,
    /// Rows of all tables in the kernel.
    pub rows: usize,
    /// The rows that have a form the unwinder does not evaluate.
    pub rows_unsupported: u64,
    /// Tables evicted for others since the start.
    pub evictions: u64,
    /// Files without a table, by reason.
    pub refused: Vec<(String, usize)>,
    /// Executable mappings left out because a process had too many.
    pub mappings_left_out: u64,
}

/// Result of an update.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Executable mappings of the process.
    pub mappings: usize,
    /// Files (and the vdso) among them.
    pub files: usize,
    /// Tables loaded into the kernel by this update.
    pub loaded: usize,
    /// Files whose table is still pending.
    pub pending: usize,
    /// Files without a table.
    pub without_table: usize,
    /// Mappings left out because there were too many.
    pub left_out: usize,
}
