//! Variables of a file with their types, from its DWARF: the variable at an address, the local variable of a function, and the member of a type
//! at an offset (DWARF 5, 2.6, 4.1, 5.7). Files are untrusted: unreadable parts are skipped, and nesting is limited.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use gimli::{
    AbbreviationsCacheStrategy, AttributeValue, DebugInfoOffset, Dwarf, EndianRcSlice, EvaluationResult, LittleEndian, Reader as _,
    SectionId, Unit, UnitOffset,
};

use crate::process::elf::{Elf, ReadAt};

type Reader = EndianRcSlice<LittleEndian>;
type Entry = gimli::DebuggingInformationEntry<Reader>;

/// Bytes of one section; larger debug information is not read. That of a browser has some gigabytes.
const SECTION_BYTES_MAX: u64 = 256 << 20;
/// Units of one file.
const UNITS_MAX: usize = 1 << 16;
/// Entries visited for the variables of one file.
const ENTRIES_MAX: usize = 8 << 20;
/// Variables kept of one file.
const VARIABLES_MAX: usize = 1 << 20;
/// Types within types, and names that stand for others. Real ones stay below 20.
const DEPTH_MAX: usize = 64;
/// Time limit for the units of one file, and again for its variables: what is not read by then has no names.
const TIME_MAX: Duration = Duration::from_secs(5);
/// Most members of one type that are examined.
const MEMBERS_MAX: usize = 1 << 14;

/// A type: an entry of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TypeId {
    unit: usize,
    offset: UnitOffset,
}

/// A variable, and the position of an address in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name, without those of its scopes.
    pub name: String,
    /// Its type.
    pub type_id: TypeId,
    /// Distance from its start.
    pub offset: u64,
}

/// Part of a variable: the member at an offset of a type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// Members from the outermost in, with a dot before each, and array indices: `.catalog_.bestsellers_`. Members with reserved names, of the
    /// library's implementation, end it.
    pub path: String,
    /// Whether the implementation's members were left out.
    pub is_storage: bool,
    /// What is pointed to, if it is a pointer with a type.
    pub pointee: Option<TypeId>,
}

/// The debug information of one file.
pub struct Variables {
    dwarf: Dwarf<Reader>,
    units: Vec<Unit<Reader>>,
    /// By address: unit and entry of variables with a fixed location.
    globals: Option<HashMap<u64, TypeIdAndName>>,
}

#[derive(Debug, Clone)]
struct TypeIdAndName {
    type_id: TypeId,
    name: String,
}

impl Variables {
    /// The debug information of a file, or of the file that keeps it for its build id; `None` if there is none that can be read.
    #[must_use]
    pub fn of(elf: &Elf<File>) -> Option<Self> {
        if elf.has_section(b".debug_info") { Self::read(elf) } else { Self::read(&debug_file(elf)?) }
    }

    /// The debug information in a file itself; `None` if there is none that can be read.
    #[must_use]
    pub fn read<R: ReadAt>(elf: &Elf<R>) -> Option<Self> {
        let load = |id: SectionId| -> Result<Reader, gimli::Error> {
            Ok(EndianRcSlice::new(Rc::from(section(elf, id.name().as_bytes()).unwrap_or_default()), LittleEndian))
        };
        let mut dwarf = Dwarf::load(load).ok()?;
        dwarf.populate_abbreviations_cache(AbbreviationsCacheStrategy::Duplicates);
        let began = Instant::now();
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        while let Ok(Some(header)) = headers.next() {
            units.extend(dwarf.unit(header).ok());
            if units.len() >= UNITS_MAX || began.elapsed() > TIME_MAX {
                break;
            }
        }
        (!units.is_empty()).then_some(Self { dwarf, units, globals: None })
    }

    /// The variable that begins at an address of the file.
    pub fn global(&mut self, vaddr: u64) -> Option<Variable> {
        if self.globals.is_none() {
            self.globals = Some(self.read_globals());
        }
        let found = self.globals.as_ref()?.get(&vaddr)?;
        Some(Variable { name: found.name.clone(), type_id: found.type_id, offset: 0 })
    }

