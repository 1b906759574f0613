//! Determines which allocators a file contains and which functions they have, from its dynamic and static symbols. Pure.
//!
//! The dynamic loader is excluded: before glibc 2.32 ld.so exported its own minimal `malloc`, which is only used until the C library is
//! relocated; newer versions have it under local names (`__minimal_malloc`).

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use crate::allocator::Allocator;
use crate::allocator::functions::{FUNCTIONS, Family, FunctionId, find};
use crate::process::elf::{Elf, Function, ReadAt, SymbolTable};

/// Maximum number of entry points kept per file. The table has fewer than 256 names, plus jemalloc's prefixed ones.
const ENTRY_POINTS_MAX: usize = 1024;
/// Length of the longest relevant symbol: `_ZdlPvSt11align_val_tRKSt9nothrow_t` has 37 bytes, prefixes at most about 20.
const NAME_BYTES_MAX: usize = 64;
/// Maximum number of prefixes of names like `malloc` distinguished per file. Large programs have some hundred (`xml_free`, `git_free`, …),
/// of which at most one or two are jemalloc's.
const PREFIXES_MAX: usize = 4096;

/// A function that allocates or frees blocks. Names with the same address are one entry point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryPoint {
    /// The function: the first of its names in the table's order.
    pub function: FunctionId,
    /// Its allocator.
    pub allocator: Allocator,
    /// All its symbols, that of `function` first.
    pub symbols: Vec<String>,
    /// Its virtual address in the file.
    pub vaddr: u64,
    /// Its length in bytes; 0 = not known.
    pub size: u64,
}

/// What the symbols of one file show.
#[derive(Debug)]
pub struct FileAllocator {
    /// The allocator that owns the C names, or the only allocator.
    pub allocator: Allocator,
    /// jemalloc's prefix.
    pub prefix: String,
    /// Entry points by address; empty = no allocator in this file.
    pub functions: Vec<EntryPoint>,
    /// Start addresses of all functions, ascending, without duplicates; empty if there is no entry point, and it is not CPython.
    pub function_starts: Vec<u64>,
    /// Whether other files' calls of `malloc` can resolve to this one's.
    pub exports_malloc: bool,
    /// Whether it is CPython, with an allocator of objects whose functions no symbol needs to name ([`super::cpython`]).
    pub is_cpython: bool,
}

/// Symbols that identify the allocators, and whether they were seen.
#[derive(Debug, Default)]
struct Markers {
    gnu_libc: bool,
    libc_start: bool,
    loader: bool,
    musl: bool,
    tcmalloc: bool,
    cpython: bool,
    /// The address of Google's tcmalloc's own name of `malloc`.
    google_tcmalloc: Option<u64>,
    mimalloc: Option<u64>,
    malloc: Option<u64>,
    exported_malloc: bool,
    exported_free: bool,
    prefixes: Vec<Prefix>,
}

/// A prefix of C or jemalloc names, with the number of symbols that have it.
#[derive(Debug)]
struct Prefix {
    prefix: String,
    own_names: u32,
    c_names: u32,
    /// Whether one of these symbols frees.
    frees: bool,
}

/// A symbol that may be an entry point, before its owner is known.
struct Candidate {
    name: String,
    vaddr: u64,
    size: u64,
}

static BY_SYMBOL: LazyLock<HashMap<&'static [u8], FunctionId>> = LazyLock::new(|| by_symbol().collect());

fn by_symbol() -> impl Iterator<Item = (&'static [u8], FunctionId)> {
    // An interpreter's own are found without a symbol, or not at all.
    let named = FUNCTIONS.iter().filter(|f| f.family != Family::Cpython || f.symbol.starts_with("fragprof_"));
    named.filter_map(|f| Some((f.symbol.as_bytes(), find(f.family, f.symbol.as_bytes())?)))
}

