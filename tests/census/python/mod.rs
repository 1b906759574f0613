//! CPython's own heap against `sys._debugmallocstats()` of the same process.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fragprof::census::pymalloc::PoolAccount;
use fragprof::census::{HeapAccount, HeapWalk, LayoutCache, Level, LiveMemory, Options, Pace, Taken, take};
use fragprof::process::Process;
use fragprof::units::Pid;

use crate::managed::python::all;

/// What CPython says of its heap.
#[derive(Debug, Default, PartialEq)]
struct Account {
    arenas: u64,
    arena_bytes: u64,
    live_bytes: u64,
    free_block_bytes: u64,
    free_pools: u64,
    pool_bytes: u64,
    header_bytes: u64,
    rounding_bytes: u64,
    alignment_bytes: u64,
    /// By class: size of a block, pools, blocks in use, free blocks.
    classes: Vec<[u64; 4]>,
}

impl Account {
    /// The last account in a text.
    fn parse(text: &str) -> Self {
        let last = &text[text.rfind("Small block threshold").unwrap_or(0)..];
        let number = |text: &str| text.replace(',', "").trim().parse::<u64>().ok();
        let after = |name: &str| {
            let line = last.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("no {name} in {last}"));
            number(line.split('=').nth(1).unwrap()).unwrap()
        };
        let before = |name: &str| {
            let line = last.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("no {name} in {last}"));
            let words: Vec<&str> = line.split_whitespace().collect();
            let star = words.iter().position(|word| *word == "*").unwrap();
            (number(words[0]).unwrap(), number(words[star + 1].split('/').next().unwrap()).unwrap())
        };
        let rows = last.lines().filter_map(|line| {
            let words: Option<Vec<u64>> = line.split_whitespace().map(number).collect();
            words.filter(|words| words.len() == 5)
        });
        let (arenas, arena_bytes) = before("bytes/arena");
        let (free_pools, pool_bytes) = before("unused pools *");
        assert_eq!(arenas, after("# arenas allocated current"));
        Self {
            arenas,
            arena_bytes,
            live_bytes: after("# bytes in allocated blocks"),
            free_block_bytes: after("# bytes in available blocks"),
            free_pools,
            pool_bytes,
            header_bytes: after("# bytes lost to pool headers"),
            rounding_bytes: after("# bytes lost to quantization"),
            alignment_bytes: after("# bytes lost to arena alignment"),
            classes: rows.map(|row| [row[1], row[2], row[3], row[4]]).collect(),
        }
    }

    fn sum(&self, column: usize) -> u64 {
        self.classes.iter().map(|class| class[column]).sum()
    }
}

