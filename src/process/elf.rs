//! Bounded reading of untrusted ELF files: segments, addresses, symbols, build id, relocations.
//!
//! The layouts are `object`'s (System V ABI, ELF-64). Only 64-bit little-endian files are read, and only the ranges that are needed, with
//! `pread` instead of a mapping, because reading a mapping of a file that someone truncates raises SIGBUS. Every count and length from the
//! file is checked against the file's size and a limit before anything is allocated.
//!
//! Three kinds of numbers name a location, and this module converts between them: a *virtual address* in the file (`vaddr`, used by
//! symbols), a *file offset* (used by the kernel's uprobes), and an *address* in the process (see
//! [`crate::process::maps::Mapping::address_of`]).

mod symbols;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use object::LittleEndian as LE;
use object::elf;
use object::pod::{Pod, slice_from_all_bytes};
use thiserror::Error;

use symbols::Table;
pub use symbols::{Function, SymbolTable};

use crate::machine::Machine;
use crate::units::{FileOffset, page_bytes};

/// Maximum number of program headers. Real files have about 15.
const SEGMENTS_MAX: usize = 1024;
/// Maximum number of section headers. Kernels' and `-ffunction-sections` objects have up to about 10,000; linked programs fewer than 100.
const SECTIONS_MAX: usize = 65_535;
/// Maximum size of one table (symbols, strings, relocations). The largest seen, a browser's string table, has about 300 MB.
const TABLE_BYTES_MAX: u64 = 512 << 20;
/// Maximum size of a file's notes.
const NOTES_BYTES_MAX: u64 = 1 << 20;
/// Maximum size of a build id: SHA-1 has 20 bytes, the longest in use 32.
const BUILD_ID_BYTES_MAX: usize = 64;
/// Maximum number of entries in the dynamic section. Real ones have about 40, plus one per needed library.
const DYNAMIC_ENTRIES_MAX: usize = 16_384;

/// Why a file is not read.
#[derive(Debug, Error)]
pub enum ElfError {
    /// Not an ELF file.
    #[error("not an ELF file")]
    NotElf,
    /// Another class of ELF file, or for another machine.
    #[error("not a 64-bit little-endian ELF file for {}", Machine::HOST.name())]
    WrongClass,
    /// A table lies outside the file or has an impossible size.
    #[error("truncated or damaged ELF file: {what} ({bytes} bytes at offset {offset:#x}) outside the file or too large")]
    OutOfBounds {
        /// The table.
        what: &'static str,
        /// Its file offset.
        offset: u64,
        /// Its length.
        bytes: u64,
    },
    /// Reading failed.
    #[error("cannot be read: {0}")]
    Io(#[from] io::Error),
}

/// A source that can be read at offsets.
pub trait ReadAt {
    /// Length in bytes.
    ///
    /// # Errors
    /// Those of the source.
    fn length(&self) -> io::Result<u64>;
    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// If there are fewer bytes, and those of the source.
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()>;
}

impl ReadAt for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, out, offset)
    }
}

impl ReadAt for Vec<u8> {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(out.len());
        out.copy_from_slice(self.get(start..end).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// The build id that the linker wrote into a file (note NT_GNU_BUILD_ID).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BuildId(pub Vec<u8>);

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A PT_LOAD segment: the virtual addresses at which bytes of the file are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Offset of its first byte in the file.
    pub offset: u64,
    /// Its first virtual address.
    pub vaddr: u64,
    /// Bytes that come from the file.
    pub file_bytes: u64,
    /// Whether it is executable.
    pub executable: bool,
}

/// The complete `T`s in `bytes`.
fn pods<T: Pod>(bytes: &[u8]) -> &[T] {
    let whole = bytes.len() - bytes.len() % size_of::<T>();
    bytes.get(..whole).and_then(|b| slice_from_all_bytes(b).ok()).unwrap_or_default()
}

/// Contents of the dynamic section.
#[derive(Debug, Default, Clone)]
pub struct Dynamic {
    /// The library's own name.
    pub soname: Option<String>,
    /// The libraries it needs, in link order.
    pub needed: Vec<String>,
}

/// A parsed ELF file that is kept open.
pub struct Elf<R> {
    reader: R,
    length: u64,
    segments: Vec<Segment>,
    notes: Vec<(u64, u64)>,
    dynamic: Vec<(i64, u64)>,
    dynamic_vaddr: u64,
    sections: Vec<elf::SectionHeader64<LE>>,
    section_names: Vec<u8>,
    has_interpreter: bool,
}

impl<R> fmt::Debug for Elf<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Elf").field("length", &self.length).field("segments", &self.segments).finish_non_exhaustive()
    }
}

