//! The file of a mapping: how to open it, its path for the kernel, and its identity.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::process::elf::{BuildId, Elf, ElfError};
use crate::process::handle::Process;
use crate::process::maps::{Backing, Mapping};

/// Why a mapped file cannot be used.
#[derive(Debug, Error)]
pub enum FileError {
    /// The mapping has no file.
    #[error("the mapping at {start:#x} has no file")]
    NoFile {
        /// Its first address.
        start: u64,
    },
    /// The file could be opened in neither way.
    #[error("cannot open {path} of pid {pid}, neither through map_files ({by_address}) nor by its path ({by_path})")]
    Open {
        /// The process.
        pid: u32,
        /// Path below the process's root directory.
        path: PathBuf,
        /// Why opening `/proc/PID/map_files` failed.
        by_address: io::Error,
        /// Why opening `/proc/PID/root` failed.
        by_path: io::Error,
    },
    /// The path now names another file.
    #[error("{path} of pid {pid} was replaced since it was mapped, and map_files cannot be opened (needs CAP_CHECKPOINT_RESTORE)")]
    Replaced {
        /// The process.
        pid: u32,
        /// Path below the process's root directory.
        path: PathBuf,
    },
    /// Not a readable ELF file.
    #[error("{path}: {source}")]
    Elf {
        /// Path below the process's root directory.
        path: PathBuf,
        /// The reason.
        source: ElfError,
    },
}

/// Identity of a file. Equal for two mappings of one file as long as it is not written to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// `st_dev` of the opened file.
    pub device: u64,
    /// `st_ino` of the opened file.
    pub inode: u64,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Time of the last write, ns since 1970.
    pub modified_ns: i128,
    /// The build id note, if the file has one: equal for copies of a file in several images.
    pub build_id: Option<BuildId>,
}

/// An opened file of a mapping.
#[derive(Debug)]
pub struct MappedFile {
    /// The path given to the kernel to attach a probe: a path below `/proc/PID`. Valid while the process lives and keeps the mapping; the
    /// kernel resolves it once, when attaching.
    pub attach_path: PathBuf,
    /// The path shown to users: below the process's root directory.
    pub display_path: PathBuf,
    /// Its identity.
    pub identity: FileIdentity,
    /// The parsed file.
    pub elf: Elf<File>,
}

impl MappedFile {
    /// Opens the file of `mapping`: by address through `/proc/PID/map_files`, which also works for deleted and replaced files, otherwise by
    /// path through `/proc/PID/root`, where the inode must match the mapping's.
    ///
    /// # Errors
    /// If there is no file, it cannot be opened, it has been replaced, or it is not an ELF file.
    pub fn open(process: &Process, mapping: &Mapping) -> Result<Self, FileError> {
        let Backing::File { path, .. } = &mapping.backing else {
            return Err(FileError::NoFile { start: mapping.start.0 });
        };
        let pid = process.pid().0;
        let by_address = process.directory().join(format!("map_files/{:x}-{:x}", mapping.start.0, mapping.end.0));
        let (file, attach_path) = match open_regular(&by_address) {
            Ok(file) => (file, by_address),
            Err(by_address) => {
                // Overlay and btrfs show a different device in maps than in stat; the inode number is the same.
                let is_it = |file: &File| file.metadata().is_ok_and(|metadata| metadata.ino() == mapping.inode);
                let by_path = path_in_root(process, path);
                let exe = process.directory().join("exe");
                match open_regular(&by_path) {
                    Ok(file) if is_it(&file) => (file, by_path),
                    // The program itself is accessible through its own link, even if deleted, without an additional capability.
                    found => match (open_regular(&exe), found) {
                        (Ok(file), _) if is_it(&file) => (file, exe),
                        (_, Ok(_)) => return Err(FileError::Replaced { pid, path: path.clone() }),
                        (_, Err(by_path)) => return Err(FileError::Open { pid, path: path.clone(), by_address, by_path }),
                    },
                }
            }
        };
        let error = |source| FileError::Elf { path: path.clone(), source };
        let metadata = file.metadata().map_err(|source| error(ElfError::Io(source)))?;
        if !metadata.is_file() {
            return Err(error(ElfError::NotElf));
        }
        let elf = Elf::parse(file).map_err(error)?;
        let identity = FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
            size_bytes: metadata.len(),
            modified_ns: i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec()),
            build_id: elf.build_id(),
        };
        Ok(Self { attach_path, display_path: path.clone(), identity, elf })
    }
}

/// Opens for reading without blocking: the path may by now name a pipe that has no writer.
fn open_regular(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// `/proc/PID/root/…` for a path below the process's root directory.
fn path_in_root(process: &Process, path: &Path) -> PathBuf {
    let mut full = process.directory().join("root").into_os_string();
    full.push(path);
    full.into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::process::testing::Cat;

    #[test]
    fn a_deleted_executable_is_still_opened_and_recognised() {
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("my cat");
        std::fs::copy("/bin/cat", &copy).unwrap();
        let cat = Cat::start(&copy, None);
        let process = Process::open(cat.pid()).unwrap();
        std::fs::remove_file(&copy).unwrap();
        let maps = process.maps().unwrap();
        let mapping = maps.executable_files().find(|m| m.path() == Some(&copy)).unwrap();
        let opened = MappedFile::open(&process, mapping).unwrap();
        let original = Elf::parse(File::open("/bin/cat").unwrap()).unwrap();
        assert!(opened.identity.build_id.is_some());
        assert_eq!(opened.identity.build_id, original.build_id());
        assert!(opened.attach_path.exists());
    }
}
