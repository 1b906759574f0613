//! jemalloc, tcmalloc and musl against their own statistics and the program's list of blocks.

use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::census::chunks::Region;
use fragprof::census::{ChunkState, HeapAccount, Level, Memory, Taken};
use serde_json::Value;

use super::target::{Target, build};
use crate::support::build::LIB_DIR;

const SLOTS: usize = 400_000;

/// The distribution's jemalloc, and those in `FRAGPROF_TEST_JEMALLOC`, a list of files (`make jemalloc-test` builds some).
fn jemallocs() -> Vec<PathBuf> {
    let others = std::env::var_os("FRAGPROF_TEST_JEMALLOC");
    std::iter::once("libjemalloc.so.2".into()).chain(others.iter().flat_map(std::env::split_paths)).collect()
}

/// With a library of the distribution, or at a path.
fn preloaded(library: impl AsRef<Path>) -> Command {
    let path = Path::new(LIB_DIR).join(library);
    assert!(path.exists(), "{} is missing: install libjemalloc2 and libtcmalloc-minimal4", path.display());
    let mut command = Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]));
    command.env("LD_PRELOAD", path);
    command
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap_or_else(|| panic!("{key} in {account}"))
}

fn heap<'a>(taken: &'a Taken, allocator: &str) -> &'a HeapAccount {
    let heap = taken.census.heaps.iter().find(|heap| heap.allocator.name() == allocator);
    heap.unwrap_or_else(|| panic!("no {allocator}: {:?}", taken.census.heaps.iter().map(|heap| &heap.layout).collect::<Vec<_>>()))
}

fn assert_balanced(heap: &HeapAccount) {
    let live = heap.ladder.live_bytes.unwrap() + heap.details.cached_bytes.unwrap_or(0) + heap.free_bytes.unwrap();
    assert_eq!(live + heap.top_bytes + heap.overhead_bytes + heap.ladder.unknown_bytes.unwrap(), heap.ladder.extent_bytes);
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
    let index = taken.census.heaps.iter().position(|heap| heap.allocator.name() == allocator).unwrap();
    let chunks = &taken.heaps[index].chunks;
    let held = held(target, own);
    assert!(held.len() as u64 == number(own, "live"));
    let missed = held.iter().filter(|&&addr| chunks.is_live(addr) != Some(true)).count();
    assert_eq!(missed, 0, "of {} blocks", held.len());
}

/// A jemalloc heap equals its own statistics to the byte: `stats.allocated`, `stats.active`, `stats.mapped` and `stats.retained`; of 5.3 also
/// `stats.arenas.<i>.tcache_bytes`.
/// `stats.resident` counts pages that were allocated but never touched, as does the figure that is compared with it.
pub fn assert_equal_to_jemallocs_account(target: &mut Target, scenario: &str, what: &str) {
    let own = target.tell(scenario);
    let taken = target.census(Level::Full);
    let heap = heap(&taken, "jemalloc");
    let what = &format!("{what} {scenario}: {own} {heap:?}");
    let cached = heap.layout.contains("5.3").then(|| number(&own, "tcache_bytes"));
    assert_eq!(heap.details.cached_bytes, cached, "cached: {what}");
    assert_eq!(heap.ladder.live_bytes.unwrap() + cached.unwrap_or(0), number(&own, "allocated"), "live: {what}");
    assert_eq!(heap.ladder.extent_bytes, number(&own, "mapped") + number(&own, "retained"), "extent: {what}");
    assert_eq!(active_bytes(&taken), number(&own, "active"), "active: {what}");
    let bytes = |key: &str| Some(number(&own, key));
    assert_eq!((heap.dirty_bytes, heap.muzzy_bytes), (bytes("pdirty"), bytes("pmuzzy")), "dirty and muzzy: {what}");
    assert_eq!(heap.retained_bytes, Some(number(&own, "retained")), "retained: {what}");
    let time = |key: &str| own[key].as_i64();
    assert_eq!((heap.dirty_decay_ms, heap.muzzy_decay_ms), (time("dirty_decay_ms"), time("muzzy_decay_ms")), "decay: {what}");
    let resident = number(&own, "resident");
    near(heap.allocator_resident_bytes.unwrap(), resident, resident / 1000, &format!("resident: {what}"));
    assert!(heap.ladder.resident_bytes <= resident + (64 << 10), "resident: {what}");
    assert_balanced(heap);
    assert!(taken.census.walk.usable && taken.census.walk.broken_headers == 0, "{:?}", taken.census.walk);
    assert_all_live(target, &own, &taken, "jemalloc");
}

