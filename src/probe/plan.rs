//! The probes of a process: every entry point of all of its allocators, with the chosen site, ready to attach.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use super::branches::BranchTargets;
use super::cookie::Cookie;
use super::copies;
use super::forward::Forwarding;
use super::placement::{Emulation, Placement, WALK_BYTES_MAX, place};
use super::placement_arm64;
use crate::allocator::Allocator;
use crate::allocator::detect::{AllocatorModule, Detection, Detector};
use crate::allocator::functions::FunctionId;
use crate::allocator::in_file::EntryPoint;
use crate::machine::Machine;
use crate::process::elf::{Elf, ReadAt};
use crate::process::file::FileIdentity;
use crate::process::handle::{Process, ProcessError};
use crate::process::maps::Mapping;
use crate::sanitize::terminal;
use crate::units::FileOffset;

/// Why a process cannot be probed.
#[derive(Debug, Error)]
pub enum PlanError {
    /// The process cannot be watched at all.
    #[error(transparent)]
    Target(#[from] ProcessError),
    /// A Go program without a C library.
    #[error(
        "pid {pid} ({}) is a Go program without a C allocator: its heap is managed by the Go runtime, use Go's own heap profile",
        terminal(comm)
    )]
    GoWithoutLibc {
        /// The process.
        pid: u32,
        /// Its name.
        comm: String,
    },
    /// No allocator was found.
    #[error(
        "no allocator found in pid {pid} ({}): none of its files has a symbol malloc (a stripped static program?){}",
        terminal(comm),
        and_notes(.notes)
    )]
    NoAllocator {
        /// The process.
        pid: u32,
        /// Its name.
        comm: String,
        /// What could not be examined.
        notes: Vec<String>,
    },
}

fn and_notes(notes: &[String]) -> String {
    notes.iter().map(|note| format!("; {note}")).collect()
}

/// One probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SitePlan {
    /// The entry point.
    pub function: FunctionId,
    /// All its symbols, that of `function` first.
    pub symbols: Vec<String>,
    /// Its allocator.
    pub allocator: Allocator,
    /// Virtual address of the function's entry in the file.
    pub entry_vaddr: u64,
    /// File offset of the instruction that carries the probe.
    pub offset: FileOffset,
    /// The location and the reason for it.
    pub placement: Placement,
    /// The cookie without the target's slot.
    pub cookie: Cookie,
}

/// An entry point without a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unprobed {
    /// The entry point.
    pub function: FunctionId,
    /// All its symbols, that of `function` first.
    pub symbols: Vec<String>,
    /// Virtual address of the function's entry in the file.
    pub entry_vaddr: u64,
    /// The reason, as a sentence.
    pub reason: String,
}

/// The probes of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePlan {
    /// The path to pass to the kernel.
    pub attach_path: PathBuf,
    /// The path below the process's root directory, for display.
    pub display_path: PathBuf,
    /// Identity of the file.
    pub identity: FileIdentity,
    /// Its first executable mapping in the process.
    pub mapping: Mapping,
    /// The allocator that owns the C names in it, or the only one.
    pub allocator: Allocator,
    /// Whether the program's `malloc` resolves here.
    pub serves_malloc: bool,
    /// The probes, by file offset of their functions.
    pub sites: Vec<SitePlan>,
    /// Entry points without a probe.
    pub unprobed: Vec<Unprobed>,
}

/// The probes of a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Files with probes, by ascending address in the process.
    pub files: Vec<FilePlan>,
    /// What could not be examined, and other notes for the user.
    pub notes: Vec<String>,
}

impl Plan {
    /// Number of probes.
    #[must_use]
    pub fn site_count(&self) -> usize {
        self.files.iter().map(|f| f.sites.len()).sum()
    }

    /// Whether objects of Python are recorded.
    #[must_use]
    pub fn has_objects(&self) -> bool {
        self.files.iter().flat_map(|file| &file.sites).any(|site| site.allocator == Allocator::Pymalloc)
    }
}

/// Plans the probes of processes, and caches results by file: processes share libraries, and a process that maps new code is planned again.
#[derive(Debug)]
pub struct Planner {
    emulation: Emulation,
    detector: Detector,
    placed: HashMap<(FileIdentity, Allocator), Arc<Placed>>,
    /// Whether the code of interpreters has copies of the functions that allocate objects.
    copies: HashMap<FileIdentity, bool>,
}

/// Maximum number of files whose placements are cached: as many as there are different C libraries and allocators on a node, including
/// those in images.
const PLACED_FILES_MAX: usize = 1024;

/// The probes of a file, wherever it is mapped.
#[derive(Debug, Default)]
struct Placed {
    sites: Vec<SitePlan>,
    unprobed: Vec<Unprobed>,
}

impl Planner {
    /// For a kernel with this emulation.
    #[must_use]
    pub fn new(emulation: Emulation) -> Self {
        Self { emulation, detector: Detector::default(), placed: HashMap::new(), copies: HashMap::new() }
    }

    /// One that also plans probes on the functions by which CPython allocates its objects.
    #[must_use]
    pub fn with_python_objects(self, with_python_objects: bool) -> Self {
        Self { detector: self.detector.with_python_objects(with_python_objects), ..self }
    }

