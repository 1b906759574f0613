//! The census of difficult processes: swapped out, handling their own faults, of another kind, changing during the walk, and whatever else
//! runs on this machine.

use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::census::{HeapAccount, LayoutCache, Level, LiveMemory, Memory, Options, Pace, Taken, take};
use fragprof::process::Process;
use fragprof::units::Pid;
use serde_json::Value;

use super::target::{Target, build};
use crate::support;

fn heaps() -> Command {
    Command::new(build("heaps.c", "cc", &["-lpthread", "-ldl"]))
}

fn reasons(taken: &Taken) -> String {
    taken.census.layout_unknown.join("; ")
}

/// Sums of `Swap:` lines over a process's mappings.
fn swapped_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Swap:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// A swap file for the time of a test.
struct Swap(CString, PathBuf);

impl Swap {
    /// `None` where this machine cannot swap to a file.
    fn on(directory: &Path) -> Option<Self> {
        let path = directory.join("swap");
        let mut file = std::fs::File::create(&path).unwrap();
        let zeros = vec![0u8; 1 << 20];
        for _ in 0..160 {
            file.write_all(&zeros).unwrap();
        }
        file.sync_all().unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let made = Command::new("mkswap").arg(&path).output().ok()?;
        let name = CString::new(path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: the name is a string that outlives the call.
        let on = made.status.success() && unsafe { libc::swapon(name.as_ptr(), 0) } == 0;
        on.then_some(Self(name, path))
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: as in `on`.
        unsafe { libc::swapoff(self.0.as_ptr()) };
        let _ = std::fs::remove_file(&self.1);
    }
}

/// Swaps a range of another process out, as memory pressure would.
fn page_out(pid: u32, start: u64, end: u64) {
    // SAFETY: pidfd_open takes numbers; process_madvise reads one iovec that outlives the call.
    unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(pidfd >= 0, "{}", std::io::Error::last_os_error());
        let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: usize::try_from(end - start).unwrap() };
        let done = libc::syscall(libc::SYS_process_madvise, pidfd, &raw const range, 1, libc::MADV_PAGEOUT, 0);
        assert!(done >= 0, "{}", std::io::Error::last_os_error());
        libc::close(i32::try_from(pidfd).unwrap());
    }
}

#[test]
fn what_is_swapped_out_stays_there_and_is_counted_as_unread() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(_swap) = Swap::on(directory.path()) else {
        eprintln!("this machine cannot swap to a file: {}", std::io::Error::last_os_error());
        return;
    };
    let mut target = Target::start(&mut heaps());
    target.tell("holes16");
    let extent = target.census(Level::Full).heaps[0].extents[0].1.clone();
    page_out(target.pid(), extent.start, extent.end);
    let swapped = swapped_bytes(target.pid());
    assert!(swapped > 32 << 20, "{swapped} bytes were swapped out");
    for level in [Level::Top, Level::Sampled, Level::Full] {
        let taken = target.census(level);
        let heap = &taken.census.heaps[0];
        assert_eq!(swapped_bytes(target.pid()), swapped, "{level:?} brought pages back");
        assert!(heap.details.swapped_bytes.abs_diff(swapped) < 2 << 20, "{level:?}: {} of {swapped}", heap.details.swapped_bytes);
        assert_eq!(heap.off_balance_bytes().unwrap_or(0), 0, "{level:?}");
        if level == Level::Full {
            assert!(!taken.census.walk.usable && heap.ladder.unknown_bytes.unwrap() > 32 << 20, "{:?}", taken.census.walk);
            // The rest are the few pages that stayed, to which no boundary leads.
            assert!(taken.census.walk.unread_bytes >= heap.ladder.unknown_bytes.unwrap() / 100 * 98, "{:?}", taken.census.walk);
        }
    }
}

