//! The heap from before a recording, for its trace: from the census at the start and the states of the free chunks' pages.

use crate::census::chunks::{ARENA_NONE, Block, ChunkState};
use crate::census::resident::pages_of;
use crate::census::{Memory, Taken};
use crate::heap::residency::{PageRuns, page_bytes};
use crate::trace::{Seed, SeedChunk, SeedRegion};

/// Arenas of one heap: those of another heap of the process have numbers above.
const ARENAS: u32 = 1 << 16;

/// The blocks in use and the free chunks. Without `memory`, free chunks count as resident.
pub fn of(taken: &Taken, memory: Option<&dyn Memory>) -> Seed {
    let mut seed = Seed::default();
    for (index, walk) in taken.heaps.iter().enumerate() {
        let regions = walk.chunks.regions();
        let pages = memory.and_then(|memory| pages_of(memory, regions.iter().map(|region| region.start..region.end)));
        let first = ARENAS.saturating_mul(index as u32);
        seed.regions.extend(regions.iter().map(|region| SeedRegion {
            arena: (region.arena != ARENA_NONE).then(|| region.arena.saturating_add(first)),
            chunks: walk.chunks.blocks_of(region).filter_map(|block| chunk(&block, pages.as_ref())).collect(),
        }));
    }
    seed.regions.retain(|region| !region.chunks.is_empty());
    seed.regions.sort_by_key(|region| region.range().start);
    seed
}

fn chunk(block: &Block, pages: Option<&PageRuns>) -> Option<SeedChunk> {
    let free = match block.chunk.state {
        ChunkState::Live | ChunkState::Mmapped => None,
        ChunkState::Overhead | ChunkState::Unknown => return None,
        ChunkState::Tcache | ChunkState::Fastbin | ChunkState::Free | ChunkState::Top => Some(match pages {
            // Smaller ones share their pages.
            Some(pages) if block.usable_bytes >= page_bytes() => {
                pages.resident_bytes(block.addr..block.addr.saturating_add(block.usable_bytes))
            }
            _ => block.usable_bytes,
        }),
    };
    Some(SeedChunk { addr: block.addr, usable_bytes: block.usable_bytes, free })
}
