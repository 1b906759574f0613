//! Programs that forge pointers: bounded time and memory, no panic.

use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::census::{Fixture, LayoutCache, LiveMemory, Memory, Pace};
use fragprof::process::Process;
use fragprof::retention::leaks::Leaks;
use fragprof::retention::owners::{By, Wanted, survey};
use fragprof::retention::scans::{Plan, scan};
use fragprof::units::Pid;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::command::Waiting;
use super::target::build;

/// The memory of a program with virtual tables, and the ranges of its heap and of its library's data.
fn recorded() -> (Fixture, Vec<std::ops::Range<u64>>) {
    let target = Waiting::start(Command::new(build("g++", "types.cpp", &["-s"], "types")));
    let memory = LiveMemory::open(Process::open(Pid(target.pid().parse().unwrap())).unwrap()).unwrap();
    let fixture = Fixture::record(&memory).unwrap();
    let is_heap = |mapping: &&fragprof::process::Mapping| mapping.permissions.write && mapping.inode == 0;
    let ranges = memory.maps().unwrap().mappings.iter().filter(is_heap).map(|mapping| mapping.start.0..mapping.end.0).collect();
    (fixture, ranges)
}

/// Makes every report of it, whatever the memory holds.
fn scan_and_report(fixture: &Fixture) {
    let began = Instant::now();
    if let Ok(seen) = scan(fixture, (1, "x"), Plan::default(), None, &mut LayoutCache::default()) {
        let leaks = Leaks::of(fixture, 1, "x", &seen, true).unwrap();
        let reported: u64 = leaks.groups.iter().map(|group| group.blocks + group.held_blocks).sum();
        assert_eq!(reported, leaks.unreached_blocks, "each block is reported once");
        assert!(leaks.unreached_bytes <= leaks.live_bytes);
    }
    for by in [By::Live, By::Pinned, By::Blocked] {
        if let Ok(owners) = survey(fixture, (1, "x"), Pace::default(), by, &Wanted::default(), None) {
            assert!(owners.owners.iter().all(|owner| owner.retained_bytes <= owners.live_bytes));
        }
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn memory_with_any_words_overwritten_is_scanned_without_harm() {
    let (fixture, ranges) = recorded();
    let place = |index: prop::sample::Index, within: prop::sample::Index| {
        let range = &ranges[index.index(ranges.len())];
        range.start + within.index((range.end - range.start) as usize / 8) as u64 * 8
    };
    let any_place = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
    let word =
        prop_oneof![any_place.clone().prop_map(|(index, within)| (Some((index, within)), 0)), any::<u64>().prop_map(|word| (None, word))];
    let damage = proptest::collection::vec((any_place, word), 1..400);
    let mut runner = TestRunner::new(ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() });
    let run = |words: Vec<_>| {
        let mut damaged = fixture.clone();
        for ((index, within), (to, word)) in words {
            let word = Option::map_or(to, word, |(index, within)| place(index, within));
            damaged.write_word(place(index, within), word);
        }
        scan_and_report(&damaged);
        Ok(())
    };
    runner.run(&damage, run).unwrap();
}

#[test]
fn a_heap_that_needs_more_memory_than_the_limit_is_refused_with_the_amount() {
    let (fixture, _) = recorded();
    let plan = Plan { memory_max_bytes: 1 << 10, ..Plan::default() };
    let refused = scan(&fixture, (1, "x"), plan, None, &mut LayoutCache::default()).unwrap_err().to_string();
    assert!(refused.contains("of memory in fragprof, and the limit is 1.00 KiB"), "{refused}");
    let wanted = Wanted { memory_max_bytes: Some(1 << 10), ..Wanted::default() };
    let refused = survey(&fixture, (1, "x"), Pace::default(), By::Live, &wanted, None).unwrap_err().to_string();
    assert!(refused.contains("--memory-max"), "{refused}");
}

#[test]
fn a_heap_of_nothing_but_pointers_to_itself_is_scanned_in_bounded_time_and_memory() {
    let mut command = Command::new(build("cc", "owners.c", &[], "owners"));
    command.stdin(std::process::Stdio::null());
    let target = Waiting::start(command);
    let memory = LiveMemory::open(Process::open(Pid(target.pid().parse().unwrap())).unwrap()).unwrap();
    let mut fixture = Fixture::record(&memory).unwrap();
    let seen = scan(&memory, (1, "x"), Plan { looks: 0, ..Plan::default() }, None, &mut LayoutCache::default()).unwrap();
    let blocks: Vec<(u64, u64)> =
        seen.taken.heaps.iter().flat_map(|heap| heap.chunks.live_blocks()).map(|block| (block.addr, block.usable_bytes)).collect();
    let mut state = 88_172_645_463_325_252u64;
    for &(addr, bytes) in &blocks {
        for word in 0..bytes / 8 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let (to, room) = blocks[state as usize % blocks.len()];
            fixture.write_word(addr + word * 8, to + state % room);
        }
    }
    scan_and_report(&fixture);
}
