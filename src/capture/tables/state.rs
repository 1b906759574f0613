//! The numbers of files, the processes that map them, and the files waiting for conversion.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::path::PathBuf;

use libbpf_rs::MapHandle;

use super::report::{FileStatus, TableState};
use crate::bpf::FILES_MAX;
use crate::process::FileIdentity;
use crate::unwind::budget::Budget;
use crate::unwind::elf::{Image, Segment};
use crate::unwind::rows::Counts;

/// Identifies a file for the unwinder: by build id and size, otherwise by all of its file system attributes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum FileKey {
    BuildId(Vec<u8>, u64),
    Identity(FileIdentity),
}

#[derive(Debug)]
pub(super) struct FileEntry {
    pub(super) key: FileKey,
    pub(super) path: PathBuf,
    pub(super) state: TableState,
    pub(super) segments: Vec<Segment>,
    pub(super) map: Option<MapHandle>,
    pub(super) rows: usize,
    pub(super) bytes: u64,
    pub(super) counts: Counts,
    pub(super) users: usize,
}

/// The source from which a table is built.
#[derive(Debug)]
pub(super) enum Source {
    File(File),
    Memory(Vec<u8>),
}

impl Image for Source {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        match self {
            Self::File(file) => Image::read_at(file, offset, buffer),
            Self::Memory(bytes) => bytes.as_slice().read_at(offset, buffer),
        }
    }

    fn length(&self) -> std::io::Result<u64> {
        match self {
            Self::File(file) => Image::length(file),
            Self::Memory(bytes) => bytes.as_slice().length(),
        }
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) files: HashMap<u32, FileEntry>,
    pub(super) by_key: HashMap<FileKey, u32>,
    pub(super) next_number: u32,
    pub(super) budget: Budget,
    /// Files that each address space maps.
    pub(super) processes: HashMap<u32, Vec<u32>>,
    /// Address spaces with code of managed runtimes.
    pub(super) managed: HashSet<u32>,
    pub(super) queue: VecDeque<(u32, Source)>,
    pub(super) stop: bool,
    pub(super) generation: u32,
    pub(super) evictions: u64,
    pub(super) mappings_left_out: u64,
}

impl FileEntry {
    pub(super) fn status(&self) -> FileStatus {
        FileStatus {
            path: self.path.clone(),
            state: self.state.clone(),
            rows: self.rows,
            bytes: self.bytes,
            counts: self.counts,
            users: self.users,
        }
    }
}

impl State {
    pub(super) fn release(&mut self, files: &[u32]) {
        for number in files {
            let Some(file) = self.files.get_mut(number) else { continue };
            file.users = file.users.saturating_sub(1);
            if file.users == 0 && matches!(file.state, TableState::Evicted | TableState::NoRoom | TableState::Refused(_)) {
                self.drop_file(*number);
            }
        }
    }

    pub(super) fn drop_file(&mut self, number: u32) {
        if let Some(file) = self.files.remove(&number) {
            self.by_key.remove(&file.key);
            self.budget.remove(number);
        }
    }

    /// A free number, the one used longest ago: a walk that still holds a former file's number must not find another file's table. `None`
    /// if all are in use.
    pub(super) fn take_number(&mut self) -> Option<u32> {
        (0..FILES_MAX).find_map(|_| {
            let number = self.next_number;
            self.next_number = (number + 1) % FILES_MAX;
            (!self.files.contains_key(&number)).then_some(number)
        })
    }
}
