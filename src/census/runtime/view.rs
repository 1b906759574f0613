//! The memory that the readers of runtimes search: private anonymous memory outside malloc.

use std::ops::Range;

use super::super::memory::{Memory, Piece, word_at};
use super::super::objects::{Objects, anonymous_ranges, joined, range_of, unbacked_ranges, without};
use crate::process::{Backing, Mapping, Maps};

/// Pieces read with one call.
const PIECES: usize = 1024;
/// Locations examined by one reader: a GiB of pages of 16 KiB, a fifth of a second.
const SLOTS_MAX: usize = 1 << 16;

/// A process as the readers of runtimes see it.
pub struct View<'a> {
    /// Its memory.
    pub memory: &'a dyn Memory,
    /// Its mappings.
    pub maps: &'a Maps,
    /// Its objects.
    pub objects: &'a Objects<'a>,
    /// Its private anonymous memory that can be written to, without malloc's heaps; joined where it touches.
    pub anonymous: Vec<Range<u64>>,
    /// The same with malloc's heaps.
    pub writable: Vec<Range<u64>>,
    /// Its private memory without a file, whatever its rights, joined where it touches.
    pub unbacked: Vec<Range<u64>>,
}

impl<'a> View<'a> {
    /// The view of a process whose malloc heaps lie in `heaps` (sorted, disjoint).
    #[must_use]
    pub fn of(memory: &'a dyn Memory, maps: &'a Maps, objects: &'a Objects<'a>, heaps: &[Range<u64>]) -> Self {
        let writable = joined(&anonymous_ranges(maps));
        Self { memory, maps, objects, anonymous: without(&writable, heaps), writable, unbacked: unbacked_ranges(maps) }
    }

    /// Whether a file with such a name is mapped.
    #[must_use]
    pub fn has_file(&self, is: impl Fn(&str) -> bool) -> bool {
        let names = self.maps.mappings.iter().filter_map(|mapping| mapping.path()?.file_name()?.to_str());
        { names }.any(is)
    }

    /// Whether all of a range is anonymous memory that can be written to and is not malloc's.
    #[must_use]
    pub fn holds(&self, range: &Range<u64>) -> bool {
        range.start < range.end && range_of(&self.anonymous, range.start).is_some_and(|own| range.end <= own.end)
    }

    /// Whether all of a range is private memory without a file.
    #[must_use]
    pub fn reserves(&self, range: &Range<u64>) -> bool {
        range.start < range.end && range_of(&self.unbacked, range.start).is_some_and(|own| range.end <= own.end)
    }

    /// The first `N` words at each multiple of `stride` in the anonymous memory that is present, by ascending address; what can be read of
    /// the first [`SLOTS_MAX`].
    #[must_use]
    pub fn heads<const N: usize>(&self, stride: u64) -> Vec<(u64, [u64; N])> {
        let mut slots = Vec::new();
        for range in &self.anonymous {
            let Some(mut at) = range.start.checked_next_multiple_of(stride) else { continue };
            let Ok(runs) = self.memory.page_runs(at.min(range.end)..range.end) else { continue };
            while at < range.end && slots.len() < SLOTS_MAX {
                if runs.state_at(at).present {
                    slots.push(at);
                }
                // There is nothing up to the next present page.
                let Some(next) = runs.next_present(at.saturating_add(stride)) else { break };
                at = (next / stride * stride).max(at + stride);
            }
        }
        let mut found = Vec::with_capacity(slots.len());
        let mut bytes = vec![0u8; PIECES * 8 * N];
        for group in slots.chunks(PIECES) {
            let pieces: Vec<Piece> = group.iter().map(|&addr| Piece { addr, bytes: 8 * N }).collect();
            let Some(out) = bytes.get_mut(..8 * N * group.len()) else { break };
            let read = self.memory.read_pieces(&pieces, out);
            let heads = out.get(..read).unwrap_or_default().chunks_exact(8 * N);
            found.extend(group.iter().copied().zip(heads.map(|head| std::array::from_fn(|word| word_at(head, 8 * word)))));
        }
        found
    }

    /// The mappings of anonymous memory that can be written to, in the kernel's order, not joined.
    pub fn mappings(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let is_plain = |one: &&Mapping| one.permissions.write && !one.permissions.shared && matches!(one.backing, Backing::Anonymous);
        self.maps.mappings.iter().filter(is_plain).map(|one| one.start.0..one.end.0)
    }
}
