//! `fragprof trim`: what it gives back against the kernel's own account, every refusal, and that no process is harmed, whenever the
//! command is killed.

mod harmless;
mod refusals;
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
fn build(from: &str, name: &str, flags: &[&str]) -> PathBuf {
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
fn states() -> PathBuf {
    build("states.c", "states", &["-pthread"])
}

/// A started target: it ends when its input does.
struct Target {
    process: Process,
}

impl Target {
    /// Starts a command and waits until it says that it is ready.
    fn start(command: &mut Command) -> Self {
        let process = Process::start_piped(command);
        let ready = process.out.wait_for(LIMIT, |line| line == "ready");
        assert!(ready.is_some(), "the target is not ready: {}", process.err);
        Self { process }
    }

    /// One in a state, with its heap of this many MiB.
    fn in_state(state: &str, mib: u32, threads: u32) -> Self {
        Self::start(Command::new(states()).args([state, &mib.to_string(), &threads.to_string()]))
    }

    fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// What the kernel says is resident.
    fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
    }

    /// No thread of it is stopped or traced.
    fn assert_free(&self) {
        let is_free = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten();
            tasks.filter_map(|task| std::fs::read_to_string(task.path().join("status")).ok()).all(|status| {
                let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim().to_owned();
                field("TracerPid:") == "0" && !field("State:").starts_with(['t', 'T'])
            })
        };
        wait_until("no thread is stopped or traced", is_free);
    }

    /// Ends it; its last line.
    fn end(mut self) -> String {
        drop(self.process.input());
        let status = self.process.wait(LIMIT);
        assert!(status.success(), "{status}: {}", self.process.err);
        self.process.out.all().lines().last().unwrap_or_default().to_owned()
    }
}

/// Runs `fragprof trim PID --json`, with more arguments; its report.
fn trim(pid: u32, more: &[&str]) -> Value {
    let done = run(fragprof().args(["trim", &pid.to_string(), "--json"]).args(more));
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
