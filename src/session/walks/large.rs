//! How much of a traced process's large blocks is resident: the program need not have touched them as a whole.

use std::collections::HashMap;

use crate::census::resident::pages_of;
use crate::census::{LiveMemory, Taken};
use crate::heap::residency::{PageRuns, whole_pages};
use crate::process::Process;
use crate::trace::LARGE_BYTES;
use crate::units::{Addr, Pid, StackHash};

/// Bytes of the large live blocks of a stack, and of them the resident ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Touched {
    /// Bytes requested.
    pub bytes: u64,
    /// Of them, resident: see [`resident_bytes`].
    pub resident_bytes: u64,
}

/// The large blocks that a census calls live, by stack. `recorded`: requested bytes and stack of the block at an address. Blocks that changed
/// since the census are left out. Nothing if the process has ended.
pub fn touched(taken: &Taken, pid: Pid, recorded: impl Fn(Addr) -> Option<(u64, StackHash)>) -> HashMap<StackHash, Touched> {
    let large = taken.heaps.iter().flat_map(|walk| walk.chunks.live_blocks()).filter(|block| block.usable_bytes >= LARGE_BYTES);
    let mut blocks: Vec<(u64, u64, StackHash)> = large
        .filter_map(|block| {
            let (bytes, stack) = recorded(Addr(block.addr))?;
            (LARGE_BYTES..=block.usable_bytes).contains(&bytes).then_some((block.addr, block.addr.checked_add(bytes)?, stack))
        })
        .collect();
    blocks.sort_unstable_by_key(|one| one.0);
    let memory = Process::open(pid).ok().and_then(|process| LiveMemory::open(process).ok());
    let pages = memory.and_then(|memory| pages_of(&memory, blocks.iter().map(|&(start, end, _)| start..end)));
    let mut by_stack: HashMap<StackHash, Touched> = HashMap::new();
    for (start, end, stack) in blocks.into_iter().filter(|_| pages.is_some()) {
        let touched = by_stack.entry(stack).or_default();
        touched.bytes += end - start;
        touched.resident_bytes += pages.as_ref().map_or(0, |pages| resident_bytes(pages, start, end));
    }
    by_stack
}

/// Of a block, the resident pages that it has to itself: neighbours touch the others. All of it if all of these are resident. Wherever the
/// block begins within its page, that is on average what was touched from its start.
fn resident_bytes(pages: &PageRuns, start: u64, end: u64) -> u64 {
    let own = whole_pages(start..end);
    let resident = pages.resident_bytes(own.clone());
    if resident == own.end - own.start { end - start } else { resident }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::residency::{PageRun, PageState, page_bytes};

    #[test]
    fn pages_that_neighbours_touch_do_not_count_and_a_block_without_others_is_touched_as_a_whole() {
        let mut pages = PageRuns::default();
        for (first, end) in [(1, 4), (8, 9)] {
            let state = PageState { present: true, ..PageState::default() };
            pages.push(PageRun { start: first * page_bytes(), end: end * page_bytes(), state });
        }
        let touched = |start: u64, end: u64| resident_bytes(&pages, start, end);
        // Of pages 1 and 8 it has a part, of 2 and 3 the whole.
        assert_eq!(touched(page_bytes() + 16, 8 * page_bytes() + 500), 2 * page_bytes());
        assert_eq!(touched(page_bytes() + 16, 4 * page_bytes() + 500), 3 * page_bytes() + 484);
        assert_eq!(touched(5 * page_bytes(), 8 * page_bytes()), 0);
    }
}
