//! The BPF boundary: the only module that uses libbpf. Loads and attaches the programs, reads the rings, decodes records.
//!
//! ```text
//! Capture::load ──→ open_ring ──→ add_target ──→ attach ──→ (records flow into the Sink) ──→ drop Attached ──→ remove_target
//!                       │                                            ↑
//!                       └──→ one named thread per ring ──────────────┘
//! ```
//!
//! Loaded once, it serves several recordings at the same time: each has its own ring, row of counters, and targets, even in the same
//! process.
//!
//! Loading and attaching happen on the caller's thread, so that the caller can report a missing permission or a refusal of the verifier.
//! Threads are started afterwards.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::bpf::{self, Counter};
use crate::probe::cookie;
use crate::probe::features::Attach;
use crate::units::{FileOffset, Pid};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, UprobeMultiOpts, UprobeOpts};
use zerocopy::IntoBytes as _;

pub mod counters;
mod features;
pub mod floor;
mod load;
mod processes;
pub mod programs;
pub mod registers;
pub mod ring;
mod sites;
mod slots;
pub mod tables;
mod targets;
mod trial;
mod usdt;
pub mod wire;

pub use counters::Counters;
pub use features::{features, has_uprobe_multi, unwind_tables};
pub use load::Offer;
use processes::{Processes, Removed};
pub use ring::{BATCH_RECORDS, Read, Ring, Sink};
pub use slots::Slot;
pub use tables::Tables;

/// Why capture fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused to load the programs in every available form.
    #[error("cannot load the BPF programs: {reason}\n{hint}")]
    Load {
        /// The message of the kernel or libbpf for the last attempt.
        reason: String,
        /// What the user can do about it.
        hint: String,
    },
    /// A probe could not be attached.
    #[error("cannot attach {sites} probes to {path} in process {pid}: {source}")]
    Attach {
        /// The process.
        pid: Pid,
        /// The file that contains the allocator, as passed to the kernel.
        path: String,
        /// Number of probe sites in it.
        sites: usize,
        /// The kernel's error.
        source: libbpf_rs::Error,
    },
    /// All target slots are in use.
    #[error("{max} processes are already watched: no slot is free")]
    TooManyTargets {
        /// The limit.
        max: u32,
    },
    /// A process already has the maximum number of targets.
    #[error("process {pid} is already recorded {max} times, the maximum at a time")]
    TooManyRecordings {
        /// The process.
        pid: Pid,
        /// The limit.
        max: usize,
    },
    /// All rings are in use.
    #[error("{max} recordings are already in progress: no ring is free")]
    TooManyRings {
        /// The limit.
        max: u32,
    },
    /// The USDT probes of all processes use more distinct argument locations than the table holds.
    #[error("probes of programs have more than {max} different argument locations: the table is full")]
    TooManySites {
        /// The limit.
        max: u32,
    },
    /// A map operation failed: a bug in the daemon, not a problem with its input.
    #[error("BPF map {map}: {source}")]
    Map {
        /// The map.
        map: &'static str,
        /// The kernel's error.
        source: libbpf_rs::Error,
    },
    /// A reader thread could not be started.
    #[error("cannot start a reader thread: {0}")]
    Thread(#[from] std::io::Error),
}

type Result<T> = std::result::Result<T, Error>;

/// How to load the programs, and what to reserve.
#[derive(Debug, Clone)]
pub struct Config {
    /// Maximum kernel memory for unwind tables, bytes; beyond it the least recently used tables are evicted.
    pub tables_bytes: u64,
    /// Attach only by this method, for measurements or to test a fallback; `None` = the best that the kernel supports.
    pub method: Option<Attach>,
    /// Whether processes may also be watched in windows, and first touches of pages are counted.
    pub windows: bool,
    /// Maximum number of frames of a stack, of which the innermost are kept: 1 to [`bpf::FRAMES_DEEP_MAX`]; kernels before 5.17 keep
    /// [`bpf::FRAMES_MAX`] at most.
    pub frames_max: u32,
}

