//! The requests made in the scratch process: their results are known beforehand, and they make the allocator take every relevant path.
//!
//! | requests | lead to |
//! |---|---|
//! | pairs after the cache was drained | the cache, in and out |
//! | more frees of a size than the cache takes | fast bins, small bins, merging |
//! | large sizes, new and repeated | the top, bins, splits, trimming |
//! | above the threshold | separate mappings |
//! | blocks that are filled with a byte, as by `MALLOC_PERTURB_` | other paths at the end |
//! | the first request of a new thread | new arenas |
//! | memory calls that are refused, the first few or all, with nothing in reserve | other arenas, other heaps, retries, failure |
//! | a lock that is held, and waited for | waits and wake-ups of threads that contend for an arena |
//! | alone, as one of several threads, as another, with each other's blocks | the paths with and without locks, both kinds of arenas |

use crate::random::Random;
use crate::selective::SEEN_FROM_BYTES;
use crate::selective::observed::Function;

/// The thread that makes a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Thread {
    /// The first thread, while it is the only one.
    Alone,
    /// The first thread among others.
    Main,
    /// Another thread, by number below [`OTHERS`].
    Other(u8),
}

/// Number of threads in addition to the first. All except the first of them are new at a request whose memory calls are refused.
pub(super) const OTHERS: u8 = 1 + NEW_THREADS_REFUSED;
/// New threads whose arena fails at the first, second, … memory call: creating one takes up to three, and the request itself some more.
const NEW_THREADS_REFUSED: u8 = 5;
/// Maximum number of initial memory calls that are refused in a request: the longest known path (grow the heap, new heap twice, a mapping,
/// another arena) has six.
const REFUSED_MAX: u32 = 7;
/// Refuses all of them.
const REFUSED_ALL: u32 = u32::MAX;

/// The fault injected into a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    None,
    /// The kernel refuses this many of its first memory calls.
    Refused(u32),
    /// Another thread holds the first lock that it takes, and releases it when waited for.
    Contended,
}

/// The call of a request. Blocks are identified by the number of the request that returned them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Malloc(u64),
    Calloc(u64),
    Free(usize),
    /// A parameter and its value, as in mallopt(3). Not a request whose sites are searched for.
    Tune(i32, i32),
}

impl Call {
    pub(super) fn function(self) -> Option<Function> {
        match self {
            Self::Malloc(_) => Some(Function::Malloc),
            Self::Calloc(_) => Some(Function::Calloc),
            Self::Free(_) => Some(Function::Free),
            Self::Tune(..) => None,
        }
    }
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub thread: Thread,
    pub call: Call,
    pub trouble: Trouble,
    /// For malloc: it gets exactly the block that the previous request freed, from the thread cache.
    pub from_cache: bool,
}

/// Requests in order. Every block is freed by the end.
#[derive(Debug, Default)]
pub(super) struct Script {
    pub requests: Vec<Request>,
    live: Vec<(usize, u64)>,
}

/// Parameters of mallopt(3), and their default values.
const M_TRIM_THRESHOLD: i32 = -1;
const M_TOP_PAD: i32 = -2;
const M_MMAP_THRESHOLD: i32 = -3;
const MMAP_THRESHOLD_BYTES: i32 = 128 << 10;
const RESERVE_BYTES: i32 = 128 << 10;
const M_PERTURB: i32 = -6;
/// Sizes that the cache takes: small, medium, and its largest.
const CACHED_BYTES: [u64; 3] = [24, 200, SEEN_FROM_BYTES - 1];
/// Number of blocks of one size that empties or fills a thread cache, which takes 7, or 16 since 2.42.
const CACHE_BLOCKS: usize = 20;
/// Sizes around the cache's limit, around the mmap threshold (128 KiB), and between.
const LARGE_BYTES: [u64; 8] = [SEEN_FROM_BYTES, 1100, 2000, 5000, 30_000, 100_000, 130_000, 300_000];
/// Sizes for injected faults: below the mmap threshold, small, and larger than what the allocator maps at once if the heap cannot grow (1
/// MiB).
const NEEDY_BYTES: [u64; 3] = [120_000, 2000, 1_200_000];
/// Number of live blocks in a mix: about 2 MB on average.
const MIX_LIVE_BLOCKS: usize = 60;
/// The largest size of a mix.
const MIX_BYTES_MAX: f64 = 300_000.0;
/// Maximum size of a calloc in a mix: calloc clears blocks in small steps, except new mappings.
const CLEARED_BYTES_MAX: u64 = 3000;