/// Finds the allocators in a file by its symbols.
#[must_use]
pub fn identify<R: ReadAt>(elf: &Elf<R>) -> FileAllocator {
    let mut markers = Markers::default();
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut starts = Vec::new();
    elf.for_each_function(|function| {
        starts.push(function.vaddr);
        // Most names of a C++ or Rust program are longer than any relevant name.
        if function.name.len() > NAME_BYTES_MAX {
            return;
        }
        note_markers(&mut markers, &function);
        let known = BY_SYMBOL.contains_key(function.name) || split_prefix(function.name).is_some();
        if known && let Ok(name) = std::str::from_utf8(function.name) {
            candidates.push(Candidate { name: name.to_owned(), vaddr: function.vaddr, size: function.size });
        }
    });
    starts.sort_unstable();
    starts.dedup();
    let owner = owner_of_c_names(&markers, elf.has_interpreter());
    let mut by_address: BTreeMap<u64, EntryPoint> = BTreeMap::new();
    for candidate in candidates {
        let Some((function, allocator)) = attribute(&candidate.name, &markers, owner) else { continue };
        if by_address.len() == ENTRY_POINTS_MAX && !by_address.contains_key(&candidate.vaddr) {
            continue;
        }
        let entry = by_address.entry(candidate.vaddr).or_insert_with(|| EntryPoint {
            function,
            allocator,
            symbols: Vec::new(),
            vaddr: candidate.vaddr,
            size: candidate.size,
        });
        entry.size = entry.size.max(candidate.size);
        if entry.symbols.contains(&candidate.name) {
            continue;
        }
        if function < entry.function || entry.symbols.is_empty() {
            entry.function = function;
            entry.allocator = allocator;
            entry.symbols.insert(0, candidate.name);
        } else {
            entry.symbols.push(candidate.name);
        }
    }
    let functions: Vec<_> = by_address.into_values().collect();
    let allocator = owner.or_else(|| functions.first().map(|f| f.allocator)).unwrap_or(Allocator::Other);
    let is_jemalloc_s = |p: &&Prefix| !p.prefix.is_empty() && markers.is_jemalloc_prefix(&p.prefix);
    let prefix = markers.prefixes.iter().find(is_jemalloc_s).map(|p| p.prefix.clone()).unwrap_or_default();
    if functions.is_empty() && !markers.cpython {
        starts = Vec::new();
    }
    let (exports_malloc, is_cpython) = (markers.exported_malloc, markers.cpython);
    FileAllocator { allocator, prefix, functions, function_starts: starts, exports_malloc, is_cpython }
}

fn note_markers(markers: &mut Markers, function: &Function<'_>) {
    match function.name {
        // The first is in the shared library, the others are in static programs.
        b"gnu_get_libc_version" | b"_int_malloc" | b"_int_free" | b"malloc_consolidate" | b"ptmalloc_init" => markers.gnu_libc = true,
        b"__libc_start_main" => markers.libc_start = true,
        b"_dl_allocate_tls" => markers.loader = true,
        b"__libc_malloc_impl" | b"__simple_malloc" | b"__malloc_donate" | b"__malloc_alloc_meta" | b"__expand_heap" => markers.musl = true,
        b"tc_malloc" => markers.tcmalloc = true,
        b"TCMallocInternalMalloc" => markers.google_tcmalloc = Some(function.vaddr),
        b"PyObject_Malloc" => markers.cpython = true,
        b"mi_malloc" => markers.mimalloc = Some(function.vaddr),
        b"malloc" => {
            markers.malloc = Some(function.vaddr);
            markers.exported_malloc |= function.exported && function.table == SymbolTable::Dynamic;
        }
        b"free" => markers.exported_free |= function.exported && function.table == SymbolTable::Dynamic,
        _ => {}
    }
    if let Some((prefix, base)) = split_prefix_any(function.name) {
        markers.note_prefix(prefix, base);
    }
}

impl Markers {
    fn note_prefix(&mut self, prefix: &str, base: &str) {
        let own = base == "mallctl" || find(Family::Jemalloc, base.as_bytes()).is_some();
        let at = self.prefixes.iter().position(|p| p.prefix == prefix).or_else(|| {
            (self.prefixes.len() < PREFIXES_MAX).then(|| {
                self.prefixes.push(Prefix { prefix: prefix.to_owned(), own_names: 0, c_names: 0, frees: false });
                self.prefixes.len() - 1
            })
        });
        if let Some(entry) = at.and_then(|at| self.prefixes.get_mut(at)) {
            entry.own_names += u32::from(own);
            entry.c_names += u32::from(!own);
            entry.frees |= matches!(base, "free" | "dallocx" | "sdallocx");
        }
    }

