//! Traces of processes that ran before: their heap is made from the census at the start of the recording.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::truth::Measured;
use super::{figure, fragprof, of, report};
use crate::support::bpf;
use crate::support::build::{LIB_DIR, tool};
use crate::support::recording::Recording;

/// An interpreter with a heap full of holes, which waits, works on it for some seconds, and waits again.
const PYTHON: &str = "
import random, sys, time
random.seed(1)
kept = {}
for i in range(160000):
    kept[i % 40000] = bytes(random.randrange(20, 2000))
for i in range(40000):
    if i % 3: kept.pop(i, None)
print('ready', flush=True)
sys.stdin.readline()
for turn in range(40):
    for i in range(2000):
        kept[random.randrange(50000)] = bytes(random.randrange(20, 2500))
    for i in range(1000):
        kept.pop(random.randrange(50000), None)
    time.sleep(0.08)
print('done', flush=True)
sys.stdin.readline()
";

const PERL: &str = "
$| = 1; srand(1); my %h;
for my $i (1..200000) { $h{$i % 50000} = 'x' x int(rand(900)) }
for my $i (1..50000) { delete $h{$i} if $i % 3 }
print \"ready\\n\"; <STDIN>;
for my $turn (1..40) {
    for (1..3000) { $h{int(rand(60000))} = 'y' x int(rand(1200)) }
    for (1..1500) { delete $h{int(rand(60000))} }
    select undef, undef, undef, 0.08;
}
print \"done\\n\"; <STDIN>;
";

struct Running {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Running {
    fn start(program: &[&str], preload: Option<&str>) -> Self {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).env("PYTHONMALLOC", "malloc").env("PYTHONHASHSEED", "0").env("PERL_HASH_SEED", "0");
        if let Some(library) = preload {
            command.env("LD_PRELOAD", library);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut running = Self { child, input, output };
        running.wait_for("ready");
        running
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn go(&mut self) {
        writeln!(self.input).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Records the working part of a program and reports what its trace says under two other settings.
fn recorded(name: &str, program: &[&str]) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace.fpt");
    let mut running = Running::start(program, None);
    let options = ["--trace", trace.to_str().unwrap()];
    let recording = Recording::attach_by(fragprof(), &[running.child.id()], &options);
    running.go();
    running.wait_for("done");
    drop(recording.stop());
    let report = report(&trace, &["--under", "jemalloc", "--under", "tcmalloc"]);
    println!("{name}: {}, {}", report["calibration"], report["notes"]);
    report
}

#[test]
fn a_process_that_ran_before_is_replayed_with_the_heap_that_it_had() {
    if bpf().is_none() {
        return;
    }
    for (name, program) in [("python", ["python3", "-c", PYTHON]), ("perl", ["perl", "-e", PERL])] {
        if tool(program[0]).is_none() {
            continue;
        }
        let report = recorded(name, &program);
        // Some seconds of a process that goes on: no whole cycle of anything.
        assert_eq!(report["enough"]["is_enough"], false, "{}", report["enough"]);
        assert_eq!(report["trace"]["is_from_start"], false);
        assert!(report["notes"].to_string().contains("from before are made at the beginning"), "{report}");
        let error = figure(&report["calibration"], "resident_error_ratio") * 100.0;
        assert!(error.abs() < 6.0, "{name}: {error} %: {}", report["calibration"]);
        for (setting, library) in [("jemalloc", "libjemalloc.so.2"), ("tcmalloc", "libtcmalloc_minimal.so.4")] {
            let predicted = of(&report, setting);
            if let Some(reason) = predicted["failed"].as_str() {
                println!("{name}: {setting}: {reason}");
                continue;
            }
            let mut running = Running::start(&program, Some(&format!("{LIB_DIR}/{library}")));
            let pid = running.child.id();
            running.go();
            let truth = std::thread::scope(|scope| {
                let done = scope.spawn(|| running.wait_for("done"));
                Measured::while_it_runs(pid, || !done.is_finished())
            });
            let (mean, around) = (figure(predicted, "mean_bytes"), figure(predicted, "uncertain_ratio") * 100.0);
            let error = (mean / truth.mean_bytes as f64 - 1.0) * 100.0;
            println!("{name}: {setting}: mean {error:+.1} % ± {around:.1} % of {truth:?}; {}", predicted["before_ratio"]);
            assert!(error.abs() <= around, "{name}: {setting}: {error:+.1} % is outside ± {around:.1} %");
        }
    }
}
