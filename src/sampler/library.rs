//! The embedded library, and writing it to a path at which a program's dynamic linker finds it.
//!
//! It is a file, not a memory file (memfd): the path is inherited by every child that the program starts, and must be valid as long as any
//! of them runs, even after they have closed all descriptors. The file is replaced by rename, never written in place, because running
//! programs have it mapped.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::allocator::cpython::IN_FRONT;
use crate::allocator::is_own_library;
use crate::replace::replace;

/// Which build of the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavour {
    /// The functions of C and the operators of C++: for any program.
    Standard,
    /// Also `mallocx` and related functions: only for programs with jemalloc. Others use weak references to them to detect jemalloc.
    Jemalloc,
    /// For a program that runs: loaded by its dynamic linker, and called from outside (preload/attach.h).
    Attached,
    /// As `Attached`, and records every call instead of sampling.
    AttachedRecorder,
    /// As `Standard`, and records every call instead of sampling.
    Recorder,
    /// As `Jemalloc`, and records every call instead of sampling.
    RecorderJemalloc,
    /// Neither samples nor records: functions in front of those by which CPython allocates objects, for probes (preload/python.c).
    PythonObjects,
}

impl Flavour {
    /// Every flavour of the sampler.
    pub const ALL: [Self; 3] = [Self::Standard, Self::Jemalloc, Self::Attached];
    /// Those that are loaded from an image or a directory of a container: every flavour of the sampler, and the recorder that is attached.
    pub const INSTALLED: [Self; 4] = [Self::Standard, Self::Jemalloc, Self::Attached, Self::AttachedRecorder];

    /// The flavour for the same programs that records every call.
    #[must_use]
    pub fn recorder(self) -> Self {
        match self {
            Self::Standard | Self::Recorder => Self::Recorder,
            Self::Attached | Self::AttachedRecorder => Self::AttachedRecorder,
            Self::Jemalloc | Self::RecorderJemalloc => Self::RecorderJemalloc,
            Self::PythonObjects => Self::PythonObjects,
        }
    }

    /// The library's file name.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Standard => "libfragprof_sampler.so",
            Self::Jemalloc => "libfragprof_sampler_jemalloc.so",
            Self::Attached => "libfragprof_attached.so",
            Self::AttachedRecorder => "libfragprof_attached_recorder.so",
            Self::Recorder => "libfragprof_recorder.so",
            Self::RecorderJemalloc => "libfragprof_recorder_jemalloc.so",
            Self::PythonObjects => IN_FRONT,
        }
    }

    /// The library.
    #[must_use]
    pub fn bytes(self) -> &'static [u8] {
        match self {
            Self::Standard => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_sampler.so")),
            Self::Jemalloc => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_sampler_jemalloc.so")),
            Self::Attached => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_attached.so")),
            Self::AttachedRecorder => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_attached_recorder.so")),
            Self::Recorder => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_recorder.so")),
            Self::RecorderJemalloc => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_recorder_jemalloc.so")),
            Self::PythonObjects => include_bytes!(concat!(env!("OUT_DIR"), "/libfragprof_python.so")),
        }
    }
}

