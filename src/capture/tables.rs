//! The unwinder's tables in the kernel: the files that have one, and the processes that map these files.
//!
//! ```text
//! sync_process ──→ a number for each mapped file ──→ small files at once, ──→ inner map filled through mmap ──→ outer entry
//!                                                    large ones on a thread          (published last, removed first)
//! ```
//!
//! A table belongs to a file, not to a process: files with the same build id and size share one. A file that is corrupt or has no unwind
//! information keeps its number and the reason, so that `doctor` can show it and the conversion is not repeated. A table that does not fit
//! into the budget is retried when there is room.

mod publisher;
mod report;
mod state;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, Object};
use zerocopy::{FromBytes as _, IntoBytes as _};

use publisher::Publisher;
pub use report::{FileStatus, Report, Status, TableState};
use state::{FileEntry, FileKey, Source, State};

use super::{Error, Result, load};
use crate::bpf::{self, MappingKind};
use crate::machine::Machine;
use crate::process::elf::ElfError;
use crate::process::file::FileError;
use crate::process::{Backing, MappedFile, Mapping, Maps, Process};
use crate::unwind::budget::{Admission, Budget};
use crate::unwind::elf::{Elf, Image};
use crate::unwind::layout::BLOCK_BYTES;
use crate::unwind::mappings::{self, CodeMapping, ManagedCode};
use crate::unwind::rows::Counts;
use crate::unwind::{self, Table};

/// Maximum time for which a call converts files itself; the rest is left to the thread. Half of the maximum total time to attach.
const AT_ONCE: Duration = Duration::from_millis(150);
/// Maximum number of files waiting for the thread: each holds a file descriptor.
const QUEUE_MAX: usize = 256;
/// Files smaller than this are converted immediately even after that time: passing them to the thread would take longer.
const SMALL_FILE_BYTES: u64 = 64 << 10;
/// Maximum number of bytes of the vdso, which has two pages on current kernels.
const VDSO_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug)]
struct Shared {
    tables: MapHandle,
    mapping_tables: Publisher,
    clock: MapHandle,
    state: Mutex<State>,
    wake: Condvar,
    start: Instant,
    /// Whether the programs walk frames of managed runtimes: those for kernels before 5.17 do not.
    walks_managed: bool,
}

/// The tables of all watched processes.
#[derive(Debug)]
pub struct Tables {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

impl Tables {
    /// Takes the unwinder's maps of a loaded object and starts the thread that converts large files.
    ///
    /// # Errors
    /// If a map's descriptor cannot be duplicated or the thread cannot be started.
    pub fn new(object: &Object, budget_bytes: u64) -> Result<Self> {
        // Those programs alone know sites by their addresses.
        let walks_managed = object.maps().all(|map| map.name() != "site_cookies");
        let handle = |name| MapHandle::try_from(&load::map(object, name)).map_err(|source| Error::Map { map: name, source });
        let state = State {
            files: HashMap::new(),
            by_key: HashMap::new(),
            next_number: 0,
            budget: Budget::new(budget_bytes),
            processes: HashMap::new(),
            managed: HashSet::new(),
            queue: VecDeque::new(),
            stop: false,
            generation: 0,
            evictions: 0,
            mappings_left_out: 0,
        };
        let shared = Arc::new(Shared {
            tables: handle("tables")?,
            mapping_tables: Publisher::new("mapping_tables", handle("mapping_tables")?)?,
            clock: handle("unwind_clock")?,
            state: Mutex::new(state),
            wake: Condvar::new(),
            start: Instant::now(),
            walks_managed,
        });
        let for_worker = Arc::clone(&shared);
        let worker = std::thread::Builder::new().name("fragprof-tables".into()).spawn(move || for_worker.work())?;
        Ok(Self { shared, worker: Some(worker) })
    }

