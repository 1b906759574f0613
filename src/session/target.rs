//! The driver's view of a watched process: its probes, its code, and what is needed to symbolize its stacks after it has ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use crate::allocator::Allocator;
use crate::allocator::footprint::Footprint;
use crate::capture::{AttachFile, AttachSite, Attached, Capture, Slot, TargetLoss};
use crate::emitter::passed::PassedFile;
use crate::emitter::{Emitter, Finder};
use crate::managed::{self, SharedManaged};
use crate::probe::plan::{FilePlan, Planner, SitePlan};
use crate::process::{Maps, Process};
use crate::profile::HeapMoment;
use crate::session::lost_exit::LostExit;
use crate::session::report::heap::{self, Before, HeapPicture, Heaps};
use crate::session::report::sampled_heap::{self, SampledPicture};
use crate::session::shared::Session;
use crate::session::throwing::{ReturnProbePolicy, may_throw, memory_is_limited};
use crate::session::tier::exact::Watched;
use crate::session::walks::moments::Moments;
use crate::session::walks::walker::{WalkTarget, Walked};
use crate::session::{Choice, Error};
use crate::symbol::{AddressSpace, read_perf_map};

/// An allocator in a file of the process: device, inode, allocator.
pub(in crate::session) type FileKey = (u64, u64, Allocator);

/// Maximum number of chunks of the heap at the start that are kept until the end, 4 bytes each. A heap with more is not compared: its
/// memory from before the recording is then part of the unattributed.
pub const START_CHUNKS_MAX: usize = 32 << 20;

/// What a profile says of a process that recorded itself.
pub const IN_PROCESS: &str = "in_process: every allocation and free, by the recorder in the process";

/// The source of a process's figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Source {
    /// Not decided yet.
    #[default]
    Undecided,
    /// Probes on the allocator's functions: every call.
    Functions,
    /// The process's own emitter.
    Emitter,
    /// The preloaded recorder in the process: every call.
    InProcess,
}

/// A watched process as the driver sees it.
pub struct Target {
    pub process: Process,
    pub slot: Slot,
    /// The probed files with their links.
    attached: HashMap<FileKey, Attached>,
    /// The probe that stops it at its entry point, until it has been reached.
    pub entry: Option<Attached>,
    /// Whether it is stopped wherever there is something new to examine.
    pub held: bool,
    /// Whether its children are stopped too, from their birth or their exec on.
    pub held_with_children: bool,
    /// The source that is probed.
    pub source: Source,
    /// Since when its image has been starting: its libraries are loaded one by one, and its emitter does not know yet whether it will be
    /// used. `None` = started.
    pub starting: Option<Instant>,
    /// When watching of the process, or of its image, began.
    pub since: Instant,
    /// The emitters that are listened to, while they are the source.
    pub emitters: Vec<Emitter>,
    /// Since when none of them has seen the process's calls, because they were detached from it; CLOCK_MONOTONIC nanoseconds.
    pub detached_ns: Option<u64>,
    /// The heap at the end, if an emitter is the source.
    pub sampled_heap: Option<SampledPicture>,
    /// When `sampled_heap` was measured.
    pub joined: Instant,
    /// Names of the probed allocators: first the one that serves malloc, then the others in the order found.
    pub allocators: Vec<String>,
    /// The same with their files, as `name in file`.
    pub allocator_files: Vec<String>,
    /// Executable code seen so far.
    pub space: AddressSpace,
    /// Its managed runtimes, shared with the thread that names stacks.
    managed: SharedManaged,
    /// The heap at the end of the recording, if the process was still alive and could be read.
    pub heap: Option<HeapPicture>,
    /// The heap before the recording.
    pub before: Before,
    /// The censuses of the heap during the recording.
    pub moments: Moments,
    /// Number of images that the process had before this one.
    image: u32,
    /// What the allocator that serves malloc adds to a block.
    footprint: Footprint,
    /// Which of its heaps are recorded.
    pub heaps: Heaps,
    /// Whether exceptions may pass its probed returns.
    pub return_probes: ReturnProbePolicy,
    /// Files with functions that throw: the number of functions, and the file.
    throwing: Vec<(usize, String)>,
    pub notes: Vec<String>,
    /// What its runtimes manage beside malloc, by the last census: a sentence each.
    pub managed_beside: Vec<String>,
    /// Children of vfork whose calls in this process's memory were probed.
    pub vfork_children_seen: u64,
    /// Detects its end if the exit record was lost.
    pub lost_exit: LostExit,
    loss: TargetLoss,
    /// The ledger, once the process has ended and its slot is freed.
    pub watched: Option<Watched>,
}