impl Script {
    fn ask(&mut self, thread: Thread, call: Call) -> usize {
        self.ask_in_trouble(thread, call, Trouble::None)
    }

    fn ask_in_trouble(&mut self, thread: Thread, call: Call, trouble: Trouble) -> usize {
        let number = self.requests.len();
        match call {
            Call::Malloc(bytes) | Call::Calloc(bytes) => self.live.push((number, bytes)),
            Call::Free(of) => self.live.retain(|&(block, _)| block != of),
            Call::Tune(..) => {}
        }
        self.requests.push(Request { thread, call, trouble, from_cache: false });
        number
    }

    /// Drains the cache for a size, frees one block into it, and allocates it again.
    fn cached_pairs(&mut self, thread: Thread, bytes: u64) {
        let blocks: Vec<usize> = (0..CACHE_BLOCKS).map(|_| self.ask(thread, Call::Malloc(bytes))).collect();
        if let Some(&block) = blocks.last() {
            self.ask(thread, Call::Free(block));
            let again = self.ask(thread, Call::Malloc(bytes));
            if let Some(request) = self.requests.get_mut(again) {
                request.from_cache = true;
            }
        }
        for &block in blocks.iter().rev().skip(1) {
            self.ask(thread, Call::Free(block));
        }
    }

    /// Adjacent large blocks, freed and allocated again in several orders.
    fn large_blocks(&mut self, thread: Thread, other: Thread) {
        for make in [Call::Malloc, Call::Calloc] {
            let blocks: Vec<usize> = LARGE_BYTES.into_iter().map(|bytes| self.ask(thread, make(bytes))).collect();
            // Every second one first, so that some merge and some cannot.
            let halves = blocks.iter().step_by(2).chain(blocks.iter().skip(1).step_by(2));
            for (nth, &block) in halves.enumerate() {
                self.ask(if nth % 3 == 2 { other } else { thread }, Call::Free(block));
                self.ask(thread, make(LARGE_BYTES[nth % 4]));
            }
        }
    }

    /// Makes the allocator keep this many bytes in reserve at the top of its heaps. That also fixes the mmap threshold, which otherwise
    /// rises when the first mapped block is freed.
    fn keep_in_reserve(&mut self, bytes: i32) {
        for parameter in [M_TRIM_THRESHOLD, M_TOP_PAD] {
            self.ask(Thread::Alone, Call::Tune(parameter, bytes));
        }
        self.ask(Thread::Alone, Call::Tune(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES));
    }

    /// Requests during which the kernel refuses memory, or another thread holds the lock. None is freed before all are made, so that each
    /// needs more memory than is available.
    fn troubles(&mut self, thread: Thread) {
        let refused = (1..=REFUSED_MAX).chain([REFUSED_ALL]).map(Trouble::Refused);
        let locked = (thread != Thread::Alone).then_some(Trouble::Contended);
        let mut blocks = Vec::new();
        for trouble in refused.chain(locked) {
            for make in [Call::Malloc, Call::Calloc] {
                blocks.extend(NEEDY_BYTES.map(|bytes| self.ask_in_trouble(thread, make(bytes), trouble)));
            }
        }
        let locked = locked.unwrap_or(Trouble::None);
        for block in blocks {
            self.ask_in_trouble(thread, Call::Free(block), locked);
        }
    }