/// Default size of a ring buffer. Two threads in a tight malloc/free loop produce about 90 MB of records per second; 32 MiB hold the third
/// of a second for which the watched threads may keep the reader off the CPU.
pub const RING_BYTES: u32 = 32 << 20;

/// Default budget of the unwind tables in kernel memory: 16 M rows, more than the code of a whole distribution needs.
pub const TABLES_BYTES: u64 = 64 << 20;

impl Default for Config {
    fn default() -> Self {
        Self { tables_bytes: TABLES_BYTES, method: None, windows: false, frames_max: bpf::FRAMES_MAX }
    }
}

/// A probe site in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachSite {
    /// File offset of the instruction.
    pub offset: FileOffset,
    /// `FP_COOKIE_*` without the slot, which [`Capture::attach`] sets.
    pub cookie: u64,
    /// Whether it is an allocating function, whose return is probed too: at the site, rsp must then be as at the function's entry. A
    /// freeing function is only probed at its entry.
    pub with_return: bool,
}

/// The sites of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachFile {
    /// Path by which the kernel finds the file's inode.
    pub path: PathBuf,
    /// Sites in any order, without duplicate offsets.
    pub sites: Vec<AttachSite>,
}

/// What to record of a process, as `TARGET_*` bits.
#[derive(Debug, Clone, Copy)]
pub struct TargetFlags(pub u32);

/// A set of probes: a process may have two at the same time, each with its own slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    /// Probes for all calls.
    Calls,
    /// Size-selective probes for large blocks.
    Large,
}

/// Records of a target lost because their ring was full, and calls that never returned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetLoss {
    /// Allocation records.
    pub allocations: u64,
    /// Free records.
    pub frees: u64,
    /// Other records.
    pub others: u64,
    /// Calls that never returned; whether they allocated is not known.
    pub abandoned: u64,
}

/// Probe hits of a governed target since it was added, including those while it was off.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hits {
    /// Hits at functions that allocate, including nested calls.
    pub allocations: u64,
    /// Hits at functions that free.
    pub frees: u64,
    /// Of both, those at instructions that the kernel single-steps, modulo 2^32.
    pub stepped: u32,
    /// Probed returns.
    pub returns: u64,
    /// Run time of the programs for all of these, in nanoseconds, while the target was on.
    pub programs_ns: u64,
    /// Sum of allocations and frees when the programs switched the target off, for whatever reason; `None` = it is on, or they did not
    /// switch it off.
    pub off_at: Option<u64>,
    /// When the programs switched the target off because its quota was used up, CLOCK_MONOTONIC ns; `None` = they did not.
    pub closed_ns: Option<u64>,
}

/// Attached probes; dropping it detaches them (about 90 ms: the kernel waits for running probes to finish).
#[must_use]
#[derive(Debug)]
pub struct Attached {
    links: Vec<Link>,
}

impl Drop for Attached {
    /// In reverse order: the frees of a program's own probes are received as long as its allocations are.
    fn drop(&mut self) {
        while self.links.pop().is_some() {}
    }
}

impl Attached {
    /// Number of links held.
    pub fn links(&self) -> usize {
        self.links.len()
    }
}

/// The counting of first touches of pages; dropping it stops that.
#[must_use]
#[derive(Debug)]
pub struct Touches {
    _link: Link,
}

