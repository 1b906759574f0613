//! Clocks that are wrong: a wall clock that jumps, a monotonic clock that a time namespace has shifted.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::agent::daemon::{Daemon, value, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::bpf;
use crate::support::build::{Link, program, standalone, tool};
use crate::support::process::{run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::{Report, Since};

/// fragprof in a time namespace whose monotonic clock differs from the kernel's by this many seconds.
fn shifted(unshare: &Path, seconds: i64) -> Command {
    let mut command = Command::new(unshare);
    // The kernel refuses a clock below 0, so it is set back by the machine's uptime at most.
    let up_s = std::fs::read_to_string("/proc/uptime").unwrap().split('.').next().unwrap().parse::<i64>().unwrap();
    let seconds = seconds.max(-up_s / 2);
    command.args(["--time", &format!("--monotonic={seconds}"), &format!("--boottime={seconds}")]).arg(env!("CARGO_BIN_EXE_fragprof"));
    command
}

#[test]
fn a_recorder_in_a_time_namespace_knows_when_its_records_were_made() {
    if bpf().is_none() {
        return;
    }
    let Some(unshare) = tool("unshare") else { return };
    for seconds in [1_000_000, -1_000_000] {
        let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
        let recording = Recording::attach_by(shifted(&unshare, seconds), &[target.pid()], &[]);
        target.go_to("round");
        // Blocks of the first round that the second frees must be a second old: this is a duration, not a condition to wait for.
        std::thread::sleep(Duration::from_secs(1));
        let truth = target.go_to("round");
        recording.process.signal(rustix::process::Signal::INT);
        let mut recording = recording;
        assert!(recording.wait(crate::support::LIMIT).success(), "{}", recording.process.err);
        Report::read(&recording.file()).assert_equals(&truth, Since::Attach);
        let done = run(fragprof().arg("report").arg(recording.file()).arg("--json"));
        let page: Value = serde_json::from_str(&done.out).unwrap();
        let lifetimes = page["processes"][0]["lifetimes"].as_array().unwrap().clone();
        let frees: u64 = lifetimes.iter().filter_map(|row| row["frees"].as_u64()).sum();
        let older = |row: &&Value| row["below_us"].as_u64().is_some_and(|below| below > 1_000_000 && below <= 1 << 29);
        let old: u64 = lifetimes.iter().filter(older).filter_map(|row| row["frees"].as_u64()).sum();
        assert!(old > frees / 20, "shifted by {seconds} s: {old} of {frees} freed blocks lived for a second: {lifetimes:?}");
    }
}

const YEAR_S: i64 = 365 * 86400;

/// A wall clock that the test sets.
struct WallClock {
    shift: std::fs::File,
    place: tempfile::TempDir,
}

impl WallClock {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let shift = std::fs::File::options().create(true).truncate(true).read(true).write(true).open(place.path().join("shift")).unwrap();
        shift.write_all_at(&0i64.to_ne_bytes(), 0).unwrap();
        Self { shift, place }
    }

    fn serve(&self, command: &mut Command) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/clock_shift.c");
        command.env("LD_PRELOAD", standalone(&source, &["-shared", "-fPIC"])).env("CLOCK_SHIFT", self.place.path().join("shift"));
    }

    fn jump(&self, seconds: i64) {
        self.shift.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }
}

#[test]
fn an_agent_keeps_running_and_keeps_its_history_when_the_wall_clock_jumps_by_years() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_str().unwrap();
    let target = fragmented(&fragments("faults-clock"), &["16"]);
    let clock = WallClock::new();
    let config = watching(&["faults-clock"], &format!("[history]\ndirectory = {directory:?}\nsample_interval_s = 1\nage_max_days = 30"));
    let path = format!("/api/v1/processes/{}/history?from=-600", target.pid());
    let points = |daemon: &Daemon| {
        let history: Value = serde_json::from_str(&daemon.get(&path).body).unwrap_or_default();
        history["at_unix_s"].as_array().map_or(0, Vec::len)
    };
    let samples = |daemon: &Daemon| value(&daemon.metrics(), "fragprof_history_written_total", "kind=\"sample\"").unwrap_or(0.0);
    let daemon = Daemon::start_with(&config, |_, command| clock.serve(command));
    wait_until("samples of the actual time", || points(&daemon) >= 3);
    for jump in [YEAR_S, -YEAR_S, 0, 40 * YEAR_S, -40 * YEAR_S, 0] {
        clock.jump(jump);
        let before = samples(&daemon);
        wait_until(&format!("samples after a jump to {jump} s"), || samples(&daemon) >= before + 2.0);
        assert_eq!(daemon.get("/healthz").status, 200, "after a jump to {jump} s");
        assert_eq!(daemon.get(&path).status, 200);
    }
    assert_eq!(value(&daemon.metrics(), "fragprof_history_removed_total", "reason=\"aged\""), Some(0.0));
    wait_until("the earlier samples, and new ones", || points(&daemon) >= 5);
}

#[test]
fn a_recording_during_a_wall_clock_jump_has_its_actual_length_and_equals_the_ledger() {
    if bpf().is_none() {
        return;
    }
    let clock = WallClock::new();
    let mut target = Target::start(&mut Command::new(program("rounds", Link::Dynamic)));
    let mut command = fragprof();
    clock.serve(&mut command);
    let began = Instant::now();
    let recording = Recording::attach_by(command, &[target.pid()], &[]);
    clock.jump(86400);
    target.go_to("round");
    clock.jump(-86400);
    let truth = target.go_to("round");
    recording.process.signal(rustix::process::Signal::INT);
    let mut recording = recording;
    assert!(recording.wait(crate::support::LIMIT).success(), "{}", recording.process.err);
    Report::read(&recording.file()).assert_equals(&truth, Since::Attach);
    let done = run(fragprof().arg("report").arg(recording.file()).arg("--json"));
    let page: Value = serde_json::from_str(&done.out).unwrap();
    let duration_s = page["duration_s"].as_f64().unwrap();
    assert!(duration_s > 0.0 && duration_s <= began.elapsed().as_secs_f64(), "{duration_s} s");
}
