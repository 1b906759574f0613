//! Types of Rust's trait objects, by the vtables that pointers to them carry.
//!
//! A `&dyn Trait`, `Box<dyn Trait>` or `Arc<dyn Trait>` is two words: the object's address and its vtable's. A vtable is {drop glue, size,
//! alignment, methods …}, in memory that is read-only after relocation (`rustc_middle::ty::vtable`; the drop glue is 0 for types that need
//! none). The type is in the names of its functions: `core::ptr::drop_in_place::<T>`, `<T as Trait>::method`. Stripped programs have no such
//! names, and a type whose functions the linker merged with those of another has none either.

use std::collections::HashMap;
use std::ops::Range;

use super::areas::Areas;
use super::index::BlockIndex;
use super::reader::Reader;
use crate::census::Pace;
use crate::census::memory::{Memory, word_at};
use crate::process::file::MappedFile;
use crate::process::{Mapping, Maps, Process};
use crate::symbol::demangle;

/// Read-only memory that is searched for vtables, in total. A large program has some MiB.
const SEARCHED_BYTES_MAX: u64 = 64 << 20;
/// Names of functions kept per file.
const FUNCTIONS_MAX: usize = 1 << 19;
/// Vtables kept.
const VTABLES_MAX: usize = 1 << 18;
/// Largest object and alignment that a vtable may give.
const OBJECT_BYTES_MAX: u64 = 1 << 30;
const ALIGNMENT_MAX: u64 = 1 << 12;
/// Typed blocks kept, 8 bytes each.
const BLOCKS_MAX: usize = 1 << 26;

/// The vtables of a process.
#[derive(Debug, Default)]
struct Vtables {
    /// By address: size of the object and number of the type.
    of: HashMap<u64, (u64, u32)>,
    names: Vec<Box<str>>,
    span: Range<u64>,
}

/// The blocks that trait objects point to, with their types.
#[derive(Debug, Default)]
pub struct TraitObjects {
    names: Vec<Box<str>>,
    /// Block and type, by ascending block.
    blocks: Vec<(u32, u32)>,
}

impl TraitObjects {
    /// Searches all roots and blocks of a process for trait objects. Nothing is read of a process that has no Rust functions with names.
    #[must_use]
    pub fn find(memory: &dyn Memory, maps: &Maps, areas: &Areas, index: &BlockIndex, pace: Pace) -> Self {
        let Some(vtables) = memory.process().map(|process| Vtables::find(memory, process, maps)) else { return Self::default() };
        Self::of_pointers(memory, vtables, areas, index, pace)
    }

    fn of_pointers(memory: &dyn Memory, vtables: Vtables, areas: &Areas, index: &BlockIndex, pace: Pace) -> Self {
        if vtables.of.is_empty() {
            return Self::default();
        }
        let mut blocks: Vec<(u32, u32)> = Vec::new();
        let mut reader = Reader::new(memory, pace);
        for range in areas.roots.iter().map(|area| &area.range).chain(&areas.heap) {
            // The word before, with the address behind it.
            let mut last = (0, 0);
            reader.read(range.clone(), |addr, bytes| {
                let skip = addr.wrapping_neg() & 7;
                if last.1 != addr + skip {
                    last.0 = 0;
                }
                let bytes = bytes.get(skip as usize..).unwrap_or_default();
                for word in bytes.chunks_exact(8).map(|word| word_at(word, 0)) {
                    let object = std::mem::replace(&mut last.0, word);
                    // An `Arc` points to its counts, which are before the object.
                    if vtables.span.contains(&word)
                        && let Some(&(size, name)) = vtables.of.get(&word)
                        && let Some(hit) = index.find(object).filter(|hit| hit.offset == 0 && index.size(hit.block) >= size)
                        && blocks.len() < BLOCKS_MAX
                    {
                        blocks.push((hit.block, name));
                    }
                }
                last.1 = addr + skip + (bytes.len() as u64 & !7);
            });
        }
        blocks.sort_unstable();
        blocks.dedup();
        // Pointers that were left in memory disagree with those in use: which one is right is not known.
        let is_unique =
            |at: usize| [at.wrapping_sub(1), at + 1].iter().all(|&other| blocks.get(other).is_none_or(|other| other.0 != blocks[at].0));
        let blocks = (0..blocks.len()).filter(|&at| is_unique(at)).map(|at| blocks[at]).collect();
        Self { names: vtables.names, blocks }
    }

