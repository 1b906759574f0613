//! The trace of a recording: every event of the first process that it watches, written while it is recorded.
//!
//! The ring's thread writes the events, the driver the rest. If the file cannot be written any more, the trace ends there, and the recording
//! goes on.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::capture::Slot;
use crate::capture::wire::VmChange;
use crate::ledger::Event;
use crate::machine::Machine;
use crate::process::Process;
use crate::process::handle::read_bounded;
use crate::profile::{FrameId, HeapSummary, Profile, meta};
use crate::session::tier::exact::Watched;
use crate::trace::event::Op;
use crate::trace::{Account, End, Header, Names, Writer};
use crate::units::{HumanBytes, StackHash, StackId, grouped};

/// Names of environment variables that configure allocators begin with one of these.
const SETTINGS: [&[u8]; 8] =
    [b"MALLOC_", b"GLIBC_TUNABLES", b"_RJEM_MALLOC_", b"JE_MALLOC_", b"TCMALLOC_", b"MIMALLOC_", b"SNMALLOC_", b"LD_PRELOAD"];
/// Linux limits arguments and environment to three quarters of an 8 MiB stack (fs/exec.c, bprm_stack_limits).
const ENVIRONMENT_BYTES_MAX: u64 = 6 << 20;
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
    start_ns: u64,
    failed: Option<String>,
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

    /// Begins with a process, unless another one is traced already.
    pub(in crate::session) fn begin(&self, process: &Process, slot: Slot, start_ns: u64, header: Header) {
        let mut state = self.lock();
        let Some(file) = state.file.take() else { return };
        let header = Header {
            tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
            pid: process.pid().0,
            comm: process.comm().to_owned(),
            machine: Machine::HOST.name().to_owned(),
            cpus: std::thread::available_parallelism().map_or(0, |cpus| u32::try_from(cpus.get()).unwrap_or(0)),
            page_bytes: crate::heap::residency::PAGE_BYTES,
            environment: settings(process),
            start_ns,
            ..header
        };
        match Writer::new(BufWriter::new(file), &header, state.bytes_max) {
            Ok(writer) => {
                (state.writer, state.start_ns) = (Some(writer), start_ns);
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
        state.write(|writer| {
            events.iter().try_for_each(|event| match *event {
                Event::Alloc { addr, size_bytes, stack, tid, time_ns } => writer.alloc((tid, time_ns), addr.0, stack.0, size_bytes, 0),
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

    /// The names of the stacks that the trace refers to.
    pub(in crate::session) fn names(&self, profile: &Profile, watched: &Watched, stacks: &HashMap<StackId, Arc<[FrameId]>>) -> Names {
        let hashes = self.lock().writer.as_ref().map(Writer::stacks).unwrap_or_default();
        let mut numbers: HashMap<FrameId, u32> = HashMap::new();
        let mut names = Names::default();
        for hash in hashes {
            let id = (hash != NO_STACK).then(|| watched.ledger.known_stack(StackHash(hash))).flatten();
            let frames = id.and_then(|id| stacks.get(&id)).map(|frames| &frames[..]).unwrap_or_default();
            let mut number = |frame: &FrameId| {
                *numbers.entry(*frame).or_insert_with(|| {
                    names.functions.push(profile.frame(*frame).function.to_string());
                    names.functions.len() as u32 - 1
                })
            };
            let numbered = frames.iter().map(&mut number).collect();
            names.stacks.push(numbered);
        }
        names
    }

    /// Ends the trace with the accounts of the process's heap. `None`: no process was traced.
    ///
    /// # Errors
    /// If the file could not be written, in words.
    pub(in crate::session) fn finish(&self, process: Option<&meta::Process>, names: &Names) -> Option<Result<Traced, String>> {
        let mut state = self.lock();
        let start_ns = state.start_ns;
        if let Some(process) = process {
            let moments = [process.at_start, process.at_peak].into_iter().flatten();
            let moments = moments.map(|moment| (start_ns + moment.after_ms * 1_000_000, moment.heap));
            for (time_ns, heap) in moments.chain(process.heap.map(|heap| (crate::session::monotonic_ns(), heap))) {
                state.write(|writer| writer.account(&account(time_ns, &heap)));
            }
        }
        if let Some(failed) = state.failed.take() {
            return Some(Err(failed));
        }
        let writer = state.writer.take()?;
        Some(writer.finish(names).map(|(end, bytes)| Traced { end, bytes }).map_err(|error| error.to_string()))
    }
}

fn account(time_ns: u64, heap: &HeapSummary) -> Account {
    Account { time_ns, heap: *heap }
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
