//! Frames of managed runtimes: what the unwinder needs to walk them, and their names.
//!
//! ```text
//! process ─ Managed::update ─→ hotspot::Jvm, cpython::Python ─→ Code ─→ the process's mapping table (capture::tables)
//! stack's frame words ─ Managed::name ─→ hotspot::Jvm::frames, cpython::Python::stack ─→ NamedFrames (symbol) ─→ the ledger's words
//! ```
//!
//! A stack is named when it is first defined, seconds at most after it was taken, because a runtime frees and replaces its code: its frame words
//! are replaced by numbers of names, which stay.

pub mod account;
pub mod cpython;
pub mod hotspot;
pub mod memory;
mod v8;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cpython::Python;
use hotspot::{Jvm, Refusal, Starting};
use memory::ImageMemory;

use crate::bpf::{self, FRAME_KIND_BIT, FrameKind};
use crate::process::{Maps, Process};
use crate::symbol::NamedFrames;
use crate::units::{StackHash, counted};
use crate::unwind::mappings::ManagedCode;

/// After this time the description of a runtime that is starting is read again.
const READ_AGAIN: Duration = Duration::from_secs(2);
/// How long a runtime whose description cannot be read may be starting.
const STARTING_MAX: Duration = Duration::from_secs(10);

/// Words whose names are kept.
const WORDS_MAX: usize = 1 << 20;

/// Why frames are not walked on old kernels.
pub const NOT_WALKED: &str = "Java frames are not named: the programs for kernels before 5.17 do not walk them";
/// The same of Python frames.
pub const PYTHON_NOT_WALKED: &str = "Python frames are not named: the programs for kernels before 5.17 do not read them";

/// A process's runtimes, shared between the thread that looks for them and the one that names stacks.
pub type SharedManaged = Arc<Mutex<Managed>>;

/// Takes the lock. A panic of another holder does not invalidate the data.
pub fn lock(managed: &SharedManaged) -> MutexGuard<'_, Managed> {
    managed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is known of a process's runtimes.
#[derive(Debug)]
enum State {
    /// There is none that is known.
    None,
    /// There is one that cannot be walked.
    Refused(Refusal),
    /// There is one that is not ready.
    Starting(Box<Starting>, ImageMemory, Instant),
    /// It is walked.
    Ready(Box<Jvm>, ImageMemory),
}

/// What is known of a process's CPython.
#[derive(Debug)]
enum PythonState {
    /// Nothing was searched for yet.
    Unknown,
    /// There is none in so many mappings of files.
    None(usize),
    /// There is one whose frames are not read.
    Refused(cpython::Refusal),
    /// Its frames are read.
    Ready(Box<(Python, ImageMemory)>),
}

/// The managed runtimes of one image of a process.
#[derive(Debug)]
pub struct Managed {
    state: State,
    python: PythonState,
    names: Arc<NamedFrames>,
    /// Native frames are kept in whose place managed ones stand.
    keeps_native: bool,
    /// Words that are named already, with what they were recognised by.
    known: HashMap<u64, (u64, u64)>,
    /// When a runtime's library was first seen, and why it could not be used yet.
    library_since: Option<Instant>,
    pending: Option<Refusal>,
    /// What of a Node.js is named; `None` = there is none.
    node: Option<v8::Names>,
    /// Stacks that were defined while Python frames were read, and how many of them have such frames.
    stacks: u64,
    python_stacks: u64,
}

impl Managed {
    /// None are known yet; names go to `names`. `keeps_native`: keep native frames in whose place managed ones stand.
    #[must_use]
    pub fn new(names: Arc<NamedFrames>, keeps_native: bool) -> Self {
        Self {
            state: State::None,
            python: PythonState::Unknown,
            names,
            keeps_native,
            known: HashMap::new(),
            library_since: None,
            pending: None,
            node: None,
            stacks: 0,
            python_stacks: 0,
        }
    }

    /// As [`Self::new`], to be shared.
    #[must_use]
    pub fn shared(names: Arc<NamedFrames>, keeps_native: bool) -> SharedManaged {
        Arc::new(Mutex::new(Self::new(names, keeps_native)))
    }

    /// The process has another image: its runtimes are gone, what was named stays.
    pub fn exec(&mut self) {
        (self.state, self.python) = (State::None, PythonState::Unknown);
        self.known.clear();
        (self.library_since, self.pending, self.node) = (None, None, None);
        (self.stacks, self.python_stacks) = (0, 0);
    }

    /// Looks for runtimes in the process's mappings. A runtime that was not ready is tried again.
    pub fn update(&mut self, process: &Process, maps: &Maps) {
        self.update_python(process, maps);
        self.update_java(process, maps);
        if !matches!(self.node, Some(v8::Names::All)) && v8::is_in(maps) {
            self.node = Some(v8::names(process));
        }
    }

