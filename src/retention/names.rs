//! Names of places outside of blocks: the variable, or the kind of memory.

use std::collections::HashMap;

use crate::heap::residency::{page_down, page_up};
use crate::symbol::demangle;
use crate::target::file::MappedFile;
use crate::target::{Backing, Mapping, Maps, Process};
use crate::units::Addr;

/// Variables kept of one file; a browser has some hundred thousand.
const VARIABLES_MAX: usize = 1 << 20;
/// Files whose variables are kept.
const FILES_MAX: usize = 256;

/// A file's variables by virtual address.
#[derive(Debug, Default)]
struct Variables {
    list: Vec<(u64, u64, Box<str>)>,
    /// What is added to a virtual address to have one of the process.
    bias: u64,
}

impl Variables {
    fn at(&self, addr: u64) -> Option<(&str, u64)> {
        let vaddr = addr.wrapping_sub(self.bias);
        let after = self.list.partition_point(|variable| variable.0 <= vaddr);
        let (start, bytes, name) = self.list.get(after.checked_sub(1)?)?;
        (vaddr - start < *bytes).then_some((&**name, vaddr - start))
    }
}

/// Names for one process.
pub struct Names<'a> {
    process: Option<&'a Process>,
    maps: &'a Maps,
    stacks: Vec<(u64, String)>,
    files: HashMap<u64, Variables>,
}

impl<'a> Names<'a> {
    /// For a process with these mappings; without a process (a core file) files are named, but not their variables. `stacks` are the
    /// threads' stack pointers and names.
    #[must_use]
    pub fn of(process: Option<&'a Process>, maps: &'a Maps, mut stacks: Vec<(u64, String)>) -> Self {
        stacks.sort();
        Self { process, maps, stacks, files: HashMap::new() }
    }

    /// What a place is called: `variable+0x10 (file)`, `stack of NAME`, `register`, or its mapping's name.
    pub fn of_place(&mut self, slot: u64) -> String {
        if slot == 0 {
            return "a register".to_owned();
        }
        let after = self.maps.mappings.partition_point(|mapping| mapping.start.0 <= slot);
        let number = after.checked_sub(1).filter(|&number| self.maps.mappings.get(number).is_some_and(|one| one.contains(Addr(slot))));
        let Some(number) = number else { return "memory".to_owned() };
        let (file, mapping) = (self.file_of(number), self.maps.mappings.get(number));
        if let Some(file) = file {
            let name = file.path().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            return match self.variables(file).at(slot) {
                Some((variable, 0)) => format!("{variable} ({name})"),
                Some((variable, offset)) => format!("{variable}+{offset:#x} ({name})"),
                None => format!("data of {name}"),
            };
        }
        let Some(mapping) = mapping else { return "memory".to_owned() };
        let first = self.stacks.partition_point(|stack| stack.0 < mapping.start.0);
        if let Some((_, name)) = self.stacks.get(first).filter(|stack| stack.0 < mapping.end.0) {
            return format!("stack or thread-local storage of {name}");
        }
        match &mapping.backing {
            Backing::Named(name) => name.clone(),
            _ if mapping.permissions.shared => "shared memory".to_owned(),
            _ => "private memory without a name".to_owned(),
        }
    }

    /// The mapping of the object whose data a mapping is: itself, or the one before its bss.
    fn file_of(&self, number: usize) -> Option<&'a Mapping> {
        let maps: &'a Maps = self.maps;
        let mapping = maps.mappings.get(number)?;
        if mapping.path().is_some() {
            return Some(mapping);
        }
        let before = maps.mappings.get(number.checked_sub(1)?)?;
        let is_bss = matches!(mapping.backing, Backing::Anonymous) && before.end == mapping.start && before.permissions.write;
        before.path().filter(|_| is_bss).map(|_| before)
    }

    fn variables(&mut self, mapping: &Mapping) -> &Variables {
        if self.files.len() >= FILES_MAX {
            self.files.clear();
        }
        let process = self.process;
        self.files.entry(mapping.inode).or_insert_with(|| process.and_then(|process| read(process, mapping)).unwrap_or_default())
    }
}

/// The variables of a mapping's file.
fn read(process: &Process, mapping: &Mapping) -> Option<Variables> {
    let file = MappedFile::open(process, mapping).ok()?;
    // Pages that two segments share are mapped twice; data is in the later one.
    let vaddr = file.elf.segments().iter().rev().filter(|segment| !segment.executable).find_map(|segment| {
        let distance = mapping.offset.0.checked_sub(page_down(segment.offset))?;
        let end = page_up(segment.offset.checked_add(segment.file_bytes)?) - page_down(segment.offset);
        (distance < end).then(|| page_down(segment.vaddr).wrapping_add(distance))
    })?;
    let mut found = Variables { list: Vec::new(), bias: mapping.start.0.wrapping_sub(vaddr) };
    file.elf.for_each_variable(|name, vaddr, size| {
        if found.list.len() < VARIABLES_MAX && !name.is_empty() {
            found.list.push((vaddr, size, demangle(&String::from_utf8_lossy(name)).into()));
        }
    });
    found.list.sort();
    found.list.dedup_by_key(|variable| variable.0);
    Some(found)
}
