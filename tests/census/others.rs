//! jemalloc, tcmalloc and musl against their own statistics and the program's list of blocks.

use std::process::Command;

use fragprof::census::{HeapAccount, Level, Memory, Taken};
use serde_json::Value;

use super::target::{Target, build};

const SLOTS: usize = 400_000;

fn preloaded(library: &str) -> Command {
    let directory = "/usr/lib/x86_64-linux-gnu";
    let path = format!("{directory}/{library}");
    assert!(std::path::Path::new(&path).exists(), "{path} is missing: install libjemalloc2 and libtcmalloc-minimal4");
    let mut command = Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]));
    command.env("LD_PRELOAD", path);
    command
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap_or_else(|| panic!("{key} in {account}"))
}

fn heap<'a>(taken: &'a Taken, allocator: &str) -> &'a HeapAccount {
    let heap = taken.census.heaps.iter().find(|heap| heap.allocator == allocator);
    heap.unwrap_or_else(|| panic!("no {allocator}: {:?}", taken.census.heaps.iter().map(|heap| &heap.layout).collect::<Vec<_>>()))
}

fn assert_balanced(heap: &HeapAccount) {
    let live = heap.live_bytes.unwrap() + heap.cached_bytes.unwrap_or(0) + heap.free_bytes.unwrap();
    assert_eq!(live + heap.top_bytes + heap.overhead_bytes + heap.unknown_bytes, heap.extent_bytes);
}

fn near(left: u64, right: u64, allowed: u64, what: &str) {
    assert!(left.abs_diff(right) <= allowed, "{what}: {left} against {right}");
}

/// The addresses that the program holds, from its own table.
fn held(target: &Target, own: &Value) -> Vec<u64> {
    let mut bytes = vec![0u8; SLOTS * 8];
    assert_eq!(target.memory().read(number(own, "slots"), &mut bytes), bytes.len());
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).filter(|&addr| addr != 0).collect()
}

fn assert_all_live(target: &Target, own: &Value, taken: &Taken, allocator: &str) {
    let index = taken.census.heaps.iter().position(|heap| heap.allocator == allocator).unwrap();
    let chunks = &taken.heaps[index].chunks;
    let held = held(target, own);
    assert!(held.len() as u64 == number(own, "live"));
    let missed = held.iter().filter(|&&addr| chunks.is_live(addr) != Some(true)).count();
    assert_eq!(missed, 0, "of {} blocks", held.len());
}

#[test]
fn jemalloc_is_counted_as_it_counts_itself() {
    for scenario in ["mix", "holes16", "tail", "large"] {
        let mut target = Target::start(&mut preloaded("libjemalloc.so.2"));
        let own = target.tell(scenario);
        let taken = target.census(Level::Full);
        let heap = heap(&taken, "jemalloc");
        // The answer's own output buffer and stdio's come and go.
        near(heap.live_bytes.unwrap(), number(&own, "allocated"), 16 << 10, &format!("{scenario}: live"));
        let dirty_and_muzzy_and_retained = heap.extent_bytes - number(&own, "active");
        assert!(dirty_and_muzzy_and_retained <= heap.free_bytes.unwrap() + (64 << 10), "{scenario}: {heap:?} {own}");
        assert_balanced(heap);
        assert!(taken.census.walk.usable, "{scenario}: {:?}", taken.census.walk);
        assert_all_live(&target, &own, &taken, "jemalloc");
    }
}

#[test]
fn tcmalloc_is_counted_as_it_counts_itself() {
    for scenario in ["mix", "holes16", "large"] {
        let mut target = Target::start(&mut preloaded("libtcmalloc_minimal.so.4"));
        let own = target.tell(scenario);
        let taken = target.census(Level::Full);
        let heap = heap(&taken, "tcmalloc");
        let caches = number(&own, "thread_cache_free_bytes") + number(&own, "transfer_cache_free_bytes");
        near(heap.live_bytes.unwrap(), number(&own, "current_allocated_bytes") + caches, 64 << 10, &format!("{scenario}: {own}"));
        near(heap.extent_bytes, number(&own, "heap_size"), 1 << 20, scenario);
        assert_balanced(heap);
        assert!(taken.census.walk.usable);
    }
}

