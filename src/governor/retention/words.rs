//! The words by which a block is recognised, and the allocator's data next to it. Pure.

use crate::bpf;

/// Words of a block that are compared.
pub const WORDS: usize = bpf::WORDS as usize;
/// Of them, at its start.
const HEAD: u64 = bpf::WORDS_HEAD as u64;
/// Of them, spread between those and its end.
const SPREAD: u64 = bpf::WORDS_SPREAD as u64;
/// Numbers nearer to 0 than this are counters, lengths and flags, which many blocks share.
const SMALL: u64 = 1 << 16;
/// Where a program's memory is: above the first MiB, below the end of user addresses on any machine.
const POINTER_MIN: u64 = 1 << 20;
const POINTER_END: u64 = 1 << 48;
/// Free chunks point at others of the same arena: all of glibc's are within this distance (malloc/arena.c: 64 MiB per heap of a thread; the
/// main heap grows up from the program).
const LINK_DISTANCE_MAX: u64 = 1 << 40;

/// Position of each word in a block of so many bytes, in bytes from its start: the first eight, six spread between these and the last two,
/// the last two. As `fp_send_contents` in bpf/alloc.bpf.h reads them.
#[must_use]
pub fn places(bytes: u64) -> [Option<u64>; WORDS] {
    let words = bytes / 8;
    std::array::from_fn(|at| {
        let at = at as u64;
        let index = if at < HEAD {
            (at < words).then_some(at)
        } else if at < HEAD + SPREAD {
            (words >= WORDS as u64).then(|| HEAD + (at - HEAD) * (words - HEAD - 2) / SPREAD)
        } else {
            (words >= HEAD + 2).then(|| words - (WORDS as u64 - at))
        };
        index.map(|index| index * 8)
    })
}