/// Why the library could not be written.
#[derive(Debug, Error)]
pub enum LibraryError {
    /// None of the directories tried is suitable.
    #[error(
        "cannot write the sampler's library to any directory ({reasons}); set XDG_CACHE_HOME to one of your own that is not mounted noexec"
    )]
    Nowhere {
        /// Each directory with the reason.
        reasons: String,
    },
    /// A given directory is not suitable.
    #[error("{path} is not suitable for the sampler's library: {reason}")]
    Unsuitable {
        /// The directory.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Writing into a given directory failed.
    #[error("cannot write the sampler's library to {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Why a directory is not suitable.
#[derive(Debug, Error)]
enum Unfit {
    #[error("it belongs to another user or others may write to it")]
    NotOurs,
    #[error("it is mounted noexec")]
    NoExec,
    #[error("its path has a space or a colon, which LD_PRELOAD does not allow")]
    Separator,
    #[error("its path is not absolute")]
    Relative,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Writes the library into a directory of this user and returns its path. If the same file already exists, it is left unchanged.
///
/// The directories tried: for root `/var/cache/fragprof`, then `/run/fragprof`; for others `$XDG_CACHE_HOME/fragprof` or
/// `~/.cache/fragprof`; then `fragprof-UID` in the directory for temporary files.
///
/// # Errors
/// [`LibraryError::Nowhere`].
pub fn place(flavour: Flavour) -> Result<PathBuf, LibraryError> {
    let mut reasons = Vec::new();
    for folder in folders(rustix::process::geteuid().as_raw(), |name| std::env::var_os(name).map(PathBuf::from)) {
        match place_in(&folder, flavour) {
            Ok(path) => return Ok(path),
            Err(unfit) => reasons.push(format!("{}: {unfit}", folder.display())),
        }
    }
    Err(LibraryError::Nowhere { reasons: reasons.join("; ") })
}

/// Writes the library into a given directory from which other users' programs will load it, and returns its path.
///
/// # Errors
/// [`LibraryError::Unsuitable`]: it is not this user's, others may write to it, it is mounted noexec, or cannot be created.
pub fn place_at(folder: &Path, flavour: Flavour) -> Result<PathBuf, LibraryError> {
    let unsuitable = |unfit: Unfit| LibraryError::Unsuitable { path: folder.to_owned(), reason: unfit.to_string() };
    let path = place_in(folder, flavour).map_err(unsuitable)?;
    // It may have been created under a umask that keeps others out.
    let mode = fs::metadata(folder).map_err(|error| unsuitable(error.into()))?.mode() & 0o7777;
    if mode & 0o055 != 0o055 {
        fs::set_permissions(folder, fs::Permissions::from_mode(mode | 0o055)).map_err(|error| unsuitable(error.into()))?;
    }
    Ok(path)
}

/// Writes the libraries ([`Flavour::INSTALLED`]) into a directory, for images and for directories that are mounted into containers.
///
/// # Errors
/// If the directory cannot be created or written to.
pub fn install(folder: &Path) -> Result<Vec<PathBuf>, LibraryError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| LibraryError::Write { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    Flavour::INSTALLED
        .into_iter()
        .map(|flavour| {
            let path = folder.join(flavour.file_name());
            replace(&path, flavour.bytes(), 0o644).map_err(failed(&path))?;
            Ok(path)
        })
        .collect()
}

/// The directories to try, best first. Those that survive a reboot come first, because a script that starts a service may contain the path.
fn folders(euid: u32, variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let mut folders = Vec::new();
    if euid == 0 {
        folders.extend(["/var/cache/fragprof".into(), "/run/fragprof".into()]);
    } else if let Some(cache) = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache"))) {
        folders.push(cache.join("fragprof"));
    }
    folders.push(variable("TMPDIR").unwrap_or_else(|| "/tmp".into()).join(format!("fragprof-{euid}")));
    folders
}

fn place_in(folder: &Path, flavour: Flavour) -> Result<PathBuf, Unfit> {
    if !folder.is_absolute() {
        return Err(Unfit::Relative);
    }
    if folder.as_os_str().as_encoded_bytes().iter().any(|byte| b" :\t\n".contains(byte)) {
        return Err(Unfit::Separator);
    }
    match DirBuilder::new().mode(0o755).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => DirBuilder::new().recursive(true).mode(0o755).create(folder)?,
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    // Not through a link that another user may have created: this file will be executed.
    let found = fs::symlink_metadata(folder)?;
    if !found.is_dir() || found.uid() != rustix::process::geteuid().as_raw() || found.mode() & 0o022 != 0 {
        return Err(Unfit::NotOurs);
    }
    if rustix::fs::statvfs(folder).map_err(io::Error::from)?.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
        return Err(Unfit::NoExec);
    }
    let path = folder.join(flavour.file_name());
    if !holds(&path, flavour.bytes()) {
        // The program may run as another user.
        replace(&path, flavour.bytes(), 0o644)?;
    }
    Ok(path)
}