/// What jemalloc calls active: extents that are not wholly free.
fn active_bytes(taken: &Taken) -> u64 {
    /// The arena of jemalloc's own memory.
    const NO_ARENA: u32 = 4095;
    let index = taken.census.heaps.iter().position(|heap| heap.allocator.name() == "jemalloc").unwrap();
    let table = &taken.heaps[index].chunks;
    let is_free = |region: &Region| {
        let mut chunks = table.chunks_of(region);
        chunks.next().is_some_and(|chunk| chunk.state == ChunkState::Free && chunk.bytes == region.end - region.start)
    };
    let active = table.regions().iter().filter(|region| region.arena != NO_ARENA && !is_free(region));
    active.map(|region| region.end - region.start).sum()
}

#[test]
fn jemalloc_is_counted_as_it_counts_itself() {
    for library in jemallocs() {
        for scenario in ["mix", "holes16", "tail", "large"] {
            let mut target = Target::start_on_small_pages(&mut preloaded(&library));
            assert_equal_to_jemallocs_account(&mut target, scenario, &library.display().to_string());
            println!("{} {scenario}: {}", library.display(), heap(&target.census(Level::Top), "jemalloc").layout);
        }
    }
}

#[test]
fn jemallocs_decay_times_are_read_whatever_they_are() {
    let times = [(1234, 0), (0, -1), (-1, 5000)];
    for (library, (dirty, muzzy)) in jemallocs().iter().flat_map(|library| times.map(|times| (library, times))) {
        let mut command = preloaded(library);
        command.env("MALLOC_CONF", format!("dirty_decay_ms:{dirty},muzzy_decay_ms:{muzzy}"));
        let mut target = Target::start(&mut command);
        target.tell("mix");
        for level in [Level::Top, Level::Full] {
            let heap = heap(&target.census(level), "jemalloc").clone();
            assert_eq!((heap.dirty_decay_ms, heap.muzzy_decay_ms), (Some(dirty), Some(muzzy)), "{level:?}");
            assert!(heap.arenas.iter().all(|arena| arena.dirty_decay_ms == Some(dirty)), "{:?}", heap.arenas);
        }
    }
}

/// A static, stripped program with jemalloc linked in under another name, as in redis and many others, in addition to glibc's malloc.
#[test]
fn jemalloc_linked_in_with_a_prefix_is_counted_as_it_counts_itself() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut target = Target::start_on_small_pages(&mut Command::new(prefixed(directory.path(), &["-s", "-static"])));
    assert_equal_to_jemallocs_account(&mut target, "mix", "static, je_");
    let taken = target.census(Level::Full);
    let allocators: Vec<&str> = taken.census.heaps.iter().map(|heap| heap.allocator.name()).collect();
    assert_eq!(allocators, ["glibc", "jemalloc"], "each with its own heap");
}

/// `heaps.c` with Debian's static library, whose functions are renamed.
pub(crate) fn prefixed(directory: &Path, flags: &[&str]) -> PathBuf {
    const NAMES: [&str; 8] = ["malloc", "calloc", "realloc", "free", "memalign", "posix_memalign", "malloc_usable_size", "mallctl"];
    const ALSO: [&str; 2] = ["aligned_alloc", "valloc"];
    let archive = directory.join("libjemalloc-prefixed.a");
    let mut objcopy = Command::new("objcopy");
    for name in NAMES.iter().chain(&ALSO) {
        objcopy.arg("--redefine-sym").arg(format!("{name}=je_{name}"));
    }
    let made = objcopy.arg("/usr/lib/x86_64-linux-gnu/libjemalloc.a").arg(&archive).output().expect("objcopy is missing: install binutils");
    assert!(made.status.success(), "install libjemalloc-dev: {}", String::from_utf8_lossy(&made.stderr));
    let program = directory.join("heaps-prefixed");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-w"]).args(flags).arg("-o").arg(&program);
    compiler.args(NAMES.iter().map(|name| format!("-D{name}=je_{name}")));
    compiler.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census/heaps.c")).arg(&archive).args([
        "-lpthread",
        "-ldl",
        "-lm",
        "-lstdc++",
    ]);
    let built = compiler.output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    program
}

