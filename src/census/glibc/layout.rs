//! glibc's heap structures on machines with 64 bits, found by their shape. Pure: works on bytes that were already read.
//!
//! `struct malloc_state` (malloc/malloc.c): mutex, flags, [have_fastchunks, fastbinsY], top, last_remainder, bins[254], binmap[4], next,
//! next_free, attached_threads, system_mem, max_system_mem. From one release to another only the distance from its start to `bins`
//! changes, so that distance is found and the rest follows.

use super::super::memory::{USER_END, is_user_address, word_at, word32_at};

/// Pairs of list heads in `bins`: NBINS − 1.
pub const BINS: usize = 127;
/// Bytes of `bins`.
pub const BINS_BYTES: u64 = 16 * BINS as u64;
/// From `bins` back to `top`.
pub const TOP_BEFORE_BINS: u64 = 16;
/// From `bins` to `next`: the bins and the 16-byte bin map.
pub const NEXT_AFTER_BINS: u64 = BINS_BYTES + 16;
/// From `bins` to the end of the structure: next, next_free, attached_threads, system_mem, max_system_mem.
pub const END_AFTER_BINS: u64 = NEXT_AFTER_BINS + 40;
/// Bytes of the smallest chunk.
pub const CHUNK_BYTES_MIN: u64 = 32;
/// The header's low bit: the chunk before is in use.
pub const PREV_INUSE: u64 = 1;
/// The header's second bit: the chunk is a mapping of its own.
pub const IS_MMAPPED: u64 = 2;
/// The header's third bit: the chunk belongs to another arena than the main one.
pub const NON_MAIN_ARENA: u64 = 4;
/// All flags of a size word.
pub const FLAGS: u64 = 7;
/// Largest chunk that a fastbin may hold (M_MXFAST at its highest, 160 bytes, with header).
pub const FASTBIN_CHUNK_BYTES_MAX: u64 = 0xb0;
/// HEAP_MAX_SIZE without huge pages: 2 × DEFAULT_MMAP_THRESHOLD_MAX.
pub const HEAP_BYTES_MAX_DEFAULT: u64 = 64 << 20;

/// The differences between releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// From an arena's start to its `bins`.
    pub bins_offset: u64,
    /// Bytes of `heap_info` at the start of each heap of a non-main arena; 0 until such an arena was seen.
    pub heap_info_bytes: u64,
    /// Alignment and largest size of such a heap.
    pub heap_bytes_max: u64,
    /// Whether links of singly linked lists are stored xor their own address >> 12 (since 2.32); `None` until a list's end was seen.
    pub safe_linking: Option<bool>,
}

impl Layout {
    /// The layout with `bins` at this distance from an arena's start.
    #[must_use]
    pub fn with_bins_at(bins_offset: u64) -> Self {
        Self { bins_offset, heap_info_bytes: 0, heap_bytes_max: HEAP_BYTES_MAX_DEFAULT, safe_linking: None }
    }

    /// Fastbins of an arena: 10 up to glibc 2.42, none after. They lie between have_fastchunks (8 bytes padded) and `top`.
    #[must_use]
    pub fn fastbins(&self) -> usize {
        usize::try_from(self.bins_offset.saturating_sub(32) / 8).unwrap_or(0).min(16)
    }

    /// Bytes of an arena's structure.
    #[must_use]
    pub fn state_bytes(&self) -> u64 {
        self.bins_offset.saturating_add(END_AFTER_BINS)
    }

    /// A name for reports: the shape that was found, not the release.
    #[must_use]
    pub fn name(&self) -> String {
        let links = match self.safe_linking {
            Some(true) => "protected links",
            Some(false) => "plain links",
            None => "links unseen",
        };
        format!("glibc, bins at {}, {} fastbins, {links}", self.bins_offset, self.fastbins())
    }

    /// The address that a stored link at address `place` means.
    #[must_use]
    pub fn reveal(&self, place: u64, stored: u64) -> u64 {
        if self.safe_linking == Some(true) { stored ^ (place >> 12) } else { stored }
    }

