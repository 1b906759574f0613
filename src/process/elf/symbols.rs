//! The symbols of an ELF file: its functions, its variables, and the slots that the dynamic loader fills.

use object::LittleEndian as LE;
use object::elf;

use crate::machine::Machine;
use crate::process::elf::{Elf, ReadAt, pods};

/// Maximum number of symbols counted through DT_GNU_HASH if the section headers are missing.
const HASHED_SYMBOLS_MAX: u64 = 1 << 22;

/// The table of a symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SymbolTable {
    /// `.dynsym`: symbols for dynamic linking.
    Dynamic,
    /// `.symtab`: for debuggers, absent from stripped files.
    Static,
}

/// A function's symbol, borrowed from its table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function<'a> {
    /// Name without a version.
    pub name: &'a [u8],
    /// Its virtual address in the file; lies in an executable segment.
    pub vaddr: u64,
    /// Its length in bytes, 0 if the file does not give it.
    pub size: u64,
    /// Whether other files can link against it (global or weak, not hidden).
    pub exported: bool,
    /// The table it is in.
    pub table: SymbolTable,
}

/// A symbol table and its strings, read whole.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) symbols: Vec<u8>,
    pub(super) strings: Vec<u8>,
}

impl Table {
    pub(super) fn name(&self, offset: u32) -> &[u8] {
        let tail = self.strings.get(offset as usize..).unwrap_or_default();
        tail.iter().position(|&b| b == 0).and_then(|end| tail.get(..end)).unwrap_or_default()
    }

    fn symbols(&self) -> &[elf::Sym64<LE>] {
        pods(&self.symbols)
    }
}

impl<R: ReadAt> Elf<R> {
    /// Virtual address of an exported variable.
    #[must_use]
    pub fn variable_vaddr(&self, name: &[u8]) -> Option<u64> {
        let table = self.dynamic_table();
        let found = table.symbols().iter().find(|symbol| {
            let defined = symbol.st_shndx.get(LE).0 != elf::SHN_UNDEF.0;
            defined && symbol.st_info.0 & 0xf == elf::STT_OBJECT.0 && table.name(symbol.st_name.get(LE)) == name
        })?;
        Some(found.st_value.get(LE))
    }

    /// Calls `visit` for every variable of both symbol tables: name, virtual address and size. Variables without a size are skipped.
    pub fn for_each_variable(&self, mut visit: impl FnMut(&[u8], u64, u64)) {
        for table in [Some(self.dynamic_table()), self.table_of_sections(elf::SHT_SYMTAB)].into_iter().flatten() {
            for symbol in table.symbols() {
                let (vaddr, size) = (symbol.st_value.get(LE), symbol.st_size.get(LE));
                let is_variable = symbol.st_info.0 & 0xf == elf::STT_OBJECT.0 && symbol.st_shndx.get(LE).0 != elf::SHN_UNDEF.0;
                if is_variable && size > 0 {
                    visit(table.name(symbol.st_name.get(LE)), vaddr, size);
                }
            }
        }
    }

    fn table_of_sections(&self, kind: elf::SectionType) -> Option<Table> {
        let section = self.sections.iter().find(|s| s.sh_type.get(LE) == kind)?;
        let strings = self.sections.get(section.sh_link.get(LE) as usize)?;
        Some(Table {
            symbols: self.section_bytes("a symbol table", section).ok()?,
            strings: self.section_bytes("a string table", strings).ok()?,
        })
    }

    /// `.dynsym`, from the sections or, if they were stripped, from the dynamic section.
    fn dynamic_table(&self) -> Table {
        self.table_of_sections(elf::SHT_DYNSYM).or_else(|| self.dynamic_table_without_sections()).unwrap_or_default()
    }

    fn dynamic_table_without_sections(&self) -> Option<Table> {
        let vaddr = self.dynamic_value(elf::DT_SYMTAB)?;
        let count = self.hashed_symbols().or_else(|| self.gnu_hashed_symbols())?.min(HASHED_SYMBOLS_MAX);
        let bytes = count.checked_mul(size_of::<elf::Sym64<LE>>() as u64)?;
        Some(Table { symbols: self.dynamic_bytes("the dynamic symbols", vaddr, bytes).ok()?, strings: self.dynamic_strings() })
    }

