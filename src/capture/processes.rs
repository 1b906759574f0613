//! The targets of a process: each recording that watches it has one, with its own slot.
//!
//! Probes of two targets on the same functions would see each other's open calls (bpf/thread.bpf.h) and take them for their own. So a
//! recording of every call closes the windows of all others; everything else (emitters, address space changes) does not conflict.

use std::collections::HashMap;

use super::Slot;
use crate::bpf::{SLOTS_OF_PROCESS, Slots, TARGETS_MAX};
use crate::units::Pid;

/// A process's targets.
#[derive(Debug, Default)]
struct Targets {
    /// Each with its ring's number.
    slots: Vec<(Slot, u32)>,
    /// The one that records every call.
    recorded: Option<Slot>,
    /// Recordings of every call that have begun since it was first watched.
    begun: u64,
}

/// The processes that are watched.
#[derive(Debug)]
pub struct Processes {
    of: HashMap<Pid, Targets>,
    most: usize,
}

/// The process is already watched by the maximum number of recordings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// The maximum.
    pub most: usize,
}

impl Processes {
    /// No process is watched. `most`: maximum number of targets per process, up to [`SLOTS_OF_PROCESS`].
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { of: HashMap::new(), most: most.min(SLOTS_OF_PROCESS as usize) }
    }

    /// Adds a target of a ring to a process. If the ring already has one for this pid, it belonged to an earlier process.
    ///
    /// # Errors
    /// If the process already has the maximum number.
    pub fn add(&mut self, pid: Pid, slot: Slot, shard: u32) -> Result<(), Full> {
        let targets = self.of.entry(pid).or_default();
        targets.slots.retain(|(_, of)| *of != shard);
        targets.recorded.take_if(|recorded| !targets.slots.iter().any(|(slot, _)| slot == recorded));
        if targets.slots.len() >= self.most {
            return Err(Full { most: self.most });
        }
        targets.slots.push((slot, shard));
        Ok(())
    }

    /// Removes a target from a process. Returns whether it had the target, and whether it was the last.
    pub fn remove(&mut self, pid: Pid, slot: Slot) -> Removed {
        let Some(targets) = self.of.get_mut(&pid) else { return Removed::Unknown };
        let before = targets.slots.len();
        targets.slots.retain(|(one, _)| *one != slot);
        if targets.slots.len() == before {
            return Removed::Unknown;
        }
        targets.recorded.take_if(|recorded| *recorded == slot);
        if targets.slots.is_empty() {
            self.of.remove(&pid);
            return Removed::Last;
        }
        Removed::OneOfSeveral
    }

    /// From now on a target records every call. Returns the targets that must be closed.
    ///
    /// # Errors
    /// If another target does so already.
    pub fn record(&mut self, pid: Pid, slot: Slot) -> Result<Vec<Slot>, Full> {
        let Some(targets) = self.of.get_mut(&pid) else { return Ok(Vec::new()) };
        match targets.recorded {
            Some(recorded) if recorded == slot => return Ok(Vec::new()),
            Some(_) => return Err(Full { most: 1 }),
            None => targets.recorded = Some(slot),
        }
        targets.begun += 1;
        Ok(targets.slots.iter().map(|(one, _)| *one).filter(|one| *one != slot).collect())
    }

    /// Whether every call of a process is being recorded.
    #[must_use]
    pub fn is_recorded(&self, pid: Pid) -> bool {
        self.of.get(&pid).is_some_and(|targets| targets.recorded.is_some())
    }

    /// How many recordings of every call have begun while it was watched: a change shows that one began and ended in between.
    #[must_use]
    pub fn begun(&self, pid: Pid) -> u64 {
        self.of.get(&pid).map_or(0, |targets| targets.begun)
    }

    /// The row that the programs look up.
    #[must_use]
    pub fn row(&self, pid: Pid) -> Option<Slots> {
        let targets = self.of.get(&pid)?;
        let mut row = Slots { slot: [TARGETS_MAX; SLOTS_OF_PROCESS as usize] };
        for (place, (slot, _)) in row.slot.iter_mut().zip(&targets.slots) {
            *place = u32::from(slot.index);
        }
        Some(row)
    }
}

/// The state of a process after a target was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// The process did not have the target.
    Unknown,
    /// Other targets remain.
    OneOfSeveral,
    /// No target remains.
    Last,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const fn slot(index: u16) -> Slot {
        Slot { index, generation: 1 }
    }

    #[test]
    fn a_process_has_a_limited_number_of_targets_and_its_row_names_them() {
        let mut processes = Processes::new(2);
        processes.add(Pid(7), slot(3), 0).unwrap();
        processes.add(Pid(7), slot(5), 1).unwrap();
        assert_eq!(processes.add(Pid(7), slot(6), 2), Err(Full { most: 2 }));
        assert_eq!(processes.row(Pid(7)).unwrap().slot, [3, 5, TARGETS_MAX, TARGETS_MAX]);
        assert_eq!(processes.remove(Pid(7), slot(6)), Removed::Unknown);
        assert_eq!(processes.remove(Pid(7), slot(3)), Removed::OneOfSeveral);
        assert_eq!(processes.row(Pid(7)).unwrap().slot[0], 5);
        assert_eq!(processes.remove(Pid(7), slot(5)), Removed::Last);
        assert!(processes.row(Pid(7)).is_none());
    }

    #[test]
    fn a_ring_has_only_the_latest_target_of_a_process() {
        let mut processes = Processes::new(4);
        processes.add(Pid(7), slot(3), 0).unwrap();
        processes.add(Pid(7), slot(4), 0).unwrap();
        assert_eq!(processes.row(Pid(7)).unwrap().slot[..2], [4, TARGETS_MAX]);
        assert_eq!(processes.remove(Pid(7), slot(3)), Removed::Unknown);
    }

    #[test]
    fn a_recording_of_every_call_closes_the_others_until_it_ends() {
        let mut processes = Processes::new(4);
        for index in [3, 4, 5] {
            processes.add(Pid(7), slot(index), u32::from(index)).unwrap();
        }
        assert_eq!(processes.record(Pid(7), slot(4)), Ok(vec![slot(3), slot(5)]));
        assert_eq!(processes.record(Pid(7), slot(4)), Ok(vec![]), "it began before");
        assert_eq!(processes.record(Pid(7), slot(5)), Err(Full { most: 1 }));
        assert!(processes.is_recorded(Pid(7)) && !processes.is_recorded(Pid(8)));
        assert_eq!(processes.begun(Pid(7)), 1);
        processes.remove(Pid(7), slot(4));
        assert!(!processes.is_recorded(Pid(7)));
    }
}
