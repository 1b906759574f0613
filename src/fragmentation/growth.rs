//! `growth_space`: the stacks that made the heap grow while enough free bytes were available.

use super::by_stack::BytesByStack;
use crate::units::StackId;

/// One growth of a heap: brk, a new arena heap, an mmap by the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Growth {
    /// The stack that requested the block for which the heap grew.
    pub stack: Option<StackId>,
    /// Bytes by which the extent grew.
    pub grown_bytes: u64,
    /// Bytes requested.
    pub requested_bytes: u64,
    /// Free bytes of the heap at that moment; `None` if not known.
    pub free_bytes: Option<u64>,
}

/// The account of a heap's growth.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GrowthSpace {
    /// Growth while at least as many bytes as requested were free, by stack.
    pub bytes: BytesByStack,
    /// All growth, by stack.
    pub all: BytesByStack,
    /// Growth for which the free bytes at that moment are not known.
    pub unknown_bytes: u64,
    /// Number of growths.
    pub growths: u64,
}

impl GrowthSpace {
    /// Adds a growth to the account.
    pub fn add(&mut self, growth: &Growth) {
        self.growths += 1;
        self.all.charge(growth.stack, growth.grown_bytes);
        match growth.free_bytes {
            Some(free_bytes) if free_bytes >= growth.requested_bytes => self.bytes.charge(growth.stack, growth.grown_bytes),
            Some(_) => {}
            None => self.unknown_bytes = self.unknown_bytes.saturating_add(growth.grown_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_charged_only_where_enough_bytes_were_free() {
        let mut growth = GrowthSpace::default();
        let one = Growth { stack: Some(StackId(4)), grown_bytes: 135_168, requested_bytes: 4096, free_bytes: Some(4096) };
        growth.add(&one);
        growth.add(&Growth { free_bytes: Some(4095), ..one });
        growth.add(&Growth { free_bytes: None, ..one });
        assert_eq!(growth.bytes.of(StackId(4)), 135_168);
        assert_eq!((growth.all.total_bytes(), growth.unknown_bytes, growth.growths), (3 * 135_168, 135_168, 3));
    }
}