/// The loaded programs and their maps.
#[derive(Debug)]
pub struct Capture {
    object: Object,
    offer: Offer,
    rings: Arc<ring::Rings>,
    slots: Mutex<slots::Slots>,
    processes: Mutex<Processes>,
    targets: targets::TargetTable,
    tables: Tables,
    rows: Mutex<usdt::Rows>,
    /// How often size-selective probes were attached, in any process.
    epochs: AtomicU32,
    /// Programs that run for every process: address space, process life cycle.
    _machine_wide: Vec<Link>,
    /// The program that counts first touches of pages, while a recording needs it.
    touches: Mutex<Weak<Touches>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Capture {
    /// Loads the programs in the best form that the kernel accepts, and attaches those that run for every process.
    ///
    /// # Errors
    /// [`Error::Load`] with the reason and a hint: a missing capability, or a kernel without the required features.
    pub fn load(config: &Config) -> Result<Self> {
        crate::machine::open_files::raise();
        let (object, offer) = load::load(config)?;
        let outer = MapHandle::try_from(&load::map(&object, "rings")).map_err(|source| Error::Map { map: "rings", source })?;
        let machine_wide = load::attach_machine_wide(&object)?;
        let tables = Tables::new(&object, config.tables_bytes)?;
        let targets = targets::TargetTable::map(&load::map(&object, "targets"))?;
        Ok(Self {
            processes: Mutex::new(Processes::new(if offer.method == Attach::ByAddress { 1 } else { bpf::SLOTS_OF_PROCESS as usize })),
            object,
            offer,
            rings: Arc::new(ring::Rings::new(outer)),
            slots: Mutex::default(),
            targets,
            tables,
            rows: Mutex::default(),
            epochs: AtomicU32::new(0),
            _machine_wide: machine_wide,
            touches: Mutex::default(),
        })
    }

    /// The features that the kernel supports.
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// The unwind tables.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Counts first touches of pages as long as the result lives. This adds a small cost to every page fault of the machine.
    ///
    /// # Errors
    /// If the kernel refuses, or the programs were loaded without windows.
    pub fn count_touches(&self) -> Result<Arc<Touches>> {
        let mut touches = lock(&self.touches);
        if let Some(counted) = touches.upgrade() {
            return Ok(counted);
        }
        let counted = Arc::new(Touches { _link: load::attach_touches(&self.object)? });
        *touches = Arc::downgrade(&counted);
        Ok(counted)
    }

    /// Creates a ring and starts its reader thread, which passes all records to `sink`. `bytes` of locked kernel memory: rounded up to a
    /// power of two, at least a page.
    ///
    /// # Errors
    /// [`Error::TooManyRings`]; if the kernel cannot allocate the memory, or the thread cannot be started.
    pub fn open_ring(&self, bytes: u32, sink: Box<dyn Sink>) -> Result<Ring> {
        let mut ring = ring::open(&self.rings, bytes, sink)?;
        // Earlier counts belong to a previous owner of the ring's number.
        ring.before = self.counters_of_all(&ring)?;
        Ok(ring)
    }

    /// Registers a process. Its records go through `ring`. Nothing is probed yet, and no call is recorded until [`Capture::switch`].
    ///
    /// # Errors
    /// [`Error::TooManyTargets`], [`Error::TooManyRecordings`].
    pub fn add_target(&self, pid: Pid, ring: &Ring, flags: TargetFlags) -> Result<Slot> {
        let slot = self.add_beside(pid, ring, flags)?;
        let mut processes = lock(&self.processes);
        let added = processes.add(pid, slot, ring.shard()).map_err(|full| Error::TooManyRecordings { pid, max: full.most });
        let entered = added.and_then(|()| self.enter(&processes, pid));
        entered.map(|()| slot).inspect_err(|_| {
            processes.remove(pid, slot);
            self.release(slot);
        })
    }

    /// Passes a process's targets to the programs.
    fn enter(&self, processes: &Processes, pid: Pid) -> Result<()> {
        let map = self.map("slots_of_tgid");
        let entered = match processes.row(pid) {
            Some(row) => map.update(&pid.0.to_ne_bytes(), row.as_bytes(), MapFlags::ANY),
            None => map.delete(&pid.0.to_ne_bytes()),
        };
        entered.map_err(|source| Error::Map { map: "slots_of_tgid", source })
    }

    /// Registers a process that is already a target a second time, with its own hits, quota and deadline for another set of probes. Events
    /// of the process itself are reported to the first target only.
    ///
    /// # Errors
    /// [`Error::TooManyTargets`].
    pub fn add_beside(&self, pid: Pid, ring: &Ring, flags: TargetFlags) -> Result<Slot> {
        let slot = lock(&self.slots).take().ok_or(Error::TooManyTargets { max: bpf::TARGETS_MAX })?;
        self.targets.own(slot, pid, ring.shard(), flags.0);
        Ok(slot)
    }

    /// Enables or disables recording of a process's calls: while it is disabled, its probes may be attached and detached one by one.
    pub fn switch(&self, slot: Slot, on: bool) {
        self.targets.switch(slot, on);
    }

    /// Assigns all calls of a process to one of its targets, which records every one; must be called before its first probe. Windows of the
    /// others are closed at once, and stay closed ([`Capture::open`]) until the target is removed.
    ///
    /// # Errors
    /// [`Error::TooManyRecordings`] if another target records every call.
    pub fn record(&self, pid: Pid, slot: Slot) -> Result<()> {
        let mut processes = lock(&self.processes);
        let others = processes.record(pid, slot).map_err(|full| Error::TooManyRecordings { pid, max: full.most })?;
        for other in others.into_iter().filter(|other| self.targets.is_governed(*other)) {
            self.targets.switch(other, false);
        }
        Ok(())
    }

    /// Whether every call of a process is being recorded.
    pub fn is_recorded(&self, pid: Pid) -> bool {
        lock(&self.processes).is_recorded(pid)
    }

    /// How many recordings of every call of a process have begun while it was watched.
    pub fn recordings_begun(&self, pid: Pid) -> u64 {
        lock(&self.processes).begun(pid)
    }

    /// Whether the return of a single call can be left unprobed; otherwise the kernel probes the returns of all calls or of none.
    #[must_use]
    pub fn chooses_returns(&self) -> bool {
        self.offer.method == Attach::Session
    }

    /// Whether emitters can be listened to: their sites are distinguished by attach cookies, which Linux 5.17 added (commit 7adfc6c9b315).
    pub fn hears_emitters(&self) -> bool {
        self.offer.method != Attach::ByAddress
    }

    /// Sets whether a process is traced: then it is stopped where it maps code.
    pub fn hold(&self, slot: Slot, held: bool) {
        self.targets.hold(slot, held);
    }

    /// Sets whether a process's memory is limited: then no return of a throwing function is probed, if that can be chosen.
    pub fn limit(&self, slot: Slot, limited: bool) {
        self.targets.limit(slot, limited);
    }

    /// Allows a governed process this many hits, up to a time (CLOCK_MONOTONIC ns); then the kernel program switches it off. `false`: every
    /// call of the process is being recorded, so no window can be opened.
    #[must_use]
    pub fn open(&self, pid: Pid, slot: Slot, quota: u64, deadline_ns: u64) -> bool {
        let processes = lock(&self.processes);
        if processes.is_recorded(pid) {
            return false;
        }
        self.targets.open(slot, quota, deadline_ns);
        true
    }

    /// As [`Capture::open`], for size-selective probes, which do not conflict with a recording of every call.
    pub fn open_beside(&self, slot: Slot, quota: u64, deadline_ns: u64) {
        self.targets.open(slot, quota, deadline_ns);
    }

    /// Allows a governed process this many more hits from now on if it is still open; a target that was switched off stays off.
    pub fn extend(&self, slot: Slot, quota: u64) {
        self.targets.extend(slot, quota);
    }

    /// Sets whether the contents of some of a process's blocks are sent when they are allocated.
    pub fn contents(&self, slot: Slot, on: bool) {
        self.targets.contents(slot, on);
    }

    /// Records one of `interval` first touches of pages, chosen at random; 0 = none.
    pub fn touch_interval(&self, slot: Slot, interval: u64) {
        self.targets.touch_interval(slot, interval);
    }

    /// Probe hits of a governed process.
    pub fn hits(&self, slot: Slot) -> Hits {
        self.targets.hits(slot)
    }

    /// Removes a target from a process. Its probes must be detached ([`Attached`] dropped); the generation distinguishes its records that
    /// are still in the ring. Removing the last target also removes the process's unwind tables.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn remove_target(&self, pid: Pid, slot: Slot) -> Result<()> {
        let mut processes = lock(&self.processes);
        let removed = processes.remove(pid, slot);
        let entered = if removed == Removed::Unknown { Ok(()) } else { self.enter(&processes, pid) };
        drop(processes);
        let forgotten = if removed == Removed::Last { self.tables.forget_process(pid.0) } else { Ok(()) };
        if self.offer.method == Attach::ByAddress {
            sites::forget(&self.map("site_cookies"), slot);
        }
        self.release(slot);
        entered.and(forgotten)
    }