#[test]
fn musl_is_counted_to_the_block() {
    for (scenario, flags) in [("mix", &["-static", "-lpthread"][..]), ("holes16", &["-lpthread"][..]), ("mmapped", &["-static"][..])] {
        let mut target = Target::start(&mut Command::new(build("heaps.c", "musl-gcc", flags)));
        let own = target.tell(scenario);
        let taken = target.census(Level::Full);
        let heap = heap(&taken, "musl");
        let live = heap.live_allocations.unwrap();
        assert!((number(&own, "live")..number(&own, "live") + 32).contains(&live), "{scenario}: {live}, {own}");
        assert_balanced(heap);
        assert!(taken.census.walk.usable, "{scenario}: {:?}", taken.census.walk);
        assert_all_live(&target, &own, &taken, "musl");
    }
}

struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn redis_equals_its_own_info_before_and_after_most_keys_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis");
    let mut redis = Command::new("redis-server");
    redis.args(["--port", "0", "--save", "", "--daemonize", "no", "--unixsocket"]).arg(&socket).stdout(std::process::Stdio::null());
    let child = Server(redis.spawn().expect("redis-server is missing: install redis-server"));
    let ask = |command: &[&str]| {
        let output = Command::new("timeout").args(["60", "redis-cli", "-s"]).arg(&socket).args(command).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !ask(&["PING"]).contains("PONG") {
        assert!(std::time::Instant::now() < deadline, "redis does not answer");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let info = |key: &str| -> u64 {
        let text = ask(&["INFO", "memory"]);
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        line.split(':').nth(1).unwrap().trim().parse().unwrap()
    };
    let compare = |what: &str| {
        let process = fragprof::target::Process::open(fragprof::units::Pid(child.0.id())).unwrap();
        let memory = fragprof::census::LiveMemory::open(process).unwrap();
        let options = fragprof::census::Options { level: Level::Full, pace: Default::default(), with_not_malloc: true };
        let taken = fragprof::census::take(&memory, child.0.id(), "redis", options, &mut Default::default()).unwrap();
        let heap = heap(&taken, "jemalloc").clone();
        let allocated = info("allocator_allocated:");
        near(heap.live_bytes.unwrap(), allocated, allocated / 100, &format!("{what}: allocated"));
        assert_balanced(&heap);
        assert!(taken.census.walk.usable, "{what}: {:?}", taken.census.walk);
        // Extents that are not wholly free are what jemalloc calls active.
        let index = taken.census.heaps.iter().position(|heap| heap.allocator == "jemalloc").unwrap();
        let table = &taken.heaps[index].chunks;
        let is_free = |region: &fragprof::census::chunks::Region| {
            table
                .chunks_of(region)
                .all(|chunk| chunk.state == fragprof::census::ChunkState::Free && chunk.bytes == region.end - region.start)
        };
        let active: u64 = table.regions().iter().filter(|region| !is_free(region)).map(|region| region.end - region.start).sum();
        let own = info("allocator_active:");
        near(active, own, own / 100, &format!("{what}: active"));
        // jemalloc's resident is what it believes to be resident, its own metadata included, which lies outside the extents.
        let resident = info("allocator_resident:");
        let outside = resident.saturating_sub(heap.resident_bytes);
        assert!(
            heap.resident_bytes <= resident + resident / 100 && outside <= 16 << 20,
            "{what}: resident {} of {resident}",
            heap.resident_bytes
        );
        heap
    };
    ask(&["EVAL", "for i=0,199999 do redis.call('SET','p:'..i,string.rep('x',100+i%200)) end", "0"]);
    let before = compare("filled");
    ask(&["EVAL", "for i=0,199999 do if i%5~=0 then redis.call('DEL','p:'..i) end end", "0"]);
    let after = compare("four of five keys deleted");
    assert!(after.live_bytes.unwrap() < before.live_bytes.unwrap() * 2 / 3);
    assert!(after.pinned_bytes.unwrap() > before.pinned_bytes.unwrap());
}