    /// A prefix is jemalloc's if it precedes one of jemalloc's own names and another name, and one of them frees: a single `do_rallocx` is
    /// an unrelated helper, and a program may wrap `mallocx` and `rallocx` with other arguments under such names.
    fn is_jemalloc_prefix(&self, prefix: &str) -> bool {
        self.prefixes.iter().any(|p| p.prefix == prefix && p.own_names > 0 && p.own_names + p.c_names > 1 && p.frees)
    }
}

/// Splits `_rjem_mallocx` into (`_rjem_`, `mallocx`): a prefix is empty or ends with an underscore and contains only letters, digits and
/// underscores; the base is one of jemalloc's own or the C names, or `mallctl`.
fn split_prefix_any(name: &[u8]) -> Option<(&str, &str)> {
    const BASES: [&str; 16] = [
        "mallocx",
        "rallocx",
        "xallocx",
        "sdallocx",
        "dallocx",
        "mallctl",
        "malloc",
        "calloc",
        "realloc",
        "free",
        "memalign",
        "aligned_alloc",
        "posix_memalign",
        "valloc",
        "pvalloc",
        "reallocarray",
    ];
    const ENDINGS: [&[u8]; 6] = [b"allocx", b"mallctl", b"alloc", b"free", b"memalign", b"reallocarray"];
    // Rejects nearly every symbol of a large program quickly.
    if !ENDINGS.iter().any(|ending| name.ends_with(ending)) {
        return None;
    }
    let name = std::str::from_utf8(name).ok()?;
    let split = |base: &'static str| {
        let prefix = name.strip_suffix(base)?;
        let fits = prefix.is_empty() || (prefix.ends_with('_') && prefix.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'));
        fits.then_some((prefix, base))
    };
    BASES.into_iter().find_map(split)
}

fn split_prefix(name: &[u8]) -> Option<(&str, &str)> {
    split_prefix_any(name).filter(|(prefix, _)| !prefix.is_empty())
}

/// The allocator that owns the names without a prefix. `None` if nothing in this file defines them for other files.
fn owner_of_c_names(markers: &Markers, is_dynamic_program: bool) -> Option<Allocator> {
    // The loader's own names only, unless it is musl's loader, which is also the C library.
    if markers.loader && !markers.libc_start {
        return None;
    }
    let c_library = if markers.gnu_libc {
        Some(Allocator::Glibc)
    } else if markers.musl || markers.libc_start {
        Some(Allocator::Musl)
    } else {
        None
    };
    markers.malloc?;
    if markers.mimalloc.is_some() && (markers.mimalloc == markers.malloc || c_library.is_none()) {
        Some(Allocator::Mimalloc)
    } else if markers.google_tcmalloc.is_some() && (markers.google_tcmalloc == markers.malloc || c_library.is_none()) {
        Some(Allocator::GoogleTcmalloc)
    } else if markers.tcmalloc {
        Some(Allocator::Tcmalloc)
    } else if markers.is_jemalloc_prefix("") {
        Some(Allocator::Jemalloc)
    } else if c_library.is_some() {
        c_library
    } else {
        // A local function that happens to be called `malloc` is not an allocator; two exported names are intentional.
        let exported = markers.exported_malloc && markers.exported_free;
        (exported || !is_dynamic_program && markers.exported_malloc).then_some(Allocator::Other)
    }
}

