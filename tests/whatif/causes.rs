//! What `--without` and `report --by pinned --trace` say of a stack's blocks, against the program really run without the statement that
//! makes them.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::truth::Measured;
use super::{Recorded, figure, fragprof, report};
use crate::support::bpf;
use crate::support::build::{Link, program, script};

/// Runs of each program; their mean is the truth.
const RUNS: u64 = 2;

/// A program, the same with a statement left out, and the function that makes the statement's blocks.
struct Patched {
    recorded: Recorded,
    patched: Recorded,
    function: &'static str,
}

impl Patched {
    fn pins(directory: &TempDir) -> Self {
        let patched = directory.path().join("patched");
        let built = Command::new("cc").args(["-O2", "-g", "-DPATCHED", "-o"]).arg(&patched).arg(script("whatif_pins.c")).status();
        assert!(built.unwrap().success());
        let patched = Recorded::new("pins", &[patched.to_str().unwrap()], &[]);
        Self { recorded: Recorded::own("pins", "whatif_pins"), patched, function: "take_note" }
    }

    fn python() -> Self {
        const WORK: &str = "import time\nlog, cache = [], []\n\
            def remember(i):\n    log.append(('entry %d ' % i) * 6)\n\
            def load(i):\n    cache.append(bytes(1700 + i % 5 * 100))\n\
            for i in range(16000):\n    load(i)\n    remember(i)\n\
            cache.clear()\nfor i in range(2000):\n    load(i)\ntime.sleep(1)\n";
        let of = |work: &str| Recorded::new("python", &["python3", "-c", work], &[("PYTHONMALLOC", "malloc"), ("PYTHONHASHSEED", "0")]);
        Self { recorded: of(WORK), patched: of(&WORK.replace("    remember(i)\nc", "c")), function: "remember" }
    }

    fn perl() -> Self {
        const WORK: &str = "my (@log, @cache); for my $i (1..16000) { $cache[$i] = 'x' x (500 + $i % 7 * 100); push @log, sprintf('%0700d', $i); } \
            @cache = (); for my $i (1..2000) { $cache[$i] = 'y' x 900 } select undef, undef, undef, 1;";
        let of = |work: &str| Recorded::new("perl", &["perl", "-e", work], &[]);
        Self { recorded: of(WORK), patched: of(&WORK.replace(" push @log, sprintf('%0700d', $i);", "")), function: "Perl_pp_sprintf" }
    }
}

fn mean_end_bytes(recorded: &Recorded) -> f64 {
    let ends: u64 = (0..RUNS).map(|_| Measured::of(&mut recorded.command()).end_bytes).sum();
    ends as f64 / RUNS as f64
}

#[test]
fn what_a_stacks_blocks_cost_is_what_the_program_saves_that_is_run_without_them() {
    if bpf().is_none() {
        return;
    }
    let built = TempDir::new().unwrap();
    for Patched { recorded, patched, function } in [Patched::pins(&built), Patched::python(), Patched::perl()] {
        if !recorded.is_installed() {
            continue;
        }
        assert_ne!(recorded.command, patched.command);
        let directory = tempfile::tempdir().unwrap();
        let trace = recorded.record(&directory);
        let report = report(&trace, &["--without", function, "--under", "glibc"]);
        let cause = &report["causes"][0];
        let predicted = figure(&cause["without"], "end_bytes");
        let truth = mean_end_bytes(&recorded) - mean_end_bytes(&patched);
        let error = (predicted / truth - 1.0) * 100.0;
        println!(
            "{}: without {function}: {:.1} MiB saved, {error:+.1} % of what the patched program saves; pinned {}",
            recorded.name,
            predicted / f64::from(1 << 20),
            cause["pinned_bytes"]
        );
        // Each saves much: otherwise the comparison would be one of noise.
        assert!(truth > f64::from(3 << 20) && error.abs() < 15.0, "{}: {predicted} against {truth}", recorded.name);
    }
}

#[test]
fn the_report_shows_what_would_be_saved_without_the_stacks_that_pin() {
    if bpf().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let [trace, profile] = ["trace.fpt", "profile.pb.gz"].map(|name| directory.path().join(name));
    // It waits at its end: only the heap of a process that is there has pinned bytes.
    let mut command = fragprof();
    command
        .args(["record", "--trace"])
        .arg(&trace)
        .arg("-o")
        .arg(&profile)
        .arg("--")
        .arg(program("whatif_pins", Link::Dynamic))
        .arg("wait");
    let mut recorder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let input = recorder.stdin.take();
    let mut line = String::new();
    BufReader::new(recorder.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line.trim(), "done");
    kill_process(Pid::from_child(&recorder), Signal::INT).unwrap();
    assert!(recorder.wait().unwrap().success());
    drop(input);
    let run = |more: &[&str]| {
        let done = fragprof().arg("report").arg(&profile).args(["--trace"]).arg(&trace).args(more).output().unwrap();
        (done.status.code(), String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr).unwrap())
    };
    let (status, text, error) = run(&["--by", "pinned", "--top", "2"]);
    assert_eq!(status, Some(0), "{error}");
    assert!(text.contains("WITHOUT IT") && text.contains("take_note"), "{text}");
    let (_, json, error) = run(&["--by", "pinned", "--top", "2", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap_or_else(|_| panic!("{error}"));
    let rows = json["without"]["rows"].as_array().unwrap();
    let notes = rows.iter().find(|row| row["functions"][0] == "take_note").unwrap_or_else(|| panic!("{rows:?}"));
    // The notes' own blocks are 20000 × 64 bytes; the pages that they pin are most of 20000 × 2.3 KiB.
    assert!(figure(&notes["saved"], "end_bytes") > 20e6 && figure(notes, "pinned_bytes") > 20e6, "{notes}");
    assert_eq!(run(&["--by", "live"]).0, Some(2));
}
