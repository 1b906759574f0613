//! What a trace contains, from one pass over it: how much room a replay needs, and what it is compared with. Pure, apart from the stream.

use std::collections::{HashMap, HashSet};
use std::io::Read;

use super::load::Load;
use crate::trace::event::Op;
use crate::trace::read::Item;
use crate::trace::{Account, End, Event, Header, LargeBlocks, Names, Reader, Seed, SeedChunk, SeedRegion, TraceError, Usage};

/// Live blocks at a time at most: a replay's tables have 32 bytes for each.
const BLOCKS_MAX: u64 = 1 << 28;
/// The process's memory changed by less than this during a steady census.
const STEADY_SHARE: f64 = 0.02;
/// Time before and after a census that counts too.
const STEADY_AROUND_NS: u64 = 5_000_000;
/// Chunks of the heap from before the recording at most, 32 bytes each.
const SEED_CHUNKS_MAX: u64 = 1 << 25;
/// Stacks with large blocks at most.
const LARGE_STACKS_MAX: usize = 1 << 16;
/// Accounts that are kept at most; a recording writes some dozens.
const ACCOUNTS_MAX: usize = 4096;

/// A trace's contents. If the process replaced its image, of the last image alone.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// What was recorded.
    pub header: Header,
    /// The end; `None` if the trace was cut.
    pub end: Option<End>,
    /// Accounts of the heap, by time.
    pub accounts: Vec<Account>,
    /// Large live blocks of all accounts together, by stack.
    pub large: HashMap<u32, LargeBlocks>,
    /// Anonymous memory over time.
    pub usage: Usage,
    /// Frames of the stacks.
    pub names: Names,
    /// The heap from before the recording.
    pub seed: Seed,
    /// Its chunks, also those that are not kept because there are too many.
    pub seed_chunks: u64,
    /// How often the process replaced its image: a replay begins after the last time.
    pub images: u64,
    /// When it began and ended, nanoseconds on the clock of the events.
    pub began_ns: u64,
    /// Likewise.
    pub ended_ns: u64,
    /// Events.
    pub events: u64,
    /// Allocations, with those of reallocs.
    pub allocations: u64,
    /// Largest number of live blocks at a time.
    pub blocks_max: u64,
    /// Threads.
    pub threads: u64,
    /// Largest number of them at a time.
    pub threads_max: u64,
    /// Records that were lost.
    pub lost: u64,
    /// Frees of blocks whose allocation is not in the trace.
    pub unknown_frees: u64,
    /// Most private anonymous memory that the program had mapped by itself, which is not replayed.
    pub mapped_bytes_max: u64,
    /// Events over time.
    pub load: Load,
}

/// Largest piece in which a free chunk is made, with its header: allocators give larger ones mappings of their own.
const PIECE_BYTES: u64 = 64 << 10;
/// Header of a block, in glibc.
const HEADER_BYTES: u64 = 8;
/// Smallest block, in glibc.
const SMALLEST_BYTES: u64 = 24;

/// The blocks that are made for a chunk of the seed, in bytes: one for a block in use, pieces that coalesce when they are freed for a free
/// chunk.
pub fn pieces(chunk: &SeedChunk) -> impl Iterator<Item = u64> + use<> {
    let (mut rest, is_free) = (chunk.usable_bytes, chunk.free.is_some());
    std::iter::from_fn(move || {
        let piece = if is_free && rest >= PIECE_BYTES + SMALLEST_BYTES { PIECE_BYTES - HEADER_BYTES } else { rest };
        rest = rest.saturating_sub(piece + HEADER_BYTES);
        (piece > 0).then_some(piece)
    })
}

/// Number of these blocks.
fn piece_count(chunk: &SeedChunk) -> u64 {
    let more = if chunk.free.is_some() { chunk.usable_bytes.saturating_sub(SMALLEST_BYTES) / PIECE_BYTES } else { 0 };
    u64::from(chunk.usable_bytes > 0) + more
}

/// Counts that change with each event.
#[derive(Default)]
struct Now {
    live: u64,
    threads: HashSet<u32>,
    /// Bytes of the program's own mappings by address.
    mapped: HashMap<u64, u64>,
    mapped_bytes: u64,
}