/// The digest that is kept of a word: enough to see whether it is still the same.
#[must_use]
pub fn digest(word: u64) -> u32 {
    (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

/// Whether a number, positive or negative, is too small to distinguish blocks.
#[must_use]
pub fn is_small(word: u64) -> bool {
    word < SMALL || word.wrapping_neg() < SMALL
}

/// Whether a word may be an address. Addresses do not tell a block from the next one in the same place: a pointer into the block itself is
/// always the same, and a block and what it points to are often freed and allocated again together (perl's hashes).
#[must_use]
pub fn may_be_pointer(word: u64) -> bool {
    word.is_multiple_of(8) && (POINTER_MIN..POINTER_END).contains(&word)
}

/// glibc's size field of a chunk, which lies before the block (malloc/malloc.c, `struct malloc_chunk`): the size in bytes, a multiple of
/// 16, and three flags below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeField(pub u64);

impl SizeField {
    const PREVIOUS_IN_USE: u64 = 1;
    const IS_MMAPPED: u64 = 2;

    /// The chunk's size with its header.
    #[must_use]
    pub fn chunk_bytes(self) -> u64 {
        self.0 & !15
    }

    /// Whether the chunk is a mapping of its own.
    #[must_use]
    pub fn is_mmapped(self) -> bool {
        self.0 & Self::IS_MMAPPED != 0
    }

    /// Whether the chunk before this one is in use, or in a thread's cache or a fast bin.
    #[must_use]
    pub fn previous_is_in_use(self) -> bool {
        self.0 & Self::PREVIOUS_IN_USE != 0
    }

    /// The field without the flag of the previous chunk.
    #[must_use]
    pub fn own(self) -> u64 {
        self.0 & !Self::PREVIOUS_IN_USE
    }

    /// Whether it can be that of a chunk allocated for so many bytes: no larger than rounding, alignment and a page explain.
    #[must_use]
    pub fn fits(self, bytes: u64) -> bool {
        let chunk = self.chunk_bytes();
        self.0 & 8 == 0 && chunk >= bytes.saturating_add(8) && chunk <= bytes.saturating_add(bytes / 2).saturating_add(8192)
    }
}

/// What musl keeps in the eight bytes before a block (src/malloc/mallocng/meta.h, `get_meta` and `get_slot_index`): the block's distance from
/// the first slot of its group in units of 16 bytes, in the last two bytes, or where the byte at 4 is not 0 in the first four; and in the
/// byte at 5 the slot's number below three bits for what is unused at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotHeader(pub u64);

impl SlotHeader {
    /// Bytes of a unit, and of a group before its first slot.
    const UNIT: u64 = 16;

    fn is_far(self) -> bool {
        self.0 >> 32 & 0xff != 0
    }

    /// The header without the bytes before it, which may belong to the previous slot.
    #[must_use]
    pub fn own(self) -> u64 {
        if self.is_far() { self.0 } else { self.0 >> 32 }
    }

    /// The start of the group of a block at this address.
    #[must_use]
    pub fn group(self, addr: u64) -> Option<u64> {
        let units = if self.is_far() { self.0 & 0xffff_ffff } else { self.0 >> 48 };
        addr.checked_sub(units * Self::UNIT + Self::UNIT)
    }

    /// Whether the slot's bit is set in neither of the group's masks: `avail_mask`, never handed out, and `freed_mask`.
    #[must_use]
    pub fn is_used(self, masks: u64) -> bool {
        ((masks | masks >> 32) >> (self.0 >> 40 & 31)) & 1 == 0
    }
}

/// Whether the first word of a block can be the link that glibc writes there when the block goes into a thread's cache or a fast bin:
/// nothing or a chunk of the same heap, since 2.32 xor-ed with the word's own address shifted (`PROTECT_PTR`).
#[must_use]
pub fn may_be_link(word: u64, addr: u64) -> bool {
    let is_chunk = |link: u64| link == 0 || (link.is_multiple_of(16) && link.abs_diff(addr) < LINK_DISTANCE_MAX);
    is_chunk(word) || is_chunk(word ^ (addr >> 12))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lie_within_the_block_each_once() {
        for bytes in 0..4096u64 {
            let mut seen: Vec<u64> = places(bytes).into_iter().flatten().collect();
            assert!(seen.iter().all(|place| place + 8 <= bytes), "{bytes}: {seen:?}");
            let count = seen.len();
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), count, "{bytes}: {seen:?}");
            let words = (bytes / 8) as usize;
            assert_eq!(
                count,
                if words < 8 {
                    words
                } else if words < 10 {
                    8
                } else if words < 16 {
                    10
                } else {
                    16
                }
            );
        }
    }

    #[test]
    fn links_of_free_chunks_are_distinguished_from_words_of_programs() {
        let addr = 0x5555_5556_0010;
        for link in [0, 0x5555_5557_0020] {
            assert!(may_be_link(link, addr) && may_be_link(link ^ (addr >> 12), addr));
        }
        assert!(!may_be_link(0x7261_6765_6b62_6f6f, addr) && !may_be_link(0x5555_5557_0021 ^ 0x4000_0000_0000_0000, addr));
    }

    #[test]
    fn a_slots_header_leads_to_its_group_and_its_bit() {
        // Slot 3, 5 bytes unused and more, 60 units from the first slot; the bytes before belong to the previous slot.
        let near = SlotHeader(60 << 48 | 0xa3 << 40 | 0xdead_beef);
        assert_eq!((near.group(0x7f00_0000_1000), near.own()), (Some(0x7f00_0000_1000 - 61 * 16), 60 << 16 | 0xa300));
        assert!(near.is_used(0xffff_fff7_ffff_fff7) && !near.is_used(8) && !near.is_used(8 << 32));
        let far = SlotHeader(0x03 << 40 | 1 << 32 | 0x1_0000);
        assert_eq!((far.group(0x7f00_0100_0000), far.own()), (Some(0x7f00_0100_0000 - 0x10_0010), far.0));
        assert_eq!(SlotHeader(u64::MAX).group(0x1000), None);
    }

    #[test]
    fn a_size_field_that_no_such_block_can_have_is_refused() {
        assert!(SizeField(0x71).fits(100) && SizeField(0x70).fits(0x68));
        assert!(!SizeField(0x71).fits(0x69), "too small");
        assert!(!SizeField(0x79).fits(100), "not a multiple of 16");
        assert!(!SizeField(1 << 40).fits(100), "too large");
    }
}
