//! Profiles that wait, on disk: they outlive a restart of the agent, and a server that is away for longer.
//!
//! Only what could not be sent at once is written: one file for each profile, in a directory of its own that only the agent's user may read. The
//! queue's limits are those of the directory.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use crate::process::handle::read_bounded;
use crate::replace::replace;

/// Begins each file; the protocol's name, the path of the request, a line feed and the body follow.
const MAGIC: &str = "fragprof-push-1 ";
/// The end of a file's name.
const SUFFIX: &str = ".push";
/// Bytes of a file's first line.
const LINE_BYTES_MAX: usize = 8192;
/// Private whatever the umask: profiles have names of functions and files of all users' processes.
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Whether a file's name goes on as that of a write that was interrupted (`replace`): `.PID.N`.
fn is_of_interrupted_write(rest: &str) -> bool {
    let mut parts = rest.strip_prefix('.').unwrap_or_default().split('.');
    let mut is_number = || parts.next().is_some_and(|part| part.parse::<u32>().is_ok());
    is_number() && is_number() && parts.next().is_none()
}

/// A request as it was kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Kept {
    /// Number of its file.
    pub number: u64,
    /// Its path.
    pub path: String,
    /// Its body.
    pub body: Vec<u8>,
}

/// The directory.
#[derive(Debug)]
pub(super) struct Spool {
    directory: PathBuf,
    protocol: &'static str,
    next: u64,
}

impl Spool {
    /// Opens or creates the directory, and reads the requests in it, the oldest first: at most so many of at most so many bytes, the newest ones.
    /// Files of another protocol, damaged and surplus ones are removed; their number is the last part of the result.
    ///
    /// # Errors
    /// If the directory can neither be created nor read.
    pub fn open(directory: &Path, protocol: &'static str, files_max: usize, bytes_max: usize) -> io::Result<(Self, Vec<Kept>, u64)> {
        DirBuilder::new().recursive(true).mode(DIRECTORY_MODE).create(directory)?;
        let mut numbers: Vec<u64> = Vec::new();
        for entry in fs::read_dir(directory)? {
            let name = entry?.file_name();
            let Some((number, rest)) = name.to_str().and_then(|name| name.split_once(SUFFIX)) else { continue };
            // Anything else is not ours, and is left alone.
            match (number.parse(), rest) {
                (Ok(number), "") => numbers.push(number),
                (Ok(_), rest) if is_of_interrupted_write(rest) => drop(fs::remove_file(directory.join(&name))),
                _ => {}
            }
        }
        numbers.sort_unstable();
        let mut spool = Self { directory: directory.to_owned(), protocol, next: numbers.last().map_or(0, |last| last.saturating_add(1)) };
        let (mut kept, mut bytes, mut lost) = (Vec::new(), 0usize, 0);
        for number in numbers.into_iter().rev() {
            let read = read_bounded(&spool.file(number), bytes_max as u64 + 1).ok();
            let request = read
                .and_then(|file| spool.parse(number, file))
                .filter(|request| kept.len() < files_max && bytes.saturating_add(request.body.len()) <= bytes_max);
            match request {
                Some(request) => {
                    bytes += request.body.len();
                    kept.push(request);
                }
                None => {
                    spool.remove(number);
                    lost += 1;
                }
            }
        }
        kept.reverse();
        spool.next = spool.next.max(kept.last().map_or(0, |last| last.number.saturating_add(1)));
        Ok((spool, kept, lost))
    }

    fn file(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:020}{SUFFIX}"))
    }

    fn parse(&self, number: u64, mut file: Vec<u8>) -> Option<Kept> {
        let end = file.iter().take(LINE_BYTES_MAX).position(|&byte| byte == b'\n')?;
        let body = file.split_off(end + 1);
        let line = std::str::from_utf8(file.get(..end)?).ok()?;
        let (protocol, path) = line.strip_prefix(MAGIC)?.split_once(' ')?;
        (protocol == self.protocol && path.starts_with('/')).then(|| Kept { number, path: path.to_owned(), body })
    }

    /// Writes a request; returns the number of its file.
    ///
    /// # Errors
    /// If it cannot be written; nothing is left behind then.
    pub fn keep(&mut self, path: &str, body: &[u8]) -> io::Result<u64> {
        let number = self.next;
        let head = format!("{MAGIC}{} {path}\n", self.protocol);
        replace(&self.file(number), &[head.as_bytes(), body].concat(), FILE_MODE)?;
        self.next = number.saturating_add(1);
        Ok(number)
    }

    /// Removes a request that was sent or given up.
    pub fn remove(&self, number: u64) {
        // If that fails it is sent again after a restart.
        if let Err(error) = fs::remove_file(self.file(number)) {
            tracing::debug!("cannot remove {}: {error}", self.file(number).display());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::PermissionsExt as _;

    use proptest::prelude::*;

    use super::*;

    const PROTOCOL: &str = "parca";

    fn open(directory: &Path) -> (Spool, Vec<Kept>, u64) {
        Spool::open(directory, PROTOCOL, 3, 100).unwrap()
    }

    #[test]
    fn what_was_kept_is_read_again_in_order_and_removed_once_it_is_sent() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("push");
        let (mut spool, kept, lost) = open(&directory);
        assert!(kept.is_empty() && lost == 0);
        let first = spool.keep("/a?b", b"1\n2").unwrap();
        spool.keep("/c", b"").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&directory), mode(&spool.file(first))), (0o700, 0o600));
        let (spool, kept, _) = open(&directory);
        let paths: Vec<(&str, &[u8])> = kept.iter().map(|one| (one.path.as_str(), one.body.as_slice())).collect();
        assert_eq!(paths, [("/a?b", b"1\n2".as_slice()), ("/c", b"")]);
        spool.remove(first);
        let (mut spool, kept, _) = open(&directory);
        assert_eq!(kept.len(), 1);
        // Numbers go on, so that the order stays.
        assert!(spool.keep("/d", b"x").unwrap() > kept[0].number);
    }

    #[test]
    fn surplus_damaged_and_foreign_files_are_removed_and_counted() {
        let place = tempfile::tempdir().unwrap();
        let (mut spool, ..) = open(place.path());
        for number in 0..5 {
            spool.keep(&format!("/{number}"), &[0; 30]).unwrap();
        }
        fs::write(spool.file(90), "fragprof-push-1 otlp /x\n").unwrap();
        fs::write(spool.file(91), "garbage").unwrap();
        fs::write(spool.file(92), vec![b'x'; 1000]).unwrap();
        fs::write(place.path().join("0.push.77.1"), "half").unwrap();
        // The directory may have been somebody's before.
        let others = ["history.sqlite", "notes.push", "1.push.old", "1.push.7", "1.push.7.8.9"];
        for name in others {
            fs::write(place.path().join(name), "not ours").unwrap();
        }
        let (_, kept, lost) = open(place.path());
        assert_eq!((kept.iter().map(|one| one.path.as_str()).collect::<Vec<_>>(), lost), (vec!["/2", "/3", "/4"], 5));
        assert!(others.iter().all(|name| place.path().join(name).exists()));
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3 + others.len());
        let unusable = place.path().join("file");
        fs::write(&unusable, "").unwrap();
        assert!(Spool::open(&unusable, PROTOCOL, 1, 1).is_err());
    }

    proptest! {
        #[test]
        fn any_file_is_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let spool = Spool { directory: PathBuf::new(), protocol: PROTOCOL, next: 0 };
            spool.parse(1, bytes.clone());
            spool.parse(1, [MAGIC.as_bytes(), b"parca /", &bytes].concat());
        }
    }
}
