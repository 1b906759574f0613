//! The table of allocators.

use super::Allocator;
use super::footprint::Footprint;

/// The properties of an allocator.
#[derive(Debug)]
pub struct Row {
    /// The allocator.
    pub allocator: Allocator,
    /// Its name.
    pub name: &'static str,
    /// The language runtime whose objects it holds, beside the heap of malloc; `None` if it serves malloc.
    pub runtime: Option<&'static str>,
    /// Prefixes of its libraries' file names.
    pub libraries: &'static [&'static str],
    /// What its census reader searches for in a process's data; `None` if there is no reader.
    pub sought: Option<&'static str>,
    /// Whether its reader has a level between sums and every chunk: a sample of the heap.
    pub is_sampled: bool,
    /// Whether it is also in processes whose malloc another allocator serves, without a heap there.
    pub gives_way: bool,
    /// What it adds to a block.
    pub footprint: Footprint,
    /// What its chunks show of a block from outside.
    pub chunks: ChunkRule,
    /// How a freed block is told from one in use without a walk of the heap; `None` if it is not.
    pub freed: Option<FreedRule>,
    /// The call or setting that releases whole free pages; `None` if there is none.
    pub trim: Option<Remedy>,
    /// The command by which a JVM makes that call; `None` if it has none.
    pub trim_in_jvm: Option<&'static str>,
    /// The same, shorter, for lists.
    pub trim_in_short: &'static str,
    /// What helps against free bytes that its blocks pin; `None` if a recording shows the stacks that allocated those blocks.
    pub unpin: Option<Remedy>,
    /// How a process with it releases its free pages when it is asked to.
    pub release: Release,
    /// Parts of the names of its functions, by which its code is recognised inside a file with other code.
    pub function_names: &'static [&'static str],
    /// Whether it returns free pages by itself after a time, whatever their arena: they are then not kept because of the number of arenas.
    pub decays: bool,
    /// The setting for fewer arenas; `None` if there is none.
    pub fewer_arenas: Option<ArenaLimit>,
    /// The settings for its caches of freed blocks; `None` if there are none.
    pub caches: Option<CacheSettings>,
    /// Whether freed blocks go to caches of threads or processors, which count as live where the census cannot tell them.
    pub has_caches: bool,
    /// How a process is run with it and its settings; `None` if it cannot be chosen for a program.
    pub choice: Option<Choice>,
}

/// How an allocator and its settings are chosen for a process, by variables of its environment.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    /// Names of the library to preload, the preferred first; empty for the C library's own.
    pub preload: &'static [&'static str],
    /// The Debian package with it.
    pub package: &'static str,
    /// How its settings are written.
    pub form: SettingForm,
    /// Files that have the names of its settings; empty for the library itself.
    pub named_in: &'static [&'static str],
    /// Whether all values are whole numbers: others are ignored without a word.
    pub is_numeric: bool,
    /// Settings worth a trial, as `key=value,key=value`; empty for its defaults.
    pub trials: &'static [&'static str],
    /// The setting for the number of arenas, and its default for each CPU.
    pub arenas: Option<(&'static str, u32)>,
}

/// How settings are written into the environment.
#[derive(Debug, Clone, Copy)]
pub enum SettingForm {
    /// All in one variable.
    List {
        /// Its name.
        variable: &'static str,
        /// Before each key.
        prefix: &'static str,
        /// Between key and value.
        assign: char,
        /// Between settings.
        separator: char,
    },
    /// A variable for each: the prefix, and the key in capital letters.
    Each {
        /// The prefix.
        prefix: &'static str,
    },
}

/// An action, and the bytes that it saves.
#[derive(Debug, Clone, Copy)]
pub struct Remedy {
    /// What to do.
    pub action: &'static str,
    /// The bytes it saves.
    pub basis: &'static str,
}

/// How free pages are released at once.
#[derive(Debug, Clone, Copy)]
pub enum Release {
    /// By the first of these calls whose function the process has.
    Calls(&'static [ReleaseCall]),
    /// Not by a call, and why.
    NoCall(&'static str),
}

/// A call that releases free pages.
#[derive(Debug, Clone, Copy)]
pub struct ReleaseCall {
    /// As it is written in C.
    pub text: &'static str,
    /// The function's symbol.
    pub symbol: &'static str,
    /// Whether the allocator's prefix precedes the symbol.
    pub is_prefixed: bool,
    /// Its arguments.
    pub arguments: &'static [ReleaseArgument],
    /// For how long a lock is held that other threads may wait for.
    pub hold: Hold,
    /// The system calls that it may make, by name and number.
    pub system_calls: &'static [(&'static str, libc::c_long)],
}

