//! The table of arenas, found by form.
//!
//! `struct arena_object` is {address, pool_address, nfreepools u32, ntotalpools u32, freepools, nextarena, prevarena} (Objects/obmalloc.c of
//! CPython 3.8 to 3.11, Include/internal/pycore_obmalloc.h from 3.12 on, where `struct _obmalloc_mgmt` begins {arenas, maxarenas u32,
//! unused_arena_objects, usable_arenas}). An arena has 1 MiB and pools of 16 KiB from 3.10 on, 256 KiB and pools of 4 KiB before; builds
//! without the radix tree have 1 MiB and 4 KiB from 3.10 on. The word that leads to the table lies in the interpreter's own data. The pools
//! confirm it: the header of each has its arena's number in the table.

use std::ops::Range;

use super::super::layout_cache::ByBuildId;
use super::super::memory::{Memory, is_user_address, word_at, word32_at};
use super::super::objects::{ObjectRef, Objects, range_of};
use super::pools::{HEADER_BYTES, PoolHeader};

/// Bytes of a table's entry.
const ENTRY_BYTES: usize = 48;
/// Arenas of a process: 256 GiB.
const ARENAS_MAX: usize = 1 << 18;
/// Entries of the first table; each larger one has twice as many (`INITIAL_ARENA_OBJECTS`).
const ENTRIES_FIRST: u64 = 16;
/// Entries read with one call.
const ENTRIES: usize = 64;
/// Times that an entry is read which contradicts itself: the interpreter was changing it. Of a table, so many may always do; more, and it is
/// none.
const TRIES: usize = 4;
const TORN_MAX: u64 = 2;
/// Candidates for the table that are examined in one object.
const CANDIDATES_MAX: usize = 1 << 16;
/// Arenas whose first pool is read to determine the form.
const ARENAS_ASKED: usize = 16;

/// Sizes of arenas and pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Bytes of an arena.
    pub arena_bytes: u64,
    /// Bytes of a pool.
    pub pool_bytes: u64,
}

/// Forms, the newest first.
const FORMS: [Form; 3] = [
    Form { arena_bytes: 1 << 20, pool_bytes: 16 << 10 },
    Form { arena_bytes: 256 << 10, pool_bytes: 4 << 10 },
    Form { arena_bytes: 1 << 20, pool_bytes: 4 << 10 },
];

/// An arena's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arena {
    /// Its number in the table.
    pub number: u64,
    /// Its address.
    pub addr: u64,
    /// The next pool that was never used.
    pub pool_address: u64,
    /// Pools without blocks in use, and those never used.
    pub free_pools: u64,
    /// All pools.
    pub pools: u64,
}

impl Arena {
    /// Its first pool: pools are aligned to their size, arenas to pages.
    #[must_use]
    pub fn first_pool(&self, form: Form) -> u64 {
        self.addr.next_multiple_of(form.pool_bytes)
    }

    /// Its address space.
    #[must_use]
    pub fn range(&self, form: Form) -> Range<u64> {
        self.addr..self.addr.saturating_add(form.arena_bytes)
    }

    /// Whether no block of it is in use.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.free_pools == self.pools
    }

    /// Whether its fields agree with each other.
    fn fits(&self, form: Form) -> bool {
        let first = self.first_pool(form);
        let Some(used) = self.pool_address.checked_sub(first).filter(|used| used.is_multiple_of(form.pool_bytes)) else { return false };
        let all = form.arena_bytes / form.pool_bytes - u64::from(first != self.addr);
        // Those never used are free.
        self.pools == all && used / form.pool_bytes <= all && (all - used / form.pool_bytes..=all).contains(&self.free_pools)
    }

    /// Whether its first pool says that it is in this arena; `None` if that was never used, or cannot be read.
    fn is_confirmed(&self, memory: &dyn Memory, form: Form) -> Option<bool> {
        let first = self.first_pool(form);
        if self.pool_address == first {
            return None;
        }
        let header = memory.bytes(first, HEADER_BYTES)?;
        Some(PoolHeader::parse(&header, form.pool_bytes).is_some_and(|header| header.arena == self.number))
    }
}

/// The arenas of an interpreter.
#[derive(Debug, Clone)]
pub struct Arenas {
    /// The object whose data leads to them.
    pub object: String,
    /// Their form.
    pub form: Form,
    /// Those in use, by address.
    pub list: Vec<Arena>,
    /// Entries left out because they contradicted themselves each time that they were read.
    pub torn: u64,
}

/// Where the word that leads to the table lies, as the distance from its object's base.
pub type Places = ByBuildId<u64>;

