//! `fragprof trim`: what it gives back against the kernel's own account, every refusal, what pins the rest, and that no process is harmed,
//! whenever the command is killed.

mod figures;
pub(crate) mod harmless;
mod pinned;
pub(crate) mod programs;
mod refusals;
mod shared;
mod truth;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::LIMIT;
use crate::support::build::{output_dir, standalone};
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::fragprof;

/// A source of this directory.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trim").join(name)
}

/// Builds a source of this directory under a name of its own: several builds of one source run at the same time.
pub(crate) fn build(from: &str, name: &str, flags: &[&str]) -> PathBuf {
    let copy = output_dir().join(format!("trim-{name}.c"));
    let text = std::fs::read(source(from)).unwrap();
    if std::fs::read(&copy).ok().as_ref() != Some(&text) {
        let unfinished = copy.with_extension(format!("{}-{name}", std::process::id()));
        std::fs::write(&unfinished, text).unwrap();
        std::fs::rename(unfinished, &copy).unwrap();
    }
    standalone(&copy, flags)
}

/// The program whose first argument names a state.
pub(crate) fn states() -> PathBuf {
    build("states.c", "states", &["-pthread"])
}

/// A started target: it ends when its input does.
pub(crate) struct Target {
    pub(crate) process: Process,
}

impl Target {
    /// Starts a command and waits until it says that it is ready.
    pub(crate) fn start(command: &mut Command) -> Self {
        let process = Process::start_piped(command);
        let ready = process.out.wait_for(LIMIT, |line| line == "ready");
        assert!(ready.is_some(), "the target is not ready: {}", process.err);
        Self { process }
    }

