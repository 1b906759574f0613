//! The trace of a recording: every event of the first process that it watches, written while it is recorded.
//!
//! The ring's thread writes the events, the driver the rest. If the file cannot be written any more, the trace ends there, and the recording
//! goes on.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::capture::Slot;
use crate::capture::wire::VmChange;
use crate::ledger::Event;
use crate::machine::Machine;
use crate::process::handle::read_bounded;
use crate::process::{Process, Statm};
use crate::profile::{FrameId, HeapSummary, Profile};
use crate::session::tier::exact::Watched;
use crate::session::walks::large::Touched;
use crate::trace::event::Op;
use crate::trace::{Account, End, Header, LargeBlocks, Names, NamesWriter, Seed, Usage, Writer};
use crate::units::{HumanBytes, StackHash, StackId, grouped};

/// Names of environment variables that configure allocators begin with one of these.
const SETTINGS: [&[u8]; 8] =
    [b"MALLOC_", b"GLIBC_TUNABLES", b"_RJEM_MALLOC_", b"JE_MALLOC_", b"TCMALLOC_", b"MIMALLOC_", b"SNMALLOC_", b"LD_PRELOAD"];
/// Linux limits arguments and environment to three quarters of an 8 MiB stack (fs/exec.c, bprm_stack_limits).
const ENVIRONMENT_BYTES_MAX: u64 = 6 << 20;
/// Time between two samples of the process's anonymous memory: reading one takes 2 µs.
const SAMPLE_INTERVAL_NS: u64 = 10_000_000;
/// Samples in memory. When there are more, every second one is dropped, and the interval doubles.
const SAMPLES_MAX: usize = 16_384;
/// Accounts written during the recording at most.
const ACCOUNTS_MAX: u32 = 2048;
/// A stack without a hash.
const NO_STACK: u64 = 0;

/// A trace that is being written.
#[derive(Default)]
pub struct Trace(Mutex<State>);

/// A trace that the ring's thread and the driver share.
pub type SharedTrace = Arc<Trace>;

#[derive(Default)]
struct State {
    /// The file, before its process is known.
    file: Option<File>,
    bytes_max: u64,
    writer: Option<Writer<BufWriter<File>>>,
    /// Slot and generation of the process.
    of: Option<(u16, u16)>,
    failed: Option<String>,
    samples: Samples,
    accounts: u32,
    /// The heap from before, and when its census ended: it is written once all events from before that are.
    seed: Option<(u64, Seed)>,
}

/// Anonymous memory of the process over time.
#[derive(Default)]
struct Samples {
    /// The process's directory under `/proc`.
    directory: PathBuf,
    taken: Vec<(u64, u64)>,
    interval_ns: u64,
    next_ns: u64,
}

impl Samples {
    fn of(process: &Process) -> Self {
        Self { directory: process.directory().to_owned(), interval_ns: SAMPLE_INTERVAL_NS, ..Self::default() }
    }

    /// Takes a sample if one is due.
    fn take(&mut self) {
        let now_ns = crate::session::monotonic_ns();
        if now_ns < self.next_ns || self.interval_ns == 0 {
            return;
        }
        self.next_ns = now_ns + self.interval_ns;
        let Some(bytes) = Statm::of(&self.directory).map(|statm| statm.anonymous_bytes()) else { return };
        if self.taken.len() >= SAMPLES_MAX {
            let mut index = 0;
            self.taken.retain(|_| {
                index += 1;
                index % 2 == 0
            });
            self.interval_ns *= 2;
        }
        self.taken.push((now_ns, bytes));
    }
}

/// What became of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traced {
    /// What it contains.
    pub end: End,
    /// Bytes of the file.
    pub bytes: u64,
}

impl State {
    /// Applies a write; the first error ends the trace.
    fn write(&mut self, write: impl FnOnce(&mut Writer<BufWriter<File>>) -> io::Result<()>) {
        let Some(writer) = &mut self.writer else { return };
        if let Err(error) = write(writer) {
            self.failed = Some(error.to_string());
            self.writer = None;
        }
    }
}

