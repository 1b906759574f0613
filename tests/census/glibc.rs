//! glibc's census against mallinfo2 of the target itself, at rest: every figure to the byte.

use std::process::Command;

use fragprof::census::{HeapAccount, Level};
use serde_json::Value;

use super::target::{Target, build};
use crate::support::process::wait_until;

fn heaps() -> Command {
    Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]))
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap()
}

/// mallinfo2 counts thread caches as in use, and tops and fastbins as free.
fn assert_equal_to_the_allocators_account(heap: &HeapAccount, own: &Value, what: &str) {
    let cached = heap.details.cached_bytes.unwrap();
    let fast = heap.fastbin_bytes.unwrap();
    let tcache = cached - fast;
    let live = heap.ladder.live_bytes.unwrap() - heap.mmapped_bytes;
    assert_eq!(heap.mmapped_allocations, number(own, "hblks"), "{what}: mmapped chunks");
    let drift = number(own, "hblkhd") - heap.mmapped_bytes;
    // glibc 2.43 counts 16 bytes too many at each mremap of a block.
    let is_mremaps = heap.layout.contains("bins at 24") && drift.is_multiple_of(16) && drift < 1 << 20;
    assert!(drift == 0 || is_mremaps, "{what}: mmapped bytes are off by {drift}");
    // 2.31 takes the text of its tunables from brk first: its own account has a heap that does not begin aligned.
    let slack = if number(own, "arena").is_multiple_of(16) { 0 } else { 16 };
    let near = |left: u64, right: u64, of: &str| assert!(left.abs_diff(right) <= slack, "{what}: {of}: {left} against {right}");
    near(heap.ladder.extent_bytes - heap.mmapped_bytes, number(own, "arena"), "bytes from the system");
    assert_eq!(heap.free_bytes.unwrap() + heap.top_bytes + fast, number(own, "fordblks"), "{what}: free bytes");
    assert_eq!(fast, number(own, "fsmblks"), "{what}: fastbins");
    near(live + tcache + heap.overhead_bytes + heap.ladder.unknown_bytes.unwrap(), number(own, "uordblks"), "bytes in use");
    let arenas = heap.arenas.iter().filter(|arena| arena.extent_bytes > 0).count() as u64;
    assert_eq!(heap.free_chunks.unwrap() + arenas, number(own, "ordblks"), "{what}: free chunks and tops");
}

fn check(scenario: &str, environment: &[(&str, &str)]) -> (Target, Value) {
    check_command(heaps().envs(environment.iter().copied()), scenario, &format!("{scenario} {environment:?}"))
}

/// The census of a started program after a scenario, to the byte.
pub fn check_command(command: &mut Command, scenario: &str, what: &str) -> (Target, Value) {
    let mut target = Target::start(command);
    let own = target.tell(scenario);
    let taken = target.census(Level::Full);
    assert_eq!(taken.heaps.len(), 1, "{what}");
    let heap = &taken.census.heaps[0];
    assert_equal_to_the_allocators_account(heap, &own, what);
    let slack = if number(&own, "arena").is_multiple_of(16) { 0 } else { 16 };
    assert!(heap.ladder.unknown_bytes.unwrap() <= slack, "{what}: {} unknown", heap.ladder.unknown_bytes.unwrap());
    assert!(taken.census.walk.usable, "{what}: {:?}", taken.census.walk);
    // The blocks that the program holds are all live, and usable sizes agree with malloc_usable_size: what else is live is libc's own.
    let usable: u64 = taken.heaps[0].chunks.live_blocks().map(|block| block.usable_bytes).sum();
    let count = heap.live_allocations.unwrap();
    assert!((number(&own, "live")..number(&own, "live") + 64).contains(&count), "{what}: {count} live, the program holds {}", own["live"]);
    assert!((number(&own, "usable")..number(&own, "usable") + 65536).contains(&usable), "{what}: {usable} usable, {}", own["usable"]);
    (target, own)
}

fn check_trim(scenario: &str, environment: &[(&str, &str)]) {
    check_trim_of(heaps().envs(environment.iter().copied()), scenario, &format!("{scenario} {environment:?}"));
}

