//! Symbols of ELF files through blazesym, which reads symbol tables, DWARF, debug links, build ids and MiniDebugInfo.
//!
//! A file without symbols may have its debug information in another file ([`separate`](super::separate)), from a server too
//! ([`debuginfod`](super::debuginfod)): that file is looked up first.
//!
//! blazesym keeps every file that it opened, with its parsed data. [`ElfSymbols`] limits that: the least recently used files are dropped and
//! read again when needed.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use blazesym::symbolize::evict::{self, Evict};
use blazesym::symbolize::source::{Elf, Source};
use blazesym::symbolize::{CodeInfo, Input, Symbolized, Symbolizer};

use super::capped;
use super::debuginfod::{self, Debuginfod, Lookup, OPEN_BYTES_DEFAULT};
use super::demangle::demangle;
use super::separate::{self, LINK_BYTES_MAX, Separate};
use crate::process::elf::{Elf as ElfHeaders, Segment};

/// Most files open and parsed at a time. Each takes a file descriptor, of which a process has 1024 by default.
pub const FILES_MAX: usize = 256;
/// Most bytes of files open at a time. The parsed data of a file takes up to about its size in memory.
pub const FILE_BYTES_MAX: u64 = 1 << 30;
/// Most inlined functions at one address. DWARF may nest endlessly; real code stays below 50.
pub const INLINED_MAX: usize = 64;

/// Most files whose debug file is remembered until the files are closed; then it is looked for again.
const DEBUG_FILES_MAX: usize = 16 << 10;

/// One function at an address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Symbol {
    /// Demangled name, never empty.
    pub function: String,
    /// Source file, empty = not known.
    pub file: String,
    /// Source line from 1, 0 = not known.
    pub line: u32,
}

/// What is known of an address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Found {
    /// The functions: the innermost inlined one first, the function itself last. Empty when nothing is known.
    pub symbols: Vec<Symbol>,
    /// When there may be more to know, because the file's debug information is being fetched or asked for again; `None` = this is all.
    pub preliminary_until: Option<Instant>,
}

/// A source of a file's symbols. [`ElfSymbols`] reads files; tests have their own.
pub trait FileSymbols {
    /// The functions at an address of the file.
    fn symbols(&mut self, file: &OpenedFile, address: u64) -> Found;
}

/// A file that symbols are looked up in.
#[derive(Debug)]
pub struct OpenedFile {
    /// Path that opens exactly this file now.
    pub path: PathBuf,
    /// Its identity.
    pub id: FileId,
    /// Its loaded segments; none if it is not an ELF file.
    segments: Vec<Segment>,
    /// Whether the debug information that it links to may be looked for.
    links_are_safe: bool,
    /// What its debug file is looked for by, if it has no symbols.
    separate: Option<Separate>,
    /// Its bytes, with its sections decompressed.
    bytes_to_read: u64,
}

/// The identity of a file; equal for two paths of one file as long as it is not written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified: (i64, i64),
}

impl OpenedFile {
    /// Takes the file at `path`; of `file`, if one is given, where the path leads to another or nowhere by now. `None` if neither can be
    /// opened. `shown` is the path for messages; without it no debug information is looked for elsewhere.
    pub fn open(path: &Path, file: Option<&File>, shown: Option<&str>) -> Option<Self> {
        let known = file.and_then(identity);
        let by_path = || File::open(path).ok().and_then(|f| identity(&f).map(|id| (f, id)));
        let (opened, id, path) = match (by_path(), known) {
            (Some((opened, id)), None) => (opened, id, path.to_path_buf()),
            // The path is better where it is the same file: debug links are looked for beside it.
            (Some((opened, id)), Some(known)) if id == known => (opened, id, path.to_path_buf()),
            (_, Some(known)) => {
                let path = PathBuf::from(format!("/proc/self/fd/{}", file?.as_raw_fd()));
                (File::open(&path).ok()?, known, path)
            }
            (None, None) => return None,
        };
        let elf = ElfHeaders::parse(opened).ok();
        let segments = elf.as_ref().map(|elf| elf.segments().to_vec()).unwrap_or_default();
        let links_are_safe = elf.as_ref().is_none_or(|elf| links_are_safe(elf, &path));
        let bytes_to_read = elf.as_ref().map_or(id.size_bytes, ElfHeaders::bytes_to_read);
        let separate = elf.zip(shown).and_then(|(elf, shown)| separate::needed(&elf, &path, shown, links_are_safe));
        Some(Self { path, id, segments, links_are_safe, separate, bytes_to_read })
    }

    /// The address, in the file's own address space, of a byte of the file's code. `None` = the file loads no such byte.
    ///
    /// Executable segments come first: where segments do not start on pages (lld's layout), the kernel maps a page that two of them
    /// share twice, and code is in the executable one.
    pub fn address_of(&self, offset: u64) -> Option<u64> {
        let mut code_first = [true, false].into_iter().flat_map(|code| self.segments.iter().filter(move |s| s.executable == code));
        code_first.find_map(|segment| {
            let distance = offset.checked_sub(segment.offset)?;
            (distance < segment.file_bytes).then(|| segment.vaddr.wrapping_add(distance))
        })
    }
}