/// Finds the arenas. `writable`: the anonymous memory that can be written to, sorted and disjoint.
#[must_use]
pub fn find(memory: &dyn Memory, objects: &Objects<'_>, writable: &[Range<u64>], places: &mut Places) -> Option<Arenas> {
    let search = Search { memory, writable };
    for one in objects.iter() {
        let Some(distance) = places.get(one.build_id().as_ref()) else { continue };
        if let Some(found) = search.at(&one, one.object().base.wrapping_add(distance)) {
            return Some(found);
        }
    }
    let (place, one, found) = objects
        .iter()
        .filter_map(|one| search.in_object(&one).map(|(place, found)| (place, one, found)))
        .max_by_key(|(_, _, found)| found.list.len())?;
    places.remember(one.build_id().as_ref(), place.wrapping_sub(one.object().base));
    Some(found)
}

struct Search<'a> {
    memory: &'a dyn Memory,
    writable: &'a [Range<u64>],
}

impl Search<'_> {
    /// The table that an object's data leads to, and where the word is. If several words lead to a table, one of them perhaps to a discarded
    /// one, that with most arenas is taken.
    fn in_object(&self, one: &ObjectRef<'_, '_>) -> Option<(u64, Arenas)> {
        let (object, data) = (one.object(), one.data());
        let is_pythons = object.name.starts_with("python") || object.name.starts_with("libpython");
        let word = |index: usize| word_at(&data, index.saturating_mul(8));
        let may_lead = |&(index, table): &(usize, u64)| {
            table.is_multiple_of(16)
                && !object.range.contains(&table)
                && (is_pythons || entries(table, [word(index + 1), word(index + 2), word(index + 3)]).is_some())
                && range_of(self.writable, table).is_some()
        };
        let mut words: Vec<(u64, usize)> =
            data.words().filter(may_lead).take(CANDIDATES_MAX).map(|(index, table)| (table, index)).collect();
        words.sort_unstable();
        words.dedup_by_key(|(table, _)| *table);
        let found = words.into_iter().filter_map(|(_, index)| {
            let place = object.range.start.wrapping_add(8 * index as u64);
            self.at(one, place).map(|found| (place, found))
        });
        found.max_by_key(|(_, found)| found.list.len())
    }

    /// The arenas to which the word at an address leads.
    fn at(&self, one: &ObjectRef<'_, '_>, place: u64) -> Option<Arenas> {
        let words = self.memory.bytes(place, 32)?;
        let [table, max, unused, usable] = [0, 8, 16, 24].map(|at| word_at(&words, at));
        if !table.is_multiple_of(16) || range_of(self.writable, table).is_none() {
            return None;
        }
        let limit = entries(table, [max, unused, usable]);
        let (list, torn) = self.table(table, limit)?;
        let form = FORMS.into_iter().find(|&form| self.has_form(&list, form))?;
        let mut list: Vec<Arena> = list.into_iter().filter(|arena| arena.fits(form) && self.holds(&arena.range(form))).collect();
        if limit.is_none() {
            // Behind a table whose length is not known there may be what is left of an older one: it ends with the last arena whose pool has
            // its number.
            let last = list.iter().rposition(|arena| arena.is_confirmed(self.memory, form) == Some(true))?;
            list.truncate(last + 1);
        }
        list.sort_unstable_by_key(|arena| (arena.addr, arena.number));
        list.dedup_by(|later, kept| later.addr < kept.addr.saturating_add(form.arena_bytes));
        (!list.is_empty()).then(|| Arenas { object: one.object().name.clone(), form, list, torn })
    }

    /// The entries in use of the table at an address, and the number of those left out; `None` if it is not such a table. Where its length is
    /// not known, it ends with the last sound entry.
    fn table(&self, table: u64, length: Option<usize>) -> Option<(Vec<Arena>, u64)> {
        let (mut list, mut torn) = (Vec::new(), 0);
        let limit = length.unwrap_or(ARENAS_MAX);
        let mut number = 0;
        'table: while number < limit {
            let mut bytes = [0u8; ENTRIES * ENTRY_BYTES];
            let wanted = bytes.get_mut(..(limit - number).min(ENTRIES) * ENTRY_BYTES)?;
            let read = self.memory.read(table.checked_add((number * ENTRY_BYTES) as u64)?, wanted);
            let wanted = wanted.len();
            for entry in bytes.get(..read)?.chunks_exact(ENTRY_BYTES) {
                match parse(entry, table, number as u64).or_else(|| self.entry_again(table, number)) {
                    Some(arena) => list.extend(arena),
                    None if length.is_some() && torn < TORN_MAX => torn += 1,
                    None => break 'table,
                }
                number += 1;
            }
            if read < wanted {
                break;
            }
        }
        Some((list, torn))
    }

    /// An entry that contradicted itself, once it does not any more.
    fn entry_again(&self, table: u64, number: usize) -> Option<Option<Arena>> {
        let place = table.checked_add((number * ENTRY_BYTES) as u64)?;
        (1..TRIES).find_map(|_| parse(&self.memory.bytes(place, ENTRY_BYTES)?, table, number as u64))
    }

    /// Whether the arenas have this form: most of the first ones whose first pool can be read.
    fn has_form(&self, list: &[Arena], form: Form) -> bool {
        let asked: Vec<bool> = list
            .iter()
            .filter(|arena| arena.fits(form))
            .filter_map(|arena| arena.is_confirmed(self.memory, form))
            .take(ARENAS_ASKED)
            .collect();
        let right = asked.iter().filter(|is_right| **is_right).count();
        right > 0 && right * 2 > asked.len()
    }

    fn holds(&self, range: &Range<u64>) -> bool {
        range_of(self.writable, range.start).is_some_and(|own| range.end <= own.end)
    }
}

