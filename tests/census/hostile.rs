//! Processes that forge an allocator's metadata: bounded time and memory, no panic, marked unusable or balanced.

use std::ops::Range;
use std::time::{Duration, Instant};

use fragprof::census::objects::{anonymous_ranges, joined, without};
use fragprof::census::{Fixture, HeapAccount, LayoutCache, Level, Memory, Options, Pace, Taken, take};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::target::{Target, build};

const OPTIONS: Options = Options {
    level: Level::Full,
    pace: Pace {
        window_bytes: 256 << 10,
        pause_per_mib: Duration::ZERO,
        duration_max: Duration::from_secs(5),
        sample_windows: 400,
        threads: 1,
    },
    with_not_malloc: false,
};

fn census(memory: &dyn Memory) -> Taken {
    let started = Instant::now();
    let taken = take(memory, 1, "x", OPTIONS, &mut LayoutCache::default()).unwrap();
    assert!(started.elapsed() < Duration::from_secs(30), "{:?}", started.elapsed());
    for heap in &taken.census.heaps {
        assert_adds_up(heap, taken.census.walk.usable);
    }
    taken
}

/// Whatever the bytes were: a census that is marked usable adds up.
fn assert_adds_up(heap: &HeapAccount, usable: bool) {
    let parts = [heap.ladder.live_bytes, heap.details.cached_bytes, heap.free_bytes].iter().flatten().sum::<u64>();
    let sum = parts + heap.top_bytes + heap.overhead_bytes + heap.ladder.unknown_bytes.unwrap();
    assert!(!usable || sum == heap.ladder.extent_bytes, "{sum}: {heap:?}");
}

fn small_heap() -> Fixture {
    let mut target = Target::start(&mut std::process::Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"])));
    target.tell("foreign");
    Fixture::record(&target.memory()).unwrap()
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() })
}

/// Takes a census of copies in which words are overwritten: (address, word).
fn look_at_damaged(fixture: &Fixture, cases: u32, damage: impl Strategy<Value = Vec<(u64, u64)>>) {
    let look = |words: Vec<(u64, u64)>| {
        let mut damaged = fixture.clone();
        words.into_iter().for_each(|(addr, word)| damaged.write_word(addr, word));
        census(&damaged);
        Ok(())
    };
    runner(cases).run(&damage, look).unwrap();
}

#[test]
fn a_recording_gives_the_same_figures_as_the_process() {
    let mut target = Target::start(&mut std::process::Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"])));
    target.tell("fastbins");
    let live = target.census(Level::Full).census.heaps[0].clone();
    let recorded = census(&Fixture::record(&target.memory()).unwrap()).census.heaps[0].clone();
    assert_eq!(
        (live.ladder.live_bytes, live.details.cached_bytes, live.free_bytes),
        (recorded.ladder.live_bytes, recorded.details.cached_bytes, recorded.free_bytes)
    );
}

#[test]
fn damaged_heaps_are_walked_in_bounded_time_and_add_up_or_are_unusable() {
    let fixture = small_heap();
    let heap = fixture.maps.mappings.iter().find(|m| format!("{:?}", m.backing).contains("[heap]")).unwrap().clone();
    let arena = census(&fixture).census.heaps[0].arenas[0].address;
    let value =
        prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>(), (1u64..4096).prop_map(|n| n * 16 + 1), Just(arena), Just(heap.start.0 + 16)];
    let place = prop_oneof![
        // Anywhere in the heap, in the arena's bins and lists, and in its tail (next, system_mem).
        (0..heap.len() / 8).prop_map(move |n| heap.start.0 + 8 * n),
        (0u64..280).prop_map(move |n| arena + 8 * n),
        (255u64..275).prop_map(move |n| arena + 8 * n),
    ];
    look_at_damaged(&fixture, 48, proptest::collection::vec((place, value), 1..40));
}

