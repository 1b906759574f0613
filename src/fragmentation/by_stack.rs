//! Bytes by stack, with separate sums for blocks from before the recording and for unattributed bytes.

use crate::units::StackId;

/// Stack ids are dense and have 20 bits (`ledger`): a vector indexed by id is the smallest map. A larger id is a bug and gets no space.
const STACKS_MAX: u32 = 1 << 20;

/// Stands for the unknown stacks of blocks allocated before the recording. No ledger assigns this id.
pub const BEFORE_ATTACH: StackId = StackId(u32::MAX);

/// Bytes charged to stacks. The sum over stacks, plus the bytes from before the recording, plus the unattributed bytes, is exactly the
/// total.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BytesByStack {
    by_id: Vec<u64>,
    before_attach_bytes: u64,
    unattributed_bytes: u64,
    total_bytes: u64,
}

impl BytesByStack {
    /// Charges a stack, or `[unattributed]`.
    #[inline]
    pub fn charge(&mut self, stack: Option<StackId>, bytes: u64) {
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        let Some(StackId(id)) = stack.filter(|stack| stack.0 < STACKS_MAX) else {
            let of = if stack == Some(BEFORE_ATTACH) { &mut self.before_attach_bytes } else { &mut self.unattributed_bytes };
            *of = of.saturating_add(bytes);
            return;
        };
        let index = id as usize;
        if index >= self.by_id.len() {
            self.by_id.resize(index + 1, 0);
        }
        self.by_id[index] = self.by_id[index].saturating_add(bytes);
    }

    /// The bytes charged to one stack.
    pub fn of(&self, stack: StackId) -> u64 {
        self.by_id.get(stack.0 as usize).copied().unwrap_or(0)
    }

    /// The stacks with charged bytes, by id.
    pub fn iter(&self) -> impl Iterator<Item = (StackId, u64)> + '_ {
        self.by_id.iter().enumerate().filter(|&(_, &bytes)| bytes > 0).map(|(id, &bytes)| (StackId(id as u32), bytes))
    }

    /// The bytes charged to [`BEFORE_ATTACH`].
    pub fn before_attach_bytes(&self) -> u64 {
        self.before_attach_bytes
    }

    /// Adds the charges of another account.
    pub fn add(&mut self, other: &Self) {
        for (stack, bytes) in other.iter() {
            self.charge(Some(stack), bytes);
        }
        self.charge(Some(BEFORE_ATTACH), other.before_attach_bytes);
        self.charge(None, other.unattributed_bytes);
    }

    /// Bytes without a known stack.
    pub fn unattributed_bytes(&self) -> u64 {
        self.unattributed_bytes
    }

    /// All bytes.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_from_before_the_recording_are_neither_a_stacks_nor_unattributed_and_the_sum_is_exact() {
        let mut bytes = BytesByStack::default();
        bytes.charge(Some(StackId(7)), 5);
        bytes.charge(Some(BEFORE_ATTACH), 11);
        bytes.charge(None, 2);
        let mut twice = bytes.clone();
        twice.add(&bytes);
        assert_eq!((twice.of(StackId(7)), twice.before_attach_bytes(), twice.unattributed_bytes(), twice.total_bytes()), (10, 22, 4, 36));
        assert_eq!(twice.iter().collect::<Vec<_>>(), [(StackId(7), 10)]);
    }
}