    /// Number of dynamic symbols from DT_HASH: its second word, nchain, equals it.
    fn hashed_symbols(&self) -> Option<u64> {
        let words = self.dynamic_bytes("DT_HASH", self.dynamic_value(elf::DT_HASH)?, 8).ok()?;
        Some(u64::from(u32::from_le_bytes(words.get(4..8)?.try_into().ok()?)))
    }

    /// Number of dynamic symbols from DT_GNU_HASH: the end of the chain that starts last.
    fn gnu_hashed_symbols(&self) -> Option<u64> {
        let table = self.dynamic_value(elf::DT_GNU_HASH)?;
        let word = |bytes: &[u8], at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let header = self.dynamic_bytes("DT_GNU_HASH", table, 16).ok()?;
        let (buckets, first, bloom) = (word(&header, 0)?, word(&header, 4)?, word(&header, 8)?);
        let buckets_at = table.checked_add(16)?.checked_add(u64::from(bloom) * 8)?;
        let starts = self.dynamic_bytes("DT_GNU_HASH", buckets_at, u64::from(buckets) * 4).ok()?;
        let mut last = starts.chunks_exact(4).filter_map(|b| word(b, 0)).max()?;
        if last < first {
            return Some(u64::from(first));
        }
        let chains_at = buckets_at.checked_add(u64::from(buckets) * 4)?;
        // The lowest bit of a hash marks the end of the chain.
        while u64::from(last) < HASHED_SYMBOLS_MAX {
            let at = chains_at.checked_add(u64::from(last - first) * 4)?;
            let hash = word(&self.dynamic_bytes("DT_GNU_HASH", at, 4).ok()?, 0)?;
            last = last.checked_add(1)?;
            if hash & 1 == 1 {
                return Some(u64::from(last));
            }
        }
        None
    }

    /// Calls `visit` for every function of the dynamic, then of the static symbol table. Functions outside executable segments are skipped,
    /// as are indirect ones (STT_GNU_IFUNC), whose address is that of a resolver.
    pub fn for_each_function(&self, mut visit: impl FnMut(Function<'_>)) {
        let tables = [(SymbolTable::Dynamic, Some(self.dynamic_table())), (SymbolTable::Static, self.table_of_sections(elf::SHT_SYMTAB))];
        for (kind, table) in tables {
            let Some(table) = table else { continue };
            for symbol in table.symbols() {
                let vaddr = symbol.st_value.get(LE);
                let defined = symbol.st_shndx.get(LE).0 != elf::SHN_UNDEF.0;
                let info = symbol.st_info.0;
                if !defined || info & 0xf != elf::STT_FUNC.0 || !self.is_code(vaddr) {
                    continue;
                }
                // st_other's low two bits: 0 = default, 3 = protected; both can be linked against.
                let exported = info >> 4 != elf::STB_LOCAL.0 && matches!(symbol.st_other.0 & 3, 0 | 3);
                let name = table.name(symbol.st_name.get(LE));
                visit(Function { name, vaddr, size: symbol.st_size.get(LE), exported, table: kind });
            }
        }
    }

    /// The names for which the dynamic loader fills slots of the global offset table: (virtual address of the slot, name), in no particular
    /// order. A PLT stub jumps through such a slot.
    #[must_use]
    pub fn linkage_slots(&self) -> Vec<(u64, Vec<u8>)> {
        let symbols = self.dynamic_table();
        let mut slots = Vec::new();
        let tables = [(elf::DT_JMPREL, elf::DT_PLTRELSZ), (elf::DT_RELA, elf::DT_RELASZ)];
        for (address, size) in tables {
            let (Some(vaddr), Some(bytes)) = (self.dynamic_value(address), self.dynamic_value(size)) else { continue };
            let Ok(table) = self.dynamic_bytes("the relocations", vaddr, bytes) else { continue };
            for relocation in pods::<elf::Rela64<LE>>(&table) {
                let info = relocation.r_info.get(LE);
                let kind = (info & 0xffff_ffff) as u32;
                if !Machine::HOST.slot_relocations().contains(&kind) {
                    continue;
                }
                let symbol = usize::try_from(info >> 32).ok().and_then(|index| symbols.symbols().get(index));
                if let Some(symbol) = symbol {
                    slots.push((relocation.r_offset.get(LE), symbols.name(symbol.st_name.get(LE)).to_vec()));
                }
            }
        }
        slots
    }
}
