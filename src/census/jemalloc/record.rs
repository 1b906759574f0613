//! jemalloc's records of extents (`edata_t` of 5.3, `extent_t` of 5.0 to 5.2) and its size classes. Pure.

use super::super::memory::{is_user_address, word_at};

/// Where the bitmap of a slab's regions begins in its record; bitmaps of several levels begin with the one that has a bit for each region.
pub const BITMAP_AT: usize = 64;
/// Size classes of a build at least; extents that are not in use have the number of its classes, this or a higher one.
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

/// `EDATA_BITS_*` of 5.3 and `EXTENT_BITS_*` of 5.2, 5.1 and 5.0.
pub const BITS: [Bits; 3] = [
    Bits { releases: "5.3", state: 17, state_mask: 7, size_class: 20, free_regions: 28 },
    Bits { releases: "5.1 or 5.2", state: 16, state_mask: 3, size_class: 18, free_regions: 26 },
    Bits { releases: "5.0", state: 15, state_mask: 3, size_class: 17, free_regions: 25 },
];

impl Bits {
    /// The size class that a record claims.
    #[must_use]
    pub fn size_class_of(&self, record: &[u8]) -> u64 {
        word_at(record, 0) >> self.size_class & 255
    }
}

/// The size classes of a build: multiples of its quantum (`LG_QUANTUM`) up to four, then four a doubling; with a quantum of 16 also 8
/// (include/jemalloc/internal/sc.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeClasses {
    /// Bytes between the smallest classes.
    pub quantum_bytes: u64,
}

/// With the default quantum, and with the one of the jemalloc that redis and valkey bring along (`--with-lg-quantum=3`).
pub const SIZE_CLASSES: [SizeClasses; 2] = [SizeClasses { quantum_bytes: 16 }, SizeClasses { quantum_bytes: 8 }];

impl SizeClasses {
    /// Bytes of a class (`sz_index2size`).
    #[must_use]
    pub fn bytes(self, index: u64) -> Option<u64> {
        // "Tiny" classes are those below the quantum.
        let tiny = u64::from(self.quantum_bytes > 8);
        let Some(index) = index.checked_sub(tiny) else { return Some(8) };
        let Some(regular) = index.checked_sub(4) else { return Some(self.quantum_bytes * (index + 1)) };
        if regular >= CLASSES {
            return None;
        }
        let (group, step) = (regular / 4, regular % 4 + 1);
        let base = (4 * self.quantum_bytes).checked_mul(1u64.checked_shl(u32::try_from(group).ok()?)?)?;
        base.checked_add(base / 4 * step)
    }

    /// Bytes of a class's slabs: the fewest pages that its regions fill (`slab_size` in src/sc.c).
    fn slab_bytes(self, index: u64, pages: Pages) -> Option<u64> {
        let region = self.bytes(index)?;
        (region >> region.trailing_zeros().min(pages.bits)).checked_mul(pages.bytes())
    }
}

/// What the records of a build look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Where their fields are.
    pub bits: Bits,
    /// Its size classes.
    pub classes: SizeClasses,
}

impl Form {
    /// Bytes of the class that a record claims.
    fn class_bytes_of(&self, record: &[u8]) -> Option<u64> {
        self.classes.bytes(self.bits.size_class_of(record))
    }
}

/// How many records repeat the size class that the page map has for them, by release, and how many slabs are as large as those of their
/// class, by size classes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Agreement {
    releases: [u64; BITS.len()],
    classes: [u64; SIZE_CLASSES.len()],
}

impl Agreement {
    /// Of records with the classes that the page map claims for them.
    #[must_use]
    pub fn of(records: &[(Vec<u8>, u64)], pages: Pages) -> Self {
        let mut agreement = Self::default();
        records.iter().for_each(|(record, class)| agreement.add(record, *class, pages));
        agreement
    }

    /// Adds a record with the class that the page map claims for it.
    pub fn add(&mut self, record: &[u8], class: u64, pages: Pages) {
        if class >= CLASSES {
            return;
        }
        for (count, bits) in self.releases.iter_mut().zip(BITS) {
            *count += u64::from(bits.size_class_of(record) == class);
        }
        if is_slab(record) {
            for (count, classes) in self.classes.iter_mut().zip(SIZE_CLASSES) {
                *count += u64::from(classes.slab_bytes(class, pages) == Some(word_at(record, 16) & !pages.low_mask()));
            }
        }
    }

    /// What most records agree with; the newest release and the default classes if they are undecided.
    #[must_use]
    pub fn form(&self) -> Form {
        let ([newest, ..], [default, ..]) = (BITS, SIZE_CLASSES);
        Form { bits: most(&self.releases, &BITS, newest), classes: most(&self.classes, &SIZE_CLASSES, default) }
    }
}

