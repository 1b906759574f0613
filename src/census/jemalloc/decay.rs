//! How long an arena keeps unused pages: `decay_t` of 5.3, `arena_decay_t` of 5.2.
//!
//! Both have {time_ms, interval, epoch, jitter_state, deadline} in a row, in ns but for the first. Where time_ms is positive, interval is
//! a 200th of it and the deadline one to two intervals after the epoch; where it is 0 (purge at once) or −1 (never), the deadline is one
//! interval after the epoch and jitter_state is the structure's own address. An arena has one for dirty and, right behind it, one for
//! muzzy pages, in the first block of its own memory, which begins with its number and its extent hooks.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::memory::{Memory, word_at};

/// `SMOOTHSTEP_NSTEPS`.
const STEPS: u64 = 200;
/// Bytes of a block that are searched: the smallest block.
const SEARCHED_BYTES: u64 = 2 << 20;
/// Bytes searched in all; an arena whose offsets are known from another one costs two small reads.
const SEARCHED_BYTES_MAX: u64 = 64 << 20;
/// Distance of the two structures: a mutex, 200 words of backlog and some more.
const DISTANCE: Range<usize> = 1600..16 << 10;
/// How far before its time a structure begins: its mutex.
const MUTEX_BYTES_MAX: u64 = 512;
/// The longest time that jemalloc accepts is centuries; a larger number is not a time.
const TIME_MS_MAX: u64 = 1 << 40;
/// Bytes of the fields that are compared.
const FIELDS_BYTES: usize = 40;
/// Where in its first block the base of an arena begins: behind the block's own record, which has 128 bytes, and 1,152 where pages have 64
/// KiB.
const BASE_AT: Range<usize> = 40..2048;
/// `MALLOCX_ARENA_LIMIT`.
const ARENAS_MAX: u64 = 4095;

/// Times after which unused pages are returned, in milliseconds; −1 = never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decay {
    /// Of dirty pages.
    pub dirty_ms: i64,
    /// Of muzzy pages.
    pub muzzy_ms: i64,
}

/// Where in the first block of an arena's memory the two structures begin: the same in each process with the same file.
pub type Places = [usize; 2];

/// Finds the times of each arena by its number. `blocks` are those of jemalloc's own memory, and `object` is where its code and data are
/// mapped. `places` is what another process showed, and afterwards what this one did.
#[must_use]
pub fn find(memory: &dyn Memory, blocks: &[Range<u64>], object: &Range<u64>, places: &mut Option<Places>) -> BTreeMap<u32, Decay> {
    let mut found = BTreeMap::new();
    let mut left = SEARCHED_BYTES_MAX;
    for block in blocks {
        let Some(arena) = arena_of(memory, block.start, object) else { continue };
        let known = places.and_then(|places| read_at(memory, block.start, places));
        let decay = known.or_else(|| {
            let bytes = (block.end - block.start).min(SEARCHED_BYTES).min(left);
            left -= bytes;
            let (there, decay) = search(memory, block.start, bytes)?;
            *places = Some(there);
            Some(decay)
        });
        found.extend(decay.map(|decay| (arena, decay)));
    }
    found
}

/// The number of the arena whose memory begins with this block.
fn arena_of(memory: &dyn Memory, block: u64, object: &Range<u64>) -> Option<u32> {
    let header = memory.bytes(block, BASE_AT.end)?;
    BASE_AT.step_by(8).find_map(|at| {
        let (number, hooks) = (word_at(&header, at), word_at(&header, at + 8));
        (number < ARENAS_MAX && object.contains(&hooks)).then(|| u32::try_from(number).ok())?
    })
}

fn read_at(memory: &dyn Memory, block: u64, places: Places) -> Option<Decay> {
    let [dirty_ms, muzzy_ms] = places.map(|place| {
        let addr = block.checked_add(place as u64)?;
        time_ms(&memory.bytes(addr, FIELDS_BYTES)?, addr)
    });
    Some(Decay { dirty_ms: dirty_ms?, muzzy_ms: muzzy_ms? })
}

