//! `fragprof record --in-process -p PID`: the library attached to a process that runs, and taken away at the end.

use std::process::Command;

use fragprof::sampler::library::Flavour;
use serde_json::Value;

use crate::emitter::report::Estimates;
use crate::emitter::strata::{SAMPLE_BYTES, Service};
use crate::sampler::programs::Libraries;
use crate::support::build::{LIB_DIR, Link, program};
use crate::support::process::{run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::trim::made;

/// Attaches, again for as long as no thread of the process waits.
fn attach(pid: u32, options: &[&str]) -> Recording {
    let mut recording = None;
    wait_until("a thread of the program waits", || {
        let mut command = fragprof();
        command.args(["record", "--in-process", "--duration", "300s", "-p", &pid.to_string()]).args(options);
        let mut started = Recording::start(&mut command, &[]);
        let said = |line: &str| line.contains("from inside");
        let begun = started.process.err.wait_for(crate::support::LIMIT, said).is_some();
        let refused = !begun && started.process.err.all().contains("no_parked");
        assert!(begun || refused || started.process.err.all().contains("thread"), "{}", started.process.err);
        if !begun {
            started.wait(crate::support::LIMIT);
            return false;
        }
        recording = Some(started);
        true
    });
    recording.unwrap()
}

/// Words that lead to the recorder's library.
fn words(pid: u32) -> Option<u64> {
    let said = run(fragprof().args(["attach-sampler", "--detach", &pid.to_string(), "--dry-run", "--json"]));
    let report: Value = serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{error}: {}", said.err));
    report["state"]["words"].as_u64().filter(|&words| words > 0)
}

fn check(name: &str, arguments: &[&str], allocator: Option<&str>) {
    let mut command = Command::new(program(name, Link::Dynamic));
    if let Some(library) = allocator {
        command.env("LD_PRELOAD", format!("{LIB_DIR}/{library}"));
    }
    let mut target = Target::start(command.args(arguments));
    let recording = attach(target.pid(), &[]);
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
    assert_eq!(words(target.pid()), None, "the library was taken away");
    target.rendezvous.go();
    assert!(target.process.wait(crate::support::LIMIT).success(), "{}", target.process.err);
}

#[test]
fn reports_of_attached_programs_equal_their_own_ledgers() {
    for name in ["entry_points", "realloc_forms", "new_delete", "nested", "failures"] {
        check(name, &[], None);
    }
}

#[test]
fn reports_of_attached_programs_with_threads_equal_their_own_ledgers() {
    for name in ["many_threads", "cross_thread", "short_threads"] {
        check(name, &[], None);
    }
}

#[test]
fn reports_of_attached_programs_with_other_allocators_equal_their_own_ledgers() {
    for library in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        check("realloc_forms", &[], Some(library));
        check("cross_thread", &[], Some(library));
    }
}

/// Stacks and bytes of one kind of recording.
fn live(report: &Value, pid: u32) -> f64 {
    let stacks = report["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == pid);
    let is_rest = |name: &str| ["[before attach]", "[unattributed]"].contains(&name);
    stacks
        .filter(|stack| !stack["frames"][0]["function"].as_str().is_some_and(is_rest))
        .map(|stack| stack["inuse_bytes"].as_f64().unwrap_or(0.0))
        .sum()
}

/// Real programs, recorded from inside and by probes in the same run.
#[test]
fn real_programs_are_recorded_from_inside_as_by_probes() {
    for name in ["redis", "python", "java", "postgres"] {
        let Some(mut service) = Service::start(name, false) else { continue };
        let pid = service.process.pid();
        service.work();
        let from_inside = attach(pid, &[]);
        let by_probes = Recording::attach_by(fragprof(), &[pid], &["--mode", "exact"]);
        for _ in 0..2 {
            service.work();
        }
        let (by_probes, from_inside) = (Estimates::of(by_probes).0, Estimates::of(from_inside).0);
        let (probes, inside) = (live(&by_probes, pid), live(&from_inside, pid));
        println!("{name}: {:.3} MB from inside, {:.3} MB by probes", inside / 1e6, probes / 1e6);
        assert!(inside > 500_000.0 && (inside - probes).abs() < 0.02 * probes, "{name}: {inside} {probes}");
        let lost: Vec<&Value> = from_inside["losses"].as_object().unwrap().values().filter(|value| value.as_u64() != Some(0)).collect();
        assert!(lost.is_empty(), "{name}: {}", from_inside["losses"]);
        service.work();
    }
}

/// A recording whose command is killed leaves a process that goes on; the next one takes over once it is known to be gone.
#[test]
fn a_killed_recording_leaves_a_process_that_goes_on() {
    let mut target = Target::start(&mut Command::new(program("cross_thread", Link::Dynamic)));
    let mut recording = attach(target.pid(), &[]);
    recording.process.signal(rustix::process::Signal::KILL);
    recording.wait(crate::support::LIMIT);
    assert!(words(target.pid()).is_some_and(|words| words > 0));
    target.go_to("done");
    let report = made(&["attach-sampler", "--detach", &target.pid().to_string()].map(str::to_owned));
    assert!(report["refused"].is_null(), "{report}");
    assert_eq!(words(target.pid()), None);
    target.rendezvous.go();
    assert!(target.process.wait(crate::support::LIMIT).success(), "{}", target.process.err);
}

/// The sampler and a recording are not in one process at a time.
#[test]
fn a_process_with_the_sampler_is_refused_and_a_recorded_one_too() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Attached);
    let target = crate::trim::Target::in_state("plain", 16, 0);
    let attaching = crate::attach::attaching(target.pid(), &library, SAMPLE_BYTES);
    crate::attach::done(&attaching);
    let record = || {
        run(fragprof()
            .args(["record", "--in-process", "--duration", "1s", "-p", &target.pid().to_string(), "-o"])
            .arg(libraries.folder().join("one.pb.gz")))
    };
    let refused = record();
    assert_eq!(refused.status.code(), Some(3), "{}", refused.err);
    assert!(refused.err.contains("libfragprof_attached.so is attached to it"), "{}", refused.err);
    crate::attach::done(&crate::attach::detaching(target.pid()));
    let recording = attach(target.pid(), &[]);
    assert_eq!(crate::attach::settled(&attaching)["refused"], "in_use");
    let second = record();
    assert!(second.err.contains("another recording takes its events"), "{}", second.err);
    recording.stop();
    let again = record();
    assert!(again.status.success(), "{}", again.err);
    target.end();
}