#[test]
fn jemallocs_levels_below_full_agree_with_the_full_one() {
    for (library, scenario) in jemallocs().iter().flat_map(|library| ["mix", "holes16", "large"].map(|scenario| (library, scenario))) {
        let mut target = Target::start(&mut preloaded(library));
        target.tell(scenario);
        let levels = [Level::Top, Level::Sampled, Level::Full].map(|level| heap(&target.census(level), "jemalloc").clone());
        let [top, sampled, full] = &levels;
        for quick in [top, sampled] {
            assert_eq!(quick.ladder.extent_bytes, full.ladder.extent_bytes, "{scenario}");
            assert_eq!(quick.layout, full.layout);
            near(quick.ladder.resident_bytes, full.ladder.resident_bytes, full.ladder.resident_bytes / 1000, scenario);
            let arenas = |heap: &HeapAccount| heap.arenas.iter().map(|arena| (arena.address, arena.extent_bytes)).collect::<Vec<_>>();
            assert_eq!(arenas(quick), arenas(full), "{scenario}");
        }
        let error = sampled.live_bytes_est.unwrap().abs_diff(full.ladder.live_bytes.unwrap());
        let allowed = 5 * sampled.live_bytes_stderr.unwrap() + full.ladder.live_bytes.unwrap() / 100;
        assert!(error <= allowed, "{scenario}: off by {error} of {allowed}");
        assert!(sampled.live_bytes_stderr.unwrap() < full.ladder.live_bytes.unwrap() / 50, "{scenario}: {sampled:?}");
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
        near(heap.ladder.live_bytes.unwrap(), number(&own, "current_allocated_bytes") + caches, 64 << 10, &format!("{scenario}: {own}"));
        near(heap.ladder.extent_bytes, number(&own, "heap_size"), 1 << 20, scenario);
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
        let process = fragprof::process::Process::open(fragprof::units::Pid(child.0.id())).unwrap();
        let memory = fragprof::census::LiveMemory::open(process).unwrap();
        let options = fragprof::census::Options { level: Level::Full, pace: Default::default(), with_not_malloc: true };
        let taken = fragprof::census::take(&memory, child.0.id(), "redis", options, &mut Default::default()).unwrap();
        let heap = heap(&taken, "jemalloc").clone();
        let allocated = info("allocator_allocated:");
        let in_use = heap.ladder.live_bytes.unwrap() + heap.details.cached_bytes.unwrap_or(0);
        near(in_use, allocated, allocated / 100, &format!("{what}: allocated"));
        assert_balanced(&heap);
        assert!(taken.census.walk.usable, "{what}: {:?}", taken.census.walk);
        let (active, resident) = (info("allocator_active:"), info("allocator_resident:"));
        near(active_bytes(&taken), active, active / 100, &format!("{what}: active"));
        near(heap.allocator_resident_bytes.unwrap(), resident, resident / 100, &format!("{what}: resident, {heap:?}"));
        // The kernel's figure is smaller: jemalloc counts everything it allocated as touched.
        assert!(heap.ladder.resident_bytes <= resident + resident / 100, "{what}: {} of {resident}", heap.ladder.resident_bytes);
        heap
    };
    ask(&["EVAL", "for i=0,199999 do redis.call('SET','p:'..i,string.rep('x',100+i%200)) end", "0"]);
    let before = compare("filled");
    ask(&["EVAL", "for i=0,199999 do if i%5~=0 then redis.call('DEL','p:'..i) end end", "0"]);
    let after = compare("four of five keys deleted");
    assert!(after.ladder.live_bytes.unwrap() < before.ladder.live_bytes.unwrap() * 2 / 3);
    assert!(after.ladder.pinned_bytes.unwrap() > before.ladder.pinned_bytes.unwrap());
}