/// The first of those with the highest count; `default` if there is none.
fn most<T: Copy>(counts: &[u64], of: &[T], default: T) -> T {
    let more = |best: (u64, T), next: (u64, T)| if next.0 > best.0 { next } else { best };
    counts.iter().copied().zip(of.iter().copied()).reduce(more).map_or(default, |(_, one)| one)
}

/// Whether a record is of an extent that is cut into regions.
#[must_use]
pub fn is_slab(record: &[u8]) -> bool {
    word_at(record, 0) >> 12 & 1 == 1
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
    pub fn parse(record: &[u8], form: Form, pages: Pages) -> Option<Self> {
        let (bits, word) = (form.bits, word_at(record, 0));
        let state = word >> bits.state & bits.state_mask;
        let low_mask = pages.low_mask();
        let extent = Self {
            addr: word_at(record, 8) & !low_mask,
            bytes: word_at(record, 16) & !low_mask,
            offset_bytes: word_at(record, 8) & low_mask,
            state,
            is_slab: is_slab(record),
            region_bytes: form.class_bytes_of(record).unwrap_or(0),
            free_regions: word >> bits.free_regions & (2 * pages.regions_max() - 1),
            arena: u32::try_from(word & 4095).unwrap_or(0),
            pages,
        };
        let end = extent.addr.checked_add(extent.bytes)?;
        let sound = is_user_address(extent.addr) && is_user_address(end) && extent.bytes > 0 && state < 4;
        (sound && extent.fits(form, bits.size_class_of(record))).then_some(extent)
    }

    /// Sizes of extents in use fit their class; those of a record that changes meanwhile may not.
    fn fits(&self, form: Form, class: u64) -> bool {
        if self.state != ACTIVE {
            return true;
        }
        if self.is_slab {
            return self.region_bytes > 0 && self.region_bytes <= self.bytes && self.bytes / self.region_bytes <= self.pages.regions_max();
        }
        // Since 5.3.1 large blocks have as many pages as they need, and the class is the next one above.
        let below = class.checked_sub(1).and_then(|below| form.classes.bytes(below)).unwrap_or(0);
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing)]
    use super::*;

    const DEFAULT: Form = Form { bits: BITS[0], classes: SIZE_CLASSES[0] };

    #[test]
    fn size_classes_are_those_of_the_manual_and_of_redis() {
        let [default, of_redis] = SIZE_CLASSES;
        // From jemalloc(3), "Size classes", 64-bit system with 16-byte quantum.
        let manual = [8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280];
        let own: Vec<u64> = (0..manual.len() as u64).filter_map(|index| default.bytes(index)).collect();
        assert_eq!(own, manual);
        assert_eq!((default.bytes(28), default.bytes(36)), (Some(4096), Some(16384)));
        // The table "bins" of `MEMORY MALLOC-STATS` of redis 7.2: size and pages of a slab.
        let bins = [(8, 1), (16, 1), (24, 3), (32, 1), (40, 5), (48, 3), (56, 7), (64, 1), (80, 5), (96, 3), (112, 7), (128, 1), (160, 5)];
        let own = |index| Some((of_redis.bytes(index)?, of_redis.slab_bytes(index, Pages { bits: 12 })? >> 12));
        assert_eq!((0..13).filter_map(own).collect::<Vec<_>>(), bins);
        assert_eq!((of_redis.bytes(38), default.bytes(35)), (Some(14336), Some(14336)), "the last class of slabs");
        assert!(SIZE_CLASSES.iter().all(|classes| classes.bytes(255).is_none()));
    }

    #[test]
    fn slabs_tell_the_size_classes_and_records_the_release() {
        let pages = Pages { bits: 12 };
        for bits in BITS {
            for classes in SIZE_CLASSES {
                let mut agreement = Agreement::default();
                for class in 2..30u64 {
                    let mut record = vec![0u8; 24];
                    record[0..8].copy_from_slice(&(class << bits.size_class | 1 << 12).to_le_bytes());
                    record[16..24].copy_from_slice(&(classes.slab_bytes(class, pages).unwrap() | 5).to_le_bytes());
                    agreement.add(&record, class, pages);
                }
                assert_eq!(agreement.form(), Form { bits, classes });
            }
        }
        assert_eq!(Agreement::default().form(), DEFAULT);
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
        let extent = Extent::parse(&record, DEFAULT, pages).unwrap();
        assert_eq!((extent.addr, extent.bytes, extent.region_bytes, extent.free_regions), (0x7f00_0003_0000, 1 << 16, 8, 2));
        let free: Vec<u64> = (0..8192).filter(|&region| is_region_free(&record, region)).collect();
        assert_eq!(free, [8190, 8191]);
        assert!(Extent::parse(&record, DEFAULT, Pages { bits: 12 }).is_none(), "too many regions for small pages");
    }
}
