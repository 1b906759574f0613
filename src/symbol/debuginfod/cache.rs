//! The directory of fetched debug files: limited in bytes and in files; the least recently used are removed.
//!
//! `BUILDID.debug` is a complete file, `BUILDID.debug.part-PID-N` one that is being fetched. Only regular files with such names are ever
//! removed, so a directory that has other files too loses none of them. Every name is resolved in the directory that was opened at the start,
//! without following links.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use thiserror::Error;

use super::file;
use crate::process::elf::BuildId;

/// Most files kept. Debug files have some MiB, so that the limit on bytes is reached first.
const FILES_MAX: usize = 4096;
/// Most entries of the directory that are looked at; files beyond it are neither counted nor removed.
const ENTRIES_MAX: usize = 1 << 16;
/// Age at which an incomplete file was left behind by a process that was killed: no download takes a tenth of it.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Why a directory is not used.
#[derive(Debug, Error)]
pub enum CacheError {
    /// It cannot be created or opened.
    #[error("cannot use {path} for fetched debug information: {source}")]
    Open {
        /// The directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// Others could put files there whose names would end up in profiles.
    #[error(
        "{path} is not used for fetched debug information: another user may write to it (it belongs to user {owner}, with mode {mode:04o})"
    )]
    OfOthers {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
}

/// The directory.
#[derive(Debug)]
pub(super) struct Cache {
    path: PathBuf,
    directory: File,
    bytes_max: u64,
    /// Limit of each file with its sections decompressed.
    pub open_bytes_max: u64,
    /// The file that is being fetched.
    partial: Mutex<Option<String>>,
    /// Bytes of all files, when it was last looked at.
    pub bytes: AtomicU64,
    /// Files removed to stay within the limits.
    pub evicted: AtomicU64,
}

/// A file that is being fetched. It is removed unless it is [kept](Cache::keep).
#[derive(Debug)]
pub(super) struct Partial<'a> {
    cache: &'a Cache,
    name: String,
    pub file: File,
}

/// A file of the directory that belongs to the cache.
struct Entry {
    name: String,
    bytes: u64,
    /// When it was last used, in seconds and nanoseconds since 1970.
    used: (i64, i64),
    is_partial: bool,
}

impl Cache {
    /// Opens the directory, and creates it for this user alone if it does not exist. A file of more than `bytes_max` bytes is not kept.
    pub fn open(path: &Path, bytes_max: u64, open_bytes_max: u64) -> Result<Self, CacheError> {
        let failed = |source| CacheError::Open { path: path.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = File::from(rustix::fs::open(path, flags, Mode::empty()).map_err(|error| failed(error.into()))?);
        let meta = directory.metadata().map_err(failed)?;
        let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
        if owner != rustix::process::geteuid().as_raw() || mode & 0o022 != 0 {
            return Err(CacheError::OfOthers { path: path.to_owned(), owner, mode });
        }
        let cache = Self {
            path: path.to_owned(),
            directory,
            bytes_max,
            open_bytes_max,
            partial: Mutex::default(),
            bytes: AtomicU64::new(0),
            evicted: AtomicU64::new(0),
        };
        cache.make_space(0, None);
        Ok(cache)
    }

    /// Largest file that is kept.
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// The complete file of a build id, which counts as used now. One that has been damaged is removed.
    pub fn find(&self, build_id: &BuildId) -> Option<PathBuf> {
        let name = complete(build_id);
        // Opening a pipe must not wait for its writer.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.directory, &name, flags, Mode::empty()).ok()?);
        if !file.metadata().is_ok_and(|meta| meta.is_file()) {
            return None;
        }
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let unchanged = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
        // On a read-only file system nothing is removed either, so the order does not matter.
        let _ = rustix::fs::futimens(&file, &Timestamps { last_access: now, last_modification: unchanged });
        match file::check(file, build_id, self.open_bytes_max) {
            Ok(()) => Some(self.opened_by(&name)),
            Err(reason) => {
                tracing::warn!("{} is removed: {reason}", self.path.join(&name).display());
                self.remove(&name);
                None
            }
        }
    }

    /// Creates a file to fetch a debug file into.
    pub fn create(&self, build_id: &BuildId) -> io::Result<Partial<'_>> {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        let name = format!("{}.part-{}-{}", complete(build_id), std::process::id(), CREATED.fetch_add(1, Ordering::Relaxed));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::openat(&self.directory, &name, flags, Mode::RUSR | Mode::WUSR)?);
        *self.partial() = Some(name.clone());
        Ok(Partial { cache: self, name, file })
    }

    /// Makes a fetched file a complete one, after others were removed for it.
    pub fn keep(&self, partial: &Partial<'_>, build_id: &BuildId) -> io::Result<()> {
        self.make_space(partial.file.metadata()?.len(), Some(&partial.name));
        Ok(rustix::fs::renameat(&self.directory, &partial.name, &self.directory, complete(build_id))?)
    }