#[test]
fn pages_whose_faults_the_process_handles_itself_are_never_touched() {
    let mut target = Target::start(&mut heaps());
    let own = target.tell("faults");
    assert_eq!(own["faults"], 0);
    for level in [Level::Top, Level::Sampled, Level::Full] {
        let started = Instant::now();
        let taken = target.census(level);
        assert!(started.elapsed() < Duration::from_secs(5), "{level:?} waited for a fault to be served");
        assert!(taken.census.walk.usable);
    }
    assert_eq!(target.tell("stat")["faults"], 0, "a fault was requested");
}

#[test]
fn a_32_bit_process_is_refused_with_the_reason() {
    let program =
        build("tiny32.c", "cc", &["-m32", "-nostdlib", "-static", "-fno-pie", "-no-pie", "-fno-stack-protector", "-fcf-protection=none"]);
    let target = Target::start(&mut Command::new(program));
    let output = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["census", &target.pid().to_string()]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("32-bit"), "{message}");
}

#[test]
fn a_go_program_is_reported_to_have_no_c_heap() {
    let target = Target::start(&mut Command::new(support::build::go_program()));
    // Its runtime must have started: the first census may find only the loader.
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let taken = target.census(Level::Full);
        if reasons(&taken).contains("Go program") {
            assert!(taken.census.heaps.is_empty());
            break;
        }
        assert!(Instant::now() < deadline, "{:?}", reasons(&taken));
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_program_without_any_libc_is_reported_as_static() {
    let program = build("tiny32.c", "cc", &["-m64", "-nostdlib", "-static", "-fno-stack-protector"]);
    let target = Target::start(&mut Command::new(program));
    let taken = target.census(Level::Full);
    assert!(taken.census.heaps.is_empty() && reasons(&taken).contains("static program"), "{:?}", reasons(&taken));
}

#[test]
fn mimalloc_is_reported_as_unsupported() {
    let library = std::fs::read_dir("/usr/lib/x86_64-linux-gnu")
        .unwrap()
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libmimalloc.so.")));
    let mut target = Target::start(heaps().env("LD_PRELOAD", library.expect("libmimalloc is missing: install libmimalloc2.0")));
    target.tell("tail");
    let taken = target.census(Level::Full);
    assert!(reasons(&taken).contains("mimalloc is loaded"), "{:?}", reasons(&taken));
    assert!(taken.census.heaps.is_empty(), "{:?}", taken.census.heaps);
}

#[test]
fn a_statically_linked_glibc_is_counted_to_the_byte() {
    let mut target = Target::start(&mut Command::new(build("heaps.c", "cc", &["-static", "-lpthread"])));
    let own = target.tell("mix");
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    assert_eq!(heap.allocator.name(), "glibc");
    let tcache = heap.details.cached_bytes.unwrap() - heap.fastbin_bytes.unwrap();
    let live = heap.ladder.live_bytes.unwrap() - heap.mmapped_bytes;
    assert_eq!(live + tcache + heap.overhead_bytes, own["uordblks"].as_u64().unwrap());
    assert_eq!(heap.ladder.extent_bytes - heap.mmapped_bytes, own["arena"].as_u64().unwrap());
    assert_eq!(heap.ladder.unknown_bytes.unwrap(), 0);
}

#[test]
fn a_stripped_static_musl_program_is_counted_to_the_block() {
    let mut target = Target::start(&mut Command::new(build("heaps.c", "musl-gcc", &["-static", "-s", "-lpthread"])));
    let own = target.tell("holes16");
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    assert_eq!(heap.allocator.name(), "musl");
    let live = heap.live_allocations.unwrap();
    assert!((own["live"].as_u64().unwrap()..own["live"].as_u64().unwrap() + 32).contains(&live), "{live}, {own}");
}

fn take_now(memory: &dyn Memory, pid: u32, level: Level, layouts: &mut LayoutCache) -> Option<Taken> {
    let pace = Pace { duration_max: Duration::from_secs(10), ..Pace::default() };
    take(memory, pid, "x", Options { level, pace, with_not_malloc: false }, layouts).ok()
}

/// A census's statements about its own quality must hold, whatever happened during it.
fn assert_honest(heap: &HeapAccount, usable: bool, what: &str) {
    let off = heap.off_balance_bytes().unwrap_or(0);
    assert!(!usable || off == 0, "{what}: off by {off}: {heap:?}");
    assert!(!usable || heap.ladder.unknown_bytes.unwrap() * 100 <= heap.ladder.extent_bytes, "{what}");
}

#[test]
fn a_heap_released_during_the_walk_gives_a_sound_or_an_unusable_result() {
    let mut target = Target::start(&mut Command::new(build("shrink.c", "cc", &["-lpthread"])));
    target.tell("start");
    let memory = target.memory();
    let mut layouts = LayoutCache::default();
    let deadline = Instant::now() + Duration::from_secs(3);
    let mut walks = 0;
    while Instant::now() < deadline || walks < 5 {
        let taken = take_now(&memory, target.pid(), Level::Full, &mut layouts).unwrap();
        for heap in &taken.census.heaps {
            assert_honest(heap, taken.census.walk.usable, "shrinking");
        }
        walks += 1;
    }
}

#[test]
fn after_an_exec_the_memory_of_the_old_program_is_no_longer_readable() {
    let mut target = Target::start(&mut Command::new(build("shrink.c", "cc", &["-lpthread"])));
    let memory = target.memory();
    assert!(take_now(&memory, target.pid(), Level::Full, &mut LayoutCache::default()).is_some());
    target.tell("exec");
    // The new program answers once it runs.
    target.tell("start");
    let after = take_now(&memory, target.pid(), Level::Full, &mut LayoutCache::default());
    let is_of_neither = after.is_none_or(|taken| taken.census.heaps.is_empty() || !taken.census.walk.usable);
    assert!(is_of_neither, "the old page map and the new memory were mixed");
    assert!(!target.census(Level::Full).census.heaps.is_empty());
}

/// CPU time so far: a process that slept between two reads of it has not touched its heap.
fn used_time(pid: u32) -> Option<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut times: Vec<String> = tasks
        .filter_map(Result::ok)
        .filter_map(|task| Some(std::fs::read_to_string(task.path().join("schedstat")).ok()?.split(' ').next()?.to_owned()))
        .collect();
    times.sort_unstable();
    Some(times.join(" "))
}

