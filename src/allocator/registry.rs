//! One row an allocator.

use super::Allocator;
use super::footprint::Footprint;

/// What is known of an allocator.
#[derive(Debug)]
pub struct Row {
    /// Which one.
    pub allocator: Allocator,
    /// Its name, as people write it.
    pub name: &'static str,
    /// Starts of the names of its libraries' files.
    pub libraries: &'static [&'static str],
    /// What its census reader looks for in a process's data; `None` where no reader understands its heap.
    pub sought: Option<&'static str>,
    /// Whether its reader has a level between the allocator's sums and every chunk: a sample of the heap's windows.
    pub is_sampled: bool,
    /// Whether it is in processes whose malloc another allocator serves, and has no heap there.
    pub gives_way: bool,
    /// What it adds to a block.
    pub footprint: Footprint,
    /// What its chunks tell of a block from outside.
    pub chunks: ChunkRule,
    /// The call or the setting by which it gives back whole free pages; `None` where it has none.
    pub trim: Option<Remedy>,
    /// The same in a few words, for a list of several.
    pub trim_in_short: &'static str,
    /// Whether it means to give back free pages by itself in time, whatever the arena they lie in: they are not kept for the number of
    /// arenas then.
    pub decays: bool,
    /// The setting for fewer arenas; `None` where it has none.
    pub fewer_arenas: Option<&'static str>,
    /// The settings for its caches of freed blocks; `None` where it has none.
    pub caches: Option<CacheSettings>,
}

/// What to do, and what the bytes are that it saves.
#[derive(Debug, Clone, Copy)]
pub struct Remedy {
    /// What to do.
    pub action: &'static str,
    /// What the bytes are.
    pub basis: &'static str,
}

/// Settings for caches of freed blocks.
#[derive(Debug, Clone, Copy)]
pub struct CacheSettings {
    /// For those of an arena, which all threads share.
    pub arena: Remedy,
    /// For those of a thread.
    pub thread: Remedy,
}

/// What chunks tell of a block, from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkRule {
    /// A header before each block has its size: survivors of windows can be looked at again, large blocks watched by themselves, and what a
    /// trim gives back follows `malloc_trim`'s rule (glibc, malloc/malloc.c, `mtrim`).
    Header,
    /// What a block lies in says its size; whole free pages are what a purge gives back.
    Extents,
}

/// Where nobody knows what gives memory back.
const AS_DOCUMENTED: &str = "let the allocator purge its free pages, as its documentation says";

pub static GLIBC: Row = Row {
    allocator: Allocator::Glibc,
    name: "glibc",
    libraries: &["libc.so.6", "libc-2."],
    sought: Some("arena in use"),
    is_sampled: true,
    gives_way: true,
    footprint: Footprint::Glibc,
    chunks: ChunkRule::Header,
    trim: Some(Remedy {
        action: "call malloc_trim(0) now and then, or once after load peaks",
        basis: "resident whole pages inside free chunks, and the end of the brk heap",
    }),
    trim_in_short: "call malloc_trim(0) now and then, or once after load peaks",
    decays: false,
    fewer_arenas: Some("try MALLOC_ARENA_MAX=2 (or GLIBC_TUNABLES=glibc.malloc.arena_max=2) at a restart, and measure"),
    caches: Some(CacheSettings {
        arena: Remedy {
            action: "set GLIBC_TUNABLES=glibc.malloc.mxfast=0 and restart",
            basis: "freed chunks in fastbins: what merges then goes back by itself only from a heap's end",
        },
        thread: Remedy { action: "set GLIBC_TUNABLES=glibc.malloc.tcache_count=2 and restart", basis: "freed chunks in thread caches" },
    }),
};

pub static JEMALLOC: Row = Row {
    allocator: Allocator::Jemalloc,
    name: "jemalloc",
    libraries: &["libjemalloc"],
    sought: Some("page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Jemalloc,
    chunks: ChunkRule::Extents,
    trim: Some(Remedy {
        action: "set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000,muzzy_decay_ms:0, or call mallctl(\"arena.4096.purge\")",
        basis: "resident dirty and muzzy extents",
    }),
    trim_in_short: "call mallctl(\"arena.4096.purge\"), or set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000",
    decays: true,
    fewer_arenas: Some("try MALLOC_CONF=narenas:4 at a restart, and measure"),
    caches: None,
};

pub static MUSL: Row = Row {
    allocator: Allocator::Musl,
    name: "musl",
    libraries: &["ld-musl-"],
    sought: Some("mallocng metadata"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    trim: None,
    trim_in_short: AS_DOCUMENTED,
    decays: false,
    fewer_arenas: None,
    caches: None,
};

pub static TCMALLOC: Row = Row {
    allocator: Allocator::Tcmalloc,
    name: "tcmalloc",
    libraries: &["libtcmalloc"],
    sought: Some("page map"),
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    trim: Some(Remedy {
        action: "call MallocExtension_ReleaseFreeMemory(), or set TCMALLOC_RELEASE_RATE=10",
        basis: "resident spans in the page heap's free lists",
    }),
    trim_in_short: "call MallocExtension_ReleaseFreeMemory()",
    decays: false,
    fewer_arenas: None,
    caches: None,
};

pub static MIMALLOC: Row = Row {
    allocator: Allocator::Mimalloc,
    name: "mimalloc",
    libraries: &["libmimalloc"],
    sought: None,
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    trim: None,
    trim_in_short: AS_DOCUMENTED,
    decays: false,
    fewer_arenas: None,
    caches: None,
};

pub static OTHER: Row = Row {
    allocator: Allocator::Other,
    name: "other",
    libraries: &[],
    sought: None,
    is_sampled: false,
    gives_way: false,
    footprint: Footprint::Requested,
    chunks: ChunkRule::Extents,
    trim: None,
    trim_in_short: AS_DOCUMENTED,
    decays: false,
    fewer_arenas: None,
    caches: None,
};

/// All rows, in the order in which they are told.
pub static ALL: [&Row; 6] = [&GLIBC, &JEMALLOC, &MUSL, &TCMALLOC, &MIMALLOC, &OTHER];