/// An argument of such a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseArgument {
    /// The bytes to be kept.
    Kept,
    /// A number.
    Number(u64),
    /// The address of a text.
    Text(&'static str),
}

/// For how long a releasing call holds a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// An arena's lock, until all of its pages are released (glibc, malloc.c, `__malloc_trim`).
    Arena,
    /// Only until the pages to be released are chosen, or for a range at a time.
    Range,
}

/// A setting for fewer arenas.
#[derive(Debug, Clone, Copy)]
pub struct ArenaLimit {
    /// What to do.
    pub action: &'static str,
    /// The setting, as in [`Choice::trials`].
    pub setting: &'static str,
}

/// Settings for caches of freed blocks.
#[derive(Debug, Clone, Copy)]
pub struct CacheSettings {
    /// For those of an arena, which all threads share; `None` if there are none.
    pub arena: Option<CacheSetting>,
    /// For those of a thread.
    pub thread: CacheSetting,
}

/// A setting for one kind of cache.
#[derive(Debug, Clone, Copy)]
pub struct CacheSetting {
    /// What to do.
    pub remedy: Remedy,
    /// The same as in [`Choice::trials`].
    pub setting: &'static str,
}

/// What chunks show of a block from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkRule {
    /// A header before each block has its size: survivors of windows can be checked again, large blocks tracked separately, and what a trim
    /// releases follows `malloc_trim`'s rule (glibc, malloc/malloc.c, `mtrim`).
    Header,
    /// The containing run or span gives the size; a purge releases whole free pages.
    Extents,
}

/// What freeing a block changes, by which it can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreedRule {
    /// The header of the next chunk, or the links in the block's first words (glibc, malloc/malloc.c, `_int_free`).
    Chunk,
    /// The bits of the group of slots (musl, src/malloc/mallocng/free.c: `freed_mask`, `avail_mask`).
    Slot,
    /// Nothing in the block or next to it, but the record of its extent, and the caches of the threads (jemalloc 5.3, src/tcache.c).
    Record,
    /// The first word: the allocator links free blocks by it.
    FirstWord {
        /// Larger blocks are pages of their own, and not linked.
        bytes_max: u64,
    },
}

impl FreedRule {
    /// The rule for the blocks of a process with these allocators; `None` if those that serve `malloc` do not have one in common.
    ///
    /// Other files may forward to one of them, as libstdc++ does. A heap of their own beside it is rejected block by block where blocks have
    /// headers, and else not.
    #[must_use]
    pub fn of(allocators: impl Iterator<Item = Allocator>) -> Option<Self> {
        let (mut serving, mut giving_way) = (Vec::new(), Vec::new());
        for row in allocators.filter(|allocator| *allocator != Allocator::Other).map(Allocator::row) {
            if row.gives_way { &mut giving_way } else { &mut serving }.push(row.freed);
        }
        let rules = if serving.is_empty() { giving_way } else { serving };
        let first = rules.first().copied().flatten();
        first.filter(|_| rules.iter().all(|rule| *rule == first))
    }
}

/// For allocators without a known call or setting that releases memory.
const AS_DOCUMENTED: &str = "let the allocator purge its free pages, as its documentation says";

/// System calls of every call that releases pages.
const MADVISE: (&str, libc::c_long) = ("madvise", libc::SYS_madvise);
const FUTEX: (&str, libc::c_long) = ("futex", libc::SYS_futex);

