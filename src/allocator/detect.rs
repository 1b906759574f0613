//! Determines the allocators in a process, and which of them serves `malloc`.
//!
//! Every executable mapping is examined: an allocator may be the C library's, preloaded, linked into the program, or a second one with
//! prefixed names. A process can have several at the same time, and all are reported with their functions: the C library's `malloc` is
//! still reached when another one interposes it (from a `dlmopen` namespace, from a library linked with `-Bsymbolic`, before a late
//! `dlopen` took over), and a probe that is never hit costs nothing.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::allocator::in_file::{FileAllocator, identify};
use crate::allocator::{Allocator, cpython, is_own_library};
use crate::process::elf::ElfError;
use crate::process::file::{FileError, FileIdentity, MappedFile};
use crate::process::handle::{Process, ProcessError, read_bounded};
use crate::process::maps::{Mapping, Maps};
use crate::units::Addr;

/// Maximum number of executable files examined per process. The largest seen (desktop programs) map about 400.
const FILES_MAX: usize = 4096;
/// Maximum number of entries followed in the dynamic loader's list of libraries.
const LINK_MAP_MAX: usize = 4096;
/// Maximum number of files whose results are cached; most are "no allocator", about 200 bytes. A node's processes map some thousand
/// different files.
const KNOWN_FILES_MAX: usize = 16_384;

/// A file with at least one allocator in it.
#[derive(Debug)]
pub struct AllocatorModule {
    /// Its first executable mapping.
    pub mapping: Mapping,
    /// The file.
    pub file: MappedFile,
    /// The allocators and their functions.
    pub found: Arc<FileAllocator>,
    /// Whether the program's `malloc` resolves to this file's. False for all files if the loader's list cannot be read.
    pub serves_malloc: bool,
    /// The Go toolchain linked the file: no return probe may be set in it.
    pub is_go: bool,
}