    fn update_python(&mut self, process: &Process, maps: &Maps) {
        let files = maps.executable_files().count();
        match self.python {
            PythonState::Unknown => {}
            PythonState::None(before) if before != files => {}
            PythonState::None(_) | PythonState::Refused(_) | PythonState::Ready(_) => return,
        }
        let memory = || image_memory(process, maps).map_err(cpython::Refusal::Unreadable);
        self.python = match Python::find(process, maps, memory) {
            None => PythonState::None(files),
            Some(Ok(found)) => PythonState::Ready(Box::new(found)),
            Some(Err(refusal)) => PythonState::Refused(refusal),
        };
    }

    fn update_java(&mut self, process: &Process, maps: &Maps) {
        let Some(library) = hotspot::library(maps) else { return };
        match &mut self.state {
            State::Ready(jvm, memory) => {
                if jvm.is_search_due() {
                    jvm.search(&*memory);
                }
            }
            State::Refused(_) => {}
            State::None => match describe(process, maps, library) {
                Ok((starting, memory)) => {
                    self.pending = None;
                    self.state = State::Starting(Box::new(starting), memory, Instant::now());
                    self.begin();
                }
                Err(refusal) => {
                    // A library that was just mapped is not relocated yet, and its variables are not initialized.
                    let since = *self.library_since.get_or_insert_with(Instant::now);
                    let is_final = refusal == Refusal::NoStructures || since.elapsed() >= STARTING_MAX;
                    self.pending = (!is_final).then(|| refusal.clone());
                    if is_final {
                        self.state = State::Refused(refusal);
                    }
                }
            },
            State::Starting(..) => self.begin(),
        }
    }

    /// Tries whether the JVM that was starting is ready.
    fn begin(&mut self) {
        let State::Starting(starting, memory, since) = &mut self.state else { return };
        let is_old = since.elapsed() >= READ_AGAIN;
        let begun = starting.begin(&*memory);
        self.state = match (begun, std::mem::replace(&mut self.state, State::None)) {
            (Ok(jvm), State::Starting(_, memory, _)) => State::Ready(Box::new(jvm), memory),
            // It may have been read while the library was being relocated.
            (Err(Refusal::Starting), _) if is_old => {
                self.pending = Some(Refusal::Starting);
                State::None
            }
            (Err(Refusal::Starting), starting) => starting,
            (Err(refusal), _) => State::Refused(refusal),
            (Ok(_), other) => other,
        };
    }

