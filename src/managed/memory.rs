//! The memory of a running process, with the pages that it has mapped from files and not touched.
//!
//! Names of classes and methods may lie in an archive of classes that a JVM maps (CDS), and constant texts in its library: pages that no one has
//! touched in this process are not in its page table, but in the file. Reading them there changes nothing in the process.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::census::{LiveMemory, Memory, MemoryError};
use crate::heap::residency::PageRuns;
use crate::process::{Maps, Process};

/// Maximum number of files kept open.
const FILES_MAX: usize = 64;
/// Minimum time between two readings of the mappings.
const READ_AGAIN: Duration = Duration::from_millis(500);
/// Size of a page: what is not present is read to the end of its page.
const PAGE_BYTES: u64 = 4096;

/// A mapping of a file.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: u64,
    end: u64,
    offset: u64,
}

/// A process's memory. It stays bound to the image that it was opened on.
#[derive(Debug)]
pub struct ImageMemory {
    live: LiveMemory,
    files: Mutex<Files>,
}

#[derive(Debug)]
struct Files {
    parts: Vec<Part>,
    /// When the parts were read.
    read: Instant,
    open: HashMap<u64, Option<Arc<File>>>,
}

impl ImageMemory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// If the permission is missing, or the process has ended.
    pub fn open(process: Process, maps: &Maps) -> Result<Self, MemoryError> {
        let files = Files { parts: parts(maps), read: Instant::now(), open: HashMap::new() };
        Ok(Self { live: LiveMemory::open(process)?, files: Mutex::new(files) })
    }

    /// The mapping of a file that contains an address. A runtime maps files also after it was first seen.
    fn part(&self, addr: u64) -> Option<Part> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = files.part(addr) {
            return Some(part);
        }
        if files.read.elapsed() < READ_AGAIN {
            return None;
        }
        files.read = Instant::now();
        files.parts = parts(&self.live.maps().ok()?);
        files.open.clear();
        files.part(addr)
    }

    fn file(&self, part: Part) -> Option<Arc<File>> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if files.open.len() >= FILES_MAX {
            files.open.clear();
        }
        let open = || {
            let process = self.live.process();
            let path = process.directory().join(format!("map_files/{:x}-{:x}", part.start, part.end));
            let file = File::open(path).ok()?;
            // Another process that has got the number may map a file at the same place.
            (process.is_alive() && file.metadata().is_ok_and(|metadata| metadata.is_file())).then(|| Arc::new(file))
        };
        files.open.entry(part.start).or_insert_with(open).clone()
    }

    /// Reads what lies at `addr` from the file that is mapped there, to the end of the page at most, if the process has no copy of its own.
    fn read_file(&self, addr: u64, out: &mut [u8]) -> usize {
        let Ok(runs) = self.live.page_runs(addr..addr.saturating_add(1)) else { return 0 };
        let state = runs.state_at(addr);
        if state.present || state.swapped {
            return 0;
        }
        let Some(part) = self.part(addr) else { return 0 };
        let until = (addr & !(PAGE_BYTES - 1)).saturating_add(PAGE_BYTES).min(part.end);
        let bytes = usize::try_from(until - addr).unwrap_or(0).min(out.len());
        let Some((file, out)) = self.file(part).zip(out.get_mut(..bytes)) else { return 0 };
        file.read_at(out, part.offset.saturating_add(addr - part.start)).unwrap_or(0)
    }
}

impl Files {
    fn part(&self, addr: u64) -> Option<Part> {
        let at = self.parts.partition_point(|part| part.end <= addr);
        self.parts.get(at).filter(|part| part.start <= addr).copied()
    }
}

/// The mappings of files, by address.
fn parts(maps: &Maps) -> Vec<Part> {
    let files = maps.mappings.iter().filter(|mapping| mapping.path().is_some());
    files.map(|mapping| Part { start: mapping.start.0, end: mapping.end.0, offset: mapping.offset.0 }).collect()
}

impl Memory for ImageMemory {
    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        let mut done = 0;
        while done < out.len() {
            let Some(rest) = out.get_mut(done..) else { break };
            let at = addr.saturating_add(done as u64);
            let got = match self.live.read(at, rest) {
                0 => self.read_file(at, rest),
                got => got,
            };
            if got == 0 {
                break;
            }
            done += got;
        }
        done
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        self.live.maps()
    }

    fn process(&self) -> Option<&Process> {
        Some(self.live.process())
    }

    fn page_runs(&self, range: std::ops::Range<u64>) -> Result<PageRuns, MemoryError> {
        self.live.page_runs(range)
    }
}
