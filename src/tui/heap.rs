//! The present state of a process's heap: by a census, or, if no census can read the allocator, by the mappings.
//!
//! The kernel does not say what anonymous memory is used for. Without a census, the brk area counts as malloc's, and so does all other
//! private anonymous writable memory except thread stacks and the zeroed data of files. That extent is an upper bound: it includes memory
//! that the program maps for itself.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::sample::{Basis, HeapReading};
use crate::census::{self, LayoutCache, Level, LiveMemory, Memory as _, MemoryError, Pace};
use crate::heap::ladder::{extent_ratio, fragmentation_ratio};
use crate::heap::residency::Residency;
use crate::process::{Backing, Mapping, Maps, Process, Statm};
use crate::profile::HeapSummary;
use crate::units::Pid;

/// Largest guard below a thread's stack: glibc's default is one page.
const GUARD_BYTES_MAX: u64 = 16 << 10;
/// A heap of up to this extent is walked in full (about 100 ms); a larger one is sampled.
const WALKED_BYTES_MAX: u64 = 256 << 20;
/// Longest walk, so that the recording's periodic work is not delayed.
const WALK_MAX: Duration = Duration::from_millis(500);
/// Heaps are read so often that it takes at most one in this many parts of the time.
const TIME_SHARE: u32 = 50;
/// But at least this often.
const REST_MAX: Duration = Duration::from_secs(30);

/// The ranges of memory that malloc may hold, by ascending address.
pub fn ranges(maps: &Maps) -> Vec<Range<u64>> {
    let mut heap: Vec<Range<u64>> = Vec::new();
    let mut before: Option<&Mapping> = None;
    for mapping in &maps.mappings {
        if is_heap(mapping, before) {
            heap.push(mapping.start.0..mapping.end.0);
        }
        before = Some(mapping);
    }
    heap
}

fn is_heap(mapping: &Mapping, before: Option<&Mapping>) -> bool {
    let permissions = mapping.permissions;
    if !permissions.write || permissions.shared || permissions.execute {
        return false;
    }
    match &mapping.backing {
        Backing::Named(name) if name == "[heap]" => true,
        // Names that allocators give their memory (glibc.mem.decorate_maps: `[anon: glibc: malloc]`); other names show that it is not malloc's.
        Backing::Named(name) => name.starts_with("[anon") && name.contains("malloc") && !name.contains("stack"),
        Backing::Anonymous => !before.is_some_and(|before| before.end == mapping.start && (is_guard(before) || is_data(before))),
        Backing::File { .. } => false,
    }
}

/// The guard page below a thread's stack (glibc: one page by default, `pthread_attr_setguardsize(3)`). Reserved memory of allocators is above
/// the accessible part, and larger.
fn is_guard(mapping: &Mapping) -> bool {
    let permissions = mapping.permissions;
    mapping.backing == Backing::Anonymous && !permissions.read && !permissions.write && mapping.len() <= GUARD_BYTES_MAX
}

/// Writable data of a file, which its zeroed data (`.bss`) follows.
fn is_data(mapping: &Mapping) -> bool {
    mapping.path().is_some() && mapping.permissions.write
}

/// Reads a process's heap repeatedly, as often as its size allows.
#[derive(Debug)]
pub struct HeapReader {
    memory: Option<LiveMemory>,
    layouts: LayoutCache,
    last: Option<HeapReading>,
    due: Option<Instant>,
}

impl Default for HeapReader {
    fn default() -> Self {
        // It is shown beside the stacks that were recorded of malloc.
        Self { memory: None, layouts: LayoutCache::of_malloc(), last: None, due: None }
    }
}

impl HeapReader {
    /// The heap now, or from a little earlier if reading it takes long. `None` if it has not been read successfully yet.
    pub fn read(&mut self, process: &Process) -> Option<HeapReading> {
        let began = Instant::now();
        if self.due.is_none_or(|due| began >= due) {
            match self.reading(process.pid(), process.comm()) {
                Ok(reading) => self.last = Some(reading),
                Err(error) => {
                    // The last reading is kept: the process may have ended. After an exec its memory is opened again.
                    tracing::debug!("heap of process {}: {error}", process.pid());
                    self.memory = None;
                }
            }
            self.due = began.checked_add(began.elapsed().saturating_mul(TIME_SHARE).min(REST_MAX));
        }
        self.last
    }

