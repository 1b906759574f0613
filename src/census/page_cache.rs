//! Residency queries in blocks: one request to the kernel for many small queries by ascending address.

use std::ops::Range;

use super::memory::{Memory, Piece};
use crate::heap::residency::{PageRuns, Residency, page_down, page_up};

/// Address space queried at once: a quarter of a millisecond, at most 4096 runs.
const BLOCK_BYTES: u64 = 16 << 20;

/// Address space queried at once in long ranges: at most 3 MiB of runs.
const LONG_BYTES: u64 = 1 << 30;

/// The page runs around the last query.
pub struct PageCache<'a> {
    memory: &'a dyn Memory,
    runs: PageRuns,
    range: Range<u64>,
    block_bytes: u64,
    /// Queries that failed; their pages count as not present.
    pub refused: u64,
}

impl<'a> PageCache<'a> {
    /// An empty cache.
    #[must_use]
    pub fn new(memory: &'a dyn Memory) -> Self {
        Self { memory, runs: PageRuns::default(), range: 0..0, block_bytes: BLOCK_BYTES, refused: 0 }
    }

    /// For queries that are not by ascending address: nothing beyond them is requested.
    #[must_use]
    pub fn without_foresight(memory: &'a dyn Memory) -> Self {
        Self { block_bytes: 0, ..Self::new(memory) }
    }

    /// Page runs that cover `range`, which should be no longer than a few windows.
    pub fn runs_for(&mut self, range: Range<u64>) -> &PageRuns {
        if range.start < self.range.start || range.end > self.range.end {
            let asked = page_down(range.start)..page_up(range.end.max(range.start.saturating_add(self.block_bytes)));
            self.runs = self.memory.page_runs(asked.clone()).unwrap_or_else(|_| {
                self.refused += 1;
                PageRuns::default()
            });
            self.range = asked;
        }
        &self.runs
    }

    /// Copies the memory from `addr` on. What is not present reads as zeros.
    pub fn copy(&mut self, addr: u64, out: &mut [u8]) {
        let range = addr..addr.saturating_add(out.len() as u64);
        let memory = self.memory;
        let mut done = 0;
        for run in self.runs_for(range.clone()).within(range).filter(|run| run.state.present) {
            let (from, to) = ((run.start - addr) as usize, (run.end - addr) as usize);
            out.get_mut(done..from).unwrap_or_default().fill(0);
            let Some(part) = out.get_mut(from..to) else { continue };
            done = from + memory.read_pieces(&[Piece { addr: run.start, bytes: part.len() }], part);
        }
        out.get_mut(done..).unwrap_or_default().fill(0);
    }

    /// Drops the cached answer, which is out of date.
    pub fn forget(&mut self) {
        self.range = 0..0;
    }

    /// First address not covered by the last answer.
    #[must_use]
    pub fn known_until(&self) -> u64 {
        self.range.end
    }

    /// Bytes by state of a range of any length.
    pub fn residency(&mut self, range: Range<u64>) -> Residency {
        let mut sum = Residency::default();
        let mut at = range.start;
        if range.end.saturating_sub(range.start) <= BLOCK_BYTES {
            sum.add(self.runs_for(range.clone()), range);
            return sum;
        }
        while at < range.end {
            let stop = page_down(at).saturating_add(LONG_BYTES).min(range.end);
            match self.memory.page_runs(at..stop) {
                Ok(runs) => sum.add(&runs, at..stop),
                Err(_) => self.refused += 1,
            }
            at = stop;
        }
        sum
    }

    /// Resident bytes of a range of any length.
    pub fn resident_bytes(&mut self, range: Range<u64>) -> u64 {
        self.residency(range).resident_bytes
    }
}
