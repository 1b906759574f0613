//! CPython's arenas, where its heap is not read for itself (`census/pymalloc`): memory that is not malloc's.

use super::super::memory::Piece;
use super::super::pymalloc::arenas::{self, Arenas, Places};
use super::super::pymalloc::pools::{HEADER_BYTES, PoolHeader};
use super::view::View;
use super::{Kind, RuntimeMemory};

/// Finds the arenas.
#[must_use]
pub fn find(view: &View<'_>, places: &mut Places) -> Option<RuntimeMemory> {
    let mut found = arenas::find(view.memory, view.objects, &view.writable, places)?;
    let form = found.form;
    // Those of its own heap are not outside.
    found.list.retain(|arena| view.holds(&arena.range(form)));
    let mut memory = RuntimeMemory::new(Kind::Pymalloc);
    let ranges = found.list.iter().map(|arena| arena.range(form)).collect();
    memory.extend(Some((ranges, used_bytes(view, &found))));
    memory.finish()
}

/// Bytes of the blocks in use, by the headers of all pools that are in memory.
fn used_bytes(view: &View<'_>, found: &Arenas) -> Option<u64> {
    let pool_bytes = found.form.pool_bytes;
    let step = usize::try_from(pool_bytes).ok()?;
    let mut used = 0u64;
    for arena in &found.list {
        let runs = view.memory.page_runs(arena.range(found.form)).ok()?;
        let pools = (arena.first_pool(found.form)..arena.pool_address).step_by(step).filter(|&pool| runs.state_at(pool).present);
        let pieces: Vec<Piece> = pools.map(|addr| Piece { addr, bytes: HEADER_BYTES }).collect();
        let mut headers = vec![0u8; pieces.len() * HEADER_BYTES];
        let read = view.memory.read_pieces(&pieces, &mut headers);
        for header in headers.get(..read)?.chunks_exact(HEADER_BYTES).filter_map(|header| PoolHeader::parse(header, pool_bytes)) {
            used = used.saturating_add(header.used * header.block_bytes);
        }
    }
    Some(used)
}
