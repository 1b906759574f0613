//! `/tmp/perf-PID.map`: names that a just-in-time compiler gives its code. Format of the kernel's
//! tools/perf/Documentation/jit-interface.txt: `START SIZE name`, numbers in hex, one function per line.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::Arc;

use super::capped;

/// Bytes read of a perf map. A large Java or Node program writes some ten MiB.
pub const PERF_MAP_BYTES_MAX: u64 = 128 << 20;
/// Functions kept of a perf map: about 100 bytes each.
pub const PERF_MAP_ENTRIES_MAX: usize = 1 << 20;

#[derive(Debug, Clone)]
struct Entry {
    start: u64,
    end: u64,
    name: Arc<str>,
}

/// A parsed perf map.
#[derive(Debug, Default)]
pub struct PerfMap {
    /// By start; if code was replaced, only the last line with a start is kept.
    entries: Vec<Entry>,
    /// Lines that do not have the expected form.
    pub malformed_lines: u64,
    /// Functions beyond [`PERF_MAP_ENTRIES_MAX`].
    pub refused_entries: u64,
}

impl PerfMap {
    /// Reads the file, at most [`PERF_MAP_BYTES_MAX`] of it. Open it without blocking: the watched process may have put a pipe there.
    ///
    /// # Errors
    /// If it is not a regular file or cannot be read.
    pub fn read(mut file: &File) -> io::Result<Self> {
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let mut bytes = Vec::new();
        file.rewind()?;
        file.take(PERF_MAP_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Self::parse(&bytes))
    }

    /// Parses the bytes. Never fails: what cannot be read is counted.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut map = Self::default();
        for line in bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty()) {
            if map.entries.len() == PERF_MAP_ENTRIES_MAX {
                map.refused_entries += 1;
                continue;
            }
            match parse_line(line) {
                Some(entry) => map.entries.push(entry),
                None => map.malformed_lines += 1,
            }
        }
        // A stable sort leaves later lines of one start later; they are the code that is there now.
        map.entries.sort_by_key(|entry| entry.start);
        map.entries.reverse();
        map.entries.dedup_by_key(|entry| entry.start);
        map.entries.reverse();
        map
    }

    /// The function that contains an address.
    pub fn find(&self, address: u64) -> Option<Arc<str>> {
        let after = self.entries.partition_point(|entry| entry.start <= address);
        let entry = self.entries.get(after.checked_sub(1)?)?;
        (address < entry.end).then(|| entry.name.clone())
    }
}

fn parse_line(line: &[u8]) -> Option<Entry> {
    let text = String::from_utf8_lossy(line);
    let mut parts = text.splitn(3, ' ');
    let mut number = || {
        let digits = parts.next()?;
        u64::from_str_radix(digits.strip_prefix("0x").unwrap_or(digits), 16).ok()
    };
    let (start, size) = (number()?, number()?);
    let name = parts.next()?.trim();
    let end = start.checked_add(size)?;
    (size > 0 && !name.is_empty()).then(|| Entry { start, end, name: capped(name).as_ref().into() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_are_found_within_their_range_and_the_latest_wins() {
        let map = PerfMap::parse(b"7f0010 20 LazyCompile:~first a.js:1\n7f0040 10 second\n7f0010 8 again\nbroken\n7f0099 0 empty\n");
        assert_eq!(map.find(0x7f0017).as_deref(), Some("again"));
        assert_eq!(map.find(0x7f0018), None);
        assert_eq!(map.find(0x7f0040).as_deref(), Some("second"));
        assert_eq!(map.find(0x7f000f), None);
        assert_eq!(map.malformed_lines, 2);
    }

    #[test]
    fn a_device_instead_of_the_file_is_refused() {
        assert_eq!(PerfMap::read(&File::open("/dev/zero").unwrap()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_panic(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300), address: u64) {
            PerfMap::parse(&bytes).find(address);
        }
    }
}
