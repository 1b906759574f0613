//! Target slots: the rows of the target table and their owners.

use crate::bpf::TARGETS_MAX;

/// A row of the target table in use: an index and its generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    /// Row, below [`TARGETS_MAX`].
    pub index: u16,
    /// How often the row has been assigned; never 0.
    pub generation: u32,
}

/// Allocates slots, each with a new generation.
#[derive(Debug, Default)]
pub struct Slots {
    generations: Vec<u32>,
    free: Vec<u16>,
}

impl Slots {
    /// A free slot: one that was never used, otherwise the one released longest ago, so that records of its former owner have been read.
    /// `None` if all are in use.
    pub fn take(&mut self) -> Option<Slot> {
        let index = if self.generations.len() < TARGETS_MAX as usize {
            self.generations.push(0);
            u16::try_from(self.generations.len() - 1).ok()?
        } else if self.free.is_empty() {
            return None;
        } else {
            self.free.remove(0)
        };
        let generation = &mut self.generations[usize::from(index)];
        *generation = generation.wrapping_add(1).max(1);
        Some(Slot { index, generation: *generation })
    }

    /// Frees a slot.
    pub fn release(&mut self, slot: Slot) {
        self.free.push(slot.index);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_slot_is_reused_with_another_generation_and_as_late_as_possible() {
        let mut slots = Slots::default();
        let all: Vec<Slot> = std::iter::from_fn(|| slots.take()).collect();
        assert_eq!(all.len(), TARGETS_MAX as usize);
        assert_eq!(slots.take(), None);
        slots.release(all[5]);
        slots.release(all[3]);
        let again = slots.take().unwrap();
        assert_eq!((again.index, again.generation), (5, 2));
    }
}
