//! Recorded or constructed memory: for tests, and to examine a heap that was misread.

use std::collections::BTreeMap;
use std::ops::Range;

use super::memory::{Memory, MemoryError};
use super::objects::{anonymous_ranges, objects, read_present};
use crate::heap::residency::{PageRun, PageRuns, PageState, page_bytes, page_down, page_up};
use crate::process::Maps;

/// Bytes recorded at most.
pub const FIXTURE_BYTES_MAX: u64 = 1 << 30;

/// Pages by address, and the mappings they are of.
#[derive(Debug, Clone, Default)]
pub struct Fixture {
    /// The mappings.
    pub maps: Maps,
    pages: BTreeMap<u64, Box<[u8]>>,
}

impl Fixture {
    /// A fixture with these mappings and no pages.
    #[must_use]
    pub fn with_maps(maps: Maps) -> Self {
        Self { maps, pages: BTreeMap::new() }
    }

    /// Records the data of all objects and all anonymous memory of a process, up to [`FIXTURE_BYTES_MAX`].
    ///
    /// # Errors
    /// If the process has ended, or the permission to read is missing.
    pub fn record(memory: &dyn Memory) -> Result<Self, MemoryError> {
        let maps = memory.maps()?;
        let ranges: Vec<Range<u64>> = objects(&maps).into_iter().map(|object| object.range).chain(anonymous_ranges(&maps)).collect();
        let mut fixture = Self::with_maps(maps);
        let mut left = FIXTURE_BYTES_MAX;
        for range in ranges {
            for run in memory.page_runs(range.clone())?.within(range).filter(|run| run.state.present) {
                let end = run.end.min(run.start.saturating_add(left));
                left -= end - run.start;
                fixture.write(run.start, &read_present(memory, run.start..end));
            }
        }
        Ok(fixture)
    }

    /// Writes bytes, making the pages they lie on.
    pub fn write(&mut self, addr: u64, bytes: &[u8]) {
        let mut done = 0usize;
        while let Some(rest) = bytes.get(done..).filter(|rest| !rest.is_empty()) {
            let at = addr.saturating_add(done as u64);
            let page = self.pages.entry(page_down(at)).or_insert_with(|| vec![0; page_bytes() as usize].into());
            let inside = (at % page_bytes()) as usize;
            let count = rest.len().min(page_bytes() as usize - inside);
            if let (Some(to), Some(from)) = (page.get_mut(inside..inside + count), rest.get(..count)) {
                to.copy_from_slice(from);
            }
            done += count;
        }
    }

    /// Writes a little-endian word.
    pub fn write_word(&mut self, addr: u64, word: u64) {
        self.write(addr, &word.to_le_bytes());
    }
}

impl Memory for Fixture {
    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        let mut done = 0usize;
        while done < out.len() {
            let at = addr.wrapping_add(done as u64);
            let Some(page) = self.pages.get(&page_down(at)) else { break };
            let inside = (at % page_bytes()) as usize;
            let count = (out.len() - done).min(page_bytes() as usize - inside);
            if let (Some(to), Some(from)) = (out.get_mut(done..done + count), page.get(inside..inside + count)) {
                to.copy_from_slice(from);
            }
            done += count;
        }
        done
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        Ok(self.maps.clone())
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        let mut runs = PageRuns::default();
        for &start in self.pages.range(page_down(range.start)..page_up(range.end).max(page_down(range.start))).map(|(start, _)| start) {
            runs.push(PageRun { start, end: start + page_bytes(), state: PageState { present: true, ..PageState::default() } });
        }
        Ok(runs)
    }
}
