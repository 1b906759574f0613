//! Names of roots: the variable, with its member if there is debug information, or the kind of memory.

use std::collections::HashMap;
use std::ops::Range;

use crate::census::memory::{Memory, word_at};
use crate::heap::residency::{page_down, page_up};
use crate::process::file::MappedFile;
use crate::process::stack::{Frame, Walker, standing};
use crate::process::{Backing, Mapping, Maps, Process};
use crate::symbol::demangle;
use crate::symbol::variables::{TypeId, Variables};
use crate::units::Addr;

/// Most variables kept per file; a browser has several hundred thousand.
const VARIABLES_MAX: usize = 1 << 20;
/// Files whose variables are kept.
const FILES_MAX: usize = 256;
/// Files whose debug information is kept.
const DEBUGGED_MAX: usize = 16;
/// Most bytes of a stack that are searched for the outermost local that points to a block, and most locals tried.
const STACK_BYTES_MAX: u64 = 1 << 20;
const LOCALS_MAX: usize = 64;
/// Most blocks of a path that are named by members, and most bytes of each that are searched.
const HOPS_MAX: usize = 8;
const HOP_BYTES_MAX: u64 = 256 << 10;
/// Longest expression.
const EXPRESSION_CHARS_MAX: usize = 240;

/// A file's variables by virtual address.
#[derive(Debug, Default)]
struct Symbols {
    list: Vec<(u64, u64, Box<str>)>,
    /// Load bias: the process's address minus the file's virtual address.
    bias: u64,
}

impl Symbols {
    /// The variable that contains an address, its virtual address, and the distance from it.
    fn at(&self, addr: u64) -> Option<(&str, u64, u64)> {
        let vaddr = addr.wrapping_sub(self.bias);
        let after = self.list.partition_point(|variable| variable.0 <= vaddr);
        let (start, bytes, name) = self.list.get(after.checked_sub(1)?)?;
        (vaddr - start < *bytes).then_some((&**name, *start, vaddr - start))
    }
}

/// A root in terms of the program's source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expression {
    /// `the_shop.catalog_.bestsellers_`
    pub text: String,
    /// `main in shopd`, or the file.
    pub scope: String,
    /// Whether it is a member of the implementation of what the text names: the storage of a container.
    pub is_storage: bool,
    pointee: Option<TypeId>,
    /// Address of the root: of several on a stack, that of the local variable that was found.
    slot: u64,
    /// The file that defines the type.
    inode: u64,
}

impl Expression {
    /// The expression and its scope.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{} ({})", self.text, self.scope)
    }
}

/// Names for one process.
pub struct Names<'a> {
    memory: &'a dyn Memory,
    process: Option<&'a Process>,
    maps: &'a Maps,
    /// Threads that wait: stack pointer, address, name.
    threads: Vec<(u64, u64, String)>,
    saved: &'a [u64],
    frames: Option<Vec<Frame>>,
    files: HashMap<u64, Symbols>,
    debugged: HashMap<u64, Option<Variables>>,
    known: HashMap<(u64, u64), Option<Expression>>,
}

impl<'a> Names<'a> {
    /// For a process with these mappings; in a core file roots are named by their mappings only. `saved` are the registers of all threads as
    /// the kernel saved them.
    #[must_use]
    pub fn of(memory: &'a dyn Memory, maps: &'a Maps, saved: &'a [u64]) -> Self {
        let threads = memory.threads().into_iter();
        let threads = threads.filter_map(|thread| Some((thread.stack_pointer?, thread.program_counter.unwrap_or(0), thread.comm)));
        let mut threads: Vec<(u64, u64, String)> = threads.collect();
        threads.sort();
        Self {
            memory,
            process: memory.process(),
            maps,
            threads,
            saved,
            frames: None,
            files: HashMap::new(),
            debugged: HashMap::new(),
            known: HashMap::new(),
        }
    }

