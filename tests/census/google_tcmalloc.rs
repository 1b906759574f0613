//! Google's tcmalloc against its own properties (`MallocExtension::GetProperties`), and against the program's list of blocks.
//!
//! No distribution has it: `make google-tcmalloc-test` builds it and names the files in `FRAGPROF_TEST_GOOGLE_TCMALLOC`, libraries to preload
//! and programs that have it linked in. Without the variable there is nothing to test here.

use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::census::{HeapAccount, Level, Memory, Taken};
use serde_json::Value;

use super::target::{Target, build};

/// Where a process has its caches: with the variable's value, it registers restartable sequences itself, and has slabs for its CPUs.
const PLACES: [(&str, &str); 2] = [("caches of threads", ""), ("slabs of CPUs", "glibc.pthread.rseq=0")];

fn files() -> Vec<PathBuf> {
    let all: Vec<PathBuf> = std::env::var_os("FRAGPROF_TEST_GOOGLE_TCMALLOC").iter().flat_map(std::env::split_paths).collect();
    if all.is_empty() {
        eprintln!("not tested: FRAGPROF_TEST_GOOGLE_TCMALLOC names no file (make google-tcmalloc-test builds some)");
    }
    assert!(all.iter().all(|path| path.exists()), "{all:?}");
    // An archive is for the tests of recordings.
    all.into_iter().filter(|path| path.extension().is_none_or(|end| end != "a")).collect()
}

fn is_library(file: &Path) -> bool {
    file.extension().is_some_and(|end| end == "so")
}

fn start(file: &Path, tunables: &str) -> Target {
    let mut command = if is_library(file) {
        let mut command = Command::new(build("google_tcmalloc.c", "cc", &["-lpthread", "-ldl"]));
        command.env("LD_PRELOAD", file);
        command
    } else {
        Command::new(file)
    };
    Target::start_on_small_pages(command.env("GLIBC_TUNABLES", tunables))
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap_or_else(|| panic!("{key} in {account}"))
}

fn index(taken: &Taken) -> usize {
    let index = taken.census.heaps.iter().position(|heap| heap.allocator.name() == "google_tcmalloc");
    index.unwrap_or_else(|| panic!("no google_tcmalloc: {:?} {:?}", taken.census.heaps, taken.census.layout_unknown))
}

fn heap(taken: &Taken) -> &HeapAccount {
    &taken.census.heaps[index(taken)]
}

/// Blocks that the program holds and that are not live in the census.
fn missed(target: &Target, own: &Value, taken: &Taken) -> (usize, usize) {
    let mut bytes = vec![0u8; number(own, "count") as usize * 8];
    assert_eq!(target.memory().read(number(own, "slots"), &mut bytes), bytes.len());
    let held = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).filter(|&addr| addr != 0);
    let chunks = &taken.heaps[index(taken)].chunks;
    held.fold((0, 0), |(all, missed), addr| (all + 1, missed + usize::from(chunks.is_live(addr) != Some(true))))
}

/// The census of a program at rest, to the byte.
#[test]
fn a_heap_of_googles_tcmalloc_is_counted_as_it_counts_itself() {
    for file in files() {
        for (place, tunables) in PLACES {
            for scenario in ["alone", "threads"] {
                let mut target = start(&file, tunables);
                target.tell("unsampled");
                target.tell(scenario);
                for step in ["again", "peak", "release"] {
                    let own = target.tell(step);
                    let taken = target.census(Level::Full);
                    let heap = heap(&taken);
                    let what = format!("{} {place} {scenario} {step}: {own} {heap:?} {:?}", file.display(), taken.census.walk);
                    let own_sum = |keys: &[&str]| keys.iter().map(|key| number(&own, key)).sum::<u64>();
                    assert_eq!(heap.ladder.live_bytes, Some(number(&own, "live_bytes")), "{what}");
                    let cached = own_sum(&["cpu_free", "thread_free", "transfer_free", "sharded_free"]);
                    assert_eq!(heap.details.cached_bytes, Some(cached), "{what}");
                    let has_slabs = number(&own, "cpu_free") > 0;
                    assert_eq!(has_slabs, !tunables.is_empty(), "{what}");
                    assert_eq!(heap.ladder.extent_bytes, own_sum(&["heap_bytes", "unmapped_bytes"]), "{what}");
                    let free = own_sum(&["central_free", "page_heap_free", "unmapped_bytes"]);
                    assert_eq!(heap.free_bytes.unwrap() + heap.overhead_bytes, free, "{what}");
                    assert_eq!((heap.off_balance_bytes(), heap.ladder.unknown_bytes), (Some(0), Some(0)), "{what}");
                    assert!(taken.census.walk.usable, "{what}");
                    assert_eq!(taken.census.walk.broken_lists + taken.census.walk.broken_headers, 0, "{what}");
                    assert!(taken.census.layout_unknown.is_empty(), "{what}: {:?}", taken.census.layout_unknown);
                    // The C library has blocks too, few.
                    let held = number(&own, "held_blocks");
                    assert!((held..held + 64).contains(&heap.live_allocations.unwrap()), "{what}");
                    assert_eq!(missed(&target, &own, &taken), (held as usize, 0), "{what}");
                    let sampled = target.census(Level::Sampled);
                    assert_eq!(self::heap(&sampled).live_bytes_est, heap.ladder.live_bytes, "{what}");
                    assert_eq!(self::heap(&target.census(Level::Top)).ladder.extent_bytes, heap.ladder.extent_bytes, "{what}");
                    println!(
                        "{}, {place}, {scenario}, {step}: {}, live {:?} in {:?}, cached {cached}",
                        file.display(),
                        heap.layout,
                        heap.ladder.live_bytes.unwrap(),
                        heap.live_allocations.unwrap(),
                    );
                }
            }
        }
    }
}

