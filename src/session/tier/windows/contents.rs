//! Reads sampled blocks of a governed process: what its allocator has next to them, and the words that identify them.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use crate::allocator::FreedRule;
use crate::census::LiveMemory;
use crate::census::jemalloc::block::{Caches, Finder};
use crate::governor::retention::words::{SizeField, SlotHeader, WORDS, places};
use crate::governor::retention::{BlockContents, BlockQuery, Header};
use crate::process::Process;

/// How long a process's jemalloc is not searched again if it was not found: it may be starting.
const SEARCH_AGAIN: Duration = Duration::from_secs(30);

/// Reads blocks of one process, whose allocator has this rule.
#[derive(Debug)]
pub struct BlockReader {
    rule: FreedRule,
    /// jemalloc's data, and when they were last searched for.
    records: Option<(LiveMemory, Finder)>,
    searched: Option<Instant>,
}

impl BlockReader {
    /// A reader; nothing is read yet.
    pub fn new(rule: FreedRule) -> Self {
        Self { rule, records: None, searched: None }
    }

    /// Whether blocks can be told apart: with jemalloc only once its data were found.
    pub fn can_read(&self) -> bool {
        self.rule != FreedRule::Record || self.records.is_some()
    }

    /// Whether jemalloc's data were searched for in vain, so that no block has been read.
    pub fn has_failed(&self) -> bool {
        !self.can_read() && self.searched.is_some()
    }

    /// Begins to read blocks as they are at this moment.
    pub fn begin<'a>(&'a mut self, process: &'a Process) -> Blocks<'a> {
        if self.rule == FreedRule::Record
            && self.records.is_none()
            && self.searched.is_none_or(|searched| searched.elapsed() >= SEARCH_AGAIN)
        {
            self.searched = Some(Instant::now());
            let same = Process::open(process.pid()).ok().filter(|same| same.id() == process.id());
            let memory = same.and_then(|same| LiveMemory::open(same).ok());
            self.records = memory.and_then(|memory| Finder::search(&memory).map(|finder| (memory, finder)));
        }
        let caches = self.records.as_ref().map(|(memory, finder)| finder.caches(memory));
        Blocks { process, rule: self.rule, is_unsettled: caches.as_ref().is_some_and(Option::is_none), caches: caches.flatten() }
    }
}

/// The blocks of a process at one moment.
pub struct Blocks<'a> {
    process: &'a Process,
    rule: FreedRule,
    /// jemalloc's threads came and went while their caches were read.
    pub is_unsettled: bool,
    caches: Option<Caches<'a>>,
}

impl Blocks<'_> {
    /// The contents at a block; `None` if any part cannot be read, or the allocator's rule does not apply to it.
    pub fn look(&mut self, block: &BlockQuery) -> Option<BlockContents> {
        let process = self.process;
        let header = match self.rule {
            FreedRule::Chunk => chunk(process, block)?,
            FreedRule::Slot => slot(process, block)?,
            FreedRule::Record => {
                let state = self.caches.as_mut()?.state(block.addr)?;
                Header::Slot { header: state.identity, is_used: state.is_used }
            }
            FreedRule::FirstWord { bytes_max } => (block.bytes <= bytes_max).then_some(Header::FirstWord)?,
        };
        let wanted = |at: &usize| block.wanted >> at & 1 == 1;
        let offsets = places(block.bytes);
        let mut addresses = Vec::with_capacity(WORDS);
        for at in (0..WORDS).filter(wanted) {
            addresses.push(block.addr.checked_add(offsets[at]?)?);
        }
        let mut read_words = [0u64; WORDS];
        let read_words = read_words.get_mut(..addresses.len())?;
        read(process, &addresses, read_words)?;
        let mut words = [0; WORDS];
        for (at, word) in (0..WORDS).filter(wanted).zip(read_words) {
            words[at] = *word;
        }
        Some(BlockContents { header, words, known: block.wanted })
    }
}

/// A chunk of glibc, which begins 16 bytes before its block; the next chunk's size field is 8 bytes after that chunk's start.
fn chunk(process: &Process, block: &BlockQuery) -> Option<Header> {
    let at = block.addr.checked_sub(8)?;
    let size = SizeField(word(process, at)?);
    let has_next = !size.is_mmapped() && size.fits(block.bytes);
    let next = if has_next { Some(SizeField(word(process, at.checked_add(size.chunk_bytes())?)?)) } else { None };
    Some(Header::Chunk { size, next })
}

/// A slot of musl. Its group's first word leads to the group's data, which lead back at 16 and have its masks at 24 (`struct meta`).
fn slot(process: &Process, block: &BlockQuery) -> Option<Header> {
    let header = SlotHeader(word(process, block.addr.checked_sub(8)?)?);
    let group = header.group(block.addr)?;
    let meta = word(process, group)?;
    let mut of_meta = [0u64; 2];
    read(process, &[meta.checked_add(16)?, meta.checked_add(24)?], &mut of_meta)?;
    let [back, masks] = of_meta;
    (back == group).then(|| Header::Slot { header: header.own(), is_used: header.is_used(masks) })
}

fn word(process: &Process, at: u64) -> Option<u64> {
    let mut word = [0u64; 1];
    read(process, &[at], &mut word)?;
    Some(word[0])
}

/// Reads a word at each address; `None` unless all can be read. By `/proc/PID/mem`: process_vm_readv would copy pages that the process
/// shares with a forked child (src/census/live.rs).
fn read(process: &Process, addresses: &[u64], out: &mut [u64]) -> Option<()> {
    let memory = File::open(process.directory().join("mem")).ok()?;
    for (addr, word) in addresses.iter().zip(out) {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, *addr).ok()?;
        *word = u64::from_ne_bytes(bytes);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::units::Pid;

    #[test]
    fn a_block_of_our_own_is_read_with_its_chunk() {
        let process = Process::open(Pid(std::process::id())).unwrap();
        let block: Vec<u64> = (0..40).map(|i| 0x1111_0000_0000 + i).collect();
        let addr = block.as_ptr() as u64;
        let place = BlockQuery { addr, bytes: 320, wanted: 0xffff };
        let look = |place: &BlockQuery, rule| BlockReader::new(rule).begin(&process).look(place);
        let seen = look(&place, FreedRule::Chunk).unwrap();
        let Header::Chunk { size, next } = seen.header else { panic!("{seen:?}") };
        assert!(size.fits(320) && next.unwrap().previous_is_in_use(), "{seen:?}");
        for (word, place) in seen.words.into_iter().zip(places(320)) {
            assert_eq!(word, block[place.unwrap() as usize / 8]);
        }
        for rule in [FreedRule::Chunk, FreedRule::Slot, FreedRule::Record, FreedRule::FirstWord { bytes_max: u64::MAX }] {
            assert!(look(&BlockQuery { addr: 0x10, ..place }, rule).is_none(), "{rule:?}");
        }
        assert!(look(&place, FreedRule::Slot).is_none(), "not musl's");
        assert!(look(&place, FreedRule::Record).is_none(), "not jemalloc's");
        assert!(look(&place, FreedRule::FirstWord { bytes_max: 319 }).is_none(), "too large to be linked");
    }
}
