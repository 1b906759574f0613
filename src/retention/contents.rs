//! The contents of a block: a type by its virtual table, text, zeros, pointers, numbers. Only memory that is present is read.
//!
//! A C++ object with virtual functions begins with the address of its virtual table; the word before the table's first function leads to the
//! class's `type_info`, whose second word leads to its mangled name (Itanium C++ ABI, 2.5 and 2.9). Tables are in read-only mappings of
//! files, which distinguishes them from stale links of free chunks. Symbols are not needed: the names also exist in stripped programs.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use serde::Serialize;

use crate::census::memory::{Memory, word_at};
use crate::census::objects::range_of;
use crate::process::Maps;
use crate::symbol::demangle;
use crate::units::Addr;

/// Bytes of a block that are examined.
pub const LOOKED_AT_BYTES: u64 = 64;
/// Longest mangled name of a class that is read.
const NAME_BYTES_MAX: usize = 1024;
/// Virtual tables remembered; a large program has some ten thousand.
const TYPES_MAX: usize = 1 << 16;

/// What a block's first bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// It begins with an address in a program's or a library's read-only memory: a virtual table, a function, a constant.
    StaticPointer,
    /// Pointers to blocks are among the first words.
    Pointers,
    /// Characters that can be printed.
    Text,
    /// Nothing but zeros.
    Zeros,
    /// Anything else.
    Numbers,
    /// Not in memory: never written, or in swap.
    Absent,
}

impl fmt::Display for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StaticPointer => "static pointer",
            Self::Pointers => "pointers",
            Self::Text => "text",
            Self::Zeros => "zeros",
            Self::Numbers => "numbers",
            Self::Absent => "not in memory",
        })
    }
}

impl Content {
    /// What it says of a block of which the first word alone was looked at.
    #[must_use]
    pub fn first_word(self) -> &'static str {
        match self {
            Self::StaticPointer | Self::Pointers => "a pointer",
            Self::Text => "text",
            Self::Zeros => "0",
            Self::Numbers => "a number",
            Self::Absent => "a word that is not in memory",
        }
    }
}

/// What is known of a block by its first bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Kind {
    /// What they are.
    pub content: Content,
    /// The class's name where the block begins with a virtual table.
    pub type_name: Option<String>,
    /// Where a static pointer leads: file and distance from where its first byte is mapped.
    pub first_word: Option<String>,
}

impl Kind {
    /// What it is, in words.
    #[must_use]
    pub fn words(&self) -> String {
        match (&self.type_name, &self.first_word) {
            (Some(name), _) => name.clone(),
            (None, Some(place)) => format!("begins with a pointer to {place}"),
            (None, None) => self.content.to_string(),
        }
    }
}

/// Tells blocks of one process apart.
pub struct Contents<'a> {
    memory: &'a dyn Memory,
    maps: &'a Maps,
    heap: &'a [Range<u64>],
    types: HashMap<u64, Option<String>>,
}

impl<'a> Contents<'a> {
    /// For a process with these mappings and these ranges of blocks, sorted and disjoint.
    #[must_use]
    pub fn of(memory: &'a dyn Memory, maps: &'a Maps, heap: &'a [Range<u64>]) -> Self {
        Self { memory, maps, heap, types: HashMap::new() }
    }

    /// The first bytes of a block, at most [`LOOKED_AT_BYTES`], as far as they are present.
    #[must_use]
    pub fn first_bytes(&self, addr: u64, bytes: u64) -> Vec<u8> {
        let mut out = vec![0u8; bytes.min(LOOKED_AT_BYTES) as usize];
        let got = self.memory.read(addr, &mut out);
        out.truncate(got);
        out
    }

    /// What these first bytes of a block are.
    pub fn kind(&mut self, first: &[u8]) -> Kind {
        let plain = |content| Kind { content, type_name: None, first_word: None };
        let word = word_at(first, 0);
        if first.len() >= 8 && self.is_static(word) {
            return Kind { type_name: self.type_name(word), first_word: self.place(word), content: Content::StaticPointer };
        }
        plain(if first.is_empty() {
            Content::Absent
        } else if first.iter().all(|&byte| byte == 0) {
            Content::Zeros
        } else if is_text(first) {
            Content::Text
        } else if first.chunks_exact(8).any(|word| range_of(self.heap, word_at(word, 0)).is_some()) {
            Content::Pointers
        } else {
            Content::Numbers
        })
    }

    /// Whether an address is in a read-only mapping of a file.
    fn is_static(&self, addr: u64) -> bool {
        let mapping = self.maps.find(Addr(addr));
        mapping.is_some_and(|mapping| mapping.path().is_some() && !mapping.permissions.write && !mapping.permissions.shared)
    }

    fn is_in_file(&self, addr: u64) -> bool {
        self.maps.find(Addr(addr)).is_some_and(|mapping| mapping.path().is_some())
    }

    fn place(&self, addr: u64) -> Option<String> {
        let mapping = self.maps.find(Addr(addr))?;
        let name = mapping.path()?.file_name()?.to_string_lossy();
        let first = self.maps.mappings.iter().find(|other| other.inode == mapping.inode && other.path() == mapping.path())?;
        Some(format!("{name}+{:#x}", addr - first.start.0))
    }