    /// Notes whether links are protected, from the word stored at `place` at a list's known end.
    pub fn learn_links(&mut self, place: u64, stored_at_end: u64) {
        if self.safe_linking.is_none() {
            self.safe_linking = match stored_at_end {
                0 => Some(false),
                word if word == place >> 12 => Some(true),
                _ => None,
            };
        }
    }
}

/// Whether a word can be a link of a doubly linked list. Since 2.43 the heads in `bins` are only 8-aligned.
#[must_use]
pub fn is_link(word: u64) -> bool {
    word & 7 == 0 && is_user_address(word)
}

/// Whether a word can be a chunk's or block's address.
#[must_use]
pub fn is_chunk_address(word: u64) -> bool {
    word & 15 == 0 && is_user_address(word)
}

/// An arena's structure, decoded.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Arena {
    /// Its address.
    pub addr: u64,
    /// Whether it is main_arena.
    pub is_main: bool,
    /// Address of the top chunk; that of `bins` − 16 while the arena is empty.
    pub top: u64,
    /// Size of the top chunk, 0 if there is none.
    pub top_bytes: u64,
    /// Bytes the arena got from the system and holds.
    pub system_bytes: u64,
    /// Threads attached.
    pub attached_threads: u64,
    /// Heads of the fastbins.
    pub fastbins: Vec<u64>,
    /// First and last chunk of each bin.
    pub bins: Vec<(u64, u64)>,
    /// A non-main arena's heaps, start and end, oldest first.
    pub heaps: Vec<(u64, u64)>,
}

impl Arena {
    /// Decodes the bytes at `addr`. The size of top is left to the caller.
    #[must_use]
    pub fn parse(layout: &Layout, addr: u64, is_main: bool, bytes: &[u8]) -> Self {
        let bins_at = usize::try_from(layout.bins_offset).unwrap_or(0);
        let tail = bins_at + (NEXT_AFTER_BINS as usize);
        Self {
            addr,
            is_main,
            top: word_at(bytes, bins_at.saturating_sub(TOP_BEFORE_BINS as usize)),
            top_bytes: 0,
            system_bytes: word_at(bytes, tail + 24),
            attached_threads: word_at(bytes, tail + 16),
            fastbins: (0..layout.fastbins()).map(|i| word_at(bytes, 16 + 8 * i)).collect(),
            bins: (0..BINS).map(|i| (word_at(bytes, bins_at + 16 * i), word_at(bytes, bins_at + 16 * i + 8))).collect(),
            heaps: Vec::new(),
        }
    }

    /// What a bin's links hold when it is empty: the address that makes the two heads look like a chunk.
    #[must_use]
    pub fn bin_head(&self, layout: &Layout, bin: usize) -> u64 {
        self.addr.wrapping_add(layout.bins_offset).wrapping_add(16 * bin as u64).wrapping_sub(16)
    }
}

/// `struct malloc_par mp_`: the parameters and the mmapped chunks' account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MallocPar {
    /// Its address.
    pub addr: u64,
    /// Index into [`PAR_SHAPES`].
    pub shape: usize,
    /// Bytes of top above which free() trims.
    pub trim_threshold_bytes: u64,
    /// Slack requested with each brk.
    pub top_pad_bytes: u64,
    /// Requests from this size on are mappings of their own; adapts upwards unless set.
    pub mmap_threshold_bytes: u64,
    /// Whether the threshold no longer adapts.
    pub is_threshold_fixed: bool,
    /// Limit of arenas, 0 = eight per core.
    pub arena_max: u64,
    /// Size of a transparent huge page if malloc uses madvise, else 0.
    pub thp_bytes: u64,
    /// Size of a huge page if malloc maps them itself, else 0.
    pub huge_page_bytes: u64,
    /// mmapped chunks.
    pub mmapped_allocations: u32,
    /// Their bytes.
    pub mmapped_bytes: u64,
    /// Start of the brk heap; 0 before the first use.
    pub sbrk_base: u64,
    /// Chunks of each size that a thread's cache holds.
    pub tcache_count: u64,
}

/// Where a release keeps the members of `mp_`.
#[derive(Debug, Clone, Copy)]
pub struct ParShape {
    /// Releases for which this was checked.
    pub releases: &'static str,
    thp: Option<usize>,
    huge_page: Option<usize>,
    n_mmaps: usize,
    mmapped: usize,
}