pub static GLIBC: Row = Row {
    allocator: Allocator::Glibc,
    name: "glibc",
    runtime: None,
    libraries: &["libc.so.6", "libc-2."],
    sought: Some("arena in use"),
    is_sampled: true,
    gives_way: true,
    footprint: Footprint::Glibc,
    chunks: ChunkRule::Header,
    freed: Some(FreedRule::Chunk),
    trim_in_jvm: Some("jcmd PID System.trim_native_heap, where the JVM has it"),
    trim: Some(Remedy {
        action: "call malloc_trim(0) now and then, or once after load peaks",
        basis: "resident whole pages inside free chunks, and the end of the brk heap",
    }),
    trim_in_short: "call malloc_trim(0) now and then, or once after load peaks",
    unpin: None,
    release: Release::Calls(&[ReleaseCall {
        text: "malloc_trim(0)",
        symbol: "malloc_trim",
        is_prefixed: false,
        arguments: &[ReleaseArgument::Kept],
        hold: Hold::Arena,
        system_calls: &[MADVISE, FUTEX, ("brk", libc::SYS_brk)],
    }]),
    function_names: &[
        "malloc",
        "mallinfo",
        "mallopt",
        "memalign",
        "_int_free",
        "_int_realloc",
        "systrim",
        "mtrim",
        "heap_trim",
        "new_heap",
        "munmap_chunk",
        "mremap_chunk",
        "unlink_chunk",
        "tcache",
        "arena_get",
        "arena_thread",
        "detach_arena",
    ],
    decays: false,
    fewer_arenas: Some(ArenaLimit {
        action: "try MALLOC_ARENA_MAX=2 (or GLIBC_TUNABLES=glibc.malloc.arena_max=2) at a restart, and measure",
        setting: "arena_max=2",
    }),
    has_caches: true,
    caches: Some(CacheSettings {
        arena: Some(CacheSetting {
            remedy: Remedy {
                action: "set GLIBC_TUNABLES=glibc.malloc.mxfast=0 and restart",
                basis: "freed chunks in fastbins; after merging they are returned by themselves only at the end of a heap",
            },
            setting: "mxfast=0",
        }),
        thread: CacheSetting {
            remedy: Remedy { action: "set GLIBC_TUNABLES=glibc.malloc.tcache_count=2 and restart", basis: "freed chunks in thread caches" },
            setting: "tcache_count=2",
        },
    }),
    choice: Some(Choice {
        preload: &[],
        package: "libc6",
        form: SettingForm::List { variable: "GLIBC_TUNABLES", prefix: "glibc.malloc.", assign: '=', separator: ':' },
        // elf/dl-tunables.list is in the loader.
        named_in: &["ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"],
        is_numeric: true,
        // Either threshold ends the dynamic one (malloc.c, do_set_mmap_threshold).
        trials: &["", "arena_max=1", "arena_max=2", "tcache_count=0", "mmap_threshold=131072", "hugetlb=1"],
        // NARENAS_FROM_NCORES (malloc/arena.c).
        arenas: Some(("arena_max", 8)),
    }),
};

