//! Which stacks keep what they allocate: survivors of windows are checked again. Pure: the data read is a parameter.
//!
//! A block that outlives its window is freed unobserved, and its address is allocated again. Whether the block there is still the same is
//! determined by its contents, in one direction only:
//!
//! * a block is *the same* if the allocator's data next to it says that it was not freed ([`Header`]), and of its informative words those
//!   among the first two and at least half of all are unchanged, at this check and at every earlier one;
//! * a word is informative if its owner wrote it (it is not what the block held when it was allocated), no other sampled block has it at
//!   that position, and it is neither a small number nor an address. A block without such a word gives no information, nor does one whose
//!   end only its first word shows ([`Header::FirstWord`]) if that word is not informative;
//! * *not the same* is never concluded: programs write into their blocks.
//!
//! So two results are given for a stack: if many of its blocks are found the same, that it keeps what it allocates; and then a lower bound
//! of the bytes of its sampled blocks confirmed live. The absence of a flag means nothing. The share of live
//! blocks that are found the same varies from 0 to 1, by program and run, so that no estimate can be based on it (docs/design/0007).

pub mod words;

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

pub use crate::kept::{INFORMATIVE_MIN, SAME_ONE_IN, SAMPLED_MIN, is_flagged};
use words::{SizeField, WORDS, digest, is_small, may_be_link, may_be_pointer, places};

/// Words at a block's start that must not change: what is left of an earlier block is behind them.
const FIRST_WORDS: usize = 2;
/// Age from which a block is reported. Below it, too many blocks are found the same by mistake (up to one in 25 at 1 s).
pub const TOLD_AGE_NS: u64 = 20_000_000_000;
/// Blocks kept of one target, the newest; 130 bytes each, and up to 16 times 24 for the words that are distinguished.
pub const SAMPLES_MAX: usize = 2048;
/// Blocks taken from one window: at one window a second the oldest kept are a minute old.
pub const OF_WINDOW_MAX: usize = 32;
/// Ages at which a block is checked again, in nanoseconds; from the last on at each multiple of three of it.
const LOOK_AGES_NS: [u64; 5] = [200_000_000, 1_000_000_000, 5_000_000_000, 20_000_000_000, 60_000_000_000];
/// Of the informative blocks of a stack, those that may be found the same by mistake: one in so many, and one more. Measured at 20 s and
/// later: none of 2,000 of six programs on four allocators (`make retention`).
const MISTAKEN_ONE_IN: u64 = 10;

/// A block that was allocated in a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContentSample {
    /// Its address.
    pub addr: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// When it was allocated, CLOCK_MONOTONIC ns.
    pub born_ns: u64,
    /// Its words at that time.
    pub words: [u64; WORDS],
    /// Bit i: word i could be read.
    pub known: u32,
}

/// What to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockQuery {
    /// The block.
    pub addr: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// Bit i: word i is wanted.
    pub wanted: u32,
}

/// The allocator's own data that shows whether a block was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Header {
    /// glibc: a chunk.
    Chunk {
        /// Its size field.
        size: SizeField,
        /// That of the chunk behind it; `None` behind a chunk that is a mapping of its own.
        next: Option<SizeField>,
    },
    /// A slot whose group says whether it is in use: musl's, or jemalloc's regions and large blocks.
    Slot {
        /// What identifies the slot: musl's header of it, or a number of its extent and size class in jemalloc.
        header: u64,
        /// Whether it is in use.
        is_used: bool,
    },
    /// tcmalloc and mimalloc have nothing next to a block, and link the free ones by their first words.
    FirstWord,
}

impl Header {
    /// Whether it can be that of a block in use of so many bytes.
    fn fits(&self, bytes: u64) -> bool {
        match self {
            Self::Chunk { size, .. } => size.fits(bytes) && self.is_in_use(),
            Self::Slot { is_used, .. } => *is_used,
            Self::FirstWord => true,
        }
    }

    /// Whether the block was not returned to its heap. Blocks in caches of free ones may be in use by this.
    fn is_in_use(&self) -> bool {
        match self {
            Self::Chunk { size, next } => size.is_mmapped() || next.is_some_and(SizeField::previous_is_in_use),
            Self::Slot { is_used, .. } => *is_used,
            Self::FirstWord => true,
        }
    }

    /// What stays the same as long as the block lives.
    fn own(&self) -> u64 {
        match self {
            Self::Chunk { size, .. } => size.own(),
            Self::Slot { header, .. } => *header,
            Self::FirstWord => 0,
        }
    }

    /// Whether the first word of a block, which has changed, can have been written by the allocator.
    fn may_be_freed(&self, word: u64, addr: u64) -> bool {
        match self {
            // Every free of glibc that leaves the next chunk's flag unchanged writes the first word.
            Self::Chunk { .. } => may_be_link(word, addr),
            Self::Slot { .. } => false,
            // Links of mimalloc's secure builds are encoded: they can be any number.
            Self::FirstWord => true,
        }
    }
}