/// The two structures in a block, and where their times lie in it.
fn search(memory: &dyn Memory, addr: u64, bytes: u64) -> Option<(Places, Decay)> {
    let mut block = vec![0u8; usize::try_from(bytes).ok()?];
    let read = memory.read(addr, &mut block);
    let block = block.get(..read)?;
    let mut before: Option<(usize, i64)> = None;
    for at in (0..read.saturating_sub(FIELDS_BYTES)).step_by(8) {
        // Decides for nearly every word.
        let epoch = word_at(block, at + 16);
        if epoch == 0 || word_at(block, at + 32) < epoch {
            continue;
        }
        let Some(time) = time_ms(block.get(at..)?, addr.saturating_add(at as u64)) else { continue };
        match before {
            Some((place, dirty_ms)) if DISTANCE.contains(&(at - place)) => {
                return Some(([place, at], Decay { dirty_ms, muzzy_ms: time }));
            }
            _ => before = Some((at, time)),
        }
    }
    None
}

/// The time in a structure whose fields begin at `addr`; `None` if it is not such a structure.
fn time_ms(fields: &[u8], addr: u64) -> Option<i64> {
    let [time, interval, epoch, jitter, deadline] = [0, 8, 16, 24, 32].map(|at| word_at(fields, at));
    let after = deadline.checked_sub(epoch).filter(|_| epoch > 0)?;
    if time == 0 || time == u64::MAX {
        let begins_before = addr.checked_sub(jitter).is_some_and(|distance| (1..=MUTEX_BYTES_MAX).contains(&distance));
        return (begins_before && after == interval).then(|| time.cast_signed());
    }
    let step = time.checked_mul(1_000_000)? / STEPS;
    let sound = time < TIME_MS_MAX && interval == step && (step..=step.saturating_mul(2)).contains(&after);
    sound.then(|| time.cast_signed())
}

#[cfg(test)]
mod tests {
    use super::super::super::Fixture;
    use super::*;

    #[test]
    fn places_of_another_process_are_tried_first_and_others_searched_for() {
        const BLOCK: u64 = 0x7f00_0000_0000;
        const OBJECT: Range<u64> = 0x6000_0000..0x6010_0000;
        let mut memory = Fixture::default();
        memory.write(BLOCK, &[0; 16 << 10]);
        memory.write_word(BLOCK + 192, 3);
        memory.write_word(BLOCK + 200, OBJECT.start + 64);
        for (at, time) in [(4096, 10_000), (4096 + 2048, 20_000)] {
            let step = time * 1_000_000 / STEPS;
            let words = [time, step, 1 << 40, 77, (1 << 40) + step];
            words.into_iter().enumerate().for_each(|(index, word)| memory.write_word(BLOCK + at + 8 * index as u64, word));
        }
        let expected = BTreeMap::from([(3, Decay { dirty_ms: 10_000, muzzy_ms: 20_000 })]);
        for before in [None, Some([4096, 6144]), Some([512, 640])] {
            let mut places = before;
            assert_eq!(find(&memory, std::slice::from_ref(&(BLOCK..BLOCK + (2 << 20))), &OBJECT, &mut places), expected, "{before:?}");
            assert_eq!(places, Some([4096, 6144]), "{before:?}");
        }
    }

    fn fields(words: [u64; 5]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn a_time_is_recognised_by_interval_and_deadline_and_never_by_its_own_address() {
        let told = |words| time_ms(&fields(words), 0x7000);
        assert_eq!(told([10_000, 50_000_000, 1 << 40, 77, (1 << 40) + 60_000_000]), Some(10_000));
        assert_eq!(told([10_000, 50_000_001, 1 << 40, 77, (1 << 40) + 60_000_000]), None);
        assert_eq!(told([10_000, 50_000_000, 1 << 40, 77, (1 << 40) + 40_000_000]), None);
        assert_eq!(told([0, 0, 1 << 40, 0x6f80, 1 << 40]), Some(0));
        assert_eq!(told([u64::MAX, 0, 1 << 40, 0x6f80, 1 << 40]), Some(-1));
        // Set by mallctl after it had been positive: the interval stays.
        assert_eq!(told([u64::MAX, 5, 1 << 40, 0x6f80, (1 << 40) + 5]), Some(-1));
        assert_eq!(told([0, 0, 1 << 40, 0x6000, 1 << 40]), None);
        assert_eq!(told([0; 5]), None);
    }
}