/// The entry point that a symbol names, and its allocator, given the owner of the C names. `None` if it is not an entry point of an
/// allocator in this file.
fn attribute(name: &str, markers: &Markers, owner: Option<Allocator>) -> Option<(FunctionId, Allocator)> {
    if let Some(&function) = BY_SYMBOL.get(name.as_bytes()) {
        let allocator = match function.get()?.family {
            Family::C => owner?,
            // If the C library owns the names, these are libstdc++'s, which call malloc: a static program would count each call twice.
            Family::Cxx => owner.filter(|o| !matches!(o, Allocator::Glibc | Allocator::Musl))?,
            // Google's tcmalloc has sdallocx too.
            Family::Jemalloc if markers.google_tcmalloc.is_some() => Allocator::GoogleTcmalloc,
            Family::Jemalloc => Allocator::Jemalloc,
            Family::Tcmalloc => Allocator::Tcmalloc,
            // libc++ has some of these names too, for functions that call operator new.
            Family::GoogleTcmalloc => markers.google_tcmalloc.map(|_| Allocator::GoogleTcmalloc)?,
            // Other C libraries' strdup calls malloc.
            Family::Mimalloc if !name.starts_with("mi_") => owner.filter(|&owner| owner == Allocator::Mimalloc)?,
            Family::Mimalloc => Allocator::Mimalloc,
            Family::Snmalloc => Allocator::Snmalloc,
            Family::Cpython => Allocator::Pymalloc,
        };
        return Some((function, allocator));
    }
    let (prefix, base) = split_prefix(name.as_bytes())?;
    if !markers.is_jemalloc_prefix(prefix) {
        return None;
    }
    let function = find(Family::Jemalloc, base.as_bytes()).or_else(|| find(Family::C, base.as_bytes()))?;
    Some((function, Allocator::Jemalloc))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;

    use super::*;

    fn in_file(path: &str) -> FileAllocator {
        identify(&Elf::parse(File::open(path).unwrap()).unwrap())
    }

    fn names(found: &FileAllocator) -> Vec<&str> {
        found.functions.iter().flat_map(|f| &f.symbols).map(String::as_str).collect()
    }

    #[test]
    fn each_library_is_recognised_with_its_own_functions() {
        let cases = [
            ("/lib/x86_64-linux-gnu/libc.so.6", Allocator::Glibc, &["malloc", "free", "reallocarray", "posix_memalign", "pvalloc"][..]),
            ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", Allocator::Jemalloc, &["malloc", "mallocx", "sdallocx", "_ZdlPvm"]),
            ("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", Allocator::Tcmalloc, &["malloc", "tc_new", "_ZnwmSt11align_val_t"]),
            ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", Allocator::Tcmalloc, &["malloc", "_Znwm", "cfree"]),
            ("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", Allocator::Mimalloc, &["malloc", "mi_heap_malloc", "_Znam", "mi_expand"]),
            ("/usr/lib/x86_64-linux-musl/libc.so", Allocator::Musl, &["malloc", "free", "aligned_alloc"]),
        ];
        for (path, allocator, functions) in cases {
            let found = in_file(path);
            assert_eq!(found.allocator, allocator, "{path}");
            for function in functions {
                assert!(names(&found).contains(function), "{path} {function}: {:?}", names(&found));
            }
        }
    }

    #[test]
    fn libraries_that_only_use_an_allocator_are_not_one() {
        for path in ["/lib64/ld-linux-x86-64.so.2", "/lib/x86_64-linux-gnu/libstdc++.so.6", "/bin/cat", "/usr/bin/gdb"] {
            assert_eq!(names(&in_file(path)), [""; 0], "{path}");
        }
    }

    #[test]
    fn names_at_one_address_are_one_entry_point() {
        let found = in_file("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2");
        let free = found.functions.iter().find(|f| f.symbols[0] == "free").unwrap();
        for alias in ["_ZdlPv", "_ZdaPv", "mi_free", "__libc_free"] {
            assert!(free.symbols.iter().any(|s| s == alias), "{alias}: {:?}", free.symbols);
        }
    }

    #[test]
    fn prefixes_of_jemalloc_are_split_off_and_others_are_not() {
        assert_eq!(split_prefix_any(b"_rjem_mallocx"), Some(("_rjem_", "mallocx")));
        assert_eq!(split_prefix_any(b"mallocx"), Some(("", "mallocx")));
        assert_eq!(split_prefix_any(b"je_smallocx"), None);
        assert_eq!(split_prefix_any(b"unrelated"), None);
        assert_eq!(split_prefix_any(b"Ze-_free"), None);
    }
}