    /// The path that opens a file of the directory, whatever happens to the directories above it.
    fn opened_by(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd()))
    }

    /// Removes the file that is being fetched, if there is one, because the process ends.
    pub fn abandon(&self) {
        if let Some(name) = self.partial().take() {
            self.remove(&name);
        }
    }

    fn partial(&self) -> MutexGuard<'_, Option<String>> {
        self.partial.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the least recently used files until `incoming_bytes` more are within the limits; `incoming` has these bytes and is not counted.
    fn make_space(&self, incoming_bytes: u64, incoming: Option<&str>) {
        let mut entries = self.entries().unwrap_or_default();
        let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let is_abandoned =
            |entry: &Entry| entry.is_partial && entry.used.0.saturating_add_unsigned(ABANDONED_AFTER.as_secs()) < now_s.cast_signed();
        entries.retain(|entry| Some(entry.name.as_str()) != incoming && !(is_abandoned(entry) && self.remove(&entry.name)));
        entries.sort_by_key(|entry| entry.used);
        let mut bytes = entries.iter().fold(incoming_bytes, |sum, entry| sum.saturating_add(entry.bytes));
        let mut files = entries.len() + usize::from(incoming.is_some());
        for entry in entries.iter().filter(|entry| !entry.is_partial) {
            if bytes <= self.bytes_max && files <= FILES_MAX {
                break;
            }
            if self.remove(&entry.name) {
                bytes = bytes.saturating_sub(entry.bytes);
                files -= 1;
                self.evicted.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    /// The regular files that have a name of the cache's own.
    fn entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for found in Dir::read_from(&self.directory)?.take(ENTRIES_MAX) {
            let Ok(name) = found?.file_name().to_str().map(str::to_owned) else { continue };
            let Some(is_partial) = is_partial(&name) else { continue };
            // It may have been removed meanwhile.
            let Ok(stat) = rustix::fs::statat(&self.directory, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                continue;
            }
            let bytes = u64::try_from(stat.st_size).unwrap_or(0);
            // Fetching writes; looking up is noted as an access.
            let used = (stat.st_atime, stat.st_atime_nsec as i64).max((stat.st_mtime, stat.st_mtime_nsec as i64));
            entries.push(Entry { name, bytes, used, is_partial });
        }
        Ok(entries)
    }

    fn remove(&self, name: &str) -> bool {
        rustix::fs::unlinkat(&self.directory, name, AtFlags::empty()).is_ok()
    }
}

impl Drop for Partial<'_> {
    fn drop(&mut self) {
        *self.cache.partial() = None;
        // A file that was kept has another name by now.
        self.cache.remove(&self.name);
    }
}

/// Name of a complete file.
fn complete(build_id: &BuildId) -> String {
    format!("{build_id}.debug")
}

