//! `fragprof record --in-process`: compared with programs' own ledgers, with a preloaded ledger, and with a recording by probes; and what
//! happens when the reader or the program is killed, or the memory between them is full.

mod attached;
mod cost;
mod ends;
mod stacks;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use crate::sampler::programs::compile;
use crate::support::build::{LIB_DIR, Link, program, tool};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Rendezvous;
use crate::support::report::Since;
use crate::truth::ledger::{Entry, Ledgers};

/// `fragprof record --in-process`, without its command.
fn record() -> Command {
    let mut command = fragprof();
    command.args(["record", "--in-process", "--duration", "300s"]);
    command
}

/// Records a test program to its end, with another allocator if one is given (by name a library of Debian, or by path), and compares the
/// report with the program's own ledger.
fn check(name: &str, args: &[&str], allocator: Option<&str>, except: &[&str]) {
    let mut rendezvous = Rendezvous::new();
    let path = program(name, Link::Dynamic);
    let mut command = record();
    command.env("TRUTH_SOCKET", rendezvous.path());
    if let Some(library) = allocator {
        command.env("LD_PRELOAD", Path::new(LIB_DIR).join(library));
    }
    let target: Vec<_> = std::iter::once(path.as_os_str()).chain(args.iter().map(std::ffi::OsStr::new)).collect();
    let recording = Recording::start(&mut command, &target);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("done", &recording.process);
    rendezvous.go();
    recording.finish().assert_equals_except(&truth, Since::Launch, except);
}

#[test]
fn reports_of_programs_equal_their_own_ledgers() {
    check("entry_points", &[], None, &[]);
    check("realloc_forms", &[], None, &[]);
    check("new_delete", &[], None, &[]);
    check("over_aligned", &[], None, &[]);
    check("nested", &[], None, &[]);
    check("failures", &[], None, &[]);
    check("signal_stacks", &[], None, &[]);
    check("deep_recursion", &[], None, &[]);
}

#[test]
fn reports_of_programs_with_threads_equal_their_own_ledgers() {
    check("many_threads", &[], None, &[]);
    check("cross_thread", &[], None, &[]);
    check("short_threads", &[], None, &[]);
}

#[test]
fn reports_of_programs_with_other_allocators_equal_their_own_ledgers() {
    for library in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        check("realloc_forms", &[], Some(library), &[]);
        check("cross_thread", &[], Some(library), &[]);
    }
}

/// mimalloc has them since 2.2.
#[test]
fn copies_of_strings_by_an_allocators_own_functions_are_recorded() {
    let folder = TempDir::new().unwrap();
    let allocator = compile(folder.path(), "own_strings.c", "cc", &["-shared", "-fPIC"]);
    check("nested", &[], allocator.to_str(), &[]);
}

/// What a command's ledgers say at its end, and the report of its recording.
struct Compared {
    ledgers: Vec<Entry>,
    report: Value,
    _directory: TempDir,
}

/// Records a command whose processes have a ledger preloaded behind the recorder.
fn with_ledgers(command: &[&str], env: &[(&str, &str)], more: &[&str]) -> Compared {
    let directory = TempDir::new().unwrap();
    let out = directory.path().join("out.pb.gz");
    let ledgers = Ledgers::new();
    let mut recorder = record();
    ledgers.prepare(&mut recorder, None, "", false);
    recorder.envs(env.iter().copied()).args(more).arg("-o").arg(&out).arg("--").args(command);
    let done = run(&mut recorder);
    assert!(done.status.success(), "{command:?}: {}\n{}", done.out, done.err);
    let report = report(&out);
    // The recorder's own process has one too.
    let of =
        |entry: &Entry| entry.program() != "fragprof" && entry.program() != Path::new(env!("CARGO_BIN_EXE_fragprof")).file_name().unwrap();
    Compared { ledgers: ledgers.all().into_iter().filter(of).collect(), report, _directory: directory }
}

