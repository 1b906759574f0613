//! What is told of the unwinder's tables.

use std::path::PathBuf;

use crate::unwind::rows::Counts;

/// Of a table that found no room.
const NO_ROOM: &str = "the table does not fit into the budget beside those in use";

/// What became of a file's table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TableState {
    /// In the kernel.
    Loaded,
    /// Waits to be converted.
    Pending,
    /// Was in the kernel; comes back when a walk asks for it.
    Evicted,
    /// Has none for want of room; it is tried again when a process that maps it is looked at and there is room.
    NoRoom,
    /// There is none.
    Refused(String),
}

impl TableState {
    /// Why there is no table; `None` = there is one, or there may be.
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
    /// Path in the process that brought it.
    pub path: PathBuf,
    /// What became of its table.
    pub state: TableState,
    /// Rows of the table, 0 without one.
    pub rows: usize,
    /// Bytes of the table, or that it would take if there were room.
    pub bytes: u64,
    /// What conversion saw and refused.
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
    /// Bytes that they may take.
    pub budget_bytes: u64,
    /// Rows of all tables in the kernel.
    pub rows: usize,
    /// Rows of a form that the unwinder does not evaluate, in these.
    pub rows_unsupported: u64,
    /// Tables thrown out for others since the start.
    pub evictions: u64,
    /// Files without a table, by reason.
    pub refused: Vec<(String, usize)>,
    /// Executable mappings left out because a process had too many.
    pub mappings_left_out: u64,
}

/// What a synchronisation did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Executable mappings of the process.
    pub mappings: usize,
    /// Files (and the vdso) among them.
    pub files: usize,
    /// Tables brought into the kernel now.
    pub loaded: usize,
    /// Files whose table is still to come.
    pub pending: usize,
    /// Files without a table.
    pub without_table: usize,
    /// Mappings left out because there were too many.
    pub left_out: usize,
}
