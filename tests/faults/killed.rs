//! Recorders, agents and targets killed at random moments.

use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::{Churn, Moments};
use crate::support::build::{Link, program};
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::Report;
use crate::support::{LIMIT, bpf, serial};

/// From before the programs are loaded until well into the recording.
const SPAN: Duration = Duration::from_millis(900);

fn kill_recorders(times: usize) {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut churn = Churn::start();
    let mut moments = Moments::new();
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("out.pb.gz");
    for time in 0..times {
        let mut recorder = Process::start(fragprof().args(["record", "-d", "60s", "-p", &churn.pid().to_string(), "-o"]).arg(&out));
        std::thread::sleep(moments.within(SPAN));
        recorder.signal(Signal::KILL);
        recorder.wait(LIMIT);
        churn.assert_alive();
        churn.assert_unprobed();
        // The output is absent or complete, never half a profile.
        if out.exists() {
            assert!(run(fragprof().arg("report").arg(&out)).status.success(), "kill {time} left half a profile");
        }
    }
    // The kernel's state is unchanged: the next recording is correct.
    let recording = Recording::attach(&[churn.pid()]);
    let truth = churn.stop();
    let report = recording.stop();
    let kept = truth.sites.iter().find(|site| site.site == "site_kept").unwrap();
    let seen = report.by_site(churn.pid());
    assert_eq!(seen["site_kept"].inuse_bytes, kept.live_bytes);
    assert_eq!(report.nonzero_losses(), Vec::<String>::new());
}

fn kill_targets(times: usize) {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut moments = Moments::new();
    for time in 0..times {
        let mut churn = Churn::start();
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("out.pb.gz");
        let mut recorder = Process::start(fragprof().args(["record", "-d", "60s", "-p", &churn.pid().to_string(), "-o"]).arg(&out));
        std::thread::sleep(moments.within(SPAN));
        churn.target.process.signal(Signal::KILL);
        churn.target.process.wait(LIMIT);
        let status = recorder.wait(LIMIT);
        let said = recorder.err.all();
        assert!(!said.contains("panicked"), "{said}");
        match status.code() {
            Some(0) => {
                Report::read(&out);
            }
            // It ended before anything was recorded, and the message names the process.
            Some(_) => assert!(said.contains(&churn.pid().to_string()), "kill {time}: {status}\n{said}"),
            None => panic!("kill {time}: the recorder died of {status}:\n{said}"),
        }
    }
}

#[test]
fn a_recorder_killed_at_twenty_moments_does_no_harm_and_leaves_nothing_behind() {
    kill_recorders(20);
}

#[test]
#[ignore = "about a quarter of an hour: make faults"]
fn a_recorder_killed_at_a_thousand_moments_does_no_harm_and_leaves_nothing_behind() {
    kill_recorders(1000);
}

#[test]
fn a_target_killed_at_ten_moments_leaves_a_complete_profile_or_a_message() {
    kill_targets(10);
}

#[test]
#[ignore = "about a quarter of an hour: make faults"]
fn a_target_killed_at_five_hundred_moments_leaves_a_complete_profile_or_a_message() {
    kill_targets(500);
}

#[test]
fn a_recorder_that_is_stopped_for_a_while_counts_its_losses_and_reports_the_rest_correctly() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut target = Target::start(&mut Command::new(program("speed", Link::Dynamic)));
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--buffer-kib", "256"]);
    recording.process.signal(Signal::STOP);
    // 200,000 pairs of records: fifty times what the ring holds.
    target.go_to("speed");
    recording.process.signal(Signal::CONT);
    let truth = target.go_to("speed");
    let report = recording.stop();
    let lost = |kind: &str| report.losses.get(kind).and_then(serde_json::Value::as_u64).unwrap_or(0);
    assert!(lost("lost_allocations") > 0 && lost("lost_frees") > 0, "{:?}", report.losses);
    let seen = report.by_site(target.pid());
    let made = truth.sites[0].allocations;
    assert!(seen["site_pair"].allocations < made, "{} of {made}", seen["site_pair"].allocations);
    // Every live block is marked as doubtful: the record of its free may have been lost.
    let pair = &seen["site_pair"];
    assert!(pair.inuse_bytes <= pair.doubtful_bytes.unwrap_or(0), "{pair:?}");
    assert!(target.process.is_running());
}