    /// Updates an address space's mapping table and its files' tables. Call it when a process is attached, after exec and dlopen, and when
    /// a walk requested a table. Large files follow later, on the thread; until then walks end with [`unwind::End::NoTable`].
    ///
    /// # Errors
    /// If a map cannot be created or changed. A file without a table is not an error: the report counts it.
    pub fn sync_process(&self, process: &Process, mm_id: u32, maps: &Maps) -> Result<Report> {
        self.shared.sync_process(process, mm_id, maps, &ManagedCode::default())
    }

    /// As [`Self::sync_process`], with the code of the process's managed runtimes.
    ///
    /// # Errors
    /// As there.
    pub fn sync_managed(&self, process: &Process, mm_id: u32, maps: &Maps, managed: &ManagedCode) -> Result<Report> {
        self.shared.sync_process(process, mm_id, maps, managed)
    }

    /// Drops an address space's mapping table. Its files' tables stay until their memory is needed.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn forget_process(&self, mm_id: u32) -> Result<()> {
        let mut state = self.shared.lock();
        state.managed.remove(&mm_id);
        if let Some(files) = state.processes.remove(&mm_id) {
            state.release(&files);
            drop(state);
            self.shared.mapping_tables.remove(mm_id)?;
        }
        Ok(())
    }

    /// Whether frames of managed runtimes are walked.
    #[must_use]
    pub fn walks_managed(&self) -> bool {
        self.shared.walks_managed
    }

    /// The sum over all files.
    #[must_use]
    pub fn status(&self) -> Status {
        let state = self.shared.lock();
        let mut status = Status {
            files: state.files.len(),
            bytes: state.budget.used_bytes(),
            budget_bytes: state.budget.limit_bytes(),
            evictions: state.evictions,
            mappings_left_out: state.mappings_left_out,
            ..Default::default()
        };
        let mut refused: HashMap<&str, usize> = HashMap::new();
        for file in state.files.values() {
            match &file.state {
                TableState::Loaded => {
                    status.loaded += 1;
                    status.rows += file.rows;
                    status.rows_unsupported += file.counts.rows_unsupported;
                }
                TableState::Pending => status.pending += 1,
                TableState::Evicted => {}
                TableState::NoRoom | TableState::Refused(_) => *refused.entry(file.state.refusal().unwrap_or_default()).or_default() += 1,
            }
        }
        status.refused = refused.into_iter().map(|(reason, files)| (reason.to_owned(), files)).collect();
        status.refused.sort();
        status
    }

    /// The files that an address space maps, sorted by path.
    #[must_use]
    pub fn files_of(&self, mm_id: u32) -> Vec<FileStatus> {
        let state = self.shared.lock();
        let numbers = state.processes.get(&mm_id).map(Vec::as_slice).unwrap_or_default();
        let mut files: Vec<FileStatus> = numbers.iter().filter_map(|number| state.files.get(number)).map(FileEntry::status).collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files
    }

    /// Waits until no file waits for conversion, up to `timeout`. Returns whether that is the case.
    #[must_use]
    pub fn wait_until_loaded(&self, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let pending = |state: &mut State| state.files.values().any(|file| file.state == TableState::Pending);
        let waited = self.shared.wake.wait_timeout_while(state, timeout, pending).unwrap_or_else(PoisonError::into_inner);
        !waited.1.timed_out()
    }
}

impl Drop for Tables {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(worker) = self.worker.take() {
            // A panic of the thread has been reported by the thread.
            let _ = worker.join();
        }
    }
}

/// An executable mapping after the lookup of its file.
struct TableRef {
    number: u32,
    kind: MappingKind,
    bias: u64,
}

