//! Bytes by stack, with what no known stack owns kept apart.

use crate::units::StackId;

/// Stack ids are dense and have 20 bits (`ledger`): a vector by id is the smallest map. A larger id is a mistake and is not given room.
const STACKS_MAX: u32 = 1 << 20;

/// Bytes charged to stacks. The sum over stacks plus the unattributed bytes is exactly the total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BytesByStack {
    by_id: Vec<u64>,
    unattributed_bytes: u64,
    total_bytes: u64,
}

impl BytesByStack {
    /// Charges a stack, or nobody known.
    #[inline]
    pub fn charge(&mut self, stack: Option<StackId>, bytes: u64) {
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        let Some(StackId(id)) = stack.filter(|stack| stack.0 < STACKS_MAX) else {
            self.unattributed_bytes = self.unattributed_bytes.saturating_add(bytes);
            return;
        };
        let index = id as usize;
        if index >= self.by_id.len() {
            self.by_id.resize(index + 1, 0);
        }
        self.by_id[index] = self.by_id[index].saturating_add(bytes);
    }

    /// What one stack was charged.
    pub fn of(&self, stack: StackId) -> u64 {
        self.by_id.get(stack.0 as usize).copied().unwrap_or(0)
    }

    /// The stacks that were charged something, by id.
    pub fn iter(&self) -> impl Iterator<Item = (StackId, u64)> + '_ {
        self.by_id.iter().enumerate().filter(|&(_, &bytes)| bytes > 0).map(|(id, &bytes)| (StackId(id as u32), bytes))
    }

    /// What no known stack owns.
    pub fn unattributed_bytes(&self) -> u64 {
        self.unattributed_bytes
    }

    /// Everything.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}
