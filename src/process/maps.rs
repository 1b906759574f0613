//! `/proc/PID/maps`: a byte parser and the resulting mappings. Pure; [`crate::process::handle::Process::maps`] reads the file.
//!
//! The format is the kernel's `show_map_vma` (fs/proc/task_mmu.c): `start-end perms offset major:minor inode name`, one mapping per line.
//! In names only the newline is escaped (`\012`); they may contain all other bytes, including spaces and invalid UTF-8. The name of an
//! unlinked file ends in ` (deleted)`; a file whose name really ends like this looks the same, so names are only for display and as a last
//! resort for opening, never an identity.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::units::{Addr, FileOffset};

/// Maximum number of mappings kept per process. The kernel's default limit (vm.max_map_count) is 65,530; databases raise it to 262,144 and
/// rarely more. 2^20 mappings take about 150 MB here, the limit for one process.
pub const MAPPINGS_MAX: usize = 1 << 20;

/// Permissions of a mapping's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Permissions {
    /// Pages can be read.
    pub read: bool,
    /// Pages can be written.
    pub write: bool,
    /// Pages can be executed.
    pub execute: bool,
    /// Writes go to the file and to other processes that map it; otherwise written pages become private copies.
    pub shared: bool,
}

/// A device number as shown in `/proc/PID/maps`. On overlay and btrfs file systems `stat` shows a different one for the same file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// What a mapping maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// Anonymous memory without a name.
    Anonymous,
    /// A name given by the kernel or the process (`[heap]`, `[stack]`, `[vdso]`, `[uprobes]`, `[anon:name]`).
    Named(String),
    /// A file.
    File {
        /// Path below the process's root directory, as it was when the file was mapped, without the mark of a deleted file.
        path: PathBuf,
        /// The kernel marked the name as deleted (or the file's name really ends like this).
        deleted: bool,
    },
}

/// One line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: Addr,
    /// First address after it; always above `start`.
    pub end: Addr,
    /// Offset in the file of the byte at `start`; 0 for anonymous memory.
    pub offset: FileOffset,
    /// Permissions.
    pub permissions: Permissions,
    /// Device of the file, 0:0 without one.
    pub device: Device,
    /// Inode of the file, 0 without one.
    pub inode: u64,
    /// What it maps.
    pub backing: Backing,
}

impl Mapping {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.end.0.saturating_sub(self.start.0)
    }

    /// Whether it has no bytes; never true for a parsed mapping.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether `addr` lies in it.
    #[must_use]
    pub fn contains(&self, addr: Addr) -> bool {
        self.start <= addr && addr < self.end
    }

    /// The file offset of the byte at `addr`; `None` outside the mapping or without a file.
    #[must_use]
    pub fn offset_of(&self, addr: Addr) -> Option<FileOffset> {
        if !self.contains(addr) || self.path().is_none() {
            return None;
        }
        self.offset.0.checked_add(addr.0 - self.start.0).map(FileOffset)
    }

    /// The address at which the file's byte `offset` is mapped; `None` if this mapping does not cover it.
    #[must_use]
    pub fn address_of(&self, offset: FileOffset) -> Option<Addr> {
        let distance = offset.0.checked_sub(self.offset.0)?;
        (distance < self.len()).then(|| Addr(self.start.0 + distance))
    }

    /// The file's path below the process's root directory; `None` without a file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.backing {
            Backing::File { path, .. } => Some(path),
            _ => None,
        }
    }

    /// The file's name without directories, for comparisons; empty without a file.
    #[must_use]
    pub fn file_name(&self) -> String {
        self.path().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// The mappings of a process, by ascending address, and what was refused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Maps {
    /// Mappings by ascending address.
    pub mappings: Vec<Mapping>,
    /// Malformed lines.
    pub malformed_lines: u64,
    /// Mappings beyond [`MAPPINGS_MAX`].
    pub refused_mappings: u64,
}

impl Maps {
    /// Parses the bytes of a `maps` file. Never fails: unreadable lines are counted.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut maps = Self::default();
        for line in bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
            if maps.mappings.len() == MAPPINGS_MAX {
                maps.refused_mappings += 1;
                continue;
            }
            match parse_line(line) {
                Some(mapping) => maps.mappings.push(mapping),
                None => maps.malformed_lines += 1,
            }
        }
        maps
    }

    /// The mapping that contains `addr`.
    #[must_use]
    pub fn find(&self, addr: Addr) -> Option<&Mapping> {
        let after = self.mappings.partition_point(|m| m.start <= addr);
        self.mappings.get(after.checked_sub(1)?).filter(|m| m.contains(addr))
    }

    /// The executable file mappings, by ascending address.
    pub fn executable_files(&self) -> impl Iterator<Item = &Mapping> {
        self.mappings.iter().filter(|m| m.permissions.execute && m.path().is_some())
    }
}

/// Removes the bytes up to and including `stop` from the front of `rest`; returns those before `stop`.
fn field<'a>(rest: &mut &'a [u8], stop: u8) -> Option<&'a [u8]> {
    let at = rest.iter().position(|&b| b == stop)?;
    let (head, tail) = rest.split_at(at);
    *rest = tail.get(1..)?;
    Some(head)
}

fn hex(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &b| Some(value << 4 | u64::from(char::from(b).to_digit(16)?)))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &b| value.checked_mul(10)?.checked_add(u64::from(char::from(b).to_digit(10)?)))
}

