//! Processes that are stopped for an examination: at their birth, their exec, where they map code, and at their entry point (tracer.rs).

use std::time::{Duration, Instant};

use super::launch;
use crate::capture::{AttachFile, AttachSite, Attached};
use crate::probe::cookie::OP_ENTRY;
use crate::process::{MappedFile, Process};
use crate::session::attach::tracer::{At, Stop};
use crate::session::report::heap::Before;
use crate::session::sink::{Notice, lock};
use crate::session::{Error, Recorder};
use crate::units::{Addr, Pid};

/// Maximum wait for a fork's record, which was sent before the child was reported; the ring is read every 5 ms.
const LEDGER_WITHIN: Duration = Duration::from_millis(500);
/// Interval between two checks for it.
const LEDGER_POLL: Duration = Duration::from_micros(200);
/// Maximum wait for the unwind tables of new code: those of the largest libraries take a second on a busy machine.
const TABLES_WITHIN: Duration = Duration::from_secs(5);

/// A child of vfork with probes of its own.
#[derive(Debug)]
pub(in crate::session) struct VforkChild {
    process: Process,
    /// The slot of the target in whose memory it runs.
    slot: u16,
    attached: Attached,
}

impl Recorder {
    /// Follows the children of the processes watched by now: none of them runs before it is probed.
    ///
    /// # Errors
    /// If the thread for it cannot be started.
    pub fn hold_children(&mut self) -> Result<(), Error> {
        let pids = self.targets.values().map(|target| target.process.pid()).collect();
        let (followed, refused) = launch::follow(pids, self.wake())?;
        for target in self.targets.values_mut() {
            match refused.iter().find(|(pid, _)| *pid == target.process.pid()) {
                Some((_, error)) => {
                    target.note(format!("it cannot be traced ({error}): its children are probed some milliseconds after they start"));
                }
                None => {
                    (target.held, target.held_with_children) = (true, true);
                    self.session.capture.hold(target.slot, true);
                }
            }
        }
        self.followed = Some(followed);
        Ok(())
    }

    /// A callback that tells this thread that a process is stopped.
    pub(in crate::session) fn wake(&self) -> launch::Wake {
        let notice = self.notice.clone();
        // If the channel is full, this thread wakes up anyway.
        Box::new(move || {
            let _ = notice.try_send(Notice::Stands);
        })
    }

    pub(in crate::session) fn is_held(&self, slot: u16) -> bool {
        self.targets.get(&slot).is_some_and(|target| target.held)
    }

    /// Examines all stopped processes.
    pub(in crate::session) fn look_at_the_held(&mut self) {
        while let Some(look) = self.followed.as_ref().and_then(|followed| followed.looks().try_recv().ok()) {
            let (pid, at) = (look.pid, look.at);
            if let Err(error) = self.look(look) {
                if at == At::Entry {
                    self.notes.push(format!("process {pid}, after an exec: {error}"));
                } else {
                    tracing::debug!("process {pid} at {at:?}: {error}");
                }
            }
        }
    }

    /// Probes what is new in a stopped process, and resumes it.
    pub(in crate::session) fn look(&mut self, mut look: Stop) -> Result<(), Error> {
        let slot = self.targets.iter().find(|(_, target)| target.process.pid() == look.pid).map(|(slot, _)| *slot);
        let slot = match look.at {
            At::Birth { parent } => self.born(parent, look.pid),
            At::BirthInMemory { parent } => return self.born_in_memory(parent, look.pid),
            At::NewImage { entry } => {
                self.vfork_child_has_left(look.pid);
                self.held_image(slot, entry, &mut look)
            }
            At::Code => slot,
            At::Entry => {
                let target = slot.and_then(|slot| self.targets.get_mut(&slot));
                if let Some(target) = target {
                    target.starting = None;
                    if let Some(entry) = target.entry.take() {
                        drop(self.reaper.take_out(entry));
                    }
                }
                slot
            }
        };
        let Some(slot) = slot else { return Ok(()) };
        let probed = self.probe(slot);
        if !self.session.capture.tables().wait_until_loaded(TABLES_WITHIN) {
            tracing::warn!("process {}: it is resumed before all its unwind tables are loaded", look.pid);
        }
        probed
    }

    /// A child that has not run yet gets a copy of its parent's ledger at the fork.
    fn born(&mut self, parent: Pid, child: Pid) -> Option<u16> {
        let parent = self.targets.values().chain(&self.ended).find(|target| target.process.pid() == parent);
        let before = parent.map_or(Before::Unknown, |parent| parent.before.clone());
        let deadline = Instant::now() + LEDGER_WITHIN;
        let inherited = loop {
            let told = lock(&self.shard).inherited.remove(&child);
            match told {
                Some(inherited) => break inherited,
                None if Instant::now() < deadline => std::thread::sleep(LEDGER_POLL),
                None => {
                    self.notes.push(format!("child {child}: the record of its fork was lost: its inherited memory is unattributed"));
                    break None;
                }
            }
        };
        let before = inherited.is_some().then_some(before);
        let slot = self.register_child(child, inherited, before, None)?;
        self.mark_held(slot);
        Some(slot)
    }

