//! Memory that no recorded stack owns, by holder: divides the rows `[before attach]` and `[unattributed]` into parts by place, owner and
//! type.
//!
//! Each of their blocks is attributed as in the account by stack, with the number of its group instead of a stack, so that the parts of a
//! row add up to the row to the byte.

use crate::census::chunks::Block;
use crate::census::live::LiveMemory;
use crate::census::resident::{heap_ranges, pages_of};
use crate::census::{Pace, Taken};
use crate::fragmentation::by_stack::BEFORE_ATTACH as OLD;
use crate::ledger::Ledger;
use crate::profile::{BEFORE_ATTACH, Frame, UNATTRIBUTED, ValueKind, Values};
use crate::retention::ScanError;
use crate::retention::describe::{Describer, first_words};
use crate::retention::holdings::{By, Holdings};
use crate::retention::shares::Shares;
use crate::session::report::attribution::{Owned, StartHeap, owner};
use crate::units::StackId;

/// A part of a row: its frames and its values.
pub type Part = (Vec<Frame>, Values);

/// The blocks of a heap in groups by holder.
pub struct Grouping {
    holdings: Holdings,
    shares: Shares,
}

impl Grouping {
    /// Of a process's heap. One pass over its memory: pointers may change meanwhile.
    ///
    /// # Errors
    /// If the process has ended, or has no heap whose blocks are known.
    pub fn of(memory: &LiveMemory, pid: u32, taken: &Taken) -> Result<Self, ScanError> {
        let holdings = Holdings::of(memory, pid, taken, Pace::default(), None)?;
        let maps = crate::census::Memory::maps(memory)?;
        let mut describer = Describer::of(memory, &maps, &holdings)?;
        let firsts = first_words(memory, &holdings);
        let shares = Shares::of(&mut describer, By::Pinned, &firsts);
        Ok(Self { holdings, shares })
    }

    /// Number of groups; the last one has the blocks of no other.
    pub fn len(&self) -> usize {
        self.shares.groups.len() + 1
    }

    /// The group of a block.
    pub fn group_of(&self, block: &Block) -> usize {
        let hit = self.holdings.blocks.index.find(block.addr).filter(|hit| hit.offset == 0);
        hit.and_then(|hit| self.shares.group_of(hit.block)).map_or(self.len() - 1, |group| group as usize)
    }

    /// The frames of a part of a row: what the blocks are, what holds them, and the row's name.
    pub fn frames(&self, group: usize, row: &str) -> Vec<Frame> {
        let mut frames = self.shares.groups.get(group).map(|share| share.frames()).unwrap_or_default();
        frames.push(Frame::named(row));
        frames
    }
}

/// Groups the memory that no recorded stack owns by holder.
///
/// # Errors
/// If the process has ended, or has no heap whose blocks are known.
pub fn by_owner(memory: &LiveMemory, pid: u32, taken: &Taken, ledger: &Ledger, before: Option<&StartHeap>) -> Result<Vec<Part>, ScanError> {
    let grouping = Grouping::of(memory, pid, taken)?;
    // Two numbers per group: memory from before the recording, and memory that was not seen.
    let number = |block: &Block| {
        let is_old = match owner(ledger, before, block) {
            Some(OLD) => true,
            None => false,
            Some(_) => return None,
        };
        Some(StackId(2 * grouping.group_of(block) as u32 + u32::from(is_old)))
    };
    let mut owned = Owned::default();
    for walk in taken.heaps.iter().filter(|walk| !walk.chunks.is_empty()) {
        let ranges = heap_ranges(&walk.chunks).into_iter().map(|range| range.range);
        let Some(states) = pages_of(memory, ranges) else { continue };
        owned.add_by(walk, &states, number);
    }
    let parts = (0..2 * grouping.len() as u32).map(|id| {
        let row = if id % 2 == 1 { BEFORE_ATTACH } else { UNATTRIBUTED };
        let values = Values::default()
            .with(ValueKind::LiveObjects, owned.live_chunks.of(StackId(id)))
            .with(ValueKind::LiveSpace, owned.live.of(StackId(id)))
            .with(ValueKind::PinnedSpace, owned.pinned.of(StackId(id)))
            .with(ValueKind::BlockedSpace, owned.blocked.of(StackId(id)));
        (grouping.frames(id as usize / 2, row), values)
    });
    Ok(parts.filter(|(_, values)| !values.is_zero()).collect())
}
