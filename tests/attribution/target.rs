//! The program that computes what it pins, and reports of recordings of it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::LIMIT;
use crate::support::process::{Process, run};
use crate::support::recording::{Recording, fragprof};

/// Builds the program once per test run; returns its path.
pub fn program() -> PathBuf {
    crate::support::build::standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attribution/keeps.c"), &[])
}

/// The running program.
pub struct Target {
    process: Process,
    input: ChildStdin,
    answers: usize,
    /// Its first answer.
    pub ready: Value,
}

impl Target {
    /// Starts it and waits for its first answer.
    pub fn start(environment: &[(&str, &str)]) -> Self {
        let mut process = Process::start_piped(Command::new(program()).envs(environment.iter().copied()));
        let input = process.input();
        let mut target = Self { process, input, answers: 0, ready: Value::Null };
        target.ready = target.answer();
        target
    }

    /// Sends it a command and returns its answer.
    pub fn tell(&mut self, command: &str) -> Value {
        writeln!(self.input, "{command}").unwrap();
        self.answer()
    }

    fn answer(&mut self) -> Value {
        let line = self.process.out.nth(self.answers, LIMIT).unwrap_or_else(|| panic!("no answer: {}", self.process.err));
        self.answers += 1;
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// `fragprof census PID --json`.
    pub fn census(&self) -> Value {
        let done = run(fragprof().args(["census", &self.pid().to_string(), "--json"]));
        assert!(done.status.success(), "{}", done.err);
        serde_json::from_str(&done.out).unwrap()
    }

    /// Anonymous resident bytes, as the kernel counts them.
    pub fn anonymous_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let line = text.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

/// Ends a recording; its report by live bytes, and a copy of its file that stays until the test's process ends.
pub fn stop(mut recording: Recording) -> (Value, PathBuf) {
    recording.process.signal(Signal::INT);
    let status = recording.wait(LIMIT);
    assert!(status.success(), "{}", recording.process.err);
    let kept = tempfile::Builder::new().suffix(".pb.gz").tempfile().unwrap().into_temp_path().keep().unwrap();
    std::fs::copy(recording.file(), &kept).unwrap();
    (report(&kept, "live"), kept)
}

/// `fragprof report FILE --json --by BY`.
pub fn report(file: &Path, by: &str) -> Value {
    let done = run(fragprof().arg("report").arg(file).args(["--json", "--by", by]));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

/// `fragprof report FILE`.
pub fn text(file: &Path) -> String {
    let done = run(fragprof().arg("report").arg(file));
    assert!(done.status.success(), "{}", done.err);
    done.out
}
