//! jemalloc's records of extents (`edata_t` of 5.3, `extent_t` of 5.2) and its size classes. Pure.

use super::super::memory::{is_user_address, word_at};

/// Where the bitmap of a slab's regions begins in its record; bitmaps of several levels begin with the one that has a bit for each region.
const BITMAP_AT: usize = 64;
/// Size classes of a build; extents that are not in use have this number.
pub const CLASSES: u64 = 232;

/// State of an extent in use.
pub const ACTIVE: u64 = 0;
/// State of an extent that is free, and whose pages are not returned yet.
pub const DIRTY: u64 = 1;
/// State of an extent that is free, and whose pages the kernel may take.
pub const MUZZY: u64 = 2;
/// State of an extent whose pages were returned.
pub const RETAINED: u64 = 3;

/// The pages of a build, in which it allocates (`LG_PAGE`): those of the kernel, or larger ones, for kernels with any pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    /// log2 of a page's bytes.
    pub bits: u32,
}

impl Pages {
    /// Bytes of a page.
    #[must_use]
    pub fn bytes(self) -> u64 {
        1 << self.bits
    }

    /// Low bits of e_addr (a large block's offset) and of e_size_esn (a serial number).
    #[must_use]
    pub fn low_mask(self) -> u64 {
        self.bytes() - 1
    }

    /// Maximum number of regions in a slab (`SLAB_MAXREGS`).
    #[must_use]
    pub fn regions_max(self) -> u64 {
        self.bytes() / 8
    }

    /// Bytes of a record that are read: up to the end of the bits of regions.
    #[must_use]
    pub fn record_bytes(self) -> usize {
        BITMAP_AT + (1 << (self.bits - 6))
    }

    /// The smallest class that is not served from slabs by default: four pages.
    fn large_bytes_min(self) -> u64 {
        4 * self.bytes()
    }
}

/// The positions of the fields in e_bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bits {
    /// The releases with these positions.
    pub releases: &'static str,
    state: u32,
    state_mask: u64,
    size_class: u32,
    free_regions: u32,
}

/// `EDATA_BITS_*` of 5.3 and `EXTENT_BITS_*` of 5.2.
pub const BITS: [Bits; 2] = [
    Bits { releases: "5.3", state: 17, state_mask: 7, size_class: 20, free_regions: 28 },
    Bits { releases: "5.2", state: 16, state_mask: 3, size_class: 18, free_regions: 26 },
];

impl Bits {
    /// The size class that a record claims.
    #[must_use]
    pub fn size_class_of(&self, record: &[u8]) -> u64 {
        word_at(record, 0) >> self.size_class & 255
    }
}

/// How many records repeat the size class that the page map has for them, by release.
#[derive(Debug, Clone, Copy, Default)]
pub struct Agreement([u64; BITS.len()]);

impl Agreement {
    /// Adds a record with the class that the page map claims for it.
    pub fn add(&mut self, record: &[u8], class: u64) {
        for (count, bits) in self.0.iter_mut().zip(BITS) {
            *count += u64::from(bits.size_class_of(record) == class && class < CLASSES);
        }
    }

    /// The release that most records agree with; the newest one if they are undecided.
    #[must_use]
    pub fn bits(&self) -> Bits {
        let [newest, older] = BITS;
        if self.0[1] > self.0[0] { older } else { newest }
    }
}

/// An extent.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    /// First address.
    pub addr: u64,
    /// Its pages.
    pub bytes: u64,
    /// Where in its first page a large block begins: jemalloc spreads them over cache sets.
    pub offset_bytes: u64,
    /// In use, dirty, muzzy or retained.
    pub state: u64,
    /// Whether it is cut into regions of one size.
    pub is_slab: bool,
    /// Bytes of a region, or of the large block; 0 if it is not in use.
    pub region_bytes: u64,
    /// Regions that are free.
    pub free_regions: u64,
    /// Number of its arena.
    pub arena: u32,
    /// The build's.
    pub pages: Pages,
}

/// Whether a region of a slab is free, by the slab's record.
#[must_use]
pub fn is_region_free(record: &[u8], region: u64) -> bool {
    let word = usize::try_from(region / 64).map_or(0, |word| word_at(record, BITMAP_AT.saturating_add(word.saturating_mul(8))));
    word >> (region % 64) & 1 == 1
}