/// With its sampler on, as it is by default, a sampled block takes pages of its own; until 2026-07 the sampler holds another one beside it.
#[test]
fn blocks_that_googles_tcmalloc_sampled_count_once() {
    for file in files() {
        for (place, tunables) in PLACES {
            let mut target = start(&file, tunables);
            let own = target.tell("threads");
            let taken = target.census(Level::Full);
            let heap = heap(&taken);
            let what = format!("{} {place}: {own} {heap:?}", file.display());
            let held = number(&own, "held_blocks");
            assert_eq!(missed(&target, &own, &taken), (held as usize, 0), "{what}");
            assert!((held..held + 64).contains(&heap.live_allocations.unwrap()), "{what}");
            let proxies = number(&own, "live_bytes") - heap.ladder.live_bytes.unwrap();
            println!("{} {place}: {proxies} bytes held by the sampler", file.display());
            assert!(proxies < number(&own, "live_bytes") / 50, "{proxies}: {what}");
            assert!(taken.census.walk.usable, "{what}");
        }
    }
}

/// Three threads allocate and free as fast as they can.
#[test]
fn a_busy_heap_of_googles_tcmalloc_is_counted_within_its_unknown_bytes() {
    for library in files().into_iter().filter(|file| is_library(file)) {
        for (place, tunables) in PLACES {
            let mut command = Command::new(build("busy.c", "cc", &["-lpthread", "-DHEADER_BYTES=0"]));
            let mut target = Target::start(command.env("LD_PRELOAD", &library).env("GLIBC_TUNABLES", tunables));
            let own = target.tell("start");
            let pinned: Vec<u64> = own["pinned"].as_array().unwrap().iter().map(|addr| addr.as_u64().unwrap()).collect();
            let (mut errors, mut unknown, mut live) = (Vec::new(), 0.0, 0.0);
            for _ in 0..8 {
                let before = target.tell("count")["live_bytes"].as_f64().unwrap();
                let taken = target.census(Level::Full);
                let after = target.tell("count")["live_bytes"].as_f64().unwrap();
                let ladder = &heap(&taken).ladder;
                let missed = pinned.iter().filter(|&&addr| taken.heaps[index(&taken)].chunks.is_live(addr) == Some(false)).count();
                assert_eq!(missed, 0, "{} {place}: {:?}", library.display(), taken.census.walk);
                let (least, most) =
                    (ladder.live_bytes.unwrap() as f64, (ladder.live_bytes.unwrap() + ladder.unknown_bytes.unwrap()) as f64);
                let truth = (before + after) / 2.0;
                let off = if least > truth { least - truth } else { (most - truth).min(0.0) };
                errors.push(off / truth);
                (unknown, live) = (unknown + most - least, live + truth);
            }
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            println!("{} {place}: errors {errors:.4?}, mean {mean:.4}, unknown {:.4} of live", library.display(), unknown / live);
            // The heap changes while it is walked.
            assert!(mean.abs() < 0.02 && errors.iter().all(|error| error.abs() < 0.06), "{} {place}: {errors:?}", library.display());
            assert!(unknown < live / 20.0, "{} {place}: {unknown} of {live}", library.display());
        }
    }
}

/// The readers of both allocators called tcmalloc refuse each other's heap.
#[test]
fn the_two_tcmallocs_are_told_apart() {
    for file in files() {
        let mut target = start(&file, "");
        target.tell("alone");
        let found: Vec<&str> = target.census(Level::Full).census.heaps.iter().map(|heap| heap.allocator.name()).collect();
        assert_eq!(found, ["google_tcmalloc"], "{}", file.display());
    }
}
