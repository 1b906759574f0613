//! The parts of an ELF file that unwinding needs, read by position, never mapped: if another process truncates the file meanwhile, reading
//! returns an error, whereas a mapping would raise SIGBUS.
//!
//! `.eh_frame` is found by its section header or, if the headers were stripped, through the program header `PT_GNU_EH_FRAME`.
//! Layouts: ELF-64 object file format; LSB 5.0, `.eh_frame_hdr`.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::Error;
use crate::machine::Machine;

/// Maximum number of program headers of a file. Real files have about 10; the format allows 65,535.
const SEGMENTS_MAX: usize = 256;
/// Maximum number of section headers of a file. Only object files have a section per function; linked files have fewer than 100.
const SECTIONS_MAX: usize = 4096;
/// Maximum size of the section names.
const NAMES_BYTES_MAX: u64 = 1 << 20;
/// Maximum size of a file's unwind information. The largest seen is 7.4 MB (LLVM); Chromium's is about 20 MB.
const UNWIND_BYTES_MAX: u64 = 128 << 20;
/// Maximum number of bytes of a note segment that are searched for the build id.
const NOTES_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of bytes of the dynamic section that are examined.
const DYNAMIC_BYTES_MAX: u64 = 16 << 10;
/// Maximum size of a build id: SHA-1 has 20 bytes, SHA-256 32.
pub const BUILD_ID_BYTES_MAX: usize = 64;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_NOTE: u32 = 4;
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
const PF_X: u32 = 1;
const SHT_NOBITS: u32 = 8;
const SHF_COMPRESSED: u64 = 0x800;
const NT_GNU_BUILD_ID: u32 = 3;
const DT_NEEDED: u64 = 1;

/// Something that can be read by position.
pub trait Image {
    /// Fills the buffer from `offset` on.
    ///
    /// # Errors
    /// If it ends before the buffer is full, or the system reports an error.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()>;

    /// Its length in bytes.
    ///
    /// # Errors
    /// If the system reports an error.
    fn length(&self) -> std::io::Result<u64>;
}

impl Image for File {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        self.read_exact_at(buffer, offset)
    }

    fn length(&self) -> std::io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl Image for [u8] {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        let part = usize::try_from(offset).ok().and_then(|offset| self.get(offset..)).and_then(|rest| rest.get(..buffer.len()));
        buffer.copy_from_slice(part.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn length(&self) -> std::io::Result<u64> {
        Ok(self.len() as u64)
    }
}

/// A loadable segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Offset in the file.
    pub offset: u64,
    /// Address in the file's own address space.
    pub address: u64,
    /// Bytes in the file.
    pub file_bytes: u64,
    /// Whether it is executable.
    pub executable: bool,
}

impl Segment {
    /// Whether the address is in the part of it that the file contains.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|distance| distance < self.file_bytes)
    }
}

/// The format of the unwind information.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.eh_frame`
    EhFrame,
    /// `.debug_frame`
    DebugFrame,
}

/// The unwind information of a file, with what is needed to read it.
#[derive(Debug, Clone)]
pub struct UnwindSection {
    /// Its format.
    pub format: Format,
    /// Its address in the file's own address space: pointers in it are relative to their own addresses.
    pub address: u64,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// The headers of an ELF file.
#[derive(Debug, Clone)]
pub struct Elf<'i, I: Image + ?Sized> {
    image: &'i I,
    /// The machine that its code is for.
    pub machine: Machine,
    /// `PT_LOAD` segments.
    pub segments: Vec<Segment>,
    headers: Vec<ProgramHeader>,
    section_headers: (u64, u16, u16),
}

#[derive(Debug, Clone, Copy)]
struct ProgramHeader {
    kind: u32,
    segment: Segment,
}

#[derive(Debug, Clone, Copy)]
struct SectionHeader {
    name: u32,
    kind: u32,
    flags: u64,
    address: u64,
    offset: u64,
    bytes: u64,
}

