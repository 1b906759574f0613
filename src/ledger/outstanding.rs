//! The outstanding blocks of one process: address → size, stack and time of allocation, in 16 bytes per slot.
//!
//! An open-addressing table in hash order: slots are probed linearly from the block's home, `home = hash × capacity >> 64`, and the
//! occupied slots are sorted by hash. That order has three advantages: a search for an absent address stops early; a deletion shifts back
//! the following slots and leaves no tombstone; and the table is resized *in place*, by sequential sweeps, to any capacity (the blocks are
//! packed, then distributed again in the same order), so that growing needs no second table.
//!
//! ```text
//! slot:  key   = addr >> shift (44 bits) | stack id (20 bits)      key 0 = empty
//!        value = size (24 bits)      | birth tick (40 bits)
//! ```
//!
//! Memory: 16 bytes per slot, loaded to at most 3/4 and, after growing by 4/3, to at least 9/16; shrunk when less than half full. So
//! 21 to 29 bytes per live block while the heap grows, at most 32 after it shrank. Blocks that do not fit a slot (16 MiB and more, addresses
//! above the machine's user space or not a multiple of `1 << shift`) go to a hash map.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use crate::machine::Machine;
use crate::units::{Addr, StackId};

/// One outstanding block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Block {
    /// Start of the block.
    pub addr: Addr,
    /// Bytes requested.
    pub size_bytes: u64,
    /// The stack that allocated it.
    pub stack: StackId,
    /// When, in ticks of the ledger's clock.
    pub birth_tick: u64,
}

/// Stack ids fit 20 bits, all ones included.
pub(super) const STACK_ID_BITS: u32 = 20;
/// Births fit 40 bits.
pub(super) const BIRTH_BITS: u32 = 40;

const STACK_MASK: u64 = (1 << STACK_ID_BITS) - 1;
const BIRTH_MASK: u64 = (1 << BIRTH_BITS) - 1;
/// Sizes in a slot are below this; user addresses of ordinary processes are below `ADDR_LIMIT`.
const SIZE_LIMIT: u64 = 1 << (64 - BIRTH_BITS);
const ADDR_LIMIT: u64 = Machine::HOST.user_end().next_power_of_two();
/// 44 bits of an address remain: on x86-64 of any block; on arm64, with one bit more, of those at multiples of 16, which all of glibc's and
/// musl's are.
const ADDR_SHIFT: u32 = ADDR_LIMIT.trailing_zeros() - (64 - STACK_ID_BITS);

/// Homes of the smallest table: 16 KiB, so that a ledger of an idle process costs little.
const CAPACITY_MIN: usize = 1024;
/// Slots after the last home for the run that starts there. At load 3/4 a run is longer than this with probability below e^-28 (the queue
/// of an M/D/1 server); if it happens the tail is doubled.
const TAIL_MIN: usize = 64;

#[derive(Clone, Copy, Default)]
#[repr(C, align(16))]
struct Slot {
    key: u64,
    value: u64,
}

impl Slot {
    const EMPTY: Self = Self { key: 0, value: 0 };

    /// The block in slot form, if it fits.
    #[inline]
    fn pack(block: &Block) -> Option<Self> {
        let addr = block.addr.0;
        let fits =
            fits_addr(addr) && block.size_bytes < SIZE_LIMIT && u64::from(block.stack.0) <= STACK_MASK && block.birth_tick <= BIRTH_MASK;
        fits.then_some(Self {
            key: (addr >> ADDR_SHIFT) << STACK_ID_BITS | u64::from(block.stack.0),
            value: block.size_bytes << BIRTH_BITS | block.birth_tick,
        })
    }

    #[inline]
    fn unpack(self) -> Block {
        Block {
            addr: Addr((self.key >> STACK_ID_BITS) << ADDR_SHIFT),
            size_bytes: self.value >> BIRTH_BITS,
            stack: StackId((self.key & STACK_MASK) as u32),
            birth_tick: self.value & BIRTH_MASK,
        }
    }

    #[inline]
    fn is_empty(self) -> bool {
        self.key == 0
    }
}

/// Whether an address can be a slot's key. 0 cannot: it marks the empty slot.
#[inline]
fn fits_addr(addr: u64) -> bool {
    addr != 0 && addr < ADDR_LIMIT && addr & ((1 << ADDR_SHIFT) - 1) == 0
}

