//! The stacks of one ledger: hash → dense id, frames kept once, and what each stack allocated, freed and holds.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::histogram::Histogram;
use super::outstanding::STACK_ID_BITS;
use crate::units::{StackHash, StackId};

/// The allocations for which no stack could be taken.
pub const NO_STACK: StackId = StackId(0);
/// The allocations of stacks that arrived after the limit was reached: `[stacks beyond the limit]`.
pub const STACKS_BEYOND_LIMIT: StackId = StackId(1);

/// Bounds of what a ledger keeps about stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackLimits {
    /// Stacks, at most 2^20 (a slot's stack id has 20 bits). Each costs about 200 bytes in addition to its frames.
    pub stacks_max: u32,
    /// Frame words of all stacks together, 8 bytes each.
    pub frames_max: u32,
    /// Stacks with histograms of their own, 640 bytes each: the first ones.
    pub histograms_max: u32,
}

impl Default for StackLimits {
    /// 262,144 stacks (50 MiB), 8 Mi frame words (64 MiB: 32 frames per stack on average), 32,768 with histograms (20 MiB). A large
    /// C++ server has some ten thousand distinct allocation stacks.
    fn default() -> Self {
        Self { stacks_max: 1 << 18, frames_max: 8 << 20, histograms_max: 1 << 15 }
    }
}

/// One stack's account, as counts and bytes. `live = inherited + allocations − frees − corrections`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StackTotals {
    /// Allocations since the ledger began.
    pub allocations: u64,
    /// Bytes requested by them.
    pub allocated_bytes: u64,
    /// Blocks that were freed, by any stack.
    pub frees: u64,
    /// Bytes of them.
    pub freed_bytes: u64,
    /// Blocks outstanding now.
    pub live: u64,
    /// Bytes outstanding now.
    pub live_bytes: u64,
    /// Blocks that were outstanding when the process's live bytes were highest.
    pub at_peak: u64,
    /// Bytes of them.
    pub at_peak_bytes: u64,
    /// Of the live blocks, those whose free may have been missed.
    pub doubtful: u64,
    /// Bytes of them.
    pub doubtful_bytes: u64,
    /// Blocks removed from the ledger without a free event: unmapped, proven free by a census, or their address was allocated again.
    pub corrections: u64,
    /// Bytes of them.
    pub correction_bytes: u64,
    /// Blocks that a forked child inherited from its parent.
    pub inherited: u64,
    /// Bytes of them.
    pub inherited_bytes: u64,
    /// Blocks that this stack freed, whichever stack allocated them (only where stacks of frees are recorded).
    pub freed_here: u64,
    /// Bytes of them.
    pub freed_here_bytes: u64,
}

/// The part of a stack's account that every event touches: one cache line.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Hot {
    allocations: u64,
    allocated_bytes: u64,
    live: u64,
    live_bytes: u64,
    /// Live at the peak numbered `peak`; if the process has peaked since, nothing changed between that peak and now, or `live` would
    /// have been saved.
    saved: u64,
    saved_bytes: u64,
    peak: u64,
    doubtful_bytes: u64,
}

/// The rest.
#[derive(Clone, Copy, Default)]
struct Cold {
    hash: u64,
    frames_start: u32,
    frames_len: u16,
    end: u8,
    defined: bool,
    doubtful: u64,
    corrections: u64,
    correction_bytes: u64,
    inherited: u64,
    inherited_bytes: u64,
    freed_here: u64,
    freed_here_bytes: u64,
}

/// Sizes and lifetimes of one stack's blocks.
#[derive(Debug, Clone, Default)]
pub struct StackHistograms {
    /// Sizes of the allocations, bytes.
    pub sizes: Histogram,
    /// Lifetimes of the freed blocks, microseconds.
    pub lifetimes: Histogram,
}

/// Stacks' hashes are hashes already; one multiplication spreads them over the bits that the map uses.
#[derive(Default, Clone, Copy)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 29);
    }
}

/// Last ids looked up, by the hash's low bits: most events come from few stacks.
const RECENT: usize = 512;

/// The table of stacks.
#[derive(Clone)]
pub(super) struct Stacks {
    limits: StackLimits,
    ids: HashMap<u64, u32, BuildHasherDefault<Spread>>,
    recent: Box<[(u64, u32); RECENT]>,
    hot: Vec<Hot>,
    cold: Vec<Cold>,
    histograms: Vec<StackHistograms>,
    frames: Vec<u64>,
    /// Stack definitions refused: too many stacks.
    pub(super) stacks_refused: u64,
    /// Stack definitions whose frames were refused: too many frames.
    pub(super) frames_refused: u64,
}

