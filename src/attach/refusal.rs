//! Why the sampler is not attached, or not detached.

use std::path::PathBuf;

use thiserror::Error;

use crate::inject::Refusal;
use crate::sampler::library::LibraryError;
use crate::sanitize::terminal;

/// Why nothing was done. The process is then as it was, except where the message says otherwise.
#[derive(Debug, Error)]
pub enum AttachRefusal {
    /// No call can be made in it.
    #[error(transparent)]
    Call(#[from] Refusal),
    /// The library cannot be written.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Nothing that can be interposed.
    #[error("it has no malloc that is called by name: it is static, or its runtime has an allocator of its own")]
    NoMalloc,
    /// musl: the whole C library is one file without symbols of its functions.
    #[error(
        "its C library is musl, in which a thread that waits cannot be told from one that holds the allocator's or the dynamic linker's \
         locks; start it with fragprof run"
    )]
    Musl,
    /// The allocator is in the program itself.
    #[error(
        "{allocator} is linked into the program itself, which calls it without the dynamic linker: nothing would be seen; fragprof record \
         sees it"
    )]
    OwnMalloc {
        /// The allocator.
        allocator: &'static str,
    },
    /// An unknown allocator.
    #[error("{library} serves malloc in front of the known allocators: what it keeps locked is not known")]
    AllocatorInFront {
        /// The file.
        library: String,
    },
    /// A sanitizer.
    #[error("it runs with a sanitizer ({library}), which expects to be the first allocator")]
    Sanitizer {
        /// The file.
        library: String,
    },
    /// It was started with one of the libraries.
    #[error("it was started with {library}, which reports its allocations already")]
    Preloaded {
        /// The file.
        library: String,
    },
    /// The other of the two libraries that are attached is in use.
    #[error("{library} is attached to it: take that away first (fragprof attach-sampler --detach), or let its recording end")]
    InUse {
        /// The file.
        library: String,
    },
    /// A recording of it by its own library goes on.
    #[error("another recording takes its events: end that first")]
    HasReader,
    /// The memory for a recording.
    #[error(
        "it cannot share memory with the recording: the system gave none, or a limit (RLIMIT_AS, RLIMIT_NOFILE) or its sandbox forbids it"
    )]
    NoMemory,
    /// The C library is of a kind that is not known.
    #[error("its C library keeps the numbers of threads in another place than glibc's for x86-64: its threads could not be told apart")]
    UnknownThreads,
    /// The library's path means something else to the process.
    #[error(
        "{} is not {library} of this version in the process's own root directory (a container, a chroot): install it there (fragprof run \
         --install FOLDER) and give that path with --library",
        terminal(&path.display().to_string())
    )]
    NotInItsRoot {
        /// The path.
        path: PathBuf,
        /// The file's usual name.
        library: &'static str,
    },
    /// dlopen returned, and the library is not there.
    #[error(
        "its dynamic linker did not load {} (not readable for its user, mounted noexec, or a security module); \
         nothing else was done to it",
        terminal(&path.display().to_string())
    )]
    NotLoaded {
        /// The path.
        path: PathBuf,
    },
    /// A call did not end in time.
    #[error("the call of {function} in thread {thread} has not ended ({ending}): it ends by itself; look again later")]
    NotEnded {
        /// The function.
        function: &'static str,
        /// The thread.
        thread: u32,
        /// How far it is.
        ending: &'static str,
    },
    /// Another call of the library's functions had not ended.
    #[error("an earlier call in it had not ended: run the command again")]
    CallUnderWay,
    /// Its owner has detached it, and the policy does not attach it again.
    #[error("its owner has detached the sampler from it")]
    DetachedByOwner,
    /// There is nothing to detach.
    #[error("the sampler is not attached to it")]
    NotAttached,
    /// The library is of a version that is not known, or damaged.
    #[error("the state of the library in it cannot be read: it is of another version, or the process ended")]
    UnknownState,
    /// No word was found.
    #[error(
        "none of its calls of the allocator goes through the dynamic linker's tables: nothing can be seen from inside; fragprof record sees \
         it. The library stays loaded and does nothing"
    )]
    NothingSwapped,
    /// Some words are still the library's.
    #[error("{left} words still lead to the library, which goes on working: detach again")]
    NotAllPutBack {
        /// Their number.
        left: u64,
    },
}

impl AttachRefusal {
    /// Whether another attempt may be made: the reason lies in what the process does at the moment.
    #[must_use]
    pub fn is_of_the_moment(&self) -> bool {
        use Refusal::{CallInProgress, Frozen, NoThread, Stopped, Traced, Vfork};
        match self {
            Self::Call(refusal) => {
                matches!(refusal, CallInProgress { .. } | Frozen | NoThread { .. } | Stopped | Traced { .. } | Vfork { .. })
            }
            Self::NotEnded { .. } | Self::CallUnderWay | Self::InUse { .. } | Self::HasReader => true,
            _ => false,
        }
    }

    /// Its name in JSON and events.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Call(refusal) => refusal.name(),
            Self::Library(_) => "library",
            Self::NoMalloc => "no_malloc",
            Self::Musl => "musl",
            Self::OwnMalloc { .. } => "own_malloc",
            Self::AllocatorInFront { .. } => "allocator_in_front",
            Self::Sanitizer { .. } => "sanitizer",
            Self::Preloaded { .. } => "preloaded",
            Self::InUse { .. } => "in_use",
            Self::HasReader => "has_reader",
            Self::NoMemory => "no_memory",
            Self::UnknownThreads => "unknown_threads",
            Self::NotInItsRoot { .. } => "not_in_its_root",
            Self::NotLoaded { .. } => "not_loaded",
            Self::NotEnded { .. } => "not_ended",
            Self::CallUnderWay => "call_under_way",
            Self::DetachedByOwner => "detached_by_owner",
            Self::NotAttached => "not_attached",
            Self::UnknownState => "unknown_state",
            Self::NothingSwapped => "nothing_swapped",
            Self::NotAllPutBack { .. } => "not_all_put_back",
        }
    }
}