impl<R: ReadAt> Elf<R> {
    /// Reads the headers.
    ///
    /// # Errors
    /// If it is not a 64-bit ELF file for this machine, or its program headers do not fit the file. Damaged section headers are treated as
    /// absent.
    pub fn parse(reader: R) -> Result<Self, ElfError> {
        let length = reader.length()?;
        let mut elf = Self {
            reader,
            length,
            segments: Vec::new(),
            notes: Vec::new(),
            dynamic: Vec::new(),
            dynamic_vaddr: 0,
            sections: Vec::new(),
            section_names: Vec::new(),
            has_interpreter: false,
        };
        let header_bytes = elf.read("the ELF header", 0, size_of::<elf::FileHeader64<LE>>() as u64).map_err(|_| ElfError::NotElf)?;
        let header = *pods::<elf::FileHeader64<LE>>(&header_bytes).first().ok_or(ElfError::NotElf)?;
        if header_bytes.get(..4) != Some(b"\x7fELF") {
            return Err(ElfError::NotElf);
        }
        // EI_CLASS, EI_DATA and e_machine.
        if header_bytes.get(4..6) != Some(&[2, 1]) || Machine::from_elf(header.e_machine.get(LE).0) != Some(Machine::HOST) {
            return Err(ElfError::WrongClass);
        }
        elf.read_segments(&header)?;
        if elf.read_sections(&header).is_err() {
            elf.sections.clear();
        }
        Ok(elf)
    }

    fn read(&self, what: &'static str, offset: u64, bytes: u64) -> Result<Vec<u8>, ElfError> {
        let out_of_bounds = ElfError::OutOfBounds { what, offset, bytes };
        if bytes > TABLE_BYTES_MAX || offset.checked_add(bytes).is_none_or(|end| end > self.length) {
            return Err(out_of_bounds);
        }
        let mut out = vec![0; usize::try_from(bytes).map_err(|_| out_of_bounds)?];
        self.reader.read_exact_at(&mut out, offset)?;
        Ok(out)
    }

    fn read_segments(&mut self, header: &elf::FileHeader64<LE>) -> Result<(), ElfError> {
        let count = usize::from(header.e_phnum.get(LE)).min(SEGMENTS_MAX);
        if count > 0 && usize::from(header.e_phentsize.get(LE)) != size_of::<elf::ProgramHeader64<LE>>() {
            return Err(ElfError::WrongClass);
        }
        let bytes = (count * size_of::<elf::ProgramHeader64<LE>>()) as u64;
        let table = self.read("the program headers", header.e_phoff.get(LE), bytes)?;
        let mut dynamic = None;
        for segment in pods::<elf::ProgramHeader64<LE>>(&table) {
            let (offset, file_bytes) = (segment.p_offset.get(LE), segment.p_filesz.get(LE));
            match segment.p_type.get(LE) {
                elf::PT_LOAD => {
                    // Bytes beyond the end of the file cannot be read or probed.
                    let file_bytes = file_bytes.min(self.length.saturating_sub(offset));
                    let executable = segment.p_flags.get(LE).0 & elf::PF_X.0 != 0;
                    self.segments.push(Segment { offset, vaddr: segment.p_vaddr.get(LE), file_bytes, executable });
                }
                elf::PT_NOTE => self.notes.push((offset, file_bytes)),
                elf::PT_DYNAMIC => {
                    dynamic = Some((offset, file_bytes));
                    self.dynamic_vaddr = segment.p_vaddr.get(LE);
                }
                elf::PT_INTERP => self.has_interpreter = true,
                _ => {}
            }
        }
        if let Some((offset, bytes)) = dynamic {
            let bytes = bytes.min((DYNAMIC_ENTRIES_MAX * size_of::<elf::Dyn64<LE>>()) as u64);
            let table = self.read("the dynamic section", offset, bytes).unwrap_or_default();
            self.dynamic = pods::<elf::Dyn64<LE>>(&table)
                .iter()
                .map(|entry| (entry.d_tag.get(LE).0, entry.d_val.get(LE)))
                .take_while(|&(tag, _)| tag != elf::DT_NULL.0)
                .collect();
        }
        Ok(())
    }

    fn read_sections(&mut self, header: &elf::FileHeader64<LE>) -> Result<(), ElfError> {
        let count = usize::from(header.e_shnum.get(LE)).min(SECTIONS_MAX);
        if count == 0 || usize::from(header.e_shentsize.get(LE)) != size_of::<elf::SectionHeader64<LE>>() {
            return Ok(());
        }
        let bytes = (count * size_of::<elf::SectionHeader64<LE>>()) as u64;
        let table = self.read("the section headers", header.e_shoff.get(LE), bytes)?;
        self.sections = pods::<elf::SectionHeader64<LE>>(&table).to_vec();
        if let Some(names) = self.sections.get(usize::from(header.e_shstrndx.get(LE).0)).copied() {
            self.section_names = self.section_bytes("the section names", &names)?;
        }
        Ok(())
    }