    /// The local variable of the function at `pc`, `distance` bytes from the canonical frame address; the innermost one. With the function's
    /// name.
    #[must_use]
    pub fn local(&self, pc: u64, distance: i64) -> Option<(Variable, String)> {
        let number = self.units.iter().position(|unit| {
            let mut ranges = self.dwarf.unit_ranges(unit).ok();
            std::iter::from_fn(|| ranges.as_mut()?.next().ok()?).take(ENTRIES_MAX).any(|range| range.begin <= pc && pc < range.end)
        })?;
        let unit = self.units.get(number)?;
        let mut entries = unit.entries();
        let mut function: Option<(isize, i64, String)> = None;
        let mut best = None;
        for _ in 0..ENTRIES_MAX {
            let Ok(Some(entry)) = entries.next_dfs() else { break };
            match (entry.tag(), &function) {
                (gimli::DW_TAG_subprogram, _) if self.covers(unit, entry, pc) => {
                    let base = frame_base(entry, unit)?;
                    function = Some((entry.depth(), base, self.name(number, entry, 0).unwrap_or_default()));
                }
                (_, Some((depth, ..))) if entry.depth() <= *depth => break,
                (gimli::DW_TAG_variable | gimli::DW_TAG_formal_parameter, Some((_, base, _))) => {
                    let Some(place) = frame_offset(entry, unit) else { continue };
                    let Some(type_id) = self.type_of(number, entry, 0) else { continue };
                    let within = distance.checked_sub(place)?.checked_sub(*base)?;
                    let Ok(within) = u64::try_from(within) else { continue };
                    if within < self.size(type_id, 0).unwrap_or(0)
                        && let Some(name) = self.name(number, entry, 0)
                    {
                        best = Some(Variable { name, type_id, offset: within });
                    }
                }
                _ => {}
            }
        }
        Some((best?, function?.2))
    }

    /// The part at an offset of a type.
    #[must_use]
    pub fn member(&self, type_id: TypeId, offset: u64) -> Member {
        let mut member = Member { path: String::new(), is_storage: false, pointee: None };
        self.descend(type_id, offset, &mut member, 0);
        member
    }

    /// Bytes of a type.
    #[must_use]
    pub fn size_of(&self, type_id: TypeId) -> Option<u64> {
        self.size(type_id, 0)
    }

    fn descend(&self, type_id: TypeId, offset: u64, member: &mut Member, depth: usize) {
        let (Some(unit), true) = (self.units.get(type_id.unit), depth < DEPTH_MAX) else { return };
        let Ok(entry) = unit.entry(type_id.offset) else { return };
        match entry.tag() {
            gimli::DW_TAG_typedef | gimli::DW_TAG_const_type | gimli::DW_TAG_volatile_type | gimli::DW_TAG_atomic_type => {
                if let Some(inner) = self.type_of(type_id.unit, &entry, depth) {
                    self.descend(inner, offset, member, depth + 1);
                }
            }
            gimli::DW_TAG_pointer_type | gimli::DW_TAG_reference_type if offset < 8 => {
                member.pointee = self.type_of(type_id.unit, &entry, depth);
            }
            gimli::DW_TAG_array_type => {
                let Some(inner) = self.type_of(type_id.unit, &entry, depth) else { return };
                let Some(size) = self.size(inner, depth).filter(|&size| size > 0) else { return };
                if !member.is_storage {
                    member.path.push_str(&format!("[{}]", offset / size));
                }
                self.descend(inner, offset % size, member, depth + 1);
            }
            gimli::DW_TAG_structure_type | gimli::DW_TAG_class_type | gimli::DW_TAG_union_type => {
                let Some((inner, start, name)) = self.member_at(type_id, offset, depth) else { return };
                match name {
                    Some(name) if member.is_storage || is_reserved(&name) => member.is_storage = true,
                    Some(name) => {
                        member.path.push('.');
                        member.path.push_str(&name);
                    }
                    None => {}
                }
                self.descend(inner, offset - start, member, depth + 1);
            }
            _ => {}
        }
    }

    /// The member or base class that contains an offset: its type, start and name; bases have none.
    fn member_at(&self, type_id: TypeId, offset: u64, depth: usize) -> Option<(TypeId, u64, Option<String>)> {
        let unit = self.units.get(type_id.unit)?;
        let mut tree = unit.entries_tree(Some(type_id.offset)).ok()?;
        let mut children = tree.root().ok()?.children();
        let mut seen = 0;
        while let Ok(Some(child)) = children.next() {
            let entry = child.entry();
            seen += 1;
            if seen > MEMBERS_MAX {
                return None;
            }
            if !matches!(entry.tag(), gimli::DW_TAG_member | gimli::DW_TAG_inheritance) {
                continue;
            }
            // All members of a union begin at 0, which DWARF may omit.
            let start = match entry.attr_value(gimli::DW_AT_data_member_location) {
                Some(value) => value.udata_value().unwrap_or(u64::MAX),
                None if entry.has_attr(gimli::DW_AT_external) || entry.has_attr(gimli::DW_AT_declaration) => continue,
                None => 0,
            };
            let Some(inner) = self.type_of(type_id.unit, entry, depth) else { continue };
            let size = self.size(inner, depth).unwrap_or(0);
            if start <= offset && offset - start < size {
                let is_base = entry.tag() == gimli::DW_TAG_inheritance;
                return Some((inner, start, if is_base { None } else { self.name(type_id.unit, entry, depth) }));
            }
        }
        None
    }

