//! Instructions in glibc that only blocks beyond the thread cache reach, per build: found by running the same library.
//!
//! After the thread-cache check in malloc, calloc and free there are instructions that a small block reaches only if the cache has no block
//! or no room. A probe there costs a cached pair nothing, and every larger block reaches it. Compilers may place them anywhere and use any
//! register, so they have to be searched for:
//!
//! ```text
//! known (shipped table) ─┐                                             script (requests with known results)
//! store (cache by file) ─┴→ known? ─no→ sandbox → scratch → tracer ──────────────┤
//!                             │                        observed: the instructions reached, with their registers
//!                             │                        choose: the smallest set that each large block reaches exactly once
//!                             └──────── checked ←───── judge: other requests, counted by breakpoints, match the known results exactly
//! ```
//!
//! The library that is run is the target's and is not trusted: `sandbox` describes how it is confined. The results are addresses, which are
//! checked against the file before they are used.
//!
//! Design note 0013 has the reasons and the figures.

pub mod builds;
mod checked;
mod digest;
mod known;
mod scope;
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
use crate::process::elf::{Elf, ElfError};

pub use self::store::parse_entry;

/// Requests of at least this size are always seen, smaller ones only when the thread cache has no block or is full (glibc 2.26 and later,
/// `tcache_max_bytes`).
pub const SEEN_FROM_BYTES: u64 = 1032 + 1;

/// Maximum size of a C library or a loader. Stripped libraries have about 2 MB, with debug information about 15 MB.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What the register of a site holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holds {
    /// The block's address.
    Block,
    /// The chunk's address, 16 bytes before the block.
    Chunk,
}

/// One size-selective site.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargeSite {
    /// Virtual address in the file.
    pub vaddr: u64,
    /// File offset.
    pub offset: u64,
    /// The register that holds the block or its chunk; if it is 0, the request failed or is not complete yet.
    pub register: Register,
    /// Which of the two it holds.
    pub holds: Holds,
}

/// The sites of one build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LargeSites {
    /// Each new block of [`SEEN_FROM_BYTES`] or more reaches exactly one of them.
    pub allocs: Vec<LargeSite>,
    /// Each such block reaches exactly one of them when it is freed. Rarely a chunk that is not a block reaches one (memory that the
    /// allocator itself frees while it serves a request): its address is not that of a live block.
    pub frees: Vec<LargeSite>,
}

/// Why a build has no suitable set of instructions. This holds permanently for the build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unfit {
    /// No set of the function's instructions is reached exactly once by each large block.
    #[error("no set of instructions in {0} is reached exactly once by each large block and never by a cached one")]
    NoCover(&'static str),
    /// The sites that were found miss or repeat some blocks of other sizes and orders.
    #[error("the sites that were found in {0} do not count other requests correctly")]
    Refuted(&'static str),
    /// The allocator did not take a required path.
    #[error("the scratch run could not make the allocator {0}")]
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
        /// The reason.
        source: io::Error,
    },
    /// A file is too large.
    #[error("{path} has more than {FILE_BYTES_MAX} bytes: too large for a distribution's C library")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is not an ELF file.
    #[error("{path}: {source}")]
    Elf {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ElfError,
    },
    /// It lacks something that a dynamic glibc has.
    #[error("{path} is not a dynamic glibc: it has no {what}")]
    NotGlibc {
        /// The file.
        path: PathBuf,
        /// The missing part.
        what: &'static str,
    },
    /// It was examined, now or before, and has no suitable sites.
    #[error("build {build_id} of glibc has no size-selective sites: {why}")]
    Unfit {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// The reason.
        why: Unfit,
    },
    /// It is unknown, and no loader was given to run it with.
    #[error("no sites are known for build {build_id} of glibc, and it cannot be examined because its dynamic loader was not found")]
    NoLoader {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
    },
    /// The run could not be isolated, so nothing was run.
    #[error(
        "no sites are known for build {build_id} of glibc, and it was not examined: cannot {step} ({source}), and a foreign C library only \
         runs in a sandbox"
    )]
    Sandbox {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// The step that failed.
        step: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// The run did not complete normally.
    #[error("build {build_id} of glibc could not be examined: the scratch process {what}")]
    Run {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
        /// What the process did.
        what: String,
    },
    /// Too many builds were examined.
    #[error("build {build_id} of glibc was not examined: {0} other builds were, which is the limit until a restart", RUNS_MAX)]
    TooManyRuns {
        /// The build id, in hex; `none` if it has none.
        build_id: String,
    },
}

/// Maximum number of scratch runs per process lifetime. A node has a handful of glibc builds; someone who creates thousands must not keep
/// it busy.
const RUNS_MAX: u32 = 64;

/// A C library, read into memory.
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

/// Reads a whole file, if it is a regular file and not too large.
fn read_file(path: &Path) -> Result<Vec<u8>, NoSites> {
    let failed = |source| NoSites::Open { path: path.to_owned(), source };
    // The path may by now name a pipe that has no writer.
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

/// The sites of a glibc build: from the shipped table, from the store, or found now by running `libc` with its own `loader` in a sandbox.
/// That takes a second or two and the permission to create the sandbox (root with CAP_SETUID, CAP_SETGID, CAP_SYS_CHROOT and CAP_KILL).
///
/// The result of a run is kept in the directory `store`, for exactly this file. `libc` and `loader` may be paths below `/proc/PID`; neither
/// is trusted.
///
/// # Errors
/// If the file cannot be read, is not a dynamic glibc, has no such sites, or could not be examined.
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

/// The result of a new run of `libc`, as a line of the table; stored results are not used.
///
/// # Errors
/// As [`find`]; a build without sites has a line too.
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

    /// One run at a time: each uses a CPU for a second or two.
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
