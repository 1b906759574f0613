//! mimalloc against what it visits itself (`mi_heap_visit_blocks`), and against the program's list of blocks.

use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::census::{HeapAccount, Level, Taken};
use serde_json::Value;

use super::target::{Target, build};
use crate::support::build::LIB_DIR;

/// Every library of the family that is read: the distribution's, and those in `FRAGPROF_TEST_MIMALLOC`, a list of files.
fn libraries() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::env::var_os("FRAGPROF_TEST_MIMALLOC").iter().flat_map(std::env::split_paths).collect();
    all.push(Path::new(LIB_DIR).join("libmimalloc.so.2"));
    assert!(all.iter().all(|path| path.exists()), "{all:?}: install libmimalloc2.0");
    all
}

fn start(library: &Path) -> Target {
    let mut command = Command::new(build("mimalloc.c", "cc", &["-lpthread", "-ldl"]));
    Target::start_on_small_pages(command.env("LD_PRELOAD", library))
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap_or_else(|| panic!("{key} in {account}"))
}

fn heap(taken: &Taken) -> &HeapAccount {
    let heap = taken.census.heaps.iter().find(|heap| heap.allocator.name() == "mimalloc");
    heap.unwrap_or_else(|| panic!("no mimalloc: {:?} {:?}", taken.census.heaps, taken.census.layout_unknown))
}

/// The census of a program at rest, to the byte: what the program holds, and what libc and the loader hold besides (which the difference of
/// mimalloc's own count and the program's gives, and which does not change).
#[test]
fn mimallocs_blocks_are_those_that_it_visits_itself() {
    for library in libraries() {
        for scenario in ["alone", "threads"] {
            let mut target = start(&library);
            let held = target.tell(scenario);
            let before = target.census(Level::Full);
            let visited = target.tell("visit");
            let after = target.census(Level::Full);
            let what = format!("{} {scenario}: {held} {visited}", library.display());
            for (taken, what) in [(&before, format!("{what}, before")), (&after, format!("{what}, after"))] {
                let heap = heap(taken);
                let what = format!("{what}: {heap:?}");
                let (blocks, bytes) = (heap.live_allocations.unwrap(), heap.ladder.live_bytes.unwrap());
                // 3.0 and 3.1 visit no full pages that have no thread: there the program's list is the only account.
                let is_complete = number(&visited, "is_complete") == 1;
                let visited = ["visited_blocks", "visited_bytes"].map(|key| number(&visited, key));
                assert!(visited == [blocks, bytes] || !is_complete, "{what}");
                let [held_blocks, held_bytes] = ["held_blocks", "held_bytes"].map(|key| number(&held, key));
                // Libc's own blocks are few.
                assert!((held_blocks..held_blocks + 64).contains(&blocks), "{what}");
                assert!((held_bytes..held_bytes + (64 << 10)).contains(&bytes), "{what}");
                assert_eq!((heap.off_balance_bytes(), heap.ladder.unknown_bytes), (Some(0), Some(0)), "{what}");
                assert!(taken.census.walk.usable && taken.census.layout_unknown.is_empty(), "{what}: {:?}", taken.census.layout_unknown);
                assert_eq!(taken.census.walk.broken_lists + taken.census.walk.broken_headers, 0, "{what}: {:?}", taken.census.walk);
            }
            let top = target.census(Level::Top);
            assert_eq!(self::heap(&top).ladder.extent_bytes, heap(&after).ladder.extent_bytes, "{what}");
            let sampled = target.census(Level::Sampled);
            assert_eq!(self::heap(&sampled).live_bytes_est, heap(&after).ladder.live_bytes, "{what}");
        }
    }
}