    /// A block's type.
    #[must_use]
    pub fn type_of(&self, block: u32) -> Option<&str> {
        self.number_of(block).map(|number| self.name(number))
    }

    /// The number of a block's type.
    #[must_use]
    pub fn number_of(&self, block: u32) -> Option<u32> {
        let at = self.blocks.binary_search_by_key(&block, |one| one.0).ok()?;
        self.blocks.get(at).map(|one| one.1)
    }

    /// The name of a type by its number.
    #[must_use]
    pub fn name(&self, number: u32) -> &str {
        self.names.get(number as usize).map_or("", |name| name)
    }

    /// Memory taken.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.blocks.capacity() * 8 + self.names.iter().map(|name| name.len() + 16).sum::<usize>()
    }

    /// All typed blocks by ascending number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        self.blocks.iter().map(|&(block, name)| (block, self.name(name)))
    }
}

impl Vtables {
    fn find(memory: &dyn Memory, process: &Process, maps: &Maps) -> Self {
        let mut found = Self::default();
        let mut numbers: HashMap<Box<str>, u32> = HashMap::new();
        let mut left_bytes = SEARCHED_BYTES_MAX;
        for code in maps.mappings.iter().filter(|mapping| mapping.permissions.execute && mapping.path().is_some()) {
            let Some(functions) = MappedFile::open(process, code).ok().and_then(|file| Functions::of(&file, code)) else { continue };
            let is_constant = |mapping: &&Mapping| {
                let permissions = mapping.permissions;
                mapping.inode == code.inode
                    && mapping.path() == code.path()
                    && !permissions.write
                    && !permissions.execute
                    && permissions.read
            };
            for mapping in maps.mappings.iter().filter(is_constant) {
                let bytes = (mapping.end.0 - mapping.start.0).min(left_bytes);
                left_bytes -= bytes;
                let mut constants = vec![0u8; usize::try_from(bytes).unwrap_or(0)];
                let got = memory.read(mapping.start.0, &mut constants);
                found.search(mapping.start.0, constants.get(..got).unwrap_or_default(), &functions, &mut numbers);
            }
        }
        found
    }

    /// Searches the constants at `addr`.
    fn search(&mut self, addr: u64, constants: &[u8], functions: &Functions, numbers: &mut HashMap<Box<str>, u32>) {
        for at in (0..constants.len().saturating_sub(24)).step_by(8) {
            let [glue, size, alignment, method] = [0, 8, 16, 24].map(|word| word_at(constants, at + word));
            let methods = [method, word_at(constants, at + 32), word_at(constants, at + 40)];
            let is_layout =
                size <= OBJECT_BYTES_MAX && alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX && size & (alignment - 1) == 0;
            if !is_layout || glue == 0 && method == 0 || self.of.len() >= VTABLES_MAX {
                continue;
            }
            let Some(name) = functions.type_of(glue, methods) else { continue };
            let number = *numbers.entry(name.clone()).or_insert_with(|| {
                self.names.push(name);
                self.names.len() as u32 - 1
            });
            let vtable = addr + at as u64;
            self.of.insert(vtable, (size, number));
            let start = if self.span.is_empty() { vtable } else { self.span.start.min(vtable) };
            self.span = start..self.span.end.max(vtable + 1);
        }
    }
}

/// The functions of a file whose names contain a type, by address in the process.
#[derive(Debug, Default)]
struct Functions {
    /// Drop glue; `None` where several types share one function.
    glue: HashMap<u64, Option<Box<[u8]>>>,
    methods: HashMap<u64, Option<Box<[u8]>>>,
}

impl Functions {
    /// `None` for a file without drop glue: it has no Rust functions, or no names.
    fn of(file: &MappedFile, code: &Mapping) -> Option<Self> {
        let bias = file.elf.load_bias(code.start.0, code.offset)?;
        let mut functions = Self::default();
        file.elf.for_each_function(|function| {
            let is_glue = contains(function.name, b"drop_in_place");
            // A closure's call, or an async block's poll, has the name of the type.
            let is_closure = contains(function.name, b"closure$u7d$") || function.name.starts_with(b"_RNC");
            let is_method = is_closure || contains(function.name, b"$u20$as$u20$") || function.name.starts_with(b"_RNvX");
            if functions.glue.len() + functions.methods.len() >= FUNCTIONS_MAX || !is_glue && !is_method {
                return;
            }
            let list = if is_glue { &mut functions.glue } else { &mut functions.methods };
            let known = list.entry(bias.wrapping_add(function.vaddr)).or_insert_with(|| Some(function.name.into()));
            if known.as_deref() != Some(function.name) {
                *known = None;
            }
        });
        (!functions.glue.is_empty()).then_some(functions)
    }