    fn release(&self, slot: Slot) {
        self.targets.disown(slot);
        lock(&self.slots).release(slot);
    }

    /// Attaches probes to the sites, for this process only.
    ///
    /// # Errors
    /// [`Error::Attach`]; probes that this call had already attached are detached again.
    pub fn attach(&self, pid: Pid, slot: Slot, files: &[AttachFile]) -> Result<Attached> {
        self.attach_with(pid, slot, files, Set::Calls, false)
    }

    /// Attaches the probes of a target to a child of vfork, which runs in the target's memory: its calls are attributed to the target until
    /// it executes a program. Not needed if the target's own probes see it ([`Offer::sees_vfork_children`]).
    ///
    /// # Errors
    /// As [`Capture::attach`].
    pub fn attach_vfork_child(&self, child: Pid, slot: Slot, files: &[AttachFile]) -> Result<Attached> {
        let mut files = files.to_vec();
        for site in files.iter_mut().flat_map(|file| &mut file.sites) {
            site.cookie |= cookie::VFORK;
        }
        self.attach_with(child, slot, &files, Set::Calls, false)
    }

    /// Attaches the size-selective probes to a file, for this process and a separate slot ([`Capture::add_beside`]).
    ///
    /// # Errors
    /// As [`Capture::attach`].
    pub fn attach_large(&self, pid: Pid, slot: Slot, file: &AttachFile) -> Result<Attached> {
        self.targets.begin_epoch(slot, self.epochs.fetch_add(1, Ordering::Relaxed) + 1);
        self.attach_with(pid, slot, std::slice::from_ref(file), Set::Large, self.offer.method == Attach::Session)
    }

