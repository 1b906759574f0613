//! Candidates: blocks in use to which a scan saw no pointer, with their pointers to each other and a digest of their contents.

use std::ops::Range;

use super::blocks::{Bits, Blocks};
use super::mark::Marks;
use crate::census::memory::{Memory, Piece};
use crate::census::page_cache::PageCache;

/// Bytes of a block that are compared between scans.
pub const COMPARED_BYTES_MAX: u64 = 4096;
/// Bytes and blocks read with one call; the kernel's limit is 1024 pieces.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_PIECES: usize = 1024;

/// A block that has not been reached yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Its address.
    pub addr: u64,
    /// Usable bytes.
    pub bytes: u64,
    /// Digest of its contents.
    digest: u64,
}

impl Candidate {
    /// Addresses.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.addr..self.addr.saturating_add(self.bytes)
    }
}

/// The candidates by ascending address.
#[derive(Debug, Clone, Default)]
pub struct Candidates {
    list: Vec<Candidate>,
    /// Where the pointers of each begin; one more than candidates.
    first: Vec<u32>,
    to: Vec<u32>,
    gone: Bits,
    left: usize,
}

impl Candidates {
    /// The blocks in use that a scan did not reach.
    #[must_use]
    pub fn of(blocks: &Blocks, marks: &Marks) -> Self {
        let is_left = |block: u32| blocks.live.get(block) && !marks.is_reached(block);
        let mut numbers: Vec<u32> = Vec::new();
        let mut found = Self::default();
        for (block, addr, bytes) in blocks.index.iter().filter(|&(block, ..)| is_left(block)) {
            numbers.push(block);
            found.list.push(Candidate { addr, bytes, digest: 0 });
        }
        for &block in &numbers {
            found.first.push(found.to.len() as u32);
            let to = marks.pointers_of(block).filter_map(|to| numbers.binary_search(&to).ok());
            found.to.extend(to.map(|to| to as u32));
        }
        found.first.push(found.to.len() as u32);
        found.gone = Bits::of(numbers.len());
        found.left = numbers.len();
        found
    }

    /// Blocks of 64 bytes, a page apart, with these pointers.
    #[cfg(test)]
    #[must_use]
    pub fn for_test(pointers: &[&[u32]]) -> Self {
        let mut found = Self { first: vec![0], gone: Bits::of(pointers.len()), left: pointers.len(), ..Self::default() };
        for (number, to) in pointers.iter().enumerate() {
            found.list.push(Candidate { addr: 0x1000 * (number as u64 + 1), bytes: 64, digest: 0 });
            found.to.extend_from_slice(to);
            found.first.push(found.to.len() as u32);
        }
        found
    }

    /// The remaining ones, with their numbers.
    pub fn left(&self) -> impl Iterator<Item = (u32, &Candidate)> {
        self.list.iter().enumerate().map(|(number, one)| (number as u32, one)).filter(|(number, _)| !self.gone.get(*number))
    }

    /// Number of remaining ones.
    #[must_use]
    pub fn len(&self) -> usize {
        self.left
    }

    /// Whether none is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }

    /// A candidate by its number.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&Candidate> {
        self.list.get(number as usize)
    }

    /// The candidates that this one pointed to in the first scan, including those removed since.
    #[must_use]
    pub fn pointers_of(&self, number: u32) -> &[u32] {
        let range = |place: usize| self.first.get(place).map_or(0, |&first| first as usize);
        self.to.get(range(number as usize)..range(number as usize + 1)).unwrap_or_default()
    }

    /// Removes candidates, and everything reachable from them.
    pub fn take_out(&mut self, numbers: impl IntoIterator<Item = u32>) {
        let mut stack: Vec<u32> = numbers.into_iter().collect();
        while let Some(number) = stack.pop() {
            if (number as usize) < self.list.len() && self.gone.set(number) {
                self.left -= 1;
                stack.extend_from_slice(self.pointers_of(number));
            }
        }
    }

    /// Records the blocks' contents, with which [`Self::take_out_changed`] compares.
    pub fn remember(&mut self, memory: &dyn Memory) {
        let digests = self.digests(memory);
        for (number, digest) in digests {
            if let Some(one) = self.list.get_mut(number as usize) {
                one.digest = digest;
            }
        }
    }

    /// Removes those whose contents have changed since [`Self::remember`].
    pub fn take_out_changed(&mut self, memory: &dyn Memory) {
        let digests = self.digests(memory);
        let changed = |&(number, digest): &(u32, u64)| self.get(number).is_some_and(|one| one.digest != digest);
        let changed: Vec<u32> = digests.iter().filter(|one| changed(one)).map(|&(number, _)| number).collect();
        self.take_out(changed);
    }

    /// Digests of the first bytes of the remaining ones. All blocks that are not present have the same digest.
    fn digests(&self, memory: &dyn Memory) -> Vec<(u32, u64)> {
        let mut digests = Vec::with_capacity(self.left);
        let mut pages = PageCache::new(memory);
        let mut batch = Batch::default();
        for (number, one) in self.left() {
            let bytes = one.bytes.min(COMPARED_BYTES_MAX);
            let until = pages.runs_for(one.addr..one.addr.saturating_add(bytes)).present_from(one.addr);
            let bytes = usize::try_from(until.saturating_sub(one.addr).min(bytes)).unwrap_or(0);
            batch.add(memory, number, Piece { addr: one.addr, bytes }, &mut digests);
        }
        batch.read(memory, &mut digests);
        digests
    }
}

