//! Sites that only large blocks pass: the finder's results for real builds of glibc are compared with sites found by hand and with the
//! kernel's hit counts; hostile libraries must do no harm.

mod doctor;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use fragprof::selective::{LargeSites, NoSites, find, try_anew};

use crate::support;

/// Additional directories with other builds' libc.so.6 and ld-linux-x86-64.so.2 to check, separated by colons.
const MORE_BUILDS: &str = "FRAGPROF_TEST_GLIBCS";
const LOADER: &str = "ld-linux-x86-64.so.2";
const LIBRARY: &str = "libc.so.6";

/// Sites found by hand in the disassembly of Debian's builds, by build id: that of malloc with a single thread, and that of free for blocks
/// without their own mapping.
const READ_BY_HAND: [(&str, u64, u64); 4] = [
    // 2.31-13+deb11u11, 2.36-9+deb12u14, 2.41-12+deb13u4; and 2.43-7, where one site serves all calls of free.
    ("f3654f4d10c3f54ac5dabcb8fc67a2b8d1409dc4", 0x85e5a, 0x8276a),
    ("93ac61ec5a8eb1396f9fbd350e3169a558528a40", 0x98acd, 0x96293),
    ("5e5b51f4c39af9ac589408c1dc432ba390a273cc", 0xa2ad5, 0xa313b),
    ("a226e0f150be89099d375c6b865b1dba794648ae", 0xa3dfa, 0xa528d),
];

/// A build in a directory of its own: the kernel counts hits by file, and other processes use this machine's.
struct Build {
    folder: tempfile::TempDir,
}

impl Build {
    fn copy_of(folder: &Path) -> Self {
        let copy = tempfile::tempdir().unwrap();
        for name in [LOADER, LIBRARY] {
            fs::copy(folder.join(name), copy.path().join(name)).unwrap();
        }
        // Before 2.34 threads are in a separate library.
        let threads = folder.join("libpthread.so.0");
        if threads.exists() {
            fs::copy(threads, copy.path().join("libpthread.so.0")).unwrap();
        }
        Self { folder: copy }
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join(LIBRARY)
    }

    fn loader(&self) -> PathBuf {
        self.folder.path().join(LOADER)
    }
}

/// This machine's build, and [`MORE_BUILDS`].
fn builds() -> Vec<Build> {
    let more = std::env::var_os(MORE_BUILDS);
    let folders = more.iter().flat_map(std::env::split_paths);
    [PathBuf::from(support::build::LIB_DIR)].into_iter().chain(folders).map(|folder| Build::copy_of(&folder)).collect()
}

/// Creating a sandbox needs root.
fn can_isolate() -> bool {
    rustix::process::geteuid().is_root() || support::skip::<()>("a sandbox cannot be created without root").is_some()
}

