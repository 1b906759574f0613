//! The sampler, or the recorder of every call, brought to a process that runs: its dynamic linker loads the library, and the library swaps the
//! words through which the process's objects call the allocator.
//!
//! ```text
//! check (process, allocator, library) ─→ inject: dlopen ─→ inject: fragprof_attach ─→ read its state from outside
//!        nothing is stopped               library loaded     words swapped, one by one
//! ```
//!
//! Each arrow is one call that the process makes itself ([`crate::inject`]). After the first the library is there and does nothing; after
//! the second, calls of the allocator go by way of it, and a consumer of its probes has samples with stacks. Detaching gives each word back
//! what it held; the library stays loaded. What the words are, and what is not seen, stands in `sampler/preload/attach.h`; design note 0026
//! has the reasoning.

mod recorder;
mod refusal;
mod state;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

pub use self::recorder::{begin_recording, prepare_recorder};
pub use self::refusal::AttachRefusal;
pub use self::state::State;
use self::state::{Mapped, PassRefused};
use crate::allocator::detect::{AllocatorModule, Detection, Detector};
use crate::allocator::{Allocator, is_own_library};
use crate::inject::audit::By;
use crate::inject::{self, Argument, Call, Ending, Forbidden, Image, Limits, Made, Refusal, function_vaddr, locks};
use crate::process::maps::{Mapping, Maps};
use crate::process::{MappedFile, Process};
use crate::sampler::fit::SANITIZER_LIBRARIES;
use crate::sampler::library::{self, Flavour};
use crate::sanitize::terminal;

/// `RTLD_NOW | RTLD_NODELETE`: the library is never unmapped, because a thread may be in it.
const DLOPEN_MODE: u64 = (libc::RTLD_NOW | libc::RTLD_NODELETE) as u64;
/// What glibc's own entry point needs in addition (`__RTLD_DLOPEN`, include/dlfcn.h).
const INTERNAL_MODE: u64 = 0x8000_0000;
/// Functions that load a library, the best first: in the C library since glibc 2.34, in libdl before, and the C library's own before that.
const LOADERS: [(&str, u64); 2] = [("dlopen", DLOPEN_MODE), ("__libc_dlopen_mode", DLOPEN_MODE | INTERNAL_MODE)];
/// System calls of dlopen and of the library's constructor, as far as glibc 2.31 to 2.43 make them.
const LOADING_CALLS: [(&str, libc::c_long); 10] = [
    ("openat", libc::SYS_openat),
    ("read", libc::SYS_read),
    ("pread64", libc::SYS_pread64),
    ("newfstatat", libc::SYS_newfstatat),
    ("mmap", libc::SYS_mmap),
    ("mprotect", libc::SYS_mprotect),
    ("munmap", libc::SYS_munmap),
    ("close", libc::SYS_close),
    ("futex", libc::SYS_futex),
    ("brk", libc::SYS_brk),
];
/// System calls of the library's own functions.
const OWN_CALLS: [(&str, libc::c_long); 3] = [("getpid", libc::SYS_getpid), ("mprotect", libc::SYS_mprotect), ("futex", libc::SYS_futex)];
/// The libraries that are brought to processes that run.
pub const ATTACHED: [Flavour; 2] = [Flavour::Attached, Flavour::AttachedRecorder];
/// How long a call is waited for: it takes a millisecond.
const PATIENCE: Duration = Duration::from_secs(10);

/// How densely is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Mean distance of samples, bytes.
    pub sample_bytes: u64,
    /// Samples per second, on a CPU or in a thread, above which the distance grows; 0 = no limit.
    pub samples_per_second: u64,
    /// A distance for each call site.
    pub by_site: bool,
}

/// A call that was made, as it is reported.
#[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
pub struct CallMade {
    /// The function.
    pub function: &'static str,
    /// The thread.
    pub thread: u32,
    /// The system call in which it waited.
    pub thread_in: &'static str,
    /// How long the thread stood.
    pub stopped_s: f64,
    /// How long the call took.
    pub took_s: f64,
    /// Whether the stop made the thread's system call return EINTR.
    pub interrupted: bool,
}

