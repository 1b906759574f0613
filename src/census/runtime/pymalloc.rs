//! CPython's arenas (Objects/obmalloc.c): a table of {address, pool_address, nfreepools u32, ntotalpools u32, freepools, nextarena,
//! prevarena}, found through a word of the interpreter's own data. An arena has 1 MiB and pools of 16 KiB since 3.10, 256 KiB and pools of
//! 4 KiB before. A pool begins with {blocks in use u32, freeblock, nextpool, prevpool, arena's number u32, size class u32, nextoffset u32,
//! maxnextoffset u32}; the last is the pool's size less a block, and a block has 16 bytes for each class.

use std::ops::Range;

use super::super::memory::{Piece, is_user_address, word_at, word32_at};
use super::super::objects::range_of;
use super::view::View;
use super::{Kind, RuntimeMemory};

/// Bytes of a table's entry.
const ENTRY_BYTES: usize = 48;
/// Bytes of a pool's header.
const POOL_HEADER_BYTES: usize = 48;
/// Arenas of a process: 256 GiB.
const ARENAS_MAX: usize = 1 << 18;
/// Entries read with one call.
const ENTRIES: usize = 64;
/// Candidates for the table that are examined in one object.
const CANDIDATES_MAX: usize = 1 << 16;
/// Arenas whose first pool is read to determine its form.
const ARENAS_ASKED: usize = 16;
/// Bytes of an arena and of a pool, newest first.
const FORMS: [(u64, u64); 2] = [(1 << 20, 16 << 10), (256 << 10, 4 << 10)];

/// Finds the arenas. If several words lead to a table, one of them perhaps to a discarded table, the one with most arenas is taken.
#[must_use]
pub fn find(view: &View<'_>) -> Option<RuntimeMemory> {
    let is_pythons = |name: &str| name.starts_with("python") || name.starts_with("libpython");
    let mut most: Option<RuntimeMemory> = None;
    for one in view.objects.iter().filter(|one| is_pythons(&one.object().name)) {
        let (object, data) = (one.object(), one.data());
        let may_lead = |word: u64| word.is_multiple_of(16) && !object.range.contains(&word) && range_of(&view.writable, word).is_some();
        let mut words: Vec<u64> = data.words().map(|(_, word)| word).filter(|&word| may_lead(word)).take(CANDIDATES_MAX).collect();
        words.sort_unstable();
        words.dedup();
        for found in words.into_iter().filter_map(|word| arenas(view, word)) {
            if most.as_ref().is_none_or(|other| other.ranges.len() < found.ranges.len()) {
                most = Some(found);
            }
        }
    }
    let mut most = most?;
    most.used_bytes = used_bytes(view, &most.ranges);
    Some(most)
}

/// The arenas of the table at an address; `None` if it is not such a table, or has no arena in use.
fn arenas(view: &View<'_>, table: u64) -> Option<RuntimeMemory> {
    let mut addrs: Vec<(usize, u64)> = Vec::new();
    let mut number = 0;
    'table: while number < ARENAS_MAX {
        let mut entries = [0u8; ENTRIES * ENTRY_BYTES];
        let read = view.memory.read(table.checked_add((number * ENTRY_BYTES) as u64)?, &mut entries);
        for entry in entries.get(..read)?.chunks_exact(ENTRY_BYTES) {
            let Some(is_used) = parse(entry, table) else { break 'table };
            if is_used {
                addrs.push((number, word_at(entry, 0)));
            }
            number += 1;
        }
        if read < entries.len() {
            break;
        }
    }
    let asked = addrs.iter().take(ARENAS_ASKED);
    let of_form = |&(arena, pool): &(u64, u64)| {
        let right = asked.clone().filter(|(number, addr)| is_first_pool(view, *number, *addr, pool)).count();
        (right * 2 > asked.len() && right > 0).then_some((arena, pool))
    };
    let (arena_bytes, _) = FORMS.iter().find_map(of_form)?;
    let mut found = RuntimeMemory::new(Kind::Pymalloc);
    let ranges =
        addrs.iter().filter_map(|(_, addr)| Some(*addr..addr.checked_add(arena_bytes)?)).filter(|range| view.holds(range)).collect();
    found.extend(Some((ranges, None)));
    found.finish()
}

/// Whether an entry is in use; `None` if it is invalid.
fn parse(entry: &[u8], table: u64) -> Option<bool> {
    let in_table =
        |entry: u64| entry == 0 || entry.checked_sub(table).is_some_and(|bytes| bytes % ENTRY_BYTES as u64 == 0 && bytes < 1 << 32);
    let [address, pool, free_pools, next] = [0, 8, 24, 32].map(|at| word_at(entry, at));
    let (free, total) = (word32_at(entry, 16), word32_at(entry, 20));
    // Unused entries are in a list of their own. A full arena is in no list, and may point to where the table was before it grew.
    if address == 0 {
        return in_table(next).then_some(false);
    }
    let inside = |addr: u64| (address..=address.saturating_add(FORMS[0].0)).contains(&addr);
    let sound = address.is_multiple_of(4096)
        && is_user_address(address)
        && inside(pool)
        && (63..=64).contains(&total)
        && free <= total
        && (free_pools == 0 || inside(free_pools));
    sound.then_some(true)
}

/// Whether the first pool of an arena is one of this size.
fn is_first_pool(view: &View<'_>, number: usize, arena: u64, pool_bytes: u64) -> bool {
    let Some(pool) = arena.checked_next_multiple_of(pool_bytes) else { return false };
    let header = view.memory.bytes(pool, POOL_HEADER_BYTES);
    header.is_some_and(|header| u64::from(word32_at(&header, 32)) == number as u64 && block_bytes(&header, pool_bytes).is_some())
}

/// The size of a pool's blocks.
fn block_bytes(header: &[u8], pool_bytes: u64) -> Option<u64> {
    let (class, last) = (u64::from(word32_at(header, 36)), u64::from(word32_at(header, 44)));
    let bytes = (class + 1) * 16;
    (class < 64 && last + bytes == pool_bytes).then_some(bytes)
}

/// Bytes of the blocks in use, by the headers of all pools that are in memory.
fn used_bytes(view: &View<'_>, arenas: &[Range<u64>]) -> Option<u64> {
    let arena_bytes = arenas.first().map(|arena| arena.end - arena.start)?;
    let pool_bytes = FORMS.iter().find(|(arena, _)| *arena == arena_bytes)?.1;
    let mut used = 0u64;
    for arena in arenas {
        let runs = view.memory.page_runs(arena.clone()).ok()?;
        let first = arena.start.checked_next_multiple_of(pool_bytes)?;
        let step = usize::try_from(pool_bytes).ok()?;
        let pools = (first..arena.end.saturating_sub(pool_bytes - 1)).step_by(step).filter(|&pool| runs.state_at(pool).present);
        let pieces: Vec<Piece> = pools.map(|addr| Piece { addr, bytes: POOL_HEADER_BYTES }).collect();
        let mut headers = vec![0u8; pieces.len() * POOL_HEADER_BYTES];
        let read = view.memory.read_pieces(&pieces, &mut headers);
        for header in headers.get(..read)?.chunks_exact(POOL_HEADER_BYTES) {
            let blocks = u64::from(word32_at(header, 0));
            let bytes = block_bytes(header, pool_bytes).and_then(|bytes| bytes.checked_mul(blocks)).filter(|&bytes| bytes < pool_bytes);
            used = used.saturating_add(bytes.unwrap_or(0));
        }
    }
    Some(used)
}