    /// Random requests.
    fn mix(&mut self, random: &mut Random, threads: &[Thread], requests: usize) {
        for _ in 0..requests {
            let thread = pick(random, threads).unwrap_or(Thread::Alone);
            if random.unit() * (MIX_LIVE_BLOCKS as f64) < self.live.len() as f64 {
                if let Some((block, _)) = pick(random, &self.live) {
                    self.ask(thread, Call::Free(block));
                }
                continue;
            }
            // Equally many per order of magnitude, and some right at the limit.
            let bytes = match random.bits() % 8 {
                0 => SEEN_FROM_BYTES - 9 + random.bits() % 18,
                _ => MIX_BYTES_MAX.powf(random.unit()) as u64,
            };
            match random.bits() % 4 {
                0 => self.ask(thread, Call::Calloc(bytes.min(CLEARED_BYTES_MAX))),
                _ => self.ask(thread, Call::Malloc(bytes)),
            };
        }
    }

    fn end(mut self, threads: &[Thread]) -> Self {
        let mut nth = 0;
        while let Some(&(block, _)) = self.live.last() {
            let thread = threads.get(nth % threads.len().max(1)).copied().unwrap_or(Thread::Alone);
            self.ask(thread, Call::Free(block));
            nth += 1;
        }
        self
    }
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> Option<T> {
    let nth = random.bits() % (from.len() as u64).max(1);
    from.get(usize::try_from(nth).ok()?).copied()
}

/// The threads that exist once there are several.
const SEVERAL: [Thread; 2] = [Thread::Main, Thread::Other(0)];

/// Requests by which sites are found, on every known path; `seed` determines the sizes and orders in between. In the first script of a
/// process the other threads are `new`.
pub(super) fn every_way(seed: u64, new: bool) -> Script {
    let mut random = Random::new(seed);
    let mut script = Script::default();
    for thread in [Thread::Alone, Thread::Main, Thread::Other(0)] {
        for bytes in CACHED_BYTES {
            script.cached_pairs(thread, bytes);
        }
    }
    for (thread, other) in [(Thread::Alone, Thread::Alone), (Thread::Main, Thread::Other(0)), (Thread::Other(0), Thread::Main)] {
        script.large_blocks(thread, other);
    }
    script.mix(&mut random, &[Thread::Alone], 150);
    script.keep_in_reserve(0);
    for thread in [Thread::Alone, Thread::Main, Thread::Other(0)] {
        script.troubles(thread);
    }
    if new {
        for nth in 1..=NEW_THREADS_REFUSED {
            let (thread, trouble) = (Thread::Other(nth), Trouble::Refused(nth.into()));
            let make = if nth % 2 == 0 { Call::Calloc } else { Call::Malloc };
            let block = script.ask_in_trouble(thread, make(2500), trouble);
            script.ask(thread, Call::Malloc(100));
            script.ask(thread, Call::Malloc(7000));
            script.ask(thread, Call::Free(block));
        }
    }
    script.keep_in_reserve(RESERVE_BYTES);
    script.mix(&mut random, &SEVERAL, 250);
    for (filled_with, threads) in [(0x55, &SEVERAL[..]), (0, &[Thread::Alone])] {
        script.ask(Thread::Alone, Call::Tune(M_PERTURB, filled_with));
        script.mix(&mut random, threads, 100);
    }
    script.end(&SEVERAL)
}

/// Requests by which sites are judged: with random sizes, orders and threads.
pub(super) fn at_random(seed: u64, requests: usize) -> Script {
    let mut random = Random::new(seed);
    let mut script = Script::default();
    script.mix(&mut random, &[Thread::Alone], requests / 3);
    script.mix(&mut random, &SEVERAL, requests - requests / 3);
    script.end(&SEVERAL)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_block_of_a_script_is_freed_once_after_its_allocation_and_none_is_left() {
        for script in [every_way(1, true), every_way(2, false), at_random(3, 2000)] {
            let mut live = BTreeSet::new();
            for (number, request) in script.requests.iter().enumerate() {
                match request.call {
                    Call::Malloc(_) | Call::Calloc(_) => assert!(live.insert(number)),
                    Call::Free(of) => assert!(live.remove(&of), "request {number} frees {of}"),
                    Call::Tune(..) => {}
                }
            }
            assert!(live.is_empty());
        }
    }
}