    fn reading(&mut self, pid: Pid, comm: &str) -> Result<HeapReading, MemoryError> {
        let Self { memory, layouts, .. } = self;
        let memory = match memory {
            Some(memory) => memory,
            None => memory.insert(LiveMemory::open(Process::open(pid)?)?),
        };
        let options =
            census::Options { level: Level::Top, pace: Pace { duration_max: WALK_MAX, ..Pace::default() }, with_not_malloc: false };
        let top = census::take(memory, pid.0, comm, options, layouts)?;
        let extent_bytes: u64 = top.census.heaps.iter().map(|heap| heap.ladder.extent_bytes).fold(0, u64::saturating_add);
        if extent_bytes == 0 {
            return from_mappings(memory);
        }
        let level = if extent_bytes <= WALKED_BYTES_MAX { Level::Full } else { Level::Sampled };
        let taken = census::take(memory, pid.0, comm, census::Options { level, ..options }, layouts)?;
        if !taken.census.walk.usable && level == Level::Full {
            return Ok(from_census(&top.census));
        }
        Ok(from_census(&taken.census))
    }
}

fn from_census(census: &census::Census) -> HeapReading {
    let ladder = census.ladder();
    let used = ladder.used_bytes(census.sum(census::HeapAccount::live_resident_bytes));
    HeapReading {
        basis: if census.level == Level::Full { Basis::Census } else { Basis::SampledCensus },
        ladder: ladder.map(Some),
        swapped_bytes: Some(census.details().swapped_bytes),
        live_bytes_est: census.sum(|heap| heap.live_bytes_est),
        live_bytes_stderr: census.sum(|heap| heap.live_bytes_stderr),
        fragmentation_ratio: used.and_then(|used| fragmentation_ratio(used, ladder.resident_bytes)),
        extent_ratio: used.and_then(|used| extent_ratio(ladder.extent_bytes, used)),
    }
}

fn from_mappings(memory: &LiveMemory) -> Result<HeapReading, MemoryError> {
    let ranges = ranges(&memory.maps()?);
    let mut residency = Residency::default();
    for range in &ranges {
        residency.add(&memory.page_runs(range.clone())?, range.clone());
    }
    Ok(HeapReading {
        basis: Basis::Mappings,
        ladder: HeapSummary {
            extent_bytes: Some(ranges.iter().map(|range| range.end - range.start).fold(0, u64::saturating_add)),
            resident_bytes: Some(residency.resident_bytes),
            ..HeapSummary::default()
        },
        swapped_bytes: Some(residency.swapped_bytes),
        ..HeapReading::default()
    })
}

/// Resident memory of the whole process. `None` = the process has ended.
pub fn rss_bytes(process: &Process) -> Option<u64> {
    Statm::of(process.directory()).map(|statm| statm.resident_bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::Pid;

    #[test]
    fn the_brk_area_and_anonymous_memory_are_heap_but_stacks_data_and_reserves_are_not() {
        let maps = Maps::parse(
            b"400000-401000 r-xp 0 08:01 5 /bin/x\n\
              401000-402000 rw-p 1000 08:01 5 /bin/x\n\
              402000-405000 rw-p 0 0:0 0 \n\
              500000-521000 rw-p 0 0:0 0 [heap]\n\
              7f0000000000-7f0000021000 rw-p 0 0:0 0 \n\
              7f0000021000-7f0004000000 ---p 0 0:0 0 \n\
              7f0010000000-7f0010001000 ---p 0 0:0 0 \n\
              7f0010001000-7f0010801000 rw-p 0 0:0 0 \n\
              7f0020000000-7f0020010000 rw-p 0 0:0 0 [anon: glibc: malloc arena]\n\
              7f0021000000-7f0021010000 rw-p 0 0:0 0 [anon:v8]\n\
              7f0022000000-7f0022010000 rw-s 0 0:1 9 /memfd:x (deleted)\n\
              7f0023000000-7f0023010000 rwxp 0 0:0 0 \n\
              7ffc00000000-7ffc00021000 rw-p 0 0:0 0 [stack]\n",
        );
        assert_eq!(maps.malformed_lines, 0);
        let starts: Vec<u64> = ranges(&maps).iter().map(|range| range.start).collect();
        assert_eq!(starts, [0x50_0000, 0x7f00_0000_0000, 0x7f00_2000_0000]);
    }

    #[test]
    fn the_last_reading_stays_when_the_process_has_ended() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = Process::open(Pid(child.id())).unwrap();
        let mut reader = HeapReader::default();
        let running = reader.read(&process).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        reader.due = None;
        assert_eq!(reader.read(&process), Some(running));
        assert_eq!(rss_bytes(&process), None);
    }
}