    /// The name of a root that points to the block with these addresses: `variable.member (file)`, `variable+0x10 (file)`, `stack of NAME`,
    /// `register`, or its mapping's name.
    pub fn of_place(&mut self, slot: u64, target: &Range<u64>) -> String {
        if slot == 0 {
            return "a register".to_owned();
        }
        if let Some(expression) = self.expression(slot, target) {
            return expression.words();
        }
        let Some(number) = self.mapping_of(slot) else { return "memory".to_owned() };
        let (file, mapping) = (self.file_of(number), self.maps.mappings.get(number));
        if let Some(file) = file {
            let name = file_name(file);
            return match self.symbols(file).at(slot) {
                Some((variable, _, 0)) => format!("{variable} ({name})"),
                Some((variable, _, offset)) => format!("{variable}+{offset:#x} ({name})"),
                None => format!("data of {name}"),
            };
        }
        let Some(mapping) = mapping else { return "memory".to_owned() };
        if let Some((_, _, name)) = self.thread_in(mapping) {
            return format!("stack or thread-local storage of {name}");
        }
        match &mapping.backing {
            Backing::Named(name) => name.clone(),
            _ if mapping.permissions.shared => "shared memory".to_owned(),
            _ => "unnamed private memory".to_owned(),
        }
    }

    /// The root in terms of the source, if there is debug information.
    pub fn expression(&mut self, slot: u64, target: &Range<u64>) -> Option<Expression> {
        if let Some(known) = self.known.get(&(slot, target.start)) {
            return known.clone();
        }
        let number = self.mapping_of(slot)?;
        let found = match self.file_of(number) {
            Some(file) => self.of_global(file, slot),
            None => self.of_stack(number, slot, target),
        };
        self.known.insert((slot, target.start), found.clone());
        found
    }

    /// The expression for a block that is reached from a root through others: `blocks` are their addresses, from the one that the root points
    /// to down to the block itself. `None` if a type on the path is not known.
    pub fn way(&mut self, slot: u64, blocks: &[Range<u64>]) -> Option<Expression> {
        let mut found = self.expression(slot, blocks.first()?)?;
        if blocks.len() > HOPS_MAX {
            return None;
        }
        let mut pointer = self.memory.word(found.slot).filter(|word| blocks.first().is_some_and(|first| first.contains(word)));
        for (from, to) in blocks.iter().zip(blocks.iter().skip(1)) {
            let (at, word) = self.pointer_in(from, to)?;
            let distance = at.checked_sub(pointer.or(Some(from.start))?)?;
            let variables = self.debugged.get(&found.inode)?.as_ref()?;
            let pointee = found.pointee?;
            let size = variables.size_of(pointee).filter(|&size| size > 0)?;
            let member = variables.member(pointee, distance % size);
            let index = if distance >= size { format!("[{}]", distance / size) } else { String::new() };
            match member.path.strip_prefix('.').filter(|_| index.is_empty()) {
                Some(path) => found.text.push_str(&format!("->{path}")),
                None => found.text.push_str(&format!("{}{}", if index.is_empty() { "[0]" } else { &index }, member.path)),
            }
            if found.text.chars().count() > EXPRESSION_CHARS_MAX {
                return None;
            }
            (found.is_storage, found.pointee) = (member.is_storage, member.pointee);
            pointer = Some(word);
        }
        Some(found)
    }

    /// The position in a block of a pointer into another, and the pointer.
    fn pointer_in(&self, from: &Range<u64>, to: &Range<u64>) -> Option<(u64, u64)> {
        let bytes = (from.end - from.start).min(HOP_BYTES_MAX);
        let mut buffer = vec![0u8; usize::try_from(bytes).ok()?];
        let got = self.memory.read(from.start, &mut buffer);
        let mut places = (0..got / 8).map(|place| (from.start + 8 * place as u64, word_at(&buffer, 8 * place)));
        places.find(|(_, word)| to.contains(word))
    }

    fn of_global(&mut self, file: &'a Mapping, slot: u64) -> Option<Expression> {
        let (symbol, vaddr, offset) = self.symbols(file).at(slot).map(|(name, vaddr, offset)| (name.to_owned(), vaddr, offset))?;
        let variables = self.variables(file)?;
        let variable = variables.global(vaddr)?;
        let member = variables.member(variable.type_id, offset);
        if member.path.is_empty() && offset > 0 && !member.is_storage {
            return None;
        }
        Some(Expression {
            text: format!("{symbol}{}", member.path),
            scope: file_name(file),
            is_storage: member.is_storage,
            pointee: member.pointee,
            slot,
            inode: file.inode,
        })
    }

    /// The outermost local variable on a stack that points to a block: inner ones may be copies.
    fn of_stack(&mut self, number: usize, slot: u64, target: &Range<u64>) -> Option<Expression> {
        let mapping = self.maps.mappings.get(number)?;
        self.thread_in(mapping)?;
        let end = mapping.end.0.min(slot.saturating_add(STACK_BYTES_MAX));
        let mut buffer = vec![0u8; usize::try_from(end - slot).ok()?];
        let got = self.memory.read(slot, &mut buffer);
        let leads = |place: &u64| target.contains(&word_at(&buffer, usize::try_from(place - slot).unwrap_or(usize::MAX)));
        let places: Vec<u64> = (slot..slot + (got as u64 & !7)).step_by(8).filter(leads).collect();
        places.into_iter().rev().take(LOCALS_MAX).find_map(|place| self.of_local(place))
    }