pub static JEMALLOC: Row = Row {
    allocator: Allocator::Jemalloc,
    name: "jemalloc",
    runtime: None,
    libraries: &["libjemalloc"],
    sought: Some("page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Jemalloc { quantum_bytes: 16 },
    chunks: ChunkRule::Extents,
    freed: Some(FreedRule::Record),
    trim_in_jvm: None,
    trim: Some(Remedy {
        action: "set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0, or call mallctl(\"arena.4096.purge\")",
        basis: "resident dirty and muzzy extents",
    }),
    trim_in_short: "call mallctl(\"arena.4096.purge\"), or set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000",
    unpin: None,
    release: Release::Calls(&[ReleaseCall {
        text: "mallctl(\"arena.4096.purge\")",
        symbol: "mallctl",
        is_prefixed: true,
        // MALLCTL_ARENAS_ALL.
        arguments: &[
            ReleaseArgument::Text("arena.4096.purge"),
            ReleaseArgument::Number(0),
            ReleaseArgument::Number(0),
            ReleaseArgument::Number(0),
            ReleaseArgument::Number(0),
        ],
        // Extents are taken out under the lock and purged without it (arena.c, arena_decay_impl).
        hold: Hold::Range,
        system_calls: &[MADVISE, FUTEX, ("mmap", libc::SYS_mmap), ("munmap", libc::SYS_munmap)],
    }]),
    function_names: &["je_", "jemalloc", "malloc", "mallctl", "mallocx", "rallocx", "xallocx", "allocx", "calloc", "realloc", "memalign"],
    decays: true,
    fewer_arenas: Some(ArenaLimit { action: "try MALLOC_CONF=narenas:4 at a restart, and measure", setting: "narenas=4" }),
    has_caches: true,
    caches: Some(CacheSettings {
        arena: None,
        thread: CacheSetting {
            remedy: Remedy {
                action: "set MALLOC_CONF=tcache:false and restart, or call mallctl(\"thread.tcache.flush\") in threads that become idle",
                basis: "freed blocks in thread caches",
            },
            setting: "tcache=false",
        },
    }),
    choice: Some(Choice {
        preload: &["libjemalloc.so.2"],
        package: "libjemalloc2",
        form: SettingForm::List { variable: "MALLOC_CONF", prefix: "", assign: ':', separator: ',' },
        named_in: &[],
        is_numeric: false,
        trials: &["", "dirty_decay_ms=0,muzzy_decay_ms=0", "narenas=1"],
        // src/jemalloc.c, malloc_init_narenas.
        arenas: Some(("narenas", 4)),
    }),
};

pub static MUSL: Row = Row {
    allocator: Allocator::Musl,
    name: "musl",
    runtime: None,
    libraries: &["ld-musl-"],
    sought: Some("mallocng metadata"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    freed: Some(FreedRule::Slot),
    trim_in_jvm: None,
    trim: None,
    trim_in_short: AS_DOCUMENTED,
    unpin: None,
    release: Release::NoCall("musl returns free groups by itself and has no call for it"),
    function_names: &[],
    decays: false,
    fewer_arenas: None,
    has_caches: false,
    caches: None,
    choice: None,
};

pub static TCMALLOC: Row = Row {
    allocator: Allocator::Tcmalloc,
    name: "tcmalloc",
    runtime: None,
    libraries: &["libtcmalloc"],
    sought: Some("page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    // src/linked_list.h, SLL_Push; larger blocks are spans (kMaxSize in src/common.h).
    freed: Some(FreedRule::FirstWord { bytes_max: 256 << 10 }),
    trim_in_jvm: None,
    trim: Some(Remedy {
        action: "call MallocExtension_ReleaseFreeMemory(), or set TCMALLOC_RELEASE_RATE=10",
        basis: "resident spans in the page heap's free lists",
    }),
    trim_in_short: "call MallocExtension_ReleaseFreeMemory()",
    unpin: None,
    release: Release::Calls(&[ReleaseCall {
        text: "MallocExtension_ReleaseFreeMemory()",
        symbol: "MallocExtension_ReleaseFreeMemory",
        is_prefixed: false,
        arguments: &[],
        // The lock of the page heap is held, which a thread takes when its cache and the central lists are empty.
        hold: Hold::Range,
        system_calls: &[MADVISE, FUTEX],
    }]),
    function_names: &["tc_", "tcmalloc", "TCMalloc", "MallocExtension", "malloc", "calloc", "realloc", "memalign"],
    decays: false,
    fewer_arenas: None,
    has_caches: true,
    caches: None,
    choice: Some(Choice {
        preload: &["libtcmalloc_minimal.so.4", "libtcmalloc.so.4"],
        package: "libtcmalloc-minimal4",
        form: SettingForm::Each { prefix: "TCMALLOC_" },
        named_in: &[],
        is_numeric: false,
        trials: &[""],
        arenas: None,
    }),
};

pub static GOOGLE_TCMALLOC: Row = Row {
    allocator: Allocator::GoogleTcmalloc,
    name: "google_tcmalloc",
    runtime: None,
    // It is linked into programs; distributions have no library of it.
    libraries: &[],
    sought: Some("page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    // The slabs of CPUs hold the addresses of freed blocks, and leave their words as they were (internal/percpu_tcmalloc.h, Push).
    freed: None,
    trim_in_jvm: None,
    trim: Some(Remedy {
        action: "have a thread run MallocExtension::ProcessBackgroundActions(), or call MallocExtension::ReleaseMemoryToSystem(SIZE_MAX) after \
                 load peaks",
        basis: "free huge pages, and free pages of huge pages that are in use in part",
    }),
    trim_in_short: "call MallocExtension::ReleaseMemoryToSystem(SIZE_MAX), or have a thread run MallocExtension::ProcessBackgroundActions()",
    unpin: None,
    release: Release::Calls(&[ReleaseCall {
        text: "MallocExtension::ReleaseMemoryToSystem(SIZE_MAX)",
        symbol: "MallocExtension_Internal_ReleaseMemoryToSystem",
        is_prefixed: false,
        arguments: &[ReleaseArgument::Number(u64::MAX)],
        // The lock of the page heap, for the choice of each range and its release (page_allocator.h).
        hold: Hold::Range,
        system_calls: &[MADVISE, FUTEX],
    }]),
    function_names: &["TCMalloc", "tcmalloc", "MallocExtension", "malloc", "calloc", "realloc", "memalign"],
    decays: false,
    fewer_arenas: None,
    has_caches: true,
    caches: None,
    choice: None,
};

pub static MIMALLOC: Row = Row {
    allocator: Allocator::Mimalloc,
    name: "mimalloc",
    runtime: None,
    libraries: &["libmimalloc"],
    sought: Some("segment or page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    // mi_block_set_next, of every block (src/free.c).
    freed: Some(FreedRule::FirstWord { bytes_max: u64::MAX }),
    trim_in_jvm: None,
    trim: Some(Remedy {
        action: "call mi_collect(true) in each thread after load peaks (2.1.4 and later), or have pages returned at once: \
                 MIMALLOC_PURGE_DELAY=0 (2.1 and later), MIMALLOC_DECOMMIT_DELAY=0 (2.0)",
        basis: "resident slices and pages without blocks in use, of all threads; one call serves the thread that makes it, and abandoned \
                segments",
    }),
    trim_in_short: "call mi_collect(true) in each thread, or set MIMALLOC_PURGE_DELAY=0 (2.1 and later)",
    unpin: None,
    release: Release::NoCall("mi_collect serves only the heap of the thread that calls it, so no call from outside reaches the others"),
    function_names: &["mi_", "_mi_", "malloc", "calloc", "realloc", "memalign"],
    decays: false,
    fewer_arenas: None,
    has_caches: false,
    caches: None,
    choice: Some(Choice {
        preload: &["libmimalloc.so.2.0", "libmimalloc.so.2", "libmimalloc.so.3"],
        package: "libmimalloc2.0",
        form: SettingForm::Each { prefix: "MIMALLOC_" },
        named_in: &[],
        is_numeric: false,
        trials: &[""],
        arenas: None,
    }),
};

pub static SNMALLOC: Row = Row {
    allocator: Allocator::Snmalloc,
    name: "snmalloc",
    libraries: &["libsnmalloc"],
    function_names: &["snmalloc", "sn_rust_"],
    // Its state is in instances of templates and in queues of messages between threads, whose layout no symbol tells.
    ..UNKNOWN
};

pub static PYMALLOC: Row = Row {
    allocator: Allocator::Pymalloc,
    name: "pymalloc",
    runtime: Some("python"),
    libraries: &[],
    sought: Some("table of arenas"),
    is_sampled: true,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    freed: None,
    trim_in_jvm: None,
    trim: None,
    trim_in_short: "free the last objects of each arena: tracemalloc shows where they were allocated",
    unpin: Some(Remedy {
        action: "find the objects that stay: python3 -X tracemalloc (or PYTHONTRACEMALLOC=1, Python 3.4 and later), and create them before the \
                 load's peak; call gc.freeze() before workers are forked (3.7 and later), or restart workers now and then (gunicorn \
                 --max-requests)",
        basis: "free bytes of Python's arenas on pages that also hold objects; an arena is returned once its last object is freed",
    }),
    release: Release::NoCall("CPython returns an arena by itself when its last block is freed, and has no call for it"),
    function_names: &["_PyObject_Malloc", "_PyObject_Calloc", "_PyObject_Realloc", "_PyObject_Free", "pymalloc"],
    decays: false,
    fewer_arenas: None,
    has_caches: false,
    caches: None,
    choice: None,
};

/// An allocator of which nothing is known.
const UNKNOWN: Row = Row {
    allocator: Allocator::Other,
    name: "other",
    runtime: None,
    libraries: &[],
    sought: None,
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    freed: None,
    trim_in_jvm: None,
    trim: None,
    trim_in_short: AS_DOCUMENTED,
    unpin: None,
    release: Release::NoCall("no call that releases its free pages is known"),
    function_names: &[],
    decays: false,
    fewer_arenas: None,
    has_caches: false,
    caches: None,
    choice: None,
};

pub static OTHER: Row = UNKNOWN;

/// All rows, in the order in which they are listed.
pub static ALL: [&Row; 9] = [&GLIBC, &JEMALLOC, &MUSL, &TCMALLOC, &GOOGLE_TCMALLOC, &MIMALLOC, &SNMALLOC, &PYMALLOC, &OTHER];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_blocks_are_told_by_the_one_rule_of_the_allocators_that_serve() {
        use Allocator::{Glibc, Jemalloc, Mimalloc, Musl, Other, Tcmalloc};
        let of = |allocators: &[Allocator]| FreedRule::of(allocators.iter().copied());
        assert_eq!(of(&[Other, Glibc]), Some(FreedRule::Chunk));
        assert_eq!(of(&[Musl]), Some(FreedRule::Slot));
        // The C library is there too, and another one serves malloc.
        assert_eq!(of(&[Glibc, Tcmalloc, Other]), TCMALLOC.freed);
        assert_eq!(of(&[Glibc, Jemalloc]), Some(FreedRule::Record));
        assert_eq!([of(&[]), of(&[Other]), of(&[Mimalloc, Tcmalloc, Glibc])], [None; 3]);
    }
}
