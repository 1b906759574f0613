//! HotSpot's description of its own structures, which every libjvm exports for debuggers: `gHotSpotVMStructs` and `gHotSpotVMTypes`
//! (runtime/vmStructs.hpp), and its table of flags.
//!
//! The tables' words are read from the process, where the loader has relocated them; the names that they point to lie in the file's
//! constant data, which the process may not have in memory, so they are read from the file.

use std::fs::File;

use super::super::super::memory::{Memory, word_at};
use crate::process::elf::Elf;

/// Entries of a table: some 2,000 in JDK 17 to 25.
const ENTRIES_MAX: u64 = 16_384;
/// Flags of a JVM: some 1,500.
const FLAGS_MAX: u64 = 8192;
/// Longest name that is searched for.
const NAME_BYTES_MAX: u64 = 64;

/// What is read of a library's file.
pub trait LibraryFile {
    /// Address of an exported variable, in the file's own address space.
    fn variable_vaddr(&self, name: &[u8]) -> Option<u64>;

    /// The bytes at such an address, up to the end of their segment and the limit.
    fn bytes_at(&self, vaddr: u64, bytes_max: u64) -> Vec<u8>;
}

impl LibraryFile for Elf<File> {
    fn variable_vaddr(&self, name: &[u8]) -> Option<u64> {
        Self::variable_vaddr(self, name)
    }

    fn bytes_at(&self, vaddr: u64, bytes_max: u64) -> Vec<u8> {
        Self::bytes_at(self, vaddr, bytes_max)
    }
}

/// A libjvm in a process, with its file.
pub struct Library<'a> {
    /// The process.
    pub memory: &'a dyn Memory,
    /// The file.
    pub elf: &'a dyn LibraryFile,
    /// The difference between its addresses in the process and in the file.
    pub bias: u64,
}

/// A field: its offset in its structure, and its address where it is static.
#[derive(Debug, Clone, Copy)]
struct Field {
    offset: u64,
    address: u64,
}

/// Fields and sizes of the structures that were requested.
pub struct Structs<'a> {
    library: &'a Library<'a>,
    fields: Vec<(String, String, Field)>,
    sizes: Vec<(String, u64)>,
}

impl Library<'_> {
    /// The value of an exported variable, a word.
    fn variable(&self, name: &str) -> Option<u64> {
        let vaddr = self.elf.variable_vaddr(name.as_bytes())?;
        self.memory.word(self.bias.wrapping_add(vaddr))
    }

    /// The text at an address of the process, from the file.
    fn text(&self, addr: u64) -> Option<String> {
        let bytes = self.elf.bytes_at(addr.wrapping_sub(self.bias), NAME_BYTES_MAX);
        let end = bytes.iter().position(|&byte| byte == 0)?;
        String::from_utf8(bytes.get(..end)?.to_vec()).ok()
    }
}

impl<'a> Structs<'a> {
    /// Reads the descriptions of these structures. `None` if the library has no such tables.
    #[must_use]
    pub fn read(library: &'a Library<'a>, wanted: &[&str]) -> Option<Self> {
        let of = |name: &str| library.variable(name);
        let table = of("gHotSpotVMStructs")?;
        let stride = of("gHotSpotVMStructEntryArrayStride").filter(|stride| (8..1024).contains(stride))?;
        let places = ["TypeName", "FieldName", "Offset", "Address"].map(|part| of(&format!("gHotSpotVMStructEntry{part}Offset")));
        let [Some(type_at), Some(field_at), Some(offset_at), Some(address_at)] = places else { return None };
        let mut fields = Vec::new();
        entries(library.memory, table, stride, type_at, |entry, type_name| {
            let Some(owner) = library.text(type_name).filter(|owner| wanted.contains(&owner.as_str())) else { return };
            let word = |at: u64| usize::try_from(at).map_or(0, |at| word_at(entry, at));
            let field = Field { offset: word(offset_at), address: word(address_at) };
            if let Some(name) = library.text(word(field_at)) {
                fields.push((owner, name, field));
            }
        });
        let mut sizes = Vec::new();
        let (table, stride) = (of("gHotSpotVMTypes")?, of("gHotSpotVMTypeEntryArrayStride").filter(|stride| (8..1024).contains(stride))?);
        let (type_at, size_at) = (of("gHotSpotVMTypeEntryTypeNameOffset")?, of("gHotSpotVMTypeEntrySizeOffset")?);
        entries(library.memory, table, stride, type_at, |entry, type_name| {
            let owner = library.text(type_name).filter(|owner| wanted.contains(&owner.as_str()));
            sizes.extend(owner.map(|owner| (owner, usize::try_from(size_at).map_or(0, |at| word_at(entry, at)))));
        });
        Some(Self { library, fields, sizes })
    }