impl<'i, I: Image + ?Sized> Elf<'i, I> {
    /// Reads the ELF header and the program headers.
    ///
    /// # Errors
    /// If it is not an ELF file of a known machine or its program headers cannot be read.
    pub fn parse(image: &'i I) -> Result<Self, Error> {
        let header: [u8; 64] = read_array(image, 0, "the ELF header").map_err(|_| Error::NotElf)?;
        let little_64 = header.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]);
        let machine = Machine::from_elf(u16_at(&header, 18)).filter(|_| little_64).ok_or(Error::NotElf)?;
        let (offset, size, count) = (u64_at(&header, 32), u16_at(&header, 54), usize::from(u16_at(&header, 56)));
        if count == 0 {
            return Err(Error::NoUnwindInformation); // an object file, which is never mapped directly
        }
        if size != 56 || count > SEGMENTS_MAX {
            return Err(Error::Corrupt { what: "size or number of program headers" });
        }
        let bytes = read(image, offset, 56 * count as u64, "program headers")?;
        let headers: Vec<ProgramHeader> = bytes
            .chunks_exact(56)
            .map(|header| ProgramHeader {
                kind: u32_at(header, 0),
                segment: Segment {
                    executable: u32_at(header, 4) & PF_X != 0,
                    offset: u64_at(header, 8),
                    address: u64_at(header, 16),
                    file_bytes: u64_at(header, 32),
                },
            })
            .collect();
        let segments = headers.iter().filter(|header| header.kind == PT_LOAD).map(|header| header.segment).collect();
        Ok(Self { image, machine, segments, headers, section_headers: (u64_at(&header, 40), u16_at(&header, 60), u16_at(&header, 62)) })
    }

    /// The GNU build id.
    #[must_use]
    pub fn build_id(&self) -> Option<Vec<u8>> {
        self.headers.iter().filter(|header| header.kind == PT_NOTE).find_map(|header| {
            let bytes = header.segment.file_bytes.min(NOTES_BYTES_MAX);
            build_id_of(&read(self.image, header.segment.offset, bytes, "notes").ok()?)
        })
    }

    /// Whether it needs other libraries. A file that needs none is a static program, the loader, or a C library: these contain the
    /// handwritten assembly without unwind rows.
    #[must_use]
    pub fn needs_libraries(&self) -> bool {
        let Some(dynamic) = self.headers.iter().find(|header| header.kind == PT_DYNAMIC) else { return false };
        read(self.image, dynamic.segment.offset, dynamic.segment.file_bytes.min(DYNAMIC_BYTES_MAX), "the dynamic section")
            .is_ok_and(|bytes| bytes.chunks_exact(16).any(|entry| u64_at(entry, 0) == DT_NEEDED))
    }

    /// The unwind information: `.eh_frame` by its section header, otherwise by its program header, otherwise `.debug_frame`.
    ///
    /// # Errors
    /// If there is none, or it cannot be read.
    pub fn unwind_section(&self) -> Result<UnwindSection, Error> {
        let sections = self.named_sections().unwrap_or_default();
        // In a separate file of debug information, the header is for a section that is in another file.
        if sections.iter().any(|(name, section)| name == b".eh_frame" && section.kind == SHT_NOBITS) {
            return Err(Error::NoUnwindInformation);
        }
        let by_name = |name: &[u8]| sections.iter().find(|(n, s)| n == name && s.kind != SHT_NOBITS && s.bytes > 0).map(|(_, s)| *s);
        if let Some(section) = by_name(b".eh_frame") {
            let bytes = bounded(section.bytes)?;
            let bytes = read(self.image, section.offset, bytes, ".eh_frame")?;
            return Ok(UnwindSection { format: Format::EhFrame, address: section.address, bytes });
        }
        if let Some(section) = self.by_program_header()? {
            return Ok(section);
        }
        match by_name(b".debug_frame") {
            Some(section) if section.flags & SHF_COMPRESSED == 0 => {
                let bytes = read(self.image, section.offset, bounded(section.bytes)?, ".debug_frame")?;
                Ok(UnwindSection { format: Format::DebugFrame, address: section.address, bytes })
            }
            _ => Err(Error::NoUnwindInformation),
        }
    }

    /// `.eh_frame_hdr` has the address of `.eh_frame`, but not its length: it ends with its own terminator, or at the latest with its
    /// segment.
    fn by_program_header(&self) -> Result<Option<UnwindSection>, Error> {
        let Some(header) = self.headers.iter().find(|header| header.kind == PT_GNU_EH_FRAME) else { return Ok(None) };
        let index = header.segment;
        let bytes = read(self.image, index.offset, index.file_bytes.min(64), ".eh_frame_hdr")?;
        let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(index.address);
        let parsed = gimli::EhFrameHdr::new(&bytes, gimli::LittleEndian).parse(&bases, 8);
        let Ok(gimli::Pointer::Direct(address)) = parsed.map(|parsed| parsed.eh_frame_ptr()) else {
            return Err(Error::Corrupt { what: ".eh_frame_hdr" });
        };
        let segment = self.segments.iter().find(|segment| segment.contains(address));
        let segment = segment.ok_or(Error::Corrupt { what: ".eh_frame_hdr points outside the segments" })?;
        let distance = address.saturating_sub(segment.address);
        let length = bounded(segment.file_bytes.saturating_sub(distance))?;
        let offset = segment.offset.checked_add(distance).ok_or(Error::Corrupt { what: "segment offset" })?;
        let bytes = read(self.image, offset, length, ".eh_frame")?;
        Ok(Some(UnwindSection { format: Format::EhFrame, address, bytes }))
    }

    fn named_sections(&self) -> Result<Vec<(Vec<u8>, SectionHeader)>, Error> {
        let (offset, count, names) = self.section_headers;
        let count = usize::from(count);
        if offset == 0 || count == 0 || count > SECTIONS_MAX {
            return Ok(Vec::new());
        }
        let bytes = read(self.image, offset, 64 * count as u64, "section headers")?;
        let headers: Vec<SectionHeader> = bytes
            .chunks_exact(64)
            .map(|header| SectionHeader {
                name: u32_at(header, 0),
                kind: u32_at(header, 4),
                flags: u64_at(header, 8),
                address: u64_at(header, 16),
                offset: u64_at(header, 24),
                bytes: u64_at(header, 32),
            })
            .collect();
        let Some(names) = headers.get(usize::from(names)) else { return Ok(Vec::new()) };
        let names = read(self.image, names.offset, names.bytes.min(NAMES_BYTES_MAX), "section names")?;
        let name_at = |at: u32| {
            let rest = names.get(at as usize..).unwrap_or_default();
            rest.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
        };
        Ok(headers.into_iter().map(|header| (name_at(header.name), header)).collect())
    }
}