/// glibc's own account of its memory is compared within each census (extent against system_mem): here for every process of the machine.
#[test]
fn every_process_of_the_machine_that_rests_is_walked_to_the_last_byte() {
    let mut layouts = LayoutCache::default();
    let (mut seen, mut at_rest, mut odd) = (0, 0, Vec::new());
    // One that certainly exists.
    let own = Target::start(&mut Command::new("bash"));
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(memory) = Process::open(Pid(pid)).map_err(|_| ()).and_then(|process| LiveMemory::open(process).map_err(|_| ())) else {
            continue;
        };
        let before = used_time(pid);
        // The largest ones take seconds, and are no different.
        let Some(top) = take_now(&memory, pid, Level::Top, &mut layouts) else { continue };
        if top.census.heaps.iter().any(|heap| heap.ladder.resident_bytes > 256 << 20) {
            continue;
        }
        let Some(taken) = take_now(&memory, pid, Level::Full, &mut layouts) else { continue };
        seen += 1;
        for heap in &taken.census.heaps {
            assert_honest(heap, taken.census.walk.usable, &format!("pid {pid}"));
        }
        if before.is_none() || before != used_time(pid) {
            continue;
        }
        at_rest += 1;
        if taken.census.heaps.iter().any(|heap| heap.ladder.unknown_bytes.unwrap() > 0) || !taken.census.walk.balanced {
            let comm = std::fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            odd.push(format!("{pid} {} {:?}", comm.trim(), taken.census.walk));
        }
    }
    drop(own);
    assert!(at_rest > 0, "{seen} processes seen, none at rest");
    assert!(odd.is_empty(), "of {at_rest}: {}", odd.join("\n"));
}