    fn field(&self, owner: &str, name: &str) -> Option<Field> {
        self.fields.iter().find(|(of, field, _)| of == owner && field == name).map(|(_, _, field)| *field)
    }

    /// The offset of a field in its structure.
    #[must_use]
    pub fn offset(&self, owner: &str, name: &str) -> Option<u64> {
        self.field(owner, name).map(|field| field.offset).filter(|&offset| offset < 1 << 16)
    }

    /// The address of a static field, as a distance from the library's start.
    #[must_use]
    pub fn distance(&self, owner: &str, name: &str) -> Option<u64> {
        self.field(owner, name).map(|field| field.address.wrapping_sub(self.library.bias))
    }

    /// The address of a static field in the process.
    #[must_use]
    pub fn address(&self, owner: &str, name: &str) -> Option<u64> {
        self.field(owner, name).map(|field| field.address).filter(|&address| address != 0)
    }

    /// The size of a structure.
    #[must_use]
    pub fn size(&self, owner: &str) -> Option<u64> {
        self.sizes.iter().find(|(name, _)| name == owner).map(|(_, size)| *size)
    }

    /// The places of these flags' values and of their origins, as distances from the library's start: `JVMFlag` (before JDK 11 `Flag`).
    #[must_use]
    pub fn flags<const N: usize>(&self, wanted: [&str; N]) -> [Option<FlagPlace>; N] {
        let mut found = [None; N];
        let Some(owner) = ["JVMFlag", "Flag"].into_iter().find(|owner| self.field(owner, "flags").is_some()) else { return found };
        let stride = self.sizes.iter().find(|(name, _)| name == owner).map_or(0, |(_, size)| *size);
        let at = |name: &str| self.offset(owner, name).and_then(|offset| usize::try_from(offset).ok());
        let (Some(name_at), Some(value_at), Some(origin_at)) = (at("_name"), at("_addr"), at("_flags")) else { return found };
        let memory = self.library.memory;
        let Some(table) = self.field(owner, "flags").and_then(|field| memory.word(field.address)) else { return found };
        if !(8..1024).contains(&stride) {
            return found;
        }
        for index in 0..FLAGS_MAX {
            let entry = table.wrapping_add(index * stride);
            let Some(bytes) = usize::try_from(stride).ok().and_then(|stride| memory.bytes(entry, stride)) else { break };
            let name = word_at(&bytes, name_at);
            if name == 0 {
                break;
            }
            let Some(name) = self.library.text(name) else { continue };
            if let Some(place) = wanted.iter().position(|one| *one == name).and_then(|index| found.get_mut(index)) {
                let value = word_at(&bytes, value_at).wrapping_sub(self.library.bias);
                *place = Some(FlagPlace { value, origin: entry.wrapping_add(origin_at as u64).wrapping_sub(self.library.bias) });
            }
        }
        found
    }
}

/// Where a flag's value and its origin lie, as distances from the library's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlagPlace {
    /// Of the value.
    pub value: u64,
    /// Of the word whose low four bits say who set it.
    pub origin: u64,
}

/// Visits the entries of a table up to one without a name.
fn entries(memory: &dyn Memory, table: u64, stride: u64, name_at: u64, mut visit: impl FnMut(&[u8], u64)) {
    let (Ok(bytes), Ok(name_at)) = (usize::try_from(stride), usize::try_from(name_at)) else { return };
    for index in 0..ENTRIES_MAX {
        let Some(entry) = memory.bytes(table.wrapping_add(index * stride), bytes) else { return };
        let name = word_at(&entry, name_at);
        if name == 0 {
            return;
        }
        visit(&entry, name);
    }
}