/// What was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockContents {
    /// The allocator's data.
    pub header: Header,
    /// The words.
    pub words: [u64; WORDS],
    /// Bit i: word i could be read.
    pub known: u32,
}

#[derive(Debug, Clone)]
struct Sample<K> {
    stack: K,
    addr: u64,
    bytes: u64,
    born_ns: u64,
    /// [`Header::own`].
    header: u64,
    /// Digests of its words at the first check.
    first: [u32; WORDS],
    /// Bit i: word i was read.
    known: u32,
    /// Bit i: word i was written by its owner, and is neither small nor an address.
    written: u32,
    /// Whether its first word alone shows its end: without that word the others give no information.
    first_shows_end: bool,
    /// Whether it was the same at every check so far.
    same: bool,
    looked_ns: u64,
    next_ns: u64,
}

/// The result for a stack's sampled survivors that are old enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kept {
    /// Survivors of windows that were checked again.
    pub sampled: u64,
    /// Of them, those that can be distinguished from others.
    pub informative: u64,
    /// Of those, found the same at every check.
    pub same: u64,
    /// Lower bound of the bytes confirmed live: of a flagged stack those of the blocks found the same, minus an allowance for mistakes;
    /// else 0.
    pub confirmed_bytes: u64,
}

impl Kept {
    /// Whether the stack keeps what it allocates. `false` means nothing.
    #[must_use]
    pub fn is_flagged(&self) -> bool {
        is_flagged(self.sampled, self.informative, self.same)
    }
}

/// The state of a sampled block, for comparison with the truth in tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict<K> {
    /// Its stack.
    pub stack: K,
    /// Where it is.
    pub addr: u64,
    /// Bytes requested.
    pub bytes: u64,
    /// When it was allocated, CLOCK_MONOTONIC ns.
    pub born_ns: u64,
    /// When it was last checked.
    pub looked_ns: u64,
    /// Whether it can be distinguished from others.
    pub informative: bool,
    /// Whether it was found the same at every check.
    pub same: bool,
}

/// The sampled survivors of one target.
#[derive(Debug, Clone)]
pub struct Retention<K> {
    samples: VecDeque<Sample<K>>,
    /// How many samples hold a word at a position.
    holders: HashMap<(u8, u32), u32>,
    refused: u64,
    /// No check is due before this time.
    due_ns: u64,
}

impl<K> Default for Retention<K> {
    fn default() -> Self {
        Self { samples: VecDeque::new(), holders: HashMap::new(), refused: 0, due_ns: u64::MAX }
    }
}

impl<K: Copy + Eq + Hash> Retention<K> {
    /// Adds a survivor of a window with its first check. Refused, and counted, if its header is not one of the allocator's, as of a block
    /// that has another allocator; or if the only word that would show its end cannot be read.
    pub fn admit(&mut self, stack: K, sample: &ContentSample, look: &BlockContents, now_ns: u64) {
        let shows_its_end = look.header != Header::FirstWord || look.known & sample.known & 1 == 1;
        if !look.header.fits(sample.bytes) || !shows_its_end {
            self.refused += 1;
            return;
        }
        if self.samples.len() >= SAMPLES_MAX
            && let Some(oldest) = self.samples.pop_front()
        {
            self.count(&oldest, false);
        }
        let known = look.known & sample.known;
        let written = (0..WORDS).filter(|at| known >> at & 1 == 1).fold(0, |written, at| {
            let word = look.words[at];
            written | u32::from(word != sample.words[at] && !is_small(word) && !may_be_pointer(word)) << at
        });
        let sample = Sample {
            stack,
            addr: sample.addr,
            bytes: sample.bytes,
            born_ns: sample.born_ns,
            header: look.header.own(),
            first: look.words.map(digest),
            known,
            written,
            first_shows_end: look.header == Header::FirstWord,
            same: true,
            looked_ns: now_ns,
            next_ns: sample.born_ns.saturating_add(LOOK_AGES_NS[0]),
        };
        self.count(&sample, true);
        self.due_ns = self.due_ns.min(sample.next_ns);
        self.samples.push_back(sample);
    }

    fn count(&mut self, sample: &Sample<K>, is_new: bool) {
        for at in (0..WORDS).filter(|at| sample.written >> at & 1 == 1) {
            let key = (at as u8, sample.first[at]);
            if is_new {
                *self.holders.entry(key).or_default() += 1;
            } else if let Some(holders) = self.holders.get_mut(&key) {
                *holders -= 1;
                if *holders == 0 {
                    self.holders.remove(&key);
                }
            }
        }
    }

    /// Blocks that were not understood.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Whether a check is due, or may be.
    #[must_use]
    pub fn is_due(&self, now_ns: u64, all: bool) -> bool {
        self.due_ns <= if all { u64::MAX - 1 } else { now_ns }
    }