const NOTHING: TableRef = TableRef { number: 0, kind: MappingKind::NoCfi, bias: 0 };

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since the start: the unit of time for eviction.
    fn tick(&self) -> u32 {
        // Starts at 1: 0 in a header means never used.
        u32::try_from(self.start.elapsed().as_secs()).unwrap_or(u32::MAX).saturating_add(1)
    }

    fn sync_process(&self, process: &Process, mm_id: u32, maps: &Maps, managed: &ManagedCode) -> Result<Report> {
        let mut report = Report::default();
        let mut code: Vec<CodeMapping> = Vec::new();
        let mut files: Vec<u32> = Vec::new();
        let mut fresh: Vec<(u32, Source)> = Vec::new();
        for mapping in maps.mappings.iter().filter(|mapping| mapping.permissions.execute && mapping.start.0 < Machine::HOST.user_end()) {
            let found = match &mapping.backing {
                // Return trampolines are recognized by their address.
                Backing::Named(name) if name == "[uprobes]" => continue,
                Backing::Named(name) if name == "[vdso]" => self.find_vdso(process, mapping, &mut fresh),
                Backing::File { .. } => self.find_file(process, mapping, &mut fresh),
                _ => TableRef { kind: MappingKind::Jit, ..NOTHING },
            };
            report.mappings += 1;
            if found.kind == MappingKind::File && !files.contains(&found.number) {
                files.push(found.number);
            }
            let whole = CodeMapping { begin: mapping.start.0, end: mapping.end.0, bias: found.bias, file: found.number, kind: found.kind };
            match code.last_mut() {
                // Generated code often comes in many small pieces.
                Some(last) if last.kind == MappingKind::Jit && whole.kind == MappingKind::Jit && last.end == whole.begin => {
                    last.end = whole.end;
                }
                _ => code.push(whole),
            }
        }
        report.files = files.len();

        report.loaded = self.convert_at_once(fresh)?;
        self.forget_refused(&mut code);
        if self.walks_managed {
            managed.replace_in(&mut code);
        }
        let (blocks, left_out) = mappings::to_blocks(
            &code,
            managed.hotspot.as_ref().filter(|_| self.walks_managed),
            managed.python.as_ref().filter(|_| self.walks_managed),
        );
        report.left_out = left_out;
        let map = filled_map("fp_mappings", &blocks)?;
        let mut state = self.lock();
        state.mappings_left_out += left_out as u64;
        for number in &files {
            match state.files.get_mut(number) {
                Some(file) => {
                    file.users += 1;
                    match file.state {
                        TableState::Pending => report.pending += 1,
                        TableState::NoRoom | TableState::Refused(_) => report.without_table += 1,
                        TableState::Loaded | TableState::Evicted => {}
                    }
                }
                None => report.without_table += 1,
            }
        }
        if let Some(before) = state.processes.insert(mm_id, files) {
            state.release(&before);
        }
        if managed.hotspot.is_some() || managed.python.is_some() {
            state.managed.insert(mm_id);
        } else {
            state.managed.remove(&mm_id);
        }
        drop(state);
        self.mapping_tables.set(mm_id, map)?;
        self.raise_generation()?;
        Ok(report)
    }

    /// Marks the mappings of files that have just been found to have no table: frames there are then stepped over immediately, not only
    /// after the process is next examined (arm64's vdso has no table, and all signal handlers return to it).
    fn forget_refused(&self, code: &mut [CodeMapping]) {
        let state = self.lock();
        for mapping in code.iter_mut().filter(|mapping| mapping.kind == MappingKind::File) {
            if state.files.get(&mapping.file).is_some_and(|file| file.state.refusal().is_some()) {
                mapping.kind = MappingKind::NoCfi;
            }
        }
    }

    /// The number of a mapped file. New and evicted files are added to `fresh`.
    fn find_file(&self, process: &Process, mapping: &Mapping, fresh: &mut Vec<(u32, Source)>) -> TableRef {
        let file = match MappedFile::open(process, mapping) {
            Ok(file) => file,
            // Shared memory into which a program writes its own code has a file, but not an ELF file.
            Err(FileError::Elf { source: ElfError::NotElf, .. }) => return TableRef { kind: MappingKind::Jit, ..NOTHING },
            Err(error) => {
                tracing::debug!(pid = process.pid().0, %error, "no unwind table");
                return NOTHING;
            }
        };
        let key = match &file.identity.build_id {
            Some(id) => FileKey::BuildId(id.0.clone(), file.identity.size_bytes),
            None => FileKey::Identity(file.identity.clone()),
        };
        let source = || File::open(&file.attach_path).map(Source::File);
        self.find(key, file.display_path, mapping.start.0, mapping.offset.0, source, fresh)
    }

    /// The vdso has no file: it is read from the process's memory.
    fn find_vdso(&self, process: &Process, mapping: &Mapping, fresh: &mut Vec<(u32, Source)>) -> TableRef {
        let bytes = File::open(process.directory().join("mem")).and_then(|memory| {
            let mut bytes = vec![0; usize::try_from(mapping.len().min(VDSO_BYTES_MAX)).unwrap_or(0)];
            memory.read_exact_at(&mut bytes, mapping.start.0)?;
            Ok(bytes)
        });
        let Ok(bytes) = bytes else { return NOTHING };
        let Some(id) = Elf::parse(bytes.as_slice()).ok().and_then(|elf| elf.build_id()) else { return NOTHING };
        let key = FileKey::BuildId(id, bytes.len() as u64);
        self.find(key, "[vdso]".into(), mapping.start.0, 0, || Ok(Source::Memory(bytes.clone())), fresh)
    }

    fn find(
        &self,
        key: FileKey,
        path: PathBuf,
        begin: u64,
        offset: u64,
        source: impl FnOnce() -> std::io::Result<Source>,
        fresh: &mut Vec<(u32, Source)>,
    ) -> TableRef {
        let mut state = self.lock();
        let state = &mut *state;
        let number = match state.by_key.get(&key) {
            Some(&number) => number,
            None => {
                let Some(number) = state.take_number() else { return NOTHING };
                let entry = FileEntry {
                    key: key.clone(),
                    path,
                    state: TableState::Evicted,
                    segments: Vec::new(),
                    map: None,
                    rows: 0,
                    bytes: 0,
                    counts: Counts::default(),
                    users: 0,
                };
                state.files.insert(number, entry);
                state.by_key.insert(key, number);
                number
            }
        };
        let Some(file) = state.files.get_mut(&number) else { return NOTHING };
        let has_room_now = file.state == TableState::NoRoom && state.budget.fits(file.bytes);
        if file.state == TableState::Evicted || has_room_now {
            let opened = source().and_then(|source| {
                let elf = Elf::parse(&source).map_err(std::io::Error::other)?;
                file.segments = elf.segments;
                Ok(source)
            });
            match opened {
                Ok(source) => {
                    file.state = TableState::Pending;
                    fresh.push((number, source));
                }
                Err(error) => file.state = TableState::Refused(error.to_string()),
            }
        }
        let kind = if file.state.refusal().is_some() { MappingKind::NoCfi } else { MappingKind::File };
        match mappings::bias_of(&file.segments, begin, offset) {
            Some(bias) => TableRef { number, kind, bias },
            None => TableRef { number, kind: MappingKind::NoCfi, bias: 0 },
        }
    }

    /// Converts as many files as the time allows, small files first, and passes the rest to the thread.
    fn convert_at_once(&self, mut fresh: Vec<(u32, Source)>) -> Result<usize> {
        let begun = Instant::now();
        let mut converted = Vec::new();
        let mut later = Vec::new();
        fresh.sort_by_key(|(_, source)| source.length().unwrap_or(u64::MAX));
        for (number, source) in fresh {
            let small = source.length().is_ok_and(|bytes| bytes < SMALL_FILE_BYTES);
            if begun.elapsed() < AT_ONCE || small || self.lock().queue.len() + later.len() >= QUEUE_MAX {
                converted.push((number, Table::read(&source)));
            } else {
                later.push((number, source));
            }
        }
        if !later.is_empty() {
            self.lock().queue.extend(later);
            self.wake.notify_all();
        }
        self.load(converted)
    }

    /// Loads converted tables into the kernel; returns how many.
    fn load(&self, converted: Vec<(u32, std::result::Result<Table, unwind::Error>)>) -> Result<usize> {
        let mut loaded = Vec::new();
        for (number, table) in converted {
            let table = match table {
                Ok(table) => table,
                Err(error) => {
                    self.refuse(number, error.to_string());
                    continue;
                }
            };
            let bytes = table.bytes() as u64;
            self.note_uses(bytes);
            let admission = self.lock().budget.admit(number, bytes, self.tick());
            match admission {
                Admission::Refused => self.find_no_room(number, bytes),
                Admission::Admitted { evict } => {
                    self.evict(&evict)?;
                    let map = filled_map("fp_table", &table.to_bytes())?;
                    loaded.push((number, map, table));
                }
            }
        }
        let entries: Vec<(u32, &MapHandle)> = loaded.iter().map(|(number, map, _)| (*number, map)).collect();
        self.publish(&entries)?;
        let count = loaded.len();
        let mut state = self.lock();
        for (number, map, table) in loaded {
            if let Some(file) = state.files.get_mut(&number) {
                file.state = TableState::Loaded;
                file.rows = table.rows().rows.len();
                file.bytes = table.bytes() as u64;
                file.counts = table.counts();
                file.map = Some(map);
            }
        }
        drop(state);
        self.wake.notify_all();
        self.raise_generation()?;
        Ok(count)
    }

    /// Records the size of the table: when a process maps the file again, the table is retried if there is enough room.
    fn find_no_room(&self, number: u32, bytes: u64) {
        if let Some(file) = self.lock().files.get_mut(&number) {
            tracing::debug!(path = %file.path.display(), bytes, "no space for its unwind table");
            file.state = TableState::NoRoom;
            file.bytes = bytes;
        }
        self.wake.notify_all();
    }

    fn refuse(&self, number: u32, reason: String) {
        if let Some(file) = self.lock().files.get_mut(&number) {
            tracing::debug!(path = %file.path.display(), reason, "no unwind table");
            file.state = TableState::Refused(reason);
        }
        self.wake.notify_all();
    }

    /// Before tables are evicted: reads from their headers when they were last used.
    fn note_uses(&self, bytes: u64) {
        let mut state = self.lock();
        if state.budget.fits(bytes) {
            return;
        }
        let state = &mut *state;
        for (number, file) in &state.files {
            let header = file.map.as_ref().and_then(|map| map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).ok().flatten());
            if let Some((header, _)) = header.as_deref().and_then(|header| bpf::TableHeader::read_from_prefix(header).ok()) {
                state.budget.touch(*number, header.last_used);
            }
        }
    }

    /// Removes the entry first, then the map: a walk that has found the map can use it until it finishes.
    fn evict(&self, numbers: &[u32]) -> Result<()> {
        for number in numbers {
            self.tables.delete(&number.to_ne_bytes()).map_err(|source| Error::Map { map: "tables", source })?;
            let mut state = self.lock();
            state.evictions += 1;
            if let Some(file) = state.files.get_mut(number) {
                file.state = TableState::Evicted;
                file.map = None;
                if file.users == 0 {
                    state.drop_file(*number);
                }
            }
        }
        Ok(())
    }

    /// Sets files' tables, in one call if the kernel supports it: each call waits for an RCU grace period, about 20 ms.
    fn publish(&self, entries: &[(u32, &MapHandle)]) -> Result<()> {
        let fd = |map: &MapHandle| map.as_fd().as_raw_fd().to_ne_bytes();
        if entries.len() > 1 {
            let keys: Vec<u8> = entries.iter().flat_map(|(key, _)| key.to_ne_bytes()).collect();
            let values: Vec<u8> = entries.iter().flat_map(|(_, map)| fd(map)).collect();
            let count = u32::try_from(entries.len()).unwrap_or(0);
            if self.tables.update_batch(&keys, &values, count, MapFlags::ANY, MapFlags::ANY).is_ok() {
                return Ok(());
            }
        }
        for (key, map) in entries {
            self.tables.update(&key.to_ne_bytes(), &fd(map), MapFlags::ANY).map_err(|source| Error::Map { map: "tables", source })?;
        }
        Ok(())
    }

    /// Invalidates what the unwinder has cached, and passes it the time.
    fn raise_generation(&self) -> Result<()> {
        let mut state = self.lock();
        state.generation = state.generation.wrapping_add(1);
        self.write_clock(state.generation)
    }

    fn write_clock(&self, generation: u32) -> Result<()> {
        let clock = bpf::UnwindClock { generation, tick: self.tick() };
        let error = |source| Error::Map { map: "unwind_clock", source };
        self.clock.update(&0u32.to_ne_bytes(), clock.as_bytes(), MapFlags::ANY).map_err(error)
    }

    /// The thread's main function: converts waiting files, and updates the unwinder's time once per second.
    fn work(&self) {
        let mut state = self.lock();
        while !state.stop {
            if let Some((number, source)) = state.queue.pop_front() {
                drop(state);
                if let Err(error) = self.load(vec![(number, Table::read(&source))]) {
                    self.refuse(number, error.to_string());
                }
                state = self.lock();
                continue;
            }
            // A runtime may have put other code where a walk that is repeated has seen some.
            if !state.managed.is_empty() {
                state.generation = state.generation.wrapping_add(1);
            }
            if let Err(error) = self.write_clock(state.generation) {
                tracing::warn!(%error, "the unwinder's clock cannot be updated: tables may be evicted in the wrong order");
            }
            state = self.wake.wait_timeout(state, Duration::from_secs(1)).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Inserts a table of one empty block into the unwinder's maps and removes it again. This checks that the kernel accepts the daemon's
/// tables as the type that the programs were verified with.
///
/// # Errors
/// The kernel's error.
pub(super) fn try_out(object: &Object) -> Result<()> {
    let map = filled_map("fp_trial", &[0; BLOCK_BYTES])?;
    for name in ["tables", "mapping_tables"] {
        let outer = load::map(object, name);
        let error = |source| Error::Map { map: name, source };
        outer.update(&0u32.to_ne_bytes(), &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY).map_err(error)?;
        outer.delete(&0u32.to_ne_bytes()).map_err(error)?;
    }
    Ok(())
}

/// A new inner map with these blocks as its content.
fn filled_map(name: &'static str, blocks: &[u8]) -> Result<MapHandle> {
    let error = |source| Error::Map { map: name, source };
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        map_flags: libbpf_sys::BPF_F_MMAPABLE | libbpf_sys::BPF_F_INNER_MAP,
        ..Default::default()
    };
    let entries = u32::try_from(blocks.len() / BLOCK_BYTES).unwrap_or(u32::MAX);
    let map = MapHandle::create(MapType::Array, Some(name), 4, BLOCK_BYTES as u32, entries, &options).map_err(error)?;
    let length = blocks.len();
    // SAFETY: a new mapping at an address chosen by the kernel; nothing else refers to it.
    let memory = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            length,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
            &map,
            0,
        )
    }
    .map_err(|errno| error(libbpf_rs::Error::from(std::io::Error::from(errno))))?;
    // SAFETY: the mapping has `length` bytes, is writable, and does not overlap the slice; nothing else uses the map yet.
    unsafe { std::ptr::copy_nonoverlapping(blocks.as_ptr(), memory.cast::<u8>(), length) };
    // SAFETY: unmaps the mapping from above; no reference to it remains.
    unsafe { rustix::mm::munmap(memory, length) }.map_err(|errno| error(libbpf_rs::Error::from(std::io::Error::from(errno))))?;
    Ok(map)
}
