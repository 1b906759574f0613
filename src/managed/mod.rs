//! Frames of managed runtimes: what the unwinder needs to walk them, and their names.
//!
//! ```text
//! process ─ Managed::update ─→ hotspot::Jvm ─→ Code ─→ the process's mapping table (capture::tables)
//! stack's frame words ─ Managed::name ─→ hotspot::Jvm::frames ─→ NamedFrames (symbol) ─→ the ledger's words
//! ```
//!
//! A stack is named when it is first defined, seconds at most after it was taken, because a runtime frees and replaces its code: its frame words
//! are replaced by numbers of names, which stay.

pub mod hotspot;
pub mod memory;

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hotspot::{Jvm, Refusal, Starting};
use memory::ImageMemory;

use crate::bpf::{FRAME_KIND_BIT, FrameKind};
use crate::machine::Machine;
use crate::process::{Maps, Process};
use crate::symbol::NamedFrames;
use crate::unwind::mappings::ManagedCode;

/// After this time the description of a runtime that is starting is read again.
const READ_AGAIN: Duration = Duration::from_secs(2);
/// How long a runtime whose description cannot be read may be starting.
const STARTING_MAX: Duration = Duration::from_secs(10);

/// Words whose names are kept.
const WORDS_MAX: usize = 1 << 20;

/// Why frames are not walked on old kernels.
pub const NOT_WALKED: &str = "Java frames are not named: the programs for kernels before 5.17 do not walk them";

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

/// The managed runtimes of one image of a process.
#[derive(Debug)]
pub struct Managed {
    state: State,
    names: Arc<NamedFrames>,
    /// Words that are named already, with what they were recognised by.
    known: HashMap<u64, (u64, u64)>,
    /// When a runtime's library was first seen, and why it could not be used yet.
    library_since: Option<Instant>,
    pending: Option<Refusal>,
}

impl Managed {
    /// None are known yet; names go to `names`.
    #[must_use]
    pub fn new(names: Arc<NamedFrames>) -> Self {
        Self { state: State::None, names, known: HashMap::new(), library_since: None, pending: None }
    }

    /// As [`Self::new`], to be shared.
    #[must_use]
    pub fn shared(names: Arc<NamedFrames>) -> SharedManaged {
        Arc::new(Mutex::new(Self::new(names)))
    }

    /// The process has another image: its runtimes are gone, what was named stays.
    pub fn exec(&mut self) {
        self.state = State::None;
        self.known.clear();
        (self.library_since, self.pending) = (None, None);
    }

    /// Looks for runtimes in the process's mappings. A runtime that was not ready is tried again.
    pub fn update(&mut self, process: &Process, maps: &Maps) {
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
        match &self.state {
            State::Ready(jvm, _) => ManagedCode { mappings: jvm.mappings().collect(), hotspot: Some(jvm.record()) },
            State::None | State::Starting(..) | State::Refused(_) => ManagedCode::default(),
        }
    }

    /// What is known, as a sentence; `None` = there is no runtime whose frames could be named.
    #[must_use]
    pub fn describe(&self) -> Option<String> {
        match &self.state {
            State::None => self.pending.as_ref().map(|refusal| format!("Java frames are not named: {refusal}")),
            State::Starting(..) => Some(format!("Java frames are not named yet: {}", Refusal::Starting)),
            State::Refused(refusal) => Some(format!("Java frames are not named: {refusal}")),
            State::Ready(jvm, _) => Some(format!("Java frames are named by method, file and line (HotSpot of JDK {})", jvm.version())),
        }
    }

    /// Why frames of a runtime that is there cannot be named; `None` = they are, or there is none, or it is starting.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        match &self.state {
            State::Refused(_) => self.describe(),
            State::Starting(..) | State::None | State::Ready(..) => None,
        }
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
    if Machine::HOST != Machine::X86_64 {
        return Err(Refusal::Library("Java frames are walked on x86-64 only".to_owned()));
    }
    let own = Process::open(process.pid()).ok().filter(|own| own.id() == process.id());
    let memory = own.ok_or_else(|| Refusal::Library("the process has ended".to_owned()));
    let memory = ImageMemory::open(memory?, maps).map_err(|error| Refusal::Library(error.to_string()))?;
    let starting = Starting::read(process, &memory, library)?;
    Ok((starting, memory))
}

/// Looks for a process's runtimes. Returns what the unwinder needs, and sentences on what is not walked. `are_walked`: the programs can.
#[must_use]
pub fn refresh(managed: &SharedManaged, process: &Process, maps: &Maps, are_walked: bool) -> (ManagedCode, Option<String>) {
    let mut managed = lock(managed);
    if !are_walked {
        let note = hotspot::library(maps).map(|_| NOT_WALKED.to_owned());
        return (ManagedCode::default(), note);
    }
    managed.update(process, maps);
    (managed.code(), managed.refusal())
}

/// Whether a frame word is of a managed frame that is not named yet.
fn is_managed(word: u64) -> bool {
    let kind = (word >> FRAME_KIND_BIT) as u32;
    kind != FrameKind::Native as u32 && kind != FrameKind::Named as u32
}

/// A stack's words with names in place of managed frames.
#[must_use]
pub fn named<'a>(managed: &SharedManaged, words: &'a [u64]) -> Cow<'a, [u64]> {
    if !words.iter().any(|&word| is_managed(word)) {
        return Cow::Borrowed(words);
    }
    let mut words = words.to_vec();
    lock(managed).name(&mut words);
    Cow::Owned(words)
}
