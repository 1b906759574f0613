//! Filling a table of chunks: one by one, many at once, from another table; and taking the last ones back.

use std::ops::Range;

use super::{ANCHOR_EVERY, BLOCK_ENTRIES, CHUNKS_MAX, ChunkState, ChunkTable, Region, SIZE_BITS_ESCAPE, SIZE_UNIT};

/// A size as an entry; `None` for 0 and sizes that need the side table.
#[inline]
fn plain_units(bytes: u64) -> Option<u32> {
    let units = u32::try_from(bytes / SIZE_UNIT).ok()?;
    (bytes.is_multiple_of(SIZE_UNIT) && (1..SIZE_BITS_ESCAPE).contains(&units)).then_some(units)
}

impl ChunkTable {
    /// Starts a region at `start`; chunks pushed from now on belong to it.
    pub fn begin_region(&mut self, start: u64, arena: u32) {
        self.regions.push(Region { start, end: start, arena, entries: self.len..self.len });
    }

    /// Appends a chunk to the current region. `false` if the table is full, no region was begun, or the chunk is empty.
    #[inline]
    pub fn push(&mut self, bytes: u64, state: ChunkState) -> bool {
        let Some(region) = self.regions.last_mut() else { return false };
        if self.len >= CHUNKS_MAX || bytes == 0 {
            return false;
        }
        if self.len.is_multiple_of(ANCHOR_EVERY) {
            self.anchors.push(region.end);
            if self.len.is_multiple_of(BLOCK_ENTRIES) {
                // Allocated at full capacity: pages that are not filled cost no memory, and nothing is copied.
                self.blocks.push(Vec::with_capacity(BLOCK_ENTRIES));
            }
        }
        let size_bits = plain_units(bytes).unwrap_or_else(|| {
            self.huge.insert(self.len, bytes);
            SIZE_BITS_ESCAPE
        });
        if let Some(block) = self.blocks.last_mut() {
            block.push(size_bits << 3 | state as u32);
        }
        self.len += 1;
        region.end = region.end.saturating_add(bytes);
        region.entries.end = self.len;
        true
    }

    /// Appends a chunk for each item, as [`ChunkTable::push`] does one by one.
    pub fn append<T>(&mut self, items: &[T], chunk_of: impl Fn(&T) -> (u64, ChunkState)) {
        let mut rest = items;
        while let Some((item, more)) = rest.split_first() {
            let (bytes, state) = chunk_of(item);
            self.push(bytes, state);
            rest = more;
            // Up to the next kept address there is nothing to do but to add entries.
            let (Some(region), Some(block)) = (self.regions.last_mut(), self.blocks.last_mut()) else { continue };
            let room = self.len.next_multiple_of(ANCHOR_EVERY) - self.len;
            let mut added = 0;
            for item in rest.iter().take(room) {
                let (bytes, state) = chunk_of(item);
                let Some(units) = plain_units(bytes) else { break };
                block.push(units << 3 | state as u32);
                region.end = region.end.saturating_add(bytes);
                added += 1;
            }
            self.len += added;
            region.entries.end = self.len;
            rest = rest.get(added..).unwrap_or_default();
        }
    }

    /// Appends the regions of another table with their chunks.
    pub fn append_regions(&mut self, other: &Self) {
        for region in &other.regions {
            self.begin_region(region.start, region.arena);
            self.append_entries(other, region.entries.clone());
        }
    }

    /// Appends the chunks of the other table's region, from the one that begins at `from` on, to the current region, which ends there.
    /// `false` if none begins there, or if there is no room for them; nothing is appended then. The other table's regions are sorted.
    pub fn append_from(&mut self, other: &Self, from: u64) -> bool {
        let Some((first, _)) = other.locate(from).filter(|(_, chunk)| chunk.start == from) else { return false };
        let region = other.regions.iter().find(|region| region.entries.contains(&first));
        let entries = first..region.map_or(first, |region| region.entries.end);
        if self.len + entries.len() > CHUNKS_MAX {
            return false;
        }
        self.append_entries(other, entries);
        true
    }

    fn append_entries(&mut self, other: &Self, entries: Range<usize>) {
        let is_escape = |entry: u32| entry >> 3 == SIZE_BITS_ESCAPE;
        let mut index = entries.start;
        while index < entries.end {
            let (block, at) = (index / BLOCK_ENTRIES, index % BLOCK_ENTRIES);
            let end = BLOCK_ENTRIES.min(at + (entries.end - index));
            let Some(part) = other.blocks.get(block).and_then(|block| block.get(at..end)) else { return };
            for run in part.chunk_by(|&a, &b| is_escape(a) == is_escape(b)) {
                if run.first().is_some_and(|&entry| is_escape(entry)) {
                    for (index, &entry) in (index..).zip(run) {
                        self.push(other.bytes_of(index, entry), ChunkState::from_bits(entry));
                    }
                } else {
                    self.append(run, |&entry| (u64::from(entry >> 3) * SIZE_UNIT, ChunkState::from_bits(entry)));
                }
                index += run.len();
            }
        }
    }