/// A Python program that has written its account.
struct Running {
    child: Child,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Running {
    fn start(python: &Path, mode: &str, environment: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("account");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census/python/account.py");
        let mut command = Command::new(python);
        command.arg(script).arg(&path).arg(mode).envs(environment.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null());
        // khugepaged would make pages resident between two censuses that are compared.
        // SAFETY: prctl is async-signal-safe.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            })
        };
        Self { child: command.spawn().unwrap(), path, _directory: directory }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for child in children(self.pid()) {
            // SAFETY: a child of our own child, which nobody has waited for.
            unsafe { libc::kill(child as i32, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Waits until a process pauses, whose account then holds.
fn wait_for_pause(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(60);
    #[cfg(target_arch = "x86_64")]
    let pause = libc::SYS_pause;
    // arm64 has no system call of that name.
    #[cfg(not(target_arch = "x86_64"))]
    let pause = libc::SYS_ppoll;
    // The last is `signal.sigwait`, of a program that is busy otherwise.
    let waits = [pause, libc::SYS_rt_sigtimedwait].map(|number| format!("{number} "));
    let is_waiting = |text: String| waits.iter().any(|wait| text.starts_with(wait));
    while !std::fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(is_waiting) {
        assert!(Instant::now() < deadline, "process {pid} does not pause");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn census(pid: u32, level: Level, layouts: &mut LayoutCache) -> Taken {
    let memory = LiveMemory::open(Process::open(Pid(pid)).unwrap()).unwrap();
    // As many pools as a sample of this size takes of a heap of gigabytes would be all of this one.
    let pace = Pace { sample_windows: 50, ..Pace::default() };
    take(&memory, pid, "python", Options { level, pace, with_not_malloc: true }, layouts).unwrap()
}

fn pymalloc(taken: &Taken) -> Option<&HeapWalk> {
    taken.heaps.iter().find(|heap| heap.account.allocator.name() == "pymalloc")
}

fn heap(taken: &Taken) -> (&HeapAccount, PoolAccount) {
    let heap = pymalloc(taken).unwrap_or_else(|| panic!("no pymalloc: {:?}", taken.census.heaps));
    (&heap.account, heap.account.pools.unwrap())
}

fn assert_equal(taken: &Taken, own: &Account, what: &str) {
    let (heap, pools) = heap(taken);
    assert_eq!((pools.arenas, pools.arena_bytes, pools.pool_bytes), (own.arenas, own.arena_bytes, own.pool_bytes), "{what}");
    assert_eq!((pools.free_pools, pools.used_pools), (own.free_pools, own.sum(1)), "{what}: pools");
    assert_eq!((heap.ladder.live_bytes, heap.live_allocations), (Some(own.live_bytes), Some(own.sum(2))), "{what}: live");
    assert_eq!(heap.free_bytes, Some(own.free_block_bytes + own.free_pools * own.pool_bytes), "{what}: free");
    assert_eq!(pools.free_in_used_pools_bytes, Some(own.free_block_bytes), "{what}: free blocks");
    assert_eq!(heap.overhead_bytes, own.header_bytes + own.rounding_bytes + own.alignment_bytes, "{what}: overhead");
    assert_eq!((heap.ladder.extent_bytes, heap.ladder.unknown_bytes), (own.arenas * own.arena_bytes, Some(0)), "{what}: extent");
    assert_eq!((heap.off_balance_bytes(), taken.census.walk.broken_headers), (Some(0), 0), "{what}");
    assert!(taken.census.walk.usable && taken.census.layout_unknown.is_empty(), "{what}: {:?}", taken.census);
    // Block by block, too.
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    pymalloc(taken).unwrap().chunks.live_blocks().for_each(|block| *live.entry(block.chunk.bytes).or_default() += 1);
    let classes = own.classes.iter().filter(|[_, _, used, _]| *used > 0);
    assert_eq!(live, classes.map(|&[bytes, _, used, _]| (bytes, used)).collect(), "{what}: by class");
    // Its memory is counted once: as a heap.
    let kinds: Vec<&str> = taken.census.not_malloc.iter().map(|one| one.kind).collect();
    assert!(!kinds.contains(&"pymalloc_arenas") && taken.census.runtimes.memory.is_empty(), "{what}: {kinds:?}");
    let others: u64 = taken.census.not_malloc.iter().filter(|one| one.kind == "other_anonymous").map(|one| one.resident_bytes).sum();
    assert!(others < 4 << 20, "{what}: {others}");
}

#[test]
fn pythons_heap_is_to_the_byte_what_python_counts() {
    for python in all() {
        let running = Running::start(&python.program, "rest", &[]);
        wait_for_pause(running.pid());
        let own = Account::parse(&std::fs::read_to_string(&running.path).unwrap());
        assert!(own.arenas > 10 && own.free_block_bytes > 0 && own.free_pools > 0, "{own:?}");
        let mut layouts = LayoutCache::default();
        let what = format!("Python {}", python.version);
        let full = census(running.pid(), Level::Full, &mut layouts);
        assert_equal(&full, &own, &what);
        // The place is remembered, and the levels agree.
        let again = census(running.pid(), Level::Full, &mut layouts);
        assert_eq!(heap(&again).0, heap(&full).0, "{what}");
        let (full, pools) = heap(&full);
        let top = census(running.pid(), Level::Top, &mut layouts);
        let (top, top_pools) = heap(&top);
        assert_eq!((top.ladder.extent_bytes, top.ladder.resident_bytes), (full.ladder.extent_bytes, full.ladder.resident_bytes), "{what}");
        assert_eq!((top_pools.used_pools, top_pools.free_arenas), (pools.used_pools, pools.free_arenas), "{what}");
        let sampled = census(running.pid(), Level::Sampled, &mut layouts);
        let (sampled, _) = heap(&sampled);
        let off = sampled.live_bytes_est.unwrap().abs_diff(own.live_bytes);
        assert!(off <= 4 * sampled.live_bytes_stderr.unwrap(), "{what}: {off} of {sampled:?}");
        assert!(sampled.live_bytes_stderr.unwrap() * 20 < own.live_bytes, "{what}: {sampled:?}");
        // Free bytes of resident pages are pinned, or on whole pages that nothing but the end of their arena's last block releases.
        let free = full.ladder.pinned_bytes.unwrap() + full.details.kept_bytes.unwrap();
        assert!(free <= full.free_bytes.unwrap() && free > own.free_block_bytes / 2, "{what}: {full:?}");
    }
}

#[test]
fn forked_children_have_heaps_of_their_own() {
    let python = all().into_iter().next_back().unwrap();
    let running = Running::start(&python.program, "fork", &[]);
    wait_for_pause(running.pid());
    let children = children(running.pid());
    assert_eq!(children.len(), 2);
    let mut layouts = LayoutCache::default();
    let mut accounts = vec![std::fs::read_to_string(&running.path).unwrap()];
    for (number, &child) in children.iter().enumerate() {
        wait_for_pause(child);
        accounts.push(std::fs::read_to_string(running.path.with_extension(number.to_string())).unwrap());
    }
    for (pid, own) in std::iter::once(running.pid()).chain(children).zip(accounts) {
        assert_equal(&census(pid, Level::Full, &mut layouts), &Account::parse(&own), &format!("process {pid}"));
    }
}

#[test]
fn a_python_that_allocates_with_malloc_has_no_such_heap() {
    for python in all() {
        let running = Running::start(&python.program, "rest", &[("PYTHONMALLOC", "malloc")]);
        wait_for_pause(running.pid());
        let taken = census(running.pid(), Level::Full, &mut LayoutCache::default());
        let allocators: Vec<&str> = taken.census.heaps.iter().map(|heap| heap.allocator.name()).collect();
        assert_eq!(allocators, ["glibc"], "Python {}", python.version);
        assert!(taken.census.walk.usable, "Python {}: {:?}", python.version, taken.census.walk);
    }
}

#[test]
fn the_heap_of_a_busy_python_is_within_a_percent_of_what_python_counts() {
    let python = all().into_iter().next_back().unwrap();
    let running = Running::start(&python.program, "busy", &[]);
    let pid = running.pid();
    let accounts = || std::fs::read_to_string(&running.path).unwrap_or_default().matches("# bytes lost to arena alignment").count();
    let account = || {
        let before = accounts();
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGUSR1) }, 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while accounts() == before {
            assert!(Instant::now() < deadline, "no account");
            std::thread::sleep(Duration::from_millis(5));
        }
        Account::parse(&std::fs::read_to_string(&running.path).unwrap()).live_bytes as f64
    };
    wait_for_pause(pid);
    std::thread::sleep(Duration::from_millis(500));
    let mut layouts = LayoutCache::default();
    let mut unknown = 0.0;
    for _ in 0..6 {
        let before = account();
        let taken = census(pid, Level::Full, &mut layouts);
        let truth = (before + account()) / 2.0;
        let (heap, _) = heap(&taken);
        let live = heap.ladder.live_bytes.unwrap() as f64;
        unknown += heap.ladder.unknown_bytes.unwrap() as f64 / heap.ladder.extent_bytes as f64;
        assert!((live - truth).abs() <= truth / 100.0, "{live} of {truth}: {heap:?}");
        assert!(taken.census.walk.usable && heap.off_balance_bytes() == Some(0), "{:?}", taken.census.walk);
    }
    assert!(unknown / 6.0 < 0.003, "{unknown}");
}