/// `None` for anything but a regular file: opening and mapping others may block or act.
fn identity(file: &File) -> Option<FileId> {
    let meta = file.metadata().ok().filter(|meta| meta.is_file())?;
    Some(FileId { device: meta.dev(), inode: meta.ino(), size_bytes: meta.size(), modified: (meta.mtime(), meta.mtime_nsec()) })
}

/// Whether the files that an ELF file names for its debug information can be opened without harm.
///
/// The watched process controls the names and may have put a pipe there: opening it would block forever. By definition a debug link is a bare
/// file name (GDB manual, "Separate Debug Files"), looked up next to the file and in `.debug` there; alternate links (dwz) and their
/// successors (DWARF 5, section 7.3.6) are in debug files, not in mapped ones.
fn links_are_safe(elf: &ElfHeaders<File>, path: &Path) -> bool {
    let harmless = |path: &Path| path.metadata().map_or(true, |meta| meta.is_file());
    // A package of split debug information has the file's own name and this ending.
    let mut package = path.as_os_str().to_owned();
    package.push(".dwp");
    if elf.has_section(b".gnu_debugaltlink") || elf.has_section(b".debug_sup") || !harmless(Path::new(&package)) {
        return false;
    }
    if !elf.has_section(b".gnu_debuglink") {
        return true;
    }
    let Some(section) = elf.section(b".gnu_debuglink", LINK_BYTES_MAX) else { return false };
    let name: Vec<u8> = section.into_iter().take_while(|&byte| byte != 0).collect();
    let (Ok(canonical), false) = (path.canonicalize(), name.contains(&b'/')) else { return false };
    let name = OsStr::from_bytes(&name);
    let directory = canonical.parent().unwrap_or(Path::new("/"));
    [directory.join(name), directory.join(".debug").join(name)].iter().all(|path| harmless(path))
}

/// Symbols of ELF files, read with blazesym.
pub struct ElfSymbols {
    inner: Symbolizer,
    debuginfod: Option<Arc<Debuginfod>>,
    /// Debug files of files without symbols, once it is known which.
    debug_files: HashMap<FileId, DebugFile>,
    /// Bytes of those that are open, with their sections decompressed.
    debug_bytes: u64,
    /// Files that the inner symbolizer holds: path to open, size, and when last used.
    held: HashMap<FileId, Held>,
    held_bytes: u64,
    clock: u64,
    /// Files dropped to stay within the limits.
    pub evictions: u64,
    /// Files whose contents made the reader panic; they are not read again.
    pub broken: HashSet<FileId>,
}

struct Held {
    path: PathBuf,
    used: u64,
}

/// Where the debug information of a file without symbols is.
#[derive(Clone)]
enum DebugFile {
    Here(Rc<OpenedFile>),
    NotUntil(Instant),
    Nowhere,
}

impl Default for ElfSymbols {
    fn default() -> Self {
        Self::with_debuginfod(debuginfod::installed())
    }
}

/// Demangling is done here, with limits.
fn inner() -> Symbolizer {
    Symbolizer::builder().enable_code_info(true).enable_inlined_fns(true).enable_demangling(false).build()
}

impl ElfSymbols {
    /// Reads files, and debug information from servers if there are any.
    pub fn with_debuginfod(debuginfod: Option<Arc<Debuginfod>>) -> Self {
        Self {
            inner: inner(),
            debuginfod,
            debug_files: HashMap::new(),
            debug_bytes: 0,
            held: HashMap::new(),
            held_bytes: 0,
            clock: 0,
            evictions: 0,
            broken: HashSet::new(),
        }
    }

    /// Closes all files; they are read again when they are needed.
    pub fn close(&mut self) {
        self.inner = inner();
        self.debug_files.clear();
        self.debug_bytes = 0;
        self.held.clear();
        self.held_bytes = 0;
    }

    /// Makes space for a file and marks it as used.
    fn hold(&mut self, file: &OpenedFile) {
        self.clock += 1;
        if let Some(held) = self.held.get_mut(&file.id) {
            held.used = self.clock;
            // The path of its first use may have gone with its process.
            if held.path == file.path {
                return;
            }
            let old = std::mem::replace(&mut held.path, file.path.clone());
            self.evict(&old);
            return;
        }
        while !self.held.is_empty() && (self.held.len() >= FILES_MAX || self.held_bytes.saturating_add(file.id.size_bytes) > FILE_BYTES_MAX)
        {
            let Some((&oldest, _)) = self.held.iter().min_by_key(|(_, held)| held.used) else { break };
            if let Some(held) = self.held.remove(&oldest) {
                self.held_bytes = self.held_bytes.saturating_sub(oldest.size_bytes);
                self.evictions += 1;
                self.evict(&held.path);
            }
        }
        self.held_bytes = self.held_bytes.saturating_add(file.id.size_bytes);
        self.held.insert(file.id, Held { path: file.path.clone(), used: self.clock });
    }