/// Whether a name of the cache's own is that of an incomplete file; `None` for other names.
fn is_partial(name: &str) -> Option<bool> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (hex, rest) = name.split_once(".debug")?;
    let is_build_id = (16..=128).contains(&hex.len()) && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if !is_build_id {
        return None;
    }
    if rest.is_empty() {
        return Some(false);
    }
    let (pid, number) = rest.strip_prefix(".part-")?.split_once('-')?;
    (digits(pid) && digits(number)).then_some(true)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Write as _;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::super::testing::{Stripped, names_in};
    use super::*;

    fn id(byte: u8) -> BuildId {
        BuildId(vec![byte; 20])
    }

    /// Puts a file of so many bytes under the name of a complete one, last used so many seconds after 1970.
    fn put(directory: &Path, build_id: &BuildId, bytes: usize, used_s: u64) {
        let file = File::create(directory.join(complete(build_id))).unwrap();
        file.set_len(bytes as u64).unwrap();
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used_s);
        file.set_times(std::fs::FileTimes::new().set_accessed(used).set_modified(used)).unwrap();
    }

    #[test]
    fn the_least_recently_used_files_make_space_and_foreign_files_stay() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cache");
        let cache = Cache::open(&path, 1000, u64::MAX).unwrap();
        (1..=4).for_each(|byte| put(&path, &id(byte), 240, 1000 + u64::from(byte)));
        let hex = id(9).to_string();
        let foreign =
            ["notes.debug", "0123.debug", &format!("{hex}.DEBUG"), &format!("{hex}.debug.part-x-1"), &format!("{hex}.debug~"), &hex];
        foreign.iter().for_each(|name| std::fs::write(path.join(name), [0; 4000]).unwrap());
        std::fs::create_dir(path.join(complete(&id(8)))).unwrap();
        let mut partial = cache.create(&id(5)).unwrap();
        partial.file.write_all(&[0; 300]).unwrap();
        cache.keep(&partial, &id(5)).unwrap();
        drop(partial);
        // 960 + 300 bytes: the two oldest are gone.
        let mut expected: Vec<String> =
            foreign.iter().map(ToString::to_string).chain([8, 3, 4, 5].map(|byte| complete(&id(byte)))).collect();
        expected.sort();
        assert_eq!(names_in(&path), expected);
        assert_eq!((cache.evicted.load(Ordering::Relaxed), cache.bytes.load(Ordering::Relaxed)), (2, 780));
    }

    #[test]
    fn a_look_up_is_a_use() {
        let place = tempfile::tempdir().unwrap();
        let stripped = Stripped::build(place.path());
        let path = place.path().join("cache");
        let bytes = stripped.debug.len();
        let cache = Cache::open(&path, 3 * bytes as u64, u64::MAX).unwrap();
        std::fs::write(path.join(complete(&stripped.build_id)), &stripped.debug).unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let file = File::options().write(true).open(path.join(complete(&stripped.build_id))).unwrap();
        file.set_times(std::fs::FileTimes::new().set_accessed(old).set_modified(old)).unwrap();
        put(&path, &id(1), bytes, 1000);
        put(&path, &id(2), bytes, 1001);
        let found = cache.find(&stripped.build_id).unwrap();
        assert_eq!(std::fs::read(found).unwrap(), stripped.debug);
        let mut partial = cache.create(&id(3)).unwrap();
        partial.file.write_all(b"x").unwrap();
        cache.keep(&partial, &id(3)).unwrap();
        assert!(cache.find(&stripped.build_id).is_some(), "the one that was looked up least long ago stays");
        assert!(!path.join(complete(&id(1))).exists() && path.join(complete(&id(2))).exists());
    }

    #[test]
    fn links_pipes_and_damaged_files_are_not_found() {
        let place = tempfile::tempdir().unwrap();
        let stripped = Stripped::build(place.path());
        let path = place.path().join("cache");
        let cache = Cache::open(&path, 1 << 20, u64::MAX).unwrap();
        let name = path.join(complete(&stripped.build_id));
        let victim = place.path().join("victim");
        std::fs::write(&victim, &stripped.debug).unwrap();
        symlink(&victim, &name).unwrap();
        assert_eq!(cache.find(&stripped.build_id), None);
        // A file that is fetched replaces the link, and leaves alone what it points to.
        let mut partial = cache.create(&stripped.build_id).unwrap();
        partial.file.write_all(b"damaged").unwrap();
        cache.keep(&partial, &stripped.build_id).unwrap();
        assert!(name.symlink_metadata().unwrap().is_file());
        assert_eq!(std::fs::read(&victim).unwrap(), stripped.debug);
        assert_eq!(cache.find(&stripped.build_id), None);
        assert!(!name.exists(), "a damaged file is removed");
        rustix::fs::mknodat(rustix::fs::CWD, &name, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert_eq!(cache.find(&stripped.build_id), None);
        assert!(name.exists(), "what is no file is not the cache's");
    }

    #[test]
    fn a_directory_of_others_or_behind_a_link_is_refused_and_an_own_one_is_private() {
        let place = tempfile::tempdir().unwrap();
        let own = place.path().join("a/b");
        drop(Cache::open(&own, 1, u64::MAX).unwrap());
        assert_eq!(own.metadata().unwrap().mode() & 0o7777, 0o700);
        let link = place.path().join("link");
        symlink(&own, &link).unwrap();
        assert!(matches!(Cache::open(&link, 1, u64::MAX), Err(CacheError::Open { .. })));
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o770)).unwrap();
        let error = Cache::open(&own, 1, u64::MAX).unwrap_err();
        assert!(matches!(error, CacheError::OfOthers { mode: 0o770, .. }), "{error}");
        let file = place.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(matches!(Cache::open(&file, 1, u64::MAX), Err(CacheError::Open { .. })));
    }

    #[test]
    fn an_incomplete_file_is_removed_with_its_download_by_the_end_and_after_an_hour() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("cache");
        let cache = Cache::open(&path, 1000, u64::MAX).unwrap();
        drop(cache.create(&id(1)).unwrap());
        assert_eq!(names_in(&path), Vec::<String>::new());
        let partial = cache.create(&id(1)).unwrap();
        cache.abandon();
        assert_eq!(names_in(&path), Vec::<String>::new());
        assert!(cache.keep(&partial, &id(1)).is_err());
        for (number, age_s) in [(1, 7200), (2, 60)] {
            let file = File::create(path.join(format!("{}.part-1-{number}", complete(&id(1))))).unwrap();
            let used = SystemTime::now() - Duration::from_secs(age_s);
            file.set_times(std::fs::FileTimes::new().set_accessed(used).set_modified(used)).unwrap();
        }
        drop(Cache::open(&path, 1000, u64::MAX).unwrap());
        assert_eq!(names_in(&path), [format!("{}.part-1-2", complete(&id(1)))]);
    }
}