/// What was done, or would be.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct AttachReport {
    /// Process id.
    pub pid: u32,
    /// Its name.
    pub comm: String,
    /// The allocator that serves malloc.
    pub allocator: Option<&'static str>,
    /// Another one, which the program has linked in: its blocks are not seen by the library.
    pub unseen: Option<&'static str>,
    /// The library.
    pub library: Option<PathBuf>,
    /// Whether it was loaded before.
    pub was_loaded: bool,
    /// The calls that were made, in order.
    pub calls: Vec<CallMade>,
    /// What the library says afterwards.
    pub state: Option<State>,
    /// Name of the reason why nothing, or not all, was done.
    pub refused: Option<&'static str>,
    /// The reason in words.
    pub reason: Option<String>,
    /// Nothing was to be done.
    pub dry_run: bool,
}

impl AttachReport {
    /// Of a process about which nothing is known yet.
    #[must_use]
    pub fn of(process: &Process) -> Self {
        Self { pid: process.pid().0, comm: process.comm().to_owned(), ..Self::default() }
    }

    /// The line that accounts for what is done in the process, and by whom.
    #[must_use]
    pub fn audit_line(&self, by: By, command: &str, result: &str) -> String {
        format!("audit: {by}: {command} in process {} ({}): {result}", self.pid, terminal(&self.comm))
    }

    fn add(&mut self, function: &'static str, made: &Made) {
        self.calls.push(CallMade {
            function,
            thread: made.thread.tid,
            thread_in: made.thread.call.name(),
            stopped_s: made.stopped.as_secs_f64(),
            took_s: made.took.as_secs_f64(),
            interrupted: made.is_interrupted,
        });
    }
}

/// What is known of a process in which a call can be made.
#[derive(Debug)]
pub struct Plan {
    image: Image,
    flavour: Flavour,
    maps: Maps,
    trampoline: u64,
    forbidden: Vec<Forbidden>,
    mapped: Option<Mapped>,
    allocator: Allocator,
    unseen: Option<Allocator>,
}

impl Plan {
    /// The allocator that serves malloc.
    #[must_use]
    pub fn allocator(&self) -> Allocator {
        self.allocator
    }

    /// Another allocator, which the program has linked in: it calls that one by no word.
    #[must_use]
    pub fn unseen(&self) -> Option<Allocator> {
        self.unseen
    }

    /// What the library in the process has done, if it is there.
    #[must_use]
    pub fn state(&self, process: &Process) -> Option<State> {
        self.mapped.as_ref()?.state(process)
    }
}

/// Checks all that can be checked without stopping a thread. `flavour`: one of the two that are attached.
///
/// # Errors
/// What forbids it.
pub fn plan(process: &Process, flavour: Flavour) -> Result<Plan, AttachRefusal> {
    inject::check(process)?;
    let image = Image::of(process)?;
    let maps = process.maps().map_err(|_| Refusal::Ended)?;
    let detection = Detector::default().detect(process).map_err(|_| Refusal::Ended)?;
    let program = fs::metadata(process.directory().join("exe")).map_err(|_| Refusal::Ended)?.ino();
    let module = serving(process, &maps, &detection, flavour, program)?;
    let allocator = module.found.allocator;
    let mut forbidden = locks::of_allocator(&maps, module, allocator);
    forbidden.extend(locks::of_fork(process, &maps));
    forbidden.extend(locks::of_loader(process, &maps));
    let trampoline = inject::trampoline(process, &maps)?;
    let mapped = Mapped::find(process, &maps, flavour);
    let unseen = linked_in(&detection, program);
    Ok(Plan { image, flavour, maps, trampoline, forbidden, mapped, allocator, unseen })
}

/// What the library does not see of a process with another allocator linked in.
#[must_use]
pub fn unseen_text(allocator: &str) -> String {
    format!("{allocator} is linked into the program: its blocks are not seen from inside, but by fragprof record without --in-process")
}

/// What a library in a process has done, if it is there.
#[must_use]
pub fn state(process: &Process, flavour: Flavour) -> Option<State> {
    Mapped::find(process, &process.maps().ok()?, flavour)?.state(process)
}