/// jemalloc's and tcmalloc's page maps, records and own memory, with words of them overwritten.
#[test]
fn damaged_page_maps_are_read_in_bounded_time_and_add_up_or_are_unusable() {
    for library in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4"] {
        let mut command = std::process::Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]));
        let mut target = Target::start(command.env("LD_PRELOAD", format!("/usr/lib/x86_64-linux-gnu/{library}")));
        target.tell("foreign");
        let fixture = Fixture::record(&target.memory()).unwrap();
        let sound = census(&fixture);
        // Memory other than the program's blocks: the allocator's own, and some stacks.
        let mut blocks: Vec<Range<u64>> =
            sound.heaps[0].extents.iter().filter(|(arena, _)| *arena != 4095).map(|(_, range)| range.clone()).collect();
        blocks.sort_unstable_by_key(|range| range.start);
        let own = without(&joined(&anonymous_ranges(&fixture.maps)), &joined(&blocks));
        let mut words: Vec<(u64, u64)> = Vec::new();
        for range in own {
            for run in fixture.page_runs(range.clone()).unwrap().within(range) {
                words.extend((run.start..run.end).step_by(8).filter_map(|at| Some((at, (&fixture as &dyn Memory).word(at)?))));
            }
        }
        words.retain(|&(_, word)| word != 0);
        assert!(words.len() > 1000, "{library}: {} words", words.len());
        let place = (0..words.len()).prop_map({
            let words = words.clone();
            move |index| words[index].0
        });
        let other = (0..words.len()).prop_map(move |index| words[index].1);
        let value = prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>(), other];
        look_at_damaged(&fixture, 24, proptest::collection::vec((place, value), 1..60));
    }
}

#[test]
fn rings_and_cycles_of_forged_lists_end() {
    let fixture = small_heap();
    let heap = census(&fixture);
    let arena = heap.census.heaps[0].arenas[0].address;
    let first = heap.heaps[0].chunks.regions()[0].start;
    let mut forged = fixture.clone();
    // Every fastbin leads into a chunk whose link leads to itself.
    for bin in 0..10 {
        forged.write_word(arena + 16 + 8 * bin, first);
    }
    forged.write_word(first + 16, first ^ ((first + 16) >> 12));
    census(&forged);
    // An arena ring of one more arena, which is the main one shifted into the heap and leads to itself.
    let mut ring = fixture.clone();
    let other = (first + 0x1000) & !0xfff;
    ring.write_word(arena + 112 + 2048, other + 0x20);
    for word in 0..300 {
        ring.write_word(other + 0x20 + 8 * word, other + 0x20);
    }
    census(&ring);
    // Top as large as the address space.
    let mut large = fixture;
    let mut top = [0u8; 8];
    large.read(arena + 96, &mut top);
    large.write_word(u64::from_le_bytes(top) + 8, (1 << 46) + 1);
    census(&large);
}

#[test]
fn random_data_holds_no_heap_and_makes_nothing_panic() {
    let maps = fragprof::process::Maps::parse(
        b"55d000000000-55d000001000 r--p 00000000 08:01 5 /bin/x\n55d000001000-55d000003000 rw-p 00001000 08:01 5 /bin/x\n\
          55d000003000-55d000303000 rw-p 00000000 00:00 0\n55d000400000-55d000480000 rw-p 00000000 00:00 0 [heap]\n",
    );
    let pointer = (0u64..0x48_0000).prop_map(|n| 0x55d0_0000_0000 + (n & !7));
    let word = prop_oneof![pointer, any::<u64>(), Just(0)];
    runner(24)
        .run(&proptest::collection::vec(word, 512), |words| {
            let mut fixture = Fixture::with_maps(maps.clone());
            for (index, word) in words.iter().cycle().take(16 * 512).enumerate() {
                fixture.write_word(0x55d0_0000_1000 + 8 * index as u64, *word);
                fixture.write_word(0x55d0_0040_0000 + 8 * index as u64, word.rotate_left(1));
            }
            census(&fixture);
            Ok(())
        })
        .unwrap();
}