impl Target {
    pub fn new(process: Process, slot: Slot, return_probes: ReturnProbePolicy, managed: SharedManaged) -> Self {
        let mut space = AddressSpace::new(process.pid().0, Vec::new());
        space.set_named(Arc::clone(managed::lock(&managed).names()));
        Self {
            process,
            slot,
            attached: HashMap::new(),
            entry: None,
            held: false,
            held_with_children: false,
            source: Source::default(),
            starting: None,
            since: Instant::now(),
            joined: Instant::now(),
            emitters: Vec::new(),
            detached_ns: None,
            sampled_heap: None,
            allocators: Vec::new(),
            allocator_files: Vec::new(),
            space,
            managed,
            heap: None,
            before: Before::Unknown,
            moments: Moments::default(),
            image: 0,
            footprint: Footprint::default(),
            heaps: Heaps::default(),
            return_probes,
            throwing: Vec::new(),
            notes: Vec::new(),
            managed_beside: Vec::new(),
            vfork_children_seen: 0,
            lost_exit: LostExit::default(),
            loss: TargetLoss::default(),
            watched: None,
        }
    }

    /// The sites of the allocators' probed functions, as seen by a process that shares this one's memory.
    pub fn functions_of(&self, sharing: &Process, planner: &mut Planner) -> Result<Vec<AttachFile>, Error> {
        if self.source != Source::Functions {
            return Ok(Vec::new());
        }
        let plan = planner.plan(sharing)?;
        let probed = plan.files.iter().filter(|file| self.attached.contains_key(&key(file)));
        Ok(probed.map(|file| attach_file(file, |site| self.return_probes.allows(site))).collect())
    }

    /// Number of probed files.
    pub fn probed(&self) -> usize {
        self.attached.len()
    }

    /// Total number of records lost.
    pub fn loss(&self) -> TargetLoss {
        self.loss
    }

    /// Searches for emitters, and decides whether they are the source. The decision is made once per image, or repeatedly while it is
    /// starting. `hears`: whether this kernel's programs can listen.
    pub fn choose_source(&mut self, finder: &mut Finder, choice: Choice, hears: bool) -> Result<(), Error> {
        let starting = self.starting.is_some();
        // A process that has ended has no mappings; its previous source stays valid.
        if !self.process.is_alive() {
            return Ok(());
        }
        if choice == Choice::Functions {
            self.source = Source::Functions;
            return Ok(());
        }
        let found = finder.find(&self.process)?;
        for refused in found.refused {
            self.note(format!("an emitter is ignored: {refused}"));
        }
        if !hears {
            for emitter in found.emitters {
                self.note(format!(
                    "{} is ignored, because this kernel has no attach cookies (Linux 5.17): every call is traced",
                    emitter.describe()
                ));
            }
            self.source = Source::Functions;
            return Ok(());
        }
        // Before a program has started, its sampler does not know yet whether it is in use.
        let (heard, deaf): (Vec<Emitter>, Vec<Emitter>) = found.emitters.into_iter().partition(|emitter| starting || emitter.hears());
        if !starting {
            for emitter in &deaf {
                self.note(format!("{} sees no allocations: it is detached, or another malloc precedes it", emitter.describe()));
            }
        }
        match (self.source, heard.is_empty()) {
            (Source::Functions, false) if !starting => {
                self.note(format!("{} was loaded later: every call is still traced", heard[0].describe()));
                return Ok(());
            }
            (_, true) if choice == Choice::Emitter && !starting => return Err(Error::NoEmitter { pid: self.process.pid() }),
            // Its libraries are loaded one by one; no other source is accepted.
            (_, true) if choice == Choice::Emitter => {
                self.attached.clear();
                self.source = Source::Undecided;
            }
            // Listening began before the emitter could know.
            (Source::Emitter, true) if !deaf.is_empty() => {
                self.attached.clear();
                self.source = Source::Functions;
            }
            (Source::Emitter, true) => {}
            (_, true) => self.source = Source::Functions,
            (before, false) => {
                if before == Source::Functions {
                    self.attached.clear();
                    self.allocators.clear();
                    self.allocator_files.clear();
                }
                self.source = Source::Emitter;
            }
        }
        self.emitters = heard;
        Ok(())
    }