impl Stacks {
    pub(super) fn new(limits: StackLimits) -> Self {
        let stacks_max = limits.stacks_max.clamp(STACKS_BEYOND_LIMIT.0 + 1, 1 << STACK_ID_BITS);
        let mut new = Self {
            limits: StackLimits { stacks_max, ..limits },
            ids: HashMap::default(),
            recent: Box::new([(0, NO_STACK.0); RECENT]),
            hot: Vec::new(),
            cold: Vec::new(),
            histograms: Vec::new(),
            frames: Vec::new(),
            stacks_refused: 0,
            frames_refused: 0,
        };
        for _ in 0..=STACKS_BEYOND_LIMIT.0 {
            new.push(0, true);
        }
        new
    }

    fn push(&mut self, hash: u64, defined: bool) {
        self.hot.push(Hot::default());
        self.cold.push(Cold { hash, defined, ..Cold::default() });
        if self.histograms.len() < self.limits.histograms_max as usize {
            self.histograms.push(StackHistograms::default());
        }
    }

    /// The id of a hash. A hash not seen before gets the next one, with its frames to follow.
    #[inline]
    pub(super) fn id(&mut self, hash: StackHash) -> StackId {
        let slot = (hash.0 ^ hash.0 >> 32) as usize % RECENT;
        let (seen, id) = self.recent[slot];
        if seen == hash.0 {
            return StackId(id);
        }
        let id = self.lookup(hash);
        if id != STACKS_BEYOND_LIMIT {
            self.recent[slot] = (hash.0, id.0);
        }
        id
    }

    /// The id of a hash that was seen before.
    pub(super) fn known(&self, hash: StackHash) -> Option<StackId> {
        self.ids.get(&hash.0).map(|&id| StackId(id))
    }

    pub(super) fn hash_of(&self, id: StackId) -> Option<StackHash> {
        self.cold.get(id.0 as usize).map(|cold| StackHash(cold.hash))
    }

    fn lookup(&mut self, hash: StackHash) -> StackId {
        if hash.0 == 0 {
            return NO_STACK;
        }
        if let Some(&id) = self.ids.get(&hash.0) {
            return StackId(id);
        }
        let id = self.hot.len() as u32;
        if id >= self.limits.stacks_max {
            return STACKS_BEYOND_LIMIT;
        }
        self.ids.insert(hash.0, id);
        self.push(hash.0, false);
        StackId(id)
    }

    /// Keeps the frames of a hash, once.
    pub(super) fn define(&mut self, hash: StackHash, frames: &[u64], end: u8) {
        let id = self.lookup(hash);
        if id == STACKS_BEYOND_LIMIT {
            self.stacks_refused += 1;
            return;
        }
        let cold = &mut self.cold[id.0 as usize];
        if cold.defined {
            return;
        }
        let (Ok(len), Ok(start)) = (u16::try_from(frames.len()), u32::try_from(self.frames.len())) else {
            self.frames_refused += 1;
            return;
        };
        if self.frames.len() + frames.len() > self.limits.frames_max as usize {
            self.frames_refused += 1;
            return;
        }
        self.frames.extend_from_slice(frames);
        (cold.frames_start, cold.frames_len, cold.end, cold.defined) = (start, len, end, true);
    }

    /// Number of ids assigned.
    pub(super) fn len(&self) -> u32 {
        self.hot.len() as u32
    }

    /// Stacks that were referred to but whose frames are not known.
    pub(super) fn undefined(&self) -> u64 {
        self.cold.iter().filter(|cold| !cold.defined).count() as u64
    }

    pub(super) fn frames(&self, id: StackId) -> &[u64] {
        self.cold.get(id.0 as usize).map_or(&[], |cold| {
            let start = cold.frames_start as usize;
            &self.frames[start..start + usize::from(cold.frames_len)]
        })
    }

    pub(super) fn end(&self, id: StackId) -> u8 {
        self.cold.get(id.0 as usize).map_or(0, |cold| cold.end)
    }

    pub(super) fn hash(&self, id: StackId) -> StackHash {
        StackHash(self.cold.get(id.0 as usize).map_or(0, |cold| cold.hash))
    }

    pub(super) fn histograms(&self, id: StackId) -> Option<&StackHistograms> {
        self.histograms.get(id.0 as usize)
    }

    /// Before a change of a stack's live bytes: keeps what it held at the peak numbered `peak`.
    #[inline]
    fn save(hot: &mut Hot, peak: u64) {
        if hot.peak != peak {
            (hot.saved, hot.saved_bytes, hot.peak) = (hot.live, hot.live_bytes, peak);
        }
    }

    #[inline]
    pub(super) fn alloc(&mut self, id: StackId, size_bytes: u64, size_bucket: usize, peak: u64) {
        let hot = &mut self.hot[id.0 as usize];
        Self::save(hot, peak);
        hot.allocations += 1;
        hot.allocated_bytes = hot.allocated_bytes.saturating_add(size_bytes);
        hot.live += 1;
        hot.live_bytes += size_bytes;
        if let Some(histograms) = self.histograms.get_mut(id.0 as usize) {
            histograms.sizes.add(size_bucket);
        }
    }