impl Extent {
    /// Address behind the last one.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.addr + self.bytes
    }

    /// Reads a record. `None` if it is invalid: torn, or not a record.
    #[must_use]
    pub fn parse(record: &[u8], bits: Bits, pages: Pages) -> Option<Self> {
        let word = word_at(record, 0);
        let state = word >> bits.state & bits.state_mask;
        let low_mask = pages.low_mask();
        let extent = Self {
            addr: word_at(record, 8) & !low_mask,
            bytes: word_at(record, 16) & !low_mask,
            offset_bytes: word_at(record, 8) & low_mask,
            state,
            is_slab: word >> 12 & 1 == 1,
            region_bytes: class_bytes(bits.size_class_of(record)).unwrap_or(0),
            free_regions: word >> bits.free_regions & (2 * pages.regions_max() - 1),
            arena: u32::try_from(word & 4095).unwrap_or(0),
            pages,
        };
        let end = extent.addr.checked_add(extent.bytes)?;
        let sound = is_user_address(extent.addr) && is_user_address(end) && extent.bytes > 0 && state < 4;
        (sound && extent.fits(bits.size_class_of(record))).then_some(extent)
    }

    /// Sizes of extents in use fit their class; those of a record that changes meanwhile may not.
    fn fits(&self, class: u64) -> bool {
        if self.state != ACTIVE {
            return true;
        }
        if self.is_slab {
            return self.region_bytes > 0 && self.region_bytes <= self.bytes && self.bytes / self.region_bytes <= self.pages.regions_max();
        }
        // Since 5.3.1 large blocks have as many pages as they need, and the class is the next one above.
        let below = class.checked_sub(1).and_then(class_bytes).unwrap_or(0);
        self.region_bytes > 0 && self.bytes > below
    }

    /// Reduces a large block's bytes to what its extent has apart from `pad_bytes`.
    pub fn settle_large(&mut self, pad_bytes: u64) {
        if self.state == ACTIVE && !self.is_slab {
            self.region_bytes = large_bytes(self.region_bytes, self.bytes, pad_bytes, self.pages);
        }
    }
}

/// Bytes of a large block of a class in an extent: the class, or since 5.3.1 as many pages as the extent has apart from its pad.
#[must_use]
pub fn large_bytes(class_bytes: u64, extent_bytes: u64, pad_bytes: u64, pages: Pages) -> u64 {
    let inside = extent_bytes.saturating_sub(pad_bytes);
    if class_bytes >= pages.large_bytes_min() { class_bytes.min(inside) } else { class_bytes.min(extent_bytes) }
}

/// Bytes of a size class: 8, then multiples of 16 up to 128, then four a doubling (`sz_index2size`).
#[must_use]
pub fn class_bytes(index: u64) -> Option<u64> {
    match index {
        0 => Some(8),
        1..=8 => Some(16 * index),
        9..CLASSES => {
            let (group, step) = ((index - 9) / 4, (index - 9) % 4 + 1);
            let base = 128u64.checked_shl(u32::try_from(group).ok()?)?;
            base.checked_add(base / 4 * step)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    #[test]
    fn size_classes_are_those_of_the_manual() {
        // From jemalloc(3), "Size classes", 64-bit system with 16-byte quantum.
        let manual = [8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280];
        let own: Vec<u64> = (0..manual.len() as u64).filter_map(class_bytes).collect();
        assert_eq!(own, manual);
        assert_eq!(class_bytes(28), Some(4096));
        assert_eq!(class_bytes(36), Some(16384));
        assert_eq!(class_bytes(CLASSES), None);
    }

    #[test]
    fn a_large_block_is_its_class_or_the_pages_it_has() {
        let pages = Pages { bits: 12 };
        assert_eq!(large_bytes(20 << 10, 24 << 10, 4 << 10, pages), 20 << 10);
        // 5.3.1: 36 KiB requested, of class 40 KiB.
        assert_eq!(large_bytes(40 << 10, 40 << 10, 4 << 10, pages), 36 << 10);
        assert_eq!(large_bytes(40 << 10, 36 << 10, 0, pages), 36 << 10);
    }

    #[test]
    fn a_record_of_a_build_with_larger_pages_has_more_regions() {
        assert_eq!([12, 14, 16].map(|bits| Pages { bits }.record_bytes()), [128, 320, 1088]);
        let pages = Pages { bits: 16 };
        // A slab of 8,192 regions of 8 bytes, of which two are free, in arena 3.
        let mut record = vec![0u8; pages.record_bytes()];
        let bits = 3 | 1 << 12 | 2 << 28;
        for (at, word) in [(0, bits), (8, 0x7f00_0003_0000u64), (16, 0x1_0007), (BITMAP_AT + 8 * 127, 3 << 62)] {
            record[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let extent = Extent::parse(&record, BITS[0], pages).unwrap();
        assert_eq!((extent.addr, extent.bytes, extent.region_bytes, extent.free_regions), (0x7f00_0003_0000, 1 << 16, 8, 2));
        let free: Vec<u64> = (0..8192).filter(|&region| is_region_free(&record, region)).collect();
        assert_eq!(free, [8190, 8191]);
        assert!(Extent::parse(&record, BITS[0], Pages { bits: 12 }).is_none(), "too many regions for small pages");
    }
}