    /// Checks the blocks that are due, or all that may still be the same. `read` returns the current content; `None` if it cannot be read.
    pub fn look(&mut self, now_ns: u64, all: bool, mut read: impl FnMut(&BlockQuery) -> Option<BlockContents>) {
        let holders = &self.holders;
        for sample in self.samples.iter_mut().filter(|sample| sample.same && (all || sample.next_ns <= now_ns)) {
            let look = read(&BlockQuery { addr: sample.addr, bytes: sample.bytes, wanted: sample.known });
            sample.same = look.is_some_and(|look| sample.is_same(&look, holders));
            sample.looked_ns = now_ns;
            sample.next_ns = next_look_ns(sample.born_ns, now_ns);
        }
        self.due_ns = self.samples.iter().filter(|sample| sample.same).map(|sample| sample.next_ns).min().unwrap_or(u64::MAX);
    }

    /// Each sampled block.
    pub fn verdicts(&self) -> impl Iterator<Item = Verdict<K>> + '_ {
        self.samples.iter().map(|sample| Verdict {
            stack: sample.stack,
            addr: sample.addr,
            bytes: sample.bytes,
            born_ns: sample.born_ns,
            looked_ns: sample.looked_ns,
            informative: sample.telling(&self.holders) != 0,
            same: sample.same,
        })
    }

    /// The results by stack, of the blocks that are old enough now.
    #[must_use]
    pub fn by_stack(&self, now_ns: u64) -> HashMap<K, Kept> {
        kept(self.verdicts(), now_ns)
    }
}

/// Sums verdicts by stack.
#[must_use]
pub fn kept<K: Copy + Eq + Hash>(verdicts: impl Iterator<Item = Verdict<K>>, now_ns: u64) -> HashMap<K, Kept> {
    let mut stacks: HashMap<K, (Kept, Vec<u64>)> = HashMap::new();
    for one in verdicts.filter(|one| now_ns.saturating_sub(one.born_ns) >= TOLD_AGE_NS) {
        // A block that may be the same gives data only once it was checked at that age.
        if one.same && one.looked_ns.saturating_sub(one.born_ns) < TOLD_AGE_NS {
            continue;
        }
        let (kept, same) = stacks.entry(one.stack).or_default();
        kept.sampled += 1;
        kept.informative += u64::from(one.informative);
        if one.informative && one.same {
            kept.same += 1;
            same.push(one.bytes);
        }
    }
    let confirmed = |(stack, (mut kept, mut same)): (K, (Kept, Vec<u64>))| {
        // Without a flag, the few found the same may all be mistakes: blocks that were allocated again in the same place.
        if !kept.is_flagged() {
            return (stack, kept);
        }
        // Possible mistakes are assumed to be the largest blocks.
        same.sort_unstable();
        let mistaken = (kept.informative / MISTAKEN_ONE_IN + 1) as usize;
        kept.confirmed_bytes = same.iter().rev().skip(mistaken).fold(0, |sum, bytes| sum.saturating_add(*bytes));
        (stack, kept)
    };
    stacks.into_iter().map(confirmed).collect()
}

impl<K> Sample<K> {
    /// The informative words: bit i of word i.
    fn telling(&self, holders: &HashMap<(u8, u32), u32>) -> u32 {
        let is_unique = |at: &usize| holders.get(&(*at as u8, self.first[*at])).is_none_or(|holders| *holders <= 1);
        let words = (0..WORDS).filter(|at| self.written >> at & 1 == 1).filter(is_unique).fold(0, |words, at| words | 1 << at);
        if self.first_shows_end && words & 1 == 0 { 0 } else { words }
    }

    fn is_same(&self, look: &BlockContents, holders: &HashMap<(u8, u32), u32>) -> bool {
        if look.header.own() != self.header || !look.header.is_in_use() {
            return false;
        }
        let is_unchanged = |at: usize| look.known >> at & 1 == 1 && digest(look.words[at]) == self.first[at];
        if self.known & 1 == 1 && !is_unchanged(0) && look.header.may_be_freed(look.words[0], self.addr) {
            return false;
        }
        let telling = self.telling(holders);
        // The next owner of the place writes from its start, and may leave the rest as it was.
        if (0..FIRST_WORDS).any(|at| telling >> at & 1 == 1 && !is_unchanged(at)) {
            return false;
        }
        let unchanged = (0..WORDS).filter(|at| telling >> at & 1 == 1 && is_unchanged(*at)).count() as u32;
        unchanged * 2 >= telling.count_ones()
    }
}

/// The time of a block's next check after one at `now_ns`.
fn next_look_ns(born_ns: u64, now_ns: u64) -> u64 {
    let age_ns = now_ns.saturating_sub(born_ns);
    let known = LOOK_AGES_NS.into_iter().find(|age| *age > age_ns);
    born_ns.saturating_add(known.unwrap_or_else(|| age_ns.saturating_mul(3)))
}

/// Whether a block is large enough to have words that are compared.
#[must_use]
pub fn has_words(bytes: u64) -> bool {
    places(bytes).into_iter().flatten().count() >= 2
}

#[cfg(test)]
mod tests;
