//! Known builds as text: one line per build, in the shipped table and in a cache with one file per build.
//!
//! ```text
//! BUILD_ID SHA256 allocs=98acd:rax:block,… frees=96293:rbx:chunk,…
//! BUILD_ID SHA256 none=no-cover:free
//! ```
//!
//! The SHA-256 is that of the whole library: the line applies only to this file, even if another one has the same build id.

use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::machine::Machine;
use crate::machine::register::Register;
use crate::replace::replace;
use crate::selective::digest::Digest;
use crate::selective::{Holds, LargeSite, LargeSites, Library, NoSites, Unfit};

/// First line of a cache file: its type and version. The version must be increased when the format changes or the finder finds more sites,
/// so that stored builds without sites are examined again.
const HEADER: &str = "fragprof size-selective sites 1";
/// The cache's directory in the store.
const FOLDER: &str = "large-sites";
/// Maximum number of builds kept. A node has a handful.
const FILES_MAX: usize = 256;
/// Maximum size of a file: a line has about 300 bytes.
const FILE_BYTES_MAX: u64 = 4096;
/// Maximum number of sites of each kind in a line.
const PLACES_MAX: usize = 16;
/// Maximum number of digits of a build id: those of SHA-1 have 40.
const BUILD_ID_DIGITS_MAX: usize = 128;

/// A site, by its virtual address in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub vaddr: u64,
    pub register: Register,
    pub holds: Holds,
}

/// The stored result for a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    build_id: String,
    pub(super) digest: Digest,
    /// The sites for new blocks and for freed ones; or why there are none.
    pub(super) found: Result<(Vec<Place>, Vec<Place>), Unfit>,
}

/// The reasons why a build has no sites, with the words that represent them.
const UNFIT: [(&str, Unfit); 13] = [
    ("no-cover:malloc", Unfit::NoCover("malloc")),
    ("no-cover:calloc", Unfit::NoCover("calloc")),
    ("no-cover:free", Unfit::NoCover("free")),
    ("refuted:malloc", Unfit::Refuted("malloc")),
    ("refuted:calloc", Unfit::Refuted("calloc")),
    ("refuted:free", Unfit::Refuted("free")),
    ("refuted:some", Unfit::Refuted("malloc, calloc or free")),
    ("not-tried:cache", Unfit::NotTried("serve small blocks from a thread cache")),
    ("not-tried:locks", Unfit::NotTried("lock its arenas among several threads")),
    ("not-tried:arena", Unfit::NotTried("use a second arena")),
    ("not-tried:wait", Unfit::NotTried("wait for a lock")),
    ("not-tried:failure", Unfit::NotTried("fail")),
    ("not-tried:large", Unfit::NotTried("serve a large block")),
];

impl Entry {
    /// The entry as a line.
    #[must_use]
    pub fn line(&self) -> String {
        let list = |places: &[Place]| -> String {
            let texts: Vec<String> = places.iter().map(ToString::to_string).collect();
            texts.join(",")
        };
        let found = match &self.found {
            Ok((allocs, frees)) => format!("allocs={} frees={}", list(allocs), list(frees)),
            Err(unfit) => format!("none={}", UNFIT.iter().find(|(_, known)| known == unfit).map_or("no-cover:malloc", |(word, _)| word)),
        };
        format!("{} {} {found}", self.build_id, self.digest)
    }

    /// The build id, in hex; `none` if it has none.
    #[must_use]
    pub fn build_id(&self) -> &str {
        &self.build_id
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let holds = match self.holds {
            Holds::Block => "block",
            Holds::Chunk => "chunk",
        };
        write!(f, "{:x}:{}:{holds}", self.vaddr, self.register.name())
    }
}

/// Parses a line; `None` if it is not valid.
#[must_use]
pub fn parse_entry(line: &str) -> Option<Entry> {
    let mut words = line.split(' ');
    let build_id = words.next()?;
    let is_hex = |text: &str| text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
    if build_id.is_empty() || build_id.len() > BUILD_ID_DIGITS_MAX || !(build_id == "none" || is_hex(build_id)) {
        return None;
    }
    let digest = Digest::parse(words.next()?)?;
    let first = words.next()?;
    let found = match first.strip_prefix("none=") {
        Some(word) => Err(UNFIT.iter().find(|(known, _)| *known == word)?.1),
        None => Ok((parse_places(first.strip_prefix("allocs=")?)?, parse_places(words.next()?.strip_prefix("frees=")?)?)),
    };
    words.next().is_none().then(|| Entry { build_id: build_id.to_owned(), digest, found })
}

fn parse_places(text: &str) -> Option<Vec<Place>> {
    let mut places: Vec<Place> = Vec::new();
    for place in text.split(',') {
        let place = parse_place(place)?;
        if places.len() >= PLACES_MAX || places.iter().any(|there| there.vaddr == place.vaddr) {
            return None;
        }
        places.push(place);
    }
    Some(places)
}

