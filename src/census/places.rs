//! Cache of structures' offsets in a file's data, by the file's build id; cached offsets are verified in each process.

use std::collections::HashMap;

use crate::target::elf::BuildId;

/// Most build ids cached: a node runs a few dozen libcs and static programs.
const PLACES_MAX: usize = 1024;

/// Places by build id.
#[derive(Debug)]
pub struct ByBuildId<T> {
    places: HashMap<BuildId, T>,
}

impl<T> Default for ByBuildId<T> {
    fn default() -> Self {
        Self { places: HashMap::new() }
    }
}

impl<T: Copy> ByBuildId<T> {
    /// The cached offsets of a file.
    #[must_use]
    pub fn get(&self, id: Option<&BuildId>) -> Option<T> {
        self.places.get(id?).copied()
    }

    /// Stores offsets, unless the file has no build id or the cache is full.
    pub fn remember(&mut self, id: Option<&BuildId>, place: T) {
        let Some(id) = id else { return };
        if let Some(old) = self.places.get_mut(id) {
            *old = place;
        } else if self.places.len() < PLACES_MAX {
            self.places.insert(id.clone(), place);
        }
    }

    /// Number of files cached.
    #[must_use]
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_files_remembered_is_bounded_and_known_ones_can_still_change() {
        let mut places = ByBuildId::default();
        for number in 0..2 * PLACES_MAX as u64 {
            places.remember(Some(&BuildId(number.to_le_bytes().to_vec())), number);
        }
        assert_eq!(places.len(), PLACES_MAX);
        let first = BuildId(0u64.to_le_bytes().to_vec());
        places.remember(Some(&first), 7);
        assert_eq!(places.get(Some(&first)), Some(7));
        assert_eq!(places.get(None), None);
    }
}