fn parse_line(line: &[u8]) -> Option<Mapping> {
    let mut rest = line;
    let start = hex(field(&mut rest, b'-')?)?;
    let end = hex(field(&mut rest, b' ')?)?;
    let perms: [u8; 4] = field(&mut rest, b' ')?.try_into().ok()?;
    let offset = hex(field(&mut rest, b' ')?)?;
    let major = u32::try_from(hex(field(&mut rest, b':')?)?).ok()?;
    let minor = u32::try_from(hex(field(&mut rest, b' ')?)?).ok()?;
    // In a line without a name the inode is the last field, with or without a trailing space.
    let inode_digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let (inode, name) = rest.split_at(inode_digits);
    let inode = decimal(inode)?;
    if end <= start {
        return None;
    }
    let name_at = name.iter().position(|&b| b != b' ').unwrap_or(name.len());
    let name = name.get(name_at..)?;
    Some(Mapping {
        start: Addr(start),
        end: Addr(end),
        offset: FileOffset(offset),
        permissions: Permissions { read: perms[0] == b'r', write: perms[1] == b'w', execute: perms[2] == b'x', shared: perms[3] == b's' },
        device: Device { major, minor },
        inode,
        backing: backing(name),
    })
}

fn backing(name: &[u8]) -> Backing {
    // A file's name starts with `/`. Other names are given by the kernel or the process (prctl PR_SET_VMA), or belong to pseudo files
    // without a path (`anon_inode:[perf_event]`), which cannot be opened by path either.
    match name.first() {
        None => Backing::Anonymous,
        Some(b'/') => {
            let (path, deleted) = match name.strip_suffix(b" (deleted)") {
                Some(path) => (path, true),
                None => (name, false),
            };
            Backing::File { path: PathBuf::from(OsString::from_vec(unescape_newlines(path))), deleted }
        }
        Some(_) => Backing::Named(String::from_utf8_lossy(name).into_owned()),
    }
}

/// `\012` → newline. The kernel escapes nothing else, not even the backslash, so a name that really contains `\012` is decoded wrongly; the
/// file is still opened correctly, by its address.
fn unescape_newlines(name: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((&first, tail)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(b"\\012") {
            out.push(b'\n');
            rest = after;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_file_mapping_is_read_field_by_field() {
        let maps =
            Maps::parse(b"7f0e3a400000-7f0e3a555000 r-xp 00026000 fd:01 131146                     /usr/lib/x86_64-linux-gnu/libc.so.6\n");
        assert_eq!(
            maps.mappings,
            [Mapping {
                start: Addr(0x7f0e_3a40_0000),
                end: Addr(0x7f0e_3a55_5000),
                offset: FileOffset(0x26000),
                permissions: Permissions { read: true, write: false, execute: true, shared: false },
                device: Device { major: 0xfd, minor: 1 },
                inode: 131_146,
                backing: Backing::File { path: "/usr/lib/x86_64-linux-gnu/libc.so.6".into(), deleted: false },
            }]
        );
    }

    #[test]
    fn names_with_spaces_newlines_and_the_mark_of_deletion_are_parsed() {
        let maps = Maps::parse(
            b"1000-2000 r--p 0 0:0 0 \n\
              2000-3000 r--p 00000000 00:2f 7 /tmp/a b\\012c (x) (deleted)\n\
              3000-4000 rw-p 00000000 00:00 0                          [heap]\n\
              4000-5000 rw-s 00000000 00:01 9 /memfd:x (deleted)\n\
              ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n",
        );
        assert_eq!(maps.malformed_lines, 0);
        let backing: Vec<_> = maps.mappings.iter().map(|m| m.backing.clone()).collect();
        assert_eq!(
            backing,
            [
                Backing::Anonymous,
                Backing::File { path: "/tmp/a b\nc (x)".into(), deleted: true },
                Backing::Named("[heap]".into()),
                Backing::File { path: "/memfd:x".into(), deleted: true },
                Backing::Named("[vsyscall]".into()),
            ]
        );
    }

    #[test]
    fn an_address_and_its_file_offset_map_to_one_another() {
        let maps = Maps::parse(b"10000-20000 r-xp 3000 08:01 5 /bin/x\n30000-31000 rw-p 0 0:0 0\n");
        let mapping = maps.find(Addr(0x1_2345)).unwrap();
        assert_eq!(mapping.offset_of(Addr(0x1_2345)), Some(FileOffset(0x5345)));
        assert_eq!(mapping.address_of(FileOffset(0x5345)), Some(Addr(0x1_2345)));
        assert_eq!(mapping.address_of(FileOffset(0x2fff)), None);
        assert_eq!(mapping.address_of(FileOffset(0x1_3000)), None);
        assert_eq!(maps.find(Addr(0x2_0000)), None);
        assert_eq!(maps.find(Addr(0x3_0000)).unwrap().offset_of(Addr(0x3_0000)), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_parser_panic_and_every_skipped_line_is_counted(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let maps = Maps::parse(&bytes);
            let lines = bytes.split(|&b| b == b'\n').filter(|l| !l.is_empty()).count() as u64;
            prop_assert_eq!(maps.mappings.len() as u64 + maps.malformed_lines + maps.refused_mappings, lines);
        }

        #[test]
        fn a_damaged_line_is_counted_or_still_a_mapping(at in 0usize..70, byte in any::<u8>()) {
            let mut line = b"7f0e3a400000-7f0e3a555000 r-xp 00026000 fd:01 131146      /usr/lib/x".to_vec();
            if let Some(b) = line.get_mut(at) { *b = byte; }
            for mapping in Maps::parse(&line).mappings {
                prop_assert!(mapping.start < mapping.end);
            }
        }
    }
}