/// `mi_collect(true)` serves the thread that calls it, which here is the only one.
#[test]
fn what_mimalloc_gives_back_is_what_was_predicted() {
    for library in libraries() {
        // Nothing is given back before it is asked for.
        let mut command = Command::new(build("mimalloc.c", "cc", &["-lpthread", "-ldl"]));
        let delays = ["MIMALLOC_DECOMMIT_DELAY", "MIMALLOC_PURGE_DELAY", "MIMALLOC_RESET_DELAY"].map(|name| (name, "100000000"));
        let mut target = Target::start_on_small_pages(command.env("LD_PRELOAD", &library).envs(delays));
        target.tell("alone");
        target.tell("peak");
        let before = target.census(Level::Full);
        let Some(predicted) = heap(&before).ladder.trimmable_bytes else {
            assert!(heap(&before).layout.starts_with("mimalloc 3.2,"), "{:?}", heap(&before));
            continue;
        };
        let resident = target.anonymous_bytes();
        target.tell("collect");
        let fact = resident.saturating_sub(target.anonymous_bytes());
        let off = fact.abs_diff(predicted);
        // Until 2.1.2 only time returns memory of segments that a thread uses.
        let is_early = heap(&before).layout.contains("until 2.1.2");
        assert!(off <= (fact / 100).max(256 << 10), "{}: {predicted}, {fact}", library.display());
        assert_eq!(predicted > 4 << 20, !is_early, "{}: {predicted}", library.display());
    }
}

/// Three threads allocate and free as fast as they can. Pages that always contradict themselves are unknown, and no block is called free
/// that never was.
#[test]
fn a_busy_heap_is_counted_within_its_unknown_bytes() {
    for library in libraries() {
        let mut command = Command::new(build("busy.c", "cc", &["-lpthread", "-DHEADER_BYTES=0"]));
        let mut target = Target::start(command.env("LD_PRELOAD", &library));
        let own = target.tell("start");
        let pinned: Vec<u64> = own["pinned"].as_array().unwrap().iter().map(|addr| addr.as_u64().unwrap()).collect();
        let (mut errors, mut unknown, mut live) = (Vec::new(), 0.0, 0.0);
        for _ in 0..8 {
            let before = target.tell("count")["live_bytes"].as_f64().unwrap();
            let taken = target.census(Level::Full);
            let after = target.tell("count")["live_bytes"].as_f64().unwrap();
            let ladder = &heap(&taken).ladder;
            let missed = pinned.iter().filter(|&&addr| taken.heaps[0].chunks.is_live(addr) == Some(false)).count();
            assert_eq!(missed, 0, "{}: {:?}", library.display(), taken.census.walk);
            let (least, most) = (ladder.live_bytes.unwrap() as f64, (ladder.live_bytes.unwrap() + ladder.unknown_bytes.unwrap()) as f64);
            let truth = (before + after) / 2.0;
            let off = if least > truth { least - truth } else { (most - truth).min(0.0) };
            errors.push(off / truth);
            (unknown, live) = (unknown + most - least, live + truth);
        }
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!("{}: errors {errors:.4?}, mean {mean:.4}, unknown {:.4} of live", library.display(), unknown / live);
        // The heap changes while it is walked.
        assert!(mean.abs() < 0.02 && errors.iter().all(|error| error.abs() < 0.06), "{}: {errors:?}", library.display());
        assert!(unknown < live / 10.0, "{}: {unknown} of {live}", library.display());
    }
}

#[test]
fn every_block_that_a_program_holds_is_live_in_mimallocs_pages() {
    for scenario in ["mix", "holes16", "large", "mmapped"] {
        let mut command = Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]));
        let mut target = Target::start(command.env("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2"));
        let own = target.tell(scenario);
        let taken = target.census(Level::Full);
        let heap = heap(&taken);
        let live = heap.live_allocations.unwrap();
        assert!((number(&own, "live")..number(&own, "live") + 64).contains(&live), "{scenario}: {live}, {own}");
        assert!(taken.census.walk.usable, "{scenario}: {:?}", taken.census.walk);
        let index = taken.census.heaps.iter().position(|heap| heap.allocator.name() == "mimalloc").unwrap();
        let mut bytes = vec![0u8; 400_000 * 8];
        let memory = target.memory();
        assert_eq!(fragprof::census::Memory::read(&memory, number(&own, "slots"), &mut bytes), bytes.len());
        let held = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).filter(|&addr| addr != 0);
        let missed = held.filter(|&addr| taken.heaps[index].chunks.is_live(addr) != Some(true)).count();
        assert_eq!(missed, 0, "{scenario}");
    }
}