    #[inline]
    pub(super) fn free(&mut self, id: StackId, size_bytes: u64, lifetime_bucket: usize, peak: u64) {
        self.leave(id, size_bytes, peak);
        if let Some(histograms) = self.histograms.get_mut(id.0 as usize) {
            histograms.lifetimes.add(lifetime_bucket);
        }
    }

    /// Undoes a free.
    pub(super) fn unfree(&mut self, id: StackId, size_bytes: u64, lifetime_bucket: usize, peak: u64) {
        let hot = &mut self.hot[id.0 as usize];
        Self::save(hot, peak);
        hot.live += 1;
        hot.live_bytes += size_bytes;
        if let Some(histograms) = self.histograms.get_mut(id.0 as usize) {
            histograms.lifetimes.take(lifetime_bucket);
        }
    }

    /// A block is removed without a free event.
    pub(super) fn correct(&mut self, id: StackId, size_bytes: u64, peak: u64) {
        self.leave(id, size_bytes, peak);
        let cold = &mut self.cold[id.0 as usize];
        cold.corrections += 1;
        cold.correction_bytes = cold.correction_bytes.saturating_add(size_bytes);
    }

    #[inline]
    fn leave(&mut self, id: StackId, size_bytes: u64, peak: u64) {
        let hot = &mut self.hot[id.0 as usize];
        Self::save(hot, peak);
        hot.live -= 1;
        hot.live_bytes -= size_bytes;
    }

    pub(super) fn freed_here(&mut self, id: StackId, size_bytes: u64) {
        let cold = &mut self.cold[id.0 as usize];
        cold.freed_here += 1;
        cold.freed_here_bytes = cold.freed_here_bytes.saturating_add(size_bytes);
    }

    pub(super) fn unfreed_here(&mut self, id: StackId, size_bytes: u64) {
        let cold = &mut self.cold[id.0 as usize];
        cold.freed_here -= 1;
        cold.freed_here_bytes = cold.freed_here_bytes.saturating_sub(size_bytes);
    }

    /// A doubtful block is added (`true`) or removed.
    #[cold]
    pub(super) fn doubt(&mut self, id: StackId, size_bytes: u64, comes: bool) {
        let (hot, cold) = (&mut self.hot[id.0 as usize], &mut self.cold[id.0 as usize]);
        if comes {
            hot.doubtful_bytes += size_bytes;
            cold.doubtful += 1;
        } else {
            hot.doubtful_bytes -= size_bytes;
            cold.doubtful -= 1;
        }
    }

    /// Every live block becomes doubtful.
    pub(super) fn doubt_all(&mut self) {
        for (hot, cold) in self.hot.iter_mut().zip(&mut self.cold) {
            hot.doubtful_bytes = hot.live_bytes;
            cold.doubtful = hot.live;
        }
    }

    /// The ledger of a forked child: what is live was inherited, everything else starts again.
    pub(super) fn restart(&mut self) {
        for (hot, cold) in self.hot.iter_mut().zip(&mut self.cold) {
            *hot = Hot { live: hot.live, live_bytes: hot.live_bytes, doubtful_bytes: hot.doubtful_bytes, ..Hot::default() };
            *cold = Cold {
                corrections: 0,
                correction_bytes: 0,
                inherited: hot.live,
                inherited_bytes: hot.live_bytes,
                freed_here: 0,
                freed_here_bytes: 0,
                ..*cold
            };
        }
        self.histograms.fill(StackHistograms::default());
        (self.stacks_refused, self.frames_refused) = (0, 0);
    }

    /// A stack's account, given the number of the process's last peak. All zeros for an id that was not assigned.
    pub(super) fn totals(&self, id: StackId, peak: u64) -> StackTotals {
        let (Some(hot), Some(cold)) = (self.hot.get(id.0 as usize), self.cold.get(id.0 as usize)) else {
            return StackTotals::default();
        };
        let (at_peak, at_peak_bytes) = if hot.peak == peak { (hot.saved, hot.saved_bytes) } else { (hot.live, hot.live_bytes) };
        let came = hot.allocations + cold.inherited;
        let came_bytes = hot.allocated_bytes.saturating_add(cold.inherited_bytes);
        StackTotals {
            allocations: hot.allocations,
            allocated_bytes: hot.allocated_bytes,
            frees: came - hot.live - cold.corrections,
            freed_bytes: came_bytes.saturating_sub(hot.live_bytes).saturating_sub(cold.correction_bytes),
            live: hot.live,
            live_bytes: hot.live_bytes,
            at_peak,
            at_peak_bytes,
            doubtful: cold.doubtful,
            doubtful_bytes: hot.doubtful_bytes,
            corrections: cold.corrections,
            correction_bytes: cold.correction_bytes,
            inherited: cold.inherited,
            inherited_bytes: cold.inherited_bytes,
            freed_here: cold.freed_here,
            freed_here_bytes: cold.freed_here_bytes,
        }
    }
}