impl Survey {
    /// Reads a trace.
    ///
    /// # Errors
    /// If it is not one, or is damaged.
    pub fn of(input: impl Read) -> Result<Self, TraceError> {
        let mut reader = Reader::new(input)?;
        let mut all = Self { header: reader.header().clone(), ..Self::default() };
        all.began_ns = all.header.start_ns;
        all.load = Load::from(all.began_ns);
        let mut now = Now::default();
        while let Some(item) = reader.next_item()? {
            match item {
                Item::Event(event) => all.add(event, &mut now),
                Item::Account(account) => all.add_account(account),
                Item::Usage(usage) => all.usage = usage,
                Item::Names(names) => all.names = names,
                Item::Seed(regions) => all.add_seed(regions),
                Item::End(end) => all.end = Some(end),
            }
        }
        if let Some(end) = &all.end {
            all.ended_ns = all.ended_ns.max(all.header.start_ns.saturating_add(end.duration_ns));
        }
        // Events begin after the process replaced its image, if it did.
        if all.images > 0 {
            (all.seed, all.seed_chunks) = (Seed::default(), 0);
        }
        all.blocks_max = all.seed.chunks().map(piece_count).fold(all.blocks_max, u64::saturating_add);
        let (began, ended) = (all.began_ns, all.ended_ns);
        all.accounts.retain(|account| (began..=ended).contains(&account.time_ns));
        all.accounts.sort_by_key(|account| account.time_ns);
        all.usage.samples.retain(|sample| (began..=ended).contains(&sample.0));
        all.usage.samples.sort_unstable();
        Ok(all)
    }

    fn add_account(&mut self, mut account: Account) {
        if self.accounts.len() == ACCOUNTS_MAX {
            return;
        }
        for one in std::mem::take(&mut account.large) {
            if self.large.len() < LARGE_STACKS_MAX || self.large.contains_key(&one.stack) {
                let sum = self.large.entry(one.stack).or_default();
                sum.bytes = sum.bytes.saturating_add(one.bytes);
                sum.resident_bytes = sum.resident_bytes.saturating_add(one.resident_bytes.min(one.bytes));
            }
        }
        self.accounts.push(account);
    }

    /// By stack, the share of its large blocks that the recorded program had touched when a census was taken. Stacks without such blocks are
    /// not there.
    #[must_use]
    pub fn touched(&self) -> HashMap<u32, f64> {
        let known = self.large.iter().filter(|(_, sum)| sum.bytes > 0);
        known.map(|(&stack, sum)| (stack, sum.resident_bytes as f64 / sum.bytes as f64)).collect()
    }

    /// Keeps a part of the seed, unless there is too much of it: then the trace is refused.
    fn add_seed(&mut self, regions: Vec<SeedRegion>) {
        self.seed_chunks = self.seed_chunks.saturating_add(regions.iter().map(|region| region.chunks.len() as u64).sum());
        if self.seed_chunks <= SEED_CHUNKS_MAX {
            self.seed.regions.extend(regions);
        }
    }

    fn add(&mut self, event: Event, now: &mut Now) {
        if event.op == Op::Exec {
            let Self { header, images, .. } = std::mem::take(self);
            *self = Self { header, images: images + 1, began_ns: event.time_ns, ended_ns: event.time_ns, ..Self::default() };
            self.load = Load::from(event.time_ns);
            *now = Now::default();
            return;
        }
        self.events += 1;
        self.ended_ns = event.time_ns;
        if self.events == 1 && self.images == 0 && self.header.is_from_start {
            // The recorder began before its command did.
            self.began_ns = event.time_ns;
            self.load = Load::from(event.time_ns);
        }
        self.load.add(event.time_ns);
        match event.op {
            Op::ThreadEnd => {
                now.threads.remove(&event.thread);
            }
            _ if now.threads.insert(event.thread) => {
                self.threads += 1;
                self.threads_max = self.threads_max.max(now.threads.len() as u64);
            }
            _ => {}
        }
        match event.op {
            Op::Alloc(_) => {
                self.allocations += 1;
                now.live += 1;
                self.blocks_max = self.blocks_max.max(now.live);
            }
            Op::Free { .. } | Op::ReallocFree { .. } => now.live = now.live.saturating_sub(1),
            Op::ReallocFail { .. } => now.live += 1,
            Op::FreeUnknown { .. } | Op::ReallocFreeUnknown { .. } => self.unknown_frees += 1,
            Op::Lost { records } => self.lost = self.lost.saturating_add(records),
            Op::Map { addr, bytes, is_writable: true } => {
                if let Some(before) = now.mapped.insert(addr, bytes) {
                    now.mapped_bytes = now.mapped_bytes.saturating_sub(before);
                }
                now.mapped_bytes = now.mapped_bytes.saturating_add(bytes);
                self.mapped_bytes_max = self.mapped_bytes_max.max(now.mapped_bytes);
            }
            Op::Unmap { addr, .. } => {
                if let Some(bytes) = now.mapped.remove(&addr) {
                    now.mapped_bytes = now.mapped_bytes.saturating_sub(bytes);
                }
            }
            _ => {}
        }
    }