/// The three shapes of `mp_` (members from glibc's malloc.c; offsets checked on the releases named).
pub const PAR_SHAPES: [ParShape; 3] = [
    ParShape { releases: "2.26-2.34", thp: None, huge_page: None, n_mmaps: 40, mmapped: 56 },
    ParShape { releases: "2.35-2.42", thp: Some(40), huge_page: Some(48), n_mmaps: 60, mmapped: 80 },
    ParShape { releases: "2.43", thp: Some(48), huge_page: Some(56), n_mmaps: 68, mmapped: 88 },
];

/// Bytes to read to decode any shape of `mp_`.
pub const PAR_BYTES: usize = 160;

/// n_mmaps_max's default: DEFAULT_MMAP_MAX.
const MMAPS_MAX_DEFAULT: u32 = 65536;

impl MallocPar {
    /// Decodes `bytes` found at `addr` in one shape. `None` if the values cannot be those of a `mp_`. `is_heap_start` says whether an
    /// address is where a brk heap begins.
    #[must_use]
    pub fn parse(shape_index: usize, addr: u64, bytes: &[u8], is_heap_start: impl Fn(u64) -> bool) -> Option<Self> {
        let shape = PAR_SHAPES.get(shape_index)?;
        let sbrk_at = shape.mmapped + 16;
        if addr & 7 != 0 || bytes.len() < sbrk_at + 40 {
            return None;
        }
        let size = |at: Option<usize>| at.map_or(0, |at| word_at(bytes, at));
        let par = Self {
            addr,
            shape: shape_index,
            trim_threshold_bytes: word_at(bytes, 0),
            top_pad_bytes: word_at(bytes, 8),
            mmap_threshold_bytes: word_at(bytes, 16),
            is_threshold_fixed: word32_at(bytes, shape.n_mmaps + 12) != 0,
            arena_max: word_at(bytes, 32),
            thp_bytes: size(shape.thp),
            huge_page_bytes: size(shape.huge_page),
            mmapped_allocations: word32_at(bytes, shape.n_mmaps),
            mmapped_bytes: word_at(bytes, shape.mmapped),
            sbrk_base: word_at(bytes, sbrk_at),
            tcache_count: word_at(bytes, sbrk_at + 24),
        };
        let arena_test = word_at(bytes, 24);
        let mmapped_max = word_at(bytes, shape.mmapped + 8);
        let (mmaps_limit, mmaps_max, fixed) =
            (word32_at(bytes, shape.n_mmaps + 4), word32_at(bytes, shape.n_mmaps + 8), word32_at(bytes, shape.n_mmaps + 12));
        let (tcache_bins, tcache_bytes, unsorted) =
            (word_at(bytes, sbrk_at + 8), word_at(bytes, sbrk_at + 16), word_at(bytes, sbrk_at + 32));
        let anchored = is_heap_start(par.sbrk_base);
        let is_power = |bytes: u64| bytes == 0 || bytes.is_power_of_two();
        // Where brk was refused from the start, sbrk_base is some page of a mapping.
        let defaults = par.sbrk_base & 4095 == 0 && tcache_bins == 64 && tcache_bytes >= 32 && mmaps_limit == MMAPS_MAX_DEFAULT;
        let plausible = (anchored || defaults)
            && tcache_bins <= 128
            && tcache_bytes <= 8 << 20
            && par.tcache_count <= 65535
            && unsorted <= 65535
            && (1..=64).contains(&arena_test)
            && par.arena_max <= 1 << 20
            && par.mmap_threshold_bytes >= 1
            && par.top_pad_bytes < 1 << 40
            && fixed <= 1
            && par.mmapped_allocations <= mmaps_max
            && mmapped_max >= par.mmapped_bytes
            && mmapped_max < USER_END
            && par.mmapped_bytes & 15 == 0
            && u64::from(mmaps_max).saturating_mul(4096) <= mmapped_max
            && (par.mmapped_allocations == 0 || par.mmapped_bytes >= 4096)
            && is_power(par.thp_bytes)
            && par.thp_bytes <= 1 << 30
            && is_power(par.huge_page_bytes)
            && par.huge_page_bytes <= 1 << 34;
        plausible.then_some(par)
    }
}
