//! `fragprof record`, attached to a process or with a command, as run by a user.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use super::LIMIT;
use super::process::Process;
use super::rendezvous::Rendezvous;
use super::report::Report;

/// Longer than a test: recordings end with a signal or with the target.
const DURATION: &str = "300s";

/// The command under test.
pub fn fragprof() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fragprof"))
}

/// A running recording.
pub struct Recording {
    /// The recorder.
    pub process: Process,
    dir: TempDir,
}

impl Recording {
    /// Starts `fragprof record -p PID…` and waits until it records.
    pub fn attach(pids: &[u32]) -> Self {
        Self::attach_by(fragprof(), pids, &[])
    }

    /// As [`Recording::attach`], with fragprof started by another command (`unshare … fragprof`) and more options.
    pub fn attach_by(command: Command, pids: &[u32], options: &[&str]) -> Self {
        Self::attach_within(DURATION, command, pids, options)
    }

    /// As [`Recording::attach`], for a test that is longer than others.
    pub fn attach_for(span: Duration, pid: u32) -> Self {
        Self::attach_within(&format!("{}s", span.as_secs()), fragprof(), &[pid], &[])
    }

    fn attach_within(duration: &str, mut command: Command, pids: &[u32], options: &[&str]) -> Self {
        command.args(["record", "--duration", duration]).args(options);
        for pid in pids {
            command.args(["-p", &pid.to_string()]);
        }
        let recording = Self::start(&mut command, &[]);
        recording.wait_until_attached(pids.len());
        recording
    }

    /// Starts `fragprof record -- CMD…` with the program's rendezvous and environment.
    pub fn launch(rendezvous: &Rendezvous, program: &Path, args: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = fragprof();
        command.args(["record", "--duration", DURATION]).env("TRUTH_SOCKET", rendezvous.path());
        command.envs(env.iter().copied());
        let target: Vec<&OsStr> = std::iter::once(program.as_os_str()).chain(args.iter().map(OsStr::new)).collect();
        Self::start(&mut command, &target)
    }

    /// Starts `command` with `-o FILE`, followed by `-- TARGET…`.
    pub fn start(command: &mut Command, target: &[&OsStr]) -> Self {
        let dir = TempDir::new().expect("a temporary directory can be created");
        command.arg("-o").arg(dir.path().join("out.pb.gz"));
        if !target.is_empty() {
            command.arg("--").args(target);
        }
        Self { process: Process::start(command), dir }
    }

    /// Waits until the recorder reports that it records: once for each target.
    pub fn wait_until_attached(&self, targets: usize) {
        let said = self.process.err.wait_for(LIMIT, |line| line.to_lowercase().contains("recording"));
        assert!(said.is_some(), "fragprof does not record {targets} targets; output:\n{}\n{}", self.process.out, self.process.err);
    }

    /// The profile file.
    pub fn file(&self) -> PathBuf {
        self.dir.path().join("out.pb.gz")
    }

    /// Ctrl-C: the recorder must write the profile so far.
    pub fn stop(self) -> Report {
        self.process.signal(Signal::INT);
        self.finish()
    }

    /// Waits for the recording to end by itself, which must succeed.
    pub fn finish(mut self) -> Report {
        let status = self.wait(LIMIT);
        assert!(status.success(), "fragprof record ended with {status}:\n{}\n{}", self.process.out.all(), self.process.err.all());
        Report::read(&self.file())
    }

    /// Waits for the end, successful or not.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        self.process.wait(limit)
    }
}
