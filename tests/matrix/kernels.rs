//! Tests for each kernel of `make kernel-matrix` in addition to those of the other modules: windows and an emitter. Ignored, because other
//! tests cover both in more detail on the machine itself; these need only a compiled program, and little time.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use fragprof::heap::residency::page_bytes;
use serde_json::Value;

use crate::support::build::{Link, program};
use crate::support::process::run;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::{LIMIT, bpf, serial};

pub(super) fn report(file: &Path, by: &str) -> Value {
    let done = run(fragprof().arg("report").arg(file).args(["--by", by, "--json"]));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

/// Sum of a key over the stacks that go through a function.
pub(super) fn sum(report: &Value, function: &str, key: &str) -> f64 {
    let through = |stack: &&Value| stack["frames"].as_array().is_some_and(|frames| frames.iter().any(|f| f["function"] == function));
    report["stacks"].as_array().unwrap().iter().filter(through).filter_map(|stack| stack[key].as_f64()).sum()
}

#[test]
#[ignore = "for other kernels: make kernel-matrix"]
fn windows_show_which_stacks_allocate() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    let mut command = fragprof();
    // In emulation the trial of large blocks costs a hundred times as much as on a CPU, and its debt would delay the windows.
    command.args(["record", "--mode", "governed", "--no-large-blocks", "--budget", "5%", "--duration", "300s"]);
    let recording = Recording::start(command.args(["-p", &target.pid().to_string()]), &[]);
    recording.wait_until_attached(1);
    // Rounds until some of them fall into windows, of which the older ways of attaching allow few: at 1 % there may be one.
    let began = Instant::now();
    let mut rounds = 0;
    while rounds < 20 || began.elapsed().as_secs() < 20 {
        target.go_to("round");
        rounds += 1;
    }
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err);
    let report = report(&recording.file(), "survivors");
    assert_eq!(report["mode"], "governed");
    let losses: Vec<_> = report["losses"].as_object().unwrap().iter().filter(|(_, lost)| lost.as_u64() != Some(0)).collect();
    assert!(losses.is_empty(), "{losses:?}");
    // Each of the two allocates nearly half of the blocks: site_zeroed if one bit of a random number is set.
    let is_bound = report["governed"][0]["rates_are_lower_bounds"] == true;
    let key = if is_bound { "allocations_min" } else { "allocations_est" };
    let (plain, zeroed) = (sum(&report, "site_round", key), sum(&report, "site_zeroed", key));
    assert!(plain > 0.0 && (0.5..2.0).contains(&(zeroed / plain)), "{plain} and {zeroed}: {}", report["governed"]);
}

#[test]
#[ignore = "for other kernels: make kernel-matrix"]
fn first_touches_of_pages_have_their_stack() {
    const ROUNDS: u32 = 12;
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut Command::new(program("first_touches", Link::Dynamic)));
    let mut command = fragprof();
    command.args(["record", "--mode", "governed", "--no-large-blocks", "--budget", "1%", "--duration", "300s"]);
    let mut recording = Recording::start(command.args(["-p", &target.pid().to_string()]), &[]);
    recording.wait_until_attached(1);
    for _ in 0..ROUNDS {
        target.go_to("round");
    }
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err);
    let report = report(&recording.file(), "survivors");
    // One touch in 64 is sampled: of 49,152 pages of 4 KiB some 768, with a standard error of 4 %.
    let touched = f64::from(ROUNDS) * f64::from(16 << 20);
    let error = (64.0 * page_bytes() as f64 / touched).sqrt();
    let share = sum(&report, "site_touch", "touched_bytes_est") / touched;
    println!("{share:.3} of the touches, with a standard error of {error:.3}");
    assert!((share - 1.0).abs() < 5.0 * error, "{share} ± {error}: {}", report["governed"]);
}

#[test]
#[ignore = "for other kernels: make kernel-matrix"]
fn a_program_with_the_sampler_reports_its_own_ledger() {
    if bpf().is_none() {
        return;
    }
    let mut rendezvous = Rendezvous::new();
    let rounds = program("rounds", Link::Dynamic);
    let mut command = fragprof();
    command.args(["record", "--duration", "300s"]).env("TRUTH_SOCKET", rendezvous.path());
    let words = ["run", "--sample-bytes", "1", "--"].map(OsStr::new);
    let own = OsStr::new(env!("CARGO_BIN_EXE_fragprof"));
    let target: Vec<&OsStr> = std::iter::once(own).chain(words).chain([rounds.as_os_str()]).collect();
    let mut recording = Recording::start(&mut command, &target);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("round", &recording.process);
    recording.process.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err);
    let report = report(&recording.file(), "live");
    if report["mode"] == "exact" {
        // A kernel on which emitters cannot be heard: every call is traced instead, and the reason is given.
        assert!(report["notes"].to_string().contains("is ignored, because this kernel"), "{}", report["notes"]);
        println!("skipped: this kernel's programs do not listen to emitters; the calls were traced");
        return;
    }
    assert_eq!(report["mode"], "sampled", "{report}");
    for site in &truth.sites {
        // One sample per byte: the estimate equals the ledger.
        assert_eq!(sum(&report, &site.site, "inuse_bytes_est") as u64, site.live_bytes, "{}", site.site);
    }
}

#[test]
#[ignore = "for a kernel that is locked down: make kernel-matrix"]
fn a_locked_down_kernel_is_reported_and_the_program_continues() {
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    target.go_to("round");
    for mode in ["exact", "governed"] {
        let done = run(fragprof().args(["record", "--mode", mode, "--duration", "1s", "-p", &target.pid().to_string()]));
        assert!(!done.status.success(), "{}", done.err);
        assert!(done.err.contains("locked down for confidentiality"), "{}", done.err);
    }
    let done = run(fragprof().args(["census", &target.pid().to_string(), "--json"]));
    assert!(done.status.success(), "{}", done.err);
    let page: Value = serde_json::from_str(&done.out).unwrap();
    assert!(page["heaps"][0]["live_allocations"].as_u64() >= Some(4000), "{page}");
    target.go_to("round");
}