    /// A child of vfork that has not run yet: its calls in its parent's memory are attributed to the parent.
    fn born_in_memory(&mut self, parent: Pid, child: Pid) -> Result<(), Error> {
        let of_child = self.vfork_children.get(&parent).map(|born| born.slot);
        let slot = of_child.or_else(|| self.targets.iter().find(|(_, target)| target.process.pid() == parent).map(|(slot, _)| *slot));
        let Some(target) = slot.and_then(|slot| self.targets.get_mut(&slot)) else { return Ok(()) };
        if self.session.capture.offer().sees_vfork_children {
            target.vfork_children_seen += 1;
            return Ok(());
        }
        let process = Process::open(child)?;
        let files = target.functions_of(&process, &mut self.planner)?;
        if files.is_empty() {
            return Ok(());
        }
        let attached = self.session.capture.attach_vfork_child(child, target.slot, &files)?;
        target.vfork_children_seen += 1;
        self.vfork_children.insert(child, VforkChild { process, slot: target.slot.index, attached });
        Ok(())
    }

    /// Detaches the probes of a vfork child that has executed a program or ended.
    fn vfork_child_has_left(&mut self, child: Pid) {
        if let Some(left) = self.vfork_children.remove(&child) {
            drop(self.reaper.take_out(left.attached));
        }
    }

    /// Detaches the probes of those that ended without an exec.
    pub(in crate::session) fn check_vfork_children(&mut self) {
        let ended: Vec<Pid> = self.vfork_children.iter().filter(|(_, child)| !child.process.is_alive()).map(|(pid, _)| *pid).collect();
        for child in ended {
            self.vfork_child_has_left(child);
        }
    }

    /// A child of vfork may outlive the process in whose memory it runs. Its probes are detached before the slot is reused.
    pub(in crate::session) fn vfork_children_lose(&mut self, slot: u16) {
        self.vfork_children.retain(|_, child| child.slot != slot);
    }

    fn mark_held(&mut self, slot: u16) {
        self.switch_on(slot);
        if let Some(target) = self.targets.get_mut(&slot) {
            (target.held, target.held_with_children) = (true, self.options.follow_children);
            self.session.capture.hold(target.slot, true);
        }
    }

    /// A new image that has not run any instruction. A child of vfork becomes a target here.
    fn held_image(&mut self, known: Option<u16>, entry: Option<u64>, look: &mut Stop) -> Option<u16> {
        let slot = match known {
            Some(slot) => {
                self.targets.get_mut(&slot)?.exec();
                slot
            }
            None => {
                lock(&self.shard).inherited.remove(&look.pid);
                self.register_child(look.pid, None, Some(Before::Nothing), Some(0))?
            }
        };
        self.mark_held(slot);
        let target = self.targets.get_mut(&slot)?;
        target.starting = Some(Instant::now());
        if traces_others(&target.process) {
            look.leave_children();
            target.held_with_children = false;
        }
        let held = entry.ok_or_else(|| "the address is not known".to_owned()).and_then(|entry| entry_site(&target.process, Addr(entry)));
        let attached = held.and_then(|site| {
            let attached = self.session.capture.attach(target.process.pid(), target.slot, &[site]);
            attached.map_err(|error| error.to_string())
        });
        match attached {
            Ok(attached) => {
                if let Some(before) = target.entry.replace(attached) {
                    drop::<Attached>(before);
                }
            }
            Err(error) => tracing::debug!("process {} is not stopped at its entry point: {error}", look.pid),
        }
        Some(slot)
    }
}

/// The probe that stops a process at its entry point.
fn entry_site(process: &Process, entry: Addr) -> Result<AttachFile, String> {
    let maps = process.maps().map_err(|error| error.to_string())?;
    let mapping = maps.find(entry).ok_or("the address is not mapped")?;
    let offset = mapping.offset_of(entry).ok_or("the address is not mapped")?;
    let file = MappedFile::open(process, mapping).map_err(|error| error.to_string())?;
    Ok(AttachFile { path: file.attach_path, sites: vec![AttachSite { offset, cookie: OP_ENTRY, with_return: false }] })
}

/// Whether it may want to trace its children itself, as debuggers do: a process can have only one tracer.
fn traces_others(process: &Process) -> bool {
    let Ok(maps) = process.maps() else { return false };
    let Some(program) = maps.mappings.iter().find(|mapping| mapping.path().is_some()) else { return false };
    MappedFile::open(process, program).is_ok_and(|file| file.elf.linkage_slots().iter().any(|(_, name)| name == b"ptrace"))
}
