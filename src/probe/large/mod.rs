//! Places in glibc's code that only blocks beyond the thread cache pass, by build: found by running the very same library.
//!
//! Behind the test of the thread cache in malloc, calloc and free lie instructions that a small block passes only when the cache has none,
//! or no room. A probe there costs a cached pair nothing, and every larger block passes it. Compilers put them anywhere, in any register,
//! so they are looked for:
//!
//! ```text
//! known (shipped table) ─┐                                                   script (requests with known truth)
//! store (cache by file) ─┴→ found before? ─no→ sandbox → scratch → tracer ──────────────┤
//!                              │                            observed: which instructions, with which registers
//!                              │                            choose: the smallest set that each large block passes exactly once
//!                              └──────────── checked ←───── judge: other requests, counted by breakpoints, give exactly the truth
//! ```
//!
//! What is run is the target's library, which may be anybody's: `sandbox` says what keeps it harmless. What is taken from it are
//! addresses, which are checked against the file before they are used.
//!
//! Design 0013 has the reasons and the figures.

mod checked;
mod digest;
mod functions;
mod known;
mod store;

#[cfg(target_arch = "x86_64")]
mod choose;
#[cfg(target_arch = "x86_64")]
mod judge;
#[cfg(target_arch = "x86_64")]
mod observed;
#[cfg(target_arch = "x86_64")]
mod run;
#[cfg(target_arch = "x86_64")]
mod sandbox;
#[cfg(target_arch = "x86_64")]
mod scratch;
#[cfg(target_arch = "x86_64")]
mod script;
#[cfg(target_arch = "x86_64")]
mod seccomp;
#[cfg(target_arch = "x86_64")]
mod tracer;

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

use self::digest::Digest;
use crate::machine::Machine;
use crate::machine::register::Register;
use crate::target::elf::{Elf, ElfError};

pub use self::store::parse_entry;

/// Requests from this size on are seen always, smaller ones only when the thread cache has none or is full (glibc 2.26 and later,
/// `tcache_max_bytes`).
pub const SEEN_FROM_BYTES: u64 = 1032 + 1;

/// Bytes of a C library or a loader that is looked at. Stripped libraries have about 2 MB, with their debug information about 15.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What the register of a site holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holds {
    /// The block's address.
    Block,
    /// Its chunk's, 16 bytes before.
    Chunk,
}

/// One instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargeSite {
    /// Virtual address in the file.
    pub vaddr: u64,
    /// File offset.
    pub offset: u64,
    /// The register that holds the block or its chunk; 0 in it means that the request failed, or is not done yet.
    pub register: Register,
    /// Which of the two.
    pub holds: Holds,
}

/// The sites of one build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargeSites {
    /// Each new block of [`SEEN_FROM_BYTES`] or more passes exactly one of them.
    pub allocs: Vec<LargeSite>,
    /// Each such block passes exactly one of them when it is freed. Seldom a chunk passes that is no block (what the allocator itself
    /// gives back while it serves a request): its address is that of no live block.
    pub frees: Vec<LargeSite>,
}

/// Why no set of instructions of a build will do. It stays true of the build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unfit {
    /// No set of the function's instructions is passed exactly once by each large block.
    #[error("no instructions of {0} are passed exactly once by each large block and never by a cached one")]
    NoCover(&'static str),
    /// The sites that were found miss or repeat some blocks of other sizes and orders.
    #[error("the sites that were found in {0} do not count other requests right")]
    Refuted(&'static str),
    /// The allocator did not take a way that matters.
    #[error("the scratch run could not make it {0}")]
    NotTried(&'static str),
}

/// Why there are no sites for a build.
#[derive(Debug, Error)]
pub enum NoSites {
    /// The machine is not x86-64.
    #[error("size-selective sites are known on x86-64 only, not on {}", Machine::HOST.name())]
    OtherMachine,
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file is too large.
    #[error("{path} has more than {FILE_BYTES_MAX} bytes: no C library of a distribution has")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is no ELF file.
    #[error("{path}: {source}")]
    Elf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ElfError,
    },
    /// It lacks what a dynamic glibc has.
    #[error("{path} is no dynamic glibc: it has no {what}")]
    NotGlibc {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        what: &'static str,
    },
    /// It was tried, now or before, and has none.
    #[error("build {build_id} of glibc has no size-selective sites: {why}")]
    Unfit {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// Why.
        why: Unfit,
    },
    /// Nothing is known of it and no loader was given to run it with.
    #[error("no sites are known for build {build_id} of glibc, and its dynamic loader was not found to try it with")]
    NoLoader {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
    },
    /// The run could not be isolated, so nothing was run.
    #[error(
        "no sites are known for build {build_id} of glibc, and it was not tried: cannot {step} ({source}), and a foreign C library is never run without"
    )]
    Sandbox {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// What failed.
        step: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The run did not end as it should.
    #[error("build {build_id} of glibc could not be tried: the scratch process {what}")]
    Run {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// What it did.
        what: String,
    },
    /// Too many builds were tried.
    #[error("build {build_id} of glibc was not tried: {0} other builds were, which is enough for one life of this program", RUNS_MAX)]
    TooManyRuns {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
    },
}