    /// The class whose virtual table begins at an address. A virtual table is in a file, so that most addresses are dismissed without a read.
    pub fn type_name(&mut self, table: u64) -> Option<String> {
        if !table.is_multiple_of(8) || !self.is_in_file(table) {
            return None;
        }
        if let Some(known) = self.types.get(&table) {
            return known.clone();
        }
        let name = self.read_type_name(table);
        if self.types.len() < TYPES_MAX {
            self.types.insert(table, name.clone());
        }
        name
    }

    fn read_type_name(&self, table: u64) -> Option<String> {
        let info = self.memory.word(table.checked_sub(8)?).filter(|&info| info.is_multiple_of(8) && self.is_in_file(info))?;
        // The highest bit marks names that are not unique (GCC on some machines).
        let name = self.memory.word(info.checked_add(8)?)? & !(1 << 63);
        if !self.is_static(name) {
            return None;
        }
        let mut bytes = [0u8; NAME_BYTES_MAX];
        let got = self.memory.read(name, &mut bytes);
        let end = bytes.get(..got)?.iter().position(|&byte| byte == 0)?;
        // A star marks names that are compared by address.
        let text = std::str::from_utf8(bytes.get(..end)?).ok()?.trim_start_matches('*');
        if text.len() < 2 || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let name = demangle(&format!("_ZTS{text}")).into_owned();
        // What is no mangled name of a type is something else.
        Some(name.strip_prefix("typeinfo name for ").or_else(|| name.strip_prefix("{typeinfo name(")?.strip_suffix(")}"))?.to_owned())
    }
}

/// Whether bytes are characters, up to a first 0.
fn is_text(bytes: &[u8]) -> bool {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    let text = bytes.get(..end).unwrap_or_default();
    let is_end = |error: std::str::Utf8Error| error.error_len().is_none().then(|| text.get(..error.valid_up_to())).flatten();
    let text = std::str::from_utf8(text).map_or_else(is_end, |text| Some(text.as_bytes()));
    end >= 4 && text.is_some_and(|text| text.iter().all(|&byte| byte >= 0x20 && byte != 0x7f || matches!(byte, b'\t' | b'\n' | b'\r')))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;
    use crate::census::Fixture;

    const RELRO: u64 = 0x7f00_0000_1000;
    const HEAP: u64 = 0x55d0_0000_0000;

    fn memory() -> Fixture {
        let maps = Maps::parse(
            b"55d000000000-55d000010000 rw-p 00000000 00:00 0 [heap]\n7f0000000000-7f0000001000 r-xp 00000000 08:01 5 /lib/libx.so\n\
              7f0000001000-7f0000002000 r--p 00001000 08:01 5 /lib/libx.so\n7f0000002000-7f0000003000 rw-p 00002000 08:01 5 /lib/libx.so\n",
        );
        let mut memory = Fixture::with_maps(maps);
        for (addr, word) in
            [(RELRO + 0x18, RELRO + 0x80), (RELRO + 0x88, RELRO + 0x100), (RELRO + 0x38, RELRO + 0x90), (RELRO + 0x98, HEAP)]
        {
            memory.write_word(addr, word);
        }
        memory.write(RELRO + 0x100, b"*N5cache9TextEntryE\0");
        memory.write(HEAP, b"N5cache9TextEntryE\0");
        memory
    }

    #[test]
    fn a_class_is_named_by_its_virtual_table_and_what_only_looks_like_one_is_not() {
        let (memory, heap) = (memory(), [HEAP..HEAP + 0x10000]);
        let mut contents = Contents::of(&memory, &memory.maps, &heap);
        let mut kind = |word: u64| contents.kind(&[word.to_le_bytes(), [0; 8]].concat());
        let text = kind(RELRO + 0x20);
        assert_eq!((text.type_name.as_deref(), text.first_word.as_deref()), (Some("cache::TextEntry"), Some("libx.so+0x1020")));
        // The name would be in memory that can be written: forged.
        assert_eq!(kind(RELRO + 0x40).type_name, None);
        assert_eq!(kind(RELRO + 0x40).content, Content::StaticPointer);
        assert_eq!(kind(RELRO + 0x1020).content, Content::Numbers);
        assert_eq!(kind(HEAP + 0x20).content, Content::Pointers);
    }

    #[test]
    fn a_name_without_an_end_is_no_name_however_long_it_is() {
        let mut memory = memory();
        memory.write(RELRO + 0x100, &[b'N'; 0xf00]);
        let heap = [HEAP..HEAP + 0x10000];
        let mut contents = Contents::of(&memory, &memory.maps, &heap);
        assert_eq!(contents.type_name(RELRO + 0x20), None);
    }

    #[test]
    fn text_zeros_and_numbers_are_told_apart() {
        let (memory, heap) = (memory(), []);
        let mut contents = Contents::of(&memory, &memory.maps, &heap);
        let mut content = |bytes: &[u8]| contents.kind(bytes).content;
        assert_eq!(content(b"a name of somebody"), Content::Text);
        assert_eq!(content("größe, cut in a charact\u{e9}".as_bytes().split_last().map_or(&[], |(_, rest)| rest)), Content::Text);
        assert_eq!(content(b"abc\0\0\0\0\0"), Content::Numbers);
        assert_eq!(content(b"text\x01text"), Content::Numbers);
        assert_eq!(content(&[0; 24]), Content::Zeros);
        assert_eq!(content(&[]), Content::Absent);
    }
}