/// The value of `LD_PRELOAD` with the library first, in front of an allocator that is preloaded too. A nested `fragprof run` does not add a
/// second sampler.
#[must_use]
pub fn preload(library: &Path, already: Option<&OsStr>) -> OsString {
    joined(library, already, |entry| !is_own_library(entry))
}

/// As [`preload`], for the library that goes with any other.
#[must_use]
pub fn preload_beside(library: &Path, already: Option<&OsStr>) -> OsString {
    joined(library, already, |entry| file_name(entry) != IN_FRONT.as_bytes())
}

fn joined(library: &Path, already: Option<&OsStr>, stays: impl Fn(&[u8]) -> bool) -> OsString {
    let mut value = library.as_os_str().to_owned();
    let Some(already) = already else { return value };
    // Spaces and colons both separate (ld.so(8)).
    let already = already.as_encoded_bytes();
    for entry in already.split(|byte| b": ".contains(byte)).filter(|entry| !entry.is_empty() && stays(entry)) {
        value.push(":");
        value.push(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(entry));
    }
    value
}

fn file_name(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().unwrap_or_default()
}

/// Whether a file has exactly these bytes.
#[must_use]
pub fn holds(path: &Path, bytes: &[u8]) -> bool {
    let mut there = Vec::with_capacity(bytes.len());
    let read = File::open(path).and_then(|file| file.take(bytes.len() as u64 + 1).read_to_end(&mut there));
    read.is_ok() && there == bytes
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn root_and_users_have_directories_of_their_own() {
        let home = |name: &str| (name == "HOME").then(|| PathBuf::from("/home/ann"));
        assert_eq!(folders(1000, home), [PathBuf::from("/home/ann/.cache/fragprof"), "/tmp/fragprof-1000".into()]);
        assert_eq!(folders(1000, |_| Some("/x".into())), [PathBuf::from("/x/fragprof"), "/x/fragprof-1000".into()]);
        assert_eq!(folders(0, home)[0], PathBuf::from("/var/cache/fragprof"));
    }

    #[test]
    fn an_existing_file_is_left_unchanged_and_a_damaged_one_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("fragprof");
        let path = place_in(&folder, Flavour::Standard).unwrap();
        let before = fs::metadata(&path).unwrap().ino();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        place_in(&folder, Flavour::Standard).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), before);
        fs::write(&path, b"other").unwrap();
        place_in(&folder, Flavour::Standard).unwrap();
        assert_eq!(fs::read(&path).unwrap(), Flavour::Standard.bytes());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_that_others_could_have_prepared_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let open = directory.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(place_in(&open, Flavour::Standard), Err(Unfit::NotOurs)));
        let link = directory.path().join("link");
        symlink("/usr", &link).unwrap();
        assert!(matches!(place_in(&link, Flavour::Standard), Err(Unfit::NotOurs)));
    }

    #[test]
    fn a_directory_for_other_users_is_opened_for_them() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path().join("own");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        let path = place_at(&folder, Flavour::Standard).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&path)), (0o755, 0o644));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(place_at(&folder, Flavour::Standard), Err(LibraryError::Unsuitable { .. })));
    }

    #[test]
    fn a_path_that_cannot_be_preloaded_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(place_in(&directory.path().join("a b"), Flavour::Standard), Err(Unfit::Separator)));
        assert!(matches!(place_in(&directory.path().join("a:b"), Flavour::Standard), Err(Unfit::Separator)));
        assert!(matches!(place_in(Path::new("cache"), Flavour::Standard), Err(Unfit::Relative)));
    }

    #[test]
    fn the_library_comes_first_and_only_once() {
        let library = Path::new("/c/libfragprof_sampler.so");
        assert_eq!(preload(library, None), "/c/libfragprof_sampler.so");
        assert_eq!(
            preload(library, Some(OsStr::new("libjemalloc.so.2 /x/liby.so"))),
            "/c/libfragprof_sampler.so:libjemalloc.so.2:/x/liby.so"
        );
        assert_eq!(preload(library, Some(OsStr::new("/old/libfragprof_sampler.so:/x/liby.so"))), "/c/libfragprof_sampler.so:/x/liby.so");
    }
}
