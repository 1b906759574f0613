//! The interface between the census and the allocators: one reader per allocator, which finds its metadata in a process and walks it.

use std::ops::Range;

use super::account::HeapAccount;
use super::chunks::ChunkTable;
use super::memory::{Memory, MemoryError};
use super::objects::Objects;
use super::quality::WalkQuality;
use super::take::Options;
use super::{glibc, google_tcmalloc, jemalloc, mimalloc, musl, pymalloc, tcmalloc};
use crate::allocator::Allocator;
use crate::process::Maps;

/// A process, for the readers.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// Its memory.
    pub memory: &'a dyn Memory,
    /// Its mappings.
    pub maps: &'a Maps,
    /// Its files.
    pub objects: &'a Objects<'a>,
    /// Level and pace.
    pub options: Options,
    /// Address ranges of heaps that were read before, sorted and disjoint.
    pub taken: &'a [Range<u64>],
}

/// A reader's result for one allocator's heap.
#[derive(Debug, Clone)]
pub struct HeapWalk {
    /// The figures.
    pub account: HeapAccount,
    /// Their quality.
    pub quality: WalkQuality,
    /// Every chunk, at level full; regions sorted by address.
    pub chunks: ChunkTable,
    /// The address ranges of the heap's pieces, with their arena's index.
    pub extents: Vec<(u32, Range<u64>)>,
}

/// Reads one allocator's heaps from outside. It caches offsets in files for the next process.
pub trait HeapReader: std::fmt::Debug + Send {
    /// The allocator whose heaps it reads.
    fn allocator(&self) -> Allocator;

    /// Reads the heap. `None` if the allocator has none in this process.
    ///
    /// # Errors
    /// If the process has ended, or the permission to read is missing.
    fn read(&mut self, sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError>;

    /// Like [`read`](Self::read), with every block as a chunk. `None` if level full has them already.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    fn read_blocks(&mut self, _sight: &Sight<'_>) -> Result<Option<HeapWalk>, MemoryError> {
        Ok(None)
    }
}

/// A reader of each allocator that can be read, in the registry's order.
#[must_use]
pub fn all() -> Vec<Box<dyn HeapReader>> {
    vec![
        Box::<glibc::Reader>::default(),
        Box::<jemalloc::Reader>::default(),
        Box::<musl::Reader>::default(),
        Box::<tcmalloc::Reader>::default(),
        Box::<google_tcmalloc::Reader>::default(),
        Box::<mimalloc::Reader>::default(),
        Box::<pymalloc::Reader>::default(),
    ]
}

/// The allocators that can be read, in the registry's order.
#[must_use]
pub fn allocators() -> Vec<Allocator> {
    Allocator::known().filter(|allocator| allocator.row().sought.is_some()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_allocator_that_the_registry_says_can_be_read_has_a_reader() {
        assert_eq!(all().iter().map(|reader| reader.allocator()).collect::<Vec<_>>(), allocators());
    }
}