/// Entries of a table, by the words behind the one that leads to it in `struct _obmalloc_mgmt`; `None` if they are not its.
fn entries(table: u64, [max, unused, usable]: [u64; 3]) -> Option<usize> {
    let is_length = max >= ENTRIES_FIRST && max <= ARENAS_MAX as u64 && max.is_power_of_two();
    let leads_inside = |word: u64| {
        word == 0
            || word.checked_sub(table).is_some_and(|distance| distance % ENTRY_BYTES as u64 == 0 && distance / (ENTRY_BYTES as u64) < max)
    };
    // One of the lists has a member, unless all arenas are full.
    (is_length && leads_inside(unused) && leads_inside(usable)).then(|| usize::try_from(max).ok())?
}

/// An entry; `Some(None)` if it is unused, `None` if it is invalid.
fn parse(entry: &[u8], table: u64, number: u64) -> Option<Option<Arena>> {
    let in_table = |word: u64| word == 0 || word.checked_sub(table).is_some_and(|bytes| bytes % ENTRY_BYTES as u64 == 0 && bytes < 1 << 32);
    let [addr, pool_address, free_list, next] = [0, 8, 24, 32].map(|at| word_at(entry, at));
    let (free_pools, pools) = (u64::from(word32_at(entry, 16)), u64::from(word32_at(entry, 20)));
    // Unused entries are in a list of their own. A full arena is in no list, and may point to where the table was before it grew.
    if addr == 0 {
        return in_table(next).then_some(None);
    }
    let inside = |word: u64| (addr..=addr.saturating_add(1 << 20)).contains(&word);
    let arena = Arena { number, addr, pool_address, free_pools, pools };
    let is_sound = addr.is_multiple_of(4096)
        && is_user_address(addr)
        && (free_list == 0 || inside(free_list))
        && FORMS.into_iter().any(|form| arena.fits(form));
    is_sound.then_some(Some(arena))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARENA: u64 = 0x7f00_0000_1000;

    #[test]
    fn an_arena_whose_fields_contradict_each_other_is_none() {
        let form = FORMS[0];
        // Not aligned to its pools: one of 64 is lost.
        let sound = Arena { number: 0, addr: ARENA, pool_address: ARENA + 0x3000 + 0x8000, free_pools: 61, pools: 63 };
        assert!(sound.fits(form));
        for wrong in [
            Arena { pools: 64, ..sound },
            Arena { free_pools: 60, ..sound },
            Arena { free_pools: 64, ..sound },
            Arena { pool_address: ARENA + 0x8000, ..sound },
            Arena { pool_address: ARENA, ..sound },
            Arena { pool_address: ARENA + 0x20_0000, ..sound },
        ] {
            assert!(!wrong.fits(form), "{wrong:?}");
        }
    }

    #[test]
    fn the_words_behind_the_table_give_its_length() {
        let table = 0x5500_0000_0010;
        assert_eq!(entries(table, [16, table + 48, 0]), Some(16));
        assert_eq!(entries(table, [64, 0, table + 63 * 48]), Some(64));
        for wrong in [[8, 0, 0], [17, 0, 0], [1 << 20, 0, 0], [16, table + 47, 0], [16, table + 16 * 48, 0], [16, 0, table - 48]] {
            assert_eq!(entries(table, wrong), None, "{wrong:?}");
        }
    }
}
