//! Changes during a recording: children, new images, new code, ended processes.

use crate::capture::Slot;
use crate::process::Process;
use crate::session::report::heap::Before;
use crate::session::sink::{Inherited, Notice, lock};
use crate::session::target::Target;
use crate::session::{Error, Recorder, monotonic_ns};
use crate::units::Pid;

impl Recorder {
    pub(in crate::session) fn act(&mut self, notice: Notice) {
        // Processes that are stopped are examined before the next notice.
        let Some(slot) = notice.slot() else { return };
        // The end of this process was noticed before: another process may have its slot by now. Its children are still alive.
        let is_stale = self.targets.get(&slot.index).is_none_or(|target| target.slot != slot);
        if is_stale && !matches!(notice, Notice::Fork { .. }) {
            return;
        }
        match notice {
            Notice::Fork { child, .. } => self.meet_child(slot, child),
            Notice::Exit { .. } => self.retire(slot.index),
            // The process was stopped there, and has been examined.
            Notice::Exec { .. } if self.is_held(slot.index) => {}
            Notice::Mapped { held: true, .. } => {}
            Notice::Exec { time_ns, .. } => self.new_image(slot.index, time_ns),
            Notice::Mapped { held: false, time_ns, .. } => self.mapped_freely(slot.index, time_ns),
            Notice::Stands => {}
            Notice::NeedTable { pc, .. } => {
                tracing::debug!("slot {}: no unwind table at {pc}", slot.index);
                self.missing_table(slot.index);
            }
        }
    }

    /// A child that was not stopped at its birth, so some of its events were missed.
    fn meet_child(&mut self, parent: Slot, child: Pid) {
        if !self.options.follow_children {
            self.children_ignored += 1;
            return;
        }
        let parent = self.targets.values().chain(&self.ended).find(|target| target.slot == parent);
        let Some(parent) = parent else { return };
        // It is stopped, or will be at its exec, and is examined there; or it was and has ended. A child that was forked before its parent
        // was traced is not stopped.
        if parent.held_with_children && Process::open(child).map_or(true, |process| process.is_traced_by_us()) {
            return;
        }
        let before = parent.before.clone();
        let inherited = lock(&self.shard).inherited.remove(&child).flatten();
        let forked_ns = monotonic_ns();
        let before = inherited.is_some().then_some(before);
        let Some(slot) = self.register_child(child, inherited, before, None) else { return };
        // A child of vfork still runs in its parent's memory. Its own memory begins with the exec, which is reported.
        if let Err(error) = self.probe(slot) {
            tracing::debug!("child {child}: {error}");
        }
        self.switch_on(slot);
        self.gap(slot, forked_ns);
    }

    /// Registers a child with its initial ledger. `before`: the parent's heap before the recording, if the child has it too.
    /// `free_at_start`: as for [`register`](Self::register).
    pub(in crate::session) fn register_child(
        &mut self,
        child: Pid,
        inherited: Option<Inherited>,
        before: Option<Before>,
        free_at_start: Option<u64>,
    ) -> Option<u16> {
        let registered = Process::open(child).map_err(Error::from).and_then(|process| self.register(process, inherited, free_at_start));
        let slot = match registered {
            Ok(slot) => slot,
            Err(error) => {
                self.unwatched_children += 1;
                self.notes.push(format!("child {child} could not be watched: {error}"));
                return None;
            }
        };
        let target = self.targets.get_mut(&slot)?;
        if let Some(before) = before {
            target.before = before;
        }
        // An exec is reported only from now on. An earlier one has discarded all inherited memory.
        if target.process.has_executed() {
            target.before = Before::Nothing;
            if let Some(watched) = lock(&self.shard).watched.get_mut(&slot) {
                watched.inherits_nothing(monotonic_ns());
            }
        }
        Some(slot)
    }

    /// `since_ns`: when the process executed the image.
    fn new_image(&mut self, slot: u16, since_ns: u64) {
        let Some(target) = self.targets.get_mut(&slot) else { return };
        target.exec();
        let probed_before = target.probed();
        match self.probe(slot) {
            Ok(()) => {}
            Err(error) => self.notes.push(format!("after an exec: {error}")),
        }
        // Files that the old image also mapped, and their probes, were in place throughout.
        if self.targets.get(&slot).is_some_and(|target| target.probed() != probed_before) {
            self.gap(slot, since_ns);
        }
    }

    /// A process that was not stopped has mapped code at `since_ns`.
    fn mapped_freely(&mut self, slot: u16, since_ns: u64) {
        // Whatever the code was, it ran unobserved until the process ended.
        if !self.new_code(slot, since_ns) && self.targets.get(&slot).is_some_and(|target| !target.process.is_alive()) {
            self.gap(slot, since_ns);
        }
    }

    /// There may be code in a process that was mapped since `since_ns` and not examined yet. Returns whether it has an allocator; if so,
    /// the time since then is recorded as not observed.
    pub(in crate::session) fn new_code(&mut self, slot: u16, since_ns: u64) -> bool {
        let Some(before) = self.targets.get(&slot).map(Target::probed) else { return false };
        if let Err(error) = self.probe(slot) {
            tracing::debug!("new code: {error}");
        }
        let is_new = self.targets.get(&slot).is_some_and(|target| target.probed() > before);
        if is_new {
            self.notes.push(format!(
                "process {}: a library with an allocator of its own was loaded and probed {:.1} s into the recording; its first \
                 allocations may be missing",
                self.targets.get(&slot).map_or(Pid(0), |target| target.process.pid()),
                self.started.elapsed().as_secs_f64()
            ));
            self.gap(slot, since_ns);
        }
        is_new
    }

    /// A walk met code without an unwind table. A process that follows its mappings may be stopped at that code by now: then nothing was
    /// missed.
    fn missing_table(&mut self, slot: u16) {
        if !self.is_held(slot) {
            self.new_code(slot, monotonic_ns());
        } else if let Err(error) = self.probe(slot) {
            tracing::debug!("code without a table: {error}");
        }
    }

    /// From `start_ns` until now the process was not observed completely.
    pub(in crate::session) fn gap(&mut self, slot: u16, start_ns: u64) {
        if let Some(watched) = lock(&self.shard).watched.get_mut(&slot) {
            watched.gap(start_ns, monotonic_ns());
        }
    }

    /// The process has ended: its slot is freed, its ledger is kept.
    pub(in crate::session) fn retire(&mut self, slot: u16) {
        self.check_losses();
        let Some(mut target) = self.targets.remove(&slot) else { return };
        self.vfork_children_lose(slot);
        // Detaching takes the kernel a while, during which another process may be stopped and waiting.
        for attached in target.take_probes() {
            drop(self.reaper.take_out(attached));
        }
        target.watched = lock(&self.shard).watched.remove(&slot);
        target.read_perf_map();
        self.remove(&target);
        self.ended.push(target);
    }
}
