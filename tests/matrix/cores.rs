//! Core files of one architecture, read on the other: a guest of `scripts/kernel-matrix.sh arm64` writes some, which are read on the machine
//! that runs it, and reads those that this machine has written.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::census::{CoreFile, HeapAccount, LayoutCache, Level, Options, Pace, take};
use fragprof::heap::residency::page_bytes;
use serde_json::{Value, json};

use crate::census::target::{Target, build};
use crate::support::build::LIB_DIR;
use crate::support::process::{run, wait_until};

/// Where they are written, and read. In a guest `guest-init` prints what is written there.
fn directory(variable: &str) -> PathBuf {
    std::env::var_os(variable).unwrap_or_else(|| panic!("{variable} is not set: scripts/matrix/arm64.sh sets it")).into()
}

const ALLOCATORS: [&str; 5] = ["glibc", "musl", "jemalloc", "tcmalloc", "mimalloc"];

/// Programs with many small holes between their blocks, by allocator.
fn programs() -> impl Iterator<Item = (&'static str, Command)> {
    let dynamic = ["-lpthread", "-ldl"];
    let preloaded = |library: &str| {
        let mut command = Command::new(build("heaps.c", "cc", &dynamic));
        command.env("LD_PRELOAD", Path::new(LIB_DIR).join(library));
        command
    };
    let commands = [
        Command::new(build("heaps.c", "cc", &dynamic)),
        Command::new(build("heaps.c", "musl-gcc", &["-static", "-lpthread"])),
        preloaded("libjemalloc.so.2"),
        preloaded("libtcmalloc_minimal.so.4"),
        preloaded("libmimalloc.so.2"),
    ];
    ALLOCATORS.into_iter().zip(commands)
}

/// What a core file and its process must agree in.
fn figures(heap: &HeapAccount) -> Value {
    json!({
        "allocator": heap.allocator.name(),
        "extent_bytes": heap.ladder.extent_bytes,
        "live_bytes": heap.ladder.live_bytes,
        "live_allocations": heap.live_allocations,
        "cached_bytes": heap.details.cached_bytes,
        "free_bytes": heap.free_bytes,
        "top_bytes": heap.top_bytes,
        "mmapped_bytes": heap.mmapped_bytes,
    })
}

/// Ends the program with a core file that the kernel writes.
fn dump(target: &mut Target, to: &Path) {
    let pid = target.pid();
    let (pattern, before) = (Path::new("/proc/sys/kernel/core_pattern"), std::fs::read("/proc/sys/kernel/core_pattern").unwrap());
    std::fs::write(pattern, to.display().to_string()).unwrap();
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), rustix::process::Signal::ABORT).unwrap();
    target.child.wait().unwrap();
    std::fs::write(pattern, before).unwrap();
}

/// Writes core files with the figures that a census of the living process gave; other tests compare those with the allocators' accounts.
/// The file's name is fixed for the time, as is the machine's `core_pattern`: for guests, and by `gcore` elsewhere.
#[test]
#[ignore = "for arm64: scripts/kernel-matrix.sh arm64"]
fn core_files_are_written() {
    let into = directory("FRAGPROF_CORES_WRITTEN");
    std::fs::create_dir_all(&into).unwrap();
    for (name, mut command) in programs() {
        let unlimited = || {
            let none = rustix::process::Rlimit { current: None, maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Core, none).map_err(std::io::Error::from)
        };
        // SAFETY: between fork and exec nothing is done but one system call.
        unsafe { command.pre_exec(unlimited) };
        let mut target = Target::start_on_small_pages(&mut command);
        target.tell("holes16");
        let heaps: Vec<Value> = target.census(Level::Full).census.heaps.iter().map(figures).collect();
        assert!(heaps.iter().any(|heap| heap["allocator"] == name && heap["live_bytes"].as_u64() > Some(4 << 20)), "{name}: {heaps:?}");
        let living = json!({ "page_bytes": page_bytes(), "heaps": heaps });
        std::fs::write(into.join(format!("{name}.json")), living.to_string()).unwrap();
        let core = into.join(format!("{name}.core"));
        if cfg!(target_arch = "aarch64") {
            dump(&mut target, &core);
        } else {
            let made = run(Command::new("gcore").arg("-o").arg(&core).arg(target.pid().to_string()));
            let file = into.join(format!("{name}.core.{}", target.pid()));
            assert!(file.exists(), "gcore wrote nothing: {}", made.err);
            std::fs::rename(file, &core).unwrap();
        }
        wait_until("the core file is there", || core.exists());
        assert_same(name, &into);
    }
}

#[test]
#[ignore = "for arm64: scripts/kernel-matrix.sh arm64"]
fn core_files_of_the_other_architecture_are_read() {
    let from = directory("FRAGPROF_CORES_READ");
    for name in ALLOCATORS {
        let packed = from.join(format!("{name}.core.gz"));
        assert!(run(Command::new("gzip").args(["-d", "-f"]).arg(&packed)).status.success(), "{}", packed.display());
        assert_same(name, &from);
        std::fs::remove_file(from.join(format!("{name}.core"))).unwrap();
    }
}

/// The census of a core file gives what that of the process gave; one of a machine with other pages is refused.
fn assert_same(name: &str, directory: &Path) {
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: false };
    let living: Value = serde_json::from_str(&std::fs::read_to_string(directory.join(format!("{name}.json"))).unwrap()).unwrap();
    let core = CoreFile::open(&directory.join(format!("{name}.core")));
    if living["page_bytes"] != page_bytes() {
        assert!(core.is_err_and(|error| error.to_string().contains("pages of")), "{name}: {living}");
        return;
    }
    let core = core.unwrap();
    let taken = take(&core, core.pid(), core.comm(), options, &mut LayoutCache::default()).unwrap();
    let heaps: Vec<Value> = taken.census.heaps.iter().map(figures).collect();
    assert_eq!(Value::from(heaps), living["heaps"], "{name}");
    assert!(taken.census.walk.usable, "{name}: {:?}", taken.census.walk);
    println!("{name}: {living}");
}