    /// Notices that its emitters were detached from it, or are attached again. A time during which nothing was seen, if one is to be noted:
    /// from when on, and it ends now.
    pub fn look_for_detaching(&mut self, checked_ns: u64) -> Option<u64> {
        if self.source != Source::Emitter || self.starting.is_some() {
            return None;
        }
        let hears: Vec<bool> = self.emitters.iter().filter_map(|emitter| emitter.hears_now(&self.process)).collect();
        match self.detached_ns {
            None if !hears.is_empty() && !hears.contains(&true) => {
                self.detached_ns = Some(checked_ns);
                self.note("the sampler was detached meanwhile: what was allocated and freed since is not known".into());
                Some(checked_ns)
            }
            Some(_) if hears.contains(&true) => self.detached_ns.take(),
            _ => None,
        }
    }

    /// The mean sample distance that the emitter reports; the outer `None` = no emitter is the source.
    pub fn emitter_interval(&self) -> Option<Option<u64>> {
        let says = || self.emitters.iter().find_map(|emitter| emitter.stats).map(|stats| stats.sample_bytes);
        (self.source == Source::Emitter).then(says)
    }

    /// A description of the emitters; empty if they are not the source.
    pub fn source_words(&self) -> String {
        if self.source == Source::InProcess {
            return IN_PROCESS.to_owned();
        }
        if self.source != Source::Emitter {
            return String::new();
        }
        let words: Vec<String> = self.emitters.iter().map(Emitter::describe).collect();
        format!("sampled in the process, {}", words.join(" and "))
    }

    /// The same with the mean sample distance, if the emitter reports it.
    pub fn source_with_interval(&self) -> String {
        let stats = self.emitters.iter().find_map(|emitter| emitter.stats).filter(|_| self.source == Source::Emitter);
        let every = stats.map_or_else(String::new, |stats| format!(", one sample in {}", stats.distance()));
        self.source_words() + &every
    }

    /// Listens to new emitters, and detaches from those that are gone.
    fn hear(&mut self, capture: &Capture) -> Result<(), Error> {
        let key = |emitter: &Emitter| (emitter.identity.device, emitter.identity.inode, Allocator::Other);
        let keys: Vec<FileKey> = self.emitters.iter().map(key).collect();
        self.attached.retain(|attached, _| keys.contains(attached));
        for emitter in &self.emitters {
            if self.attached.contains_key(&key(emitter)) {
                continue;
            }
            // A file may have both providers.
            let files: Vec<PassedFile> = self.emitters.iter().filter(|e| key(e) == key(emitter)).map(|e| e.sites.clone()).collect();
            let attached = capture.attach_passed(self.process.pid(), self.slot, &files)?;
            tracing::debug!("process {}: listening to {}", self.process.pid(), emitter.describe());
            self.attached.insert(key(emitter), attached);
        }
        Ok(())
    }