/// The file that serves malloc, if its calls can be interposed. `program`: the inode of the program's own file.
fn serving<'a>(
    process: &Process,
    maps: &Maps,
    detection: &'a Detection,
    flavour: Flavour,
    program: u64,
) -> Result<&'a AllocatorModule, AttachRefusal> {
    for mapping in maps.executable_files() {
        let name = mapping.file_name();
        if SANITIZER_LIBRARIES.iter().any(|start| name.starts_with(start)) {
            return Err(AttachRefusal::Sanitizer { library: name });
        }
        let is_of = |one: &Flavour| name.starts_with(one.file_name());
        if !is_own_library(name.as_bytes()) || is_of(&flavour) {
            continue;
        }
        match ATTACHED.into_iter().find(is_of) {
            None => return Err(AttachRefusal::Preloaded { library: name }),
            Some(other) => {
                let state = Mapped::find(process, maps, other).and_then(|mapped| mapped.state(process));
                if state.is_none_or(|state| state.words != 0) {
                    return Err(AttachRefusal::InUse { library: name });
                }
            }
        }
    }
    let module = detection.modules.iter().find(|module| module.serves_malloc).ok_or(AttachRefusal::NoMalloc)?;
    if detection.modules.iter().any(|module| module.found.allocator == Allocator::Musl) {
        return Err(AttachRefusal::Musl);
    }
    if module.mapping.inode == program {
        return Err(AttachRefusal::OwnMalloc { allocator: module.found.allocator.name() });
    }
    if module.found.allocator == Allocator::Other {
        return Err(AttachRefusal::AllocatorInFront { library: module.file_name() });
    }
    Ok(module)
}

/// The allocator that the program has linked into it beside the one that serves malloc, as Rust programs have. CPython's is for builds
/// without the interpreter's lock.
fn linked_in(detection: &Detection, program: u64) -> Option<Allocator> {
    let is_it = |module: &&AllocatorModule| module.mapping.inode == program && !module.serves_malloc && !module.found.is_cpython;
    detection.modules.iter().find(is_it).map(|module| module.found.allocator)
}

/// The library as the process sees it: by default one that is written to a directory of this user.
///
/// # Errors
/// If it cannot be written, or the process has another file, or none, at that path.
pub fn place(process: &Process, flavour: Flavour, given: Option<&Path>) -> Result<PathBuf, AttachRefusal> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => library::place(flavour)?,
    };
    let inside = process.directory().join("root").join(path.strip_prefix("/").unwrap_or(&path));
    let is_it = path.is_absolute() && library::holds(&inside, flavour.bytes());
    if is_it { Ok(path) } else { Err(AttachRefusal::NotInItsRoot { path, library: flavour.file_name() }) }
}

/// Loads the library, if it is not there, and swaps the words. Once more in a process to which it is attached: covers what was loaded since.
///
/// # Errors
/// Why not. What was done until then is in the report.
pub fn attach(process: &Process, plan: Plan, path: &Path, settings: &Settings, report: &mut AttachReport) -> Result<(), AttachRefusal> {
    report.was_loaded = plan.mapped.is_some();
    let plan = match plan.mapped {
        Some(_) => plan,
        None => load(process, plan, path, report)?,
    };
    let arguments = [settings.sample_bytes, settings.samples_per_second, u64::from(settings.by_site)].map(Argument::Number);
    swapped(call_library(process, &plan, "fragprof_attach", &arguments, report)?)
}

/// What a pass led to.
fn swapped(state: State) -> Result<(), AttachRefusal> {
    match state {
        State { without_malloc: true, .. } => Err(AttachRefusal::NoMalloc),
        State { refused: Some(PassRefused::HasReader), .. } => Err(AttachRefusal::HasReader),
        State { refused: Some(PassRefused::NoMemory), .. } => Err(AttachRefusal::NoMemory),
        State { refused: Some(PassRefused::UnknownThreads), .. } => Err(AttachRefusal::UnknownThreads),
        State { words: 0, .. } => Err(AttachRefusal::NothingSwapped),
        _ => Ok(()),
    }
}

