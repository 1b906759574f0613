//! Some records in use, slabs and large blocks, from which the form of a build's records is inferred.

use super::super::memory::{Memory, is_user_address};
use super::super::radix::{self, PageMapRoot, Shape};
use super::record::{Agreement, CLASSES, Form, Pages};
use super::{POINTER_MASK, one_word, read_record};

/// Slabs, and as many large blocks: a padded block shows that it is in 63 of 64 cases.
const RECORDS: usize = 32;
/// Slabs of one size class: those of the smallest two classes do not tell which classes a build has.
const OF_CLASS: u8 = 4;

/// The first slabs, of several size classes, and the first large blocks of a page map, with the classes that it has for them.
#[derive(Debug)]
pub struct Telling {
    slabs: Vec<(u64, u64)>,
    large: Vec<(u64, u64)>,
    /// Slabs by class.
    of_class: [u8; CLASSES as usize],
}

impl Default for Telling {
    fn default() -> Self {
        Self { slabs: Vec::new(), large: Vec::new(), of_class: [0; CLASSES as usize] }
    }
}

impl Telling {
    /// Takes the next word of the page map, by ascending address.
    pub fn word(&mut self, word: u64) {
        let (record, class, is_slab) = (word & POINTER_MASK, word >> 48, word & 1 == 1);
        let kind = if is_slab { &mut self.slabs } else { &mut self.large };
        if kind.len() >= RECORDS || kind.last().is_some_and(|&(last, _)| last == record) || !is_user_address(record) {
            return;
        }
        let Some(count) = usize::try_from(class).ok().and_then(|class| self.of_class.get_mut(class)) else { return };
        if is_slab && *count >= OF_CLASS {
            return;
        }
        *count = count.saturating_add(u8::from(is_slab));
        kind.push((record, class));
    }

    /// Of a whole page map.
    #[must_use]
    pub fn of(memory: &dyn Memory, found: &PageMapRoot, shape: Shape) -> Self {
        let mut telling = Self::default();
        radix::visit(memory, found.root, shape, |_, entry| telling.word(one_word(entry, shape)));
        telling
    }

    /// The records, with their classes.
    #[must_use]
    pub fn records(&self, memory: &dyn Memory, pages: Pages) -> Vec<(Vec<u8>, u64)> {
        let all = self.slabs.iter().chain(&self.large);
        all.filter_map(|&(record, class)| Some((read_record(memory, record, pages)?, class))).collect()
    }

    /// Their form.
    #[must_use]
    pub fn form(&self, memory: &dyn Memory, pages: Pages) -> Form {
        Agreement::of(&self.records(memory, pages), pages).form()
    }
}