    fn section_bytes(&self, what: &'static str, section: &elf::SectionHeader64<LE>) -> Result<Vec<u8>, ElfError> {
        if section.sh_type.get(LE) == elf::SHT_NOBITS {
            return Ok(Vec::new());
        }
        self.read(what, section.sh_offset.get(LE), section.sh_size.get(LE))
    }

    /// The PT_LOAD segments, in the file's order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Whether a dynamic loader starts it.
    #[must_use]
    pub fn has_interpreter(&self) -> bool {
        self.has_interpreter
    }

    /// Whether it has a section of this name.
    #[must_use]
    pub fn has_section(&self, name: &[u8]) -> bool {
        self.sections.iter().any(|section| self.is_named(section, name))
    }

    /// The bytes of the section of this name, if there is one of at most `bytes_max`.
    #[must_use]
    pub fn section(&self, name: &[u8], bytes_max: u64) -> Option<Vec<u8>> {
        let section = self.sections.iter().find(|section| self.is_named(section, name))?;
        if section.sh_size.get(LE) > bytes_max {
            return None;
        }
        self.section_bytes("a section", section).ok()
    }

    /// Whether the section of this name is compressed.
    #[must_use]
    pub fn is_compressed(&self, name: &[u8]) -> bool {
        let section = self.sections.iter().find(|section| self.is_named(section, name));
        section.is_some_and(|section| section.sh_flags.get(LE).0 & elf::SHF_COMPRESSED.0 != 0)
    }

    /// Bytes of the file with its compressed sections decompressed, as their headers say; saturates. A reader of its debug information takes
    /// memory in proportion to them.
    #[must_use]
    pub fn bytes_to_read(&self) -> u64 {
        let compressed = self.sections.iter().filter(|section| section.sh_flags.get(LE).0 & elf::SHF_COMPRESSED.0 != 0);
        let bytes = compressed.map(|section| {
            let header = self.read("a compression header", section.sh_offset.get(LE), size_of::<elf::CompressionHeader64<LE>>() as u64);
            header.ok().and_then(|bytes| pods::<elf::CompressionHeader64<LE>>(&bytes).first().map(|header| header.ch_size.get(LE)))
        });
        bytes.flatten().fold(self.length, u64::saturating_add)
    }

    /// Virtual address of the section of this name.
    #[must_use]
    pub fn section_vaddr(&self, name: &[u8]) -> Option<u64> {
        self.sections.iter().find(|section| self.is_named(section, name)).map(|section| section.sh_addr.get(LE))
    }

    fn is_named(&self, section: &elf::SectionHeader64<LE>, name: &[u8]) -> bool {
        let at = section.sh_name.get(LE) as usize;
        self.section_names.get(at..).is_some_and(|tail| tail.strip_prefix(name).is_some_and(|rest| rest.first() == Some(&0)))
    }

    /// Whether the Go toolchain linked it (its build information has a separate section, even in stripped files).
    #[must_use]
    pub fn is_go(&self) -> bool {
        self.has_section(b".go.buildinfo") || self.has_section(b".note.go.buildid")
    }

    /// File offset of the byte at `vaddr`; `None` outside the file's segments.
    #[must_use]
    pub fn offset_of(&self, vaddr: u64) -> Option<FileOffset> {
        let segment = self.segments.iter().find(|s| vaddr.checked_sub(s.vaddr).is_some_and(|distance| distance < s.file_bytes))?;
        segment.offset.checked_add(vaddr - segment.vaddr).map(FileOffset)
    }

    /// The difference between an address in a process and the file's virtual address, if the process maps the file's bytes from
    /// `mapping_offset` at the executable mapping `mapping_start`; wraps around for files that are linked above their mapped address.
    ///
    /// The kernel maps whole pages, so if the segment does not start on a page boundary (lld's layout), the mapping starts up to a page
    /// before it: the mapping's first byte then belongs to the previous segment, whose addresses are offset by a page.
    #[must_use]
    pub fn load_bias(&self, mapping_start: u64, mapping_offset: FileOffset) -> Option<u64> {
        let segment = self.segments.iter().filter(|s| s.executable).find(|s| {
            let first_page = s.offset & !(page_bytes() - 1);
            first_page <= mapping_offset.0 && mapping_offset.0 < s.offset.saturating_add(s.file_bytes)
        })?;
        Some(mapping_start.wrapping_sub(mapping_offset.0).wrapping_add(segment.offset).wrapping_sub(segment.vaddr))
    }