    /// The type of a vtable with this drop glue and these first methods.
    ///
    /// The name of the glue has the type's parameters, which those of methods lack in the older mangling. But compilers merge equal functions
    /// of different types, so the glue counts only if a method is of the same type.
    fn type_of(&self, glue: u64, methods: [u64; 3]) -> Option<Box<str>> {
        let name = |list: &HashMap<u64, Option<Box<[u8]>>>, addr| {
            let name = list.get(&addr)?.as_deref()?;
            Some(demangle(std::str::from_utf8(name).ok()?).into_owned())
        };
        if glue != 0 && !self.glue.contains_key(&glue) {
            return None;
        }
        let [first, ..] = methods;
        let by_method = name(&self.methods, first).and_then(|name| implementor(&name).map(Box::<str>::from));
        let glue = name(&self.glue, glue);
        if let Some(by_glue) = glue.as_deref().and_then(dropped)
            && by_method.as_deref().is_some_and(|other| base(other) == base(by_glue))
        {
            return Some(by_glue.into());
        }
        let closure = || methods.iter().filter_map(|&addr| name(&self.methods, addr)).find(|name| is_closure(name));
        by_method.or_else(|| closure().map(Into::into))
    }
}

fn contains(name: &[u8], part: &[u8]) -> bool {
    name.windows(part.len()).any(|window| window == part)
}

/// `T` of `core::ptr::drop_in_place::<T>` or, in the older mangling, `core::ptr::drop_in_place<T>`.
fn dropped(name: &str) -> Option<&str> {
    let rest = name.strip_prefix("core::ptr::drop_in_place")?;
    rest.strip_prefix("::").unwrap_or(rest).strip_prefix('<')?.strip_suffix('>')
}

/// Whether a function is that of a closure or an async block, and so has the name of its type.
fn is_closure(name: &str) -> bool {
    name.ends_with("::{{closure}}") || name.rsplit_once("::{closure#").is_some_and(|(_, number)| number.strip_suffix('}').is_some())
}

/// A type without its parameters.
fn base(name: &str) -> &str {
    name.split_once('<').map_or(name, |(base, _)| base)
}