/// As [`check_command`]; then a trim returns what was predicted, and the account is right again.
pub fn check_trim_of(command: &mut Command, scenario: &str, what: &str) {
    let (mut target, _) = check_command(command, scenario, what);
    // Again if the kernel makes huge pages of its memory meanwhile (khugepaged).
    let (mut before, mut predicted) = (target.anonymous_bytes(), 0);
    wait_until("the kernel lets its memory be", || {
        predicted = target.census(Level::Full).census.heaps[0].ladder.trimmable_bytes.unwrap();
        std::mem::replace(&mut before, target.anonymous_bytes()) == before
    });
    let own = target.tell("trim");
    let fact = before.saturating_sub(target.anonymous_bytes());
    let tolerance = (fact / 100).max(256 << 10);
    assert!(predicted.abs_diff(fact) <= tolerance, "{what}: predicted {predicted}, returned {fact}");
    let taken = target.census(Level::Full);
    assert_equal_to_the_allocators_account(&taken.census.heaps[0], &own, &format!("{what} after trim"));
}

#[test]
fn a_mixed_heap_of_four_threads_is_counted_to_the_byte() {
    check_trim("mix", &[]);
}

#[test]
fn holes_between_kept_blocks_are_counted_and_their_trim_is_predicted() {
    for keep in ["holes2", "holes16", "holes64", "holes500", "tail"] {
        check_trim(keep, &[]);
    }
}

#[test]
fn fastbins_and_thread_caches_are_distinguished_from_live_blocks() {
    check_trim("fastbins", &[]);
    check_trim("fastbins", &[("GLIBC_TUNABLES", "glibc.malloc.tcache_count=200:glibc.malloc.mxfast=160")]);
    check_trim("mix", &[("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")]);
}

#[test]
fn large_chunks_are_walked_from_header_to_header() {
    check_trim("large", &[]);
}

