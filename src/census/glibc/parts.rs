//! A long region walked by several threads. It is cut into parts: every n-th is walked from where the parts before have led to, as a walk
//! by one thread does; other threads meanwhile walk the ones between, each from the first boundary that it finds by trial. The first
//! thread then arrives at such a part and takes over what was found there.
//!
//! A boundary found by trial may be a wrong one. But a chain of headers depends on nothing but where it is entered: when the first thread
//! is at an address at which a chunk begins in the other's table, everything from there on is what it would have found itself. Until then
//! it goes on by itself, window by window. What another thread could not follow is left to it too.

use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;

use super::parse::{Bounds, Snapshot};
use super::walk::{RegionPlan, RegionWalk};
use super::walker::Walker;

/// Bytes of a part: with the window that goes beyond it, one query of its pages.
const PART_BYTES: u64 = 15 << 20;

/// A part that was walked ahead.
struct Part<'a> {
    walker: Walker<'a>,
    /// Where its walk ended; its start, if no boundary was found.
    end: u64,
    /// Bounds of the region as it saw them last.
    bounds: Bounds,
}

/// How a region is cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    start: u64,
    /// Bytes of a part; the last one goes on to the region's end.
    part_bytes: u64,
    /// Parts.
    count: u64,
    /// Threads for them, at least 1.
    pub(super) threads: usize,
}

impl Cut {
    /// The cut of a region for at most `threads_max` threads. A short one, or one in pieces, is walked by one.
    pub(super) fn of(plan: &RegionPlan, threads_max: usize) -> Self {
        Self::in_parts(plan, threads_max, PART_BYTES)
    }

    fn in_parts(plan: &RegionPlan, threads_max: usize, part_bytes: u64) -> Self {
        let count = plan.bounds.end.saturating_sub(plan.start) / part_bytes;
        let useful = if plan.bounds.goes_on_after_top { 1 } else { usize::try_from(count).unwrap_or(usize::MAX) };
        Self { start: plan.start, part_bytes, count, threads: threads_max.min(useful).max(1) }
    }

    fn start_of(&self, number: u64) -> u64 {
        self.start.saturating_add(number.saturating_mul(self.part_bytes))
    }

    /// Which of the other threads walks a part; `None`: the first thread does.
    fn other(&self, number: u64) -> Option<usize> {
        usize::try_from(number).ok().and_then(|number| (number % self.threads).checked_sub(1))
    }
}

/// Walks a region whose walk has not begun. Threads that the system refuses to start are done without.
pub(super) fn walk(mut walk: RegionWalk, walker: &mut Walker<'_>, cut: Cut) {
    let plan = walk.plan;
    thread::scope(|scope| {
        let others: Vec<Option<Receiver<Part<'_>>>> = (1..cut.threads)
            .map(|first| {
                // One part in the channel and one in work: the table of what was found ahead stays small.
                let (sender, receiver) = sync_channel(1);
                let own = walker.of_thread();
                let ahead = move || {
                    for number in (first as u64..cut.count).step_by(cut.threads) {
                        if sender.send(walk_ahead(own.of_thread(), &plan, &cut, number)).is_err() {
                            return;
                        }
                    }
                };
                thread::Builder::new().name("census".to_owned()).spawn_scoped(scope, ahead).ok().map(|_| receiver)
            })
            .collect();
        for number in 0..cut.count {
            let part = cut.other(number).and_then(|other| others.get(other)?.as_ref()?.recv().ok());
            if let Some(part) = part {
                walker.pacer.add(&part.walker.pacer);
                join(&mut walk, walker, &part);
            }
            walk.stop = cut.start_of(number + 1);
            walk.run(walker);
        }
        walk.stop = u64::MAX;
        walk.run(walker);
    });
}

/// Walks a part from the first boundary in it.
fn walk_ahead<'a>(mut walker: Walker<'a>, plan: &RegionPlan, cut: &Cut, number: u64) -> Part<'a> {
    let start = cut.start_of(number);
    let mut walk = RegionWalk::new(plan);
    (walk.stop, walk.is_ahead) = (cut.start_of(number + 1), true);
    let Some(first) = walk.search(&mut walker, &mut Snapshot::default(), start) else {
        return Part { walker, end: start, bounds: walk.bounds };
    };
    walk.begin_at(&mut walker, first);
    walk.run(&mut walker);
    Part { end: walker.table.end_of_current(), walker, bounds: walk.bounds }
}