impl Trace {
    /// A trace into a file of at most about `bytes_max` bytes.
    #[must_use]
    pub fn new(file: File, bytes_max: u64) -> Self {
        Self(Mutex::new(State { file: Some(file), bytes_max, ..State::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with a process, unless another one is traced already. Its memory is sampled now: it may end before the next sample.
    pub(in crate::session) fn begin(&self, process: &Process, slot: Slot, start_ns: u64, header: Header) {
        let mut state = self.lock();
        let Some(file) = state.file.take() else { return };
        let header = Header {
            tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
            pid: process.pid().0,
            comm: process.comm().to_owned(),
            machine: Machine::HOST.name().to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, |cpus| u32::try_from(cpus.get()).unwrap_or(0)),
            page_bytes: crate::heap::residency::page_bytes(),
            environment: settings(process),
            start_ns,
            ..header
        };
        match Writer::new(BufWriter::new(file), &header, state.bytes_max) {
            Ok(writer) => {
                state.writer = Some(writer);
                state.samples = Samples::of(process);
                state.samples.take();
                state.of = Some((slot.index, slot.generation as u16));
            }
            Err(error) => state.failed = Some(error.to_string()),
        }
    }

    /// Whether the process with this slot and generation is traced.
    pub(in crate::session) fn is_of(&self, slot: Slot) -> bool {
        self.lock().of == Some((slot.index, slot.generation as u16))
    }

    /// Events of a process, in order.
    pub(in crate::session) fn events(&self, of: (u16, u16), events: &[Event<'_>]) {
        let mut state = self.lock();
        if state.of != Some(of) {
            return;
        }
        state.samples.take();
        state.write(|writer| {
            events.iter().try_for_each(|event| match *event {
                Event::Alloc { addr, size_bytes, stack, tid, how, time_ns } => {
                    writer.alloc((tid, time_ns), addr.0, stack.0, size_bytes, how)
                }
                Event::Free { addr, tid, time_ns, .. } => writer.free((tid, time_ns), addr.0),
                Event::ReallocFree { addr, tid, time_ns, .. } => writer.realloc_free((tid, time_ns), addr.0),
                Event::ReallocFail { addr, tid } => writer.realloc_fail(tid, addr.0),
                _ => Ok(()),
            })
        });
    }

    /// A change of the address space that no allocator call caused.
    pub(in crate::session) fn mapped(&self, of: (u16, u16), at: (u32, u64), change: VmChange) {
        let mut state = self.lock();
        let op = match change {
            VmChange::Mmap { addr, len, prot, fd, .. } if fd < 0 => {
                Op::Map { addr: addr.0, bytes: len, is_writable: prot & libc::PROT_WRITE as u32 != 0 }
            }
            VmChange::Munmap { addr, len } => Op::Unmap { addr: addr.0, bytes: len },
            VmChange::Brk { end } => Op::Break { end: end.0 },
            _ => return,
        };
        if state.of == Some(of) {
            state.write(|writer| writer.other(at, op));
        }
    }

    /// Records of a process were lost.
    pub(in crate::session) fn lost(&self, slot: Slot, records: u64) {
        let mut state = self.lock();
        if records > 0 && state.of == Some((slot.index, slot.generation as u16)) {
            state.write(|writer| writer.lost(records));
        }
    }

    /// The process replaced its image.
    pub(in crate::session) fn exec(&self, of: (u16, u16), at: (u32, u64)) {
        let mut state = self.lock();
        if state.of == Some(of) {
            state.write(|writer| writer.exec(at));
        }
    }

    /// A thread of the process ended.
    pub(in crate::session) fn thread_end(&self, of: (u16, u16), at: (u32, u64)) {
        let mut state = self.lock();
        if state.of == Some(of) {
            state.write(|writer| writer.thread_end(at));
        }
    }

    /// The process ended.
    pub(in crate::session) fn ended(&self, of: (u16, u16), time_ns: u64) {
        let mut state = self.lock();
        if state.of == Some(of) {
            state.write(|writer| {
                writer.exited(time_ns);
                Ok(())
            });
        }
    }

    /// The heap from before the recording, by a census that ended at this time.
    pub(in crate::session) fn found_before(&self, ended_ns: u64, seed: Seed) {
        self.lock().seed = Some((ended_ns, seed));
    }

    /// The heap from before the recording is not known, for this reason.
    pub(in crate::session) fn found_nothing_before(&self, reason: &str) {
        self.lock().write(|writer| {
            writer.without_seed(reason);
            Ok(())
        });
    }

    /// Writes the heap from before the recording if all events up to the end of its census are written. `drained_ns`: all before it are.
    pub(in crate::session) fn seed(&self, drained_ns: u64) {
        let mut state = self.lock();
        if let Some((_, seed)) = state.seed.take_if(|(ended_ns, _)| *ended_ns < drained_ns) {
            state.write(|writer| writer.seed(&seed));
        }
    }

    /// The heap at a moment of the recording, with its large live blocks by stack.
    pub(in crate::session) fn account(&self, (began_ns, ended_ns): (u64, u64), heap: &HeapSummary, large: &HashMap<StackHash, Touched>) {
        let (time_ns, took_ns) = (began_ns.midpoint(ended_ns), ended_ns.saturating_sub(began_ns));
        let mut state = self.lock();
        if state.accounts < ACCOUNTS_MAX {
            state.accounts += 1;
            state.write(|writer| {
                let of_stack = |(hash, touched): (&StackHash, &Touched)| {
                    let Touched { bytes, resident_bytes } = *touched;
                    Some(LargeBlocks { stack: writer.stack_number(hash.0)?, bytes, resident_bytes })
                };
                let mut large: Vec<LargeBlocks> = large.iter().filter_map(of_stack).collect();
                large.sort_unstable_by_key(|one| one.stack);
                writer.account(&Account { time_ns, took_ns, heap: *heap, large })
            });
        }
    }

    /// Takes a sample of the process's memory if one is due: for times without events.
    pub(in crate::session) fn sample(&self) {
        let mut state = self.lock();
        if state.writer.is_some() {
            state.samples.take();
        }
    }

    /// The names of the stacks that the trace refers to.
    pub(in crate::session) fn names(&self, profile: &Profile, watched: &Watched, stacks: &HashMap<StackId, Arc<[FrameId]>>) -> Names {
        let hashes = self.lock().writer.as_ref().map(Writer::stacks).unwrap_or_default();
        let mut numbers: HashMap<FrameId, u32> = HashMap::new();
        let mut names = NamesWriter::default();
        for hash in hashes {
            let id = (hash != NO_STACK).then(|| watched.ledger.known_stack(StackHash(hash))).flatten();
            let frames = id.and_then(|id| stacks.get(&id)).map(|frames| &frames[..]).unwrap_or_default();
            let mut number =
                |frame: &FrameId| *numbers.entry(*frame).or_insert_with(|| names.function(profile.frame(*frame).function.to_string()));
            let functions: Vec<u32> = frames.iter().map(&mut number).collect();
            names.stack(&functions);
        }
        names.finish()
    }

    /// Ends the trace. `None`: no process was traced. `heap`: by the census at the end, if there was one.
    ///
    /// # Errors
    /// If the file could not be written, in words.
    pub(in crate::session) fn finish(
        &self,
        heap: Option<&HeapSummary>,
        names: &Names,
        allocators: &[String],
    ) -> Option<Result<Traced, String>> {
        if let Some(heap) = heap {
            let now_ns = crate::session::monotonic_ns();
            self.account((now_ns, now_ns), heap, &HashMap::new());
        }
        self.seed(u64::MAX);
        self.found_nothing_before("the recording ended before the census of its start");
        let mut state = self.lock();
        let usage = Usage { samples: std::mem::take(&mut state.samples.taken) };
        state.write(|writer| writer.usage(&usage));
        if let Some(failed) = state.failed.take() {
            return Some(Err(failed));
        }
        let mut writer = state.writer.take()?;
        writer.ended(crate::session::monotonic_ns());
        Some(writer.finish(names, allocators).map(|(end, bytes)| Traced { end, bytes }).map_err(|error| error.to_string()))
    }
}

/// What became of a trace, for the notes of the profile.
pub(in crate::session) fn words(pid: Option<u32>, done: Option<Result<Traced, String>>) -> String {
    let who = pid.map_or_else(String::new, |pid| format!(" of process {pid}"));
    match done {
        None => "no trace was written: no process was recorded".to_owned(),
        Some(Err(error)) => format!("the trace{who} is incomplete: its file could not be written: {error}"),
        Some(Ok(Traced { end, bytes })) => {
            let cut = if end.cut_short.is_empty() { String::new() } else { format!("; it ends early: {}", end.cut_short) };
            let lost = if end.lost == 0 { String::new() } else { format!(", {} records lost", grouped(end.lost)) };
            format!("the trace{who} has {} events in {}{lost}{cut}", grouped(end.events), HumanBytes(bytes))
        }
    }
}

/// The variables of a process's environment that configure allocators.
fn settings(process: &Process) -> Vec<(String, String)> {
    let environment = read_bounded(&process.directory().join("environ"), ENVIRONMENT_BYTES_MAX).unwrap_or_default();
    let variables = environment.split(|&byte| byte == 0).filter(|variable| SETTINGS.iter().any(|name| variable.starts_with(name)));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    variables
        .filter_map(|variable| Some(variable.split_at(variable.iter().position(|&byte| byte == b'=')?)))
        .map(|(name, value)| (text(name), text(value.get(1..).unwrap_or_default())))
        .collect()
}