impl AllocatorModule {
    /// The file's name without directories, for display.
    #[must_use]
    pub fn file_name(&self) -> String {
        self.file.display_path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// What was found in a process.
#[derive(Debug, Default)]
pub struct Detection {
    /// Files with allocators, by ascending address of their mapping.
    pub modules: Vec<AllocatorModule>,
    /// What could not be examined, and other notes for the user, as sentences.
    pub notes: Vec<String>,
    /// The main program was linked by Go.
    pub main_is_go: bool,
}

/// Bytes of a process's environment that are read: what an exec allows is a quarter of the stack's limit, 2 MiB by default.
const ENVIRONMENT_BYTES_MAX: u64 = 4 << 20;

/// Searches for allocators, and caches the results by file: a process is examined again whenever it maps new code, and processes share
/// libraries.
#[derive(Debug, Default)]
pub struct Detector {
    /// Whether CPython's allocator of objects is searched for too.
    with_python_objects: bool,
    known: HashMap<FileIdentity, Arc<FileAllocator>>,
}

/// What is known of the main program.
#[derive(Debug, Default)]
struct MainProgram {
    /// The location of the loader's list of files, if it has one.
    list: Option<ListPlace>,
    /// It is not started by a loader: its `malloc` is its own.
    is_static: bool,
    inode: u64,
}

/// The location of the loader's `struct r_debug`, which has its list of files.
#[derive(Debug, Clone, Copy)]
enum ListPlace {
    /// At this address.
    At(u64),
    /// At the address in this word.
    Behind(u64),
}

impl MainProgram {
    /// For a file whose addresses are lower than those in the process by `bias`. If a loader was run as a command with the program as its
    /// argument, the kernel started the loader: it has no DT_DEBUG, but a variable refers to its list (glibc's `_r_debug`, elf/dl-debug.c;
    /// musl's `_dl_debug_addr`, ldso/dynlink.c).
    fn of(file: &MappedFile, bias: Option<u64>, inode: u64) -> Self {
        let elf = &file.elf;
        let at = |vaddr: u64| bias.map(|bias| bias.wrapping_add(vaddr));
        let variable = |name: &[u8]| if elf.has_interpreter() { None } else { at(elf.variable_vaddr(name)?) };
        let own = variable(b"_r_debug").map(ListPlace::At).or_else(|| variable(b"_dl_debug_addr").map(ListPlace::Behind));
        let is_static = !elf.has_interpreter() && own.is_none();
        Self { list: own.or_else(|| Some(ListPlace::Behind(at(elf.debug_word_vaddr()?)?))), is_static, inode }
    }
}

impl Detector {
    /// One that also finds the functions by which CPython allocates its objects.
    #[must_use]
    pub fn with_python_objects(self, with_python_objects: bool) -> Self {
        Self { with_python_objects, ..self }
    }

    /// Searches a process for allocators.
    ///
    /// # Errors
    /// If its mappings cannot be read. Files that cannot be opened become notes.
    pub fn detect(&mut self, process: &Process) -> Result<Detection, ProcessError> {
        let maps = process.maps()?;
        let mut detection = Detection::default();
        let entry_address = program_entry(process);
        let mut has_cpython = false;
        let mut main = MainProgram::default();
        for mapping in distinct_files(&maps, &mut detection.notes) {
            if is_own_library(mapping.file_name().as_bytes()) {
                continue;
            }
            let file = match MappedFile::open(process, mapping) {
                Ok(file) => file,
                // Data files are also mapped executable (JIT caches, Java archives).
                Err(FileError::Elf { source: ElfError::NotElf, .. }) => continue,
                Err(error) => {
                    detection.notes.push(error.to_string());
                    continue;
                }
            };
            let is_main = entry_address.is_some_and(|entry| {
                maps.executable_files().any(|m| m.inode == mapping.inode && m.device == mapping.device && m.contains(entry))
            });
            if is_main {
                detection.main_is_go = file.elf.is_go();
                let bias = file.elf.load_bias(mapping.start.0, mapping.offset);
                main = MainProgram::of(&file, bias, mapping.inode);
            }
            let found = self.find(&file);
            has_cpython |= found.is_cpython;
            let objects = if self.with_python_objects && found.is_cpython {
                cpython::of_objects(process, &maps, mapping, &file, &found)
            } else {
                None
            };
            if !found.functions.is_empty() {
                let (mapping, is_go) = (mapping.clone(), file.elf.is_go());
                detection.modules.push(AllocatorModule { mapping, file, found, serves_malloc: false, is_go });
            }
            // A module of its own, which may appear later than that of another allocator in the file.
            if let Some(found) = objects
                && let Ok(file) = MappedFile::open(process, mapping)
            {
                detection.modules.push(AllocatorModule { mapping: mapping.clone(), file, found, serves_malloc: false, is_go: false });
            }
        }
        self.choose_objects(process, has_cpython, &mut detection.modules);
        mark_serving(process, &maps, &main, &mut detection.modules);
        Ok(detection)
    }

    /// Of CPython's own functions for objects and those that a preloaded library puts in front of them (src/sampler/preload/python.c), keeps
    /// those that every call passes; none if objects are not wanted, or there is no CPython.
    fn choose_objects(&self, process: &Process, has_cpython: bool, modules: &mut Vec<AllocatorModule>) {
        let is_objects = |module: &AllocatorModule| module.found.allocator == Allocator::Pymalloc;
        if !modules.iter().any(is_objects) {
            return;
        }
        // While a process is being started, the library may not be mapped yet.
        let environment = read_bounded(&process.directory().join("environ"), ENVIRONMENT_BYTES_MAX).unwrap_or_default();
        let is_preloaded = environment.split(|&byte| byte == 0).any(|variable| {
            let value = variable.strip_prefix(b"LD_PRELOAD=").unwrap_or_default();
            value.windows(cpython::IN_FRONT.len()).any(|part| part == cpython::IN_FRONT.as_bytes())
        });
        let is_wanted = |module: &AllocatorModule| module.found.is_cpython != is_preloaded;
        modules.retain(|module| !is_objects(module) || self.with_python_objects && has_cpython && is_wanted(module));
    }

    fn find(&mut self, file: &MappedFile) -> Arc<FileAllocator> {
        if let Some(found) = self.known.get(&file.identity) {
            return Arc::clone(found);
        }
        let found = Arc::new(identify(&file.elf));
        // Clears the cache instead of tracking an order: a node that fills it runs builds in a loop, and examining a file again costs a
        // millisecond.
        if self.known.len() >= KNOWN_FILES_MAX {
            self.known.clear();
        }
        self.known.insert(file.identity.clone(), Arc::clone(&found));
        found
    }
}

/// The first executable mapping of each file.
fn distinct_files<'a>(maps: &'a Maps, notes: &mut Vec<String>) -> Vec<&'a Mapping> {
    let mut files: Vec<&Mapping> = Vec::new();
    let mut seen = HashSet::new();
    for mapping in maps.executable_files().filter(|m| seen.insert((m.device, m.inode))) {
        if files.len() == FILES_MAX {
            notes.push(format!("more than {FILES_MAX} executable files are mapped: the others were not examined"));
            break;
        }
        files.push(mapping);
    }
    files
}