    fn size(&self, type_id: TypeId, depth: usize) -> Option<u64> {
        let unit = self.units.get(type_id.unit).filter(|_| depth < DEPTH_MAX)?;
        let entry = unit.entry(type_id.offset).ok()?;
        if let Some(size) = entry.attr_value(gimli::DW_AT_byte_size).and_then(|value| value.udata_value()) {
            return Some(size);
        }
        match entry.tag() {
            gimli::DW_TAG_pointer_type | gimli::DW_TAG_reference_type | gimli::DW_TAG_rvalue_reference_type => Some(8),
            gimli::DW_TAG_array_type => {
                let one = self.size(self.type_of(type_id.unit, &entry, depth)?, depth + 1)?;
                let mut tree = unit.entries_tree(Some(type_id.offset)).ok()?;
                let mut children = tree.root().ok()?.children();
                let mut size = one;
                let mut seen = 0;
                while let Ok(Some(child)) = children.next() {
                    seen += 1;
                    if seen > DEPTH_MAX {
                        return None;
                    }
                    let number = |name| child.entry().attr_value(name).and_then(|value| value.udata_value());
                    let count = number(gimli::DW_AT_count).or_else(|| number(gimli::DW_AT_upper_bound)?.checked_add(1)).unwrap_or(0);
                    size = size.checked_mul(count)?;
                }
                Some(size)
            }
            _ => self.size(self.type_of(type_id.unit, &entry, depth)?, depth + 1),
        }
    }

    /// The type of an entry, or of the entry that it refers to.
    fn type_of(&self, unit: usize, entry: &Entry, depth: usize) -> Option<TypeId> {
        if depth >= DEPTH_MAX {
            return None;
        }
        match entry.attr_value(gimli::DW_AT_type) {
            Some(value) => self.reference(unit, value),
            None => {
                let (unit, other) = self.origin(unit, entry)?;
                self.type_of(unit, &other, depth + 1)
            }
        }
    }

    fn reference(&self, unit: usize, value: AttributeValue<Reader>) -> Option<TypeId> {
        match value {
            AttributeValue::UnitRef(offset) => Some(TypeId { unit, offset }),
            AttributeValue::DebugInfoRef(offset) => self.by_section_offset(offset),
            _ => None,
        }
    }

    fn by_section_offset(&self, offset: DebugInfoOffset) -> Option<TypeId> {
        let start = |unit: &Unit<Reader>| unit.header.debug_info_offset().map_or(0, |start| start.0);
        let after = self.units.partition_point(|unit| start(unit) <= offset.0);
        let unit = after.checked_sub(1)?;
        Some(TypeId { unit, offset: offset.to_unit_offset(&self.units.get(unit)?.header)? })
    }

    /// The entry that an entry is an instance of.
    fn origin(&self, unit: usize, entry: &Entry) -> Option<(usize, Entry)> {
        let value = entry.attr_value(gimli::DW_AT_abstract_origin).or_else(|| entry.attr_value(gimli::DW_AT_specification))?;
        let found = self.reference(unit, value)?;
        Some((found.unit, self.units.get(found.unit)?.entry(found.offset).ok()?))
    }

    fn name(&self, number: usize, entry: &Entry, depth: usize) -> Option<String> {
        let unit = self.units.get(number).filter(|_| depth < DEPTH_MAX)?;
        if let Some(value) = entry.attr_value(gimli::DW_AT_name) {
            let text = self.dwarf.attr_string(unit, value).ok()?;
            return Some(text.to_string_lossy().ok()?.chars().take(super::NAME_BYTES_MAX / 4).collect());
        }
        let (other, entry) = self.origin(number, entry)?;
        self.name(other, &entry, depth + 1)
    }

    fn covers(&self, unit: &Unit<Reader>, entry: &Entry, pc: u64) -> bool {
        let Ok(mut ranges) = self.dwarf.die_ranges(unit, entry) else { return false };
        std::iter::from_fn(|| ranges.next().ok()?).take(DEPTH_MAX).any(|range| range.begin <= pc && pc < range.end)
    }

