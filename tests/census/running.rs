//! The census of processes that run, die, exec, or are dead already.

use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::census::{CoreFile, HeapAccount, LayoutCache, Level, Options, Pace, take};

use super::target::{Target, build};

const OPTIONS: Options = Options {
    level: Level::Full,
    pace: Pace {
        window_bytes: 256 << 10,
        pause_per_mib: Duration::ZERO,
        duration_max: Duration::from_secs(20),
        sample_windows: 400,
        threads: 2,
    },
    with_not_malloc: false,
};

fn heaps() -> Command {
    Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]))
}

/// Blocks that are never freed, among three threads that allocate and free as fast as they can.
#[test]
fn blocks_that_are_never_freed_are_found_in_every_walk_of_a_busy_heap() {
    let mut target = Target::start(&mut Command::new(build("busy.c", "cc", &["-lpthread"])));
    let own = target.tell("start");
    let pinned: Vec<u64> = own["pinned"].as_array().unwrap().iter().map(|addr| addr.as_u64().unwrap()).collect();
    let walks = 12;
    let (mut missed, mut unknown, mut extent) = (0usize, 0u64, 0u64);
    let mut unusable = Vec::new();
    for number in 0..walks {
        // On a machine that is busy with other tests the walk is slow, which does not matter here.
        let options =
            Options { pace: Pace { duration_max: Duration::from_secs(600), threads: 1 + number % 2, ..Pace::default() }, ..OPTIONS };
        let taken = take(&target.memory(), target.pid(), "busy", options, &mut LayoutCache::default()).unwrap();
        let heap = &taken.census.heaps[0];
        unusable.extend((!taken.census.walk.usable).then_some(taken.census.walk));
        unknown += heap.ladder.unknown_bytes.unwrap();
        extent += heap.ladder.extent_bytes;
        missed += pinned.iter().filter(|&&addr| taken.heaps[0].chunks.is_live(addr) == Some(false)).count();
    }
    assert_eq!(missed, 0, "of {}; not usable: {unusable:?}", pinned.len() * walks);
    assert!(unusable.is_empty(), "{unusable:?}");
    // `make bench-census` holds 60 walks to 0.01 %; with twelve of them one gap of a window's size is more than that.
    assert!(unknown * 1000 <= extent, "{unknown} of {extent}");
}

#[test]
fn live_bytes_of_a_busy_heap_are_near_what_the_program_counts() {
    let mut target = Target::start(&mut Command::new(build("busy.c", "cc", &["-lpthread"])));
    target.tell("start");
    let mut errors = Vec::new();
    for _ in 0..8 {
        let before = target.tell("count")["live_bytes"].as_f64().unwrap();
        let live = target.census(Level::Full).census.heaps[0].ladder.live_bytes.unwrap() as f64;
        let after = target.tell("count")["live_bytes"].as_f64().unwrap();
        let truth = (before + after) / 2.0;
        errors.push((live - truth) / truth);
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    // The program counts chunks; libc's own blocks and stdio are additional.
    assert!(mean.abs() < 0.02 && errors.iter().all(|error| error.abs() < 0.06), "{errors:?}");
}

#[test]
fn a_process_that_dies_while_it_is_walked_gives_an_error_or_an_unusable_result_soon() {
    for delay_ms in [0, 5, 20] {
        let mut target = Target::start(&mut heaps());
        target.tell("mix");
        let memory = target.memory();
        let pid = target.pid();
        let walk = std::thread::spawn(move || take(&memory, pid, "x", OPTIONS, &mut LayoutCache::default()).map(|taken| taken.census.walk));
        std::thread::sleep(Duration::from_millis(delay_ms));
        let started = Instant::now();
        drop(target);
        let result = walk.join().unwrap();
        assert!(started.elapsed() < Duration::from_secs(10));
        if let Ok(walk) = result {
            // Only a walk that was finished before the end may be usable.
            assert!(!walk.usable || walk.unread_bytes == 0, "{walk:?}");
        }
    }
}

#[test]
fn a_stopped_process_is_counted_like_a_running_one() {
    let mut target = Target::start(&mut heaps());
    target.tell("holes16");
    let before = target.census(Level::Full).census.heaps[0].clone();
    let pid = rustix::process::Pid::from_raw(target.pid() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let after = target.census(Level::Full).census.heaps[0].clone();
    assert_eq!(before, after);
}

#[test]
fn a_core_file_gives_the_same_census_as_the_process_did() {
    let mut target = Target::start(&mut heaps());
    target.tell("mix");
    let live = target.census(Level::Full).census.heaps[0].clone();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("core");
    let made = Command::new("gcore").arg("-o").arg(&path).arg(target.pid().to_string()).output().expect("gcore is missing: install gdb");
    let file = directory.path().join(format!("core.{}", target.pid()));
    assert!(file.exists(), "{}", String::from_utf8_lossy(&made.stderr));
    let core = CoreFile::open(&file).unwrap();
    let dead = take(&core, core.pid(), core.comm(), OPTIONS, &mut LayoutCache::default()).unwrap();
    let figures = |heap: &HeapAccount| {
        (
            heap.ladder.extent_bytes,
            heap.ladder.live_bytes,
            heap.live_allocations,
            heap.details.cached_bytes,
            heap.free_bytes,
            heap.top_bytes,
            heap.mmapped_bytes,
        )
    };
    assert_eq!(figures(&dead.census.heaps[0]), figures(&live));
    assert_eq!(core.pid(), target.pid());
    assert!(dead.census.walk.usable);
}

#[test]
fn a_program_without_a_heap_of_a_known_allocator_has_none() {
    let target = Target::start(Command::new("sleep").arg("60"));
    let taken = target.census(Level::Full);
    assert!(taken.census.heaps.iter().all(|heap| heap.allocator.name() == "glibc"));
    assert!(taken.census.walk.usable);
}