#[test]
fn python_on_malloc_is_walked_to_the_last_byte() {
    let script =
        "import sys\nkeep = [str(n) * (n % 40) for n in range(200000)]\nkeep = keep[::3]\nprint('{}', flush=True)\nsys.stdin.read()";
    let mut target = Target::start(Command::new("python3").args(["-c", script]).env("PYTHONMALLOC", "malloc"));
    target.hear();
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    assert_eq!((heap.ladder.unknown_bytes.unwrap(), heap.off_balance_bytes()), (0, Some(0)));
    assert!(heap.live_allocations.unwrap() > 60_000 && taken.census.walk.usable);
    assert!(taken.census.layout_unknown.is_empty(), "{:?}", taken.census.layout_unknown);
}

#[test]
fn a_native_store_of_a_jvm_is_found_in_its_arenas() {
    let directory = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census/Native.java");
    let made =
        Command::new("javac").arg("-d").arg(directory.path()).arg(source).output().expect("javac is missing: install default-jdk-headless");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let library = build("native.c", "cc", &["-shared", "-fPIC"]);
    let mut java = Command::new("java");
    java.args(["-XX:+UseSerialGC", "-Xmx64m", "-cp"]).arg(directory.path()).arg("Native").arg(&library);
    let mut target = Target::start(&mut java);
    let own: Value = target.hear();
    let taken = target.census(Level::Full);
    let heap = &taken.census.heaps[0];
    let mut bytes = vec![0u8; 80_000 * 8];
    assert_eq!(target.memory().read(own["slots"].as_u64().unwrap(), &mut bytes), bytes.len());
    let held: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).filter(|&addr| addr != 0).collect();
    assert_eq!(held.len() as u64, own["live"].as_u64().unwrap());
    let missed = held.iter().filter(|&&addr| taken.heaps[0].chunks.is_live(addr) != Some(true)).count();
    assert_eq!(missed, 0, "of {}", held.len());
    assert!(heap.arenas.len() > 2 && taken.census.walk.usable, "{} arenas, {:?}", heap.arenas.len(), taken.census.walk);
    assert!(taken.census.not_malloc.iter().any(|one| one.kind == "java_heap"));
}

/// The stable names and meanings of `--json`.
#[test]
fn the_json_has_the_promised_keys_and_its_extent_is_the_sum_of_its_parts() {
    let mut target = Target::start(&mut heaps());
    target.tell("mix");
    let output = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["census", &target.pid().to_string(), "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let census: Value = serde_json::from_slice(&output.stdout).unwrap();
    for key in ["pid", "comm", "level", "heaps", "rss_bytes", "not_malloc", "walk"] {
        assert!(!census[key].is_null(), "{key}");
    }
    let heap = &census["heaps"][0];
    for key in ["allocator", "layout", "arenas", "size_classes"] {
        assert!(!heap[key].is_null(), "{key}");
    }
    let numbers = [
        "extent_bytes",
        "resident_bytes",
        "swapped_bytes",
        "live_bytes",
        "live_allocations",
        "cached_bytes",
        "free_bytes",
        "top_bytes",
        "overhead_bytes",
        "unknown_bytes",
        "trimmable_bytes",
        "pinned_bytes",
        "mmapped_bytes",
        "mmapped_allocations",
    ];
    let number = |key: &str| heap[key].as_u64().unwrap_or_else(|| panic!("{key} is {}", heap[key]));
    numbers.iter().for_each(|key| {
        number(key);
    });
    for key in ["duration_ms", "windows", "broken_headers", "unknown_bytes", "usable"] {
        assert!(!census["walk"][key].is_null(), "walk.{key}");
    }
    for key in ["kind", "resident_bytes"] {
        assert!(!census["not_malloc"][0][key].is_null(), "not_malloc.{key}");
    }
    let parts = ["live_bytes", "cached_bytes", "free_bytes", "top_bytes", "overhead_bytes", "unknown_bytes"].map(number);
    assert_eq!(number("extent_bytes"), parts.iter().sum::<u64>());
    let text = Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["census", &target.pid().to_string()]).output().unwrap();
    assert!(String::from_utf8_lossy(&text.stdout).contains("extent = live + cached + free + top + overhead + unknown holds"));
}
