//! What is written in the process: after detaching, every byte of its writable files' mappings is what it was, and every permission.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::{attaching, detaching, done};
use crate::emitter::report::Estimates;
use crate::sampler::programs::Libraries;
use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::Process;
use crate::support::recording::{Recording, fragprof};

/// The mappings of files, except the sampler's library: permissions and contents of the private ones. What the C library and the dynamic
/// linker write themselves (their lists, `malloc`'s state) lies in the same mappings, so only what the words of other objects are is
/// compared: the read-only data after relocation of all, and all data of those that are neither.
fn memory(pid: u32) -> BTreeMap<String, Vec<u8>> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut found = BTreeMap::new();
    for line in maps.lines().filter(|line| line.contains('/') && !line.contains("libfragprof_")) {
        let (range, rest) = line.split_once(' ').unwrap();
        let permissions = &rest[..4];
        let (start, end) = range.split_once('-').unwrap();
        let hex = |text| u64::from_str_radix(text, 16).unwrap();
        let is_own = ["/libc.so", "/ld-linux"].iter().any(|name| line.contains(name));
        let mut bytes = Vec::new();
        if permissions == "r--p" || (permissions.starts_with("rw") && !is_own) {
            bytes.resize((hex(end) - hex(start)) as usize, 0);
            memory.read_exact_at(&mut bytes, hex(start)).unwrap();
        }
        found.insert(line.to_owned(), bytes);
    }
    found
}

/// Words that differ, by mapping.
fn different(before: &BTreeMap<String, Vec<u8>>, after: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>(), "mappings and permissions");
    let words = |name: &String, old: &[u8]| {
        let new = &after[name];
        let count = old.chunks(8).zip(new.chunks(8)).filter(|(old, new)| old != new).count();
        (count > 0).then(|| format!("{count} words in {name}"))
    };
    before.iter().filter_map(|(name, old)| words(name, old)).collect()
}

#[test]
fn after_detaching_no_word_of_the_process_is_changed() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    // They wait, so that whatever changes was changed by the command.
    let waits = [
        ("perl", vec!["-e", "$| = 1; print \"ready\\n\"; <STDIN>;"]),
        ("python3", vec!["-c", "import ssl, sqlite3, sys; print('ready', flush=True); sys.stdin.readline()"]),
        ("ruby", vec!["-e", "puts 'ready'; $stdout.flush; gets"]),
        ("sqlite3", vec!["-cmd", "select 'ready';"]),
    ];
    let mut programs = 0;
    for (name, arguments) in waits {
        let Some(program) = tool(name) else { continue };
        let mut process = Process::start_piped(Command::new(program).args(arguments));
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap_or_else(|| panic!("{name}: {}", process.err));
        // The shell of sqlite3 reads on after the line.
        crate::support::process::wait_until("it waits", || {
            std::fs::read_to_string(format!("/proc/{}/syscall", process.pid())).is_ok_and(|text| !text.starts_with("running"))
        });
        let pid = process.pid();
        let before = memory(pid);
        for round in 0..3 {
            let attached = done(&attaching(pid, &library, 4096))["state"]["words"].as_u64().unwrap();
            let changed = different(&before, &memory(pid));
            assert!(attached > 0 && !changed.is_empty(), "{name}");
            let detached = done(&detaching(pid));
            assert_eq!(detached["state"]["put_back"], attached, "{name}: {detached}");
            assert_eq!(different(&before, &memory(pid)), [""; 0], "{name}, round {round}");
        }
        drop(process.input());
        assert!(process.wait(LIMIT).success(), "{name}: {}", process.err);
        programs += 1;
    }
    assert!(programs >= 2);
}

/// A recording that listens when the sampler is detached keeps no block that is freed afterwards, and says why.
#[test]
fn blocks_freed_after_detaching_are_not_live_for_who_listened() {
    if crate::support::bpf().is_none() {
        return;
    }
    let libraries = Libraries::new();
    let Some(perl) = tool("perl") else { return };
    // It holds 20 MB when it is told to, and frees them.
    let script = "$| = 1; print \"ready\\n\"; while (<STDIN>) { if (/hold/) { push @b, 'x' x 1e4 for 1..2000 } else { undef @b } print \"done\\n\" }";
    let mut process = Process::start_piped(Command::new(perl).args(["-e", script]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let pid = process.pid();
    done(&attaching(pid, &libraries.path(Flavour::Attached), 4096));
    let recording = Recording::attach_by(fragprof(), &[pid], &["--mode", "sampled"]);
    let mut input = process.input();
    let mut tell = |word: &str, answer: usize| {
        writeln!(input, "{word}").unwrap();
        process.out.nth(answer, LIMIT).unwrap_or_else(|| panic!("{}", process.err));
    };
    tell("hold", 1);
    done(&detaching(pid));
    tell("free", 2);
    let report = Estimates::of(recording);
    let live = report.of_process("inuse_bytes", pid).est;
    assert!(live < 2e6, "{live}");
    let notes = report.0["processes"].to_string() + &report.0["notes"].to_string();
    assert!(notes.contains("the sampler was detached meanwhile"), "{notes}");
}