/// Blocks that are read with one call.
#[derive(Default)]
struct Batch {
    numbers: Vec<u32>,
    pieces: Vec<Piece>,
    bytes: usize,
    buffer: Vec<u8>,
}

impl Batch {
    fn add(&mut self, memory: &dyn Memory, number: u32, piece: Piece, digests: &mut Vec<(u32, u64)>) {
        if self.pieces.len() >= BATCH_PIECES || self.bytes + piece.bytes > BATCH_BYTES {
            self.read(memory, digests);
        }
        self.numbers.push(number);
        self.pieces.push(piece);
        self.bytes += piece.bytes;
    }

    fn read(&mut self, memory: &dyn Memory, digests: &mut Vec<(u32, u64)>) {
        self.buffer.resize(self.bytes, 0);
        let (mut numbers, mut pieces) = (self.numbers.as_slice(), self.pieces.as_slice());
        // A call ends at a page that was released since; the blocks after it are read with the next call.
        while !pieces.is_empty() {
            let got = memory.read_pieces(pieces, &mut self.buffer);
            let (mut done, mut at) = (0, 0usize);
            for (&number, piece) in numbers.iter().zip(pieces) {
                let end = at + piece.bytes;
                digests.push((number, digest(self.buffer.get(at.min(got)..end.min(got)).unwrap_or_default())));
                at = end;
                done += 1;
                if end > got {
                    break;
                }
            }
            numbers = numbers.get(done..).unwrap_or_default();
            pieces = pieces.get(done..).unwrap_or_default();
        }
        self.numbers.clear();
        self.pieces.clear();
        self.bytes = 0;
    }
}

/// FNV-1a over words, with a rotation that brings the high bits down.
fn digest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |sum: u64, word| {
        let mut padded = [0u8; 8];
        padded.iter_mut().zip(word).for_each(|(to, &from)| *to = from);
        (sum ^ u64::from_le_bytes(padded)).wrapping_mul(0x0100_0000_01b3).rotate_left(17)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(pointers: &[&[u32]]) -> Candidates {
        Candidates::for_test(pointers)
    }

    #[test]
    fn blocks_reachable_from_a_reached_block_are_reached_too() {
        let mut found = candidates(&[&[1], &[2], &[], &[1, 4], &[3]]);
        found.take_out([1]);
        assert_eq!(found.left().map(|(number, _)| number).collect::<Vec<_>>(), [0, 3, 4]);
        found.take_out([4, 4]);
        assert_eq!((found.len(), found.left().next().map(|(number, _)| number)), (1, Some(0)));
    }

    #[test]
    fn blocks_whose_contents_changed_are_removed_with_what_they_point_to() {
        let mut memory = crate::census::Fixture::default();
        for page in 1..6 {
            memory.write_word(0x1000 * page + 8, page);
        }
        let mut found = candidates(&[&[], &[2], &[], &[]]);
        found.remember(&memory);
        memory.write_word(0x2000 + 56, 9);
        // Behind the block.
        memory.write_word(0x4000 + 64, 9);
        found.take_out_changed(&memory);
        assert_eq!(found.left().map(|(number, _)| number).collect::<Vec<_>>(), [0, 3]);
    }

    /// Memory whose page at an address is released between the check for present pages and the read.
    struct GivenBack(crate::census::Fixture, u64);

    impl Memory for GivenBack {
        fn read(&self, addr: u64, out: &mut [u8]) -> usize {
            if addr & !0xfff == self.1 { 0 } else { self.0.read(addr, out) }
        }

        fn maps(&self) -> Result<crate::process::Maps, crate::census::memory::MemoryError> {
            self.0.maps()
        }

        fn page_runs(&self, range: Range<u64>) -> Result<crate::heap::residency::PageRuns, crate::census::memory::MemoryError> {
            self.0.page_runs(range)
        }
    }

    #[test]
    fn a_released_page_hides_no_block_behind_it() {
        let mut memory = crate::census::Fixture::default();
        for page in 1..6 {
            memory.write_word(0x1000 * page + 8, page);
        }
        let mut found = candidates(&[&[], &[], &[], &[]]);
        found.remember(&memory);
        found.take_out_changed(&GivenBack(memory, 0x2000));
        assert_eq!(found.left().map(|(number, _)| number).collect::<Vec<_>>(), [0, 2, 3]);
    }
}