    /// Whether [`Self::update`] may find more than it did last.
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        match &self.state {
            State::None => self.pending.is_some(),
            State::Starting(..) => true,
            State::Refused(_) => false,
            State::Ready(jvm, _) => jvm.is_search_due(),
        }
    }

    /// Where its frames are named.
    #[must_use]
    pub fn names(&self) -> &Arc<NamedFrames> {
        &self.names
    }

    /// What the unwinder needs.
    #[must_use]
    pub fn code(&self) -> ManagedCode {
        let python = match &self.python {
            PythonState::Ready(ready) => Some(ready.0.record()),
            PythonState::Unknown | PythonState::None(_) | PythonState::Refused(_) => None,
        };
        match &self.state {
            State::Ready(jvm, _) => ManagedCode { mappings: jvm.mappings().collect(), hotspot: Some(jvm.record()), python },
            State::None | State::Starting(..) | State::Refused(_) => ManagedCode { python, ..ManagedCode::default() },
        }
    }

    /// What is known, a sentence for each runtime whose frames could be named.
    #[must_use]
    pub fn describe(&self) -> Vec<String> {
        let node = self.node.map(v8::Names::sentence);
        self.describe_java().into_iter().chain(self.describe_python()).chain(node).collect()
    }

    fn describe_python(&self) -> Option<String> {
        match &self.python {
            PythonState::Unknown | PythonState::None(_) => None,
            PythonState::Refused(refusal) => Some(format!("Python frames are not named: {refusal}")),
            PythonState::Ready(ready) => {
                Some(format!("Python frames are named by function, file and line (CPython {})", ready.0.version()))
            }
        }
    }

    fn describe_java(&self) -> Option<String> {
        match &self.state {
            State::None => self.pending.as_ref().map(|refusal| format!("Java frames are not named: {refusal}")),
            State::Starting(..) => Some(format!("Java frames are not named yet: {}", Refusal::Starting)),
            State::Refused(refusal) => Some(format!("Java frames are not named: {refusal}")),
            State::Ready(jvm, _) => Some(format!("Java frames are named by method, file and line (HotSpot of JDK {})", jvm.version())),
        }
    }

    /// Why frames of runtimes that are there cannot be named.
    #[must_use]
    pub fn refusals(&self) -> Vec<String> {
        let java = if matches!(self.state, State::Refused(_)) { self.describe_java() } else { None };
        let python = if matches!(self.python, PythonState::Refused(_)) { self.describe_python() } else { None };
        let node = self.node.filter(|names| *names != v8::Names::All).map(v8::Names::sentence);
        java.into_iter().chain(python).chain(node).collect()
    }

    /// A Python code object was seen.
    pub fn define_code(&mut self, definition: cpython::Definition<'_>) {
        if let PythonState::Ready(ready) = &mut self.python {
            let (python, memory) = &mut **ready;
            python.define(&*memory, definition);
        }
    }

    /// The Python frames of the stack that is defined next.
    pub fn hold(&mut self, hash: StackHash, frames: &[bpf::PythonFrame], end: u8) {
        if let PythonState::Ready(ready) = &mut self.python {
            ready.0.hold(hash, frames, end);
        }
    }

    /// A stack's words with those of its Python frames; `None` if it has none.
    fn with_python(&mut self, hash: StackHash, words: &[u64]) -> Option<Vec<u64>> {
        let PythonState::Ready(ready) = &mut self.python else { return None };
        let named = ready.0.stack(&self.names, hash, words, self.keeps_native);
        self.stacks += 1;
        self.python_stacks += u64::from(named.is_some());
        named
    }

    /// Says if Python frames were read, and no stack had one: its evaluation loop may not be where its file says.
    #[must_use]
    pub fn nothing_of_python(&self) -> Option<String> {
        let PythonState::Ready(ready) = &self.python else { return None };
        (self.stacks > 0 && self.python_stacks == 0).then(|| {
            format!(
                "no Python frame is in {}, although it runs CPython {}: no Python code allocated, or this build's frames cannot be read",
                counted(self.stacks, "call stack"),
                ready.0.version()
            )
        })
    }

    /// Replaces the words of managed frames by those of their names, in place.
    pub fn name(&mut self, words: &mut [u64]) {
        if self.known.len() >= WORDS_MAX {
            self.known.clear();
        }
        for word in words.iter_mut().filter(|word| is_managed(**word)) {
            *word = self.name_one(*word);
        }
    }

    fn name_one(&mut self, word: u64) -> u64 {
        let State::Ready(jvm, memory) = &mut self.state else { return word };
        let identity = jvm.identity(&*memory, word);
        if let Some((_, named)) = self.known.get(&word).filter(|(known, _)| *known == identity) {
            return *named;
        }
        let named = self.names.add(jvm.frames(&*memory, word));
        self.known.insert(word, (identity, named));
        named
    }
}

fn describe(process: &Process, maps: &Maps, library: &crate::process::Mapping) -> Result<(Starting, ImageMemory), Refusal> {
    let memory = image_memory(process, maps).map_err(Refusal::Library)?;
    let starting = Starting::read(process, &memory, library)?;
    Ok((starting, memory))
}

fn image_memory(process: &Process, maps: &Maps) -> Result<ImageMemory, String> {
    let own = Process::open(process.pid()).ok().filter(|own| own.id() == process.id());
    let own = own.ok_or_else(|| "the process has ended".to_owned())?;
    ImageMemory::open(own, maps).map_err(|error| error.to_string())
}

/// Looks for a process's runtimes. Returns what the unwinder needs, and sentences on what is not walked. `are_walked`: the programs can.
#[must_use]
pub fn refresh(managed: &SharedManaged, process: &Process, maps: &Maps, are_walked: bool) -> (ManagedCode, Vec<String>) {
    let mut managed = lock(managed);
    if !are_walked {
        let java = hotspot::library(maps).map(|_| NOT_WALKED.to_owned());
        let python = cpython::is_in(process, maps).then(|| PYTHON_NOT_WALKED.to_owned());
        return (ManagedCode::default(), java.into_iter().chain(python).collect());
    }
    managed.update(process, maps);
    (managed.code(), managed.refusals())
}

/// Whether a frame word is of a managed frame that is not named yet.
fn is_managed(word: u64) -> bool {
    let kind = (word >> FRAME_KIND_BIT) as u32;
    kind != FrameKind::Native as u32 && kind != FrameKind::Named as u32
}

/// A stack's words with names in place of managed frames.
#[must_use]
pub fn named<'a>(managed: &SharedManaged, hash: StackHash, words: &'a [u64]) -> Cow<'a, [u64]> {
    let mut managed = lock(managed);
    let words = managed.with_python(hash, words).map_or(Cow::Borrowed(words), Cow::Owned);
    if !words.iter().any(|&word| is_managed(word)) {
        return words;
    }
    let mut words = words.into_owned();
    managed.name(&mut words);
    Cow::Owned(words)
}