    /// Examines the code as it is now: attaches to new files with an allocator, detaches from files that are no longer mapped.
    pub fn probe(&mut self, session: &Session, planner: &mut Planner) -> Result<(), Error> {
        let capture = &session.capture;
        let maps = self.process.maps()?;
        session.snapshots().update(&mut self.space, &self.process, &maps);
        self.sync_tables(capture, &maps);
        match self.source {
            Source::Emitter => return self.hear(capture),
            Source::Undecided | Source::InProcess => return Ok(()),
            Source::Functions => {}
        }
        self.look_at_limits(capture);
        let plan = planner.plan(&self.process)?;
        capture.record(self.process.pid(), self.slot)?;
        let keys: Vec<FileKey> = plan.files.iter().map(key).collect();
        self.attached.retain(|attached, _| keys.contains(attached));
        for file in &plan.files {
            if file.serves_malloc {
                self.footprint = file.allocator.row().footprint;
            }
            if self.attached.contains_key(&key(file)) {
                continue;
            }
            let throwing = file.sites.iter().filter(|site| may_throw(site)).count();
            if throwing > 0 {
                self.throwing.push((throwing, file.display_path.display().to_string()));
            }
            let sites = attach_file(file, |site| self.return_probes.allows(site));
            let attached = capture.attach(self.process.pid(), self.slot, &[sites])?;
            self.attached.insert(key(file), attached);
            self.name_allocator(file);
        }
        for note in plan.notes {
            self.note(note);
        }
        self.say_what_is_passed_over();
        Ok(())
    }

    fn name_allocator(&mut self, file: &FilePlan) {
        let name = file.allocator.name().to_owned();
        if !self.allocators.contains(&name) {
            // The allocator that serves malloc comes first.
            let place = if file.serves_malloc { 0 } else { self.allocators.len() };
            self.allocator_files.insert(place, format!("{name} in {}", file.display_path.display()));
            self.allocators.insert(place, name);
        }
    }

    /// Stores which allocators it has, of which none is probed.
    pub fn name_allocators(&mut self, files: &[FilePlan]) {
        for file in files {
            if file.serves_malloc {
                self.footprint = file.allocator.row().footprint;
            }
            self.name_allocator(file);
        }
    }

    /// Brings the unwinder's tables up to date.
    fn sync_tables(&mut self, capture: &Capture, maps: &Maps) {
        let (code, notes) = managed::refresh(&self.managed, &self.process, maps, capture.tables().walks_managed());
        if let Err(error) = capture.tables().sync_managed(&self.process, self.process.pid().0, maps, &code) {
            self.note(format!("no unwind tables: {error}"));
        }
        notes.into_iter().for_each(|note| self.note(note));
    }

    /// Looks again for a managed runtime that was starting, or had not everything yet.
    pub fn look_for_runtimes(&mut self, session: &Session) {
        if managed::lock(&self.managed).is_unfinished()
            && let Ok(maps) = self.process.maps()
        {
            self.sync_tables(&session.capture, &maps);
        }
    }

    /// Checks whether its memory is limited by now: from then on an exception of operator new must be able to pass.
    pub fn look_at_limits(&mut self, capture: &Capture) {
        let limited = memory_is_limited(&self.process);
        if limited != self.return_probes.limited {
            self.return_probes.limited = limited;
            capture.limit(self.slot, limited);
            self.say_what_is_passed_over();
        }
    }

    fn say_what_is_passed_over(&mut self) {
        let sentences: Vec<String> = self.throwing.iter().filter_map(|(count, place)| self.return_probes.sentence(*count, place)).collect();
        for sentence in sentences {
            self.note(sentence);
        }
    }

    /// Adds a note once.
    pub fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Its notes, with those on what was managed in it.
    pub fn every_note(&self) -> impl Iterator<Item = String> {
        let python = managed::lock(&self.managed).nothing_of_python();
        self.notes.iter().chain(&self.managed_beside).cloned().chain(python)
    }

    /// The process has a new image; its probes in files that the old one mapped too still work.
    pub fn exec(&mut self) {
        if let Ok(process) = Process::open(self.process.pid()) {
            self.process = process;
        }
        self.image += 1;
        managed::lock(&self.managed).exec();
        self.since = Instant::now();
        self.sampled_heap = None;
        self.before = Before::Nothing;
        self.moments = Moments::default();
        // The new image may have another source.
        self.source = Source::Undecided;
        self.starting = Some(Instant::now());
    }

    /// The heap to walk.
    pub fn walk_target(&self) -> WalkTarget {
        WalkTarget { pid: self.process.pid(), image: self.image, heaps: self.heaps }
    }