/// `fragprof report FILE --json`.
fn report(file: &Path) -> Value {
    let done = run(fragprof().arg("report").arg(file).arg("--json"));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

/// Losses that are not zero.
fn losses(report: &Value) -> BTreeMap<String, Value> {
    let all = report["losses"].as_object().unwrap();
    all.iter().filter(|(_, value)| value.as_f64() != Some(0.0)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

impl Compared {
    /// Allocations and bytes of all processes, and live blocks and bytes if there was only one.
    fn assert_equal(&self, what: &str) {
        let sum = |of: fn(&Entry) -> u64| self.ledgers.iter().map(of).sum::<u64>();
        let totals = &self.report["totals"];
        let of = |key: &str| totals[key].as_u64().unwrap();
        assert!(self.ledgers.iter().all(|entry| entry.missed() == 0), "{what}: the ledger is not valid");
        let notes = &self.report["notes"];
        assert_eq!((of("allocations"), of("allocated_bytes")), (sum(Entry::allocations), sum(Entry::bytes)), "{what}: {notes}");
        if self.ledgers.len() == 1 {
            assert_eq!((of("inuse_allocations"), of("inuse_bytes")), (sum(Entry::live_blocks), sum(Entry::live_bytes)), "{what}: {notes}");
        }
        assert_eq!(losses(&self.report), BTreeMap::new(), "{what}");
    }
}

#[test]
fn reports_of_real_programs_equal_a_preloaded_ledger() {
    let script = "my %h; $h{$_} = [1 .. 20] for 1 .. 20000; delete $h{$_} for 1 .. 15000; print scalar(keys %h), qq(\\n)";
    with_ledgers(&["perl", "-e", script], &[("PERL_HASH_SEED", "0")], &[]).assert_equal("perl");
    let sql = "create table t(a, b); with recursive c(x) as (select 1 union all select x + 1 from c where x < 20000) insert into t select x, \
               hex(x) from c; create index i on t(b); select count(*), sum(length(b)) from t;";
    with_ledgers(&["sqlite3", ":memory:", sql], &[], &[]).assert_equal("sqlite3");
    let python = tool("/usr/bin/python3").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    let script = "import json; d = {str(i): [i] * 10 for i in range(20000)}; print(len(json.dumps(d)))";
    with_ledgers(&[python.to_str().unwrap(), "-c", script], &[("PYTHONMALLOC", "malloc")], &[]).assert_equal("python3");
}

#[test]
fn a_compilation_with_all_of_its_processes_equals_their_ledgers() {
    let directory = TempDir::new().unwrap();
    let source = directory.path().join("a.c");
    std::fs::write(&source, "#include <stdio.h>\n#include <stdlib.h>\nint main(void) { printf(\"%d\\n\", rand()); return 0; }\n").unwrap();
    let out = directory.path().join("a");
    let compared = with_ledgers(&["gcc", "-O2", source.to_str().unwrap(), "-o", out.to_str().unwrap()], &[], &[]);
    assert!(compared.ledgers.len() >= 4, "gcc, cc1, as, collect2, ld: {}", compared.ledgers.len());
    compared.assert_equal("gcc");
    assert!(run(&mut Command::new(out)).status.success());
}

#[test]
fn a_recording_without_root_is_the_same() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    let directory = TempDir::new().unwrap();
    let exe = directory.path().join("fragprof");
    // By another process: a child that some other test starts meanwhile would have the copy open for writing, and it could not be executed.
    assert!(run(Command::new("cp").arg(env!("CARGO_BIN_EXE_fragprof")).arg(&exe)).status.success());
    for path in [directory.path(), &exe] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    }
    let recorded = |user: u32| {
        let out = directory.path().join(format!("{user}.pb.gz"));
        let mut command = Command::new(&exe);
        command.uid(user).gid(user).current_dir("/").env("HOME", directory.path()).env("PERL_HASH_SEED", "0").env_remove("XDG_CACHE_HOME");
        command.args(["record", "--in-process", "-o"]).arg(&out).args([
            "--",
            "perl",
            "-e",
            "my @a = map { [$_] } 1 .. 10000; print scalar @a",
        ]);
        let done = run(&mut command);
        assert!(done.status.success(), "{}\n{}", done.out, done.err);
        assert!(done.out.contains("10000"));
        let report = report(&out);
        assert_eq!(losses(&report), BTreeMap::new());
        // Some strings have other lengths: numbers of users and processes.
        ["allocations", "inuse_allocations"].map(|key| report["totals"][key].as_u64().unwrap())
    };
    let (root, nobody) = (recorded(0), recorded(65534));
    assert!(nobody[0] > 10_000, "{nobody:?}");
    assert_eq!(nobody, root);
}

/// Starts a program that says when it is ready, and waits for that.
fn started(options: &[&str], program: &Path, args: &[&str], out: &Path) -> Process {
    let mut command = record();
    command.args(options).arg("-o").arg(out).arg("--").arg(program).args(args);
    Process::start(&mut command)
}