    /// One in a state, with its heap of this many MiB.
    pub(crate) fn in_state(state: &str, mib: u32, threads: u32) -> Self {
        Self::start(Command::new(states()).args([state, &mib.to_string(), &threads.to_string()]))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// What the kernel says is resident, by its page tables: VmRSS of kernels before 6.2 may be off by 64 pages for each thread (mm/memory.c,
    /// `TASK_RSS_EVENTS_THRESH`).
    fn resident_bytes(&self) -> u64 {
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let line = smaps.lines().find_map(|line| line.strip_prefix("Rss:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// No thread of it is stopped or traced.
    pub(crate) fn assert_free(&self) {
        assert_free(self.pid());
    }

    /// Ends it; its last line.
    pub(crate) fn end(mut self) -> String {
        drop(self.process.input());
        let status = self.process.wait(LIMIT);
        assert!(status.success(), "{status}: {}", self.process.err);
        self.process.out.all().lines().last().unwrap_or_default().to_owned()
    }
}

/// A field of each thread's status, by thread.
pub(crate) fn of_threads(pid: u32, name: &str) -> std::collections::BTreeMap<u32, String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let field = |status: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
    tasks
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            Some((task.file_name().to_str()?.parse().ok()?, field(&status)))
        })
        .collect()
}

/// No thread of a process is stopped or traced.
pub(crate) fn assert_free(pid: u32) {
    wait_until("no thread is stopped or traced", || {
        of_threads(pid, "TracerPid:").values().all(|tracer| tracer == "0")
            && of_threads(pid, "State:").values().all(|state| !state.starts_with(['t', 'T']))
    });
}

/// Pseudo-random numbers (xorshift): each run kills at the same moments, as far as the machine allows.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// A command that makes calls in a process: its arguments in a round, without `--yes --json`.
pub(crate) type Act = fn(pid: u32, round: u32) -> Vec<String>;

/// A trim that is not refused for the stall that it predicts.
pub(crate) fn trims(pid: u32, _round: u32) -> Vec<String> {
    ["trim", &pid.to_string(), "--max-stall", "10s"].map(str::to_owned).to_vec()
}

/// Kills the command when it is about to make the n-th of its requests about the target, for each n. strace counts them: a step lies
/// between any two. Returns how often it was killed.
pub(crate) fn kill_at_every_step(pid: u32, rounds: u32, act: Act) -> u32 {
    let Some(strace) = crate::support::build::tool("strace") else { return 0 };
    let mut killed = 0;
    for round in 0..rounds {
        // A call that is made takes one write of the frames, and eight requests to ptrace: seize, interrupt, registers, dispatch, mask,
        // xsave area, registers, detach.
        let steps = (1..=8).map(|step| ("ptrace", step)).chain([("process_vm_writev", 1), ("wait4", 1)]);
        for (number, (request, step)) in (0..).zip(steps) {
            let inject = format!("inject={request}:signal=KILL:when={step}");
            let mut command = Command::new(&strace);
            command.args(["-f", "-qq", "-o", "/dev/null", "-e", &format!("trace={request}"), "-e", &inject]);
            command.arg(fragprof().get_program()).args(act(pid, round + number)).args(["--yes", "--json"]);
            let status = spawn(&mut command).wait().unwrap();
            killed += u32::from(!status.success());
            assert_free(pid);
            assert!(Path::new(&format!("/proc/{pid}")).exists(), "round {round}, {request} {step}");
        }
    }
    killed
}

/// Kills the command after random times shorter than it usually takes, until that many were killed before their end: some end sooner, so up
/// to three times as many are started. Returns how often it was killed before its end.
pub(crate) fn kill_at_random(pid: u32, kills: u32, seed: u64, act: Act) -> u32 {
    let mut took_us = [0_u64; 9];
    for (round, took_us) in (0..).zip(&mut took_us) {
        let begun = std::time::Instant::now();
        made(&act(pid, round));
        *took_us = begun.elapsed().as_micros() as u64;
    }
    took_us.sort_unstable();
    let mut usual_us = took_us[took_us.len() / 2];
    let mut random = Random(seed);
    let mut killed = 0;
    for round in 0..3 * kills {
        let mut command = spawn(fragprof().args(act(pid, round)).args(["--yes", "--json"]));
        let wait_us = usual_us / 4 + random.below(usual_us * 3 / 4);
        std::thread::sleep(std::time::Duration::from_micros(wait_us));
        let _ = command.kill();
        let is_killed = command.wait().unwrap().code().is_none();
        killed += u32::from(is_killed);
        // It took less: the machine was busier when the usual time was measured.
        usual_us = if is_killed { usual_us } else { usual_us * 19 / 20 };
        if killed == kills {
            break;
        }
    }
    assert_free(pid);
    killed
}

/// Runs `fragprof trim PID --json`, with more arguments; its report.
fn trim(pid: u32, more: &[&str]) -> Value {
    report(fragprof().args(["trim", &pid.to_string(), "--json"]).args(more))
}

/// Runs a command that makes calls; its report.
pub(crate) fn made(arguments: &[String]) -> Value {
    report(fragprof().args(arguments).args(["--yes", "--json"]))
}

fn report(command: &mut Command) -> Value {
    let done = run(command);
    serde_json::from_str(&done.out).unwrap_or_else(|error| panic!("{error}: {} {}", done.out, done.err))
}

/// The name of the refusal.
fn refused(report: &Value) -> &str {
    report["refused"]["name"].as_str().unwrap_or("")
}

/// Asserts that a call gave back what was predicted, within a hundredth or 256 KiB, by its own account and by the kernel's.
fn assert_predicted(report: &Value, before: u64, after: u64, what: &str) {
    let number = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{what}: no {key} in {report}"));
    let predicted = number("predicted_bytes");
    let allowed = (predicted / 100).max(256 << 10);
    let given = number("given_back_bytes");
    assert!(predicted.abs_diff(given) <= allowed, "{what}: predicted {predicted}, given back {given}");
    let by_kernel = before.saturating_sub(after);
    assert!(predicted.abs_diff(by_kernel) <= allowed + (256 << 10), "{what}: predicted {predicted}, {by_kernel} by the kernel");
}

/// A command without input that is not waited for.
fn spawn(command: &mut Command) -> std::process::Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}