/// The table. All operations are exact for every block; a slot is merely the cheap form.
#[derive(Clone)]
pub struct Outstanding {
    /// `capacity` homes and a tail.
    slots: Vec<Slot>,
    capacity: usize,
    tail: usize,
    /// Occupied slots.
    packed: usize,
    /// Blocks that do not fit a slot, by address.
    outliers: HashMap<u64, Block>,
    /// Random, so that no watched process can choose addresses that collide.
    seed: u64,
}

impl Default for Outstanding {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            capacity: 0,
            tail: TAIL_MIN,
            packed: 0,
            outliers: HashMap::new(),
            seed: RandomState::new().hash_one(0_u64),
        }
    }
}

/// Where an address is, or where it would go.
enum Position {
    At(usize),
    Missing(usize),
}

impl Outstanding {
    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.packed + self.outliers.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the table occupies, slack included.
    pub fn memory_bytes(&self) -> u64 {
        let outlier_bytes = size_of::<(u64, Block)>() + 1;
        (self.slots.capacity() * size_of::<Slot>() + self.outliers.capacity() * outlier_bytes) as u64
    }

    /// Adds a block. Returns the former block at the same address, which is replaced.
    #[inline]
    pub fn insert(&mut self, block: &Block) -> Option<Block> {
        let Some(slot) = Slot::pack(block) else {
            let displaced = self.remove(block.addr);
            self.outliers.insert(block.addr.0, *block);
            return displaced;
        };
        let displaced = if self.outliers.is_empty() { None } else { self.outliers.remove(&block.addr.0) };
        if (self.packed + 1) * 4 > self.capacity * 3 {
            self.rebuild((self.capacity / 3 * 4).max(CAPACITY_MIN), |_| true);
        }
        loop {
            match self.find(slot.key) {
                Position::At(index) => return Some(std::mem::replace(&mut self.slots[index], slot).unpack()),
                Position::Missing(index) => {
                    let end = self.slots[index..].iter().position(|slot| slot.is_empty());
                    if let Some(length) = end {
                        self.slots.copy_within(index..index + length, index + 1);
                        self.slots[index] = slot;
                        self.packed += 1;
                        return displaced;
                    }
                    self.tail *= 2;
                    self.rebuild(self.capacity, |_| true);
                }
            }
        }
    }

    /// Removes a block.
    #[inline]
    pub fn remove(&mut self, addr: Addr) -> Option<Block> {
        if fits_addr(addr.0)
            && self.capacity > 0
            && let Position::At(index) = self.find(Self::key(addr))
        {
            let block = self.slots[index].unpack();
            self.close(index);
            self.packed -= 1;
            self.shrink();
            return Some(block);
        }
        if self.outliers.is_empty() { None } else { self.outliers.remove(&addr.0) }
    }

    /// The block that starts at an address.
    pub fn get(&self, addr: Addr) -> Option<Block> {
        if fits_addr(addr.0)
            && self.capacity > 0
            && let Position::At(index) = self.find(Self::key(addr))
        {
            return Some(self.slots[index].unpack());
        }
        self.outliers.get(&addr.0).copied()
    }

    /// Prefetches the slots of an address that is about to be looked up: four cache lines, 16 slots, which is what a search and the shift
    /// after it touch at load 3/4 (9 on average).
    #[inline]
    pub fn prefetch(&self, addr: Addr) {
        #[cfg(target_arch = "x86_64")]
        if self.capacity > 0 {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let home = self.home(self.hash(Self::key(addr)));
            let slot: *const Slot = &self.slots[home];
            for line in 0..4 {
                // SAFETY: a prefetch reads nothing and may be given any address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(slot.wrapping_add(line * 4).cast()) };
            }
        }
    }

