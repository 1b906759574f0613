//! Marks the chunks on singly linked lists, fastbins and thread caches, whose headers look as if they were in use.

use super::super::chunks::{Chunk, ChunkState, ChunkTable};
use super::super::memory::{Memory, word_at};
use super::layout::{Arena, FLAGS, Layout, is_chunk_address};
use super::tcache;
use super::walker::{FastCandidate, Walker};

/// Most members of a fastbin followed: enough for the largest heap, and a limit for forged cycles.
const FASTBIN_MEMBERS_MAX: usize = 1 << 24;
/// Most links followed by reading, where the walk's are out of date, or it could not keep them all: two seconds of reading.
const FASTBIN_READS_MAX: u64 = 1 << 20;
/// How often a list that changes is followed.
const FASTBIN_ATTEMPTS: usize = 3;
/// Members of a fastbin examined to learn how links are stored.
const LEARN_MEMBERS_MAX: usize = 32;

/// Size of the chunks in fastbin number `index`.
fn fastbin_bytes(index: usize) -> u64 {
    32 + 16 * index as u64
}

/// Sizes for which some arena has a non-empty fastbin.
#[must_use]
pub fn fastbin_sizes(arenas: &[Arena]) -> Vec<u64> {
    let count = arenas.iter().map(|arena| arena.fastbins.len()).max().unwrap_or(0);
    let is_used = |&index: &usize| arenas.iter().any(|arena| arena.fastbins.get(index).is_some_and(|&head| head != 0));
    (0..count).filter(is_used).map(fastbin_bytes).collect()
}

/// Learns from the fastbins' members whether links are protected.
#[must_use]
pub fn learn_links_from_fastbins(memory: &dyn Memory, arenas: &[Arena]) -> Option<bool> {
    for arena in arenas {
        for (index, &head) in arena.fastbins.iter().enumerate() {
            let mut chunk = head;
            for _ in 0..LEARN_MEMBERS_MAX {
                if !is_chunk_address(chunk) {
                    break;
                }
                let Some(bytes) = memory.bytes(chunk, 24) else { break };
                if word_at(&bytes, 8) & !FLAGS != fastbin_bytes(index) {
                    break;
                }
                let stored = word_at(&bytes, 16);
                if stored == 0 {
                    return Some(false);
                }
                let protected = stored ^ (chunk.wrapping_add(16) >> 12);
                let leads_on = |addr: u64| {
                    addr == 0
                        || (is_chunk_address(addr)
                            && memory.word(addr.wrapping_add(8)).is_some_and(|size| size & !FLAGS == fastbin_bytes(index)))
                };
                match (leads_on(protected), leads_on(stored)) {
                    (true, false) => return Some(true),
                    (false, true) => return Some(false),
                    _ => chunk = protected,
                }
            }
        }
    }
    None
}

/// Finds candidates by address. Lists contain them in no order, so this is a hash table: about one probe, where a binary search takes
/// twenty.
struct ByAddress<'a> {
    candidates: &'a [FastCandidate],
    /// Numbers of candidates, counted from 1; 0 = empty, as at least half of the slots are.
    slots: Vec<u32>,
}

impl<'a> ByAddress<'a> {
    fn new(candidates: &'a [FastCandidate]) -> Self {
        let mut found = Self { candidates, slots: vec![0; (candidates.len() * 2).next_power_of_two()] };
        for (number, candidate) in (1..).zip(candidates) {
            let slot = found.probe(candidate.start).find(|&slot| found.slots.get(slot) == Some(&0));
            if let Some(place) = slot.and_then(|slot| found.slots.get_mut(slot)) {
                *place = number;
            }
        }
        found
    }

    /// The slots in which a candidate may be, the most likely one first.
    fn probe(&self, addr: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.slots.len() - 1;
        // Fibonacci hashing of the address's 16-byte unit.
        let first = ((addr >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..=mask).map(move |step| first.wrapping_add(step) & mask)
    }

    fn get(&self, addr: u64) -> Option<&FastCandidate> {
        let numbers = self.probe(addr).map_while(|slot| self.slots.get(slot).and_then(|&number| (number as usize).checked_sub(1)));
        numbers.filter_map(|index| self.candidates.get(index)).find(|candidate| candidate.start == addr)
    }
}

/// Follows every fastbin and marks its members. The members change at the head only, so of a busy list the old members are found by
/// reading what has become the list's beginning anew; a list that still breaks is followed again from its present head.
pub fn mark_fastbins(memory: &dyn Memory, walker: &mut Walker<'_>, layout: &Layout, arenas: &[Arena]) {
    let kept = std::mem::take(&mut walker.fast_candidates);
    let mut lists = Fastbins { memory, layout, candidates: ByAddress::new(&kept), reads: 0 };
    for arena in arenas {
        // The present heads match the chunks that were walked last; at rest there is no difference.
        let heads = memory.bytes(arena.addr, 16 + 8 * layout.fastbins()).unwrap_or_default();
        for index in 0..layout.fastbins() {
            let head = word_at(&heads, 16 + 8 * index);
            let is_whole = lists.follow(&mut walker.table, head, index, false)
                || (1..FASTBIN_ATTEMPTS).any(|_| {
                    let head = memory.word(arena.addr.wrapping_add(16 + 8 * index as u64)).unwrap_or(0);
                    lists.follow(&mut walker.table, head, index, true)
                });
            walker.quality.broken_lists += u64::from(!is_whole);
        }
    }
}

/// Follows fastbins: through the links that the walk kept, and through memory where these are out of date.
struct Fastbins<'a> {
    memory: &'a dyn Memory,
    layout: &'a Layout,
    candidates: ByAddress<'a>,
    /// Links read so far.
    reads: u64,
}