/// Gives the words back what they held.
///
/// # Errors
/// Why not.
pub fn detach(process: &Process, plan: &Plan, report: &mut AttachReport) -> Result<(), AttachRefusal> {
    report.was_loaded = true;
    match call_library(process, plan, "fragprof_detach", &[], report)?.words {
        0 => Ok(()),
        left => Err(AttachRefusal::NotAllPutBack { left }),
    }
}

fn load(process: &Process, plan: Plan, path: &Path, report: &mut AttachReport) -> Result<Plan, AttachRefusal> {
    let (function, mode) = loader(process, &plan.maps).ok_or_else(|| Refusal::FunctionMissing { function: "dlopen".into() })?;
    let text = path.as_os_str().as_encoded_bytes().to_vec();
    let arguments = [Argument::Text(text), Argument::Number(mode)];
    call(process, &plan, ("dlopen", function), &arguments, &LOADING_CALLS, report)?;
    let maps = process.maps().map_err(|_| Refusal::Ended)?;
    match Mapped::find(process, &maps, plan.flavour) {
        Some(mapped) => Ok(Plan { maps, mapped: Some(mapped), ..plan }),
        None => {
            plan.image.check(process)?;
            Err(AttachRefusal::NotLoaded { path: path.to_owned() })
        }
    }
}

/// The address of a function that loads a library, and its mode.
fn loader(process: &Process, maps: &Maps) -> Option<(u64, u64)> {
    let is_c_library = |mapping: &&Mapping| {
        let name = mapping.file_name();
        let own = Allocator::Glibc.row().libraries.iter().any(|library| name.starts_with(library));
        own || name.starts_with("libdl.so") || name.starts_with("libdl-2.")
    };
    let files: Vec<(&Mapping, MappedFile)> = maps
        .executable_files()
        .filter(is_c_library)
        .filter_map(|mapping| MappedFile::open(process, mapping).ok().map(|file| (mapping, file)))
        .collect();
    LOADERS.iter().find_map(|&(name, mode)| {
        let found = files.iter().find_map(|(mapping, file)| {
            let vaddr = function_vaddr(file, name.as_bytes())?;
            inject::address_of(maps, mapping, file, vaddr)
        });
        found.map(|address| (address, mode))
    })
}

/// Calls a function of the library, and reads its state afterwards.
fn call_library(
    process: &Process,
    plan: &Plan,
    name: &'static str,
    arguments: &[Argument],
    report: &mut AttachReport,
) -> Result<State, AttachRefusal> {
    let mapped = plan.mapped.as_ref().ok_or(AttachRefusal::NotAttached)?;
    let function = mapped.function(&plan.maps, name).ok_or(AttachRefusal::UnknownState)?;
    let system_calls = if plan.flavour == Flavour::AttachedRecorder { &recorder::CALLS[..] } else { &OWN_CALLS };
    call(process, plan, (name, function), arguments, system_calls, report)?;
    let unknown = || plan.image.check(process).map_or_else(AttachRefusal::from, |()| AttachRefusal::UnknownState);
    let state = mapped.state(process).ok_or_else(unknown)?;
    report.state = Some(state);
    // The library does nothing while another call of it runs.
    if state.runs != 0 { Err(AttachRefusal::CallUnderWay) } else { Ok(state) }
}

fn call(
    process: &Process,
    plan: &Plan,
    (name, function): (&'static str, u64),
    arguments: &[Argument],
    system_calls: &[(&'static str, libc::c_long)],
    report: &mut AttachReport,
) -> Result<(), AttachRefusal> {
    let call = Call { image: &plan.image, function, arguments, trampoline: plan.trampoline, forbidden: &plan.forbidden, system_calls };
    let made = inject::make(process, &call, &Limits { call: PATIENCE, ..Limits::default() })?;
    report.add(name, &made);
    match made.ending {
        Ending::Returned => Ok(()),
        Ending::Gone => Err(Refusal::Ended.into()),
        Ending::Replaced => Err(Refusal::Replaced.into()),
        Ending::StillRuns | Ending::NotBegun => {
            Err(AttachRefusal::NotEnded { function: name, thread: made.thread.tid, ending: made.ending.words() })
        }
    }
}
