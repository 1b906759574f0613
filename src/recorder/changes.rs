//! What changes under a recording: children, new images, new code, ended processes.

use super::sink::{Notice, lock};
use super::target::Target;
use super::{Error, Recorder, launch, monotonic_ns};
use crate::capture::Slot;
use crate::target::Process;
use crate::units::Pid;

impl Recorder {
    pub(super) fn act(&mut self, notice: Notice) {
        let slot = notice.slot();
        // A process whose end was noticed before: its row may be another's by now. Its children live on.
        let is_stale = self.targets.get(&slot.index).is_none_or(|target| target.slot != slot);
        if is_stale && !matches!(notice, Notice::Fork { .. }) {
            return;
        }
        match notice {
            Notice::Fork { child, .. } => self.meet_child(slot, child),
            Notice::Exec { .. } => self.new_image(slot.index),
            Notice::Exit { .. } => self.retire(slot.index),
            Notice::Mapped { .. } => self.new_code(slot.index),
            Notice::NeedTable { pc, .. } => {
                tracing::debug!("slot {}: no unwind table at {pc}", slot.index);
                self.new_code(slot.index);
            }
        }
    }

    fn meet_child(&mut self, parent: Slot, child: Pid) {
        if !self.options.follow_children {
            self.children_ignored += 1;
            return;
        }
        let parent = self.targets.values().chain(&self.ended).find(|target| target.slot == parent);
        let Some((shard, before)) = parent.map(|target| (target.shard, target.before.clone())) else { return };
        let inherited = lock(&self.shards[shard]).inherited.remove(&child);
        let forked_ns = monotonic_ns();
        let before = inherited.is_some().then_some(before);
        let watched = Process::open(child).map_err(Error::from).and_then(|process| self.register(process, inherited, None));
        let slot = match watched {
            Ok(slot) => {
                // What the parent had before the recording, its copy has too.
                if let (Some(target), Some(before)) = (self.targets.get_mut(&slot), before) {
                    target.before = before;
                }
                slot
            }
            Err(error) => {
                self.notes.push(format!("child {child} was not watched: {error}"));
                return;
            }
        };
        // A child of vfork still runs in its parent's memory: its own begins with the exec, which is noticed.
        if let Err(error) = self.probe(slot) {
            tracing::debug!("child {child}: {error}");
        }
        self.switch_on(slot);
        self.gap(slot, forked_ns);
    }

    fn new_image(&mut self, slot: u16) {
        let began_ns = monotonic_ns();
        let launched = self.launched.as_ref().map(launch::Launched::pid);
        let Some(target) = self.targets.get_mut(&slot) else { return };
        // A command stands still at its exec, and was looked at there.
        if launched == Some(target.process.pid()) {
            return;
        }
        target.exec();
        let probed_before = target.probed();
        match self.probe(slot) {
            Ok(()) => {}
            Err(error) => self.notes.push(format!("after an exec: {error}")),
        }
        // What shares its allocator's file with the old image was probed all along.
        if self.targets.get(&slot).is_some_and(|target| target.probed() != probed_before) {
            self.gap(slot, began_ns);
        }
    }

    pub(super) fn new_code(&mut self, slot: u16) {
        let began_ns = monotonic_ns();
        let Some(before) = self.targets.get(&slot).map(Target::probed) else { return };
        if let Err(error) = self.probe(slot) {
            tracing::debug!("new code: {error}");
        }
        if self.targets.get(&slot).is_some_and(|target| target.probed() > before) {
            self.notes.push(format!(
                "process {}: a library with an allocator of its own was loaded and probed {:.1} s into the recording; its first allocations may be missing",
                self.targets.get(&slot).map_or(Pid(0), |target| target.process.pid()),
                self.started.elapsed().as_secs_f64()
            ));
            self.gap(slot, began_ns);
        }
    }

    /// From `start_ns` until now not everything of the process was seen.
    fn gap(&mut self, slot: u16, start_ns: u64) {
        let Some(target) = self.targets.get(&slot) else { return };
        if let Some(watched) = lock(&self.shards[target.shard]).watched.get_mut(&slot) {
            watched.gap(start_ns, monotonic_ns());
        }
    }

    /// The process is gone: its slot goes to the next one, its books stay.
    pub(super) fn retire(&mut self, slot: u16) {
        self.check_losses();
        let Some(mut target) = self.targets.remove(&slot) else { return };
        target.detach(&self.capture);
        target.books = lock(&self.shards[target.shard]).watched.remove(&slot);
        if let Err(error) = self.capture.remove_target(target.process.pid(), target.slot) {
            tracing::warn!("{error}");
        }
        self.ended.push(target);
    }
}