/// A trace of a process that ran before begins with its heap.
#[test]
fn a_trace_from_inside_begins_with_the_heap_from_before() {
    let Some(mut service) = Service::start("python", false) else { return };
    service.work();
    let folder = tempfile::TempDir::new().unwrap();
    let trace = folder.path().join("one.trace");
    let recording = attach(service.process.pid(), &["--trace", trace.to_str().unwrap()]);
    service.work();
    recording.stop();
    let replayed = run(fragprof().arg("whatif").arg(&trace).args(["--json", "--under", "jemalloc"]));
    assert!(replayed.status.success(), "{}", replayed.err);
    let replayed: Value = serde_json::from_str(&replayed.out).unwrap();
    assert_eq!(replayed["trace"]["is_from_start"], false);
    assert!(replayed["notes"].to_string().contains("from before are made at the beginning"), "{replayed}");
    let error = replayed["calibration"]["resident_error_ratio"].as_f64().unwrap();
    assert!(error.abs() < 0.06, "{}", replayed["calibration"]);
}

/// Recordings of real programs that work meanwhile, every other one killed at some moment: the programs go on, and the last recording
/// equals one by probes. `make faults-attach` makes more of them.
#[test]
fn real_programs_go_on_after_recordings_and_killed_ones() {
    let rounds = crate::trim::programs::number("FRAGPROF_RECORDINGS", 6);
    for name in ["redis", "python", "java", "postgres"] {
        let Some(mut service) = Service::start(name, false) else { continue };
        let pid = service.process.pid();
        let folder = tempfile::TempDir::new().unwrap();
        let ended = std::sync::atomic::AtomicBool::new(false);
        let (mut begun, mut killed) = (0, 0);
        std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                    service.work();
                    // Programs of one thread can be made to call something only while they wait.
                    std::thread::sleep(std::time::Duration::from_millis(200));
                }
            });
            for round in 0..rounds {
                let mut command = fragprof();
                command.args(["record", "--in-process", "-p", &pid.to_string(), "-d", "300ms", "-o"]);
                let mut child = command.arg(folder.path().join("one.pb.gz")).stderr(std::process::Stdio::null()).spawn().unwrap();
                if round % 2 == 1 {
                    // From before the library is loaded until after it was taken away.
                    std::thread::sleep(std::time::Duration::from_millis(u64::from(round * 37 % 500)));
                    killed += u32::from(child.try_wait().unwrap().is_none());
                    let _ = child.kill();
                }
                begun += u32::from(child.wait().unwrap().success());
                // Otherwise the next one is refused until it is known that nobody reads any more.
                if words(pid).is_some() {
                    made(&["attach-sampler", "--detach", &pid.to_string()].map(str::to_owned));
                }
            }
            ended.store(true, std::sync::atomic::Ordering::Relaxed);
            work.join().unwrap_or_else(|_| panic!("{name} did not go on"));
        });
        println!("{name}: {rounds} recordings, {begun} written, {killed} killed");
        assert!(begun > 0, "{name}: none of {rounds} recordings was made");
        // The call that a killed command had begun in the program ends when the program gets to run.
        service.work();
        if words(pid).is_some() {
            crate::attach::done(&crate::attach::detaching(pid));
        }
        service.work();
        assert_eq!(words(pid), None, "{name}");
    }
}
