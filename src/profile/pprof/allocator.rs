//! The allocator's own frames at the leaf of a stack. They are the same in every stack and would come first in any viewer, so samples omit
//! them. A label names the function that the program called; a table in a comment has the original frames, which [`read`](super::read)
//! restores.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::frame::{Frame, FrameFlags};
use crate::profile::glue;
use crate::profile::model::{FrameId, Profile};

/// Start of the comment that holds the table.
pub const TABLE_COMMENT: &str = "#fragprof-allocator ";
/// String sample label: the allocator's function that the program called, such as `malloc` or `operator new(unsigned long)`.
pub const LABEL_ALLOCATED_BY: &str = "allocated_by";
/// Numeric sample label: index in the table of the comment.
pub const LABEL_FRAMES: &str = "allocator_frames";
/// Longest table that is read: a process has some tens of entries, of some 200 bytes.
const TABLE_BYTES_MAX: usize = 16 << 20;
/// Most entries of a table; further samples keep their frames.
const ENTRIES_MAX: usize = 1 << 14;
/// Most frames of an entry: allocators nest a few calls.
const ENTRY_FRAMES_MAX: usize = 64;

/// A frame in the table.
#[derive(Serialize, Deserialize)]
struct Row {
    function: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    file: String,
    #[serde(default)]
    line: u32,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    module: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    build_id: String,
    #[serde(default)]
    address: u64,
    #[serde(default)]
    inlined: bool,
    #[serde(default)]
    guessed: bool,
    #[serde(default)]
    jit: bool,
}

/// The table while a profile is written.
#[derive(Default)]
pub(super) struct Trimmed {
    entries: Vec<Vec<FrameId>>,
    indices: HashMap<Vec<FrameId>, usize>,
}

impl Trimmed {
    /// Number of frames at the leaf that the sample omits, and their index in the table; `None` = the sample keeps all.
    pub fn trim(&mut self, profile: &Profile, frames: &[FrameId]) -> Option<(usize, usize)> {
        let own = glue::allocator_frames(frames.iter().map(|frame| profile.frame(*frame)));
        let cut = frames.get(..own).filter(|cut| !cut.is_empty() && cut.len() <= ENTRY_FRAMES_MAX)?;
        if let Some(&index) = self.indices.get(cut) {
            return Some((own, index));
        }
        let index = self.entries.len();
        if index >= ENTRIES_MAX {
            return None;
        }
        self.entries.push(cut.to_vec());
        self.indices.insert(cut.to_vec(), index);
        Some((own, index))
    }

    /// The comment; `None` if nothing was omitted.
    pub fn comment(&self, profile: &Profile) -> Option<String> {
        let row = |id: &FrameId| {
            let frame = profile.frame(*id);
            Row {
                function: frame.function.to_string(),
                file: frame.file.to_string(),
                line: frame.line,
                module: frame.module.to_string(),
                build_id: frame.build_id.to_string(),
                address: frame.address,
                inlined: frame.flags.inlined,
                guessed: frame.flags.guessed,
                jit: frame.flags.jit,
            }
        };
        let table: Vec<Vec<Row>> = self.entries.iter().map(|entry| entry.iter().map(row).collect()).collect();
        // Plain texts and numbers: this cannot fail.
        (!table.is_empty()).then(|| serde_json::to_string(&table).ok().map(|json| format!("{TABLE_COMMENT}{json}"))).flatten()
    }
}

/// The table of a comment that starts with [`TABLE_COMMENT`]; empty if it cannot be read: the labels are used instead.
pub(super) fn read_table(json: &str) -> Vec<Vec<Frame>> {
    if json.len() > TABLE_BYTES_MAX {
        return Vec::new();
    }
    let table: Vec<Vec<Row>> = serde_json::from_str(json).unwrap_or_default();
    let frame = |row: Row| Frame {
        function: row.function.into(),
        file: row.file.into(),
        line: row.line,
        module: row.module.into(),
        build_id: row.build_id.into(),
        address: row.address,
        flags: FrameFlags { inlined: row.inlined, guessed: row.guessed, jit: row.jit },
    };
    table.into_iter().take(ENTRIES_MAX).map(|entry| entry.into_iter().take(ENTRY_FRAMES_MAX).map(frame).collect()).collect()
}

/// The frames that a sample omits: from the table, or, if it has no such entry, the one that the label names.
pub(super) fn put_back(table: &[Vec<Frame>], index: Option<i64>, allocated_by: &Arc<str>) -> Vec<Frame> {
    let entry = index.and_then(|index| table.get(usize::try_from(index).ok()?));
    match entry.filter(|entry| entry.last().is_some_and(|frame| frame.function == *allocated_by)) {
        Some(entry) => entry.clone(),
        None => vec![Frame::named(allocated_by.clone())],
    }
}