    /// Takes the result of the census at the start.
    pub fn started_with(&mut self, walked: Walked, after_ms: u64, chunks_max: Option<usize>) {
        let Some(taken) = walked.taken else { return };
        tracing::debug!("census of process {} at its start, after {after_ms} ms", self.process.pid());
        self.moments.at_start = Some(HeapMoment { after_ms, recorded_live_bytes: 0, heap: heap::summary(&taken) });
        match Before::of(taken, chunks_max.unwrap_or(START_CHUNKS_MAX)) {
            Ok(before) => self.before = before,
            Err(chunks) => {
                self.note(format!("the heap at the start had {chunks} chunks, more than the limit: they are part of [unattributed]"));
            }
        }
    }

    /// The last examination of its code and its memory, which needs a live process.
    pub fn look_at_the_end(&mut self, session: &Session) {
        // A process that has just ended keeps what was seen of it before.
        match self.process.maps() {
            Ok(maps) => session.snapshots().update(&mut self.space, &self.process, &maps),
            Err(error) => tracing::debug!("{error}"),
        }
        self.read_perf_map();
    }

    /// Reads what names its generated code; of a process that has ended, from the file that was found before.
    pub fn read_perf_map(&mut self) {
        read_perf_map(&mut self.space, &self.process);
    }

    /// The heap as it is now, joined with the ledger; `with_owners` also determines what holds the memory that no stack owns.
    pub fn look_at_the_heap(&mut self, after_ms: u64, with_owners: bool) {
        self.look_at_all_heaps(after_ms, with_owners);
        let managed = heap::managed_beside(self.process.pid(), self.heaps);
        if !managed.is_empty() {
            self.managed_beside = managed;
        }
    }

    fn look_at_all_heaps(&mut self, after_ms: u64, with_owners: bool) {
        let Some(watched) = &mut self.watched else { return };
        if let Some(ledger) = &mut watched.sampled {
            match sampled_heap::picture(self.process.pid(), ledger, &self.before, with_owners) {
                Ok(picture) => self.sampled_heap = Some(picture),
                Err(reason) => self.note(format!("no census was joined: {reason}")),
            }
            return;
        }
        let recorded_live_bytes = watched.ledger.totals().live_bytes;
        let (ledger, extents) = (&mut watched.ledger, &mut watched.space.extents);
        self.heap = heap::picture(self.process.pid(), ledger, extents, self.footprint, &self.before, with_owners, self.heaps);
        if let Some(picture) = self.heap.as_ref().filter(|picture| picture.attribution.is_some()) {
            self.moments.at_height(HeapMoment { after_ms, recorded_live_bytes, heap: picture.summary });
        }
    }

    /// Detaches all probes.
    pub fn detach(&mut self) {
        drop(self.take_probes());
    }

    /// Removes and returns all probes.
    pub fn take_probes(&mut self) -> Vec<Attached> {
        self.attached.drain().map(|(_, attached)| attached).chain(self.entry.take()).collect()
    }

    /// Allocation, free and other records lost since the last call; `None` if none were.
    pub fn new_losses(&mut self, capture: &Capture) -> Option<(u64, u64, u64)> {
        self.losses_since(capture.loss(self.slot))
    }

    /// The same, given what was lost in all.
    pub fn losses_since(&mut self, loss: TargetLoss) -> Option<(u64, u64, u64)> {
        let before = std::mem::replace(&mut self.loss, loss);
        let new = (
            loss.allocations.saturating_sub(before.allocations),
            loss.frees.saturating_sub(before.frees),
            loss.others.saturating_sub(before.others),
        );
        if new.1 > 0 {
            self.moments.lost();
        }
        (new != (0, 0, 0)).then_some(new)
    }
}

pub(in crate::session) fn key(file: &FilePlan) -> FileKey {
    (file.identity.device, file.identity.inode, file.allocator)
}

pub(in crate::session) fn attach_file(file: &FilePlan, wanted: impl Fn(&SitePlan) -> bool) -> AttachFile {
    let sites = file.sites.iter().filter(|site| wanted(site)).map(|site| AttachSite {
        offset: site.offset,
        cookie: site.cookie.encode(0),
        with_return: site.cookie.op.needs_return(),
    });
    AttachFile { path: file.attach_path.clone(), sites: sites.collect() }
}