    /// The accounts during which the process's memory hardly changed: a census of a heap that changes sees part of it before, part after.
    pub fn steady_accounts(&self) -> impl Iterator<Item = &Account> {
        self.accounts.iter().filter(|account| {
            let half = account.took_ns / 2 + STEADY_AROUND_NS;
            let (from, to) = (account.time_ns.saturating_sub(half), account.time_ns.saturating_add(half));
            let samples = &self.usage.samples;
            // With the last sample before, and the first after.
            let first = samples.partition_point(|sample| sample.0 < from).saturating_sub(1);
            let end = (samples.partition_point(|sample| sample.0 <= to) + 1).min(samples.len());
            let near = samples.get(first..end).unwrap_or_default().iter().map(|sample| sample.1);
            let (Some(low), Some(high)) = (near.clone().min(), near.max()) else { return true };
            (high - low) as f64 <= high as f64 * STEADY_SHARE
        })
    }

    /// Duration in nanoseconds.
    #[must_use]
    pub fn duration_ns(&self) -> u64 {
        self.ended_ns.saturating_sub(self.began_ns)
    }

    /// Whether several threads made the calls, or this is not known.
    #[must_use]
    pub fn has_several_threads(&self) -> bool {
        self.threads > 1 || !self.header.has_threads()
    }

    /// Whether it has all events of the program, from its start to its end.
    #[must_use]
    pub fn is_whole_run(&self) -> bool {
        self.header.is_from_start && self.end.as_ref().is_some_and(|end| end.has_exited && end.cut_short.is_empty())
    }

    /// Why it cannot be replayed.
    ///
    /// # Errors
    /// The reason, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.allocations == 0 {
            return Err("it has no allocation".to_owned());
        }
        if self.seed_chunks > SEED_CHUNKS_MAX {
            return Err(format!(
                "its heap from before the recording has {} chunks, and a replay begins with {SEED_CHUNKS_MAX} at most",
                self.seed_chunks
            ));
        }
        if self.blocks_max > BLOCKS_MAX {
            return Err(format!("it has {} live blocks at a time, and a replay {BLOCKS_MAX} at most", self.blocks_max));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_a_stacks_large_blocks_that_was_touched_is_over_all_accounts_and_never_above_one() {
        let mut survey = Survey::default();
        let of = |stack, bytes, resident_bytes| LargeBlocks { stack, bytes, resident_bytes };
        for large in [vec![of(7, 100, 50), of(8, 0, 0)], vec![of(7, 300, 50), of(9, u64::MAX, u64::MAX)], vec![of(9, 10, 20)]] {
            survey.add_account(Account { large, ..Account::default() });
        }
        let touched = survey.touched();
        assert_eq!((touched.len(), touched[&7], touched[&9]), (2, 0.25, 1.0));
    }

    #[test]
    fn a_free_chunk_is_made_in_pieces_whose_chunks_fill_it() {
        for usable_bytes in [1, 24, 40, 65_528, 65_536, 65_559, 65_560, 65_561, 131_096, 1_000_008] {
            let chunk = SeedChunk { addr: 0, usable_bytes, free: Some(0) };
            let made: Vec<u64> = pieces(&chunk).collect();
            assert_eq!(made.iter().map(|piece| piece + HEADER_BYTES).sum::<u64>(), usable_bytes + HEADER_BYTES);
            assert_eq!(made.len() as u64, piece_count(&chunk), "{usable_bytes}");
            assert_eq!(pieces(&SeedChunk { free: None, ..chunk }).collect::<Vec<_>>(), [usable_bytes]);
        }
        assert_eq!(piece_count(&SeedChunk { addr: 0, usable_bytes: 0, free: None }), 0);
        assert!(piece_count(&SeedChunk { addr: 0, usable_bytes: u64::MAX, free: Some(0) }) > BLOCKS_MAX);
    }
}