    fn read_globals(&self) -> HashMap<u64, TypeIdAndName> {
        let mut found = HashMap::new();
        let mut left = ENTRIES_MAX;
        let began = Instant::now();
        for (number, unit) in self.units.iter().enumerate() {
            let mut entries = unit.entries();
            if began.elapsed() > TIME_MAX {
                break;
            }
            while let (Ok(Some(entry)), true) = (entries.next_dfs(), left > 0 && found.len() < VARIABLES_MAX) {
                left -= 1;
                if entry.tag() != gimli::DW_TAG_variable {
                    continue;
                }
                let Some(address) = self.address(unit, entry) else { continue };
                if let (Some(type_id), Some(name)) = (self.type_of(number, entry, 0), self.name(number, entry, 0)) {
                    found.insert(address, TypeIdAndName { type_id, name });
                }
            }
        }
        found
    }

    /// The fixed address of a variable.
    fn address(&self, unit: &Unit<Reader>, entry: &Entry) -> Option<u64> {
        let expression = entry.attr_value(gimli::DW_AT_location)?.exprloc_value()?;
        let mut evaluation = expression.evaluation(unit.encoding());
        match evaluation.evaluate().ok()? {
            EvaluationResult::RequiresRelocatedAddress(address) => Some(address),
            EvaluationResult::RequiresIndexedAddress { index, .. } => self.dwarf.address(unit, index).ok(),
            _ => None,
        }
    }
}

/// Offset from a function's frame base to its canonical frame address.
fn frame_base(entry: &Entry, unit: &Unit<Reader>) -> Option<i64> {
    /// rbp in a function that saved it first: CFA − 16.
    const SAVED_BP: i64 = -16;
    let expression = entry.attr_value(gimli::DW_AT_frame_base)?.exprloc_value()?;
    let mut operations = expression.operations(unit.encoding());
    match operations.next().ok()?? {
        gimli::Operation::CallFrameCFA => Some(0),
        gimli::Operation::Register { register } if register.0 == 6 => Some(SAVED_BP),
        _ => None,
    }
}

/// A variable's distance from its function's frame base.
fn frame_offset(entry: &Entry, unit: &Unit<Reader>) -> Option<i64> {
    let expression = entry.attr_value(gimli::DW_AT_location)?.exprloc_value()?;
    let mut operations = expression.operations(unit.encoding());
    match (operations.next().ok()??, operations.next().ok()?) {
        (gimli::Operation::FrameOffset { offset }, None) => Some(offset),
        _ => None,
    }
}

/// Names reserved for the C++ implementation (ISO C++, 5.10): a library's own members.
fn is_reserved(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next() == Some(b'_') && bytes.next().is_some_and(|byte| byte == b'_' || byte.is_ascii_uppercase())
}

/// A section's bytes, as they are before compression (ELF, SHF_COMPRESSED with zlib).
fn section<R: ReadAt>(elf: &Elf<R>, name: &[u8]) -> Option<Vec<u8>> {
    let bytes = elf.section(name, SECTION_BYTES_MAX)?;
    if !elf.is_compressed(name) {
        return Some(bytes);
    }
    // Elf64_Chdr: ch_type, a reserved word, ch_size, ch_addralign.
    const HEADER_BYTES: usize = 24;
    const ELFCOMPRESS_ZLIB: &[u8] = &[1, 0, 0, 0];
    let (kind, size) = (bytes.get(..4)?, u64::from_le_bytes(bytes.get(8..16)?.try_into().ok()?));
    if kind != ELFCOMPRESS_ZLIB || size > SECTION_BYTES_MAX {
        return None;
    }
    let mut out = Vec::new();
    flate2::read::ZlibDecoder::new(bytes.get(HEADER_BYTES..)?).take(size).read_to_end(&mut out).ok()?;
    Some(out)
}

/// The file that a distribution keeps the debug information of a build id in.
fn debug_file(elf: &Elf<File>) -> Option<Elf<File>> {
    let id = elf.build_id()?.to_string();
    let (first, rest) = (id.get(..2)?, id.get(2..)?);
    let path = PathBuf::from(format!("/usr/lib/debug/.build-id/{first}/{rest}.debug"));
    if !path.metadata().ok()?.is_file() {
        return None;
    }
    Elf::parse(File::open(path).ok()?).ok().filter(|elf| elf.has_section(b".debug_info"))
}