    /// All blocks, in no useful order.
    pub fn iter(&self) -> impl Iterator<Item = Block> + '_ {
        let packed = self.slots.iter().filter(|slot| !slot.is_empty()).map(|slot| slot.unpack());
        packed.chain(self.outliers.values().copied())
    }

    /// Keeps the blocks that the test accepts, in one sweep.
    pub fn retain(&mut self, mut keep: impl FnMut(&Block) -> bool) {
        self.outliers.retain(|_, block| keep(block));
        if self.capacity > 0 {
            self.rebuild(self.capacity, |slot| keep(&slot.unpack()));
            self.shrink();
        }
    }

    /// Gives every block a new birth, which must not be later than the old one.
    pub(super) fn rebase(&mut self, birth: impl Fn(u64) -> u64) {
        for slot in self.slots.iter_mut().filter(|slot| !slot.is_empty()) {
            slot.value = slot.value & !BIRTH_MASK | birth(slot.value & BIRTH_MASK) & BIRTH_MASK;
        }
        for block in self.outliers.values_mut() {
            block.birth_tick = birth(block.birth_tick);
        }
    }

    /// A copy of the blocks that the test accepts, sorted by address: 16 bytes per block.
    pub fn sorted(&self, mut keep: impl FnMut(&Block) -> bool) -> SortedBlocks {
        let mut packed: Vec<(u64, u64)> =
            self.slots.iter().filter(|slot| !slot.is_empty() && keep(&slot.unpack())).map(|slot| (slot.key, slot.value)).collect();
        packed.sort_unstable();
        let mut outliers: Vec<Block> = self.outliers.values().filter(|block| keep(block)).copied().collect();
        outliers.sort_unstable();
        SortedBlocks { packed, outliers }
    }

    /// Returns memory if less than half of the slots are occupied.
    #[inline]
    fn shrink(&mut self) {
        let capacity = (self.packed * 3 / 2).max(CAPACITY_MIN);
        // Only where it pays: a table with a long tail would otherwise be rebuilt for every block removed.
        if self.packed * 2 < self.slots.len() && capacity < self.capacity / 8 * 7 {
            self.rebuild(capacity, |_| true);
        }
    }

    #[inline]
    fn key(addr: Addr) -> u64 {
        (addr.0 >> ADDR_SHIFT) << STACK_ID_BITS
    }

    /// Mixes a key's address. A bijection of the address, so two blocks never have the same hash.
    #[inline]
    fn hash(&self, key: u64) -> u64 {
        let mixed = ((key >> STACK_ID_BITS) ^ self.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ (mixed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
    }

    #[inline]
    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.capacity as u128) >> 64) as usize
    }

    #[inline]
    fn find(&self, key: u64) -> Position {
        let hash = self.hash(key);
        let mut index = self.home(hash);
        while let Some(slot) = self.slots.get(index) {
            if slot.is_empty() {
                break;
            }
            if (slot.key ^ key) >> STACK_ID_BITS == 0 {
                return Position::At(index);
            }
            if self.hash(slot.key) > hash {
                break;
            }
            index += 1;
        }
        Position::Missing(index)
    }

    /// Empties a slot and shifts back those after it that are not at their homes.
    #[inline]
    fn close(&mut self, index: usize) {
        let mut end = index + 1;
        while let Some(slot) = self.slots.get(end) {
            if slot.is_empty() || self.home(self.hash(slot.key)) == end {
                break;
            }
            end += 1;
        }
        self.slots.copy_within(index + 1..end, index);
        self.slots[end - 1] = Slot::EMPTY;
    }

    /// Resizes in place: packs the slots to keep at the front, moves them to the end, and distributes them from there. Writing never
    /// overtakes what is still to be distributed, because all of it fits behind the slot that is written.
    #[cold]
    fn rebuild(&mut self, capacity: usize, mut keep: impl FnMut(Slot) -> bool) {
        let mut packed = 0;
        for index in 0..self.slots.len() {
            let slot = self.slots[index];
            if !slot.is_empty() && keep(slot) {
                self.slots[packed] = slot;
                packed += 1;
            }
        }
        self.packed = packed;
        self.capacity = capacity.max(packed);
        let mut front = 0;
        loop {
            let total = self.capacity + self.tail;
            // The blocks are at `front..front + packed`; all other slots are stale.
            if total < self.slots.len() {
                self.slots.copy_within(front..front + packed, 0);
                front = 0;
                self.slots.truncate(total);
                self.slots.shrink_to_fit();
            } else {
                self.slots.reserve_exact(total - self.slots.len());
                self.slots.resize(total, Slot::EMPTY);
            }
            let source = total - packed;
            self.slots.copy_within(front..front + packed, source);
            self.slots[..source].fill(Slot::EMPTY);
            if self.deal(source) {
                return;
            }
            // The last run does not fit the tail, and some slots were put before their homes. They are still in order: pack them and
            // distribute them again, with a longer tail.
            front = 0;
            let mut write = 0;
            for index in 0..self.slots.len() {
                let slot = self.slots[index];
                if !slot.is_empty() {
                    self.slots[write] = slot;
                    write += 1;
                }
            }
            self.tail *= 2;
        }
    }

    /// Distributes the blocks in `source..` to their slots. False if one had to be put before its home for lack of a tail.
    fn deal(&mut self, source: usize) -> bool {
        let mut next = 0;
        let mut fits = true;
        for read in source..self.slots.len() {
            let slot = std::mem::take(&mut self.slots[read]);
            let place = self.home(self.hash(slot.key)).max(next);
            fits &= place <= read;
            let place = place.min(read);
            self.slots[place] = slot;
            next = place + 1;
        }
        fits
    }
}

