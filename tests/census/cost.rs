//! A census's cost in reads of the process.

use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use fragprof::census::glibc::locate::{LayoutCache, locate};
use fragprof::census::memory::Piece;
use fragprof::census::not_malloc::ResidentMapping;
use fragprof::census::objects::{Objects, objects};
use fragprof::census::{LiveMemory, Memory, MemoryError};
use fragprof::heap::residency::PageRuns;
use fragprof::process::Maps;

use super::target::{Target, build};

/// A process's memory that counts the requests.
pub struct Counting {
    memory: LiveMemory,
    reads: AtomicU64,
}

impl Counting {
    pub fn new(memory: LiveMemory) -> Self {
        Self { memory, reads: AtomicU64::new(0) }
    }

    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Memory for Counting {
    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.memory.read(addr, out)
    }

    fn read_pieces(&self, pieces: &[Piece], out: &mut [u8]) -> usize {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.memory.read_pieces(pieces, out)
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        self.memory.maps()
    }

    fn resident_mappings(&self) -> Result<Vec<ResidentMapping>, MemoryError> {
        self.memory.resident_mappings()
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        self.memory.page_runs(range)
    }
}

/// A table of 60,000 pointers looks like linked bins at each of its words; only the fields around an arena's bins distinguish it.
#[test]
fn a_table_of_pointers_costs_the_search_for_an_arena_next_to_nothing() {
    let mut command = Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]));
    command.env("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2");
    let mut target = Target::start(&mut command);
    target.tell("foreign");
    let memory = Counting::new(target.memory());
    let maps = memory.maps().unwrap();
    let searched = objects(&maps);
    let bytes: u64 = searched.iter().map(|object| object.range.end - object.range.start).sum();
    assert!(bytes > 4 << 20, "{bytes}");
    assert!(locate(&memory, &maps, &Objects::of(&memory, &maps), &mut LayoutCache::default()).is_none());
    // A few for each object's headers and data, and next to none for what is in them.
    let allowed = 16 * searched.len() as u64 + 4 * (bytes >> 20);
    assert!(memory.reads() <= allowed, "{} reads of {} MiB in {} objects", memory.reads(), bytes >> 20, searched.len());
}