    /// Up to `bytes_max` bytes from `vaddr` on, limited to its segment's bytes in the file; empty outside.
    #[must_use]
    pub fn bytes_at(&self, vaddr: u64, bytes_max: u64) -> Vec<u8> {
        let Some(segment) = self.segments.iter().find(|s| vaddr.checked_sub(s.vaddr).is_some_and(|d| d < s.file_bytes)) else {
            return Vec::new();
        };
        let distance = vaddr - segment.vaddr;
        let bytes = bytes_max.min(segment.file_bytes - distance);
        let Some(offset) = segment.offset.checked_add(distance) else { return Vec::new() };
        self.read("code", offset, bytes).unwrap_or_default()
    }

    /// The build id, from the notes.
    #[must_use]
    pub fn build_id(&self) -> Option<BuildId> {
        self.notes.iter().find_map(|&(offset, bytes)| {
            let notes = self.read("the notes", offset, bytes.min(NOTES_BYTES_MAX)).ok()?;
            find_build_id(&notes)
        })
    }

    /// The build id, from its section. In a separate debug file the program headers are those of the program, so that its notes need not be
    /// where they say (elfutils' eu-strip leaves them as they were).
    #[must_use]
    pub fn build_id_of_section(&self) -> Option<BuildId> {
        find_build_id(&self.section(b".note.gnu.build-id", NOTES_BYTES_MAX)?)
    }

    fn dynamic_value(&self, tag: elf::DynamicTag) -> Option<u64> {
        self.dynamic.iter().find(|&&(t, _)| t == tag.0).map(|&(_, value)| value)
    }

    /// Virtual address of the word in which the dynamic loader stores the address of its list of libraries (`struct r_debug`) for
    /// debuggers; `None` in a file without a DT_DEBUG entry (a library, a static program).
    #[must_use]
    pub fn debug_word_vaddr(&self) -> Option<u64> {
        let index = self.dynamic.iter().position(|&(tag, _)| tag == elf::DT_DEBUG.0)?;
        self.dynamic_vaddr.checked_add(index as u64 * size_of::<elf::Dyn64<LE>>() as u64 + 8)
    }

    fn dynamic_bytes(&self, what: &'static str, vaddr: u64, bytes: u64) -> Result<Vec<u8>, ElfError> {
        let offset = self.offset_of(vaddr).ok_or(ElfError::OutOfBounds { what, offset: vaddr, bytes })?;
        self.read(what, offset.0, bytes)
    }

    fn dynamic_strings(&self) -> Vec<u8> {
        let (Some(vaddr), Some(bytes)) = (self.dynamic_value(elf::DT_STRTAB), self.dynamic_value(elf::DT_STRSZ)) else {
            return Vec::new();
        };
        self.dynamic_bytes("the dynamic strings", vaddr, bytes).unwrap_or_default()
    }

    /// The library's name and the libraries it needs.
    #[must_use]
    pub fn dynamic(&self) -> Dynamic {
        let table = Table { symbols: Vec::new(), strings: self.dynamic_strings() };
        let text = |value: u64| String::from_utf8_lossy(table.name(u32::try_from(value).unwrap_or(u32::MAX))).into_owned();
        Dynamic {
            soname: self.dynamic_value(elf::DT_SONAME).map(text),
            needed: self.dynamic.iter().filter(|&&(tag, _)| tag == elf::DT_NEEDED.0).map(|&(_, value)| text(value)).collect(),
        }
    }

    /// Whether `vaddr` lies in an executable segment.
    #[must_use]
    pub fn is_code(&self, vaddr: u64) -> bool {
        self.segments.iter().any(|s| s.executable && vaddr.checked_sub(s.vaddr).is_some_and(|distance| distance < s.file_bytes))
    }
}

/// Searches for the note (name `GNU`, type NT_GNU_BUILD_ID). Notes are padded to 4 bytes (8 in PT_NOTEs of GNU properties, which contain no
/// build id).
fn find_build_id(notes: &[u8]) -> Option<BuildId> {
    const NT_GNU_BUILD_ID: u32 = 3;
    let mut rest = notes;
    while let Some(header) = rest.get(..12) {
        let word = |at: usize| header.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
        let (name_bytes, description_bytes, kind) = (word(0) as usize, word(4) as usize, word(8));
        let name = rest.get(12..12usize.checked_add(name_bytes)?)?;
        let description_at = 12usize.checked_add(name_bytes.checked_next_multiple_of(4)?)?;
        let description = rest.get(description_at..description_at.checked_add(description_bytes)?)?;
        if name == b"GNU\0" && kind == NT_GNU_BUILD_ID && description_bytes <= BUILD_ID_BYTES_MAX {
            return Some(BuildId(description.to_vec()));
        }
        rest = rest.get(description_at.checked_add(description_bytes.checked_next_multiple_of(4)?)?..)?;
    }
    None
}

#[cfg(test)]
mod tests;