#[test]
fn chunks_with_mappings_of_their_own_are_all_found() {
    let (target, own) = check("mmapped", &[]);
    assert_eq!(number(&own, "hblks"), 28);
    drop(target);
    check("mix", &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536")]);
}

/// As numpy does with its large arrays: a block is as large as its header says, however the kernel split its mapping.
#[test]
fn blocks_whose_mappings_were_split_are_found_whole() {
    let (target, own) = check("split", &[]);
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    let regions = taken.heaps[0].chunks.regions().iter().filter(|region| region.arena == u32::MAX);
    assert_eq!(regions.map(|region| region.end - region.start).sum::<u64>(), number(&own, "hblkhd"));
    let elsewhere = |kind: &str| taken.census.not_malloc.iter().filter(|one| one.kind == kind).map(|one| one.resident_bytes).sum::<u64>();
    assert!(elsewhere("other_anonymous") + elsewhere("thread_stacks") < 1 << 20, "{:?}", taken.census.not_malloc);
    // Eight blocks of 4 MiB of which one was freed and a MiB of another returned, and one of 5 MiB of which 4 were written.
    assert!(heap.ladder.resident_bytes + heap.details.swapped_bytes > 31 << 20, "{heap:?}");
}

#[test]
fn zeros_in_the_huge_pages_of_a_block_with_a_mapping_of_its_own_are_seen() {
    let mut target = Target::start(&mut heaps());
    target.tell("thp");
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    // The kernel provides as many huge pages as it has.
    assert!(heap.details.huge_bytes > 0, "no huge page was given: {heap:?}");
    let zero = heap.huge_zero_bytes_est.unwrap();
    assert!(
        zero > heap.details.huge_bytes - heap.details.huge_bytes / 100 - 4 * heap.huge_zero_bytes_stderr.unwrap(),
        "{zero} of {}",
        heap.details.huge_bytes
    );
}

#[test]
fn a_heap_whose_brk_is_blocked_goes_on_in_mappings_and_is_counted() {
    check("no_brk", &[]);
}

#[test]
fn bytes_taken_from_brk_outside_malloc_are_unknown_and_no_others() {
    let mut target = Target::start(&mut heaps());
    let own = target.tell("foreign");
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    assert_equal_to_the_allocators_account(heap, &own, "foreign");
    assert!((12288 - 64..12288 + 4096).contains(&heap.ladder.unknown_bytes.unwrap()), "{}", heap.ladder.unknown_bytes.unwrap());
    assert!(taken.census.walk.usable);
}

#[test]
fn huge_pages_and_few_arenas_change_nothing() {
    check_trim("mix", &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")]);
    check("mix", &[("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.tcache_max=600")]);
}

/// With hugetlb=2 the main arena takes mappings of 2 MiB, between which there are mappings of its own large blocks. A piece that cannot be
/// found after them is reported as unknown.
#[test]
fn a_main_arena_scattered_over_mappings_is_right_except_for_its_unknown_bytes() {
    let mut target = Target::start(heaps().env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=2"));
    let own = target.tell("mix");
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    assert!(taken.census.walk.usable, "{:?}", taken.census.walk);
    assert_eq!(heap.mmapped_bytes, number(&own, "hblkhd"));
    assert_eq!(heap.ladder.extent_bytes - heap.mmapped_bytes, number(&own, "arena"));
    let free = heap.free_bytes.unwrap() + heap.fastbin_bytes.unwrap() + heap.top_bytes;
    assert!(
        free.abs_diff(number(&own, "fordblks")) <= heap.ladder.unknown_bytes.unwrap(),
        "{free} free, {own}, {} unknown",
        heap.ladder.unknown_bytes.unwrap()
    );
}

#[test]
fn the_top_level_agrees_with_the_full_one() {
    let mut target = Target::start(&mut heaps());
    target.tell("mix");
    let top = &target.census(Level::Top).census.heaps[0];
    let full = &target.census(Level::Full).census.heaps[0];
    assert_eq!(
        (top.ladder.extent_bytes, top.top_bytes, top.mmapped_bytes, top.mmapped_allocations),
        (full.ladder.extent_bytes, full.top_bytes, full.mmapped_bytes, full.mmapped_allocations)
    );
    assert!(full.ladder.resident_bytes - top.ladder.resident_bytes <= full.mmapped_bytes);
    assert_eq!(top.ladder.live_bytes, None);
}

#[test]
fn a_sample_comes_near_the_full_walk() {
    // Random windows are most easily wrong about regular patterns and chunks larger than a window.
    for pattern in ["mix", "holes4", "large"] {
        let mut target = Target::start(&mut heaps());
        target.tell(pattern);
        let sampled = &target.census(Level::Sampled).census.heaps[0];
        let full = &target.census(Level::Full).census.heaps[0];
        let error = sampled.live_bytes_est.unwrap().abs_diff(full.ladder.live_bytes.unwrap());
        let stderr = sampled.live_bytes_stderr.unwrap();
        assert!(error <= 4 * stderr + full.ladder.extent_bytes / 50, "{pattern}: error {error}: {sampled:?}");
        assert!(stderr <= full.ladder.extent_bytes / 4, "{pattern}: an error of {stderr} is useless: {sampled:?}");
        // Unless it was walked after all, the contents of the pages are close too.
        let Some(pages) = sampled.occupancy_est else {
            assert_eq!(sampled.ladder.live_bytes, full.ladder.live_bytes, "{pattern}: neither walked nor estimated");
            continue;
        };
        let (pinned, trimmable, kept) =
            (full.ladder.pinned_bytes.unwrap(), full.ladder.trimmable_bytes.unwrap(), full.details.kept_bytes.unwrap());
        let near = 4 * pages.free_resident_bytes_stderr + full.ladder.extent_bytes / 50;
        for (what, estimate, counted) in [
            ("free", pages.free_resident_bytes_est, pinned + trimmable + kept),
            ("pinned", pages.pinned_bytes_est, pinned),
            ("cached", pages.cached_bytes_est, full.details.cached_bytes.unwrap()),
        ] {
            assert!(estimate.abs_diff(counted) <= near, "{pattern}: {what} {estimate}, {counted} by the walk: {pages:?}");
        }
    }
}
