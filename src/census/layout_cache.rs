//! Cache of structures' offsets in a file's data, by the file's build id; cached offsets are verified in each process.

use std::collections::HashMap;

use crate::process::elf::BuildId;

/// Most build ids cached: a node runs a few dozen libcs and static programs.
const BUILD_IDS_MAX: usize = 1024;

/// Layouts by build id.
#[derive(Debug)]
pub struct ByBuildId<T> {
    layouts: HashMap<BuildId, T>,
}

impl<T> Default for ByBuildId<T> {
    fn default() -> Self {
        Self { layouts: HashMap::new() }
    }
}

impl<T: Copy> ByBuildId<T> {
    /// The cached offsets of a file.
    #[must_use]
    pub fn get(&self, id: Option<&BuildId>) -> Option<T> {
        self.layouts.get(id?).copied()
    }

    /// Stores offsets, unless the file has no build id or the cache is full.
    pub fn remember(&mut self, id: Option<&BuildId>, layout: T) {
        let Some(id) = id else { return };
        if let Some(old) = self.layouts.get_mut(id) {
            *old = layout;
        } else if self.layouts.len() < BUILD_IDS_MAX {
            self.layouts.insert(id.clone(), layout);
        }
    }

    /// Number of files cached.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layouts.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layouts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_files_remembered_is_bounded_and_known_ones_can_still_change() {
        let mut layouts = ByBuildId::default();
        for number in 0..2 * BUILD_IDS_MAX as u64 {
            layouts.remember(Some(&BuildId(number.to_le_bytes().to_vec())), number);
        }
        assert_eq!(layouts.len(), BUILD_IDS_MAX);
        let first = BuildId(0u64.to_le_bytes().to_vec());
        layouts.remember(Some(&first), 7);
        assert_eq!(layouts.get(Some(&first)), Some(7));
        assert_eq!(layouts.get(None), None);
    }
}