fn parse_place(text: &str) -> Option<Place> {
    let mut parts = text.split(':');
    let digits = parts.next()?;
    if digits.is_empty() || digits.starts_with('0') || !digits.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c)) {
        return None;
    }
    let vaddr = u64::from_str_radix(digits, 16).ok()?;
    let name = parts.next()?;
    let register = (0..16).find(|&number| Machine::X86_64.register_name(number) == name)?;
    let holds = match parts.next()? {
        "block" => Holds::Block,
        "chunk" => Holds::Chunk,
        _ => return None,
    };
    parts.next().is_none().then_some(Place { vaddr, register: Register(register), holds })
}

/// The entry of a library that was examined; `None` if the result is not permanent.
pub(super) fn entry_of(library: &Library, tried: &Result<LargeSites, NoSites>) -> Option<Entry> {
    let places = |sites: &[LargeSite]| -> Vec<Place> {
        sites.iter().map(|site| Place { vaddr: site.vaddr, register: site.register, holds: site.holds }).collect()
    };
    let found = match tried {
        Ok(sites) => Ok((places(&sites.allocs), places(&sites.frees))),
        Err(NoSites::Unfit { why, .. }) => Err(*why),
        Err(_) => return None,
    };
    Some(Entry { build_id: library.build_id.clone(), digest: library.digest, found })
}

fn path_of(store: &Path, digest: &Digest) -> PathBuf {
    store.join(FOLDER).join(format!("{digest}.txt"))
}

/// The cache's entry for a file; `None` also if it is damaged.
pub(super) fn read(store: &Path, digest: &Digest) -> Option<Entry> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path_of(store, digest)).ok()?;
    let mut text = String::new();
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    let line = text.strip_prefix(HEADER)?.strip_prefix('\n')?.strip_suffix('\n')?;
    parse_entry(line).filter(|entry| entry.digest == *digest)
}

/// Stores an entry if there is room. Otherwise it is determined again next time.
pub(super) fn write(store: &Path, entry: &Entry) {
    if let Err(error) = write_file(store, entry) {
        tracing::warn!("cannot store the size-selective sites of build {} in {}: {error}", entry.build_id, store.display());
    }
}

fn write_file(store: &Path, entry: &Entry) -> io::Result<()> {
    let folder = store.join(FOLDER);
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if fs::read_dir(&folder)?.take(FILES_MAX).count() >= FILES_MAX {
        return Err(io::Error::other(format!("{FILES_MAX} builds are already stored there")));
    }
    replace(&path_of(store, &entry.digest), format!("{HEADER}\n{}\n", entry.line()).as_bytes(), 0o600)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn entry() -> Entry {
        let place = |vaddr, register, holds| Place { vaddr, register: Register(register), holds };
        let found = Ok((vec![place(0x98acd, 0, Holds::Block), place(0x989da, 8, Holds::Block)], vec![place(0x96293, 3, Holds::Chunk)]));
        Entry { build_id: "93ac61".into(), digest: Digest::of(b"library"), found }
    }

    #[test]
    fn a_line_is_parsed_as_it_was_written() {
        let line = entry().line();
        assert!(line.ends_with("allocs=98acd:rax:block,989da:r8:block frees=96293:rbx:chunk"), "{line}");
        assert_eq!(parse_entry(&line), Some(entry()));
        for (_, unfit) in UNFIT {
            let none = Entry { found: Err(unfit), ..entry() };
            assert_eq!(parse_entry(&none.line()), Some(none));
        }
    }

    #[test]
    fn a_line_with_anything_else_in_it_is_rejected() {
        let line = entry().line();
        let long = format!("{line},{}", vec!["1:rax:block"; 20].join(","));
        let wrong = [
            line.replace("rax", "eax"),
            line.replace(":block", ":blocks"),
            line.replace("98acd", "+98acd"),
            line.replace("98acd", "098acd"),
            line.replace("98acd", "1ffffffffffffffff"),
            line.replace("989da", "98acd"),
            line.replace("93ac61 ", "93AC61 "),
            line.replace("allocs=", "none="),
            format!("{line} "),
            format!(" {line}"),
            long,
            line[..line.len() - 6].to_owned(),
        ];
        for wrong in wrong {
            assert_eq!(parse_entry(&wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_entry_is_stored_for_its_file_only_and_damage_is_detected() {
        let store = tempfile::tempdir().unwrap();
        let entry = entry();
        assert_eq!(read(store.path(), &entry.digest), None);
        write(store.path(), &entry);
        assert_eq!(read(store.path(), &entry.digest), Some(entry.clone()));
        let (path, other) = (path_of(store.path(), &entry.digest), Digest::of(b"another"));
        fs::copy(&path, path_of(store.path(), &other)).unwrap();
        assert_eq!(read(store.path(), &other), None, "an entry about another file");
        let whole = fs::read_to_string(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &whole.replace("sites 1", "sites 2"), &whole.repeat(50), ""] {
            fs::write(&path, damaged).unwrap();
            assert_eq!(read(store.path(), &entry.digest), None);
        }
    }
}