fn compile(arguments: &[&str], out: &Path) {
    let done =
        Command::new("cc").args(["-O1", "-Wall", "-Wextra", "-Werror", "-nostdlib"]).args(arguments).arg("-o").arg(out).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

fn source(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/selective").join(name).to_str().unwrap().to_owned()
}

/// Links blocks.c to symbols without versions, using stubs of the libraries.
fn link_program(folder: &Path) -> PathBuf {
    let stand_in = |name: &str, functions: &[&str]| {
        let code = folder.join(format!("{name}.c"));
        fs::write(&code, functions.iter().map(|function| format!("void {function}(void) {{}}\n")).collect::<String>()).unwrap();
        let library = folder.join(format!("stand-in-{name}"));
        compile(&["-fno-builtin", "-shared", "-fPIC", &format!("-Wl,-soname,{name}"), code.to_str().unwrap()], &library);
        library.to_str().unwrap().to_owned()
    };
    let library = stand_in(LIBRARY, &["malloc", "calloc", "free", "_exit"]);
    let threads = stand_in("libpthread.so.0", &["pthread_create", "pthread_join"]);
    let program = folder.join("blocks");
    compile(&["-fno-builtin", "-fno-stack-protector", "-fPIE", "-pie", &source("blocks.c"), &library, &threads], &program);
    program
}

/// Uprobes that only count, through the kernel's own interface in tracefs. Removed when dropped.
struct Counters {
    group: String,
    names: Vec<String>,
}

const TRACING: &str = "/sys/kernel/tracing";

/// The list of such probes is global to the machine.
static LIST: Mutex<()> = Mutex::new(());

fn change_list(line: &str) {
    use std::io::Write as _;
    let _one = LIST.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut list = fs::OpenOptions::new().append(true).open(Path::new(TRACING).join("uprobe_events")).unwrap();
    list.write_all(line.as_bytes()).unwrap();
}

impl Counters {
    fn at(file: &Path, offsets: &[u64]) -> Self {
        static NTH: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let nth = NTH.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut counters = Self { group: format!("fragprof_sites_{}_{nth}", std::process::id()), names: Vec::new() };
        for (nth, offset) in offsets.iter().enumerate() {
            let name = format!("{}_{nth}", counters.group);
            change_list(&format!("p:{}/{name} {}:{offset:#x}", counters.group, file.display()));
            counters.names.push(name);
        }
        counters.switch("1");
        counters
    }

    fn switch(&self, to: &str) {
        fs::write(Path::new(TRACING).join("events").join(&self.group).join("enable"), to).unwrap();
    }

    /// Hits so far, by site.
    fn passes(&self) -> Vec<u64> {
        let profile = fs::read_to_string(Path::new(TRACING).join("uprobe_profile")).unwrap();
        let passes_of = |name: &String| {
            // Each line has the file, the name, and the number.
            let words = profile.lines().map(|line| line.split_whitespace().rev().take(2).collect::<Vec<&str>>());
            let [passes, _] = words.into_iter().find(|words| words.get(1) == Some(&&**name)).unwrap()[..] else { panic!("{profile}") };
            passes.parse::<u64>().unwrap()
        };
        self.names.iter().map(passes_of).collect()
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        self.switch("0");
        for name in &self.names {
            change_list(&format!("-:{}/{name}", self.group));
        }
    }
}

/// Hits of the sites of new blocks and of freed ones while the program makes this many rounds.
fn passes(build: &Build, sites: &LargeSites, program: &Path, rounds: u32) -> (u64, u64) {
    let offsets: Vec<u64> = sites.allocs.iter().chain(&sites.frees).map(|site| site.offset).collect();
    let counters = Counters::at(&build.library(), &offsets);
    let mut run = Command::new(build.loader());
    run.arg("--library-path").arg(build.folder.path()).arg(program).arg(rounds.to_string());
    let status = run.status().unwrap();
    assert!(status.success(), "{status}");
    let passes = counters.passes();
    let (allocs, frees) = passes.split_at(sites.allocs.len());
    (allocs.iter().sum(), frees.iter().sum())
}

#[test]
fn the_kernel_counts_each_large_block_once_at_the_sites_and_no_cached_one() {
    let Some(_bpf) = support::bpf() else { return };
    // The program runs the rounds first with one thread, then with two: three times as many.
    const ROUNDS: u32 = 500;
    const LARGE_BLOCKS: u64 = 3 * 16 * ROUNDS as u64;
    for build in builds() {
        let store = tempfile::tempdir().unwrap();
        let sites = find(&build.library(), Some(&build.loader()), Some(store.path())).unwrap();
        let program = link_program(build.folder.path());
        // Blocks of the library itself for a new thread, and the first small blocks, are the same in both.
        let (few, many) = (passes(&build, &sites, &program, 1), passes(&build, &sites, &program, 1 + ROUNDS));
        assert_eq!((many.0 - few.0, many.1 - few.1), (LARGE_BLOCKS, LARGE_BLOCKS), "{sites:x?}");
    }
}

#[test]
fn a_run_finds_the_sites_that_were_found_by_hand_and_those_of_the_shipped_table() {
    if !can_isolate() {
        return;
    }
    for build in builds() {
        let line = try_anew(&build.library(), &build.loader()).unwrap();
        println!("{line}");
        let build_id = line.split(' ').next().unwrap();
        if let Some((_, malloc, free)) = READ_BY_HAND.iter().find(|(known, ..)| *known == build_id) {
            let (_, places) = line.split_once("allocs=").unwrap();
            let (allocs, frees) = places.split_once(" frees=").unwrap();
            let has = |list: &str, vaddr: &u64| list.split(',').any(|place| place.starts_with(&format!("{vaddr:x}:")));
            assert!(has(allocs, malloc) && has(frees, free), "{line}");
        }
        let table = include_str!("../../src/selective/known.txt");
        let known = table.lines().find(|known| known.starts_with(build_id));
        assert!(known.is_none_or(|known| known == line), "the table has {known:?}, a run gives {line}");
    }
}

#[test]
fn a_result_is_stored_for_the_same_file_only_and_is_checked_again_before_use() {
    if !can_isolate() {
        return;
    }
    // An unknown build: one byte after all loaded parts is different.
    let build = Build::copy_of(Path::new(support::build::LIB_DIR));
    let mut bytes = fs::read(build.library()).unwrap();
    bytes.push(0);
    fs::write(build.library(), &bytes).unwrap();
    let store = tempfile::tempdir().unwrap();
    assert!(matches!(find(&build.library(), None, Some(store.path())), Err(NoSites::NoLoader { .. })));
    let found = find(&build.library(), Some(&build.loader()), Some(store.path())).unwrap();
    // Without a loader nothing can be executed, so the stored result is used.
    assert_eq!(find(&build.library(), None, Some(store.path())).unwrap(), found);

    let folder = store.path().join("large-sites");
    let file = fs::read_dir(&folder).unwrap().next().unwrap().unwrap().path();
    let text = fs::read_to_string(&file).unwrap();
    let first = format!("{:x}:", found.allocs[0].vaddr);
    let beside = format!("{:x}:", found.allocs[0].vaddr + 1);
    fs::write(&file, text.replace(&first, &beside)).unwrap();
    assert!(matches!(find(&build.library(), None, Some(store.path())), Err(NoSites::NoLoader { .. })), "a site between two instructions");

    // Another file with the same build id.
    fs::write(&file, text).unwrap();
    bytes.push(0);
    fs::write(build.library(), &bytes).unwrap();
    assert!(matches!(find(&build.library(), None, Some(store.path())), Err(NoSites::NoLoader { .. })));
}

/// Runs the finder with a loader that does `what` (see hostile.c), and returns its error.
fn hostile(what: u32) -> String {
    let folder = tempfile::tempdir().unwrap();
    let loader = folder.path().join("hostile");
    let define = format!("-DWHAT={what}");
    let flags = ["-fPIC", "-shared", "-fno-stack-protector", "-fno-builtin", "-Wl,-e,begin", &define, &source("hostile.c")];
    compile(&flags, &loader);
    let said = try_anew(&Path::new(support::build::LIB_DIR).join(LIBRARY), &loader);
    said.unwrap_err().to_string()
}

#[test]
fn a_hostile_library_can_do_nothing_in_the_sandbox() {
    if !can_isolate() {
        return;
    }
    let said = hostile(0);
    assert!(said.contains("ended with status 0"), "an attempt succeeded: {said}");
    let said = hostile(2);
    assert!(said.contains("executed another program"), "{said}");
    let said = hostile(3);
    assert!(said.contains(&format!("killed by signal {}", libc::SIGSYS)), "{said}");
    let said = hostile(5);
    assert!(said.contains("the scratch process"), "{said}");
    let said = hostile(6);
    assert!(said.contains(&format!("stopped by signal {}", libc::SIGSEGV)), "{said}");
}

#[test]
fn a_hostile_library_gets_no_more_memory_than_a_run_needs() {
    if !can_isolate() {
        return;
    }
    let said = hostile(1);
    let filled: u64 = said.rsplit(' ').next().unwrap().parse().unwrap();
    assert!((1..=64).contains(&filled), "{said}");
}