    /// As [`Capture::attach`], for a window: one link per file if the kernel has sessions, for all kinds of sites.
    ///
    /// # Errors
    /// As [`Capture::attach`].
    pub fn attach_window(&self, pid: Pid, slot: Slot, files: &[AttachFile]) -> Result<Attached> {
        self.attach_with(pid, slot, files, Set::Calls, self.offer.method == Attach::Session)
    }

    fn attach_with(&self, pid: Pid, slot: Slot, files: &[AttachFile], set: Set, one_link: bool) -> Result<Attached> {
        let mut links = Vec::new();
        for file in files.iter().filter(|file| !file.sites.is_empty()) {
            self.attach_file(pid, slot, file, (set, one_link), &mut links).map_err(|source| Error::Attach {
                pid,
                path: file.path.display().to_string(),
                sites: file.sites.len(),
                source,
            })?;
        }
        Ok(Attached { links })
    }

    fn attach_file(
        &self,
        pid: Pid,
        slot: Slot,
        file: &AttachFile,
        (set, one_link): (Set, bool),
        links: &mut Vec<Link>,
    ) -> libbpf_rs::Result<()> {
        let with_slot = |cookie: u64| cookie | cookie::of_slot(slot.index);
        let multi = |sites: &[&AttachSite], retprobe, session| UprobeMultiOpts {
            offsets: sites.iter().map(|site| site.offset.0 as usize).collect(),
            cookies: sites.iter().map(|site| with_slot(site.cookie)).collect(),
            retprobe,
            session,
            ..Default::default()
        };
        let pid = pid.0 as i32;
        let (allocs, frees): (Vec<&AttachSite>, Vec<&AttachSite>) = file.sites.iter().partition(|site| site.with_return);
        let all: Vec<&AttachSite> = file.sites.iter().collect();
        let plan: &[(&str, &[&AttachSite], bool)] = match self.offer.method {
            _ if one_link && set == Set::Large => &[("large_session", &all, false)],
            Attach::Multi if set == Set::Large => &[("large_return_multi", &allocs, true), ("large_entry_multi", &all, false)],
            _ if set == Set::Large => &[("large_return", &allocs, true), ("large_entry", &all, false)],
            _ if one_link => &[("window_session", &all, false)],
            Attach::Session => &[("alloc_session", &allocs, false), ("free_entry_multi", &frees, false)],
            // Returns before entries: an entry without its return probe would look like a call that never returned.
            Attach::Multi => {
                &[("alloc_return_multi", &allocs, true), ("alloc_entry_multi", &allocs, false), ("free_entry_multi", &frees, false)]
            }
            Attach::PerfEvents | Attach::ByAddress => {
                &[("alloc_return", &allocs, true), ("alloc_entry", &allocs, false), ("free_entry", &frees, false)]
            }
        };
        if self.offer.method == Attach::ByAddress {
            sites::tell(&load::map(&self.object, "site_cookies"), Pid(pid as u32), file, set, with_slot)?;
        }
        for (name, sites, retprobe) in plan.iter().filter(|(_, sites, _)| !sites.is_empty()) {
            let program = load::program(&self.object, name)?;
            if matches!(self.offer.method, Attach::PerfEvents | Attach::ByAddress) {
                for site in *sites {
                    let cookie = if self.offer.method == Attach::PerfEvents { with_slot(site.cookie) } else { 0 };
                    let opts = UprobeOpts { cookie, retprobe: *retprobe, ..Default::default() };
                    links.push(program.attach_uprobe_with_opts(pid, &file.path, site.offset.0 as usize, opts)?);
                }
            } else {
                let session = name.ends_with("_session");
                links.push(program.attach_uprobe_multi_with_opts(pid, &file.path, "", multi(sites, *retprobe, session))?);
            }
        }
        Ok(())
    }