    /// Finds the allocators of a process and chooses the site of every probe.
    ///
    /// # Errors
    /// If the process cannot be watched, or has no allocator that can be probed.
    pub fn plan(&mut self, process: &Process) -> Result<Plan, PlanError> {
        let Detection { modules, mut notes, main_is_go } = self.detector.detect(process)?;
        let mut files = Vec::new();
        for module in modules {
            if self.has_copies(&module) {
                notes.push(format!(
                    "{}: no object of Python is recorded, because the interpreter was built with profile-guided optimization, and its code \
                     has copies of the functions that allocate them; start it with `fragprof record --python-objects -- CMD`, or with \
                     PYTHONMALLOC=malloc in its environment: then objects are blocks of malloc, which are recorded",
                    module.file.display_path.display()
                ));
                continue;
            }
            if module.is_go {
                notes.push(format!(
                    "{}: the allocator in this Go binary is not probed, because a return probe would break Go's stacks",
                    module.file.display_path.display()
                ));
                continue;
            }
            files.push(self.plan_file(module));
        }
        let (pid, comm) = (process.pid().0, process.comm().to_owned());
        match (files.is_empty(), main_is_go) {
            (true, true) => Err(PlanError::GoWithoutLibc { pid, comm }),
            (true, false) => Err(PlanError::NoAllocator { pid, comm, notes }),
            (false, _) => Ok(Plan { files, notes }),
        }
    }

    /// Whether Python's objects were to be recorded, and calls for them would be missed.
    fn has_copies(&mut self, module: &AllocatorModule) -> bool {
        if module.found.allocator != Allocator::Pymalloc || !module.found.is_cpython {
            return false;
        }
        let telling = module.found.functions.iter().filter(|entry| entry.function.get().is_some_and(copies::tells));
        let objects: Vec<u64> = telling.map(|entry| entry.vaddr).collect();
        if self.copies.len() >= PLACED_FILES_MAX {
            self.copies.clear();
        }
        *self.copies.entry(module.file.identity.clone()).or_insert_with(|| copies::are_there(&module.file.elf, &objects))
    }

    fn plan_file(&mut self, module: AllocatorModule) -> FilePlan {
        let placed = self.place(&module);
        FilePlan {
            attach_path: module.file.attach_path,
            display_path: module.file.display_path,
            identity: module.file.identity,
            mapping: module.mapping,
            allocator: module.found.allocator,
            serves_malloc: module.serves_malloc,
            sites: placed.sites.clone(),
            unprobed: placed.unprobed.clone(),
        }
    }

    fn place(&mut self, module: &AllocatorModule) -> Arc<Placed> {
        let key = (module.file.identity.clone(), module.found.allocator);
        if let Some(placed) = self.placed.get(&key) {
            return Arc::clone(placed);
        }
        let mut placed = Placed::default();
        for outcome in place_all(&module.file.elf, &module.found.functions, &module.found.function_starts, self.emulation) {
            match outcome {
                Ok(site) => placed.sites.push(site),
                Err(without) => placed.unprobed.push(without),
            }
        }
        let placed = Arc::new(placed);
        if self.placed.len() >= PLACED_FILES_MAX {
            self.placed.clear();
        }
        self.placed.insert(key, Arc::clone(&placed));
        placed
    }
}

/// Plans the probes of one process, once.
///
/// # Errors
/// As [`Planner::plan`].
pub fn plan(process: &Process, emulation: Emulation) -> Result<Plan, PlanError> {
    Planner::new(emulation).plan(process)
}

/// Chooses the sites of the probes for all entry points of a file.
pub fn place_all<R: ReadAt>(
    elf: &Elf<R>,
    entry_points: &[EntryPoint],
    function_starts: &[u64],
    emulation: Emulation,
) -> Vec<Result<SitePlan, Unprobed>> {
    if entry_points.is_empty() {
        return Vec::new();
    }
    let mut entries: Vec<u64> = entry_points.iter().map(|e| e.vaddr).collect();
    entries.sort_unstable();
    let targets = BranchTargets::search(elf, Machine::HOST, &entries, function_starts);
    let forwarding = Forwarding::new(elf, entry_points);
    entry_points
        .iter()
        .map(|entry_point| {
            let without = |reason: String| {
                Err(Unprobed {
                    function: entry_point.function,
                    symbols: entry_point.symbols.clone(),
                    entry_vaddr: entry_point.vaddr,
                    reason,
                })
            };
            let Some(shape) = entry_point.function.get().map(|f| f.shape) else {
                return without("the function is not in the table of functions".into());
            };
            let code = elf.bytes_at(entry_point.vaddr, code_bytes(entry_point, function_starts));
            let placement = match Machine::HOST {
                Machine::X86_64 => place(&code, entry_point.vaddr, shape, emulation, |vaddr| targets.contains(vaddr)),
                Machine::Aarch64 => placement_arm64::place(&code, entry_point.vaddr, shape, |vaddr| targets.contains(vaddr)),
            };
            if let Some(reason) = forwarding.covers(entry_point, shape, &placement) {
                return without(reason);
            }
            let Some(offset) = elf.offset_of(entry_point.vaddr.wrapping_add(u64::from(placement.offset))) else {
                return without("the function's code is not in the file".into());
            };
            let cookie = Cookie {
                op: shape.op,
                function: entry_point.function,
                size: placement.size,
                count: placement.count,
                pointer: placement.pointer,
                sp_words: placement.sp_words,
                stepped: !placement.reason.is_emulated(),
            };
            Ok(SitePlan {
                function: entry_point.function,
                symbols: entry_point.symbols.clone(),
                allocator: entry_point.allocator,
                entry_vaddr: entry_point.vaddr,
                offset,
                placement,
                cookie,
            })
        })
        .collect()
}

/// Bytes to read of a function: up to its end if known, otherwise up to the next function.
fn code_bytes(entry_point: &EntryPoint, function_starts: &[u64]) -> u64 {
    let end = if entry_point.size > 0 {
        entry_point.size
    } else {
        let next = function_starts.get(function_starts.partition_point(|&start| start <= entry_point.vaddr));
        next.map_or(WALK_BYTES_MAX, |next| next - entry_point.vaddr)
    };
    end.min(WALK_BYTES_MAX)
}
