//! Descriptions of the result of a scan: the type of blocks, their owners, and the roots that reach them.

use std::ops::Range;

use super::contents::Contents;
use super::holdings::Holdings;
use super::names::Names;
use crate::census::memory::{Memory, MemoryError, word_at};
use crate::census::page_cache::PageCache;
use crate::process::Maps;

const WORD_BYTES: u64 = 8;
/// Blocks this close together are read in one piece: a separate piece costs the kernel as much as copying a page.
const GAP_BYTES_MAX: u64 = 4096;
/// Most that is read at once.
const STRETCH_BYTES_MAX: u64 = 256 << 10;

/// Describes blocks.
pub struct Describer<'a> {
    /// What was found.
    pub holdings: &'a Holdings,
    /// The contents of blocks.
    pub contents: Contents<'a>,
    names: Names<'a>,
}

impl<'a> Describer<'a> {
    /// For a process with these mappings.
    ///
    /// # Errors
    /// If it has ended.
    pub fn of(memory: &'a dyn Memory, maps: &'a Maps, holdings: &'a Holdings) -> Result<Self, MemoryError> {
        Ok(Self { holdings, contents: Contents::of(memory, maps, &holdings.heap), names: Names::of(memory, maps, &holdings.saved) })
    }

    /// A block's type, if it is known, and its description.
    pub fn label(&mut self, block: u32) -> (Option<String>, String) {
        let first = self.contents.first_bytes(self.holdings.address(block), self.holdings.blocks.index.size(block));
        let kind = self.contents.kind(&first);
        match kind.type_name.as_deref().or_else(|| self.holdings.trait_objects.type_of(block)) {
            Some(name) => (Some(name.to_owned()), name.to_owned()),
            None => (None, kind.words()),
        }
    }

    /// The root from which a block is reached first; empty if roots are not named.
    pub fn root_name(&mut self, block: u32) -> String {
        if self.holdings.is_managed && self.holdings.origin(block).is_some() { String::new() } else { self.place_name(block) }
    }

    /// The root from which a block is reached first, whatever the program.
    pub fn place_name(&mut self, block: u32) -> String {
        let Some(slot) = self.holdings.origin(block) else { return "nowhere".to_owned() };
        let first = self.holdings.reached.path(block).first().map_or(block, |&first| first);
        self.names.of_place(slot, &self.range(first))
    }

    /// The addresses of a block.
    fn range(&self, block: u32) -> Range<u64> {
        let start = self.holdings.address(block);
        start..start.saturating_add(self.holdings.blocks.index.size(block))
    }

    /// A block's role in terms of the program's source: `the storage of the_shop.catalog_.bestsellers_ (main in shopd)`. `None` without debug
    /// information, or if a type on the path is not known.
    pub fn role(&mut self, block: u32) -> Option<String> {
        let slot = self.holdings.origin(block).filter(|&slot| slot != 0 && !self.holdings.is_managed)?;
        let way: Vec<Range<u64>> = self.holdings.reached.path(block).into_iter().map(|block| self.range(block)).collect();
        let found = self.names.way(slot, &way)?;
        let words = found.words();
        Some(if found.is_storage { format!("the storage of {words}") } else { format!("what {words} points to") })
    }

    /// An owner: `one block of 65,544 B (pointers)`.
    pub fn owner_words(&mut self, block: u32) -> String {
        let label = self.label(block).1;
        let role = self.role(block).map_or_else(String::new, |role| format!(": {role}"));
        format!("one block of {} B ({label}){role}", crate::units::grouped(self.holdings.blocks.index.size(block)))
    }
}

/// The first word of every block in use; 0 where it is not present.
#[must_use]
pub fn first_words(memory: &dyn Memory, holdings: &Holdings) -> Vec<u64> {
    let blocks = &holdings.blocks;
    let mut words = vec![0u64; blocks.index.len()];
    let mut pages = PageCache::new(memory);
    let mut buffer = vec![0u8; STRETCH_BYTES_MAX as usize];
    let mut stretch = Stretch::default();
    for (number, addr, _) in blocks.index.iter().filter(|&(number, _, bytes)| bytes >= WORD_BYTES && blocks.live.get(number)) {
        if !stretch.takes(addr) {
            stretch.read(memory, &mut buffer, &mut words);
            let present_end = pages.runs_for(addr..addr.saturating_add(STRETCH_BYTES_MAX)).present_from(addr);
            stretch = Stretch { range: addr..addr, present_end, blocks: stretch.blocks };
        }
        if addr.saturating_add(WORD_BYTES) <= stretch.present_end {
            stretch.push(number, addr);
        }
    }
    stretch.read(memory, &mut buffer, &mut words);
    words
}

/// Blocks whose first words are read at once, with what lies between them.
#[derive(Debug, Default)]
struct Stretch {
    range: Range<u64>,
    /// End of the present pages on which the range begins.
    present_end: u64,
    /// Number and address, by ascending address.
    blocks: Vec<(u32, u64)>,
}

impl Stretch {
    /// Whether a block is read with these. Each block comes at a higher address than the one before.
    fn takes(&self, addr: u64) -> bool {
        let end = addr.saturating_add(WORD_BYTES);
        end <= self.present_end && addr <= self.range.end.saturating_add(GAP_BYTES_MAX) && end - self.range.start <= STRETCH_BYTES_MAX
    }

    fn push(&mut self, number: u32, addr: u64) {
        self.range.end = addr.saturating_add(WORD_BYTES);
        self.blocks.push((number, addr));
    }

    /// Reads the words and empties the stretch. Words that can no longer be read stay 0.
    fn read(&mut self, memory: &dyn Memory, buffer: &mut [u8], words: &mut [u64]) {
        let bytes = usize::try_from(self.range.end - self.range.start).unwrap_or(usize::MAX).min(buffer.len());
        let got = buffer.get_mut(..bytes).map_or(0, |part| memory.read(self.range.start, part));
        for (number, addr) in self.blocks.drain(..) {
            let place = (addr - self.range.start) as usize;
            if let Some(word) = words.get_mut(number as usize).filter(|_| place + WORD_BYTES as usize <= got) {
                *word = word_at(buffer, place);
            }
        }
    }
}