/// `T` of `<T as Trait>::method`.
fn implementor(name: &str) -> Option<&str> {
    let rest = name.strip_prefix('<')?;
    let mut depth = 0u32;
    for (at, character) in rest.char_indices() {
        match character {
            '<' | '(' | '[' | '{' => depth += 1,
            // `->` closes nothing.
            '>' if rest.get(..at).is_some_and(|before| before.ends_with('-')) => {}
            '>' | ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            ' ' if depth == 0 && rest.get(at..).is_some_and(|rest| rest.starts_with(" as ")) => return rest.get(..at),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::super::areas::{Area, Class};
    use super::*;
    use crate::census::Fixture;

    const HEAP: u64 = 0x55d0_0000_0000;
    const ROOTS: u64 = 0x7f00_0000_0000;
    const CONSTANTS: u64 = 0x7f00_1000_0000;
    const CODE: u64 = 0x7f00_2000_0000;

    fn functions() -> Functions {
        let some = |name: &str| Some(name.as_bytes().into());
        Functions {
            glue: [
                (CODE, some("_ZN4core3ptr50drop_in_place$LT$shop..Shelf$LT$shop..Book$GT$$GT$17h0123456789abcdefE")),
                (CODE + 0x10, None),
                (CODE + 0x18, some("_ZN4core3ptr60drop_in_place$LT$shop..main..$u7b$$u7b$closure$u7d$$u7d$$GT$17h0123456789abcdefE")),
            ]
            .into(),
            methods: [
                (CODE + 0x20, some("_ZN43_$LT$shop..Pen$u20$as$u20$shop..Article$GT$5price17h0123456789abcdefE")),
                (CODE + 0x30, some("_ZN54_$LT$shop..Shelf$LT$T$GT$$u20$as$u20$shop..Article$GT$5price17h0123456789abcdefE")),
                (CODE + 0x38, some("_ZN4shop4main28_$u7b$$u7b$closure$u7d$$u7d$17h0123456789abcdefE")),
            ]
            .into(),
        }
    }

    #[test]
    fn the_type_is_in_the_names_of_the_functions() {
        assert_eq!(dropped("core::ptr::drop_in_place::<alloc::vec::Vec<u8>>"), Some("alloc::vec::Vec<u8>"));
        assert_eq!(dropped("core::ptr::drop_in_place<shop::Book>"), Some("shop::Book"));
        assert_eq!(dropped("core::ptr::drop_in_place"), None);
        assert_eq!(implementor("<fn(u8) -> shop::Pen as core::fmt::Debug>::fmt"), Some("fn(u8) -> shop::Pen"));
        assert_eq!(implementor("<alloc::vec::Vec<<T as U>::V> as core::fmt::Debug>::fmt"), Some("alloc::vec::Vec<<T as U>::V>"));
        assert_eq!(implementor("<shop::Pen>::new"), None);
        let functions = functions();
        let of = |glue, method| functions.type_of(glue, [method, 0, 0]);
        assert_eq!(of(CODE, CODE + 0x30).as_deref(), Some("shop::Shelf<shop::Book>"));
        assert_eq!(of(0, CODE + 0x20).as_deref(), Some("shop::Pen"));
        // Several types share the glue, or another type's was taken, but the method names one.
        assert_eq!(of(CODE + 0x10, CODE + 0x20).as_deref(), Some("shop::Pen"));
        assert_eq!(of(CODE, CODE + 0x20).as_deref(), Some("shop::Pen"));
        assert_eq!((of(CODE + 0x10, 0), of(CODE, 0), of(CODE + 0x50, CODE + 0x20)), (None, None, None));
        assert_eq!(functions.type_of(CODE + 0x18, [0, 0, CODE + 0x38]).as_deref(), Some("shop::main::{{closure}}"));
    }

    #[test]
    fn blocks_have_the_type_of_the_vtable_beside_the_pointer_and_none_if_pointers_disagree() {
        let mut constants = vec![0u8; 0x100];
        let mut vtable = |at: usize, words: [u64; 4]| {
            for (number, word) in words.iter().enumerate() {
                constants[at + 8 * number..at + 8 * number + 8].copy_from_slice(&word.to_le_bytes());
            }
        };
        vtable(0x20, [CODE, 40, 8, CODE + 0x30]);
        vtable(0x60, [0, 24, 8, CODE + 0x20]);
        // Not a power of two.
        vtable(0xa0, [CODE, 24, 7, CODE + 0x20]);
        let mut vtables = Vtables::default();
        vtables.search(CONSTANTS, &constants, &functions(), &mut HashMap::new());
        assert_eq!(vtables.of.len(), 2);

        let mut memory = Fixture::default();
        let block = |number: u64| HEAP + 0x10 + number * 0x40;
        let blocks: Vec<(u64, u64)> = (0..6).map(|number| (block(number), if number == 4 { 0x20 } else { 0x30 })).collect();
        let (book, pen) = (CONSTANTS + 0x20, CONSTANTS + 0x60);
        let pairs = [
            (ROOTS, block(0), book),
            (block(0) + 8, block(1), pen),
            // Into the middle, and to a block that is too small.
            (ROOTS + 0x10, block(2) + 8, book),
            (ROOTS + 0x20, block(4), book),
            (ROOTS + 0x30, block(5), book),
            (ROOTS + 0x40, block(5), pen),
        ];
        for (slot, object, vtable) in pairs {
            memory.write_word(slot, object);
            memory.write_word(slot + 8, vtable);
        }
        let mut areas = Areas { heap: vec![HEAP..HEAP + 0x1000], ..Areas::default() };
        areas.roots.push(Area { range: ROOTS..ROOTS + 0x1000, class: Class::Globals, step: 8 });
        let index = BlockIndex::of(&blocks).unwrap_or_default();
        let found = TraitObjects::of_pointers(&memory, vtables, &areas, &index, Pace::default());
        assert_eq!(found.iter().collect::<Vec<_>>(), [(0, "shop::Shelf<shop::Book>"), (1, "shop::Pen")]);
    }
}