    fn evict(&mut self, path: &Path) {
        // It fails only for kinds of data that are not used here.
        let _ = self.inner.evict(&Evict::Elf(evict::Elf::new(path)));
    }
}

impl ElfSymbols {
    /// Where the debug information of a file is. It is looked for once, until the files are closed.
    fn debug_file(&mut self, file: &OpenedFile, wanted: &Separate) -> DebugFile {
        if let Some(known) = self.debug_files.get(&file.id) {
            return known.clone();
        }
        let found = match (separate::installed(&wanted.build_id), &self.debuginfod) {
            (Some(path), _) => Lookup::Found(path),
            (None, None) => return self.know(file, DebugFile::Nowhere),
            (None, Some(debuginfod)) => debuginfod.find(wanted),
        };
        match found {
            Lookup::Found(path) => match OpenedFile::open(&path, None, None) {
                Some(opened) => self.make_room(file, opened),
                None => self.know(file, DebugFile::Nowhere),
            },
            Lookup::NotUntil(at) => self.know(file, DebugFile::NotUntil(at)),
            // Kept too, so that all addresses of the file are named alike until the files are closed.
            Lookup::NotYet => self.know(file, DebugFile::NotUntil(Instant::now())),
        }
    }

    /// Opens a debug file if it and those that are open stay within the limit. Otherwise it has its turn with the next naming, which has the names
    /// from the others already. Closing one for another would read both again for every other frame.
    fn make_room(&mut self, file: &OpenedFile, debug: OpenedFile) -> DebugFile {
        let bytes_max = self.debuginfod.as_ref().map_or(OPEN_BYTES_DEFAULT, |debuginfod| debuginfod.open_bytes_max());
        // An installed one, because the cache has none like it. It would be put off each time.
        if debug.bytes_to_read > bytes_max {
            let (path, bytes) = (debug.path.display(), debug.bytes_to_read);
            tracing::debug!("{path} is not read: it has {bytes} bytes, more than {bytes_max}");
            return self.know(file, DebugFile::Nowhere);
        }
        let bytes = self.debug_bytes.saturating_add(debug.bytes_to_read);
        if bytes > bytes_max {
            if let Some(debuginfod) = &self.debuginfod {
                debuginfod.put_off();
            }
            return self.know(file, DebugFile::NotUntil(Instant::now()));
        }
        self.debug_bytes = bytes;
        self.know(file, DebugFile::Here(Rc::new(debug)))
    }

    fn know(&mut self, file: &OpenedFile, debug: DebugFile) -> DebugFile {
        if self.debug_files.len() >= DEBUG_FILES_MAX {
            self.debug_files.clear();
        }
        self.debug_files.insert(file.id, debug.clone());
        debug
    }

    fn look_up(&mut self, file: &OpenedFile, address: u64) -> Vec<Symbol> {
        if self.broken.contains(&file.id) {
            return Vec::new();
        }
        self.hold(file);
        let source = Source::Elf(Elf { debug_syms: file.links_are_safe, ..Elf::new(&file.path) });
        // The file is untrusted: its contents must not end fragprof. After a panic nothing of the reader is used.
        let looked_up = catch_unwind(AssertUnwindSafe(|| {
            self.inner.symbolize_single(&source, Input::VirtOffset(address)).ok().map(|found| symbols_of(&found)).unwrap_or_default()
        }));
        looked_up.unwrap_or_else(|_| {
            self.broken.insert(file.id);
            self.close();
            Vec::new()
        })
    }
}

impl FileSymbols for ElfSymbols {
    fn symbols(&mut self, file: &OpenedFile, address: u64) -> Found {
        let debug = file.separate.as_ref().map_or(DebugFile::Nowhere, |wanted| self.debug_file(file, wanted));
        let preliminary_until = match debug {
            DebugFile::Here(debug) => match self.look_up(&debug, address) {
                // The file itself has names of functions that it exports.
                symbols if symbols.is_empty() => None,
                symbols => return Found { symbols, preliminary_until: None },
            },
            DebugFile::NotUntil(at) => Some(at),
            DebugFile::Nowhere => None,
        };
        Found { symbols: self.look_up(file, address), preliminary_until }
    }
}

fn symbols_of(found: &Symbolized<'_>) -> Vec<Symbol> {
    let Some(sym) = found.as_sym() else { return Vec::new() };
    let own = symbol(&sym.name, sym.code_info.as_deref());
    let inlined = sym.inlined.iter().take(INLINED_MAX).map(|f| symbol(&f.name, f.code_info.as_ref()));
    let mut symbols: Vec<Symbol> = std::iter::once(own).chain(inlined).collect();
    symbols.reverse();
    // DWARF may leave a function without a name.
    for symbol in symbols.iter_mut().filter(|s| s.function.is_empty()) {
        symbol.function = "[unnamed function]".to_owned();
    }
    symbols
}

fn symbol(name: &str, code: Option<&CodeInfo<'_>>) -> Symbol {
    let file = code.map(|code| capped(&code.to_path().to_string_lossy()).into_owned()).unwrap_or_default();
    Symbol { function: demangle(name).into_owned(), file, line: code.and_then(|code| code.line).unwrap_or(0) }
}
