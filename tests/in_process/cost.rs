//! Nanoseconds of a malloc/free pair when it is recorded: from inside, by probes, and by heaptrack, in turn in one run. This test only
//! measures: `make bench-in-process`.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fragprof::attach::AttachReport;
use fragprof::session::tier::in_process::InProcess;
use fragprof::session::{Choice, Options, Recorder};
use tempfile::TempDir;

use crate::support::build::standalone;
use crate::support::process::{run, wait_until};

/// Rounds of all variants in turn: other load on the machine affects all of them.
const ROUNDS: usize = 5;
/// Pairs of a batch: all events of a run fit into the memory, so that nothing is lost however slow the reader is.
const PAIRS: &str = "100000";
/// Frames between main and the pair.
const DEPTHS: [&str; 2] = ["0", "17"];

/// The program: `tests/in_process/pairs.c`.
fn pairs() -> PathBuf {
    standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/in_process/pairs.c"), &[])
}

/// The minimum of the rounds: disturbances only make a run longer.
fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn written(file: &Path) -> f64 {
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

/// The arguments of a run.
fn arguments(file: &Path, depth: &str, count: &str) -> Vec<std::ffi::OsString> {
    [pairs().into_os_string(), depth.into(), count.into(), file.into()].into()
}

fn bare(file: &Path, depth: &str, variables: &[(&str, &str)]) -> f64 {
    let words = arguments(file, depth, PAIRS);
    let done = run(Command::new(&words[0]).args(&words[1..]).envs(variables.iter().copied()));
    assert!(done.status.success(), "{}", done.err);
    written(file)
}

/// Recorded from inside: nanoseconds per pair, and events lost.
fn inside(file: &Path, depth: &str, no_stacks: bool) -> (f64, u64) {
    let mut recorder = InProcess::new(Options { no_stacks, follow_children: true, ..Options::default() }).unwrap();
    recorder.launch(&arguments(file, depth, PAIRS)).unwrap();
    while recorder.step(std::time::Duration::from_millis(100)) {}
    let profile = recorder.finish().unwrap();
    let lost = profile.meta.losses.iter().filter(|loss| loss.name.starts_with("lost_")).map(|loss| loss.value).sum();
    (written(file), lost)
}

/// The same in a process that runs, to which the library was attached.
fn attached(file: &Path, depth: &str, no_stacks: bool) -> (f64, u64) {
    let words = arguments(file, depth, PAIRS);
    let mut child = Command::new(&words[0]).args(&words[1..]).arg("wait").stdin(Stdio::piped()).spawn().unwrap();
    let options = || Options { no_stacks, ..Options::default() };
    let mut begun = None;
    wait_until("the program waits", || {
        let process = fragprof::process::Process::open(fragprof::units::Pid(child.id())).unwrap();
        let mut report = AttachReport::of(&process);
        begun = InProcess::attach(options(), process, None, &mut report).ok();
        begun.is_some()
    });
    let mut recorder = begun.unwrap();
    drop(child.stdin.take());
    while recorder.step(std::time::Duration::from_millis(100)) {}
    assert!(child.wait().unwrap().success());
    let profile = recorder.finish().unwrap();
    let lost = profile.meta.losses.iter().filter(|loss| loss.name.starts_with("lost_")).map(|loss| loss.value).sum();
    (written(file), lost)
}

fn by_probes(file: &Path, depth: &str, no_stacks: bool) -> f64 {
    let mut recorder = Recorder::new(Options { no_stacks, source: Choice::Functions, ..Options::default() }).unwrap();
    recorder.launch(&arguments(file, depth, "30000")).unwrap();
    while recorder.step(std::time::Duration::from_millis(100)) {}
    recorder.finish().unwrap();
    written(file)
}

#[test]
#[ignore = "a measurement: make bench-in-process"]
fn a_pair_recorded_from_inside_by_probes_and_by_heaptrack() {
    let directory = TempDir::new().unwrap();
    let file = directory.path().join("ns");
    let heaptrack = ["/usr/lib/heaptrack/libheaptrack_preload.so", "/usr/lib/x86_64-linux-gnu/heaptrack/libheaptrack_preload.so"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    println!("nanoseconds of CPU time per malloc/free pair, the least of {ROUNDS} rounds");
    for depth in DEPTHS {
        let frames = depth.parse::<u32>().unwrap() + 4;
        let mut of: [Vec<f64>; 8] = Default::default();
        let mut lost = 0;
        for _ in 0..ROUNDS {
            of[0].push(bare(&file, depth, &[]));
            for (index, no_stacks) in [(1, true), (2, false)] {
                let (ns, more) = inside(&file, depth, no_stacks);
                of[index].push(ns);
                lost += more;
            }
            for (index, no_stacks) in [(6, true), (7, false)] {
                let (ns, more) = attached(&file, depth, no_stacks);
                of[index].push(ns);
                lost += more;
            }
            of[3].push(by_probes(&file, depth, true));
            of[4].push(by_probes(&file, depth, false));
            if let Some(library) = heaptrack {
                of[5].push(bare(&file, depth, &[("LD_PRELOAD", library), ("DUMP_HEAPTRACK_OUTPUT", "/dev/null")]));
            }
        }
        let [bare, plain, stacks, probes, probes_stacks, heaptrack, attached, attached_stacks] = of.each_ref().map(|all| least(all));
        println!("{frames} frames: not recorded {bare:.0} ns");
        println!("  from inside:  without stacks {plain:.0} ns, with {stacks:.0} ns; {lost} events lost in all rounds");
        println!("  attached:     without stacks {attached:.0} ns, with {attached_stacks:.0} ns");
        println!(
            "  by probes:    without stacks {probes:.0} ns, with {probes_stacks:.0} ns: {:.0} and {:.0} times as much",
            probes / plain,
            probes_stacks / stacks
        );
        if heaptrack.is_finite() {
            println!("  heaptrack:    with stacks {heaptrack:.0} ns: {:.1} times as much", heaptrack / stacks);
        } else {
            println!("  heaptrack is not installed");
        }
    }
}