/// Scratch runs in the life of the program. A node has a handful of builds of glibc; somebody who makes thousands of them must not keep
/// it busy.
const RUNS_MAX: u32 = 64;

/// A C library, read whole.
struct Library {
    path: PathBuf,
    bytes: Vec<u8>,
    elf: Elf<Vec<u8>>,
    /// The build id, in hex; `none` if it has none.
    build_id: String,
    digest: Digest,
}

impl Library {
    fn open(path: &Path) -> Result<Self, NoSites> {
        let bytes = read_file(path)?;
        let elf = Elf::parse(bytes.clone()).map_err(|source| NoSites::Elf { path: path.to_owned(), source })?;
        let build_id = elf.build_id().map_or_else(|| "none".to_owned(), |id| id.to_string());
        let digest = Digest::of(&bytes);
        Ok(Self { path: path.to_owned(), bytes, elf, build_id, digest })
    }
}

/// Reads a file whole, if it is a file and not too large.
fn read_file(path: &Path) -> Result<Vec<u8>, NoSites> {
    let failed = |source| NoSites::Open { path: path.to_owned(), source };
    // What a path names by now may be a pipe whose other end nobody holds.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("not a regular file")));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(NoSites::TooLarge { path: path.to_owned() });
    }
    Ok(bytes)
}

/// The sites of a build of glibc: known, found before, or found now by running `libc` with its own `loader` in a sandbox, which takes
/// a second or two and the right to make one (root with CAP_SETUID, CAP_SETGID, CAP_SYS_CHROOT and CAP_KILL).
///
/// What a run gave is kept in the folder `store`, for the very same file. `libc` and `loader` may be paths below `/proc/PID`; neither is
/// trusted.
///
/// # Errors
/// If the file cannot be read, is no dynamic glibc, has no such sites, or could not be tried.
pub fn find(libc: &Path, loader: Option<&Path>, store: Option<&Path>) -> Result<LargeSites, NoSites> {
    if Machine::HOST != Machine::X86_64 {
        return Err(NoSites::OtherMachine);
    }
    let library = Library::open(libc)?;
    let before = known::look_up(&library.digest).or_else(|| store::read(store?, &library.digest));
    if let Some(known) = before
        && let Some(sites) = checked::check(&library.elf, &known)
    {
        return sites.map_err(|why| NoSites::Unfit { build_id: library.build_id.clone(), why });
    }
    let loader = loader.ok_or_else(|| NoSites::NoLoader { build_id: library.build_id.clone() })?;
    let found = find_by_running(&library, loader, store);
    if let (Some(store), Some(entry)) = (store, store::entry_of(&library, &found)) {
        store::write(store, &entry);
    }
    found
}

/// What a run of `libc` gives, and the line of the table that says it; nothing that is known of it is used.
///
/// # Errors
/// As [`find`]; a build that has no sites has a line too.
pub fn try_anew(libc: &Path, loader: &Path) -> Result<String, NoSites> {
    let library = Library::open(libc)?;
    let found = find_by_running(&library, loader, None);
    match store::entry_of(&library, &found) {
        Some(entry) => Ok(entry.line()),
        None => Err(found.err().unwrap_or(NoSites::OtherMachine)),
    }
}

#[cfg(target_arch = "x86_64")]
fn find_by_running(library: &Library, loader: &Path, store: Option<&Path>) -> Result<LargeSites, NoSites> {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// One at a time: each is a busy second or two.
    static RUNNING: Mutex<()> = Mutex::new(());
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let _one = RUNNING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if RUNS.fetch_add(1, Ordering::Relaxed) >= RUNS_MAX {
        RUNS.store(RUNS_MAX, Ordering::Relaxed);
        return Err(NoSites::TooManyRuns { build_id: library.build_id.clone() });
    }
    run::find(library, loader, store)
}

#[cfg(not(target_arch = "x86_64"))]
fn find_by_running(_library: &Library, _loader: &Path, _store: Option<&Path>) -> Result<LargeSites, NoSites> {
    Err(NoSites::OtherMachine)
}
