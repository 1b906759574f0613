//! Which allocators to search a process for: a search for all of them reads the data of every object, which takes about ten milliseconds,
//! and most are never found. Pure: times are parameters.
//!
//! What was not found in one process is not searched for in others with the same objects until that program's next search: after 20 s, then
//! at doubling intervals, up to an hour. A new object makes it another program; an allocator that is in the objects but first used later is
//! found by the repeated searches, of each process at least once an hour.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use super::reader;
use crate::allocator::Allocator;
use crate::process::{Maps, ProcessId};

/// Between a program's first search and its second.
const AGAIN_FIRST: Duration = Duration::from_secs(20);
/// Between two searches of a program, and of a process, at most.
const AGAIN_MAX: Duration = Duration::from_secs(3600);
/// Programs and processes remembered: a node has some hundred of the one and some thousand of the other, at about 100 bytes each. Beyond
/// it all are forgotten, and searched again.
const PROGRAMS_MAX: usize = 4096;
const PROCESSES_MAX: usize = 20_000;

/// The objects with writable data that a process has loaded, as one number: equal for two processes of the same files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Program(u64);

/// What earlier searches found.
#[derive(Debug, Default)]
pub struct Searched {
    programs: HashMap<Program, Known>,
    processes: HashMap<ProcessId, (Program, Instant)>,
    hasher: RandomState,
}

#[derive(Debug)]
struct Known {
    found: Vec<Allocator>,
    next: Instant,
    again: Duration,
}

impl Searched {
    /// The program of these mappings.
    #[must_use]
    pub fn program(&self, maps: &Maps) -> Program {
        let is_data = |mapping: &&crate::process::Mapping| mapping.permissions.write && !mapping.permissions.shared && mapping.inode != 0;
        let files: Vec<_> = maps.mappings.iter().filter(is_data).map(|one| (one.device, one.inode, one.offset, one.len())).collect();
        Program(self.hasher.hash_one(files))
    }

    /// The allocators to search this process for.
    #[must_use]
    pub fn wanted(&self, process: ProcessId, program: Program, now: Instant) -> Vec<Allocator> {
        let is_due = |known: &&Known| {
            let own = self.processes.get(&process).filter(|(before, _)| *before == program);
            now >= known.next || own.is_some_and(|(_, at)| now.saturating_duration_since(*at) >= AGAIN_MAX)
        };
        match self.programs.get(&program) {
            Some(known) if !is_due(&known) => known.found.clone(),
            _ => reader::allocators(),
        }
    }

    /// A process was searched for all allocators, and has these.
    pub fn learn(&mut self, process: ProcessId, program: Program, found: &[Allocator], now: Instant) {
        // A process without a heap has only begun: it says nothing of the others.
        if found.is_empty() {
            return;
        }
        if self.programs.len() >= PROGRAMS_MAX {
            self.programs.clear();
        }
        if self.processes.len() >= PROCESSES_MAX {
            self.processes.clear();
        }
        self.processes.insert(process, (program, now));
        let known = self.programs.entry(program).or_insert(Known { found: Vec::new(), next: now, again: AGAIN_FIRST });
        known.found.extend(found.iter().filter(|one| !known.found.contains(one)).copied().collect::<Vec<_>>());
        let order = reader::allocators();
        known.found.sort_unstable_by_key(|one| order.iter().position(|read| read == one));
        known.next = now + known.again;
        known.again = (known.again * 2).min(AGAIN_MAX);
    }

    /// A census was taken of a process without a search of its own: it is due for one an hour after its first census.
    pub fn met(&mut self, process: ProcessId, program: Program, now: Instant) {
        if self.processes.len() >= PROCESSES_MAX {
            self.processes.clear();
        }
        let entry = self.processes.entry(process).or_insert((program, now));
        if entry.0 != program {
            *entry = (program, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Pid;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_ticks: 1 }
    }

    fn maps(address: &str, inode: u32) -> Maps {
        Maps::parse(
            format!("{address}000-{address}fff rw-p 00001000 08:01 {inode} /bin/x\n7ffff0000000-7ffff0001000 rw-p 0 00:00 0 [stack]\n")
                .as_bytes(),
        )
    }

    #[test]
    fn a_program_is_its_files_wherever_they_are_mapped() {
        let searched = Searched::default();
        assert_eq!(searched.program(&maps("5500000001", 7)), searched.program(&maps("7500000001", 7)));
        assert_ne!(searched.program(&maps("5500000001", 7)), searched.program(&maps("5500000001", 8)));
    }

    #[test]
    fn what_was_not_found_is_searched_for_again_at_growing_intervals_and_in_each_process_within_the_hour() {
        let (mut searched, began) = (Searched::default(), Instant::now());
        let program = searched.program(&maps("5500000001", 7));
        let at = |seconds: u64| began + Duration::from_secs(seconds);
        assert_eq!(searched.wanted(process(1), program, at(0)), reader::allocators());
        searched.learn(process(1), program, &[Allocator::Glibc], at(0));
        assert_eq!(searched.wanted(process(2), program, at(19)), [Allocator::Glibc]);
        searched.met(process(2), program, at(19));
        assert_eq!(searched.wanted(process(1), program, at(20)), reader::allocators());
        searched.learn(process(1), program, &[Allocator::Glibc, Allocator::Jemalloc], at(20));
        assert_eq!(searched.wanted(process(2), program, at(59)), [Allocator::Glibc, Allocator::Jemalloc]);
        assert_eq!(searched.wanted(process(2), program, at(60)), reader::allocators());
        // Another process of the program is searched all the time, so that the program itself is never due.
        for second in (60..3600).step_by(10) {
            searched.learn(process(3), program, &[Allocator::Glibc], at(second));
        }
        assert_eq!(searched.wanted(process(3), program, at(3619)), [Allocator::Glibc, Allocator::Jemalloc]);
        assert_eq!(searched.wanted(process(2), program, at(3619)), reader::allocators());
    }

    #[test]
    fn a_process_without_a_heap_says_nothing_of_the_others() {
        let (mut searched, now) = (Searched::default(), Instant::now());
        let program = searched.program(&maps("5500000001", 7));
        searched.learn(process(1), program, &[], now);
        assert_eq!(searched.wanted(process(2), program, now), reader::allocators());
    }
}