fn bounded(bytes: u64) -> Result<u64, Error> {
    if bytes > UNWIND_BYTES_MAX {
        return Err(Error::TooLarge { what: "bytes of unwind information", limit: UNWIND_BYTES_MAX });
    }
    Ok(bytes)
}

/// Reads a part whose length the caller has bounded; it is first checked against the file's length, so that a false length costs no memory.
fn read<I: Image + ?Sized>(image: &I, offset: u64, length: u64, what: &'static str) -> Result<Vec<u8>, Error> {
    let failed = |error: std::io::Error| Error::Read { what, reason: error.to_string() };
    let end = offset.checked_add(length).ok_or(Error::Corrupt { what })?;
    if end > image.length().map_err(failed)? {
        return Err(Error::Corrupt { what });
    }
    let mut bytes = vec![0; usize::try_from(length).map_err(|_| Error::Corrupt { what })?];
    image.read_at(offset, &mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn read_array<I: Image + ?Sized, const N: usize>(image: &I, offset: u64, what: &'static str) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    image.read_at(offset, &mut bytes).map_err(|error| Error::Read { what, reason: error.to_string() })?;
    Ok(bytes)
}

/// Searches notes for the build id: `namesz descsz type name desc`, name and desc padded to 4 bytes.
fn build_id_of(notes: &[u8]) -> Option<Vec<u8>> {
    let mut rest = notes;
    while rest.len() >= 12 {
        let (name_bytes, id_bytes, kind) = (u32_at(rest, 0) as usize, u32_at(rest, 4) as usize, u32_at(rest, 8));
        let padded = |bytes: usize| bytes.checked_next_multiple_of(4);
        let id_at = padded(name_bytes)?.checked_add(12)?;
        let id = rest.get(id_at..)?.get(..id_bytes)?;
        if kind == NT_GNU_BUILD_ID && rest.get(12..16) == Some(b"GNU\0") && (1..=BUILD_ID_BYTES_MAX).contains(&id_bytes) {
            return Some(id.to_vec());
        }
        rest = rest.get(id_at.checked_add(padded(id_bytes)?)?..)?;
    }
    None
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    array_at(bytes, at).map_or(0, u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    array_at(bytes, at).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    array_at(bytes, at).map_or(0, u64::from_le_bytes)
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.get(..N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;
    use crate::unwind::Table;

    /// For a file of any machine: in emulation the available programs are not for the machine that this is compiled for.
    fn table_of(bytes: &[u8]) -> Result<Table, Error> {
        Table::read_for(bytes, Elf::parse(bytes)?.machine)
    }

    #[test]
    fn the_unwind_information_is_the_same_with_and_without_section_headers() {
        let mut bytes = std::fs::read("/bin/true").unwrap();
        let with = table_of(&bytes).unwrap();
        bytes[40..48].fill(0);
        bytes[58..64].fill(0);
        let without = table_of(&bytes).unwrap();
        assert_eq!(with.rows().rows, without.rows().rows);
        assert!(with.rows().rows.len() > 100);
    }

    #[test]
    fn a_file_truncated_anywhere_is_an_error_or_a_table_never_a_panic() {
        let bytes = std::fs::read("/bin/true").unwrap();
        for end in (0..bytes.len()).step_by(97) {
            let _ = Table::read(&bytes[..end]);
        }
        assert!(matches!(Table::read(&bytes[..63]), Err(Error::NotElf)));
    }

    #[test]
    fn a_file_that_claims_more_than_it_has_costs_no_memory() {
        let mut bytes = std::fs::read("/bin/true").unwrap();
        let elf = Elf::parse(bytes.as_slice()).unwrap();
        let (offset, count, _) = elf.section_headers;
        // Every section has the largest possible size.
        for i in 0..usize::from(count) {
            let at = usize::try_from(offset).unwrap() + 64 * i + 32;
            bytes[at..at + 8].fill(0xff);
        }
        assert!(table_of(&bytes).is_ok(), "it is still found through the program header");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn a_damaged_file_is_an_error_or_a_table_never_a_panic(damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40)) {
            let mut bytes = std::fs::read("/bin/true").unwrap();
            for (index, byte) in damage {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            if let Ok(table) = Table::read(bytes.as_slice()) {
                prop_assert_eq!(table.to_bytes().len(), table.bytes());
            }
        }

        #[test]
        fn damaged_headers_and_unwind_sections_are_errors_or_tables_never_panics(damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20)) {
            let mut bytes = std::fs::read("/bin/true").unwrap();
            let section = Elf::parse(bytes.as_slice()).unwrap().unwind_section().unwrap();
            let begin = bytes.windows(section.bytes.len()).position(|window| window == section.bytes).unwrap();
            for (index, byte) in damage {
                let at = index.index(1024 + section.bytes.len());
                bytes[if at < 1024 { at } else { begin + at - 1024 }] = byte;
            }
            if let Ok(table) = Table::read(bytes.as_slice()) {
                prop_assert!(table.rows().rows.is_sorted_by(|a, b| a.address < b.address));
            }
        }
    }
}