/// Blocks sorted by address, made by [`Outstanding::sorted`].
pub struct SortedBlocks {
    packed: Vec<(u64, u64)>,
    outliers: Vec<Block>,
}

impl SortedBlocks {
    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.packed.len() + self.outliers.len()
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The blocks by ascending address.
    pub fn iter(&self) -> impl Iterator<Item = Block> + '_ {
        let mut packed = self.packed.iter().map(|&(key, value)| Slot { key, value }.unpack()).peekable();
        let mut outliers = self.outliers.iter().copied().peekable();
        std::iter::from_fn(move || match (packed.peek(), outliers.peek()) {
            (Some(left), Some(right)) if right.addr < left.addr => outliers.next(),
            (Some(_), _) => packed.next(),
            (None, _) => outliers.next(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn block(addr: u64) -> Block {
        Block { addr: Addr(addr), size_bytes: addr % 1000, stack: StackId((addr % 77) as u32), birth_tick: addr % 12345 }
    }

    fn assert_same(table: &Outstanding, truth: &HashMap<u64, Block>) {
        assert_eq!(table.len(), truth.len());
        let mut sorted: Vec<Block> = truth.values().copied().collect();
        sorted.sort_unstable();
        assert_eq!(table.sorted(|_| true).iter().collect::<Vec<_>>(), sorted);
        let mut listed: Vec<Block> = table.iter().collect();
        listed.sort_unstable();
        assert_eq!(listed, sorted);
    }

    #[test]
    fn a_live_block_costs_at_most_32_bytes_whether_the_heap_grows_or_shrinks() {
        let mut table = Outstanding::default();
        let addrs: Vec<u64> = (1..300_000).map(|n| n * 48).collect();
        let check = |table: &Outstanding| {
            // Small tables are 17 KiB whatever they hold.
            if table.len() > 2048 {
                assert!(table.memory_bytes() <= 32 * table.len() as u64, "{} blocks, {} B", table.len(), table.memory_bytes());
            }
        };
        for &addr in &addrs {
            assert_eq!(table.insert(&block(addr)), None);
            check(&table);
        }
        for &addr in addrs.iter().rev() {
            assert_eq!(table.remove(Addr(addr)), Some(block(addr)));
            check(&table);
        }
        assert!(table.is_empty());
    }

    #[test]
    fn a_run_that_does_not_fit_the_end_of_the_table_makes_the_tail_longer() {
        let mut table = Outstanding::default();
        table.insert(&block(16));
        let last = table.capacity - 1;
        let crowd: Vec<u64> =
            (1..).map(|n| n * 16).filter(|&addr| table.home(table.hash(Outstanding::key(Addr(addr)))) == last).take(300).collect();
        let mut truth = HashMap::from([(16, block(16))]);
        for addr in crowd {
            table.insert(&block(addr));
            truth.insert(addr, block(addr));
        }
        assert!(table.tail > TAIL_MIN);
        assert_same(&table, &truth);
        for addr in truth.keys() {
            assert_eq!(table.remove(Addr(*addr)), Some(block(*addr)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn the_table_holds_what_a_hash_map_holds(
            ops in prop::collection::vec((0..3000_u64, any::<bool>(), 0..100_u8), 1..6000),
        ) {
            let mut table = Outstanding::default();
            let mut truth = HashMap::new();
            for (n, insert, odd) in ops {
                let addr = n * 16 + u64::from(odd == 0) * 5 + u64::from(odd == 1) * (1 << 50);
                if insert || n < 1000 {
                    let size_bytes = if odd == 2 { 1 << 24 } else { u64::from(odd) };
                    let block = Block { size_bytes, ..block(addr) };
                    prop_assert_eq!(table.insert(&block), truth.insert(addr, block));
                } else {
                    prop_assert_eq!(table.get(Addr(addr)), truth.get(&addr).copied());
                    prop_assert_eq!(table.remove(Addr(addr)), truth.remove(&addr));
                }
            }
            assert_same(&table, &truth);
            table.retain(|block| block.addr.0 % 5 < 2);
            truth.retain(|addr, _| addr % 5 < 2);
            assert_same(&table, &truth);
        }
    }
}
