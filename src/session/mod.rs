//! A recording from attach to profile: what all tiers share, and the tiers as policies over it.
//!
//! ```text
//! shared    the loaded programs, their unwind tables and the symbols of modules, once per process of fragprof
//! attach    starts a command and follows children, so that none of their code runs before it has been examined
//! recorder  the driver: probes targets, follows their lifecycle, applies records (sink), takes censuses (walks)
//! tier      exact (every call), in_process (the same, by a preloaded library), sampled (what an emitter reports), windows (a share of the time, under a budget)
//! report    ledgers, samples and censuses become a profile
//! ```
//!
//! The caller's thread does all attaching and detaching. Nothing in the target is changed except the probed instructions, which the kernel
//! restores when the links are dropped, even if this process is killed.

mod attach;
mod clock;
mod lifecycle;
mod lost_exit;
mod reaper;
mod recorder;
pub mod report;
pub mod shared;
mod sink;
mod target;
mod throwing;
pub mod tier;
pub mod trace;
mod walks;

pub use attach::launch::LaunchError;
pub use clock::monotonic_ns;
pub use recorder::Recorder;

use crate::capture;
use crate::probe::plan::PlanError;
use crate::process::ProcessError;
use crate::units::Pid;

/// Why a recording cannot be made or continued.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The programs could not be loaded or attached.
    #[error(transparent)]
    Capture(#[from] capture::Error),
    /// The process cannot be watched, or has nothing to probe.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The process cannot be examined.
    #[error(transparent)]
    Target(#[from] ProcessError),
    /// Only an emitter was accepted as the source, and the process has none.
    #[error(
        "process {pid} has no emitter of otel_memory or ddheap probes: start it with `fragprof run -- CMD`, or record every call (--mode \
         exact)"
    )]
    NoEmitter {
        /// The process.
        pid: Pid,
    },
    /// Only an emitter was accepted as the source, and this kernel cannot listen to one.
    #[error("this kernel cannot listen to emitters, because it has no attach cookies (Linux 5.17): record every call (--mode exact)")]
    EmittersUnsupported,
    /// Processes cannot be watched in windows here.
    #[error("processes cannot be watched in windows here: {reason}")]
    NoWindows {
        /// The reason.
        reason: String,
    },
    /// The command cannot run with the library that records it.
    #[error(transparent)]
    Unfit(#[from] crate::sampler::fit::Unfit),
    /// The library that records could not be written.
    #[error(transparent)]
    Library(#[from] crate::sampler::library::LibraryError),
    /// There is no memory to share with the processes.
    #[error(transparent)]
    Memory(#[from] crate::ring::MemoryError),
    /// The command did not load the library that records it.
    #[error(
        "{program} ran without the recorder's library: its dynamic linker did not load it, or cannot open /proc/PID/fd of another \
         process. Trace it from outside instead: fragprof record -- {program}"
    )]
    NotLoaded {
        /// The program.
        program: String,
    },
    /// The library that records could not be attached.
    #[error("the recorder is not attached: {0}")]
    Attach(#[from] crate::attach::AttachRefusal),
    /// The command could not be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

/// Which source to record from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choice {
    /// A process's own emitter where there is one, else the allocator's functions.
    #[default]
    Best,
    /// The allocator's functions.
    Functions,
    /// An emitter only.
    Emitter,
}

/// What to record, and how.
#[derive(Clone, Default)]
pub struct Options {
    /// Watch the children of the watched processes too.
    pub follow_children: bool,
    /// Take the stacks of frees.
    pub free_stacks: bool,
    /// Bytes of each ring buffer; `None` = [`capture::RING_BYTES`].
    pub ring_bytes: Option<u32>,
    /// Attach by this method instead of the best one.
    pub method: Option<crate::probe::features::Attach>,
    /// Which source to record from.
    pub source: Choice,
    /// Kernel memory for unwind tables, bytes; `None` = [`capture::TABLES_BYTES`].
    pub tables_bytes: Option<u64>,
    /// Maximum number of chunks of a heap at its start that are kept; `None` = 32 Mi, 4 bytes each.
    pub start_chunks_max: Option<usize>,
    /// Probe functions that report failure by a C++ exception even if a probe would prevent the exception from being caught.
    pub probe_throwing: bool,
    /// Record the objects of CPython too, which its own allocator serves.
    pub python_objects: bool,
    /// Take no stacks at all, to measure their cost.
    pub no_stacks: bool,
    /// Take a census also at the start, near each new peak and after losses, not only at the end.
    pub censuses: bool,
    /// At the end, determine what holds the memory that no recorded stack owns: this reads the whole heap.
    pub owners: bool,
    /// Keep the native frames in whose place Python frames stand.
    pub native_frames: bool,
    /// Maximum number of frames of a stack; `None` = [`crate::bpf::FRAMES_MAX`].
    pub frames_max: Option<u32>,
    /// Write every event of the first process into this trace.
    pub trace: Option<trace::SharedTrace>,
}