/// Takes over a part as soon as the walk is at one of its boundaries.
fn join(walk: &mut RegionWalk, walker: &mut Walker<'_>, part: &Part<'_>) {
    while walk.is_before(part.end) {
        if walker.take_over(&part.walker, walk.at) {
            walk.go_on_at(part.end);
            if part.bounds != walk.plan.bounds {
                walk.bounds = part.bounds;
            }
            return;
        }
        walk.stop = walk.at + 1;
        walk.run(walker);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::census::Fixture;
    use crate::census::chunks::ChunkTable;
    use crate::census::glibc::layout::{Layout, PREV_INUSE};
    use crate::census::pace::{Pace, Pacer};
    use crate::census::quality::WalkQuality;

    const START: u64 = 0x5555_0000_0000;
    const PAGES: u64 = 48;

    /// A heap of chunks of these sizes, in units of 16 bytes, some of them free, up to a top. In chunks in use lies what looks like headers.
    /// Some pages are absent.
    fn heap(sizes: &[(u64, bool)], absent: &[u64]) -> (Fixture, RegionPlan) {
        let mut memory = Fixture::default();
        let mut write = |addr: u64, word: u64| {
            if !absent.contains(&((addr - START) / 4096)) {
                memory.write_word(addr, word);
            }
        };
        (0..PAGES).for_each(|page| write(START + page * 4096, 0));
        let end = START + PAGES * 4096;
        let (mut at, mut previous_free) = (START, None);
        for &(units, is_free) in sizes.iter().cycle() {
            let bytes = units * 16;
            if at + bytes + 64 > end {
                break;
            }
            let is_free = is_free && previous_free.is_none();
            write(at, previous_free.unwrap_or(0));
            write(at + 8, bytes | if previous_free.is_some() { 0 } else { PREV_INUSE });
            if is_free {
                write(at + 16, START + 64);
                write(at + 24, START + 64);
            } else {
                (at + 16..at + bytes).step_by(16).for_each(|decoy| write(decoy + 8, 0x31));
            }
            previous_free = is_free.then_some(bytes);
            at += bytes;
        }
        write(at, previous_free.unwrap_or(0));
        write(at + 8, (end - at) | if previous_free.is_some() { 0 } else { PREV_INUSE });
        let bounds = Bounds { end, top: Some(at), is_main: true, goes_on_after_top: false };
        (memory, RegionPlan { start: START, bounds, arena: 0, arena_addr: 0 })
    }

    fn walked(memory: &Fixture, plan: &RegionPlan, part_bytes: u64, threads: usize) -> (ChunkTable, WalkQuality) {
        let pace = Pace { window_bytes: 16 << 10, ..Pace::default() };
        let mut walker = Walker::new(memory, Layout::with_bins_at(0), Pacer::start(pace));
        walker.table.begin_region(plan.start, plan.arena);
        let cut = Cut::in_parts(plan, threads, part_bytes);
        if threads == 1 {
            RegionWalk::new(plan).run(&mut walker)
        } else {
            walk(RegionWalk::new(plan), &mut walker, cut)
        }
        (walker.table, walker.quality)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn several_threads_find_what_one_finds(
            sizes in prop::collection::vec((prop_oneof![4 => 2..40_u64, 1 => 40..2_000_u64], any::<bool>()), 1..80),
            part_pages in 1..12_u64, threads in 2..5_usize
        ) {
            let (memory, plan) = heap(&sizes, &[]);
            let (alone, quality) = walked(&memory, &plan, 1, 1);
            prop_assert_eq!(quality, WalkQuality::default());
            let (together, quality) = walked(&memory, &plan, part_pages * 4096, threads);
            prop_assert_eq!(quality, WalkQuality::default());
            prop_assert!(together.iter().eq(alone.iter()));
            prop_assert_eq!(together.end_of_current(), plan.bounds.end);
        }

        #[test]
        fn whatever_the_bytes_are_the_region_is_covered_once(
            sizes in prop::collection::vec((2..200_u64, any::<bool>()), 1..40),
            damage in prop::collection::vec((0..PAGES * 256, any::<u64>(), 0..4_u32), 0..200),
            absent in prop::collection::vec(0..PAGES, 0..40),
            part_pages in 1..12_u64, threads in 2..5_usize
        ) {
            let (mut memory, plan) = heap(&sizes, &absent);
            for (place, word, kind) in damage.into_iter().filter(|(place, ..)| !absent.contains(&(place / 256))) {
                let word = if kind == 0 { word } else { word % 4096 };
                memory.write_word(START + place * 16 + 8, word);
            }
            let started = std::time::Instant::now();
            let (table, quality) = walked(&memory, &plan, part_pages * 4096, threads);
            prop_assert_eq!(table.iter().map(|(_, chunk)| chunk.bytes).sum::<u64>(), PAGES * 4096, "{:?}", quality);
            prop_assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
        }
    }
}
