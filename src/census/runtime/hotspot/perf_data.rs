//! HotSpot's counters, which the JVM keeps in a mapped file `hsperfdata_USER/PID` (`PerfDataPrologue` and `PerfDataEntry` of
//! runtime/perfMemory.hpp and perfData.cpp, version 2.0). Pure.

use std::collections::HashMap;

use super::super::super::memory::{word_at, word32_at};

/// First four bytes, big-endian whatever the machine.
const MAGIC: [u8; 4] = [0xca, 0xfe, 0xc0, 0xc0];
/// Byte order 1 = little-endian.
const LITTLE_ENDIAN: u8 = 1;
/// Bytes of the prologue up to and with the number of entries.
const PROLOGUE_BYTES: usize = 32;
/// Bytes of an entry before its name.
const ENTRY_BYTES: usize = 20;
/// Counters kept; a JVM has some 350.
const COUNTERS_MAX: usize = 4096;
/// Bytes of counters read: the JVM takes 32 KiB (PerfDataMemorySize).
pub const BYTES_MAX: usize = 1 << 20;

/// The counters that hold a number, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters(HashMap<String, u64>);

impl Counters {
    /// Reads them. `None` if it is not such a file, or the JVM has not finished it.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let is_accessible = *bytes.get(7)? != 0;
        if bytes.get(..4) != Some(&MAGIC) || bytes.get(4) != Some(&LITTLE_ENDIAN) || !is_accessible || bytes.len() < PROLOGUE_BYTES {
            return None;
        }
        let mut at = word32_at(bytes, 24) as usize;
        let count = (word32_at(bytes, 28) as usize).min(COUNTERS_MAX);
        let mut found = HashMap::new();
        for _ in 0..count {
            let Some(entry) = bytes.get(at..).filter(|entry| entry.len() >= ENTRY_BYTES) else { break };
            let (length, name_at, elements, data_at) =
                (word32_at(entry, 0) as usize, word32_at(entry, 4) as usize, word32_at(entry, 8), word32_at(entry, 16) as usize);
            let Some(entry) = entry.get(..length).filter(|entry| entry.len() >= ENTRY_BYTES) else { break };
            // Type 'J' (long) without elements is a single number.
            if entry.get(12) == Some(&b'J') && elements == 0 && data_at.checked_add(8).is_some_and(|end| end <= length) {
                let name = entry.get(name_at..).and_then(|name| name.split(|&byte| byte == 0).next()).unwrap_or_default();
                if let Ok(name) = std::str::from_utf8(name) {
                    found.insert(name.to_owned(), word_at(entry, data_at));
                }
            }
            at += length;
        }
        Some(Self(found))
    }

    /// A counter.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    /// Bytes used in all spaces of the Java heap; `None` if there is no such counter.
    #[must_use]
    pub fn heap_used_bytes(&self) -> Option<u64> {
        let is_used = |name: &str| name.starts_with("sun.gc.generation.") && name.contains(".space.") && name.ends_with(".used");
        let spaces = self.0.iter().filter(|(name, _)| is_used(name)).map(|(_, &bytes)| bytes);
        spaces.reduce(u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, kind: u8, value: u64) -> Vec<u8> {
        let data_at = (ENTRY_BYTES + name.len() + 1).next_multiple_of(8);
        let mut out = Vec::new();
        for word in [data_at as u32 + 8, ENTRY_BYTES as u32, 0] {
            out.extend(word.to_le_bytes());
        }
        out.extend([kind, 0, 2, 3]);
        out.extend((data_at as u32).to_le_bytes());
        out.extend(name.bytes());
        out.resize(data_at, 0);
        out.extend(value.to_le_bytes());
        out
    }

    fn file(entries: &[Vec<u8>]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([LITTLE_ENDIAN, 2, 0, 1]);
        out.extend([0; 16]);
        out.extend(32u32.to_le_bytes());
        out.extend((entries.len() as u32).to_le_bytes());
        entries.iter().for_each(|one| out.extend(one));
        out
    }

    #[test]
    fn used_bytes_of_all_spaces_are_summed_and_other_counters_are_not() {
        let file = file(&[
            entry("sun.gc.generation.0.space.0.used", b'J', 3),
            entry("sun.gc.generation.1.space.0.used", b'J', 4),
            entry("sun.gc.generation.1.space.0.capacity", b'J', 100),
            entry("sun.gc.metaspace.used", b'J', 9),
        ]);
        let counters = Counters::parse(&file).unwrap_or_default();
        assert_eq!((counters.heap_used_bytes(), counters.get("sun.gc.metaspace.used")), (Some(7), Some(9)));
        assert_eq!(Counters::default().heap_used_bytes(), None);
    }

    #[test]
    fn damage_at_any_byte_is_refused_or_ends_the_list() {
        let sound = file(&[entry("a.b", b'J', 1), entry("c.d", b'J', 2)]);
        for at in 0..sound.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut damaged = sound.clone();
                if let Some(byte) = damaged.get_mut(at) {
                    *byte = value;
                }
                let _ = Counters::parse(&damaged);
                let _ = Counters::parse(damaged.get(..at).unwrap_or_default());
            }
        }
    }
}