/// Address of the program's entry point, from the auxiliary vector (AT_ENTRY = 9).
fn program_entry(process: &Process) -> Option<Addr> {
    const AT_ENTRY: u64 = 9;
    let bytes = read_bounded(&process.directory().join("auxv"), 64 << 10).ok()?;
    bytes.chunks_exact(16).find_map(|pair| {
        let word = |at: usize| pair.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        (word(0)? == AT_ENTRY).then(|| word(8).map(Addr))?
    })
}

/// Marks the module whose `malloc` the program's calls resolve to: the first in the dynamic loader's list, whose order is the lookup order
/// for everything loaded at start. A static program has only its own.
fn mark_serving(process: &Process, maps: &Maps, main: &MainProgram, modules: &mut [AllocatorModule]) {
    if main.is_static {
        let defines = |m: &&mut AllocatorModule| m.found.functions.iter().any(|f| f.symbols.iter().any(|s| s == "malloc"));
        if let Some(own) = modules.iter_mut().filter(|m| m.mapping.inode == main.inode).find(defines) {
            own.serves_malloc = true;
        }
        return;
    }
    let Some(list) = main.list else { return };
    for dynamic_section in link_map(process, list) {
        let Some(owner) = maps.find(Addr(dynamic_section)) else { continue };
        let module = modules.iter_mut().find(|m| m.mapping.inode == owner.inode && m.mapping.device == owner.device);
        if let Some(module) = module.filter(|m| m.found.exports_malloc) {
            module.serves_malloc = true;
            return;
        }
    }
}

/// Addresses of the dynamic sections of all loaded files in the loader's order (glibc and musl, link.h: `struct r_debug { int version;
/// struct link_map *map; … }`, `struct link_map { addr, name, ld, next, prev }`).
fn link_map(process: &Process, list: ListPlace) -> Vec<u64> {
    let Ok(memory) = File::open(process.directory().join("mem")) else { return Vec::new() };
    let word = |address: u64| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, address).ok().map(|()| u64::from_le_bytes(bytes)).filter(|&value| value != 0)
    };
    let mut sections = Vec::new();
    let debug = match list {
        ListPlace::At(addr) => Some(addr),
        ListPlace::Behind(addr) => word(addr),
    };
    let mut next = debug.and_then(|debug| word(debug.wrapping_add(8)));
    while let Some(entry) = next {
        if sections.len() == LINK_MAP_MAX {
            break;
        }
        sections.extend(word(entry.wrapping_add(16)));
        next = word(entry.wrapping_add(24));
    }
    sections
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;

    use super::*;
    use crate::allocator::Allocator;
    use crate::process::testing::Cat;

    #[test]
    fn malloc_is_served_by_the_c_library_or_by_a_preloaded_allocator() {
        let mut detector = Detector::default();
        for (preload, serving) in [
            (None, Allocator::Glibc),
            (Some("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"), Allocator::Jemalloc),
            (Some("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), Allocator::Tcmalloc),
            (Some("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2"), Allocator::Mimalloc),
        ] {
            let cat = Cat::start(Path::new("/bin/cat"), preload);
            let detection = detector.detect(&Process::open(cat.pid()).unwrap()).unwrap();
            let serves: Vec<_> = detection.modules.iter().filter(|m| m.serves_malloc).map(|m| m.found.allocator).collect();
            assert_eq!(serves, [serving]);
            assert!(detection.modules.iter().any(|m| m.found.allocator == Allocator::Glibc));
        }
    }
}