impl Fastbins<'_> {
    /// Marks a list's members. `is_repeated`: members marked by an earlier attempt are passed. `false` if the list's end was not reached.
    fn follow(&mut self, table: &mut ChunkTable, head: u64, index: usize, is_repeated: bool) -> bool {
        let bytes = fastbin_bytes(index);
        let is_member = |found: &Chunk| matches!(found.state, ChunkState::Live | ChunkState::Tcache) && found.bytes == bytes;
        let mut chunk = head;
        for _ in 0..FASTBIN_MEMBERS_MAX {
            if chunk == 0 {
                return true;
            }
            let is_marked = table.restate(chunk, ChunkState::Fastbin, is_member).is_some();
            // What is marked already closes a cycle, unless an earlier attempt has marked it. What the walk saw as something else was made
            // since: memory tells whether it is a member.
            let is_passed = is_marked
                || match table.find(chunk) {
                    Some(found) if found.start == chunk && found.state == ChunkState::Fastbin => is_repeated,
                    _ => self.is_member_now(chunk, bytes),
                };
            let next = if is_marked { self.kept_link(chunk) } else { None };
            match next.or_else(|| self.present_link(chunk)) {
                Some(next) if is_passed => chunk = next,
                _ => return false,
            }
        }
        false
    }

    /// The link that the walk read, if it leads to the end or to a possible member.
    fn kept_link(&self, chunk: u64) -> Option<u64> {
        self.candidates.get(chunk).map(|found| found.next).filter(|&next| next == 0 || self.candidates.get(next).is_some())
    }

    /// The link as it is now.
    fn present_link(&mut self, chunk: u64) -> Option<u64> {
        let place = chunk.wrapping_add(16);
        let stored = self.read(place)?;
        Some(self.layout.reveal(place, stored)).filter(|&next| next == 0 || is_chunk_address(next))
    }

    /// Whether a chunk of a list's size is at this address now.
    fn is_member_now(&mut self, chunk: u64, bytes: u64) -> bool {
        is_chunk_address(chunk) && self.read(chunk.wrapping_add(8)).is_some_and(|size| size & !FLAGS == bytes)
    }

    fn read(&mut self, addr: u64) -> Option<u64> {
        self.reads += 1;
        (self.reads <= FASTBIN_READS_MAX).then(|| self.memory.word(addr))?
    }
}

/// Finds the threads' caches among the chunks of their size and marks what their lists hold.
pub fn mark_thread_caches(memory: &dyn Memory, walker: &mut Walker<'_>, layout: &mut Layout, count_max: u64) {
    let places: Vec<(u64, u64)> = walker
        .table
        .iter()
        .filter(|(_, chunk)| chunk.state == ChunkState::Live && tcache::is_cache_size(chunk.bytes))
        .map(|(_, chunk)| (chunk.start, chunk.bytes))
        .take(tcache::CANDIDATES_MAX)
        .collect();
    for (start, bytes) in places {
        let Some(cache) = tcache::read(memory, layout, start.saturating_add(16), bytes, count_max) else { continue };
        walker.quality.broken_lists += cache.broken_lists;
        for (chunk, bytes) in cache.chunks {
            walker.table.restate(chunk, ChunkState::Tcache, |found| found.state == ChunkState::Live && found.bytes == bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_are_found_by_their_address_and_others_are_not() {
        for count in [0u64, 1, 2, 3, 1000] {
            let all: Vec<FastCandidate> = (0..count).map(|one| FastCandidate { start: 0x5000_0000 + one * 32, next: one }).collect();
            let by_address = ByAddress::new(&all);
            for candidate in &all {
                assert_eq!(by_address.get(candidate.start).map(|found| found.next), Some(candidate.next));
                assert!(by_address.get(candidate.start + 16).is_none());
            }
            assert!(by_address.get(0).is_none());
        }
    }
}