    /// The programs' counts for a ring's targets since it was opened, summed over the CPUs. Hits without a known target, and events that
    /// the kernel did not deliver, may belong to any process: they are included for each ring.
    ///
    /// # Errors
    /// If the kernel refuses to read its map.
    pub fn counters(&self, ring: &Ring) -> Result<Counters> {
        Ok(self.counters_of_all(ring)?.since(&ring.before))
    }

    /// The counts since the programs were loaded, for all rings that had this one's number.
    fn counters_of_all(&self, ring: &Ring) -> Result<Counters> {
        let map = self.map("counters");
        let mut rows = Vec::new();
        for row in [ring.shard(), bpf::SHARDS_MAX] {
            let of_cpus = map.lookup_percpu(&row.to_ne_bytes(), MapFlags::ANY).map_err(|source| Error::Map { map: "counters", source })?;
            rows.extend(of_cpus.unwrap_or_default());
        }
        let mut counters = Counters::from_rows(&rows);
        let (vm_changes, life_events) = load::missed_events(&self.object);
        counters.add(Counter::LostVm, vm_changes);
        counters.add(Counter::LostLife, life_events);
        Ok(counters)
    }

    /// Losses of a target so far.
    pub fn loss(&self, slot: Slot) -> TargetLoss {
        self.targets.loss(slot)
    }

    fn map(&self, name: &'static str) -> libbpf_rs::Map<'_> {
        load::map(&self.object, name)
    }
}