    fn of_local(&mut self, place: u64) -> Option<Expression> {
        let frame = *self.frames().iter().find(|frame| (frame.start..frame.cfa).contains(&place))?;
        let mapping: &'a Mapping = self.maps.find(Addr(frame.pc))?;
        let file = MappedFile::open(self.process?, mapping).ok()?;
        let bias = file.elf.load_bias(mapping.start.0, mapping.offset)?;
        let distance = place.cast_signed().checked_sub(frame.cfa.cast_signed())?;
        let variables = self.variables(mapping)?;
        let (variable, function) = variables.local(frame.pc.wrapping_sub(bias), distance)?;
        let member = variables.member(variable.type_id, variable.offset);
        Some(Expression {
            text: format!("{}{}", variable.name, member.path),
            scope: format!("{function} in {}", file_name(mapping)),
            is_storage: member.is_storage,
            pointee: member.pointee,
            slot: place,
            inode: mapping.inode,
        })
    }

    fn frames(&mut self) -> &[Frame] {
        if self.frames.is_none() {
            let threads: Vec<(u64, u64)> = self.threads.iter().map(|(sp, pc, _)| (*pc, *sp)).collect();
            let (memory, maps) = (self.memory, self.maps);
            let word = |addr| memory.word(addr);
            let walked = self.process.map(|process| Walker::of(process, maps).frames(&standing(&threads, self.saved), &word));
            self.frames = Some(walked.unwrap_or_default());
        }
        self.frames.as_deref().unwrap_or_default()
    }

    fn mapping_of(&self, slot: u64) -> Option<usize> {
        let after = self.maps.mappings.partition_point(|mapping| mapping.start.0 <= slot);
        after.checked_sub(1).filter(|&number| self.maps.mappings.get(number).is_some_and(|one| one.contains(Addr(slot))))
    }

    fn thread_in(&self, mapping: &Mapping) -> Option<&(u64, u64, String)> {
        let first = self.threads.partition_point(|thread| thread.0 < mapping.start.0);
        self.threads.get(first).filter(|thread| thread.0 < mapping.end.0)
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

    fn symbols(&mut self, mapping: &Mapping) -> &Symbols {
        if self.files.len() >= FILES_MAX {
            self.files.clear();
        }
        let process = self.process;
        self.files.entry(mapping.inode).or_insert_with(|| process.and_then(|process| read(process, mapping)).unwrap_or_default())
    }

    fn variables(&mut self, mapping: &Mapping) -> Option<&mut Variables> {
        if self.debugged.len() >= DEBUGGED_MAX && !self.debugged.contains_key(&mapping.inode) {
            return None;
        }
        let process = self.process?;
        let read = || Variables::of(&MappedFile::open(process, mapping).ok()?.elf);
        self.debugged.entry(mapping.inode).or_insert_with(read).as_mut()
    }
}

fn file_name(mapping: &Mapping) -> String {
    mapping.file_name()
}

/// The variables of a mapping's file.
fn read(process: &Process, mapping: &Mapping) -> Option<Symbols> {
    let file = MappedFile::open(process, mapping).ok()?;
    // Pages shared by two segments are mapped twice; data is in the later one.
    let vaddr = file.elf.segments().iter().rev().filter(|segment| !segment.executable).find_map(|segment| {
        let distance = mapping.offset.0.checked_sub(page_down(segment.offset))?;
        let end = page_up(segment.offset.checked_add(segment.file_bytes)?) - page_down(segment.offset);
        (distance < end).then(|| page_down(segment.vaddr).wrapping_add(distance))
    })?;
    let mut found = Symbols { list: Vec::new(), bias: mapping.start.0.wrapping_sub(vaddr) };
    file.elf.for_each_variable(|name, vaddr, size| {
        if found.list.len() < VARIABLES_MAX && !name.is_empty() {
            found.list.push((vaddr, size, demangle(&String::from_utf8_lossy(name)).into()));
        }
    });
    found.list.sort();
    found.list.dedup_by_key(|variable| variable.0);
    Some(found)
}