    /// Removes the last chunks of the current region, down to the first one that ends at or before `addr`; returns the region's new end.
    pub fn take_back(&mut self, addr: u64) -> u64 {
        let Some((mut end, entries)) = self.regions.last().map(|region| (region.end, region.entries.clone())) else { return addr };
        while end > addr && self.len > entries.start {
            let index = self.len - 1;
            end = end.saturating_sub(self.bytes_of(index, self.entry(index)));
            self.huge.remove(&index);
            if index.is_multiple_of(ANCHOR_EVERY) {
                self.anchors.pop();
            }
            if let Some(block) = self.blocks.last_mut() {
                block.pop();
            }
            if index.is_multiple_of(BLOCK_ENTRIES) {
                self.blocks.pop();
            }
            self.len = index;
        }
        if let Some(region) = self.regions.last_mut() {
            region.end = end;
            region.entries.end = self.len;
        }
        end
    }

    /// End of the region that is being filled.
    #[must_use]
    pub fn end_of_current(&self) -> u64 {
        self.regions.last().map_or(0, |region| region.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_region_appended_from_one_of_its_chunks_is_as_if_it_had_been_pushed(
            sizes in proptest::collection::vec((0u64..300, 0u32..8), 1..400), before in 0u64..200, from in 0usize..400
        ) {
            let from = from % sizes.len();
            let chunks: Vec<(u64, ChunkState)> = sizes
                .iter()
                .map(|&(size, state)| (if size > 295 { size << 30 } else { size * 4 + 4 }, ChunkState::from_bits(state)))
                .collect();
            let (mut part, mut joined, mut pushed) = (ChunkTable::default(), ChunkTable::default(), ChunkTable::default());
            part.begin_region(1 << 30, 0);
            part.append(&chunks[..from], |chunk| *chunk);
            part.begin_region(1 << 40, 0);
            part.append(&chunks, |chunk| *chunk);
            let start = (1 << 40) + chunks[..from].iter().map(|chunk| chunk.0).sum::<u64>();
            for table in [&mut joined, &mut pushed] {
                table.begin_region(start - before * 16, 0);
                (0..before).for_each(|_| { table.push(16, ChunkState::Live); });
            }
            prop_assert!(joined.append_from(&part, start));
            chunks[from..].iter().for_each(|&(bytes, state)| { pushed.push(bytes, state); });
            prop_assert!(joined.iter().eq(pushed.iter()));
            prop_assert_eq!(&joined.anchors, &pushed.anchors);
            prop_assert!(!joined.append_from(&part, start + 1));
            let mut copy = ChunkTable::default();
            copy.append_regions(&part);
            prop_assert!(copy.iter().eq(part.iter()));
            prop_assert_eq!(copy.regions(), part.regions());
        }

        #[test]
        fn appending_chunks_is_the_same_as_pushing_them_one_by_one(
            parts in proptest::collection::vec(proptest::collection::vec((0u64..300, 0u32..8), 0..200), 1..6)
        ) {
            let (mut together, mut one_by_one) = (ChunkTable::default(), ChunkTable::default());
            for (number, part) in parts.iter().enumerate() {
                // Includes sizes that need the side table, odd sizes, and 0.
                let chunk_of = |&(size, state): &(u64, u32)| (if size > 295 { size << 30 } else { size * 4 }, ChunkState::from_bits(state));
                for table in [&mut together, &mut one_by_one] {
                    if number % 2 == 0 {
                        table.begin_region((number as u64 + 1) << 45, 0);
                    }
                }
                together.append(part, chunk_of);
                part.iter().map(chunk_of).for_each(|(bytes, state)| { one_by_one.push(bytes, state); });
            }
            prop_assert_eq!(together.iter().collect::<Vec<_>>(), one_by_one.iter().collect::<Vec<_>>());
            prop_assert_eq!((&together.anchors, &together.huge, together.len), (&one_by_one.anchors, &one_by_one.huge, one_by_one.len));
            prop_assert_eq!(together.regions(), one_by_one.regions());
        }

        #[test]
        fn taking_chunks_back_leaves_the_table_of_the_other_chunks(
            sizes in proptest::collection::vec(1u64..40, 1..300), more in proptest::collection::vec(1u64..40, 0..80), cut in any::<prop::sample::Index>()
        ) {
            let fill = |table: &mut ChunkTable, sizes: &[u64]| sizes.iter().for_each(|size| { table.push(size << 30, ChunkState::Live); });
            let kept = cut.index(sizes.len());
            let (mut table, mut other) = (ChunkTable::default(), ChunkTable::default());
            for table in [&mut table, &mut other] {
                table.begin_region(0x10, 0);
                fill(table, &[7, 9]);
                table.begin_region(1 << 50, 0);
            }
            fill(&mut table, &sizes);
            let end = (1 << 50) + (sizes.iter().take(kept).sum::<u64>() << 30);
            // Any address within the first chunk to go takes back as far as its start.
            prop_assert_eq!(table.take_back(end + 5), end);
            fill(&mut table, &more);
            fill(&mut other, &sizes[..kept]);
            fill(&mut other, &more);
            prop_assert_eq!(table.iter().collect::<Vec<_>>(), other.iter().collect::<Vec<_>>());
            prop_assert_eq!((&table.anchors, &table.huge, table.blocks.len()), (&other.anchors, &other.huge, other.blocks.len()));
        }
    }
}
